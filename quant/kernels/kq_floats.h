/* A super-block of BF16 or F32 weights as the searches see it. Included after kq_choice of the type. */
#ifndef KQ_FLOATS_H
#define KQ_FLOATS_H

/* Column i of sub-block j and its weight stand at [i][j]; lanes of sub-blocks beyond SUBS are zero. All in units of
 * 2^(exponent - 128), chosen so that the largest magnitude lies in [8, 16). */
typedef struct {
    float x[SUB_SIZE][16] KQ_ALIGNED, w[SUB_SIZE][16] KQ_ALIGNED;
    float sums[16] KQ_ALIGNED, firsts[16] KQ_ALIGNED, seconds[16] KQ_ALIGNED; /* of w, w * x, w * x^2 */
    float low[16] KQ_ALIGNED, high[16] KQ_ALIGNED; /* smallest and largest x, zero among them */
    int exponent, empty;
} kq_floats;

KQ_INLINE void read_values(const kq_float_row *row, int64_t block, float *out) {
    if (row->bf16) {
        const uint16_t *from = (const uint16_t *)row->values + KQ_SUPER * block;
        for (int i = 0; i < KQ_SUPER; ++i) {
            uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(out + i, &bits, 4);
        }
    } else {
        memcpy(out, (const float *)row->values + KQ_SUPER * block, KQ_SUPER * sizeof *out);
    }
}

KQ_INLINE void read_floats(const kq_float_row *row, int64_t block, kq_floats *out) {
    const float *weights = row->weights ? (const float *)row->weights + KQ_SUPER * block : NULL;
    float values[KQ_SUPER] KQ_ALIGNED;
    read_values(row, block, values);
    float most = largest_magnitude(values);
    uint32_t bits;
    memcpy(&bits, &most, 4);
    /* What is smaller than 2^-120 is nothing beside the smallest fp16 number. */
    int top = (int)(bits >> 23) - 127 < -120 ? -120 : (int)(bits >> 23) - 127;
    out->exponent = top + 125;
    out->empty = most == 0;
    float factor = power(3 - top);
    if (SUBS < 16) memset(out, 0, offsetof(kq_floats, sums));
    for (int j = 0; j < SUBS; ++j) {
        for (int i = 0; i < SUB_SIZE; ++i) {
            out->x[i][j] = values[SUB_SIZE * j + i] * factor;
            out->w[i][j] = weights ? weights[SUB_SIZE * j + i] : 1;
        }
    }
    KQ_EACH(l) {
        vf w_sum = {0}, x_sum = {0}, xx_sum = {0}, low = {0}, high = {0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf x = vf_load(out->x[i] + l), w = vf_load(out->w[i] + l), wx = w * x;
            w_sum += w;
            x_sum += wx;
            xx_sum += wx * x;
            low = vf_min(low, x);
            high = vf_max(high, x);
        }
        vf_store(out->sums + l, w_sum);
        vf_store(out->firsts + l, x_sum);
        vf_store(out->seconds + l, xx_sum);
        vf_store(out->low + l, low);
        vf_store(out->high + l, high);
    }
}

/* Quants of all columns in their order, by lattices scale * q - minimum of the sub-blocks, plus `offset`; the error. */
KQ_INLINE float round_columns(const kq_floats *of, const float *scale, const float *minimum, float low, float high,
                              float offset, uint8_t *quants) {
    float errors[16] KQ_ALIGNED;
    uint8_t found[SUB_SIZE][16];
    KQ_EACH(l) {
        vf s = vf_load(scale + l), m = vf_load(minimum + l), inverse = vf_inverse(s), error = {0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf v = vf_load(of->x[i] + l) + m, q = vf_rint(vf_clamp(v * inverse, low, high)), miss = v - q * s;
            error += vf_load(of->w[i] + l) * (miss * miss);
            kq_store_bytes(found[i] + l, q + offset);
        }
        vf_store(errors + l, error);
    }
    for (int j = 0; j < SUBS; ++j) {
        for (int i = 0; i < SUB_SIZE; ++i) quants[SUB_SIZE * j + i] = found[i][j];
    }
    return kq_sum16(errors);
}

/* A choice for the super-block and its quants as they are stored, in column order; its exponent is that of the unit. */
typedef struct {
    kq_choice choice;
    int exponent;
    uint8_t quants[KQ_SUPER];
} kq_float_solution;

/* Counts the super-block in the statistics of the call. */
KQ_INLINE void tally_floats(const kq_float_row *row, kq_half_range half, float d, float error) {
    float size = d < 0 ? -d : d;
    row->stats->blocks += 1;
    row->stats->exact += error == 0;
    row->stats->clipped += error > 0 && (size >= half.largest || size < 1024 * half.step);
}

#endif
