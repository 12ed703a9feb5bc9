/* SPDX-License-Identifier: Apache-2.0 */
/* The merge object: create agrees and takes all memory; a run is check, agree, move, report, as
 * stages of one machine that run takes through by waiting and test takes on by one. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "group/group_priv.h"
#include "merge/merge_priv.h"

/* Merges that were started and have not ended: one at most on a group handle. */
static pthread_mutex_t flight_lock = PTHREAD_MUTEX_INITIALIZER;
static struct dcp_merge *in_flight;

static bool is_group_free(const dcp_group *g)
{
    (void)pthread_mutex_lock(&flight_lock);
    const struct dcp_merge *f = in_flight;
    while (f != NULL && f->g != g) f = f->next_in_flight;
    (void)pthread_mutex_unlock(&flight_lock);
    return f == NULL;
}

static void take_off(struct dcp_merge *m)
{
    (void)pthread_mutex_lock(&flight_lock);
    m->next_in_flight = in_flight;
    in_flight = m;
    (void)pthread_mutex_unlock(&flight_lock);
}

static void land(const struct dcp_merge *m)
{
    (void)pthread_mutex_lock(&flight_lock);
    struct dcp_merge **at = &in_flight;
    while (*at != NULL && *at != m) at = &(*at)->next_in_flight;
    if (*at != NULL) *at = m->next_in_flight;
    (void)pthread_mutex_unlock(&flight_lock);
}

dcp_status dcp__merge_math_of(const dcp_merge_desc *desc, struct dcp__merge_math *math)
{
    dcp_isa isa = DCP_ISA_SCALAR;
    DCP_TRY(dcp__isa_choose(DCP_ISA_DEFAULT, &isa));
    struct dcp__kernels all;
    dcp__kernels_select(isa, &all);
    memcpy(math->kernels.merge_row, all.merge_row, sizeof(all.merge_row));
    memcpy(math->kernels.merge_row_nt, all.merge_row_nt, sizeof(all.merge_row_nt));
    memcpy(math->kernels.merge_pair, all.merge_pair, sizeof(all.merge_pair));
    memcpy(math->kernels.merge_pair_nt, all.merge_pair_nt, sizeof(all.merge_pair_nt));
    memcpy(math->kernels.merge_row_name, all.merge_row_name, sizeof(all.merge_row_name));
    math->kernels.merge_weights = all.merge_weights[0];
    math->dim = desc->dim;
    math->is_base_2 = desc->lse_base == DCP_LSE_BASE_2;
    math->has_sum = desc->lse_form == DCP_LSE_FORM_MAX_SUM;
    math->merged_type = desc->merged_type;
    math->nonfinite = desc->nonfinite;
    return DCP_OK;
}

struct dcp__merge_shape dcp__merge_shape_of(const dcp_merge_desc *desc, dcp_merge_algo algo,
                                            int n_ranks, int rank, bool one_space,
                                            const int *host_of)
{
    struct dcp__merge_shape s;
    memset(&s, 0, sizeof(s));
    s.algo = algo;
    s.cut = desc->cut;
    s.max_tokens = desc->max_tokens;
    s.n_heads = desc->n_heads;
    s.dim = desc->dim;
    s.n_ranks = n_ranks;
    s.rank = rank;
    s.out_bytes = dcp_dtype_bytes(desc->out_type);
    s.lse_bytes = dcp_dtype_bytes(desc->lse_type);
    s.merged_bytes = dcp_dtype_bytes(desc->merged_type);
    s.wire_bytes = dcp_dtype_bytes(desc->wire_type);
    s.n_cols = desc->lse_form == DCP_LSE_FORM_MAX_SUM ? 2 : 1;
    s.is_narrow = desc->wire_type != desc->out_type;
    s.shares_lse = desc->nonfinite == DCP_NONFINITE_PROPAGATE && n_ranks > 1;
    s.one_space = one_space;
    s.host_of = host_of;
    return s;
}

/* Local part of create, before the choice is compared. */
static dcp_status prepare(struct dcp_merge *m)
{
    for (int r = 0; r < m->n_ranks; r++) m->host_of[r] = dcp_group_host(m->g, r);
    m->shape.n_ranks = m->n_ranks;
    m->shape.host_of = m->host_of;
    DCP_TRY(dcp__merge_choose(m));
    DCP_TRY(dcp__merge_math_of(&m->desc, &m->math));
    m->shape =
        dcp__merge_shape_of(&m->desc, m->algo->id, m->n_ranks, m->rank, m->one_space, m->host_of);
    return dcp__merge_fit_limit(&m->shape, m->desc.workspace_limit_bytes, &m->sizes);
}

static size_t align64(size_t n)
{
    return (n + 63u) & ~(size_t)63u;
}

#define TAKE(field, bytes)                                                                         \
    do {                                                                                           \
        if (base != NULL) (field) = (void *)(base + at);                                           \
        at += align64(bytes);                                                                      \
    } while (0)

size_t dcp__merge_scratch_at(int n_parts, char *base, struct dcp__merge_scratch *scratch)
{
    const size_t n = (size_t)n_parts;
    size_t at = 0;
    TAKE(scratch->lse, n * DCP__MERGE_ROWS * sizeof(float));
    TAKE(scratch->sum, n * DCP__MERGE_ROWS * sizeof(float));
    TAKE(scratch->weights, n * DCP__MERGE_ROWS * sizeof(float));
    TAKE(scratch->parts, n * sizeof(*scratch->parts));
    TAKE(scratch->ahead, n * sizeof(*scratch->ahead));
    TAKE(scratch->part_weights, n * sizeof(*scratch->part_weights));
    TAKE(scratch->part_rank, n * sizeof(*scratch->part_rank));
    return at;
}

/* One allocation for all small arrays: their sizes first (base NULL), then their places. */
static size_t lay_out_small(struct dcp_merge *m, int n_ranks, char *base)
{
    const size_t n = (size_t)n_ranks;
    size_t at = 0;
    TAKE(m->records, n * DCP__RECORD_MAX);
    TAKE(m->own_record, (size_t)DCP__RECORD_MAX);
    TAKE(m->srcs, n * sizeof(*m->srcs));
    TAKE(m->staged, n * sizeof(*m->staged));
    TAKE(m->states, n * sizeof(*m->states));
    TAKE(m->sends, dcp__xfers_max(n_ranks) * sizeof(*m->sends));
    TAKE(m->recvs, dcp__xfers_max(n_ranks) * sizeof(*m->recvs));
    TAKE(m->record_sends, n * sizeof(*m->record_sends));
    TAKE(m->record_recvs, n * sizeof(*m->record_recvs));
    TAKE(m->host_of, n * sizeof(*m->host_of));
    TAKE(m->member_piece, n * sizeof(*m->member_piece));
    TAKE(m->member_at, n * sizeof(*m->member_at));
    TAKE(m->lists, 2 * n * sizeof(*m->lists));
    TAKE(m->in, n);
    at += dcp__merge_scratch_at(n_ranks, base != NULL ? base + at : NULL, &m->math.scratch);
    return at;
}
#undef TAKE

size_t dcp__merge_own_bytes(int n_ranks)
{
    struct dcp_merge nobody;
    return sizeof(struct dcp_merge) + lay_out_small(&nobody, n_ranks, NULL);
}

dcp_status dcp__merge_fit_limit(struct dcp__merge_shape *shape, size_t limit_bytes,
                                struct dcp__merge_sizes *sizes_out)
{
    const size_t own = dcp__merge_own_bytes(shape->n_ranks);
    /* A message lies in the workspace, and MPI counts its bytes in an int. */
    if (limit_bytes > INT32_MAX) limit_bytes = INT32_MAX;
    const bool is_bounded =
        shape->algo != DCP_MERGE_ALLREDUCE && shape->algo != DCP_MERGE_ALLREDUCE_TEMP;
    dcp__merge_fit(shape, limit_bytes > own ? limit_bytes - own : 0, sizes_out);
    const size_t total = sizes_out->private_total + sizes_out->group_total + own;
    if (!is_bounded || (shape->tile_heads > 0 && total <= limit_bytes)) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "merge: %s takes %zu bytes of workspace at least (tiles of one head of one "
                     "token), the limit is %zu",
                     dcp_merge_algo_name(shape->algo), total, limit_bytes);
}

static void release(struct dcp_merge *m)
{
    if (m == NULL) return;
    if (m->group_ws != NULL) dcp_group_free(m->g, m->group_ws);
    if (!dcp__group_keeps_buffers(m->g)) { /* else messages may still come and go in them */
        dcp__free(m->private_ws);
        dcp__free(m->small);
    }
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
    m->one_space = m->n_ranks == 1 || dcp__group_one_space(g);
    m->all_see = dcp__group_all_see(g);
    m->math.n_parts = m->n_ranks;
    const size_t n_bytes = lay_out_small(m, m->n_ranks, NULL);
    const dcp_status st = dcp__alloc(n_bytes, "merge scratch", &m->small);
    if (st != DCP_OK) {
        dcp__free(m);
        return st;
    }
    (void)lay_out_small(m, m->n_ranks, m->small);
    m->workspace_bytes = sizeof(struct dcp_merge) + n_bytes;
    *merge_out = m;
    return DCP_OK;
}

/* The workspaces. The group's part is collective: every rank comes here or none. */
static dcp_status take_workspace(struct dcp_merge *m)
{
    const size_t shared = m->sizes.group_total;
    const size_t own = m->sizes.private_total;
    if (shared > 0) DCP_TRY(dcp_group_alloc(m->g, shared, &m->group_ws));
    dcp_status st = DCP_OK;
    if (own > 0) st = dcp__alloc(own, "merge workspace", &m->private_ws);
    m->workspace_bytes += shared + own;
    return dcp__merge_agree_ready(m, st);
}

/* has_place: the caller's merge_out is not NULL. If it is, all ranks are told, as with desc. */
static dcp_status create(dcp_group *g, const dcp_merge_desc *desc, bool has_place,
                         struct dcp_merge **made)
{
    dcp_status st = make(g, made);
    if (st != DCP_OK) return dcp__group_poison(g, st, "merge create: %s", dcp_last_error());
    struct dcp_merge *m = *made;
    dcp_status local = has_place ? dcp__merge_check_desc(desc, &m->desc)
                                 : dcp__fail(DCP_ERR_ARG, "merge create: merge_out is NULL");
    const bool wants_speed = local == DCP_OK && m->desc.order == DCP_MERGE_ORDER_ANY &&
                             m->desc.algo == DCP_MERGE_AUTO && !m->all_see && m->n_ranks > 2;
    if (local == DCP_OK) {
        DCP_TRY(dcp__merge_look_around(m, wants_speed));
        local = prepare(m);
    } else {
        char text[320]; /* the record below overwrites nothing of it */
        dcp__brief(text, sizeof(text), dcp_last_error());
        DCP_TRY(dcp__merge_look_around(m, false));
        local = dcp__fail(local, "%s", text);
    }
    DCP_TRY(dcp__merge_agree_create(m, local));
    /* The tile is now the smallest of all ranks; the sizes follow it. */
    dcp__merge_sizes_of(&m->shape, &m->sizes);
    return take_workspace(m);
}

dcp_status dcp_merge_create(dcp_group *g, const dcp_merge_desc *desc, dcp_merge **merge_out)
{
    if (g == NULL) return dcp__fail(DCP_ERR_ARG, "merge create: group is NULL");
    DCP_TRY(dcp__group_enter(g));
    struct dcp_merge *m = NULL;
    const dcp_status st = create(g, desc, merge_out != NULL, &m);
    if (st != DCP_OK) {
        release(m);
        m = NULL;
    }
    dcp__group_leave(g);
    if (st == DCP_OK) *merge_out = m;
    return st;
}

/* Where more than one merge is on the way of a row, all but the last sum f32 rows into such. */
static const char *sums_by(const struct dcp_merge *m)
{
    const dcp_merge_desc *d = &m->desc;
    if (!m->algo->keeps_order) return m->math.kernels.merge_row_name[DCP_F32][DCP_F32];
    const dcp_dtype part = m->algo->id == DCP_MERGE_ALLTOALL ? d->wire_type : d->out_type;
    return m->math.kernels.merge_row_name[part][d->merged_type];
}

void dcp_merge_get_info(const dcp_merge *m, dcp_merge_info *info_out)
{
    if (info_out == NULL) return;
    memset(info_out, 0, sizeof(*info_out));
    if (m == NULL) {
        info_out->algo_name = info_out->why = info_out->kernel = info_out->order = "?";
        return;
    }
    const dcp_merge_desc *d = &m->desc;
    info_out->algo = m->algo->id;
    info_out->algo_name = m->algo->name;
    info_out->why = m->why;
    info_out->workspace_bytes = m->workspace_bytes;
    info_out->tile_tokens = m->shape.tile_tokens;
    info_out->tile_heads = m->shape.tile_heads;
    info_out->kernel = sums_by(m);
    info_out->overwrites_partial = m->algo->writes_out;
    info_out->order = m->algo->order;
    info_out->n_hosts = dcp_group_n_hosts(m->g);
    info_out->peak_bytes = m->workspace_bytes + (size_t)(d->max_tokens * d->n_heads) *
                                                    ((size_t)d->dim * m->shape.out_bytes +
                                                     m->shape.lse_bytes * (size_t)m->shape.n_cols);
}

static void cost_of(const struct dcp__merge_shape *s, int64_t n_tokens, dcp_merge_cost *out)
{
    if (n_tokens < 0) n_tokens = 0;
    if (n_tokens > s->max_tokens) n_tokens = s->max_tokens;
    dcp__merge_traffic(s, n_tokens, &out->wire_bytes, &out->n_messages);
    out->n_steps = dcp__merge_n_steps(s, n_tokens);
}

void dcp_merge_get_cost(const dcp_merge *m, int64_t n_tokens, dcp_merge_cost *cost_out)
{
    if (cost_out == NULL) return;
    if (m == NULL) {
        memset(cost_out, 0, sizeof(*cost_out));
        return;
    }
    cost_out->workspace_bytes = m->workspace_bytes;
    cost_of(&m->shape, n_tokens, cost_out);
}

/* The description with its algorithm chosen, and a list of hosts that the caller frees. */
static dcp_status plan_begin(const dcp_merge_desc *desc, int n_ranks, int rank, int ranks_per_host,
                             dcp_merge_desc *d, int **host_of_out, const char **why_out)
{
    DCP_TRY(dcp__merge_check_desc(desc, d));
    if (n_ranks < 1 || n_ranks > 1024 || rank < 0 || rank >= n_ranks || ranks_per_host < 0)
        return dcp__fail(DCP_ERR_ARG,
                         "merge plan: rank %d of %d ranks, %d per host; 1 to 1024 ranks", rank,
                         n_ranks, ranks_per_host);
    void *p = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n_ranks, sizeof(int), "merge plan", &p));
    int *const host_of = p;
    for (int r = 0; r < n_ranks; r++) host_of[r] = ranks_per_host > 0 ? r / ranks_per_host : 0;
    d->algo = dcp__merge_choose_unseen(d, n_ranks, host_of, why_out);
    *host_of_out = host_of;
    return DCP_OK;
}

dcp_status dcp_merge_plan_algo(const dcp_merge_desc *desc, int n_ranks, int ranks_per_host,
                               dcp_merge_algo *algo_out, const char **why_out)
{
    dcp_merge_desc d;
    int *host_of = NULL;
    const char *why = NULL;
    if (algo_out == NULL) return dcp__fail(DCP_ERR_ARG, "merge plan: algo_out is NULL");
    DCP_TRY(plan_begin(desc, n_ranks, 0, ranks_per_host, &d, &host_of, &why));
    dcp__free(host_of);
    *algo_out = d.algo;
    if (why_out != NULL) *why_out = why;
    return DCP_OK;
}

dcp_status dcp_merge_plan(const dcp_merge_desc *desc, int n_ranks, int rank, int ranks_per_host,
                          int64_t n_tokens, dcp_merge_cost *cost_out)
{
    dcp_merge_desc d;
    int *host_of = NULL;
    const char *why = NULL;
    if (cost_out == NULL) return dcp__fail(DCP_ERR_ARG, "merge plan: cost_out is NULL");
    DCP_TRY(plan_begin(desc, n_ranks, rank, ranks_per_host, &d, &host_of, &why));
    /* All ranks take the smallest tile of any. */
    struct dcp__merge_shape s = dcp__merge_shape_of(&d, d.algo, n_ranks, 0, n_ranks == 1, host_of);
    struct dcp__merge_sizes sizes;
    dcp_status st = DCP_OK;
    int64_t tokens = INT64_MAX;
    int64_t heads = INT64_MAX;
    for (int r = 0; r < n_ranks && st == DCP_OK; r++) {
        s.rank = r;
        st = dcp__merge_fit_limit(&s, d.workspace_limit_bytes, &sizes);
        if (s.tile_tokens < tokens || (s.tile_tokens == tokens && s.tile_heads < heads)) {
            tokens = s.tile_tokens;
            heads = s.tile_heads;
        }
    }
    if (st == DCP_OK) {
        s.rank = rank;
        s.tile_tokens = tokens;
        s.tile_heads = heads;
        dcp__merge_sizes_of(&s, &sizes);
        cost_out->workspace_bytes =
            dcp__merge_own_bytes(n_ranks) + sizes.private_total + sizes.group_total;
        cost_of(&s, n_tokens, cost_out);
    }
    dcp__free(host_of);
    return st;
}

/* ---- what algorithms use ---- */

dcp_status dcp__merge_poll(struct dcp_merge *m, struct dcp__merge_run *run, unsigned slot,
                           bool *done_out)
{
    if (!run->may_wait) return dcp__group_exchange_test(m->g, slot, done_out);
    DCP_TRY(dcp__group_exchange_wait(m->g, slot));
    *done_out = true;
    return DCP_OK;
}

dcp_status dcp__merge_send(struct dcp_merge *m, struct dcp__merge_run *run, unsigned slot,
                           int n_sends, int n_recvs)
{
    for (int i = 0; i < n_sends; i++) {
        run->wire_bytes += (int64_t)m->sends[i].n_bytes;
        run->n_messages += m->sends[i].n_bytes > 0;
    }
    return dcp__group_exchange_start(m->g, slot, m->sends, n_sends, m->recvs, n_recvs);
}

struct dcp__merge_buffers dcp__merge_lay_out(const struct dcp_merge *m)
{
    const struct dcp__merge_sizes *s = &m->sizes;
    const size_t second = m->shape.algo == DCP_MERGE_ALLTOALL ? s->recv : 0;
    struct dcp__merge_buffers b;
    b.send = m->private_ws != NULL ? m->private_ws : m->small; /* NULL: all sizes are 0 */
    b.recv[0] = b.send + s->send;
    b.recv[1] = b.recv[0] + s->recv;
    b.state = b.recv[1] + second;
    b.table = b.state + s->state;
    b.gather_send = b.table + s->table;
    b.gather_recv = b.gather_send + s->gather_send;
    return b;
}

struct dcp__merge_block dcp__merge_block_at(const struct dcp_merge *m,
                                            const struct dcp__merge_run *run, int rank,
                                            int64_t step)
{
    const bool is_backward = m->shape.algo == DCP_MERGE_ALLTOALL;
    return dcp__merge_block_step(&m->shape, run->n_tokens, rank,
                                 is_backward ? run->n_steps - 1 - step : step);
}

struct dcp__merge_block dcp__merge_step_block(const struct dcp_merge *m,
                                              const struct dcp__merge_run *run, int rank)
{
    return dcp__merge_block_at(m, run, rank, run->step);
}

dcp_status dcp__merge_sync_start(struct dcp_merge *m, struct dcp__merge_run *run, const void *own,
                                 size_t n_bytes)
{
    if (!run->by_messages) return dcp__group_record(m->g, own, n_bytes, m->records);
    char *const all = m->records;
    memcpy(m->own_record, own, n_bytes);
    memcpy(all + (size_t)m->rank * n_bytes, own, n_bytes);
    int n = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        m->record_sends[n] =
            (struct dcp__xfer){.peer = r, .buf = m->own_record, .n_bytes = n_bytes};
        m->record_recvs[n++] =
            (struct dcp__xfer){.peer = r, .buf = all + (size_t)r * n_bytes, .n_bytes = n_bytes};
    }
    return dcp__group_exchange_start(m->g, DCP__SLOT_RECORD, m->record_sends, n, m->record_recvs,
                                     n);
}

dcp_status dcp__merge_sync_poll(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    if (run->by_messages) return dcp__merge_poll(m, run, DCP__SLOT_RECORD, done_out);
    *done_out = true; /* the record of sync_start is here already */
    return DCP_OK;
}

/* ---- run ---- */

static dcp_status begin(struct dcp_merge *m, const dcp_merge_args *args, bool by_messages)
{
    struct dcp__merge_run *run = &m->run;
    const dcp_status local = dcp__merge_check_args(m, args, run);
    run->local = local;
    run->by_messages = by_messages;
    run->may_wait = !by_messages;
    m->n_runs++;
    run->stage = DCP__MERGE_ENTER;
    return dcp__merge_enter_start(m, run);
}

/* One stage further, if it can be gone now. */
static dcp_status advance(struct dcp_merge *m)
{
    struct dcp__merge_run *run = &m->run;
    bool is_done = false;
    run->moved = false;
    switch (run->stage) {
    case DCP__MERGE_ENTER:
        DCP_TRY(dcp__merge_sync_poll(m, run, &is_done));
        if (!is_done) return DCP_OK;
        DCP_TRY(dcp__merge_enter_finish(m, run));
        run->n_steps = dcp__merge_n_steps(&m->shape, run->n_tokens);
        run->stage = DCP__MERGE_MOVE;
        break;
    case DCP__MERGE_MOVE:
        DCP_TRY(m->algo->step(m, run, &is_done));
        if (!is_done) return DCP_OK;
        DCP_TRY(dcp__merge_exit_start(m, run));
        run->stage = DCP__MERGE_EXIT;
        break;
    case DCP__MERGE_EXIT:
        DCP_TRY(dcp__merge_sync_poll(m, run, &is_done));
        if (!is_done) return DCP_OK;
        run->stage = DCP__MERGE_IDLE;
        DCP_TRY(dcp__merge_exit_finish(m, run));
        break;
    default:
        break;
    }
    run->moved = true;
    return DCP_OK;
}

/* To the end, waiting; also when it fails. */
static dcp_status finish(struct dcp_merge *m, dcp_merge_stats *stats_out)
{
    dcp_status st = DCP_OK;
    m->run.may_wait = true;
    while (st == DCP_OK && m->run.stage != DCP__MERGE_IDLE) st = advance(m);
    m->run.stage = DCP__MERGE_IDLE;
    if (stats_out != NULL && (st == DCP_OK || st == DCP_ERR_NONFINITE)) *stats_out = m->run.stats;
    return st;
}

static dcp_status check_free(const struct dcp_merge *m, const char *call)
{
    if (is_group_free(m->g)) return DCP_OK;
    return dcp__fail(DCP_ERR_BUSY,
                     "%s: a merge is in flight on this group; end it with dcp_merge_wait or "
                     "dcp_merge_test first",
                     call);
}

dcp_status dcp_merge_run(dcp_merge *m, const dcp_merge_args *args, dcp_merge_stats *stats_out)
{
    if (m == NULL) return dcp__fail(DCP_ERR_ARG, "merge run: merge is NULL");
    DCP_TRY(dcp__group_enter(m->g));
    dcp_status st = check_free(m, "merge run");
    if (st == DCP_OK) {
        st = begin(m, args, false);
        if (st == DCP_OK) st = finish(m, stats_out);
    }
    dcp__group_leave(m->g);
    return st;
}

dcp_status dcp_merge_start(dcp_merge *m, const dcp_merge_args *args)
{
    if (m == NULL) return dcp__fail(DCP_ERR_ARG, "merge start: merge is NULL");
    DCP_TRY(dcp__group_enter(m->g));
    dcp_status st = check_free(m, "merge start");
    if (st == DCP_OK) {
        st = begin(m, args, true);
        if (st == DCP_OK)
            take_off(m);
        else
            m->run.stage = DCP__MERGE_IDLE;
    }
    dcp__group_leave(m->g);
    return st;
}

static dcp_status check_started(const dcp_merge *m, const char *call)
{
    if (m == NULL) return dcp__fail(DCP_ERR_ARG, "%s: merge is NULL", call);
    if (m->run.stage == DCP__MERGE_IDLE)
        return dcp__fail(DCP_ERR_ARG, "%s: no merge was started", call);
    return DCP_OK;
}

static dcp_status test_entered(struct dcp_merge *m)
{
    struct dcp__merge_run *run = &m->run;
    const dcp_status st = advance(m);
    if (st != DCP_OK || run->moved) {
        run->stuck_ns = 0;
        return st;
    }
    const int64_t now = dcp__now_ns();
    if (run->stuck_ns == 0) run->stuck_ns = now;
    if ((double)(now - run->stuck_ns) * 1e-9 > dcp_group_deadline(m->g)) return finish(m, NULL);
    return DCP_OK;
}

dcp_status dcp_merge_test(dcp_merge *m, int *done_out, dcp_merge_stats *stats_out)
{
    DCP_TRY(check_started(m, "merge test"));
    if (done_out == NULL) return dcp__fail(DCP_ERR_ARG, "merge test: done_out is NULL");
    DCP_TRY(dcp__group_enter(m->g));
    const dcp_status st = test_entered(m);
    if (st != DCP_OK) m->run.stage = DCP__MERGE_IDLE;
    *done_out = m->run.stage == DCP__MERGE_IDLE;
    if (*done_out) land(m);
    if (*done_out && stats_out != NULL && (st == DCP_OK || st == DCP_ERR_NONFINITE))
        *stats_out = m->run.stats;
    dcp__group_leave(m->g);
    return st;
}

dcp_status dcp_merge_wait(dcp_merge *m, dcp_merge_stats *stats_out)
{
    DCP_TRY(check_started(m, "merge wait"));
    DCP_TRY(dcp__group_enter(m->g));
    const dcp_status st = finish(m, stats_out);
    land(m);
    dcp__group_leave(m->g);
    return st;
}

void dcp_merge_destroy(dcp_merge *m)
{
    if (m == NULL) return;
    struct dcp__kept_error error;
    dcp__keep_error(&error);
    if (m->run.stage != DCP__MERGE_IDLE) {
        land(m);
        dcp_group_abort(m->g, "a merge was destroyed in flight");
    }
    release(m);
    dcp__restore_error(&error);
}
