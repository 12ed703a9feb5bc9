/* SPDX-License-Identifier: Apache-2.0 */
/* Products with activations in int16, AVX-512 with VNNI: vpdpbusd sums bytes by bytes. */
#define SUM_4(acc, u8, s8) _mm512_dpbusd_epi32(acc, u8, s8)
#define NAME(type) dcp__qdot16_##type##__avx512vnni
#include "kernels/qdot16_avx512_tpl.h"
