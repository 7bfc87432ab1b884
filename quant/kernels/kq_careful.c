/* ggml's choice of indices for a super-block, measured against another one as a decoder would see both.
 *
 * The fast searches rank roundings in single precision and keep two of them. On weights like those of a model they beat
 * ggml's encoder in every super-block; where few levels, far apart exponents or extreme importance make the error
 * nearly zero or leave it to one sub-block, luck may decide, and this file sees to it that it is never ggml's.
 * Plain C, shared by all instruction sets.
 */
#include "kq_careful.h"

#include "kq_classic.h"
#include "kq_fit.h"

#include <math.h>

/* A format: `subs` sub-blocks, quants low..top, scales (and minima) up to index_top. */
typedef struct { int subs, low, top, index_top, signed_scales; } format;

static format format_of(int type) {
    switch (type) {
    case KQ_TYPE_Q4_K:
        return (format){8, 0, 15, 63, 0};
    case KQ_TYPE_Q3_K:
        return (format){16, -4, 3, 31, 1};
    default:
        return (format){16, 0, 3, 15, 0};
    }
}

/* Values of the columns, and the weight of each code in each sub-block. */
typedef struct {
    float x[KQ_SUPER];
    double weights[16][16];
    double units[16];
} super;

static void read_super(const kq_row *row, int64_t block, format f, super *out) {
    const uint8_t *packed = row->packed + KQ_SUPER / 2 * block, *scales = row->scales + KQ_SUPER / KQ_BLOCK * block;
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    int size = KQ_SUPER / f.subs;
    memset(out->weights, 0, sizeof out->weights);
    for (int i = 0; i < KQ_SUPER; ++i) {
        int code = i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
        double unit = kq_unit(scales[i / KQ_BLOCK]);
        out->x[i] = (float)(kq_level[code] * unit);
        out->units[i / size] = unit;
        out->weights[i / size][code] += importance ? (double)importance[i] : 1;
    }
}

static double decoded_error(const super *s, format f, const kq_indices *c) {
    double total = 0;
    for (int j = 0; j < f.subs; ++j) {
        float scale = (float)kq_half_to_double(c->d) * (float)c->scales[j];
        float minimum = (float)kq_half_to_double(c->dmin) * (float)c->minima[j];
        double inverse = scale != 0 ? 1.0 / scale : 0;
        for (int code = 0; code < 16; ++code) {
            if (!(s->weights[j][code] > 0)) continue;
            double x = kq_level[code] * s->units[j];
            float q = (float)kq_rint(kq_clamp((x + minimum) * inverse, f.low, f.top));
            double miss = (double)(scale * q - minimum) - x;
            total += s->weights[j][code] * (miss * miss);
        }
    }
    return total;
}

static int nearest_index(float value, int low, int top) {
    return (int)kq_rint(kq_clamp(value, low, top));
}

/* Weights that ggml gives to the columns of a sub-block. */
static void classic_weights(int type, const float *x, const float *importance, int n, float spread, float *w) {
    float own = 0;
    for (int i = 0; i < n; ++i) own += x[i] * x[i];
    float mean = type == KQ_TYPE_Q4_K ? sqrtf(own / 32) : 0;
    for (int i = 0; i < n; ++i) w[i] = importance ? importance[i] * sqrtf(spread + x[i] * x[i]) : mean + fabsf(x[i]);
}

static float spread_of(int type, const float *x) {
    float energy = 0;
    for (int i = 0; i < KQ_SUPER; ++i) energy += x[i] * x[i];
    return (type == KQ_TYPE_Q2_K ? 1.0f : 2.0f) * energy / KQ_SUPER;
}

/* Squares of very large values overflow; what follows from them differs between processors. */
static int all_finite(const float *v, int n) {
    for (int i = 0; i < n; ++i) {
        if (!isfinite(v[i])) return 0;
    }
    return 1;
}

/* ggml's choice; 0 where it fails. */
static int classic_affine(int type, format f, const float *x, const float *importance, kq_indices *out) {
    float scales[16], minima[16], sums[16], d, dmin, spread = spread_of(type, x);
    int size = KQ_SUPER / f.subs, four = type == KQ_TYPE_Q4_K;
    for (int j = 0; j < f.subs; ++j) {
        const float *xs = x + size * j;
        float w[32];
        classic_weights(type, xs, importance ? importance + size * j : NULL, size, spread, w);
        sums[j] = 0;
        for (int i = 0; i < size; ++i) sums[j] += w[i];
        if (importance) scales[j] = kq_classic_scale_min(size, f.top, xs, w, -0.9f, 0.05f, 36, 0, &minima[j]);
        else if (four) scales[j] = kq_classic_scale_min(size, f.top, xs, w, -1.0f, 0.1f, 20, 0, &minima[j]);
        else scales[j] = kq_classic_scale_min(size, f.top, xs, w, -0.5f, 0.1f, 15, 1, &minima[j]);
    }
    if (!all_finite(scales, f.subs) || !all_finite(minima, f.subs) || !all_finite(sums, f.subs)) return 0;
    if (importance) {
        uint8_t index[16];
        d = kq_classic_positive(f.subs, f.index_top, scales, sums, index);
        for (int j = 0; j < f.subs; ++j) out->scales[j] = (int8_t)index[j];
        dmin = kq_classic_positive(f.subs, f.index_top, minima, sums, out->minima);
    } else {
        float most = 0, deepest = 0, top = (float)f.index_top;
        for (int j = 0; j < f.subs; ++j) {
            most = scales[j] > most ? scales[j] : most;
            deepest = minima[j] > deepest ? minima[j] : deepest;
        }
        for (int j = 0; j < f.subs; ++j) {
            out->scales[j] = (int8_t)(most > 0 ? nearest_index(top / most * scales[j], 0, f.index_top) : 0);
            out->minima[j] = (uint8_t)(deepest > 0 ? nearest_index(top / deepest * minima[j], 0, f.index_top) : 0);
        }
        d = most / top;
        dmin = deepest / top;
    }
    out->d = kq_half_from_double(d);
    out->dmin = kq_half_from_double(dmin);
    return isfinite(d) && isfinite(dmin);
}

static int classic_signed(int type, const float *x, const float *importance, kq_indices *out) {
    float scales[16], sums[16], d = 0, spread = spread_of(type, x);
    for (int j = 0; j < 16; ++j) {
        const float *xs = x + 16 * j;
        if (importance) {
            float w[16];
            classic_weights(type, xs, importance + 16 * j, 16, spread, w);
            sums[j] = 0;
            for (int i = 0; i < 16; ++i) sums[j] += w[i];
            scales[j] = kq_classic_scale(16, 4, xs, w, NULL);
        } else {
            sums[j] = 1;
            scales[j] = kq_classic_scale_stepwise(16, 4, xs);
        }
    }
    if (!all_finite(scales, 16) || !all_finite(sums, 16)) return 0;
    if (importance) {
        d = kq_classic_scale(16, 32, scales, sums, out->scales);
    } else {
        float most = 0;
        for (int j = 0; j < 16; ++j) most = fabsf(scales[j]) > fabsf(most) ? scales[j] : most;
        float inverse = most != 0 ? -32 / most : 0;
        for (int j = 0; j < 16; ++j) out->scales[j] = (int8_t)nearest_index(inverse * scales[j], -32, 31);
        d = most != 0 ? 1 / inverse : 0;
    }
    out->d = kq_half_from_double(d);
    out->dmin = 0;
    memset(out->minima, 0, sizeof out->minima);
    return isfinite(d);
}

int kq_careful(const kq_row *row, int64_t block, int type, kq_indices *best) {
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    format f = format_of(type);
    kq_indices theirs = {0};
    super s;
    read_super(row, block, f, &s);
    int valid = f.signed_scales ? classic_signed(type, s.x, importance, &theirs)
                                : classic_affine(type, f, s.x, importance, &theirs);
    if (!valid || !(decoded_error(&s, f, &theirs) < decoded_error(&s, f, best))) return 0;
    *best = theirs;
    return 1;
}
