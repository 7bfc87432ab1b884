/* The importance of the columns in the form that the searches of the K types read; see kq_importance.c. */
#ifndef KQ_IMPORTANCE_H
#define KQ_IMPORTANCE_H

#include "kq.h"

/* What a codec's prepare() returns: for each column its importance relative to the largest of the 256 of its
 * super-block, never below 2^-40; after these, for each super-block a byte with the effective number of its
 * columns, (sum w)^2 / sum w^2, 0 where many of them weigh nothing, and at most 255. A log-normal importance with sigma
 * 1.5 leaves about 40. */
void *kq_prepare_importance(const float *importance, int64_t cols);

static inline const float *kq_column_weights(const kq_row *row, int64_t block) {
    return row->weights ? (const float *)row->weights + KQ_SUPER * block : NULL;
}

static inline int kq_effective_columns(const kq_row *row, int64_t block) {
    return row->weights ? ((const uint8_t *)((const float *)row->weights + row->cols))[block] : 255;
}

#endif
