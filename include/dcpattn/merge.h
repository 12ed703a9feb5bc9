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
 * cut. An LSE of NaN or +inf is no such value: its row is empty under "error", too (and counted in
 * lse_bad). With "error" every rank gets DCP_ERR_NONFINITE naming the smallest (token, head, rank);
 * the result is then undefined, in place the own slice too, and the group stays usable.
 *
 * Base. The LSEs are natural logs or base-2 logs, and the caller must say which: read the wrong way
 * there is no error and no NaN, only other numbers. The merged LSE is in the same base.
 *
 * (max, sum). With lse_form MAX_SUM a partial says its weight in two numbers: lse holds the largest
 * exponent (the largest score, in the base) and sum the sum of exponentials over it, so that LSE =
 * max + log(sum); the payload is normalised all the same. Weights are made of the pair itself: at
 * maxima of 1e4 an LSE would have rounded the sum away. Empty: max = -inf, or sum = 0 (below
 * 2^-126). Bad, weight 0 and counted as such: any other max that is not finite, a sum that is
 * negative, NaN or above 2^100. The merged LSE is one number as ever. A part whose exponential
 * underflows is dropped, whatever its sum.
 *
 * Order and bits. Weights are exp(lse_r - max) / sum, summed in rank order, by the library's own
 * exp; payloads are summed in f32 in rank order by fused multiply-adds, and rounded once.
 * Transport, algorithm (direct, alltoall), tile size and instruction set do not change a bit,
 * unless wire_type is narrower than out_type. halving and hierarchical have orders of their own, as
 * reproducible: the same bits for any transport and tile size (halving: and the same cut), weights
 * and merged LSE those of rank order, a rounding to f32 more per level. They are taken only where
 * algo names them, or where order says that any will do. docs/NUMERICS.md has the arithmetic and
 * its error bounds.
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
 * the own f32 lse, where that is an LSE (of the form (max, sum) neither array can be it). Every
 * other overlap with the partial of this rank, or of any rank in the same address space, and any
 * with the group memory of another rank, is refused on every rank before anything moves. Apart from
 * that the partial is only read (allreduce is the exception, see
 * dcp_merge_info.overwrites_partial). When run returns DCP_OK, no peer reads this rank's partial
 * any more; see Failure.
 *
 * Memory. create takes all memory and reports the exact bytes; run allocates nothing. All of it
 * keeps to workspace_limit_bytes (allreduce apart): work goes in tiles of tokens, of some heads of
 * one token where not even that fits. direct reads peers' memory where it is visible
 * (dcp_group_alloc, or any memory in a threads group) and copies through tiles where it is not.
 *
 * Sinks. sink[h], in the LSE's base, joins the denominator once in the whole merge. The merged LSE
 * is without it, so that merges nest; give it to the outermost only. -inf = no sink for that head.
 *
 * Agreement. create compares the description across ranks, run compares T and the run's number; a
 * mismatch, or an argument that one rank refuses, is an error on every rank with a text that names
 * both sides, and nothing is poisoned: the next call works. T = 0 on all ranks is legal.
 *
 * Failure. Every wait has the group's deadline. A dead or late peer gives DCP_ERR_PEER or
 * DCP_ERR_TIMEOUT naming it, and the group is poisoned. Where alltoall goes through MPI or a custom
 * transport, the text of a deadline names all whose messages are missing: the late rank, and those
 * that only wait for it. A result is good only if run returned
 * DCP_OK. A run that poisoned the group may leave a peer behind that is slow, not dead, and still
 * reads: the partial (memory of the caller's in a threads group; over MPI, for allreduce) must live
 * until the handles of all ranks are destroyed, over MPI until exit. Memory of dcp_group_alloc does
 * by itself. In halving and hierarchical ranks wait for each other in a chain: of one that hangs
 * without having died, ranks that share memory say both, whom they wait for and who holds that one
 * up; over MPI between hosts, and custom transports, it may be named through one that waits for it.
 *
 * Not blocking: dcp_merge_start, dcp_merge_test, dcp_merge_wait. Without a group: dcp_merge_local,
 * dcp_merge_pair. Before anything: dcp_merge_plan, dcp_merge_plan_algo. */
#ifndef DCPATTN_MERGE_H
#define DCPATTN_MERGE_H

#include "dcpattn/group.h"
#include "dcpattn/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_merge dcp_merge;

/** Which order of summation will do. Each algorithm has one, always the same: "rank" (direct,
 * alltoall), "halving", "host" (hierarchical). */
typedef enum dcp_merge_order {
    DCP_MERGE_ORDER_DEFAULT = 0, /**< rank order, unless algo names an algorithm with another */
    DCP_MERGE_ORDER_RANK = 1,    /**< rank order; an algorithm with another is refused */
    DCP_MERGE_ORDER_ANY = 2      /**< auto may take halving or hierarchical where they are faster */
} dcp_merge_order;

/** How a partial says what weight it has. */
typedef enum dcp_lse_form {
    DCP_LSE_FORM_LSE = 0,    /**< one number, log sum exp */
    DCP_LSE_FORM_MAX_SUM = 1 /**< two: the largest exponent and the sum of exponentials over it */
} dcp_lse_form;

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
                                or f32 travels (halving, hierarchical, allreduce) it has no
                                effect. */
    dcp_nonfinite nonfinite; /**< default zero */
    dcp_merge_algo algo;     /**< default auto: direct where all ranks see each other's memory,
                                else alltoall; see order */
    uint32_t has_sink;       /**< 1: every run carries a sink */
    uint32_t has_kv_len;     /**< 1: every run carries kv_len */
    size_t workspace_limit_bytes; /**< 0 = 8 MiB */
    dcp_merge_order order;        /**< default rank order */
    dcp_lse_form lse_form;        /**< default LSE; with MAX_SUM every run carries sums */
} dcp_merge_desc;
#define DCP_MERGE_DESC_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_desc), 0, 0, 0, DCP_LSE_BASE_UNSET, DCP_CUT_HEADS, DCP_DTYPE_DEFAULT,     \
            DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_NONFINITE_ZERO,           \
            DCP_MERGE_AUTO, 0, 0, 0, DCP_MERGE_ORDER_DEFAULT, DCP_LSE_FORM_LSE                     \
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
    const void *sum; /**< [T,H] lse_type, at the strides of lse, which then holds the maxima; NULL
                        unless lse_form is MAX_SUM. Interleaved pairs: head stride 2, sum = lse + 1
                      */
} dcp_merge_args;
#define DCP_MERGE_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_merge_args), 0, NULL, 0, 0, NULL, 0, 0, NULL, NULL, NULL, 0, 0, NULL, 0, 0,     \
            NULL                                                                                   \
    }

/** Of one run. Non-finite values and LSEs are counted over the group, the same on all ranks; bytes
 *  and messages are this rank's. */
typedef struct dcp_merge_stats {
    int64_t nonfinite_values; /**< payload values of parts of positive weight that were NaN or
                                 infinite, each once */
    int64_t lse_bad;          /**< LSEs that were NaN or +inf (and kv_len not 0) */
    int64_t lse_empty;        /**< LSEs that were -inf, or kv_len 0 */
    int64_t wire_bytes; /**< bytes that this rank sent, read from peers (direct), or 2 (N-1)/N of a
                           partial (allreduce). hierarchical: sent to other hosts; what it reads
                           of peers in its host is not counted, so with one host it is 0 */
    int64_t n_messages; /**< messages that this rank sent, records apart; 0 for direct, allreduce */
} dcp_merge_stats;

typedef struct dcp_merge_info {
    dcp_merge_algo algo;         /**< the one chosen */
    const char *algo_name, *why; /**< why lives as long as the merge */
    size_t workspace_bytes;      /**< all that this rank's create took, exact */
    int64_t tile_tokens;         /**< tokens per tile; max_tokens where there are no tiles */
    const char *kernel;          /**< the row kernel that sums; two parts go to its pair form */
    uint32_t overwrites_partial; /**< 1: run destroys the caller's partial (allreduce) */
    int64_t tile_heads;          /**< heads per tile: fewer than a rank has only where not even one
                                    token fits the limit */
    const char *order;           /**< in which parts are summed: "rank", "halving", "host",
                                    "transport's" */
    int n_hosts;                 /**< as the group says */
    size_t peak_bytes; /**< the caller's largest partial and LSE, and workspace_bytes; what
                          a transport takes by itself (MPI in an all-reduce) is not in it */
} dcp_merge_info;

/** What a run takes. */
typedef struct dcp_merge_cost {
    size_t workspace_bytes;         /**< of create */
    int64_t wire_bytes, n_messages; /**< as dcp_merge_stats, exact where partials that peers read
                                       lie in memory that they see */
    int64_t n_steps;                /**< tiles */
} dcp_merge_cost;

/** Agree on desc with all ranks, choose the algorithm, take the workspace.
 *  @param[in]  g          of all ranks; must outlive the merge
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
 *  @param[in]  m         NULL gives "?" and 0
 *  @param[out] info_out  strings live as long as the merge
 *  Threads: any.   Collective: no. */
DCP_API void dcp_merge_get_info(const dcp_merge *m, dcp_merge_info *info_out);

/** Merge. Returns only after all peers have finished reading this rank's partial.
 *  Math: above.
 *  @param[in]  m          not in flight
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

/** What a run of n_tokens takes, before it is run.
 *  @param[in]  m         NULL gives 0
 *  @param[in]  n_tokens  0..max_tokens, else it is taken as the nearer of these
 *  @param[out] cost_out  of this rank
 *  Threads: any.   Collective: no. */
DCP_API void dcp_merge_get_cost(const dcp_merge *m, int64_t n_tokens, dcp_merge_cost *cost_out);

/** The same without a group, for planning.
 *  @param[in]  desc      algo AUTO counts as what dcp_merge_plan_algo says
 *  @param[in]  n_ranks, rank  of the group to be
 *  @param[in]  ranks_per_host  consecutive ranks that share memory; 0 = all
 *  @param[in]  n_tokens  0..max_tokens
 *  @param[out] cost_out  written on success only; tiles as for ranks that are processes
 *  @return DCP_ERR_ARG, DCP_ERR_NOMEM
 *  Threads: any.   Collective: no. */
DCP_API dcp_status dcp_merge_plan(const dcp_merge_desc *desc, int n_ranks, int rank,
                                  int ranks_per_host, int64_t n_tokens, dcp_merge_cost *cost_out);

/** The algorithm that dcp_merge_plan counts, and why: the one that desc names; for AUTO what create
 *  would take if ranks of a host see each other's memory and others do not: direct on one host; on
 *  several alltoall, or with order ANY the least estimate by fixed speeds, where create measures.
 *  @param[in]  desc, n_ranks, ranks_per_host  as for dcp_merge_plan
 *  @param[out] algo_out  written on success only; never AUTO
 *  @param[out] why_out   NULL allowed; a fixed text, "asked for" or "auto without a group: ..."
 *  @return DCP_ERR_ARG, DCP_ERR_NOMEM
 *  Ownership: why_out static.   Threads: any.   Collective: no. */
DCP_API dcp_status dcp_merge_plan_algo(const dcp_merge_desc *desc, int n_ranks, int ranks_per_host,
                                       dcp_merge_algo *algo_out, const char **why_out);

/** Begin a merge and return: dcp_merge_test moves it on, dcp_merge_wait ends it. All ranks use this
 *  form, or all use run, for the same merge. Until it has ended the buffers of args stay borrowed,
 *  and the group may not be used for anything else: another merge on it is refused with
 *  DCP_ERR_BUSY, other calls are not looked at. Nothing moves unless somebody calls test or wait
 *  (there is no thread behind it).
 *  @param[in] m     not in flight
 *  @param[in] args  as for run; copied, the buffers not
 *  @return DCP_ERR_BUSY (a merge is in flight on this group, or another thread inside it),
 *          DCP_ERR_PEER, _TIMEOUT, _POISONED. What this rank or a peer has against the arguments
 *          comes from test or wait, on every rank, as it does from run
 *  Threads: one per group handle at a time.   Collective: yes, same order of merges.
 *  Determinism: the bits of run.   Cost: as run; records go as N - 1 messages each. */
DCP_API dcp_status dcp_merge_start(dcp_merge *m, const dcp_merge_args *args);

/** Do some of the work that can be done now.
 *  @param[in]  m          started
 *  @param[out] done_out   1: the merge has ended, with what this returns; else 0
 *  @param[out] stats_out  NULL allowed; written when done, as by run
 *  @return DCP_OK while it goes on, then as run; DCP_ERR_ARG (nothing was started). A test that has
 *          found nothing for as long as the group's deadline waits, as dcp_merge_wait does, and
 *          returns who is late or dead: up to two deadlines after the last progress, where run
 *          takes one. A dead rank is found as soon as that wait begins
 *  Threads: one per group handle at a time.   Collective: no: as often as each rank likes.
 *  Cost: a tile, or 16 tokens, of merging at most. allreduce does all of its work in one test. */
DCP_API dcp_status dcp_merge_test(dcp_merge *m, int *done_out, dcp_merge_stats *stats_out);

/** Finish a merge that was started.
 *  @param[in]  m          started
 *  @param[out] stats_out  NULL allowed
 *  @return as run; DCP_ERR_ARG (nothing was started)
 *  Threads: one per group handle at a time.   Collective: yes, after start. */
DCP_API dcp_status dcp_merge_wait(dcp_merge *m, dcp_merge_stats *stats_out);

/** Give the workspace back. A merge in flight on it poisons the group; the
 *  partial lent to it must outlive the peers' part in it. Before dcp_group_destroy.
 *  @param[in] m  takes NULL
 *  Threads: one per group handle.   Collective: yes where the group still works; on a poisoned
 * group it does not wait. */
DCP_API void dcp_merge_destroy(dcp_merge *m);

/** The name of an algorithm as on the command line ("direct"); "?" for an unknown one.
 *  @param[in] a  any value
 *  Ownership: static.   Threads: any.   Collective: no. */
DCP_API const char *dcp_merge_algo_name(dcp_merge_algo a);

/** The algorithm of that name.
 *  @param[out] algo_out  written if found
 *  @return 1, or 0 for an unknown name or NULL.   Threads: any.   Collective: no. */
DCP_API int dcp_merge_algo_parse(const char *name, dcp_merge_algo *algo_out);

/* --- without a group: the same kernels, the same weights, the same bits --- */

/** A partial in this process. Strides as in dcp_merge_args. */
typedef struct dcp_merge_part {
    const void *out; /**< [T,H,D] */
    int64_t out_token_stride, out_head_stride;
    const void *lse; /**< [T,H] */
    int64_t lse_token_stride, lse_head_stride;
    const void *sum;       /**< with MAX_SUM; else NULL */
    const int64_t *kv_len; /**< [T] or NULL: no row is empty by it */
} dcp_merge_part;
#define DCP_MERGE_PART_INIT                                                                        \
    {                                                                                              \
        NULL, 0, 0, NULL, 0, 0, NULL, NULL                                                         \
    }

/** Parts into one result. */
typedef struct dcp_merge_local_args {
    size_t struct_size;
    int64_t n_tokens, n_heads, dim; /**< T >= 0, H >= 1, D >= 1 */
    dcp_lse_base lse_base;          /**< required */
    dcp_lse_form lse_form;
    dcp_dtype out_type, lse_type, merged_type; /**< as in dcp_merge_desc */
    dcp_nonfinite nonfinite;
    int64_t n_parts;             /**< k >= 1; with offsets 1 */
    const dcp_merge_part *parts; /**< [k], summed in this order */
    const int64_t *offsets; /**< NULL; or [T + 1], not falling: parts[0] has offsets[T] tokens, and
                               token t is the merge of its tokens offsets[t] .. offsets[t+1] - 1
                               (none: 0 and -inf) */
    const float *sink;      /**< [H] or NULL */
    void *merged; /**< [T,H,D] merged_type; may be exactly a part, at its place and with its
                     strides and type (not with offsets) */
    int64_t merged_token_stride, merged_head_stride;
    float *merged_lse; /**< [T,H] or NULL; may be exactly a part's f32 lse */
    int64_t merged_lse_token_stride, merged_lse_head_stride;
    const uint8_t *row_mask; /**< [T] or NULL; rows of tokens with 0 are neither read nor written */
} dcp_merge_local_args;
#define DCP_MERGE_LOCAL_ARGS_INIT                                                                  \
    {                                                                                              \
        sizeof(dcp_merge_local_args), 0, 0, 0, DCP_LSE_BASE_UNSET, DCP_LSE_FORM_LSE,               \
            DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_DTYPE_DEFAULT, DCP_NONFINITE_ZERO, 0, NULL,  \
            NULL, NULL, NULL, 0, 0, NULL, 0, 0, NULL                                               \
    }

/** Merges parts that lie in this process: splits of one sequence, a prefix and a suffix, the dumped
 *  partials of ranks. Contract, arithmetic and bits are those of the merge of k ranks with cut
 * none.
 *  @param[in]  args       copied; buffers are borrowed for the call
 *  @param[out] stats_out  NULL allowed; wire_bytes and n_messages 0
 *  @return DCP_ERR_ARG, DCP_ERR_NONFINITE (the rank named is the part's number; the result is
 *          undefined), DCP_ERR_NOMEM (only beyond 64 parts a row)
 *  Ownership: borrows for the call.   Threads: any, re-entrant.   Collective: no.
 *  Determinism: bits depend on the inputs alone.   Cost: reads the parts, writes the result once;
 *  allocates only beyond 64 parts a row. */
DCP_API dcp_status dcp_merge_local(const dcp_merge_local_args *args, dcp_merge_stats *stats_out);

/** Merges other into a partial, in place: a shared prefix and a suffix. The same as dcp_merge_local
 *  with parts {own, other} and the result on own: its own f32 LSE becomes the merged one.
 *  @param[in] args      shape, base, types, policy, sink and row_mask; its parts, merged and
 *                       merged_lse are not looked at; lse_type f32, lse_form LSE
 *  @param[in,out] own   parts[0] and the result; out and lse are written
 *  @param[in] other     parts[1]
 *  @param[out] stats_out  NULL allowed
 *  @return as dcp_merge_local
 *  Threads: any, re-entrant.   Collective: no. */
DCP_API dcp_status dcp_merge_pair(const dcp_merge_local_args *args, const dcp_merge_part *own,
                                  const dcp_merge_part *other, dcp_merge_stats *stats_out);

#ifdef __cplusplus
}
#endif
#endif
