/* What the instruction-set paths of MXFP4, Q8_0, Q6_K and Q5_K share with the scalar code that defines them. */
#ifndef KQ_EXACT_H
#define KQ_EXACT_H

#include "kq.h"

/* E8M0 bytes whose unit 2^(s - 128) is the smallest and the largest power of two in fp16: 2^-24, 2^15. */
enum { KQ_BOTTOM = 104, KQ_TOP = 143 };

/* Q8_0 holds every block with a scale byte in this range. */
enum { KQ_Q8_0_FIRST = KQ_BOTTOM, KQ_Q8_0_LAST = 146 };

/* Largest base exponent of Q5_K: 12 * 2^(s - 128) must be an fp16 number. */
enum { KQ_Q5_K_TOP = 140 };

/* Steps above the base exponent that a path of its own handles; one more is left to the scalar code of Q6_K. */
enum { KQ_Q6_K_STEPS = 7, KQ_Q5_K_STEPS = 5 };

/* One block of a row, by the definition; the paths call these for whatever they do not handle themselves. */
void kq_q8_0_block(const kq_row *row, int64_t block);
void kq_q6_k_block(const kq_row *row, int64_t block);
void kq_q5_k_block(const kq_row *row, int64_t block);

/* d, dmin and the packed 6-bit numbers of a Q5_K super-block: byte i of `scales` is both scale and minimum i. */
static inline void kq_q5_k_head(uint64_t scales, int base, kq_block_q5_k *out) {
    uint32_t front = (uint32_t)scales, back = (uint32_t)(scales >> 32);
    uint32_t mixed = front | (back & 0x30303030u) << 2;
    uint32_t last = (back & 0x0f0f0f0fu) | (back & 0x0f0f0f0fu) << 4;
    /* 12 * 2^e is 1.5 * 2^(e + 3): one mantissa bit where it is normal, two bits in a row below. */
    int e = base - 128;
    out->d = kq_half_pow2(e);
    out->dmin = e + 3 >= -14 ? (uint16_t)((e + 18) << 10 | 0x200) : (uint16_t)(12u << (e + 24));
    memcpy(out->scales, &mixed, 4);
    memcpy(out->scales + 4, &mixed, 4);
    memcpy(out->scales + 8, &last, 4);
}

#if KQ_X86
void kq_mxfp4_row_avx2(const kq_row *row);
void kq_mxfp4_row_avx512(const kq_row *row);
void kq_q8_0_row_avx2(const kq_row *row);
void kq_q8_0_row_avx512(const kq_row *row);
void kq_q6_k_row_avx2(const kq_row *row);
void kq_q6_k_row_avx512(const kq_row *row);
void kq_q5_k_row_avx2(const kq_row *row);
void kq_q5_k_row_avx512(const kq_row *row);
#endif
#if KQ_NEON
void kq_mxfp4_row_neon(const kq_row *row);
void kq_q8_0_row_neon(const kq_row *row);
void kq_q6_k_row_neon(const kq_row *row);
void kq_q5_k_row_neon(const kq_row *row);
#endif

#endif
