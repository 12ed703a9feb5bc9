/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON side of safetensors: the one place of the engine that includes jansson. */
#ifndef DCP_ENGINE_SAFETENSORS_JSON_H
#define DCP_ENGINE_SAFETENSORS_JSON_H

#include <stddef.h>
#include <stdint.h>

#include "engine/safetensors.h"

struct st_json;

/* One tensor as the header has it: types are checked, values are not. */
struct st_json_entry {
    const char *name, *dtype;
    int n_dims; /* <= ST_MAX_DIMS */
    int64_t dims[ST_MAX_DIMS];
    int64_t begin, end;
};

dcp_status st_json_parse(const char *path, const char *text, size_t n_bytes, struct st_json **out);
size_t st_json_count(const struct st_json *j);
/* The tensors one after the other; to be called st_json_count times. Valid until the next call. */
dcp_status st_json_next(struct st_json *j, const struct st_json_entry **entry_out);
void st_json_free(struct st_json *j); /* takes NULL */

/* The header of a file to be written, padded with spaces to a multiple of 8 bytes; dcp__free it. */
dcp_status st_json_format(const struct st_decl *decls, int n_decls, char **text_out,
                          size_t *n_bytes_out);

#endif
