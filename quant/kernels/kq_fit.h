/* Best scale, or scale and minimum, for a block whose values are the 16 codes of MXFP4; see kq_fit.c. */
#ifndef KQ_FIT_H
#define KQ_FIT_H

#include "kq.h"

enum { KQ_CODES = 16 };

/* A block as its codes see it: value and total weight of each code. Code 8 (-0.0) is counted as code 0. */
typedef struct {
    double x[KQ_CODES];
    double w[KQ_CODES];
    uint32_t present; /* bit c: some column holds code c */
    int weighted;     /* 0: importance was given, and is zero throughout */
    int tmin, tmax;   /* smallest and largest doubled level present */
} kq_hist;

/* The choice for a block: decoded value of code c is d * q[c] + m. */
typedef struct {
    uint16_t d, m; /* fp16 bits */
    int8_t q[KQ_CODES];
    double error; /* weighted sum of squared errors */
    int exact;    /* every code present decodes to its value */
} kq_fit;

/* Histogram of `n` columns with E8M0 scale byte `scale`. Weights are counts where importance is NULL or all zero.
 * Callers lower a scale under which every nonzero value is beyond their format to the first such one: the values then
 * still saturate, and are not so large that squares of their errors drown all others. */
void kq_histogram(const uint8_t *packed, int n, int scale, const float *importance, kq_hist *h);

static inline int kq_at_most(int value, int most) {
    return value < most ? value : most;
}

/* Least error over x = d * q, -limit <= q < limit, d any fp16 of either sign; limit is 8, 16 or 128. */
void kq_fit_scale(const kq_hist *h, int limit, kq_fit *best);

/* Small error over x = d * q + m, 0 <= q <= qmax, d >= 0: the best of a family of starting lattices, refitted.
 * `start` holds the d and m of one more, or is NULL. */
void kq_fit_scale_min(const kq_hist *h, int qmax, const double *start, kq_fit *best);

/* Nearest integer, ties to even, for |v| < 2^51; independent of the rounding mode's default and of libm. */
static inline double kq_rint(double v) {
    const double shift = 6755399441055744.0; /* 1.5 * 2^52 */
    return (v + shift) - shift;
}

static inline double kq_clamp(double v, double low, double high) {
    v = v < low ? low : v;
    return v > high ? high : v;
}

/* 2^(scale - 128): the value of doubled level 1 under E8M0 byte `scale`. */
static inline double kq_unit(int scale) {
    return kq_pow2(scale - 128);
}

/* Whether fp16 bits name a number below the smallest normal one or the largest finite one: precision was lost. */
static inline int kq_half_at_end(uint16_t h) {
    uint16_t magnitude = h & 0x7fff;
    return magnitude < 0x0400 || magnitude >= 0x7bff;
}

#endif
