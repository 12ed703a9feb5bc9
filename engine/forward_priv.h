/* SPDX-License-Identifier: Apache-2.0 */
/* Small tools that the files of the forward pass share. */
#ifndef DCP_ENGINE_FORWARD_PRIV_H
#define DCP_ENGINE_FORWARD_PRIV_H

#include "engine/forward.h"

/* Products ys[i] = x ws[i]^T, timed. */
dcp_status forward_products(struct forward *f, const struct weight *const *ws, int n_ws,
                            const float *x, int64_t x_stride, int64_t n, float *const *ys,
                            const int64_t *y_strides);
static inline dcp_status forward_product(struct forward *f, const struct weight *w, const float *x,
                                         int64_t x_stride, int64_t n, float *y, int64_t y_stride)
{
    return forward_products(f, (const struct weight *const[]){w}, 1, x, x_stride, n,
                            (float *const[]){y}, (const int64_t[]){y_stride});
}

/* Every rank's columns of buf (n, width) become whole on every rank, timed. LOOSE where another
 * collective call lies between this gather and the next write to buf (o, a, h inside the layers:
 * the next gather or attention): a barrier less, 4 a layer. FENCED before what writes at once: the
 * next tile or chunk's embedding after the last layer, the next tile of logits. */
enum fence { LOOSE, FENCED };
dcp_status forward_gather(struct forward *f, float *buf, int64_t n, int64_t width,
                          const size_t *col_off_bytes, enum fence fence);

/* y (n_own, d): the tile's rows of own tokens side by side. */
const float *forward_own_y(struct forward *f);

/* Rows of the tile that go on after attention: first of them in the tile, how many. */
static inline int64_t forward_live_at(const struct forward *f)
{
    return f->live0 > f->row0 ? f->live0 - f->row0 : 0;
}
static inline int64_t forward_n_live(const struct forward *f)
{
    const int64_t at = forward_live_at(f);
    return at < f->n_rows ? f->n_rows - at : 0;
}
/* Where their q begins, and how it lies. */
static inline struct rows forward_q_rows(const struct forward *f)
{
    const int64_t n_heads = f->model->heads.end - f->model->heads.begin;
    const int64_t width = n_heads * f->model->cfg.key_dim;
    const int64_t row = f->row0 + forward_live_at(f) - f->live0;
    const int64_t n = forward_n_live(f);
    return (struct rows){n > 0 ? f->q + row * width : f->q, n, width, width};
}

/* Whether all ranks make k and v of a step's only token: they have the rows for it. */
static inline bool forward_shares_kv(const struct model *m)
{
    return m->n_ranks > 1 && m->kv_ranks == m->n_ranks && m->cfg.mla.kv_rank == 0;
}

/* o (n_rows, H, out) own heads = W_UV of the latent result; MLA's absorbed form. */
dcp_status forward_mla_values(struct forward *f, int64_t l);

static inline int64_t range_size(dcp_range r)
{
    return r.end - r.begin;
}
static inline int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
