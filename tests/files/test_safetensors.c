/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: what is written is read back; cut, damaged and hostile files give errors. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "engine/safetensors_read.h"
#include "files/file_tools.h"

static const float values[6] = {1.0f, -2.5f, 3e-40f, 0.0f, -0.0f, 1e30f};
static const int64_t positions[3] = {0, -1, INT64_MAX};

/* The file that most tests start from. */
static void write_sample(const char *path)
{
    const struct st_decl decls[] = {
        {"out", ST_F32, 3, {1, 2, 3}},
        {"pos \"q\"", ST_I64, 1, {3}},
        {"nothing", ST_BF16, 2, {0, 7}},
        {"scalar", ST_U8, 0, {0}},
    };
    struct st_writer *w = NULL;
    assert_int_equal(st_writer_create(path, decls, 4, &w), DCP_OK);
    assert_int_equal(st_writer_append(w, values, 5), DCP_OK); /* pieces need not be elements */
    assert_int_equal(st_writer_append(w, (const char *)values + 5, sizeof(values) - 5), DCP_OK);
    assert_int_equal(st_writer_append(w, positions, sizeof(positions)), DCP_OK);
    assert_int_equal(st_writer_append(w, "x", 1), DCP_OK);
    assert_int_equal(st_writer_append(w, "x", 1), DCP_ERR_ARG);
    assert_int_equal(st_writer_finish(w), DCP_OK);
}

static void test_round_trip(void **state)
{
    (void)state;
    const char *path = scratch_path("round.safetensors");
    write_sample(path);
    struct st_file *f = NULL;
    assert_int_equal(st_open(path, &f), DCP_OK);
    const struct st_tensor *t = st_find(f, "out");
    assert_non_null(t);
    assert_true(t->dtype == ST_F32 && t->n_dims == 3 && t->dims[1] == 2 && t->dims[2] == 3);
    assert_true(t->n_elems == 6 && t->n_bytes == sizeof(values) && t->file_offset % 8 == 0);
    float got[6];
    assert_int_equal(st_read(f, t, 0, sizeof(got), got), DCP_OK);
    assert_memory_equal(got, values, sizeof(values));
    assert_int_equal(st_read(f, t, 20, 4, got), DCP_OK);
    assert_memory_equal(got, &values[5], 4);
    assert_int_equal(st_read(f, t, 21, 4, got), DCP_ERR_ARG);
    assert_int_equal(st_find(f, "pos \"q\"")->n_elems, 3);
    assert_int_equal(st_find(f, "nothing")->n_elems, 0);
    assert_int_equal(st_find(f, "scalar")->n_bytes, 1);
    assert_null(st_find(f, "no such"));
    st_close(f);
    st_close(NULL);
    unlink(path);
}

static void test_writer_faults(void **state)
{
    (void)state;
    const char *path = scratch_path("faults.safetensors");
    const struct st_decl good = {"a", ST_F32, 1, {2}};
    struct st_writer *w = NULL;
    /* too few bytes: no file, no temporary one */
    assert_int_equal(st_writer_create(path, &good, 1, &w), DCP_OK);
    assert_int_equal(st_writer_append(w, values, 4), DCP_OK);
    assert_int_equal(st_writer_finish(w), DCP_ERR_ARG);
    assert_int_equal(access(path, F_OK), -1);
    char tmp[600];
    snprintf(tmp, sizeof(tmp), "%s.tmp.%ld", path, (long)getpid());
    assert_int_equal(access(tmp, F_OK), -1);
    assert_int_equal(st_writer_create(path, &good, 1, &w), DCP_OK);
    assert_int_equal(access(path, F_OK), -1); /* no half file to be seen */
    st_writer_abandon(w);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(access(tmp, F_OK), -1);
    st_writer_abandon(NULL);

    const struct st_decl twice[] = {good, good};
    assert_int_equal(st_writer_create(path, twice, 2, &w), DCP_ERR_ARG);
    const struct st_decl huge = {"a", ST_F32, 2, {INT64_MAX, INT64_MAX}};
    assert_int_equal(st_writer_create(path, &huge, 1, &w), DCP_ERR_ARG);
    const struct st_decl negative = {"a", ST_F32, 1, {-1}};
    assert_int_equal(st_writer_create(path, &negative, 1, &w), DCP_ERR_ARG);
    const struct st_decl not_text = {"\xff", ST_F32, 1, {1}};
    assert_int_equal(st_writer_create(path, &not_text, 1, &w), DCP_ERR_ARG);
    assert_int_equal(st_writer_create("/no/such/folder/x", &good, 1, &w), DCP_ERR_SYS);
}

static dcp_status write_pair(const char *path)
{
    const struct st_decl decl = {"a", ST_F32, 1, {2}};
    struct st_writer *w = NULL;
    dcp_status st = st_writer_create(path, &decl, 1, &w);
    if (st != DCP_OK) return st;
    st = st_writer_append(w, values, 8);
    if (st == DCP_OK) return st_writer_finish(w);
    st_writer_abandon(w);
    return st;
}

/* What is no regular file is never replaced: written to, followed, or refused. */
static void test_writer_targets(void **state)
{
    (void)state;
    char folder[512], fifo[600], real[600], link_path[600], dangling[600], made[600];
    struct stat info;
    snprintf(folder, sizeof(folder), "%s", scratch_path("targets"));
    snprintf(fifo, sizeof(fifo), "%s/fifo", folder);
    snprintf(real, sizeof(real), "%s/real", folder);
    snprintf(link_path, sizeof(link_path), "%s/link", folder);
    snprintf(dangling, sizeof(dangling), "%s/dangling", folder);
    snprintf(made, sizeof(made), "%s/made", folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    assert_int_equal(write_pair(folder), DCP_ERR_SYS);
    assert_non_null(strstr(dcp_last_error(), "a directory"));
    assert_int_equal(st_writer_probe(folder), DCP_ERR_SYS);
    assert_int_equal(st_writer_probe("/no/such/folder/x"), DCP_ERR_SYS);
    assert_int_equal(st_writer_probe(""), DCP_ERR_SYS);

    assert_int_equal(mkfifo(fifo, 0600), 0);
    const int reader = open(fifo, O_RDONLY | O_NONBLOCK);
    assert_true(reader >= 0);
    assert_int_equal(st_writer_probe(fifo), DCP_OK);
    assert_int_equal(write_pair(fifo), DCP_OK);
    unsigned char got[512];
    assert_true(read(reader, got, sizeof(got)) > 16);
    assert_int_equal(got[8], '{');
    assert_true(lstat(fifo, &info) == 0 && S_ISFIFO(info.st_mode));
    close(reader);
    struct st_file *f = NULL;
    assert_int_equal(st_open(fifo, &f), DCP_ERR_SYS); /* at once, though nobody writes */
    assert_non_null(strstr(dcp_last_error(), "not a regular file"));

    /* A link is followed, be its target there or not; an older file is replaced. */
    assert_int_equal(write_file(real, "old", 3), 0);
    assert_int_equal(symlink("real", link_path), 0);
    assert_int_equal(symlink("made", dangling), 0);
    assert_int_equal(write_pair(link_path), DCP_OK);
    assert_int_equal(write_pair(dangling), DCP_OK);
    assert_true(lstat(link_path, &info) == 0 && S_ISLNK(info.st_mode));
    assert_true(lstat(dangling, &info) == 0 && S_ISLNK(info.st_mode));
    assert_int_equal(st_writer_probe(real), DCP_OK);
    for (int i = 0; i < 2; i++) {
        assert_true(lstat(i == 0 ? real : made, &info) == 0 && S_ISREG(info.st_mode));
        assert_int_equal(st_open(i == 0 ? real : made, &f), DCP_OK);
        st_close(f);
    }
    assert_int_equal(unlink(link_path), 0);
    assert_int_equal(symlink("link", link_path), 0); /* in a circle */
    assert_int_equal(write_pair(link_path), DCP_ERR_SYS);
    unlink(link_path);
    unlink(dangling);
    unlink(real);
    unlink(made);
    unlink(fifo);
    assert_int_equal(rmdir(folder), 0); /* nothing else is left */
}

static dcp_status try_bytes(const void *data, size_t n)
{
    const char *path = scratch_path("try.safetensors");
    assert_int_equal(write_file(path, data, n), 0);
    struct st_file *f = NULL;
    const dcp_status st = st_open(path, &f);
    if (st == DCP_OK) {
        const struct st_tensor *t = st_find(f, "out");
        unsigned char buffer[64];
        if (t != NULL) st_read(f, t, 0, t->n_bytes < 64 ? t->n_bytes : 64, buffer);
    } else {
        assert_null(f);
        assert_non_null(strstr(dcp_last_error(), path));
    }
    st_close(f);
    unlink(path);
    return st;
}

static void test_cut_and_damaged(void **state)
{
    (void)state;
    const char *path = scratch_path("cut.safetensors");
    write_sample(path);
    const struct bytes b = file_bytes(path);
    unlink(path);
    const size_t before = dcp__alloc_current();
    for (size_t n = 0; n < b.n; n++) assert_int_equal(try_bytes(b.data, n), DCP_ERR_FORMAT);
    assert_int_equal(try_bytes(b.data, b.n), DCP_OK);
    unsigned char *copy = malloc(b.n);
    uint64_t seed = 77001;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 5000; i++) {
        memcpy(copy, b.data, b.n);
        damage(copy, b.n, &seed);
        try_bytes(copy, b.n);
    }
    assert_int_equal(dcp__alloc_current(), before);
    free(copy);
    free(b.data);
}

/* A file of this header and n_data bytes. */
static dcp_status try_header(const char *json, size_t n_data)
{
    static unsigned char file[1 << 16];
    const uint64_t n = strlen(json);
    assert_true(n + n_data + 8 <= sizeof(file));
    memset(file, 0, sizeof(file));
    memcpy(file, &n, 8);
    memcpy(file + 8, json, n);
    return try_bytes(file, 8 + n + n_data);
}

static void test_headers(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        size_t n_data;
        dcp_status st;
        const char *text;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ", 8, DCP_OK, ""},
        {"{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_"
         "offsets\":[0,4]}}",
         4, DCP_OK, ""},
        {"{}", 0, DCP_OK, ""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",
         16, DCP_ERR_FORMAT, "uplicate"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12, DCP_ERR_FORMAT, "inside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, DCP_ERR_FORMAT,
         "hole"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9, DCP_ERR_FORMAT,
         "behind"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT,
         "needs 12"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, DCP_ERR_FORMAT,
         "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8, DCP_ERR_FORMAT,
         "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT,
         "dimension 0"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         DCP_ERR_FORMAT, "product"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
         DCP_ERR_FORMAT, "63 bits"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}", 8,
         DCP_ERR_FORMAT, "integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT,
         "integers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 8,
         DCP_ERR_FORMAT, "8 dimensions"},
        /* Types that nobody reads are no error; what is known of them is checked. */
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, DCP_OK, ""},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[16],\"data_offsets\":[0,8]}}", 8, DCP_OK, ""},
        {"{\"a\":{\"dtype\":\"U32\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"U16\",\"shape\":[3],\"data_offsets\":[8,14]},"
         "\"c\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[14,16]}}",
         16, DCP_OK, ""},
        {"{\"a\":{\"dtype\":\"U64\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT,
         "needs 16"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,9]}}", 8, DCP_ERR_FORMAT,
         "outside"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,7]}}", 8, DCP_ERR_FORMAT,
         "behind"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,0]}}", 0, DCP_ERR_FORMAT,
         "0 bytes for 2 elements of F31"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
         12, DCP_ERR_FORMAT, "inside"},
        {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT, "dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, DCP_ERR_FORMAT, "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, DCP_ERR_FORMAT,
         "data_offsets"},
        {"{\"a\":[1,2]}", 8, DCP_ERR_FORMAT, "object"},
        {"[1,2,3]", 0, DCP_ERR_FORMAT, "object"},
        {"{\"a\":", 0, DCP_ERR_FORMAT, "header"},
        {"{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         DCP_ERR_FORMAT, "header"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const dcp_status st = try_header(cases[i].json, cases[i].n_data);
        if (st != cases[i].st) fail_msg("%s: %d, %s", cases[i].json, st, dcp_last_error());
        if (st != DCP_OK && strstr(dcp_last_error(), cases[i].text) == NULL)
            fail_msg("no \"%s\" in: %s", cases[i].text, dcp_last_error());
    }
    /* nesting without end must not reach the stack's */
    static char deep[50001];
    memset(deep, '[', sizeof(deep) - 1);
    assert_int_equal(try_header(deep, 0), DCP_ERR_FORMAT);
    const uint64_t lengths[] = {0, 1, 100000001, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < 5; i++) {
        unsigned char file[16] = {0};
        memcpy(file, &lengths[i], 8);
        assert_int_equal(try_bytes(file, sizeof(file)), DCP_ERR_FORMAT);
    }
}

/* A tensor that is asked for: its type is named, and what would be right for it. */
static void test_asked_for(void **state)
{
    (void)state;
    static const char json[] = "{\"a\":{\"dtype\":\"BF8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                               "\"b\":{\"dtype\":\"U16\",\"shape\":[3],\"data_offsets\":[2,8]},"
                               "\"c\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[8,24]}}";
    const double c[2] = {0.1, -1e39};
    unsigned char file[512];
    const uint64_t n = strlen(json);
    memcpy(file, &n, 8);
    memcpy(file + 8, json, n);
    memset(file + 8 + n, 0, 8);
    memcpy(file + 16 + n, c, sizeof(c));
    const char *path = scratch_path("asked.safetensors");
    assert_int_equal(write_file(path, file, 32 + n), 0);
    struct st_file *f = NULL;
    const struct st_tensor *t = NULL;
    assert_int_equal(st_open(path, &f), DCP_OK);
    assert_int_equal(st_need_floats(f, path, "a", 1, &t), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "'a' is BF8; F32, F16, BF16 or F64 is needed"));
    assert_int_equal(st_need_ints(f, path, "b", 1, &t), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "'b' is U16; I64 or I32 is needed"));
    assert_int_equal(st_need_floats(f, path, "c", 1, &t), DCP_OK);
    float x = 0.0f;
    assert_int_equal(st_read_f32(f, t, 0, 1, &x), DCP_OK);
    assert_true(x == 0.1f);
    assert_int_equal(st_read_f32(f, t, 1, 1, &x), DCP_ERR_FORMAT);
    assert_non_null(strstr(dcp_last_error(), "element 1 is -1e+39, beyond the range of F32"));
    st_close(f);
    unlink(path);
}

static void test_types(void **state)
{
    (void)state;
    assert_int_equal(st_dtype_bytes(ST_BF16), 2);
    assert_int_equal(st_dtype_bytes((enum st_dtype)99), 0);
    assert_int_equal(st_dtype_bytes(ST_OTHER), 0);
    assert_int_equal(st_dtype_bytes(ST_U16), 2);
    assert_string_equal(st_dtype_name(ST_F32), "F32");
    assert_string_equal(st_dtype_name((enum st_dtype)0), "?");
    assert_int_equal(st_to_dcp(ST_F16), DCP_F16);
    assert_int_equal(st_to_dcp(ST_I64), DCP_DTYPE_DEFAULT);
    assert_int_equal(st_from_dcp(DCP_BF16), ST_BF16);
    assert_int_equal((int)st_from_dcp(DCP_DTYPE_DEFAULT), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),     cmocka_unit_test(test_writer_faults),
        cmocka_unit_test(test_writer_targets), cmocka_unit_test(test_cut_and_damaged),
        cmocka_unit_test(test_headers),        cmocka_unit_test(test_types),
        cmocka_unit_test(test_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
