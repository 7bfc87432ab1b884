/* BF16 and F32 to Q6_K, for any processor. */
#include "kq_q6_k_floats.h"
#include "kq_rows.h"

void kq_q6_k_floats(const kq_float_row *row) {
    encode_float_row(row);
}
