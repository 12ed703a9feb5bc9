/* SPDX-License-Identifier: Apache-2.0 */
/* What `bench attend` prints of lines that ran while other work had the CPUs, or not at all. */
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

static struct bench_line *put_line(double matrix_GFLOPs)
{
    struct bench_line *const l = &all.line[all.n++];
    *l = (struct bench_line){.keys = 1024,
                             .tokens = 1,
                             .ranks = 1,
                             .threads = 2,
                             .has_run = true,
                             .is_checked = true,
                             .flops = 1e9,
                             .read_bytes = 1 << 20,
                             .time = {900.0, 1000.0},
                             .read = {800.0, 850.0},
                             .matrix_GFLOPs = matrix_GFLOPs,
                             .best_GFLOPs = matrix_GFLOPs * 1.1,
                             .peak_GFLOPs = 5000.0};
    strcpy(l->name, "mla-decode");
    return l;
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
    put_line(4300.0);
    put_line(3600.0); /* a slower clock */
    assert_null(strchr(report(false), '!'));
    assert_int_equal(count(report(true), "\"disturbed\": false"), 2);
}

static void test_disturbed(void **state)
{
    (void)state;
    memset(&all, 0, sizeof(all));
    put_line(4500.0);
    put_line(4000.0)->best_GFLOPs = 5000.0;
    put_line(1000.0);
    put_line(4500.0)->time.min_us = 400.0;
    put_line(4500.0)->read.min_us = 300.0;
    const char *const text = report(false);
    assert_int_equal(count(text, "25.0!"), 1);  /* of 4,000 GFLOP/s */
    assert_int_equal(count(text, "100.0!"), 1); /* of 1,000 */
    assert_int_equal(count(text, "85.0!"), 4);
    assert_int_equal(count(text, "22.2!"), 2);
    assert_non_null(strstr(text, "! 4 lines ran while other work had the CPUs"));
    assert_non_null(strstr(text, "fell to 20% of its best"));
    assert_int_equal(count(report(true), "\"disturbed\": true"), 4);
    all.n = 0;
    put_line(4500.0)->time.min_us = 400.0; /* its own time alone */
    assert_non_null(strstr(report(false), "! 1 line ran while other work had the CPUs.\n"));
}

/* Created alone, not run: nothing was read and nothing checked. */
static void test_not_run(void **state)
{
    (void)state;
    memset(&all, 0, sizeof(all));
    *put_line(0.0) = (struct bench_line){.name = "gqa-decode", .keys = 4096, .tokens = 1};
    const char *text = report(false);
    assert_null(strchr(text, '!'));
    assert_null(strstr(text, "plain read"));
    assert_null(strstr(text, "0.0e+00"));
    text = report(true);
    assert_int_equal(count(text, "\"worst_error\": null"), 1);
    assert_int_equal(count(text, "\"wrong\": null"), 1);
    assert_int_equal(count(text, "\"disturbed\": false"), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quiet),
        cmocka_unit_test(test_disturbed),
        cmocka_unit_test(test_not_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
