/* AVX-512 path of Q2_K. */
#include "kq.h"

#if KQ_X86
#include "kq_q2_k.h"
#include "kq_rows.h"

void kq_q2_k_row_avx512(const kq_row *row) {
    encode_row(row);
}

void kq_q2_k_floats_avx512(const kq_float_row *row) {
    encode_float_row(row);
}
#endif
