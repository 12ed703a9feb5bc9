/* SPDX-License-Identifier: Apache-2.0 */
/* Many ranks and little room: N to 64 within 8 MiB for every cut, tokens cut by heads where one
 * does not fit, the exact bytes of create against the counted allocator and the planner, and peaks
 * that stay below the limit at any size: the allocator's, and PSS as the kernel counts it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_case.h"
#include "merge/merge_priv.h"
#include "merge/merge_ranks.h"

static const dcp_merge_algo tiled[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLTOALL, DCP_MERGE_HALVING,
                                       DCP_MERGE_HIERARCHICAL};

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            printf("%s:%d rank %d: not so: %s (%s)\n", __func__, __LINE__, dcp_group_rank(g),      \
                   #cond, dcp_last_error());                                                       \
            dcp_group_abort(g, "a check failed");                                                  \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

struct shape {
    int64_t t, h, d;
    size_t limit;
    dcp_merge_algo algo;
    dcp_cut cut;
    dcp_dtype type;
};

static dcp_merge_desc desc_of(const struct shape *s)
{
    dcp_merge_desc d = DCP_MERGE_DESC_INIT;
    d.max_tokens = s->t;
    d.n_heads = s->h;
    d.dim = s->d;
    d.lse_base = DCP_LSE_BASE_E;
    d.cut = s->cut;
    d.algo = s->algo;
    d.out_type = s->type;
    d.workspace_limit_bytes = s->limit;
    return d;
}

static float value_of(int rank, int64_t t, int64_t h, int64_t d)
{
    return (float)((rank * 31 + t * 7 + h * 3 + d) % 17) - 8.0f;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { is_sanitized = 1 };
#else
enum { is_sanitized = 0 };
#endif

/* Payloads of small integers, weights equal: every result is a mean that can be checked at once. */
static int run_shape(dcp_group *g, void *user)
{
    const struct shape *s = user;
    const int rank = dcp_group_rank(g);
    const int n = dcp_group_size(g);
    const dcp_merge_desc d = desc_of(s);
    const int64_t n_rows = s->t * s->h;
    float *out = malloc((size_t)(n_rows * s->d) * sizeof(*out));
    float *lse = calloc((size_t)n_rows, sizeof(*lse));
    float *merged = malloc((size_t)(n_rows * s->d) * sizeof(*merged));
    CHECK(out != NULL && lse != NULL && merged != NULL);
    for (int64_t t = 0; t < s->t; t++) {
        for (int64_t h = 0; h < s->h; h++) {
            for (int64_t i = 0; i < s->d; i++)
                out[(t * s->h + h) * s->d + i] = value_of(rank, t, h, i);
        }
    }
    dcp_merge *m = NULL;
    CHECK(dcp_merge_create(g, &d, &m) == DCP_OK);
    dcp_merge_info info;
    dcp_merge_get_info(m, &info);
    CHECK(info.workspace_bytes <= (s->limit != 0 ? s->limit : (size_t)8 << 20));
    dcp_merge_args a = DCP_MERGE_ARGS_INIT;
    a.n_tokens = s->t;
    a.out = out;
    a.lse = lse;
    a.merged = merged;
    CHECK(dcp_merge_run(m, &a, NULL) == DCP_OK);
    dcp_range ts = {0, s->t};
    dcp_range hs = {0, s->h};
    if (s->cut == DCP_CUT_HEADS) hs = dcp_cut_range(s->h, n, rank);
    if (s->cut == DCP_CUT_TOKENS) ts = dcp_cut_range(s->t, n, rank);
    for (int64_t t = ts.begin; t < ts.end; t++) {
        for (int64_t h = hs.begin; h < hs.end; h++) {
            for (int64_t i = 0; i < s->d; i += 5) {
                double want = 0;
                for (int r = 0; r < n; r++) want += (double)value_of(r, t, h, i) / n;
                const int64_t at = ((t - ts.begin) * (hs.end - hs.begin) + h - hs.begin) * s->d + i;
                CHECK(fabs((double)merged[at] - want) < 1e-5);
            }
        }
    }
    dcp_merge_destroy(m);
    free(out);
    free(lse);
    free(merged);
    return 0;
}

static void test_many_ranks(void **state)
{
    (void)state;
    static const int sizes[] = {16, 33, 64};
    for (size_t i = 0; i < 3; i++) {
        for (int cut = DCP_CUT_HEADS; cut <= DCP_CUT_NONE; cut++) {
            for (size_t k = 0; k < 4; k++) {
                struct shape s = {70, 66, 9, 0, tiled[k], (dcp_cut)cut, DCP_F32};
                ranks_per_host = k == 3 ? 5 : 0;
                assert_int_equal(ranks_threads(sizes[i], 60.0, run_shape, &s), 0);
                ranks_per_host = 0;
            }
        }
    }
}

/* One token's tile of 3 (N-1) rows of all heads is 15 MB here: heads are cut. */
static void test_heads_are_cut(void **state)
{
    (void)state;
    for (size_t k = 1; k < 4; k++) {
        struct shape s = {64, 40, 512, (size_t)1 << 20, tiled[k], DCP_CUT_TOKENS, DCP_F32};
        ranks_per_host = k == 3 ? 2 : 0;
        assert_int_equal(ranks_threads(8, 60.0, run_shape, &s), 0);
        ranks_per_host = 0;
    }
    /* By the formulas, at the size of a real model: any N fits 8 MiB. */
    for (int n = 1; n <= 64; n++) {
        for (int cut = DCP_CUT_HEADS; cut <= DCP_CUT_NONE; cut++) {
            for (size_t k = 0; k < 4; k++) {
                const struct shape s = {16384, 96, 512, 0, tiled[k], (dcp_cut)cut, DCP_F32};
                const dcp_merge_desc d = desc_of(&s);
                dcp_merge_cost cost;
                if (n > 8 && n % 8 != 0) continue; /* each is some ms */
                if (dcp_merge_plan(&d, n, n - 1, 0, 0, &cost) != DCP_OK)
                    fail_msg("%d ranks: %s", n, dcp_last_error());
                assert_true(cost.workspace_bytes <= (size_t)8 << 20);
            }
        }
    }
}

/* In calls of several, messages made of pieces carry 96 KiB of payload at most, what MPI copies
 * without a wait: by tokens of 16, 8 and 24 KiB for a peer. From 32 KiB on each token is a
 * message, and so are a tile's LSEs: tiles of 128 KiB, at most a quarter of the call. */
static void test_gathered_messages(void **state)
{
    (void)state;
    static const struct {
        int64_t h, d;
        dcp_dtype type;
        int64_t tokens;
        bool each_apart; /* a message for each token */
    } table[] = {{64, 128, DCP_F32, 6, false}, {64, 128, DCP_BF16, 12, false},
                 {96, 128, DCP_F32, 4, false}, {128, 128, DCP_F32, 4, true},
                 {160, 128, DCP_F32, 3, true}, {192, 128, DCP_F32, 2, true},
                 {384, 128, DCP_F32, 1, true}};
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        const struct shape s = {
            64, table[i].h, table[i].d, 0, DCP_MERGE_ALLTOALL, DCP_CUT_HEADS, table[i].type};
        dcp_merge_desc d = desc_of(&s);
        dcp_merge_cost cost;
        assert_int_equal(dcp_merge_plan(&d, 2, 0, 0, 64, &cost), DCP_OK);
        assert_int_equal(cost.n_steps, (64 + table[i].tokens - 1) / table[i].tokens);
        assert_int_equal(cost.n_messages, cost.n_steps + (table[i].each_apart ? 64 : 0));
    }
}

/* ---- exact bytes and peaks: processes, so that the counts are those of one rank ---- */

static int64_t pss_kb(void)
{
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    if (f == NULL) return -1;
    char line[200];
    long long kb = -1;
    while (fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "Pss: %lld kB", &kb) == 1) break;
    }
    (void)fclose(f);
    return kb;
}

static int peak(dcp_group *g, void *user)
{
    const struct shape *s = user;
    const dcp_merge_desc d = desc_of(s);
    const bool is_published = s->algo == DCP_MERGE_ALLREDUCE || s->algo == DCP_MERGE_ALLREDUCE_TEMP;
    const size_t n_bytes = (size_t)(s->t * s->h * s->d) * dcp_dtype_bytes(s->type);
    char *out = malloc(n_bytes);
    float *lse = calloc((size_t)(s->t * s->h), sizeof(*lse));
    CHECK(out != NULL && lse != NULL);
    memset(out, 0, n_bytes);
    memset(lse, 0, (size_t)(s->t * s->h) * sizeof(*lse));
    CHECK(dcp_group_barrier(g) == DCP_OK);
    const size_t before = dcp__alloc_current();
    dcp__alloc_reset_peak();
    const int64_t pss_before = pss_kb();
    dcp_merge *m = NULL;
    CHECK(dcp_merge_create(g, &d, &m) == DCP_OK);
    dcp_merge_info info;
    dcp_merge_get_info(m, &info);
    const size_t made = dcp__alloc_current() - before;
    CHECK(made >= info.workspace_bytes && made <= info.workspace_bytes + 4096);
    dcp_merge_cost cost;
    CHECK(dcp_merge_plan(&d, dcp_group_size(g), dcp_group_rank(g), 0, 0, &cost) == DCP_OK);
    CHECK(cost.workspace_bytes == info.workspace_bytes);
    const dcp_range heads = dcp_cut_range(s->h, dcp_group_size(g), dcp_group_rank(g));
    dcp_merge_args a = DCP_MERGE_ARGS_INIT;
    a.n_tokens = s->t;
    a.out = out;
    a.lse = lse;
    a.merged = out + (size_t)(heads.begin * s->d) * dcp_dtype_bytes(s->type);
    a.merged_token_stride = s->h * s->d;
    a.merged_head_stride = s->d;
    const size_t n_calls = dcp__alloc_calls();
    for (int i = 0; i < 2; i++) CHECK(dcp_merge_run(m, &a, NULL) == DCP_OK);
    CHECK(dcp__alloc_calls() == n_calls);
    const size_t extra = dcp__alloc_peak() - before;
    const int64_t pss_extra = pss_kb() - pss_before;
    if (!is_published) {
        CHECK(extra <= s->limit + 4096);
        /* Rings and records of the group are touched now for the first time: 1 MiB beside. A
         * sanitizer's shadow memory grows on its own. */
        CHECK(pss_before < 0 || is_sanitized || pss_extra * 1024 <= (int64_t)s->limit + (1 << 20));
    } else {
        const size_t wide = (size_t)(s->t * s->h * s->d) * sizeof(float);
        const size_t n_copies = s->algo == DCP_MERGE_ALLREDUCE_TEMP ? 2 : s->type != DCP_F32;
        CHECK(extra >= n_copies * wide && extra <= n_copies * wide + wide / 8 + 65536);
        CHECK(info.peak_bytes ==
              info.workspace_bytes + n_bytes + (size_t)(s->t * s->h) * sizeof(float));
    }
    CHECK(dcp_group_barrier(g) == DCP_OK);
    dcp_merge_destroy(m);
    free(out);
    free(lse);
    return 0;
}

static void test_peak(void **state)
{
    (void)state;
    static const struct {
        int64_t t, h, d;
        size_t limit;
    } sizes[] = {{8, 12, 64, 100000}, {300, 24, 128, 1 << 20}, {700, 32, 256, 2 << 20}};
    for (size_t i = 0; i < 3; i++) {
        for (int type = DCP_F32; type <= DCP_BF16; type += DCP_BF16 - DCP_F32) {
            for (size_t k = 0; k < 6; k++) {
                struct shape s = {sizes[i].t,
                                  sizes[i].h,
                                  sizes[i].d,
                                  sizes[i].limit,
                                  k < 4   ? tiled[k]
                                  : k < 5 ? DCP_MERGE_ALLREDUCE
                                          : DCP_MERGE_ALLREDUCE_TEMP,
                                  DCP_CUT_HEADS,
                                  (dcp_dtype)type};
                if (ranks_shm(3, 60.0, peak, &s) != 0)
                    fail_msg("%s at %lld x %lld x %lld", dcp_merge_algo_name(s.algo),
                             (long long)s.t, (long long)s.h, (long long)s.d);
            }
        }
    }
}

/* ---- the patterns, by brute force ---- */

static void test_halving_pattern(void **state)
{
    (void)state;
    for (int n = 1; n <= 70; n++) {
        int n_levels = 0;
        while (1 << n_levels < n) n_levels++;
        for (int rank = 0; rank < n; rank++) {
            unsigned char in[70];
            struct dcp__halving h;
            int level = 0;
            int lo = 0;
            int hi = n;
            for (; dcp__halving_at(n, rank, level, &h); level++) {
                /* Halves make up the group; what is kept is the half with this rank. */
                assert_true(h.keep_lo <= rank && rank < h.keep_hi);
                assert_true(h.keep_hi - h.keep_lo + h.send_hi - h.send_lo == hi - lo);
                assert_true(h.send_to >= h.send_lo && h.send_to < h.send_hi);
                for (int i = 0; i < h.n_recvs; i++) { /* who sends to me, and does it know? */
                    struct dcp__halving peer;
                    assert_true(dcp__halving_at(n, h.recv_from[i], level, &peer));
                    assert_int_equal(peer.send_to, rank);
                }
                lo = h.keep_lo;
                hi = h.keep_hi;
            }
            assert_true(level <= n_levels && lo == rank && hi == rank + 1);
            /* In the end all parts are in it. */
            assert_int_equal(dcp__halving_members(n, rank, level, in), n);
        }
    }
}

static void test_hosts_pattern(void **state)
{
    (void)state;
    int host_of[12];
    for (int seed = 0; seed < 50; seed++) {
        struct dcp__merge_shape s;
        memset(&s, 0, sizeof(s));
        uint64_t rng = (uint64_t)seed;
        s.n_ranks = 1 + (int)ref_pick(&rng, 12);
        s.host_of = host_of;
        int n_hosts = 0;
        for (int r = 0; r < s.n_ranks; r++) { /* numbered by first ranks, mixed */
            const int host = (int)ref_pick(&rng, n_hosts + 1);
            host_of[r] = host;
            if (host == n_hosts) n_hosts++;
        }
        assert_int_equal(dcp__n_hosts(&s), n_hosts);
        for (int r = 0; r < s.n_ranks; r++) {
            assert_int_equal(dcp__host_handler(&s, host_of[r], r), r); /* the own block at home */
            for (int host = 0; host < n_hosts; host++)
                assert_int_equal(host_of[dcp__host_handler(&s, host, r)], host);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halving_pattern), cmocka_unit_test(test_hosts_pattern),
        cmocka_unit_test(test_heads_are_cut),   cmocka_unit_test(test_gathered_messages),
        cmocka_unit_test(test_many_ranks),      cmocka_unit_test(test_peak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
