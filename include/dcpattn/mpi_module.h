/* SPDX-License-Identifier: Apache-2.0 */
/* How a program that is not linked with any MPI uses one: it opens libdcpattn_mpi_<name>.so, takes
 * the entry by dlsym and goes through this table. The command does so under mpirun; a binding can.
 * A program that is built with mpicc includes dcpattn/mpi.h instead. */
#ifndef DCPATTN_MPI_MODULE_H
#define DCPATTN_MPI_MODULE_H

#include "dcpattn/group.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_mpi_module {
    size_t struct_size;
    const char *dcp_version; /**< DCP_VERSION of the module's build */
    const char *mpi_name;    /**< "openmpi", "mpich" or "mpi" */
    /** MPI's own version text.
     *  @return never NULL.  Ownership: static.  Threads: any.  Collective: no; before init too. */
    const char *(*mpi_version)(void);
    /** MPI_Init_thread (funneled), unless MPI is initialised; then the other calls may be used.
     *  @return DCP_ERR_SYS: MPI's own text.  Threads: the one that uses MPI from now on.
     *  Collective: yes, over the job; without a deadline, which is the launcher's. */
    dcp_status (*init)(void);
    /** The rank in the world, 0 to world_size() - 1.  Threads: as init.  Collective: no. */
    int (*world_rank)(void);
    /** The number of ranks of the job, 1 without a launcher.  Threads: as init.  Collective: no. */
    int (*world_size)(void);
    /** Makes a group of all ranks of the job.
     *  @param[in]  opts       NULL = defaults
     *  @param[out] group_out  written on success only
     *  @return as dcp_group_create_mpi (dcpattn/mpi.h), DCP_ERR_TIMEOUT included
     *  Ownership: dcp_group_destroy, before finalize.  Threads: as init.
     *  Collective: yes, over the world. */
    dcp_status (*create_world)(const dcp_group_opts *opts, dcp_group **group_out);
    /** MPI_Abort of the world: ends all its processes. Does not return.
     *  @param[in] exit_code  of the job, where the launcher passes it on
     *  Threads: any.  Collective: no. */
    void (*abort)(int exit_code);
    /** MPI_Finalize, if init began it; after the last group has been destroyed.
     *  Threads: as init.  Collective: yes. */
    void (*finalize)(void);
} dcp_mpi_module;

/** The type and the name of the function to look up in the shared object. */
typedef const dcp_mpi_module *dcp_mpi_module_entry_fn(void);
#define DCP_MPI_MODULE_ENTRY "dcp_mpi_module_entry"

#ifdef __cplusplus
}
#endif
#endif
