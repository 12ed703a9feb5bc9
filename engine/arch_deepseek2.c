/* SPDX-License-Identifier: Apache-2.0 */
/* DeepSeek V2 and V3, and models of their shape: multi-head latent attention (forward_mla.c), YaRN,
 * SiLU gate; behind the first dense layers mixtures of experts (forward_experts.c). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status_priv.h"
#include "engine/forward.h"

static const char name[] = "deepseek2";
enum { MAX_DIM = 1 << 16 };

static dcp_status key_is_int(const struct gguf *file, const char *key, int64_t fallback,
                             int64_t min, int64_t max, int64_t *value_out)
{
    return config_int(file, name, key, fallback, min, max, value_out);
}

/* Files of the first converters give a head's own lengths, later ones those of the latent cache
 * beside ..._mla keys for a head's own. */
static dcp_status read_heads(const struct gguf *file, struct model_config *cfg)
{
    struct mla_config *a = &cfg->mla;
    int64_t key_dim = 0;
    DCP_TRY(key_is_int(file, "attention.head_count", CONFIG_REQUIRED, 1, MAX_DIM, &cfg->n_heads));
    DCP_TRY(key_is_int(file, "attention.kv_lora_rank", CONFIG_REQUIRED, 1, MAX_DIM, &a->kv_rank));
    DCP_TRY(key_is_int(file, "attention.q_lora_rank", 0, 0, MAX_DIM, &a->q_rank));
    DCP_TRY(key_is_int(file, "rope.dimension_count", CONFIG_REQUIRED, 2, MAX_DIM, &a->rope_dim));
    DCP_TRY(key_is_int(file, "attention.key_length_mla", -1, 1, MAX_DIM, &key_dim));
    if (key_dim < 0)
        DCP_TRY(key_is_int(file, "attention.key_length", CONFIG_REQUIRED, 1, MAX_DIM, &key_dim));
    DCP_TRY(key_is_int(file, "attention.value_length_mla", -1, 1, MAX_DIM, &a->value_dim));
    if (a->value_dim < 0)
        DCP_TRY(
            key_is_int(file, "attention.value_length", CONFIG_REQUIRED, 1, MAX_DIM, &a->value_dim));
    if (a->rope_dim % 2 != 0 || key_dim <= a->rope_dim)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: a head's key has %lld elements, %lld of them rotate; that must be an "
                         "even number below the whole",
                         gguf_path(file), (long long)key_dim, (long long)a->rope_dim);
    a->nope_dim = key_dim - a->rope_dim;
    cfg->rope_dims = a->rope_dim;
    cfg->attn_scale = (float)(1.0 / sqrt((double)key_dim));
    return DCP_OK;
}

/* The pair whose wave turns n times within the original context. */
static double turning_pair(double n_turns, int64_t rope_dim, double base, double context)
{
    const double two_pi = 6.283185307179586;
    return (double)rope_dim * log(context / (n_turns * two_pi)) / (2.0 * log(base));
}

/* Positions beyond the original context: slow pairs are stretched, fast ones are not; all scores
 * grow by mscale^2 with mscale = 1 + 0.1 m ln(factor). The file has 0.1 m. The other factor of the
 * published models, on cos and sin, is 1 as their mscale and mscale_all_dim are equal. */
static dcp_status read_yarn(const struct gguf *file, struct model_config *cfg, double factor)
{
    struct rope_config *rope = &cfg->ropes[0];
    int64_t context = 0;
    double log_mul = 0, fast = 0, slow = 0, ext = 0;
    DCP_TRY(key_is_int(file, "rope.scaling.original_context_length", CONFIG_REQUIRED, 1,
                       INT64_C(1) << 40, &context));
    DCP_TRY(config_f64(file, name, "rope.scaling.yarn_log_multiplier", 0.0, &log_mul));
    DCP_TRY(config_f64(file, name, "rope.scaling.yarn_beta_fast", 32.0, &fast));
    DCP_TRY(config_f64(file, name, "rope.scaling.yarn_beta_slow", 1.0, &slow));
    DCP_TRY(config_f64(file, name, "rope.scaling.yarn_ext_factor", 1.0, &ext));
    if (!(factor >= 1.0) || !(fast > 0) || !(slow > 0) || !(rope->base > 1.0))
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: YaRN by %g with betas %g and %g and base %g; the first must be at "
                         "least 1, the betas above 0, the base above 1",
                         gguf_path(file), factor, fast, slow, rope->base);
    if (!(log_mul > 0) || ext != 1.0)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: YaRN with yarn_log_multiplier %g and yarn_ext_factor %g; supported "
                         "are multipliers above 0 and a factor of 1",
                         gguf_path(file), log_mul, ext);
    const double last = (double)(cfg->rope_dims - 1);
    rope->yarn_factor = factor;
    rope->yarn_low =
        fmax(floor(turning_pair(fast, cfg->rope_dims, rope->base, (double)context)), 0.0);
    rope->yarn_high =
        fmin(ceil(turning_pair(slow, cfg->rope_dims, rope->base, (double)context)), last);
    const double mscale = 1.0 + log_mul * log(factor);
    cfg->attn_scale = (float)((double)cfg->attn_scale * mscale * mscale);
    return DCP_OK;
}

static dcp_status read_rope(const struct gguf *file, struct model_config *cfg)
{
    struct rope_config *rope = &cfg->ropes[0];
    double factor = 1.0, attn_factor = 1.0, temperature = 0.0;
    const char *type = "none";
    bool found = false;
    cfg->n_ropes = 1;
    cfg->rope_pairs = ROPE_INTERLEAVED;
    DCP_TRY(config_f64(file, name, "rope.freq_base", 10000.0, &rope->base));
    DCP_TRY(gguf_get_str(file, "deepseek2.rope.scaling.type", &type, NULL, &found));
    if (!found) type = "none";
    DCP_TRY(config_f64(file, name, "rope.scaling.factor", 1.0, &factor));
    DCP_TRY(config_f64(file, name, "rope.scaling.attn_factor", 1.0, &attn_factor));
    DCP_TRY(config_f64(file, name, "attention.temperature_scale", 0.0, &temperature));
    if (attn_factor != 1.0 || temperature != 0.0)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: rope.scaling.attn_factor %g, attention.temperature_scale %g; "
                         "supported are 1 and 0",
                         gguf_path(file), attn_factor, temperature);
    if (!(rope->base > 0))
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s.rope.freq_base is 0", gguf_path(file), name);
    rope->factor = strcmp(type, "linear") == 0 && factor > 0 ? factor : 1.0;
    if (strcmp(type, "yarn") == 0) return read_yarn(file, cfg, factor);
    if (strcmp(type, "none") == 0 || strcmp(type, "linear") == 0) return DCP_OK;
    return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                     "%s: %s.rope.scaling.type is \"%.40s\"; supported are none, linear and yarn",
                     gguf_path(file), name, type);
}

static dcp_status read_gating(const struct gguf *file, struct moe_config *e)
{
    double scale = 1.0;
    int64_t gating = 0;
    bool norm = false, found = false;
    DCP_TRY(key_is_int(file, "expert_gating_func", MOE_SOFTMAX, 0, INT64_MAX, &gating));
    if (gating == 0) gating = MOE_SOFTMAX; /* old files */
    if (gating != MOE_SOFTMAX && gating != MOE_SIGMOID)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: %s.expert_gating_func is %lld; supported are 1 (softmax) and 2 "
                         "(sigmoid)",
                         gguf_path(file), name, (long long)gating);
    DCP_TRY(config_f64(file, name, "expert_weights_scale", 1.0, &scale));
    DCP_TRY(gguf_get_bool(file, "deepseek2.expert_weights_norm", &norm, &found));
    e->gating = (enum moe_gating)gating;
    e->normalises = found && norm;
    e->scale = scale != 0.0 ? (float)scale : 1.0f;
    return DCP_OK;
}

static dcp_status read_experts(const struct gguf *file, struct model_config *cfg)
{
    struct moe_config *e = &cfg->moe;
    int64_t n_shared = 0, n_dense = 0, n = 0;
    DCP_TRY(key_is_int(file, "expert_count", 0, 0, MAX_DIM, &n));
    DCP_TRY(key_is_int(file, "leading_dense_block_count", 0, 0, INT64_MAX, &n_dense));
    if (n == 0 || n_dense >= cfg->n_layers) return DCP_OK;
    e->n_experts = n;
    e->n_dense = n_dense;
    DCP_TRY(key_is_int(file, "expert_used_count", CONFIG_REQUIRED, 1, n, &e->n_used));
    DCP_TRY(
        key_is_int(file, "expert_feed_forward_length", CONFIG_REQUIRED, 1, 1 << 24, &e->d_expert));
    DCP_TRY(key_is_int(file, "expert_shared_count", 0, 0, 256, &n_shared));
    e->d_shared = n_shared * e->d_expert;
    DCP_TRY(key_is_int(file, "expert_group_count", 1, 0, n, &e->n_groups));
    if (e->n_groups == 0) e->n_groups = 1;
    DCP_TRY(key_is_int(file, "expert_group_used_count", e->n_groups, 0, n, &e->n_groups_used));
    DCP_TRY(read_gating(file, e));
    if (e->n_groups == 1) e->n_groups_used = 1;
    const bool fits = n % e->n_groups == 0 && e->n_groups_used >= 1 &&
                      e->n_groups_used <= e->n_groups &&
                      e->n_used <= n / e->n_groups * e->n_groups_used;
    if (!fits)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: %lld of %lld experts from %lld of %lld groups cannot be chosen",
                         gguf_path(file), (long long)e->n_used, (long long)n,
                         (long long)e->n_groups_used, (long long)e->n_groups);
    if (e->n_groups > 1 && e->gating == MOE_SOFTMAX)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: %lld groups of experts with softmax gating; groups run with sigmoid "
                         "gating only",
                         gguf_path(file), (long long)e->n_groups);
    return DCP_OK;
}

static dcp_status configure(const struct gguf *file, struct model_config *cfg)
{
    DCP_TRY(config_sizes(file, name, cfg));
    cfg->activation = ACT_SILU;
    DCP_TRY(read_heads(file, cfg));
    DCP_TRY(read_rope(file, cfg));
    DCP_TRY(read_experts(file, cfg));
    model_set_mla(cfg, MLA_ABSORBED);
    return DCP_OK;
}

#define AT(field) offsetof(struct layer, field)
static const struct tensor_spec tensors[] = {
    {"attn_norm.weight", AT(attn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"attn_q_a.weight", AT(q_a), DIM_MLA_QA, DIM_MODEL, SPLIT_ROWS, true},
    {"attn_q_a_norm.weight", AT(q_a_norm), DIM_ONE, DIM_MLA_QA, SPLIT_NONE, true},
    {"attn_q_b.weight", AT(wq), DIM_MLA_Q, DIM_MLA_Q_IN, SPLIT_HEADS, true},
    {"attn_q.weight", AT(wq), DIM_MLA_Q, DIM_MLA_Q_IN, SPLIT_HEADS, true},
    {"attn_kv_a_mqa.weight", AT(kv_a), DIM_MLA_KVA, DIM_MODEL, SPLIT_NONE, false},
    {"attn_kv_a_norm.weight", AT(kv_a_norm), DIM_ONE, DIM_MLA_KV, SPLIT_NONE, false},
    {"attn_output.weight", AT(wo), DIM_MODEL, DIM_O, SPLIT_ROWS, false},
    {"ffn_norm.weight", AT(ffn_norm), DIM_ONE, DIM_MODEL, SPLIT_NONE, false},
    {"exp_probs_b.bias", AT(router_bias), DIM_ONE, DIM_EXPERTS, SPLIT_NONE, true},
    {"ffn_gate.weight", AT(gate), DIM_FFN, DIM_MODEL, SPLIT_ROWS, true},
    {"ffn_up.weight", AT(up), DIM_FFN, DIM_MODEL, SPLIT_ROWS, true},
    {"ffn_down.weight", AT(down), DIM_MODEL, DIM_FFN, SPLIT_ROWS, true},
};

/* q and the latent, from norm(x). */
static dcp_status before_attention(struct forward *f, int64_t l)
{
    forward_norm(f, f->model->layers[l].attn_norm);
    return forward_mla(f, l);
}

/* x += wo(attention's result), then x += feed-forward of norm(x). */
static dcp_status after_attention(struct forward *f, int64_t l)
{
    const struct moe_config *e = &f->model->cfg.moe;
    DCP_TRY(forward_attn_out(f, l));
    forward_add(f, NULL);
    forward_norm(f, f->model->layers[l].ffn_norm);
    const bool is_dense = e->n_experts == 0 || l < e->n_dense;
    DCP_TRY(is_dense ? forward_ffn(f, l) : forward_experts(f, l));
    forward_add(f, NULL);
    return DCP_OK;
}

const struct arch arch_deepseek2 = {
    name,           configure, tensors, sizeof(tensors) / sizeof(tensors[0]), before_attention,
    after_attention};
