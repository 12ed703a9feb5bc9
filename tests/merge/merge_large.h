/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens whose rows for a peer make a large message, alone or a few together: alltoall sends these
 * from where the caller has them (of several tokens as a message made of pieces), or packs them
 * where it may not (empty rows, gaps between rows, memory that a transport would keep). Each way
 * gives the bits of the other, and as many messages as create has said. */
#ifndef TEST_MERGE_LARGE_H
#define TEST_MERGE_LARGE_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dcpattn/merge.h"

enum { LARGE_H = 6, LARGE_GAP = 16, LARGE_T_MAX = 24 };

struct large_shape {
    int64_t t, dim;
};

static inline void large_fill(const struct large_shape *s, int rank, int64_t head_stride,
                              bool has_empty, float *out, float *lse)
{
    for (int t = 0; t < s->t; t++) {
        for (int h = 0; h < LARGE_H; h++) {
            const bool is_empty = has_empty && (t + h + rank) % 4 == 0;
            float *row = out + (t * LARGE_H + h) * head_stride;
            lse[t * LARGE_H + h] = is_empty ? -INFINITY : (float)((t * 5 + h * 3 + rank * 7) % 11);
            for (int d = 0; d < s->dim; d++)
                row[d] =
                    is_empty ? NAN : (float)((t * 131 + h * 17 + rank * 29 + d * 7) % 255) / 64;
        }
    }
}

/* One merge of this rank's partial at out; returns failures, printed. */
static inline int large_run(const struct large_shape *s, dcp_group *g, dcp_merge_algo algo,
                            dcp_cut cut, const float *out, int64_t head_stride, const float *lse,
                            float *merged, float *merged_lse)
{
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = s->t;
    desc.n_heads = LARGE_H;
    desc.dim = s->dim;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.cut = cut;
    desc.algo = algo;
    dcp_merge *m = NULL;
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = s->t;
    args.out = out;
    args.out_token_stride = LARGE_H * head_stride;
    args.out_head_stride = head_stride;
    args.lse = lse;
    args.merged = merged;
    args.merged_lse = merged_lse;
    dcp_merge_stats stats;
    dcp_merge_cost cost;
    dcp_status st = dcp_merge_create(g, &desc, &m);
    if (st == DCP_OK) dcp_merge_get_cost(m, s->t, &cost);
    if (st == DCP_OK) st = dcp_merge_run(m, &args, &stats);
    dcp_merge_destroy(m);
    const int rank = dcp_group_rank(g), n = dcp_group_size(g);
    /* The two ways of a token's or some tokens' rows, said here once more and not by the plan. */
    const int64_t a_step = s->dim * (LARGE_H / 2) * (int64_t)sizeof(float) >= 48 << 10 ? 2 : 1;
    if (st == DCP_OK && algo == DCP_MERGE_ALLTOALL && cut == DCP_CUT_HEADS && n == 2 &&
        stats.n_messages != cost.n_steps * a_step) {
        printf("rank %d: %lld messages in %lld steps, wanted %lld a step\n", rank,
               (long long)stats.n_messages, (long long)cost.n_steps, (long long)a_step);
        return 1;
    }
    if (st != DCP_OK) {
        printf("rank %d: %s\n", rank, dcp_last_error());
        return 1;
    }
    if (algo != DCP_MERGE_ALLTOALL ||
        (stats.wire_bytes == cost.wire_bytes && stats.n_messages == cost.n_messages))
        return 0;
    printf("rank %d: %lld bytes in %lld messages, said were %lld in %lld\n", rank,
           (long long)stats.wire_bytes, (long long)stats.n_messages, (long long)cost.wire_bytes,
           (long long)cost.n_messages);
    return 1;
}

/* alltoall from packed, private memory gives the bits that all other ways must give. */
static inline int large_check_shape(dcp_group *g, const struct large_shape *s)
{
    const size_t room = sizeof(float) * (size_t)(s->t * LARGE_H * (s->dim + LARGE_GAP));
    const int rank = dcp_group_rank(g);
    const bool sees = dcp_group_n_hosts(g) == 1;
    float *own = malloc(room);
    float *want = malloc(room);
    float *got = malloc(room);
    void *shared = NULL;
    float lse[LARGE_T_MAX * LARGE_H], want_lse[LARGE_T_MAX * LARGE_H],
        got_lse[LARGE_T_MAX * LARGE_H];
    if (own == NULL || want == NULL || got == NULL) abort();
    int n_failed = dcp_group_alloc(g, room, &shared) != DCP_OK;
    for (int i = 0; n_failed == 0 && i < 6; i++) {
        const dcp_cut cut = (dcp_cut)(i % 3);
        const bool has_empty = i >= 3;
        memset(want, 0, room);
        memset(want_lse, 0, sizeof(want_lse));
        large_fill(s, rank, s->dim + LARGE_GAP, has_empty, own, lse);
        n_failed +=
            large_run(s, g, DCP_MERGE_ALLTOALL, cut, own, s->dim + LARGE_GAP, lse, want, want_lse);
        for (int way = 0; n_failed == 0 && way < (sees ? 3 : 2); way++) {
            float *out = way == 0 ? own : shared;
            memset(got, 0, room);
            memset(got_lse, 0, sizeof(got_lse));
            large_fill(s, rank, s->dim, has_empty, out, lse);
            n_failed += large_run(s, g, way == 2 ? DCP_MERGE_DIRECT : DCP_MERGE_ALLTOALL, cut, out,
                                  s->dim, lse, got, got_lse);
            if (n_failed != 0 ||
                (memcmp(got, want, room) == 0 && memcmp(got_lse, want_lse, sizeof(want_lse)) == 0))
                continue;
            printf("rank %d: cut %d, way %d: other bits\n", rank, (int)cut, way);
            n_failed++;
        }
    }
    dcp_group_free(g, shared);
    free(got);
    free(want);
    free(own);
    return n_failed;
}

static inline int large_check(dcp_group *g, void *user)
{
    (void)user;
    static const struct large_shape shapes[] = {{3, 8192}, {LARGE_T_MAX, 1024}};
    int n_failed = 0;
    for (int i = 0; i < 2 && n_failed == 0; i++) n_failed += large_check_shape(g, &shapes[i]);
    return n_failed;
}

#endif
