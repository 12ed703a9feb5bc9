/* SPDX-License-Identifier: Apache-2.0 */
/* The contract under mpirun: on the world, on a part of it, and a late rank. Built once per MPI. */
#include <time.h>

#include "dcpattn/merge.h"
#include "dcpattn/mpi.h"
#include "group/contract.h"
#include "group/group_mpi_priv.h"
#include "group/mpi_calls.h"
#include "merge/merge_large.h"

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

/* Where messages go through MPI: a merge fails while some of them are open. What they may still
 * touch lives on, so that the next MPI calls find it. */
static void check_late_merge(int rank, int size)
{
    enum { T = 64, H = 8, D = 64 };
    char fault[32];
    snprintf(fault, sizeof(fault), "delay:merge:%d", size - 1);
    dcp_group_opts opts = DCP_GROUP_OPTS_INIT;
    opts.deadline_s = 2;
    dcp_group *g = NULL;
    setenv("DCP_ATTN_FAULT", fault, 1);
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, &opts, &g) == DCP_OK);
    unsetenv("DCP_ATTN_FAULT");
    if (g == NULL) return;
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = T;
    desc.n_heads = H;
    desc.dim = D;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.algo = DCP_MERGE_ALLTOALL;
    desc.workspace_limit_bytes = 64 << 10; /* several tiles */
    dcp_merge *merge = NULL;
    EXPECT(dcp_merge_create(g, &desc, &merge) == DCP_OK);
    void *mem = NULL;
    EXPECT(dcp_group_alloc(g, 1 << 20, &mem) == DCP_OK);
    float *out = calloc((size_t)T * H * D, sizeof(float));
    float *lse = calloc((size_t)T * H, sizeof(float));
    dcp_merge_args args = DCP_MERGE_ARGS_INIT;
    args.n_tokens = T;
    args.out = out;
    args.lse = lse;
    args.merged = mem;
    const dcp_status st = dcp_merge_run(merge, &args, NULL);
    EXPECT(rank == size - 1 ? st != DCP_OK : st == DCP_ERR_TIMEOUT);
    if (strstr(dcp_last_error(), "in exchange; unfinished") != NULL)
        EXPECT(strstr(dcp_last_error(), "may only be waiting for another") != NULL);
    dcp_merge_info info;
    dcp_merge_get_info(merge, &info);
    const size_t before = dcp__alloc_current();
    dcp_merge_destroy(merge);
    dcp_group_free(g, mem);
    EXPECT(before - dcp__alloc_current() < info.workspace_bytes / 2);
    dcp_group_destroy(g);
    free(lse);
    free(out);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* A message that MPI cannot count is refused when peers have begun theirs: no one waits for it. */
static void check_huge_message(int rank, int size)
{
    dcp_group *g = NULL;
    char byte = 0;
    EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &g) == DCP_OK);
    if (g == NULL) return;
    const struct dcp__xfer x = {
        .peer = (rank + 1) % size, .buf = &byte, .n_bytes = (size_t)1 << 31};
    EXPECT(dcp__group_exchange_start(g, 0, &x, 1, NULL, 0) == DCP_ERR_ARG);
    EXPECT(strstr(dcp_last_error(), "2147483648 bytes") != NULL);
    EXPECT(dcp_group_barrier(g) == DCP_ERR_POISONED);
    dcp_group_destroy(g);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* n messages of two pieces and a tail to the next rank, of as many datatypes. */
static void send_pieces(dcp_group *g, char *room, int first, int n)
{
    char got[48];
    for (int i = first; i < first + n; i++) {
        const struct dcp__xfer s = {.peer = (dcp_group_rank(g) + 1) % dcp_group_size(g),
                                    .buf = room + 64 * i,
                                    .n_bytes = 48,
                                    .piece_bytes = 16,
                                    .stride_bytes = 32,
                                    .tail_bytes = 16,
                                    .tail = room};
        const struct dcp__xfer r = {.peer = (dcp_group_rank(g) + dcp_group_size(g) - 1) %
                                            dcp_group_size(g),
                                    .buf = got,
                                    .n_bytes = 48};
        EXPECT(dcp__group_exchange_start(g, 0, &s, 1, &r, 1) == DCP_OK);
        EXPECT(dcp__group_exchange_wait(g, 0) == DCP_OK);
        EXPECT(got[0] == (char)i && got[47] == 'e');
    }
}

/* Datatypes are kept from call to call: all of them where they are few, still as many where there
 * is no room for all, and those of a new buffer after a while; none is left behind. */
static void check_kept_types(void)
{
    enum { MANY = TYPES_KEPT * 3 / 2, NEXT = TYPES_KEPT / 2 };
    dcp_group *g = NULL;
    EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &g) == DCP_OK);
    if (g == NULL) return;
    char *room = malloc(64 * (MANY + NEXT + 1));
    memset(room, 'e', 64 * (MANY + NEXT + 1));
    for (int i = 1; i < MANY + NEXT; i++) room[64 * i] = (char)i;
    const int made = mpi_calls.made, freed = mpi_calls.freed, n = mpi_calls.committed;
    for (int k = 0; k < 3; k++) send_pieces(g, room, 1, TYPES_KEPT);
    EXPECT(mpi_calls.committed - n == TYPES_KEPT);
    for (int k = 0; k < 3; k++) send_pieces(g, room, 1, MANY);
    EXPECT(mpi_calls.committed - n == TYPES_KEPT + 3 * (MANY - TYPES_KEPT));
    for (int k = 0; k <= TYPES_STALE / NEXT + 2; k++) send_pieces(g, room, MANY, NEXT);
    const int before = mpi_calls.committed;
    send_pieces(g, room, MANY, NEXT);
    EXPECT(mpi_calls.committed == before);
    dcp_group_destroy(g);
    EXPECT(mpi_calls.made > made && mpi_calls.made - made == mpi_calls.freed - freed);
    free(room);
}

/* Where the program's handlers of calls without a communicator return, a datatype that MPI cannot
 * make is an error like any other. */
static void check_no_type(int rank, int size)
{
    MPI_Errhandler of_world, of_self;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &of_world);
    MPI_Comm_get_errhandler(MPI_COMM_SELF, &of_self);
    for (int how = 1; how <= 3; how++) {
        dcp_group *g = NULL;
        EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &g) == DCP_OK);
        if (g == NULL) return;
        char room[64] = "";
        const struct dcp__xfer s = {.peer = (rank + 1) % size,
                                    .buf = room,
                                    .n_bytes = 40,
                                    .piece_bytes = 8,
                                    .stride_bytes = 16,
                                    .tail_bytes = 16,
                                    .tail = room};
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
        mpi_calls.breaks = how;
        const int n_live = mpi_calls.made - mpi_calls.freed;
        EXPECT(dcp__group_exchange_start(g, 0, &s, 1, NULL, 0) == DCP_ERR_SYS);
        EXPECT(strstr(dcp_last_error(), "a datatype could not be made in exchange: ") != NULL);
        EXPECT(mpi_calls.made - mpi_calls.freed == n_live);
        mpi_calls.breaks = 0;
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, of_world);
        MPI_Comm_set_errhandler(MPI_COMM_SELF, of_self);
        EXPECT(dcp_group_barrier(g) == DCP_ERR_POISONED);
        dcp_group_destroy(g);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Errhandler_free(&of_world);
    MPI_Errhandler_free(&of_self);
}

/* What lies in group memory reaches MPI from there: some tokens as pieces that MPI gathers, one
 * token as one stretch, nothing of it packed. Of private memory all is packed. */
static void check_from_memory(dcp_group *g, const struct large_shape *s, bool is_split)
{
    const int rank = dcp_group_rank(g), n = dcp_group_size(g);
    const size_t room = sizeof(float) * (size_t)(s->t * LARGE_H * s->dim);
    float lse[LARGE_T_MAX * LARGE_H], merged_lse[LARGE_T_MAX * LARGE_H];
    void *shared = NULL;
    float *own = malloc(room), *merged = malloc(room);
    dcp_merge_desc desc = DCP_MERGE_DESC_INIT;
    desc.max_tokens = s->t;
    desc.n_heads = LARGE_H;
    desc.dim = s->dim;
    desc.lse_base = DCP_LSE_BASE_E;
    desc.algo = DCP_MERGE_ALLTOALL;
    dcp_merge_cost cost;
    EXPECT(dcp_merge_plan(&desc, n, rank, 1, s->t, &cost) == DCP_OK);
    EXPECT(dcp_group_alloc(g, room, &shared) == DCP_OK);
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        float *out = is_shared ? shared : own;
        large_fill(s, rank, s->dim, false, out, lse);
        mpi_calls.own = (const char *)out;
        mpi_calls.own_bytes = room;
        mpi_calls.small_bytes = 4096;
        mpi_calls.gathered = mpi_calls.in_place = mpi_calls.packed = 0;
        n_bad += large_run(s, g, DCP_MERGE_ALLTOALL, DCP_CUT_HEADS, out, s->dim, lse, merged,
                           merged_lse);
        const int n_large = (int)cost.n_steps * (n - 1);
        EXPECT(mpi_calls.gathered == (is_shared && !is_split ? n_large : 0));
        EXPECT(mpi_calls.in_place == (is_shared && is_split ? n_large : 0));
        EXPECT(mpi_calls.packed == (is_shared ? 0 : n_large));
        mpi_calls.own = NULL;
    }
    dcp_group_free(g, shared);
    free(merged);
    free(own);
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
    bool is_wire = false;
    for (int k = 0; k < 3; k++) {
        EXPECT(dcp_group_create_mpi(MPI_COMM_WORLD, NULL, &g) == DCP_OK);
        EXPECT(dcp_group_rank(g) == rank && dcp_group_size(g) == size);
        EXPECT(strcmp(dcp_group_kind(g), "mpi") == 0);
        is_wire = size > 1 && dcp_group_n_hosts(g) == size;
        if (k == 0) n_bad += contract_run(g);
        if (k == 1) check_split(g);
        if (k == 2) n_bad += large_check(g, NULL);
        if (k == 2 && is_wire && size <= LARGE_H / 2) {
            check_from_memory(g, &(struct large_shape){LARGE_T_MAX, 1024}, false);
            check_from_memory(g, &(struct large_shape){3, 8192}, true);
        }
        EXPECT(dcp_group_barrier(g) == DCP_OK);
        dcp_group_destroy(g);
    }
    EXPECT(dcp__alloc_current() == before);

    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
    EXPECT(dcp_group_create_mpi(part, NULL, &g) == DCP_OK);
    n_bad += contract_records(g);
    n_bad += contract_exchange(g);
    n_bad += contract_pieces(g);
    dcp_group_destroy(g);
    MPI_Comm_free(&part);

    if (is_wire) check_kept_types();
    if (is_wire) check_no_type(rank, size);
    if (size > 1) check_late(rank, size);
    if (is_wire) check_huge_message(rank, size);
    if (is_wire) check_late_merge(rank, size);
    if (size > 1) check_late_create(rank, size);
    int all_bad = 0;
    MPI_Allreduce(&n_bad, &all_bad, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks: %d failures\n", size, all_bad);
    MPI_Finalize();
    return all_bad != 0;
}
