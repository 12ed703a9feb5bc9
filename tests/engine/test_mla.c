/* SPDX-License-Identifier: Apache-2.0 */
/* Models with multi-head latent attention, made by make_mla_cases.py, against logits of an
 * independent float64 pass: both forms of the cache, ranks, chunks, tiles, interleaves, transports;
 * what the cache takes; greedy text; refusals.
 *
 * The tolerance of f32: a product over k terms is off by about sqrt(k) 2^-24 of its operands'
 * norms, as rounding errors have random signs; logits have a standard deviation of 2. A layer
 * chains six products (k at most 2,048, sqrt(k) 45) and a softmax that turns an error of a score
 * into one of a weight. Four layers: 4 * 7 * 45 * 6e-8 * 2 = 1.5e-4 if every factor between is 1;
 * 4 times that leaves room for those that are not. The two forms differ from each other by at most
 * twice that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/forward.h"
#include "engine/model.h"
#include "engine/safetensors.h"
#include "engine/session.h"
#include "files/file_tools.h"
#include "group/ranks.h"

#define DATA DCP_BINARY_DIR "/mla/"
enum { MAX_TOKENS = 64, MAX_VOCAB = 512 };
static const double EXACT = 6e-4;

static const char *const models[] = {"mla-deepseek", "mla-lite", "mla-uneven", "mla-experts",
                                     "mla-experts-softmax"};
static const char *const form_names[] = {"absorbed", "projected", "expanded"};
enum { N_MODELS = sizeof(models) / sizeof(models[0]) };

/* All at once; the prompt for its last logits, then one by one,
 * each the best of the last logits. */
enum feed { FEED_ALL, FEED_GREEDY };

struct run {
    const char *model;
    enum feed feed;
    struct session_opts opts;
    double tolerance;
    int32_t ids[MAX_TOKENS];
    int64_t n_ids, n_prompt, vocab;
    float *want;  /* (n_ids, vocab) */
    float *seen;  /* (n_ids, vocab) of rank 0, or NULL */
    double worst; /* of rank 0 */
    double ranks_worst[8];
};

static void load_case(struct run *run, const char *model)
{
    char path[512];
    snprintf(path, sizeof(path), DATA "%s.safetensors", model);
    struct st_file *f = NULL;
    assert_int_equal(st_open(path, &f), DCP_OK);
    const struct st_tensor *ids = st_find(f, "ids"), *logits = st_find(f, "logits");
    const struct st_tensor *prompt = st_find(f, "prompt");
    int32_t n_prompt = 0;
    assert_true(ids->n_elems <= MAX_TOKENS && logits->dims[0] == ids->n_elems);
    run->model = model;
    run->n_ids = ids->n_elems;
    run->vocab = logits->dims[1];
    run->want = malloc(logits->n_bytes);
    assert_int_equal(st_read(f, ids, 0, ids->n_bytes, run->ids), DCP_OK);
    assert_int_equal(st_read(f, logits, 0, logits->n_bytes, run->want), DCP_OK);
    assert_int_equal(st_read(f, prompt, 0, sizeof(n_prompt), &n_prompt), DCP_OK);
    run->n_prompt = n_prompt;
    st_close(f);
}

struct compare {
    struct run *run;
    int rank;
    int64_t first, n_seen;
    double worst;
};

static dcp_status compare_row(void *ctx, int64_t index, const float *logits)
{
    struct compare *c = ctx;
    const int64_t at = (c->first + index) * c->run->vocab;
    for (int64_t i = 0; i < c->run->vocab; i++) {
        const double off = fabs((double)logits[i] - (double)c->run->want[at + i]);
        if (!(off <= c->worst)) c->worst = off; /* NaN counts */
    }
    if (c->rank == 0 && c->run->seen != NULL)
        memcpy(c->run->seen + at, logits, (size_t)c->run->vocab * sizeof(float));
    c->n_seen++;
    return DCP_OK;
}

static int32_t best_of(const float *logits, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

static dcp_status feed(struct session *s, struct compare *c)
{
    const struct run *run = c->run;
    const float *last = NULL;
    if (run->feed == FEED_ALL) {
        DCP_TRY(session_step(s, run->ids, run->n_ids, compare_row, c, NULL, NULL, &last));
        c->worst += c->n_seen == run->n_ids ? 0 : 1e9;
        return DCP_OK;
    }
    DCP_TRY(session_step(s, run->ids, run->n_prompt, NULL, NULL, NULL, NULL, &last));
    for (c->first = run->n_prompt - 1; c->first < run->n_ids; c->first++) {
        DCP_TRY(compare_row(c, 0, last));
        const int32_t next = best_of(last, run->vocab);
        if (c->first + 1 == run->n_ids) break;
        if (next != run->ids[c->first + 1]) c->worst += 1e9;
        DCP_TRY(session_step(s, &next, 1, NULL, NULL, NULL, NULL, &last));
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

static int run_rank(dcp_group *g, void *ctx)
{
    struct run *run = ctx;
    struct session *s = NULL;
    struct compare c = {run, dcp_group_rank(g), 0, 0, 0.0};
    dcp_status st = open_session(g, run->model, &run->opts, &s);
    if (st == DCP_OK) st = feed(s, &c);
    if (st != DCP_OK) fprintf(stderr, "rank %d: %s\n", c.rank, dcp_last_error());
    session_destroy(s);
    run->ranks_worst[c.rank] = c.worst;
    return st == DCP_OK && c.worst <= run->tolerance ? 0 : 1;
}

static void check_run(struct run *run, int n_ranks, bool shm)
{
    const int bad =
        shm ? ranks_shm(n_ranks, 60.0, run_rank, run) : ranks_threads(n_ranks, 60.0, run_rank, run);
    run->worst = 0;
    for (int r = 0; r < n_ranks; r++) run->worst = fmax(run->worst, run->ranks_worst[r]);
    if (bad != 0)
        fail_msg("%s, %s: %d ranks, chunk %lld, tile %lld, interleave %lld, feed %d%s: off by %g, "
                 "allowed %g",
                 run->model, form_names[run->opts.mla], n_ranks, (long long)run->opts.chunk,
                 (long long)run->opts.tile_rows, (long long)run->opts.interleave, run->feed,
                 shm ? ", shm" : "", run->worst, run->tolerance);
}

static struct session_opts exact(enum mla_form form, int64_t chunk, int64_t tile,
                                 int64_t interleave)
{
    return (struct session_opts){.n_threads = 1,
                                 .context = MAX_TOKENS,
                                 .chunk = chunk,
                                 .tile_rows = tile,
                                 .interleave = interleave,
                                 .kv_dtype = DCP_F32,
                                 .compute = COMPUTE_F32,
                                 .mla = form};
}

static void test_logits(void **state)
{
    (void)state;
    static const struct {
        int ranks;
        int64_t chunk, tile, interleave;
    } shapes[] = {{1, 0, 0, 1}, {2, 7, 3, 1}, {3, 16, 5, 4}, {4, 1, 0, 16}, {2, 0, 4, 2}};
    for (int i = 0; i < N_MODELS; i++) {
        struct run run = {.tolerance = EXACT};
        load_case(&run, models[i]);
        for (int form = 0; form < N_MLA_FORMS; form++) {
            double worst = 0;
            for (size_t j = 0; j < sizeof(shapes) / sizeof(shapes[0]); j++) {
                run.opts = exact((enum mla_form)form, shapes[j].chunk, shapes[j].tile,
                                 shapes[j].interleave);
                run.feed = FEED_ALL;
                check_run(&run, shapes[j].ranks, false);
                worst = fmax(worst, run.worst);
                run.feed = FEED_GREEDY;
                check_run(&run, shapes[j].ranks, j == 1);
                worst = fmax(worst, run.worst);
            }
            print_message("%s, %s: off by %.2g at most\n", models[i], form_names[form], worst);
        }
        free(run.want);
    }
}

/* The forms against each other, f32 caches: the same logits; and 16-bit caches, where a value that
 * is rounded differs: the latent vector in one form, what is made of it in the other. */
static void test_forms_agree(void **state)
{
    (void)state;
    static const dcp_dtype types[] = {DCP_F32, DCP_F16, DCP_BF16};
    static const double allowed[] = {2 * 6e-4, 0.15, 0.9};
    for (int i = 0; i < N_MODELS; i++)
        for (int t = 0; t < 3; t++) {
            struct run run = {.tolerance = 1e9};
            float *seen[N_MLA_FORMS];
            double off = 0;
            /* a rounded cache may choose other experts: that is no error, and says nothing */
            if (t > 0 && strstr(models[i], "experts") != NULL) continue;
            load_case(&run, models[i]);
            for (int form = 0; form < N_MLA_FORMS; form++) {
                seen[form] = calloc((size_t)(run.n_ids * run.vocab), sizeof(float));
                run.seen = seen[form];
                run.opts = exact((enum mla_form)form, 8, 0, 1);
                run.opts.kv_dtype = types[t];
                check_run(&run, 2, false);
            }
            for (int64_t k = 0; k < run.n_ids * run.vocab; k++)
                for (int form = 1; form < N_MLA_FORMS; form++)
                    off = fmax(off, fabs((double)seen[0][k] - (double)seen[form][k]));
            print_message("%s, type %d: the forms differ by %.2g at most\n", models[i],
                          (int)types[t], off);
            assert_true(off <= allowed[t]);
            for (int form = 0; form < N_MLA_FORMS; form++) free(seen[form]);
            free(run.want);
        }
}

static void test_threads(void **state)
{
    (void)state;
    struct run run = {.tolerance = EXACT, .feed = FEED_ALL};
    load_case(&run, "mla-experts");
    run.opts = exact(MLA_ABSORBED, 16, 0, 1);
    run.opts.n_threads = 3;
    check_run(&run, 2, false);
    free(run.want);
}

/* Heads over two groups of ranks, tokens over the ranks of a group;
 * the latent cache has one head. */
static int refused_rank(dcp_group *g, void *ctx)
{
    const struct run *run = ctx;
    struct session *s = NULL;
    const int bad = open_session(g, run->model, &run->opts, &s) == DCP_OK ||
                    strstr(dcp_last_error(), "head groups") == NULL;
    session_destroy(s);
    return bad;
}

static void test_head_groups(void **state)
{
    (void)state;
    struct run run = {.tolerance = EXACT, .feed = FEED_ALL};
    load_case(&run, "mla-lite");
    run.opts = exact(MLA_EXPANDED, 9, 4, 2);
    run.opts.tp = 2;
    check_run(&run, 2, false);
    check_run(&run, 4, false);
    run.opts.mla = MLA_ABSORBED;
    assert_int_equal(ranks_threads(2, 20.0, refused_rank, &run), 0);
    free(run.want);
}

/* --- what it takes --- */

static int bytes_rank(dcp_group *g, void *ctx)
{
    const struct run *run = ctx;
    struct session *s = NULL;
    struct session_rank_report reports[8];
    const int n = dcp_group_size(g);
    char path[512];
    snprintf(path, sizeof(path), DATA "%s.gguf", run->model);
    struct gguf *file = NULL;
    struct model *m = NULL;
    int bad = open_session(g, run->model, &run->opts, &s) != DCP_OK;
    if (bad != 0) return 1;
    bad += session_step(s, run->ids, run->n_ids, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    bad += session_report(s, reports) != DCP_OK;
    bad += gguf_open(path, &file) != DCP_OK;
    for (int r = 0; r < n && bad == 0; r++) {
        const int64_t page = 64, keys = dcp_local_length(run->n_ids, n, r, 1);
        bad += model_load(file, n, r, run->opts.mla, &m) != DCP_OK;
        if (bad != 0) break;
        const uint64_t kv = (uint64_t)((keys + page - 1) / page * page) *
                            (uint64_t)model_kv_bytes(&m->cfg, run->opts.kv_dtype);
        bad += reports[r].kv_bytes != kv;
        bad += reports[r].activation_bytes !=
               forward_bytes(m, 1, run->opts.chunk, run->opts.tile_rows);
        bad += reports[r].weight_share_bytes != m->share_bytes;
        model_free(m);
    }
    gguf_close(file);
    session_destroy(s);
    return bad;
}

/* Nothing is stored twice: 576 columns a token and layer at the published sizes. */
static void test_bytes(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    static const dcp_dtype types[] = {DCP_BF16, DCP_I8, DCP_FP8_E4M3};
    for (int form = 0; form < N_MLA_FORMS; form++)
        for (int n = 1; n <= 3; n++) {
            struct run run = {.opts = exact((enum mla_form)form, 16, 4, 1)};
            load_case(&run, "mla-deepseek");
            run.opts.kv_dtype = types[n - 1];
            assert_int_equal(ranks_threads(n, 60.0, bytes_rank, &run), 0);
            free(run.want);
        }
    assert_int_equal(dcp__alloc_current(), before);
    struct gguf *file = NULL;
    struct model_config cfg;
    const struct arch *arch = NULL;
    assert_int_equal(gguf_open(DATA "mla-deepseek.gguf", &file), DCP_OK);
    assert_int_equal(model_read_config(file, &arch, &cfg), DCP_OK);
    assert_int_equal(model_kv_bytes(&cfg, DCP_BF16), 4 * 576 * 2);
    assert_int_equal(model_kv_bytes(&cfg, DCP_I8), 4 * (576 + 4)); /* one scale: latent */
    assert_int_equal(cfg.key_dim, 576);
    assert_int_equal(cfg.value_dim, 512);
    model_set_mla(&cfg, MLA_EXPANDED);
    assert_int_equal(model_kv_bytes(&cfg, DCP_BF16), 4 * 16 * (192 + 128) * 2);
    assert_int_equal(model_kv_bytes(&cfg, DCP_F32), 4 * 16 * (192 + 128) * 4);
    assert_int_equal(model_kv_bytes(&cfg, DCP_FP8_E4M3), 4 * 16 * (192 + 128 + 8));
    gguf_close(file);
}

/* Chunks beyond a tile: all but x and attention's own input and result stay as large. */
static void test_activations_are_bounded(void **state)
{
    (void)state;
    struct gguf *file = NULL;
    struct model *m = NULL;
    assert_int_equal(gguf_open(DATA "mla-deepseek.gguf", &file), DCP_OK);
    for (int form = 0; form < N_MLA_FORMS; form++) {
        assert_int_equal(model_load(file, 4, 1, (enum mla_form)form, &m), DCP_OK);
        const struct model_config *c = &m->cfg;
        const size_t at_8192 = forward_bytes(m, 1, 8192, 512);
        const size_t at_16384 = forward_bytes(m, 1, 16384, 512);
        const int64_t h_own = m->heads.end - m->heads.begin;
        /* x, q, attention's result, one index */
        const int64_t row = c->d_model + h_own * (c->key_dim + model_attn_dim(c)) + 1;
        assert_int_equal(at_16384 - at_8192, (size_t)(8192 * row) * sizeof(float));
        model_free(m);
    }
    gguf_close(file);
}

/* Steps after the first allocate nothing. */
static int allocations_rank(dcp_group *g, void *ctx)
{
    const struct run *run = ctx;
    struct session *s = NULL;
    if (open_session(g, run->model, &run->opts, &s) != DCP_OK) return 1;
    int bad = session_step(s, run->ids, 20, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    const size_t calls = dcp__alloc_calls(); /* the cache has its first page now */
    for (int n = 1; n <= 5; n++)
        bad += session_step(s, run->ids, n, NULL, NULL, NULL, NULL, NULL) != DCP_OK;
    bad += dcp__alloc_calls() != calls;
    session_destroy(s);
    return bad;
}

static void test_allocations(void **state)
{
    (void)state;
    const size_t before = dcp__alloc_current();
    for (int form = 0; form < N_MLA_FORMS; form++) {
        struct run run = {.opts = exact((enum mla_form)form, 8, 3, 1)};
        load_case(&run, "mla-experts");
        assert_int_equal(ranks_threads(1, 60.0, allocations_rank, &run), 0);
        free(run.want);
    }
    assert_int_equal(dcp__alloc_current(), before);
}

/* A weight that is no number: every rank says so, in every form, and the group works on. */
struct poison {
    char path[512];
    enum mla_form form;
};

static int poisoned_rank(dcp_group *g, void *ctx)
{
    const struct poison *p = ctx;
    static const int32_t ids[7] = {1, 2, 3, 4, 5, 6, 7};
    const struct session_opts opts = exact(p->form, 4, 3, 1);
    struct gguf *file = NULL;
    struct session *s = NULL;
    int bad = gguf_open(p->path, &file) != DCP_OK;
    bad += session_create(g, file, &opts, &s) != DCP_OK;
    for (int n = 7; n >= 1 && bad == 0; n -= 6) {
        bad += session_step(s, ids, n, NULL, NULL, NULL, NULL, NULL) != DCP_ERR_NONFINITE;
        bad += session_length(s) != 0;
    }
    session_destroy(s);
    gguf_close(file);
    bad += dcp_group_barrier(g) != DCP_OK;
    return bad;
}

static void test_weights_that_are_no_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *tensor;
        bool is_whole; /* every value, not the last alone */
    } cases[] = {{"blk.0.attn_kv_a_mqa.weight", false},
                 {"blk.1.attn_kv_b.weight", false},
                 {"blk.0.attn_kv_a_norm.weight", false},
                 {"blk.1.ffn_gate_inp.weight", true},
                 {"blk.0.ffn_down_shexp.weight", false}};
    static const float values[] = {NAN, INFINITY};
    for (int i = 0; i < 10; i++) {
        struct poison p = {.form = (enum mla_form)(i % N_MLA_FORMS)};
        const struct bytes b = file_bytes(DATA "mla-experts-softmax.gguf");
        struct gguf *file = NULL;
        assert_int_equal(gguf_open(DATA "mla-experts-softmax.gguf", &file), DCP_OK);
        const struct gguf_tensor *t = gguf_find(file, cases[i / 2].tensor);
        assert_non_null(t);
        const size_t n = t->n_bytes / sizeof(float);
        for (size_t k = cases[i / 2].is_whole ? 0 : n - 1; k < n; k++)
            memcpy(b.data + t->file_offset + k * sizeof(float), &values[i % 2], sizeof(float));
        gguf_close(file);
        snprintf(p.path, sizeof(p.path), "%s", scratch_path("mla-poisoned.gguf"));
        assert_int_equal(write_file(p.path, b.data, b.n), 0);
        free(b.data);
        for (int ranks = 1; ranks <= 3; ranks += 2)
            if (ranks_threads(ranks, 20.0, poisoned_rank, &p) != 0)
                fail_msg("%s, %s: not refused on %d ranks", cases[i / 2].tensor, form_names[p.form],
                         ranks);
        unlink(p.path);
    }
}

/* --- refusals --- */

static dcp_status try_file(const unsigned char *data, size_t n)
{
    const char *path = scratch_path("mla.gguf");
    assert_int_equal(write_file(path, data, n), 0);
    struct gguf *file = NULL;
    struct model *m = NULL;
    dcp_status st = gguf_open(path, &file);
    if (st == DCP_OK) st = model_load(file, 2, 1, MLA_ABSORBED, &m);
    model_free(m);
    gguf_close(file);
    unlink(path);
    return st;
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *model, *from, *to, *text;
        dcp_status st;
    } cases[] = {
        {"mla-uneven", "attn_kv_b.weight", "attn_kv_X.weight", "neither blk.0.attn_kv_b.weight",
         DCP_ERR_FORMAT},
        {"mla-experts", "attn_v_b.weight", "attn_v_X.weight", "attn_v_b.weight", DCP_ERR_FORMAT},
        {"mla-uneven", "attn_q_a_norm", "attn_q_X_norm", "no tensor blk.0.attn_q_a_norm.weight",
         DCP_ERR_FORMAT},
        {"mla-lite", "attn_q.weight", "attn_X.weight", "no tensor blk.0.attn_q.weight",
         DCP_ERR_FORMAT},
        {"mla-lite", "ffn_gate.weight", "ffn_gaXe.weight", "no tensor blk.0.ffn_gate.weight",
         DCP_ERR_FORMAT},
        {"mla-experts", "ffn_gate_inp", "ffn_gate_iXp", "no tensor blk.1.ffn_gate_inp.weight",
         DCP_ERR_FORMAT},
        {"mla-experts", "exp_probs_b", "exp_probs_X", "exp_probs_X.bias is not part of",
         DCP_ERR_NOT_SUPPORTED},
        {"mla-uneven", "kv_lora_rank", "kv_lorX_rank", "kv_lora_rank", DCP_ERR_FORMAT},
        {"mla-uneven", "q_lora_rank", "q_lorX_rank", "attn_q_a.weight", DCP_ERR_FORMAT},
        {"mla-uneven", "yarn_log_multiplier", "yarn_log_multipliXr", "yarn_log_multiplier 0",
         DCP_ERR_NOT_SUPPORTED},
        {"mla-uneven", "scaling.factor", "scaling.fXctor", "", DCP_OK}, /* absent: 1 */
        {"mla-experts", "expert_used_count", "expert_usXd_count", "expert_used_count",
         DCP_ERR_FORMAT},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", cases[i].model);
        const struct bytes b = file_bytes(path);
        const size_t n = strlen(cases[i].from);
        int n_found = 0;
        for (size_t at = 0; at + n <= b.n; at++)
            if (memcmp(b.data + at, cases[i].from, n) == 0) {
                memcpy(b.data + at, cases[i].to, n);
                n_found++;
            }
        assert_true(n_found > 0);
        const dcp_status st = try_file(b.data, b.n);
        if (st != cases[i].st || strstr(dcp_last_error(), cases[i].text) == NULL)
            fail_msg("%s -> %s: status %d, no \"%s\" in: %s", cases[i].from, cases[i].to, (int)st,
                     cases[i].text, dcp_last_error());
        free(b.data);
    }
}

static void test_random_damage(void **state)
{
    (void)state;
    static const char *const some[] = {"mla-uneven", "mla-experts"};
    uint64_t seed = 4711;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 2; i++) {
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", some[i]);
        const struct bytes b = file_bytes(path);
        unsigned char *copy = malloc(b.n);
        const size_t before = dcp__alloc_current();
        int n_good = 0;
        for (int k = 0; k < 300; k++) {
            memcpy(copy, b.data, b.n);
            damage(copy, k % 2 == 0 ? 1500 : 14000, &seed);
            n_good += try_file(copy, b.n) == DCP_OK ? 1 : 0;
        }
        print_message("%s: %d of 300 damaged files still load\n", some[i], n_good);
        assert_int_equal(dcp__alloc_current(), before);
        free(copy);
        free(b.data);
    }
}

int main(void)
{
    if (access(DATA "mla-lite.safetensors", R_OK) != 0) {
        fprintf(stderr, "no models in " DATA ": tests/engine/make_mla_cases.py makes them\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),      cmocka_unit_test(test_forms_agree),
        cmocka_unit_test(test_threads),     cmocka_unit_test(test_head_groups),
        cmocka_unit_test(test_bytes),       cmocka_unit_test(test_activations_are_bounded),
        cmocka_unit_test(test_allocations), cmocka_unit_test(test_weights_that_are_no_numbers),
        cmocka_unit_test(test_refusals),    cmocka_unit_test(test_random_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
