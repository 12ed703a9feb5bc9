/* SPDX-License-Identifier: Apache-2.0 */
/* A random case of the merge, the same on every rank from its seed: every rank makes all partials,
 * so each can check its own result against the double oracle without a word to the others. */
#ifndef TEST_MERGE_CASE_H
#define TEST_MERGE_CASE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dcpattn/merge.h"
#include "ref/ref_merge.h"

struct mcase {
    uint64_t seed;
    int n;
    int64_t n_tokens, n_heads, dim;
    dcp_merge_desc desc;
    int layout;        /* of partials: 0 contiguous, 1 padded, 2 heads outermost */
    int merged_layout; /* of results likewise */
    bool in_place, lse_in_place, wants_lse;
    bool has_nonfinite;
    double lse_center, lse_spread;
};

/* One rank's partial; buffers of whole extents. */
struct mpart {
    void *out, *lse, *sum;
    size_t out_bytes, lse_bytes;
    int64_t *kv_len;
    int64_t out_ts, out_hs, lse_ts, lse_hs;
};

static inline void mcase_strides(int layout, int64_t n_t, int64_t n_h, int64_t len, int64_t *ts,
                                 int64_t *hs)
{
    const int64_t pad = layout == 1 ? 3 : 0;
    if (layout == 2) {
        *ts = len;
        *hs = n_t * len + 1;
    } else {
        *hs = len + pad;
        *ts = n_h * *hs + pad;
    }
}

static inline dcp_dtype mcase_type(uint64_t *rng)
{
    static const dcp_dtype types[] = {DCP_F32, DCP_BF16, DCP_F16};
    return types[ref_pick(rng, 3)];
}

static inline void mcase_make(struct mcase *c, uint64_t seed, int n)
{
    uint64_t rng = seed;
    memset(c, 0, sizeof(*c));
    c->seed = seed;
    c->n = n;
    c->n_tokens = ref_pick(&rng, 12) == 0 ? 0 : 1 + ref_pick(&rng, 11);
    c->n_heads = 1 + ref_pick(&rng, ref_pick(&rng, 3) == 0 ? 40 : 10);
    c->dim = 1 + ref_pick(&rng, ref_pick(&rng, 3) == 0 ? 150 : 40);
    dcp_merge_desc d = DCP_MERGE_DESC_INIT;
    d.max_tokens = c->n_tokens + ref_pick(&rng, 3);
    d.n_heads = c->n_heads;
    d.dim = c->dim;
    d.lse_base = ref_pick(&rng, 2) == 0 ? DCP_LSE_BASE_E : DCP_LSE_BASE_2;
    d.cut = (dcp_cut)ref_pick(&rng, 3);
    d.out_type = mcase_type(&rng);
    d.lse_type = ref_pick(&rng, 3) != 0 ? DCP_F32 : mcase_type(&rng);
    d.merged_type = ref_pick(&rng, 2) != 0 ? DCP_DTYPE_DEFAULT : mcase_type(&rng);
    d.nonfinite = ref_pick(&rng, 2) == 0 ? DCP_NONFINITE_ZERO : DCP_NONFINITE_PROPAGATE;
    d.has_sink = ref_pick(&rng, 3) == 0;
    d.has_kv_len = ref_pick(&rng, 3) == 0;
    /* An exponential that underflows is dropped before a sum can lift it: kept out of the way here.
     */
    d.lse_form = ref_pick(&rng, 4) == 0 ? DCP_LSE_FORM_MAX_SUM : DCP_LSE_FORM_LSE;
    c->desc = d;
    c->layout = (int)ref_pick(&rng, 3);
    c->merged_layout = (int)ref_pick(&rng, 3);
    c->in_place = ref_pick(&rng, 3) == 0 && d.cut != DCP_CUT_NONE &&
                  (d.merged_type == DCP_DTYPE_DEFAULT || d.merged_type == d.out_type);
    c->lse_in_place = ref_pick(&rng, 4) == 0 && d.cut != DCP_CUT_NONE && d.lse_type == DCP_F32 &&
                      d.lse_form == DCP_LSE_FORM_LSE;
    c->wants_lse = c->lse_in_place || ref_pick(&rng, 4) != 0;
    c->has_nonfinite = ref_pick(&rng, 3) == 0;
    c->lse_spread = ref_pick(&rng, 4) == 0 ? 60.0 : 3.0;
    if (d.lse_form == DCP_LSE_FORM_MAX_SUM && c->lse_spread > 40.0) c->lse_spread = 40.0;
    /* f16 LSEs reach 65504; -1e5 is a legal LSE elsewhere. */
    c->lse_center = ref_pick(&rng, 4) != 0  ? 0.0
                    : d.lse_type == DCP_F16 ? 3e4
                                            : ref_uniform(&rng, -1e5, 1e5);
}

static inline dcp_dtype mcase_merged_type(const struct mcase *c)
{
    return c->desc.merged_type == DCP_DTYPE_DEFAULT ? c->desc.out_type : c->desc.merged_type;
}

/* Fill rank r's partial; buffers are allocated by alloc(user, bytes). Gaps hold a pattern. */
static inline void mcase_fill(const struct mcase *c, int r, struct mpart *p,
                              void *(*alloc)(void *user, size_t n_bytes), void *user)
{
    uint64_t rng = c->seed * 1000003u + (uint64_t)r;
    const dcp_merge_desc *d = &c->desc;
    const size_t ob = dcp_dtype_bytes(d->out_type);
    const size_t lb = dcp_dtype_bytes(d->lse_type);
    memset(p, 0, sizeof(*p));
    mcase_strides(c->layout, c->n_tokens, c->n_heads, c->dim, &p->out_ts, &p->out_hs);
    mcase_strides(c->layout, c->n_tokens, c->n_heads, 1, &p->lse_ts, &p->lse_hs);
    p->out_bytes = (size_t)(c->n_tokens * p->out_ts + c->n_heads * p->out_hs) * ob;
    p->lse_bytes = (size_t)(c->n_tokens * p->lse_ts + c->n_heads * p->lse_hs) * lb;
    p->out = alloc(user, p->out_bytes + 64);
    p->lse = alloc(user, p->lse_bytes + 64);
    memset(p->out, 0xc3, p->out_bytes);
    memset(p->lse, 0xc3, p->lse_bytes);
    if (d->lse_form == DCP_LSE_FORM_MAX_SUM) {
        p->sum = alloc(user, p->lse_bytes + 64);
        memset(p->sum, 0xc3, p->lse_bytes);
    }
    if (d->has_kv_len) {
        p->kv_len = alloc(user, (size_t)(c->n_tokens + 1) * sizeof(int64_t));
        for (int64_t t = 0; t < c->n_tokens; t++)
            p->kv_len[t] = ref_pick(&rng, 3) == 0 ? 0 : 1 + ref_pick(&rng, 100);
    }
    const int n_empty_of_8 = (int)ref_pick(&rng, 4);
    for (int64_t t = 0; t < c->n_tokens; t++) {
        for (int64_t h = 0; h < c->n_heads; h++) {
            /* Some rows are empty on every rank: the same draw for all. */
            uint64_t shared = c->seed ^ (uint64_t)(t * 7919 + h * 104729);
            double lse = c->lse_center + ref_uniform(&rng, -c->lse_spread, c->lse_spread);
            const bool is_empty = ref_pick(&rng, 8) < n_empty_of_8 || ref_pick(&shared, 9) == 0;
            const bool by_len = p->kv_len != NULL && p->kv_len[t] == 0;
            if (is_empty) {
                const int64_t kind = ref_pick(&rng, 3);
                lse = kind == 0 ? -(double)INFINITY : kind == 1 ? (double)INFINITY : (double)NAN;
            } else if (by_len && ref_pick(&rng, 2) == 0) {
                lse = 0.0; /* what kernels leave behind */
            }
            const int64_t at = t * p->lse_ts + h * p->lse_hs;
            if (p->sum != NULL) {
                double sum = ref_uniform(&rng, 1.0, 9.0);
                if (is_empty && ref_pick(&rng, 2) == 0) { /* the sum says so */
                    const double marks[] = {0.0, -1.0, (double)NAN, (double)INFINITY};
                    sum = marks[ref_pick(&rng, 4)];
                    lse = c->lse_center;
                } else if (isfinite(lse)) {
                    lse -= log(sum) / (d->lse_base == DCP_LSE_BASE_2 ? log(2.0) : 1.0);
                }
                ref_put(d->lse_type, p->sum, at, sum);
            }
            ref_put(d->lse_type, p->lse, at, lse);
            for (int64_t i = 0; i < c->dim; i++) {
                double x = ref_uniform(&rng, -3.0, 3.0);
                if (c->has_nonfinite && ref_pick(&rng, 60) == 0)
                    x = ref_pick(&rng, 2) == 0 ? (double)INFINITY : (double)NAN;
                if (is_empty || by_len) x = (double)NAN; /* never to be read */
                ref_put(d->out_type, p->out, t * p->out_ts + h * p->out_hs + i, x);
            }
        }
    }
}

static inline void mcase_sink(const struct mcase *c, float *sink)
{
    uint64_t rng = c->seed + 17;
    for (int64_t h = 0; h < c->n_heads; h++)
        sink[h] = ref_pick(&rng, 4) == 0
                      ? -INFINITY
                      : (float)(c->lse_center + ref_uniform(&rng, -c->lse_spread, c->lse_spread));
}

/* Group totals that the statistics must show. */
struct mtotals {
    int64_t nonfinite, bad, empty;
};

/* The exact row (t, h): values [dim], its largest magnitudes [dim], merged LSE; totals are added.
 */
static inline double mcase_exact(const struct mcase *c, const struct mpart *parts,
                                 const float *sink, int64_t t, int64_t h, double *value,
                                 double *top, struct mtotals *totals)
{
    double lse[8];
    double w[8];
    bool is_empty[8];
    const dcp_merge_desc *d = &c->desc;
    for (int r = 0; r < c->n; r++) {
        lse[r] = ref_get(d->lse_type, parts[r].lse, t * parts[r].lse_ts + h * parts[r].lse_hs);
        is_empty[r] = parts[r].kv_len != NULL && parts[r].kv_len[t] == 0;
        if (parts[r].sum != NULL) {
            const double sum =
                ref_get(d->lse_type, parts[r].sum, t * parts[r].lse_ts + h * parts[r].lse_hs);
            is_empty[r] = is_empty[r] || sum == 0;
            lse[r] = sum > 0 && isfinite(sum)
                         ? lse[r] + log(sum) / (d->lse_base == DCP_LSE_BASE_2 ? log(2.0) : 1.0)
                     : lse[r] == -(double)INFINITY ? lse[r]
                                                   : (double)NAN;
        }
        if (is_empty[r] || lse[r] == -(double)INFINITY)
            totals->empty++;
        else if (!isfinite(lse[r]))
            totals->bad++;
    }
    const double s = sink != NULL ? (double)sink[h] : 0;
    const double merged = ref_merge_weights(c->n, lse, is_empty, d->lse_base == DCP_LSE_BASE_2,
                                            sink != NULL ? &s : NULL, w);
    for (int64_t i = 0; i < c->dim; i++) {
        value[i] = 0;
        top[i] = 0;
        for (int r = 0; r < c->n; r++) {
            if (w[r] == 0) continue;
            double x =
                ref_get(d->out_type, parts[r].out, t * parts[r].out_ts + h * parts[r].out_hs + i);
            if (!isfinite(x)) {
                totals->nonfinite++;
                if (d->nonfinite == DCP_NONFINITE_ZERO) x = 0;
            }
            value[i] += w[r] * x;
            top[i] = fmax(top[i], fabs(x));
        }
    }
    return merged;
}

#endif
