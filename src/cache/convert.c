/* SPDX-License-Identifier: Apache-2.0 */
/* f32 to a cache's type. All loops are branch-free so that the compiler vectorises them; those of
 * f16 give the results of dcp__f32_to_f16 (a test compares). */
#include <math.h>
#include <string.h>

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

/* Bits of the largest magnitude; above those of infinity if there is a NaN. */
static uint32_t largest_bits(const float *src, int64_t n)
{
    int32_t top = 0; /* signed: the compare that every vector unit has */
    for (int64_t i = 0; i < n; i++) {
        const int32_t a = (int32_t)(dcp__f32_bits(src[i]) & 0x7fffffffu);
        top = a > top ? a : top;
    }
    return (uint32_t)top;
}

/* Adding 1.5 * 2^23 lets the FPU round to an integer, nearest even, in the low bits of the sum. */
static void quantise_i8(const float *restrict src, int8_t *restrict dst, int64_t n, float inverse)
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = dcp__f32_bits(src[i] * inverse + 0x1.8p23f);
        dst[i] = (int8_t)(uint8_t)u;
    }
}
static void quantise_fp8(const float *restrict src, uint8_t *restrict dst, int64_t n, float inverse)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dcp__f32_to_e4m3(src[i] * inverse);
}

float dcp__kv_quantise(dcp_dtype t, const float *src, void *dst, int64_t n)
{
    if (n < 1) return 0.0f;
    const uint32_t top = largest_bits(src, n);
    /* Below 2^-100 a scale or its inverse would leave the normal numbers. */
    if (top >= 0x7f800000u || top < (27u << 23)) {
        memset(dst, 0, (size_t)n);
        return top >= 0x7f800000u ? NAN : 0.0f;
    }
    const float largest = dcp__f32_from_bits(top);
    if (t == DCP_I8) {
        quantise_i8(src, dst, n, 127.0f / largest);
        return largest / 127.0f;
    }
    /* largest = m * 2^k, 1 <= m < 2; 448 = 1.75 * 2^8. */
    const uint32_t k = (top >> 23) + ((top & 0x7fffffu) > 0x600000u ? 1u : 0u);
    quantise_fp8(src, dst, n, dcp__f32_from_bits((127u + 127u + 8u - k) << 23));
    return dcp__f32_from_bits((k - 8u) << 23);
}
