/* SPDX-License-Identifier: Apache-2.0 */
/* The merge: N partial attention results over disjoint keys become the exact one.
 *
 *     lse = log sum_r exp(lse_r)          out = sum_r exp(lse_r - lse) * out_r
 *
 * Each rank r of a group has attended with all H query heads to the keys it owns: out_r [T,H,D] is
 * normalised by its own softmax sum, lse_r [T,H] is the log of that sum. The merge is one
 * collective call that turns these into the result over all keys and leaves each rank the part it
 * needs next (the cut). Nothing is approximated.
 *
 *     dcp_merge_desc desc = DCP_MERGE_DESC_INIT;      every rank, the same
 *     desc.max_tokens = 512; desc.n_heads = 96; desc.dim = 512; desc.lse_base = DCP_LSE_BASE_E;
 *     dcp_merge_create(group, &desc, &merge);
 *     dcp_merge_args args = DCP_MERGE_ARGS_INIT;      per step
 *     args.n_tokens = t; args.out = out; args.lse = lse; args.merged = mine;
 *     dcp_merge_run(merge, &args, &stats);
 *     dcp_merge_destroy(merge);
 *
 * THE CONTRACT
 *
 * Empty rows. A row (t, h) of a partial is empty, weight 0, if its LSE is not finite (-inf, +inf
 * and NaN all occur in the wild), or if kv_len[t] is 0, whatever the LSE holds (kernels that leave
 * 0 there exist). The payload of an empty row is never read: NaN or unmapped memory is fine. So is
 * that of a part whose weight underflows (below 2^-126).
 *   All parts empty: the result is exactly 0 and the merged LSE exactly -inf.
 *   One part not empty: its payload and its LSE come back bit for bit.
 *
 * Non-finite payloads of rows that are not empty: taken as 0 (default), propagated, or an error, by
 * desc.nonfinite. They are counted under each policy, as group totals, each value once whatever the
 * cut. With "error" every rank gets DCP_ERR_NONFINITE naming the smallest (token, head, rank); the
 * result is then undefined, in place the own slice too, and the group stays usable.
 *
 * Base. The LSEs are natural logs or base-2 logs, and the caller must say which: read the wrong way
 * there is no error and no NaN, only other numbers. The merged LSE is in the same base.
 *
 * Order and bits. Weights are exp(lse_r - max) / sum, summed in rank order, by the library's own
 * exp; payloads are summed in f32 in rank order by fused multiply-adds, and rounded once.
 * Transport, algorithm (direct, alltoall), tile size and instruction set do not change a bit,
 * unless wire_type is narrower than out_type. docs/NUMERICS.md has the arithmetic and its error
 * bounds.
 *
 * Cuts. By heads: rank r gets heads dcp_cut_range(H, N, r) of every token. By tokens: all heads of
 * tokens dcp_cut_range(T, N, r). None: everybody gets all. Nothing needs to divide anything; a rank
 * may own nothing, N may exceed H or T.
 *
 * Strides. Elements; payload rows of D are contiguous, everything else is free as long as rows do
 * not overlap: [T,H,D] padded, or heads outermost. 0 = contiguous.
 *
 * In place. merged may be exactly the own slice of the own out: at its address, with its strides
 * and its type, by heads or by tokens (never cut none); merged_lse may likewise be the own slice of
 * the own f32 lse. Every other overlap with the partial of this rank, or of any rank in the same
 * address space, is refused on every rank before anything moves. Apart from that the partial is
 * only read (allreduce is the exception, see dcp_merge_info.overwrites_partial). When run returns,
 * no peer reads this rank's partial any more.
 *
 * Memory. create takes all memory and reports the exact bytes; run allocates nothing. The tiles
 * keep to workspace_limit_bytes; beside them are some hundred bytes per rank. direct reads peers'
 * memory where it is visible (dcp_group_alloc, or any memory in a threads group) and copies through
 * tiles where it is not.
 *
 * Sinks. sink[h], in the LSE's base, joins the denominator once in the whole merge. The merged LSE
 * is without it, so that merges nest; give it to the outermost only. -inf = no sink for that head.
 *
 * Agreement. create compares the description across ranks, run compares T and the run's number; a
 * mismatch, or an argument that one rank refuses, is an error on every rank with a text that names
 * both sides, and nothing is poisoned: the next call works. T = 0 on all ranks is legal.
 *
 * Failure. Every wait has the group's deadline. A dead or late peer gives DCP_ERR_PEER or
 * DCP_ERR_TIMEOUT naming it, and the group is poisoned. A result is good only if run returned
 * DCP_OK. */
#ifndef DCPATTN_MERGE_H
#define DCPATTN_MERGE_H

#include "dcpattn/group.h"
#include "dcpattn/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_merge dcp_merge;

/** What is fixed at create; everything but workspace_limit_bytes must be the same on all ranks (of
 * the limits the smallest decides the tile). */
typedef struct dcp_merge_desc {
    size_t struct_size;
    int64_t max_tokens;      /**< T of the largest run, >= 0 */
    int64_t n_heads;         /**< H of the whole group, >= 1 */
    int64_t dim;             /**< D, >= 1 */
    dcp_lse_base lse_base;   /**< required */
    dcp_cut cut;             /**< default by heads */
    dcp_dtype out_type;      /**< default f32 */
    dcp_dtype lse_type;      /**< default f32; bf16 and f16 are widened */
    dcp_dtype merged_type;   /**< default out_type */
    dcp_dtype wire_type;     /**< default out_type; or narrower: payloads are rounded to it on the
                                way (f16 overflows beyond 65504). Where nothing is sent (direct)
                                or f32 is summed (allreduce) it has no effect. */
    dcp_nonfinite nonfinite; /**< default zero */
    dcp_merge_algo algo;     /**< default auto: direct where all ranks see each other's memory,
                                else alltoall */
    uint32_t has_sink;       /**< 1: every run carries a sink */
    uint32_t has_kv_len;     /**< 1: every run carries kv_len */
    size_t workspace_limit_bytes; /**< 0 = 8 MiB */
} dcp_merge_desc;
#define DCP_MERGE_DESC_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_desc), 0, 0, 0, DCP_LSE_BASE_UNSET, DCP_CUT_HEADS, DCP_DTYPE_DEFAULT,     \
            DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_NONFINITE_ZERO,           \
            DCP_MERGE_AUTO, 0, 0, 0                                                                \
    }

/** One run. Strides in elements, >= 0; 0 = contiguous ([T,H,D], [T,H]; merged [T,H_r,D], [T_r,H,D]
 * or [T,H,D]). Pointers are borrowed for the call and aligned to their elements. */
typedef struct dcp_merge_args {
    size_t struct_size;
    int64_t n_tokens; /**< T, 0..max_tokens, the same on all ranks */
    const void *out;  /**< [T,H,D] this rank's partial, out_type; NULL if T = 0 */
    int64_t out_token_stride, out_head_stride;
    const void *lse; /**< [T,H] lse_type */
    int64_t lse_token_stride, lse_head_stride;
    const int64_t
        *kv_len;       /**< [T] keys of this rank that row t sees, >= 0; NULL without has_kv_len */
    const float *sink; /**< [H] in the LSE's base, finite or -inf, the same on all ranks; NULL
                          without has_sink */
    void *merged; /**< this rank's part of the result, merged_type; may be its own slice of out */
    int64_t merged_token_stride, merged_head_stride;
    float *merged_lse; /**< this rank's part of [T,H]; NULL = not wanted */
    int64_t merged_lse_token_stride, merged_lse_head_stride;
} dcp_merge_args;
#define DCP_MERGE_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_args), 0, NULL, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, NULL, 0, 0      \
    }

/** Of one run. The counts are group totals, the same on all ranks. */
typedef struct dcp_merge_stats {
    int64_t nonfinite_values; /**< payload values of parts of positive weight that were NaN or
                                 infinite, each once */
    int64_t lse_bad;          /**< LSEs that were NaN or +inf (and kv_len not 0) */
    int64_t lse_empty;        /**< LSEs that were -inf, or kv_len 0 */
    int64_t wire_bytes; /**< bytes that this rank sent (alltoall), read from peers (direct), or
                           2 (N-1)/N of a partial (allreduce) */
} dcp_merge_stats;

typedef struct dcp_merge_info {
    dcp_merge_algo algo;         /**< the one chosen */
    const char *algo_name, *why; /**< why lives as long as the merge */
    size_t workspace_bytes;      /**< all that this rank's create took, exact */
    int64_t tile_tokens;         /**< tokens per tile; max_tokens where there are no tiles */
    const char *kernel;          /**< the row kernel that runs */
    uint32_t overwrites_partial; /**< 1: run destroys the caller's partial (allreduce) */
} dcp_merge_info;

/** Agree on desc with all ranks, choose the algorithm, take the workspace.
 *  @param[in]  desc       copied
 *  @param[out] merge_out  written on success only
 *  @return DCP_ERR_ARG (a field out of range, lse_base unset, a limit below one token's tile),
 *          DCP_ERR_MISMATCH (ranks disagree; names the field and both values),
 * DCP_ERR_NOT_SUPPORTED (algorithm not in this build, or direct where memory is not shared),
 * DCP_ERR_NOMEM: on every rank, nothing poisoned. DCP_ERR_PEER, _TIMEOUT, _POISONED, _BUSY as the
 * group. Ownership: the group must outlive the merge.   Threads: one thread per group handle.
 *  Collective: yes.   Cost: three records; may be made once for the life of a model. */
DCP_API dcp_status dcp_merge_create(dcp_group *g, const dcp_merge_desc *desc,
                                    dcp_merge **merge_out);

/** What was chosen and what it takes.
 *  @param[out] info_out  strings live as long as the merge
 *  Threads: any.   Collective: no. */
DCP_API void dcp_merge_get_info(const dcp_merge *m, dcp_merge_info *info_out);

/** Merge. Returns only after all peers have finished reading this rank's partial.
 *  Math: above.
 *  @param[in]  args       per rank; see the contract for aliasing
 *  @param[out] stats_out  NULL allowed; written with DCP_OK and DCP_ERR_NONFINITE
 *  @return DCP_ERR_ARG (also if a peer refused its arguments), DCP_ERR_MISMATCH (T, or another
 *          merge): on every rank, nothing has moved, the group works on. DCP_ERR_NONFINITE: on
 * every rank, result undefined, the group works on. DCP_ERR_PEER, _TIMEOUT: the group is poisoned,
 * the result undefined; _POISONED, _BUSY: nothing happened. Threads: one thread per group handle.
 * Collective: yes, same order of merges on all ranks. Determinism: bits depend on the inputs alone
 * (allreduce: also on the transport). Cost: allocates nothing. direct reads a partial's bytes and
 * writes 1/N; alltoall sends (N-1)/N of a partial in N-1 messages a tile. docs/MERGE.md */
DCP_API dcp_status dcp_merge_run(dcp_merge *m, const dcp_merge_args *args,
                                 dcp_merge_stats *stats_out);

/** Give the workspace back; takes NULL. Before dcp_group_destroy.
 *  Collective: yes where the group still works; on a poisoned group it does not wait. */
DCP_API void dcp_merge_destroy(dcp_merge *m);

/** The name of an algorithm as on the command line ("direct"); "?" for an unknown one.
 *  Ownership: static.   Threads: any.   Collective: no. */
DCP_API const char *dcp_merge_algo_name(dcp_merge_algo a);

/** The algorithm of that name.
 *  @param[out] algo_out  written if found
 *  @return 1, or 0 for an unknown name or NULL.   Threads: any.   Collective: no. */
DCP_API int dcp_merge_algo_parse(const char *name, dcp_merge_algo *algo_out);

#ifdef __cplusplus
}
#endif
#endif
