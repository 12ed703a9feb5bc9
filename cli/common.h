/* SPDX-License-Identifier: Apache-2.0 */
/* What the commands share: options of ranks, running on ranks, telling errors, files. */
#ifndef DCP_CLI_COMMON_H
#define DCP_CLI_COMMON_H

#include <stdbool.h>

#include "cli/binding.h"
#include "cli/options.h"
#include "dcpattn/dcpattn.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* --- options that every command with ranks has --- */
struct rank_opts {
    int64_t ranks; /* 0 = not given */
    int64_t threads;
    int comm; /* index in COMM_CHOICES */
    double deadline_s;
    int isa;  /* index in ISA_CHOICES = dcp_isa */
    int bind; /* index in BIND_CHOICES = enum bind_mode */
};
#define COMM_CHOICES "auto|threads|shm|mpi"
#define ISA_CHOICES "auto|scalar|avx2|avx512|amx"
#define ALGO_CHOICES "auto|direct|alltoall|halving|hierarchical|allreduce"
#define DTYPE_CHOICES "auto|f32|f16|bf16"
#define KV_DTYPE_CHOICES DTYPE_CHOICES "|int8|fp8"
#define RANKS_OPTION(type, at)                                                                     \
    {                                                                                              \
        "ranks", 'n', OPT_INT, offsetof(type, at.ranks), "N", 1, 4096, NULL,                       \
            "number of ranks (default 1; under mpirun: the world)"                                 \
    }
#define THREADS_OPTION(type, at)                                                                   \
    {                                                                                              \
        "threads", 't', OPT_INT, offsetof(type, at.threads), "N", 1, 4096, NULL,                   \
            "threads of each rank (default: usable CPUs shared out)"                               \
    }
#define COMM_OPTIONS(type, at)                                                                     \
    {"comm",                                                                                       \
     0,                                                                                            \
     OPT_ENUM,                                                                                     \
     offsetof(type, at.comm),                                                                      \
     NULL,                                                                                         \
     0,                                                                                            \
     0,                                                                                            \
     COMM_CHOICES,                                                                                 \
     "how ranks meet (default auto: mpi under mpirun, else shm: processes)"},                      \
        {"deadline",                                                                               \
         0,                                                                                        \
         OPT_FLOAT,                                                                                \
         offsetof(type, at.deadline_s),                                                            \
         "SECONDS",                                                                                \
         0.001,                                                                                    \
         86400,                                                                                    \
         NULL,                                                                                     \
         "longest wait for another rank (default 30)"},                                            \
    {                                                                                              \
        "isa", 0, OPT_ENUM, offsetof(type, at.isa), NULL, 0, 0, ISA_CHOICES,                       \
            "highest instruction-set level to use; one that the CPU lacks is refused (default "    \
            "auto: the CPU's)"                                                                     \
    }

/* --- a command's frame --- */
/* Parse; false: *exit_code_out is what the command returns (help printed, or the error). Operands
 * are left at the front of argv. */
bool command_parse(const struct command_def *cmd, int argc, char **argv, void *values,
                   int *n_operands_out, int *exit_code_out);
/* A usage error found after parsing: prints it (under an MPI launcher rank 0 does), returns
 * EXIT_USAGE. */
int usage_error(const struct command_def *cmd, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Prints this thread's last error; returns EXIT_FAILED.
 * Under an MPI launcher rank 0 comes first. */
int failed(void);
/* The exit code of a command that has ended with rc; where it did so before its run, the other
 * ranks of an MPI launcher hear of it. */
int end_early(int rc);
/* Usage error, said: tp (--tp) does not divide the ranks that the options or a launcher name. */
bool tp_is_wrong(const struct command_def *cmd, const struct rank_opts *opts, int64_t tp);
/* Usage error, said: what ("-o") would replace the input file. Regular files only, links seen
 * through. A path that is NULL: false. */
bool would_replace(const struct command_def *cmd, const char *what, const char *output,
                   const char *input);

/* False, and why, where the CPU lacks the level isa (index in ISA_CHOICES). */
bool isa_is_there(int isa, char *text_out, size_t n_bytes);

/* --- ranks --- */
/* Run fn on n_ranks ranks (0 = what the launcher or one says); the exit code of the command. */
int run_on_ranks(const struct rank_opts *opts, int64_t n_ranks, int (*fn)(dcp_group *, void *),
                 void *ctx);
/* Collective: the local outcome of every rank. False on all ranks if any failed, so that nobody
 * waits for a rank that gave up; the cause is told to the launcher, which prints it once. */
bool all_ranks_ok(dcp_group *g, dcp_status local);
/* The same where the cause has been printed here (is_said): ranks of the same cause are silent. */
bool all_ranks_ok_said(dcp_group *g, dcp_status local, bool is_said);
/* After a collective call failed with st: tells the launcher and the peers; returns EXIT_FAILED. */
int rank_failed(dcp_group *g, dcp_status st);
/* Collective: sum and largest of value over the ranks. */
dcp_status sum_and_max(dcp_group *g, int64_t value, int64_t *sum_out, int64_t *max_out);

/* --- files --- */
/* The whole of a file, byte for byte, NUL after the end; "-" is standard input. *bytes_out is freed
 * with free. */
dcp_status read_file(const char *path, char **bytes_out, size_t *n_bytes_out);
/* Flushes stdout; EXIT_FAILED with a message if anything written to it got lost (without one if the
 * reader of a pipe has closed it), else exit_code. */
int finish_stdout(int exit_code);
/* Flushes stdout in the middle; false once anything got lost. */
bool flush_stdout(void);
/* All of stdout in large pieces, so that a failing write tells its cause.
 * Call before any output. */
void begin_stdout(void);
/* True if what got lost did because the reader of a pipe has closed it. */
bool stdout_has_no_reader(void);

/* --- commands --- */
int cmd_attend(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int bench_generate(int argc, char **argv); /* dcp-attn bench generate, and so on */
int bench_attend(int argc, char **argv);
int bench_extend(int argc, char **argv);
int bench_product(int argc, char **argv);
int bench_oom(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_merge(int argc, char **argv);
int cmd_perplexity(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);

#endif
