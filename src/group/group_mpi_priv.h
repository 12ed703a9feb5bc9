/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of an MPI module share. Their only way to <mpi.h> is dcpattn/mpi.h, included here;
 * their only way to the library is lib(). */
#ifndef DCP_GROUP_GROUP_MPI_PRIV_H
#define DCP_GROUP_GROUP_MPI_PRIV_H

#include "dcpattn/mpi.h"
#include "group/group_module_priv.h"

#ifndef DCP_MPI_NAME
#define DCP_MPI_NAME "mpi"
#endif

#define FAIL(st, ...) lib()->fail_at((st), __FILE__, __LINE__, __VA_ARGS__)
#define POISON(g, code, ...) lib()->poison_at((g), (code), __FILE__, __LINE__, __VA_ARGS__)

static inline const struct dcp__group_module *lib(void)
{
    return dcp__group_module();
}

/* One slot of exchanges: the requests of sends, then of receives. */
struct mpi_open {
    bool is_open;
    int n_requests, n_sends;
    MPI_Request *requests; /* [2 * dcp__xfers_max] */
    int *peers;            /* [2 * dcp__xfers_max] */
    int *n_bytes;          /* [2 * dcp__xfers_max], expected by receives */
};

/* Frame of a record: the size travels with it, so that ranks that disagree find out. */
struct mpi_frame {
    uint64_t n_bytes;
    char data[DCP__RECORD_MAX];
};

/* What a datatype is of: a message made of pieces; where they and its tail lie, if it has one. No
 * gaps: compared as bytes. */
struct mpi_pieces {
    const void *buf, *tail;
    size_t n_bytes, piece_bytes, stride_bytes, tail_bytes;
};
/* Datatypes that are kept, [0, n); see group_mpi_pieces.c. */
enum { TYPES_KEPT = 256, TYPES_STALE = 16 * TYPES_KEPT };
struct mpi_type_kept {
    struct mpi_pieces of;
    uint64_t asked; /* n_asked when it was last of use */
    MPI_Datatype type;
};
struct mpi_types {
    struct mpi_type_kept kept[TYPES_KEPT];
    uint32_t marks[TYPES_KEPT]; /* of each, so that a search reads little */
    int n, next, hand;          /* the one after the last that was of use; to be replaced next */
    uint64_t n_asked;           /* messages made of pieces so far */
};
struct mpi_type {
    MPI_Datatype type;
    const void *from; /* to be sent from here */
    bool is_own;      /* not kept: of this message alone */
};

struct mpi_group {
    dcp_group base; /* first */
    MPI_Comm comm;
    dcp_group *host;              /* the shm group of this host's ranks; NULL: a host of one rank */
    int *host_ranks;              /* [size]: a rank's number on its host */
    struct mpi_frame *frames;     /* [size + 1]: of all, and the own one that is being sent */
    MPI_Request *record_requests; /* [2 * size]: from each, to each */
    struct mpi_open open[DCP__ALL_SLOTS];
    MPI_Request *requests;
    MPI_Status *statuses; /* [2 * dcp__xfers_max] */
    int *numbers;
    struct mpi_types types;
};

static inline struct mpi_group *mpi_of(dcp_group *g)
{
    return (struct mpi_group *)g;
}

static inline bool is_poisoned(const dcp_group *g)
{
    return atomic_load_explicit(&g->poison->state, memory_order_acquire) != DCP__POISON_NONE;
}

/* group_mpi.c */
extern const struct dcp__group_ops dcp__mpi_ops; /* of ranks on several hosts */
dcp_status dcp__mpi_fail(const char *what, int rc);
void dcp__mpi_pause(struct dcp__wait *w); /* between two tests: spins, yields, then sleeps */
dcp_status dcp__mpi_allreduce(dcp_group *g, MPI_Comm comm, float *buf, size_t n);
void dcp__mpi_free(struct mpi_group *m); /* takes NULL and what is half made */

/* group_mpi_pieces.c. The type of a send made of pieces, and back once that has been started. */
int dcp__mpi_type_take(struct mpi_types *t, const struct dcp__xfer *x, struct mpi_type *type_out);
void dcp__mpi_type_drop(struct mpi_type *type);
void dcp__mpi_types_free(struct mpi_types *t);

/* group_mpi_create.c */
bool dcp__mpi_is_over(void);
/* Collective over g, which has just had a record; comm is g's. */
dcp_status dcp__mpi_split(dcp_group *g, MPI_Comm comm, const struct dcp__split *how,
                          dcp_group **sub_out);

#endif
