/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank refuses all refuse, and limits that no rank may pass. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "merge/merge_simple.h"

static dcp_merge_algo algo_now;

/* A result in another process's part of group memory: it could be its partial. */
static int result_at_peer(dcp_group *g, void *user)
{
    (void)user;
    enum { PAGE = 4096, N_BYTES = SIMPLE_ELEMS * 4 };
    struct simple *s = simple_new(g, algo_now);
    char *own = NULL;
    void *p = NULL;
    EXPECT(dcp_group_alloc(g, N_BYTES, &p) == DCP_OK);
    own = p;
    memcpy(own, s->out, N_BYTES);
    s->args.out = (float *)p;
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    const size_t stride = (N_BYTES + PAGE - 1) / PAGE * PAGE; /* parts lie side by side */
    for (int k = 0; k < 2; k++) {
        if (s->rank == 0 && k == 0) s->args.merged = own + stride;
        if (s->rank == 0 && k == 1) s->args.merged_lse = (float *)(void *)(own + stride);
        EXPECT(simple_run(s) == DCP_ERR_ARG);
        EXPECT(strstr(dcp_last_error(), "the group memory of rank 1") != NULL);
        for (int i = 0; i < SIMPLE_ELEMS; i++) EXPECT(((float *)p)[i] == (float)(s->rank + 1));
        s->args.merged = s->merged;
        s->args.merged_lse = s->merged_lse;
        EXPECT(dcp_group_barrier(g) == DCP_OK);
    }
    EXPECT(simple_run(s) == DCP_OK);
    dcp_merge_destroy(s->merge);
    s->merge = NULL;
    dcp_group_free(g, p);
    simple_free(s);
    return 0;
}
static void test_result_at_peer(void **state)
{
    (void)state;
    for (algo_now = DCP_MERGE_DIRECT; algo_now <= DCP_MERGE_ALLTOALL; algo_now++)
        assert_int_equal(ranks_shm(3, 20.0, result_at_peer, NULL), 0);
}

/* A rank without a place for the merge says so to all. */
static int no_place(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(dcp_merge_create(g, &s->desc, s->rank == 2 ? NULL : &s->merge) == DCP_ERR_ARG);
    EXPECT(s->merge == NULL && strstr(dcp_last_error(), "merge_out is NULL") != NULL);
    EXPECT(s->rank == 2 || strstr(dcp_last_error(), "rank 2") != NULL);
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    simple_free(s);
    return 0;
}

static void test_no_place(void **state)
{
    (void)state;
    for (algo_now = DCP_MERGE_DIRECT; algo_now <= DCP_MERGE_ALLTOALL; algo_now++) {
        assert_int_equal(ranks_threads(3, 5.0, no_place, NULL), 0);
        assert_int_equal(ranks_shm(3, 5.0, no_place, NULL), 0);
    }
}

/* Every field that must be the same, rank 1 with each other value: the text names both as a caller
 * knows them. */
#define FIELD(name) #name, offsetof(dcp_merge_desc, name), sizeof(((dcp_merge_desc *)0)->name)
static const struct field {
    const char *name;
    size_t offset, n_bytes;
    int first; /* value, of the texts */
    const char *texts[8];
} fields[] = {
    {FIELD(max_tokens), SIMPLE_T, {"5", "6"}},
    {FIELD(n_heads), SIMPLE_H, {"6", "7"}},
    {FIELD(dim), SIMPLE_D, {"33", "34"}},
    {FIELD(lse_base), DCP_LSE_BASE_E, {"base e", "base 2"}},
    {FIELD(cut), DCP_CUT_HEADS, {"heads", "tokens", "none"}},
    {FIELD(out_type), DCP_F32, {"f32", "f16", "bf16"}},
    {FIELD(lse_type), DCP_F32, {"f32", "f16", "bf16"}},
    {FIELD(merged_type), DCP_F32, {"f32", "f16", "bf16"}},
    {FIELD(wire_type), DCP_F32, {"f32", "f16", "bf16"}},
    {FIELD(nonfinite), DCP_NONFINITE_ZERO, {"zero", "propagate", "error"}},
    {FIELD(has_sink), 0, {"no", "yes"}},
    {FIELD(has_kv_len), 0, {"no", "yes"}},
    {FIELD(lse_form), DCP_LSE_FORM_LSE, {"lse", "max-sum"}},
    {FIELD(order), DCP_MERGE_ORDER_DEFAULT, {"auto", "rank", "any"}},
    {FIELD(algo),
     DCP_MERGE_AUTO,
     {"auto", "direct", "alltoall", "halving", "hierarchical", "allreduce", "allreduce-temp"}},
};
static void set_field(dcp_merge_desc *d, const struct field *f, int value)
{
    const int64_t wide = value;
    memcpy((char *)d + f->offset, f->n_bytes == 8 ? (const void *)&wide : &value, f->n_bytes);
}
/* What a rank that has such a description says to it alone, in a group of two hosts or one. */
static dcp_status own_refusal(const dcp_merge_desc *d)
{
    const bool keeps_order = d->algo <= DCP_MERGE_ALLTOALL;
    if (d->algo == DCP_MERGE_DIRECT && ranks_per_host > 0) return DCP_ERR_NOT_SUPPORTED;
    return d->order == DCP_MERGE_ORDER_RANK && !keeps_order ? DCP_ERR_ARG : DCP_OK;
}
static int disagree_on(dcp_group *g, const struct field *f, int a, int b)
{
    char want[128];
    struct simple *s = simple_new(g, algo_now);
    dcp_merge_desc other = s->desc; /* of rank 1 */
    set_field(&s->desc, f, f->first + a);
    set_field(&other, f, f->first + b);
    const dcp_status of_a = own_refusal(&s->desc), of_b = own_refusal(&other);
    if (s->rank == 1) s->desc = other;
    if (of_a == DCP_OK && of_b == DCP_OK) {
        snprintf(want, sizeof(want), "disagree on %s: rank 0 has %s, rank 1 has %s (seen", f->name,
                 f->texts[a], f->texts[b]);
        EXPECT(simple_create(s) == DCP_ERR_MISMATCH);
        EXPECT(strstr(dcp_last_error(), want) != NULL);
    } else {
        EXPECT(of_a == DCP_OK || of_b == DCP_OK);   /* as the fields are */
        const int refuser = of_a != DCP_OK ? 0 : 1; /* the first, and who has the same */
        const bool refuses = (s->rank == 1) == (refuser == 1);
        snprintf(want, sizeof(want), "rank %d refused", refuser);
        EXPECT(simple_create(s) == (of_a != DCP_OK ? of_a : of_b));
        EXPECT(refuses || strstr(dcp_last_error(), want) != NULL);
    }
    EXPECT(s->merge == NULL);
    simple_free(s);
    return 0;
}
static int disagreement(dcp_group *g, void *user)
{
    (void)user;
    int n_failed = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]) && n_failed == 0; i++) {
        const struct field *const f = &fields[i];
        for (int a = 0; f->texts[a] != NULL && n_failed == 0; a++) {
            for (int b = 0; f->texts[b] != NULL && n_failed == 0; b++) {
                if (a != b) n_failed = disagree_on(g, f, a, b);
            }
        }
    }
    if (n_failed != 0) return n_failed;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK && simple_run(s) == DCP_OK);
    EXPECT(NEAR(s->merged[0], 2.0, 1e-6));
    simple_free(s);
    return 0;
}
/* Every algorithm among threads; over processes and hosts one that sends, one that goes by levels,
 * one that tells hosts apart. */
static void test_disagreement(void **state)
{
    (void)state;
    for (algo_now = DCP_MERGE_AUTO; algo_now <= DCP_MERGE_ALLREDUCE_TEMP; algo_now++)
        assert_int_equal(ranks_threads(3, 20.0, disagreement, NULL), 0);
    algo_now = DCP_MERGE_ALLTOALL;
    assert_int_equal(ranks_shm(3, 20.0, disagreement, NULL), 0);
    ranks_per_host = 2;
    algo_now = DCP_MERGE_HIERARCHICAL;
    assert_int_equal(ranks_threads(3, 20.0, disagreement, NULL), 0);
    algo_now = DCP_MERGE_HALVING;
    assert_int_equal(ranks_shm(3, 20.0, disagreement, NULL), 0);
    ranks_per_host = 0;
}

/* Calls of different T, run or started and tested: each rank is told both. Afterwards a call of
 * one T gives what it should. */
static dcp_status start_and_test(struct simple *s)
{
    int is_done = 0;
    dcp_status st = dcp_merge_start(s->merge, &s->args);
    while (st == DCP_OK && is_done == 0) st = dcp_merge_test(s->merge, &is_done, &s->stats);
    return st;
}
static int tokens_differ(dcp_group *g, void *user)
{
    (void)user;
    static const struct {
        int of_others, of_one;
    } tokens[] = {{3, 4}, {4, 3}, {4, 5}, {5, 4}, {1, 5}, {5, 1}, {2, 1}, {0, 1}, {1, 0}};
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        for (int is_started = 0; is_started < 2; is_started++) {
            const int one = 1 + (int)(i % 2); /* the rank that differs */
            dcp_status (*const call)(struct simple *) = is_started ? start_and_test : simple_run;
            char want[128];
            snprintf(want, sizeof(want), "disagree on n_tokens: rank 0 has %d, rank %d has %d (",
                     tokens[i].of_others, one, tokens[i].of_one);
            s->args.n_tokens = s->rank == one ? tokens[i].of_one : tokens[i].of_others;
            EXPECT(call(s) == DCP_ERR_MISMATCH);
            EXPECT(strstr(dcp_last_error(), want) != NULL);
            for (int k = 0; k < SIMPLE_ELEMS; k++) EXPECT(s->out[k] == (float)(s->rank + 1));
        }
    }
    for (int is_started = 0; is_started < 2; is_started++) {
        for (int k = 0; k < SIMPLE_ELEMS; k++) s->out[k] = (float)(s->rank + 1);
        s->args.n_tokens = 4;
        EXPECT((is_started ? start_and_test : simple_run)(s) == DCP_OK);
        EXPECT(NEAR(simple_merged(s, 3, s->heads.begin)[7], 2.0, 1e-6));
    }
    simple_free(s);
    return 0;
}
static void test_tokens_differ(void **state)
{
    (void)state;
    for (algo_now = DCP_MERGE_AUTO; algo_now <= DCP_MERGE_ALLREDUCE_TEMP; algo_now++) {
        assert_int_equal(ranks_threads(3, 20.0, tokens_differ, NULL), 0);
        assert_int_equal(ranks_shm(3, 20.0, tokens_differ, NULL), 0);
        if (algo_now == DCP_MERGE_DIRECT) continue;
        ranks_per_host = 2;
        assert_int_equal(ranks_threads(3, 20.0, tokens_differ, NULL), 0);
        ranks_per_host = 0;
    }
}

/* A refusal whose text fills a record: all get it whole, without the place in the first rank's
 * source, which would be cut and tell the others nothing. */
static int long_text(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 1) s->args.merged = s->out + 1;
    EXPECT(simple_run(s) == DCP_ERR_ARG);
    const char *const text = dcp_last_error();
    const char *const place = strstr(text, " [src/merge/merge_agree.c:");
    EXPECT(place != NULL && strchr(text, '[') == place + 1); /* the one bracket, at the end */
    EXPECT(strstr(text, "by heads or tokens [") != NULL);
    EXPECT(s->rank == 1 || strstr(text, "rank 1 refused") != NULL);
    s->args.merged = s->merged;
    EXPECT(simple_run(s) == DCP_OK);
    simple_free(s);
    return 0;
}

static void test_long_text(void **state)
{
    (void)state;
    for (algo_now = DCP_MERGE_DIRECT; algo_now <= DCP_MERGE_ALLTOALL; algo_now++)
        assert_int_equal(ranks_shm(3, 20.0, long_text, NULL), 0);
}

/* Messages lie in the workspace: however large the limit, MPI can count their bytes. */
static void test_largest_workspace(void **state)
{
    (void)state;
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = 1 << 20;
    desc.n_heads = 96;
    desc.dim = 512;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.workspace_limit_bytes = (size_t)64 << 30;
    for (int algo = DCP_MERGE_DIRECT; algo <= DCP_MERGE_HIERARCHICAL; algo++) {
        desc.algo = (dcp_merge_algo)algo;
        dcp_merge_cost cost;
        assert_int_equal(dcp_merge_plan(&desc, 4, 0, 2, 1, &cost), DCP_OK);
        assert_true(cost.workspace_bytes <= INT32_MAX);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_result_at_peer), cmocka_unit_test(test_no_place),
        cmocka_unit_test(test_disagreement),   cmocka_unit_test(test_tokens_differ),
        cmocka_unit_test(test_long_text),      cmocka_unit_test(test_largest_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
