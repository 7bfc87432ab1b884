/* AVX2 path of Q3_K. */
#include "kq.h"

#if KQ_X86
#include "kq_q3_k.h"
#include "kq_rows.h"

void kq_q3_k_row_avx2(const kq_row *row) {
    encode_row(row);
}

void kq_q3_k_floats_avx2(const kq_float_row *row) {
    encode_float_row(row);
}
#endif
