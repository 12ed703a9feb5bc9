/* SPDX-License-Identifier: Apache-2.0 */
/* Lists that benches take as options. */
#ifndef DCP_CLI_BENCH_LIST_H
#define DCP_CLI_BENCH_LIST_H

#include <stdbool.h>
#include <stdint.h>

enum { BENCH_MAX_ITEMS = 24 };
struct bench_list {
    int n;
    int64_t at[BENCH_MAX_ITEMS];
};

/* "a,b,c" with K, M, G, each also "a..b" in steps of factor, pushed onto l; text NULL pushes
 * nothing. False: not such a list, too long, or a number outside [low, high]. */
bool bench_read_list(const char *text, double factor, int64_t low, int64_t high,
                     struct bench_list *l);
/* Names between commas; find says which one an item is, < 0: none. */
bool bench_read_names(const char *text, int64_t (*find)(const char *), struct bench_list *l);

#endif
