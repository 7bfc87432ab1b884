/* Fits of a block of codes by a scale, or a scale and a minimum.
 *
 * For x = d * q the number of different roundings is small: q of a level t changes only where t / d crosses k + 1/2.
 * Walking d through these crossings meets every rounding; for each, the least-squares d is known in closed form, and
 * the fp16 nearest to it is the best fp16 for that rounding, because the error is a parabola in d. So the best of them
 * is the best of all.
 *
 * This file is plain C in double, shared by every instruction set, so that all of them choose alike.
 */
#include "kq_fit.h"

#include <float.h>
#include <math.h>

void kq_histogram(const uint8_t *packed, int n, uint8_t scale, const float *importance, kq_hist *h) {
    double counts[KQ_CODES] = {0}, weights[KQ_CODES] = {0};
    double total = 0;
    for (int i = 0; i < n / 2; ++i) {
        int low = packed[i] & 15, high = packed[i] >> 4;
        counts[low] += 1;
        counts[high] += 1;
        if (importance) {
            weights[low] += importance[2 * i];
            weights[high] += importance[2 * i + 1];
            total += (double)importance[2 * i] + importance[2 * i + 1];
        }
    }
    const double *chosen = total > 0 ? weights : counts;
    double unit = kq_unit(scale);
    h->weighted = !importance || total > 0;
    h->present = 0;
    h->tmin = 12;
    h->tmax = -12;
    for (int c = 0; c < KQ_CODES; ++c) {
        int t = kq_level[c];
        h->x[c] = t * unit;
        h->w[c] = chosen[c];
        if (counts[c] == 0) continue;
        h->present |= 1u << (c == 8 ? 0 : c);
        h->tmin = t < h->tmin ? t : h->tmin;
        h->tmax = t > h->tmax ? t : h->tmax;
    }
    h->w[0] += h->w[8];
    h->w[8] = 0;
}

/* Rounds every code to the lattice of (d, m), measures, and keeps the result if it is better. */
static void try_lattice(const kq_hist *h, double qmin, double qmax, uint16_t d_bits, uint16_t m_bits, kq_fit *best) {
    double d = kq_half_to_double(d_bits), m = kq_half_to_double(m_bits);
    double inverse = d != 0 ? 1 / d : 0;
    double q[KQ_CODES], error = 0;
    for (int c = 0; c < KQ_CODES; ++c) {
        q[c] = kq_rint(kq_clamp((h->x[c] - m) * inverse, qmin, qmax));
        double diff = h->x[c] - (d * q[c] + m);
        error += h->w[c] * (diff * diff);
    }
    if (!(error < best->error)) return;
    best->error = error;
    best->d = d_bits;
    best->m = m_bits;
    for (int c = 0; c < KQ_CODES; ++c) best->q[c] = (int8_t)q[c];
}

static void mark_exact(const kq_hist *h, kq_fit *fit) {
    double d = kq_half_to_double(fit->d), m = kq_half_to_double(fit->m);
    fit->exact = 1;
    for (int c = 0; c < KQ_CODES; ++c) {
        if ((h->present >> c & 1) && d * fit->q[c] + m != h->x[c]) fit->exact = 0;
    }
}

static const uint8_t magnitudes[7] = {1, 2, 3, 4, 6, 8, 12};

/* Whether level `a` at crossing ka + 1/2 comes before level `b` at kb + 1/2 as 1 / d grows. */
static int before(int a, int ka, int b, int kb) {
    return (2 * ka + 1) * magnitudes[b] < (2 * kb + 1) * magnitudes[a];
}

/* Sums over one rounding: w * t * q and w * q * q. */
typedef struct { double tq, qq; } kq_sums;

/* One side (sign) of the walk: weights of the levels that may reach |qmin| and of those that may only reach qmax. */
typedef struct { double deep[7], shallow[7]; kq_sums sums; } kq_side;

/* Moves level `l` from k to k + 1 on the side's lattice, within the limits of the format. */
static void cross(kq_side *side, int l, int k, int qmin, int qmax) {
    double w = (k < -qmin ? side->deep[l] : 0) + (k < qmax ? side->shallow[l] : 0);
    side->sums.tq += w * magnitudes[l];
    side->sums.qq += w * (2 * k + 1);
}

void kq_fit_scale(const kq_hist *h, int qmin, int qmax, kq_fit *best) {
    kq_side sides[2] = {{{0}, {0}, {0, 0}}, {{0}, {0}, {0, 0}}};
    double unit = h->x[1], energy = 0;
    uint8_t levels[7];
    int count = 0;
    for (int l = 0; l < 7; ++l) {
        double positive = h->w[1 + l], negative = h->w[9 + l];
        sides[0].deep[l] = sides[1].shallow[l] = negative;
        sides[0].shallow[l] = sides[1].deep[l] = positive;
        energy += (positive + negative) * magnitudes[l] * magnitudes[l];
        if (h->present >> (1 + l) & 1 || h->present >> (9 + l) & 1) levels[count++] = (uint8_t)l;
    }
    best->error = DBL_MAX;
    try_lattice(h, qmin, qmax, 0, 0, best);
    int next[7] = {0};
    for (;;) {
        int l = -1;
        for (int i = 0; i < count; ++i) {
            int candidate = levels[i];
            if (next[candidate] < -qmin && (l < 0 || before(candidate, next[candidate], l, next[l]))) l = candidate;
        }
        if (l < 0) break;
        int k = next[l]++;
        for (int s = 0; s < 2; ++s) {
            cross(&sides[s], l, k, qmin, qmax);
            kq_sums sums = sides[s].sums;
            if (!(sums.qq > 0)) continue;
            /* No fp16 scale does better than the least-squares one; the slack covers the rounding of this bound. */
            double bound = (energy * (1 - 1e-13) - sums.tq * sums.tq / sums.qq) * unit * unit;
            if (!(bound < best->error)) continue;
            double d = (s ? -1 : 1) * sums.tq / sums.qq * unit;
            try_lattice(h, qmin, qmax, kq_half_from_double(d), 0, best);
        }
    }
    mark_exact(h, best);
}

/* Least-squares (d, m) for the rounding q; 0 when all q are equal. */
static int refit(const kq_hist *h, const double *q, double *d, double *m) {
    double w = 0, wq = 0, wqq = 0, wx = 0, wqx = 0;
    for (int c = 0; c < KQ_CODES; ++c) {
        double a = h->w[c] * q[c];
        w += h->w[c];
        wq += a;
        wqq += a * q[c];
        wx += h->w[c] * h->x[c];
        wqx += a * h->x[c];
    }
    double determinant = w * wqq - wq * wq;
    if (!(determinant > 0)) return 0;
    *d = (w * wqx - wq * wx) / determinant;
    *m = (wqq * wx - wq * wqx) / determinant;
    return *d >= 0;
}

/* Tries the lattice low + i / density: as it stands, and after two rounds of rounding and refitting. */
static void try_start(const kq_hist *h, int qmax, double density, double low, kq_fit *best) {
    double d = 1 / density, m = low;
    double q[KQ_CODES];
    for (int round = 0;; ++round) {
        uint16_t d_bits = kq_half_from_double(d);
        try_lattice(h, 0, qmax, d_bits, kq_half_from_double(m), best);
        if (round == 2) return;
        for (int c = 0; c < KQ_CODES; ++c) q[c] = kq_rint(kq_clamp((h->x[c] - m) / d, 0, qmax));
        if (!refit(h, q, &d, &m) || d == 0) return;
    }
}

void kq_fit_scale_min(const kq_hist *h, int qmax, kq_fit *best) {
    double unit = h->x[1];
    double low = h->tmin * unit, range = (h->tmax - h->tmin) * unit;
    best->error = DBL_MAX;
    try_lattice(h, 0, qmax, 0, kq_half_from_double(low), best);
    if (range > 0) {
        /* Lattices that hold both ends: any block with few distinct values, or evenly spaced ones, fits one exactly. */
        for (int k = 1; k <= qmax; ++k) try_start(h, qmax, k / range, low, best);
        for (int step = -18; step <= 18; ++step) try_start(h, qmax, (qmax + 0.05 * step) / range, low, best);
        for (int step = -12; step <= 4; ++step) {
            double density = (qmax + 0.1 * step) / range;
            try_start(h, qmax, density, low - 0.3 / density, best);
            try_start(h, qmax, density, low + 0.3 / density, best);
        }
    }
    uint16_t d = best->d, m = best->m;
    for (int i = -1; i <= 1; ++i) {
        for (int j = -1; j <= 1; ++j) {
            if ((d == 0 && i < 0) || ((m & 0x7fff) == 0 && j < 0)) continue;
            if (d + i > 0x7bff || (m & 0x7fff) + j > 0x7bff) continue;
            try_lattice(h, 0, qmax, (uint16_t)(d + i), (uint16_t)(m + j), best);
        }
    }
    mark_exact(h, best);
}
