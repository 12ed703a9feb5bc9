/* SPDX-License-Identifier: Apache-2.0 */
/* The streaming operator's parts:
 *
 *   attend_size.c      what a tile takes: shapes, layouts, bytes, the plan without a group
 *   attend_create.c    checks of the description, agreement, head groups, memory
 *   attend_check.c     checks of a call's arguments
 *   attend_run.c       the walk over tiles: who reads what when, on either kind of transport
 *   attend_partial.c   this rank's partial of one tile, by all its threads
 *   attend_split_priv.h  where its keys are cut
 *   attend_project.c   the linear map per head between partial and merge */
#ifndef DCP_ATTEND_ATTEND_PRIV_H
#define DCP_ATTEND_ATTEND_PRIV_H

#include <stdbool.h>

#include "attend/attend_split_priv.h"
#include "base/pool_priv.h"
#include "base/status_priv.h"
#include "dcpattn/attend.h"
#include "group/group_priv.h"
#include "kernels/kernels_priv.h"
#include "merge/merge_priv.h"

enum {
    /* Text of a peer's refusal that fits a record: more than the longest with all its numbers. */
    DCP__ATTEND_WHY_BYTES = 232,
    /* Work items that a call's splits aim at: enough for any thread count to balance. */
    DCP__ATTEND_ITEMS = 32,
    DCP__ATTEND_SPLIT_BYTES = 2 << 20,
    /* Tiles in flight: one computed, one on its way. */
    DCP__ATTEND_SLOTS = 2,
    /* The group's exchange slot for q; the merge uses 0 to 2. */
    DCP__ATTEND_EXCHANGE = 3
};

/* The rows of one sequence in a tile, and how their work is cut:
 *   rows    into blocks of block_rows tokens x block_heads query heads of one KV head; the job's
 *           best, or fewer, so that every thread has work: no bit depends on it
 *   keys    as split says */
struct dcp__attend_seg {
    const dcp_attend_seq *seq;
    int64_t row; /* first row in the tile */
    int64_t n_rows;
    int64_t block_rows, n_token_blocks;
    struct dcp__attend_split split;
    int64_t item; /* first work item */
};

/* A rank of the team, as this one sees it. */
struct dcp__attend_peer {
    dcp_range heads;     /* of the team's */
    const char *shared;  /* its group memory; NULL where that cannot be read */
    const float *call_q; /* the q of the call, where this rank can read it; else NULL */
    int64_t call_stride;
    const float *q; /* rows of the tile in work, own heads of that rank */
    int64_t q_stride;
};

/* What a thread has of its own. */
struct dcp__attend_thread {
    struct dcp__merge_math math; /* direct: with scratch of its own */
    struct dcp__merge_seen seen;
    double copy_s; /* spent on copies of q in the tile */
    float *q;      /* [rows of a job, Dk] where a job's heads lie on several ranks */
    char *scratch; /* of the attention kernel, for the rows of a job */
};

/* Room for one tile in flight. */
struct dcp__attend_slot {
    float *q;   /* direct: [tile_rows, H_r, Dk] own heads, for peers; else a block per rank */
    float *out; /* [tile_rows, H, out_dim]; NULL at N = 1, where the caller's out serves */
    float *lse; /* [tile_rows, H] */
};

struct dcp_attend {
    dcp_group *group;        /* all ranks */
    dcp_group *team;         /* the ranks of this head group: group itself without tp */
    dcp_attend_desc d;       /* defaults filled in; n_heads and n_kv_heads are the team's */
    int64_t head0, kv_head0; /* the team's first, in the whole */
    int all_ranks, all_rank; /* of group */
    int64_t id;              /* of this create, the same on all ranks */
    int rank, n_ranks;       /* of team */
    dcp_range heads;         /* own, of the team's */
    bool is_direct;          /* the team's ranks read each other's memory; no merge object */
    bool one_space;          /* they are threads: any address can be read */
    int64_t out_dim;         /* of what is merged: P where projected, else D */
    int64_t n_group;         /* query heads of a KV head */
    int64_t block_heads, n_head_blocks, block_rows;

    struct dcp__kernels kernels;
    dcp_dtype last_type;
    dcp_merge *merge; /* NULL if direct */
    struct dcp_pool *pool, *own_pool;

    int64_t tile_rows;
    int n_slots;
    size_t workspace_bytes; /* all */
    size_t merge_bytes;     /* the merge's part */
    void *shared;           /* group memory (direct) or a part of local: slots */
    void *local;            /* private memory: */
    struct dcp__attend_slot slot[DCP__ATTEND_SLOTS];
    struct dcp__attend_peer *peers;     /* [N] */
    struct dcp__merge_src *srcs;        /* [slots][N], direct */
    struct dcp__xfer *sends, *recvs;    /* [N], not direct */
    struct dcp__attend_thread *threads; /* [n_threads] */
    float *part;                        /* [tile_rows, H, D] where projected */
    int64_t *lo, *hi;                   /* [tile_rows] local indices that a row sees */
    struct dcp__attend_seg *segs;       /* [tile_rows] */
    struct dcp__attend_record *records; /* [all ranks], allocated apart */
    float *split_out;                   /* [split][pairs there are, D]: split_cap rows */
    float *split_lse;                   /* [split][pairs there are] */
    int64_t split_rows; /* (row, head, split)s that a call may have: shapes the splits */
    int64_t split_cap;  /* that there is room for at once: follows the limit */
};

/* A tile: rows [begin, begin + n_rows) of the call. */
struct dcp__attend_tile {
    const dcp_attend_args *args;
    int64_t begin, n_rows, n_total;
    int64_t n_segs, n_items;
    int64_t max_splits; /* of the call */
    int64_t seq_at;     /* the sequence, and its row, that the next tile starts with */
    int64_t row_at;
    float *out; /* [n_rows, H, out_dim] the partial as it is merged */
    int64_t out_token_stride;
    float *part; /* [n_rows, H, D] the partial as it is computed: out, or a->part */
    int64_t part_token_stride;
    float *lse; /* [n_rows, H] */
    /* Called by the calling thread between its work items; NULL: nothing to move on. */
    void (*progress)(void *ctx);
    void *progress_ctx;
    double project_s; /* result */
};

/* What ranks tell each other before a create or a run goes on. */
enum { DCP__ATTEND_FIELDS = 16 };
struct dcp__attend_record {
    int32_t status; /* DCP_OK, or this rank refuses: why */
    int32_t n_fields;
    union {
        char why[DCP__ATTEND_WHY_BYTES];
        int64_t field[DCP__ATTEND_FIELDS]; /* with DCP_OK */
    };
};
_Static_assert(sizeof(struct dcp__attend_record) <= DCP__RECORD_MAX, "a record of the group");
/* What a field holds: how it is spelt where ranks differ. */
enum dcp__attend_kind {
    DCP__ATTEND_COUNT,
    DCP__ATTEND_F32, /* its bits */
    DCP__ATTEND_FLAG,
    DCP__ATTEND_TYPE,
    DCP__ATTEND_ALGO
};
struct dcp__attend_field {
    const char *name;
    enum dcp__attend_kind kind;
};
/* Exchange records of all ranks into a->records and compare the first n_fields: the own failure
 * first, then a peer's by its text, then the first field that differs from rank 0's. status is this
 * rank's, its text the last error. */
dcp_status dcp__attend_agree(struct dcp_attend *a, const char *call, dcp_status status,
                             const struct dcp__attend_field *names, int n_fields,
                             struct dcp__attend_record *mine);

/* ---- attend_size.c ---- */
/* The description, checked, with defaults. */
dcp_status dcp__attend_read_desc(const char *call, const dcp_attend_desc *desc, dcp_attend_desc *d);
/* From the description, of n ranks in all, to the team's numbers and the shapes of blocks. */
dcp_status dcp__attend_shape(const char *call, struct dcp_attend *a, int n, int rank);
/* Give out regions of one block: first with base NULL for the size, then for the pointers. */
size_t dcp__attend_lay_out_slots(struct dcp_attend *a, int64_t rows, char *base);
size_t dcp__attend_lay_out_local(struct dcp_attend *a, int64_t rows, char *base);
/* Where q of slot s lies in the slots of a rank that has n_own heads. */
size_t dcp__attend_q_offset(const struct dcp_attend *a, int64_t n_own, int slot);
/* All that this rank takes for tiles of rows, the merge included. */
size_t dcp__attend_bytes(struct dcp_attend *a, int64_t rows);
/* What a row more takes in tiles of whole blocks. */
size_t dcp__attend_row_bytes(struct dcp_attend *a);
/* The most rows that fit the limit beside the merge there is, with one slot and with two (0: none
 * fit); split_cap is chosen on the way. */
dcp_status dcp__attend_fit(const char *call, struct dcp_attend *a, int64_t rows_out[2]);
/* From the least of all ranks to tile_rows and n_slots. */
void dcp__attend_choose_tile(struct dcp_attend *a, const int64_t least[2]);
/* Bytes that a merge of a whole tile may take more than the one of a row that there is. */
size_t dcp__attend_merge_extra(struct dcp_attend *a);
/* The merge's description (not direct, and for its arithmetic). */
dcp_merge_desc dcp__attend_merge_desc(const struct dcp_attend *a, int64_t max_rows, size_t limit);

/* ---- attend_check.c ---- */
/* Everything that can be wrong on this rank alone; args is a copy of this library's own size. */
dcp_status dcp__attend_check_args(const struct dcp_attend *a, const dcp_attend_args *args,
                                  int64_t *n_total_out);

/* ---- attend_partial.c ---- */
/* How the call's keys may be split: a function of the call alone. */
int64_t dcp__attend_max_splits(const struct dcp_attend *a, const dcp_attend_args *args,
                               int64_t n_total);
/* Take the next n_rows rows: ranges and work items. */
void dcp__attend_plan_tile(struct dcp_attend *a, struct dcp__attend_tile *tile);
/* The partial of the tile: tile->part, tile->out and tile->lse. */
void dcp__attend_partial(struct dcp_attend *a, struct dcp__attend_tile *tile);

/* ---- attend_project.c ---- */
/* tile->out = tile->part through the maps of args->project. */
void dcp__attend_project(struct dcp_attend *a, struct dcp__attend_tile *tile);

/* Positions a->lo and a->hi come from: of row i of sequence s whose rows start at row0. */
static inline int64_t dcp__attend_pos(const dcp_attend_args *args, const dcp_attend_seq *s,
                                      int64_t row0, int64_t i)
{
    return args->q_pos != NULL ? args->q_pos[row0 + i] : s->length - s->n_rows + i;
}
static inline int64_t dcp__attend_own(const struct dcp_attend *a)
{
    return a->heads.end - a->heads.begin;
}

#endif
