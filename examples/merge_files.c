/* SPDX-License-Identifier: Apache-2.0 */
/* Partials that were dumped to files, merged in one process: was the merge of an engine right?
 * (`dcp-attn merge` does this for safetensors files.) A file is T x H x D floats, then T x H
 * natural LSEs, as fwrite leaves them.
 *
 *   cc merge_files.c $(pkg-config --cflags --libs dcpattn) -lm -o merge_files && ./merge_files
 *   merge_files T H D merged.bin rank0.bin rank1.bin ...        without arguments: checks itself */
#include <dcpattn/dcpattn.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARTS_MAX = 1024 };

static int read_part(const char *path, size_t n_out, size_t n_lse, dcp_merge_part *part)
{
    FILE *f = fopen(path, "rb");
    float *data = malloc((n_out + n_lse + 1) * sizeof(*data));
    const size_t n_read =
        f != NULL && data != NULL ? fread(data, sizeof(*data), n_out + n_lse + 1, f) : 0;
    if (f != NULL) (void)fclose(f);
    if (n_read != n_out + n_lse) {
        fprintf(stderr, "%s: %zu floats wanted, %zu there\n", path, n_out + n_lse, n_read);
        free(data);
        return 1;
    }
    const dcp_merge_part found = DCP_MERGE_PART_INIT;
    *part = found;
    part->out = data;
    part->lse = data + n_out;
    return 0;
}

static int merge_files(int64_t t, int64_t h, int64_t d, const char *to, int n, char **paths)
{
    const size_t n_out = (size_t)(t * h * d);
    const size_t n_lse = (size_t)(t * h);
    dcp_merge_part parts[PARTS_MAX];
    if (t < 1 || h < 1 || d < 1 || n < 1 || n > PARTS_MAX) return 2;
    for (int i = 0; i < n; i++) {
        if (read_part(paths[i], n_out, n_lse, &parts[i]) != 0) return 1;
    }
    float *merged = malloc((n_out + n_lse) * sizeof(*merged));
    if (merged == NULL) return 1;
    dcp_merge_local_args args = DCP_MERGE_LOCAL_ARGS_INIT;
    args.n_tokens = t;
    args.n_heads = h;
    args.dim = d;
    args.lse_base = DCP_LSE_BASE_E;
    args.n_parts = n;
    args.parts = parts;
    args.merged = merged;
    args.merged_lse = merged + n_out;
    dcp_merge_stats stats;
    if (dcp_merge_local(&args, &stats) != DCP_OK) {
        fprintf(stderr, "%s\n", dcp_last_error());
        return 1;
    }
    printf("%lld values not finite, %lld LSEs empty, %lld bad\n", (long long)stats.nonfinite_values,
           (long long)stats.lse_empty, (long long)stats.lse_bad);
    FILE *f = fopen(to, "wb");
    const size_t n_written = f != NULL ? fwrite(merged, sizeof(*merged), n_out + n_lse, f) : 0;
    const int closed = f != NULL ? fclose(f) : 1;
    free(merged);
    for (int i = 0; i < n; i++) free((void *)(uintptr_t)parts[i].out);
    return n_written == n_out + n_lse && closed == 0 ? 0 : 1;
}

/* Z = 2 and 8, outputs 0 and 10: 8, and log 10. */
static int check_itself(void)
{
    char dir[] = "merge_files_XXXXXX";
    if (mkdtemp(dir) == NULL) return 1;
    char path[3][64];
    char *inputs[2] = {path[1], path[2]};
    for (int i = 0; i < 3; i++) (void)snprintf(path[i], sizeof(path[i]), "%s/%d", dir, i);
    for (int i = 1; i < 3; i++) {
        const float data[2] = {i == 1 ? 0.0f : 10.0f, logf(i == 1 ? 2.0f : 8.0f)};
        FILE *f = fopen(path[i], "wb");
        if (f == NULL || fwrite(data, sizeof(data), 1, f) != 1 || fclose(f) != 0) return 1;
    }
    float got[2] = {0, 0};
    int rc = merge_files(1, 1, 1, path[0], 2, inputs);
    FILE *f = rc == 0 ? fopen(path[0], "rb") : NULL;
    if (f == NULL || fread(got, sizeof(got), 1, f) != 1) rc = 1;
    if (f != NULL) (void)fclose(f);
    if (fabsf(got[0] - 8.0f) > 1e-5f || fabsf(got[1] - logf(10.0f)) > 1e-6f) rc = 1;
    if (rc == 0)
        printf("ok: %f, LSE %f\n", (double)got[0], (double)got[1]);
    else
        fprintf(stderr, "%f, LSE %f; 8 and log 10 would be right\n", (double)got[0],
                (double)got[1]);
    for (int i = 0; i < 3; i++) (void)unlink(path[i]);
    (void)rmdir(dir);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc == 1) return check_itself();
    if (argc < 6) {
        fprintf(stderr, "merge_files T H D merged.bin rank0.bin rank1.bin ...\n");
        return 2;
    }
    return merge_files(atoll(argv[1]), atoll(argv[2]), atoll(argv[3]), argv[4], argc - 5, argv + 5);
}
