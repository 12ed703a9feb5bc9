/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group_module_priv.h"

#include "base/alloc_priv.h"
#include "base/clock_priv.h"

static const struct dcp__group_module module = {
    .struct_size = sizeof(struct dcp__group_module),
    .version = DCP_VERSION,
    .layout = DCP__MODULE_LAYOUT,
    .fail_at = dcp__fail_at,
    .alloc_array = dcp__alloc_array,
    .free = dcp__free,
    .now_ns = dcp__now_ns,
    .opts_read = dcp__group_opts_read,
    .load_fault = dcp__group_load_fault,
    .init = dcp__group_init,
    .fini = dcp__group_fini,
    .set_hosts = dcp__group_set_hosts,
    .agree = dcp__group_agree,
    .any_locate = dcp__any_locate,
    .any_peer_ptr = dcp__any_peer_ptr,
    .poison_at = dcp__group_poison_at,
    .poison_status = dcp__group_poison_status,
    .call_name = dcp__call_name,
    .fault_point = dcp__fault_point,
    .wait_next = dcp__wait_next,
    .local_alloc = dcp__local_alloc,
    .local_free = dcp__local_free,
    .local_free_list = dcp__local_free_list,
    .shm_ops = &dcp__shm_ops,
    .shm_make = dcp__shm_make,
    .shm_fd = dcp__shm_fd,
    .shm_join = dcp__shm_join,
    .shm_enter = dcp__shm_enter,
    .shm_release = dcp_shm_release,
};

const struct dcp__group_module *dcp__group_module(void)
{
    return &module;
}
