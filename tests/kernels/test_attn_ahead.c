/* SPDX-License-Identifier: Apache-2.0 */
/* Which lines are fetched ahead of the AMX kernels, and in which order: addresses alone, nothing is
 * read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static void record(const char *at);
#define AHEAD_FETCH(at) record(at)
#include "kernels/attn_ahead_amx.h"

enum { MAX_LINES = 1 << 18, MAX_PAGES = 512, ROOM = 4096 /* lines in front of the keys */ };
/* Where keys would lie; off a page of 4 KiB by 5 lines. */
static char *const base = (char *)(uintptr_t)0x100000140;

/* Lines relative to base - ROOM lines: how often each was asked for, and when first. */
static int times[MAX_LINES];
static int64_t first_at[MAX_LINES];
static int64_t n_asked, n_outside;
static int64_t order[MAX_LINES];

static void record(const char *at)
{
    const int64_t line = (at - base) / AHEAD_LINE + ROOM;
    if (line < 0 || line >= MAX_LINES) {
        n_outside++;
        return;
    }
    if (times[line]++ == 0) first_at[line] = n_asked;
    if (n_asked < MAX_LINES) order[n_asked] = line - ROOM;
    n_asked++;
}

struct setup {
    dcp_kv_view view;
    struct dcp__attn_job job;
    struct amx_job a;
    int32_t pages[MAX_PAGES];
};
/* Latent keys of dk where dv is 0; else K and V of a page one behind the other. */
static void set_up(struct setup *s, int64_t dk, int64_t dv, int64_t page_tokens, int64_t slot_dims,
                   int64_t n_keys)
{
    memset(s, 0, sizeof(*s));
    memset(times, 0, sizeof(times));
    n_asked = n_outside = 0;
    const int64_t page_dims = page_tokens * slot_dims * (dv > 0 ? 2 : 1);
    s->view = (dcp_kv_view){
        .k_base = base,
        .v_base = dv > 0 ? base + page_tokens * slot_dims * 2 : base,
        .pages = s->pages,
        .page_tokens = page_tokens,
        .k_page_stride_bytes = page_dims * 2,
        .v_page_stride_bytes = page_dims * 2,
        .k_slot_stride = slot_dims,
        .v_slot_stride = slot_dims,
        .n_keys = n_keys,
        .dtype = DCP_BF16,
    };
    for (int i = 0; i < MAX_PAGES; i++) s->pages[i] = i;
    s->job = (struct dcp__attn_job){.view = &s->view, .dk = dk, .dv = dv > 0 ? dv : dk};
    s->a.job = &s->job;
    s->a.k_steps = amx_div_up(dk, AMX_STEP);
    s->a.v_steps = amx_div_up(s->job.dv, AMX_STEP);
    s->a.hi = n_keys;
}

/* Every line of the rows is asked for, no line outside their pages of 4 KiB, and few twice. */
static void test_run(void **state)
{
    (void)state;
    static const int64_t keys[] = {768, 2048, 2000, 4095};
    static const int64_t begins[] = {0, 16, 256, 304};
    for (size_t k = 0; k < 4; k++) {
        for (size_t b = 0; b < 4; b++) {
            static struct setup s;
            struct ahead x;
            set_up(&s, 576, 0, 1024, 576, keys[k]);
            s.a.lo = begins[b];
            const int64_t end = keys[k] / AMX_GROUP * AMX_GROUP; /* the rest is copied: no tiles */
            ahead_begin(&s.a, &x, begins[b], 256, 816);
            assert_int_equal(x.rows[0].is_run, 1);
            const int64_t n = (end - begins[b]) * 18;
            for (int64_t i = 0; i < (n + 1024) / UNIT_LINES; i++) ahead_unit(&s.a, &x);
            for (int64_t line = begins[b] * 18; line < end * 18; line++)
                assert_true(times[line + ROOM] > 0);
            /* base is line 5 of its page. */
            const int64_t lowest = (begins[b] * 18 + 5) / PAGE_LINES * PAGE_LINES - 5;
            for (int64_t line = 0; line < MAX_LINES; line++)
                if (line - ROOM < lowest || line - ROOM >= end * 18)
                    assert_int_equal(times[line], 0);
            assert_int_equal(n_outside, 0);
            int64_t twice = 0;
            for (int64_t line = 0; line < MAX_LINES; line++)
                twice += times[line] > 1 ? times[line] - 1 : 0;
            assert_true(twice <= RUN_RAMP * RUN_PAGES + AMX_GROUP * 18);
        }
    }
}

/* A page's lines come in their order, pages one after the other, and none later than 448 lines
 * after its turn. */
static void test_run_order(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 576, 0, 64, 576, 4096); /* pages that lie one after the other are one run */
    ahead_begin(&s.a, &x, 0, 256, 816);
    assert_int_equal(x.rows[0].is_run, 1);
    assert_true(x.rows[0].next > 4000);
    for (int64_t i = 0; i < 4000 * 18 / UNIT_LINES; i++) ahead_unit(&s.a, &x);
    const int64_t ramp = RUN_RAMP * RUN_PAGES;
    for (int64_t line = 512; line < 3900 * 18; line++) {
        const int64_t in_page = (line + 5) % PAGE_LINES;
        assert_int_equal(times[line + ROOM], 1);
        if (in_page > 0) {
            assert_int_equal(first_at[line + ROOM] - first_at[line + ROOM - 1], RUN_PAGES);
        } else {
            /* Eight lines of each page after the one before. */
            const int64_t before = first_at[line + ROOM - PAGE_LINES];
            assert_in_range(first_at[line + ROOM] - before, 57, 65);
        }
        assert_true(first_at[line + ROOM] <= line + 5 + ramp);
    }
}

/* A run ends where the next page lies elsewhere, or does not follow; of the table no more is read
 * than the keys have. */
static void test_run_ends(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 576, 0, 64, 576, 2048);
    for (int i = 20; i < MAX_PAGES; i++) s.pages[i] = i + 7; /* a gap behind page 19 */
    ahead_begin(&s.a, &x, 0, 256, 816);
    assert_int_equal(x.rows[0].is_run, 1);
    assert_in_range(x.rows[0].next, 18 * 64, 20 * 64);
    for (int i = 20; i < MAX_PAGES; i++) s.pages[i] = 19 - (i - 20); /* and back */
    ahead_begin(&s.a, &x, 0, 256, 816);
    assert_in_range(x.rows[0].next, 18 * 64, 20 * 64);
    s.view.k_page_stride_bytes = s.view.v_page_stride_bytes = 64 * 576 * 2 + 64;
    ahead_begin(&s.a, &x, 0, 256, 816);
    assert_int_equal(x.rows[0].is_run, 0);
    set_up(&s, 576, 0, 64, 576, 2048);
    /* A table of 2048 / 64 entries, and nothing behind it. */
    const size_t room = (size_t)sysconf(_SC_PAGESIZE);
    char *const map =
        mmap(NULL, 2 * room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    int32_t *const table = (int32_t *)(void *)(map + room) - 2048 / 64;
    memcpy(table, s.pages, 2048 / 64 * sizeof(*table));
    assert_int_equal(mprotect(map + room, room, PROT_NONE), 0);
    s.view.pages = table;
    assert_int_equal(amx_run_keys(&s.a, 0, false), 2048);
    munmap(map, 2 * room);
}

/* K and V of unlike widths, each in runs of its own: 16 rows of each in turns, all of both. */
static void test_two_runs(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 192, 128, 2048, 192, 2048);
    s.view.v_slot_stride = 128;
    ahead_begin(&s.a, &x, 0, 256, 64);
    assert_int_equal(x.rows[0].is_run, 1);
    assert_int_equal(x.rows[1].is_run, 1);
    assert_int_equal(x.rows[0].n_lines, 6);
    assert_int_equal(x.rows[1].n_lines, 4);
    for (int i = 0; i < 24; i++) ahead_unit(&s.a, &x); /* 96 lines of K */
    /* V's first line, down to its page of 4 KiB */
    const int64_t v = (2048 * 6 + 5) / PAGE_LINES * PAGE_LINES - 5;
    for (int i = 0; i < 96; i++) assert_true(order[i] < v);
    for (int i = 0; i < 16; i++) ahead_unit(&s.a, &x); /* 64 of V */
    for (int i = 96; i < 160; i++) assert_true(order[i] >= v);
    ahead_unit(&s.a, &x);
    assert_true(order[160] < v);
    for (int64_t i = 0; i < 2200 * 10 / UNIT_LINES; i++) ahead_unit(&s.a, &x);
    for (int64_t line = 0; line < 2048 * 10; line++) assert_true(times[line + ROOM] > 0);
    /* What is used up, of both. */
    ahead_begin(&s.a, &x, 0, 256, 64);
    ahead_from(&s.a, &x, 1024);
    const int64_t asked = n_asked;
    for (int i = 0; i < 40; i++) ahead_unit(&s.a, &x);
    for (int64_t i = asked; i < n_asked && i < MAX_LINES; i++) {
        const bool is_value = order[i] >= v;
        const int64_t line = is_value ? order[i] - v : order[i];
        assert_true(line >= 1024 * (is_value ? 4 : 6) - 2 * RUN_PAGES * PAGE_LINES);
    }
}

/* Pages anywhere, and K and V: as they lie, 16 rows of each in turns. */
static void test_groups(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 128, 128, 32, 128, 256);
    for (int i = 0; i < 8; i++) s.pages[i] = 7 - i;
    ahead_begin(&s.a, &x, 0, 256, 64);
    assert_int_equal(x.rows[0].is_run, 0);
    for (int64_t i = 0; i < 256 * 8 / UNIT_LINES; i++) ahead_unit(&s.a, &x);
    assert_int_equal(n_asked, 256 * 8);
    for (int64_t i = 0; i < n_asked; i++) {
        const int64_t group = i / 128;
        const int64_t is_value = i / 64 % 2;
        const int64_t line = ((7 - group / 2) * 2 + is_value) * 128 + group % 2 * 64 + i % 64;
        assert_int_equal(order[i], line);
    }
}

/* Rows of 5 lines, 8 lines apart; nothing beyond the last whole group. */
static void test_scattered(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 160, 0, 64, 256, 120);
    ahead_begin(&s.a, &x, 0, 256, 64);
    for (int64_t i = 0; i < 256 * 5 / UNIT_LINES; i++) ahead_unit(&s.a, &x);
    assert_int_equal(n_asked, 112 * 5);
    for (int64_t i = 0; i < n_asked; i++) assert_int_equal(order[i], i / 5 * 8 + i % 5);
}

/* What is used up is not fetched any more: in a run, behind it, and in groups. */
static void test_from(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 576, 0, 1024, 576, 4096);
    ahead_begin(&s.a, &x, 0, 256, 816);
    for (int i = 0; i < 10; i++) ahead_unit(&s.a, &x);
    const int64_t asked = n_asked;
    ahead_from(&s.a, &x, 1024);
    for (int i = 0; i < 1000; i++) ahead_unit(&s.a, &x);
    for (int64_t i = asked; i < n_asked; i++)
        assert_true(order[i] >= 1024 * 18 - 2 * RUN_PAGES * PAGE_LINES);
    ahead_from(&s.a, &x, 512); /* it is further on already */
    ahead_unit(&s.a, &x);
    assert_true(order[n_asked - 1] >= 1024 * 18);
    ahead_from(&s.a, &x, 4080); /* the last group, behind the run */
    ahead_unit(&s.a, &x);
    assert_int_equal(order[n_asked - 1], 4080 * 18 + 3);
    set_up(&s, 128, 128, 32, 128, 256);
    ahead_begin(&s.a, &x, 0, 256, 64);
    ahead_from(&s.a, &x, 64);
    ahead_unit(&s.a, &x);
    assert_int_equal(order[0], 4 * 128);
    ahead_from(&s.a, &x, 16); /* backwards: nothing */
    ahead_unit(&s.a, &x);
    assert_int_equal(order[4], 4 * 128 + 4);
    /* After a jump in a run pages that come later are whole. */
    set_up(&s, 576, 0, 1024, 576, 4096);
    ahead_begin(&s.a, &x, 0, 256, 816);
    ahead_from(&s.a, &x, 1024);
    for (int64_t i = 0; i < 3200 * 18 / UNIT_LINES; i++) ahead_unit(&s.a, &x);
    for (int64_t line = 1024 * 18 + RUN_PAGES * PAGE_LINES; line < 4080 * 18; line++)
        assert_true(times[line + ROOM] > 0);
    /* Rows that see nothing. */
    set_up(&s, 576, 0, 1024, 576, 4096);
    s.a.lo = INT64_MAX;
    s.a.hi = INT64_MIN;
    ahead_begin(&s.a, &x, 0, 256, 816);
    for (int i = 0; i < 1000; i++) ahead_step(&s.a, &x);
    assert_int_equal(n_asked, 0);
}

/* The pace: so many keys' lines in so many steps, within a hundredth. */
static void test_pace(void **state)
{
    (void)state;
    static struct setup s;
    struct ahead x;
    set_up(&s, 576, 0, 1024, 576, 4096);
    ahead_begin(&s.a, &x, 0, 256, 816);
    for (int i = 0; i < 816; i++) ahead_step(&s.a, &x);
    assert_in_range(n_asked, 256 * 18, 256 * 18 * 101 / 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_run),      cmocka_unit_test(test_run_order),
        cmocka_unit_test(test_run_ends), cmocka_unit_test(test_two_runs),
        cmocka_unit_test(test_groups),   cmocka_unit_test(test_scattered),
        cmocka_unit_test(test_from),     cmocka_unit_test(test_pace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
