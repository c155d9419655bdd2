/* Multiplications and additions at the rate of the processor itself: on registers, with nothing read from memory. */

#include <omp.h>
#include <stdint.h>

enum { LANES = 16, CHAINS = 12 };

/* Multiplications, each with an addition, of a thread's step. */
const int64_t kleash_peak_step = CHAINS * LANES;

/* ``steps`` times CHAINS x LANES fused multiplications and additions in each thread. Returns what they come to, for
   otherwise nothing would have to be computed. */
double kleash_peak(int64_t threads, int64_t steps) {
    double total = 0.0;
#pragma omp parallel num_threads((int)threads) reduction(+ : total)
    {
        typedef float lanes __attribute__((vector_size(4 * LANES)));
        lanes sums[CHAINS], factor, addend;
        for (int i = 0; i < LANES; i++) factor[i] = 0.9999999f, addend[i] = 1e-7f * (float)i;
        for (int c = 0; c < CHAINS; c++) sums[c] = addend;
        for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 16
            for (int c = 0; c < CHAINS; c++) sums[c] = sums[c] * factor + addend;
        for (int c = 0; c < CHAINS; c++)
            for (int i = 0; i < LANES; i++) total += sums[c][i];
    }
    return total;
}
