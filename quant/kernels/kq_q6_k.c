/* MXFP4 to Q6_K: 256 weights d * sc[i] * q, one signed 8-bit scale for 16 weights, -32 <= q <= 31.
 *
 * With d = -2^(x - 128) and sc = -2^k, k = 0..7, a block with scale byte s = x + k has q = t, and one with s = x + 8
 * has q = 2 t, |2 t| <= 24. So a super-block is exact where the bytes spread over at most 8 and d is an fp16 number
 * (x in 104..143, and x is lowered to 143 for larger bytes). Both factors are negative because int8 reaches -128 but
 * not 128; their product is positive, so a zero decodes to +0.0.
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

enum { SUBS = 16, BLOCKS = 8, SATURATED = 128 + 29 /* 2^29 exceeds 65504 * 128 * 32 */ };

/* What a super-block will hold: quants are offset by 32. */
typedef struct {
    uint16_t d;
    int8_t scales[SUBS];
    uint8_t quants[KQ_SUPER];
} plan;

static void pack(const plan *p, kq_block_q6_k *out) {
    out->d = p->d;
    memcpy(out->scales, p->scales, SUBS);
    for (int half = 0; half < 2; ++half) {
        const uint8_t *q = p->quants + 128 * half;
        for (int i = 0; i < 32; ++i) {
            out->ql[64 * half + i] = (uint8_t)((q[i] & 15) | q[i + 64] << 4);
            out->ql[64 * half + 32 + i] = (uint8_t)((q[i + 32] & 15) | q[i + 96] << 4);
            out->qh[32 * half + i] =
                (uint8_t)(q[i] >> 4 | q[i + 32] >> 4 << 2 | q[i + 64] >> 4 << 4 | q[i + 96] >> 4 << 6);
        }
    }
}

/* Writes `n` columns from column `begin` as the quants that `q` gives their codes. */
static void place(const uint8_t *packed, int begin, int n, const int8_t *q, plan *p) {
    for (int i = begin; i < begin + n; i += 2) {
        uint8_t pair = packed[i / 2];
        p->quants[i] = (uint8_t)(q[pair & 15] + 32);
        p->quants[i + 1] = (uint8_t)(q[pair >> 4] + 32);
    }
}

/* Sub-block `i` exactly, as q = t * 2^(s - y) with scale -2^(y - x). */
static void place_exact(const uint8_t *packed, int i, int s, int y, int x, plan *p) {
    int8_t q[KQ_CODES];
    for (int c = 0; c < KQ_CODES; ++c) {
        q[c] = (int8_t)(y > s ? kq_level[c] / (1 << (y - s)) : kq_level[c] * (1 << (s - y)));
    }
    p->scales[i] = (int8_t) - (1 << (y - x));
    place(packed, 16 * i, 16, q, p);
}

/* The rule for a spread of at most 8; nothing but the scale bytes decides. */
static int plain(const uint8_t *packed, const uint8_t *scales, plan *p) {
    int low = 255, high = 0;
    for (int b = 0; b < BLOCKS; ++b) {
        low = scales[b] < low ? scales[b] : low;
        high = scales[b] > high ? scales[b] : high;
    }
    int x = low > KQ_TOP ? KQ_TOP : low;
    if (x < KQ_BOTTOM || high - x > KQ_Q6_K_STEPS + 1) return 0;
    p->d = kq_half_pow2(x - 128) | 0x8000;
    for (int i = 0; i < SUBS; ++i) {
        int s = scales[i / 2];
        int y = s - x > KQ_Q6_K_STEPS ? x + KQ_Q6_K_STEPS : s;
        place_exact(packed, i, s, y, x, p);
    }
    return 1;
}

/* Exponents y that hold a sub-block exactly: first..last; a sub-block of zeros has no limits. */
typedef struct { int first, last; } span;

static span exact_span(const uint8_t *packed, int s) {
    int used = 0, low = 0, high = 0;
    for (int i = 0; i < 8; ++i) {
        int a = kq_level[packed[i] & 15], b = kq_level[packed[i] >> 4];
        used |= a | b;
        low = a < low ? a : low;
        low = b < low ? b : low;
        high = a > high ? a : high;
        high = b > high ? b : high;
    }
    if (!used) return (span){-1000, 1000};
    span result = {s, s};
    while (!(used >> (result.last - s) & 1)) ++result.last;
    while (high << (s - result.first + 1) <= 31 && -low << (s - result.first + 1) <= 32) --result.first;
    return result;
}

/* Any power-of-two representation; sets *first and *last to the base exponents that the spread allows. */
static int exact(const uint8_t *packed, const uint8_t *scales, plan *p, int *first, int *last) {
    span spans[SUBS];
    *first = -1000;
    *last = 1000;
    for (int i = 0; i < SUBS; ++i) {
        spans[i] = exact_span(packed + 8 * i, scales[i / 2]);
        *first = spans[i].first - KQ_Q6_K_STEPS > *first ? spans[i].first - KQ_Q6_K_STEPS : *first;
        *last = spans[i].last < *last ? spans[i].last : *last;
    }
    if (*last == 1000) {
        memset(p, 0, sizeof *p);
        memset(p->quants, 32, KQ_SUPER);
        return 1;
    }
    int x = *last < KQ_TOP ? *last : KQ_TOP;
    if (x < *first || x < KQ_BOTTOM) return 0;
    p->d = kq_half_pow2(x - 128) | 0x8000;
    for (int i = 0; i < SUBS; ++i) {
        int s = scales[i / 2], y = s;
        if (spans[i].last == 1000) y = x;
        y = y < spans[i].first ? spans[i].first : y;
        y = y < x ? x : y > x + KQ_Q6_K_STEPS ? x + KQ_Q6_K_STEPS : y;
        place_exact(packed, i, spans[i].last == 1000 ? y : s, y, x, p);
    }
    return 1;
}

/* A sub-block to be fitted: its nonzero codes with weight, and what a fit of it must know. */
typedef struct {
    kq_hist hist;
    double x[KQ_CODES], w[KQ_CODES];
    int n;
    double top, unit, energy;
} sub_block;

static void gather(const uint8_t *packed, int s, const float *importance, sub_block *sub) {
    kq_histogram(packed, 16, s, importance, &sub->hist);
    sub->n = 0;
    sub->top = sub->energy = 0;
    sub->unit = kq_unit(s);
    for (int c = 1; c < KQ_CODES; ++c) {
        double w = sub->hist.w[c], x = sub->hist.x[c];
        if (!(w > 0) || c == 8) continue;
        sub->x[sub->n] = x;
        sub->w[sub->n++] = w;
        sub->top = fabs(x) > sub->top ? fabs(x) : sub->top;
        sub->energy += w * (x * x);
    }
}

static double error_at(const sub_block *sub, double a) {
    double inverse = 1 / a, error = 0;
    for (int i = 0; i < sub->n; ++i) {
        double diff = sub->x[i] - a * kq_rint(kq_clamp(sub->x[i] * inverse, -32, 31));
        error += sub->w[i] * (diff * diff);
    }
    return error;
}

typedef struct { int scale; double error; } choice;

static void try_choice(const sub_block *sub, double d, int scale, choice *best) {
    if (scale < -128 || scale > 127) return;
    double error = scale ? error_at(sub, d * scale) : sub->energy;
    if (error < best->error) *best = (choice){scale, error};
}

/* Best scale on the lattice of d < 0: the levels' own spacing, or the largest value on quants 16..40, of either sign,
 * positive products first. */
static choice lattice_choice(const sub_block *sub, double d) {
    choice best = {0, sub->energy};
    for (int j = -1; j <= 3 && best.error > 0; ++j) {
        double scale = sub->unit * kq_pow2(j) / -d;
        if (scale >= 1 && scale <= 128 && scale == kq_rint(scale)) try_choice(sub, d, -(int)scale, &best);
    }
    int from = (int)kq_clamp(sub->top / (-40 * d) - 1, 1, 128), to = (int)kq_clamp(sub->top / (-16 * d) + 1, 1, 128);
    for (int scale = from; scale <= to && best.error > 0; ++scale) {
        try_choice(sub, d, -scale, &best);
        try_choice(sub, d, scale, &best);
    }
    return best;
}

/* Best scale near a given one. */
static choice nearby_choice(const sub_block *sub, double d, int scale) {
    choice best = {0, sub->energy};
    for (int i = -2; i <= 2; ++i) try_choice(sub, d, scale + i, &best);
    return best;
}

/* Tries d with scales chosen for it, near `near` where that is given. A sub-block without weight follows but does not
 * count. */
static void try_d(const sub_block *subs, double d, const int8_t *near, double *best, plan *p) {
    uint16_t bits = kq_half_from_double(d);
    int8_t scales[SUBS];
    double total = 0;
    if ((bits & 0x7fff) == 0) return;
    d = kq_half_to_double(bits);
    for (int i = 0; i < SUBS && total < *best; ++i) {
        choice c = near ? nearby_choice(&subs[i], d, near[i]) : lattice_choice(&subs[i], d);
        scales[i] = (int8_t)c.scale;
        if (subs[i].hist.weighted) total += c.error;
    }
    if (!(total < *best)) return;
    *best = total;
    p->d = bits;
    memcpy(p->scales, scales, SUBS);
}

/* d and the scales as ggml's encoder chooses them; 0 where it fails. */
static double classic(const uint8_t *packed, const uint8_t *scales, const float *importance, int8_t *chosen) {
    float largest = 0, found[SUBS];
    for (int i = 0; i < SUBS; ++i) {
        float x[16];
        for (int j = 0; j < 16; ++j) {
            uint8_t pair = packed[8 * i + j / 2];
            x[j] = (float)(kq_level[j & 1 ? pair >> 4 : pair & 15] * kq_unit(scales[i / 2]));
        }
        float scale = kq_classic_scale(16, 32, x, importance ? importance + 16 * i : NULL, NULL);
        if (fabsf(scale) > fabsf(largest)) largest = scale;
        found[i] = scale;
    }
    if (!isfinite(largest) || largest == 0) return 0;
    float inverse = -128 / largest;
    for (int i = 0; i < SUBS; ++i) chosen[i] = (int8_t)kq_clamp(kq_rint(inverse * found[i]), -128, 127);
    return 1 / inverse;
}

static void fit(const kq_row *row, int64_t block, int first, plan *p, int *is_exact) {
    const uint8_t *packed = row->packed + 128 * block, *scales = row->scales + 8 * block;
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    sub_block subs[SUBS];
    for (int i = 0; i < SUBS; ++i) {
        gather(packed + 8 * i, kq_at_most(scales[i / 2], SATURATED), importance ? importance + 16 * i : NULL, &subs[i]);
    }
    /* The lattice that still holds the largest sub-block exactly, the next finer one, the ends of fp16, ggml's. */
    double best = DBL_MAX;
    for (int x = first; x >= first - 1; --x) {
        try_d(subs, -kq_unit((int)kq_clamp(x, KQ_BOTTOM, KQ_TOP)), NULL, &best, p);
    }
    if (first > KQ_TOP) try_d(subs, -65504, NULL, &best, p);
    int8_t near[SUBS];
    try_d(subs, classic(packed, scales, importance, near), near, &best, p);
    *is_exact = 1;
    for (int i = 0; i < SUBS; ++i) {
        double a = kq_half_to_double(p->d) * p->scales[i];
        int8_t q[KQ_CODES] = {0};
        for (int c = 0; c < KQ_CODES && a != 0; ++c) q[c] = (int8_t)kq_rint(kq_clamp(subs[i].hist.x[c] / a, -32, 31));
        for (int c = 0; c < KQ_CODES; ++c) {
            if ((subs[i].hist.present >> c & 1) && a * q[c] != subs[i].hist.x[c]) *is_exact = 0;
        }
        place(packed, 16 * i, 16, q, p);
    }
}

void kq_q6_k_block(const kq_row *row, int64_t block) {
    const uint8_t *packed = row->packed + 128 * block, *scales = row->scales + 8 * block;
    plan p;
    int first, last, is_exact = 1;
    if (!plain(packed, scales, &p) && !exact(packed, scales, &p, &first, &last)) {
        fit(row, block, first, &p, &is_exact);
        row->stats->clipped += !is_exact && (first > KQ_TOP || last < KQ_BOTTOM);
    }
    row->stats->blocks += 1;
    row->stats->exact += is_exact;
    pack(&p, (kq_block_q6_k *)row->out + block);
}

static void row_scalar(const kq_row *row) {
    for (int64_t b = 0; b < row->cols / KQ_SUPER; ++b) kq_q6_k_block(row, b);
}

const kq_codec kq_codec_q6_k = {
    .type = KQ_TYPE_Q6_K,
    .block = KQ_SUPER,
    .bytes = sizeof(kq_block_q6_k),
    .row =
        {
            [KQ_SCALAR] = row_scalar,
#if KQ_X86
            [KQ_AVX2] = kq_q6_k_row_avx2,
            [KQ_AVX512] = kq_q6_k_row_avx512,
#endif
#if KQ_NEON
            [KQ_ISA_NEON] = kq_q6_k_row_neon,
#endif
        },
    .float_row =
        {
            [KQ_SCALAR] = kq_q6_k_floats,
#if KQ_X86
            [KQ_AVX2] = kq_q6_k_floats_avx2,
            [KQ_AVX512] = kq_q6_k_floats_avx512,
#endif
        },
};
