/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks are MPI processes: the same calls as with threads. Partials in memory of dcp_group_alloc
 * are read in place by the ranks of the same host; any other memory works, too. Between start and
 * wait this rank has time for something else.
 *
 *   cc merge_mpi.c $(pkg-config --cflags --libs dcpattn-openmpi) -lm
 *   mpirun.openmpi -n 4 ./a.out [algo]            with dcpattn-mpich: mpirun.mpich */
#include <dcpattn/dcpattn.h>
#include <dcpattn/mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 32, HEADS = 12, DIM = 64 };

static void check(dcp_status st, const char *what)
{
    if (st == DCP_OK) return;
    fprintf(stderr, "%s: %s\n", what, dcp_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1); /* the program may, the library never does */
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    dcp_group *group = NULL;
    check(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &group), "group");
    const int rank = dcp_group_rank(group);
    const int n = dcp_group_size(group);

    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = TOKENS;
    desc.n_heads = HEADS;
    desc.dim = DIM;
    desc.lse_base = DCP_LSE_BASE_2;
    desc.order = DCP_MERGE_ORDER_ANY;
    if (argc > 1 && !dcp_merge_algo_parse(argv[1], &desc.algo)) {
        fprintf(stderr, "no algorithm %s\n", argv[1]);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    dcp_merge *merge = NULL;
    check(dcp_merge_create(group, &desc, &merge), "create");
    dcp_merge_info info;
    dcp_merge_get_info(merge, &info);
    if (rank == 0)
        printf("%s (%s), order %s, %zu bytes of workspace\n", info.algo_name, info.why, info.order,
               info.workspace_bytes);

    void *memory = NULL;
    const size_t n_elems = (size_t)TOKENS * HEADS * DIM;
    check(dcp_group_alloc(group, n_elems * sizeof(float), &memory), "alloc");
    float *out = memory;
    float *lse = malloc((size_t)TOKENS * HEADS * sizeof(*lse));
    float *merged = malloc(n_elems * sizeof(*merged));
    if (lse == NULL || merged == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < n_elems; i++) out[i] = (float)rank;
    for (size_t i = 0; i < (size_t)TOKENS * HEADS; i++) lse[i] = (float)rank; /* weight 2^rank */

    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = TOKENS;
    args.out = out;
    args.lse = lse;
    args.merged = merged;
    check(dcp_merge_start(merge, &args), "start");
    int is_done = 0;
    while (is_done == 0) { /* ... or do something useful here, and test now and then */
        check(dcp_merge_test(merge, &is_done, NULL), "test");
    }

    double want = 0;
    double whole = 0;
    for (int r = 0; r < n; r++) {
        want += r * exp2(r);
        whole += exp2(r);
    }
    const dcp_range own = dcp_cut_range(HEADS, n, rank);
    int rc = 0;
    for (int64_t i = 0; i < TOKENS * (own.end - own.begin) * DIM; i++) {
        if (fabs((double)merged[i] - want / whole) > 1e-5) rc = 1;
    }
    if (rc != 0) fprintf(stderr, "rank %d: wrong result\n", rank);
    int worst = 0; /* of all ranks: one of them says so for all */
    MPI_Allreduce(&rc, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0 && worst == 0)
        printf("ok: %d ranks merged over MPI, each value is %g\n", n, want / whole);
    dcp_merge_destroy(merge);
    dcp_group_free(group, memory);
    dcp_group_destroy(group);
    free(lse);
    free(merged);
    MPI_Finalize();
    return rc;
}
