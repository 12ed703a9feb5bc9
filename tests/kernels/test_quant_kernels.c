/* SPDX-License-Identifier: Apache-2.0 */
/* Every DEQUANT, QDOT, QDOT16, TO_Q16 and TO_BF16 line of kernels.inc that this CPU runs. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_quant.h"

#define SEED 0x9e3779b97f4a7c15u
enum { SLACK = 64, PAGE = 4096, MAX_ROWS = 17, MAX_K = 2048 };

static const struct {
    dcp_isa isa;
    int qtype;
    dcp__qdot_fn *fn;
    const char *name;
} qdots[] = {
#define ATTN(isa, dtype, fn)
#define MERGE_ROW(isa, part, merged, fn)
#define QDOT(level, qtype, fn) {DCP_ISA_##level, qtype, fn, #fn},
#define DEQUANT(isa, qtype, fn)
#include "kernels/kernels.inc"
#undef QDOT
#undef DEQUANT
};

static const struct {
    dcp_isa isa;
    int qtype;
    dcp__dequant_fn *fn;
    const char *name;
} dequants[] = {
#define QDOT(isa, qtype, fn)
#define DEQUANT(level, qtype, fn) {DCP_ISA_##level, qtype, fn, #fn},
#include "kernels/kernels.inc"
#undef QDOT
#undef DEQUANT
};

static const struct {
    dcp_isa isa;
    dcp__to_bf16_fn *fn;
    const char *name;
} to_bf16s[] = {
#define QDOT(isa, qtype, fn)
#define DEQUANT(isa, qtype, fn)
#define TO_BF16(level, fn) {DCP_ISA_##level, fn, #fn},
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT
};
static const struct {
    dcp_isa isa;
    enum dcp__feature feature;
    int qtype;
    dcp__qdot16_fn *fn;
    const char *name;
} qdot16s[] = {
#define ATTN(isa, dtype, fn)
#define MERGE_ROW(isa, part, merged, fn)
#define QDOT(isa, qtype, fn)
#define DEQUANT(isa, qtype, fn)
#define QDOT16(level, feature, qtype, fn) {DCP_ISA_##level, DCP__FEATURE_##feature, qtype, fn, #fn},
#include "kernels/kernels.inc"
};

static const struct {
    dcp_isa isa;
    dcp__to_q16_fn *fn;
    const char *name;
} to_q16s[] = {
#define TO_Q16(level, fn) {DCP_ISA_##level, fn, #fn},
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT
};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static dcp_isa best(void)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    return dcp__cpu_best_isa(&cpu);
}

/* Bytes that end where a page without access begins. */
struct fence {
    uint8_t *map, *end;
    size_t map_bytes;
};

static struct fence fence_make(size_t n_bytes)
{
    struct fence f;
    f.map_bytes = (n_bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    f.map = mmap(NULL, f.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(f.map != MAP_FAILED);
    f.end = f.map + f.map_bytes - PAGE;
    assert_int_equal(mprotect(f.end, PAGE, PROT_NONE), 0);
    return f;
}

static void fence_free(struct fence *f)
{
    assert_int_equal(munmap(f->map, f->map_bytes), 0);
}

static bool same(float a, float b)
{
    return (isnan(a) && isnan(b)) || dcp__f32_bits(a) == dcp__f32_bits(b);
}

static void stored_blocks_have_the_stored_values(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    for (size_t i = 0; i < COUNT(dequants); i++) {
        if (dequants[i].isa > isa || dequants[i].qtype == DCP__Q_F32) continue;
        char path[512], type[16];
        (void)snprintf(type, sizeof(type), "%s", dcp__q_name(dequants[i].qtype));
        for (char *c = type; *c != 0; c++)
            if (*c >= 'A' && *c <= 'Z') *c = (char)(*c - 'A' + 'a');
        (void)snprintf(path, sizeof(path), "%s/tests/data/quants/%s.bin", DCP_SOURCE_DIR, type);
        struct ref_quant ref;
        assert_int_equal(ref_quant_read(path, &ref), 0);
        assert_int_equal(ref.qtype, dequants[i].qtype);
        assert_int_equal(ref.elems, dcp__q_block_elems(ref.qtype));
        assert_int_equal(ref.bytes, dcp__q_block_bytes(ref.qtype));
        const int64_t n = ref.n_blocks * ref.elems;
        struct fence f = fence_make((size_t)(ref.n_blocks * ref.bytes) + SLACK);
        uint8_t *blocks = f.end - SLACK - ref.n_blocks * ref.bytes;
        memcpy(blocks, ref.blocks, (size_t)(ref.n_blocks * ref.bytes));
        float *got = malloc((size_t)n * sizeof(float));
        /* As one row, and as rows of one block. */
        for (int rows = 0; rows < 2; rows++) {
            memset(got, 0x55, (size_t)n * sizeof(float));
            if (rows == 0)
                dequants[i].fn(blocks, 0, 1, n, got, 0);
            else
                dequants[i].fn(blocks, (size_t)ref.bytes, ref.n_blocks, ref.elems, got, ref.elems);
            for (int64_t e = 0; e < n; e++)
                if (!same(got[e], ref.values[e]))
                    fail_msg("%s: block %lld element %lld is %a, want %a", dequants[i].name,
                             (long long)(e / ref.elems), (long long)(e % ref.elems), (double)got[e],
                             (double)ref.values[e]);
        }
        free(got);
        fence_free(&f);
        ref_quant_free(&ref);
    }
}

/* Weights of a test: rows end at a fence, SLACK bytes before it. */
struct rows {
    struct fence fence;
    uint8_t *at;
    size_t row_bytes;
    float *values; /* [n_rows][k], by the scalar kernel, checked above */
};

static struct rows rows_make(int qtype, int64_t n_rows, int64_t k, size_t gap, uint64_t *random)
{
    struct rows r;
    struct dcp__kernels scalar;
    dcp__kernels_select(DCP_ISA_SCALAR, &scalar);
    const int64_t n_blocks = k / dcp__q_block_elems(qtype);
    const size_t used = (size_t)n_blocks * dcp__q_block_bytes(qtype);
    r.row_bytes = used + gap;
    const size_t n_bytes = r.row_bytes * (size_t)(n_rows - 1) + used;
    r.fence = fence_make(n_bytes + SLACK);
    r.at = r.fence.end - SLACK - n_bytes;
    for (int64_t i = 0; i < n_rows; i++)
        ref_quant_fill(qtype, n_blocks, r.at + (size_t)i * r.row_bytes, random);
    r.values = malloc((size_t)(n_rows * k) * sizeof(float));
    scalar.dequant[qtype](r.at, r.row_bytes, n_rows, k, r.values, k);
    return r;
}

static void rows_free(struct rows *r)
{
    free(r->values);
    fence_free(&r->fence);
}

/* f32 products and sums in an order that adds at most 2 sqrt-ish terms per level: a dot of k
 * elements in 4 or more interleaved sums is off by less than (k / 16 + 16) half ulps of sum |v x|
 * in the worst case; the values' own products add 3 more (scale, quant, minimum apart). */
static double tolerance(int64_t k, double sum_abs, double min_abs)
{
    return ((double)k / 16.0 + 20.0) * 0x1p-24 * (sum_abs + min_abs);
}

/* Types with a minimum sum d q x and m x apart, which may cancel: bound by the largest value. */
static double spread(const float *v, const float *x, int64_t k)
{
    float top = 0.0f;
    double sum = 0.0;
    for (int64_t e = 0; e < k; e++) top = fmaxf(top, fabsf(v[e]));
    for (int64_t e = 0; e < k; e++) sum += fabs((double)x[e]);
    return sum * (double)top;
}

static void check_qdot(size_t line, int64_t n_rows, int64_t k, size_t gap, uint64_t *random)
{
    const int qtype = qdots[line].qtype;
    struct rows r = rows_make(qtype, n_rows, k, gap, random);
    struct fence f = fence_make((size_t)k * sizeof(float));
    float *x = (float *)(void *)f.end - k; /* nothing beyond x may be read */
    for (int64_t e = 0; e < k; e++) x[e] = ref_quant_unit(random) * (e % 7 == 0 ? 100.0f : 1.0f);
    float y[MAX_ROWS + 1], part[MAX_ROWS + 1];
    for (int i = 0; i <= MAX_ROWS; i++) y[i] = part[i] = 12345.0f;
    qdots[line].fn(r.at, r.row_bytes, n_rows, k, x, y);
    for (int64_t i = 0; i < n_rows; i++) {
        double sum_abs;
        const double want = ref_quant_dot(r.values + i * k, x, k, &sum_abs);
        const double tol = tolerance(k, sum_abs, spread(r.values + i * k, x, k));
        if (!(fabs((double)y[i] - want) <= tol))
            fail_msg("%s: %lld rows, k %lld, gap %zu: row %lld is %.9g, want %.9g +- %.2g",
                     qdots[line].name, (long long)n_rows, (long long)k, gap, (long long)i,
                     (double)y[i], want, tol);
    }
    assert_true(dcp__f32_bits(y[n_rows]) == dcp__f32_bits(12345.0f));
    /* Bits do not depend on the company. */
    for (int64_t i = 0; i < n_rows;) {
        int64_t n = 1 + (int64_t)(ref_quant_random(random) % 5);
        if (n > n_rows - i) n = n_rows - i;
        qdots[line].fn(r.at + (size_t)i * r.row_bytes, r.row_bytes, n, k, x, part + i);
        i += n;
    }
    if (memcmp(y, part, sizeof(y)) != 0)
        fail_msg("%s: %lld rows, k %lld: bits depend on the other rows", qdots[line].name,
                 (long long)n_rows, (long long)k);
    fence_free(&f);
    rows_free(&r);
}

static void products_match_double(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    uint64_t random = SEED;
    print_message("seed %#llx\n", (unsigned long long)SEED);
    for (size_t i = 0; i < COUNT(qdots); i++) {
        if (qdots[i].isa > isa) continue;
        const int64_t block = dcp__q_block_elems(qdots[i].qtype);
        for (int64_t n_rows = 1; n_rows <= MAX_ROWS; n_rows++)
            check_qdot(i, n_rows, block * (1 + n_rows % 3), (size_t)(n_rows % 5), &random);
        for (int64_t n_blocks = 1; n_blocks * block <= MAX_K; n_blocks += block == 1 ? 37 : 1)
            check_qdot(i, 3, n_blocks * block, 0, &random);
        check_qdot(i, MAX_ROWS, MAX_K, 1, &random);
        qdots[i].fn(NULL, 0, 0, block, NULL, NULL);
    }
}

static void an_infinite_or_nan_x_shows(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    uint64_t random = SEED;
    for (size_t i = 0; i < COUNT(qdots); i++) {
        if (qdots[i].isa > isa) continue;
        const int64_t k = 512;
        struct rows r = rows_make(qdots[i].qtype, 2, k, 0, &random);
        float x[512], y[2];
        for (int64_t e = 0; e < k; e++) x[e] = ref_quant_unit(&random);
        x[137] = NAN;
        qdots[i].fn(r.at, r.row_bytes, 2, k, x, y);
        assert_true(isnan(y[0]) && isnan(y[1]));
        rows_free(&r);
    }
}

static void dequantised_bits_are_the_same_everywhere(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    uint64_t random = SEED;
    for (size_t i = 0; i < COUNT(dequants); i++) {
        if (dequants[i].isa > isa) continue;
        const int64_t block = dcp__q_block_elems(dequants[i].qtype);
        for (int64_t n_blocks = 1; n_blocks <= (block == 1 ? 70 : 5); n_blocks++) {
            const int64_t n_rows = 1 + n_blocks % 4, k = n_blocks * block, stride = k + 3;
            struct rows r =
                rows_make(dequants[i].qtype, n_rows, k, (size_t)(n_blocks % 3), &random);
            float *got = malloc((size_t)(n_rows * stride) * sizeof(float));
            for (int64_t e = 0; e < n_rows * stride; e++) got[e] = 7.0f;
            dequants[i].fn(r.at, r.row_bytes, n_rows, k, got, stride);
            for (int64_t e = 0; e < n_rows * stride; e++) {
                const int64_t row = e / stride, at = e % stride;
                const float want = at < k ? r.values[row * k + at] : 7.0f;
                if (!same(got[e], want))
                    fail_msg("%s: k %lld row %lld element %lld: %a, want %a", dequants[i].name,
                             (long long)k, (long long)row, (long long)at, (double)got[e],
                             (double)want);
            }
            free(got);
            rows_free(&r);
        }
    }
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    uint64_t random = SEED;
    enum { N = 4096 + 19 };
    static float x[N];
    static uint16_t got[N + 1];
    for (int i = 0; i < N; i++) x[i] = dcp__f32_from_bits((uint32_t)ref_quant_random(&random));
    x[0] = NAN;
    x[1] = dcp__f32_from_bits(0x7f800001u);
    x[2] = INFINITY;
    x[3] = dcp__f32_from_bits(1u);
    x[4] = dcp__f32_from_bits(0x3f808000u);
    x[5] = dcp__f32_from_bits(0x3f818000u);
    for (size_t i = 0; i < COUNT(to_bf16s); i++) {
        if (to_bf16s[i].isa > isa) continue;
        for (int64_t n = 0; n < N; n = n < 70 ? n + 1 : n * 3) {
            got[n] = 0x1234;
            to_bf16s[i].fn(x, n, got);
            for (int64_t e = 0; e < n; e++) assert_int_equal(got[e], dcp__f32_to_bf16(x[e]));
            assert_int_equal(got[n], 0x1234);
        }
    }
}

static void unknown_types_have_no_geometry(void **state)
{
    (void)state;
    assert_int_equal(dcp__q_block_elems(4), 0);
    assert_int_equal(dcp__q_block_bytes(-1), 0);
    assert_string_equal(dcp__q_name(99), "?");
    assert_string_equal(dcp__q_name(DCP__Q_Q4_K), "Q4_K");
}

/* --- activations in int16 --- */

/* Everything that a kernel may look at, ending where a page without access begins. */
struct activations {
    struct dcp__q16_row row;
    float *x;
    struct fence fences[DCP__Q16_ORDERS + 4];
    int n_fences;
};

static void *fenced(struct activations *a, size_t n_bytes)
{
    struct fence *f = &a->fences[a->n_fences++];
    *f = fence_make(n_bytes);
    return f->end - n_bytes;
}

static struct activations activations_make(int64_t k, dcp__to_q16_fn *to_q16, uint64_t *random)
{
    struct activations a = {.n_fences = 0};
    const size_t groups = (size_t)(k / 32 + 15) / 16 * 16, units = (size_t)(k + 127) / 128;
    a.x = malloc((size_t)k * sizeof(float));
    for (int64_t e = 0; e < k; e++)
        a.x[e] = ref_quant_unit(random) * (e % 7 == 0 ? 100.0f : 1.0f) *
                 (e / 32 % 5 == 3 ? 1e-6f : 1.0f);
    int16_t *words = fenced(&a, (size_t)k * sizeof(int16_t));
    float *scale = fenced(&a, groups * sizeof(float)),
          *pairs = fenced(&a, 2 * groups * sizeof(float));
    float *half_sum = fenced(&a, (size_t)(k / 16) * sizeof(float));
    to_q16(a.x, k, words, scale, pairs, half_sum);
    a.row =
        (struct dcp__q16_row){.words = words, .scale = scale, .pairs = pairs, .half_sum = half_sum};
    for (int order = 0; order < DCP__Q16_ORDERS; order++) {
        int8_t *planes = fenced(&a, units * 256);
        dcp__q16_lay_out(words, k, order, planes);
        a.row.planes[order] = planes;
    }
    return a;
}

static void activations_free(struct activations *a)
{
    for (int i = 0; i < a->n_fences; i++) fence_free(&a->fences[i]);
    free(a->x);
}

/* docs/NUMERICS.md: sum |v| top of the group / 61,500 for the rounding of x (q - 8 and the like are
 * differences: the unsigned quants count, at most 2 max |v| with minima), and f32's own errors. */
static double tolerance16(const float *v, const float *x, int64_t k)
{
    double rounding = 0.0, sum_abs = 0.0, top_v = 0.0, sum_top = 0.0;
    for (int64_t e = 0; e < k; e++) top_v = fmax(top_v, fabs((double)v[e]));
    for (int64_t g = 0; g < k; g += 32) {
        double top = 0.0, abs_v = 0.0;
        for (int64_t e = g; e < g + 32; e++) {
            top = fmax(top, fabs((double)x[e]));
            abs_v += fabs((double)v[e]);
            sum_abs += fabs((double)v[e] * (double)x[e]);
        }
        rounding += abs_v * top / 61500.0;
        sum_top += 32.0 * top;
    }
    return rounding + ((double)k / 16.0 + 20.0) * 0x1p-24 * (sum_abs + top_v * sum_top);
}

static void activations_are_the_same_everywhere(void **state)
{
    (void)state;
    const dcp_isa isa = best();
    uint64_t random = SEED;
    static const float tops[] = {1.0f,   3e38f, 0x1p-100f, 0x1.fffffep-101f,
                                 1e-45f, 0.0f,  NAN,       INFINITY};
    for (size_t i = 0; i < COUNT(to_q16s); i++) {
        if (to_q16s[i].isa > isa) continue;
        for (int round = 0; round < 400; round++) {
            enum { K = 96 };
            float x[K], scale[2][16], pairs[2][32], half_sum[2][6];
            int16_t words[2][K];
            const float top = tops[(size_t)round % COUNT(tops)];
            for (int e = 0; e < K; e++) x[e] = ref_quant_unit(&random) * (e < 64 ? 1.0f : top);
            x[64 + round % 32] = round % 2 == 0 ? top : -top;
            to_q16s[0].fn(x, K, words[0], scale[0], pairs[0], half_sum[0]);
            to_q16s[i].fn(x, K, words[1], scale[1], pairs[1], half_sum[1]);
            assert_memory_equal(words[0], words[1], sizeof(words[0]));
            for (int g = 0; g < 16; g++) {
                assert_true(same(scale[0][g], scale[1][g]) &&
                            same(pairs[0][2 * g + 1], pairs[1][2 * g + 1]));
                assert_true(same(scale[1][g], pairs[1][2 * g]));
                assert_true(g < 3 || (scale[1][g] == 0.0f && pairs[1][2 * g + 1] == 0.0f));
            }
            for (int h = 0; h < 6; h++) assert_true(same(half_sum[0][h], half_sum[1][h]));
            for (int e = 0; e < K; e++) {
                const double s = (double)scale[1][e / 32], off = (double)x[e] - s * words[1][e];
                assert_true(abs(words[1][e]) <= 32639);
                if (isfinite(s)) assert_true(fabs(off) <= 0.51 * s + 0x1p-100);
            }
            assert_true(isfinite(top) ? isfinite(scale[1][2]) : isnan(pairs[1][5]));
        }
    }
}

static void digits_make_up_the_words(void **state)
{
    (void)state;
    enum { K = 288 };
    int16_t words[K];
    int8_t planes[768];
    for (int e = 0; e < K; e++) words[e] = (int16_t)(e * 227 - 32639);
    for (int order = 0; order < DCP__Q16_ORDERS; order++) {
        int64_t seen = 0, sum = 0, want = 0;
        dcp__q16_lay_out(words, K, order, planes);
        for (int at = 0; at < 768; at += 128) {
            for (int e = 0; e < 64; e++) {
                const int word = 256 * planes[at + e] + planes[at + 64 + e];
                sum += (int64_t)word * word % 1000003;
                seen += word != 0;
            }
        }
        for (int e = 0; e < K; e++) want += (int64_t)words[e] * words[e] % 1000003;
        assert_int_equal(seen, K);
        assert_int_equal(sum, want);
    }
}

static void check_qdot16(size_t line, int64_t n_rows, int64_t k, size_t gap, int n_tokens,
                         uint64_t *random)
{
    const int qtype = qdot16s[line].qtype;
    struct rows r = rows_make(qtype, n_rows, k, gap, random);
    struct dcp__kernels scalar;
    dcp__kernels_select(DCP_ISA_SCALAR, &scalar);
    enum { MAX_T = 9, STRIDE = MAX_ROWS + 2 };
    struct activations a[MAX_T];
    struct dcp__q16_row x[MAX_T];
    for (int t = 0; t < n_tokens; t++) {
        a[t] = activations_make(k, scalar.to_q16, random);
        x[t] = a[t].row;
    }
    static float y[MAX_T * STRIDE], want[MAX_T * STRIDE];
    for (int i = 0; i < MAX_T * STRIDE; i++) y[i] = want[i] = 12345.0f;
    qdot16s[line].fn(r.at, r.row_bytes, n_rows, k, x, n_tokens, y, STRIDE);
    /* Each row and token alone, by the scalar kernel: the same bits. */
    for (int64_t i = 0; i < n_rows; i++)
        for (int t = 0; t < n_tokens; t++)
            scalar.qdot16[qtype](r.at + (size_t)i * r.row_bytes, r.row_bytes, 1, k, x + t, 1,
                                 want + t * STRIDE + i, STRIDE);
    for (int i = 0; i < MAX_T * STRIDE; i++)
        if (!same(y[i], want[i]))
            fail_msg("%s: %lld rows, k %lld, %d tokens: token %d row %d is %a, by the scalar "
                     "kernel %a",
                     qdot16s[line].name, (long long)n_rows, (long long)k, n_tokens, i / STRIDE,
                     i % STRIDE, (double)y[i], (double)want[i]);
    for (int t = 0; t < n_tokens; t++) {
        for (int64_t i = 0; i < n_rows; i++) {
            const float *v = r.values + i * k;
            double sum_abs;
            const double exact = ref_quant_dot(v, a[t].x, k, &sum_abs);
            const double tol = tolerance16(v, a[t].x, k), got = (double)y[t * STRIDE + i];
            if (!(fabs(got - exact) <= tol))
                fail_msg("%s: k %lld, token %d of %d, row %lld is %.9g, want %.9g +- %.2g",
                         qdot16s[line].name, (long long)k, t, n_tokens, (long long)i, got, exact,
                         tol);
        }
        activations_free(&a[t]);
    }
    rows_free(&r);
}

static void integer_products_match_double(void **state)
{
    (void)state;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    uint64_t random = SEED;
    for (size_t i = 0; i < COUNT(qdot16s); i++) {
        if (qdot16s[i].isa > dcp__cpu_best_isa(&cpu) ||
            !dcp__has_feature(&cpu, qdot16s[i].feature)) {
            if (qdot16s[i].qtype == DCP__Q_Q8_0)
                print_message("not run here: %s and its like\n", qdot16s[i].name);
            continue;
        }
        const int64_t block = dcp__q_block_elems(qdot16s[i].qtype);
        for (int64_t n_rows = 1; n_rows <= 9; n_rows++)
            check_qdot16(i, n_rows, block * (1 + n_rows % 3), (size_t)(n_rows % 5), (int)n_rows,
                         &random);
        for (int64_t n_blocks = 1; n_blocks * block <= 1152; n_blocks++)
            check_qdot16(i, 3, n_blocks * block, 0, 1 + (int)(n_blocks % 4), &random);
        check_qdot16(i, MAX_ROWS, MAX_K, 1, 1, &random);
        qdot16s[i].fn(NULL, 0, 0, block, NULL, 1, NULL, 0);
    }
}

static void an_infinite_or_nan_x_shows_in_integers(void **state)
{
    (void)state;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    uint64_t random = SEED;
    for (size_t i = 0; i < COUNT(qdot16s); i++) {
        if (qdot16s[i].isa > dcp__cpu_best_isa(&cpu) || !dcp__has_feature(&cpu, qdot16s[i].feature))
            continue;
        const int64_t k = 512;
        struct rows r = rows_make(qdot16s[i].qtype, 2, k, 0, &random);
        struct activations a = activations_make(k, to_q16s[0].fn, &random);
        a.x[137] = i % 2 == 0 ? NAN : -INFINITY;
        to_q16s[0].fn(a.x, k, (int16_t *)(uintptr_t)a.row.words, (float *)(uintptr_t)a.row.scale,
                      (float *)(uintptr_t)a.row.pairs, (float *)(uintptr_t)a.row.half_sum);
        float y[2];
        qdot16s[i].fn(r.at, r.row_bytes, 2, k, &a.row, 1, y, 0);
        assert_true(isnan(y[0]) && isnan(y[1]));
        activations_free(&a);
        rows_free(&r);
    }
}

/* What docs/NUMERICS.md states: on ordinary data, in units of the output's rms. */
static void error_of_int16_is_small(void **state)
{
    (void)state;
    enum { N = 200, K = 1024 };
    uint64_t random = SEED;
    for (size_t i = 0; i < COUNT(qdot16s) && qdot16s[i].isa == DCP_ISA_SCALAR; i++) {
        double error = 0.0, size = 0.0;
        struct activations a = activations_make(K, to_q16s[0].fn, &random);
        for (int e = 0; e < K; e++) /* roughly normal */
            a.x[e] = ref_quant_unit(&random) + ref_quant_unit(&random) + ref_quant_unit(&random);
        to_q16s[0].fn(a.x, K, (int16_t *)(uintptr_t)a.row.words, (float *)(uintptr_t)a.row.scale,
                      (float *)(uintptr_t)a.row.pairs, (float *)(uintptr_t)a.row.half_sum);
        for (int n = 0; n < N; n++) {
            struct rows r = rows_make(qdot16s[i].qtype, 1, K, 0, &random);
            float y;
            double sum_abs;
            qdot16s[i].fn(r.at, r.row_bytes, 1, K, &a.row, 1, &y, 0);
            const double want = ref_quant_dot(r.values, a.x, K, &sum_abs);
            error += ((double)y - want) * ((double)y - want);
            size += want * want;
            rows_free(&r);
        }
        const double relative = sqrt(error / size);
        print_message("%s: error %.2g of the output's rms\n", qdot16s[i].name, relative);
        assert_true(relative < 6e-5);
        activations_free(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_blocks_have_the_stored_values),
        cmocka_unit_test(products_match_double),
        cmocka_unit_test(an_infinite_or_nan_x_shows),
        cmocka_unit_test(dequantised_bits_are_the_same_everywhere),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(activations_are_the_same_everywhere),
        cmocka_unit_test(digits_make_up_the_words),
        cmocka_unit_test(integer_products_match_double),
        cmocka_unit_test(an_infinite_or_nan_x_shows_in_integers),
        cmocka_unit_test(error_of_int16_is_small),
        cmocka_unit_test(unknown_types_have_no_geometry),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
