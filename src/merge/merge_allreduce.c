/* SPDX-License-Identifier: Apache-2.0 */
/* allreduce: the published algorithm, kept as the baseline of benches and tests, in both forms:
 * allreduce as after its fix (in place), allreduce-temp as before it (two full f32 temporaries).
 *
 *              rank 0            rank 1            rank 2
 *   partials   a0 a1 a2          b0 b1 b2          c0 c1 c2
 *   1. all-gather the LSEs [T,H]; log-sum-exp over ranks
 *   2. scale the own partial by its weight (empty rows become 0, non-finite values too): IN PLACE;
 *      or, before the fix: a cleaned f32 copy, and of that a scaled one
 *   3. all-reduce it: every rank holds a+b+c, all columns
 *   4. copy the own columns out: m0, m1, m2
 *
 * Cost     an all-reduce moves twice the bytes that a reduce-scatter needs, for (N-1)/N of which
 *          there is no use; transports allocate buffers of their own for it.
 * Scratch  [N,T,H] LSEs and [T,H] of the own; where out is not f32 a full f32 partial, as the
 *          transport sums f32. With temporaries: two full f32 partials.
 * Order    the transport's, and so are the bits.
 * Exempt   The caller's partial is OVERWRITTEN (f32, in place). Workspace is not bounded by the
 *          limit. Empty rows are written. No tiles. The wire type plays no part. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

static size_t lse_elems(const struct dcp_merge *m)
{
    return (size_t)(m->desc.max_tokens * m->desc.n_heads);
}

/* Step 2 for row (t, h): to = w * own row; counts what it zeroes or keeps. The form with
 * temporaries cleans into copy first. */
static void scale_row(struct dcp_merge *m, struct dcp__merge_run *run, int64_t t, int64_t h,
                      float w, float *copy, float *to)
{
    const dcp_merge_desc *d = &m->desc;
    const void *from = run->own.out + dcp__merge_offset(t, h, run->own.out_ts, run->own.out_hs) *
                                          (int64_t)dcp_dtype_bytes(d->out_type);
    dcp__merge_row_fn *widen = m->math.kernels.merge_row[d->out_type][DCP_F32];
    const bool zeroes = d->nonfinite == DCP_NONFINITE_ZERO;
    if (!(w > 0.0f)) {
        if (copy != NULL) memset(copy, 0, (size_t)d->dim * sizeof(*to));
        memset(to, 0, (size_t)d->dim * sizeof(*to));
        return;
    }
    int first = 1;
    const float one = 1.0f;
    const float *scaled = copy != NULL ? &one : &w;
    const int64_t n_bad =
        widen(&from, scaled, 1, d->dim, copy != NULL ? copy : to, zeroes, NULL, &first);
    if (n_bad != 0) dcp__merge_saw(&run->seen, n_bad, t, h, m->rank);
    const void *cleaned = copy;
    if (copy != NULL)
        (void)m->math.kernels.merge_row[DCP_F32][DCP_F32](&cleaned, &w, 1, d->dim, to, false, NULL,
                                                          &first);
}

/* [1 or 2][T, H]: LSE, or maximum and sum. */
static void load_lses(struct dcp_merge *m, struct dcp__merge_run *run, float *cols)
{
    const int64_t n_heads = m->desc.n_heads;
    const int64_t n_rows = run->n_tokens * n_heads;
    float lse[DCP__MERGE_ROWS];
    float sum[DCP__MERGE_ROWS];
    for (int64_t t = 0; t < run->n_tokens; t++) {
        for (int64_t h = 0; h < n_heads; h += DCP__MERGE_ROWS) {
            const int n = n_heads - h < DCP__MERGE_ROWS ? (int)(n_heads - h) : (int)DCP__MERGE_ROWS;
            dcp__merge_load(&run->own, t, h, n, lse, m->math.has_sum ? sum : NULL, true,
                            &run->seen);
            memcpy(cols + t * n_heads + h, lse, (size_t)n * sizeof(float));
            if (m->math.has_sum)
                memcpy(cols + n_rows + t * n_heads + h, sum, (size_t)n * sizeof(float));
        }
    }
}

/* f32 rows of the caller's partial or of temporaries. */
struct rows {
    float *at, *copy;
    int64_t ts, hs;
};

static struct rows rows_of(struct dcp_merge *m, struct dcp__merge_run *run, float *temp)
{
    const dcp_merge_desc *d = &m->desc;
    const size_t whole = lse_elems(m) * (size_t)d->dim;
    struct rows rows = {temp, NULL, d->n_heads * d->dim, d->dim};
    if (m->algo->id == DCP_MERGE_ALLREDUCE_TEMP) {
        rows.copy = temp + whole;
    } else if (d->out_type == DCP_F32) {
        rows.at = (float *)(uintptr_t)(const void *)run->own.out;
        rows.ts = run->own.out_ts;
        rows.hs = run->own.out_hs;
    }
    return rows;
}

/* Weights of all rows; merged LSEs where they are wanted; the own partial scaled. */
static void scale_all(struct dcp_merge *m, struct dcp__merge_run *run, const float *all_lse,
                      const struct rows *rows, const struct dcp__merge_block *mine)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    const struct dcp__merge_scratch *s = &m->math.scratch;
    const int64_t n_rows = run->n_tokens * d->n_heads;
    for (int64_t t = 0; t < run->n_tokens; t++) {
        for (int64_t h0 = 0; h0 < d->n_heads; h0 += DCP__MERGE_ROWS) {
            float merged[DCP__MERGE_ROWS];
            float sinks[DCP__MERGE_ROWS];
            for (int j = 0; j < DCP__MERGE_ROWS; j++) {
                const bool is_row = h0 + j < d->n_heads;
                const int64_t row = t * d->n_heads + h0 + j;
                sinks[j] = is_row && a->sink != NULL ? a->sink[h0 + j] : -__builtin_inff();
                for (int r = 0; r < m->n_ranks; r++) {
                    const float *cols = all_lse + r * n_rows * m->shape.n_cols;
                    s->lse[r * DCP__MERGE_ROWS + j] = is_row ? cols[row] : -__builtin_inff();
                    s->sum[r * DCP__MERGE_ROWS + j] =
                        is_row && m->math.has_sum ? cols[n_rows + row] : 1.0f;
                }
            }
            dcp__merge_weights(&m->math, s->lse, m->math.has_sum ? s->sum : NULL, m->n_ranks,
                               a->sink != NULL ? sinks : NULL, s->weights, merged);
            for (int64_t h = h0; h < h0 + DCP__MERGE_ROWS && h < d->n_heads; h++) {
                const int64_t at = dcp__merge_offset(t, h, rows->ts, rows->hs);
                scale_row(m, run, t, h, s->weights[m->rank * DCP__MERGE_ROWS + h - h0],
                          rows->copy != NULL ? rows->copy + at : NULL, rows->at + at);
                const bool is_mine =
                    t >= mine->t_begin && t < mine->t_end && h >= mine->h_begin && h < mine->h_end;
                if (is_mine && a->merged_lse != NULL)
                    a->merged_lse[dcp__merge_offset(t - mine->t_begin, h - mine->h_begin,
                                                    a->merged_lse_token_stride,
                                                    a->merged_lse_head_stride)] = merged[h - h0];
            }
        }
    }
}

/* Step 3 in the largest pieces that lie in one stretch on every rank. */
static dcp_status reduce_all(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct rows *rows)
{
    const dcp_merge_desc *d = &m->desc;
    const size_t whole = (size_t)(run->n_tokens * d->n_heads * d->dim);
    const bool is_callers = rows->at == (const void *)run->own.out;
    if (!is_callers || run->contiguity == 2) return dcp__group_allreduce_f32(m->g, rows->at, whole);
    for (int64_t t = 0; t < run->n_tokens; t++) {
        const int64_t n_pieces = run->contiguity == 1 ? 1 : d->n_heads;
        for (int64_t h = 0; h < n_pieces; h++)
            DCP_TRY(dcp__group_allreduce_f32(
                m->g, rows->at + dcp__merge_offset(t, h, rows->ts, rows->hs),
                (size_t)(run->contiguity == 1 ? d->n_heads * d->dim : d->dim)));
    }
    return DCP_OK;
}

/* One step: the group's all-reduce waits, so a test of it does too. */
static dcp_status step_allreduce(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    dcp__fault_point(m->g, "merge");
    *done_out = true;
    run->moved = true;
    if (run->n_tokens == 0) return DCP_OK;
    const size_t n_lses = (size_t)(run->n_tokens * d->n_heads * m->shape.n_cols);
    float *own_lse = m->private_ws;
    float *all_lse = own_lse + n_lses;
    float *temp = own_lse + lse_elems(m) * (size_t)m->shape.n_cols * (size_t)(m->n_ranks + 1);
    const struct dcp__merge_block mine =
        dcp__merge_block_got(d->cut, run->n_tokens, d->n_heads, m->n_ranks, m->rank);
    const struct rows rows = rows_of(m, run, temp);
    load_lses(m, run, own_lse);
    DCP_TRY(dcp_group_allgather(m->g, own_lse, n_lses * sizeof(float), all_lse));
    scale_all(m, run, all_lse, &rows, &mine);
    DCP_TRY(reduce_all(m, run, &rows));
    const float one = 1.0f;
    for (int64_t t = mine.t_begin; t < mine.t_end; t++) {
        for (int64_t h = mine.h_begin; h < mine.h_end; h++) {
            const void *from = rows.at + dcp__merge_offset(t, h, rows.ts, rows.hs);
            char *to = (char *)a->merged + dcp__merge_offset(t - mine.t_begin, h - mine.h_begin,
                                                             a->merged_token_stride,
                                                             a->merged_head_stride) *
                                               (int64_t)dcp_dtype_bytes(d->merged_type);
            int first = 1;
            if (from != (const void *)to)
                (void)m->math.kernels.merge_row[DCP_F32][d->merged_type](&from, &one, 1, d->dim, to,
                                                                         false, NULL, &first);
        }
    }
    dcp__merge_traffic(&m->shape, run->n_tokens, &run->wire_bytes, &run->n_messages);
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_allreduce = {
    DCP_MERGE_ALLREDUCE, "allreduce", "transport's", false, false, true, false, step_allreduce,
};
const struct dcp__merge_algo dcp__merge_allreduce_temp = {
    DCP_MERGE_ALLREDUCE_TEMP, "allreduce-temp", "transport's", false, false, false, false,
    step_allreduce,
};
