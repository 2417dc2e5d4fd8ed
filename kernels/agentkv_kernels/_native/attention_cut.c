/* Cuts what a step reads into tasks, once for all layers. No tensor is touched.
 *
 * A run is read once by all its rows: a task has up to `max_queries` query vectors of each KV head.
 * With several threads long tasks are split, so that there are several for each thread. Results of
 * a row that has more than one are merged, in the order of the runs. */
#include "attention.h"
#include "native.h"

#include <stdlib.h>

enum { MIN_SPLIT = 256 }; /* tokens; below, a merge costs more than an idle thread */
enum { TASKS_PER_THREAD = 4 };

static void *grown(void *old, int64_t *room, int64_t wanted, size_t size) {
    if (wanted <= *room) return old;
    *room = 2 * wanted;
    void *fresh = realloc(old, (size_t)*room * size);
    if (fresh == NULL) abort(); /* a few kilobytes: nothing else would work either */
    return fresh;
}

static Reader seen_by(const Plan *plan, int64_t run, int32_t row) {
    int64_t length = plan->kv_lens[row], begin = plan->starts[run], end = plan->ends[run];
    if (plan->window && length - plan->window > begin) begin = length - plan->window;
    if (length < end) end = length;
    return (Reader){row, (int32_t)begin, (int32_t)end, -1};
}

/* Adds [begin, end) of a run for those of some rows that see any of it. */
static void add_task(Schedule *to, const Plan *plan, int64_t run, const Reader *rows, int64_t count,
                     int32_t begin, int32_t end) {
    Task task = {to->num_readers, NULL, 0, end, begin};
    to->readers = grown(to->readers, &to->reader_room, to->num_readers + count, sizeof(Reader));
    for (int64_t i = 0; i < count; i++) {
        Reader reader = rows[i];
        if (reader.begin < begin) reader.begin = begin;
        if (reader.end > end) reader.end = end;
        if (reader.begin >= reader.end) continue;
        if (reader.begin < task.begin) task.begin = reader.begin;
        if (reader.end > task.end) task.end = reader.end;
        to->readers[to->num_readers++] = reader;
    }
    task.num_readers = (int32_t)(to->num_readers - task.first_reader);
    if (task.num_readers == 0) return;
    int64_t first = task.begin / plan->block_size, head = plan->starts[run] / plan->block_size;
    task.blocks = plan->blocks + plan->block_at[run] + first - head;
    for (int64_t i = first; i <= (task.end - 1) / plan->block_size; i++)
        if (task.blocks[i - first] > to->highest_block) to->highest_block = task.blocks[i - first];
    to->tasks = grown(to->tasks, &to->task_room, to->num_tasks + 1, sizeof(Task));
    to->tasks[to->num_tasks++] = task;
    to->work += task.num_readers * plan->group * (task.end - task.begin);
}

/* Cuts one run for rows that fit a task, into pieces of at most `split` tokens. */
static void cut_rows(Schedule *to, const Plan *plan, int64_t run, const Reader *rows, int64_t count,
                     int64_t split) {
    int32_t begin = rows[0].begin, end = rows[0].end;
    for (int64_t i = 1; i < count; i++) {
        if (rows[i].begin < begin) begin = rows[i].begin;
        if (rows[i].end > end) end = rows[i].end;
    }
    while (begin < end) {
        int64_t last = (begin + split) / split * split; /* at multiples: tiles stay whole */
        int32_t cut = last < end ? (int32_t)last : end;
        add_task(to, plan, run, rows, count, begin, cut);
        begin = cut;
    }
}

static void cut_runs(Schedule *to, const Plan *plan, int64_t split) {
    to->num_tasks = to->num_readers = to->work = 0;
    to->highest_block = -1;
    int64_t most = plan->max_queries / plan->group;
    if (most < 1) most = 1;
    Reader *rows = malloc((size_t)most * sizeof(Reader));
    if (rows == NULL) abort();
    for (int64_t run = 0; run < plan->num_runs; run++) {
        const int32_t *listed = plan->rows + plan->row_at[run];
        int64_t count = 0;
        for (int64_t i = 0; i < plan->row_counts[run]; i++) {
            Reader reader = seen_by(plan, run, listed[i]);
            if (reader.begin < reader.end) rows[count++] = reader;
            if (count == most) {
                cut_rows(to, plan, run, rows, count, split);
                count = 0;
            }
        }
        if (count) cut_rows(to, plan, run, rows, count, split);
    }
    free(rows);
}

/* Gives each result of a row its place; only a row's single result needs none. */
static void number_partials(Schedule *to, int64_t num_rows) {
    to->num_rows = num_rows;
    to->partial_at = grown(to->partial_at, &to->row_room, 2 * num_rows + 2, sizeof(int32_t));
    int32_t *at = to->partial_at, *next = at + num_rows + 1;
    for (int64_t row = 0; row <= num_rows; row++) at[row] = 0;
    for (int64_t i = 0; i < to->num_readers; i++) at[to->readers[i].row + 1]++;
    for (int64_t row = 0; row < num_rows; row++) {
        /* `next` < 0 marks a row with one result; a row without any keeps an empty range. */
        int32_t count = at[row + 1];
        next[row] = count == 1 ? -1 : at[row];
        at[row + 1] = at[row] + (count == 1 ? 0 : count);
    }
    for (int64_t i = 0; i < to->num_readers; i++) {
        Reader *reader = &to->readers[i];
        reader->partial = next[reader->row] < 0 ? -1 : next[reader->row]++;
    }
    to->num_partials = at[num_rows];
}

/* Makes an empty schedule at *made. */
EXPORT(void, new_schedule)(Schedule **made) {
    *made = calloc(1, sizeof(Schedule));
    if (*made == NULL) abort();
}

EXPORT(void, free_schedule)(Schedule *schedule) {
    free(schedule->tasks);
    free(schedule->readers);
    free(schedule->partial_at);
    free(schedule->scratch);
    free(schedule);
}

/* Fills a schedule from a plan, whose arrays must stay as they are while it is used. */
EXPORT(void, cut_schedule)(Schedule *to, const Plan *plan, int64_t *highest_block) {
    cut_runs(to, plan, INT32_MAX);
    if (plan->num_threads > 1) {
        int64_t share = to->work / (plan->num_threads * TASKS_PER_THREAD) + 1;
        int64_t longest = 0;
        for (int64_t i = 0; i < to->num_tasks; i++) {
            Task *task = &to->tasks[i];
            int64_t work = task->num_readers * plan->group * (task->end - task->begin);
            if (work > longest) longest = work;
        }
        if (longest > share) {
            int64_t queries = plan->max_queries;
            if (plan->num_rows * plan->group < queries) queries = plan->num_rows * plan->group;
            int64_t split = (share / queries + TILE) / TILE * TILE;
            cut_runs(to, plan, split > MIN_SPLIT ? split : MIN_SPLIT);
        }
    }
    to->block_size = plan->block_size;
    number_partials(to, plan->num_rows);
    *highest_block = to->highest_block;
}
