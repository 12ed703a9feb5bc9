/* SPDX-License-Identifier: Apache-2.0 */
/* The small models of tests/data/gguf against logits of an independent float64 pass, for ranks,
 * chunks, interleaves, cache types and transports; what ranks own; refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/model.h"
#include "engine/safetensors.h"
#include "engine/session.h"
#include "group/ranks.h"

#define DATA DCP_SOURCE_DIR "/tests/data/gguf/"
enum { MAX_TOKENS = 64 };

static const char *const models[] = {"llama-f32",      "llama-linear-untied", "llama3-freqs",
                                     "mistral-window", "llama-bias",          "llama-partial-rope",
                                     "gemma3-softcap", "llama-kquants"};
enum { N_MODELS = sizeof(models) / sizeof(models[0]) };

/* How a run feeds the ids: all at once with all logits; all at once, then the last logits only; one
 * by one. */
enum feed { FEED_ALL, FEED_LAST, FEED_SINGLE };

struct run {
    const char *model;
    enum feed feed;
    struct session_opts opts;
    double tolerance;
    /* expected, and what ranks found */
    int32_t ids[MAX_TOKENS];
    int64_t n_ids, vocab;
    float *logits;
    double worst[64]; /* by rank (of this process) */
};

static void load_expected(struct run *run, const char *model)
{
    char path[512];
    snprintf(path, sizeof(path), DATA "%s.safetensors", model);
    struct st_file *f = NULL;
    assert_int_equal(st_open(path, &f), DCP_OK);
    const struct st_tensor *ids = st_find(f, "ids"), *logits = st_find(f, "logits");
    assert_true(ids->n_elems <= MAX_TOKENS && logits->dims[0] == ids->n_elems);
    run->model = model;
    run->n_ids = ids->n_elems;
    run->vocab = logits->dims[1];
    run->logits = malloc(logits->n_bytes);
    assert_int_equal(st_read(f, ids, 0, ids->n_bytes, run->ids), DCP_OK);
    assert_int_equal(st_read(f, logits, 0, logits->n_bytes, run->logits), DCP_OK);
    st_close(f);
}

struct compare {
    struct run *run;
    int64_t first, n_seen;
    double worst;
};

static dcp_status compare_row(void *ctx, int64_t index, const float *logits)
{
    struct compare *c = ctx;
    const float *want = c->run->logits + (c->first + index) * c->run->vocab;
    for (int64_t i = 0; i < c->run->vocab; i++) {
        const double off = fabs((double)logits[i] - (double)want[i]);
        if (!(off <= c->worst)) c->worst = off; /* NaN counts */
    }
    c->n_seen++;
    return DCP_OK;
}

static dcp_status feed_ids(struct session *s, struct compare *c)
{
    const struct run *run = c->run;
    const float *last = NULL;
    if (run->feed == FEED_ALL) {
        DCP_TRY(session_step(s, run->ids, run->n_ids, compare_row, c, NULL, NULL, &last));
        c->worst += c->n_seen == run->n_ids ? 0 : 1e9;
        c->first = run->n_ids - 1;
        return compare_row(c, 0, last);
    }
    if (run->feed == FEED_LAST) {
        DCP_TRY(session_step(s, run->ids, run->n_ids, NULL, NULL, NULL, NULL, &last));
        c->first = run->n_ids - 1;
        return compare_row(c, 0, last);
    }
    for (c->first = 0; c->first < run->n_ids; c->first++) {
        DCP_TRY(session_step(s, run->ids + c->first, 1, NULL, NULL, NULL, NULL, &last));
        DCP_TRY(compare_row(c, 0, last));
    }
    return DCP_OK;
}

static dcp_status open_session(dcp_group *g, const char *model, const struct session_opts *opts,
                               struct session **out)
{
    char path[512];
    snprintf(path, sizeof(path), DATA "%s.gguf", model);
    struct gguf *file = NULL;
    DCP_TRY(gguf_open(path, &file));
    const dcp_status st = session_create(g, file, opts, out);
    gguf_close(file);
    return st;
}

/* 0 if this rank's logits are within tolerance. */
static int run_rank(dcp_group *g, void *ctx)
{
    struct run *run = ctx;
    struct session *s = NULL;
    struct compare c = {run, 0, 0, 0.0};
    dcp_status st = open_session(g, run->model, &run->opts, &s);
    if (st == DCP_OK) st = feed_ids(s, &c);
    if (st != DCP_OK) fprintf(stderr, "rank %d: %s\n", dcp_group_rank(g), dcp_last_error());
    session_destroy(s);
    run->worst[dcp_group_rank(g)] = c.worst;
    return st == DCP_OK && c.worst <= run->tolerance ? 0 : 1;
}

static void check_run(struct run *run, int n_ranks, bool shm)
{
    const int bad =
        shm ? ranks_shm(n_ranks, 20.0, run_rank, run) : ranks_threads(n_ranks, 20.0, run_rank, run);
    double worst = 0;
    for (int r = 0; r < n_ranks; r++) worst = fmax(worst, run->worst[r]);
    if (bad != 0)
        fail_msg("%s: %d ranks, chunk %lld, interleave %lld, feed %d%s: off by %g, allowed %g",
                 run->model, n_ranks, (long long)run->opts.chunk, (long long)run->opts.interleave,
                 run->feed, shm ? ", shm" : "", worst, run->tolerance);
}

/* Float32 everywhere: sums of up to 256 terms and a few layers; the worst seen is 2e-5. */
static struct session_opts exact(int64_t chunk, int64_t interleave)
{
    return (struct session_opts){.n_threads = 1,
                                 .chunk = chunk,
                                 .interleave = interleave,
                                 .kv_dtype = DCP_F32,
                                 .compute = COMPUTE_F32};
}
static const double EXACT = 2e-4;

static void test_ranks_chunks_interleaves(void **state)
{
    (void)state;
    static const int ranks[] = {1, 2, 3, 4, 5, 8};
    static const int64_t chunks[] = {0, 1, 3, 7, 0, 13}, interleaves[] = {1, 16, 1, 1, 3, 16};
    static const int64_t tiles[] = {0, 0, 2, 3, 7, 5}; /* rows between attention; 0 = the chunk */
    for (int i = 0; i < N_MODELS; i++) {
        struct run run = {.tolerance = EXACT};
        load_expected(&run, models[i]);
        double worst = 0;
        for (int j = 0; j < 6; j++) {
            run.opts = exact(chunks[(i + j) % 6], interleaves[j]);
            run.opts.tile_rows = tiles[j];
            run.feed = (i + j) % 3 == 2 ? FEED_LAST : FEED_ALL;
            check_run(&run, ranks[j], false);
            worst = fmax(worst, run.worst[0]);
        }
        run.opts = exact(0, 1 + i % 2);
        run.feed = FEED_SINGLE;
        check_run(&run, 1 + i % 4, false);
        worst = fmax(worst, run.worst[0]);
        print_message("%s: off by %.2g at most\n", models[i], worst);
        free(run.logits);
    }
}

static void test_threads_and_algorithms(void **state)
{
    (void)state;
    struct run run = {.tolerance = EXACT};
    load_expected(&run, "mistral-window");
    static const dcp_merge_algo algos[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLTOALL};
    for (int i = 0; i < 2; i++) {
        run.opts = exact(11, 1);
        run.opts.n_threads = 3;
        run.opts.algo = algos[i];
        check_run(&run, 3, false);
    }
    free(run.logits);
}

/* KV heads over groups of ranks: the same logits, biases sliced with their rows. */
static void test_head_groups(void **state)
{
    (void)state;
    int n_run = 0;
    for (int i = 0; i < N_MODELS; i++) {
        struct run run = {.tolerance = EXACT};
        struct gguf *file = NULL;
        const struct arch *arch = NULL;
        struct model_config *cfg = malloc(sizeof(*cfg));
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", models[i]);
        assert_int_equal(gguf_open(path, &file), DCP_OK);
        assert_int_equal(model_read_config(file, &arch, cfg), DCP_OK);
        load_expected(&run, models[i]);
        for (int tp = 2; tp <= 4; tp++) {
            struct model *m = NULL;
            if (cfg->n_kv_heads % tp != 0) {
                assert_int_equal(model_load_tp(file, 2 * tp, 0, MLA_ABSORBED, tp, &m), DCP_ERR_ARG);
                assert_non_null(strstr(dcp_last_error(), "must divide"));
                continue;
            }
            for (int dcp = 1; dcp <= 2; dcp++) {
                run.opts = exact(i % 2 ? 7 : 0, 1 + i % 3);
                run.opts.tp = tp;
                run.feed = dcp == 2 ? FEED_ALL : FEED_SINGLE;
                check_run(&run, tp * dcp, i % 3 == 0);
                n_run++;
            }
        }
        gguf_close(file);
        free(cfg);
        free(run.logits);
    }
    print_message("%d runs in head groups\n", n_run);
    assert_true(n_run > 0);
}

static void test_processes(void **state)
{
    (void)state;
    static const char *const some[] = {"llama-bias", "gemma3-softcap"};
    for (int i = 0; i < 2; i++) {
        struct run run = {.tolerance = EXACT, .opts = exact(7, 1)};
        load_expected(&run, some[i]);
        check_run(&run, 3, true);
        run.feed = FEED_SINGLE;
        check_run(&run, 4, true);
        free(run.logits);
    }
}

/* The cache rounds to 8 or 11 bits: a relative 2^-9 of K and V each, seen through a few layers. */
static void test_narrow_caches(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        struct run run = {.opts = exact(5, 1)};
        load_expected(&run, models[i]);
        run.opts.kv_dtype = DCP_DTYPE_DEFAULT;
        run.tolerance = 0.5;
        check_run(&run, 2, false);
        const double bf16 = run.worst[0];
        run.opts.kv_dtype = DCP_F16;
        run.tolerance = 0.1;
        check_run(&run, 3, false);
        const double f16 = run.worst[0];
        double rough[2];
        for (int t = 0; t < 2; t++) {
            run.opts.kv_dtype = t == 0 ? DCP_I8 : DCP_FP8_E4M3;
            run.tolerance = t == 0 ? 1.5 : 8.0; /* a step of int8: 2^-8 of a row; of fp8: 2^-4 */
            check_run(&run, 2, false);
            rough[t] = run.worst[0];
        }
        print_message("%s: off by %.2g with bf16, %.2g with f16, %.2g with int8, %.2g with fp8\n",
                      models[i], bf16, f16, rough[0], rough[1]);
        free(run.logits);
    }
}

/* --- what ranks own --- */

struct ownership {
    const char *model;
    struct session_rank_report reports[8];
    char names[256];
};

static int own_rank(dcp_group *g, void *ctx)
{
    struct ownership *o = ctx;
    const struct session_opts opts = {.n_threads = 1, .interleave = 2};
    struct session *s = NULL;
    struct session_rank_report reports[8];
    static const int32_t ids[21] = {1, 2, 3};
    dcp_status st = open_session(g, o->model, &opts, &s);
    if (st == DCP_OK) st = session_step(s, ids, 21, NULL, NULL, NULL, NULL, NULL);
    if (st == DCP_OK) st = session_report(s, reports);
    if (st == DCP_OK && dcp_group_rank(g) == dcp_group_size(g) - 1) {
        memcpy(o->reports, reports, sizeof(reports));
        snprintf(o->names, sizeof(o->names), "%s", session_replicated_names(s));
    }
    if (st != DCP_OK) fprintf(stderr, "rank %d: %s\n", dcp_group_rank(g), dcp_last_error());
    session_destroy(s);
    return st == DCP_OK ? 0 : 1;
}

/* Is the tensor one of those that every rank holds whole, by its name in the list? */
static bool is_replicated(const char *names, const char *tensor)
{
    char item[64];
    const char *base = strncmp(tensor, "blk.", 4) == 0 ? strchr(tensor + 4, '.') + 1 : tensor;
    snprintf(item, sizeof(item), "%s", base);
    char *dot = strrchr(item, '.');
    if (dot != NULL && strcmp(dot, ".weight") == 0) *dot = 0;
    const size_t n = strlen(item);
    for (const char *at = names; (at = strstr(at, item)) != NULL; at += n)
        if ((at == names || at[-1] == ' ') && (at[n] == ',' || at[n] == 0)) return true;
    return false;
}

/* Which part of a tensor a rank has, by its name: rows (elements of a vector) [begin, end). */
static dcp_range part_of(const struct gguf *file, const struct gguf_tensor *t, int n, int rank)
{
    static const char *const by_row[] = {
        "token_embd.weight", "output.weight", "attn_output.weight", "attn_output.bias",
        "ffn_gate.weight",   "ffn_up.weight", "ffn_down.weight"};
    const char *base = strncmp(t->name, "blk.", 4) == 0 ? strchr(t->name + 4, '.') + 1 : t->name;
    const int64_t n_rows = t->n_dims == 1 ? t->dims[0] : t->dims[1];
    if (strcmp(base, "attn_q.weight") == 0 || strcmp(base, "attn_q.bias") == 0) {
        const char *arch = NULL;
        char key[64];
        int64_t n_heads = 0;
        bool found = false;
        assert_int_equal(gguf_get_str(file, "general.architecture", &arch, NULL, &found), DCP_OK);
        snprintf(key, sizeof(key), "%s.attention.head_count", arch);
        assert_int_equal(gguf_get_int(file, key, &n_heads, &found), DCP_OK);
        const dcp_range heads = dcp_cut_range(n_heads, n, rank);
        const int64_t rows = n_rows / n_heads;
        return (dcp_range){heads.begin * rows, heads.end * rows};
    }
    for (size_t i = 0; i < sizeof(by_row) / sizeof(by_row[0]); i++)
        if (strcmp(base, by_row[i]) == 0) return dcp_cut_range(n_rows, n, rank);
    return (dcp_range){0, n_rows};
}

/* Bytes in the file of a rank's slices of the tensors that are split; *arena_out: what its slices
 * take in memory, each from a multiple of 64, vectors as floats, and 64 readable bytes behind. */
static uint64_t share_of(const struct gguf *file, const char *names, int n, int rank,
                         size_t *arena_out)
{
    uint64_t share = 0;
    *arena_out = 64;
    for (size_t i = 0; i < gguf_n_tensors(file); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(file, i);
        const dcp_range part = part_of(file, t, n, rank);
        const size_t rows = (size_t)(part.end - part.begin);
        const size_t row_bytes = t->n_dims == 1 ? t->n_bytes / (size_t)t->dims[0] : t->row_bytes;
        const size_t held = rows * (t->n_dims == 1 ? sizeof(float) : row_bytes);
        *arena_out += (held + 63) / 64 * 64;
        if (!is_replicated(names, t->name)) share += rows * row_bytes;
    }
    return share;
}

/* What loading takes, counted: a rank holds its slices and nothing of the others'. */
static void check_counted(const struct gguf *file, int n, int rank, size_t arena)
{
    struct model *m = NULL;
    const size_t before = dcp__alloc_current();
    assert_int_equal(model_load(file, n, rank, MLA_ABSORBED, &m), DCP_OK);
    const size_t other = sizeof(struct model) + (size_t)m->cfg.n_layers * sizeof(struct layer);
    assert_int_equal(dcp__alloc_current() - before, arena + other);
    model_free(m);
    assert_int_equal(dcp__alloc_current(), before);
}

static void test_what_ranks_own(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", models[i]);
        struct gguf *file = NULL;
        assert_int_equal(gguf_open(path, &file), DCP_OK);
        for (int n = 1; n <= 5; n += 2) {
            struct ownership o = {.model = models[i]};
            assert_int_equal(ranks_threads(n, 20.0, own_rank, &o), 0);
            uint64_t split = 0, replicated = 0, shares = 0;
            for (size_t t = 0; t < gguf_n_tensors(file); t++) {
                const struct gguf_tensor *tensor = gguf_tensor_at(file, t);
                if (is_replicated(o.names, tensor->name))
                    replicated += tensor->n_bytes;
                else
                    split += tensor->n_bytes;
            }
            int64_t kv_tokens = 0;
            for (int r = 0; r < n; r++) {
                const struct session_rank_report *p = &o.reports[r];
                size_t arena = 0;
                assert_int_equal(p->weight_share_bytes, share_of(file, o.names, n, r, &arena));
                check_counted(file, n, r, arena);
                assert_int_equal(p->weight_replicated_bytes, replicated);
                assert_int_equal(p->weight_bytes, p->weight_share_bytes + replicated);
                assert_int_equal(p->kv_tokens, dcp_local_length(21, n, r, 2));
                assert_true(p->kv_bytes > 0 && p->activation_bytes > 0 && p->total_s > 0);
                const double known =
                    p->attend_s + p->merge_s + p->gather_s + p->dense_s + p->other_s;
                assert_true(fabs(known - p->total_s) < 1e-6);
                shares += p->weight_share_bytes;
                kv_tokens += p->kv_tokens;
            }
            assert_int_equal(shares, split);
            assert_int_equal(kv_tokens, 21);
            if (n == 1) print_message("%s: replicated: %s\n", models[i], o.names);
        }
        gguf_close(file);
    }
}

/* --- refusals --- */

static int overflow_rank(dcp_group *g, void *ctx)
{
    (void)ctx;
    struct session *s = NULL;
    const struct session_opts opts = {.n_threads = 1, .context = 10, .chunk = 4};
    static const int32_t ids[11] = {5, 6, 7}, foreign[2] = {0, 261}, negative[1] = {-1};
    const float *logits = NULL;
    int bad = 0;
    if (open_session(g, "llama-f32", &opts, &s) != DCP_OK) return 1;
    bad += session_context(s) != 10 || session_vocab(s) != 261;
    bad += session_step(s, ids, 11, NULL, NULL, NULL, NULL, &logits) != DCP_ERR_ARG;
    bad +=
        strstr(dcp_last_error(), "11 tokens") == NULL || strstr(dcp_last_error(), "of 10") == NULL;
    bad += session_length(s) != 0;
    bad += session_step(s, foreign, 2, NULL, NULL, NULL, NULL, &logits) != DCP_ERR_ARG;
    bad += session_step(s, negative, 1, NULL, NULL, NULL, NULL, &logits) != DCP_ERR_ARG;
    bad += session_step(s, ids, 0, NULL, NULL, NULL, NULL, &logits) != DCP_ERR_ARG;
    /* the group is as good as before */
    bad += session_step(s, ids, 9, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    bad += session_step(s, ids, 2, NULL, NULL, NULL, NULL, &logits) != DCP_ERR_ARG;
    bad += session_step(s, ids, 1, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    /* back to 4, and on */
    bad += session_truncate(s, 4) != DCP_OK || session_length(s) != 4;
    bad += session_step(s, ids + 4, 6, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    session_destroy(s);
    return bad;
}

static void test_context_overflow(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(1, 20.0, overflow_rank, NULL), 0);
    assert_int_equal(ranks_threads(3, 20.0, overflow_rank, NULL), 0);
}

/* After truncate the same ids give the same logits as a fresh run. */
static int truncate_rank(dcp_group *g, void *ctx)
{
    const struct run *run = ctx;
    struct session *s = NULL;
    const struct session_opts opts = exact(6, 2);
    static const int32_t other[20] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
    const float *logits = NULL;
    if (open_session(g, run->model, &opts, &s) != DCP_OK) return 1;
    int bad = session_step(s, run->ids, 11, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    bad += session_step(s, other, 20, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    bad += session_truncate(s, 11) != DCP_OK;
    bad +=
        session_step(s, run->ids + 11, run->n_ids - 11, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    const float *want = run->logits + (run->n_ids - 1) * run->vocab;
    for (int64_t i = 0; bad == 0 && i < run->vocab; i++)
        bad += !(fabs((double)logits[i] - (double)want[i]) <= EXACT);
    session_destroy(s);
    return bad;
}

static void test_truncate(void **state)
{
    (void)state;
    struct run run = {0};
    load_expected(&run, "gemma3-softcap");
    assert_int_equal(ranks_threads(3, 20.0, truncate_rank, &run), 0);
    free(run.logits);
}

/* What fills a cache in place of a prompt is the same for any number of ranks: so are the logits of
 * a token after it, and it is not the prompt's. */
static int fill_rank(dcp_group *g, void *ctx)
{
    struct run *run = ctx;
    struct session *s = NULL;
    const struct session_opts opts = exact(6, 2);
    const float *logits = NULL;
    if (open_session(g, run->model, &opts, &s) != DCP_OK) return 1;
    int bad = session_step(s, run->ids, 3, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    bad += session_fill(s, run->n_ids - 1) != DCP_OK || session_length(s) != run->n_ids - 1;
    bad += session_fill(s, 2) != DCP_ERR_ARG;
    bad += session_fill(s, session_context(s) + 1) != DCP_ERR_ARG;
    bad += session_step(s, run->ids + run->n_ids - 1, 1, NULL, NULL, NULL, NULL, &logits) != DCP_OK;
    float *want = run->logits + (run->n_ids - 1) * run->vocab;
    double off = 0.0;
    for (int64_t i = 0; bad == 0 && i < run->vocab; i++)
        off = fmax(off, fabs((double)logits[i] - (double)want[i]));
    if (dcp_group_size(g) == 1) {
        bad += !(off > 100 * EXACT);
        if (bad == 0) memcpy(want, logits, (size_t)run->vocab * sizeof(float));
    } else {
        bad += !(off <= EXACT);
    }
    session_destroy(s);
    return bad;
}

static void test_fill(void **state)
{
    (void)state;
    struct run run = {0};
    load_expected(&run, "gemma3-softcap");
    for (int n = 1; n <= 3; n++) assert_int_equal(ranks_threads(n, 20.0, fill_rank, &run), 0);
    free(run.logits);
}

/* One rank asks for something else: an error on all, at once, naming what and who. */
static int mismatch_rank(dcp_group *g, void *ctx)
{
    (void)ctx;
    const int rank = dcp_group_rank(g);
    struct session *s = NULL;
    struct session_opts opts = {.n_threads = 1};
    opts.chunk = rank == 1 ? 8 : 16;
    int bad = open_session(g, "llama-f32", &opts, &s) != DCP_ERR_MISMATCH;
    bad += strstr(dcp_last_error(), "chunk is 16 on rank 0 and 8 on rank 1") == NULL;
    opts.chunk = 16;
    opts.kv_dtype = rank == 2 ? DCP_F32 : DCP_DTYPE_DEFAULT;
    bad += open_session(g, "llama-f32", &opts, &s) != DCP_ERR_MISMATCH;
    bad += strstr(dcp_last_error(), "KV type is bf16 on rank 0 and f32 on rank 2") == NULL;
    opts.kv_dtype = DCP_DTYPE_DEFAULT;
    opts.algo = rank == 0 ? DCP_MERGE_ALLTOALL : DCP_MERGE_AUTO;
    bad += open_session(g, "llama-f32", &opts, &s) != DCP_ERR_MISMATCH;
    bad += strstr(dcp_last_error(), "algorithm is alltoall on rank 0 and auto on rank 1") == NULL;
    opts.algo = DCP_MERGE_AUTO;
    opts.chunk = rank == 2 ? -1 : 16;
    bad += open_session(g, "llama-f32", &opts, &s) != DCP_ERR_ARG;
    bad += strstr(dcp_last_error(), rank == 2 ? "chunk: -1" : "rank 2: chunk: -1") == NULL;
    opts.chunk = 16;
    bad += open_session(g, "llama-f32", &opts, &s) != DCP_OK;
    const int32_t ids[3] = {1, rank == 2 ? 4 : 2, 3};
    bad += session_step(s, ids, 3, NULL, NULL, NULL, NULL, NULL) != DCP_ERR_MISMATCH;
    bad +=
        session_step(s, ids, rank == 1 ? 1 : 3, NULL, NULL, NULL, NULL, NULL) != DCP_ERR_MISMATCH;
    bad += strstr(dcp_last_error(), "tokens is 3 on rank 0 and 1 on rank 1") == NULL;
    bad += session_step(s, ids, 1, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    if (bad != 0) fprintf(stderr, "rank %d: %d wrong, last: %s\n", rank, bad, dcp_last_error());
    session_destroy(s);
    return bad;
}

static void test_mismatch(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(3, 20.0, mismatch_rank, NULL), 0);
}

static dcp_status refuse_row(void *ctx, int64_t index, const float *logits)
{
    (void)logits;
    const bool refuses = *(const bool *)ctx && index == 5;
    return refuses ? dcp__fail(DCP_ERR_SYS, "disk full") : DCP_OK;
}

/* A caller's function fails on one rank in the middle of a step: peers learn of it. */
static int give_up_rank(dcp_group *g, void *ctx)
{
    (void)ctx;
    bool refuses = dcp_group_rank(g) == 1;
    struct session *s = NULL;
    const struct session_opts opts = {.n_threads = 1, .chunk = 4};
    static const int32_t ids[12] = {0};
    if (open_session(g, "llama-f32", &opts, &s) != DCP_OK) return 1;
    const dcp_status st = session_step(s, ids, 12, refuse_row, &refuses, NULL, NULL, NULL);
    int bad = refuses ? st != DCP_ERR_SYS : st != DCP_ERR_PEER && st != DCP_ERR_POISONED;
    bad += strstr(dcp_last_error(), "disk full") == NULL;
    bad += session_step(s, ids, 1, NULL, NULL, NULL, NULL, NULL) == DCP_OK;
    if (bad != 0) fprintf(stderr, "rank %d: %d, %s\n", dcp_group_rank(g), st, dcp_last_error());
    session_destroy(s);
    return bad;
}

static void test_give_up(void **state)
{
    (void)state;
    assert_int_equal(ranks_threads(3, 20.0, give_up_rank, NULL), 0);
}

/* Steps after the first allocate nothing, whatever their length, and all is given back. */
static int allocations_rank(dcp_group *g, void *ctx)
{
    const enum compute_type *compute = ctx;
    struct session *s = NULL;
    struct session_opts opts = exact(8, 1);
    opts.compute = *compute;
    static const int32_t ids[20] = {0};
    if (open_session(g, "gemma3-softcap", &opts, &s) != DCP_OK) return 1;
    int bad = session_step(s, ids, 20, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    const size_t calls = dcp__alloc_calls(); /* the cache has its first page now */
    for (int i = 0; i < 8; i++)
        bad += session_step(s, ids, 1, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    for (int n = 2; n <= 7; n++) /* lengths that have not been */
        bad += session_step(s, ids, n, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    bad += dcp__alloc_calls() != calls;
    session_destroy(s);
    return bad;
}

static void test_allocations(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    enum compute_type compute[] = {COMPUTE_F32, COMPUTE_BF16};
    for (int i = 0; i < 2; i++)
        assert_int_equal(ranks_threads(1, 20.0, allocations_rank, &compute[i]), 0);
    assert_int_equal(dcp__alloc_current(), before);
    assert_int_equal(ranks_threads(3, 20.0, overflow_rank, NULL), 0);
    assert_int_equal(dcp__alloc_current(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_chunks_interleaves),
        cmocka_unit_test(test_threads_and_algorithms),
        cmocka_unit_test(test_head_groups),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_narrow_caches),
        cmocka_unit_test(test_what_ranks_own),
        cmocka_unit_test(test_context_overflow),
        cmocka_unit_test(test_truncate),
        cmocka_unit_test(test_fill),
        cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_give_up),
        cmocka_unit_test(test_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
