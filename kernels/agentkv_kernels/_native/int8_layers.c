/* Decoder layers that follow each other, in one call: whoever called holds no lock meanwhile, and pays
 * for crossing the languages once in a step. */
#include "int8_layer.h"

/* What differs from layer to layer; filled by `int8_layers.py`, field by field in this order. */
typedef struct {
    const float *first_norm, *input_bias, *output_bias, *second_norm; /* biases: or NULL */
    const uint8_t *inputs, *output, *gates_ups, *down;
    char *k_cache, *v_cache;
    float *k_scales, *v_scales; /* or NULL */
    double first_epsilon, second_epsilon;
} Decoder;

/* hidden (num_rows, width) passes through all decoders. `attention` says everything of their attention
 * but the caches: its query, key and value are consecutive heads of one array of float, (num_rows,
 * heads of q, k and v, head_dim), which is overwritten, as is its `out`. Ends after the first decoder's
 * attention where the slots lie outside the pool, as `attend` does. */
EXPORT(void, int8_layers)
(const Decoder *decoders, int64_t num_decoders, const Layer *attention, int64_t num_rows, int64_t width,
 int64_t inner_width, const float *cosines, const float *sines, float *hidden, uint8_t *scratch,
 int64_t *lowest, int64_t *highest) {
    const int64_t num_slots = attention->num_blocks * attention->schedule->block_size;
    const int64_t num_kv_heads = attention->num_kv_heads, group = attention->group;
    const int64_t head_dim = attention->head_dim, num_threads = attention->num_threads;
    Layer layer = *attention;
    for (const Decoder *x = decoders; x < decoders + num_decoders; x++) {
        layer.k_cache = x->k_cache, layer.v_cache = x->v_cache;
        layer.k_scales = x->k_scales, layer.v_scales = x->v_scales;
        AGENTKV_NAME(int8_before_attention, LEVEL)
        (hidden, num_rows, width, x->first_norm, (float)x->first_epsilon, x->inputs, x->input_bias, cosines,
         sines, head_dim, num_kv_heads * (group + 1), num_kv_heads * (group + 2), (float *)layer.query, scratch,
         num_threads);
        AGENTKV_NAME(attend, LEVEL)(&layer, lowest, highest);
        if (*lowest < -1 || *highest >= num_slots) return;
        AGENTKV_NAME(int8_after_attention, LEVEL)
        (hidden, num_rows, width, layer.out, num_kv_heads * group * head_dim, x->output, x->output_bias,
         x->second_norm, (float)x->second_epsilon, x->gates_ups, x->down, inner_width, scratch, num_threads);
    }
}
