/* The row functions of the searched types for single instruction sets. */
#ifndef KQ_ROWS_H
#define KQ_ROWS_H

#include "kq.h"

#if KQ_X86
void kq_q4_k_row_avx2(const kq_row *row);
void kq_q4_k_row_avx512(const kq_row *row);
void kq_q3_k_row_avx2(const kq_row *row);
void kq_q3_k_row_avx512(const kq_row *row);
void kq_q2_k_row_avx2(const kq_row *row);
void kq_q2_k_row_avx512(const kq_row *row);
void kq_q4_k_floats_avx2(const kq_float_row *row);
void kq_q4_k_floats_avx512(const kq_float_row *row);
void kq_q3_k_floats_avx2(const kq_float_row *row);
void kq_q3_k_floats_avx512(const kq_float_row *row);
void kq_q2_k_floats_avx2(const kq_float_row *row);
void kq_q2_k_floats_avx512(const kq_float_row *row);
void kq_q5_k_floats_avx2(const kq_float_row *row);
void kq_q5_k_floats_avx512(const kq_float_row *row);
void kq_q6_k_floats_avx2(const kq_float_row *row);
void kq_q6_k_floats_avx512(const kq_float_row *row);
#endif
void kq_q5_k_floats(const kq_float_row *row);
void kq_q6_k_floats(const kq_float_row *row);

#endif
