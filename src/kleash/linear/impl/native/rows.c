/* The row functions for float32 on a CPU: KL, objectives and token statistics of rows of logits, one row at a time while
   it is in the cache. They return the numbers of kl_fast.py, objective.py and row_statistics.py, up to rounding.

   With r = zq - zp - x where x = E_p[zq - zp], and y = E_p expm1(r) = E_p phi(-r) + E_p r,

       log p - log q = log1p(y) - r          KL(p || q) = log1p(y) - E_p r

   Token statistics treat both models alike, by d = log p - log q = zp - zq - (log-sum-exp of zp - that of zq):

       KL(p || q) = sum p phi(d)             KL(q || p) = sum q phi(-d)

   Sums are in float32 over PART columns, and in float64 over the parts. A row that cannot be computed (r above FAR on
   a token; a logit that is not finite) gets a KL of NaN.

   rows: rows of logits; scratch: two rows of vocab_size numbers for each thread; q_is_delta: zq is zq - zp. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <omp.h>

#define LOG2_E 1.44269504088896341f
#define FAR 40.0f
#define FAINT 1e-12
#define SERIES_BELOW 0.3f
#define PART 1024
#define INLINE static inline __attribute__((always_inline))
#define FOR_COLUMNS(BEGIN, END) for (int64_t j = (BEGIN); j < (END); j++)
#define FOR_PARTS                                           \
    for (int64_t start = 0, end; start < vocab_size; start = end) \
        if ((end = start + PART < vocab_size ? start + PART : vocab_size), 1)

enum { KL, LOG_SUM, LOG_SUM_DELTA, ENTROPY, SUMMARY_FIELDS };
enum { LOGP, LOGQ, KL_PQ, KL_QP, JENSEN_SHANNON, TOTAL_VARIATION, ENTROPY_P, ENTROPY_Q, TOP1_PROBABILITY_P, TOP1_PROBABILITY_Q, FLOAT_FIELDS };
enum { TOP1_P, TOP1_Q, RANK_Q, INTEGER_FIELDS };

/* 2^x to 2 roundings, exact at 0; 0 below 2^-126. The coefficients are the best for 2^x / fraction on [-1/2, 1/2]. */
INLINE float exp2_fast(float x) {
    float clamped = x < -126.0f ? -126.0f : x;
    float whole = rintf(clamped);
    float f = clamped - whole;
    float fraction = 1.535749688e-04f;
    fraction = fraction * f + 1.339890583e-03f;
    fraction = fraction * f + 9.618423206e-03f;
    fraction = fraction * f + 5.550332364e-02f;
    fraction = fraction * f + 2.402264801e-01f;
    fraction = fraction * f + 6.931472030e-01f;
    fraction = fraction * f + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)whole + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -126.0f ? 0.0f : fraction * scale;
}

INLINE float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

/* phi(-r) = expm1(r) - r by its series, for |r| up to SERIES_BELOW. */
INLINE float phi_series(float r) {
    float near = 1.0f / 5040.0f;
    near = near * r + 1.0f / 720.0f;
    near = near * r + 1.0f / 120.0f;
    near = near * r + 1.0f / 24.0f;
    near = near * r + 1.0f / 6.0f;
    near = near * r + 0.5f;
    return near * r * r;
}

/* phi(-r) = expm1(r) - r, so that nothing cancels where |r| is small. */
INLINE float phi_of_minus(float r) {
    float beyond = (exp_fast(r) - 1.0f) - r;
    return fabsf(r) <= SERIES_BELOW ? phi_series(r) : beyond;
}

/* log(1 + x) for x from 0 to 1: 2 atanh(x / (2 + x)). */
INLINE float log1p_to_1(float x) {
    float s = x / (2.0f + x), square = s * s;
    float sum = 1.0f / 13.0f;
    sum = sum * square + 1.0f / 11.0f;
    sum = sum * square + 1.0f / 9.0f;
    sum = sum * square + 1.0f / 7.0f;
    sum = sum * square + 1.0f / 5.0f;
    sum = sum * square + 1.0f / 3.0f;
    return 2.0f * (s + s * square * sum);
}

/* (p log(p / m) + q log(q / m)) / (p + q), m = (p + q) / 2: an even function of d, from d^2 / 8 to log 2. */
INLINE float jensen_shannon(float d) {
    float square = d * d;
    float near = 1.922123016e-05f;
    near = near * square - 1.844618056e-04f;
    near = near * square + 1.736111111e-03f;
    near = near * square - 1.5625e-02f;
    near = near * square + 0.125f;
    float size = fabsf(d), rest = exp_fast(-size);
    float far = 0.693147181f - log1p_to_1(rest) - rest * size / (1.0f + rest);
    return size <= SERIES_BELOW ? near * square : far;
}

/* zq - zp. */
INLINE float logit_delta(const float *zp, const float *zq, int q_is_delta, int64_t j) { return q_is_delta ? zq[j] : zq[j] - zp[j]; }

struct row {
    double kl;      /* NaN if it cannot be computed here */
    double total;   /* the sum of p's masses exp(zp - top) */
    double residual_mean;   /* E_p r, 0 but for the rounding of x */
    double excess;  /* y */
    double entropy; /* of p */
    double log_sum; /* log-sum-exp of p's logits */
    float shift;    /* x */
};

/* The summary of a row; writes p's masses and mass * expm1(r). ``q_is_delta`` is a compile-time constant. */
INLINE struct row summarise_as(const float *zp, const float *zq, int q_is_delta, int64_t vocab_size, float *restrict mass,
                           float *restrict expm1_mass) {
    struct row x = {.kl = NAN};
    float top = -INFINITY, largest_delta = -INFINITY;
    double moment = 0.0, below = 0.0, phi_sum = 0.0;
#pragma omp simd reduction(max : top)
    FOR_COLUMNS(0, vocab_size) top = zp[j] > top ? zp[j] : top;
    FOR_PARTS {
        float part_total = 0.0f, part_moment = 0.0f, part_below = 0.0f;
#pragma omp simd reduction(+ : part_total, part_moment, part_below) reduction(max : largest_delta)
        FOR_COLUMNS(start, end) {
            float delta = logit_delta(zp, zq, q_is_delta, j), below_top = zp[j] - top, m = exp_fast(below_top);
            mass[j] = m;
            part_total += m;
            part_moment += m * delta;
            part_below += m * below_top;
            largest_delta = delta > largest_delta ? delta : largest_delta;
        }
        x.total += part_total, moment += part_moment, below += part_below;
    }
    x.shift = (float)(moment / x.total);
    if (!(largest_delta - x.shift <= FAR)) return x;
    FOR_PARTS {
        float part_phi = 0.0f, part_residual = 0.0f;
#pragma omp simd reduction(+ : part_phi, part_residual)
        FOR_COLUMNS(start, end) {
            float r = logit_delta(zp, zq, q_is_delta, j) - x.shift;
            float weighted_r = r * mass[j], weighted_phi = phi_of_minus(r) * mass[j];
            expm1_mass[j] = weighted_r + weighted_phi;
            part_phi += weighted_phi;
            part_residual += weighted_r;
        }
        phi_sum += part_phi, x.residual_mean += part_residual;
    }
    x.residual_mean /= x.total;
    x.excess = phi_sum / x.total + x.residual_mean;
    double log_total = log(x.total), kl = log1p(x.excess) - x.residual_mean;
    x.log_sum = log_total + top;
    x.entropy = log_total - below / x.total;
    if (!isfinite(kl)) return x;
    x.kl = kl;
    if (kl >= FAINT) return x;
    /* That difference may have no digits left; the terms of this sum are never negative. */
    float log_excess = (float)log1p(x.excess);
    kl = 0.0;
    FOR_PARTS {
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        FOR_COLUMNS(start, end) part += phi_of_minus(logit_delta(zp, zq, q_is_delta, j) - x.shift - log_excess) * mass[j];
        kl += part;
    }
    x.kl = kl / x.total;
    return x;
}

static struct row summarise(const float *zp, const float *zq, int64_t q_is_delta, int64_t vocab_size, float *mass, float *expm1_mass) {
    return q_is_delta ? summarise_as(zp, zq, 1, vocab_size, mass, expm1_mass) : summarise_as(zp, zq, 0, vocab_size, mass, expm1_mass);
}

/* The SUMMARY_FIELDS of each row: KL(p || q); log-sum-exp of p's logits; that of q's minus that of p's; p's entropy. */
void kleash_summary(const float *zp, const float *zq, int64_t q_is_delta, int64_t rows, int64_t vocab_size, float *scratch,
                  int64_t threads, double *summary) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * vocab_size, *q = zq + i * vocab_size;
        float *mass = scratch + 2 * vocab_size * omp_get_thread_num(), *expm1_mass = mass + vocab_size;
        struct row x = summarise(p, q, q_is_delta, vocab_size, mass, expm1_mass);
        double *out = summary + i * SUMMARY_FIELDS;
        out[KL] = x.kl;
        out[LOG_SUM] = x.log_sum;
        out[LOG_SUM_DELTA] = x.shift + log1p(x.excess);
        out[ENTROPY] = x.entropy;
    }
}

/* KL(p || q), and weight times its gradients p (E_p r - r) and p (expm1(r) - y) / (1 + y) in both logits. in_p and in_q
   are NULL where not needed, and may be the memory of the logits. A row whose KL is NaN is left as it is. */
void kleash_kl_gradient(const float *zp, const float *zq, int64_t q_is_delta, int64_t rows, int64_t vocab_size, float *scratch,
                        int64_t threads, const float *weight, float *kl, float *in_p, float *in_q) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * vocab_size, *q = zq + i * vocab_size;
        float *mass = scratch + 2 * vocab_size * omp_get_thread_num(), *expm1_mass = mass + vocab_size;
        struct row x = summarise(p, q, q_is_delta, vocab_size, mass, expm1_mass);
        kl[i] = (float)x.kl;
        if (isnan(x.kl)) continue;
        float residual_mean = (float)x.residual_mean, excess = (float)x.excess, share = (float)(weight[i] / x.total);
        float share_q = (float)(weight[i] / (x.total * (1.0 + x.excess)));
        float *into_p = in_p ? in_p + i * vocab_size : expm1_mass, *into_q = in_q ? in_q + i * vocab_size : expm1_mass;
#pragma omp simd
        FOR_COLUMNS(0, vocab_size) {
            float r = logit_delta(p, q, q_is_delta, j) - x.shift;
            float grad_q = (expm1_mass[j] - mass[j] * excess) * share_q;
            float grad_p = mass[j] * (residual_mean - r) * share;
            into_q[j] = grad_q;
            into_p[j] = grad_p;
        }
    }
}

/* The derivatives of a row's loss in the token's two log-probabilities, in the KL and in p's entropy. */
struct coefficients {
    float logp, logq, kl, entropy;
};

/* The gradients of a row's loss in both logits, without the sampled token's own term:
   p (c_kl (u - KL) - c_H (log p + H) - c_logp) and c_kl (q - p) - c_logq q, u = log p - log q. Returns whether all are
   finite. ``with_entropy`` and whether in_p and in_q are NULL are compile-time constants. */
INLINE int term_gradients(const float *zp, const float *zq, int q_is_delta, int with_entropy, int64_t vocab_size, struct coefficients c,
                  float kl, float entropy, float log_sum, float log_sum_delta, float *in_p, float *in_q) {
    float total = 0.0f;
    const float delta_minus_kl = log_sum_delta - kl;
#pragma omp simd reduction(+ : total)
    FOR_COLUMNS(0, vocab_size) {
        float delta = logit_delta(zp, zq, q_is_delta, j), logp = zp[j] - log_sum, u = log_sum_delta - delta;
        if (in_q) {
            float larger = exp_fast(u > 0.0f ? logp : logp - u), minus_abs_u = -fabsf(u);
            float relative = phi_of_minus(minus_abs_u) + minus_abs_u;
            float smaller = larger * (1.0f + relative), difference = larger * relative;
            float q = u > 0.0f ? smaller : larger;
            float grad_q = c.kl * (u > 0.0f ? difference : -difference) - c.logq * q;
            in_q[j] = grad_q;
            total += grad_q;
        }
        if (in_p) {
            float slope = c.kl * (delta_minus_kl - delta) - c.logp;
            if (with_entropy) slope -= c.entropy * (logp + entropy);
            float grad_p = slope * exp_fast(logp);
            in_p[j] = grad_p;
            total += grad_p;
        }
    }
    return isfinite(total);
}

/* The gradients of an objective in both logits, where in_p and in_q are not NULL. For each row, ``coefficients`` has c_logp,
   c_logq, c_kl, c_entropy; ``known`` has KL, p's entropy, log-sum-exp of p's logits, and that of q's minus that of p's;
   ``done`` gets whether the gradients are finite. */
void kleash_objective_gradient(const float *zp, const float *zq, int64_t q_is_delta, int64_t with_entropy, int64_t rows, int64_t vocab_size,
                 int64_t threads, const int64_t *tokens, const float *coefficients, const float *known, float *in_p, float *in_q,
                 uint8_t *done) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * vocab_size, *q = zq + i * vocab_size, *k = known + 4 * i;
        float *into_p = in_p ? in_p + i * vocab_size : NULL, *into_q = in_q ? in_q + i * vocab_size : NULL;
        struct coefficients c = {coefficients[4 * i], coefficients[4 * i + 1], coefficients[4 * i + 2], coefficients[4 * i + 3]};
        int is_finite = 1;
#define TERM_GRADIENTS(Q_IS_DELTA, WITH_ENTROPY, INTO_P, INTO_Q) \
    is_finite &= term_gradients(p, q, Q_IS_DELTA, WITH_ENTROPY, vocab_size, c, k[0], k[1], k[2], k[3], INTO_P, INTO_Q)
        if (into_p && with_entropy) {
            if (q_is_delta) TERM_GRADIENTS(1, 1, into_p, NULL); else TERM_GRADIENTS(0, 1, into_p, NULL);
        } else if (into_p) {
            if (q_is_delta) TERM_GRADIENTS(1, 0, into_p, NULL); else TERM_GRADIENTS(0, 0, into_p, NULL);
        }
        if (into_q) {
            if (q_is_delta) TERM_GRADIENTS(1, 0, NULL, into_q); else TERM_GRADIENTS(0, 0, NULL, into_q);
        }
#undef TERM_GRADIENTS
        done[i] = (uint8_t)is_finite;
        if (into_p) into_p[tokens[i]] += c.logp;
        if (into_q) into_q[tokens[i]] += c.logq;
    }
}

/* The sums of one model's row of logits. */
struct model_sums {
    double total;
    double entropy;
    double log_sum;
    int32_t top1; /* the index of the first largest logit */
};

INLINE struct model_sums sum_model(const float *z, int64_t vocab_size, float *restrict mass) {
    struct model_sums x = {0};
    float top = -INFINITY;
    int32_t top1 = (int32_t)vocab_size;
    double below = 0.0;
#pragma omp simd reduction(max : top)
    FOR_COLUMNS(0, vocab_size) top = z[j] > top ? z[j] : top;
    FOR_PARTS {
        float part_total = 0.0f, part_below = 0.0f;
#pragma omp simd reduction(+ : part_total, part_below) reduction(min : top1)
        FOR_COLUMNS(start, end) {
            float below_top = z[j] - top, m = exp_fast(below_top);
            int32_t index = z[j] == top ? (int32_t)j : INT32_MAX;
            mass[j] = m;
            part_total += m;
            part_below += m * below_top;
            top1 = index < top1 ? index : top1;
        }
        x.total += part_total, below += part_below;
    }
    x.top1 = top1;
    const double log_total = log(x.total);
    x.log_sum = log_total + top;
    x.entropy = log_total - below / x.total;
    return x;
}

/* The fields of TokenStatistics; a divergence is not finite if it cannot be computed here. */
void kleash_statistics(const float *zp, const float *zq, int64_t rows, int64_t vocab_size, float *scratch, int64_t threads,
                       const int64_t *tokens, double *floats, int64_t *integers) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * vocab_size, *q = zq + i * vocab_size;
        float *mass_p = scratch + 2 * vocab_size * omp_get_thread_num(), *mass_q = mass_p + vocab_size;
        struct model_sums a = sum_model(p, vocab_size, mass_p), b = sum_model(q, vocab_size, mass_q);
        const double shift = a.log_sum - b.log_sum;
        const float shift_high = (float)shift, shift_low = (float)(shift - shift_high), token_zq = q[tokens[i]];
        const float inverse_p = (float)(1.0 / a.total), inverse_q = (float)(1.0 / b.total);
        double pq = 0.0, qp = 0.0, js = 0.0, variation = 0.0;
        int64_t rank = 0;
        FOR_PARTS {
            float part_pq = 0.0f, part_qp = 0.0f, part_js = 0.0f, part_variation = 0.0f;
            int32_t greater = 0;
#pragma omp simd reduction(+ : part_pq, part_qp, part_js, part_variation, greater)
            FOR_COLUMNS(start, end) {
                float d = ((p[j] - q[j]) - shift_high) - shift_low;
                float grad_p = mass_p[j] * inverse_p, grad_q = mass_q[j] * inverse_q;
                int small = fabsf(d) <= SERIES_BELOW;
                float phi_up = phi_series(d), phi_down = phi_series(-d), difference = grad_q - grad_p;
                part_pq += small ? grad_p * phi_down : difference + grad_p * d;
                part_qp += small ? grad_q * phi_up : -difference - grad_q * d;
                part_variation += fabsf(small ? grad_q * (phi_up + d) : difference);
                part_js += (grad_p + grad_q) * jensen_shannon(d);
                greater += q[j] > token_zq ? 1 : 0;
            }
            pq += part_pq, qp += part_qp, js += part_js, variation += part_variation;
            rank += greater;
        }
        double *out = floats + i * FLOAT_FIELDS;
        int64_t *out_integers = integers + i * INTEGER_FIELDS;
        out[LOGP] = p[tokens[i]] - a.log_sum;
        out[LOGQ] = token_zq - b.log_sum;
        out[KL_PQ] = pq;
        out[KL_QP] = qp;
        out[JENSEN_SHANNON] = js / 2;
        out[TOTAL_VARIATION] = variation / 2;
        out[ENTROPY_P] = a.entropy;
        out[ENTROPY_Q] = b.entropy;
        out[TOP1_PROBABILITY_P] = 1.0 / a.total;
        out[TOP1_PROBABILITY_Q] = 1.0 / b.total;
        out_integers[TOP1_P] = a.top1;
        out_integers[TOP1_Q] = b.top1;
        out_integers[RANK_Q] = rank;
    }
}
