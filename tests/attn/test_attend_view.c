/* SPDX-License-Identifier: Apache-2.0 */
/* Views as engines may give them: pages freed in the middle, one endless page, page numbers at the
 * end of their type; and what a failed call leaves behind when all is freed. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "dcpattn/attend.h"

enum {
    DIM = 64,
    LENGTH = 4096,
    PAGE = 64,
    N_PAGES = LENGTH / PAGE,
    MAX_ROWS = 600,
    MAX_HEADS = 16
};

static float q[MAX_ROWS * MAX_HEADS * DIM], out[MAX_ROWS * MAX_HEADS * DIM];
static float expected[MAX_ROWS * MAX_HEADS * DIM];

/* Latent keys in bf16, on pages of the machine's own. */
static uint16_t *make_keys(void)
{
    uint16_t *const keys =
        mmap(NULL, LENGTH * DIM * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(keys != MAP_FAILED);
    uint32_t x = 1;
    for (int64_t i = 0; i < LENGTH * DIM; i++) {
        x = x * 1664525u + 1013904223u;
        keys[i] = (uint16_t)(0x3f00u | (x >> 24) | ((x >> 8) & 0x8000u));
    }
    return keys;
}
static dcp_kv_view view_of(const void *keys, const int32_t *pages)
{
    return (dcp_kv_view){.k_base = keys,
                         .v_base = keys,
                         .pages = pages,
                         .page_tokens = PAGE,
                         .k_page_stride_bytes = PAGE * DIM * 2,
                         .v_page_stride_bytes = PAGE * DIM * 2,
                         .k_slot_stride = DIM,
                         .v_slot_stride = DIM,
                         .n_keys = LENGTH,
                         .dtype = DCP_BF16};
}

/* False: this machine has no such level. */
static bool attend(dcp_isa isa, const dcp_kv_view *view, int64_t n_heads, int64_t n_rows,
                   int64_t window, const int64_t *q_pos, float *to)
{
    dcp_group *g;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = n_rows;
    desc.n_heads = n_heads;
    desc.n_kv_heads = 1;
    desc.key_dim = desc.value_dim = DIM;
    desc.causal = 1;
    static const char *const names[] = {"", "scalar", "avx2", "avx512", "amx"};
    assert_int_equal(setenv("DCP_ATTN_ISA", names[isa], 1), 0);
    dcp_attend *a = NULL;
    const bool is_there = dcp_attend_create(g, &desc, &a) == DCP_OK;
    if (is_there) {
        const dcp_attend_seq seq = {view, LENGTH, n_rows, window};
        dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
        args.seqs = &seq;
        args.n_seqs = 1;
        args.q = q;
        args.q_pos = q_pos;
        args.out = to;
        assert_int_equal(dcp_attend_run(a, &args, NULL), DCP_OK);
    }
    dcp_attend_destroy(a);
    dcp_group_destroy(g);
    return is_there;
}
static void make_queries(void)
{
    for (int64_t i = 0; i < MAX_ROWS * MAX_HEADS * DIM; i++) q[i] = (float)(i % 7 - 3) * 0.25f;
}

/* Two stretches of rows far apart, and a window: what lies between is seen by nobody, and not read.
 * The same bits as with all of it there. */
static void test_holes(void **state)
{
    (void)state;
    static const struct {
        int64_t n_heads, n_rows;
    } sizes[] = {{1, 2}, {4, 8}, {16, 8}, {4, 600}};
    make_queries();
    uint16_t *const keys = make_keys();
    int32_t pages[N_PAGES];
    for (int i = 0; i < N_PAGES; i++) pages[i] = i;
    const dcp_kv_view view = view_of(keys, pages);
    int64_t q_pos[MAX_ROWS];
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        const int64_t n = sizes[s].n_rows;
        for (int64_t i = 0; i < n; i++) q_pos[i] = i < n / 2 ? 100 + i : LENGTH - n + i;
        for (int isa = DCP_ISA_SCALAR; isa <= DCP_ISA_AMX; isa++) {
            if (!attend((dcp_isa)isa, &view, sizes[s].n_heads, n, 64, q_pos, expected)) continue;
            /* 500 .. 3,400 */
            void *const hole = keys + 8 * PAGE * DIM;
            const size_t n_bytes = (size_t)(44 * PAGE * DIM) * 2;
            assert_int_equal(mprotect(hole, n_bytes, PROT_NONE), 0);
            attend((dcp_isa)isa, &view, sizes[s].n_heads, n, 64, q_pos, out);
            assert_int_equal(mprotect(hole, n_bytes, PROT_READ | PROT_WRITE), 0);
            assert_memory_equal(out, expected, (size_t)(n * sizes[s].n_heads * DIM) * 4);
        }
    }
    munmap(keys, LENGTH * DIM * 2);
}

/* One page of all tokens there can be, and pages whose numbers end at INT32_MAX: the same bits. */
static void test_extreme_pages(void **state)
{
    (void)state;
    make_queries();
    uint16_t *const keys = make_keys();
    int32_t pages[N_PAGES];
    for (int i = 0; i < N_PAGES; i++) pages[i] = i;
    const dcp_kv_view view = view_of(keys, pages);
    dcp_kv_view endless = view;
    endless.page_tokens = INT64_MAX;
    endless.k_page_stride_bytes = endless.v_page_stride_bytes = 0;
    int32_t last[N_PAGES];
    for (int i = 0; i < N_PAGES; i++) last[i] = INT32_MAX - (N_PAGES - 1) + i;
    const int64_t shift = (int64_t)(INT32_MAX - (N_PAGES - 1)) * PAGE * DIM * 2;
    const void *const base = (const void *)((uintptr_t)keys - (uintptr_t)shift);
    const dcp_kv_view high = view_of(base, last);
    for (int isa = DCP_ISA_SCALAR; isa <= DCP_ISA_AMX; isa++) {
        for (int64_t heads = 4; heads <= MAX_HEADS; heads *= 4) {
            if (!attend((dcp_isa)isa, &view, heads, 6, 0, NULL, expected)) continue;
            const size_t n_bytes = (size_t)(6 * heads * DIM) * 4;
            attend((dcp_isa)isa, &endless, heads, 6, 0, NULL, out);
            assert_memory_equal(out, expected, n_bytes);
            attend((dcp_isa)isa, &high, heads, 6, 0, NULL, out);
            assert_memory_equal(out, expected, n_bytes);
        }
    }
    munmap(keys, LENGTH * DIM * 2);
}

/* A rank that has failed and given up frees what it has, collectives that fail in turn: the text
 * that says why stays. */
static void *fail_and_free(void *arg)
{
    dcp_group *const g = arg;
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = 1;
    desc.n_heads = 2;
    desc.n_kv_heads = 1;
    desc.key_dim = desc.value_dim = DIM;
    dcp_attend *a = NULL;
    char text[512] = "";
    bool is_kept = dcp_attend_create(g, &desc, &a) == DCP_OK;
    dcp_kv_view view = {.dtype = DCP_BF16};
    const dcp_attend_seq seq = {&view, 5, 1, 0};
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = &seq;
    args.n_seqs = 1;
    args.q = q;
    args.out = out + dcp_group_rank(g) * DIM;
    is_kept = is_kept && dcp_attend_run(a, &args, NULL) == DCP_ERR_ARG;
    strncpy(text, dcp_last_error(), sizeof(text) - 1);
    dcp_group_abort(g, text);
    dcp_attend_destroy(a);
    is_kept = is_kept && strcmp(text, dcp_last_error()) == 0;
    dcp_group_destroy(g);
    is_kept = is_kept && text[0] != '\0' && strcmp(text, dcp_last_error()) == 0;
    return is_kept ? arg : NULL;
}
static void test_error_stays(void **state)
{
    (void)state;
    dcp_group *groups[2];
    assert_int_equal(dcp_group_create_threads(2, NULL, groups), DCP_OK);
    pthread_t thread;
    void *other = NULL;
    assert_int_equal(pthread_create(&thread, NULL, fail_and_free, groups[1]), 0);
    void *const own = fail_and_free(groups[0]);
    (void)pthread_join(thread, &other);
    assert_non_null(own);
    assert_non_null(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_holes),
        cmocka_unit_test(test_extreme_pages),
        cmocka_unit_test(test_error_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
