/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/forward.h"

#include <string.h>

#include "base/clock_priv.h"
#include "base/status_priv.h"

/* --- small tools --- */

/* Products ys[i] = x ws[i]^T, timed. */
static dcp_status products(struct forward *f, const struct weight *const *ws, int n_ws,
                           const float *x, int64_t x_stride, int64_t n, float *const *ys,
                           const int64_t *y_strides)
{
    const double t0 = dcp__now_s();
    DCP_TRY(linear_run_many(f->linear, ws, n_ws, x, x_stride, n, ys, y_strides));
    f->times.dense_s += dcp__now_s() - t0;
    return DCP_OK;
}

/* Every rank's columns of buf (n, width) become whole on every rank, timed. LOOSE where another
 * collective call lies between this gather and the next write to buf (o, a, h inside the layers: the
 * next gather or attention): a barrier less, 4 a layer. FENCED before what writes at once: the next
 * chunk's embedding after the last layer, the next tile of logits. */
enum fence { LOOSE, FENCED };
static dcp_status gather(struct forward *f, float *buf, int64_t n, int64_t width,
                         const size_t *col_off_bytes, enum fence fence)
{
    const int n_ranks = f->model->n_ranks, rank = f->model->rank;
    if (n_ranks == 1 || n == 0) return DCP_OK;
    const double t0 = dcp__now_s();
    const size_t stride = (size_t)width * sizeof(float);
    DCP_TRY((fence == FENCED ? dcp_group_gather_cols : dcp_group_gather_cols_unfenced)(
        f->group, buf, (size_t)n, stride, col_off_bytes));
    f->times.gather_s += dcp__now_s() - t0;
    const size_t own = col_off_bytes[rank + 1] - col_off_bytes[rank];
    f->times.other_wire_bytes += (uint64_t)n * (col_off_bytes[n_ranks] - own);
    return DCP_OK;
}

static int64_t range_size(dcp_range r)
{
    return r.end - r.begin;
}

/* --- begin and end of the pass --- */

/* x [T, d] = rows ids of the embedding. Each rank fills in the rows of its own part of the
 * vocabulary, sorted by rank into one long row, which is gathered; all ranks know the counts. */
static dcp_status embed(struct forward *f, const int32_t *ids)
{
    const struct model *m = f->model;
    const int64_t d = m->cfg.d_model, n = f->n_tokens;
    int64_t at = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        const dcp_range part = dcp_cut_range(m->cfg.vocab, m->n_ranks, r);
        f->embd_off[r] = (size_t)(at * d) * sizeof(float);
        for (int64_t t = 0; t < n; t++) {
            if (ids[t] < part.begin || ids[t] >= part.end) continue;
            f->slots[t] = (int32_t)at;
            if (r == m->rank)
                DCP_TRY(linear_row(f->linear, &m->token_embd, ids[t] - part.begin, f->a + at * d));
            at++;
        }
    }
    f->embd_off[m->n_ranks] = (size_t)(at * d) * sizeof(float);
    DCP_TRY(gather(f, f->a, 1, n * d, f->embd_off, LOOSE));
    for (int64_t t = 0; t < n; t++)
        memcpy(f->x + t * d, f->a + f->slots[t] * d, (size_t)d * sizeof(float));
    if (m->cfg.embed_scale != 1.0f)
        ew_scale(f->pool, &(struct rows){f->x, n, d, d}, m->cfg.embed_scale);
    return DCP_OK;
}

/* The residual of the rows in work is the same on all ranks, and so is what this says of it. */
static dcp_status check_residual(const struct forward *f, const char *where, int64_t l)
{
    const int64_t d = f->model->cfg.d_model, n = f->n_rows;
    for (int64_t t = 0; t < n; t++) {
        const struct rows row = {f->x + (f->row0 + t) * d, 1, d, d};
        if (ew_is_finite(&row)) continue;
        return dcp__fail(DCP_ERR_NONFINITE,
                         "%s %lld: NaN or infinity in the hidden state of position %lld", where,
                         (long long)l, (long long)(f->pos0 + f->row0 + t));
    }
    return DCP_OK;
}

/* Which tokens of the chunk this rank owns, and the angles of its positions. */
static void begin_chunk(struct forward *f, int64_t n, int64_t pos0, bool needs_all_rows)
{
    const struct model *m = f->model;
    f->n_tokens = n;
    f->pos0 = pos0;
    f->row0 = 0;
    f->n_rows = n;
    f->needs_all_rows = needs_all_rows;
    f->own_local = dcp_local_length(pos0, m->n_ranks, m->rank, f->interleave);
    f->n_own = 0;
    for (int64_t t = 0; t < n; t++)
        if (dcp_pos_owner(pos0 + t, m->n_ranks, f->interleave) == m->rank)
            f->own_rows[f->n_own++] = (int32_t)t;
    for (int i = 0; i < m->cfg.n_ropes; i++)
        ew_rope_table(f->pool, &m->cfg.ropes[i], m->freq_divisors, m->cfg.rope_dims, pos0, n,
                      f->cos_sin[i]);
}

dcp_status forward_chunk(struct forward *f, const int32_t *ids, int64_t n, int64_t pos0,
                         bool needs_all_rows)
{
    begin_chunk(f, n, pos0, needs_all_rows);
    DCP_TRY(embed(f, ids));
    DCP_TRY(check_residual(f, "embedding, before layer", 0));
    for (int64_t l = 0; l < f->model->cfg.n_layers; l++) {
        DCP_TRY(f->model->arch->block(f, l));
        DCP_TRY(check_residual(f, "after layer", l));
    }
    return DCP_OK;
}

dcp_status forward_logits(struct forward *f, int64_t first, int64_t n)
{
    const struct model *m = f->model;
    const int64_t d = m->cfg.d_model, vocab = m->cfg.vocab;
    /* y (n, d) = norm(x) */
    ew_norm(f->pool, &(struct rows){f->y, n, d, d}, f->x + first * d, d, m->output_norm,
            m->cfg.norm_eps);
    /* logits (n, vocab): own ids, then everybody's */
    float *own = f->logits + m->vocab.begin;
    DCP_TRY(products(f, (const struct weight *const[]){&m->output}, 1, f->y, d, n,
                     (float *const[]){own}, (const int64_t[]){vocab}));
    if (m->cfg.logit_softcap > 0)
        ew_softcap(f->pool, &(struct rows){own, n, range_size(m->vocab), vocab},
                   m->cfg.logit_softcap);
    DCP_TRY(gather(f, f->logits, n, vocab, f->vocab_off, FENCED));
    for (int64_t t = 0; t < n; t++) {
        if (ew_is_finite(&(struct rows){f->logits + t * vocab, 1, vocab, vocab})) continue;
        return dcp__fail(DCP_ERR_NONFINITE, "NaN or infinity in the logits of position %lld",
                         (long long)(f->pos0 + first + t));
    }
    return DCP_OK;
}

/* --- steps of a block --- */

void forward_norm(struct forward *f, const float *w)
{
    const int64_t d = f->model->cfg.d_model;
    ew_norm(f->pool, &(struct rows){f->y + f->row0 * d, f->n_rows, d, d}, f->x + f->row0 * d, d, w,
            f->model->cfg.norm_eps);
}

void forward_add(struct forward *f, const float *w)
{
    const int64_t d = f->model->cfg.d_model;
    ew_add_norm(f->pool, &(struct rows){f->x + f->row0 * d, f->n_rows, d, d}, f->a, d, w,
                f->model->cfg.norm_eps);
}

/* k (T_own, Hkv, Dk) and v (T_own, Hkv, D) of own tokens, and q (T, H_r, Dk) of own heads. */
dcp_status forward_qkv(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct layer *w = &m->layers[l];
    const int64_t d = m->cfg.d_model, n_own = f->n_own;

    /* y_own (T_own, d): the rows of own tokens side by side */
    const float *y_own = f->y;
    if (n_own < f->n_tokens) {
        for (int64_t j = 0; j < n_own; j++)
            memcpy(f->y_own + j * d, f->y + f->own_rows[j] * d, (size_t)d * sizeof(float));
        y_own = f->y_own;
    }

    /* the last layer's other rows end here: only their keys and values are needed */
    if (l == m->cfg.n_layers - 1 && !f->needs_all_rows) {
        f->row0 = f->n_tokens - 1;
        f->n_rows = 1;
    }

    /* one pass over x where q, k and v are wanted for the same rows */
    const struct weight *const ws[3] = {&w->wq, &w->wk, &w->wv};
    float *const ys[3] = {f->q, f->k, f->v};
    const int64_t strides[3] = {w->wq.n_rows, w->wk.n_rows, w->wv.n_rows};
    const bool same_rows = n_own == f->n_rows && n_own == f->n_tokens;
    DCP_TRY(products(f, ws, same_rows ? 3 : 1, f->y + f->row0 * d, d, f->n_rows, ys, strides));
    if (!same_rows) DCP_TRY(products(f, ws + 1, 2, y_own, d, n_own, ys + 1, strides + 1));

    const float *const biases[3] = {w->bq, w->bk, w->bv};
    for (int i = 0; i < 3; i++)
        if (biases[i] != NULL)
            ew_add_bias(f->pool,
                        &(struct rows){ys[i], i == 0 ? f->n_rows : n_own, strides[i], strides[i]},
                        biases[i]);
    return DCP_OK;
}

/* q and k as rows for the element-wise steps. */
static struct rows q_rows(const struct forward *f)
{
    const int64_t width = range_size(f->model->heads) * f->model->cfg.key_dim;
    return (struct rows){f->q, f->n_rows, width, width};
}

static struct rows k_rows(const struct forward *f)
{
    const int64_t width = f->model->cfg.n_kv_heads * f->model->cfg.key_dim;
    return (struct rows){f->k, f->n_own, width, width};
}

void forward_qk_norm(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const struct layer *w = &f->model->layers[l];
    const struct rows q = q_rows(f), k = k_rows(f);
    ew_norm_heads(f->pool, &q, c->key_dim, w->q_norm, c->norm_eps);
    ew_norm_heads(f->pool, &k, c->key_dim, w->k_norm, c->norm_eps);
}

void forward_rope(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const float *table = f->cos_sin[c->layers[l].rope];
    const struct rows q = q_rows(f), k = k_rows(f);
    ew_rope(f->pool, &q, c->key_dim, c->rope_dims, c->rope_pairs, table + f->row0 * c->rope_dims,
            NULL);
    ew_rope(f->pool, &k, c->key_dim, c->rope_dims, c->rope_pairs, table, f->own_rows);
}

dcp_status forward_attend(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct model_config *c = &m->cfg;
    const int64_t k_width = c->n_kv_heads * c->key_dim, v_width = c->n_kv_heads * c->value_dim;
    const int64_t o_width = c->n_heads * c->value_dim;

    /* An infinite key may give every score -inf, which looks like a row that sees nothing; a NaN
     * cannot be overlooked: some rank counts it, and all ranks learn the counts. */
    const struct rows q = q_rows(f), k = k_rows(f);
    ew_spread_nan(f->pool, &q);
    ew_spread_nan(f->pool, &k);

    /* new tokens first, so that one path serves prompts and single tokens */
    DCP_TRY(dcp_cache_store(f->cache, 0, l, f->own_local, f->n_own, f->k, k_width, f->v, v_width));
    dcp_kv_view view = {0};
    DCP_TRY(dcp_cache_view(f->cache, 0, l, &view));

    /* o (R, H, D): own heads */
    const dcp_attend_seq seq = {&view, f->pos0 + f->n_tokens, f->n_rows, c->layers[l].window};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.q = f->q;
    args.out = f->o + m->heads.begin * c->value_dim;
    args.out_token_stride = o_width;
    dcp_attend_stats stats = DCP_ATTEND_STATS_INIT;
    DCP_TRY(dcp_attend_run(f->attend, &args, &stats));
    if (stats.nonfinite_values + stats.lse_bad > 0)
        return dcp__fail(DCP_ERR_NONFINITE,
                         "attention of layer %lld, positions %lld to %lld: %lld values and %lld "
                         "LSEs are NaN or infinite",
                         (long long)l, (long long)(f->pos0 + f->row0),
                         (long long)(f->pos0 + f->n_tokens - 1), (long long)stats.nonfinite_values,
                         (long long)stats.lse_bad);
    f->times.attend_s += stats.partial_s;
    f->times.merge_s += stats.merge_s;
    f->times.gather_s += stats.gather_s;
    f->times.merge_wire_bytes += (uint64_t)stats.merge_wire_bytes;
    f->times.other_wire_bytes += (uint64_t)(stats.wire_bytes - stats.merge_wire_bytes);

    /* o (R, H, D): everybody's heads */
    return gather(f, f->o, f->n_rows, o_width, f->o_off, LOOSE);
}

/* a (R, d) = x w^T, own columns, then everybody's. */
static dcp_status product_to_a(struct forward *f, const struct weight *w, const float *bias,
                               const float *x, int64_t x_width, enum fence fence)
{
    const int64_t d = f->model->cfg.d_model;
    float *own = f->a + f->model->cols.begin;
    DCP_TRY(products(f, (const struct weight *const[]){w}, 1, x, x_width, f->n_rows,
                     (float *const[]){own}, (const int64_t[]){d}));
    if (bias != NULL) ew_add_bias(f->pool, &(struct rows){own, f->n_rows, w->n_rows, d}, bias);
    return gather(f, f->a, f->n_rows, d, f->cols_off, fence);
}

dcp_status forward_attn_out(struct forward *f, int64_t l)
{
    const struct layer *w = &f->model->layers[l];
    return product_to_a(f, &w->wo, w->bo, f->o, w->wo.k, LOOSE);
}

dcp_status forward_ffn(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct layer *w = &m->layers[l];
    const int64_t d = m->cfg.d_model, ffn = m->cfg.d_ffn, own = range_size(m->ffn);
    const float *y = f->y + f->row0 * d;
    float *gate = f->h + m->ffn.begin;

    /* gate into h (R, ffn) own columns, up (R, ffn_r) */
    DCP_TRY(products(f, (const struct weight *const[]){&w->gate, &w->up}, 2, y, d, f->n_rows,
                     (float *const[]){gate, f->up}, (const int64_t[]){ffn, own}));
    /* h = act(gate) * up, own columns, then everybody's */
    ew_gate(f->pool, &(struct rows){gate, f->n_rows, own, ffn}, f->up, own, m->cfg.activation);
    DCP_TRY(gather(f, f->h, f->n_rows, ffn, f->ffn_off, LOOSE));
    const bool is_last = l + 1 == m->cfg.n_layers;
    return product_to_a(f, &w->down, NULL, f->h, ffn, is_last ? FENCED : LOOSE);
}
