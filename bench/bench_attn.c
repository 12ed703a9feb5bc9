/* SPDX-License-Identifier: Apache-2.0 */
/* Attention kernels against the machine: bench_attn [threads [isa [filter [q]]]], q bf16 (default:
 * its values are bf16's) or f32.
 *
 * Each thread attends with its own (sequence, KV head) pairs: no split, no merge, the kernel alone.
 * decode: bytes of K and V per second, beside a plain read of the same bytes. extend:
 * floating-point operations per second (2 per multiply-add, masked ones not counted), beside a
 * register-only loop of fused multiply-adds. Roofs and kernel alternate; the best of all runs is
 * printed, in brackets the median. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/pool_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

#if defined(__x86_64__)
#include <immintrin.h>
__attribute__((target("avx512f"))) static double fma_avx512(int64_t n)
{
    __m512 acc[16];
    for (int i = 0; i < 16; i++) acc[i] = _mm512_set1_ps((float)i);
    const __m512 a = _mm512_set1_ps(0.999f);
    for (int64_t j = 0; j < n; j++)
#ifndef __clang__
#pragma GCC unroll 16
#endif
        for (int i = 0; i < 16; i++) acc[i] = _mm512_fmadd_ps(acc[i], a, a);
    for (int i = 1; i < 16; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return (double)_mm512_reduce_add_ps(acc[0]);
}
/* n_bytes is a multiple of 256. */
__attribute__((target("avx512f"))) static double read_avx512(const char *at, int64_t n_bytes)
{
    __m512i sum[4];
    for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_si512();
    for (int64_t j = 0; j < n_bytes; j += 256) {
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(at + j + 64 * i + 2048);
            sum[i] = _mm512_add_epi64(sum[i], _mm512_loadu_si512(at + j + 64 * i));
        }
    }
    for (int i = 1; i < 4; i++) sum[0] = _mm512_add_epi64(sum[0], sum[i]);
    return (double)_mm512_reduce_add_epi64(sum[0]);
}
__attribute__((target("avx2,fma"))) static double fma_avx2(int64_t n)
{
    __m256 acc[12];
    for (int i = 0; i < 12; i++) acc[i] = _mm256_set1_ps((float)i);
    const __m256 a = _mm256_set1_ps(0.999f);
    for (int64_t j = 0; j < n; j++)
#ifndef __clang__
#pragma GCC unroll 12
#endif
        for (int i = 0; i < 12; i++) acc[i] = _mm256_fmadd_ps(acc[i], a, a);
    for (int i = 1; i < 12; i++) acc[0] = _mm256_add_ps(acc[0], acc[i]);
    float part[8];
    _mm256_storeu_ps(part, acc[0]);
    return (double)part[0];
}
#endif
static double fma_scalar(int64_t n)
{
    float acc[8] = {0.0f};
    for (int64_t j = 0; j < n; j++)
        for (int i = 0; i < 8; i++) acc[i] = acc[i] * 0.999f + 0.999f;
    return (double)acc[0] + (double)acc[7];
}

struct bench_case {
    const char *name;
    int64_t n_tokens, n_group, dk, dv, n_keys;
    bool latent;
    bool is_cached; /* the same keys again and again: what the kernel does without waiting */
};
static const struct bench_case cases[] = {
    {"decode dk64 x3 4K", 1, 3, 64, 64, 4096, false, false},
    {"decode dk64 x1 4K", 1, 1, 64, 64, 4096, false, false},
    {"decode dk128 x4 32K", 1, 4, 128, 128, 32768, false, false},
    {"decode dk128 x8 32K", 1, 8, 128, 128, 32768, false, false},
    {"decode dk128 x16 8K", 1, 16, 128, 128, 8192, false, false},
    {"decode dk256 x4 4K", 1, 4, 256, 256, 4096, false, false},
    {"decode MLA x16 8K", 1, 16, 576, 512, 8192, true, false},
    {"in cache dk64 x3 2K", 1, 3, 64, 64, 2048, false, true},
    {"in cache dk128 x4 1K", 1, 4, 128, 128, 1024, false, true},
    {"in cache dk128 x16 1K", 1, 16, 128, 128, 1024, false, true},
    {"extend dk64 x3 T32 4K", 32, 3, 64, 64, 4096, false, false},
    {"extend dk128 x4 T24 4K", 24, 4, 128, 128, 4096, false, false},
    {"extend dk256 x4 T24 4K", 24, 4, 256, 256, 4096, false, false},
    {"extend dk64 x1 T96 4K", 96, 1, 64, 64, 4096, false, false},
    {"extend dk128 x8 T512 4K", 512, 8, 128, 128, 4096, false, false},
    {"extend dk128 x4 T256 4K", 256, 4, 128, 128, 4096, false, false},
    {"extend MLA x96 T1 4K", 1, 96, 576, 512, 4096, true, false},
    {"extend MLA x96 T2 4K", 2, 96, 576, 512, 4096, true, false},
    {"L2 dk128 x4 T256 1K", 256, 4, 128, 128, 1024, false, true},
    {"L2 MLA x96 T1 512", 1, 96, 576, 512, 512, true, true},
    {"L2 MLA x96 T2 512", 2, 96, 576, 512, 512, true, true},
};
enum { N_CASES = (int)(sizeof(cases) / sizeof(cases[0])), MAX_RUNS = 200, PAGE = 64 };

struct bench {
    const struct bench_case *c;
    dcp_isa isa;
    dcp__attn_fn *fn;
    int n_threads;
    bool is_q_bf16;
    char *memory; /* n_items sequences of n_keys, [page][K or V][slot][dim] bf16 */
    int32_t *pages;
    int64_t n_items, item_bytes, next;
    float *q, *out, *lse;
    int64_t *lo, *hi;
    char *scratch;
    size_t scratch_bytes;
    int64_t fma_loops;
    double sink[256];
};

static int64_t rows_of(const struct bench_case *c)
{
    return c->n_tokens * c->n_group;
}

/* The item-th sequence after next; thread's own buffers. */
static void attend_one(void *ctx, int64_t item, int thread)
{
    struct bench *const b = ctx;
    const struct bench_case *const c = b->c;
    const int64_t dims = c->latent ? c->dk : c->dk + c->dv;
    const char *const base = b->memory + (b->next + item) % b->n_items * b->item_bytes;
    const dcp_kv_view view = {
        .k_base = base,
        .v_base = c->latent ? base : base + PAGE * c->dk * 2,
        .pages = b->pages,
        .page_tokens = PAGE,
        .k_page_stride_bytes = PAGE * dims * 2,
        .v_page_stride_bytes = PAGE * dims * 2,
        .k_slot_stride = c->dk,
        .v_slot_stride = c->latent ? c->dk : c->dv,
        .n_keys = c->n_keys,
        .dtype = DCP_BF16,
    };
    const struct dcp__attn_job job = {
        .view = &view,
        .key_end = c->n_keys,
        .n_tokens = c->n_tokens,
        .n_group = c->n_group,
        .dk = c->dk,
        .dv = c->dv,
        .scale = 1.0f / sqrtf((float)c->dk),
        .lo = b->lo,
        .hi = b->hi,
        .q = b->q,
        .q_token_stride = c->n_group * c->dk,
        .q_head_stride = c->dk,
        .out = b->out + thread * rows_of(c) * c->dv,
        .out_token_stride = c->n_group * c->dv,
        .out_head_stride = c->dv,
        .lse = b->lse + thread * rows_of(c),
        .lse_token_stride = c->n_group,
        .lse_head_stride = 1,
        .scratch = b->scratch + (size_t)thread * b->scratch_bytes,
    };
    b->fn(&job);
}
static void read_one(void *ctx, int64_t item, int thread)
{
    struct bench *const b = ctx;
    const char *const base = b->memory + (b->next + item) % b->n_items * b->item_bytes;
#if defined(__x86_64__)
    if (b->isa >= DCP_ISA_AVX512) {
        b->sink[thread * 8] += read_avx512(base, b->item_bytes);
        return;
    }
#endif
    uint64_t sum[8] = {0};
    for (int64_t i = 0; i < b->item_bytes; i += 64) {
        uint64_t x[8];
        memcpy(x, base + i, sizeof(x));
        __builtin_prefetch(base + i + 2048);
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    for (int j = 0; j < 8; j++) b->sink[thread * 8] += (double)sum[j];
}
static void fma_one(void *ctx, int64_t item, int thread)
{
    struct bench *const b = ctx;
    (void)item;
#if defined(__x86_64__)
    if (b->isa >= DCP_ISA_AVX512)
        b->sink[thread * 8] += fma_avx512(b->fma_loops);
    else if (b->isa == DCP_ISA_AVX2)
        b->sink[thread * 8] += fma_avx2(b->fma_loops);
    else
#endif
        b->sink[thread * 8] += fma_scalar(b->fma_loops);
}
static double fma_flop(const struct bench *b)
{
    const double lanes = b->isa >= DCP_ISA_AVX512 ? 256.0 : b->isa == DCP_ISA_AVX2 ? 96.0 : 8.0;
    return 2.0 * lanes * (double)b->fma_loops;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}
static void sort(double *x, int n)
{
    qsort(x, (size_t)n, sizeof(*x), by_value);
}

static dcp_status bench_alloc(struct bench *b)
{
    const struct bench_case *const c = b->c;
    const int64_t dims = c->latent ? c->dk : c->dk + c->dv;
    const size_t rows = (size_t)rows_of(c);
    const size_t threads = (size_t)b->n_threads;
    b->item_bytes = c->n_keys * dims * 2;
    /* More than any cache holds, or what one core's second level does. */
    b->n_items = c->is_cached ? 1 : (int64_t)1024 * 1024 * 1024 / b->item_bytes;
    b->scratch_bytes =
        (dcp__attn_scratch_bytes_for(b->isa, rows_of(c), c->dk, c->dv) + 4095) / 4096 * 4096;
    DCP_TRY(dcp__alloc((size_t)(b->n_items * b->item_bytes), "keys", (void **)&b->memory));
    DCP_TRY(dcp__alloc((size_t)(c->n_keys / PAGE) * 4, "pages", (void **)&b->pages));
    DCP_TRY(dcp__alloc(rows * (size_t)c->dk * 4, "q", (void **)&b->q));
    DCP_TRY(dcp__alloc(threads * rows * (size_t)c->dv * 4, "out", (void **)&b->out));
    DCP_TRY(dcp__alloc(threads * rows * 4, "lse", (void **)&b->lse));
    DCP_TRY(dcp__alloc((size_t)c->n_tokens * 8, "lo", (void **)&b->lo));
    DCP_TRY(dcp__alloc((size_t)c->n_tokens * 8, "hi", (void **)&b->hi));
    DCP_TRY(dcp__alloc(threads * b->scratch_bytes, "scratch", (void **)&b->scratch));
    uint32_t noise = 1;
    uint16_t *const keys = (uint16_t *)(void *)b->memory;
    for (int64_t i = 0; i < b->n_items * b->item_bytes / 2; i++) {
        noise = noise * 1664525u + 1013904223u;
        keys[i] = (uint16_t)(0x3f00u | (noise >> 24) | ((noise >> 8) & 0x8000u));
    }
    for (int64_t i = 0; i < c->n_keys / PAGE; i++) b->pages[i] = (int32_t)i;
    for (int64_t i = 0; i < rows_of(c) * c->dk; i++)
        b->q[i] =
            b->is_q_bf16 ? dcp__bf16_to_f32(dcp__f32_to_bf16(sinf((float)i))) : sinf((float)i);
    for (int64_t t = 0; t < c->n_tokens; t++) b->hi[t] = c->n_keys - c->n_tokens + t + 1;
    return DCP_OK;
}
static void bench_free(struct bench *b)
{
    void *const all[] = {b->memory, b->pages, b->q, b->out, b->lse, b->lo, b->hi, b->scratch};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) dcp__free(all[i]);
}

static double timed(struct bench *b, struct dcp_pool *pool, int64_t n, dcp__pool_fn *fn)
{
    const double start = dcp__now_s();
    dcp__pool_run(pool, n, fn, b);
    return dcp__now_s() - start;
}

static void bench_case(struct bench *b, struct dcp_pool *pool)
{
    const struct bench_case *const c = b->c;
    const bool is_decode = c->n_tokens == 1;
    double keys_seen = 0.0;
    for (int64_t t = 0; t < c->n_tokens; t++) keys_seen += (double)b->hi[t];
    const double flop = 2.0 * (double)(c->n_group * (c->dk + c->dv)) * keys_seen;
    int64_t n = b->n_threads; /* items a run: enough for 3 ms */
    timed(b, pool, n, attend_one);
    const double once = timed(b, pool, n, attend_one);
    if (once < 3e-3) n *= 1 + (int64_t)(3e-3 / once);
    b->fma_loops = 200000;
    double kernel[MAX_RUNS];
    double read[MAX_RUNS];
    double fma[MAX_RUNS];
    int runs = 0;
    for (const double start = dcp__now_s();
         runs < MAX_RUNS && (runs < 5 || dcp__now_s() < start + 0.8); runs++) {
        b->next = (b->next + n) % b->n_items;
        if (is_decode) read[runs] = timed(b, pool, n, read_one);
        b->next = (b->next + n) % b->n_items;
        kernel[runs] = timed(b, pool, n, attend_one);
        fma[runs] = timed(b, pool, b->n_threads, fma_one);
    }
    sort(kernel, runs);
    sort(fma, runs);
    sort(read, is_decode ? runs : 0);
    const double per_item = 1e6 / (double)n;
    const double fma_rate = (double)b->n_threads * fma_flop(b) / fma[0] * 1e-9;
    const double rate = (double)n * flop / kernel[0] * 1e-9;
    printf("%-24s us %8.1f (%8.1f)  GFLOP/s %6.1f = %4.1f%% of %6.1f", c->name,
           kernel[0] * per_item, kernel[runs / 2] * per_item, rate, 100.0 * rate / fma_rate,
           fma_rate);
    if (is_decode) {
        const double gb = (double)n * (double)b->item_bytes * 1e-9;
        printf("  GB/s %6.2f = %5.1f%% of %6.2f (%5.1f%%)", gb / kernel[0],
               100.0 * read[0] / kernel[0], gb / read[0],
               100.0 * read[runs / 2] / kernel[runs / 2]);
    }
    printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const int n_threads = argc > 1 ? atoi(argv[1]) : 1;
    dcp_isa isa = DCP_ISA_DEFAULT;
    if (argc > 2 && dcp__isa_parse(argv[2], &isa) != DCP_OK) return 1;
    if (dcp__isa_choose(isa, &isa) != DCP_OK || n_threads < 1 || n_threads > 32) return 1;
    struct dcp__kernels table;
    dcp__kernels_select(isa, &table);
    struct dcp_pool *pool;
    if (dcp_pool_create(n_threads, 1, &pool) != DCP_OK) return 1;
    printf("%s, bf16, %d threads\n", table.attn_name[DCP_BF16], n_threads);
    int rc = 0;
    for (int i = 0; i < N_CASES && rc == 0; i++) {
        if (argc > 3 && strstr(cases[i].name, argv[3]) == NULL) continue;
        const bool is_q_bf16 = argc <= 4 || strcmp(argv[4], "f32") != 0;
        struct bench b = {.c = &cases[i],
                          .isa = isa,
                          .fn = table.attn[DCP_BF16],
                          .n_threads = n_threads,
                          .is_q_bf16 = is_q_bf16};
        if (bench_alloc(&b) == DCP_OK)
            bench_case(&b, pool);
        else
            rc = 1;
        bench_free(&b);
    }
    dcp_pool_destroy(pool);
    return rc;
}
