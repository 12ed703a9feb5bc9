/* SPDX-License-Identifier: Apache-2.0 */
/* The streaming operator's parts: attend_create.c (checks, agreement, memory), attend_run.c (the
 * walk over tiles, gather, merge), attend_partial.c (this rank's partial of one tile). */
#ifndef DCP_ATTEND_ATTEND_PRIV_H
#define DCP_ATTEND_ATTEND_PRIV_H

#include <stdbool.h>

#include "base/pool_priv.h"
#include "base/status_priv.h"
#include "dcpattn/attend.h"
#include "group/group_priv.h"
#include "kernels/kernels_priv.h"

enum {
    /* Text of a peer's refusal that fits a record. */
    DCP__ATTEND_WHY_BYTES = 112,
    /* Work items that a call's splits aim at: enough for any thread count to balance. */
    DCP__ATTEND_ITEMS = 32,
    /* Keys below which a split costs more (its own start, and D sums a row) than it balances. */
    DCP__ATTEND_SPLIT_KEYS = 256,
    DCP__ATTEND_SPLIT_BYTES = 2 << 20
};

/* The rows of one sequence in a tile, and how their work is cut:
 *   rows    into blocks of block_rows tokens x block_heads query heads of one KV head
 *   keys    into n_splits ranges of split_keys local indices, from multiple first_split on; or one
 *           range of all keys (n_splits = 1, split_keys = 0) */
struct dcp__attend_seg {
    const dcp_attend_seq *seq;
    int64_t row; /* first row in the tile */
    int64_t n_rows;
    int64_t n_token_blocks;
    int64_t n_splits, split_keys, first_split;
    int64_t item; /* first work item */
};

struct dcp_attend {
    dcp_group *group;
    dcp_attend_desc d; /* defaults filled in */
    int rank, n_ranks;
    dcp_range heads; /* own */
    int64_t n_group; /* query heads of a KV head */
    int64_t block_heads, n_head_blocks, block_rows;

    struct dcp__kernels kernels;
    dcp_dtype last_type;
    dcp_merge *merge;
    struct dcp_pool *pool, *own_pool;

    int64_t tile_rows;
    size_t workspace_bytes;       /* all */
    size_t merge_bytes;           /* the merge's part */
    void *shared;                 /* group memory: */
    float *q;                     /*   [tile_rows, H, Dk]; NULL at N = 1 */
    float *out;                   /*   [tile_rows, H, D]; NULL where the caller's out serves */
    float *lse;                   /*   [tile_rows, H] */
    const float **peer_q;         /* [N] the peers' q; NULL where not all are visible */
    void *local;                  /* private memory: */
    int64_t *lo, *hi;             /*   [tile_rows] local indices that a row sees */
    struct dcp__attend_seg *segs; /*   [tile_rows] */
    size_t *col_off_bytes;        /*   [N + 1] columns of the ranks' heads in q */
    struct dcp__attend_record *records; /*   [N] */
    char *scratch;                      /*   [n_threads][scratch_bytes] */
    size_t scratch_bytes;
    float *split_out; /*   [split_rows, D] */
    float *split_lse; /*   [split_rows] */
    int64_t split_rows;
};

/* A tile: rows [begin, begin + n_rows) of the call. */
struct dcp__attend_tile {
    const dcp_attend_args *args;
    int64_t begin, n_rows, n_total;
    int64_t n_segs, n_items;
    int64_t max_splits; /* of the call */
    int64_t seq_at;     /* the sequence, and its row, that the next tile starts with */
    int64_t row_at;
    const float *q; /* [n_rows, H, Dk] every head */
    int64_t q_token_stride;
    float *out; /* [n_rows, H, D] the partial; lse [n_rows, H] goes to a->lse */
    int64_t out_token_stride;
};

/* What ranks tell each other before a create or a run goes on. */
struct dcp__attend_record {
    int32_t status; /* DCP_OK, or this rank refuses: why */
    int32_t n_fields;
    char why[DCP__ATTEND_WHY_BYTES];
    int64_t field[16];
};
_Static_assert(sizeof(struct dcp__attend_record) <= DCP__RECORD_MAX, "a record of the group");
struct dcp__attend_field {
    const char *name;
    bool is_float; /* f32 bits */
};
/* Exchange records into all [N] and compare: the own failure first, then a peer's by its text, then
 * the first field that differs from rank 0's. status is this rank's, its text the last error. */
dcp_status dcp__attend_agree(dcp_group *g, const char *call, dcp_status status,
                             const struct dcp__attend_field *names, int n_fields,
                             struct dcp__attend_record *mine, struct dcp__attend_record *all);

/* How the call's keys may be split: a function of the call alone. */
int64_t dcp__attend_max_splits(const struct dcp_attend *a, const dcp_attend_args *args,
                               int64_t n_total);
/* Take the next n_rows rows: ranges and work items. */
void dcp__attend_plan_tile(struct dcp_attend *a, struct dcp__attend_tile *tile);
/* The partial of the tile: tile->out and a->lse. */
void dcp__attend_partial(struct dcp_attend *a, const struct dcp__attend_tile *tile);

/* Positions a->lo and a->hi come from: of row i of sequence s whose rows start at row0. */
static inline int64_t dcp__attend_pos(const dcp_attend_args *args, const dcp_attend_seq *s,
                                      int64_t row0, int64_t i)
{
    return args->q_pos != NULL ? args->q_pos[row0 + i] : s->length - s->n_rows + i;
}

#endif
