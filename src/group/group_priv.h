/* SPDX-License-Identifier: Apache-2.0 */
/* The table a transport fills, and what the merge needs of a group beyond the public calls. */
#ifndef DCP_GROUP_GROUP_PRIV_H
#define DCP_GROUP_GROUP_PRIV_H

#include <stdbool.h>

#include "base/status_priv.h"
#include "dcpattn/group.h"

/* Largest record of dcp__group_record: fits the slots of the shared control block. */
enum { DCP__RECORD_MAX = 256, DCP__EXCHANGE_SLOTS = 4 };
/* Messages of an exchange each way, at most: two for each rank, and two more. */
static inline size_t dcp__xfers_max(int size)
{
    return 2 * (size_t)size + 2;
}

/* One message of an exchange. n_bytes = 0 is legal and sends nothing; both sides give the same
 * number. */
struct dcp__xfer {
    int peer;
    void *buf;
    size_t n_bytes;
    /* Of a send, where dcp__group_sends_pieces: whole pieces of so many bytes, one every
     * stride_bytes from buf on, then tail_bytes from tail; n_bytes in all, which arrive as one
     * stretch. 0 = n_bytes from buf. */
    size_t piece_bytes, stride_bytes;
    size_t tail_bytes;
    const void *tail;
};

/* All-gather of one small record per rank, latency first; it is also a barrier. n_bytes <=
 * DCP__RECORD_MAX. */
dcp_status dcp__group_record(dcp_group *g, const void *send, size_t n_bytes, void *recv);

/* Nonblocking pairwise exchange. Up to DCP__EXCHANGE_SLOTS may be open at once; all ranks open
 * slots in the same order; messages between a pair are matched in the order they were started. The
 * xfer arrays are copied; buffers stay borrowed until done. Messages to oneself are not allowed.
 * A record between start and wait is allowed, if all ranks have it there: a custom transport keeps
 * one order for both. */
dcp_status dcp__group_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                     int n_sends, const struct dcp__xfer *recvs, int n_recvs);
dcp_status dcp__group_exchange_test(dcp_group *g, unsigned slot, bool *done_out);
dcp_status dcp__group_exchange_wait(dcp_group *g, unsigned slot); /* with the deadline */

/* Sum over ranks in place by the transport's own all-reduce: MPI_Allreduce under mpi. Exists for
 * the published baseline only. */
dcp_status dcp__group_allreduce_f32(dcp_group *g, float *buf, size_t n);

/* Since when (dcp__now_ns) this rank has been in a call that knows no deadline, which is MPI's
 * blocking all-reduce alone (DCP_ATTN_MPI_BLOCKING=1); 0 = it is in none. Any thread may ask. */
int64_t dcp__group_unguarded_since(const dcp_group *g);
/* State letter of a process of this host as /proc has it (T: stopped, Z: ended); 0 where there is
 * none, or no /proc. */
char dcp__process_state(int pid);

/* Where ptr lies in the group's own allocations: an id that is the same on all ranks and the offset
 * in this rank's part; false if it does not lie in one that its peers can see. The range [ptr, ptr
 * + n_bytes) must lie inside whole. In a threads group, and where a host is one rank, every address
 * counts as visible. */
bool dcp__group_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out);
/* The address in this process of (alloc_id, offset) of rank's part; NULL if this rank cannot see it
 * (other host, or out of its bounds). */
void *dcp__group_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes);
/* Whether [ptr, ptr + n_bytes) touches the part of group memory of another rank of this host, and
 * of which; false where parts cannot be told apart (a threads group, ranks without common
 * memory). */
bool dcp__group_touches_peer(const dcp_group *g, const void *ptr, size_t n_bytes, int *rank_out);
/* True if all ranks are in one address space: an address of one is the same memory on all. */
bool dcp__group_one_space(const dcp_group *g);
/* True if the group is poisoned and its transport may still read or write the buffers that it was
 * given: who owns them must let them live until exit. */
bool dcp__group_keeps_buffers(const dcp_group *g);
/* True if the transport may be given [ptr, ptr + n_bytes) of a caller to send from: it lets go of
 * it when the group is poisoned, or the memory is the group's and lives as long. */
bool dcp__group_may_lend(const dcp_group *g, const void *ptr, size_t n_bytes);
/* True if messages may be made of pieces: the transport gathers them while it sends. The same on
 * all ranks of a group. */
bool dcp__group_sends_pieces(const dcp_group *g);
/* True if this rank can read rank's group memory directly: exactly if both have the same
 * dcp_group_host. The rank itself is always seen. */
bool dcp__group_sees(const dcp_group *g, int rank);
/* True if all ranks see each other's group memory (the same answer on all): there is one host. */
bool dcp__group_all_see(const dcp_group *g);

/* Hosts, for hierarchical algorithms (public: dcp_group_host, dcp_group_n_hosts).
 *
 *   - host h is a set of ranks that see each other's group memory; 0 .. M - 1 in order of their
 *     first rank, the same on all ranks; ranks of a host need not follow each other
 *   - a host without any shared memory (custom transports, MPI that cannot share) is one rank
 *   - dcp_group_opts.ranks_per_host, or DCP_ATTN_RANKS_PER_HOST where that is 0, cuts what was
 * found further (rank / k), so that a test on one machine takes every path of a cluster: peer_ptr
 * is NULL between simulated hosts, gather_cols and allreduce send messages
 *   - a group of one host, or of the first ranks of each host, comes from dcp_group_split:
 *         dcp_group_split(g, dcp_group_host(g, rank), rank, &inside);
 *         dcp_group_split(g, is_first_of_host ? 0 : -1, rank, &leaders);   leaders may be NULL
 *     Records of inside do not wait for other hosts. It has allocations of its own: memory of g is
 *     read with dcp__group_peer_ptr(g, rank in g, ...).
 *   - records of g are pairwise over MPI and custom transports (one round): M hosts cost a message
 *     per rank, so an algorithm in several steps does well to synchronise by its messages */

/* Mark the handle as in a call; DCP_ERR_BUSY if another thread is in one, DCP_ERR_POISONED if
 * poisoned. Composite calls (merge, attend) hold it over their inner group calls: it nests for the
 * thread that holds it. */
dcp_status dcp__group_enter(dcp_group *g);
void dcp__group_leave(dcp_group *g);
/* Poison with a code and text that peers will see ("rank 2: ..."), and the place in the source.
 * Returns code, or the first cause's where another was first; last error set. */
dcp_status dcp__group_poison_at(dcp_group *g, dcp_status code, const char *file, int line,
                                const char *fmt, ...) __attribute__((format(printf, 5, 6)));
#define dcp__group_poison(g, code, ...)                                                            \
    dcp__group_poison_at((g), (code), __FILE__, __LINE__, __VA_ARGS__)

/* Fault injection for tests: DCP_ATTN_FAULT="kill|stop|exit|delay:POINT:RANK[:COUNT]" strikes when
 * RANK passes the named POINT for the COUNT-th time (delay sleeps past the deadline). One getenv at
 * group create; a NULL test per point afterwards. */
void dcp__fault_point(const dcp_group *g, const char *point);

#endif
