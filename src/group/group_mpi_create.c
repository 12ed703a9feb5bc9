/* SPDX-License-Identifier: Apache-2.0 */
/* How MPI ranks become a group: who is on which host, memory for each host, the handle; and splits.
 * Every step is a nonblocking all-gather that is tested until the deadline. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash_priv.h"
#include "group/group_mpi_priv.h"

bool dcp__mpi_is_over(void)
{
    int finalized = 0;
    return MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

static dcp_status take(size_t n, size_t elem_bytes, const char *what, void *ptr_out)
{
    void *mem;
    const dcp_status st = lib()->alloc_array(n, elem_bytes, what, &mem);
    if (st == DCP_OK) memcpy(ptr_out, &mem, sizeof(mem));
    return st;
}

/* --- one host: a shm group that also has a communicator --- */

struct mpi_shared {
    MPI_Comm comm;
    struct dcp__group_ops ops; /* those of shm, some replaced; keeps_buffers once MPI holds any */
};

static MPI_Comm shared_comm(const dcp_group *g)
{
    return ((struct mpi_shared *)g->outer)->comm;
}

static dcp_status shared_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    const dcp_status st = dcp__mpi_allreduce(g, shared_comm(g), buf, n);
    if (st != DCP_OK) ((struct mpi_shared *)g->outer)->ops.keeps_buffers = true;
    return st;
}

static void shared_free(dcp_group *g, void *ptr)
{
    if (!g->ops->keeps_buffers || !is_poisoned(g)) lib()->shm_ops->free(g, ptr);
}

static void shared_destroy(dcp_group *g)
{
    struct mpi_shared *const s = g->outer;
    if (is_poisoned(g) && s->ops.keeps_buffers) return; /* MPI may still write into group memory */
    if (!is_poisoned(g) && !dcp__mpi_is_over()) (void)MPI_Comm_free(&s->comm);
    g->ops = lib()->shm_ops;
    lib()->free(s);
    lib()->shm_ops->destroy(g);
}

static dcp_status shared_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out);

static struct dcp__group_ops make_shared_ops(void)
{
    struct dcp__group_ops ops = *lib()->shm_ops;
    ops.name = "mpi";
    ops.allreduce_f32 = shared_allreduce_f32;
    ops.free = shared_free;
    ops.split = shared_split;
    ops.destroy = shared_destroy;
    return ops;
}

/* --- creation: nonblocking calls, every rank goes through all of them --- */

/* What is known on the way to a group. */
struct meeting {
    MPI_Comm comm;
    int rank, size;
    int64_t end_ns, deadline_ns;
    bool is_late;
    int *host_of;    /* [size] any number per host */
    int *host_ranks; /* [size] */
    int leader, host_size, n_hosts;
};

static dcp_status wait_meeting(struct meeting *c, MPI_Request *request)
{
    struct dcp__wait w = {0};
    for (;;) {
        int done = 0;
        const int rc = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS) return dcp__mpi_fail("create_mpi: MPI_Test", rc);
        if (done) return DCP_OK;
        if (lib()->now_ns() > c->end_ns) {
            c->is_late = true;
            return FAIL(DCP_ERR_TIMEOUT,
                        "create_mpi: waited %.1f %s for ranks that did not call it (MPI does not "
                        "say which)",
                        dcp__wait_amount((double)c->deadline_ns * 1e-9),
                        dcp__wait_unit((double)c->deadline_ns * 1e-9));
        }
        dcp__mpi_pause(&w);
    }
}

/* All-gather into all [size * n_bytes]. Buffers of a call that came too late stay MPI's. */
static dcp_status gather(struct meeting *c, const void *own, size_t n_bytes, void *all)
{
    char *buf = NULL;
    const dcp_status taken = take((size_t)c->size + 1, n_bytes, "meeting of ranks", &buf);
    if (taken != DCP_OK) return taken; /* some ten bytes a rank: the others run into the deadline */
    char *const mine = buf + (size_t)c->size * n_bytes;
    memcpy(mine, own, n_bytes);
    MPI_Request request;
    const int rc = MPI_Iallgather(mine, (int)n_bytes, MPI_BYTE, buf, (int)n_bytes, MPI_BYTE,
                                  c->comm, &request);
    const dcp_status st = rc == MPI_SUCCESS ? wait_meeting(c, &request)
                                            : dcp__mpi_fail("create_mpi: MPI_Iallgather", rc);
    if (st == DCP_OK) memcpy(all, buf, (size_t)c->size * n_bytes);
    if (!c->is_late) lib()->free(buf);
    return st;
}

/* DCP_OK on all ranks or on none; own code first, then the lateness, then that another failed. */
static dcp_status all_ok(struct meeting *c, dcp_status own)
{
    int *codes = NULL;
    const int mine = (int)own;
    dcp_status st = take((size_t)c->size, sizeof(int), "meeting of ranks", &codes);
    if (st == DCP_OK) st = gather(c, &mine, sizeof(mine), codes);
    for (int r = 0; st == DCP_OK && own == DCP_OK && r < c->size; r++) {
        if (codes[r] != DCP_OK) {
            st = FAIL(DCP_ERR_PEER, "create_mpi: rank %d failed with code %d", r, codes[r]);
        }
    }
    lib()->free(codes);
    return own != DCP_OK ? own : st;
}

/* The same for ranks that can open each other's memory through /proc: one running kernel, one space
 * of process numbers, one user. */
static uint64_t host_key(void)
{
    char text[256] = "";
    ssize_t n = 0;
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        n = read(fd, text, sizeof(text));
        close(fd);
    }
    if (n <= 0) {
        (void)gethostname(text, sizeof(text) - 1);
        n = (ssize_t)strlen(text);
    }
    uint64_t key = dcp__hash_bytes(DCP__HASH_BEGIN, text, (size_t)n);
    struct stat info;
    if (stat("/proc/self/ns/pid", &info) == 0) {
        const uint64_t space[2] = {(uint64_t)info.st_dev, (uint64_t)info.st_ino};
        key = dcp__hash_bytes(key, space, sizeof(space));
    }
    const uint64_t user = (uint64_t)geteuid();
    return dcp__hash_bytes(key, &user, sizeof(user));
}

struct host_info {
    uint64_t key;
    int32_t shares, ranks_per_host;
};

/* Number the hosts by their first rank. Without sharing every rank is a host. */
static dcp_status find_hosts(struct meeting *c, int ranks_per_host, bool *shares_out)
{
    const char *env = getenv("DCP_ATTN_MPI_SHARED");
    struct host_info *infos = NULL;
    const struct host_info own = {.key = host_key(),
                                  .shares = env == NULL || strcmp(env, "0") != 0,
                                  .ranks_per_host = ranks_per_host};
    dcp_status st = take((size_t)c->size, sizeof(own), "hosts", &infos);
    if (st == DCP_OK) st = gather(c, &own, sizeof(own), infos);
    *shares_out = true;
    for (int r = 0; st == DCP_OK && r < c->size; r++) {
        if (infos[r].shares == 0) *shares_out = false;
        if (infos[r].ranks_per_host == infos[0].ranks_per_host) continue;
        st = FAIL(DCP_ERR_MISMATCH, "create_mpi: rank 0 has %d ranks per host, rank %d has %d",
                  infos[0].ranks_per_host, r, infos[r].ranks_per_host);
    }
    for (int r = 0; st == DCP_OK && r < c->size; r++) {
        c->host_of[r] = r;
        for (int q = 0; q < r && c->host_of[r] == r && *shares_out; q++) {
            const bool is_cut = ranks_per_host > 0 && q / ranks_per_host != r / ranks_per_host;
            if (infos[q].key == infos[r].key && !is_cut) c->host_of[r] = c->host_of[q];
        }
    }
    lib()->free(infos);
    return st;
}

/* Leader, size and ranks within the hosts from host_of. */
static void number_hosts(struct meeting *c)
{
    c->leader = -1;
    c->host_size = c->n_hosts = 0;
    for (int r = 0; r < c->size; r++) {
        c->host_ranks[r] = 0;
        for (int q = 0; q < r; q++) c->host_ranks[r] += c->host_of[q] == c->host_of[r];
        c->n_hosts += c->host_ranks[r] == 0;
        if (c->host_of[r] != c->host_of[c->rank]) continue;
        if (c->host_size++ == 0) c->leader = r;
    }
}

/* The memory of the leader of each host, mapped by its ranks; NULL on all ranks if any cannot: then
 * every rank is a host of its own. */
static dcp_status share_memory(struct meeting *c, const struct dcp__group_opts *opts,
                               dcp_shm **shm_out)
{
    struct where {
        int32_t pid, fd;
    } own = {.fd = -1}, *all = NULL;
    dcp_shm *shm = NULL;
    dcp_status st = take((size_t)c->size, sizeof(own), "meeting of ranks", &all);
    if (c->rank == c->leader && lib()->shm_make(c->host_size, opts, &shm) == DCP_OK) {
        own = (struct where){.pid = (int32_t)getpid(), .fd = lib()->shm_fd(shm)};
    }
    if (st == DCP_OK) st = gather(c, &own, sizeof(own), all);
    if (st == DCP_OK && shm == NULL && all[c->leader].fd >= 0) {
        (void)lib()->shm_join(c->host_size, all[c->leader].pid, all[c->leader].fd, &shm);
    }
    lib()->free(all);
    /* Also the point until which a leader keeps its descriptor. */
    if (st == DCP_OK) st = all_ok(c, shm != NULL ? DCP_OK : DCP_ERR_SYS);
    if (st == DCP_OK) {
        *shm_out = shm;
        return DCP_OK;
    }
    lib()->shm_release(shm);
    if (c->is_late) return st;
    for (int r = 0; r < c->size; r++) c->host_of[r] = r;
    number_hosts(c);
    return DCP_OK;
}

static dcp_status create_shared(struct meeting *c, dcp_shm *shm, dcp_group **group_out)
{
    struct mpi_shared *s = NULL;
    dcp_group *g = NULL;
    dcp_status st = take(1, sizeof(*s), "MPI group", &s);
    if (st == DCP_OK) st = lib()->shm_enter(shm, c->rank, &g);
    st = all_ok(c, st);
    if (st == DCP_OK) {
        s->comm = c->comm;
        s->ops = make_shared_ops();
        g->outer = s;
        g->ops = &s->ops;
        *group_out = g;
        return DCP_OK;
    }
    if (g != NULL) lib()->shm_ops->destroy(g);
    lib()->free(s);
    return st;
}

/* Fills a handle in zeroed memory; on failure the caller frees what there is. */
static dcp_status fill_wire(struct mpi_group *m, const struct meeting *c, dcp_shm *shm)
{
    const size_t n = (size_t)c->size, slot_n = 2 * dcp__xfers_max(c->size);
    dcp_status st = DCP_OK;
    if (shm != NULL) st = lib()->shm_enter(shm, c->host_ranks[c->rank], &m->host);
    if (st != DCP_OK) return st;
    /* Ranks of a host share the poison: who gave up tells the others at once. */
    st = lib()->init(&m->base, &dcp__mpi_ops, c->rank, c->size, c->deadline_ns,
                     m->host != NULL ? m->host->poison : NULL);
    if (st == DCP_OK) st = lib()->set_hosts(&m->base, c->host_of, 0);
    if (st == DCP_OK) st = take(n, sizeof(int), "ranks of hosts", &m->host_ranks);
    if (st == DCP_OK) memcpy(m->host_ranks, c->host_ranks, n * sizeof(int));
    if (st == DCP_OK) st = take(n + 1, sizeof(*m->frames), "records of an MPI group", &m->frames);
    if (st == DCP_OK) {
        st = take(2 * n, sizeof(MPI_Request), "MPI requests of records", &m->record_requests);
    }
    if (st == DCP_OK) {
        st = take(DCP__ALL_SLOTS * slot_n, sizeof(MPI_Request), "MPI requests", &m->requests);
    }
    if (st == DCP_OK) st = take(slot_n, sizeof(MPI_Status), "MPI statuses", &m->statuses);
    if (st == DCP_OK) {
        st = take(DCP__ALL_SLOTS * 2 * slot_n, sizeof(int), "MPI messages", &m->numbers);
    }
    if (st != DCP_OK) return st;
    for (size_t i = 0; i < 2 * n; i++) m->record_requests[i] = MPI_REQUEST_NULL;
    for (size_t slot = 0; slot < DCP__ALL_SLOTS; slot++) {
        m->open[slot].requests = m->requests + slot * slot_n;
        m->open[slot].peers = m->numbers + slot * 2 * slot_n;
        m->open[slot].n_bytes = m->open[slot].peers + slot_n;
    }
    return DCP_OK;
}

static dcp_status create_wire(struct meeting *c, dcp_shm *shm, dcp_group **group_out)
{
    struct mpi_group *m = NULL;
    dcp_status st = take(1, sizeof(*m), "MPI group", &m);
    if (st == DCP_OK) st = fill_wire(m, c, c->host_size > 1 ? shm : NULL);
    st = all_ok(c, st);
    if (st == DCP_OK) {
        m->comm = c->comm;
        *group_out = &m->base;
        return DCP_OK;
    }
    dcp__mpi_free(m);
    return st;
}

/* Takes comm over, on success. host_of: of the parent of a sub-group, or NULL: to be found. */
static dcp_status create_on(MPI_Comm comm, const struct dcp__group_opts *opts, dcp_status own,
                            const int *host_of, dcp_group **group_out)
{
    struct meeting c = {.comm = comm, .deadline_ns = opts->deadline_ns};
    c.end_ns = lib()->now_ns() + opts->deadline_ns;
    (void)MPI_Comm_rank(comm, &c.rank);
    (void)MPI_Comm_size(comm, &c.size);
    dcp_shm *shm = NULL;
    if (own == DCP_OK) own = take(2 * (size_t)c.size, sizeof(int), "hosts", &c.host_of);
    c.host_ranks = c.host_of != NULL ? c.host_of + c.size : NULL;
    dcp_status st = all_ok(&c, own);
    bool shares = true;
    if (st == DCP_OK && host_of == NULL) st = find_hosts(&c, opts->ranks_per_host, &shares);
    if (st == DCP_OK && host_of != NULL) {
        memcpy(c.host_of, host_of, (size_t)c.size * sizeof(int));
    }
    if (st == DCP_OK) {
        number_hosts(&c);
        const struct dcp__group_opts inside = {.deadline_ns = opts->deadline_ns};
        if (shares && (c.n_hosts < c.size || c.size == 1)) st = share_memory(&c, &inside, &shm);
    }
    if (st == DCP_OK) {
        st = shm != NULL && c.n_hosts == 1 ? create_shared(&c, shm, group_out)
                                           : create_wire(&c, shm, group_out);
    }
    lib()->shm_release(shm);
    lib()->free(c.host_of);
    return st;
}

dcp_status dcp__mpi_split(dcp_group *g, MPI_Comm comm, const struct dcp__split *how,
                          dcp_group **sub_out)
{
    /* All ranks have just had a record: none is late for the blocking call. */
    MPI_Comm part = MPI_COMM_NULL;
    const int color = how->size > 0 ? how->color : MPI_UNDEFINED;
    const int rc = MPI_Comm_split(comm, color, how->key, &part);
    dcp_status st = rc == MPI_SUCCESS ? DCP_OK : dcp__mpi_fail("split: MPI_Comm_split", rc);
    dcp_group *sub = NULL;
    if (part != MPI_COMM_NULL) {
        const struct dcp__group_opts opts = {.deadline_ns = g->deadline_ns};
        (void)MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN);
        st = create_on(part, &opts, st, how->host_of, &sub);
        if (sub == NULL) (void)MPI_Comm_free(&part);
    }
    st = lib()->agree(g, "split", st);
    if (st == DCP_OK) {
        *sub_out = sub;
    } else if (sub != NULL) {
        sub->ops->destroy(sub);
    }
    return st;
}

static dcp_status shared_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    return dcp__mpi_split(g, shared_comm(g), how, sub_out);
}

/* A launcher that speaks another MPI's protocol makes each process a world of one rank, which would
 * merge what is its own and call that the whole. A world of several, or a launcher of one process,
 * is as it should be: other launchers (srun) set the same variables. */
static dcp_status check_launcher(void)
{
#ifdef OPEN_MPI
    static const char variable[] = "PMI_SIZE", wanted[] = "Open MPI's (Debian: mpirun.openmpi)";
#else
    static const char variable[] = "OMPI_COMM_WORLD_SIZE";
    static const char wanted[] = "its own (of MPICH on Debian: mpirun.mpich)";
#endif
    int size = 1;
    (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *const text = getenv(variable);
    const long launched = text != NULL ? strtol(text, NULL, 10) : 0;
    if (size > 1 || launched < 2) return DCP_OK;
    return FAIL(DCP_ERR_NOT_SUPPORTED,
                "create_mpi: another MPI's launcher has started %ld processes (%s), but each is a "
                "world of one rank for %s, with which this program is built; start it with %s",
                launched, variable, DCP_MPI_NAME, wanted);
}

DCP_API dcp_status dcp_group_create_mpi(MPI_Comm comm, const dcp_group_opts *opts,
                                        dcp_group **group_out)
{
    const char *const misfit = dcp__module_misfit(lib());
    if (misfit != NULL) {
        return FAIL(DCP_ERR_NOT_SUPPORTED,
                    "this MPI module (version %s) is of another build than the library (version "
                    "%s): %s; take both from one build",
                    DCP_VERSION, lib()->version, misfit);
    }
    int initialized = 0;
    (void)MPI_Initialized(&initialized);
    if (!initialized || dcp__mpi_is_over()) {
        return FAIL(DCP_ERR_ARG, "create_mpi: MPI is not initialised, or finalised already");
    }
    if (group_out == NULL) return FAIL(DCP_ERR_ARG, "create_mpi: group_out is NULL");
    const dcp_status launched = check_launcher();
    if (launched != DCP_OK) return launched;
    int size = 1;
    (void)MPI_Comm_size(comm, &size);
    struct dcp__group_opts mine = {.deadline_ns = INT64_C(30000000000)};
    dcp_status own_st = lib()->opts_read(opts, &mine);
    if (own_st == DCP_OK) own_st = lib()->load_fault(size, true);
    struct meeting c = {.deadline_ns = mine.deadline_ns};
    c.end_ns = lib()->now_ns() + mine.deadline_ns;
    MPI_Comm *copy = NULL; /* MPI's to write when the wait has been given up: then it stays */
    dcp_status st = take(1, sizeof(*copy), "communicator", &copy);
    if (st != DCP_OK) return st;
    MPI_Request request;
    const int rc = MPI_Comm_idup(comm, copy, &request);
    st = rc == MPI_SUCCESS ? wait_meeting(&c, &request)
                           : dcp__mpi_fail("create_mpi: MPI_Comm_idup", rc);
    if (c.is_late) return st;
    MPI_Comm own = *copy;
    lib()->free(copy);
    if (st != DCP_OK) return st;
    (void)MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
    const dcp_status made = create_on(own, &mine, own_st, NULL, group_out);
    if (made != DCP_OK && made != DCP_ERR_TIMEOUT) (void)MPI_Comm_free(&own);
    return made;
}
