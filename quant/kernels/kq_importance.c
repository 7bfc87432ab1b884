/* Importance relative to the super-block. The floor keeps columns of no importance defined: they are fitted as well as
 * the others leave room for. Where all are zero, all count alike. */
#include "kq_importance.h"

#include <stdlib.h>

/* So many columns of next to no weight make a super-block's own least error doubtful, whatever the others weigh. */
static const int most_idle = 64;

void *kq_prepare_importance(const float *importance, int64_t cols) {
    float *weights = malloc((size_t)cols * sizeof *weights + (size_t)(cols / KQ_SUPER));
    if (!weights) return NULL;
    uint8_t *effective = (uint8_t *)(weights + cols);
    for (int64_t first = 0; first < cols; first += KQ_SUPER) {
        float largest = 0;
        int idle = 0;
        double sum = 0, squares = 0;
        for (int i = 0; i < KQ_SUPER; ++i) largest = importance[first + i] > largest ? importance[first + i] : largest;
        for (int i = 0; i < KQ_SUPER; ++i) {
            float relative = largest > 0 ? importance[first + i] / largest : 1;
            relative = relative > 0x1p-40f ? relative : 0x1p-40f;
            weights[first + i] = relative;
            sum += relative;
            squares += (double)relative * relative;
            idle += relative < 0x1p-20f;
        }
        double columns = sum * sum / squares;
        effective[first / KQ_SUPER] = idle > most_idle ? 0 : columns < 255 ? (uint8_t)columns : 255;
    }
    return weights;
}
