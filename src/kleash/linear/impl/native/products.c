/* The matrix products of the linear functions in float32, for processors with AVX-512: a chunk's logits, and their
   gradient's products with the weight and with the hidden states. A chunk has few tokens and a large vocabulary, so
   each product reads or writes a large matrix (a weight, or its gradient) with little arithmetic on each number. The next
   part of that matrix is prefetched into the cache during the arithmetic on the current one.

       logits             Z = X W^T    the weight is the left factor: Z^T = W X^T, transposed as it is written
       weight_gradient    C += G^T X
       hidden_gradient    D += G W

   Each product is computed by tiles of up to TALL rows and WIDE columns, kept in registers over up to DEPTH terms of their
   sums; longer sums are sums of such sums. The left factor of a tile is packed row by row, STRIDE apart; the right
   factor, a panel, has WIDE numbers for each term. */

#include <stdint.h>
#include <omp.h>

#if defined(__AVX512F__)
#include <immintrin.h>

#define LANES 16
#define WIDE 32
#define TALL 14
#define TILES 8
#define BLOCK (TALL * TILES)
#define DEPTH 256
#define STRIDE (DEPTH + LANES)
#define UNIT 128
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }
INLINE __mmask16 first_lanes(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

/* Memory to prefetch: UNIT bytes of each of some rows, then the next UNIT bytes of each. */
struct fetch {
    const char *base, *next;
    int64_t stride, rows, row, left;
};

INLINE struct fetch new_fetch(const float *base, int64_t stride, int64_t rows, int64_t columns) {
    return (struct fetch){.base = (const char *)base, .next = (const char *)base, .stride = stride * 4, .rows = rows,
                          .left = rows * parts(columns * 4, UNIT)};
}

INLINE int fetch_one(struct fetch *f, int writes) {
    if (!f->left) return 0;
    f->left--;
    if (writes) {
        __builtin_prefetch(f->next, 1, 3), __builtin_prefetch(f->next + 64, 1, 3);
    } else {
        __builtin_prefetch(f->next, 0, 2), __builtin_prefetch(f->next + 64, 0, 2);
    }
    f->next += f->stride;
    if (++f->row == f->rows) f->row = 0, f->base += UNIT, f->next = f->base;
    return 1;
}

/* Add a tile of the product of ``a`` and ``b`` to ``c``, or write it there. ``f``: two lists of memory
   to prefetch meanwhile, the first of them for writing if ``writes``. All sizes except ``depth`` are compile-time constants. */
INLINE void tile(int rows, int vectors, int64_t depth, const float *a, const float *b, float *c, int64_t c_stride,
                 int add, __mmask16 mask0, __mmask16 mask1, int writes, struct fetch *f) {
    __m512 sum[TALL][2];
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < depth;) {
        const int64_t end = smaller(t + 4, depth);
        if (!fetch_one(f, writes)) fetch_one(f + 1, 0);
#pragma GCC unroll 1
        for (; t < end; t++) {
            __m512 b0 = _mm512_load_ps(b + t * WIDE), b1;
            if (vectors > 1) b1 = _mm512_load_ps(b + t * WIDE + LANES);
#pragma GCC unroll 14
            for (int i = 0; i < rows; i++) {
                __m512 x = _mm512_set1_ps(a[i * STRIDE + t]);
                sum[i][0] = _mm512_fmadd_ps(x, b0, sum[i][0]);
                if (vectors > 1) sum[i][1] = _mm512_fmadd_ps(x, b1, sum[i][1]);
            }
        }
    }
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        float *out = c + i * c_stride;
        if (add) {
            sum[i][0] = _mm512_add_ps(sum[i][0], _mm512_maskz_loadu_ps(mask0, out));
            if (vectors > 1) sum[i][1] = _mm512_add_ps(sum[i][1], _mm512_maskz_loadu_ps(mask1, out + LANES));
        }
        _mm512_mask_storeu_ps(out, mask0, sum[i][0]);
        if (vectors > 1) _mm512_mask_storeu_ps(out + LANES, mask1, sum[i][1]);
    }
}

#define FULL 0xffff
static __attribute__((noinline)) void tile_of(int64_t rows, int64_t depth, const float *a, const float *b, float *c,
                                              int64_t c_stride, int64_t columns, int writes, struct fetch *f) {
    __mmask16 mask0 = first_lanes(columns), mask1 = first_lanes(columns - LANES);
    switch (rows) {
#define CASE(R) \
    case R: tile(R, 2, depth, a, b, c, c_stride, 1, mask0, mask1, writes, f); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#undef CASE
    }
}

static __attribute__((noinline)) void tile_of_logits(int64_t vectors, int64_t depth, const float *a, const float *b,
                                                     float *c, int64_t c_stride, int add, struct fetch *f) {
    if (vectors > 1) {
        tile(TALL, 2, depth, a, b, c, c_stride, add, FULL, FULL, 0, f);
    } else {
        tile(TALL, 1, depth, a, b, c, c_stride, add, FULL, FULL, 0, f);
    }
}

/* Transpose LANES rows of LANES numbers: those from ``rows`` on, and from ``columns`` on, are 0 and not read; what is
   written are ``columns`` rows, with 0 in place of what was not read, if ``pad``, or else ``rows`` numbers each. */
INLINE void transpose(const float *from, int64_t from_stride, int64_t rows, int64_t columns, float *to,
                      int64_t to_stride, int pad) {
    __m512 r[LANES], s[LANES];
    __mmask16 read = first_lanes(columns), written = pad ? FULL : first_lanes(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        r[i] = i < rows ? _mm512_maskz_loadu_ps(read, from + i * from_stride) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        s[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        r[i] = _mm512_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(s[i], s[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(s[i], s[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(s[i + 4], s[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(s[i + 4], s[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < columns) _mm512_mask_storeu_ps(to + i * to_stride, written, r[i]);
}

/* A panel of a matrix: ``columns`` numbers of each row, and 0 up to WIDE. */
INLINE void pack_panel(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to) {
    __mmask16 mask0 = first_lanes(columns), mask1 = first_lanes(columns - LANES);
    for (int64_t i = 0; i < rows; i++, from += stride, to += WIDE) {
        _mm512_store_ps(to, _mm512_maskz_loadu_ps(mask0, from));
        _mm512_store_ps(to + LANES, _mm512_maskz_loadu_ps(mask1, from + LANES));
    }
}

/* Rows of a left factor as they are. */
INLINE void pack_rows(const float *from, int64_t stride, int64_t rows, int64_t depth, float *to) {
    for (int64_t i = 0; i < rows; i++, from += stride, to += STRIDE)
        for (int64_t t = 0; t < depth; t += LANES)
            _mm512_store_ps(to + t, _mm512_maskz_loadu_ps(first_lanes(depth - t), from + t));
}

INLINE int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* Numbers of type float that the products of so many tokens need to workspace in. */
int64_t kleash_workspace(int64_t tokens, int64_t dim, int64_t threads) {
    int64_t wide = parts(tokens, WIDE) * WIDE, deep = parts(tokens, DEPTH);
    int64_t shared = wide * dim, other = tokens * parts(dim, WIDE) * WIDE;
    int64_t logits = BLOCK * STRIDE + BLOCK * wide, weight = deep * BLOCK * STRIDE, hidden = BLOCK * STRIDE + DEPTH * WIDE;
    int64_t own = logits > weight ? logits : weight;
    return (shared > other ? shared : other) + threads * (own > hidden ? own : hidden) + LANES;
}

INLINE float *aligned(float *x) { return (float *)(((uintptr_t)x + 63) & ~(uintptr_t)63); }

/* ``out`` = hidden weight^T. */
void kleash_logits(const float *hidden, int64_t hidden_stride, const float *weight, int64_t weight_stride,
                   int64_t tokens, int64_t vocab_size, int64_t dim, int64_t threads, float *workspace, float *out,
                   int64_t out_stride) {
    const int64_t panels = parts(tokens, WIDE), wide = panels * WIDE, blocks = parts(vocab_size, BLOCK);
    float *packed = aligned(workspace), *rest = packed + wide * dim;
    int64_t taken = 0;
#pragma omp parallel num_threads((int)threads)
    {
        float *a = rest + omp_get_thread_num() * (BLOCK * STRIDE + BLOCK * wide), *sums = a + BLOCK * STRIDE;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < 2 * panels; i++)
            for (int64_t h = 0; h < dim; h += LANES) {
                float *to = packed + (i / 2) * WIDE * dim + h * WIDE + i % 2 * LANES;
                transpose(hidden + i * LANES * hidden_stride + h, hidden_stride, tokens - i * LANES, dim - h, to, WIDE, 1);
            }
        for (int64_t block = take(&taken), next; block < blocks; block = next) {
            next = take(&taken);
            const int64_t v = block * BLOCK, count = smaller(BLOCK, vocab_size - v), tiles = parts(count, TALL);
            for (int64_t h = 0; h < dim; h += DEPTH) {
                const int64_t depth = smaller(DEPTH, dim - h);
                struct fetch f[2] = {{0}};
                pack_rows(weight + v * weight_stride + h, weight_stride, count, depth, a);
                if (h + DEPTH < dim) {
                    f[0] = new_fetch(weight + v * weight_stride + h + DEPTH, weight_stride, count, smaller(DEPTH, dim - h - DEPTH));
                } else if (next < blocks) {
                    f[0] = new_fetch(weight + next * BLOCK * weight_stride, weight_stride, smaller(BLOCK, vocab_size - next * BLOCK), smaller(DEPTH, dim));
                }
                for (int64_t panel = 0; panel < panels; panel++) {
                    const float *b = packed + panel * WIDE * dim + h * WIDE;
                    const int64_t vectors = tokens - panel * WIDE > LANES ? 2 : 1;
                    for (int64_t i = 0; i < tiles; i++)
                        tile_of_logits(vectors, depth, a + i * TALL * STRIDE, b, sums + i * TALL * wide + panel * WIDE,
                                       wide, h > 0, f);
                }
            }
            for (int64_t k = 0; k < tokens; k += LANES)
                for (int64_t i = 0; i < count; i += LANES)
                    transpose(sums + i * wide + k, wide, count - i, tokens - k, out + k * out_stride + v + i, out_stride, 0);
        }
    }
}

/* ``total`` += gradient^T hidden. */
void kleash_weight_gradient(const float *gradient, int64_t gradient_stride, const float *hidden, int64_t hidden_stride,
                        int64_t tokens, int64_t vocab_size, int64_t dim, int64_t threads, float *workspace, float *total,
                        int64_t total_stride) {
    const int64_t panels = parts(dim, WIDE), deep = parts(tokens, DEPTH), depth = parts(tokens, deep ? deep : 1);
    const int64_t blocks = parts(vocab_size, BLOCK);
    float *packed = aligned(workspace), *rest = packed + tokens * panels * WIDE;
    int64_t taken = 0;
#pragma omp parallel num_threads((int)threads)
    {
        float *a = rest + omp_get_thread_num() * deep * BLOCK * STRIDE;
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++)
            pack_panel(hidden + panel * WIDE, hidden_stride, tokens, dim - panel * WIDE, packed + panel * tokens * WIDE);
        for (int64_t block = take(&taken), next; block < blocks; block = next) {
            next = take(&taken);
            const int64_t v = block * BLOCK, count = smaller(BLOCK, vocab_size - v), tiles = parts(count, TALL);
            for (int64_t k = 0; k < tokens; k += LANES)
                for (int64_t d = k / depth; d * depth < smaller(k + LANES, tokens); d++) {
                    /* Terms k.. up to the end of this part of the sum. */
                    const int64_t begin = k > d * depth ? k : d * depth;
                    const int64_t end = smaller(smaller(k + LANES, tokens), (d + 1) * depth);
                    for (int64_t i = 0; i < count; i += LANES)
                        transpose(gradient + begin * gradient_stride + v + i, gradient_stride, end - begin, count - i,
                                  a + (d * BLOCK + i) * STRIDE + begin - d * depth, STRIDE, 0);
                }
            struct fetch f[2] = {{0}};
            if (next < blocks)
                f[1] = new_fetch(gradient + next * BLOCK, gradient_stride, tokens, smaller(BLOCK, vocab_size - next * BLOCK));
            for (int64_t d = 0; d < deep; d++)
                for (int64_t panel = 0; panel < panels; panel++)
                    for (int64_t i = 0; i < tiles; i++) {
                        const int64_t begin = d * depth, rows = smaller(TALL, count - i * TALL);
                        float *c = total + (v + i * TALL) * total_stride + panel * WIDE;
                        int64_t next_v = v + (i + 1) * TALL, next_h = panel * WIDE;
                        if (i + 1 == tiles) next_v = v, next_h += WIDE;
                        if (next_h >= dim) next_v = d + 1 < deep ? v : next * BLOCK, next_h = 0;
                        f[0] = new_fetch(total + next_v * total_stride + next_h, total_stride, next_v < vocab_size ? smaller(TALL, vocab_size - next_v) : 0, smaller(WIDE, dim - next_h));
                        tile_of(rows, smaller(depth, tokens - begin), a + (d * BLOCK + i * TALL) * STRIDE,
                                packed + (panel * tokens + begin) * WIDE, c, total_stride, dim - panel * WIDE, 1, f);
                    }
        }
    }
}

/* ``out`` += gradient weight. */
void kleash_hidden_gradient(const float *gradient, int64_t gradient_stride, const float *weight, int64_t weight_stride,
                        int64_t tokens, int64_t vocab_size, int64_t dim, int64_t threads, float *workspace, float *out,
                        int64_t out_stride) {
    const int64_t panels = parts(dim, WIDE), tiles = parts(tokens, TALL), tall = parts(tokens, tiles ? tiles : 1);
    const int64_t each = BLOCK * STRIDE + DEPTH * WIDE;
    workspace = aligned(workspace);
#pragma omp parallel num_threads((int)threads)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = me * panels / team, last = (me + 1) * panels / team;
        float *b = workspace + me * each, *a = b + DEPTH * WIDE;
        for (int64_t v = 0; v < vocab_size && first < last; v += DEPTH) {
            const int64_t depth = smaller(DEPTH, vocab_size - v), next_depth = smaller(DEPTH, vocab_size - v - depth);
            for (int64_t group = 0; group < tiles; group += TILES) {
                /* Few enough tokens for their part of the left factor to stay in the cache. */
                const int64_t k = group * tall, tokens_here = smaller(TILES * tall, tokens - k);
                pack_rows(gradient + k * gradient_stride + v, gradient_stride, tokens_here, depth, a);
                for (int64_t panel = first; panel < last; panel++) {
                    const int64_t h = panel * WIDE;
                    struct fetch f[2] = {{0}};
                    pack_panel(weight + v * weight_stride + h, weight_stride, depth, dim - h, b);
                    if (panel + 1 < last) {
                        f[0] = new_fetch(weight + v * weight_stride + h + WIDE, weight_stride, depth, WIDE);
                    } else if (next_depth > 0 && group + TILES >= tiles) {
                        f[0] = new_fetch(weight + (v + depth) * weight_stride + first * WIDE, weight_stride, next_depth, WIDE);
                    }
                    for (int64_t i = 0; i < tokens_here; i += tall)
                        tile_of(smaller(tall, tokens_here - i), depth, a + i * STRIDE, b, out + (k + i) * out_stride + h,
                                out_stride, dim - h, 0, f);
                }
            }
        }
    }
}
#endif
