/* Tables of the searches, in plain C so that every instruction set reads the same ones. */
#include "kq_tables.h"

kq_affine_class kq_classes_q4_k[64], kq_classes_q2_k[64];
kq_affine_class kq_classes_q4_k_weighted[64], kq_classes_q2_k_weighted[64];
kq_signed_class kq_classes_q3_k[8];
kq_trials kq_trials_q6_k, kq_trials_q4_k, kq_trials_q3_k, kq_trials_q2_k;
uint8_t kq_pair_counts[256][16] __attribute__((aligned(64)));

/* Scales of the lanes, relative to the range spread evenly over all quants. Q4_K gains from spreading wider: where the
 * spacing is that of the levels, most of them are hit. The last lane is that spacing. */
static const double spread_q4_k[15] = {0.92,   0.9457, 0.9714, 0.9971, 1.0229, 1.0486, 1.0743, 1.1,
                                       1.1257, 1.1514, 1.1771, 1.2029, 1.2286, 1.2543, 1.28};
static const double spread_q2_k[15] = {0.6,  0.65, 0.69, 0.73, 0.77, 0.81, 0.85, 0.89,
                                       0.93, 0.97, 1.01, 1.05, 1.11, 1.25, 1.5};
/* With importance the ends of the range may not matter, and the scale may be smaller. */
static const double spread_q4_k_weighted[15] = {0.62, 0.7,   0.77, 0.83, 0.88, 0.92, 0.96, 1.0,
                                                1.035, 1.07, 1.11, 1.15, 1.19, 1.23, 1.27};
static const double spread_q2_k_weighted[15] = {0.4, 0.47, 0.54, 0.6,  0.66, 0.72, 0.78, 0.84,
                                                0.9, 0.95, 1.0,  1.06, 1.13, 1.25, 1.5};

/* The same for Q3_K, relative to the largest magnitude on quant 4. */
static const double spread_q3_k[16] = {0.5,  0.6,  0.7,  0.77, 0.83, 0.88, 0.92, 0.95,
                                       0.98, 1.01, 1.05, 1.1, 1.18, 1.27, 1.34, 2.0};

static double nearest(double v, int low, int high) {
    if (v <= low) return low;
    if (v >= high) return high;
    return (double)(int)(v - low + 0.5) + low;
}

static uint8_t cost_of(double miss) {
    double cost = 200 * miss * miss + 0.5;
    return (uint8_t)(cost > 255 ? 255 : cost);
}

/* The spacing of the levels: what hits them all if they lie within `top` steps. A little more than 15 of them are
 * worth a clipped end, still more every other level. */
static double level_spacing(double range, int top) {
    if (range <= 0) return 1;
    if (range <= top) return 1.0 / (int)(top / range);
    if (top == 15) return range <= 18 ? 1 : 2;
    return 1.01 * range / top;
}

static void fill_affine(int negative, int positive, int top, const double *spread, kq_affine_class *out) {
    double low = -kq_level[negative], range = kq_level[positive] - low;
    for (int lane = 0; lane < 16; ++lane) {
        double scale = lane < 15 && range > 0 ? range / top * spread[lane] : level_spacing(range, top);
        /* Minima from "lowest value on quant 0" to "highest on the last quant", and almost half a step beyond. */
        double slack = top * scale - range, margin = 0.45 * scale;
        double first = (slack < 0 ? slack : 0) - margin - low, last = (slack > 0 ? slack : 0) + margin - low;
        double step = (last - first) / (KQ_MINIMA - 1);
        out->inverse[lane] = (float)(1 / scale);
        out->first[lane] = (float)first;
        out->step[lane] = (float)step;
        for (int i = 0; i < KQ_MINIMA; ++i) {
            double minimum = first + i * step > 0 ? first + i * step : 0;
            for (int c = 0; c < 16; ++c) {
                double v = (kq_level[c] + minimum) / scale;
                out->cost[i][c / 4][lane][c % 4] = cost_of(v - nearest(v, 0, top));
            }
        }
    }
}

static void fill_signed(int magnitude, kq_signed_class *out) {
    for (int i = 0; i < KQ_SIGNED_STEPS; ++i) {
        for (int lane = 0; lane < 16; ++lane) {
            double scale = kq_level[magnitude] / 4.0 * spread_q3_k[KQ_SIGNED_STEPS * (lane % 8) + i];
            if (lane >= 8) scale = -scale;
            out->inverse[i][lane] = (float)(1 / scale);
            for (int c = 0; c < 16; ++c) {
                double v = kq_level[c] / scale;
                out->cost[i][c / 4][lane][c % 4] = cost_of(v - nearest(v, -4, 3));
            }
        }
    }
}

/* `count` trials whose factors run from first to last over `top`, each the same multiple of the one before. That
 * multiple is found by bisection, for want of a power function that every libm computes alike. Where the steps of fp16
 * are coarse, the upper half reaches for the next one. */
static void fill_series(double first, double last, int top, int from, int count, kq_series *out) {
    double low = 1, high = 2;
    for (int round = 0; round < 60; ++round) {
        double multiple = (low + high) / 2, value = first;
        for (int i = 1; i < count; ++i) value *= multiple;
        if (value < last) low = multiple;
        else high = multiple;
    }
    double value = first;
    for (int i = 0; i < count; ++i, value *= low) {
        out->factor[from + i] = (float)(value / top);
        out->lift[from + i] = i < count / 2 ? 0 : 0.5f;
    }
}

__attribute__((constructor)) static void fill_tables(void) {
    for (int i = 0; i < 64; ++i) {
        fill_affine(i / 8, i % 8, 15, spread_q4_k, &kq_classes_q4_k[i]);
        fill_affine(i / 8, i % 8, 15, spread_q4_k_weighted, &kq_classes_q4_k_weighted[i]);
        fill_affine(i / 8, i % 8, 3, spread_q2_k, &kq_classes_q2_k[i]);
        fill_affine(i / 8, i % 8, 3, spread_q2_k_weighted, &kq_classes_q2_k_weighted[i]);
    }
    for (int i = 1; i < 8; ++i) fill_signed(i, &kq_classes_q3_k[i]);
    for (int b = 0; b < 256; ++b) {
        kq_pair_counts[b][(b & 15) == 8 ? 0 : b & 15] += 1;
        kq_pair_counts[b][b >> 4 == 8 ? 0 : b >> 4] += 1;
    }
    fill_series(0.98, 1.35, 63, 0, 32, &kq_trials_q4_k.scales);
    fill_series(0.98, 1.3, 63, 0, 16, &kq_trials_q4_k.minima);
    fill_series(0.85, 1.35, 15, 0, 32, &kq_trials_q2_k.scales);
    fill_series(0.85, 1.3, 15, 0, 16, &kq_trials_q2_k.minima);
    /* Both signs: the largest scale near index -32, or near 31. */
    fill_series(0.95, 1.3, -32, 0, 16, &kq_trials_q3_k.scales);
    fill_series(0.95, 1.3, 31, 16, 16, &kq_trials_q3_k.scales);
    fill_series(0.99, 1.08, -128, 0, 16, &kq_trials_q6_k.scales);
    fill_series(0.99, 1.08, 127, 16, 16, &kq_trials_q6_k.scales);
}
