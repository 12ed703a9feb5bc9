/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers from a GGUF file: byte-level BPE ("gpt2" with its pre-tokenizer: smollm, gpt-2,
 * llama-bpe, default) and SentencePiece-style ("llama": scores, byte fallback). Read-only after
 * create: any number of threads. */
#ifndef DCP_ENGINE_TOKENIZER_H
#define DCP_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dcpattn/types.h"

struct gguf;
struct tokenizer;

struct token_list {
    int32_t *ids;
    size_t n, capacity;
};
void token_list_free(struct token_list *l);
dcp_status token_list_push(struct token_list *l, int32_t id);

enum { TOK_ADD_BOS = 1, TOK_PARSE_SPECIAL = 2 };

dcp_status tokenizer_create(const struct gguf *g, struct tokenizer **out);
void tokenizer_destroy(struct tokenizer *t);
/* Appends the ids of text (any bytes) to l. TOK_ADD_BOS: begin-of-text first where the model says
 * so (add_bos_token). TOK_PARSE_SPECIAL: control tokens spelled out in the text become control
 * tokens; without it they are text. User-defined tokens always match. */
dcp_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n_bytes,
                            unsigned flags, struct token_list *l);
/* The bytes that id stands for in text: what generation appends. Control tokens give 0 bytes. Owned
 * by t. First-token space rules of SentencePiece are applied by the caller with first. */
dcp_status tokenizer_piece(const struct tokenizer *t, int32_t id, const char **bytes_out,
                           size_t *n_bytes_out);
/* The token's own spelling in the vocabulary (also of control tokens), for display. */
const char *tokenizer_spelling(const struct tokenizer *t, int32_t id, size_t *n_bytes_out);
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);
/* True for every id that ends a generation (eos, eot, end-of-turn...). */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
int32_t tokenizer_bos(const struct tokenizer *t); /* -1 if none */
int32_t tokenizer_eos(const struct tokenizer *t);
bool tokenizer_adds_bos(const struct tokenizer *t);
int32_t tokenizer_vocab_size(const struct tokenizer *t);
int32_t tokenizer_find(const struct tokenizer *t, const char *spelling); /* -1 */

#endif
