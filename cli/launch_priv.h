/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the launcher. */
#ifndef DCP_CLI_LAUNCH_PRIV_H
#define DCP_CLI_LAUNCH_PRIV_H

#include <stdatomic.h>
#include <stdint.h>

#include "cli/launch.h"

/* What the ranks have told, in memory that the printer sees. */
struct launch_note {
    _Atomic uint32_t order; /* 0 = nothing told; else the how-manieth to tell */
    int32_t status;
    int32_t is_of_all; /* every rank says so: its number would mislead */
    char text[1000];
};
struct launch_board {
    _Atomic uint32_t n_told;
    int n;
    struct launch_note notes[]; /* [n] */
};
/* Anonymous shared memory; NULL with the last error set. */
struct launch_board *launch_board_create(int n);
void launch_board_destroy(struct launch_board *board);
/* Where launch_tell writes from now on; NULL = it prints. */
void launch_board_use(struct launch_board *board);
/* Under MPI nobody collects what is told: ranks that only noticed a failure let others speak first,
 * who then end the world; what all ranks know rank 0 says. */
void launch_speak_in_turn(bool on);
/* What such a rank does before it speaks or ends the world: where st only says that another failed
 * or was late, pause for some 300 to 900 ms, longer the higher the rank; else return at once. */
void launch_wait_for_turn(dcp_status st, int rank);
/* The note that says most about the cause; -1 if none was told. */
int launch_board_root(const struct launch_board *board);
/* True if status only says that another rank failed or was late. */
bool launch_is_echo(int32_t status);

int launch_shm(const struct launch_opts *opts, int n, launch_fn *fn, void *ctx);
/* The launcher that started this process: *name_out the MPI that its variables speak of ("openmpi",
 * "mpich"), *size_out its world (0 = not said). False: none. */
bool launch_mpi_env(const char **name_out, int *size_out);
int launch_mpi(const struct launch_opts *opts, launch_fn *fn, void *ctx);

#endif
