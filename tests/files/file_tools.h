/* SPDX-License-Identifier: Apache-2.0 */
/* Whole files in memory, scratch files, seeded damage. */
#ifndef TESTS_FILES_FILE_TOOLS_H
#define TESTS_FILES_FILE_TOOLS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct bytes {
    unsigned char *data;
    size_t n;
};

static inline struct bytes file_bytes(const char *path)
{
    struct bytes b = {NULL, 0};
    FILE *f = fopen(path, "rb");
    if (f == NULL) return b;
    fseek(f, 0, SEEK_END);
    b.n = (size_t)ftell(f);
    fseek(f, 0, SEEK_SET);
    b.data = malloc(b.n + 1);
    if (b.data != NULL && fread(b.data, 1, b.n, f) != b.n) b.n = 0;
    fclose(f);
    return b;
}

/* A path of this process in the build folder. */
static inline const char *scratch_path(const char *name)
{
    static char path[512];
    snprintf(path, sizeof(path), "%s/%ld-%s", DCP_BINARY_DIR, (long)getpid(), name);
    return path;
}

static inline int write_file(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL) return -1;
    const size_t put = fwrite(data, 1, n, f);
    return fclose(f) == 0 && put == n ? 0 : -1;
}

/* xorshift64*: the same numbers everywhere. */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

/* One to four changes within the first n_front bytes: a bit, a byte of an interesting value, a word
 * of an interesting value, or a stretch copied over another. */
static inline void damage(unsigned char *data, size_t n_front, uint64_t *state)
{
    static const uint64_t words[] = {0,         1,          0x7f,           0xff,
                                     0xffff,    0x7fffffff, 0xffffffff,     UINT64_C(0x100000000),
                                     INT64_MAX, UINT64_MAX, UINT64_MAX / 8, UINT64_MAX / 2 - 31};
    const uint64_t n_changes = 1 + next_random(state) % 4;
    for (uint64_t c = 0; c < n_changes; c++) {
        const size_t at = (size_t)(next_random(state) % n_front);
        const uint64_t word = words[next_random(state) % (sizeof(words) / sizeof(words[0]))];
        switch (next_random(state) % 4) {
        case 0:
            data[at] ^= (unsigned char)(1u << (next_random(state) % 8));
            break;
        case 1:
            data[at] = (unsigned char)word;
            break;
        case 2:
            memcpy(data + at, &word, n_front - at < 8 ? n_front - at : 8);
            break;
        default: {
            const size_t from = (size_t)(next_random(state) % n_front);
            const size_t most = n_front - (at > from ? at : from);
            memmove(data + at, data + from,
                    (size_t)(next_random(state) % (most < 64 ? most + 1 : 64)));
        }
        }
    }
}

#endif
