/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention on AMX tiles, many rows (extend; absorbed MLA with many heads).
 *
 * Idea. Row tiles of 16 rows go in pairs, keys in items of 32; blocks of 256 keys. Scores of an
 * item are a 2 x 2 block of tiles, and the softmax of the item before runs between their products:
 *
 *     S^T [32 keys][2 x 16 rows] = K * Q^T          K [16 keys][32 dims] is A, Q^T, packed once, B
 *
 *     tiles    | QK item 0 | QK item 1 | ... | QK item 7 | QK item 8 | PV slice | QK item 9 | ...
 *     vectors  |           | soft 0    | ... | soft 6    | soft 7    | soft 8            | ...
 *                                                         ^ next pair; values of the one before
 *
 * Up to 256 rows ("late", what absorbed MLA decodes with) keys are the more, else rows:
 *
 *     late: item by item, pair by pair in it           else: pair by pair, item by item in it
 *     K   natural rows, in L1 for all pairs            packed to tiles at the block's start, for
 *                                                      all pairs
 *     P   [16 rows][32 keys], an A tile: P^T turned    [16 key pairs][16 rows][2], a B tile: two
 *                                                      rows of S^T, weighted, interleaved
 *     V   [16 key pairs][16 dims][2], a B tile: 1      [16 dims][32 keys], an A tile: V^T, 5
 *         shuffle per 64 bytes; columns of 32 dims,    shuffles per 64 bytes, in the first pair
 *         16 KiB in L1, made under products of the
 *         last pair of the column before and of
 *         the first of this one, half by each
 *     O   += P V, at the block's end                   += V^T P^T, a dim tile at a time under the
 *                                                      items of the next pair, P in L1
 *
 * Both add the same products in the same order: which is taken changes no bit. Rows of the next
 * block go to L2 meanwhile (attn_ahead_amx.h).
 *
 * The maximum: none is computed. A row's reference is an integer and stays as long as the weights
 * of an item sum to less than 2^40; else (and at a row's first keys) it is moved to the item's
 * maximum, what was summed is multiplied by a power of two, and the item's softmax is done again.
 *
 * Accuracy. Weights are cut to bf16 (by 2^-8 of each at most around a factor that all have, rms
 * 0.0018), and divided by the sum of what is left of them, so an error is relative to how values
 * spread, not to their size; lse is of the weights before the cut, which are good to 2.7e-6. q
 * keeps 2^-17 in two bf16 parts; where bf16 holds all of a pass's q, as engines in bf16 give it,
 * the second part is nothing and is left out, which changes no bit either.
 *
 * Instructions for 16 keys and 16 rows; n = Dk / 32 (twice that where q has two parts),
 * m = Dv / 32:
 *     products   n + m                  8 at 128/128, MLA 34; with two parts 12 and 52
 *     loads      as many                half of them stream (t1), the others stay in L1
 *     vectors    16 x 10.5              (2^z 7, z 1, sum 1, cut 1, sum of the cut 0.5)
 * Tiles are counted from the code (tests/kernels/test_attn_amx.c prints the counts).
 *
 * Speed (an AMX server of 2.6 GHz, one thread, bench_attn, 4,096 keys, q in bf16), share of the
 * 2.66 TFLOP/s that products reach on random tiles, by the hour:
 *     128/128, from L3: 256 tokens of 4 heads 0.45, 512 of 8 0.43; q in two parts 0.35
 *     MLA 576/512 of 96 heads from memory: 1 token 0.44 to 0.50, 2 tokens 0.50; q in two parts 0.36
 *     to 0.38, 0.40
 * What is left. A 2 x 2 step with K in L1 and q streaming takes 64 to 70 cycles for 4 products, so
 * QK alone is near its peak; around each item come some 300 cycles (4 tiles out, two sums, two
 * transpositions). 128/128: two chains of products with V, of 52 cycles a product and chain, take
 * 416 cycles for 256 of work; with four chains the softmax of every other item is bare: no gain;
 * nor from QK and PV in one loop, 6 chains. MLA: a block's products alone would take 20 us, it
 * takes 38 to 46 by the hour, 2 less where all keys are in L2. V's tiles are 7% of that, O 5%, the
 * softmax and turning the weights 1.3%; q and P from L1 would gain nothing.
 * What did not help: packing keys in front of their products, in blocks or items; q to L1 one to
 * three steps ahead (0.9 of the speed); O or V's rows to L1 ahead (0 to 2% slower); columns of 64
 * dims; blocks of 128 to 512 keys but 256 (2 to 11% slower: P of a pair, its O and V's panel fill
 * L1 at 256); all lines ahead under scores, or under values; two blocks a column, O still in L1; V
 * made tiles under the scores (its stores to L2: 9 us a block); three row tiles at a time with
 * values, P in L1 (V is then made twice, 5 us each); a pair's second row tile four steps behind
 * its first, so that O comes and goes under products; V's tiles made evenly under all pairs, in
 * two panels; V staged by tile loads that pass L1 by; for 18 steps of scores loops of 8, 8 and 2
 * with the softmax counted out (2% slower than asking).
 *
 * Files: attn_many_soft_amx.h softmax and values' tiles, attn_many_loops_amx.h the products.
 * Limits: passes of dcp__attn_amx_rows_most rows. Scratch per dcp__attn_amx_many_bytes. */
#include "kernels/attn_many_loops_amx.h"

/* ---- blocks ---- */

/* 16 rows to tiles, as fast as memory gives them. */
static void pack_keys(struct amx_keys keys, int64_t n_tiles, char *to)
{
    for (int i = 0; i < AMX_GROUP; i++, to += TILE_ROW_BYTES) {
        const char *const at = keys.at + i * keys.stride;
        for (int64_t d = 0; d < n_tiles; d++) {
            _mm_prefetch(at + d * TILE_ROW_BYTES + FETCH_BYTES, _MM_HINT_T0);
            _mm512_store_si512(to + d * TILE_BYTES, _mm512_loadu_si512(at + d * TILE_ROW_BYTES));
        }
    }
}
/* 16 rows to the caches. */
static void touch(struct amx_keys keys, int64_t n_lines)
{
    __m512i all = _mm512_setzero_si512();
    for (int i = 0; i < AMX_GROUP; i++) {
        const char *const at = keys.at + i * keys.stride;
        for (int64_t d = 0; d < n_lines; d++) {
            _mm_prefetch(at + d * TILE_ROW_BYTES + FETCH_BYTES, _MM_HINT_T0);
            all = _mm512_or_si512(all, _mm512_loadu_si512(at + d * TILE_ROW_BYTES));
        }
    }
    __asm__ volatile("" : : "v"(all));
}

static void find_block(struct many *m, int64_t begin)
{
    const int64_t k_bytes = AMX_GROUP * m->a.k_steps * TILE_ROW_BYTES;
    m->begin = begin;
    m->k_step = TILE_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        const int64_t at = begin + i * AMX_GROUP;
        pack_keys(amx_find_keys(&m->a, at, false, false, m->k_stage), m->a.k_steps,
                  m->kp + i * k_bytes);
        m->k[i] = (struct amx_keys){m->kp + i * k_bytes, TILE_ROW_BYTES};
        const struct amx_keys v = amx_natural_keys(&m->a, at, true);
        if (v.at != NULL) touch(v, m->a.v_steps);
    }
    ahead_from(&m->a, &m->ahead, begin + KEYS);
    m->part = 0;
    m->n_parts_v = KEY_STEPS * 2 * m->a.v_steps;
    /* All under the scores of the first pair, whose values are the first to want it. */
    m->parts_a_step = amx_div_up(m->n_parts_v, N_SUBS * m->a.k_steps);
}

/* Late: the keys of an item, which go through all pairs one after the other. */
static void find_item(struct many *m, int64_t begin, int sub)
{
    const int64_t k_bytes = AMX_GROUP * m->a.k_steps * TILE_ROW_BYTES;
    const int n = SUB_KEYS / AMX_GROUP;
    m->k_step = TILE_ROW_BYTES;
    for (int i = 0; i < n; i++) {
        const int64_t at = begin + sub * SUB_KEYS + i * AMX_GROUP;
        m->k[sub * n + i] = amx_find_keys(&m->a, at, false, true, m->k_stage + i * k_bytes);
    }
    ahead_from(&m->a, &m->ahead, begin + (sub + 1) * SUB_KEYS);
}

/* Spread evenly over a block: late over all products but those of the first pair with V, else over
 * items. (Where a first pair sees a part of a block it fetches as well: 9% more lines in that one,
 * of 96 rows.) Late, the first come while q is packed. */
static void plan_ahead(struct many *m)
{
    const int64_t n_pairs = amx_div_up(m->n_tiles, 2);
    const int64_t scores = N_SUBS * m->a.k_steps, values = KEY_STEPS * m->a.v_steps;
    /* Rows that see nothing: nothing lies there, wherever. */
    const int64_t begin = m->a.lo < m->a.hi ? m->a.lo / KEYS * KEYS : 0;
    const int64_t n_steps =
        m->is_late ? n_pairs * scores + (n_pairs - 1) * values : n_pairs * N_SUBS;
    const int64_t lines = ahead_begin(&m->a, &m->ahead, begin, KEYS, n_steps);
    m->first_units = 0;
    if (m->is_late)
        m->first_units =
            amx_div_up(lines * FIRST_PERCENT, 100 * UNIT_LINES * m->n_tiles * m->a.k_steps);
}

/* at[16], relative to begin, kept in the item. */
static void set_limits(const int64_t *at, int64_t begin, int32_t *limits)
{
    for (int i = 0; i < VF_LANES; i++)
        limits[i] = (int32_t)attn_max(attn_min(at[i] - begin, SUB_KEYS), 0);
}
static bool sees(const struct row_tile *t, int64_t begin, int64_t end)
{
    return t->hi > begin && t->lo < end;
}

/* In place: a copy would wait for what has just been written. */
static inline void set_item(const struct many *m, int64_t begin, int64_t tile, int n_tiles, int sub,
                            char *p, struct item *it)
{
    it->tile = tile;
    it->n_tiles = n_tiles;
    it->sub = sub;
    it->p = p;
    it->is_masked = false;
    begin += sub * SUB_KEYS;
    for (int i = 0; i < n_tiles; i++) {
        const struct row_tile *const t = m->tiles + tile + i;
        it->is_masked |= begin < t->all_lo || begin + SUB_KEYS > t->all_hi;
    }
    if (!it->is_masked && m->a.cap_scale == 0.0f) return;
    for (int i = 0; i < n_tiles; i++) {
        set_limits(m->row_lo + (tile + i) * VF_LANES, begin, it->limits + 32 * i);
        set_limits(m->row_hi + (tile + i) * VF_LANES, begin, it->limits + 32 * i + 16);
    }
}

/* Items of a block take turns: one gets its scores, and the softmax of the one before runs
 * meanwhile (of the one before that: gained nothing). */
struct items {
    _Alignas(64) int32_t limits[2][64];
    struct item two[2];
    int64_t n; /* with scores so far; the last of them has no weights yet */
};

static void items_begin(const struct many *m, struct items *items)
{
    items->n = 0;
    for (int i = 0; i < 2; i++)
        items->two[i] = (struct item){.s = m->s[i], .limits = items->limits[i]};
}
static void next_item(struct many *m, int64_t begin, const struct pair *pair, int n_tiles, int sub,
                      struct items *items, const struct pair *due, int64_t d)
{
    struct item *const now = &items->two[items->n % 2];
    const struct item *const before = items->n > 0 ? &items->two[(items->n + 1) % 2] : NULL;
    set_item(m, begin, pair->tile, n_tiles, sub, pair->p, now);
    do_item(m, now, m->s[items->n % 2], before, due, d);
    items->n++;
}
static void items_end(struct many *m, const struct items *items)
{
    if (items->n > 0) finish_item(m, &items->two[(items->n + 1) % 2]);
}

static bool pair_sees(const struct many *m, const struct pair *pair, int n_tiles, int64_t begin,
                      int sub)
{
    const int64_t at = begin + sub * SUB_KEYS;
    for (int i = 0; i < n_tiles; i++)
        if (sees(m->tiles + pair->tile + i, at, at + SUB_KEYS)) return true;
    return false;
}
/* Of keys that no row of the pair sees. */
static void zero_weights(const struct pair *pair, int n_tiles, int sub)
{
    for (int i = 0; i < n_tiles; i++) memset(pair->p + i * P_BYTES + sub * SUB_BYTES, 0, SUB_BYTES);
}

/* Many rows: pair by pair, and the values of one a slice at a time under the scores of the next,
 * from its second item on: then the last weights are there. */
static void attend_block(struct many *m, int64_t begin)
{
    struct items items;
    struct pair pairs[2];
    struct pair *due = NULL; /* its values from dim tile due_d on are to be added */
    int64_t due_d = 0;
    int n_pairs = 0; /* begun */
    items_begin(m, &items);
    find_block(m, begin);
    for (int64_t tile = 0; tile < m->n_tiles; tile += 2) {
        struct pair *const pair = &pairs[n_pairs % 2];
        const int n_tiles = tile + 2 <= m->n_tiles ? 2 : 1;
        int n_items = 0; /* of the pair, so far */
        *pair = (struct pair){tile, m->p + n_pairs % 2 * 2 * P_BYTES, N_SUBS, 0};
        for (int sub = 0; sub < N_SUBS; sub++) {
            if (!pair_sees(m, pair, n_tiles, begin, sub)) {
                zero_weights(pair, n_tiles, sub);
                continue;
            }
            const int64_t end = due != NULL ? n_items * m->dim_tiles / (N_SUBS - 1) : 0;
            const bool is_due = due_d < end;
            if (is_due) make_values(m, m->n_parts_v);
            next_item(m, begin, pair, n_tiles, sub, &items, is_due ? due : NULL, due_d);
            do_ahead(m);
            if (is_due) {
                add_values(m, due, due_d + 1, end);
                due_d = end;
            }
            if (sub < pair->sub_begin) pair->sub_begin = sub;
            pair->sub_end = sub + 1;
            n_items++;
        }
        if (n_items == 0) continue;
        if (due != NULL) add_values(m, due, due_d, m->dim_tiles);
        n_pairs++;
        due = pair;
        due_d = 0;
    }
    items_end(m, &items);
    if (due != NULL) add_values(m, due, due_d, m->dim_tiles);
}

/* Few rows: keys come from memory and go through all pairs; values wait for the last weights. */
static void attend_block_late(struct many *m, int64_t begin)
{
    struct items items;
    struct pair pairs[LATE_TILES / 2];
    const int n_pairs = (int)amx_div_up(m->n_tiles, 2);
    items_begin(m, &items);
    for (int i = 0; i < n_pairs; i++)
        pairs[i] = (struct pair){2 * i, m->p + i * 2 * P_BYTES, N_SUBS, 0};
    for (int sub = 0; sub < N_SUBS; sub++) {
        find_item(m, begin, sub);
        for (int i = 0; i < n_pairs; i++) {
            const int n_tiles = 2 * i + 2 <= m->n_tiles ? 2 : 1;
            if (!pair_sees(m, &pairs[i], n_tiles, begin, sub)) {
                zero_weights(&pairs[i], n_tiles, sub);
                continue;
            }
            next_item(m, begin, &pairs[i], n_tiles, sub, &items, NULL, 0);
            if (sub < pairs[i].sub_begin) pairs[i].sub_begin = sub;
            pairs[i].sub_end = sub + 1;
        }
    }
    items_end(m, &items);
    add_late_values(m, pairs, begin);
}

/* ---- a pass ---- */

/* q of a row tile as B tiles [16 dim pairs][16 rows][2], the two parts of every step together.
 * False: n_parts is 1, and something is left for a second. */
static bool pack_q(struct many *m, int64_t tile)
{
    const int64_t dk = m->a.job->dk;
    const int n = (int)attn_min(VF_LANES, m->n_rows - tile * VF_LANES);
    const vf sign = vf_set1(m->a.sign);
    char *at = m->q + tile * m->a.k_steps * m->n_parts * TILE_BYTES;
    const float *rows[VF_LANES];
    __m512i rest = _mm512_setzero_si512();
    for (int i = 0; i < n; i++) rows[i] = amx_q_row(&m->a, m->row0 + tile * VF_LANES + i);
    for (int64_t d = 0; d < dk; d += AMX_STEP, at += m->n_parts * TILE_BYTES) {
        vf part[2][VF_LANES];
        for (int i = 0; i < VF_LANES; i++) {
            vf x[2] = {vf_set1(0.0f), vf_set1(0.0f)};
            for (int j = 0; j < 2 && i < n; j++) {
                const int64_t left = dk - d - j * VF_LANES;
                const float *const q = rows[i] + d + j * VF_LANES;
                if (left > 0) x[j] = left >= VF_LANES ? vf_load(q) : vf_load_n(q, left);
                x[j] = vf_mul(x[j], sign);
            }
            rest = _mm512_or_si512(
                rest, _mm512_or_si512(_mm512_castps_si512(x[0]), _mm512_castps_si512(x[1])));
            const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
            part[0][i] = _mm512_castsi512_ps(high);
            if (m->n_parts == 1) continue;
            const __m256i halves[2] = {_mm512_castsi512_si256(high),
                                       _mm512_extracti64x4_epi64(high, 1)};
            for (int j = 0; j < 2; j++)
                x[j] = _mm512_sub_ps(x[j], amx_words_f32(_mm512_cvtepu16_epi32(halves[j])));
            part[1][i] = _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        }
        if (m->n_parts == 1 && _mm512_test_epi32_mask(rest, _mm512_set1_epi32(0xffff)) != 0)
            return false;
        for (int64_t i = 0; i < m->first_units; i++) ahead_unit(&m->a, &m->ahead);
        for (int j = 0; j < m->n_parts; j++) {
            vf_transpose(part[j]);
            for (int i = 0; i < VF_LANES; i++)
                _mm512_store_ps(at + j * TILE_BYTES + i * TILE_ROW_BYTES, part[j][i]);
        }
    }
    return true;
}
/* Of all rows of the pass; in one part where bf16 holds every element. */
static void pack_all_q(struct many *m)
{
    bool is_exact = true;
    m->n_parts = 1;
    for (int64_t tile = 0; tile < m->n_tiles && is_exact; tile++) is_exact = pack_q(m, tile);
    if (is_exact) return;
    m->n_parts = 2;
    for (int64_t tile = 0; tile < m->n_tiles; tile++) (void)pack_q(m, tile);
}

static void begin_tile(struct many *m, int64_t tile)
{
    struct row_tile *const t = m->tiles + tile;
    *t = (struct row_tile){INT64_MAX, INT64_MIN, INT64_MIN, INT64_MAX, !m->is_late};
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
}

/* 32 dims of a row from d on; which of them are infinite or NaN. */
AMX_INLINE __mmask16 end_row(float *out, int64_t d, int64_t dv, vf x0, vf x1)
{
    const int64_t left = dv - d;
    if (left >= AMX_STEP) {
        vf_store(out + d, x0);
        vf_store(out + d + VF_LANES, x1);
    } else {
        vf_store_n(out + d, x0, attn_min(left, VF_LANES));
        if (left > VF_LANES) vf_store_n(out + d + VF_LANES, x1, left - VF_LANES);
    }
    return _mm512_fpclass_ps_mask(x0, 0x99) | _mm512_fpclass_ps_mask(x1, 0x99);
}
/* O to rows of out, times their factors; false: something in it is infinite or NaN. + 0: a zero has
 * no sign that other rows could have changed. */
static bool end_late_o(struct many *m, int64_t tile, int n, const float *factors)
{
    const int64_t dv = m->a.job->dv;
    float *const o = m->o + tile * m->dim_tiles * 256;
    __mmask16 bad = 0;
    if (!m->tiles[tile].has_o) memset(o, 0, (size_t)(m->dim_tiles * TILE_BYTES));
    for (int r = 0; r < n; r++) {
        float *const out = amx_out_row(&m->a, m->row0 + tile * VF_LANES + r);
        const vf by = vf_set1(factors[r]);
        for (int64_t d = 0; d < dv; d += AMX_STEP) {
            const float *const at = o + d / 16 * 256 + r * 16;
            const vf x = vf_add(vf_mul(vf_load(at), by), vf_set1(0.0f));
            const vf y = vf_add(vf_mul(vf_load(at + 256), by), vf_set1(0.0f));
            const vf low = _mm512_shuffle_f32x4(x, y, 0x44); /* 0-3 8-11 4-7 12-15 */
            const vf high = _mm512_shuffle_f32x4(x, y, 0xee);
            bad |= end_row(out, d, dv, _mm512_shuffle_f32x4(low, low, 0xd8),
                           _mm512_shuffle_f32x4(high, high, 0xd8));
        }
    }
    return bad == 0;
}
/* The same of O^T. */
static bool end_o(const struct many *m, int64_t tile, int n, vf factor)
{
    const int64_t dv = m->a.job->dv;
    const float *const o = m->o + tile * m->dim_tiles * 256;
    __mmask16 bad = 0;
    for (int64_t d = 0; d < dv; d += AMX_STEP) {
        vf x[2][VF_LANES]; /* [half][dim, then row] */
        for (int h = 0; h < 2; h++) {
            const float *const at = o + (d / 16 + h) * 256;
            VF_UNROLL for (int i = 0; i < 16; i++) x[h][i] =
                vf_add(vf_mul(vf_load(at + i * 16), factor), vf_set1(0.0f));
            vf_transpose(x[h]);
        }
        for (int r = 0; r < n; r++)
            bad |=
                end_row(amx_out_row(&m->a, m->row0 + tile * VF_LANES + r), d, dv, x[0][r], x[1][r]);
    }
    return bad == 0;
}

static bool end_tile(struct many *m, int64_t tile)
{
    const __m512 weights = _mm512_load_ps(m->weight_sum + tile * VF_LANES);
    const __mmask16 is_empty = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_EQ_OQ);
    const __m512 factor = _mm512_div_ps(
        _mm512_set1_ps(1.0f), _mm512_mask_blend_ps(is_empty, weights, _mm512_set1_ps(1.0f)));
    const int n = (int)attn_min(VF_LANES, m->n_rows - tile * VF_LANES);
    _Alignas(64) float factors[VF_LANES];
    _mm512_store_ps(factors, factor);
    bool is_good = m->is_late ? end_late_o(m, tile, n, factors) : end_o(m, tile, n, factor);
    for (int r = 0; r < n; r++) {
        const int64_t i = tile * VF_LANES + r;
        const double sum = (double)m->sum[i] + (double)m->sum_low[i];
        float *const lse = amx_lse_row(&m->a, m->row0 + i);
        *lse = sum == 0.0
                   ? -INFINITY
                   : (float)(((double)m->max[i] + log2(sum / (double)weight_up)) * m->a.unit);
        const bool is_low = m->max[i] == amx_no_max && m->row_lo[i] < m->row_hi[i];
        if (amx_is_huge(m->max[i]) || is_low) *lse = NAN;
        if (!(*lse < INFINITY)) is_good = false;
    }
    return is_good;
}

/* Regions of the scratch, or none where base is NULL; returns their size. */
static size_t carve(struct many *m, int64_t n_tiles, void *base)
{
    uintptr_t at = (uintptr_t)base;
    const int64_t lanes = n_tiles * VF_LANES * (int64_t)sizeof(float);
    m->a.zeros = amx_take(&at, attn_max(m->a.k_steps, m->a.v_steps) * TILE_ROW_BYTES);
    for (int i = 0; i < 2; i++) m->s[i] = amx_take(&at, 2 * SUB_KEYS * TILE_ROW_BYTES);
    m->p = amx_take(&at, (m->is_late ? amx_div_up(n_tiles, 2) * 2 : 4) * P_BYTES);
    m->tiles = amx_take(&at, n_tiles * (int64_t)sizeof(*m->tiles));
    m->row_lo = amx_take(&at, 2 * lanes);
    m->row_hi = amx_take(&at, 2 * lanes);
    m->max = amx_take(&at, lanes);
    m->sum = amx_take(&at, lanes);
    m->sum_low = amx_take(&at, lanes);
    m->weight_sum = amx_take(&at, lanes);
    m->q = amx_take(&at, n_tiles * m->a.k_steps * 2 * TILE_BYTES);
    m->vt = amx_take(&at, (m->is_late ? 2 : m->dim_tiles) * KEY_STEPS * TILE_BYTES);
    m->o = amx_take(&at, n_tiles * m->dim_tiles * TILE_BYTES);
    if (!m->is_late) m->kp = amx_take(&at, KEYS * m->a.k_steps * TILE_ROW_BYTES);
    m->k_stage = amx_take(&at, SUB_KEYS * m->a.k_steps * TILE_ROW_BYTES);
    m->v_stage =
        amx_take(&at, (m->is_late ? N_GROUPS : 2) * AMX_GROUP * m->a.v_steps * TILE_ROW_BYTES);
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
    const int64_t n_tiles = amx_div_up(rows, VF_LANES);
    m.is_late = n_tiles <= LATE_TILES;
    const size_t n_bytes = carve(&m, n_tiles, NULL);
    /* A job of fewer rows may be late where the largest is not. */
    m.is_late = true;
    const size_t late_bytes = carve(&m, attn_min(n_tiles, LATE_TILES), NULL);
    return n_bytes > late_bytes ? n_bytes : late_bytes;
}

static bool attend_pass(struct many *m)
{
    const struct dcp__attn_job *const job = m->a.job;
    m->n_tiles = amx_div_up(m->n_rows, VF_LANES);
    m->is_late = m->n_tiles <= LATE_TILES;
    m->part = m->n_parts_v = 0;
    carve(m, m->n_tiles, job->scratch);
    memset(m->a.zeros, 0, (size_t)(attn_max(m->a.k_steps, m->a.v_steps) * TILE_ROW_BYTES));
    if (!m->is_late) memset(m->o, 0, (size_t)(m->n_tiles * m->dim_tiles * TILE_BYTES));
    for (int64_t tile = 0; tile < m->n_tiles; tile++) begin_tile(m, tile);
    amx_set_hull(&m->a, m->row0 / job->n_group, (m->row0 + m->n_rows - 1) / job->n_group + 1);
    plan_ahead(m); /* q is packed under its first lines */
    pack_all_q(m);
    if (m->a.lo < m->a.hi) {
        tile_begin_all();
        for (int64_t at = m->a.lo / KEYS * KEYS; at < m->a.hi; at += KEYS) {
            if (amx_are_unseen(&m->a, at, at + KEYS)) continue;
            m->is_late ? attend_block_late(m, at) : attend_block(m, at);
        }
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
