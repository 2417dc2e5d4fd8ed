/* Attention of a few query vectors to a tile of tokens: scores, softmax, weighted sum.
 *
 * Everything here is float32 in a core's cache. Scores are logarithms to base 2, since `query` was
 * multiplied by log2(e); a query vector keeps its largest score, its denominator and its sum of
 * values from tile to tile, so that no score is kept. */
#ifndef AGENTKV_ATTENTION_TILE_H
#define AGENTKV_ATTENTION_TILE_H

#include "attention.h"
#include "vectors.h"

#include <math.h>

enum { MOST_COLUMNS = 4 }; /* vectors side by side, of few queries */
enum { BLOCK = 6 }; /* query vectors in registers at once: 6 x COLUMNS sums leave room for the rest */
enum { PARTS = 16 }; /* sums of which a tile's sum of weights is made */

/* Rows of a matrix: evenly spaced from `first`, or wherever `each` says. */
typedef struct {
    const float *first;
    int64_t stride;
    const float *const *each;
} Rows;

INLINE const float *row_of(Rows rows, int64_t i) {
    return rows.each ? rows.each[i] : rows.first + i * rows.stride;
}

/* c[r] = factor[r] c[r] + sum over k in [begin, end) of a[r][k] b[k], a tile of registers; without
 * factors c is written only. */
INLINE void product_tile(const int num_rows, const int num_columns, float *c, int64_t c_stride,
                         const float *factor, const float *a, int64_t a_stride, Rows b,
                         int64_t offset, int64_t begin, int64_t end) {
    vec sums[BLOCK][MOST_COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_columns; v++) {
            sums[r][v] = all(0.0f);
            if (factor) sums[r][v] = load(c + r * c_stride + v * WIDTH) * factor[r];
        }
    for (int64_t k = begin; k < end; k++) {
        const float *from = row_of(b, k) + offset;
        vec row[MOST_COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < num_columns; v++) row[v] = load(from + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            const vec weight = all(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < num_columns; v++) sums[r][v] = fused(weight, row[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_columns; v++) store(c + r * c_stride + v * WIDTH, sums[r][v]);
}

/* The same for a number of rows known when compiled, and any number of vectors side by side. */
INLINE void product_rows(const int num_rows, int64_t num_vectors, float *c, int64_t c_stride,
                         const float *factor, const float *a, int64_t a_stride, Rows b,
                         int64_t begin, int64_t end) {
    const int columns = num_rows <= 3 ? MOST_COLUMNS : COLUMNS; /* enough sums to be added at once */
    int64_t v = 0;
    for (; v + columns <= num_vectors; v += columns)
        product_tile(num_rows, columns, c + v * WIDTH, c_stride, factor, a, a_stride, b, v * WIDTH,
                     begin, end);
    for (; v + 2 <= num_vectors; v += 2)
        product_tile(num_rows, 2, c + v * WIDTH, c_stride, factor, a, a_stride, b, v * WIDTH, begin,
                     end);
    for (; v < num_vectors; v++)
        product_tile(num_rows, 1, c + v * WIDTH, c_stride, factor, a, a_stride, b, v * WIDTH, begin,
                     end);
}

#define CASES(CALL) \
    switch (num_rows) { \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        default: CALL(6); \
    }

/* scores (num_rows, TILE) = query (num_rows, depth) x keys (depth, TILE), the transposed ones. */
static void scores_of_many(int num_rows, int64_t num_vectors, float *scores, const float *query,
                           int64_t depth, const float *keys) {
    const Rows rows = {keys, TILE, NULL};
#define CALL(n) \
    product_rows(n, num_vectors, scores, TILE, NULL, query, depth, rows, 0, depth)
    CASES(CALL)
#undef CALL
}

/* sums (num_rows, width) = factor sums + weights (num_rows, [begin, end)) x values. */
static void add_values(int num_rows, int64_t width, float *sums, const float *factor,
                       const float *weights, const float *const *values, int64_t begin,
                       int64_t end) {
    const Rows rows = {NULL, 0, values};
#define CALL(n) \
    product_rows(n, width / WIDTH, sums, width, factor, weights, TILE, rows, begin, end)
    CASES(CALL)
#undef CALL
}

/* By what a sum up to now shrinks when the largest score moves from `before` to `most`. */
INLINE vec shrinking(vec before, vec most) {
    return chosen(equal(before, most), all(1.0f), power_of_two(before - most));
}

/* Adds what was summed up over later tokens to what was over earlier ones: one query, `width` sums.
 * The same, in the same order, as `attention_lanes.h` does. */
static void add_state(float *largest, float *denominator, float *sums, float other_largest,
                      float other_denominator, const float *other, int64_t width) {
    const vec before = all(*largest), after = all(other_largest), most = larger(before, after);
    const vec factor = shrinking(before, most), other_factor = shrinking(after, most);
    *largest = most[0];
    *denominator = fused(all(other_denominator), other_factor, all(*denominator) * factor)[0];
    for (int64_t d = 0; d < width; d += WIDTH)
        store(sums + d, fused(load(other + d), other_factor, load(sums + d) * factor));
}

/* Turns scores [begin, end) of one query vector into weights; the largest score and the
 * denominator move on. Returns the factor by which what was summed up before must shrink.
 *
 * Weights are added up as PARTS sums, one for the tokens with the same remainder, then in pairs. */
static float softmax_row(float *scores, int64_t begin, int64_t end, float softcap, float *largest,
                         float *denominator) {
    const int64_t num_vectors = (end + WIDTH - 1) / WIDTH;
    const int_vec from = all_of_int((int32_t)begin), to = all_of_int((int32_t)end);
    vec found = all(-INFINITY), sums[PARTS / WIDTH];
    for (int64_t v = 0; v < num_vectors; v++) {
        vec x = load(scores + v * WIDTH);
        if (softcap > 0) x = tanh_of(x) * softcap;
        const int_vec at = counted() + (int32_t)(v * WIDTH);
        x = chosen(between(at, from, to), x, all(-INFINITY));
        store(scores + v * WIDTH, x);
        found = larger(found, x);
    }
    const vec before = all(*largest), most = larger(all(largest_of(found)), before);
    for (int v = 0; v < PARTS / WIDTH; v++) sums[v] = all(0.0f);
    for (int64_t v = 0; v < num_vectors; v++) {
        const int_vec at = counted() + (int32_t)(v * WIDTH);
        vec weight = power_of_two(load(scores + v * WIDTH) - most);
        weight = chosen(between(at, from, to), weight, all(0.0f));
        sums[v % (PARTS / WIDTH)] += weight;
        store(scores + v * WIDTH, weight);
    }
    float sum = sum_of(sums[0]);
    for (int v = 1; v < PARTS / WIDTH; v++) sum += sum_of(sums[v]);
    const vec factor = shrinking(before, most);
    *largest = most[0];
    *denominator = fused(all(*denominator), factor, all(sum))[0];
    return factor[0];
}

/* Writes the tile's keys as columns: keys (TILE,) rows of `depth` become (depth, TILE). */
static void transpose_keys(float *to, const float *const *keys, int64_t num_vectors,
                           int64_t depth) {
    for (int64_t v = 0; v < num_vectors; v++)
        for (int64_t d = 0; d < depth; d += WIDTH) {
            vec x[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) x[i] = load(keys[v * WIDTH + i] + d);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) store(to + (d + i) * TILE + v * WIDTH, x[i]);
        }
}

#endif
