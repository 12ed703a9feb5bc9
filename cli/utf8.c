/* SPDX-License-Identifier: Apache-2.0 */
/* Table 3-7 of the Unicode standard: the second byte's range depends on the first, later bytes are
 * 80..BF. Errors are cut at maximal subparts, as the standard recommends. */
#include "cli/utf8.h"

/* Length that the first byte promises, 0 if it can begin nothing; the range of the second byte. */
static size_t promised(unsigned char b, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xBF;
    if (b < 0x80) return 1;
    if (b >= 0xC2 && b <= 0xDF) return 2;
    if (b >= 0xE0 && b <= 0xEF) {
        if (b == 0xE0) *lo = 0xA0;
        if (b == 0xED) *hi = 0x9F;
        return 3;
    }
    if (b >= 0xF0 && b <= 0xF4) {
        if (b == 0xF0) *lo = 0x90;
        if (b == 0xF4) *hi = 0x8F;
        return 4;
    }
    return 0;
}

/* Bytes of the sequence at s that are as they should be, up to its promised length. */
static size_t good_prefix(const char *s, size_t n_bytes, size_t *promised_out)
{
    unsigned char lo, hi;
    *promised_out = promised((unsigned char)s[0], &lo, &hi);
    if (*promised_out == 0) return 0;
    size_t n = 1;
    while (n < *promised_out && n < n_bytes) {
        const unsigned char b = (unsigned char)s[n];
        if (b < lo || b > hi) break;
        lo = 0x80;
        hi = 0xBF;
        n++;
    }
    return n;
}

size_t utf8_next(const char *s, size_t n_bytes, bool *is_valid_out)
{
    size_t want;
    const size_t n = good_prefix(s, n_bytes, &want);
    *is_valid_out = n > 0 && n == want;
    return n > 0 ? n : 1;
}

size_t utf8_incomplete_tail(const char *s, size_t n_bytes)
{
    for (size_t back = 1; back <= 3 && back <= n_bytes; back++) {
        size_t want;
        const size_t n = good_prefix(s + n_bytes - back, back, &want);
        if (n == back && n < want) return back;
    }
    return 0;
}

bool utf8_is_valid(const char *s, size_t n_bytes)
{
    bool valid = true;
    for (size_t i = 0; i < n_bytes && valid;) i += utf8_next(s + i, n_bytes - i, &valid);
    return valid;
}

void utf8_print_escaped(FILE *to, const char *s, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes;) {
        bool valid;
        const size_t n = utf8_next(s + i, n_bytes - i, &valid);
        const unsigned char c = (unsigned char)s[i];
        if (c == '\\' || c == '"') {
            fprintf(to, "\\%c", c);
        } else if (c == '\n') {
            fputs("\\n", to);
        } else if (!valid || c < 0x20 || c == 0x7F) {
            for (size_t k = 0; k < n; k++) fprintf(to, "\\x%02x", (unsigned char)s[i + k]);
        } else {
            fwrite(s + i, 1, n, to);
        }
        i += n;
    }
}
