/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through a linear map with vectors: one text for AVX2 and AVX-512. The including file
 * provides a simd_f32_*.h and PROJECT_KERNEL(name).
 *
 * Idea. y [rows][p] = x [rows][d] W [d][p]: PROJECT_ROWS rows at a time against PROJECT_VECS
 * vectors of columns, sums in registers. W's rows are read as they lie, x is broadcast.
 *
 *          W  d rows  |....|....|....|            for each of d: VECS loads, ROWS broadcasts,
 *     x [6][d]           y [6][VECS vectors]      ROWS * VECS multiply-adds
 *
 * Bits. A value is one chain of fma over d = 0..d-1 from 0, whatever the rows and columns beside
 * it: the same on every ISA. Cost: n_rows * d * p multiply-adds; W is read n_rows / 6 times. */
#ifndef DCP_KERNELS_PROJECT_TPL_H
#define DCP_KERNELS_PROJECT_TPL_H

#include <stdbool.h>

#include "kernels/kernels_priv.h"

enum { PROJECT_ROWS = 6, PROJECT_VECS = VF_LANES == 16 ? 4 : 2 };
#define PROJECT_INLINE static inline __attribute__((always_inline))

PROJECT_INLINE vf project_load(const void *w, int64_t at, int64_t n, dcp_dtype type)
{
    if (type == DCP_BF16) {
        const uint16_t *const p = (const uint16_t *)w + at;
        return n >= VF_LANES ? vf_load_bf16(p) : vf_load_bf16_n(p, n);
    }
    const float *const p = (const float *)w + at;
    return n >= VF_LANES ? vf_load(p) : vf_load_n(p, n);
}

/* n rows and n_vecs vectors are constants once inlined; the last vector has last columns. */
PROJECT_INLINE void project_block(int n, int n_vecs, int64_t last, const float *x, int64_t x_stride,
                                  int64_t d, const void *w, int64_t w_at, int64_t p, float *y,
                                  int64_t y_stride, dcp_dtype type)
{
    vf acc[PROJECT_ROWS][PROJECT_VECS];
    for (int r = 0; r < n; r++)
        for (int v = 0; v < n_vecs; v++) acc[r][v] = vf_set1(0.0f);
    for (int64_t i = 0; i < d; i++) {
        vf row[PROJECT_VECS];
        for (int v = 0; v < n_vecs; v++)
            row[v] = project_load(w, w_at + i * p + v * VF_LANES, v + 1 < n_vecs ? VF_LANES : last,
                                  type);
        for (int r = 0; r < n; r++) {
            const vf one = vf_set1(x[r * x_stride + i]);
            for (int v = 0; v < n_vecs; v++) acc[r][v] = vf_fma(one, row[v], acc[r][v]);
        }
    }
    for (int r = 0; r < n; r++) {
        for (int v = 0; v < n_vecs; v++) {
            float *const at = y + r * y_stride + v * VF_LANES;
            if (v + 1 < n_vecs || last >= VF_LANES)
                vf_store(at, acc[r][v]);
            else
                vf_store_n(at, acc[r][v], last);
        }
    }
}

PROJECT_INLINE void project_rows(int n, const float *x, int64_t x_stride, int64_t d, const void *w,
                                 int64_t p, float *y, int64_t y_stride, dcp_dtype type)
{
    int64_t at = 0;
    for (; at + PROJECT_VECS * VF_LANES <= p; at += PROJECT_VECS * VF_LANES)
        project_block(n, PROJECT_VECS, VF_LANES, x, x_stride, d, w, at, p, y + at, y_stride, type);
    for (; at < p; at += VF_LANES)
        project_block(n, 1, p - at, x, x_stride, d, w, at, p, y + at, y_stride, type);
}

PROJECT_INLINE void project(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                            const void *w, int64_t p, float *y, int64_t y_stride, dcp_dtype type)
{
    int64_t r = 0;
    for (; r + PROJECT_ROWS <= n_rows; r += PROJECT_ROWS)
        project_rows(PROJECT_ROWS, x + r * x_stride, x_stride, d, w, p, y + r * y_stride, y_stride,
                     type);
    for (; r < n_rows; r++)
        project_rows(1, x + r * x_stride, x_stride, d, w, p, y + r * y_stride, y_stride, type);
}

void PROJECT_KERNEL(dcp__project_f32)(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                                      const void *w, int64_t p, float *y, int64_t y_stride)
{
    project(x, x_stride, n_rows, d, w, p, y, y_stride, DCP_F32);
}
void PROJECT_KERNEL(dcp__project_bf16)(const float *x, int64_t x_stride, int64_t n_rows, int64_t d,
                                       const void *w, int64_t p, float *y, int64_t y_stride)
{
    project(x, x_stride, n_rows, d, w, p, y, y_stride, DCP_BF16);
}

#endif
