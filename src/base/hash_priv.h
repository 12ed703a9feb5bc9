/* SPDX-License-Identifier: Apache-2.0 */
/* FNV-1a of 64 bits: whether ranks hold the same. Finds mistakes, not those made on purpose. */
#ifndef DCP_BASE_HASH_PRIV_H
#define DCP_BASE_HASH_PRIV_H

#include <stddef.h>
#include <stdint.h>

#define DCP__HASH_BEGIN UINT64_C(0xcbf29ce484222325)

/* One value at once, where bytes one by one would take too long. */
static inline uint64_t dcp__hash_value(uint64_t h, uint64_t x)
{
    return (h ^ x) * UINT64_C(0x100000001b3);
}
static inline uint64_t dcp__hash_bytes(uint64_t h, const void *bytes, size_t n_bytes)
{
    const unsigned char *b = bytes;
    for (size_t i = 0; i < n_bytes; i++) h = dcp__hash_value(h, b[i]);
    return h;
}

#endif
