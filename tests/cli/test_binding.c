/* SPDX-License-Identifier: Apache-2.0 */
/* Shares of cores: by table, and for many machines that no core is given twice, none is missing and
 * a rank stays within a node wherever all can. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cli/binding.h"

static struct topology_cores cores;
static struct binding b;

/* Nodes of so many cores each; CPU numbers are 2 * core. */
static void machine(const int *node_cores, int n_nodes)
{
    cores.n = 0;
    for (int node = 0; node < n_nodes; node++) {
        for (int i = 0; i < node_cores[node]; i++, cores.n++) {
            cores.cpu[cores.n] = 2 * cores.n;
            cores.node[cores.n] = node;
        }
    }
}

static void test_table(void **state)
{
    (void)state;
    static const int nodes[] = {4, 4};
    static const struct {
        int n_ranks, rank, n_threads, mode, first, n; /* first core, cores */
    } cases[] = {
        {1, 0, 8, BIND_AUTO, 0, 8}, {1, 0, 3, BIND_AUTO, 0, 8},  {1, 0, 3, BIND_CORES, 0, 3},
        {2, 0, 4, BIND_AUTO, 0, 4}, {2, 1, 4, BIND_AUTO, 4, 4},  {2, 1, 2, BIND_CORES, 4, 2},
        {3, 0, 2, BIND_AUTO, 0, 2}, {3, 1, 2, BIND_AUTO, 2, 2},  {3, 2, 2, BIND_AUTO, 4, 4},
        {8, 5, 1, BIND_AUTO, 5, 1}, {8, 5, 1, BIND_CORES, 5, 1}, {1, 0, 9, BIND_AUTO, 0, 0},
        {3, 0, 3, BIND_AUTO, 0, 0}, {2, 0, 4, BIND_NONE, 0, 0},
    };
    machine(nodes, 2);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(binding_share((enum bind_mode)cases[i].mode, &cores, 8, cases[i].n_ranks,
                                       cases[i].rank, cases[i].n_threads, &b),
                         DCP_OK);
        assert_int_equal(b.n, cases[i].n);
        for (int c = 0; c < b.n; c++) assert_int_equal(b.cpu[c], 2 * (cases[i].first + c));
    }
    /* A quota below the cores counts. */
    assert_int_equal(binding_share(BIND_AUTO, &cores, 2, 1, 0, 3, &b), DCP_OK);
    assert_int_equal(b.n, 0);
    assert_string_equal(b.text, "none: 1 rank x 3 threads, 2 cores to use");
    assert_int_equal(binding_share(BIND_CORES, &cores, 8, 2, 0, 5, &b), DCP_ERR_ARG);
    assert_non_null(strstr(dcp_last_error(), "--bind cores: 2 ranks x 5 threads, 8 cores to use"));
    cores.n = 0;
    assert_int_equal(binding_share(BIND_AUTO, &cores, 8, 1, 0, 2, &b), DCP_OK);
    assert_string_equal(b.text, "none: the cores are not known");
    assert_int_equal(binding_share(BIND_CORES, &cores, 8, 1, 0, 2, &b), DCP_ERR_ARG);
}

static void check_machine(const int *node_cores, int n_nodes, int n_ranks, int n_threads, int mode)
{
    static int owner[2 * TOPOLOGY_MAX_CORES];
    machine(node_cores, n_nodes);
    memset(owner, -1, sizeof(owner));
    int n_within = 0;
    for (int r = 0; r < n_ranks; r++) {
        assert_int_equal(
            binding_share((enum bind_mode)mode, &cores, cores.n, n_ranks, r, n_threads, &b),
            DCP_OK);
        assert_true(mode == BIND_CORES ? b.n == n_threads : b.n >= n_threads);
        for (int c = 0; c < b.n; c++) {
            assert_int_equal(owner[b.cpu[c]], -1);
            owner[b.cpu[c]] = r;
        }
        n_within += cores.node[b.cpu[0] / 2] == cores.node[b.cpu[b.n - 1] / 2];
    }
    if (mode == BIND_AUTO)
        for (int i = 0; i < cores.n; i++) assert_true(owner[2 * i] >= 0);
    /* Even nodes with room for the ranks that each gets. */
    const int per_node = (n_ranks + n_nodes - 1) / n_nodes;
    if (n_ranks >= n_nodes && per_node * n_threads <= node_cores[0] &&
        node_cores[0] == node_cores[n_nodes - 1] && node_cores[0] == node_cores[n_nodes / 2])
        assert_int_equal(n_within, n_ranks);
}

static void test_properties(void **state)
{
    (void)state;
    static const int machines[][4] = {{1}, {2}, {7}, {4, 4}, {10, 10}, {3, 5, 1}, {8, 8, 8, 8}};
    static const int n_nodes[] = {1, 1, 1, 2, 2, 3, 4};
    for (int m = 0; m < 7; m++) {
        int n_cores = 0;
        for (int k = 0; k < n_nodes[m]; k++) n_cores += machines[m][k];
        for (int r = 1; r <= n_cores; r++)
            for (int t = 1; r * t <= n_cores; t++)
                for (int mode = BIND_AUTO; mode <= BIND_CORES; mode += 2)
                    check_machine(machines[m], n_nodes[m], r, t, mode);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_properties),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
