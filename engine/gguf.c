/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF v2 and v3. The header (metadata and tensor directory) is read front to back into one block
 * of memory that grows as the parser asks for bytes; everything refers into it by offset. No count
 * is believed before the file is seen to be long enough for it.
 *
 *   "GGUF" version:u32 n_tensors:u64 n_kv:u64
 *   n_kv times       key:str type:u32 value
 *   n_tensors times  name:str n_dims:u32 dims:u64[n_dims] type:u32 offset:u64
 *   padding to general.alignment, then the data that the offsets count from
 *
 *   str is len:u64 and the bytes; an array is type:u32 n:u64 and the elements.
 *
 * Strings that are handed out as C strings get their NUL by moving them over their own length word,
 * which has been read by then: no copy, no second table. */
#include "engine/gguf_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "kernels/kernels_priv.h"

enum {
    HEAD_FIRST_BYTES = 1 << 20, /* first read; most headers are a few MiB of vocabulary */
    MIN_KV_BYTES = 8 + 1 + 4 + 1,
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
    MAX_KEY_BYTES = 65535, /* the format's own limit */
    MAX_NAME_BYTES = 1023,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 20
};

/* Types that exist in such files but are not read here: named, so that the error is a help. */
static const struct {
    uint32_t type;
    const char *name;
} known_types[] = {
    {9, "Q8_1"},     {10, "Q2_K"},  {11, "Q3_K"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"},
    {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"},
    {24, "I8"},      {25, "I16"},   {26, "I32"},    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},
    {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"},
};

/* --- bytes --- */

dcp_status gguf__read_at(const struct gguf *g, uint64_t offset, size_t n_bytes, void *dst)
{
    unsigned char *to = dst;
    while (n_bytes > 0) {
        const size_t ask = n_bytes < (size_t)1 << 30 ? n_bytes : (size_t)1 << 30;
        const ssize_t got = pread(g->fd, to, ask, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return dcp__fail(DCP_ERR_SYS, "%s: reading at byte %llu: %s", g->path,
                             (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return dcp__fail(
                DCP_ERR_FORMAT, "%s: ends at byte %llu, but was %llu bytes long when it was opened",
                g->path, (unsigned long long)offset, (unsigned long long)g->file_bytes);
        to += got;
        offset += (uint64_t)got;
        n_bytes -= (size_t)got;
    }
    return DCP_OK;
}

/* The next n bytes of the header are in memory afterwards; g->at moves over them. */
static dcp_status take(struct gguf *g, uint64_t n, const char *what, uint64_t *off_out)
{
    if (n > g->file_bytes - g->at)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: truncated: %s at byte %llu needs %llu bytes, the file has %llu more",
                         g->path, what, (unsigned long long)g->at, (unsigned long long)n,
                         (unsigned long long)(g->file_bytes - g->at));
    const uint64_t end = g->at + n;
    if (end > g->head_capacity) {
        uint64_t capacity = g->head_capacity * 2;
        if (capacity < end) capacity = end;
        if (capacity > g->file_bytes) capacity = g->file_bytes;
        void *bigger = NULL;
        DCP_TRY(dcp__alloc((size_t)capacity, "model file header", &bigger));
        memcpy(bigger, g->head, (size_t)g->head_bytes);
        dcp__free(g->head);
        g->head = bigger;
        g->head_capacity = capacity;
    }
    if (end > g->head_bytes) {
        DCP_TRY(gguf__read_at(g, g->head_bytes, (size_t)(g->head_capacity - g->head_bytes),
                              g->head + g->head_bytes));
        g->head_bytes = g->head_capacity;
    }
    *off_out = g->at;
    g->at = end;
    return DCP_OK;
}

static dcp_status take_u32(struct gguf *g, const char *what, uint32_t *value_out)
{
    uint64_t off = 0;
    DCP_TRY(take(g, 4, what, &off));
    *value_out = load_u32(g->head + off);
    return DCP_OK;
}

static dcp_status take_u64(struct gguf *g, const char *what, uint64_t *value_out)
{
    uint64_t off = 0;
    DCP_TRY(take(g, 8, what, &off));
    *value_out = load_u64(g->head + off);
    return DCP_OK;
}

/* A string; *off_out is where its bytes begin, 8 after its length word. */
static dcp_status take_str(struct gguf *g, const char *what, uint64_t *off_out, uint64_t *len_out)
{
    uint64_t len = 0;
    DCP_TRY(take_u64(g, what, &len));
    DCP_TRY(take(g, len, what, off_out));
    *len_out = len;
    return DCP_OK;
}

/* A string as a C string: moved over its length word, NUL behind it. Its offset moves by 8. */
static uint64_t terminate(struct gguf *g, uint64_t off, uint64_t len)
{
    memmove(g->head + off - 8, g->head + off, (size_t)len);
    g->head[off - 8 + len] = 0;
    return off - 8;
}

/* A name (key or tensor): bounded, not empty, no NUL inside. */
static dcp_status take_name(struct gguf *g, const char *what, uint64_t max_bytes, uint64_t *off_out)
{
    const uint64_t begin = g->at;
    uint64_t off = 0, len = 0;
    DCP_TRY(take_u64(g, what, &len));
    if (len == 0 || len > max_bytes)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: %s at byte %llu has %llu bytes, allowed are 1 to %llu", g->path, what,
                         (unsigned long long)begin, (unsigned long long)len,
                         (unsigned long long)max_bytes);
    DCP_TRY(take(g, len, what, &off));
    if (memchr(g->head + off, 0, (size_t)len) != NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s at byte %llu contains a zero byte", g->path, what,
                         (unsigned long long)begin);
    *off_out = terminate(g, off, len);
    return DCP_OK;
}

/* --- metadata --- */

static dcp_status take_array(struct gguf *g, struct kv *kv, const char *what)
{
    const uint64_t begin = g->at;
    uint32_t elem_type = 0;
    DCP_TRY(take_u32(g, what, &elem_type));
    if (!gguf__is_type(elem_type) || elem_type == GGUF_ARR)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s at byte %llu is an array of type %u%s", g->path,
                         what, (unsigned long long)begin, elem_type,
                         elem_type == GGUF_ARR ? " (arrays of arrays are not supported)"
                                               : ", which does not exist");
    kv->elem_type = (enum gguf_type)elem_type;
    DCP_TRY(take_u64(g, what, &kv->n));
    const uint64_t elem_bytes =
        elem_type == GGUF_STR ? 8 : gguf__type_bytes((enum gguf_type)elem_type);
    if (kv->n > (g->file_bytes - g->at) / elem_bytes)
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: truncated: %s at byte %llu says %llu elements, the file has %llu more "
            "bytes",
            g->path, what, (unsigned long long)begin, (unsigned long long)kv->n,
            (unsigned long long)(g->file_bytes - g->at));
    if (elem_type != GGUF_STR) return take(g, kv->n * elem_bytes, what, &kv->value_off);
    void *elems = NULL;
    DCP_TRY(dcp__alloc_array((size_t)kv->n, sizeof(uint64_t), "model file string index", &elems));
    kv->elems = elems;
    for (uint64_t i = 0; i < kv->n; i++) {
        uint64_t off = 0, len = 0;
        DCP_TRY(take_str(g, what, &off, &len));
        kv->elems[i] = off - 8;
    }
    return DCP_OK;
}

static dcp_status take_kv(struct gguf *g, struct kv *kv)
{
    DCP_TRY(take_name(g, "a metadata key", MAX_KEY_BYTES, &kv->key_off));
    char what[80]; /* the key in messages: the header block may move, this does not */
    strncpy(what, (const char *)g->head + kv->key_off, sizeof(what) - 1);
    what[sizeof(what) - 1] = 0;

    const uint64_t begin = g->at;
    uint32_t type = 0;
    DCP_TRY(take_u32(g, what, &type));
    if (!gguf__is_type(type))
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s at byte %llu has type %u, which does not exist",
                         g->path, what, (unsigned long long)begin, type);
    kv->type = (enum gguf_type)type;
    kv->n = 1;
    if (type == GGUF_ARR) return take_array(g, kv, what);
    if (type == GGUF_STR) {
        uint64_t off = 0;
        DCP_TRY(take_str(g, what, &off, &kv->n));
        kv->value_off = terminate(g, off, kv->n);
        return DCP_OK;
    }
    return take(g, gguf__type_bytes((enum gguf_type)type), what, &kv->value_off);
}

static int compare_kv(const void *a, const void *b)
{
    return strcmp((*(struct kv *const *)a)->key, (*(struct kv *const *)b)->key);
}

static int compare_tensor_name(const void *a, const void *b)
{
    return strcmp((*(struct gguf_tensor *const *)a)->name, (*(struct gguf_tensor *const *)b)->name);
}

static int compare_tensor_offset(const void *a, const void *b)
{
    const struct gguf_tensor *x = *(struct gguf_tensor *const *)a;
    const struct gguf_tensor *y = *(struct gguf_tensor *const *)b;
    return (x->file_offset > y->file_offset) - (x->file_offset < y->file_offset);
}

/* The header no longer moves: names become pointers, duplicates are found. */
static dcp_status index_kvs(struct gguf *g)
{
    for (size_t i = 0; i < g->n_kvs; i++) {
        g->kvs[i].key = (const char *)g->head + g->kvs[i].key_off;
        g->by_key[i] = &g->kvs[i];
    }
    qsort(g->by_key, g->n_kvs, sizeof(struct kv *), compare_kv);
    for (size_t i = 1; i < g->n_kvs; i++)
        if (strcmp(g->by_key[i - 1]->key, g->by_key[i]->key) == 0)
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: metadata key %.80s occurs twice, at bytes %llu and %llu", g->path,
                             g->by_key[i]->key, (unsigned long long)g->by_key[i - 1]->key_off,
                             (unsigned long long)g->by_key[i]->key_off);
    return DCP_OK;
}

/* --- tensors --- */

static dcp_status check_type(const struct gguf *g, const char *what, uint64_t at, uint32_t type)
{
    if (type <= INT_MAX && dcp__q_block_elems((int)type) > 0) return DCP_OK;
    for (size_t i = 0; i < sizeof(known_types) / sizeof(known_types[0]); i++)
        if (known_types[i].type == type)
            return dcp__fail(
                DCP_ERR_NOT_SUPPORTED,
                "%s: tensor %s at byte %llu has type %s; supported are F32, F16, BF16, "
                "Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K",
                g->path, what, (unsigned long long)at, known_types[i].name);
    return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %s at byte %llu has type %u, which does not exist",
                     g->path, what, (unsigned long long)at, type);
}

/* Everything about a tensor but its place in the file, which needs the end of the header. */
static dcp_status take_tensor(struct gguf *g, struct gguf_tensor *t, uint64_t *name_off_out)
{
    const uint64_t begin = g->at;
    DCP_TRY(take_name(g, "a tensor name", MAX_NAME_BYTES, name_off_out));
    char what[80];
    strncpy(what, (const char *)g->head + *name_off_out, sizeof(what) - 1);
    what[sizeof(what) - 1] = 0;

    uint32_t n_dims = 0, type = 0;
    DCP_TRY(take_u32(g, what, &n_dims));
    if (n_dims < 1 || n_dims > 4)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: tensor %s at byte %llu has %u dimensions, allowed are 1 to 4",
                         g->path, what, (unsigned long long)begin, n_dims);
    t->n_dims = (int)n_dims;
    size_t n_rows = 1;
    for (int i = 0; i < 4; i++) t->dims[i] = 1;
    for (uint32_t i = 0; i < n_dims; i++) {
        uint64_t dim = 0;
        DCP_TRY(take_u64(g, what, &dim));
        if (dim < 1 || dim > INT64_MAX)
            return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %s at byte %llu: dimension %u is %llu",
                             g->path, what, (unsigned long long)begin, i, (unsigned long long)dim);
        if (i > 0 && dcp__mul_overflow(n_rows, (size_t)dim, &n_rows))
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: tensor %s at byte %llu: the product of its dimensions up to "
                             "number %u (%llu) does not fit 63 bits",
                             g->path, what, (unsigned long long)begin, i, (unsigned long long)dim);
        t->dims[i] = (int64_t)dim;
    }
    const uint64_t type_at = g->at;
    DCP_TRY(take_u32(g, what, &type));
    DCP_TRY(check_type(g, what, type_at, type));
    t->qtype = (int)type;
    DCP_TRY(take_u64(g, what, &t->file_offset));

    const int64_t block = dcp__q_block_elems(t->qtype);
    if (t->dims[0] % block != 0)
        return dcp__fail(
            DCP_ERR_FORMAT,
            "%s: tensor %s at byte %llu: rows of %lld elements are not whole %s blocks of "
            "%lld",
            g->path, what, (unsigned long long)begin, (long long)t->dims[0], dcp__q_name(t->qtype),
            (long long)block);
    size_t n_elems;
    if (dcp__mul_overflow((size_t)(t->dims[0] / block), dcp__q_block_bytes(t->qtype),
                          &t->row_bytes) ||
        dcp__mul_overflow(t->row_bytes, n_rows, &t->n_bytes) || t->n_bytes > INT64_MAX ||
        dcp__mul_overflow((size_t)t->dims[0], n_rows, &n_elems) || n_elems > INT64_MAX)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: tensor %s at byte %llu: its size does not fit 63 bits", g->path, what,
                         (unsigned long long)begin);
    return DCP_OK;
}

static dcp_status read_alignment(const struct gguf *g, uint64_t *alignment_out)
{
    int64_t alignment = DEFAULT_ALIGNMENT;
    bool found = false;
    DCP_TRY(gguf_get_int(g, "general.alignment", &alignment, &found));
    if (!found) alignment = DEFAULT_ALIGNMENT;
    if (alignment < 1 || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)) != 0)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: general.alignment is %lld, not a power of two up to %d", g->path,
                         (long long)alignment, MAX_ALIGNMENT);
    *alignment_out = (uint64_t)alignment;
    return DCP_OK;
}

/* Each tensor lies in the file, aligned, and no two share a byte. */
static dcp_status place_tensors(struct gguf *g)
{
    uint64_t alignment = DEFAULT_ALIGNMENT;
    DCP_TRY(read_alignment(g, &alignment));
    const uint64_t header_end = g->at; /* at most the file's size: no overflow below */
    const uint64_t data_begin = (header_end + alignment - 1) / alignment * alignment;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        const uint64_t offset = t->file_offset;
        if (offset % alignment != 0)
            return dcp__fail(DCP_ERR_FORMAT, "%s: tensor %.80s: offset %llu is no multiple of %llu",
                             g->path, t->name, (unsigned long long)offset,
                             (unsigned long long)alignment);
        if (data_begin > g->file_bytes || offset > g->file_bytes - data_begin ||
            t->n_bytes > g->file_bytes - data_begin - offset)
            return dcp__fail(
                DCP_ERR_FORMAT,
                "%s: tensor %.80s: %zu bytes at %llu + %llu lie beyond the end of the file "
                "at %llu (truncated?)",
                g->path, t->name, t->n_bytes, (unsigned long long)data_begin,
                (unsigned long long)offset, (unsigned long long)g->file_bytes);
        t->file_offset = data_begin + offset;
    }
    for (size_t i = 0; i < g->n_tensors; i++) g->by_name[i] = &g->tensors[i];
    qsort(g->by_name, g->n_tensors, sizeof(struct gguf_tensor *), compare_tensor_offset);
    for (size_t i = 1; i < g->n_tensors; i++) {
        const struct gguf_tensor *a = g->by_name[i - 1], *b = g->by_name[i];
        if (a->file_offset + a->n_bytes > b->file_offset)
            return dcp__fail(
                DCP_ERR_FORMAT,
                "%s: tensors %.80s (bytes %llu to %llu) and %.80s (from byte %llu) overlap",
                g->path, a->name, (unsigned long long)a->file_offset,
                (unsigned long long)(a->file_offset + a->n_bytes), b->name,
                (unsigned long long)b->file_offset);
    }
    qsort(g->by_name, g->n_tensors, sizeof(struct gguf_tensor *), compare_tensor_name);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (strcmp(g->by_name[i - 1]->name, g->by_name[i]->name) == 0)
            return dcp__fail(DCP_ERR_FORMAT, "%s: tensor name %.80s occurs twice", g->path,
                             g->by_name[i]->name);
    return DCP_OK;
}

/* --- open and close --- */

static dcp_status take_preamble(struct gguf *g, uint64_t *n_tensors_out, uint64_t *n_kvs_out)
{
    uint64_t off = 0;
    DCP_TRY(take(g, 4, "the magic number", &off));
    if (memcmp(g->head + off, "GGUF", 4) != 0)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: not a GGUF file: begins with bytes %02x %02x %02x %02x", g->path,
                         g->head[off], g->head[off + 1], g->head[off + 2], g->head[off + 3]);
    uint32_t version = 0;
    DCP_TRY(take_u32(g, "the version", &version));
    if (version != 0 && (version & 0xffffu) == 0)
        return dcp__fail(
            DCP_ERR_NOT_SUPPORTED,
            "%s: a big-endian file (version word %08x at byte 4); only little-endian ones "
            "are read",
            g->path, version);
    if (version != 2 && version != 3)
        return dcp__fail(version == 1 ? DCP_ERR_NOT_SUPPORTED : DCP_ERR_FORMAT,
                         "%s: GGUF version %u at byte 4; versions 2 and 3 are read", g->path,
                         version);
    DCP_TRY(take_u64(g, "the number of tensors", n_tensors_out));
    DCP_TRY(take_u64(g, "the number of metadata keys", n_kvs_out));
    const uint64_t left = g->file_bytes - g->at;
    if (*n_tensors_out > left / MIN_TENSOR_BYTES)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: says %llu tensors at byte 8, %llu more bytes cannot hold them",
                         g->path, (unsigned long long)*n_tensors_out, (unsigned long long)left);
    if (*n_kvs_out > left / MIN_KV_BYTES)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: says %llu metadata keys at byte 16, %llu more bytes cannot hold them",
                         g->path, (unsigned long long)*n_kvs_out, (unsigned long long)left);
    return DCP_OK;
}

static dcp_status alloc_tables(struct gguf *g, size_t n_tensors, size_t n_kvs)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc_array(n_kvs, sizeof(struct kv), "model file metadata", &p));
    g->kvs = p;
    DCP_TRY(dcp__alloc_array(n_kvs, sizeof(struct kv *), "model file metadata", &p));
    g->by_key = p;
    DCP_TRY(dcp__alloc_array(n_tensors, sizeof(struct gguf_tensor), "model file tensors", &p));
    g->tensors = p;
    DCP_TRY(dcp__alloc_array(n_tensors, sizeof(struct gguf_tensor *), "model file tensors", &p));
    g->by_name = p;
    return DCP_OK;
}

static dcp_status parse(struct gguf *g)
{
    uint64_t n_tensors = 0, n_kvs = 0;
    DCP_TRY(take_preamble(g, &n_tensors, &n_kvs));
    DCP_TRY(alloc_tables(g, (size_t)n_tensors, (size_t)n_kvs));
    for (g->n_kvs = 0; g->n_kvs < n_kvs;) {
        g->n_kvs++; /* first: a half-read array is freed by close */
        DCP_TRY(take_kv(g, &g->kvs[g->n_kvs - 1]));
    }
    for (; g->n_tensors < n_tensors; g->n_tensors++) {
        struct gguf_tensor *t = &g->tensors[g->n_tensors];
        uint64_t name_off = 0;
        DCP_TRY(take_tensor(g, t, &name_off));
        t->name = (const char *)(uintptr_t)name_off; /* an offset until the header is complete */
    }
    for (size_t i = 0; i < g->n_tensors; i++)
        g->tensors[i].name = (const char *)g->head + (uintptr_t)g->tensors[i].name;
    DCP_TRY(index_kvs(g));
    return place_tensors(g);
}

static dcp_status open_file(struct gguf *g, const char *path)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(strlen(path) + 1, "model path", &p));
    g->path = p;
    memcpy(g->path, path, strlen(path) + 1);
    /* O_NONBLOCK: the open of a FIFO would wait for a writer, to be refused below. */
    g->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (g->fd < 0) return dcp__fail(DCP_ERR_SYS, "cannot open '%s': %s", path, strerror(errno));
    struct stat info;
    if (fstat(g->fd, &info) != 0)
        return dcp__fail(DCP_ERR_SYS, "cannot stat %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) return dcp__fail(DCP_ERR_SYS, "%s is not a regular file", path);
    g->file_bytes = (uint64_t)info.st_size;
    g->head_capacity = g->file_bytes < HEAD_FIRST_BYTES ? g->file_bytes : HEAD_FIRST_BYTES;
    DCP_TRY(dcp__alloc((size_t)g->head_capacity, "model file header", &p));
    g->head = p;
    return DCP_OK;
}

dcp_status gguf_open(const char *path, struct gguf **out)
{
    if (path == NULL || out == NULL)
        return dcp__fail(DCP_ERR_ARG, "gguf_open: path or out is NULL");
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct gguf), "model file", &p));
    struct gguf *g = p;
    g->fd = -1;
    dcp_status st = open_file(g, path);
    if (st == DCP_OK) st = parse(g);
    if (st != DCP_OK) {
        gguf_close(g);
        return st;
    }
    *out = g;
    return DCP_OK;
}

void gguf_close(struct gguf *g)
{
    if (g == NULL) return;
    for (size_t i = 0; i < g->n_kvs; i++) dcp__free(g->kvs[i].elems);
    dcp__free(g->by_name);
    dcp__free(g->tensors);
    dcp__free(g->by_key);
    dcp__free(g->kvs);
    dcp__free(g->head);
    if (g->fd >= 0) close(g->fd);
    dcp__free(g->path);
    dcp__free(g);
}

const char *gguf_path(const struct gguf *g)
{
    return g->path;
}
