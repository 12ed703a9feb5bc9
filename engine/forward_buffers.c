/* SPDX-License-Identifier: Apache-2.0 */
/* The buffers of the forward pass: sizes as in forward.h, nothing allocated while it runs. One list
 * says what there is; its bytes can be had without taking them. */
#include <assert.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/forward_priv.h"

/* (n, width) of four bytes each (a double is two); in group memory where peers read it. */
struct buffer {
    void *place; /* float **, int32_t ** or double ** */
    int64_t n, width;
    bool is_shared;
};
enum { MAX_BUFFERS = 40 };

struct buffer_list {
    struct buffer items[MAX_BUFFERS];
    int n;
};

static void add(struct buffer_list *list, void *place, int64_t n, int64_t width, bool is_shared)
{
    assert(list->n < MAX_BUFFERS);
    if (width > 0) list->items[list->n++] = (struct buffer){place, n, width, is_shared};
}

static void add_mla(struct buffer_list *list, struct forward *f, int64_t n, int64_t n_own)
{
    const struct model *m = f->model;
    const struct mla_config *a = &m->cfg.mla;
    if (a->kv_rank == 0) return;
    add(list, &f->mla.q_a, n, a->q_rank, true);
    add(list, &f->mla.q_a_normed, n, a->q_rank, false);
    if (model_is_latent(&m->cfg))
        add(list, &f->mla.q, n, range_size(m->heads) * (a->nope_dim + a->rope_dim), false);
    else
        add(list, &f->mla.latent, n_own, a->kv_rank + a->rope_dim, false);
}

static void add_moe(struct buffer_list *list, struct forward *f, int64_t n)
{
    const struct model *m = f->model;
    const struct moe_config *e = &m->cfg.moe;
    struct forward_moe *b = &f->moe;
    if (e->n_experts == 0) return;
    const int64_t n_pairs = n * e->n_used;
    add(list, &b->scores, n, e->n_experts, true);
    add(list, &b->h, n_pairs, e->d_expert, true);
    add(list, &b->x, n, m->cfg.d_model, false);
    add(list, &b->up, n, range_size(m->d_expert), false);
    add(list, &b->out, n, range_size(m->cols), false);
    add(list, &b->weights, n_pairs, 1, false);
    add(list, &b->rows, n_pairs, 1, false);
    add(list, &b->chosen, n, e->n_used, false);
    add(list, &b->chosen_p, n, e->n_used, false);
    add(list, &b->first, e->n_experts + 1, 1, false);
    add(list, &b->shared_h, n, e->d_shared, true);
    add(list, &b->shared_up, n, range_size(m->d_shared), false);
}

/* All but the logits. f needs model, interleave, max_tokens and tile_rows. */
static void list_buffers(struct forward *f, struct buffer_list *list)
{
    const struct model *m = f->model;
    const struct model_config *c = &m->cfg;
    const int64_t n = f->max_tokens, tile = f->tile_rows, h_own = range_size(m->heads);
    /* tokens of a tile that one rank can own: whole interleave blocks, one cut at either end */
    const int64_t block = m->kv_ranks * f->interleave;
    const int64_t n_own = min_i64((tile / block + 1) * f->interleave + f->interleave, tile);
    const bool is_latent = model_is_latent(c), is_mapped = is_latent && c->mla.form == MLA_ABSORBED;
    list->n = 0;
    /* what grows with the chunk */
    add(list, &f->own_rows, n, 1, false);
    add(list, &f->x, n, c->d_model, false);
    add(list, &f->q, n, h_own * c->key_dim, false);
    if (n > tile || is_mapped) add(list, &f->attn, n, h_own * model_attn_dim(c), false);
    /* of a tile */
    for (int i = 0; i < c->n_ropes; i++) {
        add(list, &f->turns[i], c->rope_dims, sizeof(double) / sizeof(float), false);
        add(list, &f->cos_sin[i], tile, c->rope_dims, false);
    }
    add(list, &f->slots, tile, 1, false);
    add(list, &f->y, tile, c->d_model, false);
    const int64_t n_kv = range_size(m->kv_heads);
    if (m->kv_ranks > 1) add(list, &f->y_own, n_own, c->d_model, false);
    add(list, &f->k, n_own, n_kv * c->key_dim, false);
    if (!is_latent) add(list, &f->v, n_own, n_kv * c->value_dim, false);
    add(list, &f->up, tile, range_size(m->ffn), false);
    add_mla(list, f, tile, n_own);
    /* collective from here on: the order is the same on all ranks */
    if (forward_shares_kv(m)) add(list, &f->kv, 1, n_kv * (c->key_dim + c->value_dim), true);
    add(list, &f->o, tile, c->n_heads * c->out_dim, true);
    add(list, &f->a, tile, c->d_model, true);
    add(list, &f->h, tile, c->d_ffn, true);
    add_moe(list, f, tile);
}

static dcp_status size_of(const struct buffer *b, size_t *n_bytes_out)
{
    size_t n_elems;
    if (dcp__mul_overflow((size_t)b->n, (size_t)b->width, &n_elems) ||
        dcp__mul_overflow(n_elems, sizeof(float), n_bytes_out))
        return dcp__fail(DCP_ERR_ARG, "activations: %lld x %lld floats", (long long)b->n,
                         (long long)b->width);
    return DCP_OK;
}

static dcp_status take(struct forward *f, const struct buffer *b)
{
    size_t n_bytes;
    void *p = NULL;
    DCP_TRY(size_of(b, &n_bytes));
    DCP_TRY(b->is_shared ? dcp_group_alloc(f->group, n_bytes, &p)
                         : dcp__alloc(n_bytes, "activations", &p));
    memcpy(b->place, &p, sizeof(p));
    f->activation_bytes += n_bytes;
    return DCP_OK;
}

static dcp_status take_all(struct forward *f, bool shared)
{
    struct buffer_list list;
    list_buffers(f, &list);
    for (int i = 0; i < list.n; i++)
        if (list.items[i].is_shared == shared) DCP_TRY(take(f, &list.items[i]));
    return DCP_OK;
}

size_t forward_bytes(const struct model *m, int64_t interleave, int64_t max_tokens,
                     int64_t tile_rows)
{
    struct forward f = {.model = m,
                        .interleave = interleave,
                        .max_tokens = max_tokens,
                        .tile_rows = min_i64(tile_rows, max_tokens)};
    struct buffer_list list;
    size_t sum = (size_t)m->cfg.vocab * sizeof(float);
    list_buffers(&f, &list);
    for (int i = 0; i < list.n; i++) {
        size_t n_bytes = 0;
        if (size_of(&list.items[i], &n_bytes) != DCP_OK) return SIZE_MAX;
        sum += n_bytes;
    }
    return sum;
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

/* Rows of k and v of a single token that ranks up to this one make: with its rows of q each has
 * about as many. In whole groups of rows that kernels take at a time. */
static int64_t kv_end(const struct model *m, int rank)
{
    enum { GROUP = 8 };
    const struct model_config *c = &m->cfg;
    const int64_t n_kv = range_size(m->kv_heads) * (c->key_dim + c->value_dim);
    const int64_t n_all = c->n_heads * c->key_dim + n_kv;
    int64_t end = 0;
    for (int r = 0; r < rank + 1; r++) {
        const int64_t n_q = model_heads(m, r).end * c->key_dim;
        const int64_t goal = (n_all * (r + 1) / m->n_ranks - n_q) / GROUP * GROUP;
        if (goal > end) end = min_i64(goal, n_kv);
    }
    return rank + 1 == m->n_ranks ? n_kv : end;
}

dcp_status forward_init_own(struct forward *f)
{
    const struct model_config *c = &f->model->cfg;
    DCP_TRY(take_all(f, false));
    for (int i = 0; i < c->n_ropes; i++) ew_rope_turns(&c->ropes[i], c->rope_dims, f->turns[i]);
    DCP_TRY(offsets(f, 0, 0, &f->embd_off));
    DCP_TRY(offsets(f, c->n_heads, c->out_dim, &f->o_off));
    for (int r = 0; r < f->model->n_ranks; r++)
        f->o_off[r + 1] = (size_t)(model_heads(f->model, r).end * c->out_dim) * sizeof(float);
    DCP_TRY(offsets(f, 0, 0, &f->kv_off));
    for (int r = 0; r < f->model->n_ranks && forward_shares_kv(f->model); r++)
        f->kv_off[r + 1] = (size_t)kv_end(f->model, r) * sizeof(float);
    DCP_TRY(offsets(f, c->d_model, 1, &f->cols_off));
    DCP_TRY(offsets(f, c->d_ffn, 1, &f->ffn_off));
    DCP_TRY(offsets(f, c->mla.q_rank, 1, &f->mla.q_a_off));
    DCP_TRY(offsets(f, c->moe.n_experts, 1, &f->moe.scores_off));
    DCP_TRY(offsets(f, c->moe.d_expert, 1, &f->moe.h_off));
    DCP_TRY(offsets(f, c->moe.d_shared, 1, &f->moe.shared_off));
    return offsets(f, c->vocab, 1, &f->vocab_off);
}

dcp_status forward_init_group(struct forward *f)
{
    DCP_TRY(take_all(f, true));
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
    DCP_TRY(take(f, &(struct buffer){&f->logits, n_rows, vocab, true}));
    f->logit_rows = n_rows;
    return DCP_OK;
}

void forward_fini(struct forward *f)
{
    struct buffer_list list;
    dcp_group_free(f->group, f->logits);
    if (f->model != NULL && f->tile_rows > 0) {
        list_buffers(f, &list);
        for (int i = list.n - 1; i >= 0; i--) {
            void *p;
            memcpy(&p, list.items[i].place, sizeof(p));
            if (list.items[i].is_shared)
                dcp_group_free(f->group, p);
            else
                dcp__free(p);
        }
    }
    size_t *const offs[] = {f->vocab_off,   f->ffn_off,        f->cols_off,  f->o_off,
                            f->embd_off,    f->moe.scores_off, f->moe.h_off, f->moe.shared_off,
                            f->mla.q_a_off, f->kv_off};
    for (size_t i = 0; i < sizeof(offs) / sizeof(offs[0]); i++) dcp__free(offs[i]);
}
