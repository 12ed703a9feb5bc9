/* SPDX-License-Identifier: Apache-2.0 */
/* f32 to a cache's type. The f16 loop is branch-free so that the compiler vectorises it; its
 * results are those of dcp__f32_to_f16 (a test compares). */
#include "cache/cache_priv.h"
#include "num/dtype_priv.h"

/* Three cases by magnitude, all computed, one kept:
 *   >= 2^16 or not finite   infinity, or NaN with the quiet bit
 *   >= 2^-14                rebias the exponent and round the 13 dropped bits to nearest even; a
 *                           carry runs into the exponent as it should, up to infinity
 *   below                   adding 0.5 lets the FPU round at 2^-24, f16's smallest step: the sum's
 *                           low mantissa bits are the result */
static inline uint16_t round_f16(float x)
{
    const uint32_t u = dcp__f32_bits(x);
    const uint32_t a = u & 0x7fffffffu;
    const uint32_t nan = a > 0x7f800000u ? 0x7e00u | ((a >> 13) & 0x3ffu) : 0x7c00u;
    const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    const uint32_t small = dcp__f32_bits(dcp__f32_from_bits(a) + 0.5f) - 0x3f000000u;
    uint32_t h = a < 0x38800000u ? small : normal;
    h = a >= 0x47800000u ? nan : h;
    return (uint16_t)(h | ((u >> 16) & 0x8000u));
}

void dcp__kv_convert(dcp_dtype t, const float *src, void *dst, int64_t n)
{
    if (t == DCP_F32) {
        memcpy(dst, src, (size_t)n * sizeof(float));
        return;
    }
    uint16_t *restrict to = dst;
    const float *restrict from = src;
    if (t == DCP_BF16) {
        for (int64_t i = 0; i < n; i++) to[i] = dcp__f32_to_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++) to[i] = round_f16(from[i]);
    }
}
