/* SPDX-License-Identifier: Apache-2.0 */
/* Faults by the dice: in each round one thing goes wrong on one rank, before, in the middle of or
 * after a merge, and the others must end with the right kind of error, naming that rank, in time,
 * or with the right result. 50 rounds; DCP_ATTN_TEST_FAULTS=1000 for the long run,
 * DCP_ATTN_TEST_FIRST=N to begin with round N. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "group/awake.h"
#include "merge/merge_simple.h"
#include "ref/ref_merge.h"

static double deadline_s = 0.4; /* DCP_ATTN_TEST_DEADLINE: more, on a machine that is busy */
enum { N_MAX = 5, RUNS = 4 };

enum what { KILL, EXIT, STOP, DELAY, SILENT, LEAVES, SLOW, WRONG_T, BAD_ARGS, WHAT_COUNT };
static const char *const what_names[] = {"kill",   "exit", "stop",    "delay",   "silent",
                                         "leaves", "slow", "wrong T", "bad args"};

struct round {
    uint64_t number;
    enum what what;
    int n, victim, at; /* the run in which it happens, 0 .. RUNS - 1 */
    int per_host;      /* ranks of a simulated host; 0: one host */
    dcp_merge_algo algo;
    dcp_cut cut;
    bool by_start;
    const char *point; /* of kill, exit, stop, delay: "merge", or any of the group's own */
    int count;
    bool is_loose; /* nobody can say in which call it strikes, or whether it does */
};

/* Seconds that this thread has waited for a CPU; 0 where the kernel does not say. */
static double starved_s(void)
{
    unsigned long long ran_ns = 0, waited_ns = 0;
    FILE *f = fopen("/proc/thread-self/schedstat", "r");
    if (f == NULL) return 0;
    if (fscanf(f, "%llu %llu", &ran_ns, &waited_ns) != 2) waited_ns = 0;
    (void)fclose(f);
    return 1e-9 * (double)waited_ns;
}

static dcp_status run_form(struct simple *s, const struct round *r)
{
    if (!r->by_start) return simple_run(s);
    const dcp_status st = dcp_merge_start(s->merge, &s->args);
    return st != DCP_OK ? st : dcp_merge_wait(s->merge, &s->stats);
}

static int complain(const struct round *r, int rank, int i, const char *text, dcp_status st)
{
    printf("round %llu (%s of rank %d of %d in run %d, %s, cut %d, %s), rank %d, run %d: %s: %s: "
           "%s\n",
           (unsigned long long)r->number, what_names[r->what], r->victim, r->n, r->at,
           dcp_merge_algo_name(r->algo), (int)r->cut, r->by_start ? "start" : "run", rank, i, text,
           dcp_status_text(st), dcp_last_error());
    return 1;
}

/* Also where ranks wait for each other in a chain (halving, hierarchical): its end is named. */
static bool names_victim(const struct round *r)
{
    char name[32];
    (void)snprintf(name, sizeof(name), "rank %d", r->victim);
    return strstr(dcp_last_error(), name) != NULL;
}

/* A fault somewhere: each call is right, or the first wrong one names the victim. */
static int loose_main(dcp_group *g, const struct round *r)
{
    struct simple *s = simple_new(g, r->algo);
    s->desc.cut = r->cut;
    s->desc.workspace_limit_bytes = 40000;
    dcp_status st = simple_create(s);
    for (int i = 0; st == DCP_OK && i < RUNS; i++) {
        for (int k = 0; k < SIMPLE_ELEMS; k++) s->out[k] = (float)(s->rank + 1 + i);
        st = run_form(s, r);
        const bool has_rows = r->cut != DCP_CUT_TOKENS || s->rank < SIMPLE_T;
        if (st == DCP_OK && has_rows && !NEAR(s->merged[0], i + (r->n + 1) / 2.0, 1e-5))
            return complain(r, s->rank, i, "wrong result", st);
    }
    if (st != DCP_OK && s->rank != r->victim &&
        ((st != DCP_ERR_PEER && st != DCP_ERR_TIMEOUT) || !names_victim(r)))
        return complain(r, s->rank, -1, "no such error", st);
    if (st != DCP_OK && s->merge != NULL && simple_run(s) != DCP_ERR_POISONED)
        return complain(r, s->rank, -1, "not poisoned", st);
    simple_free(s);
    return 0;
}

static int rank_main(dcp_group *g, const struct round *r)
{
    struct simple *s = simple_new(g, r->algo);
    const bool is_victim = s->rank == r->victim;
    const bool is_fatal = r->what <= LEAVES;
    s->desc.cut = r->cut;
    s->desc.workspace_limit_bytes = 40000;
    dcp_status st = simple_create(s);
    if (st != DCP_OK) return complain(r, s->rank, -1, "create", st);
    for (int i = 0; i < RUNS; i++) {
        const bool is_it = i == r->at;
        s->args.n_tokens = SIMPLE_T;
        s->args.out = s->out;
        for (int k = 0; k < SIMPLE_ELEMS; k++) s->out[k] = (float)(s->rank + 1 + i);
        if (is_it && is_victim) {
            if (r->what == SILENT) {
                awake_sleep_s(2.5 * deadline_s);
                return 0;
            }
            if (r->what == LEAVES) return 0; /* destroys its handle in peace */
            if (r->what == SLOW) (void)usleep((useconds_t)(0.3e6 * deadline_s));
            if (r->what == WRONG_T) s->args.n_tokens--;
            if (r->what == BAD_ARGS) s->args.out = NULL;
        }
        const double start = awake_s();
        const double starved = starved_s();
        st = run_form(s, r);
        const double took = awake_s() - start;
        if (is_it && is_victim && is_fatal)
            return 0; /* a delayed one comes back to a poisoned group */
        if (is_it && is_fatal) {
            /* A pause of one's own does not count towards the deadline: a rank that got no CPU for
             * as long as its peer slept has met it in time. */
            if (st == DCP_OK && r->what == DELAY && starved_s() - starved > 0.3 * deadline_s) {
                printf("round %llu: rank %d starved for %.1f s\n", (unsigned long long)r->number,
                       s->rank, starved_s() - starved);
                simple_free(s);
                return 0;
            }
            if (st != DCP_ERR_PEER && st != DCP_ERR_TIMEOUT)
                return complain(r, s->rank, i, "no such error", st);
            if (!names_victim(r)) return complain(r, s->rank, i, "not named", st);
            if (took > 4 * deadline_s + 2) return complain(r, s->rank, i, "took too long", st);
            st = run_form(s, r);
            if (st != DCP_ERR_POISONED) return complain(r, s->rank, i, "not poisoned", st);
            simple_free(s);
            return 0;
        }
        const dcp_status want = !is_it || r->what == SLOW ? DCP_OK
                                : r->what == WRONG_T      ? DCP_ERR_MISMATCH
                                                          : DCP_ERR_ARG;
        if (st != want) return complain(r, s->rank, i, "other status", st);
        const bool has_rows = r->cut != DCP_CUT_TOKENS || s->rank < SIMPLE_T;
        if (st == DCP_OK && has_rows && !NEAR(s->merged[0], i + (r->n + 1) / 2.0, 1e-5))
            return complain(r, s->rank, i, "wrong result", st);
    }
    simple_free(s);
    return 0;
}

static int run_round(const struct round *r)
{
    static const char *const kinds[] = {"kill", "exit", "stop", "delay"};
    char fault[64];
    (void)unsetenv("DCP_ATTN_FAULT");
    if (r->what <= DELAY) {
        (void)snprintf(fault, sizeof(fault), "%s:%s:%d:%d", kinds[r->what], r->point, r->victim,
                       r->count);
        (void)setenv("DCP_ATTN_FAULT", fault, 1);
    }
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = r->per_host;
    dcp_shm *shm = NULL;
    if (dcp_shm_prepare(r->n, &opts, &shm) != DCP_OK) return 1;
    fflush(stdout);
    pid_t pids[N_MAX];
    for (int rank = 0; rank < r->n; rank++) {
        pids[rank] = fork();
        if (pids[rank] < 0) abort();
        if (pids[rank] != 0) continue;
        (void)alarm((unsigned)(30.0 + 20.0 * deadline_s)); /* a hang is a failure, not a wait */
        dcp_group *g = NULL;
        int rc = 1;
        if (dcp_shm_attach(shm, rank, &g) == DCP_OK) {
            rc = r->is_loose ? loose_main(g, r) : rank_main(g, r);
            dcp_group_destroy(g);
        }
        fflush(stdout);
        _exit(rc);
    }
    int n_failed = 0;
    for (int n_left = r->n; n_left > 0; n_left--) {
        if (n_left == 1 && r->what == STOP && pids[r->victim] > 0)
            (void)kill(pids[r->victim], SIGKILL);
        int status = 0;
        const pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0) break;
        for (int rank = 0; rank < r->n; rank++) {
            if (pids[rank] != pid) continue;
            dcp_shm_report_exit(shm, rank, status);
            const bool is_fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            const bool may_die = rank == r->victim && r->what <= STOP;
            n_failed += !is_fine && !may_die;
            if (!is_fine && !may_die)
                printf("round %llu: rank %d ended with status %x\n", (unsigned long long)r->number,
                       rank, (unsigned)status);
            pids[rank] = -1;
        }
    }
    dcp_shm_release(shm);
    (void)unsetenv("DCP_ATTN_FAULT");
    return n_failed;
}

static void test_faults(void **state)
{
    (void)state;
    const char *env = getenv("DCP_ATTN_TEST_FAULTS");
    const long n_rounds = env != NULL ? atol(env) : 50;
    const char *deadline = getenv("DCP_ATTN_TEST_DEADLINE");
    if (deadline != NULL && atof(deadline) > 0) deadline_s = atof(deadline);
    const uint64_t seed = 4242;
    const char *first_text = getenv("DCP_ATTN_TEST_FIRST");
    const long first = first_text != NULL ? atol(first_text) : 0;
    print_message("%ld faults, seed %llu\n", n_rounds, (unsigned long long)seed);
    int n_failed = 0;
    for (long i = first; i < first + n_rounds; i++) {
        uint64_t rng = seed + (uint64_t)i * 65537u;
        struct round r;
        r.number = (uint64_t)i;
        r.what = (enum what)(i % WHAT_COUNT);
        r.n = 2 + (int)ref_pick(&rng, N_MAX - 1);
        r.victim = (int)ref_pick(&rng, r.n);
        r.at = (int)ref_pick(&rng, RUNS);
        r.algo = (dcp_merge_algo)(DCP_MERGE_DIRECT + ref_pick(&rng, 5));
        r.cut = (dcp_cut)ref_pick(&rng, 3);
        r.by_start = ref_pick(&rng, 3) == 0;
        static const char *const points[] = {"record", "exchange", "exchange_wait", "alloc"};
        r.is_loose = r.what <= DELAY && ref_pick(&rng, 2) == 0;
        r.point = r.is_loose ? points[ref_pick(&rng, 4)] : "merge";
        r.count = r.is_loose ? 1 + (int)ref_pick(&rng, 14) : r.at + 1;
        /* A third of the rounds each: one host, as if each rank had one, and two ranks a host. */
        r.per_host = (int)ref_pick(&rng, 3);
        if (r.per_host > 0 && r.per_host < r.n && r.algo == DCP_MERGE_DIRECT)
            r.algo = DCP_MERGE_ALLTOALL; /* direct needs memory that all see */
        n_failed += run_round(&r);
    }
    assert_int_equal(n_failed, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_faults)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
