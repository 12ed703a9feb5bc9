/* SPDX-License-Identifier: Apache-2.0 */
/* The merge kernels for AVX-512. One inclusion of a template per kernel. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels_priv.h"
#include "kernels/merge_vec_avx512.h"
#include "num/vmath_tpl.h"

#define MERGE_UNROLL 4
#define MERGE_WEIGHTS_FN dcp__merge_weights__avx512
#include "kernels/merge_weights_tpl.h"

#define MERGE_FN dcp__merge_row_f32_f32__avx512
#define MERGE_LOAD vf_load_f32
#define MERGE_PART DCP_F32
#define MERGE_PART_BYTES 4
#define MERGE_STORE vf_store_f32
#define MERGE_MERGED DCP_F32
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_f32_bf16__avx512
#define MERGE_LOAD vf_load_f32
#define MERGE_PART DCP_F32
#define MERGE_PART_BYTES 4
#define MERGE_STORE vf_store_bf16
#define MERGE_MERGED DCP_BF16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_f32_f16__avx512
#define MERGE_LOAD vf_load_f32
#define MERGE_PART DCP_F32
#define MERGE_PART_BYTES 4
#define MERGE_STORE vf_store_f16
#define MERGE_MERGED DCP_F16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_bf16_f32__avx512
#define MERGE_LOAD vf_load_bf16
#define MERGE_PART DCP_BF16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_f32
#define MERGE_MERGED DCP_F32
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_bf16_bf16__avx512
#define MERGE_LOAD vf_load_bf16
#define MERGE_PART DCP_BF16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_bf16
#define MERGE_LOAD2 vf_load2_bf16
#define MERGE_STORE2 vf_store2_bf16
#define MERGE_PACKED __m512i
#define MERGE_PACK2 vf_joined_bf16
#define MERGE_PACKED_BAD vf_bad_packed_bf16
#define MERGE_PACKED_STORE vf_store_packed_bf16
#define MERGE_MERGED DCP_BF16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_bf16_f16__avx512
#define MERGE_LOAD vf_load_bf16
#define MERGE_PART DCP_BF16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_f16
#define MERGE_MERGED DCP_F16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_f16_f32__avx512
#define MERGE_LOAD vf_load_f16
#define MERGE_PART DCP_F16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_f32
#define MERGE_MERGED DCP_F32
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_f16_bf16__avx512
#define MERGE_LOAD vf_load_f16
#define MERGE_PART DCP_F16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_bf16
#define MERGE_MERGED DCP_BF16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_f16_f16__avx512
#define MERGE_LOAD vf_load_f16
#define MERGE_PART DCP_F16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_f16
#define MERGE_MERGED DCP_F16
#include "kernels/merge_row_tpl.h"

/* The same past the caches, for results that would not stay in them. */
#define MERGE_FN dcp__merge_row_nt_f32_f32__avx512
#define MERGE_LOAD vf_load_f32
#define MERGE_PART DCP_F32
#define MERGE_PART_BYTES 4
#define MERGE_STORE vf_store_f32
#define MERGE_STORE_WHOLE vf_stream_f32
#define MERGE_MERGED DCP_F32
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_nt_bf16_bf16__avx512
#define MERGE_LOAD vf_load_bf16
#define MERGE_PART DCP_BF16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_bf16
#define MERGE_LOAD2 vf_load2_bf16
#define MERGE_STORE2 vf_stream2_bf16
#define MERGE_PACKED __m512i
#define MERGE_PACK2 vf_joined_bf16
#define MERGE_PACKED_BAD vf_bad_packed_bf16
#define MERGE_PACKED_STORE vf_stream_packed_bf16
#define MERGE_MERGED DCP_BF16
#include "kernels/merge_row_tpl.h"

#define MERGE_FN dcp__merge_row_nt_f16_f16__avx512
#define MERGE_LOAD vf_load_f16
#define MERGE_PART DCP_F16
#define MERGE_PART_BYTES 2
#define MERGE_STORE vf_store_f16
#define MERGE_STORE_WHOLE vf_stream_f16
#define MERGE_MERGED DCP_F16
#include "kernels/merge_row_tpl.h"
