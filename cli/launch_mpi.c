/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are the world of an MPI launcher. The command is linked with no MPI: it opens the module of
 * the MPI that the launcher's variables speak of. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/launch_priv.h"
#include "cli/message.h"
#include "dcpattn/mpi_module.h"

static const char *const mpi_names[] = {"openmpi", "mpich"};
enum { N_MPI = sizeof(mpi_names) / sizeof(mpi_names[0]) };
enum { PATH_BYTES = 1024 };

static int env_int(const char *name)
{
    const char *text = getenv(name);
    return text == NULL ? 0 : atoi(text);
}

bool launch_mpi_env(const char **name_out, int *size_out)
{
    if (getenv("OMPI_COMM_WORLD_SIZE") != NULL) {
        *name_out = "openmpi";
        *size_out = env_int("OMPI_COMM_WORLD_SIZE");
        return true;
    }
    if (getenv("PMI_SIZE") != NULL || getenv("PMI_RANK") != NULL) {
        *name_out = "mpich";
        *size_out = env_int("PMI_SIZE");
        return true;
    }
    if (getenv("PMIX_RANK") != NULL) {
        *name_out = "openmpi";
        *size_out = 0;
        return true;
    }
    return false;
}

bool launch_mpi_env_is_first(void)
{
    return env_int("OMPI_COMM_WORLD_RANK") == 0 && env_int("PMI_RANK") == 0 &&
           env_int("PMIX_RANK") == 0;
}

int launch_mpi_env_size(void)
{
    const char *name;
    int size = 0;
    return launch_mpi_env(&name, &size) && size > 0 ? size : 0;
}

/* Beside the command (a build), or where `make install` puts it. */
static bool find_module(const char *name, char *path)
{
    static const char *const places[] = {"", "../lib/dcpattn/", "../lib64/dcpattn/"};
    const char *dir = getenv("DCP_ATTN_MODULE_DIR");
    char exe[PATH_BYTES];
    if (dir != NULL && dir[0] != '\0') {
        const int n = snprintf(path, PATH_BYTES, "%s/libdcpattn_mpi_%s.so", dir, name);
        return n > 0 && n < PATH_BYTES && access(path, R_OK) == 0;
    }
    const ssize_t n_exe = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    if (n_exe <= 0) return false;
    exe[n_exe] = '\0';
    char *slash = strrchr(exe, '/');
    if (slash == NULL) return false;
    slash[1] = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        const int n = snprintf(path, PATH_BYTES, "%s%slibdcpattn_mpi_%s.so", exe, places[i], name);
        if (n > 0 && n < PATH_BYTES && access(path, R_OK) == 0) return true;
    }
    return false;
}

/* scope: RTLD_GLOBAL to use it (Open MPI opens plugins of its own that look for its symbols);
 * RTLD_LOCAL to ask several: the symbols of one MPI must not answer for another. */
static dcp_status load_module(const char *name, int scope, const dcp_mpi_module **module_out)
{
    char path[PATH_BYTES];
    if (!find_module(name, path)) {
        return dcp__fail(
            DCP_ERR_NOT_SUPPORTED,
            "libdcpattn_mpi_%s.so is neither beside the command nor in ../lib/dcpattn; "
            "it is built where %s's mpicc is found",
            name, name);
    }
    void *const handle = dlopen(path, RTLD_NOW | scope);
    if (handle == NULL) return dcp__fail(DCP_ERR_SYS, "cannot load %s: %s", path, dlerror());
    void *const symbol = dlsym(handle, DCP_MPI_MODULE_ENTRY);
    dcp_mpi_module_entry_fn *entry;
    memcpy(&entry, &symbol, sizeof(entry)); /* ISO C has no cast from object to function */
    const dcp_mpi_module *module = symbol != NULL ? entry() : NULL;
    if (module == NULL || module->struct_size < sizeof(*module) ||
        strcmp(module->dcp_version, dcp_version()) != 0) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "%s is of another version of dcp-attn than %s",
                         path, dcp_version());
    }
    *module_out = module;
    return DCP_OK;
}

size_t launch_list_mpi(struct launch_mpi_module *out, size_t max)
{
    size_t n = 0;
    for (; n < N_MPI && n < max; n++) {
        memset(&out[n], 0, sizeof(out[n]));
        snprintf(out[n].name, sizeof(out[n].name), "%s", mpi_names[n]);
        if (!find_module(mpi_names[n], out[n].path)) {
            out[n].path[0] = '\0';
            snprintf(out[n].text, sizeof(out[n].text), "not built");
            continue;
        }
        const dcp_mpi_module *module;
        out[n].loads = load_module(mpi_names[n], RTLD_LOCAL, &module) == DCP_OK;
        snprintf(out[n].text, sizeof(out[n].text), "%s",
                 out[n].loads ? module->mpi_version() : message_plain(dcp_last_error()));
        out[n].text[strcspn(out[n].text, "\n")] = '\0';
        for (char *tab = out[n].text; (tab = strchr(tab, '\t')) != NULL;) *tab = ' ';
    }
    return n;
}

/* Ends the world. What a launcher has not forwarded by then is lost: hydra (MPICH) lost the only
 * line of one run in five. Less than launch_wait_for_turn, so that the cause is still the one
 * line. */
static void end_world(const dcp_mpi_module *mpi, int rc)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 200000000};
    fflush(NULL);
    (void)nanosleep(&pause, NULL);
    mpi->abort(rc);
}

/* Leave together where the group still works; else end the world. */
static int leave(const dcp_mpi_module *mpi, dcp_group *g, int rc)
{
    const int n = mpi->world_size();
    int *all = calloc((size_t)n, sizeof(int));
    const bool are_together = all != NULL && dcp_group_allgather(g, &rc, sizeof(rc), all) == DCP_OK;
    if (!are_together) end_world(mpi, rc != 0 ? rc : 1);
    for (int r = 0; r < n; r++) rc = all[r] > rc ? all[r] : rc;
    free(all);
    dcp_group_destroy(g);
    fflush(stdout);
    mpi->finalize();
    return rc;
}

/* MPI_Init knows no deadline, and a process that is gone keeps it waiting under MPICH. */
enum { INIT_DEADLINE_S = 60 };
static char late_text[256];
static void on_late(int signal_number)
{
    (void)signal_number;
    const ssize_t n = write(2, late_text, strlen(late_text)); /* stderr, or nobody to tell */
    (void)n;
    _exit(1);
}
static dcp_status init_in_time(const dcp_mpi_module *mpi, double deadline_s)
{
    const int least = INIT_DEADLINE_S;
    const unsigned seconds = (unsigned)(deadline_s > least ? deadline_s : least);
    snprintf(late_text, sizeof(late_text),
             "dcp-attn: MPI has not started after %u s: a process of the job has not come to it\n",
             seconds);
    signal(SIGALRM, on_late);
    alarm(seconds);
    const dcp_status st = mpi->init();
    alarm(0);
    signal(SIGALRM, SIG_DFL);
    return st;
}

static bool has_begun; /* MPI, or the attempt */

/* Before a text without MPI. What is wrong with all is said once: Open MPI's launcher ends the
 * others some 0.7 s after the first has left (MPICH's lets each speak). What is wrong with this
 * process alone is said a little later. */
static void let_first_speak(void)
{
    const struct timespec pause = {.tv_sec = 2};
    if (!launch_mpi_env_is_first()) (void)nanosleep(&pause, NULL);
}

int launch_failed_early(int rc, const char *text, bool is_said)
{
    const char *name = NULL;
    int size = 0;
    const dcp_mpi_module *mpi = NULL;
    const bool has_launcher = !has_begun && launch_mpi_env(&name, &size) && size != 1;
    const bool is_mute = has_launcher && load_module(name, RTLD_GLOBAL, &mpi) != DCP_OK;
    if (is_mute) let_first_speak();
    const bool is_alone = !has_launcher || is_mute || init_in_time(mpi, 0.0) != DCP_OK;
    dcp_group *g = NULL;
    if (is_alone || mpi->world_size() == 1 || mpi->create_world(NULL, &g) != DCP_OK) {
        if (!is_said && text != NULL) fprintf(stderr, "dcp-attn: %s\n", message_plain(text));
        if (!is_alone && mpi->world_size() > 1) end_world(mpi, rc);
        if (!is_alone) mpi->finalize();
        return rc;
    }
    launch_speak_in_turn(true);
    const dcp_status st = dcp__fail(DCP_ERR_ARG, "%s", text != NULL ? text : "");
    (void)all_ranks_ok_said(g, st, is_said || text == NULL);
    return leave(mpi, g, rc);
}

int launch_mpi(const struct launch_opts *opts, launch_fn *fn, void *ctx)
{
    has_begun = true;
    const char *name = NULL;
    int launcher_size = 0;
    const bool has_launcher = launch_mpi_env(&name, &launcher_size);
    const dcp_mpi_module *mpi = NULL;
    dcp_status st = DCP_OK;
    if (has_launcher) {
        st = load_module(name, RTLD_GLOBAL, &mpi);
    } else {
        for (int i = 0; i < N_MPI && mpi == NULL; i++)
            st = load_module(mpi_names[i], RTLD_GLOBAL, &mpi);
        if (mpi != NULL) st = DCP_OK;
    }
    if (st == DCP_OK) st = init_in_time(mpi, opts->deadline_s);
    if (st != DCP_OK) {
        let_first_speak();
        fprintf(stderr, "dcp-attn: %s\n", message_plain(dcp_last_error()));
        return 1;
    }
    const int size = mpi->world_size();
    const bool speaks = mpi->world_rank() == 0;
    if (launcher_size > 0 && launcher_size != size) {
        if (speaks) {
            fprintf(stderr,
                    "dcp-attn: the launcher has started %d processes, but %s sees a world of %d: "
                    "this mpirun belongs to another MPI\n",
                    launcher_size, mpi->mpi_name, size);
        }
        mpi->finalize();
        return 1;
    }
    if (opts->n_ranks != 0 && opts->n_ranks != size) {
        if (speaks && has_launcher) {
            fprintf(stderr, "dcp-attn: %d ranks asked for in an MPI world of %d; leave -n out\n",
                    opts->n_ranks, size);
        } else if (speaks) {
            fprintf(stderr, "dcp-attn: --comm mpi with %d ranks: start it with mpirun -n %d\n",
                    opts->n_ranks, opts->n_ranks);
        }
        mpi->finalize();
        return 2;
    }
    dcp_group_opts group_opts = DCP_GROUP_OPTS_INIT;
    group_opts.deadline_s = opts->deadline_s;
    dcp_group *g = NULL;
    st = mpi->create_world(&group_opts, &g);
    if (st != DCP_OK) {
        launch_wait_for_turn(st, mpi->world_rank());
        fprintf(stderr, "dcp-attn: rank %d: %s\n", mpi->world_rank(),
                message_plain(dcp_last_error()));
        end_world(mpi, 1);
    }
    launch_speak_in_turn(true);
    /* A rank may have failed before it came here: launch_failed_early. */
    return leave(mpi, g, all_ranks_ok(g, DCP_OK) ? fn(g, ctx) : EXIT_FAILED);
}
