/* SPDX-License-Identifier: Apache-2.0 */
/* A cgroup below this process's own: works where the own one is delegated (systemd's Delegate=yes,
 * a container with a writable cgroup namespace) and its memory controller is on for children. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/bench_oom.h"

static const char child_prefix[] = "dcp-attn-"; /* then the process's id */
static char own[512], child[640];

static bool write_text(const char *folder, const char *file, const char *text)
{
    char path[768];
    snprintf(path, sizeof(path), "%s/%s", folder, file);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const ssize_t n = (ssize_t)strlen(text);
    const bool is_done = write(fd, text, (size_t)n) == n;
    close(fd);
    return is_done;
}

/* The line "0::/path" of /proc/self/cgroup. */
static bool find_own(char *why, size_t n_bytes)
{
    char line[512];
    if (access("/sys/fs/cgroup/cgroup.controllers", R_OK) != 0) {
        snprintf(why, n_bytes, "there is no cgroup v2 hierarchy here");
        return false;
    }
    FILE *f = fopen("/proc/self/cgroup", "r");
    own[0] = '\0';
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0::", 3) == 0)
            snprintf(own, sizeof(own), "/sys/fs/cgroup%.480s",
                     strcmp(line + 3, "/") == 0 ? "" : line + 3);
    }
    if (f != NULL) fclose(f);
    if (own[0] == '\0') snprintf(why, n_bytes, "this process has no cgroup v2");
    return own[0] != '\0';
}

/* True if name is one that oom_cgroup_enter gives, of a process that is no more. */
static bool is_stale(const char *name)
{
    const size_t n_prefix = sizeof(child_prefix) - 1;
    if (strncmp(name, child_prefix, n_prefix) != 0) return false;
    const char *digits = name + n_prefix;
    const size_t n = strspn(digits, "0123456789");
    if (n < 1 || n > 9 || digits[n] != '\0') return false;
    const pid_t pid = (pid_t)atoi(digits);
    return pid > 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

void oom_cgroup_sweep(const char *folder)
{
    char path[1024], why[64];
    if (folder == NULL && !find_own(why, sizeof(why))) return;
    if (folder == NULL) folder = own;
    DIR *const dir = opendir(folder);
    if (dir == NULL) return;
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (!is_stale(e->d_name)) continue;
        if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, e->d_name) < sizeof(path))
            (void)rmdir(path); /* refused while a process is in it */
    }
    closedir(dir);
}

bool oom_cgroup_enter(uint64_t n_bytes, char *text, size_t text_bytes)
{
    char number[32], path[768];
    if (!find_own(text, text_bytes)) return false;
    oom_cgroup_sweep(own);
    snprintf(child, sizeof(child), "%s/%s%d", own, child_prefix, (int)getpid());
    if (mkdir(child, 0755) != 0) {
        snprintf(text, text_bytes, "cannot make a cgroup: %s", strerror(errno));
        child[0] = '\0';
        return false;
    }
    snprintf(path, sizeof(path), "%s/memory.max", child);
    snprintf(number, sizeof(number), "%llu", (unsigned long long)n_bytes);
    (void)write_text(child, "memory.swap.max", "0"); /* absent without swap accounting */
    if (access(path, W_OK) == 0 && write_text(child, "memory.max", number) &&
        write_text(child, "cgroup.procs", "0")) {
        snprintf(text, text_bytes, "memory.max of a cgroup of each rank");
        return true;
    }
    snprintf(text, text_bytes,
             "a cgroup made here has no memory controller, or may not be entered");
    (void)rmdir(child);
    child[0] = '\0';
    return false;
}

void oom_cgroup_leave(void)
{
    if (child[0] == '\0') return;
    (void)write_text(own, "cgroup.procs", "0");
    (void)rmdir(child);
    child[0] = '\0';
}
