/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/topology.h"

#include <string.h>

#if DCP_HAVE_HWLOC
#include <hwloc.h>

static int count(hwloc_topology_t t, hwloc_obj_type_t type)
{
    const int n = hwloc_get_nbobjs_by_type(t, type);
    return n > 0 ? n : 0;
}

static uint64_t cache_bytes(hwloc_topology_t t, hwloc_obj_type_t type)
{
    const hwloc_obj_t cache = hwloc_get_obj_by_type(t, type, 0);
    return cache != NULL ? cache->attr->cache.size : 0;
}

void topology_read(struct topology *out)
{
    hwloc_topology_t t;
    memset(out, 0, sizeof(*out));
    if (hwloc_topology_init(&t) != 0) return;
    if (hwloc_topology_load(t) == 0) {
        out->is_known = true;
        out->packages = count(t, HWLOC_OBJ_PACKAGE);
        out->numa_nodes = count(t, HWLOC_OBJ_NUMANODE);
        out->cores = count(t, HWLOC_OBJ_CORE);
        out->threads = count(t, HWLOC_OBJ_PU);
        out->l1d_bytes = cache_bytes(t, HWLOC_OBJ_L1CACHE);
        out->l2_bytes = cache_bytes(t, HWLOC_OBJ_L2CACHE);
        out->l3_bytes = cache_bytes(t, HWLOC_OBJ_L3CACHE);
        out->l3_caches = count(t, HWLOC_OBJ_L3CACHE);
    }
    hwloc_topology_destroy(t);
}

#else

void topology_read(struct topology *out)
{
    memset(out, 0, sizeof(*out));
}

#endif
