/* BF16 and F32 to formats with a scale and a minimum per sub-block; included after kq_affine_search.h, with FIRST_SPREAD,
 * SPREAD_STEP and SPREADS defined.
 *
 * All sub-blocks are fitted side by side, one a lane: from lattices that spread TOP plus FIRST_SPREAD + i * SPREAD_STEP
 * quants over the range, each rounded and refitted by least squares twice, the two best are kept. Lattices begin at the
 * minimum of the best one so far. The super-block is then searched as that of MXFP4 codes is. */
#include "kq_floats.h"

typedef struct { vf error, scale, minimum, q, qq; } kq_column_fit;

/* Least squares for the rounding that 1 / inverse and the minimum m make of the columns. */
KQ_INLINE kq_column_fit refit_columns(const kq_floats *of, int l, vf inverse, vf m) {
    vf offset = m * inverse, q_sum = {0}, qq_sum = {0}, xq_sum = {0};
    for (int i = 0; i < SUB_SIZE; ++i) {
        vf x = vf_load(of->x[i] + l), q = vf_rint(vf_clamp(x * inverse + offset, 0, TOP));
        vf wq = vf_load(of->w[i] + l) * q;
        q_sum += wq;
        qq_sum += wq * q;
        xq_sum += wq * x;
    }
    vf w = vf_load(of->sums + l), x = vf_load(of->firsts + l);
    vf determinant = w * qq_sum - q_sum * q_sum, m_part = q_sum * xq_sum - qq_sum * x;
    /* Without a spread of quants, or with a negative minimum, the minimum is zero. */
    vm spread = vf_less(w * 0x1p-18f * qq_sum, determinant), negative = vf_less(m_part, (vf){0});
    vf bottom = vf_pick(negative, qq_sum, vf_pick(spread, determinant, qq_sum));
    vf s_part = vf_pick(negative, xq_sum, vf_pick(spread, w * xq_sum - x * q_sum, xq_sum));
    m_part = vf_pick(negative, (vf){0}, vf_pick(spread, m_part, (vf){0}));
    vm positive = vf_less((vf){0}, vf_min(bottom, s_part));
    bottom = vf_pick(positive, bottom, vf_max(w, vf_all(0x1p-60f)));
    kq_column_fit out;
    out.scale = vf_pick(positive, s_part, (vf){0}) / bottom;
    out.minimum = vf_pick(positive, m_part, vf_max(-x, (vf){0})) / bottom;
    out.error = vf_max(vf_load(of->seconds + l) + (out.minimum * x - out.scale * xq_sum), (vf){0});
    out.q = q_sum;
    out.qq = qq_sum;
    return out;
}

KQ_INLINE kq_column_fit pick_fit(vm mask, kq_column_fit a, kq_column_fit b) {
    return (kq_column_fit){vf_pick(mask, a.error, b.error), vf_pick(mask, a.scale, b.scale),
                           vf_pick(mask, a.minimum, b.minimum), vf_pick(mask, a.q, b.q), vf_pick(mask, a.qq, b.qq)};
}

KQ_INLINE void store_fit(const kq_column_fit *fit, int e, kq_fits *out) {
    vf_store(out->error + e, fit->error);
    vf_store(out->scale + e, fit->scale);
    vf_store(out->minimum + e, fit->minimum);
    vf_store(out->q + e, fit->q);
    vf_store(out->qq + e, fit->qq);
}

KQ_INLINE void fit_columns(const kq_floats *of, kq_fits *out) {
    memset(out, 0, sizeof *out);
    out->entries = 32;
    for (int l = 0; l < SUBS; l += KQ_LANES) {
        vf low = vf_load(of->low + l), high = vf_load(of->high + l), range = high - low;
        vf inverse = TOP * vf_inverse(range);
        kq_column_fit best = refit_columns(of, l, inverse, -low), second = best;
        for (int s = 0; s < SPREADS; ++s) {
            vf from = -best.minimum;
            inverse = (TOP + FIRST_SPREAD + SPREAD_STEP * (float)s) * vf_inverse(high - from);
            kq_column_fit next = refit_columns(of, l, inverse, best.minimum);
            next = refit_columns(of, l, vf_inverse(next.scale), next.minimum);
            vm better = vf_less(next.error, best.error);
            vm other = vf_less(next.error, second.error);
            second = pick_fit(better, best, pick_fit(other, next, second));
            best = pick_fit(better, next, best);
        }
        store_fit(&best, l, out);
        store_fit(&second, 16 + l, out);
    }
    complete_fits(of->sums, out);
}

KQ_INLINE void solve_floats(const kq_float_row *row, int64_t block, kq_effort effort, kq_float_solution *out) {
    kq_floats columns;
    kq_fits fits;
    read_floats(row, block, &columns);
    kq_half_range half = half_range(columns.exponent);
    out->exponent = columns.exponent;
    if (columns.empty) {
        memset(out, 0, sizeof *out);
        row->stats->blocks += 1;
        row->stats->exact += 1;
        return;
    }
    fit_columns(&columns, &fits);
    search(&fits, half, effort, &out->choice);
    float scale[16] KQ_ALIGNED, minimum[16] KQ_ALIGNED;
    KQ_EACH(j) {
        vf_store(scale + j, vf_load(out->choice.scales + j) * out->choice.d);
        vf_store(minimum + j, vf_load(out->choice.minima + j) * out->choice.dmin);
    }
    float error = round_columns(&columns, scale, minimum, 0, TOP, 0, out->quants);
    tally_floats(row, half, out->choice.d, error);
}
