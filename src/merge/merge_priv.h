/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the merge: the object, the table that an algorithm fills, and what all of them share.
 *
 * merge.c          create, run, destroy, and the order of their steps
 * merge_check.c    local checks of a description and of a run's arguments, overlaps
 * merge_agree.c    the records with which ranks agree before data moves and report after it
 * merge_rows.c     rows of N sources into one destination: the only caller of the kernels
 * merge_<algo>.c   one algorithm each */
#ifndef DCP_MERGE_MERGE_PRIV_H
#define DCP_MERGE_MERGE_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status_priv.h"
#include "dcpattn/merge.h"
#include "kernels/kernels_priv.h"

/* Rows [t_begin, t_end) x [h_begin, h_end). */
struct dcp__merge_block {
    int64_t t_begin, t_end, h_begin, h_end;
};

/* A strided [T,H,D] payload with its [T,H] LSE; element (t,h,d) is at out + (t * out_ts + h *
 * out_hs + d) elements. kv_len NULL = none. */
struct dcp__merge_src {
    const char *out;
    int64_t out_ts, out_hs;
    const char *lse;
    int64_t lse_ts, lse_hs;
    const int64_t *kv_len;
    dcp_dtype lse_type;
};
/* Destination; (t0, h0) = the row that lies at its start. lse NULL = not wanted. */
struct dcp__merge_dst {
    char *out;
    int64_t out_ts, out_hs;
    float *lse;
    int64_t lse_ts, lse_hs;
    int64_t t0, h0;
};

/* What a rank saw while merging; the exit records add them up. */
struct dcp__merge_seen {
    int64_t n_nonfinite, n_lse_bad, n_lse_empty;
    int64_t t, h; /* the smallest (token, head, rank) with a non-finite value; t < 0: none */
    int64_t rank;
};

struct dcp__merge_algo; /* below */

/* Room for merge_rows.c: [n_ranks] or [n_ranks][DCP__MERGE_ROWS]. */
struct dcp__merge_scratch {
    float *lse, *weights;
    const void **parts, **ahead;
    float *part_weights;
    int *part_rank;
};

struct dcp_merge {
    dcp_group *g;
    const struct dcp__merge_algo *algo;
    dcp_merge_desc desc; /* defaults resolved */
    int rank, n_ranks;
    bool one_space; /* all ranks live in one address space: overlaps of all pairs can be seen */
    uint64_t nonce; /* of this create, the same on all ranks */
    uint64_t n_runs;
    int64_t tile_tokens;
    size_t workspace_bytes;
    char why[160];
    struct dcp__kernels kernels;
    struct dcp__merge_scratch scratch;
    struct dcp__merge_src *srcs, *staged; /* [n_ranks] */
    void *records;                        /* [n_ranks] received records */
    void *small;                          /* one block: the small arrays */
    void *private_ws;                     /* of dcp__alloc: what init of the algorithm asked for */
    void *group_ws;                       /* of dcp_group_alloc */
    size_t group_tile_bytes;              /* bytes of one staged tile (direct) */
    struct dcp__xfer *sends, *recvs;      /* [n_ranks] (alltoall) */
    size_t send_bytes, recv_bytes;        /* of one tile (alltoall) */
    size_t gather_send_bytes, gather_recv_bytes;
};

/* One run: arguments with strides resolved, and what the peers said of theirs. */
struct dcp__merge_run {
    dcp_merge_args args; /* every stride resolved */
    int64_t n_tokens;
    struct dcp__merge_src own;
    struct dcp__merge_seen seen;
    int64_t wire_bytes;
    bool any_staged;             /* some rank's partial cannot be read by all peers (direct) */
    bool stages_out, stages_lse; /* this rank's */
    int contiguity;              /* 2 whole, 1 tokens, 0 rows: the least of all ranks (allreduce) */
};

/* An algorithm. plan is pure: it sets tile_tokens and the sizes for limit_bytes (tile_tokens = the
 * given one if > 0, else the largest that fits; an error if not even one token does). run does its
 * work between entry and exit records; an error it returns has poisoned the group. */
struct dcp__merge_algo {
    dcp_merge_algo id;
    const char *name;
    bool sees_all;   /* needs dcp__group_all_see */
    bool writes_out; /* overwrites the caller's partial */
    dcp_status (*plan)(struct dcp_merge *m, int64_t tile_tokens);
    dcp_status (*run)(struct dcp_merge *m, struct dcp__merge_run *run);
    size_t (*private_bytes)(const struct dcp_merge *m);
    size_t (*group_bytes)(const struct dcp_merge *m);
};
extern const struct dcp__merge_algo dcp__merge_direct, dcp__merge_alltoall, dcp__merge_allreduce;

/* ---- merge_blocks.c: pure ---- */
/* Element offset of (t, h): never in 32 bits. */
int64_t dcp__merge_offset(int64_t t, int64_t h, int64_t token_stride, int64_t head_stride);
/* The rows that rank owns (none counts as by heads). */
struct dcp__merge_block dcp__merge_block_of(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                            int n_ranks, int rank);
/* The part of rank's rows that step i works on, tile_tokens a step; and how many steps all take. */
struct dcp__merge_block dcp__merge_block_step(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                              int n_ranks, int rank, int64_t tile_tokens,
                                              int64_t step);
int64_t dcp__merge_n_steps(dcp_cut cut, int64_t n_tokens, int n_ranks, int64_t tile_tokens);
int64_t dcp__merge_block_rows(const struct dcp__merge_block *b);
/* Bytes of a packed block: payload rows [rows][dim], then LSEs [rows] f32, each padded to 64. */
size_t dcp__merge_block_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes);
size_t dcp__merge_payload_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes);
/* The largest packed block of rank in any step with tiles of tile_tokens. */
size_t dcp__merge_block_max_bytes(dcp_cut cut, int64_t max_tokens, int64_t n_heads, int n_ranks,
                                  int rank, int64_t tile_tokens, int64_t dim, size_t elem_bytes);

/* ---- merge_rows.c ---- */
/* Merge the block's rows of all sources into dst. part_type: of all sources' payloads. counts =
 * false: another rank counts these rows. */
void dcp__merge_rows(struct dcp_merge *m, const struct dcp__merge_src *srcs, dcp_dtype part_type,
                     const float *sink, const struct dcp__merge_block *block,
                     const struct dcp__merge_dst *dst, bool counts, struct dcp__merge_seen *seen);
/* Pack the block's rows of src: payload converted to type, LSE as f32 with kv_len applied; payloads
 * of empty rows are neither read nor written. payload may be NULL (LSE only). */
void dcp__merge_pack(const struct dcp_merge *m, const struct dcp__merge_src *src,
                     const struct dcp__merge_block *block, dcp_dtype type, char *payload,
                     float *lse);
/* The effective LSE of (t, h): -inf if kv_len says 0; else the stored one, widened. */
float dcp__merge_lse_at(const struct dcp__merge_src *src, int64_t t, int64_t h);
void dcp__merge_saw(struct dcp__merge_seen *seen, int64_t n, int64_t t, int64_t h, int64_t rank);

/* ---- merge_check.c ---- */
dcp_status dcp__merge_check_desc(const dcp_merge_desc *desc, dcp_merge_desc *resolved_out);
dcp_status dcp__merge_check_args(const struct dcp_merge *m, const dcp_merge_args *args,
                                 struct dcp__merge_run *run_out);
/* A strided set of byte ranges: n0 x n1 rows of len bytes. */
struct dcp__region {
    const char *at;
    int64_t n0, s0, n1, s1, len;
};
bool dcp__regions_overlap(const struct dcp__region *a, const struct dcp__region *b);
/* This rank's merged and merged LSE against a partial at src of a rank. is_own: the exact in-place
 * position is allowed. What overlaps is named in *what_out. */
bool dcp__merge_overlaps(const struct dcp_merge *m, const struct dcp__merge_run *run, int owner,
                         const struct dcp__merge_dst *dst, const struct dcp__merge_src *src,
                         int src_rank, const char **what_out);

/* ---- merge_agree.c ---- */
dcp_status dcp__merge_agree_create(struct dcp_merge *m, dcp_status local);
dcp_status dcp__merge_agree_ready(struct dcp_merge *m, dcp_status local);
dcp_status dcp__merge_enter(struct dcp_merge *m, struct dcp__merge_run *run, dcp_status local);
dcp_status dcp__merge_exit(struct dcp_merge *m, struct dcp__merge_run *run,
                           dcp_merge_stats *stats_out);

#endif
