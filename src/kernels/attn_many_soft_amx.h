/* SPDX-License-Identifier: Apache-2.0 */
/* What a pass of the many-row AMX kernel holds, the softmax of an item, and values as tiles. Part
 * of attn_many_amx.c, which says what all this is. */
#ifndef DCP_KERNELS_ATTN_MANY_SOFT_AMX_H
#define DCP_KERNELS_ATTN_MANY_SOFT_AMX_H

#include "kernels/attn_ahead_amx.h"
#include "kernels/attn_tiles_amx.h"

enum {
    SUB_KEYS = 32, /* of an item */
    N_SUBS = 8,
    KEYS = SUB_KEYS * N_SUBS, /* of a block */
    N_GROUPS = KEYS / AMX_GROUP,
    KEY_STEPS = KEYS / AMX_STEP,
    SUB_PAIRS = SUB_KEYS / 2,
    SUB_BYTES = SUB_PAIRS * TILE_ROW_BYTES, /* of P^T */
    P_BYTES = N_SUBS * SUB_BYTES,           /* of a row tile */
    LATE_TILES = 16,                        /* so many at most: late */
    PACK_STEPS = KEY_STEPS / 2,             /* of V's, under each of two pairs */
    FIRST_PERCENT = 25,                     /* of a block's lines, at least, under q */
    FETCH_BYTES = 2048,                     /* ahead of rows that are read one after the other */
    ROWS_LEAST = 96,
    ROWS_MOST = 1024,
    O_BYTES = 512 << 10 /* of O^T, which stays in L2 */
};
static const float sum_most = 0x1p40f;

/* 16 rows. */
struct row_tile {
    int64_t lo, hi;         /* hull of what they see */
    int64_t all_lo, all_hi; /* what all of them see */
    bool has_o;             /* else nothing is in O yet, not even zeros: late */
};

struct many {
    struct amx_job a;
    int64_t row0, n_rows, n_tiles; /* of the pass */
    int64_t dim_tiles;             /* 16 dims each, even */
    struct row_tile *tiles;        /* [n_tiles] */
    int64_t *row_lo, *row_hi;      /* [n_tiles][16] */
    char *q;                       /* [n_tiles][k_steps][n_parts] tiles */
    int64_t n_parts;               /* of q: 1 where bf16 holds it, else 2 */
    float *s[2];                   /* [2 row tiles][SUB_KEYS][16] */
    bool is_late;                  /* values wait for the last pair's weights */
    char *p;                       /* [2 or all row tiles of 2][KEYS / 2][16][2] */
    char *vt;                      /* V^T [dim_tiles][KEY_STEPS] tiles; late V [2][KEY_STEPS] */
    float *o;                      /* [n_tiles][dim_tiles] tiles */
    float *max, *sum, *sum_low, *weight_sum; /* [n_tiles][16] */
    char *k_stage, *v_stage;
    char *kp; /* not late: K's tiles, [N_GROUPS][k_steps] */
    struct amx_keys k[N_GROUPS];
    int64_t k_step; /* bytes from a tile of K to that of the next dims */
    /* V^T's tiles in the making: parts, which are halves of 32 keys x 32 dims,
     * [KEY_STEPS][v_steps][2] */
    int64_t begin, part, n_parts_v, parts_a_step;
    struct amx_keys v[N_GROUPS]; /* of the two groups in the making; late: of the block */
    struct ahead ahead;
    int64_t first_units; /* for each 16 rows x 32 dims of q that are packed */
};

/* A row tile or two and SUB_KEYS keys: scores in s, weights to p. */
struct item {
    int64_t tile;
    int n_tiles, sub;
    const float *s;
    char *p; /* of the block: [n_tiles][P_BYTES] */
    bool is_masked;
    int32_t *limits; /* masked: [2 row tiles][first, end][16], keys from the item's first */
};

/* ---- softmax of an item, a pair of keys at a time ---- */

struct soft {
    const float *s;
    char *p;
    __m512 max, scale2, cap, sum, weight_sum;
    __m512i lo, hi;
    int pair;
};

/* Key key's scores, capped and masked. */
AMX_INLINE __m512 soft_scores(const struct soft *x, int key, bool is_masked, bool is_capped)
{
    __m512 s = _mm512_load_ps(x->s + key * VF_LANES);
    if (is_capped) s = vf_tanh(_mm512_mul_ps(s, x->cap));
    if (is_masked) {
        const __m512i at = _mm512_set1_epi32(key);
        const __mmask16 keep =
            _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(x->lo, at), at, x->hi);
        s = _mm512_mask_blend_ps(keep, _mm512_set1_ps(-VF_INF), s);
    }
    return s;
}
/* weight_up times 2^z: 7 operations. Degree 4, least maximum relative error, 2.6e-6; 1.4e-8 of it
 * is the same everywhere. 0 far below; NaN stays.
 *
 * A weight becomes bf16 by having its low half cut off, which makes it smaller by half a step of
 * bf16 on average; so all are made larger by that much, 2^-8 ln 2, before. What they are divided by
 * is summed after the cut, and lse takes the factor back. Beside rounding to nearest errors spread
 * 5% wider (rms 0.00175 of a weight for 0.00166) and two operations less are needed for each. */
static const float weight_up = 0x1.00b172p+0f;
AMX_INLINE __m512 soft_exp2(__m512 z)
{
    const __m512 f = _mm512_reduce_ps(z, 0x09); /* z - floor(z) */
    __m512 p = _mm512_set1_ps(0x1.bcb03cp-7f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ab3b46p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.efd048p-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.63c756p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.00b19ep+0f));
    return _mm512_scalef_ps(p, z);
}
/* The high halves of two keys' weights, of each row side by side. */
AMX_INLINE __m512i soft_cut(__m512 p0, __m512 p1)
{
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(p0), 16);
    /* low or (p1 and mask) */
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(p1),
                                     _mm512_set1_epi32((int)0xffff0000u), 0xf8);
}
/* Two keys' scores to weights, which are added to the sums. */
AMX_INLINE __m512i soft_weigh(__m512 s0, __m512 s1, __m512 scale2, __m512 max, __m512 *sum,
                              __m512 *weight_sum)
{
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    const __m512 p0 = soft_exp2(_mm512_fmsub_ps(s0, scale2, max));
    const __m512 p1 = soft_exp2(_mm512_fmsub_ps(s1, scale2, max));
    const __m512i pairs = soft_cut(p0, p1);
    *sum = _mm512_add_ps(*sum, _mm512_add_ps(p0, p1));
    *weight_sum = _mm512_dpbf16_ps(*weight_sum, (__m512bh)pairs, (__m512bh)ones);
    return pairs;
}
AMX_INLINE void soft_pair(struct soft *x, bool is_masked, bool is_capped)
{
    const int key = 2 * x->pair;
    const __m512 s0 = soft_scores(x, key, is_masked, is_capped);
    const __m512 s1 = soft_scores(x, key + 1, is_masked, is_capped);
    const __m512i pairs = soft_weigh(s0, s1, x->scale2, x->max, &x->sum, &x->weight_sum);
    _mm512_store_si512(x->p + x->pair * TILE_ROW_BYTES, pairs);
    x->pair++;
}

/* Of the item's tile i. */
AMX_INLINE struct soft soft_begin(const struct many *m, const struct item *it, int i)
{
    return (struct soft){
        .s = it->s + i * SUB_KEYS * VF_LANES,
        .p = it->p + i * P_BYTES + it->sub * SUB_BYTES,
        .max = _mm512_load_ps(m->max + (it->tile + i) * VF_LANES),
        .scale2 = _mm512_set1_ps(m->a.scale2),
        .cap = _mm512_set1_ps(m->a.cap_scale),
        .sum = _mm512_setzero_ps(),
        .weight_sum = _mm512_setzero_ps(),
        .lo = _mm512_load_si512(it->limits + 32 * i),
        .hi = _mm512_load_si512(it->limits + 32 * i + 16),
    };
}

/* All that was summed for the rows of the item's tile i, and the block's weights before it, times
 * factor, powers of two. */
static void rescale(struct many *m, const struct item *it, int tile_of_it, __m512 factor)
{
    const int64_t tile = it->tile + tile_of_it;
    const int64_t o_rows = m->tiles[tile].has_o ? m->dim_tiles * 16 : 0;
    _Alignas(64) float factors[VF_LANES];
    _mm512_store_ps(factors, factor);
    float *const o = m->o + tile * m->dim_tiles * 256;
    for (int64_t i = 0; i < o_rows; i++) {
        const __m512 by = m->is_late ? _mm512_set1_ps(factors[i % 16]) : factor;
        _mm512_store_ps(o + i * 16, _mm512_mul_ps(_mm512_load_ps(o + i * 16), by));
    }
    for (int i = 0; i < it->sub * SUB_PAIRS; i++) {
        char *const at = it->p + tile_of_it * P_BYTES + i * TILE_ROW_BYTES;
        const __m512 by = m->is_late ? _mm512_set1_ps(factors[i % 16]) : factor;
        const __m512i pairs = _mm512_load_si512(at);
        const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
        const __m512 p0 = amx_words_f32(pairs);
        const __m512 p1 = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
        const __m512i q0 = _mm512_castps_si512(_mm512_mul_ps(p0, by));
        const __m512i q1 = _mm512_castps_si512(_mm512_mul_ps(p1, by));
        _mm512_store_si512(at,
                           _mm512_or_si512(_mm512_srli_epi32(q0, 16), _mm512_and_si512(q1, high)));
    }
    float *const sums[3] = {m->sum, m->sum_low, m->weight_sum};
    for (int i = 0; i < 3; i++) {
        float *const at = sums[i] + tile * VF_LANES;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
    }
}

/* The reference of rows whose weights have grown too large moves to their largest score of the
 * item; then the item's weights anew, and their sums, to sums[2][16]. */
static __attribute__((noinline)) void move_reference(struct many *m, const struct item *it, int i,
                                                     __mmask16 rows, float *sums)
{
    const bool is_capped = m->a.cap_scale != 0.0f;
    struct soft x = soft_begin(m, it, i);
    __m512 top = _mm512_set1_ps(-VF_INF);
    for (int key = 0; key < SUB_KEYS; key++) {
        const __m512 s = soft_scores(&x, key, it->is_masked, is_capped);
        top = _mm512_max_ps(top, s);
    }
    top = _mm512_roundscale_ps(_mm512_mul_ps(top, x.scale2), 0x0a); /* up */
    const __m512 new_max = _mm512_mask_blend_ps(rows, x.max, top);
    float *const max_at = m->max + (it->tile + i) * VF_LANES;
    const __m512 summed = _mm512_load_ps(m->sum + (it->tile + i) * VF_LANES);
    /* At a row's first keys there is nothing yet. */
    if (_mm512_cmp_ps_mask(summed, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0)
        rescale(m, it, i,
                _mm512_mask_scalef_ps(_mm512_set1_ps(1.0f), rows, _mm512_set1_ps(1.0f),
                                      _mm512_sub_ps(x.max, new_max)));
    _mm512_store_ps(max_at, new_max);
    x = soft_begin(m, it, i);
    for (int pair = 0; pair < SUB_PAIRS; pair++) soft_pair(&x, it->is_masked, is_capped);
    _mm512_store_ps(sums, x.sum);
    _mm512_store_ps(sums + VF_LANES, x.weight_sum);
}

/* P^T of an item's tile to P: an A tile. */
AMX_INLINE void turn_weights(char *p)
{
    vf x[VF_LANES];
    VF_UNROLL for (int i = 0; i < 16; i++) x[i] = _mm512_load_ps(p + i * TILE_ROW_BYTES);
    vf_transpose(x);
    VF_UNROLL for (int i = 0; i < 16; i++) _mm512_store_ps(p + i * TILE_ROW_BYTES, x[i]);
}

/* x by its sums alone: what nobody takes the address of stays in registers. */
AMX_INLINE void soft_end(struct many *m, const struct item *it, int i, __m512 sum,
                         __m512 weight_sum)
{
    const __mmask16 rows =
        _mm512_cmp_ps_mask(sum, _mm512_set1_ps(sum_most), _CMP_GT_OQ); /* NaN stays NaN */
    if (__builtin_expect(rows != 0, 0)) {
        _Alignas(64) float sums[2 * VF_LANES];
        move_reference(m, it, i, rows, sums);
        sum = _mm512_load_ps(sums);
        weight_sum = _mm512_load_ps(sums + VF_LANES);
    }
    if (m->is_late) turn_weights(it->p + i * P_BYTES + it->sub * SUB_BYTES);
    float *const sum_at = m->sum + (it->tile + i) * VF_LANES;
    float *const low_at = m->sum_low + (it->tile + i) * VF_LANES;
    float *const weights_at = m->weight_sum + (it->tile + i) * VF_LANES;
    /* The rounding error of the running sum is kept. */
    const __m512 old = _mm512_load_ps(sum_at);
    const __m512 all = _mm512_add_ps(old, sum);
    const __m512 old_part = _mm512_sub_ps(all, sum);
    const __m512 lost = _mm512_add_ps(_mm512_sub_ps(old, old_part),
                                      _mm512_sub_ps(sum, _mm512_sub_ps(all, old_part)));
    _mm512_store_ps(sum_at, all);
    _mm512_store_ps(low_at, _mm512_add_ps(_mm512_load_ps(low_at), lost));
    _mm512_store_ps(weights_at, _mm512_add_ps(_mm512_load_ps(weights_at), weight_sum));
}

/* ---- values as tiles, for all rows of the pass ---- */

/* Half of 32 keys x 32 dims of V to two tiles of V^T: dims 0-3 of every 8, or 4-7. rows: of the two
 * groups of keys. */
static void transpose_half(const struct amx_keys *rows, int64_t offset, int half, char *vt)
{
    vf x[VF_LANES];
    VF_UNROLL for (int i = 0; i < 16; i++)
    {
        const struct amx_keys r = rows[i / 8];
        const char *const at = r.at + 2 * (i % 8) * r.stride + offset;
        const __m512i a = _mm512_loadu_si512(at);
        const __m512i b = _mm512_loadu_si512(at + r.stride);
        /* Word i is keys 2i and 2i + 1. */
        x[i] = _mm512_castsi512_ps(half == 0 ? _mm512_unpacklo_epi16(a, b)
                                             : _mm512_unpackhi_epi16(a, b));
    }
    vf_transpose(x);
    VF_UNROLL for (int i = 0; i < 16; i++)
    {
        const int dim = i / 4 * 8 + i % 4;
        char *const at = vt + dim / 16 * KEY_STEPS * TILE_BYTES + dim % 16 * TILE_ROW_BYTES;
        vf_store((float *)(void *)(at + half * 4 * TILE_ROW_BYTES), x[i]);
    }
}

static void find_values(struct many *m, int64_t step)
{
    const int64_t v_bytes = AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES;
    for (int i = 0; i < 2; i++)
        m->v[i] = amx_find_keys(&m->a, m->begin + step * AMX_STEP + i * AMX_GROUP, true, false,
                                m->v_stage + i * v_bytes);
}

/* The next n parts, if so many are left. */
static __attribute__((noinline)) void make_values(struct many *m, int64_t n)
{
    for (; n > 0 && m->part < m->n_parts_v; n--, m->part++) {
        const int64_t step = m->part / (2 * m->a.v_steps);
        const int64_t d = m->part / 2 % m->a.v_steps;
        if (m->part % (2 * m->a.v_steps) == 0) find_values(m, step);
        transpose_half(m->v, d * TILE_ROW_BYTES, (int)(m->part % 2),
                       m->vt + (2 * d * KEY_STEPS + step) * TILE_BYTES);
    }
}

#endif
