/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzz targets share. A target defines LLVMFuzzerTestOneInput and is built in two ways:
 *
 *   with -DDCP_FUZZ_MAIN   main() damages the sound files named on its command line, the same way
 *                          for the same seed:  fuzz_x ROUNDS SEED [FILE...]  (none: random bytes).
 *                          A round has a seed of its own, so that ROUNDS 1 replays a finding.
 *   without                libFuzzer brings main(): clang -fsanitize=fuzzer (CMake: DCP_LIBFUZZER)
 *
 * A target says what must hold by fuzz_require; sanitizers say the rest. */
#ifndef DCP_FUZZ_DRIVER_H
#define DCP_FUZZ_DRIVER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((visibility("default"))) int LLVMFuzzerTestOneInput(const uint8_t *data,
                                                                  size_t n_bytes);

static unsigned long long fuzz_seed_now;

#define fuzz_require(condition)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "finding: %s:%d: not %s; replay with: 1 %llu\n", __FILE__, __LINE__,   \
                    #condition, fuzz_seed_now);                                                    \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* The input as a file, for readers that take a path; the path is good until the next call. */
static inline const char *fuzz_path(const uint8_t *data, size_t n_bytes)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        fuzz_require(fd >= 0);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    fuzz_require(ftruncate(fd, 0) == 0);
    fuzz_require(n_bytes == 0 || pwrite(fd, data, n_bytes, 0) == (ssize_t)n_bytes);
    return path;
}

#ifdef DCP_FUZZ_MAIN
static uint64_t fuzz_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Damages n bytes in place; returns how many are kept. Most changes hit the head of the file, where
 * counts, lengths and names stand. */
static size_t fuzz_damage(uint64_t *seed, uint8_t *bytes, size_t n)
{
    static const uint64_t hard[] = {
        0,          1,         0x7f,       0xff,       UINT32_MAX,      1ull << 31,
        1ull << 32, INT64_MAX, UINT64_MAX, 1ull << 63, UINT64_MAX - 31, '"',
        '}',        '-'};
    const size_t n_changes = 1 + fuzz_random(seed) % 4;
    for (size_t i = 0; i < n_changes && n > 0; i++) {
        const size_t span = fuzz_random(seed) % 4 != 0 && n > 512 ? 512 : n;
        const size_t at = fuzz_random(seed) % span;
        const uint64_t r = fuzz_random(seed);
        const size_t width = (size_t)1 << (r >> 8) % 4;
        switch (r % 5) {
        case 0:
            bytes[at] ^= (uint8_t)(1u << (r >> 16) % 8);
            break;
        case 1:
            bytes[at] = (uint8_t)(r >> 16);
            break;
        case 2:
            if (n - at >= width) memcpy(bytes + at, &hard[(r >> 16) % 14], width);
            break;
        case 3: { /* a piece of the file at another place */
            const size_t from = fuzz_random(seed) % span;
            const size_t longest = n - (from > at ? from : at);
            memmove(bytes + at, bytes + from, (r >> 16) % 32 % (longest + 1));
            break;
        }
        default:
            if (r >> 16 & 1) n = at + 1;
        }
    }
    return n;
}

static uint8_t *fuzz_read_file(const char *path, size_t *n_bytes_out)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL || fseek(f, 0, SEEK_END) != 0) {
        fprintf(stderr, "cannot read %s\n", path);
        exit(2);
    }
    *n_bytes_out = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*n_bytes_out + 1);
    if (bytes == NULL || fread(bytes, 1, *n_bytes_out, f) != *n_bytes_out) exit(2);
    fclose(f);
    return bytes;
}

int main(int argc, char **argv)
{
    enum { RANDOM_BYTES = 256 };
    if (argc < 3) {
        fprintf(stderr, "usage: %s ROUNDS SEED [FILE...]\n", argv[0]);
        return 2;
    }
    const unsigned long long n_rounds = strtoull(argv[1], NULL, 0);
    const unsigned long long first = strtoull(argv[2], NULL, 0);
    const size_t n_files = (size_t)(argc - 3);
    uint8_t **sound = calloc(n_files + 1, sizeof(*sound));
    size_t *n_sound = calloc(n_files + 1, sizeof(*n_sound));
    if (sound == NULL || n_sound == NULL) return 2;
    for (size_t i = 0; i < n_files; i++) {
        sound[i] = fuzz_read_file(argv[3 + i], &n_sound[i]);
        (void)LLVMFuzzerTestOneInput(sound[i], n_sound[i]);
    }
    for (unsigned long long round = 0; round < n_rounds; round++) {
        fuzz_seed_now = first + round;
        uint64_t seed = fuzz_seed_now;
        const size_t i = n_files == 0 ? 0 : fuzz_random(&seed) % n_files;
        /* Exactly as large as the input, so that a sanitizer sees a read beyond it. */
        size_t n = n_files == 0 ? 1 + fuzz_random(&seed) % RANDOM_BYTES : n_sound[i];
        uint8_t *bytes = malloc(n + 1);
        if (bytes == NULL) return 2;
        if (n_files > 0) {
            memcpy(bytes, sound[i], n);
            n = fuzz_damage(&seed, bytes, n);
        } else {
            for (size_t k = 0; k < n; k++) bytes[k] = (uint8_t)fuzz_random(&seed);
        }
        (void)LLVMFuzzerTestOneInput(bytes, n);
        free(bytes);
    }
    for (size_t i = 0; i < n_files; i++) free(sound[i]);
    free(sound);
    free(n_sound);
    printf("%llu rounds from seed %llu, no finding\n", n_rounds, first);
    return 0;
}
#endif
#endif
