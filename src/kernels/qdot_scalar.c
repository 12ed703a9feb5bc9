/* SPDX-License-Identifier: Apache-2.0 */
/* Products of rows of blocks with one f32 vector, plain C: a block at a time is decoded and summed,
 * in four interleaved sums per block; blocks add up in order. */
#include "kernels/kernels_priv.h"
#include "kernels/quant_scalar_priv.h"

typedef void decode_fn(const uint8_t *block, float *values);

/* n_elems is a block, or 32 single elements (fewer at the end of a row). */
static float block_sum(const float *v, const float *x, int64_t n_elems)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int64_t e = 0; e < n_elems; e++) sum[e & 3] += v[e] * x[e];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline __attribute__((always_inline)) void qdot_rows(const void *w, size_t row_bytes,
                                                            int64_t n_rows, int64_t k,
                                                            const float *x, float *y,
                                                            decode_fn *decode, int64_t block_elems,
                                                            size_t block_bytes)
{
    const int64_t group = block_elems == 1 ? 32 : block_elems;
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float sum = 0.0f;
        for (int64_t e = 0; e < k; e += group) {
            float v[DCP__Q_SUPER];
            const int64_t n_elems = group < k - e ? group : k - e;
            for (int64_t j = 0; j < n_elems; j += block_elems, b += block_bytes) decode(b, v + j);
            sum += block_sum(v, x + e, n_elems);
        }
        y[i] = sum;
    }
}

#define DEFINE(name, decode, elems, bytes)                                                         \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, const float *x,          \
              float *y)                                                                            \
    {                                                                                              \
        qdot_rows(w, row_bytes, n_rows, k, x, y, decode, elems, bytes);                            \
    }
DEFINE(dcp__qdot_f32__scalar, decode_f32, 1, 4)
DEFINE(dcp__qdot_f16__scalar, decode_f16, 1, 2)
DEFINE(dcp__qdot_bf16__scalar, decode_bf16, 1, 2)
DEFINE(dcp__qdot_q4_0__scalar, decode_q4_0, 32, 18)
DEFINE(dcp__qdot_q4_1__scalar, decode_q4_1, 32, 20)
DEFINE(dcp__qdot_q5_0__scalar, decode_q5_0, 32, 22)
DEFINE(dcp__qdot_q5_1__scalar, decode_q5_1, 32, 24)
DEFINE(dcp__qdot_q8_0__scalar, decode_q8_0, 32, 34)
DEFINE(dcp__qdot_q4_k__scalar, decode_q4_k, 256, 144)
DEFINE(dcp__qdot_q5_k__scalar, decode_q5_k, 256, 176)
DEFINE(dcp__qdot_q6_k__scalar, decode_q6_k, 256, 210)
