/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank can check alone: a description, a run's arguments, and what overlaps what. All of
 * it happens before the first message. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "merge/merge_priv.h"

static bool is_dtype(dcp_dtype t)
{
    return dcp_dtype_bytes(t) != 0;
}

static bool is_all_zero(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) return false;
    }
    return true;
}

/* Copy a caller's struct of another version: missing fields are 0, unknown ones must be. */
static dcp_status copy_struct(void *to, const void *from, size_t from_bytes, size_t mine,
                              const char *what)
{
    if (from_bytes < sizeof(size_t))
        return dcp__fail(DCP_ERR_ARG, "%s: struct_size is %zu; use its _INIT macro", what,
                         from_bytes);
    if (from_bytes > mine && !is_all_zero((const unsigned char *)from + mine, from_bytes - mine))
        return dcp__fail(DCP_ERR_ARG,
                         "%s: struct_size is %zu, this library knows %zu bytes, and fields beyond "
                         "are set",
                         what, from_bytes, mine);
    memset(to, 0, mine);
    memcpy(to, from, from_bytes < mine ? from_bytes : mine);
    return DCP_OK;
}

dcp_status dcp__merge_check_desc(const dcp_merge_desc *desc, dcp_merge_desc *resolved_out)
{
    dcp_merge_desc d;
    memset(resolved_out, 0, sizeof(*resolved_out));
    if (desc == NULL) return dcp__fail(DCP_ERR_ARG, "merge: desc is NULL");
    DCP_TRY(copy_struct(&d, desc, desc->struct_size, sizeof(d), "merge desc"));
    d.struct_size = sizeof(d);
    if (d.out_type == DCP_DTYPE_DEFAULT) d.out_type = DCP_F32;
    if (d.lse_type == DCP_DTYPE_DEFAULT) d.lse_type = DCP_F32;
    if (d.merged_type == DCP_DTYPE_DEFAULT) d.merged_type = d.out_type;
    if (d.wire_type == DCP_DTYPE_DEFAULT) d.wire_type = d.out_type;
    if (d.workspace_limit_bytes == 0) d.workspace_limit_bytes = (size_t)8 << 20;
    d.has_sink = d.has_sink != 0;
    d.has_kv_len = d.has_kv_len != 0;
    if (d.max_tokens < 0)
        return dcp__fail(DCP_ERR_ARG, "merge: max_tokens = %lld, must be >= 0",
                         (long long)d.max_tokens);
    if (d.n_heads < 1)
        return dcp__fail(DCP_ERR_ARG, "merge: n_heads = %lld, must be >= 1", (long long)d.n_heads);
    if (d.dim < 1)
        return dcp__fail(DCP_ERR_ARG, "merge: dim = %lld, must be >= 1", (long long)d.dim);
    int64_t elems = 0;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(d.n_heads, d.dim, &elems) ||
        __builtin_mul_overflow(elems, d.max_tokens > 0 ? d.max_tokens : 1, &elems) ||
        __builtin_mul_overflow(elems, (int64_t)256, &bytes))
        return dcp__fail(DCP_ERR_ARG, "merge: %lld x %lld x %lld is too large",
                         (long long)d.max_tokens, (long long)d.n_heads, (long long)d.dim);
    if (d.lse_base != DCP_LSE_BASE_E && d.lse_base != DCP_LSE_BASE_2)
        return dcp__fail(DCP_ERR_ARG,
                         "merge: lse_base = %d; declare DCP_LSE_BASE_E or DCP_LSE_BASE_2, there is "
                         "no default",
                         (int)d.lse_base);
    if (d.cut != DCP_CUT_HEADS && d.cut != DCP_CUT_TOKENS && d.cut != DCP_CUT_NONE)
        return dcp__fail(DCP_ERR_ARG, "merge: cut = %d is unknown", (int)d.cut);
    if (!is_dtype(d.out_type) || !is_dtype(d.lse_type) || !is_dtype(d.merged_type) ||
        !is_dtype(d.wire_type))
        return dcp__fail(DCP_ERR_ARG,
                         "merge: types out %d, lse %d, merged %d, wire %d: unknown one",
                         (int)d.out_type, (int)d.lse_type, (int)d.merged_type, (int)d.wire_type);
    if (d.wire_type != d.out_type && dcp_dtype_bytes(d.wire_type) >= dcp_dtype_bytes(d.out_type))
        return dcp__fail(DCP_ERR_ARG, "merge: wire type %s is neither out's type %s nor narrower",
                         dcp_dtype_name(d.wire_type), dcp_dtype_name(d.out_type));
    if (d.nonfinite != DCP_NONFINITE_ZERO && d.nonfinite != DCP_NONFINITE_PROPAGATE &&
        d.nonfinite != DCP_NONFINITE_ERROR)
        return dcp__fail(DCP_ERR_ARG, "merge: nonfinite = %d is unknown", (int)d.nonfinite);
    if (d.algo > DCP_MERGE_ALLREDUCE)
        return dcp__fail(DCP_ERR_ARG, "merge: algo = %d is unknown", (int)d.algo);
    *resolved_out = d;
    return DCP_OK;
}

/* Fill in contiguous strides and check that rows of len elements do not touch each other. */
static dcp_status resolve_strides(const char *what, int64_t n_tokens, int64_t n_heads, int64_t len,
                                  int64_t *token_stride, int64_t *head_stride)
{
    if (*token_stride < 0 || *head_stride < 0)
        return dcp__fail(DCP_ERR_ARG, "merge: strides of %s are %lld and %lld, must be >= 0", what,
                         (long long)*token_stride, (long long)*head_stride);
    const bool by_tokens = *token_stride == 0; /* both may be given, one, or none */
    if (*head_stride == 0) *head_stride = len;
    int64_t end = 0;
    if (by_tokens && __builtin_mul_overflow(*head_stride, n_heads, token_stride))
        return dcp__fail(DCP_ERR_ARG, "merge: head stride %lld of %s is too large",
                         (long long)*head_stride, what);
    if (n_tokens < 1 || n_heads < 1) return DCP_OK;
    int64_t t_end = 0;
    int64_t h_end = 0;
    if (__builtin_mul_overflow(n_tokens - 1, *token_stride, &t_end) ||
        __builtin_mul_overflow(n_heads - 1, *head_stride, &h_end) ||
        __builtin_add_overflow(t_end, h_end, &end) || end > INT64_MAX / 8 - len)
        return dcp__fail(DCP_ERR_ARG, "merge: strides %lld and %lld of %s are too large",
                         (long long)*token_stride, (long long)*head_stride, what);
    const bool is_token_major =
        (n_heads == 1 || *head_stride >= len) && (n_tokens == 1 || *token_stride >= h_end + len);
    const bool is_head_major =
        (n_tokens == 1 || *token_stride >= len) && (n_heads == 1 || *head_stride >= t_end + len);
    if (!is_token_major && !is_head_major)
        return dcp__fail(DCP_ERR_ARG,
                         "merge: with token stride %lld and head stride %lld the rows of %s "
                         "([%lld, %lld, %lld]) overlap",
                         (long long)*token_stride, (long long)*head_stride, what,
                         (long long)n_tokens, (long long)n_heads, (long long)len);
    return DCP_OK;
}

static dcp_status check_pointer(const char *what, const void *p, size_t align)
{
    if (p == NULL) return dcp__fail(DCP_ERR_ARG, "merge: %s is NULL", what);
    if ((uintptr_t)p % align != 0)
        return dcp__fail(DCP_ERR_ARG, "merge: %s at %p is not aligned to its %zu-byte elements",
                         what, p, align);
    return DCP_OK;
}

static dcp_status check_values(const struct dcp_merge *m, const dcp_merge_args *a)
{
    if ((a->sink != NULL) != (m->desc.has_sink != 0))
        return dcp__fail(DCP_ERR_ARG, "merge: a sink is %s, but the description says has_sink = %u",
                         a->sink != NULL ? "given" : "missing", m->desc.has_sink);
    if ((a->kv_len != NULL) != (m->desc.has_kv_len != 0) && a->n_tokens > 0)
        return dcp__fail(DCP_ERR_ARG,
                         "merge: kv_len is %s, but the description says has_kv_len = %u",
                         a->kv_len != NULL ? "given" : "missing", m->desc.has_kv_len);
    for (int64_t h = 0; a->sink != NULL && h < m->desc.n_heads; h++) {
        if (isnan(a->sink[h]) || a->sink[h] == INFINITY)
            return dcp__fail(DCP_ERR_ARG, "merge: sink[%lld] is %f; finite or -inf (no sink) only",
                             (long long)h, (double)a->sink[h]);
    }
    for (int64_t t = 0; a->kv_len != NULL && t < a->n_tokens; t++) {
        if (a->kv_len[t] < 0)
            return dcp__fail(DCP_ERR_ARG, "merge: kv_len[%lld] = %lld, must be >= 0", (long long)t,
                             (long long)a->kv_len[t]);
    }
    return DCP_OK;
}

dcp_status dcp__merge_check_args(const struct dcp_merge *m, const dcp_merge_args *args,
                                 struct dcp__merge_run *run_out)
{
    const dcp_merge_desc *d = &m->desc;
    memset(run_out, 0, sizeof(*run_out));
    run_out->seen.t = -1;
    if (args == NULL) return dcp__fail(DCP_ERR_ARG, "merge: args is NULL");
    dcp_merge_args *a = &run_out->args;
    DCP_TRY(copy_struct(a, args, args->struct_size, sizeof(*a), "merge args"));
    run_out->n_tokens = a->n_tokens;
    if (a->n_tokens < 0 || a->n_tokens > d->max_tokens)
        return dcp__fail(DCP_ERR_ARG, "merge: n_tokens = %lld, created for 0..%lld",
                         (long long)a->n_tokens, (long long)d->max_tokens);
    const struct dcp__merge_block b =
        d->cut == DCP_CUT_NONE
            ? (struct dcp__merge_block){0, a->n_tokens, 0, d->n_heads}
            : dcp__merge_block_of(d->cut, a->n_tokens, d->n_heads, m->n_ranks, m->rank);
    const int64_t own_t = b.t_end - b.t_begin;
    const int64_t own_h = b.h_end - b.h_begin;
    DCP_TRY(resolve_strides("out", a->n_tokens, d->n_heads, d->dim, &a->out_token_stride,
                            &a->out_head_stride));
    DCP_TRY(resolve_strides("lse", a->n_tokens, d->n_heads, 1, &a->lse_token_stride,
                            &a->lse_head_stride));
    DCP_TRY(resolve_strides("merged", own_t, own_h, d->dim, &a->merged_token_stride,
                            &a->merged_head_stride));
    DCP_TRY(resolve_strides("merged_lse", own_t, own_h, 1, &a->merged_lse_token_stride,
                            &a->merged_lse_head_stride));
    if (a->n_tokens > 0) {
        DCP_TRY(check_pointer("out", a->out, dcp_dtype_bytes(d->out_type)));
        DCP_TRY(check_pointer("lse", a->lse, dcp_dtype_bytes(d->lse_type)));
    }
    if (own_t * own_h > 0) {
        DCP_TRY(check_pointer("merged", a->merged, dcp_dtype_bytes(d->merged_type)));
        if (a->merged_lse != NULL) DCP_TRY(check_pointer("merged_lse", a->merged_lse, 4));
    }
    DCP_TRY(check_values(m, a));
    run_out->own = (struct dcp__merge_src){a->out,    a->out_token_stride, a->out_head_stride,
                                           a->lse,    a->lse_token_stride, a->lse_head_stride,
                                           a->kv_len, d->lse_type};
    const struct dcp__merge_dst dst = {a->merged,
                                       a->merged_token_stride,
                                       a->merged_head_stride,
                                       a->merged_lse,
                                       a->merged_lse_token_stride,
                                       a->merged_lse_head_stride,
                                       b.t_begin,
                                       b.h_begin};
    const char *what = NULL;
    if (dcp__merge_overlaps(m, run_out, m->rank, &dst, &run_out->own, m->rank, &what))
        return dcp__fail(DCP_ERR_ARG,
                         "merge: %s; allowed is only the own slice of out, at its place and with "
                         "its strides and type, by heads or tokens",
                         what);
    return DCP_OK;
}

/* ---- overlaps ---- */

static int64_t extent(const struct dcp__region *r)
{
    return (r->n0 - 1) * r->s0 + (r->n1 - 1) * r->s1 + r->len;
}

/* Does [at, at + len) touch a row of b? b's rows are nested: the larger stride steps over the whole
 * of the smaller one, so a quotient finds the only candidates. */
static bool touches(const struct dcp__region *b, uintptr_t at, int64_t len)
{
    const bool is_0_outer = b->n1 == 1 || (b->n0 > 1 && b->s0 >= b->s1);
    const int64_t n_out = is_0_outer ? b->n0 : b->n1;
    const int64_t s_out = is_0_outer ? b->s0 : b->s1;
    const int64_t n_in = is_0_outer ? b->n1 : b->n0;
    const int64_t s_in = is_0_outer ? b->s1 : b->s0;
    const int64_t from = (int64_t)(at - (uintptr_t)b->at); /* both in one space: may be negative */
    const int64_t to = from + len;
    const int64_t span_in = (n_in - 1) * s_in + b->len;
    int64_t i = n_out > 1 && from > span_in ? (from - span_in) / s_out : 0;
    for (; i < n_out && i * s_out < to; i++) {
        const int64_t f = from - i * s_out;
        const int64_t e = to - i * s_out;
        if (e <= 0 || f >= span_in) continue;
        int64_t j = n_in > 1 && f > b->len ? (f - b->len) / s_in : 0;
        for (; j < n_in && j * s_in < e; j++) {
            if (f < j * s_in + b->len) return true;
        }
    }
    return false;
}

bool dcp__regions_overlap(const struct dcp__region *a, const struct dcp__region *b)
{
    if (a->n0 < 1 || a->n1 < 1 || a->len < 1 || b->n0 < 1 || b->n1 < 1 || b->len < 1) return false;
    if (a->at == NULL || b->at == NULL) return false;
    const uintptr_t a_begin = (uintptr_t)a->at;
    const uintptr_t b_begin = (uintptr_t)b->at;
    if (a_begin + (uintptr_t)extent(a) <= b_begin || b_begin + (uintptr_t)extent(b) <= a_begin)
        return false;
    /* The extents overlap: rows of one may still lie between rows of the other. */
    for (int64_t i = 0; i < a->n0; i++) {
        for (int64_t j = 0; j < a->n1; j++) {
            if (touches(b, a_begin + (uintptr_t)(i * a->s0 + j * a->s1), a->len)) return true;
        }
    }
    return false;
}

bool dcp__merge_overlaps(const struct dcp_merge *m, const struct dcp__merge_run *run, int owner,
                         const struct dcp__merge_dst *dst, const struct dcp__merge_src *src,
                         int src_rank, const char **what_out)
{
    const dcp_merge_desc *d = &m->desc;
    const int64_t n_tokens = run->n_tokens;
    const struct dcp__merge_block b =
        d->cut == DCP_CUT_NONE
            ? (struct dcp__merge_block){0, n_tokens, 0, d->n_heads}
            : dcp__merge_block_of(d->cut, n_tokens, d->n_heads, m->n_ranks, owner);
    const int64_t n_t = b.t_end - b.t_begin;
    const int64_t n_h = b.h_end - b.h_begin;
    if (n_t * n_h < 1) return false;
    const int64_t ob = (int64_t)dcp_dtype_bytes(d->out_type);
    const int64_t lb = (int64_t)dcp_dtype_bytes(d->lse_type);
    const int64_t mb = (int64_t)dcp_dtype_bytes(d->merged_type);
    const struct dcp__region merged = {dst->out,         n_t,        dst->out_ts * mb, n_h,
                                       dst->out_hs * mb, d->dim * mb};
    const struct dcp__region mlse = {(const char *)dst->lse, n_t, dst->lse_ts * 4, n_h,
                                     dst->lse_hs * 4,        4};
    const struct dcp__region out = {src->out,   n_tokens,         src->out_ts * ob,
                                    d->n_heads, src->out_hs * ob, d->dim * ob};
    const struct dcp__region lse = {src->lse,   n_tokens,         src->lse_ts * lb,
                                    d->n_heads, src->lse_hs * lb, lb};
    const struct dcp__region kv = {(const char *)src->kv_len, 1, 0, 1, 0, n_tokens * 8};
    const struct dcp__region sink = {(const char *)run->args.sink, 1, 0, 1, 0, d->n_heads * 4};
    const bool is_own = owner == src_rank;
    const bool in_place =
        is_own && d->cut != DCP_CUT_NONE && d->merged_type == d->out_type &&
        dst->out ==
            src->out + dcp__merge_offset(b.t_begin, b.h_begin, src->out_ts, src->out_hs) * ob &&
        (n_t == 1 || dst->out_ts == src->out_ts) && (n_h == 1 || dst->out_hs == src->out_hs);
    const bool lse_in_place =
        is_own && d->cut != DCP_CUT_NONE && d->lse_type == DCP_F32 &&
        (const char *)dst->lse ==
            src->lse + dcp__merge_offset(b.t_begin, b.h_begin, src->lse_ts, src->lse_hs) * lb &&
        (n_t == 1 || dst->lse_ts == src->lse_ts) && (n_h == 1 || dst->lse_hs == src->lse_hs);
    *what_out = NULL;
    if (!in_place && dcp__regions_overlap(&merged, &out))
        *what_out = "merged overlaps out";
    else if (dcp__regions_overlap(&merged, &lse))
        *what_out = "merged overlaps lse";
    else if (dcp__regions_overlap(&merged, &kv))
        *what_out = "merged overlaps kv_len";
    else if (!lse_in_place && dcp__regions_overlap(&mlse, &lse))
        *what_out = "merged_lse overlaps lse";
    else if (dcp__regions_overlap(&mlse, &out))
        *what_out = "merged_lse overlaps out";
    else if (dcp__regions_overlap(&mlse, &kv))
        *what_out = "merged_lse overlaps kv_len";
    else if (is_own && owner == m->rank &&
             (dcp__regions_overlap(&merged, &sink) || dcp__regions_overlap(&mlse, &sink)))
        *what_out = "the result overlaps the sink";
    else if (is_own && dcp__regions_overlap(&merged, &mlse))
        *what_out = "merged_lse overlaps merged";
    return *what_out != NULL;
}
