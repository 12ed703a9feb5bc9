/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over a cache sharded by token: own heads' q in, own heads' merged output out, bounded
 * memory between. */
#ifndef DCPATTN_ATTEND_H
#define DCPATTN_ATTEND_H

#include "dcpattn/cache.h"
#include "dcpattn/merge.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_attend dcp_attend;

typedef struct dcp_attend_desc {
    size_t struct_size;
    int64_t max_tokens;          /**< rows of the largest call */
    int64_t n_heads, n_kv_heads; /**< H, Hkv of the whole group; Hkv divides H */
    int64_t key_dim, value_dim;  /**< Dk, D */
    float scale;                 /**< 0 = 1 / sqrt(Dk) */
    float softcap;               /**< 0 = none; else s = cap * tanh(s / cap), after scale */
    uint32_t causal;             /**< key p is seen by query at pos iff p <= pos */
    int64_t interleave;          /**< I of the cache */
    int n_threads;               /**< threads of this rank; 0 = 1 */
    dcp_merge_algo algo;
    uint32_t has_sink;            /**< runs carry a sink */
    size_t workspace_limit_bytes; /**< 0 = 64 MiB */
} dcp_attend_desc;
#define DCP_ATTEND_DESC_INIT                                                                       \
    {                                                                                              \
        sizeof(dcp_attend_desc), 0, 0, 0, 0, 0, 0.0f, 0.0f, 0, 1, 0, DCP_MERGE_AUTO, 0, 0          \
    }

/** Rows of one sequence in a call. */
typedef struct dcp_attend_seq {
    const dcp_kv_view *view; /**< this rank's shard, the new tokens already stored */
    int64_t length;          /**< global length, new tokens included */
    int64_t n_rows;          /**< query rows of this sequence in this call */
    int64_t window;          /**< 0 = none; sees pos - W < p <= pos */
} dcp_attend_seq;

typedef struct dcp_attend_args {
    size_t struct_size;
    const dcp_attend_seq *seqs;
    int64_t n_seqs;
    const int64_t *q_pos;   /**< [T] global positions, or NULL: the last n_rows of each sequence;
                               negative = padding row: 0 and -inf */
    const float *q;         /**< [T, H_r, Dk] own heads (dcp_cut_range(H, N, r)) */
    int64_t q_token_stride; /**< elements; 0 = contiguous */
    const float *sink;      /**< [H] natural log, or NULL */
    float *out;             /**< [T, H_r, D] */
    int64_t out_token_stride;
    float *lse; /**< [T, H_r] natural log, or NULL */
    int64_t lse_token_stride;
} dcp_attend_args;
#define DCP_ATTEND_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(dcp_attend_args), NULL, 0, NULL, NULL, 0, NULL, NULL, 0, NULL, 0                    \
    }

typedef struct dcp_attend_stats {
    double gather_s, partial_s, merge_s; /**< wall time of this rank, this call */
    int64_t wire_bytes; /**< q gathered + partials exchanged, this rank, this call */
    dcp_merge_stats merge;
} dcp_attend_stats;

typedef struct dcp_attend_info {
    size_t workspace_bytes;
    int64_t tile_rows;
    dcp_merge_info merge;
    const char *kernel;
} dcp_attend_info;

/** Collective. */
DCP_API dcp_status dcp_attend_create(dcp_group *g, const dcp_attend_desc *desc,
                                     dcp_attend **attend_out);
DCP_API void dcp_attend_get_info(const dcp_attend *a, dcp_attend_info *info_out);
/** Collective. Allocates nothing. */
DCP_API dcp_status dcp_attend_run(dcp_attend *a, const dcp_attend_args *args,
                                  dcp_attend_stats *stats_out);
DCP_API void dcp_attend_destroy(dcp_attend *a);

#ifdef __cplusplus
}
#endif
#endif
