/* SPDX-License-Identifier: Apache-2.0 */
/* Create: check, agree, split into head groups, size the tile, take all memory that runs will use.
 *
 * Only a merge that has been created knows its bytes: where messages are needed, first one of a
 * single row is made, then, if more than one row fits beside it, the one that stays. The tile is as
 * many rows as what is left holds, the smallest of all ranks of the head group; attend_size.c has
 * the sums. Ranks that read each other's memory merge without a merge object. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend/attend_priv.h"
#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/struct_priv.h"
#include "num/dtype_priv.h"

static const char call[] = "dcp_attend_create";

static const struct dcp__attend_field desc_fields[] = {
    {"max_tokens", DCP__ATTEND_COUNT},  {"n_heads", DCP__ATTEND_COUNT},
    {"n_kv_heads", DCP__ATTEND_COUNT},  {"key_dim", DCP__ATTEND_COUNT},
    {"value_dim", DCP__ATTEND_COUNT},   {"scale", DCP__ATTEND_F32},
    {"softcap", DCP__ATTEND_F32},       {"causal", DCP__ATTEND_FLAG},
    {"interleave", DCP__ATTEND_COUNT},  {"algo", DCP__ATTEND_ALGO},
    {"has_sink", DCP__ATTEND_FLAG},     {"project_dim", DCP__ATTEND_COUNT},
    {"project_type", DCP__ATTEND_TYPE}, {"tp", DCP__ATTEND_COUNT},
};
enum { N_DESC_FIELDS = sizeof(desc_fields) / sizeof(desc_fields[0]) };
_Static_assert((int)N_DESC_FIELDS < (int)DCP__ATTEND_FIELDS, "and the number of the object");

/* The value as a caller knows it; in buf where it is a number. */
static const char *value_text(enum dcp__attend_kind kind, int64_t x, char *buf, size_t n_bytes)
{
    switch (kind) {
    case DCP__ATTEND_TYPE:
        return dcp_dtype_name((dcp_dtype)x);
    case DCP__ATTEND_ALGO:
        return dcp_merge_algo_name((dcp_merge_algo)x);
    case DCP__ATTEND_FLAG:
        return x != 0 ? "yes" : "no";
    case DCP__ATTEND_F32:
        /* The fewest digits that tell it from its neighbours. */
        for (int n = 6; n <= 9; n++) {
            snprintf(buf, n_bytes, "%.*g", n, (double)dcp__f32_from_bits((uint32_t)x));
            if (dcp__f32_bits(strtof(buf, NULL)) == (uint32_t)x) break;
        }
        return buf;
    case DCP__ATTEND_COUNT:
        break;
    }
    snprintf(buf, n_bytes, "%lld", (long long)x);
    return buf;
}

dcp_status dcp__attend_agree(struct dcp_attend *a, const char *what, dcp_status status,
                             const struct dcp__attend_field *names, int n_fields,
                             struct dcp__attend_record *mine)
{
    struct dcp__attend_record *const all = a->records;
    mine->status = (int32_t)status;
    mine->n_fields = n_fields;
    if (status != DCP_OK) {
        /* Without the place in the source and the call's name: who reads it puts its own there. */
        const char *text = dcp_last_error();
        const size_t n_what = strlen(what);
        if (strncmp(text, what, n_what) == 0 && strncmp(text + n_what, ": ", 2) == 0)
            text += n_what + 2;
        dcp__brief(mine->why, sizeof(mine->why), text);
    }
    DCP_TRY(dcp__group_record(a->group, mine, sizeof(*mine), all));
    if (status != DCP_OK) return status;
    const int n = dcp_group_size(a->group);
    for (int r = 0; r < n; r++) {
        if (all[r].status == DCP_OK) continue;
        return dcp__fail((dcp_status)all[r].status, "%s: rank %d refuses: %s", what, r, all[r].why);
    }
    for (int f = 0; f < n_fields; f++) {
        for (int r = 1; r < n; r++) {
            const int64_t x = all[0].field[f], y = all[r].field[f];
            if (x == y) continue;
            char text[2][24];
            return dcp__fail(DCP_ERR_MISMATCH, "%s: %s is %s on rank 0 and %s on rank %d", what,
                             names[f].name, value_text(names[f].kind, x, text[0], sizeof(text[0])),
                             value_text(names[f].kind, y, text[1], sizeof(text[1])), r);
        }
    }
    return DCP_OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Ranks of this one's host, itself included. */
static int host_ranks(const struct dcp_attend *a)
{
    int n = 0;
    for (int r = 0; r < a->all_ranks; r++)
        n += dcp_group_host(a->group, r) == dcp_group_host(a->group, a->all_rank);
    return n;
}

/* Private memory: in it the slots too, unless peers read them. */
static dcp_status take_local(struct dcp_attend *a)
{
    const bool shares = a->is_direct && a->n_ranks > 1;
    const size_t slots = dcp__attend_lay_out_slots(a, a->tile_rows, NULL);
    a->workspace_bytes = dcp__attend_bytes(a, a->tile_rows);
    DCP_TRY(dcp__alloc(dcp__attend_lay_out_local(a, a->tile_rows, NULL) + (shares ? 0 : slots),
                       "attend workspace", &a->local));
    const size_t at = dcp__attend_lay_out_local(a, a->tile_rows, a->local);
    if (!shares) dcp__attend_lay_out_slots(a, a->tile_rows, (char *)a->local + at);
    for (int r = 0; r < a->n_ranks; r++)
        a->peers[r].heads = dcp_cut_range(a->d.n_heads, a->n_ranks, r);
    if (a->is_direct) {
        const dcp_merge_desc desc = dcp__attend_merge_desc(a, 1, 0);
        dcp_merge_desc resolved;
        DCP_TRY(dcp__merge_check_desc(&desc, &resolved));
        for (int i = 0; i < a->d.n_threads; i++) {
            struct dcp__merge_math *const math = &a->threads[i].math;
            DCP_TRY(dcp__merge_math_of(&resolved, math));
            math->n_parts = a->n_ranks;
        }
    }
    if (a->d.pool != NULL) return DCP_OK;
    DCP_TRY(dcp_pool_create(a->d.n_threads, host_ranks(a), &a->own_pool));
    a->pool = a->own_pool;
    return DCP_OK;
}

/* A rank's partials as merges read them. */
static void aim_sources(struct dcp_attend *a)
{
    const char *const own = a->shared;
    for (int s = 0; s < a->n_slots; s++) {
        const size_t out_at = (size_t)((const char *)a->slot[s].out - own);
        const size_t lse_at = (size_t)((const char *)a->slot[s].lse - own);
        for (int r = 0; r < a->n_ranks; r++) {
            const char *const base = a->peers[r].shared;
            a->srcs[s * a->n_ranks + r] =
                (struct dcp__merge_src){.out = base + out_at,
                                        .out_ts = a->d.n_heads * a->out_dim,
                                        .out_hs = a->out_dim,
                                        .lse = base + lse_at,
                                        .lse_ts = a->d.n_heads,
                                        .lse_hs = 1,
                                        .lse_type = DCP_F32};
        }
    }
}

/* Group memory for the slots where peers read them, and where that of the peers lies. */
static dcp_status take_shared(struct dcp_attend *a, dcp_status st)
{
    const bool shares = a->is_direct && a->n_ranks > 1;
    size_t bytes = 0;
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    uint32_t id = 0;
    uint64_t offset = 0;
    if (shares) { /* its own agreement: all of the team have it or none */
        bytes = dcp__attend_lay_out_slots(a, a->tile_rows, NULL);
        const dcp_status got = dcp_group_alloc(a->team, bytes, &a->shared);
        if (st == DCP_OK) st = got;
    }
    if (st == DCP_OK && shares && !dcp__group_locate(a->team, a->shared, bytes, &id, &offset))
        st = dcp__fail(DCP_ERR_SYS, "%s: group memory is not where it should be", call);
    mine.field[0] = (int64_t)id;
    mine.field[1] = (int64_t)offset;
    mine.field[2] = (int64_t)bytes;
    DCP_TRY(dcp__attend_agree(a, call, st, NULL, 0, &mine));
    if (!shares) return DCP_OK;
    dcp__attend_lay_out_slots(a, a->tile_rows, a->shared);
    const struct dcp__attend_record *const team = a->records + (a->all_rank - a->rank);
    for (int r = 0; r < a->n_ranks; r++) {
        a->peers[r].shared =
            dcp__group_peer_ptr(a->team, r, (uint32_t)team[r].field[0], (uint64_t)team[r].field[1],
                                (size_t)team[r].field[2]);
        if (a->peers[r].shared == NULL) {
            return dcp__group_poison(a->group, DCP_ERR_SYS,
                                     "%s: the group memory of rank %d cannot be seen", call,
                                     a->all_rank - a->rank + r);
        }
    }
    aim_sources(a);
    return DCP_OK;
}

/* ---- create and destroy --------------------------------------------------------------------- */

/* Limit 0: the merge's own default. */
static dcp_status create_merge(struct dcp_attend *a, int64_t max_rows, size_t limit)
{
    const dcp_merge_desc desc = dcp__attend_merge_desc(a, max_rows, limit);
    dcp_merge_destroy(a->merge);
    a->merge = NULL;
    DCP_TRY(dcp_merge_create(a->team, &desc, &a->merge));
    dcp_merge_info info;
    dcp_merge_get_info(a->merge, &info);
    a->merge_bytes = info.workspace_bytes;
    return DCP_OK;
}

/* The tile beside the merge there is: what this rank can hold, then the least of the team. Also
 * what a merge of a whole tile may take, the same on all: its bytes follow the smallest limit. */
static dcp_status agree_rows(struct dcp_attend *a, dcp_status st, size_t *merge_limit)
{
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    if (st == DCP_OK) st = dcp__attend_fit(call, a, mine.field);
    if (st == DCP_OK) {
        mine.field[2] = (int64_t)dcp__attend_merge_extra(a);
        mine.field[3] = (int64_t)a->merge_bytes;
    }
    DCP_TRY(dcp__attend_agree(a, call, st, NULL, 0, &mine));
    const struct dcp__attend_record *const team = a->records + (a->all_rank - a->rank);
    int64_t least[3] = {mine.field[0], mine.field[1], mine.field[2]};
    int64_t merge_bytes = mine.field[3];
    for (int r = 0; r < a->n_ranks; r++) {
        for (int k = 0; k < 3; k++)
            if (team[r].field[k] < least[k]) least[k] = team[r].field[k];
        if (team[r].field[3] > merge_bytes) merge_bytes = team[r].field[3];
    }
    dcp__attend_choose_tile(a, least);
    *merge_limit = least[2] > merge_bytes ? (size_t)(merge_bytes + least[2]) : 0;
    return DCP_OK;
}

/* The merge, if there is to be one, and the tile, within the limit. Head groups agree together. */
static dcp_status size_tile(struct dcp_attend *a)
{
    size_t merge_limit = 0;
    DCP_TRY(agree_rows(a, a->is_direct ? DCP_OK : create_merge(a, 1, 0), &merge_limit));
    dcp_status st = DCP_OK;
    int64_t most = a->is_direct ? INT64_MAX : 1;
    if (!a->is_direct && a->tile_rows > 1 && merge_limit > 0) {
        most = a->tile_rows;
        st = create_merge(a, most, merge_limit);
    }
    DCP_TRY(agree_rows(a, st, &merge_limit));
    if (a->tile_rows > most) a->tile_rows = most;
    return DCP_OK;
}

static dcp_status make_team(struct dcp_attend *a)
{
    a->team = a->group;
    if (a->d.tp > 1)
        DCP_TRY(dcp_group_split(a->group, a->all_rank / a->n_ranks, a->all_rank, &a->team));
    a->one_space = dcp__group_one_space(a->team) && dcp__group_one_space(a->group);
    a->is_direct =
        a->n_ranks == 1 || (dcp__group_all_see(a->team) &&
                            (a->d.algo == DCP_MERGE_AUTO || a->d.algo == DCP_MERGE_DIRECT));
    return DCP_OK;
}

/* has_place: the caller's attend_out is not NULL. */
static dcp_status build(struct dcp_attend *a, const dcp_attend_desc *desc, bool has_place)
{
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    dcp_isa isa = DCP_ISA_SCALAR;
    dcp_status st = has_place ? dcp__attend_read_desc(call, desc, &a->d)
                              : dcp__fail(DCP_ERR_ARG, "%s: attend_out is NULL", call);
    if (st == DCP_OK) st = dcp__isa_choose(DCP_ISA_DEFAULT, &isa);
    if (st == DCP_OK) {
        const int64_t fields[N_DESC_FIELDS] = {a->d.max_tokens,
                                               a->d.n_heads,
                                               a->d.n_kv_heads,
                                               a->d.key_dim,
                                               a->d.value_dim,
                                               (int64_t)dcp__f32_bits(a->d.scale),
                                               (int64_t)dcp__f32_bits(a->d.softcap),
                                               (int64_t)a->d.causal,
                                               a->d.interleave,
                                               (int64_t)a->d.algo,
                                               (int64_t)a->d.has_sink,
                                               a->d.project_dim,
                                               (int64_t)a->d.project_type,
                                               (int64_t)a->d.tp};
        memcpy(mine.field, fields, sizeof(fields));
        if (a->d.pool != NULL) {
            a->pool = a->d.pool;
            a->d.n_threads = dcp__pool_threads(a->pool);
        }
        dcp__kernels_select(isa, &a->kernels);
        st = dcp__attend_shape(call, a, a->all_ranks, a->all_rank);
    }
    mine.field[N_DESC_FIELDS] = dcp__now_ns(); /* rank 0's is the object's, on all */
    DCP_TRY(dcp__attend_agree(a, call, st, desc_fields, N_DESC_FIELDS, &mine));
    a->id = a->records[0].field[N_DESC_FIELDS];
    a->last_type = DCP_BF16;
    DCP_TRY(make_team(a));
    DCP_TRY(size_tile(a));
    return take_shared(a, take_local(a));
}

/* What a create that failed, or a destroy, gives back: peers do the same, in the same order. */
static void tear_down(struct dcp_attend *a)
{
    if (a->shared != NULL) dcp_group_free(a->team, a->shared);
    dcp_merge_destroy(a->merge);
    dcp_pool_destroy(a->own_pool);
    /* Partials and queries may be on their way. */
    if (!dcp__group_keeps_buffers(a->group) &&
        (a->team == NULL || !dcp__group_keeps_buffers(a->team)))
        dcp__free(a->local);
    if (a->team != a->group) dcp_group_destroy(a->team);
    dcp__free(a->records);
    dcp__free(a);
}

dcp_status dcp_attend_create(dcp_group *g, const dcp_attend_desc *desc, dcp_attend **attend_out)
{
    if (g == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_create: the group is NULL");
    DCP_TRY(dcp__group_enter(g));
    const int n = dcp_group_size(g);
    struct dcp_attend *a = NULL;
    void *ptr = NULL;
    dcp_status st = dcp__alloc(sizeof(*a), "attend handle", &ptr);
    if (st == DCP_OK) {
        a = ptr;
        a->group = g;
        a->all_ranks = n;
        a->all_rank = dcp_group_rank(g);
        st = dcp__alloc_array((size_t)n, sizeof(*a->records), "attend records", &ptr);
    }
    if (st != DCP_OK) { /* too little memory even to tell the peers why */
        dcp__free(a);
        st = dcp__group_poison(g, st, "dcp_attend_create: no memory for its handle");
        dcp__group_leave(g);
        return st;
    }
    a->records = ptr;
    st = build(a, desc, attend_out != NULL);
    if (st == DCP_OK) {
        *attend_out = a;
    } else {
        tear_down(a);
    }
    dcp__group_leave(g);
    return st;
}

void dcp_attend_get_info(const dcp_attend *a, dcp_attend_info *info_out)
{
    if (a == NULL || info_out == NULL) return;
    dcp_attend_info info = {.workspace_bytes = a->workspace_bytes,
                            .merge_workspace_bytes = a->merge_bytes,
                            .tile_rows = a->tile_rows,
                            .algo = DCP_MERGE_DIRECT,
                            .algo_name = "direct",
                            .kernel = a->kernels.attn_name[a->last_type],
                            .n_slots = a->n_slots,
                            .n_ranks = a->n_ranks,
                            .heads = {a->head0 + a->heads.begin, a->head0 + a->heads.end},
                            .kv_heads = {a->kv_head0, a->kv_head0 + a->d.n_kv_heads}};
    struct dcp_attend sizes = *a; /* its pointers are scribbled on */
    info.row_bytes = dcp__attend_row_bytes(&sizes);
    if (a->d.project_dim > 0) info.project_kernel = a->kernels.project_name[a->d.project_type];
    if (a->is_direct) {
        if (a->d.algo != DCP_MERGE_AUTO) {
            info.algo = a->d.algo;
            info.algo_name = dcp_merge_algo_name(info.algo);
        }
        info.algo_why =
            a->d.algo != DCP_MERGE_AUTO ? "asked for" : "auto: all ranks see each other's memory";
        info.merge_kernel = a->kernels.merge_row_name[DCP_F32][DCP_F32];
    } else {
        dcp_merge_info merge;
        dcp_merge_get_info(a->merge, &merge);
        info.algo = merge.algo;
        info.algo_name = merge.algo_name;
        info.algo_why = merge.why;
        info.merge_kernel = merge.kernel;
    }
    dcp__struct_write(info_out, DCP__STRUCT_UPTO(dcp_attend_info, merge_kernel), &info,
                      sizeof(info));
}

void dcp_attend_destroy(dcp_attend *a)
{
    if (a == NULL) return;
    struct dcp__kept_error error;
    dcp__keep_error(&error);
    tear_down(a);
    dcp__restore_error(&error);
}
