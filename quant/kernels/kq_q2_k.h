/* MXFP4 to Q2_K: 256 weights d * scale[j] * q - dmin * min[j], j one of 16 sub-blocks of 16, 4-bit scales and minima,
 * 0 <= q <= 3. */
#define SUBS 16
#define TOP 3
#define INDEX_TOP 15
#define CLASSES kq_classes_q2_k
#define CLASSES_WEIGHTED kq_classes_q2_k_weighted
#define MOST_GROUPS 1
#define SHIFTS 0
#define TRIALS kq_trials_q2_k
#define TYPE KQ_TYPE_Q2_K
#include "kq_affine.h"

static const kq_trust trust = {0.045f, 0.018f, 3, 32};
static const kq_effort effort = {2, 2, 4, 2, 1.04f}, effort_weighted = {3, 4, 8, 4, 1.02f};

/* Quants of the sub-blocks first, first + 2, first + 4, first + 6, two bits each, in 16 bytes. */
KQ_INLINE void pack_four(const uint8_t *packed, uint8_t (*quants)[16], int first, uint8_t *out) {
#if KQ_LANES > 4
    __m128i nibble = _mm_set1_epi8(15), even = _mm_setzero_si128(), odd = even;
    for (int i = 0; i < 4; ++i) {
        int j = first + 2 * i;
        __m128i codes = _mm_loadl_epi64((const __m128i *)(packed + 8 * j));
        __m128i table = _mm_slli_epi16(_mm_load_si128((const __m128i *)quants[j]), 2 * i);
        even = _mm_or_si128(even, _mm_shuffle_epi8(table, _mm_and_si128(codes, nibble)));
        odd = _mm_or_si128(odd, _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(codes, 4), nibble)));
    }
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(even, odd));
#else
    uint8_t table[4][16];
    for (int i = 0; i < 4; ++i) {
        for (int c = 0; c < 16; ++c) table[i][c] = (uint8_t)(quants[first + 2 * i][c] << 2 * i);
    }
    for (int k = 0; k < 16; ++k) {
        int bits = 0;
        for (int i = 0; i < 4; ++i) {
            uint8_t pair = packed[8 * (first + 2 * i) + k / 2];
            bits |= table[i][k & 1 ? pair >> 4 : pair & 15];
        }
        out[k] = (uint8_t)bits;
    }
#endif
}

KQ_INLINE void pack_head(const kq_choice *choice, int exponent, kq_block_q2_k *out) {
    out->d = kq_half_from_double(choice->d * kq_pow2(exponent - 128));
    out->dmin = kq_half_from_double(choice->dmin * kq_pow2(exponent - 128));
    for (int j = 0; j < SUBS; ++j) out->scales[j] = (uint8_t)((int)choice->scales[j] | (int)choice->minima[j] << 4);
}

static void encode_row(const kq_row *row) {
    kq_block_q2_k *out = (kq_block_q2_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_solution found;
        if (row->weights) solve(row, i, 1, effort_weighted, trust, &found);
        else solve(row, i, 0, effort, trust, &found);
        pack_head(&found.choice, found.codes.exponent, out + i);
        const uint8_t *packed = row->packed + KQ_SUPER / 2 * i;
        for (int k = 0; k < 4; ++k) pack_four(packed, found.quants, 8 * (k / 2) + k % 2, out[i].qs + 16 * k);
    }
}

#define FIRST_SPREAD -0.6f
#define SPREAD_STEP 0.2f
#define SPREADS 14
#include "kq_affine_floats.h"

static void encode_float_row(const kq_float_row *row) {
    kq_block_q2_k *out = (kq_block_q2_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_float_solution found;
        solve_floats(row, i, effort, &found);
        pack_head(&found.choice, found.exponent, out + i);
        for (int k = 0; k < 64; ++k) {
            const uint8_t *q = found.quants + k / 32 * 128 + k % 32;
            out[i].qs[k] = (uint8_t)(q[0] | q[32] << 2 | q[64] << 4 | q[96] << 6);
        }
    }
}
