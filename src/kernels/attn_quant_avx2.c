/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention over int8 and fp8 by AVX2: primitives and the shared text. */
#include "kernels/simd_f32_avx2.h"

#define ATTN_FOR_SCALES 1
#define ATTN_KERNEL(name) name##__avx2
#include "kernels/attn_tpl.h"
