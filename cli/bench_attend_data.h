/* SPDX-License-Identifier: Apache-2.0 */
/* Queries, keys and values that any rank can make for any row without holding them: a row is a
 * stretch of one table of random numbers, at a place that a hash of what it belongs to gives. The
 * numbers are exact in f32, bf16 and f16, so that the oracle, in double, from the definition, asks
 * no more of a kernel than its arithmetic. */
#ifndef DCP_CLI_BENCH_ATTEND_DATA_H
#define DCP_CLI_BENCH_ATTEND_DATA_H

#include <stdbool.h>

#include "dcpattn/dcpattn.h"

struct attend_shape {
    int64_t n_keys, n_tokens; /* the new tokens are the last keys */
    int64_t n_heads, n_kv_heads, key_dim, value_dim;
    bool is_latent; /* v is the first value_dim columns of k */
    int64_t window, interleave;
    int64_t page_tokens; /* 0: the cache's default */
};

struct attend_data {
    struct attend_shape s;
    int64_t table_elems;
    float *table;
};
dcp_status attend_data_init(struct attend_data *d, const struct attend_shape *s);
void attend_data_fini(struct attend_data *d);

const float *attend_data_q(const struct attend_data *d, int64_t token,
                           int64_t head); /* [key_dim] */
const float *attend_data_k(const struct attend_data *d, int64_t pos, int64_t kv_head);
const float *attend_data_v(const struct attend_data *d, int64_t pos, int64_t kv_head);

/* q [T, own heads, Dk], dense. */
void attend_data_write_q(const struct attend_data *d, dcp_range heads, float *q);
/* Extends seq of the cache by all keys and stores those that the rank owns. */
dcp_status attend_data_store(const struct attend_data *d, dcp_cache *cache, int64_t seq,
                             int n_ranks, int rank);

/* Keys that token sees, and products of two numbers that the whole call needs, times two. */
int64_t attend_data_visible(const struct attend_shape *s, int64_t token);
double attend_data_flops(const struct attend_shape *s);

struct attend_check {
    double tolerance;    /* of an output element, as a share of the largest value */
    double weight_error; /* of a softmax weight, as a share of it, that out has and lse has not */
    int64_t n_rows;      /* (token, head)s to look at, spread over the call */
    double worst_error;  /* out: largest share seen */
    int64_t wrong;       /* out: added */
};
/* What attention over a cache of dtype cuts weights by, on this machine. */
double attend_data_weight_error(const struct attend_shape *s, dcp_dtype dtype);
/* Doubles of the oracle's work. */
size_t attend_data_work(const struct attend_shape *s);
/* out [T, own heads, D] and lse [T, own heads] dense, against the definition with scale
 * 1 / sqrt(Dk), causal. Weights that err by at most e each, in no order, move a mean by more than
 * 8 e sqrt(sum of (weight (value - mean))^2) with a chance below 3e-14 (Hoeffding's bound). work:
 * attend_data_work. */
void attend_data_check(const struct attend_data *d, dcp_range heads, const float *out,
                       const float *lse, double *work, struct attend_check *check);

#endif
