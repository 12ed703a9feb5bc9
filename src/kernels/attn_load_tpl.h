/* SPDX-License-Identifier: Apache-2.0 */
/* Natural rows of keys and values to vectors of floats: the one place of the attention kernels
 * where element types matter. Part of attn_tpl.h. */
#ifndef DCP_KERNELS_ATTN_LOAD_TPL_H
#define DCP_KERNELS_ATTN_LOAD_TPL_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attn_view.h"

#define ATTN_INLINE static inline __attribute__((always_inline))
#define ATTN_NOINLINE static __attribute__((noinline))

ATTN_INLINE int64_t bytes_of(dcp_dtype dtype)
{
    return attn_elem_bytes(dtype);
}
/* int8 and fp8: what loads give is a power of two off, but for whole vectors of int8; the scales,
 * which meet the scores and the weights in attn_softmax_tpl.h, make up for it (find_scales). */
ATTN_INLINE bool has_scales(dcp_dtype dtype)
{
    return dtype == DCP_I8 || dtype == DCP_FP8_E4M3;
}

/* Rows of a block to be asked for, into L1 and, a block ahead, into L2. */
struct ahead {
    const char *const *near;
    const char *const *far; /* [DCP__ATTN_KEY_BLOCK] */
};
/* The first half of a block and the second take turns on the way to L2: two runs of rows are in
 * more pages than one, and what the hardware fetches by itself ends with a page. */
ATTN_INLINE void prefetch_at(const struct ahead *ahead, int64_t row, int64_t at)
{
    const int64_t far_row = (row & 1) * (DCP__ATTN_KEY_BLOCK / 2) + (row >> 1);
    __builtin_prefetch(ahead->far[far_row] + at, 0, 2);
    __builtin_prefetch(ahead->near[row] + at);
}

/* ---- keys, transposed ---- */

ATTN_INLINE vf pair_low(vf pairs, dcp_dtype dtype)
{
    if (dtype == DCP_I8) return vf_i16_low(pairs);
    return dtype == DCP_BF16 ? vf_bf16_low(pairs) : vf_f16_low(pairs);
}
ATTN_INLINE vf pair_high(vf pairs, dcp_dtype dtype)
{
    if (dtype == DCP_I8) return vf_i16_high(pairs);
    return dtype == DCP_BF16 ? vf_bf16_high(pairs) : vf_f16_high(pairs);
}
/* Half a vector of each of two rows: n = key_dims elements if is_full. */
ATTN_INLINE vf load_halves(const char *low, const char *high, int64_t n, bool is_full,
                           dcp_dtype dtype)
{
    if (dtype == DCP_I8)
        return is_full ? vf_load_halves_i8(low, high) : vf_load_halves_i8_n(low, high, n);
    if (dtype == DCP_FP8_E4M3)
        return is_full ? vf_load_halves_e4m3(low, high) : vf_load_halves_e4m3_n(low, high, n);
    return is_full ? vf_load_halves(low, high) : vf_load_halves_n(low, high, n * bytes_of(dtype));
}
/* Dims that load_keys takes at once. */
ATTN_INLINE int64_t key_dims(dcp_dtype dtype)
{
    return dtype == DCP_F32 ? VF_LANES / 2 : VF_LANES;
}
/* Dims [d, d + n) of VF_LANES keys, transposed: x[i] holds dim d + i (f32), or dims d + 2i and
 * d + 2i + 1 in pairs (the others), of every key. is_full: n = key_dims. */
ATTN_INLINE void load_keys(const char *const *rows, int64_t d, int64_t n, bool is_full,
                           dcp_dtype dtype, vf x[VF_LANES / 2])
{
    const int64_t at = d * bytes_of(dtype);
    VF_UNROLL for (int i = 0; i < VF_LANES; i++)
    {
        if (i % 8 >= 4) continue;
        x[vf_slot(i)] = load_halves(rows[i] + at, rows[i + 4] + at, n, is_full, dtype);
    }
    vf_transpose_halves(x);
}
/* The same as floats to kt [n][pitch], of which these keys are VF_LANES columns. */
ATTN_INLINE void pack_key_dims(const char *const *rows, int64_t d, int64_t n, bool is_full,
                               dcp_dtype dtype, float *kt, int64_t pitch)
{
    vf x[VF_LANES / 2];
    load_keys(rows, d, n, is_full, dtype, x);
    VF_UNROLL for (int i = 0; i < VF_LANES / 2; i++)
    {
        if (dtype == DCP_F32) {
            if (is_full || i < n) vf_store(kt + i * pitch, x[i]);
        } else {
            float *const to = kt + 2 * i * pitch;
            if (is_full || 2 * i < n) vf_store(to, pair_low(x[i], dtype));
            if (is_full || 2 * i + 1 < n) vf_store(to + pitch, pair_high(x[i], dtype));
        }
    }
}

/* ---- values ---- */

ATTN_INLINE vf load_value(const char *row, int64_t d, dcp_dtype dtype)
{
    const void *const at = row + d * bytes_of(dtype);
    if (dtype == DCP_F32) return vf_load(at);
    if (dtype == DCP_I8) return vf_load_i8(at);
    if (dtype == DCP_FP8_E4M3) return vf_load_e4m3(at);
    return dtype == DCP_BF16 ? vf_load_bf16(at) : vf_load_f16(at);
}
ATTN_INLINE vf load_value_n(const char *row, int64_t d, int64_t n, dcp_dtype dtype)
{
    const void *const at = row + d * bytes_of(dtype);
    if (dtype == DCP_F32) return vf_load_n(at, n);
    if (dtype == DCP_I8) return vf_load_i8_n(at, n);
    if (dtype == DCP_FP8_E4M3) return vf_load_e4m3_n(at, n);
    return dtype == DCP_BF16 ? vf_load_bf16_n(at, n) : vf_load_f16_n(at, n);
}
/* Dims [d, d + 2 VF_LANES) of a value row in the order that is cheapest: even dims and odd dims
 * (bf16), or first and second half. sort_values puts two such vectors into order. */
ATTN_INLINE void load_values(const char *row, int64_t d, dcp_dtype dtype, vf x[2])
{
    if (dtype == DCP_BF16) {
        const vf pairs = vf_load_pairs((const void *)(row + d * bytes_of(dtype)));
        x[0] = vf_bf16_low(pairs);
        x[1] = vf_bf16_high(pairs);
    } else {
        x[0] = load_value(row, d, dtype);
        x[1] = load_value(row, d + VF_LANES, dtype);
    }
}
ATTN_INLINE void sort_values(dcp_dtype dtype, vf x[2])
{
    if (dtype == DCP_BF16) vf_interleave(x);
}

#endif
