/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn attend: every rank stores the keys it owns in a cache of its own and brings the queries
 * of its own heads; the library attends and merges. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/message.h"
#include "cli/result_file.h"
#include "cli/table.h"
#include "engine/safetensors_read.h"

struct attend_values {
    struct rank_opts rank;
    bool causal, json;
    double scale, softcap;
    int64_t window, interleave, latent, tp;
    int kv_dtype, algo, nonfinite;
    uint64_t memory;
    const char *output, *input, *project;
};

#define AT(field) offsetof(struct attend_values, field)
static const struct option_def attend_options[] = {
    {"output", 'o', OPT_STRING, AT(output), "FILE", 0, 0, NULL, "where the result goes (required)"},
    RANKS_OPTION(struct attend_values, rank),
    {"causal", 0, OPT_FLAG, AT(causal), NULL, 0, 0, NULL,
     "a query sees keys up to its own position"},
    {"scale", 0, OPT_FLOAT, AT(scale), "X", 1e-30, 1e30, NULL,
     "factor of q k (default 1 / sqrt(Dk))"},
    {"window", 0, OPT_INT, AT(window), "W", 1, 9e15, NULL,
     "a query at p sees keys after p - W only (default: all)"},
    {"softcap", 0, OPT_FLOAT, AT(softcap), "C", 1e-30, 1e30, NULL,
     "scores become C tanh(score / C) (default: none)"},
    {"latent", 0, OPT_INT, AT(latent), "D", 1, 1 << 20, NULL,
     "v is the first D columns of k (absorbed MLA); FILE then has no v"},
    {"interleave", 0, OPT_INT, AT(interleave), "I", 1, 1 << 30, NULL,
     "key p belongs to rank (p / I) mod N (default 1)"},
    {"tp", 0, OPT_INT, AT(tp), "N", 1, 4096, NULL,
     "KV heads over N groups of ranks, keys over the ranks of a group (default 1)"},
    {"project", 0, OPT_STRING, AT(project), "FILE", 0, 0, NULL,
     "its tensor project [H,D,P] maps each head's D values to P, before the merge"},
    {"kv-dtype", 0, OPT_ENUM, AT(kv_dtype), NULL, 0, 0, KV_DTYPE_CHOICES,
     "type of the cache (default auto: that of k and v where they have one, else f32)"},
    {"algo", 0, OPT_ENUM, AT(algo), NULL, 0, 0, ALGO_CHOICES, "merge algorithm (default auto)"},
    {"nonfinite", 0, OPT_ENUM, AT(nonfinite), NULL, 0, 0, "zero|error",
     "partial results that are NaN or infinite are left out and counted, or nothing is written "
     "(default zero)"},
    {"memory", 0, OPT_SIZE, AT(memory), "BYTES", 65536, 1e15, NULL,
     "workspace limit of each rank (default 64M)"},
    THREADS_OPTION(struct attend_values, rank),
    BIND_OPTION(struct attend_values, rank),
    COMM_OPTIONS(struct attend_values, rank),
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def attend_command = {
    "attend",
    "FILE",
    1,
    1,
    "Attention over keys that are sharded by token: q [T,H,Dk], k [L,Hkv,Dk], v [L,Hkv,D],\n"
    "optional q_pos [T] and sink [H], from one safetensors file. Writes out [T,H,D] and lse\n"
    "[T,H], F32, natural logarithm.",
    attend_options,
    sizeof(attend_options) / sizeof(attend_options[0]),
    "Tensors of FILE; others in it are ignored:\n"
    "  q, k, v     F32, F16, BF16, or F64, which is rounded to F32 (values beyond its range are\n"
    "              refused)\n"
    "  q_pos       I64 or I32: the positions of the queries; a negative one is padding: out 0 and\n"
    "              lse -inf. Without it they are the last T of the L positions\n"
    "  sink        types of q: natural logarithm of what joins each head's divisor of out; -inf =\n"
    "              none. lse is without it\n"
    "NaN or infinity in q, k or v, or finite values whose sums leave float32, make partial\n"
    "results that are neither; left out is such a value, taken as 0, and where its LSE is one all\n"
    "that a rank holds for that row and head. How many is said on stderr and with --json."};

struct attend_rank {
    struct st_file *file;
    const struct st_tensor *q, *k, *v, *q_pos, *sink_tensor;
    int64_t n_tokens, n_heads, n_keys, n_kv_heads, key_dim, value_dim;
    int64_t project_dim;       /* 0 = none */
    dcp_range heads, kv_heads; /* own; stored here */
    int64_t own_keys;
    int64_t *positions;
    float *queries, *out, *lse, *sink, *project;
    struct st_file *project_file;
    const struct st_tensor *project_tensor;
    dcp_cache *cache;
    dcp_attend *attend;
    dcp_pool *pool;
};

static dcp_status check_shapes(const struct attend_values *v, const struct attend_rank *a)
{
    const char *path = v->input;
    if (a->n_heads < 1 || a->key_dim < 1 || a->value_dim < 1)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: %lld query heads, keys of %lld values and values of %lld; none may "
                         "be 0",
                         path, (long long)a->n_heads, (long long)a->key_dim,
                         (long long)a->value_dim);
    if (a->k->dims[2] != a->key_dim)
        return dcp__fail(DCP_ERR_FORMAT, "%s: q has dimension %lld, k %lld; they must be equal",
                         path, (long long)a->key_dim, (long long)a->k->dims[2]);
    if (a->n_kv_heads < 1 || a->n_heads % a->n_kv_heads != 0)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %lld query heads do not divide by %lld KV heads",
                         path, (long long)a->n_heads, (long long)a->n_kv_heads);
    if (a->v != NULL && (a->v->dims[0] != a->n_keys || a->v->dims[1] != a->n_kv_heads))
        return dcp__fail(DCP_ERR_FORMAT, "%s: v is [%lld,%lld,.] but k is [%lld,%lld,.]", path,
                         (long long)a->v->dims[0], (long long)a->v->dims[1], (long long)a->n_keys,
                         (long long)a->n_kv_heads);
    if (a->value_dim > a->key_dim && v->latent > 0)
        return dcp__fail(DCP_ERR_ARG, "--latent %lld: k has only %lld columns",
                         (long long)v->latent, (long long)a->key_dim);
    if (a->q_pos != NULL && a->q_pos->dims[0] != a->n_tokens)
        return dcp__fail(DCP_ERR_FORMAT, "%s: q_pos is [%lld] but q has %lld tokens", path,
                         (long long)a->q_pos->dims[0], (long long)a->n_tokens);
    if (a->q_pos == NULL && a->n_tokens > a->n_keys)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: %lld queries but %lld keys; without q_pos the queries "
                         "are the last positions",
                         path, (long long)a->n_tokens, (long long)a->n_keys);
    const struct st_tensor *p = a->project_tensor;
    if (p != NULL && a->project_dim < 1)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: project is [%lld,%lld,0]: a head's values would map to none; the "
                         "last dimension, P, must be at least 1",
                         v->project, (long long)p->dims[0], (long long)p->dims[1]);
    if (p != NULL && (p->dims[0] != a->n_heads || p->dims[1] != a->value_dim))
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: project is [%lld,%lld,%lld] but heads are [%lld,%lld]", v->project,
                         (long long)p->dims[0], (long long)p->dims[1], (long long)p->dims[2],
                         (long long)a->n_heads, (long long)a->value_dim);
    if (a->sink_tensor != NULL && a->sink_tensor->dims[0] != a->n_heads)
        return dcp__fail(DCP_ERR_FORMAT, "%s: sink is [%lld] but q has %lld heads", path,
                         (long long)a->sink_tensor->dims[0], (long long)a->n_heads);
    return DCP_OK;
}

static dcp_status open_input(const struct attend_values *v, struct attend_rank *a)
{
    const char *path = v->input;
    DCP_TRY(st_open(path, &a->file));
    DCP_TRY(st_need_floats(a->file, path, "q", 3, &a->q));
    DCP_TRY(st_need_floats(a->file, path, "k", 3, &a->k));
    if (v->latent == 0) {
        if (st_find(a->file, "v") == NULL)
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: no tensor 'v'; where v is the first D columns of k (absorbed "
                             "MLA), give --latent D",
                             path);
        DCP_TRY(st_need_floats(a->file, path, "v", 3, &a->v));
    } else if (st_find(a->file, "v") != NULL) {
        return dcp__fail(DCP_ERR_ARG,
                         "%s: holds a tensor 'v', but --latent %lld takes values from k; leave "
                         "--latent or the tensor out",
                         path, (long long)v->latent);
    }
    if (st_find(a->file, "q_pos") != NULL)
        DCP_TRY(st_need_ints(a->file, path, "q_pos", 1, &a->q_pos));
    if (st_find(a->file, "sink") != NULL)
        DCP_TRY(st_need_floats(a->file, path, "sink", 1, &a->sink_tensor));
    a->n_tokens = a->q->dims[0];
    a->n_heads = a->q->dims[1];
    a->key_dim = a->q->dims[2];
    a->n_keys = a->k->dims[0];
    a->n_kv_heads = a->k->dims[1];
    a->value_dim = v->latent > 0 ? v->latent : a->v->dims[2];
    if (v->project != NULL) {
        DCP_TRY(st_open(v->project, &a->project_file));
        DCP_TRY(st_need_floats(a->project_file, v->project, "project", 3, &a->project_tensor));
        a->project_dim = a->project_tensor->dims[2];
    }
    return check_shapes(v, a);
}

/* auto: no value of k or v is cut. Of two types that differ neither need hold the other. */
static dcp_dtype cache_type(const struct attend_values *v, const struct attend_rank *a)
{
    if (v->kv_dtype != 0) return (dcp_dtype)v->kv_dtype;
    const dcp_dtype type = st_float_type(a->k);
    return a->v == NULL || st_float_type(a->v) == type ? type : DCP_F32;
}

/* What create gets, and what this rank brings, stores and gets by it. */
static dcp_attend_desc describe(const struct attend_values *v, const struct attend_rank *a)
{
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = a->n_tokens;
    desc.n_heads = a->n_heads;
    desc.n_kv_heads = a->n_kv_heads;
    desc.key_dim = a->key_dim;
    desc.value_dim = a->value_dim;
    desc.scale = (float)v->scale;
    desc.softcap = (float)v->softcap;
    desc.causal = v->causal;
    desc.interleave = v->interleave;
    desc.algo = (dcp_merge_algo)v->algo;
    desc.has_sink = a->sink_tensor != NULL;
    desc.workspace_limit_bytes = (size_t)v->memory;
    desc.project_dim = a->project_dim;
    desc.tp = (int)v->tp;
    return desc;
}

/* Store the keys that this rank owns: runs of up to I positions lie together in the file. */
static dcp_status fill_cache(const struct attend_values *v, struct attend_rank *a, int n, int r)
{
    const int64_t k_row = a->n_kv_heads * a->key_dim, v_row = a->n_kv_heads * a->value_dim;
    const int64_t run_max = v->interleave < 256 ? v->interleave : 256;
    float *k = NULL, *vals = NULL;
    dcp_status st =
        dcp__alloc_array((size_t)(run_max * k_row), sizeof(float), "k rows", (void **)&k);
    if (st == DCP_OK)
        st = dcp__alloc_array((size_t)(run_max * v_row), sizeof(float), "v rows", (void **)&vals);
    for (int64_t i = 0; i < a->own_keys && st == DCP_OK;) {
        const int64_t pos = dcp_pos_global(i, n, r, v->interleave);
        int64_t run = v->interleave - i % v->interleave;
        if (run > run_max) run = run_max;
        if (run > a->own_keys - i) run = a->own_keys - i;
        st = st_read_f32(a->file, a->k, pos * k_row, run * k_row, k);
        if (st == DCP_OK && a->v != NULL)
            st = st_read_f32(a->file, a->v, pos * v_row, run * v_row, vals);
        if (st == DCP_OK)
            st = dcp_cache_store(a->cache, 0, 0, i, run, k + a->kv_heads.begin * a->key_dim, k_row,
                                 vals + a->kv_heads.begin * a->value_dim, v_row);
        i += run;
    }
    dcp__free(k);
    dcp__free(vals);
    return st;
}

/* Values of a row of the result. */
static int64_t out_dim(const struct attend_rank *a)
{
    return a->project_dim > 0 ? a->project_dim : a->value_dim;
}

/* Local: cache, queries of the own heads, positions, sink, room for the result. */
static dcp_status read_input(dcp_group *g, const struct attend_values *v, struct attend_rank *a)
{
    const dcp_attend_desc shape = describe(v, a);
    const int tp = (int)v->tp, all = dcp_group_size(g);
    if (all % tp != 0 || a->n_kv_heads % tp != 0)
        return dcp__fail(DCP_ERR_ARG, "--tp %d must divide the %d ranks and the %lld KV heads", tp,
                         all, (long long)a->n_kv_heads);
    const int n = all / tp, r = dcp_group_rank(g) % n;
    a->heads = dcp_attend_heads(&shape, all, dcp_group_rank(g));
    a->kv_heads = dcp_attend_kv_heads(&shape, all, dcp_group_rank(g));
    a->own_keys = dcp_local_length(a->n_keys, n, r, v->interleave);
    dcp_cache_desc desc = DCP_CACHE_DESC_INIT;
    desc.n_ranks = n;
    desc.rank = r;
    desc.interleave = v->interleave;
    desc.n_layers = 1;
    desc.n_kv_heads = a->kv_heads.end - a->kv_heads.begin;
    desc.key_dim = a->key_dim;
    desc.value_dim = a->value_dim;
    desc.latent = v->latent > 0;
    desc.dtype = cache_type(v, a);
    desc.max_tokens = a->n_keys > 0 ? a->n_keys : 1;
    DCP_TRY(dcp_cache_create(&desc, &a->cache));
    DCP_TRY(dcp_cache_extend(a->cache, 0, a->n_keys));
    DCP_TRY(fill_cache(v, a, n, r));

    const int64_t own = a->heads.end - a->heads.begin;
    const size_t n_rows = (size_t)(a->n_tokens * own);
    DCP_TRY(dcp__alloc_array(n_rows, (size_t)a->key_dim * 4, "queries", (void **)&a->queries));
    DCP_TRY(dcp__alloc_array(n_rows, (size_t)out_dim(a) * 4, "result", (void **)&a->out));
    DCP_TRY(dcp__alloc_array(n_rows, 4, "result's lse", (void **)&a->lse));
    for (int64_t t = 0; t < a->n_tokens; t++)
        DCP_TRY(st_read_f32(a->file, a->q, (t * a->n_heads + a->heads.begin) * a->key_dim,
                            own * a->key_dim, a->queries + t * own * a->key_dim));
    if (a->q_pos != NULL) {
        DCP_TRY(dcp__alloc_array((size_t)a->n_tokens, 8, "positions", (void **)&a->positions));
        DCP_TRY(st_read_i64(a->file, a->q_pos, 0, a->n_tokens, a->positions));
        for (int64_t t = 0; t < a->n_tokens; t++) {
            if (a->positions[t] < a->n_keys) continue;
            return dcp__fail(DCP_ERR_FORMAT,
                             "%s: q_pos[%lld] is %lld; the keys are at 0 to %lld, and a negative "
                             "position is padding",
                             v->input, (long long)t, (long long)a->positions[t],
                             (long long)a->n_keys - 1);
        }
    }
    if (a->sink_tensor != NULL) {
        DCP_TRY(dcp__alloc_array((size_t)a->n_heads, 4, "sink", (void **)&a->sink));
        DCP_TRY(st_read_f32(a->file, a->sink_tensor, 0, a->n_heads, a->sink));
    }
    if (a->project_tensor != NULL) { /* the maps of the head group */
        const int64_t group = a->n_heads / a->n_kv_heads, map = a->value_dim * a->project_dim;
        const int64_t n_maps = (a->kv_heads.end - a->kv_heads.begin) * group;
        DCP_TRY(dcp__alloc_array((size_t)(n_maps * map), 4, "maps", (void **)&a->project));
        DCP_TRY(st_read_f32(a->project_file, a->project_tensor, a->kv_heads.begin * group * map,
                            n_maps * map, a->project));
    }
    return DCP_OK;
}

/* Collective. */
static dcp_status run_attend(dcp_group *g, const struct attend_values *v, struct attend_rank *a,
                             dcp_attend_stats *stats)
{
    dcp_attend_desc desc = describe(v, a);
    desc.pool = a->pool;
    DCP_TRY(dcp_attend_create(g, &desc, &a->attend));
    dcp_kv_view view;
    dcp_kv_scales scales;
    DCP_TRY(dcp_cache_view(a->cache, 0, 0, &view));
    DCP_TRY(dcp_cache_scales(a->cache, 0, 0, &scales));
    const dcp_attend_seq seq = {&view, a->n_keys, a->n_tokens, v->window};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.scales = &scales;
    args.q_pos = a->positions;
    args.q = a->queries;
    args.sink = a->sink;
    args.out = a->out;
    args.lse = a->lse;
    args.project = a->project;
    return dcp_attend_run(a->attend, &args, stats);
}

enum { NONFINITE_ZERO, NONFINITE_ERROR };

static dcp_status refuse_nonfinite(const struct attend_values *v, const dcp_attend_stats *stats)
{
    if (stats->nonfinite_values == 0 && stats->lse_bad == 0) return DCP_OK;
    return dcp__fail(DCP_ERR_NONFINITE,
                     "%s: %lld value%s and %lld LSE%s of partial results are NaN or infinite; "
                     "--nonfinite zero leaves them out",
                     v->input, (long long)stats->nonfinite_values,
                     message_s(stats->nonfinite_values), (long long)stats->lse_bad,
                     message_s(stats->lse_bad));
}

/* Group-wide figures for the report. */
struct attend_totals {
    int64_t workspace_bytes, wire_bytes;
    int64_t *rank_keys, *rank_bytes; /* [size] */
};

static dcp_status collect_totals(dcp_group *g, const struct attend_rank *a,
                                 const dcp_attend_info *info, const dcp_attend_stats *stats,
                                 struct attend_totals *t)
{
    const int64_t keys = a->own_keys, bytes = (int64_t)dcp_cache_bytes(a->cache, 0);
    const size_t n = (size_t)dcp_group_size(g);
    int64_t unused;
    DCP_TRY(dcp__alloc_array(n, sizeof(int64_t), "keys of ranks", (void **)&t->rank_keys));
    DCP_TRY(dcp__alloc_array(n, sizeof(int64_t), "bytes of ranks", (void **)&t->rank_bytes));
    DCP_TRY(sum_and_max(g, (int64_t)info->workspace_bytes, &unused, &t->workspace_bytes));
    DCP_TRY(sum_and_max(g, stats->wire_bytes, &t->wire_bytes, &unused));
    DCP_TRY(dcp_group_allgather(g, &keys, sizeof(keys), t->rank_keys));
    return dcp_group_allgather(g, &bytes, sizeof(bytes), t->rank_bytes);
}

static void print_report(dcp_group *g, const struct attend_values *v, const dcp_attend_info *info,
                         const dcp_attend_stats *stats, const struct attend_totals *t)
{
    const int n = dcp_group_size(g);
    if (!v->json) {
        char a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES];
        fprintf(stderr, "attended on %d rank%s (%s, %s), result in %s\nkernel %s\n", n,
                message_s(n), info->algo_name, dcp_group_kind(g), v->output, info->kernel);
        for (int r = 0; r < n; r++)
            fprintf(stderr, "rank %d: %lld key%s, %s in whole pages\n", r,
                    (long long)t->rank_keys[r], message_s(t->rank_keys[r]),
                    table_bytes((uint64_t)t->rank_bytes[r], a));
        fprintf(stderr, "workspace %s a rank, %s moved\n",
                table_bytes((uint64_t)t->workspace_bytes, a),
                table_bytes((uint64_t)t->wire_bytes, b));
        if (stats->nonfinite_values > 0 || stats->lse_bad > 0)
            fprintf(stderr,
                    "left out: %lld value%s and %lld LSE%s of partial results that were NaN or "
                    "infinite\n",
                    (long long)stats->nonfinite_values, message_s(stats->nonfinite_values),
                    (long long)stats->lse_bad, message_s(stats->lse_bad));
        return;
    }
    struct json_out j;
    jout_begin(&j, stdout);
    jout_int(&j, "ranks", n);
    jout_str(&j, "algo", info->algo_name);
    jout_str(&j, "comm", dcp_group_kind(g));
    jout_str(&j, "cut", "heads");
    jout_str(&j, "kernel", info->kernel);
    jout_int(&j, "nonfinite_values", stats->nonfinite_values);
    jout_int(&j, "lse_bad", stats->lse_bad);
    jout_int(&j, "lse_empty", stats->lse_empty);
    jout_int(&j, "workspace_bytes", t->workspace_bytes);
    jout_int(&j, "wire_bytes", t->wire_bytes);
    jout_array(&j, "rank_keys");
    for (int r = 0; r < n; r++) jout_int(&j, NULL, t->rank_keys[r]);
    jout_array_end(&j);
    jout_array(&j, "rank_bytes");
    for (int r = 0; r < n; r++) jout_int(&j, NULL, t->rank_bytes[r]);
    jout_array_end(&j);
    jout_end(&j);
}

static dcp_status attend_pool(dcp_group *g, const struct attend_values *v, dcp_pool **pool_out)
{
    const int n_threads = v->rank.threads > 0 ? (int)v->rank.threads : 1;
    return binding_pool(g, (enum bind_mode)v->rank.bind, n_threads, pool_out);
}

static int attend_body(dcp_group *g, const struct attend_values *v, struct attend_rank *a)
{
    if (!all_ranks_ok(g, open_input(v, a))) return EXIT_FAILED;
    /* Before the cache is filled: its memory lies where its first user runs. */
    if (!all_ranks_ok(g, attend_pool(g, v, &a->pool))) return EXIT_FAILED;
    if (!all_ranks_ok(g, read_input(g, v, a))) return EXIT_FAILED;
    dcp_attend_stats stats = DCP_ATTEND_STATS_INIT;
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_status st = run_attend(g, v, a, &stats);
    if (st != DCP_OK) return rank_failed(g, st);
    if (v->nonfinite == NONFINITE_ERROR && !all_ranks_ok(g, refuse_nonfinite(v, &stats)))
        return EXIT_FAILED;
    dcp_attend_get_info(a->attend, &info);

    const struct result res = {.cut = DCP_CUT_HEADS,
                               .n_tokens = a->n_tokens,
                               .n_heads = a->n_heads,
                               .dim = out_dim(a),
                               .dtype = DCP_F32,
                               .out = a->out,
                               .lse = a->lse,
                               .tp = (int)v->tp};
    int rc = result_write(g, v->output, &res);
    if (rc != EXIT_DONE) return rc;
    struct attend_totals totals = {0};
    st = collect_totals(g, a, &info, &stats, &totals);
    if (st != DCP_OK) {
        rc = rank_failed(g, st);
    } else if (dcp_group_rank(g) == 0) {
        print_report(g, v, &info, &stats, &totals);
        rc = finish_stdout(EXIT_DONE);
    }
    dcp__free(totals.rank_keys);
    dcp__free(totals.rank_bytes);
    return rc;
}

static int attend_rank_main(dcp_group *g, void *ctx)
{
    struct attend_rank a = {0};
    const int rc = attend_body(g, ctx, &a);
    dcp_attend_destroy(a.attend);
    dcp_pool_destroy(a.pool);
    dcp_cache_destroy(a.cache);
    dcp__free(a.queries);
    dcp__free(a.out);
    dcp__free(a.lse);
    dcp__free(a.sink);
    dcp__free(a.positions);
    dcp__free(a.project);
    st_close(a.project_file);
    st_close(a.file);
    return rc;
}

int cmd_attend(int argc, char **argv)
{
    struct attend_values v = {.interleave = 1, .tp = 1};
    int n_operands, rc;
    if (!command_parse(&attend_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (v.output == NULL) return usage_error(&attend_command, "-o FILE must be given");
    if (tp_is_wrong(&attend_command, &v.rank, v.tp)) return EXIT_USAGE;
    v.input = argv[0];
    if (would_replace(&attend_command, "-o", v.output, v.input) ||
        would_replace(&attend_command, "-o", v.output, v.project))
        return EXIT_USAGE;
    return run_on_ranks(&v.rank, v.rank.ranks, attend_rank_main, &v);
}
