/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences over the arena of pages; what they hold is cache_data.c's.
 *
 * One page id stands for the same page_tokens positions in every layer, so a sequence has one block
 * table, and growth by a token touches one page for all layers. The sum of the global lengths is
 * what max_tokens limits: it is the same number on all ranks, so that they refuse alike, and the
 * arena is sized so that within it this rank never runs out of pages. */
#include <string.h>

#include "base/alloc_priv.h"
#include "base/huge_priv.h"
#include "base/struct_priv.h"
#include "cache/cache_priv.h"

/* ---- create ------------------------------------------------------------------------------- */

static dcp_status check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value >= low && value <= high) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "dcp_cache_create: %s is %lld, must be %lld to %lld", name,
                     (long long)value, (long long)low, (long long)high);
}

/* A head's keys of a page are one run, and at its end memory's stream of lines starts anew: decode
 * with 8 KV heads of 128 over 32K keys reads at 0.82 of a plain read's speed with pages of 64
 * tokens, 0.86 with 256, 0.91 with 512, 0.92 with 1,024. So a page is what a sequence of its share
 * of max_tokens may waste: a thirty-second. The same on all ranks. */
static int64_t default_page(const dcp_cache_desc *d)
{
    enum { LEAST = 64, MOST = 1024, PAGES = 32 };
    const int64_t own = d->max_tokens / (d->max_seqs > 0 ? d->max_seqs : 1) / d->n_ranks;
    int64_t page = LEAST;
    while (page < MOST && 2 * page * PAGES <= own) page *= 2;
    return page;
}

/* Defaults filled in, everything in range. */
static dcp_status read_desc(const dcp_cache_desc *desc, dcp_cache_desc *d)
{
    DCP_TRY(dcp__struct_read("dcp_cache_create", "DCP_CACHE_DESC_INIT", desc,
                             DCP__STRUCT_UPTO(dcp_cache_desc, max_seqs), d, sizeof(*d)));
    if (d->interleave == 0) d->interleave = 1;
    if (d->max_seqs == 0) d->max_seqs = 1;
    if (d->dtype == DCP_DTYPE_DEFAULT) d->dtype = DCP_BF16;
    const int64_t max_dim = 1 << 20; /* keeps every product below within int64 */
    DCP_TRY(check_range("n_ranks", d->n_ranks, 1, 1 << 20));
    DCP_TRY(check_range("rank", d->rank, 0, d->n_ranks - 1));
    DCP_TRY(check_range("interleave", d->interleave, 1, INT64_MAX));
    DCP_TRY(check_range("n_layers", d->n_layers, 1, max_dim));
    DCP_TRY(check_range("n_kv_heads", d->n_kv_heads, 1, max_dim));
    DCP_TRY(check_range("key_dim", d->key_dim, 1, max_dim));
    DCP_TRY(check_range("value_dim", d->value_dim, 1, d->latent ? d->key_dim : max_dim));
    if (d->page_tokens == 0) d->page_tokens = default_page(d);
    DCP_TRY(check_range("page_tokens", d->page_tokens, 32, max_dim));
    DCP_TRY(check_range("max_tokens", d->max_tokens, 1, INT64_MAX / 2));
    DCP_TRY(check_range("max_seqs", d->max_seqs, 1, INT32_MAX));
    if (d->page_tokens % 32 != 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_create: page_tokens is %lld, must be a multiple of 32",
                         (long long)d->page_tokens);
    }
    if (d->latent && d->n_kv_heads != 1) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_create: a latent cache has one KV head, n_kv_heads is %lld",
                         (long long)d->n_kv_heads);
    }
    if (dcp_dtype_bytes(d->dtype) == 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_create: dtype %d is none of f32, f16, bf16, int8, fp8",
                         (int)d->dtype);
    }
    return DCP_OK;
}

/* Enough pages for any way to divide max_tokens over max_seqs. A sequence of L owns at most
 * floor(L / (N I)) I + I of its positions, and no more than L; its last page may be partial. One
 * more for a fork, which copies a page before dst's old ones are given back. */
static int64_t count_pages(const dcp_cache_desc *d)
{
    if (d->max_seqs == 1) {
        const int64_t own = dcp_local_length(d->max_tokens, d->n_ranks, d->rank, d->interleave);
        return own / d->page_tokens + (own % d->page_tokens != 0);
    }
    int64_t own = d->max_tokens;
    int64_t slack;
    if (!__builtin_mul_overflow(d->interleave, d->max_seqs, &slack)) {
        const int64_t even = d->max_tokens / d->interleave / d->n_ranks * d->interleave;
        if (slack < own - even) own = even + slack;
    }
    return own / d->page_tokens + d->max_seqs + 1;
}

/* *at_out = where a part of so many bytes begins, 64-byte aligned, behind what there is; false
 * where that leaves the address space. */
static bool add_part(size_t *total, size_t rows, size_t row_bytes, size_t *at_out)
{
    size_t bytes;
    *at_out = *total;
    if (dcp__mul_overflow(rows, row_bytes, &bytes) || dcp__add_overflow(*total, bytes, &bytes) ||
        dcp__add_overflow(bytes, 63, &bytes))
        return false;
    *total = bytes / 64 * 64;
    return true;
}

/* The parts of a layer in a page. Every part starts aligned, and so do all rows whose bytes are a
 * multiple of 64. */
static bool lay_out(struct dcp_cache *c)
{
    size_t rows, k_at;
    c->elem_bytes = dcp_dtype_bytes(c->d.dtype);
    c->has_scales = dcp__kv_has_scales(c->d.dtype);
    const size_t scale_bytes = c->has_scales ? sizeof(float) : 0;
    const bool has_v = c->d.latent == 0;
    return !dcp__mul_overflow((size_t)c->d.page_tokens, (size_t)c->d.n_kv_heads, &rows) &&
           add_part(&c->layer_bytes, rows, (size_t)c->d.key_dim * c->elem_bytes, &k_at) &&
           add_part(&c->layer_bytes, rows, scale_bytes, &c->k_scales_at) &&
           add_part(&c->layer_bytes, has_v ? rows : 0, (size_t)c->d.value_dim * c->elem_bytes,
                    &c->v_at) &&
           add_part(&c->layer_bytes, has_v ? rows : 0, scale_bytes, &c->v_scales_at);
}

dcp_status dcp_cache_create(const dcp_cache_desc *desc, dcp_cache **cache_out)
{
    dcp_cache_desc d;
    DCP_TRY(read_desc(desc, &d));
    if (cache_out == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_cache_create: cache_out is NULL");
    struct dcp_cache sizes = {.d = d};
    size_t page_bytes;
    if (!lay_out(&sizes) || dcp__mul_overflow(sizes.layer_bytes, (size_t)d.n_layers, &page_bytes)) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_cache_create: a page of %lld tokens x %lld layers x %lld KV heads x "
                         "dims %lld and %lld exceeds the address space",
                         (long long)d.page_tokens, (long long)d.n_layers, (long long)d.n_kv_heads,
                         (long long)d.key_dim, (long long)d.value_dim);
    }
    void *ptr;
    DCP_TRY(dcp__alloc(sizeof(struct dcp_cache), "KV cache", &ptr));
    struct dcp_cache *c = ptr;
    *c = sizes;
    const int64_t n_pages = count_pages(&d);
    dcp_status st = dcp__pages_init(&c->pages, page_bytes, n_pages > 0 ? n_pages : 1);
    if (st != DCP_OK) goto err_cache;
    st = dcp__alloc_array((size_t)d.max_seqs, sizeof(struct dcp__cache_seq), "KV sequences", &ptr);
    if (st != DCP_OK) goto err_pages;
    c->seqs = ptr;
    *cache_out = c;
    return DCP_OK;
err_pages:
    dcp__pages_fini(&c->pages);
err_cache:
    dcp__free(c);
    return st;
}

void dcp_cache_destroy(dcp_cache *c)
{
    if (c == NULL) return;
    for (int64_t s = 0; s < c->d.max_seqs; s++) dcp__free(c->seqs[s].pages);
    dcp__free(c->seqs);
    dcp__pages_fini(&c->pages);
    dcp__free(c);
}

/* ---- sequences ---------------------------------------------------------------------------- */

dcp_status dcp__cache_find_seq(const dcp_cache *c, int64_t seq, const char *call,
                               struct dcp__cache_seq **s_out)
{
    if (c == NULL) return dcp__fail(DCP_ERR_ARG, "%s: the cache is NULL", call);
    if (seq < 0 || seq >= c->d.max_seqs) {
        return dcp__fail(DCP_ERR_ARG, "%s: sequence %lld, this cache has 0 to %lld", call,
                         (long long)seq, (long long)c->d.max_seqs - 1);
    }
    *s_out = &c->seqs[seq];
    return DCP_OK;
}

int64_t dcp__cache_own_length(const dcp_cache *c, int64_t length)
{
    return dcp_local_length(length, c->d.n_ranks, c->d.rank, c->d.interleave);
}

static int64_t pages_for(const dcp_cache *c, int64_t n_own)
{
    return n_own / c->d.page_tokens + (n_own % c->d.page_tokens != 0);
}

/* A block table of at least n entries; contents kept. */
static dcp_status reserve_table(struct dcp__cache_seq *s, int64_t n)
{
    if (n <= s->cap) return DCP_OK;
    int64_t cap = s->cap > 0 ? s->cap : 16;
    while (cap < n) cap *= 2;
    void *ptr;
    DCP_TRY(dcp__alloc_array((size_t)cap, sizeof(int32_t), "KV block table", &ptr));
    if (s->n_pages > 0) memcpy(ptr, s->pages, (size_t)s->n_pages * sizeof(int32_t));
    dcp__free(s->pages);
    s->pages = ptr;
    s->cap = cap;
    return DCP_OK;
}

/* Before a page is written: if others hold it, put a copy in its place. */
dcp_status dcp__cache_make_private(dcp_cache *c, struct dcp__cache_seq *s, int64_t at)
{
    const int32_t shared = s->pages[at];
    if (c->pages.refs[shared] == 1) return DCP_OK;
    int32_t own;
    DCP_TRY(dcp__pages_take(&c->pages, 1, &own));
    memcpy(dcp__page_at(&c->pages, own), dcp__page_at(&c->pages, shared), c->pages.page_bytes);
    dcp__pages_drop(&c->pages, shared);
    s->pages[at] = own;
    return DCP_OK;
}

static dcp_status check_total(const dcp_cache *c, const char *call, int64_t others, int64_t more)
{
    if (more <= c->d.max_tokens - others) return DCP_OK;
    return dcp__fail(
        DCP_ERR_ARG,
        "%s: the KV cache is full: %lld of max_tokens %lld are taken, %lld more wanted", call,
        (long long)others, (long long)c->d.max_tokens, (long long)more);
}

dcp_status dcp_cache_extend(dcp_cache *c, int64_t seq, int64_t n_tokens)
{
    struct dcp__cache_seq *s = NULL;
    DCP_TRY(dcp__cache_find_seq(c, seq, "dcp_cache_extend", &s));
    if (n_tokens < 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_cache_extend: n_tokens is %lld, must not be negative",
                         (long long)n_tokens);
    }
    DCP_TRY(check_total(c, "dcp_cache_extend", c->n_tokens, n_tokens));
    const int64_t own_old = dcp__cache_own_length(c, s->length);
    const int64_t own_new = dcp__cache_own_length(c, s->length + n_tokens);
    const int64_t n_new = pages_for(c, own_new);
    DCP_TRY(reserve_table(s, n_new));
    /* Pages first, the copy last: what has been taken is given back if the copy fails. */
    const int64_t n_old = s->n_pages;
    if (n_new > n_old) DCP_TRY(dcp__pages_take(&c->pages, n_new - n_old, s->pages + n_old));
    if (own_new > own_old && own_old % c->d.page_tokens != 0) {
        const dcp_status st = dcp__cache_make_private(c, s, own_old / c->d.page_tokens);
        if (st != DCP_OK) {
            for (int64_t i = n_new; i > n_old; i--) dcp__pages_drop(&c->pages, s->pages[i - 1]);
            return st;
        }
    }
    s->n_pages = n_new;
    s->length += n_tokens;
    c->n_tokens += n_tokens;
    return DCP_OK;
}

int64_t dcp_cache_length(const dcp_cache *c, int64_t seq)
{
    if (c == NULL || seq < 0 || seq >= c->d.max_seqs) return -1;
    return c->seqs[seq].length;
}

static void cut_seq(dcp_cache *c, struct dcp__cache_seq *s, int64_t length)
{
    const int64_t n = pages_for(c, dcp__cache_own_length(c, length));
    while (s->n_pages > n) dcp__pages_drop(&c->pages, s->pages[--s->n_pages]);
    c->n_tokens -= s->length - length;
    s->length = length;
}

dcp_status dcp_cache_truncate(dcp_cache *c, int64_t seq, int64_t length)
{
    struct dcp__cache_seq *s = NULL;
    DCP_TRY(dcp__cache_find_seq(c, seq, "dcp_cache_truncate", &s));
    if (length < 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_cache_truncate: length is %lld, must not be negative",
                         (long long)length);
    }
    if (length < s->length) cut_seq(c, s, length);
    return DCP_OK;
}

dcp_status dcp_cache_fork(dcp_cache *c, int64_t src, int64_t dst, int64_t length)
{
    struct dcp__cache_seq *from = NULL, *to = NULL;
    DCP_TRY(dcp__cache_find_seq(c, src, "dcp_cache_fork", &from));
    DCP_TRY(dcp__cache_find_seq(c, dst, "dcp_cache_fork", &to));
    if (src == dst) {
        return dcp__fail(DCP_ERR_ARG, "dcp_cache_fork: sequence %lld onto itself", (long long)src);
    }
    if (length < 0 || length > from->length) {
        return dcp__fail(DCP_ERR_ARG, "dcp_cache_fork: length is %lld, sequence %lld has %lld",
                         (long long)length, (long long)src, (long long)from->length);
    }
    DCP_TRY(check_total(c, "dcp_cache_fork", c->n_tokens - to->length, length));
    const int64_t n_own = dcp__cache_own_length(c, length);
    const int64_t n_full = n_own / c->d.page_tokens;
    const int64_t n = pages_for(c, n_own);
    DCP_TRY(reserve_table(to, n));
    int32_t last = 0;
    if (n > n_full) {
        DCP_TRY(dcp__pages_take(&c->pages, 1, &last));
        memcpy(dcp__page_at(&c->pages, last), dcp__page_at(&c->pages, from->pages[n_full]),
               c->pages.page_bytes);
    }
    cut_seq(c, to, 0);
    for (int64_t i = 0; i < n_full; i++) {
        to->pages[i] = from->pages[i];
        c->pages.refs[from->pages[i]]++;
    }
    if (n > n_full) to->pages[n_full] = last;
    to->n_pages = n;
    to->length = length;
    c->n_tokens += length;
    return DCP_OK;
}

size_t dcp_cache_bytes(const dcp_cache *c, int64_t seq)
{
    if (c == NULL || seq < -1 || seq >= c->d.max_seqs) return 0;
    const int64_t n = seq < 0 ? c->pages.n_fresh - c->pages.n_free : c->seqs[seq].n_pages;
    return (size_t)n * c->pages.page_bytes;
}

size_t dcp_cache_huge_bytes(const dcp_cache *c)
{
    return c == NULL ? 0 : dcp__huge_bytes(c->pages.base, c->pages.committed_bytes);
}
