/* SPDX-License-Identifier: Apache-2.0 */
/* Small contiguous f32 merges for tests of the contract: a rank fills its partial, runs, looks. */
#ifndef TEST_MERGE_SIMPLE_H
#define TEST_MERGE_SIMPLE_H

#include <math.h>

#include "merge/merge_ranks.h"

enum { SIMPLE_T = 5, SIMPLE_H = 6, SIMPLE_D = 33 };
enum { SIMPLE_ROWS = SIMPLE_T * SIMPLE_H, SIMPLE_ELEMS = SIMPLE_ROWS * SIMPLE_D };

struct simple {
    dcp_group *g;
    int rank, n;
    dcp_merge_desc desc;
    dcp_merge_args args;
    dcp_merge *merge;
    dcp_merge_stats stats;
    dcp_range heads; /* own */
    float out[SIMPLE_ELEMS], lse[SIMPLE_ROWS];
    float merged[SIMPLE_ELEMS], merged_lse[SIMPLE_ROWS];
    int64_t kv_len[SIMPLE_T];
    float sink[SIMPLE_H];
};

static inline float *simple_row(struct simple *s, int64_t t, int64_t h)
{
    return s->out + (t * SIMPLE_H + h) * SIMPLE_D;
}
static inline float *simple_merged(struct simple *s, int64_t t, int64_t h)
{
    return s->merged + (t * (s->heads.end - s->heads.begin) + h - s->heads.begin) * SIMPLE_D;
}
static inline float *simple_merged_lse(struct simple *s, int64_t t, int64_t h)
{
    return s->merged_lse + t * (s->heads.end - s->heads.begin) + h - s->heads.begin;
}

/* Rank r: payload r + 1 everywhere, LSE 0. */
static inline struct simple *simple_new(dcp_group *g, dcp_merge_algo algo)
{
    struct simple *s = calloc(1, sizeof(*s));
    if (s == NULL) abort();
    s->g = g;
    s->rank = dcp_group_rank(g);
    s->n = dcp_group_size(g);
    s->desc = (dcp_merge_desc)DCP_MERGE_DESC_INIT;
    s->desc.max_tokens = SIMPLE_T;
    s->desc.n_heads = SIMPLE_H;
    s->desc.dim = SIMPLE_D;
    s->desc.lse_base = DCP_LSE_BASE_E;
    s->desc.algo = algo;
    s->args = (dcp_merge_args)DCP_MERGE_ARGS_INIT;
    s->args.n_tokens = SIMPLE_T;
    s->args.out = s->out;
    s->args.lse = s->lse;
    s->args.merged = s->merged;
    s->args.merged_lse = s->merged_lse;
    s->heads = dcp_cut_range(SIMPLE_H, s->n, s->rank);
    for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = (float)(s->rank + 1);
    for (int t = 0; t < SIMPLE_T; t++) s->kv_len[t] = 1;
    return s;
}
static inline void simple_fill_row(struct simple *s, int64_t t, int64_t h, float x)
{
    for (int d = 0; d < SIMPLE_D; d++) simple_row(s, t, h)[d] = x;
}
static inline dcp_status simple_create(struct simple *s)
{
    return dcp_merge_create(s->g, &s->desc, &s->merge);
}
static inline dcp_status simple_run(struct simple *s)
{
    return dcp_merge_run(s->merge, &s->args, &s->stats);
}
static inline void simple_free(struct simple *s)
{
    dcp_merge_destroy(s->merge);
    free(s);
}

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            printf("%s:%d rank %d: not so: %s (last error: %s)\n", __func__, __LINE__,             \
                   dcp_group_rank(g), #cond, dcp_last_error());                                    \
            dcp_group_abort(g, "an expectation failed");                                           \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)
#define NEAR(a, b, tol) (fabs((double)(a) - (double)(b)) <= (tol))

#endif
