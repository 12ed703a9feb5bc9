/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/ref_attn.h"

#include <math.h>
#include <stdlib.h>

static double score(struct ref_attn_row *row, int64_t key)
{
    double dot = 0.0;
    double size = 0.0;
    for (int64_t d = 0; d < row->dk; d++) {
        const double x = (double)row->q[d] * (double)row->k[key * row->k_stride + d] * row->scale;
        dot += x;
        size += fabs(x);
    }
    if (size > row->score_size) row->score_size = size;
    return row->softcap != 0.0 ? row->softcap * tanh(dot / row->softcap) : dot;
}

void ref_attn(struct ref_attn_row *row)
{
    row->score_size = 0.0;
    row->value_size = 0.0;
    row->lse = -INFINITY;
    for (int64_t d = 0; d < row->dv; d++) row->out[d] = 0.0;
    if (row->hi <= row->lo) return;
    double *const s = malloc((size_t)(row->hi - row->lo) * sizeof(*s));
    if (s == NULL) abort();
    double max = -INFINITY;
    for (int64_t i = row->lo; i < row->hi; i++) {
        s[i - row->lo] = score(row, i);
        max = fmax(max, s[i - row->lo]);
    }
    double sum = 0.0;
    for (int64_t i = row->lo; i < row->hi; i++) {
        const double p = exp(s[i - row->lo] - max);
        sum += p;
        for (int64_t d = 0; d < row->dv; d++) {
            const double v = (double)row->v[i * row->v_stride + d];
            row->value_size = fmax(row->value_size, fabs(v));
            row->out[d] += p * v;
        }
    }
    for (int64_t d = 0; d < row->dv; d++) row->out[d] /= sum;
    row->lse = max + log(sum);
    free(s);
}

static const double UNIT = 0x1p-24;

static double score_error(const struct ref_attn_row *row)
{
    return UNIT *
           ((4.0 * sqrt((double)row->dk) + 8.0) * row->score_size + 6.0 * fabs(row->softcap) + 4.0);
}
static double sum_error(const struct ref_attn_row *row)
{
    return UNIT * (16.0 + 4.0 * sqrt((double)(row->hi - row->lo) / 64.0));
}
double ref_attn_tol_lse(const struct ref_attn_row *row)
{
    if (row->hi <= row->lo) return 0.0;
    return score_error(row) + sum_error(row) + UNIT * 2.0 * fabs(row->lse);
}
double ref_attn_tol_out(const struct ref_attn_row *row)
{
    return (2.0 * score_error(row) + sum_error(row)) * row->value_size;
}
