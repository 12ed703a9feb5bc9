/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention on AMX tiles, few rows (decode): float32-grade, K and V in natural rows.
 *
 * Idea. Rows are few, so tiles have room, and the room goes to accuracy: q is three bf16 parts side
 * by side in the columns of one B tile, weights are two parts in rows of one A tile.
 *
 *     S^T [16 keys][5 rows x 3 parts] = K (16 keys x 32 dims, natural) * Q;   s = hi + (mid + low)
 *     O [4 rows x {hi, low} x {even, odd}][16 dim pairs] += P * V (16 keys x 32 dims, natural)
 *
 * A dword of a natural V tile holds two dims of one key, where the product wants two keys of one dim;
 * so a row (p, 0, p, 0, ...) collects the even dims and a row (0, p, 0, p, ...) the odd ones.
 *
 *     P tile   rows 0-3   hi, even     out[2n]     = O[h][n]     + O[8 + h][n]
 *              rows 4-7   hi, odd      out[2n + 1] = O[4 + h][n] + O[12 + h][n]
 *              rows 8-15  low, even and odd
 *
 * Weights keep 2^-17 of each and are divided by the sum of what was kept; lse is of the unrounded.
 * Blocks of 64 keys; a row's reference maximum is an integer and moves only if a score exceeds it by
 * 2^40, so O is hardly ever rescaled.
 *
 * Instructions for 16 keys, R rows, Dk and Dv dims (n5 = ceil(R / 5), n4 = ceil(R / 4)):
 *     products    n5 * Dk / 32 + n4 * Dv / 32       4 + 4 at R <= 4, 128/128: the least there is
 *     loads       K n5 * Dk / 32, Q the same / 4, V and P about half a load a product each (2 x 2)
 *     C           2 * n4 * Dv / 32 / 4 loads and stores, in L1
 *     vectors     64 shuffles per 5 rows (transposition), about 30 a row
 * Tiles are counted from the code (tests/kernels/test_attn_amx.c prints the counts): 128 cycles of
 * products for the 8 KB of 16 keys at R = 4, 128/128, which take 1,700 cycles to arrive at 15 GB/s.
 * The vector code, timed alone with the tile instructions left out (Sapphire Rapids class, 2.8 GHz,
 * from L2): 0.17 us for 16 keys at R = 4, 0.24 at 8, 0.75 at 32, beside 0.55 us of memory; so bound
 * by memory up to R of about 16. The speed of the whole has not been measured on a CPU with AMX.
 *
 * Limits R <= AMX_FEW_ROWS. Scratch per dcp__attn_amx_few_bytes. */
#include "kernels/attn_tiles_amx.h"

enum {
    KEYS = DCP__ATTN_KEY_BLOCK,
    N_GROUPS = KEYS / AMX_GROUP,
    Q_ROWS = 5, /* of a Q tile, in three parts */
    P_ROWS = 4  /* of a P tile */
};

struct few {
    struct amx_job a;
    int64_t n_q, n_p; /* tiles across the rows */
    char *q;          /* [n_q][k_steps] tiles */
    float *s_raw;     /* [N_GROUPS] tiles [key][column] */
    float *s;         /* [n_rows][KEYS] */
    char *p;          /* [n_p][N_GROUPS] tiles */
    float *o;         /* [n_p][v_steps] tiles */
    float *max;
    double *sum, *weight_sum; /* of the weights; of what the products take them for */
    char *k_stage, *v_stage;  /* [2][N_GROUPS], [N_GROUPS] groups of rows */
    struct amx_keys k[2][N_GROUPS + 1], v[N_GROUPS + 1]; /* the last: what is read next */
};

/* ---- the two products ---- */

/* Lines of a tile that is read later. */
AMX_INLINE void prefetch_tile(struct amx_keys keys, int64_t offset)
{
    for (int i = 0; i < AMX_GROUP; i++) __builtin_prefetch(keys.at + i * keys.stride + offset);
}

/* S^T of a column of Q tiles, group by group, so that keys are read in the order they lie in.
 * k[N_GROUPS]: what is read after the last group. ahead: fetch the next group meanwhile. */
AMX_INLINE void scores(const struct few *f, int64_t tile, const struct amx_keys *k, bool ahead)
{
    const char *const q = f->q + tile * f->a.k_steps * TILE_BYTES;
    const int64_t end = f->a.k_steps * TILE_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        const char *at = k[i].at;
        int64_t d = 0;
        TILE_ZERO(0);
        for (; d + TILE_BYTES < end; d += 2 * TILE_BYTES, at += 2 * TILE_ROW_BYTES) {
            TILE_LOAD(4, q + d, TILE_ROW_BYTES);
            TILE_STREAM(6, at, k[i].stride);
            TILE_DP(0, 6, 4);
            if (ahead) prefetch_tile(k[i + 1], at - k[i].at);
            TILE_LOAD(5, q + d + TILE_BYTES, TILE_ROW_BYTES);
            TILE_STREAM(7, at + TILE_ROW_BYTES, k[i].stride);
            TILE_DP(0, 7, 5);
            if (ahead) prefetch_tile(k[i + 1], at - k[i].at + TILE_ROW_BYTES);
        }
        if (d < end) {
            TILE_LOAD(4, q + d, TILE_ROW_BYTES);
            TILE_STREAM(6, at, k[i].stride);
            TILE_DP(0, 6, 4);
            if (ahead) prefetch_tile(k[i + 1], at - k[i].at);
        }
        TILE_STORE(0, f->s_raw + i * 256, TILE_ROW_BYTES);
    }
}

/* O += P V of one row of P tiles and four columns of V from dim tile d on: C 0-3. v[N_GROUPS]: what
 * is read after the last group, less the offset of d. */
static void values_1x4(const struct few *f, int64_t row, int64_t d, const struct amx_keys *v)
{
    float *const o = f->o + (row * f->a.v_steps + d) * 256;
    const char *const p = f->p + row * N_GROUPS * TILE_BYTES;
    const int64_t offset = d * TILE_ROW_BYTES;
    TILE_LOAD(0, o, TILE_ROW_BYTES);
    TILE_LOAD(1, o + 256, TILE_ROW_BYTES);
    TILE_LOAD(2, o + 512, TILE_ROW_BYTES);
    TILE_LOAD(3, o + 768, TILE_ROW_BYTES);
    for (int i = 0; i < N_GROUPS; i++) {
        const char *const at = v[i].at + offset;
        TILE_LOAD(4, p + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_STREAM(5, at, v[i].stride);
        TILE_DP(0, 4, 5);
        prefetch_tile(v[i + 1], offset);
        TILE_STREAM(6, at + TILE_ROW_BYTES, v[i].stride);
        TILE_DP(1, 4, 6);
        prefetch_tile(v[i + 1], offset + TILE_ROW_BYTES);
        TILE_STREAM(5, at + 2 * TILE_ROW_BYTES, v[i].stride);
        TILE_DP(2, 4, 5);
        prefetch_tile(v[i + 1], offset + 2 * TILE_ROW_BYTES);
        TILE_STREAM(6, at + 3 * TILE_ROW_BYTES, v[i].stride);
        TILE_DP(3, 4, 6);
        prefetch_tile(v[i + 1], offset + 3 * TILE_ROW_BYTES);
    }
    TILE_STORE(0, o, TILE_ROW_BYTES);
    TILE_STORE(1, o + 256, TILE_ROW_BYTES);
    TILE_STORE(2, o + 512, TILE_ROW_BYTES);
    TILE_STORE(3, o + 768, TILE_ROW_BYTES);
}

/* Two by two: C 0-3. The first rows fetch ahead for all. */
AMX_INLINE void values_2x2(const struct few *f, int64_t row, int64_t d, const struct amx_keys *v,
                           bool ahead)
{
    float *const o0 = f->o + (row * f->a.v_steps + d) * 256;
    float *const o1 = o0 + f->a.v_steps * 256;
    const char *const p0 = f->p + row * N_GROUPS * TILE_BYTES;
    const char *const p1 = p0 + N_GROUPS * TILE_BYTES;
    const int64_t offset = d * TILE_ROW_BYTES;
    TILE_LOAD(0, o0, TILE_ROW_BYTES);
    TILE_LOAD(1, o0 + 256, TILE_ROW_BYTES);
    TILE_LOAD(2, o1, TILE_ROW_BYTES);
    TILE_LOAD(3, o1 + 256, TILE_ROW_BYTES);
    for (int i = 0; i < N_GROUPS; i++) {
        const char *const at = v[i].at + offset;
        TILE_LOAD(4, p0 + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_LOAD(6, at, v[i].stride);
        TILE_DP(0, 4, 6);
        if (ahead) prefetch_tile(v[i + 1], offset);
        TILE_LOAD(7, at + TILE_ROW_BYTES, v[i].stride);
        TILE_DP(1, 4, 7);
        if (ahead) prefetch_tile(v[i + 1], offset + TILE_ROW_BYTES);
        TILE_LOAD(5, p1 + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_DP(2, 5, 6);
        TILE_DP(3, 5, 7);
    }
    TILE_STORE(0, o0, TILE_ROW_BYTES);
    TILE_STORE(1, o0 + 256, TILE_ROW_BYTES);
    TILE_STORE(2, o1, TILE_ROW_BYTES);
    TILE_STORE(3, o1 + 256, TILE_ROW_BYTES);
}

/* What is left over: one tile. */
static void values_1x1(const struct few *f, int64_t row, int64_t d, const struct amx_keys *v)
{
    float *const o = f->o + (row * f->a.v_steps + d) * 256;
    const char *const p = f->p + row * N_GROUPS * TILE_BYTES;
    const int64_t offset = d * TILE_ROW_BYTES;
    TILE_LOAD(0, o, TILE_ROW_BYTES);
    for (int i = 0; i < N_GROUPS; i++) {
        TILE_LOAD(4, p + i * TILE_BYTES, TILE_ROW_BYTES);
        TILE_LOAD(5, v[i].at + offset, v[i].stride);
        TILE_DP(0, 4, 5);
        prefetch_tile(v[i + 1], offset);
    }
    TILE_STORE(0, o, TILE_ROW_BYTES);
}

/* All columns of V. After the last group of a pass come the next columns of the first group, after
 * the last pass the keys of the next block. */
static void add_values(struct few *f, struct amx_keys next_block)
{
    const int64_t n = f->a.v_steps;
    for (int64_t row = 0; row < f->n_p;) {
        const int64_t n_rows = row + 2 <= f->n_p ? 2 : 1;
        for (int64_t d = 0; d < n;) {
            const int64_t most = n_rows == 2 ? 2 : 4;
            const int64_t n_cols = d + most <= n ? most : 1;
            const int64_t offset = d * TILE_ROW_BYTES;
            f->v[N_GROUPS] = f->v[0];
            f->v[N_GROUPS].at += n_cols * TILE_ROW_BYTES;
            if (d + n_cols == n) {
                f->v[N_GROUPS] = next_block;
                f->v[N_GROUPS].at -= offset;
            }
            if (n_cols == 1) {
                values_1x1(f, row, d, f->v);
                if (n_rows == 2) values_1x1(f, row + 1, d, f->v);
            } else if (n_rows == 1) {
                values_1x4(f, row, d, f->v);
            } else if (row == 0) {
                values_2x2(f, row, d, f->v, true);
            } else {
                values_2x2(f, row, d, f->v, false);
            }
            d += n_cols;
        }
        row += n_rows;
    }
}

/* ---- softmax ---- */

/* Columns of s_raw, parts summed, to rows of s. */
static void gather_scores(const struct few *f, int64_t tile)
{
    const int64_t row0 = tile * Q_ROWS;
    for (int i = 0; i < N_GROUPS; i++) {
        vf x[VF_LANES];
        VF_UNROLL for (int j = 0; j < 16; j++) x[j] = vf_load(f->s_raw + i * 256 + j * 16);
        vf_transpose(x);
        VF_UNROLL for (int r = 0; r < Q_ROWS; r++)
        {
            const vf sum = vf_add(x[3 * r], vf_add(x[3 * r + 1], x[3 * r + 2]));
            if (row0 + r < f->a.n_rows) vf_store(f->s + (row0 + r) * KEYS + i * AMX_GROUP, sum);
        }
    }
}

/* O and the sums of row r times 2^by, by an integer. */
static void rescale(const struct few *f, int64_t r, float by)
{
    const vf factor = _mm512_scalef_ps(vf_set1(1.0f), vf_set1(by));
    float *const o = f->o + r / P_ROWS * f->a.v_steps * 256;
    for (int64_t d = 0; d < f->a.v_steps; d++) {
        for (int part = 0; part < 4; part++) {
            float *const at = o + d * 256 + (part * P_ROWS + r % P_ROWS) * 16;
            vf_store(at, vf_mul(vf_load(at), factor));
        }
    }
    f->sum[r] *= (double)_mm512_cvtss_f32(factor);
    f->weight_sum[r] *= (double)_mm512_cvtss_f32(factor);
}

/* Scores of row r to weights in its P tile. Keys [first, end) of the block are visible. */
static void weigh_row(const struct few *f, int64_t r, int64_t first, int64_t end)
{
    const float *const s = f->s + r * KEYS;
    char *const p = f->p + r / P_ROWS * N_GROUPS * TILE_BYTES + r % P_ROWS * TILE_ROW_BYTES;
    vf x[N_GROUPS];
    vf rounded[N_GROUPS];
    for (int i = 0; i < N_GROUPS; i++) {
        x[i] = vf_load(s + i * VF_LANES);
        if (f->a.cap_scale != 0.0f) x[i] = vf_tanh(vf_mul(x[i], vf_set1(f->a.cap_scale)));
        if (end - first < KEYS) x[i] = vf_keep_range(x[i], i * VF_LANES, first, end);
    }
    const float top = vf_max64(x) * f->a.scale2;
    if (top > f->max[r] + amx_slack) { /* false for NaN, which then spoils the sum */
        const float new_max = ceilf(top);
        rescale(f, r, f->max[r] - new_max);
        f->max[r] = new_max;
    }
    for (int i = 0; i < N_GROUPS; i++) {
        x[i] = amx_exp2(vf_fms(x[i], vf_set1(f->a.scale2), vf_set1(f->max[r])));
        const __m512i hi = amx_bf16_words(x[i]);
        const __m512i low = amx_bf16_words(_mm512_sub_ps(x[i], amx_words_f32(hi)));
        rounded[i] = vf_add(amx_words_f32(hi), amx_words_f32(low)); /* exact */
        char *const at = p + i * TILE_BYTES;
        _mm512_store_si512(at, hi);
        _mm512_store_si512(at + 4 * TILE_ROW_BYTES, _mm512_slli_epi32(hi, 16));
        _mm512_store_si512(at + 8 * TILE_ROW_BYTES, low);
        _mm512_store_si512(at + 12 * TILE_ROW_BYTES, _mm512_slli_epi32(low, 16));
    }
    f->sum[r] += (double)vf_sum64(x);
    f->weight_sum[r] += (double)vf_sum64(rounded);
}

/* Row r sees nothing of the block: weights 0, nothing else changes. */
static void clear_row(const struct few *f, int64_t r)
{
    char *const p = f->p + r / P_ROWS * N_GROUPS * TILE_BYTES + r % P_ROWS * TILE_ROW_BYTES;
    for (int i = 0; i < N_GROUPS; i++) {
        for (int part = 0; part < 4; part++)
            memset(p + i * TILE_BYTES + part * P_ROWS * TILE_ROW_BYTES, 0, TILE_ROW_BYTES);
    }
}

/* ---- blocks ---- */

static void find_k(struct few *f, int64_t begin, int slot)
{
    const int64_t stage_bytes = AMX_GROUP * f->a.k_steps * TILE_ROW_BYTES;
    for (int i = 0; i < N_GROUPS; i++)
        f->k[slot][i] = amx_find_keys(&f->a, begin + i * AMX_GROUP, false, false,
                                      f->k_stage + (slot * N_GROUPS + i) * stage_bytes);
}

/* The block at begin, whose keys are in k[slot]; those of the next one are in the other. */
static void attend_block(struct few *f, int64_t begin, int slot)
{
    const struct dcp__attn_job *const job = f->a.job;
    const int64_t v_bytes = AMX_GROUP * f->a.v_steps * TILE_ROW_BYTES;
    for (int i = 0; i < N_GROUPS; i++)
        f->v[i] =
            amx_find_keys(&f->a, begin + i * AMX_GROUP, true, false, f->v_stage + i * v_bytes);
    f->k[slot][N_GROUPS] = f->v[0];
    scores(f, 0, f->k[slot], true);
    gather_scores(f, 0);
    for (int64_t tile = 1; tile < f->n_q; tile++) {
        scores(f, tile, f->k[slot], false);
        gather_scores(f, tile);
    }
    for (int64_t r = 0; r < f->a.n_rows; r++) {
        int64_t lo;
        int64_t hi;
        attn_row_range(job, r / job->n_group, &lo, &hi);
        lo = attn_max(lo - begin, 0);
        hi = attn_min(hi - begin, KEYS);
        if (lo < hi)
            weigh_row(f, r, lo, hi);
        else
            clear_row(f, r);
    }
    add_values(f, f->k[!slot][0]);
}

static bool finish_row(const struct few *f, int64_t r)
{
    float *const out = amx_out_row(&f->a, r);
    const double sum = f->sum[r];
    const vf divisor = vf_set1(sum == 0.0 ? 1.0f : (float)f->weight_sum[r]);
    const float *const o = f->o + r / P_ROWS * f->a.v_steps * 256 + r % P_ROWS * 16;
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
    if (amx_is_huge(f->max[r])) *lse = NAN;
    return bad == 0 && *lse < INFINITY && sum >= 0.0 && sum < (double)INFINITY;
}

/* Row r of the job to three columns of its B tile [16 dim pairs][16 columns][2]: parts that sum to
 * sign * q, exactly. */
static void pack_q(const struct few *f, int64_t r)
{
    const float *const q = amx_q_row(&f->a, r);
    const int64_t dk = f->a.job->dk;
    char *const tiles = f->q + r / Q_ROWS * f->a.k_steps * TILE_BYTES;
    const int64_t column = r % Q_ROWS * 3;
    const __m256i rows = _mm256_setr_epi32(0, 64, 128, 192, 256, 320, 384, 448);
    for (int64_t d = 0; d < dk; d += VF_LANES) {
        vf rest = dk - d >= VF_LANES ? vf_load(q + d) : vf_load_n(q + d, dk - d);
        rest = vf_mul(rest, vf_set1(f->a.sign));
        char *const at = tiles + d / AMX_STEP * TILE_BYTES + d % AMX_STEP / 2 * TILE_ROW_BYTES;
        for (int i = 0; i < 3; i++) {
            const __m256i part = (__m256i)_mm512_cvtneps_pbh(rest);
            rest = _mm512_sub_ps(rest, amx_words_f32(_mm512_cvtepu16_epi32(part)));
            _mm256_i32scatter_epi32(at + 4 * (column + i), rows, part, 1);
        }
    }
}

/* Regions of the scratch, or none where base is NULL; returns their size. */
static size_t carve(struct few *f, void *base)
{
    uintptr_t at = (uintptr_t)base;
    const int64_t tiles = TILE_BYTES;
    f->a.zeros = amx_take(&at, attn_max(f->a.k_steps, f->a.v_steps) * TILE_ROW_BYTES);
    f->q = amx_take(&at, f->n_q * f->a.k_steps * tiles);
    f->s_raw = amx_take(&at, N_GROUPS * tiles);
    f->s = amx_take(&at, f->n_q * Q_ROWS * KEYS * (int64_t)sizeof(float));
    f->p = amx_take(&at, f->n_p * N_GROUPS * tiles);
    f->o = amx_take(&at, f->n_p * f->a.v_steps * tiles);
    f->max = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(float));
    f->sum = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(double));
    f->weight_sum = amx_take(&at, AMX_FEW_ROWS * (int64_t)sizeof(double));
    f->k_stage = amx_take(&at, 2 * KEYS * f->a.k_steps * TILE_ROW_BYTES);
    f->v_stage = amx_take(&at, KEYS * f->a.v_steps * TILE_ROW_BYTES);
    return (size_t)(at - (uintptr_t)base);
}

size_t dcp__attn_amx_few_bytes(int64_t n_rows, int64_t dk, int64_t dv)
{
    struct few f;
    const int64_t rows = attn_min(n_rows, AMX_FEW_ROWS);
    f.a.k_steps = amx_div_up(dk, AMX_STEP);
    f.a.v_steps = amx_div_up(dv, AMX_STEP);
    f.n_q = amx_div_up(rows, Q_ROWS);
    f.n_p = amx_div_up(rows, P_ROWS);
    return carve(&f, NULL);
}

bool dcp__attn_amx_few(const struct dcp__attn_job *job)
{
    struct few f;
    amx_job_begin(&f.a, job);
    amx_set_hull(&f.a, 0, job->n_tokens);
    f.n_q = amx_div_up(f.a.n_rows, Q_ROWS);
    f.n_p = amx_div_up(f.a.n_rows, P_ROWS);
    carve(&f, job->scratch);
    memset(f.a.zeros, 0, (size_t)(attn_max(f.a.k_steps, f.a.v_steps) * TILE_ROW_BYTES));
    memset(f.q, 0, (size_t)(f.n_q * f.a.k_steps * TILE_BYTES));
    memset(f.p, 0, (size_t)(f.n_p * N_GROUPS * TILE_BYTES));
    memset(f.o, 0, (size_t)(f.n_p * f.a.v_steps * TILE_BYTES));
    for (int64_t r = 0; r < f.a.n_rows; r++) {
        pack_q(&f, r);
        f.max[r] = amx_no_max;
        f.sum[r] = 0.0;
        f.weight_sum[r] = 0.0;
    }
    if (f.a.lo < f.a.hi) {
        int64_t begin = f.a.lo / KEYS * KEYS;
        int slot = 0;
        tile_begin_all();
        find_k(&f, begin, slot);
        for (; begin < f.a.hi; begin += KEYS, slot = !slot) {
            find_k(&f, begin + KEYS, !slot);
            attend_block(&f, begin, slot);
        }
        tile_end_all();
    }
    bool is_good = true;
    for (int64_t r = 0; r < f.a.n_rows; r++)
        if (!finish_row(&f, r)) is_good = false;
    return is_good;
}
