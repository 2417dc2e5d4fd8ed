/* Matrix products of a decoder layer with 8-bit weights, and what stands between them.
 *
 * One product; a layer up to attention; a layer after it. Each is one parallel region,
 * so that a step of thirty layers starts threads sixty times and not five hundred times. Arrays are
 * row-major and dense, float unless said otherwise. `scratch` is memory of any contents: for each input of
 * a product and each row 4 bytes, and 4 more for each output of the gates; then 4096.
 */
#include "int8_panel.h"
#include "native.h"

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

/* out (+)= rows * weights + bias, inside a parallel region: panels are divided among its threads. */
INLINE void multiply(const Rows *rows, int64_t num_rows, const uint8_t *weights, int64_t panel_bytes,
                     const float *bias, int adds, float *out, int64_t num_outputs) {
    const int64_t panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t start = p * PANEL, width = num_outputs - start < PANEL ? num_outputs - start : PANEL;
        float tile[TILE_ROWS][PANEL];
        for (int64_t row = 0; row < num_rows;) {
            const int count = tile_size(num_rows, row);
            multiply_panel(count, weights + p * panel_bytes, rows, row, tile);
            store_tile(count, tile, width, bias ? bias + start : 0, adds, out + row * num_outputs + start, num_outputs);
            row += count;
        }
    }
}

/* gates[i] = silu(gates[i]) * ups[i], with silu(x) = x / (1 + exp(-x)). */
INLINE void gate(const float *gates, const float *ups, float *out) {
    for (int i = 0; i < PANEL; i += LANES) {
        const vf x = vload(gates + i), one = vset(1.0f);
        const vf silu = vdiv(x, vadd(one, vexp(vsub(vset(0.0f), x))));
        vstore(out + i, vmul(silu, vload(ups + i)));
    }
}

/* out = silu(rows * gates) * (rows * ups); panels of `weights` are of gates and ups in turn. */
INLINE void multiply_gated(const Rows *rows, int64_t num_rows, const uint8_t *weights, float *out, int64_t width) {
    const int64_t panel_bytes = rows->num_groups * BLOCK_BYTES;
#pragma omp for schedule(static)
    for (int64_t p = 0; p < width / PANEL; p++) {
        float gates[TILE_ROWS][PANEL], ups[TILE_ROWS][PANEL];
        for (int64_t row = 0; row < num_rows;) {
            const int count = tile_size(num_rows, row);
            multiply_panel(count, weights + 2 * p * panel_bytes, rows, row, gates);
            multiply_panel(count, weights + (2 * p + 1) * panel_bytes, rows, row, ups);
            for (int r = 0; r < count; r++) gate(gates[r], ups[r], out + (row + r) * width + p * PANEL);
            row += count;
        }
    }
}

/* Rounds rows, inside a parallel region. */
INLINE void quantise(const Rows *rows, int64_t num_rows, const float *values, const float *weights, float epsilon) {
    const int64_t groups = rows->num_groups;
    if (weights) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row++)
            quantise_row(rows, row, values + row * groups * GROUP, weights, epsilon);
    } else {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_rows * groups; i++)
            quantise_group(rows, i / groups, i % groups, values + i * GROUP, 1.0f, 0);
    }
}

/* out (num_rows, num_outputs) = values (num_rows, width) * weights + bias (num_outputs, or NULL).
 * `panel_bytes` lie between the beginnings of two panels. */
EXPORT(void, int8_linear)
(const float *values, int64_t num_rows, int64_t width, const uint8_t *weights, int64_t panel_bytes,
 const float *bias, float *out, int64_t num_outputs, uint8_t *scratch) {
    const Rows rows = rows_at(&scratch, num_rows, width);
#pragma omp parallel
    {
        quantise(&rows, num_rows, values, 0, 0.0f);
        multiply(&rows, num_rows, weights, panel_bytes, bias, 0, out, num_outputs);
    }
}

/* Rotates one head in place: pairs (i, i + half) by the angles of its row (Su et al. 2021). */
INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

/* out (num_rows, heads of q, k and v) = norm(hidden) * weights + bias, the heads of q and k rotated.
 * `cosines` and `sines` are (num_rows, head_dim). */
EXPORT(void, int8_before_attention)
(const float *hidden, int64_t num_rows, int64_t width, const float *norm, float epsilon, const uint8_t *weights,
 const float *bias, const float *cosines, const float *sines, int64_t head_dim, int64_t num_rotated,
 int64_t num_heads, float *out, uint8_t *scratch) {
    const Rows rows = rows_at(&scratch, num_rows, width);
#pragma omp parallel
    {
        quantise(&rows, num_rows, hidden, norm, epsilon);
        multiply(&rows, num_rows, weights, rows.num_groups * BLOCK_BYTES, bias, 0, out, num_heads * head_dim);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_rows * num_rotated; i++) {
            const int64_t row = i / num_rotated, head = i % num_rotated;
            rotate(out + (row * num_heads + head) * head_dim, cosines + row * head_dim, sines + row * head_dim,
                   head_dim / 2);
        }
    }
}

/* hidden += attended * output; then hidden += (silu(n * gates) * (n * ups)) * down, n = norm(hidden). */
EXPORT(void, int8_after_attention)
(float *hidden, int64_t num_rows, int64_t width, const float *attended, int64_t attended_width,
 const uint8_t *output, const float *output_bias, const float *norm, float epsilon, const uint8_t *gates_ups,
 const uint8_t *down, int64_t inner_width, uint8_t *scratch) {
    const Rows first = rows_at(&scratch, num_rows, attended_width);
    const Rows second = rows_at(&scratch, num_rows, width);
    const Rows third = rows_at(&scratch, num_rows, inner_width);
    float *inner = (float *)scratch;
#pragma omp parallel
    {
        quantise(&first, num_rows, attended, 0, 0.0f);
        multiply(&first, num_rows, output, first.num_groups * BLOCK_BYTES, output_bias, 1, hidden, width);
        quantise(&second, num_rows, hidden, norm, epsilon);
        multiply_gated(&second, num_rows, gates_ups, inner, inner_width);
        quantise(&third, num_rows, inner, 0, 0.0f);
        multiply(&third, num_rows, down, third.num_groups * BLOCK_BYTES, 0, 1, hidden, width);
    }
}
