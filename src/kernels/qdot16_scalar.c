/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, plain C: the text of qdot16_priv.h, whose sums and bits the
 * vector kernels share. */
#include "kernels/qdot16_priv.h"

#include <math.h>
#include <string.h>

#include "num/dtype_priv.h"

/* --- activations ----------------------------------------------------------------------------- */

static uint32_t top_bits(const float *x)
{
    uint32_t top = 0;
    for (int e = 0; e < DCP__Q16_GROUP; e++) {
        const uint32_t bits = dcp__f32_bits(x[e]) & 0x7fffffffu;
        if (bits > top) top = bits;
    }
    return top;
}

static void group_to_q16(const float *x, int16_t *words, float *scale, float *pairs,
                         float *half_sum)
{
    const uint32_t bits = top_bits(x);
    const float top = dcp__f32_from_bits(bits);
    const bool is_finite = bits < 0x7f800000u, counts = is_finite && top >= DCP__Q16_LEAST;
    const float inverse = counts ? (float)DCP__Q16_TOP / top : 0.0f;
    *scale = counts ? top / (float)DCP__Q16_TOP : is_finite ? 0.0f : NAN;
    int total[2] = {0, 0};
    for (int e = 0; e < DCP__Q16_GROUP; e++) {
        const int q = counts ? (int)lrintf(x[e] * inverse) : 0;
        words[e] = (int16_t)q;
        total[e / 16] += q;
    }
    pairs[0] = *scale;
    pairs[1] = *scale * (float)(total[0] + total[1]);
    half_sum[0] = *scale * (float)total[0];
    half_sum[1] = *scale * (float)total[1];
}

void dcp__to_q16__scalar(const float *x, int64_t k, int16_t *words, float *scale, float *pairs,
                         float *half_sum)
{
    const int64_t n = k / DCP__Q16_GROUP;
    for (int64_t g = 0; g < n; g++)
        group_to_q16(x + g * DCP__Q16_GROUP, words + g * DCP__Q16_GROUP, scale + g, pairs + 2 * g,
                     half_sum + 2 * g);
    for (int64_t g = n; g % 16 != 0; g++) scale[g] = pairs[2 * g] = pairs[2 * g + 1] = 0.0f;
}

int dcp__q16_order(int qtype)
{
    switch (qtype) {
    case DCP__Q_Q8_0:
        return DCP__Q16_ORDERS;
    case DCP__Q_Q4_0:
    case DCP__Q_Q4_1:
    case DCP__Q_Q5_0:
    case DCP__Q_Q5_1:
        return DCP__Q16_HALVES;
    case DCP__Q_Q4_K:
    case DCP__Q_Q5_K:
        return DCP__Q16_CHUNKS;
    case DCP__Q_Q6_K:
        return DCP__Q16_PLAIN;
    default:
        return -1;
    }
}

void dcp__q16_lay_out(const int16_t *words, int64_t k, int order, int8_t *planes)
{
    /* Where the eight runs of 16 elements of a unit come from. */
    static const int from[DCP__Q16_ORDERS][8] = {{0, 32, 64, 96, 16, 48, 80, 112},
                                                 {0, 16, 64, 80, 32, 48, 96, 112},
                                                 {0, 16, 32, 48, 64, 80, 96, 112}};
    for (int64_t u = 0; u < k; u += DCP__Q16_UNIT, planes += 2 * DCP__Q16_UNIT) {
        for (int run = 0; run < 8; run++) {
            int8_t *high = planes + 128 * (run / 4) + 16 * (run % 4), *low = high + 64;
            const int64_t at = u + from[order][run];
            if (at >= k) {
                memset(high, 0, 16);
                memset(low, 0, 16);
                continue;
            }
            for (int e = 0; e < 16; e++) {
                const int q = words[at + e];
                high[e] = (int8_t)((q + 128) >> 8);
                low[e] = (int8_t)(q & 255);
            }
        }
    }
}

/* --- rows ------------------------------------------------------------------------------------ */

static float tree(const float acc[16], float factor, const float min[16])
{
    float v[16];
    for (int j = 0; j < 16; j++) v[j] = acc[j] + factor * min[j];
    for (int n = 8; n > 0; n /= 2)
        for (int j = 0; j < n; j++) v[j] += v[j + n];
    return v[0];
}

static int dot(const uint8_t *q, const int16_t *x, int n)
{
    int sum = 0;
    for (int e = 0; e < n; e++) sum += q[e] * x[e];
    return sum;
}

/* Quants of a block of 32, unsigned. */
static void quants_small(const uint8_t *qs, uint32_t fifth, uint8_t q[32])
{
    for (int j = 0; j < 16; j++) {
        q[j] = (uint8_t)((qs[j] & 15) | (int)((fifth >> j & 1u) << 4));
        q[j + 16] = (uint8_t)((qs[j] >> 4) | (int)((fifth >> (j + 16) & 1u) << 4));
    }
}

static float sum_small(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,
                       struct dcp__q16_layout l)
{
    float acc[16] = {0}, min[16] = {0};
    for (int64_t n = 0; n < n_blocks; n++, b += l.block_bytes) {
        const float d = dcp__f16_to_f32(dcp__load_u16(b));
        const float m = l.min_at < 0 ? d : dcp__f16_to_f32(dcp__load_u16(b + l.min_at));
        const float scale = d * x->scale[n];
        const int16_t *words = x->words + 32 * n;
        uint8_t q[32];
        quants_small(b + l.block_bytes - 16, l.fifth_at < 0 ? 0 : dcp__load_u32(b + l.fifth_at), q);
        for (int j = 0; j < 4; j++) {
            const int sum =
                dot(q + 4 * j, words + 4 * j, 4) + dot(q + 16 + 4 * j, words + 16 + 4 * j, 4);
            float *lane = &acc[4 * (n % 4) + j];
            *lane = fmaf((float)sum, scale, *lane);
        }
        float *lane = &min[2 * (n % 4) + 1];
        *lane = fmaf(m, x->pairs[2 * n + 1], *lane);
    }
    return tree(acc, l.factor, min);
}

static float sum_q8_0(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,
                      struct dcp__q16_layout l)
{
    float acc[2][16] = {{0}};
    for (int64_t n = 0; n < n_blocks; n++, b += l.block_bytes) {
        const float scale = dcp__f16_to_f32(dcp__load_u16(b)) * x->scale[n];
        const int16_t *words = x->words + 32 * n;
        for (int j = 0; j < 16; j++) {
            const int sum =
                (int8_t)b[2 + 2 * j] * words[2 * j] + (int8_t)b[3 + 2 * j] * words[2 * j + 1];
            acc[n % 2][j] = fmaf((float)sum, scale, acc[n % 2][j]);
        }
    }
    return tree(acc[0], 1.0f, acc[1]);
}

static float sum_k45(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,
                     struct dcp__q16_layout l)
{
    float acc[16] = {0}, min[16] = {0};
    for (int64_t n = 0; n < n_blocks; n++, b += l.block_bytes) {
        const float d = dcp__f16_to_f32(dcp__load_u16(b));
        const float dmin = dcp__f16_to_f32(dcp__load_u16(b + 2));
        const uint8_t *qs = b + l.block_bytes - 128;
        uint8_t sm[16];
        dcp__k_scales(b + 4, sm);
        for (int g = 0; g < 8; g++) {
            const int64_t at = 8 * n + g;
            const float scale = d * (float)sm[g] * x->scale[at];
            uint8_t q[32];
            for (int j = 0; j < 32; j++) {
                const int nibble = qs[32 * (g / 2) + j] >> (g % 2 == 0 ? 0 : 4) & 15;
                const int fifth = l.fifth_at < 0 ? 0 : (b[l.fifth_at + j] >> g & 1) << 4;
                q[j] = (uint8_t)(nibble | fifth);
            }
            for (int j = 0; j < 8; j++) {
                float *lane = &acc[(g % 4 < 2 ? 0 : 8) + j];
                *lane = fmaf((float)dot(q + 4 * j, x->words + 32 * at + 4 * j, 4), scale, *lane);
            }
            min[2 * g + 1] = fmaf(dmin * (float)sm[8 + g], x->pairs[2 * at + 1], min[2 * g + 1]);
        }
    }
    return tree(acc, l.factor, min);
}

static float sum_q6_k(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,
                      struct dcp__q16_layout l)
{
    float acc[16] = {0}, min[16] = {0};
    for (int64_t n = 0; n < n_blocks; n++, b += l.block_bytes) {
        const float d = dcp__f16_to_f32(dcp__load_u16(b + 208));
        for (int s = 0; s < 16; s++) {
            const float own = d * (float)(int8_t)b[192 + s];
            const float scale = own * x->scale[8 * n + s / 2];
            uint8_t q[16];
            for (int e = 0; e < 16; e++) {
                const int i = 16 * s + e, half = i / 128, a = i % 128 / 32, j = i % 32;
                const int low = b[64 * half + 32 * (a & 1) + j] >> (a >= 2 ? 4 : 0);
                const int high = b[128 + 32 * half + j] >> (2 * a);
                q[e] = (uint8_t)((low & 15) | ((high & 3) << 4));
            }
            for (int j = 0; j < 4; j++) {
                float *lane = &acc[4 * (s % 4) + j];
                const int16_t *words = x->words + DCP__Q_SUPER * n + 16 * s + 4 * j;
                *lane = fmaf((float)dot(q + 4 * j, words, 4), scale, *lane);
            }
            min[s] = fmaf(own, x->half_sum[16 * n + s], min[s]);
        }
    }
    return tree(acc, l.factor, min);
}

/* One token after the other. */
#define ONE_ROW(family)                                                                            \
    static void row_##family(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,     \
                             int n_tokens, float *y, int64_t y_stride, struct dcp__q16_layout l)   \
    {                                                                                              \
        for (int t = 0; t < n_tokens; t++) y[t * y_stride] = sum_##family(b, n_blocks, x + t, l);  \
    }
ONE_ROW(small)
ONE_ROW(q8_0)
ONE_ROW(k45)
ONE_ROW(q6_k)

#define NAME(type) dcp__qdot16_##type##__scalar
DCP__Q16_TYPES(DCP__Q16_DEFINE)
