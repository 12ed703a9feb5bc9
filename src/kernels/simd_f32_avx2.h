/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of floats by AVX2, FMA and F16C for the kernel templates. simd_f32_avx512.h gives the
 * same names and the same bits. Included by *_avx2.c alone. */
#ifndef DCP_KERNELS_SIMD_F32_AVX2_H
#define DCP_KERNELS_SIMD_F32_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd_f32_coef.h"

/* Panels of 6 rows whose sums fit the registers beside VF_LANES others. */
#define VF_FEW_PANELS 1

typedef __m256 vf;
enum {
    VF_LANES = 8,
    VF_PANEL =
        2, /* vectors across a register block; 6 rows x 2 = 12 accumulators of 16 registers */
};

static inline vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf vf_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void vf_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
/* a * b + c */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
/* a * b - c */
static inline vf vf_fms(vf a, vf b, vf c)
{
    return _mm256_fmsub_ps(a, b, c);
}

/* n < VF_LANES floats, the rest 0; nothing behind them is read or written. */
static inline vf vf_load_n(const float *p, int64_t n)
{
    float part[VF_LANES] = {0.0f};
    memcpy(part, p, (size_t)n * sizeof(*p));
    return vf_load(part);
}
static inline void vf_store_n(float *p, vf x, int64_t n)
{
    float part[VF_LANES];
    vf_store(part, x);
    memcpy(p, part, (size_t)n * sizeof(*p));
}
/* VF_LANES values of 16 bits as floats; n < VF_LANES of them, the rest 0. */
static inline vf vf_load_bf16(const uint16_t *p)
{
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    uint16_t part[VF_LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof(*p));
    return vf_load_bf16(part);
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}
static inline vf vf_load_f16_n(const uint16_t *p, int64_t n)
{
    uint16_t part[VF_LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof(*p));
    return vf_load_f16(part);
}
/* 2 * VF_LANES values of 16 bits, two a lane, for vf_transpose; n < 2 * VF_LANES of them. */
static inline vf vf_load_pairs(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_loadu_si256((const void *)p));
}
static inline vf vf_load_pairs_n(const uint16_t *p, int64_t n)
{
    uint16_t part[2 * VF_LANES] = {0};
    memcpy(part, p, (size_t)n * sizeof(*p));
    return vf_load_pairs(part);
}
/* The first (low) and second (high) value of each lane as a float. */
static inline vf vf_bf16_low(vf pairs)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
static inline vf vf_bf16_high(vf pairs)
{
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), high));
}
/* Lanes below 2^16, as half floats. */
static inline vf vf_from_halves(__m256i lanes)
{
    const __m256i packed = _mm256_packus_epi32(lanes, lanes); /* within each 128 bits */
    const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(joined));
}
static inline vf vf_f16_low(vf pairs)
{
    return vf_from_halves(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(0xffff)));
}
static inline vf vf_f16_high(vf pairs)
{
    return vf_from_halves(_mm256_srli_epi32(_mm256_castps_si256(pairs), 16));
}

/* x[i] lane j <-> x[j] lane i; in doubling steps: 2x2, 4x4, 8x8. */
static inline void vf_transpose(vf x[VF_LANES])
{
    vf y[VF_LANES];
    VF_UNROLL for (int i = 0; i < 8; i += 2)
    {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    VF_UNROLL for (int i = 0; i < 8; i += 4)
    {
        VF_UNROLL for (int j = 0; j < 2; j++)
        {
            const __m256d a = _mm256_castps_pd(y[i + j]);
            const __m256d b = _mm256_castps_pd(y[i + j + 2]);
            x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        const vf a = x[j];
        const vf b = x[4 + j];
        x[j] = _mm256_permute2f128_ps(a, b, 0x20);
        x[4 + j] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

/* x where first <= base + lane < end, -inf elsewhere. */
static inline vf vf_keep_range(vf x, int64_t base, int64_t first, int64_t end)
{
    const __m256i lane =
        _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32((int)base));
    const __m256i drop = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)first), lane),
                                         _mm256_cmpgt_epi32(lane, _mm256_set1_epi32((int)end - 1)));
    return _mm256_blendv_ps(x, _mm256_set1_ps(-VF_INF), _mm256_castsi256_ps(drop));
}

/* 2^x for x <= 127: relative error below 2.5e-7; exactly 1 at 0; 0 below -126; NaN stays. */
static inline vf vf_exp2(vf x)
{
    const vf n = _mm256_floor_ps(x);
    const vf f = _mm256_sub_ps(x, n);
    vf p = _mm256_set1_ps(VF_EXP2_C5);
    p = vf_fma(p, f, _mm256_set1_ps(VF_EXP2_C4));
    p = vf_fma(p, f, _mm256_set1_ps(VF_EXP2_C3));
    p = vf_fma(p, f, _mm256_set1_ps(VF_EXP2_C2));
    p = vf_fma(p, f, _mm256_set1_ps(VF_EXP2_C1));
    p = vf_fma(p, f, _mm256_set1_ps(1.0f));
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const vf scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
    const vf normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(normal, scaled);
}
/* tanh x: absolute error below 2.5e-7, relative too where |x| < 0.625; NaN stays. */
static inline vf vf_tanh(vf x)
{
    const vf sign_bit = _mm256_set1_ps(-0.0f);
    const vf abs = _mm256_andnot_ps(sign_bit, x);
    const vf e = vf_exp2(vf_mul(abs, _mm256_set1_ps(VF_TANH_ARG)));
    const vf one = _mm256_set1_ps(1.0f);
    const vf large = _mm256_or_ps(_mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e)),
                                  _mm256_and_ps(sign_bit, x));
    const vf u = vf_mul(x, x);
    vf p = _mm256_set1_ps(VF_TANH_C4);
    p = vf_fma(p, u, _mm256_set1_ps(VF_TANH_C3));
    p = vf_fma(p, u, _mm256_set1_ps(VF_TANH_C2));
    p = vf_fma(p, u, _mm256_set1_ps(VF_TANH_C1));
    p = vf_fma(p, u, _mm256_set1_ps(VF_TANH_C0));
    const vf small = vf_fma(vf_mul(p, u), x, x);
    const vf is_small = _mm256_cmp_ps(abs, _mm256_set1_ps(0.625f), _CMP_LT_OQ);
    return _mm256_blendv_ps(large, small, is_small);
}

/* Maximum and sum of 64 floats; the sum in an order that every ISA shares: four runs of 16, then
 * halves of 16, 8, 4, 2. */
static inline float vf_max64(const vf x[8])
{
    const vf m = vf_max(vf_max(vf_max(x[0], x[2]), vf_max(x[4], x[6])),
                        vf_max(vf_max(x[1], x[3]), vf_max(x[5], x[7])));
    const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
static inline float vf_sum64(const vf x[8])
{
    const vf s = vf_add(vf_add(vf_add(x[0], x[2]), vf_add(x[4], x[6])),
                        vf_add(vf_add(x[1], x[3]), vf_add(x[5], x[7])));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

#endif
