/* SPDX-License-Identifier: Apache-2.0 */
/* Geometry and names of the block types. */
#include "kernels/kernels_priv.h"

static const struct {
    int qtype;
    int elems;
    int bytes;
    const char *name;
} types[] = {
    {DCP__Q_F32, 1, 4, "F32"},       {DCP__Q_F16, 1, 2, "F16"},
    {DCP__Q_BF16, 1, 2, "BF16"},     {DCP__Q_Q4_0, 32, 18, "Q4_0"},
    {DCP__Q_Q4_1, 32, 20, "Q4_1"},   {DCP__Q_Q5_0, 32, 22, "Q5_0"},
    {DCP__Q_Q5_1, 32, 24, "Q5_1"},   {DCP__Q_Q8_0, 32, 34, "Q8_0"},
    {DCP__Q_Q4_K, 256, 144, "Q4_K"}, {DCP__Q_Q5_K, 256, 176, "Q5_K"},
    {DCP__Q_Q6_K, 256, 210, "Q6_K"},
};

/* Index into types, or -1. */
static int find_type(int qtype)
{
    for (int i = 0; i < (int)(sizeof(types) / sizeof(types[0])); i++)
        if (types[i].qtype == qtype) return i;
    return -1;
}

int64_t dcp__q_block_elems(int qtype)
{
    const int i = find_type(qtype);
    return i < 0 ? 0 : types[i].elems;
}

size_t dcp__q_block_bytes(int qtype)
{
    const int i = find_type(qtype);
    return i < 0 ? 0 : (size_t)types[i].bytes;
}

const char *dcp__q_name(int qtype)
{
    const int i = find_type(qtype);
    return i < 0 ? "?" : types[i].name;
}
