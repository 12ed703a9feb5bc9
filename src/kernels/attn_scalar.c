/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention in plain C: the readable text of the algorithm, and the kernel of last resort.
 *
 * Per row, over blocks of DCP__ATTN_KEY_BLOCK keys aligned in local index (online softmax, base 2):
 *   t[i] = q . k[i] in units of log2:  scale * log2(e) * dot,  or with softcap
 *          cap * log2(e) * tanh(scale / cap * dot)
 *          (views with scales: dot times the scale of k[i], and p[i] below times that of v[i])
 *   M'   = max(M, ceil(max t))       an integer, so that 2^(M - M') is exact
 *   p[i] = 2^(t[i] - M')             in (0, 1]
 *   l    = l * 2^(M - M') + sum p    o = o * 2^(M - M') + sum p[i] v[i]
 * and at the end out = o / l, lse = (M + log2 l) / log2(e). Sums go block by block, so rounding
 * grows with the number of blocks, not of keys; l carries its rounding error in a second float.
 *
 * Cost n_rows * n_visible * (dk + dv) multiply-adds. Scratch: dv floats. K and V are read once a
 * row. */
#include <assert.h>
#include <float.h>
#include <math.h>

#include "kernels/attn_view.h"

enum { KEY_BLOCK = DCP__ATTN_KEY_BLOCK };

static inline float load_elem(const char *row, int64_t d, dcp_dtype dtype)
{
    if (dtype == DCP_F32) return ((const float *)(const void *)row)[d];
    if (dtype == DCP_I8) return (float)((const int8_t *)row)[d];
    if (dtype == DCP_FP8_E4M3) return dcp__e4m3_to_f32(((const uint8_t *)row)[d]);
    const uint16_t bits = ((const uint16_t *)(const void *)row)[d];
    return dtype == DCP_BF16 ? dcp__bf16_to_f32(bits) : dcp__f16_to_f32(bits);
}

/* 4 partial sums: shorter rounding chains, and independent operations. */
static inline float dot_row(const float *q, const char *k, int64_t dk, dcp_dtype dtype)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int64_t d = 0;
    for (; d + 4 <= dk; d += 4) {
        sum[0] += q[d] * load_elem(k, d, dtype);
        sum[1] += q[d + 1] * load_elem(k, d + 1, dtype);
        sum[2] += q[d + 2] * load_elem(k, d + 2, dtype);
        sum[3] += q[d + 3] * load_elem(k, d + 3, dtype);
    }
    for (; d < dk; d++) sum[0] += q[d] * load_elem(k, d, dtype);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* State of a row: sum (with its rounding error sum_low) and out are relative to 2^max. */
struct row_state {
    float max, sum, sum_low;
};

/* Rows of a block and their scales. */
struct block {
    const char *k[KEY_BLOCK], *v[KEY_BLOCK];
    float k_scale[KEY_BLOCK], v_scale[KEY_BLOCK];
};

/* One block of n keys of one row. */
static inline void attend_block(const struct dcp__attn_job *job, const float *q,
                                const struct block *block, int64_t n, dcp_dtype dtype,
                                struct row_state *state, float *out)
{
    const double log2e = 1.4426950408889634;
    float t[KEY_BLOCK];
    float *const acc = job->scratch;
    float new_max = state->max;
    for (int64_t i = 0; i < n; i++) {
        const float s = dot_row(q, block->k[i], job->dk, dtype) * block->k_scale[i] * job->scale;
        const float capped = job->softcap != 0.0f ? job->softcap * tanhf(s / job->softcap) : s;
        t[i] = capped * (float)log2e;
        new_max = fmaxf(new_max, ceilf(t[i]));
    }
    float block_sum = 0.0f;
    for (int64_t d = 0; d < job->dv; d++) acc[d] = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const float p = exp2f(t[i] - new_max);
        block_sum += p;
        const float weight = p * block->v_scale[i];
        for (int64_t d = 0; d < job->dv; d++) acc[d] += weight * load_elem(block->v[i], d, dtype);
    }
    const float rescale = exp2f(state->max - new_max);
    for (int64_t d = 0; d < job->dv; d++) out[d] = out[d] * rescale + acc[d];
    const float old = state->sum * rescale;
    const float sum = old + block_sum;
    const float old_part = sum - block_sum;
    state->sum_low = state->sum_low * rescale + ((old - old_part) + (block_sum - (sum - old_part)));
    state->sum = sum;
    state->max = new_max;
}

static inline void attend_row(const struct dcp__attn_job *job, int64_t t, int64_t j,
                              dcp_dtype dtype)
{
    const float *const q = job->q + t * job->q_token_stride + j * job->q_head_stride;
    float *const out = job->out + t * job->out_token_stride + j * job->out_head_stride;
    float *const lse = job->lse + t * job->lse_token_stride + j * job->lse_head_stride;
    struct block block;
    /* No finite score is below it, so that the first block needs no case of its own. */
    struct row_state state = {-FLT_MAX, 0.0f, 0.0f};
    int64_t lo;
    int64_t hi;
    attn_row_range(job, t, &lo, &hi);
    for (int64_t d = 0; d < job->dv; d++) out[d] = 0.0f;
    while (lo < hi) {
        const int64_t end = attn_min((lo / KEY_BLOCK + 1) * KEY_BLOCK, hi);
        attn_key_rows(job, lo, end, attn_elem_bytes(dtype), block.k, block.v);
        attn_key_scales(job, lo, end, 1.0f, 1.0f, block.k_scale, block.v_scale);
        attend_block(job, q, &block, end - lo, dtype, &state, out);
        lo = end;
    }
    const float sum = state.sum + state.sum_low;
    if (sum == 0.0f) { /* nothing visible, or every score is -inf */
        *lse = -INFINITY;
        return;
    }
    for (int64_t d = 0; d < job->dv; d++) out[d] /= sum;
    const double ln2 = 0.6931471805599453;
    *lse = (float)((double)state.max * ln2 + log((double)state.sum + (double)state.sum_low));
}

static inline void attend_rows(const struct dcp__attn_job *job, dcp_dtype dtype)
{
    assert(job->view->dtype == dtype);
    for (int64_t t = 0; t < job->n_tokens; t++)
        for (int64_t j = 0; j < job->n_group; j++) attend_row(job, t, j, dtype);
}

void dcp__attn_f32__scalar(const struct dcp__attn_job *job)
{
    attend_rows(job, DCP_F32);
}
void dcp__attn_f16__scalar(const struct dcp__attn_job *job)
{
    attend_rows(job, DCP_F16);
}
void dcp__attn_bf16__scalar(const struct dcp__attn_job *job)
{
    attend_rows(job, DCP_BF16);
}
void dcp__attn_i8__scalar(const struct dcp__attn_job *job)
{
    attend_rows(job, DCP_I8);
}
void dcp__attn_fp8__scalar(const struct dcp__attn_job *job)
{
    attend_rows(job, DCP_FP8_E4M3);
}

size_t dcp__attn_scratch_bytes(int64_t n_rows, int64_t dk, int64_t dv)
{
    /* attn_tpl.h's regions (tile_carve): q, out, scores, sums and ranges of a tile of rows; a
     * packed panel; a block's share of out for few rows. */
    const size_t rows = (size_t)attn_min(n_rows, DCP__ATTN_ROWS_MAX) + DCP__ATTN_ROWS_PAD;
    const size_t k = ((size_t)dk + 31) / 32 * 32;
    const size_t v = ((size_t)dv + 63) / 64 * 64;
    const size_t floats = rows * (k + v + KEY_BLOCK + 16) + 16 * v + (128 + 32) * KEY_BLOCK;
    return floats * sizeof(float) + 4096;
}
