/* SPDX-License-Identifier: Apache-2.0 */
/* Element types and the choices a caller declares. Every enum has fixed values; 0 is never a valid
 * choice where a wrong default would be silently wrong (the LSE base), and "default" elsewhere. */
#ifndef DCPATTN_TYPES_H
#define DCPATTN_TYPES_H

#include <stddef.h>
#include <stdint.h>

#include "dcpattn/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_dtype {
    DCP_DTYPE_DEFAULT = 0, /**< "as documented at the field"; never an element type itself */
    DCP_F32 = 1,
    DCP_F16 = 2,
    DCP_BF16 = 3,
    /* Keys and values alone, with scales beside them (cache.h). */
    DCP_I8 = 4,      /**< -127..127 */
    DCP_FP8_E4M3 = 5 /**< OCP E4M3: no infinity, up to 448, NaN is 0x7f and 0xff */
} dcp_dtype;

/** How the LSE was taken. There is no default: natural logs read as base 2 give no error, no NaN,
 * wrong text. */
typedef enum dcp_lse_base {
    DCP_LSE_BASE_UNSET = 0,
    DCP_LSE_BASE_E = 1,
    DCP_LSE_BASE_2 = 2
} dcp_lse_base;

/** How the merged result is spread over the ranks. */
typedef enum dcp_cut {
    DCP_CUT_HEADS = 0,  /**< rank r gets its heads of every token: [T, H_r, D] */
    DCP_CUT_TOKENS = 1, /**< rank r gets every head of its tokens: [T_r, H, D] */
    DCP_CUT_NONE = 2    /**< every rank gets all: [T, H, D] */
} dcp_cut;

/** What happens to NaN and infinities in the payload of a row that is not empty. Counted under
 * each. It says nothing of LSEs: a row whose LSE is NaN or +inf is empty, and no error. */
typedef enum dcp_nonfinite {
    DCP_NONFINITE_ZERO = 0,
    DCP_NONFINITE_PROPAGATE = 1,
    DCP_NONFINITE_ERROR = 2
} dcp_nonfinite;

typedef enum dcp_merge_algo {
    DCP_MERGE_AUTO = 0,
    DCP_MERGE_DIRECT = 1,
    DCP_MERGE_ALLTOALL = 2,
    DCP_MERGE_HALVING = 3,
    DCP_MERGE_HIERARCHICAL = 4,
    DCP_MERGE_ALLREDUCE = 5, /**< the published algorithm, in place: a baseline, not a choice for
                                users */
    DCP_MERGE_ALLREDUCE_TEMP = 6 /**< the same as first published: two full-size f32 temporaries */
} dcp_merge_algo;

/** Instruction-set levels, each includes those below. */
typedef enum dcp_isa {
    DCP_ISA_DEFAULT = 0,
    DCP_ISA_SCALAR = 1,
    DCP_ISA_AVX2 = 2,
    DCP_ISA_AVX512 = 3,
    DCP_ISA_AMX = 4
} dcp_isa;

/** Bytes of one element.
 *  @param[in] t  any number
 *  @return 0 for an unknown type
 *  Threads: any.  Collective: no. */
DCP_API size_t dcp_dtype_bytes(dcp_dtype t);
/** The name of a type.
 *  @param[in] t  any number
 *  @return "f32", "f16", "bf16", "int8", "fp8" or "?"
 *  Ownership: static.  Threads: any.  Collective: no. */
DCP_API const char *dcp_dtype_name(dcp_dtype t);

#ifdef __cplusplus
}
#endif
#endif
