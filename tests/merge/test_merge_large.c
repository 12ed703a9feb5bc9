/* SPDX-License-Identifier: Apache-2.0 */
/* Large messages (merge_large.h) on threads, shared memory and simulated hosts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "merge/merge_large.h"
#include "merge/merge_ranks.h"

static void test_bits(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(ranks_threads(n, 30, large_check, NULL), 0);
        assert_int_equal(ranks_shm(n, 30, large_check, NULL), 0);
    }
    ranks_per_host = 2;
    assert_int_equal(ranks_threads(3, 30, large_check, NULL), 0);
    ranks_per_host = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
