/* SPDX-License-Identifier: Apache-2.0 */
/* Block layouts of the quantised types, as byte offsets (blocks are packed and unaligned). d and m
 * are f16. The value of element i:
 *
 *   type  bytes  OFFSET CONTENT                                         VALUE
 *   Q4_0  18     0 d, 2 qs[16]                                          d * (q - 8)
 *   Q4_1  20     0 d, 2 m, 4 qs[16]                                     d * q + m
 *   Q5_0  22     0 d, 2 qh[4], 6 qs[16]                                 d * (q - 16)
 *   Q5_1  24     0 d, 2 m, 4 qh[4], 8 qs[16]                            d * q + m
 *   Q8_0  34     0 d, 2 qs[32] (signed)                                 d * q
 *     low nibbles of qs hold elements 0..15, high nibbles 16..31; bit i of qh is bit 4 of element i
 *   Q4_K  144    0 d, 2 dmin, 4 scales[12], 16 qs[128]                  (d sc) q - (dmin m)
 *   Q5_K  176    0 d, 2 dmin, 4 scales[12], 16 qh[32], 48 qs[128]       (d sc) q - (dmin m)
 *     eight groups of 32 with 6-bit sc and m each; byte j of qs chunk c (32 bytes) holds element j
 *     of group 2c (low nibble) and of group 2c + 1 (high); bit g of qh[j] is bit 4 of element j of
 *     group g
 *   Q6_K  210    0 ql[128], 128 qh[64], 192 sc[16] (signed), 208 d      (d sc) (q - 32)
 *     two halves of 128: ql 64 bytes, qh 32 bytes each; element 32 a + j of a half (a = 0..3) has
 *     its low nibble in ql[32 (a & 1) + j] (high nibble if a >= 2) and bits 4, 5 in qh[j] >> 2 a;
 *     one scale per 16 elements
 *
 * The products in the order of the parentheses are rounded to f32 one by one: dequantised values
 * have the same bits on every ISA. */
#ifndef DCP_KERNELS_QUANT_PRIV_H
#define DCP_KERNELS_QUANT_PRIV_H

#include <stdint.h>
#include <string.h>

enum {
    DCP__Q_SMALL = 32, /* elements of the simple blocks */
    DCP__Q_SUPER = 256 /* elements of the _K blocks */
};

static inline uint16_t dcp__load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline uint32_t dcp__load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}

/* The 12 scale bytes of Q4_K and Q5_K to sm[0..7] = sc, sm[8..15] = m. Groups 0..3 keep their six
 * bits in bytes 0..3 (sc) and 4..7 (m); groups 4..7 have their low four bits in bytes 8..11 (sc low
 * nibble, m high nibble), and the top two bits in what is left of bytes 0..3 and 4..7. */
static inline void dcp__k_scales(const uint8_t *scales, uint8_t sm[16])
{
    const uint32_t a = dcp__load_u32(scales), b = dcp__load_u32(scales + 4);
    const uint32_t c = dcp__load_u32(scales + 8);
    const uint32_t out[4] = {
        a & 0x3f3f3f3fu,
        (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u),
        b & 0x3f3f3f3fu,
        ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u),
    };
    memcpy(sm, out, sizeof(out));
}

#endif
