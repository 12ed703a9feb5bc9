/* SPDX-License-Identifier: Apache-2.0 */
/* The merge's vector primitives with one lane: the plain meaning of each. merge_vec_avx2.h and
 * merge_vec_avx512.h give the same names with 8 and 16 lanes.
 *   vf, vu                float and unsigned lanes
 *   vf_load_T(p, i)       VF_LANES elements of type T from index i, widened
 *   vf_store_T(p, i, v)   rounded to nearest even
 *   vbad                  which lanes were NaN or infinite */
#ifndef DCP_KERNELS_MERGE_VEC_SCALAR_H
#define DCP_KERNELS_MERGE_VEC_SCALAR_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "num/dtype_priv.h"

enum { VF_LANES = 1 };
typedef float vf;
typedef uint32_t vu;
typedef bool vbad;

static inline vf vf_set1(float x)
{
    return x;
}
static inline vf vf_add(vf a, vf b)
{
    return a + b;
}
static inline vf vf_sub(vf a, vf b)
{
    return a - b;
}
static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}
static inline vf vf_div(vf a, vf b)
{
    return a / b;
}
static inline vf vf_fma(vf a, vf b, vf c)
{
    return fmaf(a, b, c);
}
static inline vf vf_max(vf a, vf b)
{
    return a > b ? a : b;
}
static inline vf vf_select_lt(vf a, vf b, vf x, vf y)
{
    return a < b ? x : y;
}
static inline vu vu_set1(uint32_t x)
{
    return x;
}
static inline vu vu_of(vf a)
{
    return dcp__f32_bits(a);
}
static inline vf vf_of(vu a)
{
    return dcp__f32_from_bits(a);
}
static inline vu vu_add(vu a, vu b)
{
    return a + b;
}
static inline vu vu_sub(vu a, vu b)
{
    return a - b;
}
static inline vu vu_shl23(vu a)
{
    return a << 23;
}
static inline vu vu_sar23(vu a)
{
    return (a >> 23) | ((a & 0x80000000u) != 0 ? 0xfffffe00u : 0u);
}
static inline vf vf_from_vu(vu a)
{
    return (float)(int32_t)a;
}
static inline vf vf_load_f32(const void *p, int64_t i)
{
    return ((const float *)p)[i];
}
static inline vf vf_load_bf16(const void *p, int64_t i)
{
    return dcp__bf16_to_f32(((const uint16_t *)p)[i]);
}
static inline vf vf_load_f16(const void *p, int64_t i)
{
    return dcp__f16_to_f32(((const uint16_t *)p)[i]);
}
static inline void vf_store_f32(void *p, int64_t i, vf v)
{
    ((float *)p)[i] = v;
}
static inline void vf_store_bf16(void *p, int64_t i, vf v)
{
    ((uint16_t *)p)[i] = dcp__f32_to_bf16(v);
}
static inline void vf_store_f16(void *p, int64_t i, vf v)
{
    ((uint16_t *)p)[i] = dcp__f32_to_f16(v);
}
static inline vbad vf_bad(vf a)
{
    return (dcp__f32_bits(a) & 0x7f800000u) == 0x7f800000u;
}
static inline vbad vbad_or(vbad a, vbad b)
{
    return a || b;
}
static inline bool vbad_any(vbad a)
{
    return a;
}

#endif
