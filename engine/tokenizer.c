/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizer objects: which kind a file has, its special ids, and the questions asked of one. */
#include "engine/tokenizer.h"

#include <string.h>

#include "base/alloc_priv.h"
#include "engine/gguf.h"
#include "engine/tokenizer_priv.h"

void token_list_free(struct token_list *l)
{
    if (l == NULL) return;
    dcp__free(l->ids);
    *l = (struct token_list){NULL, 0, 0};
}

dcp_status token_list_push(struct token_list *l, int32_t id)
{
    if (l->n == l->capacity) {
        const size_t capacity = l->capacity == 0 ? 64 : 2 * l->capacity;
        void *ptr;
        DCP_TRY(dcp__alloc_array(capacity, sizeof(int32_t), "token list", &ptr));
        if (l->n > 0) memcpy(ptr, l->ids, l->n * sizeof(int32_t));
        dcp__free(l->ids);
        l->ids = ptr;
        l->capacity = capacity;
    }
    l->ids[l->n++] = id;
    return DCP_OK;
}

/* An id of the vocabulary, -1 if the key is absent. */
static dcp_status get_id(const struct gguf *g, const char *key, int32_t n_vocab, int32_t *id_out)
{
    int64_t id = -1;
    bool found;
    *id_out = -1;
    DCP_TRY(gguf_get_int(g, key, &id, &found));
    if (!found) return DCP_OK;
    /* Some writers store "none" as -1, whatever the type. */
    if (id == -1 || id == (int64_t)UINT32_MAX) return DCP_OK;
    if (id < 0 || id >= n_vocab) {
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s is %lld in a vocabulary of %d", gguf_path(g), key,
                         (long long)id, (int)n_vocab);
    }
    *id_out = (int32_t)id;
    return DCP_OK;
}

static void add_end(struct tokenizer *t, int32_t id)
{
    if (id >= 0 && !tokenizer_is_end(t, id) && t->n_ends < TOK_MAX_ENDS) t->ends[t->n_ends++] = id;
}

static dcp_status load_ends(const struct gguf *g, struct tokenizer *t)
{
    static const char *const keys[] = {"tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    /* Spellings that end a turn or a text in the families at hand. A file often names only one of
     * its end tokens, and a chat model answers with the other. */
    static const char *const names[] = {
        "<|im_end|>",    "<|endoftext|>",   "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>",
        "<end_of_turn>", "<|end_of_turn|>", "<|end|>",         "</s>",       "<eos>"};
    add_end(t, t->eos);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        int32_t id;
        DCP_TRY(get_id(g, keys[i], t->n_vocab, &id));
        add_end(t, id);
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const int32_t id = tokenizer_find(t, names[i]);
        if (id >= 0 && t->type[id] == TOK_CONTROL) add_end(t, id);
    }
    return DCP_OK;
}

/* The ids of U+FFFD, found by the merges themselves while n_replacement is 0. */
static dcp_status find_replacement(struct tokenizer *t)
{
    struct token_list l = {NULL, 0, 0};
    struct tok_merger m = {t, &l, NULL, NULL, 0, 0};
    static const unsigned char bytes[] = {0xef, 0xbf, 0xbd};
    for (int i = 0; i < 3; i++) {
        if (t->byte_id[bytes[i]] < 0) return DCP_OK;
    }
    const dcp_status st = tok__merge_piece(&m, (const char *)bytes, sizeof(bytes));
    if (st == DCP_OK) {
        memcpy(t->replacement, l.ids, l.n * sizeof(int32_t));
        t->n_replacement = (int)l.n;
    }
    tok__merger_fini(&m);
    token_list_free(&l);
    return st;
}

static dcp_status load(const struct gguf *g, struct tokenizer *t)
{
    const char *model = NULL;
    const char *pre = NULL;
    bool found;
    bool adds_bos = false;
    DCP_TRY(gguf_get_str(g, "tokenizer.ggml.model", &model, NULL, &found));
    if (!found) return dcp__fail(DCP_ERR_FORMAT, "%s: no tokenizer.ggml.model", gguf_path(g));
    if (strcmp(model, "llama") == 0) {
        t->is_spm = true;
        t->adds_space_prefix = true;
        adds_bos = true;
    } else if (strcmp(model, "gpt2") == 0) {
        DCP_TRY(gguf_get_str(g, "tokenizer.ggml.pre", &pre, NULL, &found));
        DCP_TRY(
            tok__splitter_create(found ? pre : NULL, &t->splitter, &t->whole_pieces, &adds_bos));
    } else {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: tokenizer.ggml.model \"%.60s\"; supported: gpt2, llama", gguf_path(g),
                         model);
    }
    DCP_TRY(tok__vocab_load(g, t));
    DCP_TRY(get_id(g, "tokenizer.ggml.bos_token_id", t->n_vocab, &t->bos));
    DCP_TRY(get_id(g, "tokenizer.ggml.eos_token_id", t->n_vocab, &t->eos));
    DCP_TRY(get_id(g, "tokenizer.ggml.unknown_token_id", t->n_vocab, &t->unk));
    DCP_TRY(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->adds_bos, &found));
    if (!found) t->adds_bos = adds_bos;
    if (t->is_spm) {
        bool value = false;
        DCP_TRY(gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &value, &found));
        if (found) t->adds_space_prefix = value;
    } else {
        DCP_TRY(find_replacement(t));
    }
    DCP_TRY(load_ends(g, t));
    return tok__specials_create(t);
}

dcp_status tokenizer_create(const struct gguf *g, struct tokenizer **out)
{
    void *ptr;
    DCP_TRY(dcp__alloc(sizeof(struct tokenizer), "tokenizer", &ptr));
    struct tokenizer *t = ptr;
    const dcp_status st = load(g, t);
    if (st != DCP_OK) {
        tokenizer_destroy(t);
        return st;
    }
    *out = t;
    return DCP_OK;
}

void tokenizer_destroy(struct tokenizer *t)
{
    if (t == NULL) return;
    tok__specials_free(t);
    tok__vocab_free(t);
    tok__splitter_destroy(t->splitter);
    dcp__free(t);
}

static bool is_id(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n_vocab;
}

dcp_status tokenizer_piece(const struct tokenizer *t, int32_t id, const char **bytes_out,
                           size_t *n_bytes_out)
{
    if (!is_id(t, id)) {
        return dcp__fail(DCP_ERR_ARG, "id %d in a vocabulary of %d", (int)id, (int)t->n_vocab);
    }
    *bytes_out = tok__string(&t->piece, id, n_bytes_out);
    return DCP_OK;
}

const char *tokenizer_spelling(const struct tokenizer *t, int32_t id, size_t *n_bytes_out)
{
    size_t n = 0;
    const char *s = is_id(t, id) ? tok__string(&t->spelling, id, &n) : NULL;
    if (n_bytes_out != NULL) *n_bytes_out = n;
    return s;
}

bool tokenizer_is_control(const struct tokenizer *t, int32_t id)
{
    return is_id(t, id) && (t->type[id] == TOK_CONTROL || t->type[id] == TOK_UNKNOWN);
}

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->n_ends; i++) {
        if (t->ends[i] == id) return true;
    }
    return false;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

bool tokenizer_adds_bos(const struct tokenizer *t)
{
    return t->adds_bos && t->bos >= 0;
}

bool tokenizer_adds_space_prefix(const struct tokenizer *t)
{
    return t->adds_space_prefix;
}

int32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->n_vocab;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *spelling)
{
    return tok__map_find(&t->by_spelling, spelling, strlen(spelling));
}
