/* SPDX-License-Identifier: Apache-2.0 */
/* What `generate` tells at its end: as a table for people, as one JSON object for programs. */
#ifndef DCP_CLI_GENERATE_REPORT_H
#define DCP_CLI_GENERATE_REPORT_H

#include <stdio.h>

#include "engine/session.h"
#include "engine/tokenizer.h"

struct generate_times {
    double prompt_s, generate_s;
    int64_t n_steps; /* single-token steps in generate_s */
};

struct generate_report {
    int n_ranks;
    const char *comm;
    const struct session_rank_report *ranks; /* [n_ranks] */
    const char *replicated_names;
    const struct token_list *prompt, *ids;
    const char *text;
    size_t n_text_bytes;
    const char *stop; /* "end", "max-tokens", "context" or "stdout" */
    int64_t context;
    struct generate_times times;
};

void generate_report_table(const struct generate_report *r, FILE *to);
void generate_report_json(const struct generate_report *r, FILE *to);

#endif
