/* SPDX-License-Identifier: Apache-2.0 */
/* Memory at a shape whose partial would be many times the limit: 16,384 and 32,768 rows in one
 * call. Ranks are processes; what each takes above its inputs, cache and result is read from the
 * kernel (PSS: pages that ranks share count once between them),
 * beside what the allocator counted. */
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
#include "dcpattn/attend.h"

enum { MAX_RANKS = 8, MIB = 1 << 20 };

struct shape {
    int n_ranks;
    int64_t n_rows, n_heads, key_dim, value_dim, window;
};
struct found {
    int status;
    char text[200];
    int64_t pss_bytes, counted_bytes, allocs, workspace_bytes, n_tiles;
};
static struct found *found; /* shared */

/* Private pages whole, shared ones by their share. */
static int64_t pss_bytes(void)
{
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    long long kib = -1;
    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "Pss: %lld kB", &kib) == 1) break;
    if (f != NULL) fclose(f);
    return kib < 0 ? -1 : (int64_t)kib * 1024;
}

static dcp_status measure(const struct shape *s, dcp_group *g, struct found *out)
{
    const int r = dcp_group_rank(g);
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.max_tokens = s->n_rows;
    d.n_heads = s->n_heads;
    d.n_kv_heads = 1;
    d.key_dim = s->key_dim;
    d.value_dim = s->value_dim;
    d.causal = 1;
    dcp_cache_desc c = DCP_CACHE_DESC_INIT;
    c.n_ranks = s->n_ranks;
    c.rank = r;
    c.n_layers = c.n_kv_heads = 1;
    c.key_dim = s->key_dim;
    c.value_dim = s->value_dim;
    c.latent = 1;
    c.max_tokens = s->n_rows;
    dcp_cache *cache = NULL;
    DCP_TRY(dcp_cache_create(&c, &cache));
    DCP_TRY(dcp_cache_extend(cache, 0, s->n_rows));
    float *key = calloc((size_t)s->key_dim, sizeof(float));
    const int64_t own_keys = dcp_local_length(s->n_rows, s->n_ranks, r, 1);
    for (int64_t i = 0; i < own_keys; i++) {
        key[i % s->key_dim] = (float)(i % 7) * 0.25f;
        DCP_TRY(dcp_cache_store(cache, 0, 0, i, 1, key, 0, NULL, 0));
    }
    const dcp_range heads = dcp_attend_heads(&d, s->n_ranks, r);
    const size_t own = (size_t)(heads.end - heads.begin), rows = (size_t)s->n_rows;
    const size_t q_bytes = rows * own * (size_t)s->key_dim * sizeof(float);
    const size_t out_bytes = rows * own * (size_t)s->value_dim * sizeof(float);
    float *q = malloc(q_bytes + 4), *result = malloc(out_bytes + 4);
    memset(q, 0, q_bytes);
    memset(result, 1, out_bytes); /* there before anything is measured */

    const int64_t pss_before = pss_bytes();
    const size_t counted_before = dcp__alloc_current();
    dcp_attend *a = NULL;
    DCP_TRY(dcp_attend_create(g, &d, &a));
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(a, &info);
    dcp_kv_view view;
    DCP_TRY(dcp_cache_view(cache, 0, 0, &view));
    const dcp_attend_seq seq = {&view, s->n_rows, s->n_rows, s->window};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.q = q;
    args.out = result;
    dcp_attend_stats stats = DCP_ATTEND_STATS_INIT;
    const size_t calls = dcp__alloc_calls();
    DCP_TRY(dcp_attend_run(a, &args, &stats));
    out->allocs = (int64_t)(dcp__alloc_calls() - calls);
    DCP_TRY(dcp_group_barrier(g));
    /* Nothing was given back since create: what there is now is the peak. */
    out->pss_bytes = pss_bytes() - pss_before;
    out->counted_bytes = (int64_t)(dcp__alloc_current() - counted_before);
    out->workspace_bytes = (int64_t)info.workspace_bytes;
    out->n_tiles = stats.n_tiles;
    DCP_TRY(dcp_group_barrier(g));
    dcp_attend_destroy(a);
    dcp_cache_destroy(cache);
    free(q);
    free(result);
    free(key);
    return DCP_OK;
}

static void check(const struct shape *s)
{
    dcp_shm *shm = NULL;
    pid_t pids[MAX_RANKS];
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 200;
    memset(found, 0, sizeof(*found) * MAX_RANKS);
    assert_int_equal(dcp_shm_prepare(s->n_ranks, &opts, &shm), DCP_OK);
    for (int r = 0; r < s->n_ranks; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] > 0) continue;
        dcp_group *g = NULL;
        found[r].status = (int)dcp_shm_attach(shm, r, &g);
        if (found[r].status == DCP_OK) found[r].status = (int)measure(s, g, &found[r]);
        if (found[r].status != DCP_OK)
            snprintf(found[r].text, sizeof(found[r].text), "%s", dcp_last_error());
        dcp_group_destroy(g);
        _exit(0);
    }
    for (int r = 0; r < s->n_ranks; r++) {
        int status = 0;
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        dcp_shm_report_exit(shm, r, status);
    }
    dcp_shm_release(shm);
    const int64_t partial = s->n_rows * s->n_heads * s->value_dim * (int64_t)sizeof(float);
    for (int r = 0; r < s->n_ranks; r++) {
        const struct found *f = &found[r];
        if (f->status != DCP_OK) fail_msg("rank %d: %d %s", r, f->status, f->text);
        print_message("rank %d of %d: %lld rows x %lld heads x %lld, a partial of %lld MiB: "
                      "workspace %.1f MiB, PSS %.1f MiB more, %lld tiles\n",
                      r, s->n_ranks, (long long)s->n_rows, (long long)s->n_heads,
                      (long long)s->value_dim, (long long)(partial / MIB),
                      (double)f->workspace_bytes / MIB, (double)f->pss_bytes / MIB,
                      (long long)f->n_tiles);
        assert_int_equal(f->allocs, 0);
        assert_true(f->workspace_bytes <= (int64_t)64 * MIB);
        assert_true(f->counted_bytes <= (int64_t)64 * MIB + 4096);
        if (getenv("DCP_ATTN_TEST_NO_PSS") == NULL) assert_true(f->pss_bytes <= (int64_t)96 * MIB);
    }
}

static void test_large(void **state)
{
    (void)state;
    /* Windows keep the computing short; the bytes are those of any window. */
    const struct shape shapes[] = {{2, 16384, 12, 72, 64, 8}, {8, 32768, 16, 40, 32, 4}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) check(&shapes[i]);
}

/* The judged shapes, by the plan: exact, and nothing has to be computed for them. */
static void test_planned(void **state)
{
    (void)state;
    static const int n_ranks[] = {2, 8};
    static const int64_t n_rows[] = {16384, 32768};
    for (int i = 0; i < 4; i++) {
        dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
        d.max_tokens = n_rows[i / 2];
        d.n_heads = 96;
        d.n_kv_heads = 1;
        d.key_dim = 576;
        d.value_dim = 512;
        d.n_threads = 2;
        for (int host = 0; host < 2; host++) {
            for (int r = 0; r < n_ranks[i % 2]; r++) {
                dcp_attend_info info = DCP_ATTEND_INFO_INIT;
                assert_int_equal(dcp_attend_plan(&d, n_ranks[i % 2], r, host, &info), DCP_OK);
                assert_true(info.workspace_bytes <= (size_t)64 * MIB);
                assert_int_equal(info.n_slots, 2);
                assert_true(info.tile_rows >= 32);
                if (r == 0)
                    print_message("%lld rows, %d ranks, %s: %.2f MiB, tiles of %lld rows\n",
                                  (long long)d.max_tokens, n_ranks[i % 2], info.algo_name,
                                  (double)info.workspace_bytes / MIB, (long long)info.tile_rows);
            }
        }
    }
}

int main(void)
{
    found = mmap(NULL, sizeof(*found) * MAX_RANKS, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_planned),
                                       cmocka_unit_test(test_large)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
