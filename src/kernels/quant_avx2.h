/* SPDX-License-Identifier: Apache-2.0 */
/* Quants of a block as signed bytes in order of elements, for dequant_avx2.c and qdot_avx2.c.
 * Layouts: quant_priv.h. */
#ifndef DCP_KERNELS_QUANT_AVX2_H
#define DCP_KERNELS_QUANT_AVX2_H

#if defined(__AVX2__) /* else nothing: the header compiles anywhere */

#include <immintrin.h>

#include "kernels/quant_priv.h"

static inline float f16_at(const uint8_t *p)
{
    return _cvtsh_ss(dcp__load_u16(p));
}

static inline __m256i load_32(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

static inline void store_32(int8_t *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)(void *)p, v);
}

/* Eight quants as floats. */
static inline __m256 floats_8(const int8_t *q)
{
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)q)));
}

/* Low nibbles of 16 bytes, then their high nibbles. */
static inline __m256i nibbles_16(const uint8_t *p)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(v, 4), v);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

/* 16 in byte i where bit i of bits is set. */
static inline __m256i fifth_bits(uint32_t bits)
{
    const __m256i spread =
        _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits),
                            _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2,
                                             2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i own = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

static inline void quants_q4_0(const uint8_t *b, int8_t *q)
{
    store_32(q, _mm256_sub_epi8(nibbles_16(b + 2), _mm256_set1_epi8(8)));
}

static inline void quants_q4_1(const uint8_t *b, int8_t *q)
{
    store_32(q, nibbles_16(b + 4));
}

static inline void quants_q5_0(const uint8_t *b, int8_t *q)
{
    const __m256i v = _mm256_or_si256(nibbles_16(b + 6), fifth_bits(dcp__load_u32(b + 2)));
    store_32(q, _mm256_sub_epi8(v, _mm256_set1_epi8(16)));
}

static inline void quants_q5_1(const uint8_t *b, int8_t *q)
{
    store_32(q, _mm256_or_si256(nibbles_16(b + 8), fifth_bits(dcp__load_u32(b + 4))));
}

static inline void quants_q8_0(const uint8_t *b, int8_t *q)
{
    store_32(q, load_32(b + 2));
}

/* Groups 2c and 2c + 1 from the 32 bytes of chunk c. */
static inline void quants_q4_k(const uint8_t *b, int8_t *q)
{
    const __m256i low4 = _mm256_set1_epi8(15);
    for (int c = 0; c < 4; c++) {
        const __m256i v = load_32(b + 16 + 32 * c);
        store_32(q + 64 * c, _mm256_and_si256(v, low4));
        store_32(q + 64 * c + 32, _mm256_and_si256(_mm256_srli_epi16(v, 4), low4));
    }
}

static inline void quants_q5_k(const uint8_t *b, int8_t *q)
{
    const __m256i qh = load_32(b + 16), low4 = _mm256_set1_epi8(15);
    for (int g = 0; g < 8; g++) {
        __m256i v = load_32(b + 48 + 32 * (g / 2));
        if (g % 2 == 1) v = _mm256_srli_epi16(v, 4);
        const __m256i own = _mm256_set1_epi8((char)(1 << g));
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(qh, own), own);
        const __m256i fifth = _mm256_and_si256(set, _mm256_set1_epi8(16));
        store_32(q + 32 * g, _mm256_or_si256(_mm256_and_si256(v, low4), fifth));
    }
}

static inline void quants_q6_k(const uint8_t *b, int8_t *q)
{
    const __m256i low4 = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(0x30);
    for (int half = 0; half < 2; half++) {
        const __m256i qh = load_32(b + 128 + 32 * half);
        const __m256i above[4] = {_mm256_slli_epi16(qh, 4), _mm256_slli_epi16(qh, 2), qh,
                                  _mm256_srli_epi16(qh, 2)};
        for (int a = 0; a < 4; a++) {
            __m256i v = load_32(b + 64 * half + 32 * (a % 2));
            if (a >= 2) v = _mm256_srli_epi16(v, 4);
            v = _mm256_or_si256(_mm256_and_si256(v, low4), _mm256_and_si256(above[a], high2));
            store_32(q + 128 * half + 32 * a, _mm256_sub_epi8(v, _mm256_set1_epi8(32)));
        }
    }
}

/* out[g] = d sc, out[8 + g] = dmin m */
static inline void k_scales_f32(const uint8_t *b, float out[16])
{
    int8_t sm[16];
    uint8_t bits[16];
    dcp__k_scales(b + 4, bits);
    memcpy(sm, bits, sizeof(sm)); /* six bits: never negative */
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_set1_ps(f16_at(b)), floats_8(sm)));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_set1_ps(f16_at(b + 2)), floats_8(sm + 8)));
}

static inline void q6_k_scales(const uint8_t *b, float out[16])
{
    const __m256 d = _mm256_set1_ps(f16_at(b + 208));
    int8_t scales[16];
    memcpy(scales, b + 192, sizeof(scales));
    _mm256_storeu_ps(out, _mm256_mul_ps(d, floats_8(scales)));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(d, floats_8(scales + 8)));
}

/* Eight single elements. */
static inline __m256 load_f32(const uint8_t *p)
{
    return _mm256_loadu_ps((const float *)(const void *)p);
}

static inline __m256 load_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline __m256 load_bf16(const uint8_t *p)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

#endif
#endif
