/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of few rows, AVX2 and AVX-512: every number of rows, every type, key dims around every
 * vector and round of sums, against double precision; the same bits on both; nothing read behind
 * the last key and value, nor seen of those before the first. And which of its two orders of sums a
 * row gets: by the rows of the call, never by those of the job. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_attn.h"
#include "ref/ref_merge.h"

enum { FEW = 12, MANY = 100, PAGE_TOKENS = 16, HIDDEN = 5 /* keys before the first visible one */ };

static uint64_t rng_state;
static int64_t pick(int64_t lo, int64_t hi) /* both included */
{
    return lo + (int64_t)(ref_random(&rng_state) % (uint64_t)(hi - lo + 1));
}
static float uniform(void) /* [-1, 1) */
{
    return (float)((double)(ref_random(&rng_state) >> 11) * 0x1p-52 - 1.0);
}
static void *must(void *p)
{
    assert_non_null(p);
    return p;
}

/* Rows of keys or of values: the last ends where memory does. */
struct part {
    char *map;
    size_t map_bytes;
    char *base;
    int64_t dim, stride; /* elements */
    float *scale;        /* [n_keys] */
    float *plain;        /* [n_keys][dim]: what the elements mean */
};

struct fixture {
    int64_t dk, dv, n_keys, n_tokens, n_group;
    dcp_dtype dtype;
    struct part k, v;
    int32_t *pages;
    int64_t *lo, *hi;
    float *q, *out, *lse;
    void *scratch;
    dcp_kv_view view;
    dcp_kv_scales scales;
    struct dcp__attn_job job;
};

static bool has_scales(dcp_dtype dtype)
{
    return dtype == DCP_I8 || dtype == DCP_FP8_E4M3;
}
static int64_t bytes_of(dcp_dtype dtype)
{
    return (int64_t)dcp_dtype_bytes(dtype);
}

/* A random element, or one that spoils what it touches where the type has such. */
static float put(char *at, dcp_dtype dtype, bool is_bad)
{
    const float x = is_bad ? NAN : uniform();
    const uint8_t code = (uint8_t)ref_random(&rng_state);
    uint16_t bits;
    switch (dtype) {
    case DCP_I8:
        *at = (char)(is_bad ? 0x80 : code);
        return (float)(int8_t)*at;
    case DCP_FP8_E4M3:
        *at = (char)(is_bad ? 0x7f : code & 0xbf); /* below 2 */
        return dcp__e4m3_to_f32((uint8_t)*at);
    case DCP_F16:
    case DCP_BF16:
        bits = dtype == DCP_F16 ? dcp__f32_to_f16(x) : dcp__f32_to_bf16(x);
        memcpy(at, &bits, sizeof(bits));
        return dtype == DCP_F16 ? dcp__f16_to_f32(bits) : dcp__bf16_to_f32(bits);
    default:
        memcpy(at, &x, sizeof(x));
        return x;
    }
}

static void part_make(struct part *p, const struct fixture *f, int64_t dim)
{
    const int64_t bytes = bytes_of(f->dtype);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    p->dim = dim;
    p->stride = dim + pick(1, 3);
    const size_t used = (size_t)(((f->n_keys - 1) * p->stride + dim) * bytes);
    const size_t room = (used + page - 1) / page * page;
    p->map_bytes = room + page;
    p->map = mmap(NULL, p->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p->map != MAP_FAILED);
    assert_int_equal(mprotect(p->map + room, page, PROT_NONE), 0);
    p->base = p->map + room - used;
    p->scale = must(malloc((size_t)f->n_keys * sizeof(*p->scale)));
    p->plain = must(malloc((size_t)(f->n_keys * dim) * sizeof(*p->plain)));
    for (int64_t key = 0; key < f->n_keys; key++) {
        const bool is_hidden = key < HIDDEN;
        const float unit = f->dtype == DCP_I8 ? 0x1p-7f : 1.0f;
        p->scale[key] = is_hidden ? NAN : unit * (1.0f + 0.5f * uniform());
        char *const row = p->base + key * p->stride * bytes;
        const float scale = has_scales(f->dtype) ? p->scale[key] : 1.0f;
        for (int64_t d = 0; d < dim; d++)
            p->plain[key * dim + d] = scale * put(row + d * bytes, f->dtype, is_hidden);
        for (int64_t d = dim; key + 1 < f->n_keys && d < p->stride; d++)
            put(row + d * bytes, f->dtype, true);
    }
}
static void part_free(struct part *p)
{
    munmap(p->map, p->map_bytes);
    free(p->scale);
    free(p->plain);
}

static void fixture_make(struct fixture *f, int64_t dk, int64_t dv, int64_t n_tokens,
                         int64_t n_group, dcp_dtype dtype)
{
    *f = (struct fixture){
        .dk = dk, .dv = dv, .n_tokens = n_tokens, .n_group = n_group, .dtype = dtype};
    f->n_keys = pick(HIDDEN + 1, 150);
    part_make(&f->k, f, dk);
    part_make(&f->v, f, dv);
    const int64_t n_pages = (f->n_keys + PAGE_TOKENS - 1) / PAGE_TOKENS;
    f->pages = must(malloc((size_t)n_pages * sizeof(*f->pages)));
    for (int64_t i = 0; i < n_pages; i++) f->pages[i] = (int32_t)i;
    f->lo = must(malloc((size_t)n_tokens * sizeof(*f->lo)));
    f->hi = must(malloc((size_t)n_tokens * sizeof(*f->hi)));
    for (int64_t t = 0; t < n_tokens; t++) { /* the last sees all; one may see nothing */
        const bool is_last = t == n_tokens - 1;
        f->lo[t] = is_last || pick(0, 1) ? HIDDEN : pick(HIDDEN, f->n_keys);
        f->hi[t] = is_last || pick(0, 1) ? f->n_keys : pick(HIDDEN, f->n_keys);
    }
    const int64_t n_rows = n_tokens * n_group;
    f->q = must(malloc((size_t)(n_rows * dk) * sizeof(float)));
    for (int64_t i = 0; i < n_rows * dk; i++) f->q[i] = 3.0f * uniform();
    f->out = must(malloc((size_t)(n_rows * dv) * sizeof(float)));
    f->lse = must(malloc((size_t)n_rows * sizeof(float)));
    const size_t n_bytes = dcp__attn_scratch_bytes(n_rows, dk, dv);
    f->scratch = must(aligned_alloc(64, (n_bytes + 63) / 64 * 64));
    memset(f->scratch, 0xff, n_bytes); /* NaN */
    const int64_t k_page = PAGE_TOKENS * f->k.stride * bytes_of(dtype);
    const int64_t v_page = PAGE_TOKENS * f->v.stride * bytes_of(dtype);
    f->view = (dcp_kv_view){.k_base = f->k.base,
                            .v_base = f->v.base,
                            .pages = f->pages,
                            .page_tokens = PAGE_TOKENS,
                            .k_page_stride_bytes = k_page,
                            .v_page_stride_bytes = v_page,
                            .k_slot_stride = f->k.stride,
                            .v_slot_stride = f->v.stride,
                            .n_keys = f->n_keys,
                            .dtype = dtype};
    f->scales = (dcp_kv_scales){.k_base = f->k.scale,
                                .v_base = f->v.scale,
                                .k_page_stride_bytes = PAGE_TOKENS * (int64_t)sizeof(float),
                                .v_page_stride_bytes = PAGE_TOKENS * (int64_t)sizeof(float),
                                .k_slot_stride = 1,
                                .v_slot_stride = 1,
                                .dtype = DCP_F32};
    f->job = (struct dcp__attn_job){.view = &f->view,
                                    .key_end = f->n_keys,
                                    .n_tokens = n_tokens,
                                    .n_group = n_group,
                                    .dk = dk,
                                    .dv = dv,
                                    .scale = 1.0f / sqrtf((float)dk),
                                    .lo = f->lo,
                                    .hi = f->hi,
                                    .q = f->q,
                                    .q_token_stride = n_group * dk,
                                    .q_head_stride = dk,
                                    .out = f->out,
                                    .out_token_stride = n_group * dv,
                                    .out_head_stride = dv,
                                    .lse = f->lse,
                                    .lse_token_stride = n_group,
                                    .lse_head_stride = 1,
                                    .scratch = f->scratch,
                                    .scales = has_scales(dtype) ? &f->scales : NULL};
}
static void fixture_free(struct fixture *f)
{
    part_free(&f->k);
    part_free(&f->v);
    free(f->pages);
    free(f->lo);
    free(f->hi);
    free(f->q);
    free(f->out);
    free(f->lse);
    free(f->scratch);
}

/* Attention by the vectors of isa; NULL where this CPU or build has none. */
static dcp__attn_fn *kernel_of(dcp_isa isa, dcp_dtype dtype)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    if (isa > dcp__cpu_best_isa(&cpu)) return NULL;
    struct dcp__kernels kernels;
    dcp__kernels_select(isa, &kernels);
    return strstr(kernels.attn_name[dtype], dcp__isa_name(isa)) ? kernels.attn[dtype] : NULL;
}

static void check_oracle(const struct fixture *f, dcp_isa isa, double *worst)
{
    double *const want = must(malloc((size_t)f->dv * sizeof(*want)));
    for (int64_t r = 0; r < f->n_tokens * f->n_group; r++) {
        struct ref_attn_row ref = {.dk = f->dk,
                                   .dv = f->dv,
                                   .lo = f->lo[r / f->n_group],
                                   .hi = f->hi[r / f->n_group],
                                   .scale = (double)f->job.scale,
                                   .q = f->q + r * f->dk,
                                   .k = f->k.plain,
                                   .v = f->v.plain,
                                   .k_stride = f->dk,
                                   .v_stride = f->dv,
                                   .out = want};
        ref_attn(&ref);
        const double tol = ref_attn_tol_out(&ref);
        const double lse = (double)f->lse[r];
        bool is_good = lse == ref.lse || fabs(lse - ref.lse) <= ref_attn_tol_lse(&ref);
        for (int64_t d = 0; d < f->dv; d++) {
            const double off = fabs((double)f->out[r * f->dv + d] - want[d]);
            is_good = is_good && (off == 0.0 || off <= tol);
            if (tol > 0.0) *worst = fmax(*worst, off / tol);
        }
        if (!is_good)
            fail_msg("%s, dtype %d: row %lld of %lld x %lld, dk %lld, dv %lld, keys [%lld, %lld) "
                     "of %lld: lse %.9g, want %.9g; out[0] %.9g, want %.9g, tol %.3g",
                     dcp__isa_name(isa), (int)f->dtype, (long long)r, (long long)f->n_tokens,
                     (long long)f->n_group, (long long)f->dk, (long long)f->dv, (long long)ref.lo,
                     (long long)ref.hi, (long long)f->n_keys, lse, ref.lse,
                     (double)f->out[r * f->dv], want[0], tol);
    }
    free(want);
}

static void check_case(int64_t dk, int64_t dv, int64_t n_tokens, int64_t n_group, dcp_dtype dtype,
                       double *worst)
{
    struct fixture f;
    fixture_make(&f, dk, dv, n_tokens, n_group, dtype);
    const size_t out_bytes = (size_t)(n_tokens * n_group * dv) * sizeof(float);
    const size_t lse_bytes = (size_t)(n_tokens * n_group) * sizeof(float);
    float *out = NULL, *lse = NULL;
    for (int isa = DCP_ISA_AVX2; isa <= DCP_ISA_AVX512; isa++) {
        dcp__attn_fn *const fn = kernel_of((dcp_isa)isa, dtype);
        if (fn == NULL) continue;
        memset(f.out, 0xff, out_bytes);
        memset(f.lse, 0xff, lse_bytes);
        fn(&f.job);
        check_oracle(&f, (dcp_isa)isa, worst);
        if (out == NULL) {
            out = memcpy(must(malloc(out_bytes)), f.out, out_bytes);
            lse = memcpy(must(malloc(lse_bytes)), f.lse, lse_bytes);
        }
        if (memcmp(out, f.out, out_bytes) != 0 || memcmp(lse, f.lse, lse_bytes) != 0)
            fail_msg("dtype %d, %lld x %lld rows, dk %lld, dv %lld: other bits on %s", (int)dtype,
                     (long long)n_tokens, (long long)n_group, (long long)dk, (long long)dv,
                     dcp__isa_name((dcp_isa)isa));
    }
    free(out);
    free(lse);
    fixture_free(&f);
}

static void test_rows_and_dims(void **state)
{
    static const int64_t dims[] = {1,  15, 16, 17, 31,  32,  33,  48,  63,
                                   64, 65, 80, 96, 127, 128, 192, 256, 576};
    enum { N_DIMS = (int)(sizeof(dims) / sizeof(dims[0])) };
    (void)state;
    rng_state = 31;
    double worst = 0.0;
    for (int dtype = DCP_F32; dtype <= DCP_FP8_E4M3; dtype++) {
        for (int i = 0; i < N_DIMS; i++) {
            for (int64_t n = 1; n <= FEW; n++) {
                /* One token's heads, or tokens that see keys of their own; 7 shares no factor with
                 * the number of dims. */
                const bool is_token = (n + i) % 2 == 0;
                check_case(dims[i], dims[(7 * i + n) % N_DIMS], is_token ? 1 : n, is_token ? n : 1,
                           (dcp_dtype)dtype, &worst);
            }
        }
    }
    print_message("seed 31; largest error: %.3f of the tolerance\n", worst);
}

/* Row r of the job alone, in a call of call_rows rows: its bits, out then lse. */
static void run_alone(const struct fixture *f, dcp__attn_fn *fn, int64_t r, int64_t call_rows,
                      float *bits)
{
    struct dcp__attn_job job = f->job;
    job.call_rows = call_rows;
    job.n_tokens = 1;
    job.lo += r;
    job.hi += r;
    job.q += r * f->dk;
    job.out = bits;
    job.lse = bits + f->dv;
    fn(&job);
}

/* Jobs of one row in calls of 1, 4, 12, 13 and 100: the bits of the row in one job of so many. */
static void test_call_rows(void **state)
{
    static const int64_t calls[] = {1, 4, FEW, FEW + 1, MANY};
    static const int64_t dims[] = {17, 64, 128};
    (void)state;
    rng_state = 32;
    for (int isa = DCP_ISA_AVX2; isa <= DCP_ISA_AVX512; isa++) {
        int n_other = 0, n_rows = 0;
        for (int dtype = DCP_F32; dtype <= DCP_FP8_E4M3; dtype++) {
            dcp__attn_fn *const fn = kernel_of((dcp_isa)isa, (dcp_dtype)dtype);
            for (size_t i = 0; fn != NULL && i < sizeof(dims) / sizeof(dims[0]); i++) {
                const int64_t dv = dims[(i + 1) % 3];
                const size_t n_bytes = (size_t)dv * sizeof(float);
                struct fixture f;
                fixture_make(&f, dims[i], dv, MANY, 1, (dcp_dtype)dtype);
                float *const bits = must(malloc(n_bytes + sizeof(float)));
                float *const few = must(malloc(n_bytes + sizeof(float)));
                for (size_t c = 0; c < sizeof(calls) / sizeof(calls[0]); c++) {
                    f.job.n_tokens = calls[c];
                    f.job.call_rows = c % 2 == 0 ? 0 : calls[c]; /* of the whole: either way */
                    fn(&f.job);
                    for (int64_t r = 0; r < calls[c]; r += 1 + calls[c] / 8) {
                        run_alone(&f, fn, r, calls[c], bits);
                        assert_memory_equal(bits, f.out + r * dv, n_bytes);
                        assert_memory_equal(bits + dv, f.lse + r, sizeof(float));
                        run_alone(&f, fn, r, 0, few);
                        const bool is_same = memcmp(few, bits, n_bytes) == 0;
                        assert_true(is_same || calls[c] > FEW);
                        if (calls[c] > FEW) n_rows++;
                        if (!is_same) n_other++;
                    }
                }
                free(bits);
                free(few);
                fixture_free(&f);
            }
        }
        if (n_rows == 0) {
            print_message("skipped: no kernels for %s here\n", dcp__isa_name((dcp_isa)isa));
            continue;
        }
        print_message("%s: %d of %d rows of larger calls have other bits than alone\n",
                      dcp__isa_name((dcp_isa)isa), n_other, n_rows);
        assert_true(n_other > 0); /* else nothing was tested */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_and_dims),
        cmocka_unit_test(test_call_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
