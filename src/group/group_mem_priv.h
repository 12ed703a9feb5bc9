/* SPDX-License-Identifier: Apache-2.0 */
/* The core of every group whose ranks share memory (threads, shm, mpi inside a host): one control
 * block that all map, wherever it lies in their address spaces.
 *
 *   struct dcp__mem_core     sizes and offsets, the poison
 *   members   [n]            who is there, how it died, where it sleeps
 *   slots     [2][n]         records: slot [k & 1][r] holds record k of rank r
 *   ring ends [n][n]         of the byte ring from one rank to another
 *   rings     [n][n][ring_bytes]
 *   staging   [n][staging_bytes]   data on its way through gather_cols, allgather and allreduce
 *
 * Two slots per rank make a record all-gather one barrier: a rank writes record k + 2 over record k
 * only after it has seen everybody's record k + 1, which they wrote after reading record k. */
#ifndef DCP_GROUP_GROUP_MEM_PRIV_H
#define DCP_GROUP_GROUP_MEM_PRIV_H

#include <stdatomic.h>
#include <stdint.h>

#include "group/group_core_priv.h"

struct dcp__mem_member {
    _Alignas(64) _Atomic uint32_t attached;
    _Atomic uint32_t left;        /* has destroyed its handle */
    _Atomic uint32_t exit_known;  /* wait_status is valid */
    _Atomic int32_t wait_status;  /* as from waitpid */
    _Atomic int32_t pid;          /* 0: not watched */
    _Atomic uint64_t start_ticks; /* of the process, from /proc: a pid alone may be used again */
    _Atomic uint32_t call;        /* enum dcp__call */
    /* Whom it waits for, and what for: rank * 4 + enum dcp__mem_waits; 0: nobody, or not for long.
     * A stopped rank leaves here what it waited for then: dcp__mem_waits_for looks whether it still
     * has reason to. */
    _Atomic uint32_t waits;
    _Alignas(64) _Atomic uint32_t bell; /* rung when a ring of this rank has moved */
    _Atomic uint32_t bell_sleepers;
};

enum dcp__mem_waits {
    DCP__WAITS_NOT = 0,
    DCP__WAITS_RECORD, /* for its record */
    DCP__WAITS_DATA,   /* for something in its ring */
    DCP__WAITS_ROOM    /* for it to read what is in the ring to it */
};

struct dcp__mem_slot {
    _Alignas(64) _Atomic uint32_t seq; /* number of the record that is complete here */
    _Atomic uint32_t n_sleepers;
    uint32_t n_bytes;
    uint8_t data[DCP__RECORD_MAX];
};

/* Bytes ever written and read; their difference is what the ring holds. */
struct dcp__ring_ends {
    _Alignas(64) _Atomic uint64_t tail; /* of the sender */
    _Alignas(64) _Atomic uint64_t head; /* of the receiver */
};

struct dcp__mem_core {
    uint32_t n;
    uint32_t ring_bytes, staging_bytes;
    size_t off_members, off_slots, off_ends, off_rings, off_staging, total_bytes;
    int64_t deadline_ns;
    int32_t ranks_per_host; /* of a whole group; a sub-group's hosts are its parent's */
    bool check_pids;
    _Atomic uint32_t n_handles; /* of a threads group: the last one frees */
    struct dcp__poison poison;
};

/* Bytes of the control block of n ranks; and its sizes written into zeroed memory. */
size_t dcp__mem_core_bytes(int n);
void dcp__mem_core_init(struct dcp__mem_core *core, int n, const struct dcp__group_opts *opts,
                        bool check_pids);

/* One direction of an open exchange. */
struct dcp__mem_flow {
    int peer;
    char *buf;
    uint64_t n_bytes, done_bytes; /* of the 8-byte header and the payload */
};
struct dcp__mem_open {
    bool is_open;
    uint32_t number; /* order of starting */
    int n_sends, n_recvs, n_left;
    struct dcp__mem_flow *sends, *recvs; /* [dcp__xfers_max] each */
};

struct dcp__mem_group {
    dcp_group base; /* first: a dcp_group is one of these */
    struct dcp__mem_core *core;
    unsigned spin_rounds; /* 0: more ranks than CPUs */
    uint32_t record_no;
    uint32_t n_started; /* exchanges */
    struct dcp__mem_open open[DCP__ALL_SLOTS];
    struct dcp__mem_flow *flows; /* memory of the above */
    uint32_t *blocked;           /* [2 * size]: the pass that found this direction not empty */
    uint32_t pass;
    /* Of a sub-group: who reports to the group it was split from, and which rank is which there. */
    struct dcp__mem_core *root;
    int *root_ranks; /* [size] */
    void *extra;     /* of the transport */
};

/* Fill the common part of a handle in zeroed memory and take what exchanges need. */
dcp_status dcp__mem_group_init(struct dcp__mem_group *m, const struct dcp__group_ops *ops, int rank,
                               struct dcp__mem_core *core);
/* Make m a sub-group of parent: its hosts, and whose reports of deaths count. */
dcp_status dcp__mem_group_from(struct dcp__mem_group *m, const struct dcp__mem_group *parent,
                               const struct dcp__split *how);
void dcp__mem_group_fini(struct dcp__mem_group *m); /* says goodbye to peers, frees the flows */

static inline struct dcp__mem_group *dcp__mem_of(dcp_group *g)
{
    return (struct dcp__mem_group *)g;
}
static inline struct dcp__mem_member *dcp__mem_member_at(struct dcp__mem_core *core, int rank)
{
    return (struct dcp__mem_member *)(void *)((char *)core + core->off_members) + rank;
}
static inline struct dcp__mem_slot *dcp__mem_slot_at(struct dcp__mem_core *core, uint32_t record,
                                                     int rank)
{
    return (struct dcp__mem_slot *)(void *)((char *)core + core->off_slots) +
           (size_t)(record & 1) * core->n + (size_t)rank;
}

/* Watch the process of this rank: its pid and start time go into the control block. */
void dcp__mem_watch_self(struct dcp__mem_core *core, int rank);
/* A process by pid and start time. is_gone also for a zombie; false where there is no /proc. */
bool dcp__process_start(int pid, uint64_t *start_ticks_out);
bool dcp__process_is_gone(int pid, uint64_t start_ticks);
void dcp__mem_report_exit(struct dcp__mem_core *core, int rank, int wait_status);

/* The rank that rank waits for, as far as what it waits for is indeed not there; else -1. */
int dcp__mem_waits_for(struct dcp__mem_core *core, int rank);

/* The slow path of a wait: poison, dead peers, the deadline. is_awaited(m, r, ctx) says whether
 * rank r still holds up this wait. */
typedef bool dcp__is_awaited_fn(struct dcp__mem_group *m, int rank, const void *ctx);
dcp_status dcp__mem_check(struct dcp__mem_group *m, struct dcp__wait *w,
                          dcp__is_awaited_fn *is_awaited, const void *ctx);

/* group_shm.c. Join the memory of a process of this host (same user) that has prepared it:
 * holder_fd is dcp__shm_fd there. The holder keeps it open until all have joined. */
int dcp__shm_fd(const dcp_shm *shm);
dcp_status dcp__shm_join(int n, int holder_pid, int holder_fd, dcp_shm **shm_out);
dcp_status dcp__shm_make(int n, const struct dcp__group_opts *opts, dcp_shm **shm_out);
dcp_status dcp__shm_enter(dcp_shm *shm, int rank, dcp_group **group_out); /* no fault is loaded */
extern const struct dcp__group_ops dcp__shm_ops;

/* Operations of the table that all shared-memory transports have in common. */
dcp_status dcp__mem_record(dcp_group *g, const void *send, size_t n_bytes, void *recv);
dcp_status dcp__mem_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                   int n_sends, const struct dcp__xfer *recvs, int n_recvs);
dcp_status dcp__mem_exchange_test(dcp_group *g, unsigned slot, bool *done_out);
dcp_status dcp__mem_exchange_wait(dcp_group *g, unsigned slot);
dcp_status dcp__mem_allreduce_f32(dcp_group *g, float *buf, size_t n);
void *dcp__mem_staging(const dcp_group *g, int rank, size_t *n_bytes_out);
void dcp__mem_set_call(dcp_group *g, enum dcp__call call);

#endif
