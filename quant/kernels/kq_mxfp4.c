/* MXFP4 to ggml's block_mxfp4: the same codes and scale bytes in another order. */
#include "kq_exact.h"

static void row_scalar(const kq_row *row) {
    int64_t blocks = row->cols / KQ_BLOCK;
    kq_block_mxfp4 *out = (kq_block_mxfp4 *)row->out;
    const uint8_t *packed = row->packed;
    for (int64_t b = 0; b < blocks; ++b, packed += 16) {
        out[b].e = row->scales[b];
        for (int j = 0; j < 8; ++j) {
            uint8_t low = packed[j], high = packed[j + 8];
            out[b].qs[2 * j] = (uint8_t)((low & 15) | high << 4);
            out[b].qs[2 * j + 1] = (uint8_t)(low >> 4 | (high & 0xf0));
        }
    }
    row->stats->blocks += blocks;
    row->stats->exact += blocks;
}

const kq_codec kq_codec_mxfp4 = {
    .type = KQ_TYPE_MXFP4,
    .block = KQ_BLOCK,
    .bytes = sizeof(kq_block_mxfp4),
    .row =
        {
            [KQ_SCALAR] = row_scalar,
#if KQ_X86
            [KQ_AVX2] = kq_mxfp4_row_avx2,
            [KQ_AVX512] = kq_mxfp4_row_avx512,
#endif
#if KQ_NEON
            [KQ_ISA_NEON] = kq_mxfp4_row_neon,
#endif
        },
};
