/* SPDX-License-Identifier: Apache-2.0 */
/* dcp_attend in tiles: the same bits under any limit, on any transport, with one slot or two;
 * projected before the merge; with head groups; planned bytes are those taken. */
#include "attn/attend_oracle.h"
#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"

static const int rank_counts[] = {1, 2, 3, 5, 8};

/* The call under limits from the least on: 1 row, a few, two slots, all. */
static void sweep(const struct call *first, unsigned seed, int slots_seen[3])
{
    struct call c = *first;
    struct bits bits = run_first(&c, seed);
    const dcp_merge_algo algos[] = {DCP_MERGE_AUTO, DCP_MERGE_ALLTOALL};
    for (int way = 0; way < 4; way++) { /* direct and messages, threads and processes */
        c.algo = algos[way % 2];
        c.comm = way < 2 ? COMM_THREADS : COMM_SHM;
        if (c.comm == COMM_SHM && c.n_ranks == 1) continue;
        const size_t need = least_limit(&c);
        const size_t row = (size_t)c.n_heads * (size_t)(c.dk + 2 * c.dv + 2) * sizeof(float);
        const size_t over[] = {0, row + 64, 3 * row, 7 * row, 20 * row, 61 * row};
        for (size_t i = 0; i < sizeof(over) / sizeof(over[0]); i++) {
            c.limit = need + over[i];
            c.n_threads = 1 + (int)(i % 2);
            if (c.n_threads > 1) c.limit += least_limit(&c) - need;
            run_group(&c);
            expect_same_bits(&c, "the limit", &bits);
            const dcp_attend_info *info = &world.answer->info[0];
            const dcp_attend_stats *stats = &world.answer->stats[0];
            slots_seen[info->n_slots]++;
            if (world.n_total == 0) continue;
            assert_true(stats->n_tiles >= (world.n_total + info->tile_rows - 1) / info->tile_rows);
            if (c.n_ranks > 1 && way % 2 == 0)
                assert_int_equal(stats->n_records, info->n_ranks == 1   ? 2
                                                   : info->n_slots == 2 ? stats->n_tiles + 2
                                                                        : 2 * stats->n_tiles + 1);
            /* What was planned is what was taken. */
            dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
            d.max_tokens = c.max_tokens > 0 ? c.max_tokens : world.n_total;
            d.n_heads = c.n_heads;
            d.n_kv_heads = c.n_kv_heads;
            d.key_dim = c.dk;
            d.value_dim = c.dv;
            d.interleave = c.interleave;
            d.n_threads = c.n_threads;
            d.algo = c.algo;
            d.has_sink = c.has_sink;
            d.workspace_limit_bytes = c.limit;
            d.project_dim = c.project_dim;
            d.tp = c.tp;
            for (int r = 0; r < c.n_ranks && c.comm == COMM_SHM; r++) {
                dcp_attend_info plan = DCP_ATTEND_INFO_INIT;
                assert_int_equal(dcp_attend_plan(&d, c.n_ranks, r, 0, &plan), DCP_OK);
                info = &world.answer->info[r];
                assert_int_equal(plan.workspace_bytes, info->workspace_bytes);
                assert_int_equal(plan.tile_rows, info->tile_rows);
                assert_int_equal(plan.n_slots, info->n_slots);
                assert_int_equal(plan.row_bytes, info->row_bytes);
                assert_int_equal(plan.heads.end, info->heads.end);
            }
        }
    }
    drop_first(&c, &bits);
}

/* Bytes that a thread more takes; under a limit of 1 what one row needs. */
static size_t thread_bytes(dcp_attend_desc d)
{
    dcp_attend_info one = DCP_ATTEND_INFO_INIT, two = DCP_ATTEND_INFO_INIT;
    d.n_threads = 1;
    assert_int_equal(dcp_attend_plan(&d, 1, 0, 0, &one), DCP_OK);
    d.n_threads = 2;
    assert_int_equal(dcp_attend_plan(&d, 1, 0, 0, &two), DCP_OK);
    return two.workspace_bytes - one.workspace_bytes;
}
static size_t row_need(dcp_attend_desc d)
{
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    d.workspace_limit_bytes = 1;
    assert_int_equal(dcp_attend_plan(&d, 1, 0, 0, &info), DCP_ERR_ARG);
    const char *at = strstr(dcp_last_error(), "needs ");
    assert_non_null(at);
    return (size_t)strtoull(at + 6, NULL, 10);
}

/* Threads take scratch for the rows that a job can have: not for a block's where calls or tiles
 * have fewer. */
static void test_scratch(void **state)
{
    (void)state;
    dcp_isa isa;
    assert_int_equal(dcp__isa_choose(DCP_ISA_DEFAULT, &isa), DCP_OK);
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.n_heads = 8;
    d.n_kv_heads = 2;
    d.key_dim = d.value_dim = 128;
    d.max_tokens = 4096;
    const size_t large = thread_bytes(d), least = row_need(d);
    const int64_t block = dcp__attn_rows_most(isa, 128);
    for (int64_t n = 1; n <= block / 4; n *= 3) {
        d.max_tokens = n;
        const size_t more = dcp__attn_scratch_bytes_for(isa, block / 4 * 4, 128, 128) / 64 * 64 -
                            dcp__attn_scratch_bytes_for(isa, n * 4, 128, 128) / 64 * 64;
        const size_t saved = large - thread_bytes(d);
        assert_true(saved + 64 >= more && saved <= more + 64); /* both ends are rounded up */
    }
    /* One row of any call takes the same. */
    d.max_tokens = 1;
    assert_int_equal(row_need(d), least);
    d.workspace_limit_bytes = least;
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    assert_int_equal(dcp_attend_plan(&d, 1, 0, 0, &info), DCP_OK);
    assert_int_equal(info.workspace_bytes, least);
}

static struct call tile_call(int i)
{
    struct call c = base_call();
    c.n_ranks = rank_counts[i % 5];
    c.n_heads = i % 2 ? 6 : 8;
    c.n_kv_heads = i % 3 ? 2 : 1;
    c.dk = 24;
    c.dv = 16;
    c.interleave = i % 2 ? 1 : 4;
    c.n_seqs = 3;
    c.length[0] = 70;
    c.n_rows[0] = 25 + i;
    c.length[1] = 33;
    c.n_rows[1] = 1;
    c.length[2] = 90;
    c.n_rows[2] = 14;
    c.window[2] = i % 3 == 2 ? 21 : 0;
    c.has_sink = i % 4 == 1;
    c.q_pad = i % 2 * 5;
    return c;
}

static void test_limits(void **state)
{
    (void)state;
    int slots_seen[3] = {0, 0, 0};
    for (int i = 0; i < 5; i++) {
        const struct call c = tile_call(i);
        sweep(&c, 600u + (unsigned)i, slots_seen);
    }
    assert_true(slots_seen[1] > 0 && slots_seen[2] > 0);
}

/* Few rows, many keys, little memory: ranges of keys of some heads of a row at a time. */
static void test_split_limits(void **state)
{
    (void)state;
    int slots_seen[3] = {0, 0, 0};
    for (int i = 0; i < 3; i++) {
        struct call c = base_call();
        c.n_ranks = rank_counts[i];
        c.n_heads = i == 1 ? 4 : 12;
        c.n_kv_heads = i == 1 ? 2 : 1;
        c.dk = c.dv = 32;
        c.n_seqs = 2;
        c.length[0] = 4000;
        c.length[1] = 40;
        c.n_rows[0] = 2;
        c.n_rows[1] = 3;
        sweep(&c, 620u + (unsigned)i, slots_seen);
    }
}

static void test_project(void **state)
{
    (void)state;
    int slots_seen[3] = {0, 0, 0};
    static const int64_t dims[] = {7, 16, 70, 4, 33};
    for (int i = 0; i < 5; i++) {
        struct call c = tile_call(i);
        c.project_dim = dims[i];
        c.project_type = i % 2 ? DCP_BF16 : DCP_DTYPE_DEFAULT;
        if (i == 3) c.length[0] = 3000; /* split keys */
        if (i == 3) c.n_rows[0] = 2;
        sweep(&c, 640u + (unsigned)i, slots_seen);
    }
}

/* Moves P / D of what it moves without. */
static void test_project_traffic(void **state)
{
    (void)state;
    struct call c = base_call();
    c.n_ranks = 2;
    c.n_heads = 4;
    c.n_kv_heads = 1;
    c.latent = 1;
    c.dk = 72;
    c.dv = 64;
    int64_t moved[2];
    for (int i = 0; i < 2; i++) {
        c.project_dim = i ? 16 : 0;
        fill_world(&c, 7);
        run_group(&c);
        expect_ok(&c);
        expect_oracle(&c);
        moved[i] = world.answer->stats[0].merge_wire_bytes;
        drop_world(&c);
    }
    const int64_t n = 3 * 2; /* rows, own heads, from one peer */
    assert_int_equal(moved[0], n * (64 + 1) * 4);
    assert_int_equal(moved[1], n * (16 + 1) * 4);
}

/* Head groups, on one host and with hosts of their own (each group direct, or by messages). */
static void test_tp(void **state)
{
    (void)state;
    static const struct {
        int n_ranks, tp, per_host;
        int64_t n_heads, n_kv_heads;
    } cases[] = {{2, 2, 0, 4, 2}, {4, 2, 0, 8, 4}, {6, 3, 0, 9, 3}, {6, 2, 0, 10, 2},
                 {8, 4, 0, 8, 8}, {4, 2, 2, 8, 2}, {6, 2, 2, 6, 2}, {3, 1, 0, 5, 5}};
    for (int i = 0; i < (int)(sizeof(cases) / sizeof(cases[0])); i++) {
        struct call c = tile_call(i);
        c.n_ranks = cases[i].n_ranks;
        c.tp = cases[i].tp;
        c.n_heads = cases[i].n_heads;
        c.n_kv_heads = cases[i].n_kv_heads;
        c.has_sink = i % 2 == 1;
        c.project_dim = i % 3 == 1 ? 5 : 0;
        c.ranks_per_host = cases[i].per_host;
        if (c.ranks_per_host == 0) {
            int slots_seen[3] = {0, 0, 0};
            sweep(&c, 660u + (unsigned)i, slots_seen);
            continue;
        }
        fill_world(&c, 660u + (unsigned)i);
        for (int comm = 0; comm < 2; comm++) {
            c.comm = (enum comm)comm;
            run_group(&c);
            expect_ok(&c);
            expect_oracle(&c);
            const int dcp = c.n_ranks / c.tp;
            assert_string_equal(world.answer->info[0].algo_name,
                                c.ranks_per_host % dcp == 0 ? "direct" : "alltoall");
            for (int r = 1; r < c.n_ranks; r++)
                assert_int_equal(world.answer->stats[r].lse_empty,
                                 world.answer->stats[0].lse_empty);
        }
        drop_world(&c);
    }
}

/* Which heads a rank brings, and what create has against a tp. */
static void test_tp_heads(void **state)
{
    (void)state;
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.n_heads = 10;
    d.n_kv_heads = 2;
    d.key_dim = d.value_dim = 8;
    d.tp = 2;
    static const int64_t begins[7] = {0, 2, 4, 5, 7, 9, 10};
    for (int r = 0; r < 6; r++) {
        const dcp_range h = dcp_attend_heads(&d, 6, r), kv = dcp_attend_kv_heads(&d, 6, r);
        assert_int_equal(h.begin, begins[r]);
        assert_int_equal(h.end, begins[r + 1]);
        assert_int_equal(kv.begin, r / 3);
        assert_int_equal(kv.end, r / 3 + 1);
    }
    assert_int_equal(dcp_attend_heads(&d, 5, 0).end, 0); /* 2 does not divide 5 */
    assert_int_equal(dcp_attend_heads(&d, 6, 6).end, 0);
    d.tp = 0;
    for (int r = 0; r < 6; r++) {
        const dcp_range h = dcp_attend_heads(&d, 6, r), cut = dcp_cut_range(10, 6, r);
        assert_int_equal(h.begin, cut.begin);
        assert_int_equal(h.end, cut.end);
    }
    dcp_group *g = NULL;
    dcp_attend *a = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    d.tp = 2;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "tp 2 does not divide the 1 ranks"));
    d.tp = 3;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "tp is 3, must be 0 to 2"));
    d.n_heads = d.n_kv_heads = 5;
    d.tp = 2;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "tp 2 does not divide the 5 KV heads"));
    d.tp = 0;
    d.project_dim = 4;
    d.project_type = DCP_F16;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "project_type"));
    d.project_type = DCP_F32;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_OK);
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "project_dim is 4 at create, project is NULL"));
    dcp_attend_destroy(a);
    dcp_group_destroy(g);
}

/* What each row is, all at once: sequences of different lengths and chunks, a linear draft with
 * positions of its own, windows, softcap, sinks, rows of padding. */
static void test_combinations(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct call c = base_call();
        c.n_ranks = rank_counts[1 + i % 4];
        c.n_heads = 6;
        c.n_kv_heads = 3;
        c.n_seqs = 4;
        c.length[0] = 120; /* a chunk */
        c.n_rows[0] = 37;
        c.length[1] = 57; /* one token */
        c.n_rows[1] = 1;
        c.length[2] = 64; /* a draft of 5 after 60 */
        c.n_rows[2] = 5;
        c.length[3] = 5;
        c.n_rows[3] = 5;
        c.causal = i != 5;
        c.window[0] = i & 1 ? 19 : 0;
        c.window[2] = i & 1 ? 3 : 0;
        c.softcap = i & 2 ? 4.0f : 0.0f;
        c.has_sink = (i & 4) != 0;
        c.interleave = 1 + i % 3 * 7;
        c.has_pos = i % 2 == 0;
        fill_world(&c, 680u + (unsigned)i);
        if (c.has_pos) {
            /* Positions as they follow, but padding in the chunk, and the draft starts anew. */
            for (int64_t t = 0; t < c.n_rows[0]; t++)
                world.pos[t] = t % 9 == 4 ? -1 - t : c.length[0] - c.n_rows[0] + t;
            world.pos[37] = 56;
            for (int64_t t = 0; t < 5; t++) world.pos[38 + t] = 59 + t;
            for (int64_t t = 0; t < 5; t++) world.pos[43 + t] = t;
        }
        run_group(&c);
        expect_ok(&c);
        expect_oracle(&c);
        for (int64_t t = 0; t < c.n_rows[0] && c.has_pos; t++) {
            if (world.pos[t] >= 0) continue;
            assert_true(world.lse[t * c.n_heads] == -INFINITY);
            for (int64_t d = 0; d < c.n_heads * c.dv; d++)
                assert_true(world.out[t * c.n_heads * c.dv + d] == 0.0f);
        }
        drop_world(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scratch),         cmocka_unit_test(test_limits),
        cmocka_unit_test(test_split_limits),    cmocka_unit_test(test_project),
        cmocka_unit_test(test_project_traffic), cmocka_unit_test(test_tp),
        cmocka_unit_test(test_tp_heads),        cmocka_unit_test(test_combinations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
