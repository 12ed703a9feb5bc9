/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of buffers and of traffic, per algorithm. Blocks of step 0 of the largest call are the
 * largest of any call. Formulas in words: docs/MERGE.md. */
#include <string.h>

#include "plan/plan_merge_priv.h"

/* Of a rank in 64 the levels are 6; a level's sets are walked with bits of this many ranks. */
enum { RANKS_MAX = 1024 };
/* Workspace below which a tile is not cut further: some 256 KiB in each of three buffers. */
enum { WORTH_BYTES = 768 << 10 };

/* A stretch of so much is a message of its own: MPI has it copied once, by the kernel. Several such
 * messages make a tile (OWN_TILE_BYTES), so that the ranks meet less often and the tile's LSEs are
 * one message. Measured, Open MPI, N = 2, f32, stretches of 32 KiB against one message made of them
 * that MPI copies twice: (64, 128, 128) 690 and 580 us, (32, 128, 128) 316 and 299; of 24 KiB
 * (64, 96, 128) 468 and 487; of 16 KiB 282 and 375 (64, 64, 128), 678 and 691 (128, 64, 128). */
enum { OWN_BYTES = 32 << 10, OWN_TILE_BYTES = 128 << 10 };

/* Rows of a token for a peer that are worth a piece of their own in a message of several tokens,
 * and what such a message must carry. */
enum { PIECE_BYTES = 4 << 10, PIECES_BYTES = 48 << 10 };

/* Payload of a message made of pieces, at most, in a call of several. Open MPI copies such a one
 * in fragments of 32 KiB, of which three may be on their way before the first comes back; the
 * first 4 KiB, enough for the LSEs, go ahead of them. So 96 KiB go without a wait, and a fourth
 * fragment waits. Measured, (64, 64, 128) f32, N = 2, in turns: 6 tokens (96 KiB) 2.05 to 2.08
 * times as fast as the published form; 4, 5, 7, 8, 10 and 12 tokens 2.01 to 2.04. A call that is
 * not worth several messages goes in one, of any size: 8 tokens 30 and 34 us in one, 35 to 37 in
 * two; 16 tokens alike. */
enum { GATHERED_BYTES = 96 << 10 };

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t rows_of(const struct dcp__merge_shape *s, int64_t n_tokens, int rank, int64_t step)
{
    const struct dcp__merge_block b = dcp__merge_block_step(s, n_tokens, rank, step);
    return dcp__merge_block_rows(&b);
}

/* Rows of the blocks of ranks [lo, hi). */
static int64_t rows_between(const struct dcp__merge_shape *s, int64_t n_tokens, int lo, int hi,
                            int64_t step)
{
    int64_t n = 0;
    for (int r = lo; r < hi; r++) n += rows_of(s, n_tokens, r, step);
    return n;
}

static size_t state_bytes(const struct dcp__merge_shape *s, int64_t n_rows, int n_members)
{
    return dcp__merge_rows_bytes(n_rows, s->dim, sizeof(float), dcp__state_cols(s, n_members));
}

/* The LSEs of one rank for the rows of a step. */
static size_t lse_bytes(const struct dcp__merge_shape *s, int64_t n_rows)
{
    return dcp__merge_rows_bytes(n_rows, 0, sizeof(float), s->n_cols);
}

static bool is_one_stretch(const struct dcp__merge_shape *s, int64_t n_tokens, int64_t n_heads)
{
    return n_tokens == 1 || (s->cut == DCP_CUT_TOKENS && n_heads == s->n_heads);
}

/* Payload of a tile of so many tokens of the widest block, where it could go as it lies: a token's
 * heads follow each other. Two tokens' do not unless all heads are in the block: then the message
 * is made of pieces. */
static size_t stretch_bytes(const struct dcp__merge_shape *s, int64_t n_tokens, int64_t n_heads)
{
    const size_t row = (size_t)s->dim * s->wire_bytes;
    if (s->is_narrow || row % 64 != 0) return 0;
    if (!is_one_stretch(s, n_tokens, n_heads) && (size_t)n_heads * row < PIECE_BYTES) return 0;
    return (size_t)(n_tokens * n_heads) * row;
}

/* Tokens of a tile whose stretches are messages of their own: with one of LSEs for each peer no
 * more than an exchange has (dcp__xfers_max): 4, 3, 2, 2 of 2 to 5 ranks, then 1. */
static int64_t own_tokens(const struct dcp__merge_shape *s, size_t stretch)
{
    const int n_peers = s->n_ranks > 1 ? s->n_ranks - 1 : 1;
    const int64_t n = least(OWN_TILE_BYTES / (int64_t)stretch, (s->n_ranks + 3) / n_peers);
    return n > 1 ? n : 1;
}

bool dcp__merge_splits(const struct dcp__merge_shape *s)
{
    const bool is_one = is_one_stretch(s, s->tile_tokens, s->tile_heads);
    const size_t stretch = stretch_bytes(s, is_one ? s->tile_tokens : 1, s->tile_heads);
    return s->algo == DCP_MERGE_ALLTOALL && stretch >= OWN_BYTES &&
           (is_one || s->tile_tokens <= own_tokens(s, stretch));
}

bool dcp__merge_gathers(const struct dcp__merge_shape *s)
{
    return s->algo == DCP_MERGE_ALLTOALL && !dcp__merge_splits(s) &&
           !is_one_stretch(s, s->tile_tokens, s->tile_heads) &&
           stretch_bytes(s, s->tile_tokens, s->tile_heads) >= PIECES_BYTES;
}

int dcp__merge_payloads(const struct dcp__merge_shape *s, const struct dcp__merge_block *b)
{
    if (dcp__merge_block_rows(b) == 0 || !dcp__merge_splits(s)) return 0;
    return is_one_stretch(s, s->tile_tokens, s->tile_heads) ? 1 : (int)(b->t_end - b->t_begin);
}

static void alltoall_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    for (int r = 0; r < s->n_ranks; r++) {
        if (r == s->rank) continue;
        out->send += dcp__merge_rows_bytes(rows_of(s, s->max_tokens, r, 0), s->dim, s->wire_bytes,
                                           s->n_cols);
    }
    /* With a narrower wire type the own rows take the same rounding, through the receive buffer. */
    out->recv = (size_t)(s->n_ranks - (s->is_narrow ? 0 : 1)) *
                dcp__merge_rows_bytes(rows_of(s, s->max_tokens, s->rank, 0), s->dim, s->wire_bytes,
                                      s->n_cols);
    out->private_total = out->send + 2 * out->recv;
}

static void gather_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    if (s->cut != DCP_CUT_NONE) return;
    for (int r = 0; r < s->n_ranks; r++) {
        const size_t n =
            dcp__merge_rows_bytes(rows_of(s, s->max_tokens, r, 0), s->dim, s->merged_bytes, 1);
        if (r == s->rank)
            out->gather_send = n;
        else
            out->gather_recv += n;
    }
    out->private_total += out->gather_send + out->gather_recv;
}

static void halving_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    unsigned char in[RANKS_MAX];
    struct dcp__halving h = {0, s->n_ranks, 0, 0, 0, 0, {0, 0}};
    int64_t kept = rows_between(s, s->max_tokens, 0, s->n_ranks, 0);
    if (s->shares_lse) out->table = (size_t)s->n_ranks * lse_bytes(s, kept);
    for (int level = 0; dcp__halving_at(s->n_ranks, s->rank, level, &h); level++) {
        const int n = dcp__halving_members(s->n_ranks, s->rank, level, in);
        out->send = larger(
            out->send, state_bytes(s, rows_between(s, s->max_tokens, h.send_lo, h.send_hi, 0), n));
        const int64_t rows = rows_between(s, s->max_tokens, h.keep_lo, h.keep_hi, 0);
        if (level == 0) kept = rows;
        size_t recv = 0;
        for (int i = 0; i < h.n_recvs; i++)
            recv +=
                state_bytes(s, rows, dcp__halving_members(s->n_ranks, h.recv_from[i], level, in));
        out->recv = larger(out->recv, recv);
    }
    out->state = state_bytes(s, kept, s->n_ranks);
    out->private_total = out->send + out->recv + out->state + out->table;
}

static void hierarchical_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    const int own_host = dcp__host_of(s, s->rank);
    const int n_inside = dcp__host_size(s, own_host);
    for (int r = 0; r < s->n_ranks; r++) {
        if (dcp__host_of(s, r) == own_host || dcp__host_handler(s, own_host, r) != s->rank)
            continue;
        out->send += state_bytes(s, rows_of(s, s->max_tokens, r, 0), n_inside);
    }
    const int64_t rows = rows_of(s, s->max_tokens, s->rank, 0);
    for (int host = 0; host < dcp__n_hosts(s); host++) {
        if (host == own_host) continue;
        out->recv += state_bytes(s, rows, dcp__host_size(s, host));
    }
    out->state = state_bytes(s, rows, s->n_ranks);
    const int64_t all = rows_between(s, s->max_tokens, 0, s->n_ranks, 0);
    if (s->shares_lse) out->table = (size_t)s->n_ranks * lse_bytes(s, all);
    out->private_total = out->send + out->recv + out->state + out->table;
}

/* All ranks' blocks of one step lie one after the other in a tile of group memory. */
static void staging_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    if (s->one_space || s->n_ranks == 1 || s->max_tokens == 0) return;
    for (int r = 0; r < s->n_ranks; r++)
        out->group_tile +=
            dcp__merge_rows_bytes(rows_of(s, s->max_tokens, r, 0), s->dim, s->out_bytes, s->n_cols);
    out->group_total = 2 * out->group_tile;
}

/* Rows of LSEs from all ranks and of the own; f32 copies of the partial: none in place, one where
 * out is not f32, two in the form with temporaries. */
static void allreduce_sizes(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    const size_t rows = (size_t)(s->max_tokens * s->n_heads);
    const size_t copies = s->algo == DCP_MERGE_ALLREDUCE_TEMP ? 2 : s->out_bytes == 4 ? 0 : 1;
    out->full = rows * sizeof(float) * (size_t)s->n_cols * (size_t)(s->n_ranks + 1) +
                copies * rows * (size_t)s->dim * sizeof(float);
    out->private_total = out->full;
}

void dcp__merge_sizes_of(const struct dcp__merge_shape *s, struct dcp__merge_sizes *out)
{
    memset(out, 0, sizeof(*out));
    switch (s->algo) {
    case DCP_MERGE_DIRECT:
        staging_sizes(s, out);
        break;
    case DCP_MERGE_ALLTOALL:
        alltoall_sizes(s, out);
        gather_sizes(s, out);
        break;
    case DCP_MERGE_HALVING:
        halving_sizes(s, out);
        gather_sizes(s, out);
        break;
    case DCP_MERGE_HIERARCHICAL:
        staging_sizes(s, out);
        hierarchical_sizes(s, out);
        gather_sizes(s, out);
        break;
    default:
        allreduce_sizes(s, out);
        break;
    }
}

static size_t total_at(struct dcp__merge_shape *s, int64_t tokens, int64_t heads,
                       struct dcp__merge_sizes *out)
{
    s->tile_tokens = tokens;
    s->tile_heads = heads;
    dcp__merge_sizes_of(s, out);
    return out->private_total + out->group_total;
}

void dcp__merge_fit(struct dcp__merge_shape *s, size_t limit_bytes,
                    struct dcp__merge_sizes *sizes_out)
{
    const int64_t longest = dcp__merge_longest(s, s->max_tokens);
    const int64_t widest = dcp__merge_widest(s);
    const bool has_tiles = s->algo != DCP_MERGE_ALLREDUCE && s->algo != DCP_MERGE_ALLREDUCE_TEMP;
    if (!has_tiles || longest == 0 ||
        (s->algo == DCP_MERGE_DIRECT && (s->one_space || s->n_ranks == 1))) {
        (void)total_at(s, s->max_tokens, widest, sizes_out);
        return;
    }
    int64_t most = longest;
    const size_t one = total_at(s, 1, widest, sizes_out);
    /* A tile of the whole would leave nothing to overlap: aim at four, unless their messages become
     * so small that latency rules. */
    if (s->algo == DCP_MERGE_ALLTOALL && s->n_ranks > 1) {
        const int64_t enough = (int64_t)(WORTH_BYTES / (one + 1)) + 1;
        const int64_t quarter = (longest + 3) / 4;
        most = enough < quarter ? quarter : enough < longest ? enough : longest;
        const int64_t stretch = (int64_t)stretch_bytes(s, 1, widest);
        /* Less to wait for before the first merge. Also where pieces cannot be sent and all is
         * packed: over shm, 2 to 14 % less time than with whole ones. */
        const int64_t half = (enough + 1) / 2;
        if (s->cut != DCP_CUT_TOKENS && stretch >= OWN_BYTES) {
            most = least(least(half, quarter), own_tokens(s, (size_t)stretch));
        } else if (s->cut != DCP_CUT_TOKENS && enough < longest &&
                   stretch_bytes(s, half, widest) >= PIECES_BYTES) {
            most = least(half, GATHERED_BYTES / stretch);
        }
    }
    int64_t low = 0;
    while (low < most) { /* the largest that fits */
        const int64_t mid = low + (most - low + 1) / 2;
        if (total_at(s, mid, widest, sizes_out) <= limit_bytes)
            low = mid;
        else
            most = mid - 1;
    }
    if (low > 0) {
        (void)total_at(s, low, widest, sizes_out);
        return;
    }
    most = widest; /* not even one token: some of its heads */
    while (low < most) {
        const int64_t mid = low + (most - low + 1) / 2;
        if (total_at(s, 1, mid, sizes_out) <= limit_bytes)
            low = mid;
        else
            most = mid - 1;
    }
    (void)total_at(s, 1, low > 0 ? low : 1, sizes_out);
    if (low == 0) s->tile_tokens = s->tile_heads = 0;
}

/* ---- traffic ---- */

static void sent(size_t n_bytes, int64_t *bytes, int64_t *n_messages)
{
    *bytes += (int64_t)n_bytes;
    if (n_bytes > 0) (*n_messages)++;
}

static void step_traffic(const struct dcp__merge_shape *s, int64_t n_tokens, int64_t step,
                         int64_t *bytes, int64_t *n_messages)
{
    const int own_host = dcp__host_of(s, s->rank);
    const int64_t all = rows_between(s, n_tokens, 0, s->n_ranks, step);
    unsigned char in[RANKS_MAX];
    struct dcp__halving h;
    const int n_inside = dcp__host_size(s, own_host);
    if (s->algo == DCP_MERGE_HALVING) {
        for (int level = 0; dcp__halving_at(s->n_ranks, s->rank, level, &h); level++)
            sent(state_bytes(s, rows_between(s, n_tokens, h.send_lo, h.send_hi, step),
                             dcp__halving_members(s->n_ranks, s->rank, level, in)),
                 bytes, n_messages);
    }
    for (int r = 0; r < s->n_ranks; r++) {
        const struct dcp__merge_block b = dcp__merge_block_step(s, n_tokens, r, step);
        const int64_t rows = dcp__merge_block_rows(&b);
        if (s->algo == DCP_MERGE_ALLTOALL && r != s->rank) {
            sent(dcp__merge_rows_bytes(rows, s->dim, s->wire_bytes, s->n_cols), bytes, n_messages);
            *n_messages += dcp__merge_payloads(s, &b);
        }
        if (s->algo == DCP_MERGE_HIERARCHICAL && dcp__host_of(s, r) != own_host &&
            dcp__host_handler(s, own_host, r) == s->rank)
            sent(state_bytes(s, rows, n_inside), bytes, n_messages);
        if (s->algo != DCP_MERGE_ALLTOALL && s->shares_lse && r != s->rank)
            sent(lse_bytes(s, all), bytes, n_messages);
        if (s->cut == DCP_CUT_NONE && r != s->rank)
            sent(dcp__merge_rows_bytes(rows_of(s, n_tokens, s->rank, step), s->dim, s->merged_bytes,
                                       1),
                 bytes, n_messages);
    }
}

void dcp__merge_traffic(const struct dcp__merge_shape *s, int64_t n_tokens, int64_t *bytes_out,
                        int64_t *n_messages_out)
{
    *bytes_out = 0;
    *n_messages_out = 0;
    const int64_t lse = (int64_t)s->lse_bytes * s->n_cols;
    const int64_t row_bytes = s->dim * (int64_t)s->out_bytes + lse;
    if (s->algo == DCP_MERGE_DIRECT) {
        const struct dcp__merge_block b =
            dcp__merge_block_got(s->cut, n_tokens, s->n_heads, s->n_ranks, s->rank);
        *bytes_out = dcp__merge_block_rows(&b) * row_bytes * (s->n_ranks - 1);
        return;
    }
    if (s->algo == DCP_MERGE_ALLREDUCE || s->algo == DCP_MERGE_ALLREDUCE_TEMP) {
        const int64_t rows = n_tokens * s->n_heads;
        *bytes_out = rows * (2 * s->dim + s->n_cols) * (int64_t)sizeof(float) * (s->n_ranks - 1) /
                     s->n_ranks;
        return;
    }
    const int64_t n_steps = dcp__merge_n_steps(s, n_tokens);
    for (int64_t i = 0; i < n_steps; i++) step_traffic(s, n_tokens, i, bytes_out, n_messages_out);
}
