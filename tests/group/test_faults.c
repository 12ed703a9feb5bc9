/* SPDX-License-Identifier: Apache-2.0 */
/* What happens when a rank dies, is late, disagrees or gives up: the others name it within the
 * deadline, the group stays poisoned, nobody hangs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "group/awake.h"
#include "group/group_priv.h"
#include "group/ranks.h"

/* Returned by ranks: 0 = as expected. */
#define WANT(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: rank %d: not true: %s [%s]\n", __FILE__, __LINE__,             \
                    dcp_group_rank(g), #cond, dcp_last_error());                                   \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static void sleep_s(double s)
{
    struct timespec ts = {.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&ts, NULL);
}

/* Call barriers until one fails; the failure names rank 1 and its signal; POISONED ever after. */
static int expect_killed(dcp_group *g, void *ctx)
{
    (void)ctx;
    const double start = awake_s();
    dcp_status st = DCP_OK;
    for (int k = 0; k < 1000 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    WANT(st == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1 (pid ") != NULL);
    WANT(strstr(dcp_last_error(), "signal 9 (SIGKILL)") != NULL);
    WANT(awake_s() - start < 5);
    for (int k = 0; k < 3; k++) {
        WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
        WANT(strstr(dcp_last_error(), "signal 9 (SIGKILL)") != NULL);
    }
    void *ptr = NULL;
    WANT(dcp_group_alloc(g, 10, &ptr) == DCP_ERR_POISONED && ptr == NULL);
    return 0;
}

static void with_fault(const char *spec, int n, double deadline_s, rank_fn *fn, int want)
{
    setenv("DCP_ATTN_FAULT", spec, 1);
    const double start = awake_s();
    assert_int_equal(ranks_shm(n, deadline_s, fn, NULL), want);
    assert_true(awake_s() - start < 12);
    unsetenv("DCP_ATTN_FAULT");
}

static void test_killed(void **state)
{
    (void)state;
    with_fault("kill:barrier:1", 2, 10, expect_killed, 0);
    with_fault("kill:barrier:1:50", 3, 10, expect_killed, 0);
    with_fault("kill:barrier:1:500", 5, 10, expect_killed, 0);
}

/* A large exchange of which the peer sees a part. */
static int expect_killed_in_exchange(dcp_group *g, void *ctx)
{
    (void)ctx;
    enum { BYTES = 4 << 20 };
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    char *buf = calloc((size_t)n * 2, BYTES);
    struct dcp__xfer sends[8], recvs[8];
    for (int i = 1; i < n; i++) {
        const int peer = (rank + i) % n;
        sends[i - 1] = (struct dcp__xfer){.peer = peer, .buf = buf, .n_bytes = BYTES};
        recvs[i - 1] =
            (struct dcp__xfer){.peer = peer, .buf = buf + (size_t)i * BYTES, .n_bytes = BYTES};
    }
    dcp_status st = dcp__group_exchange_start(g, 0, sends, n - 1, recvs, n - 1);
    if (st == DCP_OK) st = dcp__group_exchange_wait(g, 0);
    WANT(st == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1 (pid ") != NULL);
    free(buf);
    return 0;
}

static void test_killed_in_exchange(void **state)
{
    (void)state;
    with_fault("kill:exchange_wait:1", 3, 10, expect_killed_in_exchange, 0);
}

static int expect_exit(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_status st = DCP_OK;
    for (int k = 0; k < 100 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    WANT(st == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "exit status 3") != NULL);
    return 0;
}

static void test_exit(void **state)
{
    (void)state;
    with_fault("exit:barrier:0:7", 3, 10, expect_exit, 3);
}

/* The peer is there but late: stopped, or sleeping. */
static int expect_late(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_status st = DCP_OK;
    const double start = awake_s(), wall = dcp__now_s();
    for (int k = 0; k < 10 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    if (dcp_group_rank(g) == 2) {
        WANT(st == DCP_ERR_TIMEOUT); /* its own delay; it finds the poison */
        return 0;
    }
    WANT(st == DCP_ERR_TIMEOUT);
    WANT(strstr(dcp_last_error(), "did not arrive: rank 2") != NULL);
    WANT(strstr(dcp_last_error(), "in barrier") != NULL);
    WANT(dcp__now_s() - wall > 0.9 && awake_s() - start < 4);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

static void test_late(void **state)
{
    (void)state;
    with_fault("stop:barrier:2:3", 3, 1, expect_late, 0);
    with_fault("delay:barrier:2:3", 3, 1, expect_late, 0);
    setenv("DCP_ATTN_FAULT", "delay:barrier:2:5", 1);
    assert_int_equal(ranks_threads(3, 1, expect_late, NULL), 0);
    unsetenv("DCP_ATTN_FAULT");
}

/* Rank 0 waits for rank 1, which waits for rank 2: the text names both. how: what rank 1 waits for.
 * */
enum chain { CHAIN_DATA, CHAIN_ROOM, CHAIN_RECORD, CHAIN_STOPPED };
static int expect_chain(dcp_group *g, void *ctx)
{
    enum { BYTES = 4 << 20 };
    static char buf[3][BYTES];
    const enum chain how = *(const enum chain *)ctx;
    const int rank = dcp_group_rank(g);
    struct dcp__xfer x = {.peer = 0, .buf = buf[rank], .n_bytes = 8};
    int64_t pids[3], own = (int64_t)getpid();
    WANT(dcp__group_record(g, &own, sizeof(own), pids) == DCP_OK);
    if (rank == 2) {
        awake_sleep_s(0.4);
        if (how == CHAIN_STOPPED) { /* what it waits for comes, and it does not take it */
            kill((pid_t)pids[1], SIGSTOP);
            x.peer = 1;
            WANT(dcp__group_exchange_start(g, 0, &x, 1, NULL, 0) == DCP_OK);
            WANT(dcp__group_exchange_wait(g, 0) == DCP_OK);
        }
        awake_sleep_s(2);
        return 0;
    }
    if (rank == 1) {
        awake_sleep_s(0.2);
        x.peer = 2;
        if (how == CHAIN_ROOM) x.n_bytes = BYTES;
        const int n_sends = how == CHAIN_ROOM;
        dcp_status st = DCP_OK;
        if (how != CHAIN_RECORD) st = dcp__group_exchange_start(g, 0, &x, n_sends, &x, 1 - n_sends);
        if (how != CHAIN_RECORD && st == DCP_OK) st = dcp__group_exchange_wait(g, 0);
        if (how == CHAIN_RECORD) st = dcp_group_barrier(g);
        WANT(st == DCP_ERR_TIMEOUT);
        return 0;
    }
    x.peer = 1;
    WANT(dcp__group_exchange_start(g, 0, NULL, 0, &x, 1) == DCP_OK);
    WANT(dcp__group_exchange_wait(g, 0) == DCP_ERR_TIMEOUT);
    const char *const want[] = {
        "did not arrive: rank 1 (is in exchange, held up by rank 2, which is in no call of the "
        "group)",
        "did not arrive: rank 1 (is in exchange, held up by rank 2, which is in no call of the "
        "group)",
        "did not arrive: rank 1 (is in barrier, held up by rank 2, which is in no call of the "
        "group)",
        "did not arrive: rank 1 (is in exchange)"};
    WANT(strstr(dcp_last_error(), want[how]) != NULL);
    return 0;
}

static void test_chain(void **state)
{
    (void)state;
    for (enum chain how = CHAIN_DATA; how <= CHAIN_STOPPED; how++) {
        assert_int_equal(ranks_shm(3, 1.0, expect_chain, &how), 0);
        if (how != CHAIN_STOPPED) assert_int_equal(ranks_threads(3, 1.0, expect_chain, &how), 0);
    }
}

static void test_fault_text(void **state)
{
    (void)state;
    static const char *const bad[] = {"kill",       "kill:x",    "kill:x:y",     "hit:x:0",
                                      "kill:x:0:0", "kill:x:-1", "kill:x:0:1:2", "kill:barrier:7"};
    dcp_shm *shm = NULL;
    dcp_group *groups[2] = {NULL, NULL};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        setenv("DCP_ATTN_FAULT", bad[i], 1);
        assert_int_equal(dcp_shm_prepare(2, NULL, &shm), DCP_ERR_ARG);
        assert_non_null(strstr(dcp_last_error(), "DCP_ATTN_FAULT"));
    }
    setenv("DCP_ATTN_FAULT", "kill:barrier:0", 1);
    assert_int_equal(dcp_group_create_threads(2, NULL, groups), DCP_ERR_NOT_SUPPORTED);
    unsetenv("DCP_ATTN_FAULT");
}

/* Ranks that give up by themselves. */
static int give_up(dcp_group *g, void *ctx)
{
    (void)ctx;
    WANT(dcp_group_barrier(g) == DCP_OK);
    if (dcp_group_rank(g) == 1) {
        dcp_group_abort(g, "no more paper");
        WANT(dcp_group_barrier(g) != DCP_OK);
        return 0;
    }
    WANT(dcp_group_barrier(g) == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1 gave up: no more paper") != NULL);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

/* Leaving early is noticed at once, what was given before is received. */
static int leave_early(dcp_group *g, void *ctx)
{
    (void)ctx;
    char buf[1000] = {0};
    struct dcp__xfer x = {.peer = 1 - dcp_group_rank(g), .buf = buf, .n_bytes = sizeof(buf)};
    if (dcp_group_rank(g) == 1) {
        memset(buf, 7, sizeof(buf));
        WANT(dcp__group_exchange_start(g, 0, &x, 1, NULL, 0) == DCP_OK);
        WANT(dcp__group_exchange_wait(g, 0) == DCP_OK);
        return 0;
    }
    sleep_s(0.1);
    WANT(dcp__group_exchange_start(g, 0, NULL, 0, &x, 1) == DCP_OK);
    WANT(dcp__group_exchange_wait(g, 0) == DCP_OK);
    WANT(buf[999] == 7);
    const double start = awake_s();
    WANT(dcp_group_barrier(g) == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1") != NULL);
    WANT(awake_s() - start < 3);
    return 0;
}

static int disagree(dcp_group *g, void *ctx)
{
    (void)ctx;
    char buf[64] = {0};
    struct dcp__xfer x = {
        .peer = 1 - dcp_group_rank(g), .buf = buf, .n_bytes = dcp_group_rank(g) == 0 ? 64 : 60};
    if (dcp_group_rank(g) == 0) {
        WANT(dcp__group_exchange_start(g, 0, &x, 1, NULL, 0) == DCP_OK);
        WANT(dcp__group_exchange_wait(g, 0) == DCP_OK);
        WANT(dcp_group_barrier(g) == DCP_ERR_MISMATCH); /* by the poison of rank 1 */
    } else {
        dcp_status st = dcp__group_exchange_start(g, 0, NULL, 0, &x, 1);
        if (st == DCP_OK) st = dcp__group_exchange_wait(g, 0);
        WANT(st == DCP_ERR_MISMATCH);
        WANT(strstr(dcp_last_error(), "64 bytes") != NULL);
        WANT(strstr(dcp_last_error(), "expects 60") != NULL);
    }
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

static void test_peers(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        int (*const run)(int, double, rank_fn *, void *) = k == 0 ? ranks_threads : ranks_shm;
        assert_int_equal(run(3, 5, give_up, NULL), 0);
        assert_int_equal(run(2, 5, leave_early, NULL), 0);
        assert_int_equal(run(2, 5, disagree, NULL), 0);
    }
}

/* A rank without memory: all ranks fail, the group goes on. */
static int no_memory(dcp_group *g, void *ctx)
{
    (void)ctx;
    void *ptr = NULL;
    if (dcp_group_rank(g) == 1) dcp__alloc_set_limit(dcp__alloc_current() + 1000);
    WANT(dcp_group_alloc(g, 100000, &ptr) == DCP_ERR_NOMEM && ptr == NULL);
    dcp__alloc_set_limit(0);
    WANT(dcp_group_alloc(g, 100000, &ptr) == DCP_OK);
    dcp_group_free(g, ptr);
    return 0;
}

static void test_no_memory(void **state)
{
    (void)state;
    assert_int_equal(ranks_shm(3, 5, no_memory, NULL), 0);
}

/* One handle, two threads: the second is refused while the first waits. */
static void *second_caller(void *arg)
{
    dcp_group *g = arg;
    for (int k = 0; k < 400; k++) {
        const dcp_status st = dcp__group_enter(g);
        if (st == DCP_ERR_BUSY) return g;
        if (st == DCP_OK) dcp__group_leave(g);
        sleep_s(0.001);
    }
    return NULL;
}

static int busy(dcp_group *g, void *ctx)
{
    (void)ctx;
    if (dcp_group_rank(g) == 1) {
        sleep_s(0.3);
        WANT(dcp_group_barrier(g) == DCP_OK);
        return 0;
    }
    pthread_t thread;
    void *was_refused;
    pthread_create(&thread, NULL, second_caller, g);
    const dcp_status st = dcp_group_barrier(g);
    pthread_join(thread, &was_refused);
    /* the second may have been inside when the barrier was called: then that was refused */
    WANT(st == DCP_OK ? was_refused != NULL : st == DCP_ERR_BUSY);
    if (st == DCP_ERR_BUSY) WANT(dcp_group_barrier(g) == DCP_OK);
    /* nests for the thread that holds it */
    WANT(dcp__group_enter(g) == DCP_OK);
    WANT(dcp__group_enter(g) == DCP_OK);
    dcp__group_leave(g);
    dcp__group_leave(g);
    return 0;
}

static void test_busy(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(2, 5, busy, NULL), 0);
}

/* Two groups, used at the same time by two sets of threads. */
static int many_records(dcp_group *g, void *ctx)
{
    (void)ctx;
    for (int k = 0; k < 300; k++) {
        int all[4];
        const int own = dcp_group_rank(g) * 1000 + k;
        WANT(dcp_group_allgather(g, &own, sizeof(own), all) == DCP_OK);
        for (int r = 0; r < dcp_group_size(g); r++) WANT(all[r] == r * 1000 + k);
    }
    return 0;
}

static void *run_group(void *arg)
{
    *(int *)arg = ranks_threads(2, 10, many_records, NULL);
    return NULL;
}

static void test_two_groups(void **state)
{
    (void)state;
    pthread_t threads[2];
    int results[2] = {-1, -1};
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, run_group, &results[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    assert_int_equal(results[0], 0);
    assert_int_equal(results[1], 0);
}

/* Getters take NULL; a size near the end of the address space is no way past the overlap check. */
static void test_arguments(void **state)
{
    (void)state;
    assert_int_equal(dcp_group_rank(NULL), -1);
    assert_int_equal(dcp_group_size(NULL), 0);
    assert_string_equal(dcp_group_kind(NULL), "?");
    assert_true(dcp_group_deadline(NULL) == 0);
    dcp_group *g = NULL;
    char buf[64] = {0};
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    assert_int_equal(dcp_group_allgather(g, buf, SIZE_MAX, buf + 32), DCP_ERR_ARG);
    assert_int_equal(dcp_group_allgather(g, buf + 32, SIZE_MAX, buf), DCP_ERR_ARG);
    assert_int_equal(dcp_group_allgather(g, buf, 32, buf + 32), DCP_OK);
    dcp_group_destroy(g);
}

/* A process without standard streams: what it prints must not land in the group's memory. */
static void test_closed_streams(void **state)
{
    (void)state;
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        for (int fd = 0; fd <= 2; fd++) close(fd);
        dcp_shm *shm = NULL;
        if (dcp_shm_prepare(2, NULL, &shm) != DCP_OK) _exit(1);
        for (int fd = 0; fd <= 2; fd++) {
            if (fcntl(fd, F_GETFD) >= 0) _exit(2);
        }
        dcp_shm_release(shm);
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fault_text),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_closed_streams),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_killed_in_exchange),
        cmocka_unit_test(test_exit),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_peers),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_busy),
        cmocka_unit_test(test_two_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
