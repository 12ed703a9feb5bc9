/* SPDX-License-Identifier: Apache-2.0 */
/* The command's launcher: exit codes, one message, and that nothing stays behind. It is part of the
 * command, which tests do not link, so its three files are taken in here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "cli/launch.c"
#include "cli/launch_mpi.c"
#include "cli/launch_shm.c"
#include "cli/message.c"
#include "cli/outcome.c"

#include <fcntl.h>

#include "base/fault_priv.h"

enum { TEXT_BYTES = 4096 };

/* A command in a process of its own; its stderr goes to a file. */
struct command {
    int n;
    const char *comm;
    double deadline_s;
    launch_fn *fn;
    void *ctx;
};

static pid_t start_command(const struct command *c, int stderr_fd)
{
    fflush(NULL);
    const pid_t pid = fork();
    if (pid != 0) return pid;
    dup2(stderr_fd, 2);
    const struct launch_opts opts = {.n_ranks = c->n, .comm = c->comm, .deadline_s = c->deadline_s};
    const int rc = launch_run(&opts, c->fn, c->ctx);
    fflush(NULL);
    _exit(rc);
}

static int run_command(const struct command *c, char *text)
{
    FILE *f = tmpfile();
    assert_non_null(f);
    const pid_t pid = start_command(c, fileno(f));
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    const ssize_t n = pread(fileno(f), text, TEXT_BYTES - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    fclose(f);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int count_lines(const char *text)
{
    int n = 0;
    for (; *text != '\0'; text++) n += *text == '\n';
    return n;
}

/* Barriers, with a fault point of its own. */
static int work(dcp_group *g, void *ctx)
{
    (void)ctx;
    for (int k = 0; k < 20; k++) {
        dcp__fault_pass("work", dcp_group_rank(g), dcp_group_deadline(g) * 1.5 + 0.25);
        const dcp_status st = dcp_group_barrier(g);
        if (st != DCP_OK) {
            launch_tell(g, st, dcp_last_error());
            return 1;
        }
    }
    return 0;
}

static int misuse(dcp_group *g, void *ctx)
{
    (void)g, (void)ctx;
    return 2;
}

/* One rank has a cause, the others only notice. */
static int one_fails(dcp_group *g, void *ctx)
{
    if (dcp_group_rank(g) == 1) {
        launch_tell(g, DCP_ERR_FORMAT, "page 7 is torn");
        return 1;
    }
    return work(g, ctx);
}

static const char *const comms[] = {"threads", "shm"};

static void test_exit_codes(void **state)
{
    (void)state;
    char text[TEXT_BYTES];
    struct command c = {1, NULL, 5, work, NULL};
    assert_int_equal(run_command(&c, text), 0);
    assert_string_equal(text, "");
    c.comm = "pigeon";
    assert_int_equal(run_command(&c, text), 2);
    c.comm = "mpi";
    c.n = 3;
    assert_true(run_command(&c, text) != 0); /* no launcher: says so, or that no module is there */
    for (int i = 0; i < 2; i++) {
        c = (struct command){3, comms[i], 5, work, NULL};
        assert_int_equal(run_command(&c, text), 0);
        assert_string_equal(text, "");
        c.fn = misuse;
        assert_int_equal(run_command(&c, text), 2);
        c.fn = one_fails;
        assert_int_equal(run_command(&c, text), 1);
        assert_string_equal(text, "dcp-attn: rank 1: page 7 is torn\n");
    }
}

static void test_faults(void **state)
{
    (void)state;
    static const struct {
        const char *fault, *want;
    } cases[] = {
        {"kill:work:2:5", "was killed by signal 9 (SIGKILL)"},
        {"exit:work:1:3", "ended with exit status 3"},
        {"stop:work:0:2", "is stopped"},
        {"delay:work:1:2", "did not arrive: rank 1"},
    };
    char text[TEXT_BYTES];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("DCP_ATTN_FAULT", cases[i].fault, 1);
        const struct command c = {3, "shm", 1, work, NULL};
        /* Once more, and again, where a pause of the machine ended just as they looked: all of its
         * processes were woken then, the stopped one for a moment. */
        for (int tries = 0; tries < 3; tries++) {
            assert_int_equal(run_command(&c, text), 1);
            if (strncmp(cases[i].fault, "stop", 4) != 0 || strstr(text, cases[i].want) != NULL)
                break;
        }
        if (strstr(text, cases[i].want) == NULL || count_lines(text) != 1) {
            print_error("%s: %s", cases[i].fault, text);
            fail();
        }
    }
    unsetenv("DCP_ATTN_FAULT");
}

/* Ranks that write their pids and then hang in a long wait, one of them stopped. */
static int hang(dcp_group *g, void *ctx)
{
    const int *pipe_fds = ctx;
    const pid_t pid = getpid();
    if (write(pipe_fds[1], &pid, sizeof(pid)) != (ssize_t)sizeof(pid)) return 1;
    if (dcp_group_rank(g) == 1) raise(SIGSTOP);
    if (dcp_group_rank(g) != 0) (void)dcp_group_barrier(g);
    for (;;) pause();
}

static bool is_running(pid_t pid)
{
    char path[64], line[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (f == NULL) return false;
    const bool got = fgets(line, sizeof(line), f) != NULL;
    fclose(f);
    const char *end = got ? strrchr(line, ')') : NULL;
    return end != NULL && end[2] != 'Z' && end[2] != 'X';
}

static void test_nothing_stays(void **state)
{
    (void)state;
    static const int signals[] = {SIGKILL, SIGTERM, SIGINT};
    for (int i = 0; i < 3; i++) {
        int pipe_fds[2];
        pid_t pids[3];
        assert_int_equal(pipe(pipe_fds), 0);
        const struct command c = {3, "shm", 60, hang, pipe_fds};
        const int null_fd = open("/dev/null", O_WRONLY);
        const pid_t parent = start_command(&c, null_fd);
        close(null_fd);
        for (int r = 0; r < 3; r++) {
            assert_int_equal(read(pipe_fds[0], &pids[r], sizeof(pid_t)), sizeof(pid_t));
        }
        kill(parent, signals[i]);
        int status;
        assert_int_equal(waitpid(parent, &status, 0), parent);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == signals[i]);
        int n_running = 3;
        for (int tries = 0; n_running > 0 && tries < 300; tries++) {
            const struct timespec ts = {.tv_nsec = 10000000};
            nanosleep(&ts, NULL);
            n_running = 0;
            for (int r = 0; r < 3; r++) n_running += is_running(pids[r]);
        }
        assert_int_equal(n_running, 0);
        close(pipe_fds[0]);
        close(pipe_fds[1]);
    }
}

int main(void)
{
    /* As if started by hand, whatever starts the tests. */
    unsetenv("OMPI_COMM_WORLD_SIZE");
    unsetenv("PMI_SIZE");
    unsetenv("PMI_RANK");
    unsetenv("PMIX_RANK");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_nothing_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
