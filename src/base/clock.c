/* SPDX-License-Identifier: Apache-2.0 */
#include "base/clock_priv.h"

#include <time.h>

int64_t dcp__now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

double dcp__now_s(void)
{
    return (double)dcp__now_ns() * 1e-9;
}
