/* SPDX-License-Identifier: Apache-2.0 */
/* Where keys lie in a paged view, and what a row of a job sees. Shared by every attention kernel.
 */
#ifndef DCP_KERNELS_ATTN_VIEW_H
#define DCP_KERNELS_ATTN_VIEW_H

#include <stdint.h>

#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

static inline int64_t attn_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline int64_t attn_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
/* Visible keys of token t inside the job: [*lo_out, *hi_out), empty if hi <= lo. */
static inline void attn_row_range(const struct dcp__attn_job *job, int64_t t, int64_t *lo_out,
                                  int64_t *hi_out)
{
    *lo_out = attn_max(job->lo[t], job->key_begin);
    *hi_out = attn_min(job->hi[t], job->key_end);
}

/* A loop of its own for each array: compilers make vectors of it. */
static inline void attn_run_of_rows(const char *row, int64_t pitch_bytes, int64_t n,
                                    const char **out)
{
    for (int64_t i = 0; i < n; i++) out[i] = row + i * pitch_bytes;
}
/* Rows of keys [begin, end) of the job's KV head: k_out[i], v_out[i] for key begin + i. Only the
 * block table entries of these keys are read. elem_bytes is a constant at every call. */
static inline void attn_key_rows(const struct dcp__attn_job *job, int64_t begin, int64_t end,
                                 int64_t elem_bytes, const char **k_out, const char **v_out)
{
    const dcp_kv_view *const view = job->view;
    const int64_t k_slot_bytes = view->k_slot_stride * elem_bytes;
    const int64_t v_slot_bytes = view->v_slot_stride * elem_bytes;
    const char *const k_base =
        (const char *)view->k_base + job->kv_head * view->k_head_stride * elem_bytes;
    const char *const v_base =
        (const char *)view->v_base + job->kv_head * view->v_head_stride * elem_bytes;
    int64_t page = begin / view->page_tokens;
    int64_t slot = begin - page * view->page_tokens;
    for (int64_t i = begin; i < end; page++, slot = 0) {
        const int64_t n = attn_min(view->page_tokens - slot, end - i);
        attn_run_of_rows(k_base + view->pages[page] * view->k_page_stride_bytes +
                             slot * k_slot_bytes,
                         k_slot_bytes, n, k_out + (i - begin));
        attn_run_of_rows(v_base + view->pages[page] * view->v_page_stride_bytes +
                             slot * v_slot_bytes,
                         v_slot_bytes, n, v_out + (i - begin));
        i += n;
    }
}

static inline int64_t attn_elem_bytes(dcp_dtype dtype)
{
    if (dtype == DCP_I8 || dtype == DCP_FP8_E4M3) return 1;
    return dtype == DCP_F32 ? 4 : 2;
}
static inline float attn_scale_at(const void *base, int64_t i, dcp_dtype dtype)
{
    if (dtype == DCP_F16) return dcp__f16_to_f32(((const uint16_t *)base)[i]);
    if (dtype == DCP_BF16) return dcp__bf16_to_f32(((const uint16_t *)base)[i]);
    return ((const float *)base)[i];
}
/* Scales of keys [begin, end) of the job's KV head times factor, k_out[i] and v_out[i] for key
 * begin + i; factor alone where the view has none. Only those of these keys are read. */
static inline void attn_key_scales(const struct dcp__attn_job *job, int64_t begin, int64_t end,
                                   float k_factor, float v_factor, float *k_out, float *v_out)
{
    const dcp_kv_scales *const scales = job->scales;
    if (scales == NULL || scales->k_base == NULL) {
        for (int64_t i = 0; i < end - begin; i++) {
            k_out[i] = k_factor;
            v_out[i] = v_factor;
        }
        return;
    }
    const int64_t page_tokens = job->view->page_tokens;
    int64_t page = begin / page_tokens;
    int64_t slot = begin - page * page_tokens;
    for (int64_t i = begin; i < end; page++, slot = 0) {
        const int64_t n = attn_min(page_tokens - slot, end - i);
        const int64_t id = job->view->pages[page];
        const char *const k = (const char *)scales->k_base + id * scales->k_page_stride_bytes;
        const char *const v = (const char *)scales->v_base + id * scales->v_page_stride_bytes;
        const int64_t k_at = slot * scales->k_slot_stride + job->kv_head * scales->k_head_stride;
        const int64_t v_at = slot * scales->v_slot_stride + job->kv_head * scales->v_head_stride;
        for (int64_t j = 0; j < n; j++) {
            k_out[i - begin + j] =
                k_factor * attn_scale_at(k, k_at + j * scales->k_slot_stride, scales->dtype);
            v_out[i - begin + j] =
                v_factor * attn_scale_at(v, v_at + j * scales->v_slot_stride, scales->dtype);
        }
        i += n;
    }
}

#endif
