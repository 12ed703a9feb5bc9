/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of int8 and fp8: numbers and scales against double arithmetic, special values, and what a
 * cache makes of them. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cache/cache_priv.h"
#include "dcpattn/cache.h"
#include "num/dtype_priv.h"
#include "ref/ref_merge.h"

enum { MAX_N = 200 };
static const dcp_dtype types[] = {DCP_I8, DCP_FP8_E4M3};

static uint64_t rng_state;
static double uniform(void) /* [-1, 1) */
{
    return (double)(ref_random(&rng_state) >> 11) * 0x1p-52 - 1.0;
}

static double largest_of(const float *x, int64_t n)
{
    double m = 0.0;
    for (int64_t i = 0; i < n; i++) m = fmax(m, fabs((double)x[i]));
    return m;
}

/* The value of an e4m3 code by its definition. */
static double e4m3(uint8_t code)
{
    const int e = (code >> 3) & 15, m = code & 7;
    const double a = e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
    if (e == 15 && m == 7) return NAN;
    return code & 0x80 ? -a : a;
}

static void check_row(dcp_dtype t, const float *x, int64_t n)
{
    uint8_t codes[MAX_N + 1];
    memset(codes, 0x55, sizeof(codes));
    const double scale = (double)dcp__kv_quantise(t, x, codes, n);
    assert_int_equal(codes[n], 0x55);
    const double m = largest_of(x, n);
    if (t == DCP_I8) {
        assert_true(fabs(scale - m / 127.0) <= m / 127.0 * 0x1p-24);
    } else {
        int e;
        assert_true(frexp(scale, &e) == 0.5); /* a power of two, the least that holds the row */
        assert_true(m / scale <= 448.0 && m / scale > 224.0);
    }
    for (int64_t i = 0; i < n; i++) {
        const double y = (double)x[i] / scale;
        if (t == DCP_I8) {
            const int8_t code = (int8_t)codes[i];
            assert_true(code >= -127); /* symmetric */
            /* The nearest; where two are nearly as near (the inverse is rounded), either. */
            assert_true(fabs((double)code - y) <= 0.5 + 127.0 * 0x1p-22);
        } else {
            /* No neighbour is nearer; of two as near, the even one. */
            const double error = fabs(e4m3(codes[i]) - y);
            const uint8_t magnitude = codes[i] & 0x7f;
            assert_true(magnitude <= 0x7e);
            for (int step = -1; step <= 1; step += 2) {
                const int other = (int)magnitude + step;
                if (other < 0 || other > 0x7e) continue;
                const double other_error = fabs(fabs(y) - e4m3((uint8_t)other));
                assert_true(error < other_error || (error == other_error && (magnitude & 1) == 0));
            }
            assert_int_equal(codes[i] & 0x80, signbit(x[i]) ? 0x80 : 0);
        }
    }
}

static void test_rows(void **state)
{
    (void)state;
    rng_state = 7;
    print_message("seed 7\n");
    for (int t = 0; t < 2; t++) {
        for (int round = 0; round < 3000; round++) {
            float x[MAX_N];
            const int64_t n = 1 + (int64_t)(ref_random(&rng_state) % MAX_N);
            const int exponent = (int)(ref_random(&rng_state) % 220) - 98;
            for (int64_t i = 0; i < n; i++) {
                double y = uniform();
                if (round % 3 == 1)
                    y = ldexp(y, -(int)(ref_random(&rng_state) % 30));    /* many magnitudes */
                if (round % 3 == 2) y = (double)(int)(y * 254.0) / 254.0; /* ties */
                x[i] = (float)ldexp(y, exponent);
            }
            /* A row of one size that its scale must follow, whatever the rest. */
            x[ref_random(&rng_state) % (uint64_t)n] =
                (float)ldexp(1.0 + fabs(uniform()) * 0.99, exponent);
            check_row(types[t], x, n);
        }
    }
}

static void test_borders(void **state)
{
    (void)state;
    float x[3] = {0.0f, 0.0f, 0.0f};
    uint8_t codes[3];
    for (int t = 0; t < 2; t++) {
        /* 448 * 2^k is the largest of its scale; the next float takes the next. */
        x[0] = 448.0f;
        x[1] = -448.0f;
        const float at = dcp__kv_quantise(types[t], x, codes, 3);
        if (types[t] == DCP_FP8_E4M3) {
            assert_true(at == 1.0f);
            assert_int_equal(codes[0], 0x7e);
            assert_int_equal(codes[1], 0xfe);
            x[0] = nextafterf(448.0f, 1000.0f);
            assert_true(dcp__kv_quantise(types[t], x, codes, 3) == 2.0f);
            assert_int_equal(codes[0], 0x76); /* 224 */
        } else {
            assert_int_equal((int8_t)codes[0], 127);
            assert_int_equal((int8_t)codes[1], -127);
        }
        /* The ends of the range. */
        x[0] = FLT_MAX;
        x[1] = 1.0f;
        check_row(types[t], x, 3);
        x[0] = 0x1p-100f;
        x[1] = 0x1p-101f;
        x[2] = -0.0f;
        check_row(types[t], x, 3);
        /* Zeros, and what is so small that it counts as zero. */
        x[0] = nextafterf(0x1p-100f, 0.0f);
        x[1] = FLT_TRUE_MIN;
        memset(codes, 1, sizeof(codes));
        assert_true(dcp__kv_quantise(types[t], x, codes, 3) == 0.0f);
        for (int i = 0; i < 3; i++) assert_int_equal(codes[i], 0);
        memset(x, 0, sizeof(x));
        assert_true(dcp__kv_quantise(types[t], x, codes, 3) == 0.0f);
        /* One that is not finite: the whole row is NaN. */
        static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
        for (int i = 0; i < 4; i++) {
            x[0] = 1.0f;
            x[2] = bad[i];
            assert_true(isnan(dcp__kv_quantise(types[t], x, codes, 3)));
            assert_true(!isnan(e4m3(codes[0])));
        }
        x[2] = 0.0f;
    }
}

static float value_of(dcp_dtype t, uint8_t code, float scale)
{
    return scale * (t == DCP_I8 ? (float)(int8_t)code : dcp__e4m3_to_f32(code));
}

/* What is read back and stored again stays what it is: int8 to a rounding of the scale, fp8 exactly
 * (its scale may halve where the largest was rounded down). */
static void test_again(void **state)
{
    (void)state;
    rng_state = 9;
    for (int t = 0; t < 2; t++) {
        for (int round = 0; round < 500; round++) {
            float x[64], y[64];
            uint8_t first[64], second[64];
            for (int i = 0; i < 64; i++) x[i] = (float)(uniform() * 30.0);
            const float scale = dcp__kv_quantise(types[t], x, first, 64);
            for (int i = 0; i < 64; i++) y[i] = value_of(types[t], first[i], scale);
            const float again = dcp__kv_quantise(types[t], y, second, 64);
            for (int i = 0; i < 64; i++) {
                const float z = value_of(types[t], second[i], again);
                assert_true(types[t] == DCP_I8 ? fabsf(z - y[i]) <= fabsf(y[i]) * 0x1p-22f
                                               : z == y[i]);
            }
        }
    }
}

/* Dims that leave parts of a page at odd sizes: parts start aligned, and none overlaps another. */
static void test_layout(void **state)
{
    (void)state;
    static const int64_t dims[] = {1, 7, 31, 64, 65, 192};
    for (int i = 0; i < 6; i++) {
        for (int latent = 0; latent < 2; latent++) {
            dcp_cache_desc d = DCP_CACHE_DESC_INIT;
            d.n_layers = 3;
            d.n_kv_heads = latent ? 1 : 3;
            d.key_dim = dims[i];
            d.value_dim = latent ? (dims[i] + 1) / 2 : dims[5 - i];
            d.latent = (uint32_t)latent;
            d.page_tokens = 32;
            d.max_tokens = 64;
            d.dtype = DCP_I8;
            dcp_cache *c = NULL;
            assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
            assert_int_equal(dcp_cache_extend(c, 0, 33), DCP_OK);
            uintptr_t end = 0;
            for (int64_t l = 0; l < 3; l++) {
                dcp_kv_view v;
                dcp_kv_scales s;
                assert_int_equal(dcp_cache_view(c, 0, l, &v), DCP_OK);
                assert_int_equal(dcp_cache_scales(c, 0, l, &s), DCP_OK);
                const uintptr_t rows = 32u * (uintptr_t)d.n_kv_heads;
                const uintptr_t parts[4][2] = {
                    {(uintptr_t)v.k_base, rows * (uintptr_t)d.key_dim},
                    {(uintptr_t)s.k_base, rows * sizeof(float)},
                    {(uintptr_t)v.v_base, rows * (uintptr_t)d.value_dim},
                    {(uintptr_t)s.v_base, rows * sizeof(float)},
                };
                for (int p = 0; p < (latent ? 2 : 4); p++) {
                    assert_int_equal(parts[p][0] % 64, 0);
                    assert_true(end == 0 || parts[p][0] >= end);
                    end = parts[p][0] + parts[p][1];
                }
                if (latent) {
                    assert_ptr_equal(v.v_base, v.k_base);
                    assert_ptr_equal(s.v_base, s.k_base);
                }
                assert_int_equal(s.k_page_stride_bytes, v.k_page_stride_bytes);
                if (l == 2)
                    assert_true(end - (uintptr_t)v.k_base <= (uintptr_t)v.k_page_stride_bytes);
            }
            dcp_cache_destroy(c);
        }
    }
}

/* A NaN that is stored is read as NaN, in its own row alone; an int8 cache of dim 64 takes 68 bytes
 * a token, head, K and V. */
static void test_store(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        dcp_cache_desc d = DCP_CACHE_DESC_INIT;
        d.n_layers = 1;
        d.n_kv_heads = 2;
        d.key_dim = d.value_dim = 64;
        d.page_tokens = 32;
        d.max_tokens = 64;
        d.dtype = types[t];
        dcp_cache *c = NULL;
        assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
        assert_int_equal(dcp_cache_extend(c, 0, 2), DCP_OK);
        assert_int_equal(dcp_cache_bytes(c, 0), 32 * 2 * 2 * 68);
        float rows[2][2][64];
        for (int i = 0; i < 256; i++) (&rows[0][0][0])[i] = (float)i;
        rows[1][0][5] = NAN;
        assert_int_equal(dcp_cache_store(c, 0, 0, 0, 2, &rows[0][0][0], 0, &rows[0][0][0], 0),
                         DCP_OK);
        dcp_kv_view v;
        dcp_kv_scales s;
        assert_int_equal(dcp_cache_view(c, 0, 0, &v), DCP_OK);
        assert_int_equal(dcp_cache_scales(c, 0, 0, &s), DCP_OK);
        for (int slot = 0; slot < 2; slot++) {
            for (int g = 0; g < 2; g++) {
                const float k = ((const float *)s.k_base)[slot * s.k_slot_stride + g * 32];
                const float val = ((const float *)s.v_base)[slot * s.v_slot_stride + g * 32];
                assert_true(isnan(k) == (slot == 1 && g == 0));
                assert_true(isnan(val) == (slot == 1 && g == 0));
            }
        }
        dcp_cache_destroy(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),   cmocka_unit_test(test_borders), cmocka_unit_test(test_again),
        cmocka_unit_test(test_layout), cmocka_unit_test(test_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
