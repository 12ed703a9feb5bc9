/* SPDX-License-Identifier: Apache-2.0 */
/* A model: its configuration, and this rank's slices of its weights.
 *
 * An architecture is one file, engine/arch_NAME.c: how its configuration is read from the metadata,
 * which tensors a layer has and how they are split over ranks, and the block itself (forward.h has
 * the steps). It is announced by one line in model.c. */
#ifndef DCP_ENGINE_MODEL_H
#define DCP_ENGINE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dcpattn/shard.h"
#include "engine/gguf.h"
#include "engine/linear.h"

struct forward;

enum activation { ACT_SILU, ACT_GELU_TANH };
/* Which two elements of a head rotate together: (2i, 2i+1), or (i, i + n/2). */
enum rope_pairs { ROPE_INTERLEAVED, ROPE_HALVES };
enum { MAX_ROPES = 2, MAX_LAYERS = 1024 };

/* Angles of one kind of layer: angle(pos, i) = pos / factor * base^(-2i/n) / freq_divisor[i].
 * YaRN: pairs before yarn_low turn as they are, those from yarn_high on 1 / yarn_factor as fast,
 * those between by a share that grows linearly. */
struct rope_config {
    double base;
    double factor;          /* linear scaling; 1 = none */
    bool has_freq_divisors; /* rope_freqs.weight of the file applies */
    double yarn_factor;     /* 0 = none */
    double yarn_low, yarn_high;
};

/* Multi-head latent attention: keys and values of all heads come from one latent vector a token.
 * Absorbed: the latent and the rotated key are the cache (one KV head), W_UK goes into q, W_UV
 * follows attention. Projected: so too, but W_UV is applied to each rank's partial before they are
 * merged: v values a head move in place of kv_rank, every rank holds all heads' W_UV. Expanded:
 * keys and values of every head are the cache. */
enum mla_form { MLA_ABSORBED, MLA_PROJECTED, MLA_EXPANDED, N_MLA_FORMS };
struct mla_config {
    int64_t kv_rank;            /* 0 = the model has none of this */
    int64_t q_rank;             /* 0 = q comes from x in one step */
    int64_t nope_dim, rope_dim; /* of a head of q and k */
    int64_t value_dim;          /* of a head's v */
    enum mla_form form;
};

/* Layers behind the first n_dense: a router chooses n_used of n_experts for each token. */
enum moe_gating { MOE_SOFTMAX = 1, MOE_SIGMOID = 2 };
struct moe_config {
    int64_t n_experts; /* 0 = all layers are dense */
    int64_t n_dense, n_used, n_groups, n_groups_used;
    int64_t d_expert, d_shared; /* columns of an expert; of the shared ones together, 0 = none */
    enum moe_gating gating;
    bool normalises; /* weights of the chosen sum to 1, before scale */
    float scale;
};

struct layer_config {
    int64_t window; /* 0 = sees everything before it */
    int rope;       /* index into ropes */
};

struct model_config {
    int64_t n_layers, d_model, d_ffn, vocab, context; /* context: the model's own */
    /* as the cache and attention have them: MLA's depend on its form */
    int64_t n_heads, n_kv_heads, key_dim, value_dim;
    int64_t out_dim; /* of a head in the output projection */
    struct mla_config mla;
    struct moe_config moe;
    double norm_eps;
    float attn_scale;    /* of q k^T */
    float attn_softcap;  /* 0 = none */
    float logit_softcap; /* 0 = none */
    float embed_scale;   /* of the embedding rows */
    enum activation activation;
    enum rope_pairs rope_pairs;
    int64_t rope_dims; /* first elements of a head that rotate; even */
    int n_ropes;
    struct rope_config ropes[MAX_ROPES];
    struct layer_config layers[MAX_LAYERS];
};

/* One latent KV head is the cache. */
static inline bool model_is_latent(const struct model_config *c)
{
    return c->mla.kv_rank > 0 && c->mla.form != MLA_EXPANDED;
}
/* Values of a head that attention gives. */
static inline int64_t model_attn_dim(const struct model_config *c)
{
    return model_is_latent(c) && c->mla.form == MLA_PROJECTED ? c->out_dim : c->value_dim;
}

/* This rank's part of a layer's weights; absent optional ones are NULL / without data. Shapes are
 * (rows, k) of the slice. */
struct layer {
    const float *attn_norm;       /* (d) */
    struct weight wq;             /* (H_r * Dk, d) own query heads */
    struct weight wk, wv;         /* (Hkv * Dk, d), (Hkv * D, d) of the head group's KV heads: each
                                     of its ranks projects the tokens that it owns */
    const float *bq, *bk, *bv;    /* (rows of wq, wk, wv) */
    const float *q_norm, *k_norm; /* (Dk) */
    struct weight wo;             /* (d_r, H * D) own output columns */
    const float *bo;              /* (d_r) */
    const float *post_attn_norm;  /* (d) */
    const float *ffn_norm;        /* (d) */
    struct weight gate, up;       /* (ffn_r, d) */
    struct weight down;           /* (d_r, ffn) */
    const float *post_ffn_norm;   /* (d) */

    /* MLA, with wq from q_rank where that is not 0. wk_b, wv_b as model_mla.c makes them. */
    struct weight q_a;      /* (q_rank_r, d) */
    const float *q_a_norm;  /* (q_rank) */
    struct weight kv_a;     /* (kv_rank + rope, d) replicated */
    const float *kv_a_norm; /* (kv_rank) */
    struct weight wk_b;     /* (H_r * kv_rank, nope); expanded: (H * nope, kv_rank) */
    struct weight wv_b;     /* absorbed: (H_r * v, kv_rank); projected: (H * kv_rank, v) floats;
                               expanded: (H * v, kv_rank) */

    /* experts; e's rows begin at e * d_expert_r (gate, up), e * d_r (down) */
    struct weight router;               /* (n_experts_r, d) */
    const float *router_bias;           /* (n_experts) or NULL */
    struct weight gate_exps, up_exps;   /* (n_experts * d_expert_r, d) */
    struct weight down_exps;            /* (n_experts * d_r, d_expert) */
    struct weight gate_shexp, up_shexp; /* (d_shared_r, d) */
    struct weight down_shexp;           /* (d_r, d_shared) */
};

/* --- what an architecture declares --- */

enum model_dim {
    DIM_ONE, /* rows of a vector */
    DIM_MODEL,
    DIM_FFN,
    DIM_VOCAB,
    DIM_KEY,      /* Dk */
    DIM_Q,        /* H * Dk */
    DIM_K,        /* Hkv * Dk */
    DIM_V,        /* Hkv * D */
    DIM_O,        /* H * out_dim */
    DIM_MLA_QA,   /* q_rank */
    DIM_MLA_Q_IN, /* q_rank, or d where that is 0 */
    DIM_MLA_Q,    /* H * (nope + rope) */
    DIM_MLA_KV,   /* kv_rank */
    DIM_MLA_KVA,  /* kv_rank + rope */
    DIM_EXPERTS   /* n_experts */
};
enum split {
    SPLIT_NONE,     /* on every rank whole */
    SPLIT_HEADS,    /* rows of own query heads */
    SPLIT_KV_HEADS, /* rows of the head group's KV heads: all of them without head groups */
    SPLIT_ROWS      /* rows by dcp_cut_range over rows */
};

/* One tensor of a layer. A vector (rows = DIM_ONE) becomes const float * at offset in struct layer,
 * a matrix struct weight. The split of a vector is that of the rows it belongs to. */
struct tensor_spec {
    const char *name; /* behind "blk.N." */
    size_t offset;
    enum model_dim rows, cols;
    enum split split;
    bool is_optional;
};

struct arch {
    const char *name; /* general.architecture */
    /* Everything of cfg but vocab, which the embedding's shape gives. */
    dcp_status (*configure)(const struct gguf *file, struct model_config *cfg);
    const struct tensor_spec *tensors;
    int n_tensors;
    /* The tile's rows of x [., d] through layer l: up to q, and k and v stored; and on from the
     * attention's result. */
    dcp_status (*before_attention)(struct forward *f, int64_t l);
    dcp_status (*after_attention)(struct forward *f, int64_t l);
};

extern const struct arch arch_llama, arch_gemma3, arch_deepseek2;

/* Metadata of an architecture: key is what stands behind "NAME.". An absent key gives fallback, or
 * DCP_ERR_FORMAT where fallback is CONFIG_REQUIRED. */
#define CONFIG_REQUIRED INT64_MIN
dcp_status config_int(const struct gguf *file, const char *arch, const char *key, int64_t fallback,
                      int64_t min, int64_t max, int64_t *value_out);
dcp_status config_f64(const struct gguf *file, const char *arch, const char *key, double fallback,
                      double *value_out);
/* Layers, widths, norm epsilon, context. */
dcp_status config_sizes(const struct gguf *file, const char *arch, struct model_config *cfg);
/* These and heads, scale 1/sqrt(Dk), rope 0 (base, linear factor, divisors): what dense
 * architectures share. */
dcp_status config_common(const struct gguf *file, const char *arch, struct model_config *cfg);

/* --- the model --- */

struct model {
    const struct arch *arch;
    struct model_config cfg;
    int n_ranks, rank;
    int tp;                /* head groups; 1 = none */
    int kv_ranks, kv_rank; /* among which the tokens of a head group are shared */
    dcp_range kv_heads;    /* of the head group: computed and stored here */
    dcp_range heads, cols, ffn,
        vocab; /* this rank's query heads, output columns, FFN columns, ids */
    dcp_range q_rank, experts, d_expert, d_shared; /* rows of q_a, router, experts, shared ones */
    struct weight token_embd;                      /* (vocab_r, d) */
    struct weight output;       /* (vocab_r, d); the same slice where the file ties them */
    const float *output_norm;   /* (d) */
    const float *freq_divisors; /* (rope_dims / 2) or NULL */
    struct layer *layers;       /* [n_layers] */
    void *arena;                /* holds every slice */
    uint64_t share_bytes, replicated_bytes; /* as the file stores them */
    char replicated_names[256];
};

/* Reads the configuration only (what a plan or an info command needs). */
dcp_status model_read_config(const struct gguf *file, const struct arch **arch_out,
                             struct model_config *cfg_out);
/* The shapes of cache and attention for a form; nothing where the model has no MLA. */
void model_set_mla(struct model_config *cfg, enum mla_form form);
/* Every k of the model's weights, at most LINEAR_MAX_KS different ones; -> how many. */
int model_product_ks(const struct model_config *cfg, int64_t ks[LINEAR_MAX_KS]);
/* Bytes of keys and values of one token in all layers, all ranks together; with their scales where
 * the type has some. DEFAULT is no type here: 0. */
int64_t model_kv_bytes(const struct model_config *cfg, dcp_dtype kv_dtype);
/* Reads rank's slices; form is for models with MLA. Not collective. */
dcp_status model_load(const struct gguf *file, int n_ranks, int rank, enum mla_form form,
                      struct model **out);
/* The same in tp head groups (dcpattn/attend.h); models with MLA have one. */
dcp_status model_load_tp(const struct gguf *file, int n_ranks, int rank, enum mla_form form, int tp,
                         struct model **out);
/* The query heads of any rank. */
dcp_range model_heads(const struct model *m, int rank);
void model_free(struct model *m); /* takes NULL */

#endif
