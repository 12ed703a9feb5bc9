/* SPDX-License-Identifier: Apache-2.0 */
/* Run: the walk over tiles. Two slots hold a tile each: one is computed while the other is on its
 * way. How a tile moves depends on what the ranks of the head group see.
 *
 * Direct: they read each other's memory. One record a tile says "my partial is complete, my q of
 * the next tile lies ready", and what follows it needs no other:
 *
 *     rank 0   q0 |R| P0 q1 |B| M0  P1 q2 |B| M1  P2 |B| M2 |E|      q  stage the own heads' q
 *     rank 1   q0 |R| P0 q1 |B| M0   P1 q2 |B| M1   P2 |B| M2 |E|    P  partial, M  merge
 *
 * A rank that comes early merges and goes on to its next partial while late peers still read its
 * last one: that lies in the other slot, which nobody writes before the next record. n tiles take
 * n + 2 records: R compares the calls, E adds up the counts (n + 1 barriers would be the least: q
 * must be there before P0, every partial before its merge, every merge before the call is left).
 * One slot (the whole call fits it, or two do not fit): a record more between M and the next P.
 * Nothing runs beside the computing here: a read of a peer's memory is work of this rank's threads.
 *
 * Messages: the q of tile i + 1 and the merge of tile i - 1 travel while tile i is computed. The
 * calling thread moves them on between its work items.
 *
 *     gather   q0  | q1 in flight  | q2 in flight  |               |
 *     partial      | P0            | P1            | P2            |
 *     merge        |               | M0 in flight  | M1 in flight  | M2
 *
 * A group of one moves nothing: the kernel reads the caller's q and writes the caller's out, and
 * the merge works in place. With head groups (tp) all this is inside a head group; R and E go over
 * the whole group, so that a refusal or a NaN is everybody's. */
#include <string.h>

#include "attend/attend_priv.h"
#include "base/clock_priv.h"
#include "base/struct_priv.h"

static const char call[] = "dcp_attend_run";

static const struct dcp__attend_field run_fields[] = {
    {"the object (by the clock of its create)", DCP__ATTEND_COUNT},
    {"T (rows of the call)", DCP__ATTEND_COUNT},
    {"n_seqs", DCP__ATTEND_COUNT},
    {"the sum of lengths", DCP__ATTEND_COUNT},
    {"the sum of windows", DCP__ATTEND_COUNT},
    {"whether q_pos is given", DCP__ATTEND_FLAG},
    {"the fingerprint of lengths, n_rows and windows", DCP__ATTEND_COUNT},
    {"the fingerprint of q_pos", DCP__ATTEND_COUNT},
    {"the fingerprint of sink", DCP__ATTEND_COUNT},
};
enum {
    N_RUN_FIELDS = sizeof(run_fields) / sizeof(run_fields[0]),
    /* Not compared: where the caller's q lies, if peers can read it. */
    Q_IS_SEEN = N_RUN_FIELDS,
    Q_ID,
    Q_OFFSET,
    Q_STRIDE,
    N_USED_FIELDS
};
_Static_assert((int)N_USED_FIELDS <= (int)DCP__ATTEND_FIELDS, "fields of a record");

/* A call on its way. */
struct walk {
    struct dcp_attend *a;
    const dcp_attend_args *args;
    dcp_attend_stats *stats;
    struct dcp__attend_tile tile; /* in work */
    int64_t rows;                 /* of every tile but the last */
    int64_t i, n_tiles;
    double mark_s;    /* up to here time is accounted for */
    dcp_status moved; /* of what progress did */
    bool is_merging;  /* a merge is in flight */
    dcp_merge_args merge_args;
    dcp_merge_stats merge_stats;
};

/* ---- agreement ------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t h, int64_t value)
{
    h = (h ^ (uint64_t)value) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

static int64_t q_row(const struct dcp_attend *a, const dcp_attend_args *args)
{
    return args->q_token_stride != 0 ? args->q_token_stride : dcp__attend_own(a) * a->d.key_dim;
}

static void describe_call(const struct dcp_attend *a, const dcp_attend_args *args, int64_t n_total,
                          struct dcp__attend_record *rec)
{
    uint64_t lengths = 0, windows = 0, of_seqs = 1, of_pos = 1, of_sink = 0;
    for (int64_t s = 0; s < args->n_seqs; s++) {
        const dcp_attend_seq *seq = &args->seqs[s];
        lengths += (uint64_t)seq->length;
        windows += (uint64_t)seq->window;
        of_seqs = mix(mix(mix(of_seqs, seq->length), seq->n_rows), seq->window);
    }
    if (args->q_pos != NULL)
        for (int64_t t = 0; t < n_total; t++) of_pos = mix(of_pos, args->q_pos[t]);
    if (args->sink != NULL)
        of_sink = dcp__merge_sink_print(args->sink, a->d.n_heads * (a->d.tp > 1 ? a->d.tp : 1));
    rec->field[0] = a->id;
    rec->field[1] = n_total;
    rec->field[2] = args->n_seqs;
    rec->field[3] = (int64_t)lengths;
    rec->field[4] = (int64_t)windows;
    rec->field[5] = args->q_pos != NULL;
    rec->field[6] = (int64_t)of_seqs;
    rec->field[7] = (int64_t)of_pos;
    rec->field[8] = (int64_t)of_sink;
    if (!a->is_direct || a->n_ranks == 1 || n_total == 0 || dcp__attend_own(a) == 0) return;
    const int64_t n_elems = (n_total - 1) * q_row(a, args) + dcp__attend_own(a) * a->d.key_dim;
    uint32_t id = 0;
    uint64_t offset = 0;
    if (!dcp__group_locate(a->group, args->q, (size_t)n_elems * sizeof(float), &id, &offset))
        return;
    rec->field[Q_IS_SEEN] = 1;
    rec->field[Q_ID] = (int64_t)id;
    rec->field[Q_OFFSET] = (int64_t)offset;
    rec->field[Q_STRIDE] = q_row(a, args);
}

/* Where the q of the call lies, of the ranks whose q can be read there. */
static dcp_status find_queries(struct walk *w)
{
    struct dcp_attend *a = w->a;
    const int first = a->all_rank - a->rank;
    for (int r = 0; r < a->n_ranks; r++) {
        struct dcp__attend_peer *p = &a->peers[r];
        const int64_t *field = a->records[first + r].field;
        p->call_q = NULL;
        if (r == a->rank) {
            p->call_q = w->args->q;
            p->call_stride = q_row(a, w->args);
        } else if (a->is_direct && field[Q_IS_SEEN] != 0) {
            const int64_t width = (p->heads.end - p->heads.begin) * a->d.key_dim;
            const int64_t n_elems = (w->tile.n_total - 1) * field[Q_STRIDE] + width;
            p->call_stride = field[Q_STRIDE];
            p->call_q =
                dcp__group_peer_ptr(a->group, first + r, (uint32_t)field[Q_ID],
                                    (uint64_t)field[Q_OFFSET], (size_t)n_elems * sizeof(float));
            if (p->call_q == NULL)
                return dcp__group_poison(a->group, DCP_ERR_SYS,
                                         "%s: the q of rank %d cannot be seen", call, first + r);
        }
    }
    return DCP_OK;
}

/* ---- q -------------------------------------------------------------------------------------- */

static int64_t rows_of(const struct walk *w, int64_t tile)
{
    const int64_t left = w->tile.n_total - tile * w->rows;
    return left < w->rows ? left : w->rows;
}

struct copy_ctx {
    const float *from;
    float *to;
    int64_t from_stride, width, n_rows, rows_per_item;
};

static void copy_rows(void *ctx_ptr, int64_t item, int thread)
{
    (void)thread;
    const struct copy_ctx *c = ctx_ptr;
    const int64_t begin = item * c->rows_per_item;
    int64_t end = begin + c->rows_per_item;
    if (end > c->n_rows) end = c->n_rows;
    for (int64_t t = begin; t < end; t++)
        memcpy(c->to + t * c->width, c->from + t * c->from_stride,
               (size_t)c->width * sizeof(float));
}

/* The own heads' q of a tile, to a dense place. */
static void copy_own(struct walk *w, int64_t tile, float *to)
{
    struct dcp_attend *a = w->a;
    const int64_t n = rows_of(w, tile), stride = q_row(a, w->args);
    struct copy_ctx c = {w->args->q + tile * w->rows * stride, to, stride,
                         dcp__attend_own(a) * a->d.key_dim,    n,  n};
    /* Handing out work costs some microseconds: below this one thread copies. */
    const bool is_large = (size_t)(n * c.width) * sizeof(float) >= (size_t)256 << 10;
    if (is_large) c.rows_per_item = 16;
    dcp__pool_run(is_large ? a->pool : NULL, (n + c.rows_per_item - 1) / c.rows_per_item, copy_rows,
                  &c);
}

/* Direct: the own heads' q of a tile to where peers read it, unless they read the caller's. */
static void stage(struct walk *w, int64_t tile, bool is_seen)
{
    const struct dcp_attend *a = w->a;
    if (is_seen || a->n_ranks == 1 || dcp__attend_own(a) == 0) return;
    copy_own(w, tile, a->slot[tile % a->n_slots].q);
}

/* Messages: a block [tile_rows, H_p, Dk] for each rank p of a slot. */
static float *q_block(const struct dcp_attend *a, int slot, int r)
{
    return a->slot[slot].q + a->tile_rows * a->peers[r].heads.begin * a->d.key_dim;
}

static dcp_status send_q(struct walk *w, int64_t tile)
{
    struct dcp_attend *a = w->a;
    const int slot = (int)(tile % a->n_slots);
    const int64_t n = rows_of(w, tile), own = dcp__attend_own(a) * a->d.key_dim;
    const float *mine = w->args->q + tile * w->rows * own;
    if (own > 0 && q_row(a, w->args) != own) {
        copy_own(w, tile, q_block(a, slot, a->rank));
        mine = q_block(a, slot, a->rank);
    }
    int k = 0;
    for (int i = 1; i < a->n_ranks; i++, k++) {
        const int to = (a->rank + i) % a->n_ranks;
        const int from = (a->rank + a->n_ranks - i) % a->n_ranks;
        const dcp_range h = a->peers[from].heads;
        /* Sends only read. */
        a->sends[k] = (struct dcp__xfer){.peer = to,
                                         .buf = (void *)(uintptr_t)mine,
                                         .n_bytes = (size_t)(n * own) * sizeof(float)};
        a->recvs[k] = (struct dcp__xfer){.peer = from,
                                         .buf = q_block(a, slot, from),
                                         .n_bytes = (size_t)(n * (h.end - h.begin) * a->d.key_dim) *
                                                    sizeof(float)};
    }
    return dcp__group_exchange_start(a->team, DCP__ATTEND_EXCHANGE, a->sends, k, a->recvs, k);
}

/* Where the partial finds the rows of the tile in work. */
static void aim_queries(struct walk *w)
{
    struct dcp_attend *a = w->a;
    const int slot = (int)(w->i % a->n_slots);
    for (int r = 0; r < a->n_ranks; r++) {
        struct dcp__attend_peer *p = &a->peers[r];
        const int64_t n_heads = p->heads.end - p->heads.begin;
        p->q_stride = n_heads * a->d.key_dim;
        if (n_heads == 0) {
            p->q = NULL;
        } else if (p->call_q != NULL) {
            p->q = p->call_q + w->tile.begin * p->call_stride;
            p->q_stride = p->call_stride;
        } else if (a->is_direct) {
            p->q =
                (const float *)(const void *)(p->shared + dcp__attend_q_offset(a, n_heads, slot));
        } else {
            p->q = q_block(a, slot, r);
        }
    }
    const int64_t n_others = a->d.n_heads - dcp__attend_own(a);
    w->stats->wire_bytes += w->tile.n_rows * n_others * a->d.key_dim * (int64_t)sizeof(float);
}

/* ---- partial -------------------------------------------------------------------------------- */

static void add_time(struct walk *w, double *to)
{
    const double now_s = dcp__now_s();
    *to += now_s - w->mark_s;
    w->mark_s = now_s;
}

/* The next tile's rows, ranges, places. */
static void begin_tile(struct walk *w)
{
    struct dcp_attend *a = w->a;
    struct dcp__attend_tile *t = &w->tile;
    const dcp_attend_args *args = w->args;
    const struct dcp__attend_slot *slot = &a->slot[w->i % a->n_slots];
    t->begin = w->i * w->rows;
    t->n_rows = rows_of(w, w->i);
    t->out = slot->out;
    t->out_token_stride = a->d.n_heads * a->out_dim;
    t->lse = slot->lse;
    if (a->n_ranks == 1) {
        if (args->out_token_stride != 0) t->out_token_stride = args->out_token_stride;
        t->out = args->out + t->begin * t->out_token_stride;
    }
    t->part = a->part != NULL && a->d.project_dim > 0 ? a->part : t->out;
    t->part_token_stride =
        a->d.project_dim > 0 ? a->d.n_heads * a->d.value_dim : t->out_token_stride;
    aim_queries(w);
}

/* The partial of the tile, accounted for: copies of q count as gathering. */
static void compute(struct walk *w)
{
    struct dcp_attend *a = w->a;
    dcp__fault_point(a->group, "attend");
    for (int i = 0; i < a->d.n_threads; i++) a->threads[i].copy_s = 0.0;
    dcp__attend_plan_tile(a, &w->tile);
    w->tile.project_s = 0.0;
    dcp__attend_partial(a, &w->tile);
    double copied_s = 0.0;
    for (int i = 0; i < a->d.n_threads; i++) copied_s += a->threads[i].copy_s / a->d.n_threads;
    add_time(w, &w->stats->partial_s);
    w->stats->partial_s -= copied_s;
    w->stats->gather_s += copied_s;
    w->stats->project_s += w->tile.project_s;
}

/* ---- direct --------------------------------------------------------------------------------- */

struct merge_ctx {
    struct walk *w;
    const struct dcp__merge_src *srcs;
    struct dcp__merge_dst dst;
    int64_t rows_per_item;
};

static void merge_item(void *ctx_ptr, int64_t item, int thread)
{
    const struct merge_ctx *c = ctx_ptr;
    struct dcp_attend *a = c->w->a;
    const float *sink = c->w->args->sink;
    const int64_t n = c->w->tile.n_rows, begin = item * c->rows_per_item;
    const struct dcp__merge_block block = {
        begin, begin + c->rows_per_item < n ? begin + c->rows_per_item : n, a->heads.begin,
        a->heads.end};
    dcp__merge_rows(&a->threads[thread].math, c->srcs, DCP_F32,
                    sink != NULL ? sink + a->head0 : NULL, &block, &c->dst, true,
                    &a->threads[thread].seen);
}

/* The own heads of the tile, from the partials of all ranks straight into the caller's out. */
static void merge_direct(struct walk *w)
{
    struct dcp_attend *a = w->a;
    const dcp_attend_args *args = w->args;
    const struct dcp__attend_tile *t = &w->tile;
    const int64_t n_own = dcp__attend_own(a), dim = a->out_dim;
    dcp__fault_point(a->group, "merge");
    if (n_own == 0) return;
    const int64_t out_ts = args->out_token_stride != 0 ? args->out_token_stride : n_own * dim;
    const int64_t lse_ts = args->lse_token_stride != 0 ? args->lse_token_stride : n_own;
    const struct dcp__merge_src alone = {.out = (const char *)t->out,
                                         .out_ts = t->out_token_stride,
                                         .out_hs = dim,
                                         .lse = (const char *)t->lse,
                                         .lse_ts = a->d.n_heads,
                                         .lse_hs = 1,
                                         .lse_type = DCP_F32};
    struct merge_ctx c = {.w = w,
                          .srcs =
                              a->n_ranks == 1 ? &alone : a->srcs + w->i % a->n_slots * a->n_ranks,
                          .dst = {.out = (char *)(args->out + t->begin * out_ts),
                                  .out_ts = out_ts,
                                  .out_hs = dim,
                                  .lse = args->lse != NULL ? args->lse + t->begin * lse_ts : NULL,
                                  .lse_ts = lse_ts,
                                  .lse_hs = 1,
                                  .h0 = a->heads.begin},
                          .rows_per_item = t->n_rows};
    const int64_t n_bytes = t->n_rows * n_own * dim * a->n_ranks * (int64_t)sizeof(float);
    const bool is_large = n_bytes >= (int64_t)512 << 10;
    if (is_large) {
        c.rows_per_item = (t->n_rows + 4 * a->d.n_threads - 1) / (4 * a->d.n_threads);
    }
    dcp__pool_run(is_large ? a->pool : NULL, (t->n_rows + c.rows_per_item - 1) / c.rows_per_item,
                  merge_item, &c);
    w->stats->merge_wire_bytes +=
        t->n_rows * n_own * (a->n_ranks - 1) * (dim + 1) * (int64_t)sizeof(float);
}

static dcp_status meet(struct walk *w)
{
    w->stats->n_records++;
    return dcp__group_record(w->a->team, NULL, 0, NULL);
}

static dcp_status run_direct(struct walk *w, bool is_seen)
{
    struct dcp_attend *a = w->a;
    for (w->i = 0; w->i < w->n_tiles; w->i++) {
        const bool has_next = w->i + 1 < w->n_tiles;
        begin_tile(w);
        if (has_next && a->n_slots > 1) stage(w, w->i + 1, is_seen);
        add_time(w, &w->stats->gather_s);
        compute(w);
        if (a->n_ranks > 1) DCP_TRY(meet(w));
        merge_direct(w);
        add_time(w, &w->stats->merge_s);
        if (!has_next || a->n_slots > 1 || a->n_ranks == 1) continue;
        stage(w, w->i + 1, is_seen);
        DCP_TRY(meet(w));
        add_time(w, &w->stats->gather_s);
    }
    return DCP_OK;
}

/* ---- messages ------------------------------------------------------------------------------- */

/* Describes the merge of the tile in work. */
static void describe_merge(struct walk *w)
{
    struct dcp_attend *a = w->a;
    const dcp_attend_args *args = w->args;
    const struct dcp__attend_tile *t = &w->tile;
    const int64_t n_own = dcp__attend_own(a), dim = a->out_dim;
    dcp_merge_args m = DCP_MERGE_ARGS_INIT;
    m.n_tokens = t->n_rows;
    m.out = t->out;
    m.out_token_stride = t->out_token_stride;
    m.out_head_stride = dim;
    m.lse = t->lse;
    m.lse_token_stride = a->d.n_heads;
    m.lse_head_stride = 1;
    if (args->sink != NULL) m.sink = args->sink + a->head0;
    m.merged_token_stride = args->out_token_stride != 0 ? args->out_token_stride : n_own * dim;
    if (args->out != NULL) m.merged = args->out + t->begin * m.merged_token_stride;
    m.merged_head_stride = dim;
    m.merged_lse_token_stride = args->lse_token_stride != 0 ? args->lse_token_stride : n_own;
    if (args->lse != NULL) m.merged_lse = args->lse + t->begin * m.merged_lse_token_stride;
    m.merged_lse_head_stride = 1;
    w->merge_args = m;
}

static void count_merge(struct walk *w)
{
    w->stats->nonfinite_values += w->merge_stats.nonfinite_values;
    w->stats->lse_bad += w->merge_stats.lse_bad;
    w->stats->lse_empty += w->merge_stats.lse_empty;
    w->stats->merge_wire_bytes += w->merge_stats.wire_bytes;
}

/* Between two work items of the calling thread. */
static void progress(void *ctx)
{
    struct walk *w = ctx;
    int done = 0;
    if (!w->is_merging || w->moved != DCP_OK) return;
    w->moved = dcp_merge_test(w->a->merge, &done, &w->merge_stats);
    if (done) w->is_merging = false;
    if (done && w->moved == DCP_OK) count_merge(w);
}

static dcp_status run_messages(struct walk *w)
{
    struct dcp_attend *a = w->a;
    const bool overlaps = a->n_slots > 1;
    bool is_gathering = false;
    for (w->i = 0; w->i < w->n_tiles; w->i++) {
        const bool has_next = w->i + 1 < w->n_tiles;
        if (w->i == 0 || !overlaps) {
            DCP_TRY(send_q(w, w->i));
            DCP_TRY(dcp__group_exchange_wait(a->team, DCP__ATTEND_EXCHANGE));
        }
        begin_tile(w);
        if (has_next && overlaps) {
            DCP_TRY(send_q(w, w->i + 1));
            is_gathering = true;
        }
        add_time(w, &w->stats->gather_s);
        /* After the gather on all ranks: messages between two go in the order they are started. */
        if (w->i > 0 && overlaps) {
            DCP_TRY(dcp_merge_start(a->merge, &w->merge_args));
            w->is_merging = true;
            add_time(w, &w->stats->merge_s);
        }
        compute(w);
        DCP_TRY(w->moved);
        if (w->is_merging) {
            w->is_merging = false;
            DCP_TRY(dcp_merge_wait(a->merge, &w->merge_stats));
            count_merge(w);
        }
        add_time(w, &w->stats->merge_s);
        if (is_gathering) DCP_TRY(dcp__group_exchange_wait(a->team, DCP__ATTEND_EXCHANGE));
        is_gathering = false;
        add_time(w, &w->stats->gather_s);
        describe_merge(w);
        if (!has_next || !overlaps) {
            DCP_TRY(dcp_merge_run(a->merge, &w->merge_args, &w->merge_stats));
            count_merge(w);
            add_time(w, &w->stats->merge_s);
        }
    }
    return DCP_OK;
}

/* ---- a call --------------------------------------------------------------------------------- */

/* The counts of all ranks; nobody reads this rank's memory after it. Where merges by messages have
 * counted their head group already, its first rank speaks for it. */
static dcp_status add_counts(struct walk *w)
{
    struct dcp_attend *a = w->a;
    dcp_attend_stats *stats = w->stats;
    if (a->is_direct) {
        for (int i = 0; i < a->d.n_threads; i++) {
            const struct dcp__merge_seen *seen = &a->threads[i].seen;
            stats->nonfinite_values += seen->n_nonfinite;
            stats->lse_bad += seen->n_lse_bad;
            stats->lse_empty += seen->n_lse_empty;
        }
    } else if (a->rank != 0 && a->d.tp > 1) {
        stats->nonfinite_values = stats->lse_bad = stats->lse_empty = 0;
    }
    if (a->all_ranks == 1 || (!a->is_direct && a->d.tp == 1)) return DCP_OK;
    const int64_t mine[3] = {stats->nonfinite_values, stats->lse_bad, stats->lse_empty};
    int64_t(*const all)[3] = (void *)a->records;
    stats->n_records++;
    DCP_TRY(dcp__group_record(a->group, mine, sizeof(mine), all));
    stats->nonfinite_values = stats->lse_bad = stats->lse_empty = 0;
    for (int r = 0; r < a->all_ranks; r++) {
        stats->nonfinite_values += all[r][0];
        stats->lse_bad += all[r][1];
        stats->lse_empty += all[r][2];
    }
    return DCP_OK;
}

static dcp_status read_call(const struct dcp_attend *a, const dcp_attend_args *theirs,
                            const dcp_attend_stats *stats_out, dcp_attend_args *args,
                            int64_t *n_total_out)
{
    DCP_TRY(dcp__struct_read(call, "DCP_ATTEND_ARGS_INIT", theirs,
                             DCP__STRUCT_UPTO(dcp_attend_args, lse_token_stride), args,
                             sizeof(*args)));
    DCP_TRY(dcp__struct_check_out(call, "DCP_ATTEND_STATS_INIT", stats_out,
                                  DCP__STRUCT_UPTO(dcp_attend_stats, lse_empty)));
    return dcp__attend_check_args(a, args, n_total_out);
}

/* Tiles of even size, whole blocks where they can be. */
static void choose_rows(struct walk *w)
{
    const struct dcp_attend *a = w->a;
    const int64_t n = w->tile.n_total;
    w->n_tiles = (n + a->tile_rows - 1) / a->tile_rows;
    w->rows = (n + w->n_tiles - 1) / w->n_tiles;
    const int64_t whole = (w->rows + a->block_rows - 1) / a->block_rows * a->block_rows;
    if (whole <= a->tile_rows) w->rows = whole;
    w->n_tiles = (n + w->rows - 1) / w->rows;
}

static dcp_status walk_tiles(struct walk *w, const struct dcp__attend_record *mine)
{
    struct dcp_attend *a = w->a;
    w->tile.max_splits = dcp__attend_max_splits(a, w->args, w->tile.n_total);
    for (int64_t s = 0; s < w->args->n_seqs; s++)
        if (w->args->seqs[s].n_rows > 0) a->last_type = w->args->seqs[s].view->dtype;
    for (int i = 0; i < a->d.n_threads; i++) {
        memset(&a->threads[i].seen, 0, sizeof(a->threads[i].seen));
        a->threads[i].seen.t = -1;
    }
    DCP_TRY(find_queries(w));
    w->stats->n_tiles = w->n_tiles;
    if (a->is_direct) {
        DCP_TRY(run_direct(w, mine->field[Q_IS_SEEN] != 0));
    } else {
        w->tile.progress = progress;
        w->tile.progress_ctx = w;
        DCP_TRY(run_messages(w));
    }
    DCP_TRY(add_counts(w));
    add_time(w, &w->stats->merge_s);
    w->stats->wire_bytes += w->stats->merge_wire_bytes;
    return DCP_OK;
}

static dcp_status run_call(struct dcp_attend *a, const dcp_attend_args *theirs,
                           dcp_attend_stats *stats, const dcp_attend_stats *stats_out)
{
    struct dcp__attend_record mine = {0};
    dcp_attend_args args;
    struct walk w = {.a = a, .args = &args, .stats = stats, .mark_s = dcp__now_s()};
    w.tile.args = &args;
    const dcp_status st = read_call(a, theirs, stats_out, &args, &w.tile.n_total);
    if (st == DCP_OK) {
        describe_call(a, &args, w.tile.n_total, &mine);
        if (w.tile.n_total > 0) choose_rows(&w);
        if (a->is_direct && w.n_tiles > 0) stage(&w, 0, mine.field[Q_IS_SEEN] != 0);
    }
    if (a->all_ranks > 1) {
        stats->n_records++;
        DCP_TRY(dcp__attend_agree(a, call, st, run_fields, N_RUN_FIELDS, &mine));
    } else if (st != DCP_OK) {
        return st;
    }
    if (w.n_tiles == 0) { /* T = 0, on all ranks */
        add_time(&w, &stats->gather_s);
        return DCP_OK;
    }
    add_time(&w, &stats->gather_s);
    return walk_tiles(&w, &mine);
}

/* A failure in a head group is everybody's. */
static dcp_status spread_failure(struct dcp_attend *a, dcp_status st)
{
    if (a->team == a->group || (st != DCP_ERR_PEER && st != DCP_ERR_TIMEOUT &&
                                st != DCP_ERR_POISONED && st != DCP_ERR_SYS))
        return st;
    return dcp__group_poison(a->group, st, "%s", dcp_last_error());
}

dcp_status dcp_attend_run(dcp_attend *a, const dcp_attend_args *args, dcp_attend_stats *stats_out)
{
    if (a == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: the object is NULL");
    DCP_TRY(dcp__group_enter(a->group));
    dcp_attend_stats stats;
    memset(&stats, 0, sizeof(stats));
    dcp_status st = run_call(a, args, &stats, stats_out);
    if (st != DCP_OK) st = spread_failure(a, st);
    dcp__group_leave(a->group);
    if (st == DCP_OK)
        dcp__struct_write(stats_out, DCP__STRUCT_UPTO(dcp_attend_stats, lse_empty), &stats,
                          sizeof(stats));
    return st;
}
