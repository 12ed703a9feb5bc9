/* SPDX-License-Identifier: Apache-2.0 */
/* A progress bar on stderr, drawn only where stderr is a terminal. */
#ifndef DCP_CLI_PROGRESS_H
#define DCP_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    const char *what;
    bool is_shown;
    double begin_s;
};
void progress_begin(struct progress *p, const char *what, bool wanted);
/* ctx is the struct progress. */
void progress_show(void *ctx, int64_t done, int64_t total);
void progress_end(struct progress *p);

#endif
