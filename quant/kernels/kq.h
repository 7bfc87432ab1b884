/* Encoders from MXFP4 codes, and from BF16 and F32, to ggml block formats: shared types, tables, and the contract of a
 * codec.
 *
 * A weight is t * 2^(s - 128): t is its doubled level (kq_level, an integer -12..12), s the E8M0 scale byte of its
 * block of 32 columns. Packed rows hold two codes a byte, the even column in the low nibble.
 *
 * Rules of this folder:
 *   - The scalar path of a codec defines its bytes; every other path must produce the same bytes.
 *   - Whatever chooses between candidates is integer arithmetic, plain C shared by all paths, or single IEEE operations
 *     on lanes in an order that no path changes (kq_lanes.h).
 *   - Files named *_avx2.c and *_avx512.c are the only ones compiled for those instruction sets; what they hold is
 *     inside #if KQ_X86, what needs NEON inside #if KQ_NEON.
 */
#ifndef KQ_H
#define KQ_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#define KQ_X86 1
#else
#define KQ_X86 0
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define KQ_NEON 1
#else
#define KQ_NEON 0
#endif

#define KQ_EXPORT __attribute__((visibility("default")))

enum { KQ_BLOCK = 32, KQ_SUPER = 256 };

/* Execution paths. A codec without one of them uses the next lower path that it has. */
enum { KQ_SCALAR = 0, KQ_AVX2 = 1, KQ_AVX512 = 2, KQ_ISA_NEON = 3, KQ_ISAS = 4 };

/* ggml type numbers. */
enum {
    KQ_TYPE_Q4_0 = 2, KQ_TYPE_Q4_1 = 3, KQ_TYPE_Q5_0 = 6, KQ_TYPE_Q5_1 = 7, KQ_TYPE_Q8_0 = 8,
    KQ_TYPE_Q2_K = 10, KQ_TYPE_Q3_K = 11, KQ_TYPE_Q4_K = 12, KQ_TYPE_Q5_K = 13, KQ_TYPE_Q6_K = 14,
    KQ_TYPE_MXFP4 = 39,
};

/* Results of kq_encode other than 0 (done) and a positive, 1-based row with an unusable scale. */
enum { KQ_ERR_TYPE = -1, KQ_ERR_ISA = -2, KQ_ERR_COLUMNS = -3, KQ_ERR_MEMORY = -4 };

/* The block formats of ggml (fp16 fields as raw bits). */
typedef struct { uint8_t e; uint8_t qs[16]; } kq_block_mxfp4;
typedef struct { uint16_t d; uint8_t qs[16]; } kq_block_q4_0;
typedef struct { uint16_t d, m; uint8_t qs[16]; } kq_block_q4_1;
typedef struct { uint16_t d; uint8_t qh[4]; uint8_t qs[16]; } kq_block_q5_0;
typedef struct { uint16_t d, m; uint8_t qh[4]; uint8_t qs[16]; } kq_block_q5_1;
typedef struct { uint16_t d; int8_t qs[32]; } kq_block_q8_0;
typedef struct { uint8_t scales[16]; uint8_t qs[64]; uint16_t d, dmin; } kq_block_q2_k;
typedef struct { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; uint16_t d; } kq_block_q3_k;
typedef struct { uint16_t d, dmin; uint8_t scales[12]; uint8_t qs[128]; } kq_block_q4_k;
typedef struct { uint16_t d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; } kq_block_q5_k;
typedef struct { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; uint16_t d; } kq_block_q6_k;

_Static_assert(sizeof(kq_block_mxfp4) == 17, "mxfp4");
_Static_assert(sizeof(kq_block_q4_0) == 18 && sizeof(kq_block_q4_1) == 20, "q4");
_Static_assert(sizeof(kq_block_q5_0) == 22 && sizeof(kq_block_q5_1) == 24, "q5");
_Static_assert(sizeof(kq_block_q8_0) == 34, "q8_0");
_Static_assert(sizeof(kq_block_q2_k) == 84 && sizeof(kq_block_q3_k) == 110, "q2_k, q3_k");
_Static_assert(sizeof(kq_block_q4_k) == 144 && sizeof(kq_block_q5_k) == 176, "q4_k, q5_k");
_Static_assert(sizeof(kq_block_q6_k) == 210, "q6_k");

/* What a call did. Added to, never reset. Mirrored by quant/native.py. */
typedef struct {
    int64_t blocks;  /* blocks written (super-blocks of the K types) */
    int64_t exact;   /* of these, blocks that decode to the very values of the source */
    int64_t clipped; /* of the others, blocks with values too large or too fine for the range of an fp16 scale */
} kq_stats;

/* One row to encode. `importance` holds the weight of each column's squared error or is NULL; `weights` is what the
 * codec's prepare() made of it, NULL where there is nothing to prepare. */
typedef struct {
    const uint8_t *packed; /* cols / 2 */
    const uint8_t *scales; /* cols / 32, already checked: no value of the row overflows float32 */
    int64_t cols;          /* a multiple of the codec's block */
    const float *importance;
    const void *weights;
    uint8_t *out;          /* cols / block * bytes */
    kq_stats *stats;
} kq_row;

typedef void (*kq_row_fn)(const kq_row *row);

/* The same for weights that are F32, or BF16: the upper halves of F32. All are finite. */
typedef struct {
    const void *values; /* cols numbers */
    int bf16;
    int64_t cols;        /* a multiple of the codec's block */
    const void *weights; /* as in kq_row */
    uint8_t *out;
    kq_stats *stats;
} kq_float_row;

typedef void (*kq_float_row_fn)(const kq_float_row *row);

typedef struct {
    int32_t type;  /* ggml type number */
    int32_t block; /* weights per block: 32 or 256 */
    int32_t bytes; /* bytes per block */
    /* Turns the importance of the columns into the codec's own form, once per call; may be NULL.
     * The result is released with free(); NULL means that memory ran out. */
    void *(*prepare)(const float *importance, int64_t cols);
    kq_row_fn row[KQ_ISAS];
    kq_float_row_fn float_row[KQ_ISAS]; /* none where only MXFP4 is encoded */
} kq_codec;

/* Every codec is declared here and listed in kq_dispatch.c; the scalar file of a type defines its codec. */
extern const kq_codec kq_codec_mxfp4, kq_codec_q8_0, kq_codec_q6_k, kq_codec_q5_k;
extern const kq_codec kq_codec_q4_0, kq_codec_q4_1, kq_codec_q5_0, kq_codec_q5_1;
extern const kq_codec kq_codec_q4_k, kq_codec_q3_k, kq_codec_q2_k;

/* Exported to Python. */
KQ_EXPORT int32_t kq_supports_floats(int32_t type);
KQ_EXPORT int64_t kq_encode_floats(int32_t type, int32_t isa, const void *values, int32_t bf16, int64_t rows,
                                   int64_t cols, const float *importance, uint8_t *out, kq_stats *stats);
KQ_EXPORT int32_t kq_isa_available(int32_t isa);
KQ_EXPORT int32_t kq_supports(int32_t type);
KQ_EXPORT int64_t kq_encode(int32_t type, int32_t isa, const uint8_t *packed, const uint8_t *scales, int64_t rows,
                            int64_t cols, const float *importance, uint8_t *out, kq_stats *stats);

/* Doubled level of each of the 16 codes; -0.0 (code 8) is 0. */
static const int8_t kq_level[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Doubled levels of `n` consecutive columns, `n` even. */
static inline void kq_unpack_levels(const uint8_t *packed, int n, int8_t *t) {
    for (int i = 0; i < n / 2; ++i) {
        t[2 * i] = kq_level[packed[i] & 15];
        t[2 * i + 1] = kq_level[packed[i] >> 4];
    }
}

/* 2^e as a double, -1022 <= e <= 1023. */
static inline double kq_pow2(int e) {
    uint64_t bits = (uint64_t)(e + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Bits of the fp16 number 2^e, exact for -24 <= e <= 15. */
static inline uint16_t kq_half_pow2(int e) {
    return e >= -14 ? (uint16_t)((e + 15) << 10) : (uint16_t)(1u << (e + 24));
}

/* Value of finite fp16 bits. */
static inline double kq_half_to_double(uint16_t h) {
    int exponent = (h >> 10) & 31;
    int mantissa = h & 1023;
    double value = exponent ? (1024 + mantissa) * kq_pow2(exponent - 25) : mantissa * kq_pow2(-24);
    return h & 0x8000 ? -value : value;
}

/* Nearest fp16 bits, ties to even; beyond the largest finite number (65504), that number. */
uint16_t kq_half_from_double(double value);

#endif
