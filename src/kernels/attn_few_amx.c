/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention on AMX tiles, few rows (decode): float32-grade, K and V in natural rows.
 *
 * Idea. Rows are few, so tiles have room, and the room goes to accuracy: q is three bf16 parts side
 * by side in the columns of one B tile, weights are two parts in rows of one A tile.
 *
 *     S^T [16 keys][3 parts x 4 rows] = K (16 keys x 32 dims, natural) * Q;   s = hi + (mid + low)
 *     O [4 rows x {hi, low} x {even, odd}][16 dim pairs] += P * V (16 keys x 32 dims, natural)
 *
 * A dword of a natural V tile holds two dims of one key, where the product wants two keys of one
 * dim; so a row (p, 0, p, 0, ...) collects the even dims and a row (0, p, 0, p, ...) the odd ones.
 *
 *     P tile   rows 0-3   hi, even     out[2n]     = O[h][n]     + O[8 + h][n]
 *              rows 4-7   hi, odd      out[2n + 1] = O[4 + h][n] + O[12 + h][n]
 *              rows 8-15  low, even and odd
 *
 * Weights keep 2^-17 of each and are divided by the sum of what was kept; lse is of the unrounded.
 * Blocks of 64 keys; a row's reference maximum is an integer and moves only if a score exceeds it
 * by 2^40, so O is hardly ever rescaled: up to 4 rows and 128 dims it stays in tile registers from
 * the first key to the last.
 *
 * Instructions for 16 keys, R rows, Dk and Dv dims, n = ceil(R / 4):
 *     products    n * (Dk + Dv) / 32                4 + 4 at R <= 4, 128/128: the least there is
 *     loads       K and Q n * Dk / 32 each, V the same or half of it (2 x 2), P n to n * Dv / 64
 *     C           none in registers; else 2 * n * Dv / 32 (one P tile), a quarter of it (2 x 2)
 *     vectors     36 shuffles per 4 rows (parts summed, transposition), about 20 a row
 * Tiles are counted from the code (tests/kernels/test_attn_amx.c prints the counts).
 *
 * Speed (Emerald Rapids class, 2.6 GHz, one thread, plain read 17.5 GB/s, bench_attn): share of a
 * plain read of the same keys from memory at 128/128 x 4 rows 0.90 (0.85-0.92), 64/64 x 3 0.70,
 * 256/256 x 4 0.74, 128/128 x 8 0.64, x 16 0.48. Compute alone, from L2: 0.19 us for 16 keys at
 * 128/128 x 4, beside 0.47 us of memory. A loop of nothing but these tile loads reaches 1.0, with
 * their prefetches and products 0.92: they, not the softmax, are what is left.
 *
 * Limits R <= AMX_FEW_ROWS. Scratch per dcp__attn_amx_few_bytes. */
#include "kernels/attn_tiles_amx.h"

enum {
    KEYS = DCP__ATTN_KEY_BLOCK,
    N_GROUPS = KEYS / AMX_GROUP,
    ROWS = 4,   /* of a Q tile, in three parts, and of a P tile */
    V_COLS = 4, /* tiles of V, and of O, at a time */
    SUMS = 8    /* lanes of a running sum */
};

/* What memory does meanwhile: rows on their way to L2, in the order in which tiles will read them,
 * at the pace at which they do, FETCH_LINES ahead. At 32 heads of 128 over 8 KV heads, 32,768 keys
 * (share of a plain read's speed, one thread): 24 lines ahead 0.76, 40 0.85, 48 to 64 0.89-0.91;
 * more than the page of 64 lines ahead 0.80, as the hardware's prefetcher then has two pages to
 * follow. Into L1 instead of L2: 0.03 less. Nothing ahead at all: 0.77. */
enum { FETCH_LINES = 56, STEP_LINES = 16 /* lines that a product uses up */, FRACTION = 16 };

struct fetch {
    const char *at;               /* the next row */
    int64_t stride, n_lines, row; /* of this group */
    int64_t due, a_step, rest;    /* lines, in 1 / FRACTION; rest: at a block's end */
    int slot, group;              /* of the block; groups of V come after those of K */
    bool is_latent;
};

struct few {
    struct amx_job a;
    int64_t n_tiles;        /* of rows */
    bool is_in_tiles;       /* O, from first key to last: tiles 0-3 */
    int64_t all_lo, all_hi; /* what all rows see */
    int64_t *row_lo, *row_hi;
    char *q;      /* [n_tiles][k_steps] tiles */
    float *s_raw; /* [N_GROUPS] tiles [key][column] */
    float *s;     /* [ROWS][KEYS] of one tile */
    char *p;      /* [n_tiles][N_GROUPS] tiles */
    float *o;     /* [n_tiles][v_steps] tiles */
    float *max;
    double *sum, *weight_sum; /* [n_rows][SUMS], of the weights; of what products take them for */
    char *k_stage, *v_stage;  /* [2][N_GROUPS] groups of rows */
    struct amx_keys k[2][N_GROUPS], v[2][N_GROUPS]; /* of this block and the next */
    struct fetch fetch;
};

/* ---- memory ---- */

static void fetch_find(struct few *f)
{
    struct fetch *const x = &f->fetch;
    const bool is_value = x->group >= N_GROUPS;
    const struct amx_keys keys =
        is_value ? f->v[x->slot][x->group - N_GROUPS] : f->k[x->slot][x->group];
    x->at = keys.at;
    x->stride = keys.stride;
    x->n_lines = is_value ? f->a.v_steps : f->a.k_steps;
    x->row = 0;
}
static void fetch_begin(struct few *f)
{
    struct fetch *const x = &f->fetch;
    *x = (struct fetch){.due = FETCH_LINES * FRACTION, .a_step = STEP_LINES * FRACTION};
    x->is_latent = amx_is_latent(&f->a);
    if (x->is_latent) { /* K's lines alone, spread over the products with V as well */
        const int64_t steps = f->a.k_steps + f->a.v_steps;
        x->rest = N_GROUPS * (x->a_step * f->a.k_steps % steps);
        x->a_step = x->a_step * f->a.k_steps / steps;
    }
    fetch_find(f);
}
static __attribute__((noinline)) void fetch_next_group(struct few *f)
{
    struct fetch *const x = &f->fetch;
    if (++x->group == (x->is_latent ? N_GROUPS : 2 * N_GROUPS)) {
        x->group = 0;
        x->slot = !x->slot;
    }
    fetch_find(f);
}
/* After a product. is_first: of the first rows, for which keys come from memory. */
AMX_INLINE void fetch(struct few *f, bool is_first)
{
    struct fetch *const x = &f->fetch;
    if (!is_first) return;
    for (x->due += x->a_step; x->due >= x->n_lines * FRACTION; x->due -= x->n_lines * FRACTION) {
        const char *const at = x->at;
        int64_t i = 0;
        for (; i + 4 <= x->n_lines; i += 4)
            VF_UNROLL for (int j = 0; j < 4; j++)
                _mm_prefetch(at + (i + j) * TILE_ROW_BYTES, _MM_HINT_T1);
        for (; i < x->n_lines; i++) _mm_prefetch(at + i * TILE_ROW_BYTES, _MM_HINT_T1);
        x->at = at + x->stride;
        if (++x->row == AMX_GROUP) fetch_next_group(f);
    }
}

/* ---- the two products ---- */

/* S^T of a Q tile, group by group, so that keys are read in the order they lie in. */
AMX_INLINE void scores(struct few *f, int64_t tile, const struct amx_keys *k, bool is_first)
{
    const char *const q = f->q + tile * f->a.k_steps * TILE_BYTES;
    const int64_t end = f->a.k_steps * TILE_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        const char *at = k[i].at;
        int64_t d = 0;
        TILE_ZERO(4);
        for (; d + TILE_BYTES < end; d += 2 * TILE_BYTES, at += 2 * TILE_ROW_BYTES) {
            TILE_LOAD(5, q + d, TILE_ROW_BYTES);
            TILE_STREAM(6, at, k[i].stride);
            TILE_DP(4, 6, 5);
            fetch(f, is_first);
            TILE_LOAD(5, q + d + TILE_BYTES, TILE_ROW_BYTES);
            TILE_STREAM(7, at + TILE_ROW_BYTES, k[i].stride);
            TILE_DP(4, 7, 5);
            fetch(f, is_first);
        }
        if (d < end) {
            TILE_LOAD(5, q + d, TILE_ROW_BYTES);
            TILE_STREAM(6, at, k[i].stride);
            TILE_DP(4, 6, 5);
            fetch(f, is_first);
        }
        TILE_STORE(4, f->s_raw + i * 256, TILE_ROW_BYTES);
    }
}

/* O of n columns from o on, from memory and back: tiles 0 to n - 1. */
AMX_INLINE void load_o(const float *o, int n)
{
    TILE_LOAD(0, o, TILE_ROW_BYTES);
    if (n > 1) TILE_LOAD(1, o + 256, TILE_ROW_BYTES);
    if (n > 2) TILE_LOAD(2, o + 512, TILE_ROW_BYTES);
    if (n > 3) TILE_LOAD(3, o + 768, TILE_ROW_BYTES);
}
AMX_INLINE void store_o(float *o, int n)
{
    TILE_STORE(0, o, TILE_ROW_BYTES);
    if (n > 1) TILE_STORE(1, o + 256, TILE_ROW_BYTES);
    if (n > 2) TILE_STORE(2, o + 512, TILE_ROW_BYTES);
    if (n > 3) TILE_STORE(3, o + 768, TILE_ROW_BYTES);
}

/* O += P V of one P tile, 16 keys and n columns of V from dim tile d on. */
AMX_INLINE void values_columns(struct few *f, int64_t tile, int i, int64_t d,
                               const struct amx_keys *v, int n, bool is_first)
{
    float *const o = f->o + (tile * f->a.v_steps + d) * 256;
    const char *const at = v[i].at + d * TILE_ROW_BYTES;
    if (!f->is_in_tiles) load_o(o, n);
    TILE_LOAD(5, f->p + (tile * N_GROUPS + i) * TILE_BYTES, TILE_ROW_BYTES);
    TILE_STREAM(6, at, v[i].stride);
    TILE_DP(0, 5, 6);
    fetch(f, is_first);
    if (n > 1) {
        TILE_STREAM(7, at + TILE_ROW_BYTES, v[i].stride);
        TILE_DP(1, 5, 7);
        fetch(f, is_first);
    }
    if (n > 2) {
        TILE_STREAM(6, at + 2 * TILE_ROW_BYTES, v[i].stride);
        TILE_DP(2, 5, 6);
        fetch(f, is_first);
    }
    if (n > 3) {
        TILE_STREAM(7, at + 3 * TILE_ROW_BYTES, v[i].stride);
        TILE_DP(3, 5, 7);
        fetch(f, is_first);
    }
    if (!f->is_in_tiles) store_o(o, n);
}
static void values_one(struct few *f, int64_t tile, const struct amx_keys *v)
{
    const int64_t n = f->a.v_steps;
    for (int i = 0; i < N_GROUPS; i++) {
        int64_t d = 0;
        for (; d + V_COLS <= n; d += V_COLS) values_columns(f, tile, i, d, v, V_COLS, tile == 0);
        switch (n - d) {
        case 1:
            values_columns(f, tile, i, d, v, 1, tile == 0);
            break;
        case 2:
            values_columns(f, tile, i, d, v, 2, tile == 0);
            break;
        case 3:
            values_columns(f, tile, i, d, v, 3, tile == 0);
            break;
        default:
            break;
        }
    }
}

/* Two P tiles by two columns. */
AMX_INLINE void values_2x2(struct few *f, int64_t tile, int64_t d, const struct amx_keys *v,
                           bool is_first)
{
    float *const o0 = f->o + (tile * f->a.v_steps + d) * 256;
    float *const o1 = o0 + f->a.v_steps * 256;
    const char *const p0 = f->p + tile * N_GROUPS * TILE_BYTES;
    const char *const p1 = p0 + N_GROUPS * TILE_BYTES;
    TILE_LOAD(0, o0, TILE_ROW_BYTES);
    TILE_LOAD(1, o0 + 256, TILE_ROW_BYTES);
    TILE_LOAD(2, o1, TILE_ROW_BYTES);
    TILE_LOAD(3, o1 + 256, TILE_ROW_BYTES);
    for (int i = 0; i < N_GROUPS; i++) {
        const char *const at = v[i].at + d * TILE_ROW_BYTES;
        TILE_LOAD(4, p0 + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_LOAD(6, at, v[i].stride);
        TILE_DP(0, 4, 6);
        fetch(f, is_first);
        TILE_LOAD(7, at + TILE_ROW_BYTES, v[i].stride);
        TILE_DP(1, 4, 7);
        fetch(f, is_first);
        TILE_LOAD(5, p1 + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(2, 5, 6);
        TILE_DP(3, 5, 7);
    }
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o0 + 256, TILE_ROW_BYTES);
    TILE_STORE(2, o1, TILE_ROW_BYTES);
    TILE_STORE(3, o1 + 256, TILE_ROW_BYTES);
}

/* All columns of V. */
static void add_values(struct few *f, const struct amx_keys *v)
{
    int64_t tile = 0;
    for (; tile + 2 <= f->n_tiles; tile += 2) {
        int64_t d = 0;
        for (; d + 2 <= f->a.v_steps; d += 2) {
            if (tile == 0)
                values_2x2(f, tile, d, v, true);
            else
                values_2x2(f, tile, d, v, false);
        }
        if (d == f->a.v_steps) continue;
        for (int i = 0; i < N_GROUPS; i++) {
            values_columns(f, tile, i, d, v, 1, tile == 0);
            values_columns(f, tile + 1, i, d, v, 1, false);
        }
    }
    if (tile < f->n_tiles) values_one(f, tile, v);
}

/* ---- softmax ---- */

/* Scores of 16 keys, raw [key][part][row], to s[row][KEYS], parts summed. */
AMX_INLINE void gather_scores(const float *raw, float *s)
{
    /* sum[i], lanes 4 j + r: key 4 j + i, row r */
    vf sum[4];
    VF_UNROLL for (int i = 0; i < 4; i++)
    {
        const vf k0 = vf_load(raw + i * 16);
        const vf k1 = vf_load(raw + (4 + i) * 16);
        const vf k2 = vf_load(raw + (8 + i) * 16);
        const vf k3 = vf_load(raw + (12 + i) * 16);
        const vf a = _mm512_shuffle_f32x4(k0, k1, 0x44); /* parts 0 1 of both */
        const vf b = _mm512_shuffle_f32x4(k2, k3, 0x44);
        const vf c = _mm512_shuffle_f32x4(k0, k1, 0xee); /* parts 2 3 */
        const vf d = _mm512_shuffle_f32x4(k2, k3, 0xee);
        sum[i] = vf_add(_mm512_shuffle_f32x4(a, b, 0x88),
                        vf_add(_mm512_shuffle_f32x4(a, b, 0xdd), _mm512_shuffle_f32x4(c, d, 0x88)));
    }
    const vf t0 = _mm512_unpacklo_ps(sum[0], sum[1]);
    const vf t1 = _mm512_unpacklo_ps(sum[2], sum[3]);
    const vf t2 = _mm512_unpackhi_ps(sum[0], sum[1]);
    const vf t3 = _mm512_unpackhi_ps(sum[2], sum[3]);
#define PAIRS(op, x, y)                                                                            \
    _mm512_castpd_ps(_mm512_unpack##op##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
    vf_store(s, PAIRS(lo, t0, t1));
    vf_store(s + KEYS, PAIRS(hi, t0, t1));
    vf_store(s + 2 * KEYS, PAIRS(lo, t2, t3));
    vf_store(s + 3 * KEYS, PAIRS(hi, t2, t3));
#undef PAIRS
}

/* O and the sums of row r times 2^by, by an integer. */
static __attribute__((noinline)) void rescale(const struct few *f, int64_t r, float by)
{
    const vf factor = _mm512_scalef_ps(vf_set1(1.0f), vf_set1(by));
    const double factor_pd = (double)_mm512_cvtss_f32(factor);
    float *const o = f->o + r / ROWS * f->a.v_steps * 256;
    if (f->is_in_tiles) store_o(o, (int)f->a.v_steps);
    for (int64_t d = 0; d < f->a.v_steps; d++) {
        for (int part = 0; part < 4; part++) {
            float *const at = o + d * 256 + (part * ROWS + r % ROWS) * 16;
            vf_store(at, vf_mul(vf_load(at), factor));
        }
    }
    if (f->is_in_tiles) load_o(o, (int)f->a.v_steps);
    for (int i = 0; i < SUMS; i++) {
        f->sum[r * SUMS + i] *= factor_pd;
        f->weight_sum[r * SUMS + i] *= factor_pd;
    }
}

/* x rounded to bf16, ties away from 0, as float32. */
AMX_INLINE __m512i round_bf16(__m512 x)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half),
                            _mm512_set1_epi32((int)0xffff0000u));
}
AMX_INLINE void add_sum(double *sum, const vf x[N_GROUPS])
{
    const vf s = vf_add(vf_add(x[0], x[1]), vf_add(x[2], x[3]));
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(s));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(s, 1));
    _mm512_store_pd(sum, _mm512_add_pd(_mm512_load_pd(sum), _mm512_add_pd(low, high)));
}

/* Scores s[KEYS] of row r to weights in its P tile. Masked: keys [first, end) of the block are
 * visible. */
AMX_INLINE void weigh_row(const struct few *f, int64_t r, const float *s, bool is_plain,
                          int64_t first, int64_t end)
{
    char *const p = f->p + r / ROWS * N_GROUPS * TILE_BYTES + r % ROWS * TILE_ROW_BYTES;
    const vf scale2 = vf_set1(f->a.scale2);
    vf x[N_GROUPS];
    vf rounded[N_GROUPS];
    VF_UNROLL for (int i = 0; i < N_GROUPS; i++)
    {
        x[i] = vf_load(s + i * VF_LANES);
        if (is_plain) continue;
        if (f->a.cap_scale != 0.0f) x[i] = vf_tanh(vf_mul(x[i], vf_set1(f->a.cap_scale)));
        x[i] = vf_keep_range(x[i], i * VF_LANES, first, end);
    }
    vf max = vf_set1(f->max[r]);
    const vf top = vf_mul(vf_max(vf_max(x[0], x[1]), vf_max(x[2], x[3])), scale2);
    if (_mm512_cmp_ps_mask(top, vf_add(max, vf_set1(amx_slack)), _CMP_GT_OQ) != 0) {
        const float new_max = ceilf(vf_max64(x) * f->a.scale2);
        rescale(f, r, f->max[r] - new_max);
        f->max[r] = new_max;
        max = vf_set1(new_max);
    }
    VF_UNROLL for (int i = 0; i < N_GROUPS; i++)
    {
        x[i] = amx_exp2(vf_fms(x[i], scale2, max));
        const __m512i high = round_bf16(x[i]);
        const __m512i low = round_bf16(_mm512_sub_ps(x[i], _mm512_castsi512_ps(high)));
        rounded[i] = vf_add(_mm512_castsi512_ps(high), _mm512_castsi512_ps(low)); /* exact */
        char *const at = p + i * TILE_BYTES;
        _mm512_store_si512(at, _mm512_srli_epi32(high, 16));
        _mm512_store_si512(at + 4 * TILE_ROW_BYTES, high);
        _mm512_store_si512(at + 8 * TILE_ROW_BYTES, _mm512_srli_epi32(low, 16));
        _mm512_store_si512(at + 12 * TILE_ROW_BYTES, low);
    }
    add_sum(f->sum + r * SUMS, x);
    add_sum(f->weight_sum + r * SUMS, rounded);
}

/* Softmax of a Q tile's rows in the block at begin, scores in s_raw. */
static void weigh_tile(struct few *f, int64_t tile, int64_t begin)
{
    const int64_t end = attn_min((tile + 1) * ROWS, f->a.n_rows);
    const bool is_plain = f->a.cap_scale == 0.0f && begin >= f->all_lo && begin + KEYS <= f->all_hi;
    for (int i = 0; i < N_GROUPS; i++) {
        gather_scores(f->s_raw + i * 256, f->s + i * AMX_GROUP);
    }
    for (int64_t r = tile * ROWS; r < end; r++) {
        const float *const s = f->s + r % ROWS * KEYS;
        if (is_plain)
            weigh_row(f, r, s, true, 0, KEYS);
        else /* a row that sees nothing here: weights 0, nothing else changes */
            weigh_row(f, r, s, false, attn_max(attn_min(f->row_lo[r] - begin, KEYS), 0),
                      attn_max(attn_min(f->row_hi[r] - begin, KEYS), 0));
    }
}

/* ---- blocks ---- */

static void find_keys(struct few *f, int64_t begin, int slot)
{
    const int64_t k_bytes = AMX_GROUP * f->a.k_steps * TILE_ROW_BYTES;
    const int64_t v_bytes = AMX_GROUP * f->a.v_steps * TILE_ROW_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        const int64_t at = begin + i * AMX_GROUP;
        const int64_t stage = slot * N_GROUPS + i;
        f->k[slot][i] = amx_find_keys(&f->a, at, false, false, f->k_stage + stage * k_bytes);
        f->v[slot][i] = amx_find_keys(&f->a, at, true, false, f->v_stage + stage * v_bytes);
    }
}

/* The block at begin, whose keys are in slot slot; those of the next one are in the other. */
static void attend_block(struct few *f, int64_t begin, int slot)
{
    for (int64_t tile = 0; tile < f->n_tiles; tile++) {
        if (tile == 0)
            scores(f, tile, f->k[slot], true);
        else
            scores(f, tile, f->k[slot], false);
        weigh_tile(f, tile, begin);
    }
    add_values(f, f->v[slot]);
    f->fetch.due += f->fetch.rest;
}

static double sum_of(const double *lanes)
{
    return _mm512_reduce_add_pd(_mm512_load_pd(lanes));
}

static bool finish_row(const struct few *f, int64_t r)
{
    float *const out = amx_out_row(&f->a, r);
    const double sum = sum_of(f->sum + r * SUMS);
    const vf divisor = vf_set1(sum == 0.0 ? 1.0f : (float)sum_of(f->weight_sum + r * SUMS));
    const float *const o = f->o + r / ROWS * f->a.v_steps * 256 + r % ROWS * 16;
    const __m512i low_half =
        _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high_half = _mm512_add_epi32(low_half, _mm512_set1_epi32(8));
    __mmask16 bad = 0;
    for (int64_t d = 0; d < f->a.v_steps; d++) {
        const float *const at = o + d * 256;
        const vf even = vf_add(vf_load(at), vf_load(at + 8 * 16));
        const vf odd = vf_add(vf_load(at + 4 * 16), vf_load(at + 12 * 16));
        vf x[2] = {_mm512_permutex2var_ps(even, low_half, odd),
                   _mm512_permutex2var_ps(even, high_half, odd)};
        for (int i = 0; i < 2; i++) {
            const int64_t first = d * AMX_STEP + i * VF_LANES;
            const int64_t left = f->a.job->dv - first;
            if (left <= 0) continue;
            /* + 0: a zero has no sign that other rows could have changed */
            x[i] = vf_add(vf_div(x[i], divisor), vf_set1(0.0f));
            bad |= _mm512_fpclass_ps_mask(x[i], 0x99); /* NaN, infinities */
            if (left >= VF_LANES)
                vf_store(out + first, x[i]);
            else
                vf_store_n(out + first, x[i], left);
        }
    }
    float *const lse = amx_lse_row(&f->a, r);
    *lse = sum == 0.0 ? -INFINITY : (float)(((double)f->max[r] + log2(sum)) * f->a.unit);
    const bool is_low = f->max[r] == amx_no_max && f->row_lo[r] < f->row_hi[r];
    if (amx_is_huge(f->max[r]) || is_low) *lse = NAN;
    return bad == 0 && *lse < INFINITY && sum >= 0.0 && sum < (double)INFINITY;
}

/* Row r of the job to three columns of its B tile [16 dim pairs][16 columns][2]: parts that sum to
 * sign * q, exactly. */
static void pack_q(const struct few *f, int64_t r)
{
    const float *const q = amx_q_row(&f->a, r);
    const int64_t dk = f->a.job->dk;
    char *const tiles = f->q + r / ROWS * f->a.k_steps * TILE_BYTES;
    const __m256i rows = _mm256_setr_epi32(0, 64, 128, 192, 256, 320, 384, 448);
    for (int64_t d = 0; d < dk; d += VF_LANES) {
        vf rest = dk - d >= VF_LANES ? vf_load(q + d) : vf_load_n(q + d, dk - d);
        rest = vf_mul(rest, vf_set1(f->a.sign));
        char *const at = tiles + d / AMX_STEP * TILE_BYTES + d % AMX_STEP / 2 * TILE_ROW_BYTES;
        for (int i = 0; i < 3; i++) {
            const __m256i part = (__m256i)_mm512_cvtneps_pbh(rest);
            rest = _mm512_sub_ps(rest, amx_words_f32(_mm512_cvtepu16_epi32(part)));
            _mm256_i32scatter_epi32(at + 4 * (i * ROWS + r % ROWS), rows, part, 1);
        }
    }
}

/* Regions of the scratch, or none where base is NULL; returns their size. */
static size_t carve(struct few *f, void *base)
{
    uintptr_t at = (uintptr_t)base;
    const int64_t tiles = TILE_BYTES;
    const int64_t sums = AMX_FEW_ROWS * SUMS * (int64_t)sizeof(double);
    f->a.zeros = amx_take(&at, attn_max(f->a.k_steps, f->a.v_steps) * TILE_ROW_BYTES);
    f->q = amx_take(&at, f->n_tiles * f->a.k_steps * tiles);
    f->s_raw = amx_take(&at, N_GROUPS * tiles);
    f->s = amx_take(&at, ROWS * KEYS * (int64_t)sizeof(float));
    f->p = amx_take(&at, f->n_tiles * N_GROUPS * tiles);
    f->o = amx_take(&at, f->n_tiles * f->a.v_steps * tiles);
    f->row_lo = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(int64_t));
    f->row_hi = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(int64_t));
    f->max = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(float));
    f->sum = amx_take(&at, sums);
    f->weight_sum = amx_take(&at, sums);
    f->k_stage = amx_take(&at, 2 * KEYS * f->a.k_steps * TILE_ROW_BYTES);
    f->v_stage = amx_take(&at, 2 * KEYS * f->a.v_steps * TILE_ROW_BYTES);
    return (size_t)(at - (uintptr_t)base);
}

size_t dcp__attn_amx_few_bytes(int64_t n_rows, int64_t dk, int64_t dv)
{
    struct few f;
    f.a.k_steps = amx_div_up(dk, AMX_STEP);
    f.a.v_steps = amx_div_up(dv, AMX_STEP);
    f.n_tiles = amx_div_up(attn_min(n_rows, AMX_FEW_ROWS), ROWS);
    return carve(&f, NULL);
}

static void begin_row(struct few *f, int64_t r)
{
    attn_row_range(f->a.job, r / f->a.job->n_group, &f->row_lo[r], &f->row_hi[r]);
    f->all_lo = attn_max(f->all_lo, f->row_lo[r]);
    f->all_hi = attn_min(f->all_hi, f->row_hi[r]);
    f->max[r] = amx_no_max;
    for (int i = 0; i < SUMS; i++) f->sum[r * SUMS + i] = f->weight_sum[r * SUMS + i] = 0.0;
    pack_q(f, r);
}

static void attend_all(struct few *f)
{
    const int n_columns = (int)f->a.v_steps;
    int64_t begin = f->a.lo / KEYS * KEYS;
    int slot = 0;
    tile_begin_all();
    if (f->is_in_tiles) load_o(f->o, n_columns);
    find_keys(f, begin, slot);
    fetch_begin(f);
    for (; begin < f->a.hi; begin += KEYS, slot = !slot) {
        find_keys(f, begin + KEYS, !slot);
        if (!amx_is_unseen(&f->a, begin)) attend_block(f, begin, slot);
    }
    if (f->is_in_tiles) store_o(f->o, n_columns);
    tile_end_all();
}

bool dcp__attn_amx_few(const struct dcp__attn_job *job)
{
    struct few f;
    amx_job_begin(&f.a, job);
    amx_set_hull(&f.a, 0, job->n_tokens);
    f.n_tiles = amx_div_up(f.a.n_rows, ROWS);
    f.is_in_tiles = f.n_tiles == 1 && f.a.v_steps <= V_COLS;
    carve(&f, job->scratch);
    memset(f.a.zeros, 0, (size_t)(attn_max(f.a.k_steps, f.a.v_steps) * TILE_ROW_BYTES));
    memset(f.q, 0, (size_t)(f.n_tiles * f.a.k_steps * TILE_BYTES));
    memset(f.p, 0, (size_t)(f.n_tiles * N_GROUPS * TILE_BYTES));
    memset(f.o, 0, (size_t)(f.n_tiles * f.a.v_steps * TILE_BYTES));
    f.all_lo = INT64_MIN;
    f.all_hi = INT64_MAX;
    for (int64_t r = 0; r < f.a.n_rows; r++) begin_row(&f, r);
    if (f.a.lo < f.a.hi) attend_all(&f);
    bool is_good = true;
    for (int64_t r = 0; r < f.a.n_rows; r++)
        if (!finish_row(&f, r)) is_good = false;
    return is_good;
}
