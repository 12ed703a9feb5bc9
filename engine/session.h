/* SPDX-License-Identifier: Apache-2.0 */
/* A model on a group of ranks, and a sequence of tokens running through it. Every rank calls the
 * same functions with the same ids. */
#ifndef DCP_ENGINE_SESSION_H
#define DCP_ENGINE_SESSION_H

#include "dcpattn/attend.h"
#include "engine/gguf.h"
#include "engine/linear.h"
#include "engine/model.h"

struct session;

/* All fields but n_threads, isa and attend_workspace_bytes must be the same on all ranks. */
struct session_opts {
    int n_threads;      /* of this rank; 0 = usable CPUs / ranks of the host, at least 1 */
    int64_t context;    /* tokens; 0 = the model's own: memory comes as the cache grows */
    int64_t chunk;      /* 0 = 512 */
    int64_t interleave; /* 0 = 1 */
    dcp_dtype kv_dtype; /* DEFAULT = bf16 */
    enum compute_type compute;
    dcp_merge_algo algo;
    dcp_isa isa;
    size_t attend_workspace_bytes; /* 0 = default */
    enum mla_form mla;             /* of models with multi-head latent attention */
    int64_t tile_rows; /* of the forward pass between attention; 0 = 512, the chunk at most */
    int tp;            /* head groups: each keeps its KV heads' tokens on ranks / tp ranks; 0 = 1 */
    const int *cpus;   /* [n_cpus] this rank's threads are bound to these (dcp_pool_bind) ... */
    int n_cpus;        /* ... 0 = not bound */
};

/* What a rank owns and what it took; every rank's in rank order after session_report. */
struct session_rank_report {
    int64_t kv_tokens; /* keys of the sequence that this rank owns */
    uint64_t kv_bytes; /* pages in use, all layers */
    int64_t kv_page_tokens;
    /* weight_bytes = share (split) + replicated, as the file stores them; token_embd counts once
     * where it is the output matrix too */
    uint64_t weight_bytes, weight_share_bytes, weight_replicated_bytes;
    uint64_t workspace_bytes;    /* of sharded attention and its merge */
    uint64_t activation_bytes;   /* buffers of the forward pass */
    uint64_t peak_rss_bytes;     /* of the process: ranks that are threads all show the same */
    uint64_t peak_counted_bytes; /* of the process's counted allocations */
    /* Wall time since session_create or session_reset_times. attend = own partials; merge = merging
     * them, waiting for peers included; gather = queries and activations from peers, waiting
     * included; dense = products; other = norms, rotations, gates, the caller's logits functions;
     * they sum to total. */
    double attend_s, merge_s, gather_s, dense_s, other_s, total_s;
    uint64_t merge_wire_bytes, other_wire_bytes; /* of the merge; of all gathers */
    uint64_t kv_huge_bytes;                      /* of the cache's memory, on huge pages */
};

/* Collective. Reads the model's slices for this rank. The gguf may be closed after it. */
dcp_status session_create(dcp_group *g, const struct gguf *file, const struct session_opts *opts,
                          struct session **out);
void session_destroy(struct session *s);
int32_t session_vocab(const struct session *s);
int64_t session_context(const struct session *s);
int64_t session_length(const struct session *s); /* tokens in the cache */
/* Collective: run ids (any number that fits the context, processed in chunks) and give the logits
 * after the last one, or, with all_logits, hand the logits of each position to on_logits on every
 * rank (row i follows ids[i]). logits_out [vocab] points into the session, valid until the next
 * step, whole on every rank. progress (NULL allowed) is called after each chunk with the tokens
 * done.
 *
 * DCP_ERR_NONFINITE: attention, the hidden state or the logits held a NaN or an infinity; the text
 * names where. It comes on all ranks (an on_logits that returns it must do so on all), the sequence
 * is as before the step and the group works on. So a report needs no counts: they are 0 in every
 * step that succeeded. */
typedef dcp_status session_logits_fn(void *ctx, int64_t index, const float *logits);
typedef void session_progress_fn(void *ctx, int64_t done, int64_t total);
dcp_status session_step(struct session *s, const int32_t *ids, int64_t n_ids,
                        session_logits_fn *on_logits, void *logits_ctx,
                        session_progress_fn *progress, void *progress_ctx,
                        const float **logits_out);
/* The times and wire bytes of reports count from here on. */
void session_reset_times(struct session *s);
/* Forget positions >= length. Every rank with the same length. */
dcp_status session_truncate(struct session *s, int64_t length);
/* For benches: keys and values of positions session_length to length - 1 are drawn from a fixed
 * rule (uniform, variance 1, the same for any number of ranks) in place of a prompt's. Local: every
 * rank with the same length. */
dcp_status session_fill(struct session *s, int64_t length);
/* Collective: fills reports [group size]. */
dcp_status session_report(struct session *s, struct session_rank_report *reports);
/* Names of the replicated weights and their bytes on this rank, as text for the report ("attn_norm,
 * ffn_norm, attn_k, attn_v"). */
const char *session_replicated_names(const struct session *s);

#endif
