/* Vectors of KQ_LANES 32-bit numbers: 16 with AVX-512, 8 with AVX2, else 4 of the compiler's own (SSE2, NEON, ...).
 *
 * The searches of the K types are written once over these and compiled once per instruction set. Work is always cut
 * into the same groups of 16 numbers, every operation is one IEEE operation per lane or integer arithmetic, nothing is
 * contracted, and sums across lanes follow one fixed tree. So all paths compute the same numbers and choose alike.
 */
#ifndef KQ_LANES_H
#define KQ_LANES_H

#include "kq.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define KQ_LANES 16
#elif defined(__AVX2__)
#define KQ_LANES 8
#else
#define KQ_LANES 4
#endif

#define KQ_ALIGNED __attribute__((aligned(64)))
#define KQ_INLINE static inline __attribute__((always_inline))

/* For every vector of a group of 16 numbers. */
#define KQ_EACH(i) for (int i = 0; i < 16; i += KQ_LANES)

typedef float vf __attribute__((vector_size(4 * KQ_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * KQ_LANES)));

/* The same in memory, where single numbers are read and written too; pointers are to whole, aligned vectors. */
typedef vf vf_memory __attribute__((may_alias));
typedef vi vi_memory __attribute__((may_alias));
KQ_INLINE vf vf_load(const float *p) { return *(const vf_memory *)(const void *)p; }
KQ_INLINE vi vi_load(const int32_t *p) { return *(const vi_memory *)(const void *)p; }
KQ_INLINE void vf_store(float *p, vf v) { *(vf_memory *)(void *)p = v; }
KQ_INLINE void vi_store(int32_t *p, vi v) { *(vi_memory *)(void *)p = v; }
KQ_INLINE vf vf_all(float x) { return x - (vf){0}; }
KQ_INLINE vi vi_all(int32_t x) { return x - (vi){0}; }

/* vm holds the result of a comparison; vf_pick(m, a, b) is a where it is true, else b. vf_min(a, b) is a < b ? a : b,
 * vf_max(a, b) is a > b ? a : b. */
#if KQ_LANES == 16
typedef __mmask16 vm;
KQ_INLINE vm vf_less(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
KQ_INLINE vf vf_pick(vm mask, vf a, vf b) { return (vf)_mm512_mask_blend_ps(mask, (__m512)b, (__m512)a); }
KQ_INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
KQ_INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
KQ_INLINE vi vi_min(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
#elif KQ_LANES == 8
typedef vi vm;
KQ_INLINE vm vf_less(vf a, vf b) { return (vi)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ); }
KQ_INLINE vf vf_pick(vm mask, vf a, vf b) { return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask); }
KQ_INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
KQ_INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
KQ_INLINE vi vi_min(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
#else
typedef vi vm;
KQ_INLINE vm vf_less(vf a, vf b) { return a < b; }
KQ_INLINE vf vf_pick(vm mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
#if defined(__SSE2__)
KQ_INLINE vf vf_min(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
KQ_INLINE vf vf_max(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
#else
KQ_INLINE vf vf_min(vf a, vf b) { return vf_pick(a < b, a, b); }
KQ_INLINE vf vf_max(vf a, vf b) { return vf_pick(a > b, a, b); }
#endif
KQ_INLINE vi vi_min(vi a, vi b) {
    vi mask = a < b;
    return (a & mask) | (b & ~mask);
}
#endif

KQ_INLINE vf vf_from_int(vi v) { return __builtin_convertvector(v, vf); }
KQ_INLINE vf vf_clamp(vf v, float low, float high) { return vf_min(vf_max(v, vf_all(low)), vf_all(high)); }

/* Nearest integer, ties to even, for |v| < 2^22. */
KQ_INLINE vf vf_rint(vf v) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    return (v + shift) - shift;
}

/* 1 / d, and 0 for 0. */
KQ_INLINE vf vf_inverse(vf d) {
    return vf_pick(vf_less((vf){0}, vf_max(d, -d)), 1.0f / d, (vf){0});
}
KQ_INLINE float kq_inverse(float d) {
    return d != 0 ? 1.0f / d : 0.0f;
}

KQ_INLINE vf vf_sqrt(vf v) {
#if KQ_LANES == 16
    return (vf)_mm512_sqrt_ps((__m512)v);
#elif KQ_LANES == 8
    return (vf)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)v);
#else
    for (int i = 0; i < KQ_LANES; ++i) v[i] = __builtin_sqrtf(v[i]);
    return v;
#endif
}

/* Integers 0..255 as bytes. */
KQ_INLINE void kq_store_bytes(uint8_t *out, vf v) {
#if KQ_LANES == 16
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v)));
#else
    vi integers = __builtin_convertvector(v, vi);
    for (int i = 0; i < KQ_LANES; ++i) out[i] = (uint8_t)integers[i];
#endif
}

/* Sum of 16 numbers: the second half onto the first, until one is left. */
KQ_INLINE float kq_sum16(const float *v) {
#if KQ_LANES == 4
    vf c = (vf_load(v) + vf_load(v + 8)) + (vf_load(v + 4) + vf_load(v + 12));
    return (c[0] + c[2]) + (c[1] + c[3]);
#else
#if KQ_LANES == 16
    __m512 a = (__m512)vf_load(v);
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#else
    __m256 b = (__m256)(vf_load(v) + vf_load(v + 8));
#endif
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
#endif
}

/* Least of `groups` * 16 integers. */
KQ_INLINE int32_t kq_least(const int32_t *v, int groups) {
    vi least = vi_load(v);
    for (int i = KQ_LANES; i < 16 * groups; i += KQ_LANES) least = vi_min(least, vi_load(v + i));
#if KQ_LANES == 16
    return _mm512_reduce_min_epi32((__m512i)least);
#else
    int32_t result = least[0];
    for (int i = 1; i < KQ_LANES; ++i) result = least[i] < result ? least[i] : result;
    return result;
#endif
}

/* A key that orders v >= 0 by size, without its last `bits` bits, then by lane: `lanes` are lane numbers below
 * 2^bits. */
KQ_INLINE vi kq_keys(vf v, vi lanes, int bits) {
    return ((vi)v & -(1 << bits)) | lanes;
}

static const int32_t kq_lane_numbers[32] KQ_ALIGNED = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

/* Sums over codes of table byte times count, for KQ_LANES candidates: `table` holds four bytes for each of them, a
 * vcounts the four counts, below 128. kq_cost_end gives the sums as integers; they must stay below 2^15. */
#if KQ_LANES == 16
typedef vi vcost, vcounts;
KQ_INLINE vcounts kq_counts(uint32_t four) { return vi_all((int32_t)four); }
KQ_INLINE vcost kq_cost_add(vcost sum, const uint8_t *table, vcounts counts) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_load_si512(table), (__m512i)counts);
}
KQ_INLINE vi kq_cost_end(vcost sum) { return sum; }
#elif KQ_LANES == 8
typedef vi vcost, vcounts;
KQ_INLINE vcounts kq_counts(uint32_t four) { return vi_all((int32_t)four); }
KQ_INLINE vcost kq_cost_add(vcost sum, const uint8_t *table, vcounts counts) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_load_si256((const __m256i *)table), (__m256i)counts);
    return (vi)_mm256_add_epi16((__m256i)sum, pairs);
}
KQ_INLINE vi kq_cost_end(vcost sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#else
typedef uint16_t vcost __attribute__((vector_size(4 * KQ_LANES)));
typedef struct { vcost even, odd; } vcounts;
KQ_INLINE vcounts kq_counts(uint32_t four) {
    return (vcounts){(vcost)vi_all((int32_t)(four & 0x00ff00ffu)), (vcost)vi_all((int32_t)(four >> 8 & 0x00ff00ffu))};
}
KQ_INLINE vcost kq_cost_add(vcost sum, const uint8_t *table, vcounts counts) {
    vcost row;
    memcpy(&row, table, sizeof row);
    return sum + (row & 255) * counts.even + (row >> 8) * counts.odd;
}
KQ_INLINE vi kq_cost_end(vcost sum) { return ((vi)sum & 0xffff) + ((vi)sum >> 16 & 0xffff); }
#endif

#endif
