/* SPDX-License-Identifier: Apache-2.0 */
/* A model on a group of ranks, and a sequence of tokens running through it. Every rank calls the
 * same functions with the same ids. */
#ifndef DCP_ENGINE_SESSION_H
#define DCP_ENGINE_SESSION_H

#include "dcpattn/attend.h"
#include "engine/gguf.h"
#include "engine/linear.h"

struct session;

struct session_opts {
    int n_threads;      /* of this rank; 0 = usable CPUs / ranks of the host, at least 1 */
    int64_t context;    /* tokens; 0 = min(the model's, 8192)?  see session.c */
    int64_t chunk;      /* 0 = 512 */
    int64_t interleave; /* 0 = 1 */
    dcp_dtype kv_dtype; /* DEFAULT = bf16 */
    enum compute_type compute;
    dcp_merge_algo algo;
    dcp_isa isa;
    size_t attend_workspace_bytes; /* 0 = default */
};

/* What a rank owns and what it took; every rank's in rank order after session_report. */
struct session_rank_report {
    int64_t kv_tokens;
    uint64_t kv_bytes, weight_bytes, weight_share_bytes, weight_replicated_bytes, workspace_bytes,
        activation_bytes, peak_rss_bytes, peak_counted_bytes;
    double attend_s, merge_s, gather_s, dense_s, other_s,
        total_s; /* since session_create or session_reset_times */
    uint64_t merge_wire_bytes, other_wire_bytes;
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
 * done. */
typedef dcp_status session_logits_fn(void *ctx, int64_t index, const float *logits);
typedef void session_progress_fn(void *ctx, int64_t done, int64_t total);
dcp_status session_step(struct session *s, const int32_t *ids, int64_t n_ids,
                        session_logits_fn *on_logits, void *logits_ctx,
                        session_progress_fn *progress, void *progress_ctx,
                        const float **logits_out);
/* Forget positions >= length. */
dcp_status session_truncate(struct session *s, int64_t length);
/* Collective: fills reports [group size]. */
dcp_status session_report(struct session *s, struct session_rank_report *reports);
/* Names of the replicated weights and their bytes on this rank, as text for the report ("attn_norm,
 * ffn_norm, attn_k, attn_v"). */
const char *session_replicated_names(const struct session *s);

#endif
