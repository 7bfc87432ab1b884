/* Rounding to fp16, in integers so that every machine agrees. */
#include "kq.h"

uint16_t kq_half_from_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 63 << 15);
    int exponent = (int)(bits >> 52 & 2047) - 1023;
    uint64_t mantissa = (bits & ((1ull << 52) - 1)) | 1ull << 52;
    if (exponent > 15) return sign | 0x7bff;
    if (exponent < -25) return sign;
    /* Bits below the last place that fp16 keeps: 42 for normal numbers, more for subnormal ones. */
    int drop = exponent >= -14 ? 42 : 42 + (-14 - exponent);
    uint64_t kept = mantissa >> drop;
    uint64_t rest = mantissa & ((1ull << drop) - 1);
    uint64_t tie = 1ull << (drop - 1);
    kept += rest > tie || (rest == tie && (kept & 1));
    uint64_t half = exponent >= -14 ? ((uint64_t)(exponent + 14) << 10) + kept : kept;
    return sign | (uint16_t)(half > 0x7bff ? 0x7bff : half);
}
