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

/* ---- memory, meanwhile ---- */

static __attribute__((noinline)) void ahead_find(struct many *m)
{
    struct ahead *const x = &m->ahead;
    const struct amx_keys keys = amx_natural_keys(&m->a, x->key, x->is_value);
    x->at = keys.at;
    x->stride = keys.stride;
    x->n_lines = x->is_value ? m->a.v_steps : m->a.k_steps;
    x->row = 0;
}
static __attribute__((noinline)) void ahead_next_group(struct many *m)
{
    struct ahead *const x = &m->ahead;
    x->is_value = x->has_value && !x->is_value;
    if (!x->is_value) x->key += AMX_GROUP;
    ahead_find(m);
}
/* Once a step: with scores after 2, 4 or 8 products (a row tile or two, q in one part or two), with
 * values after 2 or 4. */
AMX_INLINE void do_ahead(struct many *m)
{
    struct ahead *const x = &m->ahead;
    for (x->due += x->a_step; x->due >= x->n_lines * FRACTION; x->due -= x->n_lines * FRACTION) {
        if (x->at != NULL) {
            for (int64_t i = 0; i < x->n_lines; i++)
                _mm_prefetch(x->at + i * TILE_ROW_BYTES, _MM_HINT_T1);
            x->at += x->stride;
        }
        if (++x->row == AMX_GROUP) ahead_next_group(m);
    }
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
 * they come out even: what is counted is not asked for. K is packed (not late). State in registers
 * from end to end: with it in struct soft, or with more than these pointers alive,
 * compilers keep half of it on the stack. */
struct steps {
    const char *k0, *k1;
    const char *q0, *q1;
    int64_t n;
};
enum pace { PACE_HALF, PACE_1, PACE_2, PACE_4 };

#define HOT_BEGIN(x)                                                                               \
    const float *hot_s = (x)->s + 2 * (x)->pair * VF_LANES;                                        \
    char *hot_p = (x)->p + (x)->pair * TILE_ROW_BYTES;                                             \
    const char *const hot_end = (x)->p + SUB_PAIRS * TILE_ROW_BYTES;                               \
    const __m512 hot_max = (x)->max;                                                               \
    const __m512 hot_scale2 = (x)->scale2;                                                         \
    __m512 hot_sum = (x)->sum;                                                                     \
    __m512 hot_weight_sum = (x)->weight_sum
#define HOT_PAIR                                                                                   \
    do {                                                                                           \
        const __m512i pairs = soft_weigh(_mm512_load_ps(hot_s), _mm512_load_ps(hot_s + VF_LANES),  \
                                         hot_scale2, hot_max, &hot_sum, &hot_weight_sum);          \
        _mm512_store_si512(hot_p, pairs);                                                          \
        hot_s += 2 * VF_LANES;                                                                     \
        hot_p += TILE_ROW_BYTES;                                                                   \
    } while (0)
#define HOT_END(x)                                                                                 \
    while (hot_p < hot_end) HOT_PAIR;                                                              \
    (x)->pair = SUB_PAIRS;                                                                         \
    (x)->sum = hot_sum;                                                                            \
    (x)->weight_sum = hot_weight_sum
/* After an even, an odd product. */
#define HOT_EVEN                                                                                   \
    do {                                                                                           \
        if (pace == PACE_HALF) break;                                                              \
        HOT_PAIR;                                                                                  \
        if (pace >= PACE_2) HOT_PAIR;                                                              \
        if (pace == PACE_4) HOT_PAIR;                                                              \
        if (pace == PACE_4) HOT_PAIR;                                                              \
    } while (0)
#define HOT_ODD                                                                                    \
    do {                                                                                           \
        if (pace != PACE_HALF)                                                                     \
            HOT_EVEN;                                                                              \
        else if (hot_p < hot_end)                                                                  \
            HOT_PAIR;                                                                              \
    } while (0)

AMX_INLINE void hot_scores(const struct steps *st, struct soft *x, enum pace pace, bool is_exact)
{
    const char *k0 = st->k0;
    const char *k1 = st->k1;
    const char *q0 = st->q0;
    const char *q1 = st->q1;
    HOT_BEGIN(x);
    for (int64_t n = st->n; n > 0; n--) {
        TILE_LOAD(6, q0, TILE_ROW_BYTES);
        TILE_STREAM(4, k0, TILE_ROW_BYTES);
        TILE_DP(0, 4, 6);
        HOT_EVEN;
        TILE_STREAM(5, k1, TILE_ROW_BYTES);
        TILE_DP(1, 5, 6);
        HOT_ODD;
        TILE_LOAD(7, q1, TILE_ROW_BYTES);
        TILE_DP(2, 4, 7);
        HOT_EVEN;
        TILE_DP(3, 5, 7);
        HOT_ODD;
        if (!is_exact) {
            TILE_LOAD(6, q0 + TILE_BYTES, TILE_ROW_BYTES);
            TILE_DP(0, 4, 6);
            HOT_EVEN;
            TILE_DP(1, 5, 6);
            HOT_ODD;
            TILE_LOAD(7, q1 + TILE_BYTES, TILE_ROW_BYTES);
            TILE_DP(2, 4, 7);
            HOT_EVEN;
            TILE_DP(3, 5, 7);
            HOT_ODD;
        }
        q0 += (is_exact ? 1 : 2) * TILE_BYTES;
        q1 += (is_exact ? 1 : 2) * TILE_BYTES;
        k0 += TILE_BYTES;
        k1 += TILE_BYTES;
    }
    HOT_END(x);
}
#define HOT_SCORES(name, pace, is_exact)                                                           \
    static __attribute__((noinline)) void name(const struct steps *st, struct soft *x)             \
    {                                                                                              \
        hot_scores(st, x, pace, is_exact);                                                         \
    }
HOT_SCORES(exact_half, PACE_HALF, true)
HOT_SCORES(exact_1, PACE_1, true)
HOT_SCORES(exact_2, PACE_2, true)
HOT_SCORES(exact_4, PACE_4, true)
HOT_SCORES(split_half, PACE_HALF, false)
HOT_SCORES(split_1, PACE_1, false)
HOT_SCORES(split_2, PACE_2, false)

typedef void hot_fn(const struct steps *st, struct soft *x);
/* For n steps, or NULL: none is made for this. */
static hot_fn *hot_for(const struct many *m, int64_t n)
{
    const int64_t products = 4 * n * m->n_parts;
    const bool is_exact = m->n_parts == 1;
    if (products >= 2 * SUB_PAIRS) return is_exact ? exact_half : split_half;
    switch (products) {
    case SUB_PAIRS:
        return is_exact ? exact_1 : split_1;
    case SUB_PAIRS / 2:
        return is_exact ? exact_2 : split_2;
    case SUB_PAIRS / 4:
        return is_exact ? exact_4 : NULL;
    default:
        return NULL;
    }
}

/* O^T += V^T P^T of 16 dims, two row tiles and all keys of a block, with a softmax. */
static __attribute__((noinline)) void hot_values(float *o0, float *o1, const char *v, const char *p,
                                                 struct soft *x)
{
    HOT_BEGIN(x);
    TILE_LOAD(0, o0, TILE_ROW_BYTES);
    TILE_LOAD(1, o1, TILE_ROW_BYTES);
    for (int i = 0; i < KEY_STEPS; i++, p += TILE_BYTES, v += TILE_BYTES) {
        TILE_LOAD(6, p, TILE_ROW_BYTES);
        TILE_STREAM(4, v, TILE_ROW_BYTES);
        TILE_DP(0, 4, 6);
        if (hot_p < hot_end) HOT_PAIR;
        TILE_LOAD(7, p + P_BYTES, TILE_ROW_BYTES);
        TILE_DP(1, 4, 7);
        if (hot_p < hot_end) HOT_PAIR;
    }
    HOT_END(x);
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o1, TILE_ROW_BYTES);
}

#undef HOT_BEGIN
#undef HOT_PAIR
#undef HOT_END
#undef HOT_EVEN
#undef HOT_ODD
#undef HOT_SCORES

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
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (kind.two) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    score_steps(m, now, 0, half, &x, kind);
    if (before != NULL) soft_end(m, before, 0, x.sum, x.weight_sum);
    if (is_split) {
        x = soft_begin(m, before, 1);
        score_steps(m, now, half, m->a.k_steps, &x, kind);
        soft_end(m, before, 1, x.sum, x.weight_sum);
    }
    TILE_STORE(0, s, TILE_ROW_BYTES);
    TILE_STORE(1, s + 256, TILE_ROW_BYTES);
    if (kind.two) {
        TILE_STORE(2, s + 512, TILE_ROW_BYTES);
        TILE_STORE(3, s + 768, TILE_ROW_BYTES);
    }
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
/* Of a pair, from dim tile begin to before end. */
static void add_values(struct many *m, const struct pair *pair, int64_t begin, int64_t end)
{
    make_values(m, m->n_parts_v); /* what is left, where rows see little of the block */
    const bool two = pair->tile + 1 < m->n_tiles;
    for (int64_t d = begin; d < end;) {
        if (d % 2 != 0 || d + 1 == end) {
            struct soft none = {.s = m->s[0], .p = m->p, .pair = SUB_PAIRS};
            float *const o = m->o + (pair->tile * m->dim_tiles + d) * 256;
            hot_values(o, o + m->dim_tiles * 256, m->vt + d * KEY_STEPS * TILE_BYTES, pair->p,
                       &none);
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

/* The same where hot loops are made for it; false: they are not. */
static bool do_hot_item(struct many *m, const struct item *now, float *s, const struct item *before,
                        const struct pair *due, int64_t d)
{
    if (before == NULL || before->is_masked || m->a.cap_scale != 0.0f) return false;
    if (m->is_late || before->n_tiles != 2 || now->n_tiles != 2) return false;
    if (m->part < m->n_parts_v) return false;
    if (due != NULL && due->sub_end - due->sub_begin != KEY_STEPS) return false;
    const int64_t half = due == NULL ? m->a.k_steps / 2 : m->a.k_steps;
    hot_fn *const first = hot_for(m, half);
    hot_fn *const second = due == NULL ? hot_for(m, m->a.k_steps - half) : first;
    if (first == NULL || second == NULL) return false;
    const struct amx_keys *const keys = m->k + now->sub * (SUB_KEYS / AMX_GROUP);
    const int64_t q_bytes = m->a.k_steps * m->n_parts * TILE_BYTES;
    struct steps st = {
        .k0 = keys[0].at,
        .k1 = keys[1].at,
        .q0 = m->q + now->tile * q_bytes,
        .q1 = m->q + (now->tile + 1) * q_bytes,
        .n = half,
    };
    struct soft x = soft_begin(m, before, 0);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    first(&st, &x);
    soft_end(m, before, 0, x.sum, x.weight_sum);
    x = soft_begin(m, before, 1);
    if (due == NULL) {
        st.k0 += half * TILE_BYTES;
        st.k1 += half * TILE_BYTES;
        st.q0 += half * m->n_parts * TILE_BYTES;
        st.q1 += half * m->n_parts * TILE_BYTES;
        st.n = m->a.k_steps - half;
        second(&st, &x);
    }
    TILE_STORE(0, s, TILE_ROW_BYTES);
    TILE_STORE(1, s + 256, TILE_ROW_BYTES);
    TILE_STORE(2, s + 512, TILE_ROW_BYTES);
    TILE_STORE(3, s + 768, TILE_ROW_BYTES);
    if (due != NULL) {
        float *const o = m->o + (due->tile * m->dim_tiles + d) * 256;
        hot_values(o, o + m->dim_tiles * 256, m->vt + d * KEY_STEPS * TILE_BYTES, due->p, &x);
    }
    soft_end(m, before, 1, x.sum, x.weight_sum);
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

/* Late: O += P V of 32 dims and a row tile or two: C 0-3, V 4-5, P, which passes by once, 6-7; and
 * of the next column a_step key pairs under every step of 2 or 4 products. */
AMX_INLINE void late_block(struct many *m, const struct pair *pair, int64_t d, const char *v,
                           bool two, struct column *next, int a_step)
{
    float *const o0 = m->o + (pair->tile * m->dim_tiles + 2 * d) * 256;
    float *const o1 = o0 + m->dim_tiles * 256;
    load_o(o0, o1, two);
    for (int i = pair->sub_begin; i < pair->sub_end; i++) {
        const char *const p = pair->p + i * TILE_BYTES;
        TILE_STREAM(6, p, TILE_ROW_BYTES);
        TILE_LOAD(4, v + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(0, 6, 4);
        TILE_LOAD(5, v + (KEY_STEPS + i) * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(1, 6, 5);
        if (two) {
            TILE_STREAM(7, p + P_BYTES, TILE_ROW_BYTES);
            TILE_DP(2, 7, 4);
            TILE_DP(3, 7, 5);
        }
        for (int n = a_step; n > 0 && next->pair < KEYS / 2; n--) pack_pair(next);
        do_ahead(m);
    }
    store_o(o0, o1, two);
}
/* Of all pairs, a column of V at a time, which is made tiles in L1 under the products of the one
 * before and gone before the next but one. */
static void add_late_values(struct many *m, const struct pair *pairs, int64_t begin)
{
    const int64_t v_bytes = AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES;
    const int64_t n_pairs = amx_div_up(m->n_tiles, 2);
    const int a_step = (int)amx_div_up(KEYS / 2, n_pairs * KEY_STEPS);
    for (int i = 0; i < N_GROUPS; i++)
        m->v[i] =
            amx_find_keys(&m->a, begin + i * AMX_GROUP, true, false, m->v_stage + i * v_bytes);
    struct column next = {m->v, 0, m->vt, 0};
    for (int64_t d = 0; d < m->a.v_steps; d++) {
        while (next.pair < KEYS / 2) pack_pair(&next);
        const char *const v = next.to;
        next = (struct column){m->v, (d + 1) * TILE_ROW_BYTES,
                               m->vt + (d + 1) % 2 * 2 * KEY_STEPS * TILE_BYTES, 0};
        if (d + 1 == m->a.v_steps) next.pair = KEYS / 2;
        for (int64_t i = 0; i < n_pairs; i++) {
            if (pairs[i].sub_end == 0) continue;
            if (pairs[i].tile + 1 < m->n_tiles)
                late_block(m, &pairs[i], d, v, true, &next, a_step);
            else
                late_block(m, &pairs[i], d, v, false, &next, a_step);
        }
    }
}

#endif
