/* SPDX-License-Identifier: Apache-2.0 */
/* f16 and bf16 as bits. Rounding is to nearest even; bf16 keeps denormals (integer rounding, the
 * bits of every ISA), NaN stays NaN (quieted). */
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

#endif
