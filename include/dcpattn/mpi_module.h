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
    /** MPI's own version text.  Ownership: static. */
    const char *(*mpi_version)(void);
    /** MPI_Init, unless that has been done; then the other calls may be used. */
    dcp_status (*init)(void);
    int (*world_rank)(void);
    int (*world_size)(void);
    /** Collective over the world. */
    dcp_status (*create_world)(const dcp_group_opts *opts, dcp_group **group_out);
    /** MPI_Abort of the world: ends all its processes. Does not return. */
    void (*abort)(int exit_code);
    /** MPI_Finalize, if init began it. */
    void (*finalize)(void);
} dcp_mpi_module;

/** The type and the name of the function to look up in the shared object. */
typedef const dcp_mpi_module *dcp_mpi_module_entry_fn(void);
#define DCP_MPI_MODULE_ENTRY "dcp_mpi_module_entry"

#ifdef __cplusplus
}
#endif
#endif
