/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock_priv.h"

void progress_begin(struct progress *p, const char *what, bool wanted)
{
    p->what = what;
    p->is_shown = wanted && isatty(STDERR_FILENO);
    p->begin_s = dcp__now_s();
}

void progress_show(void *ctx, int64_t done, int64_t total)
{
    const struct progress *p = ctx;
    char bar[33];
    if (!p->is_shown || total <= 0) return;
    const int full = (int)(done * 32 / total);
    memset(bar, '.', 32);
    memset(bar, '#', (size_t)full);
    bar[32] = '\0';
    fprintf(stderr, "\r%s [%s] %lld/%lld tokens, %.1f s ", p->what, bar, (long long)done,
            (long long)total, dcp__now_s() - p->begin_s);
    fflush(stderr);
}

void progress_end(struct progress *p)
{
    if (p->is_shown) fputs("\r\033[K", stderr);
    p->is_shown = false;
}
