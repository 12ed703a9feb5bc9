/* SPDX-License-Identifier: Apache-2.0 */
/* Fork-join where nobody waits for a sleeper: a run is done when its items are, whether or not
 * every worker woke in time. One word says whether a run may be joined and how many workers are
 * inside:
 *
 *   state   31..16 number of the run | 15 open | 14..0 workers inside
 *
 * A worker joins with a compare-and-swap while the run is open; the fields of the run stay as they
 * are until the caller has closed it and the last worker inside has left. */
#include "base/pool_priv.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/futex_priv.h"

enum {
    MAX_THREADS = 4096,
    MAX_CPUS = 65536,
    SPIN_NS = 20000,   /* gap between two products of a layer: a few us */
    YIELD_NS = 200000, /* gap while ranks meet */
    SLEEP_NS = 100000000
};
#define STATE_OPEN 0x8000u
#define STATE_INSIDE 0x7fffu
#define STATE_RUN_ONE 0x10000u

struct worker {
    struct dcp_pool *pool;
    pthread_t thread;
    int index;
};

struct dcp_pool {
    _Alignas(64) _Atomic uint32_t state;
    _Alignas(64) _Atomic int64_t next_item;
    _Alignas(64) _Atomic uint32_t n_runs; /* what sleepers sleep on */
    _Atomic uint32_t n_sleepers;
    _Atomic uint32_t caller_sleeps;
    _Atomic bool stop;
    /* of the open run */
    dcp__pool_fn *fn;
    void *ctx;
    int64_t n_items;

    int n_threads;
    bool may_spin;
    struct worker *workers; /* [n_threads - 1] */
};

static void do_items(struct dcp_pool *p, int thread)
{
    for (;;) {
        const int64_t item = atomic_fetch_add_explicit(&p->next_item, 1, memory_order_relaxed);
        if (item >= p->n_items) return;
        p->fn(p->ctx, item, thread);
    }
}

static bool try_join(struct dcp_pool *p, uint32_t state)
{
    return atomic_compare_exchange_strong_explicit(&p->state, &state, state + 1,
                                                   memory_order_acquire, memory_order_relaxed);
}

static void leave(struct dcp_pool *p)
{
    const uint32_t after = atomic_fetch_sub(&p->state, 1) - 1;
    if ((after & (STATE_OPEN | STATE_INSIDE)) == 0 && atomic_load(&p->caller_sleeps) != 0) {
        dcp__futex_wake(&p->state, 1);
    }
}

static void *work(void *arg)
{
    struct worker *const w = arg;
    struct dcp_pool *const p = w->pool;
    uint32_t last_run = ~0u; /* the run this worker has finished with */
    int64_t idle_since = dcp__now_ns();
    for (unsigned round = 0;; round++) {
        const uint32_t seen = atomic_load(&p->n_runs);
        const uint32_t state = atomic_load_explicit(&p->state, memory_order_relaxed);
        const uint32_t run = state / STATE_RUN_ONE;
        if ((state & STATE_OPEN) != 0 && run != last_run) {
            if (!try_join(p, state)) continue;
            do_items(p, w->index);
            leave(p);
            last_run = run;
            idle_since = dcp__now_ns();
            round = 0;
            continue;
        }
        if (atomic_load_explicit(&p->stop, memory_order_relaxed)) return NULL;
        if (p->may_spin && round % 64 != 63) {
            dcp__cpu_relax();
            continue;
        }
        const int64_t idle_ns = dcp__now_ns() - idle_since;
        if (p->may_spin && idle_ns < SPIN_NS) continue;
        if (idle_ns < YIELD_NS) {
            sched_yield();
            continue;
        }
        /* The caller adds to n_runs before it looks at n_sleepers, this side the other way round:
         * one of the two sees the other. */
        atomic_fetch_add(&p->n_sleepers, 1);
        if (atomic_load(&p->n_runs) == seen) dcp__futex_wait(&p->n_runs, seen, SLEEP_NS);
        atomic_fetch_sub(&p->n_sleepers, 1);
    }
}

static void wake_sleepers(struct dcp_pool *p, int64_t n_wanted)
{
    atomic_fetch_add(&p->n_runs, 1);
    const uint32_t n_sleepers = atomic_load(&p->n_sleepers);
    if (n_sleepers == 0) return;
    dcp__futex_wake(&p->n_runs, n_wanted < n_sleepers ? (int)n_wanted : (int)n_sleepers);
}

static void wait_all_left(struct dcp_pool *p)
{
    int64_t since = 0;
    for (unsigned round = 0;; round++) {
        const uint32_t state = atomic_load_explicit(&p->state, memory_order_acquire);
        if ((state & STATE_INSIDE) == 0) return;
        if (p->may_spin && round % 64 != 63) {
            dcp__cpu_relax();
            continue;
        }
        const int64_t now = dcp__now_ns();
        if (since == 0) since = now;
        if (p->may_spin && now - since < SPIN_NS) continue;
        if (now - since < YIELD_NS) {
            sched_yield();
            continue;
        }
        atomic_store(&p->caller_sleeps, 1);
        if (atomic_load(&p->state) == state) dcp__futex_wait(&p->state, state, SLEEP_NS);
        atomic_store(&p->caller_sleeps, 0);
    }
}

void dcp__pool_run(struct dcp_pool *p, int64_t n_items, dcp__pool_fn *fn, void *ctx)
{
    if (p == NULL || p->n_threads == 1 || n_items <= 1) {
        for (int64_t item = 0; item < n_items; item++) fn(ctx, item, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n_items = n_items;
    atomic_store_explicit(&p->next_item, 0, memory_order_relaxed);
    const uint32_t state = atomic_load_explicit(&p->state, memory_order_relaxed);
    atomic_store(&p->state, (state & ~(STATE_RUN_ONE - 1)) + STATE_RUN_ONE + STATE_OPEN);
    wake_sleepers(p, n_items - 1);
    do_items(p, 0);
    atomic_fetch_and(&p->state, ~STATE_OPEN);
    wait_all_left(p);
}

/* Signals belong to the program's own threads. */
static int start_worker(struct worker *w)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&w->thread, NULL, work, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

static void stop_workers(struct dcp_pool *p, int n_started)
{
    atomic_store(&p->stop, true);
    wake_sleepers(p, MAX_THREADS);
    for (int i = 0; i < n_started; i++) pthread_join(p->workers[i].thread, NULL);
}

dcp_status dcp_pool_create(int n_threads, int n_ranks, dcp_pool **pool_out)
{
    if (pool_out == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_pool_create: pool_out is NULL");
    if (n_ranks < 1) {
        return dcp__fail(DCP_ERR_ARG, "dcp_pool_create: %d ranks on this host; at least 1",
                         n_ranks);
    }
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return dcp__fail(DCP_ERR_ARG, "%d threads asked for; 1 to %d are possible", n_threads,
                         MAX_THREADS);
    }
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct dcp_pool), "thread pool", &mem));
    struct dcp_pool *const p = mem;
    p->n_threads = n_threads;
    /* A thread that spins keeps others off its CPU: those of the other ranks too. */
    p->may_spin = (int64_t)n_threads * n_ranks <= dcp__cpu_usable();
    dcp_status st = dcp__alloc_array((size_t)n_threads - 1, sizeof(struct worker),
                                     "workers of a thread pool", &mem);
    if (st != DCP_OK) goto err_pool;
    p->workers = mem;
    for (int i = 0; i < n_threads - 1; i++) {
        p->workers[i] = (struct worker){.pool = p, .index = i + 1};
        const int rc = start_worker(&p->workers[i]);
        if (rc != 0) {
            stop_workers(p, i);
            st = dcp__fail(DCP_ERR_SYS, "cannot start thread %d of %d: %s", i + 1, n_threads - 1,
                           strerror(rc));
            goto err_workers;
        }
    }
    *pool_out = p;
    return DCP_OK;
err_workers:
    dcp__free(p->workers);
err_pool:
    dcp__free(p);
    return st;
}

void dcp_pool_destroy(struct dcp_pool *p)
{
    if (p == NULL) return;
    stop_workers(p, p->n_threads - 1);
    dcp__free(p->workers);
    dcp__free(p);
}

static dcp_status check_cpus(const struct dcp_pool *p, const int *cpus, int n_cpus)
{
    if (p == NULL || cpus == NULL) {
        return dcp__fail(DCP_ERR_ARG, "dcp_pool_bind: %s is NULL", p == NULL ? "pool" : "cpus");
    }
    if (n_cpus < p->n_threads) {
        return dcp__fail(DCP_ERR_ARG, "dcp_pool_bind: %d CPUs for %d threads; at least as many",
                         n_cpus, p->n_threads);
    }
    for (int i = 0; i < n_cpus; i++) {
        if (cpus[i] < 0 || cpus[i] >= MAX_CPUS) {
            return dcp__fail(DCP_ERR_ARG, "dcp_pool_bind: cpus[%d] is %d, must be 0 to %d", i,
                             cpus[i], MAX_CPUS - 1);
        }
        for (int j = 0; j < i; j++) {
            if (cpus[j] == cpus[i])
                return dcp__fail(DCP_ERR_ARG, "dcp_pool_bind: cpus[%d] and cpus[%d] are both %d", j,
                                 i, cpus[i]);
        }
    }
    return DCP_OK;
}

static dcp_status bind_threads(const struct dcp_pool *p, const int *cpus, int n_cpus,
                               cpu_set_t *set, size_t set_bytes)
{
    for (int t = 0; t < p->n_threads; t++) {
        const bool is_own = n_cpus == p->n_threads; /* a CPU each */
        CPU_ZERO_S(set_bytes, set);
        for (int i = is_own ? t : 0; i < (is_own ? t + 1 : n_cpus); i++)
            CPU_SET_S((size_t)cpus[i], set_bytes, set);
        const pthread_t thread = t == 0 ? pthread_self() : p->workers[t - 1].thread;
        const int rc = pthread_setaffinity_np(thread, set_bytes, set);
        if (rc != 0) {
            return dcp__fail(
                DCP_ERR_SYS, "dcp_pool_bind: thread %d of %d cannot be bound to CPU %d%s: %s", t,
                p->n_threads, cpus[is_own ? t : 0], is_own ? "" : " and others", strerror(rc));
        }
    }
    return DCP_OK;
}

dcp_status dcp_pool_bind(struct dcp_pool *p, const int *cpus, int n_cpus)
{
    DCP_TRY(check_cpus(p, cpus, n_cpus));
    cpu_set_t *const set = CPU_ALLOC(MAX_CPUS);
    const size_t set_bytes = CPU_ALLOC_SIZE(MAX_CPUS);
    if (set == NULL)
        return dcp__fail(DCP_ERR_NOMEM, "dcp_pool_bind: no memory for %zu bytes", set_bytes);
    const dcp_status st = bind_threads(p, cpus, n_cpus, set, set_bytes);
    CPU_FREE(set);
    return st;
}

size_t dcp__pool_bytes(int n_threads)
{
    return sizeof(struct dcp_pool) + ((size_t)n_threads - 1) * sizeof(struct worker);
}

int dcp__pool_threads(const struct dcp_pool *p)
{
    return p == NULL ? 1 : p->n_threads;
}
