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
/* int8 and fp8: what loads give is a power of two off; the scales, which meet the scores and the
 * weights in softmax_row, make up for it. */
ATTN_INLINE bool has_scales(dcp_dtype dtype)
{
    return dtype == DCP_I8 || dtype == DCP_FP8_E4M3;
}

/* Rows to be asked for, into L1 and, much later ones, into L2: their first log2_lines lines (as a
 * power of two), or if that is negative as many bytes as are read of others. */
struct ahead {
    const char *const *near;
    const char *const *far;
    int log2_lines;
};
ATTN_INLINE int log2_of_lines(int64_t row_bytes)
{
    const int64_t lines = (row_bytes + 63) / 64;
    int log2 = -1;
    for (int i = 0; i < 6; i++)
        if (lines == (int64_t)1 << i) log2 = i;
    return log2;
}
ATTN_INLINE void prefetch_at(const struct ahead *ahead, int64_t row, int64_t at)
{
    __builtin_prefetch(ahead->far[row] + at, 0, 2);
    __builtin_prefetch(ahead->near[row] + at);
}
ATTN_INLINE void prefetch_rows(const struct ahead *ahead, int64_t row, int n_rows, int n_lines)
{
    VF_UNROLL for (int r = 0; r < n_rows; r++)
    {
        const char *const far = ahead->far[row + r];
        const char *const near = ahead->near[row + r];
        VF_UNROLL for (int x = 0; x < n_lines; x++)
        {
            __builtin_prefetch(far + 64 * x, 0, 2);
            __builtin_prefetch(near + 64 * x);
        }
    }
}
/* n lines from line i on, in order of memory; n, a power of two up to 8, divides i. Rows of 2 and 4
 * lines apart: finding a line costs more than asking for it. */
ATTN_INLINE void prefetch_lines(const struct ahead *ahead, int64_t i, int n)
{
    const int log2 = ahead->log2_lines;
    if (log2 == 2 && n >= 4) {
        prefetch_rows(ahead, i >> 2, n / 4, 4);
    } else if (log2 == 1 && n >= 2) {
        prefetch_rows(ahead, i >> 1, n / 2, 2);
    } else {
        const int64_t mask = ((int64_t)1 << log2) - 1;
        VF_UNROLL for (int x = 0; x < n; x++)
            prefetch_at(ahead, (i + x) >> log2, ((i + x) & mask) * 64);
    }
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
