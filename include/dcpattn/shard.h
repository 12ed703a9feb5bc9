/* SPDX-License-Identifier: Apache-2.0 */
/* Who owns what: pure integer functions, no state, no allocation, safe from any thread.
 *
 * Heads, tokens of a cut, columns of weights: contiguous ranges, the first ranks get one more
 * (dcp_cut_range). Positions of a KV cache: blocks of I consecutive positions are dealt out in
 * turn; a rank packs its own ones densely, in order, and calls them by their local index:
 *
 *      N = 3, I = 2       block      0     1     2     3     4     5     6
 *                         position   0 1   2 3   4 5   6 7   8 9  10 11 12
 *                         owner      0 0   1 1   2 2   0 0   1 1   2 2   0
 *                         local      0 1   0 1   0 1   2 3   2 3   2 3   4
 *
 * The order of positions is the order of local indices on each rank, so a causal or windowed range
 * of positions is a range of local indices: dcp_local_length turns either border. */
#ifndef DCPATTN_SHARD_H
#define DCPATTN_SHARD_H

#include "dcpattn/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_range {
    int64_t begin, end; /**< [begin, end) */
} dcp_range;

/** The part of 0..n_items-1 that rank owns when the first (n_items mod n_ranks) ranks get one more.
 *  Used for heads and tokens of every cut and for slicing weights, so that they agree.
 *  @param[in] n_items >= 0; n_ranks >= 1; 0 <= rank < n_ranks
 *  @return the range; {0, 0} for arguments outside these
 *  Threads: any.  Collective: no. */
DCP_API dcp_range dcp_cut_range(int64_t n_items, int n_ranks, int rank);
/** The rank whose dcp_cut_range holds item.
 *  @param[in] n_items, n_ranks  as for dcp_cut_range
 *  @return the rank; -1 if none does
 *  Threads: any.  Collective: no. */
DCP_API int dcp_cut_owner(int64_t n_items, int n_ranks, int64_t item);

/** The rank that owns global position pos: (pos / I) mod N.
 *  @param[in] pos >= 0 (a padding position, -1, has no owner); n_ranks, interleave >= 1
 *  @return the rank; -1 for arguments outside these
 *  Threads: any.  Collective: no. */
DCP_API int dcp_pos_owner(int64_t pos, int n_ranks, int64_t interleave);
/** The local index of pos within its owner's shard.
 *  Math: floor(pos / (N I)) I + pos mod I
 *  @param[in] pos, n_ranks, interleave  as for dcp_pos_owner
 *  @return the index; -1 for arguments that dcp_pos_owner refuses
 *  Threads: any.  Collective: no. */
DCP_API int64_t dcp_pos_local(int64_t pos, int n_ranks, int64_t interleave);
/** The global position of local index i of rank.
 *  Math: (floor(i / I) N + rank) I + i mod I
 *  @param[in] i >= 0; 0 <= rank < n_ranks; interleave >= 1
 *  @return the position; -1 for arguments outside these or a position beyond INT64_MAX
 *  Threads: any.  Collective: no. */
DCP_API int64_t dcp_pos_global(int64_t i, int n_ranks, int rank, int64_t interleave);
/** How many of the positions 0..length-1 rank owns. Also the number of keys of this rank that a
 *  causal query at position length-1 sees, and the local index of the first own position >= length.
 *  Math: floor(L / (N I)) I + clamp(L mod (N I) - rank I, 0, I)
 *  @param[in] length  < 0 counts as 0
 *  @param[in] n_ranks, rank, interleave  as for dcp_pos_global
 *  @return the count; 0 for a rank or interleave that dcp_pos_global refuses
 *  Threads: any.  Collective: no. */
DCP_API int64_t dcp_local_length(int64_t length, int n_ranks, int rank, int64_t interleave);
/** The local indices of rank that a query at global position pos sees: its keys p with
 *  p < length, p <= pos where causal, and pos - window < p <= pos where there is a window.
 *  @param[in] pos     negative: a padding row, sees nothing
 *  @param[in] length  keys of the sequence
 *  @param[in] window  0 = none; else, as a window ends at pos, causal whatever `causal` says
 *  @param[in] n_ranks, rank, interleave  as for dcp_local_length
 *  @return [begin, end); begin == end where nothing is seen
 *  Threads: any.  Collective: no. */
DCP_API dcp_range dcp_visible_range(int64_t pos, int64_t length, int64_t window, int causal,
                                    int n_ranks, int rank, int64_t interleave);
/** The pages that local indices [local.begin, local.end) touch, as places in the block table.
 *  @param[in] page_tokens >= 1
 *  @return [first, last + 1); empty for an empty or invalid range
 *  Threads: any.  Collective: no. */
DCP_API dcp_range dcp_page_range(dcp_range local, int64_t page_tokens);

#ifdef __cplusplus
}
#endif
#endif
