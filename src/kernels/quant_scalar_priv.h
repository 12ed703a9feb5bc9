/* SPDX-License-Identifier: Apache-2.0 */
/* One block to f32, in plain C: the text of each format. */
#ifndef DCP_KERNELS_QUANT_SCALAR_PRIV_H
#define DCP_KERNELS_QUANT_SCALAR_PRIV_H

#include "kernels/quant_priv.h"
#include "num/dtype_priv.h"

static inline void decode_f32(const uint8_t *b, float *v)
{
    memcpy(v, b, sizeof(*v));
}

static inline void decode_f16(const uint8_t *b, float *v)
{
    v[0] = dcp__f16_to_f32(dcp__load_u16(b));
}

static inline void decode_bf16(const uint8_t *b, float *v)
{
    v[0] = dcp__bf16_to_f32(dcp__load_u16(b));
}

static inline void decode_q4_0(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    for (int j = 0; j < 16; j++) {
        v[j] = d * (float)((b[2 + j] & 15) - 8);
        v[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
    }
}

static inline void decode_q4_1(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    const float m = dcp__f16_to_f32(dcp__load_u16(b + 2));
    for (int j = 0; j < 16; j++) {
        v[j] = d * (float)(b[4 + j] & 15) + m;
        v[j + 16] = d * (float)(b[4 + j] >> 4) + m;
    }
}

static inline void decode_q5_0(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    const uint32_t qh = dcp__load_u32(b + 2);
    for (int j = 0; j < 16; j++) {
        const int lo = (b[6 + j] & 15) | (int)(((qh >> j) & 1u) << 4);
        const int hi = (b[6 + j] >> 4) | (int)(((qh >> (j + 16)) & 1u) << 4);
        v[j] = d * (float)(lo - 16);
        v[j + 16] = d * (float)(hi - 16);
    }
}

static inline void decode_q5_1(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    const float m = dcp__f16_to_f32(dcp__load_u16(b + 2));
    const uint32_t qh = dcp__load_u32(b + 4);
    for (int j = 0; j < 16; j++) {
        const int lo = (b[8 + j] & 15) | (int)(((qh >> j) & 1u) << 4);
        const int hi = (b[8 + j] >> 4) | (int)(((qh >> (j + 16)) & 1u) << 4);
        v[j] = d * (float)lo + m;
        v[j + 16] = d * (float)hi + m;
    }
}

static inline void decode_q8_0(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    for (int j = 0; j < 32; j++) v[j] = d * (float)(int8_t)b[2 + j];
}

/* Q4_K (qh NULL) and Q5_K. */
static inline void decode_k45(const uint8_t *b, const uint8_t *qh, const uint8_t *qs, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b));
    const float dmin = dcp__f16_to_f32(dcp__load_u16(b + 2));
    uint8_t sm[16];
    dcp__k_scales(b + 4, sm);
    for (int g = 0; g < 8; g++) {
        const float scale = d * (float)sm[g], min = dmin * (float)sm[8 + g];
        for (int j = 0; j < 32; j++) {
            const int byte = qs[32 * (g / 2) + j];
            int q = g % 2 == 0 ? byte & 15 : byte >> 4;
            if (qh != NULL) q |= ((qh[j] >> g) & 1) << 4;
            v[32 * g + j] = scale * (float)q - min;
        }
    }
}

static inline void decode_q4_k(const uint8_t *b, float *v)
{
    decode_k45(b, NULL, b + 16, v);
}

static inline void decode_q5_k(const uint8_t *b, float *v)
{
    decode_k45(b, b + 16, b + 48, v);
}

static inline void decode_q6_k(const uint8_t *b, float *v)
{
    const float d = dcp__f16_to_f32(dcp__load_u16(b + 208));
    for (int i = 0; i < DCP__Q_SUPER; i++) {
        const int half = i / 128, a = i % 128 / 32, j = i % 32;
        const int low = b[64 * half + 32 * (a & 1) + j] >> (a >= 2 ? 4 : 0);
        const int high = b[128 + 32 * half + j] >> (2 * a);
        const int q = (low & 15) | ((high & 3) << 4);
        v[i] = (d * (float)(int8_t)b[192 + i / 16]) * (float)(q - 32);
    }
}

#endif
