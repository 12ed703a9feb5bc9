/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/generate_report.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/json_out.h"
#include "cli/message.h"
#include "cli/table.h"

/* Share of a rank's time; waiting for slower ranks is inside the part that waits. */
static double share(double part_s, double total_s)
{
    return total_s > 0.0 ? part_s / total_s : 0.0;
}

/* NaN where nothing was timed. */
static double rate(int64_t n, double s)
{
    return n > 0 && s > 0.0 ? (double)n / s : (double)NAN;
}

static const char *rate_text(double per_s, char *buf)
{
    if (isnan(per_s)) return "-";
    snprintf(buf, TABLE_CELL_BYTES, "%.1f", per_s);
    return buf;
}

static uint64_t merge_bytes(const struct generate_report *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->n_ranks; i++) sum += r->ranks[i].merge_wire_bytes;
    return sum;
}

static uint64_t other_bytes(const struct generate_report *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->n_ranks; i++) sum += r->ranks[i].other_wire_bytes;
    return sum;
}

static bool is_one_process(const struct generate_report *r)
{
    return strcmp(r->comm, "threads") == 0;
}

static int64_t named_bytes(const struct session_rank_report *k)
{
    return (int64_t)(k->kv_bytes + k->weight_bytes + k->workspace_bytes + k->activation_bytes);
}

/* What of the peak has no name of its own: the program and its libraries, the vocabulary, oneDNN's
 * buffers. Below 0 where memory with a name was never touched. */
static int64_t rest_bytes(const struct generate_report *r, int rank)
{
    int64_t rest = (int64_t)r->ranks[rank].peak_rss_bytes;
    if (!is_one_process(r)) return rest - named_bytes(&r->ranks[rank]);
    for (int i = 0; i < r->n_ranks; i++) rest -= named_bytes(&r->ranks[i]);
    return rest;
}

static void signed_bytes(int64_t n, char *buf)
{
    char text[TABLE_CELL_BYTES];
    table_bytes((uint64_t)(n < 0 ? -n : n), text);
    snprintf(buf, TABLE_CELL_BYTES, "%s%.*s", n < 0 ? "-" : "", TABLE_CELL_BYTES - 2, text);
}

static void memory_table(const struct generate_report *r, FILE *to)
{
    static const char *const heading[] = {"rank",      "KV tokens",   "KV bytes", "weights",
                                          "workspace", "activations", "rest",     "peak RSS"};
    enum { COLUMNS = 8 };
    char(*cells)[TABLE_CELL_BYTES] = calloc((size_t)(r->n_ranks + 1) * COLUMNS, TABLE_CELL_BYTES);
    if (cells == NULL) return;
    for (int c = 0; c < COLUMNS; c++) snprintf(cells[c], TABLE_CELL_BYTES, "%s", heading[c]);
    for (int i = 0; i < r->n_ranks; i++) {
        const struct session_rank_report *k = &r->ranks[i];
        char(*row)[TABLE_CELL_BYTES] = cells + (i + 1) * COLUMNS;
        snprintf(row[0], TABLE_CELL_BYTES, "%d", i);
        snprintf(row[1], TABLE_CELL_BYTES, "%lld", (long long)k->kv_tokens);
        table_bytes(k->kv_bytes, row[2]);
        table_bytes(k->weight_bytes, row[3]);
        table_bytes(k->workspace_bytes, row[4]);
        table_bytes(k->activation_bytes, row[5]);
        signed_bytes(rest_bytes(r, i), row[6]);
        table_bytes(k->peak_rss_bytes, row[7]);
    }
    table_print(to, r->n_ranks + 1, COLUMNS, cells);
    free(cells);
}

static void memory_notes(const struct generate_report *r, FILE *to)
{
    char text[1200], held[TABLE_CELL_BYTES];
    uint64_t huge = 0;
    for (int i = 0; i < r->n_ranks; i++) huge += r->ranks[i].kv_huge_bytes;
    snprintf(
        text, sizeof(text),
        "KV bytes are whole pages of %lld tokens, all layers. KV bytes, weights, workspace, "
        "activations and the rest (program, libraries, vocabulary, oneDNN's buffers) %s.",
        (long long)r->ranks[0].kv_page_tokens,
        is_one_process(r) && r->n_ranks > 1
            ? "of all ranks together are the peak RSS: ranks are threads of one process, whose "
              "figures rest and peak RSS are"
            : "add up to the peak RSS");
    message_fold(to, "", 0, text);
    snprintf(text, sizeof(text), "of the KV bytes on huge pages: %s", table_bytes(huge, held));
    message_fold(to, "", 0, text);
    if (r->n_ranks < 2 || r->replicated_names == NULL || r->replicated_names[0] == '\0') return;
    snprintf(text, sizeof(text), "replicated on every rank, %s of its weights: %s",
             table_bytes(r->ranks[0].weight_replicated_bytes, held), r->replicated_names);
    message_fold(to, "", 0, text);
}

static void time_table(const struct generate_report *r, FILE *to)
{
    static const char *const heading[] = {"rank", "attention", "merge", "gather", "dense", "other"};
    enum { COLUMNS = 6 };
    char(*cells)[TABLE_CELL_BYTES] = calloc((size_t)(r->n_ranks + 1) * COLUMNS, TABLE_CELL_BYTES);
    if (cells == NULL) return;
    for (int c = 0; c < COLUMNS; c++) snprintf(cells[c], TABLE_CELL_BYTES, "%s", heading[c]);
    for (int i = 0; i < r->n_ranks; i++) {
        const struct session_rank_report *k = &r->ranks[i];
        const double parts[] = {k->attend_s, k->merge_s, k->gather_s, k->dense_s, k->other_s};
        char(*row)[TABLE_CELL_BYTES] = cells + (i + 1) * COLUMNS;
        snprintf(row[0], TABLE_CELL_BYTES, "%d", i);
        for (int c = 0; c < 5; c++)
            snprintf(row[1 + c], TABLE_CELL_BYTES, "%.0f%%", 100.0 * share(parts[c], k->total_s));
    }
    table_print(to, r->n_ranks + 1, COLUMNS, cells);
    free(cells);
    fputs("% of the rank's time in the model; gather and merge include waiting for ranks.\n", to);
}

void generate_report_table(const struct generate_report *r, FILE *to)
{
    char a[TABLE_CELL_BYTES], b[TABLE_CELL_BYTES];
    putc('\n', to);
    memory_table(r, to);
    memory_notes(r, to);
    putc('\n', to);
    time_table(r, to);
    putc('\n', to);
    fprintf(to, "prompt: %zu token%s, %s tokens/s\n", r->prompt->n,
            message_s((int64_t)r->prompt->n),
            rate_text(rate((int64_t)r->prompt->n, r->times.prompt_s), a));
    fprintf(to, "answer: %zu token%s, %s tokens/s (the first comes with the prompt, uncounted)\n",
            r->ids->n, message_s((int64_t)r->ids->n),
            rate_text(rate(r->times.n_steps, r->times.generate_s), a));
    fprintf(to, "moved between ranks: %s by the merge, %s by gathers\n",
            table_bytes(merge_bytes(r), a), table_bytes(other_bytes(r), b));
    if (strcmp(r->stop, "context") == 0)
        fprintf(to, "stopped: the context of %lld token%s is full (--context)\n",
                (long long)r->context, message_s(r->context));
}

static void rank_json(struct json_out *j, const struct generate_report *r, int rank)
{
    const struct session_rank_report *k = &r->ranks[rank];
    jout_object(j, NULL);
    jout_int(j, "rank", rank);
    jout_int(j, "kv_tokens", k->kv_tokens);
    jout_int(j, "kv_bytes", (int64_t)k->kv_bytes);
    jout_int(j, "kv_huge_bytes", (int64_t)k->kv_huge_bytes);
    jout_int(j, "weight_bytes", (int64_t)k->weight_bytes);
    jout_int(j, "weight_share_bytes", (int64_t)k->weight_share_bytes);
    jout_int(j, "weight_replicated_bytes", (int64_t)k->weight_replicated_bytes);
    jout_int(j, "workspace_bytes", (int64_t)k->workspace_bytes);
    jout_int(j, "activation_bytes", (int64_t)k->activation_bytes);
    jout_int(j, "rest_bytes", rest_bytes(r, rank));
    jout_int(j, "peak_rss_bytes", (int64_t)k->peak_rss_bytes);
    jout_int(j, "peak_counted_bytes", (int64_t)k->peak_counted_bytes);
    jout_num(j, "attention_share", share(k->attend_s, k->total_s));
    jout_num(j, "merge_share", share(k->merge_s, k->total_s));
    jout_num(j, "gather_share", share(k->gather_s, k->total_s));
    jout_num(j, "dense_share", share(k->dense_s, k->total_s));
    jout_num(j, "other_share", share(k->other_s, k->total_s));
    jout_num(j, "attend_s", k->attend_s);
    jout_num(j, "merge_s", k->merge_s);
    jout_num(j, "gather_s", k->gather_s);
    jout_num(j, "dense_s", k->dense_s);
    jout_num(j, "other_s", k->other_s);
    jout_num(j, "total_s", k->total_s);
    jout_int(j, "merge_wire_bytes", (int64_t)k->merge_wire_bytes);
    jout_int(j, "other_wire_bytes", (int64_t)k->other_wire_bytes);
    jout_object_end(j);
}

void generate_report_json(const struct generate_report *r, FILE *to)
{
    struct json_out j;
    jout_begin(&j, to);
    jout_ints32(&j, "prompt_ids", r->prompt->ids, r->prompt->n);
    jout_ints32(&j, "ids", r->ids->ids, r->ids->n);
    jout_bytes(&j, "text", r->text != NULL ? r->text : "", r->n_text_bytes);
    jout_str(&j, "stop", r->stop);
    jout_int(&j, "ranks", r->n_ranks);
    jout_str(&j, "comm", r->comm);
    jout_int(&j, "context", r->context);
    jout_num(&j, "prompt_s", r->times.prompt_s);
    jout_num(&j, "generate_s", r->times.generate_s);
    jout_num(&j, "prompt_tokens_per_s", rate((int64_t)r->prompt->n, r->times.prompt_s));
    jout_num(&j, "generate_tokens_per_s", rate(r->times.n_steps, r->times.generate_s));
    jout_int(&j, "merge_wire_bytes", (int64_t)merge_bytes(r));
    jout_int(&j, "other_wire_bytes", (int64_t)other_bytes(r));
    jout_int(&j, "kv_page_tokens", r->ranks[0].kv_page_tokens);
    jout_str(&j, "replicated_weights", r->replicated_names != NULL ? r->replicated_names : "");
    jout_array(&j, "table");
    for (int i = 0; i < r->n_ranks; i++) rank_json(&j, r, i);
    jout_array_end(&j);
    jout_end(&j);
}
