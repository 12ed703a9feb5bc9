/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/elements.h"

#include <math.h>
#include <string.h>

/* Bits of the significand with the leading one, least and largest exponent as frexp counts. */
struct shape {
    int bits, least, most;
};

static struct shape shape_of(dcp_dtype type)
{
    if (type == DCP_F16) return (struct shape){11, -13, 16};
    return (struct shape){type == DCP_BF16 ? 8 : 24, -125, 128};
}

static double from_f16(uint16_t h)
{
    const int e = (h >> 10) & 31;
    const double m = h & 1023;
    const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
    if (e == 31) return m == 0.0 ? sign * (double)INFINITY : (double)NAN;
    return sign * (e == 0 ? ldexp(m, -24) : ldexp(m + 1024.0, e - 25));
}

double element_get(dcp_dtype type, const void *p, int64_t i)
{
    if (type == DCP_F32) return (double)((const float *)p)[i];
    const uint16_t h = ((const uint16_t *)p)[i];
    if (type == DCP_F16) return from_f16(h);
    const uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof(x));
    return (double)x;
}

double element_ulp(dcp_dtype type, double x)
{
    const struct shape s = shape_of(type);
    int e = s.most;
    if (isfinite(x)) (void)frexp(x, &e);
    if (x == 0.0 || e < s.least) e = s.least;
    if (e > s.most) e = s.most;
    return ldexp(1.0, e - s.bits);
}

double element_round(dcp_dtype type, double x)
{
    if (!isfinite(x)) return x;
    const double ulp = element_ulp(type, x);
    const double y = nearbyint(x / ulp) * ulp;
    return fabs(y) >= ldexp(1.0, shape_of(type).most) ? copysign((double)INFINITY, x) : y;
}
