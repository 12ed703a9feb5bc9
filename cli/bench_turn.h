/* SPDX-License-Identifier: Apache-2.0 */
/* When a rank was in its turn of a bench, and how long that makes the turn of all ranks. */
#ifndef DCP_CLI_BENCH_TURN_H
#define DCP_CLI_BENCH_TURN_H

#include "dcpattn/dcpattn.h"

struct bench_turn {
    int64_t begin, end; /* dcp__now_ns of the rank's machine */
    uint64_t clock;     /* whose clock that is; bench_turn_times fills it in */
};

/* Collective: us_out [n] are the times of n turns, each from the start of the first rank to the end
 * of the last one. The longest of the ranks' own times would leave out what a rank waits for a CPU
 * before it starts: where ranks outnumber CPUs they come one after the other, each with the
 * memory's whole bandwidth. Ranks whose machines have clocks of their own are taken machine by
 * machine; the longest counts. n >= 1 and the same on all ranks;
 * room [ranks of g][n] is written over. */
dcp_status bench_turn_times(dcp_group *g, struct bench_turn *own, int64_t n,
                            struct bench_turn *room, double *us_out);

#endif
