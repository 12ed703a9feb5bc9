/* SPDX-License-Identifier: Apache-2.0 */
/* Every rank compares its own part, row by row; the worst of all is found by one exchange. Rank 0
 * then reads the partials of some rows, the worst among them, and tries the usual mistakes. */
#include "cli/merge_compare.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/compare_causes.h"
#include "cli/compare_place.h"
#include "cli/elements.h"
#include "cli/message.h"
#include "engine/safetensors_read.h"

enum { SAMPLED_ROWS = 48 };
/* Floats that the samples of all ranks may take together. */
static const int64_t most_sampled = (int64_t)64 << 20;

struct other_file {
    struct st_file *file;
    const struct st_tensor *out, *lse;
};

/* What a rank found in its part, as it travels. */
struct found {
    int64_t n_beyond, n_lse_beyond, n_nonfinite;
    struct compare_place out, lse;
    double score, lse_score;
};

/* ---- the other file ---- */

static dcp_status find_other(const struct compare_input *in, struct other_file *o)
{
    DCP_TRY(st_open(in->path, &o->file));
    DCP_TRY(st_need_floats(o->file, in->path, "out", 3, &o->out));
    const int64_t *d = o->out->dims;
    if (d[0] != in->n_tokens || d[1] != in->n_heads || d[2] != in->dim)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: out is [%lld,%lld,%lld], the merged result [%lld,%lld,%lld]",
                         in->path, (long long)d[0], (long long)d[1], (long long)d[2],
                         (long long)in->n_tokens, (long long)in->n_heads, (long long)in->dim);
    if (st_find(o->file, "lse") == NULL) return DCP_OK;
    DCP_TRY(st_need_floats(o->file, in->path, "lse", 2, &o->lse));
    if (o->lse->dims[0] != d[0] || o->lse->dims[1] != d[1])
        return dcp__fail(DCP_ERR_FORMAT, "%s: lse is [%lld,%lld], out has %lld tokens, %lld heads",
                         in->path, (long long)o->lse->dims[0], (long long)o->lse->dims[1],
                         (long long)d[0], (long long)d[1]);
    return DCP_OK;
}

static dcp_status open_other(const struct compare_input *in, struct other_file *o)
{
    const dcp_status st = find_other(in, o);
    return st == DCP_OK ? st : dcp__fail(st, "--compare: %s", dcp_last_error());
}

static double type_rtol(dcp_dtype type)
{
    /* f32: room for another order and another exp; else one unit in the last place. */
    return type == DCP_BF16 ? 0x1p-7 : type == DCP_F16 ? 0x1p-10 : 1e-5;
}

/* Of LSEs of that type: out may be of a coarser one. given: --rtol, < 0 for none. */
static double lse_rtol(dcp_dtype type, double given)
{
    return fmax(type_rtol(type), given);
}

static dcp_dtype coarser(dcp_dtype a, dcp_dtype b)
{
    return type_rtol(a) >= type_rtol(b) ? a : b;
}

/* ---- one part ---- */

/* Error in units of what is allowed; 0 for equal ones, NaN and infinities included. */
static double score_of(double here, double there, double allowed, double *error_out)
{
    *error_out = 0.0;
    if (here == there || (isnan(here) && isnan(there))) return 0.0;
    *error_out = fabs(here - there);
    if (!isfinite(*error_out)) return INFINITY;
    return *error_out / (allowed > 0 ? allowed : 1e-300);
}

static void see(double score, const struct compare_place *p, double *worst,
                struct compare_place *at)
{
    if (at->t >= 0 && score <= *worst) return;
    *worst = score;
    *at = *p;
}

static void compare_row(const struct compare_input *in, const struct compare_report *rep,
                        const float *there, int64_t row, int64_t t, int64_t h, struct found *f)
{
    double top = 0.0;
    for (int64_t d = 0; d < in->dim; d++) {
        const double x = fabs(element_get(in->dtype, in->merged, row * in->dim + d));
        if (isfinite(x)) top = fmax(top, x);
    }
    const double slack = rep->atol >= 0 ? rep->atol : rep->rtol * top;
    for (int64_t d = 0; d < in->dim; d++) {
        struct compare_place p = {.t = t, .h = h, .d = d};
        p.here = element_get(in->dtype, in->merged, row * in->dim + d);
        p.there = (double)there[d];
        p.allowed = slack + rep->rtol * (isfinite(p.here) ? fabs(p.here) : 0.0);
        const double score = score_of(p.here, p.there, p.allowed, &p.error);
        p.ulps = p.error / element_ulp(rep->type, p.there);
        if (score > 1.0) f->n_beyond++;
        if (!isfinite(p.error)) f->n_nonfinite++;
        see(score, &p, &f->score, &f->out);
    }
}

static void compare_lse(const struct compare_input *in, const struct other_file *o, float there,
                        int64_t row, int64_t t, int64_t h, struct found *f)
{
    struct compare_place p = {.t = t, .h = h, .d = -1};
    const dcp_dtype type = st_to_dcp(o->lse->dtype);
    p.here = (double)in->merged_lse[row];
    p.there = (double)there;
    p.allowed = lse_rtol(type, in->rtol) * fmax(1.0, isfinite(p.here) ? fabs(p.here) : 0.0);
    const double score = score_of(p.here, p.there, p.allowed, &p.error);
    p.ulps = p.error / element_ulp(type, p.there);
    if (score > 1.0) f->n_lse_beyond++;
    if (!isfinite(p.error)) f->n_nonfinite++;
    see(score, &p, &f->lse_score, &f->lse);
}

static dcp_status compare_part(dcp_group *g, const struct compare_input *in,
                               const struct other_file *o, const struct compare_report *rep,
                               struct found *f)
{
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    dcp_range ts = {0, in->n_tokens}, hs = {0, in->n_heads};
    if (in->cut == DCP_CUT_HEADS) hs = dcp_cut_range(in->n_heads, n, rank);
    if (in->cut == DCP_CUT_TOKENS) ts = dcp_cut_range(in->n_tokens, n, rank);
    const int64_t width = hs.end - hs.begin;
    void *mem = NULL;
    DCP_TRY(
        dcp__alloc_array((size_t)(width * (in->dim + 1)), sizeof(float), "rows to compare", &mem));
    float *there = mem;
    float *lses = there + width * in->dim;
    dcp_status st = DCP_OK;
    for (int64_t t = ts.begin; t < ts.end && width > 0 && st == DCP_OK; t++) {
        const int64_t first = t * in->n_heads + hs.begin;
        st = st_read_f32(o->file, o->out, first * in->dim, width * in->dim, there);
        if (st == DCP_OK && o->lse != NULL) st = st_read_f32(o->file, o->lse, first, width, lses);
        for (int64_t i = 0; i < width && st == DCP_OK; i++) {
            const int64_t row = (t - ts.begin) * width + i;
            compare_row(in, rep, there + i * in->dim, row, t, hs.begin + i, f);
            if (o->lse != NULL) compare_lse(in, o, lses[i], row, t, hs.begin + i, f);
        }
    }
    dcp__free(mem);
    return st;
}

/* ---- what rank 0 finds out ---- */

struct samples {
    struct cause_rows rows;
    int64_t t[SAMPLED_ROWS], h[SAMPLED_ROWS];
    float *payload, *lse, *other, *other_lse;
    int64_t *kv_len;
};

static void add_sample(struct samples *s, int64_t t, int64_t h)
{
    for (int i = 0; i < s->rows.n_rows; i++) {
        if (s->t[i] == t && s->h[i] == h) return;
    }
    if (t < 0 || s->rows.n_rows == SAMPLED_ROWS) return;
    s->t[s->rows.n_rows] = t;
    s->h[s->rows.n_rows++] = h;
}

static dcp_status read_partial(const struct compare_input *in, struct samples *s, int r)
{
    struct st_file *file = NULL;
    const struct st_tensor *t = NULL;
    const int64_t n_lse = in->n_tokens * in->n_heads;
    dcp_status st = st_open(in->files[r], &file);
    if (st == DCP_OK) st = st_need(file, in->files[r], "lse", 2, &t);
    if (st == DCP_OK) st = st_read_f32(file, t, 0, n_lse, s->lse + r * n_lse);
    if (st == DCP_OK) st = st_need(file, in->files[r], "out", 3, &t);
    for (int i = 0; st == DCP_OK && i < s->rows.n_rows; i++)
        st = st_read_f32(file, t, (s->t[i] * in->n_heads + s->h[i]) * in->dim, in->dim,
                         s->payload + ((int64_t)r * s->rows.n_rows + i) * in->dim);
    if (st == DCP_OK && s->kv_len != NULL) {
        st = st_need(file, in->files[r], "kv_len", 1, &t);
        if (st == DCP_OK) st = st_read_i64(file, t, 0, in->n_tokens, s->kv_len + r * in->n_tokens);
    }
    st_close(file);
    return st;
}

static dcp_status has_kv_len(const char *path, bool *has_out)
{
    struct st_file *file = NULL;
    DCP_TRY(st_open(path, &file));
    *has_out = st_find(file, "kv_len") != NULL;
    st_close(file);
    return DCP_OK;
}

static dcp_status take_samples(const struct compare_input *in, const struct other_file *o, int n,
                               struct samples *s)
{
    struct cause_rows *c = &s->rows;
    const size_t n_lse = (size_t)(in->n_tokens * in->n_heads);
    void *mem = NULL;
    bool has_len = false;
    DCP_TRY(has_kv_len(in->files[0], &has_len));
    DCP_TRY(dcp__alloc_array((size_t)(n * c->n_rows), (size_t)in->dim * sizeof(float),
                             "rows of partials", &mem));
    s->payload = mem;
    DCP_TRY(dcp__alloc_array((size_t)n * n_lse, sizeof(float), "LSEs of all ranks", &mem));
    s->lse = mem;
    if (has_len) {
        DCP_TRY(dcp__alloc_array((size_t)n * (size_t)in->n_tokens, sizeof(int64_t),
                                 "kv_len of all ranks", &mem));
        s->kv_len = mem;
    }
    DCP_TRY(dcp__alloc_array((size_t)c->n_rows, (size_t)in->dim * sizeof(float), "rows to explain",
                             &mem));
    s->other = mem;
    DCP_TRY(dcp__alloc_array((size_t)c->n_rows, (size_t)in->dim * sizeof(double), "rows recomputed",
                             &mem));
    c->work = mem;
    if (o->lse != NULL) {
        DCP_TRY(dcp__alloc_array((size_t)c->n_rows, sizeof(float), "LSEs to explain", &mem));
        s->other_lse = mem;
    }
    for (int r = 0; r < n; r++) DCP_TRY(read_partial(in, s, r));
    for (int i = 0; i < c->n_rows; i++)
        DCP_TRY(st_read_f32(o->file, o->out, (s->t[i] * in->n_heads + s->h[i]) * in->dim, in->dim,
                            s->other + (int64_t)i * in->dim));
    for (int i = 0; i < c->n_rows && o->lse != NULL; i++)
        DCP_TRY(st_read_f32(o->file, o->lse, s->t[i] * in->n_heads + s->h[i], 1, s->other_lse + i));
    c->payload = s->payload;
    c->lse = s->lse;
    c->kv_len = s->kv_len;
    c->other = s->other;
    c->other_lse = s->other_lse;
    c->t = s->t;
    c->h = s->h;
    return DCP_OK;
}

static void give_back(struct samples *s)
{
    dcp__free(s->payload);
    dcp__free(s->lse);
    dcp__free(s->other);
    dcp__free(s->other_lse);
    dcp__free(s->kv_len);
    dcp__free(s->rows.work);
}

__attribute__((format(printf, 2, 3))) static void guess(struct compare_report *rep, const char *fmt,
                                                        ...)
{
    if (rep->n_guesses == COMPARE_MAX_GUESSES) return;
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(rep->guesses[rep->n_guesses++], COMPARE_TEXT_BYTES, fmt, args);
    va_end(args);
}

static void say(struct compare_report *rep, const struct compare_input *in, enum cause_kind kind,
                int a, int b)
{
    switch (kind) {
    case CAUSE_BASE:
        guess(rep, "the other result read the LSEs in base %s; this run was told base %s",
              in->base == DCP_LSE_BASE_2 ? "e" : "2", in->base == DCP_LSE_BASE_2 ? "2" : "e");
        break;
    case CAUSE_TRANSPOSED:
        guess(rep, "the other result read the LSEs transposed: [H,T] for [T,H]");
        break;
    case CAUSE_EMPTY_IS_ZERO:
        guess(rep, "the other result took the LSE of empty shards as 0 instead of -inf");
        break;
    case CAUSE_ZERO_IS_EMPTY:
        guess(rep, "empty shards were left with an LSE of 0, which counts here: give kv_len, or "
                   "-inf as the LSE");
        break;
    case CAUSE_KV_LEN_IGNORED:
        guess(rep, "the other result did not look at kv_len");
        break;
    case CAUSE_TWICE:
        guess(rep, "the other result counts rank %d (%s) twice", a, in->files[a]);
        break;
    case CAUSE_MISSING:
        guess(rep, "the other result is without rank %d (%s)", a, in->files[a]);
        break;
    case CAUSE_REPLACED:
        guess(rep, "the other result has rank %d's file in the place of rank %d's", a, b);
        break;
    case CAUSE_ONE_PARTIAL:
        guess(rep, "the other result is rank %d's partial (%s) alone: nothing was merged", a,
              in->files[a]);
        break;
    case CAUSE_PLAIN_SUM:
        guess(rep, "the other result is the plain sum of the partials: no weights");
        break;
    case CAUSE_NO_WEIGHTS:
        guess(rep, "the other result is the plain mean of the ranks: no weights");
        break;
    case CAUSE_NOT_NORMALISED:
        guess(rep, "the other result has weights exp(lse) that were not divided by their sum");
        break;
    case CAUSE_SINK_MISSING:
        guess(rep, "the other result is without the sink");
        break;
    case CAUSE_SINK_EACH:
        guess(rep, "the other result applied the sink once per rank instead of once");
        break;
    case CAUSE_LSE_BF16:
        guess(rep, "the other result rounded the LSEs to bf16");
        break;
    case CAUSE_PAYLOAD_BF16:
        guess(rep, "the other result rounded the partials to bf16");
        break;
    case CAUSE_RESULT_BF16:
        guess(rep, "the other result was rounded to bf16");
        break;
    case CAUSE_LSE_OUT_BASE:
        if (in->base == DCP_LSE_BASE_2)
            guess(rep, "the other result's LSEs are in base e (those of base 2 times ln 2); this "
                       "run was told base 2 and writes base 2");
        else
            guess(rep, "the other result's LSEs are in base 2 (those of base e divided by ln 2); "
                       "this run was told base e and writes base e");
        break;
    case CAUSE_NONE:
    case CAUSE_COUNT:
        break;
    }
}

/* Files that hold the same LSEs and the same sampled rows are one file given twice. */
static void look_for_doubles(const struct compare_input *in, const struct samples *s,
                             struct compare_report *rep)
{
    const int64_t n_lse = in->n_tokens * in->n_heads, n_rows = s->rows.n_rows * in->dim;
    for (int a = 0; a < s->rows.n_ranks; a++) {
        for (int b = a + 1; b < s->rows.n_ranks; b++) {
            if (memcmp(s->lse + a * n_lse, s->lse + b * n_lse, (size_t)n_lse * sizeof(float)) ==
                    0 &&
                memcmp(s->payload + a * n_rows, s->payload + b * n_rows,
                       (size_t)n_rows * sizeof(float)) == 0)
                guess(rep, "ranks %d and %d hold the same partial: one file twice?", a, b);
        }
    }
}

/* This run is at fault only in what differs and is, in double, the other's: half a distance is all
 * that a right result may differ by. True if nothing is left to explain. */
static bool is_own_fault(const struct compare_input *in, const struct samples *s,
                         struct compare_report *rep, bool *out_is_told)
{
    const struct cause_distance d = cause_distance(&s->rows, CAUSE_NONE, 0, 0);
    const bool out_differs = rep->n_beyond > 0, lse_differs = rep->n_lse_beyond > 0;
    const bool is_out = out_differs && d.out <= 0.5, is_lse = lse_differs && d.lse <= 0.5;
    if (is_out && coarser(rep->type, in->wire) != rep->type)
        guess(rep, "messages in %s, which round more than --rtol allows (--wire-dtype)",
              dcp_dtype_name(in->wire));
    else if (is_out || is_lse)
        guess(rep, "in double, merging these files gives the other result%s: a fault of this run",
              is_out == out_differs && is_lse == lse_differs ? ""
              : is_out                                       ? "'s out"
                                                             : "'s LSEs");
    *out_is_told = is_out || !out_differs;
    return is_out == out_differs && is_lse == lse_differs;
}

/* Causes that give both out and LSE, or, with out_alone, those that give out alone. */
static void say_causes(const struct compare_input *in, const struct samples *s,
                       struct compare_report *rep, bool out_alone)
{
    const int n = s->rows.n_ranks;
    for (int kind = CAUSE_NONE + 1; kind < CAUSE_COUNT; kind++) {
        const enum cause_kind k = (enum cause_kind)kind;
        if (!cause_applies(&s->rows, k)) continue;
        const bool has_a =
            k == CAUSE_TWICE || k == CAUSE_MISSING || k == CAUSE_REPLACED || k == CAUSE_ONE_PARTIAL;
        for (int a = 0; a < (has_a ? n : 1); a++) {
            for (int b = 0; b < (k == CAUSE_REPLACED ? n : 1); b++) {
                if (k == CAUSE_REPLACED && a == b) continue;
                const struct cause_distance d = cause_distance(&s->rows, k, a, b);
                if (d.out <= 1.0 && (out_alone || d.lse <= 1.0)) say(rep, in, k, a, b);
            }
        }
    }
}

struct reader {
    const struct compare_input *in;
    const struct other_file *o;
};

static dcp_status read_other_row(void *ctx, int64_t t, int64_t h, float *to)
{
    const struct reader *r = ctx;
    return st_read_f32(r->o->file, r->o->out, (t * r->in->n_heads + h) * r->in->dim, r->in->dim,
                       to);
}

/* Rows elsewhere, or all of them smaller. */
static dcp_status say_places(const struct compare_input *in, const struct other_file *o,
                             const struct samples *s, struct compare_report *rep)
{
    void *row = NULL;
    struct reader reader = {in, o};
    DCP_TRY(dcp__alloc_array((size_t)in->dim, sizeof(float), "a row to look for", &row));
    for (int of_heads = 1; of_heads >= 0; of_heads--) {
        struct compare_shift shift;
        const dcp_status st =
            compare_find_shift(&s->rows, of_heads != 0, read_other_row, &reader, row, &shift);
        if (st != DCP_OK) {
            dcp__free(row);
            return st;
        }
        const char *const what = of_heads != 0 ? "head" : "token";
        if (shift.by != 0)
            guess(rep, "the other result has %ss %s by %lld: the row of %s i is at %s i%+lld", what,
                  shift.rotates ? "rotated" : "shifted", llabs((long long)shift.by), what, what,
                  (long long)shift.by);
    }
    dcp__free(row);
    int64_t head = 0;
    double sink = 0.0;
    if (compare_finds_sink(&s->rows, &head, &sink))
        guess(rep,
              "the other result has a sink that this run was not given (--sink; that of head %lld "
              "is about %.4g)",
              (long long)head, sink);
    return DCP_OK;
}

static dcp_status try_causes(const struct compare_input *in, const struct other_file *o,
                             const struct samples *s, struct compare_report *rep)
{
    bool out_is_told = false;
    if (is_own_fault(in, s, rep, &out_is_told)) return DCP_OK;
    const int n_before = rep->n_guesses;
    say_causes(in, s, rep, false);
    /* Its LSEs may be wrong in a way of their own; where out agrees, they are what must be told. */
    if (rep->n_guesses == n_before && !out_is_told) say_causes(in, s, rep, true);
    if (rep->n_guesses > n_before || out_is_told) return DCP_OK;
    return say_places(in, o, s, rep);
}

/* Rank 0 alone. Only the files it can read help; without them there are no weights and guesses. */
static dcp_status diagnose(const struct compare_input *in, const struct other_file *o, int n,
                           const struct found *all, struct compare_report *rep)
{
    struct samples s;
    memset(&s, 0, sizeof(s));
    s.rows.n_ranks = n;
    s.rows.n_tokens = in->n_tokens;
    s.rows.n_heads = in->n_heads;
    s.rows.dim = in->dim;
    s.rows.base = in->base;
    s.rows.sink = in->sink;
    s.rows.type = rep->type;
    s.rows.rtol = rep->rtol;
    s.rows.atol = rep->atol;
    if (o->lse != NULL) s.rows.lse_rtol = lse_rtol(st_to_dcp(o->lse->dtype), in->rtol);
    add_sample(&s, rep->out.t, rep->out.h);
    add_sample(&s, rep->lse.t, rep->lse.h);
    for (int r = 0; r < n && s.rows.n_rows < SAMPLED_ROWS / 2; r++) {
        add_sample(&s, all[r].out.t, all[r].out.h);
        add_sample(&s, all[r].lse.t, all[r].lse.h);
    }
    const int64_t n_all = in->n_tokens * in->n_heads;
    if (n_all == 0) return DCP_OK; /* no row to look at */
    int64_t most = most_sampled / (n * (in->dim > 0 ? in->dim : 1)) + 1;
    if (most > SAMPLED_ROWS) most = SAMPLED_ROWS;
    for (int64_t i = 0; i < most && s.rows.n_rows < most; i++) {
        const int64_t row = i * n_all / most;
        add_sample(&s, row / in->n_heads, row % in->n_heads);
    }
    if (s.rows.n_rows == 0) return DCP_OK;
    dcp_status st = take_samples(in, o, n, &s);
    if (st == DCP_OK && n <= COMPARE_MAX_WEIGHTS) {
        const bool is_lse = rep->n_beyond == 0 && rep->n_lse_beyond > 0;
        const struct compare_place *const worst = is_lse ? &rep->lse : &rep->out;
        rep->n_weights = n;
        rep->weights_t = worst->t;
        rep->weights_h = worst->h;
        cause_weights(&s.rows, worst->t, worst->h, rep->weights);
        for (int r = 0; r < n; r++)
            rep->lses[r] = (double)s.lse[r * n_all + worst->t * in->n_heads + worst->h];
    }
    if (st == DCP_OK && !rep->is_within) {
        look_for_doubles(in, &s, rep);
        st = try_causes(in, o, &s, rep);
    }
    give_back(&s);
    return st;
}

int merge_compare(dcp_group *g, const struct compare_input *in, struct compare_report *rep)
{
    const int n = dcp_group_size(g);
    struct other_file o = {0};
    memset(rep, 0, sizeof(*rep));
    rep->path = in->path;
    dcp_status st = open_other(in, &o);
    if (!all_ranks_ok(g, st)) {
        st_close(o.file);
        return EXIT_FAILED;
    }
    rep->type = coarser(in->dtype, st_to_dcp(o.out->dtype));
    if (rep->type == DCP_DTYPE_DEFAULT) rep->type = DCP_F32; /* a file of F64 */
    rep->rtol = in->rtol >= 0 ? in->rtol : type_rtol(coarser(rep->type, in->wire));
    rep->atol = in->atol;
    rep->has_lse = o.lse != NULL;
    struct found own;
    memset(&own, 0, sizeof(own));
    own.out.t = own.lse.t = -1;
    struct found *all = NULL;
    st = compare_part(g, in, &o, rep, &own);
    if (st == DCP_OK)
        st = dcp__alloc_array((size_t)n, sizeof(*all), "what ranks found", (void **)&all);
    int rc = all_ranks_ok(g, st) ? EXIT_DONE : EXIT_FAILED;
    if (rc == EXIT_DONE) {
        st = dcp_group_allgather(g, &own, sizeof(own), all);
        if (st != DCP_OK) rc = rank_failed(g, st);
    }
    if (rc == EXIT_DONE) {
        double score = 0.0, lse_score = 0.0;
        rep->out.t = rep->lse.t = -1;
        for (int r = 0; r < n; r++) {
            rep->n_beyond += all[r].n_beyond;
            rep->n_lse_beyond += all[r].n_lse_beyond;
            rep->n_nonfinite += all[r].n_nonfinite;
            if (all[r].out.t >= 0) see(all[r].score, &all[r].out, &score, &rep->out);
            if (all[r].lse.t >= 0) see(all[r].lse_score, &all[r].lse, &lse_score, &rep->lse);
        }
        rep->is_within = rep->n_beyond == 0 && rep->n_lse_beyond == 0;
        st = dcp_group_rank(g) == 0 ? diagnose(in, &o, n, all, rep) : DCP_OK;
        if (!all_ranks_ok(g, st)) rc = EXIT_FAILED;
    }
    dcp__free(all);
    st_close(o.file);
    return rc;
}

/* ---- telling ---- */

static void print_place(const char *what, const struct compare_place *p, dcp_dtype type, FILE *to)
{
    char where[96];
    if (p->d >= 0)
        snprintf(where, sizeof(where), "token %lld, head %lld, dim %lld", (long long)p->t,
                 (long long)p->h, (long long)p->d);
    else
        snprintf(where, sizeof(where), "token %lld, head %lld", (long long)p->t, (long long)p->h);
    fprintf(to, "%s: worst at %s: %.9g here, %.9g there; ", what, where, p->here, p->there);
    if (isfinite(p->error)) {
        char ulps[32];
        snprintf(ulps, sizeof(ulps), "%.3g", p->ulps);
        fprintf(to, "off by %.3g: %s ULP%s of %s", p->error, ulps,
                strcmp(ulps, "1") == 0 ? "" : "s", dcp_dtype_name(type));
        if (p->there != 0) fprintf(to, ", relative %.3g", p->error / fabs(p->there));
        fprintf(to, "; %.3g allowed\n", p->allowed);
    } else {
        fprintf(to, "%s\n",
                isnan(p->there)      ? "NaN there alone"
                : isnan(p->here)     ? "NaN here alone"
                : isfinite(p->here)  ? "infinite there, finite here"
                : isfinite(p->there) ? "infinite here, finite there"
                                     : "infinite in both, with other signs");
    }
}

void compare_print(const struct compare_report *r, FILE *to)
{
    fprintf(to, "%s %s\n", r->path, r->is_within ? "agrees" : "DIFFERS");
    if (r->out.t >= 0) print_place("out", &r->out, r->type, to);
    if (r->has_lse && r->lse.t >= 0) print_place("lse", &r->lse, DCP_F32, to);
    if (!r->has_lse) fprintf(to, "lse: %s has none: not compared\n", r->path);
    if (!r->is_within)
        fprintf(to, "%lld value%s and %lld LSE%s beyond the tolerance\n", (long long)r->n_beyond,
                message_s(r->n_beyond), (long long)r->n_lse_beyond, message_s(r->n_lse_beyond));
    if (r->n_nonfinite > 0)
        fprintf(to, "%lld of them NaN or infinite in one result and not in the other\n",
                (long long)r->n_nonfinite);
    for (int i = 0; i < r->n_weights; i++)
        fprintf(to, "at token %lld, head %lld rank %d has weight %.6g (lse %.9g)\n",
                (long long)r->weights_t, (long long)r->weights_h, i, r->weights[i], r->lses[i]);
    for (int i = 0; i < r->n_guesses; i++) fprintf(to, "likely: %s\n", r->guesses[i]);
    if (!r->is_within && r->n_guesses == 0)
        fprintf(to, "none of the usual causes gives these numbers\n");
}

static void json_place(const struct compare_place *p, struct json_out *j, const char *key)
{
    jout_object(j, key);
    jout_int(j, "token", p->t);
    jout_int(j, "head", p->h);
    if (p->d >= 0) jout_int(j, "dim", p->d);
    jout_num(j, "here", p->here);
    jout_num(j, "there", p->there);
    jout_num(j, "error", p->error);
    jout_num(j, "ulps", p->ulps);
    jout_num(j, "relative", p->there != 0 ? p->error / fabs(p->there) : (double)NAN);
    jout_num(j, "allowed", p->allowed);
    jout_object_end(j);
}

void compare_json(const struct compare_report *r, struct json_out *j, const char *key)
{
    jout_object(j, key);
    jout_str(j, "file", r->path);
    jout_bool(j, "within", r->is_within);
    jout_num(j, "rtol", r->rtol);
    jout_num(j, "atol", r->atol >= 0 ? r->atol : (double)NAN);
    jout_int(j, "beyond", r->n_beyond);
    jout_int(j, "lse_beyond", r->n_lse_beyond);
    jout_int(j, "nonfinite", r->n_nonfinite);
    jout_bool(j, "lse_compared", r->has_lse);
    if (r->out.t >= 0) json_place(&r->out, j, "out");
    if (r->has_lse && r->lse.t >= 0) json_place(&r->lse, j, "lse");
    if (r->n_weights > 0) {
        jout_object(j, "weights_at");
        jout_int(j, "token", r->weights_t);
        jout_int(j, "head", r->weights_h);
        jout_object_end(j);
    }
    jout_array(j, "weights");
    for (int i = 0; i < r->n_weights; i++) jout_num(j, NULL, r->weights[i]);
    jout_array_end(j);
    jout_array(j, "lses");
    for (int i = 0; i < r->n_weights; i++) jout_num(j, NULL, r->lses[i]);
    jout_array_end(j);
    jout_array(j, "guesses");
    for (int i = 0; i < r->n_guesses; i++) jout_str(j, NULL, r->guesses[i]);
    jout_array_end(j);
    jout_object_end(j);
}
