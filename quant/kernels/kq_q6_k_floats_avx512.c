/* BF16 and F32 to Q6_K, for AVX-512. */
#include "kq.h"

#if KQ_X86
#include "kq_q6_k_floats.h"
#include "kq_rows.h"

void kq_q6_k_floats_avx512(const kq_float_row *row) {
    encode_float_row(row);
}
#endif
