/* SPDX-License-Identifier: Apache-2.0 */
/* Threads of a pool bound to CPUs: what sched_getaffinity says inside each of them. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/pool_priv.h"
#include "dcpattn/pool.h"

enum { MAX_N = 8 };
static int allowed[1024], n_allowed;

struct look {
    atomic_int arrived, late;
    int n_threads;
    cpu_set_t set[MAX_N]; /* by thread */
};

/* An item waits for the others, so that every thread takes one. */
static void look_item(void *ctx, int64_t item, int thread)
{
    (void)item;
    struct look *const l = ctx;
    (void)sched_getaffinity(0, sizeof(l->set[thread]), &l->set[thread]);
    atomic_fetch_add(&l->arrived, 1);
    for (int i = 0; atomic_load(&l->arrived) < l->n_threads; i++) {
        const struct timespec pause = {0, 1000000};
        if (i > 20000) {
            atomic_store(&l->late, 1);
            return;
        }
        nanosleep(&pause, NULL);
    }
}

static void look_at(dcp_pool *pool, int n_threads, struct look *l)
{
    memset(l, 0, sizeof(*l));
    l->n_threads = n_threads;
    dcp__pool_run(pool, n_threads, look_item, l);
    assert_int_equal(atomic_load(&l->late), 0);
}

static int enough_cpus(int n)
{
    if (n_allowed >= n) return 1;
    print_message("skipped: %d CPUs, %d needed\n", n_allowed, n);
    return 0;
}

static void test_one_each(void **state)
{
    (void)state;
    if (!enough_cpus(2)) skip();
    for (int n = 1; n <= MAX_N && n <= n_allowed; n++) {
        dcp_pool *pool = NULL;
        struct look l;
        int cpus[MAX_N];
        assert_int_equal(dcp_pool_create(n, 1, &pool), DCP_OK);
        for (int turn = 0; turn < 2; turn++) { /* bound again elsewhere */
            for (int i = 0; i < n; i++) cpus[i] = allowed[(i + turn) % n_allowed];
            assert_int_equal(dcp_pool_bind(pool, cpus, n), DCP_OK);
            look_at(pool, n, &l);
            for (int i = 0; i < n; i++) {
                assert_int_equal(CPU_COUNT(&l.set[i]), 1);
                assert_true(CPU_ISSET((size_t)cpus[i], &l.set[i]));
            }
        }
        dcp_pool_destroy(pool);
    }
}

static void test_a_set(void **state)
{
    (void)state;
    if (!enough_cpus(2)) skip();
    dcp_pool *pool = NULL;
    struct look l;
    assert_int_equal(dcp_pool_create(1, 1, &pool), DCP_OK);
    assert_int_equal(dcp_pool_bind(pool, allowed, 2), DCP_OK);
    look_at(pool, 1, &l);
    assert_int_equal(CPU_COUNT(&l.set[0]), 2);
    for (int i = 0; i < 2; i++) assert_true(CPU_ISSET((size_t)allowed[i], &l.set[0]));
    dcp_pool_destroy(pool);
}

static void test_refusals(void **state)
{
    (void)state;
    dcp_pool *pool = NULL;
    struct look before, after;
    assert_int_equal(dcp_pool_create(2, 1, &pool), DCP_OK);
    look_at(pool, 2, &before);
    const int once[1] = {allowed[0]}, twice[2] = {allowed[0], allowed[0]};
    const int negative[2] = {allowed[0], -1}, large[2] = {allowed[0], 65536};
    assert_int_equal(dcp_pool_bind(NULL, twice, 2), DCP_ERR_ARG);
    assert_int_equal(dcp_pool_bind(pool, NULL, 2), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "cpus is NULL"));
    assert_int_equal(dcp_pool_bind(pool, once, 1), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "1 CPUs for 2 threads"));
    assert_int_equal(dcp_pool_bind(pool, twice, 2), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "cpus[0] and cpus[1] are both"));
    assert_int_equal(dcp_pool_bind(pool, negative, 2), DCP_ERR_ARG);
    assert_int_equal(dcp_pool_bind(pool, large, 2), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "cpus[1] is 65536, must be 0 to 65535"));
    look_at(pool, 2, &after);
    for (int i = 0; i < 2; i++) assert_true(CPU_EQUAL(&before.set[i], &after.set[i]));
    /* A CPU that is not there. */
    const int absent[2] = {65534, 65535};
    assert_int_equal(dcp_pool_bind(pool, absent, 2), DCP_ERR_SYS);
    assert_non_null(strstr(dcp_last_error(), "thread 0 of 2 cannot be bound to CPU 65534"));
    dcp_pool_destroy(pool);
}

int main(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        for (int i = 0; i < CPU_SETSIZE; i++)
            if (CPU_ISSET((size_t)i, &set)) allowed[n_allowed++] = i;
    if (n_allowed == 0) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_one_each),
        cmocka_unit_test(test_a_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
