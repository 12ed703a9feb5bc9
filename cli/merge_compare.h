/* SPDX-License-Identifier: Apache-2.0 */
/* merge --compare: a result that came from elsewhere against the one of this run. Says where they
 * differ most, by how much, which weights the ranks have there, and which usual mistake would give
 * the other file's numbers. What may differ is measured by this run's numbers: a wild value in the
 * other file must not hide its neighbours. */
#ifndef DCP_CLI_MERGE_COMPARE_H
#define DCP_CLI_MERGE_COMPARE_H

#include <stdbool.h>
#include <stdio.h>

#include "cli/json_out.h"
#include "dcpattn/dcpattn.h"

struct compare_input {
    const char *path;   /* the other result: out [T,H,D], optional lse [T,H] */
    double rtol, atol;  /* < 0: of the types */
    char *const *files; /* the partials, one per rank */
    const float *sink;  /* [H] or NULL */
    dcp_lse_base base;
    dcp_cut cut;
    int64_t n_tokens, n_heads, dim;
    dcp_dtype dtype;    /* of merged */
    dcp_dtype wire;     /* what partials were rounded to on their way; dtype where nothing was */
    const void *merged; /* this rank's part, contiguous */
    const float *merged_lse;
};

enum { COMPARE_MAX_GUESSES = 6, COMPARE_MAX_WEIGHTS = 64, COMPARE_TEXT_BYTES = 200 };

struct compare_place {
    int64_t t, h, d;
    double here, there, error, allowed, ulps; /* error is inf or NaN if one of both is no number */
};

struct compare_report {
    bool is_within;
    const char *path;
    double rtol, atol; /* atol < 0: rtol times the largest value of the row */
    dcp_dtype type;    /* the coarser of both results: ULPs are of it */
    int64_t n_beyond, n_lse_beyond;
    int64_t
        n_nonfinite; /* of both: NaN or infinite in one result alone, or infinities of both signs */
    bool has_lse;    /* the other file has LSEs */
    struct compare_place out, lse; /* the worst */
    int n_weights;                 /* of the worst row, (weights_t, weights_h); on rank 0 */
    int64_t weights_t, weights_h;
    double weights[COMPARE_MAX_WEIGHTS], lses[COMPARE_MAX_WEIGHTS];
    int n_guesses; /* on rank 0 */
    char guesses[COMPARE_MAX_GUESSES][COMPARE_TEXT_BYTES];
};

/* Collective. An exit code: EXIT_DONE also where the results differ (see is_within); EXIT_FAILED
 * if the comparison could not be made, and why has been told. */
int merge_compare(dcp_group *g, const struct compare_input *in, struct compare_report *out);

void compare_print(const struct compare_report *r, FILE *to);
void compare_json(const struct compare_report *r, struct json_out *j, const char *key);

#endif
