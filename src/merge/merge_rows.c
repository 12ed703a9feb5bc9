/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of N sources into one destination. Every algorithm and transport comes through here with its
 * sources in rank order, so the arithmetic, and with it the bits, is that of one place.
 *
 * Per token, DCP__MERGE_ROWS heads at a time:
 *   1. the LSEs of all sources, widened; empty parts become -inf and are counted;
 *   2. weights and merged LSE of all these rows at once;
 *   3. the merged LSEs are written (the sources' LSEs of these rows have been read: in place
 *      works);
 *   4. the parts of positive weight are summed, while the rows to come are fetched. By the pair
 *      kernel, in runs of rows, where there are two sources and both count in all rows of the
 *      group; else by the row kernel, row by row (which hands a row of two parts to the pair
 *      kernel). */
#include <math.h>
#include <string.h>

#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

static float widen(dcp_dtype type, const char *base, int64_t i)
{
    if (type == DCP_F32) return ((const float *)(const void *)base)[i];
    const uint16_t h = ((const uint16_t *)(const void *)base)[i];
    return type == DCP_BF16 ? dcp__bf16_to_f32(h) : dcp__f16_to_f32(h);
}

void dcp__merge_saw(struct dcp__merge_seen *seen, int64_t n, int64_t t, int64_t h, int64_t rank)
{
    seen->n_nonfinite += n;
    const bool is_smaller = seen->t < 0 || t < seen->t ||
                            (t == seen->t && (h < seen->h || (h == seen->h && rank < seen->rank)));
    if (is_smaller) {
        seen->t = t;
        seen->h = h;
        seen->rank = rank;
    }
}

/* A (max, sum) pair: 0 usable, 1 empty, 2 neither. Sums are what adding up exponentials can give.
 */
static int judge_sum(float max, float sum)
{
    const float least = 0x1p-126f;
    const float most = 0x1p100f;
    if (max == -INFINITY || (sum >= 0.0f && sum < least)) return 1;
    return dcp__merge_is_finite(max) && sum >= least && sum <= most ? 0 : 2;
}

static int judge_lse(float lse)
{
    return dcp__merge_is_finite(lse) ? 0 : lse == -INFINITY ? 1 : 2;
}

void dcp__merge_load(const struct dcp__merge_src *src, int64_t t, int64_t h, int n, float *lse,
                     float *sum, bool counts, struct dcp__merge_seen *seen)
{
    for (int j = 0; sum != NULL && j < DCP__MERGE_ROWS; j++) sum[j] = 1.0f;
    if (src->kv_len != NULL && src->kv_len[t] == 0) {
        for (int j = 0; j < DCP__MERGE_ROWS; j++) lse[j] = -INFINITY;
        if (counts) seen->n_lse_empty += n;
        return;
    }
    const int64_t at = dcp__merge_offset(t, h, src->lse_ts, src->lse_hs);
    if (src->lse_type == DCP_F32 && src->lse_hs == 1) {
        memcpy(lse, src->lse + at * (int64_t)sizeof(float), (size_t)n * sizeof(float));
    } else if (src->lse_type == DCP_F32) {
        const float *from = (const float *)(const void *)src->lse + at;
        for (int j = 0; j < n; j++) lse[j] = from[j * src->lse_hs];
    } else {
        for (int j = 0; j < n; j++) lse[j] = widen(src->lse_type, src->lse, at + j * src->lse_hs);
    }
    int n_not_finite = 0;
    if (sum != NULL && src->sum != NULL) {
        for (int j = 0; j < n; j++) {
            sum[j] = widen(src->lse_type, src->sum, at + j * src->lse_hs);
            n_not_finite += judge_sum(lse[j], sum[j]) != 0;
        }
    } else {
        for (int j = 0; j < n; j++) n_not_finite += !dcp__merge_is_finite(lse[j]);
    }
    for (int j = 0; n_not_finite > 0 && j < n; j++) {
        const int verdict =
            sum != NULL && src->sum != NULL ? judge_sum(lse[j], sum[j]) : judge_lse(lse[j]);
        if (verdict == 0) continue;
        if (counts && verdict == 1) seen->n_lse_empty++;
        if (counts && verdict == 2) seen->n_lse_bad++;
        lse[j] = -INFINITY;
        if (sum != NULL) sum[j] = 1.0f;
    }
    for (int j = n; j < DCP__MERGE_ROWS; j++) lse[j] = -INFINITY;
}

/* How many rows ahead to prefetch: some 2 to 8 KiB of each part. */
static int64_t rows_ahead(int64_t row_bytes)
{
    return row_bytes >= 1024 ? 2 : row_bytes >= 256 ? 8 : 16;
}

/* The row to prefetch: it walks ahead of the one that is merged, in the same order. */
struct ahead {
    int64_t t, h;
};

/* The first n rows of all parts, on their way while the first LSEs are read: only hints. */
static void prefetch_first(const struct dcp__merge_src *srcs, int n_ranks, int64_t part_bytes,
                           int64_t dim, const struct dcp__merge_block *b, int64_t n)
{
    struct ahead at = {b->t_begin, b->h_begin};
    for (int64_t i = 0; i < n && at.t < b->t_end; i++) {
        for (int r = 0; r < n_ranks; r++) {
            const char *row =
                srcs[r].out +
                dcp__merge_offset(at.t, at.h, srcs[r].out_ts, srcs[r].out_hs) * part_bytes;
            for (int64_t byte = 0; byte < dim * part_bytes; byte += 64)
                __builtin_prefetch(row + byte, 0, 3);
        }
        if (++at.h == b->h_end) {
            at.h = b->h_begin;
            at.t++;
        }
    }
}

static struct ahead ahead_of_start(const struct dcp__merge_block *b, int64_t n)
{
    const int64_t width = b->h_end - b->h_begin;
    return (struct ahead){b->t_begin + n / width, b->h_begin + n % width};
}

/* From here on a result of one call is stored past the caches: it would not stay near, and ordinary
 * stores fetch every line first. A smaller one is left where its reader will look for it, and is
 * stored where its lines still are: a streaming store has to push those out. Measured, f32, N = 2,
 * (T, 64, 128), contiguous; us of direct in shared memory, streamed / not, where between two calls
 * the result was left alone, read, or written by something else:
 *
 *   result     4 MiB       8             12            16
 *   left       500 / 462   1020 / 1055   1577 / 1827   2186 / 2618
 *   read       510 / 480   1007 / 960    1547 / 1582   2135 / 2576
 *   written    731 / 480   1088 / 987    -             2077 / 2524
 *
 * alltoall over MPI without shared memory: 1475 / 1096 at 4 MiB, 2529 / 2370 at 8 (written), 3480 /
 * 3596 at 12 (read), 4528 / 4886 at 16 (read). */
static const int64_t nt_bytes = (int64_t)10 << 20;

/* Streaming kernels where they may and pay: a large result of aligned rows, not in place. */
static bool streams(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                    dcp_dtype part_type, const struct dcp__merge_block *block,
                    const struct dcp__merge_dst *dst)
{
    const int64_t elem = (int64_t)dcp_dtype_bytes(math->merged_type);
    const int64_t stride_bytes = (dst->out_ts | dst->out_hs | math->dim) * elem;
    const int64_t n_rows = dst->call_rows > 0 ? dst->call_rows : dcp__merge_block_rows(block);
    if (math->kernels.merge_row_nt[part_type][math->merged_type] == NULL ||
        n_rows * math->dim * elem < nt_bytes ||
        (stride_bytes | (int64_t)((uintptr_t)dst->out & (DCP__MERGE_NT_ALIGN - 1))) %
                DCP__MERGE_NT_ALIGN !=
            0)
        return false;
    for (int r = 0; r < math->n_parts; r++) {
        const int64_t at =
            dcp__merge_offset(block->t_begin, block->h_begin, srcs[r].out_ts, srcs[r].out_hs) *
            (int64_t)dcp_dtype_bytes(part_type);
        const int64_t to = dcp__merge_offset(block->t_begin - dst->t0, block->h_begin - dst->h0,
                                             dst->out_ts, dst->out_hs) *
                           elem;
        if (srcs[r].out + at == dst->out + to) return false; /* in place */
    }
    return true;
}

/* How far beyond the row that is stored the result is fetched, where its rows follow each other:
 * the line a store finds missing is read before it is written, and more of them are on their way
 * than the stores that wait would ask for. Measured in turns, alltoall of (64, 64, 128) float32
 * over MPI, 256 to 1024 bytes: 2 to 4 % less time for the whole; 4096 bytes: 1 %. */
static const int64_t to_ahead_bytes = 512;

/* Rows of a result that follow each other, without gaps: else what lies beyond one may be another
 * rank's to read. In place the lines come with the part; past the caches none is fetched. */
static int64_t fetches_result(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                              int64_t part_bytes, const struct dcp__merge_block *block,
                              const struct dcp__merge_dst *dst, int64_t merged_bytes)
{
    const int64_t width = block->h_end - block->h_begin;
    if (dst->out_hs != math->dim || dst->out_ts != width * math->dim) return 0;
    const char *const to =
        dst->out + dcp__merge_offset(block->t_begin - dst->t0, block->h_begin - dst->h0,
                                     dst->out_ts, dst->out_hs) *
                       merged_bytes;
    for (int r = 0; r < math->n_parts; r++) {
        if (srcs[r].out +
                dcp__merge_offset(block->t_begin, block->h_begin, srcs[r].out_ts, srcs[r].out_hs) *
                    part_bytes ==
            to)
            return 0;
    }
    return to_ahead_bytes;
}

/* DCP__MERGE_ROWS heads of a token, or what is left of them. */
struct group {
    int64_t t, h0;
    int n;
};

static struct group group_at(const struct dcp__merge_block *b, int64_t t, int64_t h0)
{
    const int64_t left = b->h_end - h0;
    return (struct group){t, h0, left < DCP__MERGE_ROWS ? (int)left : (int)DCP__MERGE_ROWS};
}

static struct group group_after(const struct dcp__merge_block *b, const struct group *g)
{
    const bool is_last = g->h0 + g->n == b->h_end;
    return group_at(b, is_last ? g->t + 1 : g->t, is_last ? b->h_begin : g->h0 + g->n);
}

/* Steps 1 to 3 of a group. weights: [n_parts][DCP__MERGE_ROWS]. */
static void weigh_group(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                        const float *sink, const struct group *g, const struct dcp__merge_dst *dst,
                        float *weights, bool counts, struct dcp__merge_seen *seen)
{
    const struct dcp__merge_scratch *s = &math->scratch;
    for (int r = 0; r < math->n_parts; r++)
        dcp__merge_load(&srcs[r], g->t, g->h0, g->n, s->lse + (int64_t)r * DCP__MERGE_ROWS,
                        math->has_sum ? s->sum + (int64_t)r * DCP__MERGE_ROWS : NULL, counts, seen);
    float sinks[DCP__MERGE_ROWS];
    float merged_lse[DCP__MERGE_ROWS];
    if (sink != NULL) {
        for (int j = 0; j < DCP__MERGE_ROWS; j++) sinks[j] = j < g->n ? sink[g->h0 + j] : -INFINITY;
    }
    dcp__merge_weights(math, s->lse, math->has_sum ? s->sum : NULL, math->n_parts,
                       sink != NULL ? sinks : NULL, weights, merged_lse);
    if (dst->lse == NULL) return;
    float *to =
        dst->lse + dcp__merge_offset(g->t - dst->t0, g->h0 - dst->h0, dst->lse_ts, dst->lse_hs);
    for (int j = 0; j < g->n; j++) to[j * dst->lse_hs] = merged_lse[j];
}

/* Where a call is: what its rows are made of, and how far it looks ahead. */
struct walk {
    const struct dcp__merge_math *math;
    const struct dcp__merge_src *srcs;
    const struct dcp__merge_block *block;
    const struct dcp__merge_dst *dst;
    dcp__merge_row_fn *merge_row;
    dcp__merge_pair_fn *merge_pair;
    int64_t part_bytes, merged_bytes;
    int64_t to_ahead; /* bytes; 0: the result is not fetched */
    struct ahead ahead;
    bool zeroes, counts;
    struct dcp__merge_seen *seen;
};

static const char *place_of(const struct walk *k, int r, int64_t t, int64_t h)
{
    const struct dcp__merge_src *src = &k->srcs[r];
    return src->out + dcp__merge_offset(t, h, src->out_ts, src->out_hs) * k->part_bytes;
}

static char *result_of(const struct walk *k, int64_t t, int64_t h)
{
    return k->dst->out +
           dcp__merge_offset(t - k->dst->t0, h - k->dst->h0, k->dst->out_ts, k->dst->out_hs) *
               k->merged_bytes;
}

/* True where the walk ahead enters another token. */
static bool step_ahead(struct walk *k)
{
    if (++k->ahead.h < k->block->h_end) return false;
    k->ahead.h = k->block->h_begin;
    k->ahead.t++;
    return true;
}

/* Only hints: addresses are made, nothing is read. */
static void aim_ahead(const struct walk *k)
{
    for (int r = 0; r < k->math->n_parts; r++)
        k->math->scratch.ahead[r] = place_of(k, r, k->ahead.t, k->ahead.h);
}

/* n rows of a full group of two ranks, from head h0 + j on; returns how many are done: at least
 * one. */
static int merge_pairs(const struct walk *k, const struct group *g, const float *weights, int j,
                       int n)
{
    struct dcp__merge_pair pair = {.w = {weights + j, weights + DCP__MERGE_ROWS + j},
                                   .dst = result_of(k, g->t, g->h0 + j),
                                   .dst_hop = k->dst->out_hs * k->merged_bytes,
                                   .dst_ahead = k->to_ahead,
                                   .n_rows = n};
    for (int r = 0; r < 2; r++) {
        pair.parts[r] = place_of(k, r, g->t, g->h0 + j);
        pair.ahead[r] =
            k->ahead.t < k->block->t_end ? place_of(k, r, k->ahead.t, k->ahead.h) : pair.parts[r];
        pair.part_hop[r] = k->srcs[r].out_hs * k->part_bytes;
    }
    int64_t n_bad;
    int first = 2;
    const int done = k->merge_pair(&pair, k->math->dim, k->zeroes, &n_bad, &first);
    if (n_bad != 0 && k->counts) dcp__merge_saw(k->seen, n_bad, g->t, g->h0 + j + done - 1, first);
    return done;
}

/* Rows of a group of two ranks whose parts both count, in runs that are also runs of the rows
 * ahead. */
static void merge_full_pairs(struct walk *k, const struct group *g, const float *weights)
{
    for (int j = 0; j < g->n;) {
        const int64_t run = k->block->h_end - k->ahead.h;
        const int done = merge_pairs(k, g, weights, j, g->n - j < run ? g->n - j : (int)run);
        j += done;
        k->ahead.h += done;
        if (k->ahead.h < k->block->h_end) continue;
        k->ahead.h = k->block->h_begin;
        k->ahead.t++;
    }
}

/* Rows of a group whose parts all count: pointers only advance. */
static void merge_full_group(struct walk *k, const struct group *g, const float *weights)
{
    const struct dcp__merge_scratch *s = &k->math->scratch;
    const int n_ranks = k->math->n_parts;
    for (int r = 0; r < n_ranks; r++) s->parts[r] = place_of(k, r, g->t, g->h0);
    aim_ahead(k);
    const int64_t row_bytes = k->math->dim * k->part_bytes;
    char *to = result_of(k, g->t, g->h0);
    for (int j = 0; j < g->n; j++) {
        for (int r = 0; r < n_ranks; r++)
            s->part_weights[r] = weights[(int64_t)r * DCP__MERGE_ROWS + j];
        int first = n_ranks;
        const int64_t n_bad =
            k->merge_row(s->parts, s->part_weights, n_ranks, k->math->dim, to, k->zeroes,
                         k->ahead.t < k->block->t_end ? s->ahead : NULL, &first);
        if (n_bad != 0 && k->counts) dcp__merge_saw(k->seen, n_bad, g->t, g->h0 + j, first);
        to += k->dst->out_hs * k->merged_bytes;
        for (int r = 0; r < n_ranks; r++) {
            const int64_t hop = k->srcs[r].out_hs * k->part_bytes;
            s->parts[r] = (const char *)s->parts[r] + hop;
            if (hop == row_bytes) dcp__merge_start_page(s->ahead[r], row_bytes);
            s->ahead[r] = (const char *)s->ahead[r] + hop;
        }
        if (step_ahead(k)) aim_ahead(k);
    }
}

/* The same where some part of some row is empty. */
static void merge_group(struct walk *k, const struct group *g, const float *weights)
{
    const struct dcp__merge_scratch *s = &k->math->scratch;
    for (int j = 0; j < g->n; j++) {
        const int64_t h = g->h0 + j;
        int n_parts = 0;
        for (int r = 0; r < k->math->n_parts; r++) {
            const float w = weights[(int64_t)r * DCP__MERGE_ROWS + j];
            if (!(w > 0.0f)) continue;
            s->parts[n_parts] = place_of(k, r, g->t, h);
            s->ahead[n_parts] = place_of(k, r, k->ahead.t, k->ahead.h);
            s->part_weights[n_parts] = w;
            s->part_rank[n_parts] = r;
            n_parts++;
        }
        const bool looks_ahead = k->ahead.t < k->block->t_end;
        (void)step_ahead(k);
        char *to = result_of(k, g->t, h);
        if (n_parts == 0) {
            memset(to, 0, (size_t)(k->math->dim * k->merged_bytes));
            continue;
        }
        int first = n_parts;
        const int64_t n_bad = k->merge_row(s->parts, s->part_weights, n_parts, k->math->dim, to,
                                           k->zeroes, looks_ahead ? s->ahead : NULL, &first);
        if (n_bad != 0 && k->counts) dcp__merge_saw(k->seen, n_bad, g->t, h, s->part_rank[first]);
    }
}

static bool is_full(const struct group *g, int n_parts, const float *weights)
{
    int n_used = 0;
    for (int r = 0; r < n_parts; r++) {
        for (int j = 0; j < g->n; j++) n_used += weights[(int64_t)r * DCP__MERGE_ROWS + j] > 0.0f;
    }
    return n_parts > 0 && n_used == n_parts * g->n;
}

void dcp__merge_tokens(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                       dcp_dtype part_type, const float *sink, const struct dcp__merge_block *block,
                       int64_t t_begin, int64_t t_end, const struct dcp__merge_dst *dst,
                       bool counts, struct dcp__merge_seen *seen)
{
    if (t_begin >= t_end || dcp__merge_block_rows(block) == 0) return;
    const int64_t part_bytes = (int64_t)dcp_dtype_bytes(part_type);
    const int64_t merged_bytes = (int64_t)dcp_dtype_bytes(math->merged_type);
    const int64_t n_ahead = rows_ahead(math->dim * part_bytes);
    const bool is_streaming = streams(math, srcs, part_type, block, dst);
    const struct dcp__merge_kernels *kernels = &math->kernels;
    const dcp_dtype merged_type = math->merged_type;
    struct dcp__merge_block rest = *block;
    rest.t_begin = t_begin;
    struct walk k = {
        .math = math,
        .srcs = srcs,
        .block = block,
        .dst = dst,
        .merge_row =
            (is_streaming ? kernels->merge_row_nt : kernels->merge_row)[part_type][merged_type],
        .merge_pair =
            (is_streaming ? kernels->merge_pair_nt : kernels->merge_pair)[part_type][merged_type],
        .part_bytes = part_bytes,
        .merged_bytes = merged_bytes,
        .to_ahead =
            is_streaming ? 0 : fetches_result(math, srcs, part_bytes, block, dst, merged_bytes),
        .ahead = ahead_of_start(&rest, n_ahead),
        .zeroes = math->nonfinite == DCP_NONFINITE_ZERO,
        .counts = counts,
        .seen = seen,
    };
    /* Of a later part of the block they have been fetched at the end of the one before. */
    if (t_begin == block->t_begin)
        prefetch_first(srcs, math->n_parts, part_bytes, math->dim, block, n_ahead);
    for (struct group g = group_at(block, t_begin, block->h_begin); g.t < t_end;
         g = group_after(block, &g)) {
        float *weights = math->scratch.weights;
        weigh_group(math, srcs, sink, &g, dst, weights, counts, seen);
        if (!is_full(&g, math->n_parts, weights))
            merge_group(&k, &g, weights);
        else if (math->n_parts == 2)
            merge_full_pairs(&k, &g, weights);
        else
            merge_full_group(&k, &g, weights);
    }
    if (is_streaming) dcp__merge_fence();
}

void dcp__merge_rows(const struct dcp__merge_math *math, const struct dcp__merge_src *srcs,
                     dcp_dtype part_type, const float *sink, const struct dcp__merge_block *block,
                     const struct dcp__merge_dst *dst, bool counts, struct dcp__merge_seen *seen)
{
    dcp__merge_tokens(math, srcs, part_type, sink, block, block->t_begin, block->t_end, dst, counts,
                      seen);
}

/* The LSEs of a token's heads; returns how many are finite. */
static int64_t pack_lses(const struct dcp__merge_src *src, int64_t t,
                         const struct dcp__merge_block *block, float *to)
{
    const int64_t width = block->h_end - block->h_begin;
    const int64_t at = dcp__merge_offset(t, block->h_begin, src->lse_ts, src->lse_hs);
    if (src->lse_type == DCP_F32 && src->lse_hs == 1) {
        memcpy(to, src->lse + at * (int64_t)sizeof(float), (size_t)width * sizeof(float));
    } else {
        for (int64_t i = 0; i < width; i++)
            to[i] = widen(src->lse_type, src->lse, at + i * src->lse_hs);
    }
    int64_t n_finite = 0;
    for (int64_t i = 0; i < width; i++) n_finite += dcp__merge_is_finite(to[i]);
    return n_finite;
}

void dcp__merge_pack(const struct dcp_merge *m, const struct dcp__merge_src *src,
                     const struct dcp__merge_block *block, dcp_dtype type, char *payload,
                     float *cols)
{
    const dcp_dtype out_type = m->desc.out_type;
    const int64_t from_bytes = (int64_t)dcp_dtype_bytes(out_type);
    const int64_t to_bytes = (int64_t)dcp_dtype_bytes(type);
    const int64_t dim = m->desc.dim;
    const int64_t n_rows = dcp__merge_block_rows(block);
    dcp__merge_row_fn *convert = m->math.kernels.merge_row[out_type][type];
    const float one = 1.0f;
    const int64_t width = block->h_end - block->h_begin;
    const bool is_one_piece =
        payload != NULL && type == out_type && (src->out_hs == dim || width == 1);
    int64_t row = 0;
    for (int64_t t = block->t_begin; t < block->t_end; t++) {
        const bool is_empty = src->kv_len != NULL && src->kv_len[t] == 0;
        const bool has_lses = src->sum == NULL && !is_empty && (is_one_piece || payload == NULL);
        const bool are_finite = has_lses && pack_lses(src, t, block, cols + row) == width;
        if (has_lses && payload == NULL) {
            row += width;
            continue;
        }
        if (are_finite) {
            const int64_t at = dcp__merge_offset(t, block->h_begin, src->out_ts, src->out_hs);
            memcpy(payload + row * dim * to_bytes, src->out + at * from_bytes,
                   (size_t)(width * dim * to_bytes));
            row += width;
            continue;
        }
        for (int64_t h = block->h_begin; h < block->h_end; h++, row++) {
            const int64_t at = dcp__merge_offset(t, h, src->lse_ts, src->lse_hs);
            const float lse = is_empty ? -INFINITY : widen(src->lse_type, src->lse, at);
            cols[row] = lse;
            bool is_used = dcp__merge_is_finite(lse);
            if (src->sum != NULL) {
                const float sum = is_empty ? 1.0f : widen(src->lse_type, src->sum, at);
                cols[n_rows + row] = sum;
                is_used = judge_sum(lse, sum) == 0;
            }
            if (payload == NULL || !is_used) continue;
            const void *from =
                src->out + dcp__merge_offset(t, h, src->out_ts, src->out_hs) * from_bytes;
            char *to = payload + row * dim * to_bytes;
            int first = 1;
            if (type == out_type)
                memcpy(to, from, (size_t)(dim * to_bytes));
            else
                (void)convert(&from, &one, 1, dim, to, false, NULL, &first);
        }
    }
}

struct dcp__merge_src dcp__merge_unpacked(const struct dcp_merge *m, const char *payload,
                                          const char *cols, const struct dcp__merge_block *block,
                                          size_t elem_bytes)
{
    const int64_t width = block->h_end - block->h_begin;
    const int64_t n_rows = dcp__merge_block_rows(block);
    const int64_t skipped = dcp__merge_offset(block->t_begin, block->h_begin, width, 1); /* rows */
    const int64_t lse_skipped = skipped * (int64_t)sizeof(float);
    return (struct dcp__merge_src){
        payload - skipped * m->desc.dim * (int64_t)elem_bytes,
        width * m->desc.dim,
        m->desc.dim,
        cols - lse_skipped,
        width,
        1,
        NULL,
        DCP_F32,
        m->math.has_sum ? cols + n_rows * (int64_t)sizeof(float) - lse_skipped : NULL};
}

struct dcp__merge_dst dcp__merge_result(const struct dcp_merge *m, const struct dcp__merge_run *run)
{
    const struct dcp__merge_block own =
        dcp__merge_block_got(m->desc.cut, run->n_tokens, m->desc.n_heads, m->n_ranks, m->rank);
    const dcp_merge_args *a = &run->args;
    return (struct dcp__merge_dst){a->merged,
                                   a->merged_token_stride,
                                   a->merged_head_stride,
                                   a->merged_lse,
                                   a->merged_lse_token_stride,
                                   a->merged_lse_head_stride,
                                   own.t_begin,
                                   own.h_begin,
                                   dcp__merge_block_rows(&own)};
}
