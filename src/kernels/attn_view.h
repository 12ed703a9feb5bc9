/* SPDX-License-Identifier: Apache-2.0 */
/* Where keys lie in a paged view, and what a row of a job sees. Shared by every attention kernel.
 */
#ifndef DCP_KERNELS_ATTN_VIEW_H
#define DCP_KERNELS_ATTN_VIEW_H

#include <stdint.h>

#include "kernels/kernels_priv.h"

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
        const char *k =
            k_base + view->pages[page] * view->k_page_stride_bytes + slot * k_slot_bytes;
        const char *v =
            v_base + view->pages[page] * view->v_page_stride_bytes + slot * v_slot_bytes;
        for (int64_t j = 0; j < n; j++) {
            k_out[i - begin + j] = k + j * k_slot_bytes;
            v_out[i - begin + j] = v + j * v_slot_bytes;
        }
        i += n;
    }
}

#endif
