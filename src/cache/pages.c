/* SPDX-License-Identifier: Apache-2.0 */
/* The arena: reserve once, commit by growing the accessible part of the same mapping, so that no
 * page ever moves. The kernel backs only whole huge pages that lie inside the accessible part, so a
 * small arena stays on 4 KiB pages (its bytes are what its pages hold) and a large one gets huge
 * pages without being asked for more memory than it uses. One that became whole in several steps,
 * and was touched between them, is put together then. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/huge_priv.h"
#include "cache/cache_priv.h"

/* Above this, commit in huge pages: the overshoot is at most a sixteenth. */
static const size_t huge_bytes = DCP__HUGE_PAGE;
static const size_t commit_huge_from_bytes = (size_t)32 << 20;

dcp_status dcp__pages_init(struct dcp__pages *p, size_t page_bytes, int64_t n_pages)
{
    memset(p, 0, sizeof(*p));
    size_t bytes, with_slack;
    if (n_pages > INT32_MAX || dcp__mul_overflow(page_bytes, (size_t)n_pages, &bytes) ||
        dcp__add_overflow(bytes, 2 * huge_bytes, &with_slack)) {
        return dcp__fail(DCP_ERR_ARG,
                         "KV cache: %lld pages of %zu bytes are more than can be addressed; lower "
                         "max_tokens",
                         (long long)n_pages, page_bytes);
    }
    p->page_bytes = page_bytes;
    p->n_pages = n_pages;
    p->reserved_bytes = (bytes + huge_bytes - 1) / huge_bytes * huge_bytes;
    char *raw = mmap(NULL, p->reserved_bytes + huge_bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        const int err = errno;
        memset(p, 0, sizeof(*p));
        return dcp__fail(DCP_ERR_NOMEM, "KV cache: no address space for %zu bytes: %s", bytes,
                         strerror(err));
    }
    const size_t lead = (huge_bytes - (uintptr_t)raw % huge_bytes) % huge_bytes;
    if (lead > 0) munmap(raw, lead);
    if (lead < huge_bytes) munmap(raw + lead + p->reserved_bytes, huge_bytes - lead);
    p->base = raw + lead;
    /* A wish: without huge pages everything works, slower. */
    (void)madvise(p->base, p->reserved_bytes, MADV_HUGEPAGE);
    void *ptr;
    dcp_status st = dcp__alloc_array((size_t)n_pages, sizeof(int32_t), "KV page list", &ptr);
    if (st == DCP_OK) {
        p->free_list = ptr;
        st = dcp__alloc_array((size_t)n_pages, sizeof(int32_t), "KV page references", &ptr);
    }
    if (st != DCP_OK) {
        dcp__pages_fini(p);
        return st;
    }
    p->refs = ptr;
    return DCP_OK;
}

void dcp__pages_fini(struct dcp__pages *p)
{
    if (p->base != NULL) {
        munmap(p->base, p->reserved_bytes);
        dcp__alloc_forget(p->committed_bytes);
    }
    dcp__free(p->free_list);
    dcp__free(p->refs);
    memset(p, 0, sizeof(*p));
}

/* Make the first n_pages accessible. */
static dcp_status commit(struct dcp__pages *p, int64_t n_pages)
{
    const size_t need = (size_t)n_pages * p->page_bytes;
    if (need <= p->committed_bytes) return DCP_OK;
    const size_t step = need >= commit_huge_from_bytes ? huge_bytes : (size_t)sysconf(_SC_PAGESIZE);
    const size_t upto = (need + step - 1) / step * step; /* <= reserved, a multiple of 2 MiB */
    const size_t more = upto - p->committed_bytes;
    DCP_TRY(dcp__alloc_note(more, "KV cache pages"));
    if (mprotect(p->base, upto, PROT_READ | PROT_WRITE) != 0) {
        const int err = errno;
        dcp__alloc_forget(more);
        return dcp__fail(DCP_ERR_NOMEM, "KV cache: %zu more bytes after %zu: %s", more,
                         p->committed_bytes, strerror(err));
    }
    char *const last = p->base + p->committed_bytes / huge_bytes * huge_bytes;
    if (p->committed_bytes % huge_bytes != 0 && p->base + upto >= last + huge_bytes)
        dcp__huge_collapse(last);
    p->committed_bytes = upto;
    return DCP_OK;
}

dcp_status dcp__pages_take(struct dcp__pages *p, int64_t n, int32_t *ids_out)
{
    const int64_t fresh = n > p->n_free ? n - p->n_free : 0;
    if (fresh > p->n_pages - p->n_fresh) {
        return dcp__fail(DCP_ERR_NOMEM, "KV cache is full: %lld of %lld pages in use, %lld wanted",
                         (long long)(p->n_fresh - p->n_free), (long long)p->n_pages, (long long)n);
    }
    DCP_TRY(commit(p, p->n_fresh + fresh));
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = p->n_free > 0 ? p->free_list[--p->n_free] : (int32_t)p->n_fresh++;
        p->refs[id] = 1;
        ids_out[i] = id;
    }
    return DCP_OK;
}

void dcp__pages_drop(struct dcp__pages *p, int32_t id)
{
    if (--p->refs[id] == 0) p->free_list[p->n_free++] = id;
}
