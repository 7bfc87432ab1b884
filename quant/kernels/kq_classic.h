/* The scale searches that ggml's own encoders use, for blocks that no exact representation fits; see kq_classic.c. */
#ifndef KQ_CLASSIC_H
#define KQ_CLASSIC_H

#include <stdint.h>

/* Scale for x = scale * q, -levels <= q < levels. Weights w, or x * x where w is NULL. The q are returned too, unless
 * the pointer is NULL. */
float kq_classic_scale(int n, int levels, const float *x, const float *w, int8_t *q);

/* The same with weights x * x, by changing one q after the other: the search of Q3_K without importance. */
float kq_classic_scale_stepwise(int n, int levels, const float *x);

/* Scale for x = scale * q - minimum, 0 <= q <= top, minimum >= 0, n <= 32. Lattices with
 * first + i * step + top quants over the range, i = 0..steps, are tried. The measure is the sum of squares, or of
 * magnitudes. */
float kq_classic_scale_min(int n, int top, const float *x, const float *w, float first, float step, int steps,
                           int magnitudes, float *minimum);

/* Scale for x = scale * q, 0 <= q <= top, x >= 0; the q are returned too. */
float kq_classic_positive(int n, int top, const float *x, const float *w, uint8_t *q);

#endif
