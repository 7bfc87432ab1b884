/* AVX-512 path of Q4_K. */
#include "kq.h"

#if KQ_X86
#include "kq_q4_k.h"
#include "kq_rows.h"

void kq_q4_k_row_avx512(const kq_row *row) {
    encode_row(row);
}

void kq_q4_k_floats_avx512(const kq_float_row *row) {
    encode_float_row(row);
}
#endif
