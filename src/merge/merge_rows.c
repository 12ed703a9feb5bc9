/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of N sources into one destination. Every algorithm and transport comes through here with its
 * sources in rank order, so the arithmetic, and with it the bits, is that of one place.
 *
 * Per token, DCP__MERGE_ROWS heads at a time:
 *   1. the LSEs of all sources, widened; empty parts become -inf and are counted;
 *   2. weights and merged LSE of all these rows at once;
 *   3. the merged LSEs are written (the sources' LSEs of these rows have been read: in place
 * works);
 *   4. for each row, the parts of positive weight are summed by the row kernel. */
#include <math.h>
#include <string.h>

#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

static float widen(dcp_dtype type, const char *base, int64_t i)
{
    if (type == DCP_F32) return ((const float *)(const void *)base)[i];
    const uint16_t h = ((const uint16_t *)(const void *)base)[i];
    return type == DCP_BF16 ? dcp__bf16_to_f32(h) : dcp__f16_to_f32(h);
}

float dcp__merge_lse_at(const struct dcp__merge_src *src, int64_t t, int64_t h)
{
    if (src->kv_len != NULL && src->kv_len[t] == 0) return -INFINITY;
    return widen(src->lse_type, src->lse, dcp__merge_offset(t, h, src->lse_ts, src->lse_hs));
}

static bool is_finite(float x)
{
    return (dcp__f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

void dcp__merge_saw(struct dcp__merge_seen *seen, int64_t n, int64_t t, int64_t h, int64_t rank)
{
    seen->n_nonfinite += n;
    const bool is_smaller = seen->t < 0 || t < seen->t ||
                            (t == seen->t && (h < seen->h || (h == seen->h && rank < seen->rank)));
    if (is_smaller) {
        seen->t = t;
        seen->h = h;
        seen->rank = rank;
    }
}

/* Step 1 for one source: its column of the LSE table. */
static void load_lses(const struct dcp__merge_src *src, int64_t t, int64_t h, int n, float *lse,
                      bool counts, struct dcp__merge_seen *seen)
{
    if (src->kv_len != NULL && src->kv_len[t] == 0) {
        for (int j = 0; j < DCP__MERGE_ROWS; j++) lse[j] = -INFINITY;
        if (counts) seen->n_lse_empty += n;
        return;
    }
    for (int j = 0; j < n; j++)
        lse[j] =
            widen(src->lse_type, src->lse, dcp__merge_offset(t, h + j, src->lse_ts, src->lse_hs));
    int n_not_finite = 0;
    for (int j = 0; j < n; j++) n_not_finite += !is_finite(lse[j]);
    for (int j = 0; n_not_finite > 0 && j < n; j++) {
        if (is_finite(lse[j])) continue;
        if (counts && lse[j] == -INFINITY) seen->n_lse_empty++;
        if (counts && lse[j] != -INFINITY) seen->n_lse_bad++;
        lse[j] = -INFINITY;
    }
    for (int j = n; j < DCP__MERGE_ROWS; j++) lse[j] = -INFINITY;
}

/* How many rows ahead to prefetch: some 4 KB of each part, at least 4 rows. */
static int64_t rows_ahead(int64_t row_bytes)
{
    return row_bytes >= 1024 ? 4 : row_bytes >= 256 ? 8 : 16;
}

/* The row that is n rows after (t, h) in the order of the walk. */
static bool row_after(const struct dcp__merge_block *b, int64_t t, int64_t h, int64_t n,
                      int64_t *t_out, int64_t *h_out)
{
    const int64_t width = b->h_end - b->h_begin;
    h += n;
    if (h >= b->h_end) {
        const int64_t over = h - b->h_begin;
        t += over / width;
        h = b->h_begin + over % width;
    }
    *t_out = t;
    *h_out = h;
    return t < b->t_end;
}

void dcp__merge_rows(struct dcp_merge *m, const struct dcp__merge_src *srcs, dcp_dtype part_type,
                     const float *sink, const struct dcp__merge_block *block,
                     const struct dcp__merge_dst *dst, bool counts, struct dcp__merge_seen *seen)
{
    if (dcp__merge_block_rows(block) == 0) return;
    const struct dcp__merge_scratch *s = &m->scratch;
    const dcp_merge_desc *desc = &m->desc;
    dcp__merge_row_fn *merge_row = m->kernels.merge_row[part_type][desc->merged_type];
    dcp__merge_weights_fn *merge_weights = m->kernels.merge_weights[0];
    const int64_t part_bytes = (int64_t)dcp_dtype_bytes(part_type);
    const int64_t merged_bytes = (int64_t)dcp_dtype_bytes(desc->merged_type);
    const int64_t n_ahead = rows_ahead(desc->dim * part_bytes);
    const bool zeroes = desc->nonfinite == DCP_NONFINITE_ZERO;
    const int n_ranks = m->n_ranks;

    for (int64_t t = block->t_begin; t < block->t_end; t++) {
        for (int64_t h0 = block->h_begin; h0 < block->h_end; h0 += DCP__MERGE_ROWS) {
            const int n = block->h_end - h0 < DCP__MERGE_ROWS ? (int)(block->h_end - h0)
                                                              : (int)DCP__MERGE_ROWS;
            for (int r = 0; r < n_ranks; r++)
                load_lses(&srcs[r], t, h0, n, s->lse + (int64_t)r * DCP__MERGE_ROWS, counts, seen);
            float sinks[DCP__MERGE_ROWS];
            float merged_lse[DCP__MERGE_ROWS];
            if (sink != NULL) {
                for (int j = 0; j < DCP__MERGE_ROWS; j++)
                    sinks[j] = j < n ? sink[h0 + j] : -INFINITY;
            }
            merge_weights(s->lse, n_ranks, desc->lse_base == DCP_LSE_BASE_2,
                          sink != NULL ? sinks : NULL, s->weights, merged_lse);
            if (dst->lse != NULL) {
                for (int j = 0; j < n; j++)
                    dst->lse[dcp__merge_offset(t - dst->t0, h0 + j - dst->h0, dst->lse_ts,
                                               dst->lse_hs)] = merged_lse[j];
            }
            for (int j = 0; j < n; j++) {
                const int64_t h = h0 + j;
                int64_t t_next = 0;
                int64_t h_next = 0;
                const bool looks_ahead = row_after(block, t, h, n_ahead, &t_next, &h_next);
                int n_parts = 0;
                for (int r = 0; r < n_ranks; r++) {
                    const float w = s->weights[(int64_t)r * DCP__MERGE_ROWS + j];
                    if (!(w > 0.0f)) continue;
                    const struct dcp__merge_src *src = &srcs[r];
                    const int64_t at = dcp__merge_offset(t, h, src->out_ts, src->out_hs);
                    s->parts[n_parts] = src->out + at * part_bytes;
                    if (looks_ahead) {
                        /* Only a hint: an address is made, nothing is read. */
                        const int64_t next =
                            dcp__merge_offset(t_next, h_next, src->out_ts, src->out_hs);
                        s->ahead[n_parts] = src->out + next * part_bytes;
                    }
                    s->part_weights[n_parts] = w;
                    s->part_rank[n_parts] = r;
                    n_parts++;
                }
                char *to = dst->out +
                           dcp__merge_offset(t - dst->t0, h - dst->h0, dst->out_ts, dst->out_hs) *
                               merged_bytes;
                if (n_parts == 0) {
                    memset(to, 0, (size_t)(desc->dim * merged_bytes));
                    continue;
                }
                int first = n_parts;
                const int64_t n_bad = merge_row(s->parts, s->part_weights, n_parts, desc->dim, to,
                                                zeroes, looks_ahead ? s->ahead : NULL, &first);
                if (n_bad != 0 && counts) dcp__merge_saw(seen, n_bad, t, h, s->part_rank[first]);
            }
        }
    }
}

void dcp__merge_pack(const struct dcp_merge *m, const struct dcp__merge_src *src,
                     const struct dcp__merge_block *block, dcp_dtype type, char *payload,
                     float *lse)
{
    const dcp_dtype out_type = m->desc.out_type;
    const int64_t from_bytes = (int64_t)dcp_dtype_bytes(out_type);
    const int64_t to_bytes = (int64_t)dcp_dtype_bytes(type);
    const int64_t dim = m->desc.dim;
    dcp__merge_row_fn *convert = m->kernels.merge_row[out_type][type];
    const float one = 1.0f;
    int64_t row = 0;
    for (int64_t t = block->t_begin; t < block->t_end; t++) {
        for (int64_t h = block->h_begin; h < block->h_end; h++, row++) {
            lse[row] = dcp__merge_lse_at(src, t, h);
            if (payload == NULL || !is_finite(lse[row])) continue;
            const void *from =
                src->out + dcp__merge_offset(t, h, src->out_ts, src->out_hs) * from_bytes;
            char *to = payload + row * dim * to_bytes;
            int first = 1;
            if (type == out_type)
                memcpy(to, from, (size_t)(dim * to_bytes));
            else
                (void)convert(&from, &one, 1, dim, to, false, NULL, &first);
        }
    }
}
