/* The search for formats with a scale and a minimum per sub-block: Q4_K and Q2_K. Included once per type and
 * instruction set, after these are defined: SUBS, sub-blocks of a super-block; TOP, the largest quant; INDEX_TOP, the
 * largest index of a scale or minimum; CLASSES, CLASSES_WEIGHTED and TRIALS, its tables; MOST_GROUPS, 2 if with
 * importance the range of the codes that matter has lattices of its own, else 1; SHIFTS, whether fits moved by a quant
 * are kept too.
 *
 * 1. Each sub-block: 128 starting lattices, 16 scales with 8 minima, are priced by table look-up. The best minimum of
 *    each scale gives a rounding of the codes, for which least squares gives the best real scale and minimum. The two
 *    best are kept; in Q4_K, where ranges often leave quants unused, also the best one moved by one quant. The error of
 *    other scales and minima under the same rounding is a known parabola.
 * 2. The super-block: 32 values of d are priced by these parabolas, minima left free; the best of them, with 16
 *    values of dmin each, with the minima rounded too. The best pairs, which also fix all indices, are refitted.
 * 3. The codes are rounded to the lattices found, and the error is measured.
 */
#include "kq_codes.h"
#include "kq_doubt.h"
#include "kq_fit.h"

enum { SCALE_TRIALS = 32, MIN_TRIALS = 16, RANKS = SHIFTS ? 3 : 2, ENTRIES = 16 * RANKS };


/* The kept fits of all sub-blocks, in units of the super-block: entry 16 * k + j is the one of rank k of sub-block j.
 * With scale s and minimum m instead of its own it costs
 *     error + bend * (s - scale)^2 + sum * (m - minimum - slope * (s - scale))^2. */
typedef struct {
    float scale[ENTRIES] KQ_ALIGNED, minimum[ENTRIES] KQ_ALIGNED, error[ENTRIES] KQ_ALIGNED;
    float bend[ENTRIES] KQ_ALIGNED, slope[ENTRIES] KQ_ALIGNED, sum[ENTRIES] KQ_ALIGNED;
    float q[ENTRIES] KQ_ALIGNED, qq[ENTRIES] KQ_ALIGNED; /* sums of w * q and w * q^2 */
} kq_fits;

/* Sixteen fits of one sub-block, in units of its levels. */
typedef struct {
    float scale[16] KQ_ALIGNED, minimum[16] KQ_ALIGNED, error[16] KQ_ALIGNED, q[16] KQ_ALIGNED, qq[16] KQ_ALIGNED;
} kq_lane_fits;

/* A choice for a super-block, and the normal equations dd * d + dm * dmin = dx, dm * d + mm * dmin = mx of its d and
 * dmin. */
typedef struct {
    float d, dmin, error;
    float scales[16] KQ_ALIGNED, minima[16] KQ_ALIGNED; /* indices */
    float dd, dm, mm, dx, mx;
} kq_choice;

KQ_INLINE int class_of(uint32_t present) {
    uint32_t positive = (present & 0xfe) | 1, negative = (present >> 8 & 0xfe) | 1;
    return 8 * (31 - __builtin_clz(negative)) + (31 - __builtin_clz(positive));
}

/* Least squares for the rounding that 1 / inverse and the minimum m make of the levels. */
KQ_INLINE void refit_lanes(const kq_codes *b, int j, vf inverse, vf m, int l, kq_lane_fits *out) {
    vf offset = m * inverse, q_sum = {0}, qq_sum = {0}, xq_sum = {0};
    for (uint32_t left = b->present[j]; left; left &= left - 1) {
        int c = __builtin_ctz(left);
        vf q = vf_rint(vf_clamp(inverse * level_of[c] + offset, 0, TOP));
        vf wq = b->weights[j][c] * q;
        q_sum += wq;
        qq_sum += wq * q;
        xq_sum += wq * level_of[c];
    }
    float w = b->sums[j], x = b->firsts[j];
    vf determinant = w * qq_sum - q_sum * q_sum;
    vf m_part = q_sum * xq_sum - qq_sum * x;
    /* The minimum is free where the quants differ and it does not turn negative; else it is zero. Where that leaves no
     * positive scale, all is one constant. */
    vm spread = vf_less(w * 0x1p-18f * qq_sum, determinant), negative = vf_less(m_part, (vf){0});
    vf bottom = vf_pick(negative, qq_sum, vf_pick(spread, determinant, qq_sum));
    vf s_part = vf_pick(negative, xq_sum, vf_pick(spread, w * xq_sum - x * q_sum, xq_sum));
    m_part = vf_pick(negative, (vf){0}, vf_pick(spread, m_part, (vf){0}));
    vm positive = vf_less((vf){0}, vf_min(bottom, s_part));
    bottom = vf_pick(positive, bottom, vf_all(w));
    vf scale = vf_pick(positive, s_part, (vf){0}) / bottom;
    vf minimum = vf_pick(positive, m_part, vf_max(vf_all(-x), (vf){0})) / bottom;
    vf_store(out->scale + l, scale);
    vf_store(out->minimum + l, minimum);
    vf_store(out->error + l, vf_max(b->seconds[j] + (minimum * x - scale * xq_sum), (vf){0}));
    vf_store(out->q + l, q_sum);
    vf_store(out->qq + l, qq_sum);
}

/* With importance a second refit rounds the codes to the lattice of the first. */
KQ_INLINE void fit_sub_block(const kq_codes *b, int j, const kq_affine_class *start, int weighted, kq_lane_fits *out) {
    kq_shares shares = shares_of(b, j, weighted);
    KQ_EACH(l) {
        vi best = vi_all(INT32_MAX);
        for (int i = 0; i < KQ_MINIMA; ++i) {
            best = vi_min(best, price_of(start->cost[i], &shares, l, weighted) << 3 | i);
        }
        vf m = vf_max(vf_load(start->first + l) + vf_from_int(best & 7) * vf_load(start->step + l), (vf){0});
        refit_lanes(b, j, vf_load(start->inverse + l), m, l, out);
        if (weighted) refit_lanes(b, j, vf_inverse(vf_load(out->scale + l)), vf_load(out->minimum + l), l, out);
    }
}

/* The best fit of sub-block j moved by one quant, where that keeps all codes in range: as good, with another minimum.
 * Becomes entry e. */
KQ_INLINE int shift_fit(const kq_codes *b, int j, int e, kq_fits *out) {
    uint32_t positive = (b->present[j] & 0xfe) | 1, negative = (b->present[j] >> 8 & 0xfe) | 1;
    float high = level_of[31 - __builtin_clz(positive)] * b->unit[j];
    float low = -level_of[31 - __builtin_clz(negative)] * b->unit[j];
    float scale = out->scale[j], minimum = out->minimum[j], sum = b->sums[j], by;
    if (high + minimum < (TOP - 0.51f) * scale) by = 1;
    else if (low + minimum > 0.51f * scale && minimum >= scale) by = -1;
    else return 0;
    out->scale[e] = scale;
    out->minimum[e] = minimum + by * scale;
    out->error[e] = out->error[j];
    out->q[e] = out->q[j] + by * sum;
    out->qq[e] = out->qq[j] + by * 2 * out->q[j] + sum;
    return 1;
}

/* Keeps the RANKS best of `groups` * 16 fits that differ; the last place goes to the shifted best one if the type asks
 * for it. */
KQ_INLINE void rank_fits(const kq_codes *b, int j, const kq_lane_fits *found, int groups, kq_fits *out) {
    int32_t keys[32] KQ_ALIGNED;
    for (int g = 0; g < groups; ++g) {
        KQ_EACH(l) {
            vi lanes = vi_load(kq_lane_numbers + 16 * g + l);
            vi_store(keys + 16 * g + l, kq_keys(vf_load(found[g].error + l), lanes, 5));
        }
    }
    int lane = 0;
    for (int k = 0; k < RANKS; ++k) {
        int e = 16 * k + j;
        if (SHIFTS && k == RANKS - 1 && shift_fit(b, j, e, out)) return;
        int32_t best = kq_least(keys, groups);
        if (best != INT32_MAX) lane = best & 31;
        const kq_lane_fits *of = &found[lane / 16];
        /* Equal errors and equal sums of quants: the same rounding. */
        for (int l = 0; l < 16 * groups; l += KQ_LANES) {
            vi key = vi_load(keys + l), equal = (key & ~31) == (best & ~31);
            equal &= vf_load(found[l / 16].q + l % 16) == of->q[lane % 16];
            vi_store(keys + l, key | (equal & INT32_MAX));
        }
        float unit = b->unit[j];
        int l = lane % 16;
        out->scale[e] = of->scale[l] * unit;
        out->minimum[e] = of->minimum[l] * unit;
        out->error[e] = of->error[l] * (unit * unit);
        out->q[e] = of->q[l];
        out->qq[e] = of->qq[l];
    }
}

/* The codes that hold a noticeable share of the weight, of 112 in all. */
KQ_INLINE uint32_t heavy(const uint8_t *shares) {
    uint32_t mask = 1;
    for (int c = 0; c < 16; ++c) mask |= (uint32_t)(shares[c] >= 4) << c;
    return mask;
}

KQ_INLINE void fit_all(const kq_codes *b, int weighted, kq_fits *out) {
    kq_lane_fits found[SUBS][MOST_GROUPS];
    int groups[16];
    for (uint32_t left = b->used; left; left &= left - 1) {
        int j = __builtin_ctz(left), whole = class_of(b->present[j]);
        groups[j] = 1;
        if (!weighted) {
            fit_sub_block(b, j, &CLASSES[whole], 0, &found[j][0]);
            continue;
        }
        fit_sub_block(b, j, &CLASSES_WEIGHTED[whole], 1, &found[j][0]);
        int core = class_of(heavy(b->shares[j]));
        if (MOST_GROUPS < 2 || core == whole) continue;
        groups[j] = 2;
        fit_sub_block(b, j, &CLASSES[core], 1, &found[j][MOST_GROUPS - 1]);
    }
    for (int j = 0; j < 16; ++j) {
        if (j < SUBS && b->used >> j & 1) {
            if (MOST_GROUPS == 1 || groups[j] == 1) rank_fits(b, j, found[j], 1, out);
            else rank_fits(b, j, found[j], 2, out);
            continue;
        }
        for (int e = j; e < ENTRIES; e += 16) {
            out->scale[e] = out->minimum[e] = out->error[e] = out->q[e] = out->qq[e] = 0;
        }
    }
    for (int e = 0; e < ENTRIES; e += KQ_LANES) {
        vf sum = vf_load(b->sums + e % 16), q = vf_load(out->q + e), slope = q * vf_inverse(sum);
        vf_store(out->sum + e, sum);
        vf_store(out->slope + e, slope);
        vf_store(out->bend + e, vf_load(out->qq + e) - q * slope);
    }
}

KQ_INLINE vf index_of(vf value, vf inverse) {
    return vf_rint(vf_clamp(value * inverse, 0, INDEX_TOP));
}

/* Error under each trial d, minima free. */
KQ_INLINE void price_scales(const kq_fits *fits, const float *d, float *price) {
    for (int o = 0; o < SCALE_TRIALS; o += KQ_LANES) {
        vf dv = vf_load(d + o), inverse = vf_inverse(dv), total = {0};
        for (int j = 0; j < SUBS; ++j) {
            vf least = vf_all(3e38f);
            for (int e = j; e < ENTRIES; e += 16) {
                vf off = index_of(vf_all(fits->scale[e]), inverse) * dv - fits->scale[e];
                least = vf_min(least, fits->error[e] + fits->bend[e] * (off * off));
            }
            total += least;
        }
        vf_store(price + o, total);
    }
}

/* Under one d: error of each entry with its minimum free, and that minimum. */
KQ_INLINE void fix_scales(const kq_fits *fits, float d, float *error, float *wanted) {
    vf inverse = vf_all(kq_inverse(d));
    for (int e = 0; e < ENTRIES; e += KQ_LANES) {
        vf scale = vf_load(fits->scale + e), off = index_of(scale, inverse) * d - scale;
        vf_store(error + e, vf_load(fits->error + e) + vf_load(fits->bend + e) * (off * off));
        vf_store(wanted + e, vf_load(fits->minimum + e) + vf_load(fits->slope + e) * off);
    }
}

/* Error under each trial dmin, given what fix_scales found. */
KQ_INLINE void price_minima(const kq_fits *fits, const float *error, const float *wanted, const float *dmin,
                            float *price) {
    KQ_EACH(o) {
        vf dv = vf_load(dmin + o), inverse = vf_inverse(dv), total = {0};
        for (int j = 0; j < SUBS; ++j) {
            vf least = vf_all(3e38f);
            for (int e = j; e < ENTRIES; e += 16) {
                vf off = index_of(vf_all(wanted[e]), inverse) * dv - wanted[e];
                least = vf_min(least, error[e] + fits->sum[e] * (off * off));
            }
            total += least;
        }
        vf_store(price + o, total);
    }
}

/* Indices under d and dmin, from the better entry of each sub-block. */
KQ_INLINE void choose(const kq_fits *fits, float d, float dmin, kq_choice *out) {
    float errors[ENTRIES] KQ_ALIGNED, wanted[ENTRIES] KQ_ALIGNED, sums[6][16] KQ_ALIGNED;
    vf inverse = vf_all(kq_inverse(d)), min_inverse = vf_all(kq_inverse(dmin));
    fix_scales(fits, d, errors, wanted);
    KQ_EACH(j) {
        vf sum = vf_load(fits->sum + j), scale_index = {0}, min_index = {0}, error = vf_all(3e38f);
        vf q = {0}, qq = {0}, scale = {0}, minimum = {0};
        for (int e = j; e < ENTRIES; e += 16) {
            vf want = vf_load(wanted + e), index = index_of(want, min_inverse), off = index * dmin - want;
            vf cost = vf_load(errors + e) + sum * (off * off);
            vm better = vf_less(cost, error);
            error = vf_pick(better, cost, error);
            min_index = vf_pick(better, index, min_index);
            scale_index = vf_pick(better, index_of(vf_load(fits->scale + e), inverse), scale_index);
            q = vf_pick(better, vf_load(fits->q + e), q);
            qq = vf_pick(better, vf_load(fits->qq + e), qq);
            scale = vf_pick(better, vf_load(fits->scale + e), scale);
            minimum = vf_pick(better, vf_load(fits->minimum + e), minimum);
        }
        vf_store(out->scales + j, scale_index);
        vf_store(out->minima + j, min_index);
        vf_store(sums[0] + j, error);
        vf_store(sums[1] + j, qq * scale_index * scale_index);
        vf_store(sums[2] + j, q * scale_index * min_index);
        vf_store(sums[3] + j, sum * min_index * min_index);
        vf_store(sums[4] + j, (qq * scale - q * minimum) * scale_index);
        vf_store(sums[5] + j, (sum * minimum - q * scale) * min_index);
    }
    out->d = d;
    out->dmin = dmin;
    out->error = kq_sum16(sums[0]);
    out->dd = kq_sum16(sums[1]);
    out->dm = -kq_sum16(sums[2]);
    out->mm = kq_sum16(sums[3]);
    out->dx = kq_sum16(sums[4]);
    out->mx = kq_sum16(sums[5]);
}

/* Solves the normal equations of a choice and chooses anew, as long as that helps, twice at most. */
KQ_INLINE void refine(const kq_fits *fits, kq_half_range half, kq_choice *best) {
    for (int round = 0; round < 2; ++round) {
        kq_choice next;
        float determinant = best->dd * best->mm - best->dm * best->dm, d = best->d, dmin = best->dmin;
        if (determinant > 1e-5f * (best->dd * best->mm)) {
            d = (best->dx * best->mm - best->mx * best->dm) / determinant;
            dmin = (best->dd * best->mx - best->dm * best->dx) / determinant;
        } else if (best->dd > 0 && best->mm == 0) {
            d = best->dx / best->dd;
        }
        if (!(d > 0 && dmin > 0)) return;
        choose(fits, to_half1(d, half), to_half1(dmin, half), &next);
        if (!(next.error < best->error)) return;
        *best = next;
    }
}

/* How far to search: `least` to `most` values of d, of which up to `refined` are refined, but no further once the error
 * is within the factor `near` of the sum of the sub-blocks' own least errors. */
typedef struct { int least, most, refined; float near; } kq_effort;
enum { MOST_TRIED = 8 };

KQ_INLINE void search(const kq_fits *fits, kq_half_range half, kq_effort effort, kq_choice *best) {
    float most = 0, deepest = 0;
    for (int j = 0; j < SUBS; ++j) {
        most = fits->scale[j] > most ? fits->scale[j] : most;
        deepest = fits->minimum[j] > deepest ? fits->minimum[j] : deepest;
    }
    float d[SCALE_TRIALS] KQ_ALIGNED, dmin[MIN_TRIALS] KQ_ALIGNED, price[SCALE_TRIALS] KQ_ALIGNED;
    int32_t keys[SCALE_TRIALS] KQ_ALIGNED, min_keys[MIN_TRIALS] KQ_ALIGNED;
    trial_values(&TRIALS.scales, SCALE_TRIALS, most, half, d);
    trial_values(&TRIALS.minima, MIN_TRIALS, deepest, half, dmin);
    price_scales(fits, d, price);
    for (int o = 0; o < SCALE_TRIALS; o += KQ_LANES) {
        vi_store(keys + o, kq_keys(vf_load(price + o), vi_load(kq_lane_numbers + o), 5));
    }
    int32_t least = INT32_MAX, enough, found[MOST_TRIED];
    int rounds = 0, scale_of[MOST_TRIED];
    float near = effort.near * kq_sum16(fits->error);
    memcpy(&enough, &near, sizeof enough);
    for (; rounds < effort.most; ++rounds) {
        /* The price with free minima is a lower bound of the one with rounded minima. */
        int32_t key = kq_least(keys, 2);
        int o = key & 31;
        if (key >= least || (rounds >= effort.least && least <= enough)) break;
        keys[o] = INT32_MAX;
        float error[ENTRIES] KQ_ALIGNED, wanted[ENTRIES] KQ_ALIGNED, min_price[MIN_TRIALS] KQ_ALIGNED;
        fix_scales(fits, d[o], error, wanted);
        price_minima(fits, error, wanted, dmin, min_price);
        KQ_EACH(i) vi_store(min_keys + i, kq_keys(vf_load(min_price + i), vi_load(kq_lane_numbers + i), 4));
        found[rounds] = kq_least(min_keys, 1);
        scale_of[rounds] = o;
        least = found[rounds] < least ? found[rounds] : least;
    }
    for (int i = 0; i < effort.refined && i < rounds; ++i) {
        kq_choice next, *to = i ? &next : best;
        int at = 0;
        for (int k = 1; k < rounds; ++k) at = found[k] < found[at] ? k : at;
        choose(fits, d[scale_of[at]], dmin[found[at] & 15], to);
        refine(fits, half, to);
        if (to->error < best->error) *best = *to;
        if (best->error <= near) break;
        found[at] = INT32_MAX;
    }
}

/* The quant of every code, and the error of the super-block. */
KQ_INLINE float round_codes(const kq_codes *b, const kq_choice *choice, uint8_t (*quants)[16]) {
    float scale[16] KQ_ALIGNED, minimum[16] KQ_ALIGNED, inverse[16] KQ_ALIGNED, error[16] KQ_ALIGNED;
    KQ_EACH(j) {
        vf back = vf_load(b->back + j), s = vf_load(choice->scales + j) * choice->d * back;
        vf_store(scale + j, s);
        vf_store(inverse + j, vf_inverse(s));
        vf_store(minimum + j, vf_load(choice->minima + j) * choice->dmin * back);
    }
    KQ_EACH(c) {
        vf total = {0};
        for (int j = 0; j < SUBS; ++j) {
            vf v = vf_load(level_of + c) + minimum[j];
            vf q = vf_rint(vf_clamp(v * inverse[j], 0, TOP)), miss = v - q * scale[j];
            kq_store_bytes(quants[j] + c, q);
            total += vf_load(b->weights[j] + c) * (miss * miss) * (b->unit[j] * b->unit[j]);
        }
        vf_store(error + c, total);
    }
    return kq_sum16(error);
}

typedef struct {
    kq_codes codes;
    kq_choice choice;
    uint8_t quants[SUBS][16] KQ_ALIGNED;
} kq_solution;

/* Asks kq_careful; if that knows better, `choice` becomes its answer. */
KQ_INLINE int reconsider(const kq_row *row, int64_t block, int exponent, kq_choice *choice) {
    double unit = kq_pow2(exponent - 128);
    kq_indices indices = {0};
    indices.d = kq_half_from_double(choice->d * unit);
    indices.dmin = kq_half_from_double(choice->dmin * unit);
    for (int j = 0; j < SUBS; ++j) {
        indices.scales[j] = (int8_t)choice->scales[j];
        indices.minima[j] = (uint8_t)choice->minima[j];
    }
    if (!kq_careful(row, block, TYPE, &indices)) return 0;
    choice->d = (float)(kq_half_to_double(indices.d) / unit);
    choice->dmin = (float)(kq_half_to_double(indices.dmin) / unit);
    for (int j = 0; j < SUBS; ++j) {
        choice->scales[j] = indices.scales[j];
        choice->minima[j] = indices.minima[j];
    }
    return 1;
}

KQ_INLINE void solve(const kq_row *row, int64_t block, kq_effort effort, kq_trust trust, kq_solution *out) {
    kq_fits fits;
    read_codes(row, block, &out->codes);
    fit_all(&out->codes, row->weights != NULL, &fits);
    kq_half_range half = half_range(out->codes.exponent);
    search(&fits, half, effort, &out->choice);
    float error = round_codes(&out->codes, &out->choice, out->quants);
    if (doubtful(&out->codes, row, block, trust, half, out->choice.d, error, kq_sum16(fits.error)) &&
        reconsider(row, block, out->codes.exponent, &out->choice)) {
        error = round_codes(&out->codes, &out->choice, out->quants);
    }
    tally(row, &out->codes, half, out->choice.d, error);
}
