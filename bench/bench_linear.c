/* SPDX-License-Identifier: Apache-2.0 */
/* The dense products of a forward pass: all weights of one token, and of a chunk of tokens.
 * usage: bench_linear [threads [tokens [f32|bf16]]]
 * Weights have the shapes and types of two small models; contents are tame random bytes. Prints per
 * model the median time, tokens per second, GB/s of weights and GFLOP/s. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "engine/linear.h"
#include "kernels/kernels_priv.h"

enum { N_ROUNDS = 7, MAX_K = 2048 };

/* Weights on one x, count layers of them. */
struct group {
    int count, n_weights;
    int64_t k;
    int qtype[3];
    int64_t n_rows[3];
};
static const struct group smollm2_135m[] = {{30, 3, 576, {3, 3, 3}, {576, 192, 192}},
                                            {30, 1, 576, {3}, {576}},
                                            {30, 2, 576, {3, 3}, {1536, 1536}},
                                            {30, 1, 1536, {3}, {576}},
                                            {1, 1, 576, {8}, {49152}},
                                            {0, 0, 0, {0}, {0}}};
static const struct group gemma3_270m[] = {{18, 3, 640, {6, 6, 8}, {1024, 256, 256}},
                                           {18, 1, 1024, {12}, {640}},
                                           {18, 2, 640, {6, 6}, {2048, 2048}},
                                           {9, 1, 2048, {12}, {640}},
                                           {9, 1, 2048, {14}, {640}},
                                           {1, 1, 640, {8}, {262144}},
                                           {0, 0, 0, {0}, {0}}};

static size_t row_bytes(int qtype, int64_t k)
{
    return (size_t)(k / dcp__q_block_elems(qtype)) * dcp__q_block_bytes(qtype);
}

/* Bytes of all weights; products of one token, and of the output matrix, which runs once. */
static size_t model_bytes(const struct group *g, double *products, double *output_products)
{
    size_t n_bytes = 0;
    *products = *output_products = 0.0;
    for (; g->count != 0; g++)
        for (int i = 0; i < g->n_weights; i++) {
            n_bytes += (size_t)g->count *
                       (((size_t)g->n_rows[i] * row_bytes(g->qtype[i], g->k) + 63) / 64 * 64);
            const double n = (double)g->count * (double)g->n_rows[i] * (double)g->k;
            *(g[1].count == 0 ? output_products : products) += n;
        }
    return n_bytes;
}

/* The output matrix, the last group, sees the last token alone. */
static dcp_status forward(struct linear *l, const struct group *g, const uint8_t *w, const float *x,
                          int64_t n_tokens, float *y)
{
    for (; g->count != 0; g++) {
        const int64_t t = g[1].count == 0 ? 1 : n_tokens;
        for (int c = 0; c < g->count; c++) {
            struct weight weights[3];
            const struct weight *ws[3];
            float *ys[3];
            int64_t strides[3];
            for (int i = 0; i < g->n_weights; i++) {
                weights[i] = (struct weight){g->qtype[i], g->n_rows[i], g->k,
                                             row_bytes(g->qtype[i], g->k), w};
                w += ((size_t)g->n_rows[i] * weights[i].row_bytes + 63) / 64 * 64;
                ws[i] = &weights[i];
                ys[i] = y + (int64_t)i * 4096;
                strides[i] = 3 * 4096;
            }
            DCP_TRY(linear_run_many(l, ws, g->n_weights, x, g->k, t, ys, strides));
        }
    }
    return DCP_OK;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dcp_status bench(const char *name, const struct group *model, struct linear *l,
                        int64_t n_tokens)
{
    uint8_t *w;
    float *x, *y;
    double products, output_products, seconds[N_ROUNDS];
    const size_t n_bytes = model_bytes(model, &products, &output_products);
    DCP_TRY(dcp__alloc(n_bytes + 64, "weights", (void **)&w));
    DCP_TRY(dcp__alloc((size_t)n_tokens * MAX_K * sizeof(float), "x", (void **)&x));
    DCP_TRY(dcp__alloc((size_t)(n_tokens * 3 * 4096 + 262144) * sizeof(float), "y", (void **)&y));
    for (size_t i = 0; i < n_bytes; i++) w[i] = (uint8_t)(0x20 | ((i * 2654435761u >> 13) & 0x0f));
    for (int64_t i = 0; i < n_tokens * MAX_K; i++) x[i] = (float)(i % 17) - 8.0f;
    DCP_TRY(forward(l, model, w, x, n_tokens, y));
    for (int r = 0; r < N_ROUNDS; r++) {
        const double begin = dcp__now_s();
        DCP_TRY(forward(l, model, w, x, n_tokens, y));
        seconds[r] = dcp__now_s() - begin;
    }
    qsort(seconds, N_ROUNDS, sizeof(double), compare);
    const double median = seconds[N_ROUNDS / 2];
    (void)printf(
        "%-14s %4lld tokens: %8.2f ms, best %8.2f; %8.1f tok/s, %6.2f GB/s, %7.1f GFLOP/s\n", name,
        (long long)n_tokens, median * 1e3, seconds[0] * 1e3, (double)n_tokens / median,
        (double)n_bytes / median * 1e-9,
        2.0 * (products * (double)n_tokens + output_products) / median * 1e-9);
    dcp__free(w);
    dcp__free(x);
    dcp__free(y);
    return DCP_OK;
}

int main(int argc, char **argv)
{
    const int n_threads = argc > 1 ? atoi(argv[1]) : 2;
    const int64_t n_tokens = argc > 2 ? atoi(argv[2]) : 512;
    const enum compute_type compute = argc > 3 && strcmp(argv[3], "bf16") == 0 ? COMPUTE_BF16
                                      : argc > 3                               ? COMPUTE_F32
                                                                               : COMPUTE_DEFAULT;
    struct dcp_pool *pool = NULL;
    struct linear *l = NULL;
    dcp_isa isa;
    static const int64_t ks[] = {576, 1536, 640, 1024, MAX_K};
    dcp_status st = dcp__isa_choose(DCP_ISA_DEFAULT, &isa);
    if (st == DCP_OK) st = dcp_pool_create(n_threads, 1, &pool);
    if (st == DCP_OK) st = linear_create(pool, compute, isa, n_tokens, ks, 5, &l);
    if (st == DCP_OK) {
        (void)printf("%d threads, %s, %s %s\n", n_threads, dcp__isa_name(isa),
                     linear_compute(l) == COMPUTE_BF16 ? "bf16" : "f32", linear_note(l));
        for (int64_t t = 1; t <= n_tokens && st == DCP_OK; t = t == 1 ? n_tokens : n_tokens + 1) {
            st = bench("smollm2-135m", smollm2_135m, l, t);
            if (st == DCP_OK) st = bench("gemma3-270m", gemma3_270m, l, t);
            if (n_tokens == 1) break;
        }
    }
    if (st != DCP_OK) (void)fprintf(stderr, "%s\n", dcp_last_error());
    linear_destroy(l);
    dcp_pool_destroy(pool);
    return st == DCP_OK ? 0 : 1;
}
