/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/launch.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/status_priv.h"
#include "cli/launch_priv.h"
#include "cli/message.h"

enum { MAX_RANKS = 4096 };

/* --- what the ranks tell --- */

static struct launch_board *board_in_use;

static size_t board_bytes(int n)
{
    return sizeof(struct launch_board) + (size_t)n * sizeof(struct launch_note);
}

struct launch_board *launch_board_create(int n)
{
    void *map =
        mmap(NULL, board_bytes(n), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        (void)dcp__fail(DCP_ERR_NOMEM, "no memory for the messages of %d ranks: %s", n,
                        strerror(errno));
        return NULL;
    }
    struct launch_board *const board = map;
    board->n = n;
    return board;
}

void launch_board_destroy(struct launch_board *board)
{
    if (board != NULL) munmap(board, board_bytes(board->n));
}

void launch_board_use(struct launch_board *board)
{
    board_in_use = board;
}

bool launch_is_echo(int32_t status)
{
    return status == DCP_ERR_PEER || status == DCP_ERR_POISONED || status == DCP_ERR_TIMEOUT;
}

/* A cause of one's own, then a late peer, then a failed one, then a poisoned group. */
static int note_weight(int32_t status)
{
    switch (status) {
    case DCP_ERR_TIMEOUT:
        return 1;
    case DCP_ERR_PEER:
        return 2;
    case DCP_ERR_POISONED:
        return 3;
    default:
        return 0;
    }
}

int launch_board_root(const struct launch_board *board)
{
    int root = -1;
    for (int r = 0; r < board->n; r++) {
        const uint32_t order = atomic_load(&board->notes[r].order);
        if (order == 0) continue;
        if (root >= 0) {
            const int w = note_weight(board->notes[r].status);
            const int root_w = note_weight(board->notes[root].status);
            if (w > root_w || (w == root_w && order > atomic_load(&board->notes[root].order))) {
                continue;
            }
        }
        root = r;
    }
    return root;
}

static bool in_turn;

void launch_speak_in_turn(bool on)
{
    in_turn = on;
}

void launch_wait_for_turn(dcp_status st, int rank)
{
    if (!launch_is_echo((int32_t)st)) return;
    /* Long beside what a busy machine takes to let the rank of the cause print its line. */
    const long ms = 300 + 30L * (rank < 20 ? rank : 20);
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = ms * 1000000};
    (void)nanosleep(&pause, NULL);
}

static void tell(const dcp_group *g, dcp_status st, const char *text, bool is_of_all)
{
    struct launch_board *const board = board_in_use;
    const int rank = g != NULL ? dcp_group_rank(g) : 0;
    if (board == NULL || rank >= board->n) {
        const bool is_known_to_all =
            st == DCP_ERR_MISMATCH || st == DCP_ERR_NONFINITE || st == DCP_ERR_NOT_SUPPORTED;
        if (in_turn && is_known_to_all && rank != 0) return;
        if (in_turn) launch_wait_for_turn(st, rank);
        if (g != NULL && dcp_group_size(g) > 1 && !is_of_all) {
            fprintf(stderr, "dcp-attn: rank %d: %s\n", rank, message_plain(text));
        } else {
            fprintf(stderr, "dcp-attn: %s\n", message_plain(text));
        }
        return;
    }
    struct launch_note *const note = &board->notes[rank];
    if (atomic_load(&note->order) != 0) return; /* the first cause counts */
    note->status = (int32_t)st;
    note->is_of_all = is_of_all;
    snprintf(note->text, sizeof(note->text), "%s", text);
    atomic_store(&note->order, atomic_fetch_add(&board->n_told, 1) + 1);
}

void launch_tell(const dcp_group *g, dcp_status st, const char *text)
{
    tell(g, st, text, false);
}

void launch_tell_of_all(const dcp_group *g, dcp_status st, const char *text)
{
    tell(g, st, text, true);
}

static void print_root(const struct launch_board *board)
{
    const int root = launch_board_root(board);
    if (root < 0) return;
    const struct launch_note *const note = &board->notes[root];
    /* A text of the group names its ranks itself. */
    if (board->n > 1 && !note->is_of_all && !launch_is_echo(note->status)) {
        fprintf(stderr, "dcp-attn: rank %d: %s\n", root, message_plain(note->text));
    } else {
        fprintf(stderr, "dcp-attn: %s\n", message_plain(note->text));
    }
}

/* --- ranks in this process --- */

static int fail_now(void)
{
    fprintf(stderr, "dcp-attn: %s\n", message_plain(dcp_last_error()));
    return 1;
}

static int launch_self(const dcp_group_opts *group_opts, launch_fn *fn, void *ctx)
{
    dcp_group *g = NULL;
    if (dcp_group_create_self(group_opts, &g) != DCP_OK) return fail_now();
    const int rc = fn(g, ctx);
    dcp_group_destroy(g);
    return rc;
}

struct thread_rank {
    pthread_t thread;
    dcp_group *g;
    launch_fn *fn;
    void *ctx;
    int rc;
};

static void *run_thread_rank(void *arg)
{
    struct thread_rank *const t = arg;
    t->rc = t->fn(t->g, t->ctx);
    if (t->rc != 0) dcp_group_abort(t->g, "it failed");
    dcp_group_destroy(t->g);
    return NULL;
}

static int launch_threads(const dcp_group_opts *group_opts, int n, launch_fn *fn, void *ctx)
{
    int rc = 1;
    dcp_group **groups = calloc((size_t)n, sizeof(dcp_group *));
    struct thread_rank *ranks = calloc((size_t)n, sizeof(*ranks));
    struct launch_board *board = launch_board_create(n);
    if (groups == NULL || ranks == NULL || board == NULL) {
        fprintf(stderr, "dcp-attn: no memory for %d ranks\n", n);
        goto out;
    }
    if (dcp_group_create_threads(n, group_opts, groups) != DCP_OK) {
        fail_now();
        goto out;
    }
    launch_board_use(board);
    rc = 0;
    int n_started = 1; /* rank 0 is this thread */
    for (int r = 0; r < n; r++) {
        ranks[r] = (struct thread_rank){.g = groups[r], .fn = fn, .ctx = ctx};
    }
    for (int r = 1; r < n; r++, n_started++) {
        const int err = pthread_create(&ranks[r].thread, NULL, run_thread_rank, &ranks[r]);
        if (err == 0) continue;
        (void)dcp__fail(DCP_ERR_SYS, "cannot start the thread of rank %d: %s", r, strerror(err));
        launch_tell(groups[r], DCP_ERR_SYS, dcp_last_error());
        rc = 1;
        break;
    }
    for (int r = n_started; r < n; r++) {
        dcp_group_abort(groups[r], "its thread did not start");
        dcp_group_destroy(groups[r]);
    }
    (void)run_thread_rank(&ranks[0]);
    for (int r = 1; r < n_started; r++) pthread_join(ranks[r].thread, NULL);
    for (int r = 0; r < n_started; r++) rc = ranks[r].rc > rc ? ranks[r].rc : rc;
    launch_board_use(NULL);
    if (rc != 0) print_root(board);
out:
    launch_board_destroy(board);
    free(ranks);
    free(groups);
    return rc;
}

int launch_run(const struct launch_opts *opts, launch_fn *fn, void *ctx)
{
    const char *comm = opts->comm == NULL || strcmp(opts->comm, "auto") == 0 ? NULL : opts->comm;
    if (opts->n_ranks < 0 || opts->n_ranks > MAX_RANKS) {
        fprintf(stderr, "dcp-attn: %d ranks; 1 to %d are possible\n", opts->n_ranks, MAX_RANKS);
        return 2;
    }
    const char *mpi_name;
    int world;
    const bool has_launcher = launch_mpi_env(&mpi_name, &world);
    if (comm == NULL ? has_launcher : strcmp(comm, "mpi") == 0) return launch_mpi(opts, fn, ctx);
    if (has_launcher && world > 1) {
        if (!launch_mpi_env_is_first()) return 2;
        fprintf(stderr,
                "dcp-attn: --comm %s under an MPI launcher would make %d runs of it; leave --comm "
                "or mpirun out\n",
                comm, world);
        return 2;
    }
    dcp_group_opts group_opts = DCP_GROUP_OPTS_INIT;
    group_opts.deadline_s = opts->deadline_s;
    const int n = opts->n_ranks == 0 ? 1 : opts->n_ranks;
    if (comm == NULL && n == 1) return launch_self(&group_opts, fn, ctx);
    if (comm != NULL && strcmp(comm, "threads") == 0) {
        return launch_threads(&group_opts, n, fn, ctx);
    }
    if (comm != NULL && strcmp(comm, "shm") != 0) {
        fprintf(stderr, "dcp-attn: --comm %s is unknown; known: auto, threads, shm, mpi\n", comm);
        return 2;
    }
    return launch_shm(opts, n, fn, ctx);
}
