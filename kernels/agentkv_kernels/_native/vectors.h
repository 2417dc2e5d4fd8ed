/* Vectors of floats as wide as the level allows, and what attention does with whole ones.
 *
 * Arithmetic is the compiler's vector extension; a multiplication and the addition after it are
 * one instruction. NaN comes out of everything that NaN goes into. */
#ifndef AGENTKV_VECTORS_H
#define AGENTKV_VECTORS_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
enum { WIDTH = 16, COLUMNS = 4 }; /* COLUMNS: vectors side by side in a register tile */
enum { LANE_TOKENS = 16, LANE_DIMS = 16, LANE_VECTORS = 3 };
#define SHUFFLE __builtin_shufflevector
#define EVEN(a, b) \
    SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) \
    SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
enum { WIDTH = 8, COLUMNS = 2 };
enum { LANE_TOKENS = 8, LANE_DIMS = 8, LANE_VECTORS = 3 };
#define SHUFFLE __builtin_shufflevector
#define EVEN(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float loose_vec __attribute__((vector_size(4 * WIDTH), may_alias, aligned(4)));
typedef int32_t int_vec __attribute__((vector_size(4 * WIDTH), may_alias));

INLINE vec load(const float *from) { return *(const loose_vec *)from; }
INLINE void store(float *to, vec x) { *(loose_vec *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }

/* a * b + c, rounded once: what the compiler makes of the three apart is up to it. */
INLINE vec fused(vec a, vec b, vec c) {
#ifdef __AVX512F__
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* A yes or no for each lane. */
#ifdef __AVX512F__
typedef __mmask16 lane_mask;
#else
typedef int_vec lane_mask;
#endif

/* Of each pair a where the mask says yes, else b. */
INLINE vec chosen(lane_mask mask, vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_mask_blend_ps(mask, (__m512)b, (__m512)a);
#else
    return (vec)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#endif
}

/* Where begin <= x < end. */
INLINE lane_mask between(int_vec x, int_vec begin, int_vec end) {
#ifdef __AVX512F__
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask((__m512i)x, (__m512i)begin),
                                        (__m512i)x, (__m512i)end);
#else
    return (x >= begin) & (x < end);
#endif
}

INLINE lane_mask equal(vec a, vec b) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
#else
    return a == b;
#endif
}

INLINE int_vec all_of_int(int32_t x) { return x - (int_vec){0}; }

/* 0, 1, 2, ... */
INLINE int_vec counted(void) {
#ifdef __AVX512F__
    return (int_vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (int_vec){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

/* The larger one of each pair; b where one of them is NaN. */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

INLINE vec smaller(vec a, vec b) {
#ifdef __AVX512F__
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#endif
}

/* WIDTH signed bytes as floats; by intrinsics, since compilers convert vectors one by one. */
INLINE vec bytes_as_floats(const void *from) {
#ifdef __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
#else
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from)));
#endif
}

/* WIDTH numbers of bfloat16: the upper halves of floats. */
INLINE vec halves_as_floats(const void *from) {
#ifdef __AVX512F__
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16);
#else
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
#endif
}

INLINE float sum_of(vec x) {
    float sums[WIDTH] __attribute__((aligned(64)));
    vec y = EVEN(x, x) + ODD(x, x);
    y = EVEN(y, y) + ODD(y, y);
    y = EVEN(y, y) + ODD(y, y);
    if (WIDTH == 16) y = EVEN(y, y) + ODD(y, y);
    store(sums, y);
    return sums[0];
}

INLINE float largest_of(vec x) {
    float found[WIDTH] __attribute__((aligned(64)));
    vec y = larger(EVEN(x, x), ODD(x, x));
    y = larger(EVEN(y, y), ODD(y, y));
    y = larger(EVEN(y, y), ODD(y, y));
    if (WIDTH == 16) y = larger(EVEN(y, y), ODD(y, y));
    store(found, y);
    return found[0];
}

/* 2^x within 2 units in the last place, for x <= 127; what lies below -126 becomes 2^-126.
 * x = n + f with n whole and |f| <= 1/2; 2^f by its Taylor series in f ln 2, to the 7th power. */
INLINE vec power_of_two(vec x) {
    x = larger(all(-126.0f), x);
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: an addition rounds to whole numbers */
    vec rounded = x + shift;
    vec f = x - (rounded - shift);
    vec sum = all(1.5252734e-5f);
    sum = fused(sum, f, all(1.5403530e-4f));
    sum = fused(sum, f, all(1.3333558e-3f));
    sum = fused(sum, f, all(9.6181291e-3f));
    sum = fused(sum, f, all(5.5504109e-2f));
    sum = fused(sum, f, all(2.4022651e-1f));
    sum = fused(sum, f, all(6.9314718e-1f));
    sum = fused(sum, f, all(1.0f));
    /* n stands in the low bits of `rounded`; added to the exponent it multiplies by 2^n. */
    return (vec)((int_vec)sum + ((int_vec)rounded << 23));
}

/* tanh(x) within 1e-7, by powers of two. */
INLINE vec tanh_of(vec x) {
    x = larger(all(-20.0f), smaller(all(20.0f), x));
    return 1.0f - 2.0f / (power_of_two(x * 2.8853901f) + 1.0f);
}

/* Transposes WIDTH vectors: each stage interleaves the two halves of the list. */
INLINE void transpose(vec *x) {
    vec y[WIDTH];
    for (int stage = 1; stage < WIDTH; stage *= 2) {
        for (int i = 0; i < WIDTH / 2; i++) {
            y[2 * i] = LOW(x[i], x[i + WIDTH / 2]);
            y[2 * i + 1] = HIGH(x[i], x[i + WIDTH / 2]);
        }
        for (int i = 0; i < WIDTH; i++) x[i] = y[i];
    }
}

#endif
