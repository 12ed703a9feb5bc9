/* SPDX-License-Identifier: Apache-2.0 */
/* exp and log of the merge, written once. The includer has defined a vector type vf, an integer
 * type vu of the same lanes, and the primitives vf_* and vu_* (see merge_vec_scalar.h). Every step
 * is one correctly rounded IEEE operation or an integer operation, in this order, so the lanes of
 * every instruction set carry the same bits.
 *
 * Coefficients: minimax fits in double, rounded to f32; error of the fit (before the rounding of
 * the evaluation) 2.0e-9 relative for exp, 4.7e-9 for log. */

#define VM_LN2_HI 0x1.62e400p-1f     /* 14 trailing zero bits: n * hi is exact for |n| < 2^14 */
#define VM_LN2_LO 0x1.7f7d1cp-20f    /* ln 2 - hi */
#define VM_LN2 0x1.62e430p-1f        /* ln 2 */
#define VM_LOG2E 0x1.715476p+0f      /* 1 / ln 2 */
#define VM_ROUND 0x1.8p+23f          /* adding it leaves the rounded integer in the low bits */
#define VM_EXP_MIN (-0x1.5d5890p+6f) /* -87.3364868: e^x is still a normal number */
#define VM_EXP2_MIN (-126.0f)

/* e^r for |r| <= ln 2 / 2; exactly 1 at 0. */
static inline vf vm_exp_poly(vf r)
{
    vf q = vf_set1(0x1.6ae70ep-10f);
    q = vf_fma(q, r, vf_set1(0x1.12678cp-7f));
    q = vf_fma(q, r, vf_set1(0x1.555822p-5f));
    q = vf_fma(q, r, vf_set1(0x1.55541ap-3f));
    q = vf_fma(q, r, vf_set1(0x1.fffffcp-2f));
    q = vf_fma(q, r, vf_set1(1.0f));
    return vf_fma(q, r, vf_set1(1.0f));
}

/* p * 2^n, z = n + VM_ROUND; the result is a normal number. */
static inline vf vm_scale(vf p, vf z)
{
    return vf_of(vu_add(vu_of(p), vu_shl23(vu_of(z))));
}

/* e^x for x <= 0, 0 below VM_EXP_MIN (also for -inf). The reduction takes n ln 2 away in two parts:
 * one multiplication by log2 e would cost 15 ulp at -20 and 60 at -86. */
static inline vf vm_exp_e(vf x)
{
    const vf y = vf_max(x, vf_set1(VM_EXP_MIN));
    const vf z = vf_fma(y, vf_set1(VM_LOG2E), vf_set1(VM_ROUND));
    const vf n = vf_sub(z, vf_set1(VM_ROUND));
    vf r = vf_fma(n, vf_set1(-VM_LN2_HI), y);
    r = vf_fma(n, vf_set1(-VM_LN2_LO), r);
    return vf_select_lt(x, vf_set1(VM_EXP_MIN), vf_set1(0.0f), vm_scale(vm_exp_poly(r), z));
}

/* 2^x likewise; x - n is exact. */
static inline vf vm_exp_2(vf x)
{
    const vf y = vf_max(x, vf_set1(VM_EXP2_MIN));
    const vf z = vf_add(y, vf_set1(VM_ROUND));
    const vf n = vf_sub(z, vf_set1(VM_ROUND));
    const vf r = vf_mul(vf_sub(y, n), vf_set1(VM_LN2));
    return vf_select_lt(x, vf_set1(VM_EXP2_MIN), vf_set1(0.0f), vm_scale(vm_exp_poly(r), z));
}

/* s = 2^k f with f in [2/3, 4/3); *k_out = k, returns log f; exactly 0 for f = 1. s is a positive
 * normal number. */
static inline vf vm_log_reduced(vf s, vf *k_out)
{
    const vu k = vu_sar23(vu_sub(vu_of(s), vu_set1(0x3f2aaaabu)));
    const vf t = vf_sub(vf_of(vu_sub(vu_of(s), vu_shl23(k))), vf_set1(1.0f));
    vf q = vf_set1(-0x1.10ab9ep-3f);
    q = vf_fma(q, t, vf_set1(0x1.1ee2eep-3f));
    q = vf_fma(q, t, vf_set1(-0x1.eeb306p-4f));
    q = vf_fma(q, t, vf_set1(0x1.1ebad0p-3f));
    q = vf_fma(q, t, vf_set1(-0x1.55cd48p-3f));
    q = vf_fma(q, t, vf_set1(0x1.99d22cp-3f));
    q = vf_fma(q, t, vf_set1(-0x1.fffd6ap-3f));
    q = vf_fma(q, t, vf_set1(0x1.555500p-2f));
    q = vf_fma(q, t, vf_set1(-0.5f));
    *k_out = vf_from_vu(k);
    return vf_fma(vf_mul(t, t), q, t);
}

/* log s and log2 s for s >= 1. */
static inline vf vm_log_e(vf s)
{
    vf k;
    const vf y = vm_log_reduced(s, &k);
    return vf_fma(k, vf_set1(VM_LN2_HI), vf_fma(k, vf_set1(VM_LN2_LO), y));
}
static inline vf vm_log_2(vf s)
{
    vf k;
    const vf y = vm_log_reduced(s, &k);
    return vf_fma(y, vf_set1(VM_LOG2E), k);
}
