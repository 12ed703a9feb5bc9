/* SPDX-License-Identifier: Apache-2.0 */
/* An inference engine that has a paged KV cache of its own, in a layout of its own, and calls the
 * sharded operator on it without a copy.
 *
 *   cc attend_view.c $(pkg-config --cflags --libs dcpattn) -pthread -lm && ./a.out
 *
 *     blocks   [block][K or V][slot][KV head][dim]    one pool for all sequences, bf16
 *     tables   sequence -> its blocks, in any order   (as vLLM-like engines have them)
 *
 * Four ranks (threads here) hold a pool each and deal the positions out in turns of 16 tokens. Two
 * sequences run in one batch: a prompt's chunk of 24 tokens, and 3 tokens of a speculative draft.
 * The result is compared with plain attention over all keys in double precision.
 *
 * It is as close as float32 is, but where the CPU has AMX: there a sequence of a bf16 cache with
 * more than 32 rows (new tokens x query heads of a KV head: here the chunk has 96, the draft 12)
 * gets its softmax weights cut to bf16, by 2^-8 of each at most but for a factor, and divided by
 * the sum of the cut ones. DCP_ATTN_ISA=avx512 keeps AMX out. */
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dcpattn/attend.h"

enum {
    N_RANKS = 4,
    INTERLEAVE = 16,
    N_HEADS = 12,
    N_KV_HEADS = 3,
    DIM = 32,
    BLOCK_SLOTS = 16,
    N_BLOCKS = 24, /* of a rank's pool */
    N_SEQS = 2
};
static const int64_t lengths[N_SEQS] = {300, 517}, n_new[N_SEQS] = {24, 3};
enum { N_ROWS = 27 };

/* ---- the engine's own cache: nothing of dcpattn in it ---- */

struct engine_cache {
    uint16_t pool[N_BLOCKS][2][BLOCK_SLOTS][N_KV_HEADS][DIM];
    int32_t tables[N_SEQS][N_BLOCKS];
    int64_t n_stored[N_SEQS];
    int n_used;
};

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof(y));
    return y;
}

/* Blocks come from the end of the pool, so that no table is in order. */
static void engine_append(struct engine_cache *c, int seq, const float *k, const float *v)
{
    const int64_t i = c->n_stored[seq]++;
    if (i % BLOCK_SLOTS == 0)
        c->tables[seq][i / BLOCK_SLOTS] = (int32_t)(N_BLOCKS - 1 - c->n_used++);
    const int32_t block = c->tables[seq][i / BLOCK_SLOTS];
    for (int g = 0; g < N_KV_HEADS; g++) {
        for (int d = 0; d < DIM; d++) {
            c->pool[block][0][i % BLOCK_SLOTS][g][d] = to_bf16(k[g * DIM + d]);
            c->pool[block][1][i % BLOCK_SLOTS][g][d] = to_bf16(v[g * DIM + d]);
        }
    }
}

/* The same, told to the operator: a base, a block table and strides. */
static dcp_kv_view view_of(const struct engine_cache *c, int seq)
{
    const dcp_kv_view view = {.k_base = c->pool[0][0],
                              .v_base = c->pool[0][1],
                              .pages = c->tables[seq],
                              .page_tokens = BLOCK_SLOTS,
                              .k_page_stride_bytes = sizeof(c->pool[0]),
                              .v_page_stride_bytes = sizeof(c->pool[0]),
                              .k_slot_stride = N_KV_HEADS * DIM,
                              .k_head_stride = DIM,
                              .v_slot_stride = N_KV_HEADS * DIM,
                              .v_head_stride = DIM,
                              .n_keys = c->n_stored[seq],
                              .dtype = DCP_BF16};
    return view;
}

/* ---- data: a hash instead of a model ---- */

static float value_of(int what, int64_t seq, int64_t at, int64_t i)
{
    uint64_t x = (uint64_t)((what * 1000003 + seq) * 1000003 + at) * 1000003u + (uint64_t)i;
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    return (float)(int64_t)(x >> 40) / 8388608.0f - 1.0f; /* -1 .. 1 */
}
enum { THE_K, THE_V, THE_Q };

/* ---- a rank ---- */

static float result[N_ROWS][N_HEADS][DIM];
static const char *kernel; /* the one it came from */

struct rank {
    dcp_group *group;
    dcp_status st;
    char text[256];
};

static dcp_status attend(dcp_group *group, const struct engine_cache *cache)
{
    dcp_attend_desc desc = DCP_ATTEND_DESC_INIT;
    desc.max_tokens = N_ROWS;
    desc.n_heads = N_HEADS;
    desc.n_kv_heads = N_KV_HEADS;
    desc.key_dim = desc.value_dim = DIM;
    desc.causal = 1;
    desc.interleave = INTERLEAVE;
    dcp_attend *op = NULL;
    dcp_status st = dcp_attend_create(group, &desc, &op);
    if (st != DCP_OK) return st;

    const dcp_range heads = dcp_attend_heads(&desc, N_RANKS, dcp_group_rank(group));
    const int64_t own = heads.end - heads.begin;
    float q[N_ROWS][N_HEADS][DIM], out[N_ROWS][N_HEADS][DIM]; /* own heads first in a row */
    int64_t row = 0;
    for (int s = 0; s < N_SEQS; s++)
        for (int64_t i = 0; i < n_new[s]; i++, row++)
            for (int64_t h = 0; h < own; h++)
                for (int d = 0; d < DIM; d++)
                    q[row][h][d] =
                        value_of(THE_Q, s, lengths[s] - n_new[s] + i, (heads.begin + h) * DIM + d);

    dcp_kv_view views[N_SEQS];
    dcp_attend_seq seqs[N_SEQS];
    for (int s = 0; s < N_SEQS; s++) {
        views[s] = view_of(cache, s);
        seqs[s] = (dcp_attend_seq){&views[s], lengths[s], n_new[s], 0};
    }
    dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
    args.seqs = seqs;
    args.n_seqs = N_SEQS;
    args.q = &q[0][0][0];
    args.q_token_stride = (int64_t)N_HEADS * DIM;
    args.out = &out[0][0][0];
    args.out_token_stride = (int64_t)N_HEADS * DIM;
    st = dcp_attend_run(op, &args, NULL);
    for (row = 0; row < N_ROWS && st == DCP_OK; row++)
        memcpy(result[row][heads.begin], out[row], (size_t)own * sizeof(out[row][0]));
    dcp_attend_info info = DCP_ATTEND_INFO_INIT;
    dcp_attend_get_info(op, &info);
    if (dcp_group_rank(group) == 0) kernel = info.kernel;
    /* Before anything is freed: that is collective, and the others would wait. */
    if (st != DCP_OK) dcp_group_abort(group, dcp_last_error());
    dcp_attend_destroy(op);
    return st;
}

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    const int rank = dcp_group_rank(r->group);
    struct engine_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) exit(1);
    for (int s = 0; s < N_SEQS; s++) {
        for (int64_t p = 0; p < lengths[s]; p++) {
            if (dcp_pos_owner(p, N_RANKS, INTERLEAVE) != rank) continue;
            float k[N_KV_HEADS * DIM], v[N_KV_HEADS * DIM];
            for (int i = 0; i < N_KV_HEADS * DIM; i++) {
                k[i] = value_of(THE_K, s, p, i);
                v[i] = value_of(THE_V, s, p, i);
            }
            engine_append(cache, s, k, v);
        }
    }
    r->st = attend(r->group, cache);
    if (r->st != DCP_OK) snprintf(r->text, sizeof(r->text), "%s", dcp_last_error());
    free(cache);
    dcp_group_destroy(r->group);
    return NULL;
}

/* ---- the check ---- */

/* Of sequence s, whose rows begin at row. */
static double worst_error(int s, int64_t row)
{
    double worst = 0.0;
    for (int64_t i = 0; i < n_new[s]; i++, row++) {
        const int64_t pos = lengths[s] - n_new[s] + i;
        for (int h = 0; h < N_HEADS; h++) {
            const int g = h / (N_HEADS / N_KV_HEADS);
            double sum = 0.0, want[DIM] = {0.0};
            for (int64_t p = 0; p <= pos; p++) {
                double dot = 0.0;
                for (int d = 0; d < DIM; d++)
                    dot += (double)value_of(THE_Q, s, pos, h * DIM + d) *
                           (double)from_bf16(to_bf16(value_of(THE_K, s, p, g * DIM + d)));
                const double e = exp(dot / sqrt((double)DIM));
                sum += e;
                for (int d = 0; d < DIM; d++)
                    want[d] += e * (double)from_bf16(to_bf16(value_of(THE_V, s, p, g * DIM + d)));
            }
            for (int d = 0; d < DIM; d++)
                worst = fmax(worst, fabs((double)result[row][h][d] - want[d] / sum));
        }
    }
    return worst;
}

/* What that may be. Values lie within (-1, 1), so they are 1 from their mean in the mean at most,
 * and those of a rank's own keys, about a mean of their own, twice that. */
static double most_error(int s)
{
    const bool is_rounded = strstr(kernel, "amx") != NULL && n_new[s] * (N_HEADS / N_KV_HEADS) > 32;
    return is_rounded ? 2.0 / 256.0 : 1e-5;
}

int main(void)
{
    dcp_group *groups[N_RANKS];
    if (dcp_group_create_threads(N_RANKS, NULL, groups) != DCP_OK) {
        fprintf(stderr, "%s\n", dcp_last_error());
        return 1;
    }
    struct rank ranks[N_RANKS];
    pthread_t threads[N_RANKS];
    memset(ranks, 0, sizeof(ranks));
    for (int r = 0; r < N_RANKS; r++) {
        ranks[r].group = groups[r];
        if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 1;
    }
    int rc = 0;
    for (int r = 0; r < N_RANKS; r++) {
        pthread_join(threads[r], NULL);
        if (ranks[r].st == DCP_OK) continue;
        fprintf(stderr, "rank %d: %s\n", r, ranks[r].text);
        rc = 1;
    }
    int64_t row = 0;
    for (int s = 0; s < N_SEQS && rc == 0; s++) {
        const double worst = worst_error(s, row);
        printf("sequence %d, %d rows over %d ranks, %s: off by %.2g at most\n", s, (int)n_new[s],
               N_RANKS, kernel, worst);
        if (!(worst < most_error(s))) {
            fprintf(stderr, "sequence %d: %g would be right\n", s, most_error(s));
            rc = 1;
        }
        row += n_new[s];
    }
    if (rc == 0) printf("ok: as plain attention in double has it\n");
    return rc;
}
