/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn tokenize: ids and pieces of a text. No ranks. */
#include <stdlib.h>

#include "cli/json_out.h"
#include "cli/launch.h"
#include "cli/model_run.h"
#include "cli/utf8.h"

struct tokenize_values {
    const char *model, *prompt, *file;
    bool no_bos, parse_special, json;
};

#define AT(field) offsetof(struct tokenize_values, field)
static const struct option_def tokenize_options[] = {
    {"model", 'm', OPT_STRING, AT(model), "FILE|NAME", 0, 0, NULL,
     "GGUF file, or a name that fetch-model.sh knows (required)"},
    {"prompt", 'p', OPT_STRING, AT(prompt), "TEXT", 0, 0, NULL, "the text"},
    {"file", 'f', OPT_STRING, AT(file), "FILE", 0, 0, NULL,
     "the text, byte for byte; - is standard input"},
    {"no-bos", 0, OPT_FLAG, AT(no_bos), NULL, 0, 0, NULL,
     "no begin-of-text, also where the model wants one"},
    {"parse-special", 0, OPT_FLAG, AT(parse_special), NULL, 0, 0, NULL,
     "control tokens spelled out in the text become control tokens"},
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def tokenize_command = {
    "tokenize",
    "",
    0,
    0,
    "Print the token ids of a text and what each stands for.",
    tokenize_options,
    sizeof(tokenize_options) / sizeof(tokenize_options[0]),
    "A piece may be part of a character: bytes that are not UTF-8 are shown as \\xf0, and with\n"
    "--json, where they are U+FFFD in \"pieces\", \"piece_bytes\" has them in hexadecimal (null "
    "for\n"
    "pieces that are text). A byte that the vocabulary has no token for becomes the tokens of\n"
    "U+FFFD, as if the text had that character there: SmolLM2 lacks 21 of the 256 bytes.\n"};

static const char *piece_of(const struct tokenizer *t, int32_t id, size_t *n_bytes_out)
{
    const char *text = tokenizer_spelling(t, id, n_bytes_out);
    if (!tokenizer_is_control(t, id) && tokenizer_piece(t, id, &text, n_bytes_out) != DCP_OK)
        *n_bytes_out = 0;
    return text;
}

static void print_text(const struct tokenizer *t, const struct token_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        size_t n_bytes;
        const char *text = piece_of(t, l->ids[i], &n_bytes);
        printf("%8d  \"", l->ids[i]);
        utf8_print_escaped(stdout, text, n_bytes);
        puts("\"");
    }
}

/* A piece's bytes as hexadecimal digits where the piece is no text of its own, else null. */
static void json_piece_bytes(struct json_out *j, const char *text, size_t n_bytes)
{
    char hex[256 + 1];
    if (utf8_is_valid(text, n_bytes)) {
        jout_null(j, NULL);
        return;
    }
    size_t n = 0;
    for (size_t i = 0; i < n_bytes && n + 2 < sizeof(hex); i++)
        n += (size_t)snprintf(hex + n, sizeof(hex) - n, "%02x", (unsigned char)text[i]);
    jout_str(j, NULL, hex);
}

static void print_json(const struct tokenizer *t, const struct token_list *l)
{
    struct json_out j;
    size_t n_bytes;
    jout_begin(&j, stdout);
    jout_ints32(&j, "ids", l->ids, l->n);
    jout_array(&j, "pieces");
    for (size_t i = 0; i < l->n; i++) {
        const char *text = piece_of(t, l->ids[i], &n_bytes);
        jout_bytes(&j, NULL, text, n_bytes);
    }
    jout_array_end(&j);
    jout_array(&j, "piece_bytes");
    for (size_t i = 0; i < l->n; i++) {
        const char *text = piece_of(t, l->ids[i], &n_bytes);
        json_piece_bytes(&j, text, n_bytes);
    }
    jout_array_end(&j);
    jout_end(&j);
}

int cmd_tokenize(int argc, char **argv)
{
    struct tokenize_values v = {0};
    struct model_file m = {0};
    struct token_list ids = {0};
    char *text = NULL;
    size_t n_bytes;
    int n_operands, rc;
    if (!command_parse(&tokenize_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (!launch_mpi_env_is_first()) return EXIT_DONE; /* it has no ranks: one speaks */
    if (v.model == NULL) return usage_error(&tokenize_command, "-m FILE|NAME must be given");
    rc = model_text(&tokenize_command, v.prompt, v.file, &text, &n_bytes);
    if (rc != EXIT_DONE) return rc;
    dcp_status st = model_open(v.model, &m);
    const unsigned flags =
        (v.no_bos ? 0u : TOK_ADD_BOS) | (v.parse_special ? TOK_PARSE_SPECIAL : 0u);
    if (st == DCP_OK) st = tokenizer_encode(m.tokenizer, text, n_bytes, flags, &ids);
    if (st == DCP_OK) {
        if (v.json) {
            print_json(m.tokenizer, &ids);
        } else {
            print_text(m.tokenizer, &ids);
        }
        rc = finish_stdout(EXIT_DONE);
    } else {
        rc = failed();
    }
    token_list_free(&ids);
    model_close(&m);
    free(text);
    return rc;
}
