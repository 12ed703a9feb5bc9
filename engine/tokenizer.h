/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers from a GGUF file: byte-level BPE ("gpt2", with the pre-tokenizers smollm, gpt-2 and
 * llama-bpe) and SentencePiece-style BPE ("llama": scores, byte fallback). Text is any bytes.
 *
 *     struct tokenizer *t;
 *     struct token_list ids = {0};
 *     DCP_TRY(tokenizer_create(gguf, &t));
 *     DCP_TRY(tokenizer_encode(t, text, n_bytes, TOK_ADD_BOS, &ids));
 *     for (size_t i = 0; i < ids.n; i++) { tokenizer_piece(t, ids.ids[i], &bytes, &n); ... }
 *
 * A tokenizer is read-only after create: any number of threads may encode with it at once. */
#ifndef DCP_ENGINE_TOKENIZER_H
#define DCP_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dcpattn/types.h"

struct gguf;
struct tokenizer;

/** A growing list of ids. Start from {0}; free with token_list_free, after which it is {0} again.
 */
struct token_list {
    int32_t *ids;
    size_t n, capacity;
};
/** Free the ids and empty the list.  @param[in,out] l  NULL is allowed.  Threads: one per list. */
void token_list_free(struct token_list *l);
/** Append one id.  @return DCP_OK; DCP_ERR_NOMEM, then the list is unchanged.
 *  Cost: amortised constant.  Threads: one per list. */
dcp_status token_list_push(struct token_list *l, int32_t id);

enum { TOK_ADD_BOS = 1, TOK_PARSE_SPECIAL = 2 };

/** A range of bytes [begin, end) of a text. */
struct token_span {
    size_t begin, end;
};

/** Read the tokenizer of a model file.
 *  @return DCP_OK; DCP_ERR_FORMAT (metadata missing, of another type or inconsistent);
 *          DCP_ERR_NOT_SUPPORTED (a tokenizer model or pre-tokenizer this code does not know: it is
 *          named, with those that are); DCP_ERR_NOMEM
 *  Ownership: *out is freed by tokenizer_destroy; g is not needed afterwards.  Threads: any. */
dcp_status tokenizer_create(const struct gguf *g, struct tokenizer **out);
/** Free a tokenizer.  @param[in] t  NULL is allowed. */
void tokenizer_destroy(struct tokenizer *t);

/** Append the ids of text to l.
 *  User-defined tokens always match, the longest first at the leftmost place. Control tokens
 *  spelled out in the text are text, unless TOK_PARSE_SPECIAL is set. TOK_ADD_BOS puts the
 *  begin-of-text id first where the model says so (add_bos_token).
 *  Bytes that are no valid UTF-8 are each a piece of their own. A byte that a byte-level
 *  vocabulary has no token for becomes the ids of U+FFFD, never a control token; everything else
 *  comes back from tokenizer_piece byte for byte. SentencePiece reads U+2581 as a space.
 *  @param[in] text  n_bytes bytes, need not end in NUL; may be NULL if n_bytes is 0
 *  @return DCP_OK; DCP_ERR_ARG (text of 1 GiB or more); DCP_ERR_NOMEM; DCP_ERR_NOT_SUPPORTED (a
 * byte that this vocabulary can express in no way). On failure l may hold the first ids. Threads:
 * any.  Cost: n log(longest piece). */
dcp_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n_bytes,
                            unsigned flags, struct token_list *l);
/** As tokenizer_encode, but control tokens are recognised only inside the given spans (ascending,
 *  disjoint); text of several spans and of the gaps between is one run, so tokens may cross their
 *  borders. This is what a chat template needs: its own control tokens count, those that a user
 *  writes do not. TOK_PARSE_SPECIAL makes the whole text one span. */
dcp_status tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t n_bytes,
                                  const struct token_span *spans, size_t n_spans, unsigned flags,
                                  struct token_list *l);

/** The bytes that an id stands for in a text: what generation appends. May be part of a UTF-8
 *  sequence. Control and unknown tokens give 0 bytes. Where tokenizer_adds_space_prefix is true the
 *  first piece of a decoded text begins with a space that was not in the text.
 *  @return DCP_OK; DCP_ERR_ARG (id outside the vocabulary).
 *  Ownership: the bytes belong to t and end in NUL.  Threads: any. */
dcp_status tokenizer_piece(const struct tokenizer *t, int32_t id, const char **bytes_out,
                           size_t *n_bytes_out);
/** The token's own spelling in the vocabulary (also of control tokens), for display; NULL if the id
 *  is outside the vocabulary.  @param[out] n_bytes_out  NULL is allowed.  Ownership: as piece. */
const char *tokenizer_spelling(const struct tokenizer *t, int32_t id, size_t *n_bytes_out);
/** True for control and unknown tokens: those that tokenizer_piece gives no bytes for. */
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);
/** True for every id that ends a generation: eos, eot and eom of the file, and control tokens whose
 *  spelling is known to end a turn or a text. */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
/** Begin-of-text id, -1 if the file names none. */
int32_t tokenizer_bos(const struct tokenizer *t);
/** End-of-text id, -1 if the file names none. */
int32_t tokenizer_eos(const struct tokenizer *t);
/** True if TOK_ADD_BOS adds an id. */
bool tokenizer_adds_bos(const struct tokenizer *t);
/** True if encoding puts a space before the text (SentencePiece's add_space_prefix). */
bool tokenizer_adds_space_prefix(const struct tokenizer *t);
int32_t tokenizer_vocab_size(const struct tokenizer *t);
/** The id whose spelling is exactly this NUL-terminated one, -1 if there is none. */
int32_t tokenizer_find(const struct tokenizer *t, const char *spelling);

#endif
