/* SPDX-License-Identifier: Apache-2.0 */
/* Who owns what, for any numbers: small ones against counting, huge ones against each other. */
#include "dcpattn/shard.h"
#include "fuzz/fuzz_driver.h"

static int64_t take(const uint8_t **data, size_t *n_bytes)
{
    uint64_t v = 0;
    const size_t n = *n_bytes < sizeof(v) ? *n_bytes : sizeof(v);
    memcpy(&v, *data, n);
    *data += n;
    *n_bytes -= n;
    return (int64_t)v;
}

static int64_t below(int64_t v, int64_t limit)
{
    return (int64_t)((uint64_t)v % (uint64_t)limit);
}

static int sees(int64_t p, int64_t pos, int64_t length, int64_t window, int causal)
{
    if (pos < 0 || p >= length) return 0;
    if ((causal || window > 0) && p > pos) return 0;
    return window <= 0 || p > pos - window;
}

/* Every number small: count. */
static void count_all(int64_t length, int n_ranks, int64_t interleave, int64_t pos, int64_t window,
                      int causal)
{
    int64_t n_all = 0;
    for (int r = 0; r < n_ranks; r++) {
        const int64_t n = dcp_local_length(length, n_ranks, r, interleave);
        const dcp_range seen =
            dcp_visible_range(pos, length, window, causal, n_ranks, r, interleave);
        int64_t n_own = 0;
        for (int64_t p = 0; p < length; p++) {
            if (p / interleave % n_ranks != r) continue;
            fuzz_require(dcp_pos_owner(p, n_ranks, interleave) == r);
            fuzz_require(dcp_pos_local(p, n_ranks, interleave) == n_own);
            fuzz_require(dcp_pos_global(n_own, n_ranks, r, interleave) == p);
            fuzz_require((n_own >= seen.begin && n_own < seen.end) ==
                         sees(p, pos, length, window, causal));
            n_own++;
        }
        fuzz_require(n == n_own && seen.begin <= seen.end);
        n_all += n;
    }
    fuzz_require(n_all == length);
}

/* Numbers of any size: nothing overflows, and the functions agree. */
static void agree(int64_t pos, int64_t length, int n_ranks, int64_t interleave, int64_t window)
{
    const int owner = dcp_pos_owner(pos, n_ranks, interleave);
    if (pos < 0 || n_ranks < 1 || interleave < 1) {
        fuzz_require(owner == -1);
        return;
    }
    fuzz_require(owner >= 0 && owner < n_ranks);
    const int64_t local = dcp_pos_local(pos, n_ranks, interleave);
    fuzz_require(local >= 0 && local <= pos);
    fuzz_require(dcp_pos_global(local, n_ranks, owner, interleave) == pos);
    fuzz_require(dcp_local_length(pos, n_ranks, owner, interleave) == local);
    const int64_t n = dcp_local_length(length, n_ranks, owner, interleave);
    fuzz_require(n >= 0 && (n == 0 || n <= length));
    for (int causal = 0; causal < 2; causal++) {
        const dcp_range seen =
            dcp_visible_range(pos, length, window, causal, n_ranks, owner, interleave);
        fuzz_require(seen.begin >= 0 && seen.begin <= seen.end && seen.end <= n);
    }
    const dcp_range cut = dcp_cut_range(pos, n_ranks, owner);
    fuzz_require(cut.begin >= 0 && cut.begin <= cut.end && cut.end <= pos);
    if (cut.begin < cut.end) {
        fuzz_require(dcp_cut_owner(pos, n_ranks, cut.begin) == owner);
        fuzz_require(dcp_cut_owner(pos, n_ranks, cut.end - 1) == owner);
    }
    if (owner + 1 < n_ranks) {
        fuzz_require(dcp_cut_range(pos, n_ranks, owner + 1).begin == cut.end);
    }
    const dcp_range own = {0, n};
    const dcp_range pages = dcp_page_range(own, interleave);
    fuzz_require(pages.begin >= 0 && pages.begin <= pages.end && pages.end <= n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    while (n_bytes > 0) {
        const int64_t pos = take(&data, &n_bytes);
        const int64_t length = take(&data, &n_bytes);
        const int64_t n_ranks = take(&data, &n_bytes);
        const int64_t interleave = take(&data, &n_bytes);
        const int64_t window = take(&data, &n_bytes);
        agree(pos, length, (int)n_ranks, interleave, window);
        /* Half of all signs gone, and few bits, so that something is left to compare. */
        agree(pos & INT64_MAX, length & INT64_MAX, (int)below(n_ranks, 1 << 20) + 1,
              (interleave & INT64_MAX) >> below(n_ranks, 63), window & INT64_MAX);
        count_all(below(length, 200), (int)below(n_ranks, 9) + 1, below(interleave, 40) + 1,
                  below(pos, 230) - 10, below(window, 120), (int)(window & 1));
    }
    return 0;
}
