/* Attention of many query vectors to a tile of tokens: each lane of a vector is a query.
 *
 * Queries lie in blocks of up to LANE_VECTORS vectors, each transposed: (dimension, query). A number of
 * a key or a value is read once for a block, and nothing is summed across lanes. What is computed for
 * a query, and in which order, is what `attention_tile.h` does: a result is the same to the bit. */
#ifndef AGENTKV_ATTENTION_LANES_H
#define AGENTKV_ATTENTION_LANES_H

#include "attention.h"
#include "attention_kv.h"
#include "attention_tile.h"
#include "vectors.h"

enum { BLOCK_LANES = LANE_VECTORS * WIDTH };

/* A block of queries and their state. Its vectors are `count` side by side, in every array. */
typedef struct {
    int count;                     /* vectors */
    const float *query;            /* (head_dim, count, WIDTH) */
    float *sums;                   /* (padded v_head_dim, count, WIDTH) */
    float *largest, *denominators; /* (count, WIDTH) */
    const int32_t *begins, *ends;  /* (count, WIDTH): what each sees of the task's positions */
} LaneBlock;

/* Scores of some tokens, the first of which is `first` of its tile; `most` takes the largest. */
INLINE void score_tokens(const int vectors, const int tokens, float *scores, const float *query,
                         int64_t depth, const float *const *keys, vec *most, Ahead ahead,
                         int64_t first) {
    vec sums[LANE_TOKENS][LANE_VECTORS];
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[t][v] = all(0.0f);
    int64_t d = 0;
    for (int i = 0; i < tokens; i++) {
        fetch_ahead(ahead, first + i, first + i + 1);
#pragma GCC unroll 4
        for (; d < depth * (i + 1) / tokens; d++) {
            vec row[LANE_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) row[v] = load(query + (d * vectors + v) * WIDTH);
#pragma GCC unroll 16
            for (int t = 0; t < tokens; t++) {
                const vec key = all(keys[t][d]);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) sums[t][v] = fused(key, row[v], sums[t][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            store(scores + (t * vectors + v) * WIDTH, sums[t][v]);
            most[v] = larger(most[v], sums[t][v]);
        }
}

/* scores (count, vectors, WIDTH) of tokens [0, count). */
INLINE void score_tile(const int vectors, float *scores, const float *query, int64_t depth,
                       const float *const *keys, int64_t count, vec *most, Ahead ahead) {
    const int step = vectors == 1 ? LANE_TOKENS : LANE_TOKENS / 2;
    int64_t t = 0;
    for (; t + step <= count; t += step)
        score_tokens(vectors, step, scores + t * vectors * WIDTH, query, depth, keys + t, most, ahead,
                     t);
    for (; t < count; t++)
        score_tokens(vectors, 1, scores + t * vectors * WIDTH, query, depth, keys + t, most, ahead, t);
}

/* Which queries of a vector see a position. */
INLINE lane_mask seen_at(int_vec begin, int_vec end, int32_t position) {
    return between(all_of_int(position), begin, end);
}

/* sums = factor sums + values x weights, for DIMS dimensions; where `partly`, what a query does not
 * see is left out. `from` is the position of token 0. */
INLINE void add_dims(const int vectors, const int dims, const int partly, float *sums,
                     const vec *factors, const float *weights, const float *const *values,
                     int64_t offset, int64_t count, const int_vec *begins, const int_vec *ends,
                     int32_t from, Ahead ahead) {
    vec acc[LANE_DIMS][LANE_VECTORS];
#pragma GCC unroll 16
    for (int d = 0; d < dims; d++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[d][v] = load(sums + (d * vectors + v) * WIDTH) * factors[v];
    for (int64_t t = 0; t < count; t++) {
        const float *value = values[t] + offset;
        if (t < ahead.count) __builtin_prefetch(ahead.tokens[t] + ahead.bytes, 0, 2);
        vec row[LANE_VECTORS];
        lane_mask seen[LANE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            row[v] = load(weights + (t * vectors + v) * WIDTH);
            if (partly) seen[v] = seen_at(begins[v], ends[v], from + (int32_t)t);
        }
#pragma GCC unroll 16
        for (int d = 0; d < dims; d++) {
            const vec number = all(value[d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const vec next = fused(number, row[v], acc[d][v]);
                acc[d][v] = partly ? chosen(seen[v], next, acc[d][v]) : next;
            }
        }
    }
#pragma GCC unroll 16
    for (int d = 0; d < dims; d++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store(sums + (d * vectors + v) * WIDTH, acc[d][v]);
}

/* Bounds the scores of one vector and takes out what its queries do not see; returns the largest. */
INLINE vec bound_scores(const int vectors, float *scores, int64_t count, float softcap,
                        const int partly, int_vec begin, int_vec end, int32_t from) {
    vec most = all(-INFINITY);
    for (int64_t t = 0; t < count; t++) {
        vec x = load(scores + t * vectors * WIDTH);
        if (softcap > 0) x = tanh_of(x) * softcap;
        if (partly) x = chosen(seen_at(begin, end, from + (int32_t)t), x, all(-INFINITY));
        store(scores + t * vectors * WIDTH, x);
        most = larger(most, x);
    }
    return most;
}

/* Turns the scores of one vector into weights, and answers their sum, in the order that
 * `attention_tile.h` defines. */
INLINE vec weigh_scores(const int vectors, float *scores, int64_t count, vec most,
                        const int partly, int_vec begin, int_vec end, int32_t from) {
    vec parts[PARTS];
    for (int64_t j = 0; j < PARTS; j++) {
        vec part = all(0.0f);
#pragma GCC unroll 4
        for (int64_t t = (j - from) & (PARTS - 1); t < count; t += PARTS) {
            float *at = scores + t * vectors * WIDTH;
            vec weight = power_of_two(load(at) - most);
            if (partly) weight = chosen(seen_at(begin, end, from + (int32_t)t), weight, all(0.0f));
            part += weight;
            store(at, weight);
        }
        parts[j] = part;
    }
    for (int step = 1; step < PARTS; step *= 2)
        for (int j = 0; j < PARTS; j += 2 * step) parts[j] += parts[j + step];
    return parts[0];
}

/* Attends a block to tokens [0, count) of a tile, which begins at position `from`; meanwhile the
 * keys and the values that come next are fetched. */
INLINE void attend_lanes(const int vectors, const int partly, const LaneBlock *block, float *scores,
                         const float *const *keys, const float *const *values, int64_t count,
                         int64_t depth, int64_t width, float softcap, int32_t from,
                         const Ahead ahead[2]) {
    vec most[LANE_VECTORS], factors[LANE_VECTORS];
    int_vec begins[LANE_VECTORS], ends[LANE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        most[v] = all(-INFINITY);
        if (partly) {
            begins[v] = (int_vec)load((const float *)block->begins + v * WIDTH);
            ends[v] = (int_vec)load((const float *)block->ends + v * WIDTH);
        } else begins[v] = ends[v] = (int_vec){0};
    }
    score_tile(vectors, scores, block->query, depth, keys, count, most, ahead[0]);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        float *own = scores + v * WIDTH, *largest = block->largest + v * WIDTH;
        float *denominators = block->denominators + v * WIDTH;
        if (partly || softcap > 0)
            most[v] = bound_scores(vectors, own, count, softcap, partly, begins[v], ends[v], from);
        const vec before = load(largest);
        most[v] = larger(most[v], before);
        factors[v] = shrinking(before, most[v]);
        const vec sum = weigh_scores(vectors, own, count, most[v], partly, begins[v], ends[v], from);
        store(largest, most[v]);
        store(denominators, fused(load(denominators), factors[v], sum));
    }
    const int dims = vectors == 1 ? LANE_DIMS : LANE_DIMS / 2;
    for (int64_t d = 0; d < width; d += dims) {
        /* A line of the values ahead for each token, in those of the calls that begin one. */
        const int64_t line = d * ahead[1].bytes / width / 64 * 64;
        const int is_new = d == 0 || line != (d - dims) * ahead[1].bytes / width / 64 * 64;
        const Ahead lines = {ahead[1].tokens, is_new ? ahead[1].count : 0, line};
        add_dims(vectors, dims, partly, block->sums + d * vectors * WIDTH, factors, scores, values, d,
                 count, begins, ends, from, lines);
    }
}

/* The same, for a number of vectors known when compiled. */
static void attend_lane_block(const LaneBlock *block, int partly, float *scores,
                              const float *const *keys, const float *const *values, int64_t count,
                              int64_t depth, int64_t width, float softcap, int32_t from,
                              const Ahead ahead[2]) {
#define CALL(n, some) \
    attend_lanes(n, some, block, scores, keys, values, count, depth, width, softcap, from, ahead)
    if (partly)
        switch (block->count) {
            case 1: CALL(1, 1); break;
            case 2: CALL(2, 1); break;
            default: CALL(3, 1);
        }
    else
        switch (block->count) {
            case 1: CALL(1, 0); break;
            case 2: CALL(2, 0); break;
            default: CALL(3, 0);
        }
#undef CALL
}

/* Adds what a block has summed up to what it had over earlier tokens. */
static void add_lane_states(LaneBlock to, LaneBlock from, int64_t width) {
    for (int v = 0; v < to.count; v++) {
        const vec before = load(to.largest + v * WIDTH), after = load(from.largest + v * WIDTH);
        const vec most = larger(before, after);
        const vec factor = shrinking(before, most), other_factor = shrinking(after, most);
        float *denominators = to.denominators + v * WIDTH;
        store(to.largest + v * WIDTH, most);
        store(denominators, fused(load(from.denominators + v * WIDTH), other_factor,
                                  load(denominators) * factor));
        for (int64_t d = v * WIDTH; d < width * to.count * WIDTH; d += to.count * WIDTH)
            store(to.sums + d, fused(load(from.sums + d), other_factor, load(to.sums + d) * factor));
    }
}

/* Writes a block's sums query by query: to (count * WIDTH, width). */
static void rows_of_block(LaneBlock block, float *to, int64_t width) {
    for (int v = 0; v < block.count; v++)
        for (int64_t d = 0; d < width; d += WIDTH) {
            vec x[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                x[i] = load(block.sums + ((d + i) * block.count + v) * WIDTH);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) store(to + (v * WIDTH + i) * width + d, x[i]);
        }
}

#endif
