/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks for the merge's tests: threads of this process, or forked processes over shared memory. */
#ifndef TEST_MERGE_RANKS_H
#define TEST_MERGE_RANKS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dcpattn/merge.h"

enum { RANKS_MAX = 64 };
/* Simulated hosts of the groups to be made: 0 = one. */
static int ranks_per_host;

/* Returns the number of failures it printed. */
typedef int ranks_fn(dcp_group *g, void *user);

struct ranks_thread {
    dcp_group *g;
    ranks_fn *fn;
    void *user;
    int n_failed;
};

static inline void *ranks_main(void *arg)
{
    struct ranks_thread *t = arg;
    t->n_failed = t->fn(t->g, t->user);
    dcp_group_destroy(t->g);
    return NULL;
}

/* fn on n threads, one a rank; user is shared. Returns the sum of failures. */
static inline int ranks_threads(int n, double deadline_s, ranks_fn *fn, void *user)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = ranks_per_host;
    dcp_group *groups[RANKS_MAX] = {NULL};
    if (dcp_group_create_threads(n, &opts, groups) != DCP_OK) {
        printf("group: %s\n", dcp_last_error());
        return 1;
    }
    pthread_t ids[RANKS_MAX];
    struct ranks_thread threads[RANKS_MAX];
    for (int r = 0; r < n; r++) {
        threads[r] = (struct ranks_thread){groups[r], fn, user, 0};
        if (pthread_create(&ids[r], NULL, ranks_main, &threads[r]) != 0) abort();
    }
    int n_failed = 0;
    for (int r = 0; r < n; r++) {
        (void)pthread_join(ids[r], NULL);
        n_failed += threads[r].n_failed;
    }
    return n_failed;
}

/* fn in n forked processes. Returns how many did not exit with 0. */
static inline int ranks_shm(int n, double deadline_s, ranks_fn *fn, void *user)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = deadline_s;
    opts.ranks_per_host = ranks_per_host;
    dcp_shm *shm = NULL;
    if (dcp_shm_prepare(n, &opts, &shm) != DCP_OK) {
        printf("shm: %s\n", dcp_last_error());
        return 1;
    }
    fflush(stdout);
    pid_t pids[RANKS_MAX];
    for (int r = 0; r < n; r++) {
        pids[r] = fork();
        if (pids[r] < 0) abort();
        if (pids[r] != 0) continue;
        dcp_group *g = NULL;
        int rc = 1;
        if (dcp_shm_attach(shm, r, &g) == DCP_OK) {
            rc = fn(g, user) != 0;
            dcp_group_destroy(g);
        } else {
            printf("attach: %s\n", dcp_last_error());
        }
        dcp_shm_release(shm);
        fflush(stdout);
        _exit(rc);
    }
    int n_failed = 0;
    for (int i = 0; i < n; i++) {
        int status = 0;
        const pid_t pid = wait(&status);
        for (int r = 0; r < n; r++) {
            if (pids[r] == pid) dcp_shm_report_exit(shm, r, status);
        }
        n_failed += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    dcp_shm_release(shm);
    return n_failed;
}

#endif
