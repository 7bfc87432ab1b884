/* BF16 and F32 to formats with a scale of either sign per sub-block; included after kq_signed_search.h, with SPREAD_STEP
 * and SPREADS defined: lattices that put the largest magnitude on quant -(LEVELS + i * SPREAD_STEP), |i| <= SPREADS, are
 * rounded and refitted by least squares, all sub-blocks side by side, one a lane; the best is kept. */
#include "kq_floats.h"

KQ_INLINE void fit_columns(const kq_floats *of, kq_fits *out) {
    KQ_EACH(l) {
        vf low = vf_load(of->low + l), high = vf_load(of->high + l);
        vf inverse = vf_inverse(vf_pick(vf_less(high, -low), low, high));
        vf scale = {0}, qq = {0}, gain = {0};
        for (int s = -SPREADS; s <= SPREADS; ++s) {
            vf density = -(LEVELS + SPREAD_STEP * (float)s) * inverse, xq_sum = {0}, qq_sum = {0};
            for (int i = 0; i < SUB_SIZE; ++i) {
                vf x = vf_load(of->x[i] + l), q = quant_of(density * x), wq = vf_load(of->w[i] + l) * q;
                xq_sum += wq * x;
                qq_sum += wq * q;
            }
            vf this_scale = xq_sum * vf_inverse(qq_sum), this_gain = this_scale * xq_sum;
            vm better = vf_less(gain, this_gain);
            gain = vf_pick(better, this_gain, gain);
            scale = vf_pick(better, this_scale, scale);
            qq = vf_pick(better, qq_sum, qq);
        }
        vf_store(out->scale + l, scale);
        vf_store(out->qq + l, qq);
        vf_store(out->error + l, vf_max(vf_load(of->seconds + l) - gain, (vf){0}));
    }
}

KQ_INLINE void solve_floats(const kq_float_row *row, int64_t block, kq_float_solution *out) {
    kq_floats columns;
    kq_fits fits;
    read_floats(row, block, &columns);
    kq_half_range half = half_range(columns.exponent);
    out->exponent = columns.exponent;
    if (columns.empty) {
        memset(out, 0, sizeof *out);
        memset(out->quants, LEVELS, sizeof out->quants);
        row->stats->blocks += 1;
        row->stats->exact += 1;
        return;
    }
    fit_columns(&columns, &fits);
    search(&fits, half, &out->choice);
    float scale[16] KQ_ALIGNED;
    static const float none[16] KQ_ALIGNED = {0};
    KQ_EACH(j) vf_store(scale + j, vf_load(out->choice.scales + j) * out->choice.d);
    float error = round_columns(&columns, scale, none, -LEVELS, LEVELS - 1, LEVELS, out->quants);
    tally_floats(row, half, out->choice.d, error);
}
