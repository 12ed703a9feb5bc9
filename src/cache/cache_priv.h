/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a cache: the arena of pages (pages.c), the sequences over it (cache.c), what they
 * hold (cache_data.c, convert.c). */
#ifndef DCP_CACHE_CACHE_PRIV_H
#define DCP_CACHE_CACHE_PRIV_H

#include <stdbool.h>

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

struct dcp__cache_seq {
    int64_t length;  /* global */
    int32_t *pages;  /* block table */
    int64_t n_pages; /* in use */
    int64_t cap;
};

struct dcp_cache {
    struct dcp_cache_desc d;
    size_t elem_bytes;
    /* Of one page: bytes of a layer, and where its parts begin; see cache.h. */
    size_t layer_bytes, k_scales_at, v_at, v_scales_at;
    bool has_scales;
    struct dcp__pages pages;
    struct dcp__cache_seq *seqs; /* [max_seqs] */
    int64_t n_tokens;            /* sum of lengths */
};
/* NULL or no such sequence: an error that names the call. */
dcp_status dcp__cache_find_seq(const dcp_cache *c, int64_t seq, const char *call,
                               struct dcp__cache_seq **s_out);
/* Positions of 0..length-1 that this rank owns. */
int64_t dcp__cache_own_length(const dcp_cache *c, int64_t length);
/* Before entry `at` of the block table is written:
 * if others hold the page, put a copy in its place. */
dcp_status dcp__cache_make_private(dcp_cache *c, struct dcp__cache_seq *s, int64_t at);

/* dst[i] = src[i] rounded to nearest even, dst of type t: f32, f16, bf16. */
void dcp__kv_convert(dcp_dtype t, const float *src, void *dst, int64_t n);
/* A row of numbers of type t, int8 or fp8; returns its scale. See dcp_cache_store. */
float dcp__kv_quantise(dcp_dtype t, const float *src, void *dst, int64_t n);
/* Does t have scales? */
static inline bool dcp__kv_has_scales(dcp_dtype t)
{
    return t == DCP_I8 || t == DCP_FP8_E4M3;
}

#endif
