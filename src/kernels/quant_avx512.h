/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of blocks in AVX-512 registers, for dequant_avx512.c and qdot_avx512.c. Layouts:
 * quant_priv.h.
 *
 * Four-bit quants go through a table of the 16 values they can stand for: vpermps looks only at the
 * low four bits of a lane, so that a byte widened to 32 bits is an index as it is (low nibble), or
 * shifted by four (high nibble). Scale and minimum are applied to the table, once per block. */
#ifndef DCP_KERNELS_QUANT_AVX512_H
#define DCP_KERNELS_QUANT_AVX512_H

#if defined(__AVX512BW__) /* else nothing: the header compiles anywhere */

#include <immintrin.h>

#include "kernels/quant_priv.h"

/* 32 values: elements 0..15 and 16..31. */
struct pair {
    __m512 a, b;
};

/* Keeps what was stored at p in memory: gcc would turn a later broadcast of p[i], one load, into a
 * permutation of the stored register, which takes the vector port that is short. */
static inline void settle(const float *p)
{
    __asm__ volatile("" : : "r"(p) : "memory");
}

/* base, base + 1, .., base + 15 */
static inline __m512 count_from(float base)
{
    return _mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_ps(base));
}

static inline float f16_at(const uint8_t *p)
{
    return _cvtsh_ss(dcp__load_u16(p));
}

static inline __m512i widen_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline __m512 signed_floats(const uint8_t *p)
{
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}

/* Low nibbles of 16 bytes to a, high nibbles to b. */
static inline struct pair by_table(__m512i bytes, __m512 low_table, __m512 high_table)
{
    return (struct pair){_mm512_permutexvar_ps(bytes, low_table),
                         _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), high_table)};
}

/* Adds up to v where the bit is set. */
static inline __m512 add_where(__m512 v, unsigned bits, __m512 up)
{
    return _mm512_mask_add_ps(v, _cvtu32_mask16(bits), v, up);
}

/* Bit g of 32 bytes. */
static inline uint32_t bit_of_bytes(const uint8_t *p, int g)
{
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _cvtmask32_u32(_mm256_test_epi8_mask(bytes, _mm256_set1_epi8((char)(1 << g))));
}

/* dcp__k_scales in a register; p is the block's scale bytes (16 are read, the last 4 unused). */
static inline __m128i k_scales_u8(const uint8_t *p)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
    const __m128i aabb = _mm_shuffle_epi32(v, 0x50), cccc = _mm_shuffle_epi32(v, 0xaa);
    const __m128i own = _mm_srlv_epi32(aabb, _mm_setr_epi32(0, 2, 0, 2));
    const __m128i low = _mm_srlv_epi32(cccc, _mm_setr_epi32(0, 0, 0, 4));
    return _mm_or_si128(
        _mm_and_si128(own, _mm_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030)),
        _mm_and_si128(low, _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f)));
}

/* Scales and minima of a Q4_K or Q5_K block: out[g] = d sc, out[8 + g] = dmin m. */
static inline void k_scales_f32(const uint8_t *block, float out[16])
{
    const __m512 factor = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(f16_at(block)),
                                               _mm512_set1_ps(f16_at(block + 2)));
    const __m512i sm = _mm512_cvtepu8_epi32(k_scales_u8(block + 4));
    _mm512_storeu_ps(out, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(sm)));
    settle(out);
}

/* The 256 quants of a Q6_K block, in order of elements, minus 32. */
static inline void q6_k_quants(const uint8_t *block, uint8_t out[256])
{
    const __m512i low4 = _mm512_set1_epi8(15), low6 = _mm512_set1_epi8(63);
    const __m512i bias = _mm512_set1_epi8(32);
    /* The first 32 bytes need other bits of qh than the second. */
    const __m512i up = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i down = _mm512_inserti64x4(_mm512_set1_epi16(0), _mm256_set1_epi16(2), 1);
    for (int half = 0; half < 2; half++) {
        const __m512i ql = _mm512_loadu_si512(block + 64 * half);
        const __m512i qh = _mm512_broadcast_i64x4(
            _mm256_loadu_si256((const __m256i *)(const void *)(block + 128 + 32 * half)));
        /* low4 ? low nibble : bits of qh; bits 6 and 7 are the neighbours' and go. */
        const __m512i first = _mm512_ternarylogic_epi32(low4, ql, _mm512_sllv_epi16(qh, up), 0xca);
        const __m512i last = _mm512_ternarylogic_epi32(low4, _mm512_srli_epi16(ql, 4),
                                                       _mm512_srlv_epi16(qh, down), 0xca);
        _mm512_storeu_si512(out + 128 * half, _mm512_sub_epi8(_mm512_and_si512(first, low6), bias));
        _mm512_storeu_si512(out + 128 * half + 64,
                            _mm512_sub_epi8(_mm512_and_si512(last, low6), bias));
    }
}

/* The 16 scales of a Q6_K block. */
static inline __m512 q6_k_scales(const uint8_t *block)
{
    return _mm512_mul_ps(_mm512_set1_ps(f16_at(block + 208)), signed_floats(block + 192));
}

/* Up to 16 single elements. */
static inline __mmask16 first_lanes(int64_t n)
{
    const uint32_t bits = n >= 16 ? 0xffffu : (1u << n) - 1u;
    return (__mmask16)bits;
}

static inline __m512 load_f32(const uint8_t *p, __mmask16 lanes)
{
    return _mm512_maskz_loadu_ps(lanes, p);
}

static inline __m512 load_f16(const uint8_t *p, __mmask16 lanes)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p));
}

static inline __m512 load_bf16(const uint8_t *p, __mmask16 lanes)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}

#endif
#endif
