/* NEON paths of MXFP4, Q8_0, Q6_K and Q5_K: table look-ups by code, no arithmetic that could round. */
#include "kq_exact.h"

#if KQ_NEON
#include <arm_neon.h>

/* Columns 0..15 and 16..31 of a block, one a byte. */
typedef uint8x16x2_t columns;

static inline columns unpack_codes(const uint8_t *packed) {
    uint8x16_t pairs = vld1q_u8(packed);
    return vzipq_u8(vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4));
}

/* Doubled levels plus `offset`, by code. */
static inline uint8x16_t level_table(int offset) {
    return vaddq_u8(vreinterpretq_u8_s8(vld1q_s8(kq_level)), vdupq_n_u8((uint8_t)offset));
}

static inline columns look_up(uint8x16_t table, columns codes) {
    return (columns){{vqtbl1q_u8(table, codes.val[0]), vqtbl1q_u8(table, codes.val[1])}};
}

void kq_mxfp4_row_neon(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK;
    uint8_t *out = row->out;
    for (int64_t b = 0; b < blocks; ++b, out += sizeof(kq_block_mxfp4)) {
        columns codes = unpack_codes(row->packed + 16 * b);
        out[0] = row->scales[b];
        vst1q_u8(out + 1, vsliq_n_u8(codes.val[0], codes.val[1], 4));
    }
    row->stats->blocks += blocks;
    row->stats->exact += blocks;
}

void kq_q8_0_row_neon(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK;
    kq_block_q8_0 *out = (kq_block_q8_0 *)row->out;
    uint8x16_t table = level_table(0);
    for (int64_t b = 0; b < blocks; ++b) {
        int scale = row->scales[b];
        if (scale < KQ_BOTTOM || scale > KQ_TOP) {
            kq_q8_0_block(row, b);
            continue;
        }
        columns q = look_up(table, unpack_codes(row->packed + 16 * b));
        out[b].d = kq_half_pow2(scale - 128);
        vst1q_s8(out[b].qs, vreinterpretq_s8_u8(q.val[0]));
        vst1q_s8(out[b].qs + 16, vreinterpretq_s8_u8(q.val[1]));
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}

/* Steps of the 8 scale bytes above the base exponent and the base; 0 where the range does not hold. */
static inline int base_and_steps(const uint8_t *scales, int top, int most, int *base, uint8x8_t *steps) {
    uint8x8_t bytes = vld1_u8(scales);
    int low = vminv_u8(bytes);
    *base = low > top ? top : low;
    *steps = vqsub_u8(bytes, vdup_n_u8((uint8_t)*base));
    return *base >= KQ_BOTTOM && vmaxv_u8(*steps) <= most;
}

void kq_q6_k_row_neon(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q6_k *out = (kq_block_q6_k *)row->out;
    uint8x16_t table = level_table(32), low4 = vdupq_n_u8(15);
    for (int64_t b = 0; b < blocks; ++b) {
        int base;
        uint8x8_t steps;
        if (!base_and_steps(row->scales + 8 * b, KQ_TOP, KQ_Q6_K_STEPS, &base, &steps)) {
            kq_q6_k_block(row, b);
            continue;
        }
        int8x8_t scales = vneg_s8(vshl_s8(vdup_n_s8(1), vreinterpret_s8_u8(steps)));
        int8x8x2_t doubled = vzip_s8(scales, scales);
        vst1_s8(out[b].scales, doubled.val[0]);
        vst1_s8(out[b].scales + 8, doubled.val[1]);
        out[b].d = kq_half_pow2(base - 128) | 0x8000;
        const uint8_t *packed = row->packed + 128 * b;
        for (int half = 0; half < 2; ++half, packed += 64) {
            columns q0 = look_up(table, unpack_codes(packed)), q1 = look_up(table, unpack_codes(packed + 16));
            columns q2 = look_up(table, unpack_codes(packed + 32)), q3 = look_up(table, unpack_codes(packed + 48));
            for (int i = 0; i < 2; ++i) {
                vst1q_u8(out[b].ql + 64 * half + 16 * i, vsliq_n_u8(vandq_u8(q0.val[i], low4), q2.val[i], 4));
                vst1q_u8(out[b].ql + 64 * half + 32 + 16 * i, vsliq_n_u8(vandq_u8(q1.val[i], low4), q3.val[i], 4));
                /* The quants have six bits, so shifted by four only two are left. */
                uint8x16_t high = vsliq_n_u8(vshrq_n_u8(q0.val[i], 4), vshrq_n_u8(q1.val[i], 4), 2);
                high = vsliq_n_u8(high, vshrq_n_u8(q2.val[i], 4), 4);
                high = vsliq_n_u8(high, vshrq_n_u8(q3.val[i], 4), 6);
                vst1q_u8(out[b].qh + 32 * half + 16 * i, high);
            }
        }
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}

void kq_q5_k_row_neon(const kq_row *row) {
    int64_t blocks = row->cols / KQ_SUPER;
    kq_block_q5_k *out = (kq_block_q5_k *)row->out;
    uint8x16_t table = level_table(12), low4 = vdupq_n_u8(15);
    for (int64_t b = 0; b < blocks; ++b) {
        int base;
        uint8x8_t steps;
        if (!base_and_steps(row->scales + 8 * b, KQ_Q5_K_TOP, KQ_Q5_K_STEPS, &base, &steps)) {
            kq_q5_k_block(row, b);
            continue;
        }
        uint8x8_t scales = vshl_u8(vdup_n_u8(1), vreinterpret_s8_u8(steps));
        kq_q5_k_head(vget_lane_u64(vreinterpret_u64_u8(scales), 0), base, &out[b]);
        const uint8_t *packed = row->packed + 128 * b;
        uint8x16_t high[2] = {vdupq_n_u8(0), vdupq_n_u8(0)};
        for (int pair = 0; pair < 4; ++pair, packed += 32) {
            columns q0 = look_up(table, unpack_codes(packed)), q1 = look_up(table, unpack_codes(packed + 16));
            for (int i = 0; i < 2; ++i) {
                vst1q_u8(out[b].qs + 32 * pair + 16 * i, vsliq_n_u8(vandq_u8(q0.val[i], low4), q1.val[i], 4));
                uint8x16_t bits = vsliq_n_u8(vshrq_n_u8(q0.val[i], 4), vshrq_n_u8(q1.val[i], 4), 1);
                high[i] = vorrq_u8(high[i], vshlq_u8(bits, vdupq_n_s8((int8_t)(2 * pair))));
            }
        }
        vst1q_u8(out[b].qh, high[0]);
        vst1q_u8(out[b].qh + 16, high[1]);
        row->stats->blocks += 1;
        row->stats->exact += 1;
    }
}
#endif
