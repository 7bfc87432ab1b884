/* When a fast search asks for a second opinion; included after kq_codes.h. */
#ifndef KQ_DOUBT_H
#define KQ_DOUBT_H

#include "kq_careful.h"

/* Limits of a type: error relative to the energy of the super-block below which chance may decide, without and with
 * importance; and exponent gap from which sub-blocks of few levels are suspect. */
typedef struct { float floor, floor_weighted; int gap; } kq_trust;

/* Whether ggml's encoder might come out ahead: one sub-block dominates, the error is smaller than that of ordinary
 * weights, sub-blocks of at most four levels meet an error above `least`, the sum of the sub-blocks' own least errors,
 * or fp16 limits the scale. Chosen so that rows of a model hardly ever ask; tests hold it to never missing one. */
KQ_INLINE int doubtful(const kq_codes *b, const kq_row *row, int64_t block, kq_trust trust, kq_half_range half, float d,
                       float error, float least) {
    float energies[16] KQ_ALIGNED;
    KQ_EACH(j) {
        vf unit = vf_load(b->unit + j);
        vf_store(energies + j, vf_load(b->seconds + j) * (unit * unit));
    }
    float energy = kq_sum16(energies), size = d < 0 ? -d : d;
    if (b->widest >= 4 || kq_lopsided(row, block)) return b->used != 0;
    if (error < (row->weights ? trust.floor_weighted : trust.floor) * energy) return 1;
    if (error <= 1.05f * least && least >= 1e-5f * energy && error >= 1e-3f * energy) return 0;
    if (b->used && (size >= half.largest || size < 8 * half.step)) return 1;
    if (b->widest < trust.gap) return 0;
    for (int j = 0; j < SUBS; ++j) {
        if (b->used >> j & 1 && __builtin_popcount(b->present[j]) <= 4) return 1;
    }
    return 0;
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
