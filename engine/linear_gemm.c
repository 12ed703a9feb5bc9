/* SPDX-License-Identifier: Apache-2.0 */
/* The one file that sees oneDNN.
 *
 * f32 goes through dnnl_sgemm: it takes any shape and stride without an object to prepare, and is
 * what the matmul primitive runs underneath for such shapes ("gemm:jit", same speed measured).
 * bf16 has no such public call: matmul primitives, made once for the few shapes that linear.c cuts
 * its products into; their scratch belongs to the thread that runs them, so that one primitive
 * serves all threads at once.
 *
 * oneDNN's Debian build spreads each call over OpenMP threads. How many is a property of the
 * calling thread, so each of ours sets it to 1 around its calls and puts it back. The two OpenMP
 * functions are looked up at run time: whichever OpenMP library oneDNN brought is the one that
 * counts, and a oneDNN built without one needs nothing. */
#include "engine/linear_gemm.h"

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <string.h>

#include "base/alloc_priv.h"

enum { N_ARGS = 4, SRC = 0, WEIGHTS = 1, DST = 2, SCRATCH = 3 };

struct gemm_plan {
    struct gemm_shape shape;
    dnnl_primitive_t primitive;
    size_t scratch_bytes;
    dnnl_memory_t *memory; /* [n_threads][N_ARGS] */
    void *scratch;         /* [n_threads][scratch_bytes] */
};

struct gemm {
    int n_threads;
    void (*set_threads)(int); /* NULL: oneDNN has no OpenMP */
    int (*max_threads)(void);
    dnnl_engine_t engine;
    dnnl_stream_t *streams; /* [n_threads] */
    int n_plans;
    struct gemm_plan plans[GEMM_MAX_PLANS];
};

static dcp_status check(dnnl_status_t st, const char *what)
{
    if (st == dnnl_success) return DCP_OK;
    const dcp_status code = st == dnnl_out_of_memory   ? DCP_ERR_NOMEM
                            : st == dnnl_unimplemented ? DCP_ERR_NOT_SUPPORTED
                                                       : DCP_ERR_SYS;
    return dcp__fail(code, "oneDNN %s: status %d", what, (int)st);
}

static void drop_plan(struct gemm *g, struct gemm_plan *plan)
{
    if (plan->memory != NULL)
        for (int i = 0; i < g->n_threads * N_ARGS; i++)
            if (plan->memory[i] != NULL) (void)dnnl_memory_destroy(plan->memory[i]);
    if (plan->primitive != NULL) (void)dnnl_primitive_destroy(plan->primitive);
    dcp__free(plan->memory);
    dcp__free(plan->scratch);
    memset(plan, 0, sizeof(*plan));
}

void gemm_destroy(struct gemm *g)
{
    if (g == NULL) return;
    for (int i = 0; i < g->n_plans; i++) drop_plan(g, &g->plans[i]);
    if (g->streams != NULL)
        for (int i = 0; i < g->n_threads; i++)
            if (g->streams[i] != NULL) (void)dnnl_stream_destroy(g->streams[i]);
    dcp__free(g->streams);
    if (g->engine != NULL) (void)dnnl_engine_destroy(g->engine);
    dcp__free(g);
}

/* POSIX gives functions as void *; C wants the bytes copied. */
static void look_up(const char *name, void *fn_out)
{
    void *at = dlsym(RTLD_DEFAULT, name);
    memcpy(fn_out, &at, sizeof(at));
}

static dcp_status create_bf16(struct gemm *g)
{
    DCP_TRY(check(dnnl_engine_create(&g->engine, dnnl_cpu, 0), "engine_create"));
    void *p = NULL;
    DCP_TRY(dcp__alloc_array((size_t)g->n_threads, sizeof(dnnl_stream_t), "oneDNN streams", &p));
    g->streams = p;
    for (int i = 0; i < g->n_threads; i++)
        DCP_TRY(check(dnnl_stream_create(&g->streams[i], g->engine, dnnl_stream_default_flags),
                      "stream_create"));
    /* Whether this CPU has bf16 products at all is known once one is made. */
    const struct gemm_shape probe = {16, 16, 32, 32, 32, 16};
    struct gemm_plan *plan;
    return gemm_plan(g, &probe, &plan);
}

dcp_status gemm_create(int n_threads, bool bf16, struct gemm **gemm_out)
{
    void *p = NULL;
    DCP_TRY(dcp__alloc(sizeof(struct gemm), "dense products", &p));
    struct gemm *g = p;
    g->n_threads = n_threads;
    look_up("omp_set_num_threads", &g->set_threads);
    look_up("omp_get_max_threads", &g->max_threads);
    if (g->max_threads == NULL) g->set_threads = NULL;
    if (bf16) {
        const dcp_status st = create_bf16(g);
        if (st != DCP_OK) {
            gemm_destroy(g);
            return st;
        }
    }
    *gemm_out = g;
    return DCP_OK;
}

static dcp_status describe(dnnl_memory_desc_t *md, dnnl_data_type_t type, int64_t rows,
                           int64_t cols, int64_t row_stride, int64_t col_stride)
{
    const dnnl_dims_t dims = {rows, cols}, strides = {row_stride, col_stride};
    return check(dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides), "memory_desc");
}

static dcp_status make_primitive(struct gemm *g, struct gemm_plan *plan,
                                 const dnnl_memory_desc_t md[3], dnnl_memory_desc_t *scratch_out)
{
    dnnl_matmul_desc_t desc;
    DCP_TRY(check(dnnl_matmul_desc_init(&desc, &md[SRC], &md[WEIGHTS], NULL, &md[DST]),
                  "matmul_desc_init"));
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    dcp_status st = check(dnnl_primitive_attr_create(&attr), "primitive_attr_create");
    if (st == DCP_OK)
        st = check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user),
                   "set_scratchpad_mode");
    if (st == DCP_OK)
        st = check(dnnl_primitive_desc_create(&pd, &desc, attr, g->engine, NULL),
                   "bf16 matmul primitive_desc_create");
    if (st == DCP_OK) {
        *scratch_out = *dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
        st = check(dnnl_primitive_create(&plan->primitive, pd), "bf16 matmul primitive_create");
    }
    if (pd != NULL) (void)dnnl_primitive_desc_destroy(pd);
    if (attr != NULL) (void)dnnl_primitive_attr_destroy(attr);
    return st;
}

static dcp_status make_plan(struct gemm *g, struct gemm_plan *plan)
{
    const struct gemm_shape *s = &plan->shape;
    dnnl_memory_desc_t md[N_ARGS];
    DCP_TRY(describe(&md[SRC], dnnl_bf16, s->n_tokens, s->k, s->x_stride, 1));
    DCP_TRY(describe(&md[WEIGHTS], dnnl_bf16, s->k, s->n_rows, 1, s->w_stride));
    DCP_TRY(describe(&md[DST], dnnl_f32, s->n_tokens, s->n_rows, s->y_stride, 1));
    DCP_TRY(make_primitive(g, plan, md, &md[SCRATCH]));
    plan->scratch_bytes = (dnnl_memory_desc_get_size(&md[SCRATCH]) + 63) / 64 * 64;
    DCP_TRY(dcp__alloc_array((size_t)g->n_threads, plan->scratch_bytes, "oneDNN scratch",
                             &plan->scratch));
    void *p = NULL;
    DCP_TRY(dcp__alloc_array((size_t)g->n_threads * N_ARGS, sizeof(dnnl_memory_t),
                             "oneDNN arguments", &p));
    plan->memory = p;
    for (int i = 0; i < g->n_threads * N_ARGS; i++) {
        void *at = NULL;
        if (i % N_ARGS == SCRATCH)
            at = (char *)plan->scratch + (size_t)(i / N_ARGS) * plan->scratch_bytes;
        DCP_TRY(check(dnnl_memory_create(&plan->memory[i], &md[i % N_ARGS], g->engine, at),
                      "memory_create"));
    }
    return DCP_OK;
}

dcp_status gemm_plan(struct gemm *g, const struct gemm_shape *shape, struct gemm_plan **plan_out)
{
    for (int i = 0; i < g->n_plans; i++) {
        if (memcmp(&g->plans[i].shape, shape, sizeof(*shape)) != 0) continue;
        *plan_out = &g->plans[i];
        return DCP_OK;
    }
    if (g->n_plans == GEMM_MAX_PLANS)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "more than %d shapes of bf16 products",
                         (int)GEMM_MAX_PLANS);
    struct gemm_plan *plan = &g->plans[g->n_plans];
    plan->shape = *shape;
    const int token = gemm_enter(g);
    const dcp_status st = make_plan(g, plan);
    gemm_leave(g, token);
    if (st != DCP_OK) {
        drop_plan(g, plan);
        return st;
    }
    g->n_plans++;
    *plan_out = plan;
    return DCP_OK;
}

int gemm_n_plans(const struct gemm *g)
{
    return g->n_plans;
}

int gemm_enter(const struct gemm *g)
{
    if (g->set_threads == NULL) return 0;
    const int n_threads = g->max_threads();
    if (n_threads != 1) g->set_threads(1);
    return n_threads;
}

void gemm_leave(const struct gemm *g, int token)
{
    if (g->set_threads != NULL && token != 1) g->set_threads(token);
}

int gemm_f32(const struct gemm_shape *shape, const float *x, const float *w, float *y)
{
    return (int)dnnl_sgemm('N', 'T', shape->n_tokens, shape->n_rows, shape->k, 1.0f, x,
                           shape->x_stride, w, shape->w_stride, 0.0f, y, shape->y_stride);
}

int gemm_bf16(struct gemm *g, struct gemm_plan *plan, int thread, const uint16_t *x,
              const uint16_t *w, float *y)
{
    dnnl_memory_t *m = plan->memory + (ptrdiff_t)thread * N_ARGS;
    /* oneDNN takes its inputs as void *; it does not write them. */
    void *at[3] = {NULL, NULL, y};
    memcpy(&at[SRC], &x, sizeof(x));
    memcpy(&at[WEIGHTS], &w, sizeof(w));
    for (int i = SRC; i <= DST; i++) {
        const dnnl_status_t st = dnnl_memory_set_data_handle(m[i], at[i]);
        if (st != dnnl_success) return (int)st;
    }
    const dnnl_exec_arg_t args[N_ARGS] = {{DNNL_ARG_SRC, m[SRC]},
                                          {DNNL_ARG_WEIGHTS, m[WEIGHTS]},
                                          {DNNL_ARG_DST, m[DST]},
                                          {DNNL_ARG_SCRATCHPAD, m[SCRATCH]}};
    return (int)dnnl_primitive_execute(plan->primitive, g->streams[thread], N_ARGS, args);
}
