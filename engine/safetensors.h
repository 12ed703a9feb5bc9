/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors files: bounds-checked reader (header parsed with jansson, data read whole or by
 * pread) and writer. */
#ifndef DCP_ENGINE_SAFETENSORS_H
#define DCP_ENGINE_SAFETENSORS_H

#include <stdint.h>

#include "dcpattn/types.h"

enum { ST_MAX_DIMS = 8 };
enum st_dtype {
    ST_F64 = 1,
    ST_F32,
    ST_F16,
    ST_BF16,
    ST_I64,
    ST_I32,
    ST_I16,
    ST_I8,
    ST_U8,
    ST_BOOL,
    ST_U64, /* from here on nothing reads the elements */
    ST_U32,
    ST_U16,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_F8_E8M0,
    ST_C64,
    ST_OTHER /* a type without a size here: the file's word for n_bytes is taken */
};

struct st_tensor {
    const char *name;
    enum st_dtype dtype;
    const char *dtype_name; /* as the file spells it */
    int n_dims;
    int64_t dims[ST_MAX_DIMS];
    int64_t n_elems;
    uint64_t file_offset;
    size_t n_bytes;
};
struct st_file;
/* Tensors of any type may lie in the file; what does not fit the format is DCP_ERR_FORMAT. */
dcp_status st_open(const char *path, struct st_file **out);
void st_close(struct st_file *f);
const char *st_path(const struct st_file *f); /* as it was given to st_open */
const struct st_tensor *st_find(const struct st_file *f, const char *name);
dcp_status st_read(const struct st_file *f, const struct st_tensor *t, size_t byte_begin,
                   size_t n_bytes, void *dst);
size_t st_dtype_bytes(enum st_dtype d);     /* 0 of ST_OTHER */
const char *st_dtype_name(enum st_dtype d); /* "F32" */
/* Conversions between the two worlds; DCP_DTYPE_DEFAULT / 0 if there is none. */
dcp_dtype st_to_dcp(enum st_dtype d);
enum st_dtype st_from_dcp(dcp_dtype t);

/* Writer: all tensors declared first, then data written in order by append calls (so that nothing
 * is held twice). Written to PATH.tmp.PID, renamed at finish. */
struct st_writer;
struct st_decl {
    const char *name;
    enum st_dtype dtype;
    int n_dims;
    int64_t dims[ST_MAX_DIMS];
};
dcp_status st_writer_create(const char *path, const struct st_decl *decls, int n_decls,
                            struct st_writer **out);
/* Whether a file can be made at path, before long work for it. Leaves nothing. */
dcp_status st_writer_probe(const char *path);
/* Bytes of the tensors one after the other in declared order. */
dcp_status st_writer_append(struct st_writer *w, const void *data, size_t n_bytes);
/* Checks that every byte came, then the file appears under its name (fsync is not done); a device
 * or FIFO has it by then. On failure nothing is left.
 * Frees w either way. */
dcp_status st_writer_finish(struct st_writer *w);
void st_writer_abandon(struct st_writer *w); /* takes NULL */

#endif
