/* SPDX-License-Identifier: Apache-2.0 */
/* From a conversation to ids: the template of the file, rendered (chat_render.c) and tokenized. */
#include "engine/chat.h"

#include <string.h>

#include "base/status_priv.h"
#include "engine/chat_priv.h"
#include "engine/gguf.h"

#define KEY_TEMPLATE "tokenizer.chat_template"

/* Tokens without which a template's turns would be mere text. Llama 2 writes its marks as text. */
static const struct {
    enum chat_family family;
    const char *token;
} needed[] = {
    {CHAT_CHATML, "<|im_start|>"},        {CHAT_CHATML, "<|im_end|>"},
    {CHAT_LLAMA3, "<|start_header_id|>"}, {CHAT_LLAMA3, "<|end_header_id|>"},
    {CHAT_LLAMA3, "<|eot_id|>"},          {CHAT_GEMMA, "<start_of_turn>"},
    {CHAT_GEMMA, "<end_of_turn>"},
};

static dcp_status get_template(const struct gguf *g, const char **template_out)
{
    bool found = false;
    DCP_TRY(gguf_get_str(g, KEY_TEMPLATE, template_out, NULL, &found));
    if (!found) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: no " KEY_TEMPLATE ": a base model, or a file without one; "
                         "use the raw text (--raw)",
                         gguf_path(g));
    }
    return DCP_OK;
}

bool chat_available(const struct gguf *g)
{
    const char *text = NULL;
    bool found = false;
    if (gguf_get_str(g, KEY_TEMPLATE, &text, NULL, &found) != DCP_OK || !found) return false;
    return chat__family(text) != CHAT_UNKNOWN;
}

static const char *spelling_or_nothing(const struct tokenizer *t, int32_t id)
{
    const char *s = tokenizer_spelling(t, id, NULL);
    return s == NULL ? "" : s;
}

dcp_status chat_encode(const struct gguf *g, const struct tokenizer *t,
                       const struct chat_message *messages, size_t n_messages, unsigned flags,
                       struct token_list *l)
{
    const char *chat_template = NULL;
    struct chat_text text = {0};
    DCP_TRY(get_template(g, &chat_template));
    const enum chat_family family = chat__family(chat_template);
    for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        if (needed[i].family == family && tokenizer_find(t, needed[i].token) < 0) {
            return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                             "%s: the chat template uses %s, which the vocabulary does not have",
                             gguf_path(g), needed[i].token);
        }
    }
    dcp_status st =
        chat_render(chat_template, spelling_or_nothing(t, tokenizer_bos(t)),
                    spelling_or_nothing(t, tokenizer_eos(t)), messages, n_messages, &text);
    if (st == DCP_OK) {
        /* All families but ChatML render the begin-of-text token themselves. */
        if (family != CHAT_CHATML) flags &= ~(unsigned)TOK_ADD_BOS;
        st =
            tokenizer_encode_spans(t, text.bytes, text.n_bytes, text.spans, text.n_spans, flags, l);
    }
    chat_text_free(&text);
    return st;
}
