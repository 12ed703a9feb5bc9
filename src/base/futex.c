/* SPDX-License-Identifier: Apache-2.0 */
#include "base/futex_priv.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(_Atomic uint32_t) == 4, "a futex is a plain 32-bit word");

void dcp__futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns)
{
    if (timeout_ns < 0) timeout_ns = 0;
    const struct timespec ts = {.tv_sec = (time_t)(timeout_ns / 1000000000),
                                .tv_nsec = (long)(timeout_ns % 1000000000)};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, NULL, 0);
}

void dcp__futex_wake(_Atomic uint32_t *word, int n_waiters)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, n_waiters, NULL, NULL, 0);
}
