/* SPDX-License-Identifier: Apache-2.0 */
/* Rows on their way through more than one merge. Each carries the LSEs of all parts that are in it,
 * not a merged one: so every weight, at every stage, comes from the LSEs as the callers gave them,
 * the merged LSE has the bits of direct, and the one who finishes a row knows whose non-finite
 * values had a positive weight after all.
 *
 *     row       f32 [D], normalised over the parts that are in it
 *     columns   per part: LSE (or max, sum), number of non-finite values in its payload
 *
 * Joining states A and B: weights w_r of all their parts together; A's rows count with
 * sum_{r in A} w_r, B's likewise.
 *
 * Where non-finite values propagate, a part whose weight is 0 only against the whole group would
 * spoil a state on the way. There the LSEs go round first and such parts are left out at once. */
#include <math.h>
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

enum { ROWS = DCP__MERGE_ROWS };
/* In the column of counts: its weight is 0 in the end, it is not in the row. */
#define LEFT_OUT 0x80000000u

struct dcp__merge_state dcp__merge_state_at(const struct dcp_merge *m, char *at, int64_t n_rows,
                                            int n_members, const int *members)
{
    const size_t payload = dcp__merge_payload_bytes(n_rows, m->desc.dim, sizeof(float));
    return (struct dcp__merge_state){.payload = (float *)(void *)at,
                                     .cols = (float *)(void *)(at + payload),
                                     .stride = n_rows,
                                     .n_members = n_members,
                                     .members = members};
}

size_t dcp__merge_state_bytes(const struct dcp_merge *m, int64_t n_rows, int n_members)
{
    return dcp__merge_rows_bytes(n_rows, m->desc.dim, sizeof(float),
                                 dcp__state_cols(&m->shape, n_members));
}

static int n_cols_of(const struct dcp_merge *m)
{
    return m->shape.n_cols + 1;
}

static float *column(const struct dcp_merge *m, const struct dcp__merge_state *s, int i, int c)
{
    const int64_t nth = s->is_by_rank ? s->members[i] : i;
    return s->cols + (nth * n_cols_of(m) + c) * s->stride;
}

static uint32_t *bad_column(const struct dcp_merge *m, const struct dcp__merge_state *s, int i)
{
    return (uint32_t *)(void *)column(m, s, i, m->shape.n_cols);
}

static int64_t count_bad(dcp_dtype type, const void *p, int64_t n)
{
    int64_t n_bad = 0;
    for (int64_t i = 0; i < n; i++) {
        if (type == DCP_F32)
            n_bad += (dcp__f32_bits(((const float *)p)[i]) & 0x7f800000u) == 0x7f800000u;
        else if (type == DCP_BF16)
            n_bad += (((const uint16_t *)p)[i] & 0x7f80u) == 0x7f80u;
        else
            n_bad += (((const uint16_t *)p)[i] & 0x7c00u) == 0x7c00u;
    }
    return n_bad;
}

/* Which of the members' n rows have weight 0 in the whole group: bit j of out[i]. */
static void find_left_out(struct dcp_merge *m, const struct dcp__merge_run *run,
                          const struct dcp__merge_table *table, int64_t row, int64_t h, int n,
                          const struct dcp__merge_state *to, uint32_t *left_out)
{
    const struct dcp__merge_scratch *s = &m->math.scratch;
    float sinks[ROWS];
    float merged[ROWS];
    for (int r = 0; r < m->n_ranks; r++) {
        const float *cols =
            (const float *)(const void *)(table->at + (size_t)r * table->rank_bytes);
        for (int j = 0; j < ROWS; j++) {
            s->lse[r * ROWS + j] = j < n ? cols[table->row + row + j] : -INFINITY;
            s->sum[r * ROWS + j] =
                j < n && m->math.has_sum ? cols[table->n_rows + table->row + row + j] : 1.0f;
        }
    }
    for (int j = 0; j < ROWS; j++)
        sinks[j] = j < n && run->args.sink != NULL ? run->args.sink[h + j] : -INFINITY;
    dcp__merge_weights(&m->math, s->lse, m->math.has_sum ? s->sum : NULL, m->n_ranks,
                       run->args.sink != NULL ? sinks : NULL, s->weights, merged);
    for (int i = 0; i < to->n_members; i++) {
        left_out[i] = 0;
        for (int j = 0; j < n; j++) {
            if (!(s->weights[to->members[i] * ROWS + j] > 0.0f)) left_out[i] |= 1u << j;
        }
    }
}

void dcp__merge_state_fill(struct dcp_merge *m, struct dcp__merge_run *run,
                           const struct dcp__merge_src *srcs, const struct dcp__merge_block *block,
                           const struct dcp__merge_table *table, const struct dcp__merge_state *to)
{
    const struct dcp__merge_scratch *s = &m->math.scratch;
    const int64_t dim = m->desc.dim;
    const int64_t elem = (int64_t)m->shape.out_bytes;
    dcp__merge_row_fn *merge_row = m->math.kernels.merge_row[m->desc.out_type][DCP_F32];
    const bool zeroes = m->desc.nonfinite != DCP_NONFINITE_PROPAGATE;
    const int n_members = to->n_members;
    uint32_t *left_out = (uint32_t *)(void *)m->member_at; /* [n_ranks] */
    int64_t row = 0;
    for (int64_t t = block->t_begin; t < block->t_end; t++) {
        for (int64_t h0 = block->h_begin; h0 < block->h_end; h0 += ROWS) {
            const int n = block->h_end - h0 < ROWS ? (int)(block->h_end - h0) : (int)ROWS;
            for (int i = 0; i < n_members; i++) left_out[i] = 0;
            if (table->at != NULL) find_left_out(m, run, table, row, h0, n, to, left_out);
            for (int i = 0; i < n_members; i++) {
                float *lse = s->lse + i * ROWS;
                float *sum = s->sum + i * ROWS;
                dcp__merge_load(&srcs[to->members[i]], t, h0, n, lse, m->math.has_sum ? sum : NULL,
                                true, &run->seen);
                memcpy(column(m, to, i, 0) + row, lse, (size_t)n * sizeof(float));
                if (m->math.has_sum)
                    memcpy(column(m, to, i, 1) + row, sum, (size_t)n * sizeof(float));
                for (int j = 0; j < n; j++) {
                    const bool is_out = (left_out[i] >> j & 1u) != 0;
                    bad_column(m, to, i)[row + j] = is_out ? LEFT_OUT : 0;
                    if (is_out) lse[j] = -INFINITY;
                }
            }
            float merged[ROWS];
            dcp__merge_weights(&m->math, s->lse, m->math.has_sum ? s->sum : NULL, n_members, NULL,
                               s->weights, merged);
            for (int j = 0; j < n; j++, row++) {
                int n_parts = 0;
                for (int i = 0; i < n_members; i++) {
                    const float w = s->weights[i * ROWS + j];
                    if (!(w > 0.0f)) continue;
                    const struct dcp__merge_src *src = &srcs[to->members[i]];
                    s->parts[n_parts] =
                        src->out + dcp__merge_offset(t, h0 + j, src->out_ts, src->out_hs) * elem;
                    s->part_weights[n_parts] = w;
                    s->part_rank[n_parts++] = i;
                }
                if (n_parts == 0) continue;
                int first = n_parts;
                const int64_t n_bad = merge_row(s->parts, s->part_weights, n_parts, dim,
                                                to->payload + row * dim, zeroes, NULL, &first);
                for (int i = first; n_bad != 0 && i < n_parts; i++)
                    bad_column(m, to, s->part_rank[i])[row] =
                        (uint32_t)count_bad(m->desc.out_type, s->parts[i], dim);
            }
        }
    }
}

/* The column of rank r in a state; -1: not in it. */
static int column_of(const struct dcp__merge_state *s, int r)
{
    if (s->members == NULL) return s->in == NULL || s->in[r] != 0 ? r : -1;
    for (int i = 0; i < s->n_members; i++) {
        if (s->members[i] == r) return i;
    }
    return -1;
}

void dcp__merge_state_combine(struct dcp_merge *m, const struct dcp__merge_state *states, int n,
                              int64_t n_rows, float *to)
{
    const struct dcp__merge_scratch *s = &m->math.scratch;
    const int64_t dim = m->desc.dim;
    dcp__merge_row_fn *merge_row = m->math.kernels.merge_row[DCP_F32][DCP_F32];
    /* All members in rank order, with the state and the column that each is in. */
    int n_all = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        for (int p = 0; p < n; p++) {
            const int at = column_of(&states[p], r);
            if (at < 0) continue;
            m->member_piece[n_all] = p;
            m->member_at[n_all++] = at;
            break;
        }
    }
    for (int64_t row0 = 0; row0 < n_rows; row0 += ROWS) {
        const int k = n_rows - row0 < ROWS ? (int)(n_rows - row0) : (int)ROWS;
        for (int i = 0; i < n_all; i++) {
            const struct dcp__merge_state *from = &states[m->member_piece[i]];
            const float *lse = column(m, from, m->member_at[i], 0) + row0;
            const uint32_t *bad = bad_column(m, from, m->member_at[i]) + row0;
            for (int j = 0; j < ROWS; j++)
                s->lse[i * ROWS + j] = j < k && (bad[j] & LEFT_OUT) == 0 ? lse[j] : -INFINITY;
            if (!m->math.has_sum) continue;
            const float *sum = column(m, from, m->member_at[i], 1) + row0;
            for (int j = 0; j < ROWS; j++) s->sum[i * ROWS + j] = j < k ? sum[j] : 1.0f;
        }
        float merged[ROWS];
        dcp__merge_weights(&m->math, s->lse, m->math.has_sum ? s->sum : NULL, n_all, NULL,
                           s->weights, merged);
        for (int j = 0; j < k; j++) {
            int n_parts = 0;
            for (int p = 0; p < n; p++) {
                float w = 0.0f;
                for (int i = 0; i < n_all; i++) {
                    if (m->member_piece[i] == p) w += s->weights[i * ROWS + j];
                }
                if (!(w > 0.0f)) continue;
                s->parts[n_parts] = states[p].payload + (row0 + j) * dim;
                s->part_weights[n_parts++] = w;
            }
            float *dst = to + (row0 + j) * dim;
            if (n_parts == 0 || (n_parts == 1 && s->parts[0] == dst)) continue;
            /* One state alone has all the weight, whatever the sum of its weights was rounded to.
             */
            if (n_parts == 1) s->part_weights[0] = 1.0f;
            int first = n_parts;
            (void)merge_row(s->parts, s->part_weights, n_parts, dim, dst, false, NULL, &first);
        }
    }
}

void dcp__merge_state_take_cols(const struct dcp_merge *m, const struct dcp__merge_state *from,
                                int64_t n_rows, const struct dcp__merge_state *to)
{
    for (int i = 0; i < from->n_members; i++) {
        for (int c = 0; c < n_cols_of(m); c++)
            memcpy(column(m, to, from->members[i], c), column(m, from, i, c),
                   (size_t)n_rows * sizeof(float));
    }
}

void dcp__merge_state_finish(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct dcp__merge_state *state,
                             const struct dcp__merge_block *block, const struct dcp__merge_dst *dst)
{
    const struct dcp__merge_scratch *s = &m->math.scratch;
    const int64_t dim = m->desc.dim;
    const int64_t elem = (int64_t)m->shape.merged_bytes;
    const float *sink = run->args.sink;
    dcp__merge_row_fn *merge_row = m->math.kernels.merge_row[DCP_F32][m->desc.merged_type];
    int64_t row = 0;
    for (int64_t t = block->t_begin; t < block->t_end; t++) {
        for (int64_t h0 = block->h_begin; h0 < block->h_end; h0 += ROWS) {
            const int n = block->h_end - h0 < ROWS ? (int)(block->h_end - h0) : (int)ROWS;
            float sinks[ROWS];
            float merged[ROWS];
            for (int j = 0; j < ROWS; j++)
                sinks[j] = sink != NULL && j < n ? sink[h0 + j] : -INFINITY;
            for (int r = 0; r < m->n_ranks; r++) {
                for (int j = 0; j < ROWS; j++) {
                    s->lse[r * ROWS + j] = j < n ? column(m, state, r, 0)[row + j] : -INFINITY;
                    s->sum[r * ROWS + j] =
                        j < n && m->math.has_sum ? column(m, state, r, 1)[row + j] : 1.0f;
                }
            }
            dcp__merge_weights(&m->math, s->lse, m->math.has_sum ? s->sum : NULL, m->n_ranks,
                               sink != NULL ? sinks : NULL, s->weights, merged);
            for (int j = 0; j < n; j++, row++) {
                const int64_t h = h0 + j;
                float w = 0.0f;
                for (int r = 0; r < m->n_ranks; r++) {
                    const float one = s->weights[r * ROWS + j];
                    if (!(one > 0.0f)) continue;
                    w += one;
                    const uint32_t n_bad = bad_column(m, state, r)[row];
                    if (n_bad != 0) dcp__merge_saw(&run->seen, n_bad & ~LEFT_OUT, t, h, r);
                }
                if (dst->lse != NULL)
                    dst->lse[dcp__merge_offset(t - dst->t0, h - dst->h0, dst->lse_ts,
                                               dst->lse_hs)] = merged[j];
                char *to =
                    dst->out +
                    dcp__merge_offset(t - dst->t0, h - dst->h0, dst->out_ts, dst->out_hs) * elem;
                if (!(w > 0.0f)) {
                    memset(to, 0, (size_t)(dim * elem));
                    continue;
                }
                if (sink == NULL || sink[h] == -INFINITY) w = 1.0f; /* normalised already */
                const void *from = state->payload + row * dim;
                int first = 1;
                (void)merge_row(&from, &w, 1, dim, to, false, NULL, &first);
            }
        }
    }
}

int64_t dcp__merge_step_rows(const struct dcp_merge *m, const struct dcp__merge_run *run, int lo,
                             int hi)
{
    int64_t n = 0;
    for (int r = lo; r < hi; r++) {
        const struct dcp__merge_block b = dcp__merge_step_block(m, run, r);
        n += dcp__merge_block_rows(&b);
    }
    return n;
}

dcp_status dcp__merge_share_start(struct dcp_merge *m, struct dcp__merge_run *run, char *to)
{
    const int64_t all = dcp__merge_step_rows(m, run, 0, m->n_ranks);
    const size_t n_bytes = dcp__merge_rows_bytes(all, 0, sizeof(float), m->shape.n_cols);
    float *own = (float *)(void *)(to + (size_t)m->rank * n_bytes);
    int64_t row = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        const struct dcp__merge_block b = dcp__merge_step_block(m, run, r);
        for (int64_t t = b.t_begin; t < b.t_end; t++) {
            for (int64_t h0 = b.h_begin; h0 < b.h_end; h0 += ROWS) {
                const int n = b.h_end - h0 < ROWS ? (int)(b.h_end - h0) : (int)ROWS;
                float lse[ROWS];
                float sum[ROWS];
                dcp__merge_load(&run->own, t, h0, n, lse, sum, false, NULL);
                memcpy(own + row, lse, (size_t)n * sizeof(float));
                if (m->math.has_sum) memcpy(own + all + row, sum, (size_t)n * sizeof(float));
                row += n;
            }
        }
    }
    int k = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        m->sends[k] = (struct dcp__xfer){.peer = r, .buf = own, .n_bytes = n_bytes};
        m->recvs[k++] =
            (struct dcp__xfer){.peer = r, .buf = to + (size_t)r * n_bytes, .n_bytes = n_bytes};
    }
    return dcp__merge_send(m, run, DCP__SLOT_TILES, k, k);
}
