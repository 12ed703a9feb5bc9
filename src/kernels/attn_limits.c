/* SPDX-License-Identifier: Apache-2.0 */
/* What attention kernels want of their caller, scratch and rows of a job, and where they cut. */
#include "kernels/attn_amx_priv.h"

size_t dcp__attn_scratch_bytes_for(dcp_isa isa, int64_t n_rows, int64_t dk, int64_t dv)
{
    size_t most = dcp__attn_scratch_bytes(n_rows, dk, dv);
#if DCP_BUILD_AVX512
    if (isa >= DCP_ISA_AMX) {
        const size_t few = dcp__attn_amx_few_bytes(n_rows, dk, dv);
        const size_t many = dcp__attn_amx_many_bytes(n_rows, dk, dv);
        if (few > most) most = few;
        if (many > most) most = many;
    }
#else
    (void)isa;
#endif
    return most;
}

int64_t dcp__attn_rows_most(dcp_isa isa, int64_t dv)
{
#if DCP_BUILD_AVX512
    if (isa >= DCP_ISA_AMX) return dcp__attn_amx_rows_most(dv);
#endif
    (void)isa;
    (void)dv;
    return DCP__ATTN_ROWS_MAX;
}

bool dcp__attn_cuts_weights(dcp_isa isa, dcp_dtype dtype, int64_t call_rows)
{
#if DCP_BUILD_AVX512
    return isa >= DCP_ISA_AMX && dtype == DCP_BF16 && call_rows > AMX_FEW_ROWS;
#else
    (void)isa;
    (void)dtype;
    (void)call_rows;
    return false;
#endif
}
