/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the merge: the object, the table that an algorithm fills, and what all of them share.
 *
 * merge.c            create, run, start, test, wait, destroy, and the order of their steps
 * merge_choose.c     which algorithm, and the measurement behind auto
 * merge_check.c      local checks of a description and of a run's arguments
 * merge_overlap.c    what lies in what: strided buffers against each other
 * merge_agree.c      the records with which ranks agree before data moves and report after it
 * merge_rows.c       rows of N sources into one destination
 * merge_weights.c    weights of LSEs given as (max, sum)
 * merge_state.c      f32 rows on their way, with the LSEs that are in them (halving, hierarchical)
 * merge_gather.c     merged rows to everybody (cut none)
 * merge_stage.c      partials that peers cannot see, through group memory (direct, hierarchical)
 * merge_local.c      merges without a group
 * merge_<algo>.c     one algorithm each: direct, alltoall, halving, hierarchical, allreduce
 * src/plan/          blocks, tiles, bytes: integers only */
#ifndef DCP_MERGE_MERGE_PRIV_H
#define DCP_MERGE_MERGE_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status_priv.h"
#include "dcpattn/merge.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "plan/plan_merge_priv.h"

/* A strided [T,H,D] payload with its [T,H] LSE; element (t,h,d) is at out + (t * out_ts + h *
 * out_hs + d) elements. kv_len NULL = none. */
struct dcp__merge_src {
    const char *out;
    int64_t out_ts, out_hs;
    const char *lse;
    int64_t lse_ts, lse_hs;
    const int64_t *kv_len;
    dcp_dtype lse_type;
    const char *sum; /* lse holds the maximum and this the sum, at the same strides; or NULL */
};
/* Destination; (t0, h0) = the row that lies at its start. lse NULL = not wanted. */
struct dcp__merge_dst {
    char *out;
    int64_t out_ts, out_hs;
    float *lse;
    int64_t lse_ts, lse_hs;
    int64_t t0, h0;
    int64_t
        call_rows; /* of the whole call, where a block is part of it; 0: the block is the call */
};

/* What a rank saw while merging; the exit records add them up. */
struct dcp__merge_seen {
    int64_t n_nonfinite, n_lse_bad, n_lse_empty;
    int64_t t, h; /* the smallest (token, head, rank) with a non-finite value; t < 0: none */
    int64_t rank;
};

struct dcp__merge_algo; /* below */

/* Room for one token's heads: [n_parts] or [n_parts][DCP__MERGE_ROWS]. */
struct dcp__merge_scratch {
    float *lse, *sum, *weights;
    const void **parts, **ahead;
    float *part_weights;
    int *part_rank;
};
/* Of the table of kernels what rows need. */
struct dcp__merge_kernels {
    dcp__merge_row_fn *merge_row[4][4], *merge_row_nt[4][4]; /* [part type][merged type] */
    dcp__merge_pair_fn *merge_pair[4][4], *merge_pair_nt[4][4];
    const char *merge_row_name[4][4];
    dcp__merge_weights_fn *merge_weights;
};
/* What the arithmetic depends on: all that rows need to know of a merge. */
struct dcp__merge_math {
    int n_parts;
    int64_t dim;
    bool is_base_2, has_sum;
    dcp_dtype merged_type;
    dcp_nonfinite nonfinite;
    struct dcp__merge_kernels kernels;
    struct dcp__merge_scratch scratch;
};

/* What ranks found out about themselves before anything is chosen (merge_choose.c). */
struct dcp__merge_speed {
    double alpha_us;   /* a message there and one back, halved */
    double message_us; /* one message more in the same exchange */
    double byte_us;
    int is_known;
};

/* One run: arguments with strides resolved, what the peers said of theirs, and how far it is. */
enum dcp__merge_stage { DCP__MERGE_IDLE, DCP__MERGE_ENTER, DCP__MERGE_MOVE, DCP__MERGE_EXIT };
struct dcp__merge_run {
    dcp_merge_args args; /* every stride resolved */
    int64_t n_tokens;
    struct dcp__merge_src own;
    struct dcp__merge_seen seen;
    int64_t wire_bytes, n_messages;
    bool any_staged;             /* some rank's partial cannot be read by all peers (direct) */
    bool stages_out, stages_lse; /* this rank's */
    int contiguity;              /* 2 whole, 1 tokens, 0 rows: the least of all ranks (allreduce) */
    enum dcp__merge_stage stage;
    bool by_messages; /* records go as messages that can be tested (start), not at once (run) */
    bool may_wait;    /* a step waits for what it needs */
    bool moved;       /* the last step got somewhere */
    dcp_status local; /* of this rank's own checks */
    int64_t stuck_ns; /* since when a test has found nothing */
    int phase, level; /* the algorithm's own */
    int64_t step, n_steps;
    dcp_merge_stats stats;
};

/* f32 rows in the order of their blocks, normalised over their members, and for each member and row
 * its LSE (or max, sum) and how many non-finite values its payload had. Column c of member i is at
 * cols + ((i * n_cols + c) * stride). */
struct dcp__merge_state {
    float *payload, *cols;
    int64_t stride; /* rows between columns */
    int n_members;
    const int *members;      /* ascending; NULL: all ranks, by rank */
    const unsigned char *in; /* [n_ranks] or NULL: of all ranks' columns, those of these count */
    bool is_by_rank;         /* a member's columns are where those of all ranks have them */
};
struct dcp_merge {
    dcp_group *g;
    const struct dcp__merge_algo *algo;
    dcp_merge_desc desc; /* defaults resolved */
    int rank, n_ranks;
    bool one_space; /* all ranks live in one address space: overlaps of all pairs can be seen */
    bool all_see;
    uint64_t nonce; /* of this create, the same on all ranks */
    uint64_t n_runs;
    size_t workspace_bytes;
    char why[240];
    char refusal[320]; /* this rank's own, while the others hear of it */
    struct dcp__merge_math math;
    struct dcp__merge_shape shape; /* tile included */
    struct dcp__merge_sizes sizes;
    struct dcp__merge_speed speed;
    struct dcp__merge_run run;                     /* the one in flight */
    struct dcp_merge *next_in_flight;              /* see merge.c */
    struct dcp__merge_src *srcs, *staged;          /* [n_ranks] */
    int *host_of;                                  /* [n_ranks] */
    int *member_piece, *member_at;                 /* [n_ranks] (states) */
    unsigned char *in;                             /* [n_ranks] */
    int *lists;                                    /* [2][n_ranks] ranks (states) */
    struct dcp__merge_state *states;               /* [n_ranks] */
    void *records;                                 /* [n_ranks] received records */
    void *own_record;                              /* on its way */
    void *small;                                   /* one block: the small arrays */
    void *private_ws;                              /* of dcp__alloc: what the algorithm asked for */
    void *group_ws;                                /* of dcp_group_alloc */
    struct dcp__xfer *sends, *recvs;               /* [dcp__xfers_max] */
    struct dcp__xfer *record_sends, *record_recvs; /* [n_ranks] */
};

/* An algorithm. step does what can be done now, some part of the work between entry and exit
 * records, and sets *done_out after the last; where run->may_wait it waits, else it returns with
 * what it could do. An error it returns has poisoned the group. */
typedef dcp_status dcp__merge_step_fn(struct dcp_merge *m, struct dcp__merge_run *run,
                                      bool *done_out);
struct dcp__merge_algo {
    dcp_merge_algo id;
    const char *name, *order; /* the order in which parts are summed */
    bool sees_all;            /* needs dcp__group_all_see */
    bool reads_peers;         /* some rank reads another's partial in place */
    bool writes_out;          /* overwrites the caller's partial */
    bool keeps_order;         /* rank order */
    dcp__merge_step_fn *step;
};
extern const struct dcp__merge_algo dcp__merge_direct, dcp__merge_alltoall, dcp__merge_halving,
    dcp__merge_hierarchical, dcp__merge_allreduce, dcp__merge_allreduce_temp;

/* Exchange slots of the group. */
enum { DCP__SLOT_TILES = 0, DCP__SLOT_GATHER = 1, DCP__SLOT_RECORD = 2 };

/* ---- merge.c ---- */
/* Is the exchange in slot done? Waits for it where the run may. */
dcp_status dcp__merge_poll(struct dcp_merge *m, struct dcp__merge_run *run, unsigned slot,
                           bool *done_out);
/* A record to all, from all into m->records: started, and asked for. n_bytes <= DCP__RECORD_MAX. */
dcp_status dcp__merge_sync_start(struct dcp_merge *m, struct dcp__merge_run *run, const void *own,
                                 size_t n_bytes);
dcp_status dcp__merge_sync_poll(struct dcp_merge *m, struct dcp__merge_run *run, bool *done_out);
/* Start an exchange of m->sends and m->recvs in slot; counts what is sent. */
dcp_status dcp__merge_send(struct dcp_merge *m, struct dcp__merge_run *run, unsigned slot,
                           int n_sends, int n_recvs);
/* The private workspace of those that send, in this order; a second receive tile has alltoall
 * alone. */
struct dcp__merge_buffers {
    char *send, *recv[2], *state, *table, *gather_send, *gather_recv;
};
struct dcp__merge_buffers dcp__merge_lay_out(const struct dcp_merge *m);
/* The rows of a rank that a step merges. alltoall goes through the tiles backwards: who has just
 * written a partial has its end in the caches, and reading it from the start would push that out
 * before it comes. */
struct dcp__merge_block dcp__merge_block_at(const struct dcp_merge *m,
                                            const struct dcp__merge_run *run, int rank,
                                            int64_t step);
/* At the step where run is. */
struct dcp__merge_block dcp__merge_step_block(const struct dcp_merge *m,
                                              const struct dcp__merge_run *run, int rank);
/* Bytes of the scratch of n_parts; its places at base, if not NULL. */
size_t dcp__merge_scratch_at(int n_parts, char *base, struct dcp__merge_scratch *scratch);
/* The arithmetic of a description; n_parts and scratch are the caller's. */
dcp_status dcp__merge_math_of(const dcp_merge_desc *desc, struct dcp__merge_math *math);
/* The shape without a tile. */
struct dcp__merge_shape dcp__merge_shape_of(const dcp_merge_desc *desc, dcp_merge_algo algo,
                                            int n_ranks, int rank, bool one_space,
                                            const int *host_of);
/* What a merge takes beside its buffers; counts against the limit. */
size_t dcp__merge_own_bytes(int n_ranks);
dcp_status dcp__merge_fit_limit(struct dcp__merge_shape *shape, size_t limit_bytes,
                                struct dcp__merge_sizes *sizes_out);

/* ---- merge_choose.c ---- */
const struct dcp__merge_algo *dcp__merge_find_algo(dcp_merge_algo id);
/* Collective: rank 0's numbers of the exchange; measured where all ranks want them and none are
 * stored. */
dcp_status dcp__merge_look_around(struct dcp_merge *m, bool wants_speed);
/* What the choice among alltoall, halving and hierarchical is made from, where any order will do;
 * us: the estimate of each, -1 for one that the group has no use for. */
struct dcp__merge_pick {
    const dcp_merge_desc *desc; /* defaults resolved */
    int n_ranks;
    const int *host_of;
    bool one_space, sends_pieces; /* as dcp__group_one_space, dcp__group_sends_pieces */
    struct dcp__merge_speed speed;
};
dcp_merge_algo dcp__merge_pick_any(const struct dcp__merge_pick *p, double us[3]);
/* What choose would take in a group that does not exist yet, on hosts of consecutive ranks each of
 * which sees its own ranks' memory, with the fixed speeds. desc: defaults resolved; *why_out lives
 * on. */
dcp_merge_algo dcp__merge_choose_unseen(const dcp_merge_desc *desc, int n_ranks, const int *host_of,
                                        const char **why_out);
/* Local, the same answer on all ranks; why is kept for info. */
dcp_status dcp__merge_choose(struct dcp_merge *m);

/* ---- merge_rows.c ---- */
/* Merge the block's rows of all sources into dst. part_type: of all sources' payloads. counts =
 * false: another rank counts these rows. */
void dcp__merge_rows(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                     dcp_dtype part_type, const float *sink, const struct dcp__merge_block *block,
                     const struct dcp__merge_dst *dst, bool counts, struct dcp__merge_seen *seen);
/* The same for tokens [t_begin, t_end) of a block that is merged part by part, from its first token
 * on: what is fetched ahead at the end of a part are the rows of the next. */
void dcp__merge_tokens(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                       dcp_dtype part_type, const float *sink, const struct dcp__merge_block *block,
                       int64_t t_begin, int64_t t_end, const struct dcp__merge_dst *dst,
                       bool counts, struct dcp__merge_seen *seen);
/* Pack the block's rows of src: payload converted to type, LSE (or max, then sum) as f32 with
 * kv_len applied; payloads of empty rows are neither read nor written. payload may be NULL (LSE
 * only). cols: [1 or 2][rows]. */
void dcp__merge_pack(const struct dcp_merge *m, const struct dcp__merge_src *src,
                     const struct dcp__merge_block *block, dcp_dtype type, char *payload,
                     float *cols);
/* The packed rows of a block as a source whose rows lie at their true place. */
struct dcp__merge_src dcp__merge_unpacked(const struct dcp_merge *m, const char *payload,
                                          const char *cols, const struct dcp__merge_block *block,
                                          size_t elem_bytes);
/* Columns of n heads (<= DCP__MERGE_ROWS) of token t: what is empty or bad becomes -inf (and sum
 * 1), and is counted; lanes from n on are -inf. sum NULL where src has none. */
void dcp__merge_load(const struct dcp__merge_src *src, int64_t t, int64_t h, int n, float *lse,
                     float *sum, bool counts, struct dcp__merge_seen *seen);
void dcp__merge_saw(struct dcp__merge_seen *seen, int64_t n, int64_t t, int64_t h, int64_t rank);
/* The caller's result of this rank. */
struct dcp__merge_dst dcp__merge_result(const struct dcp_merge *m,
                                        const struct dcp__merge_run *run);

/* ---- merge_weights.c ---- */
/* As dcp__merge_weights_fn with sums (NULL = all 1). */
void dcp__merge_weights(const struct dcp__merge_math *math, const float *lse, const float *sum,
                        int n_parts, const float *sink, float *w, float *merged_lse);

/* ---- merge_state.c: rows on their way ---- */
/* n_rows packed rows with columns of n_members at at, and their bytes. */
struct dcp__merge_state dcp__merge_state_at(const struct dcp_merge *m, char *at, int64_t n_rows,
                                            int n_members, const int *members);
size_t dcp__merge_state_bytes(const struct dcp_merge *m, int64_t n_rows, int n_members);
/* Everybody's LSEs of a step, by rank and row; NULL where they are not shared. */
struct dcp__merge_table {
    const char *at;
    size_t rank_bytes;
    int64_t n_rows, row; /* of the step; the first of these rows */
};
/* Sources srcs[r] of the members into a state. */
void dcp__merge_state_fill(struct dcp_merge *m, struct dcp__merge_run *run,
                           const struct dcp__merge_src *srcs, const struct dcp__merge_block *block,
                           const struct dcp__merge_table *table, const struct dcp__merge_state *to);
/* n_rows rows from row 0 of n states with disjoint members into rows of to, which is one of them
 * or apart. to's columns are not touched. */
void dcp__merge_state_combine(struct dcp_merge *m, const struct dcp__merge_state *states, int n,
                              int64_t n_rows, float *to);
/* Columns of from's members to the same rows of to, a state of all ranks. */
void dcp__merge_state_take_cols(const struct dcp_merge *m, const struct dcp__merge_state *from,
                                int64_t n_rows, const struct dcp__merge_state *to);
/* A state of all ranks, complete, to the result; counts. */
void dcp__merge_state_finish(struct dcp_merge *m, struct dcp__merge_run *run,
                             const struct dcp__merge_state *state,
                             const struct dcp__merge_block *block,
                             const struct dcp__merge_dst *dst);
/* Send the own LSEs of this step to all, into the table at to; afterwards the table. */
dcp_status dcp__merge_share_start(struct dcp_merge *m, struct dcp__merge_run *run, char *to);
int64_t dcp__merge_step_rows(const struct dcp_merge *m, const struct dcp__merge_run *run, int lo,
                             int hi);

/* ---- merge_gather.c: cut none ---- */
/* Where this step's merged rows go: with cut none to where they are sent from, else into the
 * caller's result. */
struct dcp__merge_dst dcp__merge_step_dst(const struct dcp_merge *m,
                                          const struct dcp__merge_run *run, char *gather_send);
dcp_status dcp__merge_gather_start(struct dcp_merge *m, struct dcp__merge_run *run, int64_t step,
                                   char *gather_send, char *gather_recv);
void dcp__merge_gather_finish(struct dcp_merge *m, struct dcp__merge_run *run, int64_t step,
                              const char *gather_recv);

/* ---- merge_stage.c ---- */
/* Copy the own rows of a step into tile (step mod 2) of the group workspace. */
void dcp__merge_stage(struct dcp_merge *m, const struct dcp__merge_run *run, int64_t step);
/* Point m->srcs of the ranks of host (-1: all) at what block_rank's rows of run->step look like to
 * this rank; m->staged holds what can be read in place. */
dcp_status dcp__merge_stage_aim(struct dcp_merge *m, struct dcp__merge_run *run, int host,
                                int block_rank);

/* ---- merge_check.c ---- */
/* Copy a caller's struct of another version: missing fields are 0, unknown ones must be. */
dcp_status dcp__merge_copy_struct(void *to, const void *from, size_t from_bytes, size_t mine,
                                  const char *what);
dcp_status dcp__merge_check_desc(const dcp_merge_desc *desc, dcp_merge_desc *resolved_out);
dcp_status dcp__merge_check_args(const struct dcp_merge *m, const dcp_merge_args *args,
                                 struct dcp__merge_run *run_out);
dcp_status dcp__merge_check_pointer(const char *what, const void *p, size_t align);
/* Fill in contiguous strides and check that rows of len elements do not touch each other. */
dcp_status dcp__merge_check_strides(const char *what, int64_t n_tokens, int64_t n_heads,
                                    int64_t len, int64_t *token_stride, int64_t *head_stride);
dcp_status dcp__merge_check_sink(const float *sink, int64_t n_heads);
dcp_status dcp__merge_check_kv_len(const int64_t *kv_len, int64_t n_tokens);

/* ---- merge_overlap.c ---- */
/* A strided set of byte ranges: n0 x n1 rows of len bytes. */
struct dcp__region {
    const char *at;
    int64_t n0, s0, n1, s1, len;
};
bool dcp__regions_overlap(const struct dcp__region *a, const struct dcp__region *b);
/* owner's merged and merged LSE, at dst, against the partial of src_rank at src: does anything
 * overlap? Of a rank's own partial the exact in-place position is allowed, and its result may not
 * overlap itself either (nor, of this rank, the sink). What overlaps is named in *what_out. */
bool dcp__merge_overlaps(const struct dcp_merge *m, const struct dcp__merge_run *run, int owner,
                         const struct dcp__merge_dst *dst, const struct dcp__merge_src *src,
                         int src_rank, const char **what_out);

/* ---- merge_agree.c ---- */
dcp_status dcp__merge_agree_create(struct dcp_merge *m, dcp_status local);
dcp_status dcp__merge_agree_ready(struct dcp_merge *m, dcp_status local);
/* Say what this rank has; hear what the others have, once the record is there. */
dcp_status dcp__merge_enter_start(struct dcp_merge *m, struct dcp__merge_run *run);
/* A fingerprint of sink[n], which ranks compare; -0 is 0. */
uint64_t dcp__merge_sink_print(const float *sink, int64_t n);
dcp_status dcp__merge_enter_finish(struct dcp_merge *m, struct dcp__merge_run *run);
dcp_status dcp__merge_exit_start(struct dcp_merge *m, struct dcp__merge_run *run);
dcp_status dcp__merge_exit_finish(struct dcp_merge *m, struct dcp__merge_run *run);

/* isfinite without a call or a trap: loops over it become vectors. */
static inline bool dcp__merge_is_finite(float x)
{
    return (dcp__f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

#endif
