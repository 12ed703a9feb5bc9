/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/model_run.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc_priv.h"
#include "base/hash_priv.h"
#include "base/status_priv.h"

dcp_status model_cache_dir(char *buf, size_t n_bytes)
{
    const char *own = getenv("DCP_ATTN_CACHE"), *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    int n = -1;
    if (own != NULL && own[0] != '\0') {
        n = snprintf(buf, n_bytes, "%s/models", own);
    } else if (xdg != NULL && xdg[0] != '\0') {
        n = snprintf(buf, n_bytes, "%s/dcp-attn/models", xdg);
    } else if (home != NULL && home[0] != '\0') {
        n = snprintf(buf, n_bytes, "%s/.cache/dcp-attn/models", home);
    }
    if (n < 0)
        return dcp__fail(DCP_ERR_SYS, "no folder for models: set HOME, XDG_CACHE_HOME or "
                                      "DCP_ATTN_CACHE");
    if ((size_t)n >= n_bytes) return dcp__fail(DCP_ERR_ARG, "the cache folder's name is too long");
    return DCP_OK;
}

/* The script that fetches models: where `make install` puts it, else its name in the sources. */
static const char *fetch_script(char *buf, size_t n_bytes)
{
    static const char in_sources[] = "scripts/fetch-model.sh";
    char exe[2048], path[2112];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    if (n <= 0) return in_sources;
    exe[n] = '\0';
    for (int i = 0; i < 2; i++) { /* the command and its folder */
        char *slash = strrchr(exe, '/');
        if (slash == NULL) return in_sources;
        *slash = '\0';
    }
    (void)snprintf(path, sizeof(path), "%s/libexec/dcp-attn/fetch-model.sh", exe);
    if (access(path, X_OK) != 0) return in_sources;
    return (size_t)snprintf(buf, n_bytes, "%s", path) < n_bytes ? buf : in_sources;
}

dcp_status model_path(const char *name, char *path, size_t n_bytes)
{
    char dir[3072];
    if (access(name, F_OK) == 0 || strchr(name, '/') != NULL) {
        if ((size_t)snprintf(path, n_bytes, "%s", name) >= n_bytes)
            return dcp__fail(DCP_ERR_ARG, "--model: the path is longer than %zu bytes", n_bytes);
        return DCP_OK;
    }
    static const char suffix[] = ".gguf";
    const size_t n_suffix = sizeof(suffix) - 1;
    size_t n_name = strlen(name); /* without the suffix */
    if (n_name > n_suffix && strcmp(name + n_name - n_suffix, suffix) == 0) n_name -= n_suffix;
    DCP_TRY(model_cache_dir(dir, sizeof(dir)));
    if ((size_t)snprintf(path, n_bytes, "%s/%.*s.gguf", dir, (int)n_name, name) >= n_bytes)
        return dcp__fail(DCP_ERR_ARG, "--model: the path is longer than %zu bytes", n_bytes);
    if (access(path, R_OK) == 0) return DCP_OK;
    char script[2112];
    return dcp__fail(DCP_ERR_SYS,
                     "model '%s': there is no such file, and no %s; %s %.*s fetches it if it knows "
                     "the name",
                     name, path, fetch_script(script, sizeof(script)), (int)n_name, name);
}

dcp_status model_open(const char *name_or_path, struct model_file *m)
{
    memset(m, 0, sizeof(*m));
    DCP_TRY(model_path(name_or_path, m->path, sizeof(m->path)));
    DCP_TRY(gguf_open(m->path, &m->file));
    dcp_status st = tokenizer_create(m->file, &m->tokenizer);
    const char *arch = NULL;
    bool found = false;
    if (st == DCP_OK) st = gguf_get_str(m->file, "general.architecture", &arch, NULL, &found);
    if (st == DCP_OK && found) {
        char key[128];
        snprintf(key, sizeof(key), "%s.context_length", arch);
        st = gguf_get_int(m->file, key, &m->trained_context, &found);
        int64_t rank = 0;
        snprintf(key, sizeof(key), "%s.attention.kv_lora_rank", arch);
        if (st == DCP_OK) st = gguf_get_int(m->file, key, &rank, &found);
        m->arch = arch;
        m->has_latent = st == DCP_OK && found && rank > 0;
    }
    if (st != DCP_OK) model_close(m);
    return st;
}

dcp_status model_check_options(const struct model_file *m, const struct model_opts *opts)
{
    char form[16];
    if (opts->mla < 0 || m->has_latent) return DCP_OK;
    return dcp__fail(DCP_ERR_ARG,
                     "--mla %s: %s has no latent attention (its architecture is %s); leave --mla "
                     "out",
                     options_choice(MLA_CHOICES, opts->mla, form, sizeof(form)), m->path,
                     m->arch != NULL ? m->arch : "not said");
}

void model_close(struct model_file *m)
{
    tokenizer_destroy(m->tokenizer);
    gguf_close(m->file);
    m->tokenizer = NULL;
    m->file = NULL;
}

int model_text(const struct command_def *cmd, const char *prompt, const char *file, char **text_out,
               size_t *n_bytes_out)
{
    if ((prompt == NULL) == (file == NULL))
        return usage_error(cmd, "give the text with -p TEXT or -f FILE, one of them");
    if (file != NULL)
        return read_file(file, text_out, n_bytes_out) == DCP_OK ? EXIT_DONE : failed();
    *n_bytes_out = strlen(prompt);
    *text_out = strdup(prompt);
    if (*text_out != NULL) return EXIT_DONE;
    dcp__fail(DCP_ERR_NOMEM, "no memory for a text of %zu bytes", *n_bytes_out);
    return failed();
}

/* What must be equal on all ranks; hosts of a cluster may hold different files. */
struct run_card {
    uint64_t ids_hash, n_ids;
    uint64_t model_hash;
    int64_t context, chunk, interleave;
    int32_t kv_dtype, compute;
};

static uint64_t model_hash(const struct gguf *g)
{
    uint64_t h = DCP__HASH_BEGIN;
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        h = dcp__hash_bytes(h, t->name, strlen(t->name));
        h = dcp__hash_bytes(h, t->dims, sizeof(t->dims));
        h = dcp__hash_bytes(h, &t->qtype, sizeof(t->qtype));
        h = dcp__hash_bytes(h, &t->file_offset, sizeof(t->file_offset));
    }
    return h;
}

/* An option as the command line spells it: of choices, or a number, 0 where it was not given. */
static const char *option_text(const char *choices, int64_t value, char *buf, size_t n_bytes)
{
    if (choices != NULL) return options_choice(choices, (int)value, buf, n_bytes);
    if (value == 0) return "default";
    snprintf(buf, n_bytes, "%lld", (long long)value);
    return buf;
}

/* The options of ranks 0 and r: the first that differs. */
static dcp_status compare_options(const struct run_card *a, const struct run_card *b, int r)
{
    const struct {
        const char *name, *choices;
        int64_t a, b;
    } options[] = {
        {"tokens of context", NULL, a->context, b->context},
        {"--chunk", NULL, a->chunk, b->chunk},
        {"--interleave", NULL, a->interleave, b->interleave},
        {"--kv-dtype", KV_DTYPE_CHOICES, a->kv_dtype, b->kv_dtype},
        {"--compute", COMPUTE_CHOICES, a->compute, b->compute},
    };
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        char text[2][24];
        if (options[i].a == options[i].b) continue;
        return dcp__fail(DCP_ERR_MISMATCH,
                         "ranks 0 and %d run with different options: %s: %s and %s", r,
                         options[i].name,
                         option_text(options[i].choices, options[i].a, text[0], sizeof(text[0])),
                         option_text(options[i].choices, options[i].b, text[1], sizeof(text[1])));
    }
    return DCP_OK;
}

static dcp_status agree_run(dcp_group *g, const struct run_card *mine)
{
    const int n = dcp_group_size(g);
    struct run_card *all = NULL;
    /* The group's memory: all ranks have it or none. */
    DCP_TRY(dcp_group_alloc(g, (size_t)n * sizeof(*all), (void **)&all));
    dcp_status st = dcp_group_allgather(g, mine, sizeof(*mine), all);
    for (int r = 1; r < n && st == DCP_OK; r++) {
        const struct run_card *a = &all[0], *b = &all[r];
        if (a->model_hash != b->model_hash) {
            st = dcp__fail(DCP_ERR_MISMATCH, "ranks 0 and %d have different model files", r);
        } else if (a->ids_hash != b->ids_hash || a->n_ids != b->n_ids) {
            st = dcp__fail(DCP_ERR_MISMATCH,
                           "ranks 0 and %d have different texts (%llu and %llu tokens)", r,
                           (unsigned long long)a->n_ids, (unsigned long long)b->n_ids);
        } else {
            st = compare_options(a, b, r);
        }
    }
    dcp_group_free(g, all);
    return st;
}

bool model_binding(dcp_group *g, const struct model_opts *opts, struct binding *out)
{
    return all_ranks_ok(
        g, binding_choose(g, (enum bind_mode)opts->rank.bind, (int)opts->rank.threads, out));
}

dcp_status model_session(dcp_group *g, const struct model_file *m, const struct model_opts *opts,
                         const struct binding *binding, const struct token_list *ids,
                         int64_t n_tokens, struct session **out)
{
    struct run_card card;
    memset(&card, 0, sizeof(card));
    card.ids_hash = dcp__hash_bytes(DCP__HASH_BEGIN, ids->ids, ids->n * sizeof(ids->ids[0]));
    card.n_ids = ids->n;
    card.model_hash = model_hash(m->file);
    card.context = n_tokens;
    card.chunk = opts->chunk;
    card.interleave = opts->interleave;
    card.kv_dtype = opts->kv_dtype;
    card.compute = opts->compute;
    DCP_TRY(agree_run(g, &card));
    struct session_opts so;
    memset(&so, 0, sizeof(so));
    so.n_threads = binding->n_threads;
    so.cpus = binding->cpu;
    so.n_cpus = binding->n;
    so.context = n_tokens;
    so.chunk = opts->chunk;
    so.interleave = opts->interleave;
    so.kv_dtype = (dcp_dtype)opts->kv_dtype;
    so.compute = (enum compute_type)opts->compute;
    so.algo = (dcp_merge_algo)opts->algo;
    so.isa = (dcp_isa)opts->rank.isa;
    so.attend_workspace_bytes = (size_t)opts->memory;
    so.mla = opts->mla < 0 ? MLA_ABSORBED : (enum mla_form)opts->mla;
    so.tp = (int)opts->tp;
    return session_create(g, m->file, &so, out);
}
