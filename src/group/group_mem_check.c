/* SPDX-License-Identifier: Apache-2.0 */
/* Who is late and why: the slow path of every wait in shared memory. A peer counts as dead when its
 * parent says so, when it has left, or when /proc shows no such process (a zombie is none). The
 * parent's word carries the cause, so a peer found dead in /proc waits a little for it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock_priv.h"
#include "group/group_mem_priv.h"

/* A look takes some 10 us a peer: a thousand ranks that look at a thousand peers each would do
 * nothing else. So it takes a few peers at a time, in turn. */
enum { PROC_EVERY_NS = 40000000, PROC_PEERS = 32, REPORT_GRACE_NS = 200000000 };

/* State letter and start time of a process; false if there is none (or no /proc). */
static bool read_proc_stat(int pid, char *state_out, uint64_t *start_ticks_out)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = '\0';
    /* pid (name) state ppid ...: the name may hold anything, so count from its last bracket. */
    const char *at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ') return false;
    *state_out = at[2];
    at += 2;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (at == NULL) return false;
        at++;
    }
    *start_ticks_out = strtoull(at, NULL, 10);
    return true;
}

void dcp__mem_watch_self(struct dcp__mem_core *core, int rank)
{
    struct dcp__mem_member *const member = dcp__mem_member_at(core, rank);
    char state;
    uint64_t start_ticks;
    if (!read_proc_stat((int)getpid(), &state, &start_ticks)) return; /* no /proc: not watched */
    atomic_store(&member->start_ticks, start_ticks);
    atomic_store(&member->pid, (int32_t)getpid());
}

void dcp__mem_report_exit(struct dcp__mem_core *core, int rank, int wait_status)
{
    struct dcp__mem_member *const member = dcp__mem_member_at(core, rank);
    atomic_store(&member->wait_status, wait_status);
    atomic_store(&member->exit_known, 1);
}

bool dcp__process_start(int pid, uint64_t *start_ticks_out)
{
    char state;
    return read_proc_stat(pid, &state, start_ticks_out);
}

char dcp__process_state(int pid)
{
    char state;
    uint64_t start_ticks;
    return read_proc_stat(pid, &state, &start_ticks) ? state : '\0';
}

bool dcp__process_is_gone(int pid, uint64_t start_ticks)
{
    char state;
    uint64_t found_ticks;
    errno = 0;
    if (!read_proc_stat(pid, &state, &found_ticks)) return errno == ENOENT || errno == ESRCH;
    return state == 'Z' || state == 'X' || found_ticks != start_ticks;
}

static bool member_is_gone(const struct dcp__mem_member *member)
{
    const int pid = (int)atomic_load(&member->pid);
    return pid != 0 && dcp__process_is_gone(pid, atomic_load(&member->start_ticks));
}

/* Where it is noted how rank ended: here, or in the group that this one was split from. */
static struct dcp__mem_member *reported_at(const struct dcp__mem_group *m, int rank)
{
    struct dcp__mem_member *const own = dcp__mem_member_at(m->core, rank);
    if (atomic_load(&own->exit_known) != 0) return own;
    if (m->root == NULL) return NULL;
    struct dcp__mem_member *const root = dcp__mem_member_at(m->root, m->root_ranks[rank]);
    return atomic_load(&root->exit_known) != 0 ? root : NULL;
}

static dcp_status poison_dead(struct dcp__mem_group *m, int rank,
                              const struct dcp__mem_member *member)
{
    const int status = (int)atomic_load(&member->wait_status);
    const char *call = dcp__call_name((uint32_t)m->base.call);
    char who[64];
    snprintf(who, sizeof(who), "rank %d (pid %d)", rank, (int)atomic_load(&member->pid));
    if (WIFSIGNALED(status)) {
        const char *name = sigabbrev_np(WTERMSIG(status));
        return dcp__group_poison(
            &m->base, DCP_ERR_PEER,
            "%s was killed by signal %d (SIG%s) while rank %d waited for it in "
            "%s",
            who, WTERMSIG(status), name != NULL ? name : "?", m->base.rank, call);
    }
    return dcp__group_poison(&m->base, DCP_ERR_PEER,
                             "%s ended with exit status %d while rank %d waited for it in %s", who,
                             WEXITSTATUS(status), m->base.rank, call);
}

/* Where a rank is: "has not attached", "is in barrier". */
static void describe(const struct dcp__mem_member *member, char *text, size_t n)
{
    const uint32_t call = atomic_load_explicit(&member->call, memory_order_relaxed);
    if (atomic_load(&member->attached) == 0) {
        snprintf(text, n, "has not attached");
    } else if (call == DCP__CALL_NONE) {
        snprintf(text, n, "is in no call of the group");
    } else {
        snprintf(text, n, "is in %s", dcp__call_name(call));
    }
}

/* Who is late where ranks wait for each other in a chain: the first that waits for nobody. rank
 * itself where it does not wait, or where the chain closes. */
static int last_awaited(struct dcp__mem_group *m, int rank)
{
    int at = rank;
    for (int i = 0; i < m->base.size; i++) {
        const int next = dcp__mem_waits_for(m->core, at);
        if (next < 0) return at;
        if (next == m->base.rank || next >= m->base.size) break;
        at = next;
    }
    return rank;
}

static dcp_status poison_late(struct dcp__mem_group *m, const struct dcp__wait *w,
                              dcp__is_awaited_fn *is_awaited, const void *ctx)
{
    const double waited_s = (double)(dcp__now_ns() - w->start_ns) * 1e-9;
    char late[320] = "";
    size_t used = 0;
    int n_more = 0; /* for whom there is no room */
    for (int r = 0; r < m->base.size; r++) {
        if (r == m->base.rank || !is_awaited(m, r, ctx)) continue;
        if (used >= sizeof(late) - 150) {
            n_more++;
            continue;
        }
        char where[40];
        describe(dcp__mem_member_at(m->core, r), where, sizeof(where));
        used += (size_t)snprintf(late + used, sizeof(late) - used, "%srank %d (%s",
                                 used > 0 ? ", " : "", r, where);
        const int last = last_awaited(m, r);
        if (last != r) {
            describe(dcp__mem_member_at(m->core, last), where, sizeof(where));
            used += (size_t)snprintf(late + used, sizeof(late) - used,
                                     ", held up by rank %d, which %s", last, where);
        }
        used += (size_t)snprintf(late + used, sizeof(late) - used, ")");
    }
    if (n_more > 0) snprintf(late + used, sizeof(late) - used, " and %d more", n_more);
    return dcp__group_poison(&m->base, DCP_ERR_TIMEOUT,
                             "rank %d waited %.1f %s in %s; did not arrive: %s", m->base.rank,
                             dcp__wait_amount(waited_s), dcp__wait_unit(waited_s),
                             dcp__call_name((uint32_t)m->base.call), late);
}

dcp_status dcp__mem_check(struct dcp__mem_group *m, struct dcp__wait *w,
                          dcp__is_awaited_fn *is_awaited, const void *ctx)
{
    if (dcp__group_is_poisoned(&m->base)) {
        /* What peers gave before the failure still counts. */
        for (int r = 0; r < m->base.size; r++) {
            if (r != m->base.rank && is_awaited(m, r, ctx)) {
                return dcp__group_poison_status(&m->base);
            }
        }
        return DCP_OK;
    }
    const int64_t now = dcp__now_ns();
    const int64_t looked_ns = w->proc_ns != 0 ? w->proc_ns : w->start_ns;
    /* As many looks a second by all ranks together, however many they are. */
    const int64_t every_ns = (int64_t)PROC_EVERY_NS * (1 + m->base.size / 64);
    const bool look_into_proc = m->core->check_pids && now - looked_ns >= every_ns;
    const int proc_begin = w->proc_rank;
    int n_looks = 0;
    if (look_into_proc) w->proc_ns = now;
    for (int i = 0; i < m->base.size; i++) {
        const int r = (m->base.rank + proc_begin + i) % m->base.size;
        if (r == m->base.rank || !is_awaited(m, r, ctx)) continue;
        struct dcp__mem_member *const member = dcp__mem_member_at(m->core, r);
        /* A peer may have given what is awaited and gone since: ask again after the news. */
        const struct dcp__mem_member *const reported = reported_at(m, r);
        if (reported != NULL) {
            if (is_awaited(m, r, ctx)) return poison_dead(m, r, reported);
        } else if (atomic_load(&member->left) != 0) {
            if (is_awaited(m, r, ctx)) {
                return dcp__group_poison(&m->base, DCP_ERR_PEER,
                                         "rank %d has left the group while rank %d waited for it "
                                         "in %s",
                                         r, m->base.rank, dcp__call_name((uint32_t)m->base.call));
            }
        } else if (look_into_proc && n_looks < PROC_PEERS) {
            n_looks++;
            if (!member_is_gone(member)) {
                w->proc_rank = (proc_begin + i + 1) % m->base.size;
                continue;
            }
            if (!is_awaited(m, r, ctx)) continue;
            /* The next look begins here, so that the grace is of one peer. */
            w->proc_rank = (proc_begin + i) % m->base.size;
            n_looks = PROC_PEERS;
            if (w->gone_ns == 0) w->gone_ns = now;
            if (now - w->gone_ns >= REPORT_GRACE_NS) {
                return dcp__group_poison(&m->base, DCP_ERR_PEER,
                                         "rank %d (pid %d) is gone (nobody reported how) while "
                                         "rank %d waited for it in %s",
                                         r, (int)atomic_load(&member->pid), m->base.rank,
                                         dcp__call_name((uint32_t)m->base.call));
            }
        }
    }
    if (now - w->start_ns >= m->base.deadline_ns) return poison_late(m, w, is_awaited, ctx);
    return DCP_OK;
}
