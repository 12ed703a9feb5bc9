/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_machine.h"

#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"

/* What a rank knows of its CPUs. */
struct cpus {
    int32_t n_usable, n_in_mask;
};

static int nth_cpu(const cpu_set_t *set, int n)
{
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, set) && n-- == 0) return (int)cpu;
    }
    return -1;
}

static bool bind_to(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one);
    return sched_setaffinity(0, sizeof(one), &one) == 0; /* the calling thread alone */
}

dcp_status bench_pin(dcp_group *g, char *text, size_t n_bytes)
{
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    cpu_set_t mask;
    CPU_ZERO(&mask);
    const bool is_known = sched_getaffinity(0, sizeof(mask), &mask) == 0;
    struct cpus own = {dcp__cpu_usable(), is_known ? CPU_COUNT(&mask) : 0};
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(own), "CPUs of ranks", &mem));
    struct cpus *all = mem;
    dcp_status st = dcp_group_allgather(g, &own, sizeof(own), all);
    int least_usable = own.n_usable, least_mask = own.n_in_mask, most_mask = 0;
    for (int r = 0; st == DCP_OK && r < n; r++) {
        if (all[r].n_usable < least_usable) least_usable = all[r].n_usable;
        if (all[r].n_in_mask < least_mask) least_mask = all[r].n_in_mask;
        if (all[r].n_in_mask > most_mask) most_mask = all[r].n_in_mask;
    }
    int32_t is_bound = 0;
    if (least_usable >= n && least_mask >= n) is_bound = bind_to(nth_cpu(&mask, rank)) ? 1 : 0;
    int32_t *bound = mem; /* no larger than the records before */
    if (st == DCP_OK) st = dcp_group_allgather(g, &is_bound, sizeof(is_bound), bound);
    bool all_bound = st == DCP_OK;
    for (int r = 0; all_bound && r < n; r++) all_bound = bound[r] != 0;
    dcp__free(mem);
    if (all_bound && n == 1)
        snprintf(text, n_bytes, "on CPU %d", nth_cpu(&mask, 0));
    else if (all_bound)
        snprintf(text, n_bytes, "rank r on CPU %d + r", nth_cpu(&mask, 0));
    else if (n > 1 && most_mask == 1)
        snprintf(text, n_bytes, "each rank on one CPU, by the launcher");
    else
        snprintf(text, n_bytes, "no: %d ranks, %d usable CPUs", n, least_usable);
    return st;
}

/* The number after key in a file of "Key: value kB" lines, in bytes. */
static int64_t kilobytes(const char *path, const char *key)
{
    FILE *f = fopen(path, "r");
    if (f == NULL) return -1;
    char line[256];
    int64_t value = -1;
    const size_t n = strlen(key);
    while (value < 0 && fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, key, n) == 0) value = strtoll(line + n, NULL, 10) * 1024;
    }
    fclose(f);
    return value;
}

int64_t bench_pss_bytes(void)
{
    return kilobytes("/proc/self/smaps_rollup", "Pss:");
}

int64_t bench_resident_mark(void)
{
    const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    const bool is_reset = write(fd, "5", 1) == 1; /* 5: the high-water mark */
    close(fd);
    return is_reset ? kilobytes("/proc/self/status", "VmRSS:") : -1;
}

int64_t bench_resident_peak(void)
{
    return kilobytes("/proc/self/status", "VmHWM:");
}

int64_t bench_available_bytes(void)
{
    return kilobytes("/proc/meminfo", "MemAvailable:");
}

double bench_load(void)
{
    double load[1];
    return getloadavg(load, 1) == 1 ? load[0] : -1.0;
}
