/* SPDX-License-Identifier: Apache-2.0 */
/* dcp_attend over int8 and fp8 caches: the double oracle over the rounded values, the same bits for
 * any tile, limit and threads, and what is refused. */
#include "attn/attend_oracle.h"

static const dcp_dtype types[] = {DCP_I8, DCP_FP8_E4M3};

/* The oracle; then other threads, a limit near the least, processes: the same bits. */
static void check_quant(const struct call *first, unsigned seed, int with_shm)
{
    struct call c = *first;
    struct bits bits = run_first(&c, seed);
    c.n_threads = 3;
    run_group(&c);
    expect_same_bits(&c, "the number of threads", &bits);
    c.limit = least_limit(&c) + 4096;
    run_group(&c);
    expect_same_bits(&c, "the workspace limit", &bits);
    c.limit = first->limit;
    if (with_shm) {
        c.comm = COMM_SHM;
        run_group(&c);
        expect_same_bits(&c, "the group", &bits);
    }
    drop_first(&c, &bits);
}

static void test_random_shapes(void **state)
{
    (void)state;
    static const int rank_counts[] = {1, 2, 3, 4};
    static const int64_t heads[][2] = {{9, 3}, {4, 1}, {4, 4}, {8, 2}, {1, 1}};
    static const int64_t dims[][2] = {{64, 64}, {16, 16}, {40, 24}, {7, 13}, {80, 144}, {1, 1}};
    const unsigned seed0 = 20261130;
    print_message("seed %u\n", seed0);
    unsigned seed = seed0;
    for (int i = 0; i < 24; i++) {
        struct call c = base_call();
        c.dtype = types[i % 2];
        c.n_ranks = rank_counts[i / 2 % 4];
        c.interleave = i % 3 == 0 ? 16 : 1;
        const int hh = rand_r(&seed) % 5, dd = rand_r(&seed) % 6;
        c.n_heads = heads[hh][0];
        c.n_kv_heads = heads[hh][1];
        c.dk = dims[dd][0];
        c.dv = dims[dd][1];
        c.causal = rand_r(&seed) % 4 != 0;
        c.has_sink = rand_r(&seed) % 3 == 0;
        c.has_pos = rand_r(&seed) % 3 == 0;
        c.softcap = rand_r(&seed) % 3 == 0 ? 5.0f : 0.0f;
        c.n_seqs = 1 + rand_r(&seed) % 3;
        c.max_tokens = 200;
        for (int64_t s = 0; s < c.n_seqs; s++) {
            c.length[s] = 1 + rand_r(&seed) % (s == 0 ? 150 : 60);
            c.n_rows[s] = rand_r(&seed) % 12;
            if (c.n_rows[s] > c.length[s]) c.n_rows[s] = c.length[s];
            c.window[s] = rand_r(&seed) % 3 == 0 ? 1 + rand_r(&seed) % 40 : 0;
        }
        check_quant(&c, seed0 + (unsigned)i, i % 4 == 1);
    }
}

/* Latent rows have one scale for both uses; few rows over many keys are split, many are not. */
static void test_latent(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct call c = base_call();
        c.dtype = types[i % 2];
        c.n_ranks = 1 + i / 2 % 3;
        c.latent = 1;
        c.n_heads = 12;
        c.n_kv_heads = 1;
        c.dk = i < 4 ? 576 : 36;
        c.dv = i < 4 ? 512 : 20;
        c.length[0] = i < 4 ? 90 : 1500;
        c.n_rows[0] = i < 4 ? 20 : 2;
        check_quant(&c, 300u + (unsigned)i, i % 2);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *odd;
        dcp_dtype type;
        const char *word;
    } cases[] = {
        {"no scales", DCP_I8, "sequence 0: the view is int8 and scales are missing"},
        {"no scales", DCP_FP8_E4M3, "sequence 0: the view is fp8 and scales are missing"},
        {"empty scales", DCP_FP8_E4M3, "args.scales needs those of dcp_cache_scales"},
        {"scale type", DCP_I8, "sequence 0: dtype 4 of the scales is none of f32, f16, bf16"},
        {"scale stride", DCP_I8,
         "sequence 0: the scales' v_slot_stride is -1; no stride may be negative"},
        {"scale place", DCP_FP8_E4M3, "the scales' k_page_stride_bytes is "},
        {"no v scales", DCP_FP8_E4M3, "sequence 0: the scales' v_base is NULL"},
        {"scale base", DCP_I8, ", no multiple of the element's 4 bytes"},
        {"far scales", DCP_I8, " x 2 exceed the address space"},
        {"far scale page", DCP_FP8_E4M3,
         "v_page_stride_bytes is 9223372036854775800; the address space allows 2147483649"},
        {"lse in scales", DCP_I8, "overlaps the keys or values of sequence 0"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct call c = base_call();
        c.n_ranks = 2;
        c.dtype = cases[i].type;
        c.odd = cases[i].odd;
        c.odd_rank = 1;
        fill_world(&c, 5);
        run_group(&c);
        for (int r = 0; r < 2; r++) {
            if (world.answer->status[r] != DCP_ERR_ARG ||
                strstr(world.answer->text[r], cases[i].word) == NULL)
                fail_msg("%s: rank %d: status %d, text \"%s\"", c.odd, r, world.answer->status[r],
                         world.answer->text[r]);
            assert_int_equal(world.answer->again[r], DCP_OK);
        }
        drop_world(&c);
    }
}

/* fp8 without scales is refused, with a shared one of 1 the numbers are the values; scales beside a
 * type that has none are refused. */
static void test_without_scales(void **state)
{
    (void)state;
    dcp_group *g = NULL;
    dcp_attend *a = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    dcp_attend_desc d = DCP_ATTEND_DESC_INIT;
    d.max_tokens = d.n_heads = d.n_kv_heads = 1;
    d.key_dim = d.value_dim = 2;
    assert_int_equal(dcp_attend_create(g, &d, &a), DCP_OK);
    const uint8_t k[2] = {0x38, 0x40}, v[2] = {0x7e, 0x01}; /* 1, 2; 448, 2^-9 */
    const int32_t page = 0;
    dcp_kv_view view = {.k_base = k,
                        .v_base = v,
                        .pages = &page,
                        .page_tokens = 1,
                        .n_keys = 1,
                        .dtype = DCP_FP8_E4M3};
    const dcp_attend_seq seq = {&view, 1, 1, 0};
    const float q[2] = {3.0f, 1.0f};
    float out[2], lse;
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.q = q;
    args.out = out;
    args.lse = &lse;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "the view is fp8 and scales are missing"));
    /* One scale for all, beside the view. */
    float tensor_scale = 1.0f;
    const dcp_kv_scales scales = {.k_base = &tensor_scale, .v_base = &tensor_scale};
    args.scales = &scales;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK);
    assert_true(out[0] == 448.0f && out[1] == 0x1p-9f);
    assert_true(fabsf(lse - 5.0f / sqrtf(2.0f)) < 1e-6f);
    tensor_scale = 0.5f;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK);
    assert_true(out[0] == 224.0f && out[1] == 0x1p-10f);
    assert_true(fabsf(lse - 2.5f / sqrtf(2.0f)) < 1e-6f);
    view.dtype = DCP_I8;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK);
    assert_true(out[0] == 63.0f && out[1] == 0.5f);
    const uint16_t half[2] = {0, 0};
    view.k_base = view.v_base = half;
    view.dtype = DCP_BF16;
    assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "the view is bf16 and scales are given"));
    dcp_attend_destroy(a);
    dcp_group_destroy(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_shapes),
        cmocka_unit_test(test_latent),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_without_scales),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
