/* Encodes fixed pseudo-random rows by every path of this machine and every type, requires the bytes of the scalar path,
 * and prints one hash of them: equal on every processor. Built and run by scripts/compare_paths.sh.
 */
#include "../quant/kernels/kq.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 24, COLS = 2304 };

static const char *const names[] = {"scalar", "avx2", "avx512", "neon"};
static uint64_t hash = 14695981039346656037ull;
static uint64_t state = 88172645463325252ull;

static uint32_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/* Scale bytes from `low` to `high`; with `sparse` most codes are zero and the rest few. */
static void fill(uint8_t *packed, uint8_t *scales, int low, int high, int sparse) {
    for (int i = 0; i < ROWS * COLS / 32; ++i) scales[i] = (uint8_t)(low + next_random() % (uint32_t)(high - low + 1));
    for (int i = 0; i < ROWS * COLS / 2; ++i) {
        uint32_t r = next_random();
        packed[i] = (uint8_t)(sparse ? (r & 0x700 ? 0 : r & 0x3b) : r);
    }
}

/* Numbers of both signs, roughly Gaussian, within `octaves` of 1; with `sparse` most are zero. */
static void fill_floats(float *values, int octaves, int sparse) {
    for (int i = 0; i < ROWS * COLS; ++i) {
        int sum = -(1 << 18);
        for (int k = 0; k < 8; ++k) sum += (int)(next_random() >> 16);
        float size = (float)kq_pow2((int)(next_random() % (uint32_t)(octaves + 1)) - octaves - 17);
        values[i] = sparse && next_random() & 7 ? 0 : (float)sum * size;
    }
}

/* What to encode: MXFP4 where `values` is NULL. */
typedef struct { const uint8_t *packed, *scales; const float *values, *importance; } input;

static int64_t encode(const input *in, int type, int isa, uint8_t *out) {
    kq_stats stats = {0};
    if (in->values) {
        return kq_encode_floats(type, isa, in->values, 0, ROWS, COLS, in->importance, out, &stats);
    }
    return kq_encode(type, isa, in->packed, in->scales, ROWS, COLS, in->importance, out, &stats);
}

/* Encodes by every path and adds the bytes to the hash; 0 if one differs. */
static int agree(const input *in, int type) {
    static uint8_t expected[ROWS * COLS * 2], out[ROWS * COLS * 2];
    for (int isa = 0; isa < KQ_ISAS; ++isa) {
        if (!kq_isa_available(isa)) continue;
        uint8_t *target = isa == KQ_SCALAR ? expected : out;
        memset(target, 0xa5, sizeof out);
        int64_t result = encode(in, type, isa, target);
        if (result != 0 || memcmp(expected, target, sizeof out) != 0) {
            printf("type %d from %s, %s, weighted %d: result %ld\n", type, in->values ? "floats" : "MXFP4", names[isa],
                   in->importance != NULL, (long)result);
            return 0;
        }
    }
    for (size_t i = 0; i < sizeof expected; ++i) hash = (hash ^ expected[i]) * 1099511628211ull;
    return 1;
}

int main(void) {
    static const int ranges[][3] = {{116, 119, 0}, {110, 115, 0}, {110, 119, 0}, {104, 123, 0}, {90, 112, 0},
                                    {138, 156, 0}, {0, 252, 0},   {110, 125, 1}, {140, 151, 1}, {0, 252, 1}};
    static const int types[] = {KQ_TYPE_MXFP4, KQ_TYPE_Q8_0, KQ_TYPE_Q6_K, KQ_TYPE_Q5_K, KQ_TYPE_Q4_K, KQ_TYPE_Q3_K,
                                KQ_TYPE_Q2_K,  KQ_TYPE_Q4_0, KQ_TYPE_Q4_1, KQ_TYPE_Q5_0, KQ_TYPE_Q5_1};
    static uint8_t packed[ROWS * COLS / 2], scales[ROWS * COLS / 32];
    static float values[ROWS * COLS];
    float importance[COLS];
    for (size_t r = 0; r < sizeof ranges / sizeof ranges[0]; ++r) {
        fill(packed, scales, ranges[r][0], ranges[r][1], ranges[r][2]);
        for (int i = 0; i < COLS; ++i) {
            uint32_t r = next_random();
            importance[i] = (float)(r % 1000) * (r & 0x10000 ? 1.0f : 0.001f);
        }
        fill_floats(values, 3 * (int)r, ranges[r][2]);
        for (size_t t = 0; t < sizeof types / sizeof types[0]; ++t) {
            for (int weighted = 0; weighted < 2; ++weighted) {
                const float *weights = weighted ? importance : NULL;
                input codes = {packed, scales, NULL, weights}, floats = {NULL, NULL, values, weights};
                if (kq_supports(types[t]) && !agree(&codes, types[t])) return 1;
                if (kq_supports_floats(types[t]) && !agree(&floats, types[t])) return 1;
            }
        }
    }
    printf("%016llx", (unsigned long long)hash);
    for (int isa = 0; isa < KQ_ISAS; ++isa) {
        if (kq_isa_available(isa)) printf(" %s", names[isa]);
    }
    printf("\n");
    return 0;
}
