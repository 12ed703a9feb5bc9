/* SPDX-License-Identifier: Apache-2.0 */
/* Names of the instruction-set levels, and the level to use. */
#include "base/cpu_priv.h"

#include <stdlib.h>
#include <string.h>

#include "base/status_priv.h"

static const struct {
    dcp_isa isa;
    const char *name;
} levels[] = {
    {DCP_ISA_SCALAR, "scalar"},
    {DCP_ISA_AVX2, "avx2"},
    {DCP_ISA_AVX512, "avx512"},
    {DCP_ISA_AMX, "amx"},
};
enum { N_LEVELS = sizeof(levels) / sizeof(levels[0]) };

const char *dcp__isa_name(dcp_isa isa)
{
    for (int i = 0; i < N_LEVELS; i++) {
        if (levels[i].isa == isa) return levels[i].name;
    }
    return isa == DCP_ISA_DEFAULT ? "default" : "?";
}

dcp_status dcp__isa_parse(const char *name, dcp_isa *isa_out)
{
    for (int i = 0; i < N_LEVELS; i++) {
        if (strcmp(levels[i].name, name) == 0) {
            *isa_out = levels[i].isa;
            return DCP_OK;
        }
    }
    return dcp__fail(DCP_ERR_ARG,
                     "instruction-set level \"%s\" is unknown; known: scalar, avx2, avx512, amx",
                     name);
}

dcp_status dcp__isa_choose(dcp_isa cap, dcp_isa *isa_out)
{
    if (cap < DCP_ISA_DEFAULT || cap > DCP_ISA_AMX) {
        return dcp__fail(DCP_ERR_ARG, "instruction-set cap %d is not a dcp_isa (0 to %d)", (int)cap,
                         (int)DCP_ISA_AMX);
    }
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    dcp_isa isa = dcp__cpu_best_isa(&cpu);
    const char *env = getenv("DCP_ATTN_ISA");
    if (env != NULL && env[0] != '\0') {
        dcp_isa env_isa = isa;
        if (dcp__isa_parse(env, &env_isa) != DCP_OK) {
            return dcp__fail(DCP_ERR_ARG,
                             "DCP_ATTN_ISA is \"%s\"; known: scalar, avx2, avx512, amx", env);
        }
        if (env_isa < isa) isa = env_isa;
    }
    if (cap != DCP_ISA_DEFAULT && cap < isa) isa = cap;
    *isa_out = isa;
    return DCP_OK;
}
