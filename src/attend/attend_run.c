/* SPDX-License-Identifier: Apache-2.0 */
/* Run: the walk over tiles.
 *
 *     rank 0          rank 1          rank 2        each: [rows, H, Dk], own heads' columns filled
 *     |q0|..|..|      |..|q1|..|      |..|..|q2|
 *     -- record: columns are filled; on the first tile also what each rank was called with --
 *     copy q1, q2     copy q0, q2     copy q0, q1   from the peers' memory
 *     partial         partial         partial       own keys, all heads
 *     -- merge: record, read, record --             own heads, straight into the caller's out
 *
 * One record does for the gather, as the merge's first one comes after every rank's copying: no
 * rank fills its columns anew before that. Where ranks do not see each other's memory the group's
 * own column gather moves the columns, after the record. A group of one gathers and copies nothing:
 * the kernel reads the caller's q and writes the caller's out, and the merge works in place. */
#include <string.h>

#include "attend/attend_priv.h"
#include "base/clock_priv.h"

static const struct dcp__attend_field run_fields[] = {
    {"T (rows of the call)", false},     {"n_seqs", false},
    {"the sum of lengths", false},       {"the sum of windows", false},
    {"whether q_pos is given", false},   {"the fingerprint of lengths, n_rows and windows", false},
    {"the fingerprint of q_pos", false},
};
enum { N_RUN_FIELDS = sizeof(run_fields) / sizeof(run_fields[0]) };

/* ---- local checks -------------------------------------------------------------------------- */

static dcp_status check_seq(const struct dcp_attend *a, const dcp_attend_args *args, int64_t s)
{
    const dcp_attend_seq *seq = &args->seqs[s];
    const dcp_kv_view *view = seq->view;
    const long long at = (long long)s;
    if (seq->n_rows < 0 || seq->length < 0 || seq->window < 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld has n_rows %lld, length %lld, window %lld; "
                         "none may be negative",
                         at, (long long)seq->n_rows, (long long)seq->length,
                         (long long)seq->window);
    }
    if (args->q_pos == NULL && seq->n_rows > seq->length) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld has %lld rows but length %lld, new tokens "
                         "included",
                         at, (long long)seq->n_rows, (long long)seq->length);
    }
    if (view == NULL)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld has no view", at);
    if (view->dtype != DCP_F32 && view->dtype != DCP_F16 && view->dtype != DCP_BF16) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the view's dtype %d is none of f32, f16, "
                         "bf16",
                         at, (int)view->dtype);
    }
    const int64_t own = dcp_local_length(seq->length, a->n_ranks, a->rank, a->d.interleave);
    if (view->n_keys < own) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: rank %d owns %lld of %lld positions, its "
                         "view holds %lld",
                         at, a->rank, (long long)own, (long long)seq->length,
                         (long long)view->n_keys);
    }
    if (own > 0 && (view->k_base == NULL || view->v_base == NULL || view->pages == NULL ||
                    view->page_tokens < 1)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld: the view has no pages", at);
    }
    return DCP_OK;
}

static dcp_status check_rows(const char *name, const void *ptr, int64_t stride, int64_t row)
{
    if (row > 0 && ptr == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s is NULL", name);
    if (stride == 0 || stride >= row) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "dcp_attend_run: %s_token_stride is %lld, a row has %lld elements", name,
                     (long long)stride, (long long)row);
}

/* Everything that can be wrong on this rank alone. */
static dcp_status check_args(const struct dcp_attend *a, const dcp_attend_args *args,
                             int64_t *n_total_out)
{
    if (args == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: args is NULL");
    if (args->struct_size != sizeof(*args)) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: struct_size is %zu, this library's is %zu; start from "
                         "DCP_ATTEND_ARGS_INIT",
                         args->struct_size, sizeof(*args));
    }
    if (args->n_seqs < 0 || (args->n_seqs > 0 && args->seqs == NULL)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: n_seqs is %lld, seqs is %s",
                         (long long)args->n_seqs, args->seqs == NULL ? "NULL" : "given");
    }
    int64_t n_total = 0;
    for (int64_t s = 0; s < args->n_seqs; s++) {
        DCP_TRY(check_seq(a, args, s));
        if (args->seqs[s].n_rows > a->d.max_tokens - n_total) {
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: more rows than max_tokens %lld of create (sequence "
                             "%lld brings %lld to %lld)",
                             (long long)a->d.max_tokens, (long long)s,
                             (long long)args->seqs[s].n_rows, (long long)n_total);
        }
        n_total += args->seqs[s].n_rows;
    }
    if ((args->sink != NULL) != (a->d.has_sink != 0)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: has_sink is %u at create, sink is %s here",
                         a->d.has_sink, args->sink == NULL ? "NULL" : "given");
    }
    *n_total_out = n_total;
    if (n_total == 0) return DCP_OK;
    const int64_t n_own = a->heads.end - a->heads.begin;
    DCP_TRY(check_rows("q", args->q, args->q_token_stride, n_own * a->d.key_dim));
    DCP_TRY(check_rows("out", args->out, args->out_token_stride, n_own * a->d.value_dim));
    return check_rows("lse", args->lse == NULL ? (const float *)args->out : args->lse,
                      args->lse_token_stride, n_own);
}

/* ---- agreement ------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t h, int64_t value)
{
    h = (h ^ (uint64_t)value) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

static void describe_call(const dcp_attend_args *args, int64_t n_total,
                          struct dcp__attend_record *rec)
{
    uint64_t lengths = 0, windows = 0, of_seqs = 1, of_pos = 1;
    for (int64_t s = 0; s < args->n_seqs; s++) {
        const dcp_attend_seq *seq = &args->seqs[s];
        lengths += (uint64_t)seq->length;
        windows += (uint64_t)seq->window;
        of_seqs = mix(mix(mix(of_seqs, seq->length), seq->n_rows), seq->window);
    }
    if (args->q_pos != NULL)
        for (int64_t t = 0; t < n_total; t++) of_pos = mix(of_pos, args->q_pos[t]);
    rec->field[0] = n_total;
    rec->field[1] = args->n_seqs;
    rec->field[2] = (int64_t)lengths;
    rec->field[3] = (int64_t)windows;
    rec->field[4] = args->q_pos != NULL;
    rec->field[5] = (int64_t)of_seqs;
    rec->field[6] = (int64_t)of_pos;
}

/* ---- gather --------------------------------------------------------------------------------- */

struct gather_ctx {
    struct dcp_attend *a;
    int64_t n_rows, rows_per_item;
};

static void copy_peer_rows(void *ctx_ptr, int64_t item, int thread)
{
    (void)thread;
    const struct gather_ctx *ctx = ctx_ptr;
    const struct dcp_attend *a = ctx->a;
    const size_t row_bytes = a->col_off_bytes[a->n_ranks];
    const int64_t begin = item * ctx->rows_per_item;
    int64_t end = begin + ctx->rows_per_item;
    if (end > ctx->n_rows) end = ctx->n_rows;
    for (int i = 1; i < a->n_ranks; i++) {
        const int r = (a->rank + i) % a->n_ranks; /* ranks start at different peers */
        const size_t col = a->col_off_bytes[r], n_bytes = a->col_off_bytes[r + 1] - col;
        for (int64_t t = begin; t < end && n_bytes > 0; t++) {
            const size_t at = (size_t)t * row_bytes + col;
            memcpy((char *)a->q + at, (const char *)a->peer_q[r] + at, n_bytes);
        }
    }
}

static void fill_own_columns(struct dcp_attend *a, const dcp_attend_args *args, int64_t begin,
                             int64_t n_rows)
{
    const int64_t n_own = (a->heads.end - a->heads.begin) * a->d.key_dim;
    const int64_t stride = args->q_token_stride != 0 ? args->q_token_stride : n_own;
    const int64_t row = a->d.n_heads * a->d.key_dim;
    if (n_own == 0) return;
    for (int64_t t = 0; t < n_rows; t++) {
        memcpy(a->q + t * row + a->heads.begin * a->d.key_dim, args->q + (begin + t) * stride,
               (size_t)n_own * sizeof(float));
    }
}

/* After the record: the peers' columns of n_rows rows. */
static dcp_status gather(struct dcp_attend *a, int64_t n_rows)
{
    const size_t row_bytes = a->col_off_bytes[a->n_ranks];
    if (a->peer_q == NULL) {
        return dcp_group_gather_cols(a->group, a->q, (size_t)n_rows, row_bytes, a->col_off_bytes);
    }
    /* Handing out work costs some microseconds: below this one thread copies. */
    const bool is_large = (size_t)n_rows * row_bytes >= (size_t)256 << 10;
    struct gather_ctx ctx = {a, n_rows, is_large ? 16 : n_rows};
    dcp__pool_run(is_large ? a->pool : NULL, (n_rows + ctx.rows_per_item - 1) / ctx.rows_per_item,
                  copy_peer_rows, &ctx);
    return DCP_OK;
}

/* ---- the walk ------------------------------------------------------------------------------- */

static dcp_status merge_tile(struct dcp_attend *a, const struct dcp__attend_tile *tile,
                             dcp_attend_stats *stats)
{
    const dcp_attend_args *args = tile->args;
    const int64_t n_own = a->heads.end - a->heads.begin, dv = a->d.value_dim;
    const int64_t out_stride = args->out_token_stride != 0 ? args->out_token_stride : n_own * dv;
    const int64_t lse_stride = args->lse_token_stride != 0 ? args->lse_token_stride : n_own;
    dcp_merge_args m = DCP_MERGE_ARGS_INIT;
    m.n_tokens = tile->n_rows;
    m.out = tile->out;
    m.out_token_stride = tile->out_token_stride;
    m.out_head_stride = dv;
    m.lse = a->lse;
    m.lse_token_stride = a->d.n_heads;
    m.lse_head_stride = 1;
    m.sink = args->sink;
    if (args->out != NULL) m.merged = args->out + tile->begin * out_stride;
    m.merged_token_stride = out_stride;
    m.merged_head_stride = dv;
    if (args->lse != NULL) m.merged_lse = args->lse + tile->begin * lse_stride;
    m.merged_lse_token_stride = lse_stride;
    m.merged_lse_head_stride = 1;
    dcp_merge_stats one;
    DCP_TRY(dcp_merge_run(a->merge, &m, &one));
    stats->merge.nonfinite_values += one.nonfinite_values;
    stats->merge.lse_bad += one.lse_bad;
    stats->merge.lse_empty += one.lse_empty;
    stats->merge.wire_bytes += one.wire_bytes;
    return DCP_OK;
}

static dcp_status run_tile(struct dcp_attend *a, struct dcp__attend_tile *tile, double start_s,
                           dcp_attend_stats *stats)
{
    const dcp_attend_args *args = tile->args;
    if (a->n_ranks > 1) {
        DCP_TRY(gather(a, tile->n_rows));
        tile->q = a->q;
        tile->q_token_stride = a->d.n_heads * a->d.key_dim;
        tile->out = a->out;
        tile->out_token_stride = a->d.n_heads * a->d.value_dim;
        const int64_t n_others = a->d.n_heads - (a->heads.end - a->heads.begin);
        stats->wire_bytes += tile->n_rows * n_others * a->d.key_dim * (int64_t)sizeof(float);
    } else {
        const int64_t q_row = a->d.n_heads * a->d.key_dim;
        const int64_t out_row = a->d.n_heads * a->d.value_dim;
        tile->q_token_stride = args->q_token_stride != 0 ? args->q_token_stride : q_row;
        tile->out_token_stride = args->out_token_stride != 0 ? args->out_token_stride : out_row;
        tile->q = args->q + tile->begin * tile->q_token_stride;
        tile->out = args->out + tile->begin * tile->out_token_stride;
    }
    const double gathered_s = dcp__now_s();
    dcp__fault_point(a->group, "attend");
    dcp__attend_plan_tile(a, tile);
    dcp__attend_partial(a, tile);
    const double partial_s = dcp__now_s();
    DCP_TRY(merge_tile(a, tile, stats));
    stats->gather_s += gathered_s - start_s;
    stats->partial_s += partial_s - gathered_s;
    stats->merge_s += dcp__now_s() - partial_s;
    return DCP_OK;
}

static dcp_status run_call(struct dcp_attend *a, const dcp_attend_args *args,
                           dcp_attend_stats *stats)
{
    double start_s = dcp__now_s();
    struct dcp__attend_record mine = {0};
    struct dcp__attend_tile tile = {.args = args};
    dcp_status st = check_args(a, args, &tile.n_total);
    if (st == DCP_OK) describe_call(args, tile.n_total, &mine);
    do {
        tile.n_rows = tile.n_total - tile.begin;
        if (tile.n_rows > a->tile_rows) tile.n_rows = a->tile_rows;
        if (a->n_ranks > 1) {
            if (st == DCP_OK) fill_own_columns(a, args, tile.begin, tile.n_rows);
            DCP_TRY(dcp__attend_agree(a->group, "dcp_attend_run", st, run_fields, N_RUN_FIELDS,
                                      &mine, a->records));
        } else if (st != DCP_OK) {
            return st;
        }
        if (tile.n_rows == 0) break; /* T = 0, on all ranks */
        if (tile.begin == 0) {
            tile.max_splits = dcp__attend_max_splits(a, args, tile.n_total);
            for (int64_t s = 0; s < args->n_seqs; s++)
                if (args->seqs[s].n_rows > 0) a->last_type = args->seqs[s].view->dtype;
        }
        DCP_TRY(run_tile(a, &tile, start_s, stats));
        tile.begin += tile.n_rows;
        start_s = dcp__now_s();
    } while (tile.begin < tile.n_total);
    stats->wire_bytes += stats->merge.wire_bytes;
    return DCP_OK;
}

dcp_status dcp_attend_run(dcp_attend *a, const dcp_attend_args *args, dcp_attend_stats *stats_out)
{
    if (a == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: the object is NULL");
    DCP_TRY(dcp__group_enter(a->group));
    dcp_attend_stats stats;
    memset(&stats, 0, sizeof(stats));
    const dcp_status st = run_call(a, args, &stats);
    dcp__group_leave(a->group);
    if (st == DCP_OK && stats_out != NULL) *stats_out = stats;
    return st;
}
