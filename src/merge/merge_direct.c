/* SPDX-License-Identifier: Apache-2.0 */
/* direct: every rank reads the rows it owns straight from all partials and writes each result once.
 *
 *              rank 0            rank 1            rank 2         columns = heads
 *   partials   a0 a1 a2          b0 b1 b2          c0 c1 c2
 *   entry record (a barrier: all partials are complete, and where they lie is known)
 *   rank 0 reads a0, b0, c0 -> m0;  rank 1 reads a1, b1, c1 -> m1;  rank 2 reads a2, b2, c2 -> m2
 *   exit record (a barrier: nobody reads a partial any more)
 *
 * In place m_r replaces rank r's own column of its own partial: nobody else reads that one.
 * Cut none: every rank merges all columns; each value is counted by the owner of its head.
 *
 * Cost     reads one partial's bytes in all, (N-1)/N of it from peers; writes 1/N; two records.
 * Scratch  none for payloads. Where a buffer lies outside the memory that peers see, its owner
 *          copies it, a tile at a time, into group memory (merge_stage.c).
 * Order    ranks 0..N-1, bits independent of everything else.
 * Limits   ranks that see each other's memory. The wire type plays no part: nothing is sent. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

static int64_t peer_bytes(const struct dcp_merge *m, const struct dcp__merge_block *b)
{
    return dcp__merge_block_rows(b) * (m->n_ranks - 1) *
           (m->desc.dim * (int64_t)m->shape.out_bytes +
            m->shape.n_cols * (int64_t)m->shape.lse_bytes);
}

static void merge_block(struct dcp_merge *m, struct dcp__merge_run *run,
                        const struct dcp__merge_block *block, bool counts)
{
    const struct dcp__merge_dst dst = dcp__merge_result(m, run);
    dcp__merge_rows(&m->math, m->srcs, m->desc.out_type, run->args.sink, block, &dst, counts,
                    &run->seen);
    run->wire_bytes += peer_bytes(m, block);
}

/* Tokens that one test merges. */
enum { SLICE_TOKENS = 16 };

/* Everything is readable: one step is all there is, or a slice of it where nobody waits. */
static dcp_status step_visible(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    const int64_t slice = run->may_wait ? run->n_tokens : SLICE_TOKENS;
    const int64_t from = run->step * SLICE_TOKENS;
    for (int r = 0; r < m->n_ranks; r++) {
        if (m->desc.cut != DCP_CUT_NONE && r != m->rank) continue;
        struct dcp__merge_block b =
            dcp__merge_block_of(m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, r);
        b.t_begin = b.t_begin + from < b.t_end ? b.t_begin + from : b.t_end;
        if (b.t_begin + slice < b.t_end) b.t_end = b.t_begin + slice;
        merge_block(m, run, &b, r == m->rank);
    }
    run->step++;
    run->moved = true;
    *done_out = from + slice >= run->n_tokens;
    return DCP_OK;
}

enum { STAGE, ARRIVE };

static dcp_status step_staged(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    if (run->phase == STAGE) {
        if (run->step == 0) {
            memcpy(m->staged, m->srcs, (size_t)m->n_ranks * sizeof(*m->srcs));
            dcp__merge_stage(m, run, 0);
        }
        const int64_t said = run->step;
        DCP_TRY(dcp__merge_sync_start(m, run, &said, sizeof(said)));
        run->phase = ARRIVE;
    }
    /* All have staged this step, and have merged the one before it: its tile is free. */
    bool is_here = false;
    DCP_TRY(dcp__merge_sync_poll(m, run, &is_here));
    if (!is_here) return DCP_OK;
    if (run->step + 1 < run->n_steps) dcp__merge_stage(m, run, run->step + 1);
    for (int r = 0; r < m->n_ranks; r++) {
        if (m->desc.cut != DCP_CUT_NONE && r != m->rank) continue;
        const struct dcp__merge_block b = dcp__merge_step_block(m, run, r);
        if (dcp__merge_block_rows(&b) == 0) continue;
        DCP_TRY(dcp__merge_stage_aim(m, run, -1, r));
        merge_block(m, run, &b, r == m->rank);
    }
    run->moved = true;
    run->phase = STAGE;
    *done_out = ++run->step == run->n_steps;
    return DCP_OK;
}

static dcp_status step_direct(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    if (run->step == 0 && run->phase == 0) dcp__fault_point(m->g, "merge");
    return run->any_staged && run->n_tokens > 0 ? step_staged(m, run, done_out)
                                                : step_visible(m, run, done_out);
}

const struct dcp__merge_algo dcp__merge_direct = {
    DCP_MERGE_DIRECT, "direct", "rank", true, true, false, true, step_direct,
};
