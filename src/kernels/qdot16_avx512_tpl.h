/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX-512. The includer defines
 *
 *     SUM_4(acc, u8, s8)   acc[i] += sum of four products of unsigned by signed bytes
 *     NAME(fn)             the name of a kernel on this level
 *
 * Some 17 vector operations per four blocks of 32, so that a core can read faster than DRAM answers:
 * four blocks' nibbles share one register, their scales become floats and are multiplied by those
 * of the activations together; a row runs from start to end alone and is prefetched AHEAD bytes
 * before (measured: 4 to 16 KB alike, 2 KB 8% slower). Tokens share a block's quants while these are
 * in registers. */
#include <stdbool.h>

#include "kernels/qdot16_priv.h"
#include "kernels/quant_avx512.h"

enum { AHEAD = 8192 };

/* The lines of n_bytes, to the nearest number of them: a line asked for twice costs more than one
 * left to the CPU's own prefetching (1 to 2% of a product from memory).
 * always_inline: gcc deduces that a function which only prefetches does nothing, and drops calls.
 */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *p, int n_bytes)
{
    for (int at = 0; at + 32 <= n_bytes; at += 64)
        _mm_prefetch((const char *)p + AHEAD + at, _MM_HINT_T0);
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

static inline __m128i heads_of_four(const uint8_t *b)
{
    const __m512i at = _mm512_setr_epi32(0, 5, 10, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castsi512_si128(_mm512_permutexvar_epi32(at, load_64(b)));
}

static inline __attribute__((always_inline)) struct quants take_quants(
    const uint8_t *b, int n, const struct dcp__q16_layout l)
{
    const __m512i up = _mm512_set1_epi8(16);
    struct quants q = split_nibbles(side_by_side(b + l.block_bytes - 16, n, l.block_bytes));
    if (l.fifth_at < 0) return q;
    uint64_t low = 0, high = 0;
    for (int j = 0; j < n; j++) {
        const uint64_t bits = dcp__load_u32(b + j * l.block_bytes + l.fifth_at);
        low |= (bits & 0xffffu) << 16 * j;
        high |= (bits >> 16) << 16 * j;
    }
    q.low = _mm512_mask_add_epi8(q.low, _cvtu64_mask64(low), q.low, up);
    q.high = _mm512_mask_add_epi8(q.high, _cvtu64_mask64(high), q.high, up);
    return q;
}

/* n <= 4 blocks from block at. */
static inline __attribute__((always_inline)) void add_blocks(const uint8_t *b, int n, int64_t at,
                                                             const struct dcp__q16_row *x,
                                                             const int n_tokens,
                                                             const struct dcp__q16_layout l,
                                                             __m512 *acc, __m256 *min)
{
    const bool is_whole = n == 4 && l.block_bytes == 20;
    const struct quants q = is_whole ? split_nibbles(quants_of_four(b)) : take_quants(b, n, l);
    __m256 dm = _mm256_cvtph_ps(is_whole ? heads_of_four(b) : heads(b, n, l.block_bytes));
    if (l.min_at < 0) dm = _mm256_moveldup_ps(dm);
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
    for (; at + 4 <= n_blocks; at += 4, b += 4 * l.block_bytes) {
        prefetch(b, 4 * l.block_bytes);
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

/* d of n <= 16 blocks, the rest zero. */
static inline __m512 scales_of(const uint8_t *b, int n, int block_bytes)
{
    const __m512i at =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(block_bytes));
    const __m512i dwords =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(n), at, b, 1);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords));
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
    for (int64_t done = 0; done < n_blocks; done += 16) {
        const int n = n_blocks - done < 16 ? (int)(n_blocks - done) : 16;
        const __m512 d = scales_of(b, n, l.block_bytes);
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(scales[t], _mm512_mul_ps(d, _mm512_loadu_ps(x[t].scale + done)));
        settle(scales[0]);
        for (int at = 0; at < n; at += 2) {
            prefetch(b, 2 * l.block_bytes);
            for (int i = 0; i < 2 && at + i < n; i++, b += l.block_bytes) {
                const __m512i q = _mm512_cvtepi8_epi16(
                    _mm256_loadu_si256((const __m256i *)(const void *)(b + 2)));
                for (int t = 0; t < n_tokens; t++) {
                    const __m512i sum =
                        _mm512_madd_epi16(q, load_64(x[t].words + 32 * (done + at + i)));
                    acc[t][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
                                                _mm512_set1_ps(scales[t][at + i]), acc[t][i]);
                }
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
        prefetch(b, l.block_bytes);
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
        prefetch(b, l.block_bytes);
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
