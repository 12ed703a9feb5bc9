/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU and the operating system allow (CPUID and XCR0 both), and the machine's shape. */
#ifndef DCP_BASE_CPU_PRIV_H
#define DCP_BASE_CPU_PRIV_H

#include <stdbool.h>

#include "dcpattn/types.h"

struct dcp__cpu {
    bool avx2, fma, f16c; /* avx2 level = avx2 && fma && f16c */
    bool avx512;          /* F DQ BW VL CD as one level, OS state enabled */
    bool avx512_vnni, avx512_bf16, avx512_fp16;
    bool amx_bf16, amx_int8;  /* CPUID, XCR0 and the kernel's permission */
    bool avx_vnni;            /* VNNI on AVX2's registers */
    char why_not_higher[160]; /* of the level below the best that exists */
    char brand[64];
};
/* Re-entrant; detects anew each call (cheap), asks for AMX permission once per process. */
void dcp__cpu_detect(struct dcp__cpu *cpu_out);
/* The best level this CPU has. */
dcp_isa dcp__cpu_best_isa(const struct dcp__cpu *cpu);
/* The level to use: cap (DEFAULT = none) and DCP_ATTN_ISA (scalar|avx2|avx512|amx) and the
 * hardware. A bad name in the environment is an error. */
dcp_status dcp__isa_choose(dcp_isa cap, dcp_isa *isa_out);
const char *dcp__isa_name(dcp_isa isa);
dcp_status dcp__isa_parse(const char *name, dcp_isa *isa_out);

/* CPUs this process may use: affinity and cgroup quota (v1 and v2), at least 1. */
int dcp__cpu_usable(void);

#endif
