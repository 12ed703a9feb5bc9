/* SPDX-License-Identifier: Apache-2.0 */
/* What the commands that run a model share: its options, the file, a session on each rank. */
#ifndef DCP_CLI_MODEL_RUN_H
#define DCP_CLI_MODEL_RUN_H

#include "cli/common.h"
#include "engine/session.h"
#include "engine/tokenizer.h"

struct model_opts {
    struct rank_opts rank;
    const char *model; /* a path or a name */
    int64_t context, chunk, interleave;
    int kv_dtype, compute, algo;
    uint64_t memory;
    int mla; /* enum mla_form; -1 = not given */
    int64_t tp;
};
#define MODEL_OPTS_INIT                                                                            \
    {                                                                                              \
        .interleave = 1, .mla = -1                                                                 \
    }
#define COMPUTE_CHOICES "auto|f32|bf16"
#define MLA_CHOICES "absorbed|projected|expanded"
#define MODEL_OPTION(type, at)                                                                     \
    {                                                                                              \
        "model", 'm', OPT_STRING, offsetof(type, at.model), "FILE|NAME", 0, 0, NULL,               \
            "GGUF file, or a name that fetch-model.sh knows (required)"                            \
    }
#define MODEL_OPTIONS(type, at)                                                                    \
    RANKS_OPTION(type, at.rank), THREADS_OPTION(type, at.rank), BIND_OPTION(type, at.rank),        \
        {"context",                                                                                \
         'c',                                                                                      \
         OPT_INT,                                                                                  \
         offsetof(type, at.context),                                                               \
         "N",                                                                                      \
         1,                                                                                        \
         1e12,                                                                                     \
         NULL,                                                                                     \
         "tokens that the cache has room for (default: what the run needs)"},                      \
        COMM_OPTIONS(type, at.rank),                                                               \
        {"algo", 0, OPT_ENUM,     offsetof(type, at.algo),         NULL,                           \
         0,      0, ALGO_CHOICES, "merge algorithm (default auto)"},                               \
        {"interleave",                                                                             \
         0,                                                                                        \
         OPT_INT,                                                                                  \
         offsetof(type, at.interleave),                                                            \
         "I",                                                                                      \
         1,                                                                                        \
         1 << 30,                                                                                  \
         NULL,                                                                                     \
         "token p belongs to rank (p / I) mod N (default 1)"},                                     \
        {"chunk",                                                                                  \
         0,                                                                                        \
         OPT_INT,                                                                                  \
         offsetof(type, at.chunk),                                                                 \
         "N",                                                                                      \
         1,                                                                                        \
         1 << 20,                                                                                  \
         NULL,                                                                                     \
         "tokens of a prompt that are processed at once (default 512)"},                           \
        {"kv-dtype",                                                                               \
         0,                                                                                        \
         OPT_ENUM,                                                                                 \
         offsetof(type, at.kv_dtype),                                                              \
         NULL,                                                                                     \
         0,                                                                                        \
         0,                                                                                        \
         KV_DTYPE_CHOICES,                                                                         \
         "type of the cache (default auto: bf16)"},                                                \
        {"compute",                                                                                \
         0,                                                                                        \
         OPT_ENUM,                                                                                 \
         offsetof(type, at.compute),                                                               \
         NULL,                                                                                     \
         0,                                                                                        \
         0,                                                                                        \
         COMPUTE_CHOICES,                                                                          \
         "type of dense products (default auto: the fastest of the CPU)"},                         \
        {"tp",                                                                                     \
         0,                                                                                        \
         OPT_INT,                                                                                  \
         offsetof(type, at.tp),                                                                    \
         "N",                                                                                      \
         1,                                                                                        \
         4096,                                                                                     \
         NULL,                                                                                     \
         "head groups: KV heads over N groups of ranks, tokens over the ranks of a group "         \
         "(default 1)"},                                                                           \
        {"mla",                                                                                    \
         0,                                                                                        \
         OPT_ENUM,                                                                                 \
         offsetof(type, at.mla),                                                                   \
         NULL,                                                                                     \
         0,                                                                                        \
         0,                                                                                        \
         MLA_CHOICES,                                                                              \
         "what the cache of a model with latent attention holds: latent vectors (absorbed; "       \
         "projected: values made before the merge), or all heads' keys and values (expanded); "    \
         "refused for other models (default absorbed)"},                                           \
    {                                                                                              \
        "memory", 0, OPT_SIZE, offsetof(type, at.memory), "BYTES", 65536, 1e15, NULL,              \
            "workspace limit of attention on each rank (default 64M)"                              \
    }

/* The model as every rank sees it before the ranks start: read-only afterwards. */
struct model_file {
    char path[4096];
    struct gguf *file;
    struct tokenizer *tokenizer;
    const char *arch;        /* NULL = the file does not say */
    int64_t trained_context; /* 0 = the file does not say */
    bool has_latent;         /* latent attention (MLA) */
};
/* The file of a model: name itself if there is such a file or it looks like a path, else a name in
 * the cache. */
dcp_status model_path(const char *name, char *path, size_t n_bytes);
dcp_status model_open(const char *name_or_path, struct model_file *m);
/* An option that this model has no use for is refused, not ignored. */
dcp_status model_check_options(const struct model_file *m, const struct model_opts *opts);
void model_close(struct model_file *m);
/* Where models with a name are kept: ${DCP_ATTN_CACHE:-${XDG_CACHE_HOME:-~/.cache}/dcp-attn}/models
 */
dcp_status model_cache_dir(char *buf, size_t n_bytes);
/* The text of -p or -f; exactly one must be given. A usage error is printed, EXIT_USAGE returned;
 * EXIT_FAILED if the file cannot be read. Free the text with free. */
int model_text(const struct command_def *cmd, const char *prompt, const char *file, char **text_out,
               size_t *n_bytes_out);

/* Collective: where this rank's threads run, by --bind and --threads. False on all ranks if any
 * cannot have what they ask for; the cause is told. */
bool model_binding(dcp_group *g, const struct model_opts *opts, struct binding *out);
/* Collective: all ranks run the same ids on the same model; a session for n_tokens of context. */
dcp_status model_session(dcp_group *g, const struct model_file *m, const struct model_opts *opts,
                         const struct binding *binding, const struct token_list *ids,
                         int64_t n_tokens, struct session **out);

#endif
