/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass of a chunk of T tokens on N ranks, in steps that an architecture's block puts
 * together.
 *
 * Every rank holds the residual x [T, d] of all tokens. A product is split by its output columns
 * and the columns are gathered, so that each sum runs whole on one rank and its bits do not depend
 * on N:
 *
 *   q       own query heads of all tokens           (T, H_r, Dk)
 *   k, v    all KV heads of the own tokens only     (T_own, Hkv, Dk | D)  -> own cache
 *   o       attention over all ranks' keys, own heads, gathered to (T, H, D)
 *   a       output projection, own columns, gathered to (T, d)
 *   h       gated FFN, own columns, gathered to (T, ffn)
 *   a       down projection, own columns, gathered to (T, d)
 *
 * Four gathers a layer besides attention's own exchange. o, a and h lie in group memory, which
 * peers read directly. The last layer computes only the rows whose logits are asked for. */
#ifndef DCP_ENGINE_FORWARD_H
#define DCP_ENGINE_FORWARD_H

#include "dcpattn/attend.h"
#include "engine/elementwise.h"
#include "engine/model.h"

struct forward_times {
    double attend_s, merge_s, gather_s, dense_s;
    uint64_t merge_wire_bytes, other_wire_bytes;
};

/* What a rank computes with; the session owns all of it. */
struct forward {
    dcp_group *group;
    const struct model *model;
    struct dcp_pool *pool;
    struct linear *linear;
    dcp_attend *attend;
    dcp_cache *cache;
    int64_t interleave, max_tokens; /* I; C: tokens of the largest chunk */

    /* the chunk */
    int64_t n_tokens, pos0;   /* T; position of its first token */
    int64_t n_own, own_local; /* tokens that this rank owns; local index of the first */
    int32_t *own_rows;        /* (C) which rows of the chunk they are */
    int64_t row0, n_rows;     /* rows that go on: all, in the last layer only those needed */
    bool needs_all_rows;

    /* buffers; R = n_rows */
    float *x;      /* (C, d) residual */
    float *y;      /* (C, d) normed */
    float *y_own;  /* (C_own, d) normed rows of own tokens; NULL where one rank owns all */
    float *q;      /* (C, H_r, Dk) */
    float *k, *v;  /* (C_own, Hkv, Dk), (C_own, Hkv, D) */
    float *o;      /* (C, H, D) group memory, gathered */
    float *a;      /* (C, d) group memory, gathered */
    float *h;      /* (C, ffn) group memory, gathered */
    float *up;     /* (C, ffn_r) */
    float *logits; /* (logit_rows, vocab) group memory, gathered */
    int64_t logit_rows;
    float *cos_sin[MAX_ROPES]; /* (C, rope_dims) */
    int32_t *slots;            /* (C) row of each token's embedding in the packed gather */

    /* (N + 1) where each rank's columns begin, in bytes of a row */
    size_t *embd_off, *o_off, *cols_off, *ffn_off, *vocab_off;
    size_t activation_bytes;
    struct forward_times times;
};

/* Buffers for chunks of max_tokens; group, model, pool, linear, attend, cache, interleave and
 * max_tokens are set by the caller before. The first part is local, so that its failure can be told
 * to peers before they wait; the second is collective. */
dcp_status forward_init_own(struct forward *f);
dcp_status forward_init_group(struct forward *f);
void forward_fini(struct forward *f); /* collective where the group still works */
/* Collective: room for the logits of n_rows rows at a time. */
dcp_status forward_reserve_logits(struct forward *f, int64_t n_rows);

/* Collective: ids [n] at positions pos0.. through all layers; the cache has room for them. After
 * it, x holds the rows that were needed: all, or the last one only. DCP_ERR_NONFINITE names the
 * layer and the positions; it comes on all ranks, and the group works on. */
dcp_status forward_chunk(struct forward *f, const int32_t *ids, int64_t n, int64_t pos0,
                         bool needs_all_rows);
/* Collective: logits [n, vocab] of rows first..first+n-1 of the chunk into f->logits.
 * DCP_ERR_NONFINITE as above. */
dcp_status forward_logits(struct forward *f, int64_t first, int64_t n);

/* --- steps of a block --- */

/* y = norm(x) * w of the rows in work. */
void forward_norm(struct forward *f, const float *w);
/* q of own heads, k and v of own tokens, from y; biases added where the layer has them. Decides
 * which rows go on. */
dcp_status forward_qkv(struct forward *f, int64_t l);
/* q, k each head normed by w->q_norm, w->k_norm. */
void forward_qk_norm(struct forward *f, int64_t l);
/* Rotates q and k. */
void forward_rope(struct forward *f, int64_t l);
/* Stores k and v, attends; o (R, H, D) whole. */
dcp_status forward_attend(struct forward *f, int64_t l);
/* a (R, d) whole = o wo^T (+ bo). */
dcp_status forward_attn_out(struct forward *f, int64_t l);
/* a (R, d) whole = down(act(gate y) * up y). */
dcp_status forward_ffn(struct forward *f, int64_t l);
/* x += a, or norm(a) * w where w is not NULL. */
void forward_add(struct forward *f, const float *w);

#endif
