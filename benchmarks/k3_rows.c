/* The one-sample estimate k3 and its gradient, on the arithmetic of the library: what the exact KL is timed beside. */

#include "../src/kleash/linear/impl/native/rows.c"

/* The largest logit, and the sum of the masses relative to it, which are kept if ``mass`` is not NULL. */
INLINE double total_of(const float *z, int64_t words, float *mass, float *largest) {
    float top = -INFINITY;
    double total = 0.0;
#pragma omp simd reduction(max : top)
    FOR_WORDS(0, words) top = z[j] > top ? z[j] : top;
    FOR_PARTS {
        float masses = 0.0f;
        if (mass) {
#pragma omp simd reduction(+ : masses)
            FOR_WORDS(start, end) {
                float one = power_of_e(z[j] - top);
                mass[j] = one;
                masses += one;
            }
        } else {
#pragma omp simd reduction(+ : masses)
            FOR_WORDS(start, end) masses += power_of_e(z[j] - top);
        }
        total += masses;
    }
    *largest = top;
    return total;
}

/* k3 = phi(log p - log q) of each row's token, and weight times its gradient in p's logits, in their place. */
void k3_gradient(float *zp, const float *zq, int64_t rows, int64_t words, float *work, int64_t threads,
                 const int64_t *tokens, const float *weight, float *k3) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *p = zp + i * words, *mass = work + words * omp_get_thread_num(), top_p, top_q;
        const float *q = zq + i * words;
        double total_p = total_of(p, words, mass, &top_p), total_q = total_of(q, words, NULL, &top_q);
        int64_t token = tokens[i];
        double ratio = (p[token] - top_p - log(total_p)) - (q[token] - top_q - log(total_q));
        k3[i] = (float)(expm1(-ratio) + ratio);
        float slope = (float)(-expm1(-ratio)) * weight[i], share = (float)(-slope / total_p);
#pragma omp simd
        FOR_WORDS(0, words) p[j] = mass[j] * share;
        p[token] += slope;
    }
}
