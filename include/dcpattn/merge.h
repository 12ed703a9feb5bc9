/* SPDX-License-Identifier: Apache-2.0 */
/* The merge: N partial attention results over disjoint keys become the exact one.
 *   lse = log sum_r exp(lse_r)      out = sum_r exp(lse_r - lse) * out_r
 * (lecture on the contract goes here) */
#ifndef DCPATTN_MERGE_H
#define DCPATTN_MERGE_H

#include "dcpattn/group.h"
#include "dcpattn/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_merge dcp_merge;

/** What is fixed at create; everything but workspace_limit_bytes must be the same on all ranks. */
typedef struct dcp_merge_desc {
    size_t struct_size;
    int64_t max_tokens;           /**< T of the largest run */
    int64_t n_heads;              /**< H of the whole group */
    int64_t dim;                  /**< D */
    dcp_lse_base lse_base;        /**< required */
    dcp_cut cut;                  /**< default by heads */
    dcp_dtype out_type;           /**< default f32 */
    dcp_dtype lse_type;           /**< default f32; bf16 and f16 are widened */
    dcp_dtype merged_type;        /**< default out_type */
    dcp_dtype wire_type;          /**< default out_type; or narrower */
    dcp_nonfinite nonfinite;      /**< default zero */
    dcp_merge_algo algo;          /**< default auto */
    uint32_t has_sink;            /**< runs carry a sink */
    uint32_t has_kv_len;          /**< runs carry kv_len */
    size_t workspace_limit_bytes; /**< 0 = 8 MiB */
} dcp_merge_desc;
#define DCP_MERGE_DESC_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_desc), 0, 0, 0, DCP_LSE_BASE_UNSET, DCP_CUT_HEADS, DCP_DTYPE_DEFAULT,     \
            DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_NONFINITE_ZERO,           \
            DCP_MERGE_AUTO, 0, 0, 0                                                                \
    }

/** One run. Strides in elements; 0 = contiguous ([T,H,D], [T,H]; merged [T,H_r,D], [T_r,H,D] or
 * [T,H,D]). */
typedef struct dcp_merge_args {
    size_t struct_size;
    int64_t n_tokens; /**< T, <= max_tokens, the same on all ranks */
    const void *out;  /**< [T,H,D] this rank's partial */
    int64_t out_token_stride, out_head_stride;
    const void *lse; /**< [T,H] */
    int64_t lse_token_stride, lse_head_stride;
    const int64_t *kv_len; /**< [T] or NULL */
    const float *sink;     /**< [H] or NULL, in the LSE's base */
    void *merged; /**< this rank's part of the result; may be its own slice of out (in place) */
    int64_t merged_token_stride, merged_head_stride;
    float *merged_lse; /**< this rank's part of [T,H], or NULL */
    int64_t merged_lse_token_stride, merged_lse_head_stride;
} dcp_merge_args;
#define DCP_MERGE_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_args), 0, NULL, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, NULL, 0, 0      \
    }

/** Group totals of the last run. */
typedef struct dcp_merge_stats {
    int64_t nonfinite_values; /**< payload values of non-empty parts that were NaN or infinite, each
                                 once */
    int64_t lse_bad;          /**< LSEs that were NaN or +inf */
    int64_t lse_empty;        /**< LSEs that were -inf, or kv_len 0 */
    int64_t wire_bytes; /**< payload bytes this rank sent (alltoall) or read from peers (direct) in
                           this run */
} dcp_merge_stats;

typedef struct dcp_merge_info {
    dcp_merge_algo algo; /**< the one chosen */
    const char *algo_name, *why;
    size_t workspace_bytes; /**< of this rank, exact */
    int64_t tile_tokens;
    const char *kernel;          /**< the row kernel that runs */
    uint32_t overwrites_partial; /**< 1: run destroys the caller's partial (allreduce) */
} dcp_merge_info;

/** Collective: agree on desc, choose the algorithm, take the workspace. */
DCP_API dcp_status dcp_merge_create(dcp_group *g, const dcp_merge_desc *desc,
                                    dcp_merge **merge_out);
DCP_API void dcp_merge_get_info(const dcp_merge *m, dcp_merge_info *info_out);
/** Collective: merge. Allocates nothing. Returns only after all peers have finished reading this
 * rank's partial.
 *  @param[out] stats_out NULL allowed. */
DCP_API dcp_status dcp_merge_run(dcp_merge *m, const dcp_merge_args *args,
                                 dcp_merge_stats *stats_out);
/** Collective where the group still works; takes NULL. */
DCP_API void dcp_merge_destroy(dcp_merge *m);

/** The name of an algorithm as on the command line ("direct"); and back (false: unknown). */
DCP_API const char *dcp_merge_algo_name(dcp_merge_algo a);
DCP_API int dcp_merge_algo_parse(const char *name, dcp_merge_algo *algo_out);

#ifdef __cplusplus
}
#endif
#endif
