/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates of the supported families, recognised by what the file's own template looks like:
 * ChatML (SmolLM2, Qwen and others), Llama 2, Llama 3, Mistral, Gemma. The template's program is
 * not run; where files of one family differ (spaces, a default system message, a date) the file's
 * text is looked at.
 *
 * A conversation is rendered to one text in which the template's own parts are marked. The text is
 * tokenized as a whole, control tokens only in the marked parts: what a user writes can neither end
 * a turn nor begin one, and tokens fall as if the whole text had been written by hand. */
#ifndef DCP_ENGINE_CHAT_H
#define DCP_ENGINE_CHAT_H

#include "engine/tokenizer.h"

struct chat_message {
    const char
        *role; /* "system" (first message only, but for ChatML, Llama 3), "user", "assistant" */
    const char *content; /* content_bytes bytes; may be NULL if 0 */
    size_t content_bytes;
};

/** A rendered conversation. Start from {0}; free with chat_text_free. */
struct chat_text {
    char *bytes; /* not NUL-terminated */
    size_t n_bytes, capacity;
    struct token_span *spans; /* the template's own parts, ascending */
    size_t n_spans, span_capacity;
};
/** Free a rendered text and empty it.  @param[in,out] text  NULL is allowed. */
void chat_text_free(struct chat_text *text);
/** Render a conversation and the opening of the assistant's turn.
 *  @param[in] chat_template  the file's template, NUL-terminated
 *  @param[in] bos, eos       spellings of these tokens, "" if the model has none
 *  @param[out] text          appended to
 *  @return DCP_OK; DCP_ERR_NOT_SUPPORTED (unknown template: its beginning is quoted);
 *          DCP_ERR_ARG (no message, unknown role, an order of roles that the template refuses);
 *          DCP_ERR_NOMEM */
dcp_status chat_render(const char *chat_template, const char *bos, const char *eos,
                       const struct chat_message *messages, size_t n_messages,
                       struct chat_text *text);

/** Append the ids of the conversation and of the opening of the assistant's turn.
 *  The template's own control tokens become control tokens; those spelled out in content are text
 *  (unless TOK_PARSE_SPECIAL is in flags). The begin-of-text id is put first where the template
 *  says so, or, with TOK_ADD_BOS, where the model does.
 *  @return as chat_render and tokenizer_encode; DCP_ERR_NOT_SUPPORTED also if the file has no
 *          template, or its vocabulary lacks a control token that the template uses
 *  Threads: any. */
dcp_status chat_encode(const struct gguf *g, const struct tokenizer *t,
                       const struct chat_message *messages, size_t n_messages, unsigned flags,
                       struct token_list *l);
/** True if the file has a template that chat_encode knows. */
bool chat_available(const struct gguf *g);

#endif
