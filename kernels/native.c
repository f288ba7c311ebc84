// What a decode step does beside products and attention, for a CPU, in float32. Each function's twin in plain torch is in the module that its
// comment names; native.py calls them. A call of torch costs more than most of these take.
//
// The native*.c files are compiled as one, this first. Threads are those of torch's own OpenMP runtime, which is in the process already.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { PAGE_RANK = 8, COLUMNS_AT_ONCE = 512, PARALLEL_WORK = 1 << 15 };

// As exact as libm's to two units in the last place, and a loop of it becomes vector instructions.
static inline float exp_of(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float whole = rintf(clamped * 1.44269504f);
    float rest = fmaf(whole, -0.693359375f, clamped);
    rest = fmaf(whole, 2.12194440e-4f, rest);
    float series = 1.9875691500e-4f;
    series = fmaf(series, rest, 1.3981999507e-3f);
    series = fmaf(series, rest, 8.3334519073e-3f);
    series = fmaf(series, rest, 4.1665795894e-2f);
    series = fmaf(series, rest, 1.6666665459e-1f);
    series = fmaf(series, rest, 5.0000001201e-1f);
    float value = fmaf(series, rest * rest, rest) + 1.0f;
    union { int32_t bits; float number; } power = {.bits = ((int32_t)whole + 127) << 23};
    return x != x ? x : value * power.number;  // NaN stays NaN
}

// Four sums side by side: one would wait for itself.
static inline float dot(const float *left, const float *right, int64_t size) {
    int64_t quarter = size / 4;
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < quarter; i++) {
        s0 += left[i] * right[i];
        s1 += left[quarter + i] * right[quarter + i];
        s2 += left[2 * quarter + i] * right[2 * quarter + i];
        s3 += left[3 * quarter + i] * right[3 * quarter + i];
    }
    for (int64_t i = 4 * quarter; i < size; i++) s0 += left[i] * right[i];
    return (s0 + s1) + (s2 + s3);
}

// native_linear.py: how many of the values float16 has no number for, infinities among them.
void count_inexact(const float *values, int64_t count, int64_t *found) {
    const uint32_t least_normal = 0x38800000, most = 0x477fe000, lost_bits = 0x1fff;  // 2^-14, 65504, and what a normal number loses
    int64_t total = 0;
#pragma omp parallel for simd reduction(+ : total) if (count > PARALLEL_WORK)
    for (int64_t i = 0; i < count; i++) {
        float size = fabsf(values[i]);
        uint32_t bits;
        memcpy(&bits, &size, sizeof bits);
        float steps = bits < least_normal ? size * 0x1p24f : 0.0f;  // below the least normal number it has multiples of 2^-24
        int is_small = bits < least_normal && steps == (float)(int32_t)steps;
        int is_normal = bits >= least_normal && bits <= most && !(bits & lost_bits);
        total += !is_small && !is_normal;
    }
    *found = total;
}

// vocabulary.py: the tokens' rows of the table; of an id that has none, its last.
void embed(const int32_t *ids, const float *table, int64_t rows, int64_t size, float *out, int64_t tokens) {
    for (int64_t token = 0; token < tokens; token++) {
        int64_t row = ids[token] >= 0 && ids[token] < rows ? ids[token] : rows - 1;
        memcpy(out + token * size, table + row * size, size * sizeof(float));
    }
}

// rotary.py: the positions' rows of both tables; beyond the end, the last ones.
void take_angles(const int64_t *positions, const float *cos, const float *sin, int64_t num_positions, int64_t size, float *cos_out,
                 float *sin_out, int64_t tokens) {
    for (int64_t token = 0; token < tokens; token++) {
        int64_t row = positions[token] < num_positions ? positions[token] : num_positions - 1;
        memcpy(cos_out + token * size, cos + row * size, size * sizeof(float));
        memcpy(sin_out + token * size, sin + row * size, size * sizeof(float));
    }
}

// linear.py
void add_bias(float *y, int64_t stride, const float *bias, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++)
#pragma omp simd
        for (int64_t i = 0; i < size; i++) y[row * stride + i] += bias[i];
}

// greedy.py. The first of the largest, and log(sum(exp(x))) of each row.
void most_and_total(const float *logits, int64_t stride, int64_t rows, int64_t size, int64_t *tokens, float *totals) {
#pragma omp parallel for if (rows * size > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * stride;
        float top = -INFINITY;
        double total = 0.0;
        int64_t token = 0;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < size; i++) top = x[i] > top ? x[i] : top;
        while (token < size && x[token] != top) token++;
        for (int64_t first = 0; first < size; first += COLUMNS_AT_ONCE) {  // each to a sum of its own: a long one would lose small numbers
            int64_t end = first + COLUMNS_AT_ONCE < size ? first + COLUMNS_AT_ONCE : size;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = first; i < end; i++) sum += exp_of(x[i] - top);
            total += sum;
        }
        tokens[row] = token < size ? token : 0;
        totals[row] = top + (float)log(total);
    }
}

// norm.py. x += scale * added where there is something to add; out = x / sqrt(mean(x²) + eps) * weight. out may be x.
void rms_norm(float *x, int64_t x_stride, const float *added, int64_t added_stride, float scale, const float *weight, float eps, float *out,
              int64_t out_stride, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        float *from = x + row * x_stride, *to = out + row * out_stride;
        if (added) {
            const float *more = added + row * added_stride;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) from[i] += scale * more[i];
        }
        float rms = sqrtf(dot(from, from, size) / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from[i] / rms * weight[i];
    }
}

// activation.py. out = silu(gate) * up
void silu_gate(const float *gate_up, int64_t stride, float *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * stride, *up = gate + size;
        float *to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
    }
}

// rotary.py. Rotates the first heads of each token in place, and copies the last ones into its slot of the cache, none for a slot below 0.
void rotate_and_store(float *qkv, int64_t stride, const float *cos, const float *sin, int64_t rope_stride, int64_t rotary_dim, float *cache,
                      const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    int64_t half = rotary_dim / 2, stored = 2 * kv_heads * head_dim;
    for (int64_t token = 0; token < tokens; token++) {
        float *row = qkv + token * stride;
        const float *c = cos + token * rope_stride, *s = sin + token * rope_stride;
        for (int64_t head = 0; rotary_dim && head < heads + kv_heads; head++) {
            float *x = row + head * head_dim;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = x[i], second = x[half + i];
                x[i] = first * c[i] + second * s[i];
                x[half + i] = second * c[half + i] + first * s[half + i];
            }
        }
        if (slots[token] >= 0) memcpy(cache + slots[token] * stored, row + heads * head_dim, stored * sizeof(float));
    }
}

// to[r] = x . rows[r] for the ranks of one page. Sums side by side: one would wait for itself in every step.
static void shrink_page(const float *x, const float *rows, int64_t inputs, float *to) {
    const float *r0 = rows, *r1 = r0 + inputs, *r2 = r1 + inputs, *r3 = r2 + inputs;
    const float *r4 = r3 + inputs, *r5 = r4 + inputs, *r6 = r5 + inputs, *r7 = r6 + inputs;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3, s4, s5, s6, s7)
    for (int64_t i = 0; i < inputs; i++) {
        s0 += x[i] * r0[i];
        s1 += x[i] * r1[i];
        s2 += x[i] * r2[i];
        s3 += x[i] * r3[i];
        s4 += x[i] * r4[i];
        s5 += x[i] * r5[i];
        s6 += x[i] * r6[i];
        s7 += x[i] * r7[i];
    }
    float sums[PAGE_RANK] = {s0, s1, s2, s3, s4, s5, s6, s7};
    memcpy(to, sums, sizeof sums);
}

// y += w[0] rows[0] + … + w[7] rows[7]
static void expand_page(float *restrict y, const float *w, const float *rows, int64_t stride, int64_t columns) {
    const float *r0 = rows, *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
    const float *r4 = r3 + stride, *r5 = r4 + stride, *r6 = r5 + stride, *r7 = r6 + stride;
    float w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3], w4 = w[4], w5 = w[5], w6 = w[6], w7 = w[7];
#pragma omp simd
    for (int64_t i = 0; i < columns; i++)
        y[i] += w0 * r0[i] + w1 * r1[i] + w2 * r2[i] + w3 * r3[i] + w4 * r4[i] + w5 * r5[i] + w6 * r6[i] + w7 * r7[i];
}

// lora.py. y[t, columns of p] += (x[t] . a[p, ranks of t]) b[ranks of t, columns of p] for the tokens of each block, as LoraSegments has them;
// shrunk: [tokens, projections, max_pages, PAGE_RANK] of room.
void add_lora(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *a, int64_t pool_ranks, int64_t inputs, const float *b,
              int64_t b_stride, const int64_t *widths, int64_t projections, const int32_t *blocks, int64_t num_blocks, const int32_t *page_ids,
              int64_t max_pages, float *shrunk) {
    int64_t token_stride = projections * max_pages * PAGE_RANK, num_chunks = (b_stride + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE, work = 0;
    for (int64_t block = 0; block < num_blocks; block++) work += blocks[4 * block + 1] * blocks[4 * block + 3] * PAGE_RANK * inputs;
#pragma omp parallel if (work > PARALLEL_WORK)
    {
#pragma omp for collapse(2) schedule(dynamic, 2)
        for (int64_t block = 0; block < num_blocks; block++)
            for (int64_t part = 0; part < projections * max_pages; part++) {
                const int32_t *at = blocks + 4 * block;
                int64_t projection = part / max_pages, page = part % max_pages;
                if (page >= at[3]) continue;
                const float *rows = a + (projection * pool_ranks + page_ids[at[2] + page] * PAGE_RANK) * inputs;
                for (int64_t token = at[0]; token < at[0] + at[1]; token++)
                    shrink_page(x + token * x_stride, rows, inputs, shrunk + token * token_stride + part * PAGE_RANK);
            }
#pragma omp for collapse(2) schedule(dynamic, 2)
        for (int64_t block = 0; block < num_blocks; block++)
            for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
                const int32_t *at = blocks + 4 * block;
                int64_t start = chunk * COLUMNS_AT_ONCE, end = start + COLUMNS_AT_ONCE < b_stride ? start + COLUMNS_AT_ONCE : b_stride;
                int64_t column = 0;
                for (int64_t projection = 0; projection < projections; column += widths[projection++]) {
                    int64_t from = column > start ? column : start, to = column + widths[projection] < end ? column + widths[projection] : end;
                    for (int64_t page = 0; from < to && page < at[3]; page++) {
                        const float *rows = b + page_ids[at[2] + page] * (PAGE_RANK * b_stride) + from;
                        const float *weights = shrunk + (projection * max_pages + page) * PAGE_RANK;
                        for (int64_t token = at[0]; token < at[0] + at[1]; token++)
                            expand_page(y + token * y_stride + from, weights + token * token_stride, rows, b_stride, to - from);
                    }
                }
            }
    }
}
