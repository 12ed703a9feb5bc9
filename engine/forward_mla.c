/* SPDX-License-Identifier: Apache-2.0 */
/* Multi-head latent attention, from the normed rows y of a tile to q and to what the cache keeps.
 *
 *     c_q  = norm(W_qa y)                     [q_rank]     (or none: q comes from y at once)
 *     q[h] = W_qb[h] c_q                      [nope | rope], the second part rotated
 *     c    = norm(first kv_rank of W_kva y),  k_rope = rotated rest: one for all heads
 *
 *     expanded                                absorbed
 *     k[h] = [W_UK[h] c | k_rope]             k    = [c | k_rope]          one head, 576 wide
 *     v[h] = W_UV[h] c                        v    = c                     its first 512 columns
 *     s    = q[h] . k[h]                      s    = [W_UK[h]^T q_nope[h] | q_rope[h]] . k
 *     o[h] = sum p v[h]                       o[h] = W_UV[h] (sum p c)
 *
 * Absorbed, W_UV is applied to the merged sum; projected, by dcp_attend to each rank's part of it.
 *
 * The same numbers by another order of sums. The expanded cache has H (nope + rope + v) values a
 * token, the absorbed one kv_rank + rope: 71 times fewer for 128 heads of 128 + 64 and 128 with
 * ranks of 512 and 64; its scores cost (kv_rank + rope) / (nope + rope) as many products. */
#include <string.h>

#include "base/status_priv.h"
#include "engine/forward_priv.h"

/* y[h] (n, rows of a head) = x[h] (n, k) w[h]^T for n_heads; heads of x and y lie x_head and y_head
 * elements apart within a row. */
static dcp_status by_head(struct forward *f, const struct weight *w, int64_t n_heads,
                          const struct rows *x, int64_t x_head, const struct rows *y,
                          int64_t y_head)
{
    const int64_t rows = n_heads > 0 ? w->n_rows / n_heads : 0;
    for (int64_t h = 0; h < n_heads; h++) {
        const struct weight one = {w->qtype, rows, w->k, w->row_bytes,
                                   (const char *)w->data + (size_t)(h * rows) * w->row_bytes};
        DCP_TRY(forward_product(f, &one, x->data + h * x_head, x->stride, x->n,
                                y->data + h * y_head, y->stride));
    }
    return DCP_OK;
}

/* The last rope_dim of each head of dim elements; first_row of the tile. */
static void rotate(struct forward *f, const struct rows *x, int64_t dim, int64_t first_row,
                   const int32_t *table_rows)
{
    const struct model_config *c = &f->model->cfg;
    const int64_t skip = dim - c->rope_dims;
    if (x->n == 0 || x->width == 0) return;
    const struct rows tail = {x->data + skip, x->n, x->width - skip, x->stride};
    ew_rope(f->pool, &tail, dim, c->rope_dims, c->rope_pairs,
            forward_angles(f, 0) + first_row * c->rope_dims, table_rows, f->row0);
}

/* Columns [from, from + n) of each row of src to column `to` of dst's. */
static void copy_columns(const struct rows *src, int64_t from, const struct rows *dst, int64_t to,
                         int64_t n)
{
    for (int64_t t = 0; t < src->n; t++)
        memcpy(dst->data + t * dst->stride + to, src->data + t * src->stride + from,
               (size_t)n * sizeof(float));
}

/* q (n_live, H_r, nope + rope), rotated. */
static dcp_status make_q(struct forward *f, const struct layer *w, const struct rows *q)
{
    const struct model *m = f->model;
    const struct mla_config *a = &m->cfg.mla;
    const int64_t d = m->cfg.d_model, at = forward_live_at(f), n = q->n;
    const float *x = f->y + at * d;
    int64_t width = d;
    if (n == 0) return DCP_OK; /* on all ranks */
    if (a->q_rank > 0) {
        const bool is_last_tile = f->row0 + f->n_rows == f->n_tokens;
        width = a->q_rank;
        DCP_TRY(forward_product(f, &w->q_a, x, d, n, f->mla.q_a + m->q_rank.begin, width));
        DCP_TRY(
            forward_gather(f, f->mla.q_a, n, width, f->mla.q_a_off, is_last_tile ? LOOSE : FENCED));
        /* peers may still read q_a */
        ew_norm(f->pool, &(struct rows){f->mla.q_a_normed, n, width, width}, f->mla.q_a, width,
                w->q_a_norm, m->cfg.norm_eps);
        x = f->mla.q_a_normed;
    }
    DCP_TRY(forward_product(f, &w->wq, x, width, n, q->data, q->stride));
    rotate(f, q, a->nope_dim + a->rope_dim, at, NULL);
    return DCP_OK;
}

/* latent (n_own, kv_rank + rope): c and the rotated key. */
static dcp_status make_latent(struct forward *f, const struct layer *w, const struct rows *latent)
{
    const struct model_config *c = &f->model->cfg;
    const struct rows rank_part = {latent->data, latent->n, c->mla.kv_rank, latent->stride};
    DCP_TRY(forward_product(f, &w->kv_a, forward_own_y(f), c->d_model, latent->n, latent->data,
                            latent->stride));
    ew_norm(f->pool, &rank_part, latent->data, latent->stride, w->kv_a_norm, c->norm_eps);
    rotate(f, latent, latent->width, 0, f->own_rows + f->own_at);
    return DCP_OK;
}

/* q (n_live, H_r, kv_rank + rope) = [W_UK^T q_nope | q_rope]. */
static dcp_status absorb(struct forward *f, const struct layer *w, const struct rows *heads,
                         const struct rows *q)
{
    const struct mla_config *a = &f->model->cfg.mla;
    const int64_t n_heads = range_size(f->model->heads), from = a->nope_dim + a->rope_dim;
    const int64_t to = f->model->cfg.key_dim;
    DCP_TRY(by_head(f, &w->wk_b, n_heads, heads, from, q, to));
    for (int64_t h = 0; h < n_heads; h++)
        copy_columns(heads, h * from + a->nope_dim, q, h * to + a->kv_rank, a->rope_dim);
    return DCP_OK;
}

/* k (n_own, H, nope + rope), v (n_own, H, v) of the heads that this rank keeps. */
static dcp_status expand(struct forward *f, const struct layer *w, const struct rows *latent,
                         const struct rows *k)
{
    const struct model_config *c = &f->model->cfg;
    const int64_t n_heads = range_size(f->model->kv_heads), v_width = n_heads * c->value_dim;
    const struct rows v = {f->v, latent->n, v_width, v_width};
    DCP_TRY(by_head(f, &w->wk_b, n_heads, latent, 0, k, c->key_dim));
    for (int64_t h = 0; h < n_heads; h++)
        copy_columns(latent, c->mla.kv_rank, k, h * c->key_dim + c->mla.nope_dim, c->mla.rope_dim);
    /* one product: all heads have the same x */
    return forward_product(f, &w->wv_b, latent->data, latent->stride, latent->n, v.data, v.stride);
}

dcp_status forward_mla(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const struct layer *w = &f->model->layers[l];
    const struct mla_config *a = &c->mla;
    const struct rows q = forward_q_rows(f);
    const int64_t k_width = range_size(f->model->kv_heads) * c->key_dim,
                  latent_width = a->kv_rank + a->rope_dim;
    const struct rows k = {f->k, f->n_own, k_width, k_width};
    if (model_is_latent(c)) {
        const int64_t width = range_size(f->model->heads) * (a->nope_dim + a->rope_dim);
        const struct rows heads = {f->mla.q, q.n, width, width};
        DCP_TRY(make_q(f, w, &heads));
        DCP_TRY(absorb(f, w, &heads, &q));
        DCP_TRY(make_latent(f, w, &k));
        return forward_store(f, l);
    }
    const struct rows latent = {f->mla.latent, f->n_own, latent_width, latent_width};
    DCP_TRY(make_q(f, w, &q));
    DCP_TRY(make_latent(f, w, &latent));
    DCP_TRY(expand(f, w, &latent, &k));
    return forward_store(f, l);
}

dcp_status forward_mla_values(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const int64_t n_heads = range_size(m->heads), rank = m->cfg.mla.kv_rank;
    const int64_t v = m->cfg.out_dim, width = n_heads * rank, o_width = m->cfg.n_heads * v;
    if (n_heads == 0) return DCP_OK;
    const struct rows latent = {f->attn + (f->row0 - f->live0) * width, f->n_rows, width, width};
    const struct rows o = {f->o + m->heads.begin * v, f->n_rows, n_heads * v, o_width};
    return by_head(f, &m->layers[l].wv_b, n_heads, &latent, rank, &o, v);
}
