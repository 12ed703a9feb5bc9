/* SPDX-License-Identifier: Apache-2.0 */
/* Status texts, the counted allocator, the CPU's levels, the thread pool. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/fault_priv.h"
#include "base/pool_priv.h"

static void test_status(void **state)
{
    (void)state;
    assert_string_equal(dcp_status_text(DCP_OK), "success");
    assert_string_equal(dcp_status_text(DCP_ERR_BUSY), "object is in use by another call");
    assert_non_null(dcp_status_text((dcp_status)-999));
    assert_string_equal(dcp_version(), DCP_VERSION);
    assert_int_equal(dcp__fail(DCP_ERR_ARG, "x is %d", 7), DCP_ERR_ARG);
    assert_int_equal(strncmp(dcp_last_error(), "x is 7 [tests/unit/test_base.c:", 31), 0);
    /* an argument may be the last error itself */
    dcp__fail(DCP_ERR_ARG, "so: %s", dcp_last_error());
    assert_int_equal(strncmp(dcp_last_error(), "so: x is 7 [", 12), 0);
    char text[5000];
    memset(text, 'a', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    dcp__fail(DCP_ERR_ARG, "%s", text);
    assert_true(strlen(dcp_last_error()) < 2000);
    assert_non_null(strstr(dcp_last_error(), "test_base.c:")); /* the place survives a long text */
}

/* A text for a record: no place in the source, whole or cut behind a word. */
static void test_brief(void **state)
{
    (void)state;
    char to[24];
    dcp__fail(DCP_ERR_ARG, "x is 7");
    dcp__fail(DCP_ERR_ARG, "so: %s, no", dcp_last_error());
    dcp__brief(to, sizeof(to), dcp_last_error());
    assert_string_equal(to, "so: x is 7, no");
    dcp__brief(to, sizeof(to), "23 bytes fit with NUL..");
    assert_string_equal(to, "23 bytes fit with NUL..");
    dcp__brief(to, sizeof(to), "23 bytes fit with NUL.. [src/a/b.c:12]");
    assert_string_equal(to, "23 bytes fit with NUL..");
    dcp__brief(to, sizeof(to), "this one is longer than fits");
    assert_string_equal(to, "this one is longer...");
    dcp__brief(to, sizeof(to), "onewordthatislongerthanthebuffer");
    assert_string_equal(to, "onewordthatislongert...");
    dcp__brief(to, sizeof(to), "[1, 2] of x.c [no]");
    assert_string_equal(to, "[1, 2] of x.c [no]");
}

static void test_alloc(void **state)
{
    (void)state;
    static const size_t sizes[] = {
        0, 1, 63, 4096, ((size_t)2 << 20) - 1, (size_t)2 << 20, ((size_t)3 << 20) + 17};
    const size_t before = dcp__alloc_current();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        void *mem = NULL;
        assert_int_equal(dcp__alloc(sizes[i], "test", &mem), DCP_OK);
        assert_non_null(mem);
        assert_int_equal((uintptr_t)mem % (sizes[i] >= ((size_t)2 << 20) ? (2u << 20) : 64u), 0);
        assert_int_equal(dcp__alloc_current(), before + sizes[i]);
        unsigned char *p = mem;
        for (size_t k = 0; k < sizes[i]; k++) assert_true(p[k] == 0);
        if (sizes[i] > 0) memset(p, 0xff, sizes[i]);
        dcp__free(mem);
        assert_int_equal(dcp__alloc_current(), before);
    }
    dcp__free(NULL);
    dcp__alloc_reset_peak();
    void *a = NULL, *b = NULL;
    assert_int_equal(dcp__alloc(1000, "a", &a), DCP_OK);
    dcp__free(a);
    assert_int_equal(dcp__alloc(10, "b", &b), DCP_OK);
    assert_int_equal(dcp__alloc_peak(), before + 1000);
    dcp__alloc_set_limit(dcp__alloc_current() + 99);
    a = NULL;
    assert_int_equal(dcp__alloc(100, "the big thing", &a), DCP_ERR_NOMEM);
    assert_null(a);
    assert_non_null(strstr(dcp_last_error(), "the big thing"));
    assert_int_equal(dcp__alloc_note(100, "noted"), DCP_ERR_NOMEM);
    assert_int_equal(dcp__alloc(99, "fits", &a), DCP_OK);
    dcp__alloc_set_limit(0);
    dcp__free(a);
    dcp__free(b);
    assert_int_equal(dcp__alloc_array(SIZE_MAX / 2, 3, "huge", &a), DCP_ERR_NOMEM);
    assert_int_equal(dcp__alloc(SIZE_MAX / 2, "huge", &a), DCP_ERR_NOMEM);
    assert_int_equal(dcp__alloc_current(), before);
}

static void test_fault_points(void **state)
{
    (void)state;
    setenv("DCP_ATTN_FAULT", "kill:tokens:0", 1);
    assert_int_equal(dcp__fault_load(NULL, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "no point \"tokens\""));
    assert_non_null(strstr(dcp_last_error(), " token"));
    setenv("DCP_ATTN_FAULT", "kill:token:0", 1);
    assert_int_equal(dcp__fault_load(NULL, NULL), DCP_OK);
    unsetenv("DCP_ATTN_FAULT");
    assert_int_equal(dcp__fault_load(NULL, NULL), DCP_OK);
}

static void test_cpu(void **state)
{
    (void)state;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    const dcp_isa best = dcp__cpu_best_isa(&cpu);
    assert_true(best >= DCP_ISA_SCALAR && best <= DCP_ISA_AMX);
    assert_true(best == DCP_ISA_AMX || cpu.why_not_higher[0] != '\0');
    assert_true(dcp__cpu_usable() >= 1);
    for (int isa = DCP_ISA_SCALAR; isa <= DCP_ISA_AMX; isa++) {
        dcp_isa back;
        assert_int_equal(dcp__isa_parse(dcp__isa_name((dcp_isa)isa), &back), DCP_OK);
        assert_int_equal(back, isa);
        assert_int_equal(dcp__isa_choose((dcp_isa)isa, &back), DCP_OK);
        assert_int_equal(back, isa < (int)best ? isa : (int)best);
    }
    dcp_isa isa;
    setenv("DCP_ATTN_ISA", "scalar", 1);
    assert_int_equal(dcp__isa_choose(DCP_ISA_DEFAULT, &isa), DCP_OK);
    assert_int_equal(isa, DCP_ISA_SCALAR);
    setenv("DCP_ATTN_ISA", "sse9", 1);
    assert_int_equal(dcp__isa_choose(DCP_ISA_DEFAULT, &isa), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "sse9"));
    unsetenv("DCP_ATTN_ISA");
    assert_int_equal(dcp__isa_choose((dcp_isa)9, &isa), DCP_ERR_ARG);
}

struct tally {
    _Atomic int64_t sum, n;
    atomic_int bad;
    int n_threads;
};

static void count_item(void *ctx, int64_t item, int thread)
{
    struct tally *t = ctx;
    if (thread < 0 || thread >= t->n_threads) atomic_fetch_add(&t->bad, 1);
    atomic_fetch_add(&t->sum, item);
    atomic_fetch_add(&t->n, 1);
}

static void test_pool(void **state)
{
    (void)state;
    static const int n_threads[] = {1, 2, 3, 8};
    static const int64_t n_items[] = {0, 1, 2, 3, 7, 64, 1000};
    const size_t before = dcp__alloc_current();
    struct dcp_pool *p = NULL;
    assert_int_equal(dcp_pool_create(0, 1, &p), DCP_ERR_ARG);
    assert_int_equal(dcp__pool_threads(NULL), 1);
    for (size_t i = 0; i < sizeof(n_threads) / sizeof(n_threads[0]); i++) {
        assert_int_equal(dcp_pool_create(n_threads[i], 1, &p), DCP_OK);
        assert_int_equal(dcp__pool_threads(p), n_threads[i]);
        for (int round = 0; round < 300; round++) {
            struct tally t = {.n_threads = n_threads[i]};
            const int64_t n = n_items[round % 7];
            dcp__pool_run(p, n, count_item, &t);
            assert_int_equal(t.n, n);
            assert_int_equal(t.sum, n * (n - 1) / 2);
            assert_int_equal(t.bad, 0);
            if (round % 100 == 99) { /* long enough that the workers sleep */
                const struct timespec ts = {.tv_nsec = 2000000};
                nanosleep(&ts, NULL);
            }
        }
        dcp_pool_destroy(p);
    }
    dcp_pool_destroy(NULL);
    struct tally t = {.n_threads = 1};
    dcp__pool_run(NULL, 10, count_item, &t);
    assert_int_equal(t.n, 10);
    assert_int_equal(dcp__alloc_current(), before);
}

/* Workers that have nothing to do use no CPU. */
static void test_idle_pool(void **state)
{
    (void)state;
    struct dcp_pool *p = NULL;
    assert_int_equal(dcp_pool_create(8, 1, &p), DCP_OK);
    struct tally t = {.n_threads = 8};
    dcp__pool_run(p, 100, count_item, &t);
    struct timespec before, after, ts = {.tv_nsec = 50000000};
    nanosleep(&ts, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    ts.tv_nsec = 300000000;
    nanosleep(&ts, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const double used_s =
        (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9;
    assert_true(used_s < 0.05);
    dcp_pool_destroy(p);
}

int main(void)
{
    unsetenv("DCP_ATTN_ISA");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status),    cmocka_unit_test(test_brief),
        cmocka_unit_test(test_alloc),     cmocka_unit_test(test_fault_points),
        cmocka_unit_test(test_cpu),       cmocka_unit_test(test_pool),
        cmocka_unit_test(test_idle_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
