/* SPDX-License-Identifier: Apache-2.0 */
/* Deterministic mutation of tokenizer files and of texts:  fuzz_tokenizer DATA [ROUNDS [SEED]]
 * DATA is the folder of the small tokenizers (tests/data/tokenizer). A round damages one file in a
 * few places and, should it still open, encodes a text with it; then it encodes a random text with
 * the sound files and checks that bytes come back and that a second run gives the same ids. Exit 0:
 * no finding. A crash or a report by a sanitizer is one too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/chat.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"

enum { N_FILES = 4, TEXT_BYTES = 300 };
static const char *const names[N_FILES] = {"gpt-2", "smollm", "llama-bpe", "spm"};

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static char *read_file(const char *path, size_t *n_bytes_out)
{
    FILE *f = fopen(path, "rb");
    char *bytes = NULL;
    if (f == NULL) return NULL;
    fseek(f, 0, SEEK_END);
    const long n = ftell(f);
    rewind(f);
    if (n > 0) bytes = malloc((size_t)n);
    if (bytes != NULL && fread(bytes, 1, (size_t)n, f) != (size_t)n) {
        free(bytes);
        bytes = NULL;
    }
    fclose(f);
    *n_bytes_out = (size_t)n;
    return bytes;
}

static size_t random_text(uint64_t *seed, char *text)
{
    static const char *const parts[] = {"<sep>", "<sep2", "<tool>", "<s>",  "<|eot_id|>",   "the ",
                                        "'ll",   "\n\n",  "   ",    "1234", "\xe2\x96\x81", "\xc3"};
    const size_t n = next_random(seed) % TEXT_BYTES;
    size_t at = 0;
    while (at < n) {
        const uint64_t r = next_random(seed);
        const char *part = parts[(r >> 8) % (sizeof(parts) / sizeof(parts[0]))];
        if (r % 3 == 0 && at + strlen(part) <= n) {
            memcpy(text + at, part, strlen(part));
            at += strlen(part);
        } else {
            text[at++] = (char)(r % 3 == 1 ? r >> 16 : 0x20 + (r >> 16) % 0x5f);
        }
    }
    return at;
}

/* The bytes that come back from ids equal the text (U+2581 aside, which SentencePiece reads as a
 * space). */
static int comes_back(const struct tokenizer *t, const char *text, size_t n,
                      const struct token_list *l)
{
    size_t at = 0;
    size_t n_skip = tokenizer_adds_space_prefix(t) && n > 0 ? 1 : 0;
    for (size_t i = 0; i < l->n; i++) {
        const char *bytes;
        size_t len;
        if (tokenizer_is_control(t, l->ids[i])) return 0;
        if (tokenizer_piece(t, l->ids[i], &bytes, &len) != DCP_OK) return 0;
        for (size_t k = 0; k < len; k++) {
            if (n_skip > 0) {
                n_skip--;
                continue;
            }
            if (tokenizer_adds_space_prefix(t) && bytes[k] == ' ' && n - at >= 3 &&
                memcmp(text + at, "\xe2\x96\x81", 3) == 0) {
                at += 3;
            } else if (at < n && text[at] == bytes[k]) {
                at++;
            } else {
                return 0;
            }
        }
    }
    return at == n;
}

static int try_text(const struct tokenizer *t, const char *text, size_t n)
{
    struct token_list a = {0};
    struct token_list b = {0};
    const int ok = tokenizer_encode(t, text, n, 0, &a) == DCP_OK &&
                   tokenizer_encode(t, text, n, 0, &b) == DCP_OK && a.n == b.n &&
                   (a.n == 0 || memcmp(a.ids, b.ids, a.n * sizeof(int32_t)) == 0) &&
                   comes_back(t, text, n, &a) &&
                   tokenizer_encode(t, text, n, TOK_PARSE_SPECIAL | TOK_ADD_BOS, &a) == DCP_OK;
    token_list_free(&a);
    token_list_free(&b);
    return ok;
}

/* Opens a damaged copy; whatever the statuses, nothing may crash and no id may leave its range. */
static int try_file(uint64_t *seed, const char *bytes, size_t n_bytes, const char *path,
                    const char *text, size_t n_text, int *n_opened)
{
    char *damaged = malloc(n_bytes);
    if (damaged == NULL) return 0;
    memcpy(damaged, bytes, n_bytes);
    const size_t n_changes = 1 + next_random(seed) % 4;
    for (size_t i = 0; i < n_changes; i++) {
        const size_t at = next_random(seed) % n_bytes;
        const uint64_t r = next_random(seed);
        const unsigned flipped = (unsigned char)damaged[at] ^ 1u << ((r >> 8) % 8);
        damaged[at] = (char)(r % 2 == 0 ? flipped : (unsigned)(r >> 8 & 0xff));
    }
    const size_t n_kept = next_random(seed) % 8 == 0 ? next_random(seed) % n_bytes : n_bytes;
    FILE *f = fopen(path, "wb");
    int ok = f != NULL && fwrite(damaged, 1, n_kept, f) == n_kept;
    if (f != NULL) ok = fclose(f) == 0 && ok;
    free(damaged);
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct token_list l = {0};
    if (ok && gguf_open(path, &g) == DCP_OK && tokenizer_create(g, &t) == DCP_OK) {
        const struct chat_message m = {"user", text, n_text};
        (void)tokenizer_encode(t, text, n_text, TOK_PARSE_SPECIAL | TOK_ADD_BOS, &l);
        (void)chat_encode(g, t, &m, 1, TOK_ADD_BOS, &l);
        for (size_t i = 0; i < l.n; i++) {
            ok = ok && l.ids[i] >= 0 && l.ids[i] < tokenizer_vocab_size(t);
        }
        (*n_opened)++;
    }
    token_list_free(&l);
    tokenizer_destroy(t);
    gguf_close(g);
    return ok;
}

int main(int argc, char **argv)
{
    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: fuzz_tokenizer DATA [ROUNDS [SEED]]\n");
        return 2;
    }
    const long rounds = argc > 2 ? atol(argv[2]) : 500;
    const uint64_t first_seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
    char *bytes[N_FILES];
    size_t n_bytes[N_FILES];
    struct tokenizer *sound[N_FILES];
    char path[512];
    int rc = 1;
    for (int f = 0; f < N_FILES; f++) {
        struct gguf *g = NULL;
        snprintf(path, sizeof(path), "%s/%s.gguf", argv[1], names[f]);
        bytes[f] = read_file(path, &n_bytes[f]);
        if (bytes[f] == NULL || gguf_open(path, &g) != DCP_OK ||
            tokenizer_create(g, &sound[f]) != DCP_OK) {
            fprintf(stderr, "%s: %s\n", path, dcp_last_error());
            return 1;
        }
        gguf_close(g);
    }
    char scratch[] = "/tmp/dcp-attn-fuzz-XXXXXX";
    const int fd = mkstemp(scratch);
    if (fd < 0) return 1;
    close(fd);
    int n_opened = 0;
    for (long round = 0; round < rounds; round++) {
        /* A seed per round: a finding is replayed with ROUNDS 1 and this seed. */
        const uint64_t round_seed = first_seed + (uint64_t)round;
        uint64_t seed = round_seed;
        char text[TEXT_BYTES];
        const size_t n = random_text(&seed, text);
        const size_t f = next_random(&seed) % N_FILES;
        int ok = try_file(&seed, bytes[f], n_bytes[f], scratch, text, n, &n_opened);
        for (int k = 0; k < N_FILES; k++) ok = try_text(sound[k], text, n) && ok;
        if (!ok) {
            printf("finding: seed %llu, file %s\n", (unsigned long long)round_seed, names[f]);
            goto done;
        }
    }
    printf("%ld rounds from seed %llu, %d damaged files opened\n", rounds,
           (unsigned long long)first_seed, n_opened);
    rc = 0;
done:
    unlink(scratch);
    for (int f = 0; f < N_FILES; f++) {
        tokenizer_destroy(sound[f]);
        free(bytes[f]);
    }
    return rc;
}
