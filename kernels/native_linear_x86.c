// x W^T for an x86 CPU with AVX2 or AVX-512, in float32, with matrices laid out for it: groups of WIDTH outputs, [groups][inputs][WIDTH],
// filled up with zeros to a whole number of GROUPS, in float16 where that is exact. Twin: linear.py. native_linear.py lays out and calls;
// threads are as in native.c.
//
// The sums of a tile stay in registers, its tokens' inputs lie side by side. Work is handed out piece by piece: other processes take a
// core away now and then.

#include <immintrin.h>
#include <stdint.h>

#if defined(__AVX512F__)
enum { WIDTH = 16, TILE_TOKENS = 8 };
typedef __m512 wide;
#define LOAD(p) _mm512_loadu_ps(p)
#define LOAD_HALF(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define EVERYWHERE(number) _mm512_set1_ps(number)
#define MULTIPLIED_AND_ADDED(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define STORE(p, sum) _mm512_storeu_ps(p, sum)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
enum { WIDTH = 8, TILE_TOKENS = 4 };
typedef __m256 wide;
#define LOAD(p) _mm256_loadu_ps(p)
#define LOAD_HALF(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define EVERYWHERE(number) _mm256_set1_ps(number)
#define MULTIPLIED_AND_ADDED(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define STORE(p, sum) _mm256_storeu_ps(p, sum)
#else
#error "a CPU with AVX2, FMA and F16C is needed"
#endif

enum { GROUPS = 3, TOKENS_AT_ONCE = 64, MIN_PARALLEL_WEIGHTS = 1 << 14 };

#define UNROLLED _Pragma("GCC unroll 32")

// x [inputs][TOKENS], w [GROUPS][inputs][WIDTH]; the answer [GROUPS][TOKENS][WIDTH] is in `sums`.
#define TILE(NAME, TOKENS, TYPE, WEIGHTS)                                                                                          \
    static void NAME(const float *x, const TYPE *w, int64_t inputs, float *sums) {                                                \
        wide sum[GROUPS][TOKENS];                                                                                                   \
        UNROLLED for (int g = 0; g < GROUPS; g++) UNROLLED for (int t = 0; t < TOKENS; t++) sum[g][t] = EVERYWHERE(0.0f);         \
        for (int64_t k = 0; k < inputs; k++, x += TOKENS, w += WIDTH) {                                                            \
            wide weights[GROUPS];                                                                                                   \
            UNROLLED for (int g = 0; g < GROUPS; g++) weights[g] = WEIGHTS(w + g * inputs * WIDTH);                                \
            UNROLLED for (int t = 0; t < TOKENS; t++) {                                                                            \
                wide one = EVERYWHERE(x[t]);                                                                                        \
                UNROLLED for (int g = 0; g < GROUPS; g++) sum[g][t] = MULTIPLIED_AND_ADDED(weights[g], one, sum[g][t]);            \
            }                                                                                                                      \
        }                                                                                                                          \
        UNROLLED for (int g = 0; g < GROUPS; g++)                                                                                  \
            UNROLLED for (int t = 0; t < TOKENS; t++) STORE(sums + (g * TOKENS + t) * WIDTH, sum[g][t]);                           \
    }

TILE(tile, TILE_TOKENS, float, LOAD)
TILE(tile_of_one, 1, float, LOAD)
TILE(half_tile, TILE_TOKENS, int16_t, LOAD_HALF)
TILE(half_tile_of_one, 1, int16_t, LOAD_HALF)

// [tokens][inputs] -> tile after tile, [inputs][TILE_TOKENS]; one that is not full has zeros. A token alone stays as it is.
static void lay_out(const float *x, int64_t stride, int64_t tokens, int64_t inputs, float *to) {
    int64_t size = tokens == 1 ? 1 : TILE_TOKENS;
    for (int64_t first = 0; first < tokens; first += size, to += size * inputs)
        for (int64_t t = 0; t < size; t++)
            for (int64_t k = 0; k < inputs; k++) to[k * size + t] = first + t < tokens ? x[(first + t) * stride + k] : 0.0f;
}

// GROUPS groups of outputs, or what is left of them, for all tiles. Of w and half one is null.
static void group_products(const float *x, const float *w, const int16_t *half, int64_t inputs, float *y, int64_t stride, int64_t tokens,
                           int64_t outputs) {
    float sums[GROUPS * TILE_TOKENS * WIDTH];
    int64_t size = tokens == 1 ? 1 : TILE_TOKENS;
    for (int64_t first = 0; first < tokens; first += size, x += size * inputs) {
        if (half)
            (size == 1 ? half_tile_of_one : half_tile)(x, half, inputs, sums);
        else
            (size == 1 ? tile_of_one : tile)(x, w, inputs, sums);
        for (int64_t g = 0; g < GROUPS && g * WIDTH < outputs; g++) {
            int64_t width = outputs - g * WIDTH < WIDTH ? outputs - g * WIDTH : WIDTH;
            for (int64_t t = 0; t < size && first + t < tokens; t++)
                for (int64_t i = 0; i < width; i++) y[(first + t) * stride + g * WIDTH + i] = sums[(g * size + t) * WIDTH + i];
        }
    }
}

static void products(const float *x, int64_t x_stride, const float *w, const int16_t *half, int64_t inputs, int64_t outputs, float *y,
                     int64_t y_stride, int64_t tokens, float *room) {
    for (int64_t first = 0; first < tokens; first += TOKENS_AT_ONCE) {  // whose inputs stay in the cache
        int64_t count = tokens - first < TOKENS_AT_ONCE ? tokens - first : TOKENS_AT_ONCE;
        lay_out(x + first * x_stride, x_stride, count, inputs, room + first * inputs);
#pragma omp parallel for schedule(dynamic) if (inputs * outputs > MIN_PARALLEL_WEIGHTS)
        for (int64_t column = 0; column < outputs; column += GROUPS * WIDTH)
            group_products(room + first * inputs, w ? w + column * inputs : w, half ? half + column * inputs : half, inputs,
                           y + first * y_stride + column, y_stride, count, outputs - column);
    }
}

// room: [inputs * (tokens + TILE_TOKENS - 1)] floats
void linear(const float *x, int64_t x_stride, const float *w, int64_t inputs, int64_t outputs, float *y, int64_t y_stride, int64_t tokens,
            float *room) {
    products(x, x_stride, w, 0, inputs, outputs, y, y_stride, tokens, room);
}

// The matrix in float16.
void linear_of_half(const float *x, int64_t x_stride, const int16_t *half, int64_t inputs, int64_t outputs, float *y, int64_t y_stride,
                    int64_t tokens, float *room) {
    products(x, x_stride, 0, half, inputs, outputs, y, y_stride, tokens, room);
}

void linear_layout(int64_t *lanes, int64_t *outputs_at_once) {
    *lanes = WIDTH;
    *outputs_at_once = GROUPS * WIDTH;
}
