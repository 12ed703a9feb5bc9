/* SPDX-License-Identifier: Apache-2.0 */
/* Products on quantised rows: bytes per second of every QDOT and QDOT16 line, beside a plain read
 * of the same bytes in the same rounds. usage: bench_qdot [threads [MiB [k [name part [tokens]]]]]
 * tokens: QDOT16 lines only, 1 to 8, one pass over the rows; the others take one token. From 16 MiB
 * on turns go round as many copies as make 1 GiB: one copy would be read out of the last-level
 * cache. Prints, per kernel: median and best GB/s, and the median's share of that of the better
 * plain read, with and without prefetch. */
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

enum { N_ROUNDS = 15, MAX_TOKENS = 8, AHEAD_BYTES = 4096 };
static const size_t cold_bytes = (size_t)1 << 30, cached_bytes = (size_t)16 << 20;

static const struct {
    dcp_isa isa;
    int qtype;
    dcp__qdot_fn *fn; /* or */
    dcp__qdot16_fn *fn16;
    enum dcp__feature feature;
    const char *name;
} lines[] = {
#define ATTN(isa, dtype, fn)
#define MERGE_ROW(isa, part, merged, fn)
#define QDOT(level, qtype, fn) {DCP_ISA_##level, qtype, fn, NULL, DCP__FEATURE_NONE, #fn},
#define QDOT16(level, feature, qtype, fn)                                                          \
    {DCP_ISA_##level, qtype, NULL, fn, DCP__FEATURE_##feature, #fn},
#define DEQUANT(isa, qtype, fn)
#include "kernels/kernels.inc"
};

struct job {
    dcp__qdot_fn *fn; /* both NULL: plain read */
    dcp__qdot16_fn *fn16;
    bool does_prefetch; /* a plain read */
    struct dcp__q16_row rows[MAX_TOKENS];
    int n_tokens;
    const uint8_t *w;
    size_t n_bytes, row_bytes;
    int64_t n_rows, k, chunk_rows;
    const float *x;
    float *y;
    uint64_t sums[64];
};

/* One load for a line: two of half its size read DRAM 10 to 30% slower. */
typedef uint64_t line_of_memory __attribute__((vector_size(64)));

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t
plain_read(const uint8_t *w, size_t n_bytes, bool does_prefetch)
{
    line_of_memory sum[4] = {{0}};
    uint64_t total = 0;
    for (size_t at = 0; at + 256 <= n_bytes; at += 256) {
        for (int j = 0; does_prefetch && j < 4; j++)
            __builtin_prefetch(w + at + 64 * j + AHEAD_BYTES);
        for (int j = 0; j < 4; j++) {
            line_of_memory v;
            memcpy(&v, w + at + 64 * j, sizeof(v));
            sum[j] += v;
        }
    }
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 8; i++) total += sum[j][i];
    return total;
}

static void run_item(void *ctx, int64_t item, int thread)
{
    struct job *job = ctx;
    const int64_t first = item * job->chunk_rows;
    const int64_t left = job->n_rows - first;
    const int64_t n_rows = left < job->chunk_rows ? left : job->chunk_rows;
    const uint8_t *w = job->w + (size_t)first * job->row_bytes;
    if (job->fn != NULL) {
        job->fn(w, job->row_bytes, n_rows, job->k, job->x, job->y + first);
        return;
    }
    if (job->fn16 != NULL) {
        job->fn16(w, job->row_bytes, n_rows, job->k, job->rows, job->n_tokens, job->y + first,
                  job->n_rows);
        return;
    }
    job->sums[thread & 63] += plain_read(w, (size_t)n_rows * job->row_bytes, job->does_prefetch);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* As the engine cuts a matrix. */
static size_t chunk_bytes(size_t n_bytes, int n_threads)
{
    const size_t least = 16384, most = (size_t)1 << 20, chunk = n_bytes / ((size_t)n_threads * 8);
    return chunk < least ? least : chunk < most ? chunk : most;
}

/* Copies lie n_bytes apart; each turn takes the one that was read longest ago. */
static double time_run(struct dcp_pool *pool, struct job *job, const uint8_t *w, int n_copies)
{
    static int turn;
    job->w = w + (size_t)(turn++ % n_copies) * job->n_bytes;
    const double begin = dcp__now_s();
    dcp__pool_run(pool, (job->n_rows + job->chunk_rows - 1) / job->chunk_rows, run_item, job);
    return dcp__now_s() - begin;
}

/* Activations of all tokens: the same values, each in memory of its own. */
static dcp_status make_activations(const struct dcp__kernels *kernels, const float *x, int64_t k,
                                   struct dcp__q16_row *rows)
{
    const size_t n = (size_t)k, groups = n / 32 + 16;
    for (int t = 0; t < MAX_TOKENS; t++) {
        void *p;
        DCP_TRY(dcp__alloc(2 * n + 5 * 4 * groups, "activations", &p));
        int16_t *words = p;
        float *scale = (float *)(void *)(words + n), *pairs = scale + groups;
        kernels->to_q16(x, k, words, scale, pairs, pairs + 2 * groups);
        rows[t] = (struct dcp__q16_row){
            .words = words, .scale = scale, .pairs = pairs, .half_sum = pairs + 2 * groups};
        for (int order = 0; order < DCP__Q16_ORDERS; order++) {
            DCP_TRY(dcp__alloc(2 * (n + 128), "activations", &p));
            dcp__q16_lay_out(words, k, order, p);
            rows[t].planes[order] = p;
        }
    }
    return DCP_OK;
}

int main(int argc, char **argv)
{
    const int n_threads = argc > 1 ? atoi(argv[1]) : 2;
    const size_t n_bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 256) << 20;
    const int64_t k_wanted = argc > 3 ? atoi(argv[3]) : 1024;
    const bool is_cold = n_bytes >= cached_bytes && n_bytes < cold_bytes;
    const int n_copies = is_cold ? (int)((cold_bytes + n_bytes - 1) / n_bytes) : 1;
    struct dcp__cpu cpu;
    struct dcp_pool *pool;
    uint8_t *w;
    float *x, *y;
    dcp__cpu_detect(&cpu);
    if (dcp_pool_create(n_threads, 1, &pool) != DCP_OK ||
        dcp__alloc((size_t)n_copies * n_bytes + 64, "weights", (void **)&w) != DCP_OK ||
        dcp__alloc((size_t)k_wanted * 8 + 4096, "x", (void **)&x) != DCP_OK ||
        dcp__alloc(2 * n_bytes, "y", (void **)&y) != DCP_OK) {
        (void)fprintf(stderr, "%s\n", dcp_last_error());
        return 1;
    }
    /* Bytes of which every f16 scale and every float is a tame one. */
    for (size_t i = 0; i < n_bytes; i++) w[i] = (uint8_t)(0x20 | ((i * 2654435761u >> 13) & 0x0f));
    for (int i = 1; i < n_copies; i++) memcpy(w + (size_t)i * n_bytes, w, n_bytes);
    for (int64_t i = 0; i < k_wanted; i++) x[i] = (float)(i % 17) - 8.0f;
    static struct job job;
    job.n_bytes = n_bytes;
    struct dcp__kernels kernels;
    dcp__kernels_select(dcp__cpu_best_isa(&cpu), &kernels);
    job.n_tokens = argc > 5 ? atoi(argv[5]) : 1;
    if (job.n_tokens < 1 || job.n_tokens > MAX_TOKENS ||
        make_activations(&kernels, x, k_wanted / 32 * 32, job.rows) != DCP_OK)
        return 1;
    (void)printf("%d threads, %zu MiB, %s\n", n_threads, n_bytes >> 20, cpu.brand);
    for (size_t l = 0; l < sizeof(lines) / sizeof(lines[0]); l++) {
        if (lines[l].isa > dcp__cpu_best_isa(&cpu) || !dcp__has_feature(&cpu, lines[l].feature))
            continue;
        if (argc > 4 && strstr(lines[l].name, argv[4]) == NULL) continue;
        const int64_t block = dcp__q_block_elems(lines[l].qtype);
        job.x = x;
        job.y = y;
        job.k = k_wanted / block * block;
        if (job.k == 0) continue;
        job.row_bytes = (size_t)(job.k / block) * dcp__q_block_bytes(lines[l].qtype);
        job.n_rows = (int64_t)(n_bytes / job.row_bytes);
        job.chunk_rows = (int64_t)(chunk_bytes(n_bytes, n_threads) / job.row_bytes) + 1;
        double read_s[2][N_ROUNDS], dot_s[N_ROUNDS];
        for (int r = 0; r < N_ROUNDS; r++) {
            job.fn = NULL;
            job.fn16 = NULL;
            for (int way = 0; way < 2; way++) {
                job.does_prefetch = way == 1;
                read_s[way][r] = time_run(pool, &job, w, n_copies);
            }
            job.fn = lines[l].fn;
            job.fn16 = lines[l].fn16;
            dot_s[r] = time_run(pool, &job, w, n_copies);
        }
        for (int way = 0; way < 2; way++) qsort(read_s[way], N_ROUNDS, sizeof(double), compare);
        qsort(dot_s, N_ROUNDS, sizeof(double), compare);
        const double bytes = (double)job.row_bytes * (double)job.n_rows * 1e-9;
        const double plain = read_s[0][N_ROUNDS / 2], ahead = read_s[1][N_ROUNDS / 2];
        const double roof = plain < ahead ? plain : ahead;
        (void)printf("%-28s k %5lld: %6.2f GB/s (best %6.2f), read %6.2f, %3.0f%%\n", lines[l].name,
                     (long long)job.k, bytes / dot_s[N_ROUNDS / 2], bytes / dot_s[0], bytes / roof,
                     100.0 * roof / dot_s[N_ROUNDS / 2]);
    }
    dcp__free(w);
    dcp__free(x);
    dcp__free(y);
    dcp_pool_destroy(pool);
    return 0;
}
