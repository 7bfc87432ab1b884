/* The search for formats with a scale and a minimum per sub-block: Q4_K and Q2_K. Included once per type and
 * instruction set, after these are defined: SUBS, sub-blocks of a super-block; TOP, the largest quant; INDEX_TOP, the
 * largest index of a scale or minimum; CLASSES, CLASSES_WEIGHTED and TRIALS, its tables; MOST_GROUPS, 2 if with
 * importance the range of the codes that matter has lattices of its own, else 1; SHIFTS, whether fits moved by a quant
 * are kept too.
 *
 * 1. Each sub-block (kq_affine_fit.h): 128 starting lattices, 16 scales with 8 minima, are priced by table look-up. The
 *    best minimum of each scale gives a rounding of the codes, for which least squares gives the best real scale and
 *    minimum. The two best are kept, with importance three; in Q4_K, where ranges often leave quants unused, also the
 *    best one moved by one quant. The error of other scales and minima under the same rounding is a known parabola.
 * 2. The super-block: 32 values of d are priced by these parabolas, minima left free; the best of them, with 16
 *    values of dmin each, with the minima rounded too. The best pairs, which also fix all indices, are refitted. In Q4_K
 *    each minimum may then move by any number of quants, if that brings it nearer to an index.
 * 3. The codes are rounded to the lattices found, and the error is measured; where luck may decide, ggml's own choice is
 *    measured too (kq_doubt.h).
 */
#include "kq_affine_fit.h"
#include "kq_closer.h"

enum { SCALE_TRIALS = 32, MIN_TRIALS = 16 };

/* A choice for a super-block, and the normal equations dd * d + dm * dmin = dx, dm * d + mm * dmin = mx of its d and
 * dmin. */
typedef struct {
    float d, dmin, error;
    float scales[16] KQ_ALIGNED, minima[16] KQ_ALIGNED; /* indices */
    float dd, dm, mm, dx, mx;
} kq_choice;

KQ_INLINE vf index_of(vf value, vf inverse) {
    return vf_rint(vf_clamp(value * inverse, 0, INDEX_TOP));
}

/* Error under each trial d, minima free. */
KQ_INLINE void price_scales(const kq_fits *fits, const float *d, float *price) {
    for (int o = 0; o < SCALE_TRIALS; o += KQ_LANES) {
        vf dv = vf_load(d + o), inverse = vf_inverse(dv), total = {0};
        for (int j = 0; j < SUBS; ++j) {
            vf least = vf_all(3e38f);
            for (int e = j; e < fits->entries; e += 16) {
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
    for (int e = 0; e < fits->entries; e += KQ_LANES) {
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
            for (int e = j; e < fits->entries; e += 16) {
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
        for (int e = j; e < fits->entries; e += 16) {
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

/* How far to search: `ranks` roundings of each sub-block, `least` to `most` values of d, of which up to `refined` are
 * refined, but no further once the error is within the factor `near` of the sum of the sub-blocks' own least errors. */
typedef struct { int ranks, least, most, refined; float near; } kq_effort;
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

/* Moves of the quants of a sub-block, nearest first. */
static const float moves[16] KQ_ALIGNED = {0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 8};

/* Where the range of a sub-block leaves quants unused, its minimum may move by a number of steps: takes the index that
 * comes nearest to one of these minima, measured on all codes. With importance the ends of the range may matter less. */
KQ_INLINE void move_minima(const kq_codes *b, int weighted, kq_choice *choice) {
    for (uint32_t left = b->used; left; left &= left - 1) {
        int j = __builtin_ctz(left);
        float scale = choice->scales[j] * choice->d * b->back[j], unit = choice->dmin * b->back[j];
        float step = scale * kq_inverse(unit);
        if (!(step > 0) || (!weighted && range_of(b->present[j]) > (TOP - 0.5f) * scale)) continue;
        int32_t keys[16] KQ_ALIGNED;
        float index[16] KQ_ALIGNED;
        vf inverse = vf_all(kq_inverse(scale));
        KQ_EACH(l) {
            vf at = vf_rint(vf_clamp(choice->minima[j] + vf_load(moves + l) * step, 0, INDEX_TOP));
            vf minimum = at * unit, error = {0};
            for (uint32_t codes = b->present[j]; codes; codes &= codes - 1) {
                int c = __builtin_ctz(codes);
                vf v = level_of[c] + minimum;
                vf miss = v - vf_rint(vf_clamp(v * inverse, 0, TOP)) * scale;
                error += b->weights[j][c] * (miss * miss);
            }
            vf_store(index + l, at);
            vi_store(keys + l, kq_keys(error, vi_load(kq_lane_numbers + l), 4));
        }
        choice->minima[j] = index[kq_least(keys, 1) & 15];
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

#include "kq_classic_lanes.h"

/* The choice as a decoder sees it. */
KQ_INLINE kq_indices indices_of(const kq_choice *choice, int exponent) {
    double unit = kq_pow2(exponent - 128);
    kq_indices out = {0};
    out.d = kq_half_from_double(choice->d * unit);
    out.dmin = kq_half_from_double(choice->dmin * unit);
    for (int j = 0; j < SUBS; ++j) {
        out.scales[j] = (int8_t)choice->scales[j];
        out.minima[j] = (uint8_t)choice->minima[j];
    }
    return out;
}

#include "kq_doubt.h"

KQ_INLINE void solve(const kq_row *row, int64_t block, int weighted, kq_effort effort, kq_trust trust,
                     kq_solution *out) {
    kq_fits fits;
    read_codes(row, block, &out->codes);
    fit_all(&out->codes, weighted, effort.ranks, &fits);
    kq_half_range half = half_range(out->codes.exponent);
    search(&fits, half, effort, &out->choice);
    if (SHIFTS) move_minima(&out->codes, weighted, &out->choice);
    settle(row, block, weighted, trust, half, kq_sum16(fits.error), out);
}
