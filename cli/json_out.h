/* SPDX-License-Identifier: Apache-2.0 */
/* Writing one JSON object as it is made: nothing is held, so a list of any length costs nothing.
 * Keys are given for members of objects and NULL for items of arrays. Bytes that are not UTF-8
 * become U+FFFD; NaN and infinities, which JSON lacks, become null. */
#ifndef DCP_CLI_JSON_OUT_H
#define DCP_CLI_JSON_OUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { JSON_MAX_DEPTH = 8 };

struct json_out {
    FILE *to;
    int depth;
    bool has_items[JSON_MAX_DEPTH];
};

void jout_begin(struct json_out *j, FILE *to); /* opens the object */
void jout_end(struct json_out *j);             /* closes it, newline */
void jout_object(struct json_out *j, const char *key);
void jout_object_end(struct json_out *j);
void jout_array(struct json_out *j, const char *key);
void jout_array_end(struct json_out *j);
void jout_int(struct json_out *j, const char *key, int64_t value);
void jout_num(struct json_out *j, const char *key, double value);
void jout_bool(struct json_out *j, const char *key, bool value);
void jout_null(struct json_out *j, const char *key);
void jout_str(struct json_out *j, const char *key, const char *text);
void jout_bytes(struct json_out *j, const char *key, const char *bytes, size_t n_bytes);
void jout_ints32(struct json_out *j, const char *key, const int32_t *values, size_t n);

#endif
