/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that this process would use, for people to look at. */
#ifndef DCP_ENGINE_KERNEL_LIST_H
#define DCP_ENGINE_KERNEL_LIST_H

#include <stddef.h>

#include "dcpattn/types.h"

struct kernel_choice {
    const char *family; /* "attention", "merge", "product", "product i16", "dequantise" */
    char types[24];     /* "bf16", "f32 -> bf16", "Q4_K" */
    const char *name;   /* the function */
};
/* The choices at level isa, at most max of them; returns how many there are. */
size_t kernel_list(dcp_isa isa, struct kernel_choice *out, size_t max);

#endif
