/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through a linear map by AVX-512: primitives and the shared text. */
#include "kernels/simd_f32_avx512.h"

#define PROJECT_KERNEL(name) name##__avx512
#include "kernels/project_tpl.h"
