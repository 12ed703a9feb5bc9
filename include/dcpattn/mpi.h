/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over an MPI communicator. In a shared object of its own for each MPI: link
 * libdcpattn_mpi_openmpi or libdcpattn_mpi_mpich beside libdcpattn, and build with that MPI's
 * mpicc. */
#ifndef DCPATTN_MPI_H
#define DCPATTN_MPI_H

#include <mpi.h>

#include "dcpattn/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Makes a group of the ranks of comm. If all of them are on one host, records, exchanges and group
 *  memory go through memory that they share. Else records and exchanges are nonblocking MPI calls,
 *  tested until the deadline, and the ranks of each host share group memory among themselves (see
 *  dcp_group_host). Ranks are on one host if they have one running kernel, one space of process
 *  numbers and one user. DCP_ATTN_MPI_SHARED=0 in the environment of any rank: nothing is shared,
 *  every rank is a host.
 *  @param[in]  comm       is duplicated; MPI must be initialised and not finalised
 *  @param[in]  opts       NULL = defaults; the same on all ranks
 *  @param[out] group_out  written on success only; on failure no rank gets a group
 *  @return DCP_ERR_ARG (MPI not initialised, bad options), DCP_ERR_SYS (an MPI call failed),
 *          DCP_ERR_NOMEM, DCP_ERR_NOT_SUPPORTED (library and module of different versions; or
 *          another MPI's launcher has started several processes, each a world of one rank: MPICH's
 *          sets PMI_SIZE, Open MPI's OMPI_COMM_WORLD_SIZE; who wants such a world of one unsets
 *          that variable), DCP_ERR_MISMATCH (ranks_per_host differs), DCP_ERR_PEER (another rank
 *          failed), DCP_ERR_TIMEOUT: a rank did not call it within the deadline; comm cannot be
 *          used for another attempt then, since MPI still waits for that rank in it
 *  Ownership: dcp_group_destroy, before MPI_Finalize.  Threads: one thread per handle; MPI must
 * have been initialised for the threads that use groups.  Collective: yes, over comm. Failure later
 * on: a late peer is DCP_ERR_TIMEOUT and named (in a group of more than 64 ranks on several hosts
 * MPI does not say which). A killed one ends the job by its launcher; the library never calls
 *  MPI_Abort. Its communicators return errors; those of calls that have none (datatypes: MPI is out
 *  of memory) go to the handlers of MPI_COMM_WORLD (up to MPI 3.1) or MPI_COMM_SELF, which abort
 *  unless you set MPI_ERRORS_RETURN there: then they are DCP_ERR_SYS, too. A poisoned group is so
 *  for the ranks of the host that noticed; other hosts notice by their own deadlines. Buffers of a
 *  call that failed must live until exit; group memory and the workspaces of merges do so by
 *  themselves. */
DCP_API dcp_status dcp_group_create_mpi(MPI_Comm comm, const dcp_group_opts *opts,
                                        dcp_group **group_out);

#ifdef __cplusplus
}
#endif
#endif
