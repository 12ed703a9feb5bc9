/* SPDX-License-Identifier: Apache-2.0 */
/* The merge's vector primitives, 8 lanes; their meaning is in merge_vec_scalar.h. */
#ifndef DCP_KERNELS_MERGE_VEC_AVX2_H
#define DCP_KERNELS_MERGE_VEC_AVX2_H

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

enum { VF_LANES = 8 };
typedef __m256 vf;
typedef __m256i vu;
typedef __m256 vbad;

static inline vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline vu vu_set1(uint32_t x)
{
    return _mm256_set1_epi32((int)x);
}
static inline vu vu_of(vf a)
{
    return _mm256_castps_si256(a);
}
static inline vf vf_of(vu a)
{
    return _mm256_castsi256_ps(a);
}
static inline vu vu_add(vu a, vu b)
{
    return _mm256_add_epi32(a, b);
}
static inline vu vu_sub(vu a, vu b)
{
    return _mm256_sub_epi32(a, b);
}
static inline vu vu_shl23(vu a)
{
    return _mm256_slli_epi32(a, 23);
}
static inline vu vu_sar23(vu a)
{
    return _mm256_srai_epi32(a, 23);
}
static inline vf vf_from_vu(vu a)
{
    return _mm256_cvtepi32_ps(a);
}
static inline vf vf_load_f32(const void *p, int64_t i)
{
    return _mm256_loadu_ps((const float *)p + i);
}
static inline vf vf_load_bf16(const void *p, int64_t i)
{
    const __m128i h = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
static inline vf vf_load_f16(const void *p, int64_t i)
{
    return _mm256_cvtph_ps(
        _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)p + i)));
}
static inline void vf_store_f32(void *p, int64_t i, vf v)
{
    _mm256_storeu_ps((float *)p + i, v);
}
/* Finite lanes only: rounding by integers would turn some NaN into infinity. */
static inline void vf_store_bf16(void *p, int64_t i, vf v)
{
    const __m256i u = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(
        _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)p + i), packed);
}
/* 16 elements at once, those at even places in *even and the others in *odd: widening and
 * narrowing then need no shuffles. */
static inline void vf_load2_bf16(const void *p, int64_t i, vf *even, vf *odd)
{
    const __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)((const uint16_t *)p + i));
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)));
}
static inline __m256i vf_rounded_bf16(vf v) /* the upper halves are the result */
{
    const __m256i u = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
}
static inline __m256i vf_joined_bf16(vf even, vf odd)
{
    return _mm256_blend_epi16(_mm256_srli_epi32(vf_rounded_bf16(even), 16), vf_rounded_bf16(odd),
                              0xaa);
}
static inline void vf_store2_bf16(void *p, int64_t i, vf even, vf odd)
{
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)p + i), vf_joined_bf16(even, odd));
}
/* Past the caches; p + i aligned to the vector. */
static inline void vf_stream2_bf16(void *p, int64_t i, vf even, vf odd)
{
    _mm256_stream_si256((__m256i *)(void *)((uint16_t *)p + i), vf_joined_bf16(even, odd));
}
static inline void vf_stream_f32(void *p, int64_t i, vf v)
{
    _mm256_stream_ps((float *)p + i, v);
}
static inline void vf_stream_f16(void *p, int64_t i, vf v)
{
    _mm_stream_si128((__m128i *)(void *)((uint16_t *)p + i),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline void vf_store_f16(void *p, int64_t i, vf v)
{
    _mm_storeu_si128((__m128i *)(void *)((uint16_t *)p + i),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline vbad vf_bad(vf a)
{
    const __m256i mask = _mm256_set1_epi32(0x7f800000);
    return _mm256_castsi256_ps(
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(a), mask), mask));
}
static inline vbad vbad_or(vbad a, vbad b)
{
    return _mm256_or_ps(a, b);
}
static inline bool vbad_any(vbad a)
{
    return _mm256_movemask_ps(a) != 0;
}
#endif

#endif
