/* SPDX-License-Identifier: Apache-2.0 */
/* Merges without a group: the rows of parts in this process, through the same code as those of
 * ranks (merge_rows.c), part number for rank. */
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "merge/merge_priv.h"

enum { STACK_PARTS = 64 };
/* Room for the scratch and the sources of that many parts. */
enum { STACK_BYTES = STACK_PARTS * (3 * DCP__MERGE_ROWS * 4 + 2 * 8 + 2 * 4 + 72) + 8 * 64 };

/* One call, arguments checked. */
struct local {
    dcp_merge_local_args a; /* strides resolved */
    struct dcp__merge_math math;
    struct dcp__merge_src *srcs;
    struct dcp__merge_dst dst;
    struct dcp__merge_seen seen;
};

static dcp_status check_shape(struct local *l)
{
    dcp_merge_local_args *a = &l->a;
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = a->n_tokens;
    desc.n_heads = a->n_heads;
    desc.dim = a->dim;
    desc.lse_base = a->lse_base;
    desc.lse_form = a->lse_form;
    desc.out_type = a->out_type;
    desc.lse_type = a->lse_type;
    desc.merged_type = a->merged_type;
    desc.nonfinite = a->nonfinite;
    dcp_merge_desc full;
    DCP_TRY(dcp__merge_check_desc(&desc, &full));
    a->out_type = full.out_type;
    a->lse_type = full.lse_type;
    a->merged_type = full.merged_type;
    DCP_TRY(dcp__merge_math_of(&full, &l->math));
    if (a->n_parts < 1 || a->n_parts > INT32_MAX || (a->offsets != NULL && a->n_parts != 1))
        return dcp__fail(DCP_ERR_ARG, "merge local: n_parts = %lld, must be >= 1%s",
                         (long long)a->n_parts, a->offsets != NULL ? ", and 1 with offsets" : "");
    if (a->parts == NULL) return dcp__fail(DCP_ERR_ARG, "merge local: parts is NULL");
    for (int64_t t = 0; a->offsets != NULL && t < a->n_tokens; t++) {
        if (a->offsets[t] < 0 || a->offsets[t + 1] < a->offsets[t])
            return dcp__fail(DCP_ERR_ARG,
                             "merge local: offsets[%lld] = %lld and offsets[%lld] = %lld; they "
                             "start at 0 or more and do not fall",
                             (long long)t, (long long)a->offsets[t], (long long)(t + 1),
                             (long long)a->offsets[t + 1]);
    }
    DCP_TRY(dcp__merge_check_strides("merged", a->n_tokens, a->n_heads, a->dim,
                                     &a->merged_token_stride, &a->merged_head_stride));
    DCP_TRY(dcp__merge_check_strides("merged_lse", a->n_tokens, a->n_heads, 1,
                                     &a->merged_lse_token_stride, &a->merged_lse_head_stride));
    if (a->sink != NULL) DCP_TRY(dcp__merge_check_sink(a->sink, a->n_heads));
    if (a->n_tokens == 0) return DCP_OK;
    DCP_TRY(dcp__merge_check_pointer("merged", a->merged, dcp_dtype_bytes(a->merged_type)));
    if (a->merged_lse != NULL)
        DCP_TRY(dcp__merge_check_pointer("merged_lse", a->merged_lse, sizeof(float)));
    return DCP_OK;
}

/* Exactly the same rows? Then a row's weights are known and its parts read before it is written. */
static bool is_same_place(const struct dcp__region *a, const struct dcp__region *b)
{
    return a->at == b->at && a->len == b->len && (a->n0 == 1 || a->s0 == b->s0) &&
           (a->n1 == 1 || a->s1 == b->s1);
}

static dcp_status check_part(struct local *l, int64_t k, int64_t n_tokens,
                             struct dcp__merge_src *src)
{
    const dcp_merge_local_args *a = &l->a;
    dcp_merge_part p = a->parts[k];
    DCP_TRY(dcp__merge_check_strides("a part's out", n_tokens, a->n_heads, a->dim,
                                     &p.out_token_stride, &p.out_head_stride));
    DCP_TRY(dcp__merge_check_strides("a part's lse", n_tokens, a->n_heads, 1, &p.lse_token_stride,
                                     &p.lse_head_stride));
    *src = (struct dcp__merge_src){p.out,    p.out_token_stride, p.out_head_stride,
                                   p.lse,    p.lse_token_stride, p.lse_head_stride,
                                   p.kv_len, a->lse_type,        p.sum};
    if ((p.sum != NULL) != l->math.has_sum && n_tokens > 0)
        return dcp__fail(DCP_ERR_ARG, "merge local: the sum of part %lld is %s", (long long)k,
                         p.sum != NULL ? "given, but lse_form is LSE" : "missing");
    if (n_tokens == 0) return DCP_OK;
    DCP_TRY(dcp__merge_check_pointer("a part's out", p.out, dcp_dtype_bytes(a->out_type)));
    DCP_TRY(dcp__merge_check_pointer("a part's lse", p.lse, dcp_dtype_bytes(a->lse_type)));
    if (p.sum != NULL)
        DCP_TRY(dcp__merge_check_pointer("a part's sum", p.sum, dcp_dtype_bytes(a->lse_type)));
    if (p.kv_len != NULL) DCP_TRY(dcp__merge_check_kv_len(p.kv_len, n_tokens));
    const int64_t ob = (int64_t)dcp_dtype_bytes(a->out_type);
    const int64_t lb = (int64_t)dcp_dtype_bytes(a->lse_type);
    const int64_t mb = (int64_t)dcp_dtype_bytes(a->merged_type);
    const struct dcp__region out = {src->out,   n_tokens,         src->out_ts * ob,
                                    a->n_heads, src->out_hs * ob, a->dim * ob};
    const struct dcp__region lse = {src->lse,   n_tokens,         src->lse_ts * lb,
                                    a->n_heads, src->lse_hs * lb, lb};
    struct dcp__region sum = lse;
    sum.at = src->sum;
    const struct dcp__region merged = {a->merged,
                                       a->n_tokens,
                                       a->merged_token_stride * mb,
                                       a->n_heads,
                                       a->merged_head_stride * mb,
                                       a->dim * mb};
    const struct dcp__region mlse = {(const char *)a->merged_lse,    a->n_tokens,
                                     a->merged_lse_token_stride * 4, a->n_heads,
                                     a->merged_lse_head_stride * 4,  4};
    const bool in_place =
        a->offsets == NULL && a->merged_type == a->out_type && is_same_place(&merged, &out);
    const bool lse_in_place =
        a->offsets == NULL && a->lse_type == DCP_F32 && p.sum == NULL && is_same_place(&mlse, &lse);
    const char *what = !in_place && dcp__regions_overlap(&merged, &out)     ? "merged, out"
                       : dcp__regions_overlap(&merged, &lse)                ? "merged, lse"
                       : dcp__regions_overlap(&merged, &sum)                ? "merged, sum"
                       : dcp__regions_overlap(&mlse, &out)                  ? "merged_lse, out"
                       : dcp__regions_overlap(&mlse, &sum)                  ? "merged_lse, sum"
                       : !lse_in_place && dcp__regions_overlap(&mlse, &lse) ? "merged_lse, lse"
                       : dcp__regions_overlap(&merged, &mlse)               ? "merged, merged_lse"
                                                                            : NULL;
    if (what != NULL)
        return dcp__fail(DCP_ERR_ARG,
                         "merge local: result and part %lld overlap (%s); allowed is only the part "
                         "itself, at its place and with its strides and type",
                         (long long)k, what);
    return DCP_OK;
}

/* Each token of parts[0] that belongs to row t is a part of its own. */
static void aim_row(const struct local *l, const struct dcp__merge_src *whole, int64_t t)
{
    const int64_t ob = (int64_t)dcp_dtype_bytes(l->a.out_type);
    const int64_t lb = (int64_t)dcp_dtype_bytes(l->a.lse_type);
    int n = 0;
    for (int64_t i = l->a.offsets[t]; i < l->a.offsets[t + 1]; i++) {
        struct dcp__merge_src *src = &l->srcs[n++];
        *src = *whole;
        /* The walk is at token t: move the part so that its token i lies there. */
        src->out += (i - t) * whole->out_ts * ob;
        src->lse += (i - t) * whole->lse_ts * lb;
        if (src->sum != NULL) src->sum += (i - t) * whole->lse_ts * lb;
        if (src->kv_len != NULL) src->kv_len += i - t;
    }
}

static void merge_tokens(struct local *l, const struct dcp__merge_src *whole)
{
    const dcp_merge_local_args *a = &l->a;
    struct dcp__merge_block b = {0, 0, 0, a->n_heads};
    while (b.t_begin < a->n_tokens) {
        b.t_end = b.t_begin + 1;
        if (a->offsets != NULL) {
            aim_row(l, whole, b.t_begin);
            l->math.n_parts = (int)(a->offsets[b.t_end] - a->offsets[b.t_begin]);
        }
        const bool is_wanted = a->row_mask == NULL || a->row_mask[b.t_begin] != 0;
        /* Tokens that are alike go in one stretch. */
        while (a->offsets == NULL && b.t_end < a->n_tokens &&
               is_wanted == (a->row_mask == NULL || a->row_mask[b.t_end] != 0))
            b.t_end++;
        if (is_wanted)
            dcp__merge_rows(&l->math, l->srcs, a->out_type, a->sink, &b, &l->dst, true, &l->seen);
        b.t_begin = b.t_end;
    }
}

static dcp_status run_local(struct local *l, int64_t most_parts, char *room)
{
    const dcp_merge_local_args *a = &l->a;
    const size_t at = dcp__merge_scratch_at((int)most_parts, room, &l->math.scratch);
    l->srcs = (struct dcp__merge_src *)(void *)(room + at);
    l->math.n_parts = (int)a->n_parts;
    l->dst = (struct dcp__merge_dst){a->merged,
                                     a->merged_token_stride,
                                     a->merged_head_stride,
                                     a->merged_lse,
                                     a->merged_lse_token_stride,
                                     a->merged_lse_head_stride,
                                     0,
                                     0,
                                     0};
    l->seen.t = -1;
    struct dcp__merge_src whole;
    memset(&whole, 0, sizeof(whole));
    if (a->offsets != NULL) {
        DCP_TRY(check_part(l, 0, a->n_tokens > 0 ? a->offsets[a->n_tokens] : 0, &whole));
    } else {
        for (int64_t k = 0; k < a->n_parts; k++)
            DCP_TRY(check_part(l, k, a->n_tokens, &l->srcs[k]));
    }
    merge_tokens(l, &whole);
    return DCP_OK;
}

dcp_status dcp_merge_local(const dcp_merge_local_args *args, dcp_merge_stats *stats_out)
{
    struct local l;
    memset(&l, 0, sizeof(l));
    if (args == NULL) return dcp__fail(DCP_ERR_ARG, "merge local: args is NULL");
    DCP_TRY(dcp__merge_copy_struct(&l.a, args, args->struct_size, sizeof(l.a), "merge local args"));
    DCP_TRY(check_shape(&l));
    int64_t most = l.a.n_parts;
    for (int64_t t = 0; l.a.offsets != NULL && t < l.a.n_tokens; t++) {
        if (l.a.offsets[t + 1] - l.a.offsets[t] > most) most = l.a.offsets[t + 1] - l.a.offsets[t];
    }
    if (most > INT32_MAX / 256)
        return dcp__fail(DCP_ERR_ARG, "merge local: %lld parts of one row are too many",
                         (long long)most);
    const size_t n_bytes = dcp__merge_scratch_at((int)most, NULL, &l.math.scratch) +
                           (size_t)most * sizeof(struct dcp__merge_src);
    _Alignas(64) char room[STACK_BYTES];
    void *more = NULL;
    if (n_bytes > sizeof(room)) DCP_TRY(dcp__alloc(n_bytes, "merge local", &more));
    const dcp_status st = run_local(&l, most, more != NULL ? more : room);
    dcp__free(more);
    DCP_TRY(st);
    if (stats_out != NULL)
        *stats_out =
            (dcp_merge_stats){l.seen.n_nonfinite, l.seen.n_lse_bad, l.seen.n_lse_empty, 0, 0};
    if (l.a.nonfinite == DCP_NONFINITE_ERROR && l.seen.n_nonfinite != 0)
        return dcp__fail(DCP_ERR_NONFINITE,
                         "merge local: non-finite value at token %lld, head %lld of part %lld "
                         "(%lld in all); the result is undefined",
                         (long long)l.seen.t, (long long)l.seen.h, (long long)l.seen.rank,
                         (long long)l.seen.n_nonfinite);
    return DCP_OK;
}

dcp_status dcp_merge_pair(const dcp_merge_local_args *args, const dcp_merge_part *own,
                          const dcp_merge_part *other, dcp_merge_stats *stats_out)
{
    dcp_merge_local_args a;
    if (args == NULL || own == NULL || other == NULL)
        return dcp__fail(DCP_ERR_ARG, "merge pair: %s is NULL",
                         args == NULL  ? "args"
                         : own == NULL ? "own"
                                       : "other");
    DCP_TRY(dcp__merge_copy_struct(&a, args, args->struct_size, sizeof(a), "merge pair args"));
    if ((a.lse_type != DCP_DTYPE_DEFAULT && a.lse_type != DCP_F32) ||
        a.lse_form != DCP_LSE_FORM_LSE || a.offsets != NULL ||
        (a.merged_type != DCP_DTYPE_DEFAULT && a.merged_type != a.out_type))
        return dcp__fail(DCP_ERR_ARG, "merge pair: in place takes f32 LSEs and the type of out, no "
                                      "sums and no offsets");
    const dcp_merge_part parts[2] = {*own, *other};
    a.struct_size = sizeof(a);
    a.n_parts = 2;
    a.parts = parts;
    a.merged = (void *)(uintptr_t)own->out;
    a.merged_token_stride = own->out_token_stride;
    a.merged_head_stride = own->out_head_stride;
    a.merged_lse = (float *)(uintptr_t)own->lse;
    a.merged_lse_token_stride = own->lse_token_stride;
    a.merged_lse_head_stride = own->lse_head_stride;
    return dcp_merge_local(&a, stats_out);
}
