/* MXFP4 to Q5_K: 256 weights d * sc[i] * q - dmin * m[i], two 6-bit numbers for 32 weights, 0 <= q <= 31.
 *
 * A sub-block of 32 is an MXFP4 block with one scale byte s. With d = 2^(x - 128), dmin = 12 d and sc = m = 2^k,
 * k = s - x = 0..5, q = t + 12 lies in 0..24. So a super-block is exact where the bytes spread over at most 5 and d and
 * 12 d are fp16 numbers (x in 104..140, and x is lowered to 140 for larger bytes).
 *
 * Blocks of zeros have any exponent, and a block whose levels share a factor of two, or are small, has several: all
 * combinations are considered before a super-block is called inexact. What then remains is fitted.
 */
#include "kq_classic.h"
#include "kq_rows.h"
#include "kq_exact.h"
#include "kq_fit.h"

#include <float.h>
#include <math.h>

enum { SUBS = 8, QMAX = 31, SCALE_MAX = 63, SATURATED = 128 + 28 /* 2^28 exceeds 65504 * 63 * 31 */ };

typedef struct {
    uint16_t d, dmin;
    uint8_t scales[SUBS], mins[SUBS];
    uint8_t quants[KQ_SUPER];
} plan;

static void pack(const plan *p, kq_block_q5_k *out) {
    out->d = p->d;
    out->dmin = p->dmin;
    for (int i = 0; i < 4; ++i) {
        out->scales[i] = (uint8_t)(p->scales[i] | p->scales[i + 4] >> 4 << 6);
        out->scales[i + 4] = (uint8_t)(p->mins[i] | p->mins[i + 4] >> 4 << 6);
        out->scales[i + 8] = (uint8_t)((p->scales[i + 4] & 15) | p->mins[i + 4] << 4);
    }
    memset(out->qh, 0, sizeof out->qh);
    for (int pair = 0; pair < 4; ++pair) {
        const uint8_t *q = p->quants + 64 * pair;
        for (int i = 0; i < 32; ++i) {
            out->qs[32 * pair + i] = (uint8_t)((q[i] & 15) | q[i + 32] << 4);
            out->qh[i] |= (uint8_t)((q[i] >> 4 | q[i + 32] >> 4 << 1) << 2 * pair);
        }
    }
}

static void place(const uint8_t *packed, int i, const uint8_t *q, plan *p) {
    for (int j = 0; j < 16; ++j) {
        uint8_t pair = packed[16 * i + j];
        p->quants[32 * i + 2 * j] = q[pair & 15];
        p->quants[32 * i + 2 * j + 1] = q[pair >> 4];
    }
}

/* Sub-block `i` exactly, as q = t * 2^(s - y) + 12 with scale and minimum 2^(y - x). */
static void place_exact(const uint8_t *packed, int i, int s, int y, int x, plan *p) {
    uint8_t q[KQ_CODES];
    for (int c = 0; c < KQ_CODES; ++c) {
        q[c] = (uint8_t)(12 + (y > s ? kq_level[c] / (1 << (y - s)) : kq_level[c] * (1 << (s - y))));
    }
    p->scales[i] = p->mins[i] = (uint8_t)(1 << (y - x));
    place(packed, i, q, p);
}

static void set_base(int x, plan *p) {
    p->d = kq_half_pow2(x - 128);
    p->dmin = kq_half_from_double(12 * kq_unit(x));
}

/* The rule for a spread of at most 5; nothing but the scale bytes decides. */
static int plain(const uint8_t *packed, const uint8_t *scales, plan *p) {
    int low = 255, high = 0;
    for (int i = 0; i < SUBS; ++i) {
        low = scales[i] < low ? scales[i] : low;
        high = scales[i] > high ? scales[i] : high;
    }
    int x = low > KQ_Q5_K_TOP ? KQ_Q5_K_TOP : low;
    if (x < KQ_BOTTOM || high - x > KQ_Q5_K_STEPS) return 0;
    set_base(x, p);
    for (int i = 0; i < SUBS; ++i) place_exact(packed, i, scales[i], scales[i], x, p);
    return 1;
}

/* Exponents y that hold a sub-block exactly: first..last; a sub-block of zeros has no limits. */
typedef struct { int first, last; } span;

static span exact_span(const kq_hist *h, int s) {
    if (h->tmin == 0 && h->tmax == 0) return (span){-1000, 1000};
    span result = {s, s};
    int used = 0;
    for (int c = 0; c < KQ_CODES; ++c) used |= h->present >> c & 1 ? kq_level[c] : 0;
    while (!(used >> (result.last - s) & 1)) ++result.last;
    while (h->tmax * (1 << (s - result.first + 1)) <= QMAX - 12 && -h->tmin * (1 << (s - result.first + 1)) <= 12) {
        --result.first;
    }
    return result;
}

/* Any power-of-two representation; sets *first and *last to the base exponents that the spread allows. */
static int exact(const uint8_t *packed, const uint8_t *scales, const kq_hist *hists, plan *p, int *first, int *last) {
    span spans[SUBS];
    *first = -1000;
    *last = 1000;
    for (int i = 0; i < SUBS; ++i) {
        spans[i] = exact_span(&hists[i], scales[i]);
        *first = spans[i].first - KQ_Q5_K_STEPS > *first ? spans[i].first - KQ_Q5_K_STEPS : *first;
        *last = spans[i].last < *last ? spans[i].last : *last;
    }
    if (*last == 1000) {
        memset(p, 0, sizeof *p);
        return 1;
    }
    int x = *last < KQ_Q5_K_TOP ? *last : KQ_Q5_K_TOP;
    if (x < *first || x < KQ_BOTTOM) return 0;
    set_base(x, p);
    for (int i = 0; i < SUBS; ++i) {
        int any = spans[i].last == 1000, s = any ? x : scales[i], y = s;
        y = y < x ? x : y > x + KQ_Q5_K_STEPS ? x + KQ_Q5_K_STEPS : y;
        place_exact(packed, i, s, y, x, p);
    }
    return 1;
}

/* A lattice for a sub-block: x = a * q - o. */
typedef struct { double d, dmin; } factors;
typedef struct { int scale, min; double error; } choice;

/* A sub-block to be fitted: its codes with weight. */
typedef struct {
    double x[KQ_CODES], w[KQ_CODES];
    int n, weighted;
    double low, high, unit;
} sub_block;

static void gather(const kq_hist *h, int s, sub_block *sub) {
    sub->n = 0;
    sub->weighted = h->weighted;
    sub->low = sub->high = 0;
    sub->unit = kq_unit(s);
    for (int c = 0; c < KQ_CODES; ++c) {
        if (!(h->w[c] > 0)) continue;
        double x = h->x[c];
        sub->low = sub->n && sub->low < x ? sub->low : x;
        sub->high = sub->n && sub->high > x ? sub->high : x;
        sub->x[sub->n] = x;
        sub->w[sub->n++] = h->w[c];
    }
}

static void try_choice(const sub_block *sub, factors f, int scale, int min, choice *best) {
    double a = f.d * scale, o = f.dmin * min, inverse = a > 0 ? 1 / a : 0, error = 0;
    for (int i = 0; i < sub->n; ++i) {
        double diff = sub->x[i] - (a * kq_rint(kq_clamp((sub->x[i] + o) * inverse, 0, QMAX)) - o);
        error += sub->w[i] * (diff * diff);
    }
    if (error < best->error) *best = (choice){scale, min, error};
}

static int clamp_index(double value) {
    return (int)kq_clamp(value, 0, SCALE_MAX);
}

/* Minima worth trying for a scale: those that put the lowest value near quant 0 or the highest near quant 31. */
static void try_scale(const sub_block *sub, factors f, int scale, choice *best) {
    double a = f.d * scale, bottom = -sub->low, ceiling = QMAX * a - sub->high;
    double first = (bottom < ceiling ? bottom : ceiling) - 1.5 * a;
    int from = f.dmin > 0 ? clamp_index(first / f.dmin) : 0;
    int to = f.dmin > 0 ? clamp_index((bottom + 1.5 * a) / f.dmin + 1) : 0;
    for (int min = from; min <= to && best->error > 0; ++min) try_choice(sub, f, scale, min, best);
}

/* Best scale and minimum on a lattice: the levels' own spacing, or the range spread over 12..40 quants, or no scale. */
static choice lattice_choice(const sub_block *sub, factors f) {
    choice best = {0, 0, DBL_MAX};
    double bottom = -sub->low, range = sub->high - (sub->low < 0 ? sub->low : 0);
    try_choice(sub, f, 0, 0, &best);
    if (f.dmin > 0) {
        int near = clamp_index(bottom / f.dmin);
        try_choice(sub, f, 0, near, &best);
        try_choice(sub, f, 0, near < SCALE_MAX ? near + 1 : near, &best);
    }
    if (!(f.d > 0 && range > 0)) return best;
    for (int j = 0; j <= 3 && best.error > 0; ++j) {
        double scale = sub->unit * kq_pow2(j) / f.d;
        if (scale < 1 || scale > SCALE_MAX || scale != kq_rint(scale)) continue;
        try_choice(sub, f, (int)scale, (int)scale, &best);
        try_scale(sub, f, (int)scale, &best);
    }
    int from = (int)kq_clamp(range / (40 * f.d), 1, SCALE_MAX);
    int to = (int)kq_clamp(range / (12 * f.d) + 1, 1, SCALE_MAX);
    for (int scale = from; scale <= to && best.error > 0; ++scale) try_scale(sub, f, scale, &best);
    return best;
}

/* Best scale and minimum near given ones. */
static choice nearby_choice(const sub_block *sub, factors f, choice near) {
    choice best = {0, 0, DBL_MAX};
    for (int scale = near.scale - 1; scale <= near.scale + 1; ++scale) {
        for (int min = near.min - 1; min <= near.min + 1; ++min) {
            if (scale < 0 || scale > SCALE_MAX || min < 0 || min > SCALE_MAX) continue;
            try_choice(sub, f, scale, min, &best);
        }
    }
    return best;
}

/* Tries factors with scales and minima chosen for them, near `near` where that is given. A sub-block without weight
 * follows but does not count. */
static void try_factors(const sub_block *subs, factors f, const choice *near, double *best, plan *p) {
    uint16_t d = kq_half_from_double(f.d), dmin = kq_half_from_double(f.dmin);
    f = (factors){kq_half_to_double(d), kq_half_to_double(dmin)};
    choice chosen[SUBS];
    double total = 0;
    for (int i = 0; i < SUBS && total < *best; ++i) {
        chosen[i] = near ? nearby_choice(&subs[i], f, near[i]) : lattice_choice(&subs[i], f);
        if (subs[i].weighted) total += chosen[i].error;
    }
    if (!(total < *best)) return;
    *best = total;
    p->d = d;
    p->dmin = dmin;
    for (int i = 0; i < SUBS; ++i) {
        p->scales[i] = (uint8_t)chosen[i].scale;
        p->mins[i] = (uint8_t)chosen[i].min;
    }
}

/* Scales and minima as ggml's encoder chooses them, and its d and dmin; zeros where it fails. */
static factors classic(const uint8_t *packed, const uint8_t *scales, const float *importance, choice *chosen) {
    float x[KQ_SUPER], w[32], found[SUBS], minima[SUBS], weight_sums[SUBS], energy = 0;
    for (int i = 0; i < KQ_SUPER; ++i) {
        uint8_t pair = packed[i / 2];
        x[i] = (float)(kq_level[i & 1 ? pair >> 4 : pair & 15] * kq_unit(scales[i / 32]));
        energy += x[i] * x[i];
    }
    float spread = 2 * energy / KQ_SUPER;
    for (int i = 0; i < SUBS; ++i) {
        const float *xs = x + 32 * i;
        float own = 0;
        for (int j = 0; j < 32; ++j) own += xs[j] * xs[j];
        float mean = sqrtf(own / 32);
        weight_sums[i] = 0;
        for (int j = 0; j < 32; ++j) {
            w[j] = importance ? importance[32 * i + j] * sqrtf(spread + xs[j] * xs[j]) : mean + fabsf(xs[j]);
            weight_sums[i] += w[j];
        }
        found[i] = importance ? kq_classic_scale_min(32, QMAX, xs, w, -0.9f, 0.05f, 36, 0, &minima[i])
                              : kq_classic_scale_min(32, QMAX, xs, w, -0.5f, 0.1f, 15, 0, &minima[i]);
    }
    uint8_t scale_index[SUBS], min_index[SUBS];
    factors f;
    if (importance) {
        f.d = kq_classic_positive(SUBS, SCALE_MAX, found, weight_sums, scale_index);
        f.dmin = kq_classic_positive(SUBS, SCALE_MAX, minima, weight_sums, min_index);
    } else {
        float largest = 0, deepest = 0;
        for (int i = 0; i < SUBS; ++i) {
            largest = found[i] > largest ? found[i] : largest;
            deepest = minima[i] > deepest ? minima[i] : deepest;
        }
        for (int i = 0; i < SUBS; ++i) {
            scale_index[i] = largest > 0 ? (uint8_t)clamp_index(kq_rint(SCALE_MAX / largest * found[i])) : 0;
            min_index[i] = deepest > 0 ? (uint8_t)clamp_index(kq_rint(SCALE_MAX / deepest * minima[i])) : 0;
        }
        f = (factors){largest / SCALE_MAX, deepest / SCALE_MAX};
    }
    for (int i = 0; i < SUBS; ++i) chosen[i] = (choice){scale_index[i], min_index[i], 0};
    return isfinite(f.d) && isfinite(f.dmin) && f.d >= 0 && f.dmin >= 0 ? f : (factors){0, 0};
}

static void fit(const kq_row *row, int64_t block, const kq_hist *hists, int first, int last, plan *p, int *is_exact) {
    const uint8_t *packed = row->packed + 128 * block, *scales = row->scales + SUBS * block;
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    sub_block subs[SUBS];
    for (int i = 0; i < SUBS; ++i) gather(&hists[i], kq_at_most(scales[i], SATURATED), &subs[i]);
    /* The lattice that still holds the largest sub-block exactly, the next finer one, the ends of fp16, ggml's. */
    double best = DBL_MAX;
    for (int x = first; x >= first - 1; --x) {
        double d = kq_unit((int)kq_clamp(x, KQ_BOTTOM, KQ_Q5_K_TOP));
        try_factors(subs, (factors){d, 12 * d}, NULL, &best, p);
    }
    if (first > KQ_Q5_K_TOP) {
        for (int d = 8192; d <= 65536; d *= 2) try_factors(subs, (factors){d, 65504}, NULL, &best, p);
    }
    if (last < KQ_BOTTOM) try_factors(subs, (factors){kq_unit(KQ_BOTTOM), kq_unit(KQ_BOTTOM)}, NULL, &best, p);
    choice near[SUBS];
    factors theirs = classic(packed, scales, importance, near);
    try_factors(subs, theirs, near, &best, p);
    *is_exact = 1;
    for (int i = 0; i < SUBS; ++i) {
        double a = kq_half_to_double(p->d) * p->scales[i], o = kq_half_to_double(p->dmin) * p->mins[i];
        uint8_t q[KQ_CODES] = {0};
        for (int c = 0; c < KQ_CODES; ++c) {
            double x = hists[i].x[c];
            if (a > 0) q[c] = (uint8_t)kq_rint(kq_clamp((x + o) / a, 0, QMAX));
            if ((hists[i].present >> c & 1) && a * q[c] - o != x) *is_exact = 0;
        }
        place(packed, i, q, p);
    }
}

void kq_q5_k_block(const kq_row *row, int64_t block) {
    const uint8_t *packed = row->packed + 128 * block, *scales = row->scales + SUBS * block;
    plan p;
    int is_exact = 1;
    if (!plain(packed, scales, &p)) {
        kq_hist hists[SUBS];
        int first, last;
        for (int i = 0; i < SUBS; ++i) {
            const float *importance = row->importance ? row->importance + KQ_SUPER * block + 32 * i : NULL;
            kq_histogram(packed + 16 * i, KQ_BLOCK, kq_at_most(scales[i], SATURATED), importance, &hists[i]);
        }
        if (!exact(packed, scales, hists, &p, &first, &last)) {
            fit(row, block, hists, first, last, &p, &is_exact);
            row->stats->clipped += !is_exact && (first > KQ_Q5_K_TOP || last < KQ_BOTTOM);
        }
    }
    row->stats->blocks += 1;
    row->stats->exact += is_exact;
    pack(&p, (kq_block_q5_k *)row->out + block);
}

static void row_scalar(const kq_row *row) {
    for (int64_t b = 0; b < row->cols / KQ_SUPER; ++b) kq_q5_k_block(row, b);
}

const kq_codec kq_codec_q5_k = {
    .type = KQ_TYPE_Q5_K,
    .block = KQ_SUPER,
    .bytes = sizeof(kq_block_q5_k),
    .row =
        {
            [KQ_SCALAR] = row_scalar,
#if KQ_X86
            [KQ_AVX2] = kq_q5_k_row_avx2,
            [KQ_AVX512] = kq_q5_k_row_avx512,
#endif
#if KQ_NEON
            [KQ_ISA_NEON] = kq_q5_k_row_neon,
#endif
        },
    .float_row =
        {
            [KQ_SCALAR] = kq_q5_k_floats,
#if KQ_X86
            [KQ_AVX2] = kq_q5_k_floats_avx2,
            [KQ_AVX512] = kq_q5_k_floats_avx512,
#endif
        },
};
