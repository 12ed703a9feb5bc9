/* SPDX-License-Identifier: Apache-2.0 */
/* What `bench attend`, `extend` and `product` share: a rank with its threads, the roofs that it
 * measures between the runs, and the lines of the report. */
#ifndef DCP_CLI_BENCH_ATTEND_H
#define DCP_CLI_BENCH_ATTEND_H

#include <stdbool.h>

#include "cli/bench_attend_data.h"
#include "cli/bench_roof.h"
#include "cli/bench_turn.h"
#include "dcpattn/dcpattn.h"

enum { BENCH_MAX_LINES = 512, BENCH_MAX_ROUNDS = 1000 };

struct bench_span {
    double min_us, median_us;
};

/* One row of the report; the same on all ranks. */
struct bench_line {
    char name[16]; /* "gqa-decode", "mla-decode", "gqa-extend", "mla-extend", "product" */
    char dtype[8], isa[16], comm[8], kernel[64]; /* isa: the kernel's own level */
    int64_t keys, tokens;
    int ranks, threads;
    bool has_run;                /* false: only created */
    bool is_exact;               /* product: no rounding of the activations */
    int64_t n_iters, read_bytes; /* read_bytes: of all ranks */
    double flops;
    struct bench_span time, read;
    double matrix_GFLOPs;                   /* the roof in the same rounds, median */
    double best_GFLOPs;                     /* the same, best of them */
    double peak_GFLOPs;                     /* best seen of these ranks and threads */
    double gather_us, partial_us, merge_us; /* mean of the runs and the ranks */
    int64_t workspace_bytes, peak_extra_bytes, pss_growth_bytes; /* largest of the ranks */
    int64_t tile_rows, page_tokens;
    bool is_checked;    /* else the next two say nothing */
    double worst_error; /* largest error over what the tolerance is a share of */
    int64_t wrong;
};

/* In memory that the ranks and the process that prints share. */
struct bench_lines {
    int n, n_lost;
    double roof_GFLOPs[BENCH_ROOF_COUNT]; /* best seen; 0 = not there */
    int best_unit, cpus_usable;           /* usable before ranks were bound */
    double load_before;
    char pinning[96];
    struct bench_line line[BENCH_MAX_LINES];
};

/* A rank of a bench. */
struct bench_rank {
    dcp_group *g;
    int rank, n, n_threads;
    bool is_one_process;
    dcp_isa isa;
    dcp_pool *pool;
    int unit; /* of the roof */
    int64_t roof_steps;
    double roof_GFLOPs[BENCH_ROOF_COUNT];
    struct bench_turn *gathered; /* [n][BENCH_MAX_ROUNDS] */
    void *mask_before;           /* CPUs that the calling thread was allowed */
    int64_t iters;               /* -1: by seconds; 0: create only */
    double seconds;
    bool is_told; /* an error: all ranks know of it and it has been said */
};

/* Collective. Threads on CPUs of their own where there are enough, the best roof chosen. text as of
 * bench_pin. bench_rank_fini puts the calling thread back where it was allowed to run. */
dcp_status bench_rank_init(struct bench_rank *r, dcp_group *g, int n_threads, char *text,
                           size_t n_bytes);
void bench_rank_fini(struct bench_rank *r);

/* Collective: DCP_OK where every rank's own outcome is; else all ranks leave together, without
 * another's call to meet, and r->is_told. */
dcp_status bench_agree(struct bench_rank *r, dcp_status own);

/* Sorts times. */
struct bench_span bench_span_of(double *times, int64_t n);
/* Collective: largest, sum of the ranks. */
dcp_status bench_largest(struct bench_rank *r, int64_t *value);
dcp_status bench_sum(struct bench_rank *r, double *value);

/* Reading the stretches of memory that a contestant must read, with its threads. */
struct bench_stretch {
    const char *at;
    size_t n_bytes;
};
enum { BENCH_WAYS = 4 };
/* way: halves or pieces of about 1 MiB, with or without prefetch. */
void bench_read_stretches(struct bench_rank *r, const struct bench_stretch *s, int64_t n, int way);

/* What a run reads, several times over, so that each finds it in memory and not in a cache. */
struct bench_copies {
    struct bench_stretch *stretches; /* [n_copies][n_stretches] */
    int64_t n_stretches, n_copies, next;
};
/* The copy that has not been touched for longest. */
int64_t bench_next_copy(struct bench_copies *c);
/* The contestant; turn_out is this rank's. */
typedef dcp_status bench_turn_fn(void *ctx, struct bench_turn *turn_out);
/* Collective: rounds in which fn, the ways of reading the copies and the roof take turns, each of
 * them begun by all ranks together. Into line: n_iters (r->iters, or what fits r->seconds), time,
 * read (the best way) and matrix_GFLOPs of all ranks; a turn's time is as of bench_turn_times. */
dcp_status bench_compete(struct bench_rank *r, bench_turn_fn *fn, void *ctx,
                         struct bench_copies *copies, struct bench_line *line);

/* Memory of a creation and its first runs. */
struct bench_memory {
    int64_t pss, counted;
};
void bench_memory_begin(struct bench_memory *m);
/* Collective: into workspace-independent fields of line. */
dcp_status bench_memory_end(struct bench_rank *r, const struct bench_memory *m,
                            struct bench_line *line);

struct attend_case {
    struct attend_shape shape;
    dcp_dtype dtype;
    size_t workspace_limit_bytes, cold_bytes;
    dcp_merge_algo algo;
};
/* The kernel's name, "dcp__attn_i8__avx512", and the level in it: the CPU's highest may have none
 * for this type. NULL: left as it is. */
void bench_put_kernel(struct bench_line *line, const char *name);
/* Collective: fills line (name, keys, tokens, dtype are the caller's). */
dcp_status bench_attend_case(struct bench_rank *r, const struct attend_case *c,
                             struct bench_line *line);

struct product_case {
    int type; /* index in the table of bench_product.c */
    int64_t n_bytes, k;
    bool is_exact;
};
int bench_product_types(void);
const char *bench_product_type(int i);
dcp_status bench_product_case(struct bench_rank *r, const struct product_case *c,
                              struct bench_line *line);

#endif
