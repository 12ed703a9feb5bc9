/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn bench oom: an extend whose gathered queries and partial do not fit, three ways under one
 * memory cap per rank. */
#include "cli/bench_oom.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/launch.h"
#include "cli/table.h"

enum { N_COLUMNS = 7 };
static const char *const form_names[OOM_FORMS] = {"published, temporaries", "published, in place",
                                                  "streaming operator"};
static const char *const form_keys[OOM_FORMS] = {"temporaries", "in-place", "streaming"};

struct oom_values {
    struct rank_opts rank;
    int64_t tokens, prefix, heads, latent, rope, window, interleave, formula_ranks;
    uint64_t cap, memory;
    bool no_cap, json;
    struct oom_case c;
    struct oom_report *report;
};

#define AT(field) offsetof(struct oom_values, field)
static const struct option_def oom_options[] = {
    {"ranks", 'n', OPT_INT, AT(rank.ranks), "N", 1, 4096, NULL,
     "number of ranks (default 2; under mpirun: as many as it starts)"},
    THREADS_OPTION(struct oom_values, rank),
    {"tokens", 0, OPT_INT, AT(tokens), "T", 1, 1 << 24, NULL, "new tokens (default 16384)"},
    {"prefix", 0, OPT_INT, AT(prefix), "N", 0, 1 << 30, NULL,
     "keys that lie in the cache before them (default 1024)"},
    {"heads", 0, OPT_INT, AT(heads), "H", 1, 65536, NULL, "query heads (default 96)"},
    {"latent", 0, OPT_INT, AT(latent), "D", 1, 65536, NULL, "width of a value (default 512)"},
    {"rope", 0, OPT_INT, AT(rope), "D", 0, 65536, NULL, "columns of a key besides (default 64)"},
    {"window", 0, OPT_INT, AT(window), "W", 0, 1 << 30, NULL,
     "keys that a token sees, a multiple of ranks x interleave; 0 = all before it (default 512: "
     "work in proportion to two cores, shapes of q, partial and result as they are)"},
    {"interleave", 0, OPT_INT, AT(interleave), "I", 1, 1 << 20, NULL,
     "key p belongs to rank (p / I) mod N (default 1)"},
    {"cap", 0, OPT_SIZE, AT(cap), "BYTES", 0, 1e15, NULL,
     "memory of each rank (default: the least power of two that holds the operator)"},
    {"no-cap", 0, OPT_FLAG, AT(no_cap), NULL, 0, 0, NULL, "all forms run, if the machine can"},
    {"memory", 0, OPT_SIZE, AT(memory), "BYTES", 65536, 1e15, NULL,
     "workspace limit of the operator on each rank (default 64M)"},
    {"formula-ranks", 0, OPT_INT, AT(formula_ranks), "N", 1, 4096, NULL,
     "also print bytes by formula for N ranks"},
    COMM_OPTIONS(struct oom_values, rank),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT
static const struct command_def oom_command = {
    "bench oom",
    "",
    0,
    0,
    "The extend that ran accelerators out of memory: T new tokens of absorbed MLA behind a\n"
    "cached prefix, three ways under one memory cap per rank.",
    oom_options,
    sizeof(oom_options) / sizeof(oom_options[0]),
    "The published forms gather the queries of all heads, hold a full partial, and merge it with\n"
    "two full-size temporaries or in place; the streaming operator works in tiles. The cap is a\n"
    "cgroup of each rank where one can be made, and the counted allocator's limit in any case, so\n"
    "that what does not fit is said before the kernel kills. Exit status 0: the operator finished\n"
    "with right rows. Counted bytes and PSS are the largest rank's."};

/* ---- the report ---- */

static void put_bytes(char *c, int64_t n)
{
    if (n < 0)
        snprintf(c, TABLE_CELL_BYTES, "-");
    else
        table_bytes((uint64_t)n, c);
}

static void print_shape(const struct oom_report *rep)
{
    const struct attend_shape *s = &rep->c.shape;
    char a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES];
    struct attend_shape causal = *s;
    causal.window = 0;
    printf(
        "%lld new tokens x %lld heads x %lld of %lld, behind %lld cached keys, on %d ranks of %d "
        "thread%s\n",
        (long long)s->n_tokens, (long long)s->n_heads, (long long)s->value_dim,
        (long long)s->key_dim, (long long)(s->n_keys - s->n_tokens), rep->n_ranks, rep->c.n_threads,
        rep->c.n_threads == 1 ? "" : "s");
    if (s->window > 0)
        printf("each token sees the %lld keys up to its own: %.2f TFLOP, where all keys before it "
               "would be %.1f;\nthe shapes of q, partial and result do not depend on that\n",
               (long long)s->window, attend_data_flops(s) * 1e-12,
               attend_data_flops(&causal) * 1e-12);
    if (rep->c.cap_bytes > 0)
        printf("cap of each rank: %s (%llu bytes), by %s\n", table_bytes(rep->c.cap_bytes, a),
               (unsigned long long)rep->c.cap_bytes, rep->cap_text);
    else
        printf("no cap\n");
    printf("q, result and keys of a rank: %s; workspace limit of the operator: %s\n\n",
           table_bytes((uint64_t)rep->base_bytes, a),
           table_bytes((uint64_t)rep->c.workspace_limit_bytes, b));
}

static void print_forms(const struct oom_report *rep)
{
    static const char *const heads[N_COLUMNS] = {
        "form", "predicted peak", "counted peak", "above q, result, keys", "PSS above",
        "s",    "wrong"};
    char cells[OOM_FORMS + 1][N_COLUMNS][TABLE_CELL_BYTES];
    for (int i = 0; i < N_COLUMNS; i++) snprintf(cells[0][i], TABLE_CELL_BYTES, "%s", heads[i]);
    for (int f = 0; f < OOM_FORMS; f++) {
        const struct oom_result *r = &rep->form[f];
        struct oom_bytes b;
        for (int i = 0; i < N_COLUMNS; i++) snprintf(cells[f + 1][i], TABLE_CELL_BYTES, "-");
        snprintf(cells[f + 1][0], TABLE_CELL_BYTES, "%s", form_names[f]);
        if (oom_predict(&rep->c, (enum oom_form)f, rep->n_ranks, 0, &b) == DCP_OK)
            put_bytes(cells[f + 1][1], b.total);
        if (!r->has_finished) {
            snprintf(cells[f + 1][2], TABLE_CELL_BYTES, "out of memory");
            continue;
        }
        put_bytes(cells[f + 1][2], r->peak_counted);
        put_bytes(cells[f + 1][3], r->peak_counted - rep->base_bytes);
        put_bytes(cells[f + 1][4], r->pss_above);
        snprintf(cells[f + 1][5], TABLE_CELL_BYTES, "%.2f", r->seconds);
        snprintf(cells[f + 1][6], TABLE_CELL_BYTES, "%lld", (long long)r->wrong);
    }
    table_print(stdout, OOM_FORMS + 1, N_COLUMNS, &cells[0][0]);
    for (int f = 0; f < OOM_FORMS; f++)
        if (!rep->form[f].has_finished) printf("\n%s fails: %s\n", form_names[f], rep->form[f].why);
    const struct oom_result *s = &rep->form[OOM_STREAMING];
    if (s->has_finished)
        printf("\nthe operator's workspace: %lld bytes; %lld sampled rows against an oracle in "
               "double: %lld elements wrong, largest error %.1e of the largest value\n",
               (long long)s->workspace_bytes, (long long)s->n_checked, (long long)s->wrong,
               s->worst_error);
}

static void print_formula(const struct oom_report *rep, int n_ranks)
{
    static const char *const heads[N_COLUMNS + 1] = {
        "form",  "q, result, keys", "gathered q",  "partial",
        "merge", "attention",       "peak, bytes", "peak"};
    char cells[OOM_FORMS + 1][N_COLUMNS + 1][TABLE_CELL_BYTES];
    for (int i = 0; i <= N_COLUMNS; i++) snprintf(cells[0][i], TABLE_CELL_BYTES, "%s", heads[i]);
    for (int f = 0; f < OOM_FORMS; f++) {
        struct oom_bytes b;
        if (oom_predict(&rep->c, (enum oom_form)f, n_ranks, 0, &b) != DCP_OK) return;
        snprintf(cells[f + 1][0], TABLE_CELL_BYTES, "%s", form_names[f]);
        put_bytes(cells[f + 1][1], b.q + b.result + b.cache);
        put_bytes(cells[f + 1][2], b.gathered);
        put_bytes(cells[f + 1][3], b.partial);
        put_bytes(cells[f + 1][4], b.merge);
        put_bytes(cells[f + 1][5], b.attend);
        snprintf(cells[f + 1][6], TABLE_CELL_BYTES, "%lld", (long long)b.total);
        put_bytes(cells[f + 1][7], b.total);
    }
    printf("\nthe same on %d ranks, by formula, rank 0:\n", n_ranks);
    table_print(stdout, OOM_FORMS + 1, N_COLUMNS + 1, &cells[0][0]);
}

static void print_json(const struct oom_report *rep, int formula_ranks)
{
    const struct attend_shape *s = &rep->c.shape;
    struct json_out j;
    jout_begin(&j, stdout);
    jout_int(&j, "tokens", s->n_tokens);
    jout_int(&j, "keys", s->n_keys);
    jout_int(&j, "heads", s->n_heads);
    jout_int(&j, "key_dim", s->key_dim);
    jout_int(&j, "value_dim", s->value_dim);
    jout_int(&j, "window", s->window);
    jout_int(&j, "ranks", rep->n_ranks);
    jout_int(&j, "threads", rep->c.n_threads);
    jout_int(&j, "cap_bytes", (int64_t)rep->c.cap_bytes);
    jout_str(&j, "cap", rep->cap_text);
    jout_int(&j, "base_bytes", rep->base_bytes);
    jout_array(&j, "rows");
    for (int f = 0; f < OOM_FORMS; f++) {
        const struct oom_result *r = &rep->form[f];
        struct oom_bytes b;
        jout_object(&j, NULL);
        jout_str(&j, "form", form_keys[f]);
        jout_bool(&j, "finished", r->has_finished);
        if (oom_predict(&rep->c, (enum oom_form)f, rep->n_ranks, 0, &b) == DCP_OK)
            jout_int(&j, "predicted_bytes", b.total);
        if (formula_ranks > 0 &&
            oom_predict(&rep->c, (enum oom_form)f, formula_ranks, 0, &b) == DCP_OK)
            jout_int(&j, "formula_bytes", b.total);
        jout_int(&j, "peak_bytes", r->peak_counted);
        jout_int(&j, "pss_above_bytes", r->pss_above);
        jout_int(&j, "workspace_bytes", r->workspace_bytes);
        jout_num(&j, "seconds", r->seconds);
        jout_int(&j, "wrong", r->wrong);
        jout_str(&j, "error", r->why);
        jout_object_end(&j);
    }
    jout_array_end(&j);
    jout_end(&j);
}

/* ---- the command ---- */

static int oom_rank_main(dcp_group *g, void *ctx)
{
    struct oom_values *v = ctx;
    bool is_agreed = false;
    const dcp_status st = oom_run(g, &v->c, v->report, &is_agreed);
    if (is_agreed) return all_ranks_ok(g, st) ? EXIT_DONE : EXIT_FAILED;
    return st == DCP_OK ? EXIT_DONE : rank_failed(g, st);
}

static int run_and_print(struct oom_values *v)
{
    const int rc = run_on_ranks(&v->rank, v->rank.ranks, oom_rank_main, v);
    if (v->c.cap_bytes > 0) oom_cgroup_sweep(NULL); /* of ranks that were killed */
    const struct oom_report *rep = v->report;
    if (rc != EXIT_DONE) return rc;
    if (rep->n_ranks == 0) return EXIT_DONE; /* a rank of an MPI world that is not the first */
    if (v->json) {
        print_json(rep, (int)v->formula_ranks);
    } else {
        print_shape(rep);
        print_forms(rep);
        if (v->formula_ranks > 0) print_formula(rep, (int)v->formula_ranks);
    }
    const struct oom_result *s = &rep->form[OOM_STREAMING];
    return finish_stdout(s->has_finished && s->wrong == 0 ? EXIT_DONE : EXIT_FAILED);
}

int bench_oom(int argc, char **argv)
{
    struct oom_values v = {.rank = {.deadline_s = 600},
                           .tokens = 16384,
                           .prefix = 1024,
                           .heads = 96,
                           .latent = 512,
                           .rope = 64,
                           .window = 512,
                           .interleave = 1,
                           .memory = (uint64_t)64 << 20};
    int n_operands, rc;
    if (!command_parse(&oom_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (v.rank.ranks == 0) v.rank.ranks = launch_mpi_env_size();
    if (v.rank.ranks == 0) v.rank.ranks = 2;
    if (v.window % (v.rank.ranks * v.interleave) != 0)
        return usage_error(&oom_command, "--window %lld is no multiple of ranks x interleave, %lld",
                           (long long)v.window, (long long)(v.rank.ranks * v.interleave));
    if (v.rank.comm == 1)
        return usage_error(&oom_command,
                           "--comm threads: a cap per rank needs ranks that are processes");
    if (v.cap != 0 && v.no_cap)
        return usage_error(&oom_command, "--cap and --no-cap cannot go together");
    const int64_t threads = v.rank.threads > 0 ? v.rank.threads : dcp__cpu_usable() / v.rank.ranks;
    v.c = (struct oom_case){.shape = {.n_keys = v.prefix + v.tokens,
                                      .n_tokens = v.tokens,
                                      .n_heads = v.heads,
                                      .n_kv_heads = 1,
                                      .key_dim = v.latent + v.rope,
                                      .value_dim = v.latent,
                                      .is_latent = true,
                                      .window = v.window,
                                      .interleave = v.interleave},
                            .cap_bytes = v.cap,
                            .workspace_limit_bytes = (size_t)v.memory,
                            .n_threads = threads > 1 ? (int)threads : 1};
    if (v.cap == 0 && !v.no_cap) {
        struct oom_bytes b;
        if (oom_predict(&v.c, OOM_STREAMING, (int)v.rank.ranks, 0, &b) != DCP_OK) return failed();
        /* Room for what is small beside it: tables, handles, block tables. */
        const uint64_t need = (uint64_t)b.total + ((uint64_t)4 << 20);
        for (v.c.cap_bytes = 1 << 20; v.c.cap_bytes < need;) v.c.cap_bytes *= 2;
    }
    v.report =
        mmap(NULL, sizeof(*v.report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (v.report == MAP_FAILED) {
        (void)dcp__fail(DCP_ERR_NOMEM, "bench oom: no %zu bytes", sizeof(*v.report));
        return failed();
    }
    rc = run_and_print(&v);
    (void)munmap(v.report, sizeof(*v.report));
    return rc;
}
