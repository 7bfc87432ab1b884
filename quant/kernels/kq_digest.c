/* SHA-256 of a file and of a tensor in it, and CRC-32C, in one pass over the bytes.
 *
 * One SHA-256 leaves the SHA units of a processor idle half of the time, because each round waits for the one before;
 * two that run side by side cost little more than one. SHA-256: FIPS 180-4. CRC-32C: RFC 3720, appendix B.4.
 */
#include "kq.h"

#if KQ_X86
#include <cpuid.h>
#include <immintrin.h>
#define SHA_TARGET __attribute__((target("sha,sse4.2")))
#endif

/* `state` holds the words in the order of the SHA instructions: F E B A H G D C. `tail` holds bytes % 64 bytes. */
typedef struct {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t tail[64];
} kq_sha256;

KQ_EXPORT int32_t kq_digest_available(void);
KQ_EXPORT void kq_sha256_init(kq_sha256 *hash);
KQ_EXPORT void kq_sha256_update(kq_sha256 *hash, const uint8_t *data, size_t n);
KQ_EXPORT void kq_sha256_final(const kq_sha256 *hash, uint8_t *out);
KQ_EXPORT uint32_t kq_digest(kq_sha256 *whole, kq_sha256 *part, uint32_t crc, const uint8_t *data, size_t n);
KQ_EXPORT uint32_t kq_crc32c(uint32_t crc, const uint8_t *data, size_t n);

static uint32_t crc_plain(uint32_t crc, const uint8_t *data, size_t n) {
    for (; n; --n) {
        crc ^= *data++;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0x82F63B78u & -(crc & 1));
    }
    return crc;
}

#if KQ_X86
static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* Word w of the message schedule, four at a time; `w` is a ring of the last sixteen. */
SHA_TARGET static inline void extend(__m128i w[4], int i) {
    __m128i seven_before = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
    __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), seven_before);
    w[i & 3] = _mm_sha256msg2_epu32(sum, w[(i + 3) & 3]);
}

SHA_TARGET static inline void load_block(__m128i w[4], const uint8_t *data) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), big_endian);
}

/* Four rounds on one state (low = FEBA, high = HGDC). */
#define FOUR_ROUNDS(low, high, words, k)                                         \
    do {                                                                         \
        __m128i sum = _mm_add_epi32(words, k);                                   \
        (high) = _mm_sha256rnds2_epu32(high, low, sum);                          \
        (low) = _mm_sha256rnds2_epu32(low, high, _mm_shuffle_epi32(sum, 0x0E));  \
    } while (0)

SHA_TARGET static void blocks_of_one(uint32_t *state, const uint8_t *data, size_t n) {
    __m128i low = _mm_loadu_si128((__m128i *)state), high = _mm_loadu_si128((__m128i *)(state + 4));
    for (; n; --n, data += 64) {
        __m128i old_low = low, old_high = high, w[4];
        load_block(w, data);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            FOUR_ROUNDS(low, high, w[i & 3], _mm_load_si128((const __m128i *)(round_constants + 4 * i)));
            if (i < 12) extend(w, i);
        }
        low = _mm_add_epi32(low, old_low);
        high = _mm_add_epi32(high, old_high);
    }
    _mm_storeu_si128((__m128i *)state, low);
    _mm_storeu_si128((__m128i *)(state + 4), high);
}

/* `n` blocks of `a` into one state and `n` blocks of `b` into another; the CRC of the blocks of `b`. */
SHA_TARGET static uint32_t blocks_of_two(uint32_t *state_a, const uint8_t *a, uint32_t *state_b, const uint8_t *b,
                                         size_t n, uint32_t crc) {
    __m128i low_a = _mm_loadu_si128((__m128i *)state_a), high_a = _mm_loadu_si128((__m128i *)(state_a + 4));
    __m128i low_b = _mm_loadu_si128((__m128i *)state_b), high_b = _mm_loadu_si128((__m128i *)(state_b + 4));
    uint64_t sum = crc;
    for (; n; --n, a += 64, b += 64) {
        __m128i old_low_a = low_a, old_high_a = high_a, old_low_b = low_b, old_high_b = high_b, wa[4], wb[4];
        load_block(wa, a);
        load_block(wb, b);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            __m128i k = _mm_load_si128((const __m128i *)(round_constants + 4 * i));
            FOUR_ROUNDS(low_a, high_a, wa[i & 3], k);
            FOUR_ROUNDS(low_b, high_b, wb[i & 3], k);
            if (i < 12) {
                extend(wa, i);
                extend(wb, i);
            }
            if (i < 8) {
                uint64_t word;
                memcpy(&word, b + 8 * i, 8);
                sum = _mm_crc32_u64(sum, word);
            }
        }
        low_a = _mm_add_epi32(low_a, old_low_a);
        high_a = _mm_add_epi32(high_a, old_high_a);
        low_b = _mm_add_epi32(low_b, old_low_b);
        high_b = _mm_add_epi32(high_b, old_high_b);
    }
    _mm_storeu_si128((__m128i *)state_a, low_a);
    _mm_storeu_si128((__m128i *)(state_a + 4), high_a);
    _mm_storeu_si128((__m128i *)state_b, low_b);
    _mm_storeu_si128((__m128i *)(state_b + 4), high_b);
    return (uint32_t)sum;
}

enum { CRC_STRIDE = 2048 };

/* What CRC_STRIDE more zero bytes make of a CRC, by each of its four bytes; filled on first use, by every thread alike. */
static uint32_t crc_strides[4][256];
static volatile int crc_strides_ready;

SHA_TARGET static void fill_crc_strides(void) {
    for (int byte = 0; byte < 4; ++byte) {
        for (uint32_t i = 0; i < 256; ++i) {
            uint64_t sum = i << 8 * byte;
            for (int n = 0; n < CRC_STRIDE; n += 8) sum = _mm_crc32_u64(sum, 0);
            crc_strides[byte][i] = (uint32_t)sum;
        }
    }
    __sync_synchronize();
    crc_strides_ready = 1;
}

static inline uint32_t after_stride(uint32_t crc) {
    return crc_strides[0][crc & 255] ^ crc_strides[1][crc >> 8 & 255] ^ crc_strides[2][crc >> 16 & 255] ^
           crc_strides[3][crc >> 24];
}

/* The instruction takes one word per cycle but its result comes three cycles later: three pieces go side by side, and
 * a CRC being linear, that of a piece is moved past the next one by what as many zeros would make of it. */
SHA_TARGET static uint32_t crc_fast(uint32_t crc, const uint8_t *data, size_t n) {
    if (n >= 3 * CRC_STRIDE && !crc_strides_ready) fill_crc_strides();
    uint64_t sum = crc;
    for (; n >= 3 * CRC_STRIDE; n -= 3 * CRC_STRIDE, data += 3 * CRC_STRIDE) {
        uint64_t second = 0, third = 0;
        for (int i = 0; i < CRC_STRIDE; i += 8) {
            uint64_t words[3];
            for (int piece = 0; piece < 3; ++piece) memcpy(words + piece, data + piece * CRC_STRIDE + i, 8);
            sum = _mm_crc32_u64(sum, words[0]);
            second = _mm_crc32_u64(second, words[1]);
            third = _mm_crc32_u64(third, words[2]);
        }
        sum = after_stride(after_stride((uint32_t)sum) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; n >= 8; n -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        sum = _mm_crc32_u64(sum, word);
    }
    return crc_plain((uint32_t)sum, data, n);
}
#endif

/* Slicing by eight; the tables are filled on first use, by every thread alike. */
static uint32_t crc_tables[8][256];
static volatile int crc_tables_ready;

static void fill_crc_tables(void) {
    for (uint32_t i = 0; i < 256; ++i) {
        uint8_t byte = (uint8_t)i;
        crc_tables[0][i] = crc_plain(0, &byte, 1);
    }
    for (int t = 1; t < 8; ++t) {
        for (int i = 0; i < 256; ++i) {
            uint32_t before = crc_tables[t - 1][i];
            crc_tables[t][i] = before >> 8 ^ crc_tables[0][before & 255];
        }
    }
    __sync_synchronize();
    crc_tables_ready = 1;
}

static uint32_t crc_sliced(uint32_t crc, const uint8_t *data, size_t n) {
    if (!crc_tables_ready) fill_crc_tables();
    for (; n >= 8; n -= 8, data += 8) {
        uint32_t first = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | (uint32_t)data[3] << 24);
        crc = crc_tables[7][first & 255] ^ crc_tables[6][first >> 8 & 255] ^ crc_tables[5][first >> 16 & 255] ^
              crc_tables[4][first >> 24] ^ crc_tables[3][data[4]] ^ crc_tables[2][data[5]] ^
              crc_tables[1][data[6]] ^ crc_tables[0][data[7]];
    }
    return crc_plain(crc, data, n);
}

static uint32_t crc_update(uint32_t crc, const uint8_t *data, size_t n) {
#if KQ_X86
    if (__builtin_cpu_supports("sse4.2")) return crc_fast(crc, data, n);
#endif
    return crc_sliced(crc, data, n);
}

/* CRC-32C of `data` after bytes whose CRC-32C is `crc` (0 for none). */
uint32_t kq_crc32c(uint32_t crc, const uint8_t *data, size_t n) {
    return ~crc_update(~crc, data, n);
}

/* Whether kq_sha256_* and kq_digest may be called: the processor has SHA instructions. */
int32_t kq_digest_available(void) {
#if KQ_X86
    uint32_t a, b, c, d;
    if (!__builtin_cpu_supports("sse4.2") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return b >> 29 & 1;
#else
    return 0;
#endif
}

void kq_sha256_init(kq_sha256 *hash) {
    static const uint32_t start[8] = {0x9b05688c, 0x510e527f, 0xbb67ae85, 0x6a09e667,
                                      0x5be0cd19, 0x1f83d9ab, 0xa54ff53a, 0x3c6ef372};
    memcpy(hash->state, start, sizeof start);
    hash->bytes = 0;
}

#if KQ_X86
/* Completes the block that `hash` has begun, as far as `data` goes; how much of it was taken. */
static size_t complete_block(kq_sha256 *hash, const uint8_t *data, size_t n) {
    size_t held = hash->bytes % 64;
    if (!held) return 0;
    size_t taken = 64 - held < n ? 64 - held : n;
    memcpy(hash->tail + held, data, taken);
    hash->bytes += taken;
    if (held + taken == 64) blocks_of_one(hash->state, hash->tail, 1);
    return taken;
}

/* Takes the rest of a piece, of which a block at most may stay incomplete. */
static void take_rest(kq_sha256 *hash, const uint8_t *data, size_t n) {
    blocks_of_one(hash->state, data, n / 64);
    memcpy(hash->tail, data + n / 64 * 64, n % 64);
    hash->bytes += n;
}

void kq_sha256_update(kq_sha256 *hash, const uint8_t *data, size_t n) {
    size_t taken = complete_block(hash, data, n);
    if (taken < n) take_rest(hash, data + taken, n - taken);
}

void kq_sha256_final(const kq_sha256 *hash, uint8_t *out) {
    static const int order[8] = {3, 2, 7, 6, 1, 0, 5, 4}; /* where A .. H are in `state` */
    kq_sha256 last = *hash;
    uint8_t padding[128] = {0x80};
    size_t zeros = (119 - last.bytes % 64) % 64 + 1;
    uint64_t bits = last.bytes * 8;
    for (int i = 0; i < 8; ++i) padding[zeros + i] = (uint8_t)(bits >> (56 - 8 * i));
    kq_sha256_update(&last, padding, zeros + 8);
    for (int i = 0; i < 8; ++i) {
        uint32_t word = last.state[order[i]];
        for (int j = 0; j < 4; ++j) out[4 * i + j] = (uint8_t)(word >> (24 - 8 * j));
    }
}

/* Feeds `data` to both hashes, which may be at different places of a block, and to the CRC-32C. */
uint32_t kq_digest(kq_sha256 *whole, kq_sha256 *part, uint32_t crc, const uint8_t *data, size_t n) {
    size_t a = complete_block(whole, data, n), b = complete_block(part, data, n);
    size_t blocks = (n - (a > b ? a : b)) / 64;
    crc = crc_update(~crc, data, b);
    crc = blocks_of_two(whole->state, data + a, part->state, data + b, blocks, crc);
    whole->bytes += 64 * blocks;
    part->bytes += 64 * blocks;
    a += 64 * blocks;
    b += 64 * blocks;
    crc = crc_update(crc, data + b, n - b);
    if (a < n) take_rest(whole, data + a, n - a);
    if (b < n) take_rest(part, data + b, n - b);
    return ~crc;
}
#else
void kq_sha256_update(kq_sha256 *hash, const uint8_t *data, size_t n) {
    (void)hash, (void)data, (void)n;
}

void kq_sha256_final(const kq_sha256 *hash, uint8_t *out) {
    (void)hash, (void)out;
}

uint32_t kq_digest(kq_sha256 *whole, kq_sha256 *part, uint32_t crc, const uint8_t *data, size_t n) {
    (void)whole, (void)part;
    return kq_crc32c(crc, data, n);
}
#endif
