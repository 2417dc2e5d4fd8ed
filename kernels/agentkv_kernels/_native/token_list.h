/* Lists of tokens of a row, and the selections that filters are made of.
 *
 * It knows no filter. Lists are in the order of ids. Where a selection has to find an edge among
 * values, it halves the range of the values and not the list: sums over a list are a vector's work,
 * and how long it takes does not depend on the order.
 */
#ifndef AGENTKV_TOKEN_LIST_H
#define AGENTKV_TOKEN_LIST_H

#include "token_weights.h"

enum { SLACK = BLOCK };         /* entries behind a list that may be written */
enum { ROUNDS_TO_NARROW = 4 };  /* halvings of a range after which its entries are moved together */
enum { FEW = 64 };              /* entries that are not worth it */

typedef struct {
    int64_t count;
    int32_t *ids;
    float *logits;
    int64_t *weights;
    int64_t *keys;                        /* for whoever selects */
    int64_t *spare_keys, *spare_weights;  /* for `reach` */
} List;

/* Lays out a worker's scratch: 40 bytes for each token of whole blocks and of SLACK, 16 for each block. */
static inline List lay_out(char *scratch, Row *row, int64_t **sums) {
    const int64_t size = row->num_blocks * BLOCK + SLACK;
    int64_t *numbers = (int64_t *)scratch;
    List list = {.weights = numbers, .keys = numbers + size};
    list.spare_keys = numbers + 2 * size;
    list.spare_weights = numbers + 3 * size;
    *sums = numbers + 4 * size;
    list.logits = (float *)(*sums + row->num_blocks);
    row->maxima = list.logits + size;
    list.ids = (int32_t *)(row->maxima + row->num_blocks);
    return list;
}

/* Lists the tokens whose logit is at least `bound`, which is above -inf. */
static inline void collect(const Row *row, float bound, List *list) {
    float padded[BLOCK];
    int64_t count = 0;
    for (int64_t block = 0; block < row->num_blocks; block++) {
        if (row->maxima[block] < bound) continue;
        const float *logits = block_of(row, block, padded);
        for (int i = 0; i < BLOCK; i += LANES) {
            const int32_t id = (int32_t)(block * BLOCK + i);
#ifdef __AVX512F__
            const vf x = vload(logits + i);
            const __mmask16 is_in = _mm512_cmp_ps_mask(x, vset(bound), _CMP_GE_OQ);
            const vi ids = viadd(viset(id), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
            vstore(list->logits + count, _mm512_maskz_compress_ps(is_in, x));
            _mm512_storeu_si512(list->ids + count, _mm512_maskz_compress_epi32(is_in, ids));
            count += __builtin_popcount(is_in);
#else
            unsigned is_in = _mm256_movemask_ps(_mm256_cmp_ps(vload(logits + i), vset(bound), _CMP_GE_OQ));
            for (; is_in; is_in &= is_in - 1, count++) {
                const int place = __builtin_ctz(is_in);
                list->logits[count] = logits[i + place];
                list->ids[count] = id + place;
            }
#endif
        }
    }
    list->count = count;
}

/* Weighs the tokens of a list; answers the sum. Behind the list follow weights of 0. */
static inline int64_t weigh(const Row *row, List *list) {
    vl total = lall(0);
    for (int64_t i = 0; i < DOUBLES; i++) list->logits[list->count + i] = -INFINITY;
    for (int64_t i = 0; i < list->count; i += DOUBLES) {
        const vd exponents = exponents_of(list->logits + i, row->greatest, row->per_logit);
        const vl weights = weights_of(exponents, row->bits);
        *(loose_vl *)(list->weights + i) = weights;
        total += weights;
    }
    return lsum(total);
}

static inline int64_t sum_weights(const List *list) {
    int64_t total = 0;
    for (int64_t i = 0; i < list->count; i++) total += list->weights[i];
    return total;
}

/* Order of floats as that of whole numbers. */
INLINE int32_t place_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

/* The k-th largest of `count` numbers, 1 <= k <= count, none of them NaN. */
static inline float kth_largest(const float *numbers, int64_t count, int64_t k) {
    int64_t low = INT32_MIN, high = INT32_MAX; /* at least k are >= low, and fewer are > high */
    while (low < high) {
        const int32_t middle = (int32_t)(low + (high - low + 1) / 2);
        int32_t reached = 0;
        for (int64_t i = 0; i < count; i++) reached += place_of(numbers[i]) >= middle;
        if (reached >= k)
            low = middle;
        else
            high = middle - 1;
    }
    const int32_t bits = (int32_t)low ^ (int32_t)((uint32_t)((int32_t)low >> 31) >> 1);
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

/* Lists the k most likely tokens, k >= 1, and all that are as likely as the last of them. */
static inline void collect_top_k(const Row *row, int64_t k, List *list) {
    /* Each of k blocks has a token that reaches the k-th largest maximum. */
    float least = k <= row->num_blocks ? kth_largest(row->maxima, row->num_blocks, k)
                                       : kth_largest(row->logits, row->vocab_size, k);
    collect(row, fmaxf(least, -__FLT_MAX__), list);
    if (list->count <= k) return;
    least = kth_largest(list->logits, list->count, k);
    int64_t kept = 0;
    for (int64_t i = 0; i < list->count; i++) {
        const float logit = list->logits[i];
        list->logits[kept] = logit;
        list->ids[kept] = list->ids[i];
        kept += logit >= least;
    }
    list->count = kept;
}

/* Entries whose key lies in (low, high], moved together; *below grows by the weights up to low. */
static inline int64_t narrow(const List *list, const int64_t *keys, const int64_t *weights, int64_t count, int64_t low,
                      int64_t high, int64_t *below) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t key = keys[i], weight = weights[i];
        *below += key <= low ? weight : 0;
        list->spare_keys[kept] = key;
        list->spare_weights[kept] = weight;
        kept += (key > low) & (key <= high);
    }
    return kept;
}

/* The least key such that the weights of keys up to it sum to at least `goal`; if none does, the
 * greatest. The list has an entry. */
static inline int64_t reach(const List *list, double goal) {
    const int64_t *keys = list->keys, *weights = list->weights;
    int64_t count = list->count, low = INT64_MAX, high = INT64_MIN, below = 0;
    for (int64_t i = 0; i < count; i++) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    low--; /* weights up to low do not reach the goal; those up to high do, if any */
    for (int round = 1; high - low > 1; round++) {
        const int64_t middle = low + (high - low) / 2;
        int64_t sum = below;
        for (int64_t i = 0; i < count; i++) sum += keys[i] <= middle ? weights[i] : 0;
        if ((double)sum >= goal)
            high = middle;
        else
            low = middle;
        if (round % ROUNDS_TO_NARROW == 0 && count > FEW) {
            count = narrow(list, keys, weights, count, low, high, &below);
            keys = list->spare_keys;
            weights = list->spare_weights;
        }
    }
    return high;
}

#endif
