/* SPDX-License-Identifier: Apache-2.0 */
/* All-reduce in shared memory: reduce-scatter, then all-gather, in tiles that fit the staging
 * areas.
 *
 *   tile of n floats   every rank copies its tile into its staging area          (record)
 *                      rank r sums segment r over all areas, in rank order       (record)
 *                      every rank copies all sums out
 *
 * Cost: per rank and tile 1 copy in, n reads of a segment, 1 copy out, 2 records. Scratch: the
 * staging area holds a tile and a segment of sums. The sums lie apart from the tile, and a tile is
 * written again only after the second record: no third barrier is needed. */
#include <string.h>

#include "group/group_mem_priv.h"

static size_t segment_begin(size_t n, int size, int rank)
{
    return n * (size_t)rank / (size_t)size;
}

dcp_status dcp__mem_allreduce_f32(dcp_group *g, float *buf, size_t n)
{
    if (g->n_hosts > 1) return dcp__allreduce_sent(g, buf, n);
    size_t stage_bytes;
    float *const own = dcp__mem_staging(g, g->rank, &stage_bytes);
    /* A tile and its largest segment, ceil(tile / size), in one area; kept at cache lines. */
    const size_t area = stage_bytes / sizeof(float);
    const size_t tile_max = (area - 64) * (size_t)g->size / ((size_t)g->size + 1) / 16 * 16;
    /* Ranks that disagree find out; and whoever still read the areas has finished. */
    const uint64_t n_own = n;
    uint64_t *const n_all = g->scratch;
    DCP_TRY(dcp__mem_record(g, &n_own, sizeof(n_own), n_all));
    for (int r = 1; r < g->size; r++) {
        if (n_all[r] != n_all[0]) {
            return dcp__fail(DCP_ERR_MISMATCH,
                             "allreduce: rank 0 gives %llu values, rank %d gives %llu",
                             (unsigned long long)n_all[0], r, (unsigned long long)n_all[r]);
        }
    }
    for (size_t at = 0; at < n; at += tile_max) {
        const size_t tile = n - at < tile_max ? n - at : tile_max;
        memcpy(own, buf + at, tile * sizeof(float));
        DCP_TRY(dcp__mem_record(g, NULL, 0, NULL));
        const size_t begin = segment_begin(tile, g->size, g->rank);
        const size_t end = segment_begin(tile, g->size, g->rank + 1);
        float *const sums = own + tile_max;
        for (int r = 0; r < g->size; r++) {
            size_t unused;
            const float *const part = (const float *)dcp__mem_staging(g, r, &unused) + begin;
            if (r == 0) {
                memcpy(sums, part, (end - begin) * sizeof(float));
            } else {
                for (size_t i = 0; i < end - begin; i++) sums[i] += part[i];
            }
        }
        DCP_TRY(dcp__mem_record(g, NULL, 0, NULL));
        for (int r = 0; r < g->size; r++) {
            size_t unused;
            const float *const theirs = (const float *)dcp__mem_staging(g, r, &unused) + tile_max;
            const size_t r_begin = segment_begin(tile, g->size, r);
            const size_t r_end = segment_begin(tile, g->size, r + 1);
            if (r_end > r_begin)
                memcpy(buf + at + r_begin, theirs, (r_end - r_begin) * sizeof(float));
        }
    }
    return DCP_OK;
}
