/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through a linear map: the plain text of the sums. */
#include <math.h>

#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

void dcp__project_f32__scalar(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                              const void *w, int64_t p, float *y, int64_t y_stride)
{
    const float *const map = w;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t j = 0; j < p; j++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < d; i++) sum = fmaf(x[r * x_stride + i], map[i * p + j], sum);
            y[r * y_stride + j] = sum;
        }
    }
}

void dcp__project_bf16__scalar(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                               const void *w, int64_t p, float *y, int64_t y_stride)
{
    const uint16_t *const map = w;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t j = 0; j < p; j++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < d; i++)
                sum = fmaf(x[r * x_stride + i], dcp__bf16_to_f32(map[i * p + j]), sum);
            y[r * y_stride + j] = sum;
        }
    }
}
