/* SPDX-License-Identifier: Apache-2.0 */
/* How many CPUs this process may keep busy: its affinity mask, and the CPU quota of its control
 * group and of every group above it. A container that may use two CPUs of 64 shows 64 in the mask
 * often enough; 64 spinning threads would then be throttled for most of each period. */
#include "base/cpu_priv.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int count_affinity(void)
{
    for (int n_cpus = 1024; n_cpus <= 65536; n_cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)n_cpus);
        if (set == NULL) return 1;
        const size_t set_bytes = CPU_ALLOC_SIZE((size_t)n_cpus);
        const int rc = sched_getaffinity(0, set_bytes, set);
        const int err = errno;
        const int count = rc == 0 ? CPU_COUNT_S(set_bytes, set) : 0;
        CPU_FREE(set);
        if (rc == 0) return count > 0 ? count : 1;
        if (err != EINVAL) return 1; /* EINVAL: the mask is larger than the set */
    }
    return 1;
}

static bool read_line(const char *path, char *line, size_t line_bytes)
{
    FILE *f = fopen(path, "re");
    if (f == NULL) return false;
    const bool got = fgets(line, (int)line_bytes, f) != NULL;
    fclose(f);
    return got;
}

/* CPUs of a quota in us per period in us; 0 = no limit. */
static int quota_cpus(double quota, double period)
{
    if (quota <= 0 || period <= 0) return 0;
    const double cpus = quota / period;
    if (cpus >= 65536) return 0;
    return cpus < 1 ? 1 : (int)cpus;
}

static int read_v2(const char *dir)
{
    char path[1200], line[128];
    snprintf(path, sizeof(path), "%s/cpu.max", dir);
    double quota, period;
    if (!read_line(path, line, sizeof(line))) return 0;
    if (sscanf(line, "%lf %lf", &quota, &period) != 2) return 0; /* "max 100000" */
    return quota_cpus(quota, period);
}

static int read_v1(const char *dir)
{
    char path[1200], line[128];
    double quota, period;
    snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
    if (!read_line(path, line, sizeof(line)) || sscanf(line, "%lf", &quota) != 1) return 0;
    snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
    if (!read_line(path, line, sizeof(line)) || sscanf(line, "%lf", &period) != 1) return 0;
    return quota_cpus(quota, period);
}

/* The least quota of the group at mount + path and of its parents. Where a container sees its own
 * group as the root of the mount, the path does not exist and only the root counts. */
static int least_quota(const char *mount, const char *group_path, int (*read_dir)(const char *))
{
    char dir[1024];
    const int n = snprintf(dir, sizeof(dir), "%s%s", mount, group_path);
    if (n < 0 || (size_t)n >= sizeof(dir)) return 0;
    int least = 0;
    for (;;) {
        const int cpus = read_dir(dir);
        if (cpus > 0 && (least == 0 || cpus < least)) least = cpus;
        if (strlen(dir) <= strlen(mount)) return least;
        char *slash = strrchr(dir, '/');
        if (slash == NULL || slash < dir + strlen(mount)) return least;
        *slash = '\0';
    }
}

/* True if the comma-separated list of controllers holds "cpu". */
static bool has_cpu_controller(const char *list)
{
    for (const char *at = list; *at != '\0';) {
        const size_t n = strcspn(at, ",");
        if (n == 3 && memcmp(at, "cpu", 3) == 0) return true;
        at += n;
        if (*at == ',') at++;
    }
    return false;
}

static int count_quota(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f == NULL) return 0;
    int least = 0;
    char line[1024];
    while (fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        /* id:controllers:path; version 2 has no controllers */
        char *controllers = strchr(line, ':');
        if (controllers == NULL) continue;
        char *path = strchr(++controllers, ':');
        if (path == NULL) continue;
        *path++ = '\0';
        int found[3] = {0, 0, 0};
        if (controllers[0] == '\0') {
            found[0] = least_quota("/sys/fs/cgroup", path, read_v2);
            found[1] = least_quota("/sys/fs/cgroup/unified", path, read_v2);
        } else if (has_cpu_controller(controllers)) {
            found[0] = least_quota("/sys/fs/cgroup/cpu", path, read_v1);
            found[1] = least_quota("/sys/fs/cgroup/cpu,cpuacct", path, read_v1);
        }
        for (int i = 0; i < 3; i++) {
            if (found[i] > 0 && (least == 0 || found[i] < least)) least = found[i];
        }
    }
    fclose(f);
    return least;
}

int dcp__cpu_usable(void)
{
    const int affine = count_affinity();
    const int quota = count_quota();
    return quota > 0 && quota < affine ? quota : affine;
}
