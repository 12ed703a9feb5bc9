/* SPDX-License-Identifier: Apache-2.0 */
/* dcp-attn info: what was built, what the machine has, and what would be used and why. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu_priv.h"
#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/launch.h"
#include "cli/message.h"
#include "cli/table.h"
#include "cli/topology.h"
#include "engine/kernel_list.h"

#if defined(__clang__)
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifndef DCP_BUILD_TYPE
#define DCP_BUILD_TYPE "unknown"
#endif
#ifndef DCP_BUILD_FLAGS
#define DCP_BUILD_FLAGS ""
#endif

enum { MAX_KERNELS = 128, MAX_MPI_MODULES = 8 };

struct info_values {
    int isa;
    bool json;
};

#define AT(field) offsetof(struct info_values, field)
static const struct option_def info_options[] = {
    {"isa", 0, OPT_ENUM, AT(isa), NULL, 0, 0, ISA_CHOICES,
     "show the choice under this highest level (default auto)"},
    {"json", 0, OPT_FLAG, AT(json), NULL, 0, 0, NULL, "one JSON object on stdout"},
};
#undef AT

static const struct command_def info_command = {
    "info",
    "",
    0,
    0,
    "Print the build, the CPU, the kernels chosen and why not higher ones, the topology, and the\n"
    "group backends that are there.",
    info_options,
    sizeof(info_options) / sizeof(info_options[0]),
    NULL};

struct machine {
    struct dcp__cpu cpu;
    dcp_isa isa;
    int n_affinity, n_usable;
    struct topology topology;
    char binding[160]; /* of one rank with a thread on each usable CPU */
    uint64_t memory_bytes, available_bytes;
    char huge_pages[32]; /* transparent: always, madvise or never */
    struct kernel_choice kernels[MAX_KERNELS];
    size_t n_kernels;
    struct launch_mpi_module mpi[MAX_MPI_MODULES];
    size_t n_mpi;
};

static uint64_t meminfo_bytes(const char *key)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    const size_t len = strlen(key);
    if (f == NULL) return 0;
    while (fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, key, len) == 0 && sscanf(line + len, ": %llu", &kib) == 1) break;
    }
    fclose(f);
    return (uint64_t)kib * 1024;
}

/* The word in brackets. */
static void read_huge_pages(char *buf, size_t n_bytes)
{
    char line[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    snprintf(buf, n_bytes, "unknown");
    if (f == NULL) return;
    if (fgets(line, sizeof(line), f) != NULL) {
        const char *open = strchr(line, '[');
        if (open != NULL) snprintf(buf, n_bytes, "%.*s", (int)strcspn(open + 1, "]"), open + 1);
    }
    fclose(f);
}

/* What --bind auto comes to where a rank has a thread for every usable core. */
static void read_binding(struct machine *m)
{
    static struct topology_cores cores;
    struct binding b = {.n = 0};
    topology_read_cores(&cores);
    const int n = cores.n > 0 && cores.n < m->n_usable ? cores.n : m->n_usable;
    (void)binding_share(BIND_AUTO, &cores, m->n_usable, 1, 0, n, &b);
    snprintf(m->binding, sizeof(m->binding), "%s", b.text);
}

static dcp_status look(const struct info_values *v, struct machine *m)
{
    cpu_set_t set;
    memset(m, 0, sizeof(*m));
    dcp__cpu_detect(&m->cpu);
    const dcp_status st = dcp__isa_choose((dcp_isa)v->isa, &m->isa);
    if (st != DCP_OK) return st;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) m->n_affinity = CPU_COUNT(&set);
    m->n_usable = dcp__cpu_usable();
    topology_read(&m->topology);
    read_binding(m);
    m->memory_bytes = meminfo_bytes("MemTotal");
    m->available_bytes = meminfo_bytes("MemAvailable");
    read_huge_pages(m->huge_pages, sizeof(m->huge_pages));
    m->n_kernels = kernel_list(m->isa, m->kernels, MAX_KERNELS);
    if (m->n_kernels > MAX_KERNELS) m->n_kernels = MAX_KERNELS;
    m->n_mpi = launch_list_mpi(m->mpi, MAX_MPI_MODULES);
    return DCP_OK;
}

struct feature {
    const char *name;
    bool is_there;
};

static size_t features(const struct dcp__cpu *c, struct feature *out)
{
    const struct feature all[] = {{"avx2", c->avx2},
                                  {"fma", c->fma},
                                  {"f16c", c->f16c},
                                  {"avx512", c->avx512},
                                  {"avx512_vnni", c->avx512_vnni},
                                  {"avx512_bf16", c->avx512_bf16},
                                  {"avx512_fp16", c->avx512_fp16},
                                  {"amx_bf16", c->amx_bf16},
                                  {"amx_int8", c->amx_int8}};
    memcpy(out, all, sizeof(all));
    return sizeof(all) / sizeof(all[0]);
}

/* Why the level in use is not a higher one. */
static void why_not_higher(const struct machine *m, char *buf, size_t n_bytes)
{
    const dcp_isa best = dcp__cpu_best_isa(&m->cpu);
    if (m->isa < best) {
        snprintf(buf, n_bytes, "the CPU has %s; --isa or DCP_ATTN_ISA, or what was built, says %s",
                 dcp__isa_name(best), dcp__isa_name(m->isa));
    } else {
        snprintf(buf, n_bytes, "%s", m->cpu.why_not_higher);
    }
}

enum { INDENT = 11 }; /* of what stands behind the heads */

static void print_topology(const struct topology *t)
{
    char text[512], a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES], c[TABLE_CELL_BYTES];
    if (!t->is_known) {
        message_fold(stdout, "topology", INDENT, "not known (built without hwloc)");
        return;
    }
    int n = snprintf(text, sizeof(text),
                     "%d package%s, %d NUMA node%s, %d core%s, %d thread%s; L1d %s, L2 %s",
                     t->packages, message_s(t->packages), t->numa_nodes, message_s(t->numa_nodes),
                     t->cores, message_s(t->cores), t->threads, message_s(t->threads),
                     table_bytes(t->l1d_bytes, a), table_bytes(t->l2_bytes, b));
    if (t->l3_caches > 0)
        snprintf(text + n, sizeof(text) - (size_t)n, ", %d L3 of %s", t->l3_caches,
                 table_bytes(t->l3_bytes, c));
    message_fold(stdout, "topology", INDENT, text);
}

static void print_groups(const struct machine *m)
{
    message_fold(stdout, "groups", INDENT, "self, threads, shm");
    for (size_t i = 0; i < m->n_mpi; i++) {
        char head[64];
        snprintf(head, sizeof(head), "  mpi %s: ", m->mpi[i].name);
        message_fold(stdout, head, INDENT, m->mpi[i].text);
    }
}

static void print_kernels(const struct machine *m)
{
    int family = 0, types = 0; /* widths */
    for (size_t i = 0; i < m->n_kernels; i++) {
        const struct kernel_choice *const k = &m->kernels[i];
        if ((int)strlen(k->family) > family) family = (int)strlen(k->family);
        if ((int)strlen(k->types) > types) types = (int)strlen(k->types);
    }
    printf("kernels\n");
    for (size_t i = 0; i < m->n_kernels; i++) {
        const struct kernel_choice *const k = &m->kernels[i];
        printf("  %-*s  %-*s  %s\n", family, k->family, types, k->types, k->name);
    }
}

static void print_text(const struct machine *m)
{
    struct feature f[16];
    char text[512], why[256], a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES];
    const size_t n_features = features(&m->cpu, f);
    snprintf(text, sizeof(text), "%s (header %s), %s, %s", dcp_version(), DCP_VERSION, COMPILER,
             DCP_BUILD_TYPE);
    message_fold(stdout, "dcp-attn", INDENT, text);
    message_fold(stdout, "flags", INDENT, DCP_BUILD_FLAGS);
    message_fold(stdout, "CPU", INDENT, m->cpu.brand);
    size_t n = 0;
    text[0] = '\0';
    for (size_t i = 0; i < n_features; i++)
        if (f[i].is_there)
            n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s", n > 0 ? " " : "", f[i].name);
    message_fold(stdout, "features", INDENT, text);
    snprintf(text, sizeof(text), "%d usable (%d by affinity%s)", m->n_usable, m->n_affinity,
             m->n_usable < m->n_affinity ? ", fewer by the cgroup's quota" : "");
    message_fold(stdout, "CPUs", INDENT, text);
    print_topology(&m->topology);
    message_fold(stdout, "binding", INDENT, m->binding);
    snprintf(text, sizeof(text), "%s, %s available; transparent huge pages: %s",
             table_bytes(m->memory_bytes, a), table_bytes(m->available_bytes, b), m->huge_pages);
    message_fold(stdout, "memory", INDENT, text);
    why_not_higher(m, why, sizeof(why));
    snprintf(text, sizeof(text), "%s%s%s%s", dcp__isa_name(m->isa), why[0] ? " (not higher: " : "",
             why, why[0] ? ")" : "");
    message_fold(stdout, "level", INDENT, text);
    print_groups(m);
    print_kernels(m);
}

static void json_features(struct json_out *j, const struct machine *m)
{
    struct feature f[16];
    const size_t n = features(&m->cpu, f);
    jout_object(j, "features");
    for (size_t i = 0; i < n; i++) jout_bool(j, f[i].name, f[i].is_there);
    jout_object_end(j);
}

static void json_kernels(struct json_out *j, const struct machine *m)
{
    jout_array(j, "kernels");
    for (size_t i = 0; i < m->n_kernels; i++) {
        jout_object(j, NULL);
        jout_str(j, "family", m->kernels[i].family);
        jout_str(j, "types", m->kernels[i].types);
        jout_str(j, "name", m->kernels[i].name);
        jout_object_end(j);
    }
    jout_array_end(j);
}

static void json_groups(struct json_out *j, const struct machine *m)
{
    jout_object(j, "groups");
    jout_bool(j, "self", true);
    jout_bool(j, "threads", true);
    jout_bool(j, "shm", true);
    jout_array(j, "mpi");
    for (size_t i = 0; i < m->n_mpi; i++) {
        jout_object(j, NULL);
        jout_str(j, "name", m->mpi[i].name);
        jout_str(j, "path", m->mpi[i].path);
        jout_bool(j, "loads", m->mpi[i].loads);
        jout_str(j, "text", m->mpi[i].text);
        jout_object_end(j);
    }
    jout_array_end(j);
    jout_object_end(j);
}

static void json_topology(struct json_out *j, const struct topology *t)
{
    jout_object(j, "topology");
    jout_bool(j, "known", t->is_known);
    jout_int(j, "packages", t->packages);
    jout_int(j, "numa_nodes", t->numa_nodes);
    jout_int(j, "cores", t->cores);
    jout_int(j, "threads", t->threads);
    jout_int(j, "l1d_bytes", (int64_t)t->l1d_bytes);
    jout_int(j, "l2_bytes", (int64_t)t->l2_bytes);
    jout_int(j, "l3_bytes", (int64_t)t->l3_bytes);
    jout_int(j, "l3_caches", t->l3_caches);
    jout_object_end(j);
}

static void print_json(const struct machine *m)
{
    struct json_out j;
    char why[256];
    jout_begin(&j, stdout);
    jout_str(&j, "version", dcp_version());
    jout_str(&j, "header_version", DCP_VERSION);
    jout_str(&j, "compiler", COMPILER);
    jout_str(&j, "build_type", DCP_BUILD_TYPE);
    jout_str(&j, "flags", DCP_BUILD_FLAGS);
    jout_str(&j, "cpu", m->cpu.brand);
    json_features(&j, m);
    jout_int(&j, "cpus_usable", m->n_usable);
    jout_int(&j, "cpus_affinity", m->n_affinity);
    json_topology(&j, &m->topology);
    jout_str(&j, "binding", m->binding);
    jout_int(&j, "memory_bytes", (int64_t)m->memory_bytes);
    jout_int(&j, "available_bytes", (int64_t)m->available_bytes);
    jout_str(&j, "huge_pages", m->huge_pages);
    jout_str(&j, "isa", dcp__isa_name(m->isa));
    why_not_higher(m, why, sizeof(why));
    jout_str(&j, "why_not_higher", why);
    json_kernels(&j, m);
    json_groups(&j, m);
    jout_end(&j);
}

int cmd_info(int argc, char **argv)
{
    struct info_values v = {0};
    struct machine m;
    int n_operands, rc;
    if (!command_parse(&info_command, argc, argv, &v, &n_operands, &rc)) return rc;
    if (!launch_mpi_env_is_first()) return EXIT_DONE; /* it has no ranks: one speaks */
    char refusal[256];
    if (!isa_is_there(v.isa, refusal, sizeof(refusal)))
        return usage_error(&info_command, "%s", refusal);
    if (look(&v, &m) != DCP_OK) return failed();
    if (v.json) {
        print_json(&m);
    } else {
        print_text(&m);
    }
    return finish_stdout(EXIT_DONE);
}
