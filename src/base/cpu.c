/* SPDX-License-Identifier: Apache-2.0 */
/* A feature counts only where the CPU has it (CPUID), the operating system saves its registers
 * (XCR0) and, for AMX, the kernel has given this process leave to use the tiles. */
#include "base/cpu_priv.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

struct leaf {
    unsigned eax, ebx, ecx, edx;
};

static struct leaf cpuid(unsigned leaf, unsigned subleaf)
{
    struct leaf l = {0, 0, 0, 0};
    /* Zero where the leaf does not exist. */
    (void)__get_cpuid_count(leaf, subleaf, &l.eax, &l.ebx, &l.ecx, &l.edx);
    return l;
}

static bool bit(unsigned word, int i)
{
    return ((word >> i) & 1u) != 0;
}

static uint64_t read_xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static pthread_once_t amx_once = PTHREAD_ONCE_INIT;
static bool amx_permitted;

/* Linux 5.16 and later hand out the 8 KiB of tile state on request only (arch/x86/kernel/fpu). */
static void ask_amx_permission(void)
{
    enum { REQ_XCOMP_PERM = 0x1023, XFEATURE_TILEDATA = 18 };
    amx_permitted = syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_TILEDATA) == 0;
}

static void read_brand(char brand[64])
{
    unsigned words[12];
    if (cpuid(0x80000000u, 0).eax < 0x80000004u) return;
    for (unsigned i = 0; i < 3; i++) {
        const struct leaf l = cpuid(0x80000002u + i, 0);
        words[4 * i] = l.eax;
        words[4 * i + 1] = l.ebx;
        words[4 * i + 2] = l.ecx;
        words[4 * i + 3] = l.edx;
    }
    char text[sizeof(words) + 1];
    memcpy(text, words, sizeof(words));
    text[sizeof(words)] = '\0';
    snprintf(brand, 64, "%s", text + strspn(text, " "));
}

void dcp__cpu_detect(struct dcp__cpu *cpu_out)
{
    struct dcp__cpu cpu;
    memset(&cpu, 0, sizeof(cpu));
    const struct leaf l1 = cpuid(1, 0);
    const struct leaf l7 = cpuid(7, 0);
    const struct leaf l71 = l7.eax >= 1 ? cpuid(7, 1) : (struct leaf){0, 0, 0, 0};
    const bool osxsave = bit(l1.ecx, 27);
    const uint64_t xcr0 = osxsave ? read_xcr0() : 0;
    const bool os_ymm = (xcr0 & 0x06) == 0x06;        /* xmm, ymm */
    const bool os_zmm = (xcr0 & 0xe6) == 0xe6;        /* and opmask, upper zmm, zmm16-31 */
    const bool os_tile = (xcr0 & 0x60000) == 0x60000; /* tile configuration and data */
    const bool cpu_avx512 = bit(l7.ebx, 16) && bit(l7.ebx, 17) && bit(l7.ebx, 30) &&
                            bit(l7.ebx, 31) && bit(l7.ebx, 28); /* F DQ BW VL CD */
    const bool cpu_tile = bit(l7.edx, 24);
    cpu.avx2 = os_ymm && bit(l7.ebx, 5);
    cpu.fma = os_ymm && bit(l1.ecx, 12);
    cpu.f16c = os_ymm && bit(l1.ecx, 29);
    const bool has_avx2_level = cpu.avx2 && cpu.fma && cpu.f16c;
    cpu.avx_vnni = has_avx2_level && bit(l71.eax, 4);
    cpu.avx512 = os_zmm && cpu_avx512 && has_avx2_level;
    cpu.avx512_vnni = cpu.avx512 && bit(l7.ecx, 11);
    cpu.avx512_bf16 = cpu.avx512 && bit(l71.eax, 5);
    cpu.avx512_fp16 = cpu.avx512 && bit(l7.edx, 23);
    bool amx_leave = false;
    if (os_tile && cpu.avx512 && cpu_tile) {
        pthread_once(&amx_once, ask_amx_permission);
        amx_leave = amx_permitted;
        cpu.amx_bf16 = amx_leave && bit(l7.edx, 22);
        cpu.amx_int8 = amx_leave && bit(l7.edx, 25);
    }
    const char *why = "";
    if (!has_avx2_level) {
        const bool cpu_has = bit(l7.ebx, 5) && bit(l1.ecx, 12) && bit(l1.ecx, 29);
        why = cpu_has ? "avx2: the operating system does not save the ymm registers (XCR0)"
                      : "avx2: the CPU lacks AVX2, FMA or F16C";
    } else if (!cpu.avx512) {
        why = cpu_avx512 ? "avx512: the operating system does not save the zmm registers (XCR0)"
                         : "avx512: the CPU lacks AVX-512 F, DQ, BW, VL or CD";
    } else if (cpu.amx_bf16 && !cpu.avx512_bf16) {
        why = "amx: the CPU has tiles but no AVX-512 BF16";
    } else if (!cpu.amx_bf16) {
        if (!cpu_tile || !bit(l7.edx, 22)) {
            why = "amx: the CPU has no AMX tiles with bf16";
        } else if (!os_tile) {
            why = "amx: the operating system does not save the tiles (XCR0)";
        } else {
            why = "amx: the kernel refuses the tiles to this process (arch_prctl)";
        }
    }
    snprintf(cpu.why_not_higher, sizeof(cpu.why_not_higher), "%s", why);
    read_brand(cpu.brand);
    *cpu_out = cpu;
}
#else
void dcp__cpu_detect(struct dcp__cpu *cpu_out)
{
    memset(cpu_out, 0, sizeof(*cpu_out));
    snprintf(cpu_out->why_not_higher, sizeof(cpu_out->why_not_higher), "avx2: not an x86-64 build");
}
#endif

dcp_isa dcp__cpu_best_isa(const struct dcp__cpu *cpu)
{
    /* The kernels' vectors round to bf16 between tiles;
     * CPUs with tiles have AVX-512 BF16 as well. */
    if (cpu->amx_bf16 && cpu->avx512_bf16) return DCP_ISA_AMX;
    if (cpu->avx512) return DCP_ISA_AVX512;
    if (cpu->avx2 && cpu->fma && cpu->f16c) return DCP_ISA_AVX2;
    return DCP_ISA_SCALAR;
}
