/* Two choices for a super-block compared as a decoder would see them, in double precision. Plain C, shared by all
 * instruction sets. */
#include "kq_closer.h"

#include "kq_fit.h"

/* A format: `subs` sub-blocks, quants low..top. */
typedef struct { int subs, low, top; } format;

static format format_of(int type) {
    switch (type) {
    case KQ_TYPE_Q4_K:
        return (format){8, 0, 15};
    case KQ_TYPE_Q3_K:
        return (format){16, -4, 3};
    default:
        return (format){16, 0, 3};
    }
}

/* The weight of each code in each sub-block. */
typedef struct {
    double weights[16][16];
    double units[16];
} super;

static void read_super(const kq_row *row, int64_t block, format f, super *out) {
    const uint8_t *packed = row->packed + KQ_SUPER / 2 * block, *scales = row->scales + KQ_SUPER / KQ_BLOCK * block;
    const float *importance = row->importance ? row->importance + KQ_SUPER * block : NULL;
    int size = KQ_SUPER / f.subs;
    memset(out->weights, 0, sizeof out->weights);
    for (int i = 0; i < KQ_SUPER; ++i) {
        int code = i & 1 ? packed[i / 2] >> 4 : packed[i / 2] & 15;
        double unit = kq_unit(scales[i / KQ_BLOCK]);
        out->units[i / size] = unit;
        out->weights[i / size][code] += importance ? (double)importance[i] : 1;
    }
}

static double decoded_error(const super *s, format f, const kq_indices *c) {
    double total = 0;
    for (int j = 0; j < f.subs; ++j) {
        float scale = (float)kq_half_to_double(c->d) * (float)c->scales[j];
        float minimum = (float)kq_half_to_double(c->dmin) * (float)c->minima[j];
        double inverse = scale != 0 ? 1.0 / scale : 0;
        for (int code = 0; code < 16; ++code) {
            if (!(s->weights[j][code] > 0)) continue;
            double x = kq_level[code] * s->units[j];
            float q = (float)kq_rint(kq_clamp((x + minimum) * inverse, f.low, f.top));
            double miss = (double)(scale * q - minimum) - x;
            total += s->weights[j][code] * (miss * miss);
        }
    }
    return total;
}

int kq_closer(const kq_row *row, int64_t block, int type, const kq_indices *a, const kq_indices *b) {
    format f = format_of(type);
    super s;
    read_super(row, block, f, &s);
    return decoded_error(&s, f, a) < decoded_error(&s, f, b);
}
