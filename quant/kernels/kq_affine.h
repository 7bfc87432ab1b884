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
