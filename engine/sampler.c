/* SPDX-License-Identifier: Apache-2.0 */
/* Sampling. Candidates are (logit, id) pairs ordered by falling logit, then rising id, so that
 * every cut is the same whatever order they were gathered in.
 *
 *   all logits -> top-k: a heap of the k best seen so far, worst on top (one pass, no full sort)
 *              -> weights exp((logit - greatest) / temp), in double
 *              -> top-p: best candidates taken off a heap until their weights reach the share
 *              -> min-p: a bound on the weight, as the greatest weight is 1
 *              -> draw: walk the sum of weights up to a uniform number */
#include "engine/sampler.h"

#include <math.h>
#include <stdbool.h>

#include "base/alloc_priv.h"

struct candidate {
    float logit;
    int32_t id;
    double weight;
};

struct sampler {
    struct sampler_opts opts;
    int32_t n_vocab;
    uint64_t state[4];
    struct candidate *cand; /* [top_k, or n_vocab without top-k] */
};

/* --- random numbers: xoshiro256**, seeded by splitmix64 (Blackman and Vigna) --- */

static uint64_t rotate(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

static void seed_state(uint64_t state[4], uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        seed += 0x9e3779b97f4a7c15u;
        uint64_t z = seed;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        state[i] = z ^ z >> 31;
    }
}

/* Uniform in [0, 1): the upper 53 bits. */
static double next_uniform(uint64_t state[4])
{
    const uint64_t value = rotate(state[1] * 5, 7) * 9;
    const uint64_t t = state[1] << 17;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= t;
    state[3] = rotate(state[3], 45);
    return (double)(value >> 11) * 0x1p-53;
}

dcp_status sampler_create(const struct sampler_opts *opts, int32_t vocab_size, struct sampler **out)
{
    void *ptr;
    if (vocab_size < 1) return dcp__fail(DCP_ERR_ARG, "vocabulary of %d ids", (int)vocab_size);
    /* Written so that a NaN fails each test. */
    if (!(opts->temp >= 0.0f && opts->temp <= 1e4f)) {
        return dcp__fail(DCP_ERR_ARG, "temp is %g; the range is 0 (greedy) to 10000",
                         (double)opts->temp);
    }
    if (opts->top_k < 0) {
        return dcp__fail(DCP_ERR_ARG, "top-k is %d; the range is 0 (off) and up", (int)opts->top_k);
    }
    if (!(opts->top_p > 0.0f && opts->top_p <= 1.0f)) {
        return dcp__fail(DCP_ERR_ARG, "top-p is %g; the range is above 0 to 1 (off)",
                         (double)opts->top_p);
    }
    if (!(opts->min_p >= 0.0f && opts->min_p <= 1.0f)) {
        return dcp__fail(DCP_ERR_ARG, "min-p is %g; the range is 0 (off) to 1",
                         (double)opts->min_p);
    }
    DCP_TRY(dcp__alloc(sizeof(struct sampler), "sampler", &ptr));
    struct sampler *s = ptr;
    s->opts = *opts;
    if (s->opts.top_k >= vocab_size) s->opts.top_k = 0;
    s->n_vocab = vocab_size;
    seed_state(s->state, opts->seed);
    if (opts->temp > 0.0f) {
        const size_t n = (size_t)(s->opts.top_k > 0 ? s->opts.top_k : vocab_size);
        const dcp_status st = dcp__alloc_array(n, sizeof(struct candidate), "candidates", &ptr);
        if (st != DCP_OK) {
            sampler_destroy(s);
            return st;
        }
        s->cand = ptr;
    }
    *out = s;
    return DCP_OK;
}

void sampler_destroy(struct sampler *s)
{
    if (s == NULL) return;
    dcp__free(s->cand);
    dcp__free(s);
}

static bool is_better(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

/* Let the element at i sink in a heap of n with the best (or, best = false, the worst) on top. */
static void sink(struct candidate *heap, size_t n, size_t i, bool best)
{
    const struct candidate moved = heap[i];
    for (;;) {
        size_t down = 2 * i + 1;
        if (down >= n) break;
        if (down + 1 < n && is_better(&heap[down + 1], &heap[down]) == best) down++;
        if (is_better(&heap[down], &moved) != best) break;
        heap[i] = heap[down];
        i = down;
    }
    heap[i] = moved;
}

static void make_heap(struct candidate *heap, size_t n, bool best)
{
    for (size_t i = n / 2; i-- > 0;) sink(heap, n, i, best);
}

/* Move the best of cand[0..n) to the front in order, as many as it takes to reach share p of the
 * weight; returns how many. */
static size_t keep_top_p(struct candidate *cand, size_t n, double p)
{
    double total = 0.0;
    for (size_t i = 0; i < n; i++) total += cand[i].weight;
    make_heap(cand, n, true);
    /* The heap shrinks from the end, where the best ones then lie in falling order from n - 1. */
    double sum = 0.0;
    size_t n_heap = n;
    while (n_heap > 0 && (n_heap == n || sum < p * total)) {
        const struct candidate top = cand[0];
        cand[0] = cand[--n_heap];
        if (n_heap > 1) sink(cand, n_heap, 0, true);
        cand[n_heap] = top;
        sum += top.weight;
    }
    for (size_t i = 0, j = n - 1; i < j; i++, j--) {
        const struct candidate t = cand[i];
        cand[i] = cand[j];
        cand[j] = t;
    }
    return n - n_heap;
}

/* Candidates and their weights into s->cand; returns how many. */
static size_t gather(struct sampler *s, const float *logits, float greatest)
{
    const size_t k = (size_t)s->opts.top_k;
    size_t n = 0;
    for (int32_t id = 0; id < s->n_vocab; id++) {
        const struct candidate c = {logits[id], id, 0.0};
        if (k == 0 || n < k) {
            s->cand[n++] = c;
            if (n == k) make_heap(s->cand, n, false);
        } else if (is_better(&c, &s->cand[0])) {
            s->cand[0] = c;
            sink(s->cand, n, 0, false);
        }
    }
    for (size_t i = 0; i < n; i++) {
        s->cand[i].weight =
            exp(((double)s->cand[i].logit - (double)greatest) / (double)s->opts.temp);
    }
    return n;
}

/* Greatest of n and whether all are below infinity, in a form that compilers turn into vector code.
 */
static float block_top(const float *v, int32_t n, bool *is_below_out)
{
    enum { LANES = 16 };
    float top[LANES];
    int32_t n_below[LANES] = {0}, i = 0;
    for (int j = 0; j < LANES; j++) top[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            top[j] = v[i + j] > top[j] ? v[i + j] : top[j];
            n_below[j] += v[i + j] < INFINITY ? 1 : 0;
        }
    }
    for (; i < n; i++) {
        top[0] = v[i] > top[0] ? v[i] : top[0];
        n_below[0] += v[i] < INFINITY ? 1 : 0;
    }
    int32_t below = 0;
    for (int j = 0; j < LANES; j++) {
        top[0] = top[j] > top[0] ? top[j] : top[0];
        below += n_below[j];
    }
    *is_below_out = below == n;
    return top[0];
}

/* The first of the greatest logits. */
static dcp_status find_greatest(const float *logits, int32_t n, int32_t *id_out)
{
    enum { BLOCK = 1024 };
    float top = -INFINITY;
    int32_t at = 0; /* of the first block that reaches top */
    for (int32_t i = 0; i < n; i += BLOCK) {
        const int32_t n_block = n - i < BLOCK ? n - i : BLOCK;
        bool is_below;
        const float of_block = block_top(logits + i, n_block, &is_below);
        for (int32_t id = i; !is_below && id < n; id++) {
            if (logits[id] < INFINITY) continue;
            return dcp__fail(DCP_ERR_NONFINITE, "logit of id %d is %g", (int)id,
                             (double)logits[id]);
        }
        if (of_block > top) {
            top = of_block;
            at = i;
        }
    }
    while (at + 1 < n && logits[at] < top) at++;
    *id_out = at;
    return DCP_OK;
}

dcp_status sampler_next(struct sampler *s, const float *logits, int32_t *id_out)
{
    int32_t best = 0;
    DCP_TRY(find_greatest(logits, s->n_vocab, &best));
    if (logits[best] == -INFINITY) {
        return dcp__fail(DCP_ERR_NONFINITE, "all %d logits are -inf", (int)s->n_vocab);
    }
    if (s->opts.temp == 0.0f) {
        *id_out = best;
        return DCP_OK;
    }
    size_t n = gather(s, logits, logits[best]);
    if (s->opts.top_p < 1.0f) n = keep_top_p(s->cand, n, (double)s->opts.top_p);
    const double least = (double)s->opts.min_p;
    double total = 0.0;
    for (size_t i = 0; i < n; i++) {
        if (s->cand[i].weight >= least) total += s->cand[i].weight;
    }
    const double goal = next_uniform(s->state) * total;
    double sum = 0.0;
    int32_t id = best;
    for (size_t i = 0; i < n; i++) {
        if (s->cand[i].weight < least || s->cand[i].weight == 0.0) continue;
        id = s->cand[i].id; /* should rounding keep the sum below the goal: the last one */
        sum += s->cand[i].weight;
        if (sum > goal) break;
    }
    *id_out = id;
    return DCP_OK;
}
