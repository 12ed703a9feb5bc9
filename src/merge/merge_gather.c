/* SPDX-License-Identifier: Apache-2.0 */
/* Cut none: the rows that this rank has merged go to all peers, and theirs come here. A message is
 * the payload rows of a step's block in the merged type, then the merged LSEs. */
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

struct dcp__merge_dst dcp__merge_step_dst(const struct dcp_merge *m,
                                          const struct dcp__merge_run *run, char *gather_send)
{
    if (m->desc.cut != DCP_CUT_NONE) return dcp__merge_result(m, run);
    const struct dcp__merge_block own = dcp__merge_step_block(m, run, m->rank);
    const int64_t width = own.h_end - own.h_begin;
    const size_t payload =
        dcp__merge_payload_bytes(dcp__merge_block_rows(&own), m->desc.dim, m->shape.merged_bytes);
    return (struct dcp__merge_dst){gather_send,
                                   width * m->desc.dim,
                                   m->desc.dim,
                                   (float *)(void *)(gather_send + payload),
                                   width,
                                   1,
                                   own.t_begin,
                                   own.h_begin,
                                   0};
}

static void unpack(const struct dcp_merge *m, const struct dcp__merge_run *run,
                   const struct dcp__merge_block *b, const char *from)
{
    const dcp_merge_args *a = &run->args;
    const size_t elem = m->shape.merged_bytes;
    const size_t row_bytes = (size_t)m->desc.dim * elem;
    const float *lse =
        (const float *)(const void *)(from + dcp__merge_payload_bytes(dcp__merge_block_rows(b),
                                                                      m->desc.dim, elem));
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

dcp_status dcp__merge_gather_start(struct dcp_merge *m, struct dcp__merge_run *run, int64_t step,
                                   char *gather_send, char *gather_recv)
{
    const size_t elem = m->shape.merged_bytes;
    const struct dcp__merge_block own = dcp__merge_block_at(m, run, m->rank, step);
    const size_t own_bytes = dcp__merge_block_bytes(&own, m->desc.dim, elem, 1);
    int n = 0;
    size_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        const struct dcp__merge_block b = dcp__merge_block_at(m, run, r, step);
        const size_t n_bytes = dcp__merge_block_bytes(&b, m->desc.dim, elem, 1);
        m->sends[n] = (struct dcp__xfer){.peer = r, .buf = gather_send, .n_bytes = own_bytes};
        m->recvs[n++] = (struct dcp__xfer){.peer = r, .buf = gather_recv + at, .n_bytes = n_bytes};
        at += n_bytes;
    }
    DCP_TRY(dcp__merge_send(m, run, DCP__SLOT_GATHER, n, n));
    unpack(m, run, &own, gather_send); /* the own rows, while they travel */
    return DCP_OK;
}

void dcp__merge_gather_finish(struct dcp_merge *m, struct dcp__merge_run *run, int64_t step,
                              const char *gather_recv)
{
    size_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        const struct dcp__merge_block b = dcp__merge_block_at(m, run, r, step);
        unpack(m, run, &b, gather_recv + at);
        at += dcp__merge_block_bytes(&b, m->desc.dim, m->shape.merged_bytes, 1);
    }
}
