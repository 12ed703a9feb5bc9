/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_attend_report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu_priv.h"
#include "cli/bench_machine.h"
#include "cli/json_out.h"
#include "cli/table.h"

enum { N_TIMES = 11, N_MEMORY = 11 };

void bench_report_begin(struct bench_lines *all)
{
    all->load_before = bench_load();
    all->cpus_usable = dcp__cpu_usable();
}

/* ---- what lines say ---- */

static double read_fraction(const struct bench_line *l)
{
    return l->read.median_us / l->time.median_us;
}

static double matrix_fraction(const struct bench_line *l)
{
    return l->flops / l->time.median_us * 1e-3 / l->matrix_GFLOPs;
}

/* Other work had the CPUs in many of the rounds: products out of registers alone came to less than
 * 0.85 of what they reached in the best of them, or to less than 0.7 of the best ever seen, or the
 * call's or the read's median is more than twice its minimum. Medians are of unlike machines then,
 * and a fraction of them may be far off, above 1 as well. (A clock that is slower for a while hits
 * the call and the roofs alike: on a server that did nothing else the peak moved by a sixth.) */
static bool is_disturbed(const struct bench_line *l)
{
    return l->has_run &&
           (l->matrix_GFLOPs < 0.85 * l->best_GFLOPs || l->matrix_GFLOPs < 0.7 * l->peak_GFLOPs ||
            l->time.median_us > 2.0 * l->time.min_us || l->read.median_us > 2.0 * l->read.min_us);
}

/* The fastest plain read of at least half of the largest bytes of a line. */
static double read_GBps(const struct bench_lines *all)
{
    int64_t most = 0;
    double best = 0.0;
    for (int i = 0; i < all->n; i++)
        if (all->line[i].has_run && all->line[i].read_bytes > most) most = all->line[i].read_bytes;
    for (int i = 0; i < all->n; i++) {
        const struct bench_line *l = &all->line[i];
        if (!l->has_run || l->read_bytes < most / 2) continue;
        const double rate = (double)l->read_bytes / l->read.min_us * 1e-3;
        if (rate > best) best = rate;
    }
    return best;
}

/* ---- JSON ---- */

static void jout_known(struct json_out *j, const char *key, bool is_known, double value)
{
    jout_num(j, key, is_known ? value : (double)NAN);
}

static void jout_span(struct json_out *j, const char *key, bool is_known,
                      const struct bench_span *s)
{
    jout_object(j, key);
    jout_known(j, "min", is_known, s->min_us);
    jout_known(j, "median", is_known, s->median_us);
    jout_object_end(j);
}

static void print_machine(struct json_out *j, const struct bench_lines *all)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    const double read = read_GBps(all);
    jout_object(j, "machine");
    jout_known(j, "read_GBps", read > 0, read);
    jout_num(j, "matrix_GFLOPs", all->roof_GFLOPs[all->best_unit]);
    jout_str(j, "matrix_isa", bench_roof_name(all->best_unit));
    jout_object(j, "peaks_GFLOPs");
    for (int unit = 0; unit < BENCH_ROOF_COUNT; unit++)
        if (all->roof_GFLOPs[unit] > 0) jout_num(j, bench_roof_name(unit), all->roof_GFLOPs[unit]);
    jout_object_end(j);
    jout_str(j, "cpu", cpu.brand);
    jout_str(j, "not_higher", cpu.why_not_higher);
    jout_int(j, "cpus_usable", all->cpus_usable);
    jout_str(j, "pinning", all->pinning);
    jout_num(j, "load_before", all->load_before);
    jout_num(j, "load_after", bench_load());
    jout_str(j, "version", dcp_version());
    jout_object_end(j);
}

static void print_json(const struct bench_lines *all)
{
    struct json_out j;
    jout_begin(&j, stdout);
    print_machine(&j, all);
    jout_array(&j, "rows");
    for (int i = 0; i < all->n; i++) {
        const struct bench_line *l = &all->line[i];
        const bool ran = l->has_run, is_product = l->keys == 0;
        jout_object(&j, NULL);
        jout_str(&j, "case", l->name);
        if (is_product)
            jout_null(&j, "keys");
        else
            jout_int(&j, "keys", l->keys);
        jout_int(&j, "tokens", l->tokens);
        jout_int(&j, "ranks", l->ranks);
        jout_int(&j, "threads", l->threads);
        jout_str(&j, "comm", l->comm);
        jout_str(&j, "dtype", l->dtype);
        jout_str(&j, "isa", l->isa);
        jout_str(&j, "kernel", l->kernel);
        if (is_product) jout_bool(&j, "exact", l->is_exact);
        jout_int(&j, "iterations", l->n_iters);
        jout_span(&j, "time_us", ran, &l->time);
        jout_span(&j, "read_us", ran, &l->read);
        jout_int(&j, "read_bytes", l->read_bytes);
        jout_num(&j, "flop", l->flops);
        jout_known(&j, "GFLOPs", ran, l->flops / l->time.median_us * 1e-3);
        jout_known(&j, "matrix_GFLOPs", ran, l->matrix_GFLOPs);
        jout_known(&j, "best_GFLOPs", ran, l->best_GFLOPs);
        jout_known(&j, "peak_GFLOPs", ran, l->peak_GFLOPs);
        jout_known(&j, "read_fraction", ran, read_fraction(l));
        jout_known(&j, "read_fraction_min", ran, l->read.min_us / l->time.min_us);
        jout_known(&j, "matrix_fraction", ran, matrix_fraction(l));
        jout_bool(&j, "disturbed", is_disturbed(l));
        jout_object(&j, "split_us");
        jout_known(&j, "gather", ran, l->gather_us);
        jout_known(&j, "partial", ran, l->partial_us);
        jout_known(&j, "merge", ran, l->merge_us);
        jout_object_end(&j);
        jout_int(&j, "workspace_bytes", l->workspace_bytes);
        jout_int(&j, "peak_extra_bytes", l->peak_extra_bytes);
        jout_int(&j, "pss_growth_bytes", l->pss_growth_bytes);
        if (!is_product) jout_int(&j, "tile_rows", l->tile_rows);
        if (!is_product) jout_int(&j, "page_tokens", l->page_tokens);
        jout_known(&j, "worst_error", l->is_checked, l->worst_error);
        if (l->is_checked)
            jout_int(&j, "wrong", l->wrong);
        else
            jout_null(&j, "wrong");
        jout_object_end(&j);
    }
    jout_array_end(&j);
    jout_end(&j);
}

/* ---- tables ---- */

typedef char cell[TABLE_CELL_BYTES];

static void put_count(cell c, int64_t n)
{
    if (n >= 1024 && n % 1024 == 0)
        snprintf(c, TABLE_CELL_BYTES, "%lldK", (long long)(n / 1024));
    else
        snprintf(c, TABLE_CELL_BYTES, "%lld", (long long)n);
}

static void put_us(cell c, double us)
{
    snprintf(c, TABLE_CELL_BYTES, us < 99999.5 ? "%.1f" : "%.0f", us);
}

static void put_bytes(cell c, int64_t n_bytes)
{
    if (n_bytes < 0)
        snprintf(c, TABLE_CELL_BYTES, "-");
    else
        table_bytes((uint64_t)n_bytes, c);
}

static void put_first(const struct bench_line *l, cell *row)
{
    snprintf(row[0], TABLE_CELL_BYTES, "%s", l->name);
    if (l->keys == 0)
        put_bytes(row[1], l->read_bytes);
    else
        put_count(row[1], l->keys);
    put_count(row[2], l->tokens);
    snprintf(row[3], TABLE_CELL_BYTES, "%dx%d", l->ranks, l->threads);
    snprintf(row[4], TABLE_CELL_BYTES, "%s", l->dtype);
}

static void put_times(const struct bench_line *l, cell *row)
{
    const double total = l->gather_us + l->partial_us + l->merge_us;
    put_first(l, row);
    snprintf(row[5], TABLE_CELL_BYTES, "%s", l->isa);
    for (int c = 6; c < N_TIMES; c++) snprintf(row[c], TABLE_CELL_BYTES, "-");
    if (!l->has_run) return;
    put_us(row[6], l->time.min_us);
    put_us(row[7], l->time.median_us);
    const char *const mark = is_disturbed(l) ? "!" : "";
    snprintf(row[8], TABLE_CELL_BYTES, "%.1f%s", 100.0 * read_fraction(l), mark);
    snprintf(row[9], TABLE_CELL_BYTES, "%.1f%s", 100.0 * matrix_fraction(l), mark);
    if (total > 0 && l->keys > 0)
        snprintf(row[10], TABLE_CELL_BYTES, "%.0f/%.0f/%.0f", 100.0 * l->gather_us / total,
                 100.0 * l->partial_us / total, 100.0 * l->merge_us / total);
}

static void put_memory(const struct bench_line *l, cell *row)
{
    put_first(l, row);
    if (l->keys == 0)
        snprintf(row[5], TABLE_CELL_BYTES, "-");
    else
        put_count(row[5], l->page_tokens);
    put_bytes(row[6], l->workspace_bytes);
    put_bytes(row[7], l->peak_extra_bytes);
    put_bytes(row[8], l->pss_growth_bytes);
    for (int c = 9; c < N_MEMORY; c++) snprintf(row[c], TABLE_CELL_BYTES, "-");
    if (!l->is_checked) return;
    snprintf(row[9], TABLE_CELL_BYTES, "%.1e", l->worst_error);
    snprintf(row[10], TABLE_CELL_BYTES, "%lld", (long long)l->wrong);
}

static void print_disturbed(const struct bench_lines *all)
{
    int n = 0;
    double lowest = 1.0;
    for (int i = 0; i < all->n; i++) {
        const struct bench_line *l = &all->line[i];
        if (!is_disturbed(l)) continue;
        n++;
        if (l->matrix_GFLOPs < 0.85 * l->peak_GFLOPs && l->matrix_GFLOPs < lowest * l->peak_GFLOPs)
            lowest = l->matrix_GFLOPs / l->peak_GFLOPs;
    }
    if (n == 0) return;
    printf("! %d line%s ran while other work had the CPUs", n, n == 1 ? "" : "s");
    if (lowest < 1.0) printf(" (the matrix peak fell to %.0f%% of its best)", 100.0 * lowest);
    printf(
        ".\n  Fractions of such rounds say little; run again on a quiet machine, or for longer.\n");
}

static void print_tables(const struct bench_lines *all)
{
    static const char *const times[N_TIMES] = {"case",   "keys",   "T",      "ranks",
                                               "type",   "isa",    "min us", "median us",
                                               "% read", "% peak", "g/p/m"};
    static const char *const memory[N_MEMORY] = {"case", "keys",  "T",         "ranks",
                                                 "type", "page",  "workspace", "extra",
                                                 "PSS",  "error", "wrong"};
    cell *cells = calloc((size_t)(all->n + 1) * N_TIMES, sizeof(*cells));
    if (cells == NULL) return;
    printf("ranks x threads; bound: %s; load %.1f\n", all->pinning, all->load_before);
    const double read = read_GBps(all);
    if (read > 0)
        printf("plain read of the largest shapes %.1f GB/s at best\n"
               "%% read: median time of a plain read over median time\n",
               read);
    printf("matrix peak on random data %.0f GFLOP/s (%s)\n", all->roof_GFLOPs[all->best_unit],
           bench_roof_name(all->best_unit));
    for (int c = 0; c < N_TIMES; c++) snprintf(cells[c], TABLE_CELL_BYTES, "%s", times[c]);
    for (int i = 0; i < all->n; i++) put_times(&all->line[i], cells + (i + 1) * N_TIMES);
    table_print(stdout, all->n + 1, N_TIMES, cells);
    print_disturbed(all);
    putchar('\n');
    for (int c = 0; c < N_MEMORY; c++) snprintf(cells[c], TABLE_CELL_BYTES, "%s", memory[c]);
    for (int i = 0; i < all->n; i++) put_memory(&all->line[i], cells + (i + 1) * N_MEMORY);
    table_print(stdout, all->n + 1, N_MEMORY, cells);
    if (all->n_lost > 0) printf("%d more lines than the table holds are left out\n", all->n_lost);
    free(cells);
}

void bench_report(const struct bench_lines *all, bool is_json)
{
    if (is_json)
        print_json(all);
    else
        print_tables(all);
}
