/* SPDX-License-Identifier: Apache-2.0 */
/* What every group must do, whatever carries it: one suite for self, threads, shm and MPI. Each
 * rank runs contract_run; it prints what failed and returns how much did. */
#ifndef DCP_TESTS_GROUP_CONTRACT_H
#define DCP_TESTS_GROUP_CONTRACT_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc_priv.h"
#include "dcpattn/group.h"
#include "group/group_priv.h"

#define CONTRACT_TRUE(cond)                                                                        \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            n_failed++;                                                                            \
            fprintf(stderr, "%s:%d: rank %d of %d (%s): not true: %s [%s]\n", __FILE__, __LINE__,  \
                    dcp_group_rank(g), dcp_group_size(g), dcp_group_kind(g), #cond,                \
                    dcp_last_error());                                                             \
        }                                                                                          \
    } while (0)
#define CONTRACT_OK(call) CONTRACT_TRUE((call) == DCP_OK)

/* A byte that depends on who, what and where. */
static inline unsigned char contract_byte(int rank, int salt, size_t i)
{
    uint64_t x = (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)salt * 0xbf58476d1ce4e5b9u + i;
    x ^= x >> 29;
    x *= 0x94d049bb133111ebu;
    return (unsigned char)(x >> 56);
}

static inline void contract_fill(unsigned char *p, size_t n, int rank, int salt)
{
    for (size_t i = 0; i < n; i++) p[i] = contract_byte(rank, salt, i);
}

static inline int contract_holds(const unsigned char *p, size_t n, int rank, int salt)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != contract_byte(rank, salt, i)) return 0;
    }
    return 1;
}

static inline int contract_records(dcp_group *g)
{
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    unsigned char *recv = malloc((size_t)n * DCP__RECORD_MAX);
    for (int k = 0; k < 200; k++) {
        const size_t n_bytes = (size_t)(k * 37) % (DCP__RECORD_MAX + 1);
        unsigned char send[DCP__RECORD_MAX];
        contract_fill(send, n_bytes, rank, k);
        CONTRACT_OK(dcp__group_record(g, send, n_bytes, recv));
        for (int r = 0; r < n; r++) {
            CONTRACT_TRUE(contract_holds(recv + (size_t)r * n_bytes, n_bytes, r, k));
        }
    }
    CONTRACT_TRUE(dcp__group_record(g, recv, DCP__RECORD_MAX + 1, recv) == DCP_ERR_ARG);
    /* Ranks that disagree all learn of it, and the group goes on. */
    if (n > 1) {
        unsigned char send[16] = {0};
        CONTRACT_TRUE(dcp__group_record(g, send, rank == n - 1 ? 16 : 8, recv) == DCP_ERR_MISMATCH);
    }
    CONTRACT_OK(dcp_group_barrier(g));
    free(recv);
    return n_failed;
}

static inline int contract_allgather(dcp_group *g)
{
    static const size_t sizes[] = {0, 1, 8, 247, 248, 249, 256, 4096, 100003, 1500000};
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        const size_t n_bytes = sizes[k];
        unsigned char *send = malloc(n_bytes + 1), *recv = malloc((size_t)n * n_bytes + 1);
        contract_fill(send, n_bytes, rank, (int)k);
        CONTRACT_OK(dcp_group_allgather(g, send, n_bytes, recv));
        for (int r = 0; r < n; r++) {
            CONTRACT_TRUE(contract_holds(recv + (size_t)r * n_bytes, n_bytes, r, (int)k));
        }
        free(send);
        free(recv);
    }
    if (n > 1) {
        static const size_t pairs[][2] = {{8, 300}, {0, 1}, {300, 400}, {248, 100000}};
        for (size_t k = 0; k < sizeof(pairs) / sizeof(pairs[0]); k++) {
            unsigned char *send = calloc(1, 100000), *recv = calloc((size_t)n, 100000);
            CONTRACT_TRUE(dcp_group_allgather(g, send, pairs[k][rank == 0], recv) ==
                          DCP_ERR_MISMATCH);
            free(send);
            free(recv);
        }
    }
    unsigned char both[64] = {0};
    CONTRACT_TRUE(dcp_group_allgather(g, both, 4, both) == DCP_ERR_ARG);
    return n_failed;
}

/* One gather_cols into buf; widths[r] bytes of each row belong to rank r. */
static inline int contract_gather_one(dcp_group *g, unsigned char *buf, size_t n_rows,
                                      size_t stride, const size_t *off, int salt)
{
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    memset(buf, 0xee, n_rows * stride);
    for (size_t row = 0; row < n_rows; row++) {
        contract_fill(buf + row * stride + off[rank], off[rank + 1] - off[rank], rank,
                      salt + (int)row);
    }
    CONTRACT_OK(dcp_group_gather_cols(g, buf, n_rows, stride, off));
    int wrong = 0;
    for (size_t row = 0; row < n_rows; row++) {
        for (int r = 0; r < n; r++) {
            if (!contract_holds(buf + row * stride + off[r], off[r + 1] - off[r], r,
                                salt + (int)row)) {
                wrong++;
            }
        }
        for (size_t i = off[n]; i < stride; i++) wrong += buf[row * stride + i] != 0xee;
        for (size_t i = 0; i < off[0]; i++) wrong += buf[row * stride + i] != 0xee;
    }
    CONTRACT_TRUE(wrong == 0);
    return n_failed;
}

static inline int contract_gather(dcp_group *g)
{
    int n_failed = 0;
    const int n = dcp_group_size(g);
    size_t *off = calloc((size_t)n + 1, sizeof(size_t));
    static const struct {
        size_t n_rows, unit, pad, begin;
        int ragged;
    } cases[] = {
        {1, 64, 0, 0, 0}, {3, 100, 7, 5, 1},     {17, 1, 3, 0, 1},     {1, 0, 8, 0, 0},
        {0, 16, 0, 0, 0}, {500, 2048, 64, 0, 1}, {1, 900000, 0, 0, 1}, {4000, 33, 1, 2, 1},
    };
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        off[0] = cases[k].begin;
        for (int r = 0; r < n; r++) {
            /* ragged: every third rank owns nothing, others more than the first */
            const size_t w = !cases[k].ragged ? cases[k].unit
                             : r % 3 == 1     ? 0
                                              : cases[k].unit * (size_t)(1 + r % 2) + (size_t)r;
            off[r + 1] = off[r] + w;
        }
        const size_t stride = off[n] + cases[k].pad;
        const size_t n_bytes = cases[k].n_rows * stride;
        unsigned char *priv = malloc(n_bytes + 1);
        n_failed += contract_gather_one(g, priv, cases[k].n_rows, stride, off, 3);
        void *shared = NULL;
        CONTRACT_OK(dcp_group_alloc(g, n_bytes, &shared));
        n_failed += contract_gather_one(g, shared, cases[k].n_rows, stride, off, 4);
        /* mixed: a rank with private memory makes all go the other way */
        n_failed += contract_gather_one(g, dcp_group_rank(g) == n - 1 ? priv : shared,
                                        cases[k].n_rows, stride, off, 5);
        dcp_group_free(g, shared);
        free(priv);
    }
    if (n > 1) {
        unsigned char buf[256];
        for (int r = 0; r <= n; r++) off[r] = (size_t)r;
        CONTRACT_TRUE(dcp_group_gather_cols(g, buf, dcp_group_rank(g) == 0 ? 2 : 3, 64, off) ==
                      DCP_ERR_MISMATCH);
    }
    free(off);
    return n_failed;
}

static inline int contract_exchange(dcp_group *g)
{
    static const size_t sizes[DCP__EXCHANGE_SLOTS][3] = {
        {0, 1, 7}, {3000000, 0, 65536}, {8, 4096, 0}, {100000, 999999, 33}};
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    struct dcp__xfer *sends = calloc((size_t)n * DCP__EXCHANGE_SLOTS, sizeof(*sends));
    struct dcp__xfer *recvs = calloc((size_t)n * DCP__EXCHANGE_SLOTS, sizeof(*recvs));
    for (int round = 0; round < 3; round++) {
        for (int slot = 0; slot < DCP__EXCHANGE_SLOTS; slot++) {
            struct dcp__xfer *s = sends + slot * n, *v = recvs + slot * n;
            int n_x = 0;
            for (int i = 1; i < n; i++) {
                const int to = (rank + i) % n, from = (rank - i + n) % n;
                const size_t to_bytes = sizes[slot][(rank + to + round) % 3];
                const size_t from_bytes = sizes[slot][(rank + from + round) % 3];
                s[n_x] = (struct dcp__xfer){
                    .peer = to, .buf = malloc(to_bytes + 1), .n_bytes = to_bytes};
                contract_fill(s[n_x].buf, to_bytes, rank * 64 + to, slot);
                v[n_x] = (struct dcp__xfer){
                    .peer = from, .buf = malloc(from_bytes + 1), .n_bytes = from_bytes};
                n_x++;
            }
            CONTRACT_OK(dcp__group_exchange_start(g, (unsigned)slot, s, n_x, v, n_x));
        }
        /* The last opened is waited for first; one is polled; a record passes between. */
        CONTRACT_OK(dcp__group_exchange_wait(g, 3));
        CONTRACT_OK(dcp_group_barrier(g));
        bool done = false;
        for (long tries = 0; !done && tries < 100000000; tries++) {
            if (dcp__group_exchange_test(g, 1, &done) != DCP_OK) break;
        }
        CONTRACT_TRUE(done);
        CONTRACT_OK(dcp__group_exchange_wait(g, 0));
        CONTRACT_OK(dcp__group_exchange_wait(g, 2));
        for (int slot = 0; slot < DCP__EXCHANGE_SLOTS; slot++) {
            for (int i = 0; i < n - 1; i++) {
                const struct dcp__xfer *v = &recvs[slot * n + i];
                CONTRACT_TRUE(contract_holds(v->buf, v->n_bytes, v->peer * 64 + rank, slot));
                free(v->buf);
                free(sends[slot * n + i].buf);
            }
        }
    }
    struct dcp__xfer self = {.peer = rank, .buf = &n_failed, .n_bytes = 1};
    CONTRACT_TRUE(dcp__group_exchange_start(g, 0, &self, 1, NULL, 0) == DCP_ERR_ARG);
    CONTRACT_TRUE(dcp__group_exchange_start(g, 7, NULL, 0, NULL, 0) == DCP_ERR_ARG);
    free(sends);
    free(recvs);
    return n_failed;
}

/* Messages of pieces, most of them with a tail before or behind: of more shapes than a transport
 * may keep, neighbours that differ in stride alone or in the tail's place alone, each used twice in
 * a row, the second time some bytes further on, up to the last byte. */
static inline int contract_pieces(dcp_group *g)
{
    enum { STRIDE = 9000, ROWS = 7, PIECE_STEP = 350, SHAPES = 72, TAIL = 4096 };
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    if (n < 2) return 0;
    const int to = (rank + 1) % n, from = (rank + n - 1) % n;
    char *room = malloc(STRIDE * ROWS + 2 * TAIL), *got = malloc(STRIDE * ROWS + TAIL);
    for (int i = 0; i < STRIDE * ROWS + 2 * TAIL; i++) room[i] = (char)(i % 251 + rank);
    for (int k = 0; k < 2 * SHAPES; k++) {
        const int base = k / 6, variant = k / 2 % 3, shift = k % 2 * 8;
        const size_t piece = (size_t)(1 + base * PIECE_STEP);
        const size_t tail = (size_t)(base % 3 * 1000), n_bytes = piece * ROWS + tail;
        const size_t stride = variant == 1 ? STRIDE - 8 : STRIDE;
        const char *const buf = room + TAIL + shift;
        const char *const tail_from =
            (variant == 2 ? room + TAIL + STRIDE * ROWS : room + base) + shift;
        struct dcp__xfer s = {.peer = to,
                              .buf = (void *)(uintptr_t)buf,
                              .n_bytes = n_bytes,
                              .piece_bytes = piece,
                              .stride_bytes = stride,
                              .tail_bytes = tail,
                              .tail = tail_from};
        struct dcp__xfer v = {.peer = from, .buf = got, .n_bytes = n_bytes};
        if (!dcp__group_sends_pieces(g)) {
            CONTRACT_TRUE(dcp__group_exchange_start(g, 0, &s, 1, &v, 1) == DCP_ERR_ARG);
            continue;
        }
        CONTRACT_OK(dcp__group_exchange_start(g, 0, &s, 1, &v, 1));
        CONTRACT_OK(dcp__group_exchange_wait(g, 0));
        int n_wrong = 0;
        for (size_t i = 0; i < n_bytes; i++) {
            const size_t at = i < piece * ROWS
                                  ? (size_t)(buf - room) + i / piece * stride + i % piece
                                  : (size_t)(tail_from - room) + i - piece * ROWS;
            n_wrong += got[i] != (char)((int)(at % 251) + from);
        }
        CONTRACT_TRUE(n_wrong == 0);
        s.n_bytes--;
        CONTRACT_TRUE(piece == 1 || dcp__group_exchange_start(g, 0, &s, 1, NULL, 0) == DCP_ERR_ARG);
        CONTRACT_TRUE(dcp__group_exchange_start(g, 0, NULL, 0, &s, 1) == DCP_ERR_ARG);
        s.n_bytes++;
        s.tail = NULL;
        CONTRACT_TRUE(tail == 0 || dcp__group_exchange_start(g, 0, &s, 1, NULL, 0) == DCP_ERR_ARG);
        s.tail = room;
        s.tail_bytes = n_bytes + 1;
        CONTRACT_TRUE(dcp__group_exchange_start(g, 0, &s, 1, NULL, 0) == DCP_ERR_ARG);
        s.piece_bytes = 0;
        s.tail_bytes = 1;
        CONTRACT_TRUE(dcp__group_exchange_start(g, 0, &s, 1, NULL, 0) == DCP_ERR_ARG);
    }
    free(got);
    free(room);
    return n_failed;
}

static inline int contract_alloc(dcp_group *g)
{
    enum { N_LIVE = 5 };
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    const size_t before = dcp__alloc_current();
    unsigned char *ptrs[N_LIVE];
    size_t own[N_LIVE];
    for (int k = 0; k < N_LIVE; k++) {
        void *ptr = NULL;
        own[k] = k == 4 ? (size_t)5 << 20 : (size_t)((rank + k) % 3) * 5000u;
        CONTRACT_OK(dcp_group_alloc(g, own[k], &ptr));
        CONTRACT_TRUE(ptr != NULL && (uintptr_t)ptr % 64 == 0);
        ptrs[k] = ptr;
        int nonzero = 0;
        for (size_t i = 0; i < own[k]; i++) nonzero += ptrs[k][i] != 0;
        CONTRACT_TRUE(nonzero == 0);
        contract_fill(ptrs[k], own[k], rank, 100 + k);
    }
    CONTRACT_OK(dcp_group_barrier(g));
    for (int k = 0; k < N_LIVE; k++) {
        struct where {
            uint64_t offset, n_bytes;
            uint32_t id, found;
        } mine = {0, own[k], 0, 0}, *all = calloc((size_t)n, sizeof(*all));
        mine.found = dcp__group_locate(g, ptrs[k], own[k], &mine.id, &mine.offset) ? 1 : 0;
        CONTRACT_OK(dcp__group_record(g, &mine, sizeof(mine), all));
        for (int r = 0; r < n; r++) {
            if (!dcp__group_sees(g, r)) continue;
            CONTRACT_TRUE(all[r].found == 1);
            const unsigned char *theirs =
                dcp__group_peer_ptr(g, r, all[r].id, all[r].offset, all[r].n_bytes);
            CONTRACT_TRUE(theirs != NULL);
            if (theirs != NULL) {
                CONTRACT_TRUE(contract_holds(theirs, all[r].n_bytes, r, 100 + k));
            }
        }
        free(all);
        CONTRACT_OK(dcp_group_barrier(g));
    }
    uint32_t id;
    uint64_t offset;
    if (strcmp(dcp_group_kind(g), "shm") == 0) {
        CONTRACT_TRUE(!dcp__group_locate(g, &n_failed, 1, &id, &offset));
        CONTRACT_TRUE(!dcp__group_locate(g, ptrs[4], own[4] + 1, &id, &offset));
        CONTRACT_TRUE(dcp__group_peer_ptr(g, 0, 77, 0, 1) == NULL);
        CONTRACT_TRUE(dcp__group_peer_ptr(g, n, 1, 0, 1) == NULL);
    }
    /* not in the order of taking */
    dcp_group_free(g, ptrs[2]);
    void *again = NULL;
    CONTRACT_OK(dcp_group_alloc(g, 10000, &again));
    int nonzero = 0;
    for (size_t i = 0; i < 10000; i++) nonzero += ((unsigned char *)again)[i] != 0;
    CONTRACT_TRUE(nonzero == 0);
    CONTRACT_TRUE(contract_holds(ptrs[3], own[3], rank, 103));
    dcp_group_free(g, again);
    dcp_group_free(g, ptrs[0]);
    dcp_group_free(g, ptrs[4]);
    dcp_group_free(g, ptrs[1]);
    dcp_group_free(g, ptrs[3]);
    dcp_group_free(g, NULL);
    CONTRACT_OK(dcp_group_barrier(g));
    if (strcmp(dcp_group_kind(g), "threads") != 0) {
        CONTRACT_TRUE(dcp__alloc_current() == before);
    }
    return n_failed;
}

static inline int contract_allreduce(dcp_group *g)
{
    static const size_t sizes[] = {0, 1, 5, 1000, 70001, 600000};
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        float *buf = malloc((sizes[k] + 1) * sizeof(float));
        /* whole numbers: every order of summing gives the same bits */
        for (size_t i = 0; i < sizes[k]; i++) buf[i] = (float)((rank + 1) * (int)(i % 1000));
        CONTRACT_OK(dcp__group_allreduce_f32(g, buf, sizes[k]));
        size_t wrong = 0;
        for (size_t i = 0; i < sizes[k]; i++) {
            wrong += buf[i] != (float)(n * (n + 1) / 2 * (int)(i % 1000));
        }
        CONTRACT_TRUE(wrong == 0);
        free(buf);
    }
    return n_failed;
}

/* What one rank refuses every rank refuses, at once and in words that name it; the group goes
 * on. */
static inline int contract_refusals(dcp_group *g)
{
    enum { SMALL = 16, LARGE = 5000 };
    int n_failed = 0;
    const int n = dcp_group_size(g), rank = dcp_group_rank(g), last = n - 1;
    const int is_bad = rank == last;
    unsigned char *all = calloc((size_t)n + 1, LARGE);
    size_t *off = calloc((size_t)n + 1, sizeof(size_t));
    unsigned char send[LARGE] = {0};
    char who[32];
    snprintf(who, sizeof(who), "rank %d", last);
    for (int r = 0; r <= n; r++) off[r] = (size_t)r * SMALL;
#define CONTRACT_REFUSED(call)                                                                     \
    CONTRACT_TRUE((call) == DCP_ERR_ARG && (is_bad || strstr(dcp_last_error(), who) != NULL))
    CONTRACT_REFUSED(dcp_group_allgather(g, is_bad ? NULL : send, SMALL, all));
    CONTRACT_REFUSED(dcp_group_allgather(g, is_bad ? all : send, SMALL, all));
    CONTRACT_REFUSED(dcp_group_allgather(g, send, LARGE, is_bad ? NULL : all));
    CONTRACT_TRUE(is_bad || strstr(dcp_last_error(), "a buffer is NULL") != NULL);
    CONTRACT_REFUSED(dcp_group_gather_cols(g, all, 3, off[n], is_bad ? NULL : off));
    CONTRACT_REFUSED(dcp_group_gather_cols(g, is_bad ? NULL : all, 3, off[n], off));
    CONTRACT_REFUSED(dcp_group_gather_cols(g, all, 3, is_bad ? off[n] - 1 : off[n], off));
    if (is_bad) off[0] = off[1] + 1;
    CONTRACT_REFUSED(dcp_group_gather_cols_unfenced(g, all, 3, off[n], off));
    off[0] = 0;
    void *ptr = NULL;
    dcp_group *sub = NULL;
    CONTRACT_REFUSED(dcp_group_alloc(g, 100, is_bad ? NULL : &ptr));
    CONTRACT_REFUSED(dcp_group_split(g, 0, 0, is_bad ? NULL : &sub));
#undef CONTRACT_REFUSED
    CONTRACT_TRUE(ptr == NULL && sub == NULL);
    CONTRACT_OK(dcp_group_allgather(g, send, LARGE, all));
    CONTRACT_OK(dcp_group_gather_cols(g, all, 3, off[n], off));
    CONTRACT_OK(dcp_group_barrier(g));
    free(off);
    free(all);
    return n_failed;
}

/* None of the calls that run per token allocates. */
static inline int contract_no_alloc(dcp_group *g)
{
    int n_failed = 0;
    const int n = dcp_group_size(g);
    unsigned char *buf = calloc(1, 300000 * (size_t)n);
    size_t *off = calloc((size_t)n + 1, sizeof(size_t));
    for (int r = 0; r <= n; r++) off[r] = (size_t)r * 300000;
    float sums[100] = {0};
    char record[8] = {0};
    CONTRACT_OK(dcp_group_barrier(g));
    const size_t calls = dcp__alloc_calls();
    CONTRACT_OK(dcp_group_gather_cols(g, buf, 1, off[n], off));
    CONTRACT_OK(dcp__group_record(g, record, sizeof(record), buf));
    CONTRACT_OK(dcp__group_allreduce_f32(g, sums, 100));
    CONTRACT_OK(dcp__group_exchange_start(g, 0, NULL, 0, NULL, 0));
    CONTRACT_OK(dcp__group_exchange_wait(g, 0));
    CONTRACT_TRUE(dcp__alloc_calls() == calls);
    CONTRACT_OK(dcp_group_barrier(g));
    free(off);
    free(buf);
    return n_failed;
}

/* Hosts are numbered by their first ranks, alike on all, and say who sees whom. */
static inline int contract_hosts(dcp_group *g)
{
    int n_failed = 0;
    const int n = dcp_group_size(g);
    int next = 0;
    for (int r = 0; r < n; r++) {
        const int host = dcp_group_host(g, r);
        CONTRACT_TRUE(host >= 0 && host <= next);
        if (host == next) next++;
        CONTRACT_TRUE(dcp__group_sees(g, r) == (host == dcp_group_host(g, dcp_group_rank(g))));
        int *all = calloc((size_t)n, sizeof(*all));
        CONTRACT_OK(dcp__group_record(g, &host, sizeof(host), all));
        for (int q = 0; q < n; q++) CONTRACT_TRUE(all[q] == host);
        free(all);
    }
    CONTRACT_TRUE(dcp_group_n_hosts(g) == next);
    CONTRACT_TRUE(dcp__group_all_see(g) == (next == 1));
    CONTRACT_TRUE(dcp_group_host(g, -1) == -1 && dcp_group_host(g, n) == -1);
    return n_failed;
}

/* All but the count of allocations, which are the whole process's: for groups beside others. */
static inline int contract_run_beside(dcp_group *g)
{
    int n_failed = contract_hosts(g);
    n_failed += contract_records(g);
    n_failed += contract_allgather(g);
    n_failed += contract_gather(g);
    n_failed += contract_exchange(g);
    n_failed += contract_pieces(g);
    n_failed += contract_alloc(g);
    n_failed += contract_allreduce(g);
    n_failed += contract_refusals(g);
    return n_failed;
}

static inline int contract_run(dcp_group *g)
{
    return contract_run_beside(g) + contract_no_alloc(g);
}

#endif
