/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's shape, by hwloc where the command was built with it. */
#ifndef DCP_CLI_TOPOLOGY_H
#define DCP_CLI_TOPOLOGY_H

#include <stdbool.h>
#include <stdint.h>

struct topology {
    bool is_known; /* false: built without hwloc, or it could not look */
    int packages, numa_nodes, cores, threads;
    uint64_t l1d_bytes, l2_bytes, l3_bytes; /* of one cache; 0 = none */
    int l3_caches;
};
void topology_read(struct topology *out);

/* Cores that the calling thread may run on, neighbours side by side: one allowed CPU of each, and
 * its NUMA node. */
enum { TOPOLOGY_MAX_CORES = 4096 };
struct topology_cores {
    int n; /* 0 = not known */
    int cpu[TOPOLOGY_MAX_CORES], node[TOPOLOGY_MAX_CORES];
};
void topology_read_cores(struct topology_cores *out);

#endif
