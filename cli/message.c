/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/message.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_COLUMNS = 80, MESSAGE_BYTES = 2048 };

/* A descriptor's field and the option that fills it, in every command that has one. */
static const char limit_field[] = "workspace_limit_bytes";
static const char limit_option[] = "--memory";

/* Length of " [path.c:12]" at s; 0 if that is not what is there. */
static size_t place_len(const char *s)
{
    if (s[0] != ' ' || s[1] != '[') return 0;
    size_t n = 2;
    while (isalnum((unsigned char)s[n]) || (s[n] != '\0' && strchr("_./-", s[n]) != NULL)) n++;
    if (n < 4 || s[n - 2] != '.' || (s[n - 1] != 'c' && s[n - 1] != 'h') || s[n] != ':') return 0;
    const size_t digits = strspn(s + n + 1, "0123456789");
    return digits > 0 && s[n + 1 + digits] == ']' ? n + digits + 2 : 0;
}

const char *message_plain(const char *text)
{
    static _Thread_local char plain[MESSAGE_BYTES];
    const char *debug = getenv("DCP_ATTN_DEBUG");
    if (debug != NULL && strcmp(debug, "1") == 0) return text;
    size_t n = 0;
    for (const char *at = text; *at != '\0' && n + 1 < sizeof(plain);) {
        const size_t skip = place_len(at);
        if (skip > 0) {
            at += skip;
        } else if (strncmp(at, limit_field, sizeof(limit_field) - 1) == 0) {
            at += sizeof(limit_field) - 1;
            for (const char *c = limit_option; *c != '\0' && n + 1 < sizeof(plain);)
                plain[n++] = *c++;
        } else {
            plain[n++] = *at++;
        }
    }
    plain[n] = '\0';
    return plain;
}

void message_fold(FILE *to, const char *head, int indent, const char *text)
{
    int column = fprintf(to, "%-*s", indent, head);
    bool is_first = true; /* word of its line */
    while (*text != '\0') {
        if (*text == '\n') {
            column = fprintf(to, "\n%*s", indent, "") - 1;
            is_first = true;
            text++;
            continue;
        }
        const int len = (int)strcspn(text, " \n");
        if (!is_first && column + 1 + len > MESSAGE_COLUMNS) {
            column = fprintf(to, "\n%*s", indent, "") - 1;
            is_first = true;
        }
        column += fprintf(to, "%s%.*s", is_first ? "" : " ", len, text);
        is_first = false;
        text += len;
        if (*text == ' ') text++;
    }
    putc('\n', to);
}

const char *message_s(int64_t n)
{
    return n == 1 ? "" : "s";
}
