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
struct ref_attend_result {
    double *out; /* [dv], the caller's */
    double lse;
    double bound;  /* of the error of a float computation of out relative to the largest |v|, and of
                       lse absolutely */
    double widest; /* largest sum |q k scale| of a key */
    double *spread; /* [dv], the caller's: mean of |v - out|, by weight, before the sink */
};
/* One row and head. */
void ref_attend_row(const struct ref_attend *ref, const float *q, int64_t h, int64_t pos,
                    struct ref_attend_result *result);

/* What a kernel adds that takes q as two bf16 parts and its weights p as one, and divides by the
 * sum of the rounded weights.
 *
 *     q      each element is off by at most 2^-17 of it, so a score by 2^-17 widest, and so is lse;
 *            out by twice that of the largest |v| (sum and weighted sum)
 *     p      each is off by a factor 1 + e, |e| <= 2^-8: out of one range of keys by
 *            sum p e (v - out) / sum p (1 + e), at most 2^-8 (1 + 2^-7) spread of that range.
 *            Ranges (ranks, splits) that are merged spread about an out of their own each, which
 *            makes it at most twice the spread about the whole's. lse: not at all. */
double ref_attend_parts_lse(const struct ref_attend_result *result);
double ref_attend_parts_out(const struct ref_attend_result *result, double largest_v, int64_t d);

#endif
