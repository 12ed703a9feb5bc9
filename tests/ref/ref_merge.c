/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/ref_merge.h"

#include <math.h>
#include <string.h>

double ref_get(dcp_dtype type, const void *p, int64_t i)
{
    if (type == DCP_F32) {
        float x;
        memcpy(&x, (const char *)p + 4 * i, sizeof(x));
        return (double)x;
    }
    uint16_t h;
    memcpy(&h, (const char *)p + 2 * i, sizeof(h));
    const int sign = h >> 15 ? -1 : 1;
    const int exp_bits = type == DCP_BF16 ? 8 : 5;
    const int man_bits = 15 - exp_bits;
    const int exponent = (h >> man_bits) & ((1 << exp_bits) - 1);
    const int mantissa = h & ((1 << man_bits) - 1);
    const int bias = (1 << (exp_bits - 1)) - 1;
    if (exponent == (1 << exp_bits) - 1)
        return mantissa != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - man_bits);
    return sign * ldexp(mantissa + (1 << man_bits), exponent - bias - man_bits);
}

void ref_put(dcp_dtype type, void *p, int64_t i, double x)
{
    if (type == DCP_F32) {
        const float f = (float)x;
        memcpy((char *)p + 4 * i, &f, sizeof(f));
        return;
    }
    const int exp_bits = type == DCP_BF16 ? 8 : 5;
    const int man_bits = 15 - exp_bits;
    const int bias = (1 << (exp_bits - 1)) - 1;
    const int infinity = ((1 << exp_bits) - 1) << man_bits;
    const int sign = signbit(x) ? 0x8000 : 0;
    int bits = 0;
    if (isnan(x)) {
        bits = infinity | (1 << (man_bits - 1)) | 1;
    } else if (isinf(x)) {
        bits = infinity;
    } else if (x != 0) {
        int e = 0;
        (void)frexp(fabs(x), &e); /* |x| in [2^(e-1), 2^e) */
        int unit = e - 1 - man_bits;
        if (unit < 1 - bias - man_bits) unit = 1 - bias - man_bits;
        /* Counted in units the codes are consecutive, over the border of a binade too. */
        const double n = nearbyint(ldexp(fabs(x), -unit));
        bits = unit == 1 - bias - man_bits ? (int)n
                                           : ((unit + bias + man_bits - 1) << man_bits) + (int)n;
        if (bits > infinity) bits = infinity;
    }
    const uint16_t h = (uint16_t)(sign | bits);
    memcpy((char *)p + 2 * i, &h, sizeof(h));
}

double ref_merge_weights(int n, const double *lse, const bool *is_empty, bool is_base_2,
                         const double *sink, double *w)
{
    const double unit = is_base_2 ? log(2.0) : 1.0;
    double top = -(double)INFINITY;
    for (int r = 0; r < n; r++) {
        if (!is_empty[r] && isfinite(lse[r]) && lse[r] > top) top = lse[r];
    }
    double sum = 0;
    for (int r = 0; r < n; r++) {
        w[r] = is_empty[r] || !isfinite(lse[r]) ? 0.0 : exp((lse[r] - top) * unit);
        sum += w[r];
    }
    if (sum == 0) return -(double)INFINITY;
    double whole = sum;
    if (sink != NULL) {
        if (*sink > top) {
            const double shrink = exp((top - *sink) * unit);
            for (int r = 0; r < n; r++) w[r] *= shrink;
            whole = sum * shrink + 1.0;
        } else {
            whole = sum + exp((*sink - top) * unit);
        }
    }
    for (int r = 0; r < n; r++) {
        w[r] /= whole;
        if (w[r] < ldexp(1.0, -126)) w[r] = 0;
    }
    return top + log(sum) / unit;
}

/* Half a unit in the last place of exact in type. */
static double half_ulp(dcp_dtype type, double exact)
{
    const int man_bits = type == DCP_F32 ? 23 : type == DCP_BF16 ? 7 : 10;
    const int lowest = type == DCP_F16 ? -24 : type == DCP_BF16 ? -133 : -149;
    int e = 0;
    (void)frexp(fabs(exact), &e);
    const int unit = e - 1 - man_bits;
    return ldexp(1.0, (unit < lowest ? lowest : unit) - 1);
}

double tol_merge(int n, double top, double exact, dcp_dtype type)
{
    /* Weight: difference of LSEs 0.37 (x e^x <= 1/e), exp 1.1, in numerator and (weighted mean) in
     * the denominator; the denominator's sum n - 1; division 1; then n roundings of the products'
     * sum, each of a partial sum of at most top. In units of 2^-24, rounded up. */
    const double acc = ldexp(2.0 * n + 6.0, -24) * top;
    return acc + half_ulp(type, exact) * 1.001 + ldexp(top, -126) +
           ldexp(n, -149) /* roundings among denormals */;
}

double tol_merge_tree(int n, int n_joins, double top, double exact, dcp_dtype type)
{
    const int further = n_joins > 1 ? n_joins - 1 : 0;
    return tol_merge(n, top, exact, type) + further * ldexp(n + 8.0, -24) * top;
}

double tol_merge_lse(int n, double exact)
{
    return ldexp(fabs(exact) + 2.0 * n + 12.0, -24);
}

uint64_t ref_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double ref_uniform(uint64_t *state, double low, double high)
{
    return low + (high - low) * ldexp((double)(ref_random(state) >> 11), -53);
}

int64_t ref_pick(uint64_t *state, int64_t n)
{
    return (int64_t)(ref_random(state) % (uint64_t)n);
}
