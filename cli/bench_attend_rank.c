/* SPDX-License-Identifier: Apache-2.0 */
/* Rounds: every contestant and the roof take turns, beginning with another one each round, so that
 * what the machine does meanwhile hits all alike. All ranks begin a turn together and its time is
 * from the first rank's start to the last one's end (bench_turn.h). */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/cpu_priv.h"
#include "base/pool_priv.h"
#include "base/status_priv.h"
#include "cli/bench_attend.h"
#include "cli/bench_machine.h"
#include "cli/bench_read.h"
#include "cli/common.h"

enum { MIN_ROUNDS = 3, PIECE_BYTES = 1 << 20, ROOF_TURN_US = 2000, CALIBRATIONS = 25 };

static const int64_t long_round_ns = (int64_t)4000000000;

/* ---- CPUs ---- */

/* Rank r's threads on CPUs [r t, (r + 1) t) of the mask, where all ranks have as many. */
static dcp_status sit_down(struct bench_rank *r, char *text, size_t n_bytes)
{
    cpu_set_t *const mask = r->mask_before, own;
    CPU_ZERO(&own);
    const int64_t wanted = (int64_t)r->n * r->n_threads;
    if (sched_getaffinity(0, sizeof(*mask), mask) != 0) {
        dcp__free(mask);
        r->mask_before = NULL;
    }
    int64_t n_there = r->mask_before != NULL ? CPU_COUNT(mask) : 0;
    if (dcp__cpu_usable() < n_there) n_there = dcp__cpu_usable();
    int64_t is_short = n_there < wanted;
    DCP_TRY(bench_largest(r, &is_short));
    if (is_short != 0) {
        snprintf(text, n_bytes, "no: %d x %d threads, %lld usable CPUs", r->n, r->n_threads,
                 (long long)n_there);
        return DCP_OK;
    }
    int64_t at = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, mask)) continue;
        if (at / r->n_threads == r->rank) CPU_SET(cpu, &own);
        at++;
    }
    (void)sched_setaffinity(0, sizeof(own), &own); /* threads to come inherit it */
    snprintf(text, n_bytes, "%d CPU%s for each rank", r->n_threads, r->n_threads == 1 ? "" : "s");
    return DCP_OK;
}

/* All begin a turn together; at the second barrier all are awake, so that no wake-up is timed. */
static dcp_status meet(struct bench_rank *r)
{
    DCP_TRY(dcp_group_barrier(r->g));
    return dcp_group_barrier(r->g);
}

/* ---- the roof ---- */

struct roof_job {
    int unit;
    int64_t n_steps;
    double flops[64];
};

static void roof_item(void *ctx, int64_t item, int thread)
{
    struct roof_job *job = ctx;
    (void)item;
    job->flops[thread & 63] = bench_roof_run(job->unit, job->n_steps);
}

/* All threads busy once; an item for each, as all of them wait spinning for it. */
static double roof_turn(struct bench_rank *r, int unit, int64_t n_steps,
                        struct bench_turn *turn_out)
{
    struct roof_job job = {.unit = unit, .n_steps = n_steps};
    turn_out->begin = dcp__now_ns();
    dcp__pool_run(r->pool, r->n_threads, roof_item, &job);
    turn_out->end = dcp__now_ns();
    double flops = 0.0;
    for (int i = 0; i < 64; i++) flops = job.flops[i] > flops ? job.flops[i] : flops;
    return flops * r->n_threads;
}

static dcp_status choose_roof(struct bench_rank *r)
{
    double best = 0.0;
    for (int unit = 0; unit < BENCH_ROOF_COUNT; unit++) {
        /* The plain loop stands in where there is nothing else. */
        if (!bench_roof_exists(unit) || (unit == BENCH_ROOF_PLAIN && best > 0.0)) continue;
        struct bench_turn t;
        (void)roof_turn(r, unit, 16, &t); /* warm */
        (void)roof_turn(r, unit, 200, &t);
        const double us = (double)(t.end - t.begin) * 1e-3;
        const int64_t n_steps = (int64_t)(200.0 * ROOF_TURN_US / (us + 1.0)) + 1;
        int64_t steps = n_steps;
        DCP_TRY(bench_largest(r, &steps));
        for (int i = 0; i < CALIBRATIONS; i++) {
            DCP_TRY(meet(r));
            double all_us, flops = roof_turn(r, unit, steps, &t);
            DCP_TRY(bench_turn_times(r->g, &t, 1, r->gathered, &all_us));
            DCP_TRY(bench_sum(r, &flops));
            const double GFLOPs = flops / all_us * 1e-3;
            if (GFLOPs > r->roof_GFLOPs[unit]) r->roof_GFLOPs[unit] = GFLOPs;
        }
        if (r->roof_GFLOPs[unit] <= best) continue;
        best = r->roof_GFLOPs[unit];
        r->unit = unit;
        r->roof_steps = steps;
    }
    return DCP_OK;
}

dcp_status bench_agree(struct bench_rank *r, dcp_status own)
{
    if (all_ranks_ok(r->g, own)) return DCP_OK;
    r->is_told = true;
    return own != DCP_OK ? own : DCP_ERR_PEER;
}

dcp_status bench_rank_init(struct bench_rank *r, dcp_group *g, int n_threads, char *text,
                           size_t n_bytes)
{
    r->g = g;
    r->rank = dcp_group_rank(g);
    r->n = dcp_group_size(g);
    r->is_one_process = strcmp(dcp_group_kind(g), "threads") == 0;
    int n_host = 0;
    for (int i = 0; i < r->n; i++) n_host += dcp_group_host(g, i) == dcp_group_host(g, r->rank);
    if (n_threads == 0) n_threads = dcp__cpu_usable() / n_host;
    r->n_threads = n_threads < 1 ? 1 : n_threads > 64 ? 64 : n_threads;
    void *mem = NULL;
    dcp_status st =
        dcp__alloc_array((size_t)r->n * BENCH_MAX_ROUNDS, sizeof(*r->gathered), "times", &mem);
    r->gathered = mem;
    if (st == DCP_OK) st = dcp__alloc(sizeof(cpu_set_t), "CPUs", &r->mask_before);
    if (st == DCP_OK) st = dcp__isa_choose(DCP_ISA_DEFAULT, &r->isa);
    DCP_TRY(bench_agree(r, st));
    DCP_TRY(sit_down(r, text, n_bytes));
    DCP_TRY(bench_agree(r, dcp_pool_create(r->n_threads, n_host, &r->pool)));
    return choose_roof(r);
}

void bench_rank_fini(struct bench_rank *r)
{
    dcp_pool_destroy(r->pool);
    dcp__free(r->gathered);
    if (r->mask_before != NULL)
        (void)sched_setaffinity(0, sizeof(cpu_set_t), (const cpu_set_t *)r->mask_before);
    dcp__free(r->mask_before);
    r->mask_before = NULL;
    r->pool = NULL;
    r->gathered = NULL;
}

/* ---- numbers of all ranks ---- */

dcp_status bench_largest(struct bench_rank *r, int64_t *value)
{
    int64_t *all = (int64_t *)(void *)r->gathered;
    DCP_TRY(dcp_group_allgather(r->g, value, sizeof(*value), all));
    for (int i = 0; i < r->n; i++) {
        if (all[i] > *value) *value = all[i];
    }
    return DCP_OK;
}

dcp_status bench_sum(struct bench_rank *r, double *value)
{
    double *all = (double *)(void *)r->gathered;
    DCP_TRY(dcp_group_allgather(r->g, value, sizeof(*value), all));
    *value = 0.0;
    for (int i = 0; i < r->n; i++) *value += all[i];
    return DCP_OK;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct bench_span bench_span_of(double *times, int64_t n)
{
    if (n == 0) return (struct bench_span){0.0, 0.0};
    qsort(times, (size_t)n, sizeof(double), compare_doubles);
    const int64_t mid = n / 2;
    return (struct bench_span){times[0],
                               n % 2 == 1 ? times[mid] : 0.5 * (times[mid - 1] + times[mid])};
}

/* ---- rounds ---- */

enum { N_TURNS = 1 + BENCH_WAYS, ROOF = N_TURNS, N_TIMES };

struct contest {
    struct bench_rank *r;
    bench_turn_fn *fn;
    void *ctx;
    struct bench_copies *copies;
    struct bench_turn *turns[N_TIMES]; /* the contestant's, each way's of reading, the roof's */
    double *us;                        /* [BENCH_MAX_ROUNDS] of all ranks */
};

int64_t bench_next_copy(struct bench_copies *c)
{
    return c->next++ % c->n_copies;
}

static void read_turn(struct contest *c, int way, struct bench_turn *turn_out)
{
    const struct bench_copies *const copies = c->copies;
    const struct bench_stretch *s =
        copies->stretches + bench_next_copy(c->copies) * copies->n_stretches;
    turn_out->begin = dcp__now_ns();
    bench_read_stretches(c->r, s, copies->n_stretches, way);
    turn_out->end = dcp__now_ns();
}

static dcp_status one_round(struct contest *c, int64_t i)
{
    for (int turn = 0; turn < N_TIMES; turn++) {
        const int who = (int)((turn + i) % N_TIMES);
        struct bench_turn *const t = &c->turns[who][i];
        DCP_TRY(meet(c->r));
        if (who == 0)
            DCP_TRY(c->fn(c->ctx, t));
        else if (who < N_TURNS)
            read_turn(c, who - 1, t);
        else
            (void)roof_turn(c->r, c->r->unit, c->r->roof_steps, t);
    }
    return DCP_OK;
}

static dcp_status span_of_turns(struct contest *c, int who, int64_t n, struct bench_span *out)
{
    DCP_TRY(bench_turn_times(c->r->g, c->turns[who], n, c->r->gathered, c->us));
    *out = bench_span_of(c->us, n);
    return DCP_OK;
}

static dcp_status run_rounds(struct contest *c, struct bench_line *line)
{
    struct bench_rank *const r = c->r;
    int64_t n = r->iters, done = 0;
    if (n < 0) {
        const int64_t t0 = dcp__now_ns();
        DCP_TRY(one_round(c, 0));
        int64_t ns = dcp__now_ns() - t0 + 1;
        DCP_TRY(bench_largest(r, &ns));
        const double fit = r->seconds * 1e9 / (double)ns;
        n = fit > BENCH_MAX_ROUNDS ? BENCH_MAX_ROUNDS : (int64_t)fit;
        /* Calls of many seconds say enough in two rounds. */
        const int64_t least = ns > long_round_ns ? 2 : MIN_ROUNDS;
        if (n < least) n = least;
        /* A first round of many is a warm-up; of few it counts. */
        done = n > 2 * MIN_ROUNDS ? 0 : 1;
    }
    for (int64_t i = done; i < n; i++) DCP_TRY(one_round(c, i));
    struct bench_turn unused;
    struct bench_span t;
    double flops = roof_turn(r, r->unit, r->roof_steps, &unused);
    DCP_TRY(bench_sum(r, &flops));
    DCP_TRY(span_of_turns(c, ROOF, n, &t));
    line->matrix_GFLOPs = flops / t.median_us * 1e-3;
    line->best_GFLOPs = flops / t.min_us * 1e-3;
    double *const peak = &r->roof_GFLOPs[r->unit];
    if (*peak < line->best_GFLOPs) *peak = line->best_GFLOPs;
    line->peak_GFLOPs = *peak;
    line->n_iters = n;
    DCP_TRY(span_of_turns(c, 0, n, &line->time));
    for (int way = 0; way < BENCH_WAYS; way++) {
        DCP_TRY(span_of_turns(c, 1 + way, n, &t));
        if (way == 0 || t.median_us < line->read.median_us) line->read = t;
    }
    return DCP_OK;
}

dcp_status bench_compete(struct bench_rank *r, bench_turn_fn *fn, void *ctx,
                         struct bench_copies *copies, struct bench_line *line)
{
    struct contest c = {.r = r, .fn = fn, .ctx = ctx, .copies = copies};
    void *mem = NULL;
    DCP_TRY(bench_agree(r, dcp__alloc_array((size_t)N_TIMES * BENCH_MAX_ROUNDS,
                                            sizeof(struct bench_turn) + sizeof(double), "times",
                                            &mem)));
    for (int k = 0; k < N_TIMES; k++)
        c.turns[k] = (struct bench_turn *)mem + (size_t)k * BENCH_MAX_ROUNDS;
    c.us = (double *)(void *)(c.turns[N_TIMES - 1] + BENCH_MAX_ROUNDS);
    const dcp_status st = run_rounds(&c, line);
    dcp__free(mem);
    return st;
}

/* ---- reading ---- */

struct read_job {
    const struct bench_stretch *s;
    int64_t n, per_item;
    bool does_prefetch;
};

static void read_item(void *ctx, int64_t item, int thread)
{
    const struct read_job *job = ctx;
    (void)thread;
    const int64_t end = (item + 1) * job->per_item < job->n ? (item + 1) * job->per_item : job->n;
    for (int64_t i = item * job->per_item; i < end; i++) {
        const struct bench_region region = {&job->s[i].at, 1, 1, 1, job->s[i].n_bytes, 0};
        bench_read(&region, job->does_prefetch ? BENCH_READ_PARTS_PREFETCH : BENCH_READ_PARTS);
    }
}

void bench_read_stretches(struct bench_rank *r, const struct bench_stretch *s, int64_t n, int way)
{
    if (n == 0) return;
    const size_t one = s[0].n_bytes > 0 ? s[0].n_bytes : 1;
    int64_t per_item = (n + r->n_threads - 1) / r->n_threads;
    if (way / 2 == 1 && (int64_t)(PIECE_BYTES / one) + 1 < per_item)
        per_item = (int64_t)(PIECE_BYTES / one) + 1;
    struct read_job job = {s, n, per_item, way % 2 == 1};
    dcp__pool_run(r->pool, (n + per_item - 1) / per_item, read_item, &job);
}

/* ---- memory ---- */

void bench_memory_begin(struct bench_memory *m)
{
    m->pss = bench_pss_bytes();
    m->counted = (int64_t)dcp__alloc_current();
    dcp__alloc_reset_peak();
}

dcp_status bench_memory_end(struct bench_rank *r, const struct bench_memory *m,
                            struct bench_line *line)
{
    const int64_t share = r->is_one_process ? r->n : 1, pss = bench_pss_bytes();
    line->peak_extra_bytes = ((int64_t)dcp__alloc_peak() - m->counted) / share;
    line->pss_growth_bytes = m->pss < 0 || pss < 0 ? -1 : pss > m->pss ? (pss - m->pss) / share : 0;
    DCP_TRY(bench_largest(r, &line->peak_extra_bytes));
    return bench_largest(r, &line->pss_growth_bytes);
}
