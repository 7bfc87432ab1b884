/* AVX-512 paths of MXFP4, Q8_0, Q6_K and Q5_K: as the AVX2 ones, four blocks of 32 to a register. */
#include "kq_exact.h"

#if KQ_X86
#include <immintrin.h>

/* Codes of four blocks: lane i of `first` holds columns 0..15 of block i, of `second` columns 16..31. */
typedef struct { __m512i first, second; } codes;

static inline codes unpack_codes(__m512i pairs) {
    __m512i mask = _mm512_set1_epi8(15);
    __m512i even = _mm512_and_si512(pairs, mask), odd = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
    return (codes){_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd)};
}

static inline __m512i level_table(int offset) {
    __m128i levels = _mm_loadu_si128((const __m128i *)kq_level);
    return _mm512_broadcast_i32x4(_mm_add_epi8(levels, _mm_set1_epi8((char)offset)));
}

/* Lanes a and b of both registers of `q`, as first(a) second(a) first(b) second(b): two whole blocks of 32. */
static inline __m512i blocks_01(codes q) {
    return _mm512_permutex2var_epi64(q.first, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), q.second);
}
static inline __m512i blocks_23(codes q) {
    return _mm512_permutex2var_epi64(q.first, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), q.second);
}
static inline __m512i blocks_02(codes q) {
    return _mm512_permutex2var_epi64(q.first, _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0), q.second);
}
static inline __m512i blocks_13(codes q) {
    return _mm512_permutex2var_epi64(q.first, _mm512_set_epi64(15, 14, 7, 6, 11, 10, 3, 2), q.second);
}

static inline codes look_up(__m512i table, codes c) {
    return (codes){_mm512_shuffle_epi8(table, c.first), _mm512_shuffle_epi8(table, c.second)};
}

/* low | high << shift, where no bit leaves its byte. */
static inline __m512i merge(__m512i low, __m512i high, int shift) {
    return _mm512_or_si512(low, _mm512_slli_epi16(high, (unsigned)shift));
}

void kq_mxfp4_row_avx512(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK, b = 0;
    uint8_t *out = row->out;
    /* Bytes of four output blocks, 68 of them: scale bytes from positions 64.. of the pair (quants, scales). */
    for (; b + 4 <= blocks; b += 4, out += 4 * sizeof(kq_block_mxfp4)) {
        codes c = unpack_codes(_mm512_loadu_si512(row->packed + 16 * b));
        __m512i quants = merge(c.first, c.second, 4);
        for (int i = 0; i < 4; ++i) out[17 * i] = row->scales[b + i];
        _mm_storeu_si128((__m128i *)(out + 1), _mm512_castsi512_si128(quants));
        _mm_storeu_si128((__m128i *)(out + 18), _mm512_extracti32x4_epi32(quants, 1));
        _mm_storeu_si128((__m128i *)(out + 35), _mm512_extracti32x4_epi32(quants, 2));
        _mm_storeu_si128((__m128i *)(out + 52), _mm512_extracti32x4_epi32(quants, 3));
    }
    row->stats->blocks += b;
    row->stats->exact += b;
    if (b == blocks) return;
    kq_row rest = *row;
    rest.packed += 16 * b;
    rest.scales += b;
    rest.cols -= KQ_BLOCK * b;
    rest.out = out;
    kq_mxfp4_row_avx2(&rest);
}

void kq_q8_0_row_avx512(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK, b = 0;
    kq_block_q8_0 *out = (kq_block_q8_0 *)row->out;
    __m512i table = level_table(0);
    for (; b + 4 <= blocks; b += 4) {
        const uint8_t *scales = row->scales + b;
        int outside = 0;
        for (int i = 0; i < 4; ++i) outside |= (uint8_t)(scales[i] - KQ_BOTTOM) > KQ_TOP - KQ_BOTTOM;
        if (outside) {
            for (int i = 0; i < 4; ++i) kq_q8_0_block(row, b + i);
            continue;
        }
        codes q = look_up(table, unpack_codes(_mm512_loadu_si512(row->packed + 16 * b)));
        __m512i front = blocks_01(q), back = blocks_23(q);
        for (int i = 0; i < 4; ++i) out[b + i].d = kq_half_pow2(scales[i] - 128);
        _mm256_storeu_si256((__m256i *)out[b].qs, _mm512_castsi512_si256(front));
        _mm256_storeu_si256((__m256i *)out[b + 1].qs, _mm512_extracti64x4_epi64(front, 1));
        _mm256_storeu_si256((__m256i *)out[b + 2].qs, _mm512_castsi512_si256(back));
        _mm256_storeu_si256((__m256i *)out[b + 3].qs, _mm512_extracti64x4_epi64(back, 1));
        row->stats->blocks += 4;
        row->stats->exact += 4;
    }
    for (; b < blocks; ++b) kq_q8_0_block(row, b);
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

void kq_q6_k_row_avx512(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q6_k *out = (kq_block_q6_k *)row->out;
    const __m128i powers = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, -128, -64, -32, -16, -8, -4, -2, -1);
    __m512i table = level_table(32), low4 = _mm512_set1_epi8(15), high2 = _mm512_set1_epi8(3);
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
        for (int half = 0; half < 2; ++half) {
            codes q = look_up(table, unpack_codes(_mm512_loadu_si512(row->packed + 128 * b + 64 * half)));
            __m512i front = blocks_01(q), back = blocks_23(q);
            __m512i low = merge(_mm512_and_si512(front, low4), _mm512_and_si512(back, low4), 4);
            _mm512_storeu_si512(out[b].ql + 64 * half, low);
            __m512i front_high = _mm512_and_si512(_mm512_srli_epi16(front, 4), high2);
            __m512i back_high = _mm512_and_si512(_mm512_srli_epi16(back, 4), high2);
            __m512i both = merge(front_high, back_high, 4);
            __m256i high = _mm256_or_si256(_mm512_castsi512_si256(both),
                                           _mm256_slli_epi16(_mm512_extracti64x4_epi64(both, 1), 2));
            _mm256_storeu_si256((__m256i *)(out[b].qh + 32 * half), high);
        }
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}

void kq_q5_k_row_avx512(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q5_k *out = (kq_block_q5_k *)row->out;
    const __m128i powers = _mm_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 16, 8, 4, 2, 1);
    __m512i table = level_table(12), low4 = _mm512_set1_epi8(15), bit = _mm512_set1_epi8(1);
    for (int64_t b = 0; b < blocks; ++b) {
        int base;
        __m128i steps;
        if (!base_and_steps(row->scales + 8 * b, KQ_Q5_K_TOP, KQ_Q5_K_STEPS, &base, &steps)) {
            kq_q5_k_block(row, b);
            continue;
        }
        kq_q5_k_head((uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(powers, steps)), base, &out[b]);
        __m256i high[2];
        for (int half = 0; half < 2; ++half) {
            codes q = look_up(table, unpack_codes(_mm512_loadu_si512(row->packed + 128 * b + 64 * half)));
            __m512i even = blocks_02(q), odd = blocks_13(q);
            __m512i low = merge(_mm512_and_si512(even, low4), _mm512_and_si512(odd, low4), 4);
            _mm512_storeu_si512(out[b].qs + 64 * half, low);
            __m512i bits = merge(_mm512_and_si512(_mm512_srli_epi16(even, 4), bit),
                                 _mm512_and_si512(_mm512_srli_epi16(odd, 4), bit), 1);
            high[half] = _mm256_or_si256(_mm512_castsi512_si256(bits),
                                         _mm256_slli_epi16(_mm512_extracti64x4_epi64(bits, 1), 2));
        }
        _mm256_storeu_si256((__m256i *)out[b].qh, _mm256_or_si256(high[0], _mm256_slli_epi16(high[1], 4)));
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}
#endif
