/* Normalisers of rows of logits, and their most likely tokens: what log-probabilities are made of. */
#include "native.h"
#include "pool.h"
#include "token_list.h"

typedef struct {
    const float *logits;
    int64_t stride, vocab_size;
    float *normalisers;
    char *scratch;
    int64_t scratch_bytes; /* of a worker */
} Normalise;

/* Sum of exp(logit - greatest) over the row, in float32 for each block and in float64 over them. */
static double sum_exponentials(const Row *row, float greatest) {
    float padded[BLOCK];
    double total = 0;
    for (int64_t block = 0; block < row->num_blocks; block++) {
        const float *logits = block_of(row, block, padded);
        vf sum = vset(0.0f);
        for (int i = 0; i < BLOCK; i += LANES) sum = vadd(sum, vexp(vsub(vload(logits + i), vset(greatest))));
        total += vsum(sum);
    }
    return total;
}

static void normalise_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Normalise *x = job;
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(x->logits + i * x->stride, x->vocab_size);
        int64_t *sums;
        lay_out(x->scratch + worker * x->scratch_bytes, &row, &sums);
        const float greatest = row.logits[find_greatest(&row)];
        x->normalisers[i] = isfinite(greatest) ? (float)(greatest + log(sum_exponentials(&row, greatest))) : NAN;
    }
}

/* Finds log(sum of exp(logit)) of each row; NaN where the greatest logit is not finite. `scratch` is as
 * for `draw`. */
EXPORT(void, normalise)
(const float *logits, int64_t num_rows, int64_t stride, int64_t vocab_size, float *normalisers, char *scratch,
 int64_t scratch_bytes, int64_t num_threads) {
    const Normalise job = {logits, stride, vocab_size, normalisers, scratch, scratch_bytes};
    pool_run(normalise_rows, &job, num_rows, 1, num_threads);
}

typedef struct {
    const float *logits;
    int64_t stride, vocab_size;
    const int64_t *counts;
    int64_t width; /* of a row of the two below */
    int64_t *ids;
    float *most;
    char *scratch;
    int64_t scratch_bytes; /* of a worker */
} MostLikely;

/* Takes the first of the greatest again and again, while there is one. */
static void sort_most(List *list, int64_t count, int64_t *ids, float *most) {
    for (int64_t place = 0; place < count && place < list->count; place++) {
        int64_t best = 0;
        for (int64_t i = 1; i < list->count; i++)
            if (list->logits[i] > list->logits[best]) best = i;
        ids[place] = list->ids[best];
        most[place] = list->logits[best];
        list->logits[best] = -INFINITY;
    }
}

static void find_most_likely(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const MostLikely *x = job;
    for (int64_t i = begin; i < end; i++) {
        Row row = row_of(x->logits + i * x->stride, x->vocab_size);
        int64_t *sums, *ids = x->ids + i * x->width;
        float *most = x->most + i * x->width;
        List list = lay_out(x->scratch + worker * x->scratch_bytes, &row, &sums);
        for (int64_t place = 0; place < x->width; place++) {
            ids[place] = 0;
            most[place] = -INFINITY;
        }
        if (!isfinite(row.logits[find_greatest(&row)])) continue;
        collect_top_k(&row, x->counts[i], &list);
        sort_most(&list, x->counts[i], ids, most);
    }
}

/* Lists each row's most likely tokens, counts[i] <= width of them: greatest first, of equals the lowest
 * id first; then logits of -inf. `scratch` is as for `draw`. */
EXPORT(void, most_likely)
(const float *logits, int64_t num_rows, int64_t stride, int64_t vocab_size, const int64_t *counts, int64_t width,
 int64_t *ids, float *most, char *scratch, int64_t scratch_bytes, int64_t num_threads) {
    const MostLikely job = {logits, stride, vocab_size, counts, width, ids, most, scratch, scratch_bytes};
    pool_run(find_most_likely, &job, num_rows, 1, num_threads);
}
