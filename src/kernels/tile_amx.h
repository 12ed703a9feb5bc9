/* SPDX-License-Identifier: Apache-2.0 */
/* AMX tiles by name, for *_amx.c alone. Inline assembly, because the intrinsics of gcc 12 let
 * stores slip past _tile_loadd and _tile_loadconfig; "memory" keeps every store of a panel before
 * the load of it. Tile numbers are literals: TILE_LOAD(4, ...). */
#ifndef DCP_KERNELS_TILE_AMX_H
#define DCP_KERNELS_TILE_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = 1024 };

/* Row i of the tile is the 64 bytes at base + i * stride_bytes. */
#define TILE_LOAD(tile, base, stride_bytes)                                                        \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                                            \
                     :                                                                             \
                     : "r"((const void *)(base)), "r"((int64_t)(stride_bytes))                     \
                     : "memory")
/* The same for what passes by once: it does not push out of L1 what is used again. */
#define TILE_STREAM(tile, base, stride_bytes)                                                      \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile                                          \
                     :                                                                             \
                     : "r"((const void *)(base)), "r"((int64_t)(stride_bytes))                     \
                     : "memory")
#define TILE_STORE(tile, base, stride_bytes)                                                       \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                                        \
                     :                                                                             \
                     : "r"((void *)(base)), "r"((int64_t)(stride_bytes))                           \
                     : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::: "memory")
/* c += a b: c [16][16] f32, a [16][32] bf16, b [16][16][2] bf16 */
#define TILE_DP(c, a, b)                                                                           \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

/* Every tile 16 rows of 64 bytes: the one configuration of these kernels. */
static inline void tile_begin_all(void)
{
    _Alignas(64) uint8_t config[64];
    memset(config, 0, sizeof(config));
    config[0] = 1; /* palette */
    for (int t = 0; t < 8; t++) {
        config[16 + 2 * t] = TILE_ROW_BYTES;
        config[48 + t] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
static inline void tile_end_all(void)
{
    __asm__ volatile("tilerelease" ::: "memory");
}

#endif
