/* SPDX-License-Identifier: Apache-2.0 */
/* The published merge is measured with MPI's blocking all-reduce, at its best: a nonblocking one,
 * which could be tested until a deadline, is another algorithm and slower. Who is in it waits for
 * ever for a rank that is stopped, so a thread of each rank looks at the clock every LOOK_NS. All
 * ranks have met just before, so that whoever is missing is stopped or gone, which /proc shows for
 * the ranks of this host. Between looks the thread sleeps: of medians of bench merge with and
 * without it (2 ranks, Open MPI, 1 and 64 tokens of 96 x 512) none was told from the other. */
#include "cli/bench_watch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/launch.h"
#include "group/group_priv.h"

/* A longer gap than PAUSE_NS is a sleep of the whole run (Ctrl-Z, a suspended machine) and counts
 * as that, as in the group's own waits. */
enum { LOOK_NS = 50000000, PAUSE_NS = 500000000, FORWARD_NS = 200000000, TEXT_BYTES = 400 };
/* Deadlines that a call gets where nobody is seen to be missing. */
enum { PATIENCE = 4 };
/* Ranks that see nobody missing let others speak first: it may be one of another host. */
static const long unknowing_ns = 700000000;

struct bench_watch {
    dcp_group *g;
    double deadline_s;
    pthread_t thread;
    atomic_bool is_over;
    int pids[]; /* [n]; written before the first call that is watched */
};

static void pause_ns(long ns)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = ns};
    (void)nanosleep(&pause, NULL);
}

/* "rank 1 (pid 77 is stopped)" of each rank of this host that is, and whether any is. */
static bool list_missing(const struct bench_watch *w, char *text, size_t n_bytes)
{
    const int me = dcp_group_rank(w->g);
    const bool has_proc = dcp__process_state((int)getpid()) != '\0';
    size_t used = 0;
    bool has_seen = false;
    for (int r = 0; has_proc && r < dcp_group_size(w->g) && used < n_bytes; r++) {
        if (r == me || dcp_group_host(w->g, r) != dcp_group_host(w->g, me)) continue;
        has_seen = true;
        const char state = dcp__process_state(w->pids[r]);
        const bool is_stopped = state == 'T' || state == 't';
        if (!is_stopped && state != '\0' && state != 'Z' && state != 'X') continue;
        used +=
            (size_t)snprintf(text + used, n_bytes - used, "%srank %d (pid %d is %s)",
                             used > 0 ? ", " : "", r, w->pids[r], is_stopped ? "stopped" : "gone");
    }
    if (used == 0)
        snprintf(text, n_bytes, "(MPI does not say which ranks%s)",
                 has_seen ? "; no other of this host is stopped" : "");
    return used > 0;
}

/* Of the call that has begun at since and not come back for waited_s: at its deadline where a rank
 * is seen to be missing; later where none is, for it may be only slow. */
static void look(const struct bench_watch *w, int64_t since, double waited_s)
{
    char missing[TEXT_BYTES], text[TEXT_BYTES + 100];
    if (!list_missing(w, missing, sizeof(missing))) {
        if (waited_s < PATIENCE * w->deadline_s) return;
        pause_ns(unknowing_ns);
        if (dcp__group_unguarded_since(w->g) != since) return;
    }
    snprintf(text, sizeof(text), "MPI_Allreduce has not come back for %.1f s; missing: %s",
             waited_s, missing);
    launch_tell(w->g, DCP_ERR_TIMEOUT, text);
    fflush(stderr);
    pause_ns(FORWARD_NS); /* what a launcher has not forwarded by then is lost */
    _exit(EXIT_FAILED);
}

static void *watch_main(void *arg)
{
    struct bench_watch *const w = arg;
    int64_t begin = 0, waited = 0, last = dcp__now_ns();
    while (!atomic_load(&w->is_over)) {
        pause_ns(LOOK_NS);
        const int64_t now = dcp__now_ns();
        const int64_t since = dcp__group_unguarded_since(w->g);
        if (since != begin) {
            begin = since;
            waited = 0;
        } else if (begin != 0) {
            waited += now - last < PAUSE_NS ? now - last : PAUSE_NS;
            const double waited_s = (double)waited * 1e-9;
            if (waited_s >= w->deadline_s) look(w, since, waited_s);
        }
        last = now;
    }
    return NULL;
}

static dcp_status start_here(dcp_group *g, struct bench_watch **watch_out)
{
    void *mem = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct bench_watch) + (size_t)dcp_group_size(g) * sizeof(int),
                       "watch of a bench", &mem));
    struct bench_watch *const w = mem;
    w->g = g;
    w->deadline_s = dcp_group_deadline(g);
    const int rc = pthread_create(&w->thread, NULL, watch_main, w);
    if (rc != 0) {
        dcp__free(w);
        return dcp__fail(DCP_ERR_SYS, "cannot start the thread that watches MPI: %s", strerror(rc));
    }
    *watch_out = w;
    return DCP_OK;
}

dcp_status bench_watch_start(dcp_group *g, struct bench_watch **watch_out, bool *is_told_out)
{
    *watch_out = NULL;
    *is_told_out = false;
    if (strcmp(dcp_group_kind(g), "mpi") != 0 || dcp_group_size(g) == 1) return DCP_OK;
    const dcp_status own = start_here(g, watch_out);
    *is_told_out = !all_ranks_ok(g, own);
    if (*is_told_out) return own != DCP_OK ? own : DCP_ERR_PEER;
    const int pid = (int)getpid();
    return dcp_group_allgather(g, &pid, sizeof(pid), (*watch_out)->pids);
}

void bench_watch_stop(struct bench_watch *watch)
{
    if (watch == NULL) return;
    atomic_store(&watch->is_over, true);
    (void)pthread_join(watch->thread, NULL);
    dcp__free(watch);
}
