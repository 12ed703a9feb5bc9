/* SPDX-License-Identifier: Apache-2.0 */
/* A call of dcp_attend as data, run by every rank of a threads or shm group; one rank may do
 * something odd. What ranks found lies in memory that they share. */
#ifndef DCP_TESTS_ATTN_ATTEND_CASE_H
#define DCP_TESTS_ATTN_ATTEND_CASE_H

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "base/pool_priv.h"
#include "cache/cache_priv.h"
#include "dcpattn/attend.h"
#include "num/dtype_priv.h"

enum { MAX_SEQS = 5, MAX_RANKS = 64, MAX_SINK = 128, GROUP_ENTRY_BYTES = 3 * sizeof(void *) };
enum comm { COMM_THREADS, COMM_SHM };

struct call {
    int n_ranks, n_threads;
    enum comm comm;
    int64_t interleave, n_heads, n_kv_heads, dk, dv;
    uint32_t latent, causal, has_sink, has_pos, no_lse;
    float scale, softcap;
    dcp_dtype dtype;
    dcp_merge_algo algo;
    size_t limit;
    int64_t max_tokens, q_pad, out_pad;
    int64_t n_seqs, length[MAX_SEQS], n_rows[MAX_SEQS], window[MAX_SEQS];
    int lends_pool, no_rows_ever;
    int tp; /* head groups; 0 = 1 */
    int64_t project_dim;
    dcp_dtype project_type;
    int ranks_per_host; /* > 0: simulated hosts: messages between them */
    /* faults of one rank */
    int odd_rank;
    const char *odd;
};

/* In memory that processes share: written by the ranks. */
struct answer {
    int status[MAX_RANKS];
    char text[MAX_RANKS][400];
    size_t allocs[MAX_RANKS];
    size_t held_before, held_after; /* counted memory of the process around create */
    dcp_attend_info info[MAX_RANKS];
    dcp_attend_stats stats[MAX_RANKS];
    int again[MAX_RANKS]; /* status of a correct run after a refused one */
};

static struct {
    float *k[MAX_SEQS], *v[MAX_SEQS]; /* [L, Hkv, dim], rounded to the cache's type */
    float *q, *sink;                  /* [T, H, Dk], [H] */
    float *project;                   /* [H, D, P], rounded to its type */
    uint16_t *project_bf16;
    int64_t *pos;
    int64_t n_total;
    float *out, *lse; /* shared: [T, H, D or P], [T, H] */
    struct answer *answer;
} world;

static int64_t sum_rows(const struct call *c)
{
    int64_t n = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) n += c->n_rows[s];
    return n;
}

/* Values of a row of the result. */
static int64_t out_width(const struct call *c)
{
    return c->project_dim > 0 ? c->project_dim : c->dv;
}

static void *share(size_t bytes)
{
    void *p = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

static float draw(unsigned *seed)
{
    return (float)(rand_r(seed) % 20001 - 10000) / 10000.0f;
}

static float round_to(float x, dcp_dtype t)
{
    if (t != DCP_F16 && t != DCP_BF16) return x;
    return t == DCP_F16 ? dcp__f16_to_f32(dcp__f32_to_f16(x))
                        : dcp__bf16_to_f32(dcp__f32_to_bf16(x));
}

/* A head's row as an int8 or fp8 cache holds it. */
static void round_row(float *row, int64_t n, dcp_dtype t)
{
    uint8_t codes[4096];
    if (t != DCP_I8 && t != DCP_FP8_E4M3) return;
    const float scale = dcp__kv_quantise(t, row, codes, n);
    for (int64_t i = 0; i < n; i++)
        row[i] = scale * (t == DCP_I8 ? (float)(int8_t)codes[i] : dcp__e4m3_to_f32(codes[i]));
}

static void fill_world(const struct call *c, unsigned seed)
{
    memset(&world, 0, sizeof(world));
    const int64_t n = world.n_total = sum_rows(c);
    for (int64_t s = 0; s < c->n_seqs; s++) {
        const int64_t len = c->length[s];
        world.k[s] = malloc((size_t)(len * c->n_kv_heads * c->dk + 1) * sizeof(float));
        world.v[s] = malloc((size_t)(len * c->n_kv_heads * c->dv + 1) * sizeof(float));
        for (int64_t p = 0; p < len; p++) {
            /* Now and then a key that outweighs all others: a softmax that forgets to subtract the
             * maximum overflows, a merge that trusts a weak shard is off by much. */
            const float loud = rand_r(&seed) % 50 == 0 ? 12.0f : 1.0f;
            for (int64_t i = 0; i < c->n_kv_heads * c->dk; i++)
                world.k[s][p * c->n_kv_heads * c->dk + i] = round_to(loud * draw(&seed), c->dtype);
            for (int64_t i = 0; i < c->n_kv_heads * c->dv; i++)
                world.v[s][p * c->n_kv_heads * c->dv + i] = round_to(3.0f * draw(&seed), c->dtype);
            for (int64_t g = 0; g < c->n_kv_heads; g++) {
                round_row(world.k[s] + (p * c->n_kv_heads + g) * c->dk, c->dk, c->dtype);
                round_row(world.v[s] + (p * c->n_kv_heads + g) * c->dv, c->dv, c->dtype);
            }
        }
    }
    world.q = malloc((size_t)(n * c->n_heads * c->dk + 1) * sizeof(float));
    for (int64_t i = 0; i < n * c->n_heads * c->dk; i++) world.q[i] = 2.0f * draw(&seed);
    world.sink = malloc((size_t)c->n_heads * sizeof(float));
    for (int64_t h = 0; h < c->n_heads; h++)
        world.sink[h] = h == 1 ? -INFINITY : 3.0f * draw(&seed);
    const int64_t n_map = c->n_heads * c->dv * c->project_dim;
    world.project = malloc((size_t)(n_map + 1) * sizeof(float));
    world.project_bf16 = malloc((size_t)(n_map + 1) * sizeof(uint16_t));
    for (int64_t i = 0; i < n_map; i++) {
        world.project_bf16[i] = dcp__f32_to_bf16(draw(&seed));
        world.project[i] =
            c->project_type == DCP_BF16 ? dcp__bf16_to_f32(world.project_bf16[i]) : draw(&seed);
    }
    world.pos = malloc((size_t)(n + 1) * sizeof(int64_t));
    int64_t row = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) {
        for (int64_t i = 0; i < c->n_rows[s]; i++, row++) {
            world.pos[row] = c->length[s] - c->n_rows[s] + i;
            if (c->has_pos) world.pos[row] = (int64_t)(rand_r(&seed) % (int)(c->length[s] + 8)) - 3;
        }
    }
    world.out = share((size_t)(n * c->n_heads * out_width(c)) * sizeof(float));
    world.lse = share((size_t)(n * c->n_heads) * sizeof(float));
    world.answer = share(sizeof(*world.answer));
}

static void drop_world(const struct call *c)
{
    for (int64_t s = 0; s < c->n_seqs; s++) {
        free(world.k[s]);
        free(world.v[s]);
    }
    free(world.q);
    free(world.sink);
    free(world.pos);
    free(world.project);
    free(world.project_bf16);
    munmap(world.out, (size_t)(world.n_total * c->n_heads * out_width(c)) * sizeof(float) + 1);
    munmap(world.lse, (size_t)(world.n_total * c->n_heads) * sizeof(float) + 1);
    munmap(world.answer, sizeof(*world.answer) + 1);
}

/* ---- one rank ------------------------------------------------------------------------------- */

static dcp_status fill_cache(const struct call *c, int rank_of_all, dcp_cache **cache_out)
{
    dcp_cache_desc d = DCP_CACHE_DESC_INIT;
    const int tp = c->tp > 0 ? c->tp : 1;
    const int n_ranks = c->n_ranks / tp, rank = rank_of_all % n_ranks;
    const int64_t own_kv = c->n_kv_heads / tp, kv0 = rank_of_all / n_ranks * own_kv;
    d.n_ranks = n_ranks;
    d.rank = rank;
    d.interleave = c->interleave;
    d.n_layers = 2;
    d.n_kv_heads = own_kv;
    d.key_dim = c->dk;
    d.value_dim = c->dv;
    d.latent = c->latent;
    d.dtype = c->dtype;
    d.page_tokens = 32;
    d.max_seqs = MAX_SEQS;
    d.max_tokens = 1;
    for (int64_t s = 0; s < c->n_seqs; s++) d.max_tokens += c->length[s];
    DCP_TRY(dcp_cache_create(&d, cache_out));
    const int64_t kw = c->n_kv_heads * c->dk, vw = c->n_kv_heads * c->dv;
    float *k = malloc((size_t)kw * sizeof(float)), *v = malloc((size_t)vw * sizeof(float));
    for (int64_t s = 0; s < c->n_seqs; s++) {
        /* In two steps, sequences in turn at most. */
        for (int step = 0; step < 2; step++) {
            const int64_t begin = step == 0 ? 0 : c->length[s] / 3;
            const int64_t end = step == 0 ? c->length[s] / 3 : c->length[s];
            DCP_TRY(dcp_cache_extend(*cache_out, s, end - begin));
            for (int64_t p = begin; p < end; p++) {
                if (dcp_pos_owner(p, n_ranks, c->interleave) != rank) continue;
                DCP_TRY(dcp_cache_store(*cache_out, s, 1, dcp_pos_local(p, n_ranks, c->interleave),
                                        1, world.k[s] + p * kw + kv0 * c->dk, kw,
                                        world.v[s] + p * vw + kv0 * c->dv, vw));
            }
        }
    }
    free(k);
    free(v);
    return DCP_OK;
}

static dcp_status rank_body(const struct call *c, dcp_group *g)
{
    const int r = dcp_group_rank(g);
    struct answer *ans = world.answer;
    const int is_odd = c->odd != NULL && r == c->odd_rank;
    dcp_cache *cache = NULL;
    DCP_TRY(fill_cache(c, r, &cache));
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.max_tokens = c->max_tokens > 0 ? c->max_tokens : (world.n_total > 0 ? world.n_total : 1);
    if (c->no_rows_ever) d.max_tokens = 0;
    d.n_heads = c->n_heads;
    d.n_kv_heads = c->n_kv_heads;
    d.key_dim = c->dk;
    d.value_dim = c->dv;
    d.scale = c->scale;
    d.softcap = c->softcap;
    d.causal = c->causal;
    d.interleave = c->interleave;
    d.n_threads = c->n_threads;
    d.algo = c->algo;
    d.has_sink = c->has_sink;
    d.workspace_limit_bytes = c->limit;
    d.tp = c->tp;
    d.project_dim = c->project_dim;
    d.project_type = c->project_type;
    struct dcp_pool *pool = NULL;
    if (c->lends_pool) {
        DCP_TRY(dcp_pool_create(c->n_threads, 1, &pool));
        d.pool = pool;
    }
    if (is_odd && strcmp(c->odd, "desc scale") == 0) d.scale = 0.25f;
    if (is_odd && strcmp(c->odd, "desc heads") == 0) d.n_heads = -1;
    if (is_odd && strcmp(c->odd, "desc causal") == 0) d.causal = !c->causal;
    if (is_odd && strcmp(c->odd, "desc algo") == 0) d.algo = DCP_MERGE_ALLTOALL;
    if (is_odd && strcmp(c->odd, "desc type") == 0) d.project_type = DCP_BF16;
    dcp_attend *a = NULL;
    DCP_TRY(dcp_group_barrier(g));
    if (r == 0) ans->held_before = dcp__alloc_current();
    DCP_TRY(dcp_group_barrier(g));
    dcp_status st = dcp_attend_create(g, &d, &a);
    if (st == DCP_OK) st = dcp_group_barrier(g);
    if (r == 0) ans->held_after = dcp__alloc_current();
    if (st == DCP_OK) st = dcp_group_barrier(g);
    if (st != DCP_OK) {
        dcp_pool_destroy(pool);
        dcp_cache_destroy(cache);
        return st;
    }
    ans->info[r] = (dcp_attend_info)DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(a, &ans->info[r]);
    ans->stats[r] = (dcp_attend_stats)DCP_ATTEND_STATS_INIT;

    const dcp_range heads = dcp_attend_heads(&d, c->n_ranks, r);
    const dcp_range kv_heads = dcp_attend_kv_heads(&d, c->n_ranks, r);
    const int64_t own = heads.end - heads.begin, n = world.n_total, width = out_width(c);
    const int64_t qs = own * c->dk + c->q_pad, os = own * width + c->out_pad, ls = own + c->q_pad;
    float *q = malloc((size_t)(n * qs + 1) * sizeof(float));
    float *out = malloc((size_t)(n * os + 1) * sizeof(float));
    float *lse = malloc((size_t)(n * ls + 1) * sizeof(float));
    for (int64_t t = 0; t < n; t++) {
        memcpy(q + t * qs, world.q + (t * c->n_heads + heads.begin) * c->dk,
               (size_t)(own * c->dk) * sizeof(float));
    }
    dcp_kv_view views[MAX_SEQS];
    dcp_kv_scales scales[MAX_SEQS];
    dcp_attend_seq seqs[MAX_SEQS];
    for (int64_t s = 0; s < c->n_seqs; s++) {
        st = dcp_cache_view(cache, s, 1, &views[s]);
        if (st == DCP_OK) st = dcp_cache_scales(cache, s, 1, &scales[s]);
        const dcp_attend_seq seq = {&views[s], c->length[s], c->n_rows[s], c->window[s]};
        seqs[s] = seq;
    }
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = seqs;
    args.n_seqs = c->n_seqs;
    args.scales = scales;
    args.q_pos = c->has_pos ? world.pos : NULL;
    args.q = q;
    args.q_token_stride = c->q_pad ? qs : 0;
    args.sink = c->has_sink ? world.sink : NULL;
    args.out = out;
    args.out_token_stride = c->out_pad ? os : 0;
    args.lse = c->no_lse ? NULL : lse;
    args.lse_token_stride = c->q_pad ? ls : 0;
    const int64_t map0 = kv_heads.begin * (c->n_heads / c->n_kv_heads) * c->dv * c->project_dim;
    if (c->project_dim > 0)
        args.project = c->project_type == DCP_BF16 ? (const void *)(world.project_bf16 + map0)
                                                   : (const void *)(world.project + map0);
    dcp_attend_args odd = args;
    int64_t *other_pos = malloc((size_t)(n + 1) * sizeof(int64_t));
    memcpy(other_pos, world.pos, (size_t)n * sizeof(int64_t));
    float bad_sink[MAX_SINK];
    if (is_odd && strncmp(c->odd, "sink", 4) == 0) {
        assert_true(c->n_heads <= MAX_SINK);
        memcpy(bad_sink, world.sink, (size_t)c->n_heads * sizeof(float));
        bad_sink[c->n_heads - 1] = strcmp(c->odd, "sink nan") == 0     ? NAN
                                   : strcmp(c->odd, "sink other") == 0 ? 0.625f
                                                                       : INFINITY;
    }
    if (is_odd) {
        if (strcmp(c->odd, "window") == 0) seqs[0].window++;
        if (strcmp(c->odd, "rows") == 0) seqs[0].n_rows--;
        if (strcmp(c->odd, "length") == 0) seqs[0].length--;
        if (strcmp(c->odd, "no q") == 0) odd.q = NULL;
        if (strcmp(c->odd, "view") == 0) views[0].n_keys--;
        if (strcmp(c->odd, "pos") == 0) {
            other_pos[0]++;
            odd.q_pos = other_pos;
        }
        if (strcmp(c->odd, "T 0") == 0) odd.n_seqs = 0;
        if (strncmp(c->odd, "sink", 4) == 0) odd.sink = bad_sink;
        const dcp_kv_view *v = &views[0];
        if (strcmp(c->odd, "no scales") == 0) odd.scales = NULL;
        if (strcmp(c->odd, "empty scales") == 0) scales[0].k_base = NULL;
        if (strcmp(c->odd, "scale type") == 0) scales[0].dtype = DCP_I8;
        if (strcmp(c->odd, "scale stride") == 0) scales[0].v_slot_stride = -1;
        if (strcmp(c->odd, "scale place") == 0) scales[0].k_page_stride_bytes++;
        if (strcmp(c->odd, "scale base") == 0)
            scales[0].k_base = (const char *)scales[0].k_base + 1;
        if (strcmp(c->odd, "far scales") == 0) scales[0].v_head_stride = INT64_MAX;
        if (strcmp(c->odd, "far scale page") == 0)
            scales[0].v_page_stride_bytes = INT64_MAX / 8 * 8;
        if (strcmp(c->odd, "no v scales") == 0) scales[0].v_base = NULL;
        if (strcmp(c->odd, "lse in scales") == 0)
            odd.lse = (float *)(uintptr_t)((const char *)scales[0].v_base +
                                           v->pages[0] * scales[0].v_page_stride_bytes);
        if (strcmp(c->odd, "out in q") == 0) odd.out = q + 1;
        if (strcmp(c->odd, "lse in q") == 0) odd.lse = q + n * qs - 1;
        if (strcmp(c->odd, "lse in out") == 0) odd.lse = out + 5;
        if (strcmp(c->odd, "out in k") == 0) odd.out = (void *)(uintptr_t)v->k_base;
        if (strcmp(c->odd, "lse in v") == 0)
            odd.lse = (float *)(uintptr_t)((const char *)v->v_base +
                                           v->pages[0] * v->v_page_stride_bytes + 4);
        if (strcmp(c->odd, "short args") == 0) odd.struct_size = 16;
        if (strcmp(c->odd, "stats") == 0) ans->stats[r].struct_size = 0;
    }
    const size_t calls_before = dcp__alloc_calls();
    st = dcp_group_barrier(g);
    const size_t calls = dcp__alloc_calls();
    (void)calls_before;
    if (st == DCP_OK) st = dcp_attend_run(a, &odd, &ans->stats[r]);
    if (st == DCP_OK) {
        /* Again, over a workspace and results full of the first run. */
        for (int64_t i = 0; i < n * os; i++) out[i] = NAN;
        for (int64_t i = 0; i < n * ls; i++) lse[i] = NAN;
        st = dcp_attend_run(a, &args, &ans->stats[r]);
        if (st == DCP_OK) st = dcp_group_barrier(g);
        ans->allocs[r] = dcp__alloc_calls() - calls;
        if (st == DCP_OK) st = dcp_group_barrier(g);
    } else if (c->odd != NULL) {
        snprintf(ans->text[r], sizeof(ans->text[r]), "%s", dcp_last_error());
        for (int64_t s = 0; s < c->n_seqs; s++) {
            (void)dcp_cache_view(cache, s, 1, &views[s]);
            (void)dcp_cache_scales(cache, s, 1, &scales[s]);
            const dcp_attend_seq seq = {&views[s], c->length[s], c->n_rows[s], c->window[s]};
            seqs[s] = seq;
        }
        ans->again[r] = (int)dcp_attend_run(a, &args, NULL);
    }
    for (int64_t t = 0; t < n; t++) {
        memcpy(world.out + (t * c->n_heads + heads.begin) * width, out + t * os,
               (size_t)(own * width) * sizeof(float));
        memcpy(world.lse + t * c->n_heads + heads.begin, lse + t * ls, (size_t)own * sizeof(float));
        for (int64_t i = 0; i < c->out_pad && st == DCP_OK; i++)
            if (!isnan(out[t * os + own * width + i])) st = DCP_ERR_SYS; /* wrote beside its row */
    }
    free(q);
    free(out);
    free(lse);
    free(other_pos);
    dcp_attend_destroy(a);
    dcp_pool_destroy(pool);
    dcp_cache_destroy(cache);
    return st;
}

static void run_rank(const struct call *c, dcp_group *g)
{
    const int r = dcp_group_rank(g);
    world.answer->status[r] = (int)rank_body(c, g);
    if (world.answer->status[r] != DCP_OK && world.answer->text[r][0] == '\0')
        snprintf(world.answer->text[r], sizeof(world.answer->text[r]), "%s", dcp_last_error());
    dcp_group_destroy(g);
}

/* ---- groups --------------------------------------------------------------------------------- */

struct thread_arg {
    const struct call *c;
    dcp_group *g;
};
static void *thread_main(void *arg_ptr)
{
    struct thread_arg *arg = arg_ptr;
    run_rank(arg->c, arg->g);
    return NULL;
}

static void run_threads(const struct call *c)
{
    dcp_group *groups[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    struct thread_arg args[MAX_RANKS];
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.ranks_per_host = c->ranks_per_host;
    if (c->n_ranks == 1)
        assert_int_equal(dcp_group_create_self(NULL, &groups[0]), DCP_OK);
    else
        assert_int_equal(dcp_group_create_threads(c->n_ranks, &opts, groups), DCP_OK);
    for (int r = 0; r < c->n_ranks; r++) {
        args[r].c = c;
        args[r].g = groups[r];
        assert_int_equal(pthread_create(&threads[r], NULL, thread_main, &args[r]), 0);
    }
    for (int r = 0; r < c->n_ranks; r++) assert_int_equal(pthread_join(threads[r], NULL), 0);
}

static void run_shm(const struct call *c)
{
    dcp_shm *shm = NULL;
    pid_t pids[MAX_RANKS];
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.ranks_per_host = c->ranks_per_host;
    assert_int_equal(dcp_shm_prepare(c->n_ranks, &opts, &shm), DCP_OK);
    fflush(stdout);
    for (int r = 0; r < c->n_ranks; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) {
            dcp_group *g = NULL;
            if (dcp_shm_attach(shm, r, &g) != DCP_OK) _exit(3);
            run_rank(c, g);
            _exit(0);
        }
    }
    for (int r = 0; r < c->n_ranks; r++) {
        int status = 0;
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        dcp_shm_report_exit(shm, r, status);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("rank %d ended with status %d", r, status);
    }
    dcp_shm_release(shm);
}

static void run_group(const struct call *c)
{
    memset(world.answer, 0, sizeof(*world.answer));
    for (int r = 0; r < c->n_ranks; r++) world.answer->status[r] = 99;
    if (c->comm == COMM_SHM)
        run_shm(c);
    else
        run_threads(c);
}

#endif
