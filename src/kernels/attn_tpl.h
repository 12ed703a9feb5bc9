/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention with vectors: one text for AVX2 and AVX-512. The including file provides a
 * simd_f32_*.h and ATTN_KERNEL(name); attn_scalar.c is the readable version of the same sums.
 *
 * Idea. Two small matrix products per block of 64 keys with a softmax between them, all in f32:
 *
 *        K block, natural rows          S [6 rows][64 keys]          V block, natural rows
 *        transposed and widened once    = q K^T; mask, softcap,      widened once a tile, or on the
 *        a tile: kt [panel][dk][16|64]    2^(c s - max) in place     fly where rows are few
 *               |                            |                          |
 *        q panel [dk][6] -- fma over dk -->  S  ---- fma over keys ---> o [row][dv]
 *
 * A tile is up to DCP__ATTN_ROWS_MAX rows (token, head); it walks over the keys block by block, and
 * in a block over its rows 6 at a time (register block: 6 rows x VF_PANEL vectors).
 *
 * Bits. Whatever the number of rows, a score is one chain of fma over d = 0..dk-1 from 0; a block's
 * share of o is one chain of fma over the row's own visible keys of the block, ascending, from 0;
 * then o = fma(o, 2^(old max - max), share). So rows do not see each other: keys that a row may not
 * see are skipped, not multiplied by 0, and may hold NaN. AVX2 and AVX-512 give the same bits.
 *
 * Cost n_rows * n_visible * (dk + dv) multiply-adds; per tile and block K and V are read once.
 * Scratch per dcp__attn_scratch_bytes. */
#ifndef DCP_KERNELS_ATTN_TPL_H
#define DCP_KERNELS_ATTN_TPL_H

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/attn_view.h"

#define ATTN_INLINE static inline __attribute__((always_inline))
#define ATTN_NOINLINE static __attribute__((noinline))

enum {
    KEYS = DCP__ATTN_KEY_BLOCK,
    MR = 6,                      /* rows of a register block */
    PANEL = VF_PANEL * VF_LANES, /* keys or value dims across a register block */
    N_KV = KEYS / VF_LANES,      /* vectors of a row of scores */
    AHEAD = VF_LANES,            /* keys that row pointers run ahead of a block, for prefetching */
    /* Up to here ("few rows") K is transposed in registers and V widened on the fly. */
    FEW_ROWS = VF_FEW_PANELS * MR
};

/* Rows [0, n_rows) of a tile: row r is token t0 + r / n_heads, head j0 + r % n_heads. */
struct tile {
    const struct dcp__attn_job *job;
    int64_t t0, j0, n_heads, n_rows;
    int64_t dk, dv, dv_pad; /* dv_pad: to a multiple of 64, the row pitch of o */
    int64_t lo, hi;         /* hull of what the rows see */
    float scale2;           /* z = scale2 * s - max, s the score or its tanh */
    float cap_scale;        /* s = tanh(cap_scale * dot); 0 = no softcap */
    /* Natural units per unit of z: what scale2 stands for over what it is after rounding. That
     * rounding would else grow with the scores in the LSE. */
    double unit;
    float *q;                   /* [ceil(n_rows / MR)][dk][MR] */
    float *kt;                  /* [KEYS / PANEL][dk][PANEL] */
    float *v;                   /* [dv_pad / PANEL][KEYS][PANEL] */
    float *o;                   /* [n_rows][dv_pad], relative to 2^max */
    float *s;                   /* [FEW_ROWS][KEYS] */
    float *max, *sum, *sum_low; /* [n_rows] */
    int64_t *row_lo, *row_hi;   /* [n_rows] */
    const char *k_rows[KEYS + AHEAD], *v_rows[KEYS + AHEAD];
};

/* ---- natural rows of any type to f32 ---- */

ATTN_INLINE int64_t bytes_of(dcp_dtype dtype)
{
    return dtype == DCP_F32 ? 4 : 2;
}
ATTN_INLINE vf pair_low(vf pairs, dcp_dtype dtype)
{
    return dtype == DCP_BF16 ? vf_bf16_low(pairs) : vf_f16_low(pairs);
}
ATTN_INLINE vf pair_high(vf pairs, dcp_dtype dtype)
{
    return dtype == DCP_BF16 ? vf_bf16_high(pairs) : vf_f16_high(pairs);
}
/* Dims [d, d + n) of VF_LANES keys, transposed: x[i] holds dim d + i (f32), or dims d + 2i and
 * d + 2i + 1 in pairs (16 bits), of every key. is_full: n is as many as x can hold. The same dims
 * of the rows ahead are prefetched. */
ATTN_INLINE void load_keys(const char *const *rows, const char *const *ahead, int64_t d, int64_t n,
                           bool is_full, dcp_dtype dtype, vf x[VF_LANES])
{
    VF_UNROLL for (int i = 0; i < VF_LANES; i++)
    {
        const void *const at = rows[i] + d * bytes_of(dtype);
        __builtin_prefetch(ahead[i] + d * bytes_of(dtype));
        if (dtype == DCP_F32)
            x[i] = is_full ? vf_load(at) : vf_load_n(at, n);
        else
            x[i] = is_full ? vf_load_pairs(at) : vf_load_pairs_n(at, n);
    }
    vf_transpose(x);
}
/* The same as floats to kt [n][PANEL], of which these keys are VF_LANES columns. */
ATTN_INLINE void pack_key_dims(const char *const *rows, const char *const *ahead, int64_t d,
                               int64_t n, bool is_full, dcp_dtype dtype, float *kt)
{
    vf x[VF_LANES];
    load_keys(rows, ahead, d, n, is_full, dtype, x);
    VF_UNROLL for (int i = 0; i < VF_LANES; i++)
    {
        if (dtype == DCP_F32) {
            if (is_full || i < n) vf_store(kt + i * PANEL, x[i]);
        } else {
            float *const to = kt + 2 * i * PANEL;
            if (is_full || 2 * i < n) vf_store(to, pair_low(x[i], dtype));
            if (is_full || 2 * i + 1 < n) vf_store(to + PANEL, pair_high(x[i], dtype));
        }
    }
}
ATTN_INLINE void pack_keys(const char *const *rows, const char *const *ahead, int64_t dk,
                           dcp_dtype dtype, float *kt)
{
    const int64_t step = dtype == DCP_F32 ? VF_LANES : 2 * VF_LANES;
    int64_t d = 0;
    for (; d + step <= dk; d += step)
        pack_key_dims(rows, ahead, d, step, true, dtype, kt + d * PANEL);
    if (d < dk) pack_key_dims(rows, ahead, d, dk - d, false, dtype, kt + d * PANEL);
}

ATTN_INLINE vf load_value(const char *row, int64_t d, dcp_dtype dtype)
{
    const void *const at = row + d * bytes_of(dtype);
    if (dtype == DCP_F32) return vf_load(at);
    return dtype == DCP_BF16 ? vf_load_bf16(at) : vf_load_f16(at);
}
ATTN_INLINE vf load_value_n(const char *row, int64_t d, int64_t n, dcp_dtype dtype)
{
    const void *const at = row + d * bytes_of(dtype);
    if (dtype == DCP_F32) return vf_load_n(at, n);
    return dtype == DCP_BF16 ? vf_load_bf16_n(at, n) : vf_load_f16_n(at, n);
}
/* Dims [d, d + PANEL) of value rows [first, end) of the block to v [KEYS][PANEL], zeros from dv on.
 */
ATTN_INLINE void pack_values(const char *const *rows, int64_t first, int64_t end, int64_t d,
                             int64_t dv, dcp_dtype dtype, float *v)
{
    for (int64_t i = first; i < end; i++) {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            const int64_t at = d + x * VF_LANES;
            const int64_t n = dv - at;
            vf value = vf_set1(0.0f);
            if (n >= VF_LANES)
                value = load_value(rows[i], at, dtype);
            else if (n > 0)
                value = load_value_n(rows[i], at, n, dtype);
            vf_store(v + i * PANEL + x * VF_LANES, value);
        }
    }
}

/* ---- the two products, n rows (a constant once inlined) ---- */

/* s[r][0..PANEL) = sum_d q[d][r] * kt[d][.] */
ATTN_INLINE void scores_n(int n, const float *q, const float *kt, int64_t dk, float *s)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int i = 0; i < n * VF_PANEL; i++)
    {
        acc[i / VF_PANEL][i % VF_PANEL] = vf_set1(0.0f);
    }
    for (int64_t d = 0; d < dk; d++) {
        vf k[VF_PANEL];
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            k[x] = vf_load(kt + d * PANEL + x * VF_LANES);
        }
        VF_UNROLL for (int r = 0; r < n; r++)
        {
            const vf one_q = vf_set1(q[d * MR + r]);
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
            {
                acc[r][x] = vf_fma(one_q, k[x], acc[r][x]);
            }
        }
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            vf_store(s + r * KEYS + x * VF_LANES, acc[r][x]);
        }
    }
}

/* acc[r] += q[d][r] * x for n rows; q in panels of MR rows. */
ATTN_INLINE void add_dim(int n, const float *q, int64_t dk, int64_t d, vf x, vf *acc)
{
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        const float *const one_q = q + r / MR * MR * dk + d * MR + r % MR;
        acc[r] = vf_fma(vf_set1(*one_q), x, acc[r]);
    }
}
/* s[r][0..VF_LANES) = q k of VF_LANES keys straight from their rows: the same chains as scores_n.
 */
ATTN_INLINE void scores_direct_n(int n, const float *q, const char *const *rows,
                                 const char *const *ahead, int64_t dk, dcp_dtype dtype, float *s)
{
    const int64_t step = dtype == DCP_F32 ? VF_LANES : 2 * VF_LANES;
    vf acc[FEW_ROWS];
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        acc[r] = vf_set1(0.0f);
    }
    int64_t d = 0;
    for (; d + step <= dk; d += step) {
        vf x[VF_LANES];
        load_keys(rows, ahead, d, step, true, dtype, x);
        VF_UNROLL for (int i = 0; i < VF_LANES; i++)
        {
            if (dtype == DCP_F32) {
                add_dim(n, q, dk, d + i, x[i], acc);
            } else {
                add_dim(n, q, dk, d + 2 * i, pair_low(x[i], dtype), acc);
                add_dim(n, q, dk, d + 2 * i + 1, pair_high(x[i], dtype), acc);
            }
        }
    }
    if (d < dk) {
        float rest[2 * VF_LANES * PANEL];
        pack_key_dims(rows, ahead, d, dk - d, false, dtype, rest);
        for (int64_t i = d; i < dk; i++) add_dim(n, q, dk, i, vf_load(rest + (i - d) * PANEL), acc);
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        vf_store(s + r * KEYS, acc[r]);
    }
}

/* What to prefetch for the rows that are read after these: n_lines lines of 64 bytes of each. */
struct next_rows {
    const char *const *rows; /* [AHEAD] */
    int64_t offset_bytes, n_lines;
};
ATTN_INLINE void prefetch_ahead(const char *const *rows, int64_t i, int64_t end,
                                int64_t offset_bytes, int64_t n_bytes, const struct next_rows *next)
{
    const char *at = rows[i + AHEAD] + offset_bytes;
    if (i + AHEAD >= end) {
        at = next->rows[i + AHEAD - end] + next->offset_bytes;
        n_bytes = next->n_lines * 64;
    }
    for (int64_t x = 0; x < n_bytes; x += 64) __builtin_prefetch(at + x);
}

/* o[r][0..PANEL) = o * rescale[r] + sum over keys [first, end) of p[r][key] * value[key][.]; values
 * from natural rows (rows, dims from d on) or, with rows NULL, from v [KEYS][PANEL]. */
ATTN_INLINE void values_n(int n, const float *p, const char *const *rows, int64_t d,
                          dcp_dtype dtype, const struct next_rows *next, const float *v,
                          int64_t first, int64_t end, const float *rescale, float *o,
                          int64_t o_pitch)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int i = 0; i < n * VF_PANEL; i++)
    {
        acc[i / VF_PANEL][i % VF_PANEL] = vf_set1(0.0f);
    }
    for (int64_t i = first; i < end; i++) {
        vf value[VF_PANEL];
        if (rows != NULL)
            prefetch_ahead(rows, i, end, d * bytes_of(dtype), PANEL * bytes_of(dtype), next);
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            value[x] = rows != NULL ? load_value(rows[i], d + x * VF_LANES, dtype)
                                    : vf_load(v + i * PANEL + x * VF_LANES);
        }
        VF_UNROLL for (int r = 0; r < n; r++)
        {
            const vf weight = vf_set1(p[r * KEYS + i]);
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
            {
                acc[r][x] = vf_fma(weight, value[x], acc[r][x]);
            }
        }
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        const vf factor = vf_set1(rescale[r]);
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            float *const at = o + r * o_pitch + x * VF_LANES;
            vf_store(at, vf_fma(vf_load(at), factor, acc[r][x]));
        }
    }
}

/* n from 1 to MR as a constant. */
#define ATTN_ROWS_SWITCH(n, call)                                                                  \
    switch (n) {                                                                                   \
    case 1:                                                                                        \
        call(1);                                                                                   \
        break;                                                                                     \
    case 2:                                                                                        \
        call(2);                                                                                   \
        break;                                                                                     \
    case 3:                                                                                        \
        call(3);                                                                                   \
        break;                                                                                     \
    case 4:                                                                                        \
        call(4);                                                                                   \
        break;                                                                                     \
    case 5:                                                                                        \
        call(5);                                                                                   \
        break;                                                                                     \
    default:                                                                                       \
        call(6);                                                                                   \
        break;                                                                                     \
    }

ATTN_NOINLINE void scores(int n, const float *q, const float *kt, int64_t dk, float *s){
#define ATTN_CALL(c) scores_n(c, q, kt, dk, s)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
}
/* n from 1 to FEW_ROWS. q is 0 in the rows that fill its last panel, so one case may serve more. */
ATTN_INLINE void scores_direct(int n, const float *q, const char *const *rows,
                               const char *const *ahead, int64_t dk, dcp_dtype dtype, float *s)
{
#define ATTN_CALL(c) scores_direct_n(c, q, rows, ahead, dk, dtype, s)
#if VF_FEW_PANELS == 2
    if (n > 8) {
        ATTN_CALL(2 * MR);
        return;
    }
    if (n > MR) {
        ATTN_CALL(8);
        return;
    }
#endif
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
}
ATTN_NOINLINE void values_packed(int n, const float *p, const float *v, int64_t first, int64_t end,
                                 const float *rescale, float *o, int64_t o_pitch){
#define ATTN_CALL(c) values_n(c, p, NULL, 0, DCP_F32, NULL, v, first, end, rescale, o, o_pitch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
} ATTN_INLINE void values_direct(int n, const float *p, const char *const *v_rows, int64_t d,
                                 dcp_dtype dtype, const struct next_rows *next, int64_t first,
                                 int64_t end, const float *rescale, float *o, int64_t o_pitch)
{
#define ATTN_CALL(c) values_n(c, p, v_rows, d, dtype, next, NULL, first, end, rescale, o, o_pitch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
}

/* ---- softmax of one row of a block ---- */

/* 2^n for an integer n <= 0; 0 from -127 down. */
static inline float pow2_int(float n)
{
    const int32_t bits = (int32_t)fmaxf(n, -127.0f) + 127;
    const uint32_t u = (uint32_t)bits << 23;
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}
/* Smallest integer >= x. */
static inline float ceil_f32(float x)
{
    const __m128 v = _mm_set_ss(x);
    return _mm_cvtss_f32(_mm_ceil_ss(v, v));
}

/* Scores to weights in place, keys outside [first, end) to 0; the state of row r follows. Returns
 * the factor for what was summed before. */
ATTN_INLINE float softmax_row(struct tile *tile, int64_t r, float *s, int64_t first, int64_t end)
{
    vf x[N_KV];
    VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] = vf_load(s + i * VF_LANES);
    if (tile->cap_scale != 0.0f) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] =
            vf_tanh(vf_mul(x[i], vf_set1(tile->cap_scale)));
    }
    if (end - first < KEYS) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] =
            vf_keep_range(x[i], i * VF_LANES, first, end);
    }
    /* scale2 > 0, so the largest product is the product of the largest; a block that holds -inf
     * alone leaves the maximum where it was. */
    const float new_max = fmaxf(tile->max[r], ceil_f32(vf_max64(x) * tile->scale2));
    VF_UNROLL for (int i = 0; i < N_KV; i++)
    {
        x[i] = vf_exp2(vf_fms(x[i], vf_set1(tile->scale2), vf_set1(new_max)));
        vf_store(s + i * VF_LANES, x[i]);
    }
    const float block_sum = vf_sum64(x);
    const float rescale = pow2_int(tile->max[r] - new_max);
    /* The rounding error of the running sum is kept: lse stays good over thousands of blocks. */
    const float old = tile->sum[r] * rescale;
    const float sum = old + block_sum;
    const float old_part = sum - block_sum;
    tile->sum_low[r] =
        tile->sum_low[r] * rescale + ((old - old_part) + (block_sum - (sum - old_part)));
    tile->sum[r] = sum;
    tile->max[r] = new_max;
    return rescale;
}

/* ---- a tile ---- */

/* Visible keys of row r in the block at begin, relative to it. */
static inline void row_span(const struct tile *tile, int64_t r, int64_t begin, int64_t *first_out,
                            int64_t *end_out)
{
    *first_out = attn_max(tile->row_lo[r] - begin, 0);
    *end_out = attn_max(attn_min(tile->row_hi[r] - begin, KEYS), *first_out);
}

/* o += P V of rows [r, r + n), n <= MR, all of which see keys [first, end). */
ATTN_INLINE void add_values(struct tile *tile, int64_t r, int n, const float *p, bool few,
                            int64_t first, int64_t end, const float *rescale, dcp_dtype dtype)
{
    for (int64_t d = 0; d < tile->dv; d += PANEL) {
        float *const o = tile->o + r * tile->dv_pad + d;
        if (!few || d + PANEL > tile->dv) {
            values_packed(n, p, tile->v + d * KEYS, first, end, rescale, o, tile->dv_pad);
            continue;
        }
        /* Next come the next dims of these values, or the keys of the next block. */
        const bool is_last = d + 2 * PANEL > tile->dv;
        const struct next_rows next = {
            .rows = is_last ? tile->k_rows + KEYS : tile->v_rows + first,
            .offset_bytes = is_last ? 0 : (d + PANEL) * bytes_of(dtype),
            .n_lines = ((is_last ? tile->dk : PANEL) * bytes_of(dtype) + 63) / 64,
        };
        values_direct(n, p, tile->v_rows, d, dtype, &next, first, end, rescale, o, tile->dv_pad);
    }
}

/* Softmax and values of rows [r0, r0 + n), n <= FEW_ROWS, scores in s. */
ATTN_INLINE void weigh_rows(struct tile *tile, int64_t r0, int n, int64_t begin, bool few,
                            dcp_dtype dtype)
{
    float rescale[FEW_ROWS];
    int64_t first[FEW_ROWS];
    int64_t end[FEW_ROWS];
    for (int r = 0; r < n; r++) {
        row_span(tile, r0 + r, begin, &first[r], &end[r]);
        rescale[r] = 1.0f;
        if (first[r] < end[r])
            rescale[r] = softmax_row(tile, r0 + r, tile->s + r * KEYS, first[r], end[r]);
    }
    /* Runs of rows that see the same keys. 7 to 10 rows go in halves: 4 + 4, not 6 + 2. */
    const int most = n > MR && n <= 10 ? (n + 1) / 2 : MR;
    for (int r = 0; r < n;) {
        int run = 1;
        while (run < most && r + run < n && first[r + run] == first[r] && end[r + run] == end[r])
            run++;
        if (first[r] < end[r])
            add_values(tile, r0 + r, run, tile->s + r * KEYS, few, first[r], end[r], rescale + r,
                       dtype);
        r += run;
    }
}

static inline bool sees_any(const struct tile *tile, int64_t r0, int64_t n, int64_t begin)
{
    for (int64_t r = r0; r < r0 + n; r++) {
        int64_t first;
        int64_t end;
        row_span(tile, r, begin, &first, &end);
        if (first < end) return true;
    }
    return false;
}

/* Row pointers of the block at begin and AHEAD keys more; those that no row sees point to one that
 * is there: their scores are masked, their values skipped. */
ATTN_INLINE void find_rows(struct tile *tile, int64_t begin, int64_t first, int64_t elem_bytes)
{
    const int64_t end = attn_min(tile->hi - begin, KEYS + AHEAD);
    attn_key_rows(tile->job, begin + first, begin + end, elem_bytes, tile->k_rows + first,
                  tile->v_rows + first);
    for (int64_t i = 0; i < first; i++) {
        tile->k_rows[i] = tile->k_rows[first];
        tile->v_rows[i] = tile->v_rows[first];
    }
    for (int64_t i = end; i < KEYS + AHEAD; i++) {
        tile->k_rows[i] = tile->k_rows[end - 1];
        tile->v_rows[i] = tile->v_rows[end - 1];
    }
}

ATTN_INLINE void attend_block(struct tile *tile, int64_t begin, dcp_dtype dtype)
{
    const bool few = tile->n_rows <= FEW_ROWS;
    const int64_t first = attn_max(tile->lo - begin, 0);
    const int64_t end = attn_min(tile->hi - begin, KEYS);
    if (!sees_any(tile, 0, tile->n_rows, begin)) return;
    find_rows(tile, begin, first, bytes_of(dtype));
    for (int64_t key = 0; key < KEYS; key += VF_LANES) {
        const char *const *const rows = tile->k_rows + key;
        if (few) /* after the last keys come values */
            scores_direct((int)tile->n_rows, tile->q, rows,
                          key + AHEAD < KEYS ? rows + AHEAD : tile->v_rows, tile->dk, dtype,
                          tile->s + key);
        else
            pack_keys(rows, rows + AHEAD, tile->dk, dtype,
                      tile->kt + key / PANEL * PANEL * tile->dk + key % PANEL);
    }
    for (int64_t d = few ? tile->dv / PANEL * PANEL : 0; d < tile->dv; d += PANEL)
        pack_values(tile->v_rows, first, end, d, tile->dv, dtype, tile->v + d * KEYS);
    if (few) {
        weigh_rows(tile, 0, (int)tile->n_rows, begin, true, dtype);
        return;
    }
    for (int64_t r = 0; r < tile->n_rows; r += MR) {
        const int n = (int)attn_min(MR, tile->n_rows - r);
        if (!sees_any(tile, r, n, begin)) continue;
        for (int64_t key = 0; key < KEYS; key += PANEL)
            scores(n, tile->q + r * tile->dk, tile->kt + key * tile->dk, tile->dk, tile->s + key);
        weigh_rows(tile, r, n, begin, false, dtype);
    }
}

static void tile_begin(struct tile *tile)
{
    const struct dcp__attn_job *const job = tile->job;
    /* scale2 is kept above 0: the sign goes to q, which changes no rounding; a scale of 0 makes q
     * 0.
     */
    const double log2e = 1.4426950408889634;
    const float cap = fabsf(job->softcap);
    const float size = cap != 0.0f ? cap : job->scale != 0.0f ? fabsf(job->scale) : 1.0f;
    const float sign = job->scale == 0.0f ? 0.0f : job->scale < 0.0f && cap == 0.0f ? -1.0f : 1.0f;
    tile->scale2 = (float)((double)size * log2e);
    tile->cap_scale = cap != 0.0f ? job->scale / cap : 0.0f;
    tile->unit = (double)size / (double)tile->scale2;
    memset(tile->q, 0, (size_t)((tile->n_rows + MR - 1) / MR * MR * tile->dk) * sizeof(*tile->q));
    tile->lo = INT64_MAX;
    tile->hi = INT64_MIN;
    for (int64_t r = 0; r < tile->n_rows; r++) {
        const int64_t t = tile->t0 + r / tile->n_heads;
        const int64_t j = tile->j0 + r % tile->n_heads;
        const float *const q = job->q + t * job->q_token_stride + j * job->q_head_stride;
        float *const panel = tile->q + r / MR * MR * tile->dk + r % MR;
        for (int64_t d = 0; d < tile->dk; d++) panel[d * MR] = sign * q[d];
        attn_row_range(job, t, &tile->row_lo[r], &tile->row_hi[r]);
        if (tile->row_lo[r] < tile->row_hi[r]) {
            tile->lo = attn_min(tile->lo, tile->row_lo[r]);
            tile->hi = attn_max(tile->hi, tile->row_hi[r]);
        }
        tile->max[r] = -1e30f; /* below every finite score: the first block needs no case */
        tile->sum[r] = 0.0f;
        tile->sum_low[r] = 0.0f;
    }
    memset(tile->o, 0, (size_t)(tile->n_rows * tile->dv_pad) * sizeof(*tile->o));
}

static void tile_end(const struct tile *tile)
{
    const struct dcp__attn_job *const job = tile->job;
    for (int64_t r = 0; r < tile->n_rows; r++) {
        const int64_t t = tile->t0 + r / tile->n_heads;
        const int64_t j = tile->j0 + r % tile->n_heads;
        float *const out = job->out + t * job->out_token_stride + j * job->out_head_stride;
        float *const lse = job->lse + t * job->lse_token_stride + j * job->lse_head_stride;
        const float *const o = tile->o + r * tile->dv_pad;
        const float sum = tile->sum[r] + tile->sum_low[r];
        /* 0: nothing visible, or every score is -inf. o is 0 then. */
        const vf divisor = vf_set1(sum == 0.0f ? 1.0f : sum);
        int64_t d = 0;
        for (; d + VF_LANES <= tile->dv; d += VF_LANES)
            vf_store(out + d, vf_div(vf_load(o + d), divisor));
        if (d < tile->dv) vf_store_n(out + d, vf_div(vf_load(o + d), divisor), tile->dv - d);
        const double exact_sum = (double)tile->sum[r] + (double)tile->sum_low[r];
        *lse = sum == 0.0f ? -INFINITY
                           : (float)(((double)tile->max[r] + log2(exact_sum)) * tile->unit);
    }
}

/* Cuts scratch into the regions of a tile of n_rows. */
static void tile_carve(struct tile *tile, void *scratch, int64_t n_rows)
{
    const int64_t rows = (n_rows + MR - 1) / MR * MR;
    float *at = scratch;
    tile->q = at;
    at += (rows * tile->dk + 15) / 16 * 16;
    tile->kt = at;
    at += KEYS * tile->dk;
    tile->v = at;
    at += KEYS * tile->dv_pad;
    tile->o = at;
    at += rows * tile->dv_pad;
    tile->s = at;
    at += FEW_ROWS * KEYS;
    tile->max = at;
    tile->sum = at + rows;
    tile->sum_low = at + 2 * rows;
    at += (3 * rows + 15) / 16 * 16;
    tile->row_lo = (int64_t *)(void *)at;
    tile->row_hi = tile->row_lo + rows;
}

ATTN_INLINE void attend_job(const struct dcp__attn_job *job, dcp_dtype dtype)
{
    assert(job->view->dtype == dtype);
    struct tile tile = {.job = job, .dk = job->dk, .dv = job->dv};
    tile.dv_pad = (job->dv + KEYS - 1) / KEYS * KEYS;
    /* Whole tokens as long as one fits, in tiles of even size. */
    const int64_t heads = attn_min(job->n_group, DCP__ATTN_ROWS_MAX);
    const int64_t fit = DCP__ATTN_ROWS_MAX / heads;
    const int64_t n_tiles = (job->n_tokens + fit - 1) / fit;
    const int64_t tokens = n_tiles > 0 ? (job->n_tokens + n_tiles - 1) / n_tiles : 0;
    tile_carve(&tile, job->scratch, tokens * heads);
    for (tile.t0 = 0; tile.t0 < job->n_tokens; tile.t0 += tokens) {
        for (tile.j0 = 0; tile.j0 < job->n_group; tile.j0 += heads) {
            tile.n_heads = attn_min(heads, job->n_group - tile.j0);
            tile.n_rows = tile.n_heads * attn_min(tokens, job->n_tokens - tile.t0);
            tile_begin(&tile);
            for (int64_t at = tile.lo / KEYS * KEYS; at < tile.hi; at += KEYS)
                attend_block(&tile, at, dtype);
            tile_end(&tile);
        }
    }
}

void ATTN_KERNEL(dcp__attn_f32)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_F32);
}
void ATTN_KERNEL(dcp__attn_f16)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_F16);
}
void ATTN_KERNEL(dcp__attn_bf16)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_BF16);
}

#endif
