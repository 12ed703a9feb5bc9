/* SPDX-License-Identifier: Apache-2.0 */
/* Products of quantised rows with activations in int16: what the kernels of all levels agree on.
 *
 * Activations, per group of 32 elements (dcp__to_q16_fn): top = max |x|,
 *
 *     scale = top / 32639        q[e] = round(x[e] * (32639 / top)), ties to even
 *     sum   = scale * (q[0] + .. + q[31]), and half_sum the same of 16
 *
 * so that |x - scale q| <= 0.51 scale <= 1.6e-5 top. A group with top < 2^-100 counts as zeros; one
 * that holds a NaN or an infinity gets scale = sum = NaN, and so does every product with it.
 * 32639 = 127 * 256 + 127: q is 256 high + low with both digits in [-128, 127], balanced, and a
 * product of bytes by bytes (vpdpbusd) with each plane makes one of int16 by bytes:
 *
 *     sum w q = 256 sum w high + sum w low
 *
 * Integer sums are exact, and every lane's stays below 2^24, so its float is exact as well. The
 * float part follows one order on every level, and its bits are equal on all of them:
 *
 *     family           a lane's integer sum                          lanes
 *     Q8_0             elements 2j, 2j + 1 of a block                16 of even, 16 of odd blocks
 *     Q4_x, Q5_x       elements 4j.. and 16 + 4j.. of a block        4 for each of 4 blocks in turn
 *     Q4_K, Q5_K       elements 4j.. of a group                      8 for even, 8 for odd pairs
 *     Q6_K             elements 4j.. of 64                           16
 *
 *     acc[lane] = fma(float(sum), d * scale, acc[lane]), blocks (K: groups, units) in order
 *     min[lane] = fma(m, sum of x, min[lane]); Q4_0, Q5_0, Q6_K: the same with d, as their quants
 *         are kept unsigned, and what is too much is taken off by factor below. Lane of a block:
 *         2 (b % 4) + 1; of a group of Q4_K, Q5_K: 2 g + 1; of 16 elements of Q6_K: its number
 *     y = tree(acc + factor * min), tree: halves of 16, 8, 4, 2 added (Q8_0: tree(even + odd))
 *
 * Nothing depends on the other rows or tokens of a call. */
#ifndef DCP_KERNELS_QDOT16_PRIV_H
#define DCP_KERNELS_QDOT16_PRIV_H

#include "kernels/kernels_priv.h"
#include "kernels/quant_priv.h"

enum {
    DCP__Q16_TOP = 32639,
    DCP__Q16_GROUP = 32,
    DCP__Q16_UNIT = 128 /* elements that an order of planes moves about */
};
#define DCP__Q16_LEAST 0x1p-100f

/* Planes lie in units of 128 elements: 64 high digits, their 64 low ones, the other 64 high, low.
 * An element of the first (second) 64:
 *   halves   elements 0..15 (16..31) of four blocks
 *   chunks   groups 0 and 2 (1 and 3): what the low (high) nibbles of 64 bytes of Q4_K stand for
 *   plain    in order */

/* Byte offsets in a block, -1 = none, and the factor of min. */
struct dcp__q16_layout {
    int block_bytes, min_at, fifth_at;
    float factor;
};
#define DCP__Q16_TYPES(X)                                                                          \
    X(q4_0, row_small, DCP__Q_SMALL, 18, -1, -1, -8.0f)                                            \
    X(q4_1, row_small, DCP__Q_SMALL, 20, 2, -1, 1.0f)                                              \
    X(q5_0, row_small, DCP__Q_SMALL, 22, -1, 2, -16.0f)                                            \
    X(q5_1, row_small, DCP__Q_SMALL, 24, 2, 4, 1.0f)                                               \
    X(q8_0, row_q8_0, DCP__Q_SMALL, 34, -1, -1, 0.0f)                                              \
    X(q4_k, row_k45, DCP__Q_SUPER, 144, 2, -1, -1.0f)                                              \
    X(q5_k, row_k45, DCP__Q_SUPER, 176, 2, 16, -1.0f)                                              \
    X(q6_k, row_q6_k, DCP__Q_SUPER, 210, -1, -1, -32.0f)

/* One row of n_blocks at b by n_tokens rows of activations, known where it is inlined: y[t *
 * y_stride]. */
typedef void dcp__q16_one_row_fn(const uint8_t *b, int64_t n_blocks, const struct dcp__q16_row *x,
                                 int n_tokens, float *y, int64_t y_stride,
                                 struct dcp__q16_layout l);

enum { DCP__Q16_ROW_TOKENS = 4 }; /* at most, at a time */

/* What every kernel does with its row. A row's further tokens find it in L1. */
static inline __attribute__((always_inline)) void dcp__q16_rows(
    const void *w, size_t row_bytes, int64_t n_rows, int64_t n_blocks, const struct dcp__q16_row *x,
    int n_tokens, float *y, int64_t y_stride, dcp__q16_one_row_fn *row, struct dcp__q16_layout l)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        int t = 0;
        for (; t + 4 <= n_tokens; t += 4)
            row(b, n_blocks, x + t, 4, y + t * y_stride + i, y_stride, l);
        for (; t + 2 <= n_tokens; t += 2)
            row(b, n_blocks, x + t, 2, y + t * y_stride + i, y_stride, l);
        if (t < n_tokens) row(b, n_blocks, x + t, 1, y + t * y_stride + i, y_stride, l);
    }
}

/* With NAME(type): X of DCP__Q16_TYPES. */
#define DCP__Q16_DEFINE(type, row, block_elems, ...)                                               \
    void NAME(type)(const void *w, size_t row_bytes, int64_t n_rows, int64_t k,                    \
                    const struct dcp__q16_row *x, int n_tokens, float *y, int64_t y_stride)        \
    {                                                                                              \
        dcp__q16_rows(w, row_bytes, n_rows, k / (block_elems), x, n_tokens, y, y_stride, row,      \
                      (struct dcp__q16_layout){__VA_ARGS__});                                      \
    }

#endif
