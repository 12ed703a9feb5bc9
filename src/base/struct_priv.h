/* SPDX-License-Identifier: Apache-2.0 */
/* Public structs that begin with size_t struct_size may grow at their end without breaking callers
 * that were built against another version:
 *
 *   caller's   | struct_size | fields .......... |              shorter: what is missing is 0
 *   library's  | struct_size | fields .................. |
 *   caller's   | struct_size | fields .................. | 0 0 0 |   longer: zeros are ignored
 *
 * 0 means the default in every optional field, so a field that the caller does not know is one that
 * it does not use. */
#ifndef DCP_BASE_STRUCT_PRIV_H
#define DCP_BASE_STRUCT_PRIV_H

#include <stddef.h>

#include "base/status_priv.h"

/* Bytes up to and with a field: what a struct's first version had. */
#define DCP__STRUCT_UPTO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* Copy the caller's options into mine [mine_bytes], whose struct_size becomes mine_bytes. call and
 * init ("dcp_attend_create", "DCP_ATTEND_DESC_INIT") are for the text of a refusal: NULL, shorter
 * than least_bytes, or longer than mine with something else than zeros there. */
dcp_status dcp__struct_read(const char *call, const char *init, const void *theirs,
                            size_t least_bytes, void *mine, size_t mine_bytes);
/* May results be written into theirs? NULL may: it is not wanted. */
dcp_status dcp__struct_check_out(const char *call, const char *init, const void *theirs,
                                 size_t least_bytes);
/* Fill in theirs, as far as its struct_size goes; what mine does not have becomes 0, struct_size
 * stays. Nothing is written where dcp__struct_check_out would refuse. */
void dcp__struct_write(void *theirs, size_t least_bytes, const void *mine, size_t mine_bytes);

#endif
