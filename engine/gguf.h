/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files: metadata and tensor directory in memory, tensor bytes read on demand (pread: a file
 * that shrinks under us is an error, not a SIGBUS). Every read is bounds-checked; a malformed file
 * gives DCP_ERR_FORMAT that says what and at which byte. */
#ifndef DCP_ENGINE_GGUF_H
#define DCP_ENGINE_GGUF_H

#include <stdbool.h>
#include <stdint.h>

#include "dcpattn/types.h"

struct gguf;

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STR,
    GGUF_ARR,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

struct gguf_tensor {
    const char *name;
    int n_dims;
    int64_t dims[4];      /* dims[0] is the contiguous one: k; dims[1] the rows */
    int qtype;            /* enum dcp__qtype, supported ones only */
    uint64_t file_offset; /* absolute */
    size_t n_bytes;
    size_t row_bytes; /* of dims[0] elements */
};

dcp_status gguf_open(const char *path, struct gguf **out);
void gguf_close(struct gguf *g); /* takes NULL */
const char *gguf_path(const struct gguf *g);

/* Scalars: any integer type is accepted for int (range-checked), float types for f64. found_out =
 * false and DCP_OK if the key is absent; DCP_ERR_FORMAT if it has another type. */
dcp_status gguf_get_int(const struct gguf *g, const char *key, int64_t *value_out, bool *found_out);
dcp_status gguf_get_f64(const struct gguf *g, const char *key, double *value_out, bool *found_out);
dcp_status gguf_get_bool(const struct gguf *g, const char *key, bool *value_out, bool *found_out);
/* NUL-terminated copy owned by g; *len_out may be NULL. */
dcp_status gguf_get_str(const struct gguf *g, const char *key, const char **str_out,
                        size_t *len_out, bool *found_out);
/* Arrays: *n_out elements of elem_type; 0 and not found if absent. */
dcp_status gguf_get_arr(const struct gguf *g, const char *key, enum gguf_type *elem_type_out,
                        size_t *n_out, bool *found_out);
/* Element i of a string array (not NUL-terminated; may hold any bytes), of an integer array, of a
 * float array. Index and type are checked. */
dcp_status gguf_arr_str(const struct gguf *g, const char *key, size_t i, const char **str_out,
                        size_t *len_out);
dcp_status gguf_arr_int(const struct gguf *g, const char *key, size_t i, int64_t *value_out);
dcp_status gguf_arr_f64(const struct gguf *g, const char *key, size_t i, double *value_out);

size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);
const struct gguf_tensor *gguf_find(const struct gguf *g, const char *name); /* NULL if absent */
/* Bytes [byte_begin, byte_begin + n_bytes) of a tensor's data. */
dcp_status gguf_read(const struct gguf *g, const struct gguf_tensor *t, size_t byte_begin,
                     size_t n_bytes, void *dst);

#endif
