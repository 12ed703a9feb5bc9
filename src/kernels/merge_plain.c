/* SPDX-License-Identifier: Apache-2.0 */
/* The merge of a few elements, one by one: what the vector kernels leave over, and the blocks that
 * hold non-finite values. Compiled once for all instruction sets, so that the bits of a propagated
 * NaN do not depend on which operand of a fused multiply-add an instruction form prefers. */
#include <math.h>
#include <stdatomic.h>

#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"

static float load(dcp_dtype type, const void *p, int64_t i)
{
    if (type == DCP_F32) return ((const float *)p)[i];
    const uint16_t h = ((const uint16_t *)p)[i];
    return type == DCP_BF16 ? dcp__bf16_to_f32(h) : dcp__f16_to_f32(h);
}

static void store(dcp_dtype type, void *p, int64_t i, float x)
{
    if (type == DCP_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = type == DCP_BF16 ? dcp__f32_to_bf16(x) : dcp__f32_to_f16(x);
}

int64_t dcp__merge_row_plain(dcp_dtype part_type, dcp_dtype merged_type, const void *const *parts,
                             const float *w, int n_parts, int64_t begin, int64_t end, void *dst,
                             bool zero_nonfinite, int *first_part_out)
{
    /* Alone with weight 1, a payload is copied: also the bits of a signalling NaN. */
    const bool is_copy = n_parts == 1 && w[0] == 1.0f && part_type == merged_type;
    int64_t n_bad = 0;
    for (int64_t d = begin; d < end; d++) {
        float sum = 0.0f;
        int64_t n_bad_here = 0;
        for (int p = 0; p < n_parts; p++) {
            float x = load(part_type, parts[p], d);
            if ((dcp__f32_bits(x) & 0x7f800000u) == 0x7f800000u) {
                if (p < *first_part_out) *first_part_out = p;
                n_bad_here++;
                if (zero_nonfinite) x = 0.0f;
            }
            sum = p == 0 ? w[p] * x : fmaf(w[p], x, sum);
        }
        n_bad += n_bad_here;
        if (!is_copy || (n_bad_here != 0 && zero_nonfinite))
            store(merged_type, dst, d, sum);
        else if (part_type == DCP_F32)
            ((uint32_t *)dst)[d] = ((const uint32_t *)parts[0])[d];
        else
            ((uint16_t *)dst)[d] = ((const uint16_t *)parts[0])[d];
    }
    return n_bad;
}

void dcp__merge_fence(void)
{
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}
