/* SPDX-License-Identifier: Apache-2.0 */
/* Each block is preceded by a header of 64 bytes that knows how to give it back:
 *   small  [header 64][payload]                               one aligned malloc
 *   large  [.. page with header in its last 64 bytes][payload at a multiple of 2 MiB]   one mmap */
#include "base/alloc_priv.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BLOCK_ALIGN = 64, PAGE = 4096 };
static const size_t huge_page = (size_t)2 << 20;
/* From here on the payload may have a huge page. What is left behind its last whole one has pages
 * of 4 KiB: beyond n_bytes the rest of the last of those is taken, and one for the header.
 * (Absorbed MLA's workspace for a token, 3.5 MiB: a call after other work took 3 to 6% longer in
 * pages of 4 KiB, whose translations were gone.) */
static const size_t large_bytes = (size_t)2 << 20;
static const uint64_t block_magic = UINT64_C(0x6463705f626c6f63);

struct block_header {
    uint64_t magic;
    size_t n_bytes;
    void *map_base; /* NULL: from malloc */
    size_t map_bytes;
    char padding[32];
};
_Static_assert(sizeof(struct block_header) == BLOCK_ALIGN, "the payload follows the header");

static atomic_size_t current_bytes, peak_bytes, n_calls, limit_bytes;

bool dcp__mul_overflow(size_t a, size_t b, size_t *product_out)
{
    return __builtin_mul_overflow(a, b, product_out);
}

bool dcp__add_overflow(size_t a, size_t b, size_t *sum_out)
{
    return __builtin_add_overflow(a, b, sum_out);
}

/* DCP_ATTN_MEMORY_LIMIT: bytes with K, M or G (powers of 1024), the limit of this process from its
 * first allocation on, until dcp__alloc_set_limit says another. */
static pthread_once_t env_once = PTHREAD_ONCE_INIT;
static bool env_is_bad;

static void read_env_limit(void)
{
    const char *text = getenv("DCP_ATTN_MEMORY_LIMIT");
    if (text == NULL || text[0] == '\0') return;
    char *end = NULL;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    static const char units[] = "KMG";
    const char *const unit = *end != '\0' ? strchr(units, *end) : NULL;
    size_t bytes = 0;
    env_is_bad =
        errno != 0 || end == text || text[0] == '-' || (unit == NULL && *end != '\0') ||
        (unit != NULL && end[1] != '\0') ||
        dcp__mul_overflow(n, (size_t)1 << (unit != NULL ? 10 * (unit - units + 1) : 0), &bytes);
    size_t none = 0;
    if (!env_is_bad) (void)atomic_compare_exchange_strong(&limit_bytes, &none, bytes);
}

dcp_status dcp__alloc_check_limit(void)
{
    (void)pthread_once(&env_once, read_env_limit);
    if (!env_is_bad) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "DCP_ATTN_MEMORY_LIMIT is \"%s\"; it must be bytes, with K, M or G or "
                     "without",
                     getenv("DCP_ATTN_MEMORY_LIMIT"));
}

dcp_status dcp__alloc_note(size_t n_bytes, const char *what)
{
    DCP_TRY(dcp__alloc_check_limit());
    const size_t limit = atomic_load_explicit(&limit_bytes, memory_order_relaxed);
    const size_t before = atomic_fetch_add_explicit(&current_bytes, n_bytes, memory_order_relaxed);
    const size_t now = before + n_bytes;
    if (limit != 0 && now > limit) {
        atomic_fetch_sub_explicit(&current_bytes, n_bytes, memory_order_relaxed);
        return dcp__fail(DCP_ERR_NOMEM, "%s: %zu bytes wanted, %zu of the limit of %zu in use",
                         what, n_bytes, before, limit);
    }
    size_t peak = atomic_load_explicit(&peak_bytes, memory_order_relaxed);
    while (now > peak && !atomic_compare_exchange_weak_explicit(
                             &peak_bytes, &peak, now, memory_order_relaxed, memory_order_relaxed)) {
    }
    atomic_fetch_add_explicit(&n_calls, 1, memory_order_relaxed);
    return DCP_OK;
}

void dcp__alloc_forget(size_t n_bytes)
{
    atomic_fetch_sub_explicit(&current_bytes, n_bytes, memory_order_relaxed);
}

static void *map_large(size_t n_bytes, void **base_out, size_t *map_bytes_out)
{
    size_t map_bytes;
    if (dcp__add_overflow(n_bytes, huge_page + PAGE, &map_bytes)) return NULL;
    char *base = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    /* The header needs a page before the aligned start; what lies before that is returned. */
    const uintptr_t start = ((uintptr_t)base + PAGE + huge_page - 1) / huge_page * huge_page;
    char *const payload = base + (start - (uintptr_t)base);
    char *const first = payload - PAGE;
    if (first > base) munmap(base, (size_t)(first - base));
    char *const end = payload + (n_bytes + PAGE - 1) / PAGE * PAGE;
    if (base + map_bytes > end) munmap(end, (size_t)(base + map_bytes - end));
    (void)madvise(payload, (size_t)(end - payload), MADV_HUGEPAGE); /* a wish */
    *base_out = first;
    *map_bytes_out = (size_t)(end - first);
    return payload;
}

dcp_status dcp__alloc(size_t n_bytes, const char *what, void **ptr_out)
{
    DCP_TRY(dcp__alloc_note(n_bytes, what));
    char *payload = NULL;
    void *base = NULL;
    size_t map_bytes = 0;
    if (n_bytes >= large_bytes) {
        payload = map_large(n_bytes, &base, &map_bytes);
    } else {
        void *block = NULL;
        if (posix_memalign(&block, BLOCK_ALIGN, sizeof(struct block_header) + n_bytes) == 0) {
            payload = (char *)block + sizeof(struct block_header);
            memset(payload, 0, n_bytes);
        }
    }
    if (payload == NULL) {
        dcp__alloc_forget(n_bytes);
        return dcp__fail(DCP_ERR_NOMEM, "%s: the system has no %zu bytes", what, n_bytes);
    }
    struct block_header *const header = (struct block_header *)(void *)(payload - sizeof(*header));
    *header = (struct block_header){
        .magic = block_magic, .n_bytes = n_bytes, .map_base = base, .map_bytes = map_bytes};
    *ptr_out = payload;
    return DCP_OK;
}

dcp_status dcp__alloc_array(size_t n, size_t elem_bytes, const char *what, void **ptr_out)
{
    size_t n_bytes;
    if (dcp__mul_overflow(n, elem_bytes, &n_bytes)) {
        return dcp__fail(DCP_ERR_NOMEM, "%s: %zu elements of %zu bytes exceed the address space",
                         what, n, elem_bytes);
    }
    return dcp__alloc(n_bytes, what, ptr_out);
}

void dcp__free(void *ptr)
{
    if (ptr == NULL) return;
    struct block_header *const header =
        (struct block_header *)(void *)((char *)ptr - sizeof(*header));
    assert(header->magic == block_magic);
    header->magic = 0;
    dcp__alloc_forget(header->n_bytes);
    if (header->map_base != NULL) {
        munmap(header->map_base, header->map_bytes);
    } else {
        free(header);
    }
}

size_t dcp__alloc_current(void)
{
    return atomic_load_explicit(&current_bytes, memory_order_relaxed);
}

size_t dcp__alloc_peak(void)
{
    return atomic_load_explicit(&peak_bytes, memory_order_relaxed);
}

size_t dcp__alloc_calls(void)
{
    return atomic_load_explicit(&n_calls, memory_order_relaxed);
}

void dcp__alloc_reset_peak(void)
{
    atomic_store_explicit(&peak_bytes, dcp__alloc_current(), memory_order_relaxed);
}

void dcp__alloc_set_limit(size_t n_bytes)
{
    atomic_store_explicit(&limit_bytes, n_bytes, memory_order_relaxed);
}

size_t dcp__alloc_limit(void)
{
    (void)pthread_once(&env_once, read_env_limit);
    return atomic_load_explicit(&limit_bytes, memory_order_relaxed);
}
