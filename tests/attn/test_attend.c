/* SPDX-License-Identifier: Apache-2.0 */
/* dcp_attend: sharded = unsharded = the double oracle, whatever the group, the tile and the
 * threads; and bits that depend on neither of the last three. */
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
#include "dcpattn/attend.h"
#include "num/dtype_priv.h"
#include "ref/ref_attend.h"

enum { MAX_SEQS = 5, MAX_RANKS = 16 };
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
    int lends_pool;
    /* faults of one rank */
    int odd_rank;
    const char *odd;
};

/* In memory that processes share: written by the ranks. */
struct answer {
    int status[MAX_RANKS];
    char text[MAX_RANKS][400];
    size_t allocs[MAX_RANKS];
    dcp_attend_info info[MAX_RANKS];
    dcp_attend_stats stats[MAX_RANKS];
    int again[MAX_RANKS]; /* status of a correct run after a refused one */
};

static struct {
    float *k[MAX_SEQS], *v[MAX_SEQS]; /* [L, Hkv, dim], rounded to the cache's type */
    float *q, *sink;                  /* [T, H, Dk], [H] */
    int64_t *pos;
    int64_t n_total;
    float *out, *lse; /* shared: [T, H, D], [T, H] */
    struct answer *answer;
} world;

static int64_t sum_rows(const struct call *c)
{
    int64_t n = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) n += c->n_rows[s];
    return n;
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
    if (t == DCP_F32) return x;
    return t == DCP_F16 ? dcp__f16_to_f32(dcp__f32_to_f16(x))
                        : dcp__bf16_to_f32(dcp__f32_to_bf16(x));
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
        }
    }
    world.q = malloc((size_t)(n * c->n_heads * c->dk + 1) * sizeof(float));
    for (int64_t i = 0; i < n * c->n_heads * c->dk; i++) world.q[i] = 2.0f * draw(&seed);
    world.sink = malloc((size_t)c->n_heads * sizeof(float));
    for (int64_t h = 0; h < c->n_heads; h++)
        world.sink[h] = h == 1 ? -INFINITY : 3.0f * draw(&seed);
    world.pos = malloc((size_t)(n + 1) * sizeof(int64_t));
    int64_t row = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) {
        for (int64_t i = 0; i < c->n_rows[s]; i++, row++) {
            world.pos[row] = c->length[s] - c->n_rows[s] + i;
            if (c->has_pos) world.pos[row] = (int64_t)(rand_r(&seed) % (int)(c->length[s] + 8)) - 3;
        }
    }
    world.out = share((size_t)(n * c->n_heads * c->dv) * sizeof(float));
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
    munmap(world.out, (size_t)(world.n_total * c->n_heads * c->dv) * sizeof(float) + 1);
    munmap(world.lse, (size_t)(world.n_total * c->n_heads) * sizeof(float) + 1);
    munmap(world.answer, sizeof(*world.answer) + 1);
}

/* ---- one rank ------------------------------------------------------------------------------- */

static dcp_status fill_cache(const struct call *c, int rank, dcp_cache **cache_out)
{
    dcp_cache_desc d = DCP_CACHE_DESC_INIT;
    d.n_ranks = c->n_ranks;
    d.rank = rank;
    d.interleave = c->interleave;
    d.n_layers = 2;
    d.n_kv_heads = c->n_kv_heads;
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
                if (dcp_pos_owner(p, c->n_ranks, c->interleave) != rank) continue;
                DCP_TRY(dcp_cache_store(*cache_out, s, 1,
                                        dcp_pos_local(p, c->n_ranks, c->interleave), 1,
                                        world.k[s] + p * kw, 0, world.v[s] + p * vw, 0));
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
    struct dcp__pool *pool = NULL;
    if (c->lends_pool) {
        DCP_TRY(dcp__pool_create(c->n_threads, &pool));
        d.pool = pool;
    }
    if (is_odd && strcmp(c->odd, "desc scale") == 0) d.scale = 0.25f;
    if (is_odd && strcmp(c->odd, "desc heads") == 0) d.n_heads = -1;
    dcp_attend *a = NULL;
    dcp_status st = dcp_attend_create(g, &d, &a);
    if (st != DCP_OK) {
        dcp__pool_destroy(pool);
        dcp_cache_destroy(cache);
        return st;
    }
    dcp_attend_get_info(a, &ans->info[r]);

    const dcp_range heads = dcp_cut_range(c->n_heads, c->n_ranks, r);
    const int64_t own = heads.end - heads.begin, n = world.n_total;
    const int64_t qs = own * c->dk + c->q_pad, os = own * c->dv + c->out_pad, ls = own + c->q_pad;
    float *q = malloc((size_t)(n * qs + 1) * sizeof(float));
    float *out = malloc((size_t)(n * os + 1) * sizeof(float));
    float *lse = malloc((size_t)(n * ls + 1) * sizeof(float));
    for (int64_t t = 0; t < n; t++) {
        memcpy(q + t * qs, world.q + (t * c->n_heads + heads.begin) * c->dk,
               (size_t)(own * c->dk) * sizeof(float));
    }
    dcp_kv_view views[MAX_SEQS];
    dcp_attend_seq seqs[MAX_SEQS];
    for (int64_t s = 0; s < c->n_seqs; s++) {
        st = dcp_cache_view(cache, s, 1, &views[s]);
        const dcp_attend_seq seq = {&views[s], c->length[s], c->n_rows[s], c->window[s]};
        seqs[s] = seq;
    }
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = seqs;
    args.n_seqs = c->n_seqs;
    args.q_pos = c->has_pos ? world.pos : NULL;
    args.q = q;
    args.q_token_stride = c->q_pad ? qs : 0;
    args.sink = c->has_sink ? world.sink : NULL;
    args.out = out;
    args.out_token_stride = c->out_pad ? os : 0;
    args.lse = c->no_lse ? NULL : lse;
    args.lse_token_stride = c->q_pad ? ls : 0;
    dcp_attend_args odd = args;
    int64_t *other_pos = malloc((size_t)(n + 1) * sizeof(int64_t));
    memcpy(other_pos, world.pos, (size_t)n * sizeof(int64_t));
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
            const dcp_attend_seq seq = {&views[s], c->length[s], c->n_rows[s], c->window[s]};
            seqs[s] = seq;
        }
        ans->again[r] = (int)dcp_attend_run(a, &args, NULL);
    }
    for (int64_t t = 0; t < n; t++) {
        memcpy(world.out + (t * c->n_heads + heads.begin) * c->dv, out + t * os,
               (size_t)(own * c->dv) * sizeof(float));
        memcpy(world.lse + t * c->n_heads + heads.begin, lse + t * ls, (size_t)own * sizeof(float));
        for (int64_t i = 0; i < c->out_pad && st == DCP_OK; i++)
            if (!isnan(out[t * os + own * c->dv + i])) st = DCP_ERR_SYS; /* wrote beside its row */
    }
    free(q);
    free(out);
    free(lse);
    free(other_pos);
    dcp_attend_destroy(a);
    dcp__pool_destroy(pool);
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
    if (c->n_ranks == 1)
        assert_int_equal(dcp_group_create_self(NULL, &groups[0]), DCP_OK);
    else
        assert_int_equal(dcp_group_create_threads(c->n_ranks, NULL, groups), DCP_OK);
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
    assert_int_equal(dcp_shm_prepare(c->n_ranks, NULL, &shm), DCP_OK);
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

/* ---- checks --------------------------------------------------------------------------------- */

static void print_call(const struct call *c)
{
    print_message("N %d I %lld H %lld/%lld dk %lld dv %lld latent %u causal %u sink %u pos %u cap "
                  "%g scale %g dtype %s algo %d limit %zu threads %d comm %d\n",
                  c->n_ranks, (long long)c->interleave, (long long)c->n_heads,
                  (long long)c->n_kv_heads, (long long)c->dk, (long long)c->dv, c->latent,
                  c->causal, c->has_sink, c->has_pos, (double)c->softcap, (double)c->scale,
                  dcp_dtype_name(c->dtype), (int)c->algo, c->limit, c->n_threads, (int)c->comm);
    for (int64_t s = 0; s < c->n_seqs; s++) {
        print_message("  seq %lld: length %lld rows %lld window %lld\n", (long long)s,
                      (long long)c->length[s], (long long)c->n_rows[s], (long long)c->window[s]);
    }
}

static void expect_ok(const struct call *c)
{
    for (int r = 0; r < c->n_ranks; r++) {
        if (world.answer->status[r] == DCP_OK && world.answer->allocs[r] == 0) continue;
        print_call(c);
        fail_msg("rank %d: status %d, %zu allocations in run: %s", r, world.answer->status[r],
                 world.answer->allocs[r], world.answer->text[r]);
    }
    const size_t limit = c->limit != 0 ? c->limit : (size_t)64 << 20;
    for (int r = 0; r < c->n_ranks; r++)
        assert_true(world.answer->info[r].workspace_bytes <= limit);
}

static void expect_oracle(const struct call *c)
{
    double *want = malloc((size_t)c->dv * sizeof(double));
    int64_t row = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) {
        const struct ref_attend ref = {
            .n_heads = c->n_heads,
            .n_kv_heads = c->n_kv_heads,
            .dk = c->dk,
            .dv = c->dv,
            .length = c->length[s],
            .window = c->window[s],
            .causal = (int)c->causal,
            .scale = c->scale != 0.0f ? (double)c->scale : 1.0 / sqrt((double)c->dk),
            .softcap = (double)c->softcap,
            .k = world.k[s],
            .v = c->latent ? world.k[s] : world.v[s],
            .v_stride = c->latent ? c->dk : c->dv,
            .sink = c->has_sink ? world.sink : NULL,
        };
        for (int64_t i = 0; i < c->n_rows[s]; i++, row++) {
            for (int64_t h = 0; h < c->n_heads; h++) {
                double lse, bound;
                ref_attend_row(&ref, world.q + (row * c->n_heads + h) * c->dk, h, world.pos[row],
                               want, &lse, &bound);
                const float got_lse = world.lse[row * c->n_heads + h];
                int ok = c->no_lse || (isinf(lse) ? (double)got_lse == lse
                                                  : fabs((double)got_lse - lse) <= bound);
                int64_t at = -1;
                for (int64_t d = 0; d < c->dv && ok; d++) {
                    const float got = world.out[(row * c->n_heads + h) * c->dv + d];
                    const double most = c->latent ? 12.0 : 3.0;
                    ok = isinf(lse) ? got == 0.0f : fabs((double)got - want[d]) <= bound * most;
                    at = d;
                }
                if (ok) continue;
                print_call(c);
                fail_msg("row %lld head %lld pos %lld dim %lld: out %.9g want %.9g, lse %.9g want "
                         "%.9g, bound %.3g",
                         (long long)row, (long long)h, (long long)world.pos[row], (long long)at,
                         at < 0 ? 0.0 : (double)world.out[(row * c->n_heads + h) * c->dv + at],
                         at < 0 ? 0.0 : want[at], (double)got_lse, lse, bound);
            }
        }
    }
    free(want);
}

/* The same call under other limits, threads and groups: the same bits. */
static void expect_same_bits(const struct call *c, const char *what, const float *out,
                             const float *lse)
{
    const size_t n_out = (size_t)(world.n_total * c->n_heads * c->dv) * sizeof(float);
    const size_t n_lse = (size_t)(world.n_total * c->n_heads) * sizeof(float);
    expect_ok(c);
    if (memcmp(out, world.out, n_out) == 0 && (c->no_lse || memcmp(lse, world.lse, n_lse) == 0))
        return;
    print_call(c);
    fail_msg("bits changed with %s", what);
}

static void check_call(const struct call *first, unsigned seed, int with_shm)
{
    struct call c = *first;
    fill_world(&c, seed);
    run_group(&c);
    expect_ok(&c);
    expect_oracle(&c);
    const size_t n_out = (size_t)(world.n_total * c.n_heads * c.dv) * sizeof(float);
    const size_t n_lse = (size_t)(world.n_total * c.n_heads) * sizeof(float);
    float *out = malloc(n_out + 1), *lse = malloc(n_lse + 1);
    memcpy(out, world.out, n_out);
    memcpy(lse, world.lse, n_lse);
    c.n_threads = 2 + (int)(seed % 2);
    c.lends_pool = (int)(seed / 2 % 2);
    run_group(&c);
    expect_same_bits(&c, "the number of threads", out, lse);
    c.lends_pool = 0;
    c.n_threads = 1;
    /* A limit a few rows above the least: ask create what it needs by giving too little. */
    c.limit = 1;
    run_group(&c);
    size_t need = 0;
    for (int r = 0; r < c.n_ranks; r++) {
        assert_int_equal(world.answer->status[r], DCP_ERR_ARG);
        const char *at = strstr(world.answer->text[r], "needs ");
        if (at != NULL) need = (size_t)strtoull(at + 6, NULL, 10);
    }
    assert_true(need > 0);
    const size_t row = (size_t)c.n_heads * (size_t)(c.dk + c.dv + 1) * sizeof(float);
    for (size_t extra = 0; extra < 4; extra += 2) {
        c.limit = need + extra * row + (extra ? 256 : 0);
        run_group(&c);
        expect_same_bits(&c, "the workspace limit", out, lse);
        for (int r = 1; r < c.n_ranks; r++)
            assert_int_equal(world.answer->info[r].tile_rows, world.answer->info[0].tile_rows);
    }
    c.limit = first->limit;
    if (with_shm) {
        c.comm = COMM_SHM;
        run_group(&c);
        expect_same_bits(&c, "the group", out, lse);
        c.comm = COMM_THREADS;
    }
    static const dcp_merge_algo algos[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLTOALL};
    for (int i = 0; i < 2; i++) {
        c.algo = algos[i];
        run_group(&c);
        expect_same_bits(&c, dcp_merge_algo_name(algos[i]), out, lse);
    }
    free(out);
    free(lse);
    drop_world(&c);
}

static struct call base_call(void)
{
    const struct call c = {.n_ranks = 1,
                           .n_threads = 1,
                           .interleave = 1,
                           .n_heads = 4,
                           .n_kv_heads = 2,
                           .dk = 16,
                           .dv = 16,
                           .causal = 1,
                           .dtype = DCP_BF16,
                           .n_seqs = 1,
                           .length = {40},
                           .n_rows = {3}};
    return c;
}

static const int rank_counts[] = {1, 2, 3, 4, 5, 8};

static void test_random_shapes(void **state)
{
    (void)state;
    static const int64_t heads[][2] = {{9, 3}, {4, 1}, {4, 4}, {8, 2}, {1, 1}, {6, 3}, {12, 1}};
    static const int64_t dims[][2] = {{64, 64}, {16, 16}, {40, 24}, {7, 13}, {32, 64}, {1, 1}};
    static const int64_t inters[] = {1, 3, 16};
    const unsigned seed0 = 20261129;
    print_message("seed %u\n", seed0);
    unsigned seed = seed0;
    for (int i = 0; i < 36; i++) {
        struct call c = base_call();
        c.n_ranks = rank_counts[i % 6];
        c.interleave = inters[rand_r(&seed) % 3];
        const int hh = rand_r(&seed) % 7, dd = rand_r(&seed) % 6;
        c.n_heads = heads[hh][0];
        c.n_kv_heads = heads[hh][1];
        c.dk = dims[dd][0];
        c.dv = dims[dd][1];
        c.causal = rand_r(&seed) % 4 != 0;
        c.has_sink = rand_r(&seed) % 3 == 0;
        c.has_pos = rand_r(&seed) % 3 == 0;
        c.no_lse = rand_r(&seed) % 5 == 0;
        c.softcap = rand_r(&seed) % 3 == 0 ? 5.0f : 0.0f;
        c.scale = rand_r(&seed) % 3 == 0 ? 0.3f : 0.0f;
        c.dtype = (dcp_dtype)(1 + rand_r(&seed) % 3);
        c.q_pad = rand_r(&seed) % 2 * 3;
        c.out_pad = rand_r(&seed) % 2 * 5;
        c.n_seqs = 1 + rand_r(&seed) % 4;
        c.max_tokens = 200;
        for (int64_t s = 0; s < c.n_seqs; s++) {
            c.length[s] = 1 + rand_r(&seed) % (s == 0 ? 150 : 60);
            c.n_rows[s] = rand_r(&seed) % 12;
            if (c.n_rows[s] > c.length[s]) c.n_rows[s] = c.length[s];
            c.window[s] = rand_r(&seed) % 3 == 0 ? 1 + rand_r(&seed) % 40 : 0;
        }
        check_call(&c, seed0 + (unsigned)i, i % 4 == 1);
    }
}

/* Few rows, many keys: keys are split. Windows keep to their part. */
static void test_split_keys(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        struct call c = base_call();
        c.n_ranks = rank_counts[i % 3];
        c.n_heads = 4;
        c.n_kv_heads = i % 2 ? 1 : 2;
        c.interleave = i < 3 ? 16 : 1;
        c.n_seqs = 2;
        c.length[0] = 5000;
        c.length[1] = 2900;
        c.n_rows[0] = 1 + i % 3;
        c.n_rows[1] = 1;
        c.window[1] = i % 2 ? 1700 : 0;
        c.dv = i == 4 ? 24 : 16;
        c.has_sink = i == 3;
        c.has_pos = i % 3 == 2; /* rows of very different reach: splits are the call's */
        check_call(&c, 77u + (unsigned)i, i == 1);
    }
}

static void test_many_rows(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct call c = base_call();
        c.n_ranks = 1 + i;
        c.n_heads = 6;
        c.n_kv_heads = 2;
        c.interleave = 4;
        c.length[0] = 330;
        c.n_rows[0] = 300;
        c.window[0] = i == 2 ? 33 : 0;
        check_call(&c, 5u + (unsigned)i, 0);
    }
}

static void test_latent(void **state)
{
    (void)state;
    static const int ranks[] = {1, 3};
    for (int i = 0; i < 2; i++) {
        struct call c = base_call();
        c.n_ranks = ranks[i];
        c.latent = 1;
        c.n_heads = i ? 100 : 16; /* 100 rows of a KV head: more than a job's */
        c.n_kv_heads = 1;
        c.dk = 576;
        c.dv = 512;
        c.interleave = 3;
        c.length[0] = 90;
        c.n_rows[0] = 2;
        check_call(&c, 31u + (unsigned)i, 0);
    }
}

/* More ranks than keys, than heads; no rows; one row; an empty sequence. */
static void test_edges(void **state)
{
    (void)state;
    struct call c = base_call();
    c.n_ranks = 8;
    c.length[0] = 2;
    c.n_rows[0] = 2;
    check_call(&c, 1, 1);
    c = base_call();
    c.n_ranks = 3;
    c.n_rows[0] = 0;
    check_call(&c, 2, 1);
    c.n_seqs = 0;
    check_call(&c, 2, 0);
    c = base_call();
    c.n_ranks = 2;
    c.has_pos = 1;
    c.length[0] = 0; /* no keys at all: every row is empty */
    check_call(&c, 3, 0);
    c = base_call();
    c.length[0] = 900;
    check_call(&c, 6, 1); /* a group of one in memory that only it sees */
    c = base_call();
    c.n_ranks = 5;
    c.interleave = 1000; /* one rank owns all */
    check_call(&c, 4, 0);
}

static void expect_all(const struct call *c, dcp_status st, const char *word)
{
    for (int r = 0; r < c->n_ranks; r++) {
        if (world.answer->status[r] == (int)st && strstr(world.answer->text[r], word) != NULL)
            continue;
        fail_msg("%s: rank %d: status %d, text \"%s\", wanted %d and \"%s\"", c->odd, r,
                 world.answer->status[r], world.answer->text[r], (int)st, word);
    }
}

static void test_disagreement(void **state)
{
    (void)state;
    static const struct {
        const char *odd;
        dcp_status st;
        const char *word;
        int in_run;
    } cases[] = {
        {"desc scale", DCP_ERR_MISMATCH, "scale is 0.25 on rank 0 and 0.3 on rank 1", 0},
        {"desc heads", DCP_ERR_ARG, "n_heads is -1", 0},
        {"window", DCP_ERR_MISMATCH, "sum of windows", 1},
        {"rows", DCP_ERR_MISMATCH, "T (rows of the call) is", 1},
        {"length", DCP_ERR_MISMATCH, "sum of lengths", 1},
        {"no q", DCP_ERR_ARG, "q is NULL", 1},
        {"view", DCP_ERR_ARG, "its view holds", 1},
        {"pos", DCP_ERR_MISMATCH, "q_pos", 1},
        {"T 0", DCP_ERR_MISMATCH, "T (rows of the call) is", 1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int comm = 0; comm < 2; comm++) {
            struct call c = base_call();
            c.comm = (enum comm)comm;
            c.n_ranks = 3;
            c.scale = 0.3f;
            c.odd = cases[i].odd;
            c.odd_rank = (int)(i % 3);
            c.has_pos = strcmp(c.odd, "pos") == 0;
            fill_world(&c, 3);
            run_group(&c);
            expect_all(&c, cases[i].st, cases[i].word);
            if (cases[i].in_run) {
                for (int r = 0; r < c.n_ranks; r++)
                    assert_int_equal(world.answer->again[r], DCP_OK);
                expect_oracle(&c); /* the group works on */
            }
            drop_world(&c);
        }
    }
}

static void test_refusals(void **state)
{
    (void)state;
    dcp_group *g = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    dcp_attend *a = NULL;
    assert_int_equal(dcp_attend_create(g, NULL, &a), DCP_ERR_ARG);
    assert_int_equal(dcp_attend_create(NULL, NULL, &a), DCP_ERR_ARG);
    dcp_attend_desc good = DCP_ATTEND_DESC_INIT;
    good.max_tokens = 4;
    good.n_heads = 4;
    good.n_kv_heads = 2;
    good.key_dim = good.value_dim = 8;
#define REFUSE(field, value, word)                                                                 \
    do {                                                                                           \
        dcp_attend_desc d = good;                                                                  \
        d.field = (value);                                                                         \
        assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);                               \
        assert_null(a);                                                                            \
        assert_non_null(strstr(dcp_last_error(), word));                                           \
    } while (0)
    REFUSE(struct_size, 3, "struct_size");
    REFUSE(max_tokens, 0, "max_tokens");
    REFUSE(n_heads, 0, "n_heads");
    REFUSE(n_kv_heads, 3, "multiple");
    REFUSE(key_dim, 0, "key_dim");
    REFUSE(value_dim, -1, "value_dim");
    REFUSE(interleave, -1, "interleave");
    REFUSE(n_threads, -1, "n_threads");
    REFUSE(softcap, -1.0f, "softcap");
    REFUSE(scale, NAN, "scale");
    REFUSE(workspace_limit_bytes, 100, "needs");
#undef REFUSE
    assert_int_equal(dcp_attend_create(g, &good, &a), DCP_OK);
    dcp_attend_info info;
    dcp_attend_get_info(a, &info);
    assert_int_equal(info.tile_rows, 4);
    assert_non_null(info.kernel);
    float x[4 * 4 * 8] = {0};
    const dcp_kv_view none = {.dtype = DCP_BF16};
    dcp_attend_seq seq = {&none, 0, 1, 0};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.q = args.out = x;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG); /* 1 row, length 0 */
    seq.n_rows = 0;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK);
    seq.n_rows = 5;
    seq.length = 5;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG); /* view too short */
    assert_non_null(strstr(dcp_last_error(), "view holds 0"));
    args.sink = x;
    seq.length = seq.n_rows = 0;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "sink"));
    assert_int_equal(dcp_attend_run(a, NULL, NULL), DCP_ERR_ARG);
    assert_int_equal(dcp_attend_run(NULL, &args, NULL), DCP_ERR_ARG);
    dcp_attend_destroy(a);
    dcp_attend_destroy(NULL);
    dcp_group_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_shapes), cmocka_unit_test(test_split_keys),
        cmocka_unit_test(test_many_rows),     cmocka_unit_test(test_latent),
        cmocka_unit_test(test_edges),         cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
