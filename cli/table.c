/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/table.h"

#include <string.h>

void table_print(FILE *to, int n_rows, int n_columns, char (*cells)[TABLE_CELL_BYTES])
{
    int width[TABLE_MAX_COLUMNS] = {0};
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < n_columns; c++) {
            const int len = (int)strlen(cells[r * n_columns + c]);
            if (len > width[c]) width[c] = len;
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < n_columns; c++)
            fprintf(to, "%s%*s", c == 0 ? "" : "  ", width[c], cells[r * n_columns + c]);
        putc('\n', to);
    }
}

const char *table_bytes(uint64_t n_bytes, char *buf)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)n_bytes;
    int u = 0;
    while (v >= 1024.0 && u < 4) {
        v /= 1024.0;
        u++;
    }
    snprintf(buf, TABLE_CELL_BYTES, u == 0 || v >= 99.95 ? "%.0f %s" : "%.1f %s", v, units[u]);
    return buf;
}
