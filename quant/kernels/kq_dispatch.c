/* The one entry point: finds the codec, checks the request and the scales, runs it row by row. */
#include "kq_importance.h"

#include <stdlib.h>

static const kq_codec *const codecs[] = {
    &kq_codec_mxfp4, &kq_codec_q8_0, &kq_codec_q6_k, &kq_codec_q5_k,
    &kq_codec_q4_0,  &kq_codec_q4_1, &kq_codec_q5_0, &kq_codec_q5_1,
    &kq_codec_q4_k,  &kq_codec_q3_k, &kq_codec_q2_k,
};

static const kq_codec *find_codec(int32_t type) {
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; ++i) {
        if (codecs[i]->type == type) return codecs[i];
    }
    return NULL;
}

int32_t kq_isa_available(int32_t isa) {
    switch (isa) {
    case KQ_SCALAR:
        return 1;
#if KQ_X86
    case KQ_AVX2:
        return __builtin_cpu_supports("avx2");
    case KQ_AVX512:
        return kq_isa_available(KQ_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#endif
#if KQ_NEON
    case KQ_ISA_NEON:
        return 1;
#endif
    default:
        return 0;
    }
}

int32_t kq_supports(int32_t type) {
    return find_codec(type) != NULL;
}

/* NEON is no superset of the x86 paths: below it comes the scalar one. */
static kq_row_fn row_function(const kq_codec *codec, int32_t isa) {
    if (isa == KQ_ISA_NEON) return codec->row[KQ_ISA_NEON] ? codec->row[KQ_ISA_NEON] : codec->row[KQ_SCALAR];
    while (isa > KQ_SCALAR && !codec->row[isa]) --isa;
    return codec->row[isa];
}

/* Scale 255 is NaN; 254 overflows float32 from level 2 (code 4) on, 253 from level 4 (code 6) on. */
static int scales_usable(const uint8_t *packed, const uint8_t *scales, int64_t blocks) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < blocks; ++i) largest = scales[i] > largest ? scales[i] : largest;
    if (largest < 253) return 1;
    for (int64_t i = 0; i < blocks; ++i) {
        if (scales[i] < 253) continue;
        if (scales[i] == 255) return 0;
        int limit = scales[i] == 254 ? 4 : 6;
        for (int j = 0; j < 16; ++j) {
            uint8_t pair = packed[16 * i + j];
            if ((pair & 7) >= limit || ((pair >> 4) & 7) >= limit) return 0;
        }
    }
    return 1;
}

/* Encodes rows x cols weights into `out`; single-threaded, no state, callable from several threads at once.
 * Returns 0, the 1-based first row with an unusable scale (earlier rows are written), or a KQ_ERR_ code. */
int64_t kq_encode(int32_t type, int32_t isa, const uint8_t *packed, const uint8_t *scales, int64_t rows, int64_t cols,
                  const float *importance, uint8_t *out, kq_stats *stats) {
    const kq_codec *codec = find_codec(type);
    if (!codec) return KQ_ERR_TYPE;
    if (!kq_isa_available(isa)) return KQ_ERR_ISA;
    if (cols % codec->block) return KQ_ERR_COLUMNS;
    kq_row_fn encode_row = row_function(codec, isa);
    void *weights = NULL;
    if (importance && codec->prepare && cols && !(weights = codec->prepare(importance, cols))) return KQ_ERR_MEMORY;

    int64_t bad_row = 0;
    kq_row row = {packed, scales, cols, importance, weights, out, stats};
    for (int64_t r = 0; r < rows; ++r) {
        if (!scales_usable(row.packed, row.scales, cols / KQ_BLOCK)) {
            bad_row = r + 1;
            break;
        }
        encode_row(&row);
        row.packed += cols / 2;
        row.scales += cols / KQ_BLOCK;
        row.out += cols / codec->block * codec->bytes;
    }
    free(weights);
    return bad_row;
}

int32_t kq_supports_floats(int32_t type) {
    const kq_codec *codec = find_codec(type);
    return codec && codec->float_row[KQ_SCALAR];
}

static kq_float_row_fn float_row_function(const kq_codec *codec, int32_t isa) {
    if (isa == KQ_ISA_NEON) isa = KQ_SCALAR;
    while (isa > KQ_SCALAR && !codec->float_row[isa]) --isa;
    return codec->float_row[isa];
}

/* As kq_encode, from F32 or BF16 weights, all of them finite. */
int64_t kq_encode_floats(int32_t type, int32_t isa, const void *values, int32_t bf16, int64_t rows, int64_t cols,
                         const float *importance, uint8_t *out, kq_stats *stats) {
    const kq_codec *codec = find_codec(type);
    if (!codec || !kq_supports_floats(type)) return KQ_ERR_TYPE;
    if (!kq_isa_available(isa)) return KQ_ERR_ISA;
    if (cols % codec->block) return KQ_ERR_COLUMNS;
    void *weights = NULL;
    if (importance && cols && !(weights = kq_prepare_importance(importance, cols))) return KQ_ERR_MEMORY;
    kq_float_row_fn encode_row = float_row_function(codec, isa);
    kq_float_row row = {values, bf16, cols, weights, out, stats};
    for (int64_t r = 0; r < rows; ++r) {
        encode_row(&row);
        row.values = (const uint8_t *)row.values + cols * (bf16 ? 2 : 4);
        row.out += cols / codec->block * codec->bytes;
    }
    free(weights);
    return 0;
}
