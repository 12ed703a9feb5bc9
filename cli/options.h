/* SPDX-License-Identifier: Apache-2.0 */
/* Command-line options: one table per command says everything about an option, and the parser, the
 * environment names and the help are made from it. */
#ifndef DCP_CLI_OPTIONS_H
#define DCP_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum option_type {
    OPT_FLAG,   /* bool */
    OPT_INT,    /* int64_t */
    OPT_SIZE,   /* uint64_t; K, M, G are powers of 1024 */
    OPT_FLOAT,  /* double */
    OPT_STRING, /* const char *, borrowed from argv or the environment */
    OPT_ENUM    /* int: index in choices */
};

struct option_def {
    const char *name; /* without the dashes; the environment name is DCP_ATTN_<NAME> */
    char letter;      /* 0 = none */
    enum option_type type;
    size_t offset;       /* of the value in the command's struct */
    const char *metavar; /* "N"; NULL for flags and enums */
    double min, max;     /* of numbers, inclusive */
    const char *choices; /* of enums: "auto|direct|alltoall" */
    const char *help;    /* one line; says the default */
};

struct command_def {
    const char *name;
    const char *operands; /* "FILE..." or "" */
    int min_operands, max_operands;
    const char *summary; /* one line */
    const struct option_def *options;
    size_t n_options;
    const char *notes; /* more help text after the options, or NULL */
};

/* What a command line may ask for instead of work. */
enum options_result { OPTIONS_RUN, OPTIONS_HELP, OPTIONS_BAD };

/* Fill values from the environment, then from argv[0..argc-1] (the command's name left out; the
 * flag wins). values holds the defaults before. operands_out points at operands in order, inside
 * argv, which is reordered. OPTIONS_BAD: error_out says which option, which value and what would be
 * right. */
enum options_result options_parse(const struct command_def *cmd, int argc, char **argv,
                                  void *values, char **operands_out, int *n_operands_out,
                                  char *error_out, size_t error_bytes);
/* The command's --help. */
void options_help(const struct command_def *cmd, FILE *to);
/* Text of choice i of "a|b|c" into buf. */
const char *options_choice(const char *choices, int i, char *buf, size_t n_bytes);

#endif
