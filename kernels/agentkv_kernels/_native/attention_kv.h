/* Keys and values in the pool: writing a step's own, and reading a tile of them as float32. */
#ifndef AGENTKV_ATTENTION_KV_H
#define AGENTKV_ATTENTION_KV_H

#include "attention.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

static const int64_t ITEM_BYTES[] = {4, 2, 1};

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to the nearest bfloat16, halves to even; NaN stays NaN. */
INLINE uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

/* Reads a vector of an activation, FLOAT32 or BFLOAT16, and multiplies it. */
INLINE void read_vector(float *to, const void *from, int64_t at, int64_t count, int64_t type,
                        float factor) {
    if (type == FLOAT32)
        for (int64_t d = 0; d < count; d++) to[d] = ((const float *)from)[at + d] * factor;
    else
        for (int64_t d = 0; d < count; d++)
            to[d] = widened(((const uint16_t *)from)[at + d]) * factor;
}

/* One head of one token, rounded to bytes; returns the factor, as `quantise.py` defines it. */
static float quantise(int8_t *to, const void *from, int64_t at, int64_t count, int64_t type) {
    float numbers[count], most = 0.0f;
    read_vector(numbers, from, at, count, type, 1.0f);
    for (int64_t d = 0; d < count; d++) {
        float size = fabsf(numbers[d]);
        if (size > most || size != size) most = size;
    }
    float factor = most / 127.0f, divisor = factor == 0.0f ? 1.0f : factor;
    for (int64_t d = 0; d < count; d++) to[d] = (int8_t)floorf(numbers[d] / divisor + 0.5f);
    return factor;
}

/* Stores keys, or values, of the step's rows; slot -1 skips one. */
static void store_rows(const Layer *x, const void *from, int64_t row_stride, int64_t head_stride,
                       char *cache, float *scales, const int64_t strides[3], int64_t count) {
    const int64_t size = x->schedule->block_size, item = ITEM_BYTES[x->cache_type];
    const int64_t from_item = ITEM_BYTES[x->query_type];
    for (int64_t row = 0; row < x->schedule->num_rows; row++) {
        const int64_t slot = x->slots[row];
        if (slot < 0) continue;
        const int64_t block = slot / size, offset = slot % size;
        for (int64_t head = 0; head < x->num_kv_heads; head++) {
            char *to =
                cache + (block * strides[0] + offset * strides[1] + head * strides[2]) * item;
            const int64_t at = row * row_stride + head * head_stride;
            if (x->cache_type == INT8)
                scales[block * x->scale_block + offset * x->scale_slot + head * x->scale_head] =
                    quantise((int8_t *)to, from, at, count, x->query_type);
            else memcpy(to, (const char *)from + at * from_item, (size_t)(count * item));
        }
    }
}

/* Where the tokens of a tile lie, for one head. */
typedef struct {
    const char *keys[TILE], *values[TILE];
    int64_t factors[TILE]; /* of INT8 caches: into their scales */
} Places;

/* A tile's keys or values as float32: addresses in the pool, or in `room`. */
typedef struct {
    const float **rows; /* (TILE,) */
    float *room;        /* (TILE, padded) */
    int64_t padded;     /* the head_dim, filled up to whole vectors */
} TileRows;

/* One head of one token as float32, filled up with zeros. */
INLINE void read_token(float *to, const char *from, int64_t count, int64_t padded, int64_t type,
                       float factor) {
    int64_t d = 0;
    for (; d + WIDTH <= count; d += WIDTH) {
        if (type == FLOAT32) store(to + d, load((const float *)from + d));
        else if (type == BFLOAT16) store(to + d, halves_as_floats(from + 2 * d));
        else store(to + d, bytes_as_floats(from + d) * factor);
    }
    for (; d < count; d++) {
        if (type == FLOAT32) to[d] = ((const float *)from)[d];
        else if (type == BFLOAT16) to[d] = widened(((const uint16_t *)from)[d]);
        else to[d] = (float)((const int8_t *)from)[d] * factor;
    }
    for (; d < padded; d++) to[d] = 0.0f;
}

/* Finds tokens [begin, begin + count) of a task. */
static void find_tokens(const Layer *x, const Task *task, int64_t begin, int64_t count, int64_t head,
                        Places *to) {
    const int64_t size = x->schedule->block_size, item = ITEM_BYTES[x->cache_type];
    const Piece *piece = x->schedule->pieces + task->first_piece;
    for (int64_t i = 0; i < count;) {
        const int64_t position = begin + i, offset = position % size;
        while (piece->end <= position) piece++;
        const int64_t block = piece->blocks[position / size - piece->begin / size];
        int64_t last = position - offset + size;
        if (last > piece->end) last = piece->end;
        if (last > begin + count) last = begin + count;
        const char *key =
            x->k_cache + (block * x->k_block + offset * x->k_slot + head * x->k_head) * item;
        const char *value =
            x->v_cache + (block * x->v_block + offset * x->v_slot + head * x->v_head) * item;
        int64_t factor = block * x->scale_block + offset * x->scale_slot + head * x->scale_head;
        for (; i < last - begin; i++) {
            to->keys[i] = key, to->values[i] = value, to->factors[i] = factor;
            key += x->k_slot * item, value += x->v_slot * item, factor += x->scale_slot;
        }
    }
}

/* Reads `count` tokens, as rows from `first` on. */
static void read_tile(const Layer *x, const char *const *tokens, const int64_t *factors,
                      const float *scales, int64_t count, int64_t dim, TileRows to, int64_t first) {
    to.rows += first;
    if (x->cache_type == FLOAT32 && to.padded == dim) {
        for (int64_t t = 0; t < count; t++) to.rows[t] = (const float *)tokens[t];
        return;
    }
    for (int64_t t = 0; t < count; t++) {
        float *row = to.room + t * to.padded;
        /* The types by name: each call is compiled for its own. */
        if (x->cache_type == INT8)
            read_token(row, tokens[t], dim, to.padded, INT8, scales[factors[t]]);
        else if (x->cache_type == BFLOAT16)
            read_token(row, tokens[t], dim, to.padded, BFLOAT16, 1.0f);
        else read_token(row, tokens[t], dim, to.padded, FLOAT32, 1.0f);
        to.rows[t] = row;
    }
}

/* Tokens that are read next: they are fetched from memory while others are computed with. */
typedef struct {
    const char *const *tokens;
    int64_t count, bytes;
} Ahead;

/* Fetches tokens [first, last) of those ahead. */
INLINE void fetch_ahead(Ahead ahead, int64_t first, int64_t last) {
    if (last > ahead.count) last = ahead.count;
    for (int64_t t = first; t < last; t++)
        for (int64_t at = 0; at < ahead.bytes; at += 64) __builtin_prefetch(ahead.tokens[t] + at, 0, 2);
}

#endif
