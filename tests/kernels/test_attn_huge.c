/* SPDX-License-Identifier: Apache-2.0 */
/* Finite scores of any size: where all keys are alike the answer is known, the mean of the values
 * and score + log n, however large the score. The exact product of such a score and its scale is
 * far (2^64 at 1e9) from a maximum that was rounded. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/amx_emulator.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

enum { N_KEYS = 100, DIM = 16, GROUP = 4 };

static void put(void *at, dcp_dtype type, int64_t i, float x)
{
    if (type == DCP_F32) ((float *)at)[i] = x;
    if (type == DCP_F16) ((uint16_t *)at)[i] = dcp__f32_to_f16(x);
    if (type == DCP_BF16) ((uint16_t *)at)[i] = dcp__f32_to_bf16(x);
}

static void check(dcp__attn_fn *fn, const char *name, dcp_dtype type, int64_t n_tokens, float size)
{
    static _Alignas(64) float k[N_KEYS * DIM], v[N_KEYS * DIM];
    static float q[64 * GROUP * DIM], out[64 * GROUP * DIM], lse[64 * GROUP];
    static _Alignas(64) char scratch[4 << 20];
    static const int32_t page = 0;
    int64_t lo[64], hi[64];
    assert_true(dcp__attn_scratch_bytes_for(DCP_ISA_AMX, n_tokens * GROUP, DIM, DIM) <=
                sizeof(scratch));
    for (int64_t i = 0; i < N_KEYS * DIM; i++) {
        put(k, type, i, 1.5f);
        put(v, type, i, i / DIM % 2 == 0 ? 1.0f : 3.0f);
    }
    for (int64_t i = 0; i < n_tokens * GROUP * DIM; i++) q[i] = size;
    for (int64_t t = 0; t < n_tokens; t++) {
        lo[t] = 0;
        hi[t] = N_KEYS;
    }
    const dcp_kv_view view = {.k_base = k,
                              .v_base = v,
                              .pages = &page,
                              .page_tokens = N_KEYS,
                              .k_slot_stride = DIM,
                              .v_slot_stride = DIM,
                              .n_keys = N_KEYS,
                              .dtype = type};
    const struct dcp__attn_job job = {.view = &view,
                                      .key_end = N_KEYS,
                                      .n_tokens = n_tokens,
                                      .n_group = GROUP,
                                      .dk = DIM,
                                      .dv = DIM,
                                      .scale = 0.37f,
                                      .lo = lo,
                                      .hi = hi,
                                      .q = q,
                                      .q_token_stride = GROUP * DIM,
                                      .q_head_stride = DIM,
                                      .out = out,
                                      .out_token_stride = GROUP * DIM,
                                      .out_head_stride = DIM,
                                      .lse = lse,
                                      .lse_token_stride = GROUP,
                                      .lse_head_stride = 1,
                                      .scratch = scratch};
    fn(&job);
    const double score = 0.37f * 1.5 * DIM * (double)size;
    for (int64_t r = 0; r < n_tokens * GROUP; r++) {
        if (fabs(lse[r] - (score + log(N_KEYS))) > 1e-6 * fabs(score) + 1e-5)
            fail_msg("%s: lse %g of score %g", name, (double)lse[r], score);
        for (int64_t d = 0; d < DIM; d++)
            if (fabsf(out[r * DIM + d] - 2.0f) > 1e-5f)
                fail_msg("%s: out %g, not 2, of score %g", name, (double)out[r * DIM + d], score);
    }
}

static void test_huge_scores(void **state)
{
    (void)state;
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    static const float sizes[] = {1e3f,  1e5f,  7e5f,  1e6f,  3e7f,   1e9f,   1.7e12f, 1e20f,
                                  1e30f, 1e36f, -1e5f, -1e9f, -1e25f, -1e30f, -1e36f,  0.0f};
    int n = 0;
    for (int isa = DCP_ISA_SCALAR; isa <= (int)DCP_ISA_AVX512; isa++) {
        if (isa > (int)dcp__cpu_best_isa(&cpu)) continue;
        struct dcp__kernels kernels;
        dcp__kernels_select((dcp_isa)isa, &kernels);
        for (int type = DCP_F32; type <= DCP_BF16; type++)
            for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
                for (int64_t n_tokens = 1; n_tokens <= 64; n_tokens *= 8) {
                    check(kernels.attn[type], kernels.attn_name[type], (dcp_dtype)type, n_tokens,
                          sizes[i]);
                    n++;
                }
    }
#if DCP_BUILD_AVX512
    if (cpu.avx512 && cpu.avx512_bf16) {
        if (dcp__cpu_best_isa(&cpu) < DCP_ISA_AMX) amx_emulator_install();
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
            for (int64_t n_tokens = 1; n_tokens <= 64; n_tokens *= 8) {
                check(dcp__attn_bf16__amx, "dcp__attn_bf16__amx", DCP_BF16, n_tokens, sizes[i]);
                n++;
            }
    }
#endif
    print_message("%d cases\n", n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_scores)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
