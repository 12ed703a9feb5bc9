/* SPDX-License-Identifier: Apache-2.0 */
/* Huge pages: asked for, and counted. */
#ifndef DCP_BASE_HUGE_PRIV_H
#define DCP_BASE_HUGE_PRIV_H

#include <stddef.h>

#define DCP__HUGE_PAGE ((size_t)2 << 20)

/* Bytes of [at, at + n_bytes) that lie on huge pages now, by what the kernel says of the mappings
 * that this range covers (a mapping that reaches beyond counts with what may lie inside); 0 where
 * it says nothing. */
size_t dcp__huge_bytes(const void *at, size_t n_bytes);
/* Make one huge page of a whole aligned one that is in small pages; a wish. */
void dcp__huge_collapse(void *at);

#endif
