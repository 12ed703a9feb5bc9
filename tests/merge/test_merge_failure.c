/* SPDX-License-Identifier: Apache-2.0 */
/* A peer is killed, stopped or late in the middle of a merge, or never calls: every other rank gets
 * an error that names it, within the deadline, and the group says so from then on. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "group/awake.h"
#include "merge/merge_simple.h"

enum { N = 3, VICTIM = 1, LIMIT = 8400 };
static const double deadline_s = 1.0;

struct expectation {
    dcp_merge_algo algo;
    dcp_status want;     /* of the survivors */
    dcp_status want_too; /* or this */
    bool victim_returns;
    bool is_silent; /* the victim never calls */
};

static int survive(dcp_group *g, void *user)
{
    const struct expectation *e = user;
    struct simple *s = simple_new(g, e->algo);
    s->desc.workspace_limit_bytes = LIMIT; /* several tiles */
    EXPECT(simple_create(s) == DCP_OK);
    EXPECT(simple_run(s) == DCP_OK);
    if (s->rank == VICTIM && e->is_silent) {
        awake_sleep_s(2.5 * deadline_s);
        simple_free(s);
        return 0;
    }
    const double start = awake_s();
    const dcp_status st = simple_run(s);
    const double took = awake_s() - start;
    if (s->rank == VICTIM) { /* a delayed one comes back to a poisoned group */
        simple_free(s);
        return 0;
    }
    if (st != e->want && st != e->want_too) {
        printf("rank %d: %s: %s\n", s->rank, dcp_status_text(st), dcp_last_error());
        return 1;
    }
    char name[32];
    (void)snprintf(name, sizeof(name), "rank %d", VICTIM);
    if (strstr(dcp_last_error(), name) == NULL) {
        printf("rank %d: does not name %s: %s\n", s->rank, name, dcp_last_error());
        return 1;
    }
    if (took > 4 * deadline_s) {
        printf("rank %d: took %.1f s\n", s->rank, took);
        return 1;
    }
    if (simple_run(s) != DCP_ERR_POISONED) {
        printf("rank %d: not poisoned: %s\n", s->rank, dcp_last_error());
        return 1;
    }
    simple_free(s);
    return 0;
}

static int run_processes(const char *fault, struct expectation *e)
{
    if (fault != NULL)
        (void)setenv("DCP_ATTN_FAULT", fault, 1);
    else
        (void)unsetenv("DCP_ATTN_FAULT");
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    dcp_shm *shm = NULL;
    if (dcp_shm_prepare(N, &opts, &shm) != DCP_OK) return 1;
    fflush(stdout);
    pid_t pids[N];
    for (int r = 0; r < N; r++) {
        pids[r] = fork();
        if (pids[r] < 0) abort();
        if (pids[r] != 0) continue;
        (void)alarm(20);
        dcp_group *g = NULL;
        int rc = 1;
        if (dcp_shm_attach(shm, r, &g) == DCP_OK) {
            rc = survive(g, e);
            dcp_group_destroy(g);
        }
        fflush(stdout);
        _exit(rc);
    }
    int n_failed = 0;
    int n_left = N;
    while (n_left > 0) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0) break;
        n_left--;
        for (int r = 0; r < N; r++) {
            if (pids[r] != pid) continue;
            dcp_shm_report_exit(shm, r, status);
            const bool is_fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            if (r != VICTIM || e->victim_returns) n_failed += !is_fine;
            pids[r] = -1;
        }
        /* Only a stopped victim is left: end it. */
        if (n_left == 1 && pids[VICTIM] > 0 && !e->victim_returns)
            (void)kill(pids[VICTIM], SIGKILL);
    }
    dcp_shm_release(shm);
    (void)unsetenv("DCP_ATTN_FAULT");
    return n_failed;
}

static void test_killed(void **state)
{
    (void)state;
    for (int algo = DCP_MERGE_DIRECT; algo <= DCP_MERGE_ALLREDUCE_TEMP; algo++) {
        struct expectation e = {(dcp_merge_algo)algo, DCP_ERR_PEER, DCP_ERR_PEER, false, false};
        assert_int_equal(run_processes("kill:merge:1:2", &e), 0);
    }
}

static void test_stopped(void **state)
{
    (void)state;
    for (int algo = DCP_MERGE_DIRECT; algo <= DCP_MERGE_HIERARCHICAL; algo++) {
        struct expectation e = {(dcp_merge_algo)algo, DCP_ERR_TIMEOUT, DCP_ERR_PEER, false, false};
        assert_int_equal(run_processes("stop:merge:1:2", &e), 0);
    }
}

static void test_late(void **state)
{
    (void)state;
    const dcp_merge_algo algos[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLREDUCE};
    for (int i = 0; i < 2; i++) {
        struct expectation e = {algos[i], DCP_ERR_TIMEOUT, DCP_ERR_PEER, true, false};
        assert_int_equal(run_processes("delay:merge:1:2", &e), 0);
    }
}

/* Partials that lie outside group memory go through staging tiles, with a record for each: the
 * victim goes, or is late, when it has read some of them. */
static void test_while_staging(void **state)
{
    (void)state;
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = SIMPLE_T;
    desc.n_heads = SIMPLE_H;
    desc.dim = SIMPLE_D;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.workspace_limit_bytes = LIMIT;
    dcp_merge_cost cost;
    assert_int_equal(dcp_merge_plan(&desc, N, VICTIM, 0, SIMPLE_T, &cost), DCP_OK);
    assert_true(cost.n_steps >= 3);
    /* Three records of create, a run of one a tile and two more, the next run's first, a tile. */
    const int at = 3 + (2 + (int)cost.n_steps) + 1 + 2;
    char fault[48];
    (void)snprintf(fault, sizeof(fault), "kill:record:%d:%d", VICTIM, at);
    struct expectation killed = {DCP_MERGE_DIRECT, DCP_ERR_PEER, DCP_ERR_PEER, false, false};
    assert_int_equal(run_processes(fault, &killed), 0);
    (void)snprintf(fault, sizeof(fault), "delay:record:%d:%d", VICTIM, at);
    struct expectation late = {DCP_MERGE_DIRECT, DCP_ERR_TIMEOUT, DCP_ERR_PEER, true, false};
    assert_int_equal(run_processes(fault, &late), 0);
}

/* The all-reduce among threads: its partial is in use until all handles are gone. */
static void test_late_threads(void **state)
{
    (void)state;
    struct expectation e = {DCP_MERGE_ALLREDUCE, DCP_ERR_TIMEOUT, DCP_ERR_PEER, true, false};
    (void)setenv("DCP_ATTN_FAULT", "delay:merge:1:2", 1);
    assert_int_equal(ranks_threads(N, deadline_s, survive, &e), 0);
    (void)unsetenv("DCP_ATTN_FAULT");
}

static void test_never_calls(void **state)
{
    (void)state;
    struct expectation e = {DCP_MERGE_ALLTOALL, DCP_ERR_TIMEOUT, DCP_ERR_PEER, true, true};
    assert_int_equal(run_processes(NULL, &e), 0);
}

/* The same among threads: the silent rank is a thread that sleeps. */
static void test_never_calls_threads(void **state)
{
    (void)state;
    struct expectation e = {DCP_MERGE_DIRECT, DCP_ERR_TIMEOUT, DCP_ERR_PEER, true, true};
    assert_int_equal(ranks_threads(N, deadline_s, survive, &e), 0);
}

/* Two groups, each with its own merge, used from different threads at once. */
static int many_runs(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, DCP_MERGE_DIRECT);
    EXPECT(simple_create(s) == DCP_OK);
    for (int i = 0; i < 300; i++) EXPECT(simple_run(s) == DCP_OK && NEAR(s->merged[0], 1.5, 1e-6));
    simple_free(s);
    return 0;
}
static void *one_group(void *arg)
{
    *(int *)arg = ranks_threads(2, 20.0, many_runs, NULL);
    return NULL;
}
static void test_two_groups(void **state)
{
    (void)state;
    pthread_t ids[2];
    int n_failed[2] = {1, 1};
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&ids[i], NULL, one_group, &n_failed[i]), 0);
    for (int i = 0; i < 2; i++) (void)pthread_join(ids[i], NULL);
    assert_int_equal(n_failed[0] + n_failed[1], 0);
}

/* Two threads on one handle: one of them is refused, nothing else happens. */
struct two {
    struct simple *s;
    dcp_status st;
};
static void *second_call(void *arg)
{
    struct two *t = arg;
    usleep(200000); /* the first call waits for its peer meanwhile */
    t->st = simple_run(t->s);
    return NULL;
}
static int two_threads_one_group(dcp_group *g, void *user)
{
    (void)user;
    struct simple *s = simple_new(g, DCP_MERGE_DIRECT);
    EXPECT(simple_create(s) == DCP_OK);
    if (s->rank == 0) {
        struct two two = {s, DCP_OK};
        pthread_t id;
        EXPECT(pthread_create(&id, NULL, second_call, &two) == 0);
        EXPECT(simple_run(s) == DCP_OK);
        (void)pthread_join(id, NULL);
        EXPECT(two.st == DCP_ERR_BUSY);
    } else {
        usleep(600000);
        EXPECT(simple_run(s) == DCP_OK);
    }
    simple_free(s);
    return 0;
}
static void test_busy(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(2, 20.0, two_threads_one_group, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_while_staging),
        cmocka_unit_test(test_late_threads),
        cmocka_unit_test(test_never_calls),
        cmocka_unit_test(test_never_calls_threads),
        cmocka_unit_test(test_two_groups),
        cmocka_unit_test(test_busy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
