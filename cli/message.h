/* SPDX-License-Identifier: Apache-2.0 */
/* How the command tells people what went wrong. */
#ifndef DCP_CLI_MESSAGE_H
#define DCP_CLI_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* A library's text without the places in the source, " [src/x/y.c:12]", that it names for its
 * developers, and with --memory for the descriptors' workspace_limit_bytes; with DCP_ATTN_DEBUG=1
 * as it is. Valid until the thread's next call. */
const char *message_plain(const char *text);
/* text in lines of at most 80 columns, cut at spaces: the first begins with head, filled up to
 * indent columns, the others with indent spaces. Newlines in text begin lines too. */
void message_fold(FILE *to, const char *head, int indent, const char *text);
/* "" for 1, else "s". */
const char *message_s(int64_t n);

#endif
