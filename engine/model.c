/* SPDX-License-Identifier: Apache-2.0 */
/* Loading this rank's slices. Rows of a matrix lie one after the other in the file, so a slice of
 * rows is one range of bytes, read as stored into one arena: quantised blocks stay quantised. The
 * same walk over the tensors runs twice, first to measure, then to read. */
#include "engine/model_priv.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "dcpattn/attend.h"

/* Start of each slice; and what a kernel may read beyond the end of the last one. */
enum { SLICE_ALIGN = 64 };

static int64_t dim_size(const struct model_config *c, enum model_dim dim)
{
    switch (dim) {
    case DIM_ONE:
        return 1;
    case DIM_MODEL:
        return c->d_model;
    case DIM_FFN:
        return c->d_ffn;
    case DIM_VOCAB:
        return c->vocab;
    case DIM_KEY:
        return c->key_dim;
    case DIM_Q:
        return c->n_heads * c->key_dim;
    case DIM_K:
        return c->n_kv_heads * c->key_dim;
    case DIM_V:
        return c->n_kv_heads * c->value_dim;
    case DIM_O:
        return c->n_heads * c->out_dim;
    case DIM_MLA_QA:
        return c->mla.q_rank;
    case DIM_MLA_Q_IN:
        return c->mla.q_rank > 0 ? c->mla.q_rank : c->d_model;
    case DIM_MLA_Q:
        return c->n_heads * (c->mla.nope_dim + c->mla.rope_dim);
    case DIM_MLA_KV:
        return c->mla.kv_rank;
    case DIM_MLA_KVA:
        return c->mla.kv_rank + c->mla.rope_dim;
    case DIM_EXPERTS:
        return c->moe.n_experts;
    }
    return 0;
}

/* This rank's part of n rows. */
static dcp_range split_rows(const struct model *m, enum split split, int64_t n)
{
    if (split == SPLIT_HEADS) {
        const int64_t per_head = n / m->cfg.n_heads;
        return (dcp_range){m->heads.begin * per_head, m->heads.end * per_head};
    }
    if (split == SPLIT_KV_HEADS) {
        const int64_t per_head = n / m->cfg.n_kv_heads;
        return (dcp_range){m->kv_heads.begin * per_head, m->kv_heads.end * per_head};
    }
    if (split == SPLIT_ROWS) return dcp_cut_range(n, m->n_ranks, m->rank);
    return (dcp_range){0, n};
}

const struct gguf_tensor *loader_find(struct loader *l, const char *name)
{
    const struct gguf_tensor *t = gguf_find(l->file, name);
    if (t != NULL) l->used[t - gguf_tensor_at(l->file, 0)] = true;
    return t;
}

dcp_status loader_check_shape(const struct loader *l, const struct gguf_tensor *t, int64_t d0,
                              int64_t d1, int64_t d2)
{
    if (t->dims[0] == d0 && t->dims[1] == d1 && t->dims[2] == d2 && t->dims[3] == 1) return DCP_OK;
    char third[32] = "";
    if (d2 != 1) snprintf(third, sizeof(third), ", %lld", (long long)d2);
    return dcp__fail(DCP_ERR_FORMAT,
                     "%s: tensor %s is [%lld, %lld, %lld, %lld], the metadata says [%lld, %lld%s]",
                     gguf_path(l->file), t->name, (long long)t->dims[0], (long long)t->dims[1],
                     (long long)t->dims[2], (long long)t->dims[3], (long long)d0, (long long)d1,
                     third);
}

static dcp_status find(struct loader *l, const char *name, const struct tensor_spec *s,
                       const struct gguf_tensor **tensor_out)
{
    const struct gguf_tensor *t = loader_find(l, name);
    *tensor_out = t;
    if (t == NULL && s->is_optional) return DCP_OK;
    if (t == NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: has no tensor %s", gguf_path(l->file), name);
    return loader_check_shape(l, t, dim_size(&l->m->cfg, s->cols), dim_size(&l->m->cfg, s->rows),
                              1);
}

void *loader_reserve(struct loader *l, size_t n_bytes)
{
    void *p = l->arena == NULL ? NULL : l->arena + l->at;
    l->at += (n_bytes + SLICE_ALIGN - 1) / SLICE_ALIGN * SLICE_ALIGN;
    return p;
}

void loader_account(struct loader *l, const char *name, enum split split, size_t n_bytes)
{
    struct model *m = l->m;
    const bool is_shared = split == SPLIT_KV_HEADS && m->kv_ranks > 1;
    const bool is_whole = split == SPLIT_NONE || (split == SPLIT_KV_HEADS && m->tp == 1);
    if (!is_shared && !is_whole) {
        m->share_bytes += n_bytes;
        return;
    }
    m->replicated_bytes += n_bytes;
    char item[48];
    const char *dot = strrchr(name, '.');
    const bool is_weight = dot != NULL && strcmp(dot, ".weight") == 0;
    snprintf(item, sizeof(item), "%.*s", (int)(is_weight ? (size_t)(dot - name) : strlen(name)),
             name);
    const size_t n = strlen(item), used = strlen(m->replicated_names);
    for (const char *at = m->replicated_names; (at = strstr(at, item)) != NULL; at += n)
        if ((at == m->replicated_names || at[-1] == ' ') && (at[n] == ',' || at[n] == 0)) return;
    snprintf(m->replicated_names + used, sizeof(m->replicated_names) - used, "%s%s",
             used > 0 ? ", " : "", item);
}

static dcp_status load_matrix(struct loader *l, const struct gguf_tensor *t, const char *name,
                              enum split split, struct weight *w)
{
    const dcp_range rows = split_rows(l->m, split, t->dims[1]);
    const size_t begin = (size_t)rows.begin * t->row_bytes;
    const size_t n_bytes = (size_t)(rows.end - rows.begin) * t->row_bytes;
    w->qtype = t->qtype;
    w->n_rows = rows.end - rows.begin;
    w->k = t->dims[0];
    w->row_bytes = t->row_bytes;
    void *dst = loader_reserve(l, n_bytes);
    w->data = dst;
    if (dst == NULL) return DCP_OK;
    loader_account(l, name, split, n_bytes);
    return gguf_read(l->file, t, begin, n_bytes, dst);
}

/* A vector becomes float whatever the file has. */
static dcp_status load_vector(struct loader *l, const struct gguf_tensor *t, const char *name,
                              enum split split, const float **v)
{
    const dcp_range part = split_rows(l->m, split, t->dims[0]);
    const size_t n = (size_t)(part.end - part.begin), n_all = (size_t)t->dims[0];
    float *dst = loader_reserve(l, n * sizeof(float));
    *v = dst;
    if (dst == NULL) return DCP_OK;
    loader_account(l, name, split, n_all == 0 ? 0 : t->n_bytes / n_all * n);
    void *raw = NULL, *all = NULL;
    dcp_status st = dcp__alloc(t->n_bytes + SLICE_ALIGN, "weight vector", &raw);
    if (st == DCP_OK) st = dcp__alloc_array(n_all, sizeof(float), "weight vector", &all);
    if (st == DCP_OK) st = gguf_read(l->file, t, 0, t->n_bytes, raw);
    if (st == DCP_OK) {
        l->kernels->dequant[t->qtype](raw, t->row_bytes, 1, t->dims[0], all, t->dims[0]);
        memcpy(dst, (const float *)all + part.begin, n * sizeof(float));
    }
    dcp__free(all);
    dcp__free(raw);
    return st;
}

/* prefix is "blk.N." or empty; base is what the spec's offset counts from. */
static dcp_status load_spec(struct loader *l, const char *prefix, const struct tensor_spec *s,
                            void *base)
{
    char name[96];
    snprintf(name, sizeof(name), "%s%s", prefix, s->name);
    const struct gguf_tensor *t = NULL;
    DCP_TRY(find(l, name, s, &t));
    if (t == NULL) return DCP_OK;
    unsigned char *at = (unsigned char *)base + s->offset;
    if (s->rows == DIM_ONE) {
        const float *v = NULL;
        DCP_TRY(load_vector(l, t, s->name, s->split, &v));
        memcpy(at, &v, sizeof(v));
        return DCP_OK;
    }
    struct weight w = {0};
    DCP_TRY(load_matrix(l, t, s->name, s->split, &w));
    memcpy(at, &w, sizeof(w));
    return DCP_OK;
}

static const struct tensor_spec whole_model[] = {
    {"token_embd.weight", offsetof(struct model, token_embd), DIM_VOCAB, DIM_MODEL, SPLIT_ROWS,
     false},
    {"output_norm.weight", offsetof(struct model, output_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE,
     false},
    {"output.weight", offsetof(struct model, output), DIM_VOCAB, DIM_MODEL, SPLIT_ROWS, true},
};

/* Divisors of the rotation frequencies: half as many as rotating elements. */
static dcp_status load_freqs(struct loader *l)
{
    const struct gguf_tensor *t = gguf_find(l->file, "rope_freqs.weight");
    if (t == NULL) return DCP_OK;
    l->used[t - gguf_tensor_at(l->file, 0)] = true;
    if (t->dims[0] != l->m->cfg.rope_dims / 2 || t->n_dims != 1)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: rope_freqs.weight has %lld values, %lld elements rotate",
                         gguf_path(l->file), (long long)t->dims[0], (long long)l->m->cfg.rope_dims);
    return load_vector(l, t, "rope_freqs.weight", SPLIT_NONE, &l->m->freq_divisors);
}

static dcp_status walk(struct loader *l)
{
    struct model *m = l->m;
    for (size_t i = 0; i < sizeof(whole_model) / sizeof(whole_model[0]); i++)
        DCP_TRY(load_spec(l, "", &whole_model[i], m));
    if (gguf_find(l->file, "output.weight") == NULL) m->output = m->token_embd;
    DCP_TRY(load_freqs(l));
    for (int64_t i = 0; i < m->cfg.n_layers; i++) {
        char prefix[32];
        snprintf(prefix, sizeof(prefix), "blk.%lld.", (long long)i);
        for (int j = 0; j < m->arch->n_tensors; j++)
            DCP_TRY(load_spec(l, prefix, &m->arch->tensors[j], &m->layers[i]));
        if (m->cfg.mla.kv_rank > 0) DCP_TRY(loader_mla(l, prefix, &m->layers[i]));
        if (m->cfg.moe.n_experts > 0 && i >= m->cfg.moe.n_dense)
            DCP_TRY(loader_experts(l, prefix, &m->layers[i]));
    }
    return DCP_OK;
}

/* A tensor that nobody asked for would be left out of the arithmetic: wrong text without an error.
 */
static dcp_status check_all_used(const struct loader *l)
{
    for (size_t i = 0; i < gguf_n_tensors(l->file); i++)
        if (!l->used[i])
            return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                             "%s: tensor %.80s is not part of architecture %s as it is known here",
                             gguf_path(l->file), gguf_tensor_at(l->file, i)->name,
                             l->m->arch->name);
    return DCP_OK;
}

static dcp_attend_desc heads_desc(const struct model *m)
{
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.n_heads = m->cfg.n_heads;
    desc.n_kv_heads = m->cfg.n_kv_heads;
    desc.key_dim = m->cfg.key_dim;
    desc.value_dim = m->cfg.value_dim;
    desc.tp = m->tp;
    return desc;
}

dcp_range model_heads(const struct model *m, int rank)
{
    const dcp_attend_desc desc = heads_desc(m);
    return dcp_attend_heads(&desc, m->n_ranks, rank);
}

/* Own query heads, and the KV heads of this rank's head group. */
static dcp_status group_heads(struct model *m)
{
    if (m->tp > 1 && model_is_latent(&m->cfg))
        return dcp__fail(DCP_ERR_ARG,
                         "tp: %d head groups; the latent cache of this model has one head", m->tp);
    if (m->tp < 1 || m->n_ranks % m->tp != 0 || m->cfg.n_kv_heads % m->tp != 0)
        return dcp__fail(DCP_ERR_ARG,
                         "tp: %d head groups; the number must divide the %d ranks and the model's "
                         "%lld KV heads",
                         m->tp, m->n_ranks, (long long)m->cfg.n_kv_heads);
    const dcp_attend_desc desc = heads_desc(m);
    m->kv_ranks = m->n_ranks / m->tp;
    m->kv_rank = m->rank % m->kv_ranks;
    m->kv_heads = dcp_attend_kv_heads(&desc, m->n_ranks, m->rank);
    m->heads = model_heads(m, m->rank);
    return DCP_OK;
}

static dcp_status load(struct loader *l, enum mla_form form)
{
    struct model *m = l->m;
    void *p = NULL;
    DCP_TRY(model_read_config(l->file, &m->arch, &m->cfg));
    model_set_mla(&m->cfg, form);
    DCP_TRY(group_heads(m));
    m->cols = dcp_cut_range(m->cfg.d_model, m->n_ranks, m->rank);
    m->ffn = dcp_cut_range(m->cfg.d_ffn, m->n_ranks, m->rank);
    m->vocab = dcp_cut_range(m->cfg.vocab, m->n_ranks, m->rank);
    m->q_rank = dcp_cut_range(m->cfg.mla.q_rank, m->n_ranks, m->rank);
    m->experts = dcp_cut_range(m->cfg.moe.n_experts, m->n_ranks, m->rank);
    m->d_expert = dcp_cut_range(m->cfg.moe.d_expert, m->n_ranks, m->rank);
    m->d_shared = dcp_cut_range(m->cfg.moe.d_shared, m->n_ranks, m->rank);
    DCP_TRY(dcp__alloc_array((size_t)m->cfg.n_layers, sizeof(struct layer), "layers", &p));
    m->layers = p;
    DCP_TRY(dcp__alloc_array(gguf_n_tensors(l->file), sizeof(bool), "tensor marks", &p));
    l->used = p;
    DCP_TRY(walk(l));
    DCP_TRY(check_all_used(l));
    DCP_TRY(dcp__alloc(l->at + SLICE_ALIGN, "weights", &m->arena));
    l->arena = m->arena;
    l->at = 0;
    return walk(l);
}

dcp_status model_load(const struct gguf *file, int n_ranks, int rank, enum mla_form form,
                      struct model **out)
{
    return model_load_tp(file, n_ranks, rank, form, 1, out);
}

dcp_status model_load_tp(const struct gguf *file, int n_ranks, int rank, enum mla_form form, int tp,
                         struct model **out)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct model), "model", &p));
    struct dcp__kernels kernels;
    dcp__kernels_select(DCP_ISA_SCALAR, &kernels); /* vectors only: speed does not matter */
    struct loader l = {.file = file, .m = p, .kernels = &kernels};
    l.m->n_ranks = n_ranks;
    l.m->rank = rank;
    l.m->tp = tp;
    const dcp_status st = load(&l, form);
    dcp__free(l.used);
    if (st != DCP_OK) {
        model_free(l.m);
        return st;
    }
    *out = l.m;
    return DCP_OK;
}

void model_free(struct model *m)
{
    if (m == NULL) return;
    dcp__free(m->arena);
    dcp__free(m->layers);
    dcp__free(m);
}
