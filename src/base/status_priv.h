/* SPDX-License-Identifier: Apache-2.0 */
/* Failures are recorded once, where they are decided; callers only propagate. */
#ifndef DCP_BASE_STATUS_PRIV_H
#define DCP_BASE_STATUS_PRIV_H

#include <stddef.h>

#include "dcpattn/status.h"

/* Record the text of a failure in this thread's last error and return st. Never allocates. */
dcp_status dcp__fail_at(dcp_status st, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
#define dcp__fail(st, ...) dcp__fail_at((st), __FILE__, __LINE__, __VA_ARGS__)

/* text without the places in the source that dcp__fail puts behind it, for a record or a message of
 * its own. Where to [n_bytes >= 4] is too small it ends at a word, with "...". May overlap with
 * nothing. */
void dcp__brief(char *to, size_t n_bytes, const char *text);

#define DCP_TRY(call)                                                                              \
    do {                                                                                           \
        const dcp_status try_st_ = (call);                                                         \
        if (try_st_ != DCP_OK) return try_st_;                                                     \
    } while (0)

/* The thread's last error, put aside: what returns nothing must not replace the text of what failed
 * before it. */
enum { DCP__ERROR_TEXT_BYTES = 1024 }; /* a poison text of 448 bytes with a place behind it */
struct dcp__kept_error {
    char text[DCP__ERROR_TEXT_BYTES];
};
void dcp__keep_error(struct dcp__kept_error *kept);
void dcp__restore_error(const struct dcp__kept_error *kept);

#endif
