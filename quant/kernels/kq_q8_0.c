/* MXFP4 to Q8_0: int8 quants times one fp16 scale for 32 weights, the same 32 that share an MXFP4 scale.
 *
 * With d = 2^(s - 128) the quants are the doubled levels. fp16 holds 2^-24..2^15, that is s = 104..143; up to s = 146
 * d stays 2^15 and the quants are doubled up to three times (12 * 8 = 96 <= 127). Other blocks are fitted.
 */
#include "kq_exact.h"
#include "kq_fit.h"

static void fitted(const kq_row *row, int64_t b, kq_block_q8_0 *out) {
    kq_hist h;
    kq_fit fit;
    const uint8_t *packed = row->packed + 16 * b;
    /* 2^24 exceeds 128 * 65504. */
    int scale = kq_at_most(row->scales[b], 128 + 24);
    kq_histogram(packed, KQ_BLOCK, scale, row->importance ? row->importance + 32 * b : NULL, &h);
    kq_fit_scale(&h, 128, &fit);
    fit.q[8] = fit.q[0];
    out->d = fit.d;
    for (int i = 0; i < 16; ++i) {
        out->qs[2 * i] = fit.q[packed[i] & 15];
        out->qs[2 * i + 1] = fit.q[packed[i] >> 4];
    }
    row->stats->exact += fit.exact;
    row->stats->clipped += !fit.exact;
}

void kq_q8_0_block(const kq_row *row, int64_t b) {
    kq_block_q8_0 *out = (kq_block_q8_0 *)row->out + b;
    int scale = row->scales[b];
    row->stats->blocks += 1;
    if (scale < KQ_Q8_0_FIRST || scale > KQ_Q8_0_LAST) {
        fitted(row, b, out);
        return;
    }
    int shift = scale > KQ_TOP ? scale - KQ_TOP : 0;
    int8_t quant[KQ_CODES];
    for (int c = 0; c < KQ_CODES; ++c) quant[c] = (int8_t)(kq_level[c] * (1 << shift));
    out->d = kq_half_pow2(scale - shift - 128);
    const uint8_t *packed = row->packed + 16 * b;
    for (int i = 0; i < 16; ++i) {
        out->qs[2 * i] = quant[packed[i] & 15];
        out->qs[2 * i + 1] = quant[packed[i] >> 4];
    }
    row->stats->exact += 1;
}

static void row_scalar(const kq_row *row) {
    for (int64_t b = 0; b < row->cols / KQ_BLOCK; ++b) kq_q8_0_block(row, b);
}

const kq_codec kq_codec_q8_0 = {
    .type = KQ_TYPE_Q8_0,
    .block = KQ_BLOCK,
    .bytes = sizeof(kq_block_q8_0),
    .row =
        {
            [KQ_SCALAR] = row_scalar,
#if KQ_X86
            [KQ_AVX2] = kq_q8_0_row_avx2,
            [KQ_AVX512] = kq_q8_0_row_avx512,
#endif
#if KQ_NEON
            [KQ_ISA_NEON] = kq_q8_0_row_neon,
#endif
        },
};
