/* SPDX-License-Identifier: Apache-2.0 */
/* Loading, shared by model.c and the files for weights that are more than rows of a matrix. */
#ifndef DCP_ENGINE_MODEL_PRIV_H
#define DCP_ENGINE_MODEL_PRIV_H

#include "engine/model.h"
#include "kernels/kernels_priv.h"

struct loader {
    const struct gguf *file;
    struct model *m;
    const struct dcp__kernels *kernels;
    unsigned char *arena; /* NULL: measure only */
    size_t at;
    bool *used; /* [n_tensors]: found by name */
};

/* The tensor, NULL where it is not there; marked as used. */
const struct gguf_tensor *loader_find(struct loader *l, const char *name);
/* DCP_ERR_FORMAT unless the tensor is [dims 0, 1, 2]. */
dcp_status loader_check_shape(const struct loader *l, const struct gguf_tensor *t, int64_t d0,
                              int64_t d1, int64_t d2);
/* n_bytes of the arena, aligned; NULL while measuring. */
void *loader_reserve(struct loader *l, size_t n_bytes);
/* Counts what is held, and notes the name of a replicated tensor once. */
void loader_account(struct loader *l, const char *name, enum split split, size_t n_bytes);

/* prefix is "blk.N.". */
dcp_status loader_mla(struct loader *l, const char *prefix, struct layer *layer);
dcp_status loader_experts(struct loader *l, const char *prefix, struct layer *layer);

#endif
