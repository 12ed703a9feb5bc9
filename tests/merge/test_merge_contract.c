/* SPDX-License-Identifier: Apache-2.0 */
/* One test per clause of the merge's contract, each with inputs on which a plausible wrong way
 * gives another answer. Every test runs for each algorithm that the clause binds.
 *
 * The kinds of fault, and the test that fails without the cure (this file, if no other is named):
 *
 *   LSE of an empty shard left at 0               kv_len_beats_lse
 *   all shards empty: -inf minus -inf             empties
 *   0 times NaN payload                           empties, unmapped; weight 0: nonfinite
 *   +inf (or NaN) as the empty mark               empties
 *   natural logs read as base 2                   bases
 *   exp of a raw LSE overflows                    extreme_lse; (max, sum): test_merge_local max_sum
 *   finite start values instead of -inf           extreme_lse (-1e5, -3e38), empties
 *   LSE in bf16                                   bf16_lse
 *   transposed LSE                                transposed_lse; strides: test_merge_property
 *   32-bit offsets                                offsets (functions, one sparse mapping)
 *   heads not divisible, any N, odd D             test_merge_property; N to 64: test_merge_many
 *   padded heads that hold NaN                    padded_heads
 *   workspace that overlaps the partial, writing
 *     into another rank's slice                   overlaps; check_untouched: test_merge_property
 *   stale workspace rows of a larger call         stale_workspace (two patterns)
 *   T = 0 on one rank only                        no_tokens
 *   any other T on one rank                       test_merge_refusals (tokens_differ)
 *   sink applied once per rank                    sink_once
 *   a peer returns while it is still read         scribble
 *   two groups, two threads                       test_merge_failure two_groups
 *   two threads on one group                      test_merge_failure busy
 *   descriptions differ                           desc_mismatch, test_merge_refusals (each field)
 *   never calls, late, stopped, killed            test_merge_failure, test_merge_faults (by dice),
 *                                                 test_merge_async never_comes
 *   a second merge in flight                      test_merge_async one_in_flight
 *   full-size buffers                             test_merge_many peak */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_priv.h"
#include "merge/merge_simple.h"

static dcp_merge_algo algo_now;

static int run_on(ranks_fn *fn, int n)
{
    int n_failed = 0;
    for (int algo = DCP_MERGE_DIRECT; algo <= DCP_MERGE_HIERARCHICAL; algo++) {
        algo_now = (dcp_merge_algo)algo;
        n_failed += ranks_threads(n, 20.0, fn, NULL);
        if (algo == DCP_MERGE_HIERARCHICAL && n > 2) { /* two hosts */
            ranks_per_host = n - 1;
            n_failed += ranks_threads(n, 20.0, fn, NULL);
            ranks_per_host = 0;
        }
    }
    return n_failed;
}

/* A kernel leaves LSE 0 where it saw no key: kv_len says so, whatever the LSE holds. */
static int kv_len_beats_lse(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    s->desc.has_kv_len = 1;
    s->args.kv_len = s->kv_len;
    if (s->rank == 1) {
        s->kv_len[2] = 0;
        for (int h = 0; h < SIMPLE_H; h++) simple_fill_row(s, 2, h, NAN);
    }
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    for (int64_t h = s->heads.begin; h < s->heads.end; h++) {
        EXPECT(NEAR(simple_merged(s, 2, h)[0], 2.0, 1e-6)); /* of 1 and 3 */
        EXPECT(NEAR(simple_merged(s, 1, h)[0], 2.0, 1e-6)); /* of 1, 2 and 3 */
        EXPECT(NEAR(*simple_merged_lse(s, 2, h), log(2.0), 1e-6));
    }
    EXPECT(s->stats.lse_empty == SIMPLE_H && s->stats.nonfinite_values == 0);
    s->kv_len[0] = -1;
    EXPECT(simple_run(s) == DCP_ERR_ARG);
    s->kv_len[0] = 1;
    EXPECT(simple_run(s) == DCP_OK); /* nothing was poisoned */
    simple_free(s);
    return 0;
}

/* -inf - -inf, 0 * NaN, +inf and NaN as marks; neighbours keep their bits. */
static int empties(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    const float marks[3] = {-INFINITY, INFINITY, NAN};
    for (int h = 0; h < SIMPLE_H; h++) {
        simple_fill_row(s, 1, h, NAN);
        s->lse[1 * SIMPLE_H + h] = marks[(h + s->rank) % 3];
        if (s->rank != 2) { /* one part alone */
            simple_fill_row(s, 3, h, INFINITY);
            s->lse[3 * SIMPLE_H + h] = marks[(h + s->rank) % 3];
        } else {
            for (int d = 0; d < SIMPLE_D; d++) simple_row(s, 3, h)[d] = 0.1f * (float)d;
            s->lse[3 * SIMPLE_H + h] = -1e5f + 0.3f;
        }
    }
    EXPECT(simple_create(s) == DCP_OK);
    memset(s->merged, 0x77, sizeof(s->merged));
    EXPECT(simple_run(s) == DCP_OK);
    for (int64_t h = s->heads.begin; h < s->heads.end; h++) {
        for (int d = 0; d < SIMPLE_D; d++) {
            EXPECT(simple_merged(s, 1, h)[d] == 0.0f && !signbit(simple_merged(s, 1, h)[d]));
            EXPECT(simple_merged(s, 3, h)[d] == 0.1f * (float)d);
            EXPECT(NEAR(simple_merged(s, 0, h)[d], 2.0, 1e-6));
        }
        EXPECT(*simple_merged_lse(s, 1, h) == -INFINITY);
        EXPECT(*simple_merged_lse(s, 3, h) == -1e5f + 0.3f);
    }
    EXPECT(s->stats.lse_empty + s->stats.lse_bad == (3 + 2) * SIMPLE_H);
    EXPECT(s->stats.nonfinite_values == 0);
    simple_free(s);
    return 0;
}

/* Z = {2, 8}, outputs {0, 10}: 8.0 with natural logs; the same numbers read as base 2: 7.2330. */
static int bases(dcp_group *g, void *user)
{
    (void)user;
    for (int is_base_2 = 0; is_base_2 < 2; is_base_2++) {
        struct simple *s = simple_new(g, algo_now);
        const double z = s->rank == 0 ? 2.0 : 8.0;
        s->desc.lse_base = is_base_2 ? DCP_LSE_BASE_2 : DCP_LSE_BASE_E;
        for (int i = 0; i < SIMPLE_ROWS; i++) s->lse[i] = (float)(is_base_2 ? log2(z) : log(z));
        for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = s->rank == 0 ? 0.0f : 10.0f;
        EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
        EXPECT(NEAR(s->merged[0], 8.0, 2e-6));
        EXPECT(NEAR(s->merged_lse[0], is_base_2 ? log2(10.0) : log(10.0), 1e-6));
        simple_free(s);
    }
    struct simple *s = simple_new(g, algo_now);
    s->desc.lse_base = DCP_LSE_BASE_2; /* natural logs, wrongly declared */
    for (int i = 0; i < SIMPLE_ROWS; i++) s->lse[i] = (float)log(s->rank == 0 ? 2.0 : 8.0);
    for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = s->rank == 0 ? 0.0f : 10.0f;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(NEAR(s->merged[0], 7.2330317, 2e-6));
    simple_free(s);
    s = simple_new(g, algo_now);
    s->desc.lse_base = DCP_LSE_BASE_UNSET;
    EXPECT(simple_create(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "lse_base") != NULL);
    simple_free(s);
    return 0;
}

/* exp(1e4) overflows; -1e5 is below any finite start value; a rounded merged LSE would cost digits.
 */
static int extreme_lse(dcp_group *g, void *user)
{
    (void)user;
    const double at[] = {1e4, -1e5, 3e38, -3e38, 88.8};
    struct simple *s = simple_new(g, algo_now);
    for (int t = 0; t < SIMPLE_T; t++) {
        for (int h = 0; h < SIMPLE_H; h++)
            s->lse[t * SIMPLE_H + h] = (float)at[t] + (s->rank == 0 ? 0.0f : 0.5f);
    }
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    for (int t = 0; t < SIMPLE_T; t++) {
        const double step = (double)((float)at[t] + 0.5f) - (double)(float)at[t];
        const double want = (1 + 2 * exp(step)) / (1 + exp(step));
        for (int64_t h = s->heads.begin; h < s->heads.end; h++) {
            EXPECT(NEAR(simple_merged(s, t, h)[1], want, 1e-6));
            EXPECT(NEAR(*simple_merged_lse(s, t, h), (double)(float)at[t] + log(1 + exp(step)),
                        1e-7 * fabs(at[t]) + 1e-6));
        }
    }
    simple_free(s);
    return 0;
}

/* LSEs kept in bf16 are widened, not taken for anything else. */
static int bf16_lse(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    uint16_t lse[SIMPLE_ROWS];
    for (int i = 0; i < SIMPLE_ROWS; i++)
        lse[i] = s->rank == 0 ? 0x3f80 /* 1 */ : 0xff80 /* -inf */;
    s->desc.lse_type = DCP_BF16;
    s->args.lse = lse;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(s->merged[0] == 1.0f && s->merged_lse[0] == 1.0f);
    simple_free(s);
    return 0;
}

/* LSEs stored heads first: read by their strides they are right, read as [T,H] they are other
 * rows'. */
static int transposed_lse(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    for (int t = 0; t < SIMPLE_T; t++) {
        for (int h = 0; h < SIMPLE_H; h++)
            s->lse[h * SIMPLE_T + t] = s->rank == 0 ? 0.1f * (float)(t * SIMPLE_H + h) : 0.0f;
    }
    s->args.lse_token_stride = 1;
    s->args.lse_head_stride = SIMPLE_T;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    for (int t = 0; t < SIMPLE_T; t++) {
        for (int64_t h = s->heads.begin; h < s->heads.end; h++) {
            const double w = exp(0.1 * (double)(t * SIMPLE_H + h));
            EXPECT(NEAR(simple_merged(s, t, h)[0], (w + 2 + 3) / (w + 2), 1e-5));
        }
    }
    simple_free(s);
    return 0;
}

/* Padded heads hold NaN: they lie in the gaps of a larger layout and are nobody's. */
static int padded_heads(dcp_group *g, void *user)
{
    (void)user;
    enum { WIDE = SIMPLE_H + 2 };
    static _Thread_local float out[SIMPLE_T * WIDE * SIMPLE_D];
    struct simple *s = simple_new(g, algo_now);
    for (int t = 0; t < SIMPLE_T; t++) {
        for (int h = 0; h < WIDE; h++) {
            for (int d = 0; d < SIMPLE_D; d++)
                out[(t * WIDE + h) * SIMPLE_D + d] = h < SIMPLE_H ? (float)s->rank : NAN;
        }
    }
    s->desc.nonfinite = DCP_NONFINITE_ERROR;
    s->args.out = out;
    s->args.out_token_stride = WIDE * SIMPLE_D;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(s->stats.nonfinite_values == 0);
    simple_free(s);
    return 0;
}

/* The sink joins the denominator once in the group; the merged LSE is without it. */
static int sink_once(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    s->desc.has_sink = 1;
    s->args.sink = s->sink;
    for (int h = 0; h < SIMPLE_H; h++) s->sink[h] = h == 0 ? -INFINITY : 2.0f;
    for (int h = 0; h < SIMPLE_H; h++) s->lse[2 * SIMPLE_H + h] = -INFINITY; /* row 2: nobody */
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    for (int64_t h = s->heads.begin; h < s->heads.end; h++) {
        const double whole = 3.0 + (h == 0 ? 0.0 : exp(2.0));
        EXPECT(NEAR(simple_merged(s, 0, h)[0], 6.0 / whole, 1e-6));
        EXPECT(NEAR(*simple_merged_lse(s, 0, h), log(3.0), 1e-6));
        EXPECT(simple_merged(s, 2, h)[0] == 0.0f && *simple_merged_lse(s, 2, h) == -INFINITY);
    }
    s->sink[3] = INFINITY;
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "sink[3]") != NULL);
    s->args.sink = NULL;
    EXPECT(simple_run(s) == DCP_ERR_ARG);
    simple_free(s);
    return 0;
}

/* Policies: zeroed, propagated, or an error of the same name on every rank. */
static int nonfinite(dcp_group *g, void *user)
{
    (void)user;
    for (int policy = 0; policy < 3; policy++) {
        struct simple *s = simple_new(g, algo_now);
        s->desc.nonfinite = (dcp_nonfinite)policy;
        if (s->rank == 2) simple_row(s, 3, 1)[4] = NAN;
        if (s->rank == 1) simple_row(s, 3, 1)[7] = -INFINITY;
        if (s->rank == 0) simple_row(s, 4, 0)[0] = INFINITY;
        if (s->rank == 0) { /* weight 0: neither counted nor an error, though not an empty mark */
            s->lse[0] = -1000.0f;
            simple_row(s, 0, 0)[0] = NAN;
        }
        EXPECT(simple_create(s) == DCP_OK);
        const dcp_status st = simple_run(s);
        EXPECT(s->stats.nonfinite_values == 3);
        if (policy == DCP_NONFINITE_ERROR) {
            EXPECT(st == DCP_ERR_NONFINITE);
            EXPECT(strstr(dcp_last_error(), "token 3, head 1 of rank 1") != NULL);
            if (s->rank == 0) simple_row(s, 4, 0)[0] = 1.0f;
            simple_row(s, 3, 1)[4] = 1.0f;
            simple_row(s, 3, 1)[7] = 1.0f;
            EXPECT(simple_run(s) == DCP_OK); /* the group stayed usable */
        } else {
            EXPECT(st == DCP_OK);
        }
        if (s->heads.begin <= 1 && s->heads.end > 1 && policy != DCP_NONFINITE_ERROR) {
            const float *row = simple_merged(s, 3, 1);
            EXPECT(policy == 0 ? NEAR(row[4], 1.0, 1e-6) : isnan(row[4]));
            EXPECT(policy == 0 ? NEAR(row[7], 4.0 / 3, 1e-6) : row[7] == -INFINITY);
            EXPECT(NEAR(row[5], 2.0, 1e-6));
        }
        simple_free(s);
    }
    return 0;
}

/* T = 0 everywhere takes part; on one rank it is a mismatch that names both; then all goes on. */
static int no_tokens(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    s->args.n_tokens = s->rank == 1 ? 0 : SIMPLE_T;
    EXPECT(simple_run(s) == DCP_ERR_MISMATCH);
    EXPECT(strstr(dcp_last_error(), "rank 0 has 5") != NULL);
    EXPECT(strstr(dcp_last_error(), "rank 1 has 0") != NULL);
    s->args.n_tokens = 0;
    EXPECT(simple_run(s) == DCP_OK && s->stats.lse_empty == 0);
    s->args.n_tokens = SIMPLE_T;
    EXPECT(simple_run(s) == DCP_OK);
    s->args.n_tokens = SIMPLE_T + 1;
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "0..5") != NULL);
    simple_free(s);
    return 0;
}

/* A check that fails on one rank is an error on all, with its text. */
static int one_refuses(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 2) s->args.out = NULL;
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "out is NULL") != NULL);
    if (s->rank == 0) EXPECT(strstr(dcp_last_error(), "rank 2 refused") != NULL);
    s->args.out = s->out;
    EXPECT(simple_run(s) == DCP_OK);
    s->args.out_head_stride = SIMPLE_D - 1; /* rows over each other */
    s->args.out_token_stride = SIMPLE_H * SIMPLE_D;
    EXPECT(simple_run(s) == DCP_ERR_ARG);
    simple_free(s);
    return 0;
}

/* A description that differs is refused (each field: test_merge_refusals.c); the next merge is
 * not. */
static int desc_mismatch(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    if (s->rank == 1) s->desc.algo = DCP_MERGE_ALLREDUCE;
    EXPECT(simple_create(s) == DCP_ERR_MISMATCH && strstr(dcp_last_error(), "algo") != NULL);
    s->desc.algo = DCP_MERGE_HALVING;
    s->desc.order = DCP_MERGE_ORDER_RANK;
    EXPECT(simple_create(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "rank order") != NULL);
    s->desc.order = DCP_MERGE_ORDER_DEFAULT;
    s->desc.algo = algo_now;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    simple_free(s);
    return 0;
}

/* In place at the right spot works; shifted, with other strides, for cut none, or in a peer's
 * partial it is refused on every rank, and nothing has moved. */
static struct simple *everyone[RANKS_MAX];
static int overlaps(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    const float *const slice = simple_row(s, 0, s->heads.begin);
    EXPECT(simple_create(s) == DCP_OK);
    s->args.merged = s->out + s->heads.begin * SIMPLE_D;
    s->args.merged_token_stride = SIMPLE_H * SIMPLE_D;
    s->args.merged_head_stride = SIMPLE_D;
    EXPECT(simple_run(s) == DCP_OK && NEAR(*slice, 2.0, 1e-6));
    for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = (float)(s->rank + 1);
    s->args.merged_token_stride = 0; /* other strides */
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "overlaps") != NULL);
    s->args.merged_token_stride = SIMPLE_H * SIMPLE_D;
    s->args.merged = s->out + s->heads.begin * SIMPLE_D + 1; /* shifted */
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "overlaps") != NULL);
    s->args.merged = s->merged;
    s->args.merged_token_stride = 0;
    s->args.merged_head_stride = 0;
    s->args.merged_lse = (float *)s->out; /* the LSE into the payload */
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "merged_lse") != NULL);
    s->args.merged_lse = NULL;
    everyone[s->rank] = s;
    EXPECT(dcp_group_barrier(g) == DCP_OK);
    if (s->rank == 0) s->args.merged = everyone[1]->out; /* a peer's partial */
    EXPECT(simple_run(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "partial") != NULL);
    for (int i = 0; i < SIMPLE_ELEMS; i++) EXPECT(s->out[i] == (float)(s->rank + 1));
    EXPECT(dcp_group_barrier(g) == DCP_OK);
    s->args.merged = s->merged;
    EXPECT(simple_run(s) == DCP_OK);
    dcp_merge_destroy(s->merge);
    s->merge = NULL;
    s->desc.cut = DCP_CUT_NONE;
    EXPECT(simple_create(s) == DCP_OK);
    s->args.merged = s->out;
    EXPECT(simple_run(s) == DCP_ERR_ARG);
    simple_free(s);
    return 0;
}

/* Rows of one buffer between rows of another do not overlap: partials side by side in one array. */
static int interleaved(dcp_group *g, void *user)
{
    (void)user;
    static float shared[SIMPLE_T * 3 * SIMPLE_H * SIMPLE_D];
    struct simple *s = simple_new(g, algo_now);
    float *const out = shared + s->rank * SIMPLE_H * SIMPLE_D;
    for (int t = 0; t < SIMPLE_T; t++) {
        for (int i = 0; i < SIMPLE_H * SIMPLE_D; i++)
            out[t * 3 * SIMPLE_H * SIMPLE_D + i] = (float)(s->rank + 1);
    }
    s->args.out = out;
    s->args.out_token_stride = 3 * SIMPLE_H * SIMPLE_D;
    s->args.merged = out + s->heads.begin * SIMPLE_D;
    s->args.merged_token_stride = 3 * SIMPLE_H * SIMPLE_D;
    s->args.merged_head_stride = SIMPLE_D;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(NEAR(out[s->heads.begin * SIMPLE_D], 2.0, 1e-6));
    simple_free(s);
    return 0;
}

/* A larger earlier call leaves rows in the workspace: two patterns, the same bits. */
static int stale_workspace(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    s->desc.workspace_limit_bytes = 16384;
    EXPECT(simple_create(s) == DCP_OK);
    float kept[2 * SIMPLE_H * SIMPLE_D];
    memset(kept, 0, sizeof(kept));
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = round == 0 ? 1e30f : NAN;
        s->args.n_tokens = SIMPLE_T;
        EXPECT(simple_run(s) == DCP_OK);
        for (int i = 0; i < 2 * SIMPLE_H * SIMPLE_D; i++)
            s->out[i] = (float)(i % 7) + (float)s->rank;
        for (int h = 0; h < SIMPLE_H; h++)
            s->lse[h] = s->rank == h % 3 ? -INFINITY : 0.25f * (float)s->rank;
        s->args.n_tokens = 2;
        EXPECT(simple_run(s) == DCP_OK);
        const size_t n_bytes =
            (size_t)(2 * (s->heads.end - s->heads.begin)) * SIMPLE_D * sizeof(float);
        if (round == 0) memcpy(kept, s->merged, n_bytes);
        EXPECT(memcmp(kept, s->merged, n_bytes) == 0);
    }
    simple_free(s);
    return 0;
}

/* Run returns only when nobody reads this rank's partial any more: it is scribbled over at once. */
static int scribble(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = (float)(s->rank + round);
        if ((round + s->rank) % 17 == 0) usleep(200);
        EXPECT(simple_run(s) == DCP_OK);
        for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = 1e9f;
        EXPECT(NEAR(s->merged[0], 1.0 + round, 1e-4));
        EXPECT(NEAR(*simple_merged(s, SIMPLE_T - 1, s->heads.end - 1), 1.0 + round, 1e-4));
    }
    simple_free(s);
    return 0;
}

/* A wire type narrower than out's: rounded once on the way, by every rank alike. */
static int narrow_wire(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, DCP_MERGE_ALLTOALL);
    s->desc.wire_type = DCP_BF16;
    for (int i = 0; i < SIMPLE_ELEMS; i++) s->out[i] = 1.0f + 0x1p-10f * (float)s->rank;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(NEAR(s->merged[0], 1.0, 0x1p-8));
    const int64_t narrow = s->stats.wire_bytes;
    dcp_merge_destroy(s->merge);
    s->merge = NULL;
    s->desc.wire_type = DCP_DTYPE_DEFAULT;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(narrow * 10 < s->stats.wire_bytes * 7);
    dcp_merge_destroy(s->merge);
    s->merge = NULL;
    s->desc.out_type = DCP_BF16;
    s->desc.wire_type = DCP_F32;
    EXPECT(simple_create(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "wire") != NULL);
    simple_free(s);
    return 0;
}

/* Two merges on one group told apart: rank 1 runs the other one. */
static int crossed_merges(dcp_group *g, void *user)
{
    (void)user;
    struct simple *a = simple_new(g, algo_now);
    struct simple *b = simple_new(g, algo_now);
    EXPECT(simple_create(a) == DCP_OK && simple_create(b) == DCP_OK);
    EXPECT(simple_run(a) == DCP_OK);
    for (int i = 0; i < 2; i++) {
        EXPECT(simple_run(a->rank == 1 ? b : a) == DCP_ERR_MISMATCH);
        EXPECT(strstr(dcp_last_error(), "another merge of this group") != NULL);
    }
    const int64_t n_tokens =
        b->args.n_tokens; /* one refused by its own rank beside another merge */
    if (b->rank == 1) b->args.n_tokens = -1;
    EXPECT(simple_run(b->rank == 1 ? b : a) != DCP_OK);
    b->args.n_tokens = n_tokens;
    EXPECT(simple_run(a) == DCP_OK && simple_run(b) == DCP_OK); /* both work on */
    simple_free(b);
    simple_free(a);
    return 0;
}

/* A sink that is another on one rank: nothing would be the softmax of anything. */
static int other_sink(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    s->desc.has_sink = 1;
    s->args.sink = s->sink;
    for (int h = 0; h < SIMPLE_H; h++) s->sink[h] = h == 0 && s->rank == 1 ? -0.0f : 0.0f;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    if (s->rank == 1) s->sink[SIMPLE_H - 1] = 5.0f;
    EXPECT(simple_run(s) == DCP_ERR_MISMATCH && strstr(dcp_last_error(), "sink") != NULL);
    s->sink[SIMPLE_H - 1] = 0.0f;
    EXPECT(simple_run(s) == DCP_OK);
    simple_free(s);
    return 0;
}

static int sizes_of_workspace(dcp_group *g, void *user)
{
    (void)user;
    const dcp_merge_algo algos[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLTOALL};
    for (int i = 0; i < 2; i++) {
        struct simple *s = simple_new(g, algos[i]);
        s->desc.max_tokens = 1000;
        s->desc.workspace_limit_bytes = 30000;
        EXPECT(simple_create(s) == DCP_OK);
        dcp_merge_info info;
        dcp_merge_get_info(s->merge, &info);
        EXPECT(info.workspace_bytes <= 30000 + 8192 && info.tile_tokens > 0); /* + small arrays */
        dcp_merge_destroy(s->merge);
        s->merge = NULL;
        s->desc.algo = DCP_MERGE_ALLTOALL;
        s->desc.workspace_limit_bytes = 100;
        EXPECT(simple_create(s) == DCP_ERR_ARG && strstr(dcp_last_error(), "limit is 100") != NULL);
        simple_free(s);
    }
    return 0;
}

#define TEST_ON_3(fn)                                                                              \
    static void test_##fn(void **state)                                                            \
    {                                                                                              \
        (void)state;                                                                               \
        assert_int_equal(run_on(fn, 3), 0);                                                        \
    }
TEST_ON_3(kv_len_beats_lse)
TEST_ON_3(empties)
TEST_ON_3(padded_heads)
TEST_ON_3(transposed_lse)
TEST_ON_3(sink_once)
TEST_ON_3(nonfinite)
TEST_ON_3(no_tokens)
TEST_ON_3(one_refuses)
TEST_ON_3(desc_mismatch)
TEST_ON_3(overlaps)
TEST_ON_3(interleaved)
TEST_ON_3(stale_workspace)
TEST_ON_3(scribble)
TEST_ON_3(crossed_merges)
TEST_ON_3(other_sink)

static void test_narrow_wire(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(3, 20.0, narrow_wire, NULL), 0);
}
static void test_sizes_of_workspace(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(3, 20.0, sizes_of_workspace, NULL), 0);
}

static void test_pairs(void **state)
{
    (void)state;
    assert_int_equal(run_on(bases, 2), 0);
    assert_int_equal(run_on(extreme_lse, 2), 0);
    assert_int_equal(run_on(bf16_lse, 2), 0);
}

/* The baseline, as published: it overwrites the partial and says so. */
static int baseline(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, DCP_MERGE_ALLREDUCE);
    EXPECT(simple_create(s) == DCP_OK);
    dcp_merge_info info;
    dcp_merge_get_info(s->merge, &info);
    EXPECT(info.overwrites_partial == 1 && strcmp(info.algo_name, "allreduce") == 0);
    EXPECT(simple_run(s) == DCP_OK && NEAR(s->merged[0], 2.0, 1e-6));
    EXPECT(NEAR(s->out[0], 2.0, 1e-6)); /* the sum over ranks stands in the caller's partial */
    simple_free(s);
    return 0;
}
static void test_baseline(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(3, 20.0, baseline, NULL), 0);
}

/* Offsets do not fit 32 bits: by the function, and over one sparse mapping of 8 GiB. */
static int far_apart(dcp_group *g, void *user)
{
    float *map = user;
    const int64_t head_stride = INT64_C(1) << 30; /* elements: 4 GiB apart */
    struct simple *s = simple_new(g, algo_now);
    s->desc.max_tokens = 1;
    s->desc.n_heads = 2;
    s->desc.dim = 2;
    s->args.n_tokens = 1;
    s->args.out = map;
    s->args.out_head_stride = head_stride;
    s->args.out_token_stride = 2;
    map[0] = map[1] = 1.0f;
    map[head_stride] = map[head_stride + 1] = 7.0f;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(s->merged[0] == 1.0f && s->merged[2] == 7.0f);
    simple_free(s);
    return 0;
}
static void test_offsets(void **state)
{
    (void)state;
    assert_true(dcp__merge_offset(1 << 20, 95, 96 * 512, 512) ==
                (INT64_C(1) << 20) * 96 * 512 + 95 * 512);
    const struct dcp__merge_block b =
        dcp__merge_block_of(DCP_CUT_HEADS, INT64_C(1) << 24, 96, 8, 7);
    assert_true(dcp__merge_block_bytes(&b, 512, 4, 1) > (UINT64_C(1) << 38));
    const size_t n_bytes = ((size_t)1 << 32) + 4096;
    void *map = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        print_message("skipped: no sparse mapping of 4 GiB here\n");
        skip();
    }
    algo_now = DCP_MERGE_DIRECT;
    assert_int_equal(ranks_threads(1, 20.0, far_apart, map), 0);
    algo_now = DCP_MERGE_ALLTOALL;
    assert_int_equal(ranks_threads(1, 20.0, far_apart, map), 0);
    (void)munmap(map, n_bytes);
}

/* The payload of an empty row may be unmapped. */
static int unmapped(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 1) { /* this rank saw nothing at all */
        for (int i = 0; i < SIMPLE_ROWS; i++) s->lse[i] = -INFINITY;
        s->args.out = mmap(NULL, sizeof(s->out), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    EXPECT(simple_run(s) == DCP_OK && NEAR(s->merged[0], 2.0, 1e-6));
    if (s->rank == 1) (void)munmap((void *)(uintptr_t)s->args.out, sizeof(s->out));
    simple_free(s);
    return 0;
}
TEST_ON_3(unmapped)

/* Run allocates nothing: the counted allocator stands still (one process, all ranks). */
static int counts_allocs(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    s->desc.cut = DCP_CUT_NONE;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(dcp_group_barrier(g) == DCP_OK);
    const size_t before = dcp__alloc_calls();
    for (int i = 0; i < 20; i++) EXPECT(simple_run(s) == DCP_OK);
    EXPECT(dcp__alloc_calls() == before);
    EXPECT(dcp_group_barrier(g) == DCP_OK);
    simple_free(s);
    return 0;
}
TEST_ON_3(counts_allocs)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_len_beats_lse),
        cmocka_unit_test(test_empties),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_padded_heads),
        cmocka_unit_test(test_transposed_lse),
        cmocka_unit_test(test_sink_once),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_one_refuses),
        cmocka_unit_test(test_desc_mismatch),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_interleaved),
        cmocka_unit_test(test_stale_workspace),
        cmocka_unit_test(test_scribble),
        cmocka_unit_test(test_narrow_wire),
        cmocka_unit_test(test_crossed_merges),
        cmocka_unit_test(test_other_sink),
        cmocka_unit_test(test_sizes_of_workspace),
        cmocka_unit_test(test_baseline),
        cmocka_unit_test(test_offsets),
        cmocka_unit_test(test_unmapped),
        cmocka_unit_test(test_counts_allocs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
