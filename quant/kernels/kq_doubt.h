/* When a fast search asks for a second opinion; included after kq_codes.h. */
#ifndef KQ_DOUBT_H
#define KQ_DOUBT_H

#include "kq_careful.h"

/* Limits of a type: error relative to the energy of the super-block below which chance may decide, without and with
 * importance; and the number of sub-blocks with at most four levels that are suspect. */
typedef struct { float floor, floor_weighted; int few; } kq_trust;

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
    if (kq_lopsided(row, block) || b->widest >= (row->weights ? 3 : 4)) return 1;
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

/* Counts the super-block in the statistics of the call. */
KQ_INLINE void tally(const kq_row *row, const kq_codes *b, kq_half_range half, float d, float error) {
    float size = d < 0 ? -d : d;
    int exact = error == 0, at_end = size >= half.largest || size < 1024 * half.step;
    row->stats->blocks += 1;
    row->stats->exact += exact;
    row->stats->clipped += !exact && b->used && at_end;
}

#endif
