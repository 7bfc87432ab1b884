/* Step 1 of kq_affine.h: the best lattices of each sub-block with real scales and minima. */
#include "kq_affine_search.h"

/* Sixteen fits of one sub-block, in units of its levels. */
typedef struct {
    float scale[16] KQ_ALIGNED, minimum[16] KQ_ALIGNED, error[16] KQ_ALIGNED, q[16] KQ_ALIGNED, qq[16] KQ_ALIGNED;
} kq_lane_fits;

KQ_INLINE int class_of(uint32_t present) {
    uint32_t positive = (present & 0xfe) | 1, negative = (present >> 8 & 0xfe) | 1;
    return 8 * (31 - __builtin_clz(negative)) + (31 - __builtin_clz(positive));
}

/* From the smallest to the largest level that occurs, or zero. */
KQ_INLINE float range_of(uint32_t present) {
    int class = class_of(present);
    return level_of[class & 7] - level_of[8 + class / 8];
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

/* Keeps the best of `groups` * 16 fits that differ; the last place goes to the shifted best one if the type asks for
 * it. */
KQ_INLINE void rank_fits(const kq_codes *b, int j, const kq_lane_fits *found, int groups, kq_fits *out) {
    int32_t keys[32] KQ_ALIGNED;
    for (int g = 0; g < groups; ++g) {
        KQ_EACH(l) {
            vi lanes = vi_load(kq_lane_numbers + 16 * g + l);
            vi_store(keys + 16 * g + l, kq_keys(vf_load(found[g].error + l), lanes, 5));
        }
    }
    int lane = 0;
    for (int e = j; e < out->entries; e += 16) {
        if (SHIFTS && e + 16 >= out->entries && shift_fit(b, j, e, out)) return;
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

KQ_INLINE void fit_all(const kq_codes *b, int weighted, int ranks, kq_fits *out) {
    kq_lane_fits found[SUBS][MOST_GROUPS];
    int groups[16];
    out->entries = 16 * (ranks + SHIFTS);
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
        for (int e = j; e < out->entries; e += 16) {
            out->scale[e] = out->minimum[e] = out->error[e] = out->q[e] = out->qq[e] = 0;
        }
    }
    complete_fits(b->sums, out);
}
