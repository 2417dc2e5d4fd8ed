/* What one step reads (Plan), how that is cut into work (Schedule), one layer's tensors (Layer).
 *
 * Plan and Layer are filled by `cpu_native.py`, field by field in this order: 8 bytes each. */
#ifndef AGENTKV_ATTENTION_H
#define AGENTKV_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

enum { TILE = 64 };          /* tokens whose keys and values are held at once */
enum { SMALLEST_SPAN = 512 }; /* tokens: eight tiles */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

typedef struct {
    int64_t num_rows, num_runs, block_size;
    int64_t window;           /* 0: none */
    int64_t max_queries;      /* query vectors of one KV head in a task, at least `group` */
    int64_t group;            /* query heads of a KV head */
    int64_t num_kv_heads, num_threads;
    const int32_t *kv_lens;   /* (num_rows,) */
    const int64_t *starts, *ends, *block_at; /* (num_runs,); block_at: into blocks */
    const int64_t *row_at, *row_counts;      /* (num_runs,); row_at: into rows */
    const int32_t *blocks, *rows;
} Plan;

/* A row of a task: it sees [begin, end) of the task's positions. */
typedef struct {
    int32_t row, begin, end;
    int32_t place;   /* of its first partial result; -1: it is the row's only reader, and says `out` */
    int32_t resumes; /* goes on with the partial result that is at `place` already */
} Reader;

/* Where positions [begin, end) lie: in `blocks`, from the block of `begin` on. */
typedef struct {
    int32_t begin, end;
    const int32_t *blocks;
} Piece;

/* Positions [begin, end) of one path, read by some rows together. */
typedef struct {
    int64_t first_reader, first_piece;
    int32_t num_readers, num_pieces, begin, end;
    int32_t is_first; /* of each of its rows: spans are added up where they are computed */
    int32_t phase;    /* tasks of a phase need results of earlier phases alone */
} Task;

typedef struct {
    Task *tasks; /* by phases */
    Reader *readers;
    Piece *pieces;
    int64_t *phase_at; /* (num_phases + 1,): into tasks */
    int64_t num_tasks, num_readers, num_pieces, num_phases;
    int64_t task_room, reader_room, piece_room, phase_room;
    int32_t *partial_at; /* (num_rows + 1,): a row's partial results are consecutive */
    int32_t *direct;     /* (num_rows,): whether its only reader says `out` */
    int64_t num_rows, row_room, direct_room, block_size, num_partials;
    int64_t highest_block; /* -1: nothing is read */
    int64_t work;          /* query vectors times tokens, of one KV head */
    float *scratch;
    size_t scratch_room;   /* bytes */
} Schedule;

typedef struct {
    Schedule *schedule;
    const void *query;      /* rows and heads as strided, the last dimension dense */
    void *out;              /* (num_rows, num_kv_heads * group, v_head_dim), dense */
    const void *key, *value;
    const int64_t *slots;   /* (num_rows,); NULL: nothing is stored */
    char *k_cache, *v_cache;
    float *k_scales, *v_scales; /* of INT8 caches */
    const float *sinks;     /* (num_kv_heads * group,) or NULL */
    /* Strides in elements. */
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
    int64_t scale_block, scale_slot, scale_head;
    int64_t num_kv_heads, group, head_dim, v_head_dim, num_blocks;
    int64_t query_type, cache_type, num_threads;
    double scale, softcap;  /* softcap 0: none */
} Layer;

/* Where the span that holds a position begins. Spans are 512 tokens long, and an eighth of the power
 * of two below them from 4,096 on: a row has few of them however much it sees. */
static inline int32_t span_of(int32_t position) {
    int32_t length = SMALLEST_SPAN;
    while (position / length >= 16) length *= 2;
    return position / length * length;
}

/* Where that span ends. */
static inline int32_t span_end(int32_t position) {
    int32_t length = SMALLEST_SPAN;
    while (position / length >= 16) length *= 2;
    return position / length * length + length;
}

#endif
