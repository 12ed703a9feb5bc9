/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX-512 without VNNI: two products of bytes at most 2 * 63 *
 * 128 fit the 16 bits of vpmaddubsw. */
#include <math.h>

#include "num/dtype_priv.h"

#define SUM_4(acc, u8, s8)                                                                         \
    _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u8, s8), _mm512_set1_epi16(1)))
#define NAME(type) dcp__qdot16_##type##__avx512
#include "kernels/qdot16_avx512_tpl.h"

void dcp__to_q16__avx512(const float *x, int64_t k, int16_t *words, float *scale, float *pairs,
                         float *half_sum)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    const int64_t n = k / DCP__Q16_GROUP;
    for (int64_t g = 0; g < n; g++, x += DCP__Q16_GROUP, words += DCP__Q16_GROUP) {
        const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        /* As integers NaN > infinity > all finite ones. */
        const __m512i sizes = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), no_sign),
                                               _mm512_and_si512(_mm512_castps_si512(b), no_sign));
        const uint32_t bits = (uint32_t)_mm512_reduce_max_epi32(sizes);
        const float top = dcp__f32_from_bits(bits);
        const bool is_finite = bits < 0x7f800000u, counts = is_finite && top >= DCP__Q16_LEAST;
        const __m512 inverse = _mm512_set1_ps((float)DCP__Q16_TOP / (counts ? top : 1.0f));
        const __mmask16 all = counts ? 0xffff : 0;
        const __m512i qa = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(a, inverse));
        const __m512i qb = _mm512_maskz_cvtps_epi32(all, _mm512_mul_ps(b, inverse));
        const float own = counts ? top / (float)DCP__Q16_TOP : is_finite ? 0.0f : NAN;
        const int total_a = _mm512_reduce_add_epi32(qa), total_b = _mm512_reduce_add_epi32(qb);
        _mm256_storeu_si256((__m256i *)(void *)words, _mm512_cvtepi32_epi16(qa));
        _mm256_storeu_si256((__m256i *)(void *)(words + 16), _mm512_cvtepi32_epi16(qb));
        scale[g] = own;
        pairs[2 * g] = own;
        pairs[2 * g + 1] = own * (float)(total_a + total_b);
        half_sum[2 * g] = own * (float)total_a;
        half_sum[2 * g + 1] = own * (float)total_b;
    }
    for (int64_t g = n; g % 16 != 0; g++) scale[g] = pairs[2 * g] = pairs[2 * g + 1] = 0.0f;
}
