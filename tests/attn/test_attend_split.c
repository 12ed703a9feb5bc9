/* SPDX-License-Identifier: Apache-2.0 */
/* Where keys are cut: what holds of every division, over many of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "attend/attend_split_priv.h"

enum { BLOCK = DCP__ATTN_KEY_BLOCK, LEAST = DCP__ATTEND_SPLIT_KEYS, MOST = 40 };

static int64_t div_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static int64_t power_below(int64_t n)
{
    int64_t p = 1;
    while (2 * p <= n) p *= 2;
    return p;
}

static void check(int64_t lo, int64_t hi, int64_t most)
{
    const struct dcp__attend_split s = dcp__attend_split_keys(lo, hi, most);
    const int64_t n_keys = hi - lo, aim = power_below(most);
    bool ok = s.n >= 1 && s.n <= most;
    const bool is_cut = n_keys >= 2 * LEAST && most > 1;
    ok = ok && (s.n > 1) == is_cut; /* wherever two ranges are worth it, and nowhere else */
    if (is_cut) {
        const int64_t end = s.begin + s.n * s.keys;
        /* All keys, in whole blocks, none of them cut; keys to see in the first range and the last,
         * and so in each. */
        ok = ok && s.begin <= lo && end >= hi;
        ok = ok && s.begin % BLOCK == 0 && s.keys % BLOCK == 0 && s.keys >= LEAST;
        ok = ok && s.begin + s.keys > lo && end - s.keys < hi;
        /* Ranges are no longer than the aim asks for, but for whole blocks and the least. */
        const int64_t share = div_up(hi - s.begin, aim);
        ok = ok && (s.keys < share + BLOCK || s.keys == LEAST);
        /* The aim itself where it divides, wherever the keys begin. */
        const bool divides = (hi - s.begin) % (aim * BLOCK) == 0 && share >= LEAST;
        ok = ok && s.n <= aim && (!divides || s.n == aim);
        /* Where each is long beside a block, hardly fewer. */
        ok = ok && (share < aim * BLOCK || s.n == aim);
    } else {
        ok = ok && s.keys == 0 && s.begin == 0;
    }
    if (!ok)
        fail_msg("keys [%lld, %lld) in up to %lld: %lld ranges of %lld from %lld", (long long)lo,
                 (long long)hi, (long long)most, (long long)s.n, (long long)s.keys,
                 (long long)s.begin);
}

static void test_every_division(void **state)
{
    (void)state;
    static const int64_t begins[] = {0,   1,   63,   64,   65,   100,     255,
                                     256, 257, 1000, 1023, 4096, 1000003, (int64_t)1 << 40};
    static const int64_t near[] = {512, 1024, 2048, 4096, 8192, 65536, 1 << 20};
    for (size_t b = 0; b < sizeof(begins) / sizeof(begins[0]); b++) {
        const int64_t lo = begins[b];
        for (int64_t most = 1; most <= MOST; most++) {
            for (int64_t n = 0; n < 3000; n += n % 7 == 0 ? 1 : 13) check(lo, lo + n, most);
            for (size_t i = 0; i < sizeof(near) / sizeof(near[0]); i++) {
                for (int64_t d = -130; d <= 130; d++) check(lo, lo + near[i] + d, most);
            }
        }
    }
    check(5, 3, 8); /* rows that see nothing: lo and hi as the hull of none leaves them */
    check(INT64_MAX, 0, 8);
}

/* More keys from the same begin: never shorter ranges. */
static void test_monotone(void **state)
{
    (void)state;
    for (int64_t most = 2; most <= MOST; most++) {
        for (int64_t lo = 0; lo < 200; lo += 37) {
            int64_t before = 0;
            for (int64_t hi = lo + 2 * LEAST; hi < lo + 20000; hi += 11) {
                const int64_t keys = dcp__attend_split_keys(lo, hi, most).keys;
                assert_true(keys >= before);
                before = keys;
            }
        }
    }
}

/* Some by hand. */
static void test_examples(void **state)
{
    (void)state;
    static const struct {
        int64_t lo, hi, most, n, keys, begin;
    } cases[] = {
        {0, 511, 32, 1, 0, 0},
        {0, 512, 32, 2, 256, 0},
        {0, 1024, 9, 4, 256, 0},
        {0, 131072, 9, 8, 16384, 0},
        {0, 131072, 32, 32, 4096, 0},
        {0, 8256, 32, 26, 320, 0},  /* 258 keys each, in whole blocks */
        {0, 600, 32, 3, 256, 0},    /* ranges of the least */
        {100, 1124, 2, 2, 576, 64}, /* a window that begins in a block */
        {1000, 5096, 3, 2, 2112, 960},
        {64, 2112, 8, 8, 256, 64},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct dcp__attend_split s =
            dcp__attend_split_keys(cases[i].lo, cases[i].hi, cases[i].most);
        assert_int_equal(s.n, cases[i].n);
        assert_int_equal(s.keys, cases[i].keys);
        assert_int_equal(s.begin, cases[i].begin);
    }
}

/* Jobs of rows: enough for the threads, none too small, whole where keys are cut. */
static void test_block_rows(void **state)
{
    (void)state;
    /* MLA of 96 heads, two tokens, cut keys: one job for both, however many the threads. */
    for (int64_t threads = 1; threads <= 64; threads *= 2)
        assert_int_equal(dcp__attend_block_rows(2, 96, 1, threads, 2, 8), 2);
    /* 512 tokens, 8 KV heads of 4: best for two threads, 43 for 48, never below 96 rows. */
    assert_int_equal(dcp__attend_block_rows(256, 4, 8, 2, 512, 1), 256);
    assert_int_equal(dcp__attend_block_rows(256, 4, 8, 48, 512, 1), 43);
    assert_int_equal(dcp__attend_block_rows(256, 4, 8, 4096, 512, 1), 24);
    for (int64_t heads = 1; heads <= 128; heads += 9) {
        for (int64_t threads = 1; threads <= 200; threads += 13) {
            for (int64_t rows = 1; rows <= 5000; rows = rows * 3 + 1) {
                const int64_t best = div_up(1024, heads), least = div_up(DCP__ATTN_ROWS_MAX, heads);
                const int64_t x = dcp__attend_block_rows(best, heads, 8, threads, rows, 1);
                assert_true(x >= 1 && x <= best && (x >= least || x == best));
                assert_true(x <= least || x == best || 8 * div_up(rows, x) >= threads);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_rows),
        cmocka_unit_test(test_every_division),
        cmocka_unit_test(test_monotone),
        cmocka_unit_test(test_examples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
