/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over a cache sharded by token: own heads' q in, own heads' merged output out, bounded
 * memory between.
 *
 * Every rank of the group calls with the same rows and its own heads of them (dcp_cut_range(H, N,
 * r)), and with views of its own shards. Rows are walked in tiles:
 *
 *     gather   own heads' q of the tile  ->  every head's q        [rows, H, Dk]
 *     partial  all heads against this rank's keys only             [rows, H, D] and lse [rows, H]
 *     merge    (merge.h) -> own heads of `out`                     [rows, H_r, D]
 *
 * so neither a gathered q nor a partial ever exists in full: peak memory is the limit given at
 * create, whatever the number of rows. Where memory allows two tiles at once, what one needs from
 * the peers moves while the other is computed. docs/ATTENTION.md draws it.
 *
 * New tokens are appended to the cache first. Then decode (one row a sequence), prompt chunks,
 * speculative rows and whole batches of them are the same call: a row sees what its position, the
 * window and the sequence's length let it see.
 *
 *     dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
 *     desc.max_tokens = 512; desc.n_heads = 9; desc.n_kv_heads = 3;
 *     desc.key_dim = desc.value_dim = 64; desc.interleave = 16; desc.causal = 1;
 *     dcp_attend_create(group, &desc, &attend);
 *     ...
 *     dcp_cache_view(cache, 0, layer, &view);
 *     dcp_cache_scales(cache, 0, layer, &scales);
 *     dcp_attend_seq seq = {&view, length, n_new, 0};
 *     dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
 *     args.seqs = &seq; args.scales = &scales; args.n_seqs = 1; args.q = q; args.out = out;
 *     dcp_attend_run(attend, &args, NULL);
 *
 * Caches of others. A view says where keys and values lie by a block table and strides, so an
 * engine's own paged cache is read as it is: [block][slot][KV head][dim], [block][KV head][slot]
 * [dim], K and V in one buffer or in two. The dims of one key are contiguous; layouts that split
 * them (key caches tiled as [dim / x][slot][x], or with slots innermost) cannot be said.
 * examples/attend_view.c is an engine that does so. KV heads, widths and interleave of the
 * descriptor must be the cache's own: a view names strides alone, so only what reaches into a
 * neighbouring row or page, or too few keys, can be refused. A block of 64 keys (local index / 64)
 * in which no row of the call sees any is not read, so pages that no row needs may be gone.
 *
 * Projecting before the merge. With project_dim P, a map W_h [D, P] per head is applied to every
 * rank's partial before it is merged: exact, as the merge is linear in the partials, and P / D of
 * the bytes move. Absorbed MLA: W_UV, 512 -> 128 values. out is [T, H_r, P] then.
 *
 * Head groups. With tp, KV heads are dealt to tp groups of N / tp consecutive ranks each, and only
 * the ranks of a group share tokens: rank r is in head group r / (N / tp) and, among the owners of
 * tokens, rank r mod (N / tp) of N / tp: what its cache and views are made with.
 *
 *     N = 6, tp = 2      ranks 0 1 2: KV heads 0 .. Hkv/2 - 1     tokens over 3 ranks
 *                        ranks 3 4 5: the other KV heads          tokens over 3 ranks
 *
 * dcp_attend_heads and dcp_attend_kv_heads say what a rank brings, gets and stores.
 *
 * Structs that begin with struct_size may grow at their end in later versions; a caller built
 * against another version works on: what its struct lacks counts as 0, the default, and a longer
 * struct is taken if all that this library does not know in it is 0. Their initialisers set
 * struct_size, of results too. */
#ifndef DCPATTN_ATTEND_H
#define DCPATTN_ATTEND_H

#include "dcpattn/cache.h"
#include "dcpattn/merge.h"
#include "dcpattn/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_attend dcp_attend;

/** Fixed at create; all but n_threads, workspace_limit_bytes and pool must be the same on all
 * ranks. */
typedef struct dcp_attend_desc {
    size_t struct_size;          /**< DCP_ATTEND_DESC_INIT sets it */
    int64_t max_tokens;          /**< rows of the largest call, >= 0 */
    int64_t n_heads, n_kv_heads; /**< H, Hkv of the whole group; Hkv divides H */
    int64_t key_dim, value_dim;  /**< Dk, D */
    float scale;                 /**< 0 = 1 / sqrt(Dk) */
    float softcap;               /**< 0 = none; else s = cap * tanh(s / cap), after scale */
    uint32_t causal;             /**< key p is seen by query at pos iff p <= pos */
    int64_t interleave;          /**< I of the cache; 0 = 1 */
    int n_threads;               /**< threads of this rank; 0 = 1 */
    dcp_merge_algo algo;
    uint32_t has_sink;            /**< runs carry a sink */
    size_t workspace_limit_bytes; /**< of this rank, the merge's part included; 0 = 64 MiB */
    dcp_pool *pool; /**< NULL: threads of its own. Else lent: its threads replace n_threads; it must
                         outlive the object */
    int64_t project_dim;    /**< P of a map per head before the merge; 0 = none */
    dcp_dtype project_type; /**< of the maps: f32 (default) or bf16 */
    int tp; /**< head groups; divides N and n_kv_heads; 0 = 1: all ranks share all heads' tokens */
} dcp_attend_desc;
#define DCP_ATTEND_DESC_INIT                                                                       \
    {                                                                                              \
        sizeof(dcp_attend_desc), 0, 0, 0, 0, 0, 0.0f, 0.0f, 0, 1, 0, DCP_MERGE_AUTO, 0, 0, NULL,   \
            0, DCP_DTYPE_DEFAULT, 0                                                                \
    }

/** Rows of one sequence in a call. Its layout is fixed, as they come in arrays: what a later
 * version adds per sequence will be an array of its own in dcp_attend_args. */
typedef struct dcp_attend_seq {
    const dcp_kv_view *view; /**< this rank's shard, the new tokens already stored; may hold more
                                  keys than this rank's part of `length` */
    int64_t length;          /**< global length, new tokens included */
    int64_t n_rows;          /**< query rows of this sequence in this call */
    int64_t window;          /**< 0 = none; sees pos - W < p <= pos, causal or not */
} dcp_attend_seq;

/** One call. Everything but view, scales, q, out and lse must be the same on all ranks; maps
 * (project) are those of the rank's head group. */
typedef struct dcp_attend_args {
    size_t struct_size;
    const dcp_attend_seq *seqs; /**< rows come in this order */
    int64_t n_seqs;
    const int64_t *q_pos;   /**< [T] global positions, or NULL: the last n_rows of each sequence;
                               negative = padding row: 0 and -inf */
    const float *q;         /**< [T, H_r, Dk] own heads (dcp_attend_heads; without tp that is
                               dcp_cut_range(H, N, r)) */
    int64_t q_token_stride; /**< elements; 0 = contiguous */
    const float *sink;      /**< [H] of all heads, tp or not; natural log, finite or -inf (no sink);
                               NULL without has_sink */
    float *out; /**< [T, H_r, D], or P wide where projected; out and lse may overlap neither each
                   other nor any input of this rank: q, q_pos, sink, project, the views' keys and
                   values */
    int64_t out_token_stride;
    float *lse; /**< [T, H_r] natural log, or NULL */
    int64_t lse_token_stride;
    const void *project; /**< [H / tp, D, P] maps of this rank's head group (of all heads without
                            tp), project_type; NULL without project_dim */
    const dcp_kv_scales *
        scales; /**< [n_seqs] scales of the views of seqs, which int8 and fp8 need: dcp_cache_scales
                      gives them. An entry with k_base NULL: none, as other types have it; NULL: no
                      sequence has any */
} dcp_attend_args;
#define DCP_ATTEND_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(dcp_attend_args), NULL, 0, NULL, NULL, 0, NULL, NULL, 0, NULL, 0, NULL, NULL        \
    }

/** Of one call. The three counts are group totals over the call's tiles, the same on all ranks. The
 * times sum to what the call took on this rank. */
typedef struct dcp_attend_stats {
    size_t struct_size;
    double gather_s, partial_s, merge_s; /**< wall time of this rank; waiting for peers is in
                                              gather_s and merge_s; what moves while the partial
                                              is computed costs time in partial_s only */
    int64_t wire_bytes;                  /**< q gathered + partials exchanged, this rank */
    int64_t merge_wire_bytes;            /**< the partials alone */
    int64_t nonfinite_values; /**< values of partials that were NaN or infinite: taken as 0. So are
                                   those of finite values whose sum by weights, before it is
                                   divided by the weights' sum, leaves float32 */
    int64_t lse_bad;          /**< (row, head)s of a rank whose LSE was NaN or +inf: taken as empty.
                                   Both counts are 0 exactly if nothing was left out */
    int64_t lse_empty;        /**< (row, head)s of a rank that saw no key there */
    double project_s;         /**< of partial_s: projecting */
    int64_t n_tiles;
    int64_t n_records; /**< times that this rank met its peers; records that messages replace, and
                            those of a merge by messages, are not in it */
} dcp_attend_stats;
#define DCP_ATTEND_STATS_INIT                                                                      \
    {                                                                                              \
        sizeof(dcp_attend_stats), 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, 0, 0                          \
    }

/** What create chose. Strings live as long as the object. */
typedef struct dcp_attend_info {
    size_t struct_size;
    size_t workspace_bytes; /**< all that this rank's create took, exact (a lent pool and, with tp,
                                 the head group's handle apart) */
    size_t merge_workspace_bytes; /**< the merge's part of it; 0 where ranks read each other */
    int64_t tile_rows;            /**< the same on all ranks */
    dcp_merge_algo algo;
    const char *algo_name, *algo_why;
    const char *kernel; /**< attention kernel for the last run's cache type; bf16's before */
    const char *merge_kernel;
    int n_slots;               /**< tiles in flight: 2, or 1 (one tile is all, or two do not fit) */
    int n_ranks;               /**< of this rank's head group */
    dcp_range heads, kv_heads; /**< dcp_attend_heads, dcp_attend_kv_heads */
    size_t row_bytes;          /**< workspace that a row more of the tile takes, on average */
    const char *project_kernel; /**< NULL without project_dim */
} dcp_attend_info;
#define DCP_ATTEND_INFO_INIT                                                                       \
    {                                                                                              \
        sizeof(dcp_attend_info), 0, 0, 0, DCP_MERGE_AUTO, NULL, NULL, NULL, NULL, 0, 0, {0, 0},    \
            {0, 0}, 0, NULL                                                                        \
    }

/** The query heads of rank: those whose q it brings and whose result it gets.
 *  @param[in] desc  n_heads, n_kv_heads and tp count; the rest must be as create wants it
 *  @param[in] n_ranks, rank  of the whole group
 *  @return the range, ascending with rank; {0, 0} for what create would refuse
 *  Threads: any.  Collective: no. */
DCP_API dcp_range dcp_attend_heads(const dcp_attend_desc *desc, int n_ranks, int rank);
/** The KV heads of rank's head group: those that its cache stores and its views have, the first of
 *  them as head 0. All of them without tp.
 *  @param[in] desc, n_ranks, rank  as for dcp_attend_heads
 *  @return as there
 *  Threads: any.  Collective: no. */
DCP_API dcp_range dcp_attend_kv_heads(const dcp_attend_desc *desc, int n_ranks, int rank);
/** What create would take and choose, without a group: limits and threads as if the same on all
 *  ranks, ranks that are processes.
 *  @param[in]  desc       as for create
 *  @param[in]  n_ranks, rank  of the group to be
 *  @param[in]  ranks_per_host  consecutive ranks that share memory; 0 = all
 *  @param[out] info_out   from DCP_ATTEND_INFO_INIT; sizes, tile, slots, heads and algorithm;
 *                         algo AUTO counts as direct on one host, else alltoall
 *  @return DCP_OK; DCP_ERR_ARG
 *  Threads: any.  Collective: no. */
DCP_API dcp_status dcp_attend_plan(const dcp_attend_desc *desc, int n_ranks, int rank,
                                   int ranks_per_host, dcp_attend_info *info_out);
/** Agrees on desc over the group, chooses kernels and merge, takes the workspace.
 *  @param[in]  g     must outlive the object
 *  @param[in]  desc  a workspace_limit_bytes below what one row needs is refused, with the number;
 *                    SIZE_MAX: no limit, any call is one tile
 *  @param[out] attend_out  written on success only
 *  @return DCP_OK; DCP_ERR_ARG (a field, named; on a peer: who refused what); DCP_ERR_MISMATCH
 *          (field, both ranks and values); DCP_ERR_NOMEM; the group's errors. All ranks fail alike
 *          and, save for the group's errors, the group stays usable.
 *  Ownership: the caller destroys it.  Threads: one per handle.  Collective: yes.
 *  Cost: 5 small records; where messages are needed also what the creates of two merges take, with
 *  tp a split. */
DCP_API dcp_status dcp_attend_create(dcp_group *g, const dcp_attend_desc *desc,
                                     dcp_attend **attend_out);
/** Describes what create chose.
 *  @param[in]  a  NULL allowed: nothing is written
 *  @param[out] info_out  from DCP_ATTEND_INFO_INIT, else nothing is written; NULL allowed
 *  Threads: one per handle.  Collective: no. */
DCP_API void dcp_attend_get_info(const dcp_attend *a, dcp_attend_info *info_out);
/** Attention of T = sum of n_rows rows over the whole group's keys. Allocates nothing.
 *  Math: s = scale q.k (softcap), out = sum_p exp(s_p - lse) v_p, lse = log sum_p exp(s_p) over the
 *  keys that the row sees on all ranks; a sink enlarges the divisor of out alone. A row that sees
 *  none: 0 and -inf.
 *  @param[in]  a          one call at a time
 *  @param[in]  args       T = 0 is legal (on all ranks)
 *  @param[out] stats_out  from DCP_ATTEND_STATS_INIT; NULL allowed; written on success only
 *  @return DCP_OK; DCP_ERR_ARG (a field, named; on a peer: who refused what); DCP_ERR_MISMATCH
 *          (field, both ranks and values): on all ranks, before any result is written, and the
 *          group stays usable; the group's errors: results undefined, the group is poisoned
 *  Ownership: borrows all pointers for the call.  Threads: one per handle.  Collective: yes.
 *  Determinism: bits depend on the call (its shape, positions and values), N and the ISA; not on
 *  the workspace limit, the tile, the number of threads or the transport, in the floating-point
 *  environment that programs start with (another rounding mode is the calling thread's alone). The
 *  same token in a call of another n_rows agrees up to rounding.
 *  Accuracy: float32's. A sequence whose view is bf16 and whose n_rows * H / Hkv is above 32 has,
 *  on a CPU with AMX (dcp_attend_info.kernel says so), its weights cut to bf16, by 2^-8 of each at
 *  most around a factor that all have, and is divided by the sum of what is left; lse is of the
 *  weights before the cut, good to 2.7e-6, and where q is no bf16 by 2^-17 of each product of a
 *  score more (docs/NUMERICS.md).
 *  Cost: where ranks read each other's memory a record a tile and two more (with one slot two a
 *  tile and one more); elsewhere a record, and per tile a message to each peer and what the merge
 *  takes. Every rank takes rows * (H - H_r) * Dk * 4 bytes of q from peers. */
DCP_API dcp_status dcp_attend_run(dcp_attend *a, const dcp_attend_args *args,
                                  dcp_attend_stats *stats_out);
/** Frees it; before its group.
 *  @param[in] a  NULL allowed
 *  Threads: one per handle.  Collective: yes, where the group still works. */
DCP_API void dcp_attend_destroy(dcp_attend *a);

#ifdef __cplusplus
}
#endif
#endif
