/* SPDX-License-Identifier: Apache-2.0 */
/* Constants that the vector headers of every ISA share, so that they give the same bits. */
#ifndef DCP_KERNELS_SIMD_F32_COEF_H
#define DCP_KERNELS_SIMD_F32_COEF_H

/* 2^f on [0, 1]: 1 + c1 f + ... + c5 f^5, least maximum relative error with p(0) = 1: 8.3e-8 in
 * exact arithmetic, below 2.5e-7 as evaluated (test_exp in tests/kernels/test_attn_kernels.c). */
#define VF_EXP2_C1 0x1.62e4bap-1f
#define VF_EXP2_C2 0x1.ebdb56p-3f
#define VF_EXP2_C3 0x1.c91ce6p-5f
#define VF_EXP2_C4 0x1.277852p-7f
#define VF_EXP2_C5 0x1.e97504p-10f

/* tanh x = x + x u (c0 + c1 u + ... + c4 u^4), u = x^2, |x| <= 0.625, least maximum relative error:
 * 4.4e-9. Beyond: (1 - e) / (1 + e), e = 2^(-2 log2(e) |x|). */
#define VF_TANH_C0 -0.3333328f
#define VF_TANH_C1 0.13331442f
#define VF_TANH_C2 -0.053739715f
#define VF_TANH_C3 0.020639086f
#define VF_TANH_C4 -0.005704985f
#define VF_TANH_ARG -2.8853900817779268f

#define VF_INF __builtin_inff()

/* Register blocks are arrays; they live in registers only if the loops over them are unrolled. */
#ifdef __clang__
#define VF_UNROLL _Pragma("clang loop unroll(full)")
#else
#define VF_UNROLL _Pragma("GCC unroll 16")
#endif

#endif
