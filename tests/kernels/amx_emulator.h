/* SPDX-License-Identifier: Apache-2.0 */
/* AMX tile instructions on a CPU that has none, for tests: the machine code of the kernels runs as
 * it is; a tile instruction raises SIGILL and the handler does its work. */
#ifndef DCP_TESTS_AMX_EMULATOR_H
#define DCP_TESTS_AMX_EMULATOR_H

#include <stdbool.h>
#include <stdint.h>

/* Instructions that this thread has executed since amx_emulator_reset. */
struct amx_counts {
    int64_t config, release, zero, load, load_t1, store, product;
    int64_t split_lines; /* tile loads whose rows cross a line of 64 bytes */
};

/* Take over SIGILL for the process, again if somebody else has taken it since, and let this thread
 * receive it. False where the architecture is another. */
bool amx_emulator_install(void);
void amx_emulator_reset(void);
struct amx_counts amx_emulator_counts(void);
/* This thread holds no tile configuration. */
bool amx_emulator_is_released(void);

/* One TDPBF16PS in software: c [16][16] += a [16][32] b [16][16][2], all of it (16 rows, 64 bytes a
 * row): the emulator's own arithmetic, for comparing it with a CPU that has tiles. */
void amx_emulate_product(float *c, const uint16_t *a, const uint16_t *b);

#endif
