/* SPDX-License-Identifier: Apache-2.0 */
/* halving: the group is halved again and again; at each level a rank sends the rows of the other
 * half, already merged as far as it has them, to one rank there, and merges what comes for its own.
 *
 *              rank 0      rank 1      rank 2      rank 3      rank 4      bk{..} = block k, merged
 *   start      b0..b4      b0..b4      b0..b4      b0..b4      b0..b4      over the listed ranks
 *
 *   level 0    {0 1 2 | 3 4}: 0 <-> 3, 1 <-> 4, 2 -> 4
 *              b0-2{03}    b0-2{14}    b0-2{2}     b3-4{03}    b3-4{124}
 *   level 1    {0 1 | 2}: 0 <-> 2, 1 -> 2           {3 | 4}: 3 <-> 4
 *              b0-1{023}   b0-1{14}    b2{01234}   b3{01234}   b4{01234}
 *   level 2    {0 | 1}: 0 <-> 1
 *              b0{01234}   b1{01234}
 *
 * Any N: a group of n has a lower half of (n+1)/2 ranks and an upper one. Rank i of the lower half
 * and rank i of the upper one swap; where the lower half has one rank more, that one sends to the
 * last of the upper half and receives nothing.
 *
 *   N = 3      0 <-> 2, 1 -> 2                 then 0 <-> 1
 *   N = 4      0 <-> 2, 1 <-> 3                then 0 <-> 1 and 2 <-> 3
 *
 * Cost     ceil(log2 N) messages a tile, one after the other, (N-1)/N of a partial in f32 and 8
 *          bytes a row and part in them (12 for (max, sum)). For sizes where latency rules.
 * Scratch  what one level sends, what it receives, and the kept half in f32, in tiles of tokens
 *          that fit the limit. Cut none: the merged rows as in alltoall. Where non-finite values
 *          propagate: everybody's LSEs of a tile, and N-1 messages more (merge_state.c).
 * Order    "halving": the tree above; two states are added lower first rank first, normalised, f32.
 *          Reproducible, the same on every transport and tile size; other bits than rank order, and
 *          one rounding a level more.
 * Limits   at most 1,024 ranks. What travels is f32 whatever the types: the wire type plays no
 *          part. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

/* The ranks in rank's rows before level, as a list. */
static int list_members(struct dcp_merge *m, int rank, int level, int *list)
{
    (void)dcp__halving_members(m->n_ranks, rank, level, m->in);
    int n = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (m->in[r] != 0) list[n++] = r;
    }
    return n;
}

/* Own rows of the blocks [lo, hi) into to. */
static void fill(struct dcp_merge *m, struct dcp__merge_run *run,
                 const struct dcp__merge_buffers *buf, int lo, int hi, struct dcp__merge_state to)
{
    struct dcp__merge_table table = {NULL, 0, dcp__merge_step_rows(m, run, 0, m->n_ranks),
                                     dcp__merge_step_rows(m, run, 0, lo)};
    if (m->shape.shares_lse) {
        table.at = buf->table;
        table.rank_bytes = dcp__merge_rows_bytes(table.n_rows, 0, sizeof(float), m->shape.n_cols);
    }
    for (int r = lo; r < hi; r++) {
        const struct dcp__merge_block b = dcp__merge_step_block(m, run, r);
        const int64_t n_rows = dcp__merge_block_rows(&b);
        dcp__merge_state_fill(m, run, m->srcs, &b, &table, &to);
        to.payload += n_rows * m->desc.dim;
        to.cols += n_rows;
        table.row += n_rows;
    }
}

/* The state of all ranks' columns; kept rows of level 0. first_row: where those kept now begin. */
static struct dcp__merge_state kept_state(const struct dcp_merge *m,
                                          const struct dcp__merge_run *run,
                                          const struct dcp__merge_buffers *buf, int level)
{
    struct dcp__halving h;
    int lo = 0;
    int hi = m->n_ranks;
    if (dcp__halving_at(m->n_ranks, m->rank, 0, &h)) {
        lo = h.keep_lo;
        hi = h.keep_hi;
    }
    const int64_t n_rows = dcp__merge_step_rows(m, run, lo, hi);
    struct dcp__merge_state s = dcp__merge_state_at(m, buf->state, n_rows, m->n_ranks, NULL);
    int now = lo;
    for (int k = 0; k <= level && dcp__halving_at(m->n_ranks, m->rank, k, &h); k++) now = h.keep_lo;
    const int64_t skipped = dcp__merge_step_rows(m, run, lo, now);
    s.payload += skipped * m->desc.dim;
    s.cols += skipped;
    return s;
}

static dcp_status start_level(struct dcp_merge *m, struct dcp__merge_run *run,
                              const struct dcp__merge_buffers *buf)
{
    struct dcp__halving h;
    if (!dcp__halving_at(m->n_ranks, m->rank, run->level, &h)) return DCP_OK;
    int *const members = m->math.scratch.part_rank;
    int n = list_members(m, m->rank, run->level, members);
    const int64_t n_sent = dcp__merge_step_rows(m, run, h.send_lo, h.send_hi);
    const int64_t n_kept = dcp__merge_step_rows(m, run, h.keep_lo, h.keep_hi);
    const struct dcp__merge_state out = dcp__merge_state_at(m, buf->send, n_sent, n, NULL);
    if (run->level > 0) { /* out of the state, as it was kept before this level */
        struct dcp__merge_state from = kept_state(m, run, buf, run->level - 1);
        if (h.send_lo > h.keep_lo) {
            from.payload += n_kept * m->desc.dim;
            from.cols += n_kept;
        }
        memcpy(out.payload, from.payload, (size_t)(n_sent * m->desc.dim) * sizeof(float));
        const int n_cols = m->shape.n_cols + 1;
        for (int i = 0; i < n; i++) {
            for (int c = 0; c < n_cols; c++)
                memcpy(out.cols + (i * n_cols + c) * n_sent,
                       from.cols + (members[i] * n_cols + c) * from.stride,
                       (size_t)n_sent * sizeof(float));
        }
    }
    m->sends[0] = (struct dcp__xfer){
        .peer = h.send_to, .buf = buf->send, .n_bytes = dcp__merge_state_bytes(m, n_sent, n)};
    size_t at = 0;
    for (int i = 0; i < h.n_recvs; i++) {
        n = dcp__halving_members(m->n_ranks, h.recv_from[i], run->level, m->in);
        const size_t n_bytes = dcp__merge_state_bytes(m, n_kept, n);
        m->recvs[i] = (struct dcp__xfer){
            .peer = h.recv_from[i], .buf = buf->recv[0] + at, .n_bytes = n_bytes};
        at += n_bytes;
    }
    return dcp__merge_send(m, run, DCP__SLOT_TILES, 1, h.n_recvs);
}

/* What came joins what is kept; states in the order of their smallest ranks. */
static void join_level(struct dcp_merge *m, struct dcp__merge_run *run,
                       const struct dcp__merge_buffers *buf)
{
    struct dcp__halving h;
    if (!dcp__halving_at(m->n_ranks, m->rank, run->level, &h)) return;
    const int64_t n_rows = dcp__merge_step_rows(m, run, h.keep_lo, h.keep_hi);
    struct dcp__merge_state came[2];
    size_t at = 0;
    for (int i = 0; i < h.n_recvs; i++) {
        int *list = m->lists + i * m->n_ranks;
        const int n = list_members(m, h.recv_from[i], run->level, list);
        came[i] = dcp__merge_state_at(m, buf->recv[0] + at, n_rows, n, list);
        at += dcp__merge_state_bytes(m, n_rows, n);
    }
    struct dcp__merge_state own = kept_state(m, run, buf, run->level);
    (void)dcp__halving_members(m->n_ranks, m->rank, run->level, m->in);
    own.in = m->in;
    int own_first = 0;
    while (m->in[own_first] == 0) own_first++;
    struct dcp__merge_state states[3];
    int firsts[3];
    int n = 0;
    for (int i = -1; i < h.n_recvs; i++) {
        const int first = i < 0 ? own_first : came[i].members[0];
        int to = n++;
        for (; to > 0 && firsts[to - 1] > first; to--) {
            firsts[to] = firsts[to - 1];
            states[to] = states[to - 1];
        }
        firsts[to] = first;
        states[to] = i < 0 ? own : came[i];
    }
    dcp__merge_state_combine(m, states, n, n_rows, own.payload);
    for (int i = 0; i < h.n_recvs; i++) dcp__merge_state_take_cols(m, &came[i], n_rows, &own);
}

enum { FIRST, SHARED, FILL, LEVEL, FINISH, GATHERED };

static void fill_all(struct dcp_merge *m, struct dcp__merge_run *run,
                     const struct dcp__merge_buffers *buf)
{
    struct dcp__halving h = {0, m->n_ranks, 0, 0, 0, 0, {0, 0}};
    const bool is_alone = !dcp__halving_at(m->n_ranks, m->rank, 0, &h);
    m->srcs[m->rank] = run->own;
    const int *self = &m->rank;
    if (!is_alone)
        fill(m, run, buf, h.send_lo, h.send_hi,
             dcp__merge_state_at(m, buf->send, dcp__merge_step_rows(m, run, h.send_lo, h.send_hi),
                                 1, self));
    struct dcp__merge_state kept = kept_state(m, run, buf, 0);
    kept.is_by_rank = true;
    kept.n_members = 1;
    kept.members = self;
    fill(m, run, buf, h.keep_lo, h.keep_hi, kept);
}

static void finish(struct dcp_merge *m, struct dcp__merge_run *run,
                   const struct dcp__merge_buffers *buf)
{
    const struct dcp__merge_block own = dcp__merge_step_block(m, run, m->rank);
    const struct dcp__merge_state state = kept_state(m, run, buf, run->level);
    const struct dcp__merge_dst dst = dcp__merge_step_dst(m, run, buf->gather_send);
    dcp__merge_state_finish(m, run, &state, &own, &dst);
}

static dcp_status step_halving(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    const struct dcp__merge_buffers buf = dcp__merge_lay_out(m);
    struct dcp__halving h;
    bool is_here = false;
    switch (run->phase) {
    case FIRST:
        if (run->step == 0) dcp__fault_point(m->g, "merge");
        *done_out = run->n_steps == 0;
        if (run->n_steps > 0 && m->shape.shares_lse)
            DCP_TRY(dcp__merge_share_start(m, run, buf.table));
        run->phase = m->shape.shares_lse ? SHARED : FILL;
        break;
    case SHARED:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_TILES, &is_here));
        if (!is_here) return DCP_OK;
        run->phase = FILL;
        break;
    case FILL:
        fill_all(m, run, &buf);
        run->level = 0;
        DCP_TRY(start_level(m, run, &buf));
        run->phase = m->n_ranks > 1 ? LEVEL : FINISH;
        break;
    case LEVEL:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_TILES, &is_here));
        if (!is_here) return DCP_OK;
        join_level(m, run, &buf);
        run->level++;
        if (dcp__halving_at(m->n_ranks, m->rank, run->level, &h))
            DCP_TRY(start_level(m, run, &buf));
        else
            run->phase = FINISH;
        break;
    case FINISH:
        finish(m, run, &buf);
        if (m->desc.cut == DCP_CUT_NONE) {
            DCP_TRY(dcp__merge_gather_start(m, run, run->step, buf.gather_send, buf.gather_recv));
            run->phase = GATHERED;
            break;
        }
        run->phase = FIRST;
        *done_out = ++run->step == run->n_steps;
        break;
    default:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_GATHER, &is_here));
        if (!is_here) return DCP_OK;
        dcp__merge_gather_finish(m, run, run->step, buf.gather_recv);
        run->phase = FIRST;
        *done_out = ++run->step == run->n_steps;
        break;
    }
    run->moved = true;
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_halving = {
    DCP_MERGE_HALVING, "halving", "halving", false, false, false, false, step_halving,
};
