/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing the next id from logits. temp 0 = greedy (lowest id wins a tie). Order: temperature,
 * top-k, top-p, min-p, draw. The same seed gives the same ids on any number of ranks. */
#ifndef DCP_ENGINE_SAMPLER_H
#define DCP_ENGINE_SAMPLER_H

#include <stdint.h>

#include "dcpattn/types.h"

struct sampler_opts {
    float temp;    /* >= 0 */
    int32_t top_k; /* 0 = off */
    float top_p;   /* 1 = off; (0, 1] */
    float min_p;   /* 0 = off; [0, 1] */
    uint64_t seed;
};
struct sampler;
/* Checks the options: a bad one is named with its value and range. */
dcp_status sampler_create(const struct sampler_opts *opts, int32_t vocab_size,
                          struct sampler **out);
void sampler_destroy(struct sampler *s);
/* Allocates nothing. logits [vocab] are read only. DCP_ERR_NONFINITE if any is NaN. */
dcp_status sampler_next(struct sampler *s, const float *logits, int32_t *id_out);

#endif
