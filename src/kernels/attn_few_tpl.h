/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: decoding. Part of attn_tpl.h.
 *
 * What counts is that memory never waits: K and V are two streams, each read row after row, line
 * after line, and asked for some KiB ahead. So the scores of the next block are computed between
 * the values of this one, 32 keys of each in turn:
 *
 *     K   b+1:  0-31 |        32-63 |         softmax of b+1
 *     V   b  :       | 0-31         | 32-63
 *
 * Each line is asked for twice: a block ahead into L2, then 2 to 8 KiB ahead into L1. A line on its
 * way from memory holds one of few L1 fill buffers; what the hardware fetches into L2 by itself
 * holds none, but it runs only some lines ahead of an access and not over the end of a 4 KiB page.
 * So the first request goes through STREAMS parts of the block by turns: more lines are on their
 * way at once.
 *
 * K is transposed in registers, V widened on the fly; even and odd dims of bf16 values stay apart
 * in o (load_values) until tile_end. */
#ifndef DCP_KERNELS_ATTN_FEW_TPL_H
#define DCP_KERNELS_ATTN_FEW_TPL_H

enum {
    STEP = 32,  /* keys at a time */
    STREAMS = 2 /* runs of rows that are brought to L2 side by side */
};

/* acc[r] += q[d][r] * x for n rows; q in panels of MR rows. */
ATTN_INLINE void add_dim(int n, const float *q, int64_t dk, int64_t d, vf x, vf *acc)
{
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        const float *const one_q = q + r / MR * MR * dk + d * MR + r % MR;
        acc[r] = vf_fma(vf_set1(*one_q), x, acc[r]);
    }
}
/* s[r][0..g VF_LANES) = q k of g VF_LANES keys straight from their rows. Sums of one vector of keys
 * wait for each other: few rows need several vectors to keep the multipliers busy. */
ATTN_INLINE void few_scores_n(int n, int g, const float *q, const char *const *rows,
                              const struct ahead *ahead, int64_t key, int64_t dk, dcp_dtype dtype,
                              float *s)
{
    const int64_t step = key_dims(dtype);
    const int lines = (int)(step * bytes_of(dtype) * VF_LANES / 64); /* of load_keys */
    vf acc[FEW_ROWS * 2];
    VF_UNROLL for (int i = 0; i < n * g; i++)
    {
        acc[i] = vf_set1(0.0f);
    }
    int64_t line = ahead->log2_lines < 0 ? 0 : key << ahead->log2_lines;
    int64_t d = 0;
    for (; d + step <= dk; d += step) {
        vf x[2][VF_LANES / 2];
        VF_UNROLL for (int u = 0; u < g; u++)
        {
            if (ahead->log2_lines >= 0) {
                prefetch_lines(ahead, line, lines);
                line += lines;
            } else if (d * bytes_of(dtype) % 64 == 0) {
                VF_UNROLL for (int i = 0; i < VF_LANES; i++)
                    prefetch_at(ahead, key + u * VF_LANES + i, d * bytes_of(dtype));
            }
            load_keys(rows + key + u * VF_LANES, d, step, true, dtype, x[u]);
        }
        VF_UNROLL for (int i = 0; i < VF_LANES / 2; i++)
        {
            if (dtype == DCP_F32) {
                VF_UNROLL for (int u = 0; u < g; u++)
                    add_dim(n, q, dk, d + i, x[u][i], acc + u * n);
            } else {
                VF_UNROLL for (int u = 0; u < g; u++)
                    add_dim(n, q, dk, d + 2 * i, pair_low(x[u][i], dtype), acc + u * n);
                VF_UNROLL for (int u = 0; u < g; u++)
                    add_dim(n, q, dk, d + 2 * i + 1, pair_high(x[u][i], dtype), acc + u * n);
            }
        }
    }
    if (d < dk) {
        VF_UNROLL for (int u = 0; u < g; u++)
        {
            float rest[VF_LANES * VF_LANES];
            pack_key_dims(rows + key + u * VF_LANES, d, dk - d, false, dtype, rest, VF_LANES);
            for (int64_t i = d; i < dk; i++)
                add_dim(n, q, dk, i, vf_load(rest + (i - d) * VF_LANES), acc + u * n);
        }
    }
    VF_UNROLL for (int i = 0; i < n * g; i++)
    {
        vf_store(s + i % n * KEYS + key + i / n * VF_LANES, acc[i]);
    }
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
 * is_tail: m < 2 VF_LANES dims, one or two vectors, in order. n_ahead lines of each row that comes
 * are asked for. */
ATTN_INLINE void few_values_nw(int n, int w, const struct few_sums *sums, const char *const *rows,
                               int64_t first, int64_t end, int64_t d, int64_t m, bool is_tail,
                               int n_ahead, dcp_dtype dtype)
{
    vf acc[VF_FEW_SUMS];
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
        if (n_ahead == 4)
            prefetch_rows(&sums->ahead, i, 1, 4);
        else
            for (int x = 0; x < n_ahead; x++) prefetch_at(&sums->ahead, i, 64 * x);
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
    /* Lines of a row; they are asked for with the first dims of each key. */
    int n_ahead = (int)((dv * bytes_of(dtype) + 63) / 64);
    const int w = VF_FEW_SUMS / n >= 8 ? 8 : VF_FEW_SUMS / n >= 4 ? 4 : 2;
    int64_t d = 0;
    for (; d + w * VF_LANES <= dv; d += w * VF_LANES) {
        few_values_nw(n, w, sums, rows, first, end, d, 0, false, n_ahead, dtype);
        n_ahead = 0;
    }
    for (; w > 2 && d + 2 * VF_LANES <= dv; d += 2 * VF_LANES) {
        few_values_nw(n, 2, sums, rows, first, end, d, 0, false, n_ahead, dtype);
        n_ahead = 0;
    }
    if (d < dv) few_values_nw(n, 2, sums, rows, first, end, d, dv - d, true, n_ahead, dtype);
}

/* One function for each number of rows and type: what is inlined into one body spills. */
typedef void few_scores_fn(const float *q, const char *const *rows, const struct ahead *ahead,
                           int64_t key, int64_t dk, float *s);
typedef void few_values_fn(const struct few_sums *sums, const char *const *rows, int64_t first,
                           int64_t end, int64_t dv);
#define FEW_SCORES(n, g, name, dtype)                                                              \
    ATTN_NOINLINE void few_scores_##name##_##n(const float *q, const char *const *rows,            \
                                               const struct ahead *ahead, int64_t key, int64_t dk, \
                                               float *s)                                           \
    {                                                                                              \
        for (int64_t i = key; i < key + STEP; i += g * VF_LANES)                                   \
            few_scores_n(n, g, q, rows, ahead, i, dk, dtype, s);                                   \
    }
#define FEW_VALUES(n, name, dtype)                                                                 \
    ATTN_NOINLINE void few_values_##name##_##n(const struct few_sums *sums,                        \
                                               const char *const *rows, int64_t first,             \
                                               int64_t end, int64_t dv)                            \
    {                                                                                              \
        few_values_n(n, sums, rows, first, end, dv, dtype);                                        \
    }
#if VF_FEW_PANELS == 2
#define FEW_SCORES_MORE(name, dtype) FEW_SCORES(8, 1, name, dtype) FEW_SCORES(12, 1, name, dtype)
#define FEW_TABLE_MORE(name)                                                                       \
    , few_scores_##name##_8, few_scores_##name##_8, few_scores_##name##_12,                        \
        few_scores_##name##_12, few_scores_##name##_12, few_scores_##name##_12
#else
#define FEW_SCORES_MORE(name, dtype)
#define FEW_TABLE_MORE(name)
#endif
/* q is 0 in the rows that fill its last panel, so one case of scores may serve more. */
#define FEW_KERNELS(name, dtype)                                                                   \
    FEW_SCORES(1, 2, name, dtype)                                                                  \
    FEW_SCORES(2, 2, name, dtype)                                                                  \
    FEW_SCORES(3, 2, name, dtype)                                                                  \
    FEW_SCORES(4, 2, name, dtype)                                                                  \
    FEW_SCORES(5, VF_FEW_PANELS, name, dtype)                                                      \
    FEW_SCORES(6, VF_FEW_PANELS, name, dtype)                                                      \
    FEW_SCORES_MORE(name, dtype)                                                                   \
    FEW_VALUES(1, name, dtype)                                                                     \
    FEW_VALUES(2, name, dtype)                                                                     \
    FEW_VALUES(3, name, dtype)                                                                     \
    FEW_VALUES(4, name, dtype)                                                                     \
    FEW_VALUES(5, name, dtype)                                                                     \
    FEW_VALUES(6, name, dtype)                                                                     \
    static few_scores_fn *const few_scores_##name[FEW_ROWS + 1] = {                                \
        NULL,                                                                                      \
        few_scores_##name##_1,                                                                     \
        few_scores_##name##_2,                                                                     \
        few_scores_##name##_3,                                                                     \
        few_scores_##name##_4,                                                                     \
        few_scores_##name##_5,                                                                     \
        few_scores_##name##_6 FEW_TABLE_MORE(name)};                                               \
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

/* Keys between the values that are asked for and those that are used: 2 KiB. Keys are used STEP
 * rows at once, so they are asked for that much ahead. */
static inline int64_t few_distance(int64_t row_bytes)
{
    return attn_max(4, attn_min(2048 / row_bytes, AHEAD));
}
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

/* The same rows so that STREAMS runs of them take turns. */
static inline void interleave_rows(const char *const *rows, const char **out)
{
    for (int i = 0; i < KEYS / STREAMS; i++)
        for (int j = 0; j < STREAMS; j++) out[i * STREAMS + j] = rows[j * (KEYS / STREAMS) + i];
}

static void attend_few(struct tile *tile, const struct few_kernels *kernels, dcp_dtype dtype)
{
    const int64_t elem_bytes = bytes_of(dtype);
    const int64_t distance = few_distance(tile->dv * elem_bytes);
    int64_t begin = next_block(tile, tile->lo / KEYS * KEYS);
    int64_t next = next_block(tile, begin + KEYS);
    struct block_rows *rows = &tile->rows[0];
    struct block_rows *next_rows = &tile->rows[1];
    struct block_rows *later_rows = &tile->rows[2];
    float *s = tile->s;
    float *next_s = tile->s + FEW_ROWS * KEYS;
    find_rows(tile, begin, elem_bytes, rows);
    if (next < tile->hi) find_rows(tile, next, elem_bytes, next_rows);
    interleave_rows(next < tile->hi ? next_rows->k : rows->k, tile->far.k);
    struct ahead k = {
        .near = rows->k + STEP,
        .far = tile->far.k,
        .log2_lines = log2_of_lines(tile->dk * elem_bytes),
    };
    for (int64_t key = 0; key < KEYS; key += STEP)
        kernels->scores(tile->q, rows->k, &k, key, tile->dk, s);
    while (begin < tile->hi) {
        const int64_t later = next_block(tile, next + KEYS);
        if (tile->has_scales) find_scales(tile, begin, dtype);
        for (int64_t r = 0; r < tile->n_rows; r++) weigh_row(tile, r, begin, s + r * KEYS);
        if (later < tile->hi) find_rows(tile, later, elem_bytes, later_rows);
        k.near = next_rows->k + STEP;
        if (later < tile->hi) interleave_rows(later_rows->k, tile->far.k);
        if (next < tile->hi) interleave_rows(next_rows->v, tile->far.v);
        const struct ahead v = {
            .near = rows->v + distance,
            .far = next < tile->hi ? tile->far.v : rows->v,
        };
        for (int64_t key = 0; key < KEYS; key += STEP) {
            if (next < tile->hi) kernels->scores(tile->q, next_rows->k, &k, key, tile->dk, next_s);
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
