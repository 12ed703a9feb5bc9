/* SPDX-License-Identifier: Apache-2.0 */
/* What `bench attend` prints of lines that ran while other work had the CPUs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/bench_attend_report.h"

static struct bench_lines all;
static char said[1 << 16];

static void put_line(double matrix_GFLOPs, double best_GFLOPs, bool has_run)
{
    struct bench_line *const l = &all.line[all.n++];
    *l = (struct bench_line){.keys = 1024,
                             .tokens = 1,
                             .ranks = 1,
                             .threads = 2,
                             .has_run = has_run,
                             .flops = 1e9,
                             .read_bytes = 1 << 20,
                             .time = {900.0, 1000.0},
                             .read = {800.0, 850.0},
                             .matrix_GFLOPs = matrix_GFLOPs,
                             .best_GFLOPs = best_GFLOPs};
    strcpy(l->name, "mla-decode");
}

/* bench_report's text. */
static const char *report(bool is_json)
{
    FILE *const f = tmpfile();
    assert_non_null(f);
    fflush(stdout);
    const int before = dup(STDOUT_FILENO);
    assert_true(dup2(fileno(f), STDOUT_FILENO) >= 0);
    bench_report(&all, is_json);
    fflush(stdout);
    assert_true(dup2(before, STDOUT_FILENO) >= 0);
    close(before);
    rewind(f);
    said[fread(said, 1, sizeof(said) - 1, f)] = '\0';
    fclose(f);
    return said;
}
static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)) != NULL; text++) n++;
    return n;
}

static void test_quiet(void **state)
{
    (void)state;
    memset(&all, 0, sizeof(all));
    put_line(4500.0, 5000.0, true); /* a median below the best is no disturbance */
    put_line(0.0, 5000.0, false);   /* only created */
    assert_null(strchr(report(false), '!'));
    assert_int_equal(count(report(true), "\"disturbed\": false"), 2);
}

static void test_disturbed(void **state)
{
    (void)state;
    memset(&all, 0, sizeof(all));
    put_line(4500.0, 5000.0, true);
    put_line(3000.0, 5000.0, true);
    put_line(1000.0, 2500.0, true); /* the worst, of fewer threads */
    const char *const text = report(false);
    assert_int_equal(count(text, "33.3!"), 1);  /* of 3,000 GFLOP/s */
    assert_int_equal(count(text, "100.0!"), 1); /* of 1,000 */
    assert_int_equal(count(text, "85.0!"), 2);
    assert_non_null(strstr(text, "! 2 lines ran while other work had the CPUs"));
    assert_non_null(strstr(text, "fell to 1000 of 2500 GFLOP/s"));
    assert_int_equal(count(report(true), "\"disturbed\": true"), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quiet),
        cmocka_unit_test(test_disturbed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
