/* Vectors of floats as wide as the level has them, and what the kernels compute with them.
 *
 * It knows no layout and no kernel. NaN and infinity pass through everything but `vmax`.
 */
#ifndef AGENTKV_LANES_H
#define AGENTKV_LANES_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 16
typedef __m512 vf;
typedef __m512i vi;
#define vload _mm512_loadu_ps
#define vstore _mm512_storeu_ps
#define vset _mm512_set1_ps
#define viset _mm512_set1_epi32
#define vadd _mm512_add_ps
#define vsub _mm512_sub_ps
#define vmul _mm512_mul_ps
#define vdiv _mm512_div_ps
#define vmax _mm512_max_ps
#define vmin _mm512_min_ps
#define vfma _mm512_fmadd_ps
#define vabs _mm512_abs_ps
#define viadd _mm512_add_epi32
#define vround_int _mm512_cvtps_epi32
#define vfloat _mm512_cvtepi32_ps
#define vsum _mm512_reduce_add_ps
#define vmaximum _mm512_reduce_max_ps
#define visum _mm512_reduce_add_epi32
#else
#define LANES 8
typedef __m256 vf;
typedef __m256i vi;
#define vload _mm256_loadu_ps
#define vstore _mm256_storeu_ps
#define vset _mm256_set1_ps
#define viset _mm256_set1_epi32
#define vadd _mm256_add_ps
#define vsub _mm256_sub_ps
#define vmul _mm256_mul_ps
#define vdiv _mm256_div_ps
#define vmax _mm256_max_ps
#define vmin _mm256_min_ps
#define vfma _mm256_fmadd_ps
#define vabs(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define viadd _mm256_add_epi32
#define vround_int _mm256_cvtps_epi32
#define vfloat _mm256_cvtepi32_ps

INLINE float vsum(vf a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

INLINE float vmaximum(vf a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

INLINE int32_t visum(vi a) {
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
#endif

/* 2**n * p(r), where x = (n + r) * ln 2 and |r| <= 1/2; p is the Taylor series of 2**r to r**7, so
 * the relative error is that of its roundings, about 1e-7. Arguments are clamped to [-87, 88]. */
INLINE vf vexp(vf x) {
    const vf clamped = vmin(vset(88.0f), vmax(vset(-87.0f), x)); /* a NaN stays one: see vmax's order */
    const vf scaled = vmul(clamped, vset(1.44269504f));
    const vi n = vround_int(scaled);
    /* ln 2 in two parts, so that the remainder keeps its bits (Cody and Waite). */
    vf r = vfma(vfloat(n), vset(-0.693359375f), clamped);
    r = vfma(vfloat(n), vset(2.12194440e-4f), r);
    vf p = vset(1.0f / 5040);
    p = vfma(p, r, vset(1.0f / 720));
    p = vfma(p, r, vset(1.0f / 120));
    p = vfma(p, r, vset(1.0f / 24));
    p = vfma(p, r, vset(1.0f / 6));
    p = vfma(p, r, vset(0.5f));
    p = vfma(p, r, vset(1.0f));
    p = vfma(p, r, vset(1.0f));
#ifdef __AVX512F__
    return _mm512_scalef_ps(p, vfloat(n));
#else
    return vmul(p, _mm256_castsi256_ps(_mm256_slli_epi32(viadd(n, viset(127)), 23)));
#endif
}

#endif
