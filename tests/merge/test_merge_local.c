/* SPDX-License-Identifier: Apache-2.0 */
/* Local merges have the numbers of the merge across ranks, bit for bit: k parts, ragged rows, pairs
 * in place under a mask; (max, sum) parts at LSEs where an LSE would lose digits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "merge/merge_case.h"
#include "merge/merge_ranks.h"

enum { T = 6, H = 5, D = 37, ROWS = T * H, ELEMS = ROWS * D, PARTS_MAX = 100 };

/* Memory of this thread until free_kept. */
static _Thread_local void *blocks[64];
static _Thread_local int n_kept;

static void *plain_alloc(void *user, size_t n_bytes)
{
    (void)user;
    void *p = NULL;
    if (n_kept == 64 || posix_memalign(&p, 64, n_bytes + 1) != 0) abort();
    blocks[n_kept++] = p;
    return p;
}

static void free_kept(void)
{
    while (n_kept > 0) free(blocks[--n_kept]);
}

static dcp_merge_part part_of(const struct mpart *p)
{
    const dcp_merge_part part = {p->out,    p->out_ts, p->out_hs, p->lse,
                                 p->lse_ts, p->lse_hs, p->sum,    p->kv_len};
    return part;
}

/* ---- random cases: ranks with cut none against one local call ---- */

struct across {
    struct mcase c;
    unsigned char *bytes;
    size_t n_bytes;
    dcp_merge_stats stats;
};

static int run_across(dcp_group *g, void *user)
{
    struct across *a = user;
    const struct mcase *c = &a->c;
    struct mpart own;
    float sink[64];
    mcase_fill(c, dcp_group_rank(g), &own, plain_alloc, NULL);
    mcase_sink(c, sink);
    const size_t out_bytes =
        (size_t)(c->n_tokens * c->n_heads * c->dim) * dcp_dtype_bytes(mcase_merged_type(c));
    unsigned char *to = plain_alloc(NULL, a->n_bytes);
    dcp_merge_desc desc = c->desc;
    desc.cut = DCP_CUT_NONE;
    dcp_merge *m = NULL;
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = c->n_tokens;
    args.out = own.out;
    args.out_token_stride = own.out_ts;
    args.out_head_stride = own.out_hs;
    args.lse = own.lse;
    args.lse_token_stride = own.lse_ts;
    args.lse_head_stride = own.lse_hs;
    args.sum = own.sum;
    args.kv_len = own.kv_len;
    args.sink = c->desc.has_sink ? sink : NULL;
    args.merged = to;
    args.merged_lse = (float *)(void *)(to + (out_bytes + 63) / 64 * 64);
    dcp_merge_stats stats;
    if (dcp_merge_create(g, &desc, &m) != DCP_OK || dcp_merge_run(m, &args, &stats) != DCP_OK) {
        printf("%s\n", dcp_last_error());
        return 1;
    }
    if (dcp_group_rank(g) == 0) {
        memcpy(a->bytes, to, a->n_bytes);
        a->stats = stats;
    }
    dcp_merge_destroy(m);
    free_kept();
    return 0;
}

static void test_equals_ranks(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 5, 8};
    const uint64_t seed = 77001;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < 60; i++) {
        struct across a;
        memset(&a, 0, sizeof(a));
        mcase_make(&a.c, seed + i, sizes[i % 5]);
        struct mcase *c = &a.c;
        const size_t out_bytes =
            (size_t)(c->n_tokens * c->n_heads * c->dim) * dcp_dtype_bytes(mcase_merged_type(c));
        const size_t lse_at = (out_bytes + 63) / 64 * 64;
        a.n_bytes = lse_at + (size_t)(c->n_tokens * c->n_heads) * sizeof(float) + 64;
        a.bytes = calloc(1, a.n_bytes);
        assert_non_null(a.bytes);
        assert_int_equal(ranks_threads(c->n, 30.0, run_across, &a), 0);

        struct mpart p[8];
        dcp_merge_part parts[8];
        float sink[64];
        for (int r = 0; r < c->n; r++) {
            mcase_fill(c, r, &p[r], plain_alloc, NULL);
            parts[r] = part_of(&p[r]);
        }
        mcase_sink(c, sink);
        unsigned char *to = calloc(1, a.n_bytes);
        assert_non_null(to);
        dcp_merge_local_args l = DCP_MERGE_LOCAL_ARGS_INIT;
        l.n_tokens = c->n_tokens;
        l.n_heads = c->n_heads;
        l.dim = c->dim;
        l.lse_base = c->desc.lse_base;
        l.lse_form = c->desc.lse_form;
        l.out_type = c->desc.out_type;
        l.lse_type = c->desc.lse_type;
        l.merged_type = c->desc.merged_type;
        l.nonfinite = c->desc.nonfinite;
        l.n_parts = c->n;
        l.parts = parts;
        l.sink = c->desc.has_sink ? sink : NULL;
        l.merged = to;
        l.merged_lse = (float *)(void *)(to + lse_at);
        dcp_merge_stats stats;
        const size_t n_allocs = dcp__alloc_calls();
        if (dcp_merge_local(&l, &stats) != DCP_OK) fail_msg("%s", dcp_last_error());
        assert_int_equal(dcp__alloc_calls(), n_allocs);
        assert_memory_equal(to, a.bytes, out_bytes);
        assert_memory_equal(to + lse_at, a.bytes + lse_at,
                            (size_t)(c->n_tokens * c->n_heads) * sizeof(float));
        assert_int_equal(stats.nonfinite_values, a.stats.nonfinite_values);
        assert_int_equal(stats.lse_bad, a.stats.lse_bad);
        assert_int_equal(stats.lse_empty, a.stats.lse_empty);
        free(to);
        free(a.bytes);
        free_kept();
    }
}

/* ---- fixed shape ---- */

struct plain {
    float out[ELEMS], lse[ROWS];
};

static void fill(struct plain *p, uint64_t seed)
{
    uint64_t rng = seed;
    for (int i = 0; i < ELEMS; i++) p->out[i] = (float)ref_uniform(&rng, -2, 2);
    for (int i = 0; i < ROWS; i++)
        p->lse[i] = ref_pick(&rng, 6) == 0 ? -INFINITY : (float)ref_uniform(&rng, -4, 4);
}

static dcp_merge_local_args plain_args(void)
{
    dcp_merge_local_args a = DCP_MERGE_LOCAL_ARGS_INIT;
    a.n_tokens = T;
    a.n_heads = H;
    a.dim = D;
    a.lse_base = DCP_LSE_BASE_E;
    return a;
}

/* A ragged row of parts is what a fixed number of parts gives for that row. */
static void test_ragged(void **state)
{
    (void)state;
    const int64_t counts[T] = {3,         0, 1,
                               PARTS_MAX, 2, 5}; /* one beyond the parts kept on the stack */
    int64_t offsets[T + 1] = {2};                /* rows before the first belong to nobody */
    for (int t = 0; t < T; t++) offsets[t + 1] = offsets[t] + counts[t];
    const int64_t total = offsets[T];
    float *out = malloc((size_t)(total * H * D) * sizeof(*out));
    float *lse = malloc((size_t)(total * H) * sizeof(*lse));
    assert_true(out != NULL && lse != NULL);
    uint64_t rng = 5;
    for (int64_t i = 0; i < total * H * D; i++) out[i] = (float)ref_uniform(&rng, -2, 2);
    for (int64_t i = 0; i < total * H; i++) lse[i] = (float)ref_uniform(&rng, -4, 4);
    static struct plain got;
    const dcp_merge_part whole = {out, 0, 0, lse, 0, 0, NULL, NULL};
    dcp_merge_local_args a = plain_args();
    a.n_parts = 1;
    a.parts = &whole;
    a.offsets = offsets;
    a.merged = got.out;
    a.merged_lse = got.lse;
    if (dcp_merge_local(&a, NULL) != DCP_OK) fail_msg("%s", dcp_last_error());
    for (int t = 0; t < T; t++) {
        float row[H * D];
        float row_lse[H];
        dcp_merge_part parts[PARTS_MAX];
        for (int64_t k = 0; k < counts[t]; k++) {
            const int64_t at = offsets[t] + k;
            parts[k] = (dcp_merge_part){out + at * H * D, 0, 0, lse + at * H, 0, 0, NULL, NULL};
        }
        dcp_merge_local_args one = plain_args();
        one.n_tokens = 1;
        one.n_parts = counts[t];
        one.parts = parts;
        one.merged = row;
        one.merged_lse = row_lse;
        if (counts[t] == 0) {
            for (int i = 0; i < H * D; i++) assert_true(got.out[t * H * D + i] == 0.0f);
            for (int h = 0; h < H; h++) assert_true(got.lse[t * H + h] == -INFINITY);
            continue;
        }
        assert_int_equal(dcp_merge_local(&one, NULL), DCP_OK);
        assert_memory_equal(row, got.out + t * H * D, sizeof(row));
        assert_memory_equal(row_lse, got.lse + t * H, sizeof(row_lse));
    }
    offsets[3] = offsets[2] - 1;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "do not fall"));
    free(out);
    free(lse);
}

static void test_pair(void **state)
{
    (void)state;
    static struct plain prefix, suffix, kept, want;
    fill(&prefix, 1);
    fill(&suffix, 2);
    kept = prefix;
    const dcp_merge_part own = {prefix.out, 0, 0, prefix.lse, 0, 0, NULL, NULL};
    const dcp_merge_part other = {suffix.out, 0, 0, suffix.lse, 0, 0, NULL, NULL};
    const dcp_merge_part both[2] = {{kept.out, 0, 0, kept.lse, 0, 0, NULL, NULL}, other};
    dcp_merge_local_args a = plain_args();
    a.n_parts = 2;
    a.parts = both;
    a.merged = want.out;
    a.merged_lse = want.lse;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_OK);
    const uint8_t mask[T] = {1, 0, 1, 1, 0, 0};
    /* Masked rows are not read: NaN there does no harm. */
    for (int i = 0; i < H * D; i++) suffix.out[H * D + i] = NAN;
    dcp_merge_local_args p = plain_args();
    p.row_mask = mask;
    dcp_merge_stats stats;
    if (dcp_merge_pair(&p, &own, &other, &stats) != DCP_OK) fail_msg("%s", dcp_last_error());
    assert_int_equal(stats.nonfinite_values, 0);
    for (int t = 0; t < T; t++) {
        const struct plain *from = mask[t] != 0 ? &want : &kept;
        assert_memory_equal(prefix.out + t * H * D, from->out + t * H * D, H * D * sizeof(float));
        assert_memory_equal(prefix.lse + t * H, from->lse + t * H, H * sizeof(float));
    }
    p.lse_type = DCP_BF16;
    assert_int_equal(dcp_merge_pair(&p, &own, &other, NULL), DCP_ERR_ARG);
}

static void test_refusals(void **state)
{
    (void)state;
    static struct plain one, two, to;
    fill(&one, 3);
    fill(&two, 4);
    const dcp_merge_part parts[2] = {{one.out, 0, 0, one.lse, 0, 0, NULL, NULL},
                                     {two.out, 0, 0, two.lse, 0, 0, NULL, NULL}};
    dcp_merge_local_args a = plain_args();
    a.n_parts = 2;
    a.parts = parts;
    a.merged = to.out;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_OK);
    a.merged = two.out + 1; /* shifted over a part */
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "part 1 overlap"));
    a.merged = two.lse;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    a.merged = to.out;
    a.lse_base = DCP_LSE_BASE_UNSET;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    a.lse_base = DCP_LSE_BASE_2;
    a.lse_form = DCP_LSE_FORM_MAX_SUM;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "sum"));
    a.lse_form = DCP_LSE_FORM_LSE;
    a.n_parts = 0;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_ARG);
    a.n_parts = 2;
    a.nonfinite = DCP_NONFINITE_ERROR;
    two.out[(2 * H + 3) * D + 1] = INFINITY;
    two.lse[2 * H + 3] = 0.0f;
    assert_int_equal(dcp_merge_local(&a, NULL), DCP_ERR_NONFINITE);
    assert_non_null(strstr(dcp_last_error(), "token 2, head 3 of part 1"));
}

/* Maxima of 1e4 with sums: as an LSE the sum would be lost to rounding (1e4 has 2^-10 of room). */
static void test_max_sum(void **state)
{
    (void)state;
    for (int is_base_2 = 0; is_base_2 < 2; is_base_2++) {
        /* Four heads: plain; sum 0 and max -inf are empty; equal maxima 1e4. */
        float max[2][4] = {{1e4f, 5.0f, -INFINITY, 0.0f}, {1e4f, 5.0f, 1.0f, 0.0f}};
        float sum[2][4] = {{1.0f, 0.0f, 3.0f, 1.0f}, {1.0001f, 2.0f, 1.5f, NAN}};
        float out[2][4] = {{0, NAN, NAN, 7}, {1, 4, 5, NAN}};
        const dcp_merge_part parts[2] = {{out[0], 0, 0, max[0], 0, 0, sum[0], NULL},
                                         {out[1], 0, 0, max[1], 0, 0, sum[1], NULL}};
        float merged[4];
        float lse[4];
        dcp_merge_local_args a = plain_args();
        a.n_tokens = 1;
        a.n_heads = 4;
        a.dim = 1;
        a.lse_base = is_base_2 ? DCP_LSE_BASE_2 : DCP_LSE_BASE_E;
        a.lse_form = DCP_LSE_FORM_MAX_SUM;
        a.n_parts = 2;
        a.parts = parts;
        a.merged = merged;
        a.merged_lse = lse;
        dcp_merge_stats stats;
        if (dcp_merge_local(&a, &stats) != DCP_OK) fail_msg("%s", dcp_last_error());
        assert_true(fabs((double)merged[0] - 1.0001 / 2.0001) < 1e-7);
        const double unit = is_base_2 ? log(2.0) : 1.0;
        assert_true(fabs((double)lse[0] - (1e4 + log(2.0001) / unit)) < 1e-3);
        assert_true(merged[1] == 4.0f && merged[2] == 5.0f && merged[3] == 7.0f);
        assert_true(fabs((double)lse[1] - (5.0 + log(2.0) / unit)) < 1e-6);
        assert_true(lse[3] == 0.0f);
        assert_int_equal(stats.lse_empty, 2);
        assert_int_equal(stats.lse_bad, 1);
        assert_int_equal(stats.nonfinite_values, 0);
    }
    /* Sums of 1 are LSEs: the same bits, through other code. */
    static struct plain p[3], by_lse, by_sum;
    static float ones[ROWS];
    dcp_merge_part parts[3];
    for (int i = 0; i < ROWS; i++) ones[i] = 1.0f;
    for (int k = 0; k < 3; k++) {
        fill(&p[k], (uint64_t)k + 20);
        parts[k] = (dcp_merge_part){p[k].out, 0, 0, p[k].lse, 0, 0, NULL, NULL};
    }
    for (int is_base_2 = 0; is_base_2 < 2; is_base_2++) {
        dcp_merge_local_args a = plain_args();
        a.lse_base = is_base_2 ? DCP_LSE_BASE_2 : DCP_LSE_BASE_E;
        a.n_parts = 3;
        a.parts = parts;
        a.merged = by_lse.out;
        a.merged_lse = by_lse.lse;
        for (int k = 0; k < 3; k++) parts[k].sum = NULL;
        assert_int_equal(dcp_merge_local(&a, NULL), DCP_OK);
        for (int k = 0; k < 3; k++) parts[k].sum = ones;
        a.lse_form = DCP_LSE_FORM_MAX_SUM;
        a.merged = by_sum.out;
        a.merged_lse = by_sum.lse;
        assert_int_equal(dcp_merge_local(&a, NULL), DCP_OK);
        assert_memory_equal(by_lse.out, by_sum.out, sizeof(by_lse.out));
        assert_memory_equal(by_lse.lse, by_sum.lse, sizeof(by_lse.lse));
    }
}

/* Pairs at the ends of what f32 holds, against weights in double: maxima whose difference
 * overflows, sums from the least to the most that count, products that underflow where their
 * factors do not. */
static void test_max_sum_extremes(void **state)
{
    (void)state;
    enum { N = 8 };
    const float top = 3.4e38f;
    const float least = 0x1p-126f;
    const float most = 0x1p100f;
    float max[2][N] = {{top, -top, 0.0f, 0.0f, 80.0f, -top, 1e-45f, 40.0f},
                       {-top, -top, 0.0f, -60.0f, 0.0f, -top, 0.0f, -40.0f}};
    float sum[2][N] = {{1.0f, 1.0f, most, least, 0x1p-120f, least, 2.0f, 0x1p-100f},
                       {most, 3.0f, most, least, 1.0f, most, 2.0f, most}};
    float out[2][N];
    for (int h = 0; h < N; h++) {
        out[0][h] = 1.0f;
        out[1][h] = -2.0f;
    }
    const dcp_merge_part parts[2] = {{out[0], 0, 0, max[0], 0, 0, sum[0], NULL},
                                     {out[1], 0, 0, max[1], 0, 0, sum[1], NULL}};
    for (int is_base_2 = 0; is_base_2 < 2; is_base_2++) {
        const double unit = is_base_2 ? log(2.0) : 1.0;
        float merged[N];
        float lse[N];
        dcp_merge_local_args a = plain_args();
        a.n_tokens = 1;
        a.n_heads = N;
        a.dim = 1;
        a.lse_base = is_base_2 ? DCP_LSE_BASE_2 : DCP_LSE_BASE_E;
        a.lse_form = DCP_LSE_FORM_MAX_SUM;
        a.n_parts = 2;
        a.parts = parts;
        a.merged = merged;
        a.merged_lse = lse;
        dcp_merge_stats stats;
        if (dcp_merge_local(&a, &stats) != DCP_OK) fail_msg("%s", dcp_last_error());
        assert_int_equal(stats.lse_empty + stats.lse_bad, 0);
        for (int h = 0; h < N; h++) {
            /* The logarithm of the terms' quotient: differences first, or sums would be lost. */
            const double d = ((double)max[1][h] - (double)max[0][h]) * unit +
                             log((double)sum[1][h]) - log((double)sum[0][h]);
            const double w0 = 1.0 / (1.0 + exp(d));
            const double want = w0 - 2.0 * (1.0 - w0);
            const int m = d > 0.0;
            const double want_lse =
                (double)max[m][h] + (log((double)sum[m][h]) + log1p(exp(-fabs(d)))) / unit;
            if (!(fabs((double)merged[h] - want) <= 4e-5) ||
                !(fabs((double)lse[h] - want_lse) <= 1e-5 + fabs(want_lse) * 0x1p-22))
                fail_msg("base 2: %d, head %d: %g and %g, want %g and %g", is_base_2, h,
                         (double)merged[h], (double)lse[h], want, want_lse);
        }
    }
    /* Below the least sum a part is empty, above the most it is bad: neither is read. */
    for (int h = 0; h < N; h++) {
        max[0][h] = 0.0f;
        sum[0][h] = h % 2 == 0 ? 0x1p-127f : 0x1p101f;
        out[0][h] = NAN;
        max[1][h] = -top;
        sum[1][h] = 1.0f;
    }
    float merged[N];
    dcp_merge_local_args a = plain_args();
    a.n_tokens = 1;
    a.n_heads = N;
    a.dim = 1;
    a.lse_form = DCP_LSE_FORM_MAX_SUM;
    a.n_parts = 2;
    a.parts = parts;
    a.merged = merged;
    dcp_merge_stats stats;
    assert_int_equal(dcp_merge_local(&a, &stats), DCP_OK);
    assert_int_equal(stats.lse_empty, N / 2);
    assert_int_equal(stats.lse_bad, N / 2);
    for (int h = 0; h < N; h++) assert_true(merged[h] == -2.0f);
}

/* Interleaved pairs, as some kernels store them: head stride 2, sums one behind. */
static void test_interleaved_pairs(void **state)
{
    (void)state;
    float stats[2][3][2] = {{{1, 2}, {0, 1}, {3, 1}}, {{1, 6}, {0, 1}, {0, 1}}};
    float out[2][3] = {{0, 2, 1}, {8, 4, 1}};
    float merged[3];
    const dcp_merge_part parts[2] = {{out[0], 0, 0, &stats[0][0][0], 6, 2, &stats[0][0][1], NULL},
                                     {out[1], 0, 0, &stats[1][0][0], 6, 2, &stats[1][0][1], NULL}};
    dcp_merge_local_args a = plain_args();
    a.n_tokens = 1;
    a.n_heads = 3;
    a.dim = 1;
    a.lse_form = DCP_LSE_FORM_MAX_SUM;
    a.n_parts = 2;
    a.parts = parts;
    a.merged = merged;
    if (dcp_merge_local(&a, NULL) != DCP_OK) fail_msg("%s", dcp_last_error());
    assert_true(fabs((double)merged[0] - 6.0) < 1e-6 && merged[1] == 3.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_ranks),
        cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_pair),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_max_sum_extremes),
        cmocka_unit_test(test_max_sum),
        cmocka_unit_test(test_interleaved_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
