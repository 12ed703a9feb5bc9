/* SPDX-License-Identifier: Apache-2.0 */
/* Element types: sizes, names, half precision and e4m3 as bits. Both conversions of f16 are exact
 * in the sense of IEEE 754: denormals are kept, rounding is to nearest even, NaN keeps its leading
 * payload bits and becomes quiet. These are the bits that F16C gives. */
#include "num/dtype_priv.h"

#include "dcpattn/types.h"

size_t dcp_dtype_bytes(dcp_dtype t)
{
    switch (t) {
    case DCP_F32:
        return 4;
    case DCP_F16:
    case DCP_BF16:
        return 2;
    case DCP_I8:
    case DCP_FP8_E4M3:
        return 1;
    case DCP_DTYPE_DEFAULT:
        break;
    }
    return 0;
}

const char *dcp_dtype_name(dcp_dtype t)
{
    switch (t) {
    case DCP_F32:
        return "f32";
    case DCP_F16:
        return "f16";
    case DCP_BF16:
        return "bf16";
    case DCP_I8:
        return "int8";
    case DCP_FP8_E4M3:
        return "fp8";
    case DCP_DTYPE_DEFAULT:
        break;
    }
    return "?";
}

float dcp__f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1fu) {
        if (mantissa != 0) mantissa |= 0x200u;
        return dcp__f32_from_bits(sign | 0x7f800000u | (mantissa << 13));
    }
    if (exponent != 0)
        return dcp__f32_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    /* Zero or denormal: mantissa * 2^-24 is exact in f32, a normal number there. */
    const float magnitude = (float)mantissa * 0x1p-24f;
    return dcp__f32_from_bits(sign | dcp__f32_bits(magnitude));
}

uint16_t dcp__f32_to_f16(float x)
{
    const uint32_t u = dcp__f32_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    /* From 65520 = halfway between 65504 and 65536 on, everything rounds to infinity. */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a >= 0x38800000u) { /* 2^-14: normal in f16 */
        const uint32_t r = a - (112u << 23);
        return (uint16_t)(sign | ((r + 0xfffu + ((r >> 13) & 1u)) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign; /* below 2^-25: rounds to zero */
    /* Denormal: shift the 24-bit significand right so that the unit is 2^-24. */
    const uint32_t shift = 126u - (a >> 23); /* 14 .. 24 */
    const uint32_t m = (a & 0x7fffffu) | 0x800000u;
    const uint32_t kept = m >> shift;
    const uint32_t rest = m & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return (uint16_t)(sign |
                      (kept + (rest > half || (rest == half && (kept & 1u) != 0) ? 1u : 0u)));
}

/* e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; all ones is NaN, the rest of the top
 * exponent are numbers up to 448. */
float dcp__e4m3_to_f32(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return dcp__f32_from_bits(sign | 0x7fc00000u);
    if (magnitude >= 8u) return dcp__f32_from_bits(sign | ((magnitude << 20) + (120u << 23)));
    return dcp__f32_from_bits(sign | dcp__f32_bits((float)magnitude * 0x1p-9f));
}
