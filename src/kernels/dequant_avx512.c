/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of blocks to f32, AVX-512: the products of quant_priv.h, rounded one by one. */
#include "kernels/kernels_priv.h"
#include "kernels/quant_avx512.h"

static inline void store_pair(float *v, struct pair p)
{
    _mm512_storeu_ps(v, p.a);
    _mm512_storeu_ps(v + 16, p.b);
}

static inline void block_q4_0(const uint8_t *b, float *v)
{
    const __m512 table = _mm512_mul_ps(_mm512_set1_ps(f16_at(b)), count_from(-8.0f));
    store_pair(v, by_table(widen_u8(b + 2), table, table));
}

/* d q + m for q = base .. base + 15 */
static inline __m512 with_min(const uint8_t *b, float base)
{
    return _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(f16_at(b)), count_from(base)),
                         _mm512_set1_ps(f16_at(b + 2)));
}

static inline void block_q4_1(const uint8_t *b, float *v)
{
    const __m512 table = with_min(b, 0.0f);
    store_pair(v, by_table(widen_u8(b + 4), table, table));
}

/* Five bits: two tables, chosen by the fifth. */
static inline void store_five(float *v, uint32_t qh, const uint8_t *qs, __m512 t0, __m512 t1)
{
    const struct pair p0 = by_table(widen_u8(qs), t0, t0), p1 = by_table(widen_u8(qs), t1, t1);
    _mm512_storeu_ps(v, _mm512_mask_blend_ps(_cvtu32_mask16(qh & 0xffffu), p0.a, p1.a));
    _mm512_storeu_ps(v + 16, _mm512_mask_blend_ps(_cvtu32_mask16(qh >> 16), p0.b, p1.b));
}

static inline void block_q5_0(const uint8_t *b, float *v)
{
    const __m512 d = _mm512_set1_ps(f16_at(b));
    store_five(v, dcp__load_u32(b + 2), b + 6, _mm512_mul_ps(d, count_from(-16.0f)),
               _mm512_mul_ps(d, count_from(0.0f)));
}

static inline void block_q5_1(const uint8_t *b, float *v)
{
    store_five(v, dcp__load_u32(b + 4), b + 8, with_min(b, 0.0f), with_min(b, 16.0f));
}

static inline void block_q8_0(const uint8_t *b, float *v)
{
    const __m512 d = _mm512_set1_ps(f16_at(b));
    _mm512_storeu_ps(v, _mm512_mul_ps(d, signed_floats(b + 2)));
    _mm512_storeu_ps(v + 16, _mm512_mul_ps(d, signed_floats(b + 18)));
}

/* Values of group g of a K block for quants base .. base + 15. */
static inline __m512 group_table(const float sm[16], int g, float base)
{
    return _mm512_sub_ps(_mm512_mul_ps(_mm512_set1_ps(sm[g]), count_from(base)),
                         _mm512_set1_ps(sm[8 + g]));
}

static inline void block_q4_k(const uint8_t *b, float *v)
{
    _Alignas(64) float sm[16];
    k_scales_f32(b, sm);
    for (int c = 0; c < 4; c++) {
        const __m512 low = group_table(sm, 2 * c, 0.0f), high = group_table(sm, 2 * c + 1, 0.0f);
        for (int j = 0; j < 2; j++) {
            const struct pair p = by_table(widen_u8(b + 16 + 32 * c + 16 * j), low, high);
            _mm512_storeu_ps(v + 64 * c + 16 * j, p.a);
            _mm512_storeu_ps(v + 64 * c + 32 + 16 * j, p.b);
        }
    }
}

static inline void block_q5_k(const uint8_t *b, float *v)
{
    _Alignas(64) float sm[16];
    k_scales_f32(b, sm);
    for (int g = 0; g < 8; g++) {
        const uint32_t fifth = bit_of_bytes(b + 16, g);
        const __m512 t0 = group_table(sm, g, 0.0f), t1 = group_table(sm, g, 16.0f);
        for (int j = 0; j < 2; j++) {
            __m512i bytes = widen_u8(b + 48 + 32 * (g / 2) + 16 * j);
            if (g % 2 == 1) bytes = _mm512_srli_epi32(bytes, 4);
            const __m512 low = _mm512_permutexvar_ps(bytes, t0);
            _mm512_storeu_ps(v + 32 * g + 16 * j,
                             _mm512_mask_permutexvar_ps(
                                 low, _cvtu32_mask16((fifth >> (16 * j)) & 0xffffu), bytes, t1));
        }
    }
}

static inline void block_q6_k(const uint8_t *b, float *v)
{
    float scales[16];
    uint8_t quants[256];
    _mm512_storeu_ps(scales, q6_k_scales(b));
    q6_k_quants(b, quants);
    for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(v + 16 * i,
                         _mm512_mul_ps(_mm512_set1_ps(scales[i]), signed_floats(quants + 16 * i)));
}

typedef void block_fn(const uint8_t *block, float *values);
typedef __m512 load_fn(const uint8_t *p, __mmask16 lanes);

/* Inlined into each caller with block known. */
static inline __attribute__((always_inline)) void dequant_blocks(
    const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst, int64_t dst_stride,
    block_fn *block, int64_t block_elems, size_t block_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += block_elems, b += block_bytes) block(b, v + e);
    }
}

static inline __attribute__((always_inline)) void widen_rows(const void *w, size_t row_bytes,
                                                             int64_t n_rows, int64_t k, float *dst,
                                                             int64_t dst_stride, load_fn *load,
                                                             size_t elem_bytes)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint8_t *b = (const uint8_t *)w + (size_t)i * row_bytes;
        float *v = dst + i * dst_stride;
        for (int64_t e = 0; e < k; e += 16) {
            const __mmask16 lanes = first_lanes(k - e);
            _mm512_mask_storeu_ps(v + e, lanes, load(b + (size_t)e * elem_bytes, lanes));
        }
    }
}

#define DEFINE(name, driver, ...)                                                                  \
    void name(const void *w, size_t row_bytes, int64_t n_rows, int64_t k, float *dst,              \
              int64_t dst_stride)                                                                  \
    {                                                                                              \
        driver(w, row_bytes, n_rows, k, dst, dst_stride, __VA_ARGS__);                             \
    }
DEFINE(dcp__dequant_f32__avx512, widen_rows, load_f32, 4)
DEFINE(dcp__dequant_f16__avx512, widen_rows, load_f16, 2)
DEFINE(dcp__dequant_bf16__avx512, widen_rows, load_bf16, 2)
DEFINE(dcp__dequant_q4_0__avx512, dequant_blocks, block_q4_0, 32, 18)
DEFINE(dcp__dequant_q4_1__avx512, dequant_blocks, block_q4_1, 32, 20)
DEFINE(dcp__dequant_q5_0__avx512, dequant_blocks, block_q5_0, 32, 22)
DEFINE(dcp__dequant_q5_1__avx512, dequant_blocks, block_q5_1, 32, 24)
DEFINE(dcp__dequant_q8_0__avx512, dequant_blocks, block_q8_0, 32, 34)
DEFINE(dcp__dequant_q4_k__avx512, dequant_blocks, block_q4_k, 256, 144)
DEFINE(dcp__dequant_q5_k__avx512, dequant_blocks, block_q5_k, 256, 176)
DEFINE(dcp__dequant_q6_k__avx512, dequant_blocks, block_q6_k, 256, 210)

/* Integer rounding, as dcp__f32_to_bf16: add half of the last place (less one if that is even);
 * a NaN keeps its top bits and turns quiet. */
void dcp__to_bf16__avx512(const float *x, int64_t n, uint16_t *dst)
{
    for (int64_t e = 0; e < n; e += 16) {
        const __mmask16 lanes = first_lanes(n - e);
        const __m512i u = _mm512_maskz_loadu_epi32(lanes, x + e);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i rounded =
            _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
        const __mmask16 is_nan = _mm512_cmpgt_epu32_mask(
            _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x7f800000));
        const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x00400000));
        const __m512i bits = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
        _mm256_mask_storeu_epi16(dst + e, lanes,
                                 _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
}
