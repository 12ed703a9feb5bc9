/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are threads of one process: each holds the attention output over its own keys, and gets its
 * own heads of the output over all keys, in place. The way to use the merge inside an engine that
 * runs a thread per NUMA node.
 *
 *   cc merge_threads.c $(pkg-config --cflags --libs dcpattn) -pthread -lm && ./a.out
 *
 *   Every rank has seen other keys of one softmax. With scores all equal, a partial is the mean of
 *   the values it saw and its LSE the log of how many: the merge must give the mean of all. */
#include <dcpattn/dcpattn.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 3, TOKENS = 4, HEADS = 8, DIM = 16 };

/* Rank r saw 10 (r + 1) keys, all of value r. Rank 1 saw none for token 2. */
static int n_keys(int rank, int token)
{
    return rank == 1 && token == 2 ? 0 : 10 * (rank + 1);
}

static int64_t n_empty; /* (row, head)s without a key, as rank 0 has counted them */

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, dcp_last_error());
    return 1;
}

static int run_rank(dcp_group *group)
{
    const int rank = dcp_group_rank(group);
    float out[TOKENS * HEADS * DIM];
    float lse[TOKENS * HEADS];
    float merged_lse[TOKENS * HEADS];
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HEADS; h++) {
            /* log 0 = -inf: an empty row, whose payload nobody reads. */
            lse[t * HEADS + h] = logf((float)n_keys(rank, t));
            for (int d = 0; d < DIM; d++)
                out[(t * HEADS + h) * DIM + d] = n_keys(rank, t) > 0 ? (float)rank : NAN;
        }
    }

    /* Once, for the largest call there will be. */
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = TOKENS;
    desc.n_heads = HEADS;
    desc.dim = DIM;
    desc.lse_base = DCP_LSE_BASE_E;
    dcp_merge *merge = NULL;
    if (dcp_merge_create(group, &desc, &merge) != DCP_OK) return fail("create");

    /* Every step. The result replaces this rank's own heads of its own partial. */
    const dcp_range own = dcp_cut_range(HEADS, RANKS, rank);
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = TOKENS;
    args.out = out;
    args.lse = lse;
    args.merged = out + own.begin * DIM;
    args.merged_token_stride = HEADS * DIM;
    args.merged_head_stride = DIM;
    args.merged_lse = merged_lse;
    dcp_merge_stats stats;
    if (dcp_merge_run(merge, &args, &stats) != DCP_OK) return fail("run");
    dcp_merge_destroy(merge);

    for (int t = 0; t < TOKENS; t++) {
        double total = 0;
        double sum = 0;
        for (int r = 0; r < RANKS; r++) {
            total += n_keys(r, t);
            sum += n_keys(r, t) * (double)r;
        }
        for (int64_t h = own.begin; h < own.end; h++) {
            const double got = (double)out[((int64_t)t * HEADS + h) * DIM];
            const double got_lse = (double)merged_lse[t * (own.end - own.begin) + h - own.begin];
            if (fabs(got - sum / total) > 1e-6 || fabs(got_lse - log(total)) > 1e-6) {
                fprintf(stderr, "rank %d, token %d: %f instead of %f, LSE %f instead of %f\n", rank,
                        t, got, sum / total, got_lse, log(total));
                return 1;
            }
        }
    }
    if (rank == 0) n_empty = stats.lse_empty;
    return 0;
}

static void *rank_main(void *arg)
{
    dcp_group *group = arg;
    const int rc = run_rank(group);
    if (rc != 0) dcp_group_abort(group, "this rank has failed"); /* or the others would wait */
    dcp_group_destroy(group);
    return rc == 0 ? NULL : arg;
}

int main(void)
{
    dcp_group *groups[RANKS];
    if (dcp_group_create_threads(RANKS, NULL, groups) != DCP_OK) return fail("group");
    pthread_t threads[RANKS];
    for (int r = 0; r < RANKS; r++) {
        if (pthread_create(&threads[r], NULL, rank_main, groups[r]) != 0) return 1;
    }
    int rc = 0;
    for (int r = 0; r < RANKS; r++) {
        void *failed = NULL;
        (void)pthread_join(threads[r], &failed);
        if (failed != NULL) rc = 1;
    }
    if (rc == 0)
        printf("ok: %d ranks merged, each row is the mean of all values; %lld rows were empty\n",
               RANKS, (long long)n_empty);
    return rc;
}
