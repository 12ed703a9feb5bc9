/* SPDX-License-Identifier: Apache-2.0 */
/* start, test, wait: the bits of run, progress by tests alone, one merge in flight a group, errors
 * on every rank, and peers that die or never come. (Random cases run in this form too:
 * test_merge_property.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_simple.h"

static dcp_merge_algo algo_now;

static int on_all(ranks_fn *fn, int n, double deadline_s)
{
    int n_failed = 0;
    for (int algo = DCP_MERGE_DIRECT; algo <= DCP_MERGE_ALLREDUCE_TEMP; algo++) {
        algo_now = (dcp_merge_algo)algo;
        n_failed += ranks_threads(n, deadline_s, fn, NULL);
    }
    return n_failed;
}

static dcp_status test_to_end(struct simple *s, int *n_tests)
{
    int is_done = 0;
    dcp_status st = DCP_OK;
    while (is_done == 0) {
        st = dcp_merge_test(s->merge, &is_done, &s->stats);
        (*n_tests)++;
    }
    return st;
}

static int forms_agree(dcp_group *g, void *user)
{
    (void)user;
    for (int cut = DCP_CUT_HEADS; cut <= DCP_CUT_NONE; cut++) {
        struct simple *s = simple_new(g, algo_now);
        static _Thread_local float first[SIMPLE_ELEMS];
        s->desc.cut = (dcp_cut)cut;
        s->desc.workspace_limit_bytes = 20000;
        EXPECT(simple_create(s) == DCP_OK);
        for (int form = 0; form < 3; form++) {
            for (int i = 0; i < SIMPLE_ELEMS; i++)
                s->out[i] = 0.01f * (float)((i * 7 + s->rank * 13) % 100);
            for (int i = 0; i < SIMPLE_ROWS; i++) s->lse[i] = 0.1f * (float)(i * (s->rank + 1) % 9);
            memset(s->merged, 0, sizeof(s->merged));
            int n_tests = 0;
            if (form == 0) {
                EXPECT(simple_run(s) == DCP_OK);
                memcpy(first, s->merged, sizeof(first));
                continue;
            }
            EXPECT(dcp_group_barrier(g) == DCP_OK);
            const size_t n_allocs = dcp__alloc_calls();
            EXPECT(dcp_group_barrier(g) == DCP_OK);
            EXPECT(dcp_merge_start(s->merge, &s->args) == DCP_OK);
            if (form == 1) EXPECT(dcp_merge_wait(s->merge, &s->stats) == DCP_OK);
            if (form == 2) EXPECT(test_to_end(s, &n_tests) == DCP_OK && n_tests > 2);
            EXPECT(dcp__alloc_calls() == n_allocs);
            EXPECT(algo_now >= DCP_MERGE_ALLREDUCE || memcmp(first, s->merged, sizeof(first)) == 0);
            EXPECT(dcp_group_barrier(g) == DCP_OK);
        }
        simple_free(s);
    }
    return 0;
}
static void test_forms_agree(void **state)
{
    (void)state;
    assert_int_equal(on_all(forms_agree, 3, 20.0), 0);
    assert_int_equal(on_all(forms_agree, 1, 20.0), 0);
}

/* A second merge is refused while one is in flight, whatever its form, and then goes. */
static int one_in_flight(dcp_group *g, void *user)
{
    (void)user;
    struct simple *a = simple_new(g, algo_now);
    struct simple *b = simple_new(g, algo_now);
    EXPECT(simple_create(a) == DCP_OK && simple_create(b) == DCP_OK);
    EXPECT(dcp_merge_wait(a->merge, NULL) == DCP_ERR_ARG);
    EXPECT(dcp_merge_start(a->merge, &a->args) == DCP_OK);
    EXPECT(dcp_merge_start(b->merge, &b->args) == DCP_ERR_BUSY);
    EXPECT(strstr(dcp_last_error(), "in flight") != NULL);
    EXPECT(simple_run(b) == DCP_ERR_BUSY && simple_run(a) == DCP_ERR_BUSY);
    EXPECT(dcp_merge_start(a->merge, &a->args) == DCP_ERR_BUSY);
    EXPECT(dcp_merge_wait(a->merge, &a->stats) == DCP_OK && NEAR(a->merged[0], 2.0, 1e-6));
    EXPECT(simple_run(b) == DCP_OK && NEAR(b->merged[0], 2.0, 1e-6));
    EXPECT(dcp_merge_start(b->merge, &b->args) == DCP_OK);
    EXPECT(dcp_merge_wait(b->merge, NULL) == DCP_OK);
    simple_free(b);
    simple_free(a);
    return 0;
}
static void test_one_in_flight(void **state)
{
    (void)state;
    assert_int_equal(on_all(one_in_flight, 3, 20.0), 0);
}

/* Refusals come out of wait, on every rank, and the group goes on. */
static int errors_come_out(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 1) s->args.out = NULL;
    EXPECT(dcp_merge_start(s->merge, &s->args) == DCP_OK);
    EXPECT(dcp_merge_wait(s->merge, NULL) == DCP_ERR_ARG);
    EXPECT(strstr(dcp_last_error(), "out is NULL") != NULL);
    s->args.out = s->out;
    s->args.n_tokens = s->rank == 2 ? 1 : 2;
    EXPECT(dcp_merge_start(s->merge, &s->args) == DCP_OK);
    int n_tests = 0;
    EXPECT(test_to_end(s, &n_tests) == DCP_ERR_MISMATCH);
    s->args.n_tokens = SIMPLE_T;
    EXPECT(dcp_merge_start(s->merge, &s->args) == DCP_OK);
    EXPECT(dcp_merge_wait(s->merge, NULL) == DCP_OK && NEAR(s->merged[0], 2.0, 1e-6));
    simple_free(s);
    return 0;
}
static void test_errors_come_out(void **state)
{
    (void)state;
    assert_int_equal(on_all(errors_come_out, 3, 20.0), 0);
}

/* A peer that never starts: tests end with an error of the deadline, not never. */
static int never_comes(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 1) {
        usleep(1500000);
        simple_free(s); /* does not wait: the group is poisoned by now */
        return 0;
    }
    EXPECT(dcp_merge_start(s->merge, &s->args) == DCP_OK);
    int is_done = 0;
    dcp_status st = DCP_OK;
    struct timespec from;
    struct timespec to;
    (void)clock_gettime(CLOCK_MONOTONIC, &from);
    while (is_done == 0) {
        st = dcp_merge_test(s->merge, &is_done, NULL);
        usleep(1000);
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &to);
    EXPECT((st == DCP_ERR_TIMEOUT || st == DCP_ERR_PEER) &&
           strstr(dcp_last_error(), "rank 1") != NULL);
    EXPECT(to.tv_sec - from.tv_sec < 4);
    EXPECT(simple_run(s) == DCP_ERR_POISONED);
    simple_free(s);
    return 0;
}
static void test_never_comes(void **state)
{
    (void)state;
    algo_now = DCP_MERGE_ALLTOALL;
    assert_int_equal(ranks_threads(3, 0.5, never_comes, NULL), 0);
}

/* Destroyed in flight: the group says so, and nobody waits for ever. Peers may still be reading
 * what was lent to them, so all of it lives until every rank is done. */
static struct simple *lent[3];

static int dropped(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, algo_now);
    EXPECT(simple_create(s) == DCP_OK);
    dcp_status st = dcp_merge_start(s->merge, &s->args);
    if (s->rank == 1) {
        EXPECT(st == DCP_OK);
        dcp_merge_destroy(s->merge);
        s->merge = NULL;
        lent[s->rank] = s;
        return 0;
    }
    /* The peer may have given up before this rank has started. */
    if (st == DCP_OK) st = dcp_merge_wait(s->merge, NULL);
    EXPECT(st == DCP_ERR_PEER && strstr(dcp_last_error(), "destroyed in flight") != NULL);
    dcp_merge_destroy(s->merge);
    s->merge = NULL;
    lent[s->rank] = s;
    return 0;
}
static void test_dropped(void **state)
{
    (void)state;
    algo_now = DCP_MERGE_DIRECT;
    assert_int_equal(ranks_threads(3, 5.0, dropped, NULL), 0);
    for (int r = 0; r < 3; r++) simple_free(lent[r]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms_agree),     cmocka_unit_test(test_one_in_flight),
        cmocka_unit_test(test_errors_come_out), cmocka_unit_test(test_never_comes),
        cmocka_unit_test(test_dropped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
