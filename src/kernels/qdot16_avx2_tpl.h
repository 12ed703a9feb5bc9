/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX2. The includer defines
 *
 *     SUM_4(acc, u8, s8)   acc[i] += sum of four products of unsigned by signed bytes
 *     NAME(type)           the name of a kernel on this level
 *
 * The 16 lanes of qdot16_priv.h are two registers. */
#include <stdbool.h>

#include "kernels/qdot16_priv.h"
#include "kernels/quant_avx2.h"

enum { AHEAD = 4096 };

/* always_inline: gcc deduces that a function which only prefetches does nothing, and drops calls.
 */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *p, int n_bytes)
{
    for (int at = 0; at < n_bytes; at += 64)
        _mm_prefetch((const char *)p + AHEAD + at, _MM_HINT_T0);
}

struct lanes {
    __m256 a, b; /* 0..7, 8..15 */
};

static inline struct lanes no_lanes(void)
{
    return (struct lanes){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

static inline float tree(struct lanes v)
{
    const __m256 v8 = _mm256_add_ps(v.a, v.b);
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}

/* tree(acc + factor * min). */
static inline float tree_with(struct lanes acc, float factor, struct lanes min)
{
    const __m256 f = _mm256_set1_ps(factor);
    return tree((struct lanes){_mm256_add_ps(acc.a, _mm256_mul_ps(f, min.a)),
                               _mm256_add_ps(acc.b, _mm256_mul_ps(f, min.b))});
}

/* Of products with pairs: what the even ones hold is not wanted. */
static inline struct lanes odd_lanes(struct lanes v)
{
    const __m256 zero = _mm256_setzero_ps();
    return (struct lanes){_mm256_blend_ps(zero, v.a, 0xaa), _mm256_blend_ps(zero, v.b, 0xaa)};
}

static inline __m256i digits(const int8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Lanes 0..3: p[0], lanes 4..7: p[1]. */
static inline __m256 each_four_times(const float *p)
{
    return _mm256_blend_ps(_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1]), 0xf0);
}

/* sum q x of 32 elements whose digits are at planes and 64 bytes on. */
static inline __m256 dot_32(__m256i q, const int8_t *planes)
{
    const __m256i high = SUM_4(_mm256_setzero_si256(), q, digits(planes));
    return _mm256_cvtepi32_ps(SUM_4(_mm256_slli_epi32(high, 8), q, digits(planes + 64)));
}

/* The same of two registers, lane by lane added; the second's digits are 128 bytes on. */
static inline __m256 dot_2x32(__m256i q0, __m256i q1, const int8_t *planes)
{
    __m256i sum = SUM_4(_mm256_setzero_si256(), q0, digits(planes));
    sum = _mm256_slli_epi32(SUM_4(sum, q1, digits(planes + 128)), 8);
    sum = SUM_4(sum, q0, digits(planes + 64));
    return _mm256_cvtepi32_ps(SUM_4(sum, q1, digits(planes + 192)));
}

/* --- blocks of 32 ---------------------------------------------------------------------------- */

/* d of n <= 16 blocks, and zeros. */
static inline __attribute__((always_inline)) struct lanes scales_of(const uint8_t *b, int n,
                                                                    int block_bytes)
{
    _Alignas(32) uint16_t f16[16] = {0};
    for (int j = 0; j < n; j++) f16[j] = dcp__load_u16(b + j * block_bytes);
    return (struct lanes){load_f16((const uint8_t *)f16), load_f16((const uint8_t *)(f16 + 8))};
}

static inline void store_lanes(float *p, struct lanes v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}

static inline struct lanes times(struct lanes v, const float *p)
{
    return (struct lanes){_mm256_mul_ps(v.a, _mm256_loadu_ps(p)),
                          _mm256_mul_ps(v.b, _mm256_loadu_ps(p + 8))};
}

struct quants {
    __m256i low, high; /* elements 0..15 of two blocks, 16..31 */
};

/* n 1 or 2 blocks, the rest zero. */
static inline __attribute__((always_inline)) struct quants take_quants(
    const uint8_t *b, int n, const struct dcp__q16_layout l)
{
    const uint8_t *qs = b + l.block_bytes - 16;
    __m256i v = _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)qs));
    if (n > 1)
        v = _mm256_inserti128_si256(
            v, _mm_loadu_si128((const __m128i *)(const void *)(qs + l.block_bytes)), 1);
    const __m256i low4 = _mm256_set1_epi8(15);
    struct quants q = {_mm256_and_si256(v, low4), _mm256_and_si256(_mm256_srli_epi16(v, 4), low4)};
    if (l.fifth_at < 0) return q;
    const uint32_t first = dcp__load_u32(b + l.fifth_at);
    const uint32_t second = n > 1 ? dcp__load_u32(b + l.block_bytes + l.fifth_at) : 0;
    q.low = _mm256_or_si256(q.low, fifth_bits((first & 0xffffu) | second << 16));
    q.high = _mm256_or_si256(q.high, fifth_bits(first >> 16 | (second & 0xffff0000u)));
    return q;
}

/* First dwords of n <= 4 blocks as two f16 each, the rest zero. */
static inline __attribute__((always_inline)) __m256 heads(const uint8_t *b, int n, int block_bytes)
{
    __m128i v = _mm_cvtsi32_si128((int)dcp__load_u32(b));
    if (n > 1) v = _mm_insert_epi32(v, (int)dcp__load_u32(b + block_bytes), 1);
    if (n > 2) v = _mm_insert_epi32(v, (int)dcp__load_u32(b + 2 * block_bytes), 2);
    if (n > 3) v = _mm_insert_epi32(v, (int)dcp__load_u32(b + 3 * block_bytes), 3);
    return _mm256_cvtph_ps(v);
}

/* Lanes 0..3 (4..7) of the products: scale of the first (second) of two blocks. */
static inline __m256 of_two_blocks(__m256 pairs, int lower, int upper)
{
    return _mm256_permutevar8x32_ps(
        pairs, _mm256_setr_epi32(lower, lower, lower, lower, upper, upper, upper, upper));
}

/* n <= 4 blocks from block at. */
static inline __attribute__((always_inline)) void add_blocks(const uint8_t *b, int n, int64_t at,
                                                             const struct dcp__q16_row *x,
                                                             const int n_tokens,
                                                             const struct dcp__q16_layout l,
                                                             struct lanes *acc, struct lanes *min)
{
    const struct quants q = take_quants(b, n < 2 ? n : 2, l);
    const struct quants u = n > 2 ? take_quants(b + 2 * l.block_bytes, n - 2, l) : q;
    __m256 dm = heads(b, n, l.block_bytes);
    if (l.min_at < 0) dm = _mm256_moveldup_ps(dm);
    for (int t = 0; t < n_tokens; t++) {
        const int8_t *planes = x[t].planes[DCP__Q16_HALVES] + 64 * at;
        const __m256 own = _mm256_loadu_ps(x[t].pairs + 2 * at), scale = _mm256_mul_ps(dm, own);
        min[t].a = _mm256_fmadd_ps(dm, own, min[t].a);
        acc[t].a =
            _mm256_fmadd_ps(dot_2x32(q.low, q.high, planes), of_two_blocks(scale, 0, 2), acc[t].a);
        if (n > 2)
            acc[t].b = _mm256_fmadd_ps(dot_2x32(u.low, u.high, planes + 32),
                                       of_two_blocks(scale, 4, 6), acc[t].b);
    }
}

static inline __attribute__((always_inline)) void row_small(const uint8_t *b, int64_t n_blocks,
                                                            const struct dcp__q16_row *x,
                                                            const int n_tokens, float *y,
                                                            int64_t y_stride,
                                                            const struct dcp__q16_layout l)
{
    struct lanes acc[DCP__Q16_ROW_TOKENS], min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) acc[t] = min[t] = no_lanes();
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
        y[t * y_stride] = tree_with(acc[t], l.factor, odd_lanes(min[t]));
}

/* acc += (q . x) scale over 16 elements. */
static inline __attribute__((always_inline)) __m256 add_16(__m256i q, const int16_t *words,
                                                           __m256 scale, __m256 acc)
{
    const __m256i sum =
        _mm256_madd_epi16(q, _mm256_loadu_si256((const __m256i *)(const void *)words));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, acc);
}

static inline __attribute__((always_inline)) void row_q8_0(const uint8_t *b, int64_t n_blocks,
                                                           const struct dcp__q16_row *x,
                                                           const int n_tokens, float *y,
                                                           int64_t y_stride,
                                                           const struct dcp__q16_layout l)
{
    _Alignas(32) float scales[DCP__Q16_ROW_TOKENS][16];
    struct lanes acc[DCP__Q16_ROW_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) acc[t][0] = acc[t][1] = no_lanes();
    for (int64_t done = 0; done < n_blocks; done += 16) {
        const int n = n_blocks - done < 16 ? (int)(n_blocks - done) : 16;
        const struct lanes d = scales_of(b, n, l.block_bytes);
        for (int t = 0; t < n_tokens; t++) store_lanes(scales[t], times(d, x[t].scale + done));
        for (int at = 0; at < n; at += 2) {
            prefetch(b, 2 * l.block_bytes);
            for (int i = 0; i < 2 && at + i < n; i++, b += l.block_bytes) {
                const __m256i v = load_32(b + 2);
                const __m256i first = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(v));
                const __m256i last = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1));
                for (int t = 0; t < n_tokens; t++) {
                    const int16_t *words = x[t].words + DCP__Q_SMALL * (done + at + i);
                    const __m256 scale = _mm256_set1_ps(scales[t][at + i]);
                    acc[t][i].a = add_16(first, words, scale, acc[t][i].a);
                    acc[t][i].b = add_16(last, words + 16, scale, acc[t][i].b);
                }
            }
        }
    }
    for (int t = 0; t < n_tokens; t++)
        y[t * y_stride] = tree((struct lanes){_mm256_add_ps(acc[t][0].a, acc[t][1].a),
                                              _mm256_add_ps(acc[t][0].b, acc[t][1].b)});
}

/* --- blocks of 256 --------------------------------------------------------------------------- */

/* Quants of group g of a Q4_K or Q5_K block. */
static inline __attribute__((always_inline)) __m256i take_group(const uint8_t *b, int g,
                                                                const struct dcp__q16_layout l)
{
    const __m256i low4 = _mm256_set1_epi8(15);
    __m256i v = load_32(b + l.block_bytes - 128 + 32 * (g / 2));
    if (g % 2 == 1) v = _mm256_srli_epi16(v, 4);
    v = _mm256_and_si256(v, low4);
    if (l.fifth_at < 0) return v;
    const __m256i own = _mm256_set1_epi8((char)(1 << g)), qh = load_32(b + l.fifth_at);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(qh, own), own);
    return _mm256_or_si256(v, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

static inline struct lanes interleave(__m256 v, __m256 u)
{
    const __m256 low = _mm256_unpacklo_ps(v, u), high = _mm256_unpackhi_ps(v, u);
    return (struct lanes){_mm256_permute2f128_ps(low, high, 0x20),
                          _mm256_permute2f128_ps(low, high, 0x31)};
}

static inline __attribute__((always_inline)) void row_k45(const uint8_t *b, int64_t n_blocks,
                                                          const struct dcp__q16_row *x,
                                                          const int n_tokens, float *y,
                                                          int64_t y_stride,
                                                          const struct dcp__q16_layout l)
{
    _Alignas(32) float sm[16], scales[DCP__Q16_ROW_TOKENS][16];
    struct lanes acc[DCP__Q16_ROW_TOKENS], min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) acc[t] = min[t] = no_lanes();
    for (int64_t done = 0; done < n_blocks; done++, b += l.block_bytes) {
        prefetch(b, l.block_bytes);
        k_scales_f32(b, sm);
        /* d sc, dmin m of the eight groups */
        const struct lanes in_pairs = interleave(_mm256_loadu_ps(sm), _mm256_loadu_ps(sm + 8));
        for (int t = 0; t < n_tokens; t++) {
            const float *own = x[t].pairs + 16 * done;
            store_lanes(scales[t], times(in_pairs, own));
            min[t].a = _mm256_fmadd_ps(in_pairs.a, _mm256_loadu_ps(own), min[t].a);
            min[t].b = _mm256_fmadd_ps(in_pairs.b, _mm256_loadu_ps(own + 8), min[t].b);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const __m256i q = take_group(b, g, l);
            for (int t = 0; t < n_tokens; t++) {
                const int8_t *planes = x[t].planes[DCP__Q16_CHUNKS] + 512 * done + 256 * (g / 4) +
                                       128 * (g % 2) + 32 * (g / 2 % 2);
                const __m256 sum = dot_32(q, planes), scale = _mm256_set1_ps(scales[t][2 * g]);
                if (g % 4 < 2)
                    acc[t].a = _mm256_fmadd_ps(sum, scale, acc[t].a);
                else
                    acc[t].b = _mm256_fmadd_ps(sum, scale, acc[t].b);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++)
        y[t * y_stride] = tree_with(acc[t], l.factor, odd_lanes(min[t]));
}

/* Elements 32 a to 32 a + 31 of half h of a Q6_K block, unsigned. */
static inline __attribute__((always_inline)) __m256i take_q6_k(const uint8_t *b, int h, int a)
{
    const __m256i low4 = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(0x30);
    const __m256i qh = load_32(b + 128 + 32 * h);
    const __m256i above = a == 0   ? _mm256_slli_epi16(qh, 4)
                          : a == 1 ? _mm256_slli_epi16(qh, 2)
                          : a == 2 ? qh
                                   : _mm256_srli_epi16(qh, 2);
    __m256i v = load_32(b + 64 * h + 32 * (a % 2));
    if (a >= 2) v = _mm256_srli_epi16(v, 4);
    return _mm256_or_si256(_mm256_and_si256(v, low4), _mm256_and_si256(above, high2));
}

static inline __attribute__((always_inline)) void row_q6_k(const uint8_t *b, int64_t n_blocks,
                                                           const struct dcp__q16_row *x,
                                                           const int n_tokens, float *y,
                                                           int64_t y_stride,
                                                           const struct dcp__q16_layout l)
{
    _Alignas(32) float own[16], scales[DCP__Q16_ROW_TOKENS][16], of_x[16];
    struct lanes acc[DCP__Q16_ROW_TOKENS], min[DCP__Q16_ROW_TOKENS];
    for (int t = 0; t < n_tokens; t++) acc[t] = min[t] = no_lanes();
    for (int64_t done = 0; done < n_blocks; done++, b += l.block_bytes) {
        prefetch(b, l.block_bytes);
        q6_k_scales(b, own);
        const struct lanes d = {_mm256_loadu_ps(own), _mm256_loadu_ps(own + 8)};
        for (int t = 0; t < n_tokens; t++) {
            for (int s = 0; s < 16; s++) of_x[s] = x[t].scale[8 * done + s / 2];
            store_lanes(scales[t], times(d, of_x));
            const float *half_sum = x[t].half_sum + 16 * done;
            min[t].a = _mm256_fmadd_ps(d.a, _mm256_loadu_ps(half_sum), min[t].a);
            min[t].b = _mm256_fmadd_ps(d.b, _mm256_loadu_ps(half_sum + 8), min[t].b);
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            const __m256i q = take_q6_k(b, r / 4, r % 4);
            for (int t = 0; t < n_tokens; t++) {
                const int8_t *planes =
                    x[t].planes[DCP__Q16_PLAIN] + 512 * done + 128 * (r / 2) + 32 * (r % 2);
                const __m256 sum = dot_32(q, planes), scale = each_four_times(scales[t] + 2 * r);
                if (r % 2 == 0)
                    acc[t].a = _mm256_fmadd_ps(sum, scale, acc[t].a);
                else
                    acc[t].b = _mm256_fmadd_ps(sum, scale, acc[t].b);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) y[t * y_stride] = tree_with(acc[t], l.factor, min[t]);
}

DCP__Q16_TYPES(DCP__Q16_DEFINE)
