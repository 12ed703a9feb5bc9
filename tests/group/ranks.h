/* SPDX-License-Identifier: Apache-2.0 */
/* Run a function on all ranks of a threads or shm group; for tests. */
#ifndef DCP_TESTS_GROUP_RANKS_H
#define DCP_TESTS_GROUP_RANKS_H

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dcpattn/group.h"

typedef int rank_fn(dcp_group *g, void *ctx);

struct ranks_thread {
    pthread_t thread;
    dcp_group *g;
    rank_fn *fn;
    void *ctx;
    int result;
};

static inline void *ranks_thread_main(void *arg)
{
    struct ranks_thread *t = arg;
    t->result = t->fn(t->g, t->ctx);
    dcp_group_destroy(t->g);
    return NULL;
}

static int ranks_per_host; /* of the groups that are made */

/* The sum of what fn returned; -1 if the group could not be made. */
static inline int ranks_threads(int n, double deadline_s, rank_fn *fn, void *ctx)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = ranks_per_host;
    dcp_group **groups = calloc((size_t)n, sizeof(*groups));
    struct ranks_thread *threads = calloc((size_t)n, sizeof(*threads));
    int sum = -1;
    if (dcp_group_create_threads(n, &opts, groups) == DCP_OK) {
        sum = 0;
        for (int r = 0; r < n; r++) {
            threads[r].g = groups[r];
            threads[r].fn = fn;
            threads[r].ctx = ctx;
            pthread_create(&threads[r].thread, NULL, ranks_thread_main, &threads[r]);
        }
        for (int r = 0; r < n; r++) {
            pthread_join(threads[r].thread, NULL);
            sum += threads[r].result;
        }
    } else {
        fprintf(stderr, "create_threads(%d): %s\n", n, dcp_last_error());
    }
    free(threads);
    free(groups);
    return sum;
}

/* Exit codes of fn summed; a rank that a signal killed adds nothing and is reported to its peers.
 * Stopped ranks are killed once all others have ended. */
static inline int ranks_shm(int n, double deadline_s, rank_fn *fn, void *ctx)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = ranks_per_host;
    dcp_shm *shm = NULL;
    if (dcp_shm_prepare(n, &opts, &shm) != DCP_OK) {
        fprintf(stderr, "shm_prepare(%d): %s\n", n, dcp_last_error());
        return -1;
    }
    fflush(NULL);
    pid_t *pids = calloc((size_t)n, sizeof(*pids));
    int *stopped = calloc((size_t)n, sizeof(*stopped));
    for (int r = 0; r < n; r++) {
        pids[r] = fork();
        if (pids[r] != 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dcp_group *g = NULL;
        int rc = 99;
        if (dcp_shm_attach(shm, r, &g) == DCP_OK) {
            dcp_shm_release(shm);
            rc = fn(g, ctx);
            dcp_group_destroy(g);
        } else {
            fprintf(stderr, "shm_attach(%d): %s\n", r, dcp_last_error());
        }
        _exit(rc > 99 ? 99 : rc);
    }
    int sum = 0, n_alive = n, n_stopped = 0;
    while (n_alive > 0) {
        int status;
        const pid_t pid = waitpid(-1, &status, WUNTRACED);
        if (pid < 0) break;
        for (int r = 0; r < n; r++) {
            if (pids[r] != pid) continue;
            if (WIFSTOPPED(status)) {
                stopped[r] = 1;
                n_stopped++;
            } else {
                dcp_shm_report_exit(shm, r, status);
                n_alive--;
                if (stopped[r]) n_stopped--;
                stopped[r] = 0;
                if (WIFEXITED(status)) sum += WEXITSTATUS(status);
            }
        }
        if (n_alive == n_stopped) {
            for (int r = 0; r < n; r++) {
                if (stopped[r]) kill(pids[r], SIGKILL);
            }
        }
    }
    dcp_shm_release(shm);
    free(stopped);
    free(pids);
    return sum;
}

#endif
