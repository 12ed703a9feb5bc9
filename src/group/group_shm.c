/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are processes of one host. All they share lies in one memfd, a file without a name that is
 * inherited through fork, or opened through /proc by processes that know its holder. It is as long
 * as address space allows and stays sparse: allocation k begins at the same offset on all ranks
 * because all count the same sizes, and fresh pages are zero.
 *
 *   memfd   | control block | alloc 1: part of rank 0 | part of rank 1 | .. | alloc 2: part of ..
 *
 * Every part begins on a page; every rank maps whole allocations. When the last process ends,
 * however it ends, the kernel takes all back. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "group/group_mem_priv.h"

enum { MAX_ALLOCS = 256, PAGE = 4096 };
static const uint64_t most_file_bytes = UINT64_C(1) << 46;
/* From here on an allocation asks for huge pages, and begins at one in the file. */
static const uint64_t huge_page = UINT64_C(2) << 20;

struct dcp_shm {
    atomic_int n_refs; /* of this process */
    int n;
    int fd;
    uint64_t file_bytes;
    struct dcp__mem_core *core;
    size_t core_bytes;
};

/* A live allocation; part r is [begin[r], begin[r] + n_bytes[r]) of the mapping. */
struct shm_alloc {
    char *base;
    uint64_t map_bytes, file_offset;
    size_t noted_bytes;
    uint64_t *begin, *n_bytes; /* [size] each, in one block */
};

struct shm_extra {
    struct dcp_shm *shm;
    struct dcp_shm *root; /* of a sub-group: keeps mapped what its root_core lies in */
    uint64_t file_used;
    int n_high; /* entries above are free */
    struct shm_alloc allocs[MAX_ALLOCS];
};

/* Map the control block of the file in shm->fd; *shm is freed by the caller on failure. */
static dcp_status map_core(struct dcp_shm *shm)
{
    shm->core_bytes = dcp__mem_core_bytes(shm->n);
    void *map = mmap(NULL, shm->core_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (map == MAP_FAILED) {
        return dcp__fail(DCP_ERR_NOMEM, "control block of a shm group: mapping %zu bytes: %s",
                         shm->core_bytes, strerror(errno));
    }
    shm->core = map;
    return DCP_OK;
}

static dcp_status make_file(struct dcp_shm *shm)
{
    shm->fd = memfd_create("dcp-attn", MFD_CLOEXEC);
    if (shm->fd >= 0 && shm->fd <= 2) {
        /* The caller has closed a standard stream; what is written there must not land here. */
        const int low = shm->fd;
        shm->fd = fcntl(low, F_DUPFD_CLOEXEC, 3);
        const int err = errno;
        close(low);
        errno = err;
    }
    if (shm->fd < 0) {
        return dcp__fail(DCP_ERR_SYS, "shm_prepare: memfd_create: %s", strerror(errno));
    }
    /* A file-size limit of the process would kill it at ftruncate. */
    struct rlimit limit;
    shm->file_bytes = most_file_bytes;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < most_file_bytes) {
        shm->file_bytes = (uint64_t)limit.rlim_cur / PAGE * PAGE;
    }
    if (shm->file_bytes < dcp__mem_core_bytes(shm->n)) {
        return dcp__fail(DCP_ERR_SYS,
                         "shm_prepare: the file-size limit of %llu bytes is below the %zu of the "
                         "control block",
                         (unsigned long long)shm->file_bytes, dcp__mem_core_bytes(shm->n));
    }
    if (ftruncate(shm->fd, (off_t)shm->file_bytes) != 0) {
        return dcp__fail(DCP_ERR_SYS, "shm_prepare: ftruncate to %llu: %s",
                         (unsigned long long)shm->file_bytes, strerror(errno));
    }
    return DCP_OK;
}

static dcp_status new_shm(int n, struct dcp_shm **shm_out)
{
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct dcp_shm), "shm group", &mem));
    struct dcp_shm *const shm = mem;
    atomic_store(&shm->n_refs, 1);
    shm->n = n;
    shm->fd = -1;
    *shm_out = shm;
    return DCP_OK;
}

dcp_status dcp__shm_make(int n, const struct dcp__group_opts *opts, dcp_shm **shm_out)
{
    struct dcp_shm *shm;
    DCP_TRY(new_shm(n, &shm));
    dcp_status st = make_file(shm);
    if (st == DCP_OK) st = map_core(shm);
    if (st != DCP_OK) {
        dcp_shm_release(shm);
        return st;
    }
    dcp__mem_core_init(shm->core, n, opts, true);
    *shm_out = shm;
    return DCP_OK;
}

dcp_status dcp_shm_prepare(int n, const dcp_group_opts *opts, dcp_shm **shm_out)
{
    if (n < 1 || n > 4096) {
        return dcp__fail(DCP_ERR_ARG, "shm_prepare: %d ranks; 1 to 4096 are possible", n);
    }
    if (shm_out == NULL) return dcp__fail(DCP_ERR_ARG, "shm_prepare: shm_out is NULL");
    struct dcp__group_opts mine;
    DCP_TRY(dcp__group_opts_read(opts, &mine));
    DCP_TRY(dcp__group_load_fault(n, true));
    return dcp__shm_make(n, &mine, shm_out);
}

int dcp__shm_fd(const dcp_shm *shm)
{
    return shm->fd;
}

dcp_status dcp__shm_join(int n, int holder_pid, int holder_fd, dcp_shm **shm_out)
{
    char path[64];
    struct dcp_shm *shm;
    DCP_TRY(new_shm(n, &shm));
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", holder_pid, holder_fd);
    shm->fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat info;
    dcp_status st = DCP_OK;
    if (shm->fd < 0 || fstat(shm->fd, &info) != 0) {
        st = dcp__fail(DCP_ERR_SYS, "cannot open the group's memory %s: %s", path, strerror(errno));
    } else if ((uint64_t)info.st_size < dcp__mem_core_bytes(n)) {
        st = dcp__fail(DCP_ERR_SYS, "%s is no group memory of %d ranks", path, n);
    } else {
        shm->file_bytes = (uint64_t)info.st_size;
        st = map_core(shm);
    }
    if (st != DCP_OK) {
        dcp_shm_release(shm);
        return st;
    }
    *shm_out = shm;
    return DCP_OK;
}

void dcp_shm_release(dcp_shm *shm)
{
    if (shm == NULL || atomic_fetch_sub(&shm->n_refs, 1) != 1) return;
    if (shm->fd >= 0) close(shm->fd);
    if (shm->core != NULL) munmap(shm->core, shm->core_bytes);
    dcp__free(shm);
}

void dcp_shm_report_exit(dcp_shm *shm, int rank, int wait_status)
{
    if (shm == NULL || rank < 0 || rank >= shm->n) return;
    dcp__mem_report_exit(shm->core, rank, wait_status);
}

static void drop_alloc(struct shm_extra *x, struct shm_alloc *a)
{
    if (a->base != NULL) munmap(a->base, a->map_bytes);
    if (a->noted_bytes > 0) dcp__alloc_forget(a->noted_bytes);
    dcp__free(a->begin);
    *a = (struct shm_alloc){.base = NULL};
    while (x->n_high > 0 && x->allocs[x->n_high - 1].base == NULL) x->n_high--;
}

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Lay the parts out from the sizes of all ranks: the same on all. */
static dcp_status place_parts(dcp_group *g, struct shm_extra *x, struct shm_alloc *a,
                              const uint64_t *sizes)
{
    uint64_t at = 0;
    for (int r = 0; r < g->size; r++) {
        if (sizes[r] > x->shm->file_bytes) {
            return dcp__fail(DCP_ERR_NOMEM, "alloc: rank %d wants %llu bytes", r,
                             (unsigned long long)sizes[r]);
        }
        a->begin[r] = at;
        a->n_bytes[r] = sizes[r];
        at += sizes[r] == 0 ? PAGE : round_up(sizes[r], PAGE); /* a pointer even to nothing */
    }
    a->map_bytes = at;
    a->file_offset = at >= huge_page ? round_up(x->file_used, huge_page) : x->file_used;
    if (at > x->shm->file_bytes || a->file_offset > x->shm->file_bytes - at) {
        return dcp__fail(DCP_ERR_NOMEM, "alloc: %llu bytes exceed the %llu of the group's file",
                         (unsigned long long)at, (unsigned long long)x->shm->file_bytes);
    }
    x->file_used = a->file_offset + at;
    return DCP_OK;
}

/* Map with the start at a multiple of the huge page where that can pay. */
static dcp_status map_parts(struct shm_extra *x, struct shm_alloc *a)
{
    const uint64_t align = a->map_bytes >= huge_page ? huge_page : PAGE;
    const size_t room = a->map_bytes + align - PAGE;
    char *const reserve = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserve == MAP_FAILED) {
        return dcp__fail(DCP_ERR_NOMEM, "alloc: no address space for %zu bytes: %s", room,
                         strerror(errno));
    }
    char *const start = reserve + (round_up((uintptr_t)reserve, align) - (uintptr_t)reserve);
    void *map = mmap(start, a->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     x->shm->fd, (off_t)a->file_offset);
    if (map == MAP_FAILED) {
        const int err = errno;
        munmap(reserve, room);
        return dcp__fail(DCP_ERR_NOMEM, "alloc: mapping %llu bytes: %s",
                         (unsigned long long)a->map_bytes, strerror(err));
    }
    char *const end = start + a->map_bytes;
    if (start > reserve) munmap(reserve, (size_t)(start - reserve));
    if (reserve + room > end) munmap(end, (size_t)(reserve + room - end));
    if (align == huge_page) (void)madvise(map, a->map_bytes, MADV_HUGEPAGE); /* a wish */
    a->base = map;
    return DCP_OK;
}

/* All that this rank does for an allocation; *a is dropped by the caller on failure. */
static dcp_status take_own(dcp_group *g, struct shm_extra *x, struct shm_alloc *a,
                           const uint64_t *sizes)
{
    void *mem;
    DCP_TRY(dcp__alloc_array(2 * (size_t)g->size, sizeof(uint64_t), "parts of group memory", &mem));
    a->begin = mem;
    a->n_bytes = a->begin + g->size;
    DCP_TRY(place_parts(g, x, a, sizes));
    DCP_TRY(dcp__alloc_note((size_t)sizes[g->rank], "group memory"));
    a->noted_bytes = (size_t)sizes[g->rank];
    return map_parts(x, a);
}

static dcp_status shm_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    struct shm_extra *const x = dcp__mem_of(g)->extra;
    const uint64_t own_bytes = n_bytes;
    uint64_t *const sizes = g->scratch;
    DCP_TRY(dcp__mem_record(g, &own_bytes, sizeof(own_bytes), sizes));
    /* Entries are taken and freed by all ranks alike, so the index is the same on all. */
    int id = 0;
    while (id < MAX_ALLOCS && x->allocs[id].base != NULL) id++;
    if (id == MAX_ALLOCS) {
        return dcp__fail(DCP_ERR_NOMEM, "alloc: %d allocations of the group are live already",
                         MAX_ALLOCS);
    }
    struct shm_alloc *const a = &x->allocs[id];
    if (x->n_high <= id) x->n_high = id + 1;
    const uint64_t file_used = x->file_used;
    const dcp_status own = take_own(g, x, a, sizes);
    const int32_t own_code = (int32_t)own;
    int32_t *const codes = g->scratch;
    const dcp_status st = dcp__mem_record(g, &own_code, sizeof(own_code), codes);
    if (st == DCP_OK && own == DCP_OK) {
        int failed = -1;
        for (int r = 0; r < g->size && failed < 0; r++) {
            if (codes[r] != DCP_OK) failed = r;
        }
        if (failed < 0) {
            *ptr_out = a->base + a->begin[g->rank];
            return DCP_OK;
        }
        (void)dcp__fail((dcp_status)codes[failed], "alloc: rank %d could not get its group memory",
                        failed);
        x->file_used = file_used;
        drop_alloc(x, a);
        return (dcp_status)codes[failed];
    }
    x->file_used = file_used;
    drop_alloc(x, a);
    return st != DCP_OK ? st : own;
}

/* Every hole is taken out of the page tables of every rank, so in a large group rank 0 makes one
 * for all. */
static void give_back(const struct shm_extra *x, dcp_group *g, const struct shm_alloc *a)
{
    uint64_t begin = a->begin[g->rank], n_bytes = round_up(a->n_bytes[g->rank] + 1, PAGE);
    if (g->size > 64) {
        if (g->rank != 0) return;
        begin = 0;
        n_bytes = a->map_bytes;
    }
    (void)fallocate(x->shm->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (off_t)(a->file_offset + begin), (off_t)n_bytes);
}

static void shm_free(dcp_group *g, void *ptr)
{
    struct shm_extra *const x = dcp__mem_of(g)->extra;
    int id = 0;
    while (id < x->n_high && (x->allocs[id].base == NULL ||
                              x->allocs[id].base + x->allocs[id].begin[g->rank] != ptr)) {
        id++;
    }
    const bool found = id < x->n_high;
    if (!dcp__group_is_poisoned(g)) {
        const int32_t own_id = found ? id : -1;
        int32_t *const ids = g->scratch;
        if (dcp__mem_record(g, &own_id, sizeof(own_id), ids) == DCP_OK) {
            for (int r = 0; r < g->size; r++) {
                if (ids[r] == ids[0]) continue;
                (void)dcp__group_poison(g, DCP_ERR_MISMATCH,
                                        "free: rank 0 frees allocation %d, rank %d frees %d",
                                        ids[0], r, ids[r]);
                break;
            }
            /* Everybody has arrived, so nobody reads: give the pages back. */
            if (found && !dcp__group_is_poisoned(g)) {
                give_back(x, g, &x->allocs[id]);
            }
        }
    }
    if (found) drop_alloc(x, &x->allocs[id]);
}

static bool shm_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out)
{
    const struct shm_extra *const x = ((const struct dcp__mem_group *)g)->extra;
    for (int id = 0; id < x->n_high; id++) {
        const struct shm_alloc *const a = &x->allocs[id];
        if (a->base == NULL) continue;
        const uintptr_t begin = (uintptr_t)(a->base + a->begin[g->rank]);
        const uint64_t size = a->n_bytes[g->rank];
        const uint64_t offset = (uint64_t)((uintptr_t)ptr - begin);
        if ((uintptr_t)ptr < begin || offset > size || n_bytes > size - offset) continue;
        *alloc_id_out = (uint32_t)id + 1;
        *offset_out = offset;
        return true;
    }
    return false;
}

static void *shm_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes)
{
    const struct shm_extra *const x = ((const struct dcp__mem_group *)g)->extra;
    if (alloc_id < 1 || alloc_id > (uint32_t)x->n_high) return NULL;
    const struct shm_alloc *const a = &x->allocs[alloc_id - 1];
    if (a->base == NULL) return NULL;
    const uint64_t size = a->n_bytes[rank];
    if (offset > size || n_bytes > size - offset) return NULL;
    return a->base + a->begin[rank] + offset;
}

static bool meets(uintptr_t a, uint64_t a_bytes, uintptr_t b, uint64_t b_bytes)
{
    return a_bytes > 0 && b_bytes > 0 && (a <= b ? b - a < a_bytes : a - b < b_bytes);
}

static bool shm_touches_peer(const dcp_group *g, const void *ptr, size_t n_bytes, int *rank_out)
{
    const struct shm_extra *const x = ((const struct dcp__mem_group *)g)->extra;
    uint32_t id;
    uint64_t offset;
    if (shm_locate(g, ptr, n_bytes, &id, &offset)) return false; /* the usual case: in its own */
    for (int k = 0; k < x->n_high; k++) {
        const struct shm_alloc *const a = &x->allocs[k];
        const uintptr_t begin = (uintptr_t)a->base;
        if (a->base == NULL || !meets((uintptr_t)ptr, n_bytes, begin, a->map_bytes)) continue;
        for (int r = 0; r < g->size; r++) {
            if (r == g->rank || !meets((uintptr_t)ptr, n_bytes, begin + a->begin[r], a->n_bytes[r]))
                continue;
            *rank_out = r;
            return true;
        }
    }
    return false;
}

static void shm_destroy(dcp_group *g)
{
    struct dcp__mem_group *const m = dcp__mem_of(g);
    struct shm_extra *const x = m->extra;
    for (int id = MAX_ALLOCS - 1; id >= 0; id--) drop_alloc(x, &x->allocs[id]);
    struct dcp_shm *const shm = x->shm;
    dcp__mem_group_fini(m);
    dcp_shm_release(shm);
    dcp_shm_release(x->root);
    dcp__free(x);
    dcp__free(m);
}

/* The leader of each sub-group makes its memory, the others open it through /proc. The leader's
 * descriptor is open until the last record, as its dcp_shm is. */
static dcp_status shm_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    struct told {
        int32_t pid, fd, code;
    } own = {.fd = -1}, *const all = g->scratch;
    struct dcp_shm *const parent = ((struct shm_extra *)dcp__mem_of(g)->extra)->shm;
    struct dcp_shm *shm = NULL;
    dcp_group *sub = NULL;
    if (how->leader == g->rank) {
        const struct dcp__group_opts opts = {.deadline_ns = g->deadline_ns};
        own.code = (int32_t)dcp__shm_make(how->size, &opts, &shm);
        own.pid = (int32_t)getpid();
        own.fd = shm != NULL ? shm->fd : -1;
    }
    dcp_status st = g->ops->record(g, &own, sizeof(own), all);
    if (st == DCP_OK) {
        st = (dcp_status)own.code;
        if (how->size > 0 && shm == NULL && all[how->leader].fd >= 0) {
            st = dcp__shm_join(how->size, all[how->leader].pid, all[how->leader].fd, &shm);
        }
        if (shm != NULL) st = dcp__shm_enter(shm, how->rank, &sub);
        if (sub != NULL) {
            struct shm_extra *const x = dcp__mem_of(sub)->extra;
            atomic_fetch_add(&parent->n_refs, 1);
            x->root = parent;
            st = dcp__mem_group_from(dcp__mem_of(sub), dcp__mem_of(g), how);
        }
        st = dcp__group_agree(g, "split", st);
    }
    dcp_shm_release(shm);
    if (st != DCP_OK) {
        dcp_group_destroy(sub);
        return st;
    }
    *sub_out = sub;
    return DCP_OK;
}

const struct dcp__group_ops dcp__shm_ops = {
    .name = "shm",
    .record = dcp__mem_record,
    .exchange_start = dcp__mem_exchange_start,
    .exchange_test = dcp__mem_exchange_test,
    .exchange_wait = dcp__mem_exchange_wait,
    .allreduce_f32 = dcp__mem_allreduce_f32,
    .alloc = shm_alloc,
    .free = shm_free,
    .locate = shm_locate,
    .peer_ptr = shm_peer_ptr,
    .split = shm_split,
    .staging = dcp__mem_staging,
    .set_call = dcp__mem_set_call,
    .destroy = shm_destroy,
    .touches_peer = shm_touches_peer,
};

dcp_status dcp__shm_enter(dcp_shm *shm, int rank, dcp_group **group_out)
{
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(struct dcp__mem_group), "handle of a shm group", &mem));
    struct dcp__mem_group *const m = mem;
    dcp_status st = dcp__alloc(sizeof(struct shm_extra), "allocations of a shm group", &mem);
    if (st != DCP_OK) goto err_handle;
    struct shm_extra *const x = mem;
    x->shm = shm;
    x->file_used = shm->core_bytes;
    m->extra = x;
    dcp__mem_watch_self(shm->core, rank);
    st = dcp__mem_group_init(m, &dcp__shm_ops, rank, shm->core);
    if (st != DCP_OK) goto err_extra;
    atomic_fetch_add(&shm->n_refs, 1);
    *group_out = &m->base;
    return DCP_OK;
err_extra:
    dcp__free(x);
err_handle:
    dcp__free(m);
    return st;
}

dcp_status dcp_shm_attach(dcp_shm *shm, int rank, dcp_group **group_out)
{
    if (shm == NULL || group_out == NULL) {
        return dcp__fail(DCP_ERR_ARG, "shm_attach: %s is NULL", shm == NULL ? "shm" : "group_out");
    }
    if (rank < 0 || rank >= shm->n) {
        return dcp__fail(DCP_ERR_ARG, "shm_attach: rank %d of %d", rank, shm->n);
    }
    if (atomic_load(&dcp__mem_member_at(shm->core, rank)->attached) != 0) {
        return dcp__fail(DCP_ERR_ARG, "shm_attach: rank %d is attached already", rank);
    }
    DCP_TRY(dcp__group_load_fault(shm->n, true));
    return dcp__shm_enter(shm, rank, group_out);
}
