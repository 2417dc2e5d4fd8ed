/* What one worker works with, and one layer's pass over a schedule: sizes, and where numbers lie. */
#ifndef AGENTKV_ATTENTION_SCRATCH_H
#define AGENTKV_ATTENTION_SCRATCH_H

#include "attention_kv.h"
#include "attention_lanes.h"

#include <stdlib.h>

/* Where queries keep what they have summed up, by their number in the task: first those that are lanes,
 * in blocks as `attention_lanes.h` says, then those that are done one by one, each side by side. */
typedef struct {
    float *sums; /* (queries, padded v_head_dim) */
    float *largest, *denominators;
} States;

typedef struct {
    int64_t num_queries;
    int64_t num_lanes;      /* of them, filled up to whole vectors; or of more, with nobody's lanes */
    float *query;           /* (queries, padded head_dim), as States say */
    int32_t *begins, *ends; /* what each sees */
    States now;             /* of the span that is read */
    States before;          /* of the spans before it, where they are added up here */
    float *rows;            /* (BLOCK_LANES, longest vector): a block, transposed back */
    float *columns;         /* (padded head_dim, TILE): a tile's keys, transposed */
    float *scores;          /* (TILE, BLOCK_LANES), or fewer: (BLOCK, TILE) */
    float *zeros;           /* (padded head_dim,): the key of no token */
    TileRows keys, values;
} Scratch;

typedef struct {
    const Layer *layer;
    int64_t depth, width; /* head_dim and v_head_dim, filled up to whole vectors */
    int64_t max_queries;
    size_t thread_floats;
    float *partials; /* (num_partials, num_q_heads, 2 + width): largest, denominator, sums */
} Pass;

static int64_t whole_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

static float *take(float **next, int64_t count) {
    float *taken = *next;
    *next += count + (-count & 15);
    return taken;
}

/* Lays out a worker's memory, from `room` on; answers where it ends. */
static float *lay_out(Scratch *s, const Pass *pass, float *room) {
    const int64_t depth = pass->depth, width = pass->width, queries = pass->max_queries;
    float *next = room;
    s->query = take(&next, queries * depth);
    s->begins = (int32_t *)take(&next, queries);
    s->ends = (int32_t *)take(&next, queries);
    for (States *states = &s->now; states; states = states == &s->now ? &s->before : NULL) {
        states->sums = take(&next, queries * width);
        states->largest = take(&next, queries);
        states->denominators = take(&next, queries);
    }
    s->rows = take(&next, BLOCK_LANES * (depth > width ? depth : width));
    s->columns = take(&next, depth * TILE);
    s->scores = take(&next, TILE * BLOCK_LANES);
    s->zeros = take(&next, depth);
    s->keys = (TileRows){(const float **)take(&next, 2 * TILE), take(&next, TILE * depth), depth};
    s->values = (TileRows){(const float **)take(&next, 2 * TILE), take(&next, TILE * width), width};
    return next;
}

/* Makes room for all threads' work and for the partial results; kept from layer to layer. */
static Pass plan_pass(const Layer *x) {
    Schedule *schedule = x->schedule;
    Pass pass = {x, whole_vectors(x->head_dim), whole_vectors(x->v_head_dim), 0, 0, NULL};
    for (int64_t i = 0; i < schedule->num_tasks; i++)
        if (schedule->tasks[i].num_readers * x->group > pass.max_queries)
            pass.max_queries = schedule->tasks[i].num_readers * x->group;
    pass.max_queries = whole_vectors(pass.max_queries);
    Scratch s;
    pass.thread_floats = (size_t)(lay_out(&s, &pass, (float *)64) - (float *)64);
    const size_t shared = pass.thread_floats * (size_t)x->num_threads;
    const size_t partials = (size_t)(schedule->num_partials * x->num_kv_heads * x->group);
    const size_t bytes = (shared + partials * (size_t)(2 + pass.width)) * sizeof(float);
    if (bytes > schedule->scratch_room) {
        free(schedule->scratch);
        schedule->scratch_room = (bytes + bytes / 2 + 63) / 64 * 64;
        schedule->scratch = aligned_alloc(64, schedule->scratch_room);
        if (schedule->scratch == NULL) abort();
    }
    pass.partials = schedule->scratch + shared;
    return pass;
}

static Scratch scratch_of(const Pass *pass, int64_t thread) {
    Scratch s = {0};
    lay_out(&s, pass, pass->layer->schedule->scratch + (size_t)thread * pass->thread_floats);
    memset(s.zeros, 0, (size_t)pass->depth * sizeof(float));
    return s;
}

/* A partial result of a row's query head. */
static float *partial_of(const Pass *pass, int64_t partial, int64_t head) {
    const int64_t num_heads = pass->layer->num_kv_heads * pass->layer->group;
    return pass->partials + (partial * num_heads + head) * (2 + pass->width);
}

/* The block of lanes that begins with query `first`. */
static LaneBlock lane_block(const Pass *pass, const Scratch *s, const States *states, int64_t first) {
    const int64_t left = (s->num_lanes - first) / WIDTH;
    return (LaneBlock){
        .count = (int)(left < LANE_VECTORS ? left : LANE_VECTORS),
        .query = s->query + first * pass->depth,
        .sums = states->sums + first * pass->width,
        .largest = states->largest + first,
        .denominators = states->denominators + first,
        .begins = s->begins + first,
        .ends = s->ends + first,
    };
}

#endif
