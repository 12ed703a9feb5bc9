/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's threads: fork-join over items. The caller takes part, so n_threads = 1 starts none. */
#ifndef DCP_BASE_POOL_PRIV_H
#define DCP_BASE_POOL_PRIV_H

#include <stddef.h>
#include <stdint.h>

#include "base/status_priv.h"
#include "dcpattn/pool.h"

/* fn(ctx, item, thread) for item in [0, n_items), thread in [0, n_threads); items are handed out
 * dynamically in order. */
typedef void dcp__pool_fn(void *ctx, int64_t item, int thread);

int dcp__pool_threads(const struct dcp_pool *p); /* NULL pool = 1 */
size_t dcp__pool_bytes(int n_threads);           /* counted memory of such a pool */
/* Returns when all items are done. NULL pool runs them here. Where all ranks of the host fit its
 * CPUs, workers spin briefly after a run (tens of us); then they yield, then sleep on a futex. */
void dcp__pool_run(struct dcp_pool *p, int64_t n_items, dcp__pool_fn *fn, void *ctx);

#endif
