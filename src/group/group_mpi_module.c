/* SPDX-License-Identifier: Apache-2.0 */
/* The table for programs that open this object (dcpattn/mpi_module.h). */
#include <unistd.h>

#include "dcpattn/mpi_module.h"
#include "group/group_mpi_priv.h"

static bool began_mpi;

static const char *module_version(void)
{
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int n = 0;
    if (text[0] == '\0') (void)MPI_Get_library_version(text, &n); /* allowed before MPI_Init */
    return text;
}

static dcp_status module_init(void)
{
    int initialized = 0, provided = 0;
    (void)MPI_Initialized(&initialized);
    if (initialized) return DCP_OK;
    const int rc = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    if (rc != MPI_SUCCESS) return dcp__mpi_fail("MPI_Init_thread", rc);
    began_mpi = true;
    return DCP_OK;
}

static int module_rank(void)
{
    int rank = 0;
    (void)MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static int module_size(void)
{
    int size = 1;
    (void)MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

static dcp_status module_create_world(const dcp_group_opts *opts, dcp_group **group_out)
{
    return dcp_group_create_mpi(MPI_COMM_WORLD, opts, group_out);
}

static void module_abort(int exit_code)
{
    (void)MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
}

static void module_finalize(void)
{
    if (began_mpi && !dcp__mpi_is_over()) (void)MPI_Finalize();
}

static const dcp_mpi_module module = {
    .struct_size = sizeof(dcp_mpi_module),
    .dcp_version = DCP_VERSION,
    .mpi_name = DCP_MPI_NAME,
    .mpi_version = module_version,
    .init = module_init,
    .world_rank = module_rank,
    .world_size = module_size,
    .create_world = module_create_world,
    .abort = module_abort,
    .finalize = module_finalize,
};

DCP_API const dcp_mpi_module *dcp_mpi_module_entry(void);
const dcp_mpi_module *dcp_mpi_module_entry(void)
{
    return &module;
}
