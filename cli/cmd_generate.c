/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn generate: the prompt and then one token at a time through a session on every rank. Rank
 * 0 chooses each token and tells the others, so that ranks cannot part ways. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/status_priv.h"
#include "cli/generate_report.h"
#include "cli/message.h"
#include "cli/model_run.h"
#include "cli/progress.h"
#include "cli/utf8.h"
#include "engine/chat.h"
#include "engine/safetensors.h"
#include "engine/sampler.h"

enum { ROOM_OF_A_PIPE = 4096 }; /* PIPE_BUF: what POLLOUT of a pipe promises room for */

struct generate_values {
    struct model_opts run;
    const char *prompt, *file, *system, *logits;
    bool raw, parse_special, json;
    int64_t max_tokens, seed, top_k;
    double temp, top_p, min_p;
};

#define AT(field) offsetof(struct generate_values, field)
static const struct option_def generate_options[] = {
    MODEL_OPTION(struct generate_values, run),
    {"prompt", 'p', OPT_STRING, AT(prompt), "TEXT", 0, 0, NULL, "what the user says"},
    {"file", 'f', OPT_STRING, AT(file), "FILE", 0, 0, NULL,
     "the same from a file, byte for byte; - is standard input"},
    {"system", 0, OPT_STRING, AT(system), "TEXT", 0, 0, NULL,
     "the system message (default: the template's own)"},
    {"raw", 0, OPT_FLAG, AT(raw), NULL, 0, 0, NULL,
     "continue the text as it is, without a chat template"},
    {"parse-special", 0, OPT_FLAG, AT(parse_special), NULL, 0, 0, NULL,
     "control tokens spelled out in the text become control tokens"},
    {"max-tokens", 0, OPT_INT, AT(max_tokens), "N", 1, 1e12, NULL,
     "tokens to generate at most (default 256)"},
    {"temp", 0, OPT_FLOAT, AT(temp), "T", 0, 100, NULL,
     "temperature; 0 takes the likeliest token (default 0)"},
    {"top-k", 0, OPT_INT, AT(top_k), "K", 0, 1 << 30, NULL,
     "only the K likeliest tokens; 0 is off (default 0)"},
    {"top-p", 0, OPT_FLOAT, AT(top_p), "P", 1e-9, 1, NULL,
     "the likeliest tokens that make up P together (default 1)"},
    {"min-p", 0, OPT_FLOAT, AT(min_p), "P", 0, 1, NULL,
     "tokens at least P times as likely as the likeliest (default 0)"},
    {"seed", 0, OPT_INT, AT(seed), "N", 0, 9.2e18, NULL, "seed of the draws (default 0)"},
    MODEL_OPTIONS(struct generate_values, run),
    {"logits", 0, OPT_STRING, AT(logits), "FILE", 0, 0, NULL,
     "write logits [k, vocab]: row i is what token i was chosen from"},
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout, nothing else"},
};
#undef AT

static const struct command_def generate_command = {
    "generate",
    "",
    0,
    0,
    "Run a model whose KV cache is sharded by token over ranks. The answer goes to stdout as it\n"
    "comes, a table of what each rank owned and did to stderr at the end.",
    generate_options,
    sizeof(generate_options) / sizeof(generate_options[0]),
    NULL};

/* Made before the ranks start, read-only afterwards. */
struct generate_run {
    const struct generate_values *v;
    struct model_file model;
    struct token_list prompt;
    int64_t context;
};

/* Rank 0's side: choosing, printing, keeping logits. */
struct speaker {
    const struct generate_run *run;
    struct sampler *sampler;
    char *text; /* all of the answer */
    size_t n_text, text_room, n_printed;
    float **rows; /* logits kept, for --logits */
    size_t n_rows, rows_room;
    int32_t n_vocab;
    bool is_stdout_gone;
};

/* True if a write of up to 4 KiB to stdout will not wait, or will fail at once. */
static bool stdout_is_ready(void)
{
    struct pollfd p = {STDOUT_FILENO, POLLOUT, 0};
    return poll(&p, 1, 0) != 0;
}

/* Append to the answer and print what is whole: a character may come in several tokens. A reader
 * that does not read (a pager, a stopped terminal) must not hold up the ranks, whose waits for this
 * one have a deadline: until the last call text is kept instead,
 * and goes out when there is room. */
static dcp_status say(struct speaker *s, int32_t id, bool is_last)
{
    const char *piece = "";
    size_t n = 0;
    if (id >= 0) DCP_TRY(tokenizer_piece(s->run->model.tokenizer, id, &piece, &n));
    if (s->n_text + n + 1 > s->text_room) {
        const size_t room = 2 * (s->n_text + n + 1);
        char *grown = realloc(s->text, room);
        if (grown == NULL) return dcp__fail(DCP_ERR_NOMEM, "no memory for %zu bytes of text", room);
        s->text = grown;
        s->text_room = room;
    }
    if (n > 0) memcpy(s->text + s->n_text, piece, n);
    s->n_text += n;
    if (s->run->v->json) return DCP_OK;
    const char *fresh = s->text + s->n_printed;
    size_t n_fresh = s->n_text - s->n_printed;
    if (!is_last) {
        if (!stdout_is_ready()) return DCP_OK;
        if (n_fresh > ROOM_OF_A_PIPE) n_fresh = ROOM_OF_A_PIPE;
        n_fresh -= utf8_incomplete_tail(fresh, n_fresh);
    }
    if (n_fresh > 0) fwrite(fresh, 1, n_fresh, stdout);
    s->n_printed += n_fresh;
    if (is_last) putchar('\n');
    s->is_stdout_gone = !flush_stdout();
    return DCP_OK;
}

static dcp_status keep_logits(struct speaker *s, const float *logits)
{
    if (s->run->v->logits == NULL) return DCP_OK;
    if (s->n_rows == s->rows_room) {
        const size_t room = s->rows_room == 0 ? 64 : 2 * s->rows_room;
        float **grown = realloc(s->rows, room * sizeof(*grown));
        if (grown == NULL) return dcp__fail(DCP_ERR_NOMEM, "no memory for %zu rows", room);
        s->rows = grown;
        s->rows_room = room;
    }
    void *row = NULL;
    const size_t n_bytes = (size_t)s->n_vocab * sizeof(float);
    DCP_TRY(dcp__alloc(n_bytes, "a row of logits", &row));
    memcpy(row, logits, n_bytes);
    s->rows[s->n_rows++] = row;
    return DCP_OK;
}

static dcp_status write_logits(const struct speaker *s)
{
    struct st_writer *w = NULL;
    if (s->run->v->logits == NULL) return DCP_OK;
    const struct st_decl decl = {"logits", ST_F32, 2, {(int64_t)s->n_rows, s->n_vocab}};
    DCP_TRY(st_writer_create(s->run->v->logits, &decl, 1, &w));
    for (size_t i = 0; i < s->n_rows; i++) {
        const dcp_status st = st_writer_append(w, s->rows[i], (size_t)s->n_vocab * sizeof(float));
        if (st != DCP_OK) {
            st_writer_abandon(w);
            return st;
        }
    }
    return st_writer_finish(w);
}

static void free_speaker(struct speaker *s)
{
    for (size_t i = 0; i < s->n_rows; i++) dcp__free(s->rows[i]);
    free(s->rows);
    free(s->text);
    sampler_destroy(s->sampler);
}

static dcp_status start_speaker(const struct generate_run *run, int32_t n_vocab, struct speaker *s)
{
    const struct generate_values *v = run->v;
    const struct sampler_opts opts = {(float)v->temp, (int32_t)v->top_k, (float)v->top_p,
                                      (float)v->min_p, (uint64_t)v->seed};
    s->run = run;
    s->n_vocab = n_vocab;
    if (v->logits != NULL) DCP_TRY(st_writer_probe(v->logits)); /* now, not after the whole run */
    return sampler_create(&opts, n_vocab, &s->sampler);
}

/* Rank 0's choice as the others hear it. */
struct choice {
    int32_t id;
    int32_t status;
    int32_t stop; /* 1: rank 0 cannot print any more */
};

static dcp_status choose(struct speaker *s, const float *logits, struct choice *c)
{
    c->status = (int32_t)keep_logits(s, logits);
    if (c->status == DCP_OK) c->status = (int32_t)sampler_next(s->sampler, logits, &c->id);
    if (c->status == DCP_OK && !tokenizer_is_end(s->run->model.tokenizer, c->id))
        c->status = (int32_t)say(s, c->id, false);
    c->stop = s->is_stdout_gone;
    return (dcp_status)c->status;
}

/* Collective: the next id on every rank. all [size]. */
static dcp_status next_id(dcp_group *g, struct speaker *s, const float *logits, struct choice *all,
                          struct choice *c)
{
    struct choice mine = {0, 0, 0};
    dcp_status local = DCP_OK;
    if (dcp_group_rank(g) == 0) local = choose(s, logits, &mine);
    char text[512] = "";
    if (local != DCP_OK) snprintf(text, sizeof(text), "%s", dcp_last_error());
    DCP_TRY(dcp_group_allgather(g, &mine, sizeof(mine), all));
    *c = all[0];
    if (local != DCP_OK) return dcp__fail(local, "%s", text);
    if (c->status != DCP_OK)
        return dcp__fail(DCP_ERR_PEER, "rank 0 could not choose a token: %s",
                         dcp_status_text((dcp_status)c->status));
    return DCP_OK;
}

/* What a run gave, besides rank 0's text. */
struct outcome {
    struct token_list ids;
    struct generate_times times;
    const char *stop;
};

static dcp_status generate_loop(dcp_group *g, const struct generate_run *run, struct session *s,
                                struct speaker *speaker, struct choice *all, struct outcome *o)
{
    struct progress bar;
    const float *logits = NULL;
    const double begin_s = dcp__now_s();
    progress_begin(&bar, "prompt", dcp_group_rank(g) == 0);
    dcp_status st = session_step(s, run->prompt.ids, (int64_t)run->prompt.n, NULL, NULL,
                                 progress_show, &bar, &logits);
    progress_end(&bar);
    o->times.prompt_s = dcp__now_s() - begin_s;
    o->stop = "max-tokens";
    const double first_s = dcp__now_s();
    while (st == DCP_OK) {
        struct choice c;
        st = next_id(g, speaker, logits, all, &c);
        if (st == DCP_OK) st = token_list_push(&o->ids, c.id);
        if (st != DCP_OK) break;
        if (tokenizer_is_end(run->model.tokenizer, c.id)) {
            o->stop = "end";
            break;
        }
        if (c.stop) {
            o->stop = "stdout";
            break;
        }
        if ((int64_t)o->ids.n >= run->v->max_tokens) break;
        if (session_length(s) >= session_context(s)) {
            o->stop = "context";
            break;
        }
        st = session_step(s, &c.id, 1, NULL, NULL, NULL, NULL, &logits);
        o->times.n_steps++;
    }
    o->times.generate_s = dcp__now_s() - first_s;
    return st;
}

/* Collective: every rank's figures, then rank 0 prints. */
static int report(dcp_group *g, const struct generate_run *run, struct session *s,
                  struct speaker *speaker, const struct outcome *o)
{
    struct session_rank_report *ranks = NULL;
    dcp_status st =
        dcp__alloc_array((size_t)dcp_group_size(g), sizeof(*ranks), "reports", (void **)&ranks);
    if (!all_ranks_ok(g, st)) return EXIT_FAILED;
    st = session_report(s, ranks);
    if (st != DCP_OK) {
        dcp__free(ranks);
        return rank_failed(g, st);
    }
    int rc = EXIT_DONE;
    if (dcp_group_rank(g) == 0) {
        if (say(speaker, -1, true) != DCP_OK)
            rc = failed(); /* nobody waits for this rank any more */
        const struct generate_report r = {.n_ranks = dcp_group_size(g),
                                          .comm = dcp_group_kind(g),
                                          .ranks = ranks,
                                          .replicated_names = session_replicated_names(s),
                                          .prompt = &run->prompt,
                                          .ids = &o->ids,
                                          .text = speaker->text,
                                          .n_text_bytes = speaker->n_text,
                                          .stop = o->stop,
                                          .context = session_context(s),
                                          .times = o->times};
        if (run->v->json) {
            generate_report_json(&r, stdout);
        } else if (!stdout_has_no_reader()) {
            generate_report_table(&r, stderr);
        }
        rc = finish_stdout(rc);
        if (write_logits(speaker) != DCP_OK) rc = failed();
    }
    dcp__free(ranks);
    return rc;
}

static int generate_body(dcp_group *g, const struct generate_run *run, struct session **session,
                         struct speaker *speaker, struct choice **all, struct outcome *o)
{
    struct binding binding;
    if (!model_binding(g, &run->v->run, &binding)) return EXIT_FAILED;
    dcp_status st =
        model_session(g, &run->model, &run->v->run, &binding, &run->prompt, run->context, session);
    if (st != DCP_OK) return rank_failed(g, st);
    st = dcp__alloc_array((size_t)dcp_group_size(g), sizeof(**all), "choices", (void **)all);
    if (st == DCP_OK && dcp_group_rank(g) == 0)
        st = start_speaker(run, session_vocab(*session), speaker);
    if (!all_ranks_ok(g, st)) return EXIT_FAILED;
    st = generate_loop(g, run, *session, speaker, *all, o);
    if (st != DCP_OK) {
        const int rc = rank_failed(g, st); /* first: what follows may wait for a reader */
        if (speaker->n_text > 0) (void)say(speaker, -1, true);
        return rc;
    }
    return report(g, run, *session, speaker, o);
}

static int generate_rank_main(dcp_group *g, void *ctx)
{
    struct session *session = NULL;
    struct speaker speaker = {0};
    struct choice *all = NULL;
    struct outcome o = {0};
    const int rc = generate_body(g, ctx, &session, &speaker, &all, &o);
    session_destroy(session);
    token_list_free(&o.ids);
    free_speaker(&speaker);
    dcp__free(all);
    return rc;
}

static dcp_status encode_prompt(struct generate_run *run, const char *text, size_t n_bytes)
{
    const struct generate_values *v = run->v;
    const unsigned special = v->parse_special ? TOK_PARSE_SPECIAL : 0u;
    if (v->raw)
        return tokenizer_encode(run->model.tokenizer, text, n_bytes, TOK_ADD_BOS | special,
                                &run->prompt);
    const struct chat_message messages[2] = {
        {"system", v->system, v->system != NULL ? strlen(v->system) : 0}, {"user", text, n_bytes}};
    const size_t skip = v->system == NULL ? 1 : 0;
    return chat_encode(run->model.file, run->model.tokenizer, messages + skip, 2 - skip, special,
                       &run->prompt);
}

/* Context for the run: what was asked for, else prompt and answer as far as the model goes. */
static dcp_status choose_context(struct generate_run *run)
{
    const int64_t n = (int64_t)run->prompt.n, asked = run->v->run.context;
    const int64_t trained = run->model.trained_context;
    if (n == 0)
        return dcp__fail(DCP_ERR_ARG, "the prompt has no tokens; give at least one character");
    if (asked > 0 && n > asked)
        return dcp__fail(DCP_ERR_ARG, "the prompt has %lld token%s but --context is %lld",
                         (long long)n, message_s(n), (long long)asked);
    if (asked == 0 && trained > 0 && n > trained)
        return dcp__fail(DCP_ERR_ARG,
                         "the prompt has %lld token%s; the model was trained for %lld (give "
                         "--context to go beyond)",
                         (long long)n, message_s(n), (long long)trained);
    run->context = asked > 0 ? asked : n + run->v->max_tokens;
    if (asked == 0 && trained > 0 && run->context > trained) run->context = trained;
    return DCP_OK;
}

int cmd_generate(int argc, char **argv)
{
    struct generate_values v = {.run = MODEL_OPTS_INIT, .max_tokens = 256, .top_p = 1.0};
    struct generate_run run = {.v = &v};
    char *text = NULL, path[sizeof(run.model.path)];
    size_t n_bytes;
    int n_operands, rc;
    if (!command_parse(&generate_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (v.run.model == NULL) return usage_error(&generate_command, "-m FILE|NAME must be given");
    if (tp_is_wrong(&generate_command, &v.run.rank, v.run.tp)) return EXIT_USAGE;
    if (v.raw && v.system != NULL)
        return usage_error(&generate_command, "--system needs a chat template; --raw has none");
    if (model_path(v.run.model, path, sizeof(path)) == DCP_OK &&
        would_replace(&generate_command, "--logits", v.logits, path))
        return EXIT_USAGE;
    if (would_replace(&generate_command, "--logits", v.logits, v.file)) return EXIT_USAGE;
    rc = model_text(&generate_command, v.prompt, v.file, &text, &n_bytes);
    if (rc != EXIT_DONE) return rc;
    dcp_status st = model_open(v.run.model, &run.model);
    if (st == DCP_OK) st = model_check_options(&run.model, &v.run);
    if (st == DCP_OK) st = encode_prompt(&run, text, n_bytes);
    if (st == DCP_OK) st = choose_context(&run);
    rc = st == DCP_OK ? run_on_ranks(&v.run.rank, v.run.rank.ranks, generate_rank_main, &run)
                      : failed();
    token_list_free(&run.prompt);
    model_close(&run.model);
    free(text);
    return rc;
}
