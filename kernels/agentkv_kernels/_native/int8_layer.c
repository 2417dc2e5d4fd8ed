/* Matrix products of a decoder layer with 8-bit weights, and what stands between them.
 *
 * One product; a layer up to attention; a layer after it: each a sequence of jobs for the pool. Arrays
 * are row-major and dense, float unless said otherwise. `scratch` is memory of any contents: for each input of
 * a product and each row 4 bytes, and 4 more for each output of the gates; then 4096.
 */
#include "int8_panel.h"
#include "int8_layer.h"
#include "pool.h"

enum { PARTS_PER_THREAD = 4 }; /* fewer, longer ones: within a part it is known which panel comes next */
enum { ROUNDED_GROUPS = 64 }; /* in a part of rounding, at least: a microsecond */
enum { ROTATED_ROWS = 4 };    /* in a part */

INLINE void store_tile(int count, float tile[TILE_ROWS][PANEL], int64_t width, const float *bias, int adds,
                       float *out, int64_t stride) {
    for (int r = 0; r < count; r++) {
        float *to = out + r * stride;
        for (int64_t i = 0; i < width; i++) {
            const float value = tile[r][i] + (bias ? bias[i] : 0.0f);
            to[i] = adds ? to[i] + value : value;
        }
    }
}

/* Parts of a product: enough to be balanced, each some microseconds of reading weights. */
INLINE int64_t panel_grain(int64_t num_panels, int64_t num_threads) {
    const int64_t grain = num_panels / (PARTS_PER_THREAD * num_threads);
    return grain > 1 ? grain : 1;
}

/* The panel that this worker is likely to be at after panel `p` of the part [begin, end): behind the part, the
 * others have one each first. `p` itself where there is none. */
INLINE int64_t likely_next(int64_t p, int64_t begin, int64_t end, int64_t count, int64_t num_threads) {
    const int64_t next = p + 1 < end ? p + 1 : end + (num_threads - 1) * (end - begin);
    return next < count ? next : p;
}

typedef struct {
    const Rows *rows;
    int64_t num_rows;
    const uint8_t *weights;
    int64_t panel_bytes; /* between the beginnings of two panels */
    const float *bias;   /* or NULL */
    int adds;
    float *out;
    int64_t num_outputs, num_threads;
} Product;

INLINE int64_t panels_of(const Product *x) { return (x->num_outputs + PANEL - 1) / PANEL; }

static void multiply_panels(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Product *x = job;
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const int64_t start = p * PANEL, left = x->num_outputs - start, width = left < PANEL ? left : PANEL;
        const int64_t next = likely_next(p, begin, end, panels_of(x), x->num_threads);
        Ahead ahead = fetch_ahead(x->weights + next * x->panel_bytes, x->num_rows);
        float tile[TILE_ROWS][PANEL];
        for (int64_t row = 0; row < x->num_rows;) {
            const int count = tile_size(x->num_rows, row);
            multiply_panel(count, x->weights + p * x->panel_bytes, &ahead, x->rows, row, tile);
            store_tile(count, tile, width, x->bias ? x->bias + start : 0, x->adds,
                       x->out + row * x->num_outputs + start, x->num_outputs);
            row += count;
        }
    }
}

/* out (+)= rows * weights + bias. */
static void multiply(const Product *product) {
    const int64_t panels = panels_of(product), num_threads = product->num_threads;
    pool_run(multiply_panels, product, panels, panel_grain(panels, num_threads), num_threads);
}

/* gates[i] = silu(gates[i]) * ups[i], with silu(x) = x / (1 + exp(-x)). */
INLINE void gate(const float *gates, const float *ups, float *out) {
    for (int i = 0; i < PANEL; i += LANES) {
        const vf x = vload(gates + i), one = vset(1.0f);
        const vf silu = vdiv(x, vadd(one, vexp(vsub(vset(0.0f), x))));
        vstore(out + i, vmul(silu, vload(ups + i)));
    }
}

/* A product whose panels are of gates and ups in turn. */
static void multiply_gated_panels(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Product *x = job;
    (void)worker;
    for (int64_t p = begin; p < end; p++) {
        const uint8_t *weights = x->weights + 2 * p * x->panel_bytes;
        const int64_t next = likely_next(p, begin, end, panels_of(x), x->num_threads);
        Ahead ahead = fetch_ahead(x->weights + 2 * next * x->panel_bytes, x->num_rows);
        float gates[TILE_ROWS][PANEL], ups[TILE_ROWS][PANEL];
        for (int64_t row = 0; row < x->num_rows;) {
            const int count = tile_size(x->num_rows, row);
            multiply_panel(count, weights, &ahead, x->rows, row, gates);
            multiply_panel(count, weights + x->panel_bytes, &ahead, x->rows, row, ups);
            for (int r = 0; r < count; r++)
                gate(gates[r], ups[r], x->out + (row + r) * x->num_outputs + p * PANEL);
            row += count;
        }
    }
}

/* out = silu(rows * gates) * (rows * ups), (num_rows, num_outputs). */
static void multiply_gated(const Product *product) {
    const int64_t pairs = panels_of(product), num_threads = product->num_threads;
    pool_run(multiply_gated_panels, product, pairs, panel_grain(pairs, num_threads), num_threads);
}

typedef struct {
    const Rows *rows;
    const float *values, *norm; /* `norm` NULL: rounded as they are */
    float epsilon;
} Rounding;

static void quantise_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Rounding *x = job;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        quantise_row(x->rows, row, x->values + row * x->rows->num_groups * GROUP, x->norm, x->epsilon);
}

/* Rounds rows. A row alone is quicker done than handed over. */
static void quantise(const Rows *rows, int64_t num_rows, const float *values, const float *norm, float epsilon,
                     int64_t num_threads) {
    const Rounding rounding = {rows, values, norm, epsilon};
    const int64_t grain = (ROUNDED_GROUPS + rows->num_groups - 1) / rows->num_groups;
    pool_run(quantise_rows, &rounding, num_rows, grain, num_threads);
}

/* out (num_rows, num_outputs) = norm(values) (num_rows, width) * weights + bias (num_outputs, or NULL).
 * `norm` NULL: values as they are. `panel_bytes` lie between the beginnings of two panels. */
EXPORT(void, int8_linear)
(const float *values, int64_t num_rows, int64_t width, const float *norm, float epsilon, const uint8_t *weights,
 int64_t panel_bytes, const float *bias, float *out, int64_t num_outputs, uint8_t *scratch, int64_t num_threads) {
    const Rows rows = rows_at(&scratch, num_rows, width);
    const Product product = {&rows, num_rows, weights, panel_bytes, bias, 0, out, num_outputs, num_threads};
    quantise(&rows, num_rows, values, norm, epsilon, num_threads);
    multiply(&product);
}

/* Rotates one head in place: pairs (i, i + half) by the angles of its row (Su et al. 2021). */
INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

typedef struct {
    float *out;
    const float *cosines, *sines;
    int64_t head_dim, num_rotated, num_heads;
} Rotation;

static void rotate_rows(const void *job, int64_t begin, int64_t end, int64_t worker) {
    const Rotation *x = job;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        for (int64_t head = 0; head < x->num_rotated; head++)
            rotate(x->out + (row * x->num_heads + head) * x->head_dim, x->cosines + row * x->head_dim,
                   x->sines + row * x->head_dim, x->head_dim / 2);
}

/* out (num_rows, heads of q, k and v) = norm(hidden) * weights + bias, the heads of q and k rotated.
 * `cosines` and `sines` are (num_rows, head_dim). */
EXPORT(void, int8_before_attention)
(const float *hidden, int64_t num_rows, int64_t width, const float *norm, float epsilon, const uint8_t *weights,
 const float *bias, const float *cosines, const float *sines, int64_t head_dim, int64_t num_rotated,
 int64_t num_heads, float *out, uint8_t *scratch, int64_t num_threads) {
    const Rows rows = rows_at(&scratch, num_rows, width);
    const int64_t panel_bytes = rows.num_groups * BLOCK_BYTES;
    const Product product = {&rows, num_rows, weights, panel_bytes, bias, 0, out, num_heads * head_dim, num_threads};
    const Rotation rotation = {out, cosines, sines, head_dim, num_rotated, num_heads};
    quantise(&rows, num_rows, hidden, norm, epsilon, num_threads);
    multiply(&product);
    pool_run(rotate_rows, &rotation, num_rows, ROTATED_ROWS, num_threads);
}

/* hidden += attended * output; then hidden += (silu(n * gates) * (n * ups)) * down, n = norm(hidden). */
EXPORT(void, int8_after_attention)
(float *hidden, int64_t num_rows, int64_t width, const float *attended, int64_t attended_width,
 const uint8_t *output, const float *output_bias, const float *norm, float epsilon, const uint8_t *gates_ups,
 const uint8_t *down, int64_t inner_width, uint8_t *scratch, int64_t num_threads) {
    const Rows first = rows_at(&scratch, num_rows, attended_width);
    const Rows second = rows_at(&scratch, num_rows, width);
    const Rows third = rows_at(&scratch, num_rows, inner_width);
    float *inner = (float *)scratch;
    const int64_t first_bytes = first.num_groups * BLOCK_BYTES, second_bytes = second.num_groups * BLOCK_BYTES;
    const int64_t third_bytes = third.num_groups * BLOCK_BYTES;
    const Product outputs = {&first, num_rows, output, first_bytes, output_bias, 1, hidden, width, num_threads};
    const Product gated = {&second, num_rows, gates_ups, second_bytes, 0, 0, inner, inner_width, num_threads};
    const Product downs = {&third, num_rows, down, third_bytes, 0, 1, hidden, width, num_threads};
    quantise(&first, num_rows, attended, 0, 0.0f, num_threads);
    multiply(&outputs);
    quantise(&second, num_rows, hidden, norm, epsilon, num_threads);
    multiply_gated(&gated);
    quantise(&third, num_rows, inner, 0, 0.0f, num_threads);
    multiply(&downs);
}
