/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's partial of a tile, by all its threads.
 *
 * Work items are (sequence, KV head, block of query heads, block of tokens, split of keys). A row's
 * bits depend on how its keys are split and on nothing else of the division, so splits follow the
 * call (rows, lengths, windows) and never the tile, the memory limit or the threads:
 *
 *     many rows    no split; row blocks feed the threads: of as many rows as a job is best given,
 *                  or of fewer where there are more threads        (prompt chunks, big batches)
 *     few rows     each sequence's visible keys in ranges of S (attend_split_priv.h)
 *
 *         local index    base      base + S    base + 2 S
 *         visible         |--|--------|------------|------|    3 items; each sums its own keys:
 *                             s = 0       s = 1      s = 2     split_out[s][row], split_lse[s][row]
 *
 * then the splits of a row are merged in order by the merge's own kernels. Splitting costs D sums
 * a split and row, against S * (Dk + D) products in it. Where memory for the splits of a tile is
 * short, some heads of one row go at a time: the same ranges, so the same bits.
 *
 * A job reads q where it lies: the caller's own, a peer's memory, what a message brought. Where the
 * heads of a job lie on several ranks, its thread copies them side by side first. */
#include <math.h>
#include <string.h>

#include "attend/attend_priv.h"
#include "base/clock_priv.h"

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static int64_t div_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

int64_t dcp__attend_max_splits(const struct dcp_attend *a, const dcp_attend_args *args,
                               int64_t n_total)
{
    int64_t n_blocks = 0;
    for (int64_t s = 0; s < args->n_seqs; s++)
        n_blocks += div_up(args->seqs[s].n_rows, a->block_rows);
    n_blocks *= a->d.n_kv_heads * a->n_head_blocks;
    if (n_blocks == 0) return 1;
    return max_i64(1,
                   min_i64(DCP__ATTEND_ITEMS / n_blocks, a->split_rows / (n_total * a->d.n_heads)));
}

/* Cut the keys that rows of sequence s see: all its rows in the call, whatever the tile. */
static void plan_splits(const struct dcp_attend *a, const struct dcp__attend_tile *tile,
                        const dcp_attend_seq *s, int64_t row0, struct dcp__attend_seg *seg)
{
    seg->split = (struct dcp__attend_split){.n = 1};
    if (tile->max_splits == 1) return;
    int64_t lo = INT64_MAX, hi = 0;
    for (int64_t i = 0; i < s->n_rows; i++) {
        const dcp_range v =
            dcp_visible_range(dcp__attend_pos(tile->args, s, row0, i), s->length, s->window,
                              (int)a->d.causal, a->n_ranks, a->rank, a->d.interleave);
        if (v.begin >= v.end) continue;
        lo = min_i64(lo, v.begin);
        hi = max_i64(hi, v.end);
    }
    seg->split = dcp__attend_split_keys(lo, hi, tile->max_splits);
}

void dcp__attend_plan_tile(struct dcp_attend *a, struct dcp__attend_tile *tile)
{
    const dcp_attend_args *args = tile->args;
    int64_t row = 0;
    tile->n_segs = 0;
    tile->n_items = 0;
    while (row < tile->n_rows) {
        const dcp_attend_seq *s = &args->seqs[tile->seq_at];
        const int64_t n = min_i64(s->n_rows - tile->row_at, tile->n_rows - row);
        if (n > 0) {
            /* Where this sequence's rows start in the call. */
            const int64_t row0 = tile->begin + row - tile->row_at;
            struct dcp__attend_seg *seg = &a->segs[tile->n_segs++];
            plan_splits(a, tile, s, row0, seg);
            seg->seq = s;
            seg->row = row;
            seg->n_rows = n;
            seg->block_rows = dcp__attend_block_rows(a->block_rows, a->block_heads,
                                                     a->d.n_kv_heads * a->n_head_blocks,
                                                     a->d.n_threads, tile->n_rows, seg->split.n);
            seg->n_token_blocks = div_up(n, seg->block_rows);
            seg->item = tile->n_items;
            tile->n_items +=
                a->d.n_kv_heads * a->n_head_blocks * seg->n_token_blocks * seg->split.n;
            for (int64_t i = 0; i < n; i++) {
                const dcp_range v = dcp_visible_range(
                    dcp__attend_pos(args, s, row0, tile->row_at + i), s->length, s->window,
                    (int)a->d.causal, a->n_ranks, a->rank, a->d.interleave);
                a->lo[row + i] = v.begin;
                a->hi[row + i] = v.end;
            }
            row += n;
            tile->row_at += n;
        }
        if (tile->row_at == s->n_rows) {
            tile->seq_at++;
            tile->row_at = 0;
        }
    }
}

struct partial_ctx {
    struct dcp_attend *a;
    const struct dcp__attend_tile *tile;
    /* some heads of one row at a time */
    const struct dcp__attend_seg *seg;
    int64_t row, kv_head, head, n_heads;
    /* of split partials: the (row, head) that lies first, and how many there are */
    int64_t pair0, n_pairs;
};

static const struct dcp__attend_seg *find_seg(const struct dcp_attend *a, int64_t n_segs,
                                              int64_t item)
{
    int64_t low = 0, high = n_segs;
    while (high - low > 1) {
        const int64_t mid = low + (high - low) / 2;
        if (a->segs[mid].item <= item)
            low = mid;
        else
            high = mid;
    }
    return &a->segs[low];
}

/* q of n_heads heads from h on, rows from row on. */
static const float *job_queries(struct dcp_attend *a, int64_t row, int64_t n_rows, int64_t h,
                                int64_t n_heads, int thread, int64_t *stride_out)
{
    const int64_t dk = a->d.key_dim;
    int r = dcp_cut_owner(a->d.n_heads, a->n_ranks, h);
    const struct dcp__attend_peer *p = &a->peers[r];
    if (h + n_heads <= p->heads.end) {
        *stride_out = p->q_stride;
        return p->q + row * p->q_stride + (h - p->heads.begin) * dk;
    }
    struct dcp__attend_thread *const mine = &a->threads[thread];
    const double start_s = dcp__now_s();
    *stride_out = n_heads * dk;
    for (int64_t at = h; at < h + n_heads; r++) {
        p = &a->peers[r];
        const int64_t n = min_i64(p->heads.end, h + n_heads) - at;
        for (int64_t t = 0; t < n_rows && n > 0; t++)
            memcpy(mine->q + (t * n_heads + at - h) * dk,
                   p->q + (row + t) * p->q_stride + (at - p->heads.begin) * dk,
                   (size_t)(n * dk) * sizeof(float));
        at += n;
    }
    mine->copy_s += dcp__now_s() - start_s;
    return mine->q;
}

/* Rows [row, row + n_rows) of the tile, query heads [j, j + n_heads) of KV head g, one split. */
static void attend_job(const struct partial_ctx *ctx, const struct dcp__attend_seg *seg,
                       int64_t row, int64_t n_rows, int64_t g, int64_t j, int64_t n_heads,
                       int64_t split, int thread)
{
    struct dcp_attend *a = ctx->a;
    const struct dcp__attend_tile *tile = ctx->tile;
    const int64_t h = g * a->n_group + j;
    const int64_t dk = a->d.key_dim, dv = a->d.value_dim, all_heads = a->d.n_heads;
    struct dcp__attn_job job = {
        .view = seg->seq->view,
        .kv_head = g,
        .key_begin = 0,
        .key_end = seg->seq->view->n_keys,
        .n_tokens = n_rows,
        .n_group = n_heads,
        .dk = dk,
        .dv = dv,
        .scale = a->d.scale,
        .softcap = a->d.softcap,
        .lo = a->lo + row,
        .hi = a->hi + row,
        .q_head_stride = dk,
        .out = tile->part + row * tile->part_token_stride + h * dv,
        .out_token_stride = tile->part_token_stride,
        .out_head_stride = dv,
        .lse = tile->lse + row * all_heads + h,
        .lse_token_stride = all_heads,
        .lse_head_stride = 1,
        .scratch = a->threads[thread].scratch,
        .scales =
            tile->args->scales != NULL ? &tile->args->scales[seg->seq - tile->args->seqs] : NULL,
        .call_rows = seg->seq->n_rows * a->n_group,
    };
    job.q = job_queries(a, row, n_rows, h, n_heads, thread, &job.q_token_stride);
    if (seg->split.n > 1) {
        /* A split's rows together: with splits in between, rows of 512 values 32 KiB apart fall
         * into four sets of L2. */
        const int64_t at = split * ctx->n_pairs + row * all_heads + h - ctx->pair0;
        job.key_begin = seg->split.begin + split * seg->split.keys;
        job.key_end = job.key_begin + seg->split.keys;
        job.out = a->split_out + at * dv;
        job.out_token_stride = all_heads * dv;
        job.out_head_stride = dv;
        job.lse = a->split_lse + at;
        job.lse_token_stride = all_heads;
        job.lse_head_stride = 1;
    }
    a->kernels.attn[seg->seq->view->dtype](&job);
    if (thread == 0 && tile->progress != NULL) tile->progress(tile->progress_ctx);
}

static void attend_item(void *ctx_ptr, int64_t item, int thread)
{
    const struct partial_ctx *ctx = ctx_ptr;
    const struct dcp_attend *a = ctx->a;
    const struct dcp__attend_seg *seg = find_seg(a, ctx->tile->n_segs, item);
    int64_t i = item - seg->item;
    const int64_t split = i % seg->split.n;
    i /= seg->split.n;
    const int64_t t = i % seg->n_token_blocks * seg->block_rows; /* in the segment */
    i /= seg->n_token_blocks;
    const int64_t j = i % a->n_head_blocks * a->block_heads; /* in the KV head's group */
    attend_job(ctx, seg, seg->row + t, min_i64(seg->block_rows, seg->n_rows - t),
               i / a->n_head_blocks, j, min_i64(a->block_heads, a->n_group - j), split, thread);
}

/* A split of the heads of one row that ctx names. */
static void attend_heads(void *ctx_ptr, int64_t split, int thread)
{
    const struct partial_ctx *ctx = ctx_ptr;
    attend_job(ctx, ctx->seg, ctx->row, 1, ctx->kv_head, ctx->head, ctx->n_heads, split, thread);
}

/* Merge the splits of DCP__MERGE_ROWS (row, head) pairs of the tile, those with splits. */
static void merge_splits_item(void *ctx_ptr, int64_t item, int thread)
{
    (void)thread;
    const struct partial_ctx *ctx = ctx_ptr;
    struct dcp_attend *a = ctx->a;
    const struct dcp__attend_tile *tile = ctx->tile;
    const int64_t n_heads = a->d.n_heads, dv = a->d.value_dim;
    const int64_t per_row = tile->max_splits;
    const int64_t begin = item * DCP__MERGE_ROWS; /* among the pairs there are */
    const int64_t n = min_i64(DCP__MERGE_ROWS, ctx->n_pairs - begin);
    _Alignas(64) float lse[DCP__ATTEND_ITEMS * DCP__MERGE_ROWS];
    _Alignas(64) float weights[DCP__ATTEND_ITEMS * DCP__MERGE_ROWS];
    _Alignas(64) float merged[DCP__MERGE_ROWS];
    int64_t n_splits[DCP__MERGE_ROWS];
    bool is_bad[DCP__MERGE_ROWS];
    for (int64_t k = 0; k < per_row * DCP__MERGE_ROWS; k++) lse[k] = -INFINITY;
    for (int64_t k = 0; k < n; k++) {
        const int64_t row = (ctx->pair0 + begin + k) / n_heads;
        int64_t s = 0;
        while (s + 1 < tile->n_segs && a->segs[s + 1].row <= row) s++;
        n_splits[k] = a->segs[s].split.n;
        is_bad[k] = false;
        if (n_splits[k] == 1) continue; /* written in place by its item */
        for (int64_t p = 0; p < n_splits[k]; p++) {
            const float x = a->split_lse[p * ctx->n_pairs + begin + k];
            lse[p * DCP__MERGE_ROWS + k] = isfinite(x) ? x : -INFINITY;
            if (!isfinite(x) && !(x < 0.0f)) is_bad[k] = true;
        }
    }
    a->kernels.merge_weights[0](lse, (int)per_row, false, NULL, weights, merged);
    for (int64_t k = 0; k < n; k++) {
        if (n_splits[k] == 1) continue;
        const void *parts[DCP__ATTEND_ITEMS];
        float w[DCP__ATTEND_ITEMS];
        int n_parts = 0;
        for (int64_t p = 0; p < n_splits[k]; p++) {
            if (!(weights[p * DCP__MERGE_ROWS + k] > 0.0f)) continue;
            parts[n_parts] = a->split_out + (p * ctx->n_pairs + begin + k) * dv;
            w[n_parts++] = weights[p * DCP__MERGE_ROWS + k];
        }
        const int64_t pair = ctx->pair0 + begin + k;
        const int64_t row = pair / n_heads, h = pair % n_heads;
        float *dst = tile->part + row * tile->part_token_stride + h * dv;
        /* An LSE that is no number marks the whole row, as it would without splits. */
        tile->lse[pair] = is_bad[k] ? NAN : merged[k];
        if (n_parts == 0 || is_bad[k]) {
            for (int64_t d = 0; d < dv; d++) dst[d] = 0.0f;
            continue;
        }
        int first_bad = n_parts;
        a->kernels.merge_row[DCP_F32][DCP_F32](parts, w, n_parts, dv, dst, false, NULL, &first_bad);
    }
}

static void merge_splits(struct partial_ctx *ctx)
{
    struct dcp_attend *a = ctx->a;
    /* Handing out work costs some microseconds: what takes less is done here. */
    const int64_t n_values = ctx->n_pairs * ctx->tile->max_splits * a->d.value_dim;
    dcp__pool_run(n_values >= 1 << 17 ? a->pool : NULL, div_up(ctx->n_pairs, DCP__MERGE_ROWS),
                  merge_splits_item, ctx);
}

/* Splits of some heads of one row at a time, as many as there is room for. */
static void attend_by_heads(struct partial_ctx *ctx, const struct dcp__attend_seg *seg)
{
    struct dcp_attend *a = ctx->a;
    const int64_t fit = max_i64(1, a->split_cap / ctx->tile->max_splits);
    ctx->seg = seg;
    for (int64_t t = 0; t < seg->n_rows; t++) {
        for (int64_t g = 0; g < a->d.n_kv_heads; g++) {
            const int64_t step = min_i64(fit, a->block_heads);
            for (int64_t j = 0; j < a->n_group; j += step) {
                ctx->row = seg->row + t;
                ctx->kv_head = g;
                ctx->head = j;
                ctx->n_heads = ctx->n_pairs = min_i64(step, a->n_group - j);
                ctx->pair0 = ctx->row * a->d.n_heads + g * a->n_group + j;
                dcp__pool_run(a->pool, seg->split.n, attend_heads, ctx);
                merge_splits(ctx);
            }
        }
    }
}

/* Items of a segment without splits, handed out from its first. */
static void attend_seg_item(void *ctx_ptr, int64_t item, int thread)
{
    const struct partial_ctx *ctx = ctx_ptr;
    attend_item(ctx_ptr, ctx->seg->item + item, thread);
}

void dcp__attend_partial(struct dcp_attend *a, struct dcp__attend_tile *tile)
{
    struct partial_ctx ctx = {.a = a, .tile = tile, .n_pairs = tile->n_rows * a->d.n_heads};
    bool any = false;
    for (int64_t s = 0; s < tile->n_segs && !any; s++) any = a->segs[s].split.n > 1;
    if (!any || ctx.n_pairs * tile->max_splits <= a->split_cap) {
        dcp__pool_run(a->pool, tile->n_items, attend_item, &ctx);
        if (any) merge_splits(&ctx);
    } else {
        for (int64_t s = 0; s < tile->n_segs; s++) {
            const struct dcp__attend_seg *seg = &a->segs[s];
            const int64_t end = s + 1 < tile->n_segs ? a->segs[s + 1].item : tile->n_items;
            ctx.seg = seg;
            if (seg->split.n > 1)
                attend_by_heads(&ctx, seg);
            else
                dcp__pool_run(a->pool, end - seg->item, attend_seg_item, &ctx);
        }
    }
    if (a->d.project_dim == 0) return;
    const double start_s = dcp__now_s();
    dcp__attend_project(a, tile);
    tile->project_s = dcp__now_s() - start_s;
}
