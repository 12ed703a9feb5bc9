/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes that leave every row as it is and put it elsewhere, or scale it: what compare_causes.h,
 * which looks at one row of the other result at a time, cannot recognise. */
#ifndef DCP_CLI_COMPARE_PLACE_H
#define DCP_CLI_COMPARE_PLACE_H

#include "cli/compare_causes.h"

/* Reads row (t, h) of the other result's out. */
typedef dcp_status compare_read_fn(void *ctx, int64_t t, int64_t h, float *to);

struct compare_shift {
    int64_t by;   /* row i is found at i + by; 0 = no such shift */
    bool rotates; /* what falls off at one end comes in at the other */
};

/* Is the other result the right one with its heads (or tokens) shifted? row is room for one [dim].
 * Rows that look alike unshifted say nothing: half of the sampled rows must fit only shifted. */
dcp_status compare_find_shift(const struct cause_rows *rows, bool of_heads, compare_read_fn *read,
                              void *ctx, float *row, struct compare_shift *out);

/* Is the other result the right one with a sink, the same for all tokens of a head, that this run
 * does not have? *sink_out is that of the first sampled row's head. Looks at the sampled rows. */
bool compare_finds_sink(const struct cause_rows *rows, int64_t *head_out, double *sink_out);

#endif
