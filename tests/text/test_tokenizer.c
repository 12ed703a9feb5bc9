/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers of two real models against stored ids; random bytes there and back; control tokens;
 * long texts in little time. */
#include <time.h>

#include "text_util.h"

enum { SKIPPED = 77 };

static struct tokenizer *smollm2;
static struct tokenizer *gemma3;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check_golden(const struct tokenizer *t, const char *name)
{
    char path[512];
    size_t n_cases = 0;
    const char *file;
    json_t *of_file;
    snprintf(path, sizeof(path), "%stokenize/%s/ids.json", GOLDEN, name);
    json_t *root = read_json(path);
    json_object_foreach(root, file, of_file)
    {
        snprintf(path, sizeof(path), "%stokenize/%s/%s", GOLDEN, name, file);
        size_t n_bytes;
        char *text = read_file(path, &n_bytes);
        struct token_list l = {0};
        must(tokenizer_encode(t, text, n_bytes, 0, &l));
        check_ids(file, json_object_get(of_file, "plain"), &l);
        size_t n_joined;
        char *joined = join_pieces(t, &l, &n_joined);
        assert_int_equal(n_joined, n_bytes);
        assert_memory_equal(joined, text, n_bytes);
        free(joined);
        l.n = 0;
        must(tokenizer_encode(t, text, n_bytes, TOK_PARSE_SPECIAL, &l));
        check_ids(file, json_object_get(of_file, "special"), &l);
        token_list_free(&l);
        free(text);
        n_cases++;
    }
    json_decref(root);
    assert_int_equal(n_cases, 39);
}

static void test_golden_smollm2(void **state)
{
    (void)state;
    if (smollm2 == NULL) skip();
    check_golden(smollm2, "smollm2-135m");
}

static void test_golden_gemma3(void **state)
{
    (void)state;
    if (gemma3 == NULL) skip();
    check_golden(gemma3, "gemma3-270m");
}

/* Random bytes, from several kinds of soup: any bytes, characters of all lengths with a byte
 * missing here and there, and spaces, digits, marks that the rules look at. */
static size_t random_text(uint64_t *seed, char *text, size_t capacity)
{
    static const char marks[] = " \n\t\r'sdlt0123<|>.,  ";
    const size_t n = next_random(seed) % capacity;
    const uint64_t kind = next_random(seed) % 3;
    size_t at = 0;
    while (at + 4 <= n) {
        const uint64_t r = next_random(seed);
        if (kind == 0) {
            text[at++] = (char)r;
        } else if (kind == 1) {
            text[at++] = marks[r % (sizeof(marks) - 1)];
        } else {
            const uint32_t c = (uint32_t)(r >> 8) & (r & 1 ? 0x7ffu : r & 2 ? 0xffffu : 0x1fffffu);
            const size_t begin = at;
            if (c < 0x800) {
                text[at++] = (char)(0xc0 | c >> 6);
            } else if (c < 0x10000) {
                text[at++] = (char)(0xe0 | c >> 12);
                text[at++] = (char)(0x80 | (c >> 6 & 0x3f));
            } else {
                text[at++] = (char)(0xf0 | c >> 18);
                text[at++] = (char)(0x80 | (c >> 12 & 0x3f));
                text[at++] = (char)(0x80 | (c >> 6 & 0x3f));
            }
            text[at++] = (char)(0x80 | (c & 0x3f));
            if (r >> 60 == 0) at = begin + 1;
        }
    }
    return at;
}

/* What must come back: the text, but U+FFFD for each byte that the vocabulary has no token for,
 * and a space for U+2581 in a SentencePiece vocabulary. */
static size_t expected_text(const bool has_byte[256], bool is_spm, const char *text, size_t n,
                            char *out)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (is_spm && n - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0) {
            out[k++] = ' ';
            i += 2;
        } else if (!has_byte[(unsigned char)text[i]]) {
            memcpy(out + k, "\xef\xbf\xbd", 3);
            k += 3;
        } else {
            out[k++] = text[i];
        }
    }
    return k;
}

static void check_round_trips(const struct tokenizer *t, bool is_spm)
{
    enum { CAPACITY = 200, ROUNDS = 10000 };
    char text[CAPACITY];
    char expected[3 * CAPACITY];
    bool has_byte[256];
    int n_missing = 0;
    uint64_t seed = 20240731;
    struct token_list l = {0};
    printf("seed %llu\n", (unsigned long long)seed);
    for (int b = 0; b < 256; b++) {
        const char byte = (char)b;
        l.n = 0;
        must(tokenizer_encode(t, &byte, 1, 0, &l));
        size_t n;
        char *joined = join_pieces(t, &l, &n);
        has_byte[b] = n == 1 && joined[0] == byte;
        n_missing += !has_byte[b];
        free(joined);
    }
    /* SmolLM2 was made without 21 bytes that its training text did not hold. */
    assert_int_equal(n_missing, is_spm ? 0 : 21);
    for (int round = 0; round < ROUNDS; round++) {
        const size_t n_bytes = random_text(&seed, text, CAPACITY);
        const size_t n_expected = expected_text(has_byte, is_spm, text, n_bytes, expected);
        l.n = 0;
        must(tokenizer_encode(t, text, n_bytes, 0, &l));
        size_t n_joined;
        char *joined = join_pieces(t, &l, &n_joined);
        if (n_joined != n_expected || memcmp(joined, expected, n_expected) != 0) {
            fail_msg("round %d: %zu bytes came back as %zu, not %zu", round, n_bytes, n_joined,
                     n_expected);
        }
        free(joined);
        for (size_t i = 0; i < l.n; i++) assert_false(tokenizer_is_control(t, l.ids[i]));
    }
    token_list_free(&l);
}

static void test_round_trip_smollm2(void **state)
{
    (void)state;
    if (smollm2 == NULL) skip();
    check_round_trips(smollm2, false);
}

static void test_round_trip_gemma3(void **state)
{
    (void)state;
    if (gemma3 == NULL) skip();
    check_round_trips(gemma3, true);
}

/* The words of a paragraph over and over, in changing order. */
static char *make_prose(size_t n_bytes)
{
    static const char *const words[] = {"the ",   "cache ",   "of ",       "every ",  "sequence ",
                                        "is ",    "cut ",     "along ",    "its ",    "tokens, ",
                                        "and ",   "nothing ", "else. ",    "It's ",   "12 ranks\n",
                                        "Größe ", "merged ",  "exactly; ", "(each) ", "owns "};
    char *text = malloc(n_bytes);
    uint64_t seed = 7;
    size_t at = 0;
    assert_non_null(text);
    while (at < n_bytes) {
        const char *word = words[next_random(&seed) % (sizeof(words) / sizeof(words[0]))];
        const size_t len = strlen(word);
        const size_t n = len < n_bytes - at ? len : n_bytes - at;
        memcpy(text + at, word, n);
        at += n;
    }
    return text;
}

static void check_speed(const struct tokenizer *t, const char *what, const char *text,
                        size_t n_bytes, double limit_s)
{
    struct token_list l = {0};
    const double begin = now_s();
    must(tokenizer_encode(t, text, n_bytes, 0, &l));
    const double took = now_s() - begin;
    printf("%s: %zu bytes, %zu ids, %.3f s\n", what, n_bytes, l.n, took);
    size_t n_joined;
    char *joined = join_pieces(t, &l, &n_joined);
    assert_int_equal(n_joined, n_bytes);
    assert_memory_equal(joined, text, n_bytes);
    free(joined);
    token_list_free(&l);
    /* Far above what it takes (see the printed figures), far below what n * n would. */
    if (took > limit_s) fail_msg("%s took %.1f s", what, took);
}

static void check_long_texts(const struct tokenizer *t)
{
    enum { N = 1000000 };
    char *text = make_prose(N);
    uint64_t seed = 3;
    check_speed(t, "prose", text, N, 20.0);
    for (size_t i = 0; i < N; i++) text[i] = (char)('a' + next_random(&seed) % 26);
    check_speed(t, "letters without a space", text, N, 20.0);
    memset(text, 'a', N);
    check_speed(t, "one letter", text, N, 20.0);
    memset(text, ' ', N);
    check_speed(t, "spaces", text, N, 20.0);
    memset(text, '\n', N);
    check_speed(t, "newlines", text, N, 20.0);
    for (size_t i = 0; i < N; i++) text[i] = "<|im_"[i % 5];
    check_speed(t, "beginnings of a control token", text, N, 20.0);
    memset(text, 0x80, N);
    check_speed(t, "bytes that are no UTF-8", text, N, 20.0);
    free(text);
}

static void test_long_smollm2(void **state)
{
    (void)state;
    if (smollm2 == NULL) skip();
    check_long_texts(smollm2);
}

static void test_long_gemma3(void **state)
{
    (void)state;
    if (gemma3 == NULL) skip();
    check_long_texts(gemma3);
}

static void test_special_smollm2(void **state)
{
    (void)state;
    if (smollm2 == NULL) skip();
    const struct tokenizer *t = smollm2;
    assert_int_equal(tokenizer_vocab_size(t), 49152);
    assert_int_equal(tokenizer_bos(t), 1);
    assert_int_equal(tokenizer_eos(t), 2);
    assert_false(tokenizer_adds_bos(t));
    assert_false(tokenizer_adds_space_prefix(t));
    assert_int_equal(tokenizer_find(t, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_find(t, "no such token"), -1);
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++) {
        assert_int_equal(tokenizer_is_control(t, id), id < 17);
        assert_int_equal(tokenizer_is_end(t, id), id == 0 || id == 2);
    }
    const char *bytes;
    size_t n;
    must(tokenizer_piece(t, 1, &bytes, &n));
    assert_int_equal(n, 0);
    assert_string_equal(tokenizer_spelling(t, 1, &n), "<|im_start|>");
    assert_int_equal(n, 12);
    assert_null(tokenizer_spelling(t, 49152, &n));
    assert_null(tokenizer_spelling(t, -1, NULL));
    assert_int_equal(tokenizer_piece(t, 49152, &bytes, &n), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "49152"));
    assert_false(tokenizer_is_control(t, -1));
    assert_false(tokenizer_is_end(t, -1));
}

static void test_special_gemma3(void **state)
{
    (void)state;
    if (gemma3 == NULL) skip();
    const struct tokenizer *t = gemma3;
    struct token_list l = {0};
    assert_int_equal(tokenizer_vocab_size(t), 262144);
    assert_true(tokenizer_adds_bos(t));
    assert_true(tokenizer_is_end(t, 1));
    assert_true(tokenizer_is_end(t, 106));
    assert_false(tokenizer_is_end(t, 2));
    must(tokenizer_encode(t, NULL, 0, TOK_ADD_BOS, &l));
    assert_int_equal(l.n, 1);
    assert_int_equal(l.ids[0], 2);
    token_list_free(&l);
}

/* Control tokens only inside the spans; what lies beside them is one run of text. */
static void test_spans(void **state)
{
    (void)state;
    if (smollm2 == NULL) skip();
    const char text[] = "<|im_start|>user\n<|im_end|>x<|im_end|>";
    const struct token_span spans[] = {{0, 17}, {28, 38}};
    struct token_list l = {0};
    must(tokenizer_encode_spans(smollm2, text, 38, spans, 2, 0, &l));
    assert_int_equal(l.ids[0], 1);
    assert_int_equal(l.ids[l.n - 1], 2);
    int n_control = 0;
    for (size_t i = 0; i < l.n; i++) n_control += tokenizer_is_control(smollm2, l.ids[i]);
    assert_int_equal(n_control, 2);
    struct token_list middle = {0};
    must(tokenizer_encode(smollm2, text + 12, 16, 0, &middle));
    assert_int_equal(middle.n, l.n - 2);
    assert_memory_equal(middle.ids, l.ids + 1, middle.n * sizeof(int32_t));
    token_list_free(&middle);
    /* A span that ends within a control token's spelling holds none. */
    const struct token_span half[] = {{0, 11}};
    l.n = 0;
    must(tokenizer_encode_spans(smollm2, text, 12, half, 1, 0, &l));
    for (size_t i = 0; i < l.n; i++) assert_false(tokenizer_is_control(smollm2, l.ids[i]));
    const struct token_span bad[] = {{4, 3}};
    assert_int_equal(tokenizer_encode_spans(smollm2, text, 12, bad, 1, 0, &l), DCP_ERR_ARG);
    const struct token_span beyond[] = {{0, 13}};
    assert_int_equal(tokenizer_encode_spans(smollm2, text, 12, beyond, 1, 0, &l), DCP_ERR_ARG);
    token_list_free(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_smollm2),
        cmocka_unit_test(test_golden_gemma3),
        cmocka_unit_test(test_special_smollm2),
        cmocka_unit_test(test_special_gemma3),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_round_trip_smollm2),
        cmocka_unit_test(test_round_trip_gemma3),
        cmocka_unit_test(test_long_smollm2),
        cmocka_unit_test(test_long_gemma3),
    };
    char path[512];
    if (find_model("smollm2-135m", path, sizeof(path))) smollm2 = load_tokenizer(path);
    if (find_model("gemma3-270m", path, sizeof(path))) gemma3 = load_tokenizer(path);
    if (smollm2 == NULL && gemma3 == NULL) return SKIPPED;
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);
    tokenizer_destroy(smollm2);
    tokenizer_destroy(gemma3);
    return rc;
}
