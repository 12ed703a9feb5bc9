/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are those of an MPI communicator. This file makes the shared object libdcpattn_mpi_<mpi>.so
 * and is the only one that includes <mpi.h>. Two ways:
 *
 *   one host    the shm group, joined through /proc: records and rings behave when ranks outnumber
 *               cores, which no MPI's polling does, and nobody depends on the size of /dev/shm
 *   otherwise   nonblocking MPI calls, tested until the deadline with pauses between the tests
 *
 * The all-reduce is MPI's own in both: it stands for the published algorithm. */
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dcpattn/mpi.h"
#include "dcpattn/mpi_module.h"
#include "group/group_module_priv.h"

#ifndef DCP_MPI_NAME
#define DCP_MPI_NAME "mpi"
#endif

#define FAIL(st, ...) lib()->fail_at((st), __FILE__, __LINE__, __VA_ARGS__)
#define POISON(g, code, ...) lib()->poison_at((g), (code), __FILE__, __LINE__, __VA_ARGS__)

enum { TAG = 7, BOUNCE_BYTES = 1 << 20 };
static const int64_t yield_ns = 1000000; /* then the tests get pauses */
static const long pause_ns = 50000;

static const struct dcp__group_module *lib(void)
{
    return dcp__group_module();
}

/* One slot of exchanges: the requests of sends, then of receives. */
struct mpi_open {
    bool is_open;
    int n_requests, n_sends;
    MPI_Request *requests; /* [4 * size] */
    int *peers;            /* [4 * size] */
    int *n_bytes;          /* [4 * size], expected by receives */
};

/* Frame of a record: the size travels with it, so that ranks that disagree find out. */
struct mpi_frame {
    uint64_t n_bytes;
    char data[DCP__RECORD_MAX];
};

struct mpi_group {
    dcp_group base; /* first */
    MPI_Comm comm;
    struct mpi_frame *frames; /* [size] */
    struct mpi_open open[DCP__ALL_SLOTS];
    MPI_Request *requests;
    MPI_Status *statuses; /* [4 * size] */
    int *numbers;
};

static struct mpi_group *mpi_of(dcp_group *g)
{
    return (struct mpi_group *)g;
}

static dcp_status fail_mpi(const char *what, int rc)
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

static void pause_between_tests(struct dcp__wait *w)
{
    (void)lib()->wait_next(w, true); /* spins, then yields */
    if (w->start_ns != 0 && lib()->now_ns() - w->start_ns > yield_ns) {
        const struct timespec ts = {.tv_sec = 0, .tv_nsec = pause_ns};
        (void)nanosleep(&ts, NULL);
    }
}

static bool is_late(const dcp_group *g, const struct dcp__wait *w)
{
    return w->start_ns != 0 && lib()->now_ns() - w->start_ns >= g->deadline_ns;
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
        if (atomic_load_explicit(&g->poison->state, memory_order_relaxed) != DCP__POISON_NONE) {
            return lib()->poison_status(g);
        }
        if (is_late(g, &w)) {
            return POISON(g, DCP_ERR_TIMEOUT,
                          "rank %d waited %.1f s in %s for ranks that did not arrive (MPI "
                          "does not say which)",
                          g->rank, (double)g->deadline_ns * 1e-9,
                          lib()->call_name((uint32_t)g->call));
        }
        pause_between_tests(&w);
    }
}

/* --- without shared memory --- */

static dcp_status mpi_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    struct mpi_group *const m = mpi_of(g);
    struct mpi_frame own = {.n_bytes = n_bytes};
    if (n_bytes > 0) memcpy(own.data, send, n_bytes);
    MPI_Request request;
    const int rc = MPI_Iallgather(&own, (int)sizeof(own), MPI_BYTE, m->frames, (int)sizeof(own),
                                  MPI_BYTE, m->comm, &request);
    if (rc != MPI_SUCCESS) return poison_mpi(g, "MPI_Iallgather failed", rc);
    const dcp_status st = wait_collective(g, &request);
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
    const int rc = sends ? MPI_Isend(x->buf, n, MPI_BYTE, x->peer, TAG, m->comm, &o->requests[i])
                         : MPI_Irecv(x->buf, n, MPI_BYTE, x->peer, TAG, m->comm, &o->requests[i]);
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
            return FAIL(DCP_ERR_ARG, "exchange: a message of %zu bytes; at most %d under MPI", n,
                        INT_MAX);
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
    return POISON(g, DCP_ERR_TIMEOUT, "rank %d waited %.1f s in exchange; unfinished with ranks:%s",
                  g->rank, (double)g->deadline_ns * 1e-9, late);
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
        if (is_late(g, &w)) return poison_late_exchange(g, o);
        pause_between_tests(&w);
    }
}

static dcp_status allreduce_on(dcp_group *g, MPI_Comm comm, float *buf, size_t n)
{
    /* MPI 3.1 counts in int. */
    static const size_t most = (size_t)1 << 30;
    for (size_t at = 0; at < n; at += most) {
        const int piece = (int)(n - at < most ? n - at : most);
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
    return allreduce_on(g, mpi_of(g)->comm, buf, n);
}

static dcp_status mpi_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    void *ptr = NULL;
    const dcp_status own = lib()->local_alloc(g, n_bytes, &ptr);
    const int32_t own_code = (int32_t)own;
    int32_t *const codes = g->scratch;
    const dcp_status st = mpi_record(g, &own_code, sizeof(own_code), codes);
    for (int r = 0; st == DCP_OK && own == DCP_OK && r < g->size; r++) {
        if (codes[r] == DCP_OK) continue;
        lib()->local_free(g, ptr);
        return FAIL((dcp_status)codes[r], "alloc: rank %d could not get its group memory", r);
    }
    if (st == DCP_OK && own == DCP_OK) {
        *ptr_out = ptr;
        return DCP_OK;
    }
    if (ptr != NULL) lib()->local_free(g, ptr);
    return st != DCP_OK ? st : own;
}

static void mpi_free(dcp_group *g, void *ptr)
{
    lib()->local_free(g, ptr); /* nobody else sees it */
}

static bool mpi_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out)
{
    (void)g, (void)ptr, (void)n_bytes, (void)alloc_id_out, (void)offset_out;
    return false;
}

static void *mpi_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes)
{
    (void)g, (void)rank, (void)alloc_id, (void)offset, (void)n_bytes;
    return NULL;
}

static bool mpi_sees(const dcp_group *g, int rank)
{
    return rank == g->rank && g->size == 1;
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
}

static bool mpi_is_over(void)
{
    int finalized = 0;
    return MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

static void mpi_destroy(dcp_group *g)
{
    struct mpi_group *const m = mpi_of(g);
    if (atomic_load(&g->poison->state) != DCP__POISON_NONE) {
        /* MPI may still write into the frames and into group memory. */
        m->base.allocs = NULL;
        return;
    }
    if (!mpi_is_over()) (void)MPI_Comm_free(&m->comm);
    lib()->local_free_list(g->allocs);
    lib()->free(m->numbers);
    lib()->free(m->statuses);
    lib()->free(m->requests);
    lib()->free(m->frames);
    lib()->fini(g);
    lib()->free(m);
}

static const struct dcp__group_ops mpi_ops = {
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
    .sees = mpi_sees,
    .poisoned = mpi_poisoned,
    .destroy = mpi_destroy,
};

static dcp_status take(size_t n, size_t elem_bytes, const char *what, void *ptr_out)
{
    void *mem;
    const dcp_status st = lib()->alloc_array(n, elem_bytes, what, &mem);
    if (st == DCP_OK) memcpy(ptr_out, &mem, sizeof(mem));
    return st;
}

/* Fills a handle in zeroed memory; on failure the caller destroys what there is. */
static dcp_status fill_wire(struct mpi_group *m, int rank, int size, int64_t deadline_ns)
{
    const size_t n = (size_t)size, slot_n = 4 * n;
    dcp_status st = lib()->init(&m->base, &mpi_ops, rank, size, deadline_ns, NULL);
    m->base.all_see = size == 1;
    m->base.bounce_bytes = BOUNCE_BYTES;
    if (m->base.bounce_bytes < 4096 * (n + 1)) m->base.bounce_bytes = 4096 * (n + 1);
    if (st == DCP_OK) st = take(m->base.bounce_bytes, 1, "bounce buffer", &m->base.bounce);
    if (st == DCP_OK) st = take(n, sizeof(*m->frames), "records of an MPI group", &m->frames);
    if (st == DCP_OK) {
        st = take(DCP__ALL_SLOTS * slot_n, sizeof(MPI_Request), "MPI requests", &m->requests);
    }
    if (st == DCP_OK) st = take(slot_n, sizeof(MPI_Status), "MPI statuses", &m->statuses);
    if (st == DCP_OK) {
        st = take(DCP__ALL_SLOTS * 2 * slot_n, sizeof(int), "MPI messages", &m->numbers);
    }
    if (st != DCP_OK) return st;
    for (size_t slot = 0; slot < DCP__ALL_SLOTS; slot++) {
        m->open[slot].requests = m->requests + slot * slot_n;
        m->open[slot].peers = m->numbers + slot * 2 * slot_n;
        m->open[slot].n_bytes = m->open[slot].peers + slot_n;
    }
    return DCP_OK;
}

/* --- one host: a shm group that also has a communicator --- */

struct mpi_shared {
    MPI_Comm comm;
};

static dcp_status shared_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    return allreduce_on(g, ((struct mpi_shared *)g->outer)->comm, buf, n);
}

static void shared_destroy(dcp_group *g)
{
    struct mpi_shared *const s = g->outer;
    const bool is_poisoned = atomic_load(&g->poison->state) != DCP__POISON_NONE;
    if (!is_poisoned && !mpi_is_over()) (void)MPI_Comm_free(&s->comm);
    lib()->free(s);
    lib()->shm_ops->destroy(g);
}

static struct dcp__group_ops make_shared_ops(void)
{
    struct dcp__group_ops ops = *lib()->shm_ops;
    ops.name = "mpi";
    ops.allreduce_f32 = shared_allreduce_f32;
    ops.destroy = shared_destroy;
    return ops;
}

/* --- creation: blocking calls, every rank goes through all of them --- */

/* True on all ranks or on none. */
static bool all_true(MPI_Comm comm, bool own)
{
    int mine = own ? 1 : 0, all = 0;
    return MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, comm) == MPI_SUCCESS && all == 1;
}

static bool wants_shared(void)
{
    const char *env = getenv("DCP_ATTN_MPI_SHARED");
    return env == NULL || strcmp(env, "0") != 0;
}

static bool is_one_host(MPI_Comm comm, int size)
{
    MPI_Comm host;
    int host_size = 0;
    if (MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) != MPI_SUCCESS) {
        return false;
    }
    (void)MPI_Comm_size(host, &host_size);
    (void)MPI_Comm_free(&host);
    return host_size == size;
}

/* The memory of rank 0, mapped by all; NULL on all ranks if any cannot (then messages serve). */
static dcp_shm *share_memory(MPI_Comm comm, int rank, int size, const dcp_group_opts *opts)
{
    dcp_shm *shm = NULL;
    int where[2] = {0, -1}; /* pid and descriptor of rank 0 */
    if (rank == 0 && lib()->shm_prepare(size, opts, &shm) == DCP_OK) {
        where[0] = (int)getpid();
        where[1] = lib()->shm_fd(shm);
    }
    const bool is_told = MPI_Bcast(where, 2, MPI_INT, 0, comm) == MPI_SUCCESS && where[1] >= 0;
    if (rank != 0 && is_told) (void)lib()->shm_join(size, where[0], where[1], &shm);
    /* Also the point until which rank 0 keeps its descriptor. */
    if (all_true(comm, shm != NULL)) return shm;
    lib()->shm_release(shm);
    return NULL;
}

static dcp_status create_shared(MPI_Comm comm, int rank, dcp_shm *shm, dcp_group **group_out)
{
    static struct dcp__group_ops ops; /* the same for all, so that writing it again is no harm */
    ops = make_shared_ops();
    struct mpi_shared *s = NULL;
    dcp_group *g = NULL;
    dcp_status st = take(1, sizeof(*s), "MPI group", &s);
    if (st == DCP_OK) st = lib()->shm_attach(shm, rank, &g);
    lib()->shm_release(shm);
    if (all_true(comm, st == DCP_OK)) {
        s->comm = comm;
        g->outer = s;
        g->ops = &ops;
        *group_out = g;
        return DCP_OK;
    }
    if (g != NULL) lib()->shm_ops->destroy(g);
    lib()->free(s);
    return st != DCP_OK ? st : FAIL(DCP_ERR_PEER, "create_mpi: another rank failed");
}

static dcp_status create_wire(MPI_Comm comm, int rank, int size, int64_t deadline_ns,
                              dcp_group **group_out)
{
    struct mpi_group *m = NULL;
    dcp_status st = take(1, sizeof(*m), "MPI group", &m);
    if (st == DCP_OK) st = fill_wire(m, rank, size, deadline_ns);
    if (all_true(comm, st == DCP_OK)) {
        m->comm = comm;
        *group_out = &m->base;
        return DCP_OK;
    }
    if (m != NULL) {
        lib()->free(m->numbers);
        lib()->free(m->statuses);
        lib()->free(m->requests);
        lib()->free(m->frames);
        lib()->fini(&m->base);
        lib()->free(m);
    }
    return st != DCP_OK ? st : FAIL(DCP_ERR_PEER, "create_mpi: another rank failed");
}

DCP_API dcp_status dcp_group_create_mpi(MPI_Comm comm, const dcp_group_opts *opts,
                                        dcp_group **group_out)
{
    if (strcmp(lib()->version, DCP_VERSION) != 0 ||
        lib()->struct_size != sizeof(struct dcp__group_module)) {
        return FAIL(DCP_ERR_NOT_SUPPORTED, "the MPI module is of version %s, the library of %s",
                    DCP_VERSION, lib()->version);
    }
    int initialized = 0;
    (void)MPI_Initialized(&initialized);
    if (!initialized || mpi_is_over()) {
        return FAIL(DCP_ERR_ARG, "create_mpi: MPI is not initialised, or finalised already");
    }
    if (group_out == NULL) return FAIL(DCP_ERR_ARG, "create_mpi: group_out is NULL");
    MPI_Comm own;
    int rc = MPI_Comm_dup(comm, &own);
    if (rc != MPI_SUCCESS) return fail_mpi("create_mpi: MPI_Comm_dup", rc);
    (void)MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
    int rank = 0, size = 1;
    (void)MPI_Comm_rank(own, &rank);
    (void)MPI_Comm_size(own, &size);
    int64_t deadline_ns = 0;
    dcp_status st = lib()->opts_read(opts, &deadline_ns);
    if (st == DCP_OK) st = lib()->load_fault(size, true);
    if (!all_true(own, st == DCP_OK)) {
        if (st == DCP_OK) st = FAIL(DCP_ERR_PEER, "create_mpi: another rank was given bad options");
    } else {
        const bool shares = all_true(own, wants_shared()) && is_one_host(own, size);
        dcp_shm *const shm = shares ? share_memory(own, rank, size, opts) : NULL;
        st = shm != NULL ? create_shared(own, rank, shm, group_out)
                         : create_wire(own, rank, size, deadline_ns, group_out);
    }
    if (st != DCP_OK) (void)MPI_Comm_free(&own);
    return st;
}

/* --- the table for programs that open this object --- */

static bool began_mpi;

static const char *module_version(void)
{
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int n = 0;
    if (text[0] == '\0') (void)MPI_Get_library_version(text, &n); /* allowed before MPI_Init */
    return text;
}

static dcp_status module_init(void)
{
    int initialized = 0, provided = 0;
    (void)MPI_Initialized(&initialized);
    if (initialized) return DCP_OK;
    const int rc = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    if (rc != MPI_SUCCESS) return fail_mpi("MPI_Init_thread", rc);
    began_mpi = true;
    return DCP_OK;
}

static int module_rank(void)
{
    int rank = 0;
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static int module_size(void)
{
    int size = 1;
    (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

static dcp_status module_create_world(const dcp_group_opts *opts, dcp_group **group_out)
{
    return dcp_group_create_mpi(MPI_COMM_WORLD, opts, group_out);
}

static void module_abort(int exit_code)
{
    (void)MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
}

static void module_finalize(void)
{
    if (began_mpi && !mpi_is_over()) (void)MPI_Finalize();
}

static const dcp_mpi_module module = {
    .struct_size = sizeof(dcp_mpi_module),
    .dcp_version = DCP_VERSION,
    .mpi_name = DCP_MPI_NAME,
    .mpi_version = module_version,
    .init = module_init,
    .world_rank = module_rank,
    .world_size = module_size,
    .create_world = module_create_world,
    .abort = module_abort,
    .finalize = module_finalize,
};

DCP_API const dcp_mpi_module *dcp_mpi_module_entry(void);
const dcp_mpi_module *dcp_mpi_module_entry(void)
{
    return &module;
}
