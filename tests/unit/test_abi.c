/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes, offsets and enumerators that callers have compiled in. abi_sizes.inc is written by
 * tools/abi.py, which also sees to it that no field is missing here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dcpattn/dcpattn.h"
#include "dcpattn/mpi_module.h"

static const struct {
    const char *what;
    long long want, have;
} entries[] = {
#define VALUE(name, value) {#name, value, name},
#define SIZE(type, n) {"sizeof " #type, n, sizeof(struct type)},
#define FIELD(type, field, at) {#type "." #field, at, offsetof(struct type, field)},
#include "unit/abi_sizes.inc"
#undef VALUE
#undef SIZE
#undef FIELD
};

static void test_layout(void **state)
{
    (void)state;
    int n_wrong = 0;
    if (sizeof(void *) != 8) {
        print_message("skipped: the numbers are those of LP64\n");
        skip();
    }
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        if (entries[i].have == entries[i].want) continue;
        print_message("%s is %lld, was %lld\n", entries[i].what, entries[i].have, entries[i].want);
        n_wrong++;
    }
    assert_int_equal(n_wrong, 0);
}

/* The macros set the size that a library of this version expects. */
static void test_init_macros(void **state)
{
    (void)state;
    const dcp_merge_desc merge = DCP_MERGE_DESC_INIT;
    const dcp_merge_args merge_args = DCP_MERGE_ARGS_INIT;
    const dcp_attend_desc attend = DCP_ATTEND_DESC_INIT;
    const dcp_attend_args attend_args = DCP_ATTEND_ARGS_INIT;
    assert_int_equal(merge.struct_size, sizeof(merge));
    assert_int_equal(merge_args.struct_size, sizeof(merge_args));
    assert_int_equal(attend.struct_size, sizeof(attend));
    assert_int_equal(attend_args.struct_size, sizeof(attend_args));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_init_macros),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
