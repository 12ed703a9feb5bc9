/* SPDX-License-Identifier: Apache-2.0 */
/* Faults on request, for tests: DCP_ATTN_FAULT="kill|stop|exit|delay:POINT:RANK[:COUNT]" strikes
 * when RANK passes the named POINT for the COUNT-th time (default 1), once per process. The points
 * are listed in fault.c: a new one goes there. "work" is for tests of their own. */
#ifndef DCP_BASE_FAULT_PRIV_H
#define DCP_BASE_FAULT_PRIV_H

#include <stdbool.h>

#include "base/status_priv.h"

enum dcp__fault_kind {
    DCP__FAULT_NONE = 0,
    DCP__FAULT_KILL,  /* SIGKILL to the own process */
    DCP__FAULT_STOP,  /* SIGSTOP to the own process */
    DCP__FAULT_EXIT,  /* _exit(3) */
    DCP__FAULT_DELAY, /* sleep delay_s of the point */
};

/* Read the environment (each group create does). The count goes on where the text is unchanged.
 * ARG: not of the form above, or no such point. kind_out and rank_out may be NULL. */
dcp_status dcp__fault_load(enum dcp__fault_kind *kind_out, int *rank_out);
/* rank passes point. A test of one word unless a fault is armed. */
void dcp__fault_pass(const char *point, int rank, double delay_s);

#endif
