/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of a block to weights. Part of attn_tpl.h.
 *
 * A row is one long chain: its maximum over lanes, the new maximum, the exponentials, their sum. So
 * WEIGH_ROWS rows go through it stage by stage, and one row's waiting is another's work: 4 rows of
 * 64 keys take 82 ns instead of 112 one after the other (AVX-512). */
#ifndef DCP_KERNELS_ATTN_SOFTMAX_TPL_H
#define DCP_KERNELS_ATTN_SOFTMAX_TPL_H

enum { WEIGH_ROWS = 8 };

/* 2^n for an integer n <= 0; 0 from -127 down. */
static inline float pow2_int(float n)
{
    const int32_t bits = (int32_t)(n > -127.0f ? n : -127.0f) + 127;
    const uint32_t u = (uint32_t)bits << 23;
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}
/* Smallest integer >= x; the larger of the two, b if one is no number. */
static inline float ceil_f32(float x)
{
    const __m128 v = _mm_set_ss(x);
    return _mm_cvtss_f32(_mm_ceil_ss(v, v));
}
static inline float max_f32(float a, float b)
{
    return _mm_cvtss_f32(_mm_max_ss(_mm_set_ss(a), _mm_set_ss(b)));
}

/* Scales, softcap and mask of a row's scores; returns the row's maximum after this block. */
ATTN_INLINE float finish_scores(const struct tile *tile, int64_t r, float *s)
{
    const int64_t first = tile->span[r].first;
    const int64_t end = tile->span[r].end;
    const bool is_part = end - first < KEYS;
    vf x[N_KV];
    VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] = vf_load(s + i * VF_LANES);
    if (tile->has_scales) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] =
            vf_mul(x[i], vf_load(tile->k_scale + i * VF_LANES));
    }
    if (tile->cap_scale != 0.0f) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] =
            vf_tanh(vf_mul(x[i], vf_set1(tile->cap_scale)));
    }
    if (is_part) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) x[i] =
            vf_keep_range(x[i], i * VF_LANES, first, end);
    }
    if (tile->has_scales || tile->cap_scale != 0.0f || is_part) {
        VF_UNROLL for (int i = 0; i < N_KV; i++) vf_store(s + i * VF_LANES, x[i]);
    }
    /* scale2 > 0, so the largest product is the product of the largest; a block that holds -inf
     * alone leaves the maximum where it was. */
    return max_f32(ceil_f32(vf_max64(x) * tile->scale2), tile->max[r]);
}

/* Finished scores to weights in place, keys that are masked to 0; returns their sum. */
ATTN_INLINE float weigh_scores(const struct tile *tile, float new_max, float *s)
{
    /* A maximum that rounding moved by more than a fraction of 1 must meet a product that was
     * rounded like it: the exact product is up to half an ulp away, 2^64 or 2^-64 at 1e9. */
    const bool is_huge = fabsf(new_max) > 0x1p22f;
    vf x[N_KV];
    VF_UNROLL for (int i = 0; i < N_KV; i++)
    {
        x[i] = vf_load(s + i * VF_LANES);
        const vf z =
            is_huge ? vf_fms(vf_mul(x[i], vf_set1(tile->scale2)), vf_set1(1.0f), vf_set1(new_max))
                    : vf_fms(x[i], vf_set1(tile->scale2), vf_set1(new_max));
        x[i] = vf_exp2(z);
        vf_store(s + i * VF_LANES,
                 tile->has_scales ? vf_mul(x[i], vf_load(tile->v_scale + i * VF_LANES)) : x[i]);
    }
    return vf_sum64(x);
}

/* The state of row r follows; the factor for what was summed before goes to its span. */
static inline void add_to_row(struct tile *tile, int64_t r, float new_max, float block_sum)
{
    const float rescale = pow2_int(tile->max[r] - new_max);
    /* The rounding error of the running sum is kept: lse stays good over thousands of blocks. */
    const float old = tile->sum[r] * rescale;
    const float sum = old + block_sum;
    const float old_part = sum - block_sum;
    tile->sum_low[r] =
        tile->sum_low[r] * rescale + ((old - old_part) + (block_sum - (sum - old_part)));
    tile->sum[r] = sum;
    tile->max[r] = new_max;
    tile->span[r].rescale = rescale;
}

/* Softmax of all rows of the block at begin, scores in s [n_rows][KEYS]. Rows that see none of its
 * keys keep their state; their scores are not looked at. */
ATTN_NOINLINE void weigh_rows(struct tile *tile, int64_t begin, float *s)
{
    int64_t rows[WEIGH_ROWS];
    float new_max[WEIGH_ROWS];
    float sum[WEIGH_ROWS];
    for (int64_t r = 0; r < tile->n_rows;) {
        int n = 0;
        for (; r < tile->n_rows && n < WEIGH_ROWS; r++) {
            int64_t first;
            int64_t end;
            row_span(tile, r, begin, &first, &end);
            tile->span[r] = (struct span){(int32_t)first, (int32_t)end, 1.0f};
            if (first >= end) continue;
            rows[n] = r;
            new_max[n++] = finish_scores(tile, r, s + r * KEYS);
        }
        for (int i = 0; i < n; i++) sum[i] = weigh_scores(tile, new_max[i], s + rows[i] * KEYS);
        for (int i = 0; i < n; i++) add_to_row(tile, rows[i], new_max[i], sum[i]);
    }
}

#endif
