/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass of a chunk of T tokens on N ranks, in steps that an architecture's block puts
 * together.
 *
 * Every rank holds the residual x [T, d] of all tokens. A product is split by its output columns
 * and the columns are gathered, so that each sum runs whole on one rank and its bits do not depend
 * on N. A layer walks the chunk's rows twice, in tiles of B rows,
 * with attention of all rows between:
 *
 *   before   q       own query heads                 (T, H_r, Dk)
 *            k, v    all KV heads of own tokens      (B_own, Hkv, Dk | D) -> own cache
 *   attention over all ranks' keys, own heads: one call, whatever T
 *   after    o       own heads, gathered to          (B, H, out)
 *            a       output projection, own columns, gathered to (B, d)
 *            h       gated FFN, own columns, gathered to (B, ffn)
 *            a       down projection, own columns, gathered to (B, d)
 *
 *   rows     0         B        2B       T
 *            |-before--|-before-|-before-|  attention  |-after-|-after-|-after-|
 *
 * A step of one token: its owner would make k and v while the others wait at attention's entry. So
 * each rank makes some rows of them, as many as even out its rows of q, and these are gathered; it
 * costs a gather (about 1.5 us where ranks see each other's memory).
 *
 * So what grows with T is x, and attention's own input and result; not the angles of rotations,
 * which a layer makes for its tile. Four gathers a tile besides
 * attention's own exchange. o, a and h lie in group memory, which peers read directly. The last
 * layer computes only the rows whose logits are asked for. */
#ifndef DCP_ENGINE_FORWARD_H
#define DCP_ENGINE_FORWARD_H

#include "dcpattn/attend.h"
#include "engine/elementwise.h"
#include "engine/model.h"

/* B by default: weights are read once a tile,
 * and a tile of as many rows keeps the CPU busy with products. */
enum { FORWARD_TILE_ROWS = 512 };

struct forward_times {
    double attend_s, merge_s, gather_s, dense_s;
    uint64_t merge_wire_bytes, other_wire_bytes;
};

/* Of MLA; absent ones are NULL. */
struct forward_mla {
    float *q_a;        /* (B, q_rank) group memory, gathered */
    float *q_a_normed; /* (B, q_rank) */
    float *q;          /* (B, H_r, nope + rope); absorbed only */
    float *latent;     /* (B_own, kv_rank + rope); expanded only, the absorbed form has it in k */
    size_t *q_a_off;   /* (N + 1) */
};

/* Of experts, P = B * n_used pairs of a token and one of its experts, sorted by expert. */
struct forward_moe {
    float *scores;       /* (B, n_experts) group memory, gathered */
    float *x, *up, *out; /* (B, d), (B, d_expert_r), (B, d_r): the pairs of one expert */
    float *h;            /* (P, d_expert) group memory, gathered */
    float *weights;      /* (P) */
    int32_t *rows;       /* (P) the pair's row of the tile */
    int32_t *first;      /* (n_experts + 1) first pair of each */
    int32_t *chosen;     /* (B, n_used) experts of a token, best first */
    float *chosen_p;     /* (B, n_used) their weights */
    float *shared_h;     /* (B, d_shared) group memory, gathered */
    float *shared_up;    /* (B, d_shared_r) */
    size_t *scores_off, *h_off, *shared_off; /* (N + 1) */
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
    int64_t tile_rows;              /* B: rows of a tile, C at most */

    /* the chunk */
    int64_t n_tokens, pos0; /* T; position of its first token */
    int64_t own_local;      /* local index of the first token that this rank owns */
    int32_t *own_rows;      /* (C) which rows of the chunk it owns */
    int64_t live0;          /* rows that go on after attention: from here to T */
    bool needs_all_rows;
    /* the tile: rows [row0, row0 + n_rows) of the chunk, and own tokens among them */
    int64_t row0, n_rows;
    int64_t own_at, n_own; /* own_rows[own_at ...] */

    /* buffers; those in tiles begin with the tile's first row */
    float *x;      /* (C, d) residual */
    float *q;      /* (C, H_r, Dk) from row live0 on */
    float *attn;   /* (C, H_r, D) attention's result from row live0 on; NULL where it goes into o */
    float *y;      /* (B, d) normed */
    float *y_own;  /* (B_own, d) normed rows of own tokens; NULL where one rank owns all */
    float *k, *v;  /* (B_own, Hkv, Dk), (B_own, Hkv, D); v NULL where the cache is latent */
    float *kv;     /* (Hkv (Dk + D)) group memory, gathered: k, then v of a step's only token; NULL
                      where its owner makes them alone */
    float *o;      /* (B, H, out) group memory, gathered */
    float *a;      /* (B, d) group memory, gathered */
    float *h;      /* (B, ffn) group memory, gathered */
    float *up;     /* (B, ffn_r) */
    float *logits; /* (logit_rows, vocab) group memory, gathered */
    int64_t logit_rows;
    double *turns[MAX_ROPES];        /* [rope_dims / 2, 2], see ew_rope_turns */
    float *cos_sin[MAX_ROPES];       /* (B, rope_dims) the angles of a tile's positions ... */
    int64_t cos_sin_row0[MAX_ROPES]; /* ... which begins at this row of the chunk; -1 none */
    int32_t *slots;                  /* (B) row of each token's embedding in the packed gather */
    struct forward_mla mla;
    struct forward_moe moe;

    /* (N + 1) where each rank's columns begin, in bytes of a row */
    size_t *embd_off, *kv_off, *o_off, *cols_off, *ffn_off, *vocab_off;
    size_t activation_bytes;
    struct forward_times times;
};

/* Bytes of the buffers that init takes for this rank, logits of one row included. */
size_t forward_bytes(const struct model *m, int64_t interleave, int64_t max_tokens,
                     int64_t tile_rows);
/* Buffers for chunks of max_tokens; group, model, pool, linear, attend, cache, interleave,
 * max_tokens and tile_rows are set by the caller before. The first part is local, so that its
 * failure can be told to peers before they wait; the second is collective. */
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
/* Collective: logits [n, vocab] of rows first..first+n-1 of the chunk into f->logits; n at most
 * tile_rows. DCP_ERR_NONFINITE as above. */
dcp_status forward_logits(struct forward *f, int64_t first, int64_t n);

/* --- steps of a layer: each works on the tile --- */

/* y = norm(x) * w. */
void forward_norm(struct forward *f, const float *w);
/* q of own heads, k and v of own tokens, from y; biases added where the layer has them. */
dcp_status forward_qkv(struct forward *f, int64_t l);
/* q, k each head normed by w->q_norm, w->k_norm. */
void forward_qk_norm(struct forward *f, int64_t l);
/* The angles of rope number i for the tile's rows: (n_rows, rope_dims). Made where they are not
 * there yet: once a chunk that is one tile, else once a layer and tile, which is little beside the
 * layer's products. */
const float *forward_angles(struct forward *f, int i);
/* Rotates q and k. */
void forward_rope(struct forward *f, int64_t l);
/* Stores k and v. */
dcp_status forward_store(struct forward *f, int64_t l);
/* All of the above for MLA. */
dcp_status forward_mla(struct forward *f, int64_t l);
/* a (n_rows, d) whole = o wo^T (+ bo), o being attention's result. */
dcp_status forward_attn_out(struct forward *f, int64_t l);
/* a (n_rows, d) whole = down(act(gate y) * up y). */
dcp_status forward_ffn(struct forward *f, int64_t l);
/* a (n_rows, d) whole = the chosen experts of each row, weighted, and the shared ones. */
dcp_status forward_experts(struct forward *f, int64_t l);
/* x += a, or norm(a) * w where w is not NULL. */
void forward_add(struct forward *f, const float *w);

#endif
