/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts over the rows of a tile.
 *
 *   scores   of every expert: own experts, gathered, so that all ranks choose from the same bits
 *   choice   each token its n_used best; pairs (token, expert) sorted by expert:
 *
 *                token  0    1    2          expert  0      1   2      3
 *                chosen 3,1  0,3  0,2        pairs   1 2  | 0 | 2  |  0 1     P = 3 * 2
 *
 *   h        (P, d_expert) = act(gate x) * up x, an expert's pairs at a time, own columns, gathered
 *   a        own columns: the shared experts' part, then weight * down h, expert by expert;
 *            gathered
 *
 * Every rank works on every chosen expert with its own columns: the load is even whatever is
 * chosen, and a sum's bits do not depend on N. */
#include <math.h>
#include <string.h>

#include "base/status_priv.h"
#include "engine/forward_priv.h"

/* A block of an expert's rows within w. */
static struct weight expert_of(const struct weight *w, int64_t n_experts, int64_t e)
{
    const int64_t rows = w->n_rows / n_experts;
    return (struct weight){w->qtype, rows, w->k, w->row_bytes,
                           (const char *)w->data + (size_t)(e * rows) * w->row_bytes};
}

/* --- choice --- */

/* Scores (n_experts) become probabilities. */
static void gate_scores(const struct moe_config *e, float *s)
{
    if (e->gating == MOE_SIGMOID) {
        for (int64_t i = 0; i < e->n_experts; i++) s[i] = 1.0f / (1.0f + expf(-s[i]));
        return;
    }
    float most = s[0];
    double sum = 0.0;
    for (int64_t i = 1; i < e->n_experts; i++) most = fmaxf(most, s[i]);
    for (int64_t i = 0; i < e->n_experts; i++) sum += (double)(s[i] = expf(s[i] - most));
    for (int64_t i = 0; i < e->n_experts; i++) s[i] = (float)((double)s[i] / sum);
}

/* What experts are ranked by. */
static float rank_value(const float *p, const float *bias, int64_t i)
{
    return bias != NULL ? p[i] + bias[i] : p[i];
}

/* The sum of a group's two best. */
static float group_value(const struct moe_config *e, const float *p, const float *bias, int64_t g)
{
    const int64_t n = e->n_experts / e->n_groups;
    float best = -INFINITY, second = n > 1 ? -INFINITY : 0.0f;
    for (int64_t i = g * n; i < (g + 1) * n; i++) {
        const float v = rank_value(p, bias, i);
        if (v > best) {
            if (n > 1) second = best;
            best = v;
        } else if (v > second) {
            second = v;
        }
    }
    return best + second;
}

/* Is the group among the n_groups_used best? Of equals the first. */
static bool is_group_used(const struct moe_config *e, const float *p, const float *bias, int64_t g)
{
    if (e->n_groups_used == e->n_groups) return true;
    const float own = group_value(e, p, bias, g);
    int64_t n_better = 0;
    for (int64_t i = 0; i < e->n_groups; i++) {
        const float v = group_value(e, p, bias, i);
        n_better += v > own || (v == own && i < g);
    }
    return n_better < e->n_groups_used;
}

/* The best n_used experts of one token, best first, of equals the first; and their weights. */
static void choose(const struct moe_config *e, const float *p, const float *bias, int32_t *chosen,
                   float *weights)
{
    const int64_t per_group = e->n_experts / e->n_groups;
    int64_t n = 0;
    for (int64_t g = 0; g < e->n_groups; g++) {
        if (!is_group_used(e, p, bias, g)) continue;
        for (int64_t i = g * per_group; i < (g + 1) * per_group; i++) {
            const float v = rank_value(p, bias, i);
            int64_t at = n;
            while (at > 0 && v > rank_value(p, bias, chosen[at - 1])) at--;
            if (at == e->n_used) continue;
            if (n < e->n_used) n++;
            memmove(chosen + at + 1, chosen + at, (size_t)(n - 1 - at) * sizeof(*chosen));
            chosen[at] = (int32_t)i;
        }
    }
    double sum = 0.0;
    for (int64_t j = 0; j < e->n_used; j++) sum += (double)(weights[j] = p[chosen[j]]);
    for (int64_t j = 0; j < e->n_used; j++) {
        if (e->normalises) weights[j] = (float)((double)weights[j] / (sum + 1e-20));
        weights[j] *= e->scale;
    }
}

/* The pairs, from scores: first, rows, weights. */
static void sort_pairs(struct forward *f, const float *bias)
{
    const struct moe_config *e = &f->model->cfg.moe;
    struct forward_moe *b = &f->moe;
    const int64_t n_pairs = f->n_rows * e->n_used;
    memset(b->first, 0, (size_t)(e->n_experts + 1) * sizeof(*b->first));
    for (int64_t t = 0; t < f->n_rows; t++)
        choose(e, b->scores + t * e->n_experts, bias, b->chosen + t * e->n_used,
               b->chosen_p + t * e->n_used);
    for (int64_t i = 0; i < n_pairs; i++) b->first[b->chosen[i] + 1]++;
    for (int64_t i = 0; i < e->n_experts; i++) b->first[i + 1] += b->first[i];
    /* first[i] moves to the end of i's pairs, that is to the start of i + 1's; then back */
    for (int64_t i = 0; i < n_pairs; i++) {
        const int32_t pair = b->first[b->chosen[i]]++;
        b->rows[pair] = (int32_t)(i / e->n_used);
        b->weights[pair] = b->chosen_p[i];
    }
    memmove(b->first + 1, b->first, (size_t)e->n_experts * sizeof(*b->first));
    b->first[0] = 0;
}

/* --- products --- */

static dcp_status run_scores(struct forward *f, const struct layer *w)
{
    const struct model *m = f->model;
    const int64_t n = m->cfg.moe.n_experts;
    DCP_TRY(forward_product(f, &w->router, f->y, m->cfg.d_model, f->n_rows,
                            f->moe.scores + m->experts.begin, n));
    return forward_gather(f, f->moe.scores, f->n_rows, n, f->moe.scores_off, FENCED);
}

/* h = act(gate x) * up x of n rows, own columns. */
static dcp_status run_gate(struct forward *f, const struct weight *gate, const struct weight *up,
                           const float *x, const struct rows *h, float *up_buf)
{
    const struct model_config *c = &f->model->cfg;
    const int64_t own = gate->n_rows;
    DCP_TRY(forward_products(f, (const struct weight *const[]){gate, up}, 2, x, c->d_model, h->n,
                             (float *const[]){h->data, up_buf}, (const int64_t[]){h->stride, own}));
    ew_gate(f->pool, &(struct rows){h->data, h->n, own, h->stride}, up_buf, own, c->activation);
    return DCP_OK;
}

static dcp_status run_hidden(struct forward *f, const struct layer *w)
{
    const struct model *m = f->model;
    const struct moe_config *e = &m->cfg.moe;
    struct forward_moe *b = &f->moe;
    const int64_t d = m->cfg.d_model, own = range_size(m->d_expert);
    for (int64_t i = 0; i < e->n_experts; i++) {
        const int64_t at = b->first[i], n = b->first[i + 1] - at;
        if (n == 0) continue;
        for (int64_t p = 0; p < n; p++)
            memcpy(b->x + p * d, f->y + b->rows[at + p] * d, (size_t)d * sizeof(float));
        const struct weight gate = expert_of(&w->gate_exps, e->n_experts, i);
        const struct weight up = expert_of(&w->up_exps, e->n_experts, i);
        const struct rows h = {b->h + at * e->d_expert + m->d_expert.begin, n, own, e->d_expert};
        DCP_TRY(run_gate(f, &gate, &up, b->x, &h, b->up));
    }
    DCP_TRY(forward_gather(f, b->h, f->n_rows * e->n_used, e->d_expert, b->h_off, LOOSE));
    if (e->d_shared == 0) return DCP_OK;
    const int64_t own_shared = range_size(m->d_shared);
    const struct rows h = {b->shared_h + m->d_shared.begin, f->n_rows, own_shared, e->d_shared};
    DCP_TRY(run_gate(f, &w->gate_shexp, &w->up_shexp, f->y, &h, b->shared_up));
    return forward_gather(f, b->shared_h, f->n_rows, e->d_shared, b->shared_off, LOOSE);
}

/* a, own columns: the shared experts, then the chosen ones. */
static dcp_status run_down(struct forward *f, const struct layer *w)
{
    const struct model *m = f->model;
    const struct moe_config *e = &m->cfg.moe;
    const struct forward_moe *b = &f->moe;
    const int64_t d = m->cfg.d_model, own = range_size(m->cols);
    float *a = f->a + m->cols.begin;
    if (e->d_shared > 0)
        DCP_TRY(forward_product(f, &w->down_shexp, b->shared_h, e->d_shared, f->n_rows, a, d));
    else
        for (int64_t t = 0; t < f->n_rows; t++) memset(a + t * d, 0, (size_t)own * sizeof(float));
    for (int64_t i = 0; i < e->n_experts; i++) {
        const int64_t at = b->first[i], n = b->first[i + 1] - at;
        if (n == 0) continue;
        const struct weight down = expert_of(&w->down_exps, e->n_experts, i);
        DCP_TRY(forward_product(f, &down, b->h + at * e->d_expert, e->d_expert, n, b->out, own));
        for (int64_t p = 0; p < n; p++) {
            float *dst = a + b->rows[at + p] * d;
            const float weight = b->weights[at + p], *src = b->out + p * own;
            for (int64_t c = 0; c < own; c++) dst[c] += weight * src[c];
        }
    }
    return DCP_OK;
}

dcp_status forward_experts(struct forward *f, int64_t l)
{
    const struct model *m = f->model;
    const struct moe_config *e = &m->cfg.moe;
    const struct layer *w = &m->layers[l];
    DCP_TRY(run_scores(f, w));
    for (int64_t t = 0; t < f->n_rows; t++) gate_scores(e, f->moe.scores + t * e->n_experts);
    sort_pairs(f, w->router_bias);
    DCP_TRY(run_hidden(f, w));
    DCP_TRY(run_down(f, w));
    return forward_gather(f, f->a, f->n_rows, m->cfg.d_model, f->cols_off,
                          l + 1 == m->cfg.n_layers ? FENCED : LOOSE);
}
