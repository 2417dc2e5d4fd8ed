/* One layer of a step: stores its keys and values, then attends as a schedule says.
 *
 * Work is divided into (task, KV head). A row that is read for by several tasks gets partial results
 * of each; they are added up in the order of the positions, so the result does not depend on which thread
 * was first, nor on how work was divided. A token is read for a row only where the row sees it. */
#include "attention.h"
#include "attention_task.h"
#include "native.h"
#include "pool.h"

enum { SERIAL = 1 << 13 };  /* query vectors times tokens: below, handing work over costs more */
enum { MERGED_ROWS = 2 };   /* in a part */

/* Some tasks of a pass. */
typedef struct {
    const Pass *pass;
    int64_t first;
} Phase;

static void attend_pieces(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Phase *phase = job;
    const Pass *pass = phase->pass;
    const int64_t num_kv_heads = pass->layer->num_kv_heads;
    const Task *tasks = pass->layer->schedule->tasks + phase->first;
    Scratch s = scratch_of(pass, worker);
    for (int64_t i = begin; i < end; i++)
        attend_task(pass, &s, &tasks[i / num_kv_heads], i % num_kv_heads);
}

static void merge_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Pass *pass = job;
    Scratch s = scratch_of(pass, worker);
    for (int64_t row = begin; row < end; row++) merge_row(pass, s.rows, row);
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
    const int64_t threads = schedule->work * x->num_kv_heads < SERIAL ? 1 : x->num_threads;
    for (int64_t i = 0; i < schedule->num_phases; i++) {
        const Phase phase = {&pass, schedule->phase_at[i]};
        const int64_t num_tasks = schedule->phase_at[i + 1] - phase.first;
        pool_run(attend_pieces, &phase, num_tasks * x->num_kv_heads, 1, threads);
    }
    pool_run(merge_rows, &pass, schedule->num_rows, MERGED_ROWS, threads);
}
