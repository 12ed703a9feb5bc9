/* SPDX-License-Identifier: Apache-2.0 */
/* Partial attention on AMX tiles, bf16 keys and values: which kernel, and the rows that tiles
 * cannot do.
 *
 *     call_rows <= AMX_FEW_ROWS   attn_few_amx.c    memory-bound, float32-grade
 *     more                        attn_many_amx.c   compute-bound; weights cut to bf16
 *
 * by the rows of the whole call, never by those of this job, which a memory limit may have cut.
 *
 * Tiles multiply all by all: where a row may not see a key its weight is 0, and 0 times NaN or
 * infinity is NaN; a part of q may be 0 and the key infinite. Both can only make a result not
 * finite that should be finite, never another number.
 * So rows whose result is not finite are done again:
 *
 *     tiles, whole job -> tiles, the row alone -> AVX-512, the row
 *
 * What a row gets is then its own business: the result of the second where that is finite, else of
 * the third. (A token's rows together would not do: whether q has a second part is up to all rows
 * of a pass, and where it has none no 0 meets an infinite key.) */
#include <math.h>

#include "kernels/attn_amx_priv.h"
#include "kernels/tile_amx.h"

static int64_t rows_of_call(const struct dcp__attn_job *job)
{
    return attn_max(job->call_rows, job->n_tokens * job->n_group);
}

/* Nearest even, no exceptions, denormals are zero: what tiles do whatever MXCSR says. */
static bool by_tiles(const struct dcp__attn_job *job)
{
    const unsigned csr = _mm_getcsr();
    _mm_setcsr(0x1f80u | 0x8040u);
    const bool is_good =
        rows_of_call(job) <= AMX_FEW_ROWS ? dcp__attn_amx_few(job) : dcp__attn_amx_many(job);
    _mm_setcsr(csr);
    return is_good;
}

static bool is_row_good(const struct dcp__attn_job *job, int64_t t, int64_t j)
{
    const float *const out = job->out + t * job->out_token_stride + j * job->out_head_stride;
    const float lse = job->lse[t * job->lse_token_stride + j * job->lse_head_stride];
    if (!(lse < INFINITY)) return false;
    for (int64_t d = 0; d < job->dv; d++)
        if (!isfinite(out[d])) return false;
    return true;
}

/* Rows from token t and head j on. */
static struct dcp__attn_job part_of(const struct dcp__attn_job *job, int64_t t, int64_t j,
                                    int64_t n_group)
{
    struct dcp__attn_job part = *job;
    part.call_rows = rows_of_call(job);
    part.n_tokens = 1;
    part.n_group = n_group;
    part.lo += t;
    part.hi += t;
    part.q += t * job->q_token_stride + j * job->q_head_stride;
    part.out += t * job->out_token_stride + j * job->out_head_stride;
    part.lse += t * job->lse_token_stride + j * job->lse_head_stride;
    return part;
}

static void repair_row(const struct dcp__attn_job *job, int64_t t, int64_t j)
{
    if (is_row_good(job, t, j)) return;
    const struct dcp__attn_job row = part_of(job, t, j, 1);
    /* What tiles return is about the rows that fill up a tile, too. */
    if (job->n_tokens * job->n_group > 1) (void)by_tiles(&row);
    if (!is_row_good(&row, 0, 0)) dcp__attn_bf16__avx512(&row);
}

void dcp__attn_bf16__amx(const struct dcp__attn_job *job)
{
    if (by_tiles(job)) return;
    for (int64_t t = 0; t < job->n_tokens; t++)
        for (int64_t j = 0; j < job->n_group; j++) repair_row(job, t, j);
}
