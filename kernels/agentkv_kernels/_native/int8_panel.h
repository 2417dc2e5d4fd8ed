/* Products of rows with 8-bit weights, panel by panel.
 *
 * Weights are integers w in [-127, 127] times one factor for GROUP inputs of one output. They are
 * kept as w + 128 in panels of PANEL outputs, so that one pass over memory reads weights and factors:
 *
 *     panel p   group g   PANEL factors, float
 *                         GROUP / 4 times PANEL times 4 weights, one byte each
 *
 * Rows are rounded to integers x in [-127, 127] times one factor for GROUP inputs, when they come in.
 * sum (w + 128) x - 128 sum x is exact in 32 bits, at every level alike; only then are floats added.
 */
#ifndef AGENTKV_INT8_PANEL_H
#define AGENTKV_INT8_PANEL_H

#include "lanes.h"

#define PANEL 32
#define GROUP 64
#define BLOCK_BYTES (PANEL * 4 + PANEL * GROUP)
#define LINE_BYTES 64 /* what memory hands over at once */

#ifdef __AVX512VNNI__
#define TILE_ROWS 6 /* 12 sums of integers, 12 of floats, 2 of weights, a row: 27 of 32 registers */
#define TILE_VECTORS 2
typedef int8_t quantum;
#elif defined(__AVXVNNI__)
#define TILE_ROWS 3 /* 6 + 6 + 2 + 1 of 16 */
#define TILE_VECTORS 2
typedef int8_t quantum;
#else
#define TILE_ROWS 4 /* 8 + 4 + 2 + 1 of 16 */
#define TILE_VECTORS 1
typedef int16_t quantum; /* multiplied in pairs of 16 bits: 8-bit pairs could overflow */
#endif
#define TILE_OUTPUTS (TILE_VECTORS * LANES)

/* Rows as integers. Lies in memory that the caller owns: see `rows_at`. */
typedef struct {
    quantum *values; /* (num_rows, num_groups * GROUP) */
    float *factors;  /* (num_rows, num_groups) */
    int32_t *shifts; /* (num_rows, num_groups): -128 sum x */
    int64_t num_groups;
} Rows;

INLINE uint8_t *aligned(uint8_t *place) { return (uint8_t *)(((uintptr_t)place + 63) & ~(uintptr_t)63); }

/* Lays rows out in scratch memory and moves `scratch` behind them. */
INLINE Rows rows_at(uint8_t **scratch, int64_t num_rows, int64_t width) {
    Rows rows = {.num_groups = width / GROUP};
    const int64_t count = num_rows * rows.num_groups;
    rows.values = (quantum *)aligned(*scratch);
    rows.factors = (float *)aligned((uint8_t *)(rows.values + count * GROUP));
    rows.shifts = (int32_t *)aligned((uint8_t *)(rows.factors + count));
    *scratch = aligned((uint8_t *)(rows.shifts + count));
    return rows;
}

INLINE void store_integers(quantum *to, vi values) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(values));
#else
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
#ifdef __AVXVNNI__
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
#else
    _mm_storeu_si128((__m128i *)to, words);
#endif
#endif
}

/* Rounds one group, of values times `factor` times `weights` (NULL: 1). What is not finite makes the
 * group's factor NaN, so that it is seen in every output. */
INLINE void quantise_group(const Rows *rows, int64_t row, int64_t group, const float *values, float factor,
                           const float *weights) {
    vf kept[GROUP / LANES], greatest = vset(0.0f), sum = vset(0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / LANES; i++) {
        kept[i] = vmul(vload(values + i * LANES), vset(factor));
        if (weights) kept[i] = vmul(kept[i], vload(weights + i * LANES));
        greatest = vmax(greatest, vabs(kept[i]));
        sum = vadd(sum, kept[i]);
    }
    const float most = vmaximum(greatest), total = vsum(sum);
    const vf inverse = vset(most > 0.0f ? 127.0f / most : 0.0f);
    const int64_t place = row * rows->num_groups + group;
    vi count = viset(0);
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / LANES; i++) {
        const vi integers = vround_int(vmul(kept[i], inverse));
        count = viadd(count, integers);
        store_integers(rows->values + place * GROUP + i * LANES, integers);
    }
    rows->factors[place] = most / 127.0f + (total - total);
    rows->shifts[place] = -128 * visum(count);
}

/* Rounds a row after RMS normalisation (Zhang and Sennrich 2019); without `weights`, as it is. */
INLINE void quantise_row(const Rows *rows, int64_t row, const float *values, const float *weights, float epsilon) {
    float factor = 1.0f;
    const int64_t width = rows->num_groups * GROUP;
    if (weights) {
        vf squares = vset(0.0f);
        for (int64_t i = 0; i < width; i += LANES) {
            const vf value = vload(values + i);
            squares = vfma(value, value, squares);
        }
        factor = 1.0f / __builtin_sqrtf(vsum(squares) / (float)width + epsilon);
    }
    for (int64_t group = 0; group < rows->num_groups; group++)
        quantise_group(rows, row, group, values + group * GROUP, factor, weights ? weights + group * GROUP : 0);
}

/* Weights to fetch from memory meanwhile: so many lines a group. Products and memory would take turns
 * otherwise, since a tile of several rows reads weights too slowly for the processor to look ahead. */
typedef struct {
    const uint8_t *next;
    int64_t lines;
} Ahead;

/* Spreads the fetch of a panel over the work on the one before it. A row alone waits for memory only, and
 * the processor's own guesses are better then. */
INLINE Ahead fetch_ahead(const uint8_t *panel, int64_t num_rows) {
    const int64_t tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS, passes = tiles * (PANEL / TILE_OUTPUTS);
    return (Ahead){panel, num_rows > 1 ? (BLOCK_BYTES / LINE_BYTES + passes / 2) / passes : 0};
}

INLINE void fetch_lines(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++, ahead->next += LINE_BYTES) __builtin_prefetch(ahead->next);
}

/* sums[r][v] += sum over a group of (w + 128) x, for TILE_OUTPUTS outputs. */
INLINE void dot_group(const int count, const uint8_t *weights, const quantum *values, int64_t stride,
                      vi sums[TILE_ROWS][TILE_VECTORS]) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#pragma GCC unroll 16 /* whole: a loop would copy every sum twice a round */
    for (int k = 0; k < GROUP; k += 4) {
        const uint8_t *line = weights + k * PANEL;
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            int32_t four;
            __builtin_memcpy(&four, values + r * stride + k, 4);
            const vi same = viset(four);
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) {
#ifdef __AVX512VNNI__
                sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], _mm512_loadu_si512(line + v * 64), same);
#else
                const vi w = _mm256_loadu_si256((const __m256i *)(line + v * 32));
                sums[r][v] = _mm256_dpbusd_avx_epi32(sums[r][v], w, same);
#endif
            }
        }
    }
#else
    vi low[TILE_ROWS], high[TILE_ROWS]; /* outputs 0..3 and 4..7, two halves of the sum each */
    for (int r = 0; r < count; r++) low[r] = high[r] = viset(0);
#pragma GCC unroll 4
    for (int k = 0; k < GROUP; k += 4) {
        const uint8_t *line = weights + k * PANEL;
        const vi w_low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)line));
        const vi w_high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(line + 16)));
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            int64_t four;
            __builtin_memcpy(&four, values + r * stride + k, 8);
            const vi same = _mm256_set1_epi64x(four);
            low[r] = viadd(low[r], _mm256_madd_epi16(w_low, same));
            high[r] = viadd(high[r], _mm256_madd_epi16(w_high, same));
        }
    }
    for (int r = 0; r < count; r++) {
        const vi whole = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r], high[r]), 0xd8);
        sums[r][0] = viadd(sums[r][0], whole);
    }
#endif
}

/* One tile of a panel: `count` rows from `row` on, TILE_OUTPUTS outputs from `first` on, into `out`. */
INLINE void tile(const int count, const uint8_t *panel, Ahead *ahead, const Rows *rows, int64_t row, int first,
                 float out[TILE_ROWS][PANEL]) {
    const int64_t groups = rows->num_groups, stride = groups * GROUP;
    vf floats[TILE_ROWS][TILE_VECTORS];
    vi sums[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < TILE_VECTORS; v++) floats[r][v] = vset(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *block = panel + g * BLOCK_BYTES;
        const float *factors = (const float *)block + first;
        fetch_lines(ahead);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = viset(rows->shifts[(row + r) * groups + g]);
        dot_group(count, block + 4 * PANEL + 4 * first, rows->values + row * stride + g * GROUP, stride, sums);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int64_t place = (row + r) * groups + g;
            const vf factor = vset(rows->factors[place]);
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECTORS; v++) {
                floats[r][v] = vfma(vfloat(sums[r][v]), vmul(factor, vload(factors + v * LANES)), floats[r][v]);
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < TILE_VECTORS; v++) vstore(out[r] + first + v * LANES, floats[r][v]);
}

/* Multiplies up to TILE_ROWS rows with one panel: out[r][PANEL]. */
INLINE void multiply_panel(int count, const uint8_t *panel, Ahead *ahead, const Rows *rows, int64_t row,
                           float out[TILE_ROWS][PANEL]) {
    for (int first = 0; first < PANEL; first += TILE_OUTPUTS) {
        switch (count) {
        case 1: tile(1, panel, ahead, rows, row, first, out); break;
        case 2: tile(2, panel, ahead, rows, row, first, out); break;
        case 3: tile(3, panel, ahead, rows, row, first, out); break;
#if TILE_ROWS > 3
        case 4: tile(4, panel, ahead, rows, row, first, out); break;
#endif
#if TILE_ROWS > 4
        case 5: tile(5, panel, ahead, rows, row, first, out); break;
        case 6: tile(6, panel, ahead, rows, row, first, out); break;
#endif
        }
    }
}

/* Cuts rows into tiles of nearly equal size: the number of rows from `row` on that the next one takes. */
INLINE int tile_size(int64_t num_rows, int64_t row) {
    const int64_t tiles = (num_rows - row + TILE_ROWS - 1) / TILE_ROWS;
    return (int)((num_rows - row + tiles - 1) / tiles);
}

#endif
