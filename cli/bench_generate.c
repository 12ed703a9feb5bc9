/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn bench generate: tokens per second of a prompt and of single tokens at several depths of
 * context, under the names that other benches use: pp512, tg32 @ d4096. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/bench_list.h"
#include "cli/bench_machine.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/model_run.h"
#include "cli/table.h"

enum { MAX_REPS = 100, N_TESTS_MAX = 2 * BENCH_MAX_ITEMS, N_COLUMNS = 11 };

struct bench_generate_values {
    struct model_opts run;
    const char *depth_text, *fill;
    int64_t prompt, tokens, reps;
    bool json;
    double factor;
    struct bench_list depths;
};

#define AT(field) offsetof(struct bench_generate_values, field)
static const struct option_def bench_generate_options[] = {
    MODEL_OPTION(struct bench_generate_values, run),
    {"prompt-tokens", 'p', OPT_INT, AT(prompt), "N", 0, 1 << 20, NULL,
     "tokens of the prompt test; 0 leaves it out (default 512)"},
    {"tokens", 'g', OPT_INT, AT(tokens), "N", 0, 1 << 20, NULL,
     "tokens generated one at a time; 0 leaves it out (default 32)"},
    {"depth", 'd', OPT_STRING, AT(depth_text), "LIST", 0, 0, NULL,
     "tokens of context before the test: 0,4096 or 1K..128K (default 0)"},
    {"factor", 0, OPT_FLOAT, AT(factor), "F", 1.01, 1e6, NULL,
     "from one depth of A..B to the next, B at the end (default 4)"},
    {"fill", 0, OPT_STRING, AT(fill), "HOW", 0, 0, NULL,
     "how that context comes: prompt, or random keys and values, which take less long (default "
     "prompt)"},
    {"reps", 'r', OPT_INT, AT(reps), "N", 1, MAX_REPS, NULL, "times of each test (default 3)"},
    MODEL_OPTIONS(struct bench_generate_values, run),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def bench_generate_command = {
    "bench generate",
    "",
    0,
    0,
    "Tokens per second of a model whose KV cache is sharded over ranks: ppN is a prompt of N\n"
    "tokens, tgN are N tokens one at a time, @ dD says that D tokens lie in the cache before.",
    bench_generate_options,
    sizeof(bench_generate_options) / sizeof(bench_generate_options[0]),
    "Ids are drawn from the vocabulary by a fixed rule; sampling is not timed. Shares of time are\n"
    "rank 0's; peak (counted allocations) and workspace (of attention) the largest rank's."};

struct test_result {
    int64_t n_tokens, depth;
    bool is_prompt;
    int n_reps;
    double seconds[MAX_REPS];                                  /* sorted at the end */
    double attend, merge, gather, dense, other;                /* shares of all repetitions */
    uint64_t workspace_bytes, peak_bytes, kv_bytes, rss_bytes; /* largest of the ranks */
};

struct bench_generate_run {
    const struct bench_generate_values *v;
    struct model_file model;
    struct token_list ids; /* enough for the deepest test */
    int64_t context;
    int cpus_usable; /* before ranks were bound */
    bool is_filled;  /* the context is no prompt's */
};

/* The tokens of one repetition, from the same state each time. */
static dcp_status run_once(struct session *s, const struct bench_generate_run *run,
                           const struct test_result *t, double *seconds_out)
{
    const float *logits = NULL;
    const int32_t *ids = run->ids.ids + t->depth;
    DCP_TRY(session_truncate(s, t->depth));
    const double begin = dcp__now_s();
    if (t->is_prompt) {
        DCP_TRY(session_step(s, ids, t->n_tokens, NULL, NULL, NULL, NULL, &logits));
    } else {
        for (int64_t i = 0; i < t->n_tokens; i++)
            DCP_TRY(session_step(s, ids + i, 1, NULL, NULL, NULL, NULL, &logits));
    }
    *seconds_out = dcp__now_s() - begin;
    return DCP_OK;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dcp_status run_test(struct session *s, const struct bench_generate_run *run,
                           struct session_rank_report *reports, int n_ranks, struct test_result *t)
{
    const float *logits = NULL;
    double warm_up;
    const int64_t have = session_length(s);
    if (have > t->depth) {
        DCP_TRY(session_truncate(s, t->depth));
    } else if (have < t->depth && run->is_filled) {
        DCP_TRY(session_fill(s, t->depth));
    } else if (have < t->depth) {
        DCP_TRY(
            session_step(s, run->ids.ids + have, t->depth - have, NULL, NULL, NULL, NULL, &logits));
    }
    DCP_TRY(run_once(s, run, t, &warm_up));
    session_reset_times(s);
    for (int i = 0; i < t->n_reps; i++) DCP_TRY(run_once(s, run, t, &t->seconds[i]));
    qsort(t->seconds, (size_t)t->n_reps, sizeof(t->seconds[0]), by_value);
    DCP_TRY(session_report(s, reports));
    const struct session_rank_report *r = &reports[0];
    if (r->total_s > 0) {
        t->attend = r->attend_s / r->total_s;
        t->merge = r->merge_s / r->total_s;
        t->gather = r->gather_s / r->total_s;
        t->dense = r->dense_s / r->total_s;
        t->other = r->other_s / r->total_s;
    }
    for (int i = 0; i < n_ranks; i++, r++) {
        if (r->workspace_bytes > t->workspace_bytes) t->workspace_bytes = r->workspace_bytes;
        if (r->peak_counted_bytes > t->peak_bytes) t->peak_bytes = r->peak_counted_bytes;
        if (r->kv_bytes > t->kv_bytes) t->kv_bytes = r->kv_bytes;
        if (r->peak_rss_bytes > t->rss_bytes) t->rss_bytes = r->peak_rss_bytes;
    }
    return DCP_OK;
}

static double median_rate(const struct test_result *t)
{
    return (double)t->n_tokens / t->seconds[t->n_reps / 2];
}
static double best_rate(const struct test_result *t)
{
    return (double)t->n_tokens / t->seconds[0];
}

static void test_name(const struct test_result *t, char *buf, size_t n_bytes)
{
    const char *kind = t->is_prompt ? "pp" : "tg";
    if (t->depth == 0) {
        snprintf(buf, n_bytes, "%s%lld", kind, (long long)t->n_tokens);
    } else {
        snprintf(buf, n_bytes, "%s%lld @ d%lld", kind, (long long)t->n_tokens, (long long)t->depth);
    }
}

static void print_results(dcp_group *g, const struct bench_generate_run *run,
                          const struct test_result *tests, int n_tests)
{
    static const char *const heads[N_COLUMNS] = {"test",  "median t/s", "best t/s", "reps",
                                                 "attn",  "merge",      "gather",   "dense",
                                                 "other", "workspace",  "peak"};
    char cells[N_TESTS_MAX + 1][N_COLUMNS][TABLE_CELL_BYTES];
    for (int c = 0; c < N_COLUMNS; c++) snprintf(cells[0][c], TABLE_CELL_BYTES, "%s", heads[c]);
    for (int i = 0; i < n_tests; i++) {
        const struct test_result *t = &tests[i];
        const double shares[] = {t->attend, t->merge, t->gather, t->dense, t->other};
        test_name(t, cells[i + 1][0], TABLE_CELL_BYTES);
        snprintf(cells[i + 1][1], TABLE_CELL_BYTES, "%.1f", median_rate(t));
        snprintf(cells[i + 1][2], TABLE_CELL_BYTES, "%.1f", best_rate(t));
        snprintf(cells[i + 1][3], TABLE_CELL_BYTES, "%d", t->n_reps);
        for (int c = 0; c < 5; c++)
            snprintf(cells[i + 1][4 + c], TABLE_CELL_BYTES, "%.0f%%", 100.0 * shares[c]);
        table_bytes(t->workspace_bytes, cells[i + 1][9]);
        table_bytes(t->peak_bytes, cells[i + 1][10]);
    }
    printf("%s, %d rank%s (%s)\n", run->model.path, dcp_group_size(g),
           dcp_group_size(g) == 1 ? "" : "s", dcp_group_kind(g));
    if (run->is_filled) printf("context filled with random keys and values, not by a prompt\n");
    table_print(stdout, n_tests + 1, N_COLUMNS, &cells[0][0]);
}

static void print_json(dcp_group *g, const struct bench_generate_run *run,
                       const struct test_result *tests, int n_tests)
{
    struct json_out j;
    struct dcp__cpu cpu;
    char kv[16];
    dcp_isa isa = DCP_ISA_DEFAULT;
    int64_t n_threads = run->v->run.rank.threads;
    if (n_threads == 0) n_threads = run->cpus_usable / dcp_group_size(g);
    if (n_threads < 1) n_threads = 1;
    dcp__cpu_detect(&cpu);
    (void)dcp__isa_choose(DCP_ISA_DEFAULT, &isa);
    options_choice(DTYPE_CHOICES, run->v->run.kv_dtype, kv, sizeof(kv));
    jout_begin(&j, stdout);
    jout_object(&j, "machine");
    jout_str(&j, "cpu", cpu.brand);
    jout_int(&j, "cpus_usable", run->cpus_usable);
    jout_num(&j, "load_after", bench_load());
    jout_str(&j, "version", dcp_version());
    jout_object_end(&j);
    jout_str(&j, "model", run->model.path);
    jout_int(&j, "ranks", dcp_group_size(g));
    jout_int(&j, "threads", n_threads);
    jout_str(&j, "comm", dcp_group_kind(g));
    jout_str(&j, "fill", run->is_filled ? "random" : "prompt");
    jout_array(&j, "rows");
    for (int i = 0; i < n_tests; i++) {
        const struct test_result *t = &tests[i];
        char name[TABLE_CELL_BYTES];
        test_name(t, name, sizeof(name));
        jout_object(&j, NULL);
        jout_str(&j, "case", "generate");
        jout_str(&j, "test", name);
        jout_int(&j, "keys", t->depth);
        jout_int(&j, "tokens", t->n_tokens);
        jout_int(&j, "depth", t->depth);
        jout_int(&j, "ranks", dcp_group_size(g));
        jout_int(&j, "threads", n_threads);
        jout_str(&j, "dtype", strcmp(kv, "auto") == 0 ? "bf16" : kv);
        jout_str(&j, "isa", dcp__isa_name(isa));
        jout_object(&j, "time_us");
        jout_num(&j, "min", t->seconds[0] * 1e6);
        jout_num(&j, "median", t->seconds[t->n_reps / 2] * 1e6);
        jout_object_end(&j);
        jout_num(&j, "tokens_per_s_median", median_rate(t));
        jout_num(&j, "tokens_per_s_best", best_rate(t));
        jout_array(&j, "seconds");
        for (int r = 0; r < t->n_reps; r++) jout_num(&j, NULL, t->seconds[r]);
        jout_array_end(&j);
        jout_num(&j, "attend_share", t->attend);
        jout_num(&j, "merge_share", t->merge);
        jout_num(&j, "gather_share", t->gather);
        jout_num(&j, "dense_share", t->dense);
        jout_num(&j, "other_share", t->other);
        jout_int(&j, "workspace_bytes", (int64_t)t->workspace_bytes);
        jout_int(&j, "kv_bytes", (int64_t)t->kv_bytes);
        jout_int(&j, "peak_bytes", (int64_t)t->peak_bytes);
        jout_int(&j, "peak_rss_bytes", (int64_t)t->rss_bytes);
        jout_object_end(&j);
    }
    jout_array_end(&j);
    jout_end(&j);
}

static dcp_status run_tests(dcp_group *g, const struct bench_generate_run *run, struct session *s,
                            struct session_rank_report *reports)
{
    static _Thread_local struct test_result tests[N_TESTS_MAX];
    const struct bench_generate_values *v = run->v;
    int n_tests = 0;
    memset(tests, 0, sizeof(tests));
    for (int d = 0; d < v->depths.n; d++) {
        for (int k = 0; k < 2; k++) {
            const int64_t n = k == 0 ? v->prompt : v->tokens;
            if (n == 0) continue;
            struct test_result *t = &tests[n_tests++];
            t->n_tokens = n;
            t->depth = v->depths.at[d];
            t->is_prompt = k == 0;
            t->n_reps = (int)v->reps;
            DCP_TRY(run_test(s, run, reports, dcp_group_size(g), t));
        }
    }
    if (dcp_group_rank(g) == 0) {
        if (v->json)
            print_json(g, run, tests, n_tests);
        else
            print_results(g, run, tests, n_tests);
    }
    return DCP_OK;
}

static int bench_generate_rank_main(dcp_group *g, void *ctx)
{
    const struct bench_generate_run *run = ctx;
    struct session *s = NULL;
    struct session_rank_report *reports = NULL;
    struct binding binding;
    dcp_status st =
        dcp__alloc_array((size_t)dcp_group_size(g), sizeof(*reports), "reports", (void **)&reports);
    if (!all_ranks_ok(g, st) || !model_binding(g, &run->v->run, &binding)) {
        dcp__free(reports);
        return EXIT_FAILED;
    }
    st = model_session(g, &run->model, &run->v->run, &binding, &run->ids, run->context, &s);
    if (st == DCP_OK) st = run_tests(g, run, s, reports);
    int rc = EXIT_DONE;
    if (st != DCP_OK)
        rc = rank_failed(g, st);
    else if (dcp_group_rank(g) == 0)
        rc = finish_stdout(EXIT_DONE);
    session_destroy(s);
    dcp__free(reports);
    return rc;
}

/* Ids spread over the vocabulary by a linear congruence; control tokens are ids like others. */
static dcp_status draw_ids(struct bench_generate_run *run, int64_t n)
{
    const uint64_t vocab = (uint64_t)tokenizer_vocab_size(run->model.tokenizer);
    uint64_t x = 1;
    for (int64_t i = 0; i < n; i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        DCP_TRY(token_list_push(&run->ids, (int32_t)((x >> 33) % vocab)));
    }
    return DCP_OK;
}

/* Ids are drawn before a cache is asked for, so what is absurd ends here. */
enum { MAX_DEPTH = 1 << 24 };

int bench_generate(int argc, char **argv)
{
    struct bench_generate_values v = {
        .run = MODEL_OPTS_INIT, .prompt = 512, .tokens = 32, .reps = 3, .factor = 4};
    struct bench_generate_run run = {.v = &v, .cpus_usable = dcp__cpu_usable()};
    int n_operands, rc;
    if (!command_parse(&bench_generate_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (v.run.model == NULL)
        return usage_error(&bench_generate_command, "-m FILE|NAME must be given");
    if (tp_is_wrong(&bench_generate_command, &v.run.rank, v.run.tp)) return EXIT_USAGE;
    if (!bench_read_list(v.depth_text != NULL ? v.depth_text : "0", v.factor, 0, MAX_DEPTH,
                         &v.depths))
        return usage_error(&bench_generate_command,
                           "--depth: '%s' is not a list of up to %d numbers from 0 to %d, "
                           "between commas, or of ranges A..B",
                           v.depth_text, BENCH_MAX_ITEMS, MAX_DEPTH);
    run.is_filled = v.fill != NULL && strcmp(v.fill, "random") == 0;
    if (v.fill != NULL && !run.is_filled && strcmp(v.fill, "prompt") != 0)
        return usage_error(&bench_generate_command, "--fill is '%s'; prompt and random are known",
                           v.fill);
    if (v.prompt == 0 && v.tokens == 0)
        return usage_error(&bench_generate_command, "--prompt-tokens and --tokens are both 0");
    int64_t deepest = 0;
    for (int d = 0; d < v.depths.n; d++)
        if (v.depths.at[d] > deepest) deepest = v.depths.at[d];
    run.context = deepest + (v.prompt > v.tokens ? v.prompt : v.tokens);
    if (v.run.context > 0 && v.run.context < run.context)
        return usage_error(&bench_generate_command,
                           "--context is %lld, but the deepest test needs %lld tokens",
                           (long long)v.run.context, (long long)run.context);
    dcp_status st = model_open(v.run.model, &run.model);
    if (st == DCP_OK) st = model_check_options(&run.model, &v.run);
    if (st == DCP_OK) st = draw_ids(&run, run.context);
    rc = st == DCP_OK ? run_on_ranks(&v.run.rank, v.run.rank.ranks, bench_generate_rank_main, &run)
                      : failed();
    token_list_free(&run.ids);
    model_close(&run.model);
    return rc;
}
