/* SPDX-License-Identifier: Apache-2.0 */
/* What a cache's pages hold: rows stored by token, described by view. */
#include "cache/cache_priv.h"

static dcp_status check_layer(const dcp_cache *c, int64_t layer, const char *call)
{
    if (layer >= 0 && layer < c->d.n_layers) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "%s: layer %lld, this cache has 0 to %lld", call,
                     (long long)layer, (long long)c->d.n_layers - 1);
}

/* n rows [n_kv_heads, dim] from slot on into one part [n_kv_heads][page_tokens][dim] of a page, and
 * their scales, where there are any, into theirs. */
static void store_rows(const dcp_cache *c, char *part, float *scales, int64_t slot, int64_t n,
                       int64_t dim, const float *rows, int64_t token_stride)
{
    const size_t row_bytes = (size_t)dim * c->elem_bytes;
    for (int64_t g = 0; g < c->d.n_kv_heads; g++) {
        const int64_t at = g * c->d.page_tokens + slot;
        char *dst = part + (size_t)at * row_bytes;
        const float *src = rows + g * dim;
        for (int64_t t = 0; t < n; t++, dst += row_bytes, src += token_stride) {
            if (c->has_scales)
                scales[at + t] = dcp__kv_quantise(c->d.dtype, src, dst, dim);
            else
                dcp__kv_convert(c->d.dtype, src, dst, dim);
        }
    }
}

static float *scales_at(char *page, size_t at)
{
    return (float *)(void *)(page + at);
}

static dcp_status check_rows(const char *name, const float *rows, int64_t n, int64_t *stride,
                             int64_t row)
{
    if (rows == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_cache_store: %s is NULL", name);
    if ((uintptr_t)rows % _Alignof(float) != 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_cache_store: %s is not aligned to its elements", name);
    }
    if (*stride == 0) *stride = row;
    int64_t span;
    if (*stride >= row && (__builtin_mul_overflow(n, *stride, &span) ||
                           __builtin_mul_overflow(span, (int64_t)sizeof(float), &span))) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_store: %lld rows of %s_token_stride %lld exceed the address "
                         "space",
                         (long long)n, name, (long long)*stride);
    }
    if (*stride >= row) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "dcp_cache_store: %s_token_stride is %lld, a token has %lld elements", name,
                     (long long)*stride, (long long)row);
}

dcp_status dcp_cache_store(dcp_cache *c, int64_t seq, int64_t layer, int64_t local_begin, int64_t n,
                           const float *k, int64_t k_token_stride, const float *v,
                           int64_t v_token_stride)
{
    struct dcp__cache_seq *s = NULL;
    DCP_TRY(dcp__cache_find_seq(c, seq, "dcp_cache_store", &s));
    DCP_TRY(check_layer(c, layer, "dcp_cache_store"));
    const int64_t own = dcp__cache_own_length(c, s->length);
    if (local_begin < 0 || n < 0 || local_begin > own || n > own - local_begin) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_store: %lld rows from local index %lld, sequence %lld has room "
                         "for %lld on rank %d",
                         (long long)n, (long long)local_begin, (long long)seq, (long long)own,
                         c->d.rank);
    }
    if (n == 0) return DCP_OK;
    DCP_TRY(check_rows("k", k, n, &k_token_stride, c->d.n_kv_heads * c->d.key_dim));
    if (!c->d.latent)
        DCP_TRY(check_rows("v", v, n, &v_token_stride, c->d.n_kv_heads * c->d.value_dim));
    const int64_t pt = c->d.page_tokens;
    const dcp_range pages = dcp_page_range((dcp_range){local_begin, local_begin + n}, pt);
    for (int64_t p = pages.begin; p < pages.end; p++) DCP_TRY(dcp__cache_make_private(c, s, p));
    for (int64_t done = 0; done < n;) {
        const int64_t slot = (local_begin + done) % pt;
        const int64_t rows = n - done < pt - slot ? n - done : pt - slot;
        char *page = dcp__page_at(&c->pages, s->pages[(local_begin + done) / pt]) +
                     (size_t)layer * c->layer_bytes;
        store_rows(c, page, scales_at(page, c->k_scales_at), slot, rows, c->d.key_dim,
                   k + done * k_token_stride, k_token_stride);
        if (!c->d.latent) {
            store_rows(c, page + c->v_at, scales_at(page, c->v_scales_at), slot, rows,
                       c->d.value_dim, v + done * v_token_stride, v_token_stride);
        }
        done += rows;
    }
    return DCP_OK;
}

dcp_status dcp_cache_view(const dcp_cache *c, int64_t seq, int64_t layer, dcp_kv_view *view_out)
{
    struct dcp__cache_seq *s = NULL;
    DCP_TRY(dcp__cache_find_seq(c, seq, "dcp_cache_view", &s));
    DCP_TRY(check_layer(c, layer, "dcp_cache_view"));
    if (view_out == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_cache_view: view_out is NULL");
    char *k = c->pages.base + (size_t)layer * c->layer_bytes;
    const bool latent = c->d.latent != 0;
    const dcp_kv_view view = {
        .k_base = k,
        .v_base = latent ? k : k + c->v_at,
        .pages = s->pages,
        .page_tokens = c->d.page_tokens,
        .k_page_stride_bytes = (int64_t)c->pages.page_bytes,
        .v_page_stride_bytes = (int64_t)c->pages.page_bytes,
        .k_slot_stride = c->d.key_dim,
        .k_head_stride = c->d.key_dim * c->d.page_tokens,
        .v_slot_stride = latent ? c->d.key_dim : c->d.value_dim,
        .v_head_stride = (latent ? c->d.key_dim : c->d.value_dim) * c->d.page_tokens,
        .n_keys = dcp__cache_own_length(c, s->length),
        .dtype = c->d.dtype,
    };
    *view_out = view;
    return DCP_OK;
}

dcp_status dcp_cache_scales(const dcp_cache *c, int64_t seq, int64_t layer,
                            dcp_kv_scales *scales_out)
{
    struct dcp__cache_seq *s = NULL;
    DCP_TRY(dcp__cache_find_seq(c, seq, "dcp_cache_scales", &s));
    DCP_TRY(check_layer(c, layer, "dcp_cache_scales"));
    if (scales_out == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_cache_scales: scales_out is NULL");
    dcp_kv_scales scales = {.dtype = DCP_F32};
    if (c->has_scales) {
        char *const at = c->pages.base + (size_t)layer * c->layer_bytes;
        scales.k_base = at + c->k_scales_at;
        scales.v_base = at + (c->d.latent ? c->k_scales_at : c->v_scales_at);
        scales.k_page_stride_bytes = scales.v_page_stride_bytes = (int64_t)c->pages.page_bytes;
        scales.k_slot_stride = scales.v_slot_stride = 1;
        scales.k_head_stride = scales.v_head_stride = c->d.page_tokens;
    }
    *scales_out = scales;
    return DCP_OK;
}
