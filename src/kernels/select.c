/* SPDX-License-Identifier: Apache-2.0 */
/* Selection: for each slot the last line of kernels.inc whose ISA does not exceed the level. */
#include <string.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"

bool dcp__has_feature(const struct dcp__cpu *cpu, enum dcp__feature feature)
{
    switch (feature) {
    case DCP__FEATURE_AVX_VNNI:
        return cpu->avx_vnni;
    case DCP__FEATURE_AVX512_VNNI:
        return cpu->avx512_vnni;
    case DCP__FEATURE_NONE:
        break;
    }
    return true;
}

void dcp__kernels_select(dcp_isa isa, struct dcp__kernels *out)
{
    struct dcp__cpu cpu;
    memset(&cpu, 0, sizeof(cpu));
    if (isa > DCP_ISA_SCALAR) dcp__cpu_detect(&cpu);
    memset(out, 0, sizeof(*out));
    out->isa = isa;
#define TAKE(level, slot, label, fn)                                                               \
    if (isa >= DCP_ISA_##level) {                                                                  \
        out->slot = fn;                                                                            \
        out->label = #fn;                                                                          \
    }
#define ATTN(level, dtype, fn) TAKE(level, attn[dtype], attn_name[dtype], fn)
#define ATTN_QUANT(level, dtype, fn) TAKE(level, attn[dtype], attn_name[dtype], fn)
#define MERGE_ROW(level, part, merged, fn)                                                         \
    TAKE(level, merge_row[part][merged], merge_row_name[part][merged], fn)                         \
    if (isa >= DCP_ISA_##level) out->merge_pair[part][merged] = fn##_pair;
#define MERGE_ROW_NT(level, part, merged, fn)                                                      \
    if (isa >= DCP_ISA_##level) {                                                                  \
        out->merge_row_nt[part][merged] = fn;                                                      \
        out->merge_pair_nt[part][merged] = fn##_pair;                                              \
    }
#define MERGE_WEIGHTS(level, fn) TAKE(level, merge_weights[0], merge_weights_name[0], fn)
#define QDOT(level, qtype, fn) TAKE(level, qdot[qtype], qdot_name[qtype], fn)
#define DEQUANT(level, qtype, fn) TAKE(level, dequant[qtype], dequant_name[qtype], fn)
#define TO_BF16(level, fn) TAKE(level, to_bf16, to_bf16_name, fn)
#define QDOT16(level, feature, qtype, fn)                                                          \
    if (dcp__has_feature(&cpu, DCP__FEATURE_##feature))                                            \
    TAKE(level, qdot16[qtype], qdot16_name[qtype], fn)
#define TO_Q16(level, fn) TAKE(level, to_q16, to_q16_name, fn)
#define PROJECT(level, dtype, fn) TAKE(level, project[dtype], project_name[dtype], fn)
#include "kernels/kernels.inc"
#undef ATTN
#undef MERGE_ROW
#undef QDOT
#undef DEQUANT
#undef TAKE
}
