/* SPDX-License-Identifier: Apache-2.0 */
/* Writer of safetensors files: into PATH.tmp.PID beside the target, renamed when whole, so that a
 * reader never sees half a file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/status_priv.h"
#include "engine/safetensors.h"
#include "engine/safetensors_json.h"

struct st_writer {
    int fd;
    char *path, *tmp_path;
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
            return dcp__fail(DCP_ERR_SYS, "writing %s: %s", w->tmp_path,
                             put < 0 ? strerror(errno) : "nothing was taken");
        from += put;
        n_bytes -= (size_t)put;
    }
    return DCP_OK;
}

/* Both names and the open temporary file. */
static dcp_status open_tmp(struct st_writer *w, const char *path)
{
    const size_t path_bytes = strlen(path) + 1, tmp_bytes = path_bytes + 32;
    void *p = NULL;
    DCP_TRY(dcp__alloc(path_bytes, "output path", &p));
    w->path = p;
    memcpy(w->path, path, path_bytes);
    DCP_TRY(dcp__alloc(tmp_bytes, "output path", &p));
    w->tmp_path = p;
    snprintf(w->tmp_path, tmp_bytes, "%s.tmp.%ld", path, (long)getpid());
    w->fd = open(w->tmp_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return dcp__fail(DCP_ERR_SYS, "cannot create %s: %s", w->tmp_path, strerror(errno));
    return DCP_OK;
}

static dcp_status write_header(struct st_writer *w, const char *text, size_t n_bytes)
{
    unsigned char word[8];
    for (int i = 0; i < 8; i++) word[i] = (unsigned char)((uint64_t)n_bytes >> (8 * i) & 0xff);
    DCP_TRY(write_all(w, word, sizeof(word)));
    return write_all(w, text, n_bytes);
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
        st = open_tmp(w, path);
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

dcp_status st_writer_finish(struct st_writer *w)
{
    dcp_status st = DCP_OK;
    if (w->written_bytes != w->data_bytes)
        st = dcp__fail(DCP_ERR_ARG, "%s: %zu bytes written, %zu declared", w->path,
                       w->written_bytes, w->data_bytes);
    if (st == DCP_OK) {
        const int fd = w->fd;
        w->fd = -1;
        if (close(fd) != 0)
            st = dcp__fail(DCP_ERR_SYS, "closing %s: %s", w->tmp_path, strerror(errno));
        else if (rename(w->tmp_path, w->path) != 0)
            st = dcp__fail(DCP_ERR_SYS, "renaming %s to %s: %s", w->tmp_path, w->path,
                           strerror(errno));
        if (st != DCP_OK) unlink(w->tmp_path);
        dcp__free(w->tmp_path);
        w->tmp_path = NULL;
    }
    st_writer_abandon(w);
    return st;
}

void st_writer_abandon(struct st_writer *w)
{
    if (w == NULL) return;
    if (w->fd >= 0) {
        close(w->fd);
        unlink(w->tmp_path);
    }
    dcp__free(w->tmp_path);
    dcp__free(w->path);
    dcp__free(w);
}
