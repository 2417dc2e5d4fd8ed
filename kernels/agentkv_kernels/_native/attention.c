/* One layer of a step: stores its keys and values, then attends as a schedule says.
 *
 * Work is divided into (task, KV head): such a pair reads its tokens once for all its
 * query vectors, from the pool's blocks. A row whose tokens are read by several tasks gets a
 * partial result of each; they are merged in the order of the runs, so that the result does not
 * depend on which thread was first. A token is read for a row only where the row sees it. */
#include "attention.h"
#include "attention_kv.h"
#include "attention_tile.h"
#include "native.h"
#include "pool.h"

#include <stdlib.h>

enum { SERIAL = 1 << 13 };  /* query vectors times tokens: below, handing work over costs more */
enum { MERGED_ROWS = 2 };   /* in a part */

static int64_t whole_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

/* What one worker works with. */
typedef struct {
    float *query;   /* (max_queries, padded head_dim), times the scale */
    float *sums;    /* (max_queries, padded v_head_dim) */
    float *largest, *denominators; /* (max_queries,) */
    float *columns; /* (padded head_dim, TILE): the tile's keys, transposed */
    float *scores;  /* (BLOCK, TILE) */
    float *zeros;   /* (padded head_dim,): the key of no token */
    TileRows keys, values;
} Scratch;

typedef struct {
    const Layer *layer;
    int64_t depth, width; /* head_dim and v_head_dim, filled up to whole vectors */
    int64_t max_queries;
    size_t thread_floats;
    float *partials; /* (num_partials, num_q_heads, 2 + width): largest, denominator, sums */
} Pass;

static Scratch scratch_of(const Pass *pass, int64_t thread) {
    Scratch s;
    float *next = pass->layer->schedule->scratch + (size_t)thread * pass->thread_floats;
#define TAKE(count) (next += (count) + (-(count) & 15), next - ((count) + (-(count) & 15)))
    s.query = TAKE(pass->max_queries * pass->depth);
    s.sums = TAKE(pass->max_queries * pass->width);
    s.largest = TAKE(pass->max_queries);
    s.denominators = TAKE(pass->max_queries);
    s.columns = TAKE(pass->depth * TILE);
    s.scores = TAKE(BLOCK * TILE);
    s.zeros = TAKE(pass->depth);
    s.keys = (TileRows){(const float **)TAKE(2 * TILE), TAKE(TILE * pass->depth), pass->depth};
    s.values = (TileRows){(const float **)TAKE(2 * TILE), TAKE(TILE * pass->width), pass->width};
#undef TAKE
    return s;
}

/* Makes room for all threads' work and for the partial results; kept from layer to layer. */
static Pass plan_pass(const Layer *x) {
    Schedule *schedule = x->schedule;
    Pass pass = {x, whole_vectors(x->head_dim), whole_vectors(x->v_head_dim), 0, 0, NULL};
    for (int64_t i = 0; i < schedule->num_tasks; i++)
        if (schedule->tasks[i].num_readers * x->group > pass.max_queries)
            pass.max_queries = schedule->tasks[i].num_readers * x->group;
    pass.thread_floats =
        (size_t)((pass.max_queries + TILE) * (pass.depth + pass.width) + 2 * pass.max_queries +
                 pass.depth * (TILE + 1) + BLOCK * TILE + 4 * TILE + 11 * 16);
    pass.thread_floats += -pass.thread_floats & 15;
    size_t shared = pass.thread_floats * (size_t)x->num_threads;
    size_t partials = (size_t)(schedule->num_partials * x->num_kv_heads * x->group);
    size_t bytes = (shared + partials * (size_t)(2 + pass.width)) * sizeof(float);
    if (bytes > schedule->scratch_room) {
        free(schedule->scratch);
        schedule->scratch_room = (bytes + bytes / 2 + 63) / 64 * 64;
        schedule->scratch = aligned_alloc(64, schedule->scratch_room);
        if (schedule->scratch == NULL) abort();
    }
    pass.partials = schedule->scratch + shared;
    return pass;
}

/* Attends query vectors [first, first + count) of a task to a tile, of which they see [begin, end).
 * Their scores are computed already. */
static void attend_block(const Pass *pass, Scratch *s, int64_t first, int count, float *scores,
                         int64_t begin, int64_t end) {
    const int64_t num_vectors = (end + WIDTH - 1) / WIDTH;
    const float softcap = (float)(pass->layer->softcap * M_LOG2E);
    float factors[BLOCK];
    for (int r = 0; r < count; r++) {
        float *row = scores + r * TILE;
        for (int64_t t = 0; t < begin; t++) row[t] = -INFINITY;
        for (int64_t t = end; t < num_vectors * WIDTH; t++) row[t] = -INFINITY;
        factors[r] = softmax_row(row, num_vectors, softcap, &s->largest[first + r],
                                 &s->denominators[first + r]);
    }
    add_values(count, pass->width, s->sums + first * pass->width, factors, scores, s->values.rows,
               begin, end);
}

/* Attends all query vectors of a task to tokens [begin, begin + count) of it. */
static void attend_tile(const Pass *pass, Scratch *s, const Task *task, const Reader *readers,
                        int64_t begin, int64_t count) {
    const int64_t group = pass->layer->group, num_queries = task->num_readers * group;
    const int64_t num_vectors = (count + WIDTH - 1) / WIDTH;
    const int few = num_queries <= FEW;
    for (int64_t t = count; t < num_vectors * WIDTH; t++) s->keys.rows[t] = s->zeros;
    if (!few) transpose_keys(s->columns, s->keys.rows, num_vectors, pass->depth);
    for (int64_t first = 0; first < num_queries;) {
        const int64_t last = first + BLOCK < num_queries ? first + BLOCK : num_queries;
        int64_t seen_from = 0, seen_to = 0;
        int whole = 1;
        for (int64_t r = first / group; r <= (last - 1) / group; r++) {
            whole &= readers[r].begin <= begin && readers[r].end >= begin + count;
            if (readers[r].begin < begin + count && readers[r].end > begin) seen_to = 1;
        }
        if (!seen_to) {
            first = last;
            continue;
        }
        const float *query = s->query + first * pass->depth;
        const int rows = (int)(last - first);
        if (few) scores_of_few(rows, num_vectors, s->scores, query, pass->depth, s->keys.rows);
        else scores_of_many(rows, num_vectors, s->scores, query, pass->depth, s->columns);
        if (whole) attend_block(pass, s, first, rows, s->scores, 0, count);
        for (int64_t at = first, next; !whole && at < last; at = next) {
            const Reader *reader = &readers[at / group];
            next = (at / group + 1) * group < last ? (at / group + 1) * group : last;
            seen_from = reader->begin > begin ? reader->begin - begin : 0;
            seen_to = reader->end < begin + count ? reader->end - begin : count;
            if (seen_from < seen_to)
                attend_block(pass, s, at, (int)(next - at), s->scores + (at - first) * TILE,
                             seen_from, seen_to);
        }
        first = last;
    }
}

/* Writes the result of one query vector, of which `merged` says the sums; a sink adds to the
 * denominator and to nothing else. */
static void finish(const Pass *pass, int64_t row, int64_t head, float largest, float denominator,
                   const float *sums) {
    const Layer *x = pass->layer;
    float factor = 1.0f;
    if (x->sinks) {
        const float sink = x->sinks[head] * (float)M_LOG2E;
        if (sink > largest) factor = exp2f(largest - sink), denominator *= factor;
        denominator += exp2f(sink > largest ? 0.0f : sink - largest);
    }
    const float scale = factor / denominator;
    const int64_t at = (row * x->num_kv_heads * x->group + head) * x->v_head_dim;
    if (x->query_type == FLOAT32)
        for (int64_t d = 0; d < x->v_head_dim; d++) ((float *)x->out)[at + d] = sums[d] * scale;
    else
        for (int64_t d = 0; d < x->v_head_dim; d++)
            ((uint16_t *)x->out)[at + d] = narrowed(sums[d] * scale);
}

static float *partial_of(const Pass *pass, int64_t partial, int64_t head) {
    const int64_t num_heads = pass->layer->num_kv_heads * pass->layer->group;
    return pass->partials + (partial * num_heads + head) * (2 + pass->width);
}

/* Does one task for one KV head. */
static void attend_task(const Pass *pass, Scratch *s, const Task *task, int64_t kv_head) {
    const Layer *x = pass->layer;
    const Reader *readers = x->schedule->readers + task->first_reader;
    const int64_t k_strides[] = {x->k_block, x->k_slot, x->k_head};
    const int64_t v_strides[] = {x->v_block, x->v_slot, x->v_head};
    const float scale = (float)(x->softcap > 0 ? x->scale / x->softcap : x->scale * M_LOG2E);
    for (int64_t i = 0; i < task->num_readers; i++)
        for (int64_t g = 0; g < x->group; g++) {
            float *to = s->query + (i * x->group + g) * pass->depth;
            const int64_t head = kv_head * x->group + g;
            read_vector(to, x->query, readers[i].row * x->query_row + head * x->query_head,
                        x->head_dim, x->query_type, scale);
            for (int64_t d = x->head_dim; d < pass->depth; d++) to[d] = 0.0f;
            s->largest[i * x->group + g] = -INFINITY;
            s->denominators[i * x->group + g] = 0.0f;
        }
    memset(s->sums, 0, (size_t)(task->num_readers * x->group * pass->width) * sizeof(float));
    for (int64_t begin = task->begin; begin < task->end; begin += TILE) {
        const int64_t count = task->end - begin < TILE ? task->end - begin : TILE;
        find_tile(x, task, begin, count, kv_head, x->k_cache, x->k_scales, k_strides, x->head_dim,
                  s->keys);
        find_tile(x, task, begin, count, kv_head, x->v_cache, x->v_scales, v_strides,
                  x->v_head_dim, s->values);
        attend_tile(pass, s, task, readers, begin, count);
    }
    for (int64_t i = 0; i < task->num_readers; i++)
        for (int64_t g = 0; g < x->group; g++) {
            const int64_t at = i * x->group + g, head = kv_head * x->group + g;
            const float *sums = s->sums + at * pass->width;
            if (readers[i].partial < 0) {
                finish(pass, readers[i].row, head, s->largest[at], s->denominators[at], sums);
                continue;
            }
            float *to = partial_of(pass, readers[i].partial, head);
            to[0] = s->largest[at], to[1] = s->denominators[at];
            memcpy(to + 2, sums, (size_t)pass->width * sizeof(float));
        }
}

/* Merges the partial results of one row; one that sees nothing gets zeros. */
static void merge_row(const Pass *pass, int64_t row) {
    const Layer *x = pass->layer;
    const int32_t *at = x->schedule->partial_at;
    if (at[x->schedule->num_rows + 1 + row] < 0) return; /* finished by its only task */
    const int64_t num_heads = x->num_kv_heads * x->group;
    if (at[row] == at[row + 1]) {
        const int64_t bytes = num_heads * x->v_head_dim * ITEM_BYTES[x->query_type];
        memset((char *)x->out + row * bytes, 0, (size_t)bytes);
        return;
    }
    for (int64_t head = 0; head < num_heads; head++) {
        float *first = partial_of(pass, at[row], head), most = first[0];
        for (int64_t i = at[row] + 1; i < at[row + 1]; i++)
            most = fmaxf(most, partial_of(pass, i, head)[0]);
        float factor = exp2f(first[0] - most), denominator = first[1] * factor;
        for (int64_t d = 0; d < pass->width; d++) first[2 + d] *= factor;
        for (int64_t i = at[row] + 1; i < at[row + 1]; i++) {
            const float *other = partial_of(pass, i, head);
            factor = exp2f(other[0] - most);
            denominator += other[1] * factor;
            for (int64_t d = 0; d < pass->width; d++) first[2 + d] += other[2 + d] * factor;
        }
        finish(pass, row, head, most, denominator, first + 2);
    }
}

static void attend_pieces(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Pass *pass = job;
    const int64_t num_kv_heads = pass->layer->num_kv_heads;
    Scratch s = scratch_of(pass, worker);
    memset(s.zeros, 0, (size_t)pass->depth * sizeof(float));
    for (int64_t i = begin; i < end; i++)
        attend_task(pass, &s, &pass->layer->schedule->tasks[i / num_kv_heads], i % num_kv_heads);
}

static void merge_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    (void)worker;
    for (int64_t row = begin; row < end; row++) merge_row(job, row);
}

/* Stores and attends. *lowest and *highest become the range of the slots, and nothing else is done
 * where they lie outside of [-1, num_blocks * block_size). */
EXPORT(void, attend)(const Layer *x, int64_t *lowest, int64_t *highest) {
    const Schedule *schedule = x->schedule;
    *lowest = *highest = -1;
    if (x->slots) {
        for (int64_t row = 0; row < schedule->num_rows; row++) {
            if (x->slots[row] < *lowest) *lowest = x->slots[row];
            if (x->slots[row] > *highest) *highest = x->slots[row];
        }
        if (*lowest < -1 || *highest >= x->num_blocks * schedule->block_size) return;
        const int64_t k_strides[] = {x->k_block, x->k_slot, x->k_head};
        const int64_t v_strides[] = {x->v_block, x->v_slot, x->v_head};
        store_rows(x, x->key, x->key_row, x->key_head, x->k_cache, x->k_scales, k_strides,
                   x->head_dim);
        store_rows(x, x->value, x->value_row, x->value_head, x->v_cache, x->v_scales, v_strides,
                   x->v_head_dim);
    }
    const Pass pass = plan_pass(x);
    const int64_t num_pieces = schedule->num_tasks * x->num_kv_heads;
    const int64_t threads = schedule->work * x->num_kv_heads < SERIAL ? 1 : x->num_threads;
    pool_run(attend_pieces, &pass, num_pieces, 1, threads);
    pool_run(merge_rows, &pass, schedule->num_rows, MERGED_ROWS, threads);
}
