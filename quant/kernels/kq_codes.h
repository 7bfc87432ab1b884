/* A super-block as the searches see it: how much weight each code has in each sub-block. SUBS, the number of
 * sub-blocks, is defined by the including file. */
#ifndef KQ_CODES_H
#define KQ_CODES_H

#include "kq_importance.h"
#include "kq_lanes.h"
#include "kq_tables.h"

enum { SUB_SIZE = KQ_SUPER / SUBS, SUB_BYTES = SUB_SIZE / 2 };

static const float level_of[16] KQ_ALIGNED = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const float level_squared[16] KQ_ALIGNED = {0, 1, 4, 9, 16, 36, 64, 144, 0, 1, 4, 9, 16, 36, 64, 144};

/* Scales and minima of all sub-blocks are in units of 2^(exponent - 128), the largest one of a sub-block that is not
 * all zero. Entries of sub-blocks beyond SUBS are zero. */
typedef struct {
    float weights[SUBS][16] KQ_ALIGNED; /* per code: columns, or their importance */
    uint8_t shares[SUBS][16] KQ_ALIGNED; /* the same as small integers, at most 128 in all */
    uint8_t fine[SUBS][16] KQ_ALIGNED;   /* sixteenths of a share, with importance */
    float sums[16] KQ_ALIGNED, firsts[16] KQ_ALIGNED, seconds[16] KQ_ALIGNED; /* of w, w * level, w * level^2 */
    float unit[16] KQ_ALIGNED, back[16] KQ_ALIGNED; /* of the sub-block's levels, and its inverse */
    uint32_t present[SUBS]; /* bit c: some column holds code c; never bit 8 */
    uint32_t used; /* bit j: sub-block j is not all zero */
    int exponent;
    int widest; /* difference between the largest and the smallest exponent in use */
} kq_codes;

KQ_INLINE void count_columns(const uint8_t *packed, uint8_t *counts) {
#if defined(__SSE2__)
    __m128i even = _mm_load_si128((const __m128i *)kq_pair_counts[packed[0]]);
    __m128i odd = _mm_load_si128((const __m128i *)kq_pair_counts[packed[1]]);
    for (int i = 2; i < SUB_BYTES; i += 2) {
        even = _mm_add_epi8(even, _mm_load_si128((const __m128i *)kq_pair_counts[packed[i]]));
        odd = _mm_add_epi8(odd, _mm_load_si128((const __m128i *)kq_pair_counts[packed[i + 1]]));
    }
    _mm_store_si128((__m128i *)counts, _mm_add_epi8(even, odd));
#else
    uint64_t sums[2] = {0}, pair[2];
    for (int i = 0; i < SUB_BYTES; ++i) {
        memcpy(pair, kq_pair_counts[packed[i]], 16);
        sums[0] += pair[0];
        sums[1] += pair[1];
    }
    memcpy(counts, sums, 16);
#endif
}

KQ_INLINE uint32_t present_in(const uint8_t *counts) {
#if defined(__SSE2__)
    __m128i none = _mm_cmpeq_epi8(_mm_load_si128((const __m128i *)counts), _mm_setzero_si128());
    return (uint32_t)_mm_movemask_epi8(none) ^ 0xffffu;
#else
    uint32_t mask = 0;
    for (int c = 0; c < 16; ++c) mask |= (uint32_t)(counts[c] != 0) << c;
    return mask;
#endif
}

KQ_INLINE void counts_as_weights(const uint8_t *counts, float *weights) {
#if KQ_LANES == 16
    _mm512_store_ps(weights, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)counts))));
#elif KQ_LANES == 8
    __m128i all = _mm_load_si128((const __m128i *)counts);
    _mm256_store_ps(weights, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)));
    _mm256_store_ps(weights + 8, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))));
#else
    for (int c = 0; c < 16; ++c) weights[c] = (float)counts[c];
#endif
}

/* Sums of importance per code, in column order, even and odd columns apart. */
KQ_INLINE void weigh_columns(const uint8_t *packed, const float *importance, float *weights) {
    float even[16] KQ_ALIGNED = {0}, odd[16] KQ_ALIGNED = {0};
    for (int i = 0; i < SUB_BYTES; ++i) {
        even[packed[i] & 15] += importance[2 * i];
        odd[packed[i] >> 4] += importance[2 * i + 1];
    }
    even[0] += even[8];
    odd[0] += odd[8];
    even[8] = odd[8] = 0;
    KQ_EACH(c) vf_store(weights + c, vf_load(even + c) + vf_load(odd + c));
}

/* Weights in units of 1 / scale, at least one where a code occurs: sixteens and ones. */
KQ_INLINE void split_shares(const float *weights, float scale, uint8_t *sixteens, uint8_t *ones) {
    KQ_EACH(c) {
        vf weight = vf_load(weights + c), value = vf_max(vf_rint(weight * scale), vf_all(1));
        value = vf_pick(vf_less((vf){0}, weight), value, (vf){0});
        vf high = vf_rint(value * 0.0625f - 0.46875f);
        kq_store_bytes(sixteens + c, high);
        kq_store_bytes(ones + c, value - 16 * high);
    }
}

/* The shares of a sub-block, ready for prices. */
typedef struct { vcounts sixteens[4], ones[4]; } kq_shares;

KQ_INLINE kq_shares shares_of(const kq_codes *b, int j, int weighted) {
    kq_shares out = {0};
    for (int g = 0; g < 4; ++g) {
        uint32_t four;
        memcpy(&four, b->shares[j] + 4 * g, 4);
        out.sixteens[g] = kq_counts(four);
        if (!weighted) continue;
        memcpy(&four, b->fine[j] + 4 * g, 4);
        out.ones[g] = kq_counts(four);
    }
    return out;
}

/* Prices of KQ_LANES lattices: sums over the codes of cost times share. */
KQ_INLINE vi price_of(const uint8_t (*cost)[16][4], const kq_shares *shares, int lane, int weighted) {
    vcost sum = {0}, small = {0};
    for (int g = 0; g < 4; ++g) sum = kq_cost_add(sum, cost[g][lane], shares->sixteens[g]);
    if (!weighted) return kq_cost_end(sum);
    for (int g = 0; g < 4; ++g) small = kq_cost_add(small, cost[g][lane], shares->ones[g]);
    return (kq_cost_end(sum) << 4) + kq_cost_end(small);
}

/* 2^e as a float, -126 <= e <= 127. */
KQ_INLINE float power(int e) {
    uint32_t bits = (uint32_t)(e + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Of 256 numbers, aligned or not. */
KQ_INLINE float largest_magnitude(const float *v) {
    float found[16] KQ_ALIGNED, most = 0;
    KQ_EACH(l) {
        vf largest = {0};
        for (int i = l; i < KQ_SUPER; i += 16) {
            vf here;
            memcpy(&here, v + i, sizeof here);
            largest = vf_max(largest, vf_max(here, -here));
        }
        vf_store(found + l, largest);
    }
    for (int i = 0; i < 16; ++i) most = found[i] > most ? found[i] : most;
    return most;
}

KQ_INLINE void read_codes(const kq_row *row, int64_t block, kq_codes *out) {
    const uint8_t *packed = row->packed + KQ_SUPER / 2 * block;
    const uint8_t *scales = row->scales + KQ_SUPER / KQ_BLOCK * block;
    const float *importance = kq_column_weights(row, block);
    int top = 0, bottom = 255;
    out->used = 0;
    for (int j = 0; j < SUBS; ++j) {
        float product[16] KQ_ALIGNED;
        count_columns(packed + SUB_BYTES * j, out->shares[j]);
        out->present[j] = present_in(out->shares[j]);
        if (importance) {
            weigh_columns(packed + SUB_BYTES * j, importance + SUB_SIZE * j, out->weights[j]);
            out->sums[j] = kq_sum16(out->weights[j]);
            split_shares(out->weights[j], 1792 / out->sums[j], out->shares[j], out->fine[j]);
        } else {
            counts_as_weights(out->shares[j], out->weights[j]);
            out->sums[j] = SUB_SIZE;
        }
        KQ_EACH(c) vf_store(product + c, vf_load(out->weights[j] + c) * vf_load(level_of + c));
        out->firsts[j] = kq_sum16(product);
        KQ_EACH(c) vf_store(product + c, vf_load(out->weights[j] + c) * vf_load(level_squared + c));
        out->seconds[j] = kq_sum16(product);
        if (out->present[j] == 1) continue;
        int scale = scales[j * SUB_SIZE / KQ_BLOCK];
        out->used |= 1u << j;
        top = scale > top ? scale : top;
        bottom = scale < bottom ? scale : bottom;
    }
    out->exponent = top;
    out->widest = top > bottom ? top - bottom : 0;
    for (int j = 0; j < 16; ++j) {
        /* Sixty octaves below the largest sub-block there is nothing but zero. */
        int gap = j < SUBS ? top - scales[j * SUB_SIZE / KQ_BLOCK] : 0;
        gap = gap < 0 ? 0 : gap > 60 ? 60 : gap;
        out->unit[j] = power(-gap);
        out->back[j] = power(gap);
        if (j >= SUBS) out->sums[j] = out->firsts[j] = out->seconds[j] = 0;
    }
}

/* The numbers of fp16 in units of the super-block: the smallest step, what leaves multiples of it when added and
 * subtracted again, and the largest number. */
typedef struct { float step, shift, largest; } kq_half_range;

KQ_INLINE kq_half_range half_range(int exponent) {
    int low = 104 - exponent > -100 ? 104 - exponent : -100;
    int high = 128 - exponent < 110 ? 128 - exponent : 110;
    return (kq_half_range){power(low), 12582912.0f * power(low), 65504.0f * power(high)};
}

/* The fp16 number near v, of either sign: 11 significant bits, a multiple of the step and at least one, at most the
 * largest. */
KQ_INLINE vf to_half(vf v, kq_half_range half) {
    vi sign = (vi)v & INT32_MIN, bits = (vi)v & INT32_MAX;
    bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff;
    vf size = ((vf)bits + half.shift) - half.shift;
    size = vf_clamp(size, half.step, half.largest);
    return (vf)((vi)size | sign);
}

KQ_INLINE void trial_values(const kq_series *series, int count, float largest, kq_half_range half, float *out) {
    for (int i = 0; i < count; i += KQ_LANES) {
        vf value = vf_load(series->factor + i) * largest;
        vi sign = (vi)value & INT32_MIN;
        vf lift = (vf)((vi)(vf_load(series->lift + i) * half.step) | sign);
        vf_store(out + i, to_half(value + lift, half));
    }
}

KQ_INLINE float to_half1(float v, kq_half_range half) {
    return to_half(vf_all(v), half)[0];
}

#endif
