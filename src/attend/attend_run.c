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
#include "base/struct_priv.h"
#include "merge/merge_priv.h"

static const struct dcp__attend_field run_fields[] = {
    {"T (rows of the call)", false},     {"n_seqs", false},
    {"the sum of lengths", false},       {"the sum of windows", false},
    {"whether q_pos is given", false},   {"the fingerprint of lengths, n_rows and windows", false},
    {"the fingerprint of q_pos", false},
};
enum { N_RUN_FIELDS = sizeof(run_fields) / sizeof(run_fields[0]) };

/* ---- local checks -------------------------------------------------------------------------- */

/* Are count * stride elements, and at after them, bytes that an int64 can count? */
static bool spans_fit(int64_t n0, int64_t s0, int64_t n1, int64_t s1, int64_t at, int64_t elem)
{
    int64_t x, y;
    return !__builtin_mul_overflow(n0, s0, &x) && !__builtin_mul_overflow(n1, s1, &y) &&
           !__builtin_add_overflow(x, y, &x) && !__builtin_add_overflow(x, at, &x) &&
           !__builtin_mul_overflow(x, elem, &x);
}

/* The kernels read single elements at any distance: each must be aligned to its own size, which
 * strides in elements keep, and no distance may overflow. */
static dcp_status check_view(const struct dcp_attend *a, const dcp_kv_view *v, int64_t own,
                             long long at)
{
    const int64_t elem = (int64_t)dcp_dtype_bytes(v->dtype);
    const int64_t hkv = a->d.n_kv_heads;
    const struct {
        const char *name;
        int64_t page_bytes, slot, head, dim;
        const void *base;
    } parts[2] = {
        {"k", v->k_page_stride_bytes, v->k_slot_stride, v->k_head_stride, a->d.key_dim, v->k_base},
        {"v", v->v_page_stride_bytes, v->v_slot_stride, v->v_head_stride, a->d.value_dim,
         v->v_base}};
    for (int i = 0; i < 2; i++) {
        const char *const name = parts[i].name;
        if (parts[i].page_bytes < 0 || parts[i].slot < 0 || parts[i].head < 0) {
            return dcp__fail(
                DCP_ERR_ARG,
                "dcp_attend_run: sequence %lld: the view's %s strides are %lld bytes a "
                "page, %lld a slot, %lld a head; none may be negative",
                at, name, (long long)parts[i].page_bytes, (long long)parts[i].slot,
                (long long)parts[i].head);
        }
        if ((uintptr_t)parts[i].base % (uintptr_t)elem != 0 || parts[i].page_bytes % elem != 0) {
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: sequence %lld: %s_base or %s_page_stride_bytes is no "
                             "multiple of the element's %lld bytes",
                             at, name, name, (long long)elem);
        }
        const int64_t n_slots = v->page_tokens < own ? v->page_tokens : own;
        if (parts[i].page_bytes > INT64_MAX / INT32_MAX / 2 ||
            !spans_fit(n_slots, parts[i].slot, hkv, parts[i].head, parts[i].dim, 2 * elem)) {
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: sequence %lld: the view's %s strides (%lld bytes a "
                             "page, %lld a slot, %lld a head) exceed the address space",
                             at, name, (long long)parts[i].page_bytes, (long long)parts[i].slot,
                             (long long)parts[i].head);
        }
    }
    const int64_t n_pages = own / v->page_tokens + (own % v->page_tokens != 0);
    for (int64_t p = 0; p < n_pages; p++) {
        if (v->pages[p] < 0) {
            return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld: pages[%lld] is %d", at,
                             (long long)p, (int)v->pages[p]);
        }
    }
    return DCP_OK;
}

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
    return own > 0 ? check_view(a, view, own, at) : DCP_OK;
}

static dcp_status check_rows(const char *name, const void *ptr, int64_t n, int64_t stride,
                             int64_t row)
{
    if (row > 0 && ptr == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s is NULL", name);
    if ((uintptr_t)ptr % _Alignof(float) != 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s is not aligned to its elements", name);
    }
    if (stride >= row && !spans_fit(n, stride, 0, 0, row, (int64_t)sizeof(float))) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: %lld rows of %s_token_stride %lld exceed the address "
                         "space",
                         (long long)n, name, (long long)stride);
    }
    if (stride == 0 || stride >= row) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "dcp_attend_run: %s_token_stride is %lld, a row has %lld elements", name,
                     (long long)stride, (long long)row);
}

/* ---- overlaps: results lie neither in each other nor in what the call reads ----------------- */

static struct dcp__region region_of(const void *at, int64_t n_rows, int64_t row_bytes,
                                    int64_t stride, int64_t dense)
{
    return (struct dcp__region){at, n_rows, (stride != 0 ? stride : dense) * (int64_t)sizeof(float),
                                1,  0,      row_bytes};
}

/* Does a result lie in the keys or values of a view that this rank's attention reads? One page
 * after another: [slots][KV heads][dim], at any strides. */
static bool overlaps_view(const struct dcp_attend *a, const dcp_attend_seq *seq,
                          const struct dcp__region results[2])
{
    const dcp_kv_view *v = seq->view;
    const int64_t elem = (int64_t)dcp_dtype_bytes(v->dtype);
    int64_t left = dcp_local_length(seq->length, a->n_ranks, a->rank, a->d.interleave);
    for (int64_t p = 0; left > 0; p++, left -= v->page_tokens) {
        const int64_t n_slots = left < v->page_tokens ? left : v->page_tokens;
        const struct dcp__region k = {(const char *)v->k_base +
                                          v->pages[p] * v->k_page_stride_bytes,
                                      n_slots,
                                      v->k_slot_stride * elem,
                                      a->d.n_kv_heads,
                                      v->k_head_stride * elem,
                                      a->d.key_dim * elem};
        const struct dcp__region val = {(const char *)v->v_base +
                                            v->pages[p] * v->v_page_stride_bytes,
                                        n_slots,
                                        v->v_slot_stride * elem,
                                        a->d.n_kv_heads,
                                        v->v_head_stride * elem,
                                        a->d.value_dim * elem};
        for (int i = 0; i < 2; i++)
            if (dcp__regions_overlap(&results[i], &k) || dcp__regions_overlap(&results[i], &val))
                return true;
    }
    return false;
}

static dcp_status check_overlaps(const struct dcp_attend *a, const dcp_attend_args *args,
                                 int64_t n_total)
{
    const int64_t n_own = a->heads.end - a->heads.begin, elem = (int64_t)sizeof(float);
    if (n_own == 0) return DCP_OK;
    const int64_t q_row = n_own * a->d.key_dim, out_row = n_own * a->d.value_dim;
    static const char *const names[2] = {"out", "lse"};
    const struct dcp__region results[2] = {
        region_of(args->out, n_total, out_row * elem, args->out_token_stride, out_row),
        region_of(args->lse, n_total, n_own * elem, args->lse_token_stride, n_own)};
    const struct {
        const char *name;
        struct dcp__region region;
    } inputs[] = {
        {"q", region_of(args->q, n_total, q_row * elem, args->q_token_stride, q_row)},
        {"q_pos", region_of(args->q_pos, 1, n_total * (int64_t)sizeof(int64_t), 0, 0)},
        {"sink", region_of(args->sink, 1, a->d.n_heads * elem, 0, 0)},
    };
    if (dcp__regions_overlap(&results[0], &results[1]))
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: out and lse overlap");
    for (int r = 0; r < 2; r++)
        for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++)
            if (dcp__regions_overlap(&results[r], &inputs[i].region))
                return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s overlaps %s", names[r],
                                 inputs[i].name);
    for (int64_t s = 0; s < args->n_seqs; s++)
        if (overlaps_view(a, &args->seqs[s], results))
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: out or lse overlaps the keys or values of sequence "
                             "%lld",
                             (long long)s);
    return DCP_OK;
}

/* Everything that can be wrong on this rank alone; args is a copy of this library's own size. */
static dcp_status check_args(const struct dcp_attend *a, const dcp_attend_args *args,
                             int64_t *n_total_out)
{
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
    DCP_TRY(check_rows("q", args->q, n_total, args->q_token_stride, n_own * a->d.key_dim));
    DCP_TRY(check_rows("out", args->out, n_total, args->out_token_stride, n_own * a->d.value_dim));
    DCP_TRY(check_rows("lse", args->lse == NULL ? (const float *)args->out : args->lse, n_total,
                       args->lse_token_stride, n_own));
    return check_overlaps(a, args, n_total);
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
    stats->nonfinite_values += one.nonfinite_values;
    stats->lse_bad += one.lse_bad;
    stats->lse_empty += one.lse_empty;
    stats->merge_wire_bytes += one.wire_bytes;
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

static dcp_status read_call(const struct dcp_attend *a, const dcp_attend_args *theirs,
                            const dcp_attend_stats *stats_out, dcp_attend_args *args,
                            int64_t *n_total_out)
{
    DCP_TRY(dcp__struct_read("dcp_attend_run", "DCP_ATTEND_ARGS_INIT", theirs,
                             DCP__STRUCT_UPTO(dcp_attend_args, lse_token_stride), args,
                             sizeof(*args)));
    DCP_TRY(dcp__struct_check_out("dcp_attend_run", "DCP_ATTEND_STATS_INIT", stats_out,
                                  DCP__STRUCT_UPTO(dcp_attend_stats, lse_empty)));
    return check_args(a, args, n_total_out);
}

static dcp_status run_call(struct dcp_attend *a, const dcp_attend_args *theirs,
                           dcp_attend_stats *stats, dcp_attend_stats *stats_out)
{
    double start_s = dcp__now_s();
    struct dcp__attend_record mine = {0};
    dcp_attend_args copy, *const args = &copy;
    struct dcp__attend_tile tile = {.args = args};
    dcp_status st = read_call(a, theirs, stats_out, args, &tile.n_total);
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
    stats->wire_bytes += stats->merge_wire_bytes;
    return DCP_OK;
}

dcp_status dcp_attend_run(dcp_attend *a, const dcp_attend_args *args, dcp_attend_stats *stats_out)
{
    if (a == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: the object is NULL");
    DCP_TRY(dcp__group_enter(a->group));
    dcp_attend_stats stats;
    memset(&stats, 0, sizeof(stats));
    const dcp_status st = run_call(a, args, &stats, stats_out);
    dcp__group_leave(a->group);
    if (st == DCP_OK)
        dcp__struct_write(stats_out, DCP__STRUCT_UPTO(dcp_attend_stats, lse_empty), &stats,
                          sizeof(stats));
    return st;
}
