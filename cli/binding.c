/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/binding.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/message.h"
#include "dcpattn/shard.h"

/* Runs of cores of one node. */
struct nodes {
    int n;
    int begin[TOPOLOGY_MAX_CORES + 1];
};

static void find_nodes(const struct topology_cores *cores, struct nodes *out)
{
    out->n = 0;
    for (int i = 0; i < cores->n; i++)
        if (i == 0 || cores->node[i] != cores->node[i - 1]) out->begin[out->n++] = i;
    out->begin[out->n] = cores->n;
}

/* Cores of rank r when ranks are dealt to nodes first. */
static dcp_range share_of_node(const struct nodes *nodes, int n_ranks, int r)
{
    if (n_ranks < nodes->n) {
        const dcp_range own = dcp_cut_range(nodes->n, n_ranks, r);
        return (dcp_range){nodes->begin[own.begin], nodes->begin[own.end]};
    }
    const int node = dcp_cut_owner(n_ranks, nodes->n, r);
    const dcp_range ranks = dcp_cut_range(n_ranks, nodes->n, node);
    const int64_t first = nodes->begin[node];
    const dcp_range in_node = dcp_cut_range(nodes->begin[node + 1] - first,
                                            (int)(ranks.end - ranks.begin), (int)(r - ranks.begin));
    return (dcp_range){first + in_node.begin, first + in_node.end};
}

/* By nodes if every rank finds room for its threads so, else plain contiguous shares. */
static dcp_range choose_share(const struct topology_cores *cores, int n_ranks, int r, int n_threads)
{
    struct nodes nodes;
    find_nodes(cores, &nodes);
    for (int i = 0; i < n_ranks; i++) {
        const dcp_range share = share_of_node(&nodes, n_ranks, i);
        if (share.end - share.begin < n_threads) return dcp_cut_range(cores->n, n_ranks, r);
    }
    return share_of_node(&nodes, n_ranks, r);
}

static void describe(const struct topology_cores *cores, dcp_range share, int n_threads,
                     struct binding *out)
{
    const int first = cores->node[share.begin], last = cores->node[share.end - 1];
    int n = snprintf(out->text, sizeof(out->text), "%s CPU%s",
                     out->n == n_threads ? "a thread each on" : "threads on", message_s(out->n));
    for (int i = 0; i < out->n && n < 100; i++)
        n += snprintf(out->text + n, sizeof(out->text) - (size_t)n, "%s%d", i == 0 ? " " : ",",
                      out->cpu[i]);
    if (first == last)
        snprintf(out->text + n, sizeof(out->text) - (size_t)n, " of node %d", first);
    else
        snprintf(out->text + n, sizeof(out->text) - (size_t)n, " of nodes %d to %d", first, last);
}

dcp_status binding_share(enum bind_mode mode, const struct topology_cores *cores, int n_usable,
                         int n_local, int local, int n_threads, struct binding *out)
{
    out->n = 0;
    if (mode == BIND_NONE) {
        snprintf(out->text, sizeof(out->text), "none");
        return DCP_OK;
    }
    const int n_free = cores->n > 0 && cores->n < n_usable ? cores->n : n_usable;
    if ((int64_t)n_local * n_threads > n_free) {
        snprintf(out->text, sizeof(out->text), "none: %d rank%s x %d thread%s, %d core%s to use",
                 n_local, message_s(n_local), n_threads, message_s(n_threads), n_free,
                 message_s(n_free));
    } else if (cores->n == 0) {
        snprintf(out->text, sizeof(out->text), "none: the cores are not known");
    } else {
        dcp_range share = choose_share(cores, n_local, local, n_threads);
        if (mode == BIND_CORES) share.end = share.begin + n_threads;
        for (int64_t i = share.begin; i < share.end; i++) out->cpu[out->n++] = cores->cpu[i];
        describe(cores, share, n_threads, out);
        return DCP_OK;
    }
    if (mode == BIND_CORES) return dcp__fail(DCP_ERR_ARG, "--bind cores: %s", out->text + 6);
    return DCP_OK;
}

/* Collective: n_local, n_threads, and *local_out: which of the host's ranks this is. Ranks that a
 * launcher has given different CPUs do not share them: each is alone on its own. */
static dcp_status count_local(dcp_group *g, int n_threads, int *n_sharing_out, int *local_out,
                              struct binding *out)
{
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    cpu_set_t mine, *all = NULL;
    CPU_ZERO(&mine);
    (void)sched_getaffinity(0, sizeof(mine), &mine);
    /* The group's memory: all ranks have it or none. */
    DCP_TRY(dcp_group_alloc(g, (size_t)n * sizeof(*all), (void **)&all));
    const dcp_status st = dcp_group_allgather(g, &mine, sizeof(mine), all);
    bool are_equal = true;
    out->n_local = 0;
    *local_out = 0;
    for (int r = 0; r < n && st == DCP_OK; r++) {
        if (dcp_group_host(g, r) != dcp_group_host(g, rank)) continue;
        are_equal = are_equal && CPU_EQUAL(&all[r], &mine);
        if (r < rank) ++*local_out;
        out->n_local++;
    }
    dcp_group_free(g, all);
    *n_sharing_out = are_equal ? out->n_local : 1;
    if (!are_equal) *local_out = 0;
    const int share = dcp__cpu_usable() / (*n_sharing_out > 0 ? *n_sharing_out : 1);
    out->n_threads = n_threads > 0 ? n_threads : share > 1 ? share : 1;
    return st;
}

dcp_status binding_choose(dcp_group *g, enum bind_mode mode, int n_threads, struct binding *out)
{
    int n_sharing = 1, local = 0;
    memset(out, 0, sizeof(*out));
    DCP_TRY(count_local(g, n_threads, &n_sharing, &local, out));
    struct topology_cores *cores = NULL;
    DCP_TRY(dcp__alloc(sizeof(*cores), "cores of the host", (void **)&cores));
    /* Looking takes milliseconds: not where there is nothing to decide. */
    const int n_usable = dcp__cpu_usable();
    if (mode != BIND_NONE && (int64_t)n_sharing * out->n_threads <= n_usable)
        topology_read_cores(cores);
    const dcp_status st =
        binding_share(mode, cores, n_usable, n_sharing, local, out->n_threads, out);
    dcp__free(cores);
    return st;
}

dcp_status binding_pool(dcp_group *g, enum bind_mode mode, int n_threads, dcp_pool **pool_out)
{
    struct binding b;
    dcp_pool *pool = NULL;
    DCP_TRY(binding_choose(g, mode, n_threads, &b));
    DCP_TRY(dcp_pool_create(b.n_threads, b.n_local, &pool));
    const dcp_status st = b.n > 0 ? dcp_pool_bind(pool, b.cpu, b.n) : DCP_OK;
    if (st != DCP_OK) {
        dcp_pool_destroy(pool);
        return st;
    }
    *pool_out = pool;
    return DCP_OK;
}
