/* SPDX-License-Identifier: Apache-2.0 */
/* Ownership of positions. Written so that no intermediate exceeds int64: blocks are counted first
 * and N * I is never formed, so an interleave of INT64_MAX ("rank 0 owns all") is as good as 1.
 * Every function refuses negatives before it divides: C's / and % round towards zero, and a padding
 * position of -1 would come out as owned by somebody. */
#include "dcpattn/shard.h"

int dcp_pos_owner(int64_t pos, int n_ranks, int64_t interleave)
{
    if (pos < 0 || n_ranks < 1 || interleave < 1) return -1;
    return (int)((pos / interleave) % n_ranks);
}

int64_t dcp_pos_local(int64_t pos, int n_ranks, int64_t interleave)
{
    if (pos < 0 || n_ranks < 1 || interleave < 1) return -1;
    return pos / interleave / n_ranks * interleave + pos % interleave;
}

int64_t dcp_pos_global(int64_t i, int n_ranks, int rank, int64_t interleave)
{
    if (i < 0 || rank < 0 || rank >= n_ranks || interleave < 1) return -1;
    int64_t block, pos;
    if (__builtin_mul_overflow(i / interleave, (int64_t)n_ranks, &block) ||
        __builtin_add_overflow(block, (int64_t)rank, &block) ||
        __builtin_mul_overflow(block, interleave, &pos) ||
        __builtin_add_overflow(pos, i % interleave, &pos)) {
        return -1;
    }
    return pos;
}

int64_t dcp_local_length(int64_t length, int n_ranks, int rank, int64_t interleave)
{
    if (length <= 0 || rank < 0 || rank >= n_ranks || interleave < 1) return 0;
    const int64_t n_full = length / interleave; /* whole blocks; then a rest of length mod I */
    const int64_t at = n_full % n_ranks;        /* the rank whose turn the rest is */
    const int64_t own = n_full / n_ranks * interleave;
    if (rank < at) return own + interleave;
    return rank == at ? own + length % interleave : own;
}

dcp_range dcp_visible_range(int64_t pos, int64_t length, int64_t window, int causal, int n_ranks,
                            int rank, int64_t interleave)
{
    const dcp_range none = {0, 0};
    if (pos < 0 || length <= 0 || window < 0) return none;
    const int ends_at_pos = causal != 0 || window > 0;
    const int64_t end = ends_at_pos && pos < length ? pos + 1 : length;
    const int64_t begin = window > 0 && pos >= window ? pos - window + 1 : 0;
    if (begin >= end) return none;
    const dcp_range local = {dcp_local_length(begin, n_ranks, rank, interleave),
                             dcp_local_length(end, n_ranks, rank, interleave)};
    return local;
}

dcp_range dcp_page_range(dcp_range local, int64_t page_tokens)
{
    const dcp_range none = {0, 0};
    if (local.begin < 0 || local.end <= local.begin || page_tokens < 1) return none;
    const dcp_range pages = {local.begin / page_tokens, (local.end - 1) / page_tokens + 1};
    return pages;
}
