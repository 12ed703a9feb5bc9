/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of blocks to f32, AVX2: the products of quant_priv.h, rounded one by one. */
#include "kernels/kernels_priv.h"
#include "kernels/quant_avx2.h"

typedef void quants_fn(const uint8_t *block, int8_t *quants);
typedef __m256 load_fn(const uint8_t *p);

/* Offset of m in a block that has one. */
enum { NO_MIN = -1 };

/* Drivers are inlined into each caller with the functions known. */
static inline __attribute__((always_inline)) void dequant_small(const void *w, size_t row_bytes,
                                                                int64_t n_rows, int64_t k,
                                                                float *dst, int64_t dst_stride,
                                                                quants_fn *quants, int block_bytes,
                                                                int min_at)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += DCP__Q_SMALL, b += block_bytes) {
            int8_t q[DCP__Q_SMALL];
            const __m256 d = _mm256_set1_ps(f16_at(b));
            quants(b, q);
            for (int j = 0; j < DCP__Q_SMALL; j += 8) {
                __m256 value = _mm256_mul_ps(d, floats_8(q + j));
                if (min_at >= 0) value = _mm256_add_ps(value, _mm256_set1_ps(f16_at(b + min_at)));
                _mm256_storeu_ps(v + e + j, value);
            }
        }
    }
}

static inline __attribute__((always_inline)) void dequant_k45(const void *w, size_t row_bytes,
                                                              int64_t n_rows, int64_t k, float *dst,
                                                              int64_t dst_stride, quants_fn *quants,
                                                              int block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += DCP__Q_SUPER, b += block_bytes) {
            int8_t q[DCP__Q_SUPER];
            float sm[16];
            k_scales_f32(b, sm);
            quants(b, q);
            for (int j = 0; j < DCP__Q_SUPER; j += 8) {
                const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(sm[j / 32]), floats_8(q + j));
                _mm256_storeu_ps(v + e + j, _mm256_sub_ps(scaled, _mm256_set1_ps(sm[8 + j / 32])));
            }
        }
    }
}

static inline __attribute__((always_inline)) void dequant_k6(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k, float *dst,
                                                             int64_t dst_stride, quants_fn *quants,
                                                             int block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += DCP__Q_SUPER, b += block_bytes) {
            int8_t q[DCP__Q_SUPER];
            float scales[16];
            q6_k_scales(b, scales);
            quants(b, q);
            for (int j = 0; j < DCP__Q_SUPER; j += 8)
                _mm256_storeu_ps(v + e + j,
                                 _mm256_mul_ps(_mm256_set1_ps(scales[j / 16]), floats_8(q + j)));
        }
    }
}

static inline __attribute__((always_inline)) void widen_rows(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k, float *dst,
                                                             int64_t dst_stride, load_fn *load,
                                                             size_t elem_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        int64_t e = 0;
        for (; e + 8 <= k; e += 8) _mm256_storeu_ps(v + e, load(b + (size_t)e * elem_bytes));
        if (e < k) {
            uint8_t last[32] = {0};
            float values[8];
            memcpy(last, b + (size_t)e * elem_bytes, (size_t)(k - e) * elem_bytes);
            _mm256_storeu_ps(values, load(last));
            memcpy(v + e, values, (size_t)(k - e) * sizeof(float));
        }
    }
}

#define DEFINE(name, driver, ...)                                                                  \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst,              \
              int64_t dst_stride)                                                                  \
    {                                                                                              \
        driver(w, row_bytes, n_rows, k, dst, dst_stride, __VA_ARGS__);                             \
    }
DEFINE(dcp__dequant_f32__avx2, widen_rows, load_f32, 4)
DEFINE(dcp__dequant_f16__avx2, widen_rows, load_f16, 2)
DEFINE(dcp__dequant_bf16__avx2, widen_rows, load_bf16, 2)
DEFINE(dcp__dequant_q4_0__avx2, dequant_small, quants_q4_0, 18, NO_MIN)
DEFINE(dcp__dequant_q4_1__avx2, dequant_small, quants_q4_1, 20, 2)
DEFINE(dcp__dequant_q5_0__avx2, dequant_small, quants_q5_0, 22, NO_MIN)
DEFINE(dcp__dequant_q5_1__avx2, dequant_small, quants_q5_1, 24, 2)
DEFINE(dcp__dequant_q8_0__avx2, dequant_small, quants_q8_0, 34, NO_MIN)
DEFINE(dcp__dequant_q4_k__avx2, dequant_k45, quants_q4_k, 144)
DEFINE(dcp__dequant_q5_k__avx2, dequant_k45, quants_q5_k, 176)
DEFINE(dcp__dequant_q6_k__avx2, dequant_k6, quants_q6_k, 210)
