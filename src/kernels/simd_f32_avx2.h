/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of floats by AVX2, FMA and F16C for the kernel templates. simd_f32_avx512.h gives the
 * same names and the same bits. Included by *_avx2.c alone. */
#ifndef DCP_KERNELS_SIMD_F32_AVX2_H
#define DCP_KERNELS_SIMD_F32_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd_f32_coef.h"

/* Scores of few rows at a time: their sums fit beside keys and a row of q. */
#define VF_FEW_DOTS 12
/* Sums of values that fit beside a row and a weight. */
#define VF_FEW_SUMS 12

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
/* 2 * VF_LANES values of 16 bits, two a lane. */
static inline vf vf_load_pairs(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_loadu_si256((const void *)p));
}
/* Half a vector from each; n_bytes < VF_LANES * 2 of each, the rest 0. */
static inline vf vf_load_halves(const void *low, const void *high)
{
    const __m256 a = _mm256_castps128_ps256(_mm_loadu_ps(low));
    return _mm256_insertf128_ps(a, _mm_loadu_ps(high), 1);
}
static inline vf vf_load_halves_n(const void *low, const void *high, int64_t n_bytes)
{
    char part[VF_LANES * 4] = {0};
    memcpy(part, low, (size_t)n_bytes);
    memcpy(part + sizeof(part) / 2, high, (size_t)n_bytes);
    return _mm256_loadu_ps((const float *)(const void *)part);
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

/* Bytes, two int16 a lane, VF_LANES of each of two: of int8 themselves, of e4m3 a half float that
 * is 2^-8 of the number. vf_i16_low and _high give 2^16 of the integer;
 * n < VF_LANES, the rest 0. */
static inline vf vf_load_halves_i8(const void *low, const void *high)
{
    const __m128i a = _mm_cvtepi8_epi16(_mm_loadl_epi64(low));
    const __m128i b = _mm_cvtepi8_epi16(_mm_loadl_epi64(high));
    return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
}
static inline vf vf_load_halves_i8_n(const void *low, const void *high, int64_t n)
{
    uint8_t part[2][VF_LANES] = {{0}};
    memcpy(part[0], low, (size_t)n);
    memcpy(part[1], high, (size_t)n);
    return vf_load_halves_i8(part[0], part[1]);
}
static inline vf vf_i16_low(vf pairs)
{
    return _mm256_cvtepi32_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
static inline vf vf_i16_high(vf pairs)
{
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_castps_si256(pairs), high));
}
/* e4m3, sign-extended, to half floats: exponent and mantissa move as they are, and the two biases
 * differ by 8. NaN has to be put in by hand. */
static inline __m256i vf_e4m3_halves(__m256i bytes)
{
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xbf80));
    const __m256i size = _mm256_or_si256(half, _mm256_set1_epi16((short)0x8000));
    const __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16((short)0xbf80));
    return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
}
static inline vf vf_load_halves_e4m3(const void *low, const void *high)
{
    return _mm256_castsi256_ps(vf_e4m3_halves(_mm256_castps_si256(vf_load_halves_i8(low, high))));
}
static inline vf vf_load_halves_e4m3_n(const void *low, const void *high, int64_t n)
{
    const vf bytes = vf_load_halves_i8_n(low, high, n);
    return _mm256_castsi256_ps(vf_e4m3_halves(_mm256_castps_si256(bytes)));
}
/* VF_LANES bytes as floats: int8; e4m3 as 2^-8 of the number. */
static inline vf vf_load_i8(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}
static inline vf vf_load_i8_n(const void *p, int64_t n)
{
    uint8_t part[VF_LANES] = {0};
    memcpy(part, p, (size_t)n);
    return vf_load_i8(part);
}
static inline vf vf_load_e4m3(const void *p)
{
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadl_epi64(p));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(vf_e4m3_halves(wide)));
}
static inline vf vf_load_e4m3_n(const void *p, int64_t n)
{
    uint8_t part[VF_LANES] = {0};
    memcpy(part, p, (size_t)n);
    return vf_load_e4m3(part);
}

/* Transposition of half vectors: rows i and i + 4 are the halves of x[i]; after it x[j] holds
 * element j of every row, in order. 4x4 within 128 bits. */
static inline int vf_slot(int i)
{
    return i % 4;
}
static inline void vf_transpose_halves(vf x[VF_LANES / 2])
{
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]));
    x[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    x[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    x[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    x[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}

/* x[0] = even, x[1] = odd elements of 2 * VF_LANES -> the elements in order. */
static inline void vf_interleave(vf x[2])
{
    const vf a = _mm256_unpacklo_ps(x[0], x[1]); /* 0-3, 8-11 */
    const vf b = _mm256_unpackhi_ps(x[0], x[1]);
    x[0] = _mm256_permute2f128_ps(a, b, 0x20);
    x[1] = _mm256_permute2f128_ps(a, b, 0x31);
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

/* out[i] = sum of 16 floats of which x[i] holds the two halves summed: then halves of 8, 4, 2. */
static inline void vf_sums(const vf x[VF_LANES], float out[VF_LANES])
{
    vf y[4];
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        y[j] = _mm256_add_ps(_mm256_permute2f128_ps(x[j], x[j + 4], 0x20),
                             _mm256_permute2f128_ps(x[j], x[j + 4], 0x31));
    }
    VF_UNROLL for (int j = 0; j < 2; j++)
    {
        const __m256d a = _mm256_castps_pd(y[2 * j]);
        const __m256d b = _mm256_castps_pd(y[2 * j + 1]);
        y[j] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    vf_store(out, _mm256_add_ps(_mm256_shuffle_ps(y[0], y[1], 0x88),
                                _mm256_shuffle_ps(y[0], y[1], 0xdd)));
}

#endif
