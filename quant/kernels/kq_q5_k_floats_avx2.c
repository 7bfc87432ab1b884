/* BF16 and F32 to Q5_K, for AVX2. */
#include "kq.h"

#if KQ_X86
#include "kq_q5_k_floats.h"
#include "kq_rows.h"

void kq_q5_k_floats_avx2(const kq_float_row *row) {
    encode_float_row(row);
}
#endif
