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
    AHEAD = KEYS,                /* keys that row pointers run ahead of a block, for prefetching */
    DIRECT_ROWS = 2 * MR         /* up to here V is widened on the fly */
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
    float *s;                   /* [MR][KEYS] */
    float *max, *sum, *sum_low; /* [n_rows] */
    int64_t *row_lo, *row_hi;   /* [n_rows] */
    const char *k_rows[KEYS + AHEAD], *v_rows[KEYS + AHEAD];
};

/* ---- packing: natural rows of any type to f32 --------------------------------------------------
 */

/* VF_LANES keys to kt columns [0, VF_LANES), PANEL floats a line. */
ATTN_INLINE void pack_keys(const char *const *rows, int64_t dk, dcp_dtype dtype, float *kt)
{
    const int64_t step = dtype == DCP_F32 ? VF_LANES : 2 * VF_LANES;
    const int64_t elem_bytes = dtype == DCP_F32 ? 4 : 2;
    for (int64_t d = 0; d < dk; d += step) {
        const int64_t n = attn_min(step, dk - d);
        vf x[VF_LANES];
        VF_UNROLL for (int i = 0; i < VF_LANES; i++)
        {
            const char *const at = rows[i] + d * elem_bytes;
            if (dtype == DCP_F32)
                x[i] = n == step ? vf_load((const float *)(const void *)at)
                                 : vf_load_n((const float *)(const void *)at, n);
            else
                x[i] = n == step ? vf_load_pairs((const uint16_t *)(const void *)at)
                                 : vf_load_pairs_n((const uint16_t *)(const void *)at, n);
        }
        vf_transpose(x);
        float *const to = kt + d * PANEL;
        if (dtype == DCP_F32) {
            for (int i = 0; i < VF_LANES && i < n; i++) vf_store(to + i * PANEL, x[i]);
            continue;
        }
        for (int i = 0; i < VF_LANES && 2 * i < n; i++) {
            vf_store(to + 2 * i * PANEL, dtype == DCP_BF16 ? vf_bf16_low(x[i]) : vf_f16_low(x[i]));
            if (2 * i + 1 < n)
                vf_store(to + (2 * i + 1) * PANEL,
                         dtype == DCP_BF16 ? vf_bf16_high(x[i]) : vf_f16_high(x[i]));
        }
    }
}

ATTN_INLINE vf load_value(const char *row, int64_t d, dcp_dtype dtype)
{
    if (dtype == DCP_F32) return vf_load((const float *)(const void *)row + d);
    const uint16_t *const at = (const uint16_t *)(const void *)row + d;
    return dtype == DCP_BF16 ? vf_load_bf16(at) : vf_load_f16(at);
}
ATTN_INLINE vf load_value_n(const char *row, int64_t d, int64_t n, dcp_dtype dtype)
{
    if (dtype == DCP_F32) return vf_load_n((const float *)(const void *)row + d, n);
    const uint16_t *const at = (const uint16_t *)(const void *)row + d;
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
            vf_store(v + i * PANEL + x * VF_LANES, n >= VF_LANES ? load_value(rows[i], at, dtype)
                                                   : n > 0 ? load_value_n(rows[i], at, n, dtype)
                                                           : vf_set1(0.0f));
        }
    }
}

/* ---- the two products, n rows (a constant once inlined) ----------------------------------------
 */

/* Memory is asked for evenly while the products run: a step's share of the next block's rows (64
 * bytes for each 32 floats of kt: one line a row and 32 dims of 16 bits). */
ATTN_INLINE void prefetch_keys(const char *const *rows, int64_t step)
{
    for (int64_t line = step * PANEL / 32; line < (step + 1) * PANEL / 32; line++)
        __builtin_prefetch(rows[line % PANEL] + line / PANEL * 64);
}

/* s[r][0..PANEL) = sum_d q[d][r] * kt[d][.]; ahead: PANEL rows to prefetch, or NULL. */
ATTN_INLINE void scores_n(int n, const float *q, const float *kt, int64_t dk,
                          const char *const *ahead, float *s)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++) acc[r][x] = vf_set1(0.0f);
    }
    for (int64_t d = 0; d < dk; d++) {
        vf k[VF_PANEL];
        if (ahead != NULL) prefetch_keys(ahead, d);
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++) k[x] = vf_load(kt + d * PANEL + x * VF_LANES);
        VF_UNROLL for (int r = 0; r < n; r++)
        {
            const vf one_q = vf_set1(q[d * MR + r]);
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++) acc[r][x] = vf_fma(one_q, k[x], acc[r][x]);
        }
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
            vf_store(s + r * KEYS + x * VF_LANES, acc[r][x]);
    }
}

/* o[r][0..PANEL) = o * rescale[r] + sum over keys [first, end) of p[r][key] * value[key][.]; values
 * from natural rows (rows, dims from d on) or, with rows NULL, from v [KEYS][PANEL]. */
ATTN_INLINE void values_n(int n, const float *p, const char *const *rows, int64_t d,
                          dcp_dtype dtype, const float *v, int64_t first, int64_t end,
                          const float *rescale, float *o, int64_t o_pitch)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++) acc[r][x] = vf_set1(0.0f);
    }
    for (int64_t i = first; i < end; i++) {
        vf value[VF_PANEL];
        if (rows != NULL) {
            const int64_t elem_bytes = dtype == DCP_F32 ? 4 : 2;
            for (int64_t at = 0; at < PANEL * elem_bytes; at += 64)
                __builtin_prefetch(rows[i + AHEAD] + d * elem_bytes + at);
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++) value[x] =
                load_value(rows[i], d + x * VF_LANES, dtype);
        } else {
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++) value[x] =
                vf_load(v + i * PANEL + x * VF_LANES);
        }
        VF_UNROLL for (int r = 0; r < n; r++)
        {
            const vf weight = vf_set1(p[r * KEYS + i]);
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++) acc[r][x] =
                vf_fma(weight, value[x], acc[r][x]);
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
#define ATTN_CALL(rows) scores_n(rows, q, kt, dk, NULL, s)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
} ATTN_NOINLINE void scores_ahead(int n, const float *q, const float *kt, int64_t dk,
                                  const char *const *ahead, float *s){
#define ATTN_CALL(rows) scores_n(rows, q, kt, dk, ahead, s)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
} ATTN_NOINLINE void values_packed(int n, const float *p, const float *v, int64_t first,
                                   int64_t end, const float *rescale, float *o, int64_t o_pitch){
#define ATTN_CALL(rows) values_n(rows, p, NULL, 0, DCP_F32, v, first, end, rescale, o, o_pitch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
} ATTN_INLINE
    void values_direct(int n, const float *p, const char *const *v_rows, int64_t d, dcp_dtype dtype,
                       int64_t first, int64_t end, const float *rescale, float *o, int64_t o_pitch)
{
#define ATTN_CALL(rows) values_n(rows, p, v_rows, d, dtype, NULL, first, end, rescale, o, o_pitch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
}

/* ---- softmax of one row of a block -------------------------------------------------------------
 */

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

/* ---- a tile ------------------------------------------------------------------------------------
 */

/* Visible keys of row r in the block at begin, relative to it. */
static inline void row_span(const struct tile *tile, int64_t r, int64_t begin, int64_t *first_out,
                            int64_t *end_out)
{
    *first_out = attn_max(tile->row_lo[r] - begin, 0);
    *end_out = attn_max(attn_min(tile->row_hi[r] - begin, KEYS), *first_out);
}

/* o += P V of rows [r, r + n) of a register block, all of which see keys [first, end). */
ATTN_INLINE void add_values(struct tile *tile, int64_t r, int n, const float *p, bool packed,
                            int64_t first, int64_t end, const float *rescale, dcp_dtype dtype)
{
    for (int64_t d = 0; d < tile->dv; d += PANEL) {
        float *const o = tile->o + r * tile->dv_pad + d;
        if (packed || d + PANEL > tile->dv)
            values_packed(n, p, tile->v + d * KEYS, first, end, rescale, o, tile->dv_pad);
        else
            values_direct(n, p, tile->v_rows, d, dtype, first, end, rescale, o, tile->dv_pad);
    }
}

/* Rows [r0, r0 + n) against the block at begin. */
ATTN_INLINE void attend_rows(struct tile *tile, int64_t r0, int n, int64_t begin, bool packed,
                             dcp_dtype dtype)
{
    float rescale[MR];
    int64_t first[MR];
    int64_t end[MR];
    bool any = false;
    for (int r = 0; r < n; r++) {
        row_span(tile, r0 + r, begin, &first[r], &end[r]);
        any = any || first[r] < end[r];
    }
    if (!any) return;
    for (int64_t key = 0; key < KEYS; key += PANEL)
        if (r0 == 0)
            scores_ahead(n, tile->q, tile->kt + key * tile->dk, tile->dk, tile->k_rows + KEYS + key,
                         tile->s + key);
        else
            scores(n, tile->q + r0 * tile->dk, tile->kt + key * tile->dk, tile->dk, tile->s + key);
    for (int r = 0; r < n; r++)
        if (first[r] < end[r])
            rescale[r] = softmax_row(tile, r0 + r, tile->s + r * KEYS, first[r], end[r]);
    /* Runs of rows that see the same keys. */
    for (int r = 0; r < n;) {
        int run = 1;
        while (r + run < n && first[r + run] == first[r] && end[r + run] == end[r]) run++;
        if (first[r] < end[r])
            add_values(tile, r0 + r, run, tile->s + r * KEYS, packed, first[r], end[r], rescale + r,
                       dtype);
        r += run;
    }
}

ATTN_INLINE void attend_block(struct tile *tile, int64_t begin, dcp_dtype dtype)
{
    const int64_t elem_bytes = dtype == DCP_F32 ? 4 : 2;
    /* Row pointers of the block and some keys more; those that no row sees point to one that is
     * there: their scores are masked, their values skipped. */
    const int64_t first = attn_max(tile->lo - begin, 0);
    const int64_t end = attn_min(tile->hi - begin, KEYS);
    const int64_t end_ahead = attn_min(tile->hi - begin, KEYS + AHEAD);
    attn_key_rows(tile->job, begin + first, begin + end_ahead, elem_bytes, tile->k_rows + first,
                  tile->v_rows + first);
    for (int64_t i = 0; i < first; i++) {
        tile->k_rows[i] = tile->k_rows[first];
        tile->v_rows[i] = tile->v_rows[first];
    }
    for (int64_t i = end_ahead; i < KEYS + AHEAD; i++) {
        tile->k_rows[i] = tile->k_rows[end_ahead - 1];
        tile->v_rows[i] = tile->v_rows[end_ahead - 1];
    }
    for (int64_t key = 0; key < KEYS; key += VF_LANES)
        pack_keys(tile->k_rows + key, tile->dk, dtype,
                  tile->kt + key / PANEL * PANEL * tile->dk + key % PANEL);
    const bool packed = tile->n_rows > DIRECT_ROWS;
    for (int64_t d = packed ? 0 : tile->dv / PANEL * PANEL; d < tile->dv; d += PANEL)
        pack_values(tile->v_rows, first, end, d, tile->dv, dtype, tile->v + d * KEYS);
    for (int64_t r = 0; r < tile->n_rows; r += MR)
        attend_rows(tile, r, (int)attn_min(MR, tile->n_rows - r), begin, packed, dtype);
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
    at += MR * KEYS;
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
