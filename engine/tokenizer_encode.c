/* SPDX-License-Identifier: Apache-2.0 */
/* From text to ids: cut out special tokens, hand the runs of plain text between them to the
 * pre-tokenizer and the merges. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/tokenizer_priv.h"

enum { MAX_TEXT_BYTES = 1 << 30 }; /* places inside a piece are 32-bit */

/* --- spellings that are cut out --- */

static int compare_entries(const void *a, const void *b)
{
    const struct tok_special_entry *x = a;
    const struct tok_special_entry *y = b;
    const size_t n = x->n_bytes < y->n_bytes ? x->n_bytes : y->n_bytes;
    const int order = memcmp(x->bytes, y->bytes, n);
    if (order != 0) return order;
    if (x->n_bytes != y->n_bytes) return x->n_bytes < y->n_bytes ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static bool is_kind(const struct tokenizer *t, int32_t id, bool user_defined)
{
    if (user_defined) return t->type[id] == TOK_USER_DEFINED;
    return t->type[id] == TOK_CONTROL || t->type[id] == TOK_UNKNOWN;
}

static dcp_status collect(const struct tokenizer *t, bool user_defined, struct tok_specials *out)
{
    void *ptr;
    size_t n = 0;
    for (int32_t id = 0; id < t->n_vocab; id++) n += is_kind(t, id, user_defined);
    DCP_TRY(dcp__alloc_array(n, sizeof(struct tok_special_entry), "special tokens", &ptr));
    out->entry = ptr;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (!is_kind(t, id, user_defined)) continue;
        struct tok_special_entry e = {NULL, 0, id};
        e.bytes = tok__string(user_defined ? &t->piece : &t->spelling, id, &e.n_bytes);
        if (e.n_bytes > 0) out->entry[out->n++] = e;
    }
    if (out->n > 0) qsort(out->entry, out->n, sizeof(out->entry[0]), compare_entries);
    uint32_t i = 0;
    for (int c = 0; c <= 256; c++) {
        while (i < out->n && (unsigned char)out->entry[i].bytes[0] < c) i++;
        out->first[c] = i;
    }
    return DCP_OK;
}

dcp_status tok__specials_create(struct tokenizer *t)
{
    DCP_TRY(collect(t, true, &t->user));
    return collect(t, false, &t->control);
}

void tok__specials_free(struct tokenizer *t)
{
    dcp__free(t->user.entry);
    dcp__free(t->control.entry);
}

/* First index in [lo, hi) whose byte at depth is >= c; all entries there are longer than depth. */
static size_t lower_bound(const struct tok_specials *s, size_t lo, size_t hi, size_t depth, int c)
{
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)s->entry[mid].bytes[depth] < c) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The longest entry that text begins with, NULL if none. Narrows the sorted range byte by byte. */
static const struct tok_special_entry *longest(const struct tok_specials *s, const char *text,
                                               size_t n_bytes)
{
    const struct tok_special_entry *best = NULL;
    size_t lo = s->first[(unsigned char)text[0]];
    size_t hi = s->first[(unsigned char)text[0] + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        if (s->entry[lo].n_bytes == depth) {
            best = &s->entry[lo];
            while (lo < hi && s->entry[lo].n_bytes == depth) lo++;
        }
        if (depth == n_bytes) break;
        const int c = (unsigned char)text[depth];
        lo = lower_bound(s, lo, hi, depth, c);
        hi = lower_bound(s, lo, hi, depth, c + 1);
    }
    return best;
}

/* --- runs of plain text --- */

struct run_state {
    const struct tokenizer *t;
    struct tok_match *match;
    struct tok_merger merger;
    char *copy; /* a run with its leading space added and U+2581 turned into spaces */
    size_t copy_bytes;
    bool wants_space; /* SentencePiece's leading space is still due */
};

/* SentencePiece has no pre-tokenizer: cut where no token reaches across (see fill_joined). */
static dcp_status merge_between_cuts(struct run_state *r, const char *text, size_t n_bytes)
{
    const uint8_t *joined = r->t->joined;
    size_t begin = 0;
    for (size_t i = 1; i < n_bytes; i++) {
        const unsigned a = (unsigned char)text[i - 1];
        const unsigned b = (unsigned char)text[i];
        if ((b & 0xc0) == 0x80 || (joined[a << 5 | b >> 3] >> (b & 7) & 1) != 0) continue;
        DCP_TRY(tok__merge_piece(&r->merger, text + begin, i - begin));
        begin = i;
    }
    return tok__merge_piece(&r->merger, text + begin, n_bytes - begin);
}

/* The run as SentencePiece sees it, in r->copy. */
static dcp_status copy_run(struct run_state *r, const char *text, size_t n_bytes, size_t *n_out)
{
    if (r->copy_bytes < n_bytes + 1) {
        void *ptr;
        dcp__free(r->copy);
        r->copy = NULL;
        r->copy_bytes = 0;
        DCP_TRY(dcp__alloc(n_bytes + 1, "tokenizer text", &ptr));
        r->copy = ptr;
        r->copy_bytes = n_bytes + 1;
    }
    size_t n = 0;
    if (r->wants_space) r->copy[n++] = ' ';
    for (size_t at = 0; at < n_bytes;) {
        if (n_bytes - at >= 3 && memcmp(text + at, "\xe2\x96\x81", 3) == 0) {
            r->copy[n++] = ' ';
            at += 3;
        } else {
            r->copy[n++] = text[at++];
        }
    }
    *n_out = n;
    return DCP_OK;
}

static dcp_status encode_run(struct run_state *r, const char *text, size_t n_bytes)
{
    if (!r->t->is_spm) {
        return tok__split(r->t->splitter, r->match, text, n_bytes, tok__merge_piece, &r->merger);
    }
    if (r->wants_space || memmem(text, n_bytes, "\xe2\x96\x81", 3) != NULL) {
        DCP_TRY(copy_run(r, text, n_bytes, &n_bytes));
        text = r->copy;
    }
    r->wants_space = false;
    return merge_between_cuts(r, text, n_bytes);
}

/* --- the whole text --- */

static dcp_status encode_all(struct run_state *r, const char *text, size_t n_bytes,
                             const struct token_span *spans, size_t n_spans, struct token_list *l)
{
    const struct tokenizer *t = r->t;
    size_t begin = 0; /* of the plain run that we are in */
    size_t at = 0;
    size_t i_span = 0;
    while (at < n_bytes) {
        const unsigned c = (unsigned char)text[at];
        const struct tok_special_entry *found = NULL;
        if (t->user.first[c] < t->user.first[c + 1]) {
            found = longest(&t->user, text + at, n_bytes - at);
        }
        while (i_span < n_spans && spans[i_span].end <= at) i_span++;
        if (i_span < n_spans && spans[i_span].begin <= at &&
            t->control.first[c] < t->control.first[c + 1]) {
            const struct tok_special_entry *control =
                longest(&t->control, text + at, spans[i_span].end - at);
            if (control != NULL && (found == NULL || control->n_bytes > found->n_bytes)) {
                found = control;
            }
        }
        if (found == NULL) {
            at++;
            continue;
        }
        if (at > begin) DCP_TRY(encode_run(r, text + begin, at - begin));
        if (t->type[found->id] != TOK_USER_DEFINED) {
            r->wants_space = t->adds_space_prefix;
        } else if (r->wants_space) {
            DCP_TRY(encode_run(r, "", 0));
        }
        DCP_TRY(token_list_push(l, found->id));
        at += found->n_bytes;
        begin = at;
    }
    return at > begin ? encode_run(r, text + begin, at - begin) : DCP_OK;
}

dcp_status tokenizer_encode_spans(const struct tokenizer *t, const char *text, size_t n_bytes,
                                  const struct token_span *spans, size_t n_spans, unsigned flags,
                                  struct token_list *l)
{
    if (n_bytes >= MAX_TEXT_BYTES) {
        return dcp__fail(DCP_ERR_ARG, "text of %zu bytes; less than %d at a time, please", n_bytes,
                         (int)MAX_TEXT_BYTES);
    }
    for (size_t i = 0; i < n_spans; i++) {
        if (spans[i].begin > spans[i].end || spans[i].end > n_bytes ||
            (i > 0 && spans[i].begin < spans[i - 1].end)) {
            return dcp__fail(DCP_ERR_ARG, "span %zu [%zu, %zu) of a text of %zu bytes", i,
                             spans[i].begin, spans[i].end, n_bytes);
        }
    }
    const struct token_span all = {0, n_bytes};
    if ((flags & TOK_PARSE_SPECIAL) != 0) {
        spans = &all;
        n_spans = 1;
    }
    if ((flags & TOK_ADD_BOS) != 0 && tokenizer_adds_bos(t)) DCP_TRY(token_list_push(l, t->bos));
    struct run_state r = {t, NULL, {t, l, NULL, NULL, 0, 0}, NULL, 0, t->adds_space_prefix};
    dcp_status st = tok__match_create(t->splitter, &r.match);
    if (st == DCP_OK) st = encode_all(&r, text, n_bytes, spans, n_spans, l);
    tok__match_destroy(r.match);
    tok__merger_fini(&r.merger);
    dcp__free(r.copy);
    return st;
}

dcp_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n_bytes,
                            unsigned flags, struct token_list *l)
{
    return tokenizer_encode_spans(t, text, n_bytes, NULL, 0, flags, l);
}
