/* One task for one KV head: reads its tokens once for all its query vectors.
 *
 * Tiles lie at multiples of TILE and spans are added up one by one, wherever the task begins, so what
 * comes out for a query is a function of what it sees. */
#ifndef AGENTKV_ATTENTION_TASK_H
#define AGENTKV_ATTENTION_TASK_H

#include "attention_finish.h"
#include "attention_scratch.h"

/* Query vectors that cost less one by one than as lanes: beside others that are lanes, and alone. */
enum { FEW = WIDTH / 2, FEW_ALONE = WIDTH - 2 };

enum { NONE, ALL, SOME };

/* What of tokens [begin, begin + count) queries [first, last) see. */
static int seen_by(const Scratch *s, int64_t first, int64_t last, int64_t begin, int64_t count) {
    int all = 1, any = 0;
    for (int64_t q = first; q < last; q++) {
        all &= s->begins[q] <= begin && s->ends[q] >= begin + count;
        any |= s->begins[q] < begin + count && s->ends[q] > begin;
    }
    return all ? ALL : any ? SOME : NONE;
}

/* Attends the queries that are lanes to tokens [begin, begin + count) of a task. */
static void attend_lane_tile(const Pass *pass, Scratch *s, int64_t begin, int64_t count,
                             const Ahead ahead[2]) {
    const float softcap = (float)(pass->layer->softcap * M_LOG2E);
    const Ahead nothing[2] = {{0}, {0}};
    const int64_t lead = begin % PARTS;
    for (int64_t first = 0, next; first < s->num_lanes; first = next) {
        const LaneBlock block = lane_block(pass, s, &s->now, first);
        next = first + block.count * WIDTH;
        const int seen = seen_by(s, first, next, begin, count);
        if (seen == NONE) continue;
        attend_lane_block(&block, seen == SOME, s->scores, s->keys.rows + lead,
                          s->values.rows + lead, count,
                          pass->layer->head_dim, pass->width, softcap, (int32_t)begin, ahead);
        ahead = nothing;
    }
}

/* Attends query vectors [first, first + count), not lanes, to tokens [begin, end) of a tile, which they
 * all see. Their scores are computed already. */
static void attend_block(const Pass *pass, Scratch *s, int64_t first, int count, float *scores,
                         int64_t begin, int64_t end) {
    const float softcap = (float)(pass->layer->softcap * M_LOG2E);
    float factors[BLOCK];
    for (int r = 0; r < count; r++)
        factors[r] = softmax_row(scores + r * TILE, begin, end, softcap, &s->now.largest[first + r],
                                 &s->now.denominators[first + r]);
    add_values(count, pass->width, s->now.sums + first * pass->width, factors, scores,
               s->values.rows, begin, end);
}

/* Attends the queries that are not lanes to tokens [begin, begin + count) of a task. Few of them wait for
 * memory however early it is asked. */
static void attend_tile(const Pass *pass, Scratch *s, int64_t begin, int64_t count) {
    const int64_t group = pass->layer->group, lead = begin % PARTS, end = lead + count;
    const int64_t num_vectors = (end + WIDTH - 1) / WIDTH, origin = begin - lead;
    for (int64_t t = 0; t < lead; t++) s->keys.rows[t] = s->zeros;
    for (int64_t t = end; t < num_vectors * WIDTH; t++) s->keys.rows[t] = s->zeros;
    transpose_keys(s->columns, s->keys.rows, num_vectors, pass->depth);
    for (int64_t first = s->num_lanes, last; first < s->num_queries; first = last) {
        last = first + BLOCK < s->num_queries ? first + BLOCK : s->num_queries;
        const int seen = seen_by(s, first, last, begin, count);
        if (seen == NONE) continue;
        scores_of_many((int)(last - first), num_vectors, s->scores, s->query + first * pass->depth,
                       pass->depth, s->columns);
        if (seen == ALL) attend_block(pass, s, first, (int)(last - first), s->scores, lead, end);
        for (int64_t at = first, next; seen == SOME && at < last; at = next) {
            next = (at / group + 1) * group < last ? (at / group + 1) * group : last;
            const int64_t from = s->begins[at] > begin ? s->begins[at] - origin : lead;
            const int64_t to = s->ends[at] < begin + count ? s->ends[at] - origin : end;
            if (from < to)
                attend_block(pass, s, at, (int)(next - at), s->scores + (at - first) * TILE, from,
                             to);
        }
    }
}

/* Says that nothing has been seen. */
static void clear(const Pass *pass, const Scratch *s, States *states) {
    const int64_t padded = s->num_queries > s->num_lanes ? s->num_queries : s->num_lanes;
    memset(states->sums, 0, (size_t)(padded * pass->width) * sizeof(float));
    memset(states->denominators, 0, (size_t)padded * sizeof(float));
    for (int64_t q = 0; q < padded; q++) states->largest[q] = -INFINITY;
}

/* Goes on with a partial result. */
static void resume(const Pass *pass, const Scratch *s, int64_t q, const float *partial) {
    s->now.largest[q] = partial[0], s->now.denominators[q] = partial[1];
    if (q >= s->num_lanes) {
        memcpy(s->now.sums + q * pass->width, partial + 2, (size_t)pass->width * sizeof(float));
        return;
    }
    const int64_t first = q / BLOCK_LANES * BLOCK_LANES;
    const LaneBlock block = lane_block(pass, s, &s->now, first);
    for (int64_t d = 0; d < pass->width; d++)
        block.sums[d * block.count * WIDTH + q - first] = partial[2 + d];
}

/* Reads the queries of a task. */
static void begin_queries(const Pass *pass, Scratch *s, const Task *task, int64_t kv_head) {
    const Layer *x = pass->layer;
    const Reader *readers = x->schedule->readers + task->first_reader;
    const float scale = (float)(x->softcap > 0 ? x->scale / x->softcap : x->scale * M_LOG2E);
    const int64_t count = task->num_readers * x->group, rest = count % WIDTH;
    const int64_t few = count > WIDTH ? FEW : FEW_ALONE;
    s->num_queries = count;
    s->num_lanes = rest <= few ? count - rest : whole_vectors(count);
    const int64_t padded = count > s->num_lanes ? count : s->num_lanes;
    memset(s->query, 0, (size_t)(padded * pass->depth) * sizeof(float));
    clear(pass, s, &s->now);
    if (task->is_first) clear(pass, s, &s->before);
    float numbers[pass->depth];
    for (int64_t q = 0; q < padded; q++) {
        s->begins[q] = INT32_MIN, s->ends[q] = INT32_MAX; /* nobody's lanes hinder no one */
        if (q >= count) continue;
        const Reader *reader = &readers[q / x->group];
        const int64_t head = kv_head * x->group + q % x->group;
        s->begins[q] = reader->begin, s->ends[q] = reader->end;
        float *to = q < s->num_lanes ? numbers : s->query + q * pass->depth;
        read_vector(to, x->query, reader->row * x->query_row + head * x->query_head, x->head_dim,
                    x->query_type, scale);
        if (reader->resumes) resume(pass, s, q, partial_of(pass, reader->place, head));
        if (q >= s->num_lanes) continue;
        const int64_t first = q / BLOCK_LANES * BLOCK_LANES;
        const int64_t step = lane_block(pass, s, &s->now, first).count * WIDTH;
        float *lane = s->query + first * pass->depth + (q - first);
        for (int64_t d = 0; d < x->head_dim; d++) lane[d * step] = numbers[d];
    }
}

/* Reads tokens [begin, end) of a task, which lie in one span. */
static void attend_span(const Pass *pass, Scratch *s, const Task *task, int64_t kv_head,
                        int64_t begin, int64_t end) {
    const Layer *x = pass->layer;
    const int64_t item = ITEM_BYTES[x->cache_type];
    Places places[2];
    int64_t count = TILE - begin % TILE < end - begin ? TILE - begin % TILE : end - begin;
    find_tokens(x, task, begin, count, kv_head, &places[0]);
    for (int turn = 0; begin < end; turn ^= 1) {
        const Places *now = &places[turn], *next = &places[turn ^ 1];
        const int64_t after = begin + count;
        const int64_t num_next = task->end - after < TILE ? task->end - after : TILE;
        if (num_next > 0) find_tokens(x, task, after, num_next, kv_head, &places[turn ^ 1]);
        read_tile(x, now->keys, now->factors, x->k_scales, count, x->head_dim, s->keys, begin % PARTS);
        read_tile(x, now->values, now->factors, x->v_scales, count, x->v_head_dim, s->values,
                  begin % PARTS);
        const Ahead ahead[2] = {{next->keys, num_next, x->head_dim * item},
                                {next->values, num_next, x->v_head_dim * item}};
        if (s->num_lanes) attend_lane_tile(pass, s, begin, count, ahead);
        if (s->num_queries > s->num_lanes) attend_tile(pass, s, begin, count);
        begin = after, count = num_next;
    }
}

/* Adds what a span came to to what was before it. */
static void add_span(const Pass *pass, Scratch *s) {
    for (int64_t q = 0; q < s->num_lanes; q += BLOCK_LANES)
        add_lane_states(lane_block(pass, s, &s->before, q), lane_block(pass, s, &s->now, q),
                        pass->width);
    for (int64_t q = s->num_lanes; q < s->num_queries; q++)
        add_state(&s->before.largest[q], &s->before.denominators[q], s->before.sums + q * pass->width,
                  s->now.largest[q], s->now.denominators[q], s->now.sums + q * pass->width,
                  pass->width);
    clear(pass, s, &s->now);
}

/* The sums of a query, side by side; asked for in the order of the queries. */
static const float *sums_of(const Pass *pass, Scratch *s, const States *states, int64_t q) {
    if (q >= s->num_lanes) return states->sums + q * pass->width;
    const int64_t first = q / BLOCK_LANES * BLOCK_LANES;
    if (q == first) rows_of_block(lane_block(pass, s, states, first), s->rows, pass->width);
    return s->rows + (q - first) * pass->width;
}

/* Writes what was summed up over [begin, end), whole spans or one, for the queries that see some of it:
 * to `out` for rows without partial results, if those are meant, else as partial results. */
static void write_states(const Pass *pass, Scratch *s, const Task *task, int64_t kv_head,
                         const States *states, int64_t begin, int64_t end, int is_direct) {
    const Layer *x = pass->layer;
    const Reader *readers = x->schedule->readers + task->first_reader;
    for (int64_t q = 0; q < s->num_queries; q++) {
        const Reader *reader = &readers[q / x->group];
        const int64_t head = kv_head * x->group + q % x->group;
        const float *sums = sums_of(pass, s, states, q);
        if (reader->begin >= end || reader->end <= begin) continue;
        if ((reader->place < 0) != is_direct) continue;
        if (is_direct) {
            finish(pass, reader->row, head, states->largest[q], states->denominators[q], sums);
            continue;
        }
        int64_t place = reader->place;
        if (task->is_first) place += begin > 0 && reader->begin < begin;
        else for (int32_t at = reader->begin; span_end(at) <= begin; at = span_end(at)) place++;
        float *to = partial_of(pass, place, head);
        to[0] = states->largest[q], to[1] = states->denominators[q];
        memcpy(to + 2, sums, (size_t)pass->width * sizeof(float));
    }
}

static void attend_task(const Pass *pass, Scratch *s, const Task *task, int64_t kv_head) {
    const Reader *readers = pass->layer->schedule->readers + task->first_reader;
    int is_direct = 0, is_partial = 0;
    for (int32_t r = 0; r < task->num_readers; r++)
        if (readers[r].place < 0) is_direct = 1;
        else is_partial = 1;
    begin_queries(pass, s, task, kv_head);
    for (int32_t begin = task->begin, end; begin < task->end; begin = end) {
        end = span_end(begin);
        const int is_whole = end <= task->end;
        if (!is_whole) end = task->end;
        attend_span(pass, s, task, kv_head, begin, end);
        if (!task->is_first) {
            write_states(pass, s, task, kv_head, &s->now, begin, end, 0);
            clear(pass, s, &s->now);
        } else if (is_whole) add_span(pass, s);
    }
    if (!task->is_first) return;
    const int32_t last = span_of(task->end);
    if (is_partial) {
        write_states(pass, s, task, kv_head, &s->before, 0, last, 0);
        write_states(pass, s, task, kv_head, &s->now, last, task->end, 0);
    }
    if (is_direct) {
        add_span(pass, s);
        write_states(pass, s, task, kv_head, &s->before, 0, task->end, 1);
    }
}

#endif
