/* SPDX-License-Identifier: Apache-2.0 */
/* The two maps between a head and the latent vector c [kv_rank]:
 *
 *     k_nope[h] = W_UK[h] c      W_UK[h] [nope, kv_rank]
 *     v[h]      = W_UV[h] c      W_UV[h] [v, kv_rank]
 *
 *              attn_kv_b [H][nope + v][kv_rank]           attn_k_b [H][kv_rank][nope], attn_v_b
 *                |  W_UK[0] | W_UV[0] | W_UK[1] ...         W_UK[h] transposed     [H][v][kv_rank]
 *
 * A file has either the one tensor or the two. The expanded form multiplies by W_UK as it stands
 * and for all heads, as a rank makes all heads' keys of its tokens; the others by its transpose,
 * for the rank's own heads. W_UV is wanted as it stands, of own heads (absorbed) or all (expanded);
 * where the partials are projected, of all heads, turned, in floats. What the file has the other
 * way round is turned here, head by head; quantised blocks run along rows and cannot be turned, so
 * they become floats. */
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/model_priv.h"

/* Rows [first, first + n_rows) of each head of a tensor that has per_head of them, of heads. */
struct head_rows {
    const struct gguf_tensor *t;
    dcp_range heads;
    int64_t per_head, first, n_rows;
};

static size_t head_offset(const struct head_rows *s, int64_t head)
{
    return (size_t)(head * s->per_head + s->first) * s->t->row_bytes;
}

static dcp_status load_as_is(struct loader *l, const struct head_rows *s, unsigned char *dst)
{
    const size_t n_bytes = (size_t)s->n_rows * s->t->row_bytes;
    for (int64_t h = s->heads.begin; h < s->heads.end; h++, dst += n_bytes)
        DCP_TRY(gguf_read(l->file, s->t, head_offset(s, h), n_bytes, dst));
    return DCP_OK;
}

/* (n_rows, k) to (k, n_rows). */
static void turn(const void *src, int64_t n_rows, int64_t k, size_t elem_bytes, void *dst)
{
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t j = 0; j < k; j++)
            memcpy((char *)dst + (size_t)(j * n_rows + i) * elem_bytes,
                   (const char *)src + (size_t)(i * k + j) * elem_bytes, elem_bytes);
}

static bool is_plain(int qtype)
{
    return qtype == DCP__Q_F32 || qtype == DCP__Q_F16 || qtype == DCP__Q_BF16;
}

static dcp_status load_turned(struct loader *l, const struct head_rows *s, size_t elem_bytes,
                              unsigned char *dst)
{
    const size_t n_bytes = (size_t)s->n_rows * s->t->row_bytes;
    const int64_t k = s->t->dims[0];
    const size_t n_elems = (size_t)(s->n_rows * k);
    void *raw = NULL, *floats = NULL;
    /* kernels may read a little beyond the end */
    dcp_status st = dcp__alloc(n_bytes + 64, "weights of a head", &raw);
    const bool to_floats = elem_bytes == sizeof(float) && s->t->qtype != DCP__Q_F32;
    if (st == DCP_OK && to_floats)
        st = dcp__alloc_array(n_elems, sizeof(float), "weights of a head", &floats);
    for (int64_t h = s->heads.begin; h < s->heads.end && st == DCP_OK; h++) {
        st = gguf_read(l->file, s->t, head_offset(s, h), n_bytes, raw);
        if (st != DCP_OK) break;
        if (floats != NULL)
            l->kernels->dequant[s->t->qtype](raw, s->t->row_bytes, s->n_rows, k, floats, k);
        turn(floats != NULL ? floats : raw, s->n_rows, k, elem_bytes, dst);
        dst += n_elems * elem_bytes;
    }
    dcp__free(floats);
    dcp__free(raw);
    return st;
}

enum { AS_IS = 0, TURNED = 1, TURNED_TO_FLOATS = 2 };
static dcp_status load_heads(struct loader *l, const struct head_rows *s, const char *name,
                             enum split split, int how, struct weight *w)
{
    const int64_t n_heads = s->heads.end - s->heads.begin, k = s->t->dims[0];
    size_t elem_bytes = 0;
    w->qtype = s->t->qtype;
    w->k = k;
    w->n_rows = n_heads * s->n_rows;
    w->row_bytes = s->t->row_bytes;
    if (how != AS_IS) {
        if (how == TURNED_TO_FLOATS || !is_plain(w->qtype)) w->qtype = DCP__Q_F32;
        elem_bytes = w->qtype == DCP__Q_F32 ? sizeof(float) : sizeof(uint16_t);
        w->k = s->n_rows;
        w->n_rows = n_heads * k;
        w->row_bytes = (size_t)w->k * elem_bytes;
    }
    const size_t n_bytes = (size_t)w->n_rows * w->row_bytes;
    unsigned char *dst = loader_reserve(l, n_bytes);
    w->data = dst;
    if (dst == NULL) return DCP_OK;
    loader_account(l, name, split, n_bytes);
    return how != AS_IS ? load_turned(l, s, elem_bytes, dst) : load_as_is(l, s, dst);
}

static dcp_status require(const struct loader *l, const char *prefix, const char *tensor)
{
    char name[96];
    snprintf(name, sizeof(name), "%s%s", prefix, tensor);
    if (gguf_find(l->file, name) != NULL) return DCP_OK;
    return dcp__fail(DCP_ERR_FORMAT, "%s: has no tensor %s", gguf_path(l->file), name);
}

/* The tensors of which a file has one set or the other. */
static dcp_status check_sets(const struct loader *l, const char *prefix, bool is_dense)
{
    static const char *const ffn[] = {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"};
    if (l->m->cfg.mla.q_rank > 0) {
        DCP_TRY(require(l, prefix, "attn_q_a.weight"));
        DCP_TRY(require(l, prefix, "attn_q_a_norm.weight"));
        DCP_TRY(require(l, prefix, "attn_q_b.weight"));
    } else {
        DCP_TRY(require(l, prefix, "attn_q.weight"));
    }
    for (int i = 0; i < 3 && is_dense; i++) DCP_TRY(require(l, prefix, ffn[i]));
    return DCP_OK;
}

dcp_status loader_mla(struct loader *l, const char *prefix, struct layer *layer)
{
    const struct model_config *c = &l->m->cfg;
    const struct mla_config *a = &c->mla;
    const bool is_latent = model_is_latent(c);
    const dcp_range own = l->m->heads, kept = l->m->kv_heads, all = {0, c->n_heads};
    const enum split k_split = is_latent ? SPLIT_HEADS : SPLIT_KV_HEADS;
    const enum split v_split = a->form == MLA_ABSORBED    ? SPLIT_HEADS
                               : a->form == MLA_PROJECTED ? SPLIT_NONE
                                                          : SPLIT_KV_HEADS;
    const dcp_range k_heads = is_latent ? own : kept;
    const dcp_range v_heads = a->form == MLA_ABSORBED ? own : a->form == MLA_PROJECTED ? all : kept;
    const int v_how = a->form == MLA_PROJECTED ? TURNED_TO_FLOATS : AS_IS;
    DCP_TRY(check_sets(l, prefix, layer - l->m->layers < c->moe.n_dense || c->moe.n_experts == 0));

    char name[96];
    snprintf(name, sizeof(name), "%sattn_kv_b.weight", prefix);
    const struct gguf_tensor *both = loader_find(l, name);
    if (both != NULL) {
        const int64_t per_head = a->nope_dim + a->value_dim;
        DCP_TRY(loader_check_shape(l, both, a->kv_rank, c->n_heads * per_head, 1));
        const struct head_rows uk = {both, k_heads, per_head, 0, a->nope_dim};
        const struct head_rows uv = {both, v_heads, per_head, a->nope_dim, a->value_dim};
        DCP_TRY(load_heads(l, &uk, "attn_kv_b.weight", k_split, is_latent ? TURNED : AS_IS,
                           &layer->wk_b));
        return load_heads(l, &uv, "attn_kv_b.weight", v_split, v_how, &layer->wv_b);
    }
    snprintf(name, sizeof(name), "%sattn_k_b.weight", prefix);
    const struct gguf_tensor *k_b = loader_find(l, name);
    snprintf(name, sizeof(name), "%sattn_v_b.weight", prefix);
    const struct gguf_tensor *v_b = loader_find(l, name);
    if (k_b == NULL || v_b == NULL)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: has neither %sattn_kv_b.weight nor both of "
                         "attn_k_b.weight and attn_v_b.weight",
                         gguf_path(l->file), prefix);
    DCP_TRY(loader_check_shape(l, k_b, a->nope_dim, a->kv_rank, c->n_heads));
    DCP_TRY(loader_check_shape(l, v_b, a->kv_rank, a->value_dim, c->n_heads));
    const struct head_rows uk = {k_b, k_heads, a->kv_rank, 0, a->kv_rank};
    const struct head_rows uv = {v_b, v_heads, a->value_dim, 0, a->value_dim};
    DCP_TRY(
        load_heads(l, &uk, "attn_k_b.weight", k_split, is_latent ? AS_IS : TURNED, &layer->wk_b));
    return load_heads(l, &uv, "attn_v_b.weight", v_split, v_how, &layer->wv_b);
}
