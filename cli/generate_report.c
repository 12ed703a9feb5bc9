/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/generate_report.h"

#include <stdlib.h>
#include <string.h>

#include "cli/json_out.h"
#include "cli/table.h"

/* Share of a rank's time; waiting for slower ranks is inside the part that waits. */
static double share(double part_s, double total_s)
{
    return total_s > 0.0 ? part_s / total_s : 0.0;
}

static double other_share(const struct session_rank_report *r)
{
    const double rest = 1.0 - share(r->attend_s, r->total_s) - share(r->merge_s, r->total_s);
    return rest > 0.0 ? rest : 0.0;
}

static double rate(double n, double s)
{
    return s > 0.0 ? n / s : 0.0;
}

static uint64_t merge_bytes(const struct generate_report *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->n_ranks; i++) sum += r->ranks[i].merge_wire_bytes;
    return sum;
}

void generate_report_table(const struct generate_report *r, FILE *to)
{
    static const char *const heading[] = {"rank",      "KV tokens",  "KV bytes",
                                          "weights",   "replicated", "peak RSS",
                                          "attention", "merge",      "other"};
    enum { COLUMNS = 9 };
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
        table_bytes(k->weight_replicated_bytes, row[4]);
        table_bytes(k->peak_rss_bytes, row[5]);
        snprintf(row[6], TABLE_CELL_BYTES, "%.0f%%", 100.0 * share(k->attend_s, k->total_s));
        snprintf(row[7], TABLE_CELL_BYTES, "%.0f%%", 100.0 * share(k->merge_s, k->total_s));
        snprintf(row[8], TABLE_CELL_BYTES, "%.0f%%", 100.0 * other_share(k));
    }
    putc('\n', to);
    table_print(to, r->n_ranks + 1, COLUMNS, cells);
    free(cells);
    char moved[TABLE_CELL_BYTES];
    fprintf(
        to,
        "prompt %zu tokens, %.1f tokens/s; generated %zu tokens, %.1f tokens/s; the merge moved "
        "%s\n",
        r->prompt->n, rate((double)r->prompt->n, r->times.prompt_s), r->ids->n,
        rate((double)r->times.n_steps, r->times.generate_s), table_bytes(merge_bytes(r), moved));
    if (r->n_ranks > 1 && r->replicated_names != NULL && r->replicated_names[0] != '\0')
        fprintf(to, "replicated on every rank: %s\n", r->replicated_names);
    if (r->n_ranks > 1 && strcmp(r->comm, "threads") == 0)
        fprintf(to, "ranks are threads of one process: peak RSS is the process's\n");
    if (strcmp(r->stop, "context") == 0)
        fprintf(to, "stopped: the context of %lld tokens is full (--context)\n",
                (long long)r->context);
}

static void rank_json(struct json_out *j, int rank, const struct session_rank_report *k)
{
    jout_object(j, NULL);
    jout_int(j, "rank", rank);
    jout_int(j, "kv_tokens", k->kv_tokens);
    jout_int(j, "kv_bytes", (int64_t)k->kv_bytes);
    jout_int(j, "weight_bytes", (int64_t)k->weight_bytes);
    jout_int(j, "weight_share_bytes", (int64_t)k->weight_share_bytes);
    jout_int(j, "weight_replicated_bytes", (int64_t)k->weight_replicated_bytes);
    jout_int(j, "workspace_bytes", (int64_t)k->workspace_bytes);
    jout_int(j, "activation_bytes", (int64_t)k->activation_bytes);
    jout_int(j, "peak_rss_bytes", (int64_t)k->peak_rss_bytes);
    jout_int(j, "peak_counted_bytes", (int64_t)k->peak_counted_bytes);
    jout_num(j, "attention_share", share(k->attend_s, k->total_s));
    jout_num(j, "merge_share", share(k->merge_s, k->total_s));
    jout_num(j, "other_share", other_share(k));
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
    jout_num(&j, "prompt_tokens_per_s", rate((double)r->prompt->n, r->times.prompt_s));
    jout_num(&j, "generate_tokens_per_s", rate((double)r->times.n_steps, r->times.generate_s));
    jout_int(&j, "merge_wire_bytes", (int64_t)merge_bytes(r));
    jout_str(&j, "replicated_weights", r->replicated_names != NULL ? r->replicated_names : "");
    jout_array(&j, "table");
    for (int i = 0; i < r->n_ranks; i++) rank_json(&j, i, &r->ranks[i]);
    jout_array_end(&j);
    jout_end(&j);
}
