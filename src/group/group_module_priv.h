/* SPDX-License-Identifier: Apache-2.0 */
/* What a transport in a shared object of its own gets of the library. Everything internal is
 * hidden; this table is the one exported internal symbol. The library (libdcpattn.so, or a command
 * that holds it) defines it, the module refers to it, so that both share one last error, one
 * allocator, one fault. Both come from one build: version is compared. */
#ifndef DCP_GROUP_GROUP_MODULE_PRIV_H
#define DCP_GROUP_GROUP_MODULE_PRIV_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "group/group_mem_priv.h"

typedef dcp_status dcp__fail_at_fn(dcp_status st, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
typedef dcp_status dcp__poison_at_fn(dcp_group *g, dcp_status code, const char *file, int line,
                                     const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* A word of what both sides lay their hands on: two builds of one version that differ in a
 * structure differ here. */
#define DCP__MIX(n, factor) ((uint64_t)(n)*UINT64_C(factor))
#define DCP__MODULE_LAYOUT                                                                         \
    (DCP__MIX(sizeof(struct dcp_group), 1000003) +                                                 \
     DCP__MIX(sizeof(struct dcp__group_ops), 10007) +                                              \
     DCP__MIX(sizeof(struct dcp__group_opts), 100003) +                                            \
     DCP__MIX(sizeof(struct dcp__poison), 1009) +                                                  \
     DCP__MIX(sizeof(struct dcp__split), 1000000007) +                                             \
     DCP__MIX(sizeof(struct dcp__xfer), 10000019) +                                                \
     DCP__MIX(sizeof(struct dcp__wait), 100000007) +                                               \
     DCP__MIX(sizeof(struct dcp__local_alloc), 1000000009) +                                       \
     DCP__MIX(offsetof(struct dcp_group, poison), 10000000019) +                                   \
     DCP__MIX(offsetof(struct dcp_group, outer), 100000000003) +                                   \
     DCP__MIX(offsetof(struct dcp__group_ops, exchange_start), 1000000000039) +                    \
     DCP__MIX(offsetof(struct dcp__group_ops, keeps_buffers), 10000000000037) +                    \
     DCP__MIX(DCP__RECORD_MAX, 100000000000031) + DCP__MIX(DCP__ALL_SLOTS, 1000000000000037))

struct dcp__group_module {
    size_t struct_size;
    const char *version;
    dcp__fail_at_fn *fail_at;
    dcp_status (*alloc_array)(size_t n, size_t elem_bytes, const char *what, void **ptr_out);
    void (*free)(void *ptr);
    int64_t (*now_ns)(void);
    dcp_status (*opts_read)(const dcp_group_opts *opts, struct dcp__group_opts *opts_out);
    dcp_status (*load_fault)(int size, bool ranks_are_processes);
    dcp_status (*init)(dcp_group *g, const struct dcp__group_ops *ops, int rank, int size,
                       int64_t deadline_ns, struct dcp__poison *poison);
    void (*fini)(dcp_group *g);
    dcp_status (*set_hosts)(dcp_group *g, const int *host_of_rank, int ranks_per_host);
    dcp_status (*agree)(dcp_group *g, const char *what, dcp_status own);
    bool (*any_locate)(const dcp_group *g, const void *ptr, size_t n_bytes, uint32_t *alloc_id_out,
                       uint64_t *offset_out);
    void *(*any_peer_ptr)(const dcp_group *g, int rank, uint32_t alloc_id, uint64_t offset,
                          size_t n_bytes);
    dcp__poison_at_fn *poison_at;
    dcp_status (*poison_status)(dcp_group *g);
    const char *(*call_name)(uint32_t call);
    void (*fault_point)(const dcp_group *g, const char *point);
    enum dcp__wait_step (*wait_next)(struct dcp__wait *w, unsigned spin_rounds);
    dcp_status (*local_alloc)(dcp_group *g, size_t n_bytes, void **ptr_out);
    void (*local_free)(dcp_group *g, void *ptr);
    void (*local_free_list)(struct dcp__local_alloc *list);
    /* a group over shared memory, to be wrapped */
    const struct dcp__group_ops *shm_ops;
    dcp_status (*shm_make)(int n, const struct dcp__group_opts *opts, dcp_shm **shm_out);
    int (*shm_fd)(const dcp_shm *shm);
    dcp_status (*shm_join)(int n, int holder_pid, int holder_fd, dcp_shm **shm_out);
    dcp_status (*shm_enter)(dcp_shm *shm, int rank, dcp_group **group_out);
    void (*shm_release)(dcp_shm *shm);
    /* Last, so that the functions with which a misfit is reported keep their places. */
    uint64_t layout;
};

DCP_API const struct dcp__group_module *dcp__group_module(void);

/* What keeps a module from working with this library, or NULL. */
static inline const char *dcp__module_misfit(const struct dcp__group_module *lib)
{
    if (lib->struct_size != sizeof(struct dcp__group_module)) return "another table of functions";
    if (strcmp(lib->version, DCP_VERSION) != 0) return "another version";
    return lib->layout == DCP__MODULE_LAYOUT ? NULL : "another layout of structures";
}

#endif
