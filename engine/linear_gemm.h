/* SPDX-License-Identifier: Apache-2.0 */
/* Dense products by oneDNN, one thread per call: Y[t][i] = sum_k X[t][k] * W[i][k]. The caller's
 * threads work side by side, each on panels of its own; oneDNN's own threads stay off. */
#ifndef DCP_ENGINE_LINEAR_GEMM_H
#define DCP_ENGINE_LINEAR_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "dcpattn/status.h"

struct gemm;
struct gemm_plan; /* a bf16 product of one shape, made once */

struct gemm_shape {
    int64_t n_tokens, n_rows, k;
    int64_t x_stride, w_stride, y_stride; /* in elements */
};

/* bf16 products are prepared if bf16; DCP_ERR_UNSUPPORTED says that oneDNN has none for this CPU.
 */
dcp_status gemm_create(int n_threads, bool bf16, struct gemm **gemm_out);
void gemm_destroy(struct gemm *g); /* takes NULL */

/* Makes the plan for a shape (under 1 ms), or finds it. Plans live as long as g. Not re-entrant. */
enum { GEMM_MAX_PLANS = 32 };
dcp_status gemm_plan(struct gemm *g, const struct gemm_shape *shape, struct gemm_plan **plan_out);
/* Plans ever made. */
int gemm_n_plans(const struct gemm *g);

/* Between these two, on each thread that multiplies, oneDNN runs on that thread alone. */
int gemm_enter(const struct gemm *g);
void gemm_leave(const struct gemm *g, int token);

/* Return oneDNN's status, 0 = done. Re-entrant: one call per thread number at a time. */
int gemm_f32(const struct gemm_shape *shape, const float *x, const float *w, float *y);
int gemm_bf16(struct gemm *g, struct gemm_plan *plan, int thread, const uint16_t *x,
              const uint16_t *w, float *y);

#endif
