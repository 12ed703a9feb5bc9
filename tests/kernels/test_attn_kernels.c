/* SPDX-License-Identifier: Apache-2.0 */
/* Every attention kernel of kernels.inc against double precision: shapes, pages, strides, ranges,
 * special values; and that a row's bits depend on nothing but the row. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_attn.h"
#include "ref/ref_merge.h"

struct kernel {
    const char *name;
    dcp_isa isa;
    dcp_dtype dtype;
    dcp__attn_fn *fn;
};
static const struct kernel kernels[] = {
#define ATTN(level, dtype, fn) {#fn, DCP_ISA_##level, dtype, fn},
#define MERGE_ROW(level, part, merged, fn)
#define QDOT(level, qtype, fn)
#define DEQUANT(level, qtype, fn)
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT
};
enum { N_KERNELS = (int)(sizeof(kernels) / sizeof(kernels[0])) };

static dcp_isa best_isa(void)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    const dcp_isa best = dcp__cpu_best_isa(&cpu);
    return best < DCP_ISA_AVX512 ? best : DCP_ISA_AVX512; /* AMX: test_attn_amx.c */
}

static uint64_t rng_state;
static int64_t pick(int64_t lo, int64_t hi) /* both included */
{
    return lo + (int64_t)(ref_random(&rng_state) % (uint64_t)(hi - lo + 1));
}
static float uniform(void) /* [-1, 1) */
{
    return (float)((double)(ref_random(&rng_state) >> 11) * 0x1p-52 - 1.0);
}

struct shape {
    int64_t dk, dv, n_keys, page_tokens, n_tokens, n_group;
    int64_t key_begin, key_end;
    int64_t window; /* 0 = none */
    bool latent, causal, gaps;
    float scale, softcap, q_size;
};

/* A view in paged memory that is NaN wherever no key lies, and the same keys as plain floats. */
struct fixture {
    struct shape shape;
    dcp_dtype dtype;
    dcp_kv_view view;
    int32_t *pages;
    char *memory;
    float *k, *v; /* [n_keys][dk], [n_keys][dv]: what the type holds */
    float *q;
    int64_t *lo, *hi;
    struct dcp__attn_job job;
    float *out, *lse;
    void *scratch;
};

enum { Q_PAD = 3, OUT_PAD = 5, N_HEADS = 2, KV_HEAD = 1 };
static const float CANARY = 12345.5f;

static void *must(void *p)
{
    assert_non_null(p);
    return p;
}

static float put(char *at, dcp_dtype dtype, float x)
{
    if (dtype == DCP_F32) {
        memcpy(at, &x, sizeof(x));
        return x;
    }
    const uint16_t bits = dtype == DCP_BF16 ? dcp__f32_to_bf16(x) : dcp__f32_to_f16(x);
    memcpy(at, &bits, sizeof(bits));
    return dtype == DCP_BF16 ? dcp__bf16_to_f32(bits) : dcp__f16_to_f32(bits);
}

static char *element(const struct fixture *f, bool is_value, int64_t key, int64_t d)
{
    const dcp_kv_view *const view = &f->view;
    const int64_t bytes = (int64_t)dcp_dtype_bytes(f->dtype);
    const int64_t page = f->pages[key / view->page_tokens];
    const int64_t slot = key % view->page_tokens;
    const int64_t offset =
        is_value ? page * view->v_page_stride_bytes +
                       (slot * view->v_slot_stride + KV_HEAD * view->v_head_stride + d) * bytes
                 : page * view->k_page_stride_bytes +
                       (slot * view->k_slot_stride + KV_HEAD * view->k_head_stride + d) * bytes;
    return (char *)(uintptr_t)(is_value ? view->v_base : view->k_base) + offset;
}

/* Pages of K, then pages of V; slots are head by head or token by token, rows have odd padding. */
static void make_view(struct fixture *f)
{
    const struct shape *const s = &f->shape;
    const int64_t bytes = (int64_t)dcp_dtype_bytes(f->dtype);
    const int64_t n_pages = (s->n_keys + s->page_tokens - 1) / s->page_tokens;
    const int64_t n_physical = n_pages + 3;
    const int64_t pad = pick(0, 3);
    const bool heads_outside = pick(0, 1) == 1;
    dcp_kv_view *const view = &f->view;
    const int64_t k_row = s->dk + pad;
    const int64_t v_row = s->dv + pad;
    view->k_slot_stride = heads_outside ? k_row : k_row * N_HEADS;
    view->k_head_stride = heads_outside ? k_row * s->page_tokens : k_row;
    view->v_slot_stride = heads_outside ? v_row : v_row * N_HEADS;
    view->v_head_stride = heads_outside ? v_row * s->page_tokens : v_row;
    view->k_page_stride_bytes = (k_row * N_HEADS * s->page_tokens + pick(0, 7)) * bytes;
    view->v_page_stride_bytes = (v_row * N_HEADS * s->page_tokens + pick(0, 7)) * bytes;
    view->page_tokens = s->page_tokens;
    view->n_keys = s->n_keys;
    view->dtype = f->dtype;
    const size_t k_bytes = (size_t)(n_physical * view->k_page_stride_bytes);
    const size_t v_bytes = s->latent ? 0 : (size_t)(n_physical * view->v_page_stride_bytes);
    f->memory = must(malloc(k_bytes + v_bytes));
    for (size_t i = 0; i < k_bytes + v_bytes; i += (size_t)bytes)
        put(f->memory + i, f->dtype, ref_random(&rng_state) & 1 ? NAN : -INFINITY);
    view->k_base = f->memory;
    view->v_base = f->memory + k_bytes;
    if (s->latent) {
        view->v_base = f->memory;
        view->v_page_stride_bytes = view->k_page_stride_bytes;
        view->v_slot_stride = view->k_slot_stride;
        view->v_head_stride = view->k_head_stride;
    }
    f->pages = must(malloc((size_t)n_physical * sizeof(*f->pages)));
    for (int64_t i = 0; i < n_physical; i++) f->pages[i] = (int32_t)i;
    for (int64_t i = n_physical - 1; i > 0; i--) {
        const int64_t j = pick(0, i);
        const int32_t page = f->pages[i];
        f->pages[i] = f->pages[j];
        f->pages[j] = page;
    }
    for (int64_t i = n_pages; i < n_physical; i++) f->pages[i] = INT32_MAX; /* never looked at */
    view->pages = f->pages;
}

static void make_keys(struct fixture *f)
{
    const struct shape *const s = &f->shape;
    f->k = must(malloc((size_t)(s->n_keys * s->dk) * sizeof(float)));
    f->v = must(malloc((size_t)(s->n_keys * s->dv) * sizeof(float)));
    for (int64_t key = 0; key < s->n_keys; key++) {
        for (int64_t d = 0; d < s->dk; d++)
            f->k[key * s->dk + d] = put(element(f, false, key, d), f->dtype, uniform());
        for (int64_t d = 0; d < s->dv; d++)
            f->v[key * s->dv + d] = s->latent
                                        ? f->k[key * s->dk + d]
                                        : put(element(f, true, key, d), f->dtype, uniform() + 0.5f);
    }
}

static void fixture_make(struct fixture *f, const struct shape *shape, dcp_dtype dtype)
{
    memset(f, 0, sizeof(*f));
    f->shape = *shape;
    f->dtype = dtype;
    const struct shape *const s = &f->shape;
    make_view(f);
    make_keys(f);
    const int64_t q_head = s->dk + Q_PAD;
    const int64_t out_head = s->dv + OUT_PAD;
    const int64_t rows = s->n_tokens * s->n_group;
    f->q = must(malloc((size_t)(rows * q_head) * sizeof(float)));
    for (int64_t i = 0; i < rows * q_head; i++) f->q[i] = s->q_size * uniform();
    f->lo = must(malloc((size_t)s->n_tokens * sizeof(int64_t)));
    f->hi = must(malloc((size_t)s->n_tokens * sizeof(int64_t)));
    for (int64_t t = 0; t < s->n_tokens; t++) {
        f->hi[t] = s->causal ? s->n_keys - s->n_tokens + t + 1 : s->n_keys;
        if (f->hi[t] < 0) f->hi[t] = 0;
        f->lo[t] = s->window > 0 && f->hi[t] > s->window ? f->hi[t] - s->window : 0;
        if (s->gaps) {
            f->lo[t] = pick(0, s->n_keys);
            f->hi[t] = pick(0, s->n_keys);
        }
    }
    f->out = must(malloc((size_t)(rows * out_head) * sizeof(float)));
    f->lse = must(malloc((size_t)(rows * 2) * sizeof(float)));
    const size_t scratch = dcp__attn_scratch_bytes(rows, s->dk, s->dv);
    f->scratch = must(aligned_alloc(64, (scratch + 63) / 64 * 64));
    memset(f->scratch, 0xff, scratch); /* NaN */
    f->job = (struct dcp__attn_job){
        .view = &f->view,
        .kv_head = KV_HEAD,
        .key_begin = s->key_begin,
        .key_end = s->key_end,
        .n_tokens = s->n_tokens,
        .n_group = s->n_group,
        .dk = s->dk,
        .dv = s->dv,
        .scale = s->scale,
        .softcap = s->softcap,
        .lo = f->lo,
        .hi = f->hi,
        .q = f->q,
        .q_token_stride = q_head * s->n_group,
        .q_head_stride = q_head,
        .out = f->out,
        .out_token_stride = out_head * s->n_group,
        .out_head_stride = out_head,
        .lse = f->lse,
        .lse_token_stride = 2 * s->n_group,
        .lse_head_stride = 2,
        .scratch = f->scratch,
    };
}
static void fixture_free(struct fixture *f)
{
    free(f->memory);
    free(f->pages);
    free(f->k);
    free(f->v);
    free(f->q);
    free(f->lo);
    free(f->hi);
    free(f->out);
    free(f->lse);
    free(f->scratch);
}

static void run(struct fixture *f, dcp__attn_fn *fn)
{
    const int64_t rows = f->shape.n_tokens * f->shape.n_group;
    for (int64_t i = 0; i < rows * (f->shape.dv + OUT_PAD); i++) f->out[i] = CANARY;
    for (int64_t i = 0; i < rows * 2; i++) f->lse[i] = CANARY;
    fn(&f->job);
}

static void complain(const struct fixture *f, const struct kernel *kernel, int64_t row)
{
    const struct shape *const s = &f->shape;
    print_error("%s: row %lld of %lld x %lld, dk %lld, dv %lld, keys %lld [%lld, %lld), page %lld, "
                "latent %d, causal %d, window %lld, gaps %d, scale %g, softcap %g, q %g\n",
                kernel->name, (long long)row, (long long)s->n_tokens, (long long)s->n_group,
                (long long)s->dk, (long long)s->dv, (long long)s->n_keys, (long long)s->key_begin,
                (long long)s->key_end, (long long)s->page_tokens, s->latent, s->causal,
                (long long)s->window, s->gaps, (double)s->scale, (double)s->softcap,
                (double)s->q_size);
}

static bool is_close(double got, double want, double tol)
{
    return got == want || fabs(got - want) <= tol;
}

/* All rows of the last run against the oracle. worst: error over tolerance. */
static void check_rows(struct fixture *f, const struct kernel *kernel, double *worst)
{
    const struct shape *const s = &f->shape;
    const int64_t out_head = s->dv + OUT_PAD;
    double *const want = must(malloc((size_t)s->dv * sizeof(*want)));
    for (int64_t row = 0; row < s->n_tokens * s->n_group; row++) {
        const int64_t t = row / s->n_group;
        struct ref_attn_row ref = {
            .dk = s->dk,
            .dv = s->dv,
            .lo = f->lo[t] > s->key_begin ? f->lo[t] : s->key_begin,
            .hi = f->hi[t] < s->key_end ? f->hi[t] : s->key_end,
            .scale = (double)s->scale,
            .softcap = (double)s->softcap,
            .q = f->q + row * (s->dk + Q_PAD),
            .k = f->k,
            .v = f->v,
            .k_stride = s->dk,
            .v_stride = s->dv,
            .out = want,
        };
        ref_attn(&ref);
        const float *const out = f->out + row * out_head;
        const double tol = ref_attn_tol_out(&ref);
        bool good = is_close((double)f->lse[2 * row], ref.lse, ref_attn_tol_lse(&ref));
        if (ref.hi > ref.lo)
            *worst = fmax(*worst, fabs((double)f->lse[2 * row] - ref.lse) / ref_attn_tol_lse(&ref));
        for (int64_t d = 0; d < s->dv; d++) {
            good = good && is_close((double)out[d], want[d], tol);
            if (tol > 0.0) *worst = fmax(*worst, fabs((double)out[d] - want[d]) / tol);
        }
        for (int64_t d = s->dv; d < out_head; d++) good = good && out[d] == CANARY;
        good = good && f->lse[2 * row + 1] == CANARY;
        if (!good) {
            complain(f, kernel, row);
            print_error("lse %.9g want %.9g tol %.3g; out[0] %.9g want %.9g tol %.3g\n",
                        (double)f->lse[2 * row], ref.lse, ref_attn_tol_lse(&ref), (double)out[0],
                        want[0], tol);
        }
        assert_true(good);
    }
    free(want);
}

/* Rows of sub-jobs give the bits of the whole job. */
static void check_batching(struct fixture *f, const struct kernel *kernel)
{
    const struct shape *const s = &f->shape;
    const int64_t out_head = s->dv + OUT_PAD;
    const size_t n_out = (size_t)(s->n_tokens * s->n_group * out_head);
    float *const whole = must(malloc(n_out * sizeof(float)));
    float *const whole_lse = must(malloc((size_t)(s->n_tokens * s->n_group * 2) * sizeof(float)));
    memcpy(whole, f->out, n_out * sizeof(float));
    memcpy(whole_lse, f->lse, (size_t)(s->n_tokens * s->n_group * 2) * sizeof(float));
    for (int i = 0; i < 4; i++) {
        const int64_t t0 = pick(0, s->n_tokens - 1);
        const int64_t j0 = pick(0, s->n_group - 1);
        const int64_t nt = i == 0 ? 1 : pick(1, s->n_tokens - t0);
        const int64_t nj = i <= 1 ? 1 : pick(1, s->n_group - j0);
        struct dcp__attn_job job = f->job;
        job.call_rows = s->n_tokens * s->n_group;
        job.n_tokens = nt;
        job.n_group = nj;
        job.lo += t0;
        job.hi += t0;
        job.q += t0 * job.q_token_stride + j0 * job.q_head_stride;
        job.out += t0 * job.out_token_stride + j0 * job.out_head_stride;
        job.lse += t0 * job.lse_token_stride + j0 * job.lse_head_stride;
        for (size_t x = 0; x < n_out; x++) f->out[x] = CANARY;
        kernel->fn(&job);
        for (int64_t t = 0; t < nt; t++) {
            for (int64_t j = 0; j < nj; j++) {
                const int64_t row = (t0 + t) * s->n_group + j0 + j;
                const bool same = memcmp(f->out + row * out_head, whole + row * out_head,
                                         (size_t)s->dv * sizeof(float)) == 0 &&
                                  memcmp(&f->lse[2 * row], &whole_lse[2 * row], sizeof(float)) == 0;
                if (!same) {
                    complain(f, kernel, row);
                    print_error("other bits in a job of %lld x %lld from token %lld, head %lld\n",
                                (long long)nt, (long long)nj, (long long)t0, (long long)j0);
                }
                assert_true(same);
            }
        }
    }
    memcpy(f->out, whole, n_out * sizeof(float));
    free(whole);
    free(whole_lse);
}

/* One shape: every kernel and type; those with fused multiply-adds share bits. */
static void check_shape(const struct shape *shape, double *worst)
{
    const dcp_isa best = best_isa();
    for (int dtype = DCP_F32; dtype <= DCP_BF16; dtype++) {
        struct fixture f;
        fixture_make(&f, shape, (dcp_dtype)dtype);
        const size_t n_out = (size_t)(shape->n_tokens * shape->n_group * (shape->dv + OUT_PAD));
        float *fused = NULL;
        for (int i = 0; i < N_KERNELS; i++) {
            if (kernels[i].dtype != (dcp_dtype)dtype || kernels[i].isa > best) continue;
            run(&f, kernels[i].fn);
            check_rows(&f, &kernels[i], worst);
            check_batching(&f, &kernels[i]);
            if (kernels[i].isa == DCP_ISA_SCALAR) continue;
            if (fused == NULL) {
                fused = must(malloc(n_out * sizeof(float)));
                memcpy(fused, f.out, n_out * sizeof(float));
            }
            assert_memory_equal(fused, f.out, n_out * sizeof(float));
        }
        free(fused);
        fixture_free(&f);
    }
}

static struct shape plain(int64_t dk, int64_t dv, int64_t n_keys, int64_t n_tokens, int64_t n_group)
{
    return (struct shape){.dk = dk,
                          .dv = dv,
                          .n_keys = n_keys,
                          .page_tokens = 16,
                          .n_tokens = n_tokens,
                          .n_group = n_group,
                          .key_end = n_keys,
                          .causal = true,
                          .scale = 1.0f / sqrtf((float)dk),
                          .q_size = 3.0f};
}

static void test_dims(void **state)
{
    static const int64_t dims[][2] = {
        {1, 1},   {2, 2},     {3, 5},     {7, 7},     {8, 8},   {15, 17},   {16, 16},
        {17, 15}, {31, 33},   {32, 32},   {33, 31},   {64, 64}, {63, 65},   {80, 80},
        {96, 1},  {128, 128}, {192, 128}, {256, 256}, {1, 129}, {127, 130}, {576, 512}};
    (void)state;
    rng_state = 1;
    double worst = 0.0;
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        struct shape s = plain(dims[i][0], dims[i][1], 131, 5, 2);
        check_shape(&s, &worst);
        s.latent = dims[i][1] <= dims[i][0];
        s.n_tokens = 7;
        s.n_group = 3;
        check_shape(&s, &worst);
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

static void test_key_borders(void **state)
{
    static const int64_t n_keys[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200};
    static const int64_t pages[] = {1, 3, 16, 64, 100};
    (void)state;
    rng_state = 2;
    double worst = 0.0;
    for (size_t i = 0; i < sizeof(n_keys) / sizeof(n_keys[0]); i++) {
        for (size_t j = 0; j < sizeof(pages) / sizeof(pages[0]); j++) {
            struct shape s = plain(24, 20, n_keys[i], pick(1, 9), pick(1, 9));
            s.page_tokens = pages[j];
            check_shape(&s, &worst);
            s.key_begin = pick(0, s.n_keys);
            s.key_end = pick(s.key_begin, s.n_keys);
            s.window = pick(1, 100);
            check_shape(&s, &worst);
        }
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* More rows than a tile, groups wider than one, every register block remainder. */
static void test_rows(void **state)
{
    (void)state;
    rng_state = 3;
    double worst = 0.0;
    for (int64_t group = 1; group <= 9; group++) {
        struct shape s = plain(16, 16, 150, pick(1, 40), group);
        check_shape(&s, &worst);
    }
    struct shape s = plain(16, 32, 300, 150, 1);
    check_shape(&s, &worst);
    s = plain(8, 8, 80, 2, DCP__ATTN_ROWS_MAX + 5);
    check_shape(&s, &worst);
    print_message("largest error: %.3f of the tolerance\n", worst);
}

static void test_random(void **state)
{
    (void)state;
    const uint64_t seed = 20;
    rng_state = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    double worst = 0.0;
    for (int i = 0; i < 60; i++) {
        struct shape s = plain(pick(1, 100), pick(1, 100), pick(1, 400), pick(1, 30), pick(1, 6));
        s.page_tokens = pick(1, 70);
        s.causal = pick(0, 1) == 1;
        s.gaps = pick(0, 2) == 0;
        s.window = pick(0, 1) == 0 ? pick(1, 200) : 0;
        s.latent = s.dv <= s.dk && pick(0, 1) == 1;
        s.softcap = pick(0, 2) == 0 ? 5.0f : 0.0f;
        if (pick(0, 9) == 0) s.scale = -s.scale;
        if (pick(0, 2) == 0) s.key_begin = pick(0, s.n_keys);
        if (pick(0, 2) == 0) s.key_end = pick(s.key_begin, s.n_keys);
        check_shape(&s, &worst);
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

static void test_softcap(void **state)
{
    static const float caps[] = {0.5f, 5.0f, 50.0f, 1e4f};
    static const float sizes[] = {0.01f, 1.0f, 30.0f, 3000.0f};
    (void)state;
    rng_state = 5;
    double worst = 0.0;
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            struct shape s = plain(40, 24, 140, 3, 2);
            s.softcap = caps[i];
            s.q_size = sizes[j];
            check_shape(&s, &worst);
        }
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* Scores of +-1e4: exp would overflow, or all weights vanish, without the running maximum. */
static void test_extreme_scores(void **state)
{
    (void)state;
    rng_state = 6;
    double worst = 0.0;
    struct shape s = plain(32, 32, 400, 9, 2);
    s.q_size = 1.0f;
    s.scale = 1e4f;
    check_shape(&s, &worst);
    s.scale = -1e4f;
    check_shape(&s, &worst);
    s.scale = 0.0f;
    check_shape(&s, &worst);
    s.q_size = 0.0f;
    check_shape(&s, &worst);
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* Scores that climb from block to block, and all far below zero. */
static void test_moving_maximum(void **state)
{
    (void)state;
    rng_state = 7;
    double worst = 0.0;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best) continue;
        for (int falling = 0; falling < 2; falling++) {
            struct shape s = plain(4, 6, 1000, 2, 3);
            s.scale = 1.0f;
            struct fixture f;
            fixture_make(&f, &s, kernels[i].dtype);
            for (int64_t key = 0; key < s.n_keys; key++)
                for (int64_t d = 0; d < s.dk; d++)
                    f.k[key * s.dk + d] =
                        put(element(&f, false, key, d), f.dtype,
                            (float)(falling ? -key : key - s.n_keys) * 0.5f - 300.0f);
            for (int64_t x = 0; x < s.n_tokens * s.n_group * (s.dk + Q_PAD); x++)
                f.q[x] = fabsf(f.q[x]) * 0.3f;
            run(&f, kernels[i].fn);
            check_rows(&f, &kernels[i], &worst);
            check_batching(&f, &kernels[i]);
            fixture_free(&f);
        }
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* Many equal keys: lse = score + log n has a known value. */
static void test_long_sum(void **state)
{
    (void)state;
    rng_state = 8;
    const int64_t n_keys = 131072;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best || kernels[i].dtype != DCP_BF16) continue;
        struct shape s = plain(4, 2, n_keys, 1, 1);
        s.page_tokens = 64;
        struct fixture f;
        fixture_make(&f, &s, kernels[i].dtype);
        double worst = 0.0;
        run(&f, kernels[i].fn);
        check_rows(&f, &kernels[i], &worst);
        struct ref_attn_row ref = {.dk = s.dk,
                                   .dv = s.dv,
                                   .hi = n_keys,
                                   .scale = (double)s.scale,
                                   .q = f.q,
                                   .k = f.k,
                                   .v = f.v,
                                   .k_stride = s.dk,
                                   .v_stride = s.dv,
                                   .out = (double[2]){0.0}};
        ref_attn(&ref);
        print_message("%s, %lld keys: lse off by %.2e\n", kernels[i].name, (long long)n_keys,
                      (double)f.lse[0] - ref.lse);
        assert_true(fabs((double)f.lse[0] - ref.lse) <= 1e-6 * fabs(ref.lse));
        fixture_free(&f);
    }
}

/* A key that is NaN or infinite touches the rows that see it, and no other. */
static void test_poisoned_key(void **state)
{
    (void)state;
    rng_state = 9;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best) continue;
        for (int which = 0; which < 4; which++) {
            struct shape s = plain(20, 20, 100, 10, 2);
            struct fixture f;
            fixture_make(&f, &s, kernels[i].dtype);
            const int64_t key = 95; /* tokens 5..9 see it */
            put(element(&f, which % 2 == 1, key, 3), f.dtype, which < 2 ? NAN : INFINITY);
            for (int64_t t = 5; t < 10; t++) f.lo[t] = f.hi[t] = 0;
            run(&f, kernels[i].fn);
            double worst = 0.0;
            check_rows(&f, &kernels[i], &worst);
            for (int64_t t = 5; t < 10; t++) {
                f.lo[t] = 0;
                f.hi[t] = 91 + t;
            }
            float before[5];
            for (int64_t t = 0; t < 5; t++) before[t] = f.out[t * 2 * (s.dv + OUT_PAD) + 3];
            run(&f, kernels[i].fn);
            for (int64_t t = 0; t < 5; t++)
                assert_memory_equal(&before[t], &f.out[t * 2 * (s.dv + OUT_PAD) + 3], 4);
            const float hit = f.out[9 * 2 * (s.dv + OUT_PAD) + 3];
            assert_true(which == 1 || which == 3 ? !isfinite(hit) : which != 0 || isnan(hit));
            fixture_free(&f);
        }
    }
}

/* Scores of -inf weigh nothing; a row that has no other gives 0 and -inf. */
static void test_minus_infinity(void **state)
{
    (void)state;
    rng_state = 10;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best) continue;
        struct shape s = plain(1, 3, 70, 1, 1);
        struct fixture f;
        fixture_make(&f, &s, kernels[i].dtype);
        f.q[0] = 1.0f;
        for (int64_t key = 0; key < 69; key++) put(element(&f, false, key, 0), f.dtype, -INFINITY);
        put(element(&f, false, 69, 0), f.dtype, 0.5f);
        run(&f, kernels[i].fn);
        assert_true(fabsf(f.lse[0] - 0.5f) < 1e-6f);
        assert_true(fabsf(f.out[1] - f.v[69 * 3 + 1]) <= 1e-6f);
        f.hi[0] = 69;
        run(&f, kernels[i].fn);
        assert_true(isinf(f.lse[0]) && f.lse[0] < 0.0f);
        for (int d = 0; d < 3; d++) assert_true(f.out[d] == 0.0f);
        fixture_free(&f);
    }
}

/* The exponential alone: two keys, scores 0 and x, values 0 and 1, so out = p / (1 + p). What is
 * left besides the stated 2.5e-7 is the rounding of x log2 e. */
static void test_exp(void **state)
{
    (void)state;
    rng_state = 11;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best || kernels[i].dtype != DCP_F32) continue;
        struct shape s = plain(1, 1, 2, 1, 1);
        s.scale = 1.0f;
        struct fixture f;
        fixture_make(&f, &s, DCP_F32);
        double worst = 0.0;
        f.q[0] = 1.0f;
        put(element(&f, false, 0, 0), DCP_F32, 0.0f);
        put(element(&f, true, 0, 0), DCP_F32, 0.0f);
        put(element(&f, true, 1, 0), DCP_F32, 1.0f);
        for (int j = 0; j < 20000; j++) {
            const float x = j < 10000 ? -87.0f * (float)j / 10000.0f : -0.5f + 0.5f * uniform();
            put(element(&f, false, 1, 0), DCP_F32, x);
            run(&f, kernels[i].fn);
            const double p = exp((double)x);
            const double want = p / (1.0 + p);
            const double error = fabs((double)f.out[0] / want - 1.0);
            const double tol = 2.5e-7 + 2.0 * 0x1p-24 * (1.0 + fabs((double)x));
            worst = fmax(worst, error / tol);
        }
        print_message("%s: exp is off by %.2f of what is stated\n", kernels[i].name, worst);
        assert_true(worst <= 1.0);
        fixture_free(&f);
    }
}

/* The same densely, without the rounding of x log2 e: a scale of ln 2 makes scores base-2 units,
 * and values of a unit matrix show each weight: out[i] / out[0] = 2^x[i]. A million steps of 2^-20
 * over (-1, 0], then as many over the whole range. Two divisions are rounded besides. */
static void test_exp_dense(void **state)
{
    (void)state;
    rng_state = 13;
    enum { N = DCP__ATTN_KEY_BLOCK };
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best || kernels[i].dtype != DCP_F32) continue;
        if (kernels[i].isa == DCP_ISA_SCALAR) continue; /* exp2f */
        struct shape s = plain(1, N, N, 1, 1);
        s.scale = 0.69314718f;
        assert_true((float)((double)s.scale * 1.4426950408889634) == 1.0f);
        struct fixture f;
        fixture_make(&f, &s, DCP_F32);
        f.q[0] = 1.0f;
        for (int64_t key = 0; key < N; key++)
            for (int64_t d = 0; d < N; d++)
                put(element(&f, true, key, d), DCP_F32, key == d ? 1.0f : 0.0f);
        put(element(&f, false, 0, 0), DCP_F32, 0.0f);
        double worst = 0.0;
        for (int64_t step = 0; step < 1 << 21; step += N - 1) {
            float x[N] = {0.0f};
            for (int64_t key = 1; key < N; key++) {
                const int64_t at = step + key - 1;
                x[key] = at < 1 << 20 ? (float)-at * 0x1p-20f : (float)((1 << 20) - at) * 126e-6f;
                if (x[key] < -126.0f) x[key] = -126.0f;
                put(element(&f, false, key, 0), DCP_F32, x[key]);
            }
            run(&f, kernels[i].fn);
            for (int64_t key = 1; key < N; key++) {
                const double got = (double)f.out[key] / (double)f.out[0];
                /* a quotient below 2^-126 has lost bits to the division */
                if (f.out[key] < 0x1p-126f) continue;
                worst = fmax(worst, fabs(got / exp2((double)x[key]) - 1.0));
            }
        }
        print_message("%s: 2^x is off by at most %.3g\n", kernels[i].name, worst);
        assert_true(worst <= 2.5e-7 + 2.0 * 0x1p-24);
        fixture_free(&f);
    }
}

/* tanh alone: one key, lse = cap * tanh(x / cap). */
static void test_tanh(void **state)
{
    (void)state;
    rng_state = 12;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best || kernels[i].dtype != DCP_F32) continue;
        struct shape s = plain(1, 1, 1, 1, 1);
        s.scale = 1.0f;
        s.softcap = 1.0f;
        struct fixture f;
        fixture_make(&f, &s, DCP_F32);
        double worst = 0.0;
        f.q[0] = 1.0f;
        for (int j = 0; j < 20000; j++) {
            const float x = j < 10000 ? 12.0f * (float)(j - 5000) / 5000.0f : uniform();
            put(element(&f, false, 0, 0), DCP_F32, x);
            run(&f, kernels[i].fn);
            /* the lse of one key is M ln 2 + log p: exp comes in, with its 2.5e-7 */
            worst = fmax(worst, fabs((double)f.lse[0] - tanh((double)x)) / 7.5e-7);
        }
        print_message("%s: tanh is off by %.2f of what is stated\n", kernels[i].name, worst);
        assert_true(worst <= 1.0);
        fixture_free(&f);
    }
}

static void test_skips_are_named(void **state)
{
    (void)state;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++)
        if (kernels[i].isa > best)
            print_message("skipped %s: this CPU has no %s\n", kernels[i].name,
                          dcp__isa_name(kernels[i].isa));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_skips_are_named),
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_exp_dense),
        cmocka_unit_test(test_tanh),
        cmocka_unit_test(test_dims),
        cmocka_unit_test(test_key_borders),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_softcap),
        cmocka_unit_test(test_extreme_scores),
        cmocka_unit_test(test_moving_maximum),
        cmocka_unit_test(test_long_sum),
        cmocka_unit_test(test_poisoned_key),
        cmocka_unit_test(test_minus_infinity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
