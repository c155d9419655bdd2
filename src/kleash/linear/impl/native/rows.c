/* The elementwise work on rows of float32 logits, a row at a time while it is in the cache: what lean.py and
   objective.py say, and the same numbers up to rounding.

   With r = zq - zp - x where x = E_p[zq - zp], and y = E_p expm1(r) = E_p phi(-r) + E_p r,

       log p - log q = log1p(y) - r          KL(p || q) = log1p(y) - E_p r

   Token statistics treat both models alike, by d = log p - log q = zp - zq - (log-sum-exp of zp - that of zq):

       KL(p || q) = sum p phi(d)             KL(q || p) = sum q phi(-d)

   Sums are in float32 over PART words, and over the parts in float64. What this cannot do (q further ahead than FAR on
   some word; a logit that is no number) gets a KL of NaN. */

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
#define FOR_WORDS(BEGIN, END) for (int64_t j = (BEGIN); j < (END); j++)
#define FOR_PARTS                                           \
    for (int64_t start = 0, end; start < words; start = end) \
        if ((end = start + PART < words ? start + PART : words), 1)

enum { KL, LOG_SUM, MORE, ENTROPY, FACTS };
enum { LOGP, LOGQ, KL_PQ, KL_QP, JENSEN_SHANNON, TOTAL_VARIATION, ENTROPY_P, ENTROPY_Q, TOP_P, TOP_Q, NUMBERS };
enum { LIKELIEST_P, LIKELIEST_Q, RANK_Q, PLACES };

/* 2^x to 2 roundings, exact at 0; 0 below 2^-126. The coefficients are the best for 2^x / fraction on [-1/2, 1/2]. */
INLINE float power_of_2(float x) {
    float held = x < -126.0f ? -126.0f : x;
    float whole = rintf(held);
    float f = held - whole;
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

INLINE float power_of_e(float x) { return power_of_2(x * LOG2_E); }

/* phi(-r) = expm1(r) - r by its series, for |r| up to SERIES_BELOW. */
INLINE float near_gap(float r) {
    float near = 1.0f / 5040.0f;
    near = near * r + 1.0f / 720.0f;
    near = near * r + 1.0f / 120.0f;
    near = near * r + 1.0f / 24.0f;
    near = near * r + 1.0f / 6.0f;
    near = near * r + 0.5f;
    return near * r * r;
}

/* phi(-r) = expm1(r) - r, so that nothing cancels where |r| is small. */
INLINE float gap(float r) {
    float beyond = (power_of_e(r) - 1.0f) - r;
    return fabsf(r) <= SERIES_BELOW ? near_gap(r) : beyond;
}

/* log(1 + x) for x from 0 to 1: 2 atanh(x / (2 + x)). */
INLINE float log_of_1_and(float x) {
    float s = x / (2.0f + x), square = s * s;
    float sum = 1.0f / 13.0f;
    sum = sum * square + 1.0f / 11.0f;
    sum = sum * square + 1.0f / 9.0f;
    sum = sum * square + 1.0f / 7.0f;
    sum = sum * square + 1.0f / 5.0f;
    sum = sum * square + 1.0f / 3.0f;
    return 2.0f * (s + s * square * sum);
}

/* (p log(p / m) + q log(q / m)) / (p + q), m = (p + q) / 2: of d alone, even in it, from d^2 / 8 to log 2. */
INLINE float jensen_shannon(float d) {
    float square = d * d;
    float near = 1.922123016e-05f;
    near = near * square - 1.844618056e-04f;
    near = near * square + 1.736111111e-03f;
    near = near * square - 1.5625e-02f;
    near = near * square + 0.125f;
    float size = fabsf(d), rest = power_of_e(-size);
    float far = 0.693147181f - log_of_1_and(rest) - rest * size / (1.0f + rest);
    return size <= SERIES_BELOW ? near * square : far;
}

/* By how much q's logit is larger than p's; it comes so, if the two are ``apart`` already. */
INLINE float ahead(const float *zp, const float *zq, int apart, int64_t j) { return apart ? zq[j] : zq[j] - zp[j]; }

struct row {
    double kl;      /* NaN where it cannot be had here */
    double total;   /* of p's masses, each relative to that of the largest logit */
    double slack;   /* E_p r, 0 but for the rounding of x */
    double excess;  /* y */
    double entropy; /* of p */
    double log_sum; /* log-sum-exp of p's logits */
    float shift;    /* x */
};

/* What is known of a row; leaves p's masses behind, and each one's mass * expm1(r). ``apart`` is told at compile time. */
INLINE struct row measured_as(const float *zp, const float *zq, int apart, int64_t words, float *restrict mass,
                           float *restrict grown) {
    struct row x = {.kl = NAN};
    float top = -INFINITY, furthest = -INFINITY;
    double moment = 0.0, below = 0.0, gaps = 0.0;
#pragma omp simd reduction(max : top)
    FOR_WORDS(0, words) top = zp[j] > top ? zp[j] : top;
    FOR_PARTS {
        float masses = 0.0f, moments = 0.0f, depth = 0.0f;
#pragma omp simd reduction(+ : masses, moments, depth) reduction(max : furthest)
        FOR_WORDS(start, end) {
            float more = ahead(zp, zq, apart, j), under = zp[j] - top, one = power_of_e(under);
            mass[j] = one;
            masses += one;
            moments += one * more;
            depth += one * under;
            furthest = more > furthest ? more : furthest;
        }
        x.total += masses, moment += moments, below += depth;
    }
    x.shift = (float)(moment / x.total);
    if (!(furthest - x.shift <= FAR)) return x;
    FOR_PARTS {
        float some = 0.0f, slack = 0.0f;
#pragma omp simd reduction(+ : some, slack)
        FOR_WORDS(start, end) {
            float r = ahead(zp, zq, apart, j) - x.shift;
            float first = r * mass[j], rest = gap(r) * mass[j];
            grown[j] = first + rest;
            some += rest;
            slack += first;
        }
        gaps += some, x.slack += slack;
    }
    x.slack /= x.total;
    x.excess = gaps / x.total + x.slack;
    double log_total = log(x.total), kl = log1p(x.excess) - x.slack;
    x.log_sum = log_total + top;
    x.entropy = log_total - below / x.total;
    if (!isfinite(kl)) return x;
    x.kl = kl;
    if (kl >= FAINT) return x;
    /* Nothing but the rounding of x may be left of that difference; this sum has no term that is negative. */
    float lift = (float)log1p(x.excess);
    kl = 0.0;
    FOR_PARTS {
        float some = 0.0f;
#pragma omp simd reduction(+ : some)
        FOR_WORDS(start, end) some += gap(ahead(zp, zq, apart, j) - x.shift - lift) * mass[j];
        kl += some;
    }
    x.kl = kl / x.total;
    return x;
}

static struct row measured(const float *zp, const float *zq, int64_t apart, int64_t words, float *mass, float *grown) {
    return apart ? measured_as(zp, zq, 1, words, mass, grown) : measured_as(zp, zq, 0, words, mass, grown);
}

/* KL(p || q); log-sum-exp of p's logits; by how much q's is larger; p's entropy. ``work``: 2 rows for each thread. */
void kleash_summary(const float *zp, const float *zq, int64_t apart, int64_t rows, int64_t words, float *work,
                  int64_t threads, double *facts) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * words, *q = zq + i * words;
        float *mass = work + 2 * words * omp_get_thread_num(), *grown = mass + words;
        struct row x = measured(p, q, apart, words, mass, grown);
        double *found = facts + i * FACTS;
        found[KL] = x.kl;
        found[LOG_SUM] = x.log_sum;
        found[MORE] = x.shift + log1p(x.excess);
        found[ENTROPY] = x.entropy;
    }
}

/* KL(p || q), and weight times its gradients p (E_p r - r) and p (expm1(r) - y) / (1 + y) in both logits: each where it
   is wanted (not NULL), which may be where the logits are. A row whose KL is NaN is left as it is. */
void kleash_kl_gradient(const float *zp, const float *zq, int64_t apart, int64_t rows, int64_t words, float *work,
                        int64_t threads, const float *weight, float *kl, float *in_p, float *in_q) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * words, *q = zq + i * words;
        float *mass = work + 2 * words * omp_get_thread_num(), *grown = mass + words;
        struct row x = measured(p, q, apart, words, mass, grown);
        kl[i] = (float)x.kl;
        if (isnan(x.kl)) continue;
        float slack = (float)x.slack, excess = (float)x.excess, share = (float)(weight[i] / x.total);
        float share_q = (float)(weight[i] / (x.total * (1.0 + x.excess)));
        float *into_p = in_p ? in_p + i * words : grown, *into_q = in_q ? in_q + i * words : grown;
#pragma omp simd
        FOR_WORDS(0, words) {
            float r = ahead(p, q, apart, j) - x.shift;
            float of_q = (grown[j] - mass[j] * excess) * share_q;
            float of_p = mass[j] * (slack - r) * share;
            into_q[j] = of_q;
            into_p[j] = of_p;
        }
    }
}

/* What a loss asks of a row: its coefficients in the token's two log-probabilities, the KL and p's entropy. */
struct asked {
    float logp, logq, kl, entropy;
};

/* The gradients of a row's terms in both logits, but for the sampled token's own share:
   p (c_kl (u - KL) - c_H (log p + H) - c_logp) and c_kl (q - p) - c_logq q, u = log p - log q. Returns whether all are
   finite. ``with_entropy`` and which of the two is wanted are told at compile time, so that nothing is done in vain. */
INLINE int pulled(const float *zp, const float *zq, int apart, int with_entropy, int64_t words, struct asked c,
                  float kl, float entropy, float log_sum, float more, float *in_p, float *in_q) {
    float all = 0.0f;
    const float lift = more - kl;
#pragma omp simd reduction(+ : all)
    FOR_WORDS(0, words) {
        float over = ahead(zp, zq, apart, j), logp = zp[j] - log_sum, u = more - over;
        if (in_q) {
            float larger = power_of_e(u > 0.0f ? logp : logp - u), apart_by = -fabsf(u);
            float missing = gap(apart_by) + apart_by;
            float smaller = larger * (1.0f + missing), between = larger * missing;
            float q = u > 0.0f ? smaller : larger;
            float of_q = c.kl * (u > 0.0f ? between : -between) - c.logq * q;
            in_q[j] = of_q;
            all += of_q;
        }
        if (in_p) {
            float by = c.kl * (lift - over) - c.logp;
            if (with_entropy) by -= c.entropy * (logp + entropy);
            float of_p = by * power_of_e(logp);
            in_p[j] = of_p;
            all += of_p;
        }
    }
    return isfinite(all);
}

/* The gradients in both logits of what a loss asks of each row (``asked``: c_logp, c_logq, c_kl, c_entropy), where
   they are wanted (not NULL); ``known``: KL, p's entropy, log-sum-exp of p's logits, by how much q's is larger.
   ``done``: whether this could be done. */
void kleash_objective_gradient(const float *zp, const float *zq, int64_t apart, int64_t with_entropy, int64_t rows, int64_t words,
                 int64_t threads, const int64_t *tokens, const float *asked, const float *known, float *in_p, float *in_q,
                 uint8_t *done) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * words, *q = zq + i * words, *k = known + 4 * i;
        float *into_p = in_p ? in_p + i * words : NULL, *into_q = in_q ? in_q + i * words : NULL;
        struct asked c = {asked[4 * i], asked[4 * i + 1], asked[4 * i + 2], asked[4 * i + 3]};
        int fine = 1;
#define PULL(APART, WITH_ENTROPY, INTO_P, INTO_Q) \
    fine &= pulled(p, q, APART, WITH_ENTROPY, words, c, k[0], k[1], k[2], k[3], INTO_P, INTO_Q)
        if (into_p && with_entropy) {
            if (apart) PULL(1, 1, into_p, NULL); else PULL(0, 1, into_p, NULL);
        } else if (into_p) {
            if (apart) PULL(1, 0, into_p, NULL); else PULL(0, 0, into_p, NULL);
        }
        if (into_q) {
            if (apart) PULL(1, 0, NULL, into_q); else PULL(0, 0, NULL, into_q);
        }
#undef PULL
        done[i] = (uint8_t)fine;
        if (into_p) into_p[tokens[i]] += c.logp;
        if (into_q) into_q[tokens[i]] += c.logq;
    }
}

/* One model's words: their masses relative to its largest logit. */
struct side {
    double total;
    double entropy;
    double log_sum;
    int32_t likeliest; /* the first of the largest */
};

INLINE struct side side_of(const float *z, int64_t words, float *restrict mass) {
    struct side x = {0};
    float top = -INFINITY;
    int32_t likeliest = (int32_t)words;
    double below = 0.0;
#pragma omp simd reduction(max : top)
    FOR_WORDS(0, words) top = z[j] > top ? z[j] : top;
    FOR_PARTS {
        float masses = 0.0f, depth = 0.0f;
#pragma omp simd reduction(+ : masses, depth) reduction(min : likeliest)
        FOR_WORDS(start, end) {
            float under = z[j] - top, one = power_of_e(under);
            int32_t place = z[j] == top ? (int32_t)j : INT32_MAX;
            mass[j] = one;
            masses += one;
            depth += one * under;
            likeliest = place < likeliest ? place : likeliest;
        }
        x.total += masses, below += depth;
    }
    x.likeliest = likeliest;
    const double log_total = log(x.total);
    x.log_sum = log_total + top;
    x.entropy = log_total - below / x.total;
    return x;
}

/* The fields of TokenStatistics, numbers and places apart; a divergence that is not finite cannot be had here. */
void kleash_statistics(const float *zp, const float *zq, int64_t rows, int64_t words, float *work, int64_t threads,
                       const int64_t *tokens, double *numbers, int64_t *places) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *p = zp + i * words, *q = zq + i * words;
        float *mass_p = work + 2 * words * omp_get_thread_num(), *mass_q = mass_p + words;
        struct side a = side_of(p, words, mass_p), b = side_of(q, words, mass_q);
        const double shift = a.log_sum - b.log_sum;
        const float most = (float)shift, rest = (float)(shift - most), own = q[tokens[i]];
        const float over_p = (float)(1.0 / a.total), over_q = (float)(1.0 / b.total);
        double pq = 0.0, qp = 0.0, between = 0.0, variation = 0.0;
        int64_t rank = 0;
        FOR_PARTS {
            float some_pq = 0.0f, some_qp = 0.0f, some_between = 0.0f, some_variation = 0.0f;
            int32_t greater = 0;
#pragma omp simd reduction(+ : some_pq, some_qp, some_between, some_variation, greater)
            FOR_WORDS(start, end) {
                float d = ((p[j] - q[j]) - most) - rest;
                float of_p = mass_p[j] * over_p, of_q = mass_q[j] * over_q;
                int small = fabsf(d) <= SERIES_BELOW;
                float up = near_gap(d), down = near_gap(-d), apart = of_q - of_p;
                some_pq += small ? of_p * down : apart + of_p * d;
                some_qp += small ? of_q * up : -apart - of_q * d;
                some_variation += fabsf(small ? of_q * (up + d) : apart);
                some_between += (of_p + of_q) * jensen_shannon(d);
                greater += q[j] > own ? 1 : 0;
            }
            pq += some_pq, qp += some_qp, between += some_between, variation += some_variation;
            rank += greater;
        }
        double *found = numbers + i * NUMBERS;
        int64_t *places_here = places + i * PLACES;
        found[LOGP] = p[tokens[i]] - a.log_sum;
        found[LOGQ] = own - b.log_sum;
        found[KL_PQ] = pq;
        found[KL_QP] = qp;
        found[JENSEN_SHANNON] = between / 2;
        found[TOTAL_VARIATION] = variation / 2;
        found[ENTROPY_P] = a.entropy;
        found[ENTROPY_Q] = b.entropy;
        found[TOP_P] = 1.0 / a.total;
        found[TOP_Q] = 1.0 / b.total;
        places_here[LIKELIEST_P] = a.likeliest;
        places_here[LIKELIEST_Q] = b.likeliest;
        places_here[RANK_Q] = rank;
    }
}
