/* SPDX-License-Identifier: Apache-2.0 */
/* The out-of-memory case that sharded attention in bounded memory exists for, one rank's part: the
 * published ways and the streaming operator under one cap. */
#ifndef DCP_CLI_BENCH_OOM_H
#define DCP_CLI_BENCH_OOM_H

#include <stdbool.h>

#include "cli/bench_attend_data.h"
#include "dcpattn/dcpattn.h"

enum oom_form {
    OOM_TEMPORARIES, /* gathered q, partial, and the merge with full-size f32 temporaries */
    OOM_IN_PLACE,    /* gathered q, partial, the merge that scales the partial in place */
    OOM_STREAMING,   /* dcp_attend_run */
    OOM_FORMS
};

struct oom_case {
    struct attend_shape shape;
    uint64_t cap_bytes; /* of each rank; 0 = none */
    size_t workspace_limit_bytes;
    int n_threads; /* of each rank */
};

/* Bytes of a rank by formula. */
struct oom_bytes {
    int64_t q, result, cache;                 /* what every form begins and ends with */
    int64_t gathered, partial, merge, attend; /* beyond it */
    int64_t total;
};
dcp_status oom_predict(const struct oom_case *c, enum oom_form form, int n_ranks, int rank,
                       struct oom_bytes *out);

/* What became of a form; largest of the ranks. */
struct oom_result {
    bool has_finished, has_run;
    int64_t peak_counted; /* bytes in use at the worst moment */
    int64_t pss_above;    /* PSS after the run over that before; -1 unknown */
    int64_t workspace_bytes;
    double seconds;
    int64_t wrong, n_checked;
    double worst_error;
    char why[384]; /* has_finished false: the step and the allocator's words */
};
/* In memory that ranks and the process that prints share. */
struct oom_report {
    struct oom_case c;
    int n_ranks;
    char cap_text[192]; /* how the cap holds */
    int64_t base_bytes; /* counted before the forms: q, result, cache */
    struct oom_result form[OOM_FORMS];
};

/* Collective. Forms one after the other; a form that lacks memory, on whatever rank, is a result,
 * not an error. *is_agreed_out: some rank cannot even begin; all know it, each returns its own
 * outcome, and the group goes on. */
dcp_status oom_run(dcp_group *g, const struct oom_case *c, struct oom_report *report,
                   bool *is_agreed_out);

/* A cgroup (version 2) of this process's own with memory.max = n_bytes, if one can be made: then
 * true, and text says where; else why not. oom_cgroup_leave undoes it. */
bool oom_cgroup_enter(uint64_t n_bytes, char *text, size_t text_bytes);
void oom_cgroup_leave(void);
/* Removes the cgroups in folder (NULL: this process's own) that oom_cgroup_enter made for processes
 * that were killed in them. Only empty ones of its names whose process is gone; entering does it
 * too. */
void oom_cgroup_sweep(const char *folder);

#endif
