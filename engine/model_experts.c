/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of a mixture of experts: a rank has its rows of every expert, so that all ranks work on
 * whichever experts a token chooses, and a sum is whole on one rank as it is in a dense layer. */
#include <stdio.h>

#include "base/status_priv.h"
#include "engine/model_priv.h"

/* rows of each of n matrices (n_rows, k). */
static dcp_status load_rows(struct loader *l, const char *prefix, const char *tensor, int64_t k,
                            int64_t n_rows, int64_t n, dcp_range rows, struct weight *w)
{
    char name[96];
    snprintf(name, sizeof(name), "%s%s", prefix, tensor);
    const struct gguf_tensor *t = loader_find(l, name);
    if (t == NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: has no tensor %s", gguf_path(l->file), name);
    DCP_TRY(loader_check_shape(l, t, k, n_rows, n));
    const size_t n_bytes = (size_t)(rows.end - rows.begin) * t->row_bytes;
    unsigned char *dst = loader_reserve(l, (size_t)n * n_bytes);
    *w = (struct weight){t->qtype, n * (rows.end - rows.begin), k, t->row_bytes, dst};
    if (dst == NULL) return DCP_OK;
    loader_account(l, tensor, SPLIT_ROWS, (size_t)n * n_bytes);
    for (int64_t i = 0; i < n && n_bytes > 0; i++)
        DCP_TRY(gguf_read(l->file, t, (size_t)(i * n_rows + rows.begin) * t->row_bytes, n_bytes,
                          dst + (size_t)i * n_bytes));
    return DCP_OK;
}

dcp_status loader_experts(struct loader *l, const char *prefix, struct layer *layer)
{
    const struct model *m = l->m;
    const struct moe_config *e = &m->cfg.moe;
    const int64_t d = m->cfg.d_model, n = e->n_experts;
    DCP_TRY(load_rows(l, prefix, "ffn_gate_inp.weight", d, n, 1, m->experts, &layer->router));
    DCP_TRY(load_rows(l, prefix, "ffn_gate_exps.weight", d, e->d_expert, n, m->d_expert,
                      &layer->gate_exps));
    DCP_TRY(load_rows(l, prefix, "ffn_up_exps.weight", d, e->d_expert, n, m->d_expert,
                      &layer->up_exps));
    DCP_TRY(load_rows(l, prefix, "ffn_down_exps.weight", e->d_expert, d, n, m->cols,
                      &layer->down_exps));
    if (e->d_shared == 0) return DCP_OK;
    DCP_TRY(load_rows(l, prefix, "ffn_gate_shexp.weight", d, e->d_shared, 1, m->d_shared,
                      &layer->gate_shexp));
    DCP_TRY(load_rows(l, prefix, "ffn_up_shexp.weight", d, e->d_shared, 1, m->d_shared,
                      &layer->up_shexp));
    return load_rows(l, prefix, "ffn_down_shexp.weight", e->d_shared, d, 1, m->cols,
                     &layer->down_shexp);
}
