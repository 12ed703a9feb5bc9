/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/linear_few.h"

#include "base/alloc_priv.h"

static size_t rounded(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

dcp_status linear_few_init(struct linear_few *f, int64_t n_tokens, int64_t max_k)
{
    const int n = n_tokens < LINEAR_FEW_MAX ? (int)n_tokens : LINEAR_FEW_MAX;
    /* Multiples of 64 bytes; padding as struct dcp__q16_row says. */
    const size_t k = rounded((size_t)max_k, 512), groups = k / 32;
    const size_t words_bytes = k * sizeof(int16_t), planes_bytes = 2 * k;
    const size_t floats_bytes = groups * (1 + 2 + 2) * sizeof(float);
    const size_t token_bytes = words_bytes + DCP__Q16_ORDERS * planes_bytes + floats_bytes;
    DCP_TRY(dcp__alloc_array((size_t)n, token_bytes, "activations as integers", &f->memory));
    for (int t = 0; t < n; t++) {
        char *at = (char *)f->memory + (size_t)t * token_bytes;
        f->words[t] = (int16_t *)(void *)at;
        at += words_bytes;
        for (int order = 0; order < DCP__Q16_ORDERS; order++, at += planes_bytes)
            f->planes[t][order] = (int8_t *)(void *)at;
        f->scale[t] = (float *)(void *)at;
        f->pairs[t] = f->scale[t] + groups;
        f->half_sum[t] = f->pairs[t] + 2 * groups;
        struct dcp__q16_row *row = &f->rows[t];
        row->words = f->words[t];
        for (int order = 0; order < DCP__Q16_ORDERS; order++)
            row->planes[order] = f->planes[t][order];
        row->scale = f->scale[t];
        row->pairs = f->pairs[t];
        row->half_sum = f->half_sum[t];
    }
    return DCP_OK;
}

void linear_few_fini(struct linear_few *f)
{
    dcp__free(f->memory);
}

void linear_few_take(struct linear_few *f, const struct dcp__kernels *kernels, unsigned orders,
                     int t, const float *x, int64_t k)
{
    kernels->to_q16(x, k, f->words[t], f->scale[t], f->pairs[t], f->half_sum[t]);
    for (int order = 0; order < DCP__Q16_ORDERS; order++)
        if ((orders >> order & 1u) != 0)
            dcp__q16_lay_out(f->words[t], k, order, f->planes[t][order]);
}
