/* SPDX-License-Identifier: Apache-2.0 */
/* The merge in numbers: which rows a rank works on in which step, what buffers that takes, what it
 * sends. Integers in, integers out: no state, no allocation, nothing that waits. The merge itself
 * takes its buffers by these functions, and the tests compare them with what a run has counted. */
#ifndef DCP_PLAN_PLAN_MERGE_PRIV_H
#define DCP_PLAN_PLAN_MERGE_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dcpattn/types.h"

/* Rows [t_begin, t_end) x [h_begin, h_end). */
struct dcp__merge_block {
    int64_t t_begin, t_end, h_begin, h_end;
};

/* What shapes a merge, seen by one rank. */
struct dcp__merge_shape {
    dcp_merge_algo algo;
    dcp_cut cut;
    int64_t max_tokens, n_heads, dim;
    int n_ranks, rank;
    size_t out_bytes, lse_bytes, merged_bytes, wire_bytes; /* of an element */
    int n_cols;          /* f32 columns that stand for an LSE in a message: 1, or 2 (max, sum) */
    bool is_narrow;      /* the wire type is narrower than out's */
    bool shares_lse;     /* non-finite values propagate: LSEs go first (halving, hierarchical) */
    bool one_space;      /* no tiles in group memory (direct, hierarchical) */
    const int *host_of;  /* [n_ranks] 0 .. M - 1 in order of first ranks, NULL = one host */
    int64_t tile_tokens; /* a step's tokens of each rank */
    int64_t tile_heads;  /* and heads: fewer than there are only if tile_tokens is 1 */
};

/* Bytes of the buffers of one rank. */
struct dcp__merge_sizes {
    size_t send, recv;               /* alltoall: recv twice; halving, hierarchical: of a step */
    size_t state, table;             /* f32 rows with their columns; everybody's LSEs */
    size_t gather_send, gather_recv; /* cut none */
    size_t full;                     /* of whole partials and LSEs (allreduce) */
    size_t private_total;
    size_t group_tile, group_total; /* one staged tile; both */
};

/* ---- rows ---- */
/* Element offset of (t, h): never in 32 bits. */
static inline int64_t dcp__merge_offset(int64_t t, int64_t h, int64_t token_stride,
                                        int64_t head_stride)
{
    return t * token_stride + h * head_stride;
}
/* The rows that rank owns (none counts as by heads). */
struct dcp__merge_block dcp__merge_block_of(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                            int n_ranks, int rank);
/* The rows that rank gets in the end: with cut none all, else its own. */
struct dcp__merge_block dcp__merge_block_got(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                             int n_ranks, int rank);
/* The part of rank's rows that a step of a call of n_tokens works on, and how many steps all take.
 */
struct dcp__merge_block dcp__merge_block_step(const struct dcp__merge_shape *s, int64_t n_tokens,
                                              int rank, int64_t step);
int64_t dcp__merge_n_steps(const struct dcp__merge_shape *s, int64_t n_tokens);
/* Steps with tiles of one token and all heads; heads of the widest block. */
int64_t dcp__merge_longest(const struct dcp__merge_shape *s, int64_t n_tokens);
int64_t dcp__merge_widest(const struct dcp__merge_shape *s);
int64_t dcp__merge_block_rows(const struct dcp__merge_block *b);
/* Bytes of a packed block: payload rows [rows][dim], then n_cols columns [rows] of 4 bytes, each
 * part padded to 64. */
size_t dcp__merge_rows_bytes(int64_t n_rows, int64_t dim, size_t elem_bytes, int n_cols);
size_t dcp__merge_block_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes,
                              int n_cols);
size_t dcp__merge_payload_bytes(int64_t n_rows, int64_t dim, size_t elem_bytes);

/* ---- the exchange patterns ---- */
/* halving: level of a rank. It is in the group [lo, hi) = [lo, mid) + [mid, hi), sends the blocks
 * of the half it is not in to send_to and keeps those of [keep_lo, keep_hi). */
struct dcp__halving {
    int keep_lo, keep_hi, send_lo, send_hi;
    int send_to, n_recvs, recv_from[2];
};
bool dcp__halving_at(int n_ranks, int rank, int level, struct dcp__halving *out);
/* in[r] = 1 for the ranks whose rows are in rank's after level levels; returns how many. */
int dcp__halving_members(int n_ranks, int rank, int level, unsigned char *in);
/* hierarchical: how many ranks a host has, the nth of them, and the one that merges the host's
 * parts of block_rank's rows. */
int dcp__host_size(const struct dcp__merge_shape *s, int host);
int dcp__host_nth(const struct dcp__merge_shape *s, int host, int nth);
int dcp__host_handler(const struct dcp__merge_shape *s, int host, int block_rank);
int dcp__host_of(const struct dcp__merge_shape *s, int rank);
int dcp__n_hosts(const struct dcp__merge_shape *s);
/* Columns of a part in a message of f32 rows: its LSE, and the number of non-finite values. */
int dcp__state_cols(const struct dcp__merge_shape *s, int n_members);

/* ---- bytes ---- */
void dcp__merge_sizes_of(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out);
/* alltoall: payload and LSEs of a block travel apart, so that the payload can be sent from where
 * the caller has it, each stretch a message; or in one message that a
 * transport which can gather makes of the payload where it lies and of the LSEs. */
bool dcp__merge_splits(const struct dcp__merge_shape *s);
bool dcp__merge_gathers(const struct dcp__merge_shape *s);
/* Messages of the payload of a block that travels apart; 0 where it does not. */
int dcp__merge_payloads(const struct dcp__merge_shape *s, const struct dcp__merge_block *b);
/* The largest tile that fits limit_bytes (0, 0 if none does) into s; sizes_out of it, or of the
 * smallest tile. */
void dcp__merge_fit(struct dcp__merge_shape *s, size_t limit_bytes,
                    struct dcp__merge_sizes *sizes_out);
/* What rank sends (direct: reads from peers) in a call of n_tokens when nothing has to be staged.
 */
void dcp__merge_traffic(const struct dcp__merge_shape *s, int64_t n_tokens, int64_t *bytes_out,
                        int64_t *n_messages_out);

#endif
