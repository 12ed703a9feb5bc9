/* SPDX-License-Identifier: Apache-2.0 */
/* Every merge line of kernels.inc x sizes x alignments x special values against the double oracle;
 * and the same bits from every instruction set. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "num/dtype_priv.h"
#include "ref/ref_merge.h"

enum { TILE = 64, MAX_DIM = 2 * TILE + 1, MAX_PARTS = 5, GUARD = 16 };

struct row_line {
    const char *name;
    dcp_isa isa;
    dcp_dtype part, merged;
    dcp__merge_row_fn *fn;
    dcp__merge_pair_fn *pair;
    bool streams; /* past the caches: aligned destination, never in place */
};
static const struct row_line row_lines[] = {
#define ATTN(level, dtype, f)
#define QDOT(level, qtype, f)
#define DEQUANT(level, qtype, f)
#define MERGE_ROW(level, p, m, f) {#f, DCP_ISA_##level, p, m, f, f##_pair, false},
#define MERGE_ROW_NT(level, p, m, f) {#f, DCP_ISA_##level, p, m, f, f##_pair, true},
#include "kernels/kernels.inc"
#undef MERGE_ROW
};
struct weights_line {
    const char *name;
    dcp_isa isa;
    dcp__merge_weights_fn *fn;
};
static const struct weights_line weights_lines[] = {
#define MERGE_ROW(level, p, m, f)
#define MERGE_WEIGHTS(level, f) {#f, DCP_ISA_##level, f},
#include "kernels/kernels.inc"
};
enum {
    N_ROW_LINES = sizeof(row_lines) / sizeof(row_lines[0]),
    N_WEIGHTS_LINES = sizeof(weights_lines) / sizeof(weights_lines[0])
};

static dcp_isa best_isa(void)
{
    struct dcp__cpu cpu;
    dcp__cpu_detect(&cpu);
    return dcp__cpu_best_isa(&cpu);
}

static double special(uint64_t *rng, bool allows_nonfinite)
{
    switch (ref_pick(rng, allows_nonfinite ? 9 : 6)) {
    case 0:
        return 0.0;
    case 1:
        return -0.0;
    case 2:
        return 1e-40; /* denormal in f32 and bf16 */
    case 3:
        return 5.5e-6; /* denormal in f16 */
    case 4:
        return 60000.0;
    case 5:
        return -1.0;
    case 6:
        return (double)INFINITY;
    case 7:
        return -(double)INFINITY;
    default:
        return (double)NAN;
    }
}

struct row_case {
    unsigned char parts[MAX_PARTS][(MAX_DIM + 8) * 4];
    const void *ptrs[MAX_PARTS];
    float w[MAX_PARTS];
    int n_parts;
    int64_t dim;
    bool zeroes;
};

static void fill_case(struct row_case *c, const struct row_line *line, uint64_t *rng, int64_t dim,
                      int n_parts, int offset, int kind, bool zeroes)
{
    c->n_parts = n_parts;
    c->dim = dim;
    c->zeroes = zeroes;
    double sum = 0;
    double w[MAX_PARTS];
    for (int p = 0; p < n_parts; p++) sum += w[p] = ref_uniform(rng, 1e-3, 1.0);
    for (int p = 0; p < n_parts; p++) c->w[p] = n_parts == 1 ? 1.0f : (float)(w[p] / sum);
    for (int p = 0; p < n_parts; p++) {
        unsigned char *base = c->parts[p] + (size_t)offset * dcp_dtype_bytes(line->part);
        c->ptrs[p] = base;
        for (int64_t d = 0; d < dim; d++) {
            double x = ref_uniform(rng, -2.0, 2.0);
            if (kind > 0 && ref_pick(rng, 8) == 0) x = special(rng, kind > 1);
            ref_put(line->part, base, d, x);
        }
    }
}

static void check_row(const struct row_case *c, const struct row_line *line, const void *dst,
                      int64_t n_bad, int first)
{
    int64_t want_bad = 0;
    int want_first = c->n_parts;
    for (int64_t d = 0; d < c->dim; d++) {
        double want = 0;
        double top = 0;
        for (int p = 0; p < c->n_parts; p++) {
            double x = ref_get(line->part, c->ptrs[p], d);
            if (!isfinite(x)) {
                want_bad++;
                if (p < want_first) want_first = p;
                if (c->zeroes) x = 0;
            }
            want += (double)c->w[p] * x;
            top = fmax(top, fabs(x));
        }
        const double got = ref_get(line->merged, dst, d);
        const bool is_right =
            isnan(want)   ? isnan(got)
            : isinf(want) ? got == want
                          : fabs(got - want) <= tol_merge(c->n_parts, top, want, line->merged);
        if (!is_right)
            fail_msg("%s dim %lld parts %d: [%lld] got %.9g, want %.9g", line->name,
                     (long long)c->dim, c->n_parts, (long long)d, got, want);
    }
    if (n_bad != want_bad || first != want_first)
        fail_msg("%s: %lld non-finite, first in %d; want %lld, %d", line->name, (long long)n_bad,
                 first, (long long)want_bad, want_first);
}

static const struct row_line *scalar_of(const struct row_line *line)
{
    for (int i = 0; i < N_ROW_LINES; i++) {
        if (row_lines[i].isa == DCP_ISA_SCALAR && row_lines[i].part == line->part &&
            row_lines[i].merged == line->merged)
            return &row_lines[i];
    }
    return NULL;
}

static void run_case(const struct row_line *line, const struct row_case *c, int offset)
{
    static _Alignas(DCP__MERGE_NT_ALIGN) unsigned char dst[(MAX_DIM + 8) * 4 + GUARD];
    static unsigned char plain[(MAX_DIM + 8) * 4 + GUARD];
    const size_t bytes = (size_t)c->dim * dcp_dtype_bytes(line->merged);
    memset(dst, 0xa5, sizeof(dst));
    memset(plain, 0xa5, sizeof(plain));
    unsigned char *to = dst + (size_t)offset * dcp_dtype_bytes(line->merged);
    int first = c->n_parts;
    const int64_t n_bad = line->fn(c->ptrs, c->w, c->n_parts, c->dim, to, c->zeroes,
                                   offset & 1 ? c->ptrs : NULL, &first);
    check_row(c, line, to, n_bad, first);
    for (int i = 0; i < GUARD; i++) {
        if (to[bytes + (size_t)i] != 0xa5) fail_msg("%s writes past its row", line->name);
    }
    unsigned char *plain_to = plain + (size_t)offset * dcp_dtype_bytes(line->merged);
    int plain_first = c->n_parts;
    (void)scalar_of(line)->fn(c->ptrs, c->w, c->n_parts, c->dim, plain_to, c->zeroes, NULL,
                              &plain_first);
    if (memcmp(dst, plain, sizeof(dst)) != 0)
        fail_msg("%s dim %lld parts %d: not the bits of the scalar kernel", line->name,
                 (long long)c->dim, c->n_parts);
    if (line->part != line->merged || line->streams) return;
    /* In place: the destination is the last part. */
    static unsigned char kept[(MAX_DIM + 8) * 4];
    unsigned char *last = (unsigned char *)(uintptr_t)c->ptrs[c->n_parts - 1];
    memcpy(kept, last, bytes);
    first = c->n_parts;
    (void)line->fn(c->ptrs, c->w, c->n_parts, c->dim, last, c->zeroes, NULL, &first);
    if (memcmp(last, to, bytes) != 0) fail_msg("%s: other bits in place", line->name);
    memcpy(last, kept, bytes);
}

static void test_rows(void **state)
{
    (void)state;
    static struct row_case c;
    const dcp_isa best = best_isa();
    uint64_t rng = 20260101;
    int n_skipped = 0;
    for (int i = 0; i < N_ROW_LINES; i++) {
        if (row_lines[i].isa > best) {
            n_skipped++;
            continue;
        }
        for (int64_t dim = 1; dim <= MAX_DIM; dim++) {
            for (int kind = 0; kind < 3; kind++) {
                const int offset = row_lines[i].streams ? 0 : (int)ref_pick(&rng, 8);
                const int n_parts = 1 + (int)ref_pick(&rng, MAX_PARTS);
                const bool zeroes = ref_pick(&rng, 2) == 0;
                fill_case(&c, &row_lines[i], &rng, dim, n_parts, offset, kind, zeroes);
                run_case(&row_lines[i], &c, offset);
            }
        }
    }
    if (n_skipped > 0) print_message("skipped: %d kernels above this CPU's level\n", n_skipped);
}

enum { PAIR_ROWS = 5, PAIR_BYTES = (MAX_DIM + DCP__MERGE_NT_ALIGN) * 4 };

/* Rows of two parts in one call, and in as many as non-finite values make of it: the bits and
 * counts of row after row, nothing written between rows. */
static void check_pair(const struct row_line *line, uint64_t *rng, int64_t dim, int kind,
                       bool in_place)
{
    static _Alignas(DCP__MERGE_NT_ALIGN) unsigned char parts[2][PAIR_ROWS * PAIR_BYTES];
    static _Alignas(DCP__MERGE_NT_ALIGN) unsigned char got[PAIR_ROWS * PAIR_BYTES];
    static _Alignas(DCP__MERGE_NT_ALIGN) unsigned char want[PAIR_ROWS * PAIR_BYTES];
    const size_t part_bytes = dcp_dtype_bytes(line->part);
    const size_t merged_bytes = dcp_dtype_bytes(line->merged);
    float w[2][PAIR_ROWS];
    struct dcp__merge_pair p = {.n_rows = PAIR_ROWS, .dst_ahead = (int64_t)ref_pick(rng, 3) * 512};
    for (int i = 0; i < 2; i++) {
        p.part_hop[i] = (int64_t)part_bytes * (dim + (i == 0 ? (int64_t)ref_pick(rng, 3) : 0));
        for (int row = 0; row < PAIR_ROWS; row++) {
            w[i][row] = (float)ref_uniform(rng, 1e-3, 1.0);
            for (int64_t d = 0; d < dim; d++) {
                double x = ref_uniform(rng, -2.0, 2.0);
                if (kind > 0 && ref_pick(rng, 8) == 0) x = special(rng, kind > 1 && row % 2 == 1);
                ref_put(line->part, parts[i] + row * p.part_hop[i], d, x);
            }
        }
        p.parts[i] = (const char *)parts[i];
        p.ahead[i] = p.parts[i] + (int64_t)ref_pick(rng, 3) * p.part_hop[i]; /* 0: none */
        p.w[i] = w[i];
    }
    p.dst_hop = in_place        ? p.part_hop[0]
                : line->streams ? DCP__MERGE_NT_ALIGN * 4 * ((dim + 63) / 64)
                                : (int64_t)merged_bytes * (dim + 1);
    memset(got, 0xa5, sizeof(got));
    memset(want, 0xa5, sizeof(want));
    const bool zeroes = ref_pick(rng, 2) == 0;
    int64_t want_bad[PAIR_ROWS];
    int want_first[PAIR_ROWS];
    if (in_place) memcpy(want, parts[0], sizeof(want));
    for (int row = 0; row < PAIR_ROWS; row++) {
        const void *const at[2] = {parts[0] + row * p.part_hop[0], parts[1] + row * p.part_hop[1]};
        const float weights[2] = {w[0][row], w[1][row]};
        want_first[row] = 2;
        want_bad[row] =
            line->fn(at, weights, 2, dim, want + row * p.dst_hop, zeroes, NULL, &want_first[row]);
    }
    if (in_place) {
        memcpy(got, parts[0], sizeof(got));
        p.parts[0] = (const char *)got;
    }
    for (int row = 0; row < PAIR_ROWS;) {
        struct dcp__merge_pair rest = p;
        for (int i = 0; i < 2; i++) {
            rest.parts[i] += row * p.part_hop[i];
            rest.ahead[i] += row * p.part_hop[i];
            rest.w[i] += row;
        }
        rest.dst = (char *)got + row * p.dst_hop;
        rest.n_rows -= row;
        int64_t n_bad = -1;
        int first = 2;
        const int done = line->pair(&rest, dim, zeroes, &n_bad, &first);
        assert_in_range(done, 1, rest.n_rows);
        row += done;
        for (int r = row - done; r < row - 1; r++) assert_int_equal(want_bad[r], 0);
        assert_int_equal(n_bad, want_bad[row - 1]);
        assert_int_equal(first, want_first[row - 1]);
        assert_true(n_bad != 0 || row == PAIR_ROWS);
    }
    if (memcmp(got, want, sizeof(got)) != 0)
        fail_msg("%s_pair dim %lld%s: not the bits of row after row", line->name, (long long)dim,
                 in_place ? " in place" : "");
}

static void test_pairs(void **state)
{
    (void)state;
    const dcp_isa best = best_isa();
    uint64_t rng = 5;
    for (int i = 0; i < N_ROW_LINES; i++) {
        const struct row_line *line = &row_lines[i];
        if (line->isa > best) continue; /* test_rows says so */
        for (int64_t dim = 1; dim <= MAX_DIM; dim++) {
            for (int kind = 0; kind < 3; kind++) {
                check_pair(line, &rng, dim, kind, false);
                if (line->part == line->merged && !line->streams)
                    check_pair(line, &rng, dim, kind, true);
            }
        }
    }
}

/* One part of weight 1 returns its bits, signalling NaN included. */
static void test_copy_bits(void **state)
{
    (void)state;
    const dcp_isa best = best_isa();
    const float one = 1.0f;
    for (int i = 0; i < N_ROW_LINES; i++) {
        const struct row_line *line = &row_lines[i];
        if (line->isa > best || line->part != line->merged) continue;
        uint64_t rng = 7;
        unsigned char part[TILE * 2 * 4];
        _Alignas(DCP__MERGE_NT_ALIGN) unsigned char dst[sizeof(part)];
        for (size_t b = 0; b < sizeof(part); b++)
            part[b] = (unsigned char)ref_random(&rng); /* any bits: NaN of all kinds */
        const int64_t dim = (int64_t)(sizeof(part) / dcp_dtype_bytes(line->part));
        const void *ptr = part;
        int first = 1;
        (void)line->fn(&ptr, &one, 1, dim, dst, false, NULL, &first);
        assert_memory_equal(part, dst, sizeof(part));
    }
}

static void test_weights(void **state)
{
    (void)state;
    const dcp_isa best = best_isa();
    uint64_t rng = 99;
    double worst = 0;
    for (int round = 0; round < 3000; round++) {
        const int n = 1 + (int)ref_pick(&rng, 8);
        const bool is_base_2 = ref_pick(&rng, 2) == 0;
        const bool has_sink = ref_pick(&rng, 2) == 0;
        const double spread = ref_pick(&rng, 2) == 0 ? 5.0 : 100.0;
        const double center = ref_pick(&rng, 3) == 0 ? ref_uniform(&rng, -1e5, 1e5) : 0.0;
        float lse[8 * DCP__MERGE_ROWS];
        float sink[DCP__MERGE_ROWS];
        for (int i = 0; i < n * DCP__MERGE_ROWS; i++)
            lse[i] = ref_pick(&rng, 5) == 0 ? -INFINITY
                                            : (float)(center + ref_uniform(&rng, -spread, spread));
        for (int j = 0; j < DCP__MERGE_ROWS; j++)
            sink[j] = ref_pick(&rng, 4) == 0 ? -INFINITY
                                             : (float)(center + ref_uniform(&rng, -spread, spread));
        float w[2][8 * DCP__MERGE_ROWS];
        float merged[2][DCP__MERGE_ROWS];
        for (int k = 0; k < N_WEIGHTS_LINES; k++) {
            if (weights_lines[k].isa > best) continue;
            const int at = k > 0;
            weights_lines[k].fn(lse, n, is_base_2, has_sink ? sink : NULL, w[at], merged[at]);
            if (k > 0) {
                assert_memory_equal(w[0], w[1], sizeof(float) * (size_t)n * DCP__MERGE_ROWS);
                assert_memory_equal(merged[0], merged[1], sizeof(merged[0]));
            }
        }
        for (int j = 0; j < DCP__MERGE_ROWS; j++) {
            double l[8];
            double want[8];
            bool is_empty[8] = {false};
            for (int p = 0; p < n; p++) l[p] = (double)lse[p * DCP__MERGE_ROWS + j];
            const double s = (double)sink[j];
            const double want_lse =
                ref_merge_weights(n, l, is_empty, is_base_2, has_sink ? &s : NULL, want);
            const double got_lse = (double)merged[0][j];
            if (isinf(want_lse))
                assert_true(got_lse == want_lse);
            else if (!(fabs(got_lse - want_lse) <= tol_merge_lse(n, want_lse)))
                fail_msg("lse %.9g, want %.9g (n %d)", got_lse, want_lse, n);
            double top = -(double)INFINITY;
            for (int p = 0; p < n; p++) top = fmax(top, l[p]);
            if (has_sink) top = fmax(top, s);
            for (int p = 0; p < n; p++) {
                const double got = (double)w[0][p * DCP__MERGE_ROWS + j];
                const double x = isinf(l[p]) ? 0 : fabs(l[p] - top) * (is_base_2 ? 0.7 : 1.0);
                const double tol = want[p] * ldexp(x + 2.0 * n + 8, -24) + ldexp(1.0, -125);
                if (!(fabs(got - want[p]) <= tol))
                    fail_msg("weight %.9g, want %.9g (x %g)", got, want[p], l[p] - top);
                if (want[p] > 1e-30) worst = fmax(worst, fabs(got / want[p] - 1) * 0x1p24);
            }
            int n_some = 0;
            for (int p = 0; p < n; p++) n_some += !isinf(l[p]);
            for (int p = 0; p < n && n_some == 1 && !has_sink; p++) {
                if (isinf(l[p])) continue;
                assert_true(w[0][p * DCP__MERGE_ROWS + j] == 1.0f);
                assert_true(merged[0][j] == lse[p * DCP__MERGE_ROWS + j]);
            }
        }
    }
    print_message("worst weight error: %.2f units of 2^-24\n", worst);
}

/* exp alone, all over its range: a sink of 0 above one part gives x -> exp(x) / (exp(x) + 1). */
static void test_exp_range(void **state)
{
    (void)state;
    double worst = 0;
    struct dcp__kernels k;
    dcp__kernels_select(best_isa(), &k);
    for (int is_base_2 = 0; is_base_2 < 2; is_base_2++) {
        for (int i = 0; i < 40000; i++) {
            float lse[2 * DCP__MERGE_ROWS];
            float w[2 * DCP__MERGE_ROWS];
            float merged[DCP__MERGE_ROWS];
            for (int j = 0; j < DCP__MERGE_ROWS; j++) {
                lse[j] = 0.0f;
                /* Below -20 the weight is exp(x) itself to the last bit: 1 + exp(x) is 1. */
                lse[DCP__MERGE_ROWS + j] =
                    -20.0f - 66.0f * (float)(i * DCP__MERGE_ROWS + j) / (40000.0f * 16.0f);
            }
            k.merge_weights[0](lse, 2, is_base_2 != 0, NULL, w, merged);
            for (int j = 0; j < DCP__MERGE_ROWS; j++) {
                const double x = (double)lse[DCP__MERGE_ROWS + j];
                const double want = is_base_2 != 0 ? exp2(x) : exp(x);
                const double whole = is_base_2 != 0 ? 1 + want : 1;
                const double got = (double)w[DCP__MERGE_ROWS + j] * whole;
                worst = fmax(worst, fabs(got / want - 1) * 0x1p23);
            }
        }
    }
    print_message("worst error of exp: %.2f ulp\n", worst);
    assert_true(worst < 1.6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),      cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_copy_bits), cmocka_unit_test(test_weights),
        cmocka_unit_test(test_exp_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
