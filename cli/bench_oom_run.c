/* SPDX-License-Identifier: Apache-2.0 */
/* One rank. What every form begins and ends with is taken first: own heads' q and result, own keys.
 *
 *                   temporaries          in place             streaming
 *   gathered q      [T, H, Dk]           [T, H, Dk]           a tile
 *   partial, LSE    [T, H, D], [T, H]    [T, H, D], [T, H]    a tile
 *   merge           2 x [T, H, D] f32    LSEs of all ranks    in the tile's workspace
 *
 * The published forms attend with all heads to the own keys by the same operator in a group of
 * their own, so that all forms share kernels and differ in memory alone. */
#include "cli/bench_oom.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/status_priv.h"
#include "cli/bench_machine.h"

enum { PAGE_TOKENS = 64, CHECKED_ROWS = 16 };

/* What a rank tells the others of a step. */
struct note {
    int32_t status;
    char text[sizeof(((struct oom_result *)NULL)->why)];
};

struct rank_state {
    dcp_group *g;
    const struct oom_case *c;
    int rank, n;
    /* [n]; taken before the cap counts: who has no memory left must still be able to say so */
    struct note *notes;
    int64_t *values;
    /* of the last step that failed somewhere: all ranks know it, and the group goes on */
    bool is_agreed;
    dcp_status own; /* this rank's part in it */
    struct attend_data data;
    dcp_range heads;
    dcp_cache *cache;
    dcp_kv_view view;
    float *q, *result, *lse;
    double *work;
    /* of a published form */
    float *all_q, *partial, *partial_lse;
    int64_t *local_pos;
    size_t *col_off_bytes;
    dcp_merge *merge;
    dcp_group *self;
    /* of any */
    dcp_attend *attend;
};

static void fill_attend(const struct oom_case *c, int64_t n_heads, int n_threads,
                        dcp_attend_desc *d)
{
    d->max_tokens = c->shape.n_tokens;
    d->n_heads = n_heads;
    d->n_kv_heads = 1;
    d->key_dim = c->shape.key_dim;
    d->value_dim = c->shape.value_dim;
    d->causal = 1;
    d->n_threads = n_threads;
    d->workspace_limit_bytes = c->workspace_limit_bytes;
}

static void fill_merge(const struct oom_case *c, enum oom_form form, dcp_merge_desc *d)
{
    d->max_tokens = c->shape.n_tokens;
    d->n_heads = c->shape.n_heads;
    d->dim = c->shape.value_dim;
    d->lse_base = DCP_LSE_BASE_E;
    d->algo = form == OOM_TEMPORARIES ? DCP_MERGE_ALLREDUCE_TEMP : DCP_MERGE_ALLREDUCE;
}

/* ---- by formula ---- */

dcp_status oom_predict(const struct oom_case *c, enum oom_form form, int n_ranks, int rank,
                       struct oom_bytes *out)
{
    const struct attend_shape *s = &c->shape;
    const dcp_range heads = dcp_cut_range(s->n_heads, n_ranks, rank);
    const int64_t t = s->n_tokens, n_own = heads.end - heads.begin;
    const int64_t keys = dcp_local_length(s->n_keys, n_ranks, rank, s->interleave);
    dcp_attend_desc attend = DCP_ATTEND_DESC_INIT;
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    memset(out, 0, sizeof(*out));
    out->q = t * n_own * s->key_dim * 4;
    out->result = t * n_own * (s->value_dim + 1) * 4;
    out->cache = (keys + PAGE_TOKENS - 1) / PAGE_TOKENS * PAGE_TOKENS * s->key_dim * 2;
    fill_attend(c, s->n_heads, c->n_threads, &attend);
    attend.interleave = form == OOM_STREAMING ? s->interleave : 1;
    DCP_TRY(dcp_attend_plan(&attend, form == OOM_STREAMING ? n_ranks : 1,
                            form == OOM_STREAMING ? rank : 0, 0, &info));
    out->attend = (int64_t)info.workspace_bytes;
    if (form != OOM_STREAMING) {
        dcp_merge_desc merge = DCP_MERGE_DESC_INIT;
        dcp_merge_cost cost;
        fill_merge(c, form, &merge);
        DCP_TRY(dcp_merge_plan(&merge, n_ranks, rank, 0, t, &cost));
        out->merge = (int64_t)cost.workspace_bytes;
        out->gathered = t * s->n_heads * s->key_dim * 4;
        out->partial = t * s->n_heads * (s->value_dim + 1) * 4;
    }
    out->total =
        out->q + out->result + out->cache + out->gathered + out->partial + out->merge + out->attend;
    return DCP_OK;
}

/* ---- steps that may lack memory ---- */

/* Collective: DCP_OK on all, or why the first rank failed at step, on all. Lacking memory is what
 * is looked for; anything else is an error of the command. */
static dcp_status step(struct rank_state *r, const char *what, dcp_status st,
                       struct oom_result *out)
{
    struct note mine = {(int32_t)st, ""};
    if (st != DCP_OK) {
        char text[256];
        snprintf(text, sizeof(text), "%s", dcp_last_error());
        size_t n = strcspn(text, "[;"); /* without the place in the source */
        while (n > 0 && text[n - 1] == ' ') n--;
        text[n] = '\0';
        snprintf(mine.text, sizeof(mine.text), "%s: %s", what, text);
    }
    DCP_TRY(dcp_group_allgather(r->g, &mine, sizeof(mine), r->notes));
    for (int i = 0; i < r->n; i++) {
        const struct note *const note = &r->notes[i];
        if (note->status == DCP_OK) continue;
        r->is_agreed = true;
        r->own = st;
        snprintf(out->why, sizeof(out->why), "%s", note->text);
        return dcp__fail((dcp_status)note->status, "%s", note->text);
    }
    return DCP_OK;
}

static dcp_status take_published(struct rank_state *r, enum oom_form form, struct oom_result *out)
{
    const struct attend_shape *s = &r->c->shape;
    const size_t rows = (size_t)(s->n_tokens * s->n_heads);
    char what[96];
    void *mem = NULL;
    snprintf(what, sizeof(what), "gathered q [%lld, %lld, %lld] f32", (long long)s->n_tokens,
             (long long)s->n_heads, (long long)s->key_dim);
    dcp_status st = dcp_group_alloc(r->g, rows * (size_t)s->key_dim * 4, &mem);
    r->all_q = mem;
    DCP_TRY(step(r, what, st, out));
    snprintf(what, sizeof(what), "partial [%lld, %lld, %lld] f32", (long long)s->n_tokens,
             (long long)s->n_heads, (long long)s->value_dim);
    mem = NULL;
    st = dcp_group_alloc(r->g, rows * (size_t)s->value_dim * 4, &mem);
    r->partial = mem;
    DCP_TRY(step(r, what, st, out));
    mem = NULL;
    st = dcp_group_alloc(r->g, rows * 4, &mem);
    r->partial_lse = mem;
    DCP_TRY(step(r, "partial's LSE", st, out));
    dcp_merge_desc merge = DCP_MERGE_DESC_INIT;
    fill_merge(r->c, form, &merge);
    st = dcp_merge_create(r->g, &merge, &r->merge);
    DCP_TRY(step(r,
                 form == OOM_TEMPORARIES ? "the merge's temporaries, cleaned and scaled partial"
                                         : "the merge's LSEs",
                 st, out));
    dcp_attend_desc attend = DCP_ATTEND_DESC_INIT;
    fill_attend(r->c, s->n_heads, r->c->n_threads, &attend);
    st = dcp_group_create_self(NULL, &r->self);
    if (st == DCP_OK) st = dcp_attend_create(r->self, &attend, &r->attend);
    DCP_TRY(step(r, "workspace of attention", st, out));
    st = dcp__alloc_array((size_t)s->n_tokens, sizeof(int64_t), "positions", &mem);
    if (st == DCP_OK) r->local_pos = mem;
    if (st == DCP_OK) st = dcp__alloc_array((size_t)r->n + 1, sizeof(size_t), "columns", &mem);
    if (st == DCP_OK) r->col_off_bytes = mem;
    return step(r, "small arrays", st, out);
}

static dcp_status take_streaming(struct rank_state *r, struct oom_result *out)
{
    dcp_attend_desc attend = DCP_ATTEND_DESC_INIT;
    fill_attend(r->c, r->c->shape.n_heads, r->c->n_threads, &attend);
    attend.interleave = r->c->shape.interleave;
    return step(r, "workspace of the operator", dcp_attend_create(r->g, &attend, &r->attend), out);
}

static void drop_form(struct rank_state *r)
{
    dcp_attend_destroy(r->attend);
    dcp_group_destroy(r->self);
    dcp_merge_destroy(r->merge);
    dcp__free(r->local_pos);
    dcp__free(r->col_off_bytes);
    dcp_group_free(r->g, r->partial_lse);
    dcp_group_free(r->g, r->partial);
    dcp_group_free(r->g, r->all_q);
    r->attend = NULL;
    r->self = NULL;
    r->merge = NULL;
    r->local_pos = NULL;
    r->col_off_bytes = NULL;
    r->all_q = r->partial = r->partial_lse = NULL;
}

/* ---- runs ---- */

/* q of all heads; the partial against the own keys, in local positions; the merge. A window that is
 * a multiple of N * I holds the same number of keys of every rank. */
static dcp_status run_published(struct rank_state *r)
{
    const struct attend_shape *s = &r->c->shape;
    const int64_t n_own = r->heads.end - r->heads.begin;
    const size_t row = (size_t)(s->n_heads * s->key_dim), own = (size_t)(n_own * s->key_dim);
    for (int i = 0; i <= r->n; i++) {
        const int64_t begin = i < r->n ? dcp_cut_range(s->n_heads, r->n, i).begin : s->n_heads;
        r->col_off_bytes[i] = (size_t)(begin * s->key_dim) * sizeof(float);
    }
    for (int64_t t = 0; t < s->n_tokens; t++) {
        memcpy(r->all_q + (size_t)t * row + (size_t)(r->heads.begin * s->key_dim),
               r->q + (size_t)t * own, own * sizeof(float));
        const int64_t pos = s->n_keys - s->n_tokens + t;
        r->local_pos[t] = dcp_local_length(pos + 1, r->n, r->rank, s->interleave) - 1;
    }
    DCP_TRY(dcp_group_gather_cols(r->g, r->all_q, (size_t)s->n_tokens, row * sizeof(float),
                                  r->col_off_bytes));
    const dcp_attend_seq seq = {&r->view, r->view.n_keys, s->n_tokens, s->window / r->n};
    dcp_attend_args a = DCP_ATTEND_ARGS_INIT;
    a.seqs = &seq;
    a.n_seqs = 1;
    a.q_pos = r->local_pos;
    a.q = r->all_q;
    a.out = r->partial;
    a.lse = r->partial_lse;
    DCP_TRY(dcp_attend_run(r->attend, &a, NULL));
    dcp_merge_args m = DCP_MERGE_ARGS_INIT;
    m.n_tokens = s->n_tokens;
    m.out = r->partial;
    m.lse = r->partial_lse;
    m.merged = r->result;
    m.merged_lse = r->lse;
    return dcp_merge_run(r->merge, &m, NULL);
}

static dcp_status run_streaming(struct rank_state *r)
{
    const struct attend_shape *s = &r->c->shape;
    const dcp_attend_seq seq = {&r->view, s->n_keys, s->n_tokens, s->window};
    dcp_attend_args a = DCP_ATTEND_ARGS_INIT;
    a.seqs = &seq;
    a.n_seqs = 1;
    a.q = r->q;
    a.out = r->result;
    a.lse = r->lse;
    return dcp_attend_run(r->attend, &a, NULL);
}

/* ---- a form ---- */

static dcp_status largest(struct rank_state *r, int64_t *value)
{
    DCP_TRY(dcp_group_allgather(r->g, value, sizeof(*value), r->values));
    for (int i = 0; i < r->n; i++) *value = r->values[i] > *value ? r->values[i] : *value;
    return DCP_OK;
}

static dcp_status check(struct rank_state *r, struct oom_result *out)
{
    struct attend_check c = {.tolerance = 0x1p-15,
                             .weight_error = attend_data_weight_error(&r->c->shape, DCP_BF16),
                             .n_rows = CHECKED_ROWS};
    attend_data_check(&r->data, r->heads, r->result, r->lse, r->work, &c);
    int64_t worst = (int64_t)(c.worst_error < 1e3 ? c.worst_error * 1e12 : 1e15);
    out->wrong = c.wrong;
    out->n_checked = (int64_t)CHECKED_ROWS * r->n;
    DCP_TRY(largest(r, &out->wrong));
    DCP_TRY(largest(r, &worst));
    out->worst_error = (double)worst * 1e-12;
    return DCP_OK;
}

static dcp_status finish(struct rank_state *r, int64_t pss_before, double seconds,
                         struct oom_result *out)
{
    const int64_t pss = bench_pss_bytes();
    int64_t us = (int64_t)(seconds * 1e6);
    out->peak_counted = (int64_t)dcp__alloc_peak();
    out->pss_above = pss < 0 || pss_before < 0 ? -1 : pss > pss_before ? pss - pss_before : 0;
    DCP_TRY(largest(r, &us));
    DCP_TRY(largest(r, &out->peak_counted));
    DCP_TRY(largest(r, &out->pss_above));
    out->seconds = (double)us * 1e-6;
    out->has_finished = true;
    return check(r, out);
}

static dcp_status run_form(struct rank_state *r, enum oom_form form, struct oom_result *out)
{
    memset(out, 0, sizeof(*out));
    memset(
        r->result, 0xff, /* NaN: nothing of an earlier form is taken for a result */
        (size_t)(r->c->shape.n_tokens * (r->heads.end - r->heads.begin) * r->c->shape.value_dim) *
            sizeof(float));
    const int64_t pss = bench_pss_bytes();
    dcp__alloc_reset_peak();
    DCP_TRY(dcp_group_barrier(r->g));
    out->has_run = true;
    dcp_status st = form == OOM_STREAMING ? take_streaming(r, out) : take_published(r, form, out);
    if (st == DCP_OK) {
        dcp_attend_info info = DCP_ATTEND_INFO_INIT;
        dcp_attend_get_info(r->attend, &info);
        out->workspace_bytes = (int64_t)info.workspace_bytes;
        const double t0 = dcp__now_s();
        st = form == OOM_STREAMING ? run_streaming(r) : run_published(r);
        if (st == DCP_OK) st = finish(r, pss, dcp__now_s() - t0, out);
    } else if (st == DCP_ERR_NOMEM) {
        out->peak_counted = (int64_t)dcp__alloc_peak();
        out->pss_above = -1;
        r->is_agreed = false; /* a result; the next form is tried */
        st = largest(r, &out->peak_counted);
    }
    if (st == DCP_OK) st = dcp_group_barrier(r->g); /* nobody reads what is dropped now */
    drop_form(r);
    return st;
}

/* ---- a rank ---- */

static dcp_status take_base(struct rank_state *r)
{
    const struct attend_shape *s = &r->c->shape;
    const size_t rows = (size_t)(s->n_tokens * (r->heads.end - r->heads.begin));
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array(rows, (size_t)s->key_dim * sizeof(float), "own heads' q", &mem));
    r->q = mem;
    DCP_TRY(
        dcp__alloc_array(rows, (size_t)s->value_dim * sizeof(float), "own heads' result", &mem));
    r->result = mem;
    DCP_TRY(dcp__alloc_array(rows, sizeof(float), "own heads' LSE", &mem));
    r->lse = mem;
    DCP_TRY(dcp__alloc_array(attend_data_work(s), sizeof(double), "oracle", &mem));
    r->work = mem;
    DCP_TRY(attend_data_init(&r->data, s));
    attend_data_write_q(&r->data, r->heads, r->q);
    dcp_cache_desc desc = DCP_CACHE_DESC_INIT;
    desc.n_ranks = r->n;
    desc.rank = r->rank;
    desc.interleave = s->interleave;
    desc.n_layers = desc.n_kv_heads = 1;
    desc.key_dim = s->key_dim;
    desc.value_dim = s->value_dim;
    desc.latent = 1;
    desc.page_tokens = PAGE_TOKENS;
    desc.max_tokens = s->n_keys;
    DCP_TRY(dcp_cache_create(&desc, &r->cache));
    DCP_TRY(attend_data_store(&r->data, r->cache, 0, r->n, r->rank));
    return dcp_cache_view(r->cache, 0, 0, &r->view);
}

static dcp_status run_rank(struct rank_state *r, struct oom_report *report)
{
    struct oom_report mine;
    memset(&mine, 0, sizeof(mine));
    const dcp_status st = take_base(r);
    DCP_TRY(step(r, "q, result and keys of a rank", st, &mine.form[0]));
    mine.base_bytes = (int64_t)dcp__alloc_current();
    DCP_TRY(largest(r, &mine.base_bytes));
    for (int form = 0; form < OOM_FORMS; form++)
        DCP_TRY(run_form(r, (enum oom_form)form, &mine.form[form]));
    if (r->rank != 0) return DCP_OK;
    report->base_bytes = mine.base_bytes;
    memcpy(report->form, mine.form, sizeof(mine.form));
    return DCP_OK;
}

dcp_status oom_run(dcp_group *g, const struct oom_case *c, struct oom_report *report,
                   bool *is_agreed_out)
{
    struct rank_state r;
    char text[128] = "no cap";
    memset(&r, 0, sizeof(r));
    r.g = g;
    r.c = c;
    r.rank = dcp_group_rank(g);
    r.n = dcp_group_size(g);
    r.heads = dcp_cut_range(c->shape.n_heads, r.n, r.rank);
    void *mem = NULL;
    /* The group's memory: all ranks have it or none. */
    DCP_TRY(dcp_group_alloc(g, (size_t)r.n * (sizeof(*r.notes) + sizeof(*r.values)), &mem));
    r.values = mem;
    r.notes = (struct note *)(r.values + r.n);
    const bool has_cgroup = c->cap_bytes > 0 && oom_cgroup_enter(c->cap_bytes, text, sizeof(text));
    /* A limit from outside (DCP_ATTN_MEMORY_LIMIT) stands; the cap only lowers it. */
    const size_t limit_before = dcp__alloc_limit();
    if (c->cap_bytes > 0 && (limit_before == 0 || (size_t)c->cap_bytes < limit_before))
        dcp__alloc_set_limit((size_t)c->cap_bytes);
    if (r.rank == 0) {
        report->c = *c;
        report->n_ranks = r.n;
        snprintf(report->cap_text, sizeof(report->cap_text), "%s%s",
                 c->cap_bytes == 0 ? ""
                 : has_cgroup      ? "the counted allocator's limit within "
                                   : "the counted allocator's limit; ",
                 text);
    }
    dcp_status st = run_rank(&r, report);
    *is_agreed_out = r.is_agreed;
    if (r.is_agreed) st = r.own == DCP_OK ? DCP_OK : dcp__fail(r.own, "%s", r.notes[r.rank].text);
    drop_form(&r);
    dcp_cache_destroy(r.cache);
    attend_data_fini(&r.data);
    dcp__free(r.work);
    dcp__free(r.lse);
    dcp__free(r.result);
    dcp__free(r.q);
    dcp__alloc_set_limit(limit_before);
    if (has_cgroup) oom_cgroup_leave();
    /* Who fails alone must not wait for the others here: then it goes with the group. */
    if (st == DCP_OK || r.is_agreed) dcp_group_free(g, r.values);
    return st;
}
