/* SPDX-License-Identifier: Apache-2.0 */
/* Partials that a bench can write again and again at the speed of memory, and whose exact merge it
 * can tell for any row without holding anything. Row (t, h) of rank r is a stretch of one table of
 * random values, at a place that a hash of (t, h, r) gives; the LSE comes from the same hash. The
 * values are exact in f32, bf16 and f16, so that one oracle serves all types. */
#ifndef DCP_CLI_BENCH_DATA_H
#define DCP_CLI_BENCH_DATA_H

#include "dcpattn/dcpattn.h"

struct bench_data {
    dcp_dtype dtype;
    int64_t n_tokens, n_heads, dim;
    int64_t table_elems;
    float *values; /* [table_elems] */
    void *table;   /* the same in dtype */
};

dcp_status bench_data_init(struct bench_data *d, dcp_dtype dtype, int64_t n_tokens, int64_t n_heads,
                           int64_t dim);
void bench_data_fini(struct bench_data *d);

/* Write rank's partial, all of it: out [T,H,D] in dtype, lse [T,H] f32, natural logs. */
void bench_data_write(const struct bench_data *d, int rank, void *out, float *lse);

/* The merged rows as the bench finds them. */
struct bench_result {
    const void *out; /* dtype; row (t - t0, h - h0) at strides in elements */
    int64_t token_stride, head_stride;
    const float *lse; /* [t - t0][h - h0], lse_token_stride apart */
    int64_t lse_token_stride;
    int64_t t0, t1, h0, h1;
};
/* How many elements and LSEs of up to n_rows rows, spread evenly, are off by more than the rounding
 * of the arithmetic allows: (n_ranks + 8) roundings of f32 at the largest value, and one to
 * dtype. In double, from the definition. */
int64_t bench_data_wrong(const struct bench_data *d, int n_ranks, const struct bench_result *res,
                         int64_t n_rows);

#endif
