/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/forward_priv.h"

#include <string.h>

#include "base/clock_priv.h"
#include "base/status_priv.h"

/* --- small tools --- */

dcp_status forward_products(struct forward *f, const struct weight *const *ws, int n_ws,
                            const float *x, int64_t x_stride, int64_t n, float *const *ys,
                            const int64_t *y_strides)
{
    const double t0 = dcp__now_s();
    DCP_TRY(linear_run_many(f->linear, ws, n_ws, x, x_stride, n, ys, y_strides));
    f->times.dense_s += dcp__now_s() - t0;
    return DCP_OK;
}

dcp_status forward_gather(struct forward *f, float *buf, int64_t n, int64_t width,
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

const float *forward_own_y(struct forward *f)
{
    const int64_t d = f->model->cfg.d_model;
    if (f->n_own == f->n_rows) return f->y;
    for (int64_t j = 0; j < f->n_own; j++)
        memcpy(f->y_own + j * d, f->y + (f->own_rows[f->own_at + j] - f->row0) * d,
               (size_t)d * sizeof(float));
    return f->y_own;
}

/* --- begin and end of the pass --- */

/* x (n, d) from row at = rows ids of the embedding. Each rank fills in the rows of its own part of
 * the vocabulary, sorted by rank into one long row, which is gathered;
 * all ranks know the counts. */
static dcp_status embed(struct forward *f, const int32_t *ids, int64_t at, int64_t n,
                        enum fence fence)
{
    const struct model *m = f->model;
    const int64_t d = m->cfg.d_model;
    float *x = f->x + at * d;
    int64_t n_done = 0;
    for (int r = 0; r < m->n_ranks; r++) {
        const dcp_range part = dcp_cut_range(m->cfg.vocab, m->n_ranks, r);
        f->embd_off[r] = (size_t)(n_done * d) * sizeof(float);
        for (int64_t t = 0; t < n; t++) {
            if (ids[t] < part.begin || ids[t] >= part.end) continue;
            f->slots[t] = (int32_t)n_done;
            if (r == m->rank)
                DCP_TRY(
                    linear_row(f->linear, &m->token_embd, ids[t] - part.begin, f->a + n_done * d));
            n_done++;
        }
    }
    f->embd_off[m->n_ranks] = (size_t)(n_done * d) * sizeof(float);
    DCP_TRY(forward_gather(f, f->a, 1, n * d, f->embd_off, fence));
    for (int64_t t = 0; t < n; t++)
        memcpy(x + t * d, f->a + f->slots[t] * d, (size_t)d * sizeof(float));
    if (m->cfg.embed_scale != 1.0f)
        ew_scale(f->pool, &(struct rows){x, n, d, d}, m->cfg.embed_scale);
    return DCP_OK;
}

/* The residual of the rows in work is the same on all ranks, and so is what this says of it. */
static dcp_status check_residual(const struct forward *f, const char *where, int64_t l)
{
    const int64_t d = f->model->cfg.d_model;
    for (int64_t t = f->live0; t < f->n_tokens; t++) {
        const struct rows row = {f->x + t * d, 1, d, d};
        if (ew_is_finite(&row)) continue;
        return dcp__fail(DCP_ERR_NONFINITE,
                         "%s %lld: NaN or infinity in the hidden state of position %lld", where,
                         (long long)l, (long long)(f->pos0 + t));
    }
    return DCP_OK;
}

/* Which tokens of the chunk this rank owns. */
static void begin_chunk(struct forward *f, int64_t n, int64_t pos0, bool needs_all_rows)
{
    const struct model *m = f->model;
    f->n_tokens = n;
    f->pos0 = pos0;
    f->live0 = 0;
    f->needs_all_rows = needs_all_rows;
    f->own_local = dcp_local_length(pos0, m->kv_ranks, m->kv_rank, f->interleave);
    int64_t n_own = 0;
    for (int64_t t = 0; t < n; t++)
        if (dcp_pos_owner(pos0 + t, m->kv_ranks, f->interleave) == m->kv_rank)
            f->own_rows[n_own++] = (int32_t)t;
    for (int i = 0; i < m->cfg.n_ropes; i++) f->cos_sin_row0[i] = -1;
}

/* Tables are known by their first row alone: before attention every tile of a chunk that begins
 * there has the same rows, and that is where turns are needed. */
const float *forward_angles(struct forward *f, int i)
{
    const struct model_config *c = &f->model->cfg;
    if (f->cos_sin_row0[i] != f->row0)
        ew_rope_table(f->pool, &c->ropes[i], f->turns[i], f->model->freq_divisors, c->rope_dims,
                      f->pos0 + f->row0, f->n_rows, f->cos_sin[i]);
    f->cos_sin_row0[i] = f->row0;
    return f->cos_sin[i];
}

/* The tile begins at row; -> the row behind it. */
static int64_t begin_tile(struct forward *f, int64_t row)
{
    const int n = f->model->kv_ranks, rank = f->model->kv_rank;
    const int64_t end = min_i64(row + f->tile_rows, f->n_tokens);
    f->row0 = row;
    f->n_rows = end - row;
    f->own_at = dcp_local_length(f->pos0 + row, n, rank, f->interleave) - f->own_local;
    f->n_own = dcp_local_length(f->pos0 + end, n, rank, f->interleave) - f->own_local - f->own_at;
    return end;
}

static dcp_status attend(struct forward *f, int64_t l);
static dcp_status gather_o(struct forward *f, int64_t l);

static dcp_status run_layer(struct forward *f, int64_t l)
{
    const struct arch *arch = f->model->arch;
    /* the last layer's other rows end at attention: only their keys and values are needed */
    const bool is_last = l == f->model->cfg.n_layers - 1;
    f->live0 = is_last && !f->needs_all_rows ? f->n_tokens - 1 : 0;
    /* new tokens first, so that one path serves prompts and single tokens */
    for (int64_t row = 0; row < f->n_tokens;) {
        row = begin_tile(f, row);
        DCP_TRY(arch->before_attention(f, l));
    }
    DCP_TRY(attend(f, l));
    for (int64_t row = f->live0; row < f->n_tokens;) {
        row = begin_tile(f, row);
        DCP_TRY(gather_o(f, l));
        DCP_TRY(arch->after_attention(f, l));
    }
    return DCP_OK;
}

dcp_status forward_chunk(struct forward *f, const int32_t *ids, int64_t n, int64_t pos0,
                         bool needs_all_rows)
{
    begin_chunk(f, n, pos0, needs_all_rows);
    for (int64_t at = 0; at < n; at += f->tile_rows)
        DCP_TRY(embed(f, ids + at, at, min_i64(f->tile_rows, n - at),
                      at + f->tile_rows < n ? FENCED : LOOSE));
    DCP_TRY(check_residual(f, "embedding, before layer", 0));
    for (int64_t l = 0; l < f->model->cfg.n_layers; l++) {
        DCP_TRY(run_layer(f, l));
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
    DCP_TRY(forward_products(f, (const struct weight *const[]){&m->output}, 1, f->y, d, n,
                             (float *const[]){own}, (const int64_t[]){vocab}));
    if (m->cfg.logit_softcap > 0)
        ew_softcap(f->pool, &(struct rows){own, n, range_size(m->vocab), vocab},
                   m->cfg.logit_softcap);
    DCP_TRY(forward_gather(f, f->logits, n, vocab, f->vocab_off, FENCED));
    for (int64_t t = 0; t < n; t++) {
        if (ew_is_finite(&(struct rows){f->logits + t * vocab, 1, vocab, vocab})) continue;
        return dcp__fail(DCP_ERR_NONFINITE, "NaN or infinity in the logits of position %lld",
                         (long long)(f->pos0 + first + t));
    }
    return DCP_OK;
}

/* --- attention --- */

static dcp_status attend(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct model_config *c = &m->cfg;
    dcp_kv_view view = {0};
    dcp_kv_scales scales = {0};
    DCP_TRY(dcp_cache_view(f->cache, 0, l, &view));
    DCP_TRY(dcp_cache_scales(f->cache, 0, l, &scales));
    const int64_t n_rows = f->n_tokens - f->live0;
    const dcp_attend_seq seq = {&view, f->pos0 + f->n_tokens, n_rows, c->layers[l].window};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.scales = &scales;
    args.q = f->q;
    args.out = f->attn;
    if (model_is_latent(c) && c->mla.form == MLA_PROJECTED) args.project = m->layers[l].wv_b.data;
    if (f->attn == NULL) {
        args.out = f->o + m->heads.begin * c->out_dim;
        args.out_token_stride = c->n_heads * c->out_dim;
    }
    dcp_attend_stats stats = DCP_ATTEND_STATS_INIT;
    DCP_TRY(dcp_attend_run(f->attend, &args, &stats));
    if (stats.nonfinite_values + stats.lse_bad > 0)
        return dcp__fail(DCP_ERR_NONFINITE,
                         "attention of layer %lld, positions %lld to %lld: %lld values and %lld "
                         "LSEs are NaN or infinite",
                         (long long)l, (long long)(f->pos0 + f->live0),
                         (long long)(f->pos0 + f->n_tokens - 1), (long long)stats.nonfinite_values,
                         (long long)stats.lse_bad);
    f->times.attend_s += stats.partial_s;
    f->times.merge_s += stats.merge_s;
    f->times.gather_s += stats.gather_s;
    f->times.merge_wire_bytes += (uint64_t)stats.merge_wire_bytes;
    f->times.other_wire_bytes += (uint64_t)(stats.wire_bytes - stats.merge_wire_bytes);
    return DCP_OK;
}

/* o (n_rows, H, out): own heads of the tile, then everybody's. */
static dcp_status gather_o(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const int64_t o_width = m->cfg.n_heads * m->cfg.out_dim;
    if (model_is_latent(&m->cfg) && m->cfg.mla.form == MLA_ABSORBED) {
        DCP_TRY(forward_mla_values(f, l));
    } else if (f->attn != NULL) {
        const int64_t own = range_size(m->heads) * m->cfg.out_dim;
        for (int64_t t = 0; t < f->n_rows && own > 0; t++)
            memcpy(f->o + t * o_width + m->heads.begin * m->cfg.out_dim,
                   f->attn + (f->row0 - f->live0 + t) * own, (size_t)own * sizeof(float));
    }
    return forward_gather(f, f->o, f->n_rows, o_width, f->o_off, LOOSE);
}

/* --- steps of a layer --- */

void forward_norm(struct forward *f, const float *w)
{
    const int64_t d = f->model->cfg.d_model;
    ew_norm(f->pool, &(struct rows){f->y, f->n_rows, d, d}, f->x + f->row0 * d, d, w,
            f->model->cfg.norm_eps);
}

void forward_add(struct forward *f, const float *w)
{
    const int64_t d = f->model->cfg.d_model;
    ew_add_norm(f->pool, &(struct rows){f->x + f->row0 * d, f->n_rows, d, d}, f->a, d, w,
                f->model->cfg.norm_eps);
}

static struct weight weight_rows(const struct weight *w, int64_t begin, int64_t end)
{
    struct weight part = *w;
    if (begin < 0) begin = 0;
    end = min_i64(end, w->n_rows);
    part.n_rows = end > begin ? end - begin : 0;
    if (part.n_rows > 0) part.data = (const char *)w->data + (size_t)begin * w->row_bytes;
    return part;
}

/* The same of a step's only token, k and v by all ranks together. */
static dcp_status qkv_together(struct forward *f, const struct layer *w, float *const *ys)
{
    const int64_t d = f->model->cfg.d_model, n_k = w->wk.n_rows, n_v = w->wv.n_rows;
    const size_t *off = f->kv_off + f->model->rank;
    const int64_t begin = (int64_t)(off[0] / sizeof(float)),
                  end = (int64_t)(off[1] / sizeof(float));
    const struct weight k = weight_rows(&w->wk, begin, end);
    const struct weight v = weight_rows(&w->wv, begin - n_k, end - n_k);
    float *const v_at = f->kv + (begin > n_k ? begin : n_k);
    DCP_TRY(forward_products(f, (const struct weight *const[]){&w->wq, &k, &v}, 3, f->y, d, 1,
                             (float *const[]){ys[0], f->kv + begin, v_at},
                             (const int64_t[]){w->wq.n_rows, k.n_rows, v.n_rows}));
    DCP_TRY(forward_gather(f, f->kv, 1, n_k + n_v, f->kv_off, LOOSE));
    if (f->n_own == 0) return DCP_OK;
    memcpy(ys[1], f->kv, (size_t)n_k * sizeof(float));
    memcpy(ys[2], f->kv + n_k, (size_t)n_v * sizeof(float));
    return DCP_OK;
}

/* k (n_own, Hkv, Dk) and v (n_own, Hkv, D) of own tokens, and q (n_live, H_r, Dk) of own heads. */
dcp_status forward_qkv(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct layer *w = &m->layers[l];
    const int64_t d = m->cfg.d_model, n_own = f->n_own, live = forward_n_live(f);

    /* one pass over x where q, k and v are wanted for the same rows */
    const struct weight *const ws[3] = {&w->wq, &w->wk, &w->wv};
    float *const ys[3] = {forward_q_rows(f).data, f->k, f->v};
    const int64_t strides[3] = {w->wq.n_rows, w->wk.n_rows, w->wv.n_rows};
    const bool same_rows = n_own == live && n_own == f->n_rows;
    if (f->kv != NULL && f->n_tokens == 1) {
        DCP_TRY(qkv_together(f, w, ys));
    } else {
        DCP_TRY(forward_products(f, ws, same_rows ? 3 : 1, f->y + forward_live_at(f) * d, d, live,
                                 ys, strides));
        if (!same_rows)
            DCP_TRY(
                forward_products(f, ws + 1, 2, forward_own_y(f), d, n_own, ys + 1, strides + 1));
    }

    const float *const biases[3] = {w->bq, w->bk, w->bv};
    for (int i = 0; i < 3; i++)
        if (biases[i] != NULL)
            ew_add_bias(f->pool,
                        &(struct rows){ys[i], i == 0 ? live : n_own, strides[i], strides[i]},
                        biases[i]);
    return DCP_OK;
}

static struct rows k_rows(const struct forward *f)
{
    const int64_t width = range_size(f->model->kv_heads) * f->model->cfg.key_dim;
    return (struct rows){f->k, f->n_own, width, width};
}

void forward_qk_norm(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const struct layer *w = &f->model->layers[l];
    const struct rows q = forward_q_rows(f), k = k_rows(f);
    ew_norm_heads(f->pool, &q, c->key_dim, w->q_norm, c->norm_eps);
    ew_norm_heads(f->pool, &k, c->key_dim, w->k_norm, c->norm_eps);
}

void forward_rope(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const float *table = forward_angles(f, c->layers[l].rope);
    const struct rows q = forward_q_rows(f), k = k_rows(f);
    ew_rope(f->pool, &q, c->key_dim, c->rope_dims, c->rope_pairs,
            table + forward_live_at(f) * c->rope_dims, NULL, 0);
    ew_rope(f->pool, &k, c->key_dim, c->rope_dims, c->rope_pairs, table, f->own_rows + f->own_at,
            f->row0);
}

dcp_status forward_store(struct forward *f, int64_t l)
{
    const struct model_config *c = &f->model->cfg;
    const int64_t n_kv = range_size(f->model->kv_heads);
    /* An infinite key may give every score -inf, which looks like a row that sees nothing; a NaN
     * cannot be overlooked: some rank counts it, and all ranks learn the counts. */
    const struct rows q = forward_q_rows(f), k = k_rows(f);
    ew_spread_nan(f->pool, &q);
    ew_spread_nan(f->pool, &k);
    return dcp_cache_store(f->cache, 0, l, f->own_local + f->own_at, f->n_own, f->k,
                           n_kv * c->key_dim, f->v, n_kv * c->value_dim);
}

/* a (n_rows, d) = x w^T, own columns, then everybody's. */
static dcp_status product_to_a(struct forward *f, const struct weight *w, const float *bias,
                               const float *x, int64_t x_width, enum fence fence)
{
    const int64_t d = f->model->cfg.d_model;
    float *own = f->a + f->model->cols.begin;
    DCP_TRY(forward_products(f, (const struct weight *const[]){w}, 1, x, x_width, f->n_rows,
                             (float *const[]){own}, (const int64_t[]){d}));
    if (bias != NULL) ew_add_bias(f->pool, &(struct rows){own, f->n_rows, w->n_rows, d}, bias);
    return forward_gather(f, f->a, f->n_rows, d, f->cols_off, fence);
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
    float *gate = f->h + m->ffn.begin;

    /* gate into h (n_rows, ffn) own columns, up (n_rows, ffn_r) */
    DCP_TRY(forward_products(f, (const struct weight *const[]){&w->gate, &w->up}, 2, f->y, d,
                             f->n_rows, (float *const[]){gate, f->up},
                             (const int64_t[]){ffn, own}));
    /* h = act(gate) * up, own columns, then everybody's */
    ew_gate(f->pool, &(struct rows){gate, f->n_rows, own, ffn}, f->up, own, m->cfg.activation);
    DCP_TRY(forward_gather(f, f->h, f->n_rows, ffn, f->ffn_off, LOOSE));
    const bool is_last = l + 1 == m->cfg.n_layers;
    return product_to_a(f, &w->down, NULL, f->h, ffn, is_last ? FENCED : LOOSE);
}
