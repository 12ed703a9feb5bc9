/* SPDX-License-Identifier: Apache-2.0 */
/* What can be wrong with a call's arguments on one rank alone: all of it is found before anything
 * moves. */
#include "attend/attend_priv.h"
#include "merge/merge_priv.h"

/* ---- local checks -------------------------------------------------------------------------- */

/* Are count * stride elements, and at after them, bytes that an int64 can count? */
static bool spans_fit(int64_t n0, int64_t s0, int64_t n1, int64_t s1, int64_t at, int64_t elem)
{
    int64_t x, y;
    return !__builtin_mul_overflow(n0, s0, &x) && !__builtin_mul_overflow(n1, s1, &y) &&
           !__builtin_add_overflow(x, y, &x) && !__builtin_add_overflow(x, at, &x) &&
           !__builtin_mul_overflow(x, elem, &x);
}

/* Keys or values, or their scales, as a view gives them. */
struct part {
    const char *name; /* "k", "v" */
    int64_t page_bytes, slot, head, dim;
    const void *base;
};

/* The kernels read single elements at any distance: each must be aligned to its own size, which
 * strides in elements keep, and no distance may overflow. whose: "view's" or "scales'". */
static dcp_status check_part(const struct part *p, const char *whose, int64_t n_slots,
                             int64_t n_heads, int64_t elem, long long at)
{
    const struct {
        const char *field;
        int64_t value;
    } strides[3] = {
        {"page_stride_bytes", p->page_bytes}, {"slot_stride", p->slot}, {"head_stride", p->head}};
    const int64_t page_max =
        INT64_MAX / INT32_MAX / 2; /* any page's number times it is a distance */
    if (p->base == NULL)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld: the %s %s_base is NULL", at,
                         whose, p->name);
    for (int i = 0; i < 3; i++)
        if (strides[i].value < 0)
            return dcp__fail(
                DCP_ERR_ARG,
                "dcp_attend_run: sequence %lld: the %s %s_%s is %lld; no stride may be "
                "negative",
                at, whose, p->name, strides[i].field, (long long)strides[i].value);
    if ((uintptr_t)p->base % (uintptr_t)elem != 0)
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the %s %s_base is %p, no multiple of the "
                         "element's %lld bytes",
                         at, whose, p->name, p->base, (long long)elem);
    if (p->page_bytes % elem != 0)
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the %s %s_page_stride_bytes is %lld, no "
                         "multiple of the element's %lld bytes",
                         at, whose, p->name, (long long)p->page_bytes, (long long)elem);
    if (p->page_bytes > page_max)
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the %s %s_page_stride_bytes is %lld; the "
                         "address space allows %lld",
                         at, whose, p->name, (long long)p->page_bytes, (long long)page_max);
    if (!spans_fit(n_slots, p->slot, n_heads, p->head, p->dim, 2 * elem))
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the %s %s_slot_stride %lld x %lld and "
                         "%s_head_stride %lld x %lld exceed the address space",
                         at, whose, p->name, (long long)p->slot, (long long)n_slots, p->name,
                         (long long)p->head, (long long)n_heads);
    return DCP_OK;
}

/* Rows do not lie in one another, and a page's rows end before the next page: what a view of other
 * heads, dims or widths than the descriptor's mostly shows. before: bytes of the page in front of
 * the part's base. Strides of a page's length and more, as where heads lie apart, say nothing. */
static dcp_status check_rows_apart(const struct part *p, int64_t before, int64_t n_slots,
                                   int64_t n_heads, int64_t elem, long long at)
{
    const struct {
        const char *field;
        int64_t value, n;
    } strides[2] = {{"slot_stride", p->slot, n_slots},
                    /* one head for all of them may be meant */
                    {"head_stride", p->head, p->head == 0 ? 1 : n_heads}};
    int64_t end = before + p->dim * elem;
    for (int i = 0; i < 2; i++) {
        if (strides[i].n > 1 && strides[i].value < p->dim)
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: sequence %lld: the view's %s_%s is %lld, a row of %s "
                             "has %lld elements (%s of the attention's descriptor)",
                             at, p->name, strides[i].field, (long long)strides[i].value, p->name,
                             (long long)p->dim, p->name[0] == 'k' ? "key_dim" : "value_dim");
        if (strides[i].value * elem < p->page_bytes)
            end += (strides[i].n - 1) * strides[i].value * elem;
    }
    if (p->page_bytes == 0 || end <= p->page_bytes) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "dcp_attend_run: sequence %lld: %lld slots of %lld KV heads of %lld elements "
                     "end %lld bytes into a page, the view's %s_page_stride_bytes is %lld: "
                     "n_kv_heads, key_dim and value_dim must be the view's own",
                     at, (long long)n_slots, (long long)n_heads, (long long)p->dim, (long long)end,
                     p->name, (long long)p->page_bytes);
}

static dcp_status check_view(const struct dcp_attend *a, const dcp_kv_view *v, int64_t own,
                             long long at)
{
    const int64_t elem = (int64_t)dcp_dtype_bytes(v->dtype);
    const int64_t n_slots = v->page_tokens < own ? v->page_tokens : own;
    const struct part parts[2] = {
        {"k", v->k_page_stride_bytes, v->k_slot_stride, v->k_head_stride, a->d.key_dim, v->k_base},
        {"v", v->v_page_stride_bytes, v->v_slot_stride, v->v_head_stride, a->d.value_dim,
         v->v_base}};
    for (int i = 0; i < 2; i++)
        DCP_TRY(check_part(&parts[i], "view's", n_slots, a->d.n_kv_heads, elem, at));
    /* K and V in the same pages: the one behind has so much less of them. */
    const int64_t apart = (int64_t)((uintptr_t)v->v_base - (uintptr_t)v->k_base);
    const bool is_shared = v->k_page_stride_bytes == v->v_page_stride_bytes &&
                           apart < v->k_page_stride_bytes && apart > -v->k_page_stride_bytes;
    for (int i = 0; i < 2; i++) {
        const int64_t behind = is_shared ? (i == 1 ? apart : -apart) : 0;
        DCP_TRY(check_rows_apart(&parts[i], behind > 0 ? behind : 0, n_slots, a->d.n_kv_heads, elem,
                                 at));
    }
    if (v->pages == NULL)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld: the view's pages is NULL",
                         at);
    const int64_t n_pages = own / v->page_tokens + (own % v->page_tokens != 0);
    for (int64_t p = 0; p < n_pages; p++) {
        if (v->pages[p] < 0) {
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: sequence %lld: pages[%lld] is %d; no page's number "
                             "may be negative",
                             at, (long long)p, (int)v->pages[p]);
        }
    }
    return DCP_OK;
}

/* The scales of sequence s; NULL: it has none. */
static const dcp_kv_scales *scales_of(const dcp_attend_args *args, int64_t s)
{
    return args->scales == NULL || args->scales[s].k_base == NULL ? NULL : &args->scales[s];
}

static int64_t scale_bytes(const dcp_kv_scales *scales)
{
    return scales->dtype == DCP_F16 || scales->dtype == DCP_BF16 ? 2 : 4;
}

static dcp_status check_scales(const struct dcp_attend *a, const dcp_kv_scales *s,
                               const dcp_kv_view *v, int64_t own, long long at)
{
    if (s->dtype != DCP_DTYPE_DEFAULT && s->dtype != DCP_F32 && s->dtype != DCP_F16 &&
        s->dtype != DCP_BF16) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: dtype %d of the scales is none of f32, "
                         "f16, bf16",
                         at, (int)s->dtype);
    }
    const int64_t n_slots = v->page_tokens < own ? v->page_tokens : own;
    const struct part parts[2] = {
        {"k", s->k_page_stride_bytes, s->k_slot_stride, s->k_head_stride, 1, s->k_base},
        {"v", s->v_page_stride_bytes, s->v_slot_stride, s->v_head_stride, 1, s->v_base}};
    for (int i = 0; i < 2; i++)
        DCP_TRY(check_part(&parts[i], "scales'", n_slots, a->d.n_kv_heads, scale_bytes(s), at));
    return DCP_OK;
}

static dcp_status check_seq(const struct dcp_attend *a, const dcp_attend_args *args, int64_t s)
{
    const dcp_attend_seq *seq = &args->seqs[s];
    const dcp_kv_view *view = seq->view;
    const long long at = (long long)s;
    if (seq->n_rows < 0 || seq->length < 0 || seq->window < 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld has n_rows %lld, length %lld, window %lld; "
                         "none may be negative",
                         at, (long long)seq->n_rows, (long long)seq->length,
                         (long long)seq->window);
    }
    if (args->q_pos == NULL && seq->n_rows > seq->length) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld has %lld rows but length %lld, new tokens "
                         "included",
                         at, (long long)seq->n_rows, (long long)seq->length);
    }
    if (view == NULL)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sequence %lld has no view", at);
    if (dcp_dtype_bytes(view->dtype) == 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the view's dtype %d is none of f32, f16, "
                         "bf16, int8, fp8",
                         at, (int)view->dtype);
    }
    const int64_t own = dcp_local_length(seq->length, a->n_ranks, a->rank, a->d.interleave);
    if (view->n_keys < own) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: rank %d owns %lld of %lld positions, its "
                         "view holds %lld",
                         at, a->rank, (long long)own, (long long)seq->length,
                         (long long)view->n_keys);
    }
    if (own > 0 && view->page_tokens < 1) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the view's page_tokens is %lld, must be "
                         "positive",
                         at, (long long)view->page_tokens);
    }
    const dcp_kv_scales *scales = scales_of(args, s);
    /* fp8 numbers would mean something without scales, but those of a dcp_cache mean another thing:
     * who wants a scale of 1 says so. */
    const bool needs_scales = view->dtype == DCP_I8 || view->dtype == DCP_FP8_E4M3;
    if (needs_scales && scales == NULL) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the view is %s and scales are missing; "
                         "args.scales needs those of dcp_cache_scales, or of an engine's own cache "
                         "(a shared scale of 1 where it has none)",
                         at, dcp_dtype_name(view->dtype));
    }
    if (!needs_scales && scales != NULL) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: sequence %lld: the view is %s and scales are given; only "
                         "int8 and fp8 have them, k_base must be NULL",
                         at, dcp_dtype_name(view->dtype));
    }
    if (own == 0) return DCP_OK;
    DCP_TRY(check_view(a, view, own, at));
    return scales != NULL ? check_scales(a, scales, view, own, at) : DCP_OK;
}

static dcp_status check_rows(const char *name, const void *ptr, int64_t n, int64_t stride,
                             int64_t row)
{
    if (row > 0 && ptr == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s is NULL", name);
    if ((uintptr_t)ptr % _Alignof(float) != 0) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s is not aligned to its elements", name);
    }
    if (stride >= row && !spans_fit(n, stride, 0, 0, row, (int64_t)sizeof(float))) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: %lld rows of %s_token_stride %lld exceed the address "
                         "space",
                         (long long)n, name, (long long)stride);
    }
    if (stride == 0 || stride >= row) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "dcp_attend_run: %s_token_stride is %lld, a row has %lld elements", name,
                     (long long)stride, (long long)row);
}

/* ---- overlaps: results lie neither in each other nor in what the call reads ----------------- */

static struct dcp__region region_of(const void *at, int64_t n_rows, int64_t row_bytes,
                                    int64_t stride, int64_t dense)
{
    return (struct dcp__region){at, n_rows, (stride != 0 ? stride : dense) * (int64_t)sizeof(float),
                                1,  0,      row_bytes};
}

/* Does a result lie in the keys or values of a view that this rank's attention reads? One page
 * after another: [slots][KV heads][dim], at any strides. */
static bool overlaps_view(const struct dcp_attend *a, const dcp_attend_seq *seq,
                          const dcp_kv_scales *scales, const struct dcp__region results[2])
{
    const dcp_kv_view *v = seq->view;
    const int64_t elem = (int64_t)dcp_dtype_bytes(v->dtype);
    int64_t left = dcp_local_length(seq->length, a->n_ranks, a->rank, a->d.interleave);
    for (int64_t p = 0; left > 0; p++, left -= v->page_tokens) {
        const int64_t n_slots = left < v->page_tokens ? left : v->page_tokens;
        const struct dcp__region k = {(const char *)v->k_base +
                                          v->pages[p] * v->k_page_stride_bytes,
                                      n_slots,
                                      v->k_slot_stride * elem,
                                      a->d.n_kv_heads,
                                      v->k_head_stride * elem,
                                      a->d.key_dim * elem};
        const struct dcp__region val = {(const char *)v->v_base +
                                            v->pages[p] * v->v_page_stride_bytes,
                                        n_slots,
                                        v->v_slot_stride * elem,
                                        a->d.n_kv_heads,
                                        v->v_head_stride * elem,
                                        a->d.value_dim * elem};
        for (int i = 0; i < 2; i++)
            if (dcp__regions_overlap(&results[i], &k) || dcp__regions_overlap(&results[i], &val))
                return true;
        if (scales == NULL) continue;
        const int64_t bytes = scale_bytes(scales);
        const struct dcp__region ks = {(const char *)scales->k_base +
                                           v->pages[p] * scales->k_page_stride_bytes,
                                       n_slots,
                                       scales->k_slot_stride * bytes,
                                       a->d.n_kv_heads,
                                       scales->k_head_stride * bytes,
                                       bytes};
        const struct dcp__region vs = {(const char *)scales->v_base +
                                           v->pages[p] * scales->v_page_stride_bytes,
                                       n_slots,
                                       scales->v_slot_stride * bytes,
                                       a->d.n_kv_heads,
                                       scales->v_head_stride * bytes,
                                       bytes};
        for (int i = 0; i < 2; i++)
            if (dcp__regions_overlap(&results[i], &ks) || dcp__regions_overlap(&results[i], &vs))
                return true;
    }
    return false;
}

static dcp_status check_overlaps(const struct dcp_attend *a, const dcp_attend_args *args,
                                 int64_t n_total)
{
    const int64_t n_own = a->heads.end - a->heads.begin, elem = (int64_t)sizeof(float);
    if (n_own == 0) return DCP_OK;
    const int64_t q_row = n_own * a->d.key_dim, out_row = n_own * a->out_dim;
    static const char *const names[2] = {"out", "lse"};
    const struct dcp__region results[2] = {
        region_of(args->out, n_total, out_row * elem, args->out_token_stride, out_row),
        region_of(args->lse, n_total, n_own * elem, args->lse_token_stride, n_own)};
    const struct {
        const char *name;
        struct dcp__region region;
    } inputs[] = {
        {"q", region_of(args->q, n_total, q_row * elem, args->q_token_stride, q_row)},
        {"q_pos", region_of(args->q_pos, 1, n_total * (int64_t)sizeof(int64_t), 0, 0)},
        {"sink", region_of(args->sink, 1, a->d.n_heads * a->d.tp * elem, 0, 0)},
        {"project", region_of(args->project, 1,
                              a->d.n_heads * a->d.value_dim * a->d.project_dim *
                                  (int64_t)dcp_dtype_bytes(a->d.project_type),
                              0, 0)},
    };
    if (dcp__regions_overlap(&results[0], &results[1]))
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: out and lse overlap");
    for (int r = 0; r < 2; r++)
        for (size_t i = 0; i < sizeof(inputs) / sizeof(inputs[0]); i++)
            if (dcp__regions_overlap(&results[r], &inputs[i].region))
                return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: %s overlaps %s", names[r],
                                 inputs[i].name);
    for (int64_t s = 0; s < args->n_seqs; s++)
        if (overlaps_view(a, &args->seqs[s], scales_of(args, s), results))
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: out or lse overlaps the keys or values of sequence "
                             "%lld, or their scales",
                             (long long)s);
    return DCP_OK;
}

/* Everything that can be wrong on this rank alone; args is a copy of this library's own size. */
dcp_status dcp__attend_check_args(const struct dcp_attend *a, const dcp_attend_args *args,
                                  int64_t *n_total_out)
{
    if (args->n_seqs < 0 || (args->n_seqs > 0 && args->seqs == NULL)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: n_seqs is %lld, seqs is %s",
                         (long long)args->n_seqs, args->seqs == NULL ? "NULL" : "given");
    }
    int64_t n_total = 0;
    for (int64_t s = 0; s < args->n_seqs; s++) {
        DCP_TRY(check_seq(a, args, s));
        if (args->seqs[s].n_rows > a->d.max_tokens - n_total) {
            return dcp__fail(DCP_ERR_ARG,
                             "dcp_attend_run: more rows than max_tokens %lld of create (sequence "
                             "%lld brings %lld to %lld)",
                             (long long)a->d.max_tokens, (long long)s,
                             (long long)args->seqs[s].n_rows, (long long)n_total);
        }
        n_total += args->seqs[s].n_rows;
    }
    if ((args->sink != NULL) != (a->d.has_sink != 0)) {
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: has_sink is %u at create, sink is %s here",
                         a->d.has_sink, args->sink == NULL ? "NULL" : "given");
    }
    if ((uintptr_t)args->sink % _Alignof(float) != 0)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: sink is not aligned to its elements");
    if (args->sink != NULL) DCP_TRY(dcp__merge_check_sink(args->sink, a->d.n_heads * a->d.tp));
    if ((args->project != NULL) != (a->d.project_dim > 0)) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_run: project_dim is %lld at create, project is %s here",
                         (long long)a->d.project_dim, args->project == NULL ? "NULL" : "given");
    }
    if ((uintptr_t)args->project % dcp_dtype_bytes(a->d.project_type) != 0)
        return dcp__fail(DCP_ERR_ARG, "dcp_attend_run: project is not aligned to its elements");
    *n_total_out = n_total;
    if (n_total == 0) return DCP_OK;
    const int64_t n_own = a->heads.end - a->heads.begin;
    DCP_TRY(check_rows("q", args->q, n_total, args->q_token_stride, n_own * a->d.key_dim));
    DCP_TRY(check_rows("out", args->out, n_total, args->out_token_stride, n_own * a->out_dim));
    DCP_TRY(check_rows("lse", args->lse == NULL ? (const float *)args->out : args->lse, n_total,
                       args->lse_token_stride, n_own));
    return check_overlaps(a, args, n_total);
}
