/* SPDX-License-Identifier: Apache-2.0 */
/* Single elements of the library's types, as doubles: for checks and reports, not for speed. */
#ifndef DCP_CLI_ELEMENTS_H
#define DCP_CLI_ELEMENTS_H

#include "dcpattn/types.h"

/* p[i], exactly. */
double element_get(dcp_dtype type, const void *p, int64_t i);
/* The distance from x to the next number of the type; that of the largest binade for infinity. */
double element_ulp(dcp_dtype type, double x);
/* x rounded to the type, to nearest even; beyond its range infinity. */
double element_round(dcp_dtype type, double x);

#endif
