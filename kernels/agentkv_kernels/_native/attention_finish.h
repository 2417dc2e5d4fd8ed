/* From what was summed up to results: the last division, and the partial results of a row. */
#ifndef AGENTKV_ATTENTION_FINISH_H
#define AGENTKV_ATTENTION_FINISH_H

#include "attention_scratch.h"

/* Writes the result of one query vector, from its sums; a sink adds to the
 * denominator and to nothing else. */
__attribute__((noinline)) static void finish(const Pass *pass, int64_t row, int64_t head, float largest, float denominator,
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

/* Adds up the partial results of one row in their order; a row that sees nothing gets zeros. */
static void merge_row(const Pass *pass, float *sums, int64_t row) {
    const Layer *x = pass->layer;
    const int32_t *at = x->schedule->partial_at;
    if (x->schedule->direct[row]) return; /* finished by its only task */
    const int64_t num_heads = x->num_kv_heads * x->group;
    if (at[row] == at[row + 1]) {
        const int64_t bytes = num_heads * x->v_head_dim * ITEM_BYTES[x->query_type];
        memset((char *)x->out + row * bytes, 0, (size_t)bytes);
        return;
    }
    for (int64_t head = 0; head < num_heads; head++) {
        float largest = -INFINITY, denominator = 0.0f;
        memset(sums, 0, (size_t)pass->width * sizeof(float));
        for (int64_t i = at[row]; i < at[row + 1]; i++) {
            const float *partial = partial_of(pass, i, head);
            add_state(&largest, &denominator, sums, partial[0], partial[1], partial + 2, pass->width);
        }
        finish(pass, row, head, largest, denominator, sums);
    }
}

#endif
