/* SPDX-License-Identifier: Apache-2.0 */
/* The merge object: create agrees and takes all memory, run is check, agree, move, report. */
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "group/group_priv.h"
#include "merge/merge_priv.h"

static const struct dcp__merge_algo *const algos[] = {
    &dcp__merge_direct,
    &dcp__merge_alltoall,
    &dcp__merge_allreduce,
};
enum { N_ALGOS = sizeof(algos) / sizeof(algos[0]) };

static const struct {
    dcp_merge_algo id;
    const char *name;
} names[] = {
    {DCP_MERGE_AUTO, "auto"},
    {DCP_MERGE_DIRECT, "direct"},
    {DCP_MERGE_ALLTOALL, "alltoall"},
    {DCP_MERGE_HALVING, "halving"},
    {DCP_MERGE_HIERARCHICAL, "hierarchical"},
    {DCP_MERGE_ALLREDUCE, "allreduce"},
};
enum { N_NAMES = sizeof(names) / sizeof(names[0]) };

const char *dcp_merge_algo_name(dcp_merge_algo a)
{
    for (int i = 0; i < N_NAMES; i++) {
        if (names[i].id == a) return names[i].name;
    }
    return "?";
}

int dcp_merge_algo_parse(const char *name, dcp_merge_algo *algo_out)
{
    for (int i = 0; i < N_NAMES; i++) {
        if (name != NULL && strcmp(names[i].name, name) == 0) {
            *algo_out = names[i].id;
            return 1;
        }
    }
    return 0;
}

/* Choose; why is kept for info. The answer is the same on all ranks. */
static dcp_status choose(struct dcp_merge *m)
{
    const bool all_see = dcp__group_all_see(m->g);
    dcp_merge_algo want = m->desc.algo;
    if (want == DCP_MERGE_AUTO) {
        want = all_see ? DCP_MERGE_DIRECT : DCP_MERGE_ALLTOALL;
        (void)snprintf(m->why, sizeof(m->why), "auto: %s",
                       all_see ? "all ranks see each other's memory"
                               : "not all ranks see each other's memory");
    } else {
        (void)snprintf(m->why, sizeof(m->why), "asked for");
    }
    for (int i = 0; i < N_ALGOS; i++) {
        if (algos[i]->id != want) continue;
        if (algos[i]->sees_all && !all_see)
            return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                             "merge: %s needs ranks that all see each other's memory; in this %s "
                             "group they do not, take alltoall",
                             algos[i]->name, dcp_group_kind(m->g));
        m->algo = algos[i];
        return DCP_OK;
    }
    return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                     "merge: this build has no %s; it has direct, alltoall and allreduce",
                     dcp_merge_algo_name(want));
}

/* Local part of create, before any message. */
static dcp_status prepare(struct dcp_merge *m, const dcp_merge_desc *desc)
{
    DCP_TRY(dcp__merge_check_desc(desc, &m->desc));
    DCP_TRY(choose(m));
    dcp_isa isa = DCP_ISA_SCALAR;
    DCP_TRY(dcp__isa_choose(DCP_ISA_DEFAULT, &isa));
    dcp__kernels_select(isa, &m->kernels);
    return m->algo->plan(m, 0);
}

static size_t align64(size_t n)
{
    return (n + 63u) & ~(size_t)63u;
}

/* One allocation for all small arrays: their sizes first, then their places. */
static size_t lay_out_small(struct dcp_merge *m, char *base)
{
    const size_t n = (size_t)m->n_ranks;
    size_t at = 0;
#define TAKE(field, bytes)                                                                         \
    do {                                                                                           \
        if (base != NULL) (field) = (void *)(base + at);                                           \
        at += align64(bytes);                                                                      \
    } while (0)
    TAKE(m->records, n * DCP__RECORD_MAX);
    TAKE(m->srcs, n * sizeof(*m->srcs));
    TAKE(m->staged, n * sizeof(*m->staged));
    TAKE(m->sends, n * sizeof(*m->sends));
    TAKE(m->recvs, n * sizeof(*m->recvs));
    TAKE(m->scratch.lse, n * DCP__MERGE_ROWS * sizeof(float));
    TAKE(m->scratch.weights, n * DCP__MERGE_ROWS * sizeof(float));
    TAKE(m->scratch.parts, n * sizeof(*m->scratch.parts));
    TAKE(m->scratch.ahead, n * sizeof(*m->scratch.ahead));
    TAKE(m->scratch.part_weights, n * sizeof(*m->scratch.part_weights));
    TAKE(m->scratch.part_rank, n * sizeof(*m->scratch.part_rank));
#undef TAKE
    return at;
}

static void release(struct dcp_merge *m)
{
    if (m == NULL) return;
    if (m->group_ws != NULL) dcp_group_free(m->g, m->group_ws);
    dcp__free(m->private_ws);
    dcp__free(m->small);
    dcp__free(m);
}

/* The object and its small arrays; without them this rank cannot even say that it fails. */
static dcp_status make(dcp_group *g, struct dcp_merge **merge_out)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct dcp_merge), "merge", &p));
    struct dcp_merge *m = p;
    m->g = g;
    m->rank = dcp_group_rank(g);
    m->n_ranks = dcp_group_size(g);
    const char *kind = dcp_group_kind(g);
    m->one_space = m->n_ranks == 1 || strcmp(kind, "threads") == 0;
    const size_t n_bytes = lay_out_small(m, NULL);
    const dcp_status st = dcp__alloc(n_bytes, "merge scratch", &m->small);
    if (st != DCP_OK) {
        dcp__free(m);
        return st;
    }
    (void)lay_out_small(m, m->small);
    m->workspace_bytes = sizeof(struct dcp_merge) + n_bytes;
    *merge_out = m;
    return DCP_OK;
}

/* The workspaces. The group's part is collective: every rank comes here or none. */
static dcp_status take_workspace(struct dcp_merge *m)
{
    const size_t shared = m->algo->group_bytes(m);
    const size_t own = m->algo->private_bytes(m);
    if (shared > 0) DCP_TRY(dcp_group_alloc(m->g, shared, &m->group_ws));
    dcp_status st = DCP_OK;
    if (own > 0) st = dcp__alloc(own, "merge workspace", &m->private_ws);
    m->workspace_bytes += shared + own;
    return dcp__merge_agree_ready(m, st);
}

static dcp_status create(dcp_group *g, const dcp_merge_desc *desc, struct dcp_merge **made)
{
    const dcp_status st = make(g, made);
    if (st != DCP_OK) return dcp__group_poison(g, st, "merge create: %s", dcp_last_error());
    struct dcp_merge *m = *made;
    DCP_TRY(dcp__merge_agree_create(m, prepare(m, desc)));
    /* The tile is now the smallest of all ranks; the sizes follow it. */
    DCP_TRY(m->algo->plan(m, m->tile_tokens));
    return take_workspace(m);
}

dcp_status dcp_merge_create(dcp_group *g, const dcp_merge_desc *desc, dcp_merge **merge_out)
{
    if (g == NULL || merge_out == NULL)
        return dcp__fail(DCP_ERR_ARG, "merge create: %s is NULL",
                         g == NULL ? "group" : "merge_out");
    DCP_TRY(dcp__group_enter(g));
    struct dcp_merge *m = NULL;
    const dcp_status st = create(g, desc, &m);
    if (st != DCP_OK) {
        release(m);
        m = NULL;
    }
    dcp__group_leave(g);
    if (st == DCP_OK) *merge_out = m;
    return st;
}

void dcp_merge_get_info(const dcp_merge *m, dcp_merge_info *info_out)
{
    memset(info_out, 0, sizeof(*info_out));
    info_out->algo = m->algo->id;
    info_out->algo_name = m->algo->name;
    info_out->why = m->why;
    info_out->workspace_bytes = m->workspace_bytes;
    info_out->tile_tokens = m->tile_tokens;
    const dcp_dtype part = m->algo->id == DCP_MERGE_ALLTOALL ? m->desc.wire_type : m->desc.out_type;
    info_out->kernel = m->kernels.merge_row_name[part][m->desc.merged_type];
    info_out->overwrites_partial = m->algo->writes_out;
}

static dcp_status run_entered(struct dcp_merge *m, const dcp_merge_args *args,
                              dcp_merge_stats *stats_out)
{
    struct dcp__merge_run run;
    const dcp_status local = dcp__merge_check_args(m, args, &run);
    m->n_runs++;
    DCP_TRY(dcp__merge_enter(m, &run, local));
    DCP_TRY(m->algo->run(m, &run));
    return dcp__merge_exit(m, &run, stats_out);
}

dcp_status dcp_merge_run(dcp_merge *m, const dcp_merge_args *args, dcp_merge_stats *stats_out)
{
    if (m == NULL) return dcp__fail(DCP_ERR_ARG, "merge run: merge is NULL");
    DCP_TRY(dcp__group_enter(m->g));
    const dcp_status st = run_entered(m, args, stats_out);
    dcp__group_leave(m->g);
    return st;
}

void dcp_merge_destroy(dcp_merge *m)
{
    release(m);
}
