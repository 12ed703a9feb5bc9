/* SPDX-License-Identifier: Apache-2.0 */
/* The control block and the record all-gather. Idea: write the own slot, publish its number, wait
 * for everybody's number; one store and n - 1 loads that hit until a peer writes.
 *
 *          rank 0             rank 1             rank 2
 *   k      slot[k&1][0] = k   slot[k&1][1] = k   slot[k&1][2] = k      each waits for all three
 *   k+1    the other slots
 *
 * Cost: n cache lines move to each rank. Limits: records of DCP__RECORD_MAX bytes. */
#include "group/group_mem_priv.h"

#include <limits.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/futex_priv.h"

enum { PAGE = 4096 };

static size_t clamp_size(size_t value, size_t least, size_t most)
{
    return value < least ? least : value > most ? most : value;
}

static size_t take(size_t *at, size_t n_bytes, size_t align)
{
    const size_t begin = (*at + align - 1) / align * align;
    *at = begin + n_bytes;
    return begin;
}

static void lay_out(struct dcp__mem_core *core, int n_ranks)
{
    const size_t n = (size_t)n_ranks;
    /* Rings grow with the square of n, staging with n: both keep the block at some 12 MiB. */
    core->n = (uint32_t)n;
    core->ring_bytes =
        (uint32_t)(clamp_size(((size_t)8 << 20) / (n * n), 4096, 256 << 10) / PAGE * PAGE);
    core->staging_bytes =
        (uint32_t)(clamp_size(((size_t)4 << 20) / n, 64 << 10, 512 << 10) / PAGE * PAGE);
    size_t at = sizeof(*core);
    core->off_members = take(&at, n * sizeof(struct dcp__mem_member), 64);
    core->off_slots = take(&at, 2 * n * sizeof(struct dcp__mem_slot), 64);
    core->off_ends = take(&at, n * n * sizeof(struct dcp__ring_ends), 64);
    core->off_rings = take(&at, n > 1 ? n * n * core->ring_bytes : 0, PAGE);
    core->off_staging = take(&at, n * core->staging_bytes, PAGE);
    core->total_bytes = take(&at, 0, PAGE);
}

size_t dcp__mem_core_bytes(int n)
{
    struct dcp__mem_core core;
    lay_out(&core, n);
    return core.total_bytes;
}

void dcp__mem_core_init(struct dcp__mem_core *core, int n, const struct dcp__group_opts *opts,
                        bool check_pids)
{
    lay_out(core, n);
    core->deadline_ns = opts->deadline_ns;
    core->ranks_per_host = opts->ranks_per_host;
    core->check_pids = check_pids;
}

dcp_status dcp__mem_group_init(struct dcp__mem_group *m, const struct dcp__group_ops *ops, int rank,
                               struct dcp__mem_core *core)
{
    const size_t n = core->n, most = dcp__xfers_max((int)n);
    DCP_TRY(dcp__group_init(&m->base, ops, rank, (int)n, core->deadline_ns, &core->poison));
    m->core = core;
    m->spin_rounds = (int)n <= dcp__cpu_usable() ? DCP__SPIN_BEGIN : 0;
    void *mem = NULL;
    dcp_status st = dcp__group_set_hosts(&m->base, NULL, (int)core->ranks_per_host);
    if (st != DCP_OK) goto err_base;
    st = dcp__alloc_array(DCP__ALL_SLOTS * 2 * most, sizeof(struct dcp__mem_flow),
                          "open exchanges of a group", &mem);
    if (st != DCP_OK) goto err_base;
    m->flows = mem;
    st = dcp__alloc_array(2 * n, sizeof(uint32_t), "exchange marks of a group", &mem);
    if (st != DCP_OK) goto err_flows;
    m->blocked = mem;
    for (size_t slot = 0; slot < DCP__ALL_SLOTS; slot++) {
        m->open[slot].sends = m->flows + slot * 2 * most;
        m->open[slot].recvs = m->open[slot].sends + most;
    }
    atomic_store(&dcp__mem_member_at(core, rank)->attached, 1);
    return DCP_OK;
err_flows:
    dcp__free(m->flows);
err_base:
    dcp__group_fini(&m->base);
    return st;
}

dcp_status dcp__mem_group_from(struct dcp__mem_group *m, const struct dcp__mem_group *parent,
                               const struct dcp__split *how)
{
    void *mem;
    DCP_TRY(dcp__alloc_array((size_t)how->size, sizeof(int), "ranks of a sub-group", &mem));
    m->root_ranks = mem;
    m->root = parent->root != NULL ? parent->root : parent->core;
    for (int i = 0; i < how->size; i++) {
        const int in_parent = how->members[i];
        m->root_ranks[i] = parent->root != NULL ? parent->root_ranks[in_parent] : in_parent;
    }
    return dcp__group_set_hosts(&m->base, how->host_of, 0);
}

void dcp__mem_group_fini(struct dcp__mem_group *m)
{
    atomic_store(&dcp__mem_member_at(m->core, m->base.rank)->left, 1);
    dcp__free(m->root_ranks);
    dcp__free(m->blocked);
    dcp__free(m->flows);
    dcp__group_fini(&m->base);
}

static bool record_awaited(struct dcp__mem_group *m, int rank, const void *ctx)
{
    const uint32_t record = *(const uint32_t *)ctx;
    return atomic_load_explicit(&dcp__mem_slot_at(m->core, record, rank)->seq,
                                memory_order_acquire) != record;
}

static dcp_status await_slot(struct dcp__mem_group *m, struct dcp__wait *w, int rank,
                             uint32_t record)
{
    struct dcp__mem_slot *const slot = dcp__mem_slot_at(m->core, record, rank);
    _Atomic uint32_t *const waits = &dcp__mem_member_at(m->core, m->base.rank)->waits;
    while (atomic_load_explicit(&slot->seq, memory_order_acquire) != record) {
        const enum dcp__wait_step step = dcp__wait_next(w, m->spin_rounds);
        if (step == DCP__WAIT_AGAIN) {
            /* A peer may have arrived first and given up after: its arrival counts. */
            if (dcp__group_is_poisoned(&m->base) && record_awaited(m, rank, &record)) {
                return dcp__group_poison_status(&m->base);
            }
            continue;
        }
        atomic_store_explicit(waits, (uint32_t)rank * 4 + DCP__WAITS_RECORD, memory_order_relaxed);
        DCP_TRY(dcp__mem_check(m, w, record_awaited, &record));
        /* The owner stores seq, then looks for sleepers; here the other way round. */
        atomic_fetch_add(&slot->n_sleepers, 1);
        const uint32_t seen = atomic_load(&slot->seq);
        if (seen != record) dcp__futex_wait(&slot->seq, seen, DCP__WAIT_SLICE_NS);
        atomic_fetch_sub(&slot->n_sleepers, 1);
    }
    atomic_store_explicit(waits, DCP__WAITS_NOT, memory_order_relaxed);
    return DCP_OK;
}

dcp_status dcp__mem_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct dcp__mem_core *const core = m->core;
    const uint32_t record = ++m->record_no;
    struct dcp__mem_slot *const own = dcp__mem_slot_at(core, record, g->rank);
    own->n_bytes = (uint32_t)n_bytes;
    if (n_bytes > 0) memcpy(own->data, send, n_bytes);
    atomic_store(&own->seq, record);
    if (atomic_load(&own->n_sleepers) != 0) dcp__futex_wake(&own->seq, INT_MAX);

    struct dcp__wait w = {0};
    for (int i = 1; i < g->size; i++) {
        const int r = g->rank + i < g->size ? g->rank + i : g->rank + i - g->size;
        struct dcp__mem_slot *const slot = dcp__mem_slot_at(core, record, r);
        if (atomic_load_explicit(&slot->seq, memory_order_acquire) != record) {
            DCP_TRY(await_slot(m, &w, r, record));
        }
    }
    m->spin_rounds = dcp__wait_learn(&w, m->spin_rounds);
    /* Everybody sees the same sizes, so everybody fails and nothing needs to be poisoned. */
    const uint32_t first_bytes = dcp__mem_slot_at(core, record, 0)->n_bytes;
    for (int r = 1; r < g->size; r++) {
        const uint32_t r_bytes = dcp__mem_slot_at(core, record, r)->n_bytes;
        if (r_bytes != first_bytes) {
            return dcp__fail(DCP_ERR_MISMATCH, "%s: rank 0 gives %u bytes, rank %d gives %u",
                             dcp__call_name((uint32_t)g->call), first_bytes, r, r_bytes);
        }
    }
    if (n_bytes > 0) {
        for (int r = 0; r < g->size; r++) {
            memcpy((char *)recv + (size_t)r * n_bytes, dcp__mem_slot_at(core, record, r)->data,
                   n_bytes);
        }
    }
    return DCP_OK;
}

void *dcp__mem_staging(const dcp_group *g, int rank, size_t *n_bytes_out)
{
    struct dcp__mem_core *const core = ((const struct dcp__mem_group *)g)->core;
    *n_bytes_out = core->staging_bytes;
    return (char *)core + core->off_staging + (size_t)rank * core->staging_bytes;
}

void dcp__mem_set_call(dcp_group *g, enum dcp__call call)
{
    struct dcp__mem_core *const core = dcp__mem_of(g)->core;
    atomic_store_explicit(&dcp__mem_member_at(core, g->rank)->call, (uint32_t)call,
                          memory_order_relaxed);
}
