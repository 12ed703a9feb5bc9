/* SPDX-License-Identifier: Apache-2.0 */
/* Where the keys of a sequence are cut, and how many tokens a job gets, as functions of numbers
 * alone.
 *
 *     local index    base      base + S    base + 2 S    base + 3 S
 *     visible         |--|---------|------------|---------|--|       3 ranges and a rest: 4
 *                       lo                                   hi
 *
 * base is lo, down to a whole block of keys, and S whole blocks, so no block is cut and every range
 * has keys that are seen. The number aimed at is the largest power of two that is allowed: it
 * divides evenly over the threads there are. (9 items of MLA over two threads took 5/4.5 of the
 * time.) It comes out where the keys are a multiple of that many blocks and enough for ranges of
 * DCP__ATTEND_SPLIT_KEYS; else S is rounded up, to blocks or to the least, and the ranges may be
 * fewer, of any number from 2 on. Two ranges' least worth of keys are cut always. */
#ifndef DCP_ATTEND_ATTEND_SPLIT_PRIV_H
#define DCP_ATTEND_ATTEND_SPLIT_PRIV_H

#include <stdint.h>

#include "kernels/kernels_priv.h"

/* Keys below which a split costs more (its own start, and D sums a row) than it balances. */
enum { DCP__ATTEND_SPLIT_KEYS = 256 };

/* Range i is [begin + i * keys, begin + (i + 1) * keys); one of all keys: n 1, the others 0. */
struct dcp__attend_split {
    int64_t n, keys, begin;
};

/* Keys [lo, hi), lo >= 0, in up to max_splits >= 1 ranges. */
static inline struct dcp__attend_split dcp__attend_split_keys(int64_t lo, int64_t hi,
                                                              int64_t max_splits)
{
    struct dcp__attend_split split = {.n = 1};
    if (max_splits < 2 || lo >= hi || hi - lo < 2 * DCP__ATTEND_SPLIT_KEYS) return split;
    int64_t n = 2;
    while (n <= max_splits / 2) n *= 2;
    split.begin = lo - lo % DCP__ATTN_KEY_BLOCK;
    const int64_t n_keys = hi - split.begin;
    int64_t keys = n_keys / n + (n_keys % n != 0);
    if (keys < DCP__ATTEND_SPLIT_KEYS) keys = DCP__ATTEND_SPLIT_KEYS;
    split.keys = (keys + DCP__ATTN_KEY_BLOCK - 1) / DCP__ATTN_KEY_BLOCK * DCP__ATTN_KEY_BLOCK;
    split.n = n_keys / split.keys + (n_keys % split.keys != 0);
    return split;
}

/* Tokens of a job in a tile of n_rows tokens: best, what a job of block_heads query heads is
 * best given; or fewer, so that there are about two for each of n_threads, as far as jobs do not
 * come below DCP__ATTN_ROWS_MAX rows. (8 KV heads, 4 query heads each, 512 tokens in jobs of
 * 1,024 rows: 16 jobs, whatever the threads.) Where keys are cut, ranges feed the threads, and a
 * job of fewer tokens would read its keys again: jobs stay whole, though with few ranges and
 * heads a rank of many threads has some idle then (40 tokens of 32 heads over 8: 2 ranges, 16
 * jobs). n_head_blocks: of all KV heads. */
static inline int64_t dcp__attend_block_rows(int64_t best, int64_t block_heads,
                                             int64_t n_head_blocks, int64_t n_threads,
                                             int64_t n_rows, int64_t n_splits)
{
    if (n_splits > 1) return best;
    const int64_t n_blocks = (2 * n_threads + n_head_blocks - 1) / n_head_blocks;
    const int64_t least = (DCP__ATTN_ROWS_MAX + block_heads - 1) / block_heads;
    int64_t rows = n_rows / n_blocks + (n_rows % n_blocks != 0);
    if (rows < least) rows = least;
    return rows < best ? rows : best;
}

#endif
