// x W^T for an ARM CPU, in float32, with matrices laid out for it: groups of 4 outputs, [groups][inputs][4], filled up with zeros to a whole
// number of GROUPS_AT_ONCE. Twin: linear.py. native_linear.py lays out and calls; threads are as in native.c.
//
// Several tokens: the sums of a tile stay in registers, its tokens' inputs lie side by side. One token: the matrix's bytes are what counts,
// so it is read in float16 where that is exact. Work is handed out piece by piece: other processes take a core away now and then.

#include <arm_neon.h>
#include <stdint.h>

enum { GROUP = 4, GROUPS_AT_ONCE = 4, TOKENS_AT_ONCE = 64, MIN_PARALLEL_WEIGHTS = 1 << 14, AHEAD = 256 };
enum { GROUPS_OF_ONE = 8, MOST_INPUTS_OF_16 = 768 };

#define UNROLLED _Pragma("GCC unroll 32")

// x [inputs][TOKENS], w [GROUPS][inputs][GROUP]; the answer [GROUPS][TOKENS][GROUP] is in `sums`.
#define TILE(NAME, TOKENS, GROUPS)                                                                                            \
    static void NAME(const float *x, const float *w, int64_t inputs, float *sums) {                                          \
        float32x4_t sum[GROUPS][TOKENS];                                                                                      \
        UNROLLED for (int g = 0; g < GROUPS; g++) UNROLLED for (int t = 0; t < TOKENS; t++) sum[g][t] = vdupq_n_f32(0);       \
        for (int64_t k = 0; k < inputs; k++, x += TOKENS, w += GROUP) {                                                       \
            float32x4_t weights[GROUPS];                                                                                      \
            UNROLLED for (int g = 0; g < GROUPS; g++) weights[g] = vld1q_f32(w + g * inputs * GROUP);                         \
            UNROLLED for (int g = 0; g < GROUPS; g++) __builtin_prefetch(w + g * inputs * GROUP + AHEAD);                     \
            UNROLLED for (int t = 0; t < TOKENS; t += 4) {                                                                    \
                float32x4_t four = vld1q_f32(x + t);                                                                          \
                UNROLLED for (int g = 0; g < GROUPS; g++) {                                                                   \
                    sum[g][t] = vfmaq_laneq_f32(sum[g][t], weights[g], four, 0);                                              \
                    sum[g][t + 1] = vfmaq_laneq_f32(sum[g][t + 1], weights[g], four, 1);                                      \
                    sum[g][t + 2] = vfmaq_laneq_f32(sum[g][t + 2], weights[g], four, 2);                                      \
                    sum[g][t + 3] = vfmaq_laneq_f32(sum[g][t + 3], weights[g], four, 3);                                      \
                }                                                                                                             \
            }                                                                                                                 \
        }                                                                                                                     \
        UNROLLED for (int g = 0; g < GROUPS; g++)                                                                             \
            UNROLLED for (int t = 0; t < TOKENS; t++) vst1q_f32(sums + (g * TOKENS + t) * GROUP, sum[g][t]);                  \
    }

TILE(tile_16, 16, 1)
TILE(tile_8, 8, 2)
TILE(tile_4, 4, 4)

// Sixteen tokens read each weight once, as long as their inputs stay in the cache next to the core.
static int64_t tile_of(int64_t tokens, int64_t inputs) {
    return tokens > 12 && tokens <= 16 && inputs <= MOST_INPUTS_OF_16 ? 16 : tokens > 4 ? 8 : 4;
}

static inline void store(float *y, float32x4_t sum, int64_t outputs) {
    if (outputs >= GROUP)
        vst1q_f32(y, sum);
    else
        for (int64_t i = 0; i < outputs; i++) y[i] = sum[i];
}

// [tokens][inputs] -> [inputs][size] for four tokens of a tile, those that are there; the others are zeros.
static void lay_out_four(const float *x, int64_t stride, int64_t tokens, int64_t inputs, float *to, int64_t size) {
    const float *row[4];
    for (int64_t t = 0; t < 4; t++) row[t] = x + (t < tokens ? t : 0) * stride;
    int64_t k = 0;
    for (; tokens >= 4 && k + 4 <= inputs; k += 4) {
        float32x4_t r0 = vld1q_f32(row[0] + k), r1 = vld1q_f32(row[1] + k), r2 = vld1q_f32(row[2] + k), r3 = vld1q_f32(row[3] + k);
        float32x4x2_t upper = vtrnq_f32(r0, r1), lower = vtrnq_f32(r2, r3);
        vst1q_f32(to + k * size, vcombine_f32(vget_low_f32(upper.val[0]), vget_low_f32(lower.val[0])));
        vst1q_f32(to + (k + 1) * size, vcombine_f32(vget_low_f32(upper.val[1]), vget_low_f32(lower.val[1])));
        vst1q_f32(to + (k + 2) * size, vcombine_f32(vget_high_f32(upper.val[0]), vget_high_f32(lower.val[0])));
        vst1q_f32(to + (k + 3) * size, vcombine_f32(vget_high_f32(upper.val[1]), vget_high_f32(lower.val[1])));
    }
    for (; k < inputs; k++)
        for (int64_t t = 0; t < 4; t++) to[k * size + t] = t < tokens ? row[t][k] : 0.0f;
}

// Tile after tile, [inputs][tokens of the tile]; a tile that is not full has zeros.
static void lay_out(const float *x, int64_t stride, int64_t tokens, int64_t inputs, float *to) {
    for (int64_t first = 0, size; first < tokens; first += size, to += size * inputs) {
        size = tile_of(tokens - first, inputs);
        for (int64_t t = 0; t < size; t += 4) lay_out_four(x + (first + t) * stride, stride, tokens - first - t, inputs, to + t, size);
    }
}

// GROUPS_AT_ONCE groups of outputs, or what is left of them, for all tiles.
static void group_products(const float *x, const float *w, int64_t inputs, float *y, int64_t stride, int64_t tokens, int64_t outputs) {
    float sums[16 * GROUP];
    for (int64_t first = 0, size; first < tokens; first += size, x += size * inputs) {
        size = tile_of(tokens - first, inputs);
        int64_t groups = 16 / size, count = tokens - first < size ? tokens - first : size;
        for (int64_t group = 0; group < GROUPS_AT_ONCE && group * GROUP < outputs; group += groups) {
            const float *weights = w + group * inputs * GROUP;
            (size == 16 ? tile_16 : size == 8 ? tile_8 : tile_4)(x, weights, inputs, sums);
            for (int64_t g = 0; g < groups; g++)
                for (int64_t t = 0; t < count; t++) {
                    int64_t column = (group + g) * GROUP;
                    store(y + (first + t) * stride + column, vld1q_f32(sums + (g * size + t) * GROUP), outputs - column);
                }
        }
    }
}

// room: [inputs * (tokens + 3)] floats
void linear(const float *x, int64_t x_stride, const float *w, int64_t inputs, int64_t outputs, float *y, int64_t y_stride, int64_t tokens,
            float *room) {
    for (int64_t first = 0; first < tokens; first += TOKENS_AT_ONCE) {  // whose inputs stay in the cache
        int64_t count = tokens - first < TOKENS_AT_ONCE ? tokens - first : TOKENS_AT_ONCE;
        lay_out(x + first * x_stride, x_stride, count, inputs, room + first * inputs);
#pragma omp parallel for schedule(dynamic) if (inputs * outputs > MIN_PARALLEL_WEIGHTS)
        for (int64_t column = 0; column < outputs; column += GROUPS_AT_ONCE * GROUP)
            group_products(room + first * inputs, w + column * inputs, inputs, y + first * y_stride + column, y_stride, count, outputs - column);
    }
}

// float16's bits, shifted to where float32 has them: the number times 2^-112.
static inline float32x4_t shrunk(int16x4_t bits) {
    return vreinterpretq_f32_s32(vandq_s32(vshll_n_s16(bits, 13), vdupq_n_s32((int32_t)0x8fffffff)));
}

static const float HALF_WAY = 0x1p56f;  // the factor of 2^112 in two parts, so that nothing gets too large or too small

// One token; half: the matrix in float16, or null. room: [inputs] floats.
void linear_of_one(const float *x, const float *w, const int16_t *half, int64_t inputs, int64_t outputs, float *y, float *room) {
    int64_t even = inputs / 4 * 4;
    float scale = half ? HALF_WAY : 1.0f;
    for (int64_t k = 0; k < inputs; k++) room[k] = x[k] * scale;
#pragma omp parallel for schedule(dynamic, GROUPS_OF_ONE) if (inputs * outputs > MIN_PARALLEL_WEIGHTS)
    for (int64_t column = 0; column < outputs; column += GROUP) {
        float32x4_t s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        const int16_t *bits = half + column * inputs;
        const float *weights = w + column * inputs;
        for (int64_t k = 0; half && k < even; k += 4) {
            float32x4_t four = vld1q_f32(room + k);
            int16x8_t two = vld1q_s16(bits + k * GROUP), more = vld1q_s16(bits + k * GROUP + 2 * GROUP);
            s0 = vfmaq_laneq_f32(s0, shrunk(vget_low_s16(two)), four, 0);
            s1 = vfmaq_laneq_f32(s1, shrunk(vget_high_s16(two)), four, 1);
            s2 = vfmaq_laneq_f32(s2, shrunk(vget_low_s16(more)), four, 2);
            s3 = vfmaq_laneq_f32(s3, shrunk(vget_high_s16(more)), four, 3);
        }
        for (int64_t k = 0; !half && k < even; k += 4) {
            float32x4_t four = vld1q_f32(room + k);
            const float *at = weights + k * GROUP;
            s0 = vfmaq_laneq_f32(s0, vld1q_f32(at), four, 0);
            s1 = vfmaq_laneq_f32(s1, vld1q_f32(at + GROUP), four, 1);
            s2 = vfmaq_laneq_f32(s2, vld1q_f32(at + 2 * GROUP), four, 2);
            s3 = vfmaq_laneq_f32(s3, vld1q_f32(at + 3 * GROUP), four, 3);
        }
        for (int64_t k = even; k < inputs; k++)
            s0 = vfmaq_n_f32(s0, half ? shrunk(vld1_s16(bits + k * GROUP)) : vld1q_f32(weights + k * GROUP), room[k]);
        store(y + column, vmulq_n_f32((s0 + s1) + (s2 + s3), scale), outputs - column);
    }
}
