/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel types, and the table of those chosen. kernels.inc is the one list: it declares here, fills
 * the selection in select.c, and drives tests and benches. */
#ifndef DCP_KERNELS_KERNELS_PRIV_H
#define DCP_KERNELS_KERNELS_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dcpattn/cache.h"
#include "dcpattn/types.h"

/* ---- attention: rows of one KV head against a range of one view's keys ---- */
/* Row (t, j): token t of n_tokens, query head j of the n_group heads that share this KV head. Keys
 * are local indices; row (t, .) sees [max(lo[t], key_begin), min(hi[t], key_end)), score
 * scale * q.k, with softcap c: c * tanh(score / c). Results: out normalised by the row's own sum,
 * lse natural log; a row that sees nothing (or only scores of -inf) gets 0 and -inf. Block table,
 * keys and values are not read outside the hull of what the rows see, nor in blocks of
 * DCP__ATTN_KEY_BLOCK keys in which no row sees any; a key that one row sees and another does not
 * never touches the other, NaN or not.
 * Determinism: a row's bits depend on its q, its visible range (as cut by key_begin and key_end),
 * the keys, and on whether call_rows is small (up to 12; bf16 on AMX: 32): not on the other rows of
 * the job, nor, with call_rows given, on n_tokens or n_group. The AVX2 and AVX-512 kernels give the
 * same bits. Key blocks are aligned to multiples of DCP__ATTN_KEY_BLOCK in local index. n_tokens,
 * n_group, dk, dv >= 1. out may not overlap q. */
struct dcp__attn_job {
    const dcp_kv_view *view;
    int64_t kv_head;
    int64_t key_begin, key_end;
    int64_t n_tokens, n_group;
    int64_t dk, dv;
    float scale, softcap;   /* softcap 0 = none */
    const int64_t *lo, *hi; /* [n_tokens] */
    const float *q;         /* q[t * q_token_stride + j * q_head_stride + d] */
    int64_t q_token_stride, q_head_stride;
    float *out;
    int64_t out_token_stride, out_head_stride;
    float *lse;
    int64_t lse_token_stride, lse_head_stride;
    void *scratch;               /* of dcp__attn_scratch_bytes, 64-byte aligned, one per thread */
    const dcp_kv_scales *scales; /* of an int8 or fp8 view; NULL = none */
    /* Rows of this sequence in the whole call times query heads of a KV head: every vector kernel
     * has a variant for few rows and one for many, of different bits, and chooses by this alone,
     * however the call is cut into jobs. Less than n_tokens * n_group, or 0 for unknown:
     * that is taken. */
    int64_t call_rows;
};
typedef void dcp__attn_fn(const struct dcp__attn_job *job);
enum {
    /* Keys of a block of every attention kernel. Where keys are split over threads, splits at
     * multiples of it (local index) cost nothing; any other split is right, too. */
    DCP__ATTN_KEY_BLOCK = 64,
    /* Rows (n_tokens * n_group) that a kernel works on at once: a job of this many rows reads K and
     * V once. Jobs of more rows are cut inside. */
    DCP__ATTN_ROWS_MAX = 96,
    DCP__ATTN_ROWS_PAD = 8 /* scratch only: rows of the last register block */
};
/* Scratch that any attention kernel needs for jobs of up to n_rows = n_tokens * n_group rows. */
size_t dcp__attn_scratch_bytes(int64_t n_rows, int64_t dk, int64_t dv);
/* Of every kernel at or below isa; at most the one above below AMX. */
size_t dcp__attn_scratch_bytes_for(dcp_isa isa, int64_t n_rows, int64_t dk, int64_t dv);
/* Rows that a job is best given: more keep K and V longer in the caches. DCP__ATTN_ROWS_MAX below
 * AMX; more where tiles can use them. */
int64_t dcp__attn_rows_most(dcp_isa isa, int64_t dv);
/* Whether the kernel chosen at isa for views of dtype rounds q to two bf16 parts and cuts weights
 * to one for a sequence of so many call_rows (dcp__attn_job); out, not lse, is off by that. */
bool dcp__attn_cuts_weights(dcp_isa isa, dcp_dtype dtype, int64_t call_rows);

/* ---- merge: one row of n_parts payloads, weights given ---- */
/* dst[d] = round(sum_p w[p] * part_p[d]), p ascending, first product plain then fused
 * multiply-adds, f32; parts have weight > 0, n_parts >= 1. n_parts = 1 with weight 1 copies bits
 * (with conversion if types differ). dst may be exactly one of the parts if the types are equal.
 * Non-finite values: counted, and taken as 0 if zero_nonfinite. ahead: [n_parts] rows to prefetch
 * meanwhile, any address, or NULL. Returns the count; *first_part_out is lowered to the smallest p
 * that held one (the caller starts it at n_parts). Bits are the same on every ISA. */
typedef int64_t dcp__merge_row_fn(const void *const *parts, const float *w, int n_parts,
                                  int64_t dim, void *dst, bool zero_nonfinite,
                                  const void *const *ahead, int *first_part_out);
/* Rows of two parts, both of positive weight, for the commonest merge. Every pointer moves on by
 * its hop (bytes) from row to row. */
struct dcp__merge_pair {
    const char *parts[2];
    const char *ahead[2]; /* rows to prefetch meanwhile, any address; parts itself: none to come */
    const float *w[2];    /* [n_rows] */
    char *dst;
    int64_t part_hop[2], dst_hop;
    /* How many bytes beyond what is stored lines are fetched meanwhile; 0: none. As if to be read:
     * the flags of these kernels have no prefetchw. The last of them lie past the end of the
     * result, by as much (512): a prefetch of an address that is not mapped does nothing. */
    int64_t dst_ahead;
    int n_rows;
};
/* What dcp__merge_row_fn makes of each row, to the bit, with one call for many. Returns how many
 * rows are done: all, or those up to the first that holds a non-finite value, which *n_bad_out and
 * *first_part_out describe (0 and untouched if there is none). */
typedef int dcp__merge_pair_fn(const struct dcp__merge_pair *pair, int64_t dim, bool zero_nonfinite,
                               int64_t *n_bad_out, int *first_part_out);

/* The hardware's own prefetcher stops at the end of a page and needs lines of the next one to go
 * on; where rows follow each other, the first ones are asked for some KiB beyond the row ahead.
 * Measured from memory, N = 2, (512, 96, 512) in place, in turns: 5 to 8 % less time for float32,
 * 3 to 5 % for bf16. */
enum { DCP__PAGE_BYTES = 4096, DCP__PAGE_LINES = 3, DCP__PAGE_AHEAD_MIN = 2048 };

/* ahead: a row of row_bytes that is being fetched. Only for rows that follow each other. */
static inline void dcp__merge_start_page(const char *ahead, int64_t row_bytes)
{
    const int64_t beyond =
        2 * row_bytes > DCP__PAGE_AHEAD_MIN ? 2 * row_bytes : DCP__PAGE_AHEAD_MIN;
    const char *const at = ahead + beyond;
    const uintptr_t inside = (uintptr_t)at % DCP__PAGE_BYTES;
    if (inside >= (uintptr_t)row_bytes) return; /* no page begins here or has just ended */
    for (int i = 0; i < DCP__PAGE_LINES; i++) __builtin_prefetch(at - inside + 64 * i, 0, 3);
}

/* Kernels of merge_row_nt store past the caches: for results so large that their lines would be
 * fetched for nothing. dst aligned to DCP__MERGE_NT_ALIGN and none of the parts; same bits. After
 * the last row dcp__merge_fence orders the stores before what the caller tells its peers. */
enum { DCP__MERGE_NT_ALIGN = 64 };
void dcp__merge_fence(void);
/* The same for elements [begin, end) of a row, by types at run time, element by element. */
int64_t dcp__merge_row_plain(dcp_dtype part_type, dcp_dtype merged_type, const void *const *parts,
                             const float *w, int n_parts, int64_t begin, int64_t end, void *dst,
                             bool zero_nonfinite, int *first_part_out);

/* Rows whose weights are computed at once. */
enum { DCP__MERGE_ROWS = 16 };
/* For each row j of DCP__MERGE_ROWS: top = max_p lse[p][j]; S = sum_p exp(lse[p][j] - top), p
 * ascending; merged_lse[j] = top + log(S); w[p][j] = exp(lse[p][j] - m) / S', where m and S' are
 * top and S, or with a sink m = max(top, sink[j]) and S' = sum_p exp(lse[p][j] - m) + exp(sink[j] -
 * m). exp and log in the declared base, by vmath_tpl.h. lse, w [n_parts][DCP__MERGE_ROWS], may not
 * overlap; lse finite, or -inf for an empty part (weight 0); sink [DCP__MERGE_ROWS] or NULL, finite
 * or -inf. All empty: weights 0, merged LSE -inf. Weights below 2^-126 are 0. */
typedef void dcp__merge_weights_fn(const float *lse, int n_parts, bool is_base_2, const float *sink,
                                   float *w, float *merged_lse);

/* ---- products on quantised rows ---- */
/* GGML block types by their numbers in a GGUF file. */
enum dcp__qtype {
    DCP__Q_F32 = 0,
    DCP__Q_F16 = 1,
    DCP__Q_Q4_0 = 2,
    DCP__Q_Q4_1 = 3,
    DCP__Q_Q5_0 = 6,
    DCP__Q_Q5_1 = 7,
    DCP__Q_Q8_0 = 8,
    DCP__Q_Q4_K = 12,
    DCP__Q_Q5_K = 13,
    DCP__Q_Q6_K = 14,
    DCP__Q_BF16 = 30
};
/* Elements and bytes of a block; 0 for an unknown type. */
int64_t dcp__q_block_elems(int qtype);
size_t dcp__q_block_bytes(int qtype);
const char *dcp__q_name(int qtype);
/* y[i] = sum_k W[i][k] * x[k] for n_rows rows of k elements (a multiple of the block), rows
 * row_bytes apart, f32 x: "exact", error of float32. */
typedef void dcp__qdot_fn(const void *w, size_t row_bytes, int64_t n_rows, int64_t k,
                          const float *x, float *y);
/* n_rows rows to f32 (or bf16, rounded to nearest even), dst row stride in elements. */
typedef void dcp__dequant_fn(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst,
                             int64_t dst_stride);

/* ---- the same with activations in int16 (qdot16_priv.h says how and how exact) */
/* Orders in which the digits of the activations are laid out for vpdpbusd. */
enum dcp__q16_order { DCP__Q16_HALVES, DCP__Q16_CHUNKS, DCP__Q16_PLAIN, DCP__Q16_ORDERS };
/* One token's activations. Arrays are 64-byte aligned; scale and pairs are readable, and zero, up
 * to a multiple of 16 groups, planes up to a multiple of 128 elements. A kernel looks at what its
 * type needs: planes[dcp__q16_order(qtype)], or words. */
struct dcp__q16_row {
    const int16_t *words;                  /* [k] */
    const int8_t *planes[DCP__Q16_ORDERS]; /* [2 k], or NULL */
    const float *scale;                    /* [k / 32] */
    const float *pairs;                    /* [k / 32][2]: scale, sum of the group */
    const float *half_sum;                 /* [k / 16] */
};
/* k a multiple of 32. Results as above; the padding of scale and pairs is set. */
typedef void dcp__to_q16_fn(const float *x, int64_t k, int16_t *words, float *scale, float *pairs,
                            float *half_sum);
/* DCP__Q16_ORDERS: by words; -1: no such kernel for this type (single elements). */
int dcp__q16_order(int qtype);
void dcp__q16_lay_out(const int16_t *words, int64_t k, int order, int8_t *planes);
/* What a CPU may have beside its level. */
enum dcp__feature { DCP__FEATURE_NONE, DCP__FEATURE_AVX_VNNI, DCP__FEATURE_AVX512_VNNI };
struct dcp__cpu;
bool dcp__has_feature(const struct dcp__cpu *cpu, enum dcp__feature feature);
/* y[t * y_stride + i] = sum_k W[i][k] x[t][k]; one pass over W for all n_tokens >= 1. Bits of a
 * result depend on its row and token alone, and are the same on every level. */
typedef void dcp__qdot16_fn(const void *w, size_t row_bytes, int64_t n_rows, int64_t k,
                            const struct dcp__q16_row *x, int n_tokens, float *y, int64_t y_stride);

/* dst[i] = bf16(x[i]), rounded to nearest even, dcp__f32_to_bf16's bits. */
typedef void dcp__to_bf16_fn(const float *x, int64_t n, uint16_t *dst);

/* ---- rows through a linear map ---- */
/* y[r * y_stride + j] = sum_i x[r * x_stride + i] * w[i * p + j], one chain of fma over i from 0:
 * the same bits for any n_rows and ISA. w [d][p] of the kernel's type; x and y do not overlap. */
typedef void dcp__project_fn(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                             const void *w, int64_t p, float *y, int64_t y_stride);

/* ---- the table ---- */
struct dcp__kernels {
    dcp_isa isa;
    const char *attn_name[6], *merge_row_name[4][4], *qdot_name[32], *dequant_name[32];
    dcp__attn_fn *attn[6];              /* by dcp_dtype of the view */
    dcp__merge_row_fn *merge_row[4][4]; /* [part type][merged type] */
    dcp__qdot_fn *qdot[32];             /* by qtype */
    dcp__dequant_fn *dequant[32];
    const char *to_bf16_name;
    dcp__to_bf16_fn *to_bf16;
    const char *merge_weights_name[1];
    dcp__merge_weights_fn *merge_weights[1];
    dcp__merge_row_fn *merge_row_nt[4][4]; /* NULL where there is none */
    dcp__merge_pair_fn *merge_pair[4][4], *merge_pair_nt[4][4];
    const char *qdot16_name[32], *to_q16_name;
    dcp__qdot16_fn *qdot16[32]; /* NULL for single elements */
    dcp__to_q16_fn *to_q16;
    const char *project_name[4];
    dcp__project_fn *project[4]; /* by type of the map: f32, bf16 */
};
/* The best of each at or below isa; never NULL for a type that exists. */
void dcp__kernels_select(dcp_isa isa, struct dcp__kernels *out);

/* Declarations from the list. */
#define ATTN(isa, dtype, fn) dcp__attn_fn fn;
#define ATTN_QUANT(isa, dtype, fn) dcp__attn_fn fn;
#define MERGE_ROW(isa, part, merged, fn)                                                           \
    dcp__merge_row_fn fn;                                                                          \
    dcp__merge_pair_fn fn##_pair;
#define MERGE_ROW_NT(isa, part, merged, fn) MERGE_ROW(isa, part, merged, fn)
#define MERGE_WEIGHTS(isa, fn) dcp__merge_weights_fn fn;
#define QDOT(isa, qtype, fn) dcp__qdot_fn fn;
#define DEQUANT(isa, qtype, fn) dcp__dequant_fn fn;
#define TO_BF16(isa, fn) dcp__to_bf16_fn fn;
#define QDOT16(isa, feature, qtype, fn) dcp__qdot16_fn fn;
#define TO_Q16(isa, fn) dcp__to_q16_fn fn;
#define PROJECT(isa, dtype, fn) dcp__project_fn fn;
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT

#endif
