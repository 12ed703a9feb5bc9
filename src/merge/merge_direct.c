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
 * copies it, a tile at a time, into one of two tiles of group memory; a record per tile keeps
 *          copying at most one tile ahead of the slowest reader.
 * Order    ranks 0..N-1, bits independent of everything else.
 * Limits   ranks that see each other's memory. The wire type plays no part: nothing is sent. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

/* All ranks' blocks of one step lie one after the other in a tile. */
static size_t tile_bytes(const struct dcp_merge *m, int64_t tile_tokens)
{
    size_t sum = 0;
    for (int r = 0; r < m->n_ranks; r++)
        sum += dcp__merge_block_max_bytes(m->desc.cut, m->desc.max_tokens, m->desc.n_heads,
                                          m->n_ranks, r, tile_tokens, m->desc.dim,
                                          dcp_dtype_bytes(m->desc.out_type));
    return sum;
}

static size_t group_bytes(const struct dcp_merge *m)
{
    return 2 * m->group_tile_bytes;
}

static size_t private_bytes(const struct dcp_merge *m)
{
    (void)m;
    return 0;
}

static dcp_status plan(struct dcp_merge *m, int64_t tile_tokens)
{
    m->group_tile_bytes = 0;
    m->tile_tokens = m->desc.max_tokens;
    if (m->one_space || m->n_ranks == 1 || m->desc.max_tokens == 0) return DCP_OK;
    int64_t most = tile_tokens > 0 ? tile_tokens : m->desc.max_tokens;
    if (tile_tokens <= 0) {
        int64_t low = 0;
        while (low < most) { /* the largest that fits */
            const int64_t mid = low + (most - low + 1) / 2;
            if (2 * tile_bytes(m, mid) <= m->desc.workspace_limit_bytes)
                low = mid;
            else
                most = mid - 1;
        }
        if (low == 0)
            return dcp__fail(DCP_ERR_ARG,
                             "merge: direct takes %zu bytes of workspace for tiles of one token, "
                             "the limit is %zu",
                             2 * tile_bytes(m, 1), m->desc.workspace_limit_bytes);
    }
    m->tile_tokens = most;
    m->group_tile_bytes = tile_bytes(m, most);
    return DCP_OK;
}

/* Merge the rows of block, whose sources start at their true place. */
static void merge_block(struct dcp_merge *m, struct dcp__merge_run *run,
                        const struct dcp__merge_block *block, bool counts)
{
    const struct dcp__merge_block own =
        dcp__merge_block_of(m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, m->rank);
    const bool is_whole = m->desc.cut == DCP_CUT_NONE;
    const dcp_merge_args *a = &run->args;
    const struct dcp__merge_dst dst = {a->merged,
                                       a->merged_token_stride,
                                       a->merged_head_stride,
                                       a->merged_lse,
                                       a->merged_lse_token_stride,
                                       a->merged_lse_head_stride,
                                       is_whole ? 0 : own.t_begin,
                                       is_whole ? 0 : own.h_begin};
    dcp__merge_rows(m, m->srcs, m->desc.out_type, a->sink, block, &dst, counts, &run->seen);
}

static int64_t peer_bytes(const struct dcp_merge *m, const struct dcp__merge_block *b)
{
    return dcp__merge_block_rows(b) * (m->n_ranks - 1) *
           (m->desc.dim * (int64_t)dcp_dtype_bytes(m->desc.out_type) +
            (int64_t)dcp_dtype_bytes(m->desc.lse_type));
}

static dcp_status run_visible(struct dcp_merge *m, struct dcp__merge_run *run)
{
    dcp__fault_point(m->g, "merge");
    for (int r = 0; r < m->n_ranks; r++) {
        if (m->desc.cut != DCP_CUT_NONE && r != m->rank) continue;
        const struct dcp__merge_block b =
            dcp__merge_block_of(m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, r);
        merge_block(m, run, &b, r == m->rank);
        run->wire_bytes += peer_bytes(m, &b);
    }
    return DCP_OK;
}

/* ---- partials that peers cannot see ---- */

/* Rank r's packed block of a step inside a tile. The payload's row (t, h) is at t, h of the block.
 */
static size_t block_offset(const struct dcp_merge *m, int64_t n_tokens, int64_t step, int r)
{
    size_t at = 0;
    for (int q = 0; q < r; q++) {
        const struct dcp__merge_block b = dcp__merge_block_step(
            m->desc.cut, n_tokens, m->desc.n_heads, m->n_ranks, q, m->tile_tokens, step);
        at += dcp__merge_block_bytes(&b, m->desc.dim, dcp_dtype_bytes(m->desc.out_type));
    }
    return at;
}

static void stage(struct dcp_merge *m, const struct dcp__merge_run *run, int64_t step, char *tile)
{
    for (int r = 0; r < m->n_ranks; r++) {
        const struct dcp__merge_block b = dcp__merge_block_step(
            m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, r, m->tile_tokens, step);
        char *at = tile + block_offset(m, run->n_tokens, step, r);
        const size_t payload =
            dcp__merge_payload_bytes(&b, m->desc.dim, dcp_dtype_bytes(m->desc.out_type));
        /* Every LSE is staged once anybody stages: small, and kv_len is then applied. */
        dcp__merge_pack(m, &run->own, &b, m->desc.out_type, run->stages_out ? at : NULL,
                        (float *)(void *)(at + payload));
    }
}

/* Point the sources at what block b of this step looks like to this rank. */
static dcp_status aim(struct dcp_merge *m, const struct dcp__merge_src *base,
                      const struct dcp__merge_block *b, size_t tile_offset, uint32_t alloc_id,
                      uint64_t ws_offset, size_t b_offset)
{
    const int64_t width = b->h_end - b->h_begin;
    const size_t elem = dcp_dtype_bytes(m->desc.out_type);
    const size_t payload = dcp__merge_payload_bytes(b, m->desc.dim, elem);
    const size_t n_bytes = dcp__merge_block_bytes(b, m->desc.dim, elem);
    const int64_t skipped = dcp__merge_offset(b->t_begin, b->h_begin, width, 1); /* rows */
    for (int r = 0; r < m->n_ranks; r++) {
        const char *at = r == m->rank
                             ? (const char *)m->group_ws + tile_offset + b_offset
                             : dcp__group_peer_ptr(m->g, r, alloc_id,
                                                   ws_offset + tile_offset + b_offset, n_bytes);
        if (at == NULL)
            return dcp__group_poison(m->g, DCP_ERR_PEER,
                                     "rank %d cannot see the merge workspace of rank %d", m->rank,
                                     r);
        struct dcp__merge_src *src = &m->srcs[r];
        if (base[r].out == NULL) {
            src->out = at - skipped * m->desc.dim * (int64_t)elem;
            src->out_ts = width * m->desc.dim;
            src->out_hs = m->desc.dim;
        }
        src->lse = at + payload - skipped * (int64_t)sizeof(float);
        src->lse_ts = width;
        src->lse_hs = 1;
        src->kv_len = NULL;
        src->lse_type = DCP_F32;
    }
    return DCP_OK;
}

static dcp_status run_staged(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const int64_t n_steps =
        dcp__merge_n_steps(m->desc.cut, run->n_tokens, m->n_ranks, m->tile_tokens);
    uint32_t alloc_id = 0;
    uint64_t ws_offset = 0;
    if (!dcp__group_locate(m->g, m->group_ws, 2 * m->group_tile_bytes, &alloc_id, &ws_offset))
        return dcp__group_poison(m->g, DCP_ERR_PEER,
                                 "rank %d: the merge workspace is not in group memory", m->rank);
    struct dcp__merge_src *base = m->staged;
    memcpy(base, m->srcs, (size_t)m->n_ranks * sizeof(*base));
    char *tiles = m->group_ws;
    stage(m, run, 0, tiles);
    for (int64_t i = 0; i < n_steps; i++) {
        const size_t tile = (size_t)(i & 1) * m->group_tile_bytes;
        /* All have staged step i, and have merged step i - 1: its tile is free. */
        const int64_t said = i;
        DCP_TRY(dcp__group_record(m->g, &said, sizeof(said), m->records));
        if (i + 1 < n_steps) stage(m, run, i + 1, tiles + m->group_tile_bytes - tile);
        if (i == 0) dcp__fault_point(m->g, "merge");
        for (int r = 0; r < m->n_ranks; r++) {
            if (m->desc.cut != DCP_CUT_NONE && r != m->rank) continue;
            const struct dcp__merge_block b = dcp__merge_block_step(
                m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, r, m->tile_tokens, i);
            if (dcp__merge_block_rows(&b) == 0) continue;
            DCP_TRY(
                aim(m, base, &b, tile, alloc_id, ws_offset, block_offset(m, run->n_tokens, i, r)));
            merge_block(m, run, &b, r == m->rank);
            run->wire_bytes += peer_bytes(m, &b);
        }
    }
    return DCP_OK;
}

static dcp_status run_direct(struct dcp_merge *m, struct dcp__merge_run *run)
{
    return run->any_staged && run->n_tokens > 0 ? run_staged(m, run) : run_visible(m, run);
}

const struct dcp__merge_algo dcp__merge_direct = {
    DCP_MERGE_DIRECT, "direct", true, false, plan, run_direct, private_bytes, group_bytes,
};
