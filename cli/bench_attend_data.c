/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_attend_data.h"

#include <math.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "kernels/kernels_priv.h"

enum { TABLE_ELEMS = 1 << 16, STORE_TOKENS = 64 };

/* What a row is: part of its hash. */
enum { OF_QUERY = 1, OF_KEY = 2, OF_VALUE = 3 };

/* SplitMix64's output function. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static const float *row(const struct attend_data *d, int kind, int64_t a, int64_t b)
{
    const uint64_t hash = mix(mix((uint64_t)a * 4099u + (uint64_t)b) + (uint64_t)kind);
    return d->table + (hash >> 20) % (uint64_t)(d->table_elems - d->s.key_dim + 1);
}

dcp_status attend_data_init(struct attend_data *d, const struct attend_shape *s)
{
    memset(d, 0, sizeof(*d));
    d->s = *s;
    const int64_t widest = s->key_dim > s->value_dim ? s->key_dim : s->value_dim;
    /* A value row begins where a key row may, and may be longer. */
    d->table_elems = TABLE_ELEMS + s->key_dim;
    void *mem = NULL;
    DCP_TRY(
        dcp__alloc_array((size_t)(d->table_elems + widest), sizeof(float), "bench values", &mem));
    d->table = mem;
    for (int64_t i = 0; i < d->table_elems + widest; i++)
        d->table[i] = (float)((int)(mix((uint64_t)i) % 255u) - 127) / 64.0f;
    return DCP_OK;
}

void attend_data_fini(struct attend_data *d)
{
    dcp__free(d->table);
    memset(d, 0, sizeof(*d));
}

const float *attend_data_q(const struct attend_data *d, int64_t token, int64_t head)
{
    return row(d, OF_QUERY, token, head);
}

const float *attend_data_k(const struct attend_data *d, int64_t pos, int64_t kv_head)
{
    return row(d, OF_KEY, pos, kv_head);
}

const float *attend_data_v(const struct attend_data *d, int64_t pos, int64_t kv_head)
{
    return row(d, d->s.is_latent ? OF_KEY : OF_VALUE, pos, kv_head);
}

void attend_data_write_q(const struct attend_data *d, dcp_range heads, float *q)
{
    const size_t n_bytes = (size_t)d->s.key_dim * sizeof(float);
    for (int64_t t = 0; t < d->s.n_tokens; t++) {
        for (int64_t h = heads.begin; h < heads.end; h++, q += d->s.key_dim)
            memcpy(q, attend_data_q(d, t, h), n_bytes);
    }
}

/* k, v: room for STORE_TOKENS tokens. */
static dcp_status store_all(const struct attend_data *d, dcp_cache *cache, int64_t seq, int n_ranks,
                            int rank, float *k, float *v)
{
    const struct attend_shape *s = &d->s;
    DCP_TRY(dcp_cache_extend(cache, seq, s->n_keys));
    const int64_t n_own = dcp_local_length(s->n_keys, n_ranks, rank, s->interleave);
    for (int64_t i0 = 0; i0 < n_own; i0 += STORE_TOKENS) {
        const int64_t n = n_own - i0 < STORE_TOKENS ? n_own - i0 : STORE_TOKENS;
        float *to_k = k, *to_v = v;
        for (int64_t i = i0; i < i0 + n; i++) {
            const int64_t pos = dcp_pos_global(i, n_ranks, rank, s->interleave);
            for (int64_t g = 0; g < s->n_kv_heads; g++) {
                memcpy(to_k, attend_data_k(d, pos, g), (size_t)s->key_dim * sizeof(float));
                to_k += s->key_dim;
                if (s->is_latent) continue;
                memcpy(to_v, attend_data_v(d, pos, g), (size_t)s->value_dim * sizeof(float));
                to_v += s->value_dim;
            }
        }
        DCP_TRY(dcp_cache_store(cache, seq, 0, i0, n, k, 0, s->is_latent ? NULL : v, 0));
    }
    return DCP_OK;
}

dcp_status attend_data_store(const struct attend_data *d, dcp_cache *cache, int64_t seq,
                             int n_ranks, int rank)
{
    const struct attend_shape *s = &d->s;
    const size_t n_k = (size_t)(STORE_TOKENS * s->n_kv_heads * s->key_dim);
    const size_t n_v = (size_t)(STORE_TOKENS * s->n_kv_heads * s->value_dim);
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array(n_k + n_v, sizeof(float), "keys to store", &mem));
    float *k = mem;
    const dcp_status st = store_all(d, cache, seq, n_ranks, rank, k, k + n_k);
    dcp__free(mem);
    return st;
}

static dcp_range visible(const struct attend_shape *s, int64_t token)
{
    const int64_t pos = s->n_keys - s->n_tokens + token;
    return dcp_visible_range(pos, s->n_keys, s->window, 1, 1, 0, 1);
}

int64_t attend_data_visible(const struct attend_shape *s, int64_t token)
{
    const dcp_range r = visible(s, token);
    return r.end > r.begin ? r.end - r.begin : 0;
}

double attend_data_flops(const struct attend_shape *s)
{
    double n = 0.0;
    for (int64_t t = 0; t < s->n_tokens; t++) n += (double)attend_data_visible(s, t);
    return n * (double)s->n_heads * (double)(s->key_dim + s->value_dim) * 2.0;
}

/* ---- the oracle ---- */

static const double largest_value = 127.0 / 64.0;

double attend_data_weight_error(const struct attend_shape *s, dcp_dtype dtype)
{
    const int64_t call_rows = s->n_tokens * (s->n_heads / s->n_kv_heads);
    dcp_isa isa = DCP_ISA_SCALAR; /* as dcp_attend_create chooses it, which has succeeded */
    (void)dcp__isa_choose(DCP_ISA_DEFAULT, &isa);
    return dcp__attn_cuts_weights(isa, dtype, call_rows) ? 0x1p-8 : 0.0;
}

/* [D] each: the weighted mean of the values; sums of w^2 v and w^2 v^2. */
enum { WORK_PARTS = 3 };
size_t attend_data_work(const struct attend_shape *s)
{
    return (size_t)s->value_dim * WORK_PARTS;
}

/* Online over the keys, in double, into work; log sum exp. From the means on: means, then roots of
 * the sums of (weight (value - mean))^2. */
static double attend_row(const struct attend_data *d, int64_t token, int64_t head, double *work)
{
    const struct attend_shape *s = &d->s;
    const int64_t g = head / (s->n_heads / s->n_kv_heads);
    const float *q = attend_data_q(d, token, head);
    const dcp_range keys = visible(s, token);
    const double scale = 1.0 / sqrt((double)s->key_dim);
    const int64_t n = s->value_dim;
    double *const spread = work + n, *const squares = spread + n;
    double top = -INFINITY, sum = 0.0, sum2 = 0.0;
    for (int64_t i = 0; i < WORK_PARTS * n; i++) work[i] = 0.0;
    for (int64_t p = keys.begin; p < keys.end; p++) {
        const float *k = attend_data_k(d, p, g), *v = attend_data_v(d, p, g);
        double part[4] = {0.0, 0.0, 0.0, 0.0};
        int64_t i = 0;
        for (; i + 4 <= s->key_dim; i += 4)
            for (int j = 0; j < 4; j++) part[j] += (double)q[i + j] * (double)k[i + j];
        for (; i < s->key_dim; i++) part[0] += (double)q[i] * (double)k[i];
        const double score = scale * ((part[0] + part[1]) + (part[2] + part[3]));
        if (score > top) {
            const double shrink = exp(top - score);
            for (int64_t j = 0; j < n; j++) work[j] *= shrink;
            for (int64_t j = n; j < WORK_PARTS * n; j++) work[j] *= shrink * shrink;
            sum *= shrink;
            sum2 *= shrink * shrink;
            top = score;
        }
        const double w = exp(score - top);
        for (int64_t j = 0; j < n; j++) {
            const double x = w * (double)v[j];
            work[j] += x;
            spread[j] += w * x;
            squares[j] += x * x;
        }
        sum += w;
        sum2 += w * w;
    }
    for (int64_t j = 0; j < n && sum > 0.0; j++) {
        work[j] /= sum;
        const double x = squares[j] - 2.0 * work[j] * spread[j] + work[j] * work[j] * sum2;
        spread[j] = sqrt(fmax(x, 0.0)) / sum;
    }
    return sum > 0.0 ? top + log(sum) : -INFINITY;
}

void attend_data_check(const struct attend_data *d, dcp_range heads, const float *out,
                       const float *lse, double *work, struct attend_check *check)
{
    const struct attend_shape *s = &d->s;
    const int64_t width = heads.end - heads.begin, n_all = s->n_tokens * width;
    const int64_t n_rows = check->n_rows < n_all ? check->n_rows : n_all;
    for (int64_t i = 0; i < n_rows; i++) { /* the first and the last row among them */
        const int64_t at = n_rows == 1 ? 0 : i * (n_all - 1) / (n_rows - 1);
        const double want_lse = attend_row(d, at / width, heads.begin + at % width, work);
        const double lse_error = fabs((double)lse[at] - want_lse);
        if (!(lse_error <= check->tolerance * (1.0 + fabs(want_lse))) && want_lse != lse[at])
            check->wrong++;
        for (int64_t j = 0; j < s->value_dim; j++) {
            const double off = fabs((double)out[at * s->value_dim + j] - work[j]) / largest_value;
            if (!(off <= check->worst_error)) check->worst_error = off;
            const double more = 8.0 * check->weight_error * work[s->value_dim + j] / largest_value;
            if (!(off <= check->tolerance + more)) check->wrong++;
        }
    }
}
