/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/elementwise.h"

#include <math.h>

#include "num/dtype_priv.h"

/* Below this many elements waking a thread costs more than it saves (a few us). */
enum { SERIAL_ELEMS = 1 << 14, ROWS_PER_ITEM = 8 };

struct job {
    void (*row)(const struct job *job, int64_t t);
    const struct rows *x;
    const float *src, *w;
    int64_t src_stride, dim, rope_dims;
    double eps;
    float a;
    enum activation act;
    enum rope_pairs pairs;
    const float *cos_sin;
    const int32_t *table_rows;
    int64_t table_row0;
};

static void run_item(void *ctx, int64_t item, int thread)
{
    (void)thread;
    const struct job *job = ctx;
    const int64_t begin = item * ROWS_PER_ITEM;
    const int64_t end = begin + ROWS_PER_ITEM < job->x->n ? begin + ROWS_PER_ITEM : job->x->n;
    for (int64_t t = begin; t < end; t++) job->row(job, t);
}

static void run(struct dcp_pool *pool, struct job *job)
{
    const int64_t n_items = (job->x->n + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    const int64_t n_elems = job->x->n * job->x->width;
    dcp__pool_run(n_elems < SERIAL_ELEMS ? NULL : pool, n_items, run_item, job);
}

/* --- norms --- */

/* Sum of squares: products and sums in double, eight chains that the compiler can keep in vectors.
 */
static double sum_squares(const float *x, int64_t n)
{
    double sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += (double)x[i + j] * (double)x[i + j];
    for (; i < n; i++) sum[0] += (double)x[i] * (double)x[i];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

static float norm_factor(const float *x, int64_t n, double eps)
{
    return (float)(1.0 / sqrt(sum_squares(x, n) / (double)n + eps));
}

static void norm_row(const struct job *job, int64_t t)
{
    const float *src = job->src + t * job->src_stride;
    float *dst = job->x->data + t * job->x->stride;
    const float factor = norm_factor(src, job->x->width, job->eps);
    for (int64_t i = 0; i < job->x->width; i++) dst[i] = src[i] * factor * job->w[i];
}

void ew_norm(struct dcp_pool *pool, const struct rows *dst, const float *src, int64_t src_stride,
             const float *w, double eps)
{
    struct job job = {
        .row = norm_row, .x = dst, .src = src, .src_stride = src_stride, .w = w, .eps = eps};
    run(pool, &job);
}

static void norm_heads_row(const struct job *job, int64_t t)
{
    for (int64_t h = 0; h < job->x->width; h += job->dim) {
        float *x = job->x->data + t * job->x->stride + h;
        const float factor = norm_factor(x, job->dim, job->eps);
        for (int64_t i = 0; i < job->dim; i++) x[i] = x[i] * factor * job->w[i];
    }
}

void ew_norm_heads(struct dcp_pool *pool, const struct rows *x, int64_t dim, const float *w,
                   double eps)
{
    struct job job = {.row = norm_heads_row, .x = x, .dim = dim, .w = w, .eps = eps};
    run(pool, &job);
}

static void add_row(const struct job *job, int64_t t)
{
    const float *src = job->src + t * job->src_stride;
    float *x = job->x->data + t * job->x->stride;
    for (int64_t i = 0; i < job->x->width; i++) x[i] += src[i];
}

static void add_norm_row(const struct job *job, int64_t t)
{
    const float *src = job->src + t * job->src_stride;
    float *x = job->x->data + t * job->x->stride;
    const float factor = norm_factor(src, job->x->width, job->eps);
    for (int64_t i = 0; i < job->x->width; i++) x[i] += src[i] * factor * job->w[i];
}

void ew_add_norm(struct dcp_pool *pool, const struct rows *x, const float *src, int64_t src_stride,
                 const float *w, double eps)
{
    struct job job = {.row = w == NULL ? add_row : add_norm_row,
                      .x = x,
                      .src = src,
                      .src_stride = src_stride,
                      .w = w,
                      .eps = eps};
    run(pool, &job);
}

void ew_add_bias(struct dcp_pool *pool, const struct rows *x, const float *b)
{
    struct job job = {.row = add_row, .x = x, .src = b, .src_stride = 0};
    run(pool, &job);
}

static void scale_row(const struct job *job, int64_t t)
{
    float *x = job->x->data + t * job->x->stride;
    for (int64_t i = 0; i < job->x->width; i++) x[i] *= job->a;
}

void ew_scale(struct dcp_pool *pool, const struct rows *x, float a)
{
    struct job job = {.row = scale_row, .x = x, .a = a};
    run(pool, &job);
}

/* --- gates --- */

/* 1 / (1 + e^-x) in a form that compilers turn into vector code: no call, and no comparison of
 * floats, which may trap and so would stay a branch.
 * e^y = 2^n e^r, n = round(y / ln 2) by adding 1.5 * 2^23, r = y - n ln 2 in two steps, e^r by its
 * Taylor polynomial of degree 7 (|r| <= 0.35: error 6e-9 of the value). |y| is cut at 87, where the
 * result is within 1e-37 of 0 or 1; a NaN is cut as well, but callers multiply by x itself. */
static inline float sigmoid(float x)
{
    const uint32_t x_bits = dcp__f32_bits(x);
    const int32_t size = (int32_t)(x_bits & 0x7fffffffu), most = 0x42ae0000; /* 87.0f */
    const uint32_t y_bits = (uint32_t)(size < most ? size : most) | (~x_bits & 0x80000000u);
    const float y = dcp__f32_from_bits(y_bits); /* -x */
    const float magic = 12582912.0f;
    const float shifted = y * 1.44269504f + magic;
    const float n = shifted - magic;
    float r = y - n * 0.693359375f; /* ln 2, 9 bits: the product is exact */
    r = r - n * -2.12194440e-4f;    /* the rest of ln 2 */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    /* n sits in the low bits of shifted; it becomes the exponent of 2^n */
    const float power = dcp__f32_from_bits((dcp__f32_bits(shifted) + 127u) << 23);
    return 1.0f / (1.0f + p * power);
}

static void gate_row(const struct job *job, int64_t t)
{
    float *g = job->x->data + t * job->x->stride;
    const float *u = job->src + t * job->src_stride;
    const int64_t n = job->x->width;
    if (job->act == ACT_SILU) {
        for (int64_t i = 0; i < n; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
        return;
    }
    /* 0.5 g (1 + tanh(s)) = g sigmoid(2 s), s = sqrt(2 / pi) (g + 0.044715 g^3) */
    for (int64_t i = 0; i < n; i++) {
        const float s = 0.797884561f * (g[i] + 0.044715f * g[i] * g[i] * g[i]);
        g[i] = g[i] * sigmoid(2.0f * s) * u[i];
    }
}

void ew_gate(struct dcp_pool *pool, const struct rows *gate, const float *up, int64_t up_stride,
             enum activation act)
{
    struct job job = {.row = gate_row, .x = gate, .src = up, .src_stride = up_stride, .act = act};
    run(pool, &job);
}

static void softcap_row(const struct job *job, int64_t t)
{
    float *x = job->x->data + t * job->x->stride;
    for (int64_t i = 0; i < job->x->width; i++) x[i] = job->a * tanhf(x[i] / job->a);
}

static void spread_nan_row(const struct job *job, int64_t t)
{
    float *x = job->x->data + t * job->x->stride;
    for (int64_t i = 0; i < job->x->width; i++) x[i] += 0.0f * x[i]; /* finite: the same bits */
}

void ew_spread_nan(struct dcp_pool *pool, const struct rows *x)
{
    struct job job = {.row = spread_nan_row, .x = x};
    run(pool, &job);
}

bool ew_is_finite(const struct rows *x)
{
    float sum = 0.0f; /* of zeros, or NaN: eight chains that the compiler can keep in a vector */
    for (int64_t t = 0; t < x->n; t++) {
        const float *row = x->data + t * x->stride;
        float zero[8] = {0};
        int64_t i = 0;
        for (; i + 8 <= x->width; i += 8)
            for (int j = 0; j < 8; j++) zero[j] += 0.0f * row[i + j];
        for (; i < x->width; i++) zero[0] += 0.0f * row[i];
        for (int j = 0; j < 8; j++) sum += zero[j];
    }
    return sum == 0.0f;
}

void ew_softcap(struct dcp_pool *pool, const struct rows *x, float cap)
{
    struct job job = {.row = softcap_row, .x = x, .a = cap};
    run(pool, &job);
}

/* --- rotations --- */

struct table_job {
    const struct rope_config *rope;
    const double *turns;
    const float *divisors;
    int64_t rope_dims, pos0;
    float *cos_sin;
};

/* How fast pair i turns under YaRN, as a share of its own speed: 1 before yarn_low, 1 / factor from
 * yarn_high on. */
static double yarn_speed(const struct rope_config *rope, int64_t i)
{
    if (!(rope->yarn_factor > 0)) return 1.0;
    const double span = rope->yarn_high - rope->yarn_low;
    double slow = ((double)i - rope->yarn_low) / (span > 0.001 ? span : 0.001);
    if (slow < 0.0) slow = 0.0;
    if (slow > 1.0) slow = 1.0;
    return slow / rope->yarn_factor + (1.0 - slow);
}

/* Item t: one position. */
static void table_item(void *ctx, int64_t t, int thread)
{
    (void)thread;
    const struct table_job *job = ctx;
    const int64_t half = job->rope_dims / 2;
    float *row = job->cos_sin + t * job->rope_dims;
    const double position = (double)(job->pos0 + t) / job->rope->factor;
    for (int64_t i = 0; i < half; i++) {
        double angle = position * job->turns[2 * i];
        angle *= job->turns[2 * i + 1];
        if (job->divisors != NULL) angle /= (double)job->divisors[i];
        row[2 * i] = (float)cos(angle);
        row[2 * i + 1] = (float)sin(angle);
    }
}

void ew_rope_turns(const struct rope_config *rope, int64_t rope_dims, double *turns)
{
    const int64_t half = rope_dims / 2;
    const double log_base = log(rope->base);
    for (int64_t i = 0; i < half; i++) {
        turns[2 * i] = exp(-log_base * (double)i / (double)half);
        turns[2 * i + 1] = yarn_speed(rope, i);
    }
}

void ew_rope_table(struct dcp_pool *pool, const struct rope_config *rope, const double *turns,
                   const float *divisors, int64_t rope_dims, int64_t pos0, int64_t n,
                   float *cos_sin)
{
    struct table_job job = {rope,      turns, rope->has_freq_divisors ? divisors : NULL,
                            rope_dims, pos0,  cos_sin};
    dcp__pool_run(n < ROWS_PER_ITEM ? NULL : pool, n, table_item, &job);
}

static void rope_row(const struct job *job, int64_t t)
{
    const int64_t half = job->rope_dims / 2;
    const int64_t step = job->pairs == ROPE_INTERLEAVED ? 2 : 1;
    const int64_t other = job->pairs == ROPE_INTERLEAVED ? 1 : half;
    const int64_t table_row = job->table_rows == NULL ? t : job->table_rows[t] - job->table_row0;
    const float *cs = job->cos_sin + table_row * job->rope_dims;
    for (int64_t h = 0; h < job->x->width; h += job->dim) {
        float *x = job->x->data + t * job->x->stride + h;
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i * step], b = x[i * step + other];
            x[i * step] = a * cs[2 * i] - b * cs[2 * i + 1];
            x[i * step + other] = a * cs[2 * i + 1] + b * cs[2 * i];
        }
    }
}

void ew_rope(struct dcp_pool *pool, const struct rows *x, int64_t dim, int64_t rope_dims,
             enum rope_pairs pairs, const float *cos_sin, const int32_t *table_rows,
             int64_t table_row0)
{
    struct job job = {.row = rope_row,
                      .x = x,
                      .dim = dim,
                      .rope_dims = rope_dims,
                      .pairs = pairs,
                      .cos_sin = cos_sin,
                      .table_rows = table_rows,
                      .table_row0 = table_row0};
    run(pool, &job);
}
