/* SPDX-License-Identifier: Apache-2.0 */
/* What the module asks of MPI, counted between the two by MPI's own profiling interface: these
 * definitions of the program stand in front of the library's. Include once in a program. */
#ifndef DCP_TESTS_GROUP_MPI_CALLS_H
#define DCP_TESTS_GROUP_MPI_CALLS_H

#include <mpi.h>

#include "dcpattn/types.h"

static struct {
    int made, freed;      /* datatypes, those on the way to others too */
    int committed;        /* those that messages may have */
    int breaks;           /* 1: no vector can be made, 2: no struct, 3: none committed */
    int gathered, packed; /* sends by such a type; of plain bytes that do not lie in own */
    int in_place;         /* sends of plain bytes that lie in own */
    const char *own;      /* memory of the caller's, or NULL */
    size_t own_bytes;
    size_t small_bytes; /* sends of plain bytes up to this are not counted: records, LSEs */
} mpi_calls;

DCP_API int MPI_Type_create_hvector(int count, int len, MPI_Aint stride, MPI_Datatype old,
                                    MPI_Datatype *type)
{
    const int rc =
        PMPI_Type_create_hvector(mpi_calls.breaks == 1 ? -1 : count, len, stride, old, type);
    mpi_calls.made += rc == MPI_SUCCESS;
    return rc;
}

DCP_API int MPI_Type_create_struct(int count, const int lens[], const MPI_Aint at[],
                                   const MPI_Datatype types[], MPI_Datatype *type)
{
    const int rc =
        PMPI_Type_create_struct(mpi_calls.breaks == 2 ? -1 : count, lens, at, types, type);
    mpi_calls.made += rc == MPI_SUCCESS;
    return rc;
}

DCP_API int MPI_Type_commit(MPI_Datatype *type)
{
    MPI_Datatype none = MPI_DATATYPE_NULL;
    mpi_calls.committed++;
    return PMPI_Type_commit(mpi_calls.breaks == 3 ? &none : type);
}

DCP_API int MPI_Type_free(MPI_Datatype *type)
{
    mpi_calls.freed++;
    return PMPI_Type_free(type);
}

DCP_API int MPI_Isend(const void *buf, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                      MPI_Request *request)
{
    const char *const at = buf;
    if (type != MPI_BYTE) {
        mpi_calls.gathered++;
    } else if (mpi_calls.own != NULL && at >= mpi_calls.own &&
               at < mpi_calls.own + mpi_calls.own_bytes) {
        mpi_calls.in_place++;
    } else {
        mpi_calls.packed += (size_t)n > mpi_calls.small_bytes;
    }
    return PMPI_Isend(buf, n, type, to, tag, comm, request);
}

#endif
