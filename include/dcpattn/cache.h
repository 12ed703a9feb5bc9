/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded, paged KV cache of one rank, and views over anybody's. */
#ifndef DCPATTN_CACHE_H
#define DCPATTN_CACHE_H

#include "dcpattn/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A rank's keys and values of one sequence and one layer, as attention reads them. Local index i
 * (see shard.h) lives in page pages[i / page_tokens], slot i % page_tokens. Element (slot, kv head
 * g, dim d) of K is at (const char*)k_base + pages[.] * page_stride_bytes + (slot * k_slot_stride +
 * g * k_head_stride + d) * elemsize. V likewise. */
typedef struct dcp_kv_view {
    const void *k_base,
        *v_base;          /**< latent caches: v_base = k_base (V is the first D columns of K) */
    const int32_t *pages; /**< [ceil(n_keys / page_tokens)] */
    int64_t page_tokens;
    int64_t k_page_stride_bytes, v_page_stride_bytes;
    int64_t k_slot_stride, k_head_stride; /**< elements */
    int64_t v_slot_stride, v_head_stride;
    int64_t n_keys; /**< keys of this rank */
    dcp_dtype dtype;
} dcp_kv_view;

typedef struct dcp_cache dcp_cache;

typedef struct dcp_cache_desc {
    size_t struct_size;
    int n_ranks, rank;
    int64_t interleave; /**< I >= 1 (0 = 1) */
    int64_t n_layers;
    int64_t n_kv_heads; /**< Hkv */
    int64_t key_dim;    /**< Dk */
    int64_t value_dim;  /**< D; latent: the first value_dim columns of K, nothing is stored twice */
    uint32_t latent;
    dcp_dtype dtype;     /**< default bf16 */
    int64_t page_tokens; /**< 0 = 64 */
    int64_t
        max_tokens; /**< of all sequences together, global count: address space is reserved for this
                       rank's share (with slack of a page a sequence), memory comes as it grows */
    int64_t max_seqs; /**< 0 = 1 */
} dcp_cache_desc;
#define DCP_CACHE_DESC_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_cache_desc), 1, 0, 1, 0, 0, 0, 0, 0, DCP_DTYPE_DEFAULT, 0, 0, 0                 \
    }

DCP_API dcp_status dcp_cache_create(const dcp_cache_desc *desc, dcp_cache **cache_out);
DCP_API void dcp_cache_destroy(dcp_cache *c);
/** Make room for n_tokens more global positions of seq on this rank (all layers). */
DCP_API dcp_status dcp_cache_extend(dcp_cache *c, int64_t seq, int64_t n_tokens);
/** Global length of seq. */
DCP_API int64_t dcp_cache_length(const dcp_cache *c, int64_t seq);
/** Store own tokens of one layer. k [n, Hkv, Dk], v [n, Hkv, D] float, token strides in elements;
 * row j is local index local_begin + j. The positions must have been made room for. v is ignored
 * for latent caches. */
DCP_API dcp_status dcp_cache_store(dcp_cache *c, int64_t seq, int64_t layer, int64_t local_begin,
                                   int64_t n, const float *k, int64_t k_token_stride,
                                   const float *v, int64_t v_token_stride);
/** Forget positions >= length.  */
DCP_API dcp_status dcp_cache_truncate(dcp_cache *c, int64_t seq, int64_t length);
/** dst becomes a copy of the first length tokens of src: full pages are shared, the last partial
 * one is copied. */
DCP_API dcp_status dcp_cache_fork(dcp_cache *c, int64_t src, int64_t dst, int64_t length);
/** The view of seq in layer; valid until the sequence is next changed. */
DCP_API dcp_status dcp_cache_view(const dcp_cache *c, int64_t seq, int64_t layer,
                                  dcp_kv_view *view_out);
/** Bytes of KV this rank has committed for seq (pages x page bytes x layers), or all sequences for
 * seq = -1. */
DCP_API size_t dcp_cache_bytes(const dcp_cache *c, int64_t seq);

#ifdef __cplusplus
}
#endif
#endif
