/* Six-bit scales and minima of eight sub-blocks in twelve bytes, as Q4_K and Q5_K hold them. Included after
 * kq_affine_search.h. */
#ifndef KQ_SIX_BITS_H
#define KQ_SIX_BITS_H

KQ_INLINE void pack_scales(const kq_choice *choice, uint8_t *out) {
    for (int i = 0; i < 4; ++i) {
        int scale = (int)choice->scales[i], high_scale = (int)choice->scales[i + 4];
        int min = (int)choice->minima[i], high_min = (int)choice->minima[i + 4];
        out[i] = (uint8_t)(scale | high_scale >> 4 << 6);
        out[i + 4] = (uint8_t)(min | high_min >> 4 << 6);
        out[i + 8] = (uint8_t)((high_scale & 15) | high_min << 4);
    }
}

#endif
