/* SPDX-License-Identifier: Apache-2.0 */
/* Conversations as text, one function per family of templates. */
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/chat_priv.h"
#include "engine/tokenizer_priv.h"

/* --- a text whose template parts are marked --- */

void chat_text_free(struct chat_text *text)
{
    if (text == NULL) return;
    dcp__free(text->bytes);
    dcp__free(text->spans);
    memset(text, 0, sizeof(*text));
}

static dcp_status grow(void **array, size_t n_used, size_t n_more, size_t elem_bytes,
                       size_t *capacity)
{
    size_t needed;
    if (dcp__add_overflow(n_used, n_more, &needed) || needed > SIZE_MAX / 4) {
        return dcp__fail(DCP_ERR_ARG, "conversation of more than %zu bytes", n_used);
    }
    if (needed <= *capacity) return DCP_OK;
    const size_t next = needed < 64 ? 64 : 2 * needed;
    void *ptr;
    DCP_TRY(dcp__alloc_array(next, elem_bytes, "conversation", &ptr));
    if (n_used > 0) memcpy(ptr, *array, n_used * elem_bytes);
    dcp__free(*array);
    *array = ptr;
    *capacity = next;
    return DCP_OK;
}

/* What a user or the model wrote: text, whatever it looks like. */
static dcp_status add_content(struct chat_text *x, const char *bytes, size_t n_bytes)
{
    void *array = x->bytes;
    DCP_TRY(grow(&array, x->n_bytes, n_bytes, 1, &x->capacity));
    x->bytes = array;
    if (n_bytes > 0) memcpy(x->bytes + x->n_bytes, bytes, n_bytes);
    x->n_bytes += n_bytes;
    return DCP_OK;
}

/* A part of the template, where control tokens count. Parts that touch become one span. */
static dcp_status add_part_n(struct chat_text *x, const char *part, size_t n_bytes)
{
    const size_t begin = x->n_bytes;
    DCP_TRY(add_content(x, part, n_bytes));
    if (x->n_spans > 0 && x->spans[x->n_spans - 1].end == begin) {
        x->spans[x->n_spans - 1].end = x->n_bytes;
        return DCP_OK;
    }
    void *array = x->spans;
    DCP_TRY(grow(&array, x->n_spans, 1, sizeof(struct token_span), &x->span_capacity));
    x->spans = array;
    x->spans[x->n_spans++] = (struct token_span){begin, x->n_bytes};
    return DCP_OK;
}

static dcp_status add_part(struct chat_text *x, const char *part)
{
    return add_part_n(x, part, strlen(part));
}

/* --- trimming, as the templates' trim filter does: white space at both ends --- */

static bool is_space(int32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Where the text ends without the white space at its end. */
static size_t trimmed_end(const char *bytes, size_t n_bytes)
{
    int32_t c;
    while (n_bytes > 0) {
        /* Back to the first byte of the last character. */
        size_t n = 1;
        while (n < 4 && n < n_bytes && (bytes[n_bytes - n] & 0xc0) == 0x80) n++;
        if (tok__utf8_get(bytes + n_bytes - n, n, &c) != n || !is_space(c)) break;
        n_bytes -= n;
    }
    return n_bytes;
}

static dcp_status add_trimmed(struct chat_text *x, const char *bytes, size_t n_bytes)
{
    int32_t c;
    size_t begin = 0;
    n_bytes = trimmed_end(bytes, n_bytes);
    while (begin < n_bytes) {
        const size_t n = tok__utf8_get(bytes + begin, n_bytes - begin, &c);
        if (n == 0 || !is_space(c)) break;
        begin += n;
    }
    return add_content(x, bytes + begin, n_bytes - begin);
}

static dcp_status add_message(struct chat_text *x, const struct chat_message *m, bool trims)
{
    if (m->content_bytes == 0) return DCP_OK;
    return trims ? add_trimmed(x, m->content, m->content_bytes)
                 : add_content(x, m->content, m->content_bytes);
}

/* --- looking at the file's template --- */

static bool has(const char *text, const char *part)
{
    return strstr(text, part) != NULL;
}

static bool has_any(const char *text, const char *a, const char *b)
{
    return has(text, a) || has(text, b);
}

enum chat_family chat__family(const char *chat_template)
{
    if (has(chat_template, "<|start_header_id|>")) return CHAT_LLAMA3;
    if (has(chat_template, "<start_of_turn>")) return CHAT_GEMMA;
    if (has(chat_template, "<|im_start|>")) return CHAT_CHATML;
    if (has(chat_template, "[INST]")) {
        return has(chat_template, "<<SYS>>") ? CHAT_LLAMA2 : CHAT_MISTRAL;
    }
    return CHAT_UNKNOWN;
}

static bool is_role(const struct chat_message *m, const char *role)
{
    return strcmp(m->role, role) == 0;
}

/* [system] user assistant user ...; *first_out is the index of the first user message. */
static dcp_status check_turns(const struct chat_message *messages, size_t n_messages,
                              size_t *first_out)
{
    const size_t first = is_role(&messages[0], "system") ? 1 : 0;
    if (first == n_messages) {
        return dcp__fail(DCP_ERR_ARG, "the conversation has a system message and nothing else");
    }
    for (size_t i = first; i < n_messages; i++) {
        const char *expected = (i - first) % 2 == 0 ? "user" : "assistant";
        if (!is_role(&messages[i], expected)) {
            return dcp__fail(DCP_ERR_ARG,
                             "message %zu has role \"%s\"; this model's template wants user and "
                             "assistant by turns, here \"%s\"",
                             i, messages[i].role, expected);
        }
    }
    *first_out = first;
    return DCP_OK;
}

/* --- ChatML --- */

/* The default system turn: a string literal of the template that holds a whole one. Writes it with
 * its escapes resolved if the template has it. */
static dcp_status add_default_system(struct chat_text *x, const char *chat_template)
{
    static const char opening[] = "<|im_start|>system";
    static const char closing[] = "<|im_end|>";
    for (const char *at = strstr(chat_template, opening); at != NULL;
         at = strstr(at + 1, opening)) {
        if (at == chat_template || (at[-1] != '\'' && at[-1] != '"')) continue;
        const char quote = at[-1];
        const char *end = at;
        while (*end != '\0' && *end != quote) end += *end == '\\' && end[1] != '\0' ? 2 : 1;
        if (*end == '\0') return DCP_OK;
        if (memmem(at, (size_t)(end - at), closing, sizeof(closing) - 1) == NULL) continue;
        while (at < end) {
            const char *stop = memchr(at, '\\', (size_t)(end - at));
            if (stop == NULL) stop = end;
            DCP_TRY(add_part_n(x, at, (size_t)(stop - at)));
            if (stop == end) break;
            const char c = stop[1];
            DCP_TRY(add_part(x, c == 'n'    ? "\n"
                                : c == 't'  ? "\t"
                                : c == '\'' ? "'"
                                : c == '"'  ? "\""
                                            : "\\"));
            at = stop + 2;
            if (c != 'n' && c != 't' && c != '\'' && c != '"' && c != '\\') at = stop + 1;
        }
        return DCP_OK;
    }
    return DCP_OK;
}

static dcp_status render_chatml(const char *chat_template, const struct chat_message *messages,
                                size_t n_messages, struct chat_text *x)
{
    const bool trims =
        has_any(chat_template, "message['content'] | trim", "message['content']|trim") ||
        has_any(chat_template, "message.content | trim", "message.content|trim");
    if (!is_role(&messages[0], "system")) DCP_TRY(add_default_system(x, chat_template));
    for (size_t i = 0; i < n_messages; i++) {
        DCP_TRY(add_part(x, "<|im_start|>"));
        DCP_TRY(add_part(x, messages[i].role));
        DCP_TRY(add_part(x, "\n"));
        DCP_TRY(add_message(x, &messages[i], trims));
        DCP_TRY(add_part(x, "<|im_end|>\n"));
    }
    return add_part(x, "<|im_start|>assistant\n");
}

/* --- Llama 3 --- */

/* From 3.1 on the system turn is always there and begins with two dates. Today's is the constant
 * that the template itself falls back to: the same text on every day. */
static dcp_status add_dates(struct chat_text *x, const char *chat_template)
{
    static const char fallback[] = "26 Jul 2024";
    static const char key[] = "date_string = \"";
    const char *date = fallback;
    size_t n = sizeof(fallback) - 1;
    const char *at = strstr(chat_template, key);
    if (at != NULL) {
        at += sizeof(key) - 1;
        const size_t len = strcspn(at, "\"");
        if (len > 0 && len < 32 && at[len] == '"') {
            date = at;
            n = len;
        }
    }
    DCP_TRY(add_part(x, "Cutting Knowledge Date: December 2023\nToday Date: "));
    DCP_TRY(add_part_n(x, date, n));
    return add_part(x, "\n\n");
}

static dcp_status add_llama3_opening(struct chat_text *x, const char *role)
{
    DCP_TRY(add_part(x, "<|start_header_id|>"));
    DCP_TRY(add_part(x, role));
    return add_part(x, "<|end_header_id|>\n\n");
}

static dcp_status render_llama3(const char *chat_template, const char *bos,
                                const struct chat_message *messages, size_t n_messages,
                                struct chat_text *x)
{
    const bool has_dates = has(chat_template, "Cutting Knowledge Date");
    size_t i = 0;
    DCP_TRY(add_part(x, bos));
    if (has_dates) {
        DCP_TRY(add_llama3_opening(x, "system"));
        DCP_TRY(add_dates(x, chat_template));
        if (is_role(&messages[0], "system")) DCP_TRY(add_message(x, &messages[i++], true));
        DCP_TRY(add_part(x, "<|eot_id|>"));
    }
    for (; i < n_messages; i++) {
        DCP_TRY(add_llama3_opening(x, messages[i].role));
        DCP_TRY(add_message(x, &messages[i], true));
        DCP_TRY(add_part(x, "<|eot_id|>"));
    }
    return add_llama3_opening(x, "assistant");
}

/* --- Llama 2 --- */

/* The template trims the system part and the user's as one text. It begins with a mark, so white
 * space goes only at the end, and if the user's is nothing else, up to the closing mark. */
static dcp_status add_llama2_system(struct chat_text *x, const struct chat_message *system,
                                    const struct chat_message *user)
{
    const size_t n_bytes = trimmed_end(user->content, user->content_bytes);
    DCP_TRY(add_part(x, "<<SYS>>\n"));
    DCP_TRY(add_message(x, system, false));
    DCP_TRY(add_part(x, n_bytes > 0 ? "\n<</SYS>>\n\n" : "\n<</SYS>>"));
    return add_content(x, user->content, n_bytes);
}

static dcp_status render_llama2(const char *bos, const char *eos,
                                const struct chat_message *messages, size_t n_messages,
                                struct chat_text *x)
{
    size_t first;
    DCP_TRY(check_turns(messages, n_messages, &first));
    for (size_t i = first; i < n_messages; i++) {
        if ((i - first) % 2 == 0) {
            DCP_TRY(add_part(x, bos));
            DCP_TRY(add_part(x, "[INST] "));
            if (i == first && first == 1) {
                DCP_TRY(add_llama2_system(x, &messages[0], &messages[1]));
            } else {
                DCP_TRY(add_message(x, &messages[i], true));
            }
            DCP_TRY(add_part(x, " [/INST]"));
        } else {
            DCP_TRY(add_part(x, " "));
            DCP_TRY(add_message(x, &messages[i], true));
            DCP_TRY(add_part(x, " "));
            DCP_TRY(add_part(x, eos));
        }
    }
    return DCP_OK;
}

/* --- Mistral --- */

static dcp_status render_mistral(const char *chat_template, const char *bos, const char *eos,
                                 const struct chat_message *messages, size_t n_messages,
                                 struct chat_text *x)
{
    /* Releases differ in the spaces around the marks and in the turn that the system text joins. */
    const char *opening = has_any(chat_template, "\" [INST] \"", "' [INST] '") ? " [INST] "
                          : has(chat_template, "[INST] ")                      ? "[INST] "
                                                                               : "[INST]";
    const char *closing = has(chat_template, " [/INST]") ? " [/INST]" : "[/INST]";
    const bool has_space = has_any(chat_template, "\" \" + message", "' ' + message");
    const bool trims = has_any(chat_template, "|trim", "| trim");
    const char *after = has_any(chat_template, "eos_token + ' '", "eos_token + \" \"") ? " " : "";
    const bool system_last = has(chat_template, "loop.last and system_message");
    size_t first;
    DCP_TRY(check_turns(messages, n_messages, &first));
    const size_t last_user = n_messages - 1 - (n_messages - 1 - first) % 2;
    const size_t with_system = system_last ? last_user : first;
    DCP_TRY(add_part(x, bos));
    for (size_t i = first; i < n_messages; i++) {
        if ((i - first) % 2 == 0) {
            DCP_TRY(add_part(x, opening));
            if (first == 1 && i == with_system) {
                DCP_TRY(add_message(x, &messages[0], false));
                DCP_TRY(add_part(x, "\n\n"));
            }
            DCP_TRY(add_message(x, &messages[i], false));
            DCP_TRY(add_part(x, closing));
        } else {
            if (has_space) DCP_TRY(add_part(x, " "));
            DCP_TRY(add_message(x, &messages[i], trims));
            DCP_TRY(add_part(x, eos));
            DCP_TRY(add_part(x, after));
        }
    }
    return DCP_OK;
}

/* --- Gemma --- */

static dcp_status render_gemma(const char *bos, const struct chat_message *messages,
                               size_t n_messages, struct chat_text *x)
{
    size_t first;
    DCP_TRY(check_turns(messages, n_messages, &first));
    DCP_TRY(add_part(x, bos));
    for (size_t i = first; i < n_messages; i++) {
        const bool is_user = (i - first) % 2 == 0;
        DCP_TRY(add_part(x, is_user ? "<start_of_turn>user\n" : "<start_of_turn>model\n"));
        if (i == first && first == 1) {
            DCP_TRY(add_message(x, &messages[0], false));
            DCP_TRY(add_part(x, "\n\n"));
        }
        DCP_TRY(add_message(x, &messages[i], true));
        DCP_TRY(add_part(x, "<end_of_turn>\n"));
    }
    return add_part(x, "<start_of_turn>model\n");
}

dcp_status chat_render(const char *chat_template, const char *bos, const char *eos,
                       const struct chat_message *messages, size_t n_messages,
                       struct chat_text *text)
{
    if (n_messages == 0) return dcp__fail(DCP_ERR_ARG, "a conversation of no messages");
    for (size_t i = 0; i < n_messages; i++) {
        if (messages[i].role == NULL ||
            !(is_role(&messages[i], "system") || is_role(&messages[i], "user") ||
              is_role(&messages[i], "assistant"))) {
            return dcp__fail(DCP_ERR_ARG,
                             "message %zu has role \"%.40s\"; roles are system, user, assistant", i,
                             messages[i].role == NULL ? "(null)" : messages[i].role);
        }
        if (messages[i].content == NULL && messages[i].content_bytes > 0) {
            return dcp__fail(DCP_ERR_ARG, "message %zu: content is NULL, but has %zu bytes", i,
                             messages[i].content_bytes);
        }
    }
    switch (chat__family(chat_template)) {
    case CHAT_CHATML:
        return render_chatml(chat_template, messages, n_messages, text);
    case CHAT_LLAMA2:
        return render_llama2(bos, eos, messages, n_messages, text);
    case CHAT_LLAMA3:
        return render_llama3(chat_template, bos, messages, n_messages, text);
    case CHAT_MISTRAL:
        return render_mistral(chat_template, bos, eos, messages, n_messages, text);
    case CHAT_GEMMA:
        return render_gemma(bos, messages, n_messages, text);
    case CHAT_UNKNOWN:
        break;
    }
    return dcp__fail(
        DCP_ERR_NOT_SUPPORTED,
        "unknown chat template \"%.80s...\"; known: ChatML, Llama 2, Llama 3, Mistral, "
        "Gemma; use the raw text (--raw)",
        chat_template);
}
