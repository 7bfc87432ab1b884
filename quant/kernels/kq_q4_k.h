/* MXFP4 to Q4_K: 256 weights d * scale[j] * q - dmin * min[j], j one of 8 sub-blocks of 32, 6-bit scales and minima,
 * 0 <= q <= 15. */
#define SUBS 8
#define TOP 15
#define INDEX_TOP 63
#define CLASSES kq_classes_q4_k
#define CLASSES_WEIGHTED kq_classes_q4_k_weighted
#define MOST_GROUPS 2
#define SHIFTS 1
#define TRIALS kq_trials_q4_k
#define TYPE KQ_TYPE_Q4_K
#include "kq_affine.h"
#include "kq_six_bits.h"

static const kq_trust trust = {0, 0, 1, 20};
static const kq_effort effort = {2, 2, 6, 2, 1.03f}, effort_weighted = {3, 4, 8, 4, 1.02f};

/* Quants of two sub-blocks, in the low and the high nibbles of 32 bytes. */
KQ_INLINE void pack_pair(const uint8_t *packed, const uint8_t *low, const uint8_t *high, uint8_t *out) {
#if KQ_LANES > 4
    __m128i nibble = _mm_set1_epi8(15), first = _mm_loadu_si128((const __m128i *)packed);
    __m128i second = _mm_loadu_si128((const __m128i *)(packed + 16)), table = _mm_load_si128((const __m128i *)low);
    __m128i shifted = _mm_slli_epi16(_mm_load_si128((const __m128i *)high), 4);
    __m128i even = _mm_or_si128(_mm_shuffle_epi8(table, _mm_and_si128(first, nibble)),
                                _mm_shuffle_epi8(shifted, _mm_and_si128(second, nibble)));
    first = _mm_srli_epi16(first, 4);
    second = _mm_srli_epi16(second, 4);
    __m128i odd = _mm_or_si128(_mm_shuffle_epi8(table, _mm_and_si128(first, nibble)),
                               _mm_shuffle_epi8(shifted, _mm_and_si128(second, nibble)));
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128((__m128i *)(out + 16), _mm_unpackhi_epi8(even, odd));
#else
    for (int i = 0; i < 16; ++i) {
        uint8_t a = packed[i], b = packed[16 + i];
        out[2 * i] = (uint8_t)(low[a & 15] | high[b & 15] << 4);
        out[2 * i + 1] = (uint8_t)(low[a >> 4] | high[b >> 4] << 4);
    }
#endif
}

KQ_INLINE void pack_head(const kq_choice *choice, int exponent, kq_block_q4_k *out) {
    out->d = kq_half_from_double(choice->d * kq_pow2(exponent - 128));
    out->dmin = kq_half_from_double(choice->dmin * kq_pow2(exponent - 128));
    pack_scales(choice, out->scales);
}

static void encode_row(const kq_row *row) {
    kq_block_q4_k *out = (kq_block_q4_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_solution found;
        if (row->weights) solve(row, i, 1, effort_weighted, trust, &found);
        else solve(row, i, 0, effort, trust, &found);
        pack_head(&found.choice, found.codes.exponent, out + i);
        const uint8_t *packed = row->packed + KQ_SUPER / 2 * i;
        for (int k = 0; k < 4; ++k) {
            pack_pair(packed + 32 * k, found.quants[2 * k], found.quants[2 * k + 1], out[i].qs + 32 * k);
        }
    }
}

#define FIRST_SPREAD -0.9f
#define SPREAD_STEP 0.15f
#define SPREADS 14
#include "kq_affine_floats.h"

static void encode_float_row(const kq_float_row *row) {
    kq_block_q4_k *out = (kq_block_q4_k *)row->out;
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_float_solution found;
        solve_floats(row, i, effort, &found);
        pack_head(&found.choice, found.exponent, out + i);
        for (int k = 0; k < 128; ++k) {
            const uint8_t *low = found.quants + k / 32 * 64 + k % 32;
            out[i].qs[k] = (uint8_t)(low[0] | low[32] << 4);
        }
    }
}
