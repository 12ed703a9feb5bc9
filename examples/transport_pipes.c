/* SPDX-License-Identifier: Apache-2.0 */
/* A transport of one's own: ranks are forked processes with a plain pipe for each direction between
 * each two of them. The library is given two operations, "write what fits" and "read what is
 * there", and a way to sleep; on top of that every merge works but `direct`.
 *
 *   cc transport_pipes.c $(pkg-config --cflags --libs dcpattn) -lm -o transport_pipes
 *   ./transport_pipes [ranks]        merges, compares with a plain computation, prints "ok"
 *
 * In a program with a network of its own the table looks the same: a socket in the place of a pipe,
 * or a message library behind a buffer. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pipe2 */
#endif
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dcpattn/dcpattn.h"

enum { MAX_RANKS = 16 };

/* --- the transport --- */

struct pipes {
    int n_ranks;
    int in[MAX_RANKS], out[MAX_RANKS]; /* of this rank: from each, to each; -1: none */
};

static dcp_status pipes_send(void *ctx, int peer, const void *buf, size_t n_bytes,
                             size_t *n_moved_out)
{
    const struct pipes *const p = ctx;
    const ssize_t n = write(p->out[peer], buf, n_bytes);
    *n_moved_out = n > 0 ? (size_t)n : 0;
    if (n >= 0 || errno == EAGAIN || errno == EINTR) return DCP_OK;
    return errno == EPIPE ? DCP_ERR_PEER : DCP_ERR_SYS;
}

static dcp_status pipes_recv(void *ctx, int peer, void *buf, size_t n_bytes, size_t *n_moved_out)
{
    const struct pipes *const p = ctx;
    const ssize_t n = read(p->in[peer], buf, n_bytes);
    *n_moved_out = n > 0 ? (size_t)n : 0;
    if (n == 0) return DCP_ERR_PEER; /* the other end is closed, and all is read */
    return n > 0 || errno == EAGAIN || errno == EINTR ? DCP_OK : DCP_ERR_SYS;
}

static void pipes_wait(void *ctx, const int *recv_from, int n_recv_from, const int *send_to,
                       int n_send_to, int timeout_ms)
{
    const struct pipes *const p = ctx;
    struct pollfd fds[2 * MAX_RANKS];
    int n = 0;
    for (int i = 0; i < n_recv_from; i++) {
        fds[n++] = (struct pollfd){.fd = p->in[recv_from[i]], .events = POLLIN};
    }
    for (int i = 0; i < n_send_to; i++) {
        fds[n++] = (struct pollfd){.fd = p->out[send_to[i]], .events = POLLOUT};
    }
    (void)poll(fds, (nfds_t)n, timeout_ms);
}

static void pipes_close(void *ctx)
{
    struct pipes *const p = ctx;
    for (int r = 0; r < p->n_ranks; r++) {
        if (p->in[r] >= 0) close(p->in[r]);
        if (p->out[r] >= 0) close(p->out[r]);
    }
}

/* Pipes between all ranks, made before fork. */
static int pipes_make(int n_ranks, int fds[MAX_RANKS][MAX_RANKS][2])
{
    for (int from = 0; from < n_ranks; from++) {
        for (int to = 0; to < n_ranks; to++) {
            if (from != to && pipe2(fds[from][to], O_NONBLOCK | O_CLOEXEC) != 0) return -1;
        }
    }
    return 0;
}

/* Keep this rank's ends; the others must be closed, or nobody would see the end of a pipe. rank -1
 * keeps none. */
static void pipes_keep(struct pipes *p, int rank, int n_ranks, int fds[MAX_RANKS][MAX_RANKS][2])
{
    p->n_ranks = n_ranks;
    for (int r = 0; r < n_ranks; r++) p->in[r] = p->out[r] = -1;
    for (int from = 0; from < n_ranks; from++) {
        for (int to = 0; to < n_ranks; to++) {
            if (from == to) continue;
            if (to == rank) {
                p->in[from] = fds[from][to][0];
            } else {
                close(fds[from][to][0]);
            }
            if (from == rank) {
                p->out[to] = fds[from][to][1];
            } else {
                close(fds[from][to][1]);
            }
        }
    }
}

static dcp_status pipes_group(struct pipes *p, int rank, const dcp_group_opts *opts,
                              dcp_group **group_out)
{
    dcp_transport t = DCP_TRANSPORT_INIT;
    t.ctx = p;
    t.send = pipes_send;
    t.recv = pipes_recv;
    t.wait = pipes_wait;
    t.close = pipes_close;
    return dcp_group_create_custom(&t, rank, p->n_ranks, opts, group_out);
}

/* --- a merge over it --- */

#ifndef TRANSPORT_PIPES_NO_MAIN

enum { TOKENS = 37, HEADS = 6, DIM = 64, LSES = TOKENS * HEADS };

/* Some partial of rank r: any numbers do, but its LSEs lie where a wrong weight shows. */
static void make_partial(int r, float *out, float *lse)
{
    for (int i = 0; i < LSES; i++) {
        lse[i] = (float)((i * 7 + r * 13) % 11) * 0.5f + 20.0f;
        for (int d = 0; d < DIM; d++) {
            out[(size_t)i * DIM + (size_t)d] = (float)((i + d * 3 + r * 5) % 17) - 8.0f;
        }
    }
}

/* The largest error of this rank's heads against sums in double. */
static double check(const float *merged, const dcp_range heads, int n_ranks)
{
    static float out[MAX_RANKS][LSES * DIM], lse[MAX_RANKS][LSES];
    double worst = 0;
    for (int r = 0; r < n_ranks; r++) make_partial(r, out[r], lse[r]);
    const int64_t n_heads = heads.end - heads.begin;
    for (int64_t t = 0; t < TOKENS; t++) {
        for (int64_t h = 0; h < n_heads; h++) {
            const size_t row = (size_t)(t * HEADS + heads.begin + h);
            double sum = 0;
            for (int r = 0; r < n_ranks; r++) sum += exp((double)lse[r][row]);
            for (size_t d = 0; d < DIM; d++) {
                double want = 0;
                for (int r = 0; r < n_ranks; r++) {
                    want += exp((double)lse[r][row]) / sum * (double)out[r][row * DIM + d];
                }
                const double got = (double)merged[(size_t)(t * n_heads + h) * DIM + d];
                if (fabs(got - want) > worst) worst = fabs(got - want);
            }
        }
    }
    return worst;
}

static int fail(int rank, const char *what)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, dcp_last_error());
    return 1;
}

static int run_rank(struct pipes *p, int rank)
{
    static float out[LSES * DIM], lse[LSES], merged[LSES * DIM];
    dcp_group *g = NULL;
    dcp_merge *m = NULL;
    if (pipes_group(p, rank, NULL, &g) != DCP_OK) return fail(rank, "group");
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = TOKENS;
    desc.n_heads = HEADS;
    desc.dim = DIM;
    desc.lse_base = DCP_LSE_BASE_E;
    if (dcp_merge_create(g, &desc, &m) != DCP_OK) return fail(rank, "merge create");
    make_partial(rank, out, lse);
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = TOKENS;
    args.out = out;
    args.lse = lse;
    args.merged = merged;
    if (dcp_merge_run(m, &args, NULL) != DCP_OK) return fail(rank, "merge");
    const double error = check(merged, dcp_cut_range(HEADS, p->n_ranks, rank), p->n_ranks);
    dcp_merge_destroy(m);
    dcp_group_destroy(g);
    if (error < 1e-5) return 0;
    fprintf(stderr, "rank %d: error %g\n", rank, error);
    return 1;
}

int main(int argc, char **argv)
{
    static int fds[MAX_RANKS][MAX_RANKS][2];
    const int n_ranks = argc > 1 ? atoi(argv[1]) : 3;
    if (n_ranks < 1 || n_ranks > MAX_RANKS || pipes_make(n_ranks, fds) != 0) {
        fprintf(stderr, "usage: transport_pipes [ranks, 1 to %d]\n", MAX_RANKS);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write, not the end of the process */
    for (int rank = 0; rank < n_ranks; rank++) {
        if (fork() != 0) continue;
        struct pipes p;
        pipes_keep(&p, rank, n_ranks, fds);
        _exit(run_rank(&p, rank));
    }
    struct pipes none;
    pipes_keep(&none, -1, n_ranks, fds);
    int bad = 0, status;
    while (wait(&status) > 0) bad |= status;
    if (bad == 0) printf("ok: %d ranks merged over pipes\n", n_ranks);
    return bad != 0;
}

#endif
