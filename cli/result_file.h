/* SPDX-License-Identifier: Apache-2.0 */
/* A result that is spread over ranks, written whole as one safetensors file by rank 0. */
#ifndef DCP_CLI_RESULT_FILE_H
#define DCP_CLI_RESULT_FILE_H

#include "dcpattn/dcpattn.h"

struct result {
    dcp_cut cut; /* how out and lse are spread */
    int64_t n_tokens, n_heads, dim;
    dcp_dtype dtype;  /* of out */
    const void *out;  /* this rank's part, contiguous: [T,H_r,D], [T_r,H,D] or [T,H,D] */
    const float *lse; /* the same part of [T,H] */
    int tp;           /* heads are cut within each of so many groups of them; 0 = 1 */
};

/* Collective. Tensors out [T,H,D] and lse [T,H] F32 at path. Moves tiles of at most 16 MiB, so
 * that no rank holds the whole. Prints what went wrong; the exit code, the same on all ranks. */
int result_write(dcp_group *g, const char *path, const struct result *res);

#endif
