/* SPDX-License-Identifier: Apache-2.0 */
/* dcp_attend: sharded = unsharded = the double oracle, whatever the group, the tile and the
 * threads; and bits that depend on neither of the last three. */
#include "attn/attend_oracle.h"

static void check_call(const struct call *first, unsigned seed, int with_shm)
{
    struct call c = *first;
    struct bits bits = run_first(&c, seed);
    /* Many rows: jobs of fewer than they are best given. */
    c.n_threads = sum_rows(&c) >= 300 ? 9 : 2 + (int)(seed % 2);
    c.lends_pool = (int)(seed / 2 % 2);
    run_group(&c);
    expect_same_bits(&c, "the number of threads", &bits);
    c.lends_pool = 0;
    c.n_threads = 1;
    /* A limit a few rows above the least. */
    const size_t need = least_limit(&c);
    const size_t row = (size_t)c.n_heads * (size_t)(c.dk + c.dv + 1) * sizeof(float);
    for (size_t extra = 0; extra < 4; extra += 2) {
        c.limit = need + extra * row + (extra ? 256 : 0);
        run_group(&c);
        expect_same_bits(&c, "the workspace limit", &bits);
        for (int r = 1; r < c.n_ranks; r++)
            assert_int_equal(world.answer->info[r].tile_rows, world.answer->info[0].tile_rows);
    }
    c.limit = first->limit;
    if (with_shm) {
        c.comm = COMM_SHM;
        run_group(&c);
        expect_same_bits(&c, "the group", &bits);
        c.comm = COMM_THREADS;
    }
    static const dcp_merge_algo algos[] = {DCP_MERGE_DIRECT, DCP_MERGE_ALLTOALL};
    for (int i = 0; i < 2; i++) {
        c.algo = algos[i];
        run_group(&c);
        expect_same_bits(&c, dcp_merge_algo_name(algos[i]), &bits);
    }
    drop_first(&c, &bits);
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

/* More ranks than CPUs, keys and heads, each at exactly the least memory that create names. */
static void test_many_ranks(void **state)
{
    (void)state;
    static const int n_ranks[] = {16, 33, 64};
    for (int i = 0; i < 3; i++) {
        struct call c = base_call();
        c.n_ranks = n_ranks[i];
        c.n_heads = i == 1 ? 40 : 4;
        c.n_kv_heads = 2;
        c.dk = 8;
        c.dv = 12;
        c.interleave = 1 + i;
        c.length[0] = 50 + 40 * i;
        c.n_rows[0] = 5;
        c.has_sink = i == 2;
        check_call(&c, 91u + (unsigned)i, 0);
        /* alltoall's staging grows with N: its least, too. */
        fill_world(&c, 91u + (unsigned)i);
        c.algo = DCP_MERGE_ALLTOALL;
        c.limit = 1;
        run_group(&c);
        const char *at = strstr(world.answer->text[0], "needs ");
        assert_non_null(at);
        c.limit = (size_t)strtoull(at + 6, NULL, 10);
        run_group(&c);
        expect_ok(&c);
        expect_oracle(&c);
        assert_int_equal(world.answer->info[0].tile_rows, 1);
        c.limit--;
        run_group(&c);
        assert_int_equal(world.answer->status[0], DCP_ERR_ARG);
        drop_world(&c);
    }
}

static void expect_all(const struct call *c, dcp_status st, const char *word)
{
    for (int r = 0; r < c->n_ranks; r++) {
        if (world.answer->status[r] == (int)st && strstr(world.answer->text[r], word) != NULL)
            continue;
        fail_msg("%s: rank %d: status %d, text \"%s\", wanted %d and \"%s\"", c->odd, r,
                 world.answer->status[r], world.answer->text[r], (int)st,
                 word != NULL ? word : ""); /* gcc, -fsanitize: "is null" */
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
        {"out in q", DCP_ERR_ARG, "out overlaps q", 1},
        {"lse in q", DCP_ERR_ARG, "lse overlaps q", 1},
        {"lse in out", DCP_ERR_ARG, "out and lse overlap", 1},
        {"out in k", DCP_ERR_ARG, "overlaps the keys or values of sequence 0", 1},
        {"lse in v", DCP_ERR_ARG, "overlaps the keys or values of sequence 0", 1},
        {"short args", DCP_ERR_ARG, "struct_size is 16", 1},
        {"stats", DCP_ERR_ARG, "start from DCP_ATTEND_STATS_INIT", 1},
        {"sink nan", DCP_ERR_ARG, "is nan", 1},
        {"sink other", DCP_ERR_MISMATCH, "the fingerprint of sink", 1},
        {"sink inf", DCP_ERR_ARG, "is inf", 1},
        {"sink inf, messages", DCP_ERR_ARG, "is inf", 1},
        {"desc causal", DCP_ERR_MISMATCH, "causal is yes on rank 0 and no on rank 2", 0},
        {"desc algo", DCP_ERR_MISMATCH, "algo is alltoall on rank 0 and auto on rank 1", 0},
        {"desc type", DCP_ERR_MISMATCH, "project_type is f32 on rank 0 and bf16 on rank 1", 0},
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
            c.has_sink = strncmp(c.odd, "sink", 4) == 0;
            if (strstr(c.odd, "messages") != NULL) c.algo = DCP_MERGE_ALLTOALL;
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

static dcp_attend_desc tiny_desc(void)
{
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.max_tokens = 4;
    d.n_heads = 4;
    d.n_kv_heads = 2;
    d.key_dim = d.value_dim = 8;
    return d;
}

static void two_ranks(dcp_group **groups)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 5;
    assert_int_equal(dcp_group_create_threads(2, &opts, groups), DCP_OK);
}
static void on_two(void *(*fn)(void *), void *rank0, void *rank1)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, fn, rank1), 0);
    (void)fn(rank0);
    (void)pthread_join(thread, NULL);
}

/* A rank without a place for the object says so to all. */
struct placeless {
    dcp_group *g;
    bool has_place;
    dcp_status st;
    char text[256];
};

static void *create_placeless(void *arg)
{
    struct placeless *p = arg;
    const dcp_attend_desc d = tiny_desc();
    dcp_attend *a = NULL;
    p->st = dcp_attend_create(p->g, &d, p->has_place ? &a : NULL);
    snprintf(p->text, sizeof(p->text), "%s", dcp_last_error());
    if (p->st == DCP_OK) dcp_attend_destroy(a);
    return NULL;
}

static void test_no_place(void **state)
{
    (void)state;
    dcp_group *groups[2];
    two_ranks(groups);
    for (int k = 0; k < 2; k++) { /* afterwards the group works on */
        struct placeless p[2] = {{groups[0], true, DCP_OK, ""}, {groups[1], k == 1, DCP_OK, ""}};
        on_two(create_placeless, &p[0], &p[1]);
        assert_int_equal(p[0].st, k == 0 ? DCP_ERR_ARG : DCP_OK);
        assert_int_equal(p[1].st, p[0].st);
        if (k == 0) assert_non_null(strstr(p[0].text, "rank 1 refuses"));
    }
    for (int r = 0; r < 2; r++) dcp_group_destroy(groups[r]);
}

/* Ranks in calls of two objects are told apart, and both objects work on. */
struct crossed {
    dcp_group *g;
    int rank;
    dcp_status st[3];
    char text[256];
};

static void *run_crossed(void *arg)
{
    struct crossed *x = arg;
    const dcp_attend_desc d = tiny_desc();
    dcp_attend *a = NULL, *b = NULL;
    const dcp_attend_args nothing = DCP_ATTEND_ARGS_INIT; /* T = 0 */
    x->st[0] = dcp_attend_create(x->g, &d, &a);
    if (x->st[0] == DCP_OK) x->st[0] = dcp_attend_create(x->g, &d, &b);
    if (x->st[0] != DCP_OK) return NULL;
    x->st[0] = dcp_attend_run(x->rank == 0 ? a : b, &nothing, NULL);
    snprintf(x->text, sizeof(x->text), "%s", dcp_last_error());
    x->st[1] = dcp_attend_run(a, &nothing, NULL);
    x->st[2] = dcp_attend_run(b, &nothing, NULL);
    dcp_attend_destroy(b);
    dcp_attend_destroy(a);
    return NULL;
}

static void test_crossed(void **state)
{
    (void)state;
    dcp_group *groups[2];
    two_ranks(groups);
    struct crossed x[2] = {{groups[0], 0, {DCP_OK}, ""}, {groups[1], 1, {DCP_OK}, ""}};
    on_two(run_crossed, &x[0], &x[1]);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(x[r].st[0], DCP_ERR_MISMATCH);
        assert_non_null(strstr(x[r].text, "the object"));
        assert_int_equal(x[r].st[1], DCP_OK);
        assert_int_equal(x[r].st[2], DCP_OK);
        dcp_group_destroy(groups[r]);
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
    const dcp_attend_desc good = tiny_desc();
#define REFUSE(field, value, word)                                                                 \
    do {                                                                                           \
        dcp_attend_desc d = good;                                                                  \
        d.field = (value);                                                                         \
        assert_int_equal(dcp_attend_create(g, &d, &a), DCP_ERR_ARG);                               \
        assert_null(a);                                                                            \
        assert_non_null(strstr(dcp_last_error(), word));                                           \
    } while (0)
    REFUSE(struct_size, 3, "struct_size");
    REFUSE(max_tokens, -1, "max_tokens");
    REFUSE(n_heads, 0, "n_heads");
    REFUSE(n_kv_heads, 3, "multiple");
    REFUSE(key_dim, 0, "key_dim");
    REFUSE(value_dim, -1, "value_dim");
    REFUSE(interleave, -1, "interleave");
    REFUSE(algo, (dcp_merge_algo)99, "algo 99");
    REFUSE(n_threads, -1, "n_threads");
    REFUSE(softcap, -1.0f, "softcap");
    REFUSE(scale, NAN, "scale");
    REFUSE(workspace_limit_bytes, 100, "needs");
#undef REFUSE
    assert_int_equal(dcp_attend_create(g, &good, &a), DCP_OK);
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
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
    /* One row, one key, and a stride, base or page that cannot be. */
    const int32_t page_0 = 0, page_bad = -1;
    float kv[64] = {0};
    const dcp_kv_view fit = {.k_base = kv,
                             .v_base = kv + 16,
                             .pages = &page_0,
                             .page_tokens = 33,
                             .k_page_stride_bytes = 128,
                             .v_page_stride_bytes = 128,
                             .k_slot_stride = 8,
                             .k_head_stride = 8,
                             .v_slot_stride = 8,
                             .v_head_stride = 8,
                             .n_keys = 1,
                             .dtype = DCP_F32};
    float q[4 * 8] = {0};
    args.q = q;
    seq.length = seq.n_rows = 1;
#define REFUSE_VIEW(field, value, word)                                                            \
    do {                                                                                           \
        dcp_kv_view v = fit;                                                                       \
        v.field = (value);                                                                         \
        seq.view = &v;                                                                             \
        assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);                             \
        assert_non_null(strstr(dcp_last_error(), word));                                           \
    } while (0)
    REFUSE_VIEW(k_slot_stride, -8, "view's k_slot_stride is -8; no stride may be negative");
    REFUSE_VIEW(v_head_stride, INT64_MIN, "view's v_head_stride is -9223372036854775808; no");
    REFUSE_VIEW(v_page_stride_bytes, -128, "view's v_page_stride_bytes is -128; no stride");
    REFUSE_VIEW(k_head_stride, INT64_MAX, "k_head_stride 9223372036854775807 x 2 exceed the addr");
    REFUSE_VIEW(v_slot_stride, INT64_MAX / 4, "v_slot_stride 2305843009213693951 x 1 and");
    REFUSE_VIEW(k_page_stride_bytes, INT64_MAX / 8 * 8 - 8, "address space allows 2147483649");
    REFUSE_VIEW(k_base, (const char *)kv + 1, "no multiple of the element's 4 bytes");
    REFUSE_VIEW(v_page_stride_bytes, 130, "v_page_stride_bytes is 130, no multiple of the ele");
    /* What a view of other heads and widths shows. */
    REFUSE_VIEW(v_head_stride, 7, "v_head_stride is 7, a row of v has 8 elements (value_dim");
    REFUSE_VIEW(k_page_stride_bytes, 56, "2 KV heads of 8 elements end 64 bytes into a page, the");
    REFUSE_VIEW(v_base, kv + 24, "end 160 bytes into a page, the view's v_page_stride_bytes");
    REFUSE_VIEW(page_tokens, 0, "page_tokens is 0");
    REFUSE_VIEW(k_base, NULL, "k_base is NULL");
    REFUSE_VIEW(v_base, NULL, "v_base is NULL");
    REFUSE_VIEW(pages, NULL, "pages is NULL");
    REFUSE_VIEW(pages, &page_bad, "pages[0] is -1; no page");
#undef REFUSE_VIEW
    seq.view = &fit;
    args.q_token_stride = INT64_MAX;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "q_token_stride"));
    args.q_token_stride = 0;
    args.out_token_stride = INT64_MAX / 4;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    args.out_token_stride = 0;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK); /* any page_tokens will do */
    seq.view = &none;
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

/* No rows, ever: a description that holds none, on any group, and calls of none. */
static void test_no_rows(void **state)
{
    (void)state;
    for (int n = 1; n <= 3; n += 2) {
        struct call c = base_call();
        c.n_ranks = n;
        c.n_rows[0] = 0;
        c.no_rows_ever = 1;
        fill_world(&c, 8);
        run_group(&c);
        expect_ok(&c);
        assert_int_equal(world.answer->info[0].tile_rows, 1);
        drop_world(&c);
    }
}

/* Callers built against a later or an earlier version. */
static void test_other_versions(void **state)
{
    (void)state;
    struct {
        dcp_attend_desc d;
        uint64_t later[2];
    } desc = {DCP_ATTEND_DESC_INIT, {0, 0}};
    struct {
        dcp_attend_args a;
        uint64_t later[2];
    } args = {DCP_ATTEND_ARGS_INIT, {0, 0}};
    struct {
        dcp_attend_info i;
        uint64_t later[2];
    } info = {DCP_ATTEND_INFO_INIT, {7, 7}};
    struct {
        dcp_attend_stats s;
        uint64_t later[2];
    } stats = {DCP_ATTEND_STATS_INIT, {7, 7}};
    desc.d.struct_size = sizeof(desc);
    args.a.struct_size = sizeof(args);
    info.i.struct_size = sizeof(info);
    stats.s.struct_size = sizeof(stats);
    desc.d.n_heads = desc.d.n_kv_heads = desc.d.key_dim = desc.d.value_dim = 1;
    dcp_group *g = NULL;
    dcp_attend *a = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    desc.later[1] = 1; /* a wish that this library does not know */
    assert_int_equal(dcp_attend_create(g, &desc.d, &a), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "older than its caller"));
    desc.later[1] = 0;
    assert_int_equal(dcp_attend_create(g, &desc.d, &a), DCP_OK);
    dcp_attend_get_info(a, &info.i);
    assert_true(info.i.struct_size == sizeof(info) && info.i.workspace_bytes > 0);
    assert_true(info.later[0] == 0 && info.later[1] == 0);
    assert_int_equal(dcp_attend_run(a, &args.a, &stats.s), DCP_OK);
    assert_true(stats.s.struct_size == sizeof(stats) && stats.later[1] == 0);
    info.i.struct_size = 0; /* not from the initialiser: left alone */
    info.i.workspace_bytes = 5;
    dcp_attend_get_info(a, &info.i);
    assert_int_equal(info.i.workspace_bytes, 5);
    dcp_attend_destroy(a);
    dcp_group_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_shapes), cmocka_unit_test(test_split_keys),
        cmocka_unit_test(test_many_rows),     cmocka_unit_test(test_latent),
        cmocka_unit_test(test_edges),         cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_no_place),
        cmocka_unit_test(test_crossed),       cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_no_rows),       cmocka_unit_test(test_other_versions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
