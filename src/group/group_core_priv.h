/* SPDX-License-Identifier: Apache-2.0 */
/* What every transport shares: the handle, the table of operations, the poison. Only src/group sees
 * this; the merge goes through group_priv.h. */
#ifndef DCP_GROUP_GROUP_CORE_PRIV_H
#define DCP_GROUP_GROUP_CORE_PRIV_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/group_priv.h"

/* The first failure of a group, seen by all ranks that share memory. Written once. */
struct dcp__poison {
    _Atomic uint32_t state; /* 0 none, 1 being written, 2 readable */
    int32_t code;
    int32_t line;
    char file[100];
    char text[400];
};
enum { DCP__POISON_NONE = 0, DCP__POISON_WRITING = 1, DCP__POISON_SET = 2 };

/* The calls by name, so that a rank can say where a late peer is. The order is part of the shared
 * control block, of processes of one build. */
enum dcp__call {
    DCP__CALL_NONE = 0,
    DCP__CALL_BARRIER,
    DCP__CALL_ALLGATHER,
    DCP__CALL_GATHER_COLS,
    DCP__CALL_ALLOC,
    DCP__CALL_FREE,
    DCP__CALL_RECORD,
    DCP__CALL_EXCHANGE,
    DCP__CALL_ALLREDUCE,
    DCP__CALL_SPLIT,
    DCP__CALL_COUNT
};
const char *dcp__call_name(uint32_t call);

/* The sub-group of one rank of a split, worked out by group_split.c from the colours of all. */
struct dcp__split {
    int rank, size;     /* in the sub-group; size 0: this rank is in none, but takes part */
    int leader;         /* rank in the parent of the sub-group's rank 0 */
    const int *members; /* [size] ranks in the parent */
    const int *host_of; /* [size] hosts of the parent */
    int color, key;
};

/* The table a transport fills. The caller of the table (group.c) has checked arguments, holds the
 * handle (dcp__group_enter) and knows that it is not poisoned. buffers are borrowed for the call,
 * those of an exchange until its slot is done. All waits keep g->deadline_ns and look at the
 * poison. An operation that fails poisons the group unless every rank fails with it (mismatch of
 * records, out of memory in alloc). */
struct dcp__group_ops {
    const char *name; /* "self", "threads", "shm", "mpi" */
    /* All-gather of n_bytes <= DCP__RECORD_MAX, also a barrier. */
    dcp_status (*record)(dcp_group *g, const void *send, size_t n_bytes, void *recv);
    /* Nonblocking pairwise messages; see dcp__group_exchange_start. test moves data of all open
     * slots; wait sleeps between tests and fails when a peer has died or the deadline passes. */
    dcp_status (*exchange_start)(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                 int n_sends, const struct dcp__xfer *recvs, int n_recvs);
    dcp_status (*exchange_test)(dcp_group *g, unsigned slot, bool *done_out);
    dcp_status (*exchange_wait)(dcp_group *g, unsigned slot);
    dcp_status (*allreduce_f32)(dcp_group *g, float *buf, size_t n);
    /* Collective; all ranks succeed or all fail. */
    dcp_status (*alloc)(dcp_group *g, size_t n_bytes, void **ptr_out);
    void (*free)(dcp_group *g, void *ptr);
    bool (*locate)(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                   uint64_t *offset_out);
    void *(*peer_ptr)(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                      size_t n_bytes);
    /* Collective over g, which has just had a record. Makes the sub-group's handle, hosts included,
     * or NULL where size is 0. All ranks of g succeed or all fail. */
    dcp_status (*split)(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out);
    /* A part of a buffer that all ranks see, for data on its way: *n_bytes_out of rank. NULL where
     * there is none (then g->bounce serves). */
    void *(*staging)(const dcp_group *g, int rank, size_t *n_bytes_out);
    /* Tell peers which call this rank is in. NULL allowed. */
    void (*set_call)(dcp_group *g, enum dcp__call call);
    /* The group has just been poisoned by this rank: stop what moves. NULL allowed. */
    void (*poisoned)(dcp_group *g);
    void (*destroy)(dcp_group *g); /* frees g too */
    /* The first rank beside the own whose part of group memory the range touches; false where none
     * does. NULL: a peer's part cannot be told from other memory. */
    bool (*touches_peer)(const dcp_group *g, const void *ptr, size_t n_bytes, int *rank_out);
    /* Whether the range lies in memory of alloc. NULL: what locate finds does. */
    bool (*owns)(const dcp_group *g, const void *ptr, size_t n_bytes);
    bool one_space; /* the ranks are in one address space: every address means the same to all */
    bool keeps_buffers; /* once poisoned, the transport may still use buffers that it was given */
    bool sends_pieces;  /* exchange_start takes messages that are made of pieces */
};

struct dcp__local_alloc {
    struct dcp__local_alloc *next;
    void *ptr;
    size_t n_bytes;
};

struct dcp_group {
    const struct dcp__group_ops *ops;
    int rank, size;
    int64_t deadline_ns;
    struct dcp__poison *poison; /* in the control block, or own_poison */
    struct dcp__poison own_poison;
    _Atomic uintptr_t owner; /* the thread inside a call; 0 = none */
    int depth;
    bool cause_seen; /* the first cause has been returned on this handle */
    bool all_see;
    int n_hosts;
    int *host_of; /* [size], in order of first rank. Ranks of one host see each other's memory. */
    enum dcp__call call;
    _Atomic int64_t unguarded_ns;    /* dcp__group_unguarded_since */
    struct dcp__local_alloc *allocs; /* where ranks do not share memory, or are threads */
    void *scratch;                   /* [size][DCP__RECORD_MAX]: a record of everybody */
    void *outer;                     /* of a transport that wraps another one (mpi over shm) */
    void *bounce;                    /* for gather_cols where there is no staging */
    size_t bounce_bytes;
};
/* Exchanges of the group's own, beside those of callers. */
enum { DCP__OWN_SLOT = DCP__EXCHANGE_SLOTS, DCP__ALL_SLOTS };

/* Check options (those of the environment too) and fill the common part: one host. */
struct dcp__group_opts {
    int64_t deadline_ns;
    int ranks_per_host; /* 0 = as found */
};
dcp_status dcp__group_opts_read(const dcp_group_opts *opts, struct dcp__group_opts *opts_out);
dcp_status dcp__group_init(dcp_group *g, const struct dcp__group_ops *ops, int rank, int size,
                           int64_t deadline_ns, struct dcp__poison *poison);
void dcp__group_fini(dcp_group *g); /* what init took; not g itself */
/* After init. host_of_rank[r] is any number that ranks of one host share; ranks_per_host > 0 cuts
 * hosts further, so that it can hide memory and never promises any. Takes the bounce buffer that
 * messages between hosts need. */
dcp_status dcp__group_set_hosts(dcp_group *g, const int *host_of_rank, int ranks_per_host);
dcp_status dcp__group_need_bounce(dcp_group *g);
/* Load the fault of the environment; refuses what makes no sense for the transport. */
dcp_status dcp__group_load_fault(int size, bool ranks_are_processes);

static inline bool dcp__group_is_poisoned(const dcp_group *g)
{
    return atomic_load_explicit(&g->poison->state, memory_order_acquire) != DCP__POISON_NONE;
}
/* What a call returns that finds the group poisoned: the cause the first time on this handle,
 * POISONED afterwards. */
dcp_status dcp__group_poison_status(dcp_group *g);

/* Enter a named call; the outermost name is what peers are told. leave_call passes st through. */
dcp_status dcp__group_enter_call(dcp_group *g, enum dcp__call call);
dcp_status dcp__group_leave_call(dcp_group *g, enum dcp__call call, dcp_status st);

/* Every rank gives the outcome of its own part; DCP_OK if all are. Else every rank fails: with its
 * own code, or with that of the first that failed, the text naming it. Needs g->scratch. */
dcp_status dcp__group_agree(dcp_group *g, const char *what, dcp_status own);

/* Why a rank cannot take part in a gather. It travels in the first record, so that every rank fails
 * and none waits. */
enum dcp__refusal {
    DCP__TAKES_PART = 0,
    DCP__REFUSES_NULL,    /* a buffer is NULL */
    DCP__REFUSES_SIZE,    /* sizes exceed the address space */
    DCP__REFUSES_OVERLAP, /* send and recv overlap */
    DCP__REFUSES_COLUMNS, /* the offsets of columns do not ascend, or exceed the stride */
    DCP__REFUSAL_COUNT
};

/* group_gather.c: the work of the public calls, the handle held. Arguments were checked: nothing of
 * them is used where the rank refuses. */
dcp_status dcp__gather_cols(dcp_group *g, void *buf, size_t n_rows, size_t row_stride_bytes,
                            const size_t *col_off_bytes, bool is_fenced, enum dcp__refusal refusal);
dcp_status dcp__allgather(dcp_group *g, const void *send, size_t n_bytes, void *recv,
                          enum dcp__refusal refusal);

/* Sum in rank order through messages, for ranks without common memory. */
dcp_status dcp__allreduce_sent(dcp_group *g, float *buf, size_t n);

/* Process-private allocations on a list of the handle. */
dcp_status dcp__local_alloc(dcp_group *g, size_t n_bytes, void **ptr_out);
void dcp__local_free(dcp_group *g, void *ptr);
void dcp__local_free_list(struct dcp__local_alloc *list);

/* locate and peer_ptr where every address is visible. */
bool dcp__any_locate(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                     uint64_t *offset_out);
void *dcp__any_peer_ptr(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                        size_t n_bytes);

/* How a wait goes on: spin, then yield, then sleep in slices. */
struct dcp__wait {
    int64_t start_ns; /* 0 = not begun */
    int64_t last_ns;  /* of the look before this one */
    int64_t proc_ns;  /* the last look into /proc */
    int64_t gone_ns;  /* since when a peer is known to be gone without a known cause */
    unsigned round;
    int proc_rank; /* where that look goes on, counted from the own rank */
};
/* Seconds as messages show them: "%.1f %s" of these two. */
static inline double dcp__wait_amount(double s)
{
    return s < 1 ? s * 1e3 : s;
}
static inline const char *dcp__wait_unit(double s)
{
    return s < 1 ? "ms" : "s";
}
enum dcp__wait_step { DCP__WAIT_AGAIN, DCP__WAIT_SLEEP };
/* One step. AGAIN: has spun or yielded. SLEEP: the caller looks at its peers, then sleeps at most
 * DCP__WAIT_SLICE_NS. */
enum dcp__wait_step dcp__wait_next(struct dcp__wait *w, unsigned spin_rounds);
/* spin_rounds for the next wait, from how w went; 0 stays 0: no spinning. */
unsigned dcp__wait_learn(const struct dcp__wait *w, unsigned spin_rounds);
enum { DCP__SPIN_BEGIN = 64 };
enum { DCP__WAIT_SLICE_NS = 20000000 };

#endif
