/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's threads: fork-join over items. The caller takes part, so n_threads = 1 starts none. */
#ifndef DCP_BASE_POOL_PRIV_H
#define DCP_BASE_POOL_PRIV_H

#include <stdint.h>

#include "base/status_priv.h"

struct dcp__pool;
/* fn(ctx, item, thread) for item in [0, n_items), thread in [0, n_threads); items are handed out
 * dynamically in order. */
typedef void dcp__pool_fn(void *ctx, int64_t item, int thread);

dcp_status dcp__pool_create(int n_threads, struct dcp__pool **pool_out);
void dcp__pool_destroy(struct dcp__pool *p);      /* takes NULL */
int dcp__pool_threads(const struct dcp__pool *p); /* NULL pool = 1 */
/* Returns when all items are done. NULL pool runs them here. Workers spin briefly after a run (tens
 * of us), then yield, then sleep on a futex. */
void dcp__pool_run(struct dcp__pool *p, int64_t n_items, dcp__pool_fn *fn, void *ctx);

#endif
