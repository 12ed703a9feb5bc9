/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded paged cache, read back through its views. What a position holds is a function of
 * (sequence's stamp, layer, position, head, dim), so that any mix-up shows. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "cache/cache_priv.h"
#include "dcpattn/cache.h"
#include "num/dtype_priv.h"

static float stamp_at(int stamp, int64_t layer, int64_t pos, int64_t g, int64_t d, int is_v)
{
    const int64_t x = (pos * 37 + layer * 11 + g * 5 + d * 3 + is_v * 7 + stamp * 13) % 251;
    return (float)(x - 125) / 8.0f; /* exact in every type without scales */
}

static float load_elem(const void *base, int64_t i, dcp_dtype t)
{
    if (t == DCP_F32) return ((const float *)base)[i];
    if (t == DCP_I8) return (float)((const int8_t *)base)[i];
    if (t == DCP_FP8_E4M3) return dcp__e4m3_to_f32(((const uint8_t *)base)[i]);
    const uint16_t u = ((const uint16_t *)base)[i];
    return t == DCP_BF16 ? dcp__bf16_to_f32(u) : dcp__f16_to_f32(u);
}

static float scale_at(const dcp_kv_view *v, const dcp_kv_scales *s, int64_t i, int64_t g, int is_v)
{
    if (s->k_base == NULL) return 1.0f;
    const char *page =
        (const char *)(is_v ? s->v_base : s->k_base) +
        v->pages[i / v->page_tokens] * (is_v ? s->v_page_stride_bytes : s->k_page_stride_bytes);
    const int64_t slot = i % v->page_tokens;
    return load_elem(page,
                     slot * (is_v ? s->v_slot_stride : s->k_slot_stride) +
                         g * (is_v ? s->v_head_stride : s->k_head_stride),
                     s->dtype);
}

/* How far a stored value may be off: half a step of int8 of a row that reaches 125 / 8, a sixteenth
 * of a value in fp8. */
static float tolerance(dcp_dtype t, float want)
{
    if (t == DCP_I8) return 125.0f / 8.0f / 127.0f * 0.50001f;
    return t == DCP_FP8_E4M3 ? fabsf(want) / 16.0f : 0.0f;
}

static float view_at(const dcp_kv_view *v, int64_t i, int64_t g, int64_t d, int is_v)
{
    const int64_t slot = i % v->page_tokens;
    const char *page =
        (const char *)(is_v ? v->v_base : v->k_base) +
        v->pages[i / v->page_tokens] * (is_v ? v->v_page_stride_bytes : v->k_page_stride_bytes);
    const int64_t at = slot * (is_v ? v->v_slot_stride : v->k_slot_stride) +
                       g * (is_v ? v->v_head_stride : v->k_head_stride) + d;
    return load_elem(page, at, v->dtype);
}

/* Append n global positions with a stamp, storing what the rank owns, in every layer. */
static void append(dcp_cache *c, const dcp_cache_desc *d, int64_t seq, int64_t n, int stamp)
{
    const int64_t len = dcp_cache_length(c, seq);
    assert_int_equal(dcp_cache_extend(c, seq, n), DCP_OK);
    assert_int_equal(dcp_cache_length(c, seq), len + n);
    const int64_t b = dcp_local_length(len, d->n_ranks, d->rank, d->interleave);
    const int64_t e = dcp_local_length(len + n, d->n_ranks, d->rank, d->interleave);
    const int64_t kw = d->n_kv_heads * d->key_dim, vw = d->n_kv_heads * d->value_dim;
    const int64_t ks = kw + 3, vs = vw + 1; /* strides of a caller with padded rows */
    float *k = malloc((size_t)((e - b) * ks + 1) * sizeof(float));
    float *v = malloc((size_t)((e - b) * vs + 1) * sizeof(float));
    for (int64_t l = 0; l < d->n_layers; l++) {
        for (int64_t i = b; i < e; i++) {
            const int64_t pos = dcp_pos_global(i, d->n_ranks, d->rank, d->interleave);
            for (int64_t x = 0; x < kw; x++)
                k[(i - b) * ks + x] = stamp_at(stamp, l, pos, x / d->key_dim, x % d->key_dim, 0);
            for (int64_t x = 0; x < vw; x++)
                v[(i - b) * vs + x] =
                    stamp_at(stamp, l, pos, x / d->value_dim, x % d->value_dim, 1);
        }
        assert_int_equal(
            dcp_cache_store(c, seq, l, b, e - b, k, ks, d->latent ? NULL : v, d->latent ? 0 : vs),
            DCP_OK);
    }
    free(k);
    free(v);
}

/* Positions [begin, end) of seq hold what a stamp put there. */
static void check(const dcp_cache *c, const dcp_cache_desc *d, int64_t seq, int64_t begin,
                  int64_t end, int stamp)
{
    for (int64_t l = 0; l < d->n_layers; l++) {
        dcp_kv_view v;
        assert_int_equal(dcp_cache_view(c, seq, l, &v), DCP_OK);
        assert_int_equal(v.n_keys, dcp_local_length(dcp_cache_length(c, seq), d->n_ranks, d->rank,
                                                    d->interleave));
        assert_int_equal((uintptr_t)v.k_base % 64, 0);
        assert_int_equal((uintptr_t)v.v_base % 64, 0);
        assert_int_equal(v.k_page_stride_bytes % 64, 0);
        dcp_kv_scales scales;
        assert_int_equal(dcp_cache_scales(c, seq, l, &scales), DCP_OK);
        assert_true((scales.k_base != NULL) == (d->dtype == DCP_I8 || d->dtype == DCP_FP8_E4M3));
        assert_int_equal((uintptr_t)scales.k_base % 64, 0);
        assert_int_equal((uintptr_t)scales.v_base % 64, 0);
        for (int64_t pos = begin; pos < end; pos++) {
            if (dcp_pos_owner(pos, d->n_ranks, d->interleave) != d->rank) continue;
            const int64_t i = dcp_pos_local(pos, d->n_ranks, d->interleave);
            for (int64_t g = 0; g < d->n_kv_heads; g++) {
                const float ks = scale_at(&v, &scales, i, g, 0);
                const float vs = scale_at(&v, &scales, i, g, 1);
                for (int64_t x = 0; x < d->key_dim; x++) {
                    const float want = stamp_at(stamp, l, pos, g, x, 0);
                    const float got = view_at(&v, i, g, x, 0) * ks;
                    assert_true(fabsf(got - want) <= tolerance(d->dtype, want));
                }
                for (int64_t x = 0; x < d->value_dim; x++) {
                    const float want = stamp_at(stamp, l, pos, g, x, d->latent ? 0 : 1);
                    const float got = view_at(&v, i, g, x, 1) * vs;
                    assert_true(fabsf(got - want) <= tolerance(d->dtype, want));
                }
            }
        }
    }
}

static dcp_cache_desc small_desc(void)
{
    dcp_cache_desc d = DCP_CACHE_DESC_INIT;
    d.n_ranks = 3;
    d.interleave = 5;
    d.n_layers = 2;
    d.n_kv_heads = 2;
    d.key_dim = 7;
    d.value_dim = 4;
    d.page_tokens = 32;
    d.max_tokens = 1000;
    d.max_seqs = 4;
    return d;
}

static void test_growth(void **state)
{
    (void)state;
    static const dcp_dtype types[] = {DCP_BF16, DCP_F16, DCP_F32, DCP_I8, DCP_FP8_E4M3};
    static const int64_t inters[] = {1, 5, 64, 2000};
    for (int t = 0; t < 5; t++) {
        for (int w = 0; w < 4; w++) {
            for (int latent = 0; latent < 2; latent++) {
                for (int r = 0; r < 3; r++) {
                    dcp_cache_desc d = small_desc();
                    d.dtype = types[t];
                    d.interleave = inters[w];
                    d.rank = r;
                    d.latent = (uint32_t)latent;
                    if (latent) d.n_kv_heads = 1;
                    dcp_cache *c = NULL;
                    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
                    assert_int_equal(dcp_cache_bytes(c, -1), 0);
                    int64_t len[2] = {0, 0};
                    for (int64_t step = 1; len[0] + len[1] + step <= 990; step += 7) {
                        const int64_t s = step / 7 % 2;
                        append(c, &d, s, step, (int)s);
                        len[s] += step;
                        append(c, &d, s, 0, 9);
                    }
                    check(c, &d, 0, 0, len[0], 0);
                    check(c, &d, 1, 0, len[1], 1);
                    dcp_cache_destroy(c);
                }
            }
        }
    }
}

static void test_pages_never_move(void **state)
{
    (void)state;
    dcp_cache_desc d = small_desc();
    d.n_ranks = 1;
    d.n_layers = 3;
    d.n_kv_heads = 4;
    d.key_dim = d.value_dim = 128;
    d.max_tokens = 20000; /* 120 MB of bf16: passes the border to huge pages */
    d.max_seqs = 1;
    dcp_cache *c = NULL;
    const size_t before = dcp__alloc_current();
    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
    dcp_kv_view v;
    append(c, &d, 0, 1, 0);
    assert_int_equal(dcp_cache_view(c, 0, 2, &v), DCP_OK);
    const void *first = v.k_base;
    const int32_t page = v.pages[0];
    while (dcp_cache_length(c, 0) < d.max_tokens) {
        int64_t n = 777;
        if (n > d.max_tokens - dcp_cache_length(c, 0)) n = d.max_tokens - dcp_cache_length(c, 0);
        assert_int_equal(dcp_cache_extend(c, 0, n), DCP_OK);
        /* What is accounted is what the pages hold, but for a sixteenth. */
        const size_t held = dcp_cache_bytes(c, 0), noted = dcp__alloc_current() - before;
        assert_true(noted >= held);
        assert_true(noted <= held + held / 16 + 65536);
    }
    assert_int_equal(dcp_cache_view(c, 0, 2, &v), DCP_OK);
    assert_ptr_equal(v.k_base, first);
    assert_int_equal(v.pages[0], page);
    check(c, &d, 0, 0, 1, 0);
    /* Full. */
    assert_int_equal(dcp_cache_extend(c, 0, 1), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "full"));
    assert_non_null(strstr(dcp_last_error(), "20000"));
    assert_int_equal(dcp_cache_length(c, 0), d.max_tokens);
    assert_int_equal(dcp_cache_truncate(c, 0, 19000), DCP_OK);
    append(c, &d, 0, 1000, 5);
    check(c, &d, 0, 19000, 20000, 5);
    dcp_cache_destroy(c);
    assert_int_equal(dcp__alloc_current(), before);
}

static bool huge_pages_are_on(void)
{
    char line[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (f == NULL) return false;
    const bool is_on = fgets(line, sizeof(line), f) != NULL && strstr(line, "[never]") == NULL;
    fclose(f);
    return is_on && prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 0;
}

/* A cache that grows and is written step by step lies on huge pages, as far as its 2 MiB are whole;
 * what was stored before a page was put together is there after it. */
static void test_huge_pages(void **state)
{
    (void)state;
    dcp_cache_desc d = small_desc();
    d.n_ranks = 1;
    d.n_layers = 2;
    d.n_kv_heads = 4;
    d.key_dim = d.value_dim = 128;
    d.max_tokens = 6000; /* 24 MB of bf16 in steps of less than 2 MiB */
    d.max_seqs = 1;
    dcp_cache *c = NULL;
    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
    assert_int_equal(dcp_cache_huge_bytes(NULL), 0);
    assert_int_equal(dcp_cache_huge_bytes(c), 0);
    while (dcp_cache_length(c, 0) < d.max_tokens) append(c, &d, 0, 250, 3);
    check(c, &d, 0, 0, d.max_tokens, 3);
    const size_t held = dcp_cache_bytes(c, -1), huge = dcp_cache_huge_bytes(c);
    dcp_cache_destroy(c);
    if (!huge_pages_are_on()) {
        print_message("skipped: transparent huge pages are off\n");
        skip();
    }
    print_message("%zu of %zu bytes on huge pages\n", huge, held);
    if (huge == 0) {
        print_message("skipped: the system had no huge page to give\n");
        skip();
    }
    assert_true(huge <= held && huge % ((size_t)2 << 20) == 0);
}

/* KV bytes of a rank are 1/N of one rank's, within a page. */
static void test_bytes(void **state)
{
    (void)state;
    static const int64_t inters[] = {1, 16};
    for (int w = 0; w < 2; w++) {
        for (int64_t len = 1; len < 1000; len += 113) {
            dcp_cache_desc d = small_desc();
            d.interleave = inters[w];
            d.max_seqs = 1;
            d.n_ranks = 1;
            dcp_cache *c = NULL;
            assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
            assert_int_equal(dcp_cache_extend(c, 0, len), DCP_OK);
            const double one = (double)dcp_cache_bytes(c, -1);
            dcp_cache_destroy(c);
            for (int n = 2; n <= 8; n++) {
                for (int r = 0; r < n; r++) {
                    d.n_ranks = n;
                    d.rank = r;
                    const size_t page =
                        32 * 2 * (7 + 4) * 2 * 2; /* tokens heads dims layers bf16 */
                    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
                    assert_int_equal(dcp_cache_extend(c, 0, len), DCP_OK);
                    const double own = (double)dcp_cache_bytes(c, 0);
                    assert_true(own == (double)dcp_cache_bytes(c, -1));
                    assert_true(own - one / n <= (double)page && one / n - own <= (double)page);
                    dcp_cache_destroy(c);
                }
            }
        }
    }
}

static void test_fork(void **state)
{
    (void)state;
    for (int r = 0; r < 3; r++) {
        dcp_cache_desc d = small_desc();
        d.rank = r;
        dcp_cache *c = NULL;
        assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
        append(c, &d, 0, 300, 0);
        append(c, &d, 1, 50, 1); /* forgotten by the fork into it */
        const size_t one = dcp_cache_bytes(c, 0);
        assert_int_equal(dcp_cache_fork(c, 0, 1, 250), DCP_OK);
        assert_int_equal(dcp_cache_length(c, 1), 250);
        check(c, &d, 1, 0, 250, 0);
        /* Shared: at most the last page is a copy. */
        const size_t page = 32 * 2 * (7 + 4) * 2 * 2;
        assert_true(dcp_cache_bytes(c, -1) <= one + page);
        /* Both go on alone. */
        append(c, &d, 1, 100, 2);
        append(c, &d, 0, 100, 3);
        check(c, &d, 0, 0, 300, 0);
        check(c, &d, 0, 300, 400, 3);
        check(c, &d, 1, 0, 250, 0);
        check(c, &d, 1, 250, 350, 2);
        /* Cut into shared pages, go on: copy on write. */
        assert_int_equal(dcp_cache_truncate(c, 1, 110), DCP_OK);
        append(c, &d, 1, 120, 4);
        check(c, &d, 1, 0, 110, 0);
        check(c, &d, 1, 110, 230, 4);
        check(c, &d, 0, 0, 300, 0);
        /* The source goes; the copy stays. */
        assert_int_equal(dcp_cache_fork(c, 1, 2, 230), DCP_OK);
        assert_int_equal(dcp_cache_truncate(c, 0, 0), DCP_OK);
        assert_int_equal(dcp_cache_truncate(c, 1, 0), DCP_OK);
        append(c, &d, 3, 400, 6); /* takes the pages that are free */
        check(c, &d, 2, 0, 110, 0);
        check(c, &d, 2, 110, 230, 4);
        check(c, &d, 3, 0, 400, 6);
        /* A store into shared positions leaves the other alone. */
        assert_int_equal(dcp_cache_fork(c, 3, 0, 300), DCP_OK);
        float row[2 * 7] = {0};
        assert_int_equal(dcp_cache_store(c, 0, 1, 0, 1, row, 0, row, 0), DCP_OK);
        check(c, &d, 3, 0, 400, 6);
        assert_int_equal(dcp_cache_truncate(c, 0, 0), DCP_OK);
        assert_int_equal(dcp_cache_truncate(c, 2, 0), DCP_OK);
        assert_int_equal(dcp_cache_truncate(c, 3, 0), DCP_OK);
        assert_int_equal(dcp_cache_bytes(c, -1), 0);
        dcp_cache_destroy(c);
    }
}

/* Random forks, cuts and growth against a plain list of stamps. */
static void test_random(void **state)
{
    (void)state;
    unsigned seed = 20260401;
    print_message("seed %u\n", seed);
    for (int round = 0; round < 12; round++) {
        dcp_cache_desc d = small_desc();
        d.n_ranks = 1 + round % 4;
        d.rank = rand_r(&seed) % d.n_ranks;
        d.interleave = 1 + (int64_t)(rand_r(&seed) % 40);
        static const dcp_dtype types[] = {DCP_BF16, DCP_F32, DCP_I8, DCP_FP8_E4M3};
        d.dtype = types[round % 4];
        dcp_cache *c = NULL;
        assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
        static int stamps[4][1000];
        int64_t len[4] = {0};
        for (int step = 0; step < 60; step++) {
            const int64_t s = rand_r(&seed) % 4, o = rand_r(&seed) % 4;
            const int64_t total = len[0] + len[1] + len[2] + len[3];
            const int what = rand_r(&seed) % 4;
            if (what < 2) {
                int64_t n = rand_r(&seed) % 120;
                if (n > 1000 - total) n = 1000 - total;
                append(c, &d, s, n, step);
                for (int64_t i = 0; i < n; i++) stamps[s][len[s] + i] = step;
                len[s] += n;
            } else if (what == 2 && s != o) {
                int64_t n = len[s] > 0 ? rand_r(&seed) % (len[s] + 1) : 0;
                if (total - len[o] + n > 1000) n = 0;
                assert_int_equal(dcp_cache_fork(c, s, o, n), DCP_OK);
                for (int64_t i = 0; i < n; i++) stamps[o][i] = stamps[s][i];
                len[o] = n;
            } else if (len[s] > 0) {
                len[s] = rand_r(&seed) % (len[s] + 1);
                assert_int_equal(dcp_cache_truncate(c, s, len[s]), DCP_OK);
            }
        }
        for (int s = 0; s < 4; s++) {
            assert_int_equal(dcp_cache_length(c, s), len[s]);
            for (int64_t p = 0; p < len[s]; p++) check(c, &d, s, p, p + 1, stamps[s][p]);
        }
        for (int s = 0; s < 4; s++) assert_int_equal(dcp_cache_truncate(c, s, 0), DCP_OK);
        assert_int_equal(dcp_cache_bytes(c, -1), 0);
        dcp_cache_destroy(c);
    }
}

/* Without a size: by what a sequence may hold here, the same on all ranks. */
static void test_default_page(void **state)
{
    (void)state;
    static const struct {
        int64_t max_tokens, max_seqs;
        int n_ranks;
        int64_t page;
    } cases[] = {{1, 1, 1, 64},       {4095, 1, 1, 64},    {4096, 1, 1, 128},
                 {32767, 1, 1, 512},  {32768, 1, 1, 1024}, {1 << 20, 1, 1, 1024},
                 {32768, 1, 2, 512},  {32768, 1, 8, 128},  {32768, 8, 1, 128},
                 {32768, 0, 1, 1024}, {32768, 8, 3, 64},   {1 << 20, 1, 300, 64}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const int n_ranks = cases[i].n_ranks;
        const int step = n_ranks > 8 ? n_ranks - 1 : 1; /* of many, the first and the last */
        for (int rank = 0; rank < n_ranks; rank += step) {
            dcp_cache_desc d = small_desc();
            d.page_tokens = 0;
            d.n_ranks = n_ranks;
            d.rank = rank;
            d.max_tokens = cases[i].max_tokens;
            d.max_seqs = cases[i].max_seqs;
            dcp_cache *c = NULL;
            dcp_kv_view v;
            assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
            assert_int_equal(dcp_cache_view(c, 0, 0, &v), DCP_OK);
            assert_int_equal(v.page_tokens, cases[i].page);
            dcp_cache_destroy(c);
        }
    }
}

/* Refused without a trace; the texts, and what create refuses: test_cache_errors.c. */
static void test_errors(void **state)
{
    (void)state;
    dcp_cache *c = NULL;
    const dcp_cache_desc d = small_desc();
    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
    float row[14] = {0};
    dcp_kv_view v;
    assert_int_equal(dcp_cache_extend(c, 4, 1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_extend(c, -1, 1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_extend(c, 0, -1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_extend(c, 0, INT64_MAX), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_extend(NULL, 0, 1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_length(c, 4), -1);
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 1, row, 0, row, 0), DCP_ERR_ARG); /* no room */
    assert_int_equal(dcp_cache_extend(c, 0, 5), DCP_OK);
    assert_int_equal(dcp_cache_store(c, 0, 0, 4, 1, row, 0, row, 0), DCP_OK);
    assert_int_equal(dcp_cache_store(c, 0, 0, 4, 2, row, 0, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, -1, 1, row, 0, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, INT64_MAX, 1, row, 0, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 2, 0, 1, row, 0, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 1, NULL, 0, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 1, row, 0, NULL, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 1, row, 13, row, 0), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 3, row, INT64_MAX, row, 0), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "k_token_stride"));
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 3, row, 0, row, INT64_MAX / 8), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "v_token_stride"));
    assert_int_equal(dcp_cache_store(c, 0, 0, 0, 0, NULL, 0, NULL, 0), DCP_OK);
    assert_int_equal(dcp_cache_truncate(c, 0, -1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_truncate(c, 0, 6), DCP_OK);
    assert_int_equal(dcp_cache_length(c, 0), 5);
    assert_int_equal(dcp_cache_fork(c, 0, 0, 1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_fork(c, 0, 1, 6), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_fork(c, 0, 4, 1), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_view(c, 0, 2, &v), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_view(c, 0, 0, NULL), DCP_ERR_ARG);
    dcp_kv_scales scales;
    assert_int_equal(dcp_cache_scales(c, 4, 0, &scales), DCP_ERR_ARG);
    assert_non_null(
        strstr(dcp_last_error(), "dcp_cache_scales: sequence 4, this cache has 0 to 3"));
    assert_int_equal(dcp_cache_scales(c, 0, 2, &scales), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "dcp_cache_scales: layer 2, this cache has 0 to 1"));
    assert_int_equal(dcp_cache_scales(c, 0, 0, NULL), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_scales(NULL, 0, 0, &scales), DCP_ERR_ARG);
    assert_int_equal(dcp_cache_scales(c, 0, 0, &scales), DCP_OK); /* bf16: there are none */
    assert_null(scales.k_base);
    /* Out of memory: nothing changes, and it works once there is some. */
    dcp__alloc_set_limit(dcp__alloc_current() + 100);
    assert_int_equal(dcp_cache_extend(c, 0, 900), DCP_ERR_NOMEM);
    assert_int_equal(dcp_cache_length(c, 0), 5);
    dcp__alloc_set_limit(0);
    append(c, &d, 0, 900, 1);
    check(c, &d, 0, 5, 905, 1);
    dcp_cache_destroy(c);
    dcp_cache_destroy(NULL);
}

static void test_conversions(void **state)
{
    (void)state;
    unsigned seed = 7;
    enum { N = 64 };
    float x[N];
    uint16_t f16[N], bf16[N];
    for (int round = 0; round < 20000; round++) {
        for (int i = 0; i < N; i++) {
            uint32_t u = ((uint32_t)rand_r(&seed) << 17) ^ (uint32_t)rand_r(&seed);
            if (round % 4 == 1) u = (u & 0x80ffffffu) | 0x38000000u; /* near f16's denormals */
            if (round % 4 == 2) u = (u & 0x807fe000u) | 0x33000000u | (u & 0x1000u);
            if (round % 4 == 3) u |= 0x7f800000u;
            x[i] = dcp__f32_from_bits(u);
        }
        x[0] = 65519.99f;
        x[1] = 65520.0f;
        x[2] = -0.0f;
        x[3] = ldexpf(1.0f, -25);
        x[4] = ldexpf(1.5f, -25);
        x[5] = -INFINITY;
        dcp__kv_convert(DCP_F16, x, f16, N);
        dcp__kv_convert(DCP_BF16, x, bf16, N);
        for (int i = 0; i < N; i++) {
            if (f16[i] != dcp__f32_to_f16(x[i]) || bf16[i] != dcp__f32_to_bf16(x[i]))
                fail_msg("%a: f16 %04x want %04x, bf16 %04x want %04x", (double)x[i], f16[i],
                         dcp__f32_to_f16(x[i]), bf16[i], dcp__f32_to_bf16(x[i]));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth),       cmocka_unit_test(test_pages_never_move),
        cmocka_unit_test(test_huge_pages),   cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_fork),         cmocka_unit_test(test_random),
        cmocka_unit_test(test_default_page), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_conversions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
