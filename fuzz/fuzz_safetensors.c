/* SPDX-License-Identifier: Apache-2.0 */
/* Damaged safetensors files: refused with a reason, or opened with tensors inside the file. */
#include "engine/safetensors.h"
#include "fuzz/fuzz_driver.h"

static void try_tensor(const struct st_file *f, const struct st_tensor *t, size_t n_file)
{
    fuzz_require(t->n_dims >= 0 && t->n_dims <= ST_MAX_DIMS);
    int64_t n_elems = 1;
    for (int i = 0; i < t->n_dims; i++) {
        fuzz_require(t->dims[i] >= 0);
        fuzz_require(!__builtin_mul_overflow(n_elems, t->dims[i], &n_elems));
    }
    fuzz_require(t->n_elems == n_elems);
    fuzz_require(t->dtype == ST_OTHER || t->n_bytes == (size_t)n_elems * st_dtype_bytes(t->dtype));
    fuzz_require((t->n_bytes == 0) == (n_elems == 0));
    fuzz_require(t->file_offset <= n_file && t->n_bytes <= n_file - t->file_offset);
    const size_t n = t->n_bytes < 64 ? t->n_bytes : 64;
    char bytes[65];
    fuzz_require(st_read(f, t, 0, n, bytes) == DCP_OK);
    fuzz_require(st_read(f, t, t->n_bytes - n, n, bytes) == DCP_OK);
    fuzz_require(st_read(f, t, t->n_bytes - n, n + 1, bytes) != DCP_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct st_file *f = NULL;
    if (st_open(fuzz_path(data, n_bytes), &f) != DCP_OK) {
        fuzz_require(f == NULL && dcp_last_error()[0] != '\0');
        return 0;
    }
    /* Whatever stands in quotes may be a name. */
    char name[128];
    size_t begin = n_bytes;
    for (size_t at = 0; at < n_bytes && at < 1 << 16; at++) {
        if (data[at] != '"') continue;
        if (begin < at && at - begin - 1 < sizeof(name)) {
            memcpy(name, data + begin + 1, at - begin - 1);
            name[at - begin - 1] = '\0';
            const struct st_tensor *t = st_find(f, name);
            if (t != NULL) try_tensor(f, t, n_bytes);
        }
        begin = at;
    }
    st_close(f);
    return 0;
}
