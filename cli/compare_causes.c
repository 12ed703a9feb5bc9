/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/compare_causes.h"

#include <math.h>
#include <string.h>

#include "cli/elements.h"

static const double ln_2 = 0.693147180559945309;

/* One row of one rank, as a mistake sees it. */
struct part {
    bool is_empty;
    double lse;
    const float *payload;
};

static float stored_lse(const struct cause_rows *s, int r, int64_t t, int64_t h, bool transposed)
{
    /* A [H,T] array read as [T,H], or the other way round: the same bytes, other rows. */
    const int64_t at = transposed ? h * s->n_tokens + t : t * s->n_heads + h;
    return s->lse[(int64_t)r * s->n_tokens * s->n_heads + at];
}

static bool is_zero_row(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (x[i] != 0.0f) return false;
    }
    return true;
}

static struct part part_of(const struct cause_rows *s, enum cause_kind kind, int a, int b, int r,
                           int row)
{
    const int from = kind == CAUSE_REPLACED && r == b ? a : r;
    const int64_t t = s->t[row], h = s->h[row];
    struct part p;
    p.payload = s->payload + ((int64_t)from * s->n_rows + row) * s->dim;
    p.lse = (double)stored_lse(s, from, t, h, kind == CAUSE_TRANSPOSED);
    p.is_empty = !isfinite(p.lse);
    if (s->kv_len != NULL && kind != CAUSE_KV_LEN_IGNORED &&
        s->kv_len[(int64_t)from * s->n_tokens + t] == 0)
        p.is_empty = true;
    if (kind == CAUSE_EMPTY_IS_ZERO && p.is_empty) {
        p.is_empty = false;
        p.lse = 0.0;
    }
    if (kind == CAUSE_ZERO_IS_EMPTY && p.lse == 0.0 && is_zero_row(p.payload, s->dim))
        p.is_empty = true;
    if (kind == CAUSE_MISSING && r == a) p.is_empty = true;
    if (kind == CAUSE_ONE_PARTIAL && r != a) p.is_empty = true;
    if (kind == CAUSE_LSE_BF16) p.lse = element_round(DCP_BF16, p.lse);
    return p;
}

static double power(const struct cause_rows *s, enum cause_kind kind, double x)
{
    const bool is_base_2 = (s->base == DCP_LSE_BASE_2) != (kind == CAUSE_BASE);
    return is_base_2 ? exp2(x) : exp(x);
}

/* The merged row under the mistake into to [dim]; weights [n_ranks] where wanted. Returns its LSE,
 * which is without the sink. */
static double merge_row(const struct cause_rows *s, enum cause_kind kind, int a, int b, int row,
                        double *to, double *weights)
{
    double top = -INFINITY, sum = 0.0;
    const bool has_sink =
        s->sink != NULL && kind != CAUSE_SINK_MISSING && kind != CAUSE_ONE_PARTIAL;
    const double sink = has_sink ? (double)s->sink[s->h[row]] : -(double)INFINITY;
    int n_some = 0;
    for (int r = 0; r < s->n_ranks; r++) {
        const struct part p = part_of(s, kind, a, b, r, row);
        if (p.is_empty) continue;
        top = fmax(top, p.lse);
        n_some++;
    }
    const bool has_some = n_some > 0;
    const bool is_base_2 = (s->base == DCP_LSE_BASE_2) != (kind == CAUSE_BASE);
    double lse = -(double)INFINITY;
    top = fmax(top, sink);
    for (int r = 0; r < s->n_ranks; r++) {
        const struct part p = part_of(s, kind, a, b, r, row);
        if (!p.is_empty)
            sum += power(s, kind, p.lse - top) * (kind == CAUSE_TWICE && r == a ? 2.0 : 1.0);
    }
    if (has_some) lse = top + (is_base_2 ? log2(sum) : log(sum));
    if (kind == CAUSE_LSE_OUT_BASE) lse *= is_base_2 ? ln_2 : 1.0 / ln_2;
    if (isfinite(sink))
        sum += power(s, kind, sink - top) * (kind == CAUSE_SINK_EACH ? s->n_ranks : 1);
    for (int64_t d = 0; to != NULL && d < s->dim; d++) to[d] = 0.0;
    for (int r = 0; r < s->n_ranks; r++) {
        const struct part p = part_of(s, kind, a, b, r, row);
        double w = 0.0;
        if (!p.is_empty && has_some) w = power(s, kind, p.lse - top) / sum;
        if (kind == CAUSE_TWICE && r == a) w *= 2.0;
        if (kind == CAUSE_NO_WEIGHTS && !p.is_empty) w = 1.0 / n_some;
        if (kind == CAUSE_PLAIN_SUM && !p.is_empty) w = 1.0;
        if (kind == CAUSE_NOT_NORMALISED && !p.is_empty) w = power(s, kind, p.lse);
        if (weights != NULL) weights[r] = w;
        for (int64_t d = 0; to != NULL && w > 0.0 && d < s->dim; d++) {
            double x = (double)p.payload[d];
            if (kind == CAUSE_PAYLOAD_BF16) x = element_round(DCP_BF16, x);
            if (isfinite(x)) to[d] += w * x;
        }
    }
    for (int64_t d = 0; to != NULL && kind == CAUSE_RESULT_BF16 && d < s->dim; d++)
        to[d] = element_round(DCP_BF16, to[d]);
    return lse;
}

void cause_weights(const struct cause_rows *s, int64_t t, int64_t h, double *weights)
{
    struct cause_rows one = *s;
    one.n_rows = 1;
    one.t = &t;
    one.h = &h;
    one.dim = 0;
    (void)merge_row(&one, CAUSE_NONE, 0, 0, 0, NULL, weights);
}

double cause_lse(const struct cause_rows *s, int64_t t, int64_t h)
{
    struct cause_rows one = *s;
    one.n_rows = 1;
    one.t = &t;
    one.h = &h;
    one.dim = 0;
    return merge_row(&one, CAUSE_NONE, 0, 0, 0, NULL, NULL);
}

bool cause_applies(const struct cause_rows *s, enum cause_kind kind)
{
    switch (kind) {
    case CAUSE_SINK_MISSING:
    case CAUSE_SINK_EACH:
        return s->sink != NULL;
    case CAUSE_KV_LEN_IGNORED:
        return s->kv_len != NULL;
    case CAUSE_TRANSPOSED:
        return s->n_tokens > 1 && s->n_heads > 1;
    case CAUSE_MISSING: /* of two ranks: one partial alone */
        return s->n_ranks > 2;
    case CAUSE_TWICE:
    case CAUSE_REPLACED:
    case CAUSE_ONE_PARTIAL:
    case CAUSE_PLAIN_SUM:
    case CAUSE_NO_WEIGHTS:
        return s->n_ranks > 1;
    case CAUSE_LSE_OUT_BASE:
        return s->other_lse != NULL;
    default:
        return true;
    }
}

static double lse_distance(const struct cause_rows *s, double got, double there)
{
    if (got == there) return 0.0; /* infinities too */
    const double distance =
        fabs(got - there) /
        (2.0 * s->lse_rtol * fmax(1.0, isfinite(got) ? fabs(got) : 0.0) + 1e-30);
    return isnan(distance) ? (double)INFINITY : distance;
}

struct cause_distance cause_distance(const struct cause_rows *s, enum cause_kind kind, int a, int b)
{
    double worst = 0.0, worst_lse = 0.0;
    /* A mistake that does not give out is none, whatever its LSEs; those of the right result count
     * alone as well. */
    for (int row = 0; row < s->n_rows && (worst <= 1e6 || kind == CAUSE_NONE); row++) {
        double *got = s->work + (int64_t)row * s->dim;
        const float *other = s->other + (int64_t)row * s->dim;
        const double lse = merge_row(s, kind, a, b, row, got, NULL);
        if (s->other_lse != NULL)
            worst_lse = fmax(worst_lse, lse_distance(s, lse, (double)s->other_lse[row]));
        double top = 0.0; /* as in the comparison: of what is held to be right */
        for (int64_t d = 0; d < s->dim; d++) {
            if (isfinite(got[d])) top = fmax(top, fabs(got[d]));
        }
        for (int64_t d = 0; d < s->dim; d++) {
            const double x = (double)other[d];
            const double slack = s->atol >= 0 ? s->atol : s->rtol * top;
            /* Roundings of the other program on the way: twice what a right result may differ by;
             * where bf16 is the mistake, a value halfway may have gone either way. */
            double allowed = 2.0 * (slack + s->rtol * fabs(got[d])) + 1e-30;
            if (kind == CAUSE_RESULT_BF16) allowed += 1e-3 * element_ulp(DCP_BF16, x);
            double distance = fabs(got[d] - x) / allowed;
            if (kind == CAUSE_RESULT_BF16 && fabs(got[d] - x) <= element_ulp(DCP_BF16, x) * 1.01 &&
                element_round(DCP_BF16, x) == x)
                distance = 0.5;
            if (!(distance <= worst)) worst = isnan(distance) ? (double)INFINITY : distance;
        }
    }
    return (struct cause_distance){worst, worst_lse};
}
