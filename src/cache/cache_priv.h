/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a cache: the arena of pages (pages.c) and the sequences over it (cache.c). */
#ifndef DCP_CACHE_CACHE_PRIV_H
#define DCP_CACHE_CACHE_PRIV_H

#include "base/status_priv.h"
#include "dcpattn/cache.h"

/* Pages in one reserved stretch of address space, committed from the front.
 *
 *     base                                                     base + reserved_bytes
 *     | page 0 | page 1 | ... | page n_fresh-1 |   committed   |   PROT_NONE   |
 *
 * Pages are handed out lowest first, then from the free list, so what is committed is dense: it
 * exceeds the pages ever in use at one time by less than one system page, or by less than one huge
 * page (2 MiB) once the arena is so large that this is under a sixteenth. */
struct dcp__pages {
    char *base; /* 2 MiB aligned */
    size_t page_bytes, reserved_bytes, committed_bytes;
    int64_t n_pages; /* that fit the reservation */
    int64_t n_fresh; /* pages handed out at least once */
    int64_t n_free;
    int32_t *free_list; /* [n_pages] stack */
    int32_t *refs;      /* [n_pages] sequences that hold the page */
};
dcp_status dcp__pages_init(struct dcp__pages *p, size_t page_bytes, int64_t n_pages);
void dcp__pages_fini(struct dcp__pages *p); /* takes a zeroed one */
/* n pages with one reference each; all or none. */
dcp_status dcp__pages_take(struct dcp__pages *p, int64_t n, int32_t *ids_out);
void dcp__pages_drop(struct dcp__pages *p, int32_t id);
static inline char *dcp__page_at(const struct dcp__pages *p, int32_t id)
{
    return p->base + (size_t)id * p->page_bytes;
}

/* dst[i] = src[i] rounded to nearest even, dst of type t. */
void dcp__kv_convert(dcp_dtype t, const float *src, void *dst, int64_t n);

#endif
