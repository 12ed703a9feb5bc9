/* SPDX-License-Identifier: Apache-2.0 */
/* Each loop keeps enough independent accumulators that latency hides, and loads an operand for
 * every two to four products, as a product of matrices does.
 *
 *     amx          2 x 2 tiles of C; a step loads 2 A and 2 B and multiplies 4 times
 *     avx512-bf16  24 accumulators = 6 rows x 4 vectors
 *     avx512-f32   24 accumulators likewise
 *     avx2-f32     12 accumulators = 6 rows x 2 vectors
 *
 * Operands are uniform in [-1, 1): the sums wander and stay finite for any number of steps that a
 * bench takes. */
#include "cli/bench_roof.h"

#include <string.h>

#include "base/cpu_priv.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { N_FLOATS = 4096, N_ROWS = 6, DEPTH = 64 };

/* Random floats, and the same as bf16 pairs; each thread has its own. */
struct operands {
    _Alignas(64) float f32[N_FLOATS];
    _Alignas(64) uint16_t bf16[2 * N_FLOATS];
};

static void fill(struct operands *o)
{
    uint32_t x = 2463534242u;
    for (int i = 0; i < N_FLOATS; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        o->f32[i] = (float)(int32_t)x * 0x1p-31f;
    }
    for (int i = 0; i < 2 * N_FLOATS; i++) {
        uint32_t bits;
        const float f = o->f32[(i * 7) % N_FLOATS];
        memcpy(&bits, &f, sizeof(bits));
        o->bf16[i] = (uint16_t)(bits >> 16);
    }
}

static double run_plain(const struct operands *o, int64_t n_steps)
{
    float sum[N_ROWS][16] = {{0}};
    for (int64_t s = 0; s < n_steps; s++) {
        for (int k = 0; k < DEPTH; k++) {
            const float *b = o->f32 + 16 * k;
            for (int r = 0; r < N_ROWS; r++) {
                const float a = o->f32[2048 + N_ROWS * k + r];
                for (int i = 0; i < 16; i++) sum[r][i] += a * b[i];
            }
        }
    }
    for (int r = 0; r < N_ROWS; r++) __asm__ volatile("" : : "m"(sum[r]));
    return (double)n_steps * DEPTH * N_ROWS * 16 * 2;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static double run_avx2(const struct operands *o,
                                                           int64_t n_steps)
{
    __m256 c[N_ROWS][2];
    for (int r = 0; r < N_ROWS; r++) c[r][0] = c[r][1] = _mm256_setzero_ps();
    for (int64_t s = 0; s < n_steps; s++) {
        const float *b = o->f32, *a = o->f32 + 2048;
        for (int k = 0; k < DEPTH; k++, b += 16, a += N_ROWS) {
            const __m256 b0 = _mm256_load_ps(b), b1 = _mm256_load_ps(b + 8);
#pragma GCC unroll 6
            for (int r = 0; r < N_ROWS; r++) {
                const __m256 x = _mm256_broadcast_ss(a + r);
                c[r][0] = _mm256_fmadd_ps(x, b0, c[r][0]);
                c[r][1] = _mm256_fmadd_ps(x, b1, c[r][1]);
            }
        }
        __asm__ volatile("" : : : "memory");
    }
    for (int r = 0; r < N_ROWS; r++) __asm__ volatile("" : : "x"(c[r][0]), "x"(c[r][1]));
    return (double)n_steps * DEPTH * N_ROWS * 16 * 2;
}

__attribute__((target("avx512f"))) static double run_avx512(const struct operands *o,
                                                            int64_t n_steps)
{
    __m512 c[N_ROWS][4];
    for (int r = 0; r < N_ROWS; r++)
        for (int v = 0; v < 4; v++) c[r][v] = _mm512_setzero_ps();
    for (int64_t s = 0; s < n_steps; s++) {
        const float *b = o->f32, *a = o->f32 + 2048;
        for (int k = 0; k < DEPTH; k++, b += 32, a += N_ROWS) {
            __m512 x[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) x[v] = _mm512_load_ps(b + 16 * v);
#pragma GCC unroll 6
            for (int r = 0; r < N_ROWS; r++) {
                const __m512 y = _mm512_set1_ps(a[r]);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) c[r][v] = _mm512_fmadd_ps(y, x[v], c[r][v]);
            }
        }
        __asm__ volatile("" : : : "memory");
    }
    for (int r = 0; r < N_ROWS; r++)
        for (int v = 0; v < 4; v++) __asm__ volatile("" : : "v"(c[r][v]));
    return (double)n_steps * DEPTH * N_ROWS * 64 * 2;
}

/* A word of A is a pair of bf16 for all 16 lanes. */
__attribute__((target("avx512f,avx512bf16"))) static double run_avx512_bf16(
    const struct operands *o, int64_t n_steps)
{
    __m512 c[N_ROWS][4];
    for (int r = 0; r < N_ROWS; r++)
        for (int v = 0; v < 4; v++) c[r][v] = _mm512_setzero_ps();
    for (int64_t s = 0; s < n_steps; s++) {
        const uint16_t *b = o->bf16, *a = o->bf16 + 4096;
        for (int k = 0; k < DEPTH; k++, b += 64, a += 2 * N_ROWS) {
            __m512i x[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                x[v] = _mm512_load_si512((const void *)(b + 32 * (v % 2) + 64 * (v / 2)));
#pragma GCC unroll 6
            for (int r = 0; r < N_ROWS; r++) {
                int32_t pair;
                memcpy(&pair, a + 2 * r, sizeof(pair));
                const __m512bh y = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) c[r][v] = _mm512_dpbf16_ps(c[r][v], y, (__m512bh)x[v]);
            }
        }
        __asm__ volatile("" : : : "memory");
    }
    for (int r = 0; r < N_ROWS; r++)
        for (int v = 0; v < 4; v++) __asm__ volatile("" : : "v"(c[r][v]));
    return (double)n_steps * DEPTH * N_ROWS * 64 * 4;
}

/* What ldtilecfg reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "one cache line");

/* Inline assembly: compilers of the day drop stores before the intrinsics. A tile is 16 rows of 64
 * bytes, 1 KiB; eight A and eight B tiles take 16 KiB of L1. */
__attribute__((target("amx-tile,amx-bf16"))) static double run_amx(const struct operands *o,
                                                                   int64_t n_steps)
{
    struct tile_config config;
    memset(&config, 0, sizeof(config));
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.n_rows[t] = 16;
    }
    const char *const base = (const char *)o->bf16;
    const int64_t stride = 64;
    __asm__ volatile("ldtilecfg %0\n\t"
                     "tilezero %%tmm0\n\t"
                     "tilezero %%tmm1\n\t"
                     "tilezero %%tmm2\n\t"
                     "tilezero %%tmm3"
                     :
                     : "m"(config)
                     : "memory");
    for (int64_t s = 0; s < n_steps; s++) {
        for (int k = 0; k < 4; k++) {
            const char *const a = base + 2048 * k, *const b = base + 8192 + 2048 * k;
            __asm__ volatile("tileloadd (%0,%2,1), %%tmm4\n\t"
                             "tileloadd (%1,%2,1), %%tmm6\n\t"
                             "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
                             "tileloadd 1024(%1,%2,1), %%tmm7\n\t"
                             "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                             "tileloadd 1024(%0,%2,1), %%tmm5\n\t"
                             "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
                             "tdpbf16ps %%tmm7, %%tmm5, %%tmm3"
                             :
                             : "r"(a), "r"(b), "r"(stride)
                             : "memory");
        }
    }
    __asm__ volatile("tilerelease" : : : "memory");
    return (double)n_steps * 4 * 4 * 16384;
}
#endif

const char *bench_roof_name(int unit)
{
    static const char *const names[BENCH_ROOF_COUNT] = {"amx-bf16", "avx512-bf16", "avx512-f32",
                                                        "avx2-f32", "plain-f32"};
    return unit >= 0 && unit < BENCH_ROOF_COUNT ? names[unit] : "?";
}

bool bench_roof_exists(int unit)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    switch (unit) {
#if defined(__x86_64__)
    case BENCH_ROOF_AMX:
        return cpu.amx_bf16;
    case BENCH_ROOF_AVX512_BF16:
        return cpu.avx512_bf16;
    case BENCH_ROOF_AVX512:
        return cpu.avx512;
    case BENCH_ROOF_AVX2:
        return cpu.avx2 && cpu.fma;
#endif
    default:
        return unit == BENCH_ROOF_PLAIN;
    }
}

double bench_roof_run(int unit, int64_t n_steps)
{
    static _Thread_local struct operands operands;
    static _Thread_local bool is_filled;
    if (!is_filled) fill(&operands);
    is_filled = true;
    switch (unit) {
#if defined(__x86_64__)
    case BENCH_ROOF_AMX:
        return run_amx(&operands, n_steps);
    case BENCH_ROOF_AVX512_BF16:
        return run_avx512_bf16(&operands, n_steps);
    case BENCH_ROOF_AVX512:
        return run_avx512(&operands, n_steps);
    case BENCH_ROOF_AVX2:
        return run_avx2(&operands, n_steps);
#endif
    default:
        return run_plain(&operands, n_steps);
    }
}
