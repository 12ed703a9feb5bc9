/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a command: processes of this host (shm), threads of this process, or the world of an MPI
 * launcher. Whatever way a run ends, no process and no name stays behind. */
#ifndef DCP_CLI_LAUNCH_H
#define DCP_CLI_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>

#include "dcpattn/group.h"

struct launch_opts {
    int n_ranks;       /* 0 = the world under a launcher, else 1 */
    const char *comm;  /* "threads", "shm", "mpi"; NULL or "auto": mpi under a launcher, else shm */
    double deadline_s; /* of the group; 0 = default */
};

/* One rank's work; returns its exit code. It does not destroy g. */
typedef int launch_fn(dcp_group *g, void *ctx);

/* Run fn on all ranks; the exit code of the command: 0 all did, 1 any failed, 2 used wrongly. The
 * cause of a failure is printed once, on stderr. With one rank and comm auto, fn runs here in a
 * group of its own; with shm it runs in children, so what it changes in *ctx is lost to the caller.
 * Call from the main thread, before any other thread is started. */
int launch_run(const struct launch_opts *opts, launch_fn *fn, void *ctx);

/* Tell why this rank fails, with the text of its last error: launch_run prints the root cause of
 * all that the ranks have told, once (texts of peers that only noticed come last). Prints nothing
 * itself where there is somebody to print; safe outside of launch_run, where it prints at once. */
void launch_tell(const dcp_group *g, dcp_status st, const char *text);
/* The same for what every rank has found: told by one of them, without its number. */
void launch_tell_of_all(const dcp_group *g, dcp_status st, const char *text);

/* True in the process that speaks for all: rank 0 by the launcher's variables, or the only one. */
bool launch_mpi_env_is_first(void);
/* Processes that a launcher has started, by its variables; 0: no launcher, or they do not say. */
int launch_mpi_env_size(void);

/* A command that has failed before launch_run, with exit code rc and this text (is_said: printed;
 * NULL: nothing is to be said). Under an MPI launcher the others may wait for this process in
 * MPI_Init, some MPIs for ever: it goes there too, tells them, and all leave together. Returns the
 * exit code. */
int launch_failed_early(int rc, const char *text, bool is_said);

/* --- MPI modules, for `info` --- */
struct launch_mpi_module {
    char name[16];   /* "openmpi" */
    char path[1024]; /* "" = not found */
    bool loads;
    char text[256]; /* MPI's version, or why it does not load */
};
/* Those that this command knows, found or not; returns how many (at most max). Loads them: do not
 * call it before launch_run in the same process. */
size_t launch_list_mpi(struct launch_mpi_module *out, size_t max);

#endif
