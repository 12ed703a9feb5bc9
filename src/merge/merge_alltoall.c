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
 * Cut tokens: a tile is a stretch of each rank's own tokens, all heads. Cut none: merged as by
 * heads; each tile's merged rows then go to all peers, while the tile after next is packed.
 *
 * Cost     sends (N-1)/N of a partial in its wire type, plus LSEs; N-1 messages a tile. Cut none
 *          sends (N-1)/N of the merged result on top.
 * Scratch  one send and two receive tiles; cut none one more of each; at most the workspace limit.
 * Order    ranks 0..N-1: the bits of direct, for any tile size, if the wire type is out's type.
 * Limits   none. Empty rows are neither read nor sent with content: their bytes of a message hold
 *          whatever was there, and the LSE says so. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

enum { SLOT_TILES = 0, SLOT_GATHER = 1 };
/* Workspace below which a tile is not cut further: some 256 KiB in each of three buffers. */
enum { WORTH_BYTES = 768 << 10 };

static size_t wire_elem(const struct dcp_merge *m)
{
    return dcp_dtype_bytes(m->desc.wire_type);
}

/* With a narrower wire type the own rows take the same rounding, through the receive buffer. */
static bool packs_own(const struct dcp_merge *m)
{
    return m->desc.wire_type != m->desc.out_type;
}

static void set_sizes(struct dcp_merge *m, int64_t tile_tokens)
{
    const dcp_merge_desc *d = &m->desc;
    m->send_bytes = 0;
    m->gather_recv_bytes = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        m->send_bytes += dcp__merge_block_max_bytes(d->cut, d->max_tokens, d->n_heads, m->n_ranks,
                                                    r, tile_tokens, d->dim, wire_elem(m));
        m->gather_recv_bytes +=
            dcp__merge_block_max_bytes(d->cut, d->max_tokens, d->n_heads, m->n_ranks, r,
                                       tile_tokens, d->dim, dcp_dtype_bytes(d->merged_type));
    }
    m->recv_bytes = (size_t)(m->n_ranks - (packs_own(m) ? 0 : 1)) *
                    dcp__merge_block_max_bytes(d->cut, d->max_tokens, d->n_heads, m->n_ranks,
                                               m->rank, tile_tokens, d->dim, wire_elem(m));
    m->gather_send_bytes =
        dcp__merge_block_max_bytes(d->cut, d->max_tokens, d->n_heads, m->n_ranks, m->rank,
                                   tile_tokens, d->dim, dcp_dtype_bytes(d->merged_type));
    if (d->cut != DCP_CUT_NONE) {
        m->gather_send_bytes = 0;
        m->gather_recv_bytes = 0;
    }
}

static size_t private_bytes(const struct dcp_merge *m)
{
    return m->send_bytes + 2 * m->recv_bytes + m->gather_send_bytes + m->gather_recv_bytes;
}

static size_t group_bytes(const struct dcp_merge *m)
{
    (void)m;
    return 0;
}

static dcp_status plan(struct dcp_merge *m, int64_t tile_tokens)
{
    const int64_t longest = dcp__merge_n_steps(m->desc.cut, m->desc.max_tokens, m->n_ranks, 1);
    m->tile_tokens = longest;
    if (longest == 0) {
        set_sizes(m, 0);
        return DCP_OK;
    }
    int64_t low = tile_tokens;
    int64_t most = longest;
    /* A tile of the whole would leave nothing to overlap: aim at four, unless their messages become
     * so small that latency rules. */
    if (m->n_ranks > 1) {
        set_sizes(m, 1);
        const int64_t enough = (int64_t)(WORTH_BYTES / (private_bytes(m) + 1)) + 1;
        const int64_t quarter = (longest + 3) / 4;
        most = enough < quarter ? quarter : enough < longest ? enough : longest;
    }
    if (tile_tokens <= 0) {
        low = 0;
        while (low < most) { /* the largest that fits */
            const int64_t mid = low + (most - low + 1) / 2;
            set_sizes(m, mid);
            if (private_bytes(m) <= m->desc.workspace_limit_bytes)
                low = mid;
            else
                most = mid - 1;
        }
        if (low == 0) {
            set_sizes(m, 1);
            return dcp__fail(DCP_ERR_ARG,
                             "merge: alltoall takes %zu bytes of workspace for tiles of one token, "
                             "the limit is %zu",
                             private_bytes(m), m->desc.workspace_limit_bytes);
        }
    }
    m->tile_tokens = low;
    set_sizes(m, low);
    return DCP_OK;
}

struct buffers {
    char *send, *recv[2], *gather_send, *gather_recv;
};

static struct buffers lay_out(const struct dcp_merge *m)
{
    struct buffers b;
    b.send = m->private_ws != NULL ? m->private_ws : m->small; /* NULL: all sizes are 0 */
    b.recv[0] = b.send + m->send_bytes;
    b.recv[1] = b.recv[0] + m->recv_bytes;
    b.gather_send = b.recv[1] + m->recv_bytes;
    b.gather_recv = b.gather_send + m->gather_send_bytes;
    return b;
}

static struct dcp__merge_block block_at(const struct dcp_merge *m, const struct dcp__merge_run *run,
                                        int r, int64_t step)
{
    return dcp__merge_block_step(m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, r,
                                 m->tile_tokens, step);
}

/* Where rank r's block lies among the received ones of this rank. */
static size_t recv_offset(const struct dcp_merge *m, const struct dcp__merge_block *own, int r)
{
    const int nth = r - (!packs_own(m) && r > m->rank ? 1 : 0);
    return (size_t)nth * dcp__merge_block_bytes(own, m->desc.dim, wire_elem(m));
}

static void pack(const struct dcp_merge *m, const struct dcp__merge_run *run,
                 const struct dcp__merge_block *b, char *to)
{
    const size_t payload = dcp__merge_payload_bytes(b, m->desc.dim, wire_elem(m));
    dcp__merge_pack(m, &run->own, b, m->desc.wire_type, to, (float *)(void *)(to + payload));
}

static dcp_status start_tile(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct buffers *buf, int64_t step)
{
    int n_sends = 0;
    int n_recvs = 0;
    size_t at = 0;
    char *recv = buf->recv[step & 1];
    const struct dcp__merge_block own = block_at(m, run, m->rank, step);
    const size_t own_bytes = dcp__merge_block_bytes(&own, m->desc.dim, wire_elem(m));
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) {
            if (packs_own(m)) pack(m, run, &own, recv + recv_offset(m, &own, r));
            continue;
        }
        const struct dcp__merge_block b = block_at(m, run, r, step);
        const size_t n_bytes = dcp__merge_block_bytes(&b, m->desc.dim, wire_elem(m));
        pack(m, run, &b, buf->send + at);
        m->sends[n_sends++] = (struct dcp__xfer){r, buf->send + at, n_bytes};
        m->recvs[n_recvs++] = (struct dcp__xfer){r, recv + recv_offset(m, &own, r), own_bytes};
        at += n_bytes;
    }
    run->wire_bytes += (int64_t)at;
    return dcp__group_exchange_start(m->g, SLOT_TILES, m->sends, n_sends, m->recvs, n_recvs);
}

/* Merge the received tile; MPI moves messages only inside calls, so it is asked now and then. */
static dcp_status merge_tile(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct buffers *buf, int64_t step, bool is_next_open)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    const struct dcp__merge_block own = block_at(m, run, m->rank, step);
    if (dcp__merge_block_rows(&own) == 0) return DCP_OK;
    const int64_t width = own.h_end - own.h_begin;
    const size_t payload = dcp__merge_payload_bytes(&own, d->dim, wire_elem(m));
    const int64_t skipped = dcp__merge_offset(own.t_begin, own.h_begin, width, 1);
    for (int r = 0; r < m->n_ranks; r++) {
        struct dcp__merge_src *src = &m->srcs[r];
        if (r == m->rank && !packs_own(m)) {
            *src = run->own;
            continue;
        }
        const char *at = buf->recv[step & 1] + recv_offset(m, &own, r);
        *src = (struct dcp__merge_src){at - skipped * d->dim * (int64_t)wire_elem(m),
                                       width * d->dim,
                                       d->dim,
                                       at + payload - skipped * (int64_t)sizeof(float),
                                       width,
                                       1,
                                       NULL,
                                       DCP_F32};
    }
    const struct dcp__merge_block all =
        dcp__merge_block_of(d->cut, run->n_tokens, d->n_heads, m->n_ranks, m->rank);
    const bool is_none = d->cut == DCP_CUT_NONE;
    const size_t merged_payload =
        dcp__merge_payload_bytes(&own, d->dim, dcp_dtype_bytes(d->merged_type));
    struct dcp__merge_dst dst = {a->merged,
                                 a->merged_token_stride,
                                 a->merged_head_stride,
                                 a->merged_lse,
                                 a->merged_lse_token_stride,
                                 a->merged_lse_head_stride,
                                 is_none ? 0 : all.t_begin,
                                 is_none ? 0 : all.h_begin};
    if (is_none) /* the message to the peers; copied to the caller's own place afterwards */
        dst = (struct dcp__merge_dst){buf->gather_send,
                                      width * d->dim,
                                      d->dim,
                                      (float *)(void *)(buf->gather_send + merged_payload),
                                      width,
                                      1,
                                      own.t_begin,
                                      own.h_begin};
    struct dcp__merge_block part = own;
    for (int64_t t = own.t_begin; t < own.t_end; t = part.t_end) {
        part.t_begin = t;
        part.t_end = t + 8 < own.t_end ? t + 8 : own.t_end;
        dcp__merge_rows(m, m->srcs, d->wire_type, a->sink, &part, &dst, true, &run->seen);
        bool is_done = false;
        if (is_next_open && part.t_end < own.t_end)
            DCP_TRY(dcp__group_exchange_test(m->g, SLOT_TILES, &is_done));
    }
    return DCP_OK;
}

/* ---- cut none: the merged rows of a tile to all ---- */

static void unpack(const struct dcp_merge *m, const struct dcp__merge_run *run,
                   const struct dcp__merge_block *b, const char *from)
{
    const dcp_merge_args *a = &run->args;
    const size_t elem = dcp_dtype_bytes(m->desc.merged_type);
    const size_t row_bytes = (size_t)m->desc.dim * elem;
    const float *lse =
        (const float *)(const void *)(from + dcp__merge_payload_bytes(b, m->desc.dim, elem));
    int64_t row = 0;
    for (int64_t t = b->t_begin; t < b->t_end; t++) {
        for (int64_t h = b->h_begin; h < b->h_end; h++, row++) {
            char *to = (char *)a->merged +
                       dcp__merge_offset(t, h, a->merged_token_stride, a->merged_head_stride) *
                           (int64_t)elem;
            memcpy(to, from + (size_t)row * row_bytes, row_bytes);
            if (a->merged_lse != NULL)
                a->merged_lse[dcp__merge_offset(t, h, a->merged_lse_token_stride,
                                                a->merged_lse_head_stride)] = lse[row];
        }
    }
}

static dcp_status start_gather(struct dcp_merge *m, struct dcp__merge_run *run,
                               const struct buffers *buf, int64_t step)
{
    const size_t elem = dcp_dtype_bytes(m->desc.merged_type);
    const struct dcp__merge_block own = block_at(m, run, m->rank, step);
    const size_t own_bytes = dcp__merge_block_bytes(&own, m->desc.dim, elem);
    int n = 0;
    size_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        const struct dcp__merge_block b = block_at(m, run, r, step);
        const size_t n_bytes = dcp__merge_block_bytes(&b, m->desc.dim, elem);
        m->sends[n] = (struct dcp__xfer){r, buf->gather_send, own_bytes};
        m->recvs[n] = (struct dcp__xfer){r, buf->gather_recv + at, n_bytes};
        n++;
        at += n_bytes;
        run->wire_bytes += (int64_t)own_bytes;
    }
    DCP_TRY(dcp__group_exchange_start(m->g, SLOT_GATHER, m->sends, n, m->recvs, n));
    unpack(m, run, &own, buf->gather_send); /* the own rows, while they travel */
    return DCP_OK;
}

static dcp_status finish_gather(struct dcp_merge *m, struct dcp__merge_run *run,
                                const struct buffers *buf, int64_t step)
{
    DCP_TRY(dcp__group_exchange_wait(m->g, SLOT_GATHER));
    size_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        const struct dcp__merge_block b = block_at(m, run, r, step);
        unpack(m, run, &b, buf->gather_recv + at);
        at += dcp__merge_block_bytes(&b, m->desc.dim, dcp_dtype_bytes(m->desc.merged_type));
    }
    return DCP_OK;
}

static dcp_status run_alltoall(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const struct buffers buf = lay_out(m);
    const int64_t n_steps =
        dcp__merge_n_steps(m->desc.cut, run->n_tokens, m->n_ranks, m->tile_tokens);
    const bool gathers = m->desc.cut == DCP_CUT_NONE;
    if (n_steps > 0) DCP_TRY(start_tile(m, run, &buf, 0));
    dcp__fault_point(m->g, "merge");
    for (int64_t i = 0; i < n_steps; i++) {
        DCP_TRY(dcp__group_exchange_wait(m->g, SLOT_TILES));
        const bool has_next = i + 1 < n_steps;
        if (has_next) DCP_TRY(start_tile(m, run, &buf, i + 1));
        if (gathers && i > 0) DCP_TRY(finish_gather(m, run, &buf, i - 1));
        DCP_TRY(merge_tile(m, run, &buf, i, has_next));
        if (gathers) DCP_TRY(start_gather(m, run, &buf, i));
    }
    if (gathers && n_steps > 0) DCP_TRY(finish_gather(m, run, &buf, n_steps - 1));
    return DCP_OK;
}

const struct dcp__merge_algo dcp__merge_alltoall = {
    DCP_MERGE_ALLTOALL, "alltoall", false, false, plan, run_alltoall, private_bytes, group_bytes,
};
