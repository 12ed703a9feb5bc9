/* SPDX-License-Identifier: Apache-2.0 */
/* One token times one matrix of quantised rows, through the engine's own products: each rank has
 * its share of the rows, as in a model. Beside it the same threads read the same rows. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/bench_attend.h"
#include "cli/common.h"
#include "engine/linear.h"

enum { CHECKED_ROWS = 32, PATTERN_ROWS = 61, READ_ROWS_BYTES = 1 << 17 };
static const int64_t cold_bytes = (int64_t)1 << 30;

/* Types by their numbers in a GGUF file; where a block keeps f16 scales. */
static const struct product_type {
    const char *name;
    int qtype;
    int64_t block_elems;
    size_t block_bytes;
    int scale_at[2]; /* -1 = none */
} types[] = {
    {"Q4_0", 2, 32, 18, {0, -1}},   {"Q4_1", 3, 32, 20, {0, 2}},
    {"Q5_0", 6, 32, 22, {0, -1}},   {"Q5_1", 7, 32, 24, {0, 2}},
    {"Q8_0", 8, 32, 34, {0, -1}},   {"Q4_K", 12, 256, 144, {0, 2}},
    {"Q5_K", 13, 256, 176, {0, 2}}, {"Q6_K", 14, 256, 210, {208, -1}},
    {"F16", 1, 1, 2, {0, -1}},      {"BF16", 30, 1, 2, {-1, -1}},
    {"F32", 0, 1, 4, {-1, -1}},
};
enum { N_TYPES = sizeof(types) / sizeof(types[0]) };

struct bench {
    struct bench_rank *r;
    const struct product_case *c;
    const struct product_type *type;
    struct linear *linear;
    struct weight weights[16]; /* copies: each run finds its rows in memory, not in a cache */
    struct bench_copies copies;
    int64_t stretch_rows;
    float *x, *y, *row;
};

int bench_product_types(void)
{
    return N_TYPES;
}

const char *bench_product_type(int i)
{
    return i >= 0 && i < N_TYPES ? types[i].name : "?";
}

/* ---- data ---- */

static uint32_t next_random(uint32_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 17;
    *x ^= *x << 5;
    return *x;
}

/* Normally distributed, as activations after a norm roughly are (Box and Muller). */
static float next_normal(uint32_t *seed)
{
    const double u = ((double)next_random(seed) + 0.5) * 0x1p-32;
    const double turn = (double)next_random(seed) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * turn));
}

/* Random blocks, scales of both signs between 2^-6 and 2^-5. */
static void fill_blocks(const struct product_type *t, uint8_t *to, int64_t n_blocks, uint32_t *seed)
{
    for (int64_t b = 0; b < n_blocks; b++, to += t->block_bytes) {
        for (size_t i = 0; i < t->block_bytes; i++) to[i] = (uint8_t)(next_random(seed) >> 11);
        for (int i = 0; i < 2; i++) {
            if (t->scale_at[i] < 0) continue;
            const uint32_t r = next_random(seed);
            const uint16_t f16 = (uint16_t)(0x2400u | (r >> 8 & 0x3ffu) | (r >> 2 & 0x8000u));
            memcpy(to + t->scale_at[i], &f16, sizeof(f16));
        }
        if (t->block_elems == 1 && t->scale_at[0] < 0) { /* an exponent that is a tame one */
            to[t->block_bytes - 1] = (uint8_t)(0x3c | (to[0] & 0x80));
            to[t->block_bytes - 2] |= 0x80;
        }
    }
}

static void fill_weight(const struct bench *b, const struct weight *w, uint8_t *data)
{
    uint32_t seed = 0x9e3779b9u;
    const int64_t n_first = w->n_rows < PATTERN_ROWS ? w->n_rows : PATTERN_ROWS;
    fill_blocks(b->type, data, n_first * (w->k / b->type->block_elems), &seed);
    for (int64_t i = n_first; i < w->n_rows; i++)
        memcpy(data + (size_t)i * w->row_bytes, data + (size_t)(i % PATTERN_ROWS) * w->row_bytes,
               w->row_bytes);
}

static dcp_status take_memory(struct bench *b)
{
    const struct product_case *c = b->c;
    void *mem = NULL;
    const size_t row_bytes = (size_t)(c->k / b->type->block_elems) * b->type->block_bytes;
    const int64_t n_all = c->n_bytes / (int64_t)row_bytes + 1;
    const dcp_range own = dcp_cut_range(n_all, b->r->n, b->r->rank);
    const int64_t n_rows = own.end - own.begin;
    b->copies.n_copies = (cold_bytes + c->n_bytes - 1) / c->n_bytes;
    if (c->n_bytes < cold_bytes / 64) b->copies.n_copies = 1; /* meant to stay in a cache */
    if (b->copies.n_copies > 16) b->copies.n_copies = 16;
    b->stretch_rows = READ_ROWS_BYTES / (int64_t)row_bytes + 1;
    b->copies.n_stretches = (n_rows + b->stretch_rows - 1) / b->stretch_rows;
    DCP_TRY(dcp__alloc_array((size_t)(b->copies.n_copies * b->copies.n_stretches),
                             sizeof(*b->copies.stretches), "stretches", &mem));
    b->copies.stretches = mem;
    struct bench_stretch *s = b->copies.stretches;
    for (int64_t i = 0; i < b->copies.n_copies; i++) {
        DCP_TRY(dcp__alloc((size_t)n_rows * row_bytes + 64, "weights of a bench", &mem));
        b->weights[i] = (struct weight){.qtype = b->type->qtype, .n_rows = n_rows, .k = c->k};
        b->weights[i].row_bytes = row_bytes;
        b->weights[i].data = mem;
        fill_weight(b, &b->weights[i], mem);
        for (int64_t row = 0; row < n_rows; row += b->stretch_rows) {
            const int64_t n = n_rows - row < b->stretch_rows ? n_rows - row : b->stretch_rows;
            *s++ = (struct bench_stretch){(const char *)mem + (size_t)row * row_bytes,
                                          (size_t)n * row_bytes};
        }
    }
    DCP_TRY(dcp__alloc_array((size_t)c->k, 2 * sizeof(float), "x and a row", &mem));
    b->x = mem;
    b->row = b->x + c->k;
    uint32_t seed = 2463534242u;
    for (int64_t i = 0; i < c->k; i++) b->x[i] = next_normal(&seed);
    DCP_TRY(dcp__alloc_array((size_t)n_rows, sizeof(float), "y", &mem));
    b->y = mem;
    return DCP_OK;
}

static void give_back(struct bench *b)
{
    linear_destroy(b->linear);
    for (int64_t i = 0; i < b->copies.n_copies; i++)
        dcp__free((void *)(uintptr_t)b->weights[i].data);
    dcp__free(b->y);
    dcp__free(b->x);
    dcp__free(b->copies.stretches);
}

/* ---- turns ---- */

static dcp_status run_product(void *ctx, struct bench_turn *turn_out)
{
    struct bench *b = ctx;
    const struct weight *w = &b->weights[bench_next_copy(&b->copies)];
    turn_out->begin = dcp__now_ns();
    DCP_TRY(linear_run(b->linear, w, b->x, w->k, 1, b->y, w->n_rows));
    turn_out->end = dcp__now_ns();
    return DCP_OK;
}

/* ---- the case ---- */

/* Sampled rows, dequantised alone and multiplied in double; errors are shares of the rms that sums
 * of such terms have (not of the sums: those of a few rows may all be near 0). Allowed:
 * activations rounded to 16 bits in blocks, off by 2e-5 in the rms and some four times that in the
 * worst row (8 bits would be off by a hundred times as much), or float32's own rounding. */
static dcp_status check(struct bench *b, struct bench_line *line)
{
    const struct weight *w = &b->weights[0];
    const int64_t n = w->n_rows < CHECKED_ROWS ? w->n_rows : CHECKED_ROWS;
    double wrong = 0.0, worst = 0.0, off[CHECKED_ROWS], squares = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = n == 1 ? 0 : i * (w->n_rows - 1) / (n - 1);
        DCP_TRY(linear_row(b->linear, w, at, b->row));
        double sum = 0.0;
        for (int64_t j = 0; j < w->k; j++) {
            const double term = (double)b->row[j] * (double)b->x[j];
            sum += term;
            squares += term * term;
        }
        off[i] = fabs((double)b->y[at] - sum);
    }
    const double rms = n > 0 ? sqrt(squares / (double)n) : 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double share = rms > 0.0 ? off[i] / rms : off[i];
        if (!(share <= worst)) worst = share;
        if (!(share <= (b->c->is_exact ? 1e-5 : 2e-4))) wrong += 1.0;
    }
    int64_t scaled = (int64_t)(worst < 1e3 ? worst * 1e12 : 1e15);
    DCP_TRY(bench_largest(b->r, &scaled));
    DCP_TRY(bench_sum(b->r, &wrong));
    line->worst_error = (double)scaled * 1e-12;
    line->is_checked = true;
    line->wrong += (int64_t)wrong;
    return DCP_OK;
}

static dcp_status run_case(struct bench *b, struct bench_line *line)
{
    struct bench_memory memory;
    double n_bytes = 0.0, n_rows;
    struct bench_turn unused;
    DCP_TRY(bench_agree(b->r, take_memory(b)));
    bench_memory_begin(&memory);
    DCP_TRY(dcp_group_barrier(b->r->g));
    dcp_status st = linear_create(b->r->pool, b->c->is_exact ? COMPUTE_F32 : COMPUTE_DEFAULT,
                                  b->r->isa, 1, &b->c->k, 1, &b->linear);
    if (st == DCP_OK) st = run_product(b, &unused); /* takes memory, too */
    DCP_TRY(bench_agree(b->r, st));
    bench_put_kernel(line, linear_kernel(b->linear, b->type->qtype));
    DCP_TRY(bench_memory_end(b->r, &memory, line));
    line->workspace_bytes = line->peak_extra_bytes;
    DCP_TRY(check(b, line));
    for (int64_t i = 0; i < b->copies.n_stretches; i++)
        n_bytes += (double)b->copies.stretches[i].n_bytes;
    n_rows = (double)b->weights[0].n_rows;
    DCP_TRY(bench_sum(b->r, &n_bytes));
    DCP_TRY(bench_sum(b->r, &n_rows));
    line->read_bytes = (int64_t)n_bytes;
    line->flops = 2.0 * n_rows * (double)b->c->k;
    if (b->r->iters == 0) return DCP_OK;
    DCP_TRY(bench_compete(b->r, run_product, b, &b->copies, line));
    line->partial_us = line->time.median_us;
    line->has_run = true;
    return check(b, line);
}

dcp_status bench_product_case(struct bench_rank *r, const struct product_case *c,
                              struct bench_line *line)
{
    struct bench b;
    memset(&b, 0, sizeof(b));
    b.r = r;
    b.c = c;
    b.type = &types[c->type];
    line->ranks = r->n;
    line->threads = r->n_threads;
    line->tokens = 1;
    line->is_exact = c->is_exact;
    snprintf(line->dtype, sizeof(line->dtype), "%s", b.type->name);
    snprintf(line->isa, sizeof(line->isa), "%s", dcp__isa_name(r->isa));
    snprintf(line->comm, sizeof(line->comm), "%s", dcp_group_kind(r->g));
    const dcp_status st = run_case(&b, line);
    give_back(&b);
    return st;
}
