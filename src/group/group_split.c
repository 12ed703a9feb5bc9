/* SPDX-License-Identifier: Apache-2.0 */
/* Sub-groups. One record of (colour, key) tells every rank all of them; the transport then makes
 * the handles, in step, so that all ranks of the parent succeed or all fail. */
#include "base/alloc_priv.h"
#include "group/group_core_priv.h"

struct split_info {
    int32_t color, key;
};

dcp_status dcp__group_agree(dcp_group *g, const char *what, dcp_status own)
{
    const int32_t own_code = (int32_t)own;
    int32_t *const codes = g->scratch;
    DCP_TRY(g->ops->record(g, &own_code, sizeof(own_code), codes));
    if (own != DCP_OK) return own;
    for (int r = 0; r < g->size; r++) {
        if (codes[r] == DCP_OK) continue;
        return dcp__fail((dcp_status)codes[r], "%s: rank %d could not do its part: %s", what, r,
                         dcp_status_text((dcp_status)codes[r]));
    }
    return DCP_OK;
}

/* Members of the own colour in order of (key, rank): an insertion sort, n is small. */
static int take_members(const dcp_group *g, const struct split_info *infos, int *members)
{
    int n = 0;
    for (int r = 0; r < g->size; r++) {
        if (infos[r].color != infos[g->rank].color) continue;
        int at = n++;
        for (; at > 0 && infos[members[at - 1]].key > infos[r].key; at--) {
            members[at] = members[at - 1];
        }
        members[at] = r;
    }
    return n;
}

static dcp_status split(dcp_group *g, int color, int key, dcp_group **sub_out)
{
    const struct split_info own = {.color = color < 0 ? -1 : color, .key = key};
    struct split_info *const infos = g->scratch;
    DCP_TRY(g->ops->record(g, &own, sizeof(own), infos));
    void *mem;
    dcp_status st = sub_out == NULL ? dcp__fail(DCP_ERR_ARG, "split: sub_out is NULL")
                                    : dcp__alloc_array(2 * (size_t)g->size, sizeof(int),
                                                       "members of a split", &mem);
    int *const members = st == DCP_OK ? mem : NULL;
    struct dcp__split how = {.leader = -1, .color = own.color, .key = key};
    if (st == DCP_OK && own.color >= 0) {
        int *const host_of = members + g->size;
        how.size = take_members(g, infos, members);
        how.members = members;
        how.host_of = host_of;
        how.leader = members[0];
        for (int i = 0; i < how.size; i++) {
            host_of[i] = g->host_of[members[i]];
            if (members[i] == g->rank) how.rank = i;
        }
    }
    dcp_group *sub = NULL;
    st = dcp__group_agree(g, "split", st);
    if (st == DCP_OK) st = g->ops->split(g, &how, &sub);
    dcp__free(members);
    if (st == DCP_OK) *sub_out = sub;
    return st;
}

dcp_status dcp_group_split(dcp_group *g, int color, int key, dcp_group **sub_out)
{
    DCP_TRY(dcp__group_enter_call(g, DCP__CALL_SPLIT));
    dcp__fault_point(g, "split");
    return dcp__group_leave_call(g, DCP__CALL_SPLIT, split(g, color, key, sub_out));
}
