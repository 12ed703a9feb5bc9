/* SPDX-License-Identifier: Apache-2.0 */
/* The usual mistakes of a merge, each as the arithmetic that makes it, so that a wrong result can
 * be recognised by recomputing it. */
#ifndef DCP_CLI_COMPARE_CAUSES_H
#define DCP_CLI_COMPARE_CAUSES_H

#include <stdbool.h>

#include "dcpattn/dcpattn.h"

/* Rows of all partials and of the other result, in memory. */
struct cause_rows {
    int n_ranks, n_rows;
    int64_t n_tokens, n_heads, dim;
    dcp_lse_base base;
    const float *sink;      /* [H] or NULL */
    const int64_t *t, *h;   /* [n_rows] */
    const float *payload;   /* [n_ranks][n_rows][dim] */
    const float *lse;       /* [n_ranks][T][H], as in the files */
    const int64_t *kv_len;  /* [n_ranks][T] or NULL */
    const float *other;     /* [n_rows][dim], the other result */
    dcp_dtype type;         /* the coarser of both results */
    const float *other_lse; /* [n_rows] or NULL: the other result has none */
    double rtol, atol;      /* as in compare_report */
    double lse_rtol;        /* of LSEs, times at least 1 */
    double *work;           /* [n_rows][dim] */
};

enum cause_kind {
    CAUSE_NONE, /* as declared */
    CAUSE_BASE,
    CAUSE_TRANSPOSED,
    CAUSE_EMPTY_IS_ZERO,
    CAUSE_ZERO_IS_EMPTY,
    CAUSE_KV_LEN_IGNORED,
    CAUSE_TWICE,       /* rank a counted twice */
    CAUSE_MISSING,     /* rank a left out */
    CAUSE_REPLACED,    /* rank a's partial in the place of rank b's */
    CAUSE_ONE_PARTIAL, /* rank a's partial as it is */
    CAUSE_PLAIN_SUM,
    CAUSE_NO_WEIGHTS,
    CAUSE_NOT_NORMALISED,
    CAUSE_SINK_MISSING,
    CAUSE_SINK_EACH,
    CAUSE_LSE_BF16,
    CAUSE_PAYLOAD_BF16,
    CAUSE_RESULT_BF16,
    CAUSE_LSE_OUT_BASE, /* out as declared, the merged LSE in the other base */
    CAUSE_COUNT
};

/* Weights of the ranks at (t, h) as declared, 0 for empty ones; [n_ranks]. */
void cause_weights(const struct cause_rows *rows, int64_t t, int64_t h, double *weights);
/* The right LSE at (t, h), without the sink. */
double cause_lse(const struct cause_rows *rows, int64_t t, int64_t h);
/* How far the other result is from what the mistake gives: the largest errors over the sampled rows
 * in units of twice what a right result may differ by. Not above 1: the mistake explains them. */
struct cause_distance {
    double out, lse; /* lse is 0 where the other result has none */
};
struct cause_distance cause_distance(const struct cause_rows *rows, enum cause_kind kind, int a,
                                     int b);
/* False where the mistake makes no sense for these rows (a sink without a sink). */
bool cause_applies(const struct cause_rows *rows, enum cause_kind kind);

#endif
