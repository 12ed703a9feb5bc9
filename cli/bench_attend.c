/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn bench attend | extend | product: sharded attention and the products on quantised weights
 * beside what the machine could do with the same bytes and the same arithmetic. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/cpu_priv.h"
#include "base/status_priv.h"
#include "cli/bench_attend_report.h"
#include "cli/bench_list.h"
#include "cli/common.h"

/* Cases of a bench, by what they share: the table of names below. */
enum { GQA_DECODE, MLA_DECODE, GQA_EXTEND, MLA_EXTEND, PRODUCT, N_CASES };
static const char *const case_names[N_CASES] = {"gqa-decode", "mla-decode", "gqa-extend",
                                                "mla-extend", "product"};

struct attend_values {
    /* as given */
    const char *cases, *keys_text, *tokens_text, *ranks_text, *threads_text, *isa_text, *dtypes,
        *types_text;
    double factor, seconds, deadline_s;
    int64_t heads, kv_heads, head_dim, latent, rope, interleave, window, page, iters, product_k;
    uint64_t memory, cold, product_bytes;
    int comm, algo;
    bool exact, json;
    /* read from the texts */
    struct bench_list keys, tokens, ranks, threads, isas, types;
    dcp_dtype kv_types[BENCH_MAX_ITEMS];
    int n_kv_types;
    bool wanted[N_CASES];
    struct bench_lines *lines;
};

#define ATTEND_CASES "gqa-decode,mla-decode,product"
#define EXTEND_CASES "gqa-extend,mla-extend"

/* Options by what they are of: a command has those of its cases, and those of every run. */
#define AT(field) offsetof(struct attend_values, field)
static const struct option_def attention_options[] = {
    {"case", 0, OPT_STRING, AT(cases), "LIST", 0, 0, NULL,
     "some of gqa-decode, mla-decode, gqa-extend, mla-extend, product (default " ATTEND_CASES ")"},
    {"keys", 'k', OPT_STRING, AT(keys_text), "LIST", 0, 0, NULL,
     "keys of the sequence, new tokens included: 32K, 1K,4K or 1K..128K (default 32K)"},
    {"tokens", 0, OPT_STRING, AT(tokens_text), "LIST", 0, 0, NULL,
     "new tokens of a call (default decode 1, mla-decode 1,2, extend 512)"},
    {"dtype", 0, OPT_STRING, AT(dtypes), "LIST", 0, 0, NULL,
     "types of keys and values: f32, f16, bf16, int8, fp8 (default bf16)"},
    {"heads", 0, OPT_INT, AT(heads), "H", 1, 1e6, NULL, "query heads (default gqa 32, mla 96)"},
    {"kv-heads", 0, OPT_INT, AT(kv_heads), "H", 1, 1e6, NULL, "gqa: KV heads (default 8)"},
    {"head-dim", 0, OPT_INT, AT(head_dim), "D", 1, 65536, NULL,
     "gqa: width of a head (default 128)"},
    {"latent", 0, OPT_INT, AT(latent), "D", 1, 65536, NULL, "mla: width of a value (default 512)"},
    {"rope", 0, OPT_INT, AT(rope), "D", 0, 65536, NULL,
     "mla: columns of a key besides (default 64)"},
    {"window", 0, OPT_INT, AT(window), "W", 1, 9e15, NULL, "keys that a token sees (default all)"},
    {"interleave", 0, OPT_INT, AT(interleave), "I", 1, 1 << 30, NULL,
     "key p belongs to rank (p / I) mod N (default 1)"},
    {"page", 0, OPT_INT, AT(page), "TOKENS", 32, 1 << 20, NULL,
     "tokens of a page of the cache, a multiple of 32 (default: the cache's, 64 to 1024 by keys)"},
    {"algo", 0, OPT_ENUM, AT(algo), NULL, 0, 0, ALGO_CHOICES, "merge algorithm (default auto)"},
    {"memory", 0, OPT_SIZE, AT(memory), "BYTES", 65536, 1e15, NULL,
     "workspace limit of each rank (default 64M)"},
    {"cold", 0, OPT_SIZE, AT(cold), "BYTES", 0, 1e13, NULL,
     "keys are held in as many copies as make this, so that each run reads memory; 0 = one copy "
     "(default 1G)"},
};
static const struct option_def product_options[] = {
    {"types", 0, OPT_STRING, AT(types_text), "LIST", 0, 0, NULL,
     "product: types of the matrix (default Q8_0,Q4_1)"},
    {"product-bytes", 0, OPT_SIZE, AT(product_bytes), "BYTES", 1024, 1e12, NULL,
     "product: bytes of the matrix (default 256M)"},
    {"product-k", 0, OPT_INT, AT(product_k), "K", 256, 1 << 20, NULL,
     "product: elements of a row, a multiple of 256 (default 2048)"},
    {"exact", 0, OPT_FLAG, AT(exact), NULL, 0, 0, NULL,
     "product: activations stay f32 (default: rounded to 16 bits in blocks where kernels do)"},
};
static const struct option_def run_options[] = {
    {"factor", 0, OPT_FLOAT, AT(factor), "F", 1.01, 1e6, NULL,
     "from one number of a list A..B to the next, B at the end (default 4)"},
    {"ranks", 'n', OPT_STRING, AT(ranks_text), "LIST", 0, 0, NULL,
     "numbers of ranks, one after the other (default 1; under mpirun: the world)"},
    {"threads", 't', OPT_STRING, AT(threads_text), "LIST", 0, 0, NULL,
     "threads of each rank (default: usable CPUs shared out)"},
    {"isa", 0, OPT_STRING, AT(isa_text), "LIST", 0, 0, NULL,
     "highest levels, one after the other: scalar,avx2,avx512,amx (default: the CPU's)"},
    {"iters", 0, OPT_INT, AT(iters), "N", 0, BENCH_MAX_ROUNDS, NULL,
     "rounds; 0 creates and reports memory only (default: by --time)"},
    {"time", 0, OPT_FLOAT, AT(seconds), "SECONDS", 0.001, 86400, NULL,
     "for a line of the table, roofs included (default 2; at least 3 rounds, 2 where one takes "
     "over 4 s)"},
    {"comm", 0, OPT_ENUM, AT(comm), NULL, 0, 0, COMM_CHOICES,
     "how ranks meet (default auto: mpi under mpirun, else shm: processes)"},
    {"deadline", 0, OPT_FLOAT, AT(deadline_s), "SECONDS", 0.001, 86400, NULL,
     "longest wait for another rank (default 120)"},
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT
enum {
    N_ATTENTION_OPTIONS = sizeof(attention_options) / sizeof(attention_options[0]),
    N_PRODUCT_OPTIONS = sizeof(product_options) / sizeof(product_options[0]),
    N_RUN_OPTIONS = sizeof(run_options) / sizeof(run_options[0]),
    N_OPTIONS = N_ATTENTION_OPTIONS + N_PRODUCT_OPTIONS + N_RUN_OPTIONS
};

#define NOTES(who, read, more, error)                                                              \
    who " and the roofs take turns in the same rounds, on the same CPUs; an iteration's time is\n" \
        "from the first rank's start to the last one's end, so that it holds the turns of ranks "  \
        "that\nshare a CPU.\n"                                                                     \
        "  % read      median time of a plain read of the same bytes (" read "; the faster of\n"   \
        "              its loops) over the median time: 100 is as fast as that read. The GB/s "    \
        "above "                                                                                   \
        "the\n              table are the best of the largest shapes' reads, not a median\n"       \
        "  % peak      multiply-adds per second, by the median time, over the median of what the " \
        "matrix\n              or vector units reach on random data in the same rounds, "          \
        "whichever of the\n              machine's is fastest (it is named); the GFLOP/s above "   \
        "the "                                                                                     \
        "table are its best\n"                                                                     \
        "  !           other work had the CPUs: the peak's median is below 0.85 of the best of\n"  \
        "              its rounds or 0.7 of the best of all, or a median is more than twice its\n" \
        "              minimum; fractions say little then\n" more                                  \
        "  workspace   bytes that create reports; extra: counted allocator's high-water mark "     \
        "over\n              creation and a run; PSS: growth of the proportional set size; "       \
        "largest\n              rank's\n"                                                          \
        "  error       largest error of an output over " error "\n"                                \
        "  wrong       sampled elements beyond what the arithmetic allows, by an oracle in double"
#define ATTENTION_NOTES                                                                            \
    "  g/p/m       shares of the time: gather of queries, partial attention, merge; waiting for\n" \
    "              other ranks lies in the first and the last\n"                                   \
    "  page        tokens of a page of the cache\n"
#define LEVEL_NOTES "  isa         the level that the kernel is written for\n"

static const struct bench_command {
    const char *name, *summary, *notes;
    const char *cases; /* default */
    int first, last;   /* those that --case may name */
} commands[] = {
    {"bench attend",
     "Time one-token attention over a sharded cache (GQA and absorbed MLA) and one-token\n"
     "products on quantised weights, against a plain read of the same bytes and the machine's\n"
     "matrix peak.",
     NOTES("Attention", "all ranks' keys and values, or the matrix", LEVEL_NOTES ATTENTION_NOTES,
           "the largest value (product: over\n              the rms of the sums of |w|);"),
     ATTEND_CASES, GQA_DECODE, PRODUCT},
    {"bench extend",
     "Time the attention of a chunk of new tokens over a sharded cache (GQA and absorbed\n"
     "MLA), against the machine's matrix peak and a plain read of the same bytes.",
     NOTES("Attention", "all ranks' keys and values", LEVEL_NOTES ATTENTION_NOTES,
           "the largest value;"),
     EXTEND_CASES, GQA_EXTEND, MLA_EXTEND},
    {"bench product",
     "Time one-token products on quantised weights, against a plain read of the same bytes.",
     NOTES("Products", "the matrix", LEVEL_NOTES, "the rms of the sums of |w|;"), "product",
     PRODUCT, PRODUCT},
};

/* The command as the parser wants it; options [N_OPTIONS] are the caller's. */
static struct command_def define(const struct bench_command *c, struct option_def *options)
{
    size_t n = 0;
    for (int i = 0; i < N_ATTENTION_OPTIONS && c->first < PRODUCT; i++) {
        struct option_def *const o = &options[n++];
        *o = attention_options[i];
        if (c->last == PRODUCT) continue;
        if (strcmp(o->name, "case") == 0)
            o->help = "some of gqa-extend, mla-extend (default " EXTEND_CASES ")";
        if (strcmp(o->name, "tokens") == 0) o->help = "new tokens of a call (default 512)";
    }
    for (int i = 0; i < N_PRODUCT_OPTIONS && c->last == PRODUCT; i++)
        options[n++] = product_options[i];
    for (int i = 0; i < N_RUN_OPTIONS; i++) options[n++] = run_options[i];
    return (struct command_def){c->name, "", 0, 0, c->summary, options, n, c->notes};
}

/* ---- texts of options ---- */

static int64_t find_case(const char *name)
{
    for (int i = 0; i < N_CASES; i++)
        if (strcmp(case_names[i], name) == 0) return i;
    return -1;
}
static int64_t find_isa(const char *name)
{
    dcp_isa isa;
    if (strcmp(name, "auto") == 0) return 0;
    return dcp__isa_parse(name, &isa) == DCP_OK ? (int64_t)isa : -1;
}
static int64_t find_dtype(const char *name)
{
    for (int t = DCP_F32; t <= DCP_FP8_E4M3; t++)
        if (strcmp(dcp_dtype_name((dcp_dtype)t), name) == 0) return t;
    return -1;
}
static int64_t find_type(const char *name)
{
    for (int i = 0; i < bench_product_types(); i++)
        if (strcmp(bench_product_type(i), name) == 0) return i;
    return -1;
}

/* An option that is not right: its text, and what it may be. */
struct bad_text {
    const char *option, *text, *want;
};
#define LISTS "numbers with K, M, G, between commas, or a..b in steps of --factor; each "

static bool read_texts(const struct bench_command *cmd, struct attend_values *v,
                       struct bad_text *bad)
{
    struct bench_list cases = {0}, dtypes = {0};
    *bad = (struct bad_text){"--case", v->cases,
                             cmd->first == GQA_EXTEND
                                 ? "some of gqa-extend,mla-extend"
                                 : "some of gqa-decode,mla-decode,gqa-extend,mla-extend,product"};
    if (!bench_read_names(v->cases, find_case, &cases) || cases.n == 0) return false;
    for (int i = 0; i < cases.n; i++) {
        if (cases.at[i] < cmd->first || cases.at[i] > cmd->last) return false;
        v->wanted[cases.at[i]] = true;
    }
    const struct {
        const char *option, *text, *want;
        int64_t high;
        struct bench_list *list;
        bool is_needed;
    } lists[] = {
        {"--keys", v->keys_text, LISTS "1 to 4G", (int64_t)1 << 32, &v->keys, true},
        {"--tokens", v->tokens_text, LISTS "1 to 16M", 1 << 24, &v->tokens, false},
        {"--ranks", v->ranks_text, LISTS "1 to 4096", 4096, &v->ranks, false},
        {"--threads", v->threads_text, LISTS "1 to 64", 64, &v->threads, false},
    };
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        *bad = (struct bad_text){lists[i].option, lists[i].text, lists[i].want};
        if (!bench_read_list(lists[i].text, v->factor, 1, lists[i].high, lists[i].list) ||
            (lists[i].is_needed && lists[i].list->n == 0))
            return false;
    }
    *bad = (struct bad_text){"--isa", v->isa_text, "some of scalar,avx2,avx512,amx"};
    if (!bench_read_names(v->isa_text, find_isa, &v->isas)) return false;
    *bad = (struct bad_text){"--dtype", v->dtypes, "some of bf16,f16,f32,int8,fp8"};
    if (!bench_read_names(v->dtypes, find_dtype, &dtypes) || dtypes.n == 0) return false;
    for (int i = 0; i < dtypes.n; i++) v->kv_types[v->n_kv_types++] = (dcp_dtype)dtypes.at[i];
    *bad = (struct bad_text){"--types", v->types_text, "types of weights, such as Q8_0,Q4_1,F32"};
    if (!bench_read_names(v->types_text, find_type, &v->types)) return false;
    *bad = (struct bad_text){"--product-k", NULL, "a multiple of 256"};
    if (v->product_k % 256 != 0) return false;
    if (v->ranks.n == 0) v->ranks = (struct bench_list){1, {0}};
    if (v->threads.n == 0) v->threads = (struct bench_list){1, {0}};
    if (v->isas.n == 0) v->isas = (struct bench_list){1, {0}};
    return true;
}

/* ---- ranks ---- */

static void shape_of(const struct attend_values *v, int kind, int64_t keys, int64_t tokens,
                     struct attend_shape *s)
{
    const bool is_mla = kind == MLA_DECODE || kind == MLA_EXTEND;
    memset(s, 0, sizeof(*s));
    s->n_keys = keys;
    s->n_tokens = tokens < keys ? tokens : keys;
    s->n_heads = v->heads != 0 ? v->heads : is_mla ? 96 : 32;
    s->n_kv_heads = is_mla ? 1 : v->kv_heads;
    s->key_dim = is_mla ? v->latent + v->rope : v->head_dim;
    s->value_dim = is_mla ? v->latent : v->head_dim;
    s->is_latent = is_mla;
    s->window = v->window;
    s->interleave = v->interleave;
    s->page_tokens = v->page;
}

/* Rank 0 writes what all ranks know. */
static void keep(struct bench_lines *all, const struct bench_rank *r, const struct bench_line *line)
{
    if (r->rank != 0) return;
    if (all->n == BENCH_MAX_LINES) {
        all->n_lost++;
        return;
    }
    all->line[all->n++] = *line;
}

static dcp_status run_attention(struct bench_rank *r, const struct attend_values *v, int kind)
{
    static const struct bench_list one = {1, {1}}, one_and_two = {2, {1, 2}}, chunk = {1, {512}};
    const struct bench_list *tokens = v->tokens.n > 0      ? &v->tokens
                                      : kind == GQA_DECODE ? &one
                                      : kind == MLA_DECODE ? &one_and_two
                                                           : &chunk;
    for (int t = 0; t < v->n_kv_types; t++) {
        for (int k = 0; k < v->keys.n; k++) {
            for (int i = 0; i < tokens->n; i++) {
                struct attend_case c = {.dtype = v->kv_types[t],
                                        .workspace_limit_bytes = (size_t)v->memory,
                                        .cold_bytes = (size_t)v->cold,
                                        .algo = (dcp_merge_algo)v->algo};
                struct bench_line line = {.keys = v->keys.at[k]};
                shape_of(v, kind, v->keys.at[k], tokens->at[i], &c.shape);
                line.tokens = c.shape.n_tokens;
                snprintf(line.name, sizeof(line.name), "%s", case_names[kind]);
                snprintf(line.dtype, sizeof(line.dtype), "%s", dcp_dtype_name(c.dtype));
                DCP_TRY(bench_attend_case(r, &c, &line));
                keep(v->lines, r, &line);
            }
        }
    }
    return DCP_OK;
}

static dcp_status run_products(struct bench_rank *r, const struct attend_values *v)
{
    for (int t = 0; t < v->types.n; t++) {
        const struct product_case c = {.type = (int)v->types.at[t],
                                       .n_bytes = (int64_t)v->product_bytes,
                                       .k = v->product_k,
                                       .is_exact = v->exact};
        struct bench_line line = {0};
        snprintf(line.name, sizeof(line.name), "%s", case_names[PRODUCT]);
        DCP_TRY(bench_product_case(r, &c, &line));
        keep(v->lines, r, &line);
    }
    return DCP_OK;
}

static dcp_status run_cases(struct bench_rank *r, const struct attend_values *v)
{
    for (int kind = 0; kind < PRODUCT; kind++)
        if (v->wanted[kind]) DCP_TRY(run_attention(r, v, kind));
    return v->wanted[PRODUCT] ? run_products(r, v) : DCP_OK;
}

static dcp_status run_threads(dcp_group *g, const struct attend_values *v, int n_threads,
                              bool *is_told_out)
{
    struct bench_rank r;
    char pinning[96] = "";
    memset(&r, 0, sizeof(r));
    r.iters = v->iters;
    r.seconds = v->seconds;
    dcp_status st = bench_rank_init(&r, g, n_threads, pinning, sizeof(pinning));
    if (st == DCP_OK) st = run_cases(&r, v);
    if (st == DCP_OK && r.rank == 0) {
        struct bench_lines *all = v->lines;
        snprintf(all->pinning, sizeof(all->pinning), "%s", pinning);
        for (int unit = 0; unit < BENCH_ROOF_COUNT; unit++) {
            if (r.roof_GFLOPs[unit] <= all->roof_GFLOPs[unit]) continue;
            all->roof_GFLOPs[unit] = r.roof_GFLOPs[unit];
            if (all->roof_GFLOPs[unit] > all->roof_GFLOPs[all->best_unit]) all->best_unit = unit;
        }
    }
    *is_told_out = r.is_told;
    bench_rank_fini(&r);
    return st;
}

static int attend_rank_main(dcp_group *g, void *ctx)
{
    const struct attend_values *v = ctx;
    for (int i = 0; i < v->threads.n; i++) {
        bool is_told = false;
        const dcp_status st = run_threads(g, v, (int)v->threads.at[i], &is_told);
        if (st != DCP_OK) return is_told ? EXIT_FAILED : rank_failed(g, st);
    }
    return EXIT_DONE;
}

/* MPI ranks cannot report to a parent: rank 0 prints. */
static int mpi_rank_main(dcp_group *g, void *ctx)
{
    const struct attend_values *v = ctx;
    const int rc = attend_rank_main(g, ctx);
    if (rc == EXIT_DONE && dcp_group_rank(g) == 0 && strcmp(dcp_group_kind(g), "mpi") == 0) {
        bench_report(v->lines, v->json);
        v->lines->n = 0;
        return finish_stdout(EXIT_DONE);
    }
    return rc;
}

static int run_all(struct attend_values *v)
{
    bench_report_begin(v->lines);
    char saved[32] = "";
    const char *env = getenv("DCP_ATTN_ISA");
    if (env != NULL) snprintf(saved, sizeof(saved), "%s", env);
    for (int i = 0; i < v->isas.n; i++) {
        for (int n = 0; n < v->ranks.n; n++) {
            const struct rank_opts opts = {
                .comm = v->comm, .deadline_s = v->deadline_s, .isa = (int)v->isas.at[i]};
            if (opts.isa == 0 && saved[0] == '\0') (void)unsetenv("DCP_ATTN_ISA");
            const int rc = run_on_ranks(&opts, v->ranks.at[n], mpi_rank_main, v);
            if (rc != EXIT_DONE) return rc;
        }
    }
    if (v->lines->n == 0) return EXIT_DONE; /* printed by rank 0 of an MPI world */
    bench_report(v->lines, v->json);
    return finish_stdout(EXIT_DONE);
}

static int run_command(const struct bench_command *command, int argc, char **argv)
{
    struct option_def options[N_OPTIONS];
    const struct command_def def = define(command, options), *const cmd = &def;
    struct attend_values v = {.cases = command->cases,
                              .keys_text = "32K",
                              .factor = 4,
                              .dtypes = "bf16",
                              .types_text = "Q8_0,Q4_1",
                              .kv_heads = 8,
                              .head_dim = 128,
                              .latent = 512,
                              .rope = 64,
                              .interleave = 1,
                              .cold = (uint64_t)1 << 30,
                              .product_bytes = (uint64_t)256 << 20,
                              .product_k = 2048,
                              .iters = -1,
                              .seconds = 2,
                              .deadline_s = 120};
    int n_operands, rc;
    if (!command_parse(cmd, argc, argv, &v, &n_operands, &rc)) return rc;
    struct bad_text bad;
    if (!read_texts(command, &v, &bad)) {
        if (bad.text == NULL)
            return usage_error(cmd, "%s %lld is not right: %s", bad.option, (long long)v.product_k,
                               bad.want);
        return usage_error(cmd, "%s: '%s' is not right: %s", bad.option, bad.text, bad.want);
    }
    if (v.tokens.n > 0 && v.keys.n > 0) {
        int64_t most = v.tokens.at[0], least = v.keys.at[0];
        for (int i = 1; i < v.tokens.n; i++) most = v.tokens.at[i] > most ? v.tokens.at[i] : most;
        for (int i = 1; i < v.keys.n; i++) least = v.keys.at[i] < least ? v.keys.at[i] : least;
        if (most > least)
            return usage_error(cmd,
                               "--tokens %lld is more than --keys %lld: keys count all, new "
                               "tokens included",
                               (long long)most, (long long)least);
    }
    if (v.page % 32 != 0)
        return usage_error(cmd, "--page %lld is no multiple of 32", (long long)v.page);
    if (v.heads % v.kv_heads != 0 && v.heads != 0 && (v.wanted[GQA_DECODE] || v.wanted[GQA_EXTEND]))
        return usage_error(cmd, "--heads %lld is no multiple of --kv-heads %lld",
                           (long long)v.heads, (long long)v.kv_heads);
    v.lines =
        mmap(NULL, sizeof(*v.lines), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (v.lines == MAP_FAILED) {
        (void)dcp__fail(DCP_ERR_NOMEM, "bench: no %zu bytes for its lines", sizeof(*v.lines));
        return failed();
    }
    rc = run_all(&v);
    (void)munmap(v.lines, sizeof(*v.lines));
    return rc;
}

int bench_attend(int argc, char **argv)
{
    return run_command(&commands[0], argc, argv);
}
int bench_extend(int argc, char **argv)
{
    return run_command(&commands[1], argc, argv);
}
int bench_product(int argc, char **argv)
{
    return run_command(&commands[2], argc, argv);
}
