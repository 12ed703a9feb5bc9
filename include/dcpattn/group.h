/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: the ranks that shard one KV cache, and how they meet. docs/GROUPS.md is the long form.
 *
 *   self      one rank, no peers: the same code as N ranks
 *   threads   ranks are threads of this process
 *   shm       ranks are processes of this host: prepare, fork, attach (or join by name)
 *   mpi       ranks are those of an MPI communicator (dcpattn/mpi.h, a shared object of its own)
 *   custom    whatever carries bytes: a table of the caller's (dcp_transport)
 *
 * Every wait has the group's deadline. Its text names the ranks that this one still waited for, and
 * of many how many more there are; in an exchange (mpi between hosts, custom) some of them may only
 * be waiting for another themselves: the late rank is the one that the texts of all others name.
 * After a failure the group is poisoned: every later call on it returns DCP_ERR_POISONED and names
 * the first cause; only dcp_group_destroy is useful then. One
 * thread at a time per handle: a second concurrent call is refused with DCP_ERR_BUSY.
 *
 * A collective call that one rank cannot take part in (an argument refused, no memory) fails on
 * every rank at once, the text naming that rank: the refusal travels in the call's first record and
 * nothing is poisoned. The exceptions are a NULL handle, of which the peers cannot learn, and a
 * rank without the memory for that record: it poisons the group, so that they need not wait. */
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
    /** > 0: as if every k ranks (rank / k) had a host of their own: memory between them is hidden,
     * never promised. 0: DCP_ATTN_RANKS_PER_HOST of the environment, or as found. */
    int ranks_per_host;
    int reserved; /**< 0 */
} dcp_group_opts;
#define DCP_GROUP_OPTS_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_group_opts), 0.0, 0, 0                                                          \
    }

/** Makes a group of one.
 *  @param[in]  opts       NULL = defaults
 *  @param[out] group_out  written on success only
 *  @return DCP_ERR_ARG (group_out is NULL, bad options), DCP_ERR_NOT_SUPPORTED (options of a later
 *          version), DCP_ERR_NOMEM
 *  Ownership: dcp_group_destroy.  Threads: any.  Collective: no. */
DCP_API dcp_status dcp_group_create_self(const dcp_group_opts *opts, dcp_group **group_out);

/** Makes n handles that belong together, for n threads of this process.
 *  @param[in]  n           1 to 4096
 *  @param[in]  opts        NULL = defaults
 *  @param[out] groups_out  [n]; give groups_out[r] to thread r; written on success only
 *  @return as dcp_group_create_self
 *  Ownership: dcp_group_destroy for each handle, by its own thread, in any order; memory of the
 *  group lives until the last.  Threads: any; one call makes all handles.  Collective: no. */
DCP_API dcp_status dcp_group_create_threads(int n, const dcp_group_opts *opts,
                                            dcp_group **groups_out);

/* --- shm: ranks are processes of one host --- */

typedef struct dcp_shm dcp_shm;

/** Maps (anonymous, shared) what n ranks need; call it before fork. kill -9 of anybody leaves
 *  nothing behind.
 *  @param[in]  n        1 to 4096
 *  @param[in]  opts     NULL = defaults; of all ranks
 *  @param[out] shm_out  written on success only
 *  @return DCP_ERR_ARG, DCP_ERR_NOMEM, DCP_ERR_SYS (no memfd, or a file-size limit that is too
 *          small; the text has the numbers)
 *  Ownership: dcp_shm_release in every process that has it, forked ones included.  Threads: any.
 *  Collective: no; one call for all ranks. */
DCP_API dcp_status dcp_shm_prepare(int n, const dcp_group_opts *opts, dcp_shm **shm_out);

/** Makes the handle of rank; in its process, after fork.
 *  @param[in]  shm        of dcp_shm_prepare; may be released once attached
 *  @param[in]  rank       0 to n - 1, each once
 *  @param[out] group_out  written on success only
 *  @return DCP_ERR_ARG (NULL, rank out of range or attached already), DCP_ERR_NOMEM
 *  Ownership: dcp_group_destroy.  Threads: any.  Collective: no; who has not attached is named as
 *  late by those that wait for it. */
DCP_API dcp_status dcp_shm_attach(dcp_shm *shm, int rank, dcp_group **group_out);

/** Tells those who wait for rank how its process ended; by the parent that reaped it.
 *  @param[in] shm          NULL does nothing
 *  @param[in] rank         out of range does nothing
 *  @param[in] wait_status  as from waitpid
 *  Threads: any.  Collective: no. */
DCP_API void dcp_shm_report_exit(dcp_shm *shm, int rank, int wait_status);

/** Unmaps this process's view.
 *  @param[in] shm  takes NULL
 *  Threads: any.  Collective: no; handles that are attached stay good. */
DCP_API void dcp_shm_release(dcp_shm *shm);

/** Makes a shm group of processes that are not related: they meet under a name. Returns when all n
 *  are in; the name is gone then and can be used again. Needs /proc and /dev/shm (some KiB there).
 *  A process that is killed on the way leaves at most the name (/dev/shm/dcp-attn.UID.NAME), which
 *  the next join finds by the dead process's number and start time, and replaces.
 *  @param[in]  name       1 to 100 of A-Z a-z 0-9 . _ -, not beginning with a dot; one run's own:
 *                         two runs of a user with one name at a time disturb each other. Names of
 *                         different users do not meet.
 *  @param[in]  rank       0 to n - 1, each once
 *  @param[in]  n          1 to 4096, the same on all
 *  @param[in]  opts       NULL = defaults; ranks_per_host the same on all. The deadline is for the
 *                         joining; that of the group is the first comer's.
 *  @param[out] group_out  written on success only
 *  @return DCP_ERR_ARG; DCP_ERR_TIMEOUT (the text names who is missing); DCP_ERR_MISMATCH (n,
 * options or version differ, or a rank came twice: on both sides, and on all that wait);
 *          DCP_ERR_PEER (a process that had come died); DCP_ERR_SYS (the name belongs to another
 *          user, no /dev/shm); DCP_ERR_NOT_SUPPORTED (ranks in different containers);
 *          DCP_ERR_NOMEM. All that wait return the same text.
 *  Ownership: dcp_group_destroy.  Threads: any.  Collective: yes. */
DCP_API dcp_status dcp_group_join_shm(const char *name, int rank, int n, const dcp_group_opts *opts,
                                      dcp_group **group_out);

/* --- custom: the caller carries the bytes --- */

/** Between every two ranks lies a stream of bytes in each direction: reliable, in order, without
 *  borders of messages (a pipe, a socket, a ring; a message library behind a buffer). The library
 *  makes records, messages, deadlines and sub-groups out of it. No operation may block or call the
 *  library. All are called by the thread that uses the group, or one of its sub-groups. */
typedef struct dcp_transport {
    size_t struct_size; /**< sizeof(dcp_transport); DCP_TRANSPORT_INIT sets it */
    void *ctx;          /**< handed to every operation */
    /** Takes up to n_bytes (>= 1) from the front of buf into the stream to peer. buf may change as
     *  soon as it returns. *n_moved_out = 0: no room now.
     *  @return DCP_OK; DCP_ERR_PEER: peer will never read again (its process is gone, the stream is
     *          closed); any other code: the transport is broken. A failure poisons the group. */
    dcp_status (*send)(void *ctx, int peer, const void *buf, size_t n_bytes, size_t *n_moved_out);
    /** Takes up to n_bytes (>= 1) from the stream of peer. *n_moved_out = 0: nothing there now.
     *  @return as send; DCP_ERR_PEER: nothing will ever come again, and all that came is taken.
     *          It counts as a failure when this rank waits for something from peer. */
    dcp_status (*recv)(void *ctx, int peer, void *buf, size_t n_bytes, size_t *n_moved_out);
    /** Optional. Sleeps until one of the streams can move, or timeout_ms have passed; may return
     *  early. NULL: the library naps 50 us at a time. */
    void (*wait)(void *ctx, const int *recv_from, int n_recv_from, const int *send_to,
                 int n_send_to, int timeout_ms);
    /** Optional. A faster all-gather of small records (n_bytes is always the same) of all ranks,
     *  that must not touch the streams; recv [size * n_bytes]. It blocks; the deadline is its own
     *  work: DCP_ERR_TIMEOUT after timeout_s. NULL, and in sub-groups: one message per peer. */
    dcp_status (*allgather)(void *ctx, const void *send, size_t n_bytes, void *recv,
                            double timeout_s);
    /** Optional. The last handle of the group and its sub-groups has been destroyed. */
    void (*close)(void *ctx);
} dcp_transport;
#define DCP_TRANSPORT_INIT                                                                         \
    {                                                                                              \
        sizeof(dcp_transport), NULL, NULL, NULL, NULL, NULL, NULL                                  \
    }

/** Makes a group on a transport of the caller's. Every rank is a host by itself: dcp_group_alloc
 *  gives private memory, and every merge works but `direct`. examples/transport_pipes.c is one.
 *  @param[in]  transport  is copied; send and recv are required; its streams are used from now on
 * by the library alone
 *  @param[in]  rank       0 to n - 1
 *  @param[in]  n          1 to 4096
 *  @param[in]  opts       NULL = defaults; the same on all ranks
 *  @param[out] group_out  written on success only
 *  @return DCP_ERR_ARG, DCP_ERR_NOT_SUPPORTED (a table of a later version), DCP_ERR_NOMEM; on
 *          failure close is not called
 *  Ownership: dcp_group_destroy; ctx must live until close.  Threads: one for the group and all its
 *  sub-groups.  Collective: no; who is not there is named as late by those that wait for it. A
 *  failure is told to the peers where their streams are between two messages; else they notice by
 *  the deadline. A failure of a sub-group in the middle of a message is one of its parent too. */
DCP_API dcp_status dcp_group_create_custom(const dcp_transport *transport, int rank, int n,
                                           const dcp_group_opts *opts, dcp_group **group_out);

/* --- the group itself --- */

/** The rank of this handle, 0 to size - 1.
 *  @param[in] g  NULL gives -1
 *  Threads: any.  Collective: no. */
DCP_API int dcp_group_rank(const dcp_group *g);

/** The number of ranks.
 *  @param[in] g  NULL gives 0
 *  Threads: any.  Collective: no. */
DCP_API int dcp_group_size(const dcp_group *g);

/** "self", "threads", "shm", "mpi" or "custom"; of a sub-group that of its parent.
 *  @param[in] g  NULL gives "?"
 *  Ownership: static.  Threads: any.  Collective: no. */
DCP_API const char *dcp_group_kind(const dcp_group *g);

/** Seconds that any one wait may take.
 *  @param[in] g  NULL gives 0
 *  Threads: any.  Collective: no. */
DCP_API double dcp_group_deadline(const dcp_group *g);

/** The host of a rank: ranks with the same number see each other's group memory, and only they.
 *  Hosts are numbered 0 .. M - 1 in order of their first rank, the same on all ranks. self, threads
 *  and shm groups are one host; mpi groups have the real ones; where a rank shares memory with
 *  nobody (a custom transport, MPI with DCP_ATTN_MPI_SHARED=0) it is a host by itself. See
 *  dcp_group_opts.ranks_per_host for simulated ones. The ranks of a host need not follow each
 * other.
 *  @param[in] g     not NULL
 *  @param[in] rank  0 to size - 1
 *  @return the host, or -1 for a rank out of range.  Threads: any.  Collective: no. */
DCP_API int dcp_group_host(const dcp_group *g, int rank);

/** The number of hosts, M.
 *  @param[in] g  not NULL
 *  Threads: any.  Collective: no. */
DCP_API int dcp_group_n_hosts(const dcp_group *g);

/** Makes sub-groups: the ranks that give the same colour form one, in order of (key, rank). For
 *  tensor-parallel x DCP with N = tp * dcp ranks: colour rank % tp and rank / tp. The sub-group has
 *  the deadline, the kind and the hosts of its parent, memory of its own and a poison of its own:
 *  a failure in one group is not a failure in the other, a rank that died is found in both.
 *  @param[in]  g        both may be used afterwards; sub-groups may be split again
 *  @param[in]  color    0 or more; negative: this rank is in no sub-group
 *  @param[in]  key      any
 *  @param[out] sub_out  the sub-group, or NULL for a negative colour; written on success only
 *  @return as dcp_group_barrier; DCP_ERR_NOMEM, DCP_ERR_SYS on all ranks of g if any could not do
 *          its part: then g goes on
 *  Ownership: dcp_group_destroy, before or after that of g (mpi: before MPI_Finalize).
 *  Threads: one per handle; parent and sub-group are two handles, except on a custom transport,
 *  where both use the same streams.  Collective: yes, over g. */
DCP_API dcp_status dcp_group_split(dcp_group *g, int color, int key, dcp_group **sub_out);

/** Returns when all ranks have called it.
 *  @param[in] g  NULL is DCP_ERR_ARG
 *  @return DCP_OK; DCP_ERR_PEER (a rank died, left or gave up: the text names it), DCP_ERR_TIMEOUT
 * (the text names who did not arrive and where it is), DCP_ERR_POISONED (an earlier call failed),
 *          DCP_ERR_BUSY (another thread is inside this handle). The first failure of a group
 * reaches each rank once with its own code, whether or not the rank was waiting; then POISONED.
 *  Threads: one per handle.  Collective: yes.  Cost: one cache line per rank. */
DCP_API dcp_status dcp_group_barrier(dcp_group *g);

/** Gives every rank the bytes of all, in rank order.
 *  @param[in]  g        NULL is DCP_ERR_ARG
 *  @param[in]  send     [n_bytes]; NULL where n_bytes is 0
 *  @param[in]  n_bytes  the same on all ranks
 *  @param[out] recv     [size * n_bytes], may not overlap send
 *  @return as dcp_group_barrier; DCP_ERR_ARG (NULL, overlap) or DCP_ERR_MISMATCH (n_bytes
 * differs) on all ranks: then nothing has moved and the group goes on.
 *  Threads: one per handle.  Collective: yes.  Allocates nothing.  Cost: up to 248 bytes: one
 *  barrier; else two copies or one message per peer and tile. */
DCP_API dcp_status dcp_group_allgather(dcp_group *g, const void *send, size_t n_bytes, void *recv);

/** Fills in the columns of the other ranks, in place: rank r has filled the bytes
 *  [col_off_bytes[r], col_off_bytes[r+1]) of each row; afterwards every rank has all of them.
 *  Memory from dcp_group_alloc is read directly by peers where all ranks are on one host, other
 *  memory goes through bounce buffers made at create, and between hosts messages do it.
 *  @param[in]     g                 NULL is DCP_ERR_ARG
 *  @param[in,out] buf               [n_rows, row_stride_bytes]
 *  @param[in]     n_rows            may be 0; the same on all ranks
 *  @param[in]     row_stride_bytes  at least the width of all columns; the same on all ranks
 *  @param[in]     col_off_bytes     [size + 1], ascending, the same on all ranks; a rank's part may
 *                                   be empty
 *  @return as dcp_group_allgather; rows, stride and columns must agree (DCP_ERR_MISMATCH).
 *  Threads: one per handle.  Collective: yes.  Allocates nothing.
 *  Cost: two barriers and one copy where all parts lie in group memory; else one barrier (or
 *  exchange) more per tile and two copies. */
DCP_API dcp_status dcp_group_gather_cols(dcp_group *g, void *buf, size_t n_rows,
                                         size_t row_stride_bytes, const size_t *col_off_bytes);

/** As dcp_group_gather_cols, without the barrier at the end: peers may still be reading this rank's
 *  part when it returns. For loops in which another collective call on the group lies between this
 *  gather and the next write to the part anyway: entering that call says that the reading is done,
 *  returning from it that everybody's is.
 *  @param[in]     g                 NULL is DCP_ERR_ARG
 *  @param[in,out] buf               as there; this rank's part must not be written again before it
 *                                   has returned from another collective call on g
 *  @param[in]     n_rows            as there
 *  @param[in]     row_stride_bytes  as there
 *  @param[in]     col_off_bytes     as there
 *  @return as dcp_group_gather_cols.
 *  Threads: one per handle.  Collective: yes.  Allocates nothing.
 *  Cost: one barrier less where all parts lie in group memory; else the same. */
DCP_API dcp_status dcp_group_gather_cols_unfenced(dcp_group *g, void *buf, size_t n_rows,
                                                  size_t row_stride_bytes,
                                                  const size_t *col_off_bytes);

/** Gives each rank memory that the ranks of its host can read: zeroed, 64-byte aligned. Counted by
 *  the allocator of the calling process.
 *  @param[in]  g        NULL is DCP_ERR_ARG
 *  @param[in]  n_bytes  of this rank; may differ between ranks; 0 is legal and gives a pointer
 *  @param[out] ptr_out  written on success only
 *  @return as dcp_group_barrier; DCP_ERR_NOMEM on all ranks if any has none (the group goes on).
 *  Ownership: dcp_group_free, or with the group. A threads group keeps what is left until its last
 *  handle is destroyed. At most 256 live at once.  Threads: one per handle.  Collective: yes. */
DCP_API dcp_status dcp_group_alloc(dcp_group *g, size_t n_bytes, void **ptr_out);

/** Gives memory of dcp_group_alloc back, when no rank reads it any more.
 *  @param[in] g    NULL does nothing
 *  @param[in] ptr  this rank's part of the same allocation on all ranks; NULL does nothing
 *  Threads: one per handle.  Collective: yes; on a poisoned group it does not wait. */
DCP_API void dcp_group_free(dcp_group *g, void *ptr);

/** Poisons the group by hand, for a caller that cannot go on: peers return DCP_ERR_PEER with this
 *  text (mpi between hosts: they run into their deadline).
 *  @param[in] g    NULL does nothing
 *  @param[in] why  is copied; NULL: no reason given
 *  Threads: one per handle.  Collective: no. */
DCP_API void dcp_group_abort(dcp_group *g, const char *why);

/** Ends this rank's part. All allocations of the group on this rank are gone after it. Peers that
 *  wait for this rank, or will, get DCP_ERR_PEER: it has left.
 *  @param[in] g  takes NULL; no other thread may be inside
 *  Threads: one per handle.  Collective: no, never waits. */
DCP_API void dcp_group_destroy(dcp_group *g);

#ifdef __cplusplus
}
#endif
#endif
