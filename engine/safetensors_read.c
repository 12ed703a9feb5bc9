/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/safetensors_read.h"

#include <math.h>
#include <string.h>

#include "base/status_priv.h"
#include "num/dtype_priv.h"

dcp_status st_need(const struct st_file *f, const char *path, const char *name, int n_dims,
                   const struct st_tensor **tensor_out)
{
    const struct st_tensor *t = st_find(f, name);
    if (t == NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: no tensor '%s'; the file must hold one", path, name);
    if (t->n_dims != n_dims)
        return dcp__fail(DCP_ERR_FORMAT, "%s: tensor '%s' has %d dimensions, not %d", path, name,
                         t->n_dims, n_dims);
    *tensor_out = t;
    return DCP_OK;
}

static dcp_status check_floats(const char *path, const struct st_tensor *t)
{
    if (t->dtype == ST_F64 || st_to_dcp(t->dtype) != DCP_DTYPE_DEFAULT) return DCP_OK;
    return dcp__fail(DCP_ERR_FORMAT, "%s: tensor '%s' is %.20s; F32, F16, BF16 or F64 is needed",
                     path, t->name, t->dtype_name);
}

static dcp_status check_ints(const char *path, const struct st_tensor *t)
{
    if (t->dtype == ST_I64 || t->dtype == ST_I32) return DCP_OK;
    return dcp__fail(DCP_ERR_FORMAT, "%s: tensor '%s' is %.20s; I64 or I32 is needed", path,
                     t->name, t->dtype_name);
}

dcp_status st_need_floats(const struct st_file *f, const char *path, const char *name, int n_dims,
                          const struct st_tensor **tensor_out)
{
    DCP_TRY(st_need(f, path, name, n_dims, tensor_out));
    return check_floats(path, *tensor_out);
}

dcp_status st_need_ints(const struct st_file *f, const char *path, const char *name, int n_dims,
                        const struct st_tensor **tensor_out)
{
    DCP_TRY(st_need(f, path, name, n_dims, tensor_out));
    return check_ints(path, *tensor_out);
}

dcp_dtype st_float_type(const struct st_tensor *t)
{
    return t->dtype == ST_F64 ? DCP_F32 : st_to_dcp(t->dtype);
}

static dcp_status read_f64(const struct st_file *f, const struct st_tensor *t, int64_t begin,
                           int64_t n, float *dst)
{
    double some[512];
    const int64_t n_some = (int64_t)(sizeof(some) / sizeof(some[0]));
    for (int64_t at = 0; at < n; at += n_some) {
        const int64_t m = n - at < n_some ? n - at : n_some;
        DCP_TRY(
            st_read(f, t, (size_t)(begin + at) * sizeof(double), (size_t)m * sizeof(double), some));
        for (int64_t i = 0; i < m; i++) {
            dst[at + i] = (float)some[i];
            if (isinf(dst[at + i]) && isfinite(some[i]))
                return dcp__fail(DCP_ERR_FORMAT,
                                 "%s: tensor '%s': element %lld is %.9g, beyond the range of F32, "
                                 "to which F64 is rounded",
                                 st_path(f), t->name, (long long)(begin + at + i), some[i]);
        }
    }
    return DCP_OK;
}

dcp_status st_read_f32(const struct st_file *f, const struct st_tensor *t, int64_t begin, int64_t n,
                       float *dst)
{
    if (n == 0) return DCP_OK;
    DCP_TRY(check_floats(st_path(f), t));
    if (t->dtype == ST_F64) return read_f64(f, t, begin, n, dst);
    const size_t bytes = st_dtype_bytes(t->dtype);
    /* Element i is read at the end of dst and written at 4 i: never over one not read yet. */
    char *const raw = (char *)dst + (size_t)n * (sizeof(float) - bytes);
    DCP_TRY(st_read(f, t, (size_t)begin * bytes, (size_t)n * bytes, raw));
    if (t->dtype == ST_F32) return DCP_OK;
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, raw + (size_t)i * sizeof(h), sizeof(h));
        const float x = t->dtype == ST_F16 ? dcp__f16_to_f32(h) : dcp__bf16_to_f32(h);
        memcpy((char *)dst + (size_t)i * sizeof(x), &x, sizeof(x));
    }
    return DCP_OK;
}

dcp_status st_read_i64(const struct st_file *f, const struct st_tensor *t, int64_t begin, int64_t n,
                       int64_t *dst)
{
    if (n == 0) return DCP_OK;
    DCP_TRY(check_ints(st_path(f), t));
    const size_t bytes = st_dtype_bytes(t->dtype);
    char *const raw = (char *)dst + (size_t)n * (sizeof(int64_t) - bytes);
    DCP_TRY(st_read(f, t, (size_t)begin * bytes, (size_t)n * bytes, raw));
    if (t->dtype == ST_I64) return DCP_OK;
    for (int64_t i = 0; i < n; i++) {
        int32_t narrow;
        memcpy(&narrow, raw + (size_t)i * sizeof(narrow), sizeof(narrow));
        const int64_t wide = narrow;
        memcpy((char *)dst + (size_t)i * sizeof(wide), &wide, sizeof(wide));
    }
    return DCP_OK;
}
