/* SPDX-License-Identifier: Apache-2.0 */
/* Values and tensors of an open GGUF file: look-up by name, typed and range-checked access. */
#include <limits.h>
#include <string.h>

#include "engine/gguf_priv.h"

static const struct {
    unsigned char bytes;
    const char *name;
} type_table[] = {
    [GGUF_U8] = {1, "u8"},     [GGUF_I8] = {1, "i8"},     [GGUF_U16] = {2, "u16"},
    [GGUF_I16] = {2, "i16"},   [GGUF_U32] = {4, "u32"},   [GGUF_I32] = {4, "i32"},
    [GGUF_F32] = {4, "f32"},   [GGUF_BOOL] = {1, "bool"}, [GGUF_STR] = {0, "string"},
    [GGUF_ARR] = {0, "array"}, [GGUF_U64] = {8, "u64"},   [GGUF_I64] = {8, "i64"},
    [GGUF_F64] = {8, "f64"},
};

size_t gguf__type_bytes(enum gguf_type type)
{
    return type_table[type].bytes;
}

bool gguf__is_type(uint32_t type)
{
    return type < sizeof(type_table) / sizeof(type_table[0]);
}

static const struct kv *find_kv(const struct gguf *g, const char *key)
{
    size_t lo = 0, hi = g->n_kvs;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        const int order = strcmp(key, g->by_key[mid]->key);
        if (order == 0) return g->by_key[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

static dcp_status wrong_type(const struct gguf *g, const struct kv *kv, enum gguf_type type,
                             const char *wanted)
{
    return dcp__fail(DCP_ERR_FORMAT, "%s: %.80s at byte %llu is of type %s, wanted %s", g->path,
                     kv->key, (unsigned long long)kv->value_off, type_table[type].name, wanted);
}

static dcp_status decode_int(const struct gguf *g, const struct kv *kv, enum gguf_type type,
                             const unsigned char *p, int64_t *value_out)
{
    switch (type) {
    case GGUF_U8:
        *value_out = p[0];
        return DCP_OK;
    case GGUF_I8:
        *value_out = (int8_t)p[0];
        return DCP_OK;
    case GGUF_U16:
        *value_out = (uint16_t)(p[0] | p[1] << 8);
        return DCP_OK;
    case GGUF_I16:
        *value_out = (int16_t)(uint16_t)(p[0] | p[1] << 8);
        return DCP_OK;
    case GGUF_U32:
        *value_out = load_u32(p);
        return DCP_OK;
    case GGUF_I32:
        *value_out = (int32_t)load_u32(p);
        return DCP_OK;
    case GGUF_I64:
        *value_out = (int64_t)load_u64(p);
        return DCP_OK;
    case GGUF_U64: {
        const uint64_t u = load_u64(p);
        if (u > INT64_MAX)
            return dcp__fail(DCP_ERR_FORMAT, "%s: %.80s is %llu, beyond 63 bits", g->path, kv->key,
                             (unsigned long long)u);
        *value_out = (int64_t)u;
        return DCP_OK;
    }
    default:
        return wrong_type(g, kv, type, "an integer");
    }
}

static dcp_status decode_f64(const struct gguf *g, const struct kv *kv, enum gguf_type type,
                             const unsigned char *p, double *value_out)
{
    if (type == GGUF_F32) {
        const uint32_t u = load_u32(p);
        float f;
        memcpy(&f, &u, sizeof(f));
        *value_out = (double)f;
        return DCP_OK;
    }
    if (type == GGUF_F64) {
        const uint64_t u = load_u64(p);
        memcpy(value_out, &u, sizeof(u));
        return DCP_OK;
    }
    return wrong_type(g, kv, type, "a floating-point number");
}

dcp_status gguf_get_int(const struct gguf *g, const char *key, int64_t *value_out, bool *found_out)
{
    const struct kv *kv = find_kv(g, key);
    *found_out = kv != NULL;
    return kv == NULL ? DCP_OK : decode_int(g, kv, kv->type, g->head + kv->value_off, value_out);
}

dcp_status gguf_get_f64(const struct gguf *g, const char *key, double *value_out, bool *found_out)
{
    const struct kv *kv = find_kv(g, key);
    *found_out = kv != NULL;
    return kv == NULL ? DCP_OK : decode_f64(g, kv, kv->type, g->head + kv->value_off, value_out);
}

dcp_status gguf_get_bool(const struct gguf *g, const char *key, bool *value_out, bool *found_out)
{
    const struct kv *kv = find_kv(g, key);
    *found_out = kv != NULL;
    if (kv == NULL) return DCP_OK;
    if (kv->type != GGUF_BOOL) return wrong_type(g, kv, kv->type, "bool");
    const unsigned char byte = g->head[kv->value_off];
    if (byte > 1)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %.80s at byte %llu is a bool of value %u", g->path,
                         key, (unsigned long long)kv->value_off, byte);
    *value_out = byte == 1;
    return DCP_OK;
}

dcp_status gguf_get_str(const struct gguf *g, const char *key, const char **str_out,
                        size_t *len_out, bool *found_out)
{
    const struct kv *kv = find_kv(g, key);
    *found_out = kv != NULL;
    if (kv == NULL) return DCP_OK;
    if (kv->type != GGUF_STR) return wrong_type(g, kv, kv->type, "string");
    *str_out = (const char *)g->head + kv->value_off;
    if (len_out != NULL) *len_out = (size_t)kv->n;
    return DCP_OK;
}

dcp_status gguf_get_arr(const struct gguf *g, const char *key, enum gguf_type *elem_type_out,
                        size_t *n_out, bool *found_out)
{
    const struct kv *kv = find_kv(g, key);
    *found_out = kv != NULL;
    *n_out = 0;
    if (kv == NULL) return DCP_OK;
    if (kv->type != GGUF_ARR) return wrong_type(g, kv, kv->type, "an array");
    if (elem_type_out != NULL) *elem_type_out = kv->elem_type;
    *n_out = (size_t)kv->n;
    return DCP_OK;
}

/* Element i of array key; fails if there is none. */
static dcp_status find_elem(const struct gguf *g, const char *key, size_t i,
                            const struct kv **kv_out)
{
    const struct kv *kv = find_kv(g, key);
    if (kv == NULL) return dcp__fail(DCP_ERR_ARG, "%s: has no key %.80s", g->path, key);
    if (kv->type != GGUF_ARR) return wrong_type(g, kv, kv->type, "an array");
    if (i >= kv->n)
        return dcp__fail(DCP_ERR_ARG, "%s: element %zu of %.80s, which has %llu", g->path, i, key,
                         (unsigned long long)kv->n);
    *kv_out = kv;
    return DCP_OK;
}

dcp_status gguf_arr_str(const struct gguf *g, const char *key, size_t i, const char **str_out,
                        size_t *len_out)
{
    const struct kv *kv = NULL;
    DCP_TRY(find_elem(g, key, i, &kv));
    if (kv->elem_type != GGUF_STR) return wrong_type(g, kv, kv->elem_type, "strings");
    const unsigned char *p = g->head + kv->elems[i];
    *len_out = (size_t)load_u64(p);
    *str_out = (const char *)p + 8;
    return DCP_OK;
}

dcp_status gguf_arr_int(const struct gguf *g, const char *key, size_t i, int64_t *value_out)
{
    const struct kv *kv = NULL;
    DCP_TRY(find_elem(g, key, i, &kv));
    return decode_int(g, kv, kv->elem_type,
                      g->head + kv->value_off + i * type_table[kv->elem_type].bytes, value_out);
}

dcp_status gguf_arr_f64(const struct gguf *g, const char *key, size_t i, double *value_out)
{
    const struct kv *kv = NULL;
    DCP_TRY(find_elem(g, key, i, &kv));
    return decode_f64(g, kv, kv->elem_type,
                      g->head + kv->value_off + i * type_table[kv->elem_type].bytes, value_out);
}

size_t gguf_n_tensors(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_tensor *gguf_find(const struct gguf *g, const char *name)
{
    size_t lo = 0, hi = g->n_tensors;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        const int order = strcmp(name, g->by_name[mid]->name);
        if (order == 0) return g->by_name[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

dcp_status gguf_read(const struct gguf *g, const struct gguf_tensor *t, size_t byte_begin,
                     size_t n_bytes, void *dst)
{
    if (byte_begin > t->n_bytes || n_bytes > t->n_bytes - byte_begin)
        return dcp__fail(DCP_ERR_ARG, "%s: tensor %.80s has %zu bytes; bytes %zu + %zu asked for",
                         g->path, t->name, t->n_bytes, byte_begin, n_bytes);
    return gguf__read_at(g, t->file_offset + byte_begin, n_bytes, dst);
}
