/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX2 with AVX-VNNI: vpdpbusd sums bytes by bytes. */
#define SUM_4(acc, u8, s8) _mm256_dpbusd_avx_epi32(acc, u8, s8)
#define NAME(type) dcp__qdot16_##type##__avxvnni
#include "kernels/qdot16_avx2_tpl.h"
