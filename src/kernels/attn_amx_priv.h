/* SPDX-License-Identifier: Apache-2.0 */
/* What the AMX attention kernels share: how they divide the work, and where the keys of a tile lie.
 *
 * Bits. A row's scores, weights and sums never meet another row's: rows are rows or columns of a
 * tile product, and those do not mix. A key that a row does not see has weight 0 there, and 0 times
 * a number changes no bit; 0 times NaN or infinity does, so a row whose result is not finite is
 * done again (attn_amx.c). */
#ifndef DCP_KERNELS_ATTN_AMX_PRIV_H
#define DCP_KERNELS_ATTN_AMX_PRIV_H

#include <stdbool.h>

#include "kernels/attn_view.h"

#define AMX_INLINE static inline __attribute__((always_inline))

enum {
    /* Rows of a call's KV head up to which the few-row kernel is taken. */
    AMX_FEW_ROWS = 32,
    AMX_GROUP = 16, /* keys of a tile */
    AMX_STEP = 32   /* dims of a tile */
};

/* A job on its way. */
struct amx_job {
    const struct dcp__attn_job *job;
    int64_t n_rows;           /* row r: token r / n_group, head r % n_group */
    int64_t k_steps, v_steps; /* tiles across dk and dv */
    int64_t t0, t1;           /* tokens of the pass */
    int64_t lo, hi;           /* hull of what they see; lo >= hi: nothing */
    bool has_holes;           /* there may be keys in it that none of them sees */
    float scale2;             /* z = scale2 * s - max, s the score or its tanh */
    float cap_scale;          /* s = tanh(cap_scale * dot); 0 = no softcap */
    float sign;               /* goes to q; scale2 stays above 0 */
    double unit;              /* natural units per unit of z, after rounding */
    char *zeros;              /* a row of nothing, as long as the longest */
};

/* 16 keys as tiles of AMX_STEP dims: row i of tile d at at + i * stride + 64 * d. */
struct amx_keys {
    const char *at;
    int64_t stride;
};

/* Few rows: q in three bf16 parts, weights in two. False: a result is not finite. */
bool dcp__attn_amx_few(const struct dcp__attn_job *job);
/* Any number: q in two parts, weights in one. */
bool dcp__attn_amx_many(const struct dcp__attn_job *job);
size_t dcp__attn_amx_few_bytes(int64_t n_rows, int64_t dk, int64_t dv);
size_t dcp__attn_amx_many_bytes(int64_t n_rows, int64_t dk, int64_t dv);
/* Rows of which the many-row kernel keeps the sums in L2. */
int64_t dcp__attn_amx_rows_most(int64_t dv);

static inline int64_t amx_div_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Takes bytes from *at, an address or, where only sizes count, 0; in lines. */
static inline void *amx_take(uintptr_t *at, int64_t n_bytes)
{
    void *const p = (void *)*at;
    *at += (uintptr_t)(amx_div_up(n_bytes, 64) * 64);
    return p;
}

/* Values are the first columns of keys: their lines come with those of K. */
static inline bool amx_is_latent(const struct amx_job *a)
{
    const dcp_kv_view *const v = a->job->view;
    return v->k_base == v->v_base && v->k_page_stride_bytes == v->v_page_stride_bytes &&
           v->k_slot_stride == v->v_slot_stride && v->k_head_stride == v->v_head_stride;
}

/* Does no row see a key of the block of DCP__ATTN_KEY_BLOCK that key is in? Nothing of it may be
 * read then: an engine may have freed its pages. */
static inline bool amx_is_unseen(const struct amx_job *a, int64_t key)
{
    const int64_t begin = key - key % DCP__ATTN_KEY_BLOCK;
    if (!a->has_holes) return false;
    for (int64_t t = a->t0; t < a->t1; t++) {
        int64_t lo;
        int64_t hi;
        attn_row_range(a->job, t, &lo, &hi);
        if (lo < hi && lo < begin + DCP__ATTN_KEY_BLOCK && hi > begin) return false;
    }
    return true;
}
/* The same of all blocks in [begin, end), multiples of a block. */
static inline bool amx_are_unseen(const struct amx_job *a, int64_t begin, int64_t end)
{
    if (!a->has_holes) return false;
    for (; begin < end; begin += DCP__ATTN_KEY_BLOCK)
        if (!amx_is_unseen(a, begin)) return false;
    return true;
}

/* Keys [begin, begin + 16) as they lie; at NULL unless they are in one page, all inside the hull,
 * and a whole number of tiles wide. */
static inline struct amx_keys amx_natural_keys(const struct amx_job *a, int64_t begin,
                                               bool is_value)
{
    const dcp_kv_view *const view = a->job->view;
    const int64_t dims = is_value ? a->job->dv : a->job->dk;
    const struct amx_keys none = {NULL, 0};
    if (begin < a->lo || begin + AMX_GROUP > a->hi || dims % AMX_STEP != 0) return none;
    if (amx_is_unseen(a, begin)) return none;
    const int64_t page = begin / view->page_tokens;
    const int64_t slot = begin - page * view->page_tokens;
    if (slot + AMX_GROUP > view->page_tokens) return none;
    const char *const base = is_value ? view->v_base : view->k_base;
    const int64_t head_bytes = 2 * (is_value ? view->v_head_stride : view->k_head_stride);
    const int64_t slot_bytes = 2 * (is_value ? view->v_slot_stride : view->k_slot_stride);
    const int64_t page_bytes = is_value ? view->v_page_stride_bytes : view->k_page_stride_bytes;
    return (struct amx_keys){base + a->job->kv_head * head_bytes + view->pages[page] * page_bytes +
                                 slot * slot_bytes,
                             slot_bytes};
}

/* Keys from begin on, whose first 16 amx_natural_keys finds, with rows at one stride: whole groups,
 * across pages that lie one after the other. */
static inline int64_t amx_run_keys(const struct amx_job *a, int64_t begin, bool is_value)
{
    const dcp_kv_view *const view = a->job->view;
    const int64_t slot_bytes = 2 * (is_value ? view->v_slot_stride : view->k_slot_stride);
    const int64_t page_bytes = is_value ? view->v_page_stride_bytes : view->k_page_stride_bytes;
    const int64_t n = view->page_tokens;
    int64_t page = begin / n;
    if (a->has_holes) return AMX_GROUP;
    if (n > a->hi - page * n) return (a->hi - begin) / AMX_GROUP * AMX_GROUP; /* the last page */
    int64_t end = (page + 1) * n;
    if (page_bytes == n * slot_bytes)
        for (; end < a->hi && view->pages[page + 1] == (int64_t)view->pages[page] + 1; page++)
            end += n;
    return (attn_min(end, a->hi) - begin) / AMX_GROUP * AMX_GROUP;
}

#endif
