/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are those of an MPI communicator. The files group_mpi*.c make the shared object
 * libdcpattn_mpi_<mpi>.so and are the only ones that see MPI. Two ways:
 *
 *   one host    the shm group, joined through /proc: records and rings behave when ranks outnumber
 *               cores, which no MPI's polling does, and nobody depends on the size of /dev/shm
 *   several     nonblocking MPI calls, tested until the deadline with pauses between the tests;
 * group memory and the poison of each host's ranks lie in a shm group of that host
 *
 *   rank     0   1   2   3   4        records, exchanges: messages between all
 *   host     0   0   1   1   2        group memory: {0, 1} share, {2, 3} share, 4 has its own
 *
 * The all-reduce is MPI's own in both: it stands for the published algorithm. */
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "group/group_mpi_priv.h"

/* Records go pairwise up to PAIRWISE_MAX ranks: one round, and it is known who is late. */
enum { TAG = 7, TAG_RECORD = 8, PAIRWISE_MAX = 64 };
/* Tests of a wait before the CPU is offered to others: some 8 us where nothing moves. A neighbour
 * that takes it may keep it for milliseconds, while a peer's next fragment is a few us away.
 * Measured, alltoall of (64, 64, 128) f32, N = 2, beside one busy process of lower priority, five
 * times: with 64 and 256 tests medians of 249 to 282 and 250 to 268 us, upper quartiles of 281 to
 * 3542 and 270 to 297. On a quiet machine, and with three or four ranks on two CPUs, no
 * difference. */
enum { TESTS_BEFORE_YIELD = 256 };
static const int64_t yield_ns = 1000000; /* then the tests get pauses */
static const long pause_ns = 50000;

dcp_status dcp__mpi_fail(const char *what, int rc)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    (void)MPI_Error_string(rc, text, &n);
    return FAIL(DCP_ERR_SYS, "%s: %s", what, text);
}

static dcp_status poison_mpi(dcp_group *g, const char *what, int rc)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0, error_class = MPI_SUCCESS;
    (void)MPI_Error_string(rc, text, &n);
    (void)MPI_Error_class(rc, &error_class);
    const dcp_status st = error_class == MPI_ERR_TRUNCATE ? DCP_ERR_MISMATCH : DCP_ERR_SYS;
    return POISON(g, st, "rank %d: %s in %s: %.300s", g->rank, what,
                  lib()->call_name((uint32_t)g->call), text);
}

/* --- waiting: MPI only makes progress inside its calls, so a wait is a series of tests --- */

void dcp__mpi_pause(struct dcp__wait *w)
{
    (void)lib()->wait_next(w, TESTS_BEFORE_YIELD); /* spins, then yields */
    if (w->start_ns != 0 && lib()->now_ns() - w->start_ns > yield_ns) {
        const struct timespec ts = {.tv_sec = 0, .tv_nsec = pause_ns};
        (void)nanosleep(&ts, NULL);
    }
}

static bool is_late(const dcp_group *g, const struct dcp__wait *w)
{
    return w->start_ns != 0 && lib()->now_ns() - w->start_ns >= g->deadline_ns;
}

static dcp_status poison_late(dcp_group *g, const char *who)
{
    return POISON(g, DCP_ERR_TIMEOUT, "rank %d waited %.1f %s in %s; did not arrive: %s", g->rank,
                  dcp__wait_amount((double)g->deadline_ns * 1e-9),
                  dcp__wait_unit((double)g->deadline_ns * 1e-9),
                  lib()->call_name((uint32_t)g->call), who);
}

/* A collective operation of all ranks: MPI does not say who is missing. */
static dcp_status wait_collective(dcp_group *g, MPI_Request *request)
{
    struct dcp__wait w = {0};
    for (;;) {
        int done = 0;
        const int rc = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS) return poison_mpi(g, "MPI_Test failed", rc);
        if (done) return DCP_OK;
        if (is_poisoned(g)) return lib()->poison_status(g);
        if (is_late(g, &w)) return poison_late(g, "(MPI does not say which ranks)");
        dcp__mpi_pause(&w);
    }
}

/* --- without shared memory --- */

/* The ranks whose frame is missing, or only those that have not taken ours. */
static dcp_status poison_late_record(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    char late[200] = "";
    size_t used = 0;
    for (int from = 1; from >= 0 && used == 0; from--) {
        for (int r = 0; r < g->size && used < sizeof(late) - 24; r++) {
            MPI_Request *const request = &m->record_requests[from ? r : g->size + r];
            int done = 1;
            if (*request != MPI_REQUEST_NULL) {
                (void)MPI_Request_get_status(*request, &done, MPI_STATUS_IGNORE);
            }
            if (done) continue;
            used += (size_t)snprintf(late + used, sizeof(late) - used, "%srank %d",
                                     used > 0 ? ", " : "", r);
        }
    }
    return poison_late(g, late);
}

static dcp_status record_pairwise(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    struct mpi_frame *const own = &m->frames[g->size];
    MPI_Request *const from = m->record_requests, *const to = from + g->size;
    m->frames[g->rank] = *own;
    for (int r = 0; r < 2 * g->size; r++) m->record_requests[r] = MPI_REQUEST_NULL;
    for (int i = 1; i < g->size; i++) {
        const int r = (g->rank + i) % g->size;
        int rc =
            MPI_Irecv(&m->frames[r], (int)sizeof(*own), MPI_BYTE, r, TAG_RECORD, m->comm, &from[r]);
        if (rc == MPI_SUCCESS) {
            rc = MPI_Isend(own, (int)sizeof(*own), MPI_BYTE, r, TAG_RECORD, m->comm, &to[r]);
        }
        if (rc != MPI_SUCCESS) return poison_mpi(g, "a record could not be sent", rc);
    }
    struct dcp__wait w = {0};
    for (;;) {
        int done = 0;
        const int rc = MPI_Testall(2 * g->size, m->record_requests, &done, m->statuses);
        if (rc != MPI_SUCCESS) return poison_mpi(g, "a record failed", rc);
        if (done) return DCP_OK;
        if (is_poisoned(g)) return lib()->poison_status(g);
        if (is_late(g, &w)) return poison_late_record(g);
        dcp__mpi_pause(&w);
    }
}

static dcp_status record_collective(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    const int n = (int)sizeof(struct mpi_frame);
    MPI_Request request;
    const int rc =
        MPI_Iallgather(&m->frames[g->size], n, MPI_BYTE, m->frames, n, MPI_BYTE, m->comm, &request);
    if (rc != MPI_SUCCESS) return poison_mpi(g, "MPI_Iallgather failed", rc);
    return wait_collective(g, &request);
}

static dcp_status mpi_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    struct mpi_group *const m = mpi_of(g);
    struct mpi_frame *const own = &m->frames[g->size];
    own->n_bytes = n_bytes;
    if (n_bytes > 0) memcpy(own->data, send, n_bytes);
    const dcp_status st = g->size <= PAIRWISE_MAX ? record_pairwise(g) : record_collective(g);
    if (st != DCP_OK) return st;
    for (int r = 0; r < g->size; r++) {
        if (m->frames[r].n_bytes != m->frames[0].n_bytes) {
            return FAIL(DCP_ERR_MISMATCH, "%s: rank 0 gives %llu bytes, rank %d gives %llu",
                        lib()->call_name((uint32_t)g->call),
                        (unsigned long long)m->frames[0].n_bytes, r,
                        (unsigned long long)m->frames[r].n_bytes);
        }
    }
    for (int r = 0; r < g->size && n_bytes > 0; r++) {
        memcpy((char *)recv + (size_t)r * n_bytes, m->frames[r].data, n_bytes);
    }
    return DCP_OK;
}

static dcp_status start_one(dcp_group *g, struct mpi_open *o, const struct dcp__xfer *x, bool sends)
{
    struct mpi_group *const m = mpi_of(g);
    if (x->n_bytes == 0) return DCP_OK;
    const int i = o->n_requests;
    const int n = (int)x->n_bytes;
    const bool has_pieces = sends && x->piece_bytes != 0;
    struct mpi_type type = {.type = MPI_BYTE, .from = x->buf};
    int rc = has_pieces ? dcp__mpi_type_take(&m->types, x, &type) : MPI_SUCCESS;
    if (rc != MPI_SUCCESS) return poison_mpi(g, "a datatype could not be made", rc);
    rc = sends ? MPI_Isend(type.from, has_pieces ? 1 : n, type.type, x->peer, TAG, m->comm,
                           &o->requests[i])
               : MPI_Irecv(x->buf, n, type.type, x->peer, TAG, m->comm, &o->requests[i]);
    dcp__mpi_type_drop(&type);
    if (rc != MPI_SUCCESS) {
        return poison_mpi(g, sends ? "MPI_Isend failed" : "MPI_Irecv failed", rc);
    }
    o->peers[i] = x->peer;
    o->n_bytes[i] = n;
    o->n_requests++;
    return DCP_OK;
}

/* Messages of a pair keep their order under one tag: no number of slot is needed. */
static dcp_status mpi_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                     int n_sends, const struct dcp__xfer *recvs, int n_recvs)
{
    struct mpi_open *const o = &mpi_of(g)->open[slot];
    if (o->is_open) return FAIL(DCP_ERR_ARG, "exchange slot %u is still open", slot);
    for (int i = 0; i < n_sends + n_recvs; i++) {
        const size_t n = i < n_sends ? sends[i].n_bytes : recvs[i - n_sends].n_bytes;
        if (n > INT_MAX) {
            /* The peers have begun: they cannot be left waiting for this message. */
            return POISON(g, DCP_ERR_ARG,
                          "rank %d: exchange: a message of %zu bytes; at most %d under MPI",
                          g->rank, n, INT_MAX);
        }
    }
    o->is_open = true;
    o->n_requests = 0;
    for (int i = 0; i < n_sends; i++) {
        const dcp_status st = start_one(g, o, &sends[i], true);
        if (st != DCP_OK) return st;
    }
    o->n_sends = o->n_requests;
    for (int i = 0; i < n_recvs; i++) {
        const dcp_status st = start_one(g, o, &recvs[i], false);
        if (st != DCP_OK) return st;
    }
    return DCP_OK;
}

static dcp_status mpi_exchange_test(dcp_group *g, unsigned slot, bool *done_out)
{
    struct mpi_group *const m = mpi_of(g);
    struct mpi_open *const o = &m->open[slot];
    int done = 1;
    if (o->is_open && o->n_requests > 0) {
        /* Of a failed Testall the statuses say which failed. */
        for (int i = 0; i < o->n_requests; i++) m->statuses[i].MPI_ERROR = MPI_SUCCESS;
        const int rc = MPI_Testall(o->n_requests, o->requests, &done, m->statuses);
        if (rc != MPI_SUCCESS) {
            int error_class = MPI_SUCCESS, cause = rc;
            (void)MPI_Error_class(rc, &error_class);
            for (int i = 0; error_class == MPI_ERR_IN_STATUS && i < o->n_requests; i++) {
                const int e = m->statuses[i].MPI_ERROR;
                if (e != MPI_SUCCESS && e != MPI_ERR_PENDING) cause = e;
            }
            return poison_mpi(g, "a message failed", cause);
        }
        for (int i = o->n_sends; done && i < o->n_requests; i++) {
            int got = 0;
            (void)MPI_Get_count(&m->statuses[i], MPI_BYTE, &got);
            if (got == o->n_bytes[i]) continue;
            return POISON(g, DCP_ERR_MISMATCH,
                          "exchange: rank %d sends %d bytes, rank %d expects %d", o->peers[i], got,
                          g->rank, o->n_bytes[i]);
        }
    }
    if (done) o->is_open = false;
    *done_out = done != 0;
    return DCP_OK;
}

static dcp_status poison_late_exchange(dcp_group *g, struct mpi_open *o)
{
    char late[200] = "";
    size_t used = 0;
    for (int i = 0; i < o->n_requests && used < sizeof(late) - 16; i++) {
        int done = 1;
        if (o->requests[i] != MPI_REQUEST_NULL) {
            (void)MPI_Request_get_status(o->requests[i], &done, MPI_STATUS_IGNORE);
        }
        if (done) continue;
        used += (size_t)snprintf(late + used, sizeof(late) - used, " %d%s", o->peers[i],
                                 i < o->n_sends ? " (to)" : " (from)");
    }
    return POISON(g, DCP_ERR_TIMEOUT,
                  "rank %d waited %.1f %s in exchange; unfinished with ranks:%s, some of which may "
                  "only be waiting for another, too",
                  g->rank, dcp__wait_amount((double)g->deadline_ns * 1e-9),
                  dcp__wait_unit((double)g->deadline_ns * 1e-9), late);
}

static dcp_status mpi_exchange_wait(dcp_group *g, unsigned slot)
{
    struct mpi_open *const o = &mpi_of(g)->open[slot];
    struct dcp__wait w = {0};
    for (;;) {
        bool done = false;
        const dcp_status st = mpi_exchange_test(g, slot, &done);
        if (st != DCP_OK) return st;
        if (done) return DCP_OK;
        if (is_poisoned(g)) return lib()->poison_status(g);
        if (is_late(g, &w)) return poison_late_exchange(g, o);
        dcp__mpi_pause(&w);
    }
}

/* Open MPI's nonblocking all-reduce is 1.6 to 2.5 times slower than its blocking one (N = 2, 1 to
 * 64 tokens of 96 x 512), so a bench that compares with it would flatter us. The blocking call has
 * no deadline, though, so it is taken only where DCP_ATTN_MPI_BLOCKING=1 asks for it, as `bench
 * merge` does, and after a record, so that all ranks have at least come. Since when is written down
 * for a watcher: a program that asks for this can end itself, the library cannot. */
static bool wants_blocking(void)
{
    const char *const text = getenv("DCP_ATTN_MPI_BLOCKING");
    return text != NULL && strcmp(text, "1") == 0;
}

dcp_status dcp__mpi_allreduce(dcp_group *g, MPI_Comm comm, float *buf, size_t n)
{
    /* MPI 3.1 counts in int. */
    static const size_t most = (size_t)1 << 30;
    const bool is_blocking = wants_blocking();
    if (is_blocking) DCP_TRY(g->ops->record(g, NULL, 0, NULL));
    for (size_t at = 0; at < n; at += most) {
        const int piece = (int)(n - at < most ? n - at : most);
        if (is_blocking) {
            atomic_store_explicit(&g->unguarded_ns, lib()->now_ns(), memory_order_release);
            lib()->fault_point(g, "mpi_allreduce");
            const int rc = MPI_Allreduce(MPI_IN_PLACE, buf + at, piece, MPI_FLOAT, MPI_SUM, comm);
            atomic_store_explicit(&g->unguarded_ns, (int64_t)0, memory_order_release);
            if (rc != MPI_SUCCESS) return poison_mpi(g, "MPI_Allreduce failed", rc);
            continue;
        }
        MPI_Request request;
        const int rc =
            MPI_Iallreduce(MPI_IN_PLACE, buf + at, piece, MPI_FLOAT, MPI_SUM, comm, &request);
        if (rc != MPI_SUCCESS) return poison_mpi(g, "MPI_Iallreduce failed", rc);
        const dcp_status st = wait_collective(g, &request);
        if (st != DCP_OK) return st;
    }
    return DCP_OK;
}

static dcp_status mpi_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    return dcp__mpi_allreduce(g, mpi_of(g)->comm, buf, n);
}

/* What the host group says of itself ("rank 1 did not arrive") would be of its own ranks: all meet
 * before it is used. */
static dcp_status mpi_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    dcp_group *const host = mpi_of(g)->host;
    dcp_status st = mpi_record(g, NULL, 0, NULL);
    if (st != DCP_OK) return st;
    void *ptr = NULL;
    if (host != NULL) {
        host->call = g->call;
        st = lib()->shm_ops->alloc(host, n_bytes, &ptr);
    } else {
        st = lib()->local_alloc(g, n_bytes, &ptr);
    }
    st = lib()->agree(g, "alloc", st);
    if (st == DCP_OK) {
        *ptr_out = ptr;
    } else if (ptr != NULL && host != NULL) {
        lib()->shm_ops->free(host, ptr); /* the ranks of a host succeed or fail together */
    } else if (ptr != NULL) {
        lib()->local_free(g, ptr);
    }
    return st;
}

static void mpi_free(dcp_group *g, void *ptr)
{
    dcp_group *const host = mpi_of(g)->host;
    if (is_poisoned(g)) return; /* MPI may still write into it: it lives until exit */
    if (host == NULL) {
        lib()->local_free(g, ptr); /* nobody else sees it */
        return;
    }
    host->call = g->call;
    lib()->shm_ops->free(host, ptr);
}

static bool mpi_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out)
{
    const dcp_group *const host = ((const struct mpi_group *)g)->host;
    if (host == NULL) return lib()->any_locate(g, ptr, n_bytes, alloc_id_out, offset_out);
    return lib()->shm_ops->locate(host, ptr, n_bytes, alloc_id_out, offset_out);
}

/* On a host of one rank locate finds every address. */
static bool mpi_owns(const dcp_group *g, const void *ptr, size_t n_bytes)
{
    uint32_t alloc_id;
    uint64_t offset;
    if (((const struct mpi_group *)g)->host != NULL) {
        return mpi_locate(g, ptr, n_bytes, &alloc_id, &offset);
    }
    const uintptr_t at = (uintptr_t)ptr;
    const struct dcp__local_alloc *a = g->allocs;
    for (; a != NULL; a = a->next) {
        const uintptr_t begin = (uintptr_t)a->ptr;
        if (at >= begin && at - begin <= a->n_bytes && n_bytes <= a->n_bytes - (at - begin)) break;
    }
    return a != NULL;
}

static void *mpi_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes)
{
    const struct mpi_group *const m = (const struct mpi_group *)g;
    if (m->host == NULL) return lib()->any_peer_ptr(g, rank, alloc_id, offset, n_bytes);
    return lib()->shm_ops->peer_ptr(m->host, m->host_ranks[rank], alloc_id, offset, n_bytes);
}

static bool mpi_touches_peer(const dcp_group *g, const void *ptr, size_t n_bytes, int *rank_out)
{
    const struct mpi_group *const m = (const struct mpi_group *)g;
    int in_host;
    if (m->host == NULL || !lib()->shm_ops->touches_peer(m->host, ptr, n_bytes, &in_host)) {
        return false;
    }
    for (int r = 0; r < g->size; r++) {
        if (g->host_of[r] == g->host_of[g->rank] && m->host_ranks[r] == in_host) *rank_out = r;
    }
    return true;
}

/* What has not arrived is called off; what cannot be called off keeps its buffers until exit. */
static void mpi_poisoned(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    for (int slot = 0; slot < DCP__ALL_SLOTS; slot++) {
        struct mpi_open *const o = &m->open[slot];
        for (int i = o->n_sends; o->is_open && i < o->n_requests; i++) {
            if (o->requests[i] == MPI_REQUEST_NULL) continue;
            (void)MPI_Cancel(&o->requests[i]);
            (void)MPI_Request_free(&o->requests[i]);
        }
    }
    for (int r = 0; r < g->size; r++) {
        if (m->record_requests[r] == MPI_REQUEST_NULL) continue;
        (void)MPI_Cancel(&m->record_requests[r]);
        (void)MPI_Request_free(&m->record_requests[r]);
    }
}

void dcp__mpi_free(struct mpi_group *m)
{
    if (m == NULL) return;
    if (m->host != NULL) lib()->shm_ops->destroy(m->host);
    lib()->local_free_list(m->base.allocs);
    lib()->free(m->numbers);
    lib()->free(m->statuses);
    lib()->free(m->requests);
    lib()->free(m->record_requests);
    lib()->free(m->frames);
    lib()->free(m->host_ranks);
    lib()->fini(&m->base);
    lib()->free(m);
}

static void mpi_destroy(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    /* Of a poisoned group MPI may still write into the frames and into group memory. */
    if (is_poisoned(g)) return;
    if (!dcp__mpi_is_over()) {
        dcp__mpi_types_free(&m->types);
        (void)MPI_Comm_free(&m->comm);
    }
    dcp__mpi_free(m);
}

static dcp_status mpi_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    return dcp__mpi_split(g, mpi_of(g)->comm, how, sub_out);
}

const struct dcp__group_ops dcp__mpi_ops = {
    .name = "mpi",
    .record = mpi_record,
    .exchange_start = mpi_exchange_start,
    .exchange_test = mpi_exchange_test,
    .exchange_wait = mpi_exchange_wait,
    .allreduce_f32 = mpi_allreduce_f32,
    .alloc = mpi_alloc,
    .free = mpi_free,
    .locate = mpi_locate,
    .peer_ptr = mpi_peer_ptr,
    .split = mpi_split,
    .poisoned = mpi_poisoned,
    .destroy = mpi_destroy,
    .touches_peer = mpi_touches_peer,
    .owns = mpi_owns,
    .keeps_buffers = true,
    .sends_pieces = true,
};
