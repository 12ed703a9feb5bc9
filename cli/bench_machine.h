/* SPDX-License-Identifier: Apache-2.0 */
/* What a bench asks the kernel: CPUs to sit on, resident memory, load. */
#ifndef DCP_CLI_BENCH_MACHINE_H
#define DCP_CLI_BENCH_MACHINE_H

#include "dcpattn/dcpattn.h"

/* Collective. Put each rank on a CPU of its own where there are enough; text says what was done
 * ("rank r on CPU r of 0,1", "left to the launcher", "no: 4 ranks, 2 CPUs"). The same on all ranks.
 * Threads are bound one by one. */
dcp_status bench_pin(dcp_group *g, char *text, size_t n_bytes);

/* Proportional set size of this process: shared pages count 1/n of those who map them; -1 if the
 * kernel does not say. */
int64_t bench_pss_bytes(void);
/* Start a new high-water mark of the resident set; then what it has grown since. -1 as above. */
int64_t bench_resident_mark(void);
int64_t bench_resident_peak(void);
int64_t bench_available_bytes(void);
double bench_load(void); /* of the last minute; -1 if unknown */

#endif
