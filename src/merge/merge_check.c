/* SPDX-License-Identifier: Apache-2.0 */
/* What one rank can check alone: a description and a run's arguments. All of it happens before the
 * first message. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "group/group_priv.h"
#include "merge/merge_priv.h"

static bool is_dtype(dcp_dtype t)
{
    return t == DCP_F32 || t == DCP_F16 || t == DCP_BF16;
}

static bool is_all_zero(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) return false;
    }
    return true;
}

dcp_status dcp__merge_copy_struct(void *to, const void *from, size_t from_bytes, size_t mine,
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
    DCP_TRY(dcp__merge_copy_struct(&d, desc, desc->struct_size, sizeof(d), "merge desc"));
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
    if (d.algo > DCP_MERGE_ALLREDUCE_TEMP)
        return dcp__fail(DCP_ERR_ARG, "merge: algo = %d is unknown", (int)d.algo);
    if (d.lse_form > DCP_LSE_FORM_MAX_SUM)
        return dcp__fail(DCP_ERR_ARG, "merge: lse_form = %d is unknown", (int)d.lse_form);
    if (d.order > DCP_MERGE_ORDER_ANY)
        return dcp__fail(DCP_ERR_ARG, "merge: order = %d is unknown", (int)d.order);
    *resolved_out = d;
    return DCP_OK;
}

dcp_status dcp__merge_check_strides(const char *what, int64_t n_tokens, int64_t n_heads,
                                    int64_t len, int64_t *token_stride, int64_t *head_stride)
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

dcp_status dcp__merge_check_pointer(const char *what, const void *p, size_t align)
{
    if (p == NULL) return dcp__fail(DCP_ERR_ARG, "merge: %s is NULL", what);
    if ((uintptr_t)p % align != 0)
        return dcp__fail(DCP_ERR_ARG, "merge: %s at %p is not aligned to its %zu-byte elements",
                         what, p, align);
    return DCP_OK;
}

dcp_status dcp__merge_check_sink(const float *sink, int64_t n_heads)
{
    for (int64_t h = 0; h < n_heads; h++) {
        if (isnan(sink[h]) || sink[h] == INFINITY)
            return dcp__fail(DCP_ERR_ARG, "merge: sink[%lld] is %f; finite or -inf (no sink) only",
                             (long long)h, (double)sink[h]);
    }
    return DCP_OK;
}

dcp_status dcp__merge_check_kv_len(const int64_t *kv_len, int64_t n_tokens)
{
    for (int64_t t = 0; t < n_tokens; t++) {
        if (kv_len[t] < 0)
            return dcp__fail(DCP_ERR_ARG, "merge: kv_len[%lld] = %lld, must be >= 0", (long long)t,
                             (long long)kv_len[t]);
    }
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
    if (a->sink != NULL) DCP_TRY(dcp__merge_check_sink(a->sink, m->desc.n_heads));
    const bool has_sum = m->desc.lse_form == DCP_LSE_FORM_MAX_SUM;
    if ((a->sum != NULL) != has_sum && a->n_tokens > 0)
        return dcp__fail(DCP_ERR_ARG, "merge: sum is %s, but the description's lse_form is %s",
                         a->sum != NULL ? "given" : "missing", has_sum ? "max and sum" : "LSE");
    if (a->kv_len != NULL) DCP_TRY(dcp__merge_check_kv_len(a->kv_len, a->n_tokens));
    return DCP_OK;
}

/* In a peer's part of group memory a result could lie in its partial, which no rank may write. */
static dcp_status check_peers_memory(const struct dcp_merge *m, const dcp_merge_args *a,
                                     int64_t own_t, int64_t own_h)
{
    const int64_t merged_span =
        (own_t - 1) * a->merged_token_stride + (own_h - 1) * a->merged_head_stride + m->desc.dim;
    const int64_t lse_span =
        (own_t - 1) * a->merged_lse_token_stride + (own_h - 1) * a->merged_lse_head_stride + 1;
    const char *what = NULL;
    int r = -1;
    if (dcp__group_touches_peer(m->g, a->merged,
                                (size_t)merged_span * dcp_dtype_bytes(m->desc.merged_type), &r))
        what = "merged";
    else if (a->merged_lse != NULL &&
             dcp__group_touches_peer(m->g, a->merged_lse, (size_t)lse_span * sizeof(float), &r))
        what = "merged_lse";
    if (what == NULL) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "merge: %s of rank %d overlaps the group memory of rank %d, which only that "
                     "rank may write",
                     what, m->rank, r);
}

dcp_status dcp__merge_check_args(const struct dcp_merge *m, const dcp_merge_args *args,
                                 struct dcp__merge_run *run_out)
{
    const dcp_merge_desc *d = &m->desc;
    memset(run_out, 0, sizeof(*run_out));
    run_out->seen.t = -1;
    if (args == NULL) return dcp__fail(DCP_ERR_ARG, "merge: args is NULL");
    dcp_merge_args *a = &run_out->args;
    DCP_TRY(dcp__merge_copy_struct(a, args, args->struct_size, sizeof(*a), "merge args"));
    run_out->n_tokens = a->n_tokens;
    if (a->n_tokens < 0 || a->n_tokens > d->max_tokens)
        return dcp__fail(DCP_ERR_ARG, "merge: n_tokens = %lld, created for 0..%lld",
                         (long long)a->n_tokens, (long long)d->max_tokens);
    const struct dcp__merge_block b =
        dcp__merge_block_got(d->cut, a->n_tokens, d->n_heads, m->n_ranks, m->rank);
    const int64_t own_t = b.t_end - b.t_begin;
    const int64_t own_h = b.h_end - b.h_begin;
    DCP_TRY(dcp__merge_check_strides("out", a->n_tokens, d->n_heads, d->dim, &a->out_token_stride,
                                     &a->out_head_stride));
    DCP_TRY(dcp__merge_check_strides("lse", a->n_tokens, d->n_heads, 1, &a->lse_token_stride,
                                     &a->lse_head_stride));
    DCP_TRY(dcp__merge_check_strides("merged", own_t, own_h, d->dim, &a->merged_token_stride,
                                     &a->merged_head_stride));
    DCP_TRY(dcp__merge_check_strides("merged_lse", own_t, own_h, 1, &a->merged_lse_token_stride,
                                     &a->merged_lse_head_stride));
    if (a->n_tokens > 0) {
        DCP_TRY(dcp__merge_check_pointer("out", a->out, dcp_dtype_bytes(d->out_type)));
        DCP_TRY(dcp__merge_check_pointer("lse", a->lse, dcp_dtype_bytes(d->lse_type)));
        if (a->sum != NULL)
            DCP_TRY(dcp__merge_check_pointer("sum", a->sum, dcp_dtype_bytes(d->lse_type)));
    }
    if (own_t * own_h > 0) {
        DCP_TRY(dcp__merge_check_pointer("merged", a->merged, dcp_dtype_bytes(d->merged_type)));
        if (a->merged_lse != NULL)
            DCP_TRY(dcp__merge_check_pointer("merged_lse", a->merged_lse, 4));
        DCP_TRY(check_peers_memory(m, a, own_t, own_h));
    }
    DCP_TRY(check_values(m, a));
    run_out->own = (struct dcp__merge_src){a->out,    a->out_token_stride, a->out_head_stride,
                                           a->lse,    a->lse_token_stride, a->lse_head_stride,
                                           a->kv_len, d->lse_type,         a->sum};
    const struct dcp__merge_dst dst = {a->merged,
                                       a->merged_token_stride,
                                       a->merged_head_stride,
                                       a->merged_lse,
                                       a->merged_lse_token_stride,
                                       a->merged_lse_head_stride,
                                       b.t_begin,
                                       b.h_begin,
                                       0};
    const char *what = NULL;
    if (!dcp__merge_overlaps(m, run_out, m->rank, &dst, &run_out->own, m->rank, &what))
        return DCP_OK;
    const bool is_lse = strncmp(what, "merged_lse", strlen("merged_lse")) == 0;
    return dcp__fail(DCP_ERR_ARG,
                     "merge: %s; allowed is only the own slice of %s, at its place and with its "
                     "strides and type, by heads or tokens",
                     what, is_lse ? "an lse in f32 that is no maximum" : "out");
}
