/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn bench merge: the merge beside the published form and beside the machine's own limit. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/bench_machine.h"
#include "cli/bench_merge.h"
#include "cli/bench_watch.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/launch.h"
#include "cli/message.h"
#include "cli/table.h"

enum { MAX_SHAPES = 64, MAX_TYPES = 3 };
enum { N_COLUMNS = 11 };

struct bench_values {
    struct rank_opts rank;
    const char *shapes, *algos, *dtypes;
    uint64_t min_bytes, max_bytes, memory;
    double factor, seconds;
    int64_t heads, dim, iters;
    int cut, order, wire;
    bool in_place, json;
    /* read from the texts */
    int n_shapes, n_types;
    int64_t shape[MAX_SHAPES][3];
    dcp_dtype types[MAX_TYPES];
    bool wanted[BENCH_MAX_ALGOS], named[BENCH_MAX_ALGOS];
};

#define AT(field) offsetof(struct bench_values, field)
static const struct option_def bench_options[] = {
    {"shape", 0, OPT_STRING, AT(shapes), "T,H,D[;...]", 0, 0, NULL,
     "tokens, heads, dim; several between semicolons"},
    {"min-bytes", 0, OPT_SIZE, AT(min_bytes), "BYTES", 1, 1e13, NULL,
     "without --shape: smallest partial of a rank (default 192K)"},
    {"max-bytes", 0, OPT_SIZE, AT(max_bytes), "BYTES", 1, 1e13, NULL,
     "without --shape: largest (default 96M)"},
    {"factor", 0, OPT_FLOAT, AT(factor), "F", 1.01, 1e6, NULL,
     "without --shape: from one size to the next (default 8)"},
    {"heads", 0, OPT_INT, AT(heads), "H", 1, 1e6, NULL, "without --shape: heads (default 96)"},
    {"dim", 0, OPT_INT, AT(dim), "D", 1, 1e6, NULL, "without --shape: dim (default 512)"},
    {"algo", 0, OPT_STRING, AT(algos), "LIST", 0, 0, NULL,
     "algorithms, between commas; all or auto: every one that can run (default; the published "
     "forms always run)"},
    {"dtype", 0, OPT_STRING, AT(dtypes), "LIST", 0, 0, NULL,
     "types of partial and result: f32, bf16, f16 (default f32)"},
    {"cut", 0, OPT_ENUM, AT(cut), NULL, 0, 0, "heads|tokens|none",
     "how the result is spread (default heads)"},
    {"order", 0, OPT_ENUM, AT(order), NULL, 0, 0, "auto|rank|any",
     "rank: without those that sum in another order; any, auto: with them (default; the published "
     "forms always run)"},
    {"wire-dtype", 0, OPT_ENUM, AT(wire), NULL, 0, 0, DTYPE_CHOICES,
     "type of payloads between ranks (default auto: --dtype's; else narrower); for alltoall alone, "
     "as in merge"},
    {"in-place", 0, OPT_FLAG, AT(in_place), NULL, 0, 0, NULL,
     "the result goes into the own slice of the partial (default contiguous)"},
    {"iters", 0, OPT_INT, AT(iters), "N", 0, 2000, NULL,
     "iterations; 0 creates and reports memory only (default: by --time)"},
    {"time", 0, OPT_FLOAT, AT(seconds), "SECONDS", 0.001, 86400, NULL,
     "for a shape and type, all algorithms together (default 2)"},
    {"memory", 0, OPT_SIZE, AT(memory), "BYTES", 65536, 1e15, NULL,
     "workspace limit of each rank (default 8M)"},
    RANKS_OPTION(struct bench_values, rank),
    COMM_OPTIONS(struct bench_values, rank),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def bench_command = {
    "bench merge",
    "",
    0,
    0,
    "Time the merge on partials that every rank has just rewritten, against a plain read of the\n"
    "same bytes and against the published form (all-gather of the LSEs, scaling, all-reduce).",
    bench_options,
    sizeof(bench_options) / sizeof(bench_options[0]),
    "An iteration: all ranks write their partials, meet, and call; its time, a read's too, is "
    "from\n"
    "the first rank's start to the last one's end. Where ranks outnumber CPUs that holds their "
    "turns\n"
    "on the CPUs: the read is then what those CPUs can read, not what one rank reads alone.\n"
    "All algorithms and the read take turns in the same run, on the same pages, equally bound.\n"
    "  min, median microseconds\n"
    "  algbw       GB/s: S / t, S = T x H x D x bytes of an element: one rank's partial\n"
    "  busbw       GB/s: S / t x (N - 1) / N: what has to come from other ranks, whatever moved\n"
    "  x read      time over the best plain read loop over exactly the bytes that each rank must\n"
    "              read: its own rows of all partials\n"
    "  speedup     the faster published form's median over this one's, same ranks, same run; from\n"
    "              two ranks on: one (the default) merges nothing\n"
    "  work        bytes of workspace that create reports; extra: counted allocator's high-water\n"
    "              mark over creation and runs; PSS: growth of the proportional set size; each "
    "the\n"
    "              largest of a rank\n"
    "  wrong       elements of sampled rows that differ from the definition, taken in double, by\n"
    "              more than rounding allows"};

/* ---- texts of options ---- */

static bool read_shapes(struct bench_values *v, char *why, size_t n_bytes)
{
    static const char *const names[3] = {"T", "H", "D"};
    for (const char *at = v->shapes;; at++) {
        if (v->n_shapes == MAX_SHAPES) {
            snprintf(why, n_bytes, "at most %d shapes", MAX_SHAPES);
            return false;
        }
        int64_t *s = v->shape[v->n_shapes++];
        int64_t n = 4; /* the bytes of a partial of f32, in 62 bits */
        for (int i = 0; i < 3; i++) {
            char *end = NULL;
            errno = 0;
            s[i] = strtoll(at, &end, 10);
            if (end == at || (i < 2 && *end != ',') || (i == 2 && *end != ';' && *end != '\0')) {
                snprintf(why, n_bytes, "T,H,D, three numbers; several between semicolons");
                return false;
            }
            if (errno != 0 || s[i] < (i == 0 ? 0 : 1) || s[i] > ((int64_t)1 << 40)) {
                snprintf(why, n_bytes, "%s is %.*s; from %d to 2^40 is possible", names[i],
                         (int)(end - at < 40 ? end - at : 40), at, i == 0 ? 0 : 1);
                return false;
            }
            if (s[i] > 0 && n > ((int64_t)1 << 62) / s[i]) {
                snprintf(why, n_bytes,
                         "T x H x D is too large: a partial of f32 has more than "
                         "2^62 bytes");
                return false;
            }
            n *= s[i] > 0 ? s[i] : 1;
            at = i < 2 ? end + 1 : end;
        }
        if (*at == '\0') return true;
    }
}

/* Of the options that say sizes instead of shapes: one that was given, and what the others are. */
static const char *sizes_given(const struct bench_values *v)
{
    return v->min_bytes != 0   ? "--min-bytes"
           : v->max_bytes != 0 ? "--max-bytes"
           : v->factor > 0     ? "--factor"
           : v->heads != 0     ? "--heads"
           : v->dim != 0       ? "--dim"
                               : NULL;
}

static void fill_sizes(struct bench_values *v)
{
    if (v->min_bytes == 0) v->min_bytes = 192 << 10;
    if (v->max_bytes == 0) v->max_bytes = 96 << 20;
    if (!(v->factor > 0)) v->factor = 8;
    if (v->heads == 0) v->heads = 96;
    if (v->dim == 0) v->dim = 512;
}

/* As many tokens as fit each size, at least one; a size that gives no other shape is left out. */
static void size_shapes(struct bench_values *v, dcp_dtype type)
{
    const double token_bytes = (double)(v->heads * v->dim) * (double)dcp_dtype_bytes(type);
    v->n_shapes = 0;
    for (double size = (double)v->min_bytes; size <= (double)v->max_bytes * (1.0 + 1e-9);
         size *= v->factor) {
        const int64_t t = size < token_bytes ? 1 : (int64_t)(size / token_bytes);
        const int n = v->n_shapes;
        if (n == MAX_SHAPES || (n > 0 && v->shape[n - 1][0] == t)) continue;
        v->shape[n][0] = t;
        v->shape[n][1] = v->heads;
        v->shape[n][2] = v->dim;
        v->n_shapes++;
    }
}

/* Items of "a,b,c" one by one into buf; NULL at the end, "" for one that does not fit. */
static const char *next_item(const char **at, char *buf, size_t n_bytes)
{
    if (*at == NULL) return NULL;
    const size_t len = strcspn(*at, ",");
    snprintf(buf, n_bytes, "%.*s", len < n_bytes ? (int)len : 0, *at);
    *at = (*at)[len] == ',' ? *at + len + 1 : NULL; /* behind a comma there must be an item */
    return buf;
}

static bool read_types(struct bench_values *v, char *item, size_t n_bytes)
{
    const char *at = v->dtypes != NULL ? v->dtypes : "f32";
    while (next_item(&at, item, n_bytes) != NULL) {
        dcp_dtype type = DCP_DTYPE_DEFAULT;
        for (int t = DCP_F32; t <= DCP_BF16; t++) {
            if (strcmp(dcp_dtype_name((dcp_dtype)t), item) == 0) type = (dcp_dtype)t;
        }
        if (type == DCP_DTYPE_DEFAULT || v->n_types == MAX_TYPES) return false;
        v->types[v->n_types++] = type;
    }
    return v->n_types > 0;
}

static bool read_algos(struct bench_values *v, char *item, size_t n_bytes)
{
    const char *at = v->algos != NULL ? v->algos : "auto";
    bool wants_all = false;
    while (next_item(&at, item, n_bytes) != NULL) {
        dcp_merge_algo a = DCP_MERGE_AUTO;
        if (strcmp(item, "all") == 0 || strcmp(item, "auto") == 0) {
            wants_all = true;
            continue;
        }
        if (!dcp_merge_algo_parse(item, &a) || (int)a >= BENCH_MAX_ALGOS) return false;
        v->wanted[a] = v->named[a] = true;
    }
    for (int a = 1; a < BENCH_MAX_ALGOS; a++) {
        const bool exists = strcmp(dcp_merge_algo_name((dcp_merge_algo)a), "?") != 0;
        if (exists && (wants_all || bench_is_published((dcp_merge_algo)a))) v->wanted[a] = true;
    }
    return true;
}

/* What merge refuses, too: an order that a named algorithm does not have, a type on the wire that
 * is no narrower. True, and said. */
static bool is_refused(const struct bench_values *v)
{
    for (int a = 1; v->order == DCP_MERGE_ORDER_RANK && a < BENCH_MAX_ALGOS; a++) {
        if (!v->named[a] || a == DCP_MERGE_DIRECT || a == DCP_MERGE_ALLTOALL ||
            bench_is_published((dcp_merge_algo)a))
            continue;
        (void)usage_error(&bench_command,
                          "--order rank: --algo %s sums in another order; direct and alltoall keep "
                          "rank order",
                          dcp_merge_algo_name((dcp_merge_algo)a));
        return true;
    }
    const dcp_dtype wire = (dcp_dtype)v->wire;
    for (int t = 0; wire != DCP_DTYPE_DEFAULT && t < v->n_types; t++) {
        if (wire == v->types[t] || dcp_dtype_bytes(wire) < dcp_dtype_bytes(v->types[t])) continue;
        (void)usage_error(&bench_command,
                          "--wire-dtype %s is neither the type of partials (--dtype %s) nor "
                          "narrower",
                          dcp_dtype_name(wire), dcp_dtype_name(v->types[t]));
        return true;
    }
    return false;
}

/* ---- the report ---- */

struct result_row {
    int64_t shape[3];
    dcp_dtype dtype;
    struct bench_row row;
    struct bench_times read;
    bool has_read;
    int64_t partial_bytes, n_iters;
    double speedup; /* < 0: no published form beside it */
};

struct results {
    int n, room;
    struct result_row *rows;
    double read_GBps; /* at the largest shape */
    int64_t read_bytes;
    const char *read_name;
    char skipped[2048];
    char pinning[96];
    bool is_told; /* as in bench_report */
    double load_before;
    int cpus_usable; /* before ranks were bound */
};

static dcp_status keep(struct results *all, const struct bench_case *c,
                       const struct bench_report *rep)
{
    double reference = -1.0;
    for (int i = 0; i < rep->n_rows; i++) {
        const struct bench_row *row = &rep->rows[i];
        if (row->is_published && row->has_run && (reference < 0 || row->time.median_us < reference))
            reference = row->time.median_us;
    }
    if (all->n + rep->n_rows > all->room) {
        void *mem = NULL;
        const int room = 2 * (all->n + rep->n_rows);
        DCP_TRY(dcp__alloc_array((size_t)room, sizeof(*all->rows), "rows of a bench", &mem));
        if (all->n > 0) memcpy(mem, all->rows, (size_t)all->n * sizeof(*all->rows));
        dcp__free(all->rows);
        all->rows = mem;
        all->room = room;
    }
    for (int i = 0; i < rep->n_rows; i++) {
        const struct bench_row *row = &rep->rows[i];
        all->rows[all->n++] = (struct result_row){
            {c->n_tokens, c->n_heads, c->dim},
            c->dtype,
            *row,
            rep->read,
            rep->has_read,
            rep->partial_bytes,
            rep->n_iters,
            reference > 0 && row->has_run ? reference / row->time.median_us : -1.0};
    }
    if (rep->has_read && rep->read_bytes >= all->read_bytes && rep->read.min_us > 0) {
        all->read_bytes = rep->read_bytes;
        all->read_GBps = (double)rep->read_bytes / rep->read.min_us * 1e-3;
        all->read_name = rep->read_name;
    }
    if (rep->skipped[0] != '\0' && all->skipped[0] == '\0')
        snprintf(all->skipped, sizeof(all->skipped), "%s", rep->skipped);
    return DCP_OK;
}

static double algo_GBps(const struct result_row *r)
{
    return (double)r->partial_bytes / r->row.time.median_us * 1e-3;
}

/* Of the bytes of a partial, the part that other ranks hold. */
static double bus_GBps(const struct result_row *r, int n_ranks)
{
    return algo_GBps(r) * (n_ranks - 1) / n_ranks;
}

/* The type of the payloads that an algorithm sends. */
static const char *wire_name(const struct bench_values *v, const struct result_row *r)
{
    if (r->row.algo == DCP_MERGE_DIRECT) return "none";
    if (r->row.algo != DCP_MERGE_ALLTOALL) return "f32";
    return dcp_dtype_name(v->wire != 0 ? (dcp_dtype)v->wire : r->dtype);
}

static void jout_known(struct json_out *j, const char *key, bool is_known, double value)
{
    jout_num(j, key, is_known ? value : (double)NAN);
}

static void print_json(dcp_group *g, const struct bench_values *v, const struct results *all)
{
    const int n = dcp_group_size(g);
    const char *kind = dcp_group_kind(g);
    const bool is_mpi = strcmp(kind, "mpi") == 0;
    static const char *const cuts[] = {"heads", "tokens", "none"};
    struct dcp__cpu cpu;
    struct json_out j;
    dcp__cpu_detect(&cpu);
    jout_begin(&j, stdout);
    jout_object(&j, "machine");
    jout_known(&j, "read_GBps", all->read_GBps > 0, all->read_GBps);
    jout_str(&j, "cpu", cpu.brand);
    jout_int(&j, "cpus_usable", all->cpus_usable);
    jout_str(&j, "pinning", all->pinning);
    jout_str(&j, "read_loop", all->read_name != NULL ? all->read_name : "");
    jout_num(&j, "load_before", all->load_before);
    jout_num(&j, "load_after", bench_load());
    jout_str(&j, "version", dcp_version());
    jout_object_end(&j);
    jout_array(&j, "rows");
    for (int i = 0; i < all->n; i++) {
        const struct result_row *r = &all->rows[i];
        const bool ran = r->row.has_run;
        jout_object(&j, NULL);
        jout_array(&j, "shape");
        for (int k = 0; k < 3; k++) jout_int(&j, NULL, r->shape[k]);
        jout_array_end(&j);
        jout_int(&j, "ranks", n);
        jout_str(&j, "comm", kind);
        jout_str(&j, "algo", dcp_merge_algo_name(r->row.algo));
        jout_str(&j, "dtype", dcp_dtype_name(r->dtype));
        jout_str(&j, "cut", cuts[v->cut]);
        jout_str(&j, "order", r->row.order);
        jout_str(&j, "wire_dtype", wire_name(v, r));
        jout_bool(&j, "in_place", v->in_place);
        jout_bool(&j, "published", r->row.is_published);
        jout_int(&j, "iterations", r->n_iters);
        jout_object(&j, "time_us");
        jout_known(&j, "min", ran, r->row.time.min_us);
        jout_known(&j, "median", ran, r->row.time.median_us);
        jout_object_end(&j);
        jout_object(&j, "read_us");
        jout_known(&j, "min", r->has_read, r->read.min_us);
        jout_known(&j, "median", r->has_read, r->read.median_us);
        jout_object_end(&j);
        jout_known(&j, "algo_GBps", ran, algo_GBps(r));
        jout_known(&j, "bus_GBps", ran, bus_GBps(r, n));
        jout_known(&j, "read_time_ratio", ran && r->has_read,
                   r->row.time.median_us / r->read.median_us);
        jout_known(&j, "read_time_ratio_min", ran && r->has_read,
                   r->row.time.min_us / r->read.min_us);
        jout_known(&j, "speedup", r->speedup >= 0, r->speedup);
        jout_known(&j, "speedup_mpi", is_mpi && r->speedup >= 0, r->speedup);
        jout_int(&j, "workspace_bytes", r->row.workspace_bytes);
        jout_int(&j, "peak_extra_bytes", r->row.peak_extra_bytes);
        jout_int(&j, "pss_growth_bytes", r->row.pss_growth_bytes);
        jout_int(&j, "resident_growth_bytes", r->row.resident_growth_bytes);
        jout_int(&j, "wrong", r->row.wrong);
        jout_object_end(&j);
    }
    jout_array_end(&j);
    jout_end(&j);
}

static void put_bytes(char *cell, int64_t n_bytes)
{
    if (n_bytes < 0)
        snprintf(cell, TABLE_CELL_BYTES, "-");
    else
        table_bytes((uint64_t)n_bytes, cell);
}

/* Microseconds, from a million on seconds: six characters. */
static void put_us(char *cell, double us)
{
    if (us < 999999.5)
        snprintf(cell, TABLE_CELL_BYTES, us < 1000.0 ? "%.1f" : "%.0f", us);
    else
        snprintf(cell, TABLE_CELL_BYTES, "%.2f s", us * 1e-6);
}

static bool is_same_case(const struct result_row *a, const struct result_row *b)
{
    return memcmp(a->shape, b->shape, sizeof(a->shape)) == 0 && a->dtype == b->dtype;
}

static void fill_row(const struct result_row *r, int n_ranks, char (*row)[TABLE_CELL_BYTES])
{
    snprintf(row[0], TABLE_CELL_BYTES, "%s", dcp_merge_algo_name(r->row.algo));
    for (int c = 1; c < 7; c++) snprintf(row[c], TABLE_CELL_BYTES, "-");
    if (r->row.has_run) {
        put_us(row[1], r->row.time.min_us);
        put_us(row[2], r->row.time.median_us);
        snprintf(row[3], TABLE_CELL_BYTES, "%.2f", algo_GBps(r));
        snprintf(row[4], TABLE_CELL_BYTES, "%.2f", bus_GBps(r, n_ranks));
    }
    if (r->row.has_run && r->has_read)
        snprintf(row[5], TABLE_CELL_BYTES, "%.2f", r->row.time.median_us / r->read.median_us);
    if (r->speedup >= 0 && n_ranks > 1) snprintf(row[6], TABLE_CELL_BYTES, "%.2f", r->speedup);
    put_bytes(row[7], r->row.workspace_bytes);
    put_bytes(row[8], r->row.peak_extra_bytes);
    put_bytes(row[9], r->row.pss_growth_bytes);
    snprintf(row[10], TABLE_CELL_BYTES, "%lld", (long long)r->row.wrong);
}

static const char one_rank_text[] = "one rank merges nothing, it copies: -n 2 or more compares";

/* A table for each shape and type: 100 columns of text at most. */
static void print_table(dcp_group *g, const struct bench_values *v, const struct results *all)
{
    static const char *const heads[N_COLUMNS] = {"algo",  "min us", "median",  "algbw",
                                                 "busbw", "x read", "speedup", "work",
                                                 "extra", "PSS",    "wrong"};
    const int n = dcp_group_size(g);
    char(*cells)[TABLE_CELL_BYTES] =
        calloc((size_t)(all->n + 1) * N_COLUMNS, sizeof(char[TABLE_CELL_BYTES]));
    if (cells == NULL) return;
    const int n_hosts = dcp_group_n_hosts(g);
    char hosts[32] = "";
    if (n_hosts > 1) snprintf(hosts, sizeof(hosts), " of %d hosts", n_hosts);
    printf("%d rank%s%s, %s, %s result, bound: %s\n", n, message_s(n), hosts, dcp_group_kind(g),
           v->in_place ? "in place" : "contiguous", all->pinning);
    if (v->wire != 0)
        printf("alltoall sends %s; no other has a choice\n", dcp_dtype_name((dcp_dtype)v->wire));
    if (n == 1) printf("%s\n", one_rank_text);
    if (all->read_GBps > 0)
        printf("plain read at the largest shape: %.1f GB/s, all ranks together (%s); load %.1f\n",
               all->read_GBps, all->read_name, all->load_before);
    for (int c = 0; c < N_COLUMNS; c++) snprintf(cells[c], TABLE_CELL_BYTES, "%s", heads[c]);
    int end = 0;
    for (int i = 0; i < all->n; i = end) {
        const struct result_row *first = &all->rows[i];
        for (end = i; end < all->n && is_same_case(first, &all->rows[end]); end++)
            fill_row(&all->rows[end], n, cells + (size_t)(end - i + 1) * N_COLUMNS);
        printf("\n%lld,%lld,%lld %s", (long long)first->shape[0], (long long)first->shape[1],
               (long long)first->shape[2], dcp_dtype_name(first->dtype));
        if (first->has_read)
            printf(": plain read %.1f us, median %.1f", first->read.min_us, first->read.median_us);
        printf("\n");
        table_print(stdout, end - i + 1, N_COLUMNS, cells);
    }
    if (all->skipped[0] != '\0') printf("left out: %s\n", all->skipped);
    free(cells);
}

/* ---- ranks ---- */

static dcp_status bench_shapes(dcp_group *g, const struct bench_values *given, struct results *all)
{
    struct bench_values v = *given;
    DCP_TRY(bench_pin(g, all->pinning, sizeof(all->pinning)));
    for (int t = 0; t < v.n_types; t++) {
        if (v.shapes == NULL) size_shapes(&v, v.types[t]);
        for (int i = 0; i < v.n_shapes; i++) {
            struct bench_case c = {.n_tokens = v.shape[i][0],
                                   .n_heads = v.shape[i][1],
                                   .dim = v.shape[i][2],
                                   .dtype = v.types[t],
                                   .wire = (dcp_dtype)v.wire,
                                   .order = (dcp_merge_order)v.order,
                                   .cut = (dcp_cut)v.cut,
                                   .in_place = v.in_place,
                                   .workspace_limit_bytes = (size_t)v.memory,
                                   .iters = v.iters,
                                   .seconds = v.seconds};
            memcpy(c.wanted, v.wanted, sizeof(c.wanted));
            struct bench_report rep;
            const dcp_status st = bench_merge_case(g, &c, &rep);
            all->is_told = rep.is_told;
            DCP_TRY(st);
            all->is_told = !all_ranks_ok(g, keep(all, &c, &rep));
            if (all->is_told) return DCP_ERR_NOMEM;
        }
    }
    return DCP_OK;
}

static int bench_rank_main(dcp_group *g, void *ctx)
{
    const struct bench_values *v = ctx;
    struct results all = {.load_before = bench_load(), .cpus_usable = dcp__cpu_usable()};
    struct bench_watch *watch = NULL;
    dcp_status st = bench_watch_start(g, &watch, &all.is_told);
    if (st == DCP_OK) st = bench_shapes(g, v, &all);
    bench_watch_stop(watch);
    int rc = EXIT_DONE;
    if (st != DCP_OK) {
        rc = all.is_told ? EXIT_FAILED : rank_failed(g, st);
    } else if (dcp_group_rank(g) == 0) {
        if (v->json && dcp_group_size(g) == 1)
            fprintf(stderr, "dcp-attn bench merge: %s\n", one_rank_text);
        if (v->json)
            print_json(g, v, &all);
        else
            print_table(g, v, &all);
        rc = finish_stdout(EXIT_DONE);
    }
    dcp__free(all.rows);
    return rc;
}

static int bench_merge(int argc, char **argv)
{
    /* The published form at its best: see src/group/group_mpi.c. */
    setenv("DCP_ATTN_MPI_BLOCKING", "1", 0);
    struct bench_values v = {.iters = -1, .seconds = 2};
    char item[64] = "";
    int n_operands, rc;
    if (!command_parse(&bench_command, argc, argv, &v, &n_operands, &rc)) return rc;
    char why[160] = "";
    if (v.shapes != NULL && !read_shapes(&v, why, sizeof(why)))
        return usage_error(&bench_command, "--shape: '%s' is not right: %s", v.shapes, why);
    const char *const unused = v.shapes != NULL ? sizes_given(&v) : NULL;
    if (unused != NULL)
        return usage_error(&bench_command, "%s and --shape cannot go together: sizes or shapes",
                           unused);
    fill_sizes(&v);
    if (!read_types(&v, item, sizeof(item)))
        return usage_error(&bench_command,
                           "--dtype: '%s' in '%s' is not right: some of f32,bf16,f16", item,
                           v.dtypes);
    if (!read_algos(&v, item, sizeof(item)))
        return usage_error(&bench_command,
                           "--algo: '%s' in '%s' is not right: some of all|" ALGO_CHOICES
                           "|allreduce-temp",
                           item, v.algos);
    if (is_refused(&v)) return EXIT_USAGE;
    if (v.in_place && v.cut == DCP_CUT_NONE)
        return usage_error(&bench_command, "--in-place needs --cut heads or tokens");
    if (v.shapes == NULL && v.min_bytes > v.max_bytes)
        return usage_error(&bench_command, "--min-bytes is above --max-bytes");
    return run_on_ranks(&v.rank, v.rank.ranks, bench_rank_main, &v);
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} benches[] = {{"merge", bench_merge},     {"attend", bench_attend},     {"extend", bench_extend},
               {"product", bench_product}, {"generate", bench_generate}, {"oom", bench_oom}};
enum { N_BENCHES = sizeof(benches) / sizeof(benches[0]) };

int cmd_bench(int argc, char **argv)
{
    static const char usage[] =
        "Usage: dcp-attn bench merge|attend|extend|product|oom|generate [options]\n\n"
        "dcp-attn bench merge --help says more, and so on.\n";
    for (int i = 0; argc > 0 && i < N_BENCHES; i++)
        if (strcmp(argv[0], benches[i].name) == 0) return benches[i].run(argc - 1, argv + 1);
    if (argc > 0 && (strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0)) {
        if (launch_mpi_env_is_first()) fputs(usage, stdout);
        return finish_stdout(EXIT_DONE);
    }
    if (argc > 0)
        fprintf(stderr,
                "dcp-attn bench: '%s' is no bench; there are: merge, attend, extend, product, "
                "generate, oom\n",
                argv[0]);
    else
        fputs(usage, stderr);
    return EXIT_USAGE;
}
