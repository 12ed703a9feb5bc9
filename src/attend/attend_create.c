/* SPDX-License-Identifier: Apache-2.0 */
/* Create: check, agree, size the tile, take all memory that runs will use.
 *
 * A rank's share of the limit, by what each part says of itself:
 *
 *     fixed      handle, records, threads, split partials, kernel scratch of each thread
 *     merge      what a merge of one row takes, and an eighth of the rest, at most 8 MiB more
 *     rows       N > 1: q [H, Dk] and out [H, D]; lse [H], lo, hi, a segment
 *
 * Only a merge that has been created knows its bytes: first one of a single row is made, then, if
 * more than one row fits beside it, the one that stays. The tile is as many rows as what is left
 * holds, and at most max_tokens; the smallest of all ranks. */
#include <math.h>
#include <string.h>

#include "attend/attend_priv.h"
#include "base/alloc_priv.h"
#include "base/cpu_priv.h"
#include "base/struct_priv.h"
#include "num/dtype_priv.h"

static const size_t default_limit_bytes = (size_t)64 << 20;
static const size_t merge_extra_most = (size_t)8 << 20;

static const struct dcp__attend_field desc_fields[] = {
    {"max_tokens", false}, {"n_heads", false}, {"n_kv_heads", false}, {"key_dim", false},
    {"value_dim", false},  {"scale", true},    {"softcap", true},     {"causal", false},
    {"interleave", false}, {"algo", false},    {"has_sink", false},
};
enum { N_DESC_FIELDS = sizeof(desc_fields) / sizeof(desc_fields[0]) };

dcp_status dcp__attend_agree(dcp_group *g, const char *call, dcp_status status,
                             const struct dcp__attend_field *names, int n_fields,
                             struct dcp__attend_record *mine, struct dcp__attend_record *all)
{
    mine->status = (int32_t)status;
    mine->n_fields = n_fields;
    if (status != DCP_OK) {
        strncpy(mine->why, dcp_last_error(), sizeof(mine->why) - 1);
        mine->why[sizeof(mine->why) - 1] = '\0';
    }
    DCP_TRY(dcp__group_record(g, mine, sizeof(*mine), all));
    if (status != DCP_OK) return status;
    const int n = dcp_group_size(g);
    for (int r = 0; r < n; r++) {
        if (all[r].status == DCP_OK) continue;
        return dcp__fail((dcp_status)all[r].status, "%s: rank %d refuses: %s", call, r, all[r].why);
    }
    for (int f = 0; f < n_fields; f++) {
        for (int r = 1; r < n; r++) {
            const int64_t a = all[0].field[f], b = all[r].field[f];
            if (a == b) continue;
            if (names[f].is_float) {
                return dcp__fail(DCP_ERR_MISMATCH, "%s: %s is %g on rank 0 and %g on rank %d", call,
                                 names[f].name, (double)dcp__f32_from_bits((uint32_t)a),
                                 (double)dcp__f32_from_bits((uint32_t)b), r);
            }
            return dcp__fail(DCP_ERR_MISMATCH, "%s: %s is %lld on rank 0 and %lld on rank %d", call,
                             names[f].name, (long long)a, (long long)b, r);
        }
    }
    return DCP_OK;
}

/* ---- local checks -------------------------------------------------------------------------- */

static dcp_status check_range(const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value >= low && value <= high) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG, "dcp_attend_create: %s is %lld, must be %lld to %lld", name,
                     (long long)value, (long long)low, (long long)high);
}

static dcp_status read_desc(const dcp_attend_desc *desc, dcp_attend_desc *d)
{
    DCP_TRY(dcp__struct_read("dcp_attend_create", "DCP_ATTEND_DESC_INIT", desc,
                             DCP__STRUCT_UPTO(dcp_attend_desc, pool), d, sizeof(*d)));
    const int64_t max_dim = 1 << 20; /* keeps products of two within int64 */
    DCP_TRY(check_range("max_tokens", d->max_tokens, 0, (int64_t)1 << 40));
    DCP_TRY(check_range("n_heads", d->n_heads, 1, max_dim));
    DCP_TRY(check_range("n_kv_heads", d->n_kv_heads, 1, d->n_heads));
    DCP_TRY(check_range("key_dim", d->key_dim, 1, max_dim));
    DCP_TRY(check_range("value_dim", d->value_dim, 1, max_dim));
    DCP_TRY(check_range("interleave", d->interleave, 0, INT64_MAX));
    DCP_TRY(check_range("n_threads", d->n_threads, 0, 4096));
    if (d->n_heads % d->n_kv_heads != 0) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_create: n_heads %lld is no multiple of n_kv_heads %lld",
                         (long long)d->n_heads, (long long)d->n_kv_heads);
    }
    if (!isfinite(d->scale) || !isfinite(d->softcap) || d->softcap < 0.0f) {
        return dcp__fail(DCP_ERR_ARG,
                         "dcp_attend_create: scale %g and softcap %g must be finite, softcap not "
                         "negative",
                         (double)d->scale, (double)d->softcap);
    }
    if (d->scale == 0.0f) d->scale = (float)(1.0 / sqrt((double)d->key_dim));
    if (d->interleave == 0) d->interleave = 1;
    if (d->n_threads == 0) d->n_threads = 1;
    if (d->workspace_limit_bytes == 0) d->workspace_limit_bytes = default_limit_bytes;
    d->causal = d->causal != 0;
    d->has_sink = d->has_sink != 0;
    return DCP_OK;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Shapes of blocks, all of them functions of H, Hkv and D. */
static void shape_blocks(struct dcp_attend *a)
{
    a->n_group = a->d.n_heads / a->d.n_kv_heads;
    a->n_head_blocks = (a->n_group + DCP__ATTN_ROWS_MAX - 1) / DCP__ATTN_ROWS_MAX;
    a->block_heads = (a->n_group + a->n_head_blocks - 1) / a->n_head_blocks;
    a->n_head_blocks = (a->n_group + a->block_heads - 1) / a->block_heads;
    a->block_rows = DCP__ATTN_ROWS_MAX / a->block_heads;
    const int64_t fit = DCP__ATTEND_SPLIT_BYTES / ((a->d.value_dim + 1) * (int64_t)sizeof(float));
    int64_t most = (int64_t)DCP__ATTEND_ITEMS * DCP__ATTN_ROWS_MAX;
    if (a->d.max_tokens < DCP__ATTN_ROWS_MAX &&
        most > a->d.max_tokens * a->d.n_heads * DCP__ATTEND_ITEMS)
        most = a->d.max_tokens * a->d.n_heads * DCP__ATTEND_ITEMS;
    a->split_rows = fit < most ? fit : most;
    if (a->split_rows < 2 * a->d.n_heads) a->split_rows = 0;
    a->scratch_bytes =
        round_up(dcp__attn_scratch_bytes(DCP__ATTN_ROWS_MAX, a->d.key_dim, a->d.value_dim), 64);
}

/* ---- memory --------------------------------------------------------------------------------- */

/* Give out regions of one block: first with base NULL for the size, then for the pointers. */
static void *region(char *base, size_t *at, size_t bytes)
{
    void *ptr = base == NULL ? NULL : base + *at;
    *at += round_up(bytes, 64);
    return ptr;
}

static size_t lay_out_shared(struct dcp_attend *a, int64_t tile_rows, char *base)
{
    const size_t rows = (size_t)tile_rows, h = (size_t)a->d.n_heads;
    size_t at = 0;
    if (a->n_ranks > 1) {
        a->q = region(base, &at, rows * h * (size_t)a->d.key_dim * sizeof(float));
        a->out = region(base, &at, rows * h * (size_t)a->d.value_dim * sizeof(float));
    }
    a->lse = region(base, &at, rows * h * sizeof(float));
    return at;
}

static size_t lay_out_local(struct dcp_attend *a, int64_t tile_rows, char *base)
{
    const size_t rows = (size_t)tile_rows, n = (size_t)a->n_ranks;
    const size_t split = (size_t)a->split_rows;
    size_t at = 0;
    a->peer_q = region(base, &at, n * sizeof(float *));
    a->lo = region(base, &at, rows * sizeof(int64_t));
    a->hi = region(base, &at, rows * sizeof(int64_t));
    a->segs = region(base, &at, rows * sizeof(*a->segs));
    a->col_off_bytes = region(base, &at, (n + 1) * sizeof(size_t));
    a->split_out = region(base, &at, split * (size_t)a->d.value_dim * sizeof(float));
    a->split_lse = region(base, &at, split * sizeof(float));
    a->scratch = region(base, &at, (size_t)a->d.n_threads * a->scratch_bytes);
    return at;
}

/* All that this rank takes for a tile of rows, the merge apart. */
static size_t bytes_for(struct dcp_attend *a, int64_t rows)
{
    size_t n = sizeof(*a) + (size_t)a->n_ranks * sizeof(*a->records);
    if (a->d.pool == NULL) n += dcp__pool_bytes(a->d.n_threads);
    return n + lay_out_shared(a, rows, NULL) + lay_out_local(a, rows, NULL);
}

/* The most rows that fit into n_bytes: max_tokens at most, but room for one if they are none; 0 if
 * not even one fits. */
static int64_t rows_in(struct dcp_attend *a, size_t n_bytes)
{
    if (n_bytes > (size_t)1 << 56) n_bytes = (size_t)1 << 56; /* sums below stay within 64 bits */
    if (bytes_for(a, 1) > n_bytes) return 0;
    const size_t floats = a->n_ranks > 1 ? (size_t)(a->d.key_dim + a->d.value_dim) : 1;
    const size_t most = n_bytes / ((size_t)a->d.n_heads * floats * sizeof(float));
    int64_t low = 1, high = a->d.max_tokens > 1 ? a->d.max_tokens : 1;
    if ((size_t)high > most) high = (int64_t)most;
    while (low < high) {
        const int64_t mid = low + (high - low + 1) / 2;
        if (bytes_for(a, mid) <= n_bytes)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

/* Ranks of this one's host, itself included. */
static int host_ranks(const struct dcp_attend *a)
{
    int n = 0;
    for (int r = 0; r < a->n_ranks; r++)
        n += dcp_group_host(a->group, r) == dcp_group_host(a->group, a->rank);
    return n;
}

static dcp_status take_local(struct dcp_attend *a)
{
    a->workspace_bytes = bytes_for(a, a->tile_rows) + a->merge_bytes;
    DCP_TRY(dcp__alloc(lay_out_local(a, a->tile_rows, NULL), "attend workspace", &a->local));
    lay_out_local(a, a->tile_rows, a->local);
    for (int r = 0; r < a->n_ranks; r++) {
        const dcp_range heads = dcp_cut_range(a->d.n_heads, a->n_ranks, r);
        a->col_off_bytes[r] = (size_t)(heads.begin * a->d.key_dim) * sizeof(float);
    }
    a->col_off_bytes[a->n_ranks] = (size_t)(a->d.n_heads * a->d.key_dim) * sizeof(float);
    if (a->d.pool != NULL) return DCP_OK;
    DCP_TRY(dcp_pool_create(a->d.n_threads, host_ranks(a), &a->own_pool));
    a->pool = a->own_pool;
    return DCP_OK;
}

/* Group memory, and where the peers' q lies if all see each other. */
static dcp_status take_shared(struct dcp_attend *a, dcp_status st)
{
    const size_t bytes = lay_out_shared(a, a->tile_rows, NULL);
    void *shared = NULL;
    DCP_TRY(dcp_group_alloc(a->group, bytes, &shared));
    a->shared = shared;
    lay_out_shared(a, a->tile_rows, shared);
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    uint32_t id = 0;
    uint64_t offset = 0;
    if (st == DCP_OK && a->n_ranks > 1 && dcp__group_all_see(a->group) &&
        !dcp__group_locate(a->group, a->shared, bytes, &id, &offset)) {
        st = dcp__fail(DCP_ERR_SYS, "dcp_attend_create: group memory is not where it should be");
    }
    mine.field[0] = (int64_t)id;
    mine.field[1] = (int64_t)offset;
    DCP_TRY(dcp__attend_agree(a->group, "dcp_attend_create", st, NULL, 0, &mine, a->records));
    if (a->n_ranks == 1 || !dcp__group_all_see(a->group)) {
        a->peer_q = NULL;
        return DCP_OK;
    }
    for (int r = 0; r < a->n_ranks; r++) {
        a->peer_q[r] = dcp__group_peer_ptr(a->group, r, (uint32_t)a->records[r].field[0],
                                           (uint64_t)a->records[r].field[1], bytes);
        if (a->peer_q[r] == NULL) {
            return dcp__group_poison(a->group, DCP_ERR_SYS,
                                     "dcp_attend_create: rank %d's group memory cannot be seen", r);
        }
    }
    return DCP_OK;
}

/* ---- create and destroy --------------------------------------------------------------------- */

/* Limit 0: the merge's own default. */
static dcp_status create_merge(struct dcp_attend *a, int64_t max_rows, size_t limit)
{
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = max_rows;
    desc.n_heads = a->d.n_heads;
    desc.dim = a->d.value_dim;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.cut = DCP_CUT_HEADS;
    desc.algo = a->d.algo;
    desc.has_sink = a->d.has_sink;
    desc.workspace_limit_bytes = limit;
    dcp_merge_destroy(a->merge);
    a->merge = NULL;
    DCP_TRY(dcp_merge_create(a->group, &desc, &a->merge));
    dcp_merge_info info;
    dcp_merge_get_info(a->merge, &info);
    a->merge_bytes = info.workspace_bytes;
    return DCP_OK;
}

/* tile_rows beside the merge there is: what this rank can hold, then the least of all. */
static dcp_status agree_rows(struct dcp_attend *a)
{
    const size_t limit = a->d.workspace_limit_bytes;
    const size_t need = bytes_for(a, 1) + a->merge_bytes;
    dcp_status st = DCP_OK;
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    if (need <= limit) {
        mine.field[0] = rows_in(a, limit - a->merge_bytes);
    } else {
        st = dcp__fail(DCP_ERR_ARG,
                       "dcp_attend_create: workspace_limit_bytes is %zu, one row of %lld heads "
                       "with %d threads needs %zu",
                       limit, (long long)a->d.n_heads, a->d.n_threads, need);
    }
    DCP_TRY(dcp__attend_agree(a->group, "dcp_attend_create", st, NULL, 0, &mine, a->records));
    a->tile_rows = mine.field[0];
    for (int r = 0; r < a->n_ranks; r++)
        if (a->records[r].field[0] < a->tile_rows) a->tile_rows = a->records[r].field[0];
    return DCP_OK;
}

/* The merge and tile_rows, within the limit. */
static dcp_status size_tile(struct dcp_attend *a)
{
    DCP_TRY(create_merge(a, 1, 0));
    DCP_TRY(agree_rows(a));
    if (a->tile_rows == 1) return DCP_OK;
    size_t extra = (a->d.workspace_limit_bytes - a->merge_bytes - bytes_for(a, 1)) / 8;
    if (extra > merge_extra_most) extra = merge_extra_most;
    DCP_TRY(create_merge(a, a->tile_rows, a->merge_bytes + extra));
    return agree_rows(a);
}

/* has_place: the caller's attend_out is not NULL. */
static dcp_status build(struct dcp_attend *a, const dcp_attend_desc *desc, bool has_place)
{
    struct dcp__attend_record mine;
    memset(&mine, 0, sizeof(mine));
    dcp_isa isa = DCP_ISA_SCALAR;
    dcp_status st = has_place ? read_desc(desc, &a->d)
                              : dcp__fail(DCP_ERR_ARG, "dcp_attend_create: attend_out is NULL");
    if (st == DCP_OK) st = dcp__isa_choose(DCP_ISA_DEFAULT, &isa);
    if (st == DCP_OK) {
        if (a->d.pool != NULL) {
            a->pool = a->d.pool;
            a->d.n_threads = dcp__pool_threads(a->pool);
        }
        dcp__kernels_select(isa, &a->kernels);
        shape_blocks(a);
        const int64_t fields[N_DESC_FIELDS] = {a->d.max_tokens,
                                               a->d.n_heads,
                                               a->d.n_kv_heads,
                                               a->d.key_dim,
                                               a->d.value_dim,
                                               (int64_t)dcp__f32_bits(a->d.scale),
                                               (int64_t)dcp__f32_bits(a->d.softcap),
                                               (int64_t)a->d.causal,
                                               a->d.interleave,
                                               (int64_t)a->d.algo,
                                               (int64_t)a->d.has_sink};
        memcpy(mine.field, fields, sizeof(fields));
    }
    DCP_TRY(dcp__attend_agree(a->group, "dcp_attend_create", st, desc_fields, N_DESC_FIELDS, &mine,
                              a->records));
    a->heads = dcp_cut_range(a->d.n_heads, a->n_ranks, a->rank);
    a->last_type = DCP_BF16;
    DCP_TRY(size_tile(a));
    return take_shared(a, take_local(a));
}

/* What a create that failed, or a destroy, gives back: peers do the same, in the same order. */
static void tear_down(struct dcp_attend *a)
{
    dcp_group_free(a->group, a->shared);
    dcp_merge_destroy(a->merge);
    dcp_pool_destroy(a->own_pool);
    if (!dcp__group_keeps_buffers(a->group)) dcp__free(a->local); /* partials on their way */
    dcp__free(a->records);
    dcp__free(a);
}

dcp_status dcp_attend_create(dcp_group *g, const dcp_attend_desc *desc, dcp_attend **attend_out)
{
    if (g == NULL) return dcp__fail(DCP_ERR_ARG, "dcp_attend_create: the group is NULL");
    DCP_TRY(dcp__group_enter(g));
    const int n = dcp_group_size(g);
    struct dcp_attend *a = NULL;
    void *ptr = NULL;
    dcp_status st = dcp__alloc(sizeof(*a), "attend handle", &ptr);
    if (st == DCP_OK) {
        a = ptr;
        a->group = g;
        a->n_ranks = n;
        a->rank = dcp_group_rank(g);
        st = dcp__alloc_array((size_t)n, sizeof(*a->records), "attend records", &ptr);
    }
    if (st != DCP_OK) { /* too little memory even to tell the peers why */
        dcp__free(a);
        st = dcp__group_poison(g, st, "dcp_attend_create: no memory for its handle");
        dcp__group_leave(g);
        return st;
    }
    a->records = ptr;
    st = build(a, desc, attend_out != NULL);
    if (st == DCP_OK) {
        *attend_out = a;
    } else {
        tear_down(a);
    }
    dcp__group_leave(g);
    return st;
}

void dcp_attend_get_info(const dcp_attend *a, dcp_attend_info *info_out)
{
    if (a == NULL || info_out == NULL) return;
    dcp_merge_info merge;
    dcp_merge_get_info(a->merge, &merge);
    const dcp_attend_info info = {.workspace_bytes = a->workspace_bytes,
                                  .merge_workspace_bytes = a->merge_bytes,
                                  .tile_rows = a->tile_rows,
                                  .algo = merge.algo,
                                  .algo_name = merge.algo_name,
                                  .algo_why = merge.why,
                                  .kernel = a->kernels.attn_name[a->last_type],
                                  .merge_kernel = merge.kernel};
    dcp__struct_write(info_out, DCP__STRUCT_UPTO(dcp_attend_info, merge_kernel), &info,
                      sizeof(info));
}

void dcp_attend_destroy(dcp_attend *a)
{
    if (a == NULL) return;
    tear_down(a);
}
