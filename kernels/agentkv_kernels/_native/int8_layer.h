/* The two halves of a decoder layer, and attention between them, for whoever computes whole layers. */
#ifndef AGENTKV_INT8_LAYER_H
#define AGENTKV_INT8_LAYER_H

#include "attention.h"
#include "native.h"

/* See `int8_layer.c`. */
EXPORT(void, int8_before_attention)
(const float *hidden, int64_t num_rows, int64_t width, const float *norm, float epsilon, const uint8_t *weights,
 const float *bias, const float *cosines, const float *sines, int64_t head_dim, int64_t num_rotated,
 int64_t num_heads, float *out, uint8_t *scratch, int64_t num_threads);

EXPORT(void, int8_after_attention)
(float *hidden, int64_t num_rows, int64_t width, const float *attended, int64_t attended_width,
 const uint8_t *output, const float *output_bias, const float *norm, float epsilon, const uint8_t *gates_ups,
 const uint8_t *down, int64_t inner_width, uint8_t *scratch, int64_t num_threads);

/* See `attention.c`. */
EXPORT(void, attend)(const Layer *x, int64_t *lowest, int64_t *highest);

#endif
