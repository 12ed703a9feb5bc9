/* SPDX-License-Identifier: Apache-2.0 */
/* Damaged GGUF files: refused with a reason,
 * or opened with a directory that stays inside the file. */
#include "engine/gguf.h"
#include "fuzz/fuzz_driver.h"

static const char *const keys[] = {
    "general.architecture",      "general.alignment",     "llama.block_count",
    "llama.rope.freq_base",      "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
};

static void try_key(const struct gguf *g, const char *key)
{
    int64_t whole;
    double real;
    bool flag, found;
    const char *text;
    size_t n;
    enum gguf_type type;
    (void)gguf_get_int(g, key, &whole, &found);
    (void)gguf_get_f64(g, key, &real, &found);
    (void)gguf_get_bool(g, key, &flag, &found);
    if (gguf_get_str(g, key, &text, &n, &found) == DCP_OK && found) {
        fuzz_require(text[n] == '\0');
    }
    if (gguf_get_arr(g, key, &type, &n, &found) != DCP_OK || !found) return;
    const size_t places[] = {0, n / 2, n - 1};
    for (size_t i = 0; n > 0 && i < 3; i++) {
        size_t len;
        if (gguf_arr_str(g, key, places[i], &text, &len) == DCP_OK) {
            volatile char last = len > 0 ? text[len - 1] : '\0';
            (void)last;
        }
        (void)gguf_arr_int(g, key, places[i], &whole);
        (void)gguf_arr_f64(g, key, places[i], &real);
    }
    fuzz_require(gguf_arr_str(g, key, n, &text, &n) != DCP_OK);
}

static void try_tensor(const struct gguf *g, const struct gguf_tensor *t, size_t n_file)
{
    fuzz_require(t->n_dims >= 1 && t->n_dims <= 4);
    fuzz_require(t->file_offset <= n_file && t->n_bytes <= n_file - t->file_offset);
    fuzz_require(gguf_find(g, t->name) != NULL);
    const size_t n = t->n_bytes < 64 ? t->n_bytes : 64;
    char bytes[64];
    fuzz_require(gguf_read(g, t, 0, n, bytes) == DCP_OK);
    fuzz_require(gguf_read(g, t, t->n_bytes - n, n, bytes) == DCP_OK);
    fuzz_require(gguf_read(g, t, t->n_bytes - n, n + 1, bytes) != DCP_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct gguf *g = NULL;
    if (gguf_open(fuzz_path(data, n_bytes), &g) != DCP_OK) {
        fuzz_require(g == NULL && dcp_last_error()[0] != '\0');
        return 0;
    }
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) try_key(g, keys[i]);
    for (size_t i = 0; i < gguf_n_tensors(g); i++) try_tensor(g, gguf_tensor_at(g, i), n_bytes);
    gguf_close(g);
    return 0;
}
