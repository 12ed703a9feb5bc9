/* SPDX-License-Identifier: Apache-2.0 */
/* f16 and bf16 as bits, exhaustively where that is possible; contiguous cuts by brute force. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dcpattn/shard.h"
#include "num/dtype_priv.h"
#include "ref/ref_merge.h"

static void test_f16_all(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 0x10000u; i++) {
        const uint16_t h = (uint16_t)i;
        const double want = ref_get(DCP_F16, &h, 0);
        const float got = dcp__f16_to_f32(h);
        if (isnan(want)) {
            assert_true(isnan(got));
            assert_int_equal(dcp__f32_to_f16(got), h | 0x200u);
            continue;
        }
        assert_true((double)got == want && !signbit(got) == !signbit(want));
        assert_int_equal(dcp__f32_to_f16(got), h);
    }
}

/* Between two neighbours: below, at and above the middle. */
static void test_f16_rounding(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 0x7c00u; i++) {
        const uint16_t low = (uint16_t)i;
        const uint16_t high = (uint16_t)(i + 1u);
        const float a = dcp__f16_to_f32(low);
        const float b = i + 1u == 0x7c00u ? 65536.0f : dcp__f16_to_f32(high);
        const float mid = a + (b - a) / 2.0f; /* exact */
        assert_int_equal(dcp__f32_to_f16(nextafterf(mid, 0.0f)), low);
        assert_int_equal(dcp__f32_to_f16(mid), (low & 1u) == 0 ? low : high);
        assert_int_equal(dcp__f32_to_f16(nextafterf(mid, INFINITY)), high);
        assert_int_equal(dcp__f32_to_f16(-mid), 0x8000u | ((low & 1u) == 0 ? low : high));
    }
    assert_int_equal(dcp__f32_to_f16(INFINITY), 0x7c00u);
    assert_int_equal(dcp__f32_to_f16(-INFINITY), 0xfc00u);
    assert_int_equal(dcp__f32_to_f16(1e-40f), 0);
}

static void test_bf16(void **state)
{
    (void)state;
    uint64_t rng = 5;
    for (int i = 0; i < 200000; i++) {
        const float x = dcp__f32_from_bits((uint32_t)ref_random(&rng));
        const uint16_t got = dcp__f32_to_bf16(x);
        if (isnan(x)) {
            assert_true(isnan(dcp__bf16_to_f32(got)));
            continue;
        }
        uint16_t want = 0;
        ref_put(DCP_BF16, &want, 0, (double)x);
        assert_int_equal(got, want);
    }
    assert_true(isnan(dcp__bf16_to_f32(dcp__f32_to_bf16(dcp__f32_from_bits(0x7f800001u)))));
}

/* Every code against its definition; NaN is the top code alone. */
static double e4m3_value(uint32_t code)
{
    const int e = (int)(code >> 3) & 15, m = (int)code & 7;
    const double a = e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10);
    return code & 0x80u ? -a : a;
}
static void test_e4m3(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 256; code++) {
        const float got = dcp__e4m3_to_f32((uint8_t)code);
        if ((code & 0x7fu) == 0x7fu) {
            assert_true(isnan(got));
        } else {
            assert_true((double)got == e4m3_value(code));
            assert_true(!signbit(got) == ((code & 0x80u) == 0));
        }
        assert_int_equal(dcp__f32_to_e4m3(got), code);
    }
    /* Between two neighbours: below, at and above the middle. */
    for (uint32_t low = 0; low < 0x7e; low++) {
        const float a = (float)e4m3_value(low), b = (float)e4m3_value(low + 1);
        const float mid = a + (b - a) / 2.0f; /* exact */
        const uint32_t even = (low & 1u) == 0 ? low : low + 1;
        assert_int_equal(dcp__f32_to_e4m3(nextafterf(mid, 0.0f)), low);
        assert_int_equal(dcp__f32_to_e4m3(mid), even);
        assert_int_equal(dcp__f32_to_e4m3(nextafterf(mid, INFINITY)), low + 1);
        assert_int_equal(dcp__f32_to_e4m3(-mid), 0x80u | even);
    }
    static const float over[] = {449.0f, 464.0f, 480.0f, 1e30f, INFINITY};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(dcp__f32_to_e4m3(over[i]), 0x7e);
        assert_int_equal(dcp__f32_to_e4m3(-over[i]), 0xfe);
    }
    assert_int_equal(dcp__f32_to_e4m3(1e-40f), 0);
    assert_int_equal(dcp__f32_to_e4m3(dcp__f32_from_bits(0xff800001u)), 0xff);
}

static void test_names(void **state)
{
    (void)state;
    assert_int_equal(dcp_dtype_bytes(DCP_F32), 4);
    assert_int_equal(dcp_dtype_bytes(DCP_F16), 2);
    assert_int_equal(dcp_dtype_bytes(DCP_BF16), 2);
    assert_int_equal(dcp_dtype_bytes(DCP_I8), 1);
    assert_int_equal(dcp_dtype_bytes(DCP_FP8_E4M3), 1);
    assert_int_equal(dcp_dtype_bytes(DCP_DTYPE_DEFAULT), 0);
    assert_string_equal(dcp_dtype_name(DCP_BF16), "bf16");
    assert_string_equal(dcp_dtype_name(DCP_I8), "int8");
    assert_string_equal(dcp_dtype_name(DCP_FP8_E4M3), "fp8");
    assert_string_equal(dcp_dtype_name((dcp_dtype)77), "?");
}

static void test_cut(void **state)
{
    (void)state;
    for (int n = 1; n <= 20; n++) {
        for (int64_t items = 0; items <= 45; items++) {
            int64_t at = 0;
            for (int r = 0; r < n; r++) {
                const dcp_range own = dcp_cut_range(items, n, r);
                assert_int_equal(own.begin, at);
                assert_int_equal(own.end - own.begin, items / n + (r < items % n ? 1 : 0));
                for (int64_t i = own.begin; i < own.end; i++)
                    assert_int_equal(dcp_cut_owner(items, n, i), r);
                at = own.end;
            }
            assert_int_equal(at, items);
            assert_int_equal(dcp_cut_owner(items, n, items), -1);
            assert_int_equal(dcp_cut_owner(items, n, -1), -1);
        }
    }
    const int64_t huge = INT64_C(1) << 61;
    assert_true(dcp_cut_range(huge, 1024, 1023).end == huge);
    assert_int_equal(dcp_cut_owner(huge, 1024, huge - 1), 1023);
    assert_int_equal(dcp_cut_range(5, 0, 0).end, 0);
    assert_int_equal(dcp_cut_range(5, 2, 2).end, 0);
    assert_int_equal(dcp_cut_range(-5, 2, 0).end, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16_all), cmocka_unit_test(test_f16_rounding),
        cmocka_unit_test(test_bf16),    cmocka_unit_test(test_e4m3),
        cmocka_unit_test(test_names),   cmocka_unit_test(test_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
