/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one row in double precision, the naive way round. */
#ifndef DCP_TESTS_REF_ATTN_H
#define DCP_TESTS_REF_ATTN_H

#include <stdint.h>

struct ref_attn_row {
    int64_t dk, dv;
    int64_t lo, hi; /* visible keys */
    double scale, softcap;
    const float *q;                /* [dk] */
    const float *k;                /* [hi][k_stride] */
    const float *v;                /* [hi][v_stride] */
    int64_t k_stride, v_stride;    /* elements */
    double *out;                   /* [dv] */
    double lse;                    /* result, natural log; -inf if nothing is visible */
    double score_size, value_size; /* results: largest sum |q k scale|, largest |v| that was seen */
};
void ref_attn(struct ref_attn_row *row);

/* What a float32 kernel may be off by: u = 2^-24. A score is a chain of dk rounded operations; its
 * error, random in sign, is taken as 4 sqrt(dk) + 8 units of score_size. The weights then err by
 * that and by the exponential (4 u, with softcap 6 u cap more), the sums by the length of their
 * chains (blocks of 64, then n / 64 blocks). */
double ref_attn_tol_lse(const struct ref_attn_row *row);
double ref_attn_tol_out(const struct ref_attn_row *row);

#endif
