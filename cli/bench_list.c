/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A number with K, M, G (powers of 1024). */
static bool read_number(const char **at, int64_t *value_out)
{
    char *end = NULL;
    long long v = strtoll(*at, &end, 10);
    if (end == *at || v < 0) return false;
    static const char units[] = "KMG";
    const char *unit = *end != '\0' ? strchr(units, *end) : NULL;
    if (unit != NULL) {
        const int shift = 10 * (int)(unit - units + 1);
        if (v > (INT64_MAX >> (shift + 1))) return false;
        v <<= shift;
        end++;
    }
    *at = end;
    *value_out = v;
    return true;
}

static bool push(struct bench_list *l, int64_t value, int64_t low, int64_t high)
{
    if (l->n == BENCH_MAX_ITEMS || value < low || value > high) return false;
    l->at[l->n++] = value;
    return true;
}

bool bench_read_list(const char *text, double factor, int64_t low, int64_t high,
                     struct bench_list *l)
{
    for (const char *at = text; at != NULL;) {
        int64_t a, b;
        if (!read_number(&at, &a)) return false;
        if (strncmp(at, "..", 2) == 0) {
            at += 2;
            if (!read_number(&at, &b) || b < a || a < 1) return false;
            double x = (double)a;
            for (; x <= (double)b * (1.0 + 1e-9); x *= factor)
                if (!push(l, (int64_t)x, low, high)) return false;
            /* The end as well, where no step meets it. */
            if (l->at[l->n - 1] < b && !push(l, b, low, high)) return false;
        } else if (!push(l, a, low, high)) {
            return false;
        }
        if (*at == '\0') return true;
        if (*at++ != ',') return false;
    }
    return true;
}

bool bench_read_names(const char *text, int64_t (*find)(const char *), struct bench_list *l)
{
    char item[32];
    while (text != NULL) {
        const size_t len = strcspn(text, ",");
        if (len >= sizeof(item)) return false;
        snprintf(item, sizeof(item), "%.*s", (int)len, text);
        const int64_t i = find(item);
        if (i < 0 || !push(l, i, 0, INT64_MAX)) return false;
        if (text[len] == '\0') break;
        text += len + 1; /* behind a comma there must be a name */
        while (*text == ' ') text++;
    }
    return true;
}
