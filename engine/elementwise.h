/* SPDX-License-Identifier: Apache-2.0 */
/* The work between products: norms, rotations, gates. Rows are split over the rank's pool where
 * there is enough to do; bits depend on neither the split nor the number of threads. */
#ifndef DCP_ENGINE_ELEMENTWISE_H
#define DCP_ENGINE_ELEMENTWISE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/pool_priv.h"
#include "engine/model.h"

/* Rows of floats: element (t, i) at data[t * stride + i]. */
struct rows {
    float *data;
    int64_t n, width, stride;
};

/* dst[t] = src[t] / sqrt(mean(src[t]^2) + eps) * w. dst may be src. Shapes are dst's. */
void ew_norm(struct dcp_pool *pool, const struct rows *dst, const float *src, int64_t src_stride,
             const float *w, double eps);
/* The same over each head of heads of dim elements within a row, in place. */
void ew_norm_heads(struct dcp_pool *pool, const struct rows *x, int64_t dim, const float *w,
                   double eps);
/* x += norm(src) * w, or x += src where w is NULL. */
void ew_add_norm(struct dcp_pool *pool, const struct rows *x, const float *src, int64_t src_stride,
                 const float *w, double eps);
/* x[t] += b [width]. */
void ew_add_bias(struct dcp_pool *pool, const struct rows *x, const float *b);
/* x *= a. */
void ew_scale(struct dcp_pool *pool, const struct rows *x, float a);
/* x = cap * tanh(x / cap). */
void ew_softcap(struct dcp_pool *pool, const struct rows *x, float cap);
/* Infinities become NaN. */
void ew_spread_nan(struct dcp_pool *pool, const struct rows *x);
/* Whether all of x is finite. */
bool ew_is_finite(const struct rows *x);
/* gate = act(gate) * up. */
void ew_gate(struct dcp_pool *pool, const struct rows *gate, const float *up, int64_t up_stride,
             enum activation act);

/* turns [rope_dims / 2, 2]: the angle of pair i from one position to the next, and its factor under
 * YaRN (1 without). */
void ew_rope_turns(const struct rope_config *rope, int64_t rope_dims, double *turns);
/* cos_sin[t][2i], [2i + 1] = cos and sin of the angle of positions pos0 + t and pair i;
 * cos_sin [n, rope_dims]. Angles in double precision, from the turns of the same rope. */
void ew_rope_table(struct dcp_pool *pool, const struct rope_config *rope, const double *turns,
                   const float *divisors, int64_t rope_dims, int64_t pos0, int64_t n,
                   float *cos_sin);
/* Rotate each head of x (width = heads * dim) in place; row j uses table row table_rows[j] -
 * table_row0 (table_rows NULL: j). */
void ew_rope(struct dcp_pool *pool, const struct rows *x, int64_t dim, int64_t rope_dims,
             enum rope_pairs pairs, const float *cos_sin, const int32_t *table_rows,
             int64_t table_row0);

#endif
