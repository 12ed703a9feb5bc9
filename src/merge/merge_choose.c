/* SPDX-License-Identifier: Apache-2.0 */
/* Which algorithm. Rank order leaves no choice to make: direct where all ranks see each other's
 * memory, else alltoall. Where any order will do and memory is not shared, the time of the largest
 * call is estimated for alltoall, halving and (several hosts of several ranks) hierarchical:
 *
 *     alltoall       alpha + (messages of a tile - 1) gamma     per tile, + bytes * beta + local
 *     halving        levels * alpha                             per tile, + bytes * beta + local
 *     hierarchical   alpha + (M - 2) gamma                      per tile, + bytes * beta + local
 *
 * local: what is copied, packed and joined, by bytes (touched_bytes).
 * alpha: one message each way; gamma: one message more in the same exchange; beta: a byte. They are
 * measured once per kind of group, number of ranks and of hosts (some milliseconds, inside create),
 * and kept in ~/.cache/dcp-attn/merge-speed (XDG_CACHE_HOME). Rank 0's numbers decide for all.
 * DCP_ATTN_CALIBRATE=0: nothing is measured, read or written; fixed numbers serve. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/alloc_priv.h"
#include "base/clock_priv.h"
#include "group/group_priv.h"
#include "merge/merge_priv.h"

static const struct dcp__merge_algo *const algos[] = {
    &dcp__merge_direct,       &dcp__merge_alltoall,  &dcp__merge_halving,
    &dcp__merge_hierarchical, &dcp__merge_allreduce, &dcp__merge_allreduce_temp,
};
enum { N_ALGOS = sizeof(algos) / sizeof(algos[0]) };
enum { BATCHES = 4, ROUNDS = 8, LARGE_BYTES = 256 << 10, LARGE_ROUNDS = 2, PATH_BYTES = 600 };

/* Of MPI over loopback, roughly; only ratios matter. */
static const struct dcp__merge_speed fixed_speed = {4.0, 0.7, 0.0004, 1};
/* No network takes so long for a message: ranks waited for CPUs (seen: 3 ms, 8 ranks that poll on 2
 * cores). Such numbers decide nothing and are not kept. */
static const double alpha_most_us = 200.0;

const struct dcp__merge_algo *dcp__merge_find_algo(dcp_merge_algo id)
{
    for (int i = 0; i < N_ALGOS; i++) {
        if (algos[i]->id == id) return algos[i];
    }
    return NULL;
}

const char *dcp_merge_algo_name(dcp_merge_algo a)
{
    if (a == DCP_MERGE_AUTO) return "auto";
    const struct dcp__merge_algo *found = dcp__merge_find_algo(a);
    return found != NULL ? found->name : "?";
}

int dcp_merge_algo_parse(const char *name, dcp_merge_algo *algo_out)
{
    for (int a = DCP_MERGE_AUTO; name != NULL && a <= DCP_MERGE_ALLREDUCE_TEMP; a++) {
        if (strcmp(dcp_merge_algo_name((dcp_merge_algo)a), name) != 0) continue;
        *algo_out = (dcp_merge_algo)a;
        return 1;
    }
    return 0;
}

/* ---- what is stored ---- */

static bool is_calibration_on(void)
{
    const char *env = getenv("DCP_ATTN_CALIBRATE");
    return env == NULL || strcmp(env, "0") != 0;
}

/* The file; its folder is made on the way. false: nowhere to keep it. */
static bool speed_path(char *path, bool makes)
{
    const char *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    char dir[PATH_BYTES];
    int n = 0;
    if (cache != NULL && cache[0] == '/')
        n = snprintf(dir, sizeof(dir), "%s/dcp-attn", cache);
    else if (home != NULL && home[0] == '/')
        n = snprintf(dir, sizeof(dir), "%s/.cache/dcp-attn", home);
    if (n <= 0 || n >= PATH_BYTES - 16) return false;
    if (makes) {
        char *last = strrchr(dir, '/');
        *last = '\0';
        (void)mkdir(dir, 0700); /* ~/.cache, mostly there */
        *last = '/';
        if (mkdir(dir, 0700) != 0 && errno != EEXIST) return false;
    }
    return snprintf(path, PATH_BYTES, "%s/merge-speed", dir) < PATH_BYTES;
}

/* A line: kind ranks hosts alpha_us gamma_us beta_us. The last that fits counts. */
static void read_speed(const struct dcp_merge *m, struct dcp__merge_speed *out)
{
    char path[PATH_BYTES];
    if (!speed_path(path, false)) return;
    FILE *f = fopen(path, "r");
    if (f == NULL) return;
    char line[160];
    while (fgets(line, sizeof(line), f) != NULL) {
        char kind[32];
        int n_ranks = 0;
        int n_hosts = 0;
        struct dcp__merge_speed s = {0, 0, 0, 1};
        if (sscanf(line, "%31s %d %d %lf %lf %lf", kind, &n_ranks, &n_hosts, &s.alpha_us,
                   &s.message_us, &s.byte_us) != 6)
            continue;
        if (strcmp(kind, dcp_group_kind(m->g)) == 0 && n_ranks == m->n_ranks &&
            n_hosts == dcp_group_n_hosts(m->g) && s.alpha_us > 0 && s.byte_us > 0 &&
            s.message_us >= 0)
            *out = s;
    }
    (void)fclose(f);
}

static void write_speed(const struct dcp_merge *m)
{
    char path[PATH_BYTES];
    if (!speed_path(path, true)) return;
    FILE *f = fopen(path, "a");
    if (f == NULL) return; /* a read-only home: measured again next time */
    (void)fprintf(f, "%s %d %d %.4f %.4f %.8f\n", dcp_group_kind(m->g), m->n_ranks,
                  dcp_group_n_hosts(m->g), m->speed.alpha_us, m->speed.message_us,
                  m->speed.byte_us);
    (void)fclose(f);
}

/* ---- measuring ---- */

/* The time of one exchange of n_bytes with the next n_peers ranks and the last n_peers: the mean of
 * a batch, in which nobody can be a round ahead of its peers; of several batches the least. */
static dcp_status time_exchange(struct dcp_merge *m, char *buf, size_t n_bytes, int n_peers,
                                int n_rounds, double *us_out)
{
    double least = 1e9;
    for (int batch = 0; batch < BATCHES; batch++) {
        const int64_t start = dcp__now_ns();
        for (int i = 0; i < n_rounds; i++) {
            for (int k = 0; k < n_peers; k++) {
                const int to = (m->rank + 1 + k) % m->n_ranks;
                const int from = (m->rank + 2 * m->n_ranks - 1 - k) % m->n_ranks;
                m->sends[k] = (struct dcp__xfer){.peer = to, .buf = buf, .n_bytes = n_bytes};
                m->recvs[k] = (struct dcp__xfer){
                    .peer = from, .buf = buf + n_bytes * (size_t)(k + 1), .n_bytes = n_bytes};
            }
            DCP_TRY(dcp__group_exchange_start(m->g, DCP__SLOT_TILES, m->sends, n_peers, m->recvs,
                                              n_peers));
            DCP_TRY(dcp__group_exchange_wait(m->g, DCP__SLOT_TILES));
        }
        const double us = (double)(dcp__now_ns() - start) * 1e-3 / n_rounds;
        if (us < least) least = us;
    }
    *us_out = least;
    return DCP_OK;
}

static dcp_status measure(struct dcp_merge *m)
{
    void *buf = NULL;
    const size_t n_bytes = 2 * (size_t)LARGE_BYTES + 64 * (size_t)m->n_ranks;
    const dcp_status got = dcp__alloc(n_bytes, "merge calibration", &buf);
    if (got != DCP_OK) return dcp__group_poison(m->g, got, "merge create: %s", dcp_last_error());
    double one = 0;
    double all = 0;
    double large = 0;
    dcp_status st = time_exchange(m, buf, 8, 1, ROUNDS, &one);
    if (st == DCP_OK) st = time_exchange(m, buf, 8, m->n_ranks - 1, ROUNDS, &all);
    if (st == DCP_OK) st = time_exchange(m, buf, LARGE_BYTES, 1, LARGE_ROUNDS, &large);
    if (!dcp__group_keeps_buffers(m->g)) dcp__free(buf);
    DCP_TRY(st);
    m->speed.alpha_us = one > 0.05 ? one : 0.05;
    m->speed.message_us = m->n_ranks > 2 && all > one ? (all - one) / (m->n_ranks - 2) : 0;
    m->speed.byte_us = large > one ? (large - one) / LARGE_BYTES : 1e-5;
    m->speed.is_known = 1;
    return DCP_OK;
}

struct look_record {
    struct dcp__merge_speed speed;
    int32_t wants_speed, is_on;
};

dcp_status dcp__merge_look_around(struct dcp_merge *m, bool wants_speed)
{
    struct look_record own;
    memset(&own, 0, sizeof(own));
    own.wants_speed = wants_speed;
    own.is_on = is_calibration_on();
    if (m->rank == 0 && wants_speed) {
        if (own.is_on)
            read_speed(m, &own.speed);
        else
            own.speed = fixed_speed;
    }
    struct look_record *all = m->records;
    DCP_TRY(dcp__group_record(m->g, &own, sizeof(own), all));
    m->speed = all[0].speed;
    for (int r = 0; r < m->n_ranks; r++) {
        /* One that wants none will be found to disagree, or to have failed, by the next record. */
        if (all[r].wants_speed == 0) return DCP_OK;
    }
    if (m->speed.is_known != 0) return DCP_OK;
    DCP_TRY(measure(m));
    own.speed = m->speed;
    DCP_TRY(dcp__group_record(m->g, &own, sizeof(own), all));
    m->speed = all[0].speed;
    if (m->speed.alpha_us > alpha_most_us)
        m->speed = fixed_speed;
    else if (m->rank == 0)
        write_speed(m);
    return DCP_OK;
}

/* ---- choosing ---- */

/* Bytes that a rank copies, packs and merges beside what travels, in f32: alltoall packs what it
 * sends, unless that goes from where it lies, in one stretch or as pieces that the transport
 * gathers, and reads a partial's worth of rows; halving turns its whole partial into f32 rows
 * first, and at each level joins what comes with what it keeps; hierarchical does the same with the
 * rows of other hosts alone. Whether a call's partial may be sent as it lies (dcp__group_may_lend)
 * is not known yet: the estimate takes it to be so. */
static double touched_bytes(const struct dcp__merge_shape *s, bool sends_pieces, int64_t sent)
{
    const double partial = (double)s->max_tokens * (double)s->n_heads * (double)s->dim * 4.0;
    const bool is_copied = s->n_cols > 1 /* (max, sum) is packed always */ ||
                           (!dcp__merge_splits(s) && !(sends_pieces && dcp__merge_gathers(s)));
    if (s->algo == DCP_MERGE_ALLTOALL) return partial + (is_copied ? (double)sent : 0.0);
    return (s->algo == DCP_MERGE_HALVING ? 2.0 * partial : partial) + 2.0 * (double)sent;
}

/* 10 GB/s: a core that copies out of its own caches and its neighbour's. */
static const double touch_us = 1e-4;

static double estimate(const struct dcp__merge_pick *p, dcp_merge_algo id)
{
    struct dcp__merge_shape s =
        dcp__merge_shape_of(p->desc, id, p->n_ranks, 0, p->one_space, p->host_of);
    struct dcp__merge_sizes sizes;
    dcp__merge_fit(&s, p->desc->workspace_limit_bytes, &sizes);
    if (s.tile_heads == 0) return 1e30;
    int64_t bytes = 0;
    int64_t n_messages = 0;
    dcp__merge_traffic(&s, s.max_tokens, &bytes, &n_messages);
    const int64_t n_steps = dcp__merge_n_steps(&s, s.max_tokens);
    const struct dcp__merge_speed *v = &p->speed;
    double us = (double)bytes * v->byte_us + touched_bytes(&s, p->sends_pieces, bytes) * touch_us;
    if (id == DCP_MERGE_HALVING)
        us += (double)n_messages * v->alpha_us;
    else
        us += (double)n_steps * v->alpha_us +
              (double)(n_messages > n_steps ? n_messages - n_steps : 0) * v->message_us;
    return us;
}

dcp_merge_algo dcp__merge_pick_any(const struct dcp__merge_pick *p, double us[3])
{
    static const dcp_merge_algo ids[] = {DCP_MERGE_ALLTOALL, DCP_MERGE_HALVING,
                                         DCP_MERGE_HIERARCHICAL};
    struct dcp__merge_shape s;
    memset(&s, 0, sizeof(s));
    s.n_ranks = p->n_ranks;
    s.host_of = p->host_of;
    const int n_hosts = dcp__n_hosts(&s);
    int best = 0;
    for (int i = 0; i < 3; i++) {
        const bool exists =
            ids[i] != DCP_MERGE_HIERARCHICAL || (n_hosts > 1 && n_hosts < p->n_ranks);
        us[i] = exists ? estimate(p, ids[i]) : -1.0;
        if (exists && us[i] < us[best]) best = i;
    }
    return ids[best];
}

static dcp_merge_algo choose_any(struct dcp_merge *m)
{
    const struct dcp__merge_pick p = {.desc = &m->desc,
                                      .n_ranks = m->n_ranks,
                                      .host_of = m->host_of,
                                      .one_space = m->one_space,
                                      .sends_pieces = dcp__group_sends_pieces(m->g),
                                      .speed = m->speed};
    double us[3];
    const dcp_merge_algo best = dcp__merge_pick_any(&p, us);
    const int k = snprintf(m->why, sizeof(m->why),
                           "auto, any order: estimated for %lld tokens: alltoall %.0f us, halving "
                           "%.0f us",
                           (long long)m->desc.max_tokens, us[0], us[1]);
    if (us[2] >= 0 && k > 0 && (size_t)k < sizeof(m->why))
        (void)snprintf(m->why + k, sizeof(m->why) - (size_t)k, ", hierarchical %.0f us", us[2]);
    return best;
}

dcp_merge_algo dcp__merge_choose_unseen(const dcp_merge_desc *desc, int n_ranks, const int *host_of,
                                        const char **why_out)
{
    *why_out = "asked for";
    if (desc->algo != DCP_MERGE_AUTO) return desc->algo;
    *why_out = "auto without a group: ranks of one host";
    if (host_of[n_ranks - 1] == host_of[0]) return DCP_MERGE_DIRECT; /* hosts come one by one */
    if (desc->order != DCP_MERGE_ORDER_ANY || n_ranks < 3 || desc->max_tokens == 0) {
        *why_out = desc->order == DCP_MERGE_ORDER_ANY
                       ? "auto without a group: several hosts"
                       : "auto without a group: several hosts, and the order is that of the ranks";
        return DCP_MERGE_ALLTOALL;
    }
    *why_out = "auto without a group: several hosts, any order, by speeds that were not measured";
    const struct dcp__merge_pick p = {.desc = desc,
                                      .n_ranks = n_ranks,
                                      .host_of = host_of,
                                      .sends_pieces = true, /* as over MPI */
                                      .speed = fixed_speed};
    double us[3];
    return dcp__merge_pick_any(&p, us);
}

dcp_status dcp__merge_choose(struct dcp_merge *m)
{
    const bool is_any = m->desc.order == DCP_MERGE_ORDER_ANY;
    dcp_merge_algo want = m->desc.algo;
    if (want != DCP_MERGE_AUTO) {
        (void)snprintf(m->why, sizeof(m->why), "asked for");
    } else if (m->all_see) {
        want = DCP_MERGE_DIRECT;
        (void)snprintf(m->why, sizeof(m->why), "auto: all ranks see each other's memory");
    } else if (is_any && m->n_ranks > 2 && m->desc.max_tokens > 0 && m->speed.is_known != 0) {
        want = choose_any(m);
    } else {
        want = DCP_MERGE_ALLTOALL;
        (void)snprintf(m->why, sizeof(m->why), "auto: not all ranks see each other's memory%s",
                       is_any ? "" : ", and the order is that of the ranks");
    }
    m->algo = dcp__merge_find_algo(want);
    if (m->algo == NULL)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "merge: this build has no algorithm %d", (int)want);
    if (m->algo->sees_all && !m->all_see)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "merge: %s needs ranks that all see each other's memory; in this %s "
                         "group they do not, take alltoall",
                         m->algo->name, dcp_group_kind(m->g));
    if (m->desc.order == DCP_MERGE_ORDER_RANK && !m->algo->keeps_order)
        return dcp__fail(DCP_ERR_ARG,
                         "merge: rank order was asked for, and %s has an order of its own (%s)",
                         m->algo->name, m->algo->order);
    if (m->n_ranks > 1024 && m->algo->id == DCP_MERGE_HALVING)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "merge: halving takes up to 1024 ranks, not %d",
                         m->n_ranks);
    return DCP_OK;
}
