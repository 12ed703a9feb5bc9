/* SPDX-License-Identifier: Apache-2.0 */
/* What lies in what: strided buffers against each other, exactly. */
#include "merge/merge_priv.h"

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
        dcp__merge_block_got(d->cut, n_tokens, d->n_heads, m->n_ranks, owner);
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
    struct dcp__region sum = lse;
    sum.at = src->sum;
    const struct dcp__region kv = {(const char *)src->kv_len, 1, 0, 1, 0, n_tokens * 8};
    const struct dcp__region sink = {(const char *)run->args.sink, 1, 0, 1, 0, d->n_heads * 4};
    const bool is_own = owner == src_rank;
    const bool in_place =
        is_own && d->cut != DCP_CUT_NONE && d->merged_type == d->out_type &&
        dst->out ==
            src->out + dcp__merge_offset(b.t_begin, b.h_begin, src->out_ts, src->out_hs) * ob &&
        (n_t == 1 || dst->out_ts == src->out_ts) && (n_h == 1 || dst->out_hs == src->out_hs);
    const bool lse_in_place =
        is_own && d->cut != DCP_CUT_NONE && d->lse_type == DCP_F32 && src->sum == NULL &&
        (const char *)dst->lse ==
            src->lse + dcp__merge_offset(b.t_begin, b.h_begin, src->lse_ts, src->lse_hs) * lb &&
        (n_t == 1 || dst->lse_ts == src->lse_ts) && (n_h == 1 || dst->lse_hs == src->lse_hs);
    *what_out = NULL;
    if (!in_place && dcp__regions_overlap(&merged, &out))
        *what_out = "merged overlaps out";
    else if (dcp__regions_overlap(&merged, &lse))
        *what_out = "merged overlaps lse";
    else if (dcp__regions_overlap(&merged, &sum) || dcp__regions_overlap(&mlse, &sum))
        *what_out = "the result overlaps the sums";
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
