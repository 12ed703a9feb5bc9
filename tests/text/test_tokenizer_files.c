/* SPDX-License-Identifier: Apache-2.0 */
/* Small tokenizers made by scripts/make_tokenizer_data.py, each against ids of an independent
 * implementation: every pre-tokenizer, and SentencePiece with a leading space and byte fallback. */
#include "base/alloc_priv.h"
#include "engine/chat.h"
#include "text_util.h"

static char *from_hex(const char *hex, size_t *n_bytes_out)
{
    const size_t n = strlen(hex) / 2;
    char *bytes = malloc(n + 1);
    assert_non_null(bytes);
    for (size_t i = 0; i < n; i++) {
        unsigned value;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &value), 1);
        bytes[i] = (char)value;
    }
    *n_bytes_out = n;
    return bytes;
}

static void check_cases(const struct tokenizer *t, const json_t *cases, unsigned flags)
{
    size_t i;
    json_t *one;
    json_array_foreach(cases, i, one)
    {
        const char *hex = json_string_value(json_object_get(one, "hex"));
        char what[160];
        size_t n_bytes;
        char *text = from_hex(hex, &n_bytes);
        struct token_list l = {0};
        must(tokenizer_encode(t, text, n_bytes, flags, &l));
        snprintf(what, sizeof(what), "case %zu (%.100s)", i, hex);
        check_ids(what, json_object_get(one, "ids"), &l);
        token_list_free(&l);
        free(text);
    }
}

static void check_file(const char *name)
{
    char path[512];
    snprintf(path, sizeof(path), "%stokenizer/%s.gguf", TEST_DATA, name);
    struct tokenizer *t = load_tokenizer(path);
    snprintf(path, sizeof(path), "%stokenizer/%s.json", TEST_DATA, name);
    json_t *root = read_json(path);
    assert_true(json_array_size(json_object_get(root, "cases")) > 50);
    check_cases(t, json_object_get(root, "cases"), 0);
    check_cases(t, json_object_get(root, "special"), TOK_PARSE_SPECIAL);
    json_decref(root);
    tokenizer_destroy(t);
}

static void test_gpt_2(void **state)
{
    (void)state;
    check_file("gpt-2");
}

static void test_smollm(void **state)
{
    (void)state;
    check_file("smollm");
}

static void test_llama_bpe(void **state)
{
    (void)state;
    check_file("llama-bpe");
}

static void test_spm(void **state)
{
    (void)state;
    check_file("spm");
}

/* Every byte, alone and in random company, comes back: byte-level vocabularies here have all 256,
 * the SentencePiece one falls back to bytes and adds a space in front. */
static void test_any_bytes(void **state)
{
    static const char *const names[] = {"gpt-2", "smollm", "llama-bpe", "spm"};
    uint64_t seed = 99;
    (void)state;
    printf("seed %llu\n", (unsigned long long)seed);
    for (int f = 0; f < 4; f++) {
        char path[512];
        snprintf(path, sizeof(path), "%stokenizer/%s.gguf", TEST_DATA, names[f]);
        struct tokenizer *t = load_tokenizer(path);
        const size_t n_added = tokenizer_adds_space_prefix(t) ? 1 : 0;
        assert_int_equal(n_added, f == 3);
        struct token_list l = {0};
        for (int round = 0; round < 2000; round++) {
            char text[64];
            const size_t n = 1 + next_random(&seed) % sizeof(text);
            for (size_t i = 0; i < n; i++) text[i] = (char)next_random(&seed);
            l.n = 0;
            must(tokenizer_encode(t, text, n, 0, &l));
            size_t n_joined;
            char *joined = join_pieces(t, &l, &n_joined);
            assert_int_equal(n_joined, n + n_added);
            assert_memory_equal(joined + n_added, text, n);
            free(joined);
        }
        token_list_free(&l);
        tokenizer_destroy(t);
    }
}

/* Each byte that is no UTF-8 stands alone, whatever merges its neighbours have. */
static void test_invalid_bytes_alone(void **state)
{
    (void)state;
    struct tokenizer *t = load_tokenizer(TEST_DATA "tokenizer/gpt-2.gguf");
    struct token_list whole = {0};
    struct token_list parts = {0};
    /* A lone continuation byte, a cut-off sequence, an overlong one, a surrogate. */
    const char text[] = "the \x80the \xe6\x9d\xc0\xafthe\xed\xa0\x80";
    static const struct token_span cuts[] = {{0, 4},   {4, 5},   {5, 9},   {9, 10},
                                             {10, 11}, {11, 12}, {12, 13}, {13, 16},
                                             {16, 17}, {17, 18}, {18, 19}};
    must(tokenizer_encode(t, text, sizeof(text) - 1, 0, &whole));
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        must(tokenizer_encode(t, text + cuts[i].begin, cuts[i].end - cuts[i].begin, 0, &parts));
    }
    assert_int_equal(whole.n, parts.n);
    assert_memory_equal(whole.ids, parts.ids, whole.n * sizeof(int32_t));
    token_list_free(&whole);
    token_list_free(&parts);
    tokenizer_destroy(t);
}

/* The file with one stretch of bytes replaced by another of the same length. */
static dcp_status create_patched(const char *name, const char *from, const char *to)
{
    char path[512];
    char patched[] = "/tmp/dcp-attn-test-XXXXXX";
    size_t n;
    snprintf(path, sizeof(path), "%stokenizer/%s.gguf", TEST_DATA, name);
    char *bytes = read_file(path, &n);
    char *at = memmem(bytes, n, from, strlen(from));
    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    memcpy(at, to, strlen(to));
    const int fd = mkstemp(patched);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
    free(bytes);
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    must(gguf_open(patched, &g));
    unlink(patched);
    const dcp_status st = tokenizer_create(g, &t);
    gguf_close(g);
    tokenizer_destroy(t);
    return st;
}

static void test_refusals(void **state)
{
    (void)state;
    assert_int_equal(create_patched("smollm", "ggml.pre", "ggml.prf"), DCP_ERR_NOT_SUPPORTED);
    assert_non_null(strstr(dcp_last_error(), "gpt-2, smollm, llama-bpe"));
    assert_int_equal(create_patched("llama-bpe", "llama-bpe", "something"), DCP_ERR_NOT_SUPPORTED);
    assert_non_null(strstr(dcp_last_error(), "\"something\""));
    assert_non_null(strstr(dcp_last_error(), "gpt-2, smollm, llama-bpe"));
    assert_int_equal(create_patched("gpt-2", "gpt2", "rwkv"), DCP_ERR_NOT_SUPPORTED);
    assert_non_null(strstr(dcp_last_error(), "\"rwkv\""));
    assert_int_equal(create_patched("gpt-2", "ggml.model", "ggml.mudel"), DCP_ERR_FORMAT);
    assert_int_equal(create_patched("gpt-2", "ggml.merges", "ggml.murges"), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "tokenizer.ggml.merges"));
    assert_int_equal(create_patched("gpt-2", "ggml.tokens", "ggml.takens"), DCP_ERR_FORMAT);
    assert_int_equal(create_patched("spm", "ggml.scores", "ggml.scares"), DCP_ERR_FORMAT);
    assert_int_equal(create_patched("spm", "<0x41>", "<0x4G>"), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "<0x4G>"));
    /* A merge without its space. */
    assert_int_equal(create_patched("gpt-2", "e r", "eer"), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "eer"));
}

/* Memory that runs out anywhere: an error, and everything given back. */
static void test_out_of_memory(void **state)
{
    static const char *const names[] = {"llama-bpe", "spm"};
    static const char text[] = "the owner of  a position\n\xe2\x96\x81 12345";
    const struct chat_message m = {"user", text, sizeof(text) - 1};
    (void)state;
    for (int f = 0; f < 2; f++) {
        char path[512];
        struct gguf *g = NULL;
        struct tokenizer *t = NULL;
        int n_failed[2] = {0, 0};
        snprintf(path, sizeof(path), "%stokenizer/%s.gguf", TEST_DATA, names[f]);
        must(gguf_open(path, &g));
        const size_t before = dcp__alloc_current();
        for (size_t extra = 64; t == NULL; extra += 509) {
            dcp__alloc_set_limit(before + extra);
            const dcp_status st = tokenizer_create(g, &t);
            dcp__alloc_set_limit(0);
            if (st == DCP_OK) break;
            assert_int_equal(st, DCP_ERR_NOMEM);
            assert_int_equal(dcp__alloc_current(), before);
            n_failed[0]++;
        }
        const size_t loaded = dcp__alloc_current();
        for (size_t extra = 1;; extra += 97) {
            struct token_list l = {0};
            dcp__alloc_set_limit(loaded + extra);
            const dcp_status st = chat_encode(g, t, &m, 1, TOK_ADD_BOS, &l);
            dcp__alloc_set_limit(0);
            token_list_free(&l);
            assert_int_equal(dcp__alloc_current(), loaded);
            if (st == DCP_OK) break;
            assert_int_equal(st, DCP_ERR_NOMEM);
            n_failed[1]++;
        }
        assert_true(n_failed[0] > 10 && n_failed[1] > 3);
        tokenizer_destroy(t);
        assert_int_equal(dcp__alloc_current(), before);
        gguf_close(g);
    }
}

static void test_token_list(void **state)
{
    (void)state;
    struct token_list l = {0};
    for (int32_t i = 0; i < 1000; i++) must(token_list_push(&l, i));
    assert_int_equal(l.n, 1000);
    for (int32_t i = 0; i < 1000; i++) assert_int_equal(l.ids[i], i);
    token_list_free(&l);
    assert_null(l.ids);
    assert_int_equal(l.n, 0);
    token_list_free(&l);
    token_list_free(NULL);
    tokenizer_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt_2),         cmocka_unit_test(test_smollm),
        cmocka_unit_test(test_llama_bpe),     cmocka_unit_test(test_spm),
        cmocka_unit_test(test_any_bytes),     cmocka_unit_test(test_invalid_bytes_alone),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_token_list),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
