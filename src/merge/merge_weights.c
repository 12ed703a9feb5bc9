/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of parts that come as (max, sum): e_r = sum_r * exp(max_r - top). Turning the pair into
 * an LSE first would round it, and at 1e4 cost a weight three digits. LSEs alone go to the kernel.
 * Written with the one-lane primitives: the same steps, so with sums of 1 the same bits as there
 * (the tests compare); a pair costs one exp a row and part, next to D products. */
#include <math.h>

#include "kernels/merge_vec_scalar.h"
#include "merge/merge_priv.h"
#include "num/vmath_tpl.h"

static float exp_in(float x, bool is_base_2)
{
    return is_base_2 ? vm_exp_2(x) : vm_exp_e(x);
}

static float weigh(const float *lse, const float *sum, float *w, int n_parts, int j, float m,
                   bool is_base_2)
{
    float total = 0.0f;
    for (int p = 0; p < n_parts; p++) {
        const int at = p * DCP__MERGE_ROWS + j;
        w[at] = sum[at] * exp_in(lse[at] - m, is_base_2);
        total += w[at];
    }
    return total;
}

void dcp__merge_weights(const struct dcp__merge_math *math, const float *lse, const float *sum,
                        int n_parts, const float *sink, float *w, float *merged_lse)
{
    const bool is_base_2 = math->is_base_2;
    if (sum == NULL) {
        math->kernels.merge_weights(lse, n_parts, is_base_2, sink, w, merged_lse);
        return;
    }
    for (int j = 0; j < DCP__MERGE_ROWS; j++) {
        float top = -INFINITY;
        for (int p = 0; p < n_parts; p++) {
            if (lse[p * DCP__MERGE_ROWS + j] > top) top = lse[p * DCP__MERGE_ROWS + j];
        }
        float m = top > -INFINITY ? top : 0.0f;
        float total = weigh(lse, sum, w, n_parts, j, m, is_base_2);
        const float some = total >= 0x1p-126f ? total : 1.0f;
        merged_lse[j] =
            top > -INFINITY ? top + (is_base_2 ? vm_log_2(some) : vm_log_e(some)) : -INFINITY;
        if (sink != NULL) {
            if (sink[j] > m) m = sink[j];
            total = weigh(lse, sum, w, n_parts, j, m, is_base_2);
            total += exp_in(sink[j] - m, is_base_2);
        }
        const float whole = total > 0.0f ? total : 1.0f;
        for (int p = 0; p < n_parts; p++) {
            float *to = &w[p * DCP__MERGE_ROWS + j];
            *to /= whole;
            if (*to < 0x1p-126f) *to = 0.0f;
        }
    }
}
