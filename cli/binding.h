/* SPDX-License-Identifier: Apache-2.0 */
/* Where the threads of this host's ranks run, so that a rank's memory lies near its cores. */
#ifndef DCP_CLI_BINDING_H
#define DCP_CLI_BINDING_H

#include "cli/topology.h"
#include "dcpattn/group.h"
#include "dcpattn/pool.h"

#define BIND_CHOICES "auto|none|cores"
enum bind_mode { BIND_AUTO, BIND_NONE, BIND_CORES };
#define BIND_OPTION(type, at)                                                                      \
    {                                                                                              \
        "bind", 0, OPT_ENUM, offsetof(type, at.bind), NULL, 0, 0, BIND_CHOICES,                    \
            "auto: a rank's threads to its share of the cores, where ranks x threads fit; cores: " \
            "each thread to a core of its own (default auto)"                                      \
    }

/* The CPUs of a rank's threads: n = threads: one each; more: all threads on all of them; 0: not
 * bound. */
struct binding {
    int n;
    int cpu[TOPOLOGY_MAX_CORES];
    char text[160]; /* what it is, or why there is none */
    /* of binding_choose */
    int n_local;   /* ranks of this host */
    int n_threads; /* of this rank */
};

/* The share of cores of rank `local` of n_local on this host, n_threads each; n_usable: cores that
 * may be busy (a quota). Ranks are spread over the NUMA nodes, each within one where that is
 * possible; no core is given twice.
 *
 *     2 nodes of 4 cores     |0 1 2 3|4 5 6 7|
 *     2 ranks                 r0......|r1.....
 *     3 ranks                 r0..|r1..|r2....      more ranks than nodes: nodes share them out
 *     1 rank                  r0..............
 *
 * Pure. DCP_ERR_ARG where mode is BIND_CORES and that cannot be. */
dcp_status binding_share(enum bind_mode mode, const struct topology_cores *cores, int n_usable,
                         int n_local, int local, int n_threads, struct binding *out);

/* Collective: this rank's binding among the ranks of its host; n_threads 0: the usable CPUs shared
 * out. Where a launcher has bound the ranks already, each to CPUs of its own, a rank's share is
 * what it was given. What comes of it is each rank's own (hosts differ):
 * let the ranks agree on it. */
dcp_status binding_choose(dcp_group *g, enum bind_mode mode, int n_threads, struct binding *out);
/* Collective: a pool of n_threads of this rank, bound so. */
dcp_status binding_pool(dcp_group *g, enum bind_mode mode, int n_threads, dcp_pool **pool_out);

#endif
