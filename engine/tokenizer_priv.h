/* SPDX-License-Identifier: Apache-2.0 */
/* What the tokenizer's own files share. Data flow of an encode:
 *
 *   text -> special tokens cut out (tokenizer_encode.c) -> runs of plain text
 *        -> pieces (tokenizer_split.c: rules of the pre-tokenizer; SentencePiece: safe cuts)
 *        -> ids (tokenizer_merge.c: merges, best first) */
#ifndef DCP_ENGINE_TOKENIZER_PRIV_H
#define DCP_ENGINE_TOKENIZER_PRIV_H

#include "engine/tokenizer.h"

/* Token types as GGUF numbers them. */
enum tok_type {
    TOK_NORMAL = 1,
    TOK_UNKNOWN = 2,
    TOK_CONTROL = 3,
    TOK_USER_DEFINED = 4,
    TOK_UNUSED = 5,
    TOK_BYTE = 6
};

/* One string per id, each followed by a NUL: [n_ids] strings, [n_ids + 1] offsets. */
struct tok_strings {
    char *bytes;
    size_t *offset;
};

/* Hash from string to id over a tok_strings; open addressing, slots hold id + 1. */
struct tok_map {
    const struct tok_strings *strings;
    uint32_t *slot;
    size_t mask;
};

/* Merge rule: tokens l and r become id; key is (l << 32 | r) + 1, 0 marks an empty slot. */
struct tok_pair {
    uint64_t key;
    uint32_t rank;
    int32_t id;
};

/* Spellings that are cut out of the text before anything else, sorted by bytes. first[c] is the
 * index of the first one that begins with byte c or a greater one. */
struct tok_special_entry {
    const char *bytes;
    size_t n_bytes;
    int32_t id;
};
struct tok_specials {
    struct tok_special_entry *entry;
    size_t n;
    uint32_t first[257];
};

enum { TOK_MAX_ENDS = 24, TOK_MAX_REPLACEMENT = 3 };

struct tok_splitter;

struct tokenizer {
    bool is_spm;       /* SentencePiece-style; else byte-level BPE */
    bool whole_pieces; /* a piece that is a token is taken as it is, whatever the merges say */
    bool adds_bos, adds_space_prefix;
    int32_t n_vocab, bos, eos, unk;
    int32_t ends[TOK_MAX_ENDS];
    int n_ends;
    uint8_t *type;                            /* [n_vocab] */
    float *score;                             /* [n_vocab], SentencePiece only */
    struct tok_strings spelling;              /* as in the file */
    struct tok_strings piece;                 /* the bytes that it stands for */
    struct tok_map by_spelling;               /* all ids */
    struct tok_map by_piece;                  /* normal tokens only: what text may become */
    size_t max_piece_bytes;                   /* of normal tokens */
    int32_t byte_id[256];                     /* -1: this byte has no token of its own */
    int32_t replacement[TOK_MAX_REPLACEMENT]; /* ids of U+FFFD, for bytes without a token */
    int n_replacement;
    struct tok_pair *pairs; /* byte-level BPE */
    size_t pair_mask;
    uint8_t *joined;          /* SentencePiece: bit (a << 8 | b): some token holds byte a then b */
    struct tok_specials user; /* user-defined */
    struct tok_specials control;   /* control and unknown */
    struct tok_splitter *splitter; /* byte-level BPE */
};

/* --- tokenizer_vocab.c --- */
dcp_status tok__map_create(struct tok_map *m, const struct tok_strings *s, size_t n_keys);
void tok__map_insert(struct tok_map *m, int32_t id); /* the first of equal strings stays */
int32_t tok__map_find(const struct tok_map *m, const char *bytes, size_t n_bytes); /* -1 */
dcp_status tok__vocab_load(const struct gguf *g, struct tokenizer *t);
void tok__vocab_free(struct tokenizer *t);
static inline const char *tok__string(const struct tok_strings *s, int32_t id, size_t *n_bytes_out)
{
    *n_bytes_out = s->offset[id + 1] - s->offset[id] - 1;
    return s->bytes + s->offset[id];
}

/* --- tokenizer_split.c --- */
/* Bytes of the valid UTF-8 sequence at text, 0 if there is none; n_bytes >= 1. */
size_t tok__utf8_bytes(const char *text, size_t n_bytes);
/* The same with its code point. */
size_t tok__utf8_get(const char *text, size_t n_bytes, int32_t *codepoint_out);

typedef dcp_status tok_piece_fn(void *ctx, const char *piece, size_t n_bytes);
/* name: of the pre-tokenizer; NULL if the file names none. *whole_pieces_out and *adds_bos_out are
 * the family's habits that files do not spell out. */
dcp_status tok__splitter_create(const char *name, struct tok_splitter **out, bool *whole_pieces_out,
                                bool *adds_bos_out);
void tok__splitter_destroy(struct tok_splitter *s);
/* What one encode call needs for matching; NULL splitter gives NULL. */
struct tok_match;
dcp_status tok__match_create(const struct tok_splitter *s, struct tok_match **out);
void tok__match_destroy(struct tok_match *m);
/* Calls fn for each piece in order; the pieces make up the text exactly. */
dcp_status tok__split(const struct tok_splitter *s, struct tok_match *m, const char *text,
                      size_t n_bytes, tok_piece_fn *fn, void *ctx);

/* --- tokenizer_merge.c --- */
struct tok_symbol;
struct tok_candidate;
struct tok_merger {
    const struct tokenizer *t;
    struct token_list *out;
    struct tok_symbol *symbols;
    struct tok_candidate *heap;
    size_t n_heap, capacity; /* capacity in symbols; the heap has twice as many */
};
/* A tok_piece_fn with a struct tok_merger as ctx: appends the ids of one piece. */
dcp_status tok__merge_piece(void *ctx, const char *piece, size_t n_bytes);
void tok__merger_fini(struct tok_merger *m);

/* --- tokenizer_encode.c --- */
dcp_status tok__specials_create(struct tokenizer *t);
void tok__specials_free(struct tokenizer *t);

#endif
