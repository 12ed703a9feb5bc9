/* SPDX-License-Identifier: Apache-2.0 */
/* Pre-tokenizers of byte-level BPE: rules, written as regular expressions, that cut text into the
 * pieces within which merges happen.
 *
 * The rules are only ever matched against valid UTF-8: the text is first cut at bytes that belong
 * to no valid sequence, and each such byte is a piece of its own. So matching needs no check of its
 * input and any bytes survive the way to ids and back. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>
#include <utf8proc.h>

#include "base/alloc_priv.h"
#include "engine/tokenizer_priv.h"

/* White space as Unicode's property of that name. PCRE2's own \s also counts U+180E, which lost the
 * property long ago, and the families' rules were run by engines that go by the property. */
#define SPACES                                                                                     \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define NEITHER "[^" SPACES "\\p{L}\\p{N}]"

static const struct {
    const char *name;
    const char *alias; /* another name of the same rules */
    const char *rules;
    bool whole_pieces, adds_bos;
} families[] = {
    {"gpt-2", "gpt2",
     CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?" NEITHER "+|[" SPACES "]+(?![^" SPACES "])|[" SPACES
                  "]+",
     false, false},
    /* Every digit is a piece, then the rules of gpt-2 between digits: what stands before a digit
     * ends there, so a run of spaces keeps its last one. */
    {"smollm", NULL,
     "\\p{N}|" CONTRACTIONS "| ?\\p{L}+| ?" NEITHER "+|[" SPACES "]+(?![^" SPACES
     "\\p{N}])|[" SPACES "]+",
     false, false},
    {"llama-bpe", "llama3",
     "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?" NEITHER
     "+[\\r\\n]*|[" SPACES "]*[\\r\\n]+|[" SPACES "]+(?![^" SPACES "])|[" SPACES "]+",
     true, true},
};
enum { N_FAMILIES = sizeof(families) / sizeof(families[0]) };

struct tok_splitter {
    pcre2_general_context *memory;
    pcre2_code *code;
};

struct tok_match {
    pcre2_match_data *data;
    pcre2_match_context *context;
};

size_t tok__utf8_get(const char *text, size_t n_bytes, int32_t *codepoint_out)
{
    const utf8proc_ssize_t limit = n_bytes < 4 ? (utf8proc_ssize_t)n_bytes : 4;
    utf8proc_int32_t codepoint = -1;
    const utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text, limit, &codepoint);
    *codepoint_out = codepoint;
    return n > 0 && codepoint >= 0 ? (size_t)n : 0;
}

size_t tok__utf8_bytes(const char *text, size_t n_bytes)
{
    int32_t codepoint;
    if ((unsigned char)text[0] < 0x80) return 1;
    return tok__utf8_get(text, n_bytes, &codepoint);
}

static void *take_memory(PCRE2_SIZE n_bytes, void *unused)
{
    void *ptr = NULL;
    (void)unused;
    return dcp__alloc(n_bytes, "regular expression", &ptr) == DCP_OK ? ptr : NULL;
}

static void give_memory(void *ptr, void *unused)
{
    (void)unused;
    dcp__free(ptr);
}

dcp_status tok__splitter_create(const char *name, struct tok_splitter **out, bool *whole_pieces_out,
                                bool *adds_bos_out)
{
    const char *known = "gpt-2, smollm, llama-bpe";
    int f = 0;
    if (name == NULL) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "tokenizer.ggml.pre: the file names no pre-tokenizer; supported: %s",
                         known);
    }
    while (f < N_FAMILIES && strcmp(name, families[f].name) != 0 &&
           (families[f].alias == NULL || strcmp(name, families[f].alias) != 0)) {
        f++;
    }
    if (f == N_FAMILIES) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "tokenizer.ggml.pre: pre-tokenizer \"%.60s\"; supported: %s", name, known);
    }
    struct tok_splitter *s;
    void *ptr;
    DCP_TRY(dcp__alloc(sizeof(*s), "tokenizer rules", &ptr));
    s = ptr;
    int error = 0;
    PCRE2_SIZE at = 0;
    s->memory = pcre2_general_context_create(take_memory, give_memory, NULL);
    if (s->memory == NULL) {
        tok__splitter_destroy(s);
        return dcp__fail(DCP_ERR_NOMEM, "rules of pre-tokenizer %s", families[f].name);
    }
    pcre2_compile_context *cc = pcre2_compile_context_create(s->memory);
    if (cc != NULL) {
        s->code = pcre2_compile((PCRE2_SPTR)families[f].rules, PCRE2_ZERO_TERMINATED,
                                PCRE2_UTF | PCRE2_UCP, &error, &at, cc);
        pcre2_compile_context_free(cc);
    }
    if (s->code == NULL) {
        tok__splitter_destroy(s);
        return dcp__fail(DCP_ERR_NOMEM, "rules of pre-tokenizer %s: PCRE2 error %d at %zu",
                         families[f].name, error, (size_t)at);
    }
    /* Without a just-in-time compiler (or where writable code is forbidden) matching is slower. */
    (void)pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE);
    *whole_pieces_out = families[f].whole_pieces;
    *adds_bos_out = families[f].adds_bos;
    *out = s;
    return DCP_OK;
}

void tok__splitter_destroy(struct tok_splitter *s)
{
    if (s == NULL) return;
    pcre2_code_free(s->code);
    pcre2_general_context_free(s->memory);
    dcp__free(s);
}

dcp_status tok__match_create(const struct tok_splitter *s, struct tok_match **out)
{
    void *ptr;
    *out = NULL;
    if (s == NULL) return DCP_OK;
    DCP_TRY(dcp__alloc(sizeof(**out), "tokenizer match", &ptr));
    struct tok_match *m = ptr;
    m->data = pcre2_match_data_create(1, s->memory);
    m->context = pcre2_match_context_create(s->memory);
    if (m->data == NULL || m->context == NULL) {
        tok__match_destroy(m);
        return dcp__fail(DCP_ERR_NOMEM, "match data of the pre-tokenizer");
    }
    /* The rules backtrack over one run of characters at most; the default limit is below the
     * length of runs that texts may hold. */
    pcre2_set_match_limit(m->context, UINT32_MAX);
    *out = m;
    return DCP_OK;
}

void tok__match_destroy(struct tok_match *m)
{
    if (m == NULL) return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    dcp__free(m);
}

/* Pieces of valid UTF-8. Every character is matched by some rule, so matches follow on each other;
 * should a gap come up all the same, it is a piece. */
static dcp_status split_valid(const struct tok_splitter *s, struct tok_match *m, const char *text,
                              size_t n_bytes, tok_piece_fn *fn, void *ctx)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(m->data);
    size_t at = 0;
    while (at < n_bytes) {
        int rc =
            pcre2_match(s->code, subject, n_bytes, at, PCRE2_NO_UTF_CHECK, m->data, m->context);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
            rc = pcre2_match(s->code, subject, n_bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                             m->data, m->context);
        }
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc == PCRE2_ERROR_NOMEMORY) {
            return dcp__fail(DCP_ERR_NOMEM, "pre-tokenizer at byte %zu of a run of %zu", at,
                             n_bytes);
        }
        if (rc < 0) {
            return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                             "pre-tokenizer: PCRE2 error %d at byte %zu of a run of %zu", rc, at,
                             n_bytes);
        }
        const size_t begin = found[0];
        const size_t end = found[1];
        if (begin > at) DCP_TRY(fn(ctx, text + at, begin - at));
        DCP_TRY(fn(ctx, text + begin, end - begin));
        at = end;
    }
    return at < n_bytes ? fn(ctx, text + at, n_bytes - at) : DCP_OK;
}

dcp_status tok__split(const struct tok_splitter *s, struct tok_match *m, const char *text,
                      size_t n_bytes, tok_piece_fn *fn, void *ctx)
{
    size_t begin = 0;
    size_t at = 0;
    while (at < n_bytes) {
        const size_t n = tok__utf8_bytes(text + at, n_bytes - at);
        if (n > 0) {
            at += n;
            continue;
        }
        if (at > begin) DCP_TRY(split_valid(s, m, text + begin, at - begin, fn, ctx));
        DCP_TRY(fn(ctx, text + at, 1));
        at++;
        begin = at;
    }
    return at > begin ? split_valid(s, m, text + begin, at - begin, fn, ctx) : DCP_OK;
}
