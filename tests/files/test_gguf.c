/* SPDX-License-Identifier: Apache-2.0 */
/* The GGUF reader on good files, cut files, damaged files, and files made wrong one way each. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "engine/gguf.h"
#include "files/file_tools.h"
#include "kernels/kernels_priv.h"

#define MODEL DCP_SOURCE_DIR "/tests/data/gguf/mistral-window.gguf"

/* Touch everything that an open file offers; every call must come back. */
static void use(const struct gguf *g)
{
    unsigned char buffer[256];
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        assert_true(t->n_bytes > 0 && t->row_bytes > 0 && strlen(t->name) > 0);
        assert_ptr_equal(gguf_find(g, t->name), t);
        const size_t n = t->n_bytes < sizeof(buffer) ? t->n_bytes : sizeof(buffer);
        gguf_read(g, t, t->n_bytes - n, n, buffer);
    }
    static const char *const keys[] = {"general.architecture",  "llama.block_count",
                                       "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
                                       "llama.rope.freq_base",  "tokenizer.ggml.add_bos_token"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        int64_t n;
        double x;
        bool found, b;
        const char *s;
        size_t len, count;
        enum gguf_type type;
        gguf_get_int(g, keys[i], &n, &found);
        gguf_get_f64(g, keys[i], &x, &found);
        gguf_get_bool(g, keys[i], &b, &found);
        if (gguf_get_str(g, keys[i], &s, &len, &found) == DCP_OK && found)
            assert_true(strlen(s) <= len);
        if (gguf_get_arr(g, keys[i], &type, &count, &found) == DCP_OK && found && count > 0) {
            gguf_arr_str(g, keys[i], count - 1, &s, &len);
            gguf_arr_int(g, keys[i], count - 1, &n);
            gguf_arr_f64(g, keys[i], 0, &x);
            assert_int_not_equal(gguf_arr_int(g, keys[i], count, &n), DCP_OK);
        }
    }
}

static void test_good_file(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    assert_int_equal(gguf_open(MODEL, &g), DCP_OK);
    const char *s;
    size_t len, n;
    int64_t i;
    double x;
    bool b, found;
    enum gguf_type type;
    assert_int_equal(gguf_get_str(g, "general.architecture", &s, &len, &found), DCP_OK);
    assert_true(found && len == 5);
    assert_string_equal(s, "llama");
    assert_int_equal(gguf_get_int(g, "llama.attention.sliding_window", &i, &found), DCP_OK);
    assert_true(found && i == 7);
    assert_int_equal(gguf_get_f64(g, "llama.rope.freq_base", &x, &found), DCP_OK);
    assert_true(found && x == 10000.0);
    assert_int_equal(gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &b, &found), DCP_OK);
    assert_true(found && !b);
    assert_int_equal(gguf_get_int(g, "no.such.key", &i, &found), DCP_OK);
    assert_false(found);
    /* another type is an error that says both */
    assert_int_equal(gguf_get_int(g, "general.architecture", &i, &found), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "string"));

    assert_int_equal(gguf_get_arr(g, "tokenizer.ggml.tokens", &type, &n, &found), DCP_OK);
    assert_true(found && type == GGUF_STR && n == 261);
    assert_int_equal(gguf_arr_str(g, "tokenizer.ggml.tokens", 258, &s, &len), DCP_OK);
    assert_true(len == 2 && memcmp(s, "th", 2) == 0);
    assert_int_equal(gguf_arr_int(g, "tokenizer.ggml.token_type", 257, &i), DCP_OK);
    assert_int_equal(i, 3);
    assert_int_equal(gguf_arr_str(g, "tokenizer.ggml.tokens", 261, &s, &len), DCP_ERR_ARG);

    const struct gguf_tensor *t = gguf_find(g, "blk.1.ffn_down.weight");
    assert_non_null(t);
    assert_int_equal(t->qtype, DCP__Q_Q8_0);
    assert_true(t->n_dims == 2 && t->dims[0] == 128 && t->dims[1] == 64 && t->row_bytes == 136);
    assert_int_equal(t->n_bytes, 64 * 136);
    unsigned char row[136], all[64 * 136];
    assert_int_equal(gguf_read(g, t, 0, sizeof(all), all), DCP_OK);
    assert_int_equal(gguf_read(g, t, 5 * 136, sizeof(row), row), DCP_OK);
    assert_memory_equal(row, all + 5 * 136, sizeof(row));
    const struct bytes whole = file_bytes(MODEL);
    assert_memory_equal(all, whole.data + t->file_offset, sizeof(all));
    assert_int_equal(gguf_read(g, t, 5, t->n_bytes, all), DCP_ERR_ARG);
    assert_null(gguf_find(g, "blk.1.ffn_down"));
    use(g);
    free(whole.data);
    gguf_close(g);
    gguf_close(NULL);
}

/* The bytes as a file; closes what opens. Returns the status. */
static dcp_status try_bytes(const void *data, size_t n)
{
    const char *path = scratch_path("try.gguf");
    assert_int_equal(write_file(path, data, n), 0);
    struct gguf *g = NULL;
    const dcp_status st = gguf_open(path, &g);
    if (st == DCP_OK) {
        use(g);
    } else {
        assert_null(g);
        assert_non_null(strstr(dcp_last_error(), path)); /* every error names the file */
    }
    gguf_close(g);
    unlink(path);
    return st;
}

static void test_cut_anywhere(void **state)
{
    (void)state;
    const struct bytes b = file_bytes(MODEL);
    struct gguf *g = NULL;
    assert_int_equal(gguf_open(MODEL, &g), DCP_OK);
    uint64_t data_begin = b.n, data_end = 0;
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->file_offset < data_begin) data_begin = t->file_offset;
        if (t->file_offset + t->n_bytes > data_end) data_end = t->file_offset + t->n_bytes;
    }
    gguf_close(g);
    /* every byte of the header and a little beyond; then in steps; then the last ones */
    const size_t before = dcp__alloc_current();
    for (size_t n = 0; n < data_begin + 64; n++)
        assert_int_equal(try_bytes(b.data, n), DCP_ERR_FORMAT);
    for (size_t n = (size_t)data_begin + 64; n < data_end; n += 1009)
        assert_int_equal(try_bytes(b.data, n), DCP_ERR_FORMAT);
    assert_int_equal(try_bytes(b.data, (size_t)data_end - 1), DCP_ERR_FORMAT);
    assert_int_equal(try_bytes(b.data, (size_t)data_end), DCP_OK);
    assert_int_equal(dcp__alloc_current(), before);
    free(b.data);
}

static void test_random_damage(void **state)
{
    (void)state;
    const struct bytes b = file_bytes(MODEL);
    const size_t n_front = 13000; /* header and the first tensors */
    unsigned char *copy = malloc(b.n);
    uint64_t seed = 20240917;
    print_message("seed %llu\n", (unsigned long long)seed);
    int n_good = 0;
    const size_t before = dcp__alloc_current();
    for (int i = 0; i < 3000; i++) {
        memcpy(copy, b.data, b.n);
        damage(copy, i % 2 == 0 ? n_front : 1500, &seed);
        n_good += try_bytes(copy, i % 3 == 0 ? n_front : b.n) == DCP_OK ? 1 : 0;
    }
    print_message("%d of 3000 damaged files still open\n", n_good);
    assert_int_equal(dcp__alloc_current(), before);
    assert_true(dcp__alloc_peak() < before + (16 << 20)); /* no count was believed */
    free(copy);
    free(b.data);
}

/* --- files built to be wrong in one way --- */

struct builder {
    unsigned char data[4096];
    size_t n;
};

static void put(struct builder *b, const void *p, size_t n)
{
    assert_true(b->n + n <= sizeof(b->data));
    memcpy(b->data + b->n, p, n);
    b->n += n;
}

static void put32(struct builder *b, uint32_t x)
{
    put(b, &x, 4);
}

static void put64(struct builder *b, uint64_t x)
{
    put(b, &x, 8);
}

static void put_str(struct builder *b, const char *s)
{
    put64(b, strlen(s));
    put(b, s, strlen(s));
}

static void begin(struct builder *b, uint32_t version, uint64_t n_tensors, uint64_t n_kvs)
{
    b->n = 0;
    put(b, "GGUF", 4);
    put32(b, version);
    put64(b, n_tensors);
    put64(b, n_kvs);
}

static void put_tensor(struct builder *b, const char *name, uint64_t dim, uint32_t type,
                       uint64_t offset)
{
    put_str(b, name);
    put32(b, 1);
    put64(b, dim);
    put32(b, type);
    put64(b, offset);
}

/* The data area: zeros up to the next 32 bytes and n_bytes more. */
static void put_data(struct builder *b, size_t n_bytes)
{
    static const unsigned char zeros[1024];
    put(b, zeros, (32 - b->n % 32) % 32);
    put(b, zeros, n_bytes);
}

static void expect(const struct builder *b, dcp_status st, const char *text)
{
    assert_int_equal(try_bytes(b->data, b->n), st);
    if (st != DCP_OK && strstr(dcp_last_error(), text) == NULL)
        fail_msg("no \"%s\" in: %s", text, dcp_last_error());
}

static void test_preamble(void **state)
{
    (void)state;
    struct builder b;
    begin(&b, 3, 0, 0);
    expect(&b, DCP_OK, "");
    begin(&b, 2, 0, 0);
    expect(&b, DCP_OK, "");
    begin(&b, 1, 0, 0);
    expect(&b, DCP_ERR_NOT_SUPPORTED, "version 1");
    begin(&b, 4, 0, 0);
    expect(&b, DCP_ERR_FORMAT, "version 4");
    begin(&b, 0x03000000, 0, 0);
    expect(&b, DCP_ERR_NOT_SUPPORTED, "big-endian");
    begin(&b, 3, 0, 0);
    b.data[0] = 'X';
    expect(&b, DCP_ERR_FORMAT, "not a GGUF file");
    begin(&b, 3, UINT64_MAX, 0);
    expect(&b, DCP_ERR_FORMAT, "18446744073709551615 tensors");
    begin(&b, 3, 0, UINT64_MAX / 16);
    expect(&b, DCP_ERR_FORMAT, "metadata keys at byte 16");
    struct gguf *g = NULL;
    assert_int_equal(gguf_open("/no/such/file", &g), DCP_ERR_SYS);
    assert_int_equal(gguf_open("/", &g), DCP_ERR_SYS);
    assert_int_equal(gguf_open(NULL, &g), DCP_ERR_ARG);
}

static void test_metadata(void **state)
{
    (void)state;
    struct builder b;
    begin(&b, 3, 0, 2);
    put_str(&b, "a.key");
    put32(&b, GGUF_U64);
    put64(&b, UINT64_MAX);
    put_str(&b, "a.key");
    put32(&b, GGUF_U8);
    put(&b, "x", 1);
    expect(&b, DCP_ERR_FORMAT, "a.key occurs twice");

    begin(&b, 3, 0, 1);
    put_str(&b, "a.key");
    put32(&b, 13);
    put64(&b, 0);
    expect(&b, DCP_ERR_FORMAT, "a.key at byte 37 has type 13");

    begin(&b, 3, 0, 1);
    put_str(&b, "a.key");
    put32(&b, GGUF_ARR);
    put32(&b, GGUF_ARR);
    put64(&b, 0);
    expect(&b, DCP_ERR_FORMAT, "arrays of arrays");

    begin(&b, 3, 0, 1);
    put_str(&b, "a.key");
    put32(&b, GGUF_ARR);
    put32(&b, GGUF_STR);
    put64(&b, UINT64_MAX / 4);
    expect(&b, DCP_ERR_FORMAT, "elements");

    begin(&b, 3, 0, 1);
    put64(&b, 0);
    put32(&b, GGUF_U8);
    put64(&b, 0);
    expect(&b, DCP_ERR_FORMAT, "0 bytes, allowed are 1");

    begin(&b, 3, 0, 1);
    put64(&b, 3);
    put(&b, "a\0b", 3);
    put32(&b, GGUF_U8);
    put64(&b, 0);
    expect(&b, DCP_ERR_FORMAT, "zero byte");

    /* values at the edge of their types */
    begin(&b, 3, 0, 3);
    put_str(&b, "big");
    put32(&b, GGUF_U64);
    put64(&b, UINT64_MAX);
    put_str(&b, "small");
    put32(&b, GGUF_I8);
    put(&b, "\x80", 1);
    put_str(&b, "flag");
    put32(&b, GGUF_BOOL);
    put(&b, "\x02", 1);
    const char *path = scratch_path("values.gguf");
    assert_int_equal(write_file(path, b.data, b.n), 0);
    struct gguf *g = NULL;
    int64_t i = 0;
    bool found = false, flag = false;
    assert_int_equal(gguf_open(path, &g), DCP_OK);
    assert_int_equal(gguf_get_int(g, "big", &i, &found), DCP_ERR_FORMAT);
    assert_int_equal(gguf_get_int(g, "small", &i, &found), DCP_OK);
    assert_int_equal(i, -128);
    assert_int_equal(gguf_get_bool(g, "flag", &flag, &found), DCP_ERR_FORMAT);
    gguf_close(g);
    unlink(path);
}

static void test_tensors(void **state)
{
    (void)state;
    struct builder b;
    begin(&b, 3, 2, 0);
    put_tensor(&b, "one", 8, DCP__Q_F32, 0);
    put_tensor(&b, "two", 8, DCP__Q_F32, 32);
    put_data(&b, 64);
    expect(&b, DCP_OK, "");
    b.n--;
    expect(&b, DCP_ERR_FORMAT, "beyond the end");

    begin(&b, 3, 2, 0);
    put_tensor(&b, "one", 9, DCP__Q_F32, 0);
    put_tensor(&b, "two", 8, DCP__Q_F32, 32);
    put_data(&b, 64);
    expect(&b, DCP_ERR_FORMAT, "overlap");

    begin(&b, 3, 2, 0);
    put_tensor(&b, "one", 8, DCP__Q_F32, 0);
    put_tensor(&b, "one", 8, DCP__Q_F32, 32);
    put_data(&b, 64);
    expect(&b, DCP_ERR_FORMAT, "one occurs twice");

    static const struct {
        uint64_t dim;
        uint32_t type;
        uint64_t offset;
        dcp_status st;
        const char *text;
    } cases[] = {
        {8, DCP__Q_F32, 4, DCP_ERR_FORMAT, "no multiple of 32"},
        {8, DCP__Q_F32, UINT64_MAX - 31, DCP_ERR_FORMAT, "beyond the end"},
        {UINT64_MAX / 2, DCP__Q_F32, 0, DCP_ERR_FORMAT, "63 bits"},
        {UINT64_MAX, DCP__Q_F32, 0, DCP_ERR_FORMAT, "dimension 0"},
        {0, DCP__Q_F32, 0, DCP_ERR_FORMAT, "dimension 0"},
        {33, DCP__Q_Q8_0, 0, DCP_ERR_FORMAT, "whole Q8_0 blocks"},
        {8, 999, 0, DCP_ERR_FORMAT, "type 999"},
        {8, UINT32_MAX, 0, DCP_ERR_FORMAT, "type 4294967295"},
        {8, 4, 0, DCP_ERR_FORMAT, "type 4"},
        {256, 10, 0, DCP_ERR_NOT_SUPPORTED, "Q2_K"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        begin(&b, 3, 1, 0);
        put_tensor(&b, "one", cases[i].dim, cases[i].type, cases[i].offset);
        put_data(&b, 64);
        expect(&b, cases[i].st, cases[i].text);
    }

    begin(&b, 3, 1, 0);
    put_str(&b, "one");
    put32(&b, 5);
    for (int i = 0; i < 7; i++) put64(&b, 1);
    expect(&b, DCP_ERR_FORMAT, "5 dimensions");

    /* a product of dimensions that wraps around to something small */
    begin(&b, 3, 1, 0);
    put_str(&b, "one");
    put32(&b, 4);
    for (int i = 0; i < 4; i++) put64(&b, UINT64_C(1) << 32);
    put32(&b, DCP__Q_F32);
    put64(&b, 0);
    put_data(&b, 64);
    expect(&b, DCP_ERR_FORMAT, "product");

    /* the data's alignment is the file's own */
    static const uint32_t alignments[] = {0, 48, UINT32_MAX, 64};
    for (size_t i = 0; i < 4; i++) {
        begin(&b, 3, 1, 1);
        put_str(&b, "general.alignment");
        put32(&b, GGUF_U32);
        put32(&b, alignments[i]);
        put_tensor(&b, "one", 8, DCP__Q_F32, 64);
        put_data(&b, 192);
        expect(&b, i == 3 ? DCP_OK : DCP_ERR_FORMAT, "general.alignment");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_file),     cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_random_damage), cmocka_unit_test(test_preamble),
        cmocka_unit_test(test_metadata),      cmocka_unit_test(test_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
