/* The formats with blocks of 32 and plain scales: Q4_0, Q4_1, Q5_0, Q5_1. They serve rows that are no multiple of 256.
 *
 * A block has one MXFP4 scale, so its values are t * 2^(s - 128), -12 <= t <= 12:
 *   Q5_0 holds -16..15 and is exact with d = 2^(s - 128) while that is an fp16 number (s in 104..143);
 *   Q5_1 holds 0..31 above a minimum and is exact with m = -12 d while m too is one (s in 104..140);
 *   Q4_0 and Q4_1 have 16 levels for up to 15 values and are fitted, as are the others outside their range.
 */
#include "kq_classic.h"
#include "kq_exact.h"
#include "kq_fit.h"

#include <math.h>

/* fp16 bits of 12 * 2^e, -24 <= e <= 12. */
static uint16_t half_12(int e) {
    return kq_half_from_double(12 * kq_pow2(e));
}

static void count(const kq_row *row, int64_t b, const kq_fit *fit, int has_min) {
    int beyond = row->scales[b] < KQ_BOTTOM || (fit->d & 0x7fff) == 0x7bff || (has_min && (fit->m & 0x7fff) == 0x7bff);
    row->stats->blocks += 1;
    row->stats->exact += fit->exact;
    row->stats->clipped += !fit->exact && beyond;
}

/* Codes of a block as quants q (offset so that they start at 0), in column order. */
static void quants(const uint8_t *packed, const int8_t *q, int offset, uint8_t *out) {
    for (int i = 0; i < 16; ++i) {
        out[2 * i] = (uint8_t)(q[packed[i] & 15] + offset);
        out[2 * i + 1] = (uint8_t)(q[packed[i] >> 4] + offset);
    }
}

static void pack_low(const uint8_t *quant, uint8_t *qs) {
    for (int j = 0; j < 16; ++j) qs[j] = (uint8_t)((quant[j] & 15) | quant[j + 16] << 4);
}

static void pack_high(const uint8_t *quant, uint8_t *qh) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) bits |= (uint32_t)(quant[j] >> 4) << j;
    for (int i = 0; i < 4; ++i) qh[i] = (uint8_t)(bits >> 8 * i);
}

/* Code 8 is counted as code 0 and must be written like it. */
static void fit_by_scale(const kq_row *row, int64_t b, int limit, kq_fit *fit) {
    kq_hist h;
    /* 2^21 exceeds 16 * 65504. */
    int scale = kq_at_most(row->scales[b], 128 + 21);
    kq_histogram(row->packed + 16 * b, KQ_BLOCK, scale, row->importance ? row->importance + KQ_BLOCK * b : NULL, &h);
    kq_fit_scale(&h, limit, fit);
    fit->q[8] = fit->q[0];
}

/* With importance ggml weighs a column by importance * sqrt(mean square of the row + square of the weight). */
static float row_mean_square(const kq_row *row) {
    float sum = 0;
    for (int64_t i = 0; i < row->cols; ++i) {
        uint8_t pair = row->packed[i / 2];
        float x = (float)(kq_level[i & 1 ? pair >> 4 : pair & 15] * kq_unit(row->scales[i / KQ_BLOCK]));
        sum += x * x;
    }
    return sum / (float)row->cols;
}

static void fit_by_scale_min(const kq_row *row, int64_t b, int qmax, float mean_square, kq_fit *fit) {
    kq_hist h;
    const uint8_t *packed = row->packed + 16 * b;
    const float *importance = row->importance ? row->importance + KQ_BLOCK * b : NULL;
    /* 2^22 exceeds 32 * 65504. */
    kq_histogram(packed, KQ_BLOCK, kq_at_most(row->scales[b], 128 + 22), importance, &h);
    double start[2];
    if (importance) {
        float x[KQ_BLOCK], w[KQ_BLOCK], minimum;
        for (int i = 0; i < KQ_BLOCK; ++i) {
            x[i] = (float)(kq_level[i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15] * kq_unit(row->scales[b]));
            w[i] = importance[i] * sqrtf(mean_square + x[i] * x[i]);
        }
        start[0] = kq_classic_scale_min(KQ_BLOCK, qmax, x, w, -0.9f, 0.05f, 36, 0, &minimum);
        start[1] = -minimum;
    }
    int usable = importance && isfinite(start[0]) && isfinite(start[1]) && start[0] > 0;
    kq_fit_scale_min(&h, qmax, usable ? start : NULL, fit);
    fit->q[8] = fit->q[0];
}

static void row_q4_0(const kq_row *row) {
    kq_block_q4_0 *out = (kq_block_q4_0 *)row->out;
    for (int64_t b = 0; b < row->cols / KQ_BLOCK; ++b) {
        kq_fit fit;
        uint8_t quant[32];
        fit_by_scale(row, b, 8, &fit);
        quants(row->packed + 16 * b, fit.q, 8, quant);
        out[b].d = fit.d;
        pack_low(quant, out[b].qs);
        count(row, b, &fit, 0);
    }
}

static void row_q4_1(const kq_row *row) {
    kq_block_q4_1 *out = (kq_block_q4_1 *)row->out;
    float mean_square = row->importance ? row_mean_square(row) : 0;
    for (int64_t b = 0; b < row->cols / KQ_BLOCK; ++b) {
        kq_fit fit;
        uint8_t quant[32];
        fit_by_scale_min(row, b, 15, mean_square, &fit);
        quants(row->packed + 16 * b, fit.q, 0, quant);
        out[b].d = fit.d;
        out[b].m = fit.m;
        pack_low(quant, out[b].qs);
        count(row, b, &fit, 1);
    }
}

static void row_q5_0(const kq_row *row) {
    kq_block_q5_0 *out = (kq_block_q5_0 *)row->out;
    for (int64_t b = 0; b < row->cols / KQ_BLOCK; ++b) {
        kq_fit fit;
        uint8_t quant[32];
        if (row->scales[b] >= KQ_BOTTOM && row->scales[b] <= KQ_TOP) {
            fit.d = kq_half_pow2(row->scales[b] - 128);
            fit.exact = 1;
            memcpy(fit.q, kq_level, sizeof fit.q);
        } else {
            fit_by_scale(row, b, 16, &fit);
        }
        quants(row->packed + 16 * b, fit.q, 16, quant);
        out[b].d = fit.d;
        pack_low(quant, out[b].qs);
        pack_high(quant, out[b].qh);
        count(row, b, &fit, 0);
    }
}

static void row_q5_1(const kq_row *row) {
    kq_block_q5_1 *out = (kq_block_q5_1 *)row->out;
    float mean_square = row->importance ? row_mean_square(row) : 0;
    for (int64_t b = 0; b < row->cols / KQ_BLOCK; ++b) {
        kq_fit fit;
        uint8_t quant[32];
        int exponent = row->scales[b] - 128;
        if (exponent >= -24 && exponent <= 12) {
            fit.d = kq_half_pow2(exponent);
            fit.m = half_12(exponent) | 0x8000;
            fit.exact = 1;
            for (int c = 0; c < KQ_CODES; ++c) fit.q[c] = (int8_t)(kq_level[c] + 12);
        } else {
            fit_by_scale_min(row, b, 31, mean_square, &fit);
        }
        quants(row->packed + 16 * b, fit.q, 0, quant);
        out[b].d = fit.d;
        out[b].m = fit.m;
        pack_low(quant, out[b].qs);
        pack_high(quant, out[b].qh);
        count(row, b, &fit, 1);
    }
}

const kq_codec kq_codec_q4_0 = {
    .type = KQ_TYPE_Q4_0, .block = KQ_BLOCK, .bytes = sizeof(kq_block_q4_0), .row = {[KQ_SCALAR] = row_q4_0}};
const kq_codec kq_codec_q4_1 = {
    .type = KQ_TYPE_Q4_1, .block = KQ_BLOCK, .bytes = sizeof(kq_block_q4_1), .row = {[KQ_SCALAR] = row_q4_1}};
const kq_codec kq_codec_q5_0 = {
    .type = KQ_TYPE_Q5_0, .block = KQ_BLOCK, .bytes = sizeof(kq_block_q5_0), .row = {[KQ_SCALAR] = row_q5_0}};
const kq_codec kq_codec_q5_1 = {
    .type = KQ_TYPE_Q5_1, .block = KQ_BLOCK, .bytes = sizeof(kq_block_q5_1), .row = {[KQ_SCALAR] = row_q5_1}};
