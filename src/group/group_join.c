/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that are not related meet under a name. The name is a small file in /dev/shm where each
 * rank signs in; the group's memory itself is the shm group of whoever came first, opened through
 * /proc by the others, so a container's small /dev/shm does not matter.
 *
 *   first       makes the memory, writes {n, its pid and descriptor} and its own line
 *   others      check, write their lines, open the memory, attach
 *   all         wait until every line says "attached"; who sees that first removes the name
 *
 * All reading and writing of the file is under its lock (flock), which the kernel releases when the
 * holder dies: there is no state in which a killed process leaves more than the name, and a name
 * whose ranks include a dead process is replaced by the next one that joins. Who waits looks at the
 * others' processes by pid and start time, so it fails at once when one of them dies. A failure is
 * written into the file: all that wait return the same text. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "base/fault_priv.h"
#include "group/group_mem_priv.h"

enum { MAGIC = 0x6a706364, NAME_MAX_BYTES = 100, MAX_RANKS = 4096 };
enum { LOCK_GRACE_NS = 250000000 };
enum line_state { LINE_FREE = 0, LINE_SIGNED = 1, LINE_ATTACHED = 2 };

struct book_head {
    uint32_t magic;
    char version[28];
    int32_t n, ranks_per_host;
    uint64_t pid_space; /* inode of the namespace the pids are of */
    int32_t holder_pid, holder_fd;
    int32_t failed, is_complete; /* failed: a dcp_status */
    char text[400];
};

struct book_line {
    uint64_t start_ticks;
    int32_t pid, state;
};

/* The open file and what was read of it. */
struct book {
    char path[160];
    const char *name;
    int fd;
    int rank, n, ranks_per_host;
    int64_t start_ns, end_ns;
    struct book_head head;
    struct book_line *lines; /* [n] */
};

static dcp_status check_name(const char *name)
{
    const size_t n = name == NULL ? 0 : strlen(name);
    bool is_good = n > 0 && n <= NAME_MAX_BYTES && name[0] != '.';
    for (size_t i = 0; i < n && is_good; i++) {
        const char c = name[i];
        is_good = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
    }
    if (is_good) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "join_shm: the name \"%.120s\" is not good; wanted 1 to %d of A-Z a-z 0-9 . _ "
                     "-, not beginning with a dot",
                     name == NULL ? "(null)" : name, NAME_MAX_BYTES);
}

static void nap(void)
{
    const struct timespec ts = {.tv_sec = 0, .tv_nsec = 1000000};
    (void)nanosleep(&ts, NULL);
}

static uint64_t own_pid_space(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

static void close_book(struct book *b)
{
    if (b->fd >= 0) close(b->fd); /* the lock goes with it */
    b->fd = -1;
}

/* Whose lock it is does not matter: it is held for some hundred microseconds, unless its holder is
 * stopped. Ranks that reach the deadline together also take the lock one after the other, so each
 * try gets LOCK_GRACE_NS even when the deadline has passed: only who holds it for longer is
 * blamed. */
static dcp_status lock_book(struct book *b)
{
    const int64_t start_ns = dcp__now_ns();
    const int64_t grace_end_ns = start_ns + LOCK_GRACE_NS;
    const int64_t end_ns = grace_end_ns > b->end_ns ? grace_end_ns : b->end_ns;
    while (flock(b->fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) {
            return dcp__fail(DCP_ERR_SYS, "join_shm: locking %s: %s", b->path, strerror(errno));
        }
        const int64_t now_ns = dcp__now_ns();
        if (now_ns > end_ns) {
            const double waited_s = (double)(now_ns - start_ns) * 1e-9;
            return dcp__fail(DCP_ERR_TIMEOUT,
                             "join_shm: rank %d waited %.1f %s for the lock of %s; a process "
                             "that joins is stopped",
                             b->rank, dcp__wait_amount(waited_s), dcp__wait_unit(waited_s),
                             b->path);
        }
        nap();
    }
    return DCP_OK;
}

static void unlock_book(struct book *b)
{
    (void)flock(b->fd, LOCK_UN);
}

/* Open and lock the file that has the name now. */
static dcp_status open_book(struct book *b)
{
    for (;;) {
        struct stat own, named;
        b->fd = open(b->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (b->fd < 0) {
            const int err = errno;
            if (lstat(b->path, &named) == 0 && named.st_uid != geteuid()) {
                return dcp__fail(DCP_ERR_SYS, "join_shm: %s belongs to user %d; take another name",
                                 b->path, (int)named.st_uid);
            }
            return dcp__fail(DCP_ERR_SYS, "join_shm: %s: %s", b->path, strerror(err));
        }
        if (fstat(b->fd, &own) != 0 || own.st_uid != geteuid() || !S_ISREG(own.st_mode)) {
            return dcp__fail(DCP_ERR_SYS,
                             "join_shm: %s is not a file of user %d; take another name", b->path,
                             (int)geteuid());
        }
        DCP_TRY(lock_book(b));
        if (stat(b->path, &named) == 0 && named.st_ino == own.st_ino) return DCP_OK;
        close_book(b); /* replaced while we waited */
    }
}

static off_t line_at(int rank)
{
    return (off_t)(sizeof(struct book_head) + (size_t)rank * sizeof(struct book_line));
}

/* False if the file holds no group (new, or its maker died before it had written it). */
static bool read_book(struct book *b)
{
    if (pread(b->fd, &b->head, sizeof(b->head), 0) != (ssize_t)sizeof(b->head)) return false;
    if (b->head.magic != MAGIC || b->head.n < 1 || b->head.n > MAX_RANKS) return false;
    memset(b->lines, 0, (size_t)MAX_RANKS * sizeof(*b->lines));
    const ssize_t n = (ssize_t)((size_t)b->head.n * sizeof(*b->lines));
    return pread(b->fd, b->lines, (size_t)n, line_at(0)) == n;
}

static dcp_status write_at(struct book *b, const void *data, size_t n, off_t at)
{
    if (pwrite(b->fd, data, n, at) == (ssize_t)n) return DCP_OK;
    return dcp__fail(DCP_ERR_SYS, "join_shm: writing %s: %s", b->path, strerror(errno));
}

/* The first rank whose process is gone, or -1. */
static int dead_rank(const struct book *b)
{
    for (int r = 0; r < b->head.n; r++) {
        const struct book_line *const line = &b->lines[r];
        if (line->state != LINE_FREE && dcp__process_is_gone(line->pid, line->start_ticks)) {
            return r;
        }
    }
    return -1;
}

/* What is left of a run that is over: with its name gone, whoever still waits in it finds out by
 * itself. Pids of another space say nothing. */
static bool is_leftover(const struct book *b)
{
    if (b->head.failed != DCP_OK || b->head.is_complete != 0) return true;
    return b->head.pid_space == own_pid_space() && dead_rank(b) >= 0;
}

/* The name may be another run's by now. It is only taken from a file under that file's lock, so
 * what is found here still holds when it is removed. */
static void remove_name(const struct book *b)
{
    struct stat own, named;
    if (fstat(b->fd, &own) == 0 && lstat(b->path, &named) == 0 && own.st_ino == named.st_ino) {
        (void)unlink(b->path);
    }
}

/* Write the failure down for all, and remove the name. The lock is held. */
static dcp_status fail_book(struct book *b, dcp_status code, const char *text)
{
    b->head.failed = (int32_t)code;
    snprintf(b->head.text, sizeof(b->head.text), "%s", text);
    (void)write_at(b, &b->head, sizeof(b->head), 0);
    remove_name(b);
    return dcp__fail(code, "%s", text);
}

/* Does what stands in the book go with what this rank wants? */
static dcp_status check_book(struct book *b)
{
    char text[sizeof(b->head.text)];
    if (b->head.pid_space != own_pid_space()) {
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "join_shm: the ranks that are in %s live in another space of process "
                         "numbers (container); share it, or use another transport",
                         b->name);
    }
    int other = 0; /* for the text: somebody who is in */
    while (other < b->head.n - 1 && b->lines[other].state == LINE_FREE) other++;
    if (b->head.n != b->n || b->head.ranks_per_host != b->ranks_per_host ||
        strcmp(b->head.version, DCP_VERSION) != 0) {
        snprintf(text, sizeof(text),
                 "join_shm %s: rank %d (pid %d) has %d ranks, %d per host, version %s; rank %d "
                 "(pid %d) has %d ranks, %d per host, version %s",
                 b->name, other, b->lines[other].pid, b->head.n, b->head.ranks_per_host,
                 b->head.version, b->rank, (int)getpid(), b->n, b->ranks_per_host, DCP_VERSION);
        return fail_book(b, DCP_ERR_MISMATCH, text);
    }
    if (b->lines[b->rank].state != LINE_FREE) {
        snprintf(text, sizeof(text), "join_shm %s: rank %d came twice: pid %d and pid %d", b->name,
                 b->rank, b->lines[b->rank].pid, (int)getpid());
        return fail_book(b, DCP_ERR_MISMATCH, text);
    }
    return DCP_OK;
}

/* Be in the book, as its first rank or as a later one. On success the lock has been released. */
static dcp_status sign_in(struct book *b, const struct dcp__group_opts *opts, dcp_shm **shm_out)
{
    DCP_TRY(open_book(b));
    while (read_book(b) && is_leftover(b)) {
        remove_name(b);
        close_book(b);
        DCP_TRY(open_book(b));
    }
    struct book_line own = {.pid = (int32_t)getpid(), .state = LINE_SIGNED};
    if (!dcp__process_start((int)getpid(), &own.start_ticks)) {
        return dcp__fail(DCP_ERR_SYS, "join_shm: /proc is needed and cannot be read");
    }
    if (read_book(b)) {
        DCP_TRY(check_book(b));
        DCP_TRY(write_at(b, &own, sizeof(own), line_at(b->rank)));
    } else {
        DCP_TRY(dcp__shm_make(b->n, opts, shm_out));
        b->head = (struct book_head){.magic = MAGIC,
                                     .version = DCP_VERSION,
                                     .n = b->n,
                                     .ranks_per_host = b->ranks_per_host,
                                     .pid_space = own_pid_space(),
                                     .holder_pid = own.pid,
                                     .holder_fd = dcp__shm_fd(*shm_out)};
        /* The head last: before it the file holds nothing. */
        memset(b->lines, 0, (size_t)b->n * sizeof(own));
        b->lines[b->rank] = own;
        if (ftruncate(b->fd, 0) != 0) {
            return dcp__fail(DCP_ERR_SYS, "join_shm: %s: %s", b->path, strerror(errno));
        }
        DCP_TRY(write_at(b, b->lines, (size_t)b->n * sizeof(own), line_at(0)));
        dcp__fault_pass("join_create", b->rank, (double)opts->deadline_ns * 1.5e-9 + 0.25);
        DCP_TRY(write_at(b, &b->head, sizeof(b->head), 0));
    }
    dcp__fault_pass("join_locked", b->rank, (double)opts->deadline_ns * 1.5e-9 + 0.25);
    unlock_book(b);
    return DCP_OK;
}

/* Under the lock: is all done, has it failed, has somebody died? */
static dcp_status look(struct book *b, bool *done_out)
{
    if (!read_book(b)) return dcp__fail(DCP_ERR_SYS, "join_shm: %s was overwritten", b->path);
    if (b->head.failed != DCP_OK) {
        return dcp__fail((dcp_status)b->head.failed, "%s", b->head.text);
    }
    int n_attached = 0;
    for (int r = 0; r < b->n; r++) n_attached += b->lines[r].state == LINE_ATTACHED;
    if (n_attached == b->n || b->head.is_complete != 0) {
        if (b->head.is_complete == 0) {
            b->head.is_complete = 1;
            DCP_TRY(write_at(b, &b->head, sizeof(b->head), 0));
            remove_name(b);
        }
        *done_out = true;
        return DCP_OK;
    }
    char text[sizeof(b->head.text)];
    const int dead = dead_rank(b);
    if (dead >= 0) {
        snprintf(text, sizeof(text), "join_shm %s: rank %d (pid %d) died before all had joined",
                 b->name, dead, b->lines[dead].pid);
        return fail_book(b, DCP_ERR_PEER, text);
    }
    if (dcp__now_ns() <= b->end_ns) return DCP_OK;
    const double waited_s = (double)(b->end_ns - b->start_ns) * 1e-9;
    int used =
        snprintf(text, sizeof(text), "join_shm %s: rank %d waited %.1f %s; missing:", b->name,
                 b->rank, dcp__wait_amount(waited_s), dcp__wait_unit(waited_s));
    for (int r = 0; r < b->n && (size_t)used < sizeof(text) - 32; r++) {
        if (b->lines[r].state == LINE_ATTACHED) continue;
        used += snprintf(text + used, sizeof(text) - (size_t)used, " rank %d%s", r,
                         b->lines[r].state == LINE_SIGNED ? " (has come, is not ready)" : "");
    }
    return fail_book(b, DCP_ERR_TIMEOUT, text);
}

static dcp_status wait_for_all(struct book *b)
{
    for (bool done = false; !done;) {
        DCP_TRY(lock_book(b));
        const dcp_status st = look(b, &done);
        unlock_book(b);
        if (st != DCP_OK) return st;
        if (!done) nap();
    }
    return DCP_OK;
}

static dcp_status join(struct book *b, const struct dcp__group_opts *opts, dcp_group **group_out)
{
    dcp_shm *shm = NULL;
    dcp_group *g = NULL;
    dcp_status st = sign_in(b, opts, &shm);
    const bool is_in = st == DCP_OK;
    bool is_shut_out = false; /* of the book, by who holds its lock: nothing can be told there */
    if (is_in && shm == NULL) {
        st = dcp__shm_join(b->n, b->head.holder_pid, b->head.holder_fd, &shm);
    }
    if (st == DCP_OK) st = dcp__shm_enter(shm, b->rank, &g);
    dcp__fault_pass("join", b->rank, (double)opts->deadline_ns * 1.5e-9 + 0.25);
    if (st == DCP_OK) {
        struct book_line own = {.pid = (int32_t)getpid(), .state = LINE_ATTACHED};
        (void)dcp__process_start(own.pid, &own.start_ticks);
        st = lock_book(b);
        is_shut_out = st != DCP_OK;
        if (st == DCP_OK) st = write_at(b, &own, sizeof(own), line_at(b->rank));
        unlock_book(b);
    }
    if (st == DCP_OK) {
        st = wait_for_all(b);
    } else if (is_in && !is_shut_out && lock_book(b) == DCP_OK) {
        /* The others need not wait for this rank. */
        char text[sizeof(b->head.text)];
        char why[200];
        dcp__brief(why, sizeof(why), dcp_last_error());
        snprintf(text, sizeof(text), "join_shm %s: rank %d (pid %d) could not: %s", b->name,
                 b->rank, (int)getpid(), why);
        if (read_book(b) && b->head.failed == DCP_OK) (void)fail_book(b, st, text);
        unlock_book(b);
    }
    dcp_shm_release(shm);
    if (st != DCP_OK) {
        dcp_group_destroy(g);
        return st;
    }
    *group_out = g;
    return DCP_OK;
}

dcp_status dcp_group_join_shm(const char *name, int rank, int n, const dcp_group_opts *opts,
                              dcp_group **group_out)
{
    if (group_out == NULL) return dcp__fail(DCP_ERR_ARG, "join_shm: group_out is NULL");
    DCP_TRY(check_name(name));
    if (n < 1 || n > MAX_RANKS) {
        return dcp__fail(DCP_ERR_ARG, "join_shm: %d ranks; 1 to %d are possible", n, MAX_RANKS);
    }
    if (rank < 0 || rank >= n) return dcp__fail(DCP_ERR_ARG, "join_shm: rank %d of %d", rank, n);
    struct dcp__group_opts mine;
    DCP_TRY(dcp__group_opts_read(opts, &mine));
    DCP_TRY(dcp__group_load_fault(n, true));
    void *mem;
    DCP_TRY(dcp__alloc_array(MAX_RANKS, sizeof(struct book_line), "meeting of ranks", &mem));
    struct book b = {.name = name,
                     .fd = -1,
                     .rank = rank,
                     .n = n,
                     .ranks_per_host = mine.ranks_per_host,
                     .start_ns = dcp__now_ns(),
                     .lines = mem};
    b.end_ns = b.start_ns + mine.deadline_ns;
    /* The user's number is in the path: names of different users do not meet. */
    snprintf(b.path, sizeof(b.path), "/dev/shm/dcp-attn.%u.%s", (unsigned)geteuid(), name);
    const dcp_status st = join(&b, &mine, group_out);
    close_book(&b);
    dcp__free(b.lines);
    return st;
}
