/* SPDX-License-Identifier: Apache-2.0 */
/* linear_run against products in double: types, tokens, rows, threads, strides, compute types. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "engine/linear.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_quant.h"

#define SEED 0xd1b54a32d192ed03u
enum { MAX_T = 512, MAX_K = 2048 };
static const int64_t all_ks[] = {64, 256, 512, 576, 640, 768, MAX_K};

static const int all_types[] = {DCP__Q_F32,  DCP__Q_F16,  DCP__Q_BF16, DCP__Q_Q4_0,
                                DCP__Q_Q4_1, DCP__Q_Q5_0, DCP__Q_Q5_1, DCP__Q_Q8_0,
                                DCP__Q_Q4_K, DCP__Q_Q5_K, DCP__Q_Q6_K};
#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

struct matrix {
    struct weight w;
    uint8_t *blocks;
    float *values; /* [n_rows][k] */
};

static struct matrix matrix_make(int qtype, int64_t n_rows, int64_t k, uint64_t *random)
{
    struct matrix m = {.w = {.qtype = qtype, .n_rows = n_rows, .k = k}};
    struct dcp__kernels scalar;
    dcp__kernels_select(DCP_ISA_SCALAR, &scalar);
    const int64_t n_blocks = k / dcp__q_block_elems(qtype);
    m.w.row_bytes = (size_t)n_blocks * dcp__q_block_bytes(qtype);
    const size_t n_bytes = (m.w.row_bytes * (size_t)n_rows + 64 + 63) / 64 * 64;
    m.blocks = aligned_alloc(64, n_bytes);
    assert_non_null(m.blocks);
    memset(m.blocks, 0, n_bytes);
    ref_quant_fill(qtype, n_rows * n_blocks, m.blocks, random);
    m.w.data = m.blocks;
    m.values = malloc((size_t)(n_rows * k + 1) * sizeof(float));
    if (n_rows > 0) scalar.dequant[qtype](m.blocks, m.w.row_bytes, n_rows, k, m.values, k);
    return m;
}

static void matrix_free(struct matrix *m)
{
    free(m->blocks);
    free(m->values);
}

static float *floats(int64_t n, uint64_t *random)
{
    float *x = malloc((size_t)(n + 1) * sizeof(float));
    for (int64_t i = 0; i <= n; i++) x[i] = random == NULL ? 12345.0f : ref_quant_unit(random);
    return x;
}

struct setup {
    struct dcp_pool *pool;
    struct linear *l;
};

static struct setup setup_make(int n_threads, enum compute_type compute)
{
    struct setup s = {NULL, NULL};
    dcp_isa isa;
    assert_int_equal(dcp__isa_choose(DCP_ISA_DEFAULT, &isa), DCP_OK);
    if (n_threads > 0) assert_int_equal(dcp_pool_create(n_threads, 1, &s.pool), DCP_OK);
    assert_int_equal(linear_create(s.pool, compute, isa, MAX_T, all_ks, COUNT(all_ks), &s.l),
                     DCP_OK);
    return s;
}

static void setup_free(struct setup *s)
{
    linear_destroy(s->l);
    dcp_pool_destroy(s->pool);
}

/* Relative to sum |v x| (and to the largest |v| times sum |x|, for types with a minimum): k
 * additions in blocks in f32; two roundings to 8 bits in bf16. */
static double tolerance(enum compute_type compute, int64_t k)
{
    const double f32 = ((double)k / 16.0 + 20.0) * 0x1p-24;
    return compute == COMPUTE_BF16 ? f32 + 2.0 * 0x1p-8 : f32;
}

/* docs/NUMERICS.md: of x in 16 bits per 32 elements. */
static double integer_rounding(const float *v, const float *x, int64_t k)
{
    double sum = 0.0;
    for (int64_t g = 0; g < k; g += 32) {
        double top = 0.0, abs_v = 0.0;
        for (int64_t e = g; e < g + 32 && e < k; e++) {
            top = fmax(top, fabs((double)x[e]));
            abs_v += fabs((double)v[e]);
        }
        sum += abs_v * top / 61500.0;
    }
    return sum;
}

static void check_product(const struct matrix *m, const struct linear *l, const float *x,
                          int64_t x_stride, int64_t n_tokens, const float *y, int64_t y_stride)
{
    const enum compute_type compute = linear_compute(l);
    const int64_t n_rows = m->w.n_rows, k = m->w.k;
    for (int64_t t = 0; t < n_tokens; t++) {
        double sum_x = 0.0;
        for (int64_t e = 0; e < k; e++) sum_x += fabs((double)x[t * x_stride + e]);
        /* All rows of a small product, some of a large one. */
        const int64_t step = n_tokens * n_rows > 2000 ? 1 + n_rows / 13 : 1;
        for (int64_t i = t % step; i < n_rows; i += step) {
            const float *v = m->values + i * k;
            double sum_abs, top = 0.0;
            for (int64_t e = 0; e < k; e++) top = fmax(top, fabs((double)v[e]));
            const double want = ref_quant_dot(v, x + t * x_stride, k, &sum_abs);
            double tol = tolerance(COMPUTE_F32, k) * (sum_abs + top * sum_x);
            if (compute == COMPUTE_BF16) tol += tolerance(compute, k) * sum_abs;
            if (!linear_is_exact(l)) tol += integer_rounding(v, x + t * x_stride, k);
            const double got = (double)y[t * y_stride + i];
            if (!(fabs(got - want) <= tol))
                fail_msg("%s [%lld, %lld] token %lld of %lld, row %lld: %.9g, want %.9g +- %.2g",
                         dcp__q_name(m->w.qtype), (long long)n_rows, (long long)k, (long long)t,
                         (long long)n_tokens, (long long)i, got, want, tol);
        }
    }
}

static void run_all_shapes(enum compute_type compute)
{
    static const int64_t tokens[] = {0, 1, 2, 3, 4, 7, 8, 16, 17, 64, 512};
    static const int64_t rows[] = {0, 1, 63, 65, 200};
    uint64_t random = SEED;
    print_message("seed %#llx\n", (unsigned long long)SEED);
    struct setup s = setup_make(2, compute);
    const enum compute_type got = linear_compute(s.l);
    if (compute != COMPUTE_DEFAULT && got != compute) print_message("%s\n", linear_note(s.l));
    for (int q = 0; q < COUNT(all_types); q++) {
        for (int r = 0; r < COUNT(rows); r++) {
            const int64_t k = r % 2 == 0 ? 256 : 768;
            struct matrix m = matrix_make(all_types[q], rows[r], k, &random);
            for (int t = 0; t < COUNT(tokens); t++) {
                const int64_t x_stride = k + 5 * (t % 2), y_stride = rows[r] + 3 * (t % 3);
                float *x = floats(tokens[t] * x_stride, &random);
                float *y = floats(tokens[t] * y_stride, NULL);
                assert_int_equal(linear_run(s.l, &m.w, x, x_stride, tokens[t], y, y_stride),
                                 DCP_OK);
                check_product(&m, s.l, x, x_stride, tokens[t], y, y_stride);
                for (int64_t i = 0; i <= tokens[t] * y_stride; i++)
                    if (i == tokens[t] * y_stride || i % y_stride >= rows[r])
                        assert_true(y[i] == 12345.0f);
                free(x);
                free(y);
            }
            matrix_free(&m);
        }
    }
    setup_free(&s);
}

static void f32_products_match_double(void **state)
{
    (void)state;
    run_all_shapes(COMPUTE_F32);
}

static void default_products_match_double(void **state)
{
    (void)state;
    run_all_shapes(COMPUTE_DEFAULT);
}

static void bf16_products_match_double(void **state)
{
    (void)state;
    run_all_shapes(COMPUTE_BF16);
}

static void threads_do_not_change_bits(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 3, 7, 33};
    uint64_t random = SEED;
    for (int c = COMPUTE_DEFAULT; c <= COMPUTE_BF16; c++) {
        for (int q = 0; q < COUNT(all_types); q += 2) {
            const int64_t n_rows = 331, k = 512;
            struct matrix m = matrix_make(all_types[q], n_rows, k, &random);
            for (int t = 0; t < COUNT(tokens); t++) {
                float *x = floats(tokens[t] * k, &random);
                float *first = floats(tokens[t] * n_rows, NULL);
                float *y = floats(tokens[t] * n_rows, NULL);
                for (int n_threads = 0; n_threads <= 3; n_threads++) {
                    struct setup s = setup_make(n_threads, (enum compute_type)c);
                    assert_int_equal(
                        linear_run(s.l, &m.w, x, k, tokens[t], n_threads == 0 ? first : y, n_rows),
                        DCP_OK);
                    if (n_threads > 0)
                        assert_memory_equal(y, first, (size_t)(tokens[t] * n_rows) * sizeof(float));
                    setup_free(&s);
                }
                free(x);
                free(y);
                free(first);
            }
            matrix_free(&m);
        }
    }
}

static void a_slice_of_rows_gives_the_bits_of_the_whole(void **state)
{
    (void)state;
    uint64_t random = SEED;
    struct setup s = setup_make(2, COMPUTE_F32);
    struct matrix m = matrix_make(DCP__Q_Q4_1, 200, 576, &random);
    float *x = floats(2 * 576, &random), *whole = floats(2 * 200, NULL);
    float *part = floats(2 * 200, NULL);
    assert_int_equal(linear_run(s.l, &m.w, x, 576, 2, whole, 200), DCP_OK);
    for (int64_t first = 0; first < 200; first += 37) {
        struct weight slice = m.w;
        slice.data = m.blocks + (size_t)first * m.w.row_bytes;
        slice.n_rows = first + 37 < 200 ? 37 : 200 - first;
        assert_int_equal(linear_run(s.l, &slice, x, 576, 2, part + first, 200), DCP_OK);
    }
    assert_memory_equal(part, whole, 2 * 200 * sizeof(float));
    free(x);
    free(whole);
    free(part);
    matrix_free(&m);
    setup_free(&s);
}

static void few_tokens_have_the_bits_of_one(void **state)
{
    (void)state;
    uint64_t random = SEED;
    struct setup s = setup_make(2, COMPUTE_DEFAULT);
    for (int q = 0; q < COUNT(all_types); q++) {
        struct matrix m = matrix_make(all_types[q], 77, 512, &random);
        const int n_tokens =
            all_types[q] == DCP__Q_F32 || all_types[q] == DCP__Q_F16 || all_types[q] == DCP__Q_BF16
                ? 2
                : 7;
        float *x = floats(7 * 512, &random), *few = floats(7 * 77, NULL);
        float *alone = floats(7 * 77, NULL);
        assert_int_equal(linear_run(s.l, &m.w, x, 512, n_tokens, few, 77), DCP_OK);
        for (int t = 0; t < n_tokens; t++)
            assert_int_equal(linear_run(s.l, &m.w, x + t * 512, 512, 1, alone + t * 77, 77),
                             DCP_OK);
        assert_memory_equal(few, alone, (size_t)n_tokens * 77 * sizeof(float));
        free(x);
        free(few);
        free(alone);
        matrix_free(&m);
    }
    setup_free(&s);
}

/* What linear.c says of oneDNN's f32 products: a different version of it may differ. */
static void many_tokens_in_chunks_are_close(void **state)
{
    (void)state;
    uint64_t random = SEED;
    struct setup s = setup_make(2, COMPUTE_F32);
    struct matrix m = matrix_make(DCP__Q_Q5_1, 195, 640, &random);
    float *x = floats(100 * 640, &random), *whole = floats(100 * 195, NULL);
    float *part = floats(100 * 195, NULL);
    int64_t n_differ = 0;
    assert_int_equal(linear_run(s.l, &m.w, x, 640, 100, whole, 195), DCP_OK);
    for (int64_t n = 1; n <= 100; n += 9) {
        for (int64_t t = 0; t < 100; t += n)
            assert_int_equal(linear_run(s.l, &m.w, x + t * 640, 640, n < 100 - t ? n : 100 - t,
                                        part + t * 195, 195),
                             DCP_OK);
        check_product(&m, s.l, x, 640, 100, part, 195);
        for (int64_t i = 0; i < 100 * 195; i++) n_differ += part[i] != whole[i];
    }
    print_message("%lld of %d values differ in bits\n", (long long)n_differ, 12 * 100 * 195);
    free(x);
    free(whole);
    free(part);
    matrix_free(&m);
    setup_free(&s);
}

static void several_weights_are_each_alone(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 2, 5, 20};
    uint64_t random = SEED;
    for (int c = COMPUTE_DEFAULT; c <= COMPUTE_BF16; c++) {
        struct setup s = setup_make(2, (enum compute_type)c);
        struct matrix m[3] = {matrix_make(DCP__Q_Q4_K, 130, 512, &random),
                              matrix_make(DCP__Q_Q8_0, 0, 512, &random),
                              matrix_make(DCP__Q_Q6_K, 33, 512, &random)};
        const struct weight *ws[3] = {&m[0].w, &m[1].w, &m[2].w};
        for (int t = 0; t < COUNT(tokens); t++) {
            float *x = floats(tokens[t] * 512, &random);
            float *ys[3], *alone = floats(tokens[t] * 130, NULL);
            int64_t y_strides[3];
            for (int i = 0; i < 3; i++) {
                y_strides[i] = m[i].w.n_rows;
                ys[i] = floats(tokens[t] * y_strides[i], NULL);
            }
            assert_int_equal(linear_run_many(s.l, ws, 3, x, 512, tokens[t], ys, y_strides), DCP_OK);
            for (int i = 0; i < 3; i++) {
                assert_int_equal(linear_run(s.l, ws[i], x, 512, tokens[t], alone, m[i].w.n_rows),
                                 DCP_OK);
                assert_memory_equal(alone, ys[i],
                                    (size_t)(tokens[t] * m[i].w.n_rows) * sizeof(float));
                free(ys[i]);
            }
            free(x);
            free(alone);
        }
        for (int i = 0; i < 3; i++) matrix_free(&m[i]);
        setup_free(&s);
    }
}

/* From the first run on, whatever the number of tokens, and no oneDNN plan is made either. */
static void runs_allocate_nothing(void **state)
{
    (void)state;
    uint64_t random = SEED;
    for (int c = COMPUTE_DEFAULT; c <= COMPUTE_BF16; c++) {
        struct setup s = setup_make(2, (enum compute_type)c);
        struct matrix m[2] = {matrix_make(DCP__Q_Q5_0, 130, 256, &random),
                              matrix_make(DCP__Q_Q8_0, 65, 64, &random)};
        float *x = floats(MAX_T * 256, &random), *y = floats(MAX_T * 130, NULL);
        const size_t calls = dcp__alloc_calls();
        const int n_plans = linear_n_plans(s.l);
        for (int64_t t = 1; t <= MAX_T; t += t < 90 ? 1 : 53) {
            for (int i = 0; i < 2; i++) {
                const int64_t k = m[i].w.k, n_rows = m[i].w.n_rows;
                assert_int_equal(linear_run(s.l, &m[i].w, x, k, t, y, n_rows), DCP_OK);
                check_product(&m[i], s.l, x, k, t, y, n_rows);
            }
        }
        assert_int_equal(dcp__alloc_calls(), calls);
        assert_int_equal(linear_n_plans(s.l), n_plans);
        free(x);
        free(y);
        matrix_free(&m[0]);
        matrix_free(&m[1]);
        setup_free(&s);
    }
}

static void rows_dequantise(void **state)
{
    (void)state;
    uint64_t random = SEED;
    struct setup s = setup_make(0, COMPUTE_F32);
    for (int q = 0; q < COUNT(all_types); q++) {
        struct matrix m = matrix_make(all_types[q], 5, 256, &random);
        float row[257];
        row[256] = 3.0f;
        assert_int_equal(linear_row(s.l, &m.w, 4, row), DCP_OK);
        assert_memory_equal(row, m.values + 4 * 256, 256 * sizeof(float));
        assert_true(row[256] == 3.0f);
        assert_int_equal(linear_row(s.l, &m.w, 5, row), DCP_ERR_ARG);
        assert_int_equal(linear_row(s.l, &m.w, -1, row), DCP_ERR_ARG);
        matrix_free(&m);
    }
    setup_free(&s);
}

static void wrong_calls_are_refused(void **state)
{
    (void)state;
    uint64_t random = SEED;
    struct setup s = setup_make(1, COMPUTE_F32);
    struct matrix m = matrix_make(DCP__Q_Q8_0, 4, 64, &random);
    float x[128] = {0}, y[8];
    struct weight w = m.w;
    w.qtype = 4;
    assert_int_equal(linear_run(s.l, &w, x, 64, 1, y, 4), DCP_ERR_NOT_SUPPORTED);
    assert_non_null(strstr(dcp_last_error(), "type 4"));
    w = m.w;
    w.k = 63;
    assert_int_equal(linear_run(s.l, &w, x, 64, 1, y, 4), DCP_ERR_ARG);
    w.k = MAX_K * 2;
    assert_int_equal(linear_run(s.l, &w, x, 64, 1, y, 4), DCP_ERR_ARG);
    w = m.w;
    w.row_bytes = 67;
    assert_int_equal(linear_run(s.l, &w, x, 64, 1, y, 4), DCP_ERR_ARG);
    assert_int_equal(linear_run(s.l, &m.w, x, 63, 2, y, 4), DCP_ERR_ARG);
    assert_int_equal(linear_run(s.l, &m.w, x, 64, 2, y, 3), DCP_ERR_ARG);
    assert_int_equal(linear_run(s.l, &m.w, x, 64, MAX_T + 1, y, 4), DCP_ERR_ARG);
    assert_int_equal(linear_run(s.l, &m.w, x, 64, -1, y, 4), DCP_ERR_ARG);
    struct setup b = setup_make(1, COMPUTE_BF16);
    w = m.w;
    w.k = 32; /* not one of all_ks: there is no plan for it */
    if (linear_compute(b.l) == COMPUTE_BF16) {
        float many[16 * 4];
        const float *zeros = calloc(16 * 32, sizeof(float));
        assert_int_equal(linear_run(b.l, &w, zeros, 32, 16, many, 4), DCP_ERR_ARG);
        assert_non_null(strstr(dcp_last_error(), "k 32"));
        free((void *)(uintptr_t)zeros);
    }
    setup_free(&b);
    matrix_free(&m);
    setup_free(&s);
    struct linear *l = NULL;
    static const int64_t ks[9] = {32, 64, 96, 128, 160, 192, 224, 256, 288}, zero[1] = {0};
    assert_int_equal(linear_create(NULL, COMPUTE_F32, DCP_ISA_SCALAR, 0, ks, 1, &l), DCP_ERR_ARG);
    assert_int_equal(linear_create(NULL, COMPUTE_F32, DCP_ISA_SCALAR, 1, ks, 0, &l), DCP_ERR_ARG);
    assert_int_equal(linear_create(NULL, COMPUTE_F32, DCP_ISA_SCALAR, 1, ks, 9, &l), DCP_ERR_ARG);
    assert_int_equal(linear_create(NULL, COMPUTE_F32, DCP_ISA_SCALAR, 1, zero, 1, &l), DCP_ERR_ARG);
    const size_t held = dcp__alloc_current();
    for (size_t limit = 1; limit < (size_t)1 << 24; limit *= 3) {
        dcp__alloc_set_limit(held + limit);
        if (linear_create(NULL, COMPUTE_BF16, DCP_ISA_SCALAR, 64, all_ks, 4, &l) == DCP_OK)
            linear_destroy(l);
        assert_int_equal(dcp__alloc_current(), held);
    }
    dcp__alloc_set_limit(0);
    linear_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f32_products_match_double),
        cmocka_unit_test(default_products_match_double),
        cmocka_unit_test(bf16_products_match_double),
        cmocka_unit_test(threads_do_not_change_bits),
        cmocka_unit_test(a_slice_of_rows_gives_the_bits_of_the_whole),
        cmocka_unit_test(few_tokens_have_the_bits_of_one),
        cmocka_unit_test(many_tokens_in_chunks_are_close),
        cmocka_unit_test(several_weights_are_each_alone),
        cmocka_unit_test(runs_allocate_nothing),
        cmocka_unit_test(rows_dequantise),
        cmocka_unit_test(wrong_calls_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
