/* SPDX-License-Identifier: Apache-2.0 */
/* Random shapes, strides, types, cuts, bases, sinks, kv_len, policies, in place, LSEs or (max,
 * sum), run or start and wait, against the double oracle; direct and alltoall at several tile sizes
 * against each other, halving and hierarchical against themselves, bit for bit; and what a run has
 * counted against the formulas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_case.h"
#include "merge/merge_ranks.h"

enum { SEED = 20261129, MAX_BLOCKS = 64 };

/* Joins of rows on the way to a result (docs/NUMERICS.md): halving one a level, hierarchical inside
 * a host and between hosts; the last weighting, with a sink, is one more. allreduce rounds each
 * product, then each sum: as much as a join. */
static int joins_of(dcp_merge_algo algo, int n_ranks)
{
    int n_levels = 0;
    while (1 << n_levels < n_ranks) n_levels++;
    if (algo == DCP_MERGE_HALVING) return n_levels + 1;
    return algo == DCP_MERGE_DIRECT || algo == DCP_MERGE_ALLTOALL ? 1 : 3;
}

/* Memory of a case: private, or the group's (then peers read it in place). */
struct arena {
    dcp_group *g;
    bool of_group;
    void *blocks[MAX_BLOCKS];
    int n_blocks;
};

static void *arena_alloc(void *user, size_t n_bytes)
{
    struct arena *a = user;
    void *p = NULL;
    if (a->of_group) {
        if (dcp_group_alloc(a->g, n_bytes, &p) != DCP_OK) abort();
    } else if (posix_memalign(&p, 64, n_bytes + 1) != 0) {
        abort();
    }
    a->blocks[a->n_blocks++] = p;
    return p;
}

static void arena_free(struct arena *a)
{
    for (int i = a->n_blocks - 1; i >= 0; i--) {
        if (a->of_group)
            dcp_group_free(a->g, a->blocks[i]);
        else
            free(a->blocks[i]);
    }
    a->n_blocks = 0;
}

struct result {
    char *bytes; /* the merged buffer, gaps included, then the LSEs */
    size_t n_bytes;
};

static struct {
    int n_cases;
    uint64_t first;
} plan;

#define COMPLAIN(c, g, ...)                                                                        \
    do {                                                                                           \
        printf("seed %llu n %d rank %d %s: ", (unsigned long long)(c)->seed, (c)->n,               \
               dcp_group_rank(g), dcp_group_kind(g));                                              \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
        return 1;                                                                                  \
    } while (0)

struct placed {
    char *out;
    int64_t out_ts, out_hs;
    float *lse;
    int64_t lse_ts, lse_hs;
    dcp_range t, h;
};

/* Rows outside the own result are checked by their neighbours; here: the own ones. */
static int check_rows(const struct mcase *c, dcp_group *g, const struct mpart *parts,
                      const float *sink, const struct placed *m, const dcp_merge_stats *stats,
                      int n_joins)
{
    struct mtotals totals = {0, 0, 0};
    double value[200];
    double top[200];
    const dcp_dtype type = mcase_merged_type(c);
    for (int64_t t = 0; t < c->n_tokens; t++) {
        for (int64_t h = 0; h < c->n_heads; h++) {
            const double lse = mcase_exact(c, parts, sink, t, h, value, top, &totals);
            if (t < m->t.begin || t >= m->t.end || h < m->h.begin || h >= m->h.end) continue;
            const int64_t at = (t - m->t.begin) * m->out_ts + (h - m->h.begin) * m->out_hs;
            for (int64_t i = 0; i < c->dim; i++) {
                const double got = ref_get(type, m->out, at + i);
                const bool is_right =
                    isnan(value[i])   ? isnan(got)
                    : isinf(value[i]) ? got == value[i]
                    : isinf(lse)      ? got == 0
                                      : fabs(got - value[i]) <=
                                       tol_merge_tree(c->n, n_joins, top[i], value[i], type);
                if (!is_right)
                    COMPLAIN(c, g, "(%lld,%lld,%lld) got %.9g, want %.9g", (long long)t,
                             (long long)h, (long long)i, got, value[i]);
            }
            if (m->lse == NULL) continue;
            const double got =
                (double)m->lse[(t - m->t.begin) * m->lse_ts + (h - m->h.begin) * m->lse_hs];
            if (isinf(lse) ? got != lse : !(fabs(got - lse) <= tol_merge_lse(c->n, lse)))
                COMPLAIN(c, g, "lse (%lld,%lld) got %.9g, want %.9g", (long long)t, (long long)h,
                         got, lse);
        }
    }
    if (stats->nonfinite_values != totals.nonfinite || stats->lse_bad != totals.bad ||
        stats->lse_empty != totals.empty)
        COMPLAIN(c, g, "counts %lld %lld %lld, want %lld %lld %lld",
                 (long long)stats->nonfinite_values, (long long)stats->lse_bad,
                 (long long)stats->lse_empty, (long long)totals.nonfinite, (long long)totals.bad,
                 (long long)totals.empty);
    return 0;
}

/* Outside the own slice the partial is as it was. */
static int check_untouched(const struct mcase *c, dcp_group *g, const struct mpart *own,
                           const struct mpart *before, const struct placed *m)
{
    const size_t ob = dcp_dtype_bytes(c->desc.out_type);
    const size_t lb = dcp_dtype_bytes(c->desc.lse_type);
    unsigned char *a = malloc(own->out_bytes + own->lse_bytes + 1);
    if (a == NULL) abort();
    memcpy(a, own->out, own->out_bytes);
    memcpy(a + own->out_bytes, own->lse, own->lse_bytes);
    for (int64_t t = m->t.begin; t < m->t.end; t++) {
        for (int64_t h = m->h.begin; h < m->h.end; h++) {
            const size_t at = (size_t)(t * own->out_ts + h * own->out_hs) * ob;
            const size_t la = (size_t)(t * own->lse_ts + h * own->lse_hs) * lb;
            if (c->in_place) memcpy(a + at, (char *)before->out + at, (size_t)c->dim * ob);
            if (c->lse_in_place) memcpy(a + own->out_bytes + la, (char *)before->lse + la, lb);
        }
    }
    const bool is_same = memcmp(a, before->out, own->out_bytes) == 0 &&
                         memcmp(a + own->out_bytes, before->lse, own->lse_bytes) == 0;
    free(a);
    if (!is_same) COMPLAIN(c, g, "the partial was changed outside the own slice");
    return 0;
}

/* The same merge blocking, started and waited for, or started and tested to the end. */
static dcp_status run_form(dcp_merge *merge, const dcp_merge_args *args, dcp_merge_stats *stats,
                           uint64_t pick)
{
    if (pick % 3 == 0) return dcp_merge_run(merge, args, stats);
    dcp_status st = dcp_merge_start(merge, args);
    if (st != DCP_OK) return st;
    if (pick % 3 == 1) return dcp_merge_wait(merge, stats);
    int is_done = 0;
    while (is_done == 0) {
        st = dcp_merge_test(merge, &is_done, stats);
        if (is_done == 0) usleep(20);
    }
    return st;
}

static int run_one(dcp_group *g, const struct mcase *c, dcp_merge_algo algo, size_t limit,
                   bool of_group, struct result *result)
{
    const int rank = dcp_group_rank(g);
    const dcp_dtype type = mcase_merged_type(c);
    const size_t mb = dcp_dtype_bytes(type);
    struct arena arena = {g, of_group, {NULL}, 0};
    struct arena aside = {g, false, {NULL}, 0};
    struct mpart own;
    struct mpart parts[8];
    float sink[64];
    mcase_fill(c, rank, &own, arena_alloc, &arena);
    for (int r = 0; r < c->n; r++) mcase_fill(c, r, &parts[r], arena_alloc, &aside);
    mcase_sink(c, sink);

    struct placed m;
    memset(&m, 0, sizeof(m));
    m.t = (dcp_range){0, c->n_tokens};
    m.h = (dcp_range){0, c->n_heads};
    if (c->desc.cut == DCP_CUT_HEADS) m.h = dcp_cut_range(c->n_heads, c->n, rank);
    if (c->desc.cut == DCP_CUT_TOKENS) m.t = dcp_cut_range(c->n_tokens, c->n, rank);
    const int64_t n_t = m.t.end - m.t.begin;
    const int64_t n_h = m.h.end - m.h.begin;
    mcase_strides(c->merged_layout, n_t, n_h, c->dim, &m.out_ts, &m.out_hs);
    mcase_strides(c->merged_layout, n_t, n_h, 1, &m.lse_ts, &m.lse_hs);
    const size_t out_bytes = (size_t)(n_t * m.out_ts + n_h * m.out_hs) * mb;
    const size_t lse_bytes = (size_t)(n_t * m.lse_ts + n_h * m.lse_hs) * sizeof(float);
    m.out = arena_alloc(&aside, out_bytes);
    m.lse = arena_alloc(&aside, lse_bytes);
    memset(m.out, 0x5a, out_bytes);
    memset(m.lse, 0x5a, lse_bytes);
    char *const plain_out = m.out;
    float *const plain_lse = m.lse;
    if (c->in_place) {
        m.out = (char *)own.out + (m.t.begin * own.out_ts + m.h.begin * own.out_hs) * (int64_t)mb;
        m.out_ts = own.out_ts;
        m.out_hs = own.out_hs;
    }
    if (c->lse_in_place) {
        m.lse = (float *)own.lse + m.t.begin * own.lse_ts + m.h.begin * own.lse_hs;
        m.lse_ts = own.lse_ts;
        m.lse_hs = own.lse_hs;
    }
    if (!c->wants_lse) m.lse = NULL;

    dcp_merge_desc desc = c->desc;
    desc.algo = algo;
    desc.workspace_limit_bytes = limit;
    dcp_merge *merge = NULL;
    if (dcp_merge_create(g, &desc, &merge) != DCP_OK)
        COMPLAIN(c, g, "create: %s", dcp_last_error());
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = c->n_tokens;
    args.out = own.out;
    args.out_token_stride = own.out_ts;
    args.out_head_stride = own.out_hs;
    args.lse = own.lse;
    args.lse_token_stride = own.lse_ts;
    args.lse_head_stride = own.lse_hs;
    args.kv_len = own.kv_len;
    args.sum = own.sum;
    args.sink = c->desc.has_sink ? sink : NULL;
    args.merged = m.out;
    args.merged_token_stride = m.out_ts;
    args.merged_head_stride = m.out_hs;
    args.merged_lse = m.lse;
    args.merged_lse_token_stride = m.lse_ts;
    args.merged_lse_head_stride = m.lse_hs;
    dcp_merge_stats stats;
    if (run_form(merge, &args, &stats, c->seed + limit) != DCP_OK)
        COMPLAIN(c, g, "%s: %s", dcp_merge_algo_name(algo), dcp_last_error());
    int n_failed = check_rows(c, g, parts, args.sink, &m, &stats, joins_of(algo, c->n));
    if (n_failed == 0 && algo != DCP_MERGE_ALLREDUCE)
        n_failed = check_untouched(c, g, &own, &parts[rank], &m);
    dcp_merge_cost cost;
    dcp_merge_get_cost(merge, c->n_tokens, &cost);
    if (cost.wire_bytes != stats.wire_bytes || cost.n_messages != stats.n_messages)
        COMPLAIN(c, g, "%s: sent %lld bytes in %lld messages, the formula says %lld in %lld",
                 dcp_merge_algo_name(algo), (long long)stats.wire_bytes,
                 (long long)stats.n_messages, (long long)cost.wire_bytes,
                 (long long)cost.n_messages);
    if (n_failed != 0) printf("  algo %s limit %zu\n", dcp_merge_algo_name(algo), limit);
    /* Keep the bits, gaps included where the buffer is ours alone. */
    result->n_bytes = out_bytes + lse_bytes;
    result->bytes = malloc(result->n_bytes + 1);
    if (result->bytes == NULL) abort();
    if (c->in_place) memcpy(plain_out, m.out, n_t * n_h > 0 ? (size_t)c->dim * mb : 0);
    if (c->lse_in_place && n_t * n_h > 0) memcpy(plain_lse, m.lse, sizeof(float));
    memcpy(result->bytes, plain_out, out_bytes);
    memcpy(result->bytes + out_bytes, plain_lse, lse_bytes);
    if (c->in_place) { /* every row of the slice, packed over the buffer as far as it goes */
        size_t at = 0;
        for (int64_t t = 0; t < n_t; t++) {
            for (int64_t h = 0; h < n_h; h++) {
                if (at + (size_t)c->dim * mb > out_bytes) continue;
                memcpy(result->bytes + at, m.out + (t * m.out_ts + h * m.out_hs) * (int64_t)mb,
                       (size_t)c->dim * mb);
                at += (size_t)c->dim * mb;
            }
        }
    }
    dcp_merge_destroy(merge);
    arena_free(&arena);
    arena_free(&aside);
    return n_failed;
}

/* One algorithm at limits, each with the bits of the one before; first is the result to equal, or
 * is filled. */
static int same_bits(dcp_group *g, const struct mcase *c, dcp_merge_algo algo, const size_t *limits,
                     int n_limits, bool of_group, struct result *first)
{
    for (int i = 0; i < n_limits; i++) {
        struct result other = {NULL, 0};
        if (run_one(g, c, algo, limits[i], of_group, &other) != 0) {
            free(other.bytes);
            return 1;
        }
        const bool is_same =
            first->bytes == NULL || (first->n_bytes == other.n_bytes &&
                                     memcmp(first->bytes, other.bytes, first->n_bytes) == 0);
        if (first->bytes == NULL)
            *first = other;
        else
            free(other.bytes);
        if (!is_same)
            COMPLAIN(c, g, "%s (limit %zu) has other bits", dcp_merge_algo_name(algo), limits[i]);
    }
    return 0;
}

static int all_algos(dcp_group *g, const struct mcase *c, bool of_group)
{
    /* Few tokens a tile, more, all. A token's tile has a row block of each rank (cut tokens). */
    const size_t token =
        (size_t)c->n * ((size_t)c->n_heads * ((size_t)c->dim * 4 + 12 * (size_t)c->n) + 4096);
    const size_t limits[] = {0, 8 * token, 30 * token};
    struct result rank_order = {NULL, 0};
    struct result halving = {NULL, 0};
    struct result host = {NULL, 0};
    const bool all_see = dcp_group_n_hosts(g) == 1;
    int n_failed = 0;
    if (all_see) n_failed += same_bits(g, c, DCP_MERGE_DIRECT, limits, 1, of_group, &rank_order);
    if (n_failed == 0)
        n_failed += same_bits(g, c, DCP_MERGE_ALLTOALL, limits, 3, of_group, &rank_order);
    if (n_failed == 0 && all_see && strcmp(dcp_group_kind(g), "shm") == 0)
        n_failed += same_bits(g, c, DCP_MERGE_DIRECT, limits + 2, 1, !of_group, &rank_order);
    if (n_failed == 0)
        n_failed += same_bits(g, c, DCP_MERGE_HALVING, limits, 3, of_group, &halving);
    if (n_failed == 0)
        n_failed += same_bits(g, c, DCP_MERGE_HIERARCHICAL, limits, 3, of_group, &host);
    if (n_failed == 0 && strcmp(dcp_group_kind(g), "shm") == 0)
        n_failed += same_bits(g, c, DCP_MERGE_HIERARCHICAL, limits + 1, 1, !of_group, &host);
    struct result base = {NULL, 0};
    struct result temp = {NULL, 0};
    if (n_failed == 0) n_failed += same_bits(g, c, DCP_MERGE_ALLREDUCE, limits, 1, of_group, &base);
    if (n_failed == 0)
        n_failed += same_bits(g, c, DCP_MERGE_ALLREDUCE_TEMP, limits, 1, of_group, &temp);
    free(rank_order.bytes);
    free(halving.bytes);
    free(host.bytes);
    free(base.bytes);
    free(temp.bytes);
    return n_failed;
}

static int many_cases(dcp_group *g, void *user)
{
    (void)user;
    for (int i = 0; i < plan.n_cases; i++) {
        struct mcase c;
        mcase_make(&c, plan.first + (uint64_t)i * 7919u, dcp_group_size(g));
        if (all_algos(g, &c, i % 2 == 0) != 0) {
            dcp_group_abort(g, "a case failed");
            return 1;
        }
    }
    return 0;
}

static void test_threads(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 4, 5, 7, 8};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        plan.n_cases = 40;
        plan.first = SEED + 1000 * i;
        print_message("threads, %d ranks, seed %llu\n", sizes[i], (unsigned long long)plan.first);
        assert_int_equal(ranks_threads(sizes[i], 60.0, many_cases, NULL), 0);
    }
}

/* Hosts of 2, of 3, of 1: memory between them is hidden. */
static void test_hosts(void **state)
{
    (void)state;
    static const int sizes[][2] = {{4, 2}, {5, 2}, {7, 3}, {3, 1}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        plan.n_cases = 40;
        plan.first = SEED + 900000 + 1000 * i;
        print_message("threads, %d ranks, %d a host, seed %llu\n", sizes[i][0], sizes[i][1],
                      (unsigned long long)plan.first);
        ranks_per_host = sizes[i][1];
        assert_int_equal(ranks_threads(sizes[i][0], 60.0, many_cases, NULL), 0);
        ranks_per_host = 0;
    }
    plan.n_cases = 20;
    ranks_per_host = 2;
    assert_int_equal(ranks_shm(5, 60.0, many_cases, NULL), 0);
    ranks_per_host = 0;
}

static void test_shm(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 5};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        plan.n_cases = 20;
        plan.first = SEED + 500000 + 1000 * i;
        print_message("shm, %d ranks, seed %llu\n", sizes[i], (unsigned long long)plan.first);
        assert_int_equal(ranks_shm(sizes[i], 60.0, many_cases, NULL), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads), cmocka_unit_test(test_hosts),
                                       cmocka_unit_test(test_shm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
