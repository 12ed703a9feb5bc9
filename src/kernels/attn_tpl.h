/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention with vectors: one text for AVX2 and AVX-512. The including file provides a
 * simd_f32_*.h, ATTN_KERNEL(name) and ATTN_FOR_SCALES, 1 for int8 and fp8, 0 for the others;
 * attn_scalar.c is the readable version of the same sums.
 *
 * Idea. Two small matrix products per block of 64 keys with a softmax between them, all in f32:
 *
 *        K block, natural rows          S [rows][64 keys]            V block, natural rows
 *        widened; many rows: turned     = q K^T; mask, softcap,      widened
 *        to [dk][keys]                    2^(c s - max) in place        |
 *               |                            |                          |
 *        q rows or panels --- fma over dk --> S  --- fma over keys ---> o [row][dv]
 *
 * A tile is up to rows_max rows (token, head); it walks over the keys block by block.
 * Few rows (attn_few_tpl.h) are bound by reading memory, many rows (attn_many_tpl.h) by products.
 *
 * Bits. Of many rows a score is one chain of fma over d = 0..dk-1 from 0, of few the sum of 16;
 * which of the two depends on the rows of the call, not of the job. A block's share of o is one
 * chain of fma over the row's own visible keys of the block, ascending, from 0; then o = fma(o,
 * 2^(old max - max), share). So rows do not see each other: keys that a row may not see are
 * skipped, not multiplied by 0, and may hold NaN. AVX2 and AVX-512 give the same bits.
 *
 * Cost n_rows * n_visible * (dk + dv) multiply-adds; per tile and block K and V are read once.
 * Scratch per dcp__attn_scratch_bytes. */
#ifndef DCP_KERNELS_ATTN_TPL_H
#define DCP_KERNELS_ATTN_TPL_H

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/attn_load_tpl.h"
#include "kernels/attn_view.h"

enum {
    KEYS = DCP__ATTN_KEY_BLOCK,
    MR = 6,                      /* rows of a register block */
    PANEL = VF_PANEL * VF_LANES, /* keys or value dims across a register block */
    N_KV = KEYS / VF_LANES,      /* vectors of a row of scores */
    AHEAD = 32,                  /* keys that row pointers run ahead of a block, for prefetching */
    CHUNK = 8192 / PANEL,        /* dims of a packed panel of keys: 32 KiB, most of an L1 */
    FEW_ROWS = 2 * MR
};

/* What row r sees of the block at hand, keys [first, end) of it, and 2^(old max - max). */
struct span {
    int32_t first, end;
    float rescale;
};
/* Row pointers of a block and of AHEAD keys more. */
struct block_rows {
    const char *k[KEYS + AHEAD], *v[KEYS + AHEAD];
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
    float *q; /* [ceil(n_rows / MR)][dk][MR]; few rows: few_q_at */
    float *o; /* [n_rows][dv_pad], relative to 2^max */
    float *s; /* [n_rows][KEYS]; few rows: two of [FEW_ROWS][KEYS], few_rows of each written */
    float *max, *sum, *sum_low; /* [n_rows] */
    float *packed;              /* [CHUNK][PANEL] of keys, [KEYS][PANEL] of values */
    float *share;               /* few rows: [n_rows][dv_pad], a block's part of o */
    int64_t *row_lo, *row_hi;   /* [n_rows] */
    struct span *span;          /* [n_rows] */
    struct block_rows rows[3];  /* of this block and of the next two */
    bool is_few;                /* by attn_few_tpl.h */
    bool has_scales;            /* then those of the block at hand: */
    float k_scale[KEYS], v_scale[KEYS];
};

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

/* ---- a tile ---- */

/* Visible keys of row r in the block at begin, relative to it. */
static inline void row_span(const struct tile *tile, int64_t r, int64_t begin, int64_t *first_out,
                            int64_t *end_out)
{
    *first_out = attn_max(tile->row_lo[r] - begin, 0);
    *end_out = attn_max(attn_min(tile->row_hi[r] - begin, KEYS), *first_out);
}
static inline bool sees_any(const struct tile *tile, int64_t r0, int64_t n, int64_t begin)
{
    for (int64_t r = r0; r < r0 + n; r++)
        if (tile->row_lo[r] < begin + KEYS && tile->row_hi[r] > begin &&
            tile->row_lo[r] < tile->row_hi[r])
            return true;
    return false;
}
/* The first block from begin on that a row sees; tile->hi or more if there is none. */
static inline int64_t next_block(const struct tile *tile, int64_t begin)
{
    while (begin < tile->hi && !sees_any(tile, 0, tile->n_rows, begin)) begin += KEYS;
    return begin;
}

/* Row pointers of the block at begin; those that no row sees point to one that is there: their
 * scores are masked, their values skipped. */
static inline void find_rows(struct tile *tile, int64_t begin, int64_t elem_bytes,
                             struct block_rows *rows)
{
    const int64_t first = attn_max(tile->lo - begin, 0);
    const int64_t end = attn_min(tile->hi - begin, KEYS);
    attn_key_rows(tile->job, begin + first, begin + end, elem_bytes, rows->k + first,
                  rows->v + first);
    for (int64_t i = 0; i < first; i++) {
        rows->k[i] = rows->k[first];
        rows->v[i] = rows->v[first];
    }
    for (int64_t i = end; i < KEYS; i++) {
        rows->k[i] = rows->k[end - 1];
        rows->v[i] = rows->v[end - 1];
    }
}
/* The first rows of the block that comes next follow those of this one. */
static inline void link_rows(struct block_rows *rows, const struct block_rows *next)
{
    for (int64_t i = 0; i < AHEAD; i++) rows->k[KEYS + i] = next->k[i];
    for (int64_t i = 0; i < AHEAD; i++) rows->v[KEYS + i] = next->v[i];
}

/* Scales of the keys of the block at begin that rows see; the others' scores are masked. */
static inline void find_scales(struct tile *tile, int64_t begin, dcp_dtype dtype)
{
    const int64_t first = attn_max(tile->lo - begin, 0);
    const int64_t end = attn_min(tile->hi - begin, KEYS);
    memset(tile->k_scale, 0, sizeof(tile->k_scale));
    memset(tile->v_scale, 0, sizeof(tile->v_scale));
    /* Keys in pairs are 2^16 of an int8; whole vectors of them are not. */
    const float k_factor = dtype != DCP_I8 ? 0x1p8f : tile->is_few ? 1.0f : 0x1p-16f;
    attn_key_scales(tile->job, begin + first, begin + end, k_factor,
                    dtype == DCP_I8 ? 1.0f : 0x1p8f, tile->k_scale + first, tile->v_scale + first);
}

/* Rows from r on, at most MR and below n, that see the same keys. */
static inline int run_of_rows(const struct tile *tile, int64_t r, int64_t n)
{
    const struct span *const span = tile->span + r;
    int run = 1;
    while (run < MR && r + run < n && span[run].first == span->first && span[run].end == span->end)
        run++;
    return run;
}

#include "kernels/attn_softmax_tpl.h"

#include "kernels/attn_few_tpl.h"
#include "kernels/attn_many_tpl.h"

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
    const int64_t q_floats = tile->is_few ? few_rows(tile->n_rows) * few_pitch(tile->dk)
                                          : (tile->n_rows + MR - 1) / MR * MR * tile->dk;
    memset(tile->q, 0, (size_t)q_floats * sizeof(*tile->q));
    tile->lo = INT64_MAX;
    tile->hi = INT64_MIN;
    for (int64_t r = 0; r < tile->n_rows; r++) {
        const int64_t t = tile->t0 + r / tile->n_heads;
        const int64_t j = tile->j0 + r % tile->n_heads;
        const float *const q = job->q + t * job->q_token_stride + j * job->q_head_stride;
        if (tile->is_few) {
            for (int64_t d = 0; d < tile->dk; d++)
                tile->q[few_q_at(tile->n_rows, r, d, tile->dk, job->view->dtype)] = sign * q[d];
        } else {
            float *const panel = tile->q + r / MR * MR * tile->dk + r % MR;
            for (int64_t d = 0; d < tile->dk; d++) panel[d * MR] = sign * q[d];
        }
        attn_row_range(job, t, &tile->row_lo[r], &tile->row_hi[r]);
        if (tile->row_lo[r] < tile->row_hi[r]) {
            tile->lo = attn_min(tile->lo, tile->row_lo[r]);
            tile->hi = attn_max(tile->hi, tile->row_hi[r]);
        }
        tile->max[r] = -FLT_MAX; /* no score is below it: the first block needs no case */
        tile->sum[r] = 0.0f;
        tile->sum_low[r] = 0.0f;
    }
    memset(tile->o, 0, (size_t)(tile->n_rows * tile->dv_pad) * sizeof(*tile->o));
}

ATTN_INLINE void tile_end(const struct tile *tile, dcp_dtype dtype)
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
        for (; d + 2 * VF_LANES <= tile->dv; d += 2 * VF_LANES) {
            vf x[2] = {vf_load(o + d), vf_load(o + d + VF_LANES)};
            if (tile->is_few) sort_values(dtype, x);
            vf_store(out + d, vf_div(x[0], divisor));
            vf_store(out + d + VF_LANES, vf_div(x[1], divisor));
        }
        for (; d < tile->dv; d += VF_LANES) {
            const vf x = vf_div(vf_load(o + d), divisor);
            if (d + VF_LANES <= tile->dv)
                vf_store(out + d, x);
            else
                vf_store_n(out + d, x, tile->dv - d);
        }
        const double exact_sum = (double)tile->sum[r] + (double)tile->sum_low[r];
        *lse = sum == 0.0f ? -INFINITY
                           : (float)(((double)tile->max[r] + log2(exact_sum)) * tile->unit);
    }
}

/* The terms of dcp__attn_scratch_bytes (attn_scalar.c) cover the regions below, each its own. */
_Static_assert(8192 <= KEYS * 128 && PANEL <= 128, "room for a packed panel of either kind");
_Static_assert(FEW_ROWS <= 16, "room for few rows' share, and for two blocks of their scores");
_Static_assert(MR - 1 <= DCP__ATTN_ROWS_PAD, "room for the rows of the last register block");
_Static_assert(SPAN == 32 && KEYS == 64, "pitches of q and out as in dcp__attn_scratch_bytes");
_Static_assert(8 <= 2 * MR && FEW_ROWS % MR == 0, "few_rows fits the rows of register blocks");
_Static_assert(3 * sizeof(float) + 2 * sizeof(int64_t) + sizeof(struct span) <= 16 * sizeof(float),
               "room for a row's maximum, sums, range and span");

/* Cuts scratch into the regions of a tile of n_rows; -> where they end. */
static const char *tile_carve(struct tile *tile, void *scratch, int64_t n_rows)
{
    const int64_t rows = (n_rows + MR - 1) / MR * MR;
    float *at = scratch;
    tile->packed = at;
    at += KEYS * 128; /* CHUNK * PANEL and KEYS * PANEL are at most that */
    tile->q = at;
    at += rows * few_pitch(tile->dk); /* many rows: of dk */
    tile->o = at;
    at += rows * tile->dv_pad;
    tile->share = at;
    at += FEW_ROWS * tile->dv_pad;
    tile->s = at;
    at += (rows + 2 * FEW_ROWS) * KEYS;
    tile->max = at;
    tile->sum = at + rows;
    tile->sum_low = at + 2 * rows;
    at += (3 * rows + 15) / 16 * 16;
    tile->row_lo = (int64_t *)(void *)at;
    tile->row_hi = tile->row_lo + rows;
    tile->span = (struct span *)(void *)(tile->row_hi + rows);
    return (const char *)(tile->span + rows);
}

ATTN_INLINE void attend_job(const struct dcp__attn_job *job, dcp_dtype dtype,
                            few_scores_fn *const *few_scores, few_values_fn *const *few_values)
{
    assert(job->view->dtype == dtype);
    struct few_kernels few = {.values = few_values};
    struct tile tile; /* rows: filled block by block */
    tile.job = job;
    tile.dk = job->dk;
    tile.dv = job->dv;
    tile.has_scales = has_scales(dtype);
    /* The two sum up scores in orders of their own:
     * the call decides, however it is cut into jobs. */
    tile.is_few = attn_max(job->call_rows, job->n_tokens * job->n_group) <= FEW_ROWS;
    tile.dv_pad = (job->dv + KEYS - 1) / KEYS * KEYS;
    /* Whole tokens as long as one fits, in tiles of even size. */
    const int64_t heads = attn_min(job->n_group, DCP__ATTN_ROWS_MAX);
    const int64_t fit = DCP__ATTN_ROWS_MAX / heads;
    const int64_t n_tiles = (job->n_tokens + fit - 1) / fit;
    const int64_t tokens = n_tiles > 0 ? (job->n_tokens + n_tiles - 1) / n_tiles : 0;
    const char *const end = tile_carve(&tile, job->scratch, tokens * heads);
    assert((size_t)(end - (const char *)job->scratch) <=
           dcp__attn_scratch_bytes(job->n_tokens * job->n_group, job->dk, job->dv));
    (void)end;
    for (tile.t0 = 0; tile.t0 < job->n_tokens; tile.t0 += tokens) {
        for (tile.j0 = 0; tile.j0 < job->n_group; tile.j0 += heads) {
            tile.n_heads = attn_min(heads, job->n_group - tile.j0);
            tile.n_rows = tile.n_heads * attn_min(tokens, job->n_tokens - tile.t0);
            tile_begin(&tile);
            if (tile.lo < tile.hi && tile.is_few) {
                few.scores = few_scores[tile.n_rows];
                attend_few(&tile, &few, dtype);
            }
            if (tile.lo < tile.hi && !tile.is_few) attend_many(&tile, dtype);
            tile_end(&tile, dtype);
        }
    }
}

/* A file gets one family or the other: each alone takes long enough to compile. */
#if ATTN_FOR_SCALES
void ATTN_KERNEL(dcp__attn_i8)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_I8, few_scores_i8, few_values_i8);
}
void ATTN_KERNEL(dcp__attn_fp8)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_FP8_E4M3, few_scores_fp8, few_values_fp8);
}
#else
void ATTN_KERNEL(dcp__attn_f32)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_F32, few_scores_f32, few_values_f32);
}
void ATTN_KERNEL(dcp__attn_f16)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_F16, few_scores_f16, few_values_f16);
}
void ATTN_KERNEL(dcp__attn_bf16)(const struct dcp__attn_job *job)
{
    attend_job(job, DCP_BF16, few_scores_bf16, few_values_bf16);
}

#endif

#endif
