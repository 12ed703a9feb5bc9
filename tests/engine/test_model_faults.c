/* SPDX-License-Identifier: Apache-2.0 */
/* Models that cannot be run: an error that names what is wrong, whatever the file holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>

#include "base/alloc_priv.h"
#include "dcpattn/group.h"
#include "engine/session.h"
#include "files/file_tools.h"
#include "group/ranks.h"

#define DATA DCP_SOURCE_DIR "/tests/data/gguf/"

/* Open, create, one step. */
static dcp_status try_model(const unsigned char *data, size_t n)
{
    const char *path = scratch_path("model.gguf");
    assert_int_equal(write_file(path, data, n), 0);
    dcp_group *g = NULL;
    assert_int_equal(dcp_group_create_self(NULL, &g), DCP_OK);
    struct gguf *file = NULL;
    struct session *s = NULL;
    const struct session_opts opts = {.n_threads = 1, .context = 32, .chunk = 8};
    dcp_status st = gguf_open(path, &file);
    if (st == DCP_OK) st = session_create(g, file, &opts, &s);
    if (st == DCP_OK) {
        static const int32_t ids[3] = {0, 1, 2};
        const int64_t n_ids = session_vocab(s) < 3 ? 1 : 3;
        st = session_step(s, ids, n_ids, NULL, NULL, NULL, NULL, NULL);
    }
    session_destroy(s);
    gguf_close(file);
    dcp_group_destroy(g);
    unlink(path);
    return st;
}

/* The first n bytes of `to` over every place that holds `from`; both of the same length. */
static void replace(struct bytes b, const char *from, const char *to)
{
    const size_t n = strlen(from);
    int n_found = 0;
    assert_int_equal(n, strlen(to));
    for (size_t i = 0; i + n <= b.n; i++)
        if (memcmp(b.data + i, from, n) == 0) {
            memcpy(b.data + i, to, n);
            n_found++;
        }
    assert_true(n_found > 0);
}

static void test_wrong_in_one_way(void **state)
{
    (void)state;
    static const struct {
        const char *model, *from, *to;
        dcp_status st;
        const char *text;
    } cases[] = {
        {"llama-f32", "general.architecture", "general.architectur_", DCP_ERR_FORMAT,
         "general.architecture"},
        {"llama-f32", "llama.block_count", "llama.block_coun_", DCP_ERR_FORMAT,
         "llama.block_count"},
        {"llama-f32", "blk.0.attn_k.weight", "blk.0.attn_X.weight", DCP_ERR_FORMAT,
         "no tensor blk.0.attn_k.weight"},
        {"llama-f32", "token_embd.weight", "token_embX.weight", DCP_ERR_FORMAT,
         "token_embd.weight"},
        {"llama-bias", "blk.1.attn_output.bias", "blk.1.attn_output.bibs", DCP_ERR_NOT_SUPPORTED,
         "blk.1.attn_output.bibs is not part of"},
        {"llama-linear-untied", "linear", "longro", DCP_ERR_NOT_SUPPORTED, "longro"},
        {"llama3-freqs", "rope_freqs.weight", "rope_frexs.weight", DCP_ERR_NOT_SUPPORTED,
         "rope_frexs"},
        {"gemma3-softcap", "attn_q_norm", "attn_q_nirm", DCP_ERR_FORMAT, "attn_q_norm"},
        {"mistral-window", "llama.embedding_length", "llama.embedding_lengt_", DCP_ERR_FORMAT,
         "llama.embedding_length"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", cases[i].model);
        const struct bytes b = file_bytes(path);
        replace(b, cases[i].from, cases[i].to);
        assert_int_equal(try_model(b.data, b.n), cases[i].st);
        if (strstr(dcp_last_error(), cases[i].text) == NULL)
            fail_msg("no \"%s\" in: %s", cases[i].text, dcp_last_error());
        free(b.data);
    }
}

/* The value of a u32 key of llama-f32 set to something else. */
static void test_wrong_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        uint32_t value;
        const char *text;
    } cases[] = {
        {"llama.block_count", 0, "llama.block_count is 0"},
        {"llama.block_count", 3, "no tensor blk.2"},
        {"llama.block_count", 1, "blk.1."},
        {"llama.block_count", UINT32_MAX, "llama.block_count is 4294967295"},
        {"llama.embedding_length", 96, "token_embd.weight"},
        {"llama.feed_forward_length", 81, "ffn_gate.weight"},
        {"llama.attention.head_count", 7, "no multiple of 2"},
        {"llama.attention.head_count", 12, "attn_k.weight"},
        {"llama.attention.head_count_kv", 3, "attn_k.weight"},
        {"llama.attention.head_count_kv", 0, "head_count_kv is 0"},
        {"llama.context_length", 0, "context_length is 0"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct bytes b = file_bytes(DATA "llama-f32.gguf");
        const size_t n = strlen(cases[i].key);
        bool found = false;
        for (size_t at = 8; at + n + 8 < b.n && !found; at++) {
            uint64_t len;
            memcpy(&len, b.data + at - 8, 8);
            if (len != n || memcmp(b.data + at, cases[i].key, n) != 0) continue;
            memcpy(b.data + at + n + 4, &cases[i].value, 4); /* behind the type */
            found = true;
        }
        assert_true(found);
        assert_int_not_equal(try_model(b.data, b.n), DCP_OK);
        if (strstr(dcp_last_error(), cases[i].text) == NULL)
            fail_msg("%s = %u: no \"%s\" in: %s", cases[i].key, cases[i].value, cases[i].text,
                     dcp_last_error());
        free(b.data);
    }
}

static void test_random_damage(void **state)
{
    (void)state;
    static const char *const some[] = {"llama-bias", "gemma3-softcap", "llama3-freqs"};
    uint64_t seed = 31337;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int m = 0; m < 3; m++) {
        char path[512];
        snprintf(path, sizeof(path), DATA "%s.gguf", some[m]);
        const struct bytes b = file_bytes(path);
        unsigned char *copy = malloc(b.n);
        const size_t before = dcp__alloc_current();
        int n_good = 0;
        for (int i = 0; i < 250; i++) {
            memcpy(copy, b.data, b.n);
            /* the keys, the directory, or anything */
            damage(copy, i % 3 == 0 ? 1200 : i % 3 == 1 ? 14000 : b.n, &seed);
            n_good += try_model(copy, b.n) == DCP_OK ? 1 : 0;
        }
        print_message("%s: %d of 250 damaged files still run\n", some[m], n_good);
        assert_int_equal(dcp__alloc_current(), before);
        free(copy);
        free(b.data);
    }
}

/* A weight that is no number: every rank says so and where, the sequence is as before, the group
 * works on, whichever rank holds the weight or the key. */
struct poison {
    const char *tensor, *text;
    float value;
    bool whole; /* every value of the tensor, not the last alone */
    char path[512];
};

static int poisoned_rank(dcp_group *g, void *ctx)
{
    const struct poison *p = ctx;
    static const int32_t ids[7] = {1, 2, 3, 4, 5, 6, 7};
    const struct session_opts opts = {.n_threads = 1, .context = 32, .chunk = 4};
    const char *const good = DATA "llama-f32.gguf";
    int bad = 0;
    for (int step = 0; step < 2; step++) {
        struct gguf *file = NULL;
        struct session *s = NULL;
        bad += gguf_open(step == 0 ? p->path : good, &file) != DCP_OK;
        bad += session_create(g, file, &opts, &s) != DCP_OK;
        for (int n = 7; n >= 1 && bad == 0; n -= 6) {
            const dcp_status st = session_step(s, ids, n, NULL, NULL, NULL, NULL, NULL);
            bad += st != (step == 0 ? DCP_ERR_NONFINITE : DCP_OK);
            bad += step == 0 && strstr(dcp_last_error(), p->text) == NULL;
            bad += step == 0 && session_length(s) != 0;
        }
        if (bad != 0)
            fprintf(stderr, "%s = %g, rank %d of %d: %s\n", p->tensor, (double)p->value,
                    dcp_group_rank(g), dcp_group_size(g), dcp_last_error());
        session_destroy(s);
        gguf_close(file);
    }
    return bad;
}

static void test_weights_that_are_no_numbers(void **state)
{
    (void)state;
    static const struct poison cases[] = {
        {"blk.0.attn_q.weight", "attention of layer 0, positions 0 to", 0, false, ""},
        {"blk.0.attn_k.weight", "attention of layer 0, positions 0 to", 0, false, ""},
        {"blk.0.attn_v.weight", "attention of layer 0, positions 0 to", 0, false, ""},
        {"blk.0.attn_k.weight", "attention of layer 0, positions 0 to", 0, true, ""},
        {"blk.1.attn_q.weight", "attention of layer 1, positions", 0, true, ""},
        {"blk.0.attn_output.weight", "after layer 0: ", 0, false, ""},
        {"blk.1.ffn_down.weight", "after layer 1: ", 0, false, ""},
        {"output_norm.weight", "logits of position", 0, false, ""},
        {"token_embd.weight", "", 0, true, ""},
    };
    const float values[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3 * sizeof(cases) / sizeof(cases[0]); i++) {
        struct poison p = cases[i / 3];
        p.value = values[i % 3];
        const char *path = DATA "llama-f32.gguf";
        const struct bytes b = file_bytes(path);
        struct gguf *file = NULL;
        assert_int_equal(gguf_open(path, &file), DCP_OK);
        const struct gguf_tensor *t = gguf_find(file, p.tensor);
        assert_non_null(t);
        const size_t n = t->n_bytes / sizeof(float), first = p.whole ? 0 : n - 1;
        for (size_t k = first; k < n; k++)
            memcpy(b.data + t->file_offset + k * sizeof(float), &p.value, sizeof(float));
        gguf_close(file);
        snprintf(p.path, sizeof(p.path), "%s", scratch_path("poisoned.gguf"));
        assert_int_equal(write_file(p.path, b.data, b.n), 0);
        assert_int_equal(ranks_threads(1, 20.0, poisoned_rank, &p), 0);
        assert_int_equal(ranks_threads(3, 20.0, poisoned_rank, &p), 0);
        unlink(p.path);
        free(b.data);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_in_one_way),
        cmocka_unit_test(test_wrong_sizes),
        cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_weights_that_are_no_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
