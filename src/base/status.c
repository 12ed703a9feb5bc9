/* SPDX-License-Identifier: Apache-2.0 */
/* Status texts, the thread's last error, the version. */
#include "base/status_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ERROR_TEXT_BYTES = DCP__ERROR_TEXT_BYTES };

static _Thread_local char last_error[ERROR_TEXT_BYTES];

void dcp__keep_error(struct dcp__kept_error *kept)
{
    memcpy(kept->text, last_error, sizeof(last_error));
}
void dcp__restore_error(const struct dcp__kept_error *kept)
{
    memcpy(last_error, kept->text, sizeof(last_error));
}

const char *dcp_status_text(dcp_status st)
{
    switch (st) {
#define X(name, value, text)                                                                       \
    case DCP_##name:                                                                               \
        return text;
        DCP_STATUS_LIST(X)
#undef X
    }
    return "unknown status code";
}

const char *dcp_last_error(void)
{
    return last_error;
}

const char *dcp_version(void)
{
    return DCP_VERSION;
}

/* The path from the root of the tree on, so that texts do not depend on where it was built: this
 * file's own path says where the root is. */
static const char *tree_path(const char *file)
{
    static const char here[] = __FILE__, inside[] = "src/base/status.c";
    const size_t n_here = sizeof(here) - 1, n_inside = sizeof(inside) - 1;
    if (n_here < n_inside) return file;
    const size_t n_root = n_here - n_inside;
    return strncmp(file, here, n_root) == 0 ? file + n_root : file;
}

dcp_status dcp__fail_at(dcp_status st, const char *file, int line, const char *fmt, ...)
{
    /* Formatted aside first: an argument may be the previous last error itself. */
    char text[ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    const int n_text = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (n_text < 0) text[0] = '\0';
    char place[128];
    int n_place = snprintf(place, sizeof(place), " [%s:%d]", tree_path(file), line);
    if (n_place < 0) n_place = 0;
    if ((size_t)n_place >= sizeof(place)) n_place = (int)sizeof(place) - 1;
    size_t room = sizeof(last_error) - 1 - (size_t)n_place;
    size_t n = strlen(text);
    if (n > room) n = room;
    memcpy(last_error, text, n);
    memcpy(last_error + n, place, (size_t)n_place);
    last_error[n + (size_t)n_place] = '\0';
    return st;
}

/* Length of " [path.c:12]" at s; 0 if that is not what is there. */
static size_t place_len(const char *s)
{
    if (s[0] != ' ' || s[1] != '[') return 0;
    const size_t n = 2 + strcspn(s + 2, " []:");
    if (s[n] != ':' || n < 4 || s[n - 2] != '.') return 0;
    const size_t digits = strspn(s + n + 1, "0123456789");
    return digits > 0 && s[n + 1 + digits] == ']' ? n + digits + 2 : 0;
}

void dcp__brief(char *to, size_t n_bytes, const char *text)
{
    size_t n = 0;
    while (*text != '\0' && n + 1 < n_bytes) {
        const size_t skip = place_len(text);
        if (skip > 0)
            text += skip;
        else
            to[n++] = *text++;
    }
    while (place_len(text) > 0) text += place_len(text);
    if (*text != '\0') {
        const size_t most = n_bytes - 4; /* and the dots */
        for (n = most; n > 0 && to[n] != ' ';) n--;
        if (n == 0) n = most; /* one long word */
        memcpy(to + n, "...", 3);
        n += 3;
    }
    to[n] = '\0';
}
