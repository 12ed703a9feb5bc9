/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank waits. A futex wake across cores costs some 30 us, a yield with runnable neighbours
 * about 1 us: so spin while a peer can be about to arrive on another core, then let others run, and
 * sleep only when the wait is long. */
#include <sched.h>

#include "base/clock_priv.h"
#include "base/futex_priv.h"
#include "group/group_core_priv.h"

enum {
    SPIN_ROUNDS = 256, /* some 10 us of pauses */
    YIELD_NS = 400000  /* long enough for the compute between two merges of a small model */
};

enum dcp__wait_step dcp__wait_next(struct dcp__wait *w, bool may_spin)
{
    const unsigned round = w->round++;
    if (may_spin && round < SPIN_ROUNDS) {
        dcp__cpu_relax();
        return DCP__WAIT_AGAIN;
    }
    const int64_t now = dcp__now_ns();
    if (w->start_ns == 0) w->start_ns = now;
    if (now - w->start_ns > YIELD_NS) return DCP__WAIT_SLEEP;
    sched_yield();
    return DCP__WAIT_AGAIN;
}
