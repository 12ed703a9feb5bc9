/* SPDX-License-Identifier: Apache-2.0 */
/* Products of rows of blocks with one f32 vector, AVX-512.
 *
 * Bound by reading the blocks, if nothing else is done too often: per 32 elements a block may cost
 * about 8 vector operations. So:
 *   - the f16 scales (and minima) of 16 blocks are gathered, converted and stored at once; a block
 *     then broadcasts its own from L1, which takes no vector operation
 *   - four-bit quants become floats by one table look-up each (quant_avx512.h), the table holding
 *     scaled values where the block has a minimum
 *   - every row runs from start to end alone: one forward stream, prefetched PREFETCH_BYTES ahead
 *     (over the row's end, where the next row lies). Rows overlap in the out-of-order window.
 * A row's sums: blocks alternate between two accumulators (or halves of a block do), which are
 * added and reduced lane-wise at the end; nothing depends on the other rows of the call. */
#include <stdbool.h>

#include "kernels/kernels_priv.h"
#include "kernels/quant_avx512.h"

enum { PREFETCH_BYTES = 2048 };

/* always_inline: gcc deduces that a function which only prefetches does nothing, and drops calls.
 */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *p)
{
    _mm_prefetch((const char *)p + PREFETCH_BYTES, _MM_HINT_T0);
}

static inline float sum_lanes(struct pair p, struct pair q)
{
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(p.a, p.b), _mm512_add_ps(q.a, q.b)));
}

/* --- blocks of 32 ---------------------------------------------------------------------------- */

/* acc += block . x; a block without minimum gets m = 0 and ignores it. Blocks alternate between two
 * accs: a chain of additions through one register would be the bound. */
typedef void small_fn(const uint8_t *b, __m512 d, __m512 m, const float *x, struct pair *acc);

static inline void small_q4_0(const uint8_t *b, __m512 d, __m512 m, const float *x,
                              struct pair *acc)
{
    (void)m;
    const __m512 table = _mm512_mul_ps(d, count_from(-8.0f));
    const struct pair v = by_table(widen_u8(b + 2), table, table);
    acc->a = _mm512_fmadd_ps(v.a, _mm512_loadu_ps(x), acc->a);
    acc->b = _mm512_fmadd_ps(v.b, _mm512_loadu_ps(x + 16), acc->b);
}

static inline void small_q4_1(const uint8_t *b, __m512 d, __m512 m, const float *x,
                              struct pair *acc)
{
    const __m512 table = _mm512_fmadd_ps(d, count_from(0.0f), m);
    const struct pair v = by_table(widen_u8(b + 4), table, table);
    acc->a = _mm512_fmadd_ps(v.a, _mm512_loadu_ps(x), acc->a);
    acc->b = _mm512_fmadd_ps(v.b, _mm512_loadu_ps(x + 16), acc->b);
}

static inline void small_q5_0(const uint8_t *b, __m512 d, __m512 m, const float *x,
                              struct pair *acc)
{
    (void)m;
    const __m512 table = count_from(-16.0f), up = _mm512_set1_ps(16.0f);
    const uint32_t qh = dcp__load_u32(b + 2);
    const struct pair v = by_table(widen_u8(b + 6), table, table);
    const __m512 va = add_where(v.a, qh & 0xffffu, up), vb = add_where(v.b, qh >> 16, up);
    const __m512 sum =
        _mm512_fmadd_ps(vb, _mm512_loadu_ps(x + 16), _mm512_mul_ps(va, _mm512_loadu_ps(x)));
    acc->a = _mm512_fmadd_ps(d, sum, acc->a);
}

static inline void small_q5_1(const uint8_t *b, __m512 d, __m512 m, const float *x,
                              struct pair *acc)
{
    const __m512 table = _mm512_fmadd_ps(d, count_from(0.0f), m);
    const __m512 up = _mm512_mul_ps(d, _mm512_set1_ps(16.0f));
    const uint32_t qh = dcp__load_u32(b + 4);
    const struct pair v = by_table(widen_u8(b + 8), table, table);
    const __m512 va = add_where(v.a, qh & 0xffffu, up), vb = add_where(v.b, qh >> 16, up);
    acc->a = _mm512_fmadd_ps(va, _mm512_loadu_ps(x), acc->a);
    acc->b = _mm512_fmadd_ps(vb, _mm512_loadu_ps(x + 16), acc->b);
}

static inline void small_q8_0(const uint8_t *b, __m512 d, __m512 m, const float *x,
                              struct pair *acc)
{
    (void)m;
    const __m512 sum = _mm512_fmadd_ps(signed_floats(b + 18), _mm512_loadu_ps(x + 16),
                                       _mm512_mul_ps(signed_floats(b + 2), _mm512_loadu_ps(x)));
    acc->a = _mm512_fmadd_ps(d, sum, acc->a);
}

/* d (and m, the f16 after it) of n <= 16 blocks. */
static inline void take_scales(const uint8_t *b, int n, int block_bytes, bool has_min, float *d,
                               float *m)
{
    if (n <= 2) { /* a gather costs more */
        for (int j = 0; j < n; j++) {
            d[j] = f16_at(b + j * block_bytes);
            if (has_min) m[j] = f16_at(b + j * block_bytes + 2);
        }
        return;
    }
    const __m512i at =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(block_bytes));
    const __m512i dm =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(n), at, b, 1);
    _mm512_store_ps(d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dm)));
    if (has_min)
        _mm512_store_ps(m, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(dm, 16))));
}

static inline __attribute__((always_inline)) float dot_small(const uint8_t *b, int64_t n_blocks,
                                                             const float *x, small_fn *small,
                                                             int block_bytes, bool has_min)
{
    _Alignas(64) float d[16], m[16] = {0};
    const __m512 zero = _mm512_setzero_ps();
    struct pair even = {zero, zero}, odd = {zero, zero};
    while (n_blocks > 0) {
        const int n = n_blocks < 16 ? (int)n_blocks : 16;
        take_scales(b, n, block_bytes, has_min, d, m);
        settle(d);
        settle(m);
        for (int j = 0; j + 2 <= n; j += 2, b += 2 * block_bytes, x += 2 * DCP__Q_SMALL) {
            prefetch(b);
            small(b, _mm512_set1_ps(d[j]), _mm512_set1_ps(m[j]), x, &even);
            small(b + block_bytes, _mm512_set1_ps(d[j + 1]), _mm512_set1_ps(m[j + 1]),
                  x + DCP__Q_SMALL, &odd);
        }
        if (n % 2 == 1) small(b, _mm512_set1_ps(d[n - 1]), _mm512_set1_ps(m[n - 1]), x, &even);
        n_blocks -= n;
    }
    return sum_lanes(even, odd);
}

static inline __attribute__((always_inline)) void qdot_small(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k,
                                                             const float *x, float *y,
                                                             small_fn *small, int block_bytes,
                                                             bool has_min)
{
    for (int64_t i = 0; i < n_rows; i++)
        y[i] = dot_small((const uint8_t *)w + (size_t)i * row_bytes, k / DCP__Q_SMALL, x, small,
                         block_bytes, has_min);
}

/* --- blocks of 256 --------------------------------------------------------------------------- */

/* acc, more += block . x */
typedef void super_fn(const uint8_t *b, const float *x, struct pair *acc, struct pair *more);

/* Values of group g for quants 0..15. */
static inline __m512 group_table(const float sm[16], int g)
{
    return _mm512_fmsub_ps(_mm512_set1_ps(sm[g]), count_from(0.0f), _mm512_set1_ps(sm[8 + g]));
}

static inline void super_q4_k(const uint8_t *b, const float *x, struct pair *acc, struct pair *more)
{
    _Alignas(64) float sm[16];
    k_scales_f32(b, sm);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++, x += 64) {
        const __m512 low = group_table(sm, 2 * c), high = group_table(sm, 2 * c + 1);
        const struct pair v = by_table(widen_u8(b + 16 + 32 * c), low, high);
        const struct pair u = by_table(widen_u8(b + 32 + 32 * c), low, high);
        acc->a = _mm512_fmadd_ps(v.a, _mm512_loadu_ps(x), acc->a);
        acc->b = _mm512_fmadd_ps(v.b, _mm512_loadu_ps(x + 32), acc->b);
        more->a = _mm512_fmadd_ps(u.a, _mm512_loadu_ps(x + 16), more->a);
        more->b = _mm512_fmadd_ps(u.b, _mm512_loadu_ps(x + 48), more->b);
    }
}

static inline void super_q5_k(const uint8_t *b, const float *x, struct pair *acc, struct pair *more)
{
    _Alignas(64) float sm[16];
    k_scales_f32(b, sm);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++, x += 64) {
        const uint32_t f0 = bit_of_bytes(b + 16, 2 * c), f1 = bit_of_bytes(b + 16, 2 * c + 1);
        const __m512 low = group_table(sm, 2 * c), high = group_table(sm, 2 * c + 1);
        const __m512 up0 = _mm512_set1_ps(16.0f * sm[2 * c]);
        const __m512 up1 = _mm512_set1_ps(16.0f * sm[2 * c + 1]);
        const struct pair v = by_table(widen_u8(b + 48 + 32 * c), low, high);
        const struct pair u = by_table(widen_u8(b + 64 + 32 * c), low, high);
        acc->a = _mm512_fmadd_ps(add_where(v.a, f0 & 0xffffu, up0), _mm512_loadu_ps(x), acc->a);
        acc->b =
            _mm512_fmadd_ps(add_where(v.b, f1 & 0xffffu, up1), _mm512_loadu_ps(x + 32), acc->b);
        more->a = _mm512_fmadd_ps(add_where(u.a, f0 >> 16, up0), _mm512_loadu_ps(x + 16), more->a);
        more->b = _mm512_fmadd_ps(add_where(u.b, f1 >> 16, up1), _mm512_loadu_ps(x + 48), more->b);
    }
}

static inline void super_q6_k(const uint8_t *b, const float *x, struct pair *acc, struct pair *more)
{
    _Alignas(64) float scales[16];
    _Alignas(64) uint8_t quants[256];
    _mm512_store_ps(scales, q6_k_scales(b));
    settle(scales);
    q6_k_quants(b, quants);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4, x += 64) {
        __m512 v[4];
        for (int j = 0; j < 4; j++)
            v[j] = _mm512_mul_ps(signed_floats(quants + 16 * (i + j)), _mm512_loadu_ps(x + 16 * j));
        acc->a = _mm512_fmadd_ps(_mm512_set1_ps(scales[i]), v[0], acc->a);
        acc->b = _mm512_fmadd_ps(_mm512_set1_ps(scales[i + 1]), v[1], acc->b);
        more->a = _mm512_fmadd_ps(_mm512_set1_ps(scales[i + 2]), v[2], more->a);
        more->b = _mm512_fmadd_ps(_mm512_set1_ps(scales[i + 3]), v[3], more->b);
    }
}

static inline __attribute__((always_inline)) void qdot_super(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k,
                                                             const float *x, float *y,
                                                             super_fn *super, int block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        struct pair acc = {_mm512_setzero_ps(), _mm512_setzero_ps()}, more = acc;
        for (int64_t e = 0; e < k; e += DCP__Q_SUPER, b += block_bytes) {
            for (int at = 0; at < block_bytes; at += 64) prefetch(b + at);
            super(b, x + e, &acc, &more);
        }
        y[i] = sum_lanes(acc, more);
    }
}

/* --- single elements ------------------------------------------------------------------------- */

typedef __m512 load_fn(const uint8_t *p, __mmask16 lanes);

static inline __attribute__((always_inline)) void qdot_plain(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k,
                                                             const float *x, float *y,
                                                             load_fn *load, size_t elem_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        __m512 acc[4];
        for (int j = 0; j < 4; j++) acc[j] = _mm512_setzero_ps();
        int64_t e = 0;
        for (; e + 64 <= k; e += 64, b += 64 * elem_bytes) {
            for (size_t at = 0; at < 64 * elem_bytes; at += 64) prefetch(b + at);
            for (int j = 0; j < 4; j++)
                acc[j] = _mm512_fmadd_ps(load(b + (size_t)(16 * j) * elem_bytes, 0xffff),
                                         _mm512_loadu_ps(x + e + 16 * j), acc[j]);
        }
        for (; e < k; e += 16, b += 16 * elem_bytes) {
            const __mmask16 lanes = first_lanes(k - e);
            acc[0] = _mm512_fmadd_ps(load(b, lanes), _mm512_maskz_loadu_ps(lanes, x + e), acc[0]);
        }
        y[i] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])));
    }
}

#define DEFINE(name, driver, ...)                                                                  \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, const float *x,          \
              float *y)                                                                            \
    {                                                                                              \
        driver(w, row_bytes, n_rows, k, x, y, __VA_ARGS__);                                        \
    }
DEFINE(dcp__qdot_f32__avx512, qdot_plain, load_f32, 4)
DEFINE(dcp__qdot_f16__avx512, qdot_plain, load_f16, 2)
DEFINE(dcp__qdot_bf16__avx512, qdot_plain, load_bf16, 2)
DEFINE(dcp__qdot_q4_0__avx512, qdot_small, small_q4_0, 18, false)
DEFINE(dcp__qdot_q4_1__avx512, qdot_small, small_q4_1, 20, true)
DEFINE(dcp__qdot_q5_0__avx512, qdot_small, small_q5_0, 22, false)
DEFINE(dcp__qdot_q5_1__avx512, qdot_small, small_q5_1, 24, true)
DEFINE(dcp__qdot_q8_0__avx512, qdot_small, small_q8_0, 34, false)
DEFINE(dcp__qdot_q4_k__avx512, qdot_super, super_q4_k, 144)
DEFINE(dcp__qdot_q5_k__avx512, qdot_super, super_q5_k, 176)
DEFINE(dcp__qdot_q6_k__avx512, qdot_super, super_q6_k, 210)
