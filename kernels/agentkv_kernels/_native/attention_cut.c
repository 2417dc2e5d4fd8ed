/* Cuts what a step reads into tasks, once for all layers. No tensor is touched.
 *
 * How a row's sums are put together depends on what it sees alone, not on who else is there: its
 * positions are read in tiles at multiples of TILE, tiles are added up from the first of their span
 * on, and spans from the row's first. So
 *
 *  - a run is read by all its rows up to its last whole tile. What is left of it is read with the
 *    tokens below, for each row that sees tokens which follow;
 *  - where a span is divided between tasks, the deeper one goes on with the other's partial result,
 *    in a later phase;
 *  - for threads, work is divided between spans. A task which has no row's first span gives one partial
 *    result for each, to be added up in order.
 */
#include "attention.h"
#include "native.h"

#include <stdlib.h>
#include <string.h>

enum { MIN_SPLIT = 512 }; /* tokens; below, a merge costs more than an idle thread */
enum { TASKS_PER_THREAD = 8 };

/* Tokens of a path that were read by nobody, since they fill no tile: pieces of them. */
typedef struct {
    int64_t first_piece;
    int32_t num_pieces, begin;
} Rest;

/* What is known while a plan is cut. */
typedef struct {
    Schedule *to;
    const Plan *plan;
    int64_t split;       /* tokens of a task that may be divided */
    int64_t *order;      /* (num_runs,): of runs, such that those of each row ascend */
    int32_t *rest_of;    /* (num_rows,): what the row's next run begins with; -1: itself */
    int32_t *read_to;    /* (num_rows,): where its last task ended; -1: it has none */
    int32_t *phase_of;   /* (num_rows,): of that task */
    char *goes_on;       /* for each row of each run: it sees the token after the run */
    Reader *group;       /* rows that are read for together */
    Rest *rests;
    int64_t num_rests, rest_room;
} Cutter;

static void *grown(void *old, int64_t *room, int64_t wanted, size_t size) {
    if (wanted <= *room) return old;
    *room = 2 * wanted;
    void *fresh = realloc(old, (size_t)*room * size);
    if (fresh == NULL) abort(); /* a few kilobytes: nothing else would work either */
    return fresh;
}

static void *room_for(int64_t count, size_t size) {
    void *fresh = malloc((size_t)(count + 1) * size);
    if (fresh == NULL) abort();
    return fresh;
}

static Reader seen_by(const Plan *plan, int64_t run, int32_t row) {
    int64_t length = plan->kv_lens[row], begin = plan->starts[run], end = plan->ends[run];
    if (plan->window && length - plan->window > begin) begin = length - plan->window;
    if (length < end) end = length;
    return (Reader){row, (int32_t)begin, (int32_t)end, -1, 0};
}

/* Notes for each row of each run whether the row's next run begins where this one ends. Answers
 * whether each row's runs come in the order of their positions. */
static int look_ahead(Cutter *c) {
    const Plan *plan = c->plan;
    int32_t *next = c->read_to; /* for now: where the row's next run starts */
    int is_ordered = 1;
    for (int64_t row = 0; row < plan->num_rows; row++) next[row] = INT32_MAX;
    for (int64_t i = plan->num_runs; i-- > 0;) {
        const int64_t run = c->order[i], at = plan->row_at[run];
        for (int64_t j = at; j < at + plan->row_counts[run]; j++) {
            const Reader seen = seen_by(plan, run, plan->rows[j]);
            if (seen.begin >= seen.end) continue;
            is_ordered &= next[seen.row] >= plan->ends[run];
            c->goes_on[j] = next[seen.row] == plan->ends[run];
            next[seen.row] = (int32_t)plan->starts[run];
        }
    }
    return is_ordered;
}

typedef struct {
    int64_t start, run;
} Start;

static int compare_starts(const void *a, const void *b) {
    const Start *x = a, *y = b;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return x->run < y->run ? -1 : x->run > y->run;
}

/* Puts runs such that those of each row ascend, as plans that come from trees have them anyway. */
static void order_runs(Cutter *c) {
    const int64_t count = c->plan->num_runs;
    for (int64_t i = 0; i < count; i++) c->order[i] = i;
    if (look_ahead(c)) return;
    Start *sorted = room_for(count, sizeof(Start));
    for (int64_t i = 0; i < count; i++) sorted[i] = (Start){c->plan->starts[i], i};
    qsort(sorted, (size_t)count, sizeof(Start), compare_starts);
    for (int64_t i = 0; i < count; i++) c->order[i] = sorted[i].run;
    free(sorted);
    look_ahead(c);
}

/* Adds [begin, end) for those of the group's rows that see any of it. */
static void add_task(Cutter *c, int64_t count, int32_t begin, int32_t end, Task task) {
    Schedule *to = c->to;
    const int64_t size = c->plan->block_size;
    task.first_reader = to->num_readers;
    task.begin = end, task.end = begin, task.is_first = 1, task.phase = 0;
    to->readers = grown(to->readers, &to->reader_room, to->num_readers + count, sizeof(Reader));
    for (int64_t i = 0; i < count; i++) {
        Reader reader = c->group[i];
        if (reader.begin < begin) reader.begin = begin;
        if (reader.end > end) reader.end = end;
        if (reader.begin >= reader.end) continue;
        if (reader.begin < task.begin) task.begin = reader.begin;
        if (reader.end > task.end) task.end = reader.end;
        const int32_t before = c->read_to[reader.row];
        reader.resumes = before >= 0 && span_of(before - 1) == span_of(reader.begin);
        if (before >= 0) task.is_first = 0;
        if (reader.resumes && task.phase <= c->phase_of[reader.row])
            task.phase = c->phase_of[reader.row] + 1;
        to->readers[to->num_readers++] = reader;
    }
    task.num_readers = (int32_t)(to->num_readers - task.first_reader);
    if (task.num_readers == 0) return;
    for (int64_t i = task.first_reader; i < to->num_readers; i++) {
        c->read_to[to->readers[i].row] = to->readers[i].end;
        c->phase_of[to->readers[i].row] = task.phase;
    }
    for (int64_t i = task.first_piece; i < task.first_piece + task.num_pieces; i++) {
        const Piece *piece = &to->pieces[i];
        int64_t from = piece->begin > task.begin ? piece->begin : task.begin;
        int64_t last = (piece->end < task.end ? piece->end : task.end) - 1, head = piece->begin / size;
        for (int64_t b = from / size; from <= last && b <= last / size; b++)
            if (piece->blocks[b - head] > to->highest_block)
                to->highest_block = piece->blocks[b - head];
    }
    to->tasks = grown(to->tasks, &to->task_room, to->num_tasks + 1, sizeof(Task));
    to->tasks[to->num_tasks++] = task;
    to->work += task.num_readers * c->plan->group * (task.end - task.begin);
}

/* Cuts what a group reads between spans, into tasks of `split` tokens or little more. */
static void cut_group(Cutter *c, int64_t count, Task task) {
    int32_t begin = INT32_MAX, end = 0;
    for (int64_t i = 0; i < count; i++) {
        if (c->group[i].begin >= c->group[i].end) continue;
        if (c->group[i].begin < begin) begin = c->group[i].begin;
        if (c->group[i].end > end) end = c->group[i].end;
    }
    while (begin < end) {
        int32_t cut = span_end(begin);
        while (cut < end && cut - begin < c->split) cut = span_end(cut);
        if (cut > end) cut = end;
        add_task(c, count, begin, cut, task);
        begin = cut;
    }
}

/* Adds the pieces of a run and of what is left from above it; answers them as a task. */
static Task add_pieces(Cutter *c, int64_t run, int32_t rest) {
    Schedule *to = c->to;
    const Plan *plan = c->plan;
    Task task = {.first_piece = to->num_pieces};
    const int64_t above = rest < 0 ? 0 : c->rests[rest].num_pieces;
    to->pieces = grown(to->pieces, &to->piece_room, to->num_pieces + above + 1, sizeof(Piece));
    for (int64_t i = 0; i < above; i++)
        to->pieces[to->num_pieces++] = to->pieces[c->rests[rest].first_piece + i];
    to->pieces[to->num_pieces++] = (Piece){(int32_t)plan->starts[run], (int32_t)plan->ends[run],
                                           plan->blocks + plan->block_at[run]};
    task.num_pieces = (int32_t)above + 1;
    return task;
}

/* Reads a run for the first rows of `listed`, as many as belong together; answers how many. */
static int64_t cut_rows(Cutter *c, int64_t run, int64_t at, int64_t num_rows) {
    const Plan *plan = c->plan;
    const int64_t most = plan->max_queries / plan->group;
    const int32_t end = (int32_t)plan->ends[run];
    int32_t rest = -2, start = 0, tail = 0;
    int64_t done = 0, count = 0, num_below = 0;
    for (; done < num_rows && count < most; done++) {
        Reader seen = seen_by(plan, run, plan->rows[at + done]);
        if (seen.begin >= seen.end) continue;
        if (rest == -2) {
            rest = c->rest_of[seen.row];
            start = rest < 0 ? (int32_t)plan->starts[run] : c->rests[rest].begin;
            tail = end / TILE * TILE > start ? end / TILE * TILE : start;
        } else if (rest != c->rest_of[seen.row]) break;
        seen.begin = start;
        if (plan->window && plan->kv_lens[seen.row] - plan->window > start)
            seen.begin = (int32_t)(plan->kv_lens[seen.row] - plan->window);
        c->rest_of[seen.row] = -1;
        if (c->goes_on[at + done] && tail < end) {
            c->rest_of[seen.row] = (int32_t)c->num_rests;
            num_below++;
            seen.end = tail;
        }
        c->group[count++] = seen;
    }
    if (count == 0) return done;
    const Task task = add_pieces(c, run, rest);
    if (num_below) {
        Rest below = {task.first_piece, task.num_pieces, tail};
        for (; c->to->pieces[below.first_piece].end <= tail; below.first_piece++) below.num_pieces--;
        c->rests = grown(c->rests, &c->rest_room, c->num_rests + 1, sizeof(Rest));
        c->rests[c->num_rests++] = below;
    }
    cut_group(c, count, task);
    return done;
}

static void cut_runs(Cutter *c, int64_t split) {
    Schedule *to = c->to;
    const Plan *plan = c->plan;
    to->num_tasks = to->num_readers = to->num_pieces = to->work = c->num_rests = 0;
    to->highest_block = -1;
    c->split = split;
    for (int64_t row = 0; row < plan->num_rows; row++) c->rest_of[row] = c->read_to[row] = -1;
    for (int64_t i = 0; i < plan->num_runs; i++) {
        const int64_t run = c->order[i], at = plan->row_at[run], count = plan->row_counts[run];
        for (int64_t done = 0; done < count;) done += cut_rows(c, run, at + done, count - done);
    }
}

/* How many partial results a reader adds: for a row's first task, one for all spans but that in which
 * the task ends, and one for that. */
static int32_t num_results(const Task *task, const Reader *reader) {
    if (task->is_first) {
        const int32_t last = span_of(task->end);
        return (reader->begin < last) + (reader->end > last);
    }
    int32_t count = -reader->resumes;
    for (int32_t at = reader->begin; at < reader->end; at = span_end(at)) count++;
    return count;
}

/* Gives each result of a row its place, in the order in which they are added up. */
static void number_partials(Schedule *to, int64_t num_rows) {
    to->num_rows = num_rows;
    to->partial_at = grown(to->partial_at, &to->row_room, 2 * num_rows + 2, sizeof(int32_t));
    to->direct = grown(to->direct, &to->direct_room, num_rows + 1, sizeof(int32_t));
    int32_t *at = to->partial_at, *next = at + num_rows + 1;
    for (int64_t row = 0; row <= num_rows; row++) at[row] = 0;
    for (int64_t row = 0; row < num_rows; row++) to->direct[row] = next[row] = 0;
    for (int64_t i = 0; i < to->num_tasks; i++) {
        const Reader *readers = to->readers + to->tasks[i].first_reader;
        for (int32_t r = 0; r < to->tasks[i].num_readers; r++)
            to->direct[readers[r].row] += to->tasks[i].is_first ? 1 : 2;
    }
    for (int64_t row = 0; row < num_rows; row++) to->direct[row] = to->direct[row] == 1;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < to->num_tasks; i++) {
            const Task *task = &to->tasks[i];
            Reader *reader = to->readers + task->first_reader;
            for (int32_t r = 0; r < task->num_readers; r++, reader++) {
                if (to->direct[reader->row]) continue;
                const int32_t count = num_results(task, reader);
                if (pass) reader->place = next[reader->row] - reader->resumes;
                if (pass) next[reader->row] += count;
                else at[reader->row + 1] += count;
            }
        }
        for (int64_t row = 0; !pass && row < num_rows; row++) {
            next[row] = at[row];
            at[row + 1] += at[row];
        }
    }
    to->num_partials = at[num_rows];
}

/* Puts the tasks in the order of their phases. */
static void order_phases(Schedule *to) {
    int32_t last = -1;
    for (int64_t i = 0; i < to->num_tasks; i++)
        if (to->tasks[i].phase > last) last = to->tasks[i].phase;
    to->num_phases = last + 1;
    to->phase_at = grown(to->phase_at, &to->phase_room, to->num_phases + 1, sizeof(int64_t));
    Task *sorted = room_for(to->num_tasks, sizeof(Task));
    int64_t count = 0;
    for (int64_t phase = 0; phase <= last; phase++) {
        to->phase_at[phase] = count;
        for (int64_t i = 0; i < to->num_tasks; i++)
            if (to->tasks[i].phase == phase) sorted[count++] = to->tasks[i];
    }
    to->phase_at[to->num_phases] = count;
    memcpy(to->tasks, sorted, (size_t)count * sizeof(Task));
    free(sorted);
}

/* Makes an empty schedule at *made. */
EXPORT(void, new_schedule)(Schedule **made) {
    *made = calloc(1, sizeof(Schedule));
    if (*made == NULL) abort();
}

EXPORT(void, free_schedule)(Schedule *schedule) {
    free(schedule->tasks);
    free(schedule->readers);
    free(schedule->pieces);
    free(schedule->phase_at);
    free(schedule->partial_at);
    free(schedule->direct);
    free(schedule->scratch);
    free(schedule);
}

/* Fills a schedule from a plan, whose arrays must stay as they are while it is used. */
EXPORT(void, cut_schedule)(Schedule *to, const Plan *plan, int64_t *highest_block) {
    int64_t num_listed = 0;
    for (int64_t run = 0; run < plan->num_runs; run++) num_listed += plan->row_counts[run];
    Cutter c = {.to = to, .plan = plan};
    c.order = room_for(plan->num_runs, sizeof(int64_t));
    int32_t *rows = room_for(3 * plan->num_rows, sizeof(int32_t));
    c.rest_of = rows, c.read_to = rows + plan->num_rows, c.phase_of = c.read_to + plan->num_rows;
    c.goes_on = room_for(num_listed, 1);
    c.group = room_for(plan->max_queries / plan->group, sizeof(Reader));
    order_runs(&c);
    cut_runs(&c, INT32_MAX);
    if (plan->num_threads > 1) {
        /* With several threads long tasks are cut, so that there are several for each. */
        const int64_t share =
            to->work * plan->num_kv_heads / (plan->num_threads * TASKS_PER_THREAD) + 1;
        int64_t longest = 0, most = 1;
        for (int64_t i = 0; i < to->num_tasks; i++) {
            const Task *task = &to->tasks[i];
            const int64_t queries = task->num_readers * plan->group;
            if (queries * (task->end - task->begin) > longest)
                longest = queries * (task->end - task->begin);
            if (queries > most) most = queries;
        }
        if (longest > share) cut_runs(&c, share / most > MIN_SPLIT ? share / most : MIN_SPLIT);
    }
    to->block_size = plan->block_size;
    number_partials(to, plan->num_rows);
    order_phases(to);
    *highest_block = to->highest_block;
    free(c.order), free(rows), free(c.goes_on), free(c.group), free(c.rests);
}
