/* SPDX-License-Identifier: Apache-2.0 */
/* Writer of safetensors files. A reader never sees half a file, and a killed writer leaves none:
 * the data goes to a file without a name in the target's folder, which gets its name when whole.
 * Where the file system has no such files it is PATH.tmp.PID, renamed when whole.
 *
 * Links are followed. A device or a FIFO is written to as it is: replacing it would delete it. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/safetensors.h"
#include "engine/safetensors_json.h"

static const int fifo_wait_s = 10; /* for a reader to open the other end */

struct st_writer {
    int fd;
    bool is_direct; /* a device or FIFO: neither made nor renamed */
    bool has_name;  /* tmp_path exists */
    char *path;     /* as given, for messages */
    char *target, *tmp_path;
    size_t data_bytes, written_bytes;
};

static dcp_status write_all(const struct st_writer *w, const void *data, size_t n_bytes)
{
    const unsigned char *from = data;
    while (n_bytes > 0) {
        const size_t ask = n_bytes < (size_t)1 << 30 ? n_bytes : (size_t)1 << 30;
        const ssize_t put = write(w->fd, from, ask);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0)
            return dcp__fail(DCP_ERR_SYS, "writing %s: %s", w->path,
                             put < 0 ? strerror(errno) : "nothing was taken");
        from += put;
        n_bytes -= (size_t)put;
    }
    return DCP_OK;
}

static dcp_status copy_text(const char *text, size_t more_bytes, char **out)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(strlen(text) + 1 + more_bytes, "output path", &p));
    *out = p;
    memcpy(p, text, strlen(text) + 1);
    return DCP_OK;
}

/* What path names once its last component is no link; that need not exist. */
static dcp_status follow_links(const char *path, char **target_out)
{
    enum { MOST_LINKS = 40 };
    char name[PATH_MAX], link[PATH_MAX];
    int n_links = 0;
    if (strlen(path) >= sizeof(name))
        return dcp__fail(DCP_ERR_SYS, "cannot create %s: %s", path, strerror(ENAMETOOLONG));
    memcpy(name, path, strlen(path) + 1);
    for (;; n_links++) {
        const ssize_t n = readlink(name, link, sizeof(link) - 1);
        if (n < 0) break; /* no link, or none to see */
        link[n] = '\0';
        const char *const slash = strrchr(name, '/');
        const size_t keep = link[0] == '/' || slash == NULL ? 0 : (size_t)(slash + 1 - name);
        if (n_links == MOST_LINKS || keep + (size_t)n >= sizeof(name))
            return dcp__fail(DCP_ERR_SYS, "cannot create %s: %s", path,
                             strerror(n_links == MOST_LINKS ? ELOOP : ENAMETOOLONG));
        memcpy(name + keep, link, (size_t)n + 1);
    }
    return copy_text(name, 0, target_out);
}

static dcp_status open_direct(struct st_writer *w, bool is_fifo)
{
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = 10000000};
    w->is_direct = true;
    /* Without O_NONBLOCK a FIFO that nobody reads would hold the open for ever. */
    for (int left = fifo_wait_s * 100;; left--) {
        w->fd = open(w->path, O_WRONLY | O_CLOEXEC | O_NOCTTY | (is_fifo ? O_NONBLOCK : 0));
        if (w->fd >= 0 || !is_fifo || errno != ENXIO || left == 0) break;
        (void)nanosleep(&pause, NULL);
    }
    if (w->fd < 0 && is_fifo && errno == ENXIO)
        return dcp__fail(DCP_ERR_SYS, "cannot write to %s: a FIFO that nobody reads (waited %d s)",
                         w->path, fifo_wait_s);
    if (w->fd < 0) return dcp__fail(DCP_ERR_SYS, "cannot open %s: %s", w->path, strerror(errno));
    if (is_fifo && fcntl(w->fd, F_SETFL, O_WRONLY) != 0)
        return dcp__fail(DCP_ERR_SYS, "cannot write to %s: %s", w->path, strerror(errno));
    return DCP_OK;
}

/* A file without a name in the folder of the target; -1 where that, or giving it one, cannot be. */
static int open_nameless(const char *target)
{
    char folder[PATH_MAX], own[64];
    const char *const slash = strrchr(target, '/');
    const size_t n = slash == NULL ? 0 : (size_t)(slash + 1 - target);
    memcpy(folder, target, n); /* follow_links has bounded it */
    memcpy(folder + n, ".", 2);
    const int fd = open(folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    snprintf(own, sizeof(own), "/proc/self/fd/%d", fd);
    if (access(own, F_OK) == 0) return fd;
    close(fd);
    return -1;
}

static dcp_status open_target(struct st_writer *w, const char *path)
{
    struct stat info;
    DCP_TRY(copy_text(path, 0, &w->path));
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        if (S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode))
            return open_direct(w, S_ISFIFO(info.st_mode));
        return dcp__fail(DCP_ERR_SYS,
                         "cannot write to %s: it is %s; wanted is a file, FIFO or character device",
                         path,
                         S_ISDIR(info.st_mode)    ? "a directory"
                         : S_ISBLK(info.st_mode)  ? "a block device"
                         : S_ISSOCK(info.st_mode) ? "a socket"
                                                  : "of no kind that can be written to");
    }
    if (path[0] == '\0' || path[strlen(path) - 1] == '/')
        return dcp__fail(DCP_ERR_SYS, "cannot create '%s': that names no file", path);
    DCP_TRY(follow_links(path, &w->target));
    DCP_TRY(copy_text(w->target, 32, &w->tmp_path));
    snprintf(w->tmp_path + strlen(w->tmp_path), 32, ".tmp.%ld", (long)getpid());
    w->fd = open_nameless(w->target);
    if (w->fd >= 0) return DCP_OK;
    /* One of that name is what an ended process of the same number left. */
    (void)unlink(w->tmp_path);
    w->fd = open(w->tmp_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0) return dcp__fail(DCP_ERR_SYS, "cannot create %s: %s", path, strerror(errno));
    w->has_name = true;
    return DCP_OK;
}

static dcp_status write_header(struct st_writer *w, const char *text, size_t n_bytes)
{
    unsigned char word[8];
    for (int i = 0; i < 8; i++) word[i] = (unsigned char)((uint64_t)n_bytes >> (8 * i) & 0xff);
    DCP_TRY(write_all(w, word, sizeof(word)));
    return write_all(w, text, n_bytes);
}

dcp_status st_writer_probe(const char *path)
{
    struct stat info;
    if (stat(path, &info) == 0 && (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode))) {
        /* An open has effects there: a reader would see an end. */
        if (access(path, W_OK) == 0) return DCP_OK;
        return dcp__fail(DCP_ERR_SYS, "cannot open %s: %s", path, strerror(errno));
    }
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct st_writer), "safetensors writer", &p));
    struct st_writer *const w = p;
    w->fd = -1;
    const dcp_status st = open_target(w, path);
    st_writer_abandon(w);
    return st;
}

dcp_status st_writer_create(const char *path, const struct st_decl *decls, int n_decls,
                            struct st_writer **out)
{
    if (path == NULL || out == NULL || n_decls < 0 || (n_decls > 0 && decls == NULL))
        return dcp__fail(DCP_ERR_ARG, "st_writer_create: path, declarations or out is missing");
    char *text = NULL;
    size_t text_bytes = 0, data_bytes = 0;
    DCP_TRY(st_json_format(decls, n_decls, &text, &text_bytes)); /* checks the sizes summed below */
    for (int i = 0; i < n_decls; i++) {
        size_t n_bytes = st_dtype_bytes(decls[i].dtype);
        for (int j = 0; j < decls[i].n_dims; j++) n_bytes *= (size_t)decls[i].dims[j];
        data_bytes += n_bytes;
    }
    void *p = NULL;
    dcp_status st = dcp__alloc(sizeof(struct st_writer), "safetensors writer", &p);
    if (st == DCP_OK) {
        struct st_writer *w = p;
        w->fd = -1;
        w->data_bytes = data_bytes;
        st = open_target(w, path);
        if (st == DCP_OK) st = write_header(w, text, text_bytes);
        if (st == DCP_OK)
            *out = w;
        else
            st_writer_abandon(w);
    }
    dcp__free(text);
    return st;
}

dcp_status st_writer_append(struct st_writer *w, const void *data, size_t n_bytes)
{
    if (n_bytes > w->data_bytes - w->written_bytes)
        return dcp__fail(DCP_ERR_ARG, "%s: %zu bytes appended after %zu of %zu declared", w->path,
                         n_bytes, w->written_bytes, w->data_bytes);
    DCP_TRY(write_all(w, data, n_bytes));
    w->written_bytes += n_bytes;
    return DCP_OK;
}

/* The whole file gets the target's name; an older file of that name goes. */
static dcp_status name_file(struct st_writer *w)
{
    char own[64];
    bool is_there = false;
    if (!w->has_name) {
        snprintf(own, sizeof(own), "/proc/self/fd/%d", w->fd);
        is_there = linkat(AT_FDCWD, own, AT_FDCWD, w->target, AT_SYMLINK_FOLLOW) == 0;
        if (!is_there && errno == EEXIST) { /* no link replaces, a rename does */
            (void)unlink(w->tmp_path);
            w->has_name = linkat(AT_FDCWD, own, AT_FDCWD, w->tmp_path, AT_SYMLINK_FOLLOW) == 0;
        }
        if (!is_there && !w->has_name)
            return dcp__fail(DCP_ERR_SYS, "cannot create %s: %s", w->path, strerror(errno));
    }
    const int fd = w->fd;
    w->fd = -1;
    if (close(fd) != 0) return dcp__fail(DCP_ERR_SYS, "closing %s: %s", w->path, strerror(errno));
    if (is_there) return DCP_OK;
    if (rename(w->tmp_path, w->target) != 0)
        return dcp__fail(DCP_ERR_SYS, "renaming %s to %s: %s", w->tmp_path, w->target,
                         strerror(errno));
    w->has_name = false;
    return DCP_OK;
}

dcp_status st_writer_finish(struct st_writer *w)
{
    dcp_status st = DCP_OK;
    if (w->written_bytes != w->data_bytes) {
        st = dcp__fail(DCP_ERR_ARG, "%s: %zu bytes written, %zu declared", w->path,
                       w->written_bytes, w->data_bytes);
    } else if (!w->is_direct) {
        st = name_file(w);
    } else {
        const int fd = w->fd;
        w->fd = -1;
        if (close(fd) != 0) st = dcp__fail(DCP_ERR_SYS, "closing %s: %s", w->path, strerror(errno));
    }
    st_writer_abandon(w);
    return st;
}

void st_writer_abandon(struct st_writer *w)
{
    if (w == NULL) return;
    if (w->fd >= 0) close(w->fd);
    if (w->has_name) unlink(w->tmp_path);
    dcp__free(w->tmp_path);
    dcp__free(w->target);
    dcp__free(w->path);
    dcp__free(w);
}
