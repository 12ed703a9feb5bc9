/* SPDX-License-Identifier: Apache-2.0 */
/* The other roof of attention: multiply-adds per second of the machine's matrix or vector units, on
 * random data that is loaded again and again from L1 (tiles of zeros run a fifth faster, a roof
 * that no product reaches). */
#ifndef DCP_CLI_BENCH_ROOF_H
#define DCP_CLI_BENCH_ROOF_H

#include <stdbool.h>
#include <stdint.h>

/* Units that multiply, from wide to narrow. */
enum {
    BENCH_ROOF_AMX,         /* tiles, bf16 */
    BENCH_ROOF_AVX512_BF16, /* dot products of bf16 pairs */
    BENCH_ROOF_AVX512,      /* f32 fused multiply-adds */
    BENCH_ROOF_AVX2,
    BENCH_ROOF_PLAIN, /* whatever the compiler's baseline has */
    BENCH_ROOF_COUNT
};
/* "amx-bf16", "avx512-bf16", "avx512-f32", "avx2-f32", "plain-f32"; "?" else. */
const char *bench_roof_name(int unit);
/* CPU and kernel both allow it, and it is in this build. */
bool bench_roof_exists(int unit);
/* Keeps the unit of the calling thread busy for n_steps steps; floating-point operations done. A
 * step takes 50 to 500 ns. */
double bench_roof_run(int unit, int64_t n_steps);

#endif
