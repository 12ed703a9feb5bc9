/* SPDX-License-Identifier: Apache-2.0 */
/* The roof of a merge: a plain read of the bytes that it has to read, by loops that do nothing
 * else. */
#ifndef DCP_CLI_BENCH_READ_H
#define DCP_CLI_BENCH_READ_H

#include <stddef.h>
#include <stdint.h>

/* What one rank reads: of each of n_parts partials n_tokens stretches, each of n_rows rows of
 * row_bytes, token_stride_bytes apart. */
struct bench_region {
    const char *const *parts;
    int n_parts;
    int64_t n_tokens, n_rows;
    size_t row_bytes, token_stride_bytes;
};

/* Ways of reading it; the best of them is the roof. */
enum {
    BENCH_READ_PARTS,          /* one partial after the other */
    BENCH_READ_PARTS_PREFETCH, /* the same, 4 KiB of prefetch ahead */
    BENCH_READ_ROWS,           /* row by row of all partials, as the merge goes */
    BENCH_READ_ROWS_PREFETCH,
    BENCH_READ_COUNT
};
const char *bench_read_name(int way);
/* Reads every byte with the widest loads that the CPU has. */
void bench_read(const struct bench_region *region, int way);

#endif
