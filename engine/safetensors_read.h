/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a safetensors tensor as float or int64, whatever of the supported types it has. */
#ifndef DCP_ENGINE_SAFETENSORS_READ_H
#define DCP_ENGINE_SAFETENSORS_READ_H

#include "engine/safetensors.h"

/* The tensor of that name with that many dimensions; DCP_ERR_FORMAT that names path if there is
 * none. */
dcp_status st_need(const struct st_file *f, const char *path, const char *name, int n_dims,
                   const struct st_tensor **tensor_out);
/* The same, and of a type that st_read_f32 or st_read_i64 takes: where a tensor is known to be
 * asked for, before anything is read. */
dcp_status st_need_floats(const struct st_file *f, const char *path, const char *name, int n_dims,
                          const struct st_tensor **tensor_out);
dcp_status st_need_ints(const struct st_file *f, const char *path, const char *name, int n_dims,
                        const struct st_tensor **tensor_out);
/* What st_read_f32 can leave of a tensor's values: the type itself, F32 for F64. */
dcp_dtype st_float_type(const struct st_tensor *t);
/* Elements [begin, begin + n) of t (F32, F16, BF16, F64) into dst [n]. F64 is rounded to F32; a
 * finite one beyond its range is DCP_ERR_FORMAT. No scratch: narrow elements are read into the end
 * of dst and widened from the front. DCP_ERR_FORMAT for another type, naming it. */
dcp_status st_read_f32(const struct st_file *f, const struct st_tensor *t, int64_t begin, int64_t n,
                       float *dst);
/* The same for I64 and I32. */
dcp_status st_read_i64(const struct st_file *f, const struct st_tensor *t, int64_t begin, int64_t n,
                       int64_t *dst);

#endif
