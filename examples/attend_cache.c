/* SPDX-License-Identifier: Apache-2.0 */
/* The library's own cache and attention over it: what a rank of an engine does in each layer, for a
 * prompt in chunks and then for one token at a time.
 *
 *   cc attend_cache.c $(pkg-config --cflags --libs dcpattn) -pthread -lm && ./a.out
 *
 *     once             dcp_cache_create, dcp_attend_create
 *     per step         dcp_cache_extend                 room for the new tokens, in all layers
 *       per layer      dcp_cache_store                  those of them that this rank owns
 *                      dcp_cache_view, _scales          where keys and values lie, what they mean
 *                      dcp_attend_run                   own heads of the result, over all ranks
 *
 * Ranks are threads here; with groups of processes or of MPI the calls are the same. All steps are
 * done in four types of cache and compared with plain attention over all keys in double precision,
 * whose keys and values are not rounded: what f32 is off by is the arithmetic, the rest is the
 * type. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dcpattn/dcpattn.h"

enum {
    N_RANKS = 4,
    INTERLEAVE = 16, /* position p belongs to rank (p / 16) mod 4 */
    N_LAYERS = 2,
    N_HEADS = 8,
    N_KV_HEADS = 2,
    DIM = 64,
    PROMPT = 200,
    CHUNK = 96,
    N_DECODED = 5,
    LENGTH = PROMPT + N_DECODED
};

static const struct {
    dcp_dtype dtype;
    double most_error; /* of outputs that are means of values within (-1, 1) */
} types[] = {{DCP_F32, 1e-5}, {DCP_BF16, 0.015}, {DCP_I8, 0.02}, {DCP_FP8_E4M3, 0.1}};
enum { N_TYPES = sizeof(types) / sizeof(types[0]) };

/* ---- what a model would compute: here a generator's numbers ---- */

static float keys[N_LAYERS][LENGTH][N_KV_HEADS][DIM], values[N_LAYERS][LENGTH][N_KV_HEADS][DIM];
static float queries[N_LAYERS][LENGTH][N_HEADS][DIM];

static void fill(float *x, size_t n, float most)
{
    static uint64_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = most * ((float)(state >> 40) / 8388608.0f - 1.0f);
    }
}

/* ---- a rank ---- */

struct rank {
    dcp_group *group;
    double worst[N_TYPES]; /* error of the own heads */
    dcp_status st;
    char text[512];
};

/* Of the own heads of the n tokens from begin on, which see all keys up to their own. */
static double error_of(int layer, int64_t begin, int64_t n, dcp_range heads, const float *out)
{
    double worst = 0.0;
    for (int64_t pos = begin; pos < begin + n; pos++) {
        for (int64_t h = heads.begin; h < heads.end; h++, out += DIM) {
            const int64_t g = h / (N_HEADS / N_KV_HEADS);
            double sum = 0.0, want[DIM] = {0.0};
            for (int64_t p = 0; p <= pos; p++) {
                double dot = 0.0;
                for (int d = 0; d < DIM; d++)
                    dot += (double)queries[layer][pos][h][d] * (double)keys[layer][p][g][d];
                const double weight = exp(dot / sqrt((double)DIM));
                sum += weight;
                for (int d = 0; d < DIM; d++) want[d] += weight * (double)values[layer][p][g][d];
            }
            for (int d = 0; d < DIM; d++) {
                const double error = fabs((double)out[d] - want[d] / sum);
                if (!(error <= worst)) worst = error; /* NaN, too */
            }
        }
    }
    return worst;
}

/* n more tokens through all layers. */
static dcp_status step(dcp_cache *cache, dcp_attend *attend, int rank, dcp_range heads, int64_t n,
                       double *worst)
{
    const int64_t begin = dcp_cache_length(cache, 0);
    dcp_status st = dcp_cache_extend(cache, 0, n);
    if (st != DCP_OK) return st;

    /* Local indices of the new tokens that are this rank's: often none, where n is 1. */
    const int64_t own_begin = dcp_local_length(begin, N_RANKS, rank, INTERLEAVE);
    const int64_t own_end = dcp_local_length(begin + n, N_RANKS, rank, INTERLEAVE);
    for (int layer = 0; layer < N_LAYERS && st == DCP_OK; layer++) {
        float k[CHUNK][N_KV_HEADS][DIM], v[CHUNK][N_KV_HEADS][DIM];
        for (int64_t i = own_begin; i < own_end; i++) {
            const int64_t pos = dcp_pos_global(i, N_RANKS, rank, INTERLEAVE);
            memcpy(k[i - own_begin], keys[layer][pos], sizeof(k[0]));
            memcpy(v[i - own_begin], values[layer][pos], sizeof(v[0]));
        }
        st = dcp_cache_store(cache, 0, layer, own_begin, own_end - own_begin, &k[0][0][0], 0,
                             &v[0][0][0], 0);
        if (st != DCP_OK) break;

        /* Taken anew after each extend. Without the scales an int8 cache's numbers mean nothing;
         * other types have none, and are called in the same way. */
        dcp_kv_view view;
        dcp_kv_scales scales;
        st = dcp_cache_view(cache, 0, layer, &view);
        if (st == DCP_OK) st = dcp_cache_scales(cache, 0, layer, &scales);
        if (st != DCP_OK) break;

        const int64_t own_heads = heads.end - heads.begin;
        float out[CHUNK * N_HEADS * DIM]; /* [n][own heads][DIM] */
        const dcp_attend_seq seq = {&view, begin + n, n, 0};
        dcp_attend_args args = DCP_ATTEND_ARGS_INIT;
        args.seqs = &seq;
        args.n_seqs = 1;
        args.scales = &scales;
        args.q = queries[layer][begin][heads.begin]; /* own heads of rows that hold them all */
        args.q_token_stride = (int64_t)N_HEADS * DIM;
        args.out = out;
        args.out_token_stride = own_heads * DIM;
        st = dcp_attend_run(attend, &args, NULL);
        if (st != DCP_OK) break;
        const double error = error_of(layer, begin, n, heads, out);
        if (!(error <= *worst)) *worst = error;
    }
    return st;
}

static void run_type(struct rank *r, dcp_dtype dtype, double *worst)
{
    dcp_group *const group = r->group;
    const int rank = dcp_group_rank(group);
    dcp_cache_desc cache_desc = DCP_CACHE_DESC_INIT;
    cache_desc.n_ranks = N_RANKS;
    cache_desc.rank = rank;
    cache_desc.interleave = INTERLEAVE;
    cache_desc.n_layers = N_LAYERS;
    cache_desc.n_kv_heads = N_KV_HEADS;
    cache_desc.key_dim = cache_desc.value_dim = DIM;
    cache_desc.dtype = dtype;
    cache_desc.max_tokens = LENGTH;

    dcp_attend_desc attend_desc = DCP_ATTEND_DESC_INIT;
    attend_desc.max_tokens = CHUNK;
    attend_desc.n_heads = N_HEADS;
    attend_desc.n_kv_heads = N_KV_HEADS;
    attend_desc.key_dim = attend_desc.value_dim = DIM;
    attend_desc.causal = 1;
    attend_desc.interleave = INTERLEAVE;
    const dcp_range heads = dcp_attend_heads(&attend_desc, N_RANKS, rank);

    dcp_cache *cache = NULL;
    dcp_attend *attend = NULL;
    dcp_status st = dcp_cache_create(&cache_desc, &cache);
    if (st == DCP_OK) st = dcp_attend_create(group, &attend_desc, &attend);
    for (int64_t at = 0; at < LENGTH && st == DCP_OK;) {
        const int64_t left = PROMPT - at;
        const int64_t n = left <= 0 ? 1 : left < CHUNK ? left : CHUNK;
        st = step(cache, attend, rank, heads, n, worst);
        at += n;
    }
    if (st != DCP_OK) { /* before anything is freed: that is collective, and would fail as well */
        r->st = st;
        snprintf(r->text, sizeof(r->text), "%s", dcp_last_error());
        dcp_group_abort(group, r->text); /* or the others would wait */
    }
    dcp_attend_destroy(attend);
    dcp_cache_destroy(cache);
}

static void *rank_main(void *arg)
{
    struct rank *r = arg;
    for (int i = 0; i < N_TYPES && r->st == DCP_OK; i++) run_type(r, types[i].dtype, &r->worst[i]);
    dcp_group_destroy(r->group);
    return NULL;
}

int main(void)
{
    fill(&keys[0][0][0][0], sizeof(keys) / sizeof(float), 1.0f);
    fill(&values[0][0][0][0], sizeof(values) / sizeof(float), 1.0f);
    fill(&queries[0][0][0][0], sizeof(queries) / sizeof(float), 4.0f);
    dcp_group *groups[N_RANKS];
    if (dcp_group_create_threads(N_RANKS, NULL, groups) != DCP_OK) {
        fprintf(stderr, "%s\n", dcp_last_error());
        return 1;
    }
    static struct rank ranks[N_RANKS];
    pthread_t threads[N_RANKS];
    for (int r = 0; r < N_RANKS; r++) {
        ranks[r].group = groups[r];
        if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 1;
    }
    int rc = 0;
    double worst[N_TYPES] = {0.0};
    for (int r = 0; r < N_RANKS; r++) {
        pthread_join(threads[r], NULL);
        if (ranks[r].st != DCP_OK) {
            fprintf(stderr, "rank %d: %s\n", r, ranks[r].text);
            rc = 1;
        }
        for (int i = 0; i < N_TYPES; i++)
            if (!(ranks[r].worst[i] <= worst[i])) worst[i] = ranks[r].worst[i];
    }
    for (int i = 0; i < N_TYPES && rc == 0; i++) {
        if (worst[i] < types[i].most_error) continue;
        fprintf(stderr, "%s: off by %g; %g would be right\n", dcp_dtype_name(types[i].dtype),
                worst[i], types[i].most_error);
        rc = 1;
    }
    if (rc != 0) return rc;
    printf("ok: %d + %d tokens over %d ranks, largest error", PROMPT, N_DECODED, N_RANKS);
    for (int i = 0; i < N_TYPES; i++)
        printf("%s %s %.2g", i > 0 ? "," : "", dcp_dtype_name(types[i].dtype), worst[i]);
    printf("\n");
    return 0;
}
