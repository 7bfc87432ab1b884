/* Starting lattices of the searches, and what a packed byte holds; filled when the library is loaded, kq_tables.c. */
#ifndef KQ_TABLES_H
#define KQ_TABLES_H

#include "kq.h"

enum { KQ_MINIMA = 8, KQ_SIGNED_STEPS = 2 };

/* Lattices s * q - m for sub-blocks whose codes have one range, in units of the doubled levels. Lane l has scale
 * 1 / inverse[l] and minima max(0, first[l] + i * step[l]). cost[i][c / 4][l][c % 4] is the squared error of code c in
 * units of s^2 / 200, at most 255. */
typedef struct {
    float inverse[16], first[16], step[16];
    uint8_t cost[KQ_MINIMA][4][16][4];
} __attribute__((aligned(64))) kq_affine_class;

/* Lattices s * q without a minimum, for sub-blocks whose largest magnitude is one level. Lanes 8..15 have s < 0. */
typedef struct {
    float inverse[KQ_SIGNED_STEPS][16];
    uint8_t cost[KQ_SIGNED_STEPS][4][16][4];
} __attribute__((aligned(64))) kq_signed_class;

/* Index: 8 * code of the largest negative magnitude + code of the largest positive one, 0..7 each. */
extern kq_affine_class kq_classes_q4_k[64], kq_classes_q2_k[64];
extern kq_affine_class kq_classes_q4_k_weighted[64], kq_classes_q2_k_weighted[64];
/* Index: code of the largest magnitude. */
extern kq_signed_class kq_classes_q3_k[8];

/* How often each code occurs in packed byte b; -0.0 counts as 0. */
extern uint8_t kq_pair_counts[256][16];

/* Trial values of d and dmin: factor of the largest scale or minimum of the super-block, plus `lift` fp16 steps. */
typedef struct { float factor[32], lift[32]; } __attribute__((aligned(64))) kq_series;
typedef struct { kq_series scales, minima; } kq_trials;
extern kq_trials kq_trials_q6_k, kq_trials_q4_k, kq_trials_q3_k, kq_trials_q2_k;

#endif
