/* SPDX-License-Identifier: Apache-2.0 */
/* Activations of a few tokens as the integer kernels want them (kernels.inc QDOT16), made once per
 * call and shared by all weights on the same x. */
#ifndef DCP_ENGINE_LINEAR_FEW_H
#define DCP_ENGINE_LINEAR_FEW_H

#include "base/status_priv.h"
#include "kernels/kernels_priv.h"

enum { LINEAR_FEW_MAX = 16 };

struct linear_few {
    struct dcp__q16_row rows[LINEAR_FEW_MAX]; /* of the call */
    /* what they point to, to be written */
    int16_t *words[LINEAR_FEW_MAX];
    int8_t *planes[LINEAR_FEW_MAX][DCP__Q16_ORDERS];
    float *scale[LINEAR_FEW_MAX], *pairs[LINEAR_FEW_MAX], *half_sum[LINEAR_FEW_MAX];
    void *memory;
};
/* For calls of up to n_tokens, or LINEAR_FEW_MAX. */
dcp_status linear_few_init(struct linear_few *f, int64_t n_tokens, int64_t max_k);
void linear_few_fini(struct linear_few *f); /* takes one that init never saw, all zero */
/* Token t of the call. orders: bit o is set if some weight wants planes[o]. k a multiple of 32. */
void linear_few_take(struct linear_few *f, const struct dcp__kernels *kernels, unsigned orders,
                     int t, const float *x, int64_t k);

#endif
