/* SPDX-License-Identifier: Apache-2.0 */
/* One shape of sharded attention: every rank stores its own keys, several copies of them so that
 * each run finds its keys in memory and not in a cache, and attends; beside it the same threads
 * read the same bytes and do nothing else. */
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/bench_attend.h"
#include "cli/common.h"

enum { MAX_COPIES = 256, CHECKED_ROWS = 8 };

struct bench {
    struct bench_rank *r;
    const struct attend_case *c;
    struct attend_data data;
    dcp_cache *cache;
    dcp_attend *attend;
    dcp_range heads;
    dcp_kv_view *views;    /* [n_copies] */
    dcp_kv_scales *scales; /* [n_copies] */
    struct bench_copies copies;
    float *q, *out, *lse;
    double *work;
    double gather_s, partial_s, merge_s;
    int64_t n_runs;
};

/* ---- memory ---- */

/* What attention reads of a copy: keys, values, page by page; of the last page whole heads. With a
 * window from the first key that a row sees on, head by head, so that all stretches but those of
 * the first page are alike. Scales lie behind the numbers of all heads; their bytes are read there
 * or, head by head, with those behind the head. */
struct extent {
    int64_t first_page, n_pages, skip; /* skip: slots of the first page */
    int64_t n_parts, n_heads;          /* stretches of a page: n_parts x n_heads */
};
static struct extent find_extent(const struct bench *b)
{
    const struct attend_shape *s = &b->c->shape;
    const dcp_kv_view *const v = &b->views[0];
    const int64_t begin = dcp_visible_range(s->n_keys - s->n_tokens, s->n_keys, s->window, 1,
                                            b->r->n, b->r->rank, s->interleave)
                              .begin;
    const int64_t first_page = begin / v->page_tokens;
    const int64_t end_page = (v->n_keys + v->page_tokens - 1) / v->page_tokens;
    return (struct extent){.first_page = first_page,
                           .n_pages = first_page < end_page ? end_page - first_page : 0,
                           .skip = begin % v->page_tokens,
                           .n_parts = s->is_latent ? 1 : 2,
                           .n_heads = s->window > 0 ? s->n_kv_heads : 1};
}
static void find_stretches(struct bench *b, const struct extent *x, int64_t copy)
{
    const struct attend_shape *s = &b->c->shape;
    const dcp_kv_view *const v = &b->views[copy];
    const int64_t n = v->page_tokens, elem = (int64_t)dcp_dtype_bytes(v->dtype);
    const int64_t scale = b->scales[copy].k_base != NULL ? (int64_t)sizeof(float) : 0;
    struct bench_stretch *to = b->copies.stretches + copy * b->copies.n_stretches;
    for (int64_t i = 0; i < x->n_pages; i++) {
        const int64_t page = v->pages[x->first_page + i], skip = i == 0 ? x->skip : 0;
        for (int64_t part = 0; part < x->n_parts; part++) {
            const char *const base = part == 0
                                         ? (const char *)v->k_base + page * v->k_page_stride_bytes
                                         : (const char *)v->v_base + page * v->v_page_stride_bytes;
            const int64_t row = (part == 0 ? s->key_dim : s->value_dim) * elem;
            const int64_t rows = (n - skip) * (s->n_kv_heads / x->n_heads);
            for (int64_t h = 0; h < x->n_heads; h++)
                *to++ = (struct bench_stretch){base + (h * n + skip) * row,
                                               (size_t)(rows * (row + scale))};
        }
    }
}

static dcp_status make_cache(struct bench *b)
{
    const struct attend_shape *s = &b->c->shape;
    dcp_cache_desc desc = DCP_CACHE_DESC_INIT;
    desc.n_ranks = b->r->n;
    desc.rank = b->r->rank;
    desc.interleave = s->interleave;
    desc.n_layers = 1;
    desc.n_kv_heads = s->n_kv_heads;
    desc.key_dim = s->key_dim;
    desc.value_dim = s->value_dim;
    desc.latent = s->is_latent;
    desc.dtype = b->c->dtype;
    desc.page_tokens = s->page_tokens;
    desc.max_tokens = s->n_keys * b->copies.n_copies;
    desc.max_seqs = b->copies.n_copies;
    DCP_TRY(dcp_cache_create(&desc, &b->cache));
    for (int64_t i = 0; i < b->copies.n_copies; i++)
        DCP_TRY(attend_data_store(&b->data, b->cache, i, b->r->n, b->r->rank));
    /* Views last: a cache that grows moves no page, but may move a block table. */
    for (int64_t i = 0; i < b->copies.n_copies; i++) {
        DCP_TRY(dcp_cache_view(b->cache, i, 0, &b->views[i]));
        DCP_TRY(dcp_cache_scales(b->cache, i, 0, &b->scales[i]));
    }
    void *mem = NULL;
    const struct extent x = find_extent(b);
    b->copies.n_stretches = x.n_pages * x.n_parts * x.n_heads;
    DCP_TRY(dcp__alloc_array((size_t)(b->copies.n_copies * b->copies.n_stretches),
                             sizeof(*b->copies.stretches), "stretches", &mem));
    b->copies.stretches = mem;
    for (int64_t i = 0; i < b->copies.n_copies; i++) find_stretches(b, &x, i);
    return DCP_OK;
}

static dcp_status take_memory(struct bench *b)
{
    const struct attend_shape *s = &b->c->shape;
    const int64_t per_key = s->n_kv_heads * (s->key_dim + (s->is_latent ? 0 : s->value_dim)) *
                            (int64_t)dcp_dtype_bytes(b->c->dtype);
    const int64_t n_bytes = s->n_keys * per_key;
    b->copies.n_copies = n_bytes > 0 ? ((int64_t)b->c->cold_bytes + n_bytes - 1) / n_bytes : 1;
    b->copies.n_copies = b->copies.n_copies < 1            ? 1
                         : b->copies.n_copies > MAX_COPIES ? MAX_COPIES
                                                           : b->copies.n_copies;
    b->heads = dcp_cut_range(s->n_heads, b->r->n, b->r->rank);
    const size_t n_rows = (size_t)(s->n_tokens * (b->heads.end - b->heads.begin));
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array((size_t)b->copies.n_copies, sizeof(*b->views), "views", &mem));
    b->views = mem;
    DCP_TRY(dcp__alloc_array((size_t)b->copies.n_copies, sizeof(*b->scales), "scales", &mem));
    b->scales = mem;
    DCP_TRY(dcp__alloc_array(n_rows, (size_t)s->key_dim * sizeof(float), "queries", &mem));
    b->q = mem;
    DCP_TRY(dcp__alloc_array(n_rows, (size_t)s->value_dim * sizeof(float), "result", &mem));
    b->out = mem;
    DCP_TRY(dcp__alloc_array(n_rows, sizeof(float), "result's lse", &mem));
    b->lse = mem;
    DCP_TRY(dcp__alloc_array(attend_data_work(s), sizeof(double), "oracle", &mem));
    b->work = mem;
    DCP_TRY(attend_data_init(&b->data, s));
    attend_data_write_q(&b->data, b->heads, b->q);
    memset(b->out, 1, n_rows * (size_t)s->value_dim * sizeof(float)); /* touch */
    return make_cache(b);
}

static void give_back(struct bench *b)
{
    dcp_attend_destroy(b->attend);
    dcp_cache_destroy(b->cache);
    attend_data_fini(&b->data);
    dcp__free(b->work);
    dcp__free(b->lse);
    dcp__free(b->out);
    dcp__free(b->q);
    dcp__free(b->copies.stretches);
    dcp__free(b->scales);
    dcp__free(b->views);
}

/* ---- turns ---- */

static dcp_status run_attend(void *ctx, struct bench_turn *turn_out)
{
    struct bench *b = ctx;
    const struct attend_shape *s = &b->c->shape;
    const int64_t copy = bench_next_copy(&b->copies);
    const dcp_attend_seq seq = {&b->views[copy], s->n_keys, s->n_tokens, s->window};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    dcp_attend_stats stats = DCP_ATTEND_STATS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    if (b->scales[copy].k_base != NULL) args.scales = &b->scales[copy];
    args.q = b->q;
    args.out = b->out;
    args.lse = b->lse;
    turn_out->begin = dcp__now_ns();
    DCP_TRY(dcp_attend_run(b->attend, &args, &stats));
    turn_out->end = dcp__now_ns();
    b->gather_s += stats.gather_s;
    b->partial_s += stats.partial_s;
    b->merge_s += stats.merge_s;
    b->n_runs++;
    return DCP_OK;
}

/* ---- the case ---- */

static dcp_status create(struct bench *b, struct bench_line *line)
{
    const struct attend_shape *s = &b->c->shape;
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = s->n_tokens;
    desc.n_heads = s->n_heads;
    desc.n_kv_heads = s->n_kv_heads;
    desc.key_dim = s->key_dim;
    desc.value_dim = s->value_dim;
    desc.causal = 1;
    desc.interleave = s->interleave;
    desc.algo = b->c->algo;
    desc.workspace_limit_bytes = b->c->workspace_limit_bytes;
    desc.pool = b->r->pool;
    DCP_TRY(dcp_attend_create(b->r->g, &desc, &b->attend));
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(b->attend, &info);
    line->workspace_bytes = (int64_t)info.workspace_bytes;
    line->tile_rows = info.tile_rows;
    line->page_tokens = b->views[0].page_tokens;
    return bench_largest(b->r, &line->workspace_bytes);
}

static dcp_status check(struct bench *b, struct bench_line *line)
{
    /* Quantised caches round keys and values; else all is f32's but what tiles do to weights. */
    const bool is_quantised = dcp_dtype_bytes(b->c->dtype) == 1;
    struct attend_check c = {.tolerance = is_quantised ? 0x1p-3 : 0x1p-15,
                             .weight_error = attend_data_weight_error(&b->c->shape, b->c->dtype),
                             .n_rows = CHECKED_ROWS};
    attend_data_check(&b->data, b->heads, b->out, b->lse, b->work, &c);
    double wrong = (double)c.wrong;
    int64_t worst = (int64_t)(c.worst_error < 1e3 ? c.worst_error * 1e12 : 1e15);
    DCP_TRY(bench_largest(b->r, &worst));
    DCP_TRY(bench_sum(b->r, &wrong));
    line->is_checked = true;
    line->wrong += (int64_t)wrong;
    if ((double)worst * 1e-12 > line->worst_error) line->worst_error = (double)worst * 1e-12;
    return DCP_OK;
}

void bench_put_kernel(struct bench_line *line, const char *name)
{
    if (name == NULL) return;
    snprintf(line->kernel, sizeof(line->kernel), "%s", name);
    const char *level = NULL;
    for (const char *at = name; (at = strstr(at, "__")) != NULL;) level = at += 2;
    if (level != NULL) snprintf(line->isa, sizeof(line->isa), "%s", level);
}

static dcp_status prepare(struct bench *b, struct bench_line *line)
{
    struct bench_memory memory;
    struct bench_turn unused;
    bench_memory_begin(&memory);
    DCP_TRY(dcp_group_barrier(b->r->g));
    DCP_TRY(create(b, line));
    if (b->r->iters != 0) DCP_TRY(run_attend(b, &unused));
    DCP_TRY(bench_memory_end(b->r, &memory, line));
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(b->attend, &info);
    bench_put_kernel(line, info.kernel);
    if (b->r->iters != 0) DCP_TRY(check(b, line));
    b->gather_s = b->partial_s = b->merge_s = 0.0;
    b->n_runs = 0;
    return dcp_group_barrier(b->r->g);
}

static dcp_status measure(struct bench *b, struct bench_line *line)
{
    DCP_TRY(bench_compete(b->r, run_attend, b, &b->copies, line));
    double n_bytes = 0.0;
    for (int64_t i = 0; i < b->copies.n_stretches; i++)
        n_bytes += (double)b->copies.stretches[i].n_bytes;
    const double per_run = 1e6 / ((double)b->n_runs * b->r->n);
    line->gather_us = b->gather_s * per_run;
    line->partial_us = b->partial_s * per_run;
    line->merge_us = b->merge_s * per_run;
    DCP_TRY(bench_sum(b->r, &line->gather_us));
    DCP_TRY(bench_sum(b->r, &line->partial_us));
    DCP_TRY(bench_sum(b->r, &line->merge_us));
    DCP_TRY(bench_sum(b->r, &n_bytes));
    line->read_bytes = (int64_t)n_bytes;
    line->has_run = true;
    return check(b, line);
}

dcp_status bench_attend_case(struct bench_rank *r, const struct attend_case *c,
                             struct bench_line *line)
{
    struct bench b;
    memset(&b, 0, sizeof(b));
    b.r = r;
    b.c = c;
    line->ranks = r->n;
    line->threads = r->n_threads;
    line->flops = attend_data_flops(&c->shape);
    snprintf(line->isa, sizeof(line->isa), "%s", dcp__isa_name(r->isa));
    snprintf(line->comm, sizeof(line->comm), "%s", dcp_group_kind(r->g));
    dcp_status st = bench_agree(r, take_memory(&b));
    if (st == DCP_OK) st = prepare(&b, line);
    if (st == DCP_OK && r->iters != 0) st = measure(&b, line);
    give_back(&b);
    return st;
}
