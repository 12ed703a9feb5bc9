/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX attention kernels, their real machine code: on a CPU with tiles natively, elsewhere (with
 * AVX-512 and its bf16) under the emulator. Every edge size, mask shape and special value against
 * double precision. */
#include "kernels/attn_amx_case.h"

#include "base/cpu_priv.h"
#include "base/pool_priv.h"
#include "kernels/attn_amx_priv.h"
#include "kernels/tile_amx.h"

static void check_shape(const struct shape *shape, double *worst)
{
    struct fixture f;
    fixture_make(&f, shape);
    run(&f);
    check_rows(&f, worst);
    check_batching(&f);
    fixture_free(&f);
}
/* In both kernels. */
static void check_both(const struct shape *shape, double worst[2])
{
    struct shape s = *shape;
    if (s.n_tokens * s.n_group <= 32) {
        s.call_rows = 0;
        check_shape(&s, &worst[0]);
    }
    s.call_rows = 1000;
    check_shape(&s, &worst[1]);
}
static void print_worst(const double worst[2])
{
    print_message("largest error: %.3f of the tolerance in few rows, %.3f in many\n", worst[0],
                  worst[1]);
}

/* ---- the emulator ---- */

/* The product by its definition, one element at a time. */
static float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}
static float product_element(float c, const uint16_t *a, const uint16_t *b)
{
    float even = 0.0f;
    float odd = 0.0f;
    for (int k = 0; k < 16; k++) {
        even = flush(
            fmaf(flush(dcp__bf16_to_f32(a[2 * k])), flush(dcp__bf16_to_f32(b[32 * k])), even));
        odd = flush(fmaf(flush(dcp__bf16_to_f32(a[2 * k + 1])),
                         flush(dcp__bf16_to_f32(b[32 * k + 1])), odd));
    }
    return flush(flush(c) + flush(even + odd));
}

struct product_case {
    _Alignas(64) float c[256], c2[256];
    _Alignas(64) uint16_t a[512], b[512];
};
static void make_product(struct product_case *p, int which)
{
    for (int i = 0; i < 512; i++) {
        const float tiny = which == 1 && pick(0, 7) == 0 ? 0x1p-130f : 1.0f;
        p->a[i] = dcp__f32_to_bf16(uniform() * tiny);
        p->b[i] = dcp__f32_to_bf16(uniform() * (which == 2 ? 0x1p-110f : 1.0f));
        if (tiny < 1.0f) p->a[i] = (uint16_t)(ref_random(&rng_state) & 0x807f); /* denormal */
    }
    for (int i = 0; i < 256; i++)
        p->c[i] = p->c2[i] = uniform() * (which == 2 ? 0x1p-110f : which == 3 ? 100.0f : 1.0f);
}

static void test_product(void **state)
{
    (void)state;
    rng_state = 1;
    for (int i = 0; i < 60; i++) {
        struct product_case p;
        make_product(&p, i % 4);
        amx_emulate_product(p.c, p.a, p.b);
        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < 16; n++) {
                const float want = product_element(p.c2[16 * m + n], p.a + 32 * m, p.b + 2 * n);
                assert_memory_equal(&p.c[16 * m + n], &want, 4);
            }
        }
    }
}

/* The instructions: every addressing form that compilers give, register numbers, strides. Where the
 * CPU has tiles this compares its bits with the emulator's. */
static void test_instructions(void **state)
{
    (void)state;
    rng_state = 2;
    use_tiles();
    for (int i = 0; i < 40; i++) {
        struct product_case p;
        make_product(&p, i % 4);
        amx_emulate_product(p.c2, p.a, p.b);
        tile_begin_all();
        TILE_LOAD(2, p.c, 64);
        TILE_LOAD(5, p.a, 64);
        TILE_STREAM(7, p.b, 64);
        TILE_DP(2, 5, 7);
        TILE_STORE(2, p.c, 64);
        tile_end_all();
        assert_memory_equal(p.c, p.c2, sizeof(p.c));
    }
    /* base, index, scale, displacement in other registers */
    _Alignas(64) char from[16 * 256];
    _Alignas(64) char to[16 * 64];
    for (size_t i = 0; i < sizeof(from); i++) from[i] = (char)ref_random(&rng_state);
    tile_begin_all();
    register int64_t stride __asm__("r13") = 64;
    register const char *base __asm__("r12") = from;
    __asm__ volatile("tileloadd 64(%0,%1,4), %%tmm6" : : "r"(base), "r"(stride) : "memory");
    register char *out __asm__("r9") = to;
    __asm__ volatile("tilestored %%tmm6, (%0,%1)" : : "r"(out), "r"(stride) : "memory");
    for (int r = 0; r < 16; r++) assert_memory_equal(to + 64 * r, from + 256 * r + 64, 64);
    __asm__ volatile("tileloaddt1 1024(%0,%1,2), %%tmm1" : : "r"(base), "r"(stride) : "memory");
    TILE_STORE(1, to, 64);
    for (int r = 0; r < 16; r++) assert_memory_equal(to + 64 * r, from + 128 * r + 1024, 64);
    /* no index: every row the same */
    __asm__ volatile("tileloadd 128(%0), %%tmm3" : : "r"(base) : "memory");
    TILE_STORE(3, to, 64);
    for (int r = 0; r < 16; r++) assert_memory_equal(to + 64 * r, from + 128, 64);
    TILE_ZERO(3);
    TILE_STORE(3, to, 64);
    for (int i = 0; i < 1024; i++) assert_int_equal(to[i], 0);
    tile_end_all();
    assert_true(amx_emulator_is_released());
}

/* ---- shapes ---- */

static void test_dims(void **state)
{
    static const int64_t dims[][2] = {
        {1, 1},     {2, 2},     {3, 5},   {8, 8},   {15, 17},   {16, 16},   {31, 33},
        {32, 32},   {33, 31},   {64, 64}, {63, 65}, {80, 80},   {96, 1},    {128, 128},
        {192, 128}, {256, 256}, {1, 129}, {96, 96}, {127, 130}, {160, 160}, {576, 512},
    };
    (void)state;
    rng_state = 3;
    double worst[2] = {0.0, 0.0};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct shape s = plain(dims[i][0], dims[i][1], 131, 5, 2);
        check_both(&s, worst);
        s.latent = dims[i][1] <= dims[i][0];
        s.n_tokens = 7;
        s.n_group = 3;
        s.is_packed = true;
        check_both(&s, worst);
    }
    print_worst(worst);
}

static void test_key_borders(void **state)
{
    static const int64_t n_keys[] = {1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 255, 257, 600};
    static const int64_t pages[] = {1, 3, 16, 64, 100};
    (void)state;
    rng_state = 4;
    double worst[2] = {0.0, 0.0};
    for (size_t i = 0; i < sizeof(n_keys) / sizeof(n_keys[0]); i++) {
        for (size_t j = 0; j < sizeof(pages) / sizeof(pages[0]); j++) {
            struct shape s = plain(32, 20, n_keys[i], pick(1, 9), pick(1, 9));
            s.page_tokens = pages[j];
            check_both(&s, worst);
            s.key_begin = pick(0, s.n_keys);
            s.key_end = pick(s.key_begin, s.n_keys);
            s.window = pick(1, 100);
            check_both(&s, worst);
        }
    }
    print_worst(worst);
}

/* Every number of rows that fills tiles or does not, up to more than a job is cut into. */
static void test_rows(void **state)
{
    (void)state;
    rng_state = 5;
    double worst[2] = {0.0, 0.0};
    for (int64_t rows = 1; rows <= 33; rows++) {
        struct shape s = plain(64, 64, 150, 1, rows);
        check_both(&s, worst);
    }
    struct shape s = plain(16, 32, 300, 150, 1);
    check_both(&s, worst);
    s = plain(8, 8, 80, 2, 101);
    check_both(&s, worst);
    s = plain(32, 520, 80, 150, 2); /* more than one pass */
    s.n_keys = s.key_end = 330;
    check_both(&s, worst);
    s = plain(32, 32, 1300, 1100, 1);
    check_both(&s, worst);
    print_worst(worst);
}

static void test_random(void **state)
{
    (void)state;
    const uint64_t seed = 20;
    rng_state = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    double worst[2] = {0.0, 0.0};
    for (int i = 0; i < 70; i++) {
        struct shape s = plain(pick(1, 100), pick(1, 100), pick(1, 400), pick(1, 30), pick(1, 6));
        if (pick(0, 1) == 0) {
            s.dk = 32 * pick(1, 4);
            s.dv = 32 * pick(1, 4);
        }
        s.page_tokens = pick(0, 1) == 0 ? pick(1, 70) : 16 * pick(1, 5);
        s.is_packed = pick(0, 1) == 0;
        s.causal = pick(0, 1) == 1;
        s.gaps = pick(0, 2) == 0;
        s.window = pick(0, 1) == 0 ? pick(1, 200) : 0;
        s.latent = s.dv <= s.dk && pick(0, 1) == 1;
        s.softcap = pick(0, 2) == 0 ? 5.0f : 0.0f;
        if (pick(0, 9) == 0) s.scale = -s.scale;
        if (pick(0, 2) == 0) s.key_begin = pick(0, s.n_keys);
        if (pick(0, 2) == 0) s.key_end = pick(s.key_begin, s.n_keys);
        check_both(&s, worst);
    }
    print_worst(worst);
}

static void test_softcap(void **state)
{
    static const float caps[] = {0.5f, 5.0f, 50.0f, 1e4f};
    static const float sizes[] = {0.01f, 1.0f, 30.0f, 3000.0f};
    (void)state;
    rng_state = 6;
    double worst[2] = {0.0, 0.0};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            struct shape s = plain(40, 24, 140, 3, 2);
            s.softcap = caps[i];
            s.q_size = sizes[j];
            check_both(&s, worst);
        }
    }
    print_worst(worst);
}

static void test_extreme_scores(void **state)
{
    (void)state;
    rng_state = 7;
    double worst[2] = {0.0, 0.0};
    struct shape s = plain(32, 32, 400, 9, 2);
    s.q_size = 1.0f;
    s.scale = 1e4f;
    check_both(&s, worst);
    s.scale = -1e4f;
    check_both(&s, worst);
    s.scale = 0.0f;
    check_both(&s, worst);
    s.q_size = 0.0f;
    check_both(&s, worst);
    print_worst(worst);
}

/* Scores that climb from block to block, so that the reference must move, or fall. */
static void test_moving_maximum(void **state)
{
    (void)state;
    rng_state = 8;
    double worst = 0.0;
    for (int which = 0; which < 6; which++) {
        struct shape s = plain(4, 40, 1000, 5, 3);
        s.scale = 1.0f;
        s.call_rows = which % 2 == 0 ? 0 : 1000;
        struct fixture f;
        fixture_make(&f, &s);
        for (int64_t key = 0; key < s.n_keys; key++) {
            const float climb = (float)(key - s.n_keys) * 0.5f - 300.0f;
            const float steps = key / 40 % 2 == 0 ? 0.0f : (float)key * 0.3f;
            for (int64_t d = 0; d < s.dk; d++)
                f.k[key * s.dk + d] = put(element(&f, false, key, d), which < 2   ? climb
                                                                      : which < 4 ? -climb - 1100.0f
                                                                                  : steps);
        }
        for (int64_t x = 0; x < s.n_tokens * s.n_group * (s.dk + Q_PAD); x++)
            f.q[x] = fabsf(f.q[x]) * 0.3f;
        run(&f);
        check_rows(&f, &worst);
        check_batching(&f);
        fixture_free(&f);
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* Many equal keys: lse = score + log n has a known value. */
static void test_long_sum(void **state)
{
    (void)state;
    rng_state = 9;
    for (int which = 0; which < 2; which++) {
        const int64_t n_keys = 65536;
        struct shape s = plain(4, 2, n_keys, 1, 1);
        s.page_tokens = 64;
        s.call_rows = which == 0 ? 0 : 1000;
        struct fixture f;
        fixture_make(&f, &s);
        for (int64_t key = 0; key < n_keys; key++)
            for (int64_t d = 0; d < s.dk; d++)
                f.k[key * s.dk + d] = put(element(&f, false, key, d), 0.7f);
        double worst = 0.0;
        run(&f);
        check_rows(&f, &worst);
        double dot = 0.0;
        for (int64_t d = 0; d < s.dk; d++) dot += (double)f.q[d] * (double)f.k[d];
        const double want = dot * (double)s.scale + log((double)n_keys);
        print_message("%lld keys: lse off by %.2e\n", (long long)n_keys, (double)f.lse[0] - want);
        assert_true(fabs((double)f.lse[0] - want) <= (which == 0 ? 2e-6 : 2e-5) * fabs(want));
        fixture_free(&f);
    }
}

/* ---- values that are no numbers ---- */

/* A key that is NaN or infinite touches the rows that see it, and no other. */
static void test_poisoned_key(void **state)
{
    (void)state;
    rng_state = 10;
    for (int which = 0; which < 8; which++) {
        struct shape s = plain(32, 40, 100, 10, 2);
        s.is_packed = which >= 4;
        for (int many = 0; many < 2; many++) {
            s.call_rows = many ? 1000 : 0;
            struct fixture f;
            fixture_make(&f, &s);
            /* Tokens 0 to 4 do not see key 95; their bits before and after. */
            run(&f);
            const size_t n = (size_t)(10 * (s.dv + OUT_PAD));
            float *const before = must(malloc(n * sizeof(float)));
            memcpy(before, f.out, n * sizeof(float));
            put(element(&f, which % 2 == 1, 95, 3), which % 4 < 2 ? NAN : INFINITY);
            for (int64_t t = 5; t < 10; t++) assert_int_equal(f.hi[t], 91 + t);
            run(&f);
            assert_memory_equal(before, f.out, n * sizeof(float));
            for (int64_t row = 10; row < 20; row++) {
                const float *const out = f.out + row * (s.dv + OUT_PAD);
                const bool is_value = which % 2 == 1;
                if (is_value) {
                    assert_true(!isfinite(out[3]));
                    assert_true(isfinite(out[2]) && isfinite(out[4]));
                    assert_true(isfinite(f.lse[2 * row]));
                } else if (which % 4 == 0) {
                    assert_true(isnan(out[3]) && isnan(f.lse[2 * row]));
                }
            }
            check_batching(&f);
            free(before);
            fixture_free(&f);
        }
    }
}

/* A row of q that is NaN touches no other row. */
static void test_poisoned_q(void **state)
{
    (void)state;
    rng_state = 11;
    for (int many = 0; many < 2; many++) {
        struct shape s = plain(64, 64, 200, 3, 6);
        s.call_rows = many ? 1000 : 0;
        struct fixture f;
        fixture_make(&f, &s);
        run(&f);
        const size_t n = (size_t)(18 * (s.dv + OUT_PAD));
        float *const before = must(malloc(n * sizeof(float)));
        memcpy(before, f.out, n * sizeof(float));
        f.q[7 * (s.dk + Q_PAD) + 5] = NAN;
        run(&f);
        for (int64_t row = 0; row < 18; row++) {
            const size_t at = (size_t)(row * (s.dv + OUT_PAD));
            if (row == 7)
                assert_true(isnan(f.out[at]) && isnan(f.lse[2 * row]));
            else
                assert_memory_equal(before + at, f.out + at, (size_t)s.dv * sizeof(float));
        }
        free(before);
        fixture_free(&f);
    }
}

/* Scores of -inf weigh nothing; a row that has no other gives 0 and -inf. */
static void test_minus_infinity(void **state)
{
    (void)state;
    rng_state = 12;
    for (int many = 0; many < 2; many++) {
        struct shape s = plain(1, 3, 70, 1, 1);
        s.call_rows = many ? 1000 : 0;
        struct fixture f;
        fixture_make(&f, &s);
        f.q[0] = 1.0f;
        for (int64_t key = 0; key < 69; key++) put(element(&f, false, key, 0), -INFINITY);
        put(element(&f, false, 69, 0), 0.5f);
        run(&f);
        assert_true(fabsf(f.lse[0] - 0.5f) < (many ? 4e-6f : 1e-6f));
        assert_true(fabsf(f.out[1] - f.v[69 * 3 + 1]) <= 1e-6f);
        f.hi[0] = 69;
        run(&f);
        assert_true(isinf(f.lse[0]) && f.lse[0] < 0.0f);
        for (int d = 0; d < 3; d++) assert_true(f.out[d] == 0.0f);
        fixture_free(&f);
    }
}

/* ---- layout, threads, state ---- */

/* The same keys in other pages: the same bits, natural rows or copies. */
static void test_pages(void **state)
{
    static const int64_t pages[] = {64, 16, 1, 5, 100};
    (void)state;
    for (int many = 0; many < 2; many++) {
        float *first = NULL;
        for (size_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++) {
            struct shape s = plain(64, 96, 300, 4, 5);
            s.page_tokens = pages[i];
            s.is_packed = true;
            s.call_rows = many ? 1000 : 0;
            struct fixture f;
            rng_state = 13;
            fixture_make(&f, &s);
            rng_state = 14; /* keys that do not depend on how pages were drawn */
            for (int64_t x = 0; x < s.n_keys * s.dk; x++)
                f.k[x] = put(element(&f, false, x / s.dk, x % s.dk), uniform());
            for (int64_t x = 0; x < s.n_keys * s.dv; x++)
                f.v[x] = put(element(&f, true, x / s.dv, x % s.dv), uniform());
            for (int64_t x = 0; x < 20 * (s.dk + Q_PAD); x++) f.q[x] = uniform();
            double worst = 0.0;
            run(&f);
            check_rows(&f, &worst);
            const size_t n = (size_t)(20 * (s.dv + OUT_PAD)) * sizeof(float);
            if (first == NULL) {
                first = must(malloc(n));
                memcpy(first, f.out, n);
            }
            assert_memory_equal(first, f.out, n);
            fixture_free(&f);
        }
        free(first);
    }
}

/* Every thread of a pool can use tiles, and gives them back; MXCSR is as it was. */
enum { N_ITEMS = 8 };
struct items {
    struct fixture f[N_ITEMS];
    bool is_released[N_ITEMS], is_csr_kept[N_ITEMS];
};
static void do_item(void *ctx, int64_t item, int thread)
{
    struct items *const it = ctx;
    (void)thread;
    const unsigned csr = _mm_getcsr();
    if (!is_native) amx_emulator_install();
    dcp__attn_bf16__amx(&it->f[item].job);
    it->is_released[item] = amx_emulator_is_released();
    it->is_csr_kept[item] = (_mm_getcsr() & 0xffc0u) == (csr & 0xffc0u);
}
static void test_threads(void **state)
{
    (void)state;
    rng_state = 15;
    struct items it;
    struct dcp_pool *pool;
    double worst = 0.0;
    assert_int_equal(dcp_pool_create(4, 1, &pool), DCP_OK);
    for (int i = 0; i < N_ITEMS; i++) {
        struct shape s = plain(64, 64, 300, i % 2 == 0 ? 2 : 20, 3);
        fixture_make(&it.f[i], &s);
        run(&it.f[i]);
        for (int64_t x = 0; x < s.n_tokens * s.n_group; x++) it.f[i].lse[2 * x] = CANARY;
    }
    dcp__pool_run(pool, N_ITEMS, do_item, &it);
    for (int i = 0; i < N_ITEMS; i++) {
        assert_true(it.is_released[i]);
        assert_true(it.is_csr_kept[i]);
        check_rows(&it.f[i], &worst);
        fixture_free(&it.f[i]);
    }
    dcp_pool_destroy(pool);
}

/* The same bits from jobs that take other ways: few row tiles and many (keys or rows outside), q of
 * which bf16 holds all and q of which it does not, loops made for the shape and those for all. */
static void test_ways(void **state)
{
    static const int64_t dims[][2] = {{64, 64},   {96, 96}, {128, 128}, {256, 256},
                                      {192, 128}, {32, 64}, {40, 24}};
    (void)state;
    rng_state = 21;
    use_tiles();
    /* Emulated, a product takes 10,000 times as long. */
    const size_t n_dims = is_native ? sizeof(dims) / sizeof(dims[0]) : 2;
    for (size_t i = 0; i < n_dims; i++) {
        for (int which = is_native ? 0 : 1; which < (is_native ? 4 : 3); which++) {
            /* 21 row tiles, or 22: more than wait for their values, odd and even */
            struct shape s =
                plain(dims[i][0], dims[i][1], is_native ? 600 : 300, which % 2 == 0 ? 67 : 70, 5);
            s.page_tokens = 64;
            s.is_packed = which != 3;
            s.window = which == 2 ? 200 : 0;
            struct fixture f;
            fixture_make(&f, &s);
            const int64_t n = s.n_tokens * f.job.q_token_stride;
            /* 0: float32; 1, 3: bf16; 2: bf16 but for one element of one token */
            for (int64_t j = 0; j < n && which > 0; j++)
                f.q[j] = dcp__bf16_to_f32(dcp__f32_to_bf16(f.q[j]));
            if (which == 2) f.q[33 * f.job.q_token_stride] += 0x1p-12f;
            double worst = 0.0;
            run(&f);
            check_rows(&f, &worst);
            for (int j = 0; j < (is_native ? 4 : 1); j++) check_batching(&f);
            fixture_free(&f);
        }
    }
}

/* Row tiles of a pair that see parts of a block with a hole in between, rows that see nothing and
 * pairs that begin late, on scratch full of NaN: what was not written is not read, so no row needs
 * to be done again. */
static void test_holes(void **state)
{
    (void)state;
    rng_state = 22;
    use_tiles();
    double worst = 0.0;
    for (int which = 0; which < 16; which++) {
        /* 24 tokens x 4: three pairs, late; 72 x 4: nine, not. Then one pair of three, the last
         * one of a single tile, sees a part of a block: V's tiles are made by the first and the
         * last pair. */
        const bool is_part = which >= 4, is_late = is_part || which % 2 == 0;
        const int n_tokens = is_part ? 20 : is_late ? 24 : 72;
        struct shape s = plain(64, 64, is_native ? 1200 : 560, n_tokens, 4);
        s.page_tokens = 64;
        s.is_packed = true;
        s.latent = is_part ? which % 2 : which >= 2;
        struct fixture f;
        fixture_make(&f, &s);
        for (int64_t t = 0; t < s.n_tokens; t++) {
            const int64_t tile = t / 4;
            /* Of the second and third block: its begin, its end, nothing. */
            f.lo[t] = tile % 2 == 0 || is_part ? 0 : 450;
            f.hi[t] = tile % 2 == 0 && !is_part ? 290 : s.n_keys;
            if (tile / 2 == 1 && !is_part) f.lo[t] = f.hi[t] = tile; /* nothing */
            if (tile == 4 && !is_part) f.lo[t] = f.hi[t] = 0;
            if (is_part && tile / 2 == which / 2 % 3) {
                f.lo[t] = which < 10 ? 256 + 128 : 0;
                f.hi[t] = which < 10 ? s.n_keys : 256 + 96;
            }
        }
        const size_t n_bytes = dcp__attn_amx_many_bytes(s.n_tokens * s.n_group, f.job.dk, f.job.dv);
        f.job.call_rows = 1000;
        memset(f.scratch, 0xff, n_bytes);
        if (is_native) assert_true(dcp__attn_amx_many(&f.job));
        memset(f.scratch, 0xff, n_bytes);
        run(&f);
        check_rows(&f, &worst);
        check_batching(&f);
        fixture_free(&f);
    }
}

/* An infinite key meets a second part of q that is 0, and makes NaN of it, where another row of the
 * job has one, and nothing where none has: the same bits all the same. */
static void test_infinite_key(void **state)
{
    (void)state;
    rng_state = 22;
    for (int is_negative = 0; is_negative < 2; is_negative++) {
        for (int which = 0; which < 3; which++) {
            struct shape s = plain(32, 32, 100, 2, 3);
            s.call_rows = 1000;
            struct fixture f;
            fixture_make(&f, &s);
            for (int64_t i = 0; i < s.n_tokens * f.job.q_token_stride; i++)
                f.q[i] = dcp__bf16_to_f32(dcp__f32_to_bf16(fabsf(f.q[i]) + 0.25f));
            /* none, one, all but one of the first token's heads with more than bf16 holds */
            for (int j = 0; j < (which == 2 ? 2 : which); j++)
                f.q[j * f.job.q_head_stride] += 0x1p-12f;
            put(element(&f, false, 40, 3), is_negative ? -INFINITY : INFINITY);
            run(&f);
            for (int j = 0; j < 8; j++) check_batching(&f);
            fixture_free(&f);
        }
    }
}

/* Scores below every reference are no empty row. */
static void test_low_scores(void **state)
{
    (void)state;
    rng_state = 23;
    for (int many = 0; many < 2; many++) {
        struct shape s = plain(1, 3, 70, 1, 1);
        s.call_rows = many ? 1000 : 0;
        s.scale = 1.0f;
        struct fixture f;
        fixture_make(&f, &s);
        f.q[0] = 1.0f;
        for (int64_t key = 0; key < 70; key++) put(element(&f, false, key, 0), -0x1.4p127f);
        run(&f);
        assert_true(f.lse[0] < -2e38f && f.lse[0] > -INFINITY);
        for (int d = 0; d < 3; d++) assert_true(f.out[d] != 0.0f && isfinite(f.out[d]));
        fixture_free(&f);
    }
}

/* Instructions a key, as the headers of the kernels state them. */
static void print_counts(const char *name, int64_t dk, int64_t dv, int64_t n_tokens,
                         int64_t n_group, bool latent)
{
    struct shape s = plain(dk, dv, 512, n_tokens, n_group);
    s.page_tokens = 64;
    s.is_packed = true;
    s.causal = false;
    s.latent = latent;
    struct fixture f;
    fixture_make(&f, &s);
    amx_emulator_reset();
    kernel(&f.job);
    const struct amx_counts c = amx_emulator_counts();
    const double per = (double)s.n_keys / 16.0;
    const double least =
        (double)(n_tokens * n_group) / 16.0 * (double)(dk + dv) / 32.0; /* one part each */
    print_message("%-24s a 16 keys: products %7.1f (%.2f of the least), loads %7.1f + %7.1f t1, "
                  "stores %6.1f, across lines %.1f; configurations %lld\n",
                  name, (double)c.product / per, (double)c.product / per / least,
                  (double)c.load / per, (double)c.load_t1 / per, (double)c.store / per,
                  (double)c.split_lines / per, (long long)c.config);
    assert_int_equal(c.config, c.release);
    assert_true(c.config <= 1);
    fixture_free(&f);
}
static void test_counts(void **state)
{
    (void)state;
    rng_state = 16;
    if (is_native) return;
    print_counts("decode 128 x 4", 128, 128, 1, 4, false);
    print_counts("decode 128 x 8", 128, 128, 1, 8, false);
    print_counts("decode 128 x 32", 128, 128, 1, 32, false);
    print_counts("decode 64 x 3", 64, 64, 1, 3, false);
    print_counts("decode 256 x 4", 256, 256, 1, 4, false);
    print_counts("decode MLA x 16", 576, 512, 1, 16, true);
    print_counts("decode MLA x 96", 576, 512, 1, 96, true);
    print_counts("extend MLA x 96 x 2", 576, 512, 2, 96, true);
    print_counts("extend 128 x 4 x 128", 128, 128, 128, 4, false);
    print_counts("extend 64 x 3 x 128", 64, 64, 128, 3, false);
}

/* What the bf16 parts cost, in figures: q and weights of a usual spread. */
static void show_error(const char *name, int64_t dk, int64_t dv, int64_t n_keys, int64_t call_rows,
                       double most_out, double most_lse)
{
    struct shape s = plain(dk, dv, n_keys, 1, 4);
    s.q_size = 10.0f;
    s.call_rows = call_rows;
    struct fixture f;
    fixture_make(&f, &s);
    run(&f);
    double *const want = must(malloc((size_t)dv * sizeof(*want)));
    double square = 0.0;
    double lse = 0.0;
    for (int64_t row = 0; row < 4; row++) {
        struct ref_attn_row ref = {.dk = dk,
                                   .dv = dv,
                                   .hi = n_keys,
                                   .scale = (double)s.scale,
                                   .q = f.q + row * (dk + Q_PAD),
                                   .k = f.k,
                                   .v = f.v,
                                   .k_stride = dk,
                                   .v_stride = dv,
                                   .out = want};
        ref_attn(&ref);
        for (int64_t d = 0; d < dv; d++)
            square += pow((double)f.out[row * (dv + OUT_PAD) + d] - want[d], 2.0);
        lse = fmax(lse, fabs((double)f.lse[2 * row] - ref.lse));
    }
    const double out = sqrt(square / (double)(4 * dv));
    print_message("%-22s error of out (values in [-0.5, 1.5)): rms %.1e; of lse: most %.1e\n", name,
                  out, lse);
    assert_true(out <= most_out && lse <= most_lse);
    /* Whoever asks is told what was seen. */
    assert_true(dcp__attn_cuts_weights(DCP_ISA_AMX, DCP_BF16, f.job.call_rows) == (out > 1e-5));
    free(want);
    fixture_free(&f);
}
static void test_accuracy(void **state)
{
    (void)state;
    rng_state = 17;
    show_error("few, 128/128, 2048", 128, 128, 2048, 0, 1.5e-6, 4e-6);
    show_error("few, 32 rows", 128, 128, 2048, 32, 1.5e-6, 4e-6);
    show_error("many, 33 rows", 128, 128, 2048, 33, 5e-4, 2e-5);
    show_error("many, 128/128, 2048", 128, 128, 2048, 1000, 5e-4, 2e-5);
    show_error("few, 576/512, 512", 576, 512, 512, 0, 1.5e-6, 4e-6);
    show_error("many, 576/512, 512", 576, 512, 512, 1000, 5e-4, 2e-5);
}

/* ---- the choice ---- */

static void test_choice(void **state)
{
    (void)state;
    struct dcp__kernels k;
    dcp__kernels_select(DCP_ISA_AMX, &k);
    assert_string_equal(k.attn_name[DCP_BF16], "dcp__attn_bf16__amx");
    assert_string_equal(k.attn_name[DCP_F32], "dcp__attn_f32__avx512");
    dcp__kernels_select(DCP_ISA_AVX512, &k);
    assert_string_equal(k.attn_name[DCP_BF16], "dcp__attn_bf16__avx512");
    /* No level that the CPU or the kernel refuses is ever chosen. */
    dcp_isa isa;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    assert_int_equal(dcp__isa_choose(DCP_ISA_AMX, &isa), DCP_OK);
    assert_true(isa <= dcp__cpu_best_isa(&cpu));
    if (!cpu.amx_bf16) {
        assert_true(isa < DCP_ISA_AMX);
        if (isa == DCP_ISA_AVX512) assert_non_null(strstr(cpu.why_not_higher, "amx: "));
    }
    for (int64_t rows = 1; rows < 3000; rows += 7) {
        assert_true(dcp__attn_scratch_bytes_for(DCP_ISA_AVX512, rows, 128, 128) ==
                    dcp__attn_scratch_bytes(rows, 128, 128));
        assert_true(dcp__attn_scratch_bytes_for(DCP_ISA_AMX, rows, 128, 128) >=
                    dcp__attn_scratch_bytes(rows, 128, 128));
    }
    assert_int_equal(dcp__attn_rows_most(DCP_ISA_AVX512, 128), DCP__ATTN_ROWS_MAX);
    assert_true(dcp__attn_rows_most(DCP_ISA_AMX, 128) >= DCP__ATTN_ROWS_MAX);
    /* Weights are cut by that kernel alone, whatever the levels around it take. */
    for (int level = DCP_ISA_SCALAR; level <= DCP_ISA_AMX; level++) {
        dcp__kernels_select((dcp_isa)level, &k);
        for (int dtype = DCP_F32; dtype <= DCP_FP8_E4M3; dtype++) {
            const bool is_tiles = strstr(k.attn_name[dtype], "__amx") != NULL;
            for (int64_t rows = 31; rows < 35; rows++)
                assert_int_equal(dcp__attn_cuts_weights((dcp_isa)level, (dcp_dtype)dtype, rows),
                                 is_tiles && rows > 32);
        }
    }
}

int main(int argc, char **argv)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    if (!cpu.avx512 || !cpu.avx512_bf16) {
        printf("skipped: this CPU has no AVX-512 with bf16, which the AMX kernels need around "
               "their tiles\n");
        return 77;
    }
    is_native = dcp__cpu_best_isa(&cpu) >= DCP_ISA_AMX;
    printf("tiles: %s\n", is_native ? "the CPU's" : "emulated");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_product),        cmocka_unit_test(test_instructions),
        cmocka_unit_test(test_choice),         cmocka_unit_test(test_counts),
        cmocka_unit_test(test_dims),           cmocka_unit_test(test_key_borders),
        cmocka_unit_test(test_rows),           cmocka_unit_test(test_random),
        cmocka_unit_test(test_softcap),        cmocka_unit_test(test_extreme_scores),
        cmocka_unit_test(test_moving_maximum), cmocka_unit_test(test_long_sum),
        cmocka_unit_test(test_poisoned_key),   cmocka_unit_test(test_poisoned_q),
        cmocka_unit_test(test_minus_infinity), cmocka_unit_test(test_pages),
        cmocka_unit_test(test_infinite_key),   cmocka_unit_test(test_low_scores),
        cmocka_unit_test(test_ways),           cmocka_unit_test(test_threads),
        cmocka_unit_test(test_holes),          cmocka_unit_test(test_accuracy),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);
    return rc;
}
