/* SPDX-License-Identifier: Apache-2.0 */
/* The counted allocator: every allocation of the library and the engine goes through it, so that
 * tests can assert "run allocates nothing" and peaks, and an optional limit makes an out-of-memory
 * case reproducible. Thread-safe. */
#ifndef DCP_BASE_ALLOC_PRIV_H
#define DCP_BASE_ALLOC_PRIV_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status_priv.h"

/* Zeroed, 64-byte aligned. what names the thing in the error ("merge workspace"). n_bytes = 0 gives
 * a valid pointer to free. From 2 MiB on: mmap, 2 MiB aligned, MADV_HUGEPAGE. */
dcp_status dcp__alloc(size_t n_bytes, const char *what, void **ptr_out);
/* n * elem_bytes with overflow check. */
dcp_status dcp__alloc_array(size_t n, size_t elem_bytes, const char *what, void **ptr_out);
void dcp__free(void *ptr); /* takes NULL */

/* Account for memory that came another way (shared mappings, reserved address space as it is
 * committed). */
dcp_status dcp__alloc_note(size_t n_bytes, const char *what); /* may fail at the limit */
void dcp__alloc_forget(size_t n_bytes);

size_t dcp__alloc_current(void);
size_t dcp__alloc_peak(void);
size_t dcp__alloc_calls(void); /* number of allocations ever */
void dcp__alloc_reset_peak(void);
/* DCP_ERR_ARG, saying what would be right, where DCP_ATTN_MEMORY_LIMIT is no number of bytes: then
 * every allocation fails so. */
dcp_status dcp__alloc_check_limit(void);
/* 0 = none. DCP_ATTN_MEMORY_LIMIT sets it from outside at the first allocation. */
void dcp__alloc_set_limit(size_t n_bytes);
size_t dcp__alloc_limit(void);

bool dcp__mul_overflow(size_t a, size_t b, size_t *product_out);
bool dcp__add_overflow(size_t a, size_t b, size_t *sum_out);

#endif
