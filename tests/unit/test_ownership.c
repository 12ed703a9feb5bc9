/* SPDX-License-Identifier: Apache-2.0 */
/* Ownership against a walk that deals positions out one by one, for any N and I. */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dcpattn/shard.h"

enum { MAX_LEN = 220, MAX_RANKS = 70 };

/* Deal: rank by rank, I positions each, no division anywhere. */
struct deal {
    int owner[MAX_LEN];
    int64_t local[MAX_LEN];
    int64_t count[MAX_RANKS][MAX_LEN + 1]; /* own positions below a length */
};
static void deal_out(struct deal *d, int n, int64_t interleave)
{
    int64_t held[MAX_RANKS] = {0};
    int r = 0;
    int64_t left = interleave;
    for (int p = 0; p < MAX_LEN; p++) {
        for (int k = 0; k < n; k++) d->count[k][p] = held[k];
        d->owner[p] = r;
        d->local[p] = held[r]++;
        if (--left == 0) {
            left = interleave;
            r = r + 1 == n ? 0 : r + 1;
        }
    }
    for (int k = 0; k < n; k++) d->count[k][MAX_LEN] = held[k];
}

static void test_against_dealing(void **state)
{
    (void)state;
    static struct deal d;
    static const int ranks[] = {1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 70};
    static const int64_t inters[] = {1, 2, 3, 5, 16, 17, 64, 219, 220, 221, 100000};
    for (size_t a = 0; a < sizeof(ranks) / sizeof(ranks[0]); a++) {
        for (size_t b = 0; b < sizeof(inters) / sizeof(inters[0]); b++) {
            const int n = ranks[a];
            const int64_t w = inters[b];
            deal_out(&d, n, w);
            for (int p = 0; p < MAX_LEN; p++) {
                assert_int_equal(dcp_pos_owner(p, n, w), d.owner[p]);
                assert_int_equal(dcp_pos_local(p, n, w), d.local[p]);
                assert_int_equal(dcp_pos_global(d.local[p], n, d.owner[p], w), p);
            }
            for (int len = 0; len <= MAX_LEN; len++) {
                int64_t sum = 0;
                for (int r = 0; r < n; r++) {
                    assert_int_equal(dcp_local_length(len, n, r, w), d.count[r][len]);
                    sum += d.count[r][len];
                }
                assert_int_equal(sum, len);
            }
        }
    }
}

static void test_visible_range(void **state)
{
    (void)state;
    static const int ranks[] = {1, 2, 3, 5, 8};
    static const int64_t inters[] = {1, 3, 16};
    static const int64_t windows[] = {0, 1, 2, 7, 30, INT64_MAX};
    for (size_t a = 0; a < 5; a++) {
        for (size_t b = 0; b < 3; b++) {
            for (size_t e = 0; e < 6; e++) {
                for (int64_t length = 0; length < 40; length += 13) {
                    for (int64_t pos = -2; pos < 45; pos++) {
                        for (int causal = 0; causal < 2; causal++) {
                            const int n = ranks[a];
                            const int64_t w = windows[e];
                            for (int r = 0; r < n; r++) {
                                const dcp_range v =
                                    dcp_visible_range(pos, length, w, causal, n, r, inters[b]);
                                const int64_t own = dcp_local_length(length, n, r, inters[b]);
                                assert_true(v.begin >= 0 && v.begin <= v.end && v.end <= own);
                                for (int64_t i = 0; i < own; i++) {
                                    const int64_t p = dcp_pos_global(i, n, r, inters[b]);
                                    int sees = pos >= 0;
                                    if ((causal || w > 0) && p > pos) sees = 0;
                                    if (w > 0 && pos - p >= w) sees = 0;
                                    assert_int_equal(i >= v.begin && i < v.end, sees);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

static void test_pages(void **state)
{
    (void)state;
    for (int64_t pt = 1; pt < 9; pt++) {
        for (int64_t b = 0; b < 30; b++) {
            for (int64_t e = b; e < 30; e++) {
                const dcp_range pg = dcp_page_range((dcp_range){b, e}, pt);
                for (int64_t p = 0; p < 32; p++) {
                    const int touched = b < e && p * pt < e && (p + 1) * pt > b;
                    assert_int_equal(p >= pg.begin && p < pg.end, touched);
                }
            }
        }
    }
    assert_int_equal(dcp_page_range((dcp_range){-1, 4}, 4).end, 0);
    assert_int_equal(dcp_page_range((dcp_range){0, 4}, 0).end, 0);
}

static void test_borders(void **state)
{
    (void)state;
    /* Paddings and nonsense belong to nobody. */
    assert_int_equal(dcp_pos_owner(-1, 3, 2), -1);
    assert_int_equal(dcp_pos_owner(INT64_MIN, 3, 2), -1);
    assert_int_equal(dcp_pos_owner(4, 0, 2), -1);
    assert_int_equal(dcp_pos_owner(4, 3, 0), -1);
    assert_int_equal(dcp_pos_owner(4, 3, -2), -1);
    assert_int_equal(dcp_pos_local(-5, 3, 2), -1);
    assert_int_equal(dcp_pos_local(5, -3, 2), -1);
    assert_int_equal(dcp_pos_global(-1, 3, 0, 2), -1);
    assert_int_equal(dcp_pos_global(0, 3, 3, 2), -1);
    assert_int_equal(dcp_pos_global(0, 3, -1, 2), -1);
    assert_int_equal(dcp_local_length(-7, 3, 0, 2), 0);
    assert_int_equal(dcp_local_length(7, 3, 3, 2), 0);
    assert_int_equal(dcp_local_length(7, 3, -1, 2), 0);
    assert_int_equal(dcp_local_length(7, 3, 0, 0), 0);
    /* Nothing overflows at the ends of the types. */
    assert_int_equal(dcp_pos_owner(INT64_MAX, INT_MAX, INT64_MAX), 1);
    assert_int_equal(dcp_pos_owner(INT64_MAX - 1, INT_MAX, INT64_MAX), 0);
    assert_int_equal(dcp_pos_local(INT64_MAX - 1, 2, INT64_MAX), INT64_MAX - 1);
    assert_int_equal(dcp_local_length(INT64_MAX, 1, 0, 1), INT64_MAX);
    assert_int_equal(dcp_local_length(INT64_MAX, 4, 0, INT64_MAX), INT64_MAX);
    assert_int_equal(dcp_local_length(INT64_MAX, 4, 1, INT64_MAX), 0);
    assert_int_equal(dcp_local_length(INT64_MAX, 2, 0, 1) + dcp_local_length(INT64_MAX, 2, 1, 1),
                     INT64_MAX);
    assert_int_equal(dcp_pos_global(INT64_MAX, 2, 1, 1), -1);
    assert_int_equal(dcp_pos_global(INT64_MAX / 2, 2, 0, 1), INT64_MAX - 1);
    const dcp_range all = dcp_visible_range(INT64_MAX, INT64_MAX, INT64_MAX, 1, 1, 0, 1);
    assert_int_equal(all.begin, 1);
    assert_int_equal(all.end, INT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_dealing),
        cmocka_unit_test(test_visible_range),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_borders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
