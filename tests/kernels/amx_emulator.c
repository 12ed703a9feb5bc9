/* SPDX-License-Identifier: Apache-2.0 */
/* The tile instructions of AMX in software.
 *
 * A CPU without tiles answers a tile instruction with #UD, which Linux hands on as SIGILL. The
 * handler decodes the instruction at RIP, works on this thread's emulated tiles, moves RIP behind
 * it and returns:
 *
 *     C4 | R X B mmmmm | W vvvv L pp | opcode | ModRM | SIB | displacement
 *          inverted      inverted
 *     map 0F38, W0, L0:  49  LDTILECFG (no prefix, memory), STTILECFG (66), TILERELEASE (no
 *                            prefix, C0), TILEZERO (F2, register)
 *                        4B  TILELOADD (F2), TILELOADDT1 (66), TILESTORED (F3): SIB, index = stride
 *                        5C  TDPBF16PS (F3): reg += rm * vvvv
 *
 * The product is exact: for every element of C two chains of fused multiply-adds, over the even and
 * over the odd elements of k, both from zero; their sum; then that plus C. Denormal inputs and
 * results count as zero. A use that the CPU would fault (shapes that do not match, a tile that is
 * not configured, reserved bits) ends the process with a line that names it. */
#include "kernels/amx_emulator.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { N_TILES = 8, ROWS = 16, ROW_BYTES = 64 };

struct thread_state {
    bool is_configured;
    uint8_t rows[N_TILES];
    uint16_t row_bytes[N_TILES];
    _Alignas(64) uint8_t tile[N_TILES][ROWS][ROW_BYTES];
    struct amx_counts counts;
};
static _Thread_local struct thread_state me;
static struct sigaction old_action;

/* From a signal handler: no stream, no exit handlers. */
static _Noreturn void fail(const char *what, int x, int y)
{
    char line[200];
    const int n = snprintf(line, sizeof(line), "amx emulator: %s (%d, %d)\n", what, x, y);
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) < 0) _exit(98);
    _exit(99);
}

/* ---- the product ---- */

/* Row m of C, 16 columns at once; MXCSR says that denormals are zero. */
__attribute__((noinline, target("avx512f"))) static void product_rows(int n_rows, int n_pairs,
                                                                      float (*c)[16],
                                                                      const uint16_t (*a)[32],
                                                                      const uint16_t (*b)[32])
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int m = 0; m < n_rows; m++) {
        __m512 even = _mm512_setzero_ps();
        __m512 odd = _mm512_setzero_ps();
        for (int k = 0; k < n_pairs; k++) {
            const __m512i pair = _mm512_loadu_si512(b[k]);
            const __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            const __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(pair, high));
            const int a0 = (int)((uint32_t)a[m][2 * k] << 16);
            const int a1 = (int)((uint32_t)a[m][2 * k + 1] << 16);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a0)), b0, even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a1)), b1, odd);
        }
        _mm512_storeu_ps(c[m], _mm512_add_ps(_mm512_loadu_ps(c[m]), _mm512_add_ps(even, odd)));
    }
}
static void product(int n_rows, int n_pairs, float (*c)[16], const uint16_t (*a)[32],
                    const uint16_t (*b)[32])
{
    const unsigned csr = _mm_getcsr();
    _mm_setcsr(0x1f80u | 0x8040u); /* nearest even, no exceptions, FTZ, DAZ */
    product_rows(n_rows, n_pairs, c, a, b);
    _mm_setcsr(csr);
}
void amx_emulate_product(float *c, const uint16_t *a, const uint16_t *b)
{
    product(ROWS, ROWS, (float(*)[16])(void *)c, (const uint16_t(*)[32])(const void *)a,
            (const uint16_t(*)[32])(const void *)b);
}

/* ---- instructions ---- */

struct insn {
    unsigned pp, vvvv, opcode, mod, reg, rm;
    bool has_sib;
    uint64_t address; /* of a memory operand, without the index of a SIB */
    uint64_t stride;  /* index << scale */
    int n_bytes;
};

static uint64_t reg_value(const ucontext_t *uc, unsigned r)
{
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)uc->uc_mcontext.gregs[order[r]];
}

/* False: not a VEX instruction of the tile opcodes. */
static bool decode(const ucontext_t *uc, struct insn *in)
{
    const uint8_t *const at = (const uint8_t *)(uintptr_t)uc->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xc4) return false;
    const unsigned not_r = at[1] >> 7 & 1u, not_x = at[1] >> 6 & 1u, not_b = at[1] >> 5 & 1u;
    const bool is_w0_l0 = (at[2] & 0x84) == 0;
    if ((at[1] & 0x1f) != 2 || !is_w0_l0) return false;
    in->pp = at[2] & 3u;
    in->vvvv = ~(unsigned)(at[2] >> 3) & 15u;
    in->opcode = at[3];
    if (in->opcode != 0x49 && in->opcode != 0x4b && in->opcode != 0x5c) return false;
    in->mod = at[4] >> 6;
    in->reg = (at[4] >> 3 & 7u) | (not_r ? 0 : 8u);
    in->rm = (at[4] & 7u);
    in->has_sib = false;
    in->stride = 0;
    int n = 5;
    if (in->mod == 3) {
        in->rm |= not_b ? 0 : 8u;
        in->n_bytes = n;
        return true;
    }
    uint64_t base = 0;
    bool is_rip_relative = false;
    bool has_base = true;
    if (in->rm == 4) {
        const uint8_t sib = at[n++];
        const unsigned index = (sib >> 3 & 7u) | (not_x ? 0 : 8u);
        const unsigned base_reg = (sib & 7u) | (not_b ? 0 : 8u);
        in->has_sib = true;
        if (index != 4) in->stride = reg_value(uc, index) << (sib >> 6);
        has_base = (sib & 7u) != 5 || in->mod != 0;
        if (has_base) base = reg_value(uc, base_reg);
    } else if (in->rm == 5 && in->mod == 0) {
        is_rip_relative = true;
    } else {
        base = reg_value(uc, in->rm | (not_b ? 0 : 8u));
    }
    int64_t disp = 0;
    if (in->mod == 1) {
        disp = (int8_t)at[n];
        n += 1;
    } else if (in->mod == 2 || is_rip_relative || !has_base) {
        int32_t disp32;
        memcpy(&disp32, at + n, sizeof(disp32));
        disp = disp32;
        n += 4;
    }
    if (is_rip_relative) base = (uint64_t)(uintptr_t)at + (uint64_t)n;
    in->address = base + (uint64_t)disp;
    in->n_bytes = n;
    return true;
}

static void load_config(const uint8_t *at)
{
    me.counts.config++;
    if (at[0] == 0) {
        me.is_configured = false;
        return;
    }
    if (at[0] != 1) fail("LDTILECFG: palette, start row", at[0], at[1]);
    for (int i = 1; i < 64; i++) {
        const bool is_reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
        if (is_reserved && at[i] != 0) fail("LDTILECFG: start row or reserved byte set", i, at[i]);
    }
    for (int t = 0; t < N_TILES; t++) {
        memcpy(&me.row_bytes[t], at + 16 + 2 * t, 2);
        me.rows[t] = at[48 + t];
        if (me.row_bytes[t] > ROW_BYTES || me.rows[t] > ROWS ||
            (me.row_bytes[t] == 0) != (me.rows[t] == 0))
            fail("LDTILECFG: tile of rows x bytes", me.rows[t], me.row_bytes[t]);
    }
    me.is_configured = true;
    memset(me.tile, 0, sizeof(me.tile));
}

static void check_tile(const char *what, unsigned t)
{
    if (!me.is_configured) fail("no tile configuration is loaded", (int)t, 0);
    if (t >= N_TILES || me.rows[t] == 0) fail(what, (int)t, 0);
}

static void move_tile(const struct insn *in)
{
    check_tile("load or store of a tile that is not configured", in->reg);
    if (!in->has_sib) fail("TILELOADD/TILESTORED without SIB", (int)in->reg, 0);
    if (in->vvvv != 0) fail("TILELOADD/TILESTORED: vvvv set", (int)in->vvvv, 0);
    const uint8_t n_rows = me.rows[in->reg];
    const size_t n_bytes = me.row_bytes[in->reg];
    bool splits = false;
    for (int r = 0; r < n_rows; r++) {
        void *const at = (void *)(uintptr_t)(in->address + (uint64_t)r * in->stride);
        splits = splits || ((uintptr_t)at & 63u) + n_bytes > 64;
        if (in->pp == 2) {
            memcpy(at, me.tile[in->reg][r], n_bytes);
        } else {
            memset(me.tile[in->reg][r], 0, ROW_BYTES);
            memcpy(me.tile[in->reg][r], at, n_bytes);
        }
    }
    if (in->pp == 2) {
        me.counts.store++;
        return;
    }
    for (int r = n_rows; r < ROWS; r++) memset(me.tile[in->reg][r], 0, ROW_BYTES);
    if (in->pp == 3) me.counts.load++;
    if (in->pp == 1) me.counts.load_t1++;
    me.counts.split_lines += splits;
}

static void multiply(const struct insn *in)
{
    const unsigned c = in->reg, a = in->rm, b = in->vvvv;
    check_tile("TDPBF16PS: C is not configured", c);
    check_tile("TDPBF16PS: A is not configured", a);
    check_tile("TDPBF16PS: B is not configured", b);
    if (c == a || c == b || a == b) fail("TDPBF16PS: operands are not distinct", (int)a, (int)b);
    if (me.rows[c] != me.rows[a]) fail("TDPBF16PS: rows of C and A", me.rows[c], me.rows[a]);
    if (me.row_bytes[c] != me.row_bytes[b])
        fail("TDPBF16PS: columns of C and B", me.row_bytes[c], me.row_bytes[b]);
    if (me.row_bytes[a] / 4 != me.rows[b] || me.row_bytes[a] % 4 != 0 || me.row_bytes[c] % 4 != 0)
        fail("TDPBF16PS: columns of A and rows of B", me.row_bytes[a], me.rows[b]);
    product(me.rows[c], me.rows[b], (float(*)[16])(void *)me.tile[c],
            (const uint16_t(*)[32])(const void *)me.tile[a],
            (const uint16_t(*)[32])(const void *)me.tile[b]);
    me.counts.product++;
}

static bool execute(const struct insn *in)
{
    if (in->opcode == 0x5c && in->pp == 2 && in->mod == 3) {
        multiply(in);
        return true;
    }
    if (in->opcode == 0x4b && in->pp != 0 && in->mod != 3) {
        move_tile(in);
        return true;
    }
    if (in->opcode != 0x49 || in->vvvv != 0) return false;
    if (in->mod != 3 && in->pp == 0 && in->reg == 0) {
        load_config((const uint8_t *)(uintptr_t)in->address);
        return true;
    }
    if (in->mod == 3 && in->pp == 0 && in->reg == 0 && in->rm == 0) {
        me.is_configured = false;
        me.counts.release++;
        return true;
    }
    if (in->mod == 3 && in->pp == 3 && in->rm == 0) {
        check_tile("TILEZERO of a tile that is not configured", in->reg);
        memset(me.tile[in->reg], 0, sizeof(me.tile[0]));
        me.counts.zero++;
        return true;
    }
    return false;
}

static void on_sigill(int sig, siginfo_t *info, void *context)
{
    ucontext_t *const uc = context;
    struct insn in = {0};
    (void)info;
    if (decode(uc, &in) && execute(&in)) {
        uc->uc_mcontext.gregs[REG_RIP] += in.n_bytes;
        return;
    }
    /* Not ours: the instruction faults again, and then it is the old handler's. */
    sigaction(sig, &old_action, NULL);
}

bool amx_emulator_install(void)
{
    struct sigaction action;
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, SIGILL);
    pthread_sigmask(SIG_UNBLOCK, &own, NULL); /* threads of the library block every signal */
    if (sigaction(SIGILL, NULL, &action) == 0 && action.sa_sigaction == on_sigill) return true;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = on_sigill;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGILL, &action, &old_action) == 0;
}
void amx_emulator_reset(void)
{
    memset(&me.counts, 0, sizeof(me.counts));
}
struct amx_counts amx_emulator_counts(void)
{
    return me.counts;
}
bool amx_emulator_is_released(void)
{
    return !me.is_configured;
}
#else
bool amx_emulator_install(void)
{
    return false;
}
void amx_emulator_reset(void)
{
}
struct amx_counts amx_emulator_counts(void)
{
    return (struct amx_counts){0};
}
bool amx_emulator_is_released(void)
{
    return true;
}
void amx_emulate_product(float *c, const uint16_t *a, const uint16_t *b)
{
    (void)c;
    (void)a;
    (void)b;
}
#endif
