/* Rounds weights to 8 bits, into the panels that `int8_panel.h` describes, and reads some of them back. */
#include "int8_panel.h"
#include "native.h"
#include "pool.h"

/* Rounds GROUP weights of one output; bytes go to every (4 * PANEL)th place in fours. */
INLINE void pack_group(const float *weights, float *factor, uint8_t *bytes) {
    vf greatest = vset(0.0f), sum = vset(0.0f);
    for (int i = 0; i < GROUP; i += LANES) {
        const vf values = vload(weights + i);
        greatest = vmax(greatest, vabs(values));
        sum = vadd(sum, values);
    }
    const float most = vmaximum(greatest), total = vsum(sum), inverse = most > 0.0f ? 127.0f / most : 0.0f;
    *factor = most / 127.0f + (total - total); /* NaN where a weight is not finite */
    for (int i = 0; i < GROUP; i += LANES) {
        int32_t integers[LANES];
        const vi rounded = viadd(vround_int(vmul(vload(weights + i), vset(inverse))), viset(128));
        __builtin_memcpy(integers, &rounded, sizeof integers);
        for (int j = 0; j < LANES; j++) bytes[(i + j) / 4 * (4 * PANEL) + j % 4] = (uint8_t)integers[j];
    }
}

typedef struct {
    const float *weights;
    int64_t num_outputs, width;
    uint8_t *panels;
    int64_t panel_bytes;
} Packing;

static void pack_panels(const void *job, int64_t begin, int64_t end, int64_t worker) {
    static const float nothing[GROUP];
    const Packing *x = job;
    (void)worker;
    for (int64_t p = begin; p < end; p++)
        for (int64_t g = 0; g < x->width / GROUP; g++) {
            uint8_t *block = x->panels + p * x->panel_bytes + g * BLOCK_BYTES;
            for (int64_t i = 0; i < PANEL; i++) {
                const int64_t output = p * PANEL + i;
                const float *from =
                    output < x->num_outputs ? x->weights + output * x->width + g * GROUP : nothing;
                pack_group(from, (float *)block + i, block + 4 * PANEL + 4 * i);
            }
        }
}

/* weights (num_outputs, width), float, -> panels, of which the last may lack outputs: zeros stand for
 * them. `panel_bytes` lie between the beginnings of two panels. */
EXPORT(void, int8_pack)
(const float *weights, int64_t num_outputs, int64_t width, uint8_t *panels, int64_t panel_bytes,
 int64_t num_threads) {
    const Packing packing = {weights, num_outputs, width, panels, panel_bytes};
    pool_run(pack_panels, &packing, (num_outputs + PANEL - 1) / PANEL, 1, num_threads);
}

/* out (num_rows, width), float: the weights of some outputs; NaN for an output that is not there. */
EXPORT(void, int8_rows)
(const uint8_t *panels, int64_t panel_bytes, int64_t num_outputs, int64_t width, const int64_t *outputs,
 int64_t num_rows, float *out) {
    for (int64_t row = 0; row < num_rows; row++, out += width) {
        const int64_t output = outputs[row], place = output % PANEL;
        const int is_there = output >= 0 && output < num_outputs;
        const uint8_t *block = panels + output / PANEL * panel_bytes;
        for (int64_t i = 0; i < width; i += GROUP, block += BLOCK_BYTES)
            for (int64_t k = 0; k < GROUP; k++) {
                const uint8_t *byte = block + 4 * PANEL + k / 4 * (4 * PANEL) + 4 * place + k % 4;
                out[i + k] = is_there ? ((const float *)block)[place] * (float)(*byte - 128) : __builtin_nanf("");
            }
    }
}
