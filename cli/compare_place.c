/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/compare_place.h"

#include <math.h>

enum { MAX_SHIFT = 1024 };

static double allowed_of(const struct cause_rows *s, const double *right)
{
    double top = 0.0;
    for (int64_t d = 0; d < s->dim; d++) {
        if (isfinite(right[d])) top = fmax(top, fabs(right[d]));
    }
    return 4.0 * (s->atol >= 0 ? s->atol : s->rtol * top) + 1e-30;
}

static bool is_row(const struct cause_rows *s, const double *right, const float *other)
{
    const double allowed = allowed_of(s, right);
    for (int64_t d = 0; d < s->dim; d++) {
        if (!(fabs(right[d] - (double)other[d]) <= allowed)) return false;
    }
    return true;
}

/* How many sampled rows lie where the shift says; -1 if one does not. Those that would wrap around
 * count only with wraps. */
static dcp_status count_fits(const struct cause_rows *s, bool of_heads, int64_t by, bool wraps,
                             compare_read_fn *read, void *ctx, float *row, int *n_out)
{
    const int64_t n = of_heads ? s->n_heads : s->n_tokens;
    *n_out = 0;
    for (int i = 0; i < s->n_rows; i++) {
        int64_t at = (of_heads ? s->h[i] : s->t[i]) + by;
        const bool has_wrapped = at < 0 || at >= n;
        if (has_wrapped && !wraps) continue;
        at = (at + n) % n;
        const dcp_status st = of_heads ? read(ctx, s->t[i], at, row) : read(ctx, at, s->h[i], row);
        if (st != DCP_OK) return st;
        const double *right = s->work + (int64_t)i * s->dim;
        if (!is_row(s, right, row)) {
            *n_out = -1;
            return DCP_OK;
        }
        if (!is_row(s, right, s->other + (int64_t)i * s->dim)) ++*n_out;
    }
    return DCP_OK;
}

dcp_status compare_find_shift(const struct cause_rows *rows, bool of_heads, compare_read_fn *read,
                              void *ctx, float *row, struct compare_shift *out)
{
    const int64_t n = of_heads ? rows->n_heads : rows->n_tokens;
    const int64_t most = n - 1 < MAX_SHIFT ? n - 1 : MAX_SHIFT;
    *out = (struct compare_shift){0, false};
    (void)cause_distance(rows, CAUSE_NONE, 0, 0); /* the right rows, into work */
    for (int64_t i = 2; i <= 2 * most + 1; i++) { /* 1, -1, 2, -2, ... */
        const int64_t by = i % 2 == 0 ? i / 2 : -(i / 2);
        for (int wraps = 1; wraps >= 0; wraps--) {
            int n_fit = 0;
            const dcp_status st =
                count_fits(rows, of_heads, by, wraps != 0, read, ctx, row, &n_fit);
            if (st != DCP_OK) return st;
            if (2 * n_fit < rows->n_rows || n_fit < 1) continue;
            *out = (struct compare_shift){by, wraps != 0};
            return DCP_OK;
        }
    }
    return DCP_OK;
}

/* The factor of a row, and 0 where it has none between 0 and 1; NaN where the row is all 0. */
static double factor_of(const struct cause_rows *s, int i)
{
    const double *right = s->work + (int64_t)i * s->dim;
    const float *other = s->other + (int64_t)i * s->dim;
    double xy = 0.0, xx = 0.0;
    for (int64_t d = 0; d < s->dim; d++) {
        if (!isfinite(other[d])) return 0.0;
        xy += right[d] * (double)other[d];
        xx += right[d] * right[d];
    }
    if (!(xx > 0.0)) return (double)NAN;
    const double c = xy / xx, allowed = allowed_of(s, right);
    if (!(c > 0.0 && c < 1.0)) return 0.0;
    for (int64_t d = 0; d < s->dim; d++) {
        if (fabs(c * right[d] - (double)other[d]) > allowed) return 0.0;
    }
    return c;
}

bool compare_finds_sink(const struct cause_rows *rows, int64_t *head_out, double *sink_out)
{
    bool is_found = false;
    int n_twice = 0; /* rows of a head that has another one: they must say the same */
    if (rows->sink != NULL) return false;
    (void)cause_distance(rows, CAUSE_NONE, 0, 0);
    for (int i = 0; i < rows->n_rows; i++) {
        const double c = factor_of(rows, i);
        if (isnan(c)) continue;
        if (c == 0.0) return false;
        /* c = Z / (Z + power(sink)), and Z is power(lse). */
        const double ratio = (1.0 - c) / c;
        const bool is_base_2 = rows->base == DCP_LSE_BASE_2;
        const double sink =
            cause_lse(rows, rows->t[i], rows->h[i]) + (is_base_2 ? log2(ratio) : log(ratio));
        /* What is allowed of a value, as a share of what the sink takes. */
        const double slack = 0.01 + 8.0 * rows->rtol / (c * (1.0 - c));
        for (int k = 0; k < i; k++) {
            if (rows->h[k] != rows->h[i]) continue;
            const double other = factor_of(rows, k);
            if (isnan(other)) continue;
            const double r = (1.0 - other) / other;
            const double its =
                cause_lse(rows, rows->t[k], rows->h[k]) + (is_base_2 ? log2(r) : log(r));
            if (fabs(its - sink) > slack + 8.0 * rows->rtol / (other * (1.0 - other))) return false;
            n_twice++;
            break;
        }
        if (!is_found) {
            *head_out = rows->h[i];
            *sink_out = sink;
        }
        is_found = true;
    }
    return is_found && (n_twice > 0 || rows->n_tokens == 1);
}
