/* SPDX-License-Identifier: Apache-2.0 */
/* A group of one: every collective is a copy, every address is visible. */
#include <string.h>

#include "base/alloc_priv.h"
#include "group/group_core_priv.h"

static dcp_status create(int64_t deadline_ns, dcp_group **group_out);

static dcp_status self_record(dcp_group *g, const void *send, size_t n_bytes, void *recv)
{
    (void)g;
    if (n_bytes > 0) memcpy(recv, send, n_bytes);
    return DCP_OK;
}

/* Nobody to talk to: messages to oneself are not allowed, so both lists are empty. */
static dcp_status self_exchange_start(dcp_group *g, unsigned slot, const struct dcp__xfer *sends,
                                      int n_sends, const struct dcp__xfer *recvs, int n_recvs)
{
    (void)g, (void)slot, (void)sends, (void)n_sends, (void)recvs, (void)n_recvs;
    return DCP_OK;
}

static dcp_status self_exchange_test(dcp_group *g, unsigned slot, bool *done_out)
{
    (void)g, (void)slot;
    *done_out = true;
    return DCP_OK;
}

static dcp_status self_exchange_wait(dcp_group *g, unsigned slot)
{
    (void)g, (void)slot;
    return DCP_OK;
}

static dcp_status self_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    (void)g, (void)buf, (void)n;
    return DCP_OK;
}

static void self_destroy(dcp_group *g)
{
    dcp__local_free_list(g->allocs);
    dcp__group_fini(g);
    dcp__free(g);
}

static dcp_status self_split(dcp_group *g, const struct dcp__split *how, dcp_group **sub_out)
{
    *sub_out = NULL;
    return how->size == 0 ? DCP_OK : create(g->deadline_ns, sub_out);
}

static const struct dcp__group_ops self_ops = {
    .name = "self",
    .record = self_record,
    .exchange_start = self_exchange_start,
    .exchange_test = self_exchange_test,
    .exchange_wait = self_exchange_wait,
    .allreduce_f32 = self_allreduce_f32,
    .alloc = dcp__local_alloc,
    .free = dcp__local_free,
    .locate = dcp__any_locate,
    .peer_ptr = dcp__any_peer_ptr,
    .split = self_split,
    .destroy = self_destroy,
    .one_space = true,
};

static dcp_status create(int64_t deadline_ns, dcp_group **group_out)
{
    void *mem;
    DCP_TRY(dcp__alloc(sizeof(dcp_group), "self group", &mem));
    dcp_group *const g = mem;
    const dcp_status st = dcp__group_init(g, &self_ops, 0, 1, deadline_ns, NULL);
    if (st != DCP_OK) {
        dcp__free(g);
        return st;
    }
    *group_out = g;
    return DCP_OK;
}

dcp_status dcp_group_create_self(const dcp_group_opts *opts, dcp_group **group_out)
{
    if (group_out == NULL) return dcp__fail(DCP_ERR_ARG, "create_self: group_out is NULL");
    struct dcp__group_opts mine;
    DCP_TRY(dcp__group_opts_read(opts, &mine));
    DCP_TRY(dcp__group_load_fault(1, true));
    return create(mine.deadline_ns, group_out);
}
