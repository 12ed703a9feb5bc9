/* SPDX-License-Identifier: Apache-2.0 */
/* Llama: SmolLM2, Llama 2 and 3, Mistral. Rotation of neighbouring pairs (the converters permute
 * the rows of q and k for it), SiLU gate; optionally biases, a sliding window, an output matrix of
 * its own. */
#include "base/status_priv.h"
#include "engine/forward.h"

static dcp_status configure(const struct gguf *file, struct model_config *cfg)
{
    DCP_TRY(config_common(file, "llama", cfg));
    cfg->activation = ACT_SILU;
    cfg->rope_pairs = ROPE_INTERLEAVED;
    int64_t window = 0;
    DCP_TRY(config_int(file, "llama", "attention.sliding_window", 0, 0, INT64_MAX, &window));
    for (int64_t l = 0; l < cfg->n_layers; l++) cfg->layers[l].window = window;
    return DCP_OK;
}

#define AT(field) offsetof(struct layer, field)
static const struct tensor_spec tensors[] = {
    {"attn_norm.weight", AT(attn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"attn_q.weight", AT(wq), DIM_Q, DIM_MODEL, SPLIT_HEADS, false},
    {"attn_k.weight", AT(wk), DIM_K, DIM_MODEL, SPLIT_KV_HEADS, false},
    {"attn_v.weight", AT(wv), DIM_V, DIM_MODEL, SPLIT_KV_HEADS, false},
    {"attn_q.bias", AT(bq), DIM_ONE, DIM_Q, SPLIT_HEADS, true},
    {"attn_k.bias", AT(bk), DIM_ONE, DIM_K, SPLIT_KV_HEADS, true},
    {"attn_v.bias", AT(bv), DIM_ONE, DIM_V, SPLIT_KV_HEADS, true},
    {"attn_output.weight", AT(wo), DIM_MODEL, DIM_O, SPLIT_ROWS, false},
    {"attn_output.bias", AT(bo), DIM_ONE, DIM_MODEL, SPLIT_ROWS, true},
    {"ffn_norm.weight", AT(ffn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"ffn_gate.weight", AT(gate), DIM_FFN, DIM_MODEL, SPLIT_ROWS, false},
    {"ffn_up.weight", AT(up), DIM_FFN, DIM_MODEL, SPLIT_ROWS, false},
    {"ffn_down.weight", AT(down), DIM_MODEL, DIM_FFN, SPLIT_ROWS, false},
};

/* rope(q), rope(k) and v, from norm(x) */
static dcp_status before_attention(struct forward *f, int64_t l)
{
    forward_norm(f, f->model->layers[l].attn_norm);
    DCP_TRY(forward_qkv(f, l));
    forward_rope(f, l);
    return forward_store(f, l);
}

static dcp_status after_attention(struct forward *f, int64_t l)
{
    const struct layer *w = &f->model->layers[l];

    /* x += wo(attention's result) */
    DCP_TRY(forward_attn_out(f, l));
    forward_add(f, NULL);

    /* x += down(silu(gate) * up), from norm(x) */
    forward_norm(f, w->ffn_norm);
    DCP_TRY(forward_ffn(f, l));
    forward_add(f, NULL);
    return DCP_OK;
}

const struct arch arch_llama = {"llama",          configure,
                                tensors,          sizeof(tensors) / sizeof(tensors[0]),
                                before_attention, after_attention};
