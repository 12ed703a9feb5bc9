/* SPDX-License-Identifier: Apache-2.0 */
/* A job for the AMX kernels over a paged bf16 view, and its checks: against double precision, and
 * that a row's bits depend on nothing but the row. */
#ifndef DCP_TESTS_ATTN_AMX_CASE_H
#define DCP_TESTS_ATTN_AMX_CASE_H

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

#include "kernels/amx_emulator.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_attn.h"
#include "ref/ref_merge.h"

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
    int64_t call_rows; /* 0 = those of the job */
    bool is_packed;    /* rows without padding, base of 64 bytes */
};

/* A view in paged memory that is NaN wherever no key lies, and the same keys as plain floats. */
struct fixture {
    struct shape shape;
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

static float put(char *at, float x)
{
    const uint16_t bits = dcp__f32_to_bf16(x);
    memcpy(at, &bits, sizeof(bits));
    return dcp__bf16_to_f32(bits);
}

static char *element(const struct fixture *f, bool is_value, int64_t key, int64_t d)
{
    const dcp_kv_view *const view = &f->view;
    const int64_t bytes = 2;
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
    const int64_t bytes = 2;
    const int64_t n_pages = (s->n_keys + s->page_tokens - 1) / s->page_tokens;
    const int64_t n_physical = n_pages + 3;
    const int64_t pad = s->is_packed ? 0 : pick(0, 3);
    const bool heads_outside = pick(0, 1) == 1;
    dcp_kv_view *const view = &f->view;
    const int64_t k_row = s->dk + pad;
    const int64_t v_row = s->dv + pad;
    view->k_slot_stride = heads_outside ? k_row : k_row * N_HEADS;
    view->k_head_stride = heads_outside ? k_row * s->page_tokens : k_row;
    view->v_slot_stride = heads_outside ? v_row : v_row * N_HEADS;
    view->v_head_stride = heads_outside ? v_row * s->page_tokens : v_row;
    view->k_page_stride_bytes =
        (k_row * N_HEADS * s->page_tokens + (s->is_packed ? 0 : pick(0, 7))) * bytes;
    view->v_page_stride_bytes =
        (v_row * N_HEADS * s->page_tokens + (s->is_packed ? 0 : pick(0, 7))) * bytes;
    view->page_tokens = s->page_tokens;
    view->n_keys = s->n_keys;
    view->dtype = DCP_BF16;
    const size_t k_bytes = (size_t)(n_physical * view->k_page_stride_bytes);
    const size_t v_bytes = s->latent ? 0 : (size_t)(n_physical * view->v_page_stride_bytes);
    f->memory = must(aligned_alloc(64, (k_bytes + v_bytes + 63) / 64 * 64));
    for (size_t i = 0; i < k_bytes + v_bytes; i += (size_t)bytes)
        put(f->memory + i, ref_random(&rng_state) & 1 ? NAN : -INFINITY);
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
            f->k[key * s->dk + d] = put(element(f, false, key, d), uniform());
        for (int64_t d = 0; d < s->dv; d++)
            f->v[key * s->dv + d] =
                s->latent ? f->k[key * s->dk + d] : put(element(f, true, key, d), uniform() + 0.5f);
    }
}

static void fixture_make(struct fixture *f, const struct shape *shape)
{
    memset(f, 0, sizeof(*f));
    f->shape = *shape;
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
    const size_t scratch = dcp__attn_scratch_bytes_for(DCP_ISA_AMX, rows, s->dk, s->dv);
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
        .call_rows = s->call_rows > 0 ? s->call_rows : rows,
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

/* Tiles of the CPU, or emulated ones: the test library takes SIGILL at every test's start. */
static bool is_native;
static void use_tiles(void)
{
    if (!is_native) assert_true(amx_emulator_install());
}
/* The kernel, and that it leaves no tiles behind. */
static void kernel(const struct dcp__attn_job *job)
{
    use_tiles();
    dcp__attn_bf16__amx(job);
    assert_true(amx_emulator_is_released());
}

static void run(struct fixture *f)
{
    const int64_t rows = f->shape.n_tokens * f->shape.n_group;
    for (int64_t i = 0; i < rows * (f->shape.dv + OUT_PAD); i++) f->out[i] = CANARY;
    for (int64_t i = 0; i < rows * 2; i++) f->lse[i] = CANARY;
    kernel(&f->job);
}

static void complain(const struct fixture *f, int64_t row)
{
    const struct shape *const s = &f->shape;
    print_error(
        "row %lld of %lld x %lld, dk %lld, dv %lld, keys %lld [%lld, %lld), page %lld, "
        "latent %d, causal %d, window %lld, gaps %d, scale %g, softcap %g, q %g, call rows %lld\n",
        (long long)row, (long long)s->n_tokens, (long long)s->n_group, (long long)s->dk,
        (long long)s->dv, (long long)s->n_keys, (long long)s->key_begin, (long long)s->key_end,
        (long long)s->page_tokens, s->latent, s->causal, (long long)s->window, s->gaps,
        (double)s->scale, (double)s->softcap, (double)s->q_size, (long long)f->job.call_rows);
}

static bool is_close(double got, double want, double tol)
{
    return got == want || fabs(got - want) <= tol;
}

/* What bf16 parts add to the rounding of float32: parts of q (none in few rows: three are exact;
 * two leave 2^-17 of every element, taken as random in sign from 16 dims on) and of the weights
 * (two leave 2^-17 of each, one leaves 2^-8; twice that, as the sum of the weights is rounded as
 * well). The exponentials of many rows are good to 2.7e-6. */
static void add_tolerance(const struct fixture *f, const struct ref_attn_row *ref, double *tol_out,
                          double *tol_lse)
{
    const bool is_few = !dcp__attn_cuts_weights(DCP_ISA_AMX, DCP_BF16, f->job.call_rows);
    const double q = is_few ? 0.0 : 0x1p-17 * fmin(1.0, 4.0 / sqrt((double)ref->dk));
    *tol_lse += q * ref->score_size + (is_few ? 0.0 : 3e-6);
    *tol_out += 2.0 * q * ref->score_size * ref->value_size;
    if (ref->hi > ref->lo) *tol_out += (is_few ? 0x1p-16 : 0x1p-7) * ref->value_size;
}

/* All rows of the last run against the oracle. worst: error over tolerance. */
static void check_rows(struct fixture *f, double *worst)
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
        double tol = ref_attn_tol_out(&ref);
        double tol_lse = ref_attn_tol_lse(&ref);
        add_tolerance(f, &ref, &tol, &tol_lse);
        bool good = is_close((double)f->lse[2 * row], ref.lse, tol_lse);
        if (ref.hi > ref.lo)
            *worst = fmax(*worst, fabs((double)f->lse[2 * row] - ref.lse) / tol_lse);
        for (int64_t d = 0; d < s->dv; d++) {
            good = good && is_close((double)out[d], want[d], tol);
            if (tol > 0.0) *worst = fmax(*worst, fabs((double)out[d] - want[d]) / tol);
        }
        for (int64_t d = s->dv; d < out_head; d++) good = good && out[d] == CANARY;
        good = good && f->lse[2 * row + 1] == CANARY;
        if (!good) {
            complain(f, row);
            print_error("lse %.9g want %.9g tol %.3g; out[0] %.9g want %.9g tol %.3g\n",
                        (double)f->lse[2 * row], ref.lse, tol_lse, (double)out[0], want[0], tol);
        }
        assert_true(good);
    }
    free(want);
}

/* Rows of sub-jobs give the bits of the whole job. */
static void check_batching(struct fixture *f)
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
        job.n_tokens = nt;
        job.n_group = nj;
        job.lo += t0;
        job.hi += t0;
        job.q += t0 * job.q_token_stride + j0 * job.q_head_stride;
        job.out += t0 * job.out_token_stride + j0 * job.out_head_stride;
        job.lse += t0 * job.lse_token_stride + j0 * job.lse_head_stride;
        for (size_t x = 0; x < n_out; x++) f->out[x] = CANARY;
        kernel(&job);
        for (int64_t t = 0; t < nt; t++) {
            for (int64_t j = 0; j < nj; j++) {
                const int64_t row = (t0 + t) * s->n_group + j0 + j;
                const bool same = memcmp(f->out + row * out_head, whole + row * out_head,
                                         (size_t)s->dv * sizeof(float)) == 0 &&
                                  memcmp(&f->lse[2 * row], &whole_lse[2 * row], sizeof(float)) == 0;
                if (!same) {
                    complain(f, row);
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

#endif
