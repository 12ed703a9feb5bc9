/* SPDX-License-Identifier: Apache-2.0 */
/* The merge in double, naive, one row at a time, and the tolerances that its results allow. */
#ifndef REF_MERGE_H
#define REF_MERGE_H

#include <stdbool.h>
#include <stdint.h>

#include "dcpattn/types.h"

/* Element i of an array of type, exact. */
double ref_get(dcp_dtype type, const void *p, int64_t i);
/* Store x, which must be exactly representable or be rounded by the caller's own rule: nearest. */
void ref_put(dcp_dtype type, void *p, int64_t i, double x);

/* Weights of n parts: is_empty[r] or a non-finite lse[r] gives 0; also 0 where the weight is below
 * 2^-126. *sink NULL = none. Returns the merged LSE (-inf if all are empty). */
double ref_merge_weights(int n, const double *lse, const bool *is_empty, bool is_base_2,
                         const double *sink, double *w);

/* Bound of |merged - exact| for f32 accumulation of n parts whose values are at most top in
 * magnitude, stored as type (docs/NUMERICS.md). */
double tol_merge(int n, double top, double exact, dcp_dtype type);
/* The same after n_joins joins of f32 rows: each but the first adds its weights (of at most n
 * parts) and a rounding to f32. */
double tol_merge_tree(int n, int n_joins, double top, double exact, dcp_dtype type);
/* Bound of |merged LSE - exact|. */
double tol_merge_lse(int n, double exact);

/* Same random numbers everywhere. */
uint64_t ref_random(uint64_t *state);
double ref_uniform(uint64_t *state, double low, double high);
int64_t ref_pick(uint64_t *state, int64_t n);

#endif
