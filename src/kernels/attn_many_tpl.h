/* SPDX-License-Identifier: Apache-2.0 */
/* Many rows: prompts, and latent caches with many heads. Part of attn_tpl.h.
 *
 * Bound by products. A block's keys are packed once for all rows of the tile, a panel at a time
 * that stays in L1 while the rows pass by, 6 at once (6 x VF_PANEL sums in registers):
 *
 *     for each panel of keys, each CHUNK of dims:  pack K;  S += q K^T  for all rows
 *     softmax of all rows
 *     for each panel of value dims:                pack V;  o = o * rescale + P V  for all rows
 *
 * Meanwhile the next block's rows are asked for, a line every few products. */
#ifndef DCP_KERNELS_ATTN_MANY_TPL_H
#define DCP_KERNELS_ATTN_MANY_TPL_H

/* Lines of the next block that are still to be asked for. */
struct lines {
    const char *const *row;
    int64_t at, n_bytes;
};
struct fetch {
    struct lines k, v;
    int64_t n_k, n_v; /* lines */
    int64_t a_slot;   /* lines each time */
};
enum { SLOT = 8 }; /* dims or keys between two slots */
ATTN_INLINE void fetch_slot(struct fetch *fetch)
{
    for (int64_t i = 0; i < fetch->a_slot; i++) {
        struct lines *const ahead = fetch->n_k > 0 ? &fetch->k : &fetch->v;
        int64_t *const n = fetch->n_k > 0 ? &fetch->n_k : &fetch->n_v;
        if (*n <= 0) return;
        --*n;
        __builtin_prefetch(*ahead->row + ahead->at, 0, 2);
        ahead->at += 64;
        if (ahead->at >= ahead->n_bytes) {
            ahead->at = 0;
            ahead->row++;
        }
    }
}

/* s[r][0..PANEL) += sum over n_d dims of q[d][r] * kt[d][.], from 0 on if is_first. */
ATTN_INLINE void many_scores_n(int n, const float *q, const float *kt, int64_t n_d, bool is_first,
                               float *s, struct fetch *fetch)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int i = 0; i < n * VF_PANEL; i++)
    {
        acc[i / VF_PANEL][i % VF_PANEL] =
            is_first ? vf_set1(0.0f) : vf_load(s + i / VF_PANEL * KEYS + i % VF_PANEL * VF_LANES);
    }
    for (int64_t d0 = 0; d0 < n_d; d0 += SLOT) {
        fetch_slot(fetch);
        const int64_t end = attn_min(d0 + SLOT, n_d);
        for (int64_t d = d0; d < end; d++) {
            vf k[VF_PANEL];
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
            {
                k[x] = vf_load(kt + d * PANEL + x * VF_LANES);
            }
            VF_UNROLL for (int r = 0; r < n; r++)
            {
                const vf one_q = vf_set1(q[d * MR + r]);
                VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
                {
                    acc[r][x] = vf_fma(one_q, k[x], acc[r][x]);
                }
            }
        }
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            vf_store(s + r * KEYS + x * VF_LANES, acc[r][x]);
        }
    }
}
/* o[r][0..PANEL) = o * rescale[r] + sum over keys [first, end) of p[r][key] * v[key][.] */
ATTN_INLINE void many_values_n(int n, const float *p, const float *v, const struct span *span,
                               float *o, int64_t o_pitch, struct fetch *fetch)
{
    vf acc[MR][VF_PANEL];
    VF_UNROLL for (int i = 0; i < n * VF_PANEL; i++)
    {
        acc[i / VF_PANEL][i % VF_PANEL] = vf_set1(0.0f);
    }
    for (int64_t i0 = span->first; i0 < span->end; i0 += SLOT) {
        fetch_slot(fetch);
        const int64_t end = attn_min(i0 + SLOT, span->end);
        for (int64_t i = i0; i < end; i++) {
            vf value[VF_PANEL];
            VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
            {
                value[x] = vf_load(v + i * PANEL + x * VF_LANES);
            }
            VF_UNROLL for (int r = 0; r < n; r++)
            {
                const vf weight = vf_set1(p[r * KEYS + i]);
                VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
                {
                    acc[r][x] = vf_fma(weight, value[x], acc[r][x]);
                }
            }
        }
    }
    VF_UNROLL for (int r = 0; r < n; r++)
    {
        const vf factor = vf_set1(span[r].rescale);
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            float *const at = o + r * o_pitch + x * VF_LANES;
            vf_store(at, vf_fma(vf_load(at), factor, acc[r][x]));
        }
    }
}
ATTN_NOINLINE void many_scores(int n, const float *q, const float *kt, int64_t n_d, bool is_first,
                               float *s, struct fetch *fetch){
#define ATTN_CALL(c) many_scores_n(c, q, kt, n_d, is_first, s, fetch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
} ATTN_NOINLINE void many_values(int n, const float *p, const float *v, const struct span *span,
                                 float *o, int64_t o_pitch, struct fetch *fetch){
#define ATTN_CALL(c) many_values_n(c, p, v, span, o, o_pitch, fetch)
    ATTN_ROWS_SWITCH(n, ATTN_CALL)
#undef ATTN_CALL
}

/* Dims [d0, d0 + n_d) of PANEL keys to kt [n_d][PANEL]. */
ATTN_INLINE
    void pack_keys(const char *const *rows, int64_t d0, int64_t n_d, dcp_dtype dtype, float *kt)
{
    const int64_t step = key_dims(dtype);
    for (int64_t x = 0; x < PANEL; x += VF_LANES) {
        int64_t d = d0;
        float *to = kt + x;
        for (; d + step <= d0 + n_d; d += step, to += step * PANEL)
            pack_key_dims(rows + x, d, step, true, dtype, to, PANEL);
        if (d < d0 + n_d) pack_key_dims(rows + x, d, d0 + n_d - d, false, dtype, to, PANEL);
    }
}
/* Dims [d, d + PANEL) of value rows [first, end) of the block to v [KEYS][PANEL], zeros from dv on.
 */
ATTN_INLINE void pack_values(const char *const *rows, int64_t first, int64_t end, int64_t d,
                             int64_t dv, dcp_dtype dtype, float *v)
{
    for (int64_t i = first; i < end; i++) {
        __builtin_prefetch(rows[i + 8] + d * bytes_of(dtype));
        __builtin_prefetch(rows[i + 8] + d * bytes_of(dtype) + 64);
        VF_UNROLL for (int x = 0; x < VF_PANEL; x++)
        {
            const int64_t at = d + x * VF_LANES;
            const int64_t n = dv - at;
            vf value = vf_set1(0.0f);
            if (n >= VF_LANES)
                value = load_value(rows[i], at, dtype);
            else if (n > 0)
                value = load_value_n(rows[i], at, n, dtype);
            vf_store(v + i * PANEL + x * VF_LANES, value);
        }
    }
}

/* The block at begin, its rows in tile->rows[at]. */
ATTN_INLINE void many_block(struct tile *tile, int64_t begin, int at, struct fetch *fetch,
                            dcp_dtype dtype)
{
    const struct block_rows *const rows = &tile->rows[at];
    for (int64_t key = 0; key < KEYS; key += PANEL) {
        for (int64_t d = 0; d < tile->dk; d += CHUNK) {
            const int64_t n_d = attn_min(CHUNK, tile->dk - d);
            pack_keys(rows->k + key, d, n_d, dtype, tile->packed);
            for (int64_t r = 0; r < tile->n_rows; r += MR) {
                const int n = (int)attn_min(MR, tile->n_rows - r);
                if (!sees_any(tile, r, n, begin)) continue;
                many_scores(n, tile->q + r * tile->dk + d * MR, tile->packed, n_d, d == 0,
                            tile->s + r * KEYS + key, fetch);
            }
        }
    }
    if (tile->has_scales) find_scales(tile, begin, dtype);
    weigh_rows(tile, begin, tile->s);
    const int64_t first = attn_max(tile->lo - begin, 0);
    const int64_t end = attn_min(tile->hi - begin, KEYS);
    for (int64_t d = 0; d < tile->dv; d += PANEL) {
        pack_values(rows->v, first, end, d, tile->dv, dtype, tile->packed);
        for (int64_t r = 0; r < tile->n_rows;) {
            const int run = run_of_rows(tile, r, tile->n_rows);
            if (tile->span[r].first < tile->span[r].end)
                many_values(run, tile->s + r * KEYS, tile->packed, tile->span + r,
                            tile->o + r * tile->dv_pad + d, tile->dv_pad, fetch);
            r += run;
        }
    }
}

ATTN_INLINE void attend_many(struct tile *tile, dcp_dtype dtype)
{
    const int64_t elem = bytes_of(dtype);
    const int64_t k_bytes = tile->dk * elem;
    const int64_t v_bytes = tile->dv * elem;
    const bool has_values = tile->job->view->k_base != tile->job->view->v_base;
    const int64_t n_k = KEYS * ((k_bytes + 63) / 64);
    const int64_t n_v = has_values ? KEYS * ((v_bytes + 63) / 64) : 0;
    const int64_t slots = (tile->n_rows + MR - 1) / MR *
                          (tile->dk * (KEYS / PANEL) + (tile->dv + PANEL - 1) / PANEL * KEYS) /
                          SLOT;
    int at = 0;
    int64_t begin = next_block(tile, tile->lo / KEYS * KEYS);
    if (begin >= tile->hi) return;
    find_rows(tile, begin, elem, &tile->rows[0]);
    while (begin < tile->hi) {
        const int64_t next = next_block(tile, begin + KEYS);
        struct fetch fetch = {.a_slot = 0};
        if (next < tile->hi) find_rows(tile, next, elem, &tile->rows[at ^ 1]);
        link_rows(&tile->rows[at], &tile->rows[next < tile->hi ? at ^ 1 : at]);
        if (next < tile->hi) {
            fetch = (struct fetch){
                .k = {tile->rows[at ^ 1].k, 0, k_bytes},
                .v = {tile->rows[at ^ 1].v, 0, v_bytes},
                .n_k = n_k,
                .n_v = n_v,
                .a_slot = (n_k + n_v + slots - 1) / attn_max(slots, 1),
            };
        }
        many_block(tile, begin, at, &fetch, dtype);
        begin = next;
        at ^= 1;
    }
}

#endif
