/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement. Ranks exchange one small record before data moves and one after it; every rank looks
 * at the same records in the same order, so all come to the same verdict and nothing is poisoned by
 * a refusal.
 *
 *   create   what must be the same, tile size -> agree_create      memory taken? -> agree_ready
 *   run      T, run number, places of the partial -> enter         counts, smallest name -> exit */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock_priv.h"
#include "base/hash_priv.h"
#include "group/group_priv.h"
#include "merge/merge_priv.h"
#include "num/dtype_priv.h"

/* Of a refusal, as its peers see it: what the records have room for. */
enum { CREATE_TEXT_BYTES = 192, RUN_TEXT_BYTES = 160 };

struct create_record {
    int32_t status;
    uint8_t lse_base, cut, out_type, lse_type, merged_type, wire_type, nonfinite, algo, has_sink,
        has_kv_len, order, lse_form;
    uint64_t nonce;
    int64_t max_tokens, n_heads, dim;
    int64_t tile_tokens, tile_heads;
    char text[CREATE_TEXT_BYTES];
};
_Static_assert(sizeof(struct create_record) <= DCP__RECORD_MAX, "fits a slot of the group");

/* Where a buffer lies. In one address space offset is the address itself. */
struct place {
    uint64_t offset;
    int64_t token_stride, head_stride;
};
struct run_record {
    uint64_t nonce, n_runs, sink;
    int64_t n_tokens;
    int32_t status;
    uint8_t stages_out, stages_lse, contiguity, pad;
    union {
        struct {
            uint32_t out_id, lse_id, kv_id, sum_id;
            struct place out, lse, merged, merged_lse;
            uint64_t kv_offset, sum_offset;
            uint64_t read_begin, read_end, written_begin, written_end; /* hulls, in one space */
        } at;
        char text[RUN_TEXT_BYTES];
    } u;
};
_Static_assert(sizeof(struct run_record) <= DCP__RECORD_MAX, "fits a slot of the group");

/* Of the run whose entry records all have just compared. */
struct exit_record {
    int64_t n_nonfinite, n_lse_bad, n_lse_empty;
    int64_t t, h, rank;
};
_Static_assert(sizeof(struct exit_record) <= DCP__RECORD_MAX, "fits a slot of the group");

/* Another rank refused: its code here too, and its text. */
static dcp_status peer_refused(const struct dcp_merge *m, int rank, int32_t status,
                               const char *text, const char *call)
{
    return dcp__fail((dcp_status)status, "%s: rank %d refused, so rank %d stops too: %s", call,
                     rank, m->rank, text);
}

/* What a field of a description holds. */
enum kind {
    KIND_COUNT,
    KIND_BASE,
    KIND_CUT,
    KIND_TYPE,
    KIND_NONFINITE,
    KIND_FLAG,
    KIND_FORM,
    KIND_ORDER,
    KIND_ALGO,
    N_KINDS
};
enum { VALUE_BYTES = 24 };

/* The value as a caller knows it; in buf where it is a number. */
static const char *value_text(enum kind kind, int64_t x, char *buf)
{
    static const char *const names[N_KINDS][3] = {
        [KIND_BASE] = {"unset", "base e", "base 2"},
        [KIND_CUT] = {"heads", "tokens", "none"},
        [KIND_NONFINITE] = {"zero", "propagate", "error"},
        [KIND_FLAG] = {"no", "yes"},
        [KIND_FORM] = {"lse", "max-sum"},
        [KIND_ORDER] = {"auto", "rank", "any"},
    };
    if (kind == KIND_TYPE) return dcp_dtype_name((dcp_dtype)x);
    if (kind == KIND_ALGO) return dcp_merge_algo_name((dcp_merge_algo)x);
    if (x >= 0 && x < 3 && names[kind][x] != NULL) return names[kind][x];
    snprintf(buf, VALUE_BYTES, "%lld", (long long)x);
    return buf;
}

static dcp_status compare_create(const struct dcp_merge *m, const struct create_record *a,
                                 const struct create_record *b, int r)
{
    const struct {
        const char *what;
        enum kind kind;
        int64_t a, b;
    } fields[] = {
        {"max_tokens", KIND_COUNT, a->max_tokens, b->max_tokens},
        {"n_heads", KIND_COUNT, a->n_heads, b->n_heads},
        {"dim", KIND_COUNT, a->dim, b->dim},
        {"lse_base", KIND_BASE, a->lse_base, b->lse_base},
        {"cut", KIND_CUT, a->cut, b->cut},
        {"nonfinite", KIND_NONFINITE, a->nonfinite, b->nonfinite},
        {"has_sink", KIND_FLAG, a->has_sink, b->has_sink},
        {"has_kv_len", KIND_FLAG, a->has_kv_len, b->has_kv_len},
        {"lse_form", KIND_FORM, a->lse_form, b->lse_form},
        {"order", KIND_ORDER, a->order, b->order},
        {"out_type", KIND_TYPE, a->out_type, b->out_type},
        {"lse_type", KIND_TYPE, a->lse_type, b->lse_type},
        {"merged_type", KIND_TYPE, a->merged_type, b->merged_type},
        {"wire_type", KIND_TYPE, a->wire_type, b->wire_type},
        {"algo", KIND_ALGO, a->algo, b->algo},
    };
    char buf[2][VALUE_BYTES];
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].a == fields[i].b) continue;
        return dcp__fail(DCP_ERR_MISMATCH,
                         "merge create: ranks disagree on %s: rank 0 has %s, rank %d has %s "
                         "(seen by rank %d)",
                         fields[i].what, value_text(fields[i].kind, fields[i].a, buf[0]), r,
                         value_text(fields[i].kind, fields[i].b, buf[1]), m->rank);
    }
    return DCP_OK;
}

dcp_status dcp__merge_agree_create(struct dcp_merge *m, dcp_status local)
{
    const dcp_merge_desc *d = &m->desc;
    struct create_record own;
    memset(&own, 0, sizeof(own));
    own.status = local;
    if (local != DCP_OK) dcp__brief(own.text, sizeof(own.text), dcp_last_error());
    own.lse_base = (uint8_t)d->lse_base;
    own.cut = (uint8_t)d->cut;
    own.out_type = (uint8_t)d->out_type;
    own.lse_type = (uint8_t)d->lse_type;
    own.merged_type = (uint8_t)d->merged_type;
    own.wire_type = (uint8_t)d->wire_type;
    own.nonfinite = (uint8_t)d->nonfinite;
    own.algo = (uint8_t)d->algo;
    own.has_sink = (uint8_t)d->has_sink;
    own.has_kv_len = (uint8_t)d->has_kv_len;
    own.lse_form = (uint8_t)d->lse_form;
    own.order = (uint8_t)d->order;
    own.nonce = (uint64_t)dcp__now_ns();
    own.max_tokens = d->max_tokens;
    own.n_heads = d->n_heads;
    own.dim = d->dim;
    own.tile_tokens = m->shape.tile_tokens;
    own.tile_heads = m->shape.tile_heads;
    struct create_record *all = m->records;
    DCP_TRY(dcp__group_record(m->g, &own, sizeof(own), all));
    if (local != DCP_OK) return local;
    for (int r = 0; r < m->n_ranks; r++) {
        if (all[r].status != DCP_OK)
            return peer_refused(m, r, all[r].status, all[r].text, "merge create");
    }
    for (int r = 1; r < m->n_ranks; r++) DCP_TRY(compare_create(m, &all[0], &all[r], r));
    for (int r = 0; r < m->n_ranks; r++) {
        const bool is_less =
            all[r].tile_tokens < m->shape.tile_tokens ||
            (all[r].tile_tokens == m->shape.tile_tokens && all[r].tile_heads < m->shape.tile_heads);
        if (!is_less) continue;
        m->shape.tile_tokens = all[r].tile_tokens;
        m->shape.tile_heads = all[r].tile_heads;
    }
    m->nonce = all[0].nonce;
    return DCP_OK;
}

dcp_status dcp__merge_agree_ready(struct dcp_merge *m, dcp_status local)
{
    struct create_record own;
    memset(&own, 0, sizeof(own));
    own.status = local;
    if (local != DCP_OK) dcp__brief(own.text, sizeof(own.text), dcp_last_error());
    struct create_record *all = m->records;
    DCP_TRY(dcp__group_record(m->g, &own, sizeof(own), all));
    if (local != DCP_OK) return local;
    for (int r = 0; r < m->n_ranks; r++) {
        if (all[r].status != DCP_OK)
            return peer_refused(m, r, all[r].status, all[r].text, "merge create");
    }
    return DCP_OK;
}

/* ---- run ---- */

static void stretch(uint64_t *begin, uint64_t *end, const void *at, int64_t bytes)
{
    if (at == NULL || bytes <= 0) return;
    const uint64_t b = (uint64_t)(uintptr_t)at;
    if (*end == 0 || b < *begin) *begin = b;
    if (b + (uint64_t)bytes > *end) *end = b + (uint64_t)bytes;
}

static int64_t span_bytes(int64_t n_t, int64_t n_h, int64_t ts, int64_t hs, int64_t len,
                          size_t elem_bytes)
{
    if (n_t < 1 || n_h < 1) return 0;
    return ((n_t - 1) * ts + (n_h - 1) * hs + len) * (int64_t)elem_bytes;
}

/* Where this rank's buffers lie, as its peers need it. */
static void fill_places(const struct dcp_merge *m, struct dcp__merge_run *run,
                        struct run_record *rec)
{
    const dcp_merge_desc *d = &m->desc;
    const dcp_merge_args *a = &run->args;
    const int64_t n_tokens = run->n_tokens;
    const int64_t out_bytes = span_bytes(n_tokens, d->n_heads, a->out_token_stride,
                                         a->out_head_stride, d->dim, dcp_dtype_bytes(d->out_type));
    const int64_t lse_bytes = span_bytes(n_tokens, d->n_heads, a->lse_token_stride,
                                         a->lse_head_stride, 1, dcp_dtype_bytes(d->lse_type));
    rec->u.at.out = (struct place){0, a->out_token_stride, a->out_head_stride};
    rec->u.at.lse = (struct place){0, a->lse_token_stride, a->lse_head_stride};
    if (n_tokens == 0) return;
    if (!m->one_space) {
        if (!m->algo->reads_peers) return;
        run->stages_out = !dcp__group_locate(m->g, a->out, (size_t)out_bytes, &rec->u.at.out_id,
                                             &rec->u.at.out.offset);
        run->stages_lse = !dcp__group_locate(m->g, a->lse, (size_t)lse_bytes, &rec->u.at.lse_id,
                                             &rec->u.at.lse.offset);
        if (a->kv_len != NULL &&
            !dcp__group_locate(m->g, a->kv_len, (size_t)n_tokens * sizeof(int64_t),
                               &rec->u.at.kv_id, &rec->u.at.kv_offset))
            run->stages_lse = true;
        if (a->sum != NULL && !dcp__group_locate(m->g, a->sum, (size_t)lse_bytes, &rec->u.at.sum_id,
                                                 &rec->u.at.sum_offset))
            run->stages_lse = true;
        rec->stages_out = run->stages_out;
        rec->stages_lse = run->stages_lse;
        return;
    }
    rec->u.at.out.offset = (uint64_t)(uintptr_t)a->out;
    rec->u.at.lse.offset = (uint64_t)(uintptr_t)a->lse;
    rec->u.at.kv_offset = (uint64_t)(uintptr_t)a->kv_len;
    rec->u.at.sum_offset = (uint64_t)(uintptr_t)a->sum;
    rec->u.at.merged = (struct place){(uint64_t)(uintptr_t)a->merged, a->merged_token_stride,
                                      a->merged_head_stride};
    rec->u.at.merged_lse = (struct place){(uint64_t)(uintptr_t)a->merged_lse,
                                          a->merged_lse_token_stride, a->merged_lse_head_stride};
    uint64_t *rb = &rec->u.at.read_begin;
    uint64_t *re = &rec->u.at.read_end;
    stretch(rb, re, a->out, out_bytes);
    stretch(rb, re, a->lse, lse_bytes);
    stretch(rb, re, a->sum, lse_bytes);
    stretch(rb, re, a->kv_len, n_tokens * (int64_t)sizeof(int64_t));
    const struct dcp__merge_block b =
        dcp__merge_block_got(d->cut, n_tokens, d->n_heads, m->n_ranks, m->rank);
    uint64_t *wb = &rec->u.at.written_begin;
    uint64_t *we = &rec->u.at.written_end;
    stretch(wb, we, a->merged,
            span_bytes(b.t_end - b.t_begin, b.h_end - b.h_begin, a->merged_token_stride,
                       a->merged_head_stride, d->dim, dcp_dtype_bytes(d->merged_type)));
    stretch(wb, we, a->merged_lse,
            span_bytes(b.t_end - b.t_begin, b.h_end - b.h_begin, a->merged_lse_token_stride,
                       a->merged_lse_head_stride, 1, sizeof(float)));
}

static void *address(uint64_t offset)
{
    return (void *)(uintptr_t)offset; /* of this process: see struct place */
}

/* In one address space: no rank's result may lie in another rank's partial. */
static dcp_status refuse_overlaps(const struct dcp_merge *m, const struct dcp__merge_run *run,
                                  const struct run_record *all)
{
    for (int w = 0; w < m->n_ranks; w++) {
        for (int r = 0; r < m->n_ranks; r++) {
            if (w == r || all[w].u.at.written_begin >= all[r].u.at.read_end ||
                all[r].u.at.read_begin >= all[w].u.at.written_end)
                continue;
            const struct dcp__merge_dst dst = {address(all[w].u.at.merged.offset),
                                               all[w].u.at.merged.token_stride,
                                               all[w].u.at.merged.head_stride,
                                               address(all[w].u.at.merged_lse.offset),
                                               all[w].u.at.merged_lse.token_stride,
                                               all[w].u.at.merged_lse.head_stride,
                                               0,
                                               0,
                                               0};
            const struct dcp__merge_src src = {
                address(all[r].u.at.out.offset), all[r].u.at.out.token_stride,
                all[r].u.at.out.head_stride,     address(all[r].u.at.lse.offset),
                all[r].u.at.lse.token_stride,    all[r].u.at.lse.head_stride,
                address(all[r].u.at.kv_offset),  m->desc.lse_type,
                address(all[r].u.at.sum_offset)};
            const char *what = NULL;
            if (dcp__merge_overlaps(m, run, w, &dst, &src, r, &what))
                return dcp__fail(DCP_ERR_ARG,
                                 "merge: the result of rank %d lies in the partial of rank %d: %s "
                                 "(seen by rank %d)",
                                 w, r, what, m->rank);
        }
    }
    return DCP_OK;
}

/* The peers' partials as this rank reads them; staged ones are filled in step by step. */
static dcp_status find_sources(struct dcp_merge *m, struct dcp__merge_run *run,
                               const struct run_record *all)
{
    const dcp_merge_desc *d = &m->desc;
    for (int r = 0; r < m->n_ranks; r++) {
        struct dcp__merge_src *src = &m->srcs[r];
        if (r == m->rank) {
            *src = run->own;
            continue;
        }
        const struct run_record *rec = &all[r];
        memset(src, 0, sizeof(*src));
        src->out_ts = rec->u.at.out.token_stride;
        src->out_hs = rec->u.at.out.head_stride;
        src->lse_ts = rec->u.at.lse.token_stride;
        src->lse_hs = rec->u.at.lse.head_stride;
        src->lse_type = d->lse_type;
        if (run->n_tokens == 0) continue;
        if (!m->algo->sees_all && dcp__host_of(&m->shape, r) != dcp__host_of(&m->shape, m->rank))
            continue; /* nothing of it is read here */
        if (m->one_space) {
            src->out = address(rec->u.at.out.offset);
            src->lse = address(rec->u.at.lse.offset);
            src->kv_len = address(rec->u.at.kv_offset);
            src->sum = address(rec->u.at.sum_offset);
            continue;
        }
        const int64_t out_bytes = span_bytes(run->n_tokens, d->n_heads, src->out_ts, src->out_hs,
                                             d->dim, dcp_dtype_bytes(d->out_type));
        const int64_t lse_bytes = span_bytes(run->n_tokens, d->n_heads, src->lse_ts, src->lse_hs, 1,
                                             dcp_dtype_bytes(d->lse_type));
        bool is_found = true;
        if (!rec->stages_out) {
            src->out = dcp__group_peer_ptr(m->g, r, rec->u.at.out_id, rec->u.at.out.offset,
                                           (size_t)out_bytes);
            is_found = is_found && src->out != NULL;
        }
        if (!rec->stages_lse) {
            src->lse = dcp__group_peer_ptr(m->g, r, rec->u.at.lse_id, rec->u.at.lse.offset,
                                           (size_t)lse_bytes);
            is_found = is_found && src->lse != NULL;
            if (m->math.has_sum) {
                src->sum = dcp__group_peer_ptr(m->g, r, rec->u.at.sum_id, rec->u.at.sum_offset,
                                               (size_t)lse_bytes);
                is_found = is_found && src->sum != NULL;
            }
            if (d->has_kv_len) {
                src->kv_len = dcp__group_peer_ptr(m->g, r, rec->u.at.kv_id, rec->u.at.kv_offset,
                                                  (size_t)run->n_tokens * sizeof(int64_t));
                is_found = is_found && src->kv_len != NULL;
            }
        }
        /* The owner located it in memory that all ranks see: not finding it here is a fault of the
         * group, and this rank cannot take part. */
        if (!is_found)
            return dcp__group_poison(m->g, DCP_ERR_PEER,
                                     "rank %d cannot see the partial of rank %d", m->rank, r);
    }
    return DCP_OK;
}

uint64_t dcp__merge_sink_print(const float *sink, int64_t n)
{
    uint64_t h = DCP__HASH_BEGIN;
    for (int64_t i = 0; i < n; i++) h = dcp__hash_value(h, dcp__f32_bits(sink[i] + 0.0f));
    return h;
}

dcp_status dcp__merge_enter_start(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const dcp_merge_desc *d = &m->desc;
    struct run_record own;
    memset(&own, 0, sizeof(own));
    own.nonce = m->nonce;
    own.n_runs = m->n_runs;
    if (run->local == DCP_OK && d->has_sink)
        own.sink = dcp__merge_sink_print(run->args.sink, d->n_heads);
    own.n_tokens = run->n_tokens;
    own.status = run->local;
    const dcp_merge_args *a = &run->args;
    const bool rows_touch = a->out_head_stride == d->dim;
    own.contiguity = (uint8_t)(!rows_touch                                  ? 0
                               : a->out_token_stride == d->n_heads * d->dim ? 2
                                                                            : 1);
    if (run->local == DCP_OK) {
        fill_places(m, run, &own);
    } else {
        dcp__brief(own.u.text, sizeof(own.u.text), dcp_last_error());
        dcp__brief(m->refusal, sizeof(m->refusal), dcp_last_error());
    }
    return dcp__merge_sync_start(m, run, &own, sizeof(own));
}

static dcp_status agree_on_run(struct dcp_merge *m, struct dcp__merge_run *run)
{
    struct run_record *all = m->records;
    if (run->local != DCP_OK) /* its text, which other calls may have replaced since */
        return dcp__fail(run->local, "%s", m->refusal);
    for (int r = 0; r < m->n_ranks; r++) {
        if (all[r].nonce != m->nonce)
            return dcp__fail(DCP_ERR_MISMATCH,
                             "merge: rank %d calls another merge of this group than rank %d; all "
                             "ranks call the same merges in the same order",
                             r, m->rank);
        if (all[r].n_runs != m->n_runs)
            return dcp__fail(DCP_ERR_MISMATCH,
                             "merge: rank %d is in run %" PRIu64
                             " of this merge, rank %d in %" PRIu64,
                             r, all[r].n_runs, m->rank, m->n_runs);
    }
    for (int r = 0; r < m->n_ranks; r++) {
        if (all[r].status != DCP_OK)
            return peer_refused(m, r, all[r].status, all[r].u.text, "merge");
    }
    run->contiguity = 2;
    for (int r = 0; r < m->n_ranks; r++) {
        if (all[r].n_tokens != all[0].n_tokens)
            return dcp__fail(DCP_ERR_MISMATCH,
                             "merge: ranks disagree on n_tokens: rank 0 has %lld, rank %d has %lld "
                             "(seen by rank %d)",
                             (long long)all[0].n_tokens, r, (long long)all[r].n_tokens, m->rank);
        if (all[r].sink != all[0].sink)
            return dcp__fail(
                DCP_ERR_MISMATCH,
                "merge: ranks disagree on the values of sink: rank 0 and rank %d (seen "
                "by rank %d)",
                r, m->rank);
        run->any_staged = run->any_staged || all[r].stages_out || all[r].stages_lse;
        if (all[r].contiguity < run->contiguity) run->contiguity = all[r].contiguity;
    }
    if (m->one_space && run->n_tokens > 0) DCP_TRY(refuse_overlaps(m, run, all));
    if (m->algo->reads_peers) DCP_TRY(find_sources(m, run, all));
    return DCP_OK;
}

dcp_status dcp__merge_enter_finish(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const dcp_status st = agree_on_run(m, run);
    /* What ranks did not agree on has not been a run: they may have been in calls of two merges,
     * which would count on differently for ever. */
    if (st != DCP_OK) m->n_runs--;
    return st;
}

dcp_status dcp__merge_exit_start(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const struct exit_record own = {run->seen.n_nonfinite, run->seen.n_lse_bad,
                                    run->seen.n_lse_empty, run->seen.t,
                                    run->seen.h,           run->seen.rank};
    return dcp__merge_sync_start(m, run, &own, sizeof(own));
}

dcp_status dcp__merge_exit_finish(struct dcp_merge *m, struct dcp__merge_run *run)
{
    const struct exit_record *all = m->records;
    struct dcp__merge_seen total;
    memset(&total, 0, sizeof(total));
    total.t = -1;
    for (int r = 0; r < m->n_ranks; r++) {
        total.n_lse_bad += all[r].n_lse_bad;
        total.n_lse_empty += all[r].n_lse_empty;
        if (all[r].n_nonfinite != 0)
            dcp__merge_saw(&total, all[r].n_nonfinite, all[r].t, all[r].h, all[r].rank);
    }
    run->stats = (dcp_merge_stats){total.n_nonfinite, total.n_lse_bad, total.n_lse_empty,
                                   run->wire_bytes, run->n_messages};
    if (m->desc.nonfinite == DCP_NONFINITE_ERROR && total.n_nonfinite != 0)
        return dcp__fail(DCP_ERR_NONFINITE,
                         "merge: non-finite value at token %lld, head %lld of rank %lld's partial "
                         "(%lld in all ranks); the result is undefined",
                         (long long)total.t, (long long)total.h, (long long)total.rank,
                         (long long)total.n_nonfinite);
    return DCP_OK;
}
