/* Draws a token from each row of logits: the greatest one, or by the row's distribution.
 *
 *     logits -> top-k -> weights -> top-p -> min-p -> typical-p -> inversion
 *
 * Inversion takes the first token whose running sum of weights exceeds number * total. A row without
 * filters is never written down: its blocks are summed up, one is chosen, and weighed once more. With filters,
 * tokens that provably include all that the filters leave are listed, by a bound on their logits. How
 * low the bound lies has no influence on the token. A row is computed by one thread, and what its token
 * is depends on nothing else.
 */
#include "native.h"
#include "pool.h"
#include "token_list.h"

typedef struct {
    double number;      /* in [0, 1) */
    double temperature; /* 0: take the greatest */
    double top_k;       /* whole; 0: all */
    double top_p, min_p, typical_p; /* 1, 0, 1: all */
} Choice;

typedef struct {
    const float *logits;
    int64_t stride, vocab_size;
    const Choice *choices;
    int64_t *tokens;
    float *greatest;
    char *scratch;
    int64_t scratch_bytes; /* of a worker */
} Draw;

INLINE int64_t target_of(double number, int64_t total) {
    const int64_t target = (int64_t)floor(number * (double)total);
    return target < total - 1 ? target : total - 1;
}

/* The token in a row that is not filtered. */
static int64_t draw_from_row(const Row *row, double number, int64_t *sums) {
    float padded[BLOCK];
    int64_t weights[BLOCK], target = target_of(number, sum_blocks(row, sums)), block = 0, i = 0;
    for (; target >= sums[block]; block++) target -= sums[block];
    const float *logits = block_of(row, block, padded);
    for (; i < BLOCK; i += DOUBLES)
        *(loose_vl *)(weights + i) =
            weights_of(exponents_of(logits + i, row->greatest, row->per_logit), row->bits);
    for (i = 0; target >= weights[i]; i++) target -= weights[i];
    return block * BLOCK + i;
}

static int64_t draw_from_list(const List *list, double number) {
    int64_t target = target_of(number, sum_weights(list)), i = 0;
    for (; target >= list->weights[i]; i++) target -= list->weights[i];
    return list->ids[i];
}

/* Lists what may stay where there is no top-k: tokens above a bound that comes down until those below
 * it would be dropped. Answers the weights' sum of the whole row, or of the list where nothing needs it. */
static int64_t list_most_likely(const Row *row, const Choice *choice, int64_t *sums, List *list) {
    const double unit = ldexp(1.0, (int)row->bits), all = 0.25; /* what weighs less is rounded to 0 */
    const double floor_ = fmax(choice->min_p * unit - 2, all);
    double bound = choice->top_p < 1 ? unit / 256 : floor_;
    const int64_t total = choice->top_p < 1 ? sum_blocks(row, sums) : 0;
    const double goal = choice->top_p * (double)total;
    for (;; bound /= 256) {
        const int is_last = bound <= floor_;
        if (is_last) bound = floor_;
        collect(row, logit_of_weight(row, bound), list);
        const int64_t held = weigh(row, list);
        if (is_last) return total ? total : held;
        /* What is not listed weighs at most bound + 1: no part of a set that is reached above. */
        int64_t above = 0;
        for (int64_t i = 0; i < list->count; i++)
            above += (double)list->weights[i] > bound + 1 ? list->weights[i] : 0;
        if ((double)above >= goal) return total;
    }
}

/* The smallest set of most likely tokens that reaches the goal stays, all where none does. Of equally
 * likely tokens at its edge those with the lowest ids are in it. */
static void apply_top_p(List *list, double goal) {
    for (int64_t i = 0; i < list->count; i += DOUBLES) {
        const vl weights = *(const loose_vl *)(list->weights + i);
        *(loose_vl *)(list->keys + i) = -(vl)reals_of(weights); /* as bits, which halve by magnitude */
    }
    const int64_t key = -reach(list, goal);
    double edge_real;
    memcpy(&edge_real, &key, 8);
    const int64_t edge = (int64_t)edge_real;
    int64_t reached = 0;
    for (int64_t i = 0; i < list->count; i++) reached += list->weights[i] > edge ? list->weights[i] : 0;
    for (int64_t i = 0; i < list->count; i++) {
        if (list->weights[i] > edge) continue;
        const int stays = list->weights[i] == edge && (double)reached < goal;
        if (stays)
            reached += edge;
        else
            list->weights[i] = 0;
    }
}

static void apply_min_p(List *list, double least) {
    for (int64_t i = 0; i < list->count; i++)
        list->weights[i] = (double)list->weights[i] < least ? 0 : list->weights[i];
}

/* Locally typical sampling: tokens stay whose surprise is closest to the entropy, until they reach p.
 * Surprise and entropy are exponents and their mean with the sign changed, and log(total) more; so the
 * distance of both is that of the exponents. */
static void apply_typical_p(const Row *row, List *list, double p) {
    const int64_t total = sum_weights(list), fine = row->bits < 42 ? 9 : 51 - row->bits;
    const double scale = ldexp(1.0, (int)fine); /* terms below 2^51, their sums below 2^62 */
    vl sum = lall(0);
    for (int64_t i = 0; i < list->count; i += DOUBLES) {
        const vd exponents = exponents_of(list->logits + i, row->greatest, row->per_logit);
        const vl weights = *(const loose_vl *)(list->weights + i); /* 0 behind the list */
        const vd share = reals_of(weights) * scale;
        sum += (vl)dfma(share, exponents, dall(TO_WHOLE)) - (vl)dall(TO_WHOLE);
    }
    const double mean = (double)lsum(sum) / scale / (double)total;
    for (int64_t i = 0; i < list->count; i += DOUBLES) {
        const vd away = exponents_of(list->logits + i, row->greatest, row->per_logit) - mean;
        *(loose_vl *)(list->keys + i) = (vl)away & INT64_MAX; /* bits of |away|, ordered as it is */
    }
    const int64_t furthest = reach(list, p * (double)total);
    for (int64_t i = 0; i < list->count; i++) list->weights[i] = list->keys[i] > furthest ? 0 : list->weights[i];
}

static int64_t draw_filtered(const Row *row, const Choice *choice, int64_t *sums, List *list) {
    const int has_top_k = choice->top_k > 0 && choice->top_k < (double)row->vocab_size;
    int64_t total;
    if (has_top_k) {
        collect_top_k(row, (int64_t)choice->top_k, list);
        total = weigh(row, list);
    } else
        total = list_most_likely(row, choice, sums, list);
    if (choice->top_p < 1) apply_top_p(list, choice->top_p * (double)total);
    if (choice->min_p > 0) apply_min_p(list, choice->min_p * ldexp(1.0, (int)row->bits));
    if (choice->typical_p < 1) apply_typical_p(row, list, choice->typical_p);
    return draw_from_list(list, choice->number);
}

static void draw_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Draw *x = job;
    for (int64_t i = begin; i < end; i++) {
        const Choice *choice = x->choices + i;
        Row row = row_of(x->logits + i * x->stride, x->vocab_size);
        int64_t *sums;
        List list = lay_out(x->scratch + worker * x->scratch_bytes, &row, &sums);
        x->tokens[i] = find_greatest(&row);
        x->greatest[i] = row.logits[x->tokens[i]];
        if (choice->temperature == 0 || !isfinite(x->greatest[i])) continue;
        row.greatest = x->greatest[i];
        row.per_logit = per_logit_at(choice->temperature);
        const int is_whole = (choice->top_k == 0 || choice->top_k >= (double)row.vocab_size) &&
                             choice->top_p >= 1 && choice->min_p <= 0 && choice->typical_p >= 1;
        x->tokens[i] = is_whole ? draw_from_row(&row, choice->number, sums)
                                : draw_filtered(&row, choice, sums, &list);
    }
}

/* Chooses tokens, and finds the greatest logits; a row whose greatest logit is not finite gives the
 * token that has it. `scratch` is memory of any contents: `scratch_bytes` for each thread. */
EXPORT(void, draw)
(const float *logits, int64_t num_rows, int64_t stride, int64_t vocab_size, const Choice *choices, int64_t *tokens,
 float *greatest, char *scratch, int64_t scratch_bytes, int64_t num_threads) {
    const Draw draw = {logits, stride, vocab_size, choices, tokens, greatest, scratch, scratch_bytes};
    pool_run(draw_rows, &draw, num_rows, 1, num_threads);
}
