/* SPDX-License-Identifier: Apache-2.0 */
/* Everything but MPI: exact attention over a KV cache that is sharded by token over ranks. */
#ifndef DCPATTN_DCPATTN_H
#define DCPATTN_DCPATTN_H
#include "dcpattn/attend.h"
#include "dcpattn/cache.h"
#include "dcpattn/group.h"
#include "dcpattn/merge.h"
#include "dcpattn/pool.h"
#include "dcpattn/shard.h"
#include "dcpattn/status.h"
#include "dcpattn/types.h"
#endif
