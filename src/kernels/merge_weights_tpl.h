/* SPDX-License-Identifier: Apache-2.0 */
/* Weights and merged LSE of DCP__MERGE_ROWS rows at once, one row a lane; the contract is at
 * dcp__merge_weights_fn. The includer has the primitives of merge_vec_*.h and vmath_tpl.h, and
 * defines MERGE_WEIGHTS_FN. */
static inline vf weights_exp(vf x, bool is_base_2)
{
    return is_base_2 ? vm_exp_2(x) : vm_exp_e(x);
}

/* w[p][.] = exp(lse[p][.] - m); returns their sum, added in the order of the parts. */
static inline vf weights_raw(const float *lse, float *w, int n_parts, int lane, vf m,
                             bool is_base_2)
{
    vf sum = vf_set1(0.0f);
    for (int p = 0; p < n_parts; p++) {
        const int64_t at = (int64_t)p * DCP__MERGE_ROWS + lane;
        const vf e = weights_exp(vf_sub(vf_load_f32(lse, at), m), is_base_2);
        vf_store_f32(w, at, e);
        sum = vf_add(sum, e);
    }
    return sum;
}

void MERGE_WEIGHTS_FN(const float *lse, int n_parts, bool is_base_2, const float *sink, float *w,
                      float *merged_lse)
{
    const vf minus_inf = vf_set1(-INFINITY);
    const vf zero = vf_set1(0.0f);
    const vf one = vf_set1(1.0f);
    for (int lane = 0; lane < DCP__MERGE_ROWS; lane += VF_LANES) {
        vf top = minus_inf;
        for (int p = 0; p < n_parts; p++)
            top = vf_max(vf_load_f32(lse, (int64_t)p * DCP__MERGE_ROWS + lane), top);
        /* An all-empty row takes 0 as its maximum: -inf - 0 is defined, -inf - -inf is not. */
        vf m = vf_select_lt(minus_inf, top, top, zero);
        vf sum = weights_raw(lse, w, n_parts, lane, m, is_base_2);
        const vf some = vf_select_lt(zero, sum, sum, one);
        const vf log_sum = is_base_2 ? vm_log_2(some) : vm_log_e(some);
        vf_store_f32(merged_lse, lane,
                     vf_select_lt(minus_inf, top, vf_add(top, log_sum), minus_inf));
        if (sink != NULL) {
            /* The sink joins the denominator alone; it may be the largest term. */
            const vf s = vf_load_f32(sink, lane);
            m = vf_max(s, m);
            sum = weights_raw(lse, w, n_parts, lane, m, is_base_2);
            sum = vf_add(sum, weights_exp(vf_sub(s, m), is_base_2));
        }
        const vf whole = vf_select_lt(zero, sum, sum, one);
        for (int p = 0; p < n_parts; p++) {
            const int64_t at = (int64_t)p * DCP__MERGE_ROWS + lane;
            const vf x = vf_div(vf_load_f32(w, at), whole);
            /* A denormal weight counts as an underflow: no bits hang on flush-to-zero modes. */
            vf_store_f32(w, at, vf_select_lt(x, vf_set1(0x1p-126f), zero, x));
        }
    }
}
#undef MERGE_WEIGHTS_FN
