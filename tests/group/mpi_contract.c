/* SPDX-License-Identifier: Apache-2.0 */
/* The contract under mpirun: on the world, on a part of it, and a late rank. Built once per MPI. */
#include <time.h>

#include "dcpattn/mpi.h"
#include "group/contract.h"

static int n_bad;

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            n_bad++;                                                                               \
            fprintf(stderr, "%s:%d: not true: %s [%s]\n", __FILE__, __LINE__, #cond,               \
                    dcp_last_error());                                                             \
        }                                                                                          \
    } while (0)

static void sleep_s(double s)
{
    const struct timespec ts = {.tv_sec = (time_t)s,
                                .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&ts, NULL);
}

/* Sub-groups by dcp_group_split: both ways, by host and its first ranks. */
static void check_split(dcp_group *g)
{
    const int n = dcp_group_size(g), rank = dcp_group_rank(g);
    dcp_group *sub = NULL;
    EXPECT(dcp_group_split(g, rank % 2, -rank, &sub) == DCP_OK);
    EXPECT(strcmp(dcp_group_kind(sub), "mpi") == 0);
    EXPECT(dcp_group_size(sub) == (n + 1 - rank % 2) / 2);
    EXPECT(dcp_group_rank(sub) == dcp_group_size(sub) - 1 - rank / 2);
    n_bad += contract_run_beside(sub);
    dcp_group_destroy(sub);
    EXPECT(dcp_group_split(g, dcp_group_host(g, rank), rank, &sub) == DCP_OK);
    EXPECT(dcp_group_n_hosts(sub) == 1);
    n_bad += contract_alloc(sub);
    const int in_host = dcp_group_rank(sub);
    dcp_group_destroy(sub);
    EXPECT(dcp_group_split(g, in_host == 0 ? 0 : -1, rank, &sub) == DCP_OK);
    EXPECT((sub != NULL) == (in_host == 0));
    if (sub != NULL) {
        EXPECT(dcp_group_size(sub) == dcp_group_n_hosts(g));
        EXPECT(dcp_group_n_hosts(sub) == dcp_group_n_hosts(g));
        n_bad += contract_exchange(sub);
    }
    dcp_group_destroy(sub);
    EXPECT(dcp_group_barrier(g) == DCP_OK);
}

/* Who does not call create in time: an error instead of a hang. In a communicator of its own, which
 * is never used again. */
static void check_late_create(int rank, int size)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 0.5;
    dcp_group *g = NULL;
    MPI_Comm all;
    MPI_Comm_dup(MPI_COMM_WORLD, &all);
    if (rank != size - 1) {
        EXPECT(dcp_group_create_mpi(all, &opts, &g) == DCP_ERR_TIMEOUT);
        EXPECT(g == NULL);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/* A rank that comes late: TIMEOUT where it was waited for, then the group stays poisoned. */
static void check_late(int rank, int size)
{
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 3; /* of create too, on a machine that may be loaded */
    dcp_group *g = NULL;
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, &opts, &g) == DCP_OK);
    if (g == NULL) return;
    EXPECT(dcp_group_barrier(g) == DCP_OK);
    if (rank == size - 1) {
        sleep_s(5);
    } else {
        EXPECT(dcp_group_barrier(g) == DCP_ERR_TIMEOUT);
        char want[64];
        snprintf(want, sizeof(want), "did not arrive: rank %d", size - 1);
        EXPECT(strstr(dcp_last_error(), want) != NULL);
        EXPECT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    }
    dcp_group_destroy(g);
    MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);

    dcp_group *g = NULL;
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = rank == 0 ? -1 : 5;
    EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, &opts, &g) ==
           (rank == 0 ? DCP_ERR_ARG : DCP_ERR_PEER));
    EXPECT(g == NULL);

    const size_t before = dcp__alloc_current();
    for (int k = 0; k < 3; k++) {
        EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &g) == DCP_OK);
        EXPECT(dcp_group_rank(g) == rank && dcp_group_size(g) == size);
        EXPECT(strcmp(dcp_group_kind(g), "mpi") == 0);
        if (k == 0) n_bad += contract_run(g);
        if (k == 1) check_split(g);
        EXPECT(dcp_group_barrier(g) == DCP_OK);
        dcp_group_destroy(g);
    }
    EXPECT(dcp__alloc_current() == before);

    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
    EXPECT(dcp_group_create_mpi(part, NULL, &g) == DCP_OK);
    n_bad += contract_records(g);
    n_bad += contract_exchange(g);
    dcp_group_destroy(g);
    MPI_Comm_free(&part);

    if (size > 1) check_late(rank, size);
    if (size > 1) check_late_create(rank, size);
    int all_bad = 0;
    MPI_Allreduce(&n_bad, &all_bad, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks: %d failures\n", size, all_bad);
    MPI_Finalize();
    return all_bad != 0;
}
