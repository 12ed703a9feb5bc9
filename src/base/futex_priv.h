/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping on a word of memory, between threads and between processes that map it. */
#ifndef DCP_BASE_FUTEX_PRIV_H
#define DCP_BASE_FUTEX_PRIV_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleep while *word == expected, at most timeout_ns (>= 0). Returns early for any reason: the
 * caller loops over its own condition. The word may lie in memory shared between processes. */
void dcp__futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns);
/* Wake at most n_waiters. */
void dcp__futex_wake(_Atomic uint32_t *word, int n_waiters);

/* A hint that this is a spin loop. */
static inline void dcp__cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
