/* A row of logits, and the weight of each of its tokens: a share of the probability as a whole number.
 *
 *     weight = round(2^bits * 2^exponent),   exponent = (logit - greatest) / temperature / ln 2
 *
 * Weights are computed anew wherever they are wanted, in double precision, by the same operations in
 * the same order at every level and every place in a row: so a token has one weight, whoever asks.
 * They lie within 0.51 of the real number before rounding, while bits <= 44; at 52 bits within 2. Sums of
 * them are exact in any order: a row of them is at most 2^53. No multiplication stands before an
 * addition but as a fused one, so compilers have nothing to contract in one level and not in another.
 */
#ifndef AGENTKV_TOKEN_WEIGHTS_H
#define AGENTKV_TOKEN_WEIGHTS_H

#include <math.h>
#include <string.h>

#include "lanes.h"

enum { BLOCK = 64 }; /* tokens that are summed up at once */

#ifdef __AVX512F__
enum { DOUBLES = 8 };
#define dfma _mm512_fmadd_pd
#define dmax _mm512_max_pd /* the second where one is NaN */
#define dwiden(from) _mm512_cvtps_pd(_mm256_loadu_ps(from))
#else
enum { DOUBLES = 4 };
#define dfma _mm256_fmadd_pd
#define dmax _mm256_max_pd
#define dwiden(from) _mm256_cvtps_pd(_mm_loadu_ps(from))
#endif

typedef double vd __attribute__((vector_size(8 * DOUBLES), may_alias));
typedef int64_t vl __attribute__((vector_size(8 * DOUBLES), may_alias));
typedef int64_t loose_vl __attribute__((vector_size(8 * DOUBLES), may_alias, aligned(8)));

static const double LEAST_EXPONENT = -900.0; /* below, weights are 0 in any case */
static const double TO_WHOLE = 0x1.8p52;     /* added to a number below 2^51, leaves its whole part */
static const double WHOLE = 0x1p52;          /* the same for numbers in [0, 2^52] */

typedef struct {
    const float *logits;
    int64_t vocab_size, num_blocks; /* the last block may be short */
    int64_t bits;                   /* the greatest token weighs 2^bits */
    double greatest, per_logit;     /* per_logit: 1 / temperature / ln 2 */
    float *maxima;                  /* of each block; NaN counts as nothing */
} Row;

INLINE vd dall(double x) { return (vd){0} + x; }
INLINE vl lall(int64_t x) { return (vl){0} + x; }

INLINE int64_t lsum(vl x) {
    int64_t sum = x[0];
    for (int i = 1; i < DOUBLES; i++) sum += x[i];
    return sum;
}

/* 1 / temperature / ln 2, such that a difference of 0 stays 0 at any temperature above 0. */
INLINE double per_logit_at(double temperature) {
    const double factor = 1.4426950408889634 / temperature;
    return factor < 1e300 ? factor : 1e300; /* smaller than every difference of floats by far */
}

/* A row without its greatest logit, maxima and temperature. */
INLINE Row row_of(const float *logits, int64_t vocab_size) {
    Row row = {.logits = logits, .vocab_size = vocab_size};
    row.num_blocks = (vocab_size + BLOCK - 1) / BLOCK;
    row.bits = __builtin_clzll((uint64_t)vocab_size) - 11; /* a row sums to 2^53 at most */
    return row;
}

/* Exponents of the next DOUBLES tokens, at most 0. */
INLINE vd exponents_of(const float *logits, double greatest, double per_logit) {
    return dmax((dwiden(logits) - greatest) * per_logit, dall(LEAST_EXPONENT));
}

/* Weights of tokens. 2^exponent = 2^n * 2^f with n whole and |f| <= 1/2; 2^f - 1 = f * q(f), where q
 * interpolates at eleven Chebyshev nodes: 2e-17 of the result before operations are rounded. */
INLINE vl weights_of(vd exponents, int64_t bits) {
    const double shift = TO_WHOLE + 1023 + bits;
    const vd rounded = exponents + shift;
    const vd f = exponents - (rounded - shift);
    vd q = dall(4.4549605981865186e-10);
    q = dfma(q, f, dall(7.072585949269223e-09));
    q = dfma(q, f, dall(1.0178062445845774e-07));
    q = dfma(q, f, dall(1.321544258792169e-06));
    q = dfma(q, f, dall(1.525273382983612e-05));
    q = dfma(q, f, dall(1.540353044173605e-04));
    q = dfma(q, f, dall(1.3333558146416936e-03));
    q = dfma(q, f, dall(9.618129107606888e-03));
    q = dfma(q, f, dall(5.55041086648216e-02));
    q = dfma(q, f, dall(2.4022650695910097e-01));
    q = dfma(q, f, dall(6.931471805599453e-01));
    q = dfma(q, f, dall(1.0));
    /* n + bits + 1023 stands in the low bits of `rounded`: moved up they are those of 2^(n + bits). */
    const vd scale = (vd)((vl)rounded << 52);
    return (vl)dfma(q, scale, dall(WHOLE)) - (vl)dall(WHOLE);
}

/* Weights as doubles. */
INLINE vd reals_of(vl weights) { return (vd)(weights + (vl)dall(WHOLE)) - WHOLE; }

/* The logits of a block; those of a short one, filled up with -inf, in `padded`. */
INLINE const float *block_of(const Row *row, int64_t block, float *padded) {
    const float *logits = row->logits + block * BLOCK;
    const int64_t left = row->vocab_size - block * BLOCK;
    if (left >= BLOCK) return logits;
    for (int64_t i = 0; i < BLOCK; i++) padded[i] = i < left ? logits[i] : -INFINITY;
    return padded;
}

/* Finds the maxima of blocks; answers the token with the greatest logit: the first of equals, and NaN
 * counts as greater than everything. */
static inline int64_t find_greatest(const Row *row) {
    float padded[BLOCK], greatest = -INFINITY;
    vf odd = vset(0.0f); /* becomes NaN by NaN, also by +inf beside -inf */
    for (int64_t block = 0; block < row->num_blocks; block++) {
        const float *logits = block_of(row, block, padded);
        vf most = vset(-INFINITY);
        for (int i = 0; i < BLOCK; i += LANES) {
            const vf x = vload(logits + i);
            most = vmax(x, most);
            odd = vadd(odd, x);
        }
        row->maxima[block] = vmaximum(most);
        if (row->maxima[block] > greatest) greatest = row->maxima[block];
    }
    if (isnan(vsum(odd)))
        for (int64_t i = 0; i < row->vocab_size; i++)
            if (isnan(row->logits[i])) return i;
    int64_t block = 0;
    while (row->maxima[block] != greatest) block++;
    int64_t token = block * BLOCK;
    while (row->logits[token] != greatest) token++;
    return token;
}

/* Sums up the weights of each block; answers their sum. */
static inline int64_t sum_blocks(const Row *row, int64_t *sums) {
    float padded[BLOCK];
    int64_t total = 0;
    for (int64_t block = 0; block < row->num_blocks; block++) {
        const float *logits = block_of(row, block, padded);
        vl sum = lall(0);
        for (int i = 0; i < BLOCK; i += DOUBLES)
            sum += weights_of(exponents_of(logits + i, row->greatest, row->per_logit), row->bits);
        sums[block] = lsum(sum);
        total += sums[block];
    }
    return total;
}

/* A logit such that every token below weighs less than `weight`, a number above 0, before rounding. */
static inline float logit_of_weight(const Row *row, double weight) {
    const double down = (log2(weight) - (double)row->bits) / row->per_logit;
    const double error = 4 * __DBL_EPSILON__ * (fabs(row->greatest) + fabs(down));
    const float logit = (float)(row->greatest + down - error);
    return logit > -__FLT_MAX__ ? nextafterf(logit, -INFINITY) : -__FLT_MAX__;
}

#endif
