/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_data.h"

#include <math.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/elements.h"

enum { TABLE_ELEMS = 1 << 16 };
static const double largest_value = 127.0 / 64.0;

/* SplitMix64: its output function turns any counter into 64 well-mixed bits. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t row_hash(int64_t t, int64_t h, int rank)
{
    return mix(mix((uint64_t)t * 65537u + (uint64_t)h) + (uint64_t)rank);
}

static int64_t row_place(const struct bench_data *d, uint64_t hash)
{
    return (int64_t)((hash >> 20) % (uint64_t)(d->table_elems - d->dim + 1));
}

/* In [-8, 8): weights differ by up to e^16, and none underflows. */
static float row_lse(uint64_t hash)
{
    return (float)(hash & 0xfffffu) * 0x1p-16f - 8.0f;
}

/* k / 64 with |k| < 128, exact in f16: sign, exponent, significand by hand. */
static uint16_t to_f16(float x)
{
    if (x == 0.0f) return 0;
    int e = 0;
    const float m = frexpf(fabsf(x), &e); /* [0.5, 1) */
    const unsigned bits = ((unsigned)(e + 14) << 10) + ((unsigned)(m * 2048.0f) - 1024u);
    return (uint16_t)(bits | (x < 0.0f ? 0x8000u : 0u));
}

static uint32_t float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

dcp_status bench_data_init(struct bench_data *d, dcp_dtype dtype, int64_t n_tokens, int64_t n_heads,
                           int64_t dim)
{
    memset(d, 0, sizeof(*d));
    d->dtype = dtype;
    d->n_tokens = n_tokens;
    d->n_heads = n_heads;
    d->dim = dim;
    d->table_elems = dim + TABLE_ELEMS;
    const size_t n = (size_t)d->table_elems;
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array(n, sizeof(float), "bench values", &mem));
    d->values = mem;
    DCP_TRY(dcp__alloc_array(n, dcp_dtype_bytes(dtype), "bench values", &d->table));
    for (size_t i = 0; i < n; i++) {
        const float x = (float)((int)(mix(i) % 255u) - 127) / 64.0f;
        d->values[i] = x;
        if (dtype == DCP_F32)
            ((float *)d->table)[i] = x;
        else
            ((uint16_t *)d->table)[i] =
                dtype == DCP_F16 ? to_f16(x) : (uint16_t)(float_bits(x) >> 16);
    }
    return DCP_OK;
}

void bench_data_fini(struct bench_data *d)
{
    dcp__free(d->values);
    dcp__free(d->table);
    memset(d, 0, sizeof(*d));
}

void bench_data_write(const struct bench_data *d, int rank, void *out, float *lse)
{
    const size_t elem = dcp_dtype_bytes(d->dtype);
    const size_t row_bytes = (size_t)d->dim * elem;
    char *to = out;
    for (int64_t t = 0; t < d->n_tokens; t++) {
        for (int64_t h = 0; h < d->n_heads; h++) {
            const uint64_t hash = row_hash(t, h, rank);
            memcpy(to, (const char *)d->table + (size_t)row_place(d, hash) * elem, row_bytes);
            to += row_bytes;
            *lse++ = row_lse(hash);
        }
    }
}

static double half_ulp(dcp_dtype dtype, double x)
{
    if (dtype == DCP_F32) return 0.0; /* part of the arithmetic's own bound */
    const double relative = dtype == DCP_BF16 ? 0x1p-8 : 0x1p-11;
    return relative * fabs(x) + (dtype == DCP_F16 ? 0x1p-25 : 0.0);
}

/* One row against its definition. */
static int64_t row_wrong(const struct bench_data *d, int n_ranks, const struct bench_result *res,
                         int64_t t, int64_t h)
{
    const double eps = (n_ranks + 8) * 0x1p-24;
    double top = -INFINITY, sum = 0.0;
    for (int r = 0; r < n_ranks; r++) top = fmax(top, row_lse(row_hash(t, h, r)));
    for (int r = 0; r < n_ranks; r++) sum += exp(row_lse(row_hash(t, h, r)) - top);
    int64_t n_wrong = 0;
    const double lse = top + log(sum);
    const double lse_got = res->lse[(t - res->t0) * res->lse_token_stride + (h - res->h0)];
    if (!(fabs(lse_got - lse) <= 16.0 * eps)) n_wrong++;
    const int64_t at = (t - res->t0) * res->token_stride + (h - res->h0) * res->head_stride;
    for (int64_t i = 0; i < d->dim; i++) {
        double x = 0.0;
        for (int r = 0; r < n_ranks; r++) {
            const uint64_t hash = row_hash(t, h, r);
            x += exp(row_lse(hash) - top) / sum * (double)d->values[row_place(d, hash) + i];
        }
        const double got = element_get(d->dtype, res->out, at + i);
        const double allowed = 2.0 * eps * largest_value + half_ulp(d->dtype, x);
        if (!(fabs(got - x) <= allowed)) n_wrong++;
    }
    return n_wrong;
}

int64_t bench_data_wrong(const struct bench_data *d, int n_ranks, const struct bench_result *res,
                         int64_t n_rows)
{
    const int64_t width = res->h1 - res->h0;
    const int64_t n_all = (res->t1 - res->t0) * width;
    if (n_all == 0) return 0;
    if (n_rows > n_all) n_rows = n_all;
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < n_rows; i++) { /* the first and the last row among them */
        const int64_t row = n_rows == 1 ? 0 : i * (n_all - 1) / (n_rows - 1);
        n_wrong += row_wrong(d, n_ranks, res, res->t0 + row / width, res->h0 + row % width);
    }
    return n_wrong;
}
