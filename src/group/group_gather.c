/* SPDX-License-Identifier: Apache-2.0 */
/* Gathering that every transport can do: straight from the peers' memory where all see it, through
 * the staging areas of a shared control block, or through messages.
 *
 * Staged and sent data is a rank's part read row by row as one flat run of bytes, cut into tiles:
 *   row 0  . . a b c . .        flat   a b c d e f g h i      tiles of 4:  a b c d | e f g h | i
 *   row 1  . . d e f . .
 *   row 2  . . g h i . .
 * Cost: direct 2 records and one copy; staged 1 record more per tile and two copies. */
#include <string.h>

#include "base/hash_priv.h"
#include "group/group_core_priv.h"

/* One buffer of gather_cols. */
struct cols {
    char *buf;
    size_t n_rows, row_stride;
    const size_t *off; /* [size + 1] */
};

struct gather_info {
    uint64_t n_rows, row_stride, cols_hash, offset;
    uint32_t alloc_id;
    uint16_t is_visible, refusal;
};
_Static_assert(sizeof(struct gather_info) <= DCP__RECORD_MAX, "the info travels in a record");

static size_t width(const struct cols *c, int rank)
{
    return c->off[rank + 1] - c->off[rank];
}

/* Copy n bytes from flat position at of rank's part to packed, or back. */
static void copy_flat(const struct cols *c, int rank, size_t at, size_t n, char *packed, bool pack)
{
    const size_t w = width(c, rank);
    size_t row = at / w, col = at % w;
    while (n > 0) {
        const size_t piece = n < w - col ? n : w - col;
        char *const in_buf = c->buf + row * c->row_stride + c->off[rank] + col;
        memcpy(pack ? packed : in_buf, pack ? in_buf : packed, piece);
        packed += piece;
        n -= piece;
        row++;
        col = 0;
    }
}

/* Bytes of rank's part in the tile that begins at flat position at. */
static size_t tile_part(const struct cols *c, int rank, size_t at, size_t tile)
{
    const size_t total = c->n_rows * width(c, rank);
    if (at >= total) return 0;
    return total - at < tile ? total - at : tile;
}

static size_t largest_part(const dcp_group *g, const struct cols *c)
{
    size_t most = 0;
    for (int r = 0; r < g->size; r++) {
        const size_t part = c->n_rows * width(c, r);
        if (part > most) most = part;
    }
    return most;
}

/* Two halves: a half is written again two records later, when everybody has read it. The caller has
 * just had a record, so nobody reads what was here before. */
static dcp_status gather_staged(dcp_group *g, const struct cols *c)
{
    size_t area;
    char *const own = g->ops->staging(g, g->rank, &area);
    const size_t half = area / 2, most = largest_part(g, c);
    unsigned parity = 0;
    for (size_t at = 0; at < most; at += half, parity ^= 1) {
        const size_t n_own = tile_part(c, g->rank, at, half);
        if (n_own > 0) copy_flat(c, g->rank, at, n_own, own + parity * half, true);
        DCP_TRY(g->ops->record(g, NULL, 0, NULL));
        for (int r = 0; r < g->size; r++) {
            const size_t n = r == g->rank ? 0 : tile_part(c, r, at, half);
            if (n == 0) continue;
            size_t unused;
            char *const theirs = g->ops->staging(g, r, &unused);
            copy_flat(c, r, at, n, theirs + parity * half, false);
        }
    }
    return DCP_OK;
}

/* bounce = [own tile][tile of each rank]; the own one among the latter stays unused. */
static dcp_status gather_sent(dcp_group *g, const struct cols *c)
{
    const size_t tile = g->bounce_bytes / ((size_t)g->size + 1);
    const size_t most = largest_part(g, c);
    char *const own = g->bounce;
    struct dcp__xfer *const sends = g->scratch; /* the records in it have been read */
    struct dcp__xfer *const recvs = sends + g->size;
    _Static_assert(2 * sizeof(struct dcp__xfer) <= DCP__RECORD_MAX, "both lists fit the scratch");
    for (size_t at = 0; at < most; at += tile) {
        const size_t n_own = tile_part(c, g->rank, at, tile);
        if (n_own > 0) copy_flat(c, g->rank, at, n_own, own, true);
        int n_peers = 0;
        for (int i = 1; i < g->size; i++) {
            const int to = (g->rank + i) % g->size, from = (g->rank - i + g->size) % g->size;
            sends[n_peers] = (struct dcp__xfer){.peer = to, .buf = own, .n_bytes = n_own};
            recvs[n_peers++] = (struct dcp__xfer){.peer = from,
                                                  .buf = own + ((size_t)from + 1) * tile,
                                                  .n_bytes = tile_part(c, from, at, tile)};
        }
        DCP_TRY(g->ops->exchange_start(g, DCP__OWN_SLOT, sends, n_peers, recvs, n_peers));
        DCP_TRY(g->ops->exchange_wait(g, DCP__OWN_SLOT));
        for (int r = 0; r < g->size; r++) {
            const size_t n = r == g->rank ? 0 : tile_part(c, r, at, tile);
            if (n > 0) copy_flat(c, r, at, n, own + ((size_t)r + 1) * tile, false);
        }
    }
    return DCP_OK;
}

static dcp_status gather_indirect(dcp_group *g, const struct cols *c)
{
    return g->ops->staging != NULL && g->all_see ? gather_staged(g, c) : gather_sent(g, c);
}

static dcp_status gather_direct(dcp_group *g, const struct cols *c, const struct gather_info *infos,
                                bool is_fenced)
{
    for (int i = 1; i < g->size; i++) {
        const int r = (g->rank + i) % g->size;
        const size_t w = width(c, r);
        if (w == 0) continue;
        const size_t span = (c->n_rows - 1) * c->row_stride + c->off[g->size];
        const char *const theirs = g->ops->peer_ptr(g, r, infos[r].alloc_id, infos[r].offset, span);
        if (theirs == NULL) {
            return dcp__group_poison(g, DCP_ERR_MISMATCH,
                                     "gather_cols: rank %d cannot see %zu bytes at offset %llu of "
                                     "allocation %u of rank %d",
                                     g->rank, span, (unsigned long long)infos[r].offset,
                                     infos[r].alloc_id, r);
        }
        for (size_t row = 0; row < c->n_rows; row++) {
            const size_t at = row * c->row_stride + c->off[r];
            memcpy(c->buf + at, theirs + at, w);
        }
    }
    /* Nobody may write its part again before everybody has read it. */
    return is_fenced ? g->ops->record(g, NULL, 0, NULL) : DCP_OK;
}

/* Segments of a tile go to the rank that sums them, sums go to all: two exchanges per tile.
 * bounce = [part of each rank], the sums lie where the own part would. */
dcp_status dcp__allreduce_sent(dcp_group *g, float *buf, size_t n)
{
    const uint64_t n_own = n;
    uint64_t *const n_all = g->scratch;
    DCP_TRY(g->ops->record(g, &n_own, sizeof(n_own), n_all));
    for (int r = 1; r < g->size; r++) {
        if (n_all[r] == n_all[0]) continue;
        return dcp__fail(DCP_ERR_MISMATCH,
                         "allreduce: rank 0 gives %llu values, rank %d gives %llu",
                         (unsigned long long)n_all[0], r, (unsigned long long)n_all[r]);
    }
    const size_t size = (size_t)g->size;
    if (size == 1) return DCP_OK;
    float *const parts = g->bounce;
    const size_t part_max = g->bounce_bytes / sizeof(float) / size;
    struct dcp__xfer *const sends = g->scratch, *const recvs = sends + size;
    for (size_t at = 0; at < n; at += part_max * size) {
        const size_t tile = n - at < part_max * size ? n - at : part_max * size;
        const size_t begin = tile * (size_t)g->rank / size;
        const size_t n_sum = tile * ((size_t)g->rank + 1) / size - begin;
        for (int gathers = 0; gathers < 2; gathers++) {
            float *const sums = parts + (size_t)g->rank * part_max;
            int n_peers = 0;
            for (int i = 1; i < g->size; i++, n_peers++) {
                const int to = (g->rank + i) % g->size, from = (g->rank - i + g->size) % g->size;
                const size_t to_begin = tile * (size_t)to / size;
                const size_t to_n = tile * ((size_t)to + 1) / size - to_begin;
                const size_t from_begin = tile * (size_t)from / size;
                const size_t from_n = tile * ((size_t)from + 1) / size - from_begin;
                sends[n_peers] =
                    (struct dcp__xfer){.peer = to,
                                       .buf = gathers ? sums : buf + at + to_begin,
                                       .n_bytes = (gathers ? n_sum : to_n) * sizeof(float)};
                recvs[n_peers] = (struct dcp__xfer){
                    .peer = from,
                    .buf = gathers ? buf + at + from_begin : parts + (size_t)from * part_max,
                    .n_bytes = (gathers ? from_n : n_sum) * sizeof(float)};
            }
            DCP_TRY(g->ops->exchange_start(g, DCP__OWN_SLOT, sends, n_peers, recvs, n_peers));
            DCP_TRY(g->ops->exchange_wait(g, DCP__OWN_SLOT));
            if (gathers) {
                memcpy(buf + at + begin, sums, n_sum * sizeof(float));
                continue;
            }
            memcpy(sums, buf + at + begin, n_sum * sizeof(float));
            for (size_t i = 0; i < n_sum; i++) {
                float sum = parts[i];
                for (size_t r = 1; r < size; r++) sum += parts[r * part_max + i];
                sums[i] = sum;
            }
        }
    }
    return DCP_OK;
}

static uint64_t hash_cols(const dcp_group *g, const size_t *off)
{
    uint64_t h = DCP__HASH_BEGIN;
    for (int r = 0; r <= g->size; r++) h = dcp__hash_value(h, off[r]);
    return h;
}

/* The first rank that refuses, in everybody's words. */
static dcp_status refused(const dcp_group *g, const char *call, int rank, unsigned refusal)
{
    static const char *const why[DCP__REFUSAL_COUNT] = {
        [DCP__REFUSES_NULL] = "a buffer is NULL",
        [DCP__REFUSES_SIZE] = "sizes exceed the address space",
        [DCP__REFUSES_OVERLAP] = "send and recv overlap",
        [DCP__REFUSES_COLUMNS] = "the columns do not ascend, or exceed the row stride",
    };
    const char *text = refusal < DCP__REFUSAL_COUNT ? why[refusal] : "?";
    if (rank == g->rank) return dcp__fail(DCP_ERR_ARG, "%s: rank %d refuses: %s", call, rank, text);
    return dcp__fail(DCP_ERR_ARG, "%s: rank %d refuses, so rank %d stops too: %s", call, rank,
                     g->rank, text);
}

dcp_status dcp__gather_cols(dcp_group *g, void *buf, size_t n_rows, size_t row_stride_bytes,
                            const size_t *col_off_bytes, bool is_fenced, enum dcp__refusal refusal)
{
    const bool takes_part = refusal == DCP__TAKES_PART;
    const struct cols c = {
        .buf = buf, .n_rows = n_rows, .row_stride = row_stride_bytes, .off = col_off_bytes};
    struct gather_info own = {.refusal = (uint16_t)refusal};
    if (takes_part) {
        own.n_rows = n_rows;
        own.row_stride = row_stride_bytes;
        own.cols_hash = hash_cols(g, col_off_bytes);
        const size_t span =
            n_rows == 0 ? 0 : (n_rows - 1) * row_stride_bytes + col_off_bytes[g->size];
        own.is_visible =
            g->all_see && g->ops->locate(g, buf, span, &own.alloc_id, &own.offset) ? 1 : 0;
    }
    struct gather_info *const infos = g->scratch;
    DCP_TRY(g->ops->record(g, &own, sizeof(own), infos));
    for (int r = 0; r < g->size; r++) {
        if (infos[r].refusal != 0) return refused(g, "gather_cols", r, infos[r].refusal);
    }
    bool all_visible = true;
    for (int r = 0; r < g->size; r++) {
        /* The row stride is a rank's own business unless peers read its memory with it. */
        if (infos[r].n_rows != infos[0].n_rows || infos[r].cols_hash != infos[0].cols_hash ||
            infos[r].row_stride != infos[0].row_stride) {
            return dcp__fail(
                DCP_ERR_MISMATCH,
                "gather_cols: rank 0 gives %llu rows of stride %llu, rank %d gives "
                "%llu rows of stride %llu%s",
                (unsigned long long)infos[0].n_rows, (unsigned long long)infos[0].row_stride, r,
                (unsigned long long)infos[r].n_rows, (unsigned long long)infos[r].row_stride,
                infos[r].cols_hash != infos[0].cols_hash ? " and other columns" : "");
        }
        if (infos[r].is_visible == 0) all_visible = false;
    }
    if (g->size == 1 || n_rows == 0 || col_off_bytes[g->size] == col_off_bytes[0]) return DCP_OK;
    return all_visible ? gather_direct(g, &c, infos, is_fenced) : gather_indirect(g, &c);
}

/* A record is [size of the message u64][the message where it fits]; a refusal is in the highest
 * byte of the size, which no message needs. */
dcp_status dcp__allgather(dcp_group *g, const void *send, size_t n_bytes, void *recv,
                          enum dcp__refusal refusal)
{
    enum { SMALL_MAX = DCP__RECORD_MAX - sizeof(uint64_t), REFUSAL_SHIFT = 56 };
    char record[DCP__RECORD_MAX];
    const uint64_t own_bytes =
        refusal == DCP__TAKES_PART ? n_bytes : (uint64_t)refusal << REFUSAL_SHIFT;
    const size_t in_record = n_bytes <= SMALL_MAX ? n_bytes : 0;
    memcpy(record, &own_bytes, sizeof(own_bytes));
    if (in_record > 0 && refusal == DCP__TAKES_PART)
        memcpy(record + sizeof(own_bytes), send, in_record);
    else if (in_record > 0)
        memset(record + sizeof(own_bytes), 0, in_record);
    const size_t record_bytes = sizeof(own_bytes) + in_record;
    char *const all = g->scratch;
    DCP_TRY(g->ops->record(g, record, record_bytes, all));
    for (int r = 0; r < g->size; r++) {
        uint64_t r_bytes;
        memcpy(&r_bytes, all + (size_t)r * record_bytes, sizeof(r_bytes));
        if (r_bytes >> REFUSAL_SHIFT != 0)
            return refused(g, "allgather", r, (unsigned)(r_bytes >> REFUSAL_SHIFT));
    }
    for (int r = 0; r < g->size; r++) {
        uint64_t r_bytes;
        memcpy(&r_bytes, all + (size_t)r * record_bytes, sizeof(r_bytes));
        uint64_t first_bytes;
        memcpy(&first_bytes, all, sizeof(first_bytes));
        if (r_bytes != first_bytes) {
            return dcp__fail(DCP_ERR_MISMATCH, "allgather: rank 0 gives %llu bytes, rank %d %llu",
                             (unsigned long long)first_bytes, r, (unsigned long long)r_bytes);
        }
        if (in_record > 0) {
            memcpy((char *)recv + (size_t)r * n_bytes,
                   all + (size_t)r * record_bytes + sizeof(r_bytes), in_record);
        }
    }
    if (n_bytes <= SMALL_MAX) return DCP_OK;
    memcpy((char *)recv + (size_t)g->rank * n_bytes, send, n_bytes);
    if (g->size == 1) return DCP_OK;
    /* The lists of a sent gather share the scratch: the offsets lie in its last part. */
    size_t *const off = (size_t *)(void *)(all + (size_t)g->size * 2 * sizeof(struct dcp__xfer));
    _Static_assert(2 * sizeof(struct dcp__xfer) + 2 * sizeof(size_t) <= DCP__RECORD_MAX,
                   "lists and offsets fit the scratch");
    for (int r = 0; r <= g->size; r++) off[r] = (size_t)r * n_bytes;
    const struct cols c = {.buf = recv, .n_rows = 1, .row_stride = off[g->size], .off = off};
    return gather_indirect(g, &c);
}
