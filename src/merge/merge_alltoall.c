/* SPDX-License-Identifier: Apache-2.0 */
/* alltoall: tiles of tokens; each rank sends each peer the rows that the peer owns, payload and LSE
 * packed in one message, and merges what it receives while the next tile is on its way.
 *
 *              rank 0            rank 1            rank 2         columns = heads, one tile
 *   partials   a0 a1 a2          b0 b1 b2          c0 c1 c2
 *   sends      a1->1  a2->2      b0->0  b2->2      c0->0  c1->1
 *   merges     a0 b0 c0          a1 b1 c1          a2 b2 c2        own column from its own partial
 *
 *   time  | pack 0 | send 0 ~~~~~ | pack 1 | send 1 ~~~~~~~~~~~~ | pack 2 | ...
 *         |        |              |        | merge 0             |        | merge 1
 *
 * Tiles go from the last to the first (dcp__merge_block_at): the end of a partial that has just
 * been written is in the caches still. At 2 MiB of partial and of L2 that is 3 to 5 % of the whole.
 *
 * What is sent (plan_merge.c says which, for all ranks alike; start_tile does it):
 *   large rows   a token's rows for a peer make 32 KiB or more: each token is a message from where
 *   the
 *                caller has it, copied once. A tile is 128 KiB of them (cut tokens: one stretch)
 *                and a message of all its LSEs.
 *   some KiB     the tile is a few tokens, 96 KiB. Where the transport can gather (MPI), its
 *                message is made of their stretches and the packed LSEs: 2 to 7 % less time than
 *                with a message for each. Elsewhere it is packed.
 *   small rows   packed.
 * Rows that may not be sent as they lie (payload_in_place) are packed into the same messages.
 *
 * Where the time goes, (64, 64, 128) f32, N = 2, Open MPI without shared memory, stamped: of 270 us
 * MPI copies 53 into its fragments and 72 out of them and takes some 70 to pass them to and fro, a
 * merge 65, records 6. Copies by the kernel are no shorter way: 1 MiB in one stretch takes 110 us,
 * and the rows of a peer lie in stretches of 16 KiB. (64, 128, 128), partials of 4 MiB, larger than
 * L2: stretches of 32 KiB, 2 MiB in all, take MPI 420 us gathered and 325 as messages of their own,
 * of which the kernel's copies are 190 to 230 (large pages; 270 to 310 of small ones); merge 160
 * to 190, LSEs and the rest 30, hardly any waiting.
 *
 * Cut tokens: a tile is a stretch of each rank's own tokens, all heads. Cut none: merged as by
 * heads; each tile's merged rows then go to all peers, while the tile after next is packed.
 *
 * Cost     sends (N-1)/N of a partial in its wire type, plus LSEs; N-1 or 2(N-1) messages a tile.
 *          Cut none sends (N-1)/N of the merged result on top.
 * Scratch  one send and two receive tiles; cut none one more of each; at most the workspace limit.
 * Order    ranks 0..N-1: the bits of direct, for any tile size, if the wire type is out's type.
 *          A token that does not fit alone (cut tokens, many ranks) is cut by heads, too.
 * Limits   none. Empty rows are neither read nor sent with content: their bytes of a message hold
 *          whatever was there, and the LSE says so. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

static size_t block_bytes(const struct dcp_merge *m, const struct dcp__merge_block *b)
{
    return dcp__merge_block_bytes(b, m->desc.dim, m->shape.wire_bytes, m->shape.n_cols);
}

static size_t payload_bytes(const struct dcp_merge *m, const struct dcp__merge_block *b)
{
    return dcp__merge_payload_bytes(dcp__merge_block_rows(b), m->desc.dim, m->shape.wire_bytes);
}

/* Where rank r's block lies among the received ones of this rank. */
static size_t recv_offset(const struct dcp_merge *m, const struct dcp__merge_block *own, int r)
{
    const int nth = r - (!m->shape.is_narrow && r > m->rank ? 1 : 0);
    return (size_t)nth * block_bytes(m, own);
}

static void pack(const struct dcp_merge *m, const struct dcp__merge_run *run,
                 const struct dcp__merge_block *b, char *to)
{
    dcp__merge_pack(m, &run->own, b, m->desc.wire_type, to,
                    (float *)(void *)(to + payload_bytes(m, b)));
}

/* Aims x at the payload of a block where the caller has it, if it can be sent from there: a token's
 * rows lie in one stretch, and so do all or the transport gathers the stretches; no row is empty
 * (those are not read); and the memory outlives a transport that lets go of nothing. cols: its
 * LSEs, packed, which follow in the message if x has a tail. */
static bool payload_in_place(const struct dcp_merge *m, const struct dcp__merge_run *run,
                             const struct dcp__merge_block *b, const float *cols,
                             struct dcp__xfer *x)
{
    const struct dcp__merge_src *own = &run->own;
    const int64_t width = b->h_end - b->h_begin;
    const int64_t dim = m->desc.dim;
    const int64_t elem = (int64_t)m->shape.out_bytes;
    const int64_t n_tokens = b->t_end - b->t_begin;
    const bool has_pieces = n_tokens > 1 && own->out_ts != width * dim;
    const bool is_gathered = has_pieces || x->tail_bytes > 0;
    if (m->math.has_sum || (width > 1 && own->out_hs != dim) ||
        (has_pieces && own->out_ts < width * dim) ||
        (is_gathered && !dcp__group_sends_pieces(m->g)))
        return false;
    const int64_t n_rows = dcp__merge_block_rows(b);
    int64_t n_used = 0;
    for (int64_t i = 0; i < n_rows; i++) n_used += dcp__merge_is_finite(cols[i]);
    const char *at =
        own->out + dcp__merge_offset(b->t_begin, b->h_begin, own->out_ts, own->out_hs) * elem;
    const size_t span = (size_t)(((n_tokens - 1) * own->out_ts + width * dim) * elem);
    if (n_used != n_rows || !dcp__group_may_lend(m->g, at, span)) return false;
    x->buf = (void *)(uintptr_t)at;
    if (is_gathered) {
        x->piece_bytes = has_pieces ? (size_t)(width * dim * elem) : x->n_bytes - x->tail_bytes;
        x->stride_bytes = (size_t)(own->out_ts * elem);
    }
    return true;
}

/* The payload of a block as messages of its stretches, at n in m->sends: from where the caller has
 * it if all may be, else packed. cols: its LSEs, packed. */
static void send_stretches(struct dcp_merge *m, const struct dcp__merge_run *run, int r,
                           const struct dcp__merge_block *b, char *at, float *cols, int n)
{
    const int64_t n_stretches = dcp__merge_payloads(&m->shape, b);
    const size_t each = payload_bytes(m, b) / (size_t)n_stretches;
    const int64_t n_tokens = (b->t_end - b->t_begin) / n_stretches;
    const int64_t n_rows = dcp__merge_block_rows(b) / n_stretches;
    bool in_place = true;
    for (int64_t i = 0; i < n_stretches && in_place; i++) {
        struct dcp__merge_block part = *b;
        part.t_begin = b->t_begin + i * n_tokens;
        part.t_end = part.t_begin + n_tokens;
        m->sends[n + i] = (struct dcp__xfer){.peer = r, .n_bytes = each};
        in_place = payload_in_place(m, run, &part, cols + i * n_rows, &m->sends[n + i]);
    }
    if (in_place) return;
    pack(m, run, b, at);
    for (int64_t i = 0; i < n_stretches; i++)
        m->sends[n + i] =
            (struct dcp__xfer){.peer = r, .buf = at + (size_t)i * each, .n_bytes = each};
}

/* A block to rank r, at n in m->sends; returns how many messages. at: room for it. */
static int send_block(struct dcp_merge *m, const struct dcp__merge_run *run, int r,
                      const struct dcp__merge_block *b, char *at, int n)
{
    const size_t payload = payload_bytes(m, b);
    const size_t rest = block_bytes(m, b) - payload;
    const int n_payloads = dcp__merge_payloads(&m->shape, b);
    const bool gathers = dcp__merge_gathers(&m->shape) && dcp__group_sends_pieces(m->g);
    m->sends[n] = (struct dcp__xfer){.peer = r, .buf = at, .n_bytes = payload + rest};
    if (payload == 0 || !(n_payloads > 0 || gathers)) {
        pack(m, run, b, at);
        return 1;
    }
    float *cols = (float *)(void *)(at + payload);
    dcp__merge_pack(m, &run->own, b, m->desc.wire_type, NULL, cols);
    if (n_payloads > 0) {
        send_stretches(m, run, r, b, at, cols, n);
        m->sends[n + n_payloads] = (struct dcp__xfer){.peer = r, .buf = cols, .n_bytes = rest};
        return n_payloads + 1;
    }
    m->sends[n].tail_bytes = rest;
    m->sends[n].tail = cols;
    if (!payload_in_place(m, run, b, cols, &m->sends[n])) {
        pack(m, run, b, at);
        m->sends[n].tail_bytes = 0;
    }
    return 1;
}

static dcp_status start_tile(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct dcp__merge_buffers *buf, int64_t step)
{
    int n_sends = 0;
    int n_recvs = 0;
    size_t at = 0;
    char *recv = buf->recv[step & 1];
    const struct dcp__merge_block own = dcp__merge_block_at(m, run, m->rank, step);
    const size_t own_bytes = block_bytes(m, &own);
    const int n_payloads = dcp__merge_payloads(&m->shape, &own);
    const size_t each = n_payloads > 0 ? payload_bytes(m, &own) / (size_t)n_payloads : 0;
    const size_t payloads = each * (size_t)n_payloads;
    for (int r = 0; r < m->n_ranks; r++) {
        char *to = recv + (r != m->rank || m->shape.is_narrow ? recv_offset(m, &own, r) : 0);
        if (r == m->rank) {
            if (m->shape.is_narrow) pack(m, run, &own, to);
            continue;
        }
        const struct dcp__merge_block b = dcp__merge_block_at(m, run, r, step);
        n_sends += send_block(m, run, r, &b, buf->send + at, n_sends);
        at += block_bytes(m, &b);
        for (int i = 0; i < n_payloads; i++)
            m->recvs[n_recvs++] =
                (struct dcp__xfer){.peer = r, .buf = to + (size_t)i * each, .n_bytes = each};
        m->recvs[n_recvs++] =
            (struct dcp__xfer){.peer = r, .buf = to + payloads, .n_bytes = own_bytes - payloads};
    }
    return dcp__merge_send(m, run, DCP__SLOT_TILES, n_sends, n_recvs);
}

/* Bytes of each part that are merged between two tests. MPI sends the next fragment of a message
 * when it is asked: 16 KiB take 1 % less time than 32. */
enum { BETWEEN_TESTS = 16 << 10 };

/* Merge the received tile; MPI moves messages only inside calls, so it is asked now and then. */
static dcp_status merge_tile(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct dcp__merge_buffers *buf, bool is_next_open)
{
    const struct dcp__merge_block own = dcp__merge_step_block(m, run, m->rank);
    if (dcp__merge_block_rows(&own) == 0) return DCP_OK;
    const size_t payload = payload_bytes(m, &own);
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank && !m->shape.is_narrow) {
            m->srcs[r] = run->own;
            continue;
        }
        const char *at = buf->recv[run->step & 1] + recv_offset(m, &own, r);
        m->srcs[r] = dcp__merge_unpacked(m, at, at + payload, &own, m->shape.wire_bytes);
    }
    const struct dcp__merge_dst dst = dcp__merge_step_dst(m, run, buf->gather_send);
    const int64_t token_bytes =
        (own.h_end - own.h_begin) * m->desc.dim * (int64_t)m->shape.wire_bytes;
    const int64_t n_part = token_bytes < BETWEEN_TESTS ? BETWEEN_TESTS / token_bytes : 1;
    int64_t end = 0;
    for (int64_t t = own.t_begin; t < own.t_end; t = end) {
        end = t + n_part < own.t_end ? t + n_part : own.t_end;
        dcp__merge_tokens(&m->math, m->srcs, m->desc.wire_type, run->args.sink, &own, t, end, &dst,
                          true, &run->seen);
        bool is_done = false;
        if (is_next_open && end < own.t_end)
            DCP_TRY(dcp__group_exchange_test(m->g, DCP__SLOT_TILES, &is_done));
    }
    return DCP_OK;
}

enum { FIRST, TILE, GATHERED, MERGE, LAST };

static dcp_status step_alltoall(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out)
{
    const struct dcp__merge_buffers buf = dcp__merge_lay_out(m);
    const bool gathers = m->desc.cut == DCP_CUT_NONE;
    const bool has_next = run->step + 1 < run->n_steps;
    bool is_here = false;
    switch (run->phase) {
    case FIRST:
        if (run->n_steps > 0) DCP_TRY(start_tile(m, run, &buf, 0));
        dcp__fault_point(m->g, "merge");
        run->phase = TILE;
        *done_out = run->n_steps == 0;
        break;
    case TILE:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_TILES, &is_here));
        if (!is_here) return DCP_OK;
        if (has_next) DCP_TRY(start_tile(m, run, &buf, run->step + 1));
        run->phase = gathers && run->step > 0 ? GATHERED : MERGE;
        break;
    case GATHERED:
    case LAST:
        DCP_TRY(dcp__merge_poll(m, run, DCP__SLOT_GATHER, &is_here));
        if (!is_here) return DCP_OK;
        dcp__merge_gather_finish(m, run, run->step - 1, buf.gather_recv);
        *done_out = run->phase == LAST;
        run->phase = MERGE;
        break;
    default:
        DCP_TRY(merge_tile(m, run, &buf, has_next));
        if (gathers)
            DCP_TRY(dcp__merge_gather_start(m, run, run->step, buf.gather_send, buf.gather_recv));
        run->step++;
        run->phase = has_next ? TILE : LAST;
        *done_out = !has_next && !gathers;
        break;
    }
    run->moved = true;
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_alltoall = {
    DCP_MERGE_ALLTOALL, "alltoall", "rank", false, false, false, true, step_alltoall,
};
