/* SPDX-License-Identifier: Apache-2.0 */
/* A round writes the partials before each contestant's turn, so that none reads what another left
 * in its caches; contestants begin in another order each round, so that noise hits all alike. */
#include "cli/bench_merge.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/status_priv.h"
#include "cli/bench_data.h"
#include "cli/bench_machine.h"
#include "cli/bench_read.h"
#include "cli/bench_turn.h"
#include "cli/common.h"
#include "group/group_priv.h"

enum { MAX_ROUNDS = 2000, MIN_ROUNDS = 5, CHECKED_ROWS = 64 };
/* From here on contestants run one after the other, each with reads of its own: their workspaces
 * would not fit side by side. */
static const int64_t side_by_side_bytes = (int64_t)2 << 30;

struct contestant {
    struct bench_row row;
    dcp_merge *merge;
    struct bench_turn *turns; /* [MAX_ROUNDS] of this rank */
};

struct bench {
    dcp_group *g;
    const struct bench_case *c;
    int rank, n;
    bool is_one_process;
    struct bench_data data;
    size_t elem, partial_bytes;
    void *out;
    float *lse;
    void *merged; /* contiguous result */
    float *merged_lse;
    dcp_range own_t, own_h;
    const char **parts; /* [n] start of what this rank reads of each partial */
    struct bench_region region;
    struct contestant all[BENCH_MAX_ALGOS];
    int n_all;
    struct bench_turn *read_turns[BENCH_READ_COUNT];
    struct bench_turn *gathered; /* [n][MAX_ROUNDS] */
    double *times;               /* [MAX_ROUNDS] of all ranks */
    int64_t n_rounds;
};

bool bench_is_published(dcp_merge_algo algo)
{
    return strncmp(dcp_merge_algo_name(algo), "allreduce", 9) == 0;
}

/* ---- memory ---- */

/* Where this rank reads: its own rows of every partial; of partials that it cannot see, as many
 * bytes of its own. */
static dcp_status find_parts(struct bench *b)
{
    const size_t begin = ((size_t)b->own_t.begin * (size_t)b->c->n_heads + (size_t)b->own_h.begin) *
                         (size_t)b->c->dim * b->elem;
    const bool is_threads = strcmp(dcp_group_kind(b->g), "threads") == 0;
    const char *own = b->out;
    if (is_threads) {
        DCP_TRY(dcp_group_allgather(b->g, &own, sizeof(own), b->parts));
    } else {
        uint32_t id = 0;
        uint64_t offset = 0;
        const bool is_seen = dcp__group_locate(b->g, own, b->partial_bytes, &id, &offset);
        for (int r = 0; r < b->n; r++) {
            const char *at = r == b->rank || !is_seen
                                 ? own
                                 : dcp__group_peer_ptr(b->g, r, id, offset, b->partial_bytes);
            b->parts[r] = at != NULL ? at : own;
        }
    }
    for (int r = 0; r < b->n; r++) b->parts[r] += begin;
    const size_t row_bytes = (size_t)b->c->dim * b->elem;
    b->region = (struct bench_region){b->parts,
                                      b->n,
                                      b->own_t.end - b->own_t.begin,
                                      b->own_h.end - b->own_h.begin,
                                      row_bytes,
                                      row_bytes * (size_t)b->c->n_heads};
    return DCP_OK;
}

/* What a rank has to itself. */
static dcp_status take_local(struct bench *b)
{
    const struct bench_case *c = b->c;
    const size_t n_own =
        (size_t)((b->own_t.end - b->own_t.begin) * (b->own_h.end - b->own_h.begin));
    void *mem = NULL;
    if (!c->in_place)
        DCP_TRY(dcp__alloc_array(n_own, (size_t)c->dim * b->elem, "merged result", &b->merged));
    DCP_TRY(dcp__alloc_array(n_own, sizeof(float), "merged lse", &mem));
    b->merged_lse = mem;
    DCP_TRY(dcp__alloc_array((size_t)b->n, sizeof(void *), "places of partials", &mem));
    b->parts = mem;
    DCP_TRY(dcp__alloc_array((size_t)b->n * MAX_ROUNDS, sizeof(*b->gathered), "times", &mem));
    b->gathered = mem;
    DCP_TRY(dcp__alloc_array(MAX_ROUNDS, sizeof(double), "times", &mem));
    b->times = mem;
    for (int i = 0; i < b->n_all + BENCH_READ_COUNT; i++) {
        DCP_TRY(dcp__alloc_array(MAX_ROUNDS, sizeof(struct bench_turn), "times", &mem));
        if (i < b->n_all)
            b->all[i].turns = mem;
        else
            b->read_turns[i - b->n_all] = mem;
    }
    DCP_TRY(bench_data_init(&b->data, c->dtype, c->n_tokens, c->n_heads, c->dim));
    if (b->merged != NULL) memset(b->merged, 1, n_own * (size_t)c->dim * b->elem); /* touch */
    return DCP_OK;
}

static dcp_status take_memory(struct bench *b, bool *is_told)
{
    const struct bench_case *c = b->c;
    const size_t n_rows = (size_t)(c->n_tokens * c->n_heads);
    b->elem = dcp_dtype_bytes(c->dtype);
    b->partial_bytes = n_rows * (size_t)c->dim * b->elem;
    b->own_t = (dcp_range){0, c->n_tokens};
    b->own_h = (dcp_range){0, c->n_heads};
    if (c->cut == DCP_CUT_TOKENS) b->own_t = dcp_cut_range(c->n_tokens, b->n, b->rank);
    if (c->cut == DCP_CUT_HEADS) b->own_h = dcp_cut_range(c->n_heads, b->n, b->rank);
    DCP_TRY(dcp_group_alloc(b->g, b->partial_bytes, &b->out));
    void *mem = NULL;
    DCP_TRY(dcp_group_alloc(b->g, n_rows * sizeof(float), &mem));
    b->lse = mem;
    /* All go on or none does: a rank that left alone would meet the others' next call with
     * another. */
    const dcp_status own = take_local(b);
    *is_told = !all_ranks_ok(b->g, own);
    if (*is_told) return own != DCP_OK ? own : DCP_ERR_PEER;
    return find_parts(b);
}

static void give_back(struct bench *b)
{
    bench_data_fini(&b->data);
    for (int i = 0; i < BENCH_READ_COUNT; i++) dcp__free(b->read_turns[i]);
    for (int i = 0; i < b->n_all; i++) {
        dcp_merge_destroy(b->all[i].merge);
        dcp__free(b->all[i].turns);
    }
    dcp__free(b->times);
    dcp__free(b->gathered);
    dcp__free(b->merged_lse);
    dcp__free(b->merged);
    dcp__free(b->parts);
    dcp_group_free(b->g, b->lse);
    dcp_group_free(b->g, b->out);
}

/* ---- one timed call ---- */

static dcp_status write_and_meet(struct bench *b)
{
    bench_data_write(&b->data, b->rank, b->out, b->lse);
    /* Who writes faster falls asleep at the first; at the second all are awake, so that no wake-up
     * is timed as part of a call. */
    DCP_TRY(dcp_group_barrier(b->g));
    return dcp_group_barrier(b->g);
}

static void fill_args(const struct bench *b, dcp_merge_args *a)
{
    const struct bench_case *c = b->c;
    a->n_tokens = c->n_tokens;
    a->out = b->out;
    a->lse = b->lse;
    a->merged = b->merged;
    if (c->in_place) {
        a->merged_token_stride = c->n_heads * c->dim;
        a->merged_head_stride = c->dim;
        a->merged = (char *)b->out + (size_t)(b->own_t.begin * a->merged_token_stride +
                                              b->own_h.begin * a->merged_head_stride) *
                                         b->elem;
    }
    a->merged_lse = b->merged_lse;
}

static dcp_status time_merge(struct bench *b, struct contestant *k, struct bench_turn *turn_out)
{
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    fill_args(b, &args);
    DCP_TRY(write_and_meet(b));
    turn_out->begin = dcp__now_ns();
    DCP_TRY(dcp_merge_run(k->merge, &args, NULL));
    turn_out->end = dcp__now_ns();
    return DCP_OK;
}

static dcp_status time_read(struct bench *b, int way, struct bench_turn *turn_out)
{
    DCP_TRY(write_and_meet(b));
    turn_out->begin = dcp__now_ns();
    bench_read(&b->region, way);
    turn_out->end = dcp__now_ns();
    return DCP_OK;
}

static void check_result(struct bench *b, struct contestant *k)
{
    const struct bench_case *c = b->c;
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    fill_args(b, &args);
    const int64_t width = b->own_h.end - b->own_h.begin;
    const struct bench_result res = {
        args.merged,  c->in_place ? c->n_heads * c->dim : width * c->dim,
        c->dim,       b->merged_lse,
        width,        b->own_t.begin,
        b->own_t.end, b->own_h.begin,
        b->own_h.end};
    k->row.wrong += bench_data_wrong(&b->data, b->n, &res, CHECKED_ROWS);
}

/* ---- creation, with what it and the first runs take ---- */

static dcp_status largest(dcp_group *g, int64_t *value)
{
    const int n = dcp_group_size(g);
    void *mem = NULL;
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(int64_t), "values of ranks", &mem));
    int64_t *all = mem;
    const dcp_status st = dcp_group_allgather(g, value, sizeof(*value), all);
    for (int r = 0; st == DCP_OK && r < n; r++) {
        if (all[r] > *value) *value = all[r];
    }
    dcp__free(mem);
    return st;
}

static int64_t growth(int64_t before, int64_t after)
{
    return before < 0 || after < 0 ? -1 : after > before ? after - before : 0;
}

static dcp_status create_merge(struct bench *b, struct contestant *k)
{
    const struct bench_case *c = b->c;
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = c->n_tokens;
    desc.n_heads = c->n_heads;
    desc.dim = c->dim;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.cut = c->cut;
    desc.out_type = c->dtype;
    desc.algo = k->row.algo;
    /* The published form is what the others are compared with, whatever they are asked for. */
    if (!k->row.is_published) desc.order = c->order;
    if (k->row.algo == DCP_MERGE_ALLTOALL) desc.wire_type = c->wire;
    desc.workspace_limit_bytes = c->workspace_limit_bytes;
    return dcp_merge_create(b->g, &desc, &k->merge);
}

/* Creates and, if runs are wanted, runs twice. Memory is measured here: in a process of several
 * ranks for all of them, then divided. */
static dcp_status prepare(struct bench *b, struct contestant *k)
{
    const int64_t share = b->is_one_process ? b->n : 1;
    DCP_TRY(write_and_meet(b));
    const int64_t pss = bench_pss_bytes();
    const int64_t resident = bench_resident_mark();
    const int64_t counted = (int64_t)dcp__alloc_current();
    dcp__alloc_reset_peak();
    DCP_TRY(dcp_group_barrier(b->g));
    DCP_TRY(create_merge(b, k));
    dcp_merge_info info;
    dcp_merge_get_info(k->merge, &info);
    k->row.workspace_bytes = (int64_t)info.workspace_bytes;
    k->row.order = info.order;
    for (int i = 0; i < 2 && b->c->iters != 0; i++) {
        struct bench_turn unused;
        DCP_TRY(time_merge(b, k, &unused));
    }
    k->row.has_run = b->c->iters != 0;
    k->row.peak_extra_bytes = ((int64_t)dcp__alloc_peak() - counted) / share;
    k->row.pss_growth_bytes = growth(pss, bench_pss_bytes());
    k->row.resident_growth_bytes = growth(resident, bench_resident_peak());
    if (k->row.pss_growth_bytes > 0) k->row.pss_growth_bytes /= share;
    if (k->row.resident_growth_bytes > 0) k->row.resident_growth_bytes /= share;
    if (k->row.has_run) check_result(b, k);
    return dcp_group_barrier(b->g);
}

/* An algorithm that this group or build does not have is left out, on all ranks alike. */
static dcp_status prepare_or_skip(struct bench *b, struct contestant *k, struct bench_report *rep)
{
    const dcp_status st = prepare(b, k);
    if (st == DCP_OK || k->merge != NULL ||
        (st != DCP_ERR_NOT_SUPPORTED && st != DCP_ERR_ARG && st != DCP_ERR_NOMEM))
        return st;
    char why[256];
    dcp__brief(why, sizeof(why), dcp_last_error());
    why[strcspn(why, ";")] = '\0'; /* without the advice */
    const size_t used = strlen(rep->skipped);
    (void)snprintf(rep->skipped + used, sizeof(rep->skipped) - used, "%s%s (%s)",
                   used > 0 ? "; " : "", dcp_merge_algo_name(k->row.algo), why);
    return DCP_OK;
}

/* ---- rounds ---- */

static dcp_status one_round(struct bench *b, int first, int n, int64_t i)
{
    const int n_turns = n + BENCH_READ_COUNT;
    for (int turn = 0; turn < n_turns; turn++) {
        const int who = (int)((turn + i) % n_turns);
        if (who >= n) {
            DCP_TRY(time_read(b, who - n, &b->read_turns[who - n][i]));
            continue;
        }
        struct contestant *k = &b->all[first + who];
        if (k->merge != NULL) DCP_TRY(time_merge(b, k, &k->turns[i]));
    }
    return DCP_OK;
}

/* Rounds until the time is used up, the same number on all ranks. */
static dcp_status run_rounds(struct bench *b, int first, int n, double seconds)
{
    int64_t n_rounds = b->c->iters;
    b->n_rounds = 0;
    const int64_t start = dcp__now_ns();
    if (n_rounds < 0) {
        DCP_TRY(one_round(b, first, n, 0));
        int64_t ns = dcp__now_ns() - start;
        DCP_TRY(largest(b->g, &ns));
        const double fit = seconds * 1e9 / (double)(ns + 1);
        n_rounds = fit > MAX_ROUNDS ? MAX_ROUNDS : (int64_t)fit;
        if (n_rounds < MIN_ROUNDS) n_rounds = MIN_ROUNDS;
    }
    for (int64_t i = 0; i < n_rounds; i++) DCP_TRY(one_round(b, first, n, i));
    b->n_rounds = n_rounds;
    for (int k = first; k < first + n && n_rounds > 0; k++) {
        struct bench_turn unused;
        if (b->all[k].merge == NULL) continue;
        DCP_TRY(time_merge(b, &b->all[k], &unused));
        check_result(b, &b->all[k]);
        DCP_TRY(dcp_group_barrier(b->g));
    }
    return DCP_OK;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

/* Of each round the time of all ranks together; of these the least and the median. */
static dcp_status summarise(struct bench *b, struct bench_turn *turns, struct bench_times *out)
{
    const size_t n = (size_t)b->n_rounds;
    double *const times = b->times;
    DCP_TRY(bench_turn_times(b->g, turns, b->n_rounds, b->gathered, times));
    qsort(times, n, sizeof(double), compare_doubles);
    out->min_us = times[0];
    out->median_us = n % 2 == 1 ? times[n / 2] : 0.5 * (times[n / 2 - 1] + times[n / 2]);
    return DCP_OK;
}

static dcp_status summarise_reads(struct bench *b, struct bench_report *rep)
{
    for (int way = 0; way < BENCH_READ_COUNT; way++) {
        struct bench_times t;
        DCP_TRY(summarise(b, b->read_turns[way], &t));
        if (rep->has_read && t.median_us >= rep->read.median_us) continue;
        rep->read = t;
        rep->read_name = bench_read_name(way);
        rep->has_read = true;
    }
    return DCP_OK;
}

/* Contestants [first, first + n): create, run, forget. */
static dcp_status run_set(struct bench *b, int first, int n, double seconds,
                          struct bench_report *rep)
{
    for (int k = first; k < first + n; k++) DCP_TRY(prepare_or_skip(b, &b->all[k], rep));
    if (b->c->iters != 0) {
        DCP_TRY(run_rounds(b, first, n, seconds));
        rep->n_iters = b->n_rounds;
        for (int k = first; k < first + n; k++) {
            if (b->all[k].merge != NULL)
                DCP_TRY(summarise(b, b->all[k].turns, &b->all[k].row.time));
        }
        DCP_TRY(summarise_reads(b, rep));
    }
    for (int k = first; k < first + n; k++) {
        struct bench_row *row = &b->all[k].row;
        if (b->all[k].merge == NULL) continue;
        DCP_TRY(largest(b->g, &row->workspace_bytes));
        DCP_TRY(largest(b->g, &row->peak_extra_bytes));
        DCP_TRY(largest(b->g, &row->pss_growth_bytes));
        DCP_TRY(largest(b->g, &row->resident_growth_bytes));
        int64_t *all = (int64_t *)(void *)b->gathered; /* [n] */
        DCP_TRY(dcp_group_allgather(b->g, &row->wrong, sizeof(row->wrong), all));
        row->wrong = 0;
        for (int r = 0; r < b->n; r++) row->wrong += all[r];
        rep->rows[rep->n_rows++] = *row;
        dcp_merge_destroy(b->all[k].merge);
        b->all[k].merge = NULL;
    }
    return DCP_OK;
}

static dcp_status run_all(struct bench *b, struct bench_report *rep)
{
    DCP_TRY(take_memory(b, &rep->is_told));
    rep->partial_bytes = (int64_t)b->partial_bytes;
    rep->read_bytes = b->c->cut == DCP_CUT_NONE ? (int64_t)b->partial_bytes * b->n * b->n
                                                : (int64_t)b->partial_bytes * b->n;
    if ((int64_t)b->partial_bytes * b->n < side_by_side_bytes)
        return run_set(b, 0, b->n_all, b->c->seconds, rep);
    for (int k = 0; k < b->n_all; k++) DCP_TRY(run_set(b, k, 1, b->c->seconds / b->n_all, rep));
    return DCP_OK;
}

dcp_status bench_merge_case(dcp_group *g, const struct bench_case *c, struct bench_report *out)
{
    memset(out, 0, sizeof(*out));
    void *mem = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct bench), "bench", &mem));
    struct bench *b = mem;
    b->g = g;
    b->c = c;
    b->rank = dcp_group_rank(g);
    b->n = dcp_group_size(g);
    b->is_one_process = strcmp(dcp_group_kind(g), "threads") == 0;
    for (int a = 1; a < BENCH_MAX_ALGOS; a++) {
        if (!c->wanted[a]) continue;
        b->all[b->n_all].row.algo = (dcp_merge_algo)a;
        b->all[b->n_all].row.is_published = bench_is_published((dcp_merge_algo)a);
        b->n_all++;
    }
    const dcp_status st = run_all(b, out);
    give_back(b);
    dcp__free(b);
    return st;
}
