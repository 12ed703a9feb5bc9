/* SPDX-License-Identifier: Apache-2.0 */
/* What the operator takes, exactly, before anything is taken.
 *
 *     fixed      handle, records, peers, threads, split partials
 *     a thread   the kernel's scratch and a job's copy of q, for a block of rows, or for the tile
 *                where that has fewer
 *     merge      not direct: what a merge of one row takes, and an eighth of the rest, at most
 *                8 MiB more (the least of all ranks); direct merges need no buffers
 *     a row      of each slot: out [H, P or D], lse [H], and of q the own heads [H_r, Dk] where
 *                peers read them (threads: they read the caller's), or all heads [H, Dk] where
 *                messages bring them; once: lo, hi, a segment, and [H, D] where it is projected
 *
 * Two slots let a tile's exchange run beside the next one's computing, and save a record a tile.
 * One slot serves where the whole call fits it, and where two rows would not fit.
 *
 * Nothing here grows with the number of keys but the split partials of calls with few rows: their
 * ranges of keys are computed at once where there is room, else some (row, head)s at a time. */
#include <math.h>
#include <string.h>

#include "attend/attend_priv.h"
#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/struct_priv.h"

static const size_t default_limit_bytes = (size_t)64 << 20;
static const size_t merge_extra_most = (size_t)8 << 20;
/* One message of q, which MPI counts in an int. */
static const int64_t message_most = (int64_t)1 << 30;

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- the description ------------------------------------------------------------------------ */

static dcp_status check_range(const char *call, const char *name, int64_t value, int64_t low,
                              int64_t high)
{
    if (value >= low && value <= high) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "%s: %s is %lld, must be %lld to %lld", call, name,
                     (long long)value, (long long)low, (long long)high);
}

dcp_status dcp__attend_read_desc(const char *call, const dcp_attend_desc *desc, dcp_attend_desc *d)
{
    DCP_TRY(dcp__struct_read(call, "DCP_ATTEND_DESC_INIT", desc,
                             DCP__STRUCT_UPTO(dcp_attend_desc, pool), d, sizeof(*d)));
    const int64_t max_dim = 1 << 20; /* keeps products of two within int64 */
    DCP_TRY(check_range(call, "max_tokens", d->max_tokens, 0, (int64_t)1 << 40));
    DCP_TRY(check_range(call, "n_heads", d->n_heads, 1, max_dim));
    DCP_TRY(check_range(call, "n_kv_heads", d->n_kv_heads, 1, d->n_heads));
    DCP_TRY(check_range(call, "key_dim", d->key_dim, 1, max_dim));
    DCP_TRY(check_range(call, "value_dim", d->value_dim, 1, max_dim));
    DCP_TRY(check_range(call, "interleave", d->interleave, 0, INT64_MAX));
    DCP_TRY(check_range(call, "n_threads", d->n_threads, 0, 4096));
    DCP_TRY(check_range(call, "project_dim", d->project_dim, 0, max_dim));
    DCP_TRY(check_range(call, "tp", d->tp, 0, d->n_kv_heads));
    if (d->n_heads % d->n_kv_heads != 0) {
        return dcp__fail(DCP_ERR_ARG, "%s: n_heads %lld is no multiple of n_kv_heads %lld", call,
                         (long long)d->n_heads, (long long)d->n_kv_heads);
    }
    if (!isfinite(d->scale) || !isfinite(d->softcap) || d->softcap < 0.0f) {
        return dcp__fail(DCP_ERR_ARG,
                         "%s: scale %g and softcap %g must be finite, softcap not negative", call,
                         (double)d->scale, (double)d->softcap);
    }
    if (d->project_type == DCP_DTYPE_DEFAULT) d->project_type = DCP_F32;
    if (d->project_type != DCP_F32 && d->project_type != DCP_BF16) {
        return dcp__fail(DCP_ERR_ARG, "%s: project_type %d is none of f32, bf16", call,
                         (int)d->project_type);
    }
    if (d->algo > DCP_MERGE_ALLREDUCE_TEMP)
        return dcp__fail(DCP_ERR_ARG, "%s: algo %d is no dcp_merge_algo", call, (int)d->algo);
    if (d->tp == 0) d->tp = 1;
    if (d->n_kv_heads % d->tp != 0) {
        return dcp__fail(DCP_ERR_ARG, "%s: tp %d does not divide the %lld KV heads", call, d->tp,
                         (long long)d->n_kv_heads);
    }
    if (d->scale == 0.0f) d->scale = (float)(1.0 / sqrt((double)d->key_dim));
    if (d->interleave == 0) d->interleave = 1;
    if (d->n_threads == 0) d->n_threads = 1;
    if (d->workspace_limit_bytes == 0) d->workspace_limit_bytes = default_limit_bytes;
    d->causal = d->causal != 0;
    d->has_sink = d->has_sink != 0;
    return DCP_OK;
}

/* The heads of head group (rank / dcp), or its KV heads, and of them the part of rank mod dcp. */
static dcp_range group_heads(int64_t n_heads, int tp, int n_ranks, int rank)
{
    const int64_t n = n_heads / tp;
    const int64_t begin = rank / (n_ranks / tp) * n;
    return (dcp_range){begin, begin + n};
}

static bool read_quietly(const dcp_attend_desc *desc, int n_ranks, int rank, dcp_attend_desc *d)
{
    return dcp__attend_read_desc("dcp_attend_heads", desc, d) == DCP_OK && n_ranks >= 1 &&
           rank >= 0 && rank < n_ranks && n_ranks % d->tp == 0;
}

dcp_range dcp_attend_heads(const dcp_attend_desc *desc, int n_ranks, int rank)
{
    dcp_attend_desc d;
    if (!read_quietly(desc, n_ranks, rank, &d)) return (dcp_range){0, 0};
    const int dcp = n_ranks / d.tp;
    const dcp_range all = group_heads(d.n_heads, d.tp, n_ranks, rank);
    const dcp_range own = dcp_cut_range(all.end - all.begin, dcp, rank % dcp);
    return (dcp_range){all.begin + own.begin, all.begin + own.end};
}

dcp_range dcp_attend_kv_heads(const dcp_attend_desc *desc, int n_ranks, int rank)
{
    dcp_attend_desc d;
    if (!read_quietly(desc, n_ranks, rank, &d)) return (dcp_range){0, 0};
    return group_heads(d.n_kv_heads, d.tp, n_ranks, rank);
}

/* ---- shapes --------------------------------------------------------------------------------- */

/* Functions of the team's H, Hkv and D, and of the ISA: how many rows a job is best given. */
static void shape_blocks(struct dcp_attend *a)
{
    const int64_t most_rows = dcp__attn_rows_most(a->kernels.isa, a->d.value_dim);
    a->n_group = a->d.n_heads / a->d.n_kv_heads;
    a->n_head_blocks = (a->n_group + most_rows - 1) / most_rows;
    a->block_heads = (a->n_group + a->n_head_blocks - 1) / a->n_head_blocks;
    a->n_head_blocks = (a->n_group + a->block_heads - 1) / a->block_heads;
    a->block_rows = most_rows / a->block_heads;
    const int64_t fit = DCP__ATTEND_SPLIT_BYTES / ((a->d.value_dim + 1) * (int64_t)sizeof(float));
    int64_t most = (int64_t)DCP__ATTEND_ITEMS * DCP__ATTN_ROWS_MAX;
    if (a->d.max_tokens < DCP__ATTN_ROWS_MAX)
        most = min_i64(most, a->d.max_tokens * a->d.n_heads * DCP__ATTEND_ITEMS);
    a->split_rows = min_i64(fit, most);
    if (a->split_rows < 2 * a->d.n_heads) a->split_rows = 0;
    a->split_cap = a->split_rows;
}

/* Rows of the largest job in tiles of so many. */
static int64_t job_rows(const struct dcp_attend *a, int64_t tile_rows)
{
    return min_i64(a->block_rows, tile_rows) * a->block_heads;
}

dcp_status dcp__attend_shape(const char *call, struct dcp_attend *a, int n, int rank)
{
    dcp_attend_desc *d = &a->d;
    if (n % d->tp != 0) {
        return dcp__fail(DCP_ERR_ARG, "%s: tp %d does not divide the %d ranks of the group", call,
                         d->tp, n);
    }
    a->all_ranks = n;
    a->all_rank = rank;
    a->n_ranks = n / d->tp;
    a->rank = rank % a->n_ranks;
    a->head0 = group_heads(d->n_heads, d->tp, n, rank).begin;
    a->kv_head0 = group_heads(d->n_kv_heads, d->tp, n, rank).begin;
    d->n_heads /= d->tp;
    d->n_kv_heads /= d->tp;
    a->heads = dcp_cut_range(d->n_heads, a->n_ranks, a->rank);
    a->out_dim = d->project_dim > 0 ? d->project_dim : d->value_dim;
    a->n_slots = 1;
    shape_blocks(a);
    return DCP_OK;
}

/* ---- layouts -------------------------------------------------------------------------------- */

static void *region(char *base, size_t *at, size_t bytes)
{
    void *ptr = base == NULL ? NULL : base + *at;
    *at += round_up(bytes, 64);
    return ptr;
}

static size_t floats(int64_t rows, int64_t width)
{
    return (size_t)rows * (size_t)width * sizeof(float);
}

/* Bytes of q that one slot holds in a rank of n_own heads. */
static size_t q_slot_bytes(const struct dcp_attend *a, int64_t rows, int64_t n_own)
{
    if (a->n_ranks == 1 || (a->is_direct && a->one_space)) return 0;
    return round_up(floats(rows, (a->is_direct ? n_own : a->d.n_heads) * a->d.key_dim), 64);
}

/* out and lse first: they lie at the same offsets on all ranks. */
size_t dcp__attend_lay_out_slots(struct dcp_attend *a, int64_t rows, char *base)
{
    size_t at = 0;
    for (int s = 0; s < a->n_slots; s++) {
        a->slot[s].out = NULL;
        if (a->n_ranks > 1)
            a->slot[s].out = region(base, &at, floats(rows, a->d.n_heads * a->out_dim));
        a->slot[s].lse = region(base, &at, floats(rows, a->d.n_heads));
    }
    const size_t q_bytes = q_slot_bytes(a, rows, dcp__attend_own(a));
    for (int s = 0; s < a->n_slots; s++)
        a->slot[s].q = q_bytes > 0 ? region(base, &at, q_bytes) : NULL;
    return at;
}

size_t dcp__attend_q_offset(const struct dcp_attend *a, int64_t n_own, int slot)
{
    const size_t before = round_up(floats(a->tile_rows, a->d.n_heads * a->out_dim), 64) +
                          round_up(floats(a->tile_rows, a->d.n_heads), 64);
    return (size_t)a->n_slots * before + (size_t)slot * q_slot_bytes(a, a->tile_rows, n_own);
}

size_t dcp__attend_lay_out_local(struct dcp_attend *a, int64_t rows, char *base)
{
    const size_t n = (size_t)a->n_ranks, n_threads = (size_t)a->d.n_threads;
    const int64_t job = job_rows(a, rows), dk = a->d.key_dim, dv = a->d.value_dim;
    const size_t scratch_bytes = dcp__attn_scratch_bytes_for(a->kernels.isa, job, dk, dv);
    size_t at = 0;
    a->peers = region(base, &at, n * sizeof(*a->peers));
    a->srcs = region(base, &at, a->is_direct ? n * DCP__ATTEND_SLOTS * sizeof(*a->srcs) : 0);
    a->sends = region(base, &at, a->is_direct ? 0 : n * sizeof(*a->sends));
    a->recvs = region(base, &at, a->is_direct ? 0 : n * sizeof(*a->recvs));
    a->lo = region(base, &at, (size_t)rows * sizeof(int64_t));
    a->hi = region(base, &at, (size_t)rows * sizeof(int64_t));
    a->segs = region(base, &at, (size_t)rows * sizeof(*a->segs));
    const bool projects = a->d.project_dim > 0;
    a->part = region(base, &at, projects ? floats(rows, a->d.n_heads * dv) : 0);
    a->threads = region(base, &at, n_threads * sizeof(*a->threads));
    for (size_t i = 0; i < n_threads; i++) {
        void *const scratch = region(base, &at, scratch_bytes);
        float *const q = region(base, &at, n > 1 ? floats(job, dk) : 0);
        struct dcp__merge_scratch merge;
        memset(&merge, 0, sizeof(merge));
        if (a->is_direct)
            at += dcp__merge_scratch_at(a->n_ranks, base == NULL ? NULL : base + at, &merge);
        if (base == NULL) continue;
        a->threads[i].scratch = scratch;
        a->threads[i].q = q;
        a->threads[i].math.scratch = merge;
    }
    /* Behind what is used again and again: only whole huge pages are huge (base/alloc.c). */
    a->split_out = region(base, &at, floats(a->split_cap, dv));
    a->split_lse = region(base, &at, floats(a->split_cap, 1));
    return at;
}

size_t dcp__attend_bytes(struct dcp_attend *a, int64_t rows)
{
    size_t n = sizeof(*a) + (size_t)a->all_ranks * sizeof(*a->records) + a->merge_bytes;
    if (a->d.pool == NULL) n += dcp__pool_bytes(a->d.n_threads);
    return n + dcp__attend_lay_out_slots(a, rows, NULL) + dcp__attend_lay_out_local(a, rows, NULL);
}

size_t dcp__attend_row_bytes(struct dcp_attend *a)
{
    const int64_t rows = a->block_rows; /* beyond, no thread's share grows */
    return (dcp__attend_bytes(a, rows + 64) - dcp__attend_bytes(a, rows)) / 64;
}

/* ---- the tile ------------------------------------------------------------------------------- */

/* The most rows that fit into n_bytes: max_tokens at most, but room for one if they are none; 0 if
 * not even one fits. */
static int64_t rows_in(struct dcp_attend *a, size_t n_bytes)
{
    if (n_bytes > (size_t)1 << 56) n_bytes = (size_t)1 << 56; /* sums below stay within 64 bits */
    if (dcp__attend_bytes(a, 1) > n_bytes) return 0;
    int64_t low = 1, high = a->d.max_tokens > 1 ? a->d.max_tokens : 1;
    /* No more rows than whose bytes, all slots together, are counted without overflow. */
    const size_t widest_row = (size_t)(a->d.key_dim + a->d.value_dim + a->out_dim);
    const size_t most = ((size_t)1 << 57) / ((size_t)a->d.n_heads * sizeof(float) * widest_row);
    if ((size_t)high > most) high = most > 1 ? (int64_t)most : 1;
    if (!a->is_direct) {
        const int64_t widest = (a->d.n_heads + a->n_ranks - 1) / a->n_ranks;
        const int64_t sent = message_most / (widest * a->d.key_dim * (int64_t)sizeof(float));
        high = min_i64(high, sent > 1 ? sent : 1);
    }
    while (low < high) {
        const int64_t mid = low + (high - low + 1) / 2;
        if (dcp__attend_bytes(a, mid) <= n_bytes)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

dcp_status dcp__attend_fit(const char *call, struct dcp_attend *a, int64_t rows_out[2])
{
    const size_t limit = a->d.workspace_limit_bytes;
    const int64_t least = min_i64(a->split_rows, DCP__ATTEND_ITEMS);
    a->n_slots = 1;
    a->split_cap = a->split_rows;
    while (a->split_cap > least &&
           (floats(a->split_cap, a->d.value_dim) > limit / 4 || dcp__attend_bytes(a, 1) > limit))
        a->split_cap = a->split_cap / 4 > least ? a->split_cap / 4 : least;
    const size_t need = dcp__attend_bytes(a, 1);
    if (need > limit) {
        return dcp__fail(DCP_ERR_ARG,
                         "%s: workspace_limit_bytes is %zu, one row of %lld heads with %d threads "
                         "needs %zu",
                         call, limit, (long long)a->d.n_heads, a->d.n_threads, need);
    }
    rows_out[0] = rows_in(a, limit);
    rows_out[1] = 0;
    if (a->n_ranks > 1) {
        a->n_slots = DCP__ATTEND_SLOTS;
        rows_out[1] = rows_in(a, limit);
        a->n_slots = 1;
    }
    return DCP_OK;
}

void dcp__attend_choose_tile(struct dcp_attend *a, const int64_t least[2])
{
    a->n_slots = 1;
    a->tile_rows = least[0];
    if (least[0] >= a->d.max_tokens) return; /* the whole of any call */
    if (least[1] >= 2) {
        a->n_slots = DCP__ATTEND_SLOTS;
        a->tile_rows = least[1];
    }
    /* No ragged blocks inside a call. */
    if (a->tile_rows > a->block_rows) a->tile_rows -= a->tile_rows % a->block_rows;
}

size_t dcp__attend_merge_extra(struct dcp_attend *a)
{
    a->n_slots = 1;
    const size_t extra = (a->d.workspace_limit_bytes - dcp__attend_bytes(a, 1)) / 8;
    return extra < merge_extra_most ? extra : merge_extra_most;
}

dcp_merge_desc dcp__attend_merge_desc(const struct dcp_attend *a, int64_t max_rows, size_t limit)
{
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = max_rows;
    desc.n_heads = a->d.n_heads;
    desc.dim = a->out_dim;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.cut = DCP_CUT_HEADS;
    desc.algo = a->d.algo;
    desc.has_sink = a->d.has_sink;
    desc.workspace_limit_bytes = limit; /* 0: the merge's own default */
    return desc;
}

/* ---- the plan ------------------------------------------------------------------------------- */

static dcp_status plan_merge(struct dcp_attend *a, int64_t rows, size_t limit, int ranks_per_host)
{
    dcp_merge_desc desc = dcp__attend_merge_desc(a, rows, limit);
    if (desc.algo == DCP_MERGE_AUTO) desc.algo = DCP_MERGE_ALLTOALL;
    dcp_merge_cost cost;
    DCP_TRY(dcp_merge_plan(&desc, a->n_ranks, a->rank, ranks_per_host, rows, &cost));
    a->merge_bytes = cost.workspace_bytes;
    return DCP_OK;
}

/* The least of all ranks of the team, as create finds it; a is left as the rank asked for. */
struct least {
    int64_t rows[2];
    size_t merge_bytes, merge_extra; /* the most; the least */
};

/* merge_rows 0: direct. */
static dcp_status least_rows(const char *call, struct dcp_attend *a, int64_t merge_rows,
                             size_t merge_limit, int ranks_per_host, struct least *least)
{
    const int rank = a->rank;
    *least = (struct least){{INT64_MAX, INT64_MAX}, 0, SIZE_MAX};
    for (int i = 1; i <= a->n_ranks; i++) { /* the own one last */
        a->rank = (rank + i) % a->n_ranks;
        a->heads = dcp_cut_range(a->d.n_heads, a->n_ranks, a->rank);
        if (merge_rows > 0) DCP_TRY(plan_merge(a, merge_rows, merge_limit, ranks_per_host));
        int64_t rows[2] = {0, 0};
        DCP_TRY(dcp__attend_fit(call, a, rows));
        for (int k = 0; k < 2; k++) least->rows[k] = min_i64(least->rows[k], rows[k]);
        const size_t extra = dcp__attend_merge_extra(a);
        if (extra < least->merge_extra) least->merge_extra = extra;
        if (a->merge_bytes > least->merge_bytes) least->merge_bytes = a->merge_bytes;
    }
    return DCP_OK;
}

dcp_status dcp_attend_plan(const dcp_attend_desc *desc, int n_ranks, int rank, int ranks_per_host,
                           dcp_attend_info *info_out)
{
    static const char call[] = "dcp_attend_plan";
    struct dcp_attend a;
    memset(&a, 0, sizeof(a));
    DCP_TRY(dcp__attend_read_desc(call, desc, &a.d));
    if (n_ranks < 1 || rank < 0 || rank >= n_ranks || ranks_per_host < 0) {
        return dcp__fail(DCP_ERR_ARG, "%s: rank %d of %d ranks, %d per host", call, rank, n_ranks,
                         ranks_per_host);
    }
    DCP_TRY(dcp__struct_check_out(call, "DCP_ATTEND_INFO_INIT", info_out,
                                  DCP__STRUCT_UPTO(dcp_attend_info, merge_kernel)));
    dcp_isa isa = DCP_ISA_SCALAR;
    DCP_TRY(dcp__isa_choose(DCP_ISA_DEFAULT, &isa));
    dcp__kernels_select(isa, &a.kernels);
    DCP_TRY(dcp__attend_shape(call, &a, n_ranks, rank));
    if (a.d.pool != NULL) a.d.n_threads = dcp__pool_threads(a.d.pool);
    const int first = rank - a.rank;
    const bool one_host =
        ranks_per_host == 0 || first / ranks_per_host == (first + a.n_ranks - 1) / ranks_per_host;
    a.is_direct = a.n_ranks == 1 ||
                  (one_host && (a.d.algo == DCP_MERGE_AUTO || a.d.algo == DCP_MERGE_DIRECT));
    struct least least;
    DCP_TRY(least_rows(call, &a, a.is_direct ? 0 : 1, 0, ranks_per_host, &least));
    dcp__attend_choose_tile(&a, least.rows);
    if (!a.is_direct && a.tile_rows > 1 && least.merge_extra > least.merge_bytes) {
        const int64_t rows = a.tile_rows;
        DCP_TRY(least_rows(call, &a, rows, least.merge_bytes + least.merge_extra, ranks_per_host,
                           &least));
        dcp__attend_choose_tile(&a, least.rows);
        if (a.tile_rows > rows) a.tile_rows = rows;
    } else if (!a.is_direct) {
        a.tile_rows = 1;
    }
    dcp_attend_info info;
    memset(&info, 0, sizeof(info));
    info.workspace_bytes = dcp__attend_bytes(&a, a.tile_rows);
    info.merge_workspace_bytes = a.merge_bytes;
    info.tile_rows = a.tile_rows;
    info.algo = a.is_direct                  ? DCP_MERGE_DIRECT
                : a.d.algo == DCP_MERGE_AUTO ? DCP_MERGE_ALLTOALL
                                             : a.d.algo;
    info.algo_name = dcp_merge_algo_name(info.algo);
    info.algo_why = "planned";
    info.n_slots = a.n_slots;
    info.n_ranks = a.n_ranks;
    info.heads = (dcp_range){a.head0 + a.heads.begin, a.head0 + a.heads.end};
    info.kv_heads = (dcp_range){a.kv_head0, a.kv_head0 + a.d.n_kv_heads};
    info.row_bytes = dcp__attend_row_bytes(&a);
    dcp__struct_write(info_out, DCP__STRUCT_UPTO(dcp_attend_info, merge_kernel), &info,
                      sizeof(info));
    return DCP_OK;
}
