/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fault_priv.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock_priv.h"

enum { SPEC_BYTES = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int armed; /* an enum dcp__fault_kind */
static struct {
    char spec[SPEC_BYTES];
    char point[SPEC_BYTES];
    int rank;
    long left; /* passes until it strikes */
} fault;

static const struct {
    const char *name;
    enum dcp__fault_kind kind;
} kinds[] = {
    {"kill", DCP__FAULT_KILL},
    {"stop", DCP__FAULT_STOP},
    {"exit", DCP__FAULT_EXIT},
    {"delay", DCP__FAULT_DELAY},
};

/* Every point that code passes. A name that no code passes would test nothing. */
static const char *const points[] = {
    "record",      "barrier",     "exchange", "exchange_wait", "allreduce",
    "allgather",   "gather_cols", "alloc",    "split",         "join_create",
    "join_locked", "join",        "attend",   "merge",         "start",
    "prompt",      "token",       "work",     "mpi_allreduce",
};
enum { N_POINTS = sizeof(points) / sizeof(points[0]) };

static bool is_point(const char *name)
{
    for (int i = 0; i < N_POINTS; i++) {
        if (strcmp(points[i], name) == 0) return true;
    }
    return false;
}

static dcp_status fail_point(const char *name)
{
    char all[256] = "";
    size_t used = 0;
    for (int i = 0; i < N_POINTS && used < sizeof(all); i++) {
        used += (size_t)snprintf(all + used, sizeof(all) - used, " %s", points[i]);
    }
    return dcp__fail(DCP_ERR_ARG, "DCP_ATTN_FAULT: there is no point \"%.40s\"; there are%s", name,
                     all);
}

static bool parse(const char *spec, enum dcp__fault_kind *kind_out, char *point, int *rank_out,
                  long *count_out)
{
    char name[SPEC_BYTES];
    int rank = -1, used = 0;
    long count = 1;
    if (strlen(spec) >= SPEC_BYTES) return false;
    if (sscanf(spec, "%127[^:]:%127[^:]:%d%n", name, point, &rank, &used) != 3 || rank < 0) {
        return false;
    }
    if (spec[used] == ':') {
        int more = 0;
        if (sscanf(spec + used, ":%ld%n", &count, &more) != 1 || count < 1) return false;
        used += more;
    }
    if (spec[used] != '\0') return false;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(kinds[i].name, name) != 0) continue;
        *kind_out = kinds[i].kind;
        *rank_out = rank;
        *count_out = count;
        return true;
    }
    return false;
}

dcp_status dcp__fault_load(enum dcp__fault_kind *kind_out, int *rank_out)
{
    const char *spec = getenv("DCP_ATTN_FAULT");
    if (spec == NULL) spec = "";
    dcp_status st = DCP_OK;
    pthread_mutex_lock(&lock);
    if (strcmp(spec, fault.spec) != 0) {
        enum dcp__fault_kind kind = DCP__FAULT_NONE;
        atomic_store(&armed, DCP__FAULT_NONE);
        fault.spec[0] = '\0';
        if (spec[0] != '\0' && !parse(spec, &kind, fault.point, &fault.rank, &fault.left)) {
            st = dcp__fail(
                DCP_ERR_ARG,
                "DCP_ATTN_FAULT is \"%s\"; wanted kill|stop|exit|delay:POINT:RANK[:COUNT]", spec);
        } else if (spec[0] != '\0' && !is_point(fault.point)) {
            st = fail_point(fault.point);
        } else {
            snprintf(fault.spec, sizeof(fault.spec), "%s", spec);
            atomic_store(&armed, (int)kind);
        }
    }
    if (kind_out != NULL) *kind_out = (enum dcp__fault_kind)atomic_load(&armed);
    if (rank_out != NULL) *rank_out = fault.rank;
    pthread_mutex_unlock(&lock);
    return st;
}

enum { STEP_NS = 10000000, PAUSE_NS = 500000000 };

/* A longer gap than PAUSE_NS is a sleep of the whole run (Ctrl-Z, a suspended machine) and counts
 * as that: those who wait for this rank count theirs so,
 * and what is too late for them must stay it. */
static void delay(double s)
{
    int64_t left = (int64_t)(s * 1e9), last = dcp__now_ns();
    const struct timespec step = {.tv_nsec = STEP_NS};
    while (left > 0) {
        nanosleep(&step, NULL);
        const int64_t now = dcp__now_ns();
        left -= now - last < PAUSE_NS ? now - last : PAUSE_NS;
        last = now;
    }
}

/* For good: whoever wakes all of a machine's processes wakes this one in vain. */
static void stop(void)
{
    for (;;) kill(getpid(), SIGSTOP);
}

void dcp__fault_pass(const char *point, int rank, double delay_s)
{
    if (atomic_load_explicit(&armed, memory_order_relaxed) == DCP__FAULT_NONE) return;
    pthread_mutex_lock(&lock);
    enum dcp__fault_kind kind = (enum dcp__fault_kind)atomic_load(&armed);
    if (rank != fault.rank || strcmp(point, fault.point) != 0 || --fault.left > 0) {
        kind = DCP__FAULT_NONE;
    } else {
        atomic_store(&armed, DCP__FAULT_NONE);
    }
    pthread_mutex_unlock(&lock);
    switch (kind) {
    case DCP__FAULT_NONE:
        break;
    case DCP__FAULT_KILL:
        kill(getpid(), SIGKILL);
        break;
    case DCP__FAULT_STOP:
        stop();
        break;
    case DCP__FAULT_EXIT:
        _exit(3);
    case DCP__FAULT_DELAY:
        delay(delay_s);
        break;
    }
}
