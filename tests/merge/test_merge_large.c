/* SPDX-License-Identifier: Apache-2.0 */
/* Large messages (merge_large.h) on threads, shared memory and simulated hosts; and from where a
 * transport gets them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>

#include <cmocka.h>

#include "merge/merge_large.h"
#include "merge/merge_ranks.h"

static void test_bits(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++) {
        assert_int_equal(ranks_threads(n, 30, large_check, NULL), 0);
        assert_int_equal(ranks_shm(n, 30, large_check, NULL), 0);
    }
    ranks_per_host = 2;
    assert_int_equal(ranks_threads(3, 30, large_check, NULL), 0);
    ranks_per_host = 0;
}

/* A transport between two threads that says how much it was given out of one buffer. */
enum { STREAM_BYTES = 1 << 15 };
struct stream {
    char data[STREAM_BYTES];
    _Atomic size_t head, tail; /* ever read, ever written */
};
struct wire {
    struct stream *to, *from;
    const char *own; /* [own_bytes] */
    size_t own_bytes, n_in_place;
};

static dcp_status wire_send(void *ctx, int peer, const void *buf, size_t n, size_t *moved)
{
    (void)peer;
    struct wire *w = ctx;
    const size_t tail = w->to->tail, room = STREAM_BYTES - (tail - w->to->head);
    *moved = n < room ? n : room;
    for (size_t i = 0; i < *moved; i++)
        w->to->data[(tail + i) % STREAM_BYTES] = ((const char *)buf)[i];
    w->to->tail = tail + *moved;
    const char *at = buf;
    if (at >= w->own && at < w->own + w->own_bytes) w->n_in_place += *moved;
    return DCP_OK;
}

static dcp_status wire_recv(void *ctx, int peer, void *buf, size_t n, size_t *moved)
{
    (void)peer;
    struct wire *w = ctx;
    const size_t head = w->from->head, filled = w->from->tail - head;
    *moved = n < filled ? n : filled;
    for (size_t i = 0; i < *moved; i++) ((char *)buf)[i] = w->from->data[(head + i) % STREAM_BYTES];
    w->from->head = head + *moved;
    return DCP_OK;
}

struct wire_rank {
    pthread_t id;
    int rank;
    struct wire wire;
    int n_failed;
};

/* Tokens that are messages by themselves are sent from the caller's memory, those with an empty row
 * (two of three, for either peer) packed; several tokens of a message are pieces, which this
 * transport cannot gather. */
static void *wire_main(void *arg)
{
    static const struct {
        struct large_shape shape;
        bool has_empty;
        int n_tokens; /* sent in place */
    } cases[] = {{{3, 8192}, false, 3}, {{3, 8192}, true, 1}, {{LARGE_T_MAX, 1024}, false, 0}};
    struct wire_rank *r = arg;
    dcp_transport t = DCP_TRANSPORT_INIT;
    t.ctx = &r->wire;
    t.send = wire_send;
    t.recv = wire_recv;
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 30;
    dcp_group *g = NULL;
    r->n_failed = dcp_group_create_custom(&t, r->rank, 2, &opts, &g) != DCP_OK;
    for (int i = 0; i < 3 && r->n_failed == 0; i++) {
        const struct large_shape *s = &cases[i].shape;
        float lse[LARGE_T_MAX * LARGE_H], merged_lse[LARGE_T_MAX * LARGE_H];
        const size_t row_bytes = (size_t)s->dim * sizeof(float);
        const size_t n_bytes = (size_t)s->t * LARGE_H * row_bytes;
        float *out = malloc(n_bytes), *merged = malloc(n_bytes);
        if (out == NULL || merged == NULL) abort();
        large_fill(s, r->rank, s->dim, cases[i].has_empty, out, lse);
        r->wire.own = (const char *)out;
        r->wire.own_bytes = n_bytes;
        r->wire.n_in_place = 0;
        r->n_failed = large_run(s, g, DCP_MERGE_ALLTOALL, DCP_CUT_HEADS, out, s->dim, lse, merged,
                                merged_lse);
        const size_t want = (size_t)cases[i].n_tokens * LARGE_H / 2 * row_bytes;
        if (r->n_failed == 0 && r->wire.n_in_place != want) {
            printf("rank %d, case %d: %zu bytes sent in place, wanted %zu\n", r->rank, i,
                   r->wire.n_in_place, want);
            r->n_failed = 1;
        }
        free(merged);
        free(out);
    }
    dcp_group_destroy(g);
    return NULL;
}

static void test_in_place(void **state)
{
    (void)state;
    static struct stream streams[2];
    struct wire_rank ranks[2];
    memset(ranks, 0, sizeof(ranks));
    for (int r = 0; r < 2; r++) {
        ranks[r].rank = r;
        ranks[r].wire.to = &streams[r];
        ranks[r].wire.from = &streams[1 - r];
        assert_int_equal(pthread_create(&ranks[r].id, NULL, wire_main, &ranks[r]), 0);
    }
    for (int r = 0; r < 2; r++) (void)pthread_join(ranks[r].id, NULL);
    assert_int_equal(ranks[0].n_failed + ranks[1].n_failed, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits),
                                       cmocka_unit_test(test_in_place)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
