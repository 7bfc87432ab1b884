/* When the choice of a fast search is compared with ggml's, and which one is taken.
 *
 * The fast searches rank roundings in single precision and keep a few of them. On weights like those of a model they
 * beat ggml's encoder in every super-block; where few levels, far apart exponents or uneven importance make the error
 * nearly zero or leave it to one sub-block, luck may decide, and this file sees to it that it is never ggml's.
 * Included after kq_choice, round_codes, classic_choice and indices_of of the type. */
#ifndef KQ_DOUBT_H
#define KQ_DOUBT_H

/* ggml's choice is looked at too where the error is beyond this factor of the least that the sub-blocks could have each
 * for itself; without importance and with it. */
#define NEAR_LEAST 1.6f
#define NEAR_LEAST_WEIGHTED 1.12f

typedef struct {
    kq_codes codes;
    kq_choice choice;
    uint8_t quants[SUBS][16] KQ_ALIGNED;
} kq_solution;

/* Limits of a type: error relative to the energy of the super-block below which chance may decide, without and with
 * importance; the number of sub-blocks with at most four levels that are suspect; and the effective number of columns
 * below which ggml's choice is looked at. */
typedef struct { float floor, floor_weighted; int few, columns; } kq_trust;
enum { FEWEST_COLUMNS = 10 };

/* Whether at most four bits are set; popcount is no instruction of every processor. */
KQ_INLINE int at_most_four(uint32_t bits) {
    for (int i = 0; i < 4; ++i) bits &= bits - 1;
    return bits == 0;
}

/* Whether ggml's encoder might come out ahead: few columns or one sub-block decide, fp16 limits the scale, the error is
 * smaller than ordinary weights leave, or many sub-blocks have at most four levels; fewer of these are suspect if the
 * error is well above `least`, the sum of the sub-blocks' own least errors. Chosen so that a model's rows hardly ever
 * ask, while random and hostile ones always do where it matters. */
KQ_INLINE int doubtful(const kq_codes *b, const kq_row *row, int64_t block, kq_trust trust, kq_half_range half, float d,
                       float error, float least) {
    float energies[16] KQ_ALIGNED;
    KQ_EACH(j) {
        vf unit = vf_load(b->unit + j);
        vf_store(energies + j, vf_load(b->seconds + j) * (unit * unit));
    }
    float energy = kq_sum16(energies), size = d < 0 ? -d : d;
    if (b->used == 0) return 0;
    if (kq_effective_columns(row, block) < FEWEST_COLUMNS || b->widest >= (row->weights ? 3 : 4)) return 1;
    if (b->exponent > 140 || size < 8 * half.step) return 1;
    if (error < (row->weights ? trust.floor_weighted : trust.floor) * energy) return 1;
    int few = 0, used = 0;
    for (int j = 0; j < SUBS; ++j) {
        int in_use = b->used >> j & 1;
        used += in_use;
        few += in_use & at_most_four(b->present[j]);
    }
    if (few >= trust.few || 4 * few > used) return 1;
    if (few == 0 || b->widest < 3) return 0;
    return error > 1.1f * least || least < 1e-5f * energy || error < 1e-3f * energy;
}

/* Takes ggml's choice where it is better; in doubt, by errors in double precision. */
KQ_INLINE float reconsider(const kq_row *row, int64_t block, int doubt, float error, kq_solution *out) {
    kq_solution theirs;
    classic_choice(&out->codes, row, block, &theirs.choice);
    float other = round_codes(&out->codes, &theirs.choice, theirs.quants);
    if (doubt) {
        kq_indices a = indices_of(&theirs.choice, out->codes.exponent);
        kq_indices b = indices_of(&out->choice, out->codes.exponent);
        if (!kq_closer(row, block, TYPE, &a, &b)) return error;
    } else if (!(other < error)) {
        return error;
    }
    out->choice = theirs.choice;
    memcpy(out->quants, theirs.quants, sizeof out->quants);
    return other;
}

/* Counts the super-block in the statistics of the call. */
KQ_INLINE void tally(const kq_row *row, const kq_codes *b, kq_half_range half, float d, float error) {
    float size = d < 0 ? -d : d;
    int exact = error == 0, at_end = size >= half.largest || size < 1024 * half.step;
    row->stats->blocks += 1;
    row->stats->exact += exact;
    row->stats->clipped += !exact && b->used && at_end;
}

/* What follows the search, whose choice is in `out`: `least` is the sum of the sub-blocks' own least errors. */
KQ_INLINE void settle(const kq_row *row, int64_t block, int weighted, kq_trust trust, kq_half_range half, float least,
                      kq_solution *out) {
    const kq_codes *codes = &out->codes;
    float error = round_codes(codes, &out->choice, out->quants);
    int doubt = doubtful(codes, row, block, trust, half, out->choice.d, error, least);
    float near = (weighted ? NEAR_LEAST_WEIGHTED : NEAR_LEAST) * least;
    if (doubt || error > near || (weighted && kq_effective_columns(row, block) < trust.columns)) {
        error = reconsider(row, block, doubt, error, out);
    }
    tally(row, codes, half, out->choice.d, error);
}

#endif
