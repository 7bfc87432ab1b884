/* ggml's own choice for a super-block with scales and minima (make_qkx2_quants, make_qkx3_quants), all sub-blocks at
 * once: lane j is sub-block j. Single precision and the order of summation over the columns are those of ggml, so that
 * what it finds is what ggml's encoder would write. Included by kq_affine.h. */
#include "kq_classic.h"
#include "kq_columns.h"

/* How ggml searches a type: lattices with first + i * step + TOP quants over the range, i = 0..steps; the measure is
 * the sum of squares, or of magnitudes. */
typedef struct { float first, step; int steps, magnitudes; } kq_classic_search;

typedef struct { float scale[16] KQ_ALIGNED, minimum[16] KQ_ALIGNED, sum[16] KQ_ALIGNED; } kq_classic_fits;

KQ_INLINE vf measure_of(vf miss, int magnitudes) {
    return magnitudes ? vf_max(miss, -miss) : miss * miss;
}

KQ_INLINE void classic_fits(const kq_columns *of, kq_classic_search how, kq_classic_fits *out) {
    for (int l = 0; l < SUBS; l += KQ_LANES) {
        vf low = {0}, high = vf_load(of->x[0] + l), sum_w = {0}, sum_x = {0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf x = vf_load(of->x[i] + l), w = vf_load(of->w[i] + l);
            low = vf_min(low, x);
            high = vf_max(high, x);
            sum_w += w;
            sum_x += w * x;
        }
        vm ranged = vf_less(low, high);
        vf range = vf_pick(ranged, high - low, vf_all(1)), plain = TOP / range;
        vf scale = 1.0f / plain, base = low, best = {0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf x = vf_load(of->x[i] + l), q = vf_rint(vf_clamp(plain * (x - low), 0, TOP));
            best += vf_load(of->w[i] + l) * measure_of(scale * q + low - x, how.magnitudes);
        }
        for (int s = 0; s <= how.steps; ++s) {
            /* Lattices span from the best minimum so far. */
            vf density = (how.first + how.step * (float)s + TOP) / (high - base);
            vf quants[SUB_SIZE], q_sum = {0}, qq_sum = {0}, xq_sum = {0};
            for (int i = 0; i < SUB_SIZE; ++i) {
                vf x = vf_load(of->x[i] + l), q = vf_rint(vf_clamp(density * (x - base), 0, TOP));
                vf wq = vf_load(of->w[i] + l) * q;
                quants[i] = q;
                q_sum += wq;
                qq_sum += wq * q;
                xq_sum += wq * x;
            }
            vf determinant = sum_w * qq_sum - q_sum * q_sum;
            vm valid = vf_less((vf){0}, determinant);
            vf bottom = vf_pick(valid, determinant, vf_all(1));
            vf this_scale = (sum_w * xq_sum - sum_x * q_sum) / bottom;
            vf this_low = (qq_sum * sum_x - q_sum * xq_sum) / bottom;
            vm above = vf_less((vf){0}, this_low);
            this_scale = vf_pick(above, xq_sum / vf_pick(above, qq_sum, vf_all(1)), this_scale);
            this_low = vf_pick(above, (vf){0}, this_low);
            vf error = {0};
            for (int i = 0; i < SUB_SIZE; ++i) {
                vf miss = this_scale * quants[i] + this_low - vf_load(of->x[i] + l);
                error += vf_load(of->w[i] + l) * measure_of(miss, how.magnitudes);
            }
            error = vf_pick(valid, error, best);
            vm better = vf_less(error, best);
            best = vf_pick(better, error, best);
            scale = vf_pick(better, this_scale, scale);
            base = vf_pick(better, this_low, base);
        }
        vf_store(out->scale + l, vf_pick(ranged, scale, (vf){0}));
        vf_store(out->minimum + l, -vf_pick(ranged, base, low));
        vf_store(out->sum + l, sum_w);
    }
}

/* Indices and their unit for the scales, or minima, of all sub-blocks. */
KQ_INLINE float classic_indices(const float *values, const float *weights, float *indices) {
    uint8_t found[16];
    float unit = kq_classic_positive(SUBS, INDEX_TOP, values, weights, found);
    for (int j = 0; j < 16; ++j) indices[j] = j < SUBS ? found[j] : 0;
    return unit;
}

KQ_INLINE float plain_indices(const float *values, float *indices) {
    float most = 0;
    for (int j = 0; j < SUBS; ++j) most = values[j] > most ? values[j] : most;
    vf density = vf_all(most > 0 ? INDEX_TOP / most : 0);
    KQ_EACH(j) vf_store(indices + j, vf_rint(vf_clamp(density * vf_load(values + j), 0, INDEX_TOP)));
    return most / INDEX_TOP;
}

/* ggml's choice; its error and normal equations are left unset. */
KQ_INLINE void classic_choice(const kq_codes *b, const kq_row *row, int64_t block, kq_choice *out) {
    kq_columns columns;
    kq_classic_fits fits = {0};
    float d, dmin;
    read_columns(b, row, block, &columns);
    if (row->importance) {
        classic_fits(&columns, (kq_classic_search){-0.9f, 0.05f, 36, 0}, &fits);
        d = classic_indices(fits.scale, fits.sum, out->scales);
        dmin = classic_indices(fits.minimum, fits.sum, out->minima);
    } else {
        if (TYPE == KQ_TYPE_Q4_K) classic_fits(&columns, (kq_classic_search){-1.0f, 0.1f, 20, 0}, &fits);
        else classic_fits(&columns, (kq_classic_search){-0.5f, 0.1f, 15, 1}, &fits);
        d = plain_indices(fits.scale, out->scales);
        dmin = plain_indices(fits.minimum, out->minima);
    }
    out->d = stored_half(d, b->exponent);
    out->dmin = stored_half(dmin, b->exponent);
}
