/* Encodes fixed pseudo-random rows by every path of this machine and every type, requires the bytes of the scalar path,
 * and prints one hash of them: equal on every processor. Built and run by scripts/compare_paths.sh.
 */
#include "../quant/kernels/kq.h"

#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 24, COLS = 2304 };

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

int main(void) {
    static const int ranges[][3] = {{116, 119, 0}, {110, 115, 0}, {110, 119, 0}, {104, 123, 0}, {90, 112, 0},
                                    {138, 156, 0}, {0, 252, 0},   {110, 125, 1}, {140, 151, 1}, {0, 252, 1}};
    static const int types[] = {KQ_TYPE_MXFP4, KQ_TYPE_Q8_0, KQ_TYPE_Q6_K, KQ_TYPE_Q5_K, KQ_TYPE_Q4_K, KQ_TYPE_Q3_K,
                                KQ_TYPE_Q2_K,  KQ_TYPE_Q4_0, KQ_TYPE_Q4_1, KQ_TYPE_Q5_0, KQ_TYPE_Q5_1};
    static const char *const names[] = {"scalar", "avx2", "avx512", "neon"};
    static uint8_t packed[ROWS * COLS / 2], scales[ROWS * COLS / 32], expected[ROWS * COLS * 2], out[ROWS * COLS * 2];
    float importance[COLS];
    uint64_t hash = 14695981039346656037ull;
    for (size_t r = 0; r < sizeof ranges / sizeof ranges[0]; ++r) {
        fill(packed, scales, ranges[r][0], ranges[r][1], ranges[r][2]);
        for (int i = 0; i < COLS; ++i) {
            uint32_t r = next_random();
            importance[i] = (float)(r % 1000) * (r & 0x10000 ? 1.0f : 0.001f);
        }
        for (size_t t = 0; t < sizeof types / sizeof types[0]; ++t) {
            if (!kq_supports(types[t])) continue;
            for (int weighted = 0; weighted < 2; ++weighted) {
                for (int isa = 0; isa < KQ_ISAS; ++isa) {
                    if (!kq_isa_available(isa)) continue;
                    kq_stats stats = {0};
                    uint8_t *target = isa == KQ_SCALAR ? expected : out;
                    memset(target, 0xa5, sizeof out);
                    int64_t result = kq_encode(types[t], isa, packed, scales, ROWS, COLS, weighted ? importance : NULL,
                                               target, &stats);
                    if (result != 0 || memcmp(expected, target, sizeof out) != 0) {
                        printf("type %d, %s, range %zu, weighted %d: result %ld\n", types[t], names[isa],
                               r, weighted, (long)result);
                        return 1;
                    }
                }
                for (size_t i = 0; i < sizeof expected; ++i) hash = (hash ^ expected[i]) * 1099511628211ull;
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
