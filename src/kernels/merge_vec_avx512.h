/* SPDX-License-Identifier: Apache-2.0 */
/* The merge's vector primitives, 16 lanes; their meaning is in merge_vec_scalar.h. */
#ifndef DCP_KERNELS_MERGE_VEC_AVX512_H
#define DCP_KERNELS_MERGE_VEC_AVX512_H

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

enum { VF_LANES = 16 };
typedef __m512 vf;
typedef __m512i vu;
typedef __mmask16 vbad;

static inline vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline vu vu_set1(uint32_t x)
{
    return _mm512_set1_epi32((int)x);
}
static inline vu vu_of(vf a)
{
    return _mm512_castps_si512(a);
}
static inline vf vf_of(vu a)
{
    return _mm512_castsi512_ps(a);
}
static inline vu vu_add(vu a, vu b)
{
    return _mm512_add_epi32(a, b);
}
static inline vu vu_sub(vu a, vu b)
{
    return _mm512_sub_epi32(a, b);
}
static inline vu vu_shl23(vu a)
{
    return _mm512_slli_epi32(a, 23);
}
static inline vu vu_sar23(vu a)
{
    return _mm512_srai_epi32(a, 23);
}
static inline vf vf_from_vu(vu a)
{
    return _mm512_cvtepi32_ps(a);
}
static inline vf vf_load_f32(const void *p, int64_t i)
{
    return _mm512_loadu_ps((const float *)p + i);
}
static inline vf vf_load_bf16(const void *p, int64_t i)
{
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)p + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline vf vf_load_f16(const void *p, int64_t i)
{
    return _mm512_cvtph_ps(
        _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)p + i)));
}
static inline void vf_store_f32(void *p, int64_t i, vf v)
{
    _mm512_storeu_ps((float *)p + i, v);
}
/* Finite lanes only: rounding by integers would turn some NaN into infinity. */
static inline void vf_store_bf16(void *p, int64_t i, vf v)
{
    const __m512i u = _mm512_castps_si512(v);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_srli_epi32(
        _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)p + i), _mm512_cvtepi32_epi16(r));
}
/* 32 elements at once, those at even places in *even and the others in *odd: widening and
 * narrowing then need no shuffles, which only one port can do. */
static inline void vf_load2_bf16(const void *p, int64_t i, vf *even, vf *odd)
{
    const __m512i u = _mm512_loadu_si512((const uint16_t *)p + i);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline __m512i vf_rounded_bf16(vf v) /* the upper halves are the result */
{
    const __m512i u = _mm512_castps_si512(v);
    const __mmask16 is_odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    const __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
    return _mm512_mask_add_epi32(r, is_odd, r, _mm512_set1_epi32(1));
}
static inline __m512i vf_joined_bf16(vf even, vf odd)
{
    const __m512i low = _mm512_srli_epi32(vf_rounded_bf16(even), 16);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    /* (odd & upper) | low: bits of low outside its half are zero */
    return _mm512_ternarylogic_epi32(vf_rounded_bf16(odd), upper, low, 0xea); /* (a & b) | c */
}
/* Is any of 2 x 32 rounded sums not finite? Sums of widened bf16 only: rounding turns none of their
 * NaN, which have empty lower halves, into numbers. */
static inline bool vf_bad_packed_bf16(const __m512i *r)
{
    const __m512i top = _mm512_set1_epi16(0x7f80);
    const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(r[0], top), top) |
                          _mm512_cmpeq_epi16_mask(_mm512_and_si512(r[1], top), top);
    return bad != 0;
}
static inline void vf_store_packed_bf16(void *p, int64_t i, __m512i r)
{
    _mm512_storeu_si512((uint16_t *)p + i, r);
}
static inline void vf_stream_packed_bf16(void *p, int64_t i, __m512i r)
{
    _mm512_stream_si512((void *)((uint16_t *)p + i), r);
}
static inline void vf_store2_bf16(void *p, int64_t i, vf even, vf odd)
{
    _mm512_storeu_si512((uint16_t *)p + i, vf_joined_bf16(even, odd));
}
/* Past the caches; p + i aligned to the vector. */
static inline void vf_stream2_bf16(void *p, int64_t i, vf even, vf odd)
{
    _mm512_stream_si512((void *)((uint16_t *)p + i), vf_joined_bf16(even, odd));
}
static inline void vf_stream_f32(void *p, int64_t i, vf v)
{
    _mm512_stream_ps((float *)p + i, v);
}
static inline void vf_stream_f16(void *p, int64_t i, vf v)
{
    _mm256_stream_si256((__m256i *)(void *)((uint16_t *)p + i),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline void vf_store_f16(void *p, int64_t i, vf v)
{
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)p + i),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline vbad vf_bad(vf a)
{
    return _mm512_fpclass_ps_mask(a, 0x99); /* quiet NaN, +inf, -inf, signalling NaN */
}
static inline vbad vbad_or(vbad a, vbad b)
{
    return (vbad)(a | b);
}
static inline bool vbad_any(vbad a)
{
    return a != 0;
}
#endif

#endif
