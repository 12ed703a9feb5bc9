/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn: the first argument names a command, each of which is a file cmd_<name>.c. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/common.h"
#include "cli/launch.h"
#include "cli/message.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
    bool has_ranks; /* else one process of a launcher's speaks, and none waits for another */
} commands[] = {
    {"generate", "run a model, its KV cache sharded over ranks", cmd_generate, true},
    {"perplexity", "-log p of every token of a text, and the perplexity", cmd_perplexity, true},
    {"tokenize", "token ids and pieces of a text", cmd_tokenize, false},
    {"merge", "merge dumped partial attention results, one file per rank", cmd_merge, true},
    {"attend", "sharded attention over dumped q, k, v", cmd_attend, true},
    {"bench", "time what there is: merge, attend, extend, product, oom, generate", cmd_bench, true},
    {"info", "build, CPU, kernels chosen and why, topology, group backends", cmd_info, false},
};

static void print_usage(FILE *to)
{
    fprintf(to, "Usage: dcp-attn COMMAND [options]\n\n"
                "Exact attention over a KV cache that is sharded by token over ranks.\n\n"
                "Commands:\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        char head[32];
        snprintf(head, sizeof(head), "  %s", commands[i].name);
        message_fold(to, head, 16, commands[i].summary);
    }
    fprintf(to, "\ndcp-attn COMMAND --help says more; dcp-attn --version prints the version.\n");
}

/* A descriptor of 0, 1, 2 that is closed would be given to the next file opened, and messages would
 * be written into that. Readers see an end; a write fails, as it would on a closed one. */
static bool hold_standard_fds(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        /* The lowest free number, so fd itself; stderr has nobody to tell of its loss. */
        if (open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) != fd) return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    if (!hold_standard_fds()) return EXIT_FAILED;
    /* A reader that closes early is a write error where we write, not a silent death. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow (ulimit -f) likewise */
    begin_stdout();
    const bool speaks = launch_mpi_env_is_first();
    if (argc < 2) {
        if (speaks) print_usage(stderr);
        return EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        if (speaks) print_usage(stdout);
        return finish_stdout(EXIT_DONE);
    }
    if (strcmp(name, "--version") == 0) {
        if (speaks) printf("dcp-attn %s\n", dcp_version());
        return finish_stdout(EXIT_DONE);
    }
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (strcmp(name, commands[i].name) != 0) continue;
        const int rc = commands[i].run(argc - 2, argv + 2);
        return commands[i].has_ranks ? end_early(rc) : rc;
    }
    if (speaks) fprintf(stderr, "dcp-attn: '%s' is no command; see dcp-attn --help\n", name);
    return EXIT_USAGE;
}
