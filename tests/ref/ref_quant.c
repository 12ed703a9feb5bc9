/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/ref_quant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int ref_quant_read(const char *path, struct ref_quant *out)
{
    uint32_t head[4];
    memset(out, 0, sizeof(*out));
    FILE *f = fopen(path, "rb");
    if (f == NULL) return 1;
    int bad = fread(head, sizeof(head), 1, f) != 1;
    if (!bad) {
        out->qtype = (int)head[0];
        out->elems = head[1];
        out->bytes = head[2];
        out->n_blocks = head[3];
        const size_t n_bytes = (size_t)(out->bytes * out->n_blocks);
        const size_t n_values = (size_t)(out->elems * out->n_blocks);
        out->blocks = malloc(n_bytes);
        out->values = malloc(n_values * sizeof(float));
        bad = out->blocks == NULL || out->values == NULL ||
              fread(out->blocks, 1, n_bytes, f) != n_bytes ||
              fread(out->values, sizeof(float), n_values, f) != n_values;
    }
    (void)fclose(f);
    if (bad) ref_quant_free(out);
    return bad;
}

void ref_quant_free(struct ref_quant *b)
{
    free(b->blocks);
    free(b->values);
    memset(b, 0, sizeof(*b));
}

uint64_t ref_quant_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

float ref_quant_unit(uint64_t *state)
{
    return (float)((double)(ref_quant_random(state) >> 40) / 8388608.0 - 1.0);
}

/* f16 bits of about 2^-7, one in sixteen denormal, either sign. */
static void put_scale(uint8_t *at, uint64_t *state)
{
    const uint64_t r = ref_quant_random(state);
    uint16_t h = (uint16_t)((8u << 10) | (r & 0x83ffu));
    if ((r >> 20) % 16 == 0) h = (uint16_t)(r & 0x83ffu);
    memcpy(at, &h, sizeof(h));
}

void ref_quant_fill(int qtype, int64_t n_blocks, uint8_t *blocks, uint64_t *state)
{
    static const struct {
        int qtype, bytes, scale[2];
    } layout[] = {{2, 18, {0, -1}}, {3, 20, {0, 2}},   {6, 22, {0, -1}},  {7, 24, {0, 2}},
                  {8, 34, {0, -1}}, {12, 144, {0, 2}}, {13, 176, {0, 2}}, {14, 210, {208, -1}}};
    for (int64_t i = 0; i < n_blocks; i++) {
        const float v = ref_quant_unit(state);
        uint32_t bits;
        memcpy(&bits, &v, sizeof(bits));
        const uint16_t high = (uint16_t)(bits >> 16);
        if (qtype == 0) memcpy(blocks + 4 * i, &v, sizeof(v));
        if (qtype == 1) put_scale(blocks + 2 * i, state);
        if (qtype == 30) memcpy(blocks + 2 * i, &high, sizeof(high));
    }
    for (size_t t = 0; t < sizeof(layout) / sizeof(layout[0]); t++) {
        if (layout[t].qtype != qtype) continue;
        for (int64_t i = 0; i < n_blocks; i++) {
            uint8_t *b = blocks + i * layout[t].bytes;
            for (int j = 0; j < layout[t].bytes; j++)
                b[j] = (uint8_t)(ref_quant_random(state) >> 56);
            for (int j = 0; j < 2; j++)
                if (layout[t].scale[j] >= 0) put_scale(b + layout[t].scale[j], state);
        }
    }
}

double ref_quant_dot(const float *v, const float *x, int64_t n, double *abs_out)
{
    double sum = 0.0, sum_abs = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double p = (double)v[i] * (double)x[i];
        sum += p;
        sum_abs += fabs(p);
    }
    if (abs_out != NULL) *abs_out = sum_abs;
    return sum;
}
