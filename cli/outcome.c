/* SPDX-License-Identifier: Apache-2.0 */
/* How ranks tell each other that one has failed, and who says so. */
#include <stdlib.h>
#include <string.h>

#include "base/status_priv.h"
#include "cli/common.h"
#include "cli/launch.h"

/* The outcome of a rank as it travels. */
struct outcome {
    int32_t status;
    char text[252];
};

enum { FEW_RANKS = 32 };

bool all_ranks_ok(dcp_group *g, dcp_status local)
{
    return all_ranks_ok_said(g, local, false);
}

bool all_ranks_ok_said(dcp_group *g, dcp_status local, bool is_said)
{
    const int n = dcp_group_size(g);
    struct outcome mine = {(int32_t)local, ""};
    char text[1000] = "";
    if (local != DCP_OK) {
        snprintf(text, sizeof(text), "%s", dcp_last_error());
        snprintf(mine.text, sizeof(mine.text), "%.251s", text);
    }
    /* Not counted: a rank at its limit could not tell the others, who would wait for it. */
    struct outcome few[FEW_RANKS];
    struct outcome *const all = n <= FEW_RANKS ? few : calloc((size_t)n, sizeof(*all));
    dcp_status st = all != NULL ? dcp_group_allgather(g, &mine, sizeof(mine), all)
                                : dcp__fail(DCP_ERR_NOMEM, "no memory for %d outcomes", n);
    bool ok = local == DCP_OK;
    if (st != DCP_OK && ok) {
        rank_failed(g, st);
    } else if (!ok) {
        /* What several ranks would say, the first of them says. */
        int first = 0;
        while (st == DCP_OK && first < dcp_group_rank(g) &&
               (all[first].status != mine.status || strcmp(all[first].text, mine.text) != 0)) {
            first++;
        }
        int n_same = 0;
        for (int r = 0; st == DCP_OK && r < n; r++)
            n_same += all[r].status == mine.status && strcmp(all[r].text, mine.text) == 0;
        if (is_said)
            ;
        else if (n_same == n && first == dcp_group_rank(g))
            launch_tell_of_all(g, local, text);
        else if (st != DCP_OK || first == dcp_group_rank(g))
            launch_tell(g, local, text);
    }
    ok = ok && st == DCP_OK;
    for (int r = 0; ok && r < n; r++) ok = all[r].status == DCP_OK;
    if (all != few) free(all);
    return ok;
}

int rank_failed(dcp_group *g, dcp_status st)
{
    char text[1000];
    snprintf(text, sizeof(text), "%s", dcp_last_error());
    launch_tell(g, st, text);
    /* Where every rank has the same answer there is nobody left to tell. */
    if (st != DCP_ERR_MISMATCH && st != DCP_ERR_NONFINITE && st != DCP_ERR_NOT_SUPPORTED)
        dcp_group_abort(g, text);
    return EXIT_FAILED;
}
