/* SPDX-License-Identifier: Apache-2.0 */
/* A sequence on a model on a group. Everything local that can fail is done before the ranks agree
 * that all went well; collective work starts only then. Once a step's work has begun, a rank that
 * cannot go on aborts the group, so that no peer waits for its deadline. */
#include "engine/session.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/fault_priv.h"
#include "base/status_priv.h"
#include "engine/forward.h"

enum {
    DEFAULT_CHUNK = 512,
    /* Logits of several rows at a time (perplexity) take at most this much. */
    LOGITS_TILE_BYTES = 32 << 20
};

/* What ranks agree on, and how a value is spelt where they do not. */
enum kind { KIND_COUNT, KIND_FLAG, KIND_TYPE, KIND_ALGO, KIND_COMPUTE, KIND_MLA };
static const struct {
    const char *name;
    enum kind kind;
} agreed[] = {{"tokens", KIND_COUNT},         {"tokens before", KIND_COUNT},
              {"hash of ids", KIND_COUNT},    {"logits of all tokens", KIND_FLAG},
              {"context", KIND_COUNT},        {"chunk", KIND_COUNT},
              {"interleave", KIND_COUNT},     {"KV type", KIND_TYPE},
              {"algorithm", KIND_ALGO},       {"compute type", KIND_COMPUTE},
              {"layers", KIND_COUNT},         {"width", KIND_COUNT},
              {"vocabulary", KIND_COUNT},     {"form of MLA", KIND_MLA},
              {"rows of a tile", KIND_COUNT}, {"head groups (tp)", KIND_COUNT}};
enum { N_AGREED = sizeof(agreed) / sizeof(agreed[0]), WHY_BYTES = 144, VALUE_BYTES = 24 };

/* What each rank tells the others before they start something together. */
struct record {
    int64_t status;
    int64_t field[N_AGREED];
    char why[WHY_BYTES];
};

struct session {
    dcp_group *group;
    struct model *model;
    struct session_opts opts; /* defaults filled in */
    struct forward f;
    struct record *records; /* [N] */
    size_t attend_bytes;
    double total_s;
};

/* --- agreement --- */

/* The value as a caller knows it; in buf where it is a number. */
static const char *value_text(enum kind kind, int64_t x, char *buf)
{
    static const char *const computes[] = {
        [COMPUTE_DEFAULT] = "auto", [COMPUTE_F32] = "f32", [COMPUTE_BF16] = "bf16"};
    static const char *const forms[N_MLA_FORMS] = {
        [MLA_ABSORBED] = "absorbed", [MLA_PROJECTED] = "projected", [MLA_EXPANDED] = "expanded"};
    if (kind == KIND_TYPE) return dcp_dtype_name((dcp_dtype)x);
    if (kind == KIND_ALGO) return dcp_merge_algo_name((dcp_merge_algo)x);
    if (kind == KIND_FLAG) return x != 0 ? "yes" : "no";
    if (kind == KIND_COMPUTE && x >= 0 && x <= COMPUTE_BF16) return computes[x];
    if (kind == KIND_MLA && x >= 0 && x < N_MLA_FORMS) return forms[x];
    snprintf(buf, VALUE_BYTES, "%lld", (long long)x);
    return buf;
}

/* Collective: all ranks go on, or all fail: by the own failure, else the first peer's, else by the
 * first field in which a rank differs from rank 0. */
static dcp_status agree(const struct session *s, const char *call, dcp_status mine,
                        struct record *record)
{
    const int n = dcp_group_size(s->group);
    const struct record *all = s->records;
    record->status = mine;
    snprintf(record->why, sizeof(record->why), "%s", mine == DCP_OK ? "" : dcp_last_error());
    DCP_TRY(dcp_group_allgather(s->group, record, sizeof(*record), s->records));
    if (mine != DCP_OK) return mine; /* its text is still this thread's last error */
    for (int r = 0; r < n; r++)
        if (all[r].status != DCP_OK)
            return dcp__fail((dcp_status)all[r].status, "%s: rank %d: %.*s", call, r, WHY_BYTES - 1,
                             all[r].why);
    char text[2][VALUE_BYTES];
    for (int r = 1; r < n; r++)
        for (int i = 0; i < N_AGREED; i++)
            if (all[r].field[i] != all[0].field[i])
                return dcp__fail(DCP_ERR_MISMATCH, "%s: %s is %s on rank 0 and %s on rank %d", call,
                                 agreed[i].name,
                                 value_text(agreed[i].kind, all[0].field[i], text[0]),
                                 value_text(agreed[i].kind, all[r].field[i], text[1]), r);
    return DCP_OK;
}

/* --- create --- */

/* Collective: ranks that share this host, by its name. */
static dcp_status ranks_of_host(dcp_group *g, int *n_out)
{
    enum { NAME_BYTES = 64 };
    const int n = dcp_group_size(g);
    char mine[NAME_BYTES] = "";
    gethostname(mine, sizeof(mine) - 1);
    void *all = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n, NAME_BYTES, "host names", &all));
    const dcp_status st = dcp_group_allgather(g, mine, NAME_BYTES, all);
    *n_out = 0;
    for (int r = 0; r < n; r++)
        *n_out += memcmp((const char *)all + r * NAME_BYTES, mine, NAME_BYTES) == 0 ? 1 : 0;
    dcp__free(all);
    return st;
}

static dcp_status check_opts(const struct session_opts *o)
{
    if (o->n_threads < 0 || o->n_threads > 4096)
        return dcp__fail(DCP_ERR_ARG, "threads per rank: %d, allowed are 0 (automatic) to 4096",
                         o->n_threads);
    if (o->context < 0 || o->context > INT64_C(1) << 40)
        return dcp__fail(DCP_ERR_ARG, "context: %lld tokens, allowed are 0 (the model's) to 2^40",
                         (long long)o->context);
    if (o->chunk < 0 || o->chunk > 1 << 20)
        return dcp__fail(DCP_ERR_ARG, "chunk: %lld tokens, allowed are 0 (%d) to 2^20",
                         (long long)o->chunk, DEFAULT_CHUNK);
    if (o->tp < 0)
        return dcp__fail(DCP_ERR_ARG, "tp: %d head groups, allowed are 0 (1) and more", o->tp);
    if ((int)o->mla < 0 || o->mla >= N_MLA_FORMS)
        return dcp__fail(DCP_ERR_ARG,
                         "form of MLA: %d, known are 0 (absorbed), 1 (projected) and 2 (expanded)",
                         (int)o->mla);
    if (o->tile_rows < 0)
        return dcp__fail(DCP_ERR_ARG, "rows of a tile: %lld, allowed are 0 (%d) and more",
                         (long long)o->tile_rows, (int)FORWARD_TILE_ROWS);
    if (o->interleave < 0 || o->interleave > 1 << 30)
        return dcp__fail(DCP_ERR_ARG, "interleave: %lld tokens, allowed are 0 (1) to 2^30",
                         (long long)o->interleave);
    return DCP_OK;
}

static dcp_status create_cache(struct session *s)
{
    const struct model_config *c = &s->model->cfg;
    dcp_cache_desc desc = DCP_CACHE_DESC_INIT;
    desc.n_ranks = s->model->kv_ranks;
    desc.rank = s->model->kv_rank;
    desc.interleave = s->opts.interleave;
    desc.n_layers = c->n_layers;
    desc.n_kv_heads = s->model->kv_heads.end - s->model->kv_heads.begin;
    desc.key_dim = c->key_dim;
    desc.value_dim = c->value_dim;
    desc.latent = model_is_latent(c);
    desc.dtype = s->opts.kv_dtype;
    desc.max_tokens = s->opts.context;
    return dcp_cache_create(&desc, &s->f.cache);
}

/* Everything that does not need the peers. n_host: ranks of this host. */
static dcp_status create_local(struct session *s, const struct gguf *file, int n_host)
{
    const int usable = dcp__cpu_usable() / n_host, n_threads = usable > 1 ? usable : 1;
    const int n_ranks = dcp_group_size(s->group), rank = dcp_group_rank(s->group);
    struct session_opts *o = &s->opts;
    DCP_TRY(check_opts(o));
    if (o->tp == 0) o->tp = 1;
    if (o->n_threads == 0) o->n_threads = n_threads;
    DCP_TRY(dcp_pool_create(o->n_threads, n_host, &s->f.pool));
    /* Before anything is touched: memory lies where its first user runs. */
    if (o->n_cpus > 0) DCP_TRY(dcp_pool_bind(s->f.pool, o->cpus, o->n_cpus));
    DCP_TRY(model_load_tp(file, n_ranks, rank, o->mla, o->tp, &s->model));
    const struct model_config *c = &s->model->cfg;
    if (o->context == 0) o->context = c->context;
    if (o->chunk == 0) o->chunk = DEFAULT_CHUNK;
    if (o->chunk > o->context) o->chunk = o->context;
    if (o->tile_rows == 0) o->tile_rows = FORWARD_TILE_ROWS;
    if (o->tile_rows > o->chunk) o->tile_rows = o->chunk;
    if (o->interleave == 0) o->interleave = 1;
    if (o->kv_dtype == DCP_DTYPE_DEFAULT) o->kv_dtype = DCP_BF16;
    DCP_TRY(dcp__isa_choose(o->isa, &o->isa));

    struct forward *f = &s->f;
    f->model = s->model;
    f->interleave = o->interleave;
    f->max_tokens = o->chunk;
    f->tile_rows = o->tile_rows;
    int64_t ks[LINEAR_MAX_KS];
    const int n_ks = model_product_ks(c, ks);
    DCP_TRY(linear_create(f->pool, o->compute, o->isa, o->tile_rows, ks, n_ks, &f->linear));
    DCP_TRY(create_cache(s));
    return forward_init_own(f);
}

static dcp_status create_attend(struct session *s)
{
    const struct model_config *c = &s->model->cfg;
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = s->opts.chunk;
    desc.n_heads = c->n_heads;
    desc.n_kv_heads = c->n_kv_heads;
    desc.key_dim = c->key_dim;
    desc.value_dim = c->value_dim;
    desc.scale = c->attn_scale;
    desc.softcap = c->attn_softcap;
    desc.causal = 1;
    if (model_is_latent(c) && c->mla.form == MLA_PROJECTED) desc.project_dim = c->out_dim;
    desc.interleave = s->opts.interleave;
    desc.n_threads = s->opts.n_threads;
    desc.algo = s->opts.algo;
    desc.workspace_limit_bytes = s->opts.attend_workspace_bytes;
    desc.pool = s->f.pool;
    desc.tp = s->opts.tp;
    DCP_TRY(dcp_attend_create(s->group, &desc, &s->f.attend));
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(s->f.attend, &info);
    s->attend_bytes = info.workspace_bytes;
    return DCP_OK;
}

static dcp_status create(struct session *s, const struct gguf *file)
{
    int n_host = 1;
    DCP_TRY(ranks_of_host(s->group, &n_host));
    dcp__fault_pass("start", dcp_group_rank(s->group), dcp_group_deadline(s->group) * 1.5 + 0.25);
    const dcp_status st = create_local(s, file, n_host);
    struct record mine;
    memset(&mine, 0, sizeof(mine));
    if (st == DCP_OK) {
        const struct model_config *c = &s->model->cfg;
        const int64_t fields[] = {0,
                                  0,
                                  0,
                                  0,
                                  s->opts.context,
                                  s->opts.chunk,
                                  s->opts.interleave,
                                  s->opts.kv_dtype,
                                  s->opts.algo,
                                  linear_compute(s->f.linear),
                                  c->n_layers,
                                  c->d_model,
                                  c->vocab,
                                  c->mla.form,
                                  s->opts.tile_rows,
                                  s->opts.tp};
        memcpy(mine.field, fields, sizeof(fields));
    }
    DCP_TRY(agree(s, "session", st, &mine));
    DCP_TRY(create_attend(s));
    return forward_init_group(&s->f);
}

dcp_status session_create(dcp_group *g, const struct gguf *file, const struct session_opts *opts,
                          struct session **out)
{
    if (g == NULL || file == NULL || opts == NULL || out == NULL)
        return dcp__fail(DCP_ERR_ARG, "session_create: group, file, options or out is NULL");
    void *p = NULL;
    const dcp_status got = dcp__alloc(sizeof(struct session), "session", &p);
    if (got != DCP_OK) {
        dcp_group_abort(g, "out of memory for a session");
        return got;
    }
    struct session *s = p;
    s->group = g;
    s->f.group = g;
    s->opts = *opts;
    dcp_status st =
        dcp__alloc_array((size_t)dcp_group_size(g), sizeof(struct record), "agreement records", &p);
    if (st == DCP_OK) {
        s->records = p;
        st = create(s, file);
    } else {
        dcp_group_abort(g, "out of memory for the agreement records");
    }
    if (st != DCP_OK) {
        session_destroy(s);
        return st;
    }
    *out = s;
    return DCP_OK;
}

void session_destroy(struct session *s)
{
    if (s == NULL) return;
    forward_fini(&s->f);
    dcp_attend_destroy(s->f.attend);
    dcp_cache_destroy(s->f.cache);
    linear_destroy(s->f.linear);
    dcp_pool_destroy(s->f.pool);
    model_free(s->model);
    dcp__free(s->records);
    dcp__free(s);
}

/* --- steps --- */

/* Local checks of a step, before any work. */
static dcp_status check_step(const struct session *s, const int32_t *ids, int64_t n_ids)
{
    const int64_t length = session_length(s), vocab = s->model->cfg.vocab;
    if (n_ids < 1 || ids == NULL)
        return dcp__fail(DCP_ERR_ARG, "a step of %lld tokens; at least 1 is needed",
                         (long long)n_ids);
    if (n_ids > s->opts.context - length)
        return dcp__fail(DCP_ERR_ARG,
                         "%lld tokens after %lld in the cache do not fit the context of %lld",
                         (long long)n_ids, (long long)length, (long long)s->opts.context);
    for (int64_t i = 0; i < n_ids; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return dcp__fail(DCP_ERR_ARG, "token %lld has id %d; the vocabulary has %lld",
                             (long long)i, ids[i], (long long)vocab);
    return DCP_OK;
}

static int64_t hash_ids(const int32_t *ids, int64_t n)
{
    uint64_t h = UINT64_C(14695981039346656037); /* FNV-1a over words */
    for (int64_t i = 0; i < n; i++) h = (h ^ (uint32_t)ids[i]) * UINT64_C(1099511628211);
    return (int64_t)(h >> 1);
}

/* Rows of logits at a time when all are wanted. */
static int64_t logit_tile(const struct session *s)
{
    const int64_t rows = LOGITS_TILE_BYTES / (s->model->cfg.vocab * (int64_t)sizeof(float));
    if (rows > s->f.tile_rows) return s->f.tile_rows;
    return rows > 1 ? rows : 1;
}

/* Logits of every row of the chunk of n tokens to on_logits, first being the index of its first. */
static dcp_status all_logits(struct session *s, int64_t first, int64_t n,
                             session_logits_fn *on_logits, void *ctx)
{
    struct forward *f = &s->f;
    for (int64_t at = 0; at < n; at += f->logit_rows) {
        const int64_t rows = n - at < f->logit_rows ? n - at : f->logit_rows;
        DCP_TRY(forward_logits(f, at, rows));
        for (int64_t i = 0; i < rows; i++)
            DCP_TRY(on_logits(ctx, first + at + i, f->logits + i * s->model->cfg.vocab));
    }
    return DCP_OK;
}

static dcp_status run_chunks(struct session *s, const int32_t *ids, int64_t n_ids,
                             session_logits_fn *on_logits, void *logits_ctx,
                             session_progress_fn *progress, void *progress_ctx,
                             const float **logits_out)
{
    struct forward *f = &s->f;
    const int rank = s->model->rank;
    const double delay_s = dcp_group_deadline(s->group) * 1.5 + 0.25;
    const float *logits = NULL;
    for (int64_t at = 0; at < n_ids;) {
        const int64_t n = n_ids - at < s->opts.chunk ? n_ids - at : s->opts.chunk;
        dcp__fault_pass(n_ids == 1 ? "token" : "prompt", rank, delay_s);
        const int64_t pos0 = session_length(s);
        DCP_TRY(dcp_cache_extend(f->cache, 0, n));
        DCP_TRY(forward_chunk(f, ids + at, n, pos0, on_logits != NULL));
        if (on_logits != NULL) {
            DCP_TRY(all_logits(s, at, n, on_logits, logits_ctx));
            logits = f->logits + (n - 1) % f->logit_rows * s->model->cfg.vocab;
        } else if (at + n == n_ids) {
            DCP_TRY(forward_logits(f, n - 1, 1));
            logits = f->logits;
        }
        at += n;
        if (progress != NULL) progress(progress_ctx, at, n_ids);
    }
    if (logits_out != NULL) *logits_out = logits;
    return DCP_OK;
}

dcp_status session_step(struct session *s, const int32_t *ids, int64_t n_ids,
                        session_logits_fn *on_logits, void *logits_ctx,
                        session_progress_fn *progress, void *progress_ctx, const float **logits_out)
{
    const double t0 = dcp__now_s();
    const int64_t length = session_length(s);
    struct record mine;
    memset(&mine, 0, sizeof(mine));
    const dcp_status ok = check_step(s, ids, n_ids);
    if (ok == DCP_OK) {
        const int64_t fields[] = {n_ids, session_length(s), hash_ids(ids, n_ids),
                                  on_logits != NULL};
        memcpy(mine.field, fields, sizeof(fields));
    }
    DCP_TRY(agree(s, "step", ok, &mine));
    if (on_logits != NULL) DCP_TRY(forward_reserve_logits(&s->f, logit_tile(s)));
    const dcp_status st =
        run_chunks(s, ids, n_ids, on_logits, logits_ctx, progress, progress_ctx, logits_out);
    s->total_s += dcp__now_s() - t0;
    if (st == DCP_OK || st == DCP_ERR_PEER || st == DCP_ERR_TIMEOUT || st == DCP_ERR_POISONED)
        return st;
    /* All ranks saw the same numbers and are here together: as if the step had not been. */
    if (st == DCP_ERR_NONFINITE) {
        DCP_TRY(dcp_cache_truncate(s->f.cache, 0, length));
        return st;
    }
    char why[WHY_BYTES * 2];
    snprintf(why, sizeof(why), "%s", dcp_last_error());
    dcp_group_abort(s->group, why);
    return dcp__fail(st, "%s", why);
}

dcp_status session_truncate(struct session *s, int64_t length)
{
    return dcp_cache_truncate(s->f.cache, 0, length);
}

/* n numbers of variance 1, by splitmix64. */
static void draw(uint64_t seed, float *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t z = seed += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        to[i] = (float)(int32_t)(z >> 32) * (1.7320508f * 0x1p-31f);
    }
}

/* Own tokens [local, local + n) of layer l, through rows, which holds n of k and v. */
static dcp_status fill_rows(struct session *s, int64_t l, int64_t local, int64_t n, float *rows)
{
    const struct model *m = s->model;
    const int64_t n_kv = m->kv_heads.end - m->kv_heads.begin, first = m->kv_heads.begin;
    const int64_t k_width = n_kv * m->cfg.key_dim, v_width = n_kv * m->cfg.value_dim;
    float *k = rows, *v = rows + n * k_width;
    for (int64_t i = 0; i < n; i++) {
        const int64_t pos = dcp_pos_global(local + i, m->kv_ranks, m->kv_rank, s->opts.interleave);
        for (int64_t h = 0; h < n_kv; h++) {
            const uint64_t seed =
                (uint64_t)((pos * m->cfg.n_layers + l) * m->cfg.n_kv_heads + first + h) << 32;
            draw(seed, k + i * k_width + h * m->cfg.key_dim, m->cfg.key_dim);
            draw(~seed, v + i * v_width + h * m->cfg.value_dim, m->cfg.value_dim);
        }
    }
    return dcp_cache_store(s->f.cache, 0, l, local, n, k, k_width, v, v_width);
}

dcp_status session_fill(struct session *s, int64_t length)
{
    enum { ROWS = 64 };
    const struct model *m = s->model;
    const int64_t have = session_length(s);
    if (length < have || length > s->opts.context)
        return dcp__fail(DCP_ERR_ARG, "fill up to %lld tokens; there are %lld, and %lld at most",
                         (long long)length, (long long)have, (long long)s->opts.context);
    void *rows = NULL;
    DCP_TRY(dcp__alloc_array(ROWS * (size_t)(m->kv_heads.end - m->kv_heads.begin),
                             (size_t)(m->cfg.key_dim + m->cfg.value_dim) * sizeof(float),
                             "rows to fill a cache with", &rows));
    dcp_status st = dcp_cache_extend(s->f.cache, 0, length - have);
    int64_t at = dcp_local_length(have, m->kv_ranks, m->kv_rank, s->opts.interleave);
    const int64_t end = dcp_local_length(length, m->kv_ranks, m->kv_rank, s->opts.interleave);
    for (; st == DCP_OK && at < end; at += ROWS)
        for (int64_t l = 0; st == DCP_OK && l < m->cfg.n_layers; l++)
            st = fill_rows(s, l, at, end - at < ROWS ? end - at : ROWS, rows);
    dcp__free(rows);
    return st;
}

/* --- what there is --- */

int32_t session_vocab(const struct session *s)
{
    return (int32_t)s->model->cfg.vocab;
}

int64_t session_context(const struct session *s)
{
    return s->opts.context;
}

int64_t session_length(const struct session *s)
{
    return dcp_cache_length(s->f.cache, 0);
}

const char *session_replicated_names(const struct session *s)
{
    return s->model->replicated_names;
}

void session_reset_times(struct session *s)
{
    memset(&s->f.times, 0, sizeof(s->f.times));
    s->total_s = 0;
}

dcp_status session_report(struct session *s, struct session_rank_report *reports)
{
    const struct forward_times *t = &s->f.times;
    struct rusage usage;
    memset(&usage, 0, sizeof(usage));
    getrusage(RUSAGE_SELF, &usage);
    struct session_rank_report mine;
    memset(&mine, 0, sizeof(mine));
    mine.kv_tokens = dcp_local_length(session_length(s), s->model->kv_ranks, s->model->kv_rank,
                                      s->opts.interleave);
    mine.kv_bytes = dcp_cache_bytes(s->f.cache, -1);
    dcp_kv_view view;
    DCP_TRY(dcp_cache_view(s->f.cache, 0, 0, &view));
    mine.kv_page_tokens = view.page_tokens;
    /* Of the cache's memory; pages that no sequence has yet are on huge pages like the others. */
    const uint64_t huge_bytes = dcp_cache_huge_bytes(s->f.cache);
    mine.kv_huge_bytes = huge_bytes < mine.kv_bytes ? huge_bytes : mine.kv_bytes;
    mine.weight_share_bytes = s->model->share_bytes;
    mine.weight_replicated_bytes = s->model->replicated_bytes;
    mine.weight_bytes = s->model->share_bytes + s->model->replicated_bytes;
    mine.workspace_bytes = s->attend_bytes;
    mine.activation_bytes = s->f.activation_bytes;
    mine.peak_rss_bytes = (uint64_t)usage.ru_maxrss * 1024;
    mine.peak_counted_bytes = dcp__alloc_peak();
    mine.attend_s = t->attend_s;
    mine.merge_s = t->merge_s;
    mine.gather_s = t->gather_s;
    mine.dense_s = t->dense_s;
    mine.total_s = s->total_s;
    const double known = t->attend_s + t->merge_s + t->gather_s + t->dense_s;
    mine.other_s = s->total_s > known ? s->total_s - known : 0;
    mine.merge_wire_bytes = t->merge_wire_bytes;
    mine.other_wire_bytes = t->other_wire_bytes;
    return dcp_group_allgather(s->group, &mine, sizeof(mine), reports);
}
