/* MXFP4 to Q3_K: 256 weights d * scale[j] * q, j one of 16 sub-blocks of 16, scales -32..31, -4 <= q <= 3.
 *
 * The search is that of kq_affine.h without minima: 32 lattices per sub-block priced by table look-up, each sign of
 * the scale apart; a least-squares scale for 16 of the roundings, of which the best is kept; then 32 values of d for
 * the super-block, the best one refitted.
 */
#define SUBS 16
#define TYPE KQ_TYPE_Q3_K
#define LEVELS 4
#define INDEX_LOW -32
#define INDEX_TOP 31
#define TRIALS kq_trials_q3_k
#include "kq_classic.h"
#include "kq_closer.h"
#include "kq_columns.h"
#include "kq_signed_search.h"

KQ_INLINE int magnitude_of(uint32_t present) {
    return 31 - __builtin_clz((present & 0xff) | present >> 8 | 1);
}

KQ_INLINE void fit_sub_block(const kq_codes *b, int j, const kq_signed_class *start, int weighted, kq_fits *out) {
    float scales[16] KQ_ALIGNED, squares[16] KQ_ALIGNED, errors[16] KQ_ALIGNED;
    int32_t keys[16] KQ_ALIGNED;
    kq_shares shares = shares_of(b, j, weighted);
    KQ_EACH(l) {
        vf first = vf_from_int(price_of(start->cost[0], &shares, l, weighted));
        vf second = vf_from_int(price_of(start->cost[1], &shares, l, weighted));
        vm later = vf_less(second, first);
        vf inverse = vf_pick(later, vf_load(start->inverse[1] + l), vf_load(start->inverse[0] + l));
        vf qq = {0}, xq = {0};
        for (uint32_t left = b->present[j] & ~1u; left; left &= left - 1) {
            int c = __builtin_ctz(left);
            vf q = quant_of(inverse * level_of[c]), wq = b->weights[j][c] * q;
            qq += wq * q;
            xq += wq * level_of[c];
        }
        vf scale = xq * vf_inverse(qq), error = vf_max(b->seconds[j] - scale * xq, (vf){0});
        vf_store(scales + l, scale);
        vf_store(squares + l, qq);
        vf_store(errors + l, error);
        vi_store(keys + l, kq_keys(error, vi_load(kq_lane_numbers + l), 4));
    }
    int best = kq_least(keys, 1) & 15;
    out->scale[j] = scales[best] * b->unit[j];
    out->error[j] = errors[best] * (b->unit[j] * b->unit[j]);
    out->qq[j] = squares[best];
}

KQ_INLINE void fit_all(const kq_codes *b, int weighted, kq_fits *out) {
    for (int j = 0; j < SUBS; ++j) {
        out->scale[j] = out->error[j] = out->qq[j] = 0;
        if (!(b->used >> j & 1)) continue;
        const kq_signed_class *start = &kq_classes_q3_k[magnitude_of(b->present[j])];
        if (weighted) fit_sub_block(b, j, start, 1, out);
        else fit_sub_block(b, j, start, 0, out);
    }
}

/* The quant of every code, plus 4, and the error of the super-block. */
KQ_INLINE float round_codes(const kq_codes *b, const kq_choice *choice, uint8_t (*quants)[16]) {
    float scale[16] KQ_ALIGNED, inverse[16] KQ_ALIGNED, error[16] KQ_ALIGNED;
    KQ_EACH(j) {
        vf s = vf_load(choice->scales + j) * choice->d * vf_load(b->back + j);
        vf_store(scale + j, s);
        vf_store(inverse + j, vf_inverse(s));
    }
    KQ_EACH(c) {
        vf total = {0}, v = vf_load(level_of + c);
        for (int j = 0; j < SUBS; ++j) {
            vf q = quant_of(v * inverse[j]), miss = v - q * scale[j];
            kq_store_bytes(quants[j] + c, q + 4);
            total += vf_load(b->weights[j] + c) * (miss * miss) * (b->unit[j] * b->unit[j]);
        }
        vf_store(error + c, total);
    }
    return kq_sum16(error);
}

/* ggml's scales with importance (make_qx_quants), all sub-blocks at once: lane j is sub-block j. */
KQ_INLINE void classic_scales(const kq_columns *of, float *scales, float *sums) {
    KQ_EACH(l) {
        vf extreme = {0}, sum = {0}, scale = {0}, best = {0};
        for (int i = 0; i < SUB_SIZE; ++i) {
            vf x = vf_load(of->x[i] + l);
            extreme = vf_pick(vf_less(vf_max(extreme, -extreme), vf_max(x, -x)), x, extreme);
            sum += vf_load(of->w[i] + l);
        }
        vm used = vf_less((vf){0}, vf_max(extreme, -extreme));
        extreme = vf_pick(used, extreme, vf_all(1));
        for (int order = 0; order < 19; ++order) {
            /* The plain density first, then those around it. */
            int step = order == 0 ? 0 : order <= 9 ? order - 10 : order - 9;
            vf density = -(4.0f + 0.1f * (float)step) / extreme, xq = {0}, qq = {0};
            for (int i = 0; i < SUB_SIZE; ++i) {
                vf x = vf_load(of->x[i] + l), w = vf_load(of->w[i] + l), q = quant_of(density * x);
                xq += w * x * q;
                qq += w * q * q;
            }
            vf bottom = vf_pick(vf_less((vf){0}, qq), qq, vf_all(1));
            vm better = vf_less(best * qq, xq * xq);
            scale = vf_pick(better, xq / bottom, scale);
            best = vf_pick(better, scale * xq, best);
        }
        vf_store(scales + l, vf_pick(used, scale, (vf){0}));
        vf_store(sums + l, sum);
    }
}

/* The same without importance, one sub-block after the other, each as important as any. */
KQ_INLINE float classic_plain(const kq_columns *of, float *indices) {
    float scales[16], most = 0;
    for (int j = 0; j < SUBS; ++j) {
        float x[SUB_SIZE];
        for (int i = 0; i < SUB_SIZE; ++i) x[i] = of->x[i][j];
        scales[j] = kq_classic_scale_stepwise(SUB_SIZE, 4, x);
        most = scales[j] * scales[j] > most * most ? scales[j] : most;
    }
    float density = most != 0 ? INDEX_LOW / most : 0;
    for (int j = 0; j < SUBS; ++j) indices[j] = index_of(vf_all(density * scales[j]))[0];
    return most != 0 ? 1 / density : 0;
}

/* ggml's choice; its error and normal equation are left unset. */
KQ_INLINE void classic_choice(const kq_codes *b, const kq_row *row, int64_t block, kq_choice *out) {
    kq_columns columns;
    read_columns(b, row, block, &columns);
    float d;
    if (row->importance) {
        float scales[16] KQ_ALIGNED, sums[16] KQ_ALIGNED;
        int8_t found[16];
        classic_scales(&columns, scales, sums);
        d = kq_classic_scale(SUBS, 32, scales, sums, found);
        for (int j = 0; j < SUBS; ++j) out->scales[j] = found[j];
    } else {
        d = classic_plain(&columns, out->scales);
    }
    out->d = stored_half(d, b->exponent);
}

/* The choice as a decoder sees it. */
KQ_INLINE kq_indices indices_of(const kq_choice *choice, int exponent) {
    kq_indices out = {0};
    out.d = kq_half_from_double(choice->d * kq_pow2(exponent - 128));
    for (int j = 0; j < SUBS; ++j) out.scales[j] = (int8_t)choice->scales[j];
    return out;
}

#include "kq_doubt.h"

/* Sixteen columns of each of the eight groups of 32: low two bits of quants `quants`, third bits `high`. */
KQ_INLINE void pack_side(const uint8_t *packed, uint8_t (*quants)[16], int side, kq_block_q3_k *out) {
    uint8_t *high = out->hmask + 16 * side;
#if KQ_LANES > 4
    __m128i nibble = _mm_set1_epi8(15), two = _mm_set1_epi8(3), four = _mm_set1_epi8(4);
    __m128i high_even = _mm_setzero_si128(), high_odd = high_even;
    for (int half = 0; half < 2; ++half) {
        __m128i even = _mm_setzero_si128(), odd = even;
        for (int i = 0; i < 4; ++i) {
            int group = 4 * half + i, j = 2 * group + side;
            __m128i codes = _mm_loadl_epi64((const __m128i *)(packed + 8 * j));
            __m128i table = _mm_load_si128((const __m128i *)quants[j]);
            __m128i low = _mm_slli_epi16(_mm_and_si128(table, two), 2 * i);
            __m128i third = _mm_and_si128(table, four);
            third = group < 2 ? _mm_srli_epi16(third, 2 - group) : _mm_slli_epi16(third, group - 2);
            __m128i first = _mm_and_si128(codes, nibble), second = _mm_and_si128(_mm_srli_epi16(codes, 4), nibble);
            even = _mm_or_si128(even, _mm_shuffle_epi8(low, first));
            odd = _mm_or_si128(odd, _mm_shuffle_epi8(low, second));
            high_even = _mm_or_si128(high_even, _mm_shuffle_epi8(third, first));
            high_odd = _mm_or_si128(high_odd, _mm_shuffle_epi8(third, second));
        }
        _mm_storeu_si128((__m128i *)(out->qs + 32 * half + 16 * side), _mm_unpacklo_epi8(even, odd));
    }
    _mm_storeu_si128((__m128i *)high, _mm_unpacklo_epi8(high_even, high_odd));
#else
    uint8_t low[8][16], third[8][16];
    for (int group = 0; group < 8; ++group) {
        const uint8_t *q = quants[2 * group + side];
        for (int c = 0; c < 16; ++c) {
            low[group][c] = (uint8_t)((q[c] & 3) << 2 * (group & 3));
            third[group][c] = (uint8_t)(q[c] >> 2 << group);
        }
    }
    for (int k = 0; k < 16; ++k) {
        int bits[2] = {0}, top = 0;
        for (int group = 0; group < 8; ++group) {
            uint8_t pair = packed[8 * (2 * group + side) + k / 2];
            int c = k & 1 ? pair >> 4 : pair & 15;
            bits[group / 4] |= low[group][c];
            top |= third[group][c];
        }
        out->qs[16 * side + k] = (uint8_t)bits[0];
        out->qs[32 + 16 * side + k] = (uint8_t)bits[1];
        high[k] = (uint8_t)top;
    }
#endif
}

KQ_INLINE void pack_head(const kq_choice *choice, int exponent, kq_block_q3_k *out) {
    uint8_t index[SUBS];
    out->d = kq_half_from_double(choice->d * kq_pow2(exponent - 128));
    for (int j = 0; j < SUBS; ++j) index[j] = (uint8_t)((int)choice->scales[j] + 32);
    for (int i = 0; i < 8; ++i) out->scales[i] = (uint8_t)((index[i] & 15) | index[i + 8] << 4);
    for (int i = 0; i < 4; ++i) {
        int low = index[i] >> 4 | index[i + 4] >> 4 << 2, high = index[i + 8] >> 4 | index[i + 12] >> 4 << 2;
        out->scales[8 + i] = (uint8_t)(low | high << 4);
    }
}

static const kq_trust trust = {0.0125f, 0.006f, 3, 32};

KQ_INLINE void solve(const kq_row *row, int64_t block, int weighted, kq_trust trust, kq_solution *out) {
    kq_fits fits;
    read_codes(row, block, &out->codes);
    fit_all(&out->codes, weighted, &fits);
    kq_half_range half = half_range(out->codes.exponent);
    search(&fits, half, &out->choice);
    settle(row, block, weighted, trust, half, kq_sum16(fits.error), out);
}

static void encode_row(const kq_row *row) {
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_solution found;
        if (row->weights) solve(row, i, 1, trust, &found);
        else solve(row, i, 0, trust, &found);
        kq_block_q3_k *out = (kq_block_q3_k *)row->out + i;
        pack_head(&found.choice, found.codes.exponent, out);
        for (int side = 0; side < 2; ++side) pack_side(row->packed + KQ_SUPER / 2 * i, found.quants, side, out);
    }
}

#define SPREAD_STEP 0.18f
#define SPREADS 10
#include "kq_signed_floats.h"

static void encode_float_row(const kq_float_row *row) {
    for (int64_t i = 0; i < row->cols / KQ_SUPER; ++i) {
        kq_block_q3_k *out = (kq_block_q3_k *)row->out + i;
        kq_float_solution found;
        solve_floats(row, i, &found);
        pack_head(&found.choice, found.exponent, out);
        for (int k = 0; k < 64; ++k) {
            const uint8_t *q = found.quants + k / 32 * 128 + k % 32;
            out->qs[k] = (uint8_t)((q[0] & 3) | (q[32] & 3) << 2 | (q[64] & 3) << 4 | (q[96] & 3) << 6);
        }
        for (int k = 0; k < 32; ++k) {
            int bits = 0;
            for (int group = 0; group < 8; ++group) bits |= found.quants[32 * group + k] >> 2 << group;
            out->hmask[k] = (uint8_t)bits;
        }
    }
}
