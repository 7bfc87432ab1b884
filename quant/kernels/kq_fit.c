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

void kq_histogram(const uint8_t *packed, int n, int scale, const float *importance, kq_hist *h) {
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

enum { LEVELS = 7 };
static const uint8_t magnitudes[LEVELS] = {1, 2, 3, 4, 6, 8, 12};

/* The levels in the order in which they cross to their next quant as 1 / d grows, up to quant 8, 16 or 128. */
static uint8_t order_8[LEVELS * 8], order_16[LEVELS * 16], order_128[LEVELS * 128];

static void sort_crossings(int limit, uint8_t *order) {
    int next[LEVELS] = {0};
    for (int i = 0; i < LEVELS * limit; ++i) {
        int first = -1;
        for (int l = 0; l < LEVELS; ++l) {
            if (next[l] == limit) continue;
            /* Level t crosses from k to k + 1 at (k + 1/2) / t. */
            if (first < 0 || (2 * next[l] + 1) * magnitudes[first] < (2 * next[first] + 1) * magnitudes[l]) first = l;
        }
        order[i] = (uint8_t)first;
        ++next[first];
    }
}

/* When the library is loaded, so that no call from several threads can meet a half-built table. */
__attribute__((constructor)) static void sort_all_crossings(void) {
    sort_crossings(8, order_8);
    sort_crossings(16, order_16);
    sort_crossings(128, order_128);
}

/* A rounding met on the walk, as its least-squares scale and that scale's error, both in units of the levels. */
typedef struct { double d, error; } stop;

/* Walks 1 / d for one sign of d. `deep` are the weights of the levels whose quants may reach `limit`, `shallow` of
 * those that stop one before it. Returns the number of stops. */
static int walk(const double *deep, const double *shallow, double energy, int limit, const uint8_t *order,
                stop *stops) {
    int next[LEVELS] = {0}, count = 0;
    double tq = 0, qq = 0;
    for (int i = 0; i < LEVELS * limit; ++i) {
        int l = order[i], k = next[l]++;
        double w = deep[l] + (k < limit - 1 ? shallow[l] : 0);
        if (!(w > 0)) continue;
        tq += w * magnitudes[l];
        qq += w * (2 * k + 1);
        /* The slack covers the rounding of this difference: the error is a lower bound of what fp16 can reach. */
        stops[count++] = (stop){tq / qq, energy * (1 - 1e-13) - tq * tq / qq};
    }
    return count;
}

void kq_fit_scale(const kq_hist *h, int limit, kq_fit *best) {
    const uint8_t *order = limit == 8 ? order_8 : limit == 16 ? order_16 : order_128;
    double positive[LEVELS], negative[LEVELS], energy = 0, unit = h->x[1];
    for (int l = 0; l < LEVELS; ++l) {
        positive[l] = h->w[1 + l];
        negative[l] = h->w[9 + l];
        energy += (positive[l] + negative[l]) * magnitudes[l] * magnitudes[l];
    }
    best->error = DBL_MAX;
    try_lattice(h, -limit, limit - 1, 0, 0, best);
    if (unit < kq_unit(104)) {
        /* Every fp16 number is a multiple of 2^-24, and no value is beyond six of them: that lattice is the best. */
        try_lattice(h, -limit, limit - 1, 1, 0, best);
        mark_exact(h, best);
        return;
    }
    stop stops[2 * LEVELS * 128];
    int half = walk(negative, positive, energy, limit, order, stops);
    int count = half + walk(positive, negative, energy, limit, order, stops + half);

    /* Roundings whose scale is beyond fp16 are served best by its largest number. */
    double most = 65504 / unit;
    if (count && (stops[0].d > most || stops[half].d > most)) {
        try_lattice(h, -limit, limit - 1, 0x7bff, 0, best);
        try_lattice(h, -limit, limit - 1, 0xfbff, 0, best);
    }
    int first = 0;
    for (int i = 1; i < count; ++i) {
        if (stops[i].d <= most && (stops[i].error < stops[first].error || stops[first].d > most)) first = i;
    }
    for (int turn = 0; turn <= count && count; ++turn) {
        int i = turn == 0 ? first : turn - 1;
        if (stops[i].d > most || !(stops[i].error * unit * unit < best->error)) continue;
        double d = stops[i].d * unit * (i < half ? 1 : -1);
        try_lattice(h, -limit, limit - 1, kq_half_from_double(d), 0, best);
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

/* Tries the lattice m + i * d as it stands and after each of `rounds` roundings and refits. */
static void try_start(const kq_hist *h, int qmax, double d, double m, int rounds, kq_fit *best) {
    try_lattice(h, 0, qmax, kq_half_from_double(d), kq_half_from_double(m), best);
    for (int round = 0; round < rounds && d > 0; ++round) {
        double q[KQ_CODES], inverse = 1 / d;
        for (int c = 0; c < KQ_CODES; ++c) q[c] = kq_rint(kq_clamp((h->x[c] - m) * inverse, 0, qmax));
        if (!refit(h, q, &d, &m)) return;
        try_lattice(h, 0, qmax, kq_half_from_double(d), kq_half_from_double(m), best);
    }
}

static int greatest_divisor(int a, int b) {
    while (b) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

void kq_fit_scale_min(const kq_hist *h, int qmax, const double *start, kq_fit *best) {
    double unit = h->x[1], low = h->tmin * unit, range = (h->tmax - h->tmin) * unit;
    best->error = DBL_MAX;
    try_lattice(h, 0, qmax, 0, kq_half_from_double(low), best);
    /* The coarsest lattice through all levels present; a finer one would need more quants. */
    int spacing = 0;
    for (int c = 0; c < KQ_CODES; ++c) {
        if (h->present >> c & 1) spacing = greatest_divisor(kq_level[c] - h->tmin, spacing);
    }
    try_start(h, qmax, spacing * unit, low, 0, best);
    for (int step = -6; step <= 6 && best->error > 0; step += 2) {
        try_start(h, qmax, range / (qmax + 0.15 * step), low, 1, best);
    }
    if (start) try_start(h, qmax, start[0], start[1], 2, best);
    uint16_t d = best->d, m = best->m;
    for (int i = -1; i <= 1 && best->error > 0; ++i) {
        for (int j = -1; j <= 1; ++j) {
            if ((d == 0 && i < 0) || ((m & 0x7fff) == 0 && j < 0)) continue;
            if (d + i > 0x7bff || (m & 0x7fff) + j > 0x7bff) continue;
            try_lattice(h, 0, qmax, (uint16_t)(d + i), (uint16_t)(m + j), best);
        }
    }
    mark_exact(h, best);
}
