/* SPDX-License-Identifier: Apache-2.0 */
/* Dense products y = x W^T over weight rows kept as the file has them (quantised blocks stay
 * quantised).
 *
 *   a few tokens    bound by bytes: own kernels read the rows as they are, once for all tokens
 *   more            a panel of rows at a time is dequantised into scratch and multiplied by oneDNN
 *
 * The rank's pool works on panels side by side; a result's bits do not depend on the number of
 * threads. */
#ifndef DCP_ENGINE_LINEAR_H
#define DCP_ENGINE_LINEAR_H

#include <stdbool.h>

#include "base/pool_priv.h"
#include "dcpattn/types.h"

enum compute_type { COMPUTE_DEFAULT = 0, COMPUTE_F32 = 1, COMPUTE_BF16 = 2 };

/* A slice of rows of one weight. */
struct weight {
    int qtype;
    int64_t n_rows, k;
    size_t row_bytes;
    const void
        *data; /* n_rows * row_bytes; 64-byte aligned start; readable 64 bytes beyond the end */
};

enum { LINEAR_MAX_KS = 8 };

struct linear; /* per rank: pool, scratch, oneDNN objects */
/* max_tokens: largest T of linear_run. ks [n_ks]: the k of the weights to come, at most
 * LINEAR_MAX_KS different ones. compute DEFAULT = bf16 where AMX is, else f32; either way, and with
 * BF16, few tokens on quantised rows are multiplied as integers of 16 bits. Only F32 is exact: f32
 * throughout. */
dcp_status linear_create(struct dcp_pool *pool, enum compute_type compute, dcp_isa isa,
                         int64_t max_tokens, const int64_t *ks, int n_ks, struct linear **out);
void linear_destroy(struct linear *l);
enum compute_type linear_compute(const struct linear *l);
/* f32 was asked for. */
bool linear_is_exact(const struct linear *l);
/* oneDNN plans that create made; a run makes none. */
int linear_n_plans(const struct linear *l);
/* Name of the kernel that takes rows of this type for a few tokens; NULL where none reads it. */
const char *linear_kernel(const struct linear *l, int qtype);
/* Why bf16 was asked for and f32 taken; "" if what was asked for was taken. Lives as long as l. */
const char *linear_note(const struct linear *l);
/* y[t * y_stride + i] = sum_k x[t * x_stride + k] * W[i][k]; t < n_tokens. x and y may not overlap.
 * n_rows = 0 or n_tokens = 0 is legal. y_stride >= n_rows and x_stride >= k if n_tokens > 1.
 * Allocates nothing. */
dcp_status linear_run(struct linear *l, const struct weight *w, const float *x, int64_t x_stride,
                      int64_t n_tokens, float *y, int64_t y_stride);
/* Several weights (at most 8) on the same x (q, k, v; gate, up) as one parallel region. */
dcp_status linear_run_many(struct linear *l, const struct weight *const *ws, int n_ws,
                           const float *x, int64_t x_stride, int64_t n_tokens, float *const *ys,
                           const int64_t *y_strides);
/* Row i of w as f32. */
dcp_status linear_row(const struct linear *l, const struct weight *w, int64_t i, float *dst);

#endif
