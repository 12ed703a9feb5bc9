/* SPDX-License-Identifier: Apache-2.0 */
/* Projecting before the merge: a linear map per head, W_h [D, P], applied to this rank's partial.
 *
 *     sum_r w_r (out_r W_h) = (sum_r w_r out_r) W_h        w_r: the merge's weights, numbers
 *
 * so it commutes with the merge, and what is merged and moved is P wide instead of D (absorbed MLA:
 * 128 instead of 512). A tile's rows go through the maps head by head: a map is read once a tile
 * and stays in a core's cache over the rows.
 *
 * Cost: rows * H * D * P multiply-adds on every rank, of which a projection after the merge would
 * need H_r / H; it pays where moving and merging 4 (D - P) bytes of a row and head cost more. */
#include "attend/attend_priv.h"

enum { ROWS_PER_ITEM = 48 };

struct project_ctx {
    struct dcp_attend *a;
    struct dcp__attend_tile *tile;
    int64_t n_row_blocks;
};

static void project_item(void *ctx_ptr, int64_t item, int thread)
{
    const struct project_ctx *ctx = ctx_ptr;
    const struct dcp_attend *a = ctx->a;
    const struct dcp__attend_tile *t = ctx->tile;
    const int64_t h = item / ctx->n_row_blocks, row = item % ctx->n_row_blocks * ROWS_PER_ITEM;
    const int64_t n = t->n_rows - row < ROWS_PER_ITEM ? t->n_rows - row : ROWS_PER_ITEM;
    const int64_t d = a->d.value_dim, p = a->d.project_dim;
    const char *map = t->args->project;
    map += h * d * p * (int64_t)dcp_dtype_bytes(a->d.project_type);
    a->kernels.project[a->d.project_type](
        t->part + row * t->part_token_stride + h * d, t->part_token_stride, n, d, map, p,
        t->out + row * t->out_token_stride + h * p, t->out_token_stride);
    if (thread == 0 && t->progress != NULL) t->progress(t->progress_ctx);
}

void dcp__attend_project(struct dcp_attend *a, struct dcp__attend_tile *tile)
{
    struct project_ctx ctx = {a, tile, (tile->n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM};
    dcp__pool_run(a->pool, a->d.n_heads * ctx.n_row_blocks, project_item, &ctx);
}
