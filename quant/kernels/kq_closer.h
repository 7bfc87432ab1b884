/* Which of two choices for a super-block of Q4_K, Q3_K or Q2_K is better; see kq_closer.c. */
#ifndef KQ_CLOSER_H
#define KQ_CLOSER_H

#include "kq.h"

/* What a super-block stores beside its quants. Sub-block j decodes to d * scales[j] * q - dmin * minima[j]. */
typedef struct {
    uint16_t d, dmin; /* fp16 bits; dmin is 0 in Q3_K */
    int8_t scales[16];
    uint8_t minima[16];
} kq_indices;

/* Whether `a` leaves less error than `b`. `type` is KQ_TYPE_Q4_K, KQ_TYPE_Q3_K or KQ_TYPE_Q2_K. */
int kq_closer(const kq_row *row, int64_t block, int type, const kq_indices *a, const kq_indices *b);

#endif
