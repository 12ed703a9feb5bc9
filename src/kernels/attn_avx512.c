/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention by AVX-512: primitives and the shared text. */
#include "kernels/simd_f32_avx512.h"

#define ATTN_FOR_SCALES 0
#define ATTN_KERNEL(name) name##__avx512
#include "kernels/attn_tpl.h"
