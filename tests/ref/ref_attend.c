/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/ref_attend.h"

#include <float.h>
#include <math.h>
#include <stddef.h>

static int is_seen(const struct ref_attend *ref, int64_t pos, int64_t p)
{
    if (pos < 0) return 0;
    if (ref->window > 0 && (p > pos || p <= pos - ref->window)) return 0;
    return !(ref->causal && p > pos);
}

static double score(const struct ref_attend *ref, const float *q, int64_t g, int64_t p,
                    double *abs_sum)
{
    const float *k = ref->k + (p * ref->n_kv_heads + g) * ref->dk;
    double dot = 0.0, sum = 0.0;
    for (int64_t d = 0; d < ref->dk; d++) {
        dot += (double)q[d] * (double)k[d];
        sum += fabs((double)q[d] * (double)k[d]);
    }
    *abs_sum = sum * fabs(ref->scale);
    const double s = dot * ref->scale;
    return ref->softcap > 0.0 ? ref->softcap * tanh(s / ref->softcap) : s;
}

double ref_attend_parts_lse(const struct ref_attend_result *result)
{
    return 0x1p-17 * result->widest;
}
double ref_attend_parts_out(const struct ref_attend_result *result, double largest_v, int64_t d)
{
    return 2.0 * 0x1p-17 * result->widest * largest_v + 2.06 * 0x1p-8 * result->spread[d];
}

void ref_attend_row(const struct ref_attend *ref, const float *q, int64_t h, int64_t pos,
                    struct ref_attend_result *result)
{
    double *const out = result->out, *const spread = result->spread;
    const int64_t g = h / (ref->n_heads / ref->n_kv_heads);
    double top = -INFINITY, widest = 0.0, abs_sum;
    for (int64_t p = 0; p < ref->length; p++) {
        if (!is_seen(ref, pos, p)) continue;
        const double s = score(ref, q, g, p, &abs_sum);
        if (s > top) top = s;
        if (abs_sum > widest) widest = abs_sum;
    }
    for (int64_t d = 0; d < ref->dv; d++) out[d] = spread[d] = 0.0;
    result->lse = -INFINITY;
    result->bound = 0.0;
    result->widest = widest;
    if (top == -INFINITY) return;
    double sum = 0.0;
    for (int64_t p = 0; p < ref->length; p++) {
        if (!is_seen(ref, pos, p)) continue;
        const double e = exp(score(ref, q, g, p, &abs_sum) - top);
        const float *v = ref->v + (p * ref->n_kv_heads + g) * ref->v_stride;
        sum += e;
        for (int64_t d = 0; d < ref->dv; d++) out[d] += e * (double)v[d];
    }
    for (int64_t d = 0; d < ref->dv; d++) out[d] /= sum;
    for (int64_t p = 0; p < ref->length; p++) {
        if (!is_seen(ref, pos, p)) continue;
        const double share = exp(score(ref, q, g, p, &abs_sum) - top) / sum;
        const float *v = ref->v + (p * ref->n_kv_heads + g) * ref->v_stride;
        for (int64_t d = 0; d < ref->dv; d++) spread[d] += share * fabs((double)v[d] - out[d]);
    }
    const double lse = result->lse = top + log(sum);
    /* A score of n products summed in float, in any order, is off by at most n eps times the sum of
     * their magnitudes; tanh and the change to base 2 add some eps of the score. exp makes that
     * relative, twice (sum and weighted sum). The sums themselves: 64 keys a block, then blocks. */
    const double eps = (double)FLT_EPSILON;
    const double n = (double)ref->dk / 4.0 + 12.0;
    result->bound = eps * (2.0 * n * widest + 2.0 * fabs(top) + 80.0 + (double)ref->length / 64.0);
    if (ref->sink != NULL) {
        /* The divisor alone grows by exp(sink). */
        const double all = fmax(lse, (double)ref->sink[h]);
        const double with = all + log(exp(lse - all) + exp((double)ref->sink[h] - all));
        for (int64_t d = 0; d < ref->dv; d++) out[d] *= exp(lse - with);
    }
}
