/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of blocks to f32, plain C. */
#include "kernels/kernels_priv.h"
#include "kernels/quant_scalar_priv.h"

typedef void decode_fn(const uint8_t *block, float *values);

/* Inlined into each caller with decode known. */
static inline __attribute__((always_inline)) void dequant_rows(
    const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst, int64_t dst_stride,
    decode_fn *decode, int64_t block_elems, size_t block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += block_elems, b += block_bytes) decode(b, v + e);
    }
}

#define DEFINE(name, decode, elems, bytes)                                                         \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst,              \
              int64_t dst_stride)                                                                  \
    {                                                                                              \
        dequant_rows(w, row_bytes, n_rows, k, dst, dst_stride, decode, elems, bytes);              \
    }
DEFINE(dcp__dequant_f32__scalar, decode_f32, 1, 4)
DEFINE(dcp__dequant_f16__scalar, decode_f16, 1, 2)
DEFINE(dcp__dequant_bf16__scalar, decode_bf16, 1, 2)
DEFINE(dcp__dequant_q4_0__scalar, decode_q4_0, 32, 18)
DEFINE(dcp__dequant_q4_1__scalar, decode_q4_1, 32, 20)
DEFINE(dcp__dequant_q5_0__scalar, decode_q5_0, 32, 22)
DEFINE(dcp__dequant_q5_1__scalar, decode_q5_1, 32, 24)
DEFINE(dcp__dequant_q8_0__scalar, decode_q8_0, 32, 34)
DEFINE(dcp__dequant_q4_k__scalar, decode_q4_k, 256, 144)
DEFINE(dcp__dequant_q5_k__scalar, decode_q5_k, 256, 176)
DEFINE(dcp__dequant_q6_k__scalar, decode_q6_k, 256, 210)

void dcp__to_bf16__scalar(const float *x, int64_t n, uint16_t *dst)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dcp__f32_to_bf16(x[i]);
}
