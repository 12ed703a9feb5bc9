/* SPDX-License-Identifier: Apache-2.0 */
/* Time as ranks count it that wait: one in which all of the test slept (Ctrl-Z, a suspended
 * machine, all CPUs taken away) counts as half a second. For how late something may come and for
 * what must be late; a test that took "4 s at most" by the clock on the wall would fail on a
 * machine that paused. */
#ifndef DCP_TESTS_GROUP_AWAKE_H
#define DCP_TESTS_GROUP_AWAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static _Atomic int64_t awake_ns;
static _Atomic long awake_pid; /* whose clock runs: a thread does not live on in a fork */

static inline int64_t awake_wall_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void *awake_tick(void *none)
{
    const struct timespec step = {.tv_nsec = 10000000};
    int64_t last = awake_wall_ns();
    while (awake_pid == (long)getpid()) {
        nanosleep(&step, NULL);
        const int64_t now = awake_wall_ns();
        awake_ns += now - last < 500000000 ? now - last : 500000000;
        last = now;
    }
    return none;
}

/* Seconds, from any start. Under ThreadSanitizer, which bears no threads after a fork,
 * the wall's. */
static inline double awake_s(void)
{
#ifdef __SANITIZE_THREAD__
    return (double)awake_wall_ns() * 1e-9;
#else
    const long pid = (long)getpid();
    if (atomic_exchange(&awake_pid, pid) != pid) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, awake_tick, NULL) == 0) (void)pthread_detach(thread);
    }
    return (double)awake_ns * 1e-9;
#endif
}

static inline void awake_sleep_s(double s)
{
    const struct timespec step = {.tv_nsec = 5000000};
    for (const double start = awake_s(); awake_s() - start < s;) nanosleep(&step, NULL);
}

#endif
