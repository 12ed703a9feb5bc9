/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: decoding. Part of attn_tpl.h.
 *
 * What counts is that memory never waits, and that as little as possible is done beside: K and V
 * are two streams, each read row after row, line after line, and asked for some KiB ahead. So the
 * scores of the next block are computed between the values of this one, 16 keys of each in turn:
 *
 *     K   b+1:  0-15 |        16-31 |         ...   softmax of b+1
 *     V   b  :       | 0-15         | 16-31
 *
 * Each line is asked for twice: a block ahead into L2, then about 2 KiB ahead into L1. A line on
 * its way from memory holds one of few L1 fill buffers; what the hardware fetches into L2 by itself
 * holds none, but it runs only some lines ahead of an access and not over the end of a 4 KiB page.
 * So the first request goes through two parts of the block by turns: more lines are on their way at
 * once.
 *
 * A score is a sum of 16 chains: K stays in its natural rows, q lies in the order of their loads,
 * and the sums of 16 scores are added up together.
 *
 *     key row   | d 0..15 | d 16..31 | ...      lane i of a sum: dims i, 16 + i, ... (bf16: 2i and
 *     q row     |    *    |    *     |          2i + 1 of every 32), then its halves of 16, 8, 4, 2
 *
 * Turning K on its side instead, as many rows do, takes 1.4 times the instructions (101 and 72 a
 * key of 128 bf16 with 4 rows, AVX-512, requests included).
 *
 * V is widened on the fly; even and odd dims of bf16 values stay apart in o (load_values) until
 * tile_end. */
#ifndef DCP_KERNELS_ATTN_FEW_TPL_H
#define DCP_KERNELS_ATTN_FEW_TPL_H

enum {
    STEP = 16, /* keys at a time */
    SPAN = 32, /* dims of a round of sums */
    HALVES = 16 / VF_LANES
};

/* Rows of a case of scores; rows of q behind the last are 0, so one case serves several numbers. */
static inline int64_t few_rows(int64_t n_rows)
{
    return n_rows <= MR ? n_rows : n_rows <= 8 ? 8 : FEW_ROWS;
}
/* q of few rows: [dims / SPAN][few_rows][SPAN], in the order of loads, 0 behind the last dim. */
static inline int64_t few_pitch(int64_t dk)
{
    return (dk + SPAN - 1) / SPAN * SPAN;
}
static inline int64_t few_q_at(int64_t n_rows, int64_t r, int64_t d, int64_t dk, dcp_dtype dtype)
{
    int64_t i = d % SPAN;
    if (dtype == DCP_BF16 && d / SPAN != dk / SPAN) { /* the last few are loaded in order */
        const int64_t pair = i % (2 * VF_LANES);
        i += pair % 2 * VF_LANES + pair / 2 - pair;
    }
    return (d / SPAN * few_rows(n_rows) + r) * SPAN + i;
}

/* SPAN dims of g keys to come. */
ATTN_INLINE void few_prefetch(const struct ahead *ahead, int64_t key, int g, int64_t d,
                              dcp_dtype dtype)
{
    const int n_bytes = SPAN * (int)bytes_of(dtype);
    if (n_bytes < 64 && d % 64 != 0) return; /* half a line */
    VF_UNROLL for (int u = 0; u < g; u++)
    {
        VF_UNROLL for (int x = 0; x < n_bytes; x += 64)
        {
            prefetch_at(ahead, key + u, d * bytes_of(dtype) + x);
        }
    }
}
/* sums[r * g + u] += q of row r times key u over one vector of each, dims from d on. */
ATTN_INLINE void few_add(int n, int g, int u, const float *q, vf x, vf *sums)
{
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        sums[r * g + u] = vf_fma(vf_load(q + r * SPAN), x, sums[r * g + u]);
    }
}
/* The sums of lanes [half * VF_LANES, + VF_LANES) of n g scores. */
ATTN_INLINE void few_dots(int n, int g, int half, const float *q, const char *const *rows,
                          const struct ahead *ahead, int64_t key, int64_t dk, dcp_dtype dtype,
                          vf *sums)
{
    VF_UNROLL for (int i = 0; i < n * g; i++)
    {
        sums[i] = vf_set1(0.0f);
    }
    int64_t d = 0;
    for (; d + SPAN <= dk; d += SPAN, q += n * SPAN) {
        if (half == 0) few_prefetch(ahead, key, g, d, dtype);
        VF_UNROLL for (int u = 0; u < g; u++)
        {
            const char *const row = rows[key + u];
            if (dtype == DCP_BF16) { /* 2 VF_LANES dims in pairs: all of this half */
                vf x[2];
                const int at = half * 2 * VF_LANES;
                load_values(row, d + at, dtype, x);
                few_add(n, g, u, q + at, x[0], sums);
                few_add(n, g, u, q + at + VF_LANES, x[1], sums);
            } else {
                VF_UNROLL for (int at = half * VF_LANES; at < SPAN; at += 16)
                {
                    few_add(n, g, u, q + at, load_value(row, d + at, dtype), sums);
                }
            }
        }
    }
    if (d == dk) return;
    if (half == 0) few_prefetch(ahead, key, g, d, dtype);
    VF_UNROLL for (int u = 0; u < g; u++)
    {
        for (int64_t at = half * VF_LANES; d + at < dk; at += 16) {
            const int64_t left = dk - d - at;
            const vf x = left >= VF_LANES ? load_value(rows[key + u], d + at, dtype)
                                          : load_value_n(rows[key + u], d + at, left, dtype);
            few_add(n, g, u, q + at, x, sums);
        }
    }
}
/* s[r][key + u] = q k of g keys straight from their rows. */
ATTN_INLINE void few_scores_n(int n, int g, const float *q, const char *const *rows,
                              const struct ahead *ahead, int64_t key, int64_t dk, dcp_dtype dtype,
                              float *s)
{
    enum { N_SUMS = (VF_FEW_DOTS + VF_LANES - 1) / VF_LANES * VF_LANES };
    vf sums[N_SUMS];
    float out[N_SUMS];
    few_dots(n, g, 0, q, rows, ahead, key, dk, dtype, sums);
    if (HALVES == 2) {
        vf high[N_SUMS];
        few_dots(n, g, 1, q, rows, ahead, key, dk, dtype, high);
        VF_UNROLL for (int i = 0; i < n * g; i++)
        {
            sums[i] = vf_add(sums[i], high[i]);
        }
    }
    VF_UNROLL for (int i = n * g; i < N_SUMS; i++)
    {
        sums[i] = vf_set1(0.0f);
    }
    VF_UNROLL for (int i = 0; i < n * g; i += VF_LANES) vf_sums(sums + i, out + i);
    VF_UNROLL for (int r = 0; r < n; r++)
        memcpy(s + r * KEYS + key, out + r * g, (size_t)g * sizeof(*s));
}

/* Where a step's sums of values start and end. */
struct few_sums {
    float *share, *o;        /* [n][pitch] */
    const float *p;          /* [n][KEYS] */
    const struct span *span; /* [n] */
    int64_t pitch;
    bool is_first, is_last; /* step of the block: from 0 on; o = o * rescale + sum */
    struct ahead ahead;
};

/* share[r][d..] += sum of p[r][key] * value[key][d..] over keys [first, end), w vectors of n rows;
 * is_tail: m < 2 VF_LANES dims, one or two vectors, in order. The same dims of rows to come are
 * asked for. */
ATTN_INLINE void few_values_nw(int n, int w, const struct few_sums *sums, const char *const *rows,
                               int64_t first, int64_t end, int64_t d, int64_t m, bool is_tail,
                               dcp_dtype dtype)
{
    vf acc[VF_FEW_SUMS];
    const int64_t from = d * bytes_of(dtype);
    const int64_t n_bytes = (is_tail ? m : w * VF_LANES) * bytes_of(dtype);
    /* Parts of a line: with the first. */
    const int n_lines = from % 64 != 0 ? 0 : (int)((n_bytes + 63) / 64);
    const int64_t pitch = sums->pitch;
    const float *const p = sums->p;
    float *const share = sums->share + d;
    if (sums->is_first) {
        VF_UNROLL for (int i = 0; i < n * w; i++)
        {
            acc[i] = vf_set1(0.0f);
        }
    } else {
        VF_UNROLL for (int i = 0; i < n * w; i++)
        {
            acc[i] = vf_load(share + i / w * pitch + i % w * VF_LANES);
        }
    }
    for (int64_t i = first; i < end; i++) {
        const char *const row = rows[i];
        if (n_bytes == 128) { /* known to the compiler as a rule */
            prefetch_at(&sums->ahead, i, from);
            prefetch_at(&sums->ahead, i, from + 64);
        } else {
            for (int x = 0; x < n_lines; x++) prefetch_at(&sums->ahead, i, from + 64 * x);
        }
        VF_UNROLL for (int x = 0; x < w; x += 2)
        {
            vf value[2];
            if (is_tail) {
                value[0] = load_value_n(row, d, attn_min(m, VF_LANES), dtype);
                value[1] = vf_set1(0.0f);
                if (m > VF_LANES) value[1] = load_value_n(row, d + VF_LANES, m - VF_LANES, dtype);
            } else {
                load_values(row, d + x * VF_LANES, dtype, value);
            }
            VF_UNROLL for (int r = 0; r < n; r++)
            {
                const vf weight = vf_set1(p[r * KEYS + i]);
                acc[r * w + x] = vf_fma(weight, value[0], acc[r * w + x]);
                acc[r * w + x + 1] = vf_fma(weight, value[1], acc[r * w + x + 1]);
            }
        }
    }
    if (!sums->is_last) {
        VF_UNROLL for (int i = 0; i < n * w; i++)
        {
            vf_store(share + i / w * pitch + i % w * VF_LANES, acc[i]);
        }
        return;
    }
    float *const o = sums->o + d;
    VF_UNROLL for (int i = 0; i < n * w; i++)
    {
        float *const at = o + i / w * pitch + i % w * VF_LANES;
        vf_store(at, vf_fma(vf_load(at), vf_set1(sums->span[i / w].rescale), acc[i]));
    }
}
ATTN_INLINE void few_values_n(int n, const struct few_sums *sums, const char *const *rows,
                              int64_t first, int64_t end, int64_t dv, dcp_dtype dtype)
{
    const int w = VF_FEW_SUMS / n >= 8 ? 8 : VF_FEW_SUMS / n >= 4 ? 4 : 2;
    int64_t d = 0;
    for (; d + w * VF_LANES <= dv; d += w * VF_LANES)
        few_values_nw(n, w, sums, rows, first, end, d, 0, false, dtype);
    for (; w > 2 && d + 2 * VF_LANES <= dv; d += 2 * VF_LANES)
        few_values_nw(n, 2, sums, rows, first, end, d, 0, false, dtype);
    if (d < dv) few_values_nw(n, 2, sums, rows, first, end, d, dv - d, true, dtype);
}

/* One function for each number of rows and type: what is inlined into one body spills. */
typedef void few_scores_fn(const float *q, const char *const *rows, const struct ahead *ahead,
                           int64_t key, int64_t dk, float *s);
typedef void few_values_fn(const struct few_sums *sums, const char *const *rows, int64_t first,
                           int64_t end, int64_t dv);
#define FEW_KEYS(n)                                                                                \
    ((n)*16 <= VF_FEW_DOTS  ? 16                                                                   \
     : (n)*8 <= VF_FEW_DOTS ? 8                                                                    \
     : (n)*4 <= VF_FEW_DOTS ? 4                                                                    \
     : (n)*2 <= VF_FEW_DOTS ? 2                                                                    \
                            : 1)
#define FEW_SCORES(n, name, dtype)                                                                 \
    ATTN_NOINLINE void few_scores_##name##_##n(const float *q, const char *const *rows,            \
                                               const struct ahead *ahead, int64_t key, int64_t dk, \
                                               float *s)                                           \
    {                                                                                              \
        for (int64_t i = key; i < key + STEP; i += FEW_KEYS(n))                                    \
            few_scores_n(n, FEW_KEYS(n), q, rows, ahead, i, dk, dtype, s);                         \
    }
#define FEW_VALUES(n, name, dtype)                                                                 \
    ATTN_NOINLINE void few_values_##name##_##n(const struct few_sums *sums,                        \
                                               const char *const *rows, int64_t first,             \
                                               int64_t end, int64_t dv)                            \
    {                                                                                              \
        few_values_n(n, sums, rows, first, end, dv, dtype);                                        \
    }
#define FEW_KERNELS(name, dtype)                                                                   \
    FEW_SCORES(1, name, dtype)                                                                     \
    FEW_SCORES(2, name, dtype)                                                                     \
    FEW_SCORES(3, name, dtype)                                                                     \
    FEW_SCORES(4, name, dtype)                                                                     \
    FEW_SCORES(5, name, dtype)                                                                     \
    FEW_SCORES(6, name, dtype)                                                                     \
    FEW_SCORES(8, name, dtype)                                                                     \
    FEW_SCORES(12, name, dtype)                                                                    \
    FEW_VALUES(1, name, dtype)                                                                     \
    FEW_VALUES(2, name, dtype)                                                                     \
    FEW_VALUES(3, name, dtype)                                                                     \
    FEW_VALUES(4, name, dtype)                                                                     \
    FEW_VALUES(5, name, dtype)                                                                     \
    FEW_VALUES(6, name, dtype)                                                                     \
    static few_scores_fn *const few_scores_##name[FEW_ROWS + 1] = {NULL,                           \
                                                                   few_scores_##name##_1,          \
                                                                   few_scores_##name##_2,          \
                                                                   few_scores_##name##_3,          \
                                                                   few_scores_##name##_4,          \
                                                                   few_scores_##name##_5,          \
                                                                   few_scores_##name##_6,          \
                                                                   few_scores_##name##_8,          \
                                                                   few_scores_##name##_8,          \
                                                                   few_scores_##name##_12,         \
                                                                   few_scores_##name##_12,         \
                                                                   few_scores_##name##_12,         \
                                                                   few_scores_##name##_12};        \
    static few_values_fn *const few_values_##name[MR + 1] = {NULL,                                 \
                                                             few_values_##name##_1,                \
                                                             few_values_##name##_2,                \
                                                             few_values_##name##_3,                \
                                                             few_values_##name##_4,                \
                                                             few_values_##name##_5,                \
                                                             few_values_##name##_6};
#if ATTN_FOR_SCALES
FEW_KERNELS(i8, DCP_I8)
FEW_KERNELS(fp8, DCP_FP8_E4M3)
#else
FEW_KERNELS(f32, DCP_F32)
FEW_KERNELS(f16, DCP_F16)
FEW_KERNELS(bf16, DCP_BF16)
#endif

struct few_kernels {
    few_scores_fn *scores;        /* of all rows */
    few_values_fn *const *values; /* by number of rows */
};

/* Rows between those that are asked for and those that are used: 2 KiB, and of keys at least those
 * of two rounds of scores. */
static inline int64_t few_distance(int64_t row_bytes, int64_t least)
{
    return attn_max(least, attn_min(2048 / row_bytes, AHEAD));
}
_Static_assert(32 <= AHEAD && AHEAD <= KEYS, "row pointers reach as far as few_distance");
/* Values of keys [key, key + STEP) of a block, weights in s. */
static inline void few_value_step(struct tile *tile, const struct few_kernels *kernels,
                                  const struct block_rows *rows, const struct ahead *ahead,
                                  int64_t key, const float *s)
{
    for (int64_t r = 0; r < tile->n_rows;) {
        const struct span *const span = tile->span + r;
        const int64_t left = tile->n_rows - r;
        int run = run_of_rows(tile, r, tile->n_rows);
        /* 7 to 10 rows go in halves: 4 + 4, not 6 + 2. */
        if (left > MR && left <= 10) run = (int)attn_min(run, (left + 1) / 2);
        const int64_t first = attn_max(span->first, key);
        const int64_t end = attn_min(span->end, key + STEP);
        if (first < end) {
            const struct few_sums sums = {
                .share = tile->share + r * tile->dv_pad,
                .o = tile->o + r * tile->dv_pad,
                .p = s + r * KEYS,
                .span = span,
                .pitch = tile->dv_pad,
                .is_first = first == span->first,
                .is_last = end == span->end,
                .ahead = *ahead,
            };
            kernels->values[run](&sums, rows->v, first, end, tile->dv);
        }
        r += run;
    }
}

static void attend_few(struct tile *tile, const struct few_kernels *kernels, dcp_dtype dtype)
{
    const int64_t elem_bytes = bytes_of(dtype);
    const int64_t k_distance = few_distance(tile->dk * elem_bytes, 32 / tile->n_rows);
    const int64_t v_distance = few_distance(tile->dv * elem_bytes, 4);
    int64_t begin = next_block(tile, tile->lo / KEYS * KEYS);
    int64_t next = next_block(tile, begin + KEYS);
    struct block_rows *rows = &tile->rows[0];
    struct block_rows *next_rows = &tile->rows[1];
    struct block_rows *later_rows = &tile->rows[2];
    float *s = tile->s;
    float *next_s = tile->s + FEW_ROWS * KEYS;
    find_rows(tile, begin, elem_bytes, rows);
    if (next < tile->hi) find_rows(tile, next, elem_bytes, next_rows);
    link_rows(rows, next < tile->hi ? next_rows : rows);
    struct ahead k = {
        .near = rows->k + k_distance,
        .far = next < tile->hi ? next_rows->k : rows->k,
    };
    for (int64_t key = 0; key < KEYS; key += STEP)
        kernels->scores(tile->q, rows->k, &k, key, tile->dk, s);
    while (begin < tile->hi) {
        const bool has_next = next < tile->hi;
        const int64_t later = next_block(tile, next + KEYS);
        const bool has_later = later < tile->hi;
        if (tile->has_scales) find_scales(tile, begin, dtype);
        weigh_rows(tile, begin, s);
        if (has_later) find_rows(tile, later, elem_bytes, later_rows);
        if (has_next) link_rows(next_rows, has_later ? later_rows : next_rows);
        k.near = next_rows->k + k_distance;
        k.far = has_later ? later_rows->k : next_rows->k;
        const struct ahead v = {
            .near = rows->v + v_distance,
            .far = has_next ? next_rows->v : rows->v,
        };
        for (int64_t key = 0; key < KEYS; key += STEP) {
            if (has_next) kernels->scores(tile->q, next_rows->k, &k, key, tile->dk, next_s);
            few_value_step(tile, kernels, rows, &v, key, s);
        }
        begin = next;
        next = later;
        struct block_rows *const free_rows = rows;
        rows = next_rows;
        next_rows = later_rows;
        later_rows = free_rows;
        float *const free_s = s;
        s = next_s;
        next_s = free_s;
    }
}

#endif
