/* SPDX-License-Identifier: Apache-2.0 */
/* allreduce: the published algorithm, as after its fix, kept as the baseline of benches and tests.
 *
 *              rank 0            rank 1            rank 2
 *   partials   a0 a1 a2          b0 b1 b2          c0 c1 c2
 *   1. all-gather the LSEs [T,H]; log-sum-exp over ranks
 *   2. scale the own partial IN PLACE by its weight (empty rows become 0, non-finite values too)
 *   3. all-reduce it: every rank holds a+b+c, all columns
 *   4. copy the own columns out: m0, m1, m2
 *
 * Cost     an all-reduce moves twice the bytes that a reduce-scatter needs, for (N-1)/N of which
 *          there is no use; transports allocate buffers of their own for it.
 * Scratch  [N,T,H] LSEs and [T,H] of the own; where out is not f32 a full f32 partial, as the
 *          transport sums f32.
 * Exempt   The caller's partial is OVERWRITTEN (f32). Bits and order are the transport's. Workspace
 * is not bounded by the limit. Empty rows are written. No tiles. The wire type plays no part. Order
 * the transport's. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

static size_t lse_elems(const struct dcp_merge *m)
{
    return (size_t)(m->desc.max_tokens * m->desc.n_heads);
}

static size_t private_bytes(const struct dcp_merge *m)
{
    const size_t lses = lse_elems(m) * sizeof(float) * (size_t)(m->n_ranks + 1);
    const size_t wide =
        m->desc.out_type == DCP_F32 ? 0 : lse_elems(m) * (size_t)m->desc.dim * sizeof(float);
    return wide + lses;
}

static size_t group_bytes(const struct dcp_merge *m)
{
    (void)m;
    return 0;
}

static dcp_status plan(struct dcp_merge *m, int64_t tile_tokens)
{
    (void)tile_tokens;
    m->tile_tokens = m->desc.max_tokens;
    return DCP_OK;
}

/* Step 2 for row (t, h): to = w * own row; counts what it zeroes or keeps. */
static void scale_row(struct dcp_merge *m, struct dcp__merge_run *run, int64_t t, int64_t h,
                      float w, float *to)
{
    const dcp_merge_desc *d = &m->desc;
    const void *from = run->own.out + dcp__merge_offset(t, h, run->own.out_ts, run->own.out_hs) *
                                          (int64_t)dcp_dtype_bytes(d->out_type);
    if (!(w > 0.0f)) {
        memset(to, 0, (size_t)d->dim * sizeof(*to));
        return;
    }
    int first = 1;
    const int64_t n_bad = m->kernels.merge_row[d->out_type][DCP_F32](
        &from, &w, 1, d->dim, to, d->nonfinite == DCP_NONFINITE_ZERO, NULL, &first);
    if (n_bad != 0) dcp__merge_saw(&run->seen, n_bad, t, h, m->rank);
}

static void count_lses(struct dcp_merge *m, struct dcp__merge_run *run, float *lse)
{
    const int64_t n_heads = m->desc.n_heads;
    for (int64_t t = 0; t < run->n_tokens; t++) {
        for (int64_t h = 0; h < n_heads; h++) {
            float x = dcp__merge_lse_at(&run->own, t, h);
            if ((dcp__f32_bits(x) & 0x7f800000u) == 0x7f800000u) {
                if (x == -__builtin_inff())
                    run->seen.n_lse_empty++;
                else
                    run->seen.n_lse_bad++;
                x = -__builtin_inff();
            }
            lse[t * n_heads + h] = x;
        }
    }
}

/* Weights of all rows; merged LSEs where they are wanted; the own partial scaled. */
static void scale_all(struct dcp_merge *m, struct dcp__merge_run *run, const float *all_lse,
                      float *wide, const struct dcp__merge_block *mine)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    const struct dcp__merge_scratch *s = &m->scratch;
    const int64_t n_rows = run->n_tokens * d->n_heads;
    float *out = wide != NULL ? wide : (float *)(uintptr_t)(const void *)run->own.out;
    const int64_t ts = wide != NULL ? d->n_heads * d->dim : run->own.out_ts;
    const int64_t hs = wide != NULL ? d->dim : run->own.out_hs;
    for (int64_t t = 0; t < run->n_tokens; t++) {
        for (int64_t h0 = 0; h0 < d->n_heads; h0 += DCP__MERGE_ROWS) {
            float merged[DCP__MERGE_ROWS];
            float sinks[DCP__MERGE_ROWS];
            for (int j = 0; j < DCP__MERGE_ROWS; j++) {
                const bool is_row = h0 + j < d->n_heads;
                sinks[j] = is_row && a->sink != NULL ? a->sink[h0 + j] : -__builtin_inff();
                for (int r = 0; r < m->n_ranks; r++)
                    s->lse[(int64_t)r * DCP__MERGE_ROWS + j] =
                        is_row ? all_lse[r * n_rows + t * d->n_heads + h0 + j] : -__builtin_inff();
            }
            m->kernels.merge_weights[0](s->lse, m->n_ranks, d->lse_base == DCP_LSE_BASE_2,
                                        a->sink != NULL ? sinks : NULL, s->weights, merged);
            for (int64_t h = h0; h < h0 + DCP__MERGE_ROWS && h < d->n_heads; h++) {
                scale_row(m, run, t, h, s->weights[(int64_t)m->rank * DCP__MERGE_ROWS + h - h0],
                          out + dcp__merge_offset(t, h, ts, hs));
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
static dcp_status reduce_all(struct dcp_merge *m, struct dcp__merge_run *run, float *wide)
{
    const dcp_merge_desc *d = &m->desc;
    const size_t whole = (size_t)(run->n_tokens * d->n_heads * d->dim);
    if (wide != NULL) return dcp__group_allreduce_f32(m->g, wide, whole);
    float *out = (float *)(uintptr_t)(const void *)run->own.out;
    if (run->contiguity == 2) return dcp__group_allreduce_f32(m->g, out, whole);
    for (int64_t t = 0; t < run->n_tokens; t++) {
        const int64_t n_pieces = run->contiguity == 1 ? 1 : d->n_heads;
        for (int64_t h = 0; h < n_pieces; h++)
            DCP_TRY(dcp__group_allreduce_f32(
                m->g, out + dcp__merge_offset(t, h, run->own.out_ts, run->own.out_hs),
                (size_t)(run->contiguity == 1 ? d->n_heads * d->dim : d->dim)));
    }
    return DCP_OK;
}

static dcp_status run_allreduce(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    dcp__fault_point(m->g, "merge");
    if (run->n_tokens == 0) return DCP_OK;
    const int64_t n_rows = run->n_tokens * d->n_heads;
    float *wide = d->out_type == DCP_F32 ? NULL : m->private_ws;
    float *own_lse = (float *)m->private_ws + (wide != NULL ? lse_elems(m) * (size_t)d->dim : 0);
    float *all_lse = own_lse + lse_elems(m);
    const struct dcp__merge_block mine =
        d->cut == DCP_CUT_NONE
            ? (struct dcp__merge_block){0, run->n_tokens, 0, d->n_heads}
            : dcp__merge_block_of(d->cut, run->n_tokens, d->n_heads, m->n_ranks, m->rank);
    count_lses(m, run, own_lse);
    DCP_TRY(dcp_group_allgather(m->g, own_lse, (size_t)n_rows * sizeof(float), all_lse));
    scale_all(m, run, all_lse, wide, &mine);
    DCP_TRY(reduce_all(m, run, wide));
    const float *sum = wide != NULL ? wide : (const float *)(const void *)run->own.out;
    const int64_t ts = wide != NULL ? d->n_heads * d->dim : run->own.out_ts;
    const int64_t hs = wide != NULL ? d->dim : run->own.out_hs;
    const float one = 1.0f;
    for (int64_t t = mine.t_begin; t < mine.t_end; t++) {
        for (int64_t h = mine.h_begin; h < mine.h_end; h++) {
            const void *from = sum + dcp__merge_offset(t, h, ts, hs);
            char *to = (char *)a->merged + dcp__merge_offset(t - mine.t_begin, h - mine.h_begin,
                                                             a->merged_token_stride,
                                                             a->merged_head_stride) *
                                               (int64_t)dcp_dtype_bytes(d->merged_type);
            int first = 1;
            if (from != (const void *)to)
                (void)m->kernels.merge_row[DCP_F32][d->merged_type](&from, &one, 1, d->dim, to,
                                                                    false, NULL, &first);
        }
    }
    run->wire_bytes =
        (n_rows * d->dim * 2 + n_rows) * (int64_t)sizeof(float) * (m->n_ranks - 1) / m->n_ranks;
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_allreduce = {
    DCP_MERGE_ALLREDUCE, "allreduce", false, true, plan, run_allreduce, private_bytes, group_bytes,
};
