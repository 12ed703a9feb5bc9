/* SPDX-License-Identifier: Apache-2.0 */
/* Rows through a linear map by AVX2: primitives and the shared text. */
#include "kernels/simd_f32_avx2.h"

#define PROJECT_KERNEL(name) name##__avx2
#include "kernels/project_tpl.h"
