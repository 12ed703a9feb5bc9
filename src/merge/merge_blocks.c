/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows a rank merges in which step, and what they take when packed. Integers in, integers
 * out. */
#include "merge/merge_priv.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static size_t pad64(size_t n)
{
    return (n + 63u) & ~(size_t)63u;
}

int64_t dcp__merge_offset(int64_t t, int64_t h, int64_t token_stride, int64_t head_stride)
{
    return t * token_stride + h * head_stride;
}

struct dcp__merge_block dcp__merge_block_of(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                            int n_ranks, int rank)
{
    struct dcp__merge_block b = {0, n_tokens, 0, n_heads};
    if (cut == DCP_CUT_TOKENS) {
        const dcp_range own = dcp_cut_range(n_tokens, n_ranks, rank);
        b.t_begin = own.begin;
        b.t_end = own.end;
    } else {
        const dcp_range own = dcp_cut_range(n_heads, n_ranks, rank);
        b.h_begin = own.begin;
        b.h_end = own.end;
    }
    return b;
}

struct dcp__merge_block dcp__merge_block_step(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                              int n_ranks, int rank, int64_t tile_tokens,
                                              int64_t step)
{
    struct dcp__merge_block b = dcp__merge_block_of(cut, n_tokens, n_heads, n_ranks, rank);
    b.t_begin = least(b.t_begin + step * tile_tokens, b.t_end);
    b.t_end = least(b.t_begin + tile_tokens, b.t_end);
    return b;
}

int64_t dcp__merge_n_steps(dcp_cut cut, int64_t n_tokens, int n_ranks, int64_t tile_tokens)
{
    /* Rank 0 has the longest range of any cut. */
    const int64_t most = cut == DCP_CUT_TOKENS ? dcp_cut_range(n_tokens, n_ranks, 0).end : n_tokens;
    return tile_tokens > 0 ? (most + tile_tokens - 1) / tile_tokens : 0;
}

int64_t dcp__merge_block_rows(const struct dcp__merge_block *b)
{
    return (b->t_end - b->t_begin) * (b->h_end - b->h_begin);
}

size_t dcp__merge_payload_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes)
{
    return pad64((size_t)dcp__merge_block_rows(b) * (size_t)dim * elem_bytes);
}

size_t dcp__merge_block_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes)
{
    return dcp__merge_payload_bytes(b, dim, elem_bytes) +
           pad64((size_t)dcp__merge_block_rows(b) * sizeof(float));
}

size_t dcp__merge_block_max_bytes(dcp_cut cut, int64_t max_tokens, int64_t n_heads, int n_ranks,
                                  int rank, int64_t tile_tokens, int64_t dim, size_t elem_bytes)
{
    /* Of any call up to max_tokens: a call with fewer tokens has no larger first step. */
    const struct dcp__merge_block b =
        dcp__merge_block_step(cut, max_tokens, n_heads, n_ranks, rank, tile_tokens, 0);
    return dcp__merge_block_bytes(&b, dim, elem_bytes);
}
