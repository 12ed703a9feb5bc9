/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's threads, to be lent to the objects of that rank (dcp_attend_desc.pool) and shared with a
 * caller's own work instead of starting threads for each. */
#ifndef DCPATTN_POOL_H
#define DCPATTN_POOL_H

#include "dcpattn/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_pool dcp_pool;

/** Starts n_threads - 1 threads; the caller of whatever uses the pool is the remaining one.
 *  @param[in]  n_threads  1 to 4096
 *  @param[in]  n_ranks    ranks that share this host, this one included, >= 1: idle threads wait
 *                         spinning only where all ranks' threads have a CPU each
 *  @param[out] pool_out   written on success only
 *  @return DCP_OK; DCP_ERR_ARG; DCP_ERR_NOMEM; DCP_ERR_SYS (no more threads)
 *  Ownership: the caller destroys it, after everything that it was lent to.
 *  Threads: one user at a time.  Collective: no. */
DCP_API dcp_status dcp_pool_create(int n_threads, int n_ranks, dcp_pool **pool_out);
/** Binds the pool's threads, the calling thread among them, to CPUs of the caller's choice: as many
 *  CPUs as threads: thread i to cpus[i], the caller to cpus[0]; more: every thread to all of them,
 *  so that the system places threads within (the cores of a NUMA node, say). Memory that the
 *  threads touch first afterwards lies near them. Threads that the caller starts later inherit its
 *  CPUs.
 *  @param[in] pool
 *  @param[in] cpus    [n_cpus] numbers of the system (sched_setaffinity), each once
 *  @param[in] n_cpus  >= the pool's threads
 *  @return DCP_OK; DCP_ERR_ARG (NULL, too few CPUs, one twice or out of range), then nothing has
 *          changed; DCP_ERR_SYS (the system refuses; names the thread): threads before it are bound
 *  Threads: one user at a time.  Collective: no. */
DCP_API dcp_status dcp_pool_bind(dcp_pool *pool, const int *cpus, int n_cpus);
/** Ends its threads and frees it.
 *  @param[in] pool  NULL allowed
 *  Threads: one user at a time.  Collective: no. */
DCP_API void dcp_pool_destroy(dcp_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
