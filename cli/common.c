/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/common.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/launch.h"
#include "cli/message.h"

bool command_parse(const struct command_def *cmd, int argc, char **argv, void *values,
                   int *n_operands_out, int *exit_code_out)
{
    char error[512];
    switch (options_parse(cmd, argc, argv, values, argv, n_operands_out, error, sizeof(error))) {
    case OPTIONS_RUN:
        if (dcp__alloc_check_limit() == DCP_OK) return true;
        *exit_code_out = usage_error(cmd, "%s", message_plain(dcp_last_error()));
        return false;
    case OPTIONS_HELP:
        if (launch_mpi_env_is_first()) options_help(cmd, stdout);
        *exit_code_out = finish_stdout(EXIT_DONE);
        return false;
    default:
        *exit_code_out = usage_error(cmd, "%s", error);
        return false;
    }
}

/* What this process has said of a failure before its run, or would have if it were the first: most
 * failures are the first's too. */
static char early_text[1000];

int usage_error(const struct command_def *cmd, const char *fmt, ...)
{
    char text[768];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    snprintf(early_text, sizeof(early_text), "%s: %s", cmd->name, text);
    if (launch_mpi_env_is_first()) fprintf(stderr, "dcp-attn %s: %s\n", cmd->name, text);
    return EXIT_USAGE;
}

int failed(void)
{
    dcp__brief(early_text, sizeof(early_text), dcp_last_error());
    if (launch_mpi_env_is_first())
        fprintf(stderr, "dcp-attn: %s\n", message_plain(dcp_last_error()));
    return EXIT_FAILED;
}

int end_early(int rc)
{
    if (rc == EXIT_DONE) return rc;
    return launch_failed_early(rc, early_text[0] != '\0' ? early_text : NULL,
                               launch_mpi_env_is_first());
}

bool tp_is_wrong(const struct command_def *cmd, const struct rank_opts *opts, int64_t tp)
{
    char comm[16];
    options_choice(COMM_CHOICES, opts->comm, comm, sizeof(comm));
    const bool is_world = opts->comm == 0 || strcmp(comm, "mpi") == 0;
    const int64_t world = is_world ? launch_mpi_env_size() : 0;
    const int64_t n = opts->ranks > 0 ? opts->ranks : world > 0 ? world : 1;
    if (tp <= 1 || n % tp == 0) return false;
    (void)usage_error(cmd, "--tp %lld must divide the ranks, here %lld%s", (long long)tp,
                      (long long)n, opts->ranks == 0 && world == 0 ? " (-n says how many)" : "");
    return true;
}

bool would_replace(const struct command_def *cmd, const char *what, const char *output,
                   const char *input)
{
    struct stat a, b;
    if (output == NULL || input == NULL || stat(output, &a) != 0 || stat(input, &b) != 0)
        return false;
    if (!S_ISREG(a.st_mode) || a.st_dev != b.st_dev || a.st_ino != b.st_ino) return false;
    (void)usage_error(cmd, "%s %s would replace an input of this command", what, output);
    return true;
}

bool isa_is_there(int isa, char *text_out, size_t n_bytes)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    const dcp_isa best = dcp__cpu_best_isa(&cpu);
    if (isa == 0 || (dcp_isa)isa <= best) return true;
    snprintf(text_out, n_bytes, "--isa %s: the highest level of this CPU is %s (%s)",
             dcp__isa_name((dcp_isa)isa), dcp__isa_name(best), cpu.why_not_higher);
    return false;
}

int run_on_ranks(const struct rank_opts *opts, int64_t n_ranks, int (*fn)(dcp_group *, void *),
                 void *ctx)
{
    char refusal[256];
    if (!isa_is_there(opts->isa, refusal, sizeof(refusal))) {
        snprintf(early_text, sizeof(early_text), "%s", refusal);
        if (launch_mpi_env_is_first()) fprintf(stderr, "dcp-attn: %s\n", refusal);
        return EXIT_USAGE;
    }
    char comm[16], isa[16];
    /* Every rank and every layer below reads the level from the environment. */
    if (opts->isa != 0) setenv("DCP_ATTN_ISA", options_choice(ISA_CHOICES, opts->isa, isa, 16), 1);
    struct launch_opts launch = {0};
    launch.n_ranks = (int)n_ranks;
    launch.comm = opts->comm == 0 ? NULL : options_choice(COMM_CHOICES, opts->comm, comm, 16);
    launch.deadline_s = opts->deadline_s;
    return launch_run(&launch, fn, ctx);
}

dcp_status sum_and_max(dcp_group *g, int64_t value, int64_t *sum_out, int64_t *max_out)
{
    const int n = dcp_group_size(g);
    int64_t *all = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(*all), "values of ranks", (void **)&all));
    const dcp_status st = dcp_group_allgather(g, &value, sizeof(value), all);
    if (st == DCP_OK) {
        *sum_out = 0;
        *max_out = all[0];
        for (int r = 0; r < n; r++) {
            *sum_out += all[r];
            if (all[r] > *max_out) *max_out = all[r];
        }
    }
    dcp__free(all);
    return st;
}

dcp_status read_file(const char *path, char **bytes_out, size_t *n_bytes_out)
{
    const bool is_stdin = strcmp(path, "-") == 0;
    FILE *f = is_stdin ? stdin : fopen(path, "rb");
    if (f == NULL) return dcp__fail(DCP_ERR_SYS, "cannot open '%s': %s", path, strerror(errno));
    dcp_status st = DCP_OK;
    char *bytes = NULL;
    size_t n = 0, room = 0;
    for (;;) {
        if (n + 1 >= room) {
            const size_t more = room == 0 ? 65536 : room * 2;
            char *grown = realloc(bytes, more);
            if (grown == NULL) {
                st = dcp__fail(DCP_ERR_NOMEM, "%s: no memory for %zu bytes", path, more);
                break;
            }
            bytes = grown;
            room = more;
        }
        const size_t got = fread(bytes + n, 1, room - 1 - n, f);
        n += got;
        if (got > 0) continue;
        if (ferror(f)) st = dcp__fail(DCP_ERR_SYS, "%s: read: %s", path, strerror(errno));
        break;
    }
    if (!is_stdin) fclose(f);
    if (st != DCP_OK) {
        free(bytes);
        return st;
    }
    bytes[n] = '\0';
    *bytes_out = bytes;
    *n_bytes_out = n;
    return DCP_OK;
}

/* --- standard output --- */

static bool is_lost;
static int lost_errno; /* why; 0 = not known */

void begin_stdout(void)
{
    static char buffer[1 << 16];
    (void)setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
}

/* A write in the midst of printing has failed and its cause is gone: ask the descriptor. */
static int ask_cause(void)
{
    struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
    if (poll(&p, 1, 0) == 1 && (p.revents & (POLLERR | POLLHUP)) != 0) return EPIPE;
    errno = 0;
    return write(STDOUT_FILENO, "\n", 1) < 0 ? errno : 0;
}

bool flush_stdout(void)
{
    errno = 0;
    const bool has_failed = fflush(stdout) != 0;
    const int cause = errno;
    if ((!has_failed && !ferror(stdout)) || is_lost) return !is_lost;
    is_lost = true;
    lost_errno = has_failed && cause != 0 ? cause : ask_cause();
    return false;
}

bool stdout_has_no_reader(void)
{
    return is_lost && lost_errno == EPIPE;
}

int finish_stdout(int exit_code)
{
    if (flush_stdout()) return exit_code;
    if (!stdout_has_no_reader())
        fprintf(stderr, "dcp-attn: standard output: %s\n",
                lost_errno != 0 ? strerror(lost_errno) : "a write has failed");
    return EXIT_FAILED;
}
