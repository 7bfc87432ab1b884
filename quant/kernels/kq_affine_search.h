/* Step 2 of kq_affine.h: d, dmin and the indices of a super-block, from fits of its sub-blocks. */
#include "kq_codes.h"

enum { SCALE_TRIALS = 32, MIN_TRIALS = 16, MOST_RANKS = SHIFTS + 3, ENTRIES = 16 * MOST_RANKS };

/* The kept fits of all sub-blocks, in units of the super-block: entry 16 * k + j is the one of rank k of sub-block j.
 * With scale s and minimum m instead of its own it costs
 *     error + bend * (s - scale)^2 + sum * (m - minimum - slope * (s - scale))^2. */
typedef struct {
    int entries; /* in use: 16 for each rank */
    float scale[ENTRIES] KQ_ALIGNED, minimum[ENTRIES] KQ_ALIGNED, error[ENTRIES] KQ_ALIGNED;
    float bend[ENTRIES] KQ_ALIGNED, slope[ENTRIES] KQ_ALIGNED, sum[ENTRIES] KQ_ALIGNED;
    float q[ENTRIES] KQ_ALIGNED, qq[ENTRIES] KQ_ALIGNED; /* sums of w * q and w * q^2 */
} kq_fits;

/* What follows from the sums of a fit; `sums` are those of w of the sub-blocks. */
KQ_INLINE void complete_fits(const float *sums, kq_fits *out) {
    for (int e = 0; e < out->entries; e += KQ_LANES) {
        vf sum = vf_load(sums + e % 16), q = vf_load(out->q + e), slope = q * vf_inverse(sum);
        vf_store(out->sum + e, sum);
        vf_store(out->slope + e, slope);
        vf_store(out->bend + e, vf_load(out->qq + e) - q * slope);
    }
}

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
