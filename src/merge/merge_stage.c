/* SPDX-License-Identifier: Apache-2.0 */
/* Partials in memory that peers cannot see: their owner copies a step's rows, of all blocks, into
 * one of two tiles of group memory, and peers read them there. A record a step keeps copying at
 * most one tile ahead of the slowest reader. Once anybody stages anything, everybody stages its
 * LSEs: they are small, and kv_len is then applied. */
#include "group/group_priv.h"
#include "merge/merge_priv.h"

/* Rank r's packed block of a step inside a tile. */
static size_t block_offset(const struct dcp_merge *m, int64_t n_tokens, int64_t step, int r)
{
    size_t at = 0;
    for (int q = 0; q < r; q++) {
        const struct dcp__merge_block b = dcp__merge_block_step(&m->shape, n_tokens, q, step);
        at += dcp__merge_block_bytes(&b, m->desc.dim, m->shape.out_bytes, m->shape.n_cols);
    }
    return at;
}

void dcp__merge_stage(struct dcp_merge *m, const struct dcp__merge_run *run, int64_t step)
{
    char *tile = (char *)m->group_ws + (size_t)(step & 1) * m->sizes.group_tile;
    for (int r = 0; r < m->n_ranks; r++) {
        const struct dcp__merge_block b = dcp__merge_block_step(&m->shape, run->n_tokens, r, step);
        char *at = tile + block_offset(m, run->n_tokens, step, r);
        const size_t payload =
            dcp__merge_payload_bytes(dcp__merge_block_rows(&b), m->desc.dim, m->shape.out_bytes);
        dcp__merge_pack(m, &run->own, &b, m->desc.out_type, run->stages_out ? at : NULL,
                        (float *)(void *)(at + payload));
    }
}

dcp_status dcp__merge_stage_aim(struct dcp_merge *m, struct dcp__merge_run *run, int host,
                                int block_rank)
{
    uint32_t alloc_id = 0;
    uint64_t ws_offset = 0;
    if (!dcp__group_locate(m->g, m->group_ws, m->sizes.group_total, &alloc_id, &ws_offset))
        return dcp__group_poison(m->g, DCP_ERR_PEER,
                                 "rank %d: the merge workspace is not in group memory", m->rank);
    const struct dcp__merge_block b = dcp__merge_step_block(m, run, block_rank);
    const size_t at_bytes = (size_t)(run->step & 1) * m->sizes.group_tile +
                            block_offset(m, run->n_tokens, run->step, block_rank);
    const size_t n_bytes =
        dcp__merge_block_bytes(&b, m->desc.dim, m->shape.out_bytes, m->shape.n_cols);
    const size_t payload =
        dcp__merge_payload_bytes(dcp__merge_block_rows(&b), m->desc.dim, m->shape.out_bytes);
    for (int r = 0; r < m->n_ranks; r++) {
        if (host >= 0 && dcp__host_of(&m->shape, r) != host) continue;
        const char *at =
            r == m->rank ? (const char *)m->group_ws + at_bytes
                         : dcp__group_peer_ptr(m->g, r, alloc_id, ws_offset + at_bytes, n_bytes);
        if (at == NULL)
            return dcp__group_poison(m->g, DCP_ERR_PEER,
                                     "rank %d cannot see the merge workspace of rank %d", m->rank,
                                     r);
        const struct dcp__merge_src *base = &m->staged[r];
        m->srcs[r] = dcp__merge_unpacked(m, at, at + payload, &b, m->shape.out_bytes);
        if (base->out != NULL) { /* readable in place: only the LSEs are staged */
            m->srcs[r].out = base->out;
            m->srcs[r].out_ts = base->out_ts;
            m->srcs[r].out_hs = base->out_hs;
        }
    }
    return DCP_OK;
}
