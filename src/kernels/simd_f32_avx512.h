/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of floats by AVX-512 for the kernel templates. simd_f32_avx2.h gives the same names and
 * the same bits. Included by *_avx512.c alone. */
#ifndef DCP_KERNELS_SIMD_F32_AVX512_H
#define DCP_KERNELS_SIMD_F32_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#include "kernels/simd_f32_coef.h"

/* Scores of few rows at a time: their sums fit beside keys and a row of q. */
#define VF_FEW_DOTS 16
/* Sums of values that fit beside a row and a weight. */
#define VF_FEW_SUMS 24

typedef __m512 vf;
enum {
    VF_LANES = 16,
    VF_PANEL =
        4, /* vectors across a register block; 6 rows x 4 = 24 accumulators of 32 registers */
};

static inline vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void vf_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
/* a * b + c */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* a * b - c */
static inline vf vf_fms(vf a, vf b, vf c)
{
    return _mm512_fmsub_ps(a, b, c);
}

/* n < VF_LANES floats, the rest 0; nothing behind them is read or written. */
static inline vf vf_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
static inline void vf_store_n(float *p, vf x, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), x);
}
/* VF_LANES values of 16 bits as floats; n < VF_LANES of them, the rest 0. */
static inline vf vf_load_bf16(const uint16_t *p)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline vf vf_load_bf16_n(const uint16_t *p, int64_t n)
{
    const __m256i half = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
}
static inline vf vf_load_f16_n(const uint16_t *p, int64_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p));
}
/* 2 * VF_LANES values of 16 bits, two a lane. */
static inline vf vf_load_pairs(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}
/* Half a vector from each; n_bytes < VF_LANES * 2 of each, the rest 0. */
static inline vf vf_load_halves(const void *low, const void *high)
{
    const __m512 a = _mm512_castps256_ps512(_mm256_loadu_ps(low));
    return _mm512_insertf32x8(a, _mm256_loadu_ps(high), 1);
}
static inline vf vf_load_halves_n(const void *low, const void *high, int64_t n_bytes)
{
    const __mmask32 mask = (__mmask32)((1ull << n_bytes) - 1u);
    const __m256i a = _mm256_maskz_loadu_epi8(mask, low);
    const __m256i b = _mm256_maskz_loadu_epi8(mask, high);
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}
/* The first (low) and second (high) value of each lane as a float. */
static inline vf vf_bf16_low(vf pairs)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
static inline vf vf_bf16_high(vf pairs)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), high));
}
static inline vf vf_f16_low(vf pairs)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(pairs)));
}
static inline vf vf_f16_high(vf pairs)
{
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(pairs), 16);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(high));
}

/* Bytes, two int16 a lane, VF_LANES of each of two: of int8 themselves, of e4m3 a half float that
 * is 2^-8 of the number. vf_i16_low and _high give 2^16 of the integer;
 * n < VF_LANES, the rest 0. */
static inline vf vf_join(__m256i low, __m256i high)
{
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
static inline vf vf_load_halves_i8(const void *low, const void *high)
{
    return vf_join(_mm256_cvtepi8_epi16(_mm_loadu_si128(low)),
                   _mm256_cvtepi8_epi16(_mm_loadu_si128(high)));
}
static inline vf vf_load_halves_i8_n(const void *low, const void *high, int64_t n)
{
    const __mmask16 mask = (__mmask16)((1u << n) - 1u);
    return vf_join(_mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(mask, low)),
                   _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(mask, high)));
}
static inline vf vf_i16_low(vf pairs)
{
    return _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
static inline vf vf_i16_high(vf pairs)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_castps_si512(pairs), high));
}
/* e4m3, sign-extended, to half floats: exponent and mantissa move as they are, and the two biases
 * differ by 8. NaN has to be put in by hand. */
static inline vf vf_e4m3_pairs(vf bytes)
{
    const __m512i wide = _mm512_slli_epi16(_mm512_castps_si512(bytes), 7);
    const __m512i half = _mm512_and_si512(wide, _mm512_set1_epi16((short)0xbf80));
    const __m512i size = _mm512_or_si512(half, _mm512_set1_epi16((short)0x8000));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16((short)0xbf80));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00)));
}
static inline vf vf_load_halves_e4m3(const void *low, const void *high)
{
    return vf_e4m3_pairs(vf_load_halves_i8(low, high));
}
static inline vf vf_load_halves_e4m3_n(const void *low, const void *high, int64_t n)
{
    return vf_e4m3_pairs(vf_load_halves_i8_n(low, high, n));
}
/* VF_LANES bytes as floats: int8; e4m3 as 2^-8 of the number. */
static inline vf vf_from_i8(__m128i bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
static inline vf vf_load_i8(const void *p)
{
    return vf_from_i8(_mm_loadu_si128(p));
}
static inline vf vf_load_i8_n(const void *p, int64_t n)
{
    return vf_from_i8(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p));
}
static inline vf vf_from_e4m3(__m128i bytes)
{
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    const __m256i size = _mm256_or_si256(half, _mm256_set1_epi16((short)0x8000));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16((short)0xbf80));
    return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00)));
}
static inline vf vf_load_e4m3(const void *p)
{
    return vf_from_e4m3(_mm_loadu_si128(p));
}
static inline vf vf_load_e4m3_n(const void *p, int64_t n)
{
    return vf_from_e4m3(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p));
}

/* x[i] lane j <-> x[j] lane i; in doubling steps: 2x2, 4x4, 8x8, 16x16. */
static inline void vf_transpose(vf x[VF_LANES])
{
    vf y[VF_LANES];
    VF_UNROLL for (int i = 0; i < 16; i += 2)
    {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    VF_UNROLL for (int i = 0; i < 16; i += 4)
    {
        VF_UNROLL for (int j = 0; j < 2; j++)
        {
            const __m512d a = _mm512_castps_pd(y[i + j]);
            const __m512d b = _mm512_castps_pd(y[i + j + 2]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        y[j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88);
        y[4 + j] = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
        y[8 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
        y[12 + j] = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
    }
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        x[j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0x88);
        x[8 + j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0xdd);
        x[4 + j] = _mm512_shuffle_f32x4(y[4 + j], y[12 + j], 0x88);
        x[12 + j] = _mm512_shuffle_f32x4(y[4 + j], y[12 + j], 0xdd);
    }
}

/* Transposition of half vectors: row i of VF_LANES is half vf_half(i) of x[vf_slot(i)]; after it
 * x[j] holds element j of every row, in order. 4x4 within 128 bits, then those. */
static inline int vf_slot(int i)
{
    return i % 4 + i / 8 * 4;
}
static inline void vf_transpose_halves(vf x[VF_LANES / 2])
{
    vf y[VF_LANES / 2];
    VF_UNROLL for (int i = 0; i < 8; i += 4)
    {
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
        const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
        const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
        const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
        y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        x[j] = _mm512_shuffle_f32x4(y[j], y[4 + j], 0x88);
        x[4 + j] = _mm512_shuffle_f32x4(y[j], y[4 + j], 0xdd);
    }
}

/* x[0] = even, x[1] = odd elements of 2 * VF_LANES -> the elements in order. */
static inline void vf_interleave(vf x[2])
{
    const vf a = _mm512_unpacklo_ps(x[0], x[1]); /* 0-3, 8-11, 16-19, 24-27 */
    const vf b = _mm512_unpackhi_ps(x[0], x[1]);
    const vf c = _mm512_shuffle_f32x4(a, b, 0x44); /* a0 a1 b0 b1 */
    const vf d = _mm512_shuffle_f32x4(a, b, 0xee); /* a2 a3 b2 b3 */
    x[0] = _mm512_shuffle_f32x4(c, c, 0xd8);
    x[1] = _mm512_shuffle_f32x4(d, d, 0xd8);
}

/* x where first <= base + lane < end, -inf elsewhere. */
static inline vf vf_keep_range(vf x, int64_t base, int64_t first, int64_t end)
{
    const __m512i lane =
        _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                         _mm512_set1_epi32((int)base));
    const __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32((int)first)) &
                           _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32((int)end));
    return _mm512_mask_blend_ps(keep, _mm512_set1_ps(-VF_INF), x);
}

/* 2^x for x <= 127: relative error below 2.5e-7; exactly 1 at 0; 0 below -126; NaN stays. */
static inline vf vf_exp2(vf x)
{
    /* Not vreduceps: it rounds x - floor(x) down, which AVX2 has no way to do. */
    const vf f = _mm512_sub_ps(x, _mm512_roundscale_ps(x, 0x09));
    vf p = _mm512_set1_ps(VF_EXP2_C5);
    p = vf_fma(p, f, _mm512_set1_ps(VF_EXP2_C4));
    p = vf_fma(p, f, _mm512_set1_ps(VF_EXP2_C3));
    p = vf_fma(p, f, _mm512_set1_ps(VF_EXP2_C2));
    p = vf_fma(p, f, _mm512_set1_ps(VF_EXP2_C1));
    p = vf_fma(p, f, _mm512_set1_ps(1.0f));
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, p, x);
}
/* tanh x: absolute error below 2.5e-7, relative too where |x| < 0.625; NaN stays. */
static inline vf vf_tanh(vf x)
{
    const vf sign_bit = _mm512_set1_ps(-0.0f);
    const vf abs = _mm512_andnot_ps(sign_bit, x);
    const vf e = vf_exp2(vf_mul(abs, _mm512_set1_ps(VF_TANH_ARG)));
    const vf one = _mm512_set1_ps(1.0f);
    const vf large = _mm512_or_ps(_mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e)),
                                  _mm512_and_ps(sign_bit, x));
    const vf u = vf_mul(x, x);
    vf p = _mm512_set1_ps(VF_TANH_C4);
    p = vf_fma(p, u, _mm512_set1_ps(VF_TANH_C3));
    p = vf_fma(p, u, _mm512_set1_ps(VF_TANH_C2));
    p = vf_fma(p, u, _mm512_set1_ps(VF_TANH_C1));
    p = vf_fma(p, u, _mm512_set1_ps(VF_TANH_C0));
    const vf small = vf_fma(vf_mul(p, u), x, x);
    const __mmask16 is_small = _mm512_cmp_ps_mask(abs, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
    return _mm512_mask_blend_ps(is_small, large, small);
}

/* Maximum and sum of 64 floats; the sum in an order that every ISA shares: four runs of 16, then
 * halves of 16, 8, 4, 2. */
static inline float vf_max64(const vf x[4])
{
    const vf m = vf_max(vf_max(x[0], x[1]), vf_max(x[2], x[3]));
    const __m256 m8 = _mm256_max_ps(_mm512_castps512_ps256(m), _mm512_extractf32x8_ps(m, 1));
    const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
static inline float vf_sum64(const vf x[4])
{
    const vf s = vf_add(vf_add(x[0], x[1]), vf_add(x[2], x[3]));
    const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* Steps of vf_sums: neighbouring halves, quarters, pairs, lanes of both. */
static inline vf vf_fold_8(vf a, vf b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
static inline vf vf_fold_4(vf a, vf b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
static inline vf vf_fold_2(vf a, vf b)
{
    const __m512d x = _mm512_castps_pd(a);
    const __m512d y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
static inline vf vf_fold_1(vf a, vf b)
{
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
/* out[i] = sum of 16 floats of which x[i] holds all: halves of 16, 8, 4, 2. */
static inline void vf_sums(const vf x[VF_LANES], float out[VF_LANES])
{
    vf y[4];
    VF_UNROLL for (int j = 0; j < 4; j++)
    {
        y[j] = vf_fold_4(vf_fold_8(x[j], x[j + 4]), vf_fold_8(x[j + 8], x[j + 12]));
    }
    vf_store(out, vf_fold_1(vf_fold_2(y[0], y[1]), vf_fold_2(y[2], y[3])));
}

#endif
