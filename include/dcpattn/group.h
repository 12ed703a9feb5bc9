/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: the ranks that shard one KV cache, and how they meet.
 *
 *   self      one rank, no peers: the same code as N ranks
 *   threads   ranks are threads of this process
 *   shm       ranks are processes of this host: prepare, fork, attach (or join by name)
 *   mpi       ranks are those of an MPI communicator (dcpattn/mpi.h, a shared object of its own)
 *
 * Every wait has the group's deadline. After a failure the group is poisoned: every later call on
 * it returns DCP_ERR_POISONED and names the first cause; only dcp_group_destroy is useful then. One
 * thread at a time per handle: a second concurrent call is refused with DCP_ERR_BUSY. */
#ifndef DCPATTN_GROUP_H
#define DCPATTN_GROUP_H

#include "dcpattn/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_group dcp_group;

typedef struct dcp_group_opts {
    size_t struct_size; /**< sizeof(dcp_group_opts); DCP_GROUP_OPTS_INIT sets it */
    double deadline_s;  /**< seconds any one wait may take; 0 = 30 */
} dcp_group_opts;
#define DCP_GROUP_OPTS_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_group_opts), 0.0                                                                \
    }

/** A group of one.  @param[in] opts NULL = defaults.  @param[out] group_out written on success
 * only. */
DCP_API dcp_status dcp_group_create_self(const dcp_group_opts *opts, dcp_group **group_out);
/** n handles that belong together; give groups_out[r] to thread r. Each is destroyed by its own
 * thread.
 *  @param[out] groups_out [n], written on success only. */
DCP_API dcp_status dcp_group_create_threads(int n, const dcp_group_opts *opts,
                                            dcp_group **groups_out);

/* --- shm: ranks are processes of one host
 * --------------------------------------------------------------------- */
typedef struct dcp_shm dcp_shm;
/** Map (anonymous, shared) what n ranks need; call before fork. kill -9 of anybody leaves nothing
 * behind. */
DCP_API dcp_status dcp_shm_prepare(int n, const dcp_group_opts *opts, dcp_shm **shm_out);
/** In rank's process, after fork. The dcp_shm may be released once attached. */
DCP_API dcp_status dcp_shm_attach(dcp_shm *shm, int rank, dcp_group **group_out);
/** By the parent that reaped rank: wait_status as from waitpid. Peers that still wait for it learn
 * how it died. */
DCP_API void dcp_shm_report_exit(dcp_shm *shm, int rank, int wait_status);
/** Unmap this process's view. Takes NULL. */
DCP_API void dcp_shm_release(dcp_shm *shm);

/* --- the group itself
 * ------------------------------------------------------------------------------------------ */
DCP_API int dcp_group_rank(const dcp_group *g);
DCP_API int dcp_group_size(const dcp_group *g);
/** "self", "threads", "shm" or "mpi". */
DCP_API const char *dcp_group_kind(const dcp_group *g);
DCP_API double dcp_group_deadline(const dcp_group *g);
/** Returns when all ranks have called it.
 *  @return DCP_OK; DCP_ERR_PEER (a rank died, left or gave up: the text names it), DCP_ERR_TIMEOUT
 * (the text names who did not arrive and where it is), DCP_ERR_POISONED (an earlier call failed),
 *          DCP_ERR_BUSY (another thread is inside this handle). The first failure of a group
 * reaches each rank once with its own code, whether or not the rank was waiting; then POISONED.
 *  Threads: one per handle.  Collective: yes.  Cost: one cache line per rank. */
DCP_API dcp_status dcp_group_barrier(dcp_group *g);
/** Collective; every rank gives n_bytes (the same on all) and gets all in rank order.
 *  @param[in] send [n_bytes]  @param[out] recv [size * n_bytes], may not overlap send
 *  @return as dcp_group_barrier; DCP_ERR_ARG (NULL, overlap); DCP_ERR_MISMATCH on all ranks if
 * n_bytes differs: then nothing has moved and the group goes on. Threads: one per handle.
 * Collective: yes.  Allocates nothing. */
DCP_API dcp_status dcp_group_allgather(dcp_group *g, const void *send, size_t n_bytes, void *recv);
/** Collective; in place. buf is [n_rows, row_stride_bytes] on every rank; rank r has filled the
 * bytes [col_off_bytes[r], col_off_bytes[r+1]) of each row; afterwards every rank has all of them.
 *  Memory from dcp_group_alloc is read directly by peers, other memory goes through bounce buffers
 * made at create.
 *  @param[in] col_off_bytes [size + 1], ascending, the same on all ranks; a rank's part may be
 * empty
 *  @return as dcp_group_allgather; rows, stride and columns must agree (DCP_ERR_MISMATCH).
 *  Threads: one per handle.  Collective: yes.  Allocates nothing.
 *  Cost: two barriers and one copy where all parts lie in group memory; else one barrier more per
 * tile and two copies. */
DCP_API dcp_status dcp_group_gather_cols(dcp_group *g, void *buf, size_t n_rows,
                                         size_t row_stride_bytes, const size_t *col_off_bytes);
/** Collective: each rank gets n_bytes of its own (sizes may differ, 0 is legal), zeroed, 64-byte
 * aligned, visible to the ranks of the same host. Counted by the allocator of the calling process.
 *  @return as dcp_group_barrier; DCP_ERR_NOMEM on all ranks if any has none (the group goes on).
 *  Ownership: dcp_group_free, or with the group. A threads group keeps what is left until its last
 *  handle is destroyed. At most 256 live at once.  Threads: one per handle.  Collective: yes. */
DCP_API dcp_status dcp_group_alloc(dcp_group *g, size_t n_bytes, void **ptr_out);
/** Collective. Takes NULL. */
DCP_API void dcp_group_free(dcp_group *g, void *ptr);
/** Poison the group by hand, for a caller that cannot go on (peers return DCP_ERR_PEER with this
 * text). */
DCP_API void dcp_group_abort(dcp_group *g, const char *why);
/** Not collective, never waits, takes NULL. All allocations of the group on this rank are gone
 * after it. */
DCP_API void dcp_group_destroy(dcp_group *g);

#ifdef __cplusplus
}
#endif
#endif
