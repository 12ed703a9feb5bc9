/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and values on their way to L2, at the pace at which tiles use them. Part of attn_many_amx.c.
 *
 * Idea. Memory answers after 170 ns (a chain of loads). A prefetch that waits for it holds one
 * of the 16 places for lines on their way into L1, and tile loads from L2 want those places; so
 * what matters is how many prefetches the hardware's own prefetcher has been before, not how
 * many there are. It follows ascending lines, up to 20 ahead, and starts anew in each page of 4
 * KiB, where some ten lines come late. Where rows lie one after the other over many pages, a
 * run, a line of each of eight pages is fetched in turn: pages begin one by one, and a page's
 * next line has eight times as long to come.
 *
 *     page 0  |================>....     page s is 8 s lines behind page 0. One that is at its
 *     page 1  |==============>......     end goes on with the page eight further on. Before its
 *     page 2  |============>........     first turn and after its last one it gets lines of the
 *      ...                               same page again: nothing outside the run is read.
 *     page 7  |==>..................
 *
 * Cost: of a run 448 lines and up to 16 rows at its end are asked for twice, and its first page is
 * fetched whole: a tenth more of the shortest run, 2% of 2,048 keys of MLA. No scratch.
 *
 * Measured (an AMX server, one thread, bench_attn, absorbed MLA of 96 heads, 4,096 keys out of 1
 * GiB, q in bf16, medians of six processes in turns): one token 748 us, two 1,285; line by line
 * as they lie 833 and 1,302. In a quieter hour one token 640 and 760; with page s ahead of page
 * 0 instead of behind it 659; with 4 or 16 pages 2 to 4% more than with 8.
 *
 * Instructions count as well, in steps that are 64 cycles long: with 8 for a line instead of 11.5
 * (gcc 12, all of a unit's counted) a job takes 1.4% less.
 *
 * Rows that do not follow each other, and runs of less than RUN_WINDOWS times 32 KiB, are fetched
 * in the order in which they lie. UNIT_LINES at a time where steps ask for it: 18 at once took all
 * places (6% slower). Where items of many rows do, an item's lines come together.
 *
 * Limits: runs are by address in the view; whether memory's own frames follow each other is not
 * known. "Page" here is one of 4 KiB, but in amx_run_keys, where it is the cache's. The few-row
 * kernel has an order of its own: its loads run through pages at the speed of memory, as the
 * hardware likes it, and with this one 32 heads over 8 KV heads of 128 read 0.75 of what a plain
 * read does instead of 0.96. */
#ifndef DCP_KERNELS_ATTN_AHEAD_AMX_H
#define DCP_KERNELS_ATTN_AHEAD_AMX_H

#include "kernels/attn_amx_priv.h"

/* Tests record what is asked for. */
#ifndef AHEAD_FETCH
#define AHEAD_FETCH(at) __builtin_prefetch(at, 0, 2) /* to L2 */
#endif

enum {
    AHEAD_LINE = 64, /* bytes */
    UNIT_LINES = 4,
    PAGE_LINES = 64,
    RUN_PAGES = 8,
    RUN_STAGGER = PAGE_LINES / RUN_PAGES, /* lines */
    RUN_WINDOWS = 8,                      /* of 8 pages, at least */
    RUN_RAMP = (RUN_PAGES - 1) * RUN_STAGGER,
    AHEAD_FRACTION = 64
};

/* K's rows, or V's. */
struct ahead_rows {
    bool is_value, is_run;
    int64_t n_lines;   /* of a row */
    int64_t key, next; /* first of the run or group; first that it does not hold whole */
    int64_t units;     /* left of it; 0: rows that do not follow each other */
    const char *at; /* the run's first page, or what comes next; NULL: nothing that can be read */
    int64_t stride, row, line; /* rows apart: what comes next */
    /* A run: page 0's line, in bytes from at; of each page the address that lies so far below its
     * line, so that a line takes three instructions; the first of the four pages whose turn it
     * is. */
    int64_t bytes, n_windows;
    const char *page[RUN_PAGES];
    int64_t first;
};
/* K's and V's in turns, 16 rows each. */
struct ahead {
    struct ahead_rows rows[2];
    struct ahead_rows *x; /* whose turn it is */
    bool has_value;       /* V's rows are not K's */
    int64_t due, a_step;  /* units, in 1 / AHEAD_FRACTION */
    /* Units until the turn ends or the rows do, now and when that was last looked at; until the
     * turn ends, then. */
    int64_t left, span, turn;
};

/* Where page s of the eight is when page 0's line is line of the run. */
static inline const char *ahead_page(const struct ahead_rows *x, int64_t line, int s)
{
    const int64_t of_s = line - s * RUN_STAGGER; /* over all of its pages */
    const int64_t in_page = of_s & (PAGE_LINES - 1);
    const int64_t window = attn_max(0, attn_min((of_s - in_page) / PAGE_LINES, x->n_windows - 1));
    return x->at + ((s + window * RUN_PAGES) * PAGE_LINES + in_page - line) * AHEAD_LINE;
}
/* At a page's end, and at the run's first lines, where pages begin. */
static __attribute__((noinline)) void ahead_turn_page(struct ahead_rows *x)
{
    const int64_t line = x->bytes / AHEAD_LINE;
    const int s = (int)(line / RUN_STAGGER % RUN_PAGES);
    x->page[s] = ahead_page(x, line, s);
}
static void ahead_run_at(struct ahead_rows *x, int64_t line)
{
    x->bytes = line * AHEAD_LINE;
    x->first = 0;
    x->units = (x->n_windows * PAGE_LINES + RUN_RAMP - line) * (RUN_PAGES / UNIT_LINES);
    for (int s = 0; s < RUN_PAGES; s++) x->page[s] = ahead_page(x, line, s);
}

/* The rows from x->next on: a run, or a group of 16. */
static __attribute__((noinline)) void ahead_find(const struct amx_job *a, struct ahead_rows *x)
{
    const struct amx_keys keys = amx_natural_keys(a, x->next, x->is_value);
    const int64_t row_bytes = x->n_lines * AHEAD_LINE;
    const int64_t page_bytes = PAGE_LINES * AHEAD_LINE;
    x->key = x->next;
    x->next += AMX_GROUP;
    x->at = keys.at;
    x->stride = keys.stride;
    x->row = x->line = x->units = 0;
    x->is_run = false;
    if (keys.at == NULL || keys.stride != row_bytes) return;
    x->units = AMX_GROUP / UNIT_LINES * x->n_lines;
    const int64_t before = (int64_t)((uintptr_t)keys.at % (uint64_t)page_bytes);
    const int64_t n_bytes = before + amx_run_keys(a, x->key, x->is_value) * row_bytes;
    x->n_windows = n_bytes / (RUN_PAGES * page_bytes);
    if (x->n_windows < RUN_WINDOWS) return;
    x->is_run = true;
    x->at -= before;
    const int64_t n_keys = (x->n_windows * RUN_PAGES * page_bytes - before) / row_bytes;
    x->next = x->key + attn_max(n_keys / AMX_GROUP, 1) * AMX_GROUP;
    ahead_run_at(x, 0);
}

/* Books the units taken since ahead_aim. */
static inline void ahead_book(struct ahead *ahead)
{
    const int64_t n = ahead->span - ahead->left;
    ahead->span = ahead->left;
    ahead->turn -= n;
    if (ahead->x->units > 0) ahead->x->units -= n;
}
static inline void ahead_aim(struct ahead *ahead)
{
    const int64_t units = ahead->x->units;
    ahead->left = ahead->span = units > 0 ? attn_min(units, ahead->turn) : ahead->turn;
}
static inline void ahead_begin_turn(struct ahead *ahead, int which)
{
    ahead->x = &ahead->rows[which];
    ahead->turn = INT64_MAX;
    if (ahead->has_value) ahead->turn = AMX_GROUP / UNIT_LINES * ahead->x->n_lines;
}
/* The rows end, or the turn. */
static __attribute__((noinline)) void ahead_go_on(const struct amx_job *a, struct ahead *ahead)
{
    struct ahead_rows *const x = ahead->x;
    const bool counts = x->units > 0;
    ahead_book(ahead);
    if (counts && x->units == 0) ahead_find(a, x);
    if (ahead->turn == 0) ahead_begin_turn(ahead, ahead->x == &ahead->rows[0]);
    ahead_aim(ahead);
}
/* Rows that do not follow each other, or none. */
static __attribute__((noinline)) void ahead_scattered(const struct amx_job *a, struct ahead *ahead)
{
    struct ahead_rows *const x = ahead->x;
    if (x->at == NULL && x->next >= a->hi) return; /* no more keys */
    for (int i = 0; i < UNIT_LINES; i++) {
        if (x->at != NULL) AHEAD_FETCH(x->at + x->line * AHEAD_LINE);
        if (++x->line < x->n_lines) continue;
        x->line = 0;
        if (x->at != NULL) x->at += x->stride;
        if (++x->row < AMX_GROUP) continue;
        ahead_book(ahead);
        ahead_find(a, x);
        /* Of this unit, which is not counted yet. */
        if (x->units > 0) x->units++;
        ahead_aim(ahead);
        return;
    }
}
AMX_INLINE void ahead_unit(const struct amx_job *a, struct ahead *ahead)
{
    struct ahead_rows *const x = ahead->x;
    if (__builtin_expect(x->is_run, 1)) {
        const char *const *const page = x->page + x->first;
        const int64_t bytes = x->bytes;
        AHEAD_FETCH(page[0] + bytes);
        AHEAD_FETCH(page[1] + bytes);
        AHEAD_FETCH(page[2] + bytes);
        AHEAD_FETCH(page[3] + bytes);
        x->first ^= UNIT_LINES;
        if (x->first == 0) {
            x->bytes = bytes + AHEAD_LINE;
            if (x->bytes % (RUN_STAGGER * AHEAD_LINE) == 0) ahead_turn_page(x);
        }
    } else if (x->units > 0) {
        AHEAD_FETCH(x->at);
        AHEAD_FETCH(x->at + AHEAD_LINE);
        AHEAD_FETCH(x->at + 2 * AHEAD_LINE);
        AHEAD_FETCH(x->at + 3 * AHEAD_LINE);
        x->at += UNIT_LINES * AHEAD_LINE;
    } else {
        ahead_scattered(a, ahead);
    }
    if (--ahead->left == 0) ahead_go_on(a, ahead);
}
/* After a step of products. */
AMX_INLINE void ahead_step(const struct amx_job *a, struct ahead *x)
{
    for (x->due += x->a_step; x->due >= AHEAD_FRACTION; x->due -= AHEAD_FRACTION) ahead_unit(a, x);
}

/* From key on, which is a group's first; n_steps in which n_keys' lines are to come. Returns how
 * many lines those are. */
static int64_t ahead_begin(const struct amx_job *a, struct ahead *x, int64_t key, int64_t n_keys,
                           int64_t n_steps)
{
    x->has_value = !amx_is_latent(a);
    for (int i = 0; i < 2; i++) {
        struct ahead_rows *const rows = &x->rows[i];
        rows->is_value = i == 1;
        rows->n_lines = i == 1 ? a->v_steps : a->k_steps;
        rows->next = key;
        if (i == 0 || x->has_value) ahead_find(a, rows);
    }
    const int64_t lines = n_keys * (a->k_steps + (x->has_value ? a->v_steps : 0));
    x->due = 0;
    x->a_step = amx_div_up(lines * AHEAD_FRACTION, UNIT_LINES * n_steps);
    ahead_begin_turn(x, 0);
    ahead_aim(x);
    return lines;
}
static void ahead_rows_from(const struct amx_job *a, struct ahead_rows *x, int64_t key)
{
    if (x->key >= key) return;
    if (x->is_run && key < x->next) {
        const int64_t line = (key - x->key) * x->n_lines / RUN_PAGES;
        if (x->bytes < line * AHEAD_LINE) ahead_run_at(x, line);
        return;
    }
    x->next = key;
    ahead_find(a, x);
}
/* What lies before key is used up: groups and runs in front of it are left out, and a run's page 0
 * goes on from its line at the latest. (The seven pages behind page 0 then ask for some lines in
 * front of key, to no use; jumping further by as much took as long.) */
static void ahead_from(const struct amx_job *a, struct ahead *x, int64_t key)
{
    ahead_book(x);
    ahead_rows_from(a, &x->rows[0], key);
    if (x->has_value) ahead_rows_from(a, &x->rows[1], key);
    ahead_aim(x);
}

#endif
