/* SPDX-License-Identifier: Apache-2.0 */
/* Status texts, the thread's last error, the version. */
#include "base/status_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Long enough for a poison text of 448 bytes with a place behind it. */
enum { ERROR_TEXT_BYTES = 1024 };

static _Thread_local char last_error[ERROR_TEXT_BYTES];

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

/* The path from the root of the tree on, so that texts do not depend on where it was built. */
static const char *tree_path(const char *file)
{
    static const char *const roots[] = {"/src/", "/engine/", "/cli/", "/tests/"};
    for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
        const char *at = strstr(file, roots[i]);
        if (at != NULL) return at + 1;
    }
    return file;
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
