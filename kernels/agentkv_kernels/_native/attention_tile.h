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

enum { BLOCK = 6 }; /* query vectors in registers at once: 6 x COLUMNS sums leave room for the rest */
enum { FEW = 4 };   /* up to so many, dot products beat a product with transposed keys */

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
    vec sums[BLOCK][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_columns; v++) {
            sums[r][v] = all(0.0f);
            if (factor) sums[r][v] = load(c + r * c_stride + v * WIDTH) * factor[r];
        }
    for (int64_t k = begin; k < end; k++) {
        const float *from = row_of(b, k) + offset;
        vec row[COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < num_columns; v++) row[v] = load(from + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            const vec weight = all(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < num_columns; v++) sums[r][v] += weight * row[v];
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
    int64_t v = 0;
    for (; v + COLUMNS <= num_vectors; v += COLUMNS)
        product_tile(num_rows, COLUMNS, c + v * WIDTH, c_stride, factor, a, a_stride, b, v * WIDTH,
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

/* WIDTH scores of each query vector, by dot products; `vectors` makes up the depth. */
INLINE void score_group(int num_rows, const int vectors, float *scores, const float *query,
                        const float *const *keys) {
    for (int r = 0; r < num_rows; r++) {
        const float *q = query + r * vectors * WIDTH;
        vec sums[WIDTH];
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; t++) {
            sums[t] = load(keys[t]) * load(q);
#pragma GCC unroll 8
            for (int v = 1; v < vectors; v++)
                sums[t] += load(keys[t] + v * WIDTH) * load(q + v * WIDTH);
        }
        store(scores + r * TILE, sums_of_rows(sums));
    }
}

/* scores (num_rows, TILE) = query (num_rows, depth) x keys, which lie where they were stored. */
static void scores_of_few(int num_rows, int64_t num_vectors, float *scores, const float *query,
                          int64_t depth, const float *const *keys) {
    for (int64_t v = 0; v < num_vectors; v++) {
        const float *const *group = keys + v * WIDTH;
        float *to = scores + v * WIDTH;
        if (depth == 64) score_group(num_rows, 64 / WIDTH, to, query, group);
        else if (depth == 128) score_group(num_rows, 128 / WIDTH, to, query, group);
        else score_group(num_rows, (int)(depth / WIDTH), to, query, group);
    }
}

/* Turns scores [begin, end) of one query vector into weights; the largest score and the
 * denominator move on. Returns the factor by which what was summed up before must shrink. */
static float softmax_row(float *scores, int64_t num_vectors, float softcap, float *largest,
                         float *denominator) {
    vec found = all(-INFINITY), sum = all(0.0f);
    if (softcap > 0)
        for (int64_t v = 0; v < num_vectors; v++) {
            vec x = load(scores + v * WIDTH);
            /* What is masked keeps its -inf. */
            vec bounded = tanh_of(x) * softcap;
            int_vec masked = x == all(-INFINITY);
            store(scores + v * WIDTH, (vec)(((int_vec)bounded & ~masked) | ((int_vec)x & masked)));
        }
    for (int64_t v = 0; v < num_vectors; v++) found = larger(found, load(scores + v * WIDTH));
    float before = *largest, most = largest_of(found);
    if (!(most > before)) most = before;
    for (int64_t v = 0; v < num_vectors; v++) {
        vec weight = power_of_two(load(scores + v * WIDTH) - most);
        sum += weight;
        store(scores + v * WIDTH, weight);
    }
    float factor = before == most ? 1.0f : exp2f(before - most);
    *largest = most;
    *denominator = *denominator * factor + sum_of(sum);
    return factor;
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
