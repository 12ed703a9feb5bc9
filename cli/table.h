/* SPDX-License-Identifier: Apache-2.0 */
/* Small tables for people, and numbers as people read them. */
#ifndef DCP_CLI_TABLE_H
#define DCP_CLI_TABLE_H

#include <stdint.h>
#include <stdio.h>

enum { TABLE_MAX_COLUMNS = 16, TABLE_CELL_BYTES = 24 };

/* Prints rows cells at a time, columns as wide as their widest cell, numbers to the right. cells
 * is [n_rows][n_columns]; row 0 is the heading. */
void table_print(FILE *to, int n_rows, int n_columns, char (*cells)[TABLE_CELL_BYTES]);
/* "1.50 MiB" into buf [TABLE_CELL_BYTES]; returns buf. */
const char *table_bytes(uint64_t n_bytes, char *buf);

#endif
