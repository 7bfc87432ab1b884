/* AVX2 paths of MXFP4, Q8_0, Q6_K and Q5_K: shuffles by code, no arithmetic that could round. */
#include "kq_exact.h"

#if KQ_X86
#include <immintrin.h>

/* The 32 codes of a block in column order, one a byte. */
static inline __m256i unpack_codes(const uint8_t *packed) {
    __m128i pairs = _mm_loadu_si128((const __m128i *)packed);
    __m128i mask = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(pairs, mask), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask);
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

static inline __m256i shift_left(__m256i bytes, int count) {
    return _mm256_slli_epi16(bytes, count); /* callers shift no bit out of its byte */
}

/* Doubled levels plus `offset`, by code, in both lanes. */
static inline __m256i level_table(int offset) {
    __m128i levels = _mm_loadu_si128((const __m128i *)kq_level);
    return _mm256_broadcastsi128_si256(_mm_add_epi8(levels, _mm_set1_epi8((char)offset)));
}

void kq_mxfp4_row_avx2(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK;
    uint8_t *out = row->out;
    __m128i mask = _mm_set1_epi8(15);
    for (int64_t b = 0; b < blocks; ++b, out += sizeof(kq_block_mxfp4)) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)(row->packed + 16 * b));
        __m128i even = _mm_and_si128(pairs, mask), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask);
        __m128i low = _mm_unpacklo_epi8(even, odd), high = _mm_unpackhi_epi8(even, odd);
        out[0] = row->scales[b];
        _mm_storeu_si128((__m128i *)(out + 1), _mm_or_si128(low, _mm_slli_epi16(high, 4)));
    }
    row->stats->blocks += blocks;
    row->stats->exact += blocks;
}

void kq_q8_0_row_avx2(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK;
    kq_block_q8_0 *out = (kq_block_q8_0 *)row->out;
    __m256i table = level_table(0);
    for (int64_t b = 0; b < blocks; ++b) {
        int scale = row->scales[b];
        if (scale < KQ_BOTTOM || scale > KQ_TOP) {
            kq_q8_0_block(row, b);
            continue;
        }
        out[b].d = kq_half_pow2(scale - 128);
        _mm256_storeu_si256((__m256i *)out[b].qs, _mm256_shuffle_epi8(table, unpack_codes(row->packed + 16 * b)));
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}

/* Steps of the 8 scale bytes above the base exponent, one a byte, and the base; 0 where the range does not hold. */
static inline int base_and_steps(const uint8_t *scales, int top, int most, int *base, __m128i *steps) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)scales);
    int low = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_cvtepu8_epi16(bytes))) & 0xffff;
    *base = low > top ? top : low;
    *steps = _mm_subs_epu8(bytes, _mm_set1_epi8((char)*base));
    __m128i excess = _mm_subs_epu8(*steps, _mm_set1_epi8((char)most));
    return *base >= KQ_BOTTOM && _mm_cvtsi128_si64(excess) == 0;
}

void kq_q6_k_row_avx2(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q6_k *out = (kq_block_q6_k *)row->out;
    const __m128i powers = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, -128, -64, -32, -16, -8, -4, -2, -1);
    __m256i table = level_table(32), low4 = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(3);
    for (int64_t b = 0; b < blocks; ++b) {
        int base;
        __m128i steps;
        if (!base_and_steps(row->scales + 8 * b, KQ_TOP, KQ_Q6_K_STEPS, &base, &steps)) {
            kq_q6_k_block(row, b);
            continue;
        }
        __m128i scales = _mm_shuffle_epi8(powers, steps);
        _mm_storeu_si128((__m128i *)out[b].scales, _mm_unpacklo_epi8(scales, scales));
        out[b].d = kq_half_pow2(base - 128) | 0x8000;
        const uint8_t *packed = row->packed + 128 * b;
        for (int half = 0; half < 2; ++half, packed += 64) {
            __m256i q0 = _mm256_shuffle_epi8(table, unpack_codes(packed));
            __m256i q1 = _mm256_shuffle_epi8(table, unpack_codes(packed + 16));
            __m256i q2 = _mm256_shuffle_epi8(table, unpack_codes(packed + 32));
            __m256i q3 = _mm256_shuffle_epi8(table, unpack_codes(packed + 48));
            __m256i first = _mm256_or_si256(_mm256_and_si256(q0, low4), shift_left(_mm256_and_si256(q2, low4), 4));
            __m256i second = _mm256_or_si256(_mm256_and_si256(q1, low4), shift_left(_mm256_and_si256(q3, low4), 4));
            _mm256_storeu_si256((__m256i *)(out[b].ql + 64 * half), first);
            _mm256_storeu_si256((__m256i *)(out[b].ql + 64 * half + 32), second);
            __m256i h0 = _mm256_and_si256(_mm256_srli_epi16(q0, 4), high2);
            __m256i h1 = _mm256_and_si256(_mm256_srli_epi16(q1, 4), high2);
            __m256i h2 = _mm256_and_si256(_mm256_srli_epi16(q2, 4), high2);
            __m256i h3 = _mm256_and_si256(_mm256_srli_epi16(q3, 4), high2);
            __m256i high = _mm256_or_si256(_mm256_or_si256(h0, shift_left(h1, 2)),
                                           _mm256_or_si256(shift_left(h2, 4), shift_left(h3, 6)));
            _mm256_storeu_si256((__m256i *)(out[b].qh + 32 * half), high);
        }
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}

void kq_q5_k_row_avx2(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q5_k *out = (kq_block_q5_k *)row->out;
    const __m128i powers = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 16, 8, 4, 2, 1);
    __m256i table = level_table(12), low4 = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(1);
    for (int64_t b = 0; b < blocks; ++b) {
        int base;
        __m128i steps;
        if (!base_and_steps(row->scales + 8 * b, KQ_Q5_K_TOP, KQ_Q5_K_STEPS, &base, &steps)) {
            kq_q5_k_block(row, b);
            continue;
        }
        kq_q5_k_head((uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(powers, steps)), base, &out[b]);
        const uint8_t *packed = row->packed + 128 * b;
        __m256i high = _mm256_setzero_si256();
        for (int pair = 0; pair < 4; ++pair, packed += 32) {
            __m256i q0 = _mm256_shuffle_epi8(table, unpack_codes(packed));
            __m256i q1 = _mm256_shuffle_epi8(table, unpack_codes(packed + 16));
            __m256i low = _mm256_or_si256(_mm256_and_si256(q0, low4), shift_left(_mm256_and_si256(q1, low4), 4));
            _mm256_storeu_si256((__m256i *)(out[b].qs + 32 * pair), low);
            __m256i h0 = _mm256_and_si256(_mm256_srli_epi16(q0, 4), bit);
            __m256i h1 = _mm256_and_si256(_mm256_srli_epi16(q1, 4), bit);
            __m256i bits = _mm256_or_si256(h0, shift_left(h1, 1));
            high = _mm256_or_si256(high, _mm256_sll_epi16(bits, _mm_cvtsi32_si128(2 * pair)));
        }
        _mm256_storeu_si256((__m256i *)out[b].qh, high);
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}
#endif
