/* d and the indices of a super-block whose sub-blocks have a scale of either sign and no minimum, from the fits of these.
 * Included with INDEX_LOW and INDEX_TOP, the range of the indices, LEVELS, quants being -LEVELS .. LEVELS - 1, and
 * TRIALS, the values of d to try, defined. */
#include "kq_codes.h"

enum { SCALE_TRIALS = 32 };

/* The fit of each sub-block, in units of the super-block: scale s costs error + qq * (s - scale)^2. */
typedef struct { float scale[16] KQ_ALIGNED, error[16] KQ_ALIGNED, qq[16] KQ_ALIGNED; } kq_fits;

/* A choice for a super-block; its d should be dx / dd. */
typedef struct {
    float d, error;
    float scales[16] KQ_ALIGNED; /* indices */
    float dd, dx;
} kq_choice;

KQ_INLINE vf quant_of(vf v) {
    return vf_rint(vf_clamp(v, -LEVELS, LEVELS - 1));
}

KQ_INLINE vf index_of(vf v) {
    return vf_rint(vf_clamp(v, INDEX_LOW, INDEX_TOP));
}

KQ_INLINE void choose(const kq_fits *fits, float d, kq_choice *out) {
    float sums[3][16] KQ_ALIGNED, inverse = kq_inverse(d);
    KQ_EACH(j) {
        vf scale = vf_load(fits->scale + j), qq = vf_load(fits->qq + j);
        vf index = index_of(scale * inverse), off = index * d - scale;
        vf_store(out->scales + j, index);
        vf_store(sums[0] + j, vf_load(fits->error + j) + qq * (off * off));
        vf_store(sums[1] + j, qq * index * index);
        vf_store(sums[2] + j, qq * scale * index);
    }
    out->d = d;
    out->error = kq_sum16(sums[0]);
    out->dd = kq_sum16(sums[1]);
    out->dx = kq_sum16(sums[2]);
}

KQ_INLINE void search(const kq_fits *fits, kq_half_range half, kq_choice *best) {
    float d[SCALE_TRIALS] KQ_ALIGNED, most = 0;
    int32_t keys[SCALE_TRIALS] KQ_ALIGNED;
    for (int j = 0; j < SUBS; ++j) {
        float scale = fits->scale[j];
        most = scale * scale > most * most ? scale : most;
    }
    trial_values(&TRIALS.scales, SCALE_TRIALS, most, half, d);
    for (int o = 0; o < SCALE_TRIALS; o += KQ_LANES) {
        vf dv = vf_load(d + o), inverse = vf_inverse(dv), price = {0};
        for (int j = 0; j < SUBS; ++j) {
            vf off = index_of(inverse * fits->scale[j]) * dv - fits->scale[j];
            price += fits->error[j] + fits->qq[j] * (off * off);
        }
        vi_store(keys + o, kq_keys(price, vi_load(kq_lane_numbers + o), 5));
    }
    choose(fits, d[kq_least(keys, 2) & 31], best);
    for (int round = 0; round < 2 && best->dd > 0 && best->dx != 0; ++round) {
        kq_choice next;
        choose(fits, to_half1(best->dx / best->dd, half), &next);
        if (!(next.error < best->error)) break;
        *best = next;
    }
}
