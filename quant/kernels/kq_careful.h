/* Second opinion on a super-block to which the fast searches of Q4_K, Q3_K and Q2_K give no guarantee; see
 * kq_careful.c. */
#ifndef KQ_CAREFUL_H
#define KQ_CAREFUL_H

#include "kq.h"

/* What a super-block stores beside its quants. Sub-block j decodes to d * scales[j] * q - dmin * minima[j]. */
typedef struct {
    uint16_t d, dmin; /* fp16 bits; dmin is 0 in Q3_K */
    int8_t scales[16];
    uint8_t minima[16];
} kq_indices;

/* Replaces `best` where ggml's own encoder would choose indices with less error, and says whether it did. `type` is
 * KQ_TYPE_Q4_K, KQ_TYPE_Q3_K or KQ_TYPE_Q2_K. */
int kq_careful(const kq_row *row, int64_t block, int type, kq_indices *best);

#endif
