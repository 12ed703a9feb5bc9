/* SPDX-License-Identifier: Apache-2.0 */
/* One row of the merge, and rows of two parts, for one pair of types. The includer has the
 * primitives of merge_vec_*.h and defines, for this inclusion:
 *   MERGE_FN       the function's name; that for rows of two parts has _pair behind it
 *   MERGE_LOAD     vf_load_<part type>       MERGE_PART_BYTES  bytes of a part's element
 *   MERGE_STORE    vf_store_<merged type>    MERGE_PART, MERGE_MERGED  the dcp_dtype of each
 *   MERGE_STORE_WHOLE  optional: MERGE_STORE for whole blocks (streaming kernels)
 *   MERGE_LOAD2, MERGE_STORE2  optional: two vectors at once, in any order of their elements that
 *                  is the same for both
 *   MERGE_PACK2, MERGE_PACKED, MERGE_PACKED_BAD, MERGE_PACKED_STORE  optional, with MERGE_LOAD2:
 *                  the elements of two sums as they are stored, and whether any is not finite
 *
 * A block of MERGE_UNROLL vectors is summed in registers, looked at, and only then stored: the
 * destination may be one of the parts. Weights are positive, so a non-finite input gives a
 * non-finite sum: one test of the sums finds what a test of every input would. The rare block that
 * has one (or overflowed) goes to dcp__merge_row_plain, the same arithmetic element by element.
 *
 * Two parts, the commonest number, have a loop of their own over many rows: rows from memory are as
 * fast as prefetches are issued, rows of 512 bytes as a call a row allows, and each instruction
 * between two of them counts. Measured in turns: alltoall of (64, 64, 128) float32 over MPI,
 * 2 to 3 % less time than with a call a row. The lines of the result are fetched there, too, where
 * the caller says that its rows go on. */
#define MERGE_BLOCK (MERGE_UNROLL * VF_LANES)
#ifndef MERGE_STORE_WHOLE
#define MERGE_STORE_WHOLE MERGE_STORE
#endif
#ifdef MERGE_LOAD2
#define MERGE_LOAD_BLOCK(x, p, at)                                                                 \
    for (int u_ = 0; u_ < MERGE_UNROLL; u_ += 2)                                                   \
    MERGE_LOAD2(p, (at) + u_ * VF_LANES, &(x)[u_], &(x)[u_ + 1])
#define MERGE_STORE_BLOCK(x, p, at)                                                                \
    for (int u_ = 0; u_ < MERGE_UNROLL; u_ += 2)                                                   \
    MERGE_STORE2(p, (at) + u_ * VF_LANES, (x)[u_], (x)[u_ + 1])
#else
#define MERGE_LOAD_BLOCK(x, p, at)                                                                 \
    for (int u_ = 0; u_ < MERGE_UNROLL; u_++) (x)[u_] = MERGE_LOAD(p, (at) + u_ * VF_LANES)
#define MERGE_STORE_BLOCK(x, p, at)                                                                \
    for (int u_ = 0; u_ < MERGE_UNROLL; u_++) MERGE_STORE_WHOLE(p, (at) + u_ * VF_LANES, (x)[u_])
#endif
/* The function's name and a tail: each inclusion has its own. */
#define MERGE_PASTE_(a, b) a##b
#define MERGE_PASTE(a, b) MERGE_PASTE_(a, b)
#define MERGE_REST MERGE_PASTE(MERGE_FN, _rest)
#define MERGE_PAIR MERGE_PASTE(MERGE_FN, _pair)
#define MERGE_MERGED_BYTES (MERGE_MERGED == DCP_F32 ? 4 : 2)
#define MERGE_ANY_BAD(sum) merge_any_bad(sum, MERGE_UNROLL)

#ifndef MERGE_ONCE
#define MERGE_ONCE
/* 0 times a finite number is 0, times anything else NaN: one test for the whole block. */
static inline bool merge_any_bad(const vf *sum, int n)
{
    vf mark = vf_mul(sum[0], vf_set1(0.0f));
    for (int u = 1; u < n; u++) mark = vf_fma(sum[u], vf_set1(0.0f), mark);
    return vbad_any(vf_bad(mark));
}
#endif

static __attribute__((noinline)) int64_t MERGE_REST(const void *const *parts, const float *w,
                                                    int n_parts, int64_t d, int64_t dim, void *dst,
                                                    bool zero_nonfinite, const void *const *ahead,
                                                    int *first_part_out)
{
    int64_t n_bad = 0;
    for (; d + MERGE_BLOCK <= dim; d += MERGE_BLOCK) {
        vf sum[MERGE_UNROLL];
        vf x[MERGE_UNROLL];
        const vf w0 = vf_set1(w[0]);
        MERGE_LOAD_BLOCK(x, parts[0], d);
        for (int u = 0; u < MERGE_UNROLL; u++) sum[u] = vf_mul(w0, x[u]);
        for (int p = 1; p < n_parts; p++) {
            const vf wp = vf_set1(w[p]);
            MERGE_LOAD_BLOCK(x, parts[p], d);
            for (int u = 0; u < MERGE_UNROLL; u++) sum[u] = vf_fma(wp, x[u], sum[u]);
        }
        if (ahead != NULL) {
            for (int p = 0; p < n_parts; p++) {
                const char *line = (const char *)ahead[p] + d * MERGE_PART_BYTES;
                for (int b = 0; b < MERGE_BLOCK * MERGE_PART_BYTES; b += 64)
                    __builtin_prefetch(line + b, 0, 3);
            }
        }
        if (__builtin_expect(MERGE_ANY_BAD(sum), 0)) {
            n_bad += dcp__merge_row_plain(MERGE_PART, MERGE_MERGED, parts, w, n_parts, d,
                                          d + MERGE_BLOCK, dst, zero_nonfinite, first_part_out);
            continue;
        }
        MERGE_STORE_BLOCK(sum, dst, d);
    }
    for (; d + VF_LANES <= dim; d += VF_LANES) {
        vf sum = vf_mul(vf_set1(w[0]), MERGE_LOAD(parts[0], d));
        for (int p = 1; p < n_parts; p++) sum = vf_fma(vf_set1(w[p]), MERGE_LOAD(parts[p], d), sum);
        if (__builtin_expect(vbad_any(vf_bad(sum)), 0))
            n_bad += dcp__merge_row_plain(MERGE_PART, MERGE_MERGED, parts, w, n_parts, d,
                                          d + VF_LANES, dst, zero_nonfinite, first_part_out);
        else
            MERGE_STORE(dst, d, sum);
    }
    if (d < dim) /* fewer elements than lanes */
        n_bad += dcp__merge_row_plain(MERGE_PART, MERGE_MERGED, parts, w, n_parts, d, dim, dst,
                                      zero_nonfinite, first_part_out);
    return n_bad;
}

int MERGE_PAIR(const struct dcp__merge_pair *pair, int64_t dim, bool zero_nonfinite,
               int64_t *n_bad_out, int *first_part_out)
{
    const char *part_0 = pair->parts[0];
    const char *part_1 = pair->parts[1];
    const char *next_0 = pair->ahead[0];
    const char *next_1 = pair->ahead[1];
    char *dst = pair->dst;
    const int64_t row_bytes = dim * MERGE_PART_BYTES;
    const bool starts_0 = next_0 != part_0 && pair->part_hop[0] == row_bytes;
    const bool starts_1 = next_1 != part_1 && pair->part_hop[1] == row_bytes;
    const bool fetches = pair->dst_ahead > 0;
    *n_bad_out = 0;
    for (int row = 0; row < pair->n_rows; row++) {
        const vf w0 = vf_set1(pair->w[0][row]);
        const vf w1 = vf_set1(pair->w[1][row]);
        int64_t d = 0;
        for (; d + MERGE_BLOCK <= dim; d += MERGE_BLOCK) {
            for (int b = 0; b < MERGE_BLOCK * MERGE_PART_BYTES; b += 64) {
                __builtin_prefetch(next_0 + d * MERGE_PART_BYTES + b, 0, 3);
                __builtin_prefetch(next_1 + d * MERGE_PART_BYTES + b, 0, 3);
            }
            for (int b = 0; b < MERGE_BLOCK * MERGE_MERGED_BYTES && fetches; b += 64)
                __builtin_prefetch(dst + pair->dst_ahead + d * MERGE_MERGED_BYTES + b, 1, 3);
            vf sum[MERGE_UNROLL];
            vf x[MERGE_UNROLL];
            MERGE_LOAD_BLOCK(x, part_0, d);
            for (int u = 0; u < MERGE_UNROLL; u++) sum[u] = vf_mul(w0, x[u]);
            MERGE_LOAD_BLOCK(x, part_1, d);
            for (int u = 0; u < MERGE_UNROLL; u++) sum[u] = vf_fma(w1, x[u], sum[u]);
#ifdef MERGE_PACK2
            MERGE_PACKED out[MERGE_UNROLL / 2];
            for (int u = 0; u < MERGE_UNROLL / 2; u++)
                out[u] = MERGE_PACK2(sum[2 * u], sum[2 * u + 1]);
            if (__builtin_expect(MERGE_PACKED_BAD(out), 0)) break;
            for (int u = 0; u < MERGE_UNROLL / 2; u++)
                MERGE_PACKED_STORE(dst, d + 2 * u * VF_LANES, out[u]);
#else
            if (__builtin_expect(MERGE_ANY_BAD(sum), 0)) break;
            MERGE_STORE_BLOCK(sum, dst, d);
#endif
        }
        if (starts_0) dcp__merge_start_page(next_0, row_bytes);
        if (starts_1) dcp__merge_start_page(next_1, row_bytes);
        if (d < dim) {
            const void *const parts[2] = {part_0, part_1};
            const float w[2] = {pair->w[0][row], pair->w[1][row]};
            *n_bad_out = MERGE_REST(parts, w, 2, d, dim, dst, zero_nonfinite, NULL, first_part_out);
            if (*n_bad_out != 0) return row + 1;
        }
        part_0 += pair->part_hop[0];
        part_1 += pair->part_hop[1];
        next_0 += pair->part_hop[0];
        next_1 += pair->part_hop[1];
        dst += pair->dst_hop;
    }
    return pair->n_rows;
}

int64_t MERGE_FN(const void *const *parts, const float *w, int n_parts, int64_t dim, void *dst,
                 bool zero_nonfinite, const void *const *ahead, int *first_part_out)
{
    if (n_parts != 2)
        return MERGE_REST(parts, w, n_parts, 0, dim, dst, zero_nonfinite, ahead, first_part_out);
    const void *const *next = ahead != NULL ? ahead : parts;
    const struct dcp__merge_pair pair = {.parts = {parts[0], parts[1]},
                                         .ahead = {next[0], next[1]},
                                         .w = {&w[0], &w[1]},
                                         .dst = dst,
                                         .n_rows = 1};
    int64_t n_bad;
    (void)MERGE_PAIR(&pair, dim, zero_nonfinite, &n_bad, first_part_out);
    return n_bad;
}

#undef MERGE_ANY_BAD
#undef MERGE_MERGED_BYTES
#undef MERGE_PACK2
#undef MERGE_PACKED
#undef MERGE_PACKED_BAD
#undef MERGE_PACKED_STORE
#undef MERGE_REST
#undef MERGE_PAIR
#undef MERGE_PASTE
#undef MERGE_PASTE_
#undef MERGE_BLOCK
#undef MERGE_LOAD_BLOCK
#undef MERGE_STORE_BLOCK
#undef MERGE_STORE_WHOLE
#undef MERGE_LOAD2
#undef MERGE_STORE2
#undef MERGE_FN
#undef MERGE_LOAD
#undef MERGE_STORE
#undef MERGE_PART
#undef MERGE_PART_BYTES
#undef MERGE_MERGED
