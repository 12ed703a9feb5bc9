/* SPDX-License-Identifier: Apache-2.0 */
/* Group memory that is private to a process: a list on the handle. */
#include "base/alloc_priv.h"
#include "group/group_core_priv.h"

dcp_status dcp__local_alloc(dcp_group *g, size_t n_bytes, void **ptr_out)
{
    void *node_mem, *ptr;
    DCP_TRY(dcp__alloc(sizeof(struct dcp__local_alloc), "entry of a group allocation", &node_mem));
    const dcp_status st = dcp__alloc(n_bytes, "group memory", &ptr);
    if (st != DCP_OK) {
        dcp__free(node_mem);
        return st;
    }
    struct dcp__local_alloc *const node = node_mem;
    *node = (struct dcp__local_alloc){.next = g->allocs, .ptr = ptr, .n_bytes = n_bytes};
    g->allocs = node;
    *ptr_out = ptr;
    return DCP_OK;
}

void dcp__local_free(dcp_group *g, void *ptr)
{
    for (struct dcp__local_alloc **at = &g->allocs; *at != NULL; at = &(*at)->next) {
        if ((*at)->ptr != ptr) continue;
        struct dcp__local_alloc *const node = *at;
        *at = node->next;
        dcp__free(node->ptr);
        dcp__free(node);
        return;
    }
}

void dcp__local_free_list(struct dcp__local_alloc *list)
{
    while (list != NULL) {
        struct dcp__local_alloc *const node = list;
        list = node->next;
        dcp__free(node->ptr);
        dcp__free(node);
    }
}
