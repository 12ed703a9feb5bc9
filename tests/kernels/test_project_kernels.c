/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel that takes rows through a linear map, at every edge size, against double; and the
 * same bits on every level, whatever the rows beside. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

struct entry {
    const char *name;
    dcp_isa isa;
    dcp_dtype type;
    dcp__project_fn *fn;
};
#define ATTN(isa, dtype, fn)
#define MERGE_ROW(isa, part, merged, fn)
#define QDOT(isa, qtype, fn)
#define DEQUANT(isa, qtype, fn)
#define PROJECT(isa, dtype, fn) {#fn, DCP_ISA_##isa, dtype, fn},
static const struct entry entries[] = {
#include "kernels/kernels.inc"
};
enum { N_ENTRIES = sizeof(entries) / sizeof(entries[0]), GUARD = 3 };

static float draw(unsigned *seed)
{
    return (float)(rand_r(seed) % 20001 - 10000) / 5000.0f;
}

static void check(const struct entry *e, int64_t n_rows, int64_t d, int64_t p, unsigned seed)
{
    const int64_t xs = d + seed % 3, ys = p + GUARD;
    float *x = malloc((size_t)(n_rows * xs) * sizeof(float));
    float *w = malloc((size_t)(d * p) * sizeof(float));
    uint16_t *w16 = malloc((size_t)(d * p) * sizeof(uint16_t));
    float *y = malloc((size_t)(n_rows * ys) * sizeof(float));
    float *plain = malloc((size_t)p * sizeof(float));
    for (int64_t i = 0; i < n_rows * xs; i++) x[i] = draw(&seed);
    for (int64_t i = 0; i < d * p; i++) {
        w16[i] = dcp__f32_to_bf16(draw(&seed));
        w[i] = e->type == DCP_BF16 ? dcp__bf16_to_f32(w16[i]) : draw(&seed);
    }
    for (int64_t i = 0; i < n_rows * ys; i++) y[i] = 77.0f;
    const void *map = e->type == DCP_BF16 ? (const void *)w16 : (const void *)w;
    e->fn(x, xs, n_rows, d, map, p, y, ys);
    for (int64_t r = 0; r < n_rows; r++) {
        /* one row alone, by the plain text */
        (e->type == DCP_BF16 ? dcp__project_bf16__scalar
                             : dcp__project_f32__scalar)(x + r * xs, xs, 1, d, map, p, plain, p);
        for (int64_t j = 0; j < p; j++) {
            double sum = 0.0, size = 0.0;
            for (int64_t i = 0; i < d; i++) {
                sum += (double)x[r * xs + i] * (double)w[i * p + j];
                size += fabs((double)x[r * xs + i] * (double)w[i * p + j]);
            }
            const float got = y[r * ys + j];
            if (!(fabs((double)got - sum) <= 0x1p-24 * (double)(d + 1) * size) ||
                memcmp(&got, &plain[j], sizeof(got)) != 0)
                fail_msg("%s: %lld rows, %lld to %lld: row %lld value %lld: %.9g, want %.9g",
                         e->name, (long long)n_rows, (long long)d, (long long)p, (long long)r,
                         (long long)j, (double)got, sum);
        }
        for (int64_t j = p; j < ys; j++) assert_true(y[r * ys + j] == 77.0f); /* not beside */
    }
    free(x);
    free(w);
    free(w16);
    free(y);
    free(plain);
}

static void test_sizes(void **state)
{
    (void)state;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    const dcp_isa best = dcp__cpu_best_isa(&cpu);
    static const int64_t depths[] = {1, 2, 31, 128};
    for (int i = 0; i < N_ENTRIES; i++) {
        if (entries[i].isa > best) {
            print_message("%s: not on this CPU\n", entries[i].name);
            continue;
        }
        unsigned seed = 1;
        for (int64_t p = 1; p <= 137; p += p < 40 ? 1 : 7)
            for (int64_t n = 1; n <= 14; n += n < 7 ? 1 : 6)
                check(&entries[i], n, depths[(n + p) % 4], p, seed++);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sizes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
