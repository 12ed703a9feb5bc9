/* SPDX-License-Identifier: Apache-2.0 */
/* Nonblocking messages through one byte ring per ordered pair of ranks (single producer, single
 * consumer). A message is an 8-byte size and its payload; a ring carries the messages of its pair
 * in the order they were started, whatever slot they belong to. A call moves what fits and returns.
 * Cost: two copies. Scratch: the rings, made with the group. */
#include <limits.h>
#include <string.h>

#include "base/futex_priv.h"
#include "group/group_mem_priv.h"

enum { HEADER_BYTES = 8 };

static struct dcp__ring_ends *ends_at(struct dcp__mem_core *core, int from, int to)
{
    return (struct dcp__ring_ends *)(void *)((char *)core + core->off_ends) +
           (size_t)from * core->n + (size_t)to;
}

static char *ring_at(struct dcp__mem_core *core, int from, int to)
{
    return (char *)core + core->off_rings +
           ((size_t)from * core->n + (size_t)to) * core->ring_bytes;
}

static void ring_bell(struct dcp__mem_core *core, int rank)
{
    struct dcp__mem_member *const member = dcp__mem_member_at(core, rank);
    if (atomic_load(&member->bell_sleepers) == 0) return;
    atomic_fetch_add(&member->bell, 1);
    dcp__futex_wake(&member->bell, INT_MAX);
}

static void ring_write(char *ring, uint32_t ring_bytes, uint64_t at, const void *src, size_t n)
{
    const size_t pos = (size_t)(at % ring_bytes);
    const size_t first = n < ring_bytes - pos ? n : ring_bytes - pos;
    memcpy(ring + pos, src, first);
    memcpy(ring, (const char *)src + first, n - first);
}

static void ring_read(const char *ring, uint32_t ring_bytes, uint64_t at, void *dst, size_t n)
{
    const size_t pos = (size_t)(at % ring_bytes);
    const size_t first = n < ring_bytes - pos ? n : ring_bytes - pos;
    memcpy(dst, ring + pos, first);
    memcpy((char *)dst + first, ring, n - first);
}

/* Pieces of a quarter of the ring let the other side work at the same time. */
static size_t piece(const struct dcp__mem_core *core, uint64_t room, uint64_t left)
{
    uint64_t n = room < left ? room : left;
    if (n > core->ring_bytes / 4) n = core->ring_bytes / 4;
    return (size_t)n;
}

/* Returns true if anything moved. */
static bool push(struct dcp__mem_group *m, struct dcp__mem_flow *f)
{
    struct dcp__mem_core *const core = m->core;
    struct dcp__ring_ends *const ends = ends_at(core, m->base.rank, f->peer);
    char *const ring = ring_at(core, m->base.rank, f->peer);
    uint64_t tail = atomic_load_explicit(&ends->tail, memory_order_relaxed);
    const uint64_t total = HEADER_BYTES + f->n_bytes;
    bool moved = false;
    while (f->done_bytes < total) {
        const uint64_t head = atomic_load_explicit(&ends->head, memory_order_acquire);
        const uint64_t room = core->ring_bytes - (tail - head);
        if (f->done_bytes == 0) {
            if (room < HEADER_BYTES) break;
            ring_write(ring, core->ring_bytes, tail, &f->n_bytes, HEADER_BYTES);
            tail += HEADER_BYTES;
            f->done_bytes = HEADER_BYTES;
            if (room == HEADER_BYTES) atomic_store(&ends->tail, tail);
            moved = true;
            continue;
        }
        const size_t n = piece(core, room, total - f->done_bytes);
        if (n == 0) break;
        ring_write(ring, core->ring_bytes, tail, f->buf + (f->done_bytes - HEADER_BYTES), n);
        tail += n;
        f->done_bytes += n;
        moved = true;
        atomic_store(&ends->tail, tail);
    }
    if (moved) {
        atomic_store(&ends->tail, tail);
        ring_bell(core, f->peer);
    }
    return moved;
}

static dcp_status pull(struct dcp__mem_group *m, struct dcp__mem_flow *f, bool *moved_out)
{
    struct dcp__mem_core *const core = m->core;
    struct dcp__ring_ends *const ends = ends_at(core, f->peer, m->base.rank);
    const char *const ring = ring_at(core, f->peer, m->base.rank);
    uint64_t head = atomic_load_explicit(&ends->head, memory_order_relaxed);
    const uint64_t total = HEADER_BYTES + f->n_bytes;
    bool moved = false;
    while (f->done_bytes < total) {
        const uint64_t filled = atomic_load_explicit(&ends->tail, memory_order_acquire) - head;
        if (f->done_bytes == 0) {
            if (filled < HEADER_BYTES) break;
            uint64_t sent_bytes;
            ring_read(ring, core->ring_bytes, head, &sent_bytes, HEADER_BYTES);
            if (sent_bytes != f->n_bytes) {
                return dcp__group_poison(&m->base, DCP_ERR_MISMATCH,
                                         "exchange: rank %d sends %llu bytes, rank %d expects %llu",
                                         f->peer, (unsigned long long)sent_bytes, m->base.rank,
                                         (unsigned long long)f->n_bytes);
            }
            head += HEADER_BYTES;
            f->done_bytes = HEADER_BYTES;
            moved = true;
            continue;
        }
        const size_t n = piece(core, filled, total - f->done_bytes);
        if (n == 0) break;
        ring_read(ring, core->ring_bytes, head, f->buf + (f->done_bytes - HEADER_BYTES), n);
        head += n;
        f->done_bytes += n;
        moved = true;
        atomic_store(&ends->head, head);
    }
    if (moved) {
        atomic_store(&ends->head, head);
        ring_bell(core, f->peer);
    }
    *moved_out = moved;
    return DCP_OK;
}

static int take_flows(struct dcp__mem_flow *flows, const struct dcp__xfer *x, int n)
{
    int n_flows = 0;
    for (int i = 0; i < n; i++) {
        if (x[i].n_bytes == 0) continue;
        flows[n_flows++] = (struct dcp__mem_flow){
            .peer = x[i].peer, .buf = x[i].buf, .n_bytes = x[i].n_bytes, .done_bytes = 0};
    }
    return n_flows;
}

dcp_status dcp__mem_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                   int n_sends, const struct dcp__xfer *recvs, int n_recvs)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct dcp__mem_open *const o = &m->open[slot];
    if (o->is_open) return dcp__fail(DCP_ERR_ARG, "exchange slot %u is still open", slot);
    o->n_sends = take_flows(o->sends, sends, n_sends);
    o->n_recvs = take_flows(o->recvs, recvs, n_recvs);
    o->n_left = o->n_sends + o->n_recvs;
    o->number = m->n_started++;
    o->is_open = true;
    bool done;
    return dcp__mem_exchange_test(g, slot, &done); /* get going */
}

static bool flow_done(const struct dcp__mem_flow *f)
{
    return f->done_bytes == HEADER_BYTES + f->n_bytes;
}

/* Move what can be moved of one open exchange; a direction with an older unfinished message waits.
 */
static dcp_status move_open(struct dcp__mem_group *m, struct dcp__mem_open *o, bool *moved_out)
{
    uint32_t *const send_blocked = m->blocked;
    uint32_t *const recv_blocked = m->blocked + m->base.size;
    for (int i = 0; i < o->n_sends; i++) {
        struct dcp__mem_flow *const f = &o->sends[i];
        if (flow_done(f) || send_blocked[f->peer] == m->pass) continue;
        if (push(m, f)) *moved_out = true;
        if (flow_done(f)) {
            o->n_left--;
        } else {
            send_blocked[f->peer] = m->pass;
        }
    }
    for (int i = 0; i < o->n_recvs; i++) {
        struct dcp__mem_flow *const f = &o->recvs[i];
        if (flow_done(f) || recv_blocked[f->peer] == m->pass) continue;
        bool moved = false;
        DCP_TRY(pull(m, f, &moved));
        if (moved) *moved_out = true;
        if (flow_done(f)) {
            o->n_left--;
        } else {
            recv_blocked[f->peer] = m->pass;
        }
    }
    return DCP_OK;
}

/* One pass over the open slots, oldest first. */
static dcp_status move_all(struct dcp__mem_group *m, bool *moved_out)
{
    if (++m->pass == 0) m->pass = 1;
    *moved_out = false;
    struct dcp__mem_open *order[DCP__ALL_SLOTS];
    int n_open = 0;
    for (int slot = 0; slot < DCP__ALL_SLOTS; slot++) {
        struct dcp__mem_open *const o = &m->open[slot];
        if (!o->is_open || o->n_left == 0) continue;
        int at = n_open++;
        for (; at > 0 && (int32_t)(order[at - 1]->number - o->number) > 0; at--) {
            order[at] = order[at - 1];
        }
        order[at] = o;
    }
    for (int i = 0; i < n_open; i++) DCP_TRY(move_open(m, order[i], moved_out));
    return DCP_OK;
}

dcp_status dcp__mem_exchange_test(dcp_group *g, unsigned slot, bool *done_out)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct dcp__mem_open *const o = &m->open[slot];
    bool moved;
    if (o->is_open && o->n_left > 0) {
        DCP_TRY(move_all(m, &moved));
        if (o->n_left > 0 && dcp__group_is_poisoned(g)) return dcp__group_poison_status(g);
    }
    *done_out = o->n_left == 0;
    if (*done_out) o->is_open = false;
    return DCP_OK;
}

static uint64_t ring_holds(struct dcp__mem_core *core, int from, int to)
{
    const struct dcp__ring_ends *ends = ends_at(core, from, to);
    const uint64_t head = atomic_load(&ends->head); /* first: it never passes the tail */
    return atomic_load(&ends->tail) - head;
}

/* A peer is awaited while a message with it is unfinished and its ring has nothing to move. */
static bool exchange_awaited(struct dcp__mem_group *m, int rank, const void *ctx)
{
    const struct dcp__mem_open *const o = ctx;
    for (int i = 0; i < o->n_recvs; i++) {
        if (o->recvs[i].peer != rank || flow_done(&o->recvs[i])) continue;
        if (ring_holds(m->core, rank, m->base.rank) == 0) return true;
    }
    for (int i = 0; i < o->n_sends; i++) {
        if (o->sends[i].peer != rank || flow_done(&o->sends[i])) continue;
        if (ring_holds(m->core, m->base.rank, rank) == m->core->ring_bytes) return true;
    }
    return false;
}

/* What the exchange waits for first, for the others to see. */
static uint32_t exchange_waits(const struct dcp__mem_open *o)
{
    for (int i = 0; i < o->n_recvs; i++) {
        if (!flow_done(&o->recvs[i])) return (uint32_t)o->recvs[i].peer * 4 + DCP__WAITS_DATA;
    }
    for (int i = 0; i < o->n_sends; i++) {
        if (!flow_done(&o->sends[i])) return (uint32_t)o->sends[i].peer * 4 + DCP__WAITS_ROOM;
    }
    return DCP__WAITS_NOT;
}

int dcp__mem_waits_for(struct dcp__mem_core *core, int rank)
{
    const uint32_t waits = atomic_load(&dcp__mem_member_at(core, rank)->waits);
    const int peer = (int)(waits / 4);
    bool has_reason = false;
    if (waits % 4 == DCP__WAITS_DATA) has_reason = ring_holds(core, peer, rank) == 0;
    if (waits % 4 == DCP__WAITS_ROOM) /* what does not fit may be a header */
        has_reason = ring_holds(core, rank, peer) + HEADER_BYTES > core->ring_bytes;
    if (waits % 4 == DCP__WAITS_RECORD) {
        const uint32_t even = atomic_load(&dcp__mem_slot_at(core, 0, rank)->seq);
        const uint32_t odd = atomic_load(&dcp__mem_slot_at(core, 1, rank)->seq);
        const uint32_t last = (int32_t)(odd - even) > 0 ? odd : even;
        has_reason = atomic_load(&dcp__mem_slot_at(core, last, peer)->seq) != last;
    }
    return has_reason ? peer : -1;
}

dcp_status dcp__mem_exchange_wait(dcp_group *g, unsigned slot)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct dcp__mem_open *const o = &m->open[slot];
    struct dcp__mem_member *const self = dcp__mem_member_at(m->core, g->rank);
    struct dcp__wait w = {0};
    while (o->is_open && o->n_left > 0) {
        bool moved;
        DCP_TRY(move_all(m, &moved));
        if (moved) {
            w = (struct dcp__wait){0}; /* the deadline counts from the last progress */
            continue;
        }
        if (dcp__wait_next(&w, m->spin_rounds) == DCP__WAIT_AGAIN) {
            if (!dcp__group_is_poisoned(g)) continue;
            DCP_TRY(move_all(m, &moved)); /* what peers gave before the failure */
            if (!moved) return dcp__group_poison_status(g);
            continue;
        }
        atomic_store_explicit(&self->waits, exchange_waits(o), memory_order_relaxed);
        DCP_TRY(dcp__mem_check(m, &w, exchange_awaited, o));
        atomic_fetch_add(&self->bell_sleepers, 1);
        const uint32_t bell = atomic_load(&self->bell);
        const dcp_status st = move_all(m, &moved);
        if (st == DCP_OK && !moved) dcp__futex_wait(&self->bell, bell, DCP__WAIT_SLICE_NS);
        atomic_fetch_sub(&self->bell_sleepers, 1);
        if (st != DCP_OK) return st;
    }
    atomic_store_explicit(&self->waits, DCP__WAITS_NOT, memory_order_relaxed);
    o->is_open = false;
    return DCP_OK;
}
