/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are children. The parent does nothing but supervise: it passes signals on, tells the group
 * how a rank ended, ends what is left after a failure, and prints the cause. Children die with
 * their parent (a death signal), also stopped ones; all they share is anonymous. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock_priv.h"
#include "cli/launch_priv.h"
#include "cli/message.h"

/* After the first failure the others learn of it in their next wait; then they are ended. */
static const double grace_s = 3;

struct child {
    pid_t pid;
    bool has_ended, is_stopped, was_ended_by_us;
    int wait_status;
};

struct brood {
    int n, n_alive;
    struct child *children; /* [n] */
    dcp_shm *shm;
    struct launch_board *board;
    int first_dead;   /* rank that was killed or ended strangely before any other; -1 */
    int signal_taken; /* SIGINT, SIGTERM or SIGHUP that the parent got; 0 = none */
    double end_at;    /* when the rest is killed; 0 = not yet decided */
};

static void run_child(struct brood *b, int rank, pid_t parent, const sigset_t *mask, launch_fn *fn,
                      void *ctx)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1); /* it died before the call above */
    sigprocmask(SIG_SETMASK, mask, NULL);
    launch_board_use(b->board);
    dcp_group *g = NULL;
    if (dcp_shm_attach(b->shm, rank, &g) != DCP_OK) {
        struct launch_note *const note = &b->board->notes[rank];
        note->status = (int32_t)DCP_ERR_SYS;
        snprintf(note->text, sizeof(note->text), "%s", dcp_last_error());
        atomic_store(&note->order, atomic_fetch_add(&b->board->n_told, 1) + 1);
        _exit(1);
    }
    dcp_shm_release(b->shm);
    const int rc = fn(g, ctx);
    if (rc != 0) dcp_group_abort(g, "it failed");
    dcp_group_destroy(g);
    const bool is_written = fflush(stdout) == 0;
    fflush(stderr);
    _exit(rc == 0 && !is_written ? 1 : rc & 0xff);
}

static bool is_odd_end(int status)
{
    return WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) > 2);
}

static void signal_all(const struct brood *b, int signo)
{
    for (int r = 0; r < b->n; r++) {
        if (b->children[r].pid > 0 && !b->children[r].has_ended) kill(b->children[r].pid, signo);
    }
}

static void end_rest(struct brood *b)
{
    for (int r = 0; r < b->n; r++) b->children[r].was_ended_by_us |= !b->children[r].has_ended;
    signal_all(b, SIGKILL);
}

/* Take all news of children. */
static void reap(struct brood *b)
{
    for (int r = 0; r < b->n; r++) {
        struct child *const c = &b->children[r];
        if (c->pid <= 0 || c->has_ended) continue;
        int status;
        const pid_t got = waitpid(c->pid, &status, WNOHANG | WUNTRACED | WCONTINUED);
        /* No such child: somebody else has taken its end, which then counts as a failure. */
        if (got < 0 && errno == ECHILD)
            status = 1 << 8;
        else if (got != c->pid)
            continue;
        if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
            c->is_stopped = WIFSTOPPED(status);
            continue;
        }
        c->has_ended = true;
        c->wait_status = status;
        b->n_alive--;
        dcp_shm_report_exit(b->shm, r, status);
        if (is_odd_end(status) && !c->was_ended_by_us && b->first_dead < 0) b->first_dead = r;
        const bool has_failed = !WIFEXITED(status) || WEXITSTATUS(status) != 0;
        if (has_failed && b->end_at == 0) b->end_at = dcp__now_s() + grace_s;
    }
}

static void supervise(struct brood *b, const sigset_t *news)
{
    while (b->n_alive > 0) {
        const struct timespec slice = {.tv_sec = 0, .tv_nsec = 100000000};
        const int signo = sigtimedwait(news, NULL, &slice);
        if (signo == SIGINT || signo == SIGTERM || signo == SIGHUP) {
            if (b->signal_taken == 0) {
                b->signal_taken = signo;
                b->end_at = dcp__now_s() + grace_s;
                for (int r = 0; r < b->n; r++) b->children[r].was_ended_by_us = true;
                signal_all(b, signo);
            } else {
                b->end_at = dcp__now_s(); /* asked twice */
            }
        }
        reap(b);
        if (b->n_alive > 0 && b->end_at > 0 && dcp__now_s() >= b->end_at) end_rest(b);
    }
}

/* One line that says why, and what is known besides. */
static void print_cause(const struct brood *b)
{
    const int root = launch_board_root(b->board);
    const struct launch_note *const note = root >= 0 ? &b->board->notes[root] : NULL;
    char more[256] = "";
    size_t used = 0;
    for (int r = 0; r < b->n && used < sizeof(more) - 64; r++) {
        if (!b->children[r].is_stopped) continue;
        used += (size_t)snprintf(more + used, sizeof(more) - used, "; rank %d (pid %d) is stopped",
                                 r, (int)b->children[r].pid);
    }
    if (note != NULL && note->is_of_all) {
        fprintf(stderr, "dcp-attn: %s%s\n", message_plain(note->text), more);
        return;
    }
    if (note != NULL && !launch_is_echo(note->status)) {
        fprintf(stderr, "dcp-attn: rank %d: %s%s\n", root, message_plain(note->text), more);
        return;
    }
    if (b->first_dead >= 0) {
        const int status = b->children[b->first_dead].wait_status;
        if (WIFSIGNALED(status)) {
            const char *name = sigabbrev_np(WTERMSIG(status));
            fprintf(stderr,
                    "dcp-attn: rank %d (pid %d) was killed by signal %d (SIG%s); the others have "
                    "stopped%s\n",
                    b->first_dead, (int)b->children[b->first_dead].pid, WTERMSIG(status),
                    name != NULL ? name : "?", more);
        } else {
            fprintf(stderr,
                    "dcp-attn: rank %d (pid %d) ended with exit status %d; the others have "
                    "stopped%s\n",
                    b->first_dead, (int)b->children[b->first_dead].pid, WEXITSTATUS(status), more);
        }
        return;
    }
    if (note != NULL)
        fprintf(stderr, "dcp-attn: %s%s\n", message_plain(note->text), more);
    else if (used > 0)
        fprintf(stderr, "dcp-attn: failed%s\n", more);
}

static int exit_code(const struct brood *b)
{
    bool has_failed = false, was_misused = false;
    for (int r = 0; r < b->n; r++) {
        const int status = b->children[r].wait_status;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) has_failed = true;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 2) was_misused = true;
    }
    return was_misused ? 2 : has_failed ? 1 : 0;
}

static bool start_all(struct brood *b, const sigset_t *mask, launch_fn *fn, void *ctx)
{
    const pid_t parent = getpid();
    for (int r = 0; r < b->n; r++) {
        const pid_t pid = fork();
        if (pid == 0) run_child(b, r, parent, mask, fn, ctx);
        if (pid < 0) {
            fprintf(stderr, "dcp-attn: cannot start rank %d of %d: %s\n", r, b->n, strerror(errno));
            return false;
        }
        b->children[r].pid = pid;
        b->n_alive++;
    }
    return true;
}

int launch_shm(const struct launch_opts *opts, int n, launch_fn *fn, void *ctx)
{
    struct brood b = {.n = n, .first_dead = -1};
    dcp_group_opts group_opts = DCP_GROUP_OPTS_INIT;
    group_opts.deadline_s = opts->deadline_s;
    int rc = 1;
    b.children = calloc((size_t)n, sizeof(*b.children));
    b.board = launch_board_create(n);
    if (b.children == NULL || b.board == NULL) {
        fprintf(stderr, "dcp-attn: no memory for %d ranks\n", n);
        goto out;
    }
    if (dcp_shm_prepare(n, &group_opts, &b.shm) != DCP_OK) {
        fprintf(stderr, "dcp-attn: %s\n", message_plain(dcp_last_error()));
        goto out;
    }
    sigset_t news, mask;
    sigemptyset(&news);
    sigaddset(&news, SIGCHLD);
    sigaddset(&news, SIGINT);
    sigaddset(&news, SIGTERM);
    sigaddset(&news, SIGHUP);
    sigprocmask(SIG_BLOCK, &news, &mask);
    /* Where it was ignored on entry, the kernel would bury children untold. */
    signal(SIGCHLD, SIG_DFL);
    fflush(NULL); /* or every child prints what is buffered */
    const bool has_started = start_all(&b, &mask, fn, ctx);
    if (!has_started) end_rest(&b);
    supervise(&b, &news);
    rc = has_started ? exit_code(&b) : 1;
    if (rc != 0 && has_started && b.signal_taken == 0) print_cause(&b);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    if (b.signal_taken != 0) {
        /* The shell wants to see which signal ended the command. */
        signal(b.signal_taken, SIG_DFL);
        raise(b.signal_taken);
    }
out:
    dcp_shm_release(b.shm);
    launch_board_destroy(b.board);
    free(b.children);
    return rc;
}
