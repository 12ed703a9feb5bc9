/* SPDX-License-Identifier: Apache-2.0 */
/* Who owns what: pure integer functions, no state, no allocation, safe from any thread. */
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
 *  @param[in] n_items >= 0; n_ranks >= 1; 0 <= rank < n_ranks  (else the empty range {0,0}) */
DCP_API dcp_range dcp_cut_range(int64_t n_items, int n_ranks, int rank);
/** The rank whose dcp_cut_range holds item; -1 if none does. */
DCP_API int dcp_cut_owner(int64_t n_items, int n_ranks, int64_t item);

/** Token ownership with interleave I: owner of global position p is (p / I) % N. Positions are >=
 * 0. */
DCP_API int dcp_pos_owner(int64_t pos, int n_ranks, int64_t interleave);
/** Index of pos within its owner's shard. */
DCP_API int64_t dcp_pos_local(int64_t pos, int n_ranks, int64_t interleave);
/** Global position of local index i on rank. */
DCP_API int64_t dcp_pos_global(int64_t i, int n_ranks, int rank, int64_t interleave);
/** How many of the positions 0..length-1 rank owns (length < 0 counts as 0). Also the number of
 * keys of this rank that a causal query at position length-1 sees, and the local index of the first
 * own position >= length. */
DCP_API int64_t dcp_local_length(int64_t length, int n_ranks, int rank, int64_t interleave);

#ifdef __cplusplus
}
#endif
#endif
