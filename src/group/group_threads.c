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
    struct threads_shared
        *lost; /* of splits that failed half-way: freed when nobody can be inside */
    struct threads_shared *next_lost;
};

static dcp_status threads_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    void *ptr = NULL;
    const dcp_status own = dcp__local_alloc(g, n_bytes, &ptr);
    const dcp_status st = dcp__group_agree(g, "alloc", own);
    if (st == DCP_OK) {
        *ptr_out = ptr;
    } else if (ptr != NULL) {
        dcp__local_free(g, ptr);
    }
    return st;
}

static void threads_free(dcp_group *g, void *ptr)
{
    /* Not while peers may read it; after a failure it waits for the last destroy. */
    if (dcp__group_is_poisoned(g) || dcp__mem_record(g, NULL, 0, NULL) != DCP_OK) return;
    dcp__local_free(g, ptr);
}

static void shared_destroy(struct threads_shared *shared)
{
    while (shared->lost != NULL) {
        struct threads_shared *const lost = shared->lost;
        shared->lost = lost->next_lost;
        shared_destroy(lost);
    }
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

static dcp_status threads_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out);

static const struct dcp__group_ops threads_ops = {
    .name = "threads",
    .record = dcp__mem_record,
    .exchange_start = dcp__mem_exchange_start,
    .exchange_test = dcp__mem_exchange_test,
    .exchange_wait = dcp__mem_exchange_wait,
    .allreduce_f32 = dcp__mem_allreduce_f32,
    .alloc = threads_alloc,
    .free = threads_free,
    .locate = dcp__any_locate,
    .peer_ptr = dcp__any_peer_ptr,
    .split = threads_split,
    .staging = dcp__mem_staging,
    .set_call = dcp__mem_set_call,
    .destroy = threads_destroy,
    .one_space = true,
};

static dcp_status shared_create(int n, const struct dcp__group_opts *opts,
                                struct threads_shared **shared_out)
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
    dcp__mem_core_init(shared->core, n, opts, false);
    pthread_mutex_init(&shared->lock, NULL);
    *shared_out = shared;
    return DCP_OK;
}

static dcp_status handle_create(struct threads_shared *shared, int rank, dcp_group **group_out)
{
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct dcp__mem_group), "handle of a threads group", &mem));
    struct dcp__mem_group *const m = mem;
    m->extra = shared;
    const dcp_status st = dcp__mem_group_init(m, &threads_ops, rank, shared->core);
    if (st != DCP_OK) {
        dcp__free(m);
        return st;
    }
    *group_out = &m->base;
    return DCP_OK;
}

/* Who has seen the address of a sub-group that failed is not known: keep it with the parent. */
static void keep_lost(dcp_group *g, struct threads_shared *lost)
{
    struct threads_shared *const shared = dcp__mem_of(g)->extra;
    pthread_mutex_lock(&shared->lock);
    lost->next_lost = shared->lost;
    shared->lost = lost;
    pthread_mutex_unlock(&shared->lock);
}

/* The leader of each sub-group makes what its ranks share, the address travels in a record. Beside
 * the handles the leader's hold counts, until all have theirs. */
static dcp_status threads_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    struct told {
        uint64_t address;
        int32_t code;
    } own = {0}, *const all = g->scratch;
    struct threads_shared *made = NULL;
    dcp_group *sub = NULL;
    if (how->leader == g->rank) {
        const struct dcp__group_opts opts = {.deadline_ns = g->deadline_ns};
        own.code = (int32_t)shared_create(how->size, &opts, &made);
        if (made != NULL) atomic_store(&made->core->n_handles, (uint32_t)how->size + 1);
        own.address = (uint64_t)(uintptr_t)made;
    }
    dcp_status st = g->ops->record(g, &own, sizeof(own), all);
    if (st == DCP_OK) {
        struct threads_shared *const shared =
            how->size == 0 ? NULL : (void *)(uintptr_t)all[how->leader].address;
        st = (dcp_status)own.code;
        if (shared != NULL) st = handle_create(shared, how->rank, &sub);
        if (sub != NULL) st = dcp__mem_group_from(dcp__mem_of(sub), dcp__mem_of(g), how);
        st = dcp__group_agree(g, "split", st);
    }
    if (st != DCP_OK) {
        dcp_group_destroy(sub);
        if (made != NULL) keep_lost(g, made);
        return st;
    }
    if (made != NULL) atomic_fetch_sub(&made->core->n_handles, 1);
    *sub_out = sub;
    return DCP_OK;
}

dcp_status dcp_group_create_threads(int n, const dcp_group_opts *opts, dcp_group **groups_out)
{
    if (n < 1 || n > 4096) {
        return dcp__fail(DCP_ERR_ARG, "create_threads: %d ranks; 1 to 4096 are possible", n);
    }
    if (groups_out == NULL) return dcp__fail(DCP_ERR_ARG, "create_threads: groups_out is NULL");
    struct dcp__group_opts mine;
    DCP_TRY(dcp__group_opts_read(opts, &mine));
    DCP_TRY(dcp__group_load_fault(n, false));
    struct threads_shared *shared;
    DCP_TRY(shared_create(n, &mine, &shared));
    void *list_mem;
    dcp_status st = dcp__alloc_array((size_t)n, sizeof(dcp_group *), "handles", &list_mem);
    if (st != DCP_OK) goto err_shared;
    dcp_group **const list = list_mem;
    int r = 0;
    for (; r < n; r++) {
        st = handle_create(shared, r, &list[r]);
        if (st != DCP_OK) goto err_handles;
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
