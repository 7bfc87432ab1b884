/* BF16 and F32 to Q5_K, for any processor. */
#include "kq_q5_k_floats.h"
#include "kq_rows.h"

void kq_q5_k_floats(const kq_float_row *row) {
    encode_float_row(row);
}
