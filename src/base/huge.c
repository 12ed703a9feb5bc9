/* SPDX-License-Identifier: Apache-2.0 */
#include "base/huge_priv.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; older ones refuse it */
#endif

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* A line "begin-end perms ..." begins a mapping; the lines "Key:   n kB" after it describe it. */
size_t dcp__huge_bytes(const void *at, size_t n_bytes)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    if (f == NULL) return 0;
    const uintptr_t begin = (uintptr_t)at, end = begin + n_bytes;
    size_t inside = 0, huge = 0;
    char line[512];
    while (fgets(line, sizeof(line), f) != NULL) {
        unsigned long long from, to, kilobytes;
        if (sscanf(line, "%llx-%llx ", &from, &to) == 2) {
            const uintptr_t low = from > begin ? (uintptr_t)from : begin;
            const uintptr_t high = to < end ? (uintptr_t)to : end;
            inside = low < high ? high - low : 0;
        } else if (inside > 0 && (sscanf(line, "AnonHugePages: %llu", &kilobytes) == 1 ||
                                  sscanf(line, "ShmemPmdMapped: %llu", &kilobytes) == 1)) {
            huge += min_size((size_t)kilobytes * 1024, inside);
        }
    }
    fclose(f);
    return min_size(huge, n_bytes);
}

/* MADV_COLLAPSE works even where the administrator has switched huge pages off: not here. */
static bool are_switched_off(void)
{
    char line[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (f == NULL) return true;
    const bool is_read = fgets(line, sizeof(line), f) != NULL;
    fclose(f);
    return !is_read || strstr(line, "[never]") != NULL;
}

void dcp__huge_collapse(void *at)
{
    if (!are_switched_off()) (void)madvise(at, DCP__HUGE_PAGE, MADV_COLLAPSE);
}
