/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn perplexity: -log p of every token of a text given those before it. */
#include <math.h>
#include <stdlib.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/json_out.h"
#include "cli/message.h"
#include "cli/model_run.h"
#include "cli/progress.h"
#include "cli/utf8.h"

struct perplexity_values {
    struct model_opts run;
    const char *prompt, *file;
    bool parse_special, json;
};

#define AT(field) offsetof(struct perplexity_values, field)
static const struct option_def perplexity_options[] = {
    MODEL_OPTION(struct perplexity_values, run),
    {"prompt", 'p', OPT_STRING, AT(prompt), "TEXT", 0, 0, NULL, "the text"},
    {"file", 'f', OPT_STRING, AT(file), "FILE", 0, 0, NULL,
     "the text, byte for byte; - is standard input"},
    {"parse-special", 0, OPT_FLAG, AT(parse_special), NULL, 0, 0, NULL,
     "control tokens spelled out in the text become control tokens"},
    MODEL_OPTIONS(struct perplexity_values, run),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def perplexity_command = {
    "perplexity",
    "",
    0,
    0,
    "Print -log p (natural logarithm) of every token of a text given all before it, and the\n"
    "perplexity. Begin-of-text comes first where the model says so.",
    perplexity_options,
    sizeof(perplexity_options) / sizeof(perplexity_options[0]),
    NULL};

struct perplexity_run {
    const struct perplexity_values *v;
    struct model_file model;
    struct token_list ids;
};

/* Rank 0 alone takes the logarithms. */
struct scorer {
    const struct token_list *ids;
    int32_t n_vocab;
    double *nll; /* [n - 1]; NULL on other ranks */
};

static dcp_status score(void *ctx, int64_t index, const float *logits)
{
    struct scorer *s = ctx;
    if (s->nll == NULL || (size_t)index + 1 >= s->ids->n) return DCP_OK;
    float largest = logits[0];
    for (int32_t i = 1; i < s->n_vocab; i++) largest = fmaxf(largest, logits[i]);
    double sum = 0.0;
    for (int32_t i = 0; i < s->n_vocab; i++) sum += (double)expf(logits[i] - largest);
    s->nll[index] = log(sum) + (double)largest - (double)logits[s->ids->ids[index + 1]];
    if (!isfinite(s->nll[index]))
        return dcp__fail(DCP_ERR_NONFINITE, "-log p of token %lld is not finite",
                         (long long)index + 1);
    return DCP_OK;
}

static void print_result(const struct perplexity_run *run, const double *nll)
{
    const size_t n = run->ids.n - 1;
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) sum += nll[i];
    const double perplexity = exp(sum / (double)n);
    if (run->v->json) {
        struct json_out j;
        jout_begin(&j, stdout);
        jout_ints32(&j, "ids", run->ids.ids, run->ids.n);
        jout_array(&j, "nll");
        for (size_t i = 0; i < n; i++) jout_num(&j, NULL, nll[i]);
        jout_array_end(&j);
        jout_num(&j, "perplexity", perplexity);
        jout_end(&j);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const char *piece = "";
        size_t n_bytes = 0;
        const int32_t id = run->ids.ids[i + 1];
        if (tokenizer_piece(run->model.tokenizer, id, &piece, &n_bytes) != DCP_OK) n_bytes = 0;
        printf("%6zu  %8d  %9.5f  ", i + 1, id, nll[i]);
        utf8_print_escaped(stdout, piece, n_bytes);
        putchar('\n');
    }
    printf("perplexity %.5f over %zu token%s\n", perplexity, n, message_s((int64_t)n));
}

static int perplexity_rank_main(dcp_group *g, void *ctx)
{
    const struct perplexity_run *run = ctx;
    struct session *s = NULL;
    struct scorer scorer = {&run->ids, 0, NULL};
    struct binding binding;
    struct progress bar;
    const float *last = NULL;
    const int64_t n = (int64_t)run->ids.n;
    dcp_status st = DCP_OK;
    if (dcp_group_rank(g) == 0)
        st = dcp__alloc_array(run->ids.n, sizeof(double), "-log p", (void **)&scorer.nll);
    if (!all_ranks_ok(g, st) || !model_binding(g, &run->v->run, &binding)) {
        dcp__free(scorer.nll);
        return EXIT_FAILED;
    }
    const int64_t context = run->v->run.context > 0 ? run->v->run.context : n;
    st = model_session(g, &run->model, &run->v->run, &binding, &run->ids, context, &s);
    if (st == DCP_OK) {
        scorer.n_vocab = session_vocab(s);
        progress_begin(&bar, "text", dcp_group_rank(g) == 0);
        st = session_step(s, run->ids.ids, n, score, &scorer, progress_show, &bar, &last);
        progress_end(&bar);
    }
    int rc = EXIT_DONE;
    if (st != DCP_OK) {
        rc = rank_failed(g, st);
    } else if (dcp_group_rank(g) == 0) {
        print_result(run, scorer.nll);
        rc = finish_stdout(EXIT_DONE);
    }
    session_destroy(s);
    dcp__free(scorer.nll);
    return rc;
}

int cmd_perplexity(int argc, char **argv)
{
    struct perplexity_values v = {.run = MODEL_OPTS_INIT};
    struct perplexity_run run = {.v = &v};
    char *text = NULL;
    size_t n_bytes;
    int n_operands, rc;
    if (!command_parse(&perplexity_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (v.run.model == NULL) return usage_error(&perplexity_command, "-m FILE|NAME must be given");
    if (tp_is_wrong(&perplexity_command, &v.run.rank, v.run.tp)) return EXIT_USAGE;
    rc = model_text(&perplexity_command, v.prompt, v.file, &text, &n_bytes);
    if (rc != EXIT_DONE) return rc;
    const unsigned flags = TOK_ADD_BOS | (v.parse_special ? TOK_PARSE_SPECIAL : 0u);
    dcp_status st = model_open(v.run.model, &run.model);
    if (st == DCP_OK) st = model_check_options(&run.model, &v.run);
    if (st == DCP_OK) st = tokenizer_encode(run.model.tokenizer, text, n_bytes, flags, &run.ids);
    if (st == DCP_OK && run.ids.n < 2)
        st = dcp__fail(DCP_ERR_ARG, "the text has %zu token%s; perplexity needs at least 2",
                       run.ids.n, message_s((int64_t)run.ids.n));
    const int64_t trained = run.model.trained_context;
    if (st == DCP_OK && v.run.context == 0 && trained > 0 && (int64_t)run.ids.n > trained)
        st = dcp__fail(DCP_ERR_ARG,
                       "the text has %zu tokens; the model was trained for %lld (give --context to "
                       "go beyond)",
                       run.ids.n, (long long)trained);
    if (st == DCP_OK && v.run.context > 0 && (uint64_t)v.run.context < run.ids.n)
        st = dcp__fail(DCP_ERR_ARG, "the text has %zu token%s but --context is %lld", run.ids.n,
                       message_s((int64_t)run.ids.n), (long long)v.run.context);
    rc = st == DCP_OK ? run_on_ranks(&v.run.rank, v.run.rank.ranks, perplexity_rank_main, &run)
                      : failed();
    token_list_free(&run.ids);
    model_close(&run.model);
    free(text);
    return rc;
}
