/* Rules out the tokens of rows of logits that are not in a set. */
#include "lanes.h"
#include "native.h"
#include "pool.h"

enum { PIECE = 64 };             /* tokens of an item */
enum { PIECES_OF_A_PART = 128 }; /* some microseconds for a dozen masks */

typedef struct {
    float *logits;
    int64_t stride, vocab_size;
    const int64_t *rows;         /* that masks are for; some may be the same */
    const uint8_t *const *masks; /* bit i of byte b stands for token 8 * b + i */
    int64_t num_masks;
} Mask;

/* Adds -inf to those of LANES logits whose bit is 0: a NaN stays one. */
INLINE void mask_lanes(float *logits, const uint8_t *bits) {
    const vf x = vload(logits), nothing = vset(-__builtin_inff());
#ifdef __AVX512F__
    const __mmask16 is_out = (__mmask16)~(bits[0] | bits[1] << 8);
    vstore(logits, _mm512_mask_add_ps(x, is_out, x, nothing));
#else
    const vi places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const vi is_out = _mm256_cmpeq_epi32(_mm256_and_si256(viset(bits[0]), places), viset(0));
    vstore(logits, vadd(x, _mm256_and_ps(_mm256_castsi256_ps(is_out), nothing)));
#endif
}

/* All masks of some tokens: so masks of one row never meet. */
static void mask_pieces(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Mask *x = job;
    (void)worker;
    const int64_t start = begin * PIECE, stop = end * PIECE < x->vocab_size ? end * PIECE : x->vocab_size;
    for (int64_t m = 0; m < x->num_masks; m++) {
        float *logits = x->logits + x->rows[m] * x->stride;
        const uint8_t *bits = x->masks[m];
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES) mask_lanes(logits + i, bits + i / 8);
        for (; i < stop; i++)
            if (!(bits[i / 8] >> i % 8 & 1)) logits[i] += -__builtin_inff();
    }
}

/* Applies masks of at least vocab_size bits in place. */
EXPORT(void, mask)
(float *logits, int64_t stride, int64_t vocab_size, const int64_t *rows, const uint8_t *const *masks,
 int64_t num_masks, int64_t num_threads) {
    const Mask job = {logits, stride, vocab_size, rows, masks, num_masks};
    pool_run(mask_pieces, &job, (vocab_size + PIECE - 1) / PIECE, PIECES_OF_A_PART, num_threads);
}
