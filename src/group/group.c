/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls: checks, the busy mark, the poison; the work is the transport's. */
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/fault_priv.h"
#include "group/group_core_priv.h"

const char *dcp__call_name(uint32_t call)
{
    static const char *const names[DCP__CALL_COUNT] = {
        [DCP__CALL_NONE] = "none",           [DCP__CALL_BARRIER] = "barrier",
        [DCP__CALL_ALLGATHER] = "allgather", [DCP__CALL_GATHER_COLS] = "gather_cols",
        [DCP__CALL_ALLOC] = "alloc",         [DCP__CALL_FREE] = "free",
        [DCP__CALL_RECORD] = "record",       [DCP__CALL_EXCHANGE] = "exchange",
        [DCP__CALL_ALLREDUCE] = "allreduce", [DCP__CALL_SPLIT] = "split",
    };
    return call < DCP__CALL_COUNT ? names[call] : "?";
}

dcp_status dcp__group_init(dcp_group *g, const struct dcp__group_ops *ops, int rank, int size,
                           int64_t deadline_ns, struct dcp__poison *poison)
{
    g->ops = ops;
    g->rank = rank;
    g->size = size;
    g->deadline_ns = deadline_ns;
    g->poison = poison != NULL ? poison : &g->own_poison;
    g->all_see = true;
    g->n_hosts = 1;
    DCP_TRY(dcp__alloc_array((size_t)size, DCP__RECORD_MAX, "records of a group", &g->scratch));
    void *mem;
    const dcp_status st = dcp__alloc_array((size_t)size, sizeof(int), "hosts of a group", &mem);
    if (st != DCP_OK) {
        dcp__free(g->scratch);
        g->scratch = NULL;
        return st;
    }
    g->host_of = mem;
    return DCP_OK;
}

void dcp__group_fini(dcp_group *g)
{
    dcp__free(g->host_of);
    dcp__free(g->scratch);
    dcp__free(g->bounce);
}

dcp_status dcp__group_load_fault(int size, bool ranks_are_processes)
{
    enum dcp__fault_kind kind;
    int rank;
    DCP_TRY(dcp__fault_load(&kind, &rank));
    if (kind == DCP__FAULT_NONE) return DCP_OK;
    if (rank >= size) {
        return dcp__fail(DCP_ERR_ARG, "DCP_ATTN_FAULT names rank %d of a group of %d", rank, size);
    }
    if (!ranks_are_processes && kind != DCP__FAULT_DELAY) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "DCP_ATTN_FAULT: kill, stop and exit strike a whole process; in a threads "
                         "group only delay makes sense");
    }
    return DCP_OK;
}

void dcp__fault_point(const dcp_group *g, const char *point)
{
    /* A delay must be noticed: past the deadline by a good margin. */
    dcp__fault_pass(point, g->rank, (double)g->deadline_ns * 1e-9 * 1.5 + 0.25);
}

/* --- who is inside, and the poison --- */

static uintptr_t this_thread(void)
{
    static _Thread_local char mark;
    return (uintptr_t)&mark;
}

dcp_status dcp__group_enter(dcp_group *g)
{
    const uintptr_t me = this_thread();
    if (atomic_load_explicit(&g->owner, memory_order_relaxed) != me) {
        uintptr_t none = 0;
        if (!atomic_compare_exchange_strong_explicit(&g->owner, &none, me, memory_order_acquire,
                                                     memory_order_relaxed)) {
            return dcp__fail(DCP_ERR_BUSY,
                             "rank %d of a %s group is in another call, by another thread", g->rank,
                             g->ops->name);
        }
    }
    g->depth++;
    if (dcp__group_is_poisoned(g)) {
        const dcp_status st = dcp__group_poison_status(g);
        dcp__group_leave(g);
        return st;
    }
    return DCP_OK;
}

void dcp__group_leave(dcp_group *g)
{
    if (--g->depth == 0) {
        atomic_store_explicit(&g->owner, (uintptr_t)0, memory_order_release);
    }
}

dcp_status dcp__group_enter_call(dcp_group *g, enum dcp__call call)
{
    if (g == NULL) return dcp__fail(DCP_ERR_ARG, "%s: group is NULL", dcp__call_name(call));
    DCP_TRY(dcp__group_enter(g));
    if (g->call == DCP__CALL_NONE) {
        g->call = call;
        if (g->ops->set_call != NULL) g->ops->set_call(g, call);
    }
    return DCP_OK;
}

dcp_status dcp__group_leave_call(dcp_group *g, enum dcp__call call, dcp_status st)
{
    if (g->call == call) {
        g->call = DCP__CALL_NONE;
        if (g->ops->set_call != NULL) g->ops->set_call(g, DCP__CALL_NONE);
    }
    dcp__group_leave(g);
    return st;
}

dcp_status dcp__group_poison_status(dcp_group *g)
{
    /* Whoever claimed the word writes the text at once; it may have died on the way. */
    const int64_t start = dcp__now_ns();
    while (atomic_load_explicit(&g->poison->state, memory_order_acquire) != DCP__POISON_SET) {
        if (dcp__now_ns() - start > 50000000) {
            g->cause_seen = true;
            return dcp__fail(DCP_ERR_POISONED, "%s group is poisoned; its cause was never written",
                             g->ops->name);
        }
        sched_yield();
    }
    if (!g->cause_seen) {
        g->cause_seen = true;
        return dcp__fail_at((dcp_status)g->poison->code, g->poison->file, (int)g->poison->line,
                            "%s", g->poison->text);
    }
    return dcp__fail_at(DCP_ERR_POISONED, g->poison->file, (int)g->poison->line,
                        "%s group is poisoned: %s", g->ops->name, g->poison->text);
}

dcp_status dcp__group_poison_at(dcp_group *g, dcp_status code, const char *file, int line,
                                const char *fmt, ...)
{
    struct dcp__poison *const p = g->poison;
    uint32_t none = DCP__POISON_NONE;
    if (atomic_compare_exchange_strong(&p->state, &none, DCP__POISON_WRITING)) {
        va_list args;
        va_start(args, fmt);
        char text[1024];
        (void)vsnprintf(text, sizeof(text), fmt, args);
        va_end(args);
        dcp__brief(p->text, sizeof(p->text), text);
        /* The end of the path tells, and other processes read it. */
        const size_t n = strlen(file);
        (void)snprintf(p->file, sizeof(p->file), "%s",
                       n < sizeof(p->file) ? file : file + n - (sizeof(p->file) - 1));
        p->line = (int32_t)line;
        p->code = (int32_t)code;
        atomic_store(&p->state, DCP__POISON_SET);
    }
    const dcp_status st = dcp__group_poison_status(g);
    if (g->ops->poisoned != NULL) g->ops->poisoned(g);
    return st;
}

void dcp_group_abort(dcp_group *g, const char *why)
{
    if (g == NULL) return;
    struct dcp__kept_error error;
    dcp__keep_error(&error);
    (void)dcp__group_poison(g, DCP_ERR_PEER, "rank %d gave up: %s", g->rank,
                            why != NULL ? why : "no reason given");
    dcp__restore_error(&error);
}

/* --- what a handle is --- */

int dcp_group_rank(const dcp_group *g)
{
    return g != NULL ? g->rank : -1;
}

int dcp_group_size(const dcp_group *g)
{
    return g != NULL ? g->size : 0;
}

const char *dcp_group_kind(const dcp_group *g)
{
    return g != NULL ? g->ops->name : "?";
}

double dcp_group_deadline(const dcp_group *g)
{
    return g != NULL ? (double)g->deadline_ns / 1e9 : 0;
}

/* --- records and exchanges --- */

dcp_status dcp__group_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    if (n_bytes > DCP__RECORD_MAX) {
        return dcp__fail(DCP_ERR_ARG, "record of %zu bytes; at most %d", n_bytes, DCP__RECORD_MAX);
    }
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_RECORD));
    dcp__fault_point(g, "record");
    return dcp__group_leave_call(g, DCP__CALL_RECORD, g->ops->record(g, send, n_bytes, recv));
}

dcp_status dcp_group_barrier(dcp_group *g)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_BARRIER));
    dcp__fault_point(g, "barrier");
    return dcp__group_leave_call(g, DCP__CALL_BARRIER, g->ops->record(g, NULL, 0, NULL));
}

static dcp_status check_xfers(const dcp_group *g, const char *what, bool takes_pieces,
                              const struct dcp__xfer *x, int n)
{
    if (n < 0 || (size_t)n > dcp__xfers_max(g->size) || (n > 0 && x == NULL)) {
        return dcp__fail(DCP_ERR_ARG, "exchange: %d %s; at most %zu", n, what,
                         dcp__xfers_max(g->size));
    }
    for (int i = 0; i < n; i++) {
        if (x[i].peer < 0 || x[i].peer >= g->size || x[i].peer == g->rank) {
            return dcp__fail(DCP_ERR_ARG, "exchange: peer %d of %s %d of rank %d in a group of %d",
                             x[i].peer, what, i, g->rank, g->size);
        }
        if (x[i].n_bytes > 0 && x[i].buf == NULL) {
            return dcp__fail(DCP_ERR_ARG, "exchange: buffer of %s %d is NULL", what, i);
        }
        const size_t tail = x[i].tail_bytes;
        if (x[i].piece_bytes == 0 && tail == 0) continue;
        if (!takes_pieces || x[i].piece_bytes == 0 || tail > x[i].n_bytes ||
            (x[i].n_bytes - tail) % x[i].piece_bytes != 0 || (tail > 0 && x[i].tail == NULL)) {
            return dcp__fail(DCP_ERR_ARG,
                             "exchange: %s %d: %zu bytes in pieces of %zu and %zu more; %s", what,
                             i, x[i].n_bytes, x[i].piece_bytes, tail,
                             takes_pieces ? "wanted: whole pieces, then a tail inside the message"
                                          : "not taken here");
        }
    }
    return DCP_OK;
}

dcp_status dcp__group_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                     int n_sends, const struct dcp__xfer *recvs, int n_recvs)
{
    if (slot >= DCP__EXCHANGE_SLOTS) {
        return dcp__fail(DCP_ERR_ARG, "exchange slot %u; slots are 0 to %d", slot,
                         DCP__EXCHANGE_SLOTS - 1);
    }
    DCP_TRY(check_xfers(g, "sends", g->ops->sends_pieces, sends, n_sends));
    DCP_TRY(check_xfers(g, "receives", false, recvs, n_recvs));
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_EXCHANGE));
    dcp__fault_point(g, "exchange");
    return dcp__group_leave_call(g, DCP__CALL_EXCHANGE,
                                 g->ops->exchange_start(g, slot, sends, n_sends, recvs, n_recvs));
}

dcp_status dcp__group_exchange_test(dcp_group *g, unsigned slot, bool *done_out)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_EXCHANGE));
    return dcp__group_leave_call(g, DCP__CALL_EXCHANGE, g->ops->exchange_test(g, slot, done_out));
}

dcp_status dcp__group_exchange_wait(dcp_group *g, unsigned slot)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_EXCHANGE));
    dcp__fault_point(g, "exchange_wait");
    return dcp__group_leave_call(g, DCP__CALL_EXCHANGE, g->ops->exchange_wait(g, slot));
}

int64_t dcp__group_unguarded_since(const dcp_group *g)
{
    return atomic_load_explicit(&g->unguarded_ns, memory_order_acquire);
}

dcp_status dcp__group_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_ALLREDUCE));
    dcp__fault_point(g, "allreduce");
    return dcp__group_leave_call(g, DCP__CALL_ALLREDUCE, g->ops->allreduce_f32(g, buf, n));
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    if (a_bytes == 0 || b_bytes == 0) return false;
    return x <= y ? y - x < a_bytes : x - y < b_bytes; /* a sum could wrap around */
}

static enum dcp__refusal check_allgather(const dcp_group *g, const void *send, size_t n_bytes,
                                         const void *recv)
{
    size_t all_bytes;
    if (dcp__mul_overflow(n_bytes, (size_t)g->size, &all_bytes)) return DCP__REFUSES_SIZE;
    if (n_bytes > 0 && (send == NULL || recv == NULL)) return DCP__REFUSES_NULL;
    return overlap(send, n_bytes, recv, all_bytes) ? DCP__REFUSES_OVERLAP : DCP__TAKES_PART;
}

dcp_status dcp_group_allgather(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_ALLGATHER));
    dcp__fault_point(g, "allgather");
    return dcp__group_leave_call(
        g, DCP__CALL_ALLGATHER,
        dcp__allgather(g, send, n_bytes, recv, check_allgather(g, send, n_bytes, recv)));
}

static enum dcp__refusal check_cols(const dcp_group *g, const void *buf, size_t n_rows,
                                    size_t row_stride_bytes, const size_t *col_off_bytes)
{
    if (col_off_bytes == NULL || (buf == NULL && n_rows > 0)) return DCP__REFUSES_NULL;
    for (int r = 0; r < g->size; r++) {
        if (col_off_bytes[r] > col_off_bytes[r + 1]) return DCP__REFUSES_COLUMNS;
    }
    size_t span;
    if (dcp__mul_overflow(n_rows, row_stride_bytes, &span)) return DCP__REFUSES_SIZE;
    return n_rows > 1 && col_off_bytes[g->size] > row_stride_bytes ? DCP__REFUSES_COLUMNS
                                                                   : DCP__TAKES_PART;
}

static dcp_status gather_cols(dcp_group *g, void *buf, size_t n_rows, size_t row_stride_bytes,
                              const size_t *col_off_bytes, bool is_fenced)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_GATHER_COLS));
    dcp__fault_point(g, "gather_cols");
    return dcp__group_leave_call(
        g, DCP__CALL_GATHER_COLS,
        dcp__gather_cols(g, buf, n_rows, row_stride_bytes, col_off_bytes, is_fenced,
                         check_cols(g, buf, n_rows, row_stride_bytes, col_off_bytes)));
}

dcp_status dcp_group_gather_cols(dcp_group *g, void *buf, size_t n_rows, size_t row_stride_bytes,
                                 const size_t *col_off_bytes)
{
    return gather_cols(g, buf, n_rows, row_stride_bytes, col_off_bytes, true);
}

dcp_status dcp_group_gather_cols_unfenced(dcp_group *g, void *buf, size_t n_rows,
                                          size_t row_stride_bytes, const size_t *col_off_bytes)
{
    return gather_cols(g, buf, n_rows, row_stride_bytes, col_off_bytes, false);
}

/* --- memory --- */

dcp_status dcp_group_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_ALLOC));
    dcp__fault_point(g, "alloc");
    dcp_status st = ptr_out != NULL ? DCP_OK : dcp__fail(DCP_ERR_ARG, "alloc: ptr_out is NULL");
    st = dcp__group_agree(g, "alloc", st);
    if (st == DCP_OK) st = g->ops->alloc(g, n_bytes, ptr_out);
    return dcp__group_leave_call(g, DCP__CALL_ALLOC, st);
}

void dcp_group_free(dcp_group *g, void *ptr)
{
    if (g == NULL || ptr == NULL) return;
    struct dcp__kept_error error;
    dcp__keep_error(&error);
    const dcp_status st = dcp__group_enter_call(g, DCP__CALL_FREE);
    /* BUSY is a fault of the caller: the memory goes with the group. */
    if (st != DCP_ERR_BUSY) g->ops->free(g, ptr);
    if (st == DCP_OK) (void)dcp__group_leave_call(g, DCP__CALL_FREE, DCP_OK);
    dcp__restore_error(&error);
}

void dcp_group_destroy(dcp_group *g)
{
    if (g == NULL) return;
    struct dcp__kept_error error;
    dcp__keep_error(&error);
    g->ops->destroy(g);
    dcp__restore_error(&error);
}
