/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/kernel_list.h"

#include <stdio.h>

#include "kernels/kernels_priv.h"

struct list {
    struct kernel_choice *out;
    size_t n, max;
};

static void add(struct list *l, const char *family, const char *from, const char *to,
                const char *name)
{
    if (name == NULL) return;
    if (l->n < l->max) {
        struct kernel_choice *c = &l->out[l->n];
        c->family = family;
        c->name = name;
        snprintf(c->types, sizeof(c->types), to != NULL ? "%s -> %s" : "%s", from, to);
    }
    l->n++;
}

size_t kernel_list(dcp_isa isa, struct kernel_choice *out, size_t max)
{
    struct dcp__kernels k;
    struct list l = {out, 0, max};
    dcp__kernels_select(isa, &k);
    for (int t = DCP_F32; t <= DCP_FP8_E4M3; t++)
        add(&l, "attention", dcp_dtype_name((dcp_dtype)t), NULL, k.attn_name[t]);
    for (int t = DCP_F32; t <= DCP_BF16; t++) {
        for (int m = DCP_F32; m <= DCP_BF16; m++)
            add(&l, "merge", dcp_dtype_name((dcp_dtype)t), dcp_dtype_name((dcp_dtype)m),
                k.merge_row_name[t][m]);
    }
    for (int q = 0; q < 32; q++) add(&l, "product", dcp__q_name(q), NULL, k.qdot_name[q]);
    for (int q = 0; q < 32; q++) add(&l, "product i16", dcp__q_name(q), NULL, k.qdot16_name[q]);
    for (int q = 0; q < 32; q++) add(&l, "dequantise", dcp__q_name(q), NULL, k.dequant_name[q]);
    return l.n;
}
