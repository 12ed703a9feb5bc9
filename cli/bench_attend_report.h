/* SPDX-License-Identifier: Apache-2.0 */
/* The lines of `bench attend`, `extend` and `product` as tables or as JSON. */
#ifndef DCP_CLI_BENCH_ATTEND_REPORT_H
#define DCP_CLI_BENCH_ATTEND_REPORT_H

#include "cli/bench_attend.h"

/* Before the first run: remembers the load and the CPUs. */
void bench_report_begin(struct bench_lines *all);
void bench_report(const struct bench_lines *all, bool is_json);

#endif
