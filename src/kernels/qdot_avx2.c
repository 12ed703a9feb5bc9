/* SPDX-License-Identifier: Apache-2.0 */
/* Products of rows of blocks with one f32 vector, AVX2: the quants of a block go to L1 as bytes
 * (quant_avx2.h) and come back eight at a time, widened by the load. Each row alone, four sums in
 * turn, added and reduced lane-wise at the end: nothing depends on the other rows of the call. */
#include "kernels/kernels_priv.h"
#include "kernels/quant_avx2.h"

enum { PREFETCH_BYTES = 2048, NO_MIN = -1 };

typedef void quants_fn(const uint8_t *block, int8_t *quants);
typedef __m256 load_fn(const uint8_t *p);

/* always_inline: gcc deduces that a function which only prefetches does nothing, and drops calls.
 */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *p)
{
    _mm_prefetch((const char *)p + PREFETCH_BYTES, _MM_HINT_T0);
}

static inline float sum_lanes(const __m256 acc[4])
{
    const __m256 all = _mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* acc += (scale q + bias) . x over 32 elements; bias NULL = none. */
static inline __attribute__((always_inline)) void add_group(const int8_t *q, __m256 scale,
                                                            const __m256 *bias, const float *x,
                                                            __m256 acc[4])
{
    for (int j = 0; j < 4; j++) {
        const __m256 quants = floats_8(q + 8 * j);
        const __m256 v =
            bias == NULL ? _mm256_mul_ps(scale, quants) : _mm256_fmadd_ps(scale, quants, *bias);
        acc[j] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + 8 * j), acc[j]);
    }
}

static inline __attribute__((always_inline)) void qdot_small(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k,
                                                             const float *x, float *y,
                                                             quants_fn *quants, int block_bytes,
                                                             int min_at)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        __m256 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = _mm256_setzero_ps();
        for (int64_t e = 0; e < k; e += DCP__Q_SMALL, b += block_bytes) {
            _Alignas(32) int8_t q[DCP__Q_SMALL];
            const __m256 d = _mm256_set1_ps(f16_at(b));
            prefetch(b);
            quants(b, q);
            if (min_at >= 0) {
                const __m256 m = _mm256_set1_ps(f16_at(b + min_at));
                add_group(q, d, &m, x + e, acc);
            } else {
                add_group(q, d, NULL, x + e, acc);
            }
        }
        y[i] = sum_lanes(acc);
    }
}

static inline __attribute__((always_inline)) void qdot_k45(const void *w, size_t row_bytes,
                                                           int64_t n_rows, int64_t k,
                                                           const float *x, float *y,
                                                           quants_fn *quants, int block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        __m256 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = _mm256_setzero_ps();
        for (int64_t e = 0; e < k; e += DCP__Q_SUPER, b += block_bytes) {
            _Alignas(32) int8_t q[DCP__Q_SUPER];
            float sm[16];
            for (int at = 0; at < block_bytes; at += 64) prefetch(b + at);
            k_scales_f32(b, sm);
            quants(b, q);
            for (int g = 0; g < 8; g++) {
                const __m256 bias = _mm256_set1_ps(-sm[8 + g]);
                add_group(q + 32 * g, _mm256_set1_ps(sm[g]), &bias, x + e + 32 * g, acc);
            }
        }
        y[i] = sum_lanes(acc);
    }
}

static inline __attribute__((always_inline)) void qdot_k6(const void *w, size_t row_bytes,
                                                          int64_t n_rows, int64_t k, const float *x,
                                                          float *y, quants_fn *quants,
                                                          int block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        __m256 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = _mm256_setzero_ps();
        for (int64_t e = 0; e < k; e += DCP__Q_SUPER, b += block_bytes) {
            _Alignas(32) int8_t q[DCP__Q_SUPER];
            float scales[16];
            for (int at = 0; at < block_bytes; at += 64) prefetch(b + at);
            q6_k_scales(b, scales);
            quants(b, q);
            for (int j = 0; j < 32; j++) {
                const __m256 v = _mm256_mul_ps(_mm256_set1_ps(scales[j / 2]), floats_8(q + 8 * j));
                acc[j % 4] = _mm256_fmadd_ps(v, _mm256_loadu_ps(x + e + 8 * j), acc[j % 4]);
            }
        }
        y[i] = sum_lanes(acc);
    }
}

static inline __attribute__((always_inline)) void qdot_plain(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k,
                                                             const float *x, float *y,
                                                             load_fn *load, size_t elem_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        __m256 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = _mm256_setzero_ps();
        int64_t e = 0;
        for (; e + 32 <= k; e += 32, b += 32 * elem_bytes) {
            for (size_t at = 0; at < 32 * elem_bytes; at += 64) prefetch(b + at);
            for (int j = 0; j < 4; j++)
                acc[j] = _mm256_fmadd_ps(load(b + (size_t)(8 * j) * elem_bytes),
                                         _mm256_loadu_ps(x + e + 8 * j), acc[j]);
        }
        for (; e < k; e += 8, b += 8 * elem_bytes) {
            uint8_t last[32] = {0};
            float last_x[8] = {0};
            const size_t n = k - e < 8 ? (size_t)(k - e) : 8;
            memcpy(last, b, n * elem_bytes);
            memcpy(last_x, x + e, n * sizeof(float));
            acc[0] = _mm256_fmadd_ps(load(last), _mm256_loadu_ps(last_x), acc[0]);
        }
        y[i] = sum_lanes(acc);
    }
}

#define DEFINE(name, driver, ...)                                                                  \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, const float *x,          \
              float *y)                                                                            \
    {                                                                                              \
        driver(w, row_bytes, n_rows, k, x, y, __VA_ARGS__);                                        \
    }
DEFINE(dcp__qdot_f32__avx2, qdot_plain, load_f32, 4)
DEFINE(dcp__qdot_f16__avx2, qdot_plain, load_f16, 2)
DEFINE(dcp__qdot_bf16__avx2, qdot_plain, load_bf16, 2)
DEFINE(dcp__qdot_q4_0__avx2, qdot_small, quants_q4_0, 18, NO_MIN)
DEFINE(dcp__qdot_q4_1__avx2, qdot_small, quants_q4_1, 20, 2)
DEFINE(dcp__qdot_q5_0__avx2, qdot_small, quants_q5_0, 22, NO_MIN)
DEFINE(dcp__qdot_q5_1__avx2, qdot_small, quants_q5_1, 24, 2)
DEFINE(dcp__qdot_q8_0__avx2, qdot_small, quants_q8_0, 34, NO_MIN)
DEFINE(dcp__qdot_q4_k__avx2, qdot_k45, quants_q4_k, 144)
DEFINE(dcp__qdot_q5_k__avx2, qdot_k45, quants_q5_k, 176)
DEFINE(dcp__qdot_q6_k__avx2, qdot_k6, quants_q6_k, 210)
