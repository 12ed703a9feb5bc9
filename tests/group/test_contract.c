/* SPDX-License-Identifier: Apache-2.0 */
/* The contract on self, threads and shm for even, odd and many ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "group/contract.h"
#include "group/group_module_priv.h"
#include "group/ranks.h"

static const int sizes[] = {1, 2, 3, 4, 5, 7, 8};
enum { N_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static int run_contract(dcp_group *g, void *ctx)
{
    (void)ctx;
    return contract_run(g);
}

static void test_self(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    dcp_group *g = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    assert_int_equal(dcp_group_size(g), 1);
    assert_int_equal(dcp_group_rank(g), 0);
    assert_string_equal(dcp_group_kind(g), "self");
    assert_true(dcp_group_deadline(g) == 30);
    assert_int_equal(contract_run(g), 0);
    void *left_over = NULL;
    assert_int_equal(dcp_group_alloc(g, 100, &left_over), DCP_OK);
    dcp_group_destroy(g);
    assert_int_equal(dcp__alloc_current(), before);
}

static void test_threads(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    for (int i = 0; i < N_SIZES; i++) {
        assert_int_equal(ranks_threads(sizes[i], 30, run_contract, NULL), 0);
        assert_int_equal(dcp__alloc_current(), before);
    }
}

static void test_shm(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    for (int i = 0; i < N_SIZES; i++) {
        assert_int_equal(ranks_shm(sizes[i], 30, run_contract, NULL), 0);
        assert_int_equal(dcp__alloc_current(), before);
    }
}

/* Memory hidden as between hosts, also where they do not fill. */
static int run_on_hosts(dcp_group *g, void *ctx)
{
    const int want = (dcp_group_size(g) + ranks_per_host - 1) / ranks_per_host;
    int n_failed = contract_run(g) + (ctx != NULL);
    CONTRACT_TRUE(dcp_group_n_hosts(g) == want);
    return n_failed;
}

static void test_hosts(void **state)
{
    (void)state;
    static const int cases[][2] = {{4, 2}, {5, 2}, {3, 1}, {2, 7}};
    const size_t before = dcp__alloc_current();
    for (int i = 0; i < 4; i++) {
        ranks_per_host = cases[i][1];
        assert_int_equal(ranks_threads(cases[i][0], 30, run_on_hosts, NULL), 0);
        assert_int_equal(ranks_shm(cases[i][0], 30, run_on_hosts, NULL), 0);
    }
    assert_int_equal(dcp__alloc_current(), before);
    ranks_per_host = 0;
}

/* Create and destroy, with an allocation that nobody frees. */
static int leave_alloc(dcp_group *g, void *ctx)
{
    (void)ctx;
    void *ptr;
    int rc = dcp_group_alloc(g, 1000, &ptr) == DCP_OK ? 0 : 1;
    if (dcp_group_barrier(g) != DCP_OK) rc = 1;
    return rc;
}

static void test_no_leak(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    for (int k = 0; k < 20; k++) {
        assert_int_equal(ranks_threads(3, 30, leave_alloc, NULL), 0);
        assert_int_equal(ranks_shm(2, 30, leave_alloc, NULL), 0);
    }
    assert_int_equal(dcp__alloc_current(), before);
}

static void test_arguments(void **state)
{
    (void)state;
    dcp_group *g = NULL;
    dcp_shm *shm = NULL;
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    assert_int_equal(dcp_group_create_threads(0, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_shm_prepare(-1, NULL, &shm), DCP_ERR_ARG);
    opts.deadline_s = -1;
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_ERR_ARG);
    opts.deadline_s = 1.0 / 0.0;
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_ERR_ARG);
    assert_null(g);
    opts.deadline_s = 2.5;
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_OK);
    assert_true(dcp_group_deadline(g) == 2.5);
    dcp_group_destroy(g);
    dcp_group_destroy(NULL);
    opts.ranks_per_host = -1;
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_ERR_ARG);
    opts.ranks_per_host = 0;
    opts.reserved = 1;
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_ERR_ARG);
    opts.struct_size = 16; /* a caller of the first version ends here */
    assert_int_equal(dcp_group_create_self(&opts, &g), DCP_OK);
    dcp_group_destroy(g);
    setenv("DCP_ATTN_RANKS_PER_HOST", "2x", 1);
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "DCP_ATTN_RANKS_PER_HOST is \"2x\""));
    unsetenv("DCP_ATTN_RANKS_PER_HOST");
    assert_int_equal(dcp_shm_prepare(2, NULL, &shm), DCP_OK);
    assert_int_equal(dcp_shm_attach(shm, 2, &g), DCP_ERR_ARG);
    dcp_shm_release(shm);
    dcp_shm_release(NULL);
    assert_int_equal(dcp_group_barrier(NULL), DCP_ERR_ARG);
}

/* A transport of another build would read structures at wrong places: it is told so. */
/* Of more late ranks than the text has room for it says how many are not named. */
static void test_many_late(void **state)
{
    (void)state;
    enum { N = 40 };
    dcp_group *groups[N];
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 0.2;
    assert_int_equal(dcp_group_create_threads(N, &opts, groups), DCP_OK);
    assert_int_equal(dcp_group_barrier(groups[0]), DCP_ERR_TIMEOUT);
    const char *const text = dcp_last_error(), *at = text;
    int n_named = 0, n_more = 0;
    for (int r = 1; r < N; r++) {
        char name[24];
        snprintf(name, sizeof(name), " rank %d (is", r);
        at = strstr(text, name);
        n_named += at != NULL;
    }
    at = strstr(text, " and ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, " and %d more", &n_more), 1);
    assert_int_equal(n_named + n_more, N - 1);
    for (int r = 0; r < N; r++) dcp_group_destroy(groups[r]);
}

static void test_module_of_another_build(void **state)
{
    (void)state;
    const struct dcp__group_module *own = dcp__group_module();
    assert_null(dcp__module_misfit(own));
    struct dcp__group_module other = *own;
    other.struct_size += 8;
    assert_non_null(strstr(dcp__module_misfit(&other), "table"));
    other = *own;
    other.version = "0.0.0-other";
    assert_non_null(strstr(dcp__module_misfit(&other), "version"));
    other = *own;
    other.layout++;
    assert_non_null(strstr(dcp__module_misfit(&other), "layout"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_module_of_another_build),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_many_late),
        cmocka_unit_test(test_self),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_shm),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
