/* Vectors of floats as wide as the machine's, and what is done to them. */
#ifndef BLASST_VEC_H
#define BLASST_VEC_H

#include <stdint.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* LANES floats a vector; COLUMNS vectors a micro-tile: with ROWS rows they fill the registers. */
#define ROWS 6
#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS 4
#elif defined(__AVX__)
#define LANES 8
#define COLUMNS 2
#elif defined(__aarch64__)
#define LANES 4
#define COLUMNS 4
#else
#define LANES 4
#define COLUMNS 2
#endif
#define PANEL (LANES * COLUMNS)

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec load(const float *p) { return *(const vec *)p; }

INLINE void store(float *p, vec x) { *(vec *)p = x; }

/* The larger of two numbers; b where one is NaN, on x86. */
INLINE vec vmax(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE__)
    return (vec)_mm_max_ps((__m128)a, (__m128)b);
#elif defined(__aarch64__)
    return (vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    ivec larger = a > b;
    return (vec)(((ivec)a & larger) | ((ivec)b & ~larger));
#endif
}

/* 2 ** x for x <= 0: 1 + f * (...) on [-1/2, 1/2], relative error below 2e-7; exactly 0 below -127
   and at -inf, exactly 1 at 0. */
INLINE vec exp2_vec(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2 ** 23: adding it rounds to a whole number */
    x = vmax(splat(-127.0f), x);
    vec whole = x + magic;
    vec f = x - (whole - magic);
    vec p = splat(0.001326472725f);
    p = p * f + splat(0.009671512786f);
    p = p * f + splat(0.05550733744f);
    p = p * f + splat(0.2402224208f);
    p = p * f + splat(0.6931469776f);
    p = p * f + splat(1.0f);
    /* The low bits of `whole` are the whole number itself: it goes to the exponent. */
    return (vec)((ivec)p + ((ivec)whole << 23));
}

#if defined(__clang__)
#define SHUFFLE(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE(x, ...) __builtin_shuffle(x, (ivec){__VA_ARGS__})
#endif

INLINE float largest(vec x) {
#if LANES == 16
    x = vmax(x, SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = vmax(x, SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = vmax(x, SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = vmax(x, SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
#else
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

INLINE float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

#endif
