/* SPDX-License-Identifier: Apache-2.0 */
/* Results so large that they are stored past the caches have the bits of small ones: a contiguous,
 * aligned result (streamed), one that starts off a line (not streamed), and one in place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "merge/merge_ranks.h"

enum { T = 320, H = 66, D = 512 }; /* a rank's bf16 at N = 2: 10.3 MiB; no power of 2 of heads */

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Finite values, here and there a NaN; in f32 or bf16. */
static void fill(dcp_dtype type, void *out, float *lse, int rank)
{
    uint32_t state = 77u + (uint32_t)rank;
    for (size_t i = 0; i < (size_t)T * H * D; i++) {
        float x = (float)next(&state) * 0x1p-22f - 2.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof(bits));
        if (i % 100003 == 5) bits = 0x7fc00000u;
        if (type == DCP_F32)
            ((uint32_t *)out)[i] = bits;
        else
            ((uint16_t *)out)[i] = (uint16_t)(bits >> 16);
    }
    for (int i = 0; i < T * H; i++)
        lse[i] = i % 97 == rank ? -__builtin_inff() : (float)next(&state) * 0x1p-21f;
}

static int merge_into(dcp_group *g, dcp_dtype type, void *out, float *lse, void *merged,
                      int64_t token_stride, float *merged_lse, dcp_merge_stats *stats)
{
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = T;
    desc.n_heads = H;
    desc.dim = D;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.out_type = type;
    desc.algo = DCP_MERGE_DIRECT;
    dcp_merge *m = NULL;
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = T;
    args.out = out;
    args.lse = lse;
    args.merged = merged;
    args.merged_token_stride = token_stride;
    args.merged_lse = merged_lse;
    dcp_status st = dcp_merge_create(g, &desc, &m);
    if (st == DCP_OK) st = dcp_merge_run(m, &args, stats);
    dcp_merge_destroy(m);
    if (st == DCP_OK) return 0;
    printf("rank %d: %s\n", dcp_group_rank(g), dcp_last_error());
    return 1;
}

static int run_rank(dcp_group *g, void *user)
{
    const dcp_dtype type = *(const dcp_dtype *)user;
    const size_t elem = dcp_dtype_bytes(type);
    const int rank = dcp_group_rank(g);
    const dcp_range own = dcp_cut_range(H, dcp_group_size(g), rank);
    const size_t row_bytes = (size_t)(own.end - own.begin) * D * elem;
    const size_t n_bytes = row_bytes * T;
    char *out = malloc((size_t)T * H * D * elem);
    float *lse = malloc(sizeof(float) * T * H);
    char *streamed = aligned_alloc(64, n_bytes);
    char *shifted = malloc(n_bytes + 64);
    float *merged_lse = malloc(sizeof(float) * T * H);
    if (out == NULL || lse == NULL || streamed == NULL || shifted == NULL || merged_lse == NULL)
        abort();
    dcp_merge_stats stats[3];
    fill(type, out, lse, rank);
    int n_failed = merge_into(g, type, out, lse, streamed, 0, merged_lse, &stats[0]);
    n_failed += merge_into(g, type, out, lse, shifted + elem, 0, merged_lse, &stats[1]);
    char *slice = out + (size_t)own.begin * D * elem;
    n_failed += merge_into(g, type, out, lse, slice, (int64_t)H * D, merged_lse, &stats[2]);
    if (n_failed == 0 && memcmp(streamed, shifted + elem, n_bytes) != 0) {
        printf("rank %d: a shifted result has other bits\n", rank);
        n_failed++;
    }
    for (size_t t = 0; t < T && n_failed == 0; t++) {
        if (memcmp(streamed + t * row_bytes, slice + t * H * D * elem, row_bytes) == 0) continue;
        printf("rank %d: in place there are other bits at token %zu\n", rank, t);
        n_failed++;
    }
    if (n_failed == 0 &&
        (stats[0].nonfinite_values == 0 || stats[0].nonfinite_values != stats[1].nonfinite_values ||
         stats[0].nonfinite_values != stats[2].nonfinite_values)) {
        printf("rank %d: counts differ\n", rank);
        n_failed++;
    }
    free(merged_lse);
    free(shifted);
    free(streamed);
    free(lse);
    free(out);
    return n_failed;
}

static void test_bits(void **state)
{
    (void)state;
    const dcp_dtype types[] = {DCP_F32, DCP_BF16, DCP_F16};
    for (int i = 0; i < 3; i++) {
        dcp_dtype type = types[i];
        assert_int_equal(ranks_threads(2, 30, run_rank, &type), 0);
        assert_int_equal(ranks_threads(1, 30, run_rank, &type), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
