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

/* Without the caches, which take long to look at on a large machine. (What lies between a core and
 * its NUMA node must stay: without it the core does not know its node.) */
static bool load_cores(hwloc_topology_t t)
{
    return hwloc_topology_set_cache_types_filter(t, HWLOC_TYPE_FILTER_KEEP_NONE) == 0 &&
           hwloc_topology_load(t) == 0;
}

static void add_core(struct topology_cores *out, hwloc_obj_t core, hwloc_const_cpuset_t allowed)
{
    hwloc_bitmap_t own = hwloc_bitmap_alloc();
    if (own == NULL) return;
    hwloc_bitmap_and(own, core->cpuset, allowed);
    const int cpu = hwloc_bitmap_first(own);
    if (cpu >= 0 && out->n < TOPOLOGY_MAX_CORES) {
        const int node = core->nodeset != NULL ? hwloc_bitmap_first(core->nodeset) : 0;
        out->cpu[out->n] = cpu;
        out->node[out->n++] = node > 0 ? node : 0;
    }
    hwloc_bitmap_free(own);
}

void topology_read_cores(struct topology_cores *out)
{
    hwloc_topology_t t;
    out->n = 0;
    if (hwloc_topology_init(&t) != 0) return;
    hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
    if (allowed != NULL && load_cores(t) &&
        hwloc_get_cpubind(t, allowed, HWLOC_CPUBIND_THREAD) == 0) {
        const bool has_cores = count(t, HWLOC_OBJ_CORE) > 0;
        const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
        for (hwloc_obj_t at = hwloc_get_next_obj_by_type(t, type, NULL); at != NULL;
             at = hwloc_get_next_obj_by_type(t, type, at)) {
            add_core(out, at, allowed);
        }
    }
    hwloc_bitmap_free(allowed);
    hwloc_topology_destroy(t);
}

#else

void topology_read_cores(struct topology_cores *out)
{
    out->n = 0;
}

void topology_read(struct topology *out)
{
    memset(out, 0, sizeof(*out));
}

#endif
