/* SPDX-License-Identifier: Apache-2.0 */
/* f16, bf16 and e4m3 as bits. Rounding is to nearest even; bf16 keeps denormals (integer rounding,
 * the bits of every ISA), NaN stays NaN (quieted). */
#ifndef DCP_NUM_DTYPE_PRIV_H
#define DCP_NUM_DTYPE_PRIV_H

#include <stdint.h>
#include <string.h>

static inline uint32_t dcp__f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}
static inline float dcp__f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}
static inline float dcp__bf16_to_f32(uint16_t b)
{
    return dcp__f32_from_bits((uint32_t)b << 16);
}
static inline uint16_t dcp__f32_to_bf16(float x)
{
    const uint32_t u = dcp__f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x0040u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float dcp__f16_to_f32(uint16_t h);
uint16_t dcp__f32_to_f16(float x);
float dcp__e4m3_to_f32(uint8_t code);
/* Saturates: beyond 448, infinities too, is +-448. Branch-free, so that loops of it vectorise. */
static inline uint8_t dcp__f32_to_e4m3(float x)
{
    const uint32_t u = dcp__f32_bits(x);
    const uint32_t a = u & 0x7fffffffu;
    /* >= 2^-6: rebias and round the 20 dropped bits; below: the FPU rounds at 2^-9, e4m3's smallest
     * step, and a carry to 8 is 2^-6. */
    const uint32_t normal = (a - (120u << 23) + 0x7ffffu + ((a >> 20) & 1u)) >> 20;
    const uint32_t small = dcp__f32_bits(dcp__f32_from_bits(a) + 0x1p14f) - 0x46800000u;
    uint32_t code = a < 0x3c800000u ? small : normal;
    code = a >= 0x43e00000u ? 0x7eu : code;
    code = a > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(code | ((u >> 24) & 0x80u));
}

#endif
