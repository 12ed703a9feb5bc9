/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/safetensors_json.h"

#include <jansson.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"

struct st_json {
    json_t *root;
    void *iter;
    size_t n_tensors;
    const char *path; /* of the file object, which outlives this */
    struct st_json_entry entry;
};

static const char METADATA_KEY[] = "__metadata__";

dcp_status st_json_parse(const char *path, const char *text, size_t n_bytes, struct st_json **out)
{
    json_error_t error;
    json_t *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: header: %s at byte %d", path, error.text,
                         error.position < 0 ? 8 : error.position + 8);
    if (!json_is_object(root)) {
        json_decref(root);
        return dcp__fail(DCP_ERR_FORMAT, "%s: header at byte 8 is no JSON object", path);
    }
    void *p = NULL;
    const dcp_status st = dcp__alloc(sizeof(struct st_json), "safetensors header", &p);
    if (st != DCP_OK) {
        json_decref(root);
        return st;
    }
    struct st_json *j = p;
    j->root = root;
    j->path = path;
    j->iter = json_object_iter(root);
    j->n_tensors = json_object_size(root) - (json_object_get(root, METADATA_KEY) != NULL ? 1 : 0);
    *out = j;
    return DCP_OK;
}

size_t st_json_count(const struct st_json *j)
{
    return j->n_tensors;
}

static dcp_status missing(const struct st_json *j, const char *what)
{
    return dcp__fail(DCP_ERR_FORMAT, "%s: header: tensor %.80s: %s", j->path, j->entry.name, what);
}

dcp_status st_json_next(struct st_json *j, const struct st_json_entry **entry_out)
{
    if (j->iter != NULL && strcmp(json_object_iter_key(j->iter), METADATA_KEY) == 0)
        j->iter = json_object_iter_next(j->root, j->iter);
    if (j->iter == NULL) return dcp__fail(DCP_ERR_ARG, "%s: header: no more tensors", j->path);
    struct st_json_entry *e = &j->entry;
    memset(e, 0, sizeof(*e));
    e->name = json_object_iter_key(j->iter);
    const json_t *value = json_object_iter_value(j->iter);
    j->iter = json_object_iter_next(j->root, j->iter);

    if (!json_is_object(value)) return missing(j, "is no JSON object");
    e->dtype = json_string_value(json_object_get(value, "dtype"));
    if (e->dtype == NULL) return missing(j, "has no dtype string");
    const json_t *shape = json_object_get(value, "shape");
    if (!json_is_array(shape)) return missing(j, "has no shape array");
    if (json_array_size(shape) > ST_MAX_DIMS) return missing(j, "has more than 8 dimensions");
    e->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < e->n_dims; i++) {
        const json_t *dim = json_array_get(shape, (size_t)i);
        if (!json_is_integer(dim)) return missing(j, "has a shape that is not all integers");
        e->dims[i] = json_integer_value(dim);
    }
    const json_t *offsets = json_object_get(value, "data_offsets");
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !json_is_integer(json_array_get(offsets, 0)) ||
        !json_is_integer(json_array_get(offsets, 1)))
        return missing(j, "has no data_offsets array of two integers");
    e->begin = json_integer_value(json_array_get(offsets, 0));
    e->end = json_integer_value(json_array_get(offsets, 1));
    *entry_out = e;
    return DCP_OK;
}

void st_json_free(struct st_json *j)
{
    if (j == NULL) return;
    json_decref(j->root);
    dcp__free(j);
}

/* One declared tensor into root; *at moves over its bytes. */
static dcp_status add_decl(json_t *root, const struct st_decl *d, size_t *at)
{
    if (d->name == NULL || d->n_dims < 0 || d->n_dims > ST_MAX_DIMS ||
        st_dtype_bytes(d->dtype) == 0)
        return dcp__fail(DCP_ERR_ARG, "safetensors writer: tensor %.80s: dtype %d, %d dimensions",
                         d->name == NULL ? "NULL" : d->name, (int)d->dtype, d->n_dims);
    if (json_object_get(root, d->name) != NULL)
        return dcp__fail(DCP_ERR_ARG, "safetensors writer: tensor %.80s is declared twice",
                         d->name);
    json_t *shape = json_array();
    size_t n_bytes = st_dtype_bytes(d->dtype), end = 0;
    bool bad = false;
    for (int i = 0; i < d->n_dims; i++) {
        bad = bad || d->dims[i] < 0 || dcp__mul_overflow(n_bytes, (size_t)d->dims[i], &n_bytes);
        json_array_append_new(shape, json_integer(d->dims[i]));
    }
    if (bad || dcp__add_overflow(*at, n_bytes, &end) || end > INT64_MAX) {
        json_decref(shape);
        return dcp__fail(DCP_ERR_ARG, "safetensors writer: tensor %.80s: its shape has no size",
                         d->name);
    }
    /* "o" takes the reference to shape, also where it fails. */
    json_t *value = json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_name(d->dtype), "shape",
                              shape, "data_offsets", (json_int_t)*at, (json_int_t)end);
    if (value == NULL || json_object_set_new(root, d->name, value) != 0)
        return dcp__fail(DCP_ERR_ARG,
                         "safetensors writer: tensor %.80s: name is not UTF-8, or no memory",
                         d->name);
    *at = end;
    return DCP_OK;
}

dcp_status st_json_format(const struct st_decl *decls, int n_decls, char **text_out,
                          size_t *n_bytes_out)
{
    json_t *root = json_object();
    if (root == NULL) return dcp__fail(DCP_ERR_NOMEM, "safetensors header");
    size_t at = 0;
    dcp_status st = DCP_OK;
    for (int i = 0; i < n_decls && st == DCP_OK; i++) st = add_decl(root, &decls[i], &at);
    const size_t n = st == DCP_OK ? json_dumpb(root, NULL, 0, JSON_COMPACT) : 0;
    const size_t padded = (n + 7) / 8 * 8;
    void *text = NULL;
    if (st == DCP_OK) st = dcp__alloc(padded, "safetensors header", &text);
    if (st == DCP_OK) {
        memset(text, ' ', padded);
        json_dumpb(root, text, padded, JSON_COMPACT);
        *text_out = text;
        *n_bytes_out = padded;
    }
    json_decref(root);
    return st;
}
