/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing the next id from logits. temp 0 is greedy (the lowest id wins a tie); otherwise, in this
 * order: temperature, top-k, top-p, min-p, draw. The same seed and logits give the same ids, on any
 * number of ranks. */
#ifndef DCP_ENGINE_SAMPLER_H
#define DCP_ENGINE_SAMPLER_H

#include <stdint.h>

#include "dcpattn/types.h"

struct sampler_opts {
    float temp;    /* >= 0 */
    int32_t top_k; /* the k greatest logits; 0 = off */
    float top_p; /* the fewest of the likeliest ids whose probabilities reach it; 1 = off; (0, 1] */
    float min_p; /* probability at least this share of the greatest one's; 0 = off; [0, 1] */
    uint64_t seed;
};
struct sampler;

/** Check the options and take the memory that sampling needs.
 *  @return DCP_OK; DCP_ERR_ARG (an option outside its range: named with value and range);
 *          DCP_ERR_NOMEM
 *  Ownership: *out is freed by sampler_destroy.  Threads: one per sampler. */
dcp_status sampler_create(const struct sampler_opts *opts, int32_t vocab_size,
                          struct sampler **out);
/** Free a sampler.  @param[in] s  NULL is allowed. */
void sampler_destroy(struct sampler *s);
/** Choose an id.
 *  @param[in] logits  [vocab_size] f32, only read; -inf: never chosen
 *  @return DCP_OK; DCP_ERR_NONFINITE (a NaN or +inf, or nothing but -inf), then no draw is used up
 *  Determinism: depends on logits, options, seed and the number of draws so far.
 *  Cost: allocates nothing; one pass over the logits, plus the sorting of what top-k or top-p keep.
 */
dcp_status sampler_next(struct sampler *s, const float *logits, int32_t *id_out);

#endif
