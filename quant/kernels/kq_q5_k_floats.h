/* BF16 and F32 to Q5_K: 256 weights d * scale[j] * q - dmin * min[j], j one of 8 sub-blocks of 32, 6-bit scales and
 * minima, 0 <= q <= 31. */
#define SUBS 8
#define TOP 31
#define INDEX_TOP 63
#define SHIFTS 0
#define TRIALS kq_trials_q4_k
#define FIRST_SPREAD -0.9f
#define SPREAD_STEP 0.3f
#define SPREADS 8
#include "kq_affine_search.h"
#include "kq_six_bits.h"

#include "kq_affine_floats.h"

static const kq_effort effort = {2, 2, 6, 2, 1.03f};

static void encode_float_row(const kq_float_row *row) {
    kq_block_q5_k *out = (kq_block_q5_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i, ++out) {
        kq_float_solution found;
        solve_floats(row, i, effort, &found);
        const kq_choice *choice = &found.choice;
        out->d = kq_half_from_double(choice->d * kq_pow2(found.exponent - 128));
        out->dmin = kq_half_from_double(choice->dmin * kq_pow2(found.exponent - 128));
        pack_scales(choice, out->scales);
        for (int k = 0; k < 128; ++k) {
            const uint8_t *low = found.quants + k / 32 * 64 + k % 32;
            out->qs[k] = (uint8_t)((low[0] & 15) | low[32] << 4);
        }
        for (int k = 0; k < 32; ++k) {
            int bits = 0;
            for (int group = 0; group < 8; ++group) bits |= found.quants[32 * group + k] >> 4 << group;
            out->qh[k] = (uint8_t)bits;
        }
    }
}
