/* SPDX-License-Identifier: Apache-2.0 */
/* The tile products of the many-row AMX kernel. Part of attn_many_amx.c. */
#ifndef DCP_KERNELS_ATTN_MANY_LOOPS_AMX_H
#define DCP_KERNELS_ATTN_MANY_LOOPS_AMX_H

#include "kernels/attn_many_soft_amx.h"

/* ---- scores of an item, with the softmax of another in between ---- */

/* Of what is read once (t1) or again and again. */
#define TILE_FETCH(tile, at, stride, once)                                                         \
    do {                                                                                           \
        if (once)                                                                                  \
            TILE_STREAM(tile, at, stride);                                                         \
        else                                                                                       \
            TILE_LOAD(tile, at, stride);                                                           \
    } while (0)

/* Late, once a step: with scores after 2, 4 or 8 products (a row tile or two, q in one part or
 * two), with values after 2 or 4; else once an item. */
AMX_INLINE void do_ahead(struct many *m)
{
    ahead_step(&m->a, &m->ahead);
}

/* What is known when this is compiled. */
struct kind {
    bool is_masked, is_capped; /* the softmax */
    bool is_first;             /* of the block's pairs, not late: V^T is made meanwhile */
    bool is_exact, two;        /* the scores */
    bool is_late;
};

/* Dim tiles [begin, end) of the scores of now, with the softmax of x between the products. */
AMX_INLINE void score_steps(struct many *m, const struct item *now, int64_t begin, int64_t end,
                            struct soft *x, const struct kind kind)
{
    const int64_t n_parts = kind.is_exact ? 1 : 2;
    const int64_t q_bytes = m->a.k_steps * n_parts * TILE_BYTES;
    const char *q = m->q + now->tile * q_bytes + begin * n_parts * TILE_BYTES;
    const struct amx_keys *const keys = m->k + now->sub * (SUB_KEYS / AMX_GROUP);
    const int64_t strides[2] = {keys[0].stride, keys[1].stride};
    const int64_t k_step = m->k_step;
    const char *k0 = keys[0].at + begin * k_step;
    const char *k1 = keys[1].at + begin * k_step;
    const int64_t n_slots = (kind.two ? 4 : 2) * n_parts;
    /* Pairs that are due after each product, in 1/65536. */
    const int64_t share =
        end > begin ? (SUB_PAIRS * 65536 / n_slots + end - begin - 1) / (end - begin) : 0;
    int64_t due = 0;
#define SOFT                                                                                       \
    for (due += share; x->pair < SUB_PAIRS && x->pair < due >> 16;)                                \
    soft_pair(x, kind.is_masked, kind.is_capped)
    /* What passes by once streams: late, q, while an item's keys stay in L1 for all pairs. */
    for (int64_t d = begin; d < end; d++, q += n_parts * TILE_BYTES, k0 += k_step, k1 += k_step) {
        TILE_FETCH(6, q, TILE_ROW_BYTES, kind.is_late);
        TILE_FETCH(4, k0, strides[0], !kind.is_late);
        TILE_DP(0, 4, 6);
        SOFT;
        TILE_FETCH(5, k1, strides[1], !kind.is_late);
        TILE_DP(1, 5, 6);
        SOFT;
        if (kind.two) {
            TILE_FETCH(7, q + q_bytes, TILE_ROW_BYTES, kind.is_late);
            TILE_DP(2, 4, 7);
            SOFT;
            TILE_DP(3, 5, 7);
            SOFT;
        }
        if (!kind.is_exact) {
            TILE_FETCH(6, q + TILE_BYTES, TILE_ROW_BYTES, kind.is_late);
            TILE_DP(0, 4, 6);
            SOFT;
            TILE_DP(1, 5, 6);
            SOFT;
            if (kind.two) {
                TILE_FETCH(7, q + q_bytes + TILE_BYTES, TILE_ROW_BYTES, kind.is_late);
                TILE_DP(2, 4, 7);
                SOFT;
                TILE_DP(3, 5, 7);
                SOFT;
            }
        }
        if (kind.is_first) make_values(m, m->parts_a_step);
        if (kind.is_late) do_ahead(m);
    }
#undef SOFT
    while (x->pair < SUB_PAIRS) soft_pair(x, kind.is_masked, kind.is_capped);
}

/* A pair of row tiles whose weights of the block are, or soon will be, in p. */
struct pair {
    int64_t tile;
    char *p;
    int sub_begin, sub_end;
};

/* C 0-3: two dim tiles of a row tile, or of two. */
AMX_INLINE void load_o(const float *o0, const float *o1, bool two)
{
    TILE_LOAD(0, o0, TILE_ROW_BYTES);
    TILE_LOAD(1, o0 + 256, TILE_ROW_BYTES);
    if (two) {
        TILE_LOAD(2, o1, TILE_ROW_BYTES);
        TILE_LOAD(3, o1 + 256, TILE_ROW_BYTES);
    }
}
AMX_INLINE void store_o(float *o0, float *o1, bool two)
{
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o0 + 256, TILE_ROW_BYTES);
    if (two) {
        TILE_STORE(2, o1, TILE_ROW_BYTES);
        TILE_STORE(3, o1 + 256, TILE_ROW_BYTES);
    }
}

/* O^T += V^T P^T of 32 dims and one row tile or two: C 0-3, V^T, which passes by once, 4-5, P
 * 6-7. */
AMX_INLINE void values_block(struct many *m, const struct pair *pair, int64_t d, bool two)
{
    float *const o0 = m->o + (pair->tile * m->dim_tiles + d) * 256;
    float *const o1 = o0 + m->dim_tiles * 256;
    const char *const vt = m->vt + d * KEY_STEPS * TILE_BYTES;
    load_o(o0, o1, two);
    for (int i = pair->sub_begin; i < pair->sub_end; i++) {
        const char *const p = pair->p + i * TILE_BYTES;
        const char *const v = vt + i * TILE_BYTES;
        TILE_LOAD(6, p, TILE_ROW_BYTES);
        TILE_STREAM(4, v, TILE_ROW_BYTES);
        TILE_DP(0, 4, 6);
        TILE_STREAM(5, v + KEY_STEPS * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(1, 5, 6);
        if (two) {
            TILE_LOAD(7, p + P_BYTES, TILE_ROW_BYTES);
            TILE_DP(2, 4, 7);
            TILE_DP(3, 5, 7);
        }
    }
    store_o(o0, o1, two);
}

/* ---- the loops where the time goes ---- */

/* Plain softmax (no mask, no cap), two row tiles, and so many pairs of keys after each product that
 * they come out even: what is counted is not asked for. State in registers from end to end: with it
 * in a struct, or with more than these pointers alive, compilers keep half of it on the stack. */
enum pace { PACE_HALF, PACE_1, PACE_2, PACE_4 };
/* What is known when this is compiled. */
struct hot {
    enum pace pace;
    bool is_exact, is_late;
};
/* The pace of 16 pairs under so many products: where none fits, HALF, which looks before it takes a
 * pair, and HOT_END does the rest. */
AMX_INLINE enum pace hot_pace(int64_t products)
{
    switch (products) {
    case SUB_PAIRS:
        return PACE_1;
    case SUB_PAIRS / 2:
        return PACE_2;
    case SUB_PAIRS / 4:
        return PACE_4;
    default:
        return PACE_HALF;
    }
}

/* Of row tile i of an item. */
#define HOT_BEGIN(it, i)                                                                           \
    const float *hot_s = (it)->s + (i)*SUB_KEYS * VF_LANES;                                        \
    char *hot_p = (it)->p + (i)*P_BYTES + (it)->sub * SUB_BYTES;                                   \
    const char *const hot_end = hot_p + SUB_PAIRS * TILE_ROW_BYTES;                                \
    const __m512 hot_max = _mm512_load_ps(m->max + ((it)->tile + (i)) * VF_LANES);                 \
    const __m512 hot_scale2 = _mm512_set1_ps(m->a.scale2);                                         \
    __m512 hot_sum = _mm512_setzero_ps();                                                          \
    __m512 hot_weight_sum = _mm512_setzero_ps()
#define HOT_PAIR                                                                                   \
    do {                                                                                           \
        const __m512i pairs = soft_weigh(_mm512_load_ps(hot_s), _mm512_load_ps(hot_s + VF_LANES),  \
                                         hot_scale2, hot_max, &hot_sum, &hot_weight_sum);          \
        _mm512_store_si512(hot_p, pairs);                                                          \
        hot_s += 2 * VF_LANES;                                                                     \
        hot_p += TILE_ROW_BYTES;                                                                   \
    } while (0)
#define HOT_END(it, i)                                                                             \
    while (hot_p < hot_end) HOT_PAIR;                                                              \
    soft_end(m, it, i, hot_sum, hot_weight_sum)
/* After an even, an odd product. */
#define HOT_EVEN                                                                                   \
    do {                                                                                           \
        if (hot.pace == PACE_HALF) break;                                                          \
        HOT_PAIR;                                                                                  \
        if (hot.pace >= PACE_2) HOT_PAIR;                                                          \
        if (hot.pace == PACE_4) HOT_PAIR;                                                          \
        if (hot.pace == PACE_4) HOT_PAIR;                                                          \
    } while (0)
#define HOT_ODD                                                                                    \
    do {                                                                                           \
        if (hot.pace != PACE_HALF)                                                                 \
            HOT_EVEN;                                                                              \
        else if (hot_p < hot_end)                                                                  \
            HOT_PAIR;                                                                              \
    } while (0)

/* n steps of an item's scores from step begin on, with the softmax of row tile i of the item
 * before. */
AMX_INLINE void hot_scores(struct many *m, const struct item *now, int64_t begin, int64_t n,
                           const struct item *before, int i, const struct hot hot)
{
    const int64_t n_parts = hot.is_exact ? 1 : 2;
    const int64_t q_bytes = m->a.k_steps * n_parts * TILE_BYTES;
    const int64_t k_step = hot.is_late ? TILE_ROW_BYTES : TILE_BYTES;
    const struct amx_keys *const keys = m->k + now->sub * (SUB_KEYS / AMX_GROUP);
    const int64_t stride0 = hot.is_late ? keys[0].stride : TILE_ROW_BYTES;
    const int64_t stride1 = hot.is_late ? keys[1].stride : TILE_ROW_BYTES;
    const char *k0 = keys[0].at + begin * k_step;
    const char *k1 = keys[1].at + begin * k_step;
    const char *q0 = m->q + now->tile * q_bytes + begin * n_parts * TILE_BYTES;
    const char *q1 = q0 + q_bytes;
    HOT_BEGIN(before, i);
    for (; n > 0; n--) {
        TILE_FETCH(6, q0, TILE_ROW_BYTES, hot.is_late);
        TILE_FETCH(4, k0, stride0, !hot.is_late);
        TILE_DP(0, 4, 6);
        HOT_EVEN;
        TILE_FETCH(5, k1, stride1, !hot.is_late);
        TILE_DP(1, 5, 6);
        HOT_ODD;
        TILE_FETCH(7, q1, TILE_ROW_BYTES, hot.is_late);
        TILE_DP(2, 4, 7);
        HOT_EVEN;
        TILE_DP(3, 5, 7);
        HOT_ODD;
        if (!hot.is_exact) {
            TILE_FETCH(6, q0 + TILE_BYTES, TILE_ROW_BYTES, hot.is_late);
            TILE_DP(0, 4, 6);
            HOT_EVEN;
            TILE_DP(1, 5, 6);
            HOT_ODD;
            TILE_FETCH(7, q1 + TILE_BYTES, TILE_ROW_BYTES, hot.is_late);
            TILE_DP(2, 4, 7);
            HOT_EVEN;
            TILE_DP(3, 5, 7);
            HOT_ODD;
        }
        q0 += n_parts * TILE_BYTES;
        q1 += n_parts * TILE_BYTES;
        k0 += k_step;
        k1 += k_step;
        if (hot.is_late) do_ahead(m);
    }
    HOT_END(before, i);
}
/* Part i of KEY_STEPS of a tile of O, to L1, as the next dims want it. */
AMX_INLINE void fetch_o(const float *o, int i)
{
    enum { PART = TILE_BYTES / KEY_STEPS };
    for (int64_t at = 0; at < PART; at += 64)
        __builtin_prefetch((const char *)o + i * PART + at, 1, 3);
}
/* O^T += V^T P^T of 16 dims, two row tiles and all keys of a block, with the softmax of an item's
 * second row tile; none where before is NULL. Tiles of O come right before their first product and
 * are in L1 by then: 3% of a chunk's time. */
AMX_INLINE void hot_values(struct many *m, const struct pair *pair, int64_t d,
                           const struct item *before)
{
    float *const o0 = m->o + (pair->tile * m->dim_tiles + d) * 256;
    float *const o1 = o0 + m->dim_tiles * 256;
    const char *v = m->vt + d * KEY_STEPS * TILE_BYTES;
    const char *p = pair->p;
    const struct item none = {.s = m->s[0], .p = m->p};
    HOT_BEGIN(before != NULL ? before : &none, 1);
    for (int i = 0; i < KEY_STEPS; i++, p += TILE_BYTES, v += TILE_BYTES) {
        TILE_LOAD(6, p, TILE_ROW_BYTES);
        TILE_STREAM(4, v, TILE_ROW_BYTES);
        if (i == 0) TILE_LOAD(0, o0, TILE_ROW_BYTES);
        TILE_DP(0, 4, 6);
        fetch_o(o0 + 256, i);
        if (before != NULL) HOT_PAIR;
        TILE_LOAD(7, p + P_BYTES, TILE_ROW_BYTES);
        if (i == 0) TILE_LOAD(1, o1, TILE_ROW_BYTES);
        TILE_DP(1, 4, 7);
        fetch_o(o1 + 256, i);
        if (before != NULL) HOT_PAIR;
    }
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o1, TILE_ROW_BYTES);
    if (before == NULL) return;
    HOT_END(before, 1);
}

#undef HOT_BEGIN
#undef HOT_PAIR
#undef HOT_END
#undef HOT_EVEN
#undef HOT_ODD

/* C 0-3, scores or O. */
AMX_INLINE void zero_c(bool two)
{
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (two) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
}
AMX_INLINE void store_scores(float *s, bool two)
{
    TILE_STORE(0, s, TILE_ROW_BYTES);
    TILE_STORE(1, s + 256, TILE_ROW_BYTES);
    if (two) {
        TILE_STORE(2, s + 512, TILE_ROW_BYTES);
        TILE_STORE(3, s + 768, TILE_ROW_BYTES);
    }
}
/* Scores of all steps to s: so many where n is not 0. Both softmaxes of the item before under them;
 * or, where a dim tile of values is due, that of the second row tile under its products. */
AMX_INLINE void hot_item(struct many *m, const struct item *now, float *s,
                         const struct item *before, const struct pair *due, int64_t d, int64_t n,
                         bool is_exact, bool is_late)
{
    const int64_t a_step = is_exact ? 4 : 8; /* products */
    const int64_t n_steps = n != 0 ? n : m->a.k_steps;
    const int64_t half = n_steps / 2;
    struct hot hot = {PACE_HALF, is_exact, is_late};
    zero_c(true);
    if (due != NULL) {
        if (n != 0) hot.pace = hot_pace(a_step * n);
        hot_scores(m, now, 0, n_steps, before, 0, hot);
        store_scores(s, true);
        hot_values(m, due, d, before);
        return;
    }
    if (n != 0) hot.pace = hot_pace(a_step * (n / 2));
    hot_scores(m, now, 0, half, before, 0, hot);
    hot_scores(m, now, half, n_steps - half, before, 1, hot);
    store_scores(s, true);
}
typedef void hot_fn(struct many *m, const struct item *now, float *s, const struct item *before,
                    const struct pair *due, int64_t d);
#define HOT_ITEM(name, n, is_exact, is_late)                                                       \
    static __attribute__((noinline)) void name(struct many *m, const struct item *now, float *s,   \
                                               const struct item *before, const struct pair *due,  \
                                               int64_t d)                                          \
    {                                                                                              \
        if (!(is_late) && due != NULL)                                                             \
            hot_item(m, now, s, before, due, d, n, is_exact, is_late);                             \
        else                                                                                       \
            hot_item(m, now, s, before, NULL, 0, n, is_exact, is_late);                            \
    }
HOT_ITEM(hot_exact, 0, true, false)
HOT_ITEM(hot_exact_2, 2, true, false)
HOT_ITEM(hot_exact_4, 4, true, false)
HOT_ITEM(hot_exact_8, 8, true, false)
HOT_ITEM(hot_split, 0, false, false)
HOT_ITEM(hot_split_2, 2, false, false)
HOT_ITEM(hot_split_4, 4, false, false)
HOT_ITEM(late_exact, 0, true, true)
HOT_ITEM(late_exact_2, 2, true, true)
HOT_ITEM(late_exact_4, 4, true, true)
HOT_ITEM(late_exact_8, 8, true, true)
HOT_ITEM(late_split, 0, false, true)
HOT_ITEM(late_split_2, 2, false, true)
HOT_ITEM(late_split_4, 4, false, true)
#undef HOT_ITEM

static hot_fn *hot_for(const struct many *m)
{
    /* [late][in two parts][steps: any, 2, 4, 8] */
    static hot_fn *const all[2][2][4] = {
        {{hot_exact, hot_exact_2, hot_exact_4, hot_exact_8},
         {hot_split, hot_split_2, hot_split_4, hot_split}},
        {{late_exact, late_exact_2, late_exact_4, late_exact_8},
         {late_split, late_split_2, late_split_4, late_split}},
    };
    const int64_t n = m->a.k_steps;
    return all[m->is_late][m->n_parts - 1][n == 2 ? 1 : n == 4 ? 2 : n == 8 ? 3 : 0];
}

/* Scores of now to s; softmax of before, if there is one: its first tile under the first half of
 * the steps, its second under the others. */
AMX_INLINE void scores_over_soft(struct many *m, const struct item *now, float *s,
                                 const struct item *before, const struct kind kind)
{
    const bool is_split = before != NULL && before->n_tiles == 2;
    const int64_t half = is_split ? m->a.k_steps / 2 : m->a.k_steps;
    /* Without one: the state of this item, which goes nowhere. */
    struct soft x = soft_begin(m, before != NULL ? before : now, 0);
    if (before == NULL) x.pair = SUB_PAIRS;
    zero_c(kind.two);
    score_steps(m, now, 0, half, &x, kind);
    if (before != NULL) soft_end(m, before, 0, x.sum, x.weight_sum);
    if (is_split) {
        x = soft_begin(m, before, 1);
        score_steps(m, now, half, m->a.k_steps, &x, kind);
        soft_end(m, before, 1, x.sum, x.weight_sum);
    }
    store_scores(s, kind.two);
}
/* Each of the three with a loop of its own. */
AMX_INLINE void scores_by_mask(struct many *m, const struct item *now, float *s,
                               const struct item *before, struct kind kind)
{
    if (m->a.cap_scale != 0.0f) {
        kind.is_masked = kind.is_capped = true;
        scores_over_soft(m, now, s, before, kind);
    } else if (before != NULL && before->is_masked) {
        kind.is_masked = true;
        scores_over_soft(m, now, s, before, kind);
    } else {
        scores_over_soft(m, now, s, before, kind);
    }
}
AMX_INLINE void do_item_as(struct many *m, const struct item *now, float *s,
                           const struct item *before, bool is_exact, bool two)
{
    struct kind kind = {.is_exact = is_exact, .two = two};
    const bool is_masked = m->a.cap_scale != 0.0f || (before != NULL && before->is_masked);
    if (m->is_late) {
        kind.is_late = true;
        scores_by_mask(m, now, s, before, kind);
    } else if (is_masked || m->part < m->n_parts_v) {
        kind.is_first = true;
        scores_by_mask(m, now, s, before, kind);
    } else {
        scores_over_soft(m, now, s, before, kind);
    }
}
static __attribute__((noinline)) void add_dim(struct many *m, const struct pair *pair, int64_t d)
{
    hot_values(m, pair, d, NULL);
}
/* Of a pair, from dim tile begin to before end. */
static void add_values(struct many *m, const struct pair *pair, int64_t begin, int64_t end)
{
    make_values(m, m->n_parts_v); /* what is left, where rows see little of the block */
    const bool two = pair->tile + 1 < m->n_tiles;
    for (int64_t d = begin; d < end;) {
        if (d % 2 != 0 || d + 1 == end) {
            add_dim(m, pair, d);
            d++;
            continue;
        }
        if (two)
            values_block(m, pair, d, true);
        else
            values_block(m, pair, d, false);
        d += 2;
    }
}

/* What the hot loops are made for; false: it is something else. */
static bool do_hot_item(struct many *m, const struct item *now, float *s, const struct item *before,
                        const struct pair *due, int64_t d)
{
    if (before == NULL || before->is_masked || m->a.cap_scale != 0.0f) return false;
    if (before->n_tiles != 2 || now->n_tiles != 2) return false;
    if (!m->is_late && m->part < m->n_parts_v) return false;
    if (due != NULL && due->sub_end - due->sub_begin != KEY_STEPS) return false;
    hot_for(m)(m, now, s, before, due, d);
    return true;
}

static void do_cold_item(struct many *m, const struct item *now, float *s,
                         const struct item *before)
{
    if (m->n_parts == 1 && now->n_tiles == 2)
        do_item_as(m, now, s, before, true, true);
    else if (m->n_parts == 1)
        do_item_as(m, now, s, before, true, false);
    else if (now->n_tiles == 2)
        do_item_as(m, now, s, before, false, true);
    else
        do_item_as(m, now, s, before, false, false);
}
static void do_item(struct many *m, const struct item *now, float *s, const struct item *before,
                    const struct pair *due, int64_t d)
{
    if (do_hot_item(m, now, s, before, due, d)) return;
    do_cold_item(m, now, s, before);
    if (due != NULL) add_values(m, due, d, d + 1);
}
/* The last item's softmax, with nothing above it. */
static void finish_item(struct many *m, const struct item *it)
{
    const bool is_capped = m->a.cap_scale != 0.0f;
    for (int i = 0; i < it->n_tiles; i++) {
        struct soft x = soft_begin(m, it, i);
        while (x.pair < SUB_PAIRS) soft_pair(&x, it->is_masked || is_capped, is_capped);
        soft_end(m, it, i, x.sum, x.weight_sum);
    }
}

/* ---- values ---- */

/* 4 key pairs of V, 32 dims, to two B tiles [16 key pairs][16 dims][2], whose rows these are: of
 * every 8 dims 0-3 in the first, 4-7 in the second. */
AMX_INLINE void pack_4(const struct amx_keys rows, int64_t first, int64_t offset, char *to)
{
    const char *from = rows.at + 2 * first * rows.stride + offset;
    VF_UNROLL for (int i = 0; i < 4; i++, to += TILE_ROW_BYTES)
    {
        const __m512i a = _mm512_loadu_si512(from);
        const __m512i b = _mm512_loadu_si512(from + rows.stride);
        from += 2 * rows.stride;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + KEY_STEPS * TILE_BYTES, _mm512_unpackhi_epi16(a, b));
    }
}
/* Quarter n of 32 keys, to tile step of a column [2][KEY_STEPS]. */
AMX_INLINE void pack_quarter(const struct many *m, int64_t step, int n, int64_t offset)
{
    pack_4(m->v[2 * step + n / 2], n % 2 * 4, offset,
           m->vt + step * TILE_BYTES + n * 4 * TILE_ROW_BYTES);
}
static __attribute__((noinline)) void pack_steps(const struct many *m, int n_steps, int64_t offset)
{
    for (int step = 0; step < n_steps; step++)
        for (int n = 0; n < 4; n++) pack_quarter(m, step, n, offset);
}

/* Late: O += P V of 32 dims and a row tile or two: C 0-3, V 4-5, P, which passes by once, 6-7. Each
 * tile of O comes right before its first product: all four in front of the first tiles of P and V
 * are 64 lines from L2 that those would wait for.
 *
 * V's tiles of a column are made under products, half of them by each of two pairs, as 256 lines
 * are more than one has time for. The last pair makes the next column's first half in place of what
 * it has used, and the first pair the other half as many steps before it comes to it: what has just
 * been stored a tile's load would wait for. The first pair fetches nothing ahead meanwhile; all
 * others do, the last one too. */
AMX_INLINE void late_block(struct many *m, const struct pair *pair, int64_t d, bool two,
                           bool is_first, bool is_last)
{
    float *const o0 = m->o + (pair->tile * m->dim_tiles + 2 * d) * 256;
    float *const o1 = o0 + m->dim_tiles * 256;
    bool has_o = m->tiles[pair->tile].has_o; /* not yet in C */
    if (!has_o) zero_c(two);
    for (int i = pair->sub_begin; i < pair->sub_end; i++) {
        const char *const p = pair->p + i * TILE_BYTES;
        const char *const v = m->vt + i * TILE_BYTES;
        const bool is_early = i < PACK_STEPS;
        const bool packs = is_early ? is_first : is_last;
        const int64_t step = is_early ? i + PACK_STEPS : i - PACK_STEPS;
        const int64_t offset = (is_early ? d : d + 1) * TILE_ROW_BYTES;
        TILE_STREAM(6, p, TILE_ROW_BYTES);
        TILE_LOAD(4, v, TILE_ROW_BYTES);
        if (has_o) TILE_LOAD(0, o0, TILE_ROW_BYTES);
        TILE_DP(0, 6, 4);
        if (packs) pack_quarter(m, step, 0, offset);
        TILE_LOAD(5, v + KEY_STEPS * TILE_BYTES, TILE_ROW_BYTES);
        if (has_o) TILE_LOAD(1, o0 + 256, TILE_ROW_BYTES);
        TILE_DP(1, 6, 5);
        if (packs) pack_quarter(m, step, 1, offset);
        if (two) {
            TILE_STREAM(7, p + P_BYTES, TILE_ROW_BYTES);
            if (has_o) TILE_LOAD(2, o1, TILE_ROW_BYTES);
            TILE_DP(2, 7, 4);
        }
        if (packs) pack_quarter(m, step, 2, offset);
        if (two) {
            if (has_o) TILE_LOAD(3, o1 + 256, TILE_ROW_BYTES);
            TILE_DP(3, 7, 5);
        }
        if (packs) pack_quarter(m, step, 3, offset);
        if (!is_first) do_ahead(m);
        has_o = false;
    }
    store_o(o0, o1, two);
}
typedef void late_fn(struct many *m, const struct pair *pair, int64_t d);
#define LATE_BLOCK(name, two, is_first, is_last)                                                   \
    static __attribute__((noinline)) void name(struct many *m, const struct pair *pair, int64_t d) \
    {                                                                                              \
        late_block(m, pair, d, two, is_first, is_last);                                            \
    }
LATE_BLOCK(late_one, false, false, false)
LATE_BLOCK(late_one_last, false, false, true)
LATE_BLOCK(late_one_first, false, true, false)
LATE_BLOCK(late_one_only, false, true, true)
LATE_BLOCK(late_two, true, false, false)
LATE_BLOCK(late_two_last, true, false, true)
LATE_BLOCK(late_two_first, true, true, false)
LATE_BLOCK(late_two_only, true, true, true)
#undef LATE_BLOCK

static late_fn *late_for(bool two, bool is_first, bool is_last)
{
    static late_fn *const all[2][2][2] = {
        {{late_one, late_one_last}, {late_one_first, late_one_only}},
        {{late_two, late_two_last}, {late_two_first, late_two_only}},
    };
    return all[two][is_first][is_last];
}
static bool sees_all_items(const struct pair *pair)
{
    return pair->sub_end - pair->sub_begin == N_SUBS;
}
/* Of all pairs, a column of V at a time. */
static void add_late_values(struct many *m, const struct pair *pairs, int64_t begin)
{
    const int64_t v_bytes = AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES;
    const int64_t n_pairs = amx_div_up(m->n_tiles, 2);
    for (int i = 0; i < N_GROUPS; i++)
        m->v[i] =
            amx_find_keys(&m->a, begin + i * AMX_GROUP, true, false, m->v_stage + i * v_bytes);
    int64_t first = 0;
    int64_t last = n_pairs - 1;
    while (first < n_pairs && pairs[first].sub_end == 0) first++;
    while (last > first && pairs[last].sub_end == 0) last--;
    if (first == n_pairs) return;
    /* Else some of their steps are missing: a column's tiles are made in front of it. */
    const bool are_whole = sees_all_items(&pairs[first]) && sees_all_items(&pairs[last]);
    if (are_whole) pack_steps(m, PACK_STEPS, 0);
    for (int64_t d = 0; d < m->a.v_steps; d++) {
        if (!are_whole) pack_steps(m, KEY_STEPS, d * TILE_ROW_BYTES);
        for (int64_t i = first; i <= last; i++) {
            const struct pair *const pair = &pairs[i];
            const bool two = pair->tile + 1 < m->n_tiles;
            if (pair->sub_end == 0) continue;
            late_for(two, are_whole && i == first,
                     are_whole && i == last && d + 1 < m->a.v_steps)(m, pair, d);
        }
    }
    for (int64_t i = first; i <= last; i++) {
        if (pairs[i].sub_end == 0) continue;
        m->tiles[pairs[i].tile].has_o = true;
        m->tiles[pairs[i].tile + (pairs[i].tile + 1 < m->n_tiles)].has_o = true;
    }
}

#endif
