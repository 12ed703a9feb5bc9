/* SPDX-License-Identifier: Apache-2.0 */
/* Cgroups of ranks that were killed are swept away; nobody else's. A plain folder stands in for the
 * hierarchy: rmdir refuses a folder with something in it as it refuses a cgroup with a process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench_oom.h"

/* The id of a process that has been. */
static int dead_pid(void)
{
    const pid_t pid = fork();
    if (pid == 0) _exit(0);
    assert_true(pid > 0);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return (int)pid;
}

static bool is_there(const char *folder, const char *name)
{
    char path[768];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static void make(const char *folder, const char *name)
{
    char path[768];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void remove_it(const char *folder, const char *name)
{
    char path[768];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    assert_int_equal(rmdir(path), 0);
}

static void test_sweep(void **state)
{
    (void)state;
    enum { N = 9 };
    char folder[] = "/tmp/dcp-oom-cgroup-XXXXXX", names[N][48];
    assert_non_null(mkdtemp(folder));
    const int dead = dead_pid(), busy = dead_pid();
    snprintf(names[0], sizeof(names[0]), "dcp-attn-%d", dead);
    /* What must stay. */
    snprintf(names[1], sizeof(names[1]), "dcp-attn-%d", (int)getpid());
    snprintf(names[2], sizeof(names[2]), "dcp-attn-%d", busy);
    snprintf(names[3], sizeof(names[3]), "dcp-attn-%dx", dead);
    snprintf(names[4], sizeof(names[4]), "dcp-attn--%d", dead);
    snprintf(names[5], sizeof(names[5]), "other-%d", dead);
    snprintf(names[6], sizeof(names[6]), "dcp-attn-");
    snprintf(names[7], sizeof(names[7]), "dcp-attn-%d0000000000", dead);
    snprintf(names[8], sizeof(names[8]), "dcp-attn-0");
    for (int i = 0; i < N; i++) make(folder, names[i]);
    char inner[64];
    snprintf(inner, sizeof(inner), "%s/inner", names[2]);
    make(folder, inner);
    oom_cgroup_sweep(folder);
    assert_false(is_there(folder, names[0]));
    for (int i = 1; i < N; i++) assert_true(is_there(folder, names[i]));
    remove_it(folder, inner);
    oom_cgroup_sweep(folder);
    assert_false(is_there(folder, names[2]));
    for (int i = 1; i < N; i++)
        if (i != 2) remove_it(folder, names[i]);
    oom_cgroup_sweep(folder); /* nothing to do */
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sweep)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
