/* SPDX-License-Identifier: Apache-2.0 */
/* Gemma 3. Embeddings scaled by sqrt(d); q and k normed per head; norms after attention and FFN as
 * well as before; every sixth layer sees everything, the others a window with a rope base of their
 * own; GELU gate. The converters have added the 1 of "1 + w" to the norms. */
#include <math.h>

#include "base/status_priv.h"
#include "engine/forward.h"

enum { GLOBAL_ROPE = 0, LOCAL_ROPE = 1, LAYERS_OF_27B = 62 };

static dcp_status configure(const struct gguf *file, struct model_config *cfg)
{
    static const char name[] = "gemma3";
    DCP_TRY(config_common(file, name, cfg));
    cfg->activation = ACT_GELU_TANH;
    cfg->rope_pairs = ROPE_HALVES;
    cfg->embed_scale = (float)sqrt((double)cfg->d_model);

    double softcap = 0;
    DCP_TRY(config_f64(file, name, "final_logit_softcapping", 0.0, &softcap));
    cfg->logit_softcap = (float)softcap;
    DCP_TRY(config_f64(file, name, "attn_logit_softcapping", 0.0, &softcap));
    cfg->attn_softcap = (float)softcap;
    /* The 27B model scales by its width per head instead of the key length. */
    if (cfg->n_layers == LAYERS_OF_27B)
        cfg->attn_scale = (float)(1.0 / sqrt((double)cfg->d_model / (double)cfg->n_heads));
    double scale = 0;
    DCP_TRY(config_f64(file, name, "attention.scale", (double)cfg->attn_scale, &scale));
    if (scale > 0) cfg->attn_scale = (float)scale;

    /* Local layers: base 10,000 and no scaling, whatever the global ones have. */
    cfg->n_ropes = 2;
    cfg->ropes[LOCAL_ROPE] = (struct rope_config){.base = 10000.0, .factor = 1.0};
    DCP_TRY(config_f64(file, name, "rope.freq_base_swa", 10000.0, &cfg->ropes[LOCAL_ROPE].base));
    if (!(cfg->ropes[LOCAL_ROPE].base > 0)) cfg->ropes[LOCAL_ROPE].base = 10000.0;
    int64_t window = 0, pattern = 0;
    DCP_TRY(config_int(file, name, "attention.sliding_window", 0, 0, INT64_MAX, &window));
    DCP_TRY(config_int(file, name, "attention.sliding_window_pattern", 6, 1, MAX_LAYERS, &pattern));
    for (int64_t l = 0; l < cfg->n_layers; l++) {
        const bool is_local = (l + 1) % pattern != 0;
        cfg->layers[l].window = is_local ? window : 0;
        cfg->layers[l].rope = is_local ? LOCAL_ROPE : GLOBAL_ROPE;
    }
    return DCP_OK;
}

#define AT(field) offsetof(struct layer, field)
static const struct tensor_spec tensors[] = {
    {"attn_norm.weight", AT(attn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"attn_q.weight", AT(wq), DIM_Q, DIM_MODEL, SPLIT_HEADS, false},
    {"attn_k.weight", AT(wk), DIM_K, DIM_MODEL, SPLIT_KV_HEADS, false},
    {"attn_v.weight", AT(wv), DIM_V, DIM_MODEL, SPLIT_KV_HEADS, false},
    {"attn_q_norm.weight", AT(q_norm), DIM_ONE, DIM_KEY, SPLIT_NONE, false},
    {"attn_k_norm.weight", AT(k_norm), DIM_ONE, DIM_KEY, SPLIT_NONE, false},
    {"attn_output.weight", AT(wo), DIM_MODEL, DIM_O, SPLIT_ROWS, false},
    {"post_attention_norm.weight", AT(post_attn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"ffn_norm.weight", AT(ffn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"ffn_gate.weight", AT(gate), DIM_FFN, DIM_MODEL, SPLIT_ROWS, false},
    {"ffn_up.weight", AT(up), DIM_FFN, DIM_MODEL, SPLIT_ROWS, false},
    {"ffn_down.weight", AT(down), DIM_MODEL, DIM_FFN, SPLIT_ROWS, false},
    {"post_ffw_norm.weight", AT(post_ffn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
};

/* rope(norm(q)), rope(norm(k)) and v, from norm(x) */
static dcp_status before_attention(struct forward *f, int64_t l)
{
    forward_norm(f, f->model->layers[l].attn_norm);
    DCP_TRY(forward_qkv(f, l));
    forward_qk_norm(f, l);
    forward_rope(f, l);
    return forward_store(f, l);
}

static dcp_status after_attention(struct forward *f, int64_t l)
{
    const struct layer *w = &f->model->layers[l];

    /* x += norm(wo(attention's result)) */
    DCP_TRY(forward_attn_out(f, l));
    forward_add(f, w->post_attn_norm);

    /* x += norm(down(gelu(gate) * up)), from norm(x) */
    forward_norm(f, w->ffn_norm);
    DCP_TRY(forward_ffn(f, l));
    forward_add(f, w->post_ffn_norm);
    return DCP_OK;
}

const struct arch arch_gemma3 = {"gemma3",         configure,
                                 tensors,          sizeof(tensors) / sizeof(tensors[0]),
                                 before_attention, after_attention};
