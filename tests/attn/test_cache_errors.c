/* SPDX-License-Identifier: Apache-2.0 */
/* Every refusal of the cache: its code, and that the text names the call, what was given and what
 * would be right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc_priv.h"
#include "dcpattn/cache.h"

static dcp_cache_desc small_desc(void)
{
    dcp_cache_desc d = DCP_CACHE_DESC_INIT;
    d.n_ranks = 2;
    d.rank = 1;
    d.n_layers = 3;
    d.n_kv_heads = 2;
    d.key_dim = 8;
    d.value_dim = 4;
    d.page_tokens = 32;
    d.max_tokens = 100;
    d.max_seqs = 2;
    return d;
}

static void expect(dcp_status got, dcp_status want, const char *text)
{
    if (got == want && strstr(dcp_last_error(), text) != NULL) return;
    fail_msg("status %d, text \"%s\"; wanted %d and \"%s\"", (int)got, dcp_last_error(), (int)want,
             text);
}

static void test_create(void **state)
{
    (void)state;
    dcp_cache *c = NULL;
    dcp_cache_desc d;
#define REFUSE(change, status, text)                                                               \
    do {                                                                                           \
        d = small_desc();                                                                          \
        change;                                                                                    \
        expect(dcp_cache_create(&d, &c), status, text);                                            \
        assert_null(c);                                                                            \
    } while (0)
    REFUSE(d.n_ranks = -3, DCP_ERR_ARG, "dcp_cache_create: n_ranks is -3, must be 1 to 1048576");
    REFUSE(d.n_ranks = 0, DCP_ERR_ARG, "n_ranks is 0, must be 1 to 1048576");
    REFUSE(d.rank = -1, DCP_ERR_ARG, "rank is -1, must be 0 to 1");
    REFUSE(d.rank = 2, DCP_ERR_ARG, "rank is 2, must be 0 to 1");
    REFUSE(d.interleave = -1, DCP_ERR_ARG, "interleave is -1, must be 1 to");
    REFUSE(d.n_layers = 0, DCP_ERR_ARG, "n_layers is 0, must be 1 to 1048576");
    REFUSE(d.n_kv_heads = 0, DCP_ERR_ARG, "n_kv_heads is 0, must be 1 to");
    REFUSE(d.key_dim = -8, DCP_ERR_ARG, "key_dim is -8, must be 1 to");
    REFUSE(d.value_dim = -4, DCP_ERR_ARG, "value_dim is -4, must be 1 to 1048576");
    REFUSE(d.value_dim = 0, DCP_ERR_ARG, "value_dim is 0, must be 1 to 1048576");
    REFUSE((d.latent = 1, d.n_kv_heads = 1, d.value_dim = 9), DCP_ERR_ARG,
           "value_dim is 9, must be 1 to 8");
    REFUSE(d.latent = 1, DCP_ERR_ARG, "a latent cache has one KV head, n_kv_heads is 2");
    REFUSE(d.dtype = (dcp_dtype)6, DCP_ERR_ARG, "dtype 6 is none of f32, f16, bf16, int8, fp8");
    REFUSE(d.page_tokens = 16, DCP_ERR_ARG, "page_tokens is 16, must be 32 to");
    REFUSE(d.page_tokens = 48, DCP_ERR_ARG, "page_tokens is 48, must be a multiple of 32");
    REFUSE(d.max_tokens = 0, DCP_ERR_ARG, "max_tokens is 0, must be 1 to");
    REFUSE(d.max_seqs = -2, DCP_ERR_ARG, "max_seqs is -2, must be 1 to 2147483647");
    REFUSE(d.struct_size = 3, DCP_ERR_ARG, "dcp_cache_create");
    REFUSE(d.struct_size = (size_t)-1, DCP_ERR_ARG, "struct_size");
    REFUSE((d.page_tokens = d.n_kv_heads = d.key_dim = 1 << 20, d.n_layers = 1 << 20), DCP_ERR_ARG,
           "a page of 1048576 tokens x 1048576 layers x 1048576 KV heads x dims 1048576 and 4");
    REFUSE(d.max_tokens = INT64_MAX / 4, DCP_ERR_ARG, "lower max_tokens");
    REFUSE((d.max_tokens = 60000000000, d.max_seqs = 1, d.key_dim = 1 << 16), DCP_ERR_NOMEM,
           "KV cache: no address space for");
#undef REFUSE
    expect(dcp_cache_create(NULL, &c), DCP_ERR_ARG, "DCP_CACHE_DESC_INIT");
    d = small_desc();
    expect(dcp_cache_create(&d, NULL), DCP_ERR_ARG, "dcp_cache_create: cache_out is NULL");
    dcp__alloc_set_limit(dcp__alloc_current() + 10);
    expect(dcp_cache_create(&d, &c), DCP_ERR_NOMEM, "KV cache:");
    dcp__alloc_set_limit(0);
    assert_null(c);
}

static void test_sequences(void **state)
{
    (void)state;
    dcp_cache *c = NULL;
    const dcp_cache_desc d = small_desc();
    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
    assert_int_equal(dcp_cache_extend(c, 0, 70), DCP_OK);
    expect(dcp_cache_extend(NULL, 0, 1), DCP_ERR_ARG, "dcp_cache_extend: the cache is NULL");
    expect(dcp_cache_extend(c, 2, 1), DCP_ERR_ARG,
           "dcp_cache_extend: sequence 2, this cache has 0 to 1");
    expect(dcp_cache_extend(c, 1, -5), DCP_ERR_ARG, "n_tokens is -5, must not be negative");
    expect(dcp_cache_extend(c, 1, 31), DCP_ERR_ARG,
           "the KV cache is full: 70 of max_tokens 100 are taken, 31 more wanted");
    expect(dcp_cache_truncate(c, -1, 1), DCP_ERR_ARG,
           "dcp_cache_truncate: sequence -1, this cache has 0 to 1");
    expect(dcp_cache_truncate(c, 0, -1), DCP_ERR_ARG,
           "dcp_cache_truncate: length is -1, must not be negative");
    expect(dcp_cache_fork(c, 0, 3, 1), DCP_ERR_ARG, "dcp_cache_fork: sequence 3");
    expect(dcp_cache_fork(c, 0, 0, 1), DCP_ERR_ARG, "dcp_cache_fork: sequence 0 onto itself");
    expect(dcp_cache_fork(c, 0, 1, 71), DCP_ERR_ARG,
           "dcp_cache_fork: length is 71, sequence 0 has 70");
    expect(dcp_cache_fork(c, 0, 1, 40), DCP_ERR_ARG,
           "dcp_cache_fork: the KV cache is full: 70 of max_tokens 100 are taken, 40 more wanted");
    dcp_cache_destroy(c);
}

static void test_data(void **state)
{
    (void)state;
    dcp_cache *c = NULL;
    dcp_cache_desc d = small_desc();
    d.max_tokens = 200;
    assert_int_equal(dcp_cache_create(&d, &c), DCP_OK);
    assert_int_equal(dcp_cache_extend(c, 0, 20), DCP_OK); /* 10 of them on rank 1 */
    float rows[16 * 10] = {0};
    expect(dcp_cache_store(c, 5, 0, 0, 1, rows, 0, rows, 0), DCP_ERR_ARG,
           "dcp_cache_store: sequence 5, this cache has 0 to 1");
    expect(dcp_cache_store(c, 0, 3, 0, 1, rows, 0, rows, 0), DCP_ERR_ARG,
           "dcp_cache_store: layer 3, this cache has 0 to 2");
    expect(dcp_cache_store(c, 0, 0, 8, 3, rows, 0, rows, 0), DCP_ERR_ARG,
           "3 rows from local index 8, sequence 0 has room for 10 on rank 1");
    expect(dcp_cache_store(c, 0, 0, 0, 1, NULL, 0, rows, 0), DCP_ERR_ARG, "k is NULL");
    expect(dcp_cache_store(c, 0, 0, 0, 1, rows, 0, NULL, 0), DCP_ERR_ARG, "v is NULL");
    expect(dcp_cache_store(c, 0, 0, 0, 1, (const float *)(const void *)((const char *)rows + 1), 0,
                           rows, 0),
           DCP_ERR_ARG, "k is not aligned to its elements");
    expect(dcp_cache_store(c, 0, 0, 0, 2, rows, 15, rows, 0), DCP_ERR_ARG,
           "k_token_stride is 15, a token has 16 elements");
    expect(dcp_cache_store(c, 0, 0, 0, 2, rows, 0, rows, 7), DCP_ERR_ARG,
           "v_token_stride is 7, a token has 8 elements");
    expect(dcp_cache_store(c, 0, 0, 0, 2, rows, INT64_MAX / 4, rows, 0), DCP_ERR_ARG,
           "2 rows of k_token_stride 2305843009213693951 exceed the address space");
    dcp_kv_view view;
    dcp_kv_scales scales;
    expect(dcp_cache_view(c, 0, -1, &view), DCP_ERR_ARG, "dcp_cache_view: layer -1");
    expect(dcp_cache_view(c, 0, 0, NULL), DCP_ERR_ARG, "dcp_cache_view: view_out is NULL");
    expect(dcp_cache_scales(c, 0, 9, &scales), DCP_ERR_ARG, "dcp_cache_scales: layer 9");
    expect(dcp_cache_scales(c, 0, 0, NULL), DCP_ERR_ARG, "dcp_cache_scales: scales_out is NULL");
    /* A store that must copy a shared page first, and there is no memory for the copy. */
    assert_int_equal(dcp_cache_truncate(c, 0, 0), DCP_OK);
    assert_int_equal(dcp_cache_extend(c, 0, 70), DCP_OK);
    assert_int_equal(dcp_cache_fork(c, 0, 1, 70), DCP_OK);
    dcp__alloc_set_limit(dcp__alloc_current());
    expect(dcp_cache_store(c, 1, 0, 0, 1, rows, 0, rows, 0), DCP_ERR_NOMEM, "KV cache pages:");
    dcp__alloc_set_limit(0);
    assert_int_equal(dcp_cache_store(c, 1, 0, 0, 1, rows, 0, rows, 0), DCP_OK);
    dcp_cache_destroy(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
