/* SPDX-License-Identifier: Apache-2.0 */
/* Selection: for each slot the last line of kernels.inc whose ISA does not exceed the level. */
#include <string.h>

#include "kernels/kernels_priv.h"

void dcp__kernels_select(dcp_isa isa, struct dcp__kernels *out)
{
    memset(out, 0, sizeof(*out));
    out->isa = isa;
#define TAKE(level, slot, label, fn)                                                               \
    if (isa >= DCP_ISA_##level) {                                                                  \
        out->slot = fn;                                                                            \
        out->label = #fn;                                                                          \
    }
#define ATTN(level, dtype, fn) TAKE(level, attn[dtype], attn_name[dtype], fn)
#define MERGE_ROW(level, part, merged, fn)                                                         \
    TAKE(level, merge_row[part][merged], merge_row_name[part][merged], fn)
#define MERGE_ROW_NT(level, part, merged, fn)                                                      \
    if (isa >= DCP_ISA_##level) out->merge_row_nt[part][merged] = fn;
#define MERGE_WEIGHTS(level, fn) TAKE(level, merge_weights[0], merge_weights_name[0], fn)
#define QDOT(level, qtype, fn) TAKE(level, qdot[qtype], qdot_name[qtype], fn)
#define DEQUANT(level, qtype, fn) TAKE(level, dequant[qtype], dequant_name[qtype], fn)
#define TO_BF16(level, fn) TAKE(level, to_bf16, to_bf16_name, fn)
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT
#undef TAKE
}
