/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows a rank merges in which step, and what they take when packed. */
#include "dcpattn/shard.h"
#include "plan/plan_merge_priv.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t div_up(int64_t a, int64_t b)
{
    return b > 0 ? (a + b - 1) / b : 0;
}

static size_t pad64(size_t n)
{
    return (n + 63u) & ~(size_t)63u;
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

struct dcp__merge_block dcp__merge_block_got(dcp_cut cut, int64_t n_tokens, int64_t n_heads,
                                             int n_ranks, int rank)
{
    return cut == DCP_CUT_NONE ? (struct dcp__merge_block){0, n_tokens, 0, n_heads}
                               : dcp__merge_block_of(cut, n_tokens, n_heads, n_ranks, rank);
}

int64_t dcp__merge_longest(const struct dcp__merge_shape *s, int64_t n_tokens)
{
    /* Rank 0 has the longest range of any cut. */
    return s->cut == DCP_CUT_TOKENS ? dcp_cut_range(n_tokens, s->n_ranks, 0).end : n_tokens;
}

int64_t dcp__merge_widest(const struct dcp__merge_shape *s)
{
    return s->cut == DCP_CUT_TOKENS ? s->n_heads : dcp_cut_range(s->n_heads, s->n_ranks, 0).end;
}

struct dcp__merge_block dcp__merge_block_step(const struct dcp__merge_shape *s, int64_t n_tokens,
                                              int rank, int64_t step)
{
    struct dcp__merge_block b = dcp__merge_block_of(s->cut, n_tokens, s->n_heads, s->n_ranks, rank);
    const int64_t per_token = div_up(dcp__merge_widest(s), s->tile_heads);
    const int64_t t_step = per_token > 0 ? step / per_token : 0;
    const int64_t h_step = per_token > 0 ? step % per_token : 0;
    b.t_begin = least(b.t_begin + t_step * s->tile_tokens, b.t_end);
    b.t_end = least(b.t_begin + s->tile_tokens, b.t_end);
    b.h_begin = least(b.h_begin + h_step * s->tile_heads, b.h_end);
    b.h_end = least(b.h_begin + s->tile_heads, b.h_end);
    return b;
}

int64_t dcp__merge_n_steps(const struct dcp__merge_shape *s, int64_t n_tokens)
{
    return div_up(dcp__merge_longest(s, n_tokens), s->tile_tokens) *
           div_up(dcp__merge_widest(s), s->tile_heads);
}

int64_t dcp__merge_block_rows(const struct dcp__merge_block *b)
{
    return (b->t_end - b->t_begin) * (b->h_end - b->h_begin);
}

size_t dcp__merge_payload_bytes(int64_t n_rows, int64_t dim, size_t elem_bytes)
{
    return pad64((size_t)n_rows * (size_t)dim * elem_bytes);
}

size_t dcp__merge_rows_bytes(int64_t n_rows, int64_t dim, size_t elem_bytes, int n_cols)
{
    return dcp__merge_payload_bytes(n_rows, dim, elem_bytes) +
           pad64((size_t)n_rows * (size_t)n_cols * sizeof(float));
}

size_t dcp__merge_block_bytes(const struct dcp__merge_block *b, int64_t dim, size_t elem_bytes,
                              int n_cols)
{
    return dcp__merge_rows_bytes(dcp__merge_block_rows(b), dim, elem_bytes, n_cols);
}

/* ---- halving ---- */

bool dcp__halving_at(int n_ranks, int rank, int level, struct dcp__halving *out)
{
    int lo = 0;
    int hi = n_ranks;
    for (;; level--) {
        if (hi - lo < 2) return false;
        const int mid = lo + (hi - lo + 1) / 2; /* the lower half may have one rank more */
        if (level > 0) {
            if (rank < mid)
                hi = mid;
            else
                lo = mid;
            continue;
        }
        const int n_low = mid - lo;
        const int n_high = hi - mid;
        const bool is_low = rank < mid;
        const int i = is_low ? rank - lo : rank - mid;
        out->keep_lo = is_low ? lo : mid;
        out->keep_hi = is_low ? mid : hi;
        out->send_lo = is_low ? mid : lo;
        out->send_hi = is_low ? hi : mid;
        out->send_to = is_low ? mid + (i < n_high ? i : n_high - 1) : lo + i;
        out->n_recvs = 0;
        if (is_low) {
            if (i < n_high) out->recv_from[out->n_recvs++] = mid + i;
        } else {
            out->recv_from[out->n_recvs++] = lo + i;
            if (n_low > n_high && i == n_high - 1) out->recv_from[out->n_recvs++] = lo + n_high;
        }
        return true;
    }
}

static void add_members(int n_ranks, int rank, int level, unsigned char *in)
{
    struct dcp__halving h;
    in[rank] = 1;
    for (int k = 0; k < level; k++) {
        if (!dcp__halving_at(n_ranks, rank, k, &h)) return;
        for (int i = 0; i < h.n_recvs; i++) add_members(n_ranks, h.recv_from[i], k, in);
    }
}

int dcp__halving_members(int n_ranks, int rank, int level, unsigned char *in)
{
    for (int r = 0; r < n_ranks; r++) in[r] = 0;
    add_members(n_ranks, rank, level, in);
    int n = 0;
    for (int r = 0; r < n_ranks; r++) n += in[r];
    return n;
}

/* ---- hierarchical ---- */

int dcp__host_of(const struct dcp__merge_shape *s, int rank)
{
    return s->host_of != NULL ? s->host_of[rank] : 0;
}

int dcp__n_hosts(const struct dcp__merge_shape *s)
{
    int most = 0;
    for (int r = 0; r < s->n_ranks; r++) {
        if (dcp__host_of(s, r) > most) most = dcp__host_of(s, r);
    }
    return most + 1;
}

int dcp__host_size(const struct dcp__merge_shape *s, int host)
{
    int n = 0;
    for (int r = 0; r < s->n_ranks; r++) n += dcp__host_of(s, r) == host;
    return n;
}

int dcp__host_nth(const struct dcp__merge_shape *s, int host, int nth)
{
    int r = 0;
    for (;; r++) {
        if (dcp__host_of(s, r) == host && nth-- == 0) return r;
    }
}

int dcp__host_handler(const struct dcp__merge_shape *s, int host, int block_rank)
{
    int nth = 0;
    for (int r = 0; r < block_rank; r++) nth += dcp__host_of(s, r) == dcp__host_of(s, block_rank);
    return dcp__host_nth(s, host, nth % dcp__host_size(s, host));
}

int dcp__state_cols(const struct dcp__merge_shape *s, int n_members)
{
    return n_members * (s->n_cols + 1);
}
