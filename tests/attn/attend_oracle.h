/* SPDX-License-Identifier: Apache-2.0 */
/* A call of dcp_attend against the double oracle, and against itself under other circumstances. */
#ifndef DCP_TESTS_ATTN_ATTEND_ORACLE_H
#define DCP_TESTS_ATTN_ATTEND_ORACLE_H

#include "attn/attend_case.h"
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
    return dcp__attn_cuts_weights(world.answer->info[0].kernel,
                                  c->n_rows[s] * (c->n_heads / c->n_kv_heads));
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

/* The same call under other limits, threads and groups: the same bits. */
static void expect_same_bits(const struct call *c, const char *what, const float *out,
                             const float *lse)
{
    const size_t n_out = (size_t)(world.n_total * c->n_heads * out_width(c)) * sizeof(float);
    const size_t n_lse = (size_t)(world.n_total * c->n_heads) * sizeof(float);
    expect_ok(c);
    if (memcmp(out, world.out, n_out) == 0 && (c->no_lse || memcmp(lse, world.lse, n_lse) == 0))
        return;
    print_call(c);
    fail_msg("bits changed with %s", what);
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
