/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded, paged KV cache of one rank, and views over anybody's.
 *
 * Every rank makes one cache with the same description, its own `rank` apart, and makes the same
 * calls: lengths are global, and each rank keeps the positions that dcp_pos_owner gives it. A
 * sequence grows in three steps per chunk of new tokens:
 *
 *     dcp_cache_extend(c, seq, n_new);                    make room, once for all layers
 *     own = [dcp_local_length(old), dcp_local_length(old + n_new))      may be empty
 *     for each layer:
 *         dcp_cache_store(c, seq, layer, own.begin, own.end - own.begin, k, ks, v, vs);
 *         dcp_cache_view(c, seq, layer, &view);           what dcp_attend_run reads,
 *         dcp_cache_scales(c, seq, layer, &scales);       and its args.scales: int8, fp8 need them
 *
 * Nothing here is collective and nothing waits; ranks that make the same calls fail alike, as the
 * limits are global counts (memory that the system refuses apart). One thread at a time per cache.
 *
 * Layout: a page holds page_tokens local positions of all layers.
 *
 *     page     | layer 0: K, V | layer 1: K, V | ...             page p at base + p * page bytes
 *     K        [KV head][slot][key_dim]                          one head's keys are one run
 *     V        [KV head][slot][value_dim]                        absent where latent
 *
 * int8 and fp8 caches hold a number per element and a scale (f32) per token and KV head, for K and
 * V apart: the element is their product, and a view of them alone is refused. The scales follow the
 * numbers of a page and layer:
 *
 *     K codes | K scales [KV head][slot] | V codes | V scales [KV head][slot]
 *
 * See docs/CACHE.md. */
#ifndef DCPATTN_CACHE_H
#define DCPATTN_CACHE_H

#include "dcpattn/shard.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A rank's keys and values of one sequence and one layer, as attention reads them. Local index i
 * (see shard.h) lives in page pages[i / page_tokens], slot i % page_tokens. Element (slot, kv head
 * g, dim d) of K is at (const char*)k_base + pages[.] * page_stride_bytes + (slot * k_slot_stride +
 * g * k_head_stride + d) * elemsize. V likewise. The layout of this struct is fixed; what int8 and
 * fp8 need besides is a struct of its own, dcp_kv_scales. */
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

/** Scales of an int8 or fp8 view, over the view's pages: K's element (slot, g, d) of a page is its
 * number times the scale at (const char*)k_base + pages[.] * k_page_stride_bytes + (slot *
 * k_slot_stride + g * k_head_stride) * elemsize. V likewise. They may lie in the view's own pages
 * or in arrays of their own, and a stride of 0 shares them:
 *
 *     a scale per                 page stride   slot stride   head stride
 *     token and KV head           given         given         given
 *     KV head, fixed              0             0             given
 *     tensor, fixed               0             0             0
 *
 * k_base = NULL: there are none, as of f32, f16 and bf16 (dcp_cache_scales gives that); an int8 or
 * fp8 view is refused then. fp8 numbers that are the values themselves have one scale for all:
 *
 *     static const float one = 1.0f;
 *     dcp_kv_scales scales = {.k_base = &one, .v_base = &one};
 *
 * Latent views: v_base = k_base, V's strides are K's. The layout of this struct is fixed. */
typedef struct dcp_kv_scales {
    const void *k_base, *v_base;
    int64_t k_page_stride_bytes, v_page_stride_bytes;
    int64_t k_slot_stride, k_head_stride; /**< scales */
    int64_t v_slot_stride, v_head_stride;
    dcp_dtype dtype; /**< f32 (also DEFAULT), f16 or bf16 */
} dcp_kv_scales;

typedef struct dcp_cache dcp_cache;

/** What a cache is; all but `rank` must be the same on all ranks. 0 where a default is named. Grows
 * at its end: a caller's shorter one counts as 0 there, a longer one is taken if the rest is 0. */
typedef struct dcp_cache_desc {
    size_t struct_size; /**< sizeof(dcp_cache_desc); DCP_CACHE_DESC_INIT sets it */
    int n_ranks, rank;
    int64_t interleave; /**< I >= 1 (0 = 1) */
    int64_t n_layers;
    int64_t n_kv_heads; /**< Hkv */
    int64_t key_dim;    /**< Dk */
    int64_t value_dim;  /**< D; latent: the first value_dim columns of K, nothing is stored twice */
    uint32_t latent;
    dcp_dtype dtype;     /**< f32, f16, bf16 (default), int8, fp8 */
    int64_t page_tokens; /**< a multiple of 32; 0: 64, or a power of two up to 1,024 that is at most
                            1/32 of max_tokens / max_seqs / n_ranks (longer runs read faster) */
    int64_t max_tokens;  /**< of all sequences together, global count, a fork's share counted again:
                            address space is reserved for this rank's part (with slack of a page a
                            sequence), memory comes as it grows */
    int64_t max_seqs;    /**< sequences are 0..max_seqs-1, all empty at first; 0 = 1 */
} dcp_cache_desc;
#define DCP_CACHE_DESC_INIT                                                                        \
    {                                                                                              \
        sizeof(dcp_cache_desc), 1, 0, 1, 0, 0, 0, 0, 0, DCP_DTYPE_DEFAULT, 0, 0, 0                 \
    }

/** Makes an empty cache: reserves address space, commits no page.
 *  @param[in]  desc
 *  @param[out] cache_out  written on success only
 *  @return DCP_OK; DCP_ERR_ARG (a field out of range, named); DCP_ERR_NOMEM (address space)
 *  Ownership: the caller destroys it.  Threads: any.  Collective: no. */
DCP_API dcp_status dcp_cache_create(const dcp_cache_desc *desc, dcp_cache **cache_out);
/** Frees the cache; every view of it dies.
 *  @param[in] c  NULL allowed
 *  Threads: one per handle.  Collective: no. */
DCP_API void dcp_cache_destroy(dcp_cache *c);
/** Makes room for n_tokens more global positions of seq on this rank, in all layers. A last page
 *  that is shared with another sequence is copied first. Pages never move; views of seq must be
 *  taken anew, as its block table may.
 *  @param[in,out] c  the cache
 *  @param[in] seq  0 .. max_seqs-1
 *  @param[in] n_tokens >= 0
 *  @return DCP_OK; DCP_ERR_ARG (no such seq; max_tokens exceeded, with the counts);
 *          DCP_ERR_NOMEM; on failure nothing has changed
 *  Threads: one per handle.  Collective: no, but called alike by all ranks. */
DCP_API dcp_status dcp_cache_extend(dcp_cache *c, int64_t seq, int64_t n_tokens);
/** The global length of seq.
 *  @param[in] c, seq
 *  @return the length; -1 if there is no such sequence
 *  Threads: one per handle.  Collective: no. */
DCP_API int64_t dcp_cache_length(const dcp_cache *c, int64_t seq);
/** Stores own tokens of one layer; row j is local index local_begin + j, rounded to the cache's
 *  type (nearest even).
 *  Math: int8 and fp8, for each token, KV head, K and V, with m = the largest magnitude of the row:
 *        int8  scale = m / 127                           number = x * (127 / m), rounded
 *        fp8   scale = 2^e, the least with m / 2^e <= 448   number = x / 2^e, rounded to e4m3
 *        m < 2^-100: a row of zeros. NaN or an infinity in the row: the scale is NaN, and so is
 *        every element.
 *  @param[in,out] c, seq, layer  where to
 *  @param[in] local_begin, n  within the room made by dcp_cache_extend; n = 0 is legal
 *  @param[in] k  [n, Hkv, Dk] f32, rows k_token_stride elements apart; 0 = contiguous
 *  @param[in] v  [n, Hkv, D] f32, rows v_token_stride apart, likewise; ignored where
 *                latent
 *  @return DCP_OK; DCP_ERR_ARG (range, NULL, stride), then nothing is written; DCP_ERR_NOMEM (a
 *          page shared with a fork had to be copied)
 *  Ownership: borrows k and v for the call.  Threads: one per handle.  Collective: no. */
DCP_API dcp_status dcp_cache_store(dcp_cache *c, int64_t seq, int64_t layer, int64_t local_begin,
                                   int64_t n, const float *k, int64_t k_token_stride,
                                   const float *v, int64_t v_token_stride);
/** Forgets positions >= length (a length beyond the sequence's changes nothing); 0 empties it.
 *  Pages that no sequence uses any more are kept for the next growth.
 *  @param[in,out] c, seq
 *  @param[in] length  >= 0, global
 *  @return DCP_OK; DCP_ERR_ARG (no such seq, negative length)
 *  Threads: one per handle.  Collective: no, but called alike by all ranks. */
DCP_API dcp_status dcp_cache_truncate(dcp_cache *c, int64_t seq, int64_t length);
/** Makes dst a copy of the first length tokens of src: full pages are shared, the last partial
 *  one is copied. What dst held is forgotten.
 *  @param[in,out] c, src, dst  two sequences of the cache
 *  @param[in] length  0 .. length of src, global
 *  @return DCP_OK; DCP_ERR_ARG (no such sequence, length, max_tokens); DCP_ERR_NOMEM; on failure
 *          dst is unchanged
 *  Threads: one per handle.  Collective: no, but called alike by all ranks. */
DCP_API dcp_status dcp_cache_fork(dcp_cache *c, int64_t src, int64_t dst, int64_t length);
/** Describes seq in layer as attention reads it; int8 and fp8 together with dcp_cache_scales.
 *  @param[in]  c, seq, layer
 *  @param[out] view_out  written on success only; n_keys counts the room made, stored or not
 *  @return DCP_OK; DCP_ERR_ARG (no such seq or layer, NULL)
 *  Ownership: valid until the sequence is next changed (extend, store, truncate, fork into it).
 *  Stores into room that is there keep it valid unless a shared page is written.
 *  Threads: one per handle.  Collective: no. */
DCP_API dcp_status dcp_cache_view(const dcp_cache *c, int64_t seq, int64_t layer,
                                  dcp_kv_view *view_out);
/** The scales of seq in layer, for the view of dcp_cache_view.
 *  @param[in]  c, seq, layer
 *  @param[out] scales_out  written on success only; k_base = NULL where the cache's type has none
 *  @return DCP_OK; DCP_ERR_ARG (no such seq or layer, NULL)
 *  Ownership: valid as long as that view.
 *  Threads: one per handle.  Collective: no. */
DCP_API dcp_status dcp_cache_scales(const dcp_cache *c, int64_t seq, int64_t layer,
                                    dcp_kv_scales *scales_out);
/** Bytes of KV that this rank holds for seq (pages x page bytes x layers; shared pages count in
 *  each sequence), or in pages used by any sequence for seq = -1 (each page once).
 *  @param[in] c, seq
 *  @return the bytes; 0 for no such seq
 *  Threads: one per handle.  Collective: no. */
DCP_API size_t dcp_cache_bytes(const dcp_cache *c, int64_t seq);
/** Bytes of this cache's memory that lie on huge pages at this moment, as the system says.
 *  @param[in] c  NULL allowed
 *  @return the bytes; 0 where the system does not tell
 *  Threads: one per handle.  Collective: no.  Cost: reads /proc/self/smaps, some milliseconds. */
DCP_API size_t dcp_cache_huge_bytes(const dcp_cache *c);

#ifdef __cplusplus
}
#endif
#endif
