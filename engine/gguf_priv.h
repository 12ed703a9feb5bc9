/* SPDX-License-Identifier: Apache-2.0 */
/* What gguf.c parses and gguf_values.c reads. */
#ifndef DCP_ENGINE_GGUF_PRIV_H
#define DCP_ENGINE_GGUF_PRIV_H

#include "base/status_priv.h"
#include "engine/gguf.h"

struct kv {
    const char *key; /* into head, set when the header is complete */
    uint64_t key_off, value_off;
    uint64_t n;      /* string: bytes; array: elements; else 1 */
    uint64_t *elems; /* string array: offset of each element's length word */
    enum gguf_type type, elem_type;
};

struct gguf {
    int fd;
    char *path;
    uint64_t file_bytes;
    unsigned char *head;
    uint64_t head_bytes, head_capacity; /* read so far, room */
    uint64_t at;                        /* parser's place */
    struct kv *kvs, **by_key;
    size_t n_kvs;
    struct gguf_tensor *tensors, **by_name;
    size_t n_tensors;
};

/* Of a fixed-size type; 0 for strings and arrays. */
size_t gguf__type_bytes(enum gguf_type type);
bool gguf__is_type(uint32_t type);
/* n_bytes of the file from offset on. */
dcp_status gguf__read_at(const struct gguf *g, uint64_t offset, size_t n_bytes, void *dst);

static inline uint32_t load_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t load_u64(const unsigned char *p)
{
    return (uint64_t)load_u32(p) | (uint64_t)load_u32(p + 4) << 32;
}

#endif
