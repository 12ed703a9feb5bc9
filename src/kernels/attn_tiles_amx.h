/* SPDX-License-Identifier: Apache-2.0 */
/* Code that the AMX attention kernels share; included by attn_*_amx.c alone. */
#ifndef DCP_KERNELS_ATTN_TILES_AMX_H
#define DCP_KERNELS_ATTN_TILES_AMX_H

#include <math.h>
#include <string.h>

#include "kernels/attn_amx_priv.h"
#include "kernels/simd_f32_avx512.h"
#include "kernels/tile_amx.h"

/* A maximum below every score of a size that is left to tiles: the first block needs no case of its
 * own. A row that sees keys and still has it at the end is left to AVX-512. */
static const float amx_no_max = -3e38f;
/* How far, in powers of two, a score may exceed the reference before that moves. The reference is
 * an integer, so moving it is exact; weights, in bf16 too, have float32's range. */
static const float amx_slack = 40.0f;
/* Rows whose maximum is beyond this are left to AVX-512: the exact product of a score and its scale
 * would be too far from a maximum that was rounded. */
static const float amx_huge_max = 0x1p22f;
static inline bool amx_is_huge(float max)
{
    return (max > amx_huge_max || max < -amx_huge_max) && max != amx_no_max;
}

static inline void amx_job_begin(struct amx_job *a, const struct dcp__attn_job *job)
{
    const double log2e = 1.4426950408889634;
    const float cap = fabsf(job->softcap);
    const float size = cap != 0.0f ? cap : job->scale != 0.0f ? fabsf(job->scale) : 1.0f;
    a->job = job;
    a->n_rows = job->n_tokens * job->n_group;
    a->k_steps = amx_div_up(job->dk, AMX_STEP);
    a->v_steps = amx_div_up(job->dv, AMX_STEP);
    a->sign = job->scale == 0.0f ? 0.0f : job->scale < 0.0f && cap == 0.0f ? -1.0f : 1.0f;
    a->scale2 = (float)((double)size * log2e);
    a->cap_scale = cap != 0.0f ? job->scale / cap : 0.0f;
    a->unit = (double)size / (double)a->scale2;
}

/* The hull of what tokens [t0, t1) see. Tokens in the order of their keys leave no holes. */
static inline void amx_set_hull(struct amx_job *a, int64_t t0, int64_t t1)
{
    a->t0 = t0;
    a->t1 = t1;
    a->lo = INT64_MAX;
    a->hi = INT64_MIN;
    a->has_holes = false;
    for (int64_t t = t0; t < t1; t++) {
        int64_t lo;
        int64_t hi;
        attn_row_range(a->job, t, &lo, &hi);
        if (lo >= hi) continue;
        if (a->lo < a->hi && (lo > a->hi || hi < a->lo)) a->has_holes = true;
        a->lo = attn_min(a->lo, lo);
        a->hi = attn_max(a->hi, hi);
    }
}

/* Keys [begin, begin + 16) as tiles: natural rows where that can be, else a copy in stage
 * [16][64 * n_steps bytes], 0 where nothing is; groups that no row sees are zeros. in_lines: a
 * copy, too, where rows would cross lines of 64 bytes, which makes every load of a tile five times
 * as slow: for keys that are loaded again and again. */
static inline struct amx_keys amx_find_keys(const struct amx_job *a, int64_t begin, bool is_value,
                                            bool in_lines, char *stage)
{
    if (begin + AMX_GROUP <= a->lo || begin >= a->hi || amx_is_unseen(a, begin))
        return (struct amx_keys){a->zeros, 0};
    const struct amx_keys natural = amx_natural_keys(a, begin, is_value);
    const uint64_t off_line = ((uintptr_t)natural.at | (uint64_t)natural.stride) % TILE_ROW_BYTES;
    if (natural.at != NULL && (!in_lines || off_line == 0)) return natural;
    const char *k_rows[AMX_GROUP];
    const char *v_rows[AMX_GROUP];
    const int64_t dims = is_value ? a->job->dv : a->job->dk;
    const int64_t first = attn_max(begin, a->lo);
    const int64_t end = attn_min(begin + AMX_GROUP, a->hi);
    const int64_t stride = amx_div_up(dims, AMX_STEP) * TILE_ROW_BYTES;
    attn_key_rows(a->job, first, end, 2, k_rows, v_rows);
    memset(stage, 0, (size_t)(AMX_GROUP * stride));
    for (int64_t key = first; key < end; key++)
        memcpy(stage + (key - begin) * stride, (is_value ? v_rows : k_rows)[key - first],
               (size_t)(2 * dims));
    return (struct amx_keys){stage, stride};
}

/* 16 floats as bf16, nearest even, in the low halves of 16 words; NaN stays, denormals go to 0. */
AMX_INLINE __m512i amx_bf16_words(__m512 x)
{
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}
AMX_INLINE __m512 amx_words_f32(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

/* 2^z: 8 operations. Relative error below 2.5e-7; exactly 1 at 0; 0 far below; NaN stays. */
AMX_INLINE __m512 amx_exp2(__m512 z)
{
    const __m512 f = _mm512_reduce_ps(z, 0x09); /* z - floor(z) */
    __m512 p = _mm512_set1_ps(VF_EXP2_C5);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(VF_EXP2_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(VF_EXP2_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(VF_EXP2_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(VF_EXP2_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, z);
}

/* Row r of the job. */
static inline const float *amx_q_row(const struct amx_job *a, int64_t r)
{
    const struct dcp__attn_job *const job = a->job;
    return job->q + r / job->n_group * job->q_token_stride + r % job->n_group * job->q_head_stride;
}
static inline float *amx_out_row(const struct amx_job *a, int64_t r)
{
    const struct dcp__attn_job *const job = a->job;
    return job->out + r / job->n_group * job->out_token_stride +
           r % job->n_group * job->out_head_stride;
}
static inline float *amx_lse_row(const struct amx_job *a, int64_t r)
{
    const struct dcp__attn_job *const job = a->job;
    return job->lse + r / job->n_group * job->lse_token_stride +
           r % job->n_group * job->lse_head_stride;
}

#endif
