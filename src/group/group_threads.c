/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are threads of one process: the control block is plain memory and every address is visible.
 * What a rank has allocated stays until the last handle is destroyed, since peers may still read it
 * when this rank has given up. */
#include <pthread.h>

#include "base/alloc_priv.h"
#include "group/group_mem_priv.h"

/* In front of the control block, one for all handles. */
struct threads_shared {
    struct dcp__mem_core *core;
    pthread_mutex_t lock;
    struct dcp__local_alloc *orphans;
};

static dcp_status threads_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    void *ptr = NULL;
    const dcp_status own = dcp__local_alloc(g, n_bytes, &ptr);
    const int32_t own_code = (int32_t)own;
    int32_t *const codes = g->scratch;
    const dcp_status st = dcp__mem_record(g, &own_code, sizeof(own_code), codes);
    if (st == DCP_OK && own == DCP_OK) {
        int failed = -1;
        for (int r = 0; r < g->size && failed < 0; r++) {
            if (codes[r] != DCP_OK) failed = r;
        }
        if (failed < 0) {
            *ptr_out = ptr;
            return DCP_OK;
        }
        dcp__local_free(g, ptr);
        return dcp__fail((dcp_status)codes[failed], "alloc: rank %d could not get its group memory",
                         failed);
    }
    if (ptr != NULL) dcp__local_free(g, ptr);
    return st != DCP_OK ? st : own;
}

static void threads_free(dcp_group *g, void *ptr)
{
    /* Not while peers may read it; after a failure it waits for the last destroy. */
    if (dcp__group_is_poisoned(g) || dcp__mem_record(g, NULL, 0, NULL) != DCP_OK) return;
    dcp__local_free(g, ptr);
}

static bool threads_locate(const dcp_group *g, const void *ptr, size_t n_bytes,
                           uint32_t *alloc_id_out, uint64_t *offset_out)
{
    (void)g, (void)n_bytes;
    *alloc_id_out = 0;
    *offset_out = (uint64_t)(uintptr_t)ptr;
    return true;
}

static void *threads_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                              size_t n_bytes)
{
    (void)g, (void)rank, (void)n_bytes;
    return alloc_id == 0 ? (void *)(uintptr_t)offset : NULL;
}

static bool threads_sees(const dcp_group *g, int rank)
{
    (void)g, (void)rank;
    return true;
}

static void shared_destroy(struct threads_shared *shared)
{
    dcp__local_free_list(shared->orphans);
    pthread_mutex_destroy(&shared->lock);
    dcp__free(shared->core);
    dcp__free(shared);
}

static void threads_destroy(dcp_group *g)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct threads_shared *const shared = m->extra;
    pthread_mutex_lock(&shared->lock);
    while (g->allocs != NULL) {
        struct dcp__local_alloc *const node = g->allocs;
        g->allocs = node->next;
        node->next = shared->orphans;
        shared->orphans = node;
    }
    pthread_mutex_unlock(&shared->lock);
    struct dcp__mem_core *const core = m->core;
    dcp__mem_group_fini(m);
    dcp__free(m);
    if (atomic_fetch_sub(&core->n_handles, 1) == 1) shared_destroy(shared);
}

static const struct dcp__group_ops threads_ops = {
    .name = "threads",
    .record = dcp__mem_record,
    .exchange_start = dcp__mem_exchange_start,
    .exchange_test = dcp__mem_exchange_test,
    .exchange_wait = dcp__mem_exchange_wait,
    .allreduce_f32 = dcp__mem_allreduce_f32,
    .alloc = threads_alloc,
    .free = threads_free,
    .locate = threads_locate,
    .peer_ptr = threads_peer_ptr,
    .sees = threads_sees,
    .staging = dcp__mem_staging,
    .set_call = dcp__mem_set_call,
    .destroy = threads_destroy,
};

static dcp_status shared_create(int n, int64_t deadline_ns, struct threads_shared **shared_out)
{
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct threads_shared), "threads group", &mem));
    struct threads_shared *const shared = mem;
    const dcp_status st =
        dcp__alloc(dcp__mem_core_bytes(n), "control block of a threads group", &mem);
    if (st != DCP_OK) {
        dcp__free(shared);
        return st;
    }
    shared->core = mem;
    dcp__mem_core_init(shared->core, n, deadline_ns, false);
    pthread_mutex_init(&shared->lock, NULL);
    *shared_out = shared;
    return DCP_OK;
}

dcp_status dcp_group_create_threads(int n, const dcp_group_opts *opts, dcp_group **groups_out)
{
    if (n < 1 || n > 4096) {
        return dcp__fail(DCP_ERR_ARG, "create_threads: %d ranks; 1 to 4096 are possible", n);
    }
    if (groups_out == NULL) return dcp__fail(DCP_ERR_ARG, "create_threads: groups_out is NULL");
    int64_t deadline_ns;
    DCP_TRY(dcp__group_opts_read(opts, &deadline_ns));
    DCP_TRY(dcp__group_load_fault(n, false));
    struct threads_shared *shared;
    DCP_TRY(shared_create(n, deadline_ns, &shared));
    void *list_mem;
    dcp_status st = dcp__alloc_array((size_t)n, sizeof(dcp_group *), "handles", &list_mem);
    if (st != DCP_OK) goto err_shared;
    dcp_group **const list = list_mem;
    int r = 0;
    for (; r < n; r++) {
        void *mem;
        st = dcp__alloc(sizeof(struct dcp__mem_group), "handle of a threads group", &mem);
        if (st != DCP_OK) goto err_handles;
        struct dcp__mem_group *const m = mem;
        m->extra = shared;
        st = dcp__mem_group_init(m, &threads_ops, r, shared->core);
        if (st != DCP_OK) {
            dcp__free(m);
            goto err_handles;
        }
        list[r] = &m->base;
    }
    atomic_store(&shared->core->n_handles, (uint32_t)n);
    for (r = 0; r < n; r++) groups_out[r] = list[r];
    dcp__free(list_mem);
    return DCP_OK;
err_handles:
    while (r-- > 0) {
        dcp__mem_group_fini(dcp__mem_of(list[r]));
        dcp__free(list[r]);
    }
    dcp__free(list_mem);
err_shared:
    shared_destroy(shared);
    return st;
}
