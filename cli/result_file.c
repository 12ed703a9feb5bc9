/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/result_file.h"

#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "engine/safetensors.h"

static const int64_t tile_limit_bytes = (int64_t)16 << 20;

/* One tensor [n_tokens, n_heads, head_bytes] on its way to the file. */
struct gather {
    dcp_group *g;
    int n_ranks, rank;
    dcp_cut cut;
    int tp;
    int64_t n_tokens, n_heads;
    size_t head_bytes, row_bytes;
    const char *part;
    char *tile;          /* [tile_rows, row_bytes], visible to the peers */
    size_t *col_off;     /* [n_ranks + 1] */
    struct st_writer *w; /* rank 0 */
};

static int64_t clamp(int64_t x, int64_t lo, int64_t hi)
{
    return x < lo ? lo : x > hi ? hi : x;
}

/* The heads of a rank: those of its group, cut among the ranks of that. */
static dcp_range heads_of(const struct gather *a, int rank)
{
    const int n = a->n_ranks / a->tp;
    const int64_t n_heads = a->n_heads / a->tp, first = rank / n * n_heads;
    const dcp_range r = dcp_cut_range(n_heads, n, rank % n);
    return (dcp_range){first + r.begin, first + r.end};
}

/* Tokens [t0, t1) of a tensor cut by heads: columns of each row. */
static dcp_status gather_heads(const struct gather *a, int64_t t0, int64_t t1)
{
    const dcp_range own = heads_of(a, a->rank);
    const size_t own_bytes = (size_t)(own.end - own.begin) * a->head_bytes;
    for (int64_t t = t0; t < t1 && own_bytes > 0; t++)
        memcpy(a->tile + (size_t)(t - t0) * a->row_bytes + (size_t)own.begin * a->head_bytes,
               a->part + (size_t)t * own_bytes, own_bytes);
    for (int r = 0; r < a->n_ranks; r++)
        a->col_off[r] = (size_t)heads_of(a, r).begin * a->head_bytes;
    a->col_off[a->n_ranks] = a->row_bytes;
    return dcp_group_gather_cols(a->g, a->tile, (size_t)(t1 - t0), a->row_bytes, a->col_off);
}

/* The same of a tensor cut by tokens: the tile is one row, each rank's tokens a column. */
static dcp_status gather_tokens(const struct gather *a, int64_t t0, int64_t t1)
{
    const dcp_range own = dcp_cut_range(a->n_tokens, a->n_ranks, a->rank);
    const int64_t from = clamp(own.begin, t0, t1), to = clamp(own.end, t0, t1);
    if (to > from)
        memcpy(a->tile + (size_t)(from - t0) * a->row_bytes,
               a->part + (size_t)(from - own.begin) * a->row_bytes,
               (size_t)(to - from) * a->row_bytes);
    for (int r = 0; r < a->n_ranks; r++) {
        const int64_t begin = dcp_cut_range(a->n_tokens, a->n_ranks, r).begin;
        a->col_off[r] = (size_t)(clamp(begin, t0, t1) - t0) * a->row_bytes;
    }
    const size_t tile_bytes = (size_t)(t1 - t0) * a->row_bytes;
    a->col_off[a->n_ranks] = tile_bytes;
    return dcp_group_gather_cols(a->g, a->tile, 1, tile_bytes, a->col_off);
}

/* *write_out: whether rank 0 could write, apart from how the exchange went. */
static dcp_status gather_tensor(struct gather *a, dcp_status *write_out)
{
    int64_t tile_rows = a->n_tokens;
    if (a->row_bytes > 0) tile_rows = tile_limit_bytes / (int64_t)a->row_bytes;
    tile_rows = clamp(tile_rows, 1, a->n_tokens > 0 ? a->n_tokens : 1);
    void *tile = NULL;
    DCP_TRY(dcp_group_alloc(a->g, (size_t)tile_rows * a->row_bytes, &tile));
    a->tile = tile;
    dcp_status st = DCP_OK;
    for (int64_t t0 = 0; t0 < a->n_tokens && st == DCP_OK; t0 += tile_rows) {
        const int64_t t1 = t0 + tile_rows < a->n_tokens ? t0 + tile_rows : a->n_tokens;
        const char *rows = a->tile;
        if (a->cut == DCP_CUT_HEADS) {
            st = gather_heads(a, t0, t1);
        } else if (a->cut == DCP_CUT_TOKENS) {
            st = gather_tokens(a, t0, t1);
        } else {
            rows = a->part + (size_t)t0 * a->row_bytes;
        }
        if (a->rank == 0 && st == DCP_OK && *write_out == DCP_OK)
            *write_out = st_writer_append(a->w, rows, (size_t)(t1 - t0) * a->row_bytes);
    }
    dcp_group_free(a->g, tile);
    return st;
}

static dcp_status open_writer(const char *path, const struct result *res, struct st_writer **out)
{
    const struct st_decl decls[2] = {
        {"out", st_from_dcp(res->dtype), 3, {res->n_tokens, res->n_heads, res->dim}},
        {"lse", ST_F32, 2, {res->n_tokens, res->n_heads}}};
    return st_writer_create(path, decls, 2, out);
}

int result_write(dcp_group *g, const char *path, const struct result *res)
{
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    struct gather a = {.g = g,
                       .n_ranks = n,
                       .rank = rank,
                       .cut = res->cut,
                       .tp = res->tp > 0 ? res->tp : 1,
                       .n_tokens = res->n_tokens,
                       .n_heads = res->n_heads};
    dcp_status st =
        dcp__alloc_array((size_t)n + 1, sizeof(*a.col_off), "column offsets", (void **)&a.col_off);
    if (st == DCP_OK && rank == 0) st = open_writer(path, res, &a.w);
    if (!all_ranks_ok(g, st)) {
        st_writer_abandon(a.w);
        dcp__free(a.col_off);
        return EXIT_FAILED;
    }
    dcp_status written = DCP_OK;
    a.head_bytes = (size_t)res->dim * dcp_dtype_bytes(res->dtype);
    a.row_bytes = (size_t)res->n_heads * a.head_bytes;
    a.part = res->out;
    st = gather_tensor(&a, &written);
    if (st == DCP_OK) {
        a.head_bytes = sizeof(float);
        a.row_bytes = (size_t)res->n_heads * a.head_bytes;
        a.part = (const char *)res->lse;
        st = gather_tensor(&a, &written);
    }
    dcp__free(a.col_off);
    if (st != DCP_OK) {
        st_writer_abandon(a.w);
        return rank_failed(g, st);
    }
    if (a.w != NULL) {
        if (written == DCP_OK) {
            written = st_writer_finish(a.w);
        } else {
            st_writer_abandon(a.w);
        }
    }
    return all_ranks_ok(g, written) ? EXIT_DONE : EXIT_FAILED;
}
