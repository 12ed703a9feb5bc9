/* SPDX-License-Identifier: Apache-2.0 */
/* The deadline of a call that has none: MPI's blocking all-reduce. */
#ifndef DCP_CLI_BENCH_WATCH_H
#define DCP_CLI_BENCH_WATCH_H

#include <stdbool.h>

#include "dcpattn/dcpattn.h"

struct bench_watch;

/* Collective. Until bench_watch_stop, a rank that stays in such a call for the group's deadline
 * says which ranks of its host are stopped or gone, and its process ends with exit code 1: MPI's
 * launcher ends the others. Where it sees none, which may be a call that is only slow, after four
 * deadlines. Nothing to do, and *watch_out NULL, where the ranks are not MPI's.
 * *is_told_out with an error: all ranks know of it and it has been said. */
dcp_status bench_watch_start(dcp_group *g, struct bench_watch **watch_out, bool *is_told_out);
void bench_watch_stop(struct bench_watch *watch); /* takes NULL */

#endif
