/* SPDX-License-Identifier: Apache-2.0 */
/* Processes meet by name: in any order, again and again, over what killed ones have left; and what
 * goes wrong is said on all sides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

#include "group/awake.h"
#include "group/contract.h"
#include "group/ranks.h"

enum { MAX_PROCS = 8 };
static char name[64], path[128];

static void sleep_ms(int ms)
{
    const struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    nanosleep(&ts, NULL);
}

/* One process of a case. */
struct proc {
    int rank, n, delay_ms;
    dcp_status want;
    const char *text; /* that the error holds */
    const char *fault;
};

static int run_proc(const struct proc *p, double deadline_s, rank_fn *fn)
{
    dcp_group *g = NULL;
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = ranks_per_host;
    if (p->fault != NULL) setenv("DCP_ATTN_FAULT", p->fault, 1);
    sleep_ms(p->delay_ms);
    const dcp_status st = dcp_group_join_shm(name, p->rank, p->n, &opts, &g);
    if (st != p->want || (st == DCP_OK) != (g != NULL) ||
        (p->text != NULL && strstr(dcp_last_error(), p->text) == NULL)) {
        fprintf(stderr, "rank %d of %d: status %d, wanted %d \"%s\": %s\n", p->rank, p->n, (int)st,
                (int)p->want, p->text != NULL ? p->text : "", dcp_last_error());
        return 1;
    }
    const int rc = g != NULL && fn != NULL ? fn(g, NULL) : 0;
    dcp_group_destroy(g);
    return rc;
}

/* The number of processes that did not do as wanted; killed ones do. */
static int run_procs(const struct proc *procs, int n_procs, double deadline_s, rank_fn *fn)
{
    pid_t pids[MAX_PROCS];
    fflush(NULL);
    for (int i = 0; i < n_procs; i++) {
        pids[i] = fork();
        if (pids[i] != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(run_proc(&procs[i], deadline_s, fn) != 0);
    }
    int bad = 0;
    for (int i = 0; i < n_procs; i++) {
        int status;
        if (waitpid(pids[i], &status, 0) != pids[i]) return -1;
        if (WIFEXITED(status)) bad += WEXITSTATUS(status);
    }
    return bad;
}

static bool name_exists(void)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

static int contract(dcp_group *g, void *ctx)
{
    (void)ctx;
    int n_failed = contract_run(g);
    CONTRACT_TRUE(strcmp(dcp_group_kind(g), "shm") == 0);
    dcp_group *sub = NULL;
    CONTRACT_OK(dcp_group_split(g, dcp_group_rank(g) % 2, 0, &sub));
    n_failed += contract_records(sub);
    dcp_group_destroy(sub);
    return n_failed;
}

static int contract_records_of(dcp_group *g, void *ctx)
{
    (void)ctx;
    return contract_records(g);
}

static void test_contract(void **state)
{
    (void)state;
    for (int n = 1; n <= 5; n += 2) {
        struct proc procs[MAX_PROCS] = {{0}};
        for (int i = 0; i < n; i++) procs[i] = (struct proc){.rank = n - 1 - i, .n = n};
        ranks_per_host = n == 5 ? 2 : 0;
        assert_int_equal(run_procs(procs, n, 20, contract), 0);
        assert_false(name_exists());
    }
    ranks_per_host = 0;
}

/* The same name, round after round, all at once. */
static void test_race(void **state)
{
    (void)state;
    struct proc procs[4] = {{0}};
    for (int i = 0; i < 4; i++) procs[i] = (struct proc){.rank = i, .n = 4};
    for (int round = 0; round < 25; round++) {
        assert_int_equal(run_procs(procs, 4, 20, contract_records_of), 0);
        assert_false(name_exists());
    }
}

static void test_missing(void **state)
{
    (void)state;
    const char *text = "missing: rank 1 rank 3";
    const struct proc procs[] = {
        {.rank = 0, .n = 4, .want = DCP_ERR_TIMEOUT, .text = text},
        {.rank = 2, .n = 4, .want = DCP_ERR_TIMEOUT, .text = text},
    };
    const double start = awake_s();
    assert_int_equal(run_procs(procs, 2, 0.6, NULL), 0);
    assert_true(awake_s() - start < 5);
    assert_false(name_exists());
}

/* The lock held while the deadline passes: for a moment, as by another rank that gives up too, and
 * for long, as by a stopped one. Only the second is blamed. */
static void test_lock_at_deadline(void **state)
{
    (void)state;
    static const struct {
        int from_ms, until_ms; /* from the start; the deadline is at 1500 */
        const char *text;
    } cases[] = {{1450, 1530, "missing: rank 1"}, {300, 3500, "for the lock of"}};
    for (int i = 0; i < 2; i++) {
        fflush(NULL);
        const double start = awake_s();
        const pid_t holder = fork();
        if (holder == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            const int fd = open(path, O_RDWR | O_CREAT, 0600);
            awake_sleep_s(cases[i].from_ms * 1e-3); /* the rank has signed in */
            const bool is_held = fd >= 0 && flock(fd, LOCK_EX) == 0;
            while (awake_s() - start < cases[i].until_ms * 1e-3) sleep_ms(5);
            _exit(!is_held);
        }
        const struct proc alone[] = {
            {.rank = 0, .n = 2, .want = DCP_ERR_TIMEOUT, .text = cases[i].text}};
        assert_int_equal(run_procs(alone, 1, 1.5, NULL), 0);
        assert_true(awake_s() - start < 2.8);
        int status;
        assert_int_equal(waitpid(holder, &status, 0), holder);
        assert_int_equal(status, 0);
        (void)unlink(path); /* who never got the lock could not remove it */
    }
}

static void test_disagree(void **state)
{
    (void)state;
    const struct proc twice[] = {
        {.rank = 1, .n = 3, .want = DCP_ERR_MISMATCH, .text = "rank 1 came twice: pid "},
        {.rank = 1, .n = 3, .delay_ms = 50, .want = DCP_ERR_MISMATCH, .text = "rank 1 came twice"},
        {.rank = 0, .n = 3, .want = DCP_ERR_MISMATCH, .text = "rank 1 came twice"},
    };
    assert_int_equal(run_procs(twice, 3, 5, NULL), 0);
    const struct proc sizes[] = {
        {.rank = 0, .n = 3, .want = DCP_ERR_MISMATCH, .text = "has 3 ranks"},
        {.rank = 1, .n = 2, .delay_ms = 50, .want = DCP_ERR_MISMATCH, .text = "has 2 ranks"},
    };
    assert_int_equal(run_procs(sizes, 2, 5, NULL), 0);
    assert_false(name_exists());
}

/* Killed at every step: who waits is told at once, the next run with the name works. */
static void test_killed(void **state)
{
    (void)state;
    static const char *const faults[] = {"kill:join_create:0", "kill:join_locked:0", "kill:join:0"};
    const struct proc good[] = {{.rank = 0, .n = 2}, {.rank = 1, .n = 2}};
    for (int i = 0; i < 3; i++) {
        const struct proc alone[] = {{.rank = 0, .n = 2, .fault = faults[i]}};
        assert_int_equal(run_procs(alone, 1, 5, NULL), 0);
        assert_true(name_exists());
        assert_int_equal(run_procs(good, 2, 10, contract_records_of), 0);
        assert_false(name_exists());
    }
    /* the second one of three dies, as what is not the holder */
    const struct proc second[] = {
        {.rank = 2, .n = 3, .want = DCP_ERR_PEER, .text = "rank 0 (pid "},
        {.rank = 0, .n = 3, .delay_ms = 60, .fault = "kill:join:0"},
    };
    const double start = awake_s();
    assert_int_equal(run_procs(second, 2, 20, NULL), 0);
    assert_true(awake_s() - start < 6);
    assert_int_equal(run_procs(good, 2, 10, contract_records_of), 0);
}

/* Killed in the group: the others notice without a parent that reports. */
static int until_failure(dcp_group *g, void *ctx)
{
    (void)ctx;
    dcp_status st = DCP_OK;
    for (int k = 0; k < 100 && st == DCP_OK; k++) st = dcp_group_barrier(g);
    return st == DCP_ERR_PEER && strstr(dcp_last_error(), "rank 1 (pid ") != NULL ? 0 : 1;
}

static void test_killed_later(void **state)
{
    (void)state;
    const struct proc procs[] = {{.rank = 0, .n = 3},
                                 {.rank = 1, .n = 3, .fault = "kill:barrier:1:20"},
                                 {.rank = 2, .n = 3}};
    assert_int_equal(run_procs(procs, 3, 10, until_failure), 0);
}

static void test_arguments(void **state)
{
    (void)state;
    static const char *const bad[] = {"", ".", ".hidden", "a/b", "/abs", "a b", "t\xc3\xa4", "a\n"};
    dcp_group *g = NULL;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(dcp_group_join_shm(bad[i], 0, 1, NULL, &g), DCP_ERR_ARG);
        assert_non_null(strstr(dcp_last_error(), "the name"));
    }
    char long_name[200];
    memset(long_name, 'x', sizeof(long_name));
    long_name[101] = '\0';
    assert_int_equal(dcp_group_join_shm(long_name, 0, 1, NULL, &g), DCP_ERR_ARG);
    long_name[100] = '\0';
    assert_int_equal(dcp_group_join_shm(long_name, 0, 1, NULL, &g), DCP_OK);
    dcp_group_destroy(g);
    g = NULL;
    assert_int_equal(dcp_group_join_shm(NULL, 0, 1, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_join_shm(name, 2, 2, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_join_shm(name, -1, 2, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_join_shm(name, 0, 0, NULL, &g), DCP_ERR_ARG);
    assert_int_equal(dcp_group_join_shm(name, 0, 1, NULL, NULL), DCP_ERR_ARG);
    assert_null(g);
    /* what is no file of ours is not touched */
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_equal(dcp_group_join_shm(name, 0, 1, NULL, &g), DCP_ERR_SYS);
    assert_int_equal(unlink(path), 0);
    if (geteuid() == 0) {
        const int fd = open(path, O_CREAT | O_WRONLY, 0600);
        assert_true(fd >= 0);
        assert_int_equal(fchown(fd, 12345, 12345), 0);
        close(fd);
        assert_int_equal(dcp_group_join_shm(name, 0, 1, NULL, &g), DCP_ERR_SYS);
        assert_non_null(strstr(dcp_last_error(), "user"));
        assert_int_equal(unlink(path), 0);
    }
    /* rubbish of ours is taken over */
    const int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, long_name, 100), 100);
    close(fd);
    assert_int_equal(dcp_group_join_shm(name, 0, 1, NULL, &g), DCP_OK);
    dcp_group_destroy(g);
    assert_false(name_exists());
}

/* After each test, also one that has failed half-way: the name is a file, and would stay. */
static int remove_name(void **state)
{
    (void)state;
    (void)remove(path);
    return 0;
}

int main(void)
{
    snprintf(name, sizeof(name), "test.%d", (int)getpid());
    snprintf(path, sizeof(path), "/dev/shm/dcp-attn.%u.%s", (unsigned)geteuid(), name);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_arguments, remove_name),
        cmocka_unit_test_teardown(test_contract, remove_name),
        cmocka_unit_test_teardown(test_race, remove_name),
        cmocka_unit_test_teardown(test_missing, remove_name),
        cmocka_unit_test_teardown(test_disagree, remove_name),
        cmocka_unit_test_teardown(test_killed, remove_name),
        cmocka_unit_test_teardown(test_killed_later, remove_name),
        cmocka_unit_test_teardown(test_lock_at_deadline, remove_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
