/* SPDX-License-Identifier: Apache-2.0 */
/* Sub-groups keep the whole contract, on every kind; failures stay in the group that has them, but
 * a dead rank is found in each that it is in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "group/awake.h"
#include "group/contract.h"
#include "group/ranks.h"

#define WANT(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: rank %d: not true: %s [%s]\n", __FILE__, __LINE__,             \
                    dcp_group_rank(g), #cond, dcp_last_error());                                   \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

typedef int run_fn(int n, double deadline_s, rank_fn *fn, void *ctx);
static run_fn *const runs[] = {ranks_threads, ranks_shm};

/* Tensor-parallel x DCP: both ways through the ranks, then again inside a part. */
static int both_ways(dcp_group *g, void *ctx)
{
    const int tp = *(const int *)ctx, n = dcp_group_size(g), rank = dcp_group_rank(g);
    dcp_group *across = NULL, *along = NULL, *again = NULL;
    WANT(dcp_group_split(g, rank % tp, rank, &across) == DCP_OK);
    WANT(dcp_group_split(g, rank / tp, -rank, &along) == DCP_OK);
    WANT(across != NULL && along != NULL);
    WANT(dcp_group_size(across) == n / tp + (rank % tp < n % tp));
    WANT(dcp_group_rank(across) == rank / tp);
    const int n_along = n - rank / tp * tp < tp ? n - rank / tp * tp : tp;
    WANT(dcp_group_size(along) == n_along);
    WANT(dcp_group_rank(along) == n_along - 1 - rank % tp); /* keys turn the order */
    WANT(strcmp(dcp_group_kind(along), dcp_group_kind(g)) == 0);
    WANT(dcp_group_deadline(along) == dcp_group_deadline(g));
    int n_failed = contract_run_beside(across) + contract_run_beside(along);
    /* equal keys: by rank; the first stays out */
    WANT(dcp_group_split(across, dcp_group_rank(across) == 0 ? -5 : 3, 7, &again) == DCP_OK);
    WANT((again == NULL) == (dcp_group_rank(across) == 0));
    if (again != NULL) {
        WANT(dcp_group_rank(again) == dcp_group_rank(across) - 1);
        n_failed += contract_run_beside(again);
    }
    WANT(dcp_group_barrier(g) == DCP_OK);
    dcp_group_destroy(rank % 2 ? across
                               : along); /* in any order, the rest after the parent's use */
    n_failed += contract_records(g);
    dcp_group_destroy(rank % 2 ? along : across);
    dcp_group_destroy(again);
    return n_failed;
}

static void test_both_ways(void **state)
{
    (void)state;
    static const int cases[][2] = {{5, 2}, {6, 3}, {1, 1}, {3, 3}};
    const size_t before = dcp__alloc_current();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int tp = cases[i][1];
        for (int k = 0; k < 2; k++) {
            assert_int_equal(runs[k](cases[i][0], 30, both_ways, &tp), 0);
            assert_int_equal(dcp__alloc_current(), before);
        }
    }
    ranks_per_host = 2;
    int tp = 2;
    for (int k = 0; k < 2; k++) assert_int_equal(runs[k](5, 30, both_ways, &tp), 0);
    ranks_per_host = 0;
}

/* The hosts of a sub-group are those of its parent. */
static int by_hosts(dcp_group *g, void *ctx)
{
    (void)ctx;
    const int rank = dcp_group_rank(g);
    dcp_group *inside = NULL, *leaders = NULL;
    WANT(dcp_group_n_hosts(g) == 3);
    WANT(dcp_group_split(g, dcp_group_host(g, rank), rank, &inside) == DCP_OK);
    WANT(dcp_group_n_hosts(inside) == 1 && dcp__group_all_see(inside));
    WANT(dcp_group_size(inside) == (rank < 4 ? 2 : 1));
    WANT(dcp_group_split(g, rank % 2 == 0 ? 0 : -1, rank, &leaders) == DCP_OK);
    if (rank % 2 == 0) {
        WANT(dcp_group_n_hosts(leaders) == 3 && dcp_group_size(leaders) == 3);
        WANT(!dcp__group_sees(leaders, (dcp_group_rank(leaders) + 1) % 3));
    } else {
        WANT(leaders == NULL);
    }
    dcp_group_destroy(inside);
    dcp_group_destroy(leaders);
    return 0;
}

static void test_by_hosts(void **state)
{
    (void)state;
    ranks_per_host = 2;
    for (int k = 0; k < 2; k++) assert_int_equal(runs[k](5, 30, by_hosts, NULL), 0);
    ranks_per_host = 0;
}

static int bad_arguments(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_group *sub = NULL;
    WANT(dcp_group_split(NULL, 0, 0, &sub) == DCP_ERR_ARG);
    WANT(dcp_group_split(g, 0, 0, NULL) == DCP_ERR_ARG);
    /* a rank without memory: all fail, the group goes on */
    if (dcp_group_rank(g) == 1) dcp__alloc_set_limit(dcp__alloc_current() + 10);
    WANT(dcp_group_split(g, 0, 0, &sub) == DCP_ERR_NOMEM && sub == NULL);
    dcp__alloc_set_limit(0);
    WANT(dcp_group_split(g, dcp_group_rank(g) % 2, 0, &sub) == DCP_OK);
    WANT(dcp_group_barrier(sub) == DCP_OK);
    dcp_group_destroy(sub);
    return 0;
}

static void test_arguments(void **state)
{
    (void)state;
    assert_int_equal(ranks_shm(3, 10, bad_arguments, NULL), 0);
}

/* A failure in one group: the other goes on. */
static int apart(dcp_group *g, void *ctx)
{
    (void)ctx;
    const int rank = dcp_group_rank(g);
    dcp_group *sub = NULL;
    WANT(dcp_group_split(g, rank / 2, rank, &sub) == DCP_OK);
    if (rank == 1) dcp_group_abort(sub, "out of ink");
    if (rank == 0) {
        WANT(dcp_group_barrier(sub) == DCP_ERR_PEER);
        WANT(strstr(dcp_last_error(), "out of ink") != NULL);
    }
    if (rank > 1) WANT(dcp_group_barrier(sub) == DCP_OK);
    WANT(dcp_group_barrier(g) == DCP_OK);
    if (rank == 2) dcp_group_abort(g, "paper jam");
    WANT(dcp_group_barrier(g) != DCP_OK);
    if (rank > 1) WANT(dcp_group_barrier(sub) == DCP_OK);
    dcp_group_destroy(sub);
    return 0;
}

static void test_apart(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) assert_int_equal(runs[k](4, 5, apart, NULL), 0);
}

/* Rank 3 of the parent dies outside any call; both groups learn how. Its other group is whole. */
static int death(dcp_group *g, void *ctx)
{
    (void)ctx;
    const int rank = dcp_group_rank(g);
    dcp_group *sub = NULL, *deep = NULL;
    WANT(dcp_group_split(g, rank % 2, rank, &sub) == DCP_OK);
    WANT(dcp_group_split(sub, 0, -rank, &deep) == DCP_OK); /* turned: rank 3 is its rank 0 */
    if (rank == 3) raise(SIGKILL);
    if (rank == 1) {
        WANT(dcp_group_barrier(deep) == DCP_ERR_PEER);
        WANT(strstr(dcp_last_error(), "rank 0 (pid ") != NULL);
        WANT(strstr(dcp_last_error(), "SIGKILL") != NULL);
        WANT(dcp_group_barrier(sub) == DCP_ERR_PEER);
        WANT(strstr(dcp_last_error(), "rank 1 (pid ") != NULL);
        WANT(dcp_group_barrier(sub) == DCP_ERR_POISONED);
    } else {
        WANT(dcp_group_barrier(sub) == DCP_OK);
    }
    WANT(dcp_group_barrier(g) == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 3 (pid ") != NULL);
    dcp_group_destroy(deep);
    dcp_group_destroy(sub);
    return 0;
}

static void test_death(void **state)
{
    (void)state;
    const double start = awake_s();
    assert_int_equal(ranks_shm(4, 20, death, NULL), 0);
    assert_true(awake_s() - start < 10);
}

/* A rank that does not come to the split, and one that is killed in it. */
static int killed_in_split(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_group *sub = NULL;
    WANT(dcp_group_split(g, 0, 0, &sub) == DCP_ERR_PEER && sub == NULL);
    WANT(strstr(dcp_last_error(), "rank 1 (pid ") != NULL);
    WANT(strstr(dcp_last_error(), "in split") != NULL);
    WANT(dcp_group_split(g, 0, 0, &sub) == DCP_ERR_POISONED);
    return 0;
}

static int late_for_split(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_group *sub = NULL;
    WANT(dcp_group_split(g, 0, 0, &sub) == DCP_ERR_TIMEOUT && sub == NULL);
    WANT(strstr(dcp_last_error(), "did not arrive: rank 2") != NULL);
    return 0;
}

static void test_faults(void **state)
{
    (void)state;
    setenv("DCP_ATTN_FAULT", "kill:split:1", 1);
    assert_int_equal(ranks_shm(3, 10, killed_in_split, NULL), 0);
    setenv("DCP_ATTN_FAULT", "delay:split:2", 1);
    assert_int_equal(ranks_threads(3, 1, late_for_split, NULL), 0);
    setenv("DCP_ATTN_FAULT", "delay:split:2:1", 1);
    assert_int_equal(ranks_shm(3, 1, late_for_split, NULL), 0);
    unsetenv("DCP_ATTN_FAULT");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ways), cmocka_unit_test(test_by_hosts),
        cmocka_unit_test(test_arguments), cmocka_unit_test(test_apart),
        cmocka_unit_test(test_death),     cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
