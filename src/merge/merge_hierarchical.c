/* SPDX-License-Identifier: Apache-2.0 */
/* hierarchical: inside a host the ranks read each other's partials, as direct does, and merge their
 * host's parts; then each row crosses between hosts once, not once per rank.
 *
 *              host A: rank 0, rank 1            host B: rank 2, rank 3       b = block by owner
 *   inside     0 merges b0{01} and b2{01}        2 merges b0{23} and b2{23}   i-th of each host
 *              1 merges b1{01} and b3{01}        3 merges b1{23} and b3{23}   has the i-th's blocks
 *   between    0 sends b2{01} to 2, gets b0{23}  1 sends b3{01} to 3, gets b1{23}
 *   then       b0{01,23}   b1{01,23}             b2{01,23}   b3{01,23}
 *
 * Hosts need not have as many ranks as each other: the block of the j-th rank of a host is merged
 * on host h by its rank j mod (ranks of h).
 *
 * Cost     reads a partial from memory inside the host; sends M - 1 messages a tile for M hosts of
 *          equal size: (M-1)/M of a partial over the ranks of a host, in f32, and 8 bytes a row and
 *          part (12 for (max, sum)).
 * Scratch  f32 rows sent, received and own of a tile; partials that peers cannot see go through two
 *          tiles of group memory (merge_stage.c). In tiles of tokens that fit the limit. Cut none
 *          and propagated non-finite values as in halving.
 * Order    "host": ranks of a host in rank order, hosts in order, f32, normalised. Reproducible for
 *          the same placement of ranks; one host: the bits of rank order if the types are f32.
 * Limits   what travels is f32: the wire type plays no part. Ranks of a host need not follow each
 *          other. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

/* Ranks of a host, at the place in m->lists where they are the host's alone. */
static int list_host(struct dcp_merge *m, int host, int at)
{
    int n = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (dcp__host_of(&m->shape, r) == host) m->lists[at + n++] = r;
    }
    return n;
}

/* The host's parts of block_rank's rows. */
static dcp_status fill_block(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct dcp__merge_buffers *buf, int block_rank,
                             const struct dcp__merge_state *to)
{
    const struct dcp__merge_block b = dcp__merge_step_block(m, run, block_rank);
    if (dcp__merge_block_rows(&b) == 0) return DCP_OK;
    if (run->any_staged)
        DCP_TRY(dcp__merge_stage_aim(m, run, dcp__host_of(&m->shape, m->rank), block_rank));
    struct dcp__merge_table table = {NULL, 0, dcp__merge_step_rows(m, run, 0, m->n_ranks),
                                     dcp__merge_step_rows(m, run, 0, block_rank)};
    if (m->shape.shares_lse) {
        table.at = buf->table;
        table.rank_bytes = dcp__merge_rows_bytes(table.n_rows, 0, sizeof(float), m->shape.n_cols);
    }
    dcp__merge_state_fill(m, run, m->srcs, &b, &table, to);
    return DCP_OK;
}

static dcp_status inside(struct dcp_merge *m, struct dcp__merge_run *run,
                         const struct dcp__merge_buffers *buf)
{
    const int own_host = dcp__host_of(&m->shape, m->rank);
    const int n_inside = list_host(m, own_host, 0);
    int n_sends = 0;
    size_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (dcp__host_handler(&m->shape, own_host, r) != m->rank) continue;
        const int64_t n_rows = dcp__merge_step_rows(m, run, r, r + 1);
        if (dcp__host_of(&m->shape, r) == own_host) { /* the own block */
            struct dcp__merge_state own =
                dcp__merge_state_at(m, buf->state, n_rows, m->n_ranks, NULL);
            own.is_by_rank = true;
            own.n_members = n_inside;
            own.members = m->lists;
            DCP_TRY(fill_block(m, run, buf, r, &own));
            continue;
        }
        const struct dcp__merge_state out =
            dcp__merge_state_at(m, buf->send + at, n_rows, n_inside, m->lists);
        DCP_TRY(fill_block(m, run, buf, r, &out));
        const size_t n_bytes = dcp__merge_state_bytes(m, n_rows, n_inside);
        m->sends[n_sends++] =
            (struct dcp__xfer){.peer = r, .buf = buf->send + at, .n_bytes = n_bytes};
        at += n_bytes;
    }
    int n_recvs = 0;
    at = 0;
    const int64_t n_rows = dcp__merge_step_rows(m, run, m->rank, m->rank + 1);
    for (int host = 0; host < dcp__n_hosts(&m->shape); host++) {
        if (host == own_host) continue;
        const size_t n_bytes = dcp__merge_state_bytes(m, n_rows, dcp__host_size(&m->shape, host));
        m->recvs[n_recvs++] =
            (struct dcp__xfer){.peer = dcp__host_handler(&m->shape, host, m->rank),
                               .buf = buf->recv[0] + at,
                               .n_bytes = n_bytes};
        at += n_bytes;
    }
    return dcp__merge_send(m, run, DCP__SLOT_TILES, n_sends, n_recvs);
}

static void between(struct dcp_merge *m, struct dcp__merge_run *run,
                    const struct dcp__merge_buffers *buf)
{
    const int own_host = dcp__host_of(&m->shape, m->rank);
    const struct dcp__merge_block b = dcp__merge_step_block(m, run, m->rank);
    const int64_t n_rows = dcp__merge_block_rows(&b);
    const struct dcp__merge_state own =
        dcp__merge_state_at(m, buf->state, n_rows, m->n_ranks, NULL);
    struct dcp__merge_state *states = m->states;
    size_t at = 0;
    int n = 0;
    int n_listed = 0;
    for (int host = 0; host < dcp__n_hosts(&m->shape); host++) {
        const int n_members = list_host(m, host, n_listed);
        states[n] = own;
        states[n].is_by_rank = true;
        if (host != own_host) {
            states[n] = dcp__merge_state_at(m, buf->recv[0] + at, n_rows, n_members, NULL);
            at += dcp__merge_state_bytes(m, n_rows, n_members);
        }
        states[n].n_members = n_members;
        states[n++].members = m->lists + n_listed;
        n_listed += n_members;
    }
    dcp__merge_state_combine(m, states, n, n_rows, own.payload);
    for (int i = 0; i < n; i++) {
        if (i != own_host) dcp__merge_state_take_cols(m, &states[i], n_rows, &own);
    }
    const struct dcp__merge_dst dst = dcp__merge_step_dst(m, run, buf->gather_send);
    dcp__merge_state_finish(m, run, &own, &b, &dst);
}

enum { FIRST, STAGED, SHARED, INSIDE, BETWEEN, GATHERED, WRITTEN };

/* In place: the own slice of the own partial is read by whoever merges it for the host, and that is
 * this rank itself, so that writing the result needs no barrier. */
static dcp_status step_hierarchical(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    const struct dcp__merge_buffers buf = dcp__merge_lay_out(m);
    bool is_here = false;
    switch (run->phase) {
    case FIRST:
        if (run->step == 0) {
            dcp__fault_point(m->g, "merge");
            if (run->any_staged && run->n_steps > 0) {
                memcpy(m->staged, m->srcs, (size_t)m->n_ranks * sizeof(*m->srcs));
                dcp__merge_stage(m, run, 0);
            }
        }
        *done_out = run->n_steps == 0;
        if (run->n_steps == 0) break;
        run->phase = STAGED;
        if (run->any_staged) {
            const int64_t said = run->step;
            DCP_TRY(dcp__merge_sync_start(m, run, &said, sizeof(said)));
        }
        break;
    case STAGED:
        if (run->any_staged) {
            DCP_TRY(dcp__merge_sync_poll(m, run, &is_here));
            if (!is_here) return DCP_OK;
            if (run->step + 1 < run->n_steps) dcp__merge_stage(m, run, run->step + 1);
        }
        if (m->shape.shares_lse) DCP_TRY(dcp__merge_share_start(m, run, buf.table));
        run->phase = m->shape.shares_lse ? SHARED : INSIDE;
        break;
    case SHARED:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_TILES, &is_here));
        if (!is_here) return DCP_OK;
        run->phase = INSIDE;
        break;
    case INSIDE:
        DCP_TRY(inside(m, run, &buf));
        run->phase = BETWEEN;
        break;
    case BETWEEN:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_TILES, &is_here));
        if (!is_here) return DCP_OK;
        between(m, run, &buf);
        run->phase = WRITTEN;
        if (m->desc.cut == DCP_CUT_NONE) {
            DCP_TRY(dcp__merge_gather_start(m, run, run->step, buf.gather_send, buf.gather_recv));
            run->phase = GATHERED;
        }
        break;
    case GATHERED:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_GATHER, &is_here));
        if (!is_here) return DCP_OK;
        dcp__merge_gather_finish(m, run, run->step, buf.gather_recv);
        run->phase = WRITTEN;
        break;
    default:
        run->phase = FIRST;
        *done_out = ++run->step == run->n_steps;
        break;
    }
    run->moved = true;
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_hierarchical = {
    DCP_MERGE_HIERARCHICAL, "hierarchical", "host", false, true, false, false, step_hierarchical,
};
