/* SPDX-License-Identifier: Apache-2.0 */
/* Contiguous cuts: the first (n_items mod n_ranks) ranks get one item more. */
#include "dcpattn/shard.h"

dcp_range dcp_cut_range(int64_t n_items, int n_ranks, int rank)
{
    dcp_range range = {0, 0};
    if (n_items < 0 || n_ranks < 1 || rank < 0 || rank >= n_ranks) return range;
    const int64_t each = n_items / n_ranks;
    const int64_t more = n_items % n_ranks;
    range.begin = rank * each + (rank < more ? rank : more);
    range.end = range.begin + each + (rank < more ? 1 : 0);
    return range;
}

int dcp_cut_owner(int64_t n_items, int n_ranks, int64_t item)
{
    if (n_ranks < 1 || item < 0 || item >= n_items) return -1;
    const int64_t each = n_items / n_ranks;
    const int64_t more = n_items % n_ranks;
    const int64_t in_longer = more * (each + 1); /* items of the ranks that got one more */
    if (item < in_longer) return (int)(item / (each + 1));
    return (int)(more + (item - in_longer) / each);
}
