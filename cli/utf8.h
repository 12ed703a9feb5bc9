/* SPDX-License-Identifier: Apache-2.0 */
/* Where UTF-8 sequences begin and end in bytes of any kind. */
#ifndef DCP_CLI_UTF8_H
#define DCP_CLI_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Bytes of the well-formed sequence at s. If there is none: the number of bytes that stand for one
 * error (the longest prefix of a sequence, at least 1), and *is_valid_out false. n_bytes >= 1. */
size_t utf8_next(const char *s, size_t n_bytes, bool *is_valid_out);
/* How many of the last bytes could begin a sequence that is not complete yet (0..3). */
size_t utf8_incomplete_tail(const char *s, size_t n_bytes);

/* True if all of s is UTF-8. */
bool utf8_is_valid(const char *s, size_t n_bytes);
/* s on one line: line ends, control bytes, bytes that are not UTF-8, \ and " are spelled out as \n
 * or \xf0. */
void utf8_print_escaped(FILE *to, const char *s, size_t n_bytes);

#endif
