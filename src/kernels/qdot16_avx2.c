/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX2: two products of bytes at most 2 * 63 * 128 fit the 16
 * bits of vpmaddubsw. */
#include <math.h>

#include "num/dtype_priv.h"

#define SUM_4(acc, u8, s8)                                                                         \
    _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1)))
#define NAME(type) dcp__qdot16_##type##__avx2
#include "kernels/qdot16_avx2_tpl.h"

static inline int sum_of(__m256i v)
{
    const __m128i v4 = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i v2 = _mm_add_epi32(v4, _mm_shuffle_epi32(v4, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v2, _mm_shuffle_epi32(v2, 0xb1)));
}

static inline uint32_t greatest_of(__m256i v)
{
    const __m128i v4 = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i v2 = _mm_max_epi32(v4, _mm_shuffle_epi32(v4, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(v2, _mm_shuffle_epi32(v2, 0xb1)));
}

void dcp__to_q16__avx2(const float *x, int64_t k, int16_t *words, float *scale, float *pairs,
                       float *half_sum)
{
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    const int64_t n = k / DCP__Q16_GROUP;
    for (int64_t g = 0; g < n; g++, x += DCP__Q16_GROUP, words += DCP__Q16_GROUP) {
        __m256 v[4];
        __m256i sizes = _mm256_setzero_si256(), q[4];
        for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_ps(x + 8 * j);
            /* As integers NaN > infinity > all finite ones. */
            sizes = _mm256_max_epi32(sizes, _mm256_and_si256(_mm256_castps_si256(v[j]), no_sign));
        }
        const uint32_t bits = greatest_of(sizes);
        const float top = dcp__f32_from_bits(bits);
        const bool is_finite = bits < 0x7f800000u, counts = is_finite && top >= DCP__Q16_LEAST;
        const __m256 inverse = _mm256_set1_ps((float)DCP__Q16_TOP / (counts ? top : 1.0f));
        for (int j = 0; j < 4; j++)
            q[j] =
                counts ? _mm256_cvtps_epi32(_mm256_mul_ps(v[j], inverse)) : _mm256_setzero_si256();
        const float own = counts ? top / (float)DCP__Q16_TOP : is_finite ? 0.0f : NAN;
        const int total_a = sum_of(_mm256_add_epi32(q[0], q[1]));
        const int total_b = sum_of(_mm256_add_epi32(q[2], q[3]));
        for (int j = 0; j < 2; j++)
            _mm256_storeu_si256(
                (__m256i *)(void *)(words + 16 * j),
                _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2 * j], q[2 * j + 1]), 0xd8));
        scale[g] = own;
        pairs[2 * g] = own;
        pairs[2 * g + 1] = own * (float)(total_a + total_b);
        half_sum[2 * g] = own * (float)total_a;
        half_sum[2 * g + 1] = own * (float)total_b;
    }
    for (int64_t g = n; g % 16 != 0; g++) scale[g] = pairs[2 * g] = pairs[2 * g + 1] = 0.0f;
}
