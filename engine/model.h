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

/* Angles of one kind of layer: angle(pos, i) = pos / factor * base^(-2i/n) / freq_divisor[i]. */
struct rope_config {
    double base;
    double factor;          /* linear scaling; 1 = none */
    bool has_freq_divisors; /* rope_freqs.weight of the file applies */
};

struct layer_config {
    int64_t window; /* 0 = sees everything before it */
    int rope;       /* index into ropes */
};

struct model_config {
    int64_t n_layers, d_model, d_ffn, vocab, context; /* context: the model's own */
    int64_t n_heads, n_kv_heads, key_dim, value_dim;
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

/* This rank's part of a layer's weights; absent optional ones are NULL / without data. Shapes are
 * (rows, k) of the slice. */
struct layer {
    const float *attn_norm;       /* (d) */
    struct weight wq;             /* (H_r * Dk, d) own query heads */
    struct weight wk, wv;         /* (Hkv * Dk, d), (Hkv * D, d) replicated: each rank projects the
                                     tokens that it owns */
    const float *bq, *bk, *bv;    /* (rows of wq, wk, wv) */
    const float *q_norm, *k_norm; /* (Dk) */
    struct weight wo;             /* (d_r, H * D) own output columns */
    const float *bo;              /* (d_r) */
    const float *post_attn_norm;  /* (d) */
    const float *ffn_norm;        /* (d) */
    struct weight gate, up;       /* (ffn_r, d) */
    struct weight down;           /* (d_r, ffn) */
    const float *post_ffn_norm;   /* (d) */
};

/* --- what an architecture declares --- */

enum model_dim {
    DIM_ONE, /* rows of a vector */
    DIM_MODEL,
    DIM_FFN,
    DIM_VOCAB,
    DIM_KEY, /* Dk */
    DIM_Q,   /* H * Dk */
    DIM_K,   /* Hkv * Dk */
    DIM_V,   /* Hkv * D */
    DIM_O    /* H * D */
};
enum split {
    SPLIT_NONE,  /* on every rank whole */
    SPLIT_HEADS, /* rows by dcp_cut_range over query heads */
    SPLIT_ROWS   /* rows by dcp_cut_range over rows */
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
    /* x [T, d] through layer l. */
    dcp_status (*block)(struct forward *f, int64_t l);
};

extern const struct arch arch_llama, arch_gemma3;

/* Metadata of an architecture: key is what stands behind "NAME.". An absent key gives fallback, or
 * DCP_ERR_FORMAT where fallback is CONFIG_REQUIRED. */
#define CONFIG_REQUIRED INT64_MIN
dcp_status config_int(const struct gguf *file, const char *arch, const char *key, int64_t fallback,
                      int64_t min, int64_t max, int64_t *value_out);
dcp_status config_f64(const struct gguf *file, const char *arch, const char *key, double fallback,
                      double *value_out);
/* Sizes, heads, norm epsilon, context, scale 1/sqrt(Dk), rope 0 (base, linear factor, divisors):
 * what all architectures share. */
dcp_status config_common(const struct gguf *file, const char *arch, struct model_config *cfg);

/* --- the model --- */

struct model {
    const struct arch *arch;
    struct model_config cfg;
    int n_ranks, rank;
    dcp_range heads, cols, ffn,
        vocab;                  /* this rank's query heads, output columns, FFN columns, ids */
    struct weight token_embd;   /* (vocab_r, d) */
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
/* Reads rank's slices. Not collective. */
dcp_status model_load(const struct gguf *file, int n_ranks, int rank, struct model **out);
void model_free(struct model *m); /* takes NULL */

#endif
