/* SPDX-License-Identifier: Apache-2.0 */
/* The contract on a transport of the caller's: the pipes of the example, and one that moves a byte
 * or nothing at a time. Sub-groups, and failures, share the streams. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define TRANSPORT_PIPES_NO_MAIN
#include "examples/transport_pipes.c"

#include <sys/prctl.h>

#include "group/awake.h"
#include "group/contract.h"

#define WANT(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: rank %d: not true: %s [%s]\n", __FILE__, __LINE__,             \
                    dcp_group_rank(g), #cond, dcp_last_error());                                   \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

typedef int rank_fn(dcp_group *g);

/* Streams that give little at a time, and now and then nothing. */
static unsigned drip_count;
static size_t drip(size_t n)
{
    drip_count = drip_count * 1103515245u + 12345u;
    const unsigned x = drip_count >> 16;
    return x % 3 == 0 ? 0 : x % 3 == 1 && n > 1 ? 1 : n < 4000 ? n : 1 + x % 4000;
}
static dcp_status drip_send(void *ctx, int peer, const void *buf, size_t n, size_t *moved)
{
    *moved = 0;
    const size_t some = drip(n);
    return some == 0 ? DCP_OK : pipes_send(ctx, peer, buf, some, moved);
}
static dcp_status drip_recv(void *ctx, int peer, void *buf, size_t n, size_t *moved)
{
    *moved = 0;
    const size_t some = drip(n);
    return some == 0 ? DCP_OK : pipes_recv(ctx, peer, buf, some, moved);
}

/* Processes with pipes between them; returns how many did not do as wanted. Killed ones do. */
static int run_ranks(int n, double deadline_s, bool drips, rank_fn *fn)
{
    static int fds[MAX_RANKS][MAX_RANKS][2];
    pid_t pids[MAX_RANKS];
    if (pipes_make(n, fds) != 0) return -1;
    fflush(NULL);
    for (int rank = 0; rank < n; rank++) {
        pids[rank] = fork();
        if (pids[rank] != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct pipes p;
        dcp_group *g = NULL;
        dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
        opts.deadline_s = deadline_s;
        pipes_keep(&p, rank, n, fds);
        const size_t before = dcp__alloc_current();
        dcp_transport t = {sizeof(t), &p, drip_send, drip_recv, NULL, NULL, pipes_close};
        drip_count = (unsigned)rank;
        const dcp_status st = drips ? dcp_group_create_custom(&t, rank, n, &opts, &g)
                                    : pipes_group(&p, rank, &opts, &g);
        int rc = st != DCP_OK;
        if (rc != 0) fprintf(stderr, "create: %s\n", dcp_last_error());
        if (rc == 0) rc = fn(g) != 0;
        dcp_group_destroy(g);
        if (dcp__alloc_current() != before) {
            fprintf(stderr, "rank %d leaks %zu bytes\n", rank, dcp__alloc_current() - before);
            rc = 1;
        }
        _exit(rc);
    }
    struct pipes none;
    pipes_keep(&none, -1, n, fds);
    int bad = 0;
    for (int rank = 0; rank < n; rank++) {
        int status;
        if (waitpid(pids[rank], &status, 0) != pids[rank]) return -1;
        if (WIFEXITED(status)) bad += WEXITSTATUS(status);
    }
    return bad;
}

static int contract(dcp_group *g)
{
    int n_failed = contract_run(g);
    CONTRACT_TRUE(strcmp(dcp_group_kind(g), "custom") == 0);
    CONTRACT_TRUE(dcp_group_n_hosts(g) == dcp_group_size(g));
    return n_failed;
}

static void test_contract(void **state)
{
    (void)state;
    for (int n = 1; n <= 5; n++) assert_int_equal(run_ranks(n, 30, false, contract), 0);
    assert_int_equal(run_ranks(3, 30, true, contract_records), 0);
    assert_int_equal(run_ranks(2, 30, true, contract_exchange), 0);
}

/* Parent and sub-groups take turns on the same streams. */
static int splits(dcp_group *g)
{
    const int rank = dcp_group_rank(g);
    dcp_group *sub = NULL, *turned = NULL, *deep = NULL;
    WANT(dcp_group_split(g, rank % 2, rank, &sub) == DCP_OK);
    WANT(dcp_group_split(g, 0, -rank, &turned) == DCP_OK);
    WANT(dcp_group_split(sub, rank == 0 ? -1 : 1, 0, &deep) == DCP_OK);
    WANT((deep == NULL) == (rank == 0));
    int n_failed = contract_run(sub) + contract_run(turned);
    for (int k = 0; k < 50; k++) {
        WANT(dcp_group_barrier(sub) == DCP_OK);
        WANT(dcp_group_barrier(turned) == DCP_OK);
        if (deep != NULL) WANT(dcp_group_barrier(deep) == DCP_OK);
        WANT(dcp_group_barrier(g) == DCP_OK);
    }
    dcp_group_destroy(turned);
    n_failed += contract_exchange(g) + contract_exchange(sub);
    dcp_group_destroy(deep);
    WANT(dcp_group_barrier(g) == DCP_OK);
    dcp_group_destroy(sub);
    return n_failed;
}

static void test_splits(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(4, 30, false, splits), 0);
    assert_int_equal(run_ranks(5, 30, false, splits), 0);
}

static int killed(dcp_group *g)
{
    dcp_status st = DCP_OK;
    for (int k = 0; k < 100 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    WANT(st == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1 is gone") != NULL);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

static int late(dcp_group *g)
{
    dcp_status st = DCP_OK;
    for (int k = 0; k < 10 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    WANT(st == DCP_ERR_TIMEOUT || dcp_group_rank(g) == 2);
    WANT(strstr(dcp_last_error(), "did not arrive: rank 2") != NULL);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

/* The news may overtake what another peer has sent before: then the first barrier fails already. */
static int give_up(dcp_group *g)
{
    dcp_status st = dcp_group_barrier(g);
    if (dcp_group_rank(g) == 1) {
        WANT(st == DCP_OK);
        dcp_group_abort(g, "no more paper");
        WANT(dcp_group_barrier(g) != DCP_OK);
        return 0;
    }
    if (st == DCP_OK) st = dcp_group_barrier(g);
    WANT(st == DCP_ERR_PEER);
    WANT(strstr(dcp_last_error(), "rank 1 gave up: no more paper") != NULL);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

/* A sub-group fails, its parent goes on; who has left a sub-group is known. */
static int apart(dcp_group *g)
{
    dcp_group *sub = NULL, *other = NULL;
    const int rank = dcp_group_rank(g);
    WANT(dcp_group_split(g, 0, rank, &sub) == DCP_OK);
    WANT(dcp_group_split(g, 0, rank, &other) == DCP_OK);
    if (rank == 1) {
        dcp_group_abort(sub, "out of ink");
        dcp_group_destroy(other);
        other = NULL;
    } else {
        WANT(dcp_group_barrier(sub) == DCP_ERR_PEER);
        WANT(strstr(dcp_last_error(), "out of ink") != NULL);
        WANT(dcp_group_barrier(other) == DCP_ERR_PEER);
        WANT(strstr(dcp_last_error(), rank == 0 ? "rank 1 " : "rank ") != NULL);
    }
    for (int k = 0; k < 20; k++) WANT(dcp_group_barrier(g) == DCP_OK);
    dcp_group_destroy(sub);
    dcp_group_destroy(other);
    return contract_exchange(g);
}

static int disagree(dcp_group *g)
{
    char buf[64] = {0};
    struct dcp__xfer x = {
        .peer = 1 - dcp_group_rank(g), .buf = buf, .n_bytes = dcp_group_rank(g) == 0 ? 64 : 60};
    dcp_status st = dcp_group_rank(g) == 0 ? dcp__group_exchange_start(g, 0, &x, 1, NULL, 0)
                                           : dcp__group_exchange_start(g, 0, NULL, 0, &x, 1);
    if (st == DCP_OK) st = dcp__group_exchange_wait(g, 0);
    WANT(st == (dcp_group_rank(g) == 0 ? DCP_OK : DCP_ERR_MISMATCH));
    if (dcp_group_rank(g) == 0) WANT(dcp_group_barrier(g) == DCP_ERR_MISMATCH);
    WANT(strstr(dcp_last_error(), "64 bytes") != NULL);
    WANT(strstr(dcp_last_error(), "expects 60") != NULL);
    WANT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    return 0;
}

static void test_faults(void **state)
{
    (void)state;
    const double start = awake_s();
    setenv("DCP_ATTN_FAULT", "kill:barrier:1:30", 1);
    assert_int_equal(run_ranks(3, 10, false, killed), 0);
    setenv("DCP_ATTN_FAULT", "delay:barrier:2:3", 1);
    assert_int_equal(run_ranks(3, 1, false, late), 0);
    setenv("DCP_ATTN_FAULT", "", 1);
    assert_int_equal(run_ranks(3, 5, false, give_up), 0);
    assert_int_equal(run_ranks(3, 5, false, apart), 0);
    assert_int_equal(run_ranks(2, 5, false, disagree), 0);
    assert_true(awake_s() - start < 20);
}

/* A faster all-gather of the transport's own, and what it says. */
static dcp_status own_allgather(void *ctx, const void *send, size_t n_bytes, void *recv,
                                double timeout_s)
{
    int *const calls = ctx;
    if (++*calls > 3) return DCP_ERR_TIMEOUT;
    assert_true(timeout_s == 7);
    memcpy(recv, send, n_bytes);
    return DCP_OK;
}

static void test_table(void **state)
{
    (void)state;
    dcp_group *g = NULL;
    dcp_transport t = DCP_TRANSPORT_INIT;
    assert_int_equal(dcp_group_create_custom(NULL, 0, 1, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_create_custom(&t, 0, 1, NULL, &g), DCP_ERR_ARG);
    t.send = pipes_send;
    t.recv = pipes_recv;
    assert_int_equal(dcp_group_create_custom(&t, 1, 1, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_create_custom(&t, 0, 1, NULL, NULL), DCP_ERR_ARG);
    struct {
        dcp_transport t;
        void *later;
    } longer = {.t = t, .later = &t};
    longer.t.struct_size = sizeof(longer);
    assert_int_equal(dcp_group_create_custom(&longer.t, 0, 1, NULL, &g), DCP_ERR_NOT_SUPPORTED);
    assert_null(g);
    int calls = 0;
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 7;
    t.ctx = &calls;
    t.allgather = own_allgather;
    assert_int_equal(dcp_group_create_custom(&t, 0, 1, &opts, &g), DCP_OK);
    for (int k = 0; k < 3; k++) assert_int_equal(dcp_group_barrier(g), DCP_OK);
    assert_int_equal(dcp_group_barrier(g), DCP_ERR_TIMEOUT);
    assert_int_equal(dcp_group_barrier(g), DCP_ERR_POISONED);
    dcp_group_destroy(g);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_contract),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
