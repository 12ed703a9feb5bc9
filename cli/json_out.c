/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/json_out.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/utf8.h"

static void put_text(FILE *to, const char *s, size_t n_bytes)
{
    putc('"', to);
    for (size_t i = 0; i < n_bytes;) {
        bool valid;
        const size_t n = utf8_next(s + i, n_bytes - i, &valid);
        const unsigned char c = (unsigned char)s[i];
        if (!valid) {
            fputs("\xEF\xBF\xBD", to);
        } else if (c == '"' || c == '\\') {
            putc('\\', to);
            putc(c, to);
        } else if (c == '\n') {
            fputs("\\n", to);
        } else if (c < 0x20 || c == 0x7F) {
            fprintf(to, "\\u%04x", c);
        } else {
            fwrite(s + i, 1, n, to);
        }
        i += n;
    }
    putc('"', to);
}

static void put_key(struct json_out *j, const char *key)
{
    if (j->has_items[j->depth]) fputs(", ", j->to);
    j->has_items[j->depth] = true;
    if (key == NULL) return;
    put_text(j->to, key, strlen(key));
    fputs(": ", j->to);
}

static void open_level(struct json_out *j, char c)
{
    assert(j->depth + 1 < JSON_MAX_DEPTH);
    putc(c, j->to);
    j->has_items[++j->depth] = false;
}

static void close_level(struct json_out *j, char c)
{
    j->depth--;
    putc(c, j->to);
}

void jout_begin(struct json_out *j, FILE *to)
{
    memset(j, 0, sizeof(*j));
    j->to = to;
    open_level(j, '{');
}

void jout_end(struct json_out *j)
{
    close_level(j, '}');
    putc('\n', j->to);
}

void jout_object(struct json_out *j, const char *key)
{
    put_key(j, key);
    open_level(j, '{');
}

void jout_object_end(struct json_out *j)
{
    close_level(j, '}');
}

void jout_array(struct json_out *j, const char *key)
{
    put_key(j, key);
    open_level(j, '[');
}

void jout_array_end(struct json_out *j)
{
    close_level(j, ']');
}

void jout_int(struct json_out *j, const char *key, int64_t value)
{
    put_key(j, key);
    fprintf(j->to, "%" PRId64, value);
}

void jout_num(struct json_out *j, const char *key, double value)
{
    put_key(j, key);
    if (isfinite(value)) {
        fprintf(j->to, "%.9g", value);
    } else {
        fputs("null", j->to);
    }
}

void jout_bool(struct json_out *j, const char *key, bool value)
{
    put_key(j, key);
    fputs(value ? "true" : "false", j->to);
}

void jout_null(struct json_out *j, const char *key)
{
    put_key(j, key);
    fputs("null", j->to);
}

void jout_bytes(struct json_out *j, const char *key, const char *bytes, size_t n_bytes)
{
    put_key(j, key);
    put_text(j->to, bytes, n_bytes);
}

void jout_str(struct json_out *j, const char *key, const char *text)
{
    jout_bytes(j, key, text, strlen(text));
}

void jout_ints32(struct json_out *j, const char *key, const int32_t *values, size_t n)
{
    jout_array(j, key);
    for (size_t i = 0; i < n; i++) jout_int(j, NULL, values[i]);
    jout_array_end(j);
}
