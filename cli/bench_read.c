/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_read.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/cpu_priv.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { AHEAD_BYTES = 4096 };

typedef uint64_t read_fn(const char *p, size_t n_bytes, const char *ahead);

/* Bytes behind the last whole block. */
static uint64_t read_tail(const char *p, size_t n_bytes)
{
    uint64_t sum = 0;
    for (; n_bytes >= 8; p += 8, n_bytes -= 8) {
        uint64_t x;
        memcpy(&x, p, sizeof(x));
        sum ^= x;
    }
    for (; n_bytes > 0; p++, n_bytes--) sum ^= (unsigned char)*p;
    return sum;
}

static void prefetch(const char *ahead, size_t at, size_t n_bytes)
{
    for (size_t b = 0; ahead != NULL && b < n_bytes; b += 64)
        __builtin_prefetch(ahead + at + b, 0, 3);
}

static uint64_t read_plain(const char *p, size_t n_bytes, const char *ahead)
{
    uint64_t sum[8] = {0};
    size_t at = 0;
    for (; at + 64 <= n_bytes; at += 64) {
        uint64_t x[8];
        memcpy(x, p + at, sizeof(x));
        prefetch(ahead, at, 64);
        for (int i = 0; i < 8; i++) sum[i] ^= x[i];
    }
    for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
    return sum[0] ^ read_tail(p + at, n_bytes - at);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t read_avx2(const char *p, size_t n_bytes,
                                                          const char *ahead)
{
    __m256i sum[8];
    for (int i = 0; i < 8; i++) sum[i] = _mm256_setzero_si256();
    size_t at = 0;
    for (; at + 256 <= n_bytes; at += 256) {
        prefetch(ahead, at, 256);
        for (int i = 0; i < 8; i++)
            sum[i] = _mm256_xor_si256(
                sum[i], _mm256_loadu_si256((const __m256i *)(const void *)(p + at + 32 * i)));
    }
    for (int i = 1; i < 8; i++) sum[0] = _mm256_xor_si256(sum[0], sum[i]);
    return (uint64_t)_mm256_extract_epi64(sum[0], 0) ^ read_tail(p + at, n_bytes - at);
}

__attribute__((target("avx512f"))) static uint64_t read_avx512(const char *p, size_t n_bytes,
                                                               const char *ahead)
{
    __m512i sum[4];
    for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_si512();
    size_t at = 0;
    for (; at + 256 <= n_bytes; at += 256) {
        prefetch(ahead, at, 256);
        for (int i = 0; i < 4; i++)
            sum[i] = _mm512_xor_si512(sum[i], _mm512_loadu_si512(p + at + 64 * i));
    }
    for (int i = 1; i < 4; i++) sum[0] = _mm512_xor_si512(sum[0], sum[i]);
    return (uint64_t)_mm512_reduce_or_epi64(sum[0]) ^ read_tail(p + at, n_bytes - at);
}
#endif

static read_fn *choose(void)
{
#if defined(__x86_64__)
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    if (cpu.avx512) return read_avx512;
    if (cpu.avx2) return read_avx2;
#endif
    return read_plain;
}

const char *bench_read_name(int way)
{
    static const char *const names[BENCH_READ_COUNT] = {"part by part", "part by part, prefetch",
                                                        "row by row", "row by row, prefetch"};
    return way >= 0 && way < BENCH_READ_COUNT ? names[way] : "?";
}

void bench_read(const struct bench_region *r, int way)
{
    static _Atomic(read_fn *) chosen; /* the same whoever writes it */
    read_fn *fn = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (fn == NULL) {
        fn = choose();
        atomic_store_explicit(&chosen, fn, memory_order_relaxed);
    }
    const bool does_prefetch = way == BENCH_READ_PARTS_PREFETCH || way == BENCH_READ_ROWS_PREFETCH;
    const bool by_rows = way == BENCH_READ_ROWS || way == BENCH_READ_ROWS_PREFETCH;
    const size_t stretch = (size_t)r->n_rows * r->row_bytes;
    uint64_t sum = 0;
    if (!by_rows) {
        for (int p = 0; p < r->n_parts; p++) {
            for (int64_t t = 0; t < r->n_tokens; t++) {
                const char *at = r->parts[p] + (size_t)t * r->token_stride_bytes;
                sum ^= fn(at, stretch, does_prefetch ? at + AHEAD_BYTES : NULL);
            }
        }
    } else {
        for (int64_t t = 0; t < r->n_tokens; t++) {
            for (int64_t row = 0; row < r->n_rows; row++) {
                const size_t offset =
                    (size_t)t * r->token_stride_bytes + (size_t)row * r->row_bytes;
                for (int p = 0; p < r->n_parts; p++)
                    sum ^= fn(r->parts[p] + offset, r->row_bytes,
                              does_prefetch ? r->parts[p] + offset + AHEAD_BYTES : NULL);
            }
        }
    }
    __asm__ volatile("" : : "r"(sum)); /* the reads must not be optimised away */
}
