/* A super-block as ggml's encoders see it: columns and the weights that they give them, the sub-blocks side by side. In
 * single precision and in ggml's order of summation; units are changed by powers of two alone, which round nothing.
 * Included after kq_codes.h, with TYPE defined. */
#ifndef KQ_COLUMNS_H
#define KQ_COLUMNS_H

#include "kq_codes.h"

/* Columns and their weights, [column][sub-block], in units of the super-block. */
typedef struct { float x[SUB_SIZE][16] KQ_ALIGNED, w[SUB_SIZE][16] KQ_ALIGNED; } kq_columns;

/* 2^-e for v in [2^e, 2^(e + 1)): a factor that rounds nothing. */
KQ_INLINE float power_below(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    int e = (int)(bits >> 23 & 255) - 127;
    return power(e < -120 ? 120 : -e < -126 ? -126 : -e);
}

/* Without importance Q4_K weighs a column by its magnitude plus the root mean square of the sub-block, Q2_K by its
 * magnitude; with importance by importance * sqrt(c * mean square of the super-block + x^2), c 1 in Q2_K, else 2. */
KQ_INLINE void read_columns(const kq_codes *b, const kq_row *row, int64_t block, kq_columns *out) {
    const uint8_t *packed = row->packed + KQ_SUPER / 2 * block;
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    float most = importance ? largest_magnitude(importance) : 0, factor = power_below(most), energy = 0;
    memset(out, 0, sizeof *out);
    for (int j = 0; j < SUBS; ++j) {
        for (int i = 0; i < SUB_BYTES; ++i) {
            uint8_t pair = packed[SUB_BYTES * j + i];
            float even = level_of[pair & 15] * b->unit[j], odd = level_of[pair >> 4] * b->unit[j];
            out->x[2 * i][j] = even;
            out->x[2 * i + 1][j] = odd;
            energy += even * even;
            energy += odd * odd;
        }
        for (int i = 0; i < SUB_SIZE; ++i) out->w[i][j] = most > 0 ? importance[SUB_SIZE * j + i] * factor : 1;
    }
    vf spread = vf_all((TYPE == KQ_TYPE_Q2_K ? 1.0f : 2.0f) * energy / KQ_SUPER);
    for (int l = 0; l < SUBS; l += KQ_LANES) {
        vf own = {0};
        for (int i = 0; i < SUB_SIZE; ++i) own += vf_load(out->x[i] + l) * vf_load(out->x[i] + l);
        vf mean = TYPE == KQ_TYPE_Q4_K ? vf_sqrt(own / SUB_SIZE) : (vf){0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf x = vf_load(out->x[i] + l);
            vf w = importance ? vf_load(out->w[i] + l) * vf_sqrt(spread + x * x) : mean + vf_max(x, -x);
            vf_store(out->w[i] + l, w);
        }
    }
}

/* `value` as fp16 holds it, 0 included. */
KQ_INLINE float stored_half(float value, int exponent) {
    double unit = kq_pow2(exponent - 128);
    return (float)(kq_half_to_double(kq_half_from_double(value * unit)) / unit);
}

#endif
