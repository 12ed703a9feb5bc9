/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn merge: every rank reads the partial that one file holds; the library merges. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/launch.h"
#include "cli/merge_compare.h"
#include "cli/message.h"
#include "cli/result_file.h"
#include "cli/table.h"
#include "engine/safetensors_read.h"

#define MERGE_ALGO_CHOICES ALGO_CHOICES "|allreduce-temp"
#define CUT_CHOICES "heads|tokens|none"

/* With --compare, as cmp and diff have it: 1 says that the results differ, and that alone. */
enum { EXIT_DIFFERS = 1, EXIT_TROUBLE = 2 };

struct merge_values {
    struct rank_opts rank;
    int lse_base; /* -1 = not given */
    int cut, algo, order, nonfinite, out_dtype, wire_dtype;
    uint64_t memory;
    const char *sink, *output, *compare;
    double rtol, atol; /* < 0: of the types */
    bool json;
    char **files; /* one per rank */
    int n_files;
    bool *differs; /* of --compare, in memory that the ranks share with who waits for them */
};

#define AT(field) offsetof(struct merge_values, field)
static const struct option_def merge_options[] = {
    {"lse-base", 0, OPT_ENUM, AT(lse_base), NULL, 0, 0, "e|2", "base of the LSEs (required)"},
    {"output", 'o', OPT_STRING, AT(output), "FILE", 0, 0, NULL,
     "where the result goes (required without --compare)"},
    {"compare", 0, OPT_STRING, AT(compare), "FILE", 0, 0, NULL,
     "a result to compare with: where and why it differs; exit 1 if it does, 2 if it cannot be "
     "told"},
    {"rtol", 0, OPT_FLOAT, AT(rtol), "X", 0, 1e30, NULL,
     "of --compare: relative tolerance (default: f32 1e-5, bf16 2^-7, f16 2^-10)"},
    {"atol", 0, OPT_FLOAT, AT(atol), "X", 0, 1e30, NULL,
     "of --compare: absolute (default rtol times the largest value of this run's row)"},
    {"cut", 0, OPT_ENUM, AT(cut), NULL, 0, 0, CUT_CHOICES,
     "how the ranks share the merging (default heads)"},
    {"algo", 0, OPT_ENUM, AT(algo), NULL, 0, 0, MERGE_ALGO_CHOICES,
     "merge algorithm (default auto)"},
    {"order", 0, OPT_ENUM, AT(order), NULL, 0, 0, "auto|rank|any",
     "order in which partials are summed: rank refuses an --algo that has another, any lets auto "
     "take one (default auto: rank order, or that of --algo)"},
    {"nonfinite", 0, OPT_ENUM, AT(nonfinite), NULL, 0, 0, "zero|propagate|error",
     "NaN and infinities of out in non-empty rows (default zero); an LSE of NaN or +inf makes its "
     "row empty, with error too, and is counted"},
    {"sink", 0, OPT_STRING, AT(sink), "FILE", 0, 0, NULL,
     "safetensors file with sink [H], in the base of the LSEs; the lse written is without it"},
    {"out-dtype", 0, OPT_ENUM, AT(out_dtype), NULL, 0, 0, DTYPE_CHOICES,
     "type of the out written (default auto: the input's, F32 for F64)"},
    {"wire-dtype", 0, OPT_ENUM, AT(wire_dtype), NULL, 0, 0, DTYPE_CHOICES,
     "type of payloads between ranks (default auto: the input's); for alltoall alone: direct sends "
     "none, halving, hierarchical and allreduce send f32"},
    {"memory", 0, OPT_SIZE, AT(memory), "BYTES", 65536, 1e15, NULL,
     "workspace limit of each rank (default 8M)"},
    COMM_OPTIONS(struct merge_values, rank),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def merge_command = {
    "merge",
    "FILE...",
    1,
    4096,
    "Merge partial attention results, one safetensors file per rank: out [T,H,D], lse [T,H],\n"
    "optional kv_len [T]. The file written holds the whole out [T,H,D] and lse [T,H] (F32).",
    merge_options,
    sizeof(merge_options) / sizeof(merge_options[0]),
    "Tensors of each FILE, of the same shapes and types in all of them; others are ignored:\n"
    "  out         F32, F16, BF16, or F64, which is rounded to F32 (values beyond its range are\n"
    "              refused). Written in that type, or as --out-dtype says\n"
    "  lse         the same types, in the base that --lse-base says; -inf where a rank saw no "
    "key.\n"
    "              Written as F32, in the same base, without the sink\n"
    "  kv_len      I64 or I32: how many of the rank's keys a token sees. 0 makes its row empty,\n"
    "              whatever lse holds"};

/* What one rank brings. */
struct merge_rank {
    struct st_file *file;
    const struct st_tensor *out, *lse, *kv_len;
    float *sink;
    int64_t *n_visible; /* kv_len as int64 */
    void *partial, *partial_lse;
    void *merged;
    float *merged_lse;
    dcp_merge *merge;
    bool differs; /* from the file of --compare */
};

/* What must be the same in all files. */
struct merge_card {
    int32_t out_dtype, lse_dtype, has_kv_len;
    int32_t pad;
    int64_t dims[3];
    char path[192];
};

/* Open the rank's own file and check it on its own. */
static dcp_status open_input(const char *path, struct merge_rank *m)
{
    DCP_TRY(st_open(path, &m->file));
    DCP_TRY(st_need_floats(m->file, path, "out", 3, &m->out));
    DCP_TRY(st_need_floats(m->file, path, "lse", 2, &m->lse));
    if (st_find(m->file, "kv_len") != NULL)
        DCP_TRY(st_need_ints(m->file, path, "kv_len", 1, &m->kv_len));
    const int64_t *d = m->out->dims;
    if (m->lse->dims[0] != d[0] || m->lse->dims[1] != d[1])
        return dcp__fail(DCP_ERR_FORMAT, "%s: lse is [%lld,%lld] but out is [%lld,%lld,%lld]", path,
                         (long long)m->lse->dims[0], (long long)m->lse->dims[1], (long long)d[0],
                         (long long)d[1], (long long)d[2]);
    if (m->kv_len != NULL && m->kv_len->dims[0] != d[0])
        return dcp__fail(DCP_ERR_FORMAT, "%s: kv_len is [%lld] but out has %lld tokens", path,
                         (long long)m->kv_len->dims[0], (long long)d[0]);
    return DCP_OK;
}

static void card_text(const struct merge_card *c, char *buf, size_t n_bytes)
{
    snprintf(buf, n_bytes, "%s: out %s [%lld,%lld,%lld], lse %s, %s kv_len", c->path,
             st_dtype_name((enum st_dtype)c->out_dtype), (long long)c->dims[0],
             (long long)c->dims[1], (long long)c->dims[2],
             st_dtype_name((enum st_dtype)c->lse_dtype), c->has_kv_len ? "with" : "without");
}

/* Collective: all files hold the same shapes and types, or the first two that differ are named. */
static dcp_status agree_inputs(dcp_group *g, const char *path, const struct merge_rank *m)
{
    const int n = dcp_group_size(g);
    struct merge_card mine = {.out_dtype = (int32_t)m->out->dtype,
                              .lse_dtype = (int32_t)m->lse->dtype,
                              .has_kv_len = m->kv_len != NULL,
                              .dims = {m->out->dims[0], m->out->dims[1], m->out->dims[2]}};
    struct merge_card *all = NULL;
    snprintf(mine.path, sizeof(mine.path), "%s", path);
    DCP_TRY(dcp__alloc_array((size_t)n, sizeof(*all), "shapes of ranks", (void **)&all));
    dcp_status st = dcp_group_allgather(g, &mine, sizeof(mine), all);
    for (int r = 1; r < n && st == DCP_OK; r++) {
        if (memcmp(&all[r], &all[0], offsetof(struct merge_card, path)) == 0) continue;
        char a[256], b[256];
        card_text(&all[0], a, sizeof(a));
        card_text(&all[r], b, sizeof(b));
        st = dcp__fail(DCP_ERR_MISMATCH, "files do not belong together: %s; %s", a, b);
    }
    dcp__free(all);
    return st;
}

static dcp_status read_sink(const char *path, int64_t n_heads, float **sink_out)
{
    struct st_file *f = NULL;
    const struct st_tensor *t = NULL;
    dcp_status st = st_open(path, &f);
    if (st == DCP_OK) st = st_need_floats(f, path, "sink", 1, &t);
    if (st == DCP_OK && t->dims[0] != n_heads)
        st = dcp__fail(DCP_ERR_FORMAT, "%s: sink is [%lld] but out has %lld heads", path,
                       (long long)t->dims[0], (long long)n_heads);
    if (st == DCP_OK)
        st = dcp__alloc_array((size_t)n_heads, sizeof(float), "sink", (void **)sink_out);
    if (st == DCP_OK) st = st_read_f32(f, t, 0, n_heads, *sink_out);
    st_close(f);
    return st == DCP_OK ? st : dcp__fail(st, "--sink: %s", dcp_last_error());
}

/* This rank's rows and heads of the merged result. */
static dcp_status take_result(dcp_group *g, const struct merge_values *v, struct merge_rank *m,
                              dcp_dtype merged_type)
{
    const int n = dcp_group_size(g), r = dcp_group_rank(g);
    int64_t rows = m->out->dims[0], heads = m->out->dims[1];
    if (v->cut == DCP_CUT_HEADS) {
        const dcp_range own = dcp_cut_range(heads, n, r);
        heads = own.end - own.begin;
    } else if (v->cut == DCP_CUT_TOKENS) {
        const dcp_range own = dcp_cut_range(rows, n, r);
        rows = own.end - own.begin;
    }
    const size_t n_rows = (size_t)rows * (size_t)heads;
    DCP_TRY(dcp__alloc_array(n_rows, (size_t)m->out->dims[2] * dcp_dtype_bytes(merged_type),
                             "merged result", &m->merged));
    return dcp__alloc_array(n_rows, sizeof(float), "merged lse", (void **)&m->merged_lse);
}

static size_t floats_bytes(const struct st_tensor *t)
{
    return (size_t)t->n_elems * dcp_dtype_bytes(st_float_type(t));
}

/* As it lies in the file, F64 as F32. */
static dcp_status read_floats(const struct st_file *f, const struct st_tensor *t, void *dst)
{
    return t->dtype == ST_F64 ? st_read_f32(f, t, 0, t->n_elems, dst)
                              : st_read(f, t, 0, t->n_bytes, dst);
}

/* Local: read what this rank merges; the partial lies in memory that the peers see. */
static dcp_status read_input(dcp_group *g, const struct merge_values *v, struct merge_rank *m,
                             dcp_dtype merged_type)
{
    const int64_t n_tokens = m->out->dims[0];
    DCP_TRY(read_floats(m->file, m->out, m->partial));
    DCP_TRY(read_floats(m->file, m->lse, m->partial_lse));
    if (m->kv_len != NULL) {
        DCP_TRY(
            dcp__alloc_array((size_t)n_tokens, sizeof(int64_t), "kv_len", (void **)&m->n_visible));
        DCP_TRY(st_read_i64(m->file, m->kv_len, 0, n_tokens, m->n_visible));
    }
    if (v->sink != NULL) DCP_TRY(read_sink(v->sink, m->out->dims[1], &m->sink));
    return take_result(g, v, m, merged_type);
}

/* What partials are rounded to on their way; merged_type where they are not. */
static dcp_dtype sent_type(const struct merge_values *v, const dcp_merge_info *info,
                           dcp_dtype merged_type)
{
    const bool is_sent = v->wire_dtype != DCP_DTYPE_DEFAULT && info->algo == DCP_MERGE_ALLTOALL;
    return is_sent ? (dcp_dtype)v->wire_dtype : merged_type;
}

static void print_report(dcp_group *g, const struct merge_values *v, const dcp_merge_info *info,
                         const dcp_merge_stats *stats, int64_t workspace_bytes, int64_t wire_bytes,
                         const struct compare_report *compared)
{
    char cut[16], a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES];
    options_choice(CUT_CHOICES, v->cut, cut, sizeof(cut));
    const bool is_chosen = v->algo == (int)DCP_MERGE_AUTO && info->why != NULL;
    const bool is_rounded = sent_type(v, info, DCP_DTYPE_DEFAULT) != DCP_DTYPE_DEFAULT;
    if (!v->json) {
        fprintf(stderr,
                "merged %d partial%s (%s, %s order, %s, cut by %s%s%s)%s%s\n"
                "%lld non-finite value%s, %lld bad and %lld empty LSE%s\n"
                "workspace %s a rank, %s moved\n%s%s%s",
                dcp_group_size(g), message_s(dcp_group_size(g)), info->algo_name, info->order,
                dcp_group_kind(g), cut, is_rounded ? ", messages in " : "",
                is_rounded ? dcp_dtype_name((dcp_dtype)v->wire_dtype) : "",
                v->output != NULL ? " into " : "", v->output != NULL ? v->output : "",
                (long long)stats->nonfinite_values, message_s(stats->nonfinite_values),
                (long long)stats->lse_bad, (long long)stats->lse_empty, message_s(stats->lse_empty),
                table_bytes((uint64_t)workspace_bytes, a), table_bytes((uint64_t)wire_bytes, b),
                is_chosen ? "algorithm: " : "", is_chosen ? info->why : "", is_chosen ? "\n" : "");
        if (v->compare != NULL) compare_print(compared, stdout);
        return;
    }
    struct json_out j;
    jout_begin(&j, stdout);
    jout_int(&j, "ranks", dcp_group_size(g));
    jout_str(&j, "algo", info->algo_name);
    jout_str(&j, "why", info->why != NULL ? info->why : "");
    jout_str(&j, "order", info->order);
    jout_str(&j, "comm", dcp_group_kind(g));
    jout_str(&j, "cut", cut);
    if (is_rounded) jout_str(&j, "wire_dtype", dcp_dtype_name((dcp_dtype)v->wire_dtype));
    jout_int(&j, "nonfinite_values", stats->nonfinite_values);
    jout_int(&j, "lse_bad", stats->lse_bad);
    jout_int(&j, "lse_empty", stats->lse_empty);
    jout_int(&j, "workspace_bytes", workspace_bytes);
    jout_int(&j, "wire_bytes", wire_bytes);
    if (v->compare != NULL) compare_json(compared, &j, "compare");
    jout_end(&j);
}

/* Collective: merge what the ranks have read. */
static dcp_status run_merge(dcp_group *g, const struct merge_values *v, struct merge_rank *m,
                            dcp_dtype merged_type, dcp_merge_stats *stats)
{
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = m->out->dims[0];
    desc.n_heads = m->out->dims[1];
    desc.dim = m->out->dims[2];
    desc.lse_base = (dcp_lse_base)(v->lse_base + 1);
    desc.cut = (dcp_cut)v->cut;
    desc.out_type = st_float_type(m->out);
    desc.lse_type = st_float_type(m->lse);
    desc.merged_type = merged_type;
    desc.wire_type = (dcp_dtype)v->wire_dtype;
    desc.nonfinite = (dcp_nonfinite)v->nonfinite;
    desc.algo = (dcp_merge_algo)v->algo;
    desc.order = (dcp_merge_order)v->order;
    desc.has_sink = m->sink != NULL;
    desc.has_kv_len = m->n_visible != NULL;
    desc.workspace_limit_bytes = (size_t)v->memory;
    DCP_TRY(dcp_merge_create(g, &desc, &m->merge));
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = desc.max_tokens;
    args.out = m->partial;
    args.lse = m->partial_lse;
    args.kv_len = m->n_visible;
    args.sink = m->sink;
    args.merged = m->merged;
    args.merged_lse = m->merged_lse;
    return dcp_merge_run(m->merge, &args, stats);
}

static int merge_body(dcp_group *g, const struct merge_values *v, struct merge_rank *m)
{
    const char *path = v->files[dcp_group_rank(g)];
    if (!all_ranks_ok(g, open_input(path, m))) return EXIT_FAILED;
    dcp_status st = agree_inputs(g, path, m);
    if (st != DCP_OK) return rank_failed(g, st);
    const dcp_dtype merged_type =
        v->out_dtype != 0 ? (dcp_dtype)v->out_dtype : st_float_type(m->out);

    st = dcp_group_alloc(g, floats_bytes(m->out), &m->partial);
    if (st == DCP_OK) st = dcp_group_alloc(g, floats_bytes(m->lse), &m->partial_lse);
    if (st != DCP_OK) return rank_failed(g, st);
    if (!all_ranks_ok(g, read_input(g, v, m, merged_type))) return EXIT_FAILED;

    dcp_merge_stats stats = {0};
    dcp_merge_info info = {0};
    int64_t workspace_bytes, wire_bytes, unused;
    st = run_merge(g, v, m, merged_type, &stats);
    if (st == DCP_OK) {
        dcp_merge_get_info(m->merge, &info);
        st = sum_and_max(g, (int64_t)info.workspace_bytes, &unused, &workspace_bytes);
    }
    if (st == DCP_OK) st = sum_and_max(g, stats.wire_bytes, &wire_bytes, &unused);
    if (st != DCP_OK) return rank_failed(g, st);

    const struct result res = {.cut = (dcp_cut)v->cut,
                               .n_tokens = m->out->dims[0],
                               .n_heads = m->out->dims[1],
                               .dim = m->out->dims[2],
                               .dtype = merged_type,
                               .out = m->merged,
                               .lse = m->merged_lse};
    int rc = v->output != NULL ? result_write(g, v->output, &res) : EXIT_DONE;
    struct compare_report compared = {.is_within = true};
    if (rc == EXIT_DONE && v->compare != NULL) {
        const struct compare_input in = {.path = v->compare,
                                         .rtol = v->rtol,
                                         .atol = v->atol,
                                         .files = v->files,
                                         .sink = m->sink,
                                         .base = (dcp_lse_base)(v->lse_base + 1),
                                         .cut = res.cut,
                                         .n_tokens = res.n_tokens,
                                         .n_heads = res.n_heads,
                                         .dim = res.dim,
                                         .dtype = merged_type,
                                         .wire = sent_type(v, &info, merged_type),
                                         .merged = m->merged,
                                         .merged_lse = m->merged_lse};
        rc = merge_compare(g, &in, &compared);
    }
    if (rc != EXIT_DONE) return rc;
    if (dcp_group_rank(g) == 0) {
        print_report(g, v, &info, &stats, workspace_bytes, wire_bytes, &compared);
        rc = finish_stdout(EXIT_DONE);
    }
    m->differs = rc == EXIT_DONE && !compared.is_within;
    return rc;
}

static int merge_rank_main(dcp_group *g, void *ctx)
{
    const struct merge_values *v = ctx;
    struct merge_rank m = {0};
    int rc = merge_body(g, v, &m);
    if (rc == EXIT_FAILED && v->compare != NULL) rc = EXIT_TROUBLE;
    if (m.differs) rc = EXIT_DIFFERS;
    /* Rank 0 has told it; the ranks of an MPI world share no memory. */
    if (m.differs && (dcp_group_rank(g) == 0 || strcmp(dcp_group_kind(g), "mpi") == 0))
        *v->differs = true;
    dcp_merge_destroy(m.merge);
    dcp_group_free(g, m.partial_lse);
    dcp_group_free(g, m.partial);
    dcp__free(m.merged_lse);
    dcp__free(m.merged);
    dcp__free(m.sink);
    dcp__free(m.n_visible);
    st_close(m.file);
    return rc;
}

int cmd_merge(int argc, char **argv)
{
    struct merge_values v = {.lse_base = -1, .rtol = -1, .atol = -1};
    int rc;
    if (!command_parse(&merge_command, argc, argv, &v, &v.n_files, &rc)) return rc;
    if (v.lse_base < 0)
        return usage_error(&merge_command, "--lse-base e or --lse-base 2 must be given: a wrong "
                                           "base gives wrong results and no error");
    if (v.compare == NULL && (v.rtol >= 0 || v.atol >= 0))
        return usage_error(&merge_command, "%s is of --compare, which is not given",
                           v.rtol >= 0 ? "--rtol" : "--atol");
    if (v.output == NULL && v.compare == NULL)
        return usage_error(&merge_command, "-o FILE must be given, or --compare FILE");
    v.files = argv;
    char algo[24];
    options_choice(MERGE_ALGO_CHOICES, v.algo, algo, sizeof(algo));
    if (v.order == DCP_MERGE_ORDER_RANK && v.algo != DCP_MERGE_AUTO && v.algo != DCP_MERGE_DIRECT &&
        v.algo != DCP_MERGE_ALLTOALL)
        return usage_error(
            &merge_command,
            "--order rank: --algo %s sums in another order; direct and alltoall keep "
            "rank order",
            algo);
    if (v.algo == DCP_MERGE_HALVING && v.n_files > 1024)
        return usage_error(&merge_command, "--algo halving takes up to 1024 ranks, not %d",
                           v.n_files);
    const int world = launch_mpi_env_size();
    char comm[16];
    options_choice(COMM_CHOICES, v.rank.comm, comm, sizeof(comm));
    if (world > 0 && world != v.n_files && (v.rank.comm == 0 || strcmp(comm, "mpi") == 0))
        return usage_error(&merge_command,
                           "%d file%s for %d rank%s of mpirun: there must be one file per rank",
                           v.n_files, message_s(v.n_files), world, message_s(world));
    for (int i = 0; i < v.n_files; i++)
        if (would_replace(&merge_command, "-o", v.output, v.files[i])) return EXIT_USAGE;
    if (would_replace(&merge_command, "-o", v.output, v.sink) ||
        would_replace(&merge_command, "-o", v.output, v.compare))
        return EXIT_USAGE;
    if (v.compare == NULL) return run_on_ranks(&v.rank, v.n_files, merge_rank_main, &v);
    v.differs =
        mmap(NULL, sizeof(*v.differs), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (v.differs == MAP_FAILED) {
        (void)dcp__fail(DCP_ERR_NOMEM, "no memory that ranks share: %s", strerror(errno));
        (void)failed();
        return EXIT_TROUBLE;
    }
    rc = run_on_ranks(&v.rank, v.n_files, merge_rank_main, &v);
    /* A rank that was killed, or a launch that failed, is no difference. */
    if (rc == EXIT_DIFFERS && !*v.differs) rc = EXIT_TROUBLE;
    (void)munmap(v.differs, sizeof(*v.differs));
    return rc;
}
