/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration from metadata: what architectures share, and the table of architectures. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status_priv.h"
#include "engine/model.h"

/* A new architecture: its file, and its line here. */
static const struct arch *const archs[] = {&arch_llama, &arch_gemma3, &arch_deepseek2};
enum { N_ARCHS = sizeof(archs) / sizeof(archs[0]), MAX_KEY = 128 };

dcp_status config_int(const struct gguf *file, const char *arch, const char *key, int64_t fallback,
                      int64_t min, int64_t max, int64_t *value_out)
{
    char full[MAX_KEY];
    snprintf(full, sizeof(full), "%s.%s", arch, key);
    int64_t value = 0;
    bool found = false;
    DCP_TRY(gguf_get_int(file, full, &value, &found));
    if (!found && fallback == CONFIG_REQUIRED)
        return dcp__fail(DCP_ERR_FORMAT, "%s: has no metadata key %s", gguf_path(file), full);
    if (found && (value < min || value > max))
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s is %lld, allowed are %lld to %lld",
                         gguf_path(file), full, (long long)value, (long long)min, (long long)max);
    *value_out = found ? value : fallback;
    return DCP_OK;
}

dcp_status config_f64(const struct gguf *file, const char *arch, const char *key, double fallback,
                      double *value_out)
{
    char full[MAX_KEY];
    snprintf(full, sizeof(full), "%s.%s", arch, key);
    double value = 0;
    bool found = false;
    DCP_TRY(gguf_get_f64(file, full, &value, &found));
    if (found && !(isfinite(value) && value >= 0))
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s is %g, must be finite and not negative",
                         gguf_path(file), full, value);
    *value_out = found ? value : fallback;
    return DCP_OK;
}

static dcp_status read_heads(const struct gguf *file, const char *arch, struct model_config *cfg)
{
    DCP_TRY(
        config_int(file, arch, "attention.head_count", CONFIG_REQUIRED, 1, 1 << 16, &cfg->n_heads));
    DCP_TRY(config_int(file, arch, "attention.head_count_kv", cfg->n_heads, 1, 1 << 16,
                       &cfg->n_kv_heads));
    if (cfg->n_heads % cfg->n_kv_heads != 0)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %lld query heads are no multiple of %lld KV heads",
                         gguf_path(file), (long long)cfg->n_heads, (long long)cfg->n_kv_heads);
    const bool divides = cfg->d_model % cfg->n_heads == 0;
    const int64_t fallback = divides ? cfg->d_model / cfg->n_heads : CONFIG_REQUIRED;
    DCP_TRY(config_int(file, arch, "attention.key_length", fallback, 1, 1 << 16, &cfg->key_dim));
    return config_int(file, arch, "attention.value_length",
                      fallback == CONFIG_REQUIRED ? cfg->key_dim : fallback, 1, 1 << 16,
                      &cfg->value_dim);
}

/* Linear scaling divides all positions; "llama3" scaling arrives as divisors per frequency in
 * rope_freqs.weight. Other kinds change more than that and are refused. */
static dcp_status read_rope(const struct gguf *file, const char *arch, struct model_config *cfg)
{
    DCP_TRY(config_int(file, arch, "rope.dimension_count", cfg->key_dim, 0, cfg->key_dim,
                       &cfg->rope_dims));
    if (cfg->rope_dims % 2 != 0)
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s.rope.dimension_count is odd: %lld",
                         gguf_path(file), arch, (long long)cfg->rope_dims);
    struct rope_config *rope = &cfg->ropes[0];
    cfg->n_ropes = 1;
    DCP_TRY(config_f64(file, arch, "rope.freq_base", 10000.0, &rope->base));

    char key[MAX_KEY];
    snprintf(key, sizeof(key), "%s.rope.scaling.type", arch);
    const char *type = "linear";
    bool found = false;
    DCP_TRY(gguf_get_str(file, key, &type, NULL, &found));
    if (!found) type = "linear"; /* an old file: the factor alone */
    if (strcmp(type, "linear") != 0 && strcmp(type, "none") != 0 && strcmp(type, "llama3") != 0)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: %s is \"%.40s\"; supported are none, linear and llama3",
                         gguf_path(file), key, type);
    double old = 1.0, factor = 1.0;
    DCP_TRY(config_f64(file, arch, "rope.scale_linear", 1.0, &old));
    DCP_TRY(config_f64(file, arch, "rope.scaling.factor", old, &factor));
    rope->factor = strcmp(type, "linear") == 0 && factor > 0 ? factor : 1.0;
    rope->has_freq_divisors = gguf_find(file, "rope_freqs.weight") != NULL;
    if (!(rope->base > 0))
        return dcp__fail(DCP_ERR_FORMAT, "%s: %s.rope.freq_base is 0", gguf_path(file), arch);
    return DCP_OK;
}

dcp_status config_sizes(const struct gguf *file, const char *arch, struct model_config *cfg)
{
    DCP_TRY(config_int(file, arch, "block_count", CONFIG_REQUIRED, 1, MAX_LAYERS, &cfg->n_layers));
    DCP_TRY(config_int(file, arch, "embedding_length", CONFIG_REQUIRED, 1, 1 << 24, &cfg->d_model));
    DCP_TRY(
        config_int(file, arch, "feed_forward_length", CONFIG_REQUIRED, 1, 1 << 24, &cfg->d_ffn));
    DCP_TRY(config_int(file, arch, "context_length", 4096, 1, INT64_C(1) << 40, &cfg->context));
    cfg->embed_scale = 1.0f;
    return config_f64(file, arch, "attention.layer_norm_rms_epsilon", 1e-5, &cfg->norm_eps);
}

dcp_status config_common(const struct gguf *file, const char *arch, struct model_config *cfg)
{
    DCP_TRY(config_sizes(file, arch, cfg));
    DCP_TRY(read_heads(file, arch, cfg));
    DCP_TRY(read_rope(file, arch, cfg));
    int64_t n_experts = 0;
    DCP_TRY(config_int(file, arch, "expert_count", 0, 0, INT64_MAX, &n_experts));
    if (n_experts > 0)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED,
                         "%s: a mixture of %lld experts; only dense models run", gguf_path(file),
                         (long long)n_experts);
    cfg->attn_scale = (float)(1.0 / sqrt((double)cfg->key_dim));
    cfg->out_dim = cfg->value_dim;
    return DCP_OK;
}

void model_set_mla(struct model_config *cfg, enum mla_form form)
{
    struct mla_config *a = &cfg->mla;
    if (a->kv_rank == 0) return;
    a->form = form;
    const bool is_latent = form != MLA_EXPANDED;
    cfg->n_kv_heads = is_latent ? 1 : cfg->n_heads;
    cfg->key_dim = (is_latent ? a->kv_rank : a->nope_dim) + a->rope_dim;
    cfg->value_dim = is_latent ? a->kv_rank : a->value_dim;
    cfg->out_dim = a->value_dim;
}

int model_product_ks(const struct model_config *c, int64_t ks[LINEAR_MAX_KS])
{
    const int64_t all[] = {c->d_model,
                           c->moe.n_experts > 0 && c->moe.n_dense == 0 ? 0 : c->d_ffn,
                           c->n_heads * c->out_dim,
                           c->mla.q_rank,
                           c->mla.kv_rank,
                           model_is_latent(c) ? c->mla.nope_dim : 0,
                           c->moe.d_expert,
                           c->moe.d_shared};
    _Static_assert(sizeof(all) / sizeof(all[0]) <= LINEAR_MAX_KS, "room for every k");
    int n = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i] > 0) ks[n++] = all[i];
    return n;
}

int64_t model_kv_bytes(const struct model_config *c, dcp_dtype kv_dtype)
{
    const bool has_v = !model_is_latent(c);
    const int64_t width = c->key_dim + (has_v ? c->value_dim : 0);
    const bool has_scales = kv_dtype == DCP_I8 || kv_dtype == DCP_FP8_E4M3;
    const int64_t scales = has_scales ? (has_v ? 2 : 1) * (int64_t)sizeof(float) : 0;
    return c->n_layers * c->n_kv_heads * (width * (int64_t)dcp_dtype_bytes(kv_dtype) + scales);
}

dcp_status model_read_config(const struct gguf *file, const struct arch **arch_out,
                             struct model_config *cfg_out)
{
    const char *name = NULL;
    bool found = false;
    DCP_TRY(gguf_get_str(file, "general.architecture", &name, NULL, &found));
    if (!found)
        return dcp__fail(DCP_ERR_FORMAT, "%s: has no metadata key general.architecture",
                         gguf_path(file));
    const struct arch *arch = NULL;
    char known[256] = "";
    for (int i = 0; i < N_ARCHS; i++) {
        if (strcmp(archs[i]->name, name) == 0) arch = archs[i];
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i > 0 ? ", " : "",
                 archs[i]->name);
    }
    if (arch == NULL)
        return dcp__fail(DCP_ERR_NOT_SUPPORTED, "%s: architecture %.40s; supported are %s",
                         gguf_path(file), name, known);
    memset(cfg_out, 0, sizeof(*cfg_out));
    DCP_TRY(arch->configure(file, cfg_out));
    const struct gguf_tensor *embd = gguf_find(file, "token_embd.weight");
    if (embd == NULL)
        return dcp__fail(DCP_ERR_FORMAT, "%s: has no tensor token_embd.weight", gguf_path(file));
    if (embd->n_dims != 2 || embd->dims[1] > INT32_MAX)
        return dcp__fail(DCP_ERR_FORMAT,
                         "%s: token_embd.weight is [%lld, %lld], not [d, vocabulary]",
                         gguf_path(file), (long long)embd->dims[0], (long long)embd->dims[1]);
    cfg_out->vocab = embd->dims[1];
    *arch_out = arch;
    return DCP_OK;
}
