/* SPDX-License-Identifier: Apache-2.0 */
/* Reader of safetensors files.
 *
 *   n:u64 little-endian
 *   n bytes of JSON: { name: {dtype, shape, data_offsets: [begin, end)}, ... }
 *   the data; offsets count from its first byte
 *
 * The tensors must cover the data exactly, as the format demands: no overlap, no hole, nothing
 * behind the last. A cut or patched file cannot pass. Types that nobody reads are no error: their
 * tensors are there to be covered, and who asks for one learns its type. */
#include "engine/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/safetensors_json.h"

enum { MAX_HEADER_BYTES = 100 * 1000 * 1000 }; /* the format's own limit */

struct st_file {
    int fd;
    char *path;
    uint64_t file_bytes, data_begin;
    struct st_tensor *tensors;
    size_t n_tensors;
    struct st_json *json; /* owns the names */
};

static const struct {
    const char *name;
    size_t bytes;
    dcp_dtype dcp;
} dtype_table[] = {
    [ST_F64] = {"F64", 8, DCP_DTYPE_DEFAULT},
    [ST_F32] = {"F32", 4, DCP_F32},
    [ST_F16] = {"F16", 2, DCP_F16},
    [ST_BF16] = {"BF16", 2, DCP_BF16},
    [ST_I64] = {"I64", 8, DCP_DTYPE_DEFAULT},
    [ST_I32] = {"I32", 4, DCP_DTYPE_DEFAULT},
    [ST_I16] = {"I16", 2, DCP_DTYPE_DEFAULT},
    [ST_I8] = {"I8", 1, DCP_DTYPE_DEFAULT},
    [ST_U8] = {"U8", 1, DCP_DTYPE_DEFAULT},
    [ST_BOOL] = {"BOOL", 1, DCP_DTYPE_DEFAULT},
    [ST_U64] = {"U64", 8, DCP_DTYPE_DEFAULT},
    [ST_U32] = {"U32", 4, DCP_DTYPE_DEFAULT},
    [ST_U16] = {"U16", 2, DCP_DTYPE_DEFAULT},
    [ST_F8_E4M3] = {"F8_E4M3", 1, DCP_DTYPE_DEFAULT},
    [ST_F8_E5M2] = {"F8_E5M2", 1, DCP_DTYPE_DEFAULT},
    [ST_F8_E8M0] = {"F8_E8M0", 1, DCP_DTYPE_DEFAULT},
    [ST_C64] = {"C64", 8, DCP_DTYPE_DEFAULT},
};
enum { N_DTYPES = sizeof(dtype_table) / sizeof(dtype_table[0]) };

size_t st_dtype_bytes(enum st_dtype d)
{
    return (unsigned)d < N_DTYPES ? dtype_table[d].bytes : 0;
}

const char *st_dtype_name(enum st_dtype d)
{
    return (unsigned)d < N_DTYPES && d != 0 ? dtype_table[d].name : "?";
}

dcp_dtype st_to_dcp(enum st_dtype d)
{
    return (unsigned)d < N_DTYPES ? dtype_table[d].dcp : DCP_DTYPE_DEFAULT;
}

enum st_dtype st_from_dcp(dcp_dtype t)
{
    for (int i = 1; i < N_DTYPES; i++)
        if (dtype_table[i].dcp == t && t != DCP_DTYPE_DEFAULT) return (enum st_dtype)i;
    return (enum st_dtype)0;
}

static dcp_status read_at(const struct st_file *f, uint64_t offset, size_t n_bytes, void *dst)
{
    unsigned char *to = dst;
    while (n_bytes > 0) {
        const size_t ask = n_bytes < (size_t)1 << 30 ? n_bytes : (size_t)1 << 30;
        const ssize_t got = pread(f->fd, to, ask, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return dcp__fail(DCP_ERR_SYS, "%s: reading at byte %llu: %s", f->path,
                             (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return dcp__fail(DCP_ERR_FORMAT, "%s: ends at byte %llu, before its own tensors do",
                             f->path, (unsigned long long)offset);
        to += got;
        offset += (uint64_t)got;
        n_bytes -= (size_t)got;
    }
    return DCP_OK;
}

static enum st_dtype find_dtype(const char *name)
{
    for (int i = 1; i < N_DTYPES; i++)
        if (strcmp(name, dtype_table[i].name) == 0) return (enum st_dtype)i;
    return ST_OTHER;
}

/* One entry of the header, checked against the data's size. */
static dcp_status parse_tensor(const struct st_file *f, const struct st_json_entry *e,
                               struct st_tensor *t)
{
    t->name = e->name;
    t->dtype = find_dtype(e->dtype);
    t->dtype_name = e->dtype;
    t->n_dims = e->n_dims;
    size_t n_elems = 1, n_bytes = 0;
    for (int i = 0; i < e->n_dims; i++) {
        t->dims[i] = e->dims[i];
        if (e->dims[i] < 0)
            return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %.80s: dimension %d is %lld", f->path,
                             e->name, i, (long long)e->dims[i]);
        if (dcp__mul_overflow(n_elems, (size_t)e->dims[i], &n_elems))
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: tensor %.80s: the product of dimensions 0 to %d (%lld) does not "
                             "fit 63 bits",
                             f->path, e->name, i, (long long)e->dims[i]);
    }
    if (n_elems > INT64_MAX || dcp__mul_overflow(n_elems, st_dtype_bytes(t->dtype), &n_bytes))
        return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %.80s: its size does not fit 63 bits", f->path,
                         e->name);
    t->n_elems = (int64_t)n_elems;
    t->n_bytes = n_bytes;
    const uint64_t data_bytes = f->file_bytes - f->data_begin;
    if (e->begin < 0 || e->end < e->begin || (uint64_t)e->end > data_bytes)
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: tensor %.80s: data_offsets [%lld, %lld] outside the %llu bytes of data "
            "from byte %llu on (truncated?)",
            f->path, e->name, (long long)e->begin, (long long)e->end,
            (unsigned long long)data_bytes, (unsigned long long)f->data_begin);
    if (t->dtype == ST_OTHER) {
        n_bytes = (size_t)(e->end - e->begin);
        t->n_bytes = n_bytes;
        if ((n_elems == 0) != (n_bytes == 0))
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: tensor %.80s: data_offsets [%lld, %lld] span %zu bytes for %zu "
                             "elements of %.20s",
                             f->path, e->name, (long long)e->begin, (long long)e->end, n_bytes,
                             n_elems, e->dtype);
    }
    if ((uint64_t)(e->end - e->begin) != n_bytes)
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: tensor %.80s: data_offsets [%lld, %lld] span %lld bytes, its shape needs "
            "%zu",
            f->path, e->name, (long long)e->begin, (long long)e->end,
            (long long)(e->end - e->begin), n_bytes);
    t->file_offset = f->data_begin + (uint64_t)e->begin;
    return DCP_OK;
}

static int compare_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->file_offset != y->file_offset) return x->file_offset < y->file_offset ? -1 : 1;
    return (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes); /* empty ones first */
}

/* The tensors, sorted by place, cover the data without overlap or hole. */
static dcp_status check_cover(const struct st_file *f)
{
    uint64_t at = f->data_begin;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct st_tensor *t = &f->tensors[i];
        if (t->n_bytes > 0 && t->file_offset != at)
            return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %.80s begins at byte %llu, %s byte %llu",
                             f->path, t->name, (unsigned long long)t->file_offset,
                             t->file_offset < at ? "inside the tensor that ends at"
                                                 : "which leaves a hole from",
                             (unsigned long long)at);
        at += t->n_bytes;
    }
    if (at != f->file_bytes)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %llu bytes behind the last tensor, from byte %llu on",
                         f->path, (unsigned long long)(f->file_bytes - at), (unsigned long long)at);
    return DCP_OK;
}

static dcp_status parse(struct st_file *f)
{
    unsigned char word[8];
    if (f->file_bytes < sizeof(word))
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: not a safetensors file: %llu bytes, the header's length alone takes 8", f->path,
            (unsigned long long)f->file_bytes);
    DCP_TRY(read_at(f, 0, sizeof(word), word));
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | word[i];
    if (n < 2 || n > MAX_HEADER_BYTES || n > f->file_bytes - 8)
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: header length at byte 0 is %llu; the file has %llu bytes behind it, the "
            "format allows up to %d: not a safetensors file?",
            f->path, (unsigned long long)n, (unsigned long long)(f->file_bytes - 8),
            MAX_HEADER_BYTES);
    f->data_begin = 8 + n;
    void *text = NULL;
    DCP_TRY(dcp__alloc((size_t)n, "safetensors header", &text));
    dcp_status st = read_at(f, 8, (size_t)n, text);
    if (st == DCP_OK) st = st_json_parse(f->path, text, (size_t)n, &f->json);
    dcp__free(text);
    if (st != DCP_OK) return st;

    const size_t n_entries = st_json_count(f->json);
    void *tensors = NULL;
    DCP_TRY(dcp__alloc_array(n_entries, sizeof(struct st_tensor), "safetensors tensors", &tensors));
    f->tensors = tensors;
    for (size_t i = 0; i < n_entries; i++) {
        const struct st_json_entry *e = NULL;
        DCP_TRY(st_json_next(f->json, &e));
        DCP_TRY(parse_tensor(f, e, &f->tensors[f->n_tensors]));
        f->n_tensors++;
    }
    qsort(f->tensors, f->n_tensors, sizeof(struct st_tensor), compare_offset);
    return check_cover(f);
}

static dcp_status open_file(struct st_file *f, const char *path)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(strlen(path) + 1, "safetensors path", &p));
    f->path = p;
    memcpy(f->path, path, strlen(path) + 1);
    /* O_NONBLOCK: the open of a FIFO would wait for a writer, to be refused below. */
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (f->fd < 0) return dcp__fail(DCP_ERR_SYS, "cannot open '%s': %s", path, strerror(errno));
    struct stat info;
    if (fstat(f->fd, &info) != 0)
        return dcp__fail(DCP_ERR_SYS, "cannot stat %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) return dcp__fail(DCP_ERR_SYS, "%s is not a regular file", path);
    f->file_bytes = (uint64_t)info.st_size;
    return DCP_OK;
}

dcp_status st_open(const char *path, struct st_file **out)
{
    if (path == NULL || out == NULL) return dcp__fail(DCP_ERR_ARG, "st_open: path or out is NULL");
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct st_file), "safetensors file", &p));
    struct st_file *f = p;
    f->fd = -1;
    dcp_status st = open_file(f, path);
    if (st == DCP_OK) st = parse(f);
    if (st != DCP_OK) {
        st_close(f);
        return st;
    }
    *out = f;
    return DCP_OK;
}

void st_close(struct st_file *f)
{
    if (f == NULL) return;
    dcp__free(f->tensors);
    st_json_free(f->json);
    if (f->fd >= 0) close(f->fd);
    dcp__free(f->path);
    dcp__free(f);
}

const struct st_tensor *st_find(const struct st_file *f, const char *name)
{
    for (size_t i = 0; i < f->n_tensors; i++)
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    return NULL;
}

dcp_status st_read(const struct st_file *f, const struct st_tensor *t, size_t byte_begin,
                   size_t n_bytes, void *dst)
{
    if (byte_begin > t->n_bytes || n_bytes > t->n_bytes - byte_begin)
        return dcp__fail(DCP_ERR_ARG, "%s: tensor %.80s has %zu bytes; bytes %zu + %zu asked for",
                         f->path, t->name, t->n_bytes, byte_begin, n_bytes);
    return read_at(f, t->file_offset + byte_begin, n_bytes, dst);
}

const char *st_path(const struct st_file *f)
{
    return f->path;
}
