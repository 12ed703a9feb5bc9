/* SPDX-License-Identifier: Apache-2.0 */
/* Random shapes, strides, types, cuts, bases, sinks, kv_len, policies, in place, against the double
 * oracle; and direct and alltoall at several tile sizes against each other, bit for bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_case.h"
#include "merge/merge_ranks.h"

enum { SEED = 20261129, MAX_BLOCKS = 64 };

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
                      double slack)
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
                    : isinf(lse)
                        ? got == 0
                        : fabs(got - value[i]) <= tol_merge(c->n, top[i], value[i], type) * slack;
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

static int run_one(dcp_group *g, const struct mcase *c, dcp_merge_algo algo, size_t limit,
                   bool of_group, struct result *result)
{
    const int rank = dcp_group_rank(g);
    const dcp_dtype type = mcase_merged_type(c);
    const size_t mb = dcp_dtype_bytes(type);
    struct arena arena = {g, of_group, {NULL}, 0};
    struct arena aside = {g, false, {NULL}, 0};
    struct mpart own;
    struct mpart parts[RANKS_MAX];
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
    args.sink = c->desc.has_sink ? sink : NULL;
    args.merged = m.out;
    args.merged_token_stride = m.out_ts;
    args.merged_head_stride = m.out_hs;
    args.merged_lse = m.lse;
    args.merged_lse_token_stride = m.lse_ts;
    args.merged_lse_head_stride = m.lse_hs;
    dcp_merge_stats stats;
    if (dcp_merge_run(merge, &args, &stats) != DCP_OK)
        COMPLAIN(c, g, "%s: %s", dcp_merge_algo_name(algo), dcp_last_error());
    int n_failed =
        check_rows(c, g, parts, args.sink, &m, &stats, algo == DCP_MERGE_ALLREDUCE ? 2.0 : 1.0);
    if (n_failed == 0 && algo != DCP_MERGE_ALLREDUCE)
        n_failed = check_untouched(c, g, &own, &parts[rank], &m);
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

static int all_algos(dcp_group *g, const struct mcase *c, bool of_group)
{
    struct result first = {NULL, 0};
    int n_failed = run_one(g, c, DCP_MERGE_DIRECT, 0, of_group, &first);
    /* Few tokens a tile, more, all. A token's tile has a row block of each rank (cut tokens). */
    const size_t token = (size_t)c->n * ((size_t)c->n_heads * ((size_t)c->dim * 4 + 8) + 4096);
    const size_t limits[] = {8 * token, 30 * token, 0};
    for (int i = 0; i < 3 && n_failed == 0; i++) {
        struct result other = {NULL, 0};
        n_failed += run_one(g, c, DCP_MERGE_ALLTOALL, limits[i], of_group, &other);
        if (n_failed == 0 && (first.n_bytes != other.n_bytes ||
                              memcmp(first.bytes, other.bytes, first.n_bytes) != 0)) {
            n_failed++;
            printf("seed %llu n %d rank %d: alltoall (limit %zu) has other bits than direct\n",
                   (unsigned long long)c->seed, c->n, dcp_group_rank(g), limits[i]);
        }
        free(other.bytes);
    }
    if (n_failed == 0 && strcmp(dcp_group_kind(g), "shm") == 0) {
        struct result other = {NULL, 0};
        n_failed += run_one(g, c, DCP_MERGE_DIRECT, 30 * token, !of_group, &other);
        if (n_failed == 0 && memcmp(first.bytes, other.bytes, first.n_bytes) != 0) {
            n_failed++;
            printf("seed %llu n %d: staged direct has other bits\n", (unsigned long long)c->seed,
                   c->n);
        }
        free(other.bytes);
    }
    if (n_failed == 0) {
        struct result base = {NULL, 0};
        n_failed += run_one(g, c, DCP_MERGE_ALLREDUCE, 0, of_group, &base);
        free(base.bytes);
    }
    free(first.bytes);
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
        plan.n_cases = 60;
        plan.first = SEED + 1000 * i;
        print_message("threads, %d ranks, seed %llu\n", sizes[i], (unsigned long long)plan.first);
        assert_int_equal(ranks_threads(sizes[i], 60.0, many_cases, NULL), 0);
    }
}

static void test_shm(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 5};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        plan.n_cases = 30;
        plan.first = SEED + 500000 + 1000 * i;
        print_message("shm, %d ranks, seed %llu\n", sizes[i], (unsigned long long)plan.first);
        assert_int_equal(ranks_shm(sizes[i], 60.0, many_cases, NULL), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads), cmocka_unit_test(test_shm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
