/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn tokenize: ids and pieces of a text. No ranks. */
#include <stdlib.h>

#include "cli/json_out.h"
#include "cli/model_run.h"

struct tokenize_values {
    const char *model, *prompt, *file;
    bool no_bos, parse_special, json;
};

#define AT(field) offsetof(struct tokenize_values, field)
static const struct option_def tokenize_options[] = {
    {"model", 'm', OPT_STRING, AT(model), "FILE|NAME", 0, 0, NULL,
     "GGUF file, or a name that scripts/fetch-model.sh knows (required)"},
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
    NULL};

/* A piece on a line of its own: line ends and other control bytes are spelled out. */
static void print_piece(const char *piece, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        const unsigned char c = (unsigned char)piece[i];
        if (c == '\\' || c == '"') {
            printf("\\%c", c);
        } else if (c == '\n') {
            fputs("\\n", stdout);
        } else if (c < 0x20 || c == 0x7F) {
            printf("\\x%02x", c);
        } else {
            putchar(c);
        }
    }
}

static void print_tokens(const struct tokenizer *t, const struct token_list *l, bool as_json)
{
    struct json_out j;
    if (as_json) {
        jout_begin(&j, stdout);
        jout_ints32(&j, "ids", l->ids, l->n);
        jout_array(&j, "pieces");
    }
    for (size_t i = 0; i < l->n; i++) {
        size_t n_bytes = 0;
        const char *text = tokenizer_spelling(t, l->ids[i], &n_bytes);
        if (!tokenizer_is_control(t, l->ids[i]) &&
            tokenizer_piece(t, l->ids[i], &text, &n_bytes) != DCP_OK)
            n_bytes = 0;
        if (as_json) {
            jout_bytes(&j, NULL, text, n_bytes);
        } else {
            printf("%8d  \"", l->ids[i]);
            print_piece(text, n_bytes);
            puts("\"");
        }
    }
    if (as_json) {
        jout_array_end(&j);
        jout_end(&j);
    }
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
    if (v.model == NULL) return usage_error(&tokenize_command, "-m FILE|NAME must be given");
    rc = model_text(&tokenize_command, v.prompt, v.file, &text, &n_bytes);
    if (rc != EXIT_DONE) return rc;
    dcp_status st = model_open(v.model, &m);
    const unsigned flags =
        (v.no_bos ? 0u : TOK_ADD_BOS) | (v.parse_special ? TOK_PARSE_SPECIAL : 0u);
    if (st == DCP_OK) st = tokenizer_encode(m.tokenizer, text, n_bytes, flags, &ids);
    if (st == DCP_OK) {
        print_tokens(m.tokenizer, &ids, v.json);
        rc = finish_stdout(EXIT_DONE);
    } else {
        rc = failed();
    }
    token_list_free(&ids);
    model_close(&m);
    free(text);
    return rc;
}
