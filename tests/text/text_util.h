/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of text share: files, models, id lists, random numbers. */
#ifndef TESTS_TEXT_UTIL_H
#define TESTS_TEXT_UTIL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "dcpattn/status.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"

#define TEST_DATA DCP_SOURCE_DIR "/tests/data/"
#define GOLDEN DCP_SOURCE_DIR "/tests/golden/"

/* Fails the test with the last error if st is not DCP_OK. */
static inline void must_at(dcp_status st, int line)
{
    if (st != DCP_OK) fail_msg("line %d: %s", line, dcp_last_error());
}
#define must(call) must_at((call), __LINE__)

static inline char *read_file(const char *path, size_t *n_bytes_out)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL) fail_msg("cannot open %s", path);
    fseek(f, 0, SEEK_END);
    const size_t n = (size_t)ftell(f);
    rewind(f);
    char *bytes = malloc(n + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, n, f), n);
    bytes[n] = '\0';
    fclose(f);
    *n_bytes_out = n;
    return bytes;
}

static inline json_t *read_json(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (root == NULL) fail_msg("%s line %d: %s", path, error.line, error.text);
    return root;
}

/* Path of a model file; false, with the reason printed, if it is not there. */
static inline int find_model(const char *name, char *path, size_t capacity)
{
    const char *folder = getenv("DCP_ATTN_MODELS");
    const char *home = getenv("HOME");
    if (folder != NULL) {
        snprintf(path, capacity, "%s/%s.gguf", folder, name);
    } else {
        snprintf(path, capacity, "%s/.cache/dcp-attn/models/%s.gguf", home == NULL ? "" : home,
                 name);
    }
    if (access(path, R_OK) == 0) return 1;
    printf("skipped: no model file %s (scripts/fetch-model.sh gets it)\n", path);
    return 0;
}

static inline struct tokenizer *load_tokenizer(const char *path)
{
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    must(gguf_open(path, &g));
    must(tokenizer_create(g, &t));
    gguf_close(g);
    return t;
}

/* The ids of a JSON array equal l. */
static inline void check_ids(const char *what, const json_t *expected, const struct token_list *l)
{
    const size_t n = json_array_size(expected);
    for (size_t i = 0; i < n && i < l->n; i++) {
        const json_int_t id = json_integer_value(json_array_get(expected, i));
        if (id != l->ids[i]) {
            fail_msg("%s: id %zu is %d, expected %lld", what, i, (int)l->ids[i], (long long)id);
        }
    }
    if (n != l->n) fail_msg("%s: %zu ids, expected %zu", what, l->n, n);
}

/* All pieces of l in one buffer; free it. */
static inline char *join_pieces(const struct tokenizer *t, const struct token_list *l,
                                size_t *n_bytes_out)
{
    size_t n = 0;
    for (int pass = 0;; pass++) {
        static char nothing[1];
        char *joined = pass == 0 ? nothing : malloc(n + 1);
        size_t at = 0;
        assert_non_null(joined);
        for (size_t i = 0; i < l->n; i++) {
            const char *bytes;
            size_t len;
            must(tokenizer_piece(t, l->ids[i], &bytes, &len));
            if (pass == 1) memcpy(joined + at, bytes, len);
            at += len;
        }
        n = at;
        if (pass == 1) {
            *n_bytes_out = n;
            return joined;
        }
    }
}

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#endif
