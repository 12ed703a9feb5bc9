/* SPDX-License-Identifier: Apache-2.0 */
/* Merging the symbols of a piece into tokens, best pair first.
 *
 *     h e l l o     a list of symbols; every adjacent pair that makes a token is a candidate in
 *     h e ll o      a heap ordered by (key, place): the merge's rank, or the score turned into a
 *     he ll o       number that falls as the score grows. Merging unlinks the right symbol and
 *     he llo        makes candidates with both neighbours; candidates whose symbols have changed
 *     hello         since are recognised by their length and dropped when they come up.
 *
 * At most 2n candidates are alive for n symbols: n log n time, whatever the text. */
#include <string.h>

#include "base/alloc_priv.h"
#include "engine/tokenizer_priv.h"

struct tok_symbol {
    int32_t prev, next; /* -1: none */
    uint32_t at;        /* first byte in the piece */
    uint32_t n_bytes;   /* 0: merged into another */
    int32_t id;         /* -1: no token */
};

struct tok_candidate {
    uint32_t key; /* smaller is better */
    int32_t left, right;
    uint32_t n_bytes; /* of both together, when this was made */
    int32_t id;       /* that they become */
};

static bool is_better(const struct tok_candidate *a, const struct tok_candidate *b)
{
    return a->key < b->key || (a->key == b->key && a->left < b->left);
}

static void heap_push(struct tok_merger *m, struct tok_candidate c)
{
    size_t i = m->n_heap++;
    while (i > 0) {
        const size_t up = (i - 1) / 2;
        if (!is_better(&c, &m->heap[up])) break;
        m->heap[i] = m->heap[up];
        i = up;
    }
    m->heap[i] = c;
}

static struct tok_candidate heap_pop(struct tok_merger *m)
{
    const struct tok_candidate top = m->heap[0];
    const struct tok_candidate last = m->heap[--m->n_heap];
    size_t i = 0;
    for (;;) {
        size_t down = 2 * i + 1;
        if (down >= m->n_heap) break;
        if (down + 1 < m->n_heap && is_better(&m->heap[down + 1], &m->heap[down])) down++;
        if (!is_better(&m->heap[down], &last)) break;
        m->heap[i] = m->heap[down];
        i = down;
    }
    m->heap[i] = last;
    return top;
}

/* A number that falls as the score grows (scores are no NaN). */
static uint32_t key_of_score(float score)
{
    const float plain = score + 0.0f; /* -0 counts as 0 */
    uint32_t bits;
    memcpy(&bits, &plain, sizeof(bits));
    return (bits >> 31) != 0 ? bits : 0x7fffffffu - bits;
}

static const struct tok_pair *find_pair(const struct tokenizer *t, int32_t left, int32_t right)
{
    const uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) + 1;
    size_t i = (size_t)((key * 0x9e3779b97f4a7c15u) >> 20) & t->pair_mask;
    while (t->pairs[i].key != 0) {
        if (t->pairs[i].key == key) return &t->pairs[i];
        i = (i + 1) & t->pair_mask;
    }
    return NULL;
}

static void offer(struct tok_merger *m, const char *piece, int32_t left, int32_t right)
{
    if (left < 0 || right < 0) return;
    const struct tok_symbol *l = &m->symbols[left];
    const struct tok_symbol *r = &m->symbols[right];
    struct tok_candidate c = {0, left, right, l->n_bytes + r->n_bytes, -1};
    if (m->t->is_spm) {
        if (c.n_bytes > m->t->max_piece_bytes) return;
        c.id = tok__map_find(&m->t->by_piece, piece + l->at, c.n_bytes);
        if (c.id < 0) return;
        c.key = key_of_score(m->t->score[c.id]);
    } else {
        if (l->id < 0 || r->id < 0) return;
        const struct tok_pair *pair = find_pair(m->t, l->id, r->id);
        if (pair == NULL) return;
        c.id = pair->id;
        c.key = pair->rank;
    }
    heap_push(m, c);
}

static dcp_status reserve(struct tok_merger *m, size_t n_symbols)
{
    void *symbols;
    void *heap;
    if (n_symbols <= m->capacity) return DCP_OK;
    size_t capacity = 64;
    while (capacity < n_symbols) capacity *= 2;
    tok__merger_fini(m);
    DCP_TRY(dcp__alloc_array(capacity, sizeof(struct tok_symbol), "tokenizer symbols", &symbols));
    m->symbols = symbols;
    DCP_TRY(
        dcp__alloc_array(2 * capacity, sizeof(struct tok_candidate), "tokenizer merges", &heap));
    m->heap = heap;
    m->capacity = capacity;
    return DCP_OK;
}

void tok__merger_fini(struct tok_merger *m)
{
    dcp__free(m->symbols);
    dcp__free(m->heap);
    m->symbols = NULL;
    m->heap = NULL;
    m->capacity = 0;
}

/* A symbol that is no token: its bytes as byte tokens. */
static dcp_status emit_bytes(struct tok_merger *m, const char *bytes, size_t n_bytes)
{
    const struct tokenizer *t = m->t;
    bool is_whole = true;
    for (size_t i = 0; i < n_bytes; i++) {
        is_whole = is_whole && t->byte_id[(unsigned char)bytes[i]] >= 0;
    }
    if (is_whole) {
        for (size_t i = 0; i < n_bytes; i++) {
            DCP_TRY(token_list_push(m->out, t->byte_id[(unsigned char)bytes[i]]));
        }
        return DCP_OK;
    }
    if (t->n_replacement > 0) {
        for (int i = 0; i < t->n_replacement; i++) {
            DCP_TRY(token_list_push(m->out, t->replacement[i]));
        }
        return DCP_OK;
    }
    if (t->unk >= 0 && t->type[t->unk] != TOK_CONTROL) return token_list_push(m->out, t->unk);
    return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                     "byte 0x%02x of the text has no token in this vocabulary, which has neither "
                     "byte tokens nor an unknown token to take its place",
                     (unsigned)(unsigned char)bytes[0]);
}

dcp_status tok__merge_piece(void *ctx, const char *piece, size_t n_bytes)
{
    struct tok_merger *m = ctx;
    const struct tokenizer *t = m->t;
    if (t->whole_pieces && n_bytes <= t->max_piece_bytes) {
        const int32_t id = tok__map_find(&t->by_piece, piece, n_bytes);
        if (id >= 0) return token_list_push(m->out, id);
    }
    DCP_TRY(reserve(m, n_bytes));
    int32_t n = 0;
    for (size_t at = 0; at < n_bytes;) {
        size_t len = 1;
        int32_t id = -1;
        if (t->is_spm) {
            len = tok__utf8_bytes(piece + at, n_bytes - at);
            if (len > 0) id = tok__map_find(&t->by_piece, piece + at, len);
            if (len == 0) len = 1;
        } else {
            id = t->byte_id[(unsigned char)piece[at]];
        }
        m->symbols[n] = (struct tok_symbol){n - 1, n + 1, (uint32_t)at, (uint32_t)len, id};
        n++;
        at += len;
    }
    m->symbols[n - 1].next = -1;
    m->n_heap = 0;
    for (int32_t i = 0; i + 1 < n; i++) offer(m, piece, i, i + 1);
    while (m->n_heap > 0) {
        const struct tok_candidate c = heap_pop(m);
        struct tok_symbol *left = &m->symbols[c.left];
        struct tok_symbol *right = &m->symbols[c.right];
        if (left->n_bytes == 0 || right->n_bytes == 0 ||
            left->n_bytes + right->n_bytes != c.n_bytes) {
            continue;
        }
        left->n_bytes = c.n_bytes;
        left->id = c.id;
        left->next = right->next;
        right->n_bytes = 0;
        if (left->next >= 0) m->symbols[left->next].prev = c.left;
        offer(m, piece, left->prev, c.left);
        offer(m, piece, c.left, left->next);
    }
    for (int32_t i = 0; i >= 0; i = m->symbols[i].next) {
        const struct tok_symbol *s = &m->symbols[i];
        if (s->id >= 0) {
            DCP_TRY(token_list_push(m->out, s->id));
        } else {
            DCP_TRY(emit_bytes(m, piece + s->at, s->n_bytes));
        }
    }
    return DCP_OK;
}
