/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX-512. The includer defines
 *
 *     SUM_4(acc, u8, s8)   acc[i] += sum of four products of unsigned by signed bytes
 *     NAME(fn)             the name of a kernel on this level
 *
 * Some 17 vector operations per four blocks of 32, so that a core can read faster than DRAM
 * answers: four blocks' nibbles share one register, their scales become floats and are multiplied
 * by those of the activations together; a row runs from start to end alone. Tokens share a block's
 * quants while these are in registers.
 *
 * What a row waits for. A product holds its place in the CPU's scheduler until its weights are in
 * L1, and four operations for each 34 bytes fill the scheduler before the loads fill the queue to
 * DRAM: with the CPU's own prefetching alone a product reaches half of the speed of a plain read.
 * So each line is asked for twice: FAR ahead into L2, for which nothing waits, and NEAR ahead, out
 * of L2 by then, into L1. Shares of a plain read, 256 MiB, two threads, medians of several runs in
 * turn; the machine's noise is 0.03:
 *
 *                                       huge pages            4 KiB pages
 *                                       Q8_0        Q4_1      Q8_0        Q4_1
 *     8 KB ahead into L1 alone          0.78-0.81   0.77-0.82 0.73-0.82   0.74-0.81
 *     3 KB, and 8 KB into L2            0.86-0.92   0.85-0.90 0.87-0.91   0.81-0.89
 *
 * 2 to 4 KB with 6 to 16 KB are alike. Asking into L2 for the first half of each 4 KiB page only,
 * over whose end the CPU's own prefetching does not go, is 1 to 4% worse on huge pages and up to 4%
 * better on small ones. */
#include <stdbool.h>

#include "kernels/qdot16_priv.h"
#include "kernels/quant_avx512.h"

enum { NEAR = 3072, FAR = 8192 };

/* Asks for what lies NEAR and FAR ahead of bytes [begin, end) of p; begin is a multiple of 64, and
 * their number is rounded to lines.
 * always_inline: gcc deduces that a function which only prefetches does nothing, and drops calls.
 */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *p, int begin, int end)
{
    for (int at = begin; at + 32 <= end; at += 64) {
        _mm_prefetch((const char *)p + NEAR + at, _MM_HINT_T0);
        _mm_prefetch((const char *)p + FAR + at, _MM_HINT_T1);
    }
}

/* The same at step i of n steps over n_bytes: a line each, and the last step what is left. One by
 * one they are 1 to 2% better than all at once. */
static inline __attribute__((always_inline)) void prefetch_step(const uint8_t *p, int i, int n,
                                                                int n_bytes)
{
    prefetch(p, 64 * i, i == n - 1 ? n_bytes : 64 * (i + 1));
}

static inline float tree(__m512 v)
{
    const __m256 v8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}

/* tree(acc + factor * min), min's lanes as given. */
static inline float tree_with(__m512 acc, float factor, __mmask16 lanes, __m512 min)
{
    const __m512 own = _mm512_maskz_mul_ps(lanes, _mm512_set1_ps(factor), min);
    return tree(_mm512_add_ps(acc, own));
}

static inline __m512i load_64(const void *p)
{
    return _mm512_loadu_si512(p);
}

static inline __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* Lane 4 i + j: p[i]. */
static inline __m512 each_four_times(const float *p)
{
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(p)), lane);
}

/* sum q x over one register of quants and 64 elements of planes. */
static inline __m512 dot_64(__m512i q, const int8_t *planes)
{
    const __m512i high = SUM_4(_mm512_setzero_si512(), q, load_64(planes));
    return _mm512_cvtepi32_ps(SUM_4(_mm512_slli_epi32(high, 8), q, load_64(planes + 64)));
}

/* The same over two registers and 128 elements, lane by lane added. */
static inline __m512 dot_128(__m512i q0, __m512i q1, const int8_t *planes)
{
    __m512i sum = SUM_4(_mm512_setzero_si512(), q0, load_64(planes));
    sum = _mm512_slli_epi32(SUM_4(sum, q1, load_64(planes + 128)), 8);
    sum = SUM_4(sum, q0, load_64(planes + 64));
    return _mm512_cvtepi32_ps(SUM_4(sum, q1, load_64(planes + 192)));
}

/* Lane i: p[2 (i / 4)], of a block's lanes the block's. */
static inline __m512 of_four_blocks(__m256 pairs)
{
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return _mm512_permutexvar_ps(lane, _mm512_castps256_ps512(pairs));
}

/* --- blocks of 32 ---------------------------------------------------------------------------- */

/* First dwords of n <= 4 blocks, the rest zero. */
static inline __attribute__((always_inline)) __m128i heads(const uint8_t *b, int n, int block_bytes)
{
    __m128i v = _mm_cvtsi32_si128((int)dcp__load_u32(b));
    for (int j = 1; j < n; j++)
        v = _mm_mask_broadcastd_epi32(v, (__mmask8)(1 << j),
                                      _mm_cvtsi32_si128((int)dcp__load_u32(b + j * block_bytes)));
    return v;
}

/* 16 bytes of n <= 4 blocks side by side, the rest zero. */
static inline __attribute__((always_inline)) __m512i side_by_side(const uint8_t *qs, int n,
                                                                  int block_bytes)
{
    __m512i v = _mm512_zextsi128_si512(load_16(qs));
    if (n > 1) v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load_16(qs + block_bytes));
    if (n > 2) v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load_16(qs + 2 * block_bytes));
    if (n > 3) v = _mm512_mask_broadcast_i32x4(v, 0xf000, load_16(qs + 3 * block_bytes));
    return v;
}

struct quants {
    __m512i low, high; /* elements 0..15 of four blocks, 16..31 */
};

static inline struct quants split_nibbles(__m512i v)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    return (struct quants){_mm512_and_si512(v, low4),
                           _mm512_and_si512(_mm512_srli_epi16(v, 4), low4)};
}

/* Four blocks of Q4_1 are 20 dwords: one permutation where the general way takes a masked load for
 * each block. */
static inline __m512i quants_of_four(const uint8_t *b)
{
    const __m512i at = _mm512_setr_epi32(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 28, 29, 30, 31);
    return _mm512_permutex2var_epi32(load_64(b), at, load_64(b + 16));
}

/* Of each of four blocks two f16, d and m or d twice, to words 0 to 7; of types with a fifth bit
 * the lower halves of qh to words 8 to 11 and the upper ones to words 12 to 15. One load that ends
 * with what is wanted of the last block, the first block's wanted bytes put in place of its start
 * (which nobody wants), and one permutation. */
static inline __attribute__((always_inline)) __m256i heads_of_four(const uint8_t *b,
                                                                   const struct dcp__q16_layout l)
{
    if (l.block_bytes == 20) {
        const __m512i at = _mm512_setr_epi32(0, 5, 10, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        return _mm512_castsi512_si256(_mm512_permutexvar_epi32(at, load_64(b)));
    }
    const int wanted = l.fifth_at < 0 ? 4 : l.fifth_at + 4, end = 3 * l.block_bytes + wanted;
    const int skip = end > 64 ? end - 64 : 0, m = l.min_at < 0 ? 0 : 1;
    const int w1 = (l.block_bytes - skip) / 2, w2 = w1 + l.block_bytes / 2;
    const int w3 = w2 + l.block_bytes / 2, low = l.fifth_at / 2, high = low + 1;
    __m512i v = load_64(b + skip);
    if (skip > 0) v = _mm512_mask_loadu_epi32(v, wanted > 4 ? 3 : 1, b);
    const __m256i at =
        l.fifth_at < 0
            ? _mm256_setr_epi16(0, (short)m, (short)w1, (short)(w1 + m), (short)w2, (short)(w2 + m),
                                (short)w3, (short)(w3 + m), 0, 0, 0, 0, 0, 0, 0, 0)
            : _mm256_setr_epi16(0, (short)m, (short)w1, (short)(w1 + m), (short)w2, (short)(w2 + m),
                                (short)w3, (short)(w3 + m), (short)low, (short)(w1 + low),
                                (short)(w2 + low), (short)(w3 + low), (short)high,
                                (short)(w1 + high), (short)(w2 + high), (short)(w3 + high));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(at), v));
}

/* Bit 4 where low and high have a bit. */
static inline struct quants with_fifth(struct quants q, uint64_t low, uint64_t high)
{
    const __m512i up = _mm512_set1_epi8(16);
    return (struct quants){_mm512_mask_add_epi8(q.low, _cvtu64_mask64(low), q.low, up),
                           _mm512_mask_add_epi8(q.high, _cvtu64_mask64(high), q.high, up)};
}

static inline __attribute__((always_inline)) struct quants take_quants(
    const uint8_t *b, int n, const struct dcp__q16_layout l)
{
    const struct quants q = split_nibbles(side_by_side(b + l.block_bytes - 16, n, l.block_bytes));
    if (l.fifth_at < 0) return q;
    uint64_t low = 0, high = 0;
    for (int j = 0; j < n; j++) {
        const uint64_t bits = dcp__load_u32(b + j * l.block_bytes + l.fifth_at);
        low |= (bits & 0xffffu) << 16 * j;
        high |= (bits >> 16) << 16 * j;
    }
    return with_fifth(q, low, high);
}

static inline __attribute__((always_inline)) struct quants take_four(const uint8_t *b,
                                                                     __m256i heads,
                                                                     const struct dcp__q16_layout l)
{
    if (l.block_bytes == 20) return split_nibbles(quants_of_four(b));
    const struct quants q = split_nibbles(side_by_side(b + l.block_bytes - 16, 4, l.block_bytes));
    if (l.fifth_at < 0) return q;
    const __m128i fifth = _mm256_extracti128_si256(heads, 1);
    return with_fifth(q, (uint64_t)_mm_cvtsi128_si64(fifth), (uint64_t)_mm_extract_epi64(fifth, 1));
}

/* n <= 4 blocks from block at. */
static inline __attribute__((always_inline)) void add_blocks(const uint8_t *b, int n, int64_t at,
                                                             const struct dcp__q16_row *x,
                                                             const int n_tokens,
                                                             const struct dcp__q16_layout l,
                                                             __m512 *acc, __m256 *min)
{
    struct quants q;
    __m256 dm;
    if (n == 4) {
        const __m256i four = heads_of_four(b, l);
        q = take_four(b, four, l);
        dm = _mm256_cvtph_ps(_mm256_castsi256_si128(four));
    } else {
        q = take_quants(b, n, l);
        dm = _mm256_cvtph_ps(heads(b, n, l.block_bytes));
        if (l.min_at < 0) dm = _mm256_moveldup_ps(dm);
    }
    for (int t = 0; t < n_tokens; t++) {
        const __m256 own = _mm256_loadu_ps(x[t].pairs + 2 * at);
        const __m512 scale = of_four_blocks(_mm256_mul_ps(dm, own));
        min[t] = _mm256_fmadd_ps(dm, own, min[t]);
        acc[t] = _mm512_fmadd_ps(dot_128(q.low, q.high, x[t].planes[DCP__Q16_HALVES] + 64 * at),
                                 scale, acc[t]);
    }
}

static inline __attribute__((always_inline)) void row_small(const uint8_t *b, int64_t n_blocks,
                                                            const struct dcp__q16_row *x,
                                                            const int n_tokens, float *y,
                                                            int64_t y_stride,
                                                            const struct dcp__q16_layout l)
{
    __m512 acc[DCP__Q16_ROW_TOKENS];
    __m256 min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) {
        acc[t] = _mm512_setzero_ps();
        min[t] = _mm256_setzero_ps();
    }
    int64_t at = 0;
    for (; at + 16 <= n_blocks; at += 16) {
        const uint8_t *const first = b;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, b += 4 * l.block_bytes) {
            prefetch_step(first, i, 4, 16 * l.block_bytes);
            add_blocks(b, 4, at + 4 * i, x, n_tokens, l, acc, min);
        }
    }
    for (; at + 4 <= n_blocks; at += 4, b += 4 * l.block_bytes) {
        prefetch(b, 0, 4 * l.block_bytes);
        add_blocks(b, 4, at, x, n_tokens, l, acc, min);
    }
    if (n_blocks - at == 1)
        add_blocks(b, 1, at, x, n_tokens, l, acc, min);
    else if (n_blocks - at == 2)
        add_blocks(b, 2, at, x, n_tokens, l, acc, min);
    else if (n_blocks - at == 3)
        add_blocks(b, 3, at, x, n_tokens, l, acc, min);
    for (int t = 0; t < n_tokens; t++)
        y[t * y_stride] = tree_with(acc[t], l.factor, 0x00aa, _mm512_castps256_ps512(min[t]));
}

/* Q8_0: d of 16 blocks, the even blocks' before the odd ones'. They are words 17 n of the whole:
 * line i, 64 bytes from its start, holds that of block 2 i in the low half of dword i and that of
 * 2 i + 1 in the high half of dword i + 8. A gather takes twice as long. */
static inline __m512 scales_of_16(const uint8_t *b)
{
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(16), 1);
    __m512i v = load_64(b);
#pragma GCC unroll 7
    for (int i = 1; i < 8; i++)
        v = _mm512_mask_loadu_epi32(v, (__mmask16)(0x0101 << i), b + 64 * i);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srlv_epi32(v, shift)));
}

/* p[0..15] in that order. */
static inline __m512 even_before_odd(const float *p)
{
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(at, _mm512_loadu_ps(p));
}

/* Of so few blocks scales are cheaper one by one than gathered: a gather takes as long for 2 as for
 * 16. */
enum { FEW = 4 };

/* d of n < 16 blocks in their own order, the rest zero. */
static inline __m512 scales_of(const uint8_t *b, int n, int block_bytes)
{
    const __m512i at =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(block_bytes));
    const __m512i dwords =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(n), at, b, 1);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords));
}

/* acc += (q . x) scale over one block. */
static inline __m512 add_32(__m512i q, const int16_t *words, float scale, __m512 acc)
{
    const __m512i sum = _mm512_madd_epi16(q, load_64(words));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale), acc);
}

static inline __m512i quants_of_32(const uint8_t *b)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(b + 2)));
}

static inline __attribute__((always_inline)) void row_q8_0(const uint8_t *b, int64_t n_blocks,
                                                           const struct dcp__q16_row *x,
                                                           const int n_tokens, float *y,
                                                           int64_t y_stride,
                                                           const struct dcp__q16_layout l)
{
    _Alignas(64) float scales[DCP__Q16_ROW_TOKENS][16];
    __m512 acc[DCP__Q16_ROW_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) acc[t][0] = acc[t][1] = _mm512_setzero_ps();
    int64_t done = 0;
    for (; done + 16 <= n_blocks; done += 16) {
        const uint8_t *const first = b;
        const __m512 d = scales_of_16(b);
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(scales[t], _mm512_mul_ps(d, even_before_odd(x[t].scale + done)));
        settle(scales[0]);
#pragma GCC unroll 8
        for (int at = 0; at < 8; at++) {
            prefetch_step(first, at, 8, 16 * l.block_bytes);
            for (int i = 0; i < 2; i++, b += l.block_bytes) {
                const __m512i q = quants_of_32(b);
                for (int t = 0; t < n_tokens; t++)
                    acc[t][i] = add_32(q, x[t].words + 32 * (done + 2 * at + i),
                                       scales[t][at + 8 * i], acc[t][i]);
            }
        }
    }
    const int n = (int)(n_blocks - done);
    if (n > 0) {
        if (n <= FEW) {
            for (int i = 0; i < n; i++) {
                const float d = f16_at(b + i * l.block_bytes);
                for (int t = 0; t < n_tokens; t++) scales[t][i] = d * x[t].scale[done + i];
            }
        } else {
            const __m512 d = scales_of(b, n, l.block_bytes);
            for (int t = 0; t < n_tokens; t++)
                _mm512_store_ps(scales[t], _mm512_mul_ps(d, _mm512_loadu_ps(x[t].scale + done)));
        }
        settle(scales[0]);
        prefetch(b, 0, n * l.block_bytes);
        for (int at = 0; at < n; at += 2) {
            for (int i = 0; i < 2 && at + i < n; i++, b += l.block_bytes) {
                const __m512i q = quants_of_32(b);
                for (int t = 0; t < n_tokens; t++)
                    acc[t][i] =
                        add_32(q, x[t].words + 32 * (done + at + i), scales[t][at + i], acc[t][i]);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) y[t * y_stride] = tree(_mm512_add_ps(acc[t][0], acc[t][1]));
}

/* --- blocks of 256 --------------------------------------------------------------------------- */

/* Bit 4 of the quants of Q5_K: bit g of byte j of qh, at bit 4 of byte j. by: 4 - g for the groups
 * of the lower and the upper half; what crosses bytes in the rotation is masked. */
static inline __m512i fifth_bits(__m512i qh, int lower, int upper)
{
    const __m512i by = _mm512_inserti64x4(_mm512_set1_epi32(lower), _mm256_set1_epi32(upper), 1);
    return _mm512_and_si512(_mm512_rolv_epi32(qh, by), _mm512_set1_epi8(16));
}

static inline __attribute__((always_inline)) void row_k45(const uint8_t *b, int64_t n_blocks,
                                                          const struct dcp__q16_row *x,
                                                          const int n_tokens, float *y,
                                                          int64_t y_stride,
                                                          const struct dcp__q16_layout l)
{
    const __m512i low4 = _mm512_set1_epi8(15);
    /* Twice the groups of the lower and the upper half. */
    const __m512i lane[4] = {
        _mm512_inserti64x4(_mm512_set1_epi32(0), _mm256_set1_epi32(4), 1),
        _mm512_inserti64x4(_mm512_set1_epi32(2), _mm256_set1_epi32(6), 1),
        _mm512_inserti64x4(_mm512_set1_epi32(8), _mm256_set1_epi32(12), 1),
        _mm512_inserti64x4(_mm512_set1_epi32(10), _mm256_set1_epi32(14), 1),
    };
    const __m128i in_pairs = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    __m512 acc[DCP__Q16_ROW_TOKENS], min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) acc[t] = min[t] = _mm512_setzero_ps();
    for (int64_t done = 0; done < n_blocks; done++, b += l.block_bytes) {
        prefetch(b, 0, l.block_bytes);
        /* d sc, dmin m of the eight groups */
        const __m512 factors = _mm512_cvtph_ps(_mm256_set1_epi32((int)dcp__load_u32(b)));
        const __m128i bytes = _mm_shuffle_epi8(k_scales_u8(b + 4), in_pairs);
        const __m512 sm = _mm512_mul_ps(factors, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
        __m512 scale[DCP__Q16_ROW_TOKENS];
        for (int t = 0; t < n_tokens; t++) {
            const __m512 own = _mm512_loadu_ps(x[t].pairs + 16 * done);
            scale[t] = _mm512_mul_ps(sm, own);
            min[t] = _mm512_fmadd_ps(sm, own, min[t]);
        }
        const __m512i qh = l.fifth_at < 0 ? low4
                                          : _mm512_broadcast_i64x4(_mm256_loadu_si256(
                                                (const __m256i *)(const void *)(b + l.fifth_at)));
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512i v = load_64(b + l.block_bytes - 128 + 64 * i);
            __m512i low = _mm512_and_si512(v, low4);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
            if (l.fifth_at > 0) {
                low = _mm512_or_si512(low, fifth_bits(qh, 4 - 4 * i, 2 - 4 * i));
                high = _mm512_or_si512(high, fifth_bits(qh, 3 - 4 * i, 1 - 4 * i));
            }
            for (int t = 0; t < n_tokens; t++) {
                const int8_t *planes = x[t].planes[DCP__Q16_CHUNKS] + 512 * done + 256 * i;
                acc[t] = _mm512_fmadd_ps(dot_64(low, planes),
                                         _mm512_permutexvar_ps(lane[2 * i], scale[t]), acc[t]);
                acc[t] = _mm512_fmadd_ps(dot_64(high, planes + 128),
                                         _mm512_permutexvar_ps(lane[2 * i + 1], scale[t]), acc[t]);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++)
        y[t * y_stride] = tree_with(acc[t], l.factor, 0xaaaa, min[t]);
}

/* Elements 0..63 and 64..127 of half h of a Q6_K block, unsigned. */
static inline struct quants take_q6_k(const uint8_t *b, int h)
{
    const __m512i low4 = _mm512_set1_epi8(15), low6 = _mm512_set1_epi8(63);
    /* The first 32 bytes need other bits of qh than the second. */
    const __m512i up = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i down = _mm512_inserti64x4(_mm512_set1_epi16(0), _mm256_set1_epi16(2), 1);
    const __m512i ql = load_64(b + 64 * h);
    const __m512i qh = _mm512_broadcast_i64x4(
        _mm256_loadu_si256((const __m256i *)(const void *)(b + 128 + 32 * h)));
    /* low4 ? low nibble : bits of qh; bits 6 and 7 are the neighbours' and go. */
    const __m512i first = _mm512_ternarylogic_epi32(low4, ql, _mm512_sllv_epi16(qh, up), 0xca);
    const __m512i last = _mm512_ternarylogic_epi32(low4, _mm512_srli_epi16(ql, 4),
                                                   _mm512_srlv_epi16(qh, down), 0xca);
    return (struct quants){_mm512_and_si512(first, low6), _mm512_and_si512(last, low6)};
}

static inline __attribute__((always_inline)) void row_q6_k(const uint8_t *b, int64_t n_blocks,
                                                           const struct dcp__q16_row *x,
                                                           const int n_tokens, float *y,
                                                           int64_t y_stride,
                                                           const struct dcp__q16_layout l)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _Alignas(64) float scales[DCP__Q16_ROW_TOKENS][16];
    __m512 acc[DCP__Q16_ROW_TOKENS], min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) acc[t] = min[t] = _mm512_setzero_ps();
    for (int64_t done = 0; done < n_blocks; done++, b += l.block_bytes) {
        prefetch(b, 0, l.block_bytes);
        const __m512 own = q6_k_scales(b);
        for (int t = 0; t < n_tokens; t++) {
            const __m256 of_x = _mm256_loadu_ps(x[t].scale + 8 * done);
            _mm512_store_ps(
                scales[t],
                _mm512_mul_ps(own, _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(of_x))));
            min[t] = _mm512_fmadd_ps(own, _mm512_loadu_ps(x[t].half_sum + 16 * done), min[t]);
        }
        settle(scales[0]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const struct quants q = take_q6_k(b, h);
            for (int t = 0; t < n_tokens; t++) {
                const int8_t *planes = x[t].planes[DCP__Q16_PLAIN] + 512 * done + 256 * h;
                acc[t] = _mm512_fmadd_ps(dot_64(q.low, planes), each_four_times(scales[t] + 8 * h),
                                         acc[t]);
                acc[t] = _mm512_fmadd_ps(dot_64(q.high, planes + 128),
                                         each_four_times(scales[t] + 8 * h + 4), acc[t]);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++)
        y[t * y_stride] = tree_with(acc[t], l.factor, 0xffff, min[t]);
}

/* --- kernels --------------------------------------------------------------------------------- */

DCP__Q16_TYPES(DCP__Q16_DEFINE)
