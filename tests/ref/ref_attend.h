/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over the whole of one sequence, unsharded, in double: the oracle of dcp_attend. */
#ifndef REF_ATTEND_H
#define REF_ATTEND_H

#include <stdint.h>

struct ref_attend {
    int64_t n_heads, n_kv_heads, dk, dv, length, window; /* window 0 = none */
    int causal;
    double scale, softcap;
    const float *k; /* [length, n_kv_heads, dk], as the cache rounds it */
    const float *v; /* [length, n_kv_heads] rows of dv, v_stride elements apart */
    int64_t v_stride;
    const float *sink; /* [n_heads] or NULL */
};
/* One row and head: out [dv], *lse_out; *bound_out bounds the error of a float computation of out
 * relative to the largest |v|, and of lse absolutely. */
void ref_attend_row(const struct ref_attend *ref, const float *q, int64_t h, int64_t pos,
                    double *out, double *lse_out, double *bound_out);

#endif
