/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DCP_BASE_CLOCK_PRIV_H
#define DCP_BASE_CLOCK_PRIV_H
#include <stdint.h>
/* CLOCK_MONOTONIC. */
double dcp__now_s(void);
int64_t dcp__now_ns(void);
#endif
