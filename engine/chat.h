/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates of the supported families, chosen by what the file's own template looks like
 * (ChatML/SmolLM2, Llama 2, Llama 3, Mistral, Gemma). */
#ifndef DCP_ENGINE_CHAT_H
#define DCP_ENGINE_CHAT_H

#include "engine/tokenizer.h"

struct chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
    size_t content_bytes;
};
/* Appends the ids of the conversation and the opening of the assistant's turn. The template's own
 * control tokens become control tokens; those spelled out in content are text (unless
 * TOK_PARSE_SPECIAL is in flags). DCP_ERR_NOT_SUPPORTED, naming the file's template, if the file
 * has none or an unknown one: use --raw. */
dcp_status chat_encode(const struct gguf *g, const struct tokenizer *t,
                       const struct chat_message *messages, size_t n_messages, unsigned flags,
                       struct token_list *l);
/* True if the file has a template that chat_encode knows. */
bool chat_available(const struct gguf *g);

#endif
