/* Q3_K: the codec, and its path for any processor. */
#include "kq_q3_k.h"

#include "kq_rows.h"

const kq_codec kq_codec_q3_k = {
    .type = KQ_TYPE_Q3_K,
    .block = KQ_SUPER,
    .bytes = sizeof(kq_block_q3_k),
    .prepare = kq_prepare_importance,
    .row =
        {
            [KQ_SCALAR] = encode_row,
#if KQ_X86
            [KQ_AVX2] = kq_q3_k_row_avx2,
            [KQ_AVX512] = kq_q3_k_row_avx512,
#endif
        },
    .float_row =
        {
            [KQ_SCALAR] = encode_float_row,
#if KQ_X86
            [KQ_AVX2] = kq_q3_k_floats_avx2,
            [KQ_AVX512] = kq_q3_k_floats_avx512,
#endif
        },
};
