/* SPDX-License-Identifier: Apache-2.0 */
/* The buffers of the forward pass: sizes as in forward.h, nothing allocated while it runs. */
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/forward.h"

/* Floats (n, width) of this rank alone. */
static dcp_status own_floats(struct forward *f, int64_t n, int64_t width, float **out)
{
    size_t n_elems, n_bytes;
    void *p = NULL;
    if (dcp__mul_overflow((size_t)n, (size_t)width, &n_elems) ||
        dcp__mul_overflow(n_elems, sizeof(float), &n_bytes))
        return dcp__fail(DCP_ERR_ARG, "activations: %lld x %lld floats", (long long)n,
                         (long long)width);
    DCP_TRY(dcp__alloc(n_bytes, "activations", &p));
    *out = p;
    f->activation_bytes += n_bytes;
    return DCP_OK;
}

/* Floats (n, width) that peers can read. Collective. */
static dcp_status group_floats(struct forward *f, int64_t n, int64_t width, float **out)
{
    size_t n_elems, n_bytes;
    void *p = NULL;
    if (dcp__mul_overflow((size_t)n, (size_t)width, &n_elems) ||
        dcp__mul_overflow(n_elems, sizeof(float), &n_bytes))
        return dcp__fail(DCP_ERR_ARG, "activations: %lld x %lld floats", (long long)n,
                         (long long)width);
    DCP_TRY(dcp_group_alloc(f->group, n_bytes, &p));
    *out = p;
    f->activation_bytes += n_bytes;
    return DCP_OK;
}

/* (N + 1) bytes where each rank's part of n items of item_elems floats begins. */
static dcp_status offsets(struct forward *f, int64_t n_items, int64_t item_elems, size_t **out)
{
    const int n_ranks = f->model->n_ranks;
    void *p = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n_ranks + 1, sizeof(size_t), "column offsets", &p));
    size_t *off = p;
    for (int r = 0; r < n_ranks; r++)
        off[r + 1] = (size_t)(dcp_cut_range(n_items, n_ranks, r).end * item_elems) * sizeof(float);
    *out = off;
    return DCP_OK;
}

dcp_status forward_init_own(struct forward *f)
{
    const struct model *m = f->model;
    const struct model_config *c = &m->cfg;
    const int64_t n = f->max_tokens;
    /* tokens of a chunk that one rank can own: whole interleave blocks, one cut at either end */
    const int64_t block = m->n_ranks * f->interleave;
    const int64_t most = (n / block + 1) * f->interleave + f->interleave;
    const int64_t n_own = most < n ? most : n;
    void *p = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(int32_t), "chunk rows", &p));
    f->own_rows = p;
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(int32_t), "chunk rows", &p));
    f->slots = p;
    DCP_TRY(own_floats(f, n, c->d_model, &f->x));
    DCP_TRY(own_floats(f, n, c->d_model, &f->y));
    if (m->n_ranks > 1) DCP_TRY(own_floats(f, n_own, c->d_model, &f->y_own));
    DCP_TRY(own_floats(f, n, (m->heads.end - m->heads.begin) * c->key_dim, &f->q));
    DCP_TRY(own_floats(f, n_own, c->n_kv_heads * c->key_dim, &f->k));
    DCP_TRY(own_floats(f, n_own, c->n_kv_heads * c->value_dim, &f->v));
    DCP_TRY(own_floats(f, n, m->ffn.end - m->ffn.begin, &f->up));
    for (int i = 0; i < c->n_ropes; i++) DCP_TRY(own_floats(f, n, c->rope_dims, &f->cos_sin[i]));
    DCP_TRY(offsets(f, 0, 0, &f->embd_off));
    DCP_TRY(offsets(f, c->n_heads, c->value_dim, &f->o_off));
    DCP_TRY(offsets(f, c->d_model, 1, &f->cols_off));
    DCP_TRY(offsets(f, c->d_ffn, 1, &f->ffn_off));
    return offsets(f, c->vocab, 1, &f->vocab_off);
}

dcp_status forward_init_group(struct forward *f)
{
    const struct model_config *c = &f->model->cfg;
    const int64_t n = f->max_tokens;
    DCP_TRY(group_floats(f, n, c->n_heads * c->value_dim, &f->o));
    DCP_TRY(group_floats(f, n, c->d_model, &f->a));
    DCP_TRY(group_floats(f, n, c->d_ffn, &f->h));
    return forward_reserve_logits(f, 1);
}

dcp_status forward_reserve_logits(struct forward *f, int64_t n_rows)
{
    if (n_rows <= f->logit_rows) return DCP_OK;
    const int64_t vocab = f->model->cfg.vocab;
    dcp_group_free(f->group, f->logits);
    f->activation_bytes -= (size_t)(f->logit_rows * vocab) * sizeof(float);
    f->logits = NULL;
    f->logit_rows = 0;
    DCP_TRY(group_floats(f, n_rows, vocab, &f->logits));
    f->logit_rows = n_rows;
    return DCP_OK;
}

void forward_fini(struct forward *f)
{
    float *const shared[] = {f->logits, f->h, f->a, f->o};
    for (size_t i = 0; i < sizeof(shared) / sizeof(shared[0]); i++)
        dcp_group_free(f->group, shared[i]);
    for (int i = 0; i < MAX_ROPES; i++) dcp__free(f->cos_sin[i]);
    void *const own[] = {f->vocab_off, f->ffn_off, f->cols_off, f->o_off,   f->embd_off,
                         f->up,        f->v,       f->k,        f->q,       f->y_own,
                         f->y,         f->x,       f->slots,    f->own_rows};
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++) dcp__free(own[i]);
}
