/* SPDX-License-Identifier: Apache-2.0 */
/* Dense products over quantised weight rows.
 *
 *   a few tokens    chunks of rows by own kernels: QDOT16 on quantised rows, the activations made
 *                   integers once per call (error 2e-5 of the result's rms, docs/NUMERICS.md), one
 *                   pass over a row for all tokens; QDOT, in f32, on single elements, and on all
 *                   types if f32 was asked for. A result's bits are those of its row and token
 *                   alone.
 *   more            panels of rows, cut at multiples of panel_rows(k) from the slice's start:
 *                   dequantised into the thread's scratch, multiplied by oneDNN. Its f32 bits were
 *                   found to be the same for any panel of 8 or more rows and any n_tokens of 16 or
 *                   more, so that the last panel takes up to 7 rows more rather than leave few.
 *
 *   weight rows   0       64      128     192  200
 *                 |-item0-|-item1-|-item2-|-i3-|      items of all weights of a call form one
 *                                                     parallel region, handed out one by one
 *
 * Scratch per thread: a panel in f32 (rows padded by 16 elements, so that a stride that is a power
 * of two does not fall on few cache sets: 1.5 times the speed at k = 2048), and in bf16 mode one
 * row in f32, the panel in bf16 and a tile of the result. Shared: the call's x in bf16.
 *
 * bf16 products are oneDNN primitives of a fixed shape. Making one takes up to a millisecond and
 * memory, so create makes all of them: for each k, tiles of 256, 64 and 16 tokens by one panel of
 * rows. A call cuts its tokens into these; what a tile has beyond the call's tokens or the weight's
 * rows is computed and dropped.
 *
 *   300 tokens    |------------ 256 ------------|-- 64: 44 used --|       widest first, then the
 *                                                                         narrowest that holds the
 *                                                                         rest */
#include "engine/linear.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "engine/linear_few.h"
#include "engine/linear_gemm.h"
#include "kernels/kernels_priv.h"

enum {
    /* Time of own kernels over that of panels by oneDNN in f32, for T tokens.
     * f32 kernels (one thread, k 576, 8192 rows, AVX-512, medians of 9 runs in turn):
     *              quantised      f16, bf16      f32
     *   T = 1      0.5            0.4            1.3
     *   T = 2      1.0 to 1.1     0.75           1.15
     *   T = 3      1.3 to 1.6     0.85 to 0.9    1.8
     * Integer kernels (all weights of a small Llama in Q4_1 and of a Gemma 3 in Q5_0, Q8_0 and _K,
     * two threads, AVX-512 with VNNI): T = 9: 0.76, 0.93; T = 12: 0.81, 0.97; T = 16: 0.72, 0.71;
     * T = 24, from thrice T = 8: about 0.95. Beside bf16 on AMX: not measured. */
    DIRECT_TOKENS = 2,
    INTEGER_TOKENS = LINEAR_FEW_MAX,
    INTEGER_TOKENS_BF16 = 8,
    MAX_WEIGHTS = 8, /* of one parallel region */
    MIN_PANEL_ROWS = 8,
    N_TILES = 3,
    PAD_ELEMS = 16,
    MIN_CHUNK_BYTES = 16384,
    MAX_CHUNK_BYTES = 1 << 20,
    CHUNKS_PER_THREAD = 8 /* enough that the last one evens out */
};

struct linear {
    struct dcp_pool *pool;
    int n_threads;
    enum compute_type compute;
    char note[256];
    int64_t max_tokens, max_k;
    bool is_exact; /* f32 products for few tokens as well */
    struct dcp__kernels kernels;
    struct linear_few few;
    struct gemm *gemm;
    float *panels;         /* [n_threads][panel_elems] */
    int64_t panel_elems;   /* largest over k <= max_k */
    uint16_t *bf16_panels; /* [n_threads][panel_elems], bf16 mode */
    uint16_t *bf16_x;      /* [max_tokens, rounded up to a tile][padded max_k], bf16 mode */
    float *tiles;          /* [n_threads][tile_elems], bf16 mode: rows of panel_rows(k) */
    int64_t tile_elems;
    int n_ks;
    int64_t ks[LINEAR_MAX_KS];
    struct gemm_plan *plans[LINEAR_MAX_KS][N_TILES]; /* bf16 mode */
};

static const int64_t tile_tokens[N_TILES] = {16, 64, 256};

/* One weight of a call. */
struct part {
    const struct weight *w;
    float *y;
    int64_t y_stride;
    int64_t item_rows, n_items;
};

struct call {
    struct linear *l;
    const float *x;
    int64_t x_stride, n_tokens;
    int n_parts;
    struct gemm_plan *const *plans; /* [N_TILES] for k, bf16 mode */
    unsigned orders;                /* of planes that some weight wants */
    struct part parts[MAX_WEIGHTS];
    _Atomic int gemm_status;
};

static int64_t panel_rows(int64_t k)
{
    if (k <= 4096) return 64;
    return k <= 8192 ? 32 : 16;
}

static int64_t padded(int64_t k)
{
    return (k + 15) / 16 * 16 + PAD_ELEMS;
}

/* --- create ---------------------------------------------------------------------------------- */

static dcp_status choose_compute(struct linear *l, enum compute_type compute, dcp_isa isa)
{
    bool bf16 = compute == COMPUTE_BF16;
    if (compute == COMPUTE_DEFAULT) {
        struct dcp__cpu cpu;
        dcp__cpu_detect(&cpu);
        bf16 = isa >= DCP_ISA_AMX && cpu.amx_bf16;
    }
    l->compute = COMPUTE_F32;
    if (bf16) {
        const dcp_status st = gemm_create(l->n_threads, true, &l->gemm);
        if (st == DCP_OK) {
            l->compute = COMPUTE_BF16;
            return DCP_OK;
        }
        if (st != DCP_ERR_NOT_SUPPORTED) return st;
        (void)snprintf(l->note, sizeof(l->note), "f32 in place of bf16: no bf16 products here (%s)",
                       dcp_last_error());
    }
    return gemm_create(l->n_threads, false, &l->gemm);
}

static dcp_status create_scratch(struct linear *l)
{
    const int64_t steps[] = {4096, 8192, l->max_k};
    for (int i = 0; i < 3; i++) {
        const int64_t k = steps[i] < l->max_k ? steps[i] : l->max_k;
        const int64_t elems = (panel_rows(k) + MIN_PANEL_ROWS) * padded(k);
        if (elems > l->panel_elems) l->panel_elems = elems;
    }
    const size_t n_threads = (size_t)l->n_threads, elems = (size_t)l->panel_elems;
    void *p = NULL;
    DCP_TRY(dcp__alloc_array(n_threads, elems * sizeof(float), "weight panels", &p));
    l->panels = p;
    if (l->compute != COMPUTE_BF16) return DCP_OK;
    DCP_TRY(dcp__alloc_array(n_threads, elems * sizeof(uint16_t), "bf16 weight panels", &p));
    l->bf16_panels = p;
    const int64_t widest = tile_tokens[N_TILES - 1];
    const size_t x_rows = (size_t)((l->max_tokens + widest - 1) / widest * widest);
    DCP_TRY(dcp__alloc_array(x_rows, (size_t)padded(l->max_k) * sizeof(uint16_t),
                             "bf16 activations", &p));
    l->bf16_x = p;
    l->tile_elems = widest * panel_rows(1);
    DCP_TRY(dcp__alloc_array(n_threads, (size_t)l->tile_elems * sizeof(float), "bf16 results", &p));
    l->tiles = p;
    return DCP_OK;
}

static int64_t narrowest_tile(int64_t n_tokens)
{
    int i = 0;
    while (i < N_TILES - 1 && tile_tokens[i] < n_tokens) i++;
    return i;
}

/* Every product that a run may want, so that it makes none. */
static dcp_status create_plans(struct linear *l)
{
    if (l->compute != COMPUTE_BF16) return DCP_OK;
    for (int i = 0; i < l->n_ks; i++) {
        const int64_t k = l->ks[i], rows = panel_rows(k);
        for (int64_t t = 0; t <= narrowest_tile(l->max_tokens); t++) {
            const struct gemm_shape shape = {tile_tokens[t], rows, k, padded(k), padded(k), rows};
            DCP_TRY(gemm_plan(l->gemm, &shape, &l->plans[i][t]));
        }
    }
    return DCP_OK;
}

static dcp_status note_ks(struct linear *l, const int64_t *ks, int n_ks)
{
    for (int i = 0; i < n_ks; i++) {
        int at = 0;
        while (at < l->n_ks && l->ks[at] != ks[i]) at++;
        if (at < l->n_ks) continue;
        if (ks[i] < 1 || ks[i] > (int64_t)1 << 31 || at == LINEAR_MAX_KS)
            return dcp__fail(DCP_ERR_ARG,
                             "k %lld: must be 1 to 2^31, and at most %d different ones",
                             (long long)ks[i], (int)LINEAR_MAX_KS);
        l->ks[l->n_ks++] = ks[i];
        if (ks[i] > l->max_k) l->max_k = ks[i];
    }
    return DCP_OK;
}

dcp_status linear_create(struct dcp_pool *pool, enum compute_type compute, dcp_isa isa,
                         int64_t max_tokens, const int64_t *ks, int n_ks, struct linear **out)
{
    if (max_tokens < 1 || n_ks < 1)
        return dcp__fail(DCP_ERR_ARG, "max_tokens %lld and n_ks %d must be at least 1",
                         (long long)max_tokens, n_ks);
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct linear), "dense products", &p));
    struct linear *l = p;
    l->pool = pool;
    l->n_threads = dcp__pool_threads(pool);
    l->max_tokens = max_tokens;
    l->is_exact = compute == COMPUTE_F32;
    dcp__kernels_select(isa, &l->kernels);
    dcp_status st = note_ks(l, ks, n_ks);
    if (st == DCP_OK) st = choose_compute(l, compute, isa);
    if (st == DCP_OK) st = create_scratch(l);
    if (st == DCP_OK && !l->is_exact) st = linear_few_init(&l->few, max_tokens, l->max_k);
    if (st == DCP_OK) st = create_plans(l);
    if (st != DCP_OK) {
        linear_destroy(l);
        return st;
    }
    *out = l;
    return DCP_OK;
}

void linear_destroy(struct linear *l)
{
    if (l == NULL) return;
    gemm_destroy(l->gemm);
    linear_few_fini(&l->few);
    dcp__free(l->panels);
    dcp__free(l->bf16_panels);
    dcp__free(l->bf16_x);
    dcp__free(l->tiles);
    dcp__free(l);
}

enum compute_type linear_compute(const struct linear *l)
{
    return l->compute;
}

bool linear_is_exact(const struct linear *l)
{
    return l->is_exact;
}

int linear_n_plans(const struct linear *l)
{
    return gemm_n_plans(l->gemm);
}

const char *linear_kernel(const struct linear *l, int qtype)
{
    if (qtype < 0 || qtype >= 32) return NULL;
    const bool is_integer = !l->is_exact && l->kernels.qdot16[qtype] != NULL;
    return is_integer ? l->kernels.qdot16_name[qtype] : l->kernels.qdot_name[qtype];
}

const char *linear_note(const struct linear *l)
{
    return l->note;
}

/* --- few tokens ------------------------------------------------------------------------------ */

/* The part that item belongs to; item becomes its index there. */
static struct part *find_part(struct call *c, int64_t *item)
{
    struct part *p = c->parts;
    while (*item >= p->n_items) *item -= (p++)->n_items;
    return p;
}

static void run_direct_item(void *ctx, int64_t item, int thread)
{
    struct call *c = ctx;
    (void)thread;
    const struct part *p = find_part(c, &item);
    const struct weight *w = p->w;
    const int64_t first = item * p->item_rows;
    const int64_t left = w->n_rows - first;
    const int64_t n_rows = left < p->item_rows ? left : p->item_rows;
    const char *rows = (const char *)w->data + (size_t)first * w->row_bytes;
    dcp__qdot16_fn *const by_integers = c->l->kernels.qdot16[w->qtype];
    if (!c->l->is_exact && by_integers != NULL) {
        by_integers(rows, w->row_bytes, n_rows, w->k, c->l->few.rows, (int)c->n_tokens,
                    p->y + first, p->y_stride);
        return;
    }
    for (int64_t t = 0; t < c->n_tokens; t++)
        c->l->kernels.qdot[w->qtype](rows, w->row_bytes, n_rows, w->k, c->x + t * c->x_stride,
                                     p->y + t * p->y_stride + first);
}

static void take_token_item(void *ctx, int64_t t, int thread)
{
    struct call *c = ctx;
    (void)thread;
    linear_few_take(&c->l->few, &c->l->kernels, c->orders, (int)t, c->x + t * c->x_stride,
                    c->parts[0].w->k);
}

/* Activations as integers, if some weight takes them so. */
static void take_activations(struct call *c)
{
    bool is_wanted = false;
    if (c->l->is_exact) return;
    for (int i = 0; i < c->n_parts; i++) {
        const int order = dcp__q16_order(c->parts[i].w->qtype);
        if (order < 0) continue;
        is_wanted = true;
        if (order < DCP__Q16_ORDERS) c->orders |= 1u << order;
    }
    if (is_wanted)
        dcp__pool_run(c->n_tokens < 4 ? NULL : c->l->pool, c->n_tokens, take_token_item, c);
}

static void run_direct(struct call *c)
{
    take_activations(c);
    size_t n_bytes = 0;
    for (int i = 0; i < c->n_parts; i++)
        n_bytes += (size_t)c->parts[i].w->n_rows * c->parts[i].w->row_bytes;
    size_t chunk = n_bytes / ((size_t)c->l->n_threads * CHUNKS_PER_THREAD);
    if (chunk < MIN_CHUNK_BYTES) chunk = MIN_CHUNK_BYTES;
    if (chunk > MAX_CHUNK_BYTES) chunk = MAX_CHUNK_BYTES;
    int64_t n_items = 0;
    for (int i = 0; i < c->n_parts; i++) {
        struct part *p = &c->parts[i];
        /* A multiple of the rows that kernels take at a time. */
        p->item_rows = ((int64_t)(chunk / p->w->row_bytes) + 8) / 8 * 8;
        p->n_items = (p->w->n_rows + p->item_rows - 1) / p->item_rows;
        n_items += p->n_items;
    }
    dcp__pool_run(c->l->pool, n_items, run_direct_item, c);
}

/* --- many tokens ----------------------------------------------------------------------------- */

static void note_gemm(struct call *c, int status)
{
    int none = 0;
    if (status != 0) atomic_compare_exchange_strong(&c->gemm_status, &none, status);
}

static int multiply_f32(const struct call *c, const struct part *p, const char *rows,
                        int64_t n_rows, int thread, float *y)
{
    const struct weight *w = p->w;
    struct gemm_shape shape = {c->n_tokens, n_rows, w->k, c->x_stride, padded(w->k), p->y_stride};
    if (w->qtype == DCP__Q_F32 && w->row_bytes % sizeof(float) == 0) {
        shape.w_stride = (int64_t)(w->row_bytes / sizeof(float));
        return gemm_f32(&shape, c->x, (const float *)(const void *)rows, y);
    }
    float *panel = c->l->panels + thread * c->l->panel_elems;
    c->l->kernels.dequant[w->qtype](rows, w->row_bytes, n_rows, w->k, panel, shape.w_stride);
    return gemm_f32(&shape, c->x, panel, y);
}

/* Rows of the panel beyond n_rows hold what an earlier panel left; their results are dropped. */
static int multiply_bf16(const struct call *c, const struct part *p, const char *rows,
                         int64_t n_rows, int thread, float *y)
{
    struct linear *l = c->l;
    const struct weight *w = p->w;
    float *row = l->panels + thread * l->panel_elems, *tile = l->tiles + thread * l->tile_elems;
    uint16_t *panel = l->bf16_panels + thread * l->panel_elems;
    for (int64_t i = 0; i < n_rows; i++) {
        l->kernels.dequant[w->qtype](rows + (size_t)i * w->row_bytes, w->row_bytes, 1, w->k, row,
                                     w->k);
        l->kernels.to_bf16(row, w->k, panel + i * padded(w->k));
    }
    for (int64_t t = 0; t < c->n_tokens;) {
        const int64_t i = narrowest_tile(c->n_tokens - t);
        const int st =
            gemm_bf16(l->gemm, c->plans[i], thread, l->bf16_x + t * padded(w->k), panel, tile);
        if (st != 0) return st;
        const int64_t left = c->n_tokens - t, n = left < tile_tokens[i] ? left : tile_tokens[i];
        for (int64_t j = 0; j < n; j++)
            memcpy(y + (t + j) * p->y_stride, tile + j * p->item_rows,
                   (size_t)n_rows * sizeof(float));
        t += n;
    }
    return 0;
}

static void run_panel_item(void *ctx, int64_t item, int thread)
{
    struct call *c = ctx;
    const struct part *p = find_part(c, &item);
    const struct weight *w = p->w;
    const int64_t first = item * p->item_rows;
    const int64_t n_rows = item == p->n_items - 1 ? w->n_rows - first : p->item_rows;
    const char *rows = (const char *)w->data + (size_t)first * w->row_bytes;
    const int token = gemm_enter(c->l->gemm);
    note_gemm(c, c->l->compute == COMPUTE_BF16
                     ? multiply_bf16(c, p, rows, n_rows, thread, p->y + first)
                     : multiply_f32(c, p, rows, n_rows, thread, p->y + first));
    gemm_leave(c->l->gemm, token);
}

static void round_x_item(void *ctx, int64_t t, int thread)
{
    struct call *c = ctx;
    (void)thread;
    const int64_t k = c->parts[0].w->k;
    c->l->kernels.to_bf16(c->x + t * c->x_stride, k, c->l->bf16_x + t * padded(k));
}

static dcp_status find_plans(struct call *c)
{
    const struct linear *l = c->l;
    const int64_t k = c->parts[0].w->k;
    for (int i = 0; i < l->n_ks; i++)
        if (l->ks[i] == k) c->plans = l->plans[i];
    if (c->plans != NULL) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "weights of k %lld: not among those of linear_create",
                     (long long)k);
}

/* Most tokens for which own kernels are the faster way, for the weights of a call. */
static int64_t direct_tokens(const struct call *c)
{
    if (c->l->is_exact) return DIRECT_TOKENS;
    for (int i = 0; i < c->n_parts; i++)
        if (dcp__q16_order(c->parts[i].w->qtype) < 0) return DIRECT_TOKENS;
    return c->l->compute == COMPUTE_BF16 ? INTEGER_TOKENS_BF16 : INTEGER_TOKENS;
}

static dcp_status run_panels(struct call *c)
{
    struct linear *l = c->l;
    const bool bf16 = l->compute == COMPUTE_BF16;
    if (bf16) DCP_TRY(find_plans(c));
    int64_t n_items = 0;
    for (int i = 0; i < c->n_parts; i++) {
        struct part *p = &c->parts[i];
        p->item_rows = panel_rows(p->w->k);
        p->n_items = p->w->n_rows / p->item_rows;
        const int64_t left = p->w->n_rows % p->item_rows;
        if (p->n_items == 0 || left >= (bf16 ? 1 : MIN_PANEL_ROWS)) p->n_items++;
        n_items += p->n_items;
    }
    if (l->compute == COMPUTE_BF16) dcp__pool_run(l->pool, c->n_tokens, round_x_item, c);
    dcp__pool_run(l->pool, n_items, run_panel_item, c);
    const int status = atomic_load(&c->gemm_status);
    if (status != 0)
        return dcp__fail(DCP_ERR_SYS, "oneDNN matrix product, %lld tokens, k %lld: status %d",
                         (long long)c->n_tokens, (long long)c->parts[0].w->k, status);
    return DCP_OK;
}

/* --- calls ----------------------------------------------------------------------------------- */

static dcp_status check_weight(const struct linear *l, const struct weight *w)
{
    const int64_t block = dcp__q_block_elems(w->qtype);
    if (block == 0 || w->qtype >= 32 || l->kernels.qdot[w->qtype] == NULL)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "weight of type %d: no kernel reads it", w->qtype);
    if (w->n_rows < 0 || w->k < 1 || w->k > l->max_k || w->k % block != 0)
        return dcp__fail(DCP_ERR_ARG,
                         "weight [%lld, %lld] of %s: k must be a multiple of %lld, at most %lld",
                         (long long)w->n_rows, (long long)w->k, dcp__q_name(w->qtype),
                         (long long)block, (long long)l->max_k);
    if (w->row_bytes < (size_t)(w->k / block) * dcp__q_block_bytes(w->qtype))
        return dcp__fail(DCP_ERR_ARG, "weight rows of %lld %s values do not fit %zu bytes",
                         (long long)w->k, dcp__q_name(w->qtype), w->row_bytes);
    return DCP_OK;
}

static dcp_status check_part(const struct linear *l, const struct weight *w, int64_t k,
                             int64_t n_tokens, int64_t y_stride)
{
    DCP_TRY(check_weight(l, w));
    if (w->k != k)
        return dcp__fail(DCP_ERR_ARG, "weights on one x: k %lld and %lld", (long long)k,
                         (long long)w->k);
    if (n_tokens > 1 && y_stride < w->n_rows)
        return dcp__fail(DCP_ERR_ARG, "y_stride %lld is less than %lld rows", (long long)y_stride,
                         (long long)w->n_rows);
    return DCP_OK;
}

dcp_status linear_run_many(struct linear *l, const struct weight *const *ws, int n_ws,
                           const float *x, int64_t x_stride, int64_t n_tokens, float *const *ys,
                           const int64_t *y_strides)
{
    if (n_ws == 0 || n_tokens == 0) return DCP_OK;
    if (n_ws < 0 || n_ws > MAX_WEIGHTS || n_tokens < 0 || n_tokens > l->max_tokens ||
        (n_tokens > 1 && x_stride < ws[0]->k))
        return dcp__fail(
            DCP_ERR_ARG, "%d weights, at most %d; %lld tokens, at most %lld; x_stride %lld", n_ws,
            (int)MAX_WEIGHTS, (long long)n_tokens, (long long)l->max_tokens, (long long)x_stride);
    struct call c = {.l = l, .x = x, .x_stride = x_stride, .n_tokens = n_tokens};
    for (int i = 0; i < n_ws; i++) {
        DCP_TRY(check_part(l, ws[i], ws[0]->k, n_tokens, y_strides[i]));
        if (ws[i]->n_rows == 0) continue;
        c.parts[c.n_parts++] = (struct part){.w = ws[i], .y = ys[i], .y_stride = y_strides[i]};
    }
    if (c.n_parts == 0) return DCP_OK;
    if (n_tokens > direct_tokens(&c)) return run_panels(&c);
    run_direct(&c);
    return DCP_OK;
}

dcp_status linear_run(struct linear *l, const struct weight *w, const float *x, int64_t x_stride,
                      int64_t n_tokens, float *y, int64_t y_stride)
{
    return linear_run_many(l, &w, 1, x, x_stride, n_tokens, &y, &y_stride);
}

dcp_status linear_row(const struct linear *l, const struct weight *w, int64_t i, float *dst)
{
    DCP_TRY(check_weight(l, w));
    if (i < 0 || i >= w->n_rows)
        return dcp__fail(DCP_ERR_ARG, "row %lld of %lld", (long long)i, (long long)w->n_rows);
    l->kernels.dequant[w->qtype]((const char *)w->data + (size_t)i * w->row_bytes, w->row_bytes, 1,
                                 w->k, dst, w->k);
    return DCP_OK;
}
