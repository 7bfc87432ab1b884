/* BF16 and F32 to Q6_K: 256 weights d * scale[j] * q, j one of 16 sub-blocks of 16, scales -128..127, -32 <= q <= 31. */
#define SUBS 16
#define LEVELS 32
#define INDEX_LOW -128
#define INDEX_TOP 127
#define TRIALS kq_trials_q6_k
#define SPREAD_STEP 0.1f
#define SPREADS 9
#include "kq_signed_search.h"

#include "kq_signed_floats.h"

static void encode_float_row(const kq_float_row *row) {
    kq_block_q6_k *out = (kq_block_q6_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i, ++out) {
        kq_float_solution found;
        solve_floats(row, i, &found);
        out->d = kq_half_from_double(found.choice.d * kq_pow2(found.exponent - 128));
        for (int j = 0; j < SUBS; ++j) out->scales[j] = (int8_t)found.choice.scales[j];
        for (int half = 0; half < 2; ++half) {
            const uint8_t *q = found.quants + 128 * half;
            for (int k = 0; k < 32; ++k) {
                out->ql[64 * half + k] = (uint8_t)((q[k] & 15) | q[k + 64] << 4);
                out->ql[64 * half + 32 + k] = (uint8_t)((q[k + 32] & 15) | q[k + 96] << 4);
                out->qh[32 * half + k] =
                    (uint8_t)(q[k] >> 4 | q[k + 32] >> 4 << 2 | q[k + 64] >> 4 << 4 | q[k + 96] >> 4 << 6);
            }
        }
    }
}
