/* The parts of a decode step that are not matrix products: one pass over memory each, in fp32 inside.
 *
 * Every function exists for bf16 and fp32. Shapes: N rows of one token, H query heads, K key/value heads, P = H / K,
 * D head dims (even), C dims of the hidden state. The cache of a layer is [slots, K, capacity, D], row n in slot n.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    union { uint32_t bits; float value; } v = {(uint32_t)x << 16};
    return v.value;
}

static inline bf16 narrow(float x) { /* to nearest, ties to even, as torch rounds */
    union { float value; uint32_t bits; } v = {x};
    return (bf16)((v.bits + 0x7FFF + ((v.bits >> 16) & 1)) >> 16);
}

/* exp for x <= 0 that a compiler can vectorise: 2^n from the exponent's bits, the rest by a polynomial (Cephes'
 * coefficients), within two units in the last place of fp32. */
static inline float exp_of_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return (p * f * f + f + 1.0f) * power.value;
}

#define SAME(x) (x)
#define PARALLEL _Pragma("omp parallel for schedule(static)")

#define KERNELS(T, LOAD, STORE)                                                                                     \
                                                                                                                    \
/* out = x / sqrt(mean(x^2) + eps) * weight, row by row. x, out [N, C]; weight [C]. */                              \
void rms_norm_##T(const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {                      \
    PARALLEL                                                                                                        \
    for (int64_t r = 0; r < rows; r++) {                                                                            \
        const T *in = x + r * dim;                                                                                  \
        float sum = 0;                                                                                              \
        for (int64_t d = 0; d < dim; d++) sum += LOAD(in[d]) * LOAD(in[d]);                                         \
        const float scale = 1.0f / sqrtf(sum / dim + eps);                                                          \
        for (int64_t d = 0; d < dim; d++)                                                                           \
            out[r * dim + d] = STORE(LOAD(STORE(LOAD(in[d]) * scale)) * LOAD(weight[d]));                           \
    }                                                                                                               \
}                                                                                                                   \
                                                                                                                    \
static void rotate_##T(const T *x, const T *norm, float eps, const T *cos, const T *sin, T *out, int64_t dim) {     \
    float scale = 1.0f;                                                                                             \
    if (norm != NULL) {                                                                                             \
        float sum = 0;                                                                                              \
        for (int64_t d = 0; d < dim; d++) sum += LOAD(x[d]) * LOAD(x[d]);                                           \
        scale = 1.0f / sqrtf(sum / dim + eps);                                                                      \
    }                                                                                                               \
    const int64_t half = dim / 2;                                                                                   \
    for (int64_t d = 0; d < half; d++) {                                                                            \
        float a = LOAD(x[d]) * scale, b = LOAD(x[d + half]) * scale;                                                \
        if (norm != NULL) { a *= LOAD(norm[d]); b *= LOAD(norm[d + half]); }                                        \
        out[d] = STORE(a * LOAD(cos[d]) - b * LOAD(sin[d]));                                                        \
        out[d + half] = STORE(b * LOAD(cos[d + half]) + a * LOAD(sin[d + half]));                                   \
    }                                                                                                               \
}                                                                                                                   \
                                                                                                                    \
/* Rotate queries and keys of merged [N, H + 2K, D] by cos and sin [N, D] (after an RMS norm a head, if given),     \
 * write queries to out [N, H, D], and keys and values to the cache at each row's position. */                      \
void rotate_and_store_##T(const T *merged, const T *q_norm, const T *k_norm, float eps, const T *cos, const T *sin, \
                          const int64_t *positions, T *out, T *keys, T *values, int64_t rows, int64_t heads,        \
                          int64_t groups, int64_t dim, int64_t capacity) {                                          \
    PARALLEL                                                                                                        \
    for (int64_t r = 0; r < rows; r++) {                                                                            \
        const T *x = merged + r * (heads + 2 * groups) * dim, *c = cos + r * dim, *s = sin + r * dim;               \
        for (int64_t h = 0; h < heads; h++)                                                                         \
            rotate_##T(x + h * dim, q_norm, eps, c, s, out + (r * heads + h) * dim, dim);                           \
        for (int64_t g = 0; g < groups; g++) {                                                                      \
            const int64_t at = ((r * groups + g) * capacity + positions[r]) * dim;                                  \
            rotate_##T(x + (heads + g) * dim, k_norm, eps, c, s, keys + at, dim);                                   \
            for (int64_t d = 0; d < dim; d++) values[at + d] = x[(heads + groups + g) * dim + d];                   \
        }                                                                                                           \
    }                                                                                                               \
}                                                                                                                   \
                                                                                                                    \
/* softmax(q k^T * scale) v of q [N, H, D] over the first positions[n] + 1 tokens of slot n; out [N, H, D].         \
 * scratch: N * K * P * (capacity + 2 D) floats. */                                                                 \
void attend_##T(const T *q, const T *keys, const T *values, const int64_t *positions, T *out, float *scratch,       \
                int64_t rows, int64_t groups, int64_t per, int64_t dim, int64_t capacity, float scale) {            \
    PARALLEL                                                                                                        \
    for (int64_t r = 0; r < rows * groups; r++) {                                                                   \
        const int64_t length = positions[r / groups] + 1;                                                           \
        const T *K = keys + r * capacity * dim, *V = values + r * capacity * dim, *Q = q + r * per * dim;           \
        float *restrict S = scratch + r * per * (capacity + 2 * dim);                                               \
        float *restrict A = S + per * capacity, *restrict W = A + per * dim;                                        \
        for (int64_t i = 0; i < per * dim; i++) { W[i] = LOAD(Q[i]) * scale; A[i] = 0; }                            \
        for (int64_t l = 0; l < length; l++)                                                                        \
            for (int64_t g = 0; g < per; g++) {                                                                     \
                float sum = 0;                                                                                      \
                for (int64_t d = 0; d < dim; d++) sum += W[g * dim + d] * LOAD(K[l * dim + d]);                     \
                S[g * capacity + l] = sum;                                                                          \
            }                                                                                                       \
        for (int64_t g = 0; g < per; g++) {                                                                         \
            float *restrict s = S + g * capacity, top = s[0], sum = 0;                                              \
            for (int64_t l = 1; l < length; l++) top = s[l] > top ? s[l] : top;                                     \
            for (int64_t l = 0; l < length; l++) { s[l] = exp_of_negative(s[l] - top); sum += s[l]; }               \
            for (int64_t l = 0; l < length; l++) s[l] /= sum;                                                       \
        }                                                                                                           \
        for (int64_t l = 0; l < length; l++)                                                                        \
            for (int64_t g = 0; g < per; g++) {                                                                     \
                const float p = S[g * capacity + l];                                                                \
                for (int64_t d = 0; d < dim; d++) A[g * dim + d] += p * LOAD(V[l * dim + d]);                       \
            }                                                                                                       \
        for (int64_t i = 0; i < per * dim; i++) out[r * per * dim + i] = STORE(A[i]);                               \
    }                                                                                                               \
}

KERNELS(bf16, widen, narrow)
KERNELS(float, SAME, SAME)
