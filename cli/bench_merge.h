/* SPDX-License-Identifier: Apache-2.0 */
/* One shape of `bench merge`: all algorithms and the plain read take turns on the same memory. */
#ifndef DCP_CLI_BENCH_MERGE_H
#define DCP_CLI_BENCH_MERGE_H

#include <stdbool.h>

#include "dcpattn/dcpattn.h"

enum { BENCH_MAX_ALGOS = 16 };

struct bench_times {
    double min_us, median_us;
};

/* What was measured of one algorithm; the same on all ranks. */
struct bench_row {
    dcp_merge_algo algo;
    bool is_published; /* a form of the published merge: what the others are compared with */
    bool has_run;      /* false: only created (iters = 0) */
    const char *order; /* in which it sums */
    struct bench_times time;
    int64_t workspace_bytes, peak_extra_bytes; /* largest of the ranks */
    int64_t pss_growth_bytes, resident_growth_bytes;
    int64_t wrong;
};

struct bench_case {
    int64_t n_tokens, n_heads, dim;
    dcp_dtype dtype;
    dcp_dtype wire; /* of what alltoall sends; DCP_DTYPE_DEFAULT = dtype */
    dcp_merge_order order;
    dcp_cut cut;
    bool in_place;
    size_t workspace_limit_bytes;
    int64_t iters;  /* -1: as many as fit seconds; 0: create only */
    double seconds; /* for the whole shape */
    bool wanted[BENCH_MAX_ALGOS];
};

struct bench_report {
    int n_rows;
    struct bench_row rows[BENCH_MAX_ALGOS];
    int64_t n_iters;
    bool has_read;
    struct bench_times read;
    const char *read_name;
    int64_t read_bytes;    /* of all ranks together */
    int64_t partial_bytes; /* payload of one rank's partial */
    char skipped[2048];    /* "hierarchical: why; ..." */
    bool is_told;          /* an error: all ranks know of it and it has been said */
};

/* True for an algorithm that stands for the published merge. */
bool bench_is_published(dcp_merge_algo algo);

/* Collective. An iteration: every rank writes its partial anew, all meet, then the timed call; its
 * time is from the first rank's start to the last one's end (bench_turn.h). */
dcp_status bench_merge_case(dcp_group *g, const struct bench_case *c, struct bench_report *out);

#endif
