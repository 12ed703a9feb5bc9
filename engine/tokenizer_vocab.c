/* SPDX-License-Identifier: Apache-2.0 */
/* A vocabulary from GGUF metadata into tables: spellings, the bytes that each id stands for, both
 * hashed, and the merge rules. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/gguf.h"
#include "engine/tokenizer_priv.h"

#define KEY_TOKENS "tokenizer.ggml.tokens"
#define KEY_TYPES "tokenizer.ggml.token_type"
#define KEY_SCORES "tokenizer.ggml.scores"
#define KEY_MERGES "tokenizer.ggml.merges"

/* SentencePiece's stand-in for a space: U+2581. */
static const char spm_space[] = "\xe2\x96\x81";

/* --- hash from string to id --- */

static uint64_t hash_bytes(const char *bytes, size_t n_bytes)
{
    uint64_t h = n_bytes * 0x9e3779b97f4a7c15u;
    while (n_bytes >= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
        bytes += 8;
        n_bytes -= 8;
    }
    uint64_t rest = 0;
    for (size_t i = 0; i < n_bytes; i++) rest = rest << 8 | (unsigned char)bytes[i];
    h = (h ^ rest) * 0xff51afd7ed558ccdu;
    return h ^ (h >> 32);
}

dcp_status tok__map_create(struct tok_map *m, const struct tok_strings *s, size_t n_keys)
{
    void *ptr;
    size_t n_slots = 16;
    while (n_slots < 2 * n_keys) n_slots *= 2;
    DCP_TRY(dcp__alloc_array(n_slots, sizeof(uint32_t), "vocabulary index", &ptr));
    *m = (struct tok_map){s, ptr, n_slots - 1};
    return DCP_OK;
}

/* The slot that holds this string, or the empty one where it belongs. */
static size_t find_slot(const struct tok_map *m, const char *bytes, size_t n_bytes)
{
    size_t i = (size_t)hash_bytes(bytes, n_bytes) & m->mask;
    while (m->slot[i] != 0) {
        size_t n;
        const char *s = tok__string(m->strings, (int32_t)(m->slot[i] - 1), &n);
        if (n == n_bytes && memcmp(s, bytes, n) == 0) break;
        i = (i + 1) & m->mask;
    }
    return i;
}

void tok__map_insert(struct tok_map *m, int32_t id)
{
    size_t n;
    const char *s = tok__string(m->strings, id, &n);
    const size_t i = find_slot(m, s, n);
    if (m->slot[i] == 0) m->slot[i] = (uint32_t)id + 1;
}

int32_t tok__map_find(const struct tok_map *m, const char *bytes, size_t n_bytes)
{
    return (int32_t)m->slot[find_slot(m, bytes, n_bytes)] - 1;
}

/* --- loading --- */

/* A required array of exactly n elements (n = 0: any number but none). */
static dcp_status check_array(const struct gguf *g, const char *key, size_t n, size_t *n_out)
{
    enum gguf_type type;
    bool found;
    DCP_TRY(gguf_get_arr(g, key, &type, n_out, &found));
    if (!found) return dcp__fail(DCP_ERR_FORMAT, "%s: no %s", gguf_path(g), key);
    if (n != 0 && *n_out != n) {
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s has %zu elements for a vocabulary of %zu",
                         gguf_path(g), key, *n_out, n);
    }
    return DCP_OK;
}

static dcp_status load_spellings(const struct gguf *g, struct tokenizer *t)
{
    size_t n;
    size_t total = 0;
    void *ptr;
    const char *s;
    size_t len;
    DCP_TRY(check_array(g, KEY_TOKENS, 0, &n));
    if (n == 0 || n > INT32_MAX / 4) {
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s has %zu elements", gguf_path(g), KEY_TOKENS, n);
    }
    t->n_vocab = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        DCP_TRY(gguf_arr_str(g, KEY_TOKENS, i, &s, &len));
        if (dcp__add_overflow(total, len + 1, &total)) {
            return dcp__fail(DCP_ERR_FORMAT, "%s: %s %zu is too long", gguf_path(g), KEY_TOKENS, i);
        }
    }
    DCP_TRY(dcp__alloc_array(n + 1, sizeof(size_t), "vocabulary", &ptr));
    t->spelling.offset = ptr;
    DCP_TRY(dcp__alloc(total, "vocabulary", &ptr));
    t->spelling.bytes = ptr;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        DCP_TRY(gguf_arr_str(g, KEY_TOKENS, i, &s, &len));
        memcpy(t->spelling.bytes + at, s, len);
        at += len + 1;
        t->spelling.offset[i + 1] = at;
    }
    DCP_TRY(tok__map_create(&t->by_spelling, &t->spelling, n));
    for (int32_t i = 0; i < t->n_vocab; i++) tok__map_insert(&t->by_spelling, i);
    return DCP_OK;
}

static dcp_status load_types(const struct gguf *g, struct tokenizer *t)
{
    enum gguf_type elem;
    size_t n;
    bool found;
    void *ptr;
    DCP_TRY(dcp__alloc((size_t)t->n_vocab, "token types", &ptr));
    t->type = ptr;
    memset(t->type, TOK_NORMAL, (size_t)t->n_vocab);
    DCP_TRY(gguf_get_arr(g, KEY_TYPES, &elem, &n, &found));
    if (!found) return DCP_OK;
    DCP_TRY(check_array(g, KEY_TYPES, (size_t)t->n_vocab, &n));
    for (size_t i = 0; i < n; i++) {
        int64_t type;
        DCP_TRY(gguf_arr_int(g, KEY_TYPES, i, &type));
        if (type < TOK_NORMAL || type > TOK_BYTE) {
            return dcp__fail(DCP_ERR_FORMAT, "%s: %s %zu is %lld, not 1 to 6", gguf_path(g),
                             KEY_TYPES, i, (long long)type);
        }
        t->type[i] = (uint8_t)type;
    }
    return DCP_OK;
}

static dcp_status load_scores(const struct gguf *g, struct tokenizer *t)
{
    size_t n;
    void *ptr;
    DCP_TRY(check_array(g, KEY_SCORES, (size_t)t->n_vocab, &n));
    DCP_TRY(dcp__alloc_array(n, sizeof(float), "token scores", &ptr));
    t->score = ptr;
    for (size_t i = 0; i < n; i++) {
        double score;
        DCP_TRY(gguf_arr_f64(g, KEY_SCORES, i, &score));
        if (isnan(score)) {
            return dcp__fail(DCP_ERR_FORMAT, "%s: %s %zu is not a number", gguf_path(g), KEY_SCORES,
                             i);
        }
        t->score[i] = (float)score;
    }
    return DCP_OK;
}

/* Byte-level BPE spells each byte as a visible character: itself where Latin-1 has one that shows,
 * else the next free of U+0100 and up. byte_of[] is the way back; -1: no byte. */
enum { N_BYTE_CHARS = 256 + 68 };
static void fill_byte_chars(int16_t byte_of[N_BYTE_CHARS])
{
    int next = 256;
    memset(byte_of, 0xff, N_BYTE_CHARS * sizeof(byte_of[0]));
    for (int b = 0; b < 256; b++) {
        const bool shows = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
        byte_of[shows ? b : next++] = (int16_t)b;
    }
}

/* Writes the bytes that spelling s stands for to dst (never more than n) and returns their number.
 * A spelling that is not made of byte characters stands for itself. */
static size_t decode_byte_chars(const int16_t byte_of[N_BYTE_CHARS], const char *s, size_t n,
                                char *dst)
{
    size_t written = 0;
    for (size_t at = 0; at < n;) {
        int32_t c;
        const size_t len = tok__utf8_get(s + at, n - at, &c);
        if (len == 0 || c >= N_BYTE_CHARS || byte_of[c] < 0) {
            memcpy(dst, s, n);
            return n;
        }
        dst[written++] = (char)byte_of[c];
        at += len;
    }
    return written;
}

static size_t decode_spm(const char *s, size_t n, char *dst)
{
    size_t written = 0;
    for (size_t at = 0; at < n;) {
        if (n - at >= 3 && memcmp(s + at, spm_space, 3) == 0) {
            dst[written++] = ' ';
            at += 3;
        } else {
            dst[written++] = s[at++];
        }
    }
    return written;
}

/* <0x41> */
static int parse_byte_token(const char *s, size_t n)
{
    unsigned value = 0;
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        const char c = s[i];
        unsigned digit;
        if (c >= '0' && c <= '9') {
            digit = (unsigned)(c - '0');
        } else if (c >= 'A' && c <= 'F') {
            digit = (unsigned)(c - 'A') + 10;
        } else if (c >= 'a' && c <= 'f') {
            digit = (unsigned)(c - 'a') + 10;
        } else {
            return -1;
        }
        value = value << 4 | digit;
    }
    return (int)value;
}

static dcp_status fill_pieces(const struct gguf *g, struct tokenizer *t)
{
    int16_t byte_of[N_BYTE_CHARS];
    void *ptr;
    size_t at = 0;
    size_t n_normal = 0;
    fill_byte_chars(byte_of);
    memset(t->byte_id, 0xff, sizeof(t->byte_id));
    DCP_TRY(dcp__alloc_array((size_t)t->n_vocab + 1, sizeof(size_t), "pieces", &ptr));
    t->piece.offset = ptr;
    /* No piece is longer than its spelling. */
    DCP_TRY(dcp__alloc(t->spelling.offset[t->n_vocab], "pieces", &ptr));
    t->piece.bytes = ptr;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        size_t n;
        const char *s = tok__string(&t->spelling, id, &n);
        char *dst = t->piece.bytes + at;
        size_t written = 0;
        int b;
        switch (t->type[id]) {
        case TOK_CONTROL:
        case TOK_UNKNOWN:
            break;
        case TOK_BYTE:
            b = parse_byte_token(s, n);
            if (b < 0) {
                return dcp__fail(DCP_ERR_FORMAT,
                                 "%s: %s %d is of type byte but spelled \"%.20s\", not <0xHH>",
                                 gguf_path(g), KEY_TOKENS, (int)id, s);
            }
            dst[written++] = (char)b;
            if (t->byte_id[b] < 0) t->byte_id[b] = id;
            break;
        case TOK_USER_DEFINED:
            if (t->is_spm) {
                written = decode_spm(s, n, dst);
            } else {
                memcpy(dst, s, n);
                written = n;
            }
            break;
        default:
            written = t->is_spm ? decode_spm(s, n, dst) : decode_byte_chars(byte_of, s, n, dst);
            n_normal++;
            if (written > t->max_piece_bytes) t->max_piece_bytes = written;
            break;
        }
        at += written + 1;
        t->piece.offset[id + 1] = at;
    }
    DCP_TRY(tok__map_create(&t->by_piece, &t->piece, n_normal));
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (t->type[id] == TOK_NORMAL) tok__map_insert(&t->by_piece, id);
    }
    return DCP_OK;
}

/* Which pairs of adjacent bytes occur inside tokens: between two that never do no merge can reach,
 * so text may be cut there, mostly at word borders, without changing its ids. */
static dcp_status fill_joined(struct tokenizer *t)
{
    void *ptr;
    DCP_TRY(dcp__alloc(65536 / 8, "byte pairs", &ptr));
    t->joined = ptr;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (t->type[id] != TOK_NORMAL) continue;
        size_t n;
        const unsigned char *s = (const unsigned char *)tok__string(&t->piece, id, &n);
        for (size_t i = 1; i < n; i++)
            t->joined[s[i - 1] << 5 | s[i] >> 3] |= (uint8_t)(1u << (s[i] & 7));
    }
    return DCP_OK;
}

static dcp_status load_merges(const struct gguf *g, struct tokenizer *t)
{
    size_t n;
    size_t n_slots = 16;
    void *ptr;
    DCP_TRY(check_array(g, KEY_MERGES, 0, &n));
    if (n > UINT32_MAX / 4) {
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s has %zu elements", gguf_path(g), KEY_MERGES, n);
    }
    while (n_slots < 2 * n) n_slots *= 2;
    DCP_TRY(dcp__alloc_array(n_slots, sizeof(struct tok_pair), "merges", &ptr));
    t->pairs = ptr;
    t->pair_mask = n_slots - 1;
    char *joined = NULL;
    size_t joined_bytes = 0;
    dcp_status st = DCP_OK;
    for (size_t i = 0; i < n && st == DCP_OK; i++) {
        const char *s;
        size_t len;
        st = gguf_arr_str(g, KEY_MERGES, i, &s, &len);
        if (st != DCP_OK) break;
        /* The space that parts left and right; byte characters hold none, and neither is empty. */
        const char *space = len < 3 ? NULL : memchr(s + 1, ' ', len - 2);
        if (len > joined_bytes) {
            dcp__free(joined);
            joined = NULL;
            joined_bytes = 2 * len;
            st = dcp__alloc(joined_bytes, "merge", &ptr);
            if (st != DCP_OK) break;
            joined = ptr;
        }
        int32_t left = -1;
        int32_t right = -1;
        int32_t id = -1;
        if (space != NULL) {
            const size_t n_left = (size_t)(space - s);
            const size_t n_right = len - n_left - 1;
            memcpy(joined, s, n_left);
            memcpy(joined + n_left, space + 1, n_right);
            left = tok__map_find(&t->by_spelling, s, n_left);
            right = tok__map_find(&t->by_spelling, space + 1, n_right);
            id = tok__map_find(&t->by_spelling, joined, n_left + n_right);
        }
        if (left < 0 || right < 0 || id < 0) {
            st =
                dcp__fail(DCP_ERR_FORMAT, "%s: %s %zu \"%.*s\" is not two tokens that make a third",
                          gguf_path(g), KEY_MERGES, i, (int)(len < 60 ? len : 60), s);
            break;
        }
        const uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
        size_t k = (size_t)((key * 0x9e3779b97f4a7c15u) >> 20) & t->pair_mask;
        while (t->pairs[k].key != 0 && t->pairs[k].key != key) k = (k + 1) & t->pair_mask;
        if (t->pairs[k].key == 0) t->pairs[k] = (struct tok_pair){key, (uint32_t)i, id};
    }
    dcp__free(joined);
    return st;
}

dcp_status tok__vocab_load(const struct gguf *g, struct tokenizer *t)
{
    DCP_TRY(load_spellings(g, t));
    DCP_TRY(load_types(g, t));
    DCP_TRY(fill_pieces(g, t));
    if (t->is_spm) {
        DCP_TRY(load_scores(g, t));
        return fill_joined(t);
    }
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        const int32_t id = tok__map_find(&t->by_piece, &byte, 1);
        if (id >= 0) t->byte_id[b] = id;
    }
    return load_merges(g, t);
}

void tok__vocab_free(struct tokenizer *t)
{
    dcp__free(t->spelling.bytes);
    dcp__free(t->spelling.offset);
    dcp__free(t->piece.bytes);
    dcp__free(t->piece.offset);
    dcp__free(t->by_spelling.slot);
    dcp__free(t->by_piece.slot);
    dcp__free(t->type);
    dcp__free(t->score);
    dcp__free(t->joined);
    dcp__free(t->pairs);
}
