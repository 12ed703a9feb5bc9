/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank waits. A futex wake across cores costs some 30 us, a yield with runnable neighbours
 * about 1 us: so spin while a peer can be about to arrive on another core, then let others run, and
 * sleep only when the wait is long. Whether a peer is running is not known: a spin that ran out was
 * lost time, so the next is half as long, and one that paid makes the next twice as long. */
#include <sched.h>

#include "base/clock_priv.h"
#include "base/futex_priv.h"
#include "group/group_core_priv.h"

enum {
    SPIN_LEAST = 16,   /* below 1 us of pauses: the probe */
    SPIN_MOST = 256,   /* some 10 us */
    YIELD_NS = 400000, /* long enough for the compute between two merges of a small model */
    /* A look comes every 20 ms at the latest, so a longer gap is this rank's own sleep (Ctrl-Z, a
     * suspended machine). It counts as this much of the wait: peers slept as well and must not be
     * blamed, and on a machine that is merely overloaded the deadline still comes. */
    PAUSE_NS = 500000000
};

enum dcp__wait_step dcp__wait_next(struct dcp__wait *w, unsigned spin_rounds)
{
    const unsigned round = w->round++;
    if (round < spin_rounds) {
        dcp__cpu_relax();
        return DCP__WAIT_AGAIN;
    }
    const int64_t now = dcp__now_ns();
    if (w->start_ns == 0) w->start_ns = w->last_ns = now;
    if (now - w->last_ns > PAUSE_NS) w->start_ns += now - w->last_ns - PAUSE_NS;
    w->last_ns = now;
    if (now - w->start_ns > YIELD_NS) return DCP__WAIT_SLEEP;
    sched_yield();
    return DCP__WAIT_AGAIN;
}

unsigned dcp__wait_learn(const struct dcp__wait *w, unsigned spin_rounds)
{
    if (w->round == 0 || spin_rounds == 0) return spin_rounds;
    const unsigned next = w->round <= spin_rounds ? spin_rounds * 2 : spin_rounds / 2;
    return next < SPIN_LEAST ? SPIN_LEAST : next > SPIN_MOST ? SPIN_MOST : next;
}
