/* SPDX-License-Identifier: Apache-2.0 */
/* Every attention kernel for int8 and fp8 against double precision over the rounded values: shapes,
 * pages, strides, every way that scales may lie; and that a row's bits depend on the row alone. */
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
#define ATTN(level, dtype, fn)
#define ATTN_QUANT(level, dtype, fn) {#fn, DCP_ISA_##level, dtype, fn},
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
    return dcp__cpu_best_isa(&cpu);
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

/* How scales lie. */
enum lay { IN_PAGE, APART, PER_HEAD, PER_TENSOR, NONE, N_LAYS };

struct shape {
    int64_t dk, dv, n_keys, page_tokens, n_tokens, n_group;
    int64_t key_begin, key_end, window; /* 0 = none */
    bool latent, causal, gaps;
    float softcap, q_size;
    enum lay lay;
    dcp_dtype scale_type;
};

/* K, its scales, V, its scales in one memory, or each in their own; NaN wherever no key lies. */
struct fixture {
    struct shape shape;
    dcp_dtype dtype;
    dcp_kv_view view;
    dcp_kv_scales scales;
    int32_t *pages;
    uint8_t *k_codes, *v_codes;
    char *k_scales, *v_scales;
    float *k, *v; /* [n_keys][dk], [n_keys][dv]: what a number times its scale is */
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

static float value_of(dcp_dtype t, uint8_t code)
{
    return t == DCP_I8 ? (float)(int8_t)code : dcp__e4m3_to_f32(code);
}

static void put_scale(char *at, dcp_dtype t, float x)
{
    if (t == DCP_F16 || t == DCP_BF16) {
        const uint16_t h = t == DCP_F16 ? dcp__f32_to_f16(x) : dcp__f32_to_bf16(x);
        memcpy(at, &h, sizeof(h));
    } else {
        memcpy(at, &x, sizeof(x));
    }
}
static float get_scale(const char *at, dcp_dtype t)
{
    uint16_t h;
    float x;
    memcpy(&h, at, sizeof(h));
    if (t == DCP_F16) return dcp__f16_to_f32(h);
    if (t == DCP_BF16) return dcp__bf16_to_f32(h);
    memcpy(&x, at, sizeof(x));
    return x;
}

static uint8_t *code_at(const struct fixture *f, bool is_v, int64_t key, int64_t d)
{
    const dcp_kv_view *const v = &f->view;
    const int64_t page = f->pages[key / v->page_tokens], slot = key % v->page_tokens;
    return (is_v && !f->shape.latent ? f->v_codes : f->k_codes) +
           page * (is_v ? v->v_page_stride_bytes : v->k_page_stride_bytes) +
           slot * (is_v ? v->v_slot_stride : v->k_slot_stride) +
           KV_HEAD * (is_v ? v->v_head_stride : v->k_head_stride) + d;
}
static char *scale_at(const struct fixture *f, bool is_v, int64_t key)
{
    const dcp_kv_scales *const s = &f->scales;
    const int64_t bytes = s->dtype == DCP_F16 || s->dtype == DCP_BF16 ? 2 : 4;
    const int64_t page = f->pages[key / f->view.page_tokens], slot = key % f->view.page_tokens;
    return (is_v && !f->shape.latent ? f->v_scales : f->k_scales) +
           page * (is_v ? s->v_page_stride_bytes : s->k_page_stride_bytes) +
           (slot * (is_v ? s->v_slot_stride : s->k_slot_stride) +
            KV_HEAD * (is_v ? s->v_head_stride : s->k_head_stride)) *
               bytes;
}

/* Codes of n_physical pages of rows of dim, slots head by head or token by token; with IN_PAGE room
 * for scales behind them. Sets strides; everything is NaN. */
static uint8_t *make_part(const struct shape *s, dcp_dtype dtype, int64_t dim, int64_t n_physical,
                          bool heads_outside, int64_t *page_bytes, int64_t *slot, int64_t *head,
                          int64_t *scales_at)
{
    const int64_t row = dim + pick(0, 3), n_rows = N_HEADS * s->page_tokens;
    *slot = heads_outside ? row : row * N_HEADS;
    *head = heads_outside ? row * s->page_tokens : row;
    *scales_at = (row * n_rows + pick(0, 7) + 3) / 4 * 4;
    *page_bytes = (*scales_at + (n_rows + pick(0, 3)) * 4 + 3) / 4 * 4;
    uint8_t *const codes =
        must(aligned_alloc(64, (size_t)(n_physical * *page_bytes + 63) / 64 * 64));
    for (int64_t i = 0; i < n_physical * *page_bytes; i++) codes[i] = dtype == DCP_I8 ? 0x80 : 0x7f;
    return codes;
}

static void make_scales(struct fixture *f, int64_t n_physical, int64_t k_at, int64_t v_at)
{
    const struct shape *const s = &f->shape;
    dcp_kv_scales *const sc = &f->scales;
    const int64_t bytes = s->scale_type == DCP_F16 || s->scale_type == DCP_BF16 ? 2 : 4;
    const bool varies = s->lay == IN_PAGE || s->lay == APART;
    sc->dtype = s->scale_type;
    sc->k_slot_stride = varies ? (s->lay == APART ? N_HEADS + 1 : 1) : 0;
    sc->k_head_stride = s->lay == PER_TENSOR ? 0 : s->lay == IN_PAGE ? s->page_tokens : 1;
    sc->v_slot_stride = sc->k_slot_stride;
    sc->v_head_stride = sc->k_head_stride;
    if (s->lay == IN_PAGE) {
        sc->k_page_stride_bytes = f->view.k_page_stride_bytes;
        sc->v_page_stride_bytes = f->view.v_page_stride_bytes;
        f->k_scales = (char *)f->k_codes + k_at;
        f->v_scales = (char *)f->v_codes + v_at;
    } else {
        const int64_t page = (N_HEADS + 1) * s->page_tokens * bytes;
        sc->k_page_stride_bytes = sc->v_page_stride_bytes = varies ? page : 0;
        const size_t n_bytes = (size_t)((varies ? n_physical : 1) * page);
        f->k_scales = must(malloc(n_bytes));
        f->v_scales = must(malloc(n_bytes));
        for (size_t i = 0; i < n_bytes; i += (size_t)bytes) {
            put_scale(f->k_scales + i, s->scale_type, NAN);
            put_scale(f->v_scales + i, s->scale_type, NAN);
        }
    }
    sc->k_base = s->lay == NONE ? NULL : f->k_scales;
    sc->v_base = s->latent ? f->k_scales : f->v_scales;
    if (s->latent) sc->v_page_stride_bytes = sc->k_page_stride_bytes;
}

static void make_view(struct fixture *f)
{
    const struct shape *const s = &f->shape;
    const int64_t n_pages = (s->n_keys + s->page_tokens - 1) / s->page_tokens;
    const int64_t n_physical = n_pages + 3;
    const bool heads_outside = pick(0, 1) == 1;
    dcp_kv_view *const v = &f->view;
    int64_t k_at, v_at;
    f->k_codes = make_part(s, f->dtype, s->dk, n_physical, heads_outside, &v->k_page_stride_bytes,
                           &v->k_slot_stride, &v->k_head_stride, &k_at);
    f->v_codes = make_part(s, f->dtype, s->dv, n_physical, heads_outside, &v->v_page_stride_bytes,
                           &v->v_slot_stride, &v->v_head_stride, &v_at);
    v->page_tokens = s->page_tokens;
    v->n_keys = s->n_keys;
    v->dtype = f->dtype;
    v->k_base = f->k_codes;
    v->v_base = f->v_codes;
    if (s->latent) {
        v->v_base = f->k_codes;
        v->v_page_stride_bytes = v->k_page_stride_bytes;
        v->v_slot_stride = v->k_slot_stride;
        v->v_head_stride = v->k_head_stride;
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
    v->pages = f->pages;
    make_scales(f, n_physical, k_at, v_at);
}

/* All codes occur (fp8's NaN apart), denormal ones too. */
static uint8_t draw_code(dcp_dtype t)
{
    if (t == DCP_I8) return (uint8_t)(int8_t)pick(-127, 127);
    const uint8_t code = (uint8_t)ref_random(&rng_state);
    return (code & 0x7f) == 0x7f ? code & 0x83 : code;
}

static void make_keys(struct fixture *f)
{
    const struct shape *const s = &f->shape;
    const float unit = f->dtype == DCP_I8 ? 1.0f / 127.0f : 1.0f / 448.0f;
    f->k = must(malloc((size_t)(s->n_keys * s->dk) * sizeof(float)));
    f->v = must(malloc((size_t)(s->n_keys * s->dv) * sizeof(float)));
    for (int64_t key = 0; key < s->n_keys; key++) {
        const float k_wish = s->lay == NONE ? 1.0f : unit * (1.0f + 0.9f * uniform());
        const float v_wish = s->lay == NONE ? 1.0f : unit * (1.0f + 0.9f * uniform());
        if (s->lay == IN_PAGE || s->lay == APART || key == 0) {
            put_scale(scale_at(f, false, key), s->scale_type, k_wish);
            if (!s->latent) put_scale(scale_at(f, true, key), s->scale_type, v_wish);
        }
        const float k_scale =
            s->lay == NONE ? 1.0f : get_scale(scale_at(f, false, key), s->scale_type);
        const float v_scale =
            s->lay == NONE ? 1.0f : get_scale(scale_at(f, true, key), s->scale_type);
        for (int64_t d = 0; d < s->dk; d++) {
            uint8_t *const at = code_at(f, false, key, d);
            *at = draw_code(f->dtype);
            if (s->lay == NONE) *at &= 0xbf; /* below 2 */
            f->k[key * s->dk + d] = k_scale * value_of(f->dtype, *at);
        }
        for (int64_t d = 0; d < s->dv; d++) {
            uint8_t *const at = code_at(f, true, key, d);
            if (!s->latent) *at = draw_code(f->dtype);
            f->v[key * s->dv + d] = v_scale * value_of(f->dtype, *at);
        }
    }
}

static void fixture_make(struct fixture *f, const struct shape *shape, dcp_dtype dtype)
{
    memset(f, 0, sizeof(*f));
    f->shape = *shape;
    f->dtype = dtype;
    if (dtype == DCP_I8 && shape->lay == NONE) f->shape.lay = PER_TENSOR;
    const struct shape *const s = &f->shape;
    make_view(f);
    make_keys(f);
    const int64_t q_head = s->dk + Q_PAD, out_head = s->dv + OUT_PAD;
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
        .scales = s->lay == NONE && pick(0, 1) == 0 ? NULL : &f->scales,
        .kv_head = KV_HEAD,
        .key_begin = s->key_begin,
        .key_end = s->key_end,
        .n_tokens = s->n_tokens,
        .n_group = s->n_group,
        .dk = s->dk,
        .dv = s->dv,
        .scale = 1.0f / sqrtf((float)s->dk),
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
    if (f->shape.lay != IN_PAGE) {
        free(f->k_scales);
        free(f->v_scales);
    }
    free(f->k_codes);
    free(f->v_codes);
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
                "latent %d, causal %d, window %lld, gaps %d, softcap %g, scales %d of type %d\n",
                kernel->name, (long long)row, (long long)s->n_tokens, (long long)s->n_group,
                (long long)s->dk, (long long)s->dv, (long long)s->n_keys, (long long)s->key_begin,
                (long long)s->key_end, (long long)s->page_tokens, s->latent, s->causal,
                (long long)s->window, s->gaps, (double)s->softcap, (int)s->lay, (int)s->scale_type);
}

static bool is_close(double got, double want, double tol)
{
    return got == want || fabs(got - want) <= tol;
}

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
            .scale = (double)f->job.scale,
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
    memcpy(whole, f->out, n_out * sizeof(float));
    for (int i = 0; i < 3; i++) {
        const int64_t t0 = pick(0, s->n_tokens - 1), j0 = pick(0, s->n_group - 1);
        struct dcp__attn_job job = f->job;
        job.call_rows = s->n_tokens * s->n_group;
        job.n_tokens = i == 0 ? 1 : pick(1, s->n_tokens - t0);
        job.n_group = i <= 1 ? 1 : pick(1, s->n_group - j0);
        job.lo += t0;
        job.hi += t0;
        job.q += t0 * job.q_token_stride + j0 * job.q_head_stride;
        job.out += t0 * job.out_token_stride + j0 * job.out_head_stride;
        job.lse += t0 * job.lse_token_stride + j0 * job.lse_head_stride;
        for (size_t x = 0; x < n_out; x++) f->out[x] = CANARY;
        kernel->fn(&job);
        for (int64_t t = 0; t < job.n_tokens; t++) {
            for (int64_t j = 0; j < job.n_group; j++) {
                const int64_t row = (t0 + t) * s->n_group + j0 + j;
                if (memcmp(f->out + row * out_head, whole + row * out_head,
                           (size_t)s->dv * sizeof(float)) == 0)
                    continue;
                complain(f, kernel, row);
                fail_msg("other bits in a job of %lld x %lld", (long long)job.n_tokens,
                         (long long)job.n_group);
            }
        }
    }
    memcpy(f->out, whole, n_out * sizeof(float));
    free(whole);
}

/* One shape: every kernel and type; those with fused multiply-adds share bits. */
static void check_shape(const struct shape *shape, double *worst)
{
    const dcp_isa best = best_isa();
    for (int dtype = DCP_I8; dtype <= DCP_FP8_E4M3; dtype++) {
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
                          .q_size = 3.0f,
                          .scale_type = DCP_F32};
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
        s.lay = (enum lay)(i % N_LAYS);
        check_shape(&s, &worst);
        s.latent = dims[i][1] <= dims[i][0];
        s.lay = IN_PAGE;
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
            s.lay = (enum lay)pick(0, N_LAYS - 1);
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
        struct shape s = plain(40, 70, 150, pick(1, 40), group);
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
    static const dcp_dtype types[] = {DCP_F32, DCP_F16, DCP_BF16, DCP_DTYPE_DEFAULT};
    for (int i = 0; i < 80; i++) {
        struct shape s = plain(pick(1, 100), pick(1, 100), pick(1, 400), pick(1, 30), pick(1, 6));
        s.page_tokens = pick(1, 70);
        s.causal = pick(0, 1) == 1;
        s.gaps = pick(0, 2) == 0;
        s.window = pick(0, 1) == 0 ? pick(1, 200) : 0;
        s.latent = s.dv <= s.dk && pick(0, 1) == 1;
        s.softcap = pick(0, 2) == 0 ? 5.0f : 0.0f;
        s.lay = (enum lay)pick(0, N_LAYS - 1);
        s.scale_type = types[pick(0, 3)];
        if (pick(0, 2) == 0) s.key_begin = pick(0, s.n_keys);
        if (pick(0, 2) == 0) s.key_end = pick(s.key_begin, s.n_keys);
        check_shape(&s, &worst);
    }
    print_message("largest error: %.3f of the tolerance\n", worst);
}

/* A scale that is NaN, or fp8's own NaN in one element, touches the rows that see the key, and no
 * other; in V that element alone. Few rows and many. */
static void test_poisoned_key(void **state)
{
    (void)state;
    rng_state = 9;
    const dcp_isa best = best_isa();
    for (int i = 0; i < N_KERNELS; i++) {
        if (kernels[i].isa > best) continue;
        for (int which = 0; which < 8; which++) {
            const bool is_v = which % 2 == 1, is_code = which / 2 % 2 == 1;
            const int64_t n_tokens = 10, group = which < 4 ? 1 : 3, key = 95;
            if (is_code && kernels[i].dtype == DCP_I8) continue;
            struct shape s = plain(70, 70, 100, n_tokens, group);
            struct fixture f;
            fixture_make(&f, &s, kernels[i].dtype);
            if (is_code)
                *code_at(&f, is_v, key, 3) = 0xff;
            else
                put_scale(scale_at(&f, is_v, key), DCP_F32, NAN);
            run(&f, kernels[i].fn);
            for (int64_t row = 0; row < n_tokens * group; row++) {
                const int64_t t = row / group;
                const float *const out = f.out + row * (s.dv + OUT_PAD);
                const bool sees = f.hi[t] > key;
                for (int64_t d = 0; d < s.dv; d++) {
                    const bool hit = sees && (!is_v || !is_code || d == 3);
                    assert_true(isnan(out[d]) == hit);
                }
                assert_true(isnan(f.lse[2 * row]) == (sees && !is_v));
            }
            fixture_free(&f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dims),         cmocka_unit_test(test_key_borders),
        cmocka_unit_test(test_rows),         cmocka_unit_test(test_random),
        cmocka_unit_test(test_poisoned_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
