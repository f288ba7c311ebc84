// Attention of decodes over the paged cache, for a CPU, in float32. Twin: paged_attention.py. native.c comes before it.

enum { HEADS_AT_ONCE = 8, KEYS_AT_ONCE = 16 };
#if defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// scores[i] = scale * q . keys[i]
static inline __attribute__((always_inline)) void score_keys(const float *q, const float *const *keys, int64_t count, float *scores,
                                                             int64_t head_dim, float scale) {
    for (int64_t i = 0; i < count; i++) {
        if (head_dim % 64) {
            scores[i] = scale * dot(q, keys[i], head_dim);
            continue;
        }
        Floats sums[4] = {{0}, {0}, {0}, {0}}, sum;
        for (int64_t d = 0; d < head_dim; d += 4 * LANES) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[j] += *(const Floats *)(q + d + j * LANES) * *(const Floats *)(keys[i] + d + j * LANES);
        }
        sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float total = 0.0f;
#pragma GCC unroll 8
        for (int j = 0; j < LANES; j++) total += sum[j];
        scores[i] = scale * total;
    }
}

// out = before * out + the sum of weights[i] * values[i]
static inline __attribute__((always_inline)) void add_values(const float *weights, const float *const *values, int64_t count, float *out,
                                                             int64_t head_dim, float before) {
    int64_t whole = head_dim / 64 * 64;
    for (int64_t d = 0; d < whole; d += 64) {  // these stay in registers
        Floats sums[64 / LANES];
#pragma GCC unroll 16
        for (int j = 0; j < 64 / LANES; j++) sums[j] = before * *(const Floats *)(out + d + j * LANES);
        for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 16
            for (int j = 0; j < 64 / LANES; j++) sums[j] += weights[i] * *(const Floats *)(values[i] + d + j * LANES);
        }
#pragma GCC unroll 16
        for (int j = 0; j < 64 / LANES; j++) *(Floats *)(out + d + j * LANES) = sums[j];
    }
    for (int64_t d = whole; d < head_dim; d++) out[d] *= before;
    for (int64_t i = 0; whole < head_dim && i < count; i++)
#pragma omp simd
        for (int64_t d = whole; d < head_dim; d++) out[d] += weights[i] * values[i][d];
}

// Query heads of one sequence that share a key head. Keys are taken KEYS_AT_ONCE at a time: what was weighed before is scaled down where a
// later key has a higher score.
static inline __attribute__((always_inline)) void attend(const float *q, const float *cache, const int32_t *blocks, int64_t first,
                                                         int64_t end, float *out, int64_t heads, int64_t kv_head, int64_t kv_heads,
                                                         int64_t head_dim, int64_t block_size, float scale, float cap) {
    float scores[KEYS_AT_ONCE], tops[HEADS_AT_ONCE], sums[HEADS_AT_ONCE] = {0};
    const float *keys[KEYS_AT_ONCE], *values[KEYS_AT_ONCE];
    for (int64_t h = 0; h < heads; h++) tops[h] = -INFINITY;
    memset(out, 0, heads * head_dim * sizeof(float));
    for (; first < end; first += KEYS_AT_ONCE) {
        int64_t count = end - first < KEYS_AT_ONCE ? end - first : KEYS_AT_ONCE;
        for (int64_t i = 0; i < count; i++) {
            int64_t place = blocks[(first + i) / block_size] * block_size + (first + i) % block_size;
            keys[i] = cache + (place * 2 * kv_heads + kv_head) * head_dim;
            values[i] = keys[i] + kv_heads * head_dim;
            for (int64_t d = 0; d < head_dim; d += 16) __builtin_prefetch(keys[i] + d), __builtin_prefetch(values[i] + d);
        }
        for (int64_t h = 0; h < heads; h++) {
            float top = tops[h], sum = 0.0f;
            score_keys(q + h * head_dim, keys, count, scores, head_dim, scale);
            if (cap > 0.0f)
                for (int64_t i = 0; i < count; i++) scores[i] = cap * tanhf(scores[i] / cap);
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; i++) sum += scores[i] = exp_of(scores[i] - top);
            float before = sums[h] == 0.0f ? 0.0f : exp_of(tops[h] - top);
            add_values(scores, values, count, out + h * head_dim, head_dim, before);
            sums[h] = sums[h] * before + sum;
            tops[h] = top;
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; sums[h] != 0.0f && d < head_dim; d++) out[h * head_dim + d] /= sums[h];
}

// paged_attention.py
void paged_attention(const float *q, int64_t q_stride, const float *cache, const int32_t *table, int64_t table_stride, const int32_t *lens,
                     float *out, int64_t seqs, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, float scale, float cap,
                     int64_t window) {
    int64_t group = heads / kv_heads, parts = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, work = 0;
    for (int64_t seq = 0; seq < seqs; seq++) work += lens[seq] * heads * head_dim;
#pragma omp parallel for collapse(2) schedule(dynamic) if (work > PARALLEL_WORK)
    for (int64_t seq = 0; seq < seqs; seq++)
        for (int64_t part = 0; part < kv_heads * parts; part++) {
            int64_t head = part / parts, from = part % parts * HEADS_AT_ONCE, at = head * group + from;
            int64_t count = group - from < HEADS_AT_ONCE ? group - from : HEADS_AT_ONCE;
            int64_t first = window && lens[seq] > window ? lens[seq] - window : 0;
            const float *from_q = q + seq * q_stride + at * head_dim;
            float *to = out + (seq * heads + at) * head_dim;
            const int32_t *blocks = table + seq * table_stride;
            if (head_dim == 64)  // the compiler makes straight code for a size that it knows
                attend(from_q, cache, blocks, first, lens[seq], to, count, head, kv_heads, 64, block_size, scale, cap);
            else if (head_dim == 128)
                attend(from_q, cache, blocks, first, lens[seq], to, count, head, kv_heads, 128, block_size, scale, cap);
            else
                attend(from_q, cache, blocks, first, lens[seq], to, count, head, kv_heads, head_dim, block_size, scale, cap);
        }
}
