/* SPDX-License-Identifier: Apache-2.0 */
/* A call of dcp_attend against the double oracle, and against itself under other circumstances. */
#ifndef DCP_TESTS_ATTN_ATTEND_ORACLE_H
#define DCP_TESTS_ATTN_ATTEND_ORACLE_H

#include "attn/attend_case.h"
#include "base/cpu_priv.h"
#include "kernels/kernels_priv.h"
#include "ref/ref_attend.h"

static void print_call(const struct call *c)
{
    print_message("N %d I %lld H %lld/%lld dk %lld dv %lld latent %u causal %u sink %u pos %u cap "
                  "%g scale %g dtype %s algo %d limit %zu threads %d comm %d\n",
                  c->n_ranks, (long long)c->interleave, (long long)c->n_heads,
                  (long long)c->n_kv_heads, (long long)c->dk, (long long)c->dv, c->latent,
                  c->causal, c->has_sink, c->has_pos, (double)c->softcap, (double)c->scale,
                  dcp_dtype_name(c->dtype), (int)c->algo, c->limit, c->n_threads, (int)c->comm);
    print_message("  tp %d project %lld %s ranks per host %d\n", c->tp, (long long)c->project_dim,
                  dcp_dtype_name(c->project_type), c->ranks_per_host);
    for (int64_t s = 0; s < c->n_seqs; s++) {
        print_message("  seq %lld: length %lld rows %lld window %lld\n", (long long)s,
                      (long long)c->length[s], (long long)c->n_rows[s], (long long)c->window[s]);
    }
}

static void expect_ok(const struct call *c)
{
    for (int r = 0; r < c->n_ranks; r++) {
        if (world.answer->status[r] == DCP_OK && world.answer->allocs[r] == 0) continue;
        print_call(c);
        fail_msg("rank %d: status %d, %zu allocations in run: %s", r, world.answer->status[r],
                 world.answer->allocs[r], world.answer->text[r]);
    }
    const size_t limit = c->limit != 0 ? c->limit : (size_t)64 << 20;
    size_t taken = 0;
    for (int r = 0; r < c->n_ranks; r++) {
        assert_true(world.answer->info[r].workspace_bytes <= limit);
        taken += world.answer->info[r].workspace_bytes;
    }
    /* Exact: what ranks of one process say that they took is what the allocator counted, but for
     * the group's list entry of each allocation of group memory: of tiles that peers read, or of a
     * merge. */
    if (c->comm == COMM_THREADS && c->tp <= 1) {
        const size_t over = world.answer->held_after - world.answer->held_before - taken;
        const size_t entries = (size_t)c->n_ranks * GROUP_ENTRY_BYTES;
        assert_true(over == 0 || over == entries);
    }
}

/* Value p of a head's row through its map, and its tolerance from those of the row's values. */
static double project_value(const struct call *c, const double *row, const double *row_tols,
                            int64_t h, int64_t p, double *tol_out)
{
    const float *map = world.project + h * c->dv * c->project_dim + p;
    double sum = 0.0, size = 0.0, tol = 0.0;
    for (int64_t d = 0; d < c->dv; d++) {
        const double w = (double)map[d * c->project_dim];
        sum += row[d] * w;
        size += fabs(row[d] * w);
        tol += row_tols[d] * fabs(w);
    }
    *tol_out = tol + 0x1p-24 * (double)(c->dv + 8) * size;
    return sum;
}

static bool is_in_parts(const struct call *c, int64_t s)
{
    dcp_isa isa = DCP_ISA_SCALAR; /* as create chooses it */
    assert_int_equal(dcp__isa_choose(DCP_ISA_DEFAULT, &isa), DCP_OK);
    return dcp__attn_cuts_weights(isa, c->dtype, c->n_rows[s] * (c->n_heads / c->n_kv_heads));
}

static void expect_oracle(const struct call *c)
{
    const int64_t width = out_width(c);
    double *want = malloc((size_t)c->dv * sizeof(double));
    double *spread = malloc((size_t)c->dv * sizeof(double));
    double *tols = malloc((size_t)c->dv * sizeof(double));
    struct ref_attend_result result = {.out = want, .spread = spread};
    int64_t row = 0;
    for (int64_t s = 0; s < c->n_seqs; s++) {
        const struct ref_attend ref = {
            .n_heads = c->n_heads,
            .n_kv_heads = c->n_kv_heads,
            .dk = c->dk,
            .dv = c->dv,
            .length = c->length[s],
            .window = c->window[s],
            .causal = (int)c->causal,
            .scale = c->scale != 0.0f ? (double)c->scale : 1.0 / sqrt((double)c->dk),
            .softcap = (double)c->softcap,
            .k = world.k[s],
            .v = c->latent ? world.k[s] : world.v[s],
            .v_stride = c->latent ? c->dk : c->dv,
            .sink = c->has_sink ? world.sink : NULL,
        };
        const bool in_parts = is_in_parts(c, s);
        for (int64_t i = 0; i < c->n_rows[s]; i++, row++) {
            for (int64_t h = 0; h < c->n_heads; h++) {
                ref_attend_row(&ref, world.q + (row * c->n_heads + h) * c->dk, h, world.pos[row],
                               &result);
                const double lse = result.lse, most = c->latent ? 12.0 : 3.0;
                double bound = result.bound;
                for (int64_t d = 0; d < c->dv; d++) {
                    tols[d] = bound * most;
                    if (in_parts) tols[d] += ref_attend_parts_out(&result, most, d);
                }
                if (in_parts) bound += ref_attend_parts_lse(&result);
                const float got_lse = world.lse[row * c->n_heads + h];
                int ok = c->no_lse || (isinf(lse) ? (double)got_lse == lse
                                                  : fabs((double)got_lse - lse) <= bound);
                int64_t at = -1;
                double tol = 0.0;
                for (int64_t d = 0; d < width && ok; d++) {
                    const float got = world.out[(row * c->n_heads + h) * width + d];
                    double x = c->project_dim > 0 ? 0.0 : want[d];
                    if (c->project_dim > 0)
                        x = project_value(c, want, tols, h, d, &tol);
                    else
                        tol = tols[d];
                    ok = isinf(lse) ? got == 0.0f : fabs((double)got - x) <= tol;
                    at = d;
                }
                if (ok) continue;
                print_call(c);
                fail_msg("row %lld head %lld pos %lld dim %lld: out %.9g want %.9g, lse %.9g want "
                         "%.9g, bound %.3g, of out %.3g",
                         (long long)row, (long long)h, (long long)world.pos[row], (long long)at,
                         at < 0 ? 0.0 : (double)world.out[(row * c->n_heads + h) * width + at],
                         at < 0 || c->project_dim > 0 ? 0.0 : want[at], (double)got_lse, lse, bound,
                         tol);
            }
        }
    }
    free(want);
    free(spread);
    free(tols);
}

/* What a call gave. */
struct bits {
    float *out, *lse;
    size_t out_bytes, lse_bytes;
};

/* The call in a world of its own; it must be right. Other calls there are compared with it. */
static struct bits run_first(const struct call *c, unsigned seed)
{
    fill_world(c, seed);
    run_group(c);
    expect_ok(c);
    expect_oracle(c);
    const size_t n = (size_t)(world.n_total * c->n_heads) * sizeof(float);
    struct bits b = {.out_bytes = n * (size_t)out_width(c), .lse_bytes = n};
    b.out = malloc(b.out_bytes + 1);
    b.lse = malloc(b.lse_bytes + 1);
    memcpy(b.out, world.out, b.out_bytes);
    memcpy(b.lse, world.lse, b.lse_bytes);
    return b;
}
static void drop_first(const struct call *c, struct bits *first)
{
    free(first->out);
    free(first->lse);
    drop_world(c);
}

/* The same call under other limits, threads and groups: the same bits. */
static void expect_same_bits(const struct call *c, const char *what, const struct bits *first)
{
    expect_ok(c);
    if (memcmp(first->out, world.out, first->out_bytes) == 0 &&
        (c->no_lse || memcmp(first->lse, world.lse, first->lse_bytes) == 0))
        return;
    print_call(c);
    fail_msg("bits changed with %s", what);
}

/* The least workspace limit, which create names to a rank that gives too little. */
static size_t least_limit(struct call *c)
{
    const size_t limit = c->limit;
    size_t need = 0;
    c->limit = 1;
    run_group(c);
    for (int r = 0; r < c->n_ranks; r++) {
        assert_int_equal(world.answer->status[r], DCP_ERR_ARG);
        const char *at = strstr(world.answer->text[r], "needs ");
        const size_t one = at != NULL ? (size_t)strtoull(at + 6, NULL, 10) : 0;
        if (one > need) need = one;
    }
    c->limit = limit;
    assert_true(need > 0);
    return need;
}

static struct call base_call(void)
{
    const struct call c = {.n_ranks = 1,
                           .n_threads = 1,
                           .interleave = 1,
                           .n_heads = 4,
                           .n_kv_heads = 2,
                           .dk = 16,
                           .dv = 16,
                           .causal = 1,
                           .dtype = DCP_BF16,
                           .n_seqs = 1,
                           .length = {40},
                           .n_rows = {3}};
    return c;
}

#endif
