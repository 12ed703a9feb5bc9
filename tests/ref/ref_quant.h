/* SPDX-License-Identifier: Apache-2.0 */
/* Stored blocks, random weights and products in double for tests of quantised kernels. */
#ifndef TESTS_REF_QUANT_H
#define TESTS_REF_QUANT_H

#include <stdint.h>
#include <stdio.h>

/* What scripts/make_quant_blocks.py wrote for one type. */
struct ref_quant {
    int qtype;
    int64_t elems, bytes, n_blocks;
    uint8_t *blocks; /* [n_blocks][bytes] */
    float *values;   /* [n_blocks][elems] */
};
/* 0 = done; frees by ref_quant_free. */
int ref_quant_read(const char *path, struct ref_quant *out);
void ref_quant_free(struct ref_quant *b);

/* xorshift64*: uniform 64 bits; state must not be 0. */
uint64_t ref_quant_random(uint64_t *state);
/* In (-1, 1). */
float ref_quant_unit(uint64_t *state);

/* Random finite blocks of a type: n_bytes of random bits, then ordinary f16 scales (about 0.01,
 * some denormal). F32, F16 and BF16 get values in (-1, 1). */
void ref_quant_fill(int qtype, int64_t n_blocks, uint8_t *blocks, uint64_t *state);

/* sum v[i] x[i] and sum |v[i] x[i]| in double. */
double ref_quant_dot(const float *v, const float *x, int64_t n, double *abs_out);

#endif
