/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention on AMX tiles, many rows (extend; absorbed MLA with many heads).
 *
 * Idea. Rows lie across the lanes from beginning to end, so that nothing is ever transposed but V:
 *
 *     S^T [64 keys][16 rows]   = K (natural rows) * Q^T (packed once, two bf16 parts)
 *     P^T [key pair][16 rows]  = two rows of S^T, weighted, rounded to bf16 and interleaved: a B tile
 *     O^T [16 dims][16 rows]  += V^T (transposed once a block for all rows) * P^T
 *
 * A block is 256 keys. Its row tiles go in pairs; an item is a row tile and 64 of the keys:
 *
 *     tiles    | QK item 0 | QK item 1 | ... | QK item 8   | PV pair 0 | QK item 9 | ...
 *     vectors  |           | soft 0    | ... | soft 7      |           | soft 8    | ...
 *
 * with the softmax of an item spread between the tile products of the next. The maximum: none is
 * computed. A row's reference is an integer and stays as long as the weights of an item sum to less
 * than 2^40; else (and at a row's first keys) it is moved to the item's maximum, what was summed is
 * multiplied by a power of two, and the item's softmax is done again.
 *
 * Accuracy. Weights are rounded to bf16 (2^-8 of each), as are what they are divided by, so an error
 * is relative to how values spread, not to their size; lse is of the unrounded weights. q keeps 2^-17.
 *
 * Instructions for 16 keys and 16 rows, n32 = Dk / 32, m32 = Dv / 32:
 *     products   2 n32 + m32         12 at 128/128; 8 would be those of q in one part; MLA 52 and 34
 *     loads      1.5 n32 (K: t1; q)  + m32 (V^T: t1; P^T);   C: m32 / 4 loads, stores; S: 1 store
 *     vectors    16 x 10.5 (2^z 7, z, sum, sum of roundings 0.5, rounding 0.5, interleave 0.5)
 * Tiles are counted from the code (tests/kernels/test_attn_amx.c prints the counts): 192 cycles of
 * products at 128/128, of which QK's 128 have the softmax under them: 176 operations of which one a
 * cycle can issue while tiles run. The vector code, timed alone with the tile instructions left out
 * (Sapphire Rapids class, 2.8 GHz): 68 ns at 128/128, 256 tokens of 4 heads. V^T takes 5 shuffles per
 * 64 bytes, once for all rows, under the scores of the first pair. The speed of the whole has not
 * been measured on a CPU with AMX.
 *
 * Limits: passes of dcp__attn_amx_rows_most rows. Scratch per dcp__attn_amx_many_bytes. */
#include "kernels/attn_tiles_amx.h"

enum {
    SUB_KEYS = DCP__ATTN_KEY_BLOCK, /* of an item */
    N_SUBS = 4,
    KEYS = SUB_KEYS * N_SUBS, /* of a block */
    N_GROUPS = KEYS / AMX_GROUP,
    KEY_STEPS = KEYS / AMX_STEP,
    SUB_PAIRS = SUB_KEYS / 2,
    SUB_BYTES = SUB_PAIRS * TILE_ROW_BYTES, /* of P^T */
    P_BYTES = N_SUBS * SUB_BYTES,           /* of a row tile */
    ROWS_LEAST = 96,
    ROWS_MOST = 1024,
    O_BYTES = 512 << 10 /* of O^T, which stays in L2 */
};
static const float sum_most = 0x1p40f;

/* 16 rows. */
struct row_tile {
    int64_t lo, hi;         /* hull of what they see */
    int64_t all_lo, all_hi; /* what all of them see */
};

struct many {
    struct amx_job a;
    int64_t row0, n_rows, n_tiles;           /* of the pass */
    int64_t dim_tiles;                       /* 16 dims each, even */
    struct row_tile *tiles;                  /* [n_tiles] */
    int64_t *row_lo, *row_hi;                /* [n_tiles][16] */
    char *q;                                 /* [n_tiles][k_steps][2 parts] tiles */
    float *s[2];                             /* [SUB_KEYS][16] */
    char *p[2];                              /* [2 row tiles][KEYS / 2][16][2] */
    char *vt;                                /* [dim_tiles][KEY_STEPS] tiles */
    float *o;                                /* [n_tiles][dim_tiles] tiles */
    float *max, *sum, *sum_low, *weight_sum; /* [n_tiles][16] */
    char *k_stage, *v_stage;
    struct amx_keys k[N_GROUPS];
    /* V^T in the making: halves of 32 keys x 32 dims, [KEY_STEPS][v_steps][2] */
    int64_t begin, half, n_halves, halves_a_step;
    struct amx_keys v[2];
    /* the next block's rows, on their way to L2 */
    struct amx_keys next[2 * N_GROUPS];
    int64_t next_lines[2], next_key, next_line, lines_a_step;
};

/* A row tile and SUB_KEYS keys: scores in s, weights to p. */
struct item {
    int64_t tile;
    int sub;
    const float *s;
    char *p_tile; /* of the block */
    bool is_masked;
    __m512i lo, hi; /* visible keys of each row, relative to the item's first */
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
AMX_INLINE void soft_pair(struct soft *x, bool is_masked, bool is_capped)
{
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    const int key = 2 * x->pair;
    const __m512 s0 = soft_scores(x, key, is_masked, is_capped);
    const __m512 s1 = soft_scores(x, key + 1, is_masked, is_capped);
    const __m512 p0 = amx_exp2(_mm512_fmsub_ps(s0, x->scale2, x->max));
    const __m512 p1 = amx_exp2(_mm512_fmsub_ps(s1, x->scale2, x->max));
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(p1, p0);
    const __m512i pairs = _mm512_permutexvar_epi16(interleave, halves);
    x->sum = _mm512_add_ps(x->sum, _mm512_add_ps(p0, p1));
    x->weight_sum = _mm512_dpbf16_ps(x->weight_sum, (__m512bh)pairs, (__m512bh)ones);
    _mm512_store_si512(x->p + x->pair * TILE_ROW_BYTES, pairs);
    x->pair++;
}

AMX_INLINE struct soft soft_begin(const struct many *m, const struct item *it)
{
    return (struct soft){
        .s = it->s,
        .p = it->p_tile + it->sub * SUB_BYTES,
        .max = _mm512_load_ps(m->max + it->tile * VF_LANES),
        .scale2 = _mm512_set1_ps(m->a.scale2),
        .cap = _mm512_set1_ps(m->a.cap_scale),
        .sum = _mm512_setzero_ps(),
        .weight_sum = _mm512_setzero_ps(),
        .lo = it->lo,
        .hi = it->hi,
    };
}

/* All that was summed for the item's rows, and the block's weights before it, times factor, powers
 * of two. */
static void rescale(struct many *m, const struct item *it, __m512 factor)
{
    float *const o = m->o + it->tile * m->dim_tiles * 256;
    for (int64_t d = 0; d < m->dim_tiles * 16; d++)
        _mm512_store_ps(o + d * 16, _mm512_mul_ps(_mm512_load_ps(o + d * 16), factor));
    for (int i = 0; i < it->sub * SUB_PAIRS; i++) {
        char *const at = it->p_tile + i * TILE_ROW_BYTES;
        const __m512i pairs = _mm512_load_si512(at);
        const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
        const __m512 p0 = amx_words_f32(pairs);
        const __m512 p1 = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
        const __m512i q0 = _mm512_castps_si512(_mm512_mul_ps(p0, factor));
        const __m512i q1 = _mm512_castps_si512(_mm512_mul_ps(p1, factor));
        _mm512_store_si512(at,
                           _mm512_or_si512(_mm512_srli_epi32(q0, 16), _mm512_and_si512(q1, high)));
    }
    float *const sums[3] = {m->sum, m->sum_low, m->weight_sum};
    for (int i = 0; i < 3; i++) {
        float *const at = sums[i] + it->tile * VF_LANES;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
    }
}

/* The reference of rows whose weights have grown too large moves to their largest score of the item;
 * then the item's weights anew. */
static __attribute__((noinline)) void move_reference(struct many *m, const struct item *it,
                                                     struct soft *x, __mmask16 rows)
{
    const bool is_capped = m->a.cap_scale != 0.0f;
    __m512 top = _mm512_set1_ps(-VF_INF);
    for (int key = 0; key < SUB_KEYS; key++) {
        const __m512 s = soft_scores(x, key, it->is_masked, is_capped);
        top = _mm512_max_ps(top, s);
    }
    top = _mm512_roundscale_ps(_mm512_mul_ps(top, x->scale2), 0x0a); /* up */
    const __m512 new_max = _mm512_mask_blend_ps(rows, x->max, top);
    rescale(m, it,
            _mm512_mask_scalef_ps(_mm512_set1_ps(1.0f), rows, _mm512_set1_ps(1.0f),
                                  _mm512_sub_ps(x->max, new_max)));
    _mm512_store_ps(m->max + it->tile * VF_LANES, new_max);
    *x = soft_begin(m, it);
    for (int i = 0; i < SUB_PAIRS; i++) soft_pair(x, it->is_masked, is_capped);
}

static inline void soft_end(struct many *m, const struct item *it, struct soft *x)
{
    const __mmask16 rows =
        _mm512_cmp_ps_mask(x->sum, _mm512_set1_ps(sum_most), _CMP_GT_OQ); /* NaN stays NaN */
    if (rows != 0) move_reference(m, it, x, rows);
    float *const sum_at = m->sum + it->tile * VF_LANES;
    float *const low_at = m->sum_low + it->tile * VF_LANES;
    float *const weights_at = m->weight_sum + it->tile * VF_LANES;
    /* The rounding error of the running sum is kept. */
    const __m512 old = _mm512_load_ps(sum_at);
    const __m512 sum = _mm512_add_ps(old, x->sum);
    const __m512 old_part = _mm512_sub_ps(sum, x->sum);
    const __m512 lost = _mm512_add_ps(_mm512_sub_ps(old, old_part),
                                      _mm512_sub_ps(x->sum, _mm512_sub_ps(sum, old_part)));
    _mm512_store_ps(sum_at, sum);
    _mm512_store_ps(low_at, _mm512_add_ps(_mm512_load_ps(low_at), lost));
    _mm512_store_ps(weights_at, _mm512_add_ps(_mm512_load_ps(weights_at), x->weight_sum));
}

/* ---- V^T, for all rows of the pass ---- */

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

/* The next n halves, if so many are left. */
static __attribute__((noinline)) void transpose_some(struct many *m, int64_t n)
{
    for (; n > 0 && m->half < m->n_halves; n--, m->half++) {
        const int64_t step = m->half / (2 * m->a.v_steps);
        const int64_t d = m->half / 2 % m->a.v_steps;
        if (m->half % (2 * m->a.v_steps) == 0) {
            const int64_t v_bytes = AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES;
            for (int i = 0; i < 2; i++)
                m->v[i] = amx_find_keys(&m->a, m->begin + step * AMX_STEP + i * AMX_GROUP, true,
                                        false, m->v_stage + i * v_bytes);
        }
        transpose_half(m->v, d * TILE_ROW_BYTES, (int)(m->half % 2),
                       m->vt + (2 * d * KEY_STEPS + step) * TILE_BYTES);
    }
}

/* ---- scores of an item, with the softmax of another in between ---- */

/* Lines of the next block that this step's share is. */
AMX_INLINE void prefetch_next(struct many *m)
{
    for (int64_t i = 0; i < m->lines_a_step && m->next_key < 2 * KEYS; i++) {
        const struct amx_keys keys = m->next[m->next_key / AMX_GROUP];
        if (keys.at != NULL)
            _mm_prefetch(keys.at + m->next_key % AMX_GROUP * keys.stride +
                             m->next_line * TILE_ROW_BYTES,
                         _MM_HINT_T1);
        if (++m->next_line < m->next_lines[m->next_key / KEYS]) continue;
        m->next_line = 0;
        m->next_key++;
    }
}

/* Scores of now to s; softmax of before, if there is one. A slot is two products. */
AMX_INLINE void scores_over_soft(struct many *m, const struct item *now, float *s,
                                 const struct item *before, bool is_masked, bool is_capped,
                                 bool is_first)
{
    const struct amx_keys *const k = m->k + now->sub * (SUB_KEYS / AMX_GROUP);
    const char *q = m->q + now->tile * m->a.k_steps * 2 * TILE_BYTES;
    /* Without one: the state of this item, which goes nowhere. */
    struct soft x = soft_begin(m, before != NULL ? before : now);
    if (before == NULL) x.pair = SUB_PAIRS;
    /* Pairs that are due after each slot, in 1/65536. */
    const int64_t slot_share = (SUB_PAIRS * 65536 + 4 * m->a.k_steps - 1) / (4 * m->a.k_steps);
    int64_t due = 0;
#define SLOT(c, a, i)                                                                              \
    do {                                                                                           \
        TILE_STREAM(a, k[i].at + d * TILE_ROW_BYTES, k[i].stride);                                 \
        TILE_DP(c, a, 6);                                                                          \
        TILE_DP(c, a, 7);                                                                          \
        for (due += slot_share; x.pair < SUB_PAIRS && x.pair < due >> 16;)                         \
            soft_pair(&x, is_masked, is_capped);                                                   \
    } while (0)
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t d = 0; d < m->a.k_steps; d++, q += 2 * TILE_BYTES) {
        TILE_LOAD(6, q, TILE_ROW_BYTES);
        TILE_LOAD(7, q + TILE_BYTES, TILE_ROW_BYTES);
        SLOT(0, 4, 0);
        SLOT(1, 5, 1);
        SLOT(2, 4, 2);
        SLOT(3, 5, 3);
        if (is_first) transpose_some(m, m->halves_a_step);
        prefetch_next(m);
    }
#undef SLOT
    TILE_STORE(0, s, TILE_ROW_BYTES);
    TILE_STORE(1, s + 256, TILE_ROW_BYTES);
    TILE_STORE(2, s + 512, TILE_ROW_BYTES);
    TILE_STORE(3, s + 768, TILE_ROW_BYTES);
    if (before == NULL) return;
    struct soft done = x; /* x itself stays in registers: nobody takes its address */
    soft_end(m, before, &done);
}
static void do_item(struct many *m, const struct item *now, float *s, const struct item *before)
{
    const bool is_first = m->half < m->n_halves;
    if (m->a.cap_scale != 0.0f)
        scores_over_soft(m, now, s, before, true, true, is_first);
    else if (before != NULL && before->is_masked)
        scores_over_soft(m, now, s, before, true, false, is_first);
    else if (is_first)
        scores_over_soft(m, now, s, before, false, false, true);
    else
        scores_over_soft(m, now, s, before, false, false, false);
}
/* The last item's softmax, with nothing above it. */
static void finish_item(struct many *m, const struct item *it)
{
    const bool is_capped = m->a.cap_scale != 0.0f;
    struct soft x = soft_begin(m, it);
    while (x.pair < SUB_PAIRS) soft_pair(&x, it->is_masked || is_capped, is_capped);
    soft_end(m, it, &x);
}

/* ---- values ---- */

/* O^T += V^T P^T of 32 dims and one row tile or two, key steps [begin, end): C 0-3. */
AMX_INLINE void values_block(const struct many *m, int64_t tile, int64_t d, const char *p,
                             int begin, int end, bool two)
{
    float *const o0 = m->o + (tile * m->dim_tiles + d) * 256;
    float *const o1 = o0 + m->dim_tiles * 256;
    const char *const vt = m->vt + d * KEY_STEPS * TILE_BYTES;
    TILE_LOAD(0, o0, TILE_ROW_BYTES);
    TILE_LOAD(1, o0 + 256, TILE_ROW_BYTES);
    if (two) {
        TILE_LOAD(2, o1, TILE_ROW_BYTES);
        TILE_LOAD(3, o1 + 256, TILE_ROW_BYTES);
    }
    for (int i = begin; i < end; i++) {
        TILE_LOAD(6, p + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_STREAM(4, vt + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(0, 4, 6);
        TILE_STREAM(5, vt + (KEY_STEPS + i) * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(1, 5, 6);
        if (two) {
            TILE_LOAD(7, p + P_BYTES + i * TILE_BYTES, TILE_ROW_BYTES);
            TILE_DP(2, 4, 7);
            TILE_DP(3, 5, 7);
        }
    }
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o0 + 256, TILE_ROW_BYTES);
    if (two) {
        TILE_STORE(2, o1, TILE_ROW_BYTES);
        TILE_STORE(3, o1 + 256, TILE_ROW_BYTES);
    }
}

/* A pair of row tiles whose weights of the block are, or soon will be, in p. */
struct pair {
    int64_t tile;
    const char *p;
    int sub_begin, sub_end;
};
static void add_values(struct many *m, const struct pair *pair)
{
    transpose_some(m, m->n_halves); /* what is left, where rows see little of the block */
    const int begin = pair->sub_begin * (SUB_KEYS / AMX_STEP);
    const int end = pair->sub_end * (SUB_KEYS / AMX_STEP);
    const bool two = pair->tile + 1 < m->n_tiles;
    for (int64_t d = 0; d < m->dim_tiles; d += 2) {
        if (two)
            values_block(m, pair->tile, d, pair->p, begin, end, true);
        else
            values_block(m, pair->tile, d, pair->p, begin, end, false);
    }
}

/* ---- blocks ---- */

static void find_block(struct many *m, int64_t begin)
{
    const int64_t k_bytes = AMX_GROUP * m->a.k_steps * TILE_ROW_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        m->k[i] =
            amx_find_keys(&m->a, begin + i * AMX_GROUP, false, true, m->k_stage + i * k_bytes);
        m->next[i] = amx_natural_keys(&m->a, begin + KEYS + i * AMX_GROUP, false);
        m->next[N_GROUPS + i] = amx_natural_keys(&m->a, begin + KEYS + i * AMX_GROUP, true);
    }
    m->begin = begin;
    m->half = 0;
    m->n_halves = KEY_STEPS * m->a.v_steps * 2;
    /* All of it under the scores of the first pair of row tiles. */
    m->halves_a_step = amx_div_up(m->n_halves, attn_min(2, m->n_tiles) * N_SUBS * m->a.k_steps);
    const bool is_latent = m->next[0].at == m->next[N_GROUPS].at;
    m->next_lines[0] = m->a.k_steps;
    m->next_lines[1] = is_latent ? 1 : m->a.v_steps;
    m->next_key = 0;
    m->next_line = 0;
    m->lines_a_step = amx_div_up(KEYS * (m->next_lines[0] + m->next_lines[1]),
                                 m->n_tiles * N_SUBS * m->a.k_steps);
}

static __m512i relative(const int64_t *at, int64_t begin)
{
    _Alignas(64) int32_t x[VF_LANES];
    for (int i = 0; i < VF_LANES; i++)
        x[i] = (int32_t)attn_max(attn_min(at[i] - begin, SUB_KEYS), 0);
    return _mm512_load_si512(x);
}

static struct item make_item(const struct many *m, int64_t begin, int64_t tile, int sub, char *p)
{
    const struct row_tile *const t = m->tiles + tile;
    struct item it = {.tile = tile, .sub = sub, .p_tile = p};
    begin += sub * SUB_KEYS;
    it.is_masked = begin < t->all_lo || begin + SUB_KEYS > t->all_hi;
    it.lo = _mm512_setzero_si512();
    it.hi = _mm512_set1_epi32(SUB_KEYS);
    if (it.is_masked) {
        it.lo = relative(m->row_lo + tile * VF_LANES, begin);
        it.hi = relative(m->row_hi + tile * VF_LANES, begin);
    }
    return it;
}

static void attend_block(struct many *m, int64_t begin)
{
    struct item items[2];
    struct pair pairs[2];
    int n_items = 0;     /* so far */
    int n_pairs = 0;     /* begun */
    bool is_due = false; /* the last pair's values are to be added once its last softmax is done */
    find_block(m, begin);
    for (int64_t tile = 0; tile < m->n_tiles; tile += 2) {
        struct pair pair = {tile, m->p[n_pairs % 2], N_SUBS, 0};
        char *const p = m->p[n_pairs % 2];
        const int64_t end = attn_min(tile + 2, m->n_tiles);
        for (int64_t t = tile; t < end; t++) {
            for (int sub = 0; sub < N_SUBS; sub++) {
                const int64_t at = begin + sub * SUB_KEYS;
                char *const p_tile = p + (t - tile) * P_BYTES;
                if (m->tiles[t].hi <= at || m->tiles[t].lo >= at + SUB_KEYS) {
                    memset(p_tile + sub * SUB_BYTES, 0, SUB_BYTES);
                    continue;
                }
                struct item *const now = &items[n_items % 2];
                float *const s = m->s[n_items % 2];
                *now = make_item(m, begin, t, sub, p_tile);
                now->s = s;
                do_item(m, now, s, n_items > 0 ? &items[(n_items + 1) % 2] : NULL);
                if (is_due) add_values(m, &pairs[(n_pairs + 1) % 2]);
                is_due = false;
                n_items++;
                if (sub < pair.sub_begin) pair.sub_begin = sub;
                if (sub + 1 > pair.sub_end) pair.sub_end = sub + 1;
            }
        }
        if (pair.sub_end == 0) continue;
        pairs[n_pairs % 2] = pair;
        n_pairs++;
        is_due = true;
    }
    if (n_items > 0) finish_item(m, &items[(n_items + 1) % 2]);
    if (is_due) add_values(m, &pairs[(n_pairs + 1) % 2]);
}

/* ---- a pass ---- */

/* q of a row tile as B tiles [16 dim pairs][16 rows][2], the two parts of every step together. */
static void pack_q(const struct many *m, int64_t tile)
{
    const int64_t dk = m->a.job->dk;
    const vf sign = vf_set1(m->a.sign);
    char *at = m->q + tile * m->a.k_steps * 2 * TILE_BYTES;
    for (int64_t d = 0; d < dk; d += AMX_STEP, at += 2 * TILE_BYTES) {
        vf part[2][VF_LANES];
        for (int i = 0; i < VF_LANES; i++) {
            const int64_t r = tile * VF_LANES + i;
            vf x[2] = {vf_set1(0.0f), vf_set1(0.0f)};
            for (int j = 0; j < 2 && r < m->n_rows; j++) {
                const int64_t left = dk - d - j * VF_LANES;
                const float *const q = amx_q_row(&m->a, m->row0 + r) + d + j * VF_LANES;
                if (left > 0) x[j] = left >= VF_LANES ? vf_load(q) : vf_load_n(q, left);
                x[j] = vf_mul(x[j], sign);
            }
            const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
            const __m256i halves[2] = {_mm512_castsi512_si256(high),
                                       _mm512_extracti64x4_epi64(high, 1)};
            for (int j = 0; j < 2; j++)
                x[j] = _mm512_sub_ps(x[j], amx_words_f32(_mm512_cvtepu16_epi32(halves[j])));
            part[0][i] = _mm512_castsi512_ps(high);
            part[1][i] = _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        }
        for (int j = 0; j < 2; j++) {
            vf_transpose(part[j]);
            for (int i = 0; i < VF_LANES; i++)
                _mm512_store_ps(at + j * TILE_BYTES + i * TILE_ROW_BYTES, part[j][i]);
        }
    }
}

static void begin_tile(struct many *m, int64_t tile)
{
    struct row_tile *const t = m->tiles + tile;
    *t = (struct row_tile){INT64_MAX, INT64_MIN, INT64_MIN, INT64_MAX};
    for (int64_t i = tile * VF_LANES; i < (tile + 1) * VF_LANES; i++) {
        /* What is no row sees what the last one sees, with a q of 0. */
        const int64_t r = m->row0 + attn_min(i, m->n_rows - 1);
        int64_t lo;
        int64_t hi;
        attn_row_range(m->a.job, r / m->a.job->n_group, &lo, &hi);
        if (lo >= hi) lo = hi = 0;
        m->row_lo[i] = lo;
        m->row_hi[i] = hi;
        t->all_lo = attn_max(t->all_lo, lo);
        t->all_hi = attn_min(t->all_hi, hi);
        if (lo < hi) {
            t->lo = attn_min(t->lo, lo);
            t->hi = attn_max(t->hi, hi);
        }
        m->max[i] = amx_no_max;
        m->sum[i] = 0.0f;
        m->sum_low[i] = 0.0f;
        m->weight_sum[i] = 0.0f;
    }
    pack_q(m, tile);
}

static bool end_tile(const struct many *m, int64_t tile)
{
    const __m512 weights = _mm512_load_ps(m->weight_sum + tile * VF_LANES);
    const __mmask16 is_empty = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __m512 divisor = _mm512_mask_blend_ps(is_empty, weights, _mm512_set1_ps(1.0f));
    const int n = (int)attn_min(VF_LANES, m->n_rows - tile * VF_LANES);
    const float *const o = m->o + tile * m->dim_tiles * 256;
    __mmask16 bad = 0;
    for (int64_t d = 0; d < m->a.job->dv; d += 16) {
        const int64_t left = m->a.job->dv - d;
        vf x[VF_LANES];
        /* + 0: a zero has no sign that other rows could have changed */
        VF_UNROLL for (int i = 0; i < 16; i++) x[i] =
            vf_add(vf_div(vf_load(o + (d + i) * 16), divisor), vf_set1(0.0f));
        VF_UNROLL for (int i = 0; i < 16; i++) bad |= _mm512_fpclass_ps_mask(x[i], 0x99);
        vf_transpose(x);
        for (int r = 0; r < n; r++) {
            float *const out = amx_out_row(&m->a, m->row0 + tile * VF_LANES + r) + d;
            if (left >= VF_LANES)
                vf_store(out, x[r]);
            else
                vf_store_n(out, x[r], left);
        }
    }
    for (int r = 0; r < n; r++) {
        const int64_t i = tile * VF_LANES + r;
        const double sum = (double)m->sum[i] + (double)m->sum_low[i];
        float *const lse = amx_lse_row(&m->a, m->row0 + i);
        *lse = sum == 0.0 ? -INFINITY : (float)(((double)m->max[i] + log2(sum)) * m->a.unit);
        if (amx_is_huge(m->max[i])) *lse = NAN;
        if (!(*lse < INFINITY)) bad = 1;
    }
    return bad == 0;
}

/* Regions of the scratch, or none where base is NULL; returns their size. */
static size_t carve(struct many *m, int64_t n_tiles, void *base)
{
    uintptr_t at = (uintptr_t)base;
    const int64_t lanes = n_tiles * VF_LANES * (int64_t)sizeof(float);
    m->a.zeros = amx_take(&at, attn_max(m->a.k_steps, m->a.v_steps) * TILE_ROW_BYTES);
    for (int i = 0; i < 2; i++) {
        m->s[i] = amx_take(&at, SUB_KEYS * TILE_ROW_BYTES);
        m->p[i] = amx_take(&at, 2 * P_BYTES);
    }
    m->tiles = amx_take(&at, n_tiles * (int64_t)sizeof(*m->tiles));
    m->row_lo = amx_take(&at, 2 * lanes);
    m->row_hi = amx_take(&at, 2 * lanes);
    m->max = amx_take(&at, lanes);
    m->sum = amx_take(&at, lanes);
    m->sum_low = amx_take(&at, lanes);
    m->weight_sum = amx_take(&at, lanes);
    m->q = amx_take(&at, n_tiles * m->a.k_steps * 2 * TILE_BYTES);
    m->vt = amx_take(&at, m->dim_tiles * KEY_STEPS * TILE_BYTES);
    m->o = amx_take(&at, n_tiles * m->dim_tiles * TILE_BYTES);
    m->k_stage = amx_take(&at, KEYS * m->a.k_steps * TILE_ROW_BYTES);
    m->v_stage = amx_take(&at, 2 * AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES);
    return (size_t)(at - (uintptr_t)base);
}

int64_t dcp__attn_amx_rows_most(int64_t dv)
{
    const int64_t row_bytes = amx_div_up(dv, AMX_STEP) * AMX_STEP * (int64_t)sizeof(float);
    const int64_t rows = O_BYTES / row_bytes / 32 * 32;
    return attn_max(ROWS_LEAST, attn_min(rows, ROWS_MOST));
}

size_t dcp__attn_amx_many_bytes(int64_t n_rows, int64_t dk, int64_t dv)
{
    struct many m;
    m.a.k_steps = amx_div_up(dk, AMX_STEP);
    m.a.v_steps = amx_div_up(dv, AMX_STEP);
    m.dim_tiles = 2 * m.a.v_steps;
    const int64_t rows = attn_min(n_rows, dcp__attn_amx_rows_most(dv));
    return carve(&m, amx_div_up(rows, VF_LANES), NULL);
}

static bool attend_pass(struct many *m)
{
    const struct dcp__attn_job *const job = m->a.job;
    m->n_tiles = amx_div_up(m->n_rows, VF_LANES);
    carve(m, m->n_tiles, job->scratch);
    memset(m->a.zeros, 0, (size_t)(attn_max(m->a.k_steps, m->a.v_steps) * TILE_ROW_BYTES));
    memset(m->o, 0, (size_t)(m->n_tiles * m->dim_tiles * TILE_BYTES));
    for (int64_t tile = 0; tile < m->n_tiles; tile++) begin_tile(m, tile);
    amx_set_hull(&m->a, m->row0 / job->n_group, (m->row0 + m->n_rows - 1) / job->n_group + 1);
    if (m->a.lo < m->a.hi) {
        tile_begin_all();
        for (int64_t at = m->a.lo / KEYS * KEYS; at < m->a.hi; at += KEYS) attend_block(m, at);
        tile_end_all();
    }
    bool is_good = true;
    for (int64_t tile = 0; tile < m->n_tiles; tile++)
        if (!end_tile(m, tile)) is_good = false;
    return is_good;
}

bool dcp__attn_amx_many(const struct dcp__attn_job *job)
{
    struct many m;
    amx_job_begin(&m.a, job);
    m.dim_tiles = 2 * m.a.v_steps;
    const int64_t most = dcp__attn_amx_rows_most(job->dv);
    const int64_t n_passes = amx_div_up(m.a.n_rows, most);
    const int64_t rows =
        n_passes > 0 ? amx_div_up(amx_div_up(m.a.n_rows, n_passes), VF_LANES) * VF_LANES : 1;
    bool is_good = true;
    for (m.row0 = 0; m.row0 < m.a.n_rows; m.row0 += rows) {
        m.n_rows = attn_min(rows, m.a.n_rows - m.row0);
        if (!attend_pass(&m)) is_good = false;
    }
    return is_good;
}
