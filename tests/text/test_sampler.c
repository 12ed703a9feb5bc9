/* SPDX-License-Identifier: Apache-2.0 */
/* The sampler: options, greedy ties, distributions of draws against probabilities worked out here
 * by sorting, the same ids for the same seed, no allocation. */
#include <math.h>

#include "base/alloc_priv.h"
#include "engine/sampler.h"
#include "text_util.h"

static const struct sampler_opts plain = {1.0f, 0, 1.0f, 0.0f, 1};

static void test_options(void **state)
{
    (void)state;
    struct sampler *s = NULL;
    struct sampler_opts o = plain;
#define REFUSED(field, value, text)                                                                \
    o = plain;                                                                                     \
    o.field = (value);                                                                             \
    assert_int_equal(sampler_create(&o, 10, &s), DCP_ERR_ARG);                                     \
    assert_non_null(strstr(dcp_last_error(), text))
    REFUSED(temp, -0.5f, "temp is -0.5");
    REFUSED(temp, NAN, "temp is nan");
    REFUSED(temp, INFINITY, "temp is inf");
    REFUSED(top_k, -3, "top-k is -3");
    REFUSED(top_p, 0.0f, "top-p is 0");
    REFUSED(top_p, 1.5f, "top-p is 1.5");
    REFUSED(top_p, NAN, "top-p is nan");
    REFUSED(min_p, -0.25f, "min-p is -0.25");
    REFUSED(min_p, 2.0f, "min-p is 2");
    REFUSED(min_p, NAN, "min-p is nan");
    assert_int_equal(sampler_create(&plain, 0, &s), DCP_ERR_ARG);
    assert_null(s);
    sampler_destroy(NULL);
}

static void test_greedy(void **state)
{
    (void)state;
    const float logits[] = {-1.0f, 3.0f, 2.0f, 3.0f, -INFINITY};
    struct sampler_opts o = plain;
    struct sampler *s = NULL;
    int32_t id = -1;
    o.temp = 0.0f;
    must(sampler_create(&o, 5, &s));
    for (int i = 0; i < 3; i++) {
        must(sampler_next(s, logits, &id));
        assert_int_equal(id, 1);
    }
    sampler_destroy(s);
}

static void test_nonfinite(void **state)
{
    (void)state;
    for (int greedy = 0; greedy < 2; greedy++) {
        struct sampler_opts o = plain;
        struct sampler *s = NULL;
        int32_t id = -1;
        o.temp = greedy ? 0.0f : 1.0f;
        must(sampler_create(&o, 3, &s));
        const float with_nan[] = {0.0f, 1.0f, NAN};
        const float with_inf[] = {0.0f, INFINITY, 0.0f};
        const float all_out[] = {-INFINITY, -INFINITY, -INFINITY};
        const float one_in[] = {-INFINITY, -INFINITY, -5.0f};
        assert_int_equal(sampler_next(s, with_nan, &id), DCP_ERR_NONFINITE);
        assert_non_null(strstr(dcp_last_error(), "id 2"));
        assert_int_equal(sampler_next(s, with_inf, &id), DCP_ERR_NONFINITE);
        assert_int_equal(sampler_next(s, all_out, &id), DCP_ERR_NONFINITE);
        assert_int_equal(id, -1);
        must(sampler_next(s, one_in, &id));
        assert_int_equal(id, 2);
        sampler_destroy(s);
    }
}

/* The probabilities that the options give, the plain way: sort everything, cut, divide. */
static void reference(const struct sampler_opts *o, const float *logits, int n, double *p)
{
    int order[64];
    double weight[64];
    for (int i = 0; i < n; i++) {
        int k = i;
        while (k > 0 && logits[order[k - 1]] < logits[i]) {
            order[k] = order[k - 1];
            k--;
        }
        order[k] = i;
    }
    int kept = o->top_k > 0 && o->top_k < n ? o->top_k : n;
    double total = 0.0;
    for (int i = 0; i < kept; i++) {
        weight[i] = exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)o->temp);
        total += weight[i];
    }
    if (o->top_p < 1.0f) {
        double sum = 0.0;
        int m = 0;
        do sum += weight[m++];
        while (m < kept && sum < (double)o->top_p * total);
        kept = m;
    }
    total = 0.0;
    memset(p, 0, (size_t)n * sizeof(p[0]));
    for (int i = 0; i < kept; i++) {
        if (weight[i] >= (double)o->min_p) total += weight[i];
    }
    for (int i = 0; i < kept; i++) {
        if (weight[i] >= (double)o->min_p) p[order[i]] = weight[i] / total;
    }
}

/* Draws of many options: nothing outside the support, and a chi-square within bounds. */
static void test_distributions(void **state)
{
    enum { N = 40, DRAWS = 20000 };
    static const struct sampler_opts options[] = {
        {1.0f, 0, 1.0f, 0.0f, 11},   {0.7f, 0, 1.0f, 0.0f, 12},  {2.0f, 0, 1.0f, 0.0f, 13},
        {1.0f, 5, 1.0f, 0.0f, 14},   {1.0f, 1, 1.0f, 0.0f, 15},  {1.0f, 39, 1.0f, 0.0f, 16},
        {1.0f, 99, 1.0f, 0.0f, 17},  {1.0f, 0, 0.9f, 0.0f, 18},  {1.0f, 0, 0.3f, 0.0f, 19},
        {1.0f, 0, 1e-6f, 0.0f, 20},  {1.0f, 0, 1.0f, 0.1f, 21},  {1.0f, 0, 1.0f, 1.0f, 22},
        {0.8f, 12, 0.8f, 0.05f, 23}, {1e-3f, 0, 1.0f, 0.0f, 24}, {1.5f, 7, 0.95f, 0.2f, 25},
    };
    float logits[N];
    double p[N];
    uint64_t seed = 5;
    (void)state;
    for (int i = 0; i < N; i++) logits[i] = (float)(next_random(&seed) % 1000) * 0.004f;
    logits[3] = logits[30] = 4.0f; /* a tie at the top */
    logits[7] = -INFINITY;
    for (size_t k = 0; k < sizeof(options) / sizeof(options[0]); k++) {
        int count[N] = {0};
        struct sampler *s = NULL;
        must(sampler_create(&options[k], N, &s));
        reference(&options[k], logits, N, p);
        const size_t n_allocs = dcp__alloc_calls();
        for (int i = 0; i < DRAWS; i++) {
            int32_t id;
            must(sampler_next(s, logits, &id));
            assert_in_range(id, 0, N - 1);
            count[id]++;
        }
        assert_int_equal(dcp__alloc_calls(), n_allocs);
        double chi2 = 0.0;
        int n_cells = 0;
        for (int i = 0; i < N; i++) {
            if (p[i] == 0.0 && count[i] != 0) fail_msg("options %zu: drew id %d", k, i);
            const double expected = p[i] * DRAWS;
            if (expected < 5.0) continue;
            chi2 += (count[i] - expected) * (count[i] - expected) / expected;
            n_cells++;
        }
        /* Mean and variance of a chi-square with f degrees: f, 2f. Seeds are fixed. */
        const double f = n_cells;
        if (chi2 > f + 5.0 * sqrt(2.0 * f)) fail_msg("options %zu: chi2 %g of %g", k, chi2, f);
        sampler_destroy(s);
    }
}

static void test_seed(void **state)
{
    enum { N = 1000, DRAWS = 200 };
    float logits[N];
    int32_t first[DRAWS];
    uint64_t seed = 8;
    (void)state;
    for (int i = 0; i < N; i++) logits[i] = (float)(next_random(&seed) % 1000) * 0.001f;
    for (int run = 0; run < 3; run++) {
        struct sampler_opts o = {0.9f, 100, 0.95f, 0.01f, run == 2 ? 43 : 42};
        struct sampler *s = NULL;
        int n_same = 0;
        must(sampler_create(&o, N, &s));
        for (int i = 0; i < DRAWS; i++) {
            int32_t id;
            must(sampler_next(s, logits, &id));
            if (run == 0) first[i] = id;
            n_same += id == first[i];
        }
        if (run == 1) assert_int_equal(n_same, DRAWS);
        if (run == 2) assert_true(n_same < DRAWS / 2);
        sampler_destroy(s);
    }
}

/* The k kept are the same as by sorting, also among ties at the border: the lowest ids stay. */
static void test_top_k_ties(void **state)
{
    (void)state;
    const float logits[] = {1.0f, 2.0f, 1.0f, 1.0f, 2.0f, 1.0f};
    const struct sampler_opts o = {1.0f, 3, 1.0f, 0.0f, 77};
    struct sampler *s = NULL;
    int count[6] = {0};
    must(sampler_create(&o, 6, &s));
    for (int i = 0; i < 1000; i++) {
        int32_t id;
        must(sampler_next(s, logits, &id));
        count[id]++;
    }
    assert_true(count[0] > 0 && count[1] > 0 && count[4] > 0);
    assert_int_equal(count[2] + count[3] + count[5], 0);
    sampler_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),   cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_nonfinite), cmocka_unit_test(test_distributions),
        cmocka_unit_test(test_seed),      cmocka_unit_test(test_top_k_ties),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
