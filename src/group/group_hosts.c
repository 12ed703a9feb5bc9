/* SPDX-License-Identifier: Apache-2.0 */
/* Options, and which ranks see each other's memory. A host is a set of ranks with common group
 * memory; simulated hosts hide memory that is there, so that one machine takes a cluster's paths:
 *
 *   ranks     0 1 2 3 4 5 6       ranks_per_host 3
 *   as found  0 0 0 0 1 1 1   ->  0 0 0 1 2 2 3      only cut, never joined */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "group/group_core_priv.h"

enum { BOUNCE_BYTES = 1 << 20, LEAST_TILE = 4096 };

static dcp_status read_env(int *ranks_per_host_out)
{
    const char *text = getenv("DCP_ATTN_RANKS_PER_HOST");
    *ranks_per_host_out = 0;
    if (text == NULL || text[0] == '\0') return DCP_OK;
    char *end;
    const long value = strtol(text, &end, 10);
    if (*end != '\0' || value < 0 || value > INT_MAX) {
        return dcp__fail(
            DCP_ERR_ARG,
            "DCP_ATTN_RANKS_PER_HOST is \"%s\"; wanted a number of ranks, 0 = as found", text);
    }
    *ranks_per_host_out = (int)value;
    return DCP_OK;
}

/* Callers of older libraries give a shorter struct, callers of newer ones a longer one whose end
 * this library does not know. */
static dcp_status copy_opts(const dcp_group_opts *opts, dcp_group_opts *mine)
{
    if (opts->struct_size < sizeof(size_t)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_group_opts.struct_size is %zu; use DCP_GROUP_OPTS_INIT",
                         opts->struct_size);
    }
    if (opts->struct_size > sizeof(*mine)) {
        const unsigned char *extra = (const unsigned char *)opts + sizeof(*mine);
        for (size_t i = 0; i < opts->struct_size - sizeof(*mine); i++) {
            if (extra[i] == 0) continue;
            return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                             "dcp_group_opts has options that this library (%s) does not know",
                             DCP_VERSION);
        }
    }
    memcpy(mine, opts, opts->struct_size < sizeof(*mine) ? opts->struct_size : sizeof(*mine));
    if (mine->reserved != 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_group_opts.reserved is %d; it must be 0",
                         mine->reserved);
    }
    return DCP_OK;
}

dcp_status dcp__group_opts_read(const dcp_group_opts *opts, struct dcp__group_opts *opts_out)
{
    dcp_group_opts mine = DCP_GROUP_OPTS_INIT;
    if (opts != NULL) DCP_TRY(copy_opts(opts, &mine));
    if (!(mine.deadline_s >= 0) || mine.deadline_s > 1e8) {
        return dcp__fail(DCP_ERR_ARG, "group deadline is %g s; wanted 0 (30 s) or more, up to 1e8",
                         mine.deadline_s);
    }
    if (mine.ranks_per_host < 0) {
        return dcp__fail(DCP_ERR_ARG, "ranks_per_host is %d; wanted 0 (as found) or more",
                         mine.ranks_per_host);
    }
    if (mine.ranks_per_host == 0) DCP_TRY(read_env(&mine.ranks_per_host));
    opts_out->deadline_ns =
        mine.deadline_s == 0 ? INT64_C(30000000000) : (int64_t)(mine.deadline_s * 1e9);
    opts_out->ranks_per_host = mine.ranks_per_host;
    return DCP_OK;
}

dcp_status dcp__group_need_bounce(dcp_group *g)
{
    if (g->bounce != NULL || g->size == 1) return DCP_OK;
    const size_t least = (size_t)LEAST_TILE * ((size_t)g->size + 1);
    g->bounce_bytes = least > BOUNCE_BYTES ? least : BOUNCE_BYTES;
    return dcp__alloc(g->bounce_bytes, "bounce buffer of a group", &g->bounce);
}

dcp_status dcp__group_set_hosts(dcp_group *g, const int *host_of_rank, int ranks_per_host)
{
    g->n_hosts = 0;
    for (int r = 0; r < g->size; r++) {
        int host = -1;
        for (int q = 0; q < r && host < 0; q++) {
            const bool is_same = host_of_rank == NULL || host_of_rank[q] == host_of_rank[r];
            const bool is_cut = ranks_per_host > 0 && q / ranks_per_host != r / ranks_per_host;
            if (is_same && !is_cut) host = g->host_of[q];
        }
        g->host_of[r] = host >= 0 ? host : g->n_hosts++;
    }
    g->all_see = g->n_hosts == 1;
    return g->all_see ? DCP_OK : dcp__group_need_bounce(g);
}

int dcp_group_host(const dcp_group *g, int rank)
{
    return rank < 0 || rank >= g->size ? -1 : g->host_of[rank];
}

int dcp_group_n_hosts(const dcp_group *g)
{
    return g->n_hosts;
}

bool dcp__group_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out)
{
    return g->ops->locate(g, ptr, n_bytes, alloc_id_out, offset_out);
}

bool dcp__group_touches_peer(const dcp_group *g, const void *ptr, size_t n_bytes, int *rank_out)
{
    return g->ops->touches_peer != NULL && g->ops->touches_peer(g, ptr, n_bytes, rank_out);
}

bool dcp__group_one_space(const dcp_group *g)
{
    return g->ops->one_space;
}

bool dcp__group_keeps_buffers(const dcp_group *g)
{
    return g->ops->keeps_buffers && dcp__group_is_poisoned(g);
}

bool dcp__group_may_lend(const dcp_group *g, const void *ptr, size_t n_bytes)
{
    uint32_t alloc_id = 0;
    uint64_t offset = 0;
    if (!g->ops->keeps_buffers) return true;
    return g->ops->owns != NULL ? g->ops->owns(g, ptr, n_bytes)
                                : dcp__group_locate(g, ptr, n_bytes, &alloc_id, &offset);
}

bool dcp__group_sends_pieces(const dcp_group *g)
{
    return g->ops->sends_pieces;
}

void *dcp__group_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes)
{
    if (!dcp__group_sees(g, rank)) return NULL;
    return g->ops->peer_ptr(g, rank, alloc_id, offset, n_bytes);
}

bool dcp__group_sees(const dcp_group *g, int rank)
{
    return rank >= 0 && rank < g->size && g->host_of[rank] == g->host_of[g->rank];
}

bool dcp__group_all_see(const dcp_group *g)
{
    return g->all_see;
}

/* Every address is visible: of threads, and of ranks that are a host of their own. */
bool dcp__any_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                     uint64_t *offset_out)
{
    (void)g, (void)n_bytes;
    *alloc_id_out = 0;
    *offset_out = (uint64_t)(uintptr_t)ptr;
    return true;
}

void *dcp__any_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                        size_t n_bytes)
{
    (void)g, (void)rank, (void)n_bytes;
    return alloc_id == 0 ? (void *)(uintptr_t)offset : NULL;
}
