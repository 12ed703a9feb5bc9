/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_turn.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash_priv.h"
#include "base/status_priv.h"

/* The same for ranks whose clocks are one: the same boot of a kernel, the same offset of its clock
 * (containers may have one of their own). */
static uint64_t clock_key(void)
{
    char text[64] = "";
    struct stat st;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f != NULL) {
        if (fgets(text, sizeof(text), f) == NULL) text[0] = '\0';
        fclose(f);
    }
    uint64_t key = dcp__hash_bytes(DCP__HASH_BEGIN, text, strlen(text));
    if (text[0] == '\0') { /* no boot's name: at least hosts do not share a clock */
        char host[256] = "";
        (void)gethostname(host, sizeof(host) - 1);
        key = dcp__hash_bytes(key, host, strlen(host));
    }
    if (stat("/proc/self/ns/time", &st) == 0) key ^= (uint64_t)st.st_ino;
    return key;
}

/* Turn i of all ranks, which begins and ends by the clock of rank r. */
static int64_t by_clock_of(const struct bench_turn *all, int n_ranks, int64_t n, int64_t i, int r)
{
    struct bench_turn t = all[r * n + i];
    for (int k = 0; k < n_ranks; k++) {
        const struct bench_turn *x = &all[k * n + i];
        if (x->clock != t.clock) continue;
        if (x->begin < t.begin) t.begin = x->begin;
        if (x->end > t.end) t.end = x->end;
    }
    return t.end - t.begin;
}

dcp_status bench_turn_times(dcp_group *g, struct bench_turn *own, int64_t n,
                            struct bench_turn *room, double *us_out)
{
    const int n_ranks = dcp_group_size(g);
    const uint64_t key = clock_key();
    for (int64_t i = 0; i < n; i++) own[i].clock = key;
    DCP_TRY(dcp_group_allgather(g, own, (size_t)n * sizeof(*own), room));
    for (int64_t i = 0; i < n; i++) {
        int64_t ns = 0;
        for (int r = 0; r < n_ranks; r++) {
            const int64_t x = by_clock_of(room, n_ranks, n, i, r);
            if (x > ns) ns = x;
        }
        us_out[i] = (double)ns * 1e-3;
    }
    return DCP_OK;
}
