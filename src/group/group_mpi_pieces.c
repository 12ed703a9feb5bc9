/* SPDX-License-Identifier: Apache-2.0 */
/* MPI datatypes of messages made of pieces: MPI gathers them while it copies them to where the peer
 * takes them from, a copy less than packing them first.
 *
 *   message    | piece | piece | piece | tail |        arrives as one stretch
 *   type       hvector(3, piece, stride)  + tail: a struct
 *
 * Buffer and tail are different objects, of which MPI allows no relative displacement: such a type
 * holds the addresses of both (MPI_Get_address) and is sent from MPI_BOTTOM. Measured, it takes the
 * time of a relative one. Without a tail the type is relative to the buffer and serves any.
 *
 * A merge has one type for each tile and peer, the same from call to call while its partial stays
 * where it is. Making one anew costs 0.5 of the 10 us that a message of 48 KiB takes (Open MPI, two
 * ranks; MPICH: nothing to speak of), 1 to 5 % of a merge of 128 tiles. So TYPES_KEPT of them are
 * kept, at some 1.4 KB of MPI's memory each. Calls with more messages than that come round to a
 * type when it would be the oldest: replacing the oldest would keep none of any use. So what is
 * kept stays until it has been of no use for a long while, and the types of all other messages are
 * made for them and let go at once, which MPI allows while they travel.
 *
 * Errors. These calls have no communicator: MPI raises their errors on MPI_COMM_WORLD (up to MPI
 * 3.1) or MPI_COMM_SELF (from MPI 4.0), whose handlers abort unless the program has set others.
 * They are the program's, so they stay as they are: to change them for the length of a call would
 * race with its other threads. The arguments have been checked (group.c; at most INT_MAX bytes), so
 * that what is left to fail is MPI's own lack of memory. A program that has set MPI_ERRORS_RETURN
 * on both gets it as DCP_ERR_SYS: that is what the branches here are for. */
#include <string.h>

#include "group/group_mpi_priv.h"

static int make_type(const struct mpi_pieces *p, MPI_Datatype *type_out)
{
    const int n_pieces = (int)((p->n_bytes - p->tail_bytes) / p->piece_bytes);
    MPI_Datatype type;
    int rc = MPI_Type_create_hvector(n_pieces, (int)p->piece_bytes, (MPI_Aint)p->stride_bytes,
                                     MPI_BYTE, &type);
    if (rc != MPI_SUCCESS) return rc;
    if (p->tail_bytes > 0) {
        MPI_Datatype types[2] = {type, MPI_BYTE};
        const int counts[2] = {1, (int)p->tail_bytes};
        MPI_Aint at[2];
        rc = MPI_Get_address(p->buf, &at[0]);
        if (rc == MPI_SUCCESS) rc = MPI_Get_address(p->tail, &at[1]);
        if (rc == MPI_SUCCESS) rc = MPI_Type_create_struct(2, counts, at, types, &type);
        (void)MPI_Type_free(&types[0]);
        if (rc != MPI_SUCCESS) return rc;
    }
    rc = MPI_Type_commit(&type);
    if (rc != MPI_SUCCESS) {
        (void)MPI_Type_free(&type);
        return rc;
    }
    *type_out = type;
    return MPI_SUCCESS;
}

static uint32_t mark_of(const struct mpi_pieces *p)
{
    const uint64_t h = ((uintptr_t)p->buf ^ p->n_bytes << 32) + (uintptr_t)p->tail * 127 +
                       p->piece_bytes * 31 + p->stride_bytes * 17 + p->tail_bytes;
    return (uint32_t)(h * UINT64_C(0x9e3779b97f4a7c15) >> 32);
}

/* Calls repeat their messages in order: mostly it is the one after the last. */
static int find_kept(const struct mpi_types *t, const struct mpi_pieces *want, uint32_t mark)
{
    for (int i = 0; i < t->n; i++) {
        const int at = t->next + i < t->n ? t->next + i : t->next + i - t->n;
        if (t->marks[at] == mark && memcmp(&t->kept[at].of, want, sizeof(*want)) == 0) return at;
    }
    return -1;
}

/* Where a new one may stay, or -1. One place is looked at for each new type. */
static int find_room(struct mpi_types *t)
{
    if (t->n < TYPES_KEPT) return t->n++;
    const int at = t->hand;
    t->hand = (at + 1) % TYPES_KEPT;
    if (t->n_asked - t->kept[at].asked < TYPES_STALE) return -1;
    (void)MPI_Type_free(&t->kept[at].type); /* messages on their way keep it */
    return at;
}

int dcp__mpi_type_take(struct mpi_types *t, const struct dcp__xfer *x, struct mpi_type *type_out)
{
    struct mpi_pieces want = {.n_bytes = x->n_bytes,
                              .piece_bytes = x->piece_bytes,
                              .stride_bytes = x->stride_bytes,
                              .tail_bytes = x->tail_bytes};
    if (x->tail_bytes > 0) {
        want.buf = x->buf;
        want.tail = x->tail;
    }
    const void *const from = x->tail_bytes > 0 ? MPI_BOTTOM : x->buf;
    const uint32_t mark = mark_of(&want);
    t->n_asked++;
    int at = find_kept(t, &want, mark);
    if (at < 0) {
        MPI_Datatype type;
        const int rc = make_type(&want, &type);
        if (rc != MPI_SUCCESS) return rc;
        at = find_room(t);
        if (at < 0) {
            *type_out = (struct mpi_type){.type = type, .from = from, .is_own = true};
            return MPI_SUCCESS;
        }
        t->marks[at] = mark;
        t->kept[at] = (struct mpi_type_kept){.of = want, .type = type};
    }
    t->kept[at].asked = t->n_asked;
    t->next = (at + 1) % t->n;
    *type_out = (struct mpi_type){.type = t->kept[at].type, .from = from};
    return MPI_SUCCESS;
}

void dcp__mpi_type_drop(struct mpi_type *type)
{
    if (type->is_own) (void)MPI_Type_free(&type->type);
}

void dcp__mpi_types_free(struct mpi_types *t)
{
    for (int i = 0; i < t->n; i++) (void)MPI_Type_free(&t->kept[i].type);
    t->n = 0;
}
