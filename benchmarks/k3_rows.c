/* The estimate k3 and its gradient with the functions of the library, to compare its time with that of the exact KL. */

#include "../src/kleash/linear/impl/native/rows.c"

/* The sum of the masses exp(z - largest), which are written to ``mass`` if that is not NULL. */
INLINE double mass_total(const float *z, int64_t vocab_size, float *mass, float *largest) {
    float top = -INFINITY;
    double total = 0.0;
#pragma omp simd reduction(max : top)
    FOR_COLUMNS(0, vocab_size) top = z[j] > top ? z[j] : top;
    FOR_PARTS {
        float part = 0.0f;
        if (mass) {
#pragma omp simd reduction(+ : part)
            FOR_COLUMNS(start, end) {
                float m = exp_fast(z[j] - top);
                mass[j] = m;
                part += m;
            }
        } else {
#pragma omp simd reduction(+ : part)
            FOR_COLUMNS(start, end) part += exp_fast(z[j] - top);
        }
        total += part;
    }
    *largest = top;
    return total;
}

/* k3 = phi(log p - log q) of each row's token, and weight times its gradient in p's logits, in their place. */
void k3_gradient(float *zp, const float *zq, int64_t rows, int64_t vocab_size, float *scratch, int64_t threads,
                 const int64_t *tokens, const float *weight, float *k3) {
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *p = zp + i * vocab_size, *mass = scratch + vocab_size * omp_get_thread_num(), top_p, top_q;
        const float *q = zq + i * vocab_size;
        double total_p = mass_total(p, vocab_size, mass, &top_p), total_q = mass_total(q, vocab_size, NULL, &top_q);
        int64_t token = tokens[i];
        double ratio = (p[token] - top_p - log(total_p)) - (q[token] - top_q - log(total_q));
        k3[i] = (float)(expm1(-ratio) + ratio);
        float slope = (float)(-expm1(-ratio)) * weight[i], share = (float)(-slope / total_p);
#pragma omp simd
        FOR_COLUMNS(0, vocab_size) p[j] = mass[j] * share;
        p[token] += slope;
    }
}
